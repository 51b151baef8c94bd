"""The image formats that are decoded. All other formats that Pillow supports are refused.

Pillow detects the format from the content of a file, so that a file named photo.jpg can have any format. Some formats start
another program (Ghostscript for EPS), others are rarely used and rarely tested. Therefore every call of `Image.open` on a file
that other people may have written passes `formats`.
"""

import functools

IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "DIB", "GIF", "PPM", "TIFF", "WEBP", "JPEG2000")
"""Formats that all supported versions of Pillow have. "JPEG" includes MPO, which Pillow opens under the same name."""
OPTIONAL_FORMATS = ("AVIF",)
"""Formats that only some versions of Pillow have; `Image.open` raises a KeyError for an unknown format."""


@functools.cache
def supported_formats() -> tuple[str, ...]:
    """Return the formats of both lists that the installed Pillow supports, for the `formats` argument of `Image.open`."""
    from PIL import Image

    Image.init()
    return tuple(name for name in (*IMAGE_FORMATS, *OPTIONAL_FORMATS) if name in Image.OPEN)
