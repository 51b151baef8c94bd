"""The paper's figures: from run folders, from the results of a reproduced table, or from the theory alone."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path

from longtail import files, run_folder
from longtail.errors import UserError, error_text, unknown_name
from longtail.paper import results
from longtail.reporting import cells
from longtail.reporting.gradients import gradient_norms_by_dataset
from longtail.reporting.result_rows import make_rows
from longtail.reporting.table import MethodPoint, points_by_dataset

Paths = Sequence[Path]


def figure(name: str, sources: Iterable[Path | str] | Path | str = (), out: Path | str | None = None) -> Path:
    """Draw one of the paper's figures, and return its file; the twin of `longtail figure`.

    `latency` (Fig. 1): accuracy against the time of a batch of 64, from run folders or a results file. `gradient` (Fig. 2): the
    gradients of the classifier by class, from runs trained with --log.gradients. `framework` (Fig. 3) and `extra` (Fig. 4)
    need no runs. `out` ends in .svg, .png or .pdf; without it, NAME.svg.
    """
    if name not in FIGURES:
        raise unknown_name("figure", name, FIGURES)
    paths = [Path(path) for path in ([sources] if isinstance(sources, str | Path) else sources)]
    out = Path(out or f"{name}.svg")
    check_out(name, out)
    draw, from_runs = FIGURES[name]
    if from_runs and not paths:
        raise UserError(f"name the runs, as in `longtail figure {name} runs -o {out}`")
    if paths and not from_runs:
        raise UserError(
            f"{paths[0]}: the figure {name} is drawn without runs, as in `longtail figure {name} -o {out}`",
            kind="conflict",
        )
    try:
        draw(paths, out)
    except OSError as error:
        raise UserError(f"cannot read {error.filename} ({error_text(error)})", kind="unreadable-file") from error
    return out


@contextlib.contextmanager
def write_as_user_error(out: Path) -> Iterator[None]:
    """Turn an OSError while the figure is written into a UserError; one while runs are read has another file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {out} ({error.strerror}): choose another -o", kind="not-writable") from error


def check_out(name: str, out: Path, flag: str = "-o") -> None:
    """Before the work is done whose result goes there."""
    files.check_working_directory((out,))
    formats = (".svg",) if name == "framework" else (".svg", ".png", ".pdf")
    if out.suffix.lower() not in formats or os.path.isdir(out):
        raise UserError(f"{flag} {out}: name a file that ends in {' or '.join(formats)}, as in {flag} {name}.svg")
    if not os.path.isdir(out.absolute().parent):
        raise UserError(f"{flag} {out}: the folder {out.parent} does not exist", kind="missing-file")


def draw_gradient(paths: Paths, out: Path) -> None:
    from longtail.reporting import plots  # matplotlib, which takes a second to come

    for path in paths:
        if not gradient_norms_by_dataset(make_rows(run_folder.read_finished(path))):
            raise UserError(
                f"no run below {path} has {run_folder.GRADIENTS}: train with --log.gradients", kind="missing-file"
            )
    pulls = gradient_norms_by_dataset(make_rows(run_folder.read_finished(paths)))
    with write_as_user_error(out):
        plots.gradient_norms(pulls, out)


def draw_latency(paths: Paths, out: Path) -> None:
    from longtail.reporting import plots

    if any(path.suffix == ".json" for path in paths):
        if len(paths) > 1:
            raise UserError(f"{paths[0]}: name one results file, or run folders", kind="conflict")
        panels: Mapping[str, Sequence[MethodPoint]] = read_dots(paths[0])
    else:
        panels = points_by_dataset(make_rows(run_folder.read_finished(paths)))
    if not any(dot.values["latency_b64"] for dots in panels.values() for dot in dots):
        raise UserError(
            f"{paths[0]}: no run has latency_b64 in {run_folder.METRICS}: `longtail eval` measures it",
            kind="missing-file",
        )
    with write_as_user_error(out):
        plots.accuracy_by_latency(panels, out)


def read_dots(path: Path) -> dict[str, list[MethodPoint]]:
    """Of a reproduced table, the longest training."""
    try:
        table = run_folder.read_json(path)["table"]
        tree = results.read(path, table) | {"table": table}
        tree |= {"rows": cells.make_rows(tree)}
        return cells.points_by_factor(tree, cells.training_lengths(tree)[0])
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(
            f"{path} holds no results of `longtail reproduce`: name its JSON, or run folders", kind="damaged-file"
        ) from error


def draw_extra(_: Paths, out: Path) -> None:
    from longtail.paper import theory_figures

    with write_as_user_error(out):
        theory_figures.draw_extra(out)


def draw_framework(_: Paths, out: Path) -> None:
    drawing = resources.files("longtail.reporting").joinpath("framework.svg").read_bytes()
    with write_as_user_error(out), files.replace_output(out) as fresh:
        fresh.write_bytes(drawing)


FIGURES: dict[str, tuple[Callable[[Paths, Path], None], bool]] = {
    "latency": (draw_latency, True),
    "gradient": (draw_gradient, True),
    "framework": (draw_framework, False),
    "extra": (draw_extra, False),
}
"""Name -> how it is drawn, and whether from runs; in the order of the paper."""
