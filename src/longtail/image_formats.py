"""The image formats that files are decoded in. Whatever else Pillow knows is refused.

Pillow recognizes a file by its content, so that any file that is named photo.jpg may be of any of its formats. Some of these
start another program (Ghostscript for EPS) or are rarely used and rarely tested. Every call of `Image.open` on a file that
somebody else may have written therefore passes `formats`.
"""

import functools

IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "DIB", "GIF", "PPM", "TIFF", "WEBP", "JPEG2000")
"""Names of formats that every supported Pillow knows. "JPEG" includes MPO, which Pillow opens by the same name."""
OPTIONAL_FORMATS = ("AVIF",)
"""Names of formats that only some versions of Pillow know; `Image.open` raises a KeyError for an unknown name."""


@functools.cache
def supported_formats() -> tuple[str, ...]:
    """Return the formats of both lists that the installed Pillow knows, for the `formats` argument of `Image.open`."""
    from PIL import Image

    Image.init()
    return tuple(name for name in (*IMAGE_FORMATS, *OPTIONAL_FORMATS) if name in Image.OPEN)
