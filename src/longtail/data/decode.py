"""From an image file's bytes to pixels: upright, eight bits a channel, three channels; what cannot be read is a BadImage."""

import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longtail.data.pool import ImageArray, IntArray, Pool, Read
from longtail.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

ORIENTATION = 0x0112  # EXIF's tag; 1 is upright


class BadImage(Exception):
    """Why an image cannot be read, in a few words."""


def encoded_pool(
    labels: IntArray,
    class_names: tuple[str, ...],
    ids: npt.NDArray[Any],
    encoded: Callable[[int], bytes],
    sizes: IntArray | None,
    image_size: int,
    skip: bool,
    place: Callable[[int], object] | None = None,
) -> Pool:
    """Of image files, wherever they lie; `place` is what an error calls one (its id, if not said)."""

    def read(indices: IntArray) -> Read:
        return decode_all(encoded, indices, image_size, skip, place or ids.__getitem__)

    return Pool(labels, class_names, ids, read, encoded, sizes)


def decode_all(
    encoded: Callable[[int], bytes], indices: IntArray, size: int, skip: bool, place: Callable[[int], object]
) -> Read:
    """The first bad image ends it, or where they are to be skipped each is told of."""
    images, bad = np.empty((len(indices), size, size, 3), np.uint8), dict[int, str]()

    def one(index: int) -> ImageArray | BadImage:
        try:
            return decode(encoded(index), size)
        except BadImage as error:
            return error

    # Threads suffice: PIL releases the interpreter lock while it decodes and resizes.
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for i, found in enumerate(threads.map(one, indices.tolist())):
            if not isinstance(found, BadImage):
                images[i] = found
            elif skip:
                bad[i] = str(found)
            else:
                threads.shutdown(cancel_futures=True)
                fix = "replace or remove it, or leave such images out with --data.on_error skip"
                raise UserError(f"cannot read the image {place(int(indices[i]))} ({found}): {fix}")
    return Read(images, bad)


def read_file(path: Path) -> bytes:
    if not path.is_file():  # a dead link, or a pipe that would be waited on for ever
        raise BadImage("it is not a file" if os.path.lexists(path) else "there is no such file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadImage(str(error.strerror)) from error


def decode(encoded: bytes, size: int) -> ImageArray:
    """The upright centre square of the image, `size` pixels wide, as (size, size, 3)."""
    from PIL import Image, ImageOps

    with opened(encoded) as image:
        image.draft(None, (2 * size, 2 * size))  # a large JPEG is decoded at a fraction of its size
        square = ImageOps.fit(upright(image), (size, size), Image.Resampling.BILINEAR)
        return np.asarray(square)


class Look(NamedTuple):
    """What a file turns out to hold."""

    format: str
    mode: str
    width: int
    height: int
    frames: int
    turned: bool  # by EXIF


def look(encoded: bytes) -> Look:
    """Decode the whole image, and say what it is."""
    with opened(encoded) as image:
        turned = image.getexif().get(ORIENTATION, 1) not in (0, 1)
        frames = getattr(image, "n_frames", 1)
        found = Look(image.format or "unknown", image.mode, image.width, image.height, frames, turned)
        upright(image)
        return found


@contextmanager
def opened(encoded: bytes) -> "Iterator[Image.Image]":
    """The image of a file; anything that a decoder raises on a damaged one is a BadImage."""
    from PIL import Image, UnidentifiedImageError

    try:
        if not encoded:
            raise BadImage("the file is empty")
        with Image.open(io.BytesIO(encoded)) as image:
            _refuse_bomb(image)
            yield image
    except BadImage:
        raise
    except UnidentifiedImageError as error:  # its words name an object in memory
        raise BadImage("it is no image of a known format") from error
    except Exception as error:  # decoders raise anything
        raise BadImage(" ".join(str(error).split()) or type(error).__name__) from error


def upright(image: "Image.Image") -> "Image.Image":
    """The first frame as its camera meant it, in RGB."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(_eight_bit(image)).convert("RGB")


def _refuse_bomb(image: "Image.Image") -> None:
    """PIL itself only warns up to twice its limit."""
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS
    if limit and image.width * image.height > limit:
        raise BadImage(f"{image.width}x{image.height} pixels may be a decompression bomb")


def _eight_bit(image: "Image.Image") -> "Image.Image":
    """PIL clips deeper greys to white on conversion; 16 bits are scaled, and where the range is unknown we say so."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise BadImage(f"its pixels are 32-bit, mode {image.mode}; save it with 8 bits a channel")
    return image
