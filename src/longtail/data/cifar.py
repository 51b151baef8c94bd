"""CIFAR-10 and CIFAR-100 from the official files, unpacked or in their tar.gz archive.

The files are pickles. They are read by `array_pickle`, which builds only plain values and arrays, and archives are read in
memory and within limits, so that no file can run code, write files or exhaust the memory. File names, URLs and MD5 sums are
those of torchvision.
"""

import contextlib
import hashlib
import http.client
import io
import os
import posixpath
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from longtail import files
from longtail.data import array_pickle
from longtail.data.lazy_images import (
    ImageArray,
    IntArray,
    LazyImages,
    RawDataset,
    check_text,
    lazy_array_images,
    resize_images,
)
from longtail.errors import UserError, disk_full_as_user_error, error_text, file_error_kind

SIDE = 32  # pixels
MAX_NAME_LENGTH = 1000  # of a class name; the 100 names of a pickle can all be the same very long string
MAX_FILE_BYTES = 2**29  # of an unpacked file or archive member; the largest published one has a third of that


@dataclass(frozen=True)
class _CifarFiles:
    """The names, contents and MD5 sums of the published files of CIFAR-10 or CIFAR-100."""

    title: str
    classes: int
    label_key: str
    names_key: str
    folder: str
    archive: str
    url: str
    archive_md5: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    md5: dict[str, str]  # by file name

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, *self.test, self.meta)


