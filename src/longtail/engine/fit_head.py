"""Training of a head on stored features: the loop behind cached views, cross-validation and the estimators, and its settings.

The methods are those of `longtail.methods`. Their backbone is replaced by `FeatureTrunk`, which returns its input, and a batch
holds stored features in the place of views. A fit takes seconds on a CPU and is a function of its arguments, so it has no
checkpoints.

Shapes: V views, N images, F features, B images of a batch, C classes. View 0 is the plain image.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longtail.config import Config, LinearStageSettings, OptimConfig, TrainConfig
from longtail.data.samplers import derive_seed, epoch_order
from longtail.engine.device import use_threads
from longtail.engine.optim import learning_rate, make_optimizer, set_learning_rate
from longtail.engine.sharpness import perturbed
from longtail.errors import RunError, UserError
from longtail.methods import Batch, Method, Mixed, Stage, StageData, find_method
from longtail.models.backbones import Trunk
from longtail.models.heads import Classifier, ScaledHead
from longtail.models.side_stream import SideStream
from longtail.models.weight_average import WeightAverage
from longtail.recipes import find_preset
from longtail.views.view import draw_mixture

ONE_THREAD_PRODUCTS = 2**25
"""The largest number of products of a layer that is computed in one thread: some milliseconds."""

LogEpoch = Callable[[dict[str, Any]], None]

MAX_QUEUE = 1024
"""The longest queue of `head_config`."""


class FeatureTrunk(Trunk):
    """A backbone for inputs that are features already: it returns its input."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Identity(), width)

    def forward(self, x: Tensor, *part: Any) -> Tensor:
        return x


class Scaling(NamedTuple):
    """A shift and a scale of features, x' = (x - mean) / scale, so that learning rates do not depend on the backbone."""

    mean_F: Tensor
    scale: float

    @classmethod
    def of(cls, x_NF: Tensor, center: bool, weight_N: Tensor | None = None) -> "Scaling":
        """Return the scaling that gives features, averaged over all of them, the mean square 1.

        Args:
            x_NF: The features.
            center: Whether the mean of each feature becomes 0.
            weight_N: The weight of each image; None for equal weights.
        """
        weight_1N = x_NF.new_ones(1, len(x_NF)) if weight_N is None else weight_N[None]
        weight_1N = weight_1N / weight_1N.sum()
        mean_F = (weight_1N @ x_NF)[0] if center else torch.zeros_like(x_NF[0])
        mean_square = float((weight_1N @ (x_NF - mean_F).square()).mean())
        return cls(mean_F, mean_square**0.5 or 1.0)  # constant features are not scaled

    def apply(self, x: Tensor) -> Tensor:
        """Return scaled features."""
        return (x - self.mean_F) / self.scale

    @torch.no_grad()
    def fold_into(self, head: nn.Linear) -> None:
        """Change a head of scaled features into the equivalent head of features that are not scaled."""
        head.weight.div_(self.scale)
        if head.bias is not None:
            head.bias.sub_(head.weight @ self.mean_F)


def head_config(
    method: str,
    images: int,
    epochs: int = 60,
    learning_rate: float = 0.1,
    weight_decay: float = 5e-4,
    batch_size: int = 64,
    **settings: Any,
) -> Config:
    """Return the configuration for training a head on stored features with `fit_head`: SGD with a cosine schedule.

    Args:
        method: The name of the method, one of `longtail.recipes.METHODS`.
        images: The number of training images; batch and queue are not longer.
        epochs: The number of epochs of each stage.
        learning_rate: The learning rate of each stage, for features that are scaled to a mean square of 1.
        weight_decay: The weight decay of each stage.
        batch_size: The batch size.
        settings: Settings of the method, with the names of their flags.
    """
    if not isinstance(images, Integral) or images < 1:
        raise UserError(f"images is {images!r}: give the number of training images")
    preset, batch_size = find_preset(method), min(batch_size, images)
    # A training has some hundred steps, which is too short for a momentum of 0.999.
    defaults: dict[str, Any] = {"tau": 0.1, "alpha": "auto", "queue": min(MAX_QUEUE, images), "momentum": 0.99}
    linear: dict[str, Any] = {"linear_epochs": epochs, "linear_lr": learning_rate, "linear_decay": weight_decay}
    config = Config(
        recipe="features",
        method=preset.make_settings(batch_size, **defaults),
        optim=OptimConfig(lr=learning_rate, weight_decay=weight_decay),
        train=TrainConfig(epochs=epochs, batch_size=batch_size),
    )
    if issubclass(preset.settings_class, LinearStageSettings):
        settings = linear | settings  # some presets have a rate of their own for images
    return replace(config, method=replace(config.method, **settings))


