"""Hostile values for JSON documents, arrays and tensors, and hostile files in place of good ones."""

import functools
import io
import itertools
import json
import os
import random
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, PngImagePlugin

MARKER = "MARKER-OF-A-SECRET"
"""Stands in every file outside of a run folder; no output may contain it."""
SPARSE = 6 * 2**30
"""Size in bytes of files that are almost entirely holes."""

JsonPath = tuple[str | int, ...]


class Raw(NamedTuple):
    """JSON text that `json.dumps` would not write."""

    text: str


class Exploding:
    """Creates a file when it is unpickled without restriction."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


class Absent:
    """Stands for a deleted key."""

    def __repr__(self) -> str:
        return "absent"


TYPES: list[Any] = [None, True, False, "x", "", "1", 3, 2.5, [], {}, [[]], [None], {"a": 1}, ["x"], [1, "x", None]]
RANGES: list[Any] = [
    *(0, -1, 1, 2, -0.0, 0.5, 1.0000001, 5e-324, 1e-300, -1e-9, 1e300, -1e300, 1.7976931348623157e308),
    *(100_000, 2**31 - 1, 2**31, -(2**31), 2**53 + 1, 2**62, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400, 1e-8),
]
NOT_FINITE: list[Any] = [Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e400"), Raw("-1e400"), "nan", "-inf"]
TEXTS: list[Any] = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style></script><svg onload=alert(1)>",
    "\x1b[31mred\x07\x1b]0;title\x07\x1b[2J",
    "\ud800",
    "a\udfffb\ud800",
    "a\0b",
    "\x9b31m\u202egnp.exe\u2028",
    "../../outside/secret.txt",
    "/dev/zero",
    "[/red][bold]x[link=file:///]",
    "a|b\n| c | d |\n|---|",
    "%s%n{0}{x!r}",
    "=1+1",
    "javascript:alert(1)",
    "hf-hub:nobody/nothing",
    " ",
    "\n",
    "-rf",
    "CON",
    "x" * 300,
    "٣",
]
SIZES: list[Any] = [
    "x" * 1_000_000,
    "<" * 300_000,
    ["x"] * 200_000,
    [0] * 200_000,
    [1.5] * 100_000,
    [[0] * 1_000] * 300,
    {str(i): i for i in range(100_000)},
    {str(i): {"x": i} for i in range(20_000)},
    Raw("9" * 5_000),
    Raw("1" + "0" * 4_000),
    Raw("[" * 500 + "]" * 500),
    Raw("[" * 100_000 + "]" * 100_000),
    Raw('{"a":' * 3_000 + "1" + "}" * 3_000),
    Raw("[" * 100_000),
]


# JSON documents


def json_paths(tree: Any, here: JsonPath = ()) -> Iterator[JsonPath]:
    """Yield the path of every field, and of the first and last item of every list."""
    if isinstance(tree, dict):
        inside: list[tuple[str | int, Any]] = list(tree.items())
    elif isinstance(tree, list) and tree:
        inside = [(i, tree[i]) for i in sorted({0, len(tree) - 1})]
    else:
        return
    for key, value in inside:
        yield (*here, key)
        yield from json_paths(value, (*here, key))


def get_value(tree: Any, path: JsonPath) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def set_value(tree: Any, path: JsonPath, value: Any) -> Any:
    """Return a copy of a tree with one value replaced or, for `Absent`, deleted."""
    if not path:
        return value
    tree = tree.copy()
    if isinstance(value, Absent) and len(path) == 1:
        del tree[path[0]]
    else:
        tree[path[0]] = set_value(tree[path[0]], path[1:], value)
    return tree


def draw_value(rng: random.Random, old: Any, category: int) -> Any:
    """Draw a value that a field with this old value should not have, or only just; categories cover the kinds of values."""
    menus: list[list[Any]]
    if isinstance(old, list | dict):
        changed = list_variants(old) if isinstance(old, list) else dict_variants(old)
        menus = [changed, changed, TYPES, SIZES, [Absent()], NOT_FINITE, TEXTS]
    elif isinstance(old, str):
        menus = [TEXTS, TEXTS, TYPES, SIZES, [Absent()], RANGES, NOT_FINITE]
    else:
        menus = [RANGES, RANGES, NOT_FINITE, TYPES, SIZES, [Absent()], TEXTS]
    return rng.choice(menus[category % len(menus)])


def list_variants(old: list[Any]) -> list[Any]:
    """Return lists like the old one with other lengths, or with one or all items replaced."""
    items = [*RANGES, *NOT_FINITE, *TEXTS[:8], None, [], {}]
    one = [[*old[:-1], item] for item in items] if old else [[item] for item in items]
    every = [[item] * len(old) for item in items]
    return [old[:-1], old * 2, [*old, *old[-1:]], [old], old[::-1], [], old * 1000, *one, *every]


def dict_variants(old: dict[str, Any]) -> list[Any]:
    """Return objects like the old one with keys missing, added or renamed, or with all values replaced."""
    renamed = [{f"{key}{text}": value for key, value in old.items()} for text in TEXTS[:8]]
    extended = [old | {text: 1} for text in ("unknown", "__class__", "", *TEXTS[:8])]
    emptied = [dict.fromkeys(old, item) for item in (*RANGES[:8], None, [], {}, "x")]
    return [{}, dict(list(old.items())[1:]), *renamed, *extended, *emptied]


def dump(tree: Any) -> str:
    """Serialize a tree that may hold `Raw` text."""
    raw: list[str] = []

    def encode(value: Any) -> Any:
        if isinstance(value, Raw):
            raw.append(value.text)
            return f"@@RAW{len(raw) - 1}@@"
        if isinstance(value, dict):
            return {key: encode(inner) for key, inner in value.items()}
        return [encode(inner) for inner in value] if isinstance(value, list) else value

    text = json.dumps(encode(tree))
    for i, token in enumerate(raw):
        text = text.replace(f'"@@RAW{i}@@"', token)
    return text


def damaged_texts(good: str) -> dict[str, bytes]:
    """Return documents that are not JSON, other JSON, or JSON in an unusual form."""
    encoded = good.encode()
    return {
        "nothing but spaces": b" " * 1000,
        "JSON null": b"null",
        "JSON true": b"true",
        "a JSON string": json.dumps("x" * 10_000).encode(),
        "a JSON number": b"1e400",
        "NaN alone": b"NaN",
        "an empty list": b"[]",
        "an empty object": b"{}",
        "a list of itself": f"[{good}]".encode(),
        "itself twice": encoded + b"\n" + encoded,
        "trailing text": encoded + b"\x00trailing",
        "UTF-16": good.encode("utf-16"),
        "a byte order mark": b"\xef\xbb\xbf" + encoded,
        "Latin-1 bytes": encoded.replace(b'"', b'"\xe9\xff', 3),
        "NUL bytes": encoded.replace(b" ", b"\x00"),
        "unclosed lists": b"[" * 200_000,
        "unclosed objects": b'{"a":' * 200_000,
        "a number of 10,000 digits": b"1" * 10_000,
        "itself again and again": encoded * (3_000_000 // max(len(encoded), 1)),
        "single quotes": encoded.replace(b'"', b"'"),
        "doubled keys": encoded.replace(b"{", b'{"seed": [], "seed": -1, ', 1),
        "a key of a million characters": encoded.replace(b"{", b'{"' + b"k" * 1_000_000 + b'": 1, ', 1),
        "a comment": b"// x\n" + encoded,
        "carriage returns": encoded.replace(b"\n", b"\r"),
        "HTML": b"<script>alert(1)</script>" * 100,
        "a lone surrogate as a key": encoded.replace(b"{", b'{"\\ud800": 1, ', 1),
    }


# Files that are not of the expected kind


def replace_by_link(path: Path, target: str | Path) -> None:
    remove(path)
    path.symlink_to(target)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_node(path: Path, kind: int) -> None:
    """Put a FIFO or a socket in place of a file; neither needs a privilege."""
    remove(path)
    os.mknod(path, kind | 0o600)


def make_folder(path: Path, *, filled: bool) -> None:
    remove(path)
    path.mkdir()
    if filled:
        (path / "file").write_text("x")


def write_bytes(path: Path, content: bytes) -> None:
    remove(path)
    path.write_bytes(content)


def make_sparse(path: Path, *, keep: bool) -> None:
    """Make a sparse file of several gigabytes, after its old content or without it."""
    if path.is_dir() and not path.is_symlink():
        remove(path)
    with open(path, "ab" if keep else "wb") as file:
        file.truncate(SPARSE)


def old_bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b"x" * 100


Change = Callable[[Path, Path, random.Random], None]
"""Changes the file at the first path; the second path is the folder outside that links may lead to."""

FILE_KINDS: dict[str, Change] = {
    "link to a secret text": lambda path, outside, rng: replace_by_link(path, outside / "secret.txt"),
    "link to a secret JSON string": lambda path, outside, rng: replace_by_link(path, outside / "string.json"),
    "link to a secret JSON object": lambda path, outside, rng: replace_by_link(path, outside / "object.json"),
    "link to a secret image": lambda path, outside, rng: replace_by_link(path, outside / "secret.png"),
    "link to /dev/zero": lambda path, outside, rng: replace_by_link(path, "/dev/zero"),
    "link to /dev/full": lambda path, outside, rng: replace_by_link(path, "/dev/full"),
    "link to a folder outside": lambda path, outside, rng: replace_by_link(path, outside / "folder"),
    "link to an empty folder outside": lambda path, outside, rng: replace_by_link(path, outside / "empty"),
    "link to nothing outside": lambda path, outside, rng: replace_by_link(path, outside / "new"),
    "link to nothing in a folder outside": lambda path, outside, rng: replace_by_link(path, outside / "gone/new"),
    "link to itself": lambda path, outside, rng: replace_by_link(path, path.name),
    "link to the folder above": lambda path, outside, rng: replace_by_link(path, ".."),
    "link to a FIFO": lambda path, outside, rng: replace_by_link(path, outside / "fifo"),
    "FIFO": lambda path, outside, rng: make_node(path, stat.S_IFIFO),
    "socket": lambda path, outside, rng: make_node(path, stat.S_IFSOCK),
    "empty folder": lambda path, outside, rng: make_folder(path, filled=False),
    "folder with a file": lambda path, outside, rng: make_folder(path, filled=True),
    "empty file": lambda path, outside, rng: write_bytes(path, b""),
    "first half": lambda path, outside, rng: write_bytes(path, (old := old_bytes(path))[: len(old) // 2]),
    "without its last byte": lambda path, outside, rng: write_bytes(path, old_bytes(path)[:-1]),
    "without its first byte": lambda path, outside, rng: write_bytes(path, old_bytes(path)[1:]),
    "random bytes": lambda path, outside, rng: write_bytes(path, rng.randbytes(5_000)),
    "some bytes replaced": lambda path, outside, rng: write_bytes(path, scramble(old_bytes(path), rng)),
    "6 GiB of holes": lambda path, outside, rng: make_sparse(path, keep=False),
    "6 GiB of holes behind it": lambda path, outside, rng: make_sparse(path, keep=True),
    "gone": lambda path, outside, rng: remove(path),
}
LINKS = [kind for kind in FILE_KINDS if kind.startswith("link")]
NODES = ["FIFO", "socket", "empty folder", "folder with a file", "random bytes"]
"""What a name can be that commands write to, beside links."""


def scramble(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(max(1, min(len(changed) // 50, 200))):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


# Zip archives


@functools.cache
def deflate_zeros(start: bytes, size: int) -> tuple[bytes, int]:
    """Compress `start` and then zeros up to `size` bytes; return the raw deflate stream and its checksum.

    A block after a full flush depends on nothing before it, so that one compressed block can stand in the stream often.
    """
    block = bytes(2**24)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(start) + packer.flush(zlib.Z_FULL_FLUSH)
    unit = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    times, rest = divmod(size - len(start), len(block))
    last = packer.compress(bytes(rest)) + packer.flush(zlib.Z_FINISH)
    checksum = zlib.crc32(start)
    for _ in range(times):
        checksum = zlib.crc32(block, checksum)
    return first + unit * times + last, zlib.crc32(bytes(rest), checksum)


def zip_of(members: dict[str, tuple[bytes, int, int, int]]) -> bytes:
    """Write an archive of members given as (data, method, checksum, size), which need not agree."""
    body, directory = b"", b""
    for name, (data, method, checksum, size) in members.items():
        encoded = name.encode()
        fields = struct.pack(
            "<HHHHHIIIHH", 20, 0, method, 0, 33, checksum, len(data), size & 0xFFFFFFFF, len(encoded), 0
        )
        directory += b"PK\x01\x02" + struct.pack("<H", 20) + fields
        directory += struct.pack("<HHHII", 0, 0, 0, 0, len(body)) + encoded
        body += b"PK\x03\x04" + fields + encoded + data
    end = struct.pack("<HHHHIIH", 0, 0, len(members), len(members), len(directory), len(body), 0)
    return body + directory + b"PK\x05\x06" + end


def stored(content: bytes) -> tuple[bytes, int, int, int]:
    return content, zipfile.ZIP_STORED, zlib.crc32(content), len(content)


def bomb(start: bytes, size: int) -> tuple[bytes, int, int, int]:
    """Return a member that unpacks to `start` and zeros, `size` bytes in all."""
    data, checksum = deflate_zeros(start, size)
    return data, zipfile.ZIP_DEFLATED, checksum, size


def npy_header(shape: str, descr: str = "'<f4'", length: int = 0) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".ljust(length)
    padded = text + " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", min(len(padded), 65535)) + padded.encode()


def npy_bytes(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=True)
    return stream.getvalue()


BOMB_SIZE = 3 * 2**30
BOMB_SHAPE = BOMB_SIZE // 4 - 32


def npz_damages(arrays: dict[str, np.ndarray], name: str, exploding: object) -> dict[str, Callable[[], bytes]]:
    """Return archives in which the member `name` is replaced by one that would take memory or time, or run code."""
    others = {f"{key}.npy": stored(npy_bytes(array)) for key, array in arrays.items() if key != name}
    member, good = f"{name}.npy", npy_bytes(arrays[name])

    def replaced(content: tuple[bytes, int, int, int]) -> bytes:
        return zip_of(others | {member: content})

    shapes = ("(1000000000000,)", "(1048576, 1048576)", "(-1, 8)", "(0, 4611686018427387904)", "(3,", "(True, 2)")
    headers = {f"a header of shape {shape}": npy_header(shape) for shape in shapes}
    headers |= {
        "a header of a huge item": npy_header("(1,)", "'|S2000000000'"),
        "a header of a nested type": npy_header("(1,)", "[('a', " * 50 + "'<f4'" + ")]" * 50),
        "a header of a subarray type": npy_header("(2,)", "('<f4', (100000, 100000))"),
        "a header of 60,000 characters": npy_header("(2,)", length=60_000),
        "a header of nested brackets": npy_header("(" * 20_000 + ")" * 20_000),
        "a header that is code": npy_header("__import__('os').system('id')"),
        "version 9": good[:6] + b"\x09\x00" + good[8:],
    }
    return {
        "a bomb of 3 GiB": lambda: replaced(bomb(npy_header(f"({BOMB_SHAPE},)"), BOMB_SIZE)),
        "a bomb behind the data": lambda: replaced(bomb(good, BOMB_SIZE)),
        "a bomb of text": lambda: replaced(bomb(npy_header("(3,)", "'<U200000000'"), 2**31)),
        "a pickle": lambda: replaced(stored(npy_bytes(np.array([exploding], dtype=object)))),
        "a wrong checksum": lambda: replaced((good, zipfile.ZIP_STORED, 1, len(good))),
        "a size that is not its own": lambda: replaced((good, zipfile.ZIP_STORED, zlib.crc32(good), 2**31)),
        "an unknown compression": lambda: replaced((good, 99, zlib.crc32(good), len(good))),
        "compressed noise": lambda: replaced((b"\x07\xff" * 50, zipfile.ZIP_DEFLATED, 0, 100)),
        "no header": lambda: replaced(stored(b"")),
        "100,000 more members": lambda: zip_of(
            others | {member: stored(good)} | {f"{i}.npy": stored(b"") for i in range(60_000)}
        ),
        "names that lead outside": lambda: zip_of(others | {f"../../{member}": stored(good), "/etc/x": stored(b"")}),
        "an array without an archive": lambda: good,
        **{key: (lambda header=header: replaced(stored(header))) for key, header in headers.items()},
    }


# Arrays


def array_variants(a: np.ndarray) -> dict[str, Callable[[], np.ndarray | None]]:
    """Return replacements of an array: other types, shapes and values; None for a missing array."""
    flat = a.reshape(-1)
    numbers = a.astype(np.float64) if a.dtype.kind in "fiub" else np.zeros(a.shape)
    rows = len(a) if a.ndim else 1

    def filled(value: Any, dtype: Any = np.float64) -> Callable[[], np.ndarray]:
        return lambda: np.full(a.shape, value, dtype)

    def spoiled(value: float) -> Callable[[], np.ndarray]:
        def make() -> np.ndarray:
            changed = numbers.copy()
            changed.reshape(-1)[:: max(1, changed.size // 7)] = value
            return changed

        return make

    return {
        "missing": lambda: None,
        "NaN": filled(np.nan),
        "inf": filled(np.inf),
        "1e300": filled(1e300),
        "-1e300 and 1e300": lambda: np.where(np.arange(numbers.size).reshape(a.shape) % 2, 1e300, -1e300),
        "1e38": lambda: np.where(np.arange(numbers.size).reshape(a.shape) % 3, 1e38, -1e38),
        "noise of 1e150": lambda: np.random.default_rng(0).normal(size=a.shape) * 1e150,
        "noise of 1e-300": lambda: np.random.default_rng(0).normal(size=a.shape) * 1e-300,
        "some NaN": spoiled(np.nan),
        "some inf": spoiled(-np.inf),
        "some 1e300": spoiled(1e300),
        "zeros": filled(0),
        "-1": filled(-1, np.int64),
        "2**62": filled(2**62, np.int64),
        "2**40": filled(2**40, np.int64),
        "10**6": filled(10**6, np.int64),
        "uint64 maximum": filled(2**64 - 1, np.uint64),
        "denormal": filled(5e-324),
        "text": filled("<script>", "<U8"),
        "bytes": filled(b"\xff\x00", "S2"),
        "boolean": filled(True, bool),
        "complex": filled(1 + 2j, complex),
        "dates": lambda: np.zeros(a.shape, "datetime64[s]"),
        "records": lambda: np.zeros(a.shape, [("a", "f4"), ("b", "U3")]),
        "big-endian": lambda: numbers.astype(">f8"),
        "long double": lambda: numbers.astype(np.longdouble),
        "half": lambda: numbers.astype(np.float16),
        "0-d": lambda: np.float64(1.5),  # type: ignore[return-value]
        "empty": lambda: a[:0],
        "empty of rank 1": lambda: np.zeros(0),
        "no columns": lambda: np.zeros((rows, 0)),
        "flat": lambda: flat,
        "one more axis": lambda: a[..., None],
        "rank 30": lambda: a.reshape((1,) * 28 + a.shape) if a.ndim < 4 else a,
        "transposed": lambda: a.T,
        "one row": lambda: a[:1],
        "one row less": lambda: a[:-1],
        "doubled": lambda: np.concatenate([np.atleast_1d(a)] * 2),
        "one column": lambda: a[..., :1],
        "50,000 rows": lambda: np.resize(a, (50_000, *a.shape[1:])),
        "20,000 columns": lambda: np.resize(numbers, (rows, 20_000)),
        "long strings": lambda: np.full(min(rows, 50), "x" * 20_000),
    }


# Safetensors


def split_safetensors(content: bytes) -> tuple[dict[str, Any], bytes]:
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def join_safetensors(header: Any, data: bytes, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else dump(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def safetensors_damages(content: bytes) -> dict[str, Callable[[], bytes]]:
    """Return files whose header does not match the data, or that have other tensors."""
    header, data = split_safetensors(content)
    names = [name for name in header if name != "__metadata__"]
    head = next(name for name in names if name.endswith("head.weight") or name.endswith("weight"))
    last = max(names, key=lambda name: header[name]["data_offsets"][1])

    def edited(name: str, **values: Any) -> Callable[[], bytes]:
        return lambda: join_safetensors(header | {name: header[name] | values}, data)

    def filled(word: float) -> Callable[[], bytes]:
        return lambda: join_safetensors(header, struct.pack("<f", word) * (len(data) // 4))

    def noisy(scale: float) -> Callable[[], bytes]:
        def make() -> bytes:
            with np.errstate(over="ignore"):
                weights = np.random.default_rng(0).normal(size=len(data) // 4) * scale
                return join_safetensors(header, weights.astype("<f4").tobytes())

        return make

    text = dump(header).encode()
    shape = header[head]["shape"]
    start, end = header[head]["data_offsets"]
    return {
        "a header of 2**63 bytes": lambda: join_safetensors(header, data, 2**63),
        "a header of 2**64-1 bytes": lambda: join_safetensors(header, data, 2**64 - 1),
        "a header longer than the file": lambda: join_safetensors(header, data, len(content) * 2),
        "a header of 99 MB": lambda: join_safetensors(text + b" " * 99_000_000, data),
        "a header of 101 MB": lambda: join_safetensors(text + b" " * 101_000_000, data),
        "a header of no bytes": lambda: struct.pack("<Q", 0),
        "a header that is a list": lambda: join_safetensors([], data),
        "a header of nested lists": lambda: join_safetensors(b"[" * 100_000, data),
        "a header that is no UTF-8": lambda: join_safetensors(text.replace(b'"', b'"\xff', 3), data),
        "no tensors": lambda: join_safetensors({"__metadata__": header.get("__metadata__", {})}, b""),
        "a tensor less": lambda: join_safetensors({k: v for k, v in header.items() if k != last}, data),
        "a tensor more": lambda: join_safetensors(
            header | {"<script>\x1b[31m": {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]}}, data
        ),
        "other names": lambda: join_safetensors({k if k[:2] == "__" else f"x{k}": v for k, v in header.items()}, data),
        "100,000 empty tensors": lambda: join_safetensors(
            header | {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [len(data)] * 2} for i in range(100_000)},
            data,
        ),
        "a huge shape": edited(head, shape=[2**40, 2**40]),
        "a shape that overflows": edited(head, shape=[2**63, 2]),
        "an empty huge shape": edited(head, shape=[0, 2**62], data_offsets=[start, start]),
        "a negative shape": edited(head, shape=[-1, *shape[1:]]),
        "a fractional shape": edited(head, shape=[1.5, *shape[1:]]),
        "a shape of rank 100": edited(head, shape=[1] * 100 + shape),
        "a flat shape": edited(head, shape=[int(np.prod(shape))]),
        "a transposed shape": edited(head, shape=shape[::-1]),
        "a scalar shape": edited(head, shape=[]),
        "overlapping offsets": edited(last, data_offsets=[start, end]),
        "offsets behind the end": edited(last, data_offsets=[len(data), len(data) * 2]),
        "negative offsets": edited(last, data_offsets=[-4, 0]),
        "reversed offsets": edited(last, data_offsets=[end, start]),
        "huge offsets": edited(last, data_offsets=[0, 2**63]),
        "an unknown type": edited(head, dtype="F3"),
        "a boolean type": edited(head, dtype="BOOL"),
        "integers": edited(head, dtype="I32"),
        "bfloat16": lambda: join_safetensors(
            {k: v if k[:2] == "__" else v | {"dtype": "BF16", "shape": [*v["shape"], 2]} for k, v in header.items()},
            data,
        ),
        "8-bit floats": edited(head, dtype="F8_E4M3", shape=[*shape, 4]),
        "metadata that is no text": lambda: join_safetensors(header | {"__metadata__": {"longtail": 3}}, data),
        "metadata that is a list": lambda: join_safetensors(header | {"__metadata__": []}, data),
        "metadata of nobody": lambda: join_safetensors(header | {"__metadata__": {"format": "pt"}}, data),
        "1 MB behind the data": lambda: content + bytes(1_000_000),
        "weights of NaN": filled(np.nan),
        "weights of inf": filled(np.inf),
        "weights of 1e38": filled(1e38),
        "weights of zero": filled(0.0),
        "weights of -1": filled(-1.0),
        "noise of 1": noisy(1.0),
        "noise of 1e10": noisy(1e10),
        "noise of 1e38": noisy(1e38),
        "noise of 1e-40": noisy(1e-40),
    }


# Images


def png_bytes(size: tuple[int, int], text: str = "", seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    about = PngImagePlugin.PngInfo()
    if text:
        about.add_text("Comment", text)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", pnginfo=about)
    return stream.getvalue()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, data: bytes, depth: int = 8, color: int = 2, extra: bytes = b"") -> bytes:
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")


def deflated_zeros(size: int) -> bytes:
    """Return a zlib stream of zeros."""
    return b"\x78\x9c" + deflate_zeros(b"", size)[0] + struct.pack(">I", size % 65521 << 16 | 1)


EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 100 100
%%EndComments
(outside/exploded) (w) file closefile
showpage
%%EOF
"""


