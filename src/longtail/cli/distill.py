"""The command `distill`."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from tyro.conf import Positional

from longtail import distillation
from longtail.cli.console import make_screen, print_lines
from longtail.cli.parse import check_data_paths, check_path, get_given_settings, parse_arguments, scan_flags
from longtail.config import (
    Config,
    DataConfig,
    DistillationSettings,
    LogConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    ViewsConfig,
)
from longtail.errors import UserError
from longtail.run_folder import FinishedRun
from longtail.text import escape_nonprintable
from longtail.training import ALL_SECTIONS, SHORT_NAMES, select_sections


@dataclass(frozen=True, kw_only=True)
class Distill:
    """Train a network, usually a smaller one, on the predictions of finished runs (knowledge distillation), and compare it
    with the same network trained without teachers."""

    short_names: ClassVar[dict[str, str]] = SHORT_NAMES | distillation.SHORT_NAMES

    teachers: Positional[tuple[Path, ...]]
    """Run folders, or folders that contain runs. All finished runs are teachers; the network learns the mean of their
    probabilities. Images, image size and settings are those of the first teacher."""
    out: Path | None = None
    """Output folder (default: runs/distill-TEACHER-MODEL). It will contain student/, alone/ and report.html."""
    resume: bool = False
    """Continue the runs in OUT."""
    alone: bool = True
    """Also train the same network without teachers, with Balanced Softmax; --no-alone skips this."""
    data: DataConfig
    views: ViewsConfig
    model: ModelConfig
    method: DistillationSettings
    optim: OptimConfig
    train: TrainConfig
    log: LogConfig


class ResolvedDistillation(NamedTuple):
    """The teachers, the student and the folder that a command line of `longtail distill` asks for."""

    given: Distill
    config: Config
    """The configuration of the student."""
    runs: list[FinishedRun]
    """The teachers."""
    out: Path


def run_distill(args: list[str]) -> None:
    """Run `longtail distill`."""
    given, config, runs, out = resolve_distillation(args)

    from longtail.reporting.summary import summary_lines
    from longtail.reporting.table import to_rich

    rows, screen = distillation.train_students(config, runs, out, given.resume, given.alone), make_screen()
    screen.print(to_rich(rows, screen.width))
    print_lines(summary_lines(rows))
    student, shown = shlex.quote(str(out / distillation.STUDENT)), escape_nonprintable(out)
    print(f"written to {shown}/table.md, {shown}/table.json and {shown}/comparison.png")
    print(f"full report: {shown}/report.html")
    print(escape_nonprintable(f"next: longtail predict {student} IMAGES, or longtail export {student}"))


def resolve_distillation(args: list[str]) -> ResolvedDistillation:
    """Return what the arguments of `longtail distill` result in. Automatic choices are printed."""
    runs = distillation.read_teachers(take_teachers(args))
    base = distillation.make_base(runs)
    flags = scan_flags(args, switches=("resume",), out=Path, **{"model.name": str})
    out = flags["out"] or distillation.default_out(runs, flags["model.name"] or base.model.name)
    check_path(out)
    resumed = distillation.find_resumed_student(base, out) if flags["resume"] else None
    base = resumed or base
    defaults = Distill(teachers=tuple(take_teachers(args)), **select_sections(base, ALL_SECTIONS))
    given = parse_arguments(Distill, "distill", args, defaults)
    check_data_paths(given.data)
    sections, settings = select_sections(given, ALL_SECTIONS), get_given_settings(args, given)
    return ResolvedDistillation(
        given, distillation.resolve_student(base, sections, settings, resumed is not None), runs, out
    )


def take_teachers(args: Sequence[str]) -> list[Path]:
    """Return the paths before the first flag. They come first because the defaults of the flags depend on them.

    Raise a UserError if there are none.
    """
    first_flag = next((i for i, arg in enumerate(args) if arg.startswith("-")), len(args))
    if not first_flag:
        raise UserError(
            "the first arguments must be run folders of teachers, as in `longtail distill runs/large --model resnet18`"
        )
    for path in args[:first_flag]:
        check_path(path)
    return [Path(path) for path in args[:first_flag]]