def make_feature_method(config: Config, counts_C: Tensor, width: int) -> Method:
    """Return a method whose inputs are features.

    Args:
        config: The configuration; the settings of data, views and backbone are not used.
        counts_C: The number of training images of each class.
        width: The number of features.
    """
    kind = find_method(config.method)
    check_supports_features(kind)
    method = kind(Classifier(FeatureTrunk(width), kind.head(width, len(counts_C), config)), counts_C, config)
    return method


def supports_features(kind: type[Method]) -> bool:
    """Return whether the loss of a method needs only the features of the backbone."""
    return kind.body.__func__ is Method.body.__func__  # type: ignore[attr-defined]


def check_supports_features(kind: type[Method]) -> None:
    """Raise a UserError if a method needs more than the features of the backbone."""
    if not supports_features(kind):
        raise UserError(
            f"{kind.__name__} changes the backbone, so it cannot be trained on stored features: use --data.cached_views 0",
            kind="unsupported",
        )


def fit_head(
    views_VNF: Tensor,
    y_N: Tensor,
    config: Config,
    classes: int,
    seed: int = 0,
    val: tuple[Tensor, Tensor] | None = None,
    log_epoch: LogEpoch | None = None,
    weight_N: Tensor | None = None,
    stored_VNC: Tensor | None = None,
) -> Method:
    """Train a method on stored features, and return it. Its inputs are features.

    A linear head is trained on scaled features, and converted to the original features at the end. Its weights are zero at
    first, because random ones would remain in the directions in which the training images do not differ. The precision is that
    of the features. Stages that have an effect on the backbone only are left out.

    Args:
        views_VNF: The features of the training images. Each step uses a random view of each image, and contrastive methods use
            a different one as the key. View 0 is the plain image.
        y_N: The labels.
        config: The configuration, of which the method, the optimizer, the length, the batch size and the sampler are used;
            `head_config` returns one.
        classes: The number of classes. A class without a training image is never predicted by a linear head with a bias.
        seed: The seed of the weights and of the order of images and views.
        val: Features and labels of validation images, for methods that select a setting on them.
        log_epoch: Called after each epoch with its row of the log.
        weight_N: The positive weight of each image in loss, class frequencies and class means; None for equal weights.
        stored_VNC: Values of each view of each image that the method needs, for a distillation the logits of the teachers.
    """
    check_features(views_VNF, y_N, classes)
    counts_C = torch.bincount(y_N.cpu(), None if weight_N is None else weight_N.cpu(), minlength=classes)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the generators of GPUs
        method = make_feature_method(config, counts_C, views_VNF.shape[2])
    method = method.to(views_VNF.device, views_VNF.dtype)
    method.check(val is not None)
    if weight_N is not None:
        check_can_weight_images(method)
    first = find_first_stage(method)
    head, scaling = method.net.head, None
    if isinstance(head, nn.Linear) and any(stage.epochs for stage in method.stages[first:]):
        scaling = Scaling.of(views_VNF[0], head.bias is not None, weight_N)
        views_VNF = scaling.apply(views_VNF)
        val = None if val is None else (scaling.apply(val[0]), val[1])
    train, epochs_before = (views_VNF[0], y_N), 0
    for index, stage in enumerate(method.stages[first:], first):
        method.set_stage(stage)
        rng = torch.Generator().manual_seed(derive_seed("begin", seed, index))
        read_val = None if val is None else lambda: val
        method.on_stage_start(StageData(lambda: train, read_val, rng, weight_N))
        if isinstance(head, nn.Linear) and index == first and stage.epochs:
            nn.init.zeros_(head.weight)
        method.train()
        train_data = views_VNF, y_N, weight_N, stored_VNC
        is_small = config.train.batch_size * views_VNF.shape[2] * classes <= ONE_THREAD_PRODUCTS
        with use_threads(1 if is_small else torch.get_num_threads()):
            _fit_stage(method, stage, *train_data, config.train, seed, epochs_before, log_epoch)
        epochs_before += stage.epochs
    method.eval()
    if scaling is not None:
        scaling.fold_into(method.linear)
    if isinstance(head, nn.Linear):
        exclude_classes(head, counts_C == 0)
    return method


