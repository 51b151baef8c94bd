"""The page of `longtail report`: run folders as one HTML file that needs no network and no other files."""

import base64
import functools
import hashlib
import os
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from longtail import __version__, files, run_folder
from longtail.errors import UserError, check_is_path, error_text, list_paths
from longtail.progress import log_warning
from longtail.reporting import class_accuracy, sections, training_curves
from longtail.reporting.dataset_results import DatasetResults, group_by_dataset
from longtail.reporting.html import Element, TrustedText, el, format_count, grid, render, user_text
from longtail.reporting.method_detail import method_details
from longtail.reporting.result_rows import ResultRow, make_rows
from longtail.reporting.sections import check_section
from longtail.reporting.summary import reliability, summarize
from longtail.reporting.training_curves import unfinished_section
from longtail.text import escape_nonprintable

STYLE = "page.css"
SCRIPTS = {False: ("page.js",), True: ("page.js", "watch.js")}  # by whether the page is live


def report(paths: Iterable[Path | str] | Path | str, out: Path | str = "report.html") -> Path:
    """Write the runs at or below `paths` as one HTML page, and return its path; same as `longtail report`.

    For one method, the page shows the data, the results, accuracy by class frequency, training curves, calibration,
    confusions, rare classes and a feature map. For several methods, it also shows which is best and which are tied, gains and
    losses by class, and accuracy against cost. Unfinished runs are shown with their progress and curves. Runs that cannot be
    read are listed.

    Args:
        paths: Run folders, or folders that contain runs.
        out: The HTML file to write.
    """
    check_is_path(out, "out")
    paths, out = list_paths(paths, "paths"), Path(out)
    check_output(out)
    ended, others = run_folder.split_finished(paths)
    if not ended and not others:
        run_folder.read_finished(paths)  # raises a UserError
    return write_runs(read_runs(ended, others), out)


def write_runs(runs: "ReportRuns", out: Path) -> Path:
    """Write a page, and name the runs that cannot be shown on it; raise a UserError if all of them cannot."""
    try:
        page = build_page(runs)
    except Exception:
        runs = drop_failing_runs(runs)
        page = build_page(runs)
    if runs.num_runs == 0:
        raise UserError(runs.errors[0], kind="damaged-file")
    for error in runs.errors:
        log_warning(f"left out: {escape_nonprintable(error[:1000])}")
    return write_page(page, out)


def check_output(out: Path) -> None:
    """Raise a UserError if the page cannot be written to `out`, before any work is done."""
    if os.path.isdir(out):
        raise UserError(f"-o {out} is a folder: name a file, as in {out / 'report.html'}", kind="exists")
    if out.suffix.lower() not in ("", ".html", ".htm"):
        html = out.with_suffix(".html")
        raise UserError(
            f"-o {out}: the report is HTML, name it as in -o {html}; a browser can print it to other formats"
        )


class ReportRuns(NamedTuple):
    """The runs that a page shows."""

    rows: Sequence[ResultRow]
    started: Sequence[run_folder.StartedRun] = ()
    """Runs that are not finished."""
    errors: Sequence[str] = ()
    """Why other runs cannot be shown, one line for each."""

    @property
    def num_runs(self) -> int:
        """Number of runs."""
        return len(self.started) + sum(len(row.runs) for row in self.rows)


def read_runs(finished: Iterable[Path], unfinished: Iterable[Path]) -> ReportRuns:
    """Read the folders of finished and of unfinished runs."""
    runs, errors = run_folder.read_valid(run_folder.read, finished)
    started, more_errors = run_folder.read_valid(run_folder.read_started, unfinished)
    return ReportRuns(make_rows(runs), started, [*errors, *more_errors])


def drop_failing_runs(runs: ReportRuns) -> ReportRuns:
    """Return the runs that a page can show, with an error for each of the others.

    Files are validated when they are read. This function handles what validation does not cover, so that one run cannot
    prevent the page of the others.
    """
    rows, started, errors = [], [], list(runs.errors)
    for row in runs.rows:
        if _failure(ReportRuns([row])) is None:
            rows.append(row)
            continue
        valid = []
        for run in row.runs:
            if failure := _failure(ReportRuns(make_rows([run]))):
                errors.append(f"{run.folder}: {failure}")
            else:
                valid.append(run)
        rows += make_rows(valid)
    for started_run in runs.started:
        if failure := _failure(ReportRuns([], [started_run])):
            errors.append(f"{started_run.folder}: {failure}")
        else:
            started.append(started_run)
    rest = ReportRuns(rows, started, errors)
    if rest.num_runs and (failure := _failure(rest)):
        return ReportRuns([], [], [*errors, f"the runs cannot be shown together: {failure}"])
    return rest


