"""What stands on a trunk: the classifier whose rows are PaCo's centres, and the projection G."""

from torch import Tensor, nn

from longtail.models.backbones import Trunk


class Classifier(nn.Module):
    """The deployable network: trunk and linear head. The head's rows are the class centres c_k (F is the identity)."""

    def __init__(self, trunk: Trunk, classes: int, bias: bool = True) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(trunk.width, classes, bias=bias)
        nn.init.kaiming_normal_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


def projection(width: int, hidden: int, out: int, norm: bool) -> nn.Sequential:
    """G: a two-layer perceptron; released PaCo has batch norm between the layers, MoCo v2 has not."""
    layers: list[nn.Module] = [nn.Linear(width, hidden)]
    if norm:
        layers.append(nn.BatchNorm1d(hidden))
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(hidden, out))
