"""The commands `cache info` and `cache clear`: the stored features of frozen backbones."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from longtail.cli.help import make_help
from longtail.cli.parse import parse_arguments
from longtail.errors import UserError
from longtail.feature_cache import FeatureCache
from longtail.text import escape_nonprintable, pluralize


@dataclass(frozen=True, kw_only=True)
class Info:
    """Show the location of the cache, the number and size of its files, the size limit, and the time of the last use."""


@dataclass(frozen=True, kw_only=True)
class Clear:
    """Remove all files of the cache. Other files in its folder are kept."""


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Show or clear the stored features of frozen backbones."""


def run_cache(args: list[str]) -> None:
    """Run `longtail cache` without a subcommand: print its help."""
    print(make_help("cache", Cache, args, {name: kind for name, (kind, _) in CACHE_COMMANDS.items()}))


def print_info(args: list[str]) -> None:
    """Run `longtail cache info`: print location, number of files, size, limit and last use of the cache."""
    parse_arguments(Info, "cache info", args)
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


def clear(args: list[str]) -> None:
    """Run `longtail cache clear`: remove the files of the cache and print how much space was freed."""
    parse_arguments(Clear, "cache clear", args)
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


CACHE_COMMANDS: dict[str, tuple[type, Callable[[list[str]], int | None]]] = {
    "info": (Info, print_info),
    "clear": (Clear, clear),
}
