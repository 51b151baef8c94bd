"""What the training loop knows of a method: stages, a loss, logits, features, and what happens after a step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from longtail.config import Config, OptimConfig
from longtail.models.beside import Beside
from longtail.models.heads import Classifier


class Batch(NamedTuple):
    """The views of B images that a stage asked for, and their labels."""

    query: Tensor
    key: Tensor | None
    y_B: Tensor


@dataclass(frozen=True)
class Stage:
    """A stretch of training with one objective and one optimiser."""

    name: str
    epochs: int
    optim: OptimConfig
    two_views: bool = False


class Method(nn.Module):
    """Trunk and classifier with an objective. Subclasses give `after_trunk`, or `loss` where more than one view is seen."""

    two_views: ClassVar[bool] = False
    log_prior_C: Tensor

    def __init__(self, net: Classifier, counts_C: Tensor, config: Config) -> None:
        super().__init__()
        self.net = net
        self.stages: tuple[Stage, ...] = (Stage("train", config.train.epochs, config.optim, self.two_views),)
        self.stage = self.stages[0]
        # log q(y), the class frequencies of the training data; derived from them, so not part of a checkpoint
        self.register_buffer("log_prior_C", (counts_C.double() / counts_C.sum()).log().float(), persistent=False)

    def enter(self, stage: Stage) -> None:
        """Choose what learns in this stage."""
        self.stage = stage

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """The scalar "loss", and beside it whatever is worth a line in the log."""
        return self.after_trunk(self.features(batch.query), batch.y_B)

    def after_trunk(self, x_BF: Tensor, y_B: Tensor) -> dict[str, Tensor]:
        """The terms of the loss from the trunk's features: many small operations, which a compiler can make few of."""
        raise NotImplementedError

    def compile(self, *_: Any, **__: Any) -> None:
        """Let torch.compile have what follows the trunk; sizes are fixed in training."""
        self.after_trunk = compiled(self.after_trunk)  # type: ignore[method-assign]

    def after_backward(self, beside: Beside) -> None:
        """Whatever can go on beside the optimiser: queues."""

    def after_step(self) -> None:
        """Whatever follows the optimiser: momentum networks."""

    def features(self, x: Tensor) -> Tensor:
        return self.net.trunk(x)

    def classify(self, x_BF: Tensor) -> Tensor:
        return self.net.head(x_BF)

    def forward(self, x: Tensor) -> Tensor:
        """The logits that deploy: without prior."""
        return self.classify(self.features(x))


def compiled(work: Callable[..., Any]) -> Callable[..., Any]:
    """For matrices of some hundred rows: a row is one thread block's, not several's with a second kernel to join them."""
    return torch.compile(work, dynamic=False, options={"split_reductions": False})


def largest(logits: Tensor) -> Tensor:
    """Of their magnitudes; row by row first, which a compiler does along with the loss."""
    return logits.detach().abs().amax(1).amax()


def accuracy(logits_BC: Tensor, y_B: Tensor) -> Tensor:
    """Share of anchors whose largest logit is their own, in percent."""
    return 100 * (logits_BC.detach().argmax(1) == y_B).to(torch.float32).mean()
