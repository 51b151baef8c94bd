"""Estimates of the training time, from short timed runs after a warm-up, and settings that fit into a time limit.

Nothing that is timed here is used for training, and the global random state is restored, so results do not change.

With a frozen backbone whose features are stored, the time is that of the features, of the fits of cross-validation, and of a
fit for each seed. Otherwise it is that of the steps, timed with a network that is discarded, and of the evaluation.
"""

import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from longtail import recipes, run_folder
from longtail.config import Config, DistillationSettings
from longtail.data.sources import DataSet
from longtail.distributed import is_distributed, is_main_process
from longtail.engine.device import preserve_global_settings
from longtail.engine.evaluate import KNN_IMAGES, LATENCY_FEW
from longtail.engine.failures import is_out_of_memory
from longtail.engine.fit_head import count_epochs, fit_head, make_feature_method
from longtail.engine.head_runs import Backbones, FrozenBackbone
from longtail.engine.loop import train_step
from longtail.engine.run_lock import contains_run
from longtail.engine.trainer import Trainer
from longtail.errors import UserError
from longtail.plan import Plan
from longtail.progress import describe_duration, log_info, log_warning
from longtail.text import pluralize

PROBE_STEPS = 8
"""The steps of a fit that is timed."""
MIN_STEPS = 200
"""The steps of a training from which its time is estimated, so that the estimate takes at most a few percent of the time."""
MIN_REPORTED = 10.0
"""Seconds from which an estimate is printed."""
LATENCY_IMAGES = 3 * LATENCY_FEW
"""The forward passes of single images for the latency of a slow network on a CPU."""
SAFETY = 0.9
"""The share of a time limit that the estimate may fill."""
FEWEST_EPOCHS = 5
"""A time limit does not reduce the epochs of a head further."""

VIEWS, FOLDS, EPOCHS = "data.cached_views", "data.folds", "train.epochs"


class TimeLimit(NamedTuple):
    """A time limit, and the plan whose settings are adapted to it."""

    seconds: float
    plan: Plan


# Heads on stored features


@dataclass(frozen=True)
class HeadSettings:
    """The settings of heads that a time limit reduces."""

    views: int
    folds: int
    epochs: int
    dropped: int = 0
    """The number of candidates of each method that are left out, the slowest first; one always remains."""


class FitTime(NamedTuple):
    """The time of a fit on all training images, in seconds."""

    overhead: float
    per_epoch: float

    def seconds(self, epochs: int) -> float:
        """Return the seconds of a fit with this number of epochs (`train.epochs`)."""
        return self.overhead + epochs * self.per_epoch


@dataclass(frozen=True)
class HeadCosts:
    """The measured costs of methods whose heads are trained on the same stored features."""

    features: tuple[float, ...]
    """The seconds to compute the features, by the number of augmented views."""
    methods: tuple[tuple[FitTime, ...], ...]
    """The fits of the candidates of each method."""
    seeds: int
    other: float = 0.0
    """The seconds of the evaluation."""

    def remaining_candidates(self, method: int, settings: HeadSettings) -> list[int]:
        """Return the indices of the candidates of a method that remain if the slowest ones are left out."""
        fits = self.methods[method]
        fastest = sorted(range(len(fits)), key=lambda i: fits[i].seconds(settings.epochs))
        return sorted(fastest[: max(len(fits) - settings.dropped, 1)])

    def fit_seconds(self, settings: HeadSettings) -> float:
        """Return the seconds of all fits."""
        total = 0.0
        for method, times in enumerate(self.methods):
            fits = [times[i].seconds(settings.epochs) for i in self.remaining_candidates(method, settings)]
            cross_validation = max(settings.folds - 1, 0) * sum(fits)  # a fold has 1 - 1/folds of the images
            total += cross_validation + self.seeds * max(fits)
        return total

    def seconds(self, settings: HeadSettings) -> float:
        """Return the seconds of everything."""
        return self.features[settings.views] + self.fit_seconds(settings) + self.other


def list_reductions(costs: HeadCosts, full: HeadSettings, given: Collection[str]) -> Iterator[HeadSettings]:
    """Yield settings of decreasing cost, the full ones first. The more expensive of features and heads is reduced first.

    The order does not depend on a time limit, so that a shorter limit never gives a larger value of any setting.

    Args:
        costs: The measured costs.
        full: The settings without a time limit.
        given: Names of settings that are not changed.
    """
    now: HeadSettings | None = full
    while now is not None:
        yield now
        fewer_views = replace(now, views=now.views - 1) if now.views > 1 and VIEWS not in given else None
        smaller_heads = reduce_heads(costs, now, full, given)
        is_features_first = costs.features[now.views] >= costs.fit_seconds(now)
        now = (fewer_views or smaller_heads) if is_features_first else (smaller_heads or fewer_views)


