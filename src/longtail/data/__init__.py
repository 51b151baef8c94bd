"""Where images come from: `load(DataConfig)` gives a DataSet of Sources. The names are loaded when they are used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longtail.data.sources import DataSet, Split, load

__all__ = ["DataSet", "Split", "load"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("longtail.data.sources"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
