"""The base class of the sections of a configuration: types and limits of settings, and conversion to and from JSON.

Limits are declared on the field, for example `lr: Annotated[float, gt(0)] = 0.1`. Checks that involve several fields are in
`__post_init__` of the section and use `require`.
"""

import dataclasses
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from longtail.errors import UserError, unknown_name

S = TypeVar("S", bound="Section")

MAX_NUMBER = 2**31
"""The absolute value of every number in a configuration is below this one."""


def require(condition: bool, flag: str, value: object, rule: str) -> None:
    """Raise a UserError if a setting has a value that is not allowed.

    Args:
        condition: Whether the value is allowed.
        flag: Name of the flag, without the leading dashes.
        value: The value, for the message.
        rule: The rest of the sentence "it must be ...", for the message.
    """
    if not condition:
        raise UserError(f"--{flag} {value}: it must be {rule}")


@dataclasses.dataclass(frozen=True)
class Limit:
    """A limit of a setting, declared in the annotation of its field.

    It applies to numbers and tuples. None and words, such as those of `float | Literal["auto"]`, are always accepted.
    """

    accepts: Callable[[Any], bool]
    """Returns whether a value respects the limit."""
    rule: str
    """The rest of the sentence "it must be ...", for error messages."""
    example: str = ""
    """A recommended value, or several separated by words or spaces, for error messages."""

    def check(self, flag: str, value: Any) -> None:
        """Raise a UserError if the value of a flag does not respect this limit."""
        accepted = value is None or isinstance(value, str) or self.accepts(value)
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        require(accepted, flag, shown, f"{self.rule}, for example {self.example}" if self.example else self.rule)


def ge(low: float, example: str = "") -> Limit:
    """Return the limit "at least `low`"."""
    return Limit(lambda value: value >= low, f"at least {low}", example)


def gt(low: float, example: str = "") -> Limit:
    """Return the limit "greater than `low`"."""
    return Limit(lambda value: value > low, f"greater than {low}", example)


def interval(low: float, high: float, ends: Literal["[]", "[)", "(]", "()"] = "[]", example: str = "") -> Limit:
    """Return the limit that a number lies in an interval.

    Args:
        low: Lower end.
        high: Upper end.
        ends: Brackets of the mathematical notation: a square bracket includes the end, a parenthesis excludes it.
        example: A recommended value, for error messages.
    """

    def accepts(value: float) -> bool:
        return (low <= value if ends[0] == "[" else low < value) and (value <= high if ends[1] == "]" else value < high)

    rule = f"between {low} and {high}" if ends == "[]" else f"in {ends[0]}{low}, {high}{ends[1]}"
    return Limit(accepts, rule, example)


def increasing(limit: Limit, rule: str, example: str = "") -> Limit:
    """Return the limit that the items of a tuple increase strictly and that each of them respects `limit`."""
    return Limit(lambda items: list(items) == sorted(set(items)) and all(map(limit.accepts, items)), rule, example)


class Section:
    """Base class of the sections of a configuration, which are frozen dataclasses.

    Every value is converted to the type of its field and checked against the limits of the field when an instance is created.
    `section` is the prefix of the flags.
    """

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self), include_extras=True)
        for f in dataclasses.fields(typing.cast(Any, self)):
            flag = f"{self.section}.{f.name}".lstrip(".")
            object.__setattr__(self, f.name, coerce(hints[f.name], getattr(self, f.name), flag))

    @classmethod
    def resolve_type(cls, tree: dict[str, Any]) -> "type[Section]":
        """Return the section class that a stored tree describes, and remove from the tree what `tag` added to it."""
        return cls

    def tag(self) -> dict[str, Any]:
        """Return the keys that `to_dict` stores in addition to the fields; `resolve_type` reads them."""
        return {}


def to_dict(section: Any) -> dict[str, Any]:
    """Convert a section, with the sections inside it, to values that JSON can represent."""
    tree: dict[str, Any] = section.tag()
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if dataclasses.is_dataclass(value):
            value = to_dict(value)
        elif isinstance(value, Path):
            value = str(value)
        elif isinstance(value, tuple):
            value = [str(item) if isinstance(item, Path) else item for item in value]
        tree[f.name] = value
    return tree


