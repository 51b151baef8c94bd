"""The interface between a method and the training loop: stages, loss, logits, features, and hooks.

Shapes: B images, F features, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from longtail.data.samplers import class_shares
from longtail.errors import UserError
from longtail.losses.numerics import at_least_float32, percent_correct, row_max_abs
from longtail.models.head_init import check_head_init
from longtail.models.heads import Classifier, make_linear_head

if TYPE_CHECKING:
    from longtail.config import Config, MethodConfig, OptimConfig, Sampler
    from longtail.models.backbones import Trunk
    from longtail.models.side_stream import SideStream
    from longtail.views.view import MixtureKind


ViewName = Literal["query", "key"]


class Mixed(NamedTuple):
    """The result of mixup or CutMix: the labels of the images that were mixed in, and the share of the original images."""

    y_B: Tensor
    share: Tensor


class Batch(NamedTuple):
    """The views of B images that a stage requires, and their labels."""

    query: Tensor
    key: Tensor | None
    y_B: Tensor
    mixed: Mixed | None = None
    partner: Batch | None = None
    weight_B: Tensor | None = None
    """The weights of the images, for methods that `can_weight_images`."""
    extra: tuple[Tensor, ...] = ()
    """The further views of a stage with `extra_views`."""
    stored: tuple[Tensor, ...] = ()
    """Values for the query view and the further views that were computed before the step: the logits of teachers."""

    @property
    def views(self) -> int:
        """The number of query views and further views of each image."""
        return 1 + len(self.extra)

    def all_views(self) -> Tensor:
        """Return the query views of all images, followed by those of each further view."""
        return torch.cat([self.query, *self.extra]) if self.extra else self.query

    def all_labels(self) -> Tensor:
        """Return the labels of `all_views`."""
        return self.y_B.repeat(self.views) if self.extra else self.y_B


@dataclass(frozen=True)
class Stage:
    """A part of training with one objective and one optimizer. A stage of 0 epochs only calls `Method.on_stage_start`."""

    name: str
    epochs: int
    optim: OptimConfig
    lr_flag: str = "--optim.lr"
    """The flag that sets the learning rate."""
    two_views: bool = False
    """Batches have a second view of each image, the key."""
    extra_views: tuple[ViewName, ...] = ()
    """The kinds of further views of each image, in `Batch.extra`. They are drawn like query or key views."""
    sampler: Sampler = "uniform"
    partner: Sampler | None = None
    """The sampler of a second batch for each step."""
    mixup: float = 0.0
    """Query views are mixed in pairs, with shares from Beta(mixup, mixup); 0 for no mixture."""
    mixture: MixtureKind = "mixup"
    """How they are mixed."""
    mixes_extra: bool = False
    """The further views are mixed like the query views, with the same images and shares."""
    frozen: bool = False
    """The backbone is frozen."""
    shift_norm: bool = False
    """The batch norm of a frozen backbone uses its batch and updates its running averages."""
    replaces_head: bool = False
    """The stage starts with a new classifier, so that earlier stages have an effect on the backbone only."""


class StageData(NamedTuple):
    """The data that a method may use at the start of a stage: features of images without augmentation, and their labels."""

    train: Callable[[], tuple[Tensor, Tensor]]
    val: Callable[[], tuple[Tensor, Tensor]] | None
    rng: torch.Generator
    """A generator on the CPU, seeded by the run's seed and the stage."""
    weight_N: Tensor | None = None
    """The weights of the training images, if they have any."""


