"""The command `data`, with its subcommands `inspect` and `shard`."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tyro.conf import Positional, arg

from longtail import files, recipes
from longtail.cli.console import (
    check_output_files,
    make_screen,
    print_lines,
    print_warning,
    write_error_as_user_error,
)
from longtail.cli.help import make_help
from longtail.cli.parse import check_data_paths, format_setting, get_given_settings, parse_arguments, take_data_argument
from longtail.config import DataConfig
from longtail.errors import UserError
from longtail.progress import terminal_width
from longtail.text import escape_nonprintable
from longtail.training import check_not_a_run

if TYPE_CHECKING:
    from longtail.data.inspection import Inspection

HISTOGRAM_ROWS = 20
HISTOGRAM_WIDTH, MIN_HISTOGRAM_WIDTH = 50, 10  # characters of the longest bar
MAX_CLASS_NAME = 24  # characters of a class name in the histogram
ITEMS_SHOWN = 5  # files of each problem; --json lists all


@dataclass(frozen=True, kw_only=True)
class Data:
    """Inspect a data set before training, or convert it to shards."""


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Show class counts and image properties of a data set, and list unreadable, duplicate and leaked files."""

    images: Annotated[Positional[str], arg(name="data", metavar="DATA")]
    """A recipe name (`longtail recipes` lists them), or a folder, shards or a list of images."""
    quick: bool = False
    """Count labels only, without reading the images."""
    json: Path | None = None
    """Write the complete results to this file."""
    data: DataConfig


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Convert a data set to parquet shards (encoded images and labels), which `longtail train` reads like a folder."""

    images: Annotated[Positional[str], arg(name="data", metavar="DATA")]
    """A recipe name (`longtail recipes` lists them), or a folder, shards or a list of images."""
    out: Path | None = None
    """Output folder."""
    megabytes: int = 256
    """Approximate size of each file."""
    data: DataConfig


def run_data(args: list[str]) -> None:
    """Run `longtail data` without a subcommand: print its help."""
    print(make_help("data", Data, args, {name: kind for name, (kind, _) in DATA_COMMANDS.items()}))


# data inspect


def run_inspect(args: list[str]) -> int:
    """Run `longtail data inspect`. Return exit code 1 if an image cannot be read, because training would stop there."""
    name = take_data_argument("data inspect", args)
    check_not_a_run(name)
    given = parse_arguments(Inspect, "data inspect", args, Inspect(images=name, data=recipes.make(name).data))
    check_data_paths(given.data)

    from longtail.data.inspection import inspect

    check_output_files(json=given.json)
    found = inspect(given.data, given.quick)
    print_inspection(found, make_screen())
    if recipes.is_user_data(name) and (given.quick or found.read):
        print_lines(["", *describe_next_steps(name, args, given, skip_unreadable=bool(found.unreadable))])
    if given.json:
        with write_error_as_user_error(given.json):
            files.write_output_json(given.json, found.to_dict())
        print(f"written to {escape_nonprintable(given.json)}")
    return 1 if found.unreadable else 0


def print_inspection(found: "Inspection", screen: Console) -> None:
    """Print class counts, properties of the files, and problems."""
    many, medium, few = found.shot_groups.values()
    name, images, classes = escape_nonprintable(found.name), sum(found.counts), len(found.counts)
    print(f"{name}: {images:,} training images of {classes} classes, {sum(found.test_counts):,} evaluation images")
    print(f"imbalance {found.imbalance:.4g} (largest class {max(found.counts):,}, smallest {min(found.counts):,})")
    print(f"classes by training images: {many} many (>100), {medium} medium (20-100), {few} few (<20)")
    screen.print(make_histogram(found, screen.width))
    if found.read:
        print_lines(describe_files(found))
    for note in found.notes:
        print_lines([escape_nonprintable(note)])
    problems = list_problems(found)
    for title, items in problems:
        print(f"{title}: {len(items):,}")
        for item in items[:ITEMS_SHOWN]:
            print(f"  {escape_nonprintable(item)}")
        if len(items) > ITEMS_SHOWN:
            print(f"  … and {len(items) - ITEMS_SHOWN:,} more (use --json FILE to list all)")
    if found.read and not problems:
        print("all images can be read, and there are no duplicates")


def make_histogram(found: "Inspection", width: int) -> Table:
    """Return bars of the training images of each class, most frequent first. Many classes are grouped; bars are then means.

    Args:
        found: The result of the inspection.
        width: Columns of the terminal.
    """
    import numpy as np

    order = np.argsort(-np.array(found.counts), kind="stable")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    groups = np.array_split(order, min(HISTOGRAM_ROWS, len(order)))
    means = [sum(found.counts[c] for c in group) / len(group) for group in groups]
    names = [
        " … ".join(shorten(found.class_names[c]) for c in dict.fromkeys((group[0], group[-1]))) for group in groups
    ]
    free = width - max(map(len, names)) - len(f"{max(means):,.0f}") - 4  # columns are separated by two spaces
    bar_width = max(min(HISTOGRAM_WIDTH, free), MIN_HISTOGRAM_WIDTH)
    for name, mean in zip(names, means, strict=True):
        bar = "█" * max(round(bar_width * mean / max(means)), 1 if mean else 0)
        table.add_row(escape(name), f"{mean:,.0f}", bar)
    return table


def shorten(name: str) -> str:
    """Return the name of a class, shortened if it is long."""
    shown = escape_nonprintable(name)
    return shown if len(shown) <= MAX_CLASS_NAME else f"{shown[: MAX_CLASS_NAME - 1]}…"


def describe_files(found: "Inspection") -> list[str]:
    """Return lines about formats, color modes and sizes."""
    counts = [f"{number:,} {name}" for name, number in (found.formats | found.modes).items()]
    special = {"rotated by EXIF": found.exif_rotated, "animated": found.animated}
    counts += [f"{number:,} {name}" for name, number in special.items() if number]
    width, height, kilobytes = map(format_range, (found.width, found.height, [size / 1000 for size in found.bytes]))
    return [
        f"{found.read:,} images read: {', '.join(counts)}",
        f"width {width}, height {height} pixels, {kilobytes} kB",
    ]


def list_problems(found: "Inspection") -> list[tuple[str, list[str]]]:
    """Return the kinds of problems that were found, each with a line per file or group of duplicates."""
    problems = [
        ("unreadable images", [f"{image.id} ({image.why})" for image in found.unreadable]),
        ("possibly truncated images (of one color, or gray at their end)", found.blank),
        ("duplicates in training and evaluation", [" = ".join(ids) for ids in found.leaked]),
        ("duplicates in several classes", [" = ".join(ids) for ids in found.in_several_classes]),
        ("duplicates within a class", [" = ".join(ids) for ids in found.duplicates]),
    ]
    return [(title, items) for title, items in problems if items]


def format_range(values: Sequence[float]) -> str:
    """Return minimum, maximum and median, or a single number if all are equal."""
    low, median, high = (f"{value:,.1f}".removesuffix(".0") for value in values)
    return f"{low} to {high} (median {median})" if low != high else low


def describe_next_steps(name: str, args: list[str], given: Inspect, skip_unreadable: bool) -> list[str]:
    """Return the settings that `longtail train` would choose for the images, and the commands to continue with.

    Args:
        name: Path to the images.
        args: The arguments of `data inspect`.
        given: The parsed arguments.
        skip_unreadable: Whether the commands skip unreadable images.
    """
    from longtail.autoconfig import choose, inspect_data

    flags = [arg for flag, value in get_given_settings(args, given).items() for arg in format_setting(flag, value)]
    images = " ".join([*map(shlex.quote, [name, *flags]), *(["--data.on_error skip"] if skip_unreadable else [])])
    return [
        *choose(name, inspect_data(given.data)).describe(width=terminal_width()),
        "next:",
        f"  longtail train {images}      train with these settings",
        f"  longtail compare {images}    compare several methods, with three seeds each",
    ]


# data shard


def run_shard(args: list[str]) -> None:
    """Run `longtail data shard`."""
    name = take_data_argument("data shard", args)
    check_not_a_run(name)
    given = parse_arguments(Shard, "data shard", args, Shard(images=name, data=recipes.make(name).data))
    check_data_paths(given.data)
    if given.out is None:
        raise UserError("--out DIR is required: the folder to write the shards to")

    from longtail.data.write_shards import shard

    written = shard(given.data, given.out, given.megabytes)
    for line in (*written.notes, *(f"skipped: {image.id} ({image.why})" for image in written.skipped)):
        print_warning(line)
    print(f"{written.images:,} images written to {escape_nonprintable(given.out)}")


DATA_COMMANDS: dict[str, tuple[type, Callable[[list[str]], int | None]]] = {
    "inspect": (Inspect, run_inspect),
    "shard": (Shard, run_shard),
}
