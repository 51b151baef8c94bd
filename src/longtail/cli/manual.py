"""The pages of docs/ in the terminal: `longtail docs`, and which of them helps with an error."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tyro.conf import Positional

from longtail.cli.parsing import parse
from longtail.errors import DiskFullError, Interrupted, UserError, unknown_name

# Where an error is raised says what it is about; the longest name that fits counts.
HELPS = {
    "longtail.autoconfig": "data",
    "longtail.cli.used": "use",
    "longtail.comparison": "choosing",
    "longtail.config": "commands",
    "longtail.config.section": "",  # which checks for others
    "longtail.data": "data",
    "longtail.distributed": "many",
    "longtail.engine": "start",
    "longtail.engine.failures": "data",
    "longtail.engine.distributed": "many",
    "longtail.engine.loggers": "figures",
    "longtail.engine.optim": "methods",
    "longtail.inference": "use",
    "longtail.methods": "methods",
    "longtail.models": "methods",
    "longtail.models.weights": "data",
    "longtail.recipes": "data",
    "longtail.recipes.imagenet_scale": "large",
    "longtail.reporting": "report",
    "longtail.paper.figures": "figures",
    "longtail.paper.reproduce": "reproduce",
    "longtail.run_folder": "start",
    "longtail.theory": "theory",
    "longtail.views": "data",
}


@dataclass(frozen=True, kw_only=True)
class Docs:
    """Read the documentation in the terminal."""

    page: Positional[str | None] = None
    """One of its pages; without it, what pages there are."""


def run_docs(args: list[str]) -> None:
    show(parse(Docs, "docs", args).page)


def folder() -> Path:
    """In the installed package, or in the checkout that it is used from."""
    package = Path(__file__).parents[1]
    return next((place for place in (package / "docs", package.parents[1] / "docs") if place.is_dir()), package)


def pages() -> dict[str, Path]:
    return {page.stem: page for page in sorted(folder().glob("*.md"))}


def title(page: Path) -> str:
    return page.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")


def show(name: str | None) -> None:
    """One page, or what pages there are; where nobody looks, as it is written."""
    found = pages()
    if name is None:
        print(*(f"  {stem:10} {title(page)}" for stem, page in found.items()), sep="\n")
        return
    if name not in found:
        raise (
            unknown_name("page", name, found)
            if found
            else UserError("the pages were not installed with this package", kind="missing-file")
        )
    text = found[name].read_text(encoding="utf-8")
    if not sys.stdout.isatty():
        print(text, end="")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(re.sub(r"!\[([^]]*)]\([^)]*\)", r"*picture: \1*", text)))


def helpful(error: UserError) -> str:
    """Where to read on about an error, in brackets; nothing for one that only tells of a stop, or of a full disk."""
    page = page_of(error.__traceback__)
    return (
        f" (more: longtail docs {page})"
        if page in pages() and not isinstance(error, Interrupted | DiskFullError)
        else ""
    )


def page_of(trace: TracebackType | None) -> str | None:
    """Of the innermost module of ours that is not about errors as such."""
    found = None
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        fitting = [name for name in HELPS if f"{module}.".startswith(f"{name}.")]
        found = (HELPS[max(fitting, key=len)] if fitting else "") or found
        trace = trace.tb_next
    return found
