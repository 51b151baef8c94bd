"""Image files of every kind for tests: readable and unreadable ones."""

import functools
import struct
import zlib

import numpy as np
from PIL import Image

NOISE = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def good_files(folder):
    """Write unusual readable images; return the decoded pixel of the upper left corner by file name, None for any."""
    red = Image.new("RGB", (30, 20), (255, 0, 0))
    red.save(folder / "plain.png")
    red.convert("CMYK").save(folder / "cmyk.jpg", quality=100)
    Image.fromarray(np.full((20, 30), 0x8000, np.uint16)).save(folder / "deep.png")  # 16 bits
    Image.fromarray(np.full((20, 30), 0x8000, np.int32)).save(folder / "deep.pgm")
    (folder / "plain.pgm").write_text("P2 30 20 1023\n" + "512 " * 600)  # ten bits, in digits
    Image.new("L", (30, 20), 77).save(folder / "gray.png")
    red.save(folder / "animated.gif", save_all=True, append_images=[Image.new("RGB", (30, 20), (0, 0, 255))])
    Image.new("RGB", (30, 20), (0, 255, 0)).save(folder / "other.png.bmp", "PNG")  # not what its name says
    turned = Image.fromarray(np.repeat(np.array([[[255] * 3], [[0] * 3]], np.uint8), 30, 1).repeat(15, 0))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    turned.save(folder / "turned.jpg", quality=100, exif=exif)
    deep = Image.fromarray(np.array(turned.convert("L"), np.uint16) * 257)
    deep.save(folder / "deep turned.png", exif=exif)
    pages = [red, Image.new("RGB", (30, 20), (0, 0, 255))]
    pages[0].save(folder / "pages.tif", save_all=True, append_images=pages[1:])
    return {
        "plain.png": (255, 0, 0),
        "cmyk.jpg": (254, 0, 0),
        "deep.png": (128, 128, 128),
        "deep.pgm": (128, 128, 128),
        "plain.pgm": (128, 128, 128),
        "gray.png": (77, 77, 77),
        "animated.gif": (255, 0, 0),
        "other.png.bmp": (0, 255, 0),
        "turned.jpg": (0, 0, 0),
        "deep turned.png": (0, 0, 0),
        "pages.tif": (255, 0, 0),
    }


@functools.cache
def black_png(side: int) -> bytes:
    """Return a black PNG with one bit per pixel; PIL would take much longer to write it."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    pixels = zlib.compress(bytes((1 + (side + 7) // 8) * side), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def bad_files(folder):
    """Write unreadable images; return a part of the expected reason by file name, empty for reasons given by a decoder."""
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.jpg").write_bytes(b"<html>not found</html>")
    Image.fromarray(NOISE).save(folder / "cut.png")
    (folder / "cut.png").write_bytes((folder / "cut.png").read_bytes()[:900])
    Image.fromarray(NOISE).save(folder / "short.jpg")
    (folder / "short.jpg").write_bytes((folder / "short.jpg").read_bytes()[:600])
    (folder / "huge.png").write_bytes(black_png(20_000))
    Image.fromarray(np.ones((20, 30), np.float32)).save(folder / "float.tif")
    Image.fromarray(np.full((20, 30), 0x8000, np.int32)).save(folder / "deep.tif")
    (folder / "float.pgm").write_bytes(b"Pf 30 20 -1.0\n" + np.ones(600, "<f4").tobytes())
    (folder / "dead.png").symlink_to(folder / "gone.png")
    return {
        "empty.jpg": "the file is empty",
        "text.jpg": "supported format",
        "cut.png": "",
        "short.jpg": "",
        "huge.png": "decompression bomb",
        "float.tif": "32 bits",
        "deep.tif": "mode I",
        "float.pgm": "mode F",
        "dead.png": "it is not a file",
    }
