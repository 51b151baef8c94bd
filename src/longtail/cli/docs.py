"""The command `docs`: the pages of docs/ in the terminal. Errors refer to the page that helps with them."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tyro.conf import Positional

from longtail.cli.parse import parse_arguments
from longtail.errors import DiskFullError, Interrupted, UserError, unknown_name

# Pages by the module that raises an error; the longest module name that matches is used.
PAGES_BY_MODULE = {
    "longtail.autoconfig": "data",
    "longtail.cli.cache": "data",
    "longtail.cli.predict": "use",
    "longtail.comparison": "choosing",
    "longtail.config": "commands",
    "longtail.config.section": "",  # called by other modules, which have pages
    "longtail.data": "data",
    "longtail.distillation": "distill",
    "longtail.engine": "start",
    "longtail.engine.failures": "data",
    "longtail.distributed": "many",
    "longtail.engine.distributed": "many",
    "longtail.engine.loggers": "figures",
    "longtail.engine.optim": "methods",
    "longtail.engine.teachers": "distill",
    "longtail.feature_cache": "data",
    "longtail.inference": "use",
    "longtail.methods": "methods",
    "longtail.models": "methods",
    "longtail.models.weights": "data",
    "longtail.recipes": "data",
    "longtail.recipes.imagenet_scale": "large",
    "longtail.recipes.method_presets": "methods",
    "longtail.reporting": "report",
    "longtail.paper.figures": "figures",
    "longtail.paper.reproduce": "reproduce",
    "longtail.paper.tables": "reproduce",
    "longtail.run_folder": "start",
    "longtail.theory": "theory",
    "longtail.views": "data",
}


@dataclass(frozen=True, kw_only=True)
class Docs:
    """Read the documentation in the terminal."""

    page: Positional[str | None] = None
    """The page to display (default: list all pages)."""


def run_docs(args: list[str]) -> None:
    """Run `longtail docs`."""
    page = parse_arguments(Docs, "docs", args).page
    if page is None:
        print(*(f"  {name:10} {read_title(path)}" for name, path in find_pages().items()), sep="\n")
    else:
        print_page(page)


def find_pages() -> dict[str, Path]:
    """Return the files of the pages by name, from the installed package or from the repository."""
    package = Path(__file__).parents[1]
    folders = (package / "docs", package.parents[1] / "docs")
    folder = next((folder for folder in folders if folder.is_dir()), package)
    return {path.stem: path for path in sorted(folder.glob("*.md"))}


def read_title(path: Path) -> str:
    """Return the title of a page."""
    return path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")


def print_page(name: str) -> None:
    """Print a page: formatted on a terminal, otherwise as Markdown."""
    pages = find_pages()
    if not pages:
        raise UserError("the documentation was not installed with this package", kind="missing-file")
    if name not in pages:
        raise unknown_name("page", name, pages)
    text = pages[name].read_text(encoding="utf-8")
    if not sys.stdout.isatty():
        print(text, end="")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(re.sub(r"!\[([^]]*)]\([^)]*\)", r"*picture: \1*", text)))


def suggest_page(error: UserError) -> str:
    """Return a reference to the page that helps with an error, in parentheses.

    It is empty for errors without a page, and for interruptions and full disks.
    """
    page = find_page_of_error(error.__traceback__)
    if isinstance(error, Interrupted | DiskFullError) or page not in find_pages():
        return ""
    return f" (more: longtail docs {page})"


def find_page_of_error(traceback: TracebackType | None) -> str | None:
    """Return the page of the innermost module in a traceback that has one."""
    page = None
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        matches = [name for name in PAGES_BY_MODULE if f"{module}.".startswith(f"{name}.")]
        page = (PAGES_BY_MODULE[max(matches, key=len)] if matches else "") or page
        traceback = traceback.tb_next
    return page
