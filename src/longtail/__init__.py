"""Image recognition on long-tailed data.

Public names are imported when they are first used, so that `import longtail` is fast.
"""

import importlib
from typing import Any

__version__ = "0.2.0"

_HOME = {
    "Config": "config",
    "PaCoLoss": "nn",
    "UserError": "errors",
    "balanced_softmax_loss": "losses",
    "choose_config": "training",
    "compare": "comparison",
    "cross_entropy_loss": "losses",
    "demo": "demo_run",
    "distill": "distillation",
    "evaluate": "engine.evaluate",
    "figure": "paper.figures",
    "fit_head": "engine.fit_head",
    "head_config": "engine.fit_head",
    "export": "inference.export",
    "inspect": "data.inspection",
    "load": "inference.loading",
    "paco_loss": "losses",
    "paco_terms": "losses",
    "predict": "inference.predict",
    "reproduce": "paper.reproduce",
    "shard": "data.write_shards",
    "supcon_loss": "losses",
    "report": "reporting.page",
    "table": "reporting.table",
    "train": "training",
    "watch": "reporting.server",
}
_MODULES = (
    "autoconfig",
    "losses",
    "metrics",
    "nn",
    "recipes",
    "sklearn",
    "theory",
)

__all__ = ["Config", "PaCoLoss", "UserError", "choose_config", "compare", "demo", "distill", "evaluate", "export"]
__all__ += ["figure", "fit_head", "head_config", "inspect", "load", "losses", "metrics", "nn", "paco_loss", "predict"]
__all__ += ["recipes", "report", "reproduce", "shard", "sklearn", "table", "theory", "train", "watch"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"longtail.{name}")
    if name == "choices":
        from longtail.deprecated import find_renamed

        return find_renamed("longtail", {"choices": "longtail.autoconfig"})(name)
    if name in _HOME:
        return getattr(importlib.import_module(f"longtail.{_HOME[name]}"), name)
    raise AttributeError(f"module 'longtail' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
