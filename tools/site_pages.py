"""Hooks of MkDocs for `make site`: pages from outside of docs/, the reference of the Python API, and links between pages.

Pages are written for the repository: their links are relative paths of files. The site has them at other addresses, listed in
SOURCES, so every link is rewritten. A link to a file that is not in the site stops the build (`mkdocs build --strict`).
"""

import importlib
import inspect
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]

# Pages and files of the site whose source is outside of docs/.
SOURCES = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "conduct.md": "CODE_OF_CONDUCT.md",
    "security.md": "SECURITY.md",
    "notebook.md": "notebooks/paco.ipynb",
    "results/index.md": "results/README.md",
    "framework.svg": "src/longtail/reporting/framework.svg",
    "site.css": "tools/site.css",
    "iframe-worker.js": "tools/iframe-worker.js",
    "CITATION.cff": "CITATION.cff",
    "constraints.txt": "constraints.txt",
    "LICENSE.txt": "LICENSE",
}
SOURCES |= {
    f"results/{path.name}": f"results/{path.name}"
    for kind in ("md", "png", "json")
    for path in (ROOT / "results").glob(f"*.{kind}")
}
SOURCES |= {f"examples/{path.stem}.md": f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
del SOURCES["results/README.md"]

# Files of the repository that other pages of the site stand for.
STANDS_FOR = {"CONTRIBUTING.md": "contributing.md"}

# Modules of the reference and their titles. Names of `longtail` itself are on the first page.
MODULES = {
    "nn": "PaCo for your own loop",
    "sklearn": "Classifiers for embeddings",
    "losses": "Losses",
    "metrics": "Metrics",
    "theory": "Theory",
    "recipes": "Recipes",
    "autoconfig": "Automatic settings",
}
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"(^```.*?^```)", re.S | re.M)
NESTED_ITEM = re.compile(r"^((?:  )+)(?=- )", re.M)
WITHOUT_NAVIGATION = "index.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of the reference, the examples and further results to the navigation."""
    for section in config.nav or []:
        if "Results" in section:
            named = {page if isinstance(page, str) else next(iter(page.values())) for page in section["Results"]}
            section["Results"] += [name for name in SOURCES if re.match(r"results/.*\.md$", name) and name not in named]
        if "Reference" in section:
            api = [{"Functions": "api/index.md"}, *({title: f"api/{name}.md"} for name, title in MODULES.items())]
            section["Reference"].insert(1, {"Python API": api})
        if "Tutorials" in section:
            examples = sorted(name for name in SOURCES if name.startswith("examples/"))
            section["Tutorials"].append({"Examples": [{Path(name).stem + ".py": name} for name in examples]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of SOURCES and the pages of the reference."""
    for address, source in SOURCES.items():
        if source.endswith(".ipynb"):
            added = File.generated(config, address, content=format_notebook(ROOT / source))
        elif source.endswith(".py"):
            text = f"# {source}\n\n```python\n{(ROOT / source).read_text()}```\n"
            added = File.generated(config, address, content=text)
        else:
            added = File.generated(config, address, abs_src_path=str(ROOT / source))
        files.append(added)
    for address, text in format_reference().items():
        files.append(File.generated(config, address, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between files of the repository to links between pages of the site, and indent nested lists by four."""
    address = page.file.src_uri
    if address == WITHOUT_NAVIGATION:
        page.meta["hide"] = ["navigation"]
    source = SOURCES.get(address, f"docs/{address}")
    parts = FENCE.split(markdown)
    for i in range(0, len(parts), 2):
        linked = LINK.sub(lambda m: m[1] + find_address(m[2], source, address) + m[3], parts[i])
        parts[i] = NESTED_ITEM.sub(r"\1\1", linked)
    return "".join(parts)


def find_address(link: str, source: str, address: str) -> str:
    """Return a link of a file of the repository as a link of the site.

    Args:
        link: The link, relative to the folder of the file.
        source: Path of the file in the repository.
        address: Address of its page in the site.
    """
    if ":" in link:  # https:, mailto:
        return link
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    addresses = {path: place for place, path in SOURCES.items()} | STANDS_FOR
    place = addresses.get(target, target.removeprefix("docs/"))
    return posixpath.relpath(place, posixpath.dirname(address) or ".")


# Generated pages


def format_notebook(path: Path) -> str:
    """Return a notebook as Markdown, with its outputs."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts += [format_output(output) for output in cell.get("outputs", [])]
    return "\n\n".join(parts) + "\n"


def format_output(output: dict[str, Any]) -> str:
    """Return an output of a notebook cell as Markdown: an image, or text."""
    data = output.get("data", {})
    if "image/png" in data:
        return f"![Plot of the cell above](data:image/png;base64,{''.join(data['image/png']).replace(chr(10), '')})"
    text = "".join(data.get("text/plain", output.get("text", "")))
    return f"```text\n{text.rstrip()}\n```"


def format_reference() -> dict[str, str]:
    """Return the pages of the Python API by their addresses, for mkdocstrings."""
    import longtail

    intro = "# Python API\n\n[From Python](../python.md) explains these functions with examples.\n"
    pages = {"api/index.md": intro + format_names(longtail)}
    for name, title in MODULES.items():
        module = importlib.import_module(f"longtail.{name}")
        pages[f"api/{name}.md"] = f"# {title}: `longtail.{name}`\n\n{inspect.getdoc(module)}\n{format_names(module)}"
    return pages


def format_names(module: Any) -> str:
    """Return a line for mkdocstrings for each public function and class of a module, with the name of its definition."""
    names = getattr(module, "__all__", None) or [name for name, value in vars(module).items() if is_own(value, module)]
    values = [getattr(module, name) for name in names if not name.startswith("_")]
    # functions before classes, and classes of the module itself before those that it imports
    shown = sorted(filter(is_documented, values), key=lambda v: (inspect.isclass(v), v.__module__ != module.__name__))
    return "".join(f"\n::: {value.__module__}.{value.__qualname__}\n" for value in shown)


def is_own(value: Any, module: Any) -> bool:
    """Return whether a function or class is defined in a module or its submodules."""
    return is_documented(value) and value.__module__.startswith(module.__name__)


def is_documented(value: Any) -> bool:
    """Return whether a value is a function or a class with documentation of its own."""
    return (inspect.isfunction(value) or inspect.isclass(value)) and bool(value.__doc__)
