"""Predictions for many image files: found, decoded ahead in threads, and written as they come."""

import contextlib
import csv as csv_format
import glob
import json as json_format
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np

from longtail import files
from longtail.data.decode import BadImage, in_threads
from longtail.data.folder import EXTENSIONS, image_files
from longtail.data.lazy_images import ImageArray
from longtail.errors import UserError, error_text
from longtail.inference.loading import load
from longtail.inference.model import Guess, Model
from longtail.progress import log_warning, track
from longtail.text import FORMULA_STARTS, csv_safe, escape_nonprintable

STANDARD = "-"  # standard input, or output
LONGEST_LIST = 2**28  # bytes of paths on standard input


class Predicted(NamedTuple):
    path: str
    guesses: tuple[Guess, ...]
    """The likeliest classes; none, where the image could not be read."""
    error: str = ""
    """Why it could not."""


def predict(
    run: Path | str | Model,
    images: str | Path | Iterable[str | Path],
    top: int = 5,
    prior: str | Path | Mapping[str, float] | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    csv: Path | str | None = None,
    json: Path | str | None = None,
    device: str = "auto",
) -> list[Predicted]:
    """The likeliest classes of image files; the twin of `longtail predict`.

    `images` are files, folders, patterns such as "x/*.jpg", or "-" for a list of paths on standard input: one per line, or
    separated by NUL characters. `csv` and `json` (a line an image) are written whole or not at all; "-" is standard output. At
    an image that cannot be read it stops, or with `skip` goes on and keeps its reason in place of guesses.
    """
    if top < 1:
        raise UserError(f"--top {top}: at least 1 class of each image")
    paths = find_images([images] if isinstance(images, str | Path) else images)
    model = run if isinstance(run, Model) else load(run, device)
    model = model if prior is None else model.expecting(prior)
    for note in model.notes():
        log_warning(escape_nonprintable(note))
    width = min(top, len(model.class_names))
    with written(csv, lambda file: as_csv(file, width)) as to_csv, written(json, as_json) as to_json:
        found = []
        for row in predictions(model, paths, width, on_error):
            found.append(row)
            to_csv(row)
            to_json(row)
    return found


def predictions(model: Model, paths: list[Path], top: int, on_error: str) -> Iterator[Predicted]:
    """Of each file in order, a batch at a time."""
    work = in_threads(lambda index: model.preprocessing.pixels(paths[index]), np.arange(len(paths)))
    with closing(work):
        decoded, names = track(work, len(paths), "predicting"), iter(map(str, paths))
        while batch := list(islice(decoded, model.batch)):
            yield from said_of(model, list(islice(names, len(batch))), batch, top, on_error)


def said_of(
    model: Model, names: list[str], batch: list[ImageArray | BadImage], top: int, on_error: str
) -> Iterator[Predicted]:
    bad = {name: image for name, image in zip(names, batch, strict=True) if isinstance(image, BadImage)}
    if bad and on_error == "stop":
        name, why = next(iter(bad.items()))
        fix = "replace or remove it, or go on without such images with --on-error skip"
        raise UserError(f"cannot read the image {name} ({why}): {fix}", kind="bad-image")
    pixels = [image for image in batch if not isinstance(image, BadImage)]
    p_NC = model.probabilities(model.logits(pixels)) if pixels else None
    best = iter(zip(*(part.tolist() for part in p_NC.topk(top)), strict=True)) if p_NC is not None else iter(())
    for name, image in zip(names, batch, strict=True):
        if isinstance(image, BadImage):
            yield Predicted(name, (), str(image))
        else:
            yield Predicted(name, tuple(Guess(model.class_names[c], p, c) for p, c in zip(*next(best), strict=True)))


# Which files are meant


def find_images(asked: Iterable[str | Path]) -> list[Path]:
    """Files as they are, the images of folders at any depth, what patterns match, and the lines of standard input."""
    found = [path for word in asked for path in _meant_by(str(word))]
    if not found:
        raise UserError("no image is named: give files, folders, patterns such as 'x/*.jpg', or - for a list of paths")
    return found