def open_cifar(name: str, root: Path, download: bool, image_size: int) -> RawDataset:
    """Open CIFAR-10 or CIFAR-100.

    Args:
        name: "cifar10" or "cifar100".
        root: The folder of the files or of the archive.
        download: Download the archive into `root` if the files are missing.
        image_size: The height and width, in pixels, that images are resized to.
    """
    published = _published_files(name)
    location, contents = _find(published, root, download)
    notes = [
        f"warning: {location.name}/{f} is not the published file (its MD5 differs)"
        for f in published.files
        if hashlib.md5(contents[f], usedforsecurity=False).hexdigest() != published.md5[f]
    ]
    names = _class_names(published, location, contents[published.meta])
    train, test = (
        _read_split(published, location, contents, part, names, image_size)
        for part in (published.train, published.test)
    )
    return RawDataset(name, train, test, len(train.labels) // published.classes, tuple(notes))


def _published_files(name: str) -> _CifarFiles:
    # Imported late: torchvision imports torch, which takes seconds that --help and other data sets do not need.
    from torchvision import datasets

    is_cifar100 = name == "cifar100"
    dataset: Any = datasets.CIFAR100 if is_cifar100 else datasets.CIFAR10
    return _CifarFiles(
        title="CIFAR-100" if is_cifar100 else "CIFAR-10",
        classes=100 if is_cifar100 else 10,
        label_key="fine_labels" if is_cifar100 else "labels",
        names_key=dataset.meta["key"],
        folder=dataset.base_folder,
        archive=dataset.filename,
        url=dataset.url,
        archive_md5=dataset.tgz_md5,
        train=tuple(f for f, _ in dataset.train_list),
        test=tuple(f for f, _ in dataset.test_list),
        meta=dataset.meta["filename"],
        md5={**dict(dataset.train_list), **dict(dataset.test_list), dataset.meta["filename"]: dataset.meta["md5"]},
    )


# Finding the files


def _find(published: _CifarFiles, root: Path, download: bool) -> tuple[Path, dict[str, bytes]]:
    """Return the folder or archive that contains the files, and their contents."""
    folder = (
        root
        if root.name == published.folder and not os.path.exists(root / published.folder)
        else root / published.folder
    )
    if all(os.path.isfile(folder / f) for f in published.files):
        return folder, _read_folder(published, folder)
    archive_path = root / published.archive
    if not os.path.isfile(archive_path):
        missing = next(f for f in published.files if not os.path.isfile(folder / f))
        problem = f"{published.title} is not in {root} (neither {published.archive} nor {published.folder}/{missing})"
        with disk_full_as_user_error(root):
            _download(published, root, download, problem)
    return archive_path, _read_archive(published, archive_path)


def _read_folder(published: _CifarFiles, folder: Path) -> dict[str, bytes]:
    """Return the contents of the files, of which each and all together are limited as in an archive."""
    contents: dict[str, bytes] = {}
    for name in published.files:
        remaining = MAX_TOTAL_BYTES - sum(map(len, contents.values()))
        try:
            contents[name] = files.read_bytes(folder / name, min(MAX_FILE_BYTES, remaining))
        except OSError as error:
            raise UserError(
                f"cannot read {folder / name} ({error_text(error)}): download {published.url} again",
                kind=file_error_kind(error),
            ) from error
    return contents


def _read_archive(published: _CifarFiles, path: Path) -> dict[str, bytes]:
    """Return the contents of the files in the archive, in one pass and without writing any file."""
    try:
        contents = read_members(path, {f"{published.folder}/{f}": f for f in published.files}, MAX_FILE_BYTES)
    except Exception as error:  # a damaged archive can raise anything
        raise UserError(
            f"{path} is damaged ({error_text(error)}): delete it and download {published.url} again",
            kind="damaged-file",
        ) from error
    if missing := [f for f in published.files if f not in contents]:
        raise UserError(
            f"{path} has no {published.folder}/{missing[0]}: delete it and download {published.url} again",
            kind="damaged-file",
        )
    return contents


def _download(published: _CifarFiles, root: Path, download: bool, problem: str) -> None:
    """Download the archive into `root`, where it appears when it is complete and its MD5 is correct.

    Args:
        published: The published files.
        root: The folder, which is created.
        download: Whether downloads are allowed; if not, UserError is raised.
        problem: The start of error messages.
    """
    fix = f"put {published.archive} (from {published.url}) into {root}, or give its folder with --data.root"
    if not download:
        raise UserError(f"{problem}: {fix}", kind="missing-file")
    from torchvision.datasets.utils import download_url

    is_new = not os.path.exists(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        # Inside `root`, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as partial:
            download_url(published.url, partial, published.archive, published.archive_md5)
            (Path(partial) / published.archive).replace(root / published.archive)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        if is_new:
            with contextlib.suppress(OSError):
                root.rmdir()
        raise UserError(
            f"{problem} and the download failed ({error_text(error)}): {fix}", kind="download-failed"
        ) from error


# Reading the files


def _unpickle(path: Path, content: bytes) -> dict[str, Any]:
    try:
        entry = array_pickle.load(content)
    except array_pickle.RefusedName as error:
        reason = f"its pickle imports {error}, but only NumPy arrays are allowed"
        raise UserError(f"refused {path}: {reason}; download the official archive again", kind="unsafe-file") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(
            f"{path} is truncated or damaged ({error_text(error)}): download the official archive again",
            kind="damaged-file",
        ) from error
    if not isinstance(entry, dict):
        raise UserError(
            f"{path} contains a {type(entry).__name__} instead of a dictionary: download the official archive again",
            kind="damaged-file",
        )
    return entry


def _value(published: _CifarFiles, path: Path, entry: dict[str, Any], key: str) -> Any:
    if key not in entry:
        raise UserError(
            f"{path} has no {key!r}, so it is not a file of {published.title}: download {published.url} again",
            kind="damaged-file",
        )
    return entry[key]


def _class_names(published: _CifarFiles, location: Path, content: bytes) -> tuple[str, ...]:
    path = location / published.meta
    names = _value(published, path, _unpickle(path, content), published.names_key)
    if not isinstance(names, list) or len(names) != published.classes or not all(isinstance(n, str) for n in names):
        raise UserError(
            f"{path} does not name {published.classes} classes: download {published.url} again", kind="damaged-file"
        )
    if any(len(name) > MAX_NAME_LENGTH for name in names):
        raise UserError(
            f"{path} has a class name of more than {MAX_NAME_LENGTH:,} characters: download {published.url} again",
            kind="damaged-file",
        )
    return tuple(check_text(name, path, "class name") for name in names)


def _read_rows(published: _CifarFiles, path: Path, content: bytes) -> tuple[ImageArray, IntArray]:
    """Return the images (n, 3072), with one color plane after the other, and the labels (n,) of a file."""
    entry = _unpickle(path, content)
    data, raw = (_value(published, path, entry, key) for key in ("data", published.label_key))
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3 * SIDE * SIDE,):
        shape = f"{getattr(data, 'dtype', type(data).__name__)} {getattr(data, 'shape', '')}".strip()
        raise UserError(
            f"{path}: 'data' is {shape} instead of uint8 (n, {3 * SIDE * SIDE}): download {published.url} again",
            kind="damaged-file",
        )
    is_int_list = isinstance(raw, list) and all(type(label) is int for label in raw)  # other lists may be recursive
    labels = np.asarray(raw if is_int_list or isinstance(raw, np.ndarray) else [])
    if labels.shape != (len(data),) or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(
            f"{path}: {published.label_key!r} is not one integer per image: download {published.url} again",
            kind="bad-labels",
        )
    if len(labels) and not 0 <= labels.min() <= labels.max() < published.classes:
        raise UserError(
            f"{path} has labels from {labels.min()} to {labels.max()}, but {published.title} has 0 to "
            f"{published.classes - 1}: download {published.url} again",
            kind="bad-labels",
        )
    return data, labels.astype(np.int64)


def _read_split(
    published: _CifarFiles,
    location: Path,
    contents: dict[str, bytes],
    part: tuple[str, ...],
    names: tuple[str, ...],
    size: int,
) -> LazyImages:
    """Return the images of the training or the test files.

    Args:
        published: The published files.
        location: The folder or archive that contains them, for messages.
        contents: The contents of all files.
        part: The names of the training or test files.
        names: The names of the classes.
        size: The height and width, in pixels, that images are resized to.
    """
    parts = [_read_rows(published, location / f, contents[f]) for f in part]
    rows, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
    missing = np.setdiff1d(np.arange(published.classes), labels)
    if len(missing):
        raise UserError(
            f"{location / part[0]} has no image of class {names[missing[0]]!r}: download {published.url} again",
            kind="too-few-data",
        )

    def read(indices: IntArray) -> ImageArray:
        chosen = rows[indices]
        empty = indices[~chosen.any(1)]
        if len(empty):
            problem = f"{len(empty)} of the selected images are all zeros, the first in row {empty[0]}"
            fix = f"download {published.url}, or increase --data.imbalance to use only images in the file"
            raise UserError(f"{location / part[0]} is incomplete: {problem}; {fix}", kind="damaged-file")
        return resize_images(np.ascontiguousarray(chosen.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)), size)

    return lazy_array_images(labels, names, np.arange(len(labels)), read)


