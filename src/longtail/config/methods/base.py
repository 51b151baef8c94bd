"""What the settings of every method have in common. A method's own stand beside this file, by family."""

from dataclasses import dataclass
from typing import Any, ClassVar

from longtail.config.section import Section, require
from longtail.errors import UserError

METHODS: dict[str, type["MethodConfig"]] = {}
"""By the name in JSON; a class that has one enters itself."""


@dataclass(frozen=True, kw_only=True)
class MethodConfig(Section):
    """A name in JSON and on the command line, and a label in tables."""

    section: ClassVar[str] = "method"
    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    second_stage_epochs_field: ClassVar[str] = ""
    """The field that holds the epochs of its second stage, where it has one."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            METHODS[cls.name] = cls

    @property
    def label(self) -> str:
        return self.title

    @property
    def second_epochs(self) -> int:
        return getattr(self, self.second_stage_epochs_field) if self.second_stage_epochs_field else 0

    @classmethod
    def resolve_type(cls, tree: dict[str, Any]) -> type[Section]:
        """By the name that was stored; `longtail.recipes` finds those that a user gives, and knows what is spelled alike."""
        name = tree.pop("name", None)
        if not isinstance(name, str) or name not in METHODS:
            advice = "from Python (longtail.table, say) it works once the file that defines it has been imported"
            raise UserError(
                f"made by the method {str(name)!r}, which is not imported here: {advice}", kind="unknown-name"
            )
        return METHODS[name]

    def tag(self) -> dict[str, Any]:
        return {"name": self.name}


@dataclass(frozen=True, kw_only=True)
class Deferred(MethodConfig):
    """Class weights that come into force late in the training (DRW, Cao et al. 2019), by the effective number of images."""

    drw_from: float = 1.0
    """Share of the training after which classes are weighted; 0: from the start, 1: never."""
    drw_beta: float = 0.9999
    """Weights are (1 - beta) / (1 - beta^n) for a class of n images, scaled to a mean of 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.drw_from <= 1, "method.drw_from", self.drw_from, "a share of the training: try 0.8")
        require(0 <= self.drw_beta < 1, "method.drw_beta", self.drw_beta, "in [0, 1): try 0.9999")


@dataclass(frozen=True, kw_only=True)
class Chunked(MethodConfig):
    """A loss that can do without the matrix of all pairs, for very many classes."""

    chunk: int = 0
    """Classes and samples that the loss works on at a time; 0: all at once up to 67 million pairs of an anchor and one of them,
    and above that as many as make 4 million. The loss is the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.chunk >= 0, "method.chunk", self.chunk, "0 (automatic) or more: try 10000")


@dataclass(frozen=True, kw_only=True)
class LinearStage(MethodConfig):
    """A second stage, in which the trunk is frozen and what stands on it learns."""

    second_stage_epochs_field: ClassVar[str] = "linear_epochs"

    linear_epochs: int = 10
    """Epochs of the second stage."""
    linear_lr: float = 0.1
    """Learning rate of the second stage."""
    linear_milestones: tuple[float, ...] = ()
    """Where it falls to a tenth, as shares of the second stage; none: along a cosine to zero."""
    linear_decay: float = 5e-4
    """L2 penalty in the second stage."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.linear_decay >= 0, "method.linear_decay", self.linear_decay, "0 or more: try 5e-4")
        rising = list(self.linear_milestones) == sorted(m for m in set(self.linear_milestones) if 0 < m < 1)
        require(rising, "method.linear_milestones", self.linear_milestones, "rising shares below 1: try 0.33 0.67")
        require(self.linear_epochs >= 1, "method.linear_epochs", self.linear_epochs, "at least 1")
        require(self.linear_lr > 0, "method.linear_lr", self.linear_lr, "above 0")