def _meant_by(word: str) -> Iterator[Path]:
    if word == STANDARD:
        for name in read_paths():
            yield from _file_or_folder(Path(name))
    elif os.path.lexists(word):
        yield from _file_or_folder(Path(word))
    else:
        matches = sorted(glob.glob(word, recursive=True)) if glob.has_magic(word) else []
        if not matches:
            raise UserError(
                f"there is no {word}: name image files, folders, or patterns such as 'x/*.jpg'", kind="missing-file"
            )
        for match in matches:
            yield from _file_or_folder(Path(match))


def read_paths() -> list[str]:
    """Return the paths on standard input: separated by NUL characters if there is one (`find -print0`), else one per line."""
    if sys.stdin is None:
        raise UserError(
            "- reads paths from standard input, which is closed: name images, or redirect it from a list",
            kind="unreadable-file",
        )
    try:
        content = sys.stdin.buffer.read(LONGEST_LIST + 1)
    except OSError as error:
        raise UserError(
            f"cannot read paths from standard input ({error_text(error)}): redirect it from a list",
            kind=files.read_error_kind(error),
        ) from error
    if len(content) > LONGEST_LIST:
        raise UserError(
            f"standard input has more than {LONGEST_LIST:,} bytes: is it a list of paths?", kind="unsafe-file"
        )
    if b"\0" in content:
        return [os.fsdecode(name) for name in content.split(b"\0") if name]
    return [os.fsdecode(name) for line in content.split(b"\n") if (name := line.rstrip(b"\r"))]


def _file_or_folder(path: Path) -> Iterator[Path]:
    if not os.path.isdir(path):
        yield path
        return
    inside = list(image_files(path, (), []))
    if not inside:
        raise UserError(
            f"{path} has no image (files that end in .jpg, .png or the like): name another folder, or files",
            kind="missing-file",
        )
    yield from inside


# Writing


@contextlib.contextmanager
def written(
    path: Path | str | None, writer: Callable[[IO[str]], Callable[[Predicted], None]]
) -> Iterator[Callable[[Predicted], None]]:
    """What writes a row there; the file appears once all are written."""
    if path is None:
        yield lambda row: None
        return
    if str(path) == STANDARD:
        yield writer(sys.stdout)
        return
    refuse_images(Path(path))
    try:
        with files.replace_output(Path(path)) as fresh, open(fresh, "w", encoding="utf-8", newline="") as file:
            yield writer(file)
            file.flush()
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}): name a file in a folder that can be written", kind="not-writable"
        ) from error


def refuse_images(path: Path) -> None:
    """`--json a.jpg` would write over a photograph."""
    if path.suffix.lower() in EXTENSIONS:
        raise UserError(f"{path} would be written over, and is named as images are: name another file", kind="exists")


def as_csv(file: IO[str], top: int) -> Callable[[Predicted], None]:
    """path, class_1, probability_1, …, error."""
    lines = csv_format.writer(file)
    ranks = [f"{what}_{rank}" for rank in range(1, top + 1) for what in ("class", "probability")]
    lines.writerow(["path", *ranks, "error"])

    def write(row: Predicted) -> None:
        cells = [
            cell
            for guess in row.guesses
            for cell in (csv_safe(escape_nonprintable(guess.name)), f"{guess.probability:.6g}")
        ]
        path = escape_nonprintable(row.path)
        path = f"./{path}" if path.startswith(FORMULA_STARTS) else path
        lines.writerow([path, *cells, *[""] * (2 * top - len(cells)), csv_safe(escape_nonprintable(row.error))])

    return write


def as_json(file: IO[str]) -> Callable[[Predicted], None]:
    """A line an image."""

    def write(row: Predicted) -> None:
        said = [{"class": guess.name, "probability": float(f"{guess.probability:.6g}")} for guess in row.guesses]
        tree: dict[str, Any] = {"path": row.path} | ({"error": row.error} if row.error else {"predictions": said})
        file.write(json_format.dumps(tree) + "\n")

    return write
