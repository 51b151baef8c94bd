"""Where images come from: `load(DataConfig)` gives a DataSet of Sources; nothing here imports torch until it must."""

from longtail.data.sources import DataSet, Split, load

__all__ = ["DataSet", "Split", "load"]
