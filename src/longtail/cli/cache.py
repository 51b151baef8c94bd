"""The commands `cache info` and `cache clear`: the stored features of frozen backbones."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from longtail.cli.parse import parse_arguments
from longtail.errors import UserError, unknown_name
from longtail.feature_cache import FeatureCache
from longtail.text import escape_nonprintable, pluralize


@dataclass(frozen=True, kw_only=True)
class Info:
    """Show where the cache is, the number and size of its files, the size limit, and the last use."""


@dataclass(frozen=True, kw_only=True)
class Clear:
    """Remove all files of the cache. Other files in its folder are kept."""


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Show or clear the stored features of frozen backbones: cache info, cache clear."""


def run_cache(args: list[str]) -> None:
    """Run `longtail cache`."""
    if not args or args[0] in ("-h", "--help"):
        print("longtail cache info     show the location, the number and size of the files, the limit and the last use")
        print("longtail cache clear    remove all files of the cache")
        return
    if args[0] not in CACHE_COMMANDS:
        raise unknown_name("command", f"cache {args[0]}", [f"cache {command}" for command in CACHE_COMMANDS])
    arguments, run = CACHE_COMMANDS[args[0]]
    parse_arguments(arguments, f"cache {args[0]}", args[1:])
    run()


def print_info() -> None:
    """Print location, number of files, size, limit and last use of the cache."""
    cache = FeatureCache()
    stored = cache.list_files()
    print(f"location:  {escape_nonprintable(cache.folder)}")
    print(f"files:     {len(stored):,}")
    print(f"size:      {format_size(sum(file.size for file in stored))}")
    print(f"limit:     {format_size(cache.limit)}")
    print(f"last use:  {format_time(stored[-1].last_use) if stored else 'never'}")


def format_time(seconds: float) -> str:
    """Return a time of a file, which may be any number, as local date and time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OSError, OverflowError, ValueError):
        return "unknown"


def clear() -> None:
    """Remove the files of the cache and print how much space was freed."""
    cache = FeatureCache()
    before = len(cache.list_files())
    freed = cache.clear()
    kept = len(cache.list_files())
    print(f"removed {pluralize(before - kept, 'file')}, freed {format_size(freed)}")
    if kept:
        raise UserError(
            f"cannot remove {pluralize(kept, 'file')} in {cache.folder}: check its permissions", kind="not-writable"
        )


def format_size(size: float) -> str:
    """Return a number of bytes with a binary unit, such as "1.5 MiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


CACHE_COMMANDS: dict[str, tuple[type, Callable[[], None]]] = {"info": (Info, print_info), "clear": (Clear, clear)}