def _failure(runs: ReportRuns) -> str | None:
    """Return the error of building a page, in one line; None if there is none."""
    try:
        build_page(runs)
    except Exception as error:
        return f"it cannot be shown ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    return None


def left_out_notes(runs: ReportRuns) -> list[Element]:
    """Return a note for each run that cannot be shown."""
    return [el("p", "Left out: ", user_text(error, max_length=300), class_="missing") for error in runs.errors]


def write_page(page: Element, out: Path) -> Path:
    """Write a page atomically."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with files.replace_output(out) as fresh:
            fresh.write_bytes(render_page(page).encode())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {out} ({error_text(error)}): choose another -o", kind="not-writable") from error
    return out


def render_page(page: Element) -> str:
    """Return the HTML text of a page."""
    return "<!doctype html>\n" + "".join(render(page))


def build_page(runs: ReportRuns) -> Element:
    """Return the page with the results of finished runs and the progress of the others."""
    parts = [unfinished_section(runs.started), *left_out_notes(runs), *results_sections(runs.rows)]
    return assemble_page(page_title(runs.rows, len(runs.started)), parts, runs.num_runs)


def page_title(rows: Sequence[ResultRow], num_started: int) -> str:
    """Return the title of a page with these rows and this number of unfinished runs."""
    if not rows:
        return format_count(num_started, "unfinished run") if num_started else "waiting for the first run"
    subject = rows[0].label if len(rows) == 1 else format_count(len(rows), "method")
    return f"{subject} on {'; '.join(dataset.data for dataset in group_by_dataset(rows))}"


def results_sections(rows: Sequence[ResultRow]) -> list[Element]:
    """Return the sections on finished runs: a summary, then the details of each data set."""
    if not rows:
        return []
    datasets = group_by_dataset(rows)
    has_several = len(datasets) > 1
    summaries = [part for dataset in datasets for part in _summary_parts(dataset, has_several)]
    details = [
        part
        for dataset in datasets
        for part in (el("h2", user_text(dataset.data) if has_several else "Details"), *_detail_parts(dataset))
    ]
    return [el("section", el("h2", "Summary"), *summaries), *details]


def _summary_parts(dataset: DatasetResults, has_heading: bool) -> Iterable[Element]:
    if has_heading:
        yield el("h3", user_text(dataset.data))
    if images := sections.describe_images(dataset):
        yield el("p", images, class_="small")
    yield grid([el("div", *summarize(dataset), class_="summary"), reliability(dataset)], "overview")


def _detail_parts(dataset: DatasetResults) -> list[Element]:
    parts = [
        sections.results_section(dataset),
        class_accuracy.frequency_section(dataset),
        class_accuracy.gains_section(dataset),
        training_curves.gradient_section(dataset),
        sections.cost_section(dataset),
        sections.data_section(dataset),
        check_section(dataset),
        *method_details(dataset),
    ]
    return [part for part in parts if part is not None]


def assemble_page(title: str, parts: Iterable[Element | None], num_runs: int, status: Element | None = None) -> Element:
    """Return an HTML document.

    Args:
        title: Title of the page.
        parts: Content.
        num_runs: Number of runs, for the footer.
        status: Status line of a live page, shown above the content; None for a page in a file.
    """
    footer = f"Created by longtail {__version__} from {format_count(num_runs, 'run')}. Click a column heading to sort."
    main = el("main", el("h1", user_text(title[0].upper() + title[1:])), *parts, el("footer", footer))
    is_live = status is not None
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=content_security_policy(is_live)),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("link", rel="icon", href="data:,"),
        el("title", f"longtail: {title}"),
        el("style", _resource(STYLE)),
    )
    scripts = [el("script", _resource(file)) for file in SCRIPTS[is_live]]
    return el("html", head, el("body", status, main, *scripts), lang="en")


def content_security_policy(live: bool = False) -> str:
    """Return a policy that allows only the style sheet and scripts of this package, by digest, and embedded images.

    A live page may also request itself.
    """
    scripts = " ".join(_digest(_resource(file)) for file in SCRIPTS[live])
    allowed = {"style-src": _digest(_resource(STYLE)), "script-src": scripts, "img-src": "data:"}
    allowed |= {"connect-src": "'self'"} if live else {}
    rules = ["default-src 'none'", *(f"{kind} {source}" for kind, source in allowed.items())]
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def _resource(file: str) -> TrustedText:
    return TrustedText(resources.files("longtail.reporting").joinpath(file).read_text(encoding="utf-8"))
