"""Data sets: `load(DataConfig)` returns a DataSet whose splits have images and labels. torch is imported only when needed."""

from longtail.data.sources import DataSet, Split, load

__all__ = ["DataSet", "Split", "load"]
