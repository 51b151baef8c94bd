"""The results that the PaCo paper prints for ImageNet-scale datasets. Our own measurements are in results/."""

from typing import NamedTuple


class PublishedRow(NamedTuple):
    """A row of a table, identified by values of command-line options."""

    method: str
    network: str
    augment: str
    setting: str
    """Setting of the recipe that trains this row; empty if the paper quotes the row from another paper with unknown
    settings."""

    def flags(self) -> str:
        """Return the flags that select this row in its recipe; for a quoted row, the flags of its method and
        network."""
        given = {"method": self.method, "network": self.network, "augment": self.augment, "setting": self.setting}
        return " ".join(f"--{name} {value}" for name, value in given.items() if value)


class PublishedAccuracy(NamedTuple):
    """Top-1 accuracy in percent: of all classes, and of those with more than 100, 20 to 100 and fewer than 20 training
    images."""

    top1: float
    many: float | None = None
    medium: float | None = None
    few: float | None = None


PublishedRows = dict[PublishedRow, PublishedAccuracy]
QUOTED_ONLY = ("", "")
"""Augmentation and setting of rows that the paper quotes from other papers."""


def _row(method: str, augment: str, setting: str, **by_network: float | tuple[float, ...]) -> PublishedRows:
    """Return the rows of a method with one augmentation and setting: accuracy by network, either total or in four
    values."""
    return {
        PublishedRow(method, network, augment, setting): PublishedAccuracy(*figures)
        if isinstance(figures, tuple)
        else PublishedAccuracy(figures)
        for network, figures in by_network.items()
    }


IMAGENET_LT: PublishedRows = {
    # Table 3, and the supplement for many, medium and few
    **_row("ce", "plain", "released", resnet50=41.6, resnext50=44.4, resnext101=44.8),
    **_row("crt", "plain", "released", resnet50=47.3, resnext50=49.6, resnext101=49.4),
    **_row("tau-norm", "plain", "released", resnet50=46.7, resnext50=49.4, resnext101=49.6),
    **_row("causal-norm", "plain", "released", resnet50=51.7, resnext50=51.8, resnext101=53.3),
    **_row("reslt", "plain", "released", resnext50=52.9, resnext101=54.1),
    **_row("mislas", "plain", "released", resnet50=52.7),
    **_row("tau-norm", "rand", "equal", resnet50=(54.5, 65.0, 52.2, 32.3), resnext50=(56.0, 66.4, 53.4, 38.2)),
    **_row("tau-norm", "rand", "equal", resnext101=(57.9, 69.0, 55.1, 36.9)),
    **_row("balanced-softmax", "rand", "equal", resnet50=(55.0, 66.7, 52.9, 33.0), resnext50=(56.2, 67.7, 53.8, 34.2)),
    **_row("balanced-softmax", "rand", "equal", resnext101=(58.0, 69.2, 55.8, 36.3)),
    **_row("paco", "rand", "released", resnet50=(57.0, 65.0, 55.7, 38.2), resnext50=(58.2, 67.5, 56.9, 36.7)),
    **_row("paco", "stacked", "released", resnext101=(60.0, 68.2, 58.7, 41.0)),
    # RIDE, run by the authors of the paper (supplement)
    **_row("ride-1", "rand", "equal", resnet50=(52.8, 64.8, 49.8, 29.6), resnext50=(53.2, 67.2, 49.0, 28.1)),
    **_row("ride-2", "rand", "equal", resnet50=(56.0, 67.7, 53.5, 31.5), resnext50=(56.4, 70.4, 52.6, 30.3)),
    **_row("ride-3", "rand", "equal", resnet50=(57.0, 69.0, 54.7, 32.5), resnext50=(57.8, 71.8, 53.9, 32.0)),
    # Table 1, and the re-weighting baselines of the supplement: 400 epochs without RandAugment
    **_row("ce", "plain", "equal", resnet50=(48.4, 67.5, 42.6, 13.7)),
    **_row("supcon", "sim", "equal", resnet50=(22.0, 53.4, 2.9, 0.0)),
    **_row("ce-supcon-reweighted", "sim", "equal", resnet50=49.0),
    **_row("ce-supcon-balanced", "sim", "equal", resnet50=48.6),
    **_row("paco-no-rebalance", "sim", "released", resnet50=(51.0, 69.6, 45.8, 16.0)),
    # Table 2: augmentation strategies (1) and (2); (3) is the row of PaCo above
    **_row("paco", "sim", "released", resnet50=55.0),
    **_row("paco", "rand-rand", "released", resnet50=56.5),
    # The multi-task baseline of the supplement, with weight 0.05
    **_row("balanced-softmax-supcon", "rand", "equal", resnext50=57.0),
}

