"""Heads on the features of a backbone: classifiers, and the projection G."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from longtail.models.backbones import Trunk


class Classifier(nn.Module):
    """The deployed network: backbone and head. The rows of a linear head are the class centers c_k (F is the identity)."""

    def __init__(self, trunk: "Trunk", head: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


def make_linear_head(width: int, classes: int, bias: bool = True) -> nn.Linear:
    """Return a linear classifier with Kaiming initialization.

    Args:
        width: The width of the features.
        classes: The number of classes.
        bias: Whether there is a bias.
    """
    head = nn.Linear(width, classes, bias=bias)
    nn.init.kaiming_normal_(head.weight)
    return head


class CosineHead(nn.Module):
    """A cosine classifier, scale · cos(x, w_c): the norms of features and weights have no influence."""

    def __init__(self, width: int, classes: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(classes, width))
        nn.init.kaiming_normal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(F.normalize(x), F.normalize(self.weight))


class ScaledHead(nn.Linear):
    """A linear classifier with a learnable factor for each class, s_c · (w_c·x + b_c)."""

    def __init__(self, width: int, classes: int, bias: bool = True) -> None:
        super().__init__(width, classes, bias)
        nn.init.kaiming_normal_(self.weight)
        self.scale_C = nn.Parameter(torch.ones(classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale_C * super().forward(x)


def projection(width: int, hidden: int, out: int, norm: bool, layers: int = 2) -> nn.Sequential:
    """Return the projection G, a multilayer perceptron.

    The released PaCo has two layers with batch norm between them, MoCo v2 two without, and GPaCo three.

    Args:
        width: The width of the features.
        hidden: The width of the hidden layers.
        out: The width of the projection.
        norm: Whether there is batch norm between the layers.
        layers: The number of linear layers.
    """
    parts: list[nn.Module] = []
    for i in range(layers - 1):
        parts.append(nn.Linear(hidden if i else width, hidden))
        if norm:
            parts.append(nn.BatchNorm1d(hidden))
        parts.append(nn.ReLU())
    return nn.Sequential(*parts, nn.Linear(hidden, out))


class ProjectionHead(nn.Sequential):
    """The projection G of the features, normalized to length 1.

    Args:
        width: The width of the features.
        hidden: The width of the hidden layers; 0 for that of the features.
        out: The width of the projection.
        norm: Whether there is batch norm between the layers.
        layers: The number of linear layers.
    """

    def __init__(self, width: int, hidden: int, out: int, norm: bool, layers: int = 2) -> None:
        super().__init__(*projection(width, hidden or width, out, norm, layers))

    def forward(self, x_BF: Tensor) -> Tensor:
        return F.normalize(super().forward(x_BF))
