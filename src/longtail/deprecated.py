"""Support for names of version 0.1, which still work with a warning. They will be removed in version 0.3.

Renamed settings, flags and keys of files are listed in `config/migrate.py`.
"""

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

REMOVAL = "the old name will be removed in version 0.3"


def warn_renamed(old: str, new: str) -> None:
    """Issue a DeprecationWarning for a renamed object. The warning is attributed to the caller of the caller.

    Args:
        old: The old name.
        new: The present name.
    """
    warnings.warn(f"{old} was renamed to {new}; {REMOVAL}", DeprecationWarning, stacklevel=3)


def find_renamed(module: str, renamed: dict[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which finds objects by their old names.

    Args:
        module: Name of the module.
        renamed: New names by old names. A new name that contains a dot is the path of a module.
    """

    def find(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = renamed[name]
        warn_renamed(f"{module}.{name}", new if "." in new else f"{module}.{new}")
        return importlib.import_module(new) if "." in new else getattr(importlib.import_module(module), new)

    return find


def accept_old_arguments(**renamed: str) -> Callable[[F], F]:
    """Return a decorator that accepts old names of keyword arguments, with a warning.

    Args:
        **renamed: New names by old names.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in renamed.keys() & kwargs.keys():
                warn_renamed(f"argument {old}", renamed[old])
                kwargs[renamed[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
