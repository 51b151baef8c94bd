"""What a JPEG says of itself before its pixels: enough to know whether a plain, fast decoder will do."""

import struct
from typing import NamedTuple

START, END = b"\xff\xd8\xff", b"\xff\xd9"
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of frame headers; these three are tables
APPLICATION = 0xE1  # the marker of what EXIF and XMP have to say
ORIENTATION, SHORT = 0x0112, 3  # EXIF's tag, and the type that its value should have


class Header(NamedTuple):
    height: int
    width: int
    channels: int
    bits: int
    orientation: int
    """As EXIF has it: 1 is upright; 0 stands for one that is not made out here."""


def read_header(encoded: bytes) -> Header | None:
    """None for other formats, and for what is damaged before its pixels begin."""
    if not encoded.startswith(START):
        return None
    at, orientation = 2, 1
    try:
        while True:
            mark, kind, length = struct.unpack_from(">BBH", encoded, at)
            if mark != 0xFF:
                return None
            if kind == 0xFF:  # padding
                at += 1
            elif kind in FRAMES:
                bits, height, width, channels = struct.unpack_from(">BHHB", encoded, at + 4)
                return Header(height, width, channels, bits, orientation)
            else:
                if kind == APPLICATION and orientation == 1:
                    orientation = _orientation(encoded[at + 4 : at + 2 + length])
                at += 2 + length
    except struct.error:
        return None


def is_plain(encoded: bytes, side: int) -> bool:
    """Upright, gray or three colors, eight bits, whole by its last bytes, and not larger than a square of `side` pixels."""
    header = read_header(encoded)
    return (
        header is not None
        and header.orientation == 1
        and header.channels in (1, 3)
        and header.bits == 8
        and max(header.height, header.width) <= side
        and encoded.endswith(END)
    )


def _orientation(segment: bytes) -> int:
    if segment.startswith(b"Exif\0\0"):
        return _in_exif(segment[6:])
    return 0 if b"tiff:Orientation" in segment else 1  # XMP, which PIL goes by where EXIF is silent


def _in_exif(tiff: bytes) -> int:
    """The tag in the first directory of what EXIF embeds, a TIFF."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return 0
    try:
        (first,) = struct.unpack_from(f"{order}I", tiff, 4)
        (entries,) = struct.unpack_from(f"{order}H", tiff, first)
        for entry in range(entries):
            tag, kind, value = struct.unpack_from(f"{order}HH4xH", tiff, first + 2 + 12 * entry)
            if tag == ORIENTATION:
                return (value or 1) if kind == SHORT else 0
    except struct.error:
        return 0
    return 1
