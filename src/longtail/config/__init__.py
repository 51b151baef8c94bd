"""The configuration of a run: frozen dataclasses, one per section. Every field is a flag, for example `--optim.lr 0.1`.

This package imports neither torch nor numpy, so that `--help` is fast. Values are checked when a section is created, so that
every existing `Config` is valid.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from longtail.config.method_settings import (
    METHODS,
    BalancedSoftmaxSettings,
    BBNSettings,
    BCLSettings,
    CausalNormSettings,
    CenterSettings,
    ChunkedSettings,
    ClassBalancedFocalSettings,
    ConsistencySettings,
    ContrastSettings,
    CrossEntropySettings,
    CRTSettings,
    DeferredSettings,
    DistillationSettings,
    FocalSettings,
    GPaCoSettings,
    LDAMSettings,
    LinearStageSettings,
    LogisticRegressionSettings,
    LogitAdjustmentSettings,
    LWSSettings,
    MethodConfig,
    MiSLASSettings,
    MomentumContrastSettings,
    MultiTaskSettings,
    NCLSettings,
    NCMSettings,
    OLTRSettings,
    PaCoSettings,
    ProCoSettings,
    ProjectionSettings,
    ResLTSettings,
    RIDESettings,
    SupConSettings,
    TauNormSettings,
    ThreeViewSettings,
    ViewsSettings,
)
from longtail.config.migrate import CONFIG_VERSION, migrate_config
from longtail.config.section import Section, differences, from_dict, list_settings, to_dict
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
from longtail.deprecated import find_renamed
from longtail.errors import UserError

# Until version 0.2 the settings of a method had the name of the method.
if not TYPE_CHECKING:  # otherwise type checkers would accept every name
    __getattr__ = find_renamed(
        __name__,
        {
            "BBN": "BBNSettings",
            "BalancedSoftmax": "BalancedSoftmaxSettings",
            "CRT": "CRTSettings",
            "CausalNorm": "CausalNormSettings",
            "Centers": "CenterSettings",
            "Chunked": "ChunkedSettings",
            "ClassBalancedFocal": "ClassBalancedFocalSettings",
            "Contrast": "ContrastSettings",
            "CrossEntropy": "CrossEntropySettings",
            "Deferred": "DeferredSettings",
            "Focal": "FocalSettings",
            "GPaCo": "GPaCoSettings",
            "LDAM": "LDAMSettings",
            "LWS": "LWSSettings",
            "LinearStage": "LinearStageSettings",
            "LogitAdjustment": "LogitAdjustmentSettings",
            "MiSLAS": "MiSLASSettings",
            "MomentumContrast": "MomentumContrastSettings",
            "MultiTask": "MultiTaskSettings",
            "NCM": "NCMSettings",
            "OLTR": "OLTRSettings",
            "PaCo": "PaCoSettings",
            "RIDE": "RIDESettings",
            "ResLT": "ResLTSettings",
            "SupCon": "SupConSettings",
            "TauNorm": "TauNormSettings",
        },
    )

__all__ = [
    "METHODS",
    "BBNSettings",
    "BCLSettings",
    "BalancedSoftmaxSettings",
    "CRTSettings",
    "CausalNormSettings",
    "CenterSettings",
    "ChunkedSettings",
    "ClassBalancedFocalSettings",
    "Config",
    "ConsistencySettings",
    "ContrastSettings",
    "CrossEntropySettings",
    "DataConfig",
    "Decoding",
    "DeferredSettings",
    "DistillationSettings",
    "FocalSettings",
    "GPaCoSettings",
    "LDAMSettings",
    "LWSSettings",
    "LinearStageSettings",
    "LogConfig",
    "LogisticRegressionSettings",
    "LogitAdjustmentSettings",
    "MethodConfig",
    "MiSLASSettings",
    "ModelConfig",
    "MomentumContrastSettings",
    "MultiTaskSettings",
    "NCLSettings",
    "NCMSettings",
    "OLTRSettings",
    "OptimConfig",
    "PaCoSettings",
    "ProCoSettings",
    "ProjectionSettings",
    "RIDESettings",
    "ResLTSettings",
    "Sampler",
    "Section",
    "SupConSettings",
    "TauNormSettings",
    "ThreeViewSettings",
    "TrainConfig",
    "ViewConfig",
    "ViewsConfig",
    "ViewsSettings",
    "differences",
    "from_dict",
    "list_settings",
    "to_dict",
]

IDENTITY_IGNORES = {
    # The content of the data is identified by a checksum. Decoders differ only in rounding.
    "data": ("root", "download", "train_list", "test_list", "columns", "on_error", "workers", "decode"),
    "train": ("seeds", "device", "execution", "parallel_seeds", "checkpoint_every", "validate_every"),
}
"""Settings in which repetitions of a run may differ, by section."""


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    """The configuration of a run."""

    recipe: str = "custom"
    """Recipe and setting on which the configuration is based; for information only."""
    data: DataConfig = field(default_factory=DataConfig)
    """Dataset and loading."""
    views: ViewsConfig = field(default_factory=ViewsConfig)
    """Data augmentation and normalization."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Network."""
    method: MethodConfig = field(default_factory=CrossEntropySettings)
    """Method and its settings."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and learning-rate schedule."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length of the training, batch size, seeds and device."""
    log: LogConfig = field(default_factory=LogConfig)
    """Progress display and loggers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        late = [m for m in self.optim.milestones if m >= max(self.train.epochs, 1)]
        if self.optim.schedule == "step" and late:
            raise UserError(
                f"--optim.milestones {late[0]:g} is never reached, because training ends at epoch {self.train.epochs}: "
                "give fractions of the training, such as 0.8 0.9",
                kind="conflict",
            )
        if self.train.batch_size == 1 and getattr(self.method, "projection_norm", False):
            raise UserError(
                "--train.batch_size 1: batch norm in the projection head needs two images: use 2 or more, or "
                "--method.no_projection_norm",
                kind="conflict",
            )
        if self.model.norm == "sync" and getattr(self.method, "key_norm", "") == "shuffled":
            raise UserError(
                "--model.norm sync uses statistics of all processes, so that shuffling with --method.key_norm shuffled has "
                "no effect: use --method.key_norm batch, or --model.norm batch",
                kind="conflict",
            )

    @classmethod
    def resolve_type(cls, tree: dict[str, Any]) -> type[Section]:
        """Convert the tree of an earlier version, in place."""
        migrate_config(tree)
        return cls

    def tag(self) -> dict[str, Any]:
        return {"version": CONFIG_VERSION}

    def identity(self) -> dict[str, Any]:
        """Return the settings that repetitions of a run have in common: all except seeds, paths, display and speed."""
        tree = to_dict(self)
        del tree["version"], tree["recipe"], tree["log"]
        for section, keys in IDENTITY_IGNORES.items():
            for key in keys:
                del tree[section][key]
        for key in ("chunk", "teachers"):  # teachers are identified by their checksums
            tree["method"].pop(key, None)
        if not isinstance(self.method, ProjectionSettings):
            del tree["views"]["key"]
        return {"method": tree.pop("method")} | tree  # the method comes first, because readers look for it first