# Archives
#
# A few bytes of an archive from an untrusted source can expand to any amount of memory: a compressed stream of zeros, a file
# name of gigabytes, or millions of empty members. Three limits prevent this: on the decompressed bytes, on the bytes of
# headers with their long names, extended headers and maps of sparse files, and on the bytes of a member.


MAX_TOTAL_BYTES = 2**30  # of a decompressed archive
# Of all headers of an archive. A member without a long name has 512 bytes, and tarfile copies global headers to every member.
MAX_HEADER_BYTES = 2**18
BLOCK_BYTES = 2**20  # read at a time


def read_members(path: Path, wanted: Mapping[str, str], largest: int) -> dict[str, bytes]:
    """Return the contents of regular members of an archive.

    Args:
        path: The archive.
        wanted: The members: path in the archive -> name in the result. Members that are not found are left out.
        largest: The largest size of a wanted member in bytes.

    Raises:
        tarfile.TarError: The archive is damaged or exceeds the limits. Damaged archives may also raise other exceptions.
    """
    contents: dict[str, bytes] = {}
    with files.open_regular(path) as file:
        stream = ForwardStream(io.BufferedReader(GzipStream(file), BLOCK_BYTES))
        with tarfile.open(fileobj=stream, mode="r:") as tar:  # type: ignore[call-overload]
            while member := tar.next():
                tar.members = []  # this list would grow with every member
                name = wanted.get(posixpath.normpath(member.name))
                if name and member.size > largest:
                    raise tarfile.TarError(f"{name} has {member.size:,} bytes, more than the {largest:,} allowed")
                if name and member.isreg() and not member.issparse():
                    contents[name] = stream.read_data(member.offset_data, member.size)
    return contents


class GzipStream(io.RawIOBase):
    """The decompressed content of a gzip file with one stream, read with a constant amount of memory."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self.file = file
        self.decompressor = zlib.decompressobj(wbits=31)  # gzip format, with a check of the CRC

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.decompressor.eof:
            compressed = self.decompressor.unconsumed_tail or self.file.read(2**16)
            if not compressed:
                raise EOFError("the compressed stream ends too early")
            found = self.decompressor.decompress(compressed, len(buffer))
            if found:
                buffer[: len(found)] = found
                return len(found)
        return 0


class ForwardStream:
    """A stream for `tarfile`, which only moves forward and limits the bytes that are read.

    Bytes read by `read` count as headers, up to MAX_HEADER_BYTES; the contents of members are skipped by `seek` or read by
    `read_data`. All of them together may have MAX_TOTAL_BYTES.
    """

    def __init__(self, stream: io.BufferedReader) -> None:
        self.stream, self.position, self.headers = stream, 0, 0

    def tell(self) -> int:
        return self.position

    def read(self, size: int) -> bytes:
        self.headers += size
        if not 0 <= size <= MAX_HEADER_BYTES or self.headers > MAX_HEADER_BYTES:
            raise tarfile.TarError(f"its headers have more than {MAX_HEADER_BYTES:,} bytes")
        return self._take(size)

    def seek(self, position: int) -> None:
        if position < self.position:
            raise tarfile.TarError("a member has a negative size")
        while self.position < position and self._take(min(position - self.position, BLOCK_BYTES)):
            pass

    def read_data(self, start: int, size: int) -> bytes:
        """Return `size` bytes, beginning at position `start`."""
        self.seek(start)
        content = bytearray()
        while len(content) < size:
            found = self._take(min(size - len(content), BLOCK_BYTES))
            if not found:
                raise tarfile.TarError("the archive ends too early")
            content += found
        return bytes(content)

    def _take(self, size: int) -> bytes:
        if self.position + size > MAX_TOTAL_BYTES:
            raise tarfile.TarError(f"it has more than {MAX_TOTAL_BYTES:,} bytes when decompressed")
        found = self.stream.read(size)
        self.position += len(found)
        return found