def from_dict(kind: type[S], tree: Any, prefix: str = "") -> S:
    """Convert the result of `to_dict` back to a section.

    Args:
        kind: The class of the section.
        tree: The stored values.
        prefix: Start of the names of keys in error messages, such as "data.".

    Raises:
        UserError: A key is unknown, or a value has the wrong type or is not allowed. The message names the key.
    """
    if not isinstance(tree, dict):
        raise UserError(f"{prefix or 'the configuration'} must be an object, got {tree!r}")
    tree = dict(tree)
    kind = kind.resolve_type(tree)  # type: ignore[assignment]
    names = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in tree:
        if key not in names:
            raise unknown_name("configuration key", f"{prefix}{key}", (prefix + n for n in names))
    return kind(**tree)


def coerce(hint: Any, value: Any, flag: str) -> Any:
    """Convert a value to the type of its field and check the limits of the field.

    Numbers must be finite and smaller than `MAX_NUMBER`.

    Args:
        hint: The annotation of the field.
        value: The value to convert.
        flag: Name of the flag without the leading dashes, for error messages.

    Raises:
        UserError: The value does not have the type, or does not respect a limit.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        value = coerce(args[0], value, flag)
        for limit in args[1:]:
            if isinstance(limit, Limit):
                limit.check(flag, value)
        return value
    expected = getattr(hint, "__name__", str(hint))
    if dataclasses.is_dataclass(hint):
        kind = typing.cast(type, hint)
        return value if isinstance(value, kind) else from_dict(kind, value, flag + ".")
    if origin is Literal:
        if value in args:
            return value
        expected = " or ".join(map(repr, args))
    elif origin in (typing.Union, types.UnionType):  # a type with alternatives: None or words
        alternatives = [word for kind in args[1:] for word in typing.get_args(kind) or (None,)]
        try:
            return value if value in alternatives else coerce(args[0], value, flag)
        except UserError as error:
            raise UserError(f"{error}{''.join(f' or {word!r}' for word in alternatives if word)}") from None
    elif origin is tuple:
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis and isinstance(value, list | tuple) else list(args)
        if isinstance(value, list | tuple) and len(kinds) == len(value):
            return tuple(coerce(k, v, flag) for k, v in zip(kinds, value, strict=True))
        expected = f"a list of {args[0].__name__}"
    elif hint is Path and isinstance(value, str | Path):
        return Path(value)
    elif hint in (int, float) and type(value) in (int, float):
        if abs(value) < MAX_NUMBER and value == hint(value):
            return hint(value)
        expected = f"{'an integer' if hint is int else 'a finite number'} below {MAX_NUMBER:,}"
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise UserError(f"--{flag} {value!r}: it must be {expected}")


def list_settings(section: Any, prefix: str = "") -> list[str]:
    """Return the names of all settings in a section and in the sections inside it, such as "optim.lr".

    Args:
        section: A section, a configuration, or a dataclass that has sections.
        prefix: Start of the names, such as "optim.".
    """
    names: list[str] = []
    for f in dataclasses.fields(section):
        value = getattr(section, f.name, None)  # a class has no attribute for a field without a default
        is_section = dataclasses.is_dataclass(value)
        names += list_settings(value, f"{prefix}{f.name}.") if is_section else [f"{prefix}{f.name}"]
    return names


def differences(first: Any, second: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """Compare two configurations that were converted by `to_dict`.

    Args:
        first: One configuration, or a part of it.
        second: The other one.
        key: The key of both parts in the whole configuration.

    Returns:
        The two values of every setting that differs, by its key, such as "optim.lr".
    """
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return {} if first == second else {key: (first, second)}
    found: dict[str, tuple[Any, Any]] = {}
    for name in first | second:
        found |= differences(first.get(name), second.get(name), f"{key}.{name}".lstrip("."))
    return found
