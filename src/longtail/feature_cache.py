"""The feature cache: features of a frozen backbone on disk, named by a hash of everything that determines them.

The cache is in `$LONGTAIL_CACHE` (default: ~/.cache/longtail), subfolder `features/`. Each file has the features of one view of
a block of images. The files are untrusted data: a file that is damaged, foreign or a symbolic link is ignored, and replaced by
features that are computed again. If the cache cannot be written, a warning is logged once, and nothing else changes.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from longtail import files
from longtail.errors import UserError, error_text
from longtail.progress import log_warning

if TYPE_CHECKING:
    import numpy as np

LOCATION, LIMIT = "LONGTAIL_CACHE", "LONGTAIL_CACHE_SIZE"  # environment variables
DEFAULT_LIMIT, MAX_LIMIT = 10 * 2**30, 2**62  # bytes
FILE_NAME = re.compile(r"[0-9a-f]{64}\.npz")
UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("", 1024), ("B", 1000), ("iB", 1024))
}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
TIME_RESOLUTION = 60.0  # seconds; the time of last use is not updated more often
ROOM_SHARE = 10  # files are listed again whenever a process has written 1/10 of the limit


class CachedFile(NamedTuple):
    """A file in the cache."""

    path: Path
    size: int
    """Its size in bytes."""
    last_use: float
    """When it was last written or read, in seconds since 1970."""


def find_folder() -> Path:
    """Return the folder of the cached features, which may not exist."""
    return Path(os.environ.get(LOCATION) or os.path.expanduser("~/.cache/longtail")).absolute() / "features"


def size_limit() -> int:
    """Return the largest total size of the files in bytes, from `$LONGTAIL_CACHE_SIZE`, for example 2GiB."""
    text = os.environ.get(LIMIT, "").strip()
    if not text:
        return DEFAULT_LIMIT
    match, units = SIZE.fullmatch(text), {name.lower(): factor for name, factor in UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise UserError(f"${LIMIT} {text!r}: it must be a size, such as 500MiB or 10GiB", kind="invalid-value")
    return int(min(float(match[1]) * units[match[2].lower()], MAX_LIMIT))


def make_key(parts: dict[str, Any]) -> str:
    """Return the hash of JSON values that determine the content of a file, as 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class FeatureCache:
    """Stored arrays of features, by their keys. Creating it reads the environment variables, and writes nothing."""

    def __init__(self) -> None:
        self.folder, self.limit = find_folder(), size_limit()
        self.can_write = True
        self.room = 0  # bytes that may be written before the files are listed again

    def list_files(self) -> list[CachedFile]:
        """Return the files of the cache, least recently used first. Links and files with other names are left out."""
        found = []
        with contextlib.suppress(OSError):
            self._check_folder()
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if FILE_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):  # another process has removed it
                            status = entry.stat(follow_symlinks=False)
                            found.append(CachedFile(Path(entry.path), status.st_size, status.st_mtime))
        return sorted(found, key=lambda file: (file.last_use, file.path))

    def has(self, key: str) -> bool:
        """Return whether there is a file for a key, without reading it."""
        with contextlib.suppress(OSError):
            self._check_folder()
            return stat.S_ISREG(os.lstat(self._path(key)).st_mode)
        return False

    def read(self, key: str, shape: tuple[int, int]) -> "np.ndarray | None":
        """Return the stored features, or None if there is no valid file.

        Args:
            key: The key of the features.
            shape: Their expected shape. A file with another one is ignored.
        """
        import numpy as np

        if not self.has(key):
            return None
        path = self._path(key)
        try:
            arrays = files.read_arrays(path, self.folder, limit=4 * shape[0] * shape[1] + 2**16)
            x_NF, stored_key = arrays.pop("features"), str(arrays.pop("key"))
        except (OSError, ValueError, KeyError, MemoryError):
            return None
        if stored_key != key or x_NF.shape != shape or x_NF.dtype != np.float32 or not np.isfinite(x_NF).all():
            return None
        with contextlib.suppress(OSError):  # the cache may be read-only
            if time.time() - os.lstat(path).st_mtime > TIME_RESOLUTION:
                os.utime(path, follow_symlinks=False)
        return x_NF

    def write(self, key: str, x_NF: "np.ndarray") -> None:
        """Store features. The least recently used files are removed, so that the total size stays within the limit."""
        import numpy as np

        needed = x_NF.nbytes + 2**12
        if not self.can_write or needed > self.limit:
            return
        path = self._path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._check_folder()
            self._make_room(needed)
            with files.replace_file(path, self.folder) as fresh, open(fresh, "wb") as file:
                np.savez(file, features=x_NF, key=np.array(key))
        except (OSError, UserError) as error:  # UserError: the disk is full
            self.can_write = False
            log_warning(
                f"features are not stored in {self.folder} ({error_text(error)}): set ${LOCATION} to another folder to "
                "reuse them in later runs"
            )

    def clear(self) -> int:
        """Remove all files of the cache, and return the bytes that were freed."""
        freed = 0
        for file in self.list_files():
            freed += file.size if _remove(file.path) else 0
        with contextlib.suppress(OSError):
            self._check_folder()
            files.remove_leftovers(self.folder)
            self.folder.rmdir()  # fails if there are foreign files
        return freed

    def _make_room(self, needed: int) -> None:
        """Remove the least recently used files until a file of `needed` bytes fits."""
        if needed > self.room:
            stored = self.list_files()
            total = sum(file.size for file in stored)
            wanted = max(needed, self.limit // ROOM_SHARE)
            for file in stored:
                if total + wanted <= self.limit:
                    break
                total -= file.size if _remove(file.path) else 0
            self.room = min(wanted, self.limit - total)
        self.room -= needed

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.npz"

    def _check_folder(self) -> None:
        """Raise an OSError unless the folder is a directory, and not a link to one."""
        if not stat.S_ISDIR(os.lstat(self.folder).st_mode):
            raise files.RefusedFile(self.folder, "it is not a directory")


def _remove(path: Path) -> bool:
    """Remove a file, and return whether that was successful."""
    try:
        path.unlink()
    except OSError:
        return False
    return True


def hash_blocks(blocks: list[Iterator[bytes]], threads: int) -> list[str]:
    """Return a hash of each block of byte strings, computed in threads.

    Args:
        blocks: The blocks. The byte strings of a block are read in their order.
        threads: The number of threads.
    """
    from concurrent.futures import ThreadPoolExecutor

    executor = ThreadPoolExecutor(threads, "longtail-hash")
    try:
        return list(executor.map(_hash_strings, blocks))
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def _hash_strings(strings: Iterator[bytes]) -> str:
    """Return a hash of byte strings and of their lengths."""
    digest = hashlib.sha256()
    for string in strings:
        digest.update(len(string).to_bytes(8))
        digest.update(string)
    return digest.hexdigest()