INAT2018: PublishedRows = {
    # Table 5 and the supplement
    **_row("cb-focal", *QUOTED_ONLY, resnet50=61.1),
    **_row("ldam-drw", *QUOTED_ONLY, resnet50=68.0),
    **_row("reslt", *QUOTED_ONLY, resnet50=70.2),
    **_row("tau-norm", "plain", "released", resnet50=69.3),
    **_row("lws", "plain", "released", resnet50=69.5),
    **_row("bbn", "plain", "released", resnet50=69.6),
    **_row("mislas", "plain", "released", resnet50=71.6),
    **_row("ride-1", "rand", "equal", resnet50=(65.2, 56.0, 66.3, 66.0)),
    **_row("ride-2", "rand", "equal", resnet50=(69.5, 62.2, 70.5, 70.0)),
    **_row("ride-3", "rand", "equal", resnet50=(71.3, 66.5, 72.1, 71.5)),
    **_row("tau-norm", "rand", "equal", resnet50=(71.5, 74.1, 72.1, 70.4)),
    **_row("balanced-softmax", "plain", "equal", resnet50=(71.7, 72.5, 72.3, 71.4)),
    **_row("balanced-softmax", "rand", "equal", resnet50=(71.8, 72.3, 72.6, 71.7)),
    **_row("paco", "sim", "released", resnet50=(73.0, 69.5, 73.4, 73.0)),
    **_row("paco", "rand", "released", resnet50=(73.2, 70.3, 73.2, 73.6), resnet152=(75.2, 75.0, 75.5, 74.7)),
}

PLACES_LT: PublishedRows = {
    # Table 4
    **_row("ce", *QUOTED_ONLY, resnet152=(30.2, 45.7, 27.3, 8.2)),
    **_row("oltr", *QUOTED_ONLY, resnet152=(35.9, 44.7, 37.0, 25.3)),
    **_row("tau-norm", *QUOTED_ONLY, resnet152=(37.9, 37.8, 40.7, 31.8)),
    **_row("balanced-softmax", *QUOTED_ONLY, resnet152=(38.6, 42.0, 39.3, 30.5)),
    **_row("reslt", *QUOTED_ONLY, resnet152=(39.8, 39.8, 43.6, 31.4)),
    **_row("mislas", "plain", "released", resnet152=(40.4, 39.6, 43.3, 36.1)),
    **_row("paco", "sim", "released", resnet152=(41.2, 37.5, 47.2, 33.9)),
    **_row("paco", "rand", "released", resnet152=(41.2, 36.1, 47.9, 35.3)),
}

IMAGENET: PublishedRows = {
    # Table 7; the values of SupCon are from its own paper
    **_row("supcon", "sim", "", resnet50=77.9),
    **_row("supcon", "rand", "", resnet50=78.4),
    **_row("supcon", "stacked", "", resnet101=80.2),
    **_row("ce-supcon", "rand", "equal", resnet50=78.1),
    **_row("paco-no-rebalance", "sim", "released", resnet50=78.7),
    **_row("paco-no-rebalance", "rand", "released", resnet50=79.3),
    **_row("paco-no-rebalance", "stacked", "released", resnet101=80.9, resnet200=81.8),
}