def image_in(form: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(stream, form)
    return stream.getvalue()


def image_damages() -> dict[str, Callable[[], bytes]]:
    """Return files named *.png that are not PNG, or take much memory; each in a small and a large version (over 4 KiB)."""
    found: dict[str, Callable[[], bytes]] = {
        "a bomb of 30,000 x 30,000": lambda: png_of(30_000, 30_000, deflated_zeros(120 * 2**20), 1, 0),
        "a bomb of 13,000 x 13,000": lambda: png_of(13_000, 13_000, deflated_zeros(512 * 2**20)),
        "a header of 2**31-1": lambda: png_of(2**31 - 1, 2**31 - 1, deflated_zeros(2**20)),
        "a size of zero": lambda: png_of(0, 0, b""),
        "a compressed text of 64 MiB": lambda: png_of(
            1, 1, zlib.compress(bytes(4)), extra=png_chunk(b"zTXt", b"x\0\0" + deflated_zeros(64 * 2**20))
        ),
        "a compressed profile of 64 MiB": lambda: png_of(
            1, 1, zlib.compress(bytes(4)), extra=png_chunk(b"iCCP", b"x\0\0" + deflated_zeros(64 * 2**20))
        ),
        "too little data": lambda: png_of(64, 64, zlib.compress(bytes(10))),
        "an unknown color type": lambda: png_of(8, 8, zlib.compress(bytes(300)), 8, 5),
        "EPS": lambda: EPS,
        "EPS over 4 KiB": lambda: EPS + b"%" * 5000,
        "PDF over 4 KiB": lambda: b"%PDF-1.4\n" + b"%" * 5000,
        "SVG": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
        "HTML": lambda: b"<html><script>alert(1)</script></html>",
        "text over 4 KiB": lambda: b"no image " * 1000,
        "a name": lambda: b"\x89PNG\r\n\x1a\n",
        **{
            f"a {form} file": (lambda form=form: image_in(form))
            for form in ("GIF", "BMP", "TIFF", "ICO", "WEBP", "PPM")
        },
        "a TIFF header": lambda: b"II*\x00" + b"\xff" * 6000,
        "a JPEG 2000 header": lambda: b"\x00\x00\x00\x0cjP  \r\n\x87\n" + b"\xff" * 6000,
        "a PSD header": lambda: b"8BPS\x00\x01" + b"\x00" * 6 + b"\x00\x03" + b"\xff" * 6000,
        "an ICNS header": lambda: b"icns" + b"\xff" * 6000,
        "a FLI header": lambda: struct.pack("<IHHHH", 6000, 0xAF12, 2**15, 2**15, 2**15) + b"\xff" * 6000,
        "two images": lambda: png_bytes((64, 64)) * 2,
        "half of an image": lambda: png_bytes((64, 64))[:6000],
    }
    return found


def interleave(*parts: list[Any]) -> list[Any]:
    """Merge lists so that each is spread evenly over the result."""
    ranked = itertools.chain.from_iterable(
        (((i + 0.5) / len(part), n, item) for i, item in enumerate(part)) for n, part in enumerate(parts)
    )
    return [item for _, _, item in sorted(ranked, key=lambda entry: entry[:2])]


def shorten(value: Any) -> str:
    if isinstance(value, Raw):
        return f"raw {value.text[:30]}"
    try:
        said = repr(value)
    except (ValueError, RuntimeError):
        return f"a {type(value).__name__}"
    said = " ".join(said.split())
    return said if len(said) < 80 else f"{said[:60]}… ({type(value).__name__} of {len(said)} characters)"