def reduce_heads(
    costs: HeadCosts, now: HeadSettings, full: HeadSettings, given: Collection[str]
) -> HeadSettings | None:
    """Return the next smaller settings of the fits: folds, epochs, candidates, and then more of them; None if there are none.

    Args:
        costs: The measured costs.
        now: The settings so far.
        full: The settings without a time limit.
        given: Names of settings that are not changed.
    """
    fewest = min(FEWEST_EPOCHS, full.epochs)
    half, quarter = max(full.epochs // 2, fewest), max(full.epochs // 4, fewest)
    if now.folds > 3 and FOLDS not in given:
        return replace(now, folds=3)
    if now.epochs > half and EPOCHS not in given:
        return replace(now, epochs=half)
    if now.folds and now.dropped < max(map(len, costs.methods)) - 1:
        return replace(now, dropped=now.dropped + 1)
    if now.epochs > quarter and EPOCHS not in given:
        return replace(now, epochs=quarter)
    if now.folds and FOLDS not in given:
        return replace(now, folds=0)
    return None


def fit_settings(
    costs: HeadCosts, full: HeadSettings, given: Collection[str], limit: float
) -> tuple[HeadSettings, bool]:
    """Return the first of the reductions that fits into a time limit, or the last one; and whether it fits.

    Args:
        costs: The measured costs.
        full: The settings without a time limit.
        given: Names of settings that are not changed.
        limit: The time limit in seconds.
    """
    settings = full
    for settings in list_reductions(costs, full, given):
        if costs.seconds(settings) <= SAFETY * limit:
            return settings, True
    return settings, False


def measure_heads(plans: Sequence[Plan], backbones: Sequence[FrozenBackbone]) -> HeadCosts:
    """Measure the costs of methods on stored features.

    Args:
        plans: The plan of each method.
        backbones: The backbone of each method; several methods may have the same one.
    """
    views = max(plan.config.data.cached_views for plan in plans)
    features, other = np.zeros(1 + views), 0.0
    for backbone in {id(backbone): backbone for backbone in backbones}.values():
        pending = backbone.extraction.plan_data_set(backbone.data, views)
        times = backbone.extraction.time_passes(backbone.data.train, pending)
        features += [times.estimate(pending, number) for number in range(1 + views)]
        other += LATENCY_IMAGES * times.query
    methods = tuple(
        tuple(time_fit(config, backbone, views) for config in plan.candidates or (plan.config,))
        for plan, backbone in zip(plans, backbones, strict=True)
    )
    return HeadCosts(tuple(features.tolist()), methods, len(plans[0].config.train.seeds), other)


def time_fit(config: Config, backbone: FrozenBackbone, views: int) -> FitTime:
    """Measure the time of a fit, with random features of a part of the training images.

    Args:
        config: The configuration.
        backbone: The backbone with the images.
        views: The number of augmented views.
    """
    y_N, counts, width = backbone.y_N, torch.from_numpy(backbone.data.train.counts), backbone.trunk.width
    n, batch = len(y_N), min(config.train.batch_size, len(y_N))
    rows = torch.linspace(0, n - 1, min(PROBE_STEPS * batch, n)).long().to(y_N.device)
    epochs = -(-PROBE_STEPS // (len(rows) // batch))
    short, rng = recipes.with_epochs(config, epochs), torch.Generator().manual_seed(0)
    x_VNF = torch.rand(1 + views, len(rows), width, generator=rng).to(y_N.device)
    is_taught = isinstance(config.method, DistillationSettings)
    stored_VNC = torch.zeros(1 + views, len(rows), len(counts), device=y_N.device) if is_taught else None
    val = x_VNF[0], y_N[rows]
    seconds, done = math.inf, 0
    for _ in range(3):  # the first one is a warm-up; other processes can only slow down the others
        done, start = 0, time.perf_counter()

        def count(_: object) -> None:
            nonlocal done
            done += 1

        fit_head(x_VNF, y_N[rows], short, len(counts), val=val, log_epoch=count, stored_VNC=stored_VNC)
        seconds = min(seconds, time.perf_counter() - start)
    if not done:  # the head is computed without steps
        return FitTime(seconds * n / len(rows), 0.0)
    per_step = seconds / (done * (len(rows) // batch))
    all_steps = count_epochs(make_feature_method(config, counts, width)) * (n // batch)
    return FitTime(0.0, per_step * all_steps / config.train.epochs)


def adapt_heads(plan: Plan, costs: HeadCosts, method: int, full: HeadSettings, found: HeadSettings) -> Plan:
    """Return the plan of a method with reduced settings.

    Args:
        plan: The plan.
        costs: The measured costs.
        method: The index of the method in them.
        full: The settings without a time limit.
        found: The reduced settings.
    """
    values = {VIEWS: found.views, FOLDS: found.folds, EPOCHS: found.epochs}
    before = {VIEWS: full.views, FOLDS: full.folds, EPOCHS: full.epochs}
    assert plan.adapt is not None
    adapted = plan.adapt({name: value for name, value in values.items() if value != before[name]})
    if not adapted.candidates:
        return adapted
    kept = tuple(adapted.candidates[i] for i in costs.remaining_candidates(method, found))
    return replace(adapted, config=kept[0], candidates=kept)


# Trained backbones


class StepCosts(NamedTuple):
    """The costs of one run whose backbone is trained, or whose views are computed in every epoch."""

    per_epoch: float
    """Seconds per epoch (`train.epochs`); those of second stages are included in proportion."""
    evaluation: float

    def seconds(self, epochs: int) -> float:
        """Return the seconds of a run with this number of epochs."""
        return epochs * self.per_epoch + self.evaluation


def count_steps(config: Config, images: int) -> int:
    """Return the number of steps of the first stage."""
    return config.train.epochs * (images // max(config.train.batch_size * config.train.accumulate, 1))


def measure_steps(config: Config, data: DataSet, device: torch.device, folder: Path) -> StepCosts | None:
    """Time two steps after a warm-up, with a network that is discarded. Return None if it needs more memory than there is.

    Steps are executed eagerly, so that nothing is compiled or captured for the estimate.

    Args:
        config: The configuration.
        data: The images.
        device: The device.
        folder: The run folder, which must not contain a run. Nothing is written.
    """
    config = replace(config, train=replace(config.train, execution="eager"))
    trainer: Trainer | None = None
    try:
        trainer = Trainer(config, config.train.seeds[0], data, folder, device)
        times = []
        for step in range(min(3, trainer.stage.epochs * trainer.steps_per_epoch)):
            trainer.prepare(step)
            train_step(trainer)
            trainer.count_step()
            synchronize(device)
            times.append(time.perf_counter())
        if len(times) < 3:
            return None
        shown = np.arange(min(config.train.batch_size, len(data.test.labels)))
        start = time.perf_counter()
        trainer.evaluator.features(data.test, shown)
        synchronize(device)
        per_image = (time.perf_counter() - start) / len(shown)
        per_epoch = (times[2] - times[0]) / 2 * trainer.total_steps() / config.train.epochs
        evaluated = min(len(data.train.labels), KNN_IMAGES) + len(data.test.labels) + LATENCY_IMAGES
        return StepCosts(per_epoch, evaluated * per_image)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        if trainer is not None:
            trainer.batches.close()


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# All plans


def plan_time(
    plans: Sequence[Plan],
    data: Sequence[DataSet],
    folders: Sequence[Path],
    device: torch.device,
    backbones: Backbones,
    limit: float | None = None,
    is_verbose: bool = True,
) -> list[Plan]:
    """Estimate the time of some plans and log it. Return the plans, with settings reduced to fit into a time limit.

    Args:
        plans: The plan of each method. None of them has been started.
        data: The images of each method.
        folders: The folder of the first run of each method.
        device: The device.
        backbones: The frozen backbones, which are used for training later.
        limit: The time limit in seconds, for all plans together.
        is_verbose: Whether the estimate is logged.
    """
    if not plans or is_distributed():
        if limit:
            raise UserError("--time-limit needs a single process: start without torchrun", kind="conflict")
        return list(plans)
    if limit and any(plan.adapt is None for plan in plans):
        raise UserError("--time-limit needs settings that are chosen automatically", kind="conflict")
    is_cached = all(plan.config.data.cached_views for plan in plans)
    seconds: float | None
    devices = [device] if device.type == "cuda" else []
    with preserve_global_settings(), torch.random.fork_rng(devices):
        if is_cached:
            if is_verbose and is_main_process():
                log_info("estimating the training time from a few images")
            plans, seconds = plan_heads(plans, data, device, backbones, limit)
        else:
            plans, seconds = plan_steps(plans, data, folders, device, limit)
    if seconds is not None and (seconds >= MIN_REPORTED or limit) and is_verbose and is_main_process():
        runs = sum(len(plan.config.train.seeds) for plan in plans)
        count = f"{pluralize(runs, 'run')}, " if runs > 1 else ""
        log_info(f"estimated time: {count}about {describe_duration(seconds)}")
    return list(plans)


def plan_heads(
    plans: Sequence[Plan],
    data: Sequence[DataSet],
    device: torch.device,
    backbones: Backbones,
    limit: float | None,
) -> tuple[list[Plan], float]:
    """Return the plans, reduced to a time limit, and the estimated seconds; for heads on stored features."""
    found = [backbones.find(plan.config, one, device) for plan, one in zip(plans, data, strict=True)]
    costs, config = measure_heads(plans, found), plans[0].config
    folds = config.data.folds if any(plan.candidates for plan in plans) else 0
    full = HeadSettings(config.data.cached_views, folds, config.train.epochs)
    if limit is None:
        return list(plans), costs.seconds(full)
    settings, fits = fit_settings(costs, full, plans[0].given, limit)
    changed = {
        f"--{VIEWS}": (full.views, settings.views),
        f"--{FOLDS}": (full.folds, settings.folds),
        f"--{EPOCHS}": (full.epochs, settings.epochs),
        "candidates": (
            sum(map(len, costs.methods)),
            sum(len(costs.remaining_candidates(i, settings)) if settings.folds else 1 for i in range(len(plans))),
        ),
    }
    report_limit(limit, changed, costs.seconds(full), None if fits else costs.seconds(settings))
    return [adapt_heads(plan, costs, i, full, settings) for i, plan in enumerate(plans)], costs.seconds(settings)


def plan_steps(
    plans: Sequence[Plan],
    data: Sequence[DataSet],
    folders: Sequence[Path],
    device: torch.device,
    limit: float | None,
) -> tuple[list[Plan], float | None]:
    """Return the plans, reduced to a time limit, and the estimated seconds or None; for trained backbones."""
    configs = [plan.config for plan in plans]
    steps = [count_steps(config, len(one.train.labels)) for config, one in zip(configs, data, strict=True)]
    is_slow = device.type == "cpu" or all(config.train.execution == "eager" for config in configs)
    is_uncached = not any(config.data.cached_views for config in configs)
    if limit is None and not (is_slow and is_uncached and min(steps) >= MIN_STEPS):
        return list(plans), None
    costs = []
    for config, one, folder in zip(configs, data, folders, strict=True):
        cost = measure_steps(config, one, device, folder)
        if cost is None:
            return list(plans), None
        costs.append(cost)
    seeds, full = len(configs[0].train.seeds), configs[0].train.epochs

    def estimate(epochs: int) -> float:
        return seeds * sum(cost.seconds(epochs) for cost in costs)

    if limit is None:
        return list(plans), estimate(full)
    shorter = () if EPOCHS in plans[0].given else range(full - 1, 0, -1)
    fitting = (epochs for epochs in (full, *shorter) if estimate(epochs) <= SAFETY * limit)
    epochs = next(fitting, min(full, *shorter) if shorter else full)
    fits = estimate(epochs) <= SAFETY * limit
    report_limit(limit, {f"--{EPOCHS}": (full, epochs)}, estimate(full), None if fits else estimate(epochs))
    return [change_epochs(plan, epochs) for plan in plans], estimate(epochs)


def change_epochs(plan: Plan, epochs: int) -> Plan:
    """Return a plan with another number of epochs, and the settings that depend on it."""
    assert plan.adapt is not None
    return plan if epochs == plan.config.train.epochs else plan.adapt({EPOCHS: epochs})


def report_limit(limit: float, changed: dict[str, tuple[int, int]], before: float, too_long: float | None) -> None:
    """Log what was reduced and why.

    Args:
        limit: The time limit in seconds.
        changed: The values before and after, by name.
        before: The estimated seconds without a time limit.
        too_long: The estimated seconds with the smallest settings, if they do not fit into the limit; otherwise None.
    """
    if not is_main_process():
        return
    reduced = [f"{name} from {old} to {new}" for name, (old, new) in changed.items() if old != new]
    allowed = describe_duration(limit)
    if reduced:
        log_info(
            f"reduced {', '.join(reduced)}, because the default settings take about {describe_duration(before)} and "
            f"the time limit is {allowed}"
        )
    elif too_long is None:
        log_info(f"time limit {allowed}: the default settings fit")
    if too_long is not None:
        log_warning(
            f"--time-limit {allowed} is too short: training uses the smallest settings and takes about "
            f"{describe_duration(too_long)}"
        )


def read_reduced_settings(folders: Sequence[Path]) -> dict[str, int] | None:
    """Return the settings of a run that was started with a time limit, to continue it; None if there is no run.

    Args:
        folders: The run folders.
    """
    for folder in folders:
        if contains_run(folder):
            config = run_folder.load_config(folder)
            return {VIEWS: config.data.cached_views, FOLDS: config.data.folds, EPOCHS: config.train.epochs}
    return None
