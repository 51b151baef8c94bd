"""Validation of torch checkpoints before `torch.load` executes their pickle.

`torch.load(weights_only=True)` does not run arbitrary code. However, a file of a few hundred bytes can make it allocate
gigabytes (`builtins.bytearray`) or compute for years (the hash of a nested tuple), and it trusts the storage sizes in the
pickle. This module interprets the pickle without creating its objects, and accepts only what `torch.save` writes for
tensors and plain values.
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
"""Largest size in bytes of the pickle, which does not contain the tensor data."""
MAX_INSTRUCTIONS = 2_000_000
"""Largest number of instructions of the pickle."""
MAX_TUPLE_VALUES = 64
"""Largest number of values in a tuple and its nested tuples; torch needs about twenty."""
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
END_OF_DIRECTORY = struct.Struct("<4s4H2LH")
"""The record at the end of a ZIP archive: signature, disks, entries, size and offset of the directory, length of the
comment."""
END_OF_DIRECTORY_64 = struct.Struct("<4sQ2H2L4Q")
END_LOCATOR_64 = struct.Struct("<4sLQL")
ZIP64_MARKERS = (2**16 - 1, 2**32 - 1, 2**32 - 1)
"""Entries, size and offset in END_OF_DIRECTORY if the values are in END_OF_DIRECTORY_64."""


class Global(NamedTuple):
    """A global name that the pickle imports."""

    name: str


class Opaque(NamedTuple):
    """A value whose content is not tracked: a list or a tensor."""


@dataclass(eq=False)
class Dictionary:
    """A dictionary, of which only the keys are tracked."""

    ordered: bool = False
    keys: set[str | int] = field(default_factory=set)


class Mark(NamedTuple):
    """The mark at the start of a sequence on the stack."""


def check_checkpoint(path: Path, file: BinaryIO, limit: int) -> None:
    """Raise an OSError or a ValueError unless an open file is a ZIP archive of tensors and plain values, as written by
    `torch.save`.

    Args:
        path: The file, for errors.
        file: The open file, at any position.
        limit: The largest total size of its members in bytes.
    """
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        raise ValueError("it is not a ZIP archive of torch.save: save it again with a current version of torch")
    check_directory(file)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        files.check_archive(path, members, limit, compressed=False)
        sizes = {member.filename: member.file_size for member in members}
        if len({name.lower() for name in sizes}) != len(members):  # torch ignores case
            raise ValueError("two of its members have the same name")
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
            raise ValueError("it was written on a machine with another byte order")
        if bad := archive.testzip():
            raise ValueError(f"{bad} is damaged")
    file.seek(0)


def check_directory(file: BinaryIO) -> None:
    """Raise a ValueError unless the directory of a ZIP archive is at the end of the file and all offsets agree with that.

    `zipfile` and torch locate the directory in different ways. Otherwise torch could read other members than those checked
    here.
    """
    size = file.seek(0, os.SEEK_END)
    start = size - END_OF_DIRECTORY.size
    end = END_OF_DIRECTORY.unpack(_read_at(file, start, END_OF_DIRECTORY.size))
    entries, length, offset = end[4:7]
    if start >= END_OF_DIRECTORY_64.size + END_LOCATOR_64.size:
        signature, _, location, _ = END_LOCATOR_64.unpack(
            _read_at(file, start - END_LOCATOR_64.size, END_LOCATOR_64.size)
        )
        if signature == b"PK\6\7":
            start -= END_OF_DIRECTORY_64.size + END_LOCATOR_64.size
            signature, *_, entries, length, offset = END_OF_DIRECTORY_64.unpack(
                _read_at(file, start, END_OF_DIRECTORY_64.size)
            )
            same = all(
                x in (y, most) for x, y, most in zip(end[4:7], (entries, length, offset), ZIP64_MARKERS, strict=True)
            )
            if signature != b"PK\6\6" or location != start or not same:
                raise ValueError("the directory of its archive is damaged")
    if end[0] != b"PK\5\6" or end[7] or offset + length != start:
        raise ValueError("the directory of its archive is damaged")


def _read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    if offset < 0:
        raise ValueError("it is too short for a ZIP archive")
    file.seek(offset)
    return file.read(size)


def check_pickle(content: bytes, sizes: dict[str, int]) -> None:
    """Raise a ValueError unless a pickle contains only tensors and plain values.

    Args:
        content: The pickle.
        sizes: Size in bytes of each member of the archive; the data of tensors are in `data/KEY`.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if number > MAX_INSTRUCTIONS:
            raise ValueError("its structure has too many instructions")
        execute_instruction(opcode.name, argument, stack, memo, sizes)


