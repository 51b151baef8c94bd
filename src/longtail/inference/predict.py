"""Prediction for image files: they are decoded ahead in threads, and results are written as they are computed."""

import contextlib
import csv as csv_format
import glob
import json as json_format
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np

from longtail import files
from longtail.data.decode import BadImage, map_in_threads
from longtail.data.folder import EXTENSIONS, walk_images
from longtail.data.lazy_images import ImageArray
from longtail.errors import UserError, check_is_path, error_text, file_error_kind
from longtail.inference.loading import load
from longtail.inference.model import Augmentation, ClassProbability, Model
from longtail.progress import log_warning, track
from longtail.text import csv_safe, csv_safe_path, escape_nonprintable

STANDARD = "-"
"""File name that means standard input or output."""
MAX_LIST_BYTES = 2**28
"""Largest size in bytes of a list of paths on standard input."""


class FilePrediction(NamedTuple):
    """The prediction for an image file."""

    path: str
    guesses: tuple[ClassProbability, ...]
    """The most probable classes; empty if the image could not be read."""
    error: str = ""
    """The reason why the image could not be read."""


def predict(
    run: Path | str | Model,
    images: str | Path | Iterable[str | Path],
    top: int = 5,
    prior: str | Path | Mapping[str, float] | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    csv: Path | str | None = None,
    json: Path | str | None = None,
    device: str = "auto",
    tta: Augmentation | None = None,
    ensemble: bool = False,
) -> list[FilePrediction]:
    """Predict the most probable classes of image files. This function is the equivalent of `longtail predict`.

    Args:
        run: A loaded model, or a path for `longtail.load`.
        images: Files, folders, patterns such as "x/*.jpg", or "-" for a list of paths on standard input: one per line, or
            separated by NUL characters.
        top: Number of classes per image.
        prior: Expected class frequencies; see `longtail.load`.
        on_error: "stop" raises a UserError for an unreadable image; "skip" reports the reason instead of classes.
        csv: CSV file to write, or "-" for standard output. The file is written completely or not at all.
        json: File to write with one line of JSON per image, or "-" for standard output.
        device: "auto", "cpu" or "cuda".
        tta: Test-time augmentation: "none" or "flip"; None for that of the loaded model, or "none" for a path. See
            `longtail.load`.
        ensemble: Whether the probabilities of all seeds in the folder `run` are averaged.
    """
    if top < 1:
        raise UserError(f"--top {top}: it must be at least 1")
    asked = [images] if isinstance(images, str | Path) or not isinstance(images, Iterable) else list(images)
    for image in asked:
        check_is_path(image, "an image")
    paths = find_images(asked)
    if ensemble and isinstance(run, Model):
        raise UserError(
            "ensemble=True needs the folder of the seeds: call longtail.load(folder, ensemble=True) for a model"
        )
    model = run if isinstance(run, Model) else load(run, device, ensemble=ensemble)
    model = model if tta is None else replace(model, tta=tta)
    model = model if prior is None else model.with_prior(prior)
    for note in model.notes():
        log_warning(escape_nonprintable(note))
    width = min(top, len(model.class_names))
    with open_output(csv, lambda file: csv_writer(file, width)) as to_csv, open_output(json, json_writer) as to_json:
        found = []
        for row in predict_files(model, paths, width, on_error):
            found.append(row)
            to_csv(row)
            to_json(row)
    return found


def predict_files(model: Model, paths: list[Path], top: int, on_error: str) -> Iterator[FilePrediction]:
    """Yield the predictions for image files in order, computed in batches.

    Args:
        model: The model.
        paths: The image files.
        top: Number of classes per image.
        on_error: "stop" or "skip"; see `predict`.
    """
    work = map_in_threads(lambda index: model.preprocessing.pixels(paths[index]), np.arange(len(paths)))
    with closing(work):
        decoded, names = track(work, len(paths), "predicting", "images"), iter(map(str, paths))
        while batch := list(islice(decoded, model.batch)):
            yield from _predict_batch(model, list(islice(names, len(batch))), batch, top, on_error)


def _predict_batch(
    model: Model, names: list[str], batch: list[ImageArray | BadImage], top: int, on_error: str
) -> Iterator[FilePrediction]:
    bad = {name: image for name, image in zip(names, batch, strict=True) if isinstance(image, BadImage)}
    if bad and on_error == "stop":
        name, reason = next(iter(bad.items()))
        fix = "replace or remove it, or skip unreadable images with --on_error skip"
        raise UserError(f"cannot read the image {name} ({reason}): {fix}", kind="bad-image")
    pixels = [image for image in batch if not isinstance(image, BadImage)]
    p_NC = model.classify(pixels)[1] if pixels else None
    best = iter(zip(*(part.tolist() for part in p_NC.topk(top)), strict=True)) if p_NC is not None else iter(())
    for name, image in zip(names, batch, strict=True):
        if isinstance(image, BadImage):
            yield FilePrediction(name, (), str(image))
        else:
            yield FilePrediction(
                name, tuple(ClassProbability(model.class_names[c], p, c) for p, c in zip(*next(best), strict=True))
            )


# Finding images


def find_images(asked: Iterable[str | Path]) -> list[Path]:
    """Return image files: given files, images in folders and their subfolders, matches of patterns, and paths on standard
    input."""
    found = [path for word in asked for path in _expand(str(word))]
    if not found:
        raise UserError("no images: give files, folders, patterns such as 'x/*.jpg', or - for a list of paths")
    return found


