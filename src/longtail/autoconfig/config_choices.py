"""The choices so far, each with its flag and its reason; the user's own stand."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
YOURS = "you chose"


class Choice(NamedTuple):
    """What was chosen, as a person reads it."""

    flag: str
    value: str
    why: str


class ConfigChoices:
    """`given` are the user's values by flag ("train.epochs"); `values` all that were chosen, theirs too."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given, self.values = dict(given), dict[str, Any]()
        self.choices: list[Choice] = []

    def set(self, flag: str, value: T) -> T:
        """A choice that goes with another one, and has no line of its own."""
        self.values[flag] = self.given.get(flag, value)
        return self.values[flag]

    def pick(self, flag: str, value: T, why: str, shown: str = "{}", yours: str = YOURS) -> T:
        """A choice with its line; `yours` is what it says of the user's own."""
        value = self.set(flag, value)
        self.say(flag, shown.format(spoken(value)), why, yours)
        return value

    def say(self, flag: str, value: str, why: str, yours: str = YOURS) -> None:
        self.choices.append(Choice(f"--{flag}", value, yours if flag in self.given else why))


def spoken(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def with_values(section: Any, values: Mapping[str, Any]) -> Any:
    """A configuration with the values of some flags; those that a section (a method) does not have are passed over."""
    changes = {}
    for name, below in by_head(values):
        if name in type(section).__dataclass_fields__:
            changes[name] = below[""] if "" in below else with_values(getattr(section, name), below)
    return replace(section, **changes) if changes else section


def by_head(values: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A flag's first word with the rest of it: of `optim.lr` "optim" and "lr", of a single word that and ""."""
    heads: dict[str, dict[str, Any]] = {}
    for flag, value in values.items():
        head, _, rest = flag.partition(".")
        heads.setdefault(head, {})[rest] = value
    yield from heads.items()
