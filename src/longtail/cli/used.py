"""The verbs of a trained network's use: predict, export."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.table import Table
from rich.text import Text
from tyro.conf import Positional, arg

from longtail.cli.parsing import parse
from longtail.cli.screen import console
from longtail.cli.streams import is_output_closed
from longtail.cli.verbs import check_writable
from longtail.errors import RunError, UserError
from longtail.progress import is_main_process
from longtail.text import escape_nonprintable

if TYPE_CHECKING:
    from longtail.inference.predict import Predicted

STANDARD = "-"  # standard input or output
SHOWN = 20  # images that could not be read; --csv and --json have all
WIDE_NAME, WIDE_GUESS = 26, 24  # columns of a terminal that an image and a guess want
MORE = "More guesses in a wider terminal, and by --csv and --json."


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Name the likeliest classes of images, with probabilities."""

    run: Positional[Path]
    """A run folder, or a folder that holds one; an exported .safetensors; a checkpoint of the released PaCo code."""
    images: Positional[tuple[str, ...]]
    """Image files, folders (with all below them), patterns such as 'x/*.jpg', or - for a list of paths on standard input: one
    per line, or separated by NUL characters as `find -print0` writes them."""
    top: int = 5
    """How many classes of each image."""
    csv: Path | None = None
    """Write path, class_1, probability_1, … there; - is standard output."""
    json: Path | None = None
    """Write a line of JSON an image there; - is standard output, as is --json at the end."""
    prior: str | None = None
    """Class frequencies expected in use: uniform, train (as in the training images), or a CSV or JSON file of class names and
    weights. If not said, those that the method's logits stand for."""
    on_error: Literal["stop", "skip"] = "stop"
    """At an image that cannot be read: stop and name it, or go on and list it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write the network alone for use elsewhere, checked against the original, with a model card."""

    run: Positional[Path]
    """A run folder, or a folder that holds one; an exported .safetensors; a checkpoint of the released PaCo code."""
    to: Literal["onnx", "torch", "safetensors"] = "onnx"
    """onnx: for ONNX Runtime and others; torch: torch.export's .pt2; safetensors: weights, for longtail.load."""
    out: Annotated[Path | None, arg(aliases=["-o"])] = None
    """The file (default: export/model.onnx, .pt2 or .safetensors in the folder of the run, such as RUN/seed0); its card stands
    beside it, FILE.md."""
    prior: str | None = None
    """Class frequencies that its probabilities expect, as of `longtail predict`."""


def run_predict(args: list[str]) -> int:
    """1, where not one image could be read."""
    if args and args[-1] == "--json":
        args = [*args, "-"]
    given = parse(Predict, "predict", args)
    if not given.images:
        raise UserError("name images, as in `longtail predict runs/x photographs/`")
    if STANDARD in (str(given.csv), str(given.json)) and is_output_closed():
        raise RunError("standard output is closed: name a file for --csv or --json", kind="not-writable")
    check_writable(**{flag: file for flag, file in (("csv", given.csv), ("json", given.json)) if str(file) != STANDARD})

    from longtail.inference.predict import predict

    choices = (given.top, given.prior, given.on_error, given.csv, given.json, given.device)
    found = predict(given.run, given.images, *choices)
    files = [str(file) for file in (given.csv, given.json) if file]
    if not files:
        screen = console()
        screen.print(as_table(found, screen.width))
    for file in files:
        if file != STANDARD:
            print(f"written to {escape_nonprintable(file)}", file=sys.stderr if STANDARD in files else sys.stdout)
    bad = [row for row in found if row.error]
    print(*about_bad(bad, len(found)), sep="\n", end="", file=sys.stderr)
    return 1 if len(bad) == len(found) else 0


def about_bad(bad: "Sequence[Predicted]", images: int) -> Iterator[str]:
    """The lines that name images which could not be read."""
    if bad:
        yield f"images that could not be read: {len(bad):,} of {images:,}"
        yield from (f"  {escape_nonprintable(row.path)} ({escape_nonprintable(row.error)})" for row in bad[:SHOWN])
        yield f"  … and {len(bad) - SHOWN:,} more: --csv and --json list all\n" if len(bad) > SHOWN else ""


def as_table(rows: "Sequence[Predicted]", width: int = 150) -> Table:
    """Of each image as many guesses as a terminal of so many columns has room for; the folder that all lie in is left out."""
    asked = max((len(row.guesses) for row in rows), default=0)
    some = min(asked, max(1, (width - WIDE_NAME) // WIDE_GUESS))
    table = Table(caption=None if some == asked else MORE, caption_justify="left")
    table.add_column("image", overflow="fold", min_width=min(WIDE_NAME, width // 3))
    for rank in range(1, some + 1):
        table.add_column(f"{rank}")
    folders = {os.path.dirname(os.path.abspath(row.path)) for row in rows}
    above = os.path.commonpath(folders) if len(rows) > 1 else ""
    for row in rows:
        cells = [f"{escape_nonprintable(guess.name)} {100 * guess.probability:.1f}%" for guess in row.guesses[:some]]
        name = os.path.relpath(row.path, above) if above else row.path
        table.add_row(*(Text(cell) for cell in (escape_nonprintable(name), *(cells or ["cannot be read"]))))
    return table


def run_export(args: list[str]) -> None:
    given = parse(Export, "export", args)

    from longtail.inference.export import export

    if is_main_process():
        print(f"writing {given.to}, then running it and comparing: some seconds", flush=True)
    done = export(given.run, given.to, given.out, given.prior)
    print(*map(escape_nonprintable, done.summary()), sep="\n")
