"""Safe file access: guarded reading and atomic writing, used for every run folder, list and exported file.

A file that other people may have made is read only if it is a regular file of a bounded size. A symbolic link must not leave
the folder that it belongs to. A file is written under a random name next to its target and then renamed: readers see either the
old file or the new one, and links that were planted under a predictable name are never followed.
"""

import contextlib
import errno
import json
import math
import os
import re
import secrets
import shutil
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

try:
    import fcntl
except ImportError:  # Windows has no flock
    fcntl = None  # type: ignore[assignment]

from longtail.errors import RefusedFile, UserError, disk_full_as_user_error
from longtail.text import find_closest

if TYPE_CHECKING:
    import numpy as np

TEXT_LIMIT = 64 * 2**20
"""Largest size in bytes of a text or JSON file; metrics.json of a million classes has about 50 MB."""
SMALL_LIMIT = 2**20
"""Largest size in bytes of a JSON file that does not grow with the number of classes, such as config.json."""
MAX_JSON_VALUES = 2**22
"""Largest number of values in a JSON file; metrics.json of a million classes has three million. A value needs up to about a
hundred bytes of memory."""
ARRAYS_LIMIT = 2**31
"""Largest size in bytes of the arrays of an .npz file, after decompression."""
HAS_LOCKS = fcntl is not None
"""Whether `lock` locks files on this system."""
TEMPORARY_PREFIX = ".longtail-"
"""Temporary files and folders start with this prefix, followed by 16 hexadecimal digits."""
TEMPORARY_NAME = re.compile(re.escape(TEMPORARY_PREFIX) + r"[0-9a-f]{16}(\..*)?")
MAX_SUFFIX_BYTES = 16
MAX_NAMES_COMPARED = 10_000  # files of a folder among which a similar name is searched
FILE_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


# Reading


def open_regular(path: Path | str, limit: int | None = None, folder: Path | None = None) -> BinaryIO:
    """Open a regular file for reading, without waiting and without side effects on devices.

    Args:
        path: The file. Symbolic links are followed, subject to `folder`.
        limit: The largest size in bytes; None means no limit.
        folder: The folder that the file belongs to. A link that leaves it is refused; the layout of a Hugging Face cache, whose
            `snapshots/` link to `blobs/` next to them, is accepted.

    Raises:
        RefusedFile: The file is not regular, is too large, or is a link that leaves `folder`.
        OSError: The file cannot be opened.
    """
    if folder is not None:
        check_path(path)
        check_inside(path, folder)
    return os.fdopen(_open_descriptor(path, limit), "rb")


def check_regular(path: Path | str, limit: int | None = None) -> None:
    """Raise RefusedFile unless `path` is a regular file; for libraries that open files by their paths."""
    check_path(path)
    _check_status(path, os.stat(path), limit)


