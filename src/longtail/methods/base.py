"""What the training loop knows of a method: stages, a loss, logits, features, and what happens before and after a step.

B images, F features, C classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from longtail.config import Config, MethodConfig, OptimConfig, Sampler
from longtail.data.samplers import class_shares
from longtail.models.backbones import Trunk, image_size_options, make_backbone, wrap_backbone
from longtail.models.heads import Classifier, linear_head
from longtail.models.side_stream import SideStream
from longtail.models.split_resnets import weights_before_last_block


class Mixed(NamedTuple):
    """What mixup did to a batch: the labels of the images mixed in, and the share of the first ones."""

    y_B: Tensor
    share: Tensor


class Batch(NamedTuple):
    """The views of B images that a stage asked for, and their labels."""

    query: Tensor
    key: Tensor | None
    y_B: Tensor
    mixed: Mixed | None = None
    partner: "Batch | None" = None


@dataclass(frozen=True)
class Stage:
    """A stretch of training with one objective and one optimizer; one of no epochs is for what `Method.begin` does."""

    name: str
    epochs: int
    optim: OptimConfig
    rate: str = "--optim.lr"
    """The flag that sets its learning rate."""
    two_views: bool = False
    sampler: Sampler = "uniform"
    partner: Sampler | None = None
    """The sampler of a second batch beside the first."""
    mixup: float = 0.0
    """Images are mixed in pairs, by shares from Beta(mixup, mixup); 0: not."""
    frozen: bool = False
    """The trunk does not learn."""
    shift_norm: bool = False
    """A frozen trunk's batch norm sees its batch and keeps averaging."""


class Start(NamedTuple):
    """What a method may look at when a stage begins: trunk features of images without augmentation, and their labels."""

    train: Callable[[], tuple[Tensor, Tensor]]
    val: Callable[[], tuple[Tensor, Tensor]] | None
    rng: torch.Generator
    """On the CPU, its seed a function of the run's and the stage."""


