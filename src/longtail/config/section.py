"""What all sections of a configuration share: values checked where they enter, and the way to JSON and back."""

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from longtail.errors import UserError, unknown_name

S = TypeVar("S", bound="Section")


def require(good: bool, flag: str, value: object, rule: str) -> None:
    if not good:
        raise UserError(f"--{flag} {value}: it must be {rule}")


class Section:
    """Every value of a section is brought to its type when it enters, wherever it comes from; `section` names its flags."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(typing.cast(Any, self)):
            where = f"{self.section}.{f.name}".lstrip(".")
            object.__setattr__(self, f.name, coerce(hints[f.name], getattr(self, f.name), where))

    @classmethod
    def resolve_type(cls, tree: dict[str, Any]) -> "type[Section]":
        """Which section a tree describes, where there are several to choose from; takes the name out of it."""
        return cls

    def tag(self) -> dict[str, Any]:
        """What its tree has beside its fields: the name that `chosen_by` reads."""
        return {}


def to_dict(section: Any) -> dict[str, Any]:
    """A (nested) section as plain JSON values."""
    tree: dict[str, Any] = section.tag()
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if dataclasses.is_dataclass(value):
            value = to_dict(value)
        elif isinstance(value, Path):
            value = str(value)
        elif isinstance(value, tuple):
            value = list(value)
        tree[f.name] = value
    return tree


def from_dict(kind: type[S], tree: Any, where: str = "") -> S:
    """The inverse of `to_dict`; unknown keys and values of the wrong type are UserErrors that name the place."""
    if not isinstance(tree, dict):
        raise UserError(f"{where or 'the configuration'} must be an object, got {tree!r}")
    tree = dict(tree)
    kind = kind.resolve_type(tree)  # type: ignore[assignment]
    names = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in tree:
        if key not in names:
            raise unknown_name("configuration key", f"{where}{key}", (where + n for n in names))
    return kind(**tree)


def coerce(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type that the field has, or a UserError; numbers are finite and of a size that a computer can use."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    expected = getattr(hint, "__name__", str(hint))
    if dataclasses.is_dataclass(hint):
        kind = typing.cast(type, hint)
        return value if isinstance(value, kind) else from_dict(kind, value, where + ".")
    if origin is Literal:
        if value in args:
            return value
        expected = " or ".join(map(repr, args))
    elif origin in (typing.Union, types.UnionType):  # a type, and beside it None or words
        beside = [word for kind in args[1:] for word in typing.get_args(kind) or (None,)]
        try:
            return value if value in beside else coerce(args[0], value, where)
        except UserError as error:
            raise UserError(f"{error}{''.join(f' or {word!r}' for word in beside if word)}") from None
    elif origin is tuple:
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis and isinstance(value, list | tuple) else list(args)
        if isinstance(value, list | tuple) and len(kinds) == len(value):
            return tuple(coerce(k, v, where) for k, v in zip(kinds, value, strict=True))
        expected = f"a list of {args[0].__name__}"
    elif hint is Path and isinstance(value, str | Path):
        return Path(value)
    elif hint in (int, float) and type(value) in (int, float):
        if abs(value) < 2**31 and value == hint(value):
            return hint(value)
        expected = f"a {'whole' if hint is int else 'finite'} number below {2**31:,}"
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise UserError(f"--{where} {value!r}: it must be {expected}")


def differences(there: Any, here: Any, where: str = "") -> dict[str, tuple[Any, Any]]:
    """Where two configurations (as dicts) differ: 'section.field' -> the two values."""
    if not (isinstance(there, dict) and isinstance(here, dict)):
        return {} if there == here else {where: (there, here)}
    found: dict[str, tuple[Any, Any]] = {}
    for key in there | here:
        found |= differences(there.get(key), here.get(key), f"{where}.{key}".lstrip("."))
    return found
