"""The shape that JSON of others must have: checked once where it is read, so that whoever uses it need not ask again.

A shape is written as the value itself would be: `{"seed": count, "notes": [text]}`. What is `maybe` something may be absent;
keys that are not named may hold anything.
"""

import math
from collections.abc import Callable
from typing import Any

Shape = Callable[[Any], bool] | list[Any] | dict[str, Any]


def number(value: Any) -> bool:
    """Finite, and of a size that a float can have."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:
        return False


def amount(value: Any) -> bool:
    """A number from 0 on, of a size that sums and squares of many of them stay finite: seconds, bytes, milliseconds."""
    return number(value) and 0 <= value < 1e18


def percent(value: Any) -> bool:
    """A number from 0 to 100, with room for rounding."""
    return number(value) and -1e-6 <= value <= 100 + 1e-6


def share(value: Any) -> bool:
    """A number from 0 to 1, with room for rounding."""
    return number(value) and 0 <= value <= 1 + 1e-6


def count(value: Any) -> bool:
    """A whole number from 0 on, of a size that the sum over a million classes fits into 64 bits."""
    return type(value) is int and 0 <= value < 2**40


def text(value: Any) -> bool:
    return isinstance(value, str)


def anything(value: Any) -> bool:
    return True


def maybe(shape: Shape) -> Callable[[Any], bool]:
    """That, or None."""
    return lambda value: value is None or validate(value, shape) is None


def named(shape: Shape) -> Callable[[Any], bool]:
    """An object of such, whatever their keys."""
    return lambda value: isinstance(value, dict) and validate(list(value.values()), [shape]) is None


def validate(value: Any, shape: Shape, where: str = "it") -> str | None:
    """What is wrong first, in words; None where nothing is."""
    if isinstance(shape, dict) and isinstance(value, dict):
        parts = [(value.get(key), inner, key) for key, inner in shape.items()]
    elif isinstance(shape, list) and isinstance(value, list):
        if callable(shape[0]) and all(map(shape[0], value)):
            return None  # soon said of a million counts
        parts = [(item, shape[0], f"an item of {where}") for item in value]
    else:
        return None if callable(shape) and shape(value) else f"{where} is {_short(value)}"
    return next((found for part in parts if (found := validate(*part))), None)


def _short(value: Any) -> str:
    try:
        said = repr(value)
    except ValueError:  # a number of thousands of digits
        return "a huge number"
    return said if len(said) < 60 else f"{said[:59]}…"
