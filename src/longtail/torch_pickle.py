"""A check of torch checkpoints before `torch.load` executes their pickle.

`torch.load(weights_only=True)` runs no foreign code, but it lets a file of a few hundred bytes allocate gigabytes
(`builtins.bytearray`) or compute for years (the hash of a nested tuple), and it trusts the sizes that a pickle gives for its
storages. This module interprets the pickle without building anything, and admits only what `torch.save` writes for tensors and
plain values.
"""

import pickletools
import re
import sys
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from longtail import files

STRUCTURE_LIMIT = 64 * 2**20
"""Bytes of the pickle; tensor data is stored beside it."""
MOST_INSTRUCTIONS = 2_000_000
LARGEST_TUPLE = 64
"""Values in a tuple, those of nested tuples included; torch needs about twenty."""
ITEM_SIZES = {"Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1}
ITEM_SIZES |= {"Bool": 1}
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
GLOBALS = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    "torch Size",
    *(f"torch {name}" for name in DTYPES),
    *(f"torch {name}Storage" for name in ITEM_SIZES),
}
STORAGE = re.compile(r"torch (\w+)Storage")


class Global(NamedTuple):
    """A name that the pickle imports."""

    name: str


class Opaque(NamedTuple):
    """A value that is not followed: a dictionary, a list, a tensor."""


class Mark(NamedTuple):
    """The start of a sequence on the stack."""


def check_checkpoint(path: Path, file: BinaryIO, limit: int) -> None:
    """Raise OSError or ValueError unless an open file is a ZIP archive of tensors and plain values, as `torch.save` writes it.

    Args:
        path: The file, for errors.
        file: The open file, at any position.
        limit: The largest total size of its members in bytes.
    """
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        raise ValueError("it is no archive of torch.save: save it again with a current version of torch")
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        files.check_archive(path, members, limit, compressed=False)
        sizes = {member.filename: member.file_size for member in members}
        if len(sizes) != len(members):
            raise ValueError("it has two members of one name")
        pickles = [name for name in sizes if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(pickles) != 1 or sizes[pickles[0]] > STRUCTURE_LIMIT:
            raise ValueError("its structure is missing or too large")
        prefix = pickles[0].removesuffix("data.pkl")
        check_pickle(archive.read(pickles[0]), {name.removeprefix(prefix): size for name, size in sizes.items()})
        order = archive.read(f"{prefix}byteorder") if f"{prefix}byteorder" in sizes else b"little"
        if sizes.get(f"{prefix}byteorder", 0) > 16 or order.decode("latin1") != sys.byteorder:
            raise ValueError("it was written by a machine of another byte order")
        if bad := archive.testzip():
            raise ValueError(f"{bad} is damaged")
    file.seek(0)


def check_pickle(content: bytes, sizes: dict[str, int]) -> None:
    """Raise ValueError unless a pickle builds tensors of the given members (`data/KEY` and its size), and plain values."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if number > MOST_INSTRUCTIONS:
            raise ValueError("its structure has too many instructions")
        step(opcode.name, argument, stack, memo, sizes)


def step(name: str, argument: Any, stack: list[Any], memo: dict[int, Any], sizes: dict[str, int]) -> None:
    """Interpret one instruction."""
    try:
        match name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE" | "SHORT_BINUNICODE":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "EMPTY_DICT" | "EMPTY_LIST":
                stack.append(Opaque())
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(name[-1])
                stack[-count:] = [make_tuple(stack[-count:])]
            case "TUPLE":
                stack.append(make_tuple(pop_to_mark(stack)))
            case "MARK":
                stack.append(Mark())
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                if argument not in GLOBALS:
                    raise ValueError(f"it holds more than tensors and plain values ({argument.replace(' ', '.')})")
                stack.append(Global(argument))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                if not isinstance(function, Global) or not isinstance(arguments, tuple):
                    raise ValueError("it calls something that is no function")
                if function.name == "collections OrderedDict" and arguments:
                    raise ValueError("it fills a dictionary in an unusual way")
                stack.append(Opaque())
            case "BINPERSID":
                check_storage(stack.pop(), sizes)
                stack.append(Opaque())
            case "SETITEM":
                check_keys([stack[-2]])
                del stack[-2:]
            case "SETITEMS":
                check_keys(pop_to_mark(stack)[::2])
            case "APPEND":
                stack.pop()
            case "APPENDS":
                pop_to_mark(stack)
            case "BUILD":  # the attributes of an OrderedDict, which torch drops
                stack.pop()
            case _:
                raise ValueError(f"its structure has the instruction {name}, which torch.save does not write")
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError("its structure is damaged") from error


def make_tuple(items: list[Any]) -> tuple[Any, ...]:
    """Return a tuple; ValueError if it would have too many values, nested ones included."""
    made = tuple(items)
    if count_values(made) > LARGEST_TUPLE:
        raise ValueError("it has a tuple of too many values")
    return made


def count_values(item: Any) -> int:
    """Return the number of values in a tuple and the tuples in it; other values count as one."""
    if isinstance(item, tuple) and not isinstance(item, Global | Opaque | Mark):
        return 1 + sum(map(count_values, item))
    return 1


def pop_to_mark(stack: list[Any]) -> list[Any]:
    """Remove and return what is above the last mark, and remove the mark."""
    start = next(i for i in reversed(range(len(stack))) if isinstance(stack[i], Mark))
    items = stack[start + 1 :]
    del stack[start:]
    return items


def check_keys(keys: list[Any]) -> None:
    """Raise ValueError unless all keys of a dictionary are text or numbers."""
    if not all(type(key) in (str, int) for key in keys):
        raise ValueError("it has a dictionary whose keys are neither text nor numbers")


def check_storage(identity: Any, sizes: dict[str, int]) -> None:
    """Raise ValueError unless a storage is described as torch does, and its member has all the bytes that it should have."""
    if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
        raise ValueError("it refers to a storage in an unusual way")
    _, kind, key, location, count = identity
    known = STORAGE.fullmatch(kind.name) if isinstance(kind, Global) else None
    if known is None or not isinstance(key, str) or not isinstance(location, str) or type(count) is not int:
        raise ValueError("it refers to a storage in an unusual way")
    if not 0 <= count * ITEM_SIZES[known[1]] <= sizes.get(f"data/{key}", -1):
        raise ValueError(f"storage {key} has fewer bytes than it should have")
