"""The theory of the paper as functions of numbers: what follows from class counts, queue length, batch size and alpha.

`table` returns what `longtail theory` prints. The other functions are the closed forms that it uses. Only NumPy is needed.
Tests compare every closed form with the implemented loss, minimized by a numerical optimizer.
"""

from longtail.deprecated import find_renamed
from longtail.theory.alpha_table import OPTIMUM, Optimum, Table, auto_alpha, table
from longtail.theory.closed_forms import (
    COUNTS,
    Count,
    absent,
    center,
    center_gradient,
    extra,
    extra_curve,
    minimum,
    pair,
    pair_curve,
    positives,
    range_of,
    supcon_at,
    supcon_minimum,
    supcon_pair,
)

__getattr__ = find_renamed(__name__, {"centre": "center", "centre_gradient": "center_gradient"})
__all__ = [
    "COUNTS",
    "OPTIMUM",
    "Count",
    "Optimum",
    "Table",
    "absent",
    "auto_alpha",
    "center",
    "center_gradient",
    "extra",
    "extra_curve",
    "minimum",
    "pair",
    "pair_curve",
    "positives",
    "range_of",
    "supcon_at",
    "supcon_minimum",
    "supcon_pair",
    "table",
]
