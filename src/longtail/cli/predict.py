"""The commands that use a trained network: `predict` and `export`."""

import glob
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.table import Table
from rich.text import Text
from tyro.conf import Positional, arg

from longtail import files, run_folder
from longtail.cli.console import check_output_files, is_output_closed, make_screen
from longtail.cli.parse import parse_arguments
from longtail.errors import RunError, UserError
from longtail.text import escape_nonprintable

if TYPE_CHECKING:
    from longtail.inference.predict import FilePrediction

STANDARD_STREAM = "-"  # the name of standard input or output
ERRORS_SHOWN = 20  # unreadable images that are listed; --csv and --json list all
NAME_WIDTH, GUESS_WIDTH = 26, 24  # columns of the terminal for the name of an image and for a class


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Predict the most likely classes of images, with probabilities."""

    run: Positional[Path]
    """A run folder or a folder that contains one, an exported .safetensors, or a checkpoint of the released PaCo code."""
    images: Positional[tuple[str, ...]]
    """Image files, folders (with their subfolders), patterns such as 'x/*.jpg', or - for a list of paths on standard input: one
    per line, or separated by NUL characters as `find -print0` writes them."""
    top: int = 5
    """Number of classes per image."""
    csv: Path | None = None
    """Write a CSV file with the columns path, class_1, probability_1, …; - is standard output."""
    json: Path | None = None
    """Write one line of JSON per image to this file. Use - for standard output; --json without a value, as the last argument,
    does the same."""
    prior: str | None = None
    """Class frequencies to assume for the images: uniform, train (as in the training images), or a CSV or JSON file of class
    names and weights (default: the frequencies that the method assumes)."""
    on_error: Literal["stop", "skip"] = "stop"
    """If an image cannot be read: stop with an error, or continue and list it."""
    tta: Literal["none", "flip"] = "none"
    """Test-time augmentation; flip: average the probabilities of each image and of its mirror image, which takes twice the
    time."""
    ensemble: bool = False
    """Average the probabilities of all seeds in RUN instead of using the first seed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Export the network of a run with a model card. Its outputs are compared with those of the original."""

    run: Positional[Path]
    """A run folder or a folder that contains one, an exported .safetensors, or a checkpoint of the released PaCo code."""
    to: Literal["onnx", "torch", "safetensors", "hub"] = "onnx"
    """onnx: for ONNX Runtime and others; torch: .pt2 of torch.export; safetensors: weights for longtail.load; hub: a folder
    with weights and model card in the layout of the Hugging Face hub, for timm or longtail.load."""
    out: Annotated[Path | None, arg(aliases=["-o"])] = None
    """Output file (default: RUN/seedN/export/model.onnx, model.pt2 or model.safetensors). The model card is written to FILE.md.
    With hub: output folder (default: RUN/seedN/export/hub)."""
    repo: str | None = None
    """With hub: upload the folder to this repository (USER/NAME). Needs a token (`hf auth login`, or HF_TOKEN). A new
    repository is private."""
    prior: str | None = None
    """Class frequencies to assume; see `longtail predict`."""


# predict


def run_predict(args: list[str]) -> int:
    """Run `longtail predict`. Return exit code 1 if none of the images could be read."""
    if args and args[-1] == "--json":
        args = [*args, STANDARD_STREAM]
    given = parse_arguments(Predict, "predict", args)
    if not given.images:
        raise UserError("name the images to classify: `longtail predict runs/x photographs/`")
    run_folder.check_exists(given.run)
    check_paths_exist(given.images)
    outputs = {flag: file for flag, file in (("csv", given.csv), ("json", given.json)) if file}
    uses_standard_output = STANDARD_STREAM in map(str, outputs.values())
    if uses_standard_output and is_output_closed():
        raise RunError("standard output is closed: name a file for --csv or --json", kind="not-writable")
    check_output_files(**{flag: file for flag, file in outputs.items() if str(file) != STANDARD_STREAM})

    from longtail.inference.predict import predict

    predictions = predict(
        given.run,
        given.images,
        given.top,
        given.prior,
        given.on_error,
        given.csv,
        given.json,
        given.device,
        given.tta,
        given.ensemble,
    )
    if not outputs:
        screen = make_screen()
        screen.print(make_prediction_table(predictions, screen.width))
    for file in map(str, outputs.values()):
        if file != STANDARD_STREAM:
            stream = sys.stderr if uses_standard_output else sys.stdout
            print(f"written to {escape_nonprintable(file)}", file=stream)
    failed = [row for row in predictions if row.error]
    for line in describe_failures(failed, len(predictions)):
        print(line, file=sys.stderr)
    return 1 if len(failed) == len(predictions) else 0


def check_paths_exist(words: Sequence[str]) -> None:
    """Raise a UserError with the closest existing path if an image or a folder does not exist."""
    for word in words:
        if word != STANDARD_STREAM and not os.path.lexists(word) and not glob.has_magic(word):
            similar = files.find_similar_path(word)
            hint = (
                f"did you mean {similar!r}?" if similar else "give image files, folders, or patterns such as 'x/*.jpg'"
            )
            raise UserError(f"{word} does not exist: {hint}", kind="missing-file")


def describe_failures(failed: "Sequence[FilePrediction]", total: int) -> Iterator[str]:
    """Yield lines that list images that could not be read, if there are any.

    Args:
        failed: The predictions of these images.
        total: The number of all images.
    """
    if failed:
        yield f"images that could not be read: {len(failed):,} of {total:,}"
    for row in failed[:ERRORS_SHOWN]:
        yield f"  {escape_nonprintable(row.path)} ({escape_nonprintable(row.error)})"
    if len(failed) > ERRORS_SHOWN:
        yield f"  … and {len(failed) - ERRORS_SHOWN:,} more (use --csv or --json to list all)"


def make_prediction_table(rows: "Sequence[FilePrediction]", width: int = 150) -> Table:
    """Return a table of predictions, with as many classes per image as fit; paths are relative to their common folder.

    Args:
        rows: The predictions.
        width: Columns of the terminal.
    """
    available = max((len(row.guesses) for row in rows), default=0)
    shown = min(available, max(1, (width - NAME_WIDTH) // GUESS_WIDTH))
    caption = "More classes fit in a wider terminal; --csv and --json write all."
    table = Table(caption=None if shown == available else caption, caption_justify="left")
    table.add_column("image", overflow="fold", min_width=min(NAME_WIDTH, width // 3))
    for rank in range(1, shown + 1):
        table.add_column(f"{rank}")
    folders = {os.path.dirname(os.path.abspath(row.path)) for row in rows}
    common = os.path.commonpath(folders) if len(rows) > 1 else ""
    for row in rows:
        cells = [f"{escape_nonprintable(guess.name)} {100 * guess.probability:.1f}%" for guess in row.guesses[:shown]]
        name = os.path.relpath(row.path, common) if common else row.path
        table.add_row(*(Text(cell) for cell in (escape_nonprintable(name), *(cells or ["cannot be read"]))))
    return table


# export


def run_export(args: list[str]) -> None:
    """Run `longtail export`."""
    given = parse_arguments(Export, "export", args)
    run_folder.check_exists(given.run)

    from longtail.inference.export import export

    exported = export(given.run, given.to, given.out, given.prior, given.repo)
    print(*map(escape_nonprintable, exported.summary()), sep="\n")
