"""Reading members of a tar.gz archive from an untrusted source, within fixed limits and without writing any file.

A few bytes of such a file can expand to any amount of memory: a compressed stream of zeros, a file name of gigabytes, or
millions of empty members. Three limits prevent this: on the decompressed bytes, on the bytes of headers with their long names,
extended headers and maps of sparse files, and on the bytes of a member.
"""

import io
import posixpath
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from longtail import files

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
