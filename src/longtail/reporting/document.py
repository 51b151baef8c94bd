"""`longtail report`: run folders as one page that needs nothing else, be it a network, a script or a font."""

import base64
import functools
import hashlib
import os
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from longtail import __version__, files, run_folder
from longtail.errors import UserError, error_text
from longtail.progress import log_warning
from longtail.reporting import by_class, closer, cost, gradients, sections, words
from longtail.reporting.chapter import DatasetResults, make_chapters
from longtail.reporting.html import Element, TrustedText, el, written
from longtail.reporting.parts import name, plural
from longtail.reporting.table import ResultRow, make_rows
from longtail.reporting.training import unfinished
from longtail.text import escape_nonprintable

STYLE = "page.css"
SCRIPTS = {False: ("page.js",), True: ("page.js", "watch.js")}  # of a page that lies in a file, and of a live one


def report(paths: Iterable[Path | str] | Path | str, out: Path | str = "report.html") -> Path:
    """Write the runs at or below `paths` as one HTML page; its path. The twin of `longtail report`.

    Of one method: data, results, accuracy by class frequency, training curves, calibration, confusions, rare classes, features.
    Of several: who is best and who is tied, wins and losses by class, accuracy against cost, and the same of each.
    Runs that are not finished are shown by their progress and curves, and what cannot be read is named.
    """
    paths, out = [paths] if isinstance(paths, str | Path) else list(paths), Path(out)
    check_out(out)
    ended, others = run_folder.split_finished(paths)
    if not ended and not others:
        run_folder.finished(paths)  # says so
    found = gathered(ended, others)
    try:
        whole = page(found)
    except Exception:
        found = without_failures(found)
        whole = page(found)
    if found.size == 0:
        raise UserError(found.bad[0], kind="damaged-file")
    for why_not in found.bad:
        log_warning(f"left out: {escape_nonprintable(why_not[:1000])}")
    return write(whole, out)


def check_out(out: Path) -> None:
    """Before the work is done whose result goes there."""
    if os.path.isdir(out):
        raise UserError(f"-o {out} is a folder: name the file, as in {out / 'report.html'}", kind="exists")
    if out.suffix.lower() not in ("", ".html", ".htm"):
        html = out.with_suffix(".html")
        raise UserError(f"-o {out}: the page is HTML, name it as in -o {html}; a browser can print it to other formats")


class Gathered(NamedTuple):
    """Runs to be shown."""

    rows: Sequence[ResultRow]
    begun: Sequence[run_folder.StartedRun] = ()
    bad: Sequence[str] = ()
    """Why others cannot be."""

    @property
    def size(self) -> int:
        return len(self.begun) + sum(len(row.runs) for row in self.rows)


def gathered(ended: Iterable[Path], others: Iterable[Path]) -> Gathered:
    """Of the folders of finished runs, and of those that have only begun."""
    done, bad = run_folder.readable(run_folder.read, ended)
    begun, worse = run_folder.readable(run_folder.read_begun, others)
    return Gathered(make_rows(done), begun, [*bad, *worse])


def without_failures(found: Gathered) -> Gathered:
    """Return the runs of which a page can be made; the others are named among the bad ones.

    Files are checked when they are read. This is for what no check foresees: one run must not take down the page of the others.
    """
    rows, begun, bad = [], [], list(found.bad)
    for row in found.rows:
        if _failure(Gathered([row])) is None:
            rows.append(row)
            continue
        sound = []
        for run in row.runs:
            if failure := _failure(Gathered(make_rows([run]))):
                bad.append(f"{run.folder}: {failure}")
            else:
                sound.append(run)
        rows += make_rows(sound)
    for started in found.begun:
        if failure := _failure(Gathered([], [started])):
            bad.append(f"{started.folder}: {failure}")
        else:
            begun.append(started)
    rest = Gathered(rows, begun, bad)
    if rest.size and (failure := _failure(rest)):
        return Gathered([], [], [*bad, f"the runs cannot be shown together: {failure}"])
    return rest


def _failure(found: Gathered) -> str | None:
    """Return what goes wrong when a page is made of the runs, in one line."""
    try:
        page(found)
    except Exception as error:
        return f"it cannot be shown ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    return None


def left_out(found: Gathered) -> list[Element]:
    return [el("p", "Left out: ", name(why_not, most=300), class_="absent") for why_not in found.bad]


def write(whole: Element, out: Path) -> Path:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with files.replace_output(out) as fresh:
            fresh.write_bytes(text(whole).encode())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {out} ({error_text(error)}): choose another -o", kind="not-writable") from error
    return out


def text(whole: Element) -> str:
    return "<!doctype html>\n" + "".join(written(whole))


def page(found: Gathered) -> Element:
    """Results of the finished runs, and the progress of those that have only begun."""
    parts = [unfinished(found.begun), *left_out(found), *finished(found.rows)]
    return assembled(title_of(found.rows, len(found.begun)), parts, found.size)


def title_of(rows: Sequence[ResultRow], begun: int) -> str:
    if not rows:
        return plural(begun, "unfinished run") if begun else "waiting for the first run"
    what = rows[0].label if len(rows) == 1 else plural(len(rows), "method")
    return f"{what} on {'; '.join(chapter.data for chapter in make_chapters(rows))}"


def finished(rows: Sequence[ResultRow]) -> list[Element]:
    """All that is told of finished runs: in short, then in detail."""
    if not rows:
        return []
    chapters = make_chapters(rows)
    several = len(chapters) > 1
    return [
        el("section", el("h2", "In short"), *(part for c in chapters for part in in_short(c, several))),
        *(part for c in chapters for part in (el("h2", name(c.data) if several else "In detail"), *chapter_parts(c))),
    ]


def assembled(title: str, parts: Iterable[Element | None], count: int, live: Element | None = None) -> Element:
    """The document, made from `count` runs; `live` is what a page that looks for news shows above all."""
    made = f"Made by longtail {__version__} from {plural(count, 'run')}. Headings of tables sort them."
    main = el("main", el("h1", name(title[0].upper() + title[1:])), *parts, el("footer", made))
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy(live is not None)),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("link", rel="icon", href="data:,"),
        el("title", f"longtail: {title}"),
        el("style", _file(STYLE)),
    )
    scripts = [el("script", _file(file)) for file in SCRIPTS[live is not None]]
    return el("html", head, el("body", live, main, *scripts), lang="en")


def in_short(chapter: DatasetResults, named: bool) -> Iterable[Element]:
    if named:
        yield el("h3", name(chapter.data))
    yield el("div", *words.summary(chapter), class_="summary")
    yield words.trust(chapter)


def chapter_parts(chapter: DatasetResults) -> list[Element]:
    makers = (sections.results, by_class.by_frequency, by_class.wins, gradients.by_rank, cost.cost, sections.data)
    parts = [*(make(chapter) for make in makers), *closer.method_details(chapter)]
    return [part for part in parts if part is not None]


def policy(live: bool = False) -> str:
    """Nothing is fetched and nothing runs but our own style and scripts, known by their digests; images are in the page.

    A live page may ask for itself.
    """
    scripts = " ".join(_digest(_file(file)) for file in SCRIPTS[live])
    allowed = {"style-src": _digest(_file(STYLE)), "script-src": scripts, "img-src": "data:"}
    allowed |= {"connect-src": "'self'"} if live else {}
    rules = ["default-src 'none'", *(f"{kind} {source}" for kind, source in allowed.items())]
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def _file(file: str) -> TrustedText:
    return TrustedText(resources.files("longtail.reporting").joinpath(file).read_text(encoding="utf-8"))
