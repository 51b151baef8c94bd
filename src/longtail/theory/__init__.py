"""The paper's theory as functions of numbers: what class counts, queue, batch and alpha say before anything is trained.

`longtail.theory` is a module, as `longtail.recipes` is: `theory.table(...)` has what `longtail theory` prints, and the closed
forms stand beside it. NumPy only; tests compare each with the loss that is trained, minimized by a numeric optimizer.
"""

from longtail.deprecated import find_renamed
from longtail.theory.choice import OPTIMUM, Optimum, Table, auto_alpha, table
from longtail.theory.remarks import (
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
