"""The methods, which combine a model and a loss. The training loop finds a method by its settings and knows none by name.

Names are imported on first use. `longtail.methods.registry` imports all methods.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longtail.methods.base import Batch, Method, Mixed, Stage, StageData
    from longtail.methods.registry import find_method, make

__all__ = ["Batch", "Method", "Mixed", "Stage", "StageData", "find_method", "make"]


def __getattr__(name: str) -> Any:
    if name == "Start":
        from longtail.deprecated import find_renamed

        return find_renamed(__name__, {"Start": "StageData"})(name)
    if name in __all__:
        module = "registry" if name in ("find_method", "make") else "base"
        return getattr(importlib.import_module(f"longtail.methods.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