def check_path(path: Path | str) -> None:
    """Raise RefusedFile for a path that no file can have: with a NUL byte, or with characters that cannot be encoded."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise RefusedFile(path, "its path has a character that no file name can have") from error
    if "\0" in os.fspath(path):
        raise RefusedFile(path, "its path has a NUL byte")


def _open_descriptor(path: Path | str, limit: int | None) -> int:
    check_regular(path, limit)  # before opening, because opening some devices has side effects
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        _check_status(path, os.fstat(descriptor), limit)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_status(path: Path | str, status: os.stat_result, limit: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = FILE_KINDS.get(stat.S_IFMT(status.st_mode), "not a file")
        raise RefusedFile(path, f"it is {kind}, not a regular file")
    if limit is not None and status.st_size > limit:
        raise RefusedFile(path, f"it has {status.st_size:,} bytes, more than the {limit:,} allowed")


def check_inside(path: Path | str, folder: Path | str) -> None:
    """Raise RefusedFile if `path`, with all links resolved, is outside of `folder` and of its Hugging Face blobs."""
    real, top = os.path.realpath(path), os.path.realpath(folder)
    allowed = [top, *_hugging_face_blobs(folder)]
    if not any(real == root or real.startswith(os.path.join(root, "")) for root in allowed):
        raise RefusedFile(path, "it is a symbolic link that leaves its folder")


def _hugging_face_blobs(folder: Path | str) -> list[str]:
    """Return the blobs/ folder of a Hugging Face cache if `folder` is a snapshot in it, or below one."""
    parts = Path(os.path.realpath(folder)).parts
    places = [i for i, part in enumerate(parts[:-1]) if part == "snapshots" and i > 0]
    return [str(Path(*parts[: places[-1]], "blobs"))] if places else []


def read_bytes(path: Path | str, limit: int | None = TEXT_LIMIT, folder: Path | None = None) -> bytes:
    """Return the content of a regular file; see `open_regular`."""
    if folder is not None:
        check_path(path)
        check_inside(path, folder)
    descriptor = _open_descriptor(path, limit)
    try:
        # Few calls, because threads that read many images wait for the interpreter lock after each call.
        size = os.fstat(descriptor).st_size
        content = os.read(descriptor, size)
        while len(content) < size and (more := os.read(descriptor, size - len(content))):
            content += more
        return content
    finally:
        os.close(descriptor)


def read_text(
    path: Path | str,
    encoding: str = "utf-8",
    errors: str = "strict",
    limit: int | None = TEXT_LIMIT,
    folder: Path | None = None,
) -> str:
    """Return the text of a regular file; see `open_regular`."""
    return read_bytes(path, limit, folder).decode(encoding, errors)


def parse_json(text: str | bytes, max_values: int = MAX_JSON_VALUES) -> Any:
    """Return the value of a JSON text. Raise a ValueError if it is not JSON, or may have more than `max_values` values.

    Values are counted before they are created, because an empty list has three characters but needs about sixty bytes of
    memory.
    """
    delimiters = (b",", b"[", b"{") if isinstance(text, bytes) else (",", "[", "{")
    if sum(map(text.count, delimiters)) > max_values:  # type: ignore[arg-type]
        raise ValueError(f"it may have more than {max_values:,} values")
    return json.loads(text)


def read_arrays(path: Path | str, folder: Path | None = None, limit: int = ARRAYS_LIMIT) -> "dict[str, np.ndarray]":
    """Return the arrays of an .npz file.

    Unlike `numpy.load`, this function compares the size of each array with its header before it allocates memory, and refuses
    arrays of Python objects.

    Args:
        path: The file.
        folder: The folder that the file belongs to; see `open_regular`.
        limit: The largest total size in bytes after decompression.

    Raises:
        OSError, ValueError: The file is refused, damaged, or larger than `limit` bytes after decompression.
    """
    with open_regular(path, limit, folder) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                check_archive(path, members, limit)
                return {m.filename.removesuffix(".npy"): _read_array(archive, m) for m in members}
        except (OSError, ValueError, MemoryError):
            raise
        except Exception as error:  # zipfile, zlib and NumPy's header parser raise many types of exceptions
            raise ValueError(f"damaged archive: {error}") from error


def check_archive(path: Path | str, members: list[zipfile.ZipInfo], limit: int, compressed: bool = True) -> None:
    """Raise RefusedFile if the members of a ZIP archive are encrypted or larger in total than `limit` bytes.

    Args:
        path: The file, for the error.
        members: The entries of its directory.
        limit: The largest total size in bytes after decompression.
        compressed: Accept compressed members. torch writes its checkpoints uncompressed.
    """
    total = sum(member.file_size for member in members)
    if total > limit or len(members) > 1_000_000:
        raise RefusedFile(path, f"its content has {total:,} bytes, more than the {limit:,} allowed")
    methods = {member.compress_type for member in members}
    if methods - ({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED} if compressed else {zipfile.ZIP_STORED}):
        raise RefusedFile(path, "it is compressed in an unexpected way")
    if any(member.flag_bits & 0x1 for member in members):
        raise RefusedFile(path, "it is encrypted")


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> "np.ndarray":
    import numpy as np

    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in read_header:
            raise ValueError(f"{member.filename} has the unknown format {version}")
        shape, fortran, dtype = read_header[version](file)
        if dtype.kind not in "biufU" or dtype.itemsize == 0 or len(shape) > 8:
            raise ValueError(f"{member.filename} has the unsupported data type {dtype.str}")
        if any(n < 0 for n in shape):
            raise ValueError(f"{member.filename} has a negative shape")
        size = math.prod(shape) * dtype.itemsize
        if size > member.file_size:
            raise ValueError(f"{member.filename} is shorter than stated in its header")
        content = file.read(size)
        if len(content) != size or file.read(1):
            raise ValueError(f"{member.filename} does not have the length stated in its header")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C").copy()


def check_working_directory(paths: Iterable[Path | None]) -> None:
    """Raise a UserError if one of the paths is relative and the working directory has been deleted."""
    if all(path is None or path.is_absolute() for path in paths):
        return
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(
            "the working directory no longer exists: change to another one, or give absolute paths", kind="missing-file"
        ) from error


def is_directory(path: Path) -> bool:
    """Return whether `path` is a directory; raise UserError if that is unknown, for example for lack of permission."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise UserError(
            f"cannot access {path} ({error.strerror}): check the permissions of its folder", kind="unreadable-file"
        ) from error


