"""The figures of the paper, drawn from run folders, from a results file, or from the theory."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path

from longtail import files, run_folder
from longtail.errors import UserError, error_text, unknown_name
from longtail.paper import results_page
from longtail.paper.results import read_results
from longtail.reporting.result_rows import make_rows
from longtail.reporting.table import MethodPoint, points_by_dataset
from longtail.reporting.training_curves import gradient_norms_by_dataset

Paths = Sequence[Path]


def figure(name: str, sources: Iterable[Path | str] | Path | str = (), out: Path | str | None = None) -> Path:
    """Draw a figure of the paper, as `longtail figure` does; return its file.

    Args:
        name: "latency" (Fig. 1), accuracy against the time of a batch of 64 images; "gradient" (Fig. 2), gradient norms of the
            classifier by class; "framework" (Fig. 3); or "extra" (Fig. 4).
        sources: For "latency", run folders or a results file; for "gradient", folders of runs that were trained with
            --log.gradients. The other figures need no runs.
        out: The file, which ends in .svg, .png or .pdf; by default NAME.svg.
    """
    if name not in FIGURES:
        raise unknown_name("figure", name, FIGURES)
    paths = [Path(path) for path in ([sources] if isinstance(sources, str | Path) else sources)]
    out = Path(out or f"{name}.svg")
    check_figure_path(name, out)
    draw, from_runs = FIGURES[name]
    if from_runs and not paths:
        raise UserError(f"the figure {name} needs runs, for example `longtail figure {name} runs -o {out}`")
    if paths and not from_runs:
        raise UserError(
            f"{paths[0]}: the figure {name} needs no runs; use `longtail figure {name} -o {out}`", kind="conflict"
        )
    try:
        draw(paths, out)
    except OSError as error:
        raise UserError(f"cannot read {error.filename} ({error_text(error)})", kind="unreadable-file") from error
    return out


@contextlib.contextmanager
def write_as_user_error(out: Path) -> Iterator[None]:
    """Raise a UserError instead of an OSError in this context, which writes the figure."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {out} ({error.strerror}): choose another -o", kind="not-writable") from error


def check_figure_path(name: str, out: Path, flag: str = "-o") -> None:
    """Raise a UserError if a figure cannot be written to this path; called before the figure is computed.

    Args:
        name: The name of the figure.
        out: The path.
        flag: The flag to mention in the message.
    """
    files.check_working_directory((out,))
    formats = (".svg",) if name == "framework" else (".svg", ".png", ".pdf")
    if out.suffix.lower() not in formats or os.path.isdir(out):
        raise UserError(
            f"{flag} {out}: use a file name that ends in {' or '.join(formats)}, for example {flag} {name}.svg"
        )
    if not os.path.isdir(out.absolute().parent):
        raise UserError(f"{flag} {out}: the folder {out.parent} does not exist", kind="missing-file")


def draw_gradient(paths: Paths, out: Path) -> None:
    """Draw Fig. 2: the gradient norms of the classifier by class."""
    from longtail.reporting import plots  # imports matplotlib, which takes a second

    for path in paths:
        if not gradient_norms_by_dataset(make_rows(run_folder.read_finished(path))):
            raise UserError(
                f"no run below {path} has {run_folder.GRADIENTS}: train with --log.gradients", kind="missing-file"
            )
    pulls = gradient_norms_by_dataset(make_rows(run_folder.read_finished(paths)))
    with write_as_user_error(out):
        plots.gradient_norms(pulls, out)


def draw_latency(paths: Paths, out: Path) -> None:
    """Draw Fig. 1: accuracy against latency."""
    from longtail.reporting import plots

    if any(path.suffix == ".json" for path in paths):
        if len(paths) > 1:
            raise UserError(f"{paths[0]}: give one results file, or run folders", kind="conflict")
        panels: Mapping[str, Sequence[MethodPoint]] = read_points(paths[0])
    else:
        panels = points_by_dataset(make_rows(run_folder.read_finished(paths)))
    if not any(dot.values["latency_b64"] for dots in panels.values() for dot in dots):
        raise UserError(
            f"{paths[0]}: no run has latency_b64 in {run_folder.METRICS}; measure it with `longtail eval`",
            kind="missing-file",
        )
    with write_as_user_error(out):
        plots.accuracy_by_latency(panels, out)


def read_points(path: Path) -> dict[str, list[MethodPoint]]:
    """Return the points of a results file, of the runs with the most epochs."""
    try:
        table = run_folder.read_json(path)["table"]
        tree = read_results(path, table) | {"table": table}
        tree |= {"rows": results_page.make_rows(tree)}
        return results_page.points_by_factor(tree, results_page.training_lengths(tree)[0])
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(
            f"{path} is not a results file of `longtail reproduce`: give its JSON file, or run folders",
            kind="damaged-file",
        ) from error


def draw_extra(_: Paths, out: Path) -> None:
    """Draw Fig. 4: the extra loss of the centers."""
    from longtail.reporting import plots

    with write_as_user_error(out):
        plots.draw_extra(out)


def draw_framework(_: Paths, out: Path) -> None:
    """Write Fig. 3: the framework, a stored drawing."""
    drawing = resources.files("longtail.reporting").joinpath("framework.svg").read_bytes()
    with write_as_user_error(out), files.replace_output(out) as fresh:
        fresh.write_bytes(drawing)


FIGURES: dict[str, tuple[Callable[[Paths, Path], None], bool]] = {
    "latency": (draw_latency, True),
    "gradient": (draw_gradient, True),
    "framework": (draw_framework, False),
    "extra": (draw_extra, False),
}
"""The function that draws each figure, and whether it needs runs; in the order of the paper."""
