"""Reads run folders only: tables, plots, pages. The package is also the verb `longtail report`: `longtail.report(runs)`."""

import sys
import types
from collections.abc import Iterable
from pathlib import Path


class _Verb(types.ModuleType):
    """A package that can be called: `longtail.report` is bound to it as soon as anything inside it is imported."""

    def __call__(self, paths: Iterable[Path | str] | Path | str, out: Path | str = "report.html") -> Path:
        """Write the runs at or below `paths` as one self-contained HTML page, and return its path."""
        from longtail.report.document import report

        return report(paths, out)


sys.modules[__name__].__class__ = _Verb
