"""Sizes of the pages of a parquet column, from their headers.

The footer of a parquet file gives the size of each column, but pyarrow allocates what the header of each page says. A file
whose footer and headers contradict each other can therefore take any amount of memory. The headers are structs in Thrift's
compact protocol (https://github.com/apache/parquet-format).
"""

from typing import Any, BinaryIO

USUAL_HEADER, LARGEST_HEADER = 2**16, 2**24  # bytes; statistics may hold whole values. pyarrow has the second limit too
DEEPEST = 8  # structs and lists in one another
DATA, DATA_2 = 0, 3  # types of a page with values; the others are dictionaries and indexes
TYPE, UNCOMPRESSED, COMPRESSED = 1, 2, 3  # fields of a header
VALUES = {DATA: 5, DATA_2: 8}  # field of a header whose first field is the number of values, by type


def expanded_size(file: BinaryIO, chunk: Any) -> int:
    """Return the bytes of all pages of a column of a row group after decompression.

    Args:
        file: The parquet file.
        chunk: The `pyarrow.parquet.ColumnChunkMetaData` of the column.

    Raises:
        ValueError: The headers are damaged, or do not have as many values as the footer says.
    """
    starts = [chunk.data_page_offset]
    if chunk.dictionary_page_offset and chunk.dictionary_page_offset > 0:
        starts.append(chunk.dictionary_page_offset)
    position = min(starts)
    end, size, values = position + chunk.total_compressed_size, 0, 0
    while values < chunk.num_values:
        if not 0 <= position < end:
            raise ValueError("a column has fewer values than the file says")
        length, fields = read_header(file, position, end)
        kind, uncompressed, compressed = (fields.get(key) for key in (TYPE, UNCOMPRESSED, COMPRESSED))
        if not (type(kind) is type(uncompressed) is type(compressed) is int) or min(uncompressed, compressed) < 0:
            raise ValueError("the header of a page is damaged")
        if kind in VALUES:
            found = fields.get(VALUES[kind])
            count = found.get(1) if isinstance(found, dict) else None
            if type(count) is not int or count < 0:
                raise ValueError("the header of a page is damaged")
            values += count
        size += uncompressed
        position += length + compressed
    return size


def read_header(file: BinaryIO, start: int, end: int) -> tuple[int, dict[int, Any]]:
    """Return the length and the fields of the header of a page."""
    for limit in (USUAL_HEADER, LARGEST_HEADER):
        file.seek(start)
        header = Compact(file.read(min(limit, end - start)))
        try:
            fields = header.struct()
            return header.at, fields
        except ValueError:
            if limit == LARGEST_HEADER or end - start <= limit:
                raise
    raise AssertionError


class Compact:
    """A reader of Thrift's compact protocol. Structs become dictionaries by field number; text and lists are skipped."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def byte(self) -> int:
        if self.at >= len(self.content):
            raise ValueError("the header of a page is damaged")
        self.at += 1
        return self.content[self.at - 1]

    def skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.content):
            raise ValueError("the header of a page is damaged")

    def varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("the header of a page is damaged")

    def integer(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)  # zigzag

    def struct(self, depth: int = 0) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.integer()
            if number in fields:
                raise ValueError("the header of a page is damaged")
            kind = head & 0xF
            fields[number] = kind == 1 if kind in (1, 2) else self.value(kind, depth)
        return fields

    def value(self, kind: int, depth: int) -> Any:
        """Return an integer or a struct, and None for other values."""
        if depth > DEEPEST:
            raise ValueError("the header of a page is damaged")
        match kind:
            case 1 | 2 | 3:  # booleans in a list, bytes
                self.byte()
            case 4 | 5 | 6:
                return self.integer()
            case 7:
                self.skip(8)
            case 8:
                self.skip(self.varint())
            case 9 | 10:
                head = self.byte()
                for _ in range(self.varint() if head >> 4 == 15 else head >> 4):
                    self.value(head & 0xF, depth + 1)
            case 12:
                return self.struct(depth + 1)
            case _:
                raise ValueError("the header of a page is damaged")
        return None
