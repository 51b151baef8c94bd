"""Durations as users write and read them: "10m" is 600 seconds, and 600 seconds are "10 min"."""

import math
import re

from longtail.errors import UserError

UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}
DURATION = re.compile(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)")


def parse_duration(value: str | float) -> float:
    """Return the seconds of a time limit such as "90s", "10m", "1.5h", "600" or 600. Other values are a UserError."""
    match = DURATION.fullmatch(str(value).strip().lower())
    seconds = float(match[1]) * UNITS[match[2]] if match and match[2] in UNITS else math.nan
    if not 0 < seconds < math.inf:
        raise UserError(f"--time-limit {value}: it must be a time above zero, such as 90s, 10m or 1.5h")
    return seconds


def describe_duration(seconds: float) -> str:
    """Return a rounded duration, such as "40 s", "4 min" or "2.5 h"."""
    if seconds < 90:
        step = 10 if seconds >= 10 else 1
        return f"{max(round(seconds / step), 1) * step} s"
    return f"{round(seconds / 60)} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
