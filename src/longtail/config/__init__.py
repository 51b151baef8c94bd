"""The configuration of a run: frozen dataclasses, one per section; every field is a flag (`--optim.lr 0.1`).

Nothing here imports torch or numpy, so that `--help` is instant. Values are checked where they enter: a Config that
exists is valid.
"""

from dataclasses import dataclass, field
from typing import Any

from longtail.config import methods
from longtail.config.methods import *  # noqa: F403
from longtail.config.methods import Contrast, CrossEntropy, MethodConfig
from longtail.config.migrate import CONFIG_VERSION, migrate_config
from longtail.config.section import Section, differences, from_dict, to_dict
from longtail.config.sections import (
    DataConfig,
    Decoding,
    LogConfig,
    ModelConfig,
    OptimConfig,
    Sampler,
    TrainConfig,
    ViewConfig,
    ViewsConfig,
)
from longtail.errors import UserError

__all__ = [
    "Config",
    "DataConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "Decoding",
    "Sampler",
    "Section",
    "TrainConfig",
    "ViewConfig",
    "ViewsConfig",
    "differences",
    "from_dict",
    "to_dict",
    *methods.__all__,
]


# Where images come from: a checksum says which they are. And how: decoders differ in rounding.
SOURCE = ("root", "download", "train_list", "test_list", "columns", "on_error", "workers", "decode")


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    recipe: str = "custom"
    """Which recipe it came from, and its setting: for the record only."""
    data: DataConfig = field(default_factory=DataConfig)
    """Where the images come from."""
    views: ViewsConfig = field(default_factory=ViewsConfig)
    """What the networks see of them."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The trunk."""
    method: MethodConfig = field(default_factory=CrossEntropy)
    """What is learned, and how."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and schedule."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length, batch, device."""
    log: LogConfig = field(default_factory=LogConfig)
    """What is shown."""

    def __post_init__(self) -> None:
        super().__post_init__()
        late = [m for m in self.optim.milestones if m >= max(self.train.epochs, 1)]
        if self.optim.schedule == "step" and late:
            advice = f"training ends at epoch {self.train.epochs}: give shares of it, such as 0.8 0.9"
            raise UserError(f"--optim.milestones {late[0]:g} is never reached, {advice}", kind="conflict")
        if self.train.batch_size == 1 and getattr(self.method, "projection_norm", False):
            raise UserError(
                "--train.batch_size 1: batch norm in G needs two images: try 2, or --method.no_projection_norm",
                kind="conflict",
            )
        if self.model.norm == "sync" and getattr(self.method, "key_norm", "") == "shuffled":
            advice = "there is nothing to mix: use --method.key_norm batch, or --model.norm batch"
            raise UserError(f"--model.norm sync has one batch of all processes, so that {advice}", kind="conflict")

    @classmethod
    def resolve_type(cls, tree: dict[str, Any]) -> type[Section]:
        """Convert the tree of an earlier version."""
        migrate_config(tree)
        return cls

    def tag(self) -> dict[str, Any]:
        return {"version": CONFIG_VERSION}

    def identity(self) -> dict[str, Any]:
        """What makes two runs repetitions of one another: everything but seeds, place, display and speed."""
        tree = to_dict(self)
        del tree["version"], tree["recipe"], tree["log"]
        for key in SOURCE:
            del tree["data"][key]
        for key in ("seeds", "device", "execution", "parallel_seeds", "checkpoint_every", "validate_every"):
            del tree["train"][key]
        tree["method"].pop("chunk", None)
        if not isinstance(self.method, Contrast):
            del tree["views"]["key"]
        return {"method": tree.pop("method")} | tree  # first, as what a reader looks for first