def execute_instruction(
    name: str, argument: Any, stack: list[Any], memo: dict[int, Any], sizes: dict[str, int]
) -> None:
    """Interpret one instruction of a pickle.

    Args:
        name: The instruction, as in `pickletools`.
        argument: Its argument.
        stack: The stack, which is changed.
        memo: The memo, which is changed.
        sizes: Size in bytes of each member of the archive.
    """
    try:
        match name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE" | "SHORT_BINUNICODE":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "EMPTY_DICT":
                stack.append(Dictionary())
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
                    raise ValueError(f"it contains more than tensors and plain values ({argument.replace(' ', '.')})")
                stack.append(Global(argument))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                if not isinstance(function, Global) or not isinstance(arguments, tuple):
                    raise ValueError("it calls something that is not a function")
                is_dictionary = function.name == "collections OrderedDict"
                if is_dictionary and arguments:
                    raise ValueError("it creates a dictionary in an unusual way")
                stack.append(Dictionary(ordered=True) if is_dictionary else Opaque())
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
            case "BUILD":  # attributes of an OrderedDict: one with the name of a method would replace it
                attributes, target = stack.pop(), stack[-1]
                if not (isinstance(target, Dictionary) and target.ordered and isinstance(attributes, Dictionary)):
                    raise ValueError("it sets attributes of a value that is not a dictionary")
                if attributes.keys - {"_metadata"}:
                    raise ValueError("it sets attributes that torch does not write")
            case _:
                raise ValueError(f"its structure has the instruction {name}, which torch.save does not write")
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError("its structure is damaged") from error


def make_tuple(items: list[Any]) -> tuple[Any, ...]:
    """Return a tuple. Raise a ValueError if it has too many values, including those of nested tuples."""
    result = tuple(items)
    if count_values(result) > MAX_TUPLE_VALUES:
        raise ValueError("it has a tuple with too many values")
    return result


def count_values(item: Any) -> int:
    """Return the number of values in a tuple and its nested tuples; any other value counts as one."""
    if isinstance(item, tuple) and not isinstance(item, Global | Opaque | Mark):
        return 1 + sum(map(count_values, item))
    return 1


def pop_to_mark(stack: list[Any]) -> list[Any]:
    """Remove the last mark and all values above it from the stack, and return the values."""
    start = next(i for i in reversed(range(len(stack))) if isinstance(stack[i], Mark))
    items = stack[start + 1 :]
    del stack[start:]
    return items


def add_keys(dictionary: Any, keys: list[Any]) -> None:
    """Add keys to a dictionary. Raise a ValueError unless all of them are strings or integers."""
    if not isinstance(dictionary, Dictionary):
        raise ValueError("it sets items of a value that is not a dictionary")
    if not all(type(key) in (str, int) for key in keys):
        raise ValueError("it has a dictionary with keys that are neither strings nor integers")
    dictionary.keys.update(keys)


def check_storage(identity: Any, sizes: dict[str, int]) -> None:
    """Raise a ValueError unless a storage has torch's description and its member of the archive is large enough.

    Args:
        identity: The description of the storage in the pickle.
        sizes: Size in bytes of each member of the archive.
    """
    if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
        raise ValueError("it refers to a storage in an unusual way")
    _, kind, key, location, count = identity
    known = STORAGE.fullmatch(kind.name) if isinstance(kind, Global) else None
    if known is None or not isinstance(key, str) or not isinstance(location, str) or type(count) is not int:
        raise ValueError("it refers to a storage in an unusual way")
    if not 0 <= count * ITEM_SIZES[known[1]] <= sizes.get(f"data/{key}", -1):
        raise ValueError(f"the data of storage {key} are too short")
