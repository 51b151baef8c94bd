"""The teachers of a distillation: finished runs, which are checked against the images of the student and loaded.

Where the student is a head on stored features of fixed views, the teachers see these views once, and their logits are stored in
the feature cache. Where views are drawn in each step, the teachers run in each step.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from longtail import methods, run_folder
from longtail.config import Config, DistillationSettings, TrainConfig
from longtail.data.lazy_images import IntArray
from longtail.data.sources import DataSet
from longtail.engine.evaluate import load_stored_network
from longtail.engine.features import split_features
from longtail.errors import UserError
from longtail.losses.distillation import log_mean_softmax
from longtail.methods.base import log_frequencies
from longtail.methods.distillation import Distillation, Teacher
from longtail.models.backbones import Trunk
from longtail.run_folder import FinishedRun
from longtail.views import Views
from longtail.views.view import normalization_tensors


def set_teachers(
    method: methods.Method,
    config: Config,
    data: DataSet,
    device: torch.device,
    sibling: methods.Method | None = None,
) -> None:
    """Load the teachers of a distillation. Other methods are not changed.

    Args:
        method: The method of the student.
        config: The configuration of the student.
        data: The images of the student.
        device: The device.
        sibling: The method of another seed, whose teachers are shared.
    """
    if isinstance(method, Distillation):
        shared = sibling.teachers if isinstance(sibling, Distillation) else ()
        method.set_teachers(shared or load_teachers(config, data, device))


def load_teachers(config: Config, data: DataSet, device: torch.device) -> tuple[Teacher, ...]:
    """Return the teachers of a student, on a device and in the precision of the student.

    Args:
        config: The configuration of the student.
        data: The images of the student.
        device: The device.

    Raises:
        UserError: A teacher was changed, was trained on other images, or needs larger images than the student.
    """
    assert isinstance(config.method, DistillationSettings)
    paths = config.method.teachers
    if not paths:
        raise UserError("a distillation needs teachers: start it with `longtail distill TEACHER_RUN`")
    runs = [run_folder.read(path) for path in paths]
    check_teachers(runs, data, config.data.image_size)
    teachers = tuple(load_teacher(run, config, data, device) for run in runs)
    check_unchanged(runs, config.method.teacher_checksums)
    return teachers


def hash_teachers(runs: Sequence[FinishedRun]) -> tuple[str, ...]:
    """Return the checksums of teachers. Each one is loaded first, so that only files of the size of its network are hashed."""
    for run in runs:
        load_network(run, run.config, np.ones(len(run.metrics["per_class"]), np.int64), torch.device("cpu"))
    return tuple(map(run_folder.hash_network, runs))


def check_unchanged(runs: Sequence[FinishedRun], checksums: Sequence[str]) -> None:
    """Raise a UserError if a teacher is not the network with which the distillation was started.

    Args:
        runs: The teachers.
        checksums: Their checksums at that time.
    """
    found = [run_folder.hash_network(run) for run in runs]
    for run, now, before in zip(runs, found, [*checksums, *[""] * len(runs)], strict=False):
        if now != before:
            raise UserError(
                f"the teacher {run.folder} was changed (checksum {before or 'none'}, now {now}): restore it, or start the "
                "distillation again in another folder",
                kind="mismatch",
            )


def check_teachers(runs: Sequence[FinishedRun], data: DataSet, image_size: int) -> None:
    """Raise a UserError unless teachers were trained on the training images of the student and accept its views.

    Args:
        runs: The teachers.
        data: The images of the student.
        image_size: The image size of the student, in pixels.
    """
    for run in runs:
        stored, names = run.environment["data"], run.metrics.get("class_names")
        if tuple(names or ()) != tuple(data.train.class_names):
            raise UserError(
                f"the teacher {run.folder} has other classes than the student: use a run on the same images",
                kind="mismatch",
            )
        if stored["checksum"] != data.checksum:
            raise UserError(
                f"the teacher {run.folder} was trained on other images (checksum {stored['checksum']}, those of the student "
                f"have {data.checksum}): give the folder of its images as --data.root",
                kind="mismatch",
            )
        if list(stored.get("counts") or ()) != data.train.counts.tolist():
            raise UserError(
                f"the teacher {run.folder} and the student hold out different images for validation: use its "
                f"--data.val_fraction {run.config.data.val_fraction:g}",
                kind="mismatch",
            )
        if run.config.data.image_size > image_size:
            raise UserError(
                f"the teacher {run.folder} was trained on images of {run.config.data.image_size} pixels, and those of the "
                f"student have only {image_size}: use --image-size {run.config.data.image_size}",
                kind="mismatch",
            )


def load_teacher(run: FinishedRun, config: Config, data: DataSet, device: torch.device) -> Teacher:
    """Return the teacher of a run.

    Args:
        run: The run.
        config: The configuration of the student.
        data: The images.
        device: The device.
    """
    student = config.train
    execution: TrainConfig = replace(
        run.config.train, precision=student.precision, channels_last=student.channels_last, execution="eager"
    )
    network = load_network(run, replace(run.config, train=execution), data.train.counts, device)
    store_in_precision(network.net.trunk)
    mean, std = normalization_tensors(config.views.normalize, device)
    own_mean, own_std = normalization_tensors(run.config.views.normalize, device)
    log_prior_C = log_frequencies(torch.from_numpy(data.train.counts)).to(device)
    size, scale, shift = run.config.data.image_size, std / own_std, (mean - own_mean) / own_std
    return Teacher(network.drop_training_modules(), log_prior_C, size, scale, shift).to(device)


def load_network(run: FinishedRun, config: Config, counts: IntArray, device: torch.device) -> methods.Method:
    """Return the network of a teacher; raise a UserError if its logits are not finite.

    Args:
        run: The run.
        config: Its configuration, with the execution of the student.
        counts: The number of training images of each class.
        device: The device.
    """
    state = torch.get_rng_state()  # a new network takes random numbers, which the student must not notice
    try:
        network = load_stored_network(run.folder / run_folder.MODEL, config, counts, device).eval()
    finally:
        torch.set_rng_state(state)
    size = run.config.data.image_size
    with torch.no_grad():
        is_finite = network(torch.zeros(1, 3, size, size, device=device)).isfinite().all()
    if not is_finite:
        raise UserError(
            f"the teacher {run.folder} has logits that are not finite: train it again, or leave it out",
            kind="damaged-file",
        )
    return network


def store_in_precision(trunk: Trunk) -> None:
    """Convert the weights of convolutions and linear layers to the precision of a backbone, once instead of in each step."""
    for layer in trunk.body.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.to(trunk.precision)


def stored_teacher_logits(
    config: Config, data: DataSet, device: torch.device, num_views: int, show: bool = False
) -> Tensor:
    """Return the prior-adjusted logits of all teachers together, (1 + num_views, N, C), for the stored views of a student.

    They are computed in float32, or read from the feature cache.

    Args:
        config: The configuration of the student.
        data: The images.
        device: The device that computes them.
        num_views: Number of augmented views of each training image.
        show: Display the progress.
    """
    exact = replace(config, train=replace(config.train, precision="fp32"))
    views = Views(config.views, config.data.image_size)
    logits = [
        split_features(exact, data.train, views, Trunk(teacher, len(data.train.counts)), device, num_views, show)
        for teacher in load_teachers(exact, data, device)
    ]
    K, V, N, C = len(logits), *logits[0].shape
    return log_mean_softmax(torch.stack(logits).view(K, V * N, C)).view(V, N, C).to(device)