def _expand(word: str) -> Iterator[Path]:
    if word == STANDARD:
        for name in read_paths():
            yield from _file_or_folder(Path(name))
    elif os.path.lexists(word):
        yield from _file_or_folder(Path(word))
    else:
        matches = sorted(set(match_pattern(word))) if glob.has_magic(word) else []
        if not matches:
            raise UserError(
                f"{word} does not exist: give image files, folders, or patterns such as 'x/*.jpg'", kind="missing-file"
            )
        for match in matches:
            yield from _file_or_folder(Path(match))


def match_pattern(pattern: str) -> Iterator[str]:
    """Yield the matches of a pattern, in which "**" stands for folders at any depth.

    Unlike `glob.glob(pattern, recursive=True)`, this function enters each folder once: a few folders that contain links to each
    other have an exponential number of paths. "**" at the end matches files.
    """
    parts = pattern.split(os.sep)
    if "**" not in parts:
        yield from glob.glob(pattern)
        return
    first = parts.index("**")
    rest, seen = parts[first + 1 :], set[str]()
    for top in glob.glob(os.sep.join([*parts[:first], ""])) if first else [os.curdir]:
        try:
            for folder, inner, names in files.walk(top, follow_links=True):
                if os.path.realpath(folder) in seen:
                    inner.clear()
                    continue
                seen.add(os.path.realpath(folder))
                inner[:] = sorted(name for name in inner if not name.startswith("."))
                if rest:
                    yield from match_pattern(os.path.join(glob.escape(folder), *rest))
                else:
                    yield from (os.path.join(folder, name) for name in names if not name.startswith("."))
        except files.RefusedFile as error:
            raise UserError(
                f"cannot search {top} ({error.strerror}): name a folder closer to the images", kind="unsafe-file"
            ) from error


def read_paths() -> list[str]:
    """Return the paths on standard input: separated by NUL characters if there is one (`find -print0`), else one per line."""
    if sys.stdin is None:
        raise UserError(
            "cannot read paths from standard input, because it is closed: give image files, or redirect it from a list",
            kind="unreadable-file",
        )
    try:
        content = sys.stdin.buffer.read(MAX_LIST_BYTES + 1)
    except OSError as error:
        raise UserError(
            f"cannot read paths from standard input ({error_text(error)}): redirect it from a list",
            kind=file_error_kind(error),
        ) from error
    if len(content) > MAX_LIST_BYTES:
        raise UserError(
            f"standard input has more than {MAX_LIST_BYTES:,} bytes: is it a list of paths?", kind="unsafe-file"
        )
    if b"\0" in content:
        return [os.fsdecode(name) for name in content.split(b"\0") if name]
    return [os.fsdecode(name) for line in content.split(b"\n") if (name := line.rstrip(b"\r"))]


def _file_or_folder(path: Path) -> Iterator[Path]:
    if not os.path.isdir(path):
        yield path
        return
    inside = list(walk_images(path, (), []))
    if not inside:
        raise UserError(
            f"{path} contains no images (files with suffixes such as .jpg or .png): give another folder, or image files",
            kind="missing-file",
        )
    yield from inside


# Writing


@contextlib.contextmanager
def open_output(
    path: Path | str | None, writer: Callable[[IO[str]], Callable[[FilePrediction], None]]
) -> Iterator[Callable[[FilePrediction], None]]:
    """Yield a function that writes a row. The file appears when all rows are written.

    Args:
        path: The file, "-" for standard output, or None to write nothing.
        writer: Function that returns the function for an open file.
    """
    if path is None:
        yield lambda row: None
        return
    if str(path) == STANDARD:
        yield writer(sys.stdout)
        return
    check_not_an_image(Path(path))
    try:
        with files.replace_output(Path(path)) as fresh, open(fresh, "w", encoding="utf-8", newline="") as file:
            yield writer(file)
            file.flush()
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}): choose a file in a writable folder",
            kind=file_error_kind(error, writing=True),
        ) from error


def check_not_an_image(path: Path) -> None:
    """Raise a UserError for a path with the suffix of images, because `--json a.jpg` would overwrite a photo."""
    if path.suffix.lower() in EXTENSIONS:
        raise UserError(
            f"{path} has the suffix of an image and would be overwritten: choose another file", kind="exists"
        )


def csv_writer(file: IO[str], top: int) -> Callable[[FilePrediction], None]:
    """Return a function that writes rows as CSV with the columns path, class_1, probability_1, …, error."""
    lines = csv_format.writer(file)
    ranks = [f"{what}_{rank}" for rank in range(1, top + 1) for what in ("class", "probability")]
    lines.writerow(["path", *ranks, "error"])

    def write(row: FilePrediction) -> None:
        cells = [
            cell
            for guess in row.guesses
            for cell in (csv_safe(escape_nonprintable(guess.name)), f"{guess.probability:.6g}")
        ]
        lines.writerow(
            [csv_safe_path(row.path), *cells, *[""] * (2 * top - len(cells)), csv_safe(escape_nonprintable(row.error))]
        )

    return write


def json_writer(file: IO[str]) -> Callable[[FilePrediction], None]:
    """Return a function that writes rows as JSON, one per line."""

    def write(row: FilePrediction) -> None:
        said = [{"class": guess.name, "probability": float(f"{guess.probability:.6g}")} for guess in row.guesses]
        tree: dict[str, Any] = {"path": row.path} | ({"error": row.error} if row.error else {"predictions": said})
        file.write(json_format.dumps(tree) + "\n")

    return write
