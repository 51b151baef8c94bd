"""Training of a head on features that were computed once: the loop behind cached views, cross-validation and the estimators.

The methods are those of `longtail.methods`. Their backbone is replaced by `FeatureTrunk`, which returns its input, and a batch
holds stored features in the place of views. A fit takes seconds on a CPU and is a function of its arguments, so it has no
checkpoints.

Shapes: V views, N images, F features, B images of a batch, C classes. View 0 is the plain image.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longtail.config import Config
from longtail.data.samplers import derive_seed, epoch_order
from longtail.engine.meter import Meter, NonFiniteError
from longtail.engine.optim import learning_rate, make_optimizer, set_learning_rate
from longtail.errors import RunError, UserError
from longtail.methods import Batch, Method, Mixed, Stage, StageData, find_method
from longtail.models.backbones import Trunk
from longtail.models.heads import Classifier
from longtail.models.side_stream import SideStream
from longtail.views.mixup import mixup

LogEpoch = Callable[[dict[str, Any]], None]


class FeatureTrunk(Trunk):
    """A backbone whose input are features already."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Identity(), width)

    def forward(self, x: Tensor, *part: Any) -> Tensor:
        return x


class Scaling(NamedTuple):
    """A shift and a scale of features, x' = (x - mean) / scale, so that learning rates do not depend on the backbone."""

    mean_F: Tensor
    scale: float

    @classmethod
    def of(cls, x_NF: Tensor, center: bool) -> "Scaling":
        """Return the scaling that gives features, averaged over all of them, the mean square 1.

        Args:
            x_NF: The features.
            center: Whether the mean of each feature becomes 0.
        """
        mean_F = x_NF.mean(0) if center else torch.zeros_like(x_NF[0])
        return cls(mean_F, max(float((x_NF - mean_F).square().mean().sqrt()), 1e-12))

    def apply(self, x: Tensor) -> Tensor:
        """Return scaled features."""
        return (x - self.mean_F) / self.scale

    @torch.no_grad()
    def fold_into(self, head: nn.Linear) -> None:
        """Change a head of scaled features into the equivalent head of features that are not scaled."""
        head.weight.div_(self.scale)
        if head.bias is not None:
            head.bias.sub_(head.weight @ self.mean_F)


def make_feature_method(config: Config, counts_C: Tensor, width: int) -> Method:
    """Return a method whose input are features.

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
) -> Method:
    """Train a method on stored features, and return it for features as input.

    Features are scaled for the training; a linear head is converted to the original features at the end.

    Args:
        views_VNF: The features of the training images. Each step uses a random view of each image, and contrastive methods use
            a different one as the key. View 0 is the plain image.
        y_N: The labels.
        config: The configuration, of which the method, the optimizer, the length, the batch size and the sampler are used.
        classes: The number of classes. A class without a training image is never predicted.
        seed: The seed of the weights and of the order of images and views.
        val: Features and labels of validation images, for methods that select a setting on them.
        log_epoch: Called after each epoch with its row of the log.
    """
    device = views_VNF.device
    counts_C = torch.bincount(y_N, minlength=classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        method = make_feature_method(config, counts_C, views_VNF.shape[2]).to(device)
    method.check(val is not None)
    head, scaling = method.net.head, None
    if isinstance(head, nn.Linear):
        scaling = Scaling.of(views_VNF[0], center=head.bias is not None)
        views_VNF = scaling.apply(views_VNF)
        val = None if val is None else (scaling.apply(val[0]), val[1])
    epochs_before = 0
    for index, stage in enumerate(method.stages):
        method.set_stage(stage)
        rng = torch.Generator().manual_seed(derive_seed("begin", seed, index))
        train = (views_VNF[0], y_N)
        method.on_stage_start(StageData(lambda train=train: train, None if val is None else lambda val=val: val, rng))  # type: ignore[misc]
        method.train()
        _fit_stage(method, stage, views_VNF, y_N, config, seed, epochs_before, log_epoch)
        epochs_before += stage.epochs
    method.eval()
    if scaling is not None:
        scaling.fold_into(method.linear)
    return method


def _fit_stage(
    method: Method,
    stage: Stage,
    views_VNF: Tensor,
    y_N: Tensor,
    config: Config,
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
        config: The configuration.
        seed: The seed.
        epochs_before: The number of epochs of earlier stages.
        log_epoch: Called after each epoch.
    """
    if not stage.epochs:
        return
    device, batch = views_VNF.device, min(config.train.batch_size, len(y_N))
    steps = len(y_N) // batch
    optimizer = make_optimizer(stage.optim, method.param_groups(), method.net.trunk, device)
    side, meter = SideStream(device), Meter()
    clock = torch.zeros((), dtype=torch.int64, device=device)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for epoch in range(stage.epochs):
        method.on_epoch_start(epoch, stage.epochs)
        number, done = epochs_before + epoch, epoch / stage.epochs
        order_N = epoch_order(stage.sampler, y_N.cpu(), seed, number, done).to(device)
        mix_rng = torch.Generator(device).manual_seed(derive_seed("mixup", seed, number))
        query_N, key_N = draw_views(len(y_N), len(views_VNF), seed, number, device)
        for step in range(steps):
            rate = learning_rate(stage.optim, epoch * steps + step, steps, stage.epochs)
            set_learning_rate(optimizer, rate)
            part = slice(step * batch, (step + 1) * batch)
            rows_B = order_N[part]
            query, y_B, mixed = views_VNF[query_N[part], rows_B], y_N[rows_B], None
            if stage.mixup:
                query, other_B, share = mixup(query, y_B, batch, stage.mixup, mix_rng)
                mixed = Mixed(other_B, share[0])
            key = views_VNF[key_N[part], rows_B] if stage.two_views else None
            terms = method.loss(Batch(query, key, y_B, mixed))
            terms["loss"].backward()
            method.after_backward(side)
            if stage.optim.clip:
                torch.nn.utils.clip_grad_norm_(parameters, stage.optim.clip)
            optimizer.step()
            optimizer.zero_grad()
            method.after_step()
            meter.add(terms, clock)
            meter.count += 1
        try:
            means = meter.means()
        except NonFiniteError as error:
            raise RunError(
                f"the loss is not finite in epoch {number + 1}: use a lower learning rate ({stage.lr_flag})",
                kind="non-finite",
            ) from error
        meter.reset()
        if log_epoch is not None:
            log_epoch({"stage": stage.name, "epoch": epoch, "epochs": stage.epochs, **means, "lr": rate})


def draw_views(images: int, views: int, seed: int, epoch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the view of each image of an epoch as query and as key. They differ if there is more than one view.

    Args:
        images: The number of images.
        views: The number of views.
        seed: The seed of the run.
        epoch: The epoch, counted over all stages.
        device: The device of the result.
    """
    rng = torch.Generator().manual_seed(derive_seed("views", seed, epoch))
    query_N = torch.randint(views, (images,), generator=rng)
    other_N = torch.randint(1, max(views, 2), (images,), generator=rng)
    return query_N.to(device), ((query_N + other_N) % views).to(device)
