"""Schemas for JSON that other people may have written. It is checked when it is read; other code can rely on its structure.

A schema looks like the value that it describes: `{"seed": count, "notes": [text]}` is an object with a count and a list of
texts. Functions such as `count` check a single value. A value that is `optional` may be null or missing. Keys that the schema
does not mention may have any value.
"""

import math
from collections.abc import Callable
from typing import Any

Schema = Callable[[Any], bool] | list[Any] | dict[str, Any]

MAX_AMOUNT = 1e18
"""Amounts are below this, so that sums and squares of many of them are finite."""
MAX_COUNT = 2**40
"""Counts are below this, so that the sum over a million classes fits into 64 bits."""
ROUNDING = 1e-6
"""Tolerance of the upper limit of shares and percentages."""
MAX_TEXT = 60
"""Maximum number of characters of a value in an error message."""


def number(value: Any) -> bool:
    """Return whether a value is a finite number that a float can represent."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:
        return False


def amount(value: Any) -> bool:
    """Return whether a value is a number from 0 to `MAX_AMOUNT`, such as seconds, bytes or milliseconds."""
    return number(value) and 0 <= value < MAX_AMOUNT


def percent(value: Any) -> bool:
    """Return whether a value is a number from 0 to 100, up to rounding."""
    return number(value) and -ROUNDING <= value <= 100 + ROUNDING


def share(value: Any) -> bool:
    """Return whether a value is a number from 0 to 1, up to rounding."""
    return number(value) and 0 <= value <= 1 + ROUNDING


def count(value: Any) -> bool:
    """Return whether a value is an integer from 0 to `MAX_COUNT`."""
    return type(value) is int and 0 <= value < MAX_COUNT


def text(value: Any) -> bool:
    """Return whether a value is a string."""
    return isinstance(value, str)


def anything(value: Any) -> bool:
    """Return True."""
    return True


def optional(schema: Schema) -> Callable[[Any], bool]:
    """Return the schema of values that match `schema`, are null or are missing."""
    return lambda value: value is None or find_error(value, schema) is None


def mapping_of(schema: Schema) -> Callable[[Any], bool]:
    """Return the schema of objects whose values match `schema`; they may have any keys."""
    return lambda value: isinstance(value, dict) and find_error(list(value.values()), [schema]) is None


def find_error(value: Any, schema: Schema, name: str = "it") -> str | None:
    """Return a description of the first error in a value, or None if the value matches the schema.

    Args:
        value: The value, as read from JSON.
        schema: The schema.
        name: Name of the value in the description.
    """
    if isinstance(schema, dict) and isinstance(value, dict):
        parts = [(value.get(key), inner, key) for key, inner in schema.items()]
    elif isinstance(schema, list) and isinstance(value, list):
        if callable(schema[0]) and all(map(schema[0], value)):
            return None  # a fast path for lists of a million counts
        parts = [(item, schema[0], f"an item of {name}") for item in value]
    else:
        return None if callable(schema) and schema(value) else f"{name} is {_shorten(value)}"
    return next((error for part in parts if (error := find_error(*part))), None)


def _shorten(value: Any) -> str:
    try:
        shown = repr(value)
    except ValueError:  # an integer with too many digits to convert
        return "a huge number"
    return shown if len(shown) < MAX_TEXT else f"{shown[: MAX_TEXT - 1]}…"
