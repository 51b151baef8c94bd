"""A check of torch checkpoints before `torch.load` executes their pickle.

`torch.load(weights_only=True)` runs no foreign code, but it lets a file of a few hundred bytes allocate gigabytes
(`builtins.bytearray`) or compute for years (the hash of a nested tuple), and it trusts the sizes that a pickle gives for its
storages. This module interprets the pickle without building anything, and admits only what `torch.save` writes for tensors and
plain values.
"""

import os
import pickletools
import re
import struct
import sys
import zipfile
from dataclasses import dataclass, field
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
END = struct.Struct("<4s4H2LH")
"""The end of a ZIP archive: signature, disks, entries, size and offset of the directory, length of a comment."""
END_64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR_64 = struct.Struct("<4sLQL")
LARGEST = (2**16 - 1, 2**32 - 1, 2**32 - 1)
"""Entries, size and offset in END if the values are in END_64."""


class Global(NamedTuple):
    """A name that the pickle imports."""

    name: str


class Opaque(NamedTuple):
    """A value that is not followed: a list, a tensor."""


@dataclass(eq=False)
class Table:
    """A dictionary, of which the keys are known."""

    ordered: bool = False
    keys: set[str | int] = field(default_factory=set)


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
    check_directory(file)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        files.check_archive(path, members, limit, compressed=False)
        sizes = {member.filename: member.file_size for member in members}
        if len({name.lower() for name in sizes}) != len(members):  # torch does not distinguish upper and lower case
            raise ValueError("it has two members of one name")
        pickles = [name for name in sizes if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(pickles) != 1 or sizes[pickles[0]] > STRUCTURE_LIMIT:
            raise ValueError("its structure is missing or too large")
        prefix = pickles[0].removesuffix("data.pkl")
        if any(
            name.split("/")[0] != prefix.removesuffix("/") for name in sizes
        ):  # torch looks in the folder of the first one
            raise ValueError("its members are in several folders")
        check_pickle(archive.read(pickles[0]), {name.removeprefix(prefix): size for name, size in sizes.items()})
        order = archive.read(f"{prefix}byteorder") if f"{prefix}byteorder" in sizes else b"little"
        if sizes.get(f"{prefix}byteorder", 0) > 16 or order.decode("latin1") != sys.byteorder:
            raise ValueError("it was written by a machine of another byte order")
        if bad := archive.testzip():
            raise ValueError(f"{bad} is damaged")
    file.seek(0)


def check_directory(file: BinaryIO) -> None:
    """Raise ValueError unless the directory of a ZIP archive is where all of its offsets say, at the end of the file.

    `zipfile` and torch find the directory in different ways: torch could otherwise read other members than those checked here.
    """
    size = file.seek(0, os.SEEK_END)
    start = size - END.size
    end = END.unpack(_read_at(file, start, END.size))
    entries, length, offset = end[4:7]
    if start >= END_64.size + LOCATOR_64.size:
        signature, _, place, _ = LOCATOR_64.unpack(_read_at(file, start - LOCATOR_64.size, LOCATOR_64.size))
        if signature == b"PK\6\7":
            start -= END_64.size + LOCATOR_64.size
            signature, *_, entries, length, offset = END_64.unpack(_read_at(file, start, END_64.size))
            same = all(x in (y, most) for x, y, most in zip(end[4:7], (entries, length, offset), LARGEST, strict=True))
            if signature != b"PK\6\6" or place != start or not same:
                raise ValueError("the directory of its archive is damaged")
    if end[0] != b"PK\5\6" or end[7] or offset + length != start:
        raise ValueError("the directory of its archive is damaged")


def _read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    if offset < 0:
        raise ValueError("it is too short for an archive")
    file.seek(offset)
    return file.read(size)


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
            case "EMPTY_DICT":
                stack.append(Table())
            case "EMPTY_LIST":
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
                is_table = function.name == "collections OrderedDict"
                if is_table and arguments:
                    raise ValueError("it fills a dictionary in an unusual way")
                stack.append(Table(ordered=True) if is_table else Opaque())
            case "BINPERSID":
                check_storage(stack.pop(), sizes)
                stack.append(Opaque())
            case "SETITEM":
                add_keys(stack[-3], [stack[-2]])
                del stack[-2:]
            case "SETITEMS":
                keys = pop_to_mark(stack)[::2]
                add_keys(stack[-1], keys)
            case "APPEND":
                stack.pop()
            case "APPENDS":
                pop_to_mark(stack)
            case "BUILD":  # the attributes of an OrderedDict: a method would be replaced by one of its name
                attributes, target = stack.pop(), stack[-1]
                if not (isinstance(target, Table) and target.ordered and isinstance(attributes, Table)):
                    raise ValueError("it sets attributes of what is no dictionary")
                if attributes.keys - {"_metadata"}:
                    raise ValueError("it sets attributes that torch does not write")
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


def add_keys(table: Any, keys: list[Any]) -> None:
    """Remember new keys of a dictionary; ValueError unless all of them are text or numbers."""
    if not isinstance(table, Table):
        raise ValueError("it sets items of what is no dictionary")
    if not all(type(key) in (str, int) for key in keys):
        raise ValueError("it has a dictionary whose keys are neither text nor numbers")
    table.keys.update(keys)


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