class Method(nn.Module):
    """A network with an objective.

    A subclass names its settings in its header, `class PaCo(Method, settings="paco")`, and defines `loss_from_features`, or
    `loss` if it needs more than one view. A method of several stages lists them in `make_stages`.

    The engine calls for each step: `loss`, backward, `after_backward`, optimizer step, `after_step`; before each epoch
    `on_epoch_start`; and before each stage `set_stage`, and then `on_stage_start` unless the stage is resumed.
    """

    BY_SETTINGS: ClassVar[dict[str, type[Method]]] = {}
    """All methods by the name of their settings."""

    two_views: ClassVar[bool] = False
    extra_views: ClassVar[tuple[ViewName, ...]] = ()
    """The further views of the first stage."""
    can_weight_images: ClassVar[bool] = False
    """Whether `loss_from_features` has an argument `weight_B`."""
    config: Any
    log_prior_C: Tensor

    def __init_subclass__(cls, settings: str | type[MethodConfig] | None = None, **kwargs: Any) -> None:
        """Register a method by the class of its settings, or by their name, which does not import that class."""
        super().__init_subclass__(**kwargs)
        if settings is not None:
            Method.BY_SETTINGS[settings if isinstance(settings, str) else settings.name] = cls

    def __init__(self, net: Classifier, counts_C: Tensor, config: Config) -> None:
        """Create a method.

        Args:
            net: The network that `build_network` returned.
            counts_C: The number of training images of each class.
            config: The configuration of the run; the method keeps `config.method` as `self.config`.
        """
        super().__init__()
        check_head_init(net.head, config.model)
        self.net, self.config, self.counts_C = net, config.method, counts_C
        self.stages = self.make_stages(config)
        self.stage = self.stages[0]
        self.register_buffer("log_prior_C", log_frequencies(counts_C), persistent=False)  # not in checkpoints

    # The network

    @classmethod
    def build_network(cls, config: Config, classes: int, pretrained: bool) -> Classifier:
        """Return the network that is deployed: backbone and head."""
        trunk = cls.build_trunk(config, pretrained, classes)
        return Classifier(trunk, cls.head(trunk.width, classes, config))

    @classmethod
    def build_trunk(cls, config: Config, pretrained: bool, classes: int) -> Trunk:
        """Return the backbone. Add adapters to it, or freeze the parts that the configuration selects.

        Args:
            config: The configuration of the run.
            pretrained: Whether to load pretrained weights.
            classes: The number of classes, on which the automatic width of adapters depends.
        """
        from longtail.models.adapters import freeze_before_last_block, insert_adapters
        from longtail.models.backbones import image_size_options, make_backbone, wrap_backbone

        name, size, trainable = config.model.name, config.data.image_size, config.model.trainable
        net = make_backbone(name, pretrained, **image_size_options(name, size))
        frozen, norms = freeze_before_last_block(net, name) if trainable == "last-block" else ([], [])
        body = cls.body(net, config)
        trunk = wrap_backbone(body, name, size)
        trunk.is_pretrained = config.model.pretrained
        trunk.freeze_params(frozen)
        trunk.frozen_modules = norms
        if trainable == "head":
            trunk.freeze_module(net)
        elif trainable in ("lora", "adapter"):
            if body is not net:
                raise UserError(
                    f"--model.trainable {trainable}: this method divides the network into parts that have no adapters: use "
                    "--model.trainable last-block or head, or another method",
                    kind="conflict",
                )
            insert_adapters(trunk, trainable, config.model.rank, size, classes)
        return trunk

    @classmethod
    def body(cls, net: nn.Module, config: Config) -> nn.Module:
        """Return the network inside the backbone: `net`, or another one that is made of its parts."""
        return net

    @classmethod
    def head(cls, width: int, classes: int, config: Config) -> nn.Module:
        """Return the classifier for features of this width."""
        return make_linear_head(width, classes, config.model.bias)

    # Stages

    def make_stages(self, config: Config) -> tuple[Stage, ...]:
        """Return the stages of training, in order."""
        return (self.first_stage(config),)

    def first_stage(self, config: Config, **changes: Any) -> Stage:
        """Return the only stage of most methods, with changes to the fields of `Stage`."""
        extra = self.extra_views or ("query",) * (getattr(self.config, "views", 1) - 1)  # the setting --method.views
        usual = {"name": "train", "two_views": self.two_views, "extra_views": extra}
        fields: dict[str, Any] = usual | {"sampler": config.train.sampler} | changes
        return Stage(epochs=config.train.epochs, optim=config.optim, **fields)

    def resolved_settings(self) -> dict[str, float]:
        """Return the values of settings that were `auto`, for the record."""
        return {}

    def check(self, validated: bool) -> None:
        """Raise a UserError if the method cannot be trained; `validated` says whether there are validation images."""

    def set_stage(self, stage: Stage) -> None:
        """Set which parameters are trained in this stage."""
        self.stage = stage
        self.net.trunk.requires_grad_(not stage.frozen)

    @property
    def head_stage(self) -> Stage:
        """The first stage that trains the classifier. At its start, `--model.head_init` applies."""
        return self.stages[0]

    def on_stage_start(self, start: StageData) -> None:
        """Prepare a stage, once and not when it is resumed, for example by new weights or class means."""

    def on_epoch_start(self, epoch: int, epochs: int) -> None:
        """Change what depends on the epoch (from 0) of a stage. Tensors must be changed in place for captured steps."""

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameters to train as groups of the optimizer, which may have a `weight_decay` and an `lr_scale`."""
        return [{"params": [p for p in self.parameters() if p.requires_grad]}]

    def train(self, mode: bool = True) -> Method:
        super().train(mode)
        if self.stage.frozen and not self.stage.shift_norm:
            self.net.trunk.eval()  # the batch-norm averages are frozen, too
        return self

    # A step

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Return the scalar "loss", and other values for the log."""
        weights: Any = {} if batch.weight_B is None else {"weight_B": batch.weight_B}
        return self.loss_from_features(self.features(batch.query), batch.y_B, *(batch.mixed or ()), **weights)

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return a batch with everything that does not depend on the trained network. Seeds that share views call this once."""
        return batch

    def loss_from_features(self, x_BF: Tensor, y_B: Tensor, *mixed: Tensor) -> dict[str, Tensor]:
        """Return what `loss` returns. This part has many small operations, which `compile` fuses.

        Args:
            x_BF: The features of the backbone.
            y_B: The labels.
            mixed: The fields of `Mixed` if the stage uses mixup.
        """
        raise NotImplementedError

    def with_consistency(
        self, terms: dict[str, Tensor], logits_VC: Tensor, log_prior_C: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the terms of the loss with the weighted `consistency_loss` of several query views of each image.

        Args:
            terms: The terms of the loss of all views.
            logits_VC: The logits: those of the first view of each image, then those of the second, and so on.
            log_prior_C: The log class frequencies that the loss adds to the logits; None for nothing.
        """
        from longtail.losses.ncl import consistency_loss  # here, so that a run without it does not load it

        adjusted_VC = logits_VC if log_prior_C is None else at_least_float32(logits_VC) + log_prior_C
        consistency = consistency_loss(adjusted_VC.unflatten(0, (self.config.views, -1)))
        return terms | {"loss": terms["loss"] + self.config.consistency * consistency, "consistency": consistency}

    compiled_functions: ClassVar[tuple[str, ...]] = ("loss_from_features",)
    """The methods that `compile` compiles."""

    def compiled_modules(self) -> tuple[nn.Module, ...]:
        """Return the modules that `compile` compiles, in addition to the functions."""
        return ()

    def compile(self, *_: Any, **__: Any) -> None:
        """Compile what follows the backbone; tensors have fixed sizes in training."""
        for name in self.compiled_functions:
            setattr(self, name, compile_function(getattr(self, name)))
        for module in self.compiled_modules():
            module.compile(**compile_options())

    def waiting_lists(self) -> tuple[list[Any], ...]:
        """Return the lists that `loss` appends to and `after_backward` empties."""
        return ()

    def after_backward(self, side: SideStream) -> None:
        """Start what can run in parallel to the optimizer, for example a queue."""

    def after_step(self) -> None:
        """Do what follows the optimizer step, for example an update of a momentum network."""

    # The deployed network

    @property
    def class_weights(self) -> nn.Parameter:
        """The weights (…, C, F) of the classifier in this stage, one row for each class."""
        return self.net.get_parameter("head.weight")

    @property
    def linear(self) -> nn.Linear:
        """The linear head that most methods have."""
        assert isinstance(self.net.head, nn.Linear)
        return self.net.head

    def features(self, x: Tensor) -> Tensor:
        """Return the features of images."""
        return self.net.trunk(x)

    def classify(self, x_BF: Tensor) -> Tensor:
        """Return the logits of features."""
        return self.net.head(x_BF)

    def extra_metrics(self, x_BF: Tensor) -> dict[str, float]:
        """Return additional entries of metrics.json, from the features of the test set."""
        return {}

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images as they are deployed, without a prior."""
        return self.classify(self.features(x))

    @property
    def classifier_stage(self) -> Stage:
        """The stage that trained the classifier."""
        return [stage for stage in self.stages if stage.epochs][-1]

    def prior(self) -> Tensor:
        """Return the class frequencies that the logits assume, (C,) in float64.

        They are those that the classifier was trained with, unless the loss accounts for them. For other frequencies add the
        log of their ratio to these to the logits.
        """
        return class_shares(self.classifier_stage.sampler, self.counts_C.cpu(), done=1.0)

    def prior_after(self, log_shift_C: Tensor) -> Tensor:
        """Return the `prior` of a loss that adds log_shift_C to the logits in training, and not in deployment."""
        return reweight_frequencies(Method.prior(self), (-log_shift_C.double()).exp())

    def drop_training_modules(self) -> Method:
        """Remove what only training needs (key networks, projections, queues), and return the method."""
        for name in [name for name, _ in self.named_children() if name != "net"]:
            setattr(self, name, None)
        return self


def compile_function(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled with `compile_options`."""
    return torch.compile(work, **compile_options())


