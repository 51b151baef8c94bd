"""Data sets: `load(DataConfig)` returns a DataSet whose splits have images and labels. torch is imported only when needed."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longtail.data.sources import DataSet, Split, load

__all__ = ["DataSet", "Split", "load"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("longtail.data.sources"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
