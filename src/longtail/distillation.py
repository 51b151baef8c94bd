"""Distillation of finished runs into another network. This is the code behind `longtail distill` and `longtail.distill`.

OUT/student/seedN has the students, OUT/alone/seedN the same networks trained without teachers, and OUT/report.html compares
both with the teachers.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail import files, recipes, run_folder
from longtail.config import BalancedSoftmaxSettings, Config, DataConfig, DistillationSettings
from longtail.errors import UserError, list_paths
from longtail.progress import log_info
from longtail.run_folder import FinishedRun
from longtail.training import (
    LOCATION,
    apply_settings,
    check_memory_name,
    find_resumed_config,
    log_choices,
    reject_choice,
    rerun_config,
    split_settings,
)

if TYPE_CHECKING:
    from longtail.reporting.result_rows import ResultRow

STUDENT, ALONE = "student", "alone"
"""Folders in the output folder: of the students, and of the same networks trained without teachers."""
SHORT_NAMES = {
    "target": "method.target",
    "temperature": "method.temperature",
    "weight": "method.weight",
    "mixture": "method.mixture",
    "views": "method.views",
    "ema": "train.ema",
}
"""Short names of settings, in addition to `longtail.training.SHORT_NAMES`."""
CHOSEN = "folder/chosen"
"""The recipe of a teacher whose settings were chosen automatically for the user's images."""
KEPT_DATA = (*LOCATION, "columns", "on_error", "imbalance", "profile", "image_size", "load", "val_fraction")
"""Settings in `data` that the student shares with its teachers if its other settings are chosen automatically."""


def distill(
    teachers: Sequence[Path | str] | Path | str,
    model: Any = None,
    out: Path | str | None = None,
    resume: bool = False,
    *,
    alone: bool = True,
    data: Any = None,
    test: Any = None,
    **settings: Any,
) -> list[Path]:
    """Teach a network by finished runs on the same images, as `longtail distill` does; return the run folders of the students.

    Images, image size and settings are those of the first teacher. If these were chosen automatically for the user's images,
    and the student is another network, they are chosen for that network.

    Args:
        teachers: Run folders, or folders that contain runs. All finished runs are teachers.
        model: The network of the student: a timm name or an nn.Module. None: that of the first teacher.
        out: Output folder; None: runs/distill-TEACHER-MODEL.
        resume: Whether existing runs are continued; otherwise they are an error.
        alone: Whether the same network is also trained without teachers, by Balanced Softmax, for comparison.
        data: The images of teachers that were trained on images in memory; see `longtail.train`.
        test: Their test images.
        **settings: Settings by the names of their flags, such as `**{"optim.lr": 0.1}`, or by a short name: those of
            `longtail.train`, and `target`, `temperature`, `weight`, `mixture`, `views` and `ema`.
    """
    from longtail.data.in_memory import name_images
    from longtail.models.backbones import CUSTOM, use_network

    runs = read_teachers(teachers)
    choice, given = split_settings({SHORT_NAMES.get(name, name): value for name, value in settings.items()})
    reject_choice(choice, "teachers")
    if model is not None:
        given["model.name"] = model if isinstance(model, str) else CUSTOM
    if data is None and test is not None:
        raise UserError("test needs training images in memory: give both, or neither", kind="conflict")
    with contextlib.ExitStack() as stack:
        stack.enter_context(use_network(None if isinstance(model, str) else model))
        name = "" if data is None else stack.enter_context(name_images(data, test))
        base = make_base(runs)
        check_memory_name(base, name)
        folder = Path(out) if out else default_out(runs, given.get("model.name", base.model.name))
        resumed = find_resumed_student(base, folder) if resume else None
        config = resolve_student(resumed or base, *apply_settings(resumed or base, given), resumed is not None)
        train_students(config, runs, folder, resume, alone)
    return [folder / STUDENT / f"seed{seed}" for seed in config.train.seeds]


# Settings


def read_teachers(paths: Sequence[Path | str] | Path | str) -> list[FinishedRun]:
    """Return the finished runs at or below one or more paths, in the order of the paths and without duplicates."""
    paths = list_paths(paths, "teachers")
    files.check_working_directory(paths)
    if not paths:
        raise UserError("at least one teacher is required: name a run folder, as in `longtail distill runs/large`")
    runs = [run for path in paths for run in run_folder.read_finished(path)]
    return list({os.path.realpath(run.folder): run for run in reversed(runs)}.values())[::-1]


def make_base(runs: Sequence[FinishedRun]) -> Config:
    """Return the configuration of the first teacher with the method distillation.

    Cross-validation is left out: the teachers have seen the images of every fold. Nothing is downloaded into a folder that the
    configuration of the teacher names.
    """
    from longtail.engine.teachers import hash_teachers

    first = runs[0].config
    method = DistillationSettings(teachers=tuple(run.folder for run in runs), teacher_checksums=hash_teachers(runs))
    data = replace(first.data, folds=0, download=first.data.download and first.data.root is None)
    return replace(first, method=method, data=data, train=replace(first.train, processes=1))