def compile_options() -> dict[str, Any]:
    """Return the arguments of torch.compile for matrices of some hundred rows: one thread block reduces a whole row."""
    return {"dynamic": False, "options": {"split_reductions": False}}


def log_frequencies(counts_C: Tensor) -> Tensor:
    """Return log q(y) from the number of images of each class."""
    return (counts_C.double() / counts_C.sum()).log().float()


def max_abs(logits: Tensor) -> Tensor:
    """Return the largest magnitude; row by row first, which a compiler fuses with the loss."""
    return row_max_abs(logits).amax()


def accuracy(logits_BC: Tensor, y_B: Tensor) -> Tensor:
    """Return the percentage of images whose largest logit is that of their class."""
    return percent_correct(logits_BC.detach().argmax(1), y_B)


def reweight_frequencies(shares_C: Tensor, weight_C: Tensor) -> Tensor:
    """Return class frequencies multiplied by weights, normalized to sum to 1; a frequency of 0 remains 0."""
    product_C = torch.where(shares_C > 0, shares_C * weight_C.double().cpu(), 0.0)
    return product_C / product_C.sum()


def uniform_prior(shares_C: Tensor) -> Tensor:
    """Return equal frequencies for all classes whose frequency is not 0."""
    return reweight_frequencies(shares_C, 1 / shares_C)
