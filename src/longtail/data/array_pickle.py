"""A reader of pickles that hold plain values and NumPy arrays, for files that somebody else may have written.

The module `pickle` calls whatever a file names. To admit only classes of NumPy is not enough: a file can change a dtype after
an array of it has been made, and so read and write outside of the array's memory. This reader implements a subset of the pickle
machine itself. It builds None, booleans, numbers, strings, bytes, tuples, lists and dictionaries with strings as keys, and has
stand-ins for the functions by which Python 2, Python 3 and NumPy store bytes and arrays. Any other instruction is an error.
Time and memory are bounded by the size of the file: each byte of a string or an array comes from the file at most twice, and
the number of instructions is limited.

Strings of Python 2 are decoded as Latin-1.
"""

import codecs
import enum
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_INSTRUCTIONS = 1_000_000  # CIFAR-100's training file has 200,000
LONGEST_INTEGER = 8  # bytes; labels and dimensions need no more
LONGEST_NUMBER = 32  # characters, where numbers are written in digits
MOST_DIMENSIONS = 32
DTYPES = frozenset({"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"})


class RefusedName(Exception):
    """A pickle asks for a function or class that is not admitted."""


class Name(enum.Enum):
    """The functions and classes that a pickle may name; none of them is NumPy's own."""

    RECONSTRUCT = enum.auto()
    FROMBUFFER = enum.auto()
    NDARRAY = enum.auto()
    DTYPE = enum.auto()
    ENCODE = enum.auto()


ADMITTED = {
    # NumPy 2 has moved its functions; files have the old addresses or the new ones.
    ("numpy.core.multiarray", "_reconstruct"): Name.RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): Name.RECONSTRUCT,
    ("numpy.core.numeric", "_frombuffer"): Name.FROMBUFFER,
    ("numpy._core.numeric", "_frombuffer"): Name.FROMBUFFER,
    ("numpy", "ndarray"): Name.NDARRAY,
    ("numpy", "dtype"): Name.DTYPE,
    ("_codecs", "encode"): Name.ENCODE,  # by which Python 3 stores bytes in old protocols
}


@dataclass(frozen=True)
class PickledDtype:
    """A stand-in for a dtype. It is one of DTYPES in little-endian order, whatever state a pickle gives it."""

    name: str

    @property
    def order(self) -> str:
        return "|" if self.name.endswith("1") else "<"

    def check_state(self, state: object) -> None:
        """Raise ValueError for a state other than that of a built-in dtype of this name in little-endian order."""
        plain = type(state) is tuple and all(item is None or type(item) in (int, str) for item in state)
        if not plain or state != (3, self.order, None, None, None, -1, -1, 0):
            raise ValueError(f"a dtype {self.name} has another state than NumPy gives it")


class PickledArray:
    """A stand-in for an array, which a pickle makes first and fills later."""

    __slots__ = ("array",)

    def __init__(self, array: npt.NDArray[Any] | None = None) -> None:
        self.array = array


def load(content: bytes) -> Any:
    """Return the value that a pickle holds, with arrays where it is a dictionary that has arrays for values.

    Raises RefusedName for a pickle that asks for other functions or classes, and ValueError or another exception for one that
    is damaged or has instructions that are not needed for such values.
    """
    value = Machine(content).run()
    if type(value) is dict:
        return {key: _filled(item) if type(item) is PickledArray else item for key, item in value.items()}
    return value


def _filled(item: PickledArray) -> npt.NDArray[Any]:
    if item.array is None:
        raise ValueError("an array has no content")
    return item.array


