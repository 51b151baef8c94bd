"""Members of a tar.gz archive that somebody else may have written, read within fixed limits and without unpacking anything.

A few bytes of such a file can promise any amount of memory: a compressed stream of zeros, a long file name of gigabytes, or
millions of empty members. Three limits bound all of these: the decompressed bytes, the bytes of headers and of what belongs to
them (long names, extended headers, maps of sparse files), and the bytes of a member.
"""

import io
import posixpath
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from longtail import files

TOTAL = 2**30  # decompressed bytes of an archive
HEADERS = 2**20  # bytes of all headers of an archive; a member without a long name has 512
BLOCK = 2**20  # bytes that are read at once


def read_members(path: Path, wanted: Mapping[str, str], largest: int) -> dict[str, bytes]:
    """Return the contents of regular members by the names that `wanted` has for their paths in the archive.

    Members that are absent from the archive are absent from the result. An archive that is damaged, that exceeds the limits, or
    that has a wanted member of more than `largest` bytes raises tarfile.TarError, or whatever `tarfile` raises on it.
    """
    contents: dict[str, bytes] = {}
    with files.open_regular(path) as file:
        stream = ForwardStream(io.BufferedReader(GzipStream(file), BLOCK))
        with tarfile.open(fileobj=stream, mode="r:") as tar:  # type: ignore[call-overload]
            while member := tar.next():
                tar.members = []  # which would grow with every member
                name = wanted.get(posixpath.normpath(member.name))
                if name and member.size > largest:
                    raise tarfile.TarError(f"{name} would have {member.size:,} bytes")
                if name and member.isreg() and not member.issparse():
                    contents[name] = stream.read_data(member.offset_data, member.size)
    return contents


class GzipStream(io.RawIOBase):
    """The decompressed content of a gzip file with one stream. Memory does not depend on how far it expands."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self.file = file
        self.decompressor = zlib.decompressobj(wbits=31)  # 31: in gzip format, with a check of its CRC

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
    """A stream that `tarfile` reads headers from: it only moves forward, and counts what is read.

    All that is read by `read` counts as headers, up to HEADERS bytes; the contents of members are skipped by `seek` or read by
    `read_data`. All together may have TOTAL bytes.
    """

    def __init__(self, stream: io.BufferedReader) -> None:
        self.stream, self.position, self.headers = stream, 0, 0

    def tell(self) -> int:
        return self.position

    def read(self, size: int) -> bytes:
        self.headers += size
        if not 0 <= size <= HEADERS or self.headers > HEADERS:
            raise tarfile.TarError(f"its headers have more than {HEADERS:,} bytes")
        return self._take(size)

    def seek(self, position: int) -> None:
        if position < self.position:
            raise tarfile.TarError("a member has a negative size")
        while self.position < position and self._take(min(position - self.position, BLOCK)):
            pass

    def read_data(self, start: int, size: int) -> bytes:
        """Return `size` bytes from `start` on."""
        self.seek(start)
        content = bytearray()
        while len(content) < size:
            found = self._take(min(size - len(content), BLOCK))
            if not found:
                raise tarfile.TarError("the archive ends too early")
            content += found
        return bytes(content)

    def _take(self, size: int) -> bytes:
        if self.position + size > TOTAL:
            raise tarfile.TarError(f"it has more than {TOTAL:,} bytes when decompressed")
        found = self.stream.read(size)
        self.position += len(found)
        return found
