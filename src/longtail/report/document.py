"""`longtail report`: run folders as one page that needs nothing else, be it a network, a script or a font."""

import base64
import hashlib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from longtail import __version__, runs
from longtail.errors import UserError
from longtail.report import by_class, closer, cost, gradients, sections, words
from longtail.report.chapter import Chapter, make_chapters
from longtail.report.html import Element, Ours, el, written
from longtail.report.parts import name, plural
from longtail.report.table import Row, make_rows


def report(paths: Iterable[Path | str] | Path | str, out: Path | str = "report.html") -> Path:
    """Write the finished runs at or below `paths` as one HTML page; its path. The twin of `longtail report`.

    Of one method: data, results, accuracy by class frequency, training curves, calibration, confusions, rare classes, features.
    Of several: who is best and who is tied, wins and losses by class, accuracy against cost, and the same of each.
    """
    return write(make_rows(runs.finished(paths)), Path(out))


def write(rows: list[Row], out: Path) -> Path:
    if out.is_dir():
        raise UserError(f"-o {out} is a folder: name the file, as in {out / 'report.html'}")
    text = "<!doctype html>\n" + "".join(written(page(rows)))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        runs.write_text(out, text)
    except OSError as error:
        raise UserError(f"cannot write {out} ({error.strerror}): choose another -o") from error
    return out


def page(rows: list[Row]) -> Element:
    chapters = make_chapters(rows)
    several, count = len(chapters) > 1, sum(len(row.runs) for row in rows)
    what = rows[0].label if len(rows) == 1 else plural(len(rows), "method")
    title = f"{what} on {'; '.join(chapter.data for chapter in chapters)}"
    body = el(
        "main",
        el("h1", name(title)),
        el("section", el("h2", "In short"), *(part for c in chapters for part in in_short(c, several))),
        *(part for c in chapters for part in (el("h2", name(c.data) if several else "In detail"), *chapter_parts(c))),
        el("footer", f"Made by longtail {__version__} from {plural(count, 'run')}. Headings of tables sort them."),
    )
    style, script = Ours(_file("page.css")), Ours(_file("page.js"))
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy(style, script)),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("link", rel="icon", href="data:,"),
        el("title", f"longtail: {title}"),
        el("style", style),
    )
    return el("html", head, el("body", body, el("script", script)), lang="en")


def in_short(chapter: Chapter, named: bool) -> Iterable[Element]:
    if named:
        yield el("h3", name(chapter.data))
    yield el("div", *words.summary(chapter), class_="summary")
    yield words.trust(chapter)


def chapter_parts(chapter: Chapter) -> list[Element]:
    makers = (sections.results, by_class.by_frequency, by_class.wins, gradients.by_rank, cost.cost, sections.data)
    parts = [*(make(chapter) for make in makers), *closer.closer(chapter)]
    return [part for part in parts if part is not None]


def policy(style: str, script: str) -> str:
    """Nothing is fetched and nothing runs but our own style and script, known by their digests; images are in the page."""
    allowed = {"style-src": _digest(style), "script-src": _digest(script), "img-src": "data:"}
    rules = ["default-src 'none'", *(f"{kind} {source}" for kind, source in allowed.items())]
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _file(file: str) -> str:
    return resources.files("longtail.report").joinpath(file).read_text(encoding="utf-8")
