"""A reader of pickles with plain values and NumPy arrays, for files from untrusted sources.

The module `pickle` calls any function that a file names. Allowing only classes of NumPy is not enough: a file can change a
dtype after an array with it has been created, and so access memory outside of the array. This reader therefore implements a
subset of the pickle machine itself. It builds None, booleans, numbers, strings, bytes, tuples, lists and dictionaries with
strings as keys, and has placeholders for the functions by which Python 2, Python 3 and NumPy store bytes and arrays. Any other
instruction raises an error. Time and memory are bounded by the size of the file: each byte of a string or an array is taken
from the file at most twice, and the number of instructions is limited.

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

MAX_INSTRUCTIONS = 1_000_000  # CIFAR-100's training file has 200,000
MAX_INTEGER_BYTES = 8  # bytes; labels and dimensions need no more
MAX_NUMBER_LENGTH = 32  # characters, where numbers are written in digits
MAX_DIMENSIONS = 32
DTYPES = frozenset({"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"})


class RefusedName(Exception):
    """Raised for a pickle that names a function or class that is not allowed."""


class Name(enum.Enum):
    """Placeholders for the functions and classes that a pickle may name."""

    RECONSTRUCT = enum.auto()
    FROMBUFFER = enum.auto()
    NDARRAY = enum.auto()
    DTYPE = enum.auto()
    ENCODE = enum.auto()


ALLOWED_NAMES = {
    # NumPy 2 has moved its functions; files contain the old or the new names.
    ("numpy.core.multiarray", "_reconstruct"): Name.RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): Name.RECONSTRUCT,
    ("numpy.core.numeric", "_frombuffer"): Name.FROMBUFFER,
    ("numpy._core.numeric", "_frombuffer"): Name.FROMBUFFER,
    ("numpy", "ndarray"): Name.NDARRAY,
    ("numpy", "dtype"): Name.DTYPE,
    ("_codecs", "encode"): Name.ENCODE,  # Python 3 stores bytes with it in old protocols
}


@dataclass(frozen=True)
class PickledDtype:
    """A placeholder for a dtype: one of DTYPES in little-endian order, which no state in a pickle can change."""

    name: str

    @property
    def order(self) -> str:
        return "|" if self.name.endswith("1") else "<"

    def check_state(self, state: object) -> None:
        """Raise ValueError for a state other than that of a built-in dtype of this name in little-endian order."""
        plain = type(state) is tuple and all(item is None or type(item) in (int, str) for item in state)
        if not plain or state != (3, self.order, None, None, None, -1, -1, 0):
            raise ValueError(f"the state of a dtype {self.name} is not the one that NumPy writes")


class PickledArray:
    """A placeholder for an array, which a pickle creates first and fills later."""

    __slots__ = ("array",)

    def __init__(self, array: npt.NDArray[Any] | None = None) -> None:
        self.array = array


def load(content: bytes) -> Any:
    """Return the value in a pickle; the values of a dictionary may be arrays.

    Raises:
        RefusedName: The pickle names a function or class that is not allowed.
        ValueError: The pickle is damaged or has unsupported instructions. Damaged pickles may also raise other exceptions.
    """
    value = PickleMachine(content).run()
    if type(value) is dict:
        return {key: _get_array(item) if type(item) is PickledArray else item for key, item in value.items()}
    return value


def _get_array(placeholder: PickledArray) -> npt.NDArray[Any]:
    if placeholder.array is None:
        raise ValueError("an array has no content")
    return placeholder.array


class PickleMachine:
    """The pickle machine: a stack, marks on the stack, and a memo of values that are used more than once."""

    def __init__(self, content: bytes) -> None:
        self.content, self.position = content, 0
        self.view = memoryview(content)
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.allowance = len(content)  # bytes that strings may still be encoded to

    def run(self) -> Any:
        """Execute the instructions and return the value that the last one leaves on the stack."""
        for _ in range(MAX_INSTRUCTIONS):
            opcode = self.take(1)[0]
            if opcode == ord("."):
                return self.pop()
            if opcode not in INSTRUCTIONS:
                raise ValueError(f"instruction {opcode:#04x} at byte {self.position - 1:,} is not supported")
            INSTRUCTIONS[opcode](self)
        raise ValueError(f"it has more than {MAX_INSTRUCTIONS:,} instructions")

    # Reading

    def take(self, size: int) -> memoryview:
        """Return the next bytes."""
        if not 0 <= size <= len(self.content) - self.position:
            raise ValueError("the pickle ends too early")
        self.position += size
        return self.view[self.position - size : self.position]

    def read_line(self, longest: int | None = None) -> bytes:
        """Return the next line, without its end."""
        end = self.content.find(b"\n", self.position)
        if end < 0:
            raise ValueError("the pickle ends too early")
        if longest is not None and end - self.position > longest:
            raise ValueError(f"a number has more than {longest} characters")
        line = bytes(self.take(end - self.position))
        self.position += 1
        return line

    def read_number(self, size: int, signed: bool = False) -> int:
        """Return a little-endian integer of `size` bytes."""
        return int.from_bytes(self.take(size), "little", signed=signed)

    # The stack

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise ValueError("the stack is empty")
        return self.stack.pop()

    def top(self) -> Any:
        """Return the top of the stack without removing it."""
        self.stack.append(value := self.pop())
        return value

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop_to_mark(self) -> list[Any]:
        """Remove the last mark and return the values above it."""
        if not self.marks:
            raise ValueError("there is no mark")
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def pop_many(self, count: int) -> tuple[Any, ...]:
        """Remove the last `count` values and return them in order."""
        return tuple(reversed([self.pop() for _ in range(count)]))

    # Values

    def push_integer(self, size: int) -> None:
        """Push an integer of `size` bytes."""
        if size > MAX_INTEGER_BYTES:
            raise ValueError(f"an integer has {size:,} bytes")
        self.push(self.read_number(size, signed=True))

    def push_text_integer(self) -> None:
        """Push an integer that is written in digits, or a boolean."""
        line = self.read_line(MAX_NUMBER_LENGTH)
        self.push({b"00": False, b"01": True}[line] if line in (b"00", b"01") else int(line.rstrip(b"L")))

    def push_quoted(self) -> None:
        """Push a string that is written in quotes."""
        line = self.read_line().strip()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            raise ValueError("a string has no quotes")
        self.push(codecs.escape_decode(line[1:-1])[0].decode("latin-1"))

    def extend(self, items: list[Any]) -> None:
        """Append items to the list on top of the stack."""
        if type(target := self.top()) is not list:
            raise ValueError("items are appended to a value that is not a list")
        target.extend(items)

    def update(self, items: list[Any]) -> None:
        """Set items of the dictionary on top of the stack."""
        if type(target := self.top()) is not dict:
            raise ValueError("items are set in a value that is not a dictionary")
        target.update(_pairs(items))

    def memoize(self, index: int) -> None:
        """Store the top of the stack in the memo."""
        self.memo[index] = self.top()

    def recall(self, index: int) -> None:
        """Push a value from the memo."""
        if index not in self.memo:
            raise ValueError("a value is not in the memo")
        self.push(self.memo[index])

    # Names, calls and states

    def push_name(self, module: Any, name: Any) -> None:
        """Push the placeholder of a function or class."""
        if type(module) is not str or type(name) is not str:
            raise ValueError("the name of a function is not a string")
        if (module, name) not in ALLOWED_NAMES:
            raise RefusedName(" ".join(f"{module[:80]}.{name[:80]}".split()))
        self.push(ALLOWED_NAMES[module, name])

    def call(self) -> None:
        """Replace a function and its arguments by the result."""
        function, arguments = self.pop_many(2)
        if not isinstance(function, Name) or type(arguments) is not tuple:
            raise ValueError("a value that is not a function is called")
        match function, *arguments:
            case Name.ENCODE, str(text), "latin1" | "latin-1":
                self.push(self.encode_bytes(text))
            case Name.DTYPE, str(name), 0, 1 if name in DTYPES:  # also False and True
                self.push(PickledDtype(name))
            case Name.RECONSTRUCT, Name.NDARRAY, (0,), b"b" | "b":
                self.push(PickledArray())
            case Name.FROMBUFFER, buffer, dtype, shape, "C" | "F" as order:
                self.push(PickledArray(self.make_array(buffer, dtype, shape, order)))
            case _:
                raise ValueError(f"a call of {function.name.lower()} with unexpected arguments")

    def build(self) -> None:
        """Set the state of the value below it on the stack."""
        state, target = self.pop(), self.top()
        if type(target) is PickledDtype:
            target.check_state(state)
        elif type(target) is PickledArray and target.array is None and type(state) is tuple and len(state) == 5:
            _, shape, dtype, fortran, buffer = state
            target.array = self.make_array(buffer, dtype, shape, "F" if fortran is True or fortran == 1 else "C")
        else:
            raise ValueError("a state is set for a value that has none")

    def encode_bytes(self, text: str) -> bytes:
        """Return the bytes that a string encodes, within the allowance."""
        self.allowance -= len(text)
        if self.allowance < 0:
            raise ValueError("the same string is used for several arrays")
        return text.encode("latin-1")

    def make_array(self, buffer: Any, dtype: Any, shape: Any, order: str) -> npt.NDArray[Any]:
        """Return an array over a buffer, whose size must match dtype and shape.

        Args:
            buffer: The bytes, or a string that encodes them.
            dtype: The placeholder of the dtype.
            shape: The shape.
            order: "C" or "F".
        """
        if type(buffer) is str:
            buffer = self.encode_bytes(buffer)
        if type(buffer) is not bytes or type(dtype) is not PickledDtype or type(shape) is not tuple:
            raise ValueError("an array has no bytes, dtype or shape")
        if len(shape) > MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError("an array has an impossible shape")
        built_in = np.dtype(f"{dtype.order}{dtype.name}")
        if math.prod(shape) * built_in.itemsize != len(buffer):
            raise ValueError(f"an array of shape {shape} has {len(buffer):,} bytes")
        return np.ndarray(shape, built_in, buffer, order="F" if order == "F" else "C")


def _pairs(items: list[Any]) -> dict[str, Any]:
    """Return a dictionary from alternating keys and values.

    Keys must be strings: computing the hash of a deeply nested tuple could take forever.
    """
    if len(items) % 2 or any(type(key) is not str for key in items[::2]):
        raise ValueError("a dictionary has keys that are not strings")
    return dict(zip(items[::2], items[1::2], strict=True))


def _check_protocol(m: PickleMachine) -> None:
    if (protocol := m.read_number(1)) > 5:
        raise ValueError(f"unknown protocol {protocol}")


def _latin_1(data: memoryview) -> str:
    return str(data, "latin-1")


def _utf_8(data: memoryview) -> str:
    return str(data, "utf-8")


INSTRUCTIONS: dict[int, Callable[[PickleMachine], object]] = {
    ord(code): action
    for code, action in {
        b"\x80": _check_protocol,  # PROTO
        b"\x95": lambda m: m.take(8),  # FRAME: a hint about how much to read at a time
        b"(": lambda m: m.marks.append(len(m.stack)),  # MARK
        b"0": lambda m: m.pop(),  # POP
        b"1": lambda m: m.pop_to_mark(),  # POP_MARK
        b"N": lambda m: m.push(None),  # NONE
        b"\x88": lambda m: m.push(True),  # NEWTRUE
        b"\x89": lambda m: m.push(False),  # NEWFALSE
        b"I": lambda m: m.push_text_integer(),  # INT
        b"L": lambda m: m.push_text_integer(),  # LONG
        b"J": lambda m: m.push(m.read_number(4, signed=True)),  # BININT
        b"K": lambda m: m.push(m.read_number(1)),  # BININT1
        b"M": lambda m: m.push(m.read_number(2)),  # BININT2
        b"\x8a": lambda m: m.push_integer(m.read_number(1)),  # LONG1
        b"F": lambda m: m.push(float(m.read_line(MAX_NUMBER_LENGTH))),  # FLOAT
        b"G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),  # BINFLOAT
        b"S": lambda m: m.push_quoted(),  # STRING
        b"T": lambda m: m.push(_latin_1(m.take(m.read_number(4)))),  # BINSTRING
        b"U": lambda m: m.push(_latin_1(m.take(m.read_number(1)))),  # SHORT_BINSTRING
        b"V": lambda m: m.push(m.read_line().decode("raw-unicode-escape")),  # UNICODE
        b"X": lambda m: m.push(_utf_8(m.take(m.read_number(4)))),  # BINUNICODE
        b"\x8c": lambda m: m.push(_utf_8(m.take(m.read_number(1)))),  # SHORT_BINUNICODE
        b"\x8d": lambda m: m.push(_utf_8(m.take(m.read_number(8)))),  # BINUNICODE8
        b"B": lambda m: m.push(bytes(m.take(m.read_number(4)))),  # BINBYTES
        b"C": lambda m: m.push(bytes(m.take(m.read_number(1)))),  # SHORT_BINBYTES
        b"\x8e": lambda m: m.push(bytes(m.take(m.read_number(8)))),  # BINBYTES8
        b"\x96": lambda m: m.push(bytes(m.take(m.read_number(8)))),  # BYTEARRAY8, of arrays in protocol 5
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
        b"p": lambda m: m.memoize(int(m.read_line(MAX_NUMBER_LENGTH))),  # PUT
        b"q": lambda m: m.memoize(m.read_number(1)),  # BINPUT
        b"r": lambda m: m.memoize(m.read_number(4)),  # LONG_BINPUT
        b"\x94": lambda m: m.memoize(len(m.memo)),  # MEMOIZE
        b"g": lambda m: m.recall(int(m.read_line(MAX_NUMBER_LENGTH))),  # GET
        b"h": lambda m: m.recall(m.read_number(1)),  # BINGET
        b"j": lambda m: m.recall(m.read_number(4)),  # LONG_BINGET
        b"c": lambda m: m.push_name(m.read_line().decode(), m.read_line().decode()),  # GLOBAL
        b"\x93": lambda m: m.push_name(*m.pop_many(2)),  # STACK_GLOBAL
        b"R": lambda m: m.call(),  # REDUCE
        b"b": lambda m: m.build(),  # BUILD
    }.items()
}
