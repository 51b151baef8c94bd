"""Bookkeeping of automatic choices: values by flag, reasons, and the values that the user has given."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
SET_BY_USER = "set by you"


class Choice(NamedTuple):
    """A chosen setting, as it is displayed."""

    flag: str
    value: str
    reason: str


class ConfigChoices:
    """Values of settings, by flags without the leading dashes, such as "optim.lr". Values that the user has given are kept.

    Args:
        given: The values that the user has given.

    Attributes:
        given: The values that the user has given.
        values: All values that were chosen, or given in place of a choice.
        choices: The choices that are displayed, in order.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = dict(given)
        self.values: dict[str, Any] = {}
        self.choices: list[Choice] = []

    def set(self, flag: str, value: T) -> T:
        """Set a value that is not displayed, because it follows from another choice. Return the value that applies."""
        self.values[flag] = self.given.get(flag, value)
        return self.values[flag]

    def choose(self, flag: str, value: T, reason: str, template: str = "{}", reason_if_given: str = SET_BY_USER) -> T:
        """Set a value that is displayed with its reason. Return the value that applies.

        Args:
            flag: The flag without the leading dashes.
            value: The value, unless the user has given one.
            reason: The reason for the value.
            template: The format in which the value is displayed.
            reason_if_given: The text in place of the reason if the user has given the value.
        """
        value = self.set(flag, value)
        self.note(flag, template.format(format_value(value)), reason, reason_if_given)
        return value

    def note(self, flag: str, text: str, reason: str, reason_if_given: str = SET_BY_USER) -> None:
        """Display a setting without setting a value.

        Args:
            flag: The flag without the leading dashes.
            text: The text that is displayed as its value.
            reason: The reason for the value.
            reason_if_given: The text in place of the reason if the user has given the value.
        """
        self.choices.append(Choice(f"--{flag}", text, reason_if_given if flag in self.given else reason))


def format_value(value: Any) -> str:
    """Return a value as it is displayed."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def with_values(section: Any, values: Mapping[str, Any]) -> Any:
    """Return a configuration, or a section, with the values of some flags, such as {"optim.lr": 0.1}.

    Flags that it does not have are ignored, because methods have different settings.
    """
    by_field: dict[str, dict[str, Any]] = {}
    for flag, value in values.items():
        field, _, rest = flag.partition(".")
        by_field.setdefault(field, {})[rest] = value
    changes = {
        field: inner[""] if "" in inner else with_values(getattr(section, field), inner)
        for field, inner in by_field.items()
        if field in type(section).__dataclass_fields__
    }
    return replace(section, **changes) if changes else section
