"""The sizes of the pages of a parquet column, from their headers.

The footer of a parquet file has the size of each column, but pyarrow allocates the size in the header of each page. A file
whose footer and page headers contradict each other can therefore take any amount of memory. The headers are structs in Thrift's
compact protocol (https://github.com/apache/parquet-format).
"""

from typing import Any, BinaryIO

USUAL_HEADER_BYTES = 2**16
MAX_HEADER_BYTES = 2**24  # statistics may contain whole values; pyarrow has the same limit
MAX_DEPTH = 8  # of nested structs and lists
DATA, DATA_2 = 0, 3  # types of pages with values; the others are dictionaries and indexes
TYPE, UNCOMPRESSED, COMPRESSED = 1, 2, 3  # fields of a header
VALUES = {DATA: 5, DATA_2: 8}  # field of a header whose first field is the number of values, by type


def decompressed_size(file: BinaryIO, chunk: Any) -> int:
    """Return the bytes of all pages of a column of a row group after decompression.

    Args:
        file: The parquet file.
        chunk: The `pyarrow.parquet.ColumnChunkMetaData` of the column.

    Raises:
        ValueError: The headers are damaged, or have fewer values than the footer declares.
    """
    starts = [chunk.data_page_offset]
    if chunk.dictionary_page_offset and chunk.dictionary_page_offset > 0:
        starts.append(chunk.dictionary_page_offset)
    position = min(starts)
    end, size, values = position + chunk.total_compressed_size, 0, 0
    while values < chunk.num_values:
        if not 0 <= position < end:
            raise ValueError("a column has fewer values than the file declares")
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
    for limit in (USUAL_HEADER_BYTES, MAX_HEADER_BYTES):
        file.seek(start)
        header = CompactReader(file.read(min(limit, end - start)))
        try:
            fields = header.read_struct()
            return header.position, fields
        except ValueError:
            if limit == MAX_HEADER_BYTES or end - start <= limit:
                raise
    raise AssertionError


class CompactReader:
    """A reader of Thrift's compact protocol. Structs become dictionaries by field number; text and lists are skipped."""

    def __init__(self, content: bytes) -> None:
        self.content, self.position = content, 0

    def read_byte(self) -> int:
        if self.position >= len(self.content):
            raise ValueError("the header of a page is damaged")
        self.position += 1
        return self.content[self.position - 1]

    def skip(self, size: int) -> None:
        self.position += size
        if self.position > len(self.content):
            raise ValueError("the header of a page is damaged")

    def read_varint(self) -> int:
        """Return an unsigned integer of variable length."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.read_byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("the header of a page is damaged")

    def read_integer(self) -> int:
        """Return a signed integer of variable length."""
        value = self.read_varint()
        return (value >> 1) ^ -(value & 1)  # zigzag

    def read_struct(self, depth: int = 0) -> dict[int, Any]:
        """Return the fields of a struct by their numbers."""
        fields: dict[int, Any] = {}
        number = 0
        while head := self.read_byte():
            number = number + (head >> 4) if head >> 4 else self.read_integer()
            if number in fields:
                raise ValueError("the header of a page is damaged")
            kind = head & 0xF
            fields[number] = kind == 1 if kind in (1, 2) else self.read_value(kind, depth)
        return fields

    def read_value(self, kind: int, depth: int) -> Any:
        """Return an integer or a struct, and None for other values."""
        if depth > MAX_DEPTH:
            raise ValueError("the header of a page is damaged")
        match kind:
            case 1 | 2 | 3:  # booleans in a list, bytes
                self.read_byte()
            case 4 | 5 | 6:
                return self.read_integer()
            case 7:
                self.skip(8)
            case 8:
                self.skip(self.read_varint())
            case 9 | 10:
                head = self.read_byte()
                for _ in range(self.read_varint() if head >> 4 == 15 else head >> 4):
                    self.read_value(head & 0xF, depth + 1)
            case 12:
                return self.read_struct(depth + 1)
            case _:
                raise ValueError("the header of a page is damaged")
        return None