def find_similar_path(path: Path | str) -> str:
    """Return the closest existing path to one that does not exist; an empty string if none is close.

    Only the first part of the path that does not exist is corrected. Folders end with a slash.
    """
    parts = Path(path).parts
    try:
        exists = [os.path.lexists(Path(*parts[: n + 1])) for n in range(len(parts))]
        if all(exists):
            return ""
        wrong = exists.index(False)
        folder = Path(*parts[:wrong])
        names = [name for name in islice(sorted(os.listdir(folder)), MAX_NAMES_COMPARED) if not name.startswith(".")]
    except (OSError, ValueError):  # a folder that cannot be listed, or not a valid path
        return ""
    near = find_closest(parts[wrong], names)
    if not near:
        return ""
    whole = folder.joinpath(near, *parts[wrong + 1 :])
    found = whole if os.path.lexists(whole) else folder / near
    return f"{found}{'/' * found.is_dir()}"


def list_directory(folder: Path) -> list[Path]:
    """Return the entries of a directory that are not hidden, sorted by name."""
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise UserError(
            f"cannot list {folder} ({error.strerror}): check its permissions", kind="unreadable-file"
        ) from error


def walk(
    top: Path | str,
    on_error: Callable[[OSError], None] = lambda error: None,
    follow_links: bool = False,
    max_depth: int = 64,
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield (folder, subfolders, files) from the top down, as `os.walk` does, without recursion.

    Args:
        top: The first folder.
        on_error: Called with the OSError of a folder that cannot be listed; the folder is skipped unless this function raises.
        follow_links: Enter folders through symbolic links. The caller removes names from `subfolders` to avoid loops.
        max_depth: The largest number of levels; RefusedFile is raised for deeper folders.
    """
    waiting = [(os.fspath(top), 0)]
    while waiting:
        folder, depth = waiting.pop()
        if depth > max_depth:
            raise RefusedFile(folder, f"its folders are nested more than {max_depth} levels deep")
        try:
            with os.scandir(folder) as entries:
                listed = list(entries)
        except OSError as error:
            on_error(error)
            continue
        inner = [entry.name for entry in listed if _is_folder(entry)]
        known = set(inner)
        yield folder, inner, [entry.name for entry in listed if entry.name not in known]
        paths = [os.path.join(folder, name) for name in inner]
        waiting += [(path, depth + 1) for path in reversed(paths) if follow_links or not os.path.islink(path)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


# Writing


@contextlib.contextmanager
def replace_file(path: Path, folder: Path | None = None, sync: bool = False) -> Iterator[Path]:
    """Yield the path of a new empty file in the same directory, which replaces `path` at the end.

    If the block raises an exception, the new file is removed and the old one does not change. Temporary files of processes that
    were killed are removed.

    Args:
        path: The target. A symbolic link is replaced, never followed.
        folder: The folder that the target belongs to; its directory must not be a link that leaves it.
        sync: Flush the file to disk before it is renamed.
    """
    if folder is not None:
        check_inside(path.parent, folder)
    remove_leftovers(path.parent)
    with disk_full_as_user_error(path):
        fresh, descriptor = _create_temporary(path)
    try:
        with disk_full_as_user_error(path):
            yield fresh
            if sync:
                os.fsync(descriptor)
        os.replace(fresh, path)
    finally:
        os.close(descriptor)
        fresh.unlink(missing_ok=True)


def _create_temporary(path: Path) -> tuple[Path, int]:
    """Create a file with a random name next to `path`. This process holds its lock while the descriptor is open."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    while True:
        suffix = path.suffix if len(path.suffix.encode(errors="replace")) <= MAX_SUFFIX_BYTES else ""
        fresh = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}{suffix}")
        descriptor = os.open(fresh, flags, 0o666)
        if _lock(descriptor) and os.fstat(descriptor).st_nlink:
            return fresh, descriptor
        os.close(descriptor)  # another process removed it as a leftover before it was locked


def check_writable(directory: Path) -> None:
    """Raise an OSError if no file can be written into a directory, by writing one and removing it."""
    fresh, descriptor = _create_temporary(directory / "probe")
    os.close(descriptor)
    fresh.unlink(missing_ok=True)


@contextlib.contextmanager
def replace_folder(path: Path, folder: Path | None = None) -> Iterator[Path]:
    """Yield a new folder in the same directory, which replaces `path` at the end; see `replace_file`."""
    if folder is not None:
        check_inside(path.parent, folder)
    remove_leftovers(path.parent)
    with disk_full_as_user_error(path):
        fresh, descriptor = _create_temporary_folder(path)
    try:
        with disk_full_as_user_error(path):
            yield fresh
        remove(path)
        os.rename(fresh, path)
    finally:
        if descriptor is not None:
            os.close(descriptor)
        remove(fresh)


