"""An inspection, as a person reads it."""

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from longtail.data.inspection import Inspection
from longtail.progress import columns, wrapped
from longtail.text import escape_nonprintable

BARS = 20  # lines of the histogram
WIDE = 50  # characters of its longest bar
SHOWN = 5  # findings of a kind; --json has all


def show(found: Inspection, screen: Console) -> None:
    many, medium, few = found.shot_groups.values()
    held = f"{sum(found.test_counts):,} to evaluate on"
    print(
        f"{escape_nonprintable(found.name)}: {sum(found.counts):,} training images of {len(found.counts)} classes, {held}"
    )
    print(f"imbalance {found.imbalance:.4g} (largest class {max(found.counts):,}, smallest {min(found.counts):,})")
    print(f"classes by training images: {many} many (>100), {medium} medium (20-100), {few} few (<20)")
    screen.print(histogram(found))
    if found.read:
        print(*about_files(found), sep="\n")
    for note in found.notes:
        print(wrapped(escape_nonprintable(note), columns()))
    for title, items in findings(found):
        print(f"{title}: {len(items):,}")
        for words in items[:SHOWN]:
            print(f"  {escape_nonprintable(words)}")
        if len(items) > SHOWN:
            print(f"  … and {len(items) - SHOWN:,} more: --json FILE lists all")
    if found.read and not any(items for _, items in findings(found)):
        print("every image can be read, and no two files are the same")


def histogram(found: Inspection) -> Table:
    """Training images of the classes from head to tail, several to a line where they are many."""
    order = np.argsort(-np.array(found.counts), kind="stable")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    bins = np.array_split(order, min(BARS, len(order)))
    means = [sum(found.counts[c] for c in some) / len(some) for some in bins]
    for some, mean in zip(bins, means, strict=True):
        first, last = (escape(escape_nonprintable(found.class_names[c][:24])) for c in (some[0], some[-1]))
        name = first if len(some) == 1 else f"{first} … {last}"
        table.add_row(name, f"{mean:,.0f}", "█" * max(round(WIDE * mean / max(means)), 1 if mean else 0))
    return table


def about_files(found: Inspection) -> list[str]:
    kinds = ", ".join(f"{n:,} {name}" for name, n in (found.formats | found.modes).items())
    special = [
        f"{n:,} {what}" for n, what in ((found.exif_rotated, "turned by EXIF"), (found.animated, "animated")) if n
    ]
    return [
        f"{found.read:,} images read: {', '.join([kinds, *special])}",
        f"width {_span(found.width)}, height {_span(found.height)} pixels, {_span([b / 1000 for b in found.bytes])} kB",
    ]


def findings(found: Inspection) -> list[tuple[str, list[str]]]:
    kinds = [
        ("cannot be read", [f"{image.id} ({image.why})" for image in found.unreadable]),
        ("of one color, or gray at their end as where data are lost: look at them", found.blank),
        ("the same file in training and evaluation", [" = ".join(ids) for ids in found.leaked]),
        ("the same file in several classes", [" = ".join(ids) for ids in found.in_several_classes]),
        ("the same file more than once", [" = ".join(ids) for ids in found.duplicates]),
    ]
    return [(title, items) for title, items in kinds if items]


def _span(values: Sequence[float]) -> str:
    low, median, high = (f"{value:,.1f}".removesuffix(".0") for value in values)
    return f"{low} to {high} (median {median})" if low != high else low