class Machine:
    """The pickle machine: a stack, marks on it, and a memo of values that are used again."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0
        self.view = memoryview(content)
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.allowance = len(content)  # bytes that may still be made of strings

    def run(self) -> Any:
        for _ in range(MOST_INSTRUCTIONS):
            opcode = self.take(1)[0]
            if opcode == ord("."):
                return self.pop()
            if opcode not in INSTRUCTIONS:
                raise ValueError(f"instruction {opcode:#04x} at byte {self.at - 1:,} is not admitted")
            INSTRUCTIONS[opcode](self)
        raise ValueError(f"it has more than {MOST_INSTRUCTIONS:,} instructions")

    # Reading

    def take(self, size: int) -> memoryview:
        if not 0 <= size <= len(self.content) - self.at:
            raise ValueError("the pickle ends too early")
        self.at += size
        return self.view[self.at - size : self.at]

    def line(self, longest: int | None = None) -> bytes:
        end = self.content.find(b"\n", self.at)
        if end < 0:
            raise ValueError("the pickle ends too early")
        if longest is not None and end - self.at > longest:
            raise ValueError(f"a number has more than {longest} characters")
        line = bytes(self.take(end - self.at))
        self.at += 1
        return line

    def number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    # The stack

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise ValueError("the stack is empty")
        return self.stack.pop()

    def top(self) -> Any:
        self.stack.append(value := self.pop())
        return value

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop_to_mark(self) -> list[Any]:
        if not self.marks:
            raise ValueError("there is no mark")
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def pop_many(self, count: int) -> tuple[Any, ...]:
        return tuple(reversed([self.pop() for _ in range(count)]))

    # Values

    def push_integer(self, size: int) -> None:
        if size > LONGEST_INTEGER:
            raise ValueError(f"an integer has {size:,} bytes")
        self.push(self.number(size, signed=True))

    def push_text_integer(self) -> None:
        line = self.line(LONGEST_NUMBER)
        self.push({b"00": False, b"01": True}[line] if line in (b"00", b"01") else int(line.rstrip(b"L")))

    def push_quoted(self) -> None:
        line = self.line().strip()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            raise ValueError("a string has no quotes")
        self.push(codecs.escape_decode(line[1:-1])[0].decode("latin-1"))

    def extend(self, items: list[Any]) -> None:
        if type(target := self.top()) is not list:
            raise ValueError("items are appended to what is not a list")
        target.extend(items)

    def update(self, items: list[Any]) -> None:
        if type(target := self.top()) is not dict:
            raise ValueError("items are set in what is not a dictionary")
        target.update(_pairs(items))

    def remember(self, index: int) -> None:
        self.memo[index] = self.top()

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise ValueError("the memo lacks a value")
        self.push(self.memo[index])

    # Names, calls and states

    def push_name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("the name of a function is not a string")
        if (module, name) not in ADMITTED:
            raise RefusedName(" ".join(f"{module[:80]}.{name[:80]}".split()))
        self.push(ADMITTED[module, name])

    def call(self) -> None:
        function, arguments = self.pop_many(2)
        if not isinstance(function, Name) or type(arguments) is not tuple:
            raise ValueError("a call of what is not a function")
        match function, *arguments:
            case Name.ENCODE, str(text), "latin1" | "latin-1":
                self.push(self.encoded(text))
            case Name.DTYPE, str(name), 0, 1 if name in DTYPES:  # also False and True
                self.push(PickledDtype(name))
            case Name.RECONSTRUCT, Name.NDARRAY, (0,), b"b" | "b":
                self.push(PickledArray())
            case Name.FROMBUFFER, buffer, dtype, shape, "C" | "F" as order:
                self.push(PickledArray(self.array(buffer, dtype, shape, order)))
            case _:
                raise ValueError(f"a call of {function.name.lower()} with unexpected arguments")

    def build(self) -> None:
        state, target = self.pop(), self.top()
        if type(target) is PickledDtype:
            target.check_state(state)
        elif type(target) is PickledArray and target.array is None and type(state) is tuple and len(state) == 5:
            _, shape, dtype, fortran, buffer = state
            target.array = self.array(buffer, dtype, shape, "F" if fortran is True or fortran == 1 else "C")
        else:
            raise ValueError("a state for what has none")

    def encoded(self, text: str) -> bytes:
        self.allowance -= len(text)
        if self.allowance < 0:
            raise ValueError("the same string is used for several arrays")
        return text.encode("latin-1")

    def array(self, buffer: Any, dtype: Any, shape: Any, order: str) -> npt.NDArray[Any]:
        """Return an array over bytes, which must be as many as dtype and shape call for."""
        if type(buffer) is str:
            buffer = self.encoded(buffer)
        if type(buffer) is not bytes or type(dtype) is not PickledDtype or type(shape) is not tuple:
            raise ValueError("an array without bytes, dtype or shape")
        if len(shape) > MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError("an array with an impossible shape")
        built_in = np.dtype(f"{dtype.order}{dtype.name}")
        if math.prod(shape) * built_in.itemsize != len(buffer):
            raise ValueError(f"an array of shape {shape} with {len(buffer):,} bytes")
        return np.ndarray(shape, built_in, buffer, order="F" if order == "F" else "C")


def _pairs(items: list[Any]) -> dict[str, Any]:
    """Return a dictionary of keys and values that alternate.

    Keys are strings: the hash of a tuple that contains itself many times over would take forever.
    """
    if len(items) % 2 or any(type(key) is not str for key in items[::2]):
        raise ValueError("a dictionary has keys that are not strings")
    return dict(zip(items[::2], items[1::2], strict=True))


def _check_protocol(m: Machine) -> None:
    if (protocol := m.number(1)) > 5:
        raise ValueError(f"unknown protocol {protocol}")


def _latin_1(data: memoryview) -> str:
    return str(data, "latin-1")


def _utf_8(data: memoryview) -> str:
    return str(data, "utf-8")


INSTRUCTIONS: dict[int, Callable[[Machine], object]] = {
    ord(code): work
    for code, work in {
        b"\x80": _check_protocol,  # PROTO
        b"\x95": lambda m: m.take(8),  # FRAME: how much to read at once
        b"(": lambda m: m.marks.append(len(m.stack)),  # MARK
        b"0": lambda m: m.pop(),  # POP
        b"1": lambda m: m.pop_to_mark(),  # POP_MARK
        b"N": lambda m: m.push(None),  # NONE
        b"\x88": lambda m: m.push(True),  # NEWTRUE
        b"\x89": lambda m: m.push(False),  # NEWFALSE
        b"I": lambda m: m.push_text_integer(),  # INT
        b"L": lambda m: m.push_text_integer(),  # LONG
        b"J": lambda m: m.push(m.number(4, signed=True)),  # BININT
        b"K": lambda m: m.push(m.number(1)),  # BININT1
        b"M": lambda m: m.push(m.number(2)),  # BININT2
        b"\x8a": lambda m: m.push_integer(m.number(1)),  # LONG1
        b"F": lambda m: m.push(float(m.line(LONGEST_NUMBER))),  # FLOAT
        b"G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),  # BINFLOAT
        b"S": lambda m: m.push_quoted(),  # STRING
        b"T": lambda m: m.push(_latin_1(m.take(m.number(4)))),  # BINSTRING
        b"U": lambda m: m.push(_latin_1(m.take(m.number(1)))),  # SHORT_BINSTRING
        b"V": lambda m: m.push(m.line().decode("raw-unicode-escape")),  # UNICODE
        b"X": lambda m: m.push(_utf_8(m.take(m.number(4)))),  # BINUNICODE
        b"\x8c": lambda m: m.push(_utf_8(m.take(m.number(1)))),  # SHORT_BINUNICODE
        b"\x8d": lambda m: m.push(_utf_8(m.take(m.number(8)))),  # BINUNICODE8
        b"B": lambda m: m.push(bytes(m.take(m.number(4)))),  # BINBYTES
        b"C": lambda m: m.push(bytes(m.take(m.number(1)))),  # SHORT_BINBYTES
        b"\x8e": lambda m: m.push(bytes(m.take(m.number(8)))),  # BINBYTES8
        b"\x96": lambda m: m.push(bytes(m.take(m.number(8)))),  # BYTEARRAY8, of arrays in protocol 5
        b")": lambda m: m.push(()),  # EMPTY_TUPLE
        b"t": lambda m: m.push(tuple(m.pop_to_mark())),  # TUPLE
        b"\x85": lambda m: m.push(m.pop_many(1)),  # TUPLE1
        b"\x86": lambda m: m.push(m.pop_many(2)),  # TUPLE2
        b"\x87": lambda m: m.push(m.pop_many(3)),  # TUPLE3
        b"]": lambda m: m.push([]),  # EMPTY_LIST
        b"l": lambda m: m.push(m.pop_to_mark()),  # LIST
        b"a": lambda m: m.extend([m.pop()]),  # APPEND
        b"e": lambda m: m.extend(m.pop_to_mark()),  # APPENDS
        b"}": lambda m: m.push({}),  # EMPTY_DICT
        b"d": lambda m: m.push(_pairs(m.pop_to_mark())),  # DICT
        b"s": lambda m: m.update([*m.pop_many(2)]),  # SETITEM
        b"u": lambda m: m.update(m.pop_to_mark()),  # SETITEMS
        b"p": lambda m: m.remember(int(m.line(LONGEST_NUMBER))),  # PUT
        b"q": lambda m: m.remember(m.number(1)),  # BINPUT
        b"r": lambda m: m.remember(m.number(4)),  # LONG_BINPUT
        b"\x94": lambda m: m.remember(len(m.memo)),  # MEMOIZE
        b"g": lambda m: m.recall(int(m.line(LONGEST_NUMBER))),  # GET
        b"h": lambda m: m.recall(m.number(1)),  # BINGET
        b"j": lambda m: m.recall(m.number(4)),  # LONG_BINGET
        b"c": lambda m: m.push_name(m.line().decode(), m.line().decode()),  # GLOBAL
        b"\x93": lambda m: m.push_name(*m.pop_many(2)),  # STACK_GLOBAL
        b"R": lambda m: m.call(),  # REDUCE
        b"b": lambda m: m.build(),  # BUILD
    }.items()
}
