"""CIFAR-10 and CIFAR-100 from the official files, unpacked or still in their tar.gz.

The files are pickles: they are read by `array_pickle`, which builds plain values and arrays and nothing else, and an archive is
read in memory and within limits, so that no file can run code, write anywhere or exhaust the memory. Names, addresses and md5s
are torchvision's.
"""

import contextlib
import hashlib
import http.client
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longtail import files
from longtail.data import archive, array_pickle
from longtail.data.lazy_images import ImageArray, IntArray, LazyImages, RawDataset, array_pool, resized
from longtail.data.paths import check_text
from longtail.errors import UserError, disk_full_as_user_error, error_text

SIDE = 32  # pixels
LARGEST = 2**29  # bytes of a file, unpacked or in the archive; the largest published one has a third of that


@dataclass(frozen=True)
class _Kind:
    """One of the two sets, as published."""

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
    """CIFAR-10 or CIFAR-100 (`cifar10`, `cifar100`) from `root`, fetched into it where absent."""
    kind = _published(name)
    place, files = _find(kind, root, download)
    notes = [_md5_note(place, f) for f in kind.files if _md5(files[f]) != kind.md5[f]]
    names = _class_names(kind, place, files[kind.meta])
    train, test = (_pool(kind, place, files, part, names, image_size) for part in (kind.train, kind.test))
    return RawDataset(name, train, test, len(train.labels) // kind.classes, tuple(notes))


def _published(name: str) -> _Kind:
    # Imported late: torchvision brings torch, seconds that --help and the other sources need not pay.
    from torchvision import datasets

    hundred = name == "cifar100"
    theirs: Any = datasets.CIFAR100 if hundred else datasets.CIFAR10
    return _Kind(
        title="CIFAR-100" if hundred else "CIFAR-10",
        classes=100 if hundred else 10,
        label_key="fine_labels" if hundred else "labels",
        names_key=theirs.meta["key"],
        folder=theirs.base_folder,
        archive=theirs.filename,
        url=theirs.url,
        archive_md5=theirs.tgz_md5,
        train=tuple(f for f, _ in theirs.train_list),
        test=tuple(f for f, _ in theirs.test_list),
        meta=theirs.meta["filename"],
        md5={**dict(theirs.train_list), **dict(theirs.test_list), theirs.meta["filename"]: theirs.meta["md5"]},
    )


# Finding the files


def _find(kind: _Kind, root: Path, download: bool) -> tuple[Path, dict[str, bytes]]:
    """The folder or archive that holds the files, and their bytes."""
    folder = root if root.name == kind.folder and not os.path.exists(root / kind.folder) else root / kind.folder
    if all(os.path.isfile(folder / f) for f in kind.files):
        return folder, _read_folder(kind, folder)
    packed = root / kind.archive
    if not os.path.isfile(packed):
        lacks = next(f for f in kind.files if not os.path.isfile(folder / f))
        absent = f"{kind.title} is not in {root} (neither {kind.archive} nor {kind.folder}/{lacks})"
        with disk_full_as_user_error(root):
            _fetch(kind, root, download, absent)
    return packed, _read_archive(kind, packed)


def _read_folder(kind: _Kind, folder: Path) -> dict[str, bytes]:
    """Return the contents of the files, each of LARGEST bytes at most and all together as many as an archive may have."""
    contents: dict[str, bytes] = {}
    for name in kind.files:
        left = archive.TOTAL - sum(map(len, contents.values()))
        try:
            contents[name] = files.read_bytes(folder / name, min(LARGEST, left))
        except OSError as error:
            raise UserError(
                f"cannot read {folder / name} ({error_text(error)}): fetch {kind.url} again",
                kind=files.read_error_kind(error),
            ) from error
    return contents


def _read_archive(kind: _Kind, path: Path) -> dict[str, bytes]:
    """Return the contents of the files in the archive, in one pass and without unpacking anything."""
    try:
        files = archive.read_members(path, {f"{kind.folder}/{f}": f for f in kind.files}, LARGEST)
    except Exception as error:  # a damaged archive can raise anything
        raise UserError(
            f"{path} is damaged ({_line(error)}): delete it and fetch {kind.url} again", kind="damaged-file"
        ) from error
    if missing := [f for f in kind.files if f not in files]:
        raise UserError(
            f"{path} has no {kind.folder}/{missing[0]}: delete it and fetch {kind.url} again", kind="damaged-file"
        )
    return files


def _fetch(kind: _Kind, root: Path, download: bool, absent: str) -> None:
    """Download the archive into `root`: whole and with the right md5, or not at all."""
    put = f"put {kind.archive} (from {kind.url}) into {root}, or name its folder with --data.root"
    if not download:
        raise UserError(f"{absent}: {put}", kind="missing-file")
    from torchvision.datasets.utils import download_url

    fresh = not os.path.exists(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        # Inside root, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as partial:
            download_url(kind.url, partial, kind.archive, kind.archive_md5)
            (Path(partial) / kind.archive).replace(root / kind.archive)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        if fresh:
            with contextlib.suppress(OSError):
                root.rmdir()
        raise UserError(f"{absent} and cannot be fetched ({_line(error)}): {put}", kind="download-failed") from error


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _md5_note(place: Path, file: str) -> str:
    return f"warning: {place.name}/{file} is not the published file (its md5 differs)"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# Reading them


def _unpickle(path: Path, content: bytes) -> dict[str, Any]:
    try:
        entry = array_pickle.load(content)
    except array_pickle.RefusedName as error:
        why = f"its pickle asks for {error}, and only NumPy arrays are admitted"
        raise UserError(f"{path} was refused: {why}; fetch the official archive again", kind="unsafe-file") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(
            f"{path} is truncated or damaged ({_line(error)}): fetch the official archive again", kind="damaged-file"
        ) from error
    if not isinstance(entry, dict):
        raise UserError(
            f"{path} holds a {type(entry).__name__} instead of a table: fetch the official archive again",
            kind="damaged-file",
        )
    return entry


def _value(kind: _Kind, path: Path, entry: dict[str, Any], key: str) -> Any:
    if key not in entry:
        raise UserError(
            f"{path} has no {key!r}, so it is not a {kind.title} file: fetch {kind.url} again", kind="damaged-file"
        )
    return entry[key]


def _class_names(kind: _Kind, place: Path, content: bytes) -> tuple[str, ...]:
    path = place / kind.meta
    names = _value(kind, path, _unpickle(path, content), kind.names_key)
    if not isinstance(names, list) or len(names) != kind.classes or not all(isinstance(n, str) for n in names):
        raise UserError(f"{path} does not name {kind.classes} classes: fetch {kind.url} again", kind="damaged-file")
    return tuple(check_text(name, path, "class name") for name in names)


def _rows(kind: _Kind, path: Path, content: bytes) -> tuple[ImageArray, IntArray]:
    """Images (n, 3072), color planes one after the other, and labels (n,)."""
    entry = _unpickle(path, content)
    data, raw = (_value(kind, path, entry, key) for key in ("data", kind.label_key))
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3 * SIDE * SIDE,):
        shape = f"{getattr(data, 'dtype', type(data).__name__)} {getattr(data, 'shape', '')}".strip()
        raise UserError(
            f"{path}: 'data' is {shape} instead of uint8 (n, {3 * SIDE * SIDE}): fetch {kind.url} again",
            kind="damaged-file",
        )
    plain = isinstance(raw, list) and all(type(label) is int for label in raw)  # others may contain themselves
    labels = np.asarray(raw if plain or isinstance(raw, np.ndarray) else [])
    if labels.shape != (len(data),) or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(
            f"{path}: {kind.label_key!r} is not one whole number per image: fetch {kind.url} again", kind="bad-labels"
        )
    if len(labels) and not 0 <= labels.min() <= labels.max() < kind.classes:
        found = f"labels from {labels.min()} to {labels.max()}"
        raise UserError(
            f"{path} has {found} where {kind.title} has 0 to {kind.classes - 1}: fetch {kind.url} again",
            kind="bad-labels",
        )
    return data, labels.astype(np.int64)


def _pool(
    kind: _Kind, place: Path, files: dict[str, bytes], part: tuple[str, ...], names: tuple[str, ...], size: int
) -> LazyImages:
    parts = [_rows(kind, place / f, files[f]) for f in part]
    rows, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
    absent = np.setdiff1d(np.arange(kind.classes), labels)
    if len(absent):
        raise UserError(
            f"{place / part[0]} has no image of class {names[absent[0]]!r}: fetch {kind.url} again", kind="too-few-data"
        )

    def read(indices: IntArray) -> ImageArray:
        chosen = rows[indices]
        blank = indices[~chosen.any(1)]
        if len(blank):
            partial = f"{len(blank)} of the chosen images are all zeros, the first is row {blank[0]}"
            fix = f"fetch {kind.url}, or raise --data.imbalance to a draw that the file holds"
            raise UserError(f"{place / part[0]} is partial: {partial}; {fix}", kind="damaged-file")
        return resized(np.ascontiguousarray(chosen.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)), size)

    return array_pool(labels, names, np.arange(len(labels)), read)