def _create_temporary_folder(path: Path) -> tuple[Path, int | None]:
    """Create a folder with a random name next to `path`; see `_create_temporary`."""
    while True:
        fresh = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
        fresh.mkdir()
        if fcntl is None:
            return fresh, None
        try:
            descriptor = os.open(fresh, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # removed as a leftover
            continue
        if _lock(descriptor) and fresh.is_dir():
            return fresh, descriptor
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, a link (not its target) or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        try:
            shutil.rmtree(path)
        except RecursionError as error:
            raise RefusedFile(path, "its folders are nested too deeply") from error
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(directory: Path) -> None:
    """Remove temporary files and folders of processes that were killed. Those of running processes are locked."""
    if fcntl is None:
        return
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            is_removable = entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
            if is_removable and TEMPORARY_NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_unlocked(Path(entry.path))


def _remove_unlocked(path: Path) -> None:
    """Remove a temporary file or folder unless a process has locked it. The lock is held until the file is removed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if _lock(descriptor):
            remove(path)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock an open file without waiting, and return whether it was successful; True on systems without locks."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def replace_output(path: Path) -> Iterator[Path]:
    """Yield the path to write to for an output file that the user named: a new file as in `replace_file`.

    A path that is not a regular file, such as /dev/null or a pipe, is written directly. So is a new file of `replace_file`.
    """
    if TEMPORARY_NAME.fullmatch(path.name) or (os.path.exists(path) and not os.path.isfile(path)):
        with disk_full_as_user_error(path):
            yield path
        return
    with replace_file(path) as fresh:
        yield fresh


def write_bytes(path: Path, content: bytes | memoryview, folder: Path | None = None) -> None:
    """Replace a file atomically."""
    with replace_file(path, folder) as fresh:
        fresh.write_bytes(content)


def write_text(path: Path, text: str, folder: Path | None = None) -> None:
    """Replace a text file atomically."""
    write_bytes(path, text.encode("utf-8", "surrogateescape"), folder)


def write_json(path: Path, tree: Any, folder: Path | None = None) -> None:
    """Replace a JSON file atomically; see `format_json`."""
    write_text(path, format_json(tree), folder)


def write_output_json(path: Path, tree: Any) -> None:
    """Write JSON to an output file that the user named; see `replace_output`."""
    with replace_output(path) as fresh:
        fresh.write_text(format_json(tree), encoding="utf-8")


def format_json(tree: Any) -> str:
    """Return indented JSON in which lists of numbers, such as the accuracy of each class, are on one line."""
    text = json.dumps(tree, indent=1) + "\n"
    return re.sub(r'\[\n([^][{}"]*)\]', lambda numbers: f"[{' '.join(numbers[1].split())}]", text)


def write_arrays(path: Path, arrays: "dict[str, np.ndarray]", folder: Path | None = None) -> None:
    """Replace a compressed .npz file atomically."""
    import numpy as np

    with replace_file(path, folder) as fresh, open(fresh, "wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def open_append(path: Path, folder: Path | None = None) -> IO[str]:
    """Open a text file for appending. A symbolic link is refused."""
    if folder is not None:
        check_inside(path.parent, folder)
    descriptor = _open_for_writing(path, os.O_WRONLY | os.O_APPEND)
    return os.fdopen(descriptor, "a", encoding="utf-8")


def open_lock(path: Path, folder: Path | None = None) -> IO[bytes]:
    """Open a lock file and create it if necessary. Its content does not change, and a symbolic link is refused."""
    if folder is not None:
        check_inside(path.parent, folder)
    return os.fdopen(_open_for_writing(path, os.O_RDWR), "r+b")


def lock(file: IO[bytes], shared: bool = False) -> None:
    """Lock an open file without waiting; raise BlockingIOError if another process holds a lock that excludes this one.

    Closing the file releases the lock. Systems without `flock` have no locks: there, this function does nothing.

    Args:
        file: The open file.
        shared: Whether other processes may hold shared locks at the same time.
    """
    if HAS_LOCKS:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def _open_for_writing(path: Path, flags: int) -> int:
    flags |= os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            reason = "it is a symbolic link" if os.path.islink(path) else "it is not a regular file"
            raise RefusedFile(path, reason) from error
        raise
    try:
        _check_status(path, os.fstat(descriptor), None)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