def check_features(views_VNF: Tensor, y_N: Tensor, classes: int) -> None:
    """Raise a UserError unless the arguments of `fit_head` fit together.

    Args:
        views_VNF: The features.
        y_N: The labels.
        classes: The number of classes.
    """
    if not isinstance(views_VNF, Tensor) or views_VNF.dim() != 3 or not views_VNF.is_floating_point():
        found = f"the shape {tuple(views_VNF.shape)}" if isinstance(views_VNF, Tensor) else type(views_VNF).__name__
        raise UserError(f"features must be a tensor of floats with the shape (views, images, features), got {found}")
    if not isinstance(y_N, Tensor) or y_N.dtype != torch.int64 or y_N.shape != views_VNF.shape[1:2]:
        raise UserError(f"labels must be a tensor of int64 with the shape ({views_VNF.shape[1]},)", kind="bad-labels")
    if not len(y_N) or y_N.min() < 0 or y_N.max() >= classes:
        raise UserError(f"labels must be from 0 to {classes - 1}", kind="bad-labels")


def find_first_stage(method: Method) -> int:
    """Return the index of the first stage that is trained on stored features: earlier ones affect the backbone only."""
    return max((i for i, stage in enumerate(method.stages) if stage.replaces_head), default=0)


def count_epochs(method: Method) -> int:
    """Return the number of epochs of all stages that are trained on stored features."""
    return sum(stage.epochs for stage in method.stages[find_first_stage(method) :])


def check_can_weight_images(method: Method) -> None:
    """Raise a UserError if the images of a method cannot have weights."""
    if not method.can_weight_images or any(stage.mixup for stage in method.stages):
        raise UserError(
            f"{type(method).__name__} does not support weights of images: train without weights", kind="unsupported"
        )


@torch.no_grad()
def exclude_classes(head: nn.Linear, excluded_C: Tensor) -> None:
    """Change the bias of a linear head so that these classes are never predicted; a head without bias is not changed."""
    if head.bias is not None:
        excluded_C = excluded_C.to(head.bias.device)
        head.bias[excluded_C] = torch.finfo(torch.float32).min
        if isinstance(head, ScaledHead):
            head.scale_C[excluded_C] = 1