def find_resumed_student(base: Config, out: Path) -> Config | None:
    """Return the configuration of the student that is resumed, or None if there is none.

    Args:
        base: The result of `make_base`, whose teachers are used: they may have been moved. Their checksums are compared later.
        out: The output folder.
    """
    stored = find_resumed_config(base.data, out / STUDENT)
    if stored is None:
        return None
    teachers: DistillationSettings = base.method  # type: ignore[assignment]
    if not isinstance(stored.method, DistillationSettings):
        raise UserError(f"{out / STUDENT} is not the student of a distillation: choose another --out", kind="mismatch")
    method = replace(stored.method, teachers=teachers.teachers, teacher_checksums=teachers.teacher_checksums)
    return replace(stored, method=method)


def resolve_student(
    base: Config, sections: Mapping[str, Any], given: Mapping[str, Any], is_resumed: bool = False
) -> Config:
    """Return the configuration of the student.

    Args:
        base: The result of `make_base` or of `find_resumed_student`.
        sections: Its sections with the given settings.
        given: The given settings by name.
        is_resumed: Whether a student is resumed, whose settings are not chosen again.
    """
    is_new_network = given.get("model.name", base.model.name) != base.model.name
    if base.recipe != CHOSEN or is_resumed or not is_new_network:
        return rerun_config(base, sections, given)
    from longtail.autoconfig import choose_plan, inspect_data

    data: DataConfig = sections["data"]
    kept = {f"data.{name}": getattr(data, name) for name in KEPT_DATA} | {"data.folds": 0}
    others = {"train.seeds": base.train.seeds, "train.device": base.train.device}
    plan = choose_plan(
        recipes.IN_MEMORY if data.name == "memory" else data.train_list or data.root or data.name,
        inspect_data(data, sections["train"].device),
        "balanced-softmax",
        kept | others | {name: value for name, value in given.items() if not name.startswith("method.")},
        report=lambda chosen: log_choices(chosen, exclude=("--method",)),
    )
    return replace(plan.config, method=sections["method"])


def default_out(runs: Sequence[FinishedRun], network: str) -> Path:
    """Return the default output folder: runs/distill-TEACHER-MODEL."""
    folder = runs[0].folder
    is_seed = folder.name == f"seed{runs[0].seed}"
    return Path("runs") / f"distill-{run_folder.short_name(folder.parent if is_seed else folder)}-{network}"


# Training


def train_students(
    config: Config, runs: Sequence[FinishedRun], out: Path, resume: bool, alone: bool
) -> "list[ResultRow]":
    """Train the students and, for comparison, the same networks without teachers. Return the rows of the table.

    Args:
        config: The configuration of the students.
        runs: The teachers.
        out: The output folder.
        resume: Whether existing runs are continued.
        alone: Whether the networks are also trained without teachers.
    """
    from longtail.data.sources import load_cached
    from longtail.engine.head_runs import Backbones
    from longtail.engine.run_lock import check_folder
    from longtail.engine.teachers import check_teachers
    from longtail.engine.train import train

    for run in runs:
        folder, target = run.folder.resolve(), out.resolve()
        if target in (folder, folder.parent) or target.is_relative_to(folder):
            raise UserError(f"--out {out} is the folder of a teacher: choose another one", kind="conflict")
    configs = {STUDENT: config} | ({ALONE: replace(config, method=BalancedSoftmaxSettings())} if alone else {})
    for name, each in configs.items():
        for seed in each.train.seeds:
            check_folder(out / name / f"seed{seed}", each, resume, out)
    for run in runs:
        label, network = run.config.method.label, run.config.model.name
        log_info(f"teacher {run.folder}: {label}, {network}, {run.metrics['top1']:.1f} % of the test images")
    data, backbones = load_cached(config.data, {}), Backbones()
    check_teachers(runs, data, config.data.image_size)
    for name, each in configs.items():
        log_info(f"{name}: {each.method.label}, {each.model.name}")
        train(each, out / name, resume, data, backbones=backbones)
    return write_results(runs, [out / name for name in configs], config.train.seeds, out)


def write_results(
    runs: Sequence[FinishedRun], folders: Sequence[Path], seeds: Sequence[int], out: Path
) -> "list[ResultRow]":
    """Write table and report, and return the rows of the table, sorted from worst to best.

    Args:
        runs: The teachers.
        folders: The folders of the students, and of the networks that were trained alone.
        seeds: The seeds that are included.
        out: The output folder.
    """
    from longtail.comparison import write_rows
    from longtail.reporting.result_rows import make_rows

    roles = {"Teacher": list(runs)}
    for folder in folders:
        role = "Student" if folder.name == STUDENT else "Student alone"
        roles[role] = [run for run in run_folder.read_finished(folder) if run.seed in seeds]
    rows = [
        replace(row, label=f"{role}: {row.label}, {row.runs[0].config.model.name}")
        for role, own in roles.items()
        for row in make_rows(own)
    ]
    rows.sort(key=lambda row: (row.data, row.mean("top1")))
    write_rows(rows, out)
    return rows
