"""Expected class frequencies, which may differ from those of the training data."""

import csv
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longtail import files
from longtail.errors import UserError, file_error_kind, unknown_name
from longtail.metrics import FloatArray
from longtail.text import did_you_mean, preview


class Prior(NamedTuple):
    """Class frequencies with a name."""

    name: str
    shares_C: FloatArray
    """Frequencies that sum to 1."""


def describe_frequencies(shares_C: FloatArray, counts: Any) -> str:
    """Return a description of class frequencies, given the training images per class if known."""
    shares_C = np.asarray(shares_C)
    if np.allclose(shares_C, 1 / len(shares_C), rtol=1e-4):
        return "uniform class frequencies (all classes equally common)"
    if counts is not None and np.allclose(shares_C, np.asarray(counts) / np.sum(counts), rtol=1e-4):
        return "the class frequencies of the training images"
    return "class frequencies between uniform and those of the training images"


def make_prior(asked: str | Path | Mapping[str, float], class_names: tuple[str, ...], counts: Any) -> Prior:
    """Return class frequencies.

    Args:
        asked: "uniform", "train" (as in the training data), a mapping of class names to weights, or a CSV or JSON file with
            class names and weights.
        class_names: Names of the classes.
        counts: Number of training images of each class, or None if unknown.
    """
    if asked == "uniform":
        return Prior("uniform", np.full(len(class_names), 1 / len(class_names)))
    if asked == "train":
        if counts is None:
            raise UserError(
                "the class frequencies of the training data are unknown: give a file of class frequencies instead"
            )
        return Prior("train", np.asarray(counts, np.float64) / np.sum(counts))
    if isinstance(asked, Mapping):
        return Prior("given", normalize_weights(asked, class_names, "the prior"))
    return Prior(Path(asked).name, normalize_weights(read_weights(Path(asked)), class_names, str(asked)))


def normalize_weights(weights: Mapping[str, Any], class_names: tuple[str, ...], where: str) -> FloatArray:
    """Return class frequencies in the order of the classes.

    Args:
        weights: A weight for each class.
        class_names: Names of the classes.
        where: Origin of the weights, for error messages.

    Raises:
        UserError: A class is unknown or missing, or a weight is invalid.
    """
    known = set(class_names)
    for name in weights:
        if name not in known:
            raise unknown_name(f"class in {where}", name, class_names)
    missing = [name for name in class_names if name not in weights]
    if missing:
        raise UserError(
            f"{where} has no weight for {len(missing)} of {len(class_names)} classes ({preview(missing)}): add them"
        )
    found = np.array([parse_weight(weights[name], name, where) for name in class_names])
    if not found.any():
        raise UserError(f"{where}: all weights are 0: give at least one class a positive weight")
    if not math.isfinite(sum(found.tolist())):
        raise UserError(f"{where}: the sum of the weights is too large: use smaller weights")
    return found / found.sum()


def parse_weight(value: Any, name: str, where: str) -> float:
    """Return the weight of the class `name` as a number; raise a UserError if it is negative or not a finite number."""
    try:
        weight = float(value)
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if isinstance(value, bool) or not (math.isfinite(weight) and weight >= 0):
        raise UserError(f"{where}, class {name!r}: {value!r} is not a weight: give a number of at least 0")
    return weight


def read_weights(path: Path) -> dict[str, Any]:
    """Return the weights in a JSON object, or in lines `class,weight` with an optional header."""
    try:
        text = files.read_text(path, "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        advice = did_you_mean(path, ("uniform", "train")) or "--prior takes uniform, train, or a CSV or JSON file"
        raise UserError(f"cannot read {path} ({reason}): {advice}", kind=file_error_kind(error)) from error
    return _json_object(path, text) if path.suffix.lower() == ".json" else _csv_rows(path, text)


def _json_object(path: Path, text: str) -> dict[str, Any]:
    try:
        tree = files.parse_json(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not valid JSON ({error}): write an object of class names and weights", kind="damaged-file"
        ) from error
    if not isinstance(tree, dict):
        raise UserError(
            f'{path}: write an object of class names and weights, such as {{"cat": 2, "dog": 1}}', kind="damaged-file"
        )
    return tree


def _csv_rows(path: Path, text: str) -> dict[str, Any]:
    weights: dict[str, Any] = {}
    try:
        # One row at a time, because a file of short rows needs much memory as lists.
        rows = filter(None, csv.reader(io.StringIO(text, newline=None)))
        for number, row in enumerate(rows):
            if number == 0 and len(row) == 2 and row[0].strip().lower() in ("class", "name", "label"):
                continue
            if len(row) != 2:
                raise UserError(
                    f"{path}: {','.join(row)!r} is not of the form `class,weight` (put names with commas in quotes)",
                    kind="damaged-file",
                )
            if row[0] in weights:
                raise UserError(f"{path}: class {row[0]!r} occurs twice: remove one of the lines", kind="damaged-file")
            weights[row[0]] = row[1]
    except csv.Error as error:
        raise UserError(
            f"{path} is not valid CSV ({error}): write lines of `class,weight`", kind="damaged-file"
        ) from error
    return weights