def _fit_stage(
    method: Method,
    stage: Stage,
    views_VNF: Tensor,
    y_N: Tensor,
    weight_N: Tensor | None,
    stored_VNC: Tensor | None,
    train: TrainConfig,
    seed: int,
    epochs_before: int,
    log_epoch: LogEpoch | None,
) -> None:
    """Train one stage of a method.

    Args:
        method: The method, in this stage.
        stage: The stage.
        views_VNF: The scaled features.
        y_N: The labels.
        weight_N: The weights of the images.
        stored_VNC: Values of each view of each image, for `Batch.stored`.
        train: The settings of training, of which the batch size and the decay of the averaged weights are used. The batch
            size of a smaller data set is its size.
        seed: The seed.
        epochs_before: The number of epochs of earlier stages.
        log_epoch: Called after each epoch.
    """
    if not stage.epochs:
        return
    seed = train.seed_of_views(seed)
    device, batch = views_VNF.device, min(train.batch_size, len(y_N))
    steps = len(y_N) // batch
    on_cpu = device.type == "cpu"
    optimizer = make_optimizer(stage.optim, method.param_groups(), method.net.trunk, device, fused=on_cpu)
    side, average = SideStream(device), WeightAverage(method.net, train.ema)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for epoch in range(stage.epochs):
        method.on_epoch_start(epoch, stage.epochs)
        number, done = epochs_before + epoch, epoch / stage.epochs
        order_N = epoch_order(stage.sampler, y_N.cpu(), seed, number, done).to(device)
        mix_rng = torch.Generator(device).manual_seed(derive_seed("mixup", seed, number))
        query_N, key_N, *extra_N = draw_views(len(y_N), len(views_VNF), seed, number, device, len(stage.extra_views))
        rows: list[Tensor] = []  # the values of each step for the log
        for step in range(steps):
            rate = learning_rate(stage.optim, epoch * steps + step, steps, stage.epochs)
            set_learning_rate(optimizer, rate)
            part = slice(step * batch, (step + 1) * batch)
            rows_B = order_N[part]
            y_B, mixed = y_N[rows_B], None
            query, *extra = (views_VNF[view_N[part], rows_B] for view_N in (query_N, *extra_N))
            if stage.mixup:
                mixture = draw_mixture("mixup", batch, batch, 0, stage.mixup, mix_rng)
                query, mixed = mixture.apply(query), Mixed(y_B[mixture.partner_N], mixture.share[0])
            key = views_VNF[key_N[part], rows_B] if stage.two_views else None
            weight_B = None if weight_N is None else weight_N[rows_B]
            stored: tuple[Tensor, ...] = ()
            if stored_VNC is not None:
                stored = tuple(stored_VNC[view_N[part], rows_B] for view_N in (query_N, *extra_N))
            given = Batch(query, key, y_B, mixed, None, weight_B, tuple(extra), stored)
            terms = method.loss(given)
            terms["loss"].backward()
            if stage.optim.sam:
                with perturbed(method, optimizer, stage.optim.sam):
                    method.loss(given)["loss"].backward()
            method.after_backward(side)
            if stage.optim.clip:
                torch.nn.utils.clip_grad_norm_(parameters, stage.optim.clip)
            optimizer.step()
            optimizer.zero_grad()
            method.after_step()
            average.set_step(epoch * steps + step)
            average.update()
            rows.append(torch.stack([value.detach() for value in terms.values()]))
        means = torch.stack(rows).mean(0).tolist()
        if not all(map(math.isfinite, means)):
            raise RunError(
                f"the loss is not finite in epoch {number + 1}: use a lower learning rate ({stage.lr_flag})",
                kind="non-finite",
            )
        if log_epoch is not None:
            values = dict(zip(terms, means, strict=True))
            log_epoch({"stage": stage.name, "epoch": epoch, "epochs": stage.epochs, **values, "lr": rate})
    average.deploy()


def draw_views(
    images: int, views: int, seed: int, epoch: int, device: torch.device, extra: int = 0
) -> tuple[Tensor, ...]:
    """Return the view of each image of an epoch as query, as key, and as further views.

    Query and key differ if there is more than one view. Further views may be equal to others.

    Args:
        images: The number of images.
        views: The number of views.
        seed: The seed of the run.
        epoch: The epoch, counted over all stages.
        device: The device of the result.
        extra: The number of further views.
    """
    rng = torch.Generator().manual_seed(derive_seed("views", seed, epoch))
    query_N = torch.randint(views, (images,), generator=rng)
    other_N = torch.randint(1, max(views, 2), (images,), generator=rng)
    extra_N = [torch.randint(views, (images,), generator=rng) for _ in range(extra)]
    return tuple(view_N.to(device) for view_N in (query_N, (query_N + other_N) % views, *extra_N))