class Method(nn.Module):
    """A network with an objective. Subclasses name their `settings`, and give `after_trunk`, or `loss` where more than one
    view is seen; those of several stages list them in `make_stages`."""

    BY_SETTINGS: ClassVar[dict[type[MethodConfig], type["Method"]]] = {}

    two_views: ClassVar[bool] = False
    config: Any
    log_prior_C: Tensor

    def __init_subclass__(cls, settings: type[MethodConfig] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if settings is not None:
            Method.BY_SETTINGS[settings] = cls

    def __init__(self, net: Classifier, counts_C: Tensor, config: Config) -> None:
        super().__init__()
        self.net, self.config, self.counts_C = net, config.method, counts_C
        self.stages = self.make_stages(config)
        self.stage = self.stages[0]
        self.register_buffer("log_prior_C", log_frequencies(counts_C), persistent=False)  # derived: in no checkpoint

    # The network

    @classmethod
    def network(cls, config: Config, classes: int, pretrained: bool) -> Classifier:
        """Trunk and head, before the method is made of them."""
        trunk = cls.trunk(config, pretrained)
        return Classifier(trunk, cls.head(trunk.width, classes, config))

    @classmethod
    def trunk(cls, config: Config, pretrained: bool) -> Trunk:
        name, size, learns = config.model.name, config.data.image_size, config.model.trainable
        net = make_backbone(name, pretrained, **image_size_options(name, size))
        fixed = weights_before_last_block(net, name) if learns == "last-block" else []
        trunk = wrap_backbone(cls.body(net, config), name, size)
        trunk.freeze_params(fixed)
        if learns == "head":
            trunk.freeze_module(net)
        return trunk

    @classmethod
    def body(cls, net: nn.Module, config: Config) -> nn.Module:
        """What the trunk has inside: the network of that name, or one put together from it."""
        return net

    @classmethod
    def head(cls, width: int, classes: int, config: Config) -> nn.Module:
        return linear_head(width, classes, config.model.bias)

    # Stages

    def make_stages(self, config: Config) -> tuple[Stage, ...]:
        return (self.first_stage(config),)

    def first_stage(self, config: Config, **changes: Any) -> Stage:
        """What most methods have alone."""
        usual = {"name": "train", "two_views": self.two_views, "sampler": config.train.sampler}
        asked: dict[str, Any] = usual | changes
        return Stage(epochs=config.train.epochs, optim=config.optim, **asked)

    def chosen(self) -> dict[str, float]:
        """What settings of `auto` came to, for the record."""
        return {}

    def check(self, validated: bool) -> None:
        """A UserError if it cannot be trained so; `validated` is whether there are validation images."""

    def enter(self, stage: Stage) -> None:
        """Choose what learns in this stage."""
        self.stage = stage
        self.net.trunk.requires_grad_(not stage.frozen)

    def begin(self, start: Start) -> None:
        """What happens once when a stage begins, and not when it is resumed: weights drawn anew, or taken from features."""

    def start_epoch(self, epoch: int, epochs: int) -> None:
        """Whatever changes with the epoch (from 0) of a stage, in tensors that a captured step knows: in place."""

    def groups(self) -> list[dict[str, Any]]:
        """What learns, for the optimizer; a group may have a `weight_decay` and an `lr_scale` of its own."""
        return [{"params": [p for p in self.parameters() if p.requires_grad]}]

    def train(self, mode: bool = True) -> "Method":
        super().train(mode)
        if self.stage.frozen and not self.stage.shift_norm:
            self.net.trunk.eval()  # its batch-norm averages are frozen too
        return self

    # A step

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """The scalar "loss", and beside it whatever is worth a line in the log."""
        return self.after_trunk(self.features(batch.query), batch.y_B, *(batch.mixed or ()))

    def after_trunk(self, x_BF: Tensor, y_B: Tensor, *mixed: Tensor) -> dict[str, Tensor]:
        """The terms of the loss from the trunk's features: many small operations, which a compiler can make few of."""
        raise NotImplementedError

    def compile(self, *_: Any, **__: Any) -> None:
        """Let torch.compile have what follows the trunk; sizes are fixed in training."""
        self.after_trunk = compiled(self.after_trunk)  # type: ignore[method-assign]

    def after_backward(self, beside: SideStream) -> None:
        """Whatever can go on beside the optimizer: queues."""

    def after_step(self) -> None:
        """Whatever follows the optimizer: momentum networks."""

    # What deploys

    @property
    def class_weights(self) -> nn.Parameter:
        """The classifier's weights (…, C, F) of this stage, a row to a class: in PaCo its center."""
        return self.net.get_parameter("head.weight")

    @property
    def linear(self) -> nn.Linear:
        """The head of most methods."""
        assert isinstance(self.net.head, nn.Linear)
        return self.net.head

    def features(self, x: Tensor) -> Tensor:
        return self.net.trunk(x)

    def classify(self, x_BF: Tensor) -> Tensor:
        return self.net.head(x_BF)

    def figures(self, x_BF: Tensor) -> dict[str, float]:
        """What else is worth a figure in metrics.json, from the features of the test set."""
        return {}

    def forward(self, x: Tensor) -> Tensor:
        """The logits that deploy: without prior."""
        return self.classify(self.features(x))

    @property
    def deciding(self) -> Stage:
        """The stage in which the classifier learned."""
        return [stage for stage in self.stages if stage.epochs][-1]

    def prior(self) -> Tensor:
        """The class frequencies for which the logits are meant, (C,) in float64: those its classifier saw, unless its loss
        takes account of them. For other frequencies add the logarithm of their ratio to these to the logits."""
        return class_shares(self.deciding.sampler, self.counts_C.cpu(), done=1.0)

    def only_deployed(self) -> "Method":
        """Without what training alone needs: key networks, projections, queues."""
        for name in [name for name, _ in self.named_children() if name != "net"]:
            setattr(self, name, None)
        return self


def compiled(work: Callable[..., Any]) -> Callable[..., Any]:
    """For matrices of some hundred rows: a row is one thread block's, not several's with a second kernel to join them."""
    return torch.compile(work, dynamic=False, options={"split_reductions": False})


def log_frequencies(counts_C: Tensor) -> Tensor:
    """log q(y), from the images of each class."""
    return (counts_C.double() / counts_C.sum()).log().float()


def largest(logits: Tensor) -> Tensor:
    """Of their magnitudes; row by row first, which a compiler does along with the loss."""
    return magnitudes(logits).amax()


def magnitudes(logits: Tensor) -> Tensor:
    """The largest of each row."""
    return logits.detach().abs().amax(1)


def accuracy(logits_BC: Tensor, y_B: Tensor) -> Tensor:
    """Share of anchors whose largest logit is their own, in percent."""
    return share_right(logits_BC.detach().argmax(1), y_B)


def reweighted(shares_C: Tensor, weight_C: Tensor) -> Tensor:
    """Class frequencies times a weight each, summing to 1; a class that never came stays at 0."""
    product_C = torch.where(shares_C > 0, shares_C * weight_C.double().cpu(), 0.0)
    return product_C / product_C.sum()


def alike(shares_C: Tensor) -> Tensor:
    """The same for every class that came."""
    return reweighted(shares_C, 1 / shares_C)


def share_right(guess_B: Tensor, y_B: Tensor) -> Tensor:
    """In percent."""
    return 100 * (guess_B == y_B).to(torch.float32).mean()
