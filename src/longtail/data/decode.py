"""From an image file's bytes to pixels: upright, eight bits a channel, three channels; what cannot be read is a BadImage."""

import contextlib
import errno
import io
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from longtail import files
from longtail.data.jpeg import is_plain
from longtail.data.lazy_images import ImageArray, IntArray, LazyImages, Read, StreamedImages
from longtail.errors import UnreadableImageError, UserError
from longtail.image_formats import supported_formats
from longtail.progress import track
from longtail.torchrun import read_world

if TYPE_CHECKING:
    from PIL import Image

ORIENTATION = 0x0112  # EXIF's tag; 1 is upright
AT_ONCE = 4  # images under way for each thread; each may have LARGEST_IMAGE bytes
LARGEST_IMAGE = 2**29  # bytes of a file; an uncompressed 8-bit image of the most pixels that PIL admits has fewer
FIX = "replace or remove it, or leave such images out with --data.on_error skip"
MOVING = ("GIF", "WEBP", "PNG", "AVIF")  # formats whose frames are an animation; those of others are pages, or views

_decoding_lock, _decoding_count = threading.Lock(), 0

T = TypeVar("T")


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
) -> LazyImages:
    """Of image files, wherever they lie; `place` is what an error calls one (its id, if not said)."""

    def read(indices: IntArray) -> Read:
        return decode_all(encoded, indices, image_size, skip, place or ids.__getitem__)

    return LazyImages(labels, class_names, ids, read, encoded, sizes, place)


def decode_all(
    encoded: Callable[[int], bytes], indices: IntArray, size: int, skip: bool, place: Callable[[int], object]
) -> Read:
    """The first bad image ends it, or where they are to be skipped each is told of."""
    images, bad = np.empty((len(indices), size, size, 3), np.uint8), dict[int, str]()
    order = np.argsort(indices, kind="stable")  # as they lie in their files
    with closing(in_threads(lambda index: decode(encoded(index), size), indices[order])) as every:
        for i, found in zip(order, track(every, len(order), "reading images"), strict=True):
            if not isinstance(found, BadImage):
                images[i] = found
            elif skip:
                bad[int(i)] = str(found)
            else:
                raise cannot_read(place(int(indices[i])), found)
    return Read(images, dict(sorted(bad.items())))


def in_threads(work: Callable[[int], T], indices: IntArray) -> Generator[T | BadImage]:
    """The work on each index, in order; a BadImage is a result like others. Few are under way: little is held in memory."""

    def one(index: int) -> T | BadImage:
        try:
            return work(index)
        except BadImage as error:
            return error

    # Threads suffice: PIL releases the interpreter lock while it decodes and resizes.
    workers = cores()
    with ThreadPoolExecutor(workers) as threads:
        waiting: deque[Future[T | BadImage]] = deque()
        try:
            for index in indices.tolist():
                if len(waiting) == AT_ONCE * workers:
                    yield waiting.popleft().result()
                waiting.append(threads.submit(one, index))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def cores() -> int:
    """Those that this process may use; those that torchrun has started on a machine share them."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(mine // read_world().local_size, 1)


def memory() -> int:
    """Bytes that this process may use, by the machine and by the group it is confined to; shared as the cores are."""
    every = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no group, or "max"
        every = min(every, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return every // read_world().local_size


def cannot_read(place: object, why: BadImage) -> UserError:
    return UserError(f"{_bad(place, why)}: {FIX}", kind="bad-image")


def _bad(place: object, why: BadImage) -> str:
    return f"cannot read the image {place} ({why})"


def read_file(path: str | Path) -> bytes:
    """Return the bytes of an image file: a regular file of at most LARGEST_IMAGE bytes; anything else is a BadImage."""
    try:
        return files.read_bytes(path, LARGEST_IMAGE)
    except MemoryError as error:
        raise UserError(
            f"memory is too short to read {path}: free some, or read with fewer --data.workers", kind="out-of-memory"
        ) from error
    except OSError as error:
        refuse_shortage(error)
        if error.errno != errno.ENOENT:
            raise BadImage(str(error.strerror)) from error
        raise BadImage("it is not a file" if os.path.lexists(path) else "there is no such file") from error


def refuse_shortage(error: OSError) -> None:
    """What the machine lacks is no fault of the image."""
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise UserError(
            f"{error.strerror}: raise the limit (ulimit -n), or free memory", kind="out-of-memory"
        ) from error


def decode(encoded: bytes, size: int) -> ImageArray:
    """The upright center square of the image, `size` pixels wide, as (size, size, 3)."""
    with opened(encoded) as image:
        image.draft(None, (2 * size, 2 * size))  # a large JPEG is decoded at a fraction of its size
        return center_square(image, size)


def center_square(image: "Image.Image", size: int) -> ImageArray:
    """Of an image that is open, as `decode` has it."""
    from PIL import Image, ImageOps

    return np.asarray(ImageOps.fit(upright(image), (size, size), Image.Resampling.BILINEAR))


def decode_whole(encoded: bytes, side: int) -> ImageArray:
    """The whole image, upright, (3, height, width); made smaller where it would not fit a square of `side` pixels.

    A plain JPEG goes through torchvision: there threads do not wait for one another, as they do here and there in PIL.
    """
    if is_plain(encoded, side):
        with contextlib.suppress(RuntimeError, ImportError):  # PIL reads it all the same, or says what is wrong with it
            return _by_torchvision(encoded)
    with opened(encoded) as image:
        share = min(side / max(image.width, image.height), 1)
        image.draft(None, (max(int(image.width * share), 1), max(int(image.height * share), 1)))
        return whole(image, side)


def whole(image: "Image.Image", side: int) -> ImageArray:
    """Of an image that is open, as `decode_whole` has it."""
    from PIL import Image

    smaller = upright(image)
    smaller.thumbnail((side, side), Image.Resampling.BILINEAR, reducing_gap=None)
    return np.asarray(smaller).transpose(2, 0, 1)


def decode_from(images: StreamedImages, index: int, side: int) -> ImageArray:
    """An image of a streamed source, as `decode_whole` has it."""
    with naming(images, index):
        return decode_whole(images.encoded(index), side)


@contextmanager
def naming(images: StreamedImages, index: int) -> Iterator[None]:
    """An error that says which image it was; several processes read different ones, and may fail alone."""
    try:
        yield
    except BadImage as error:
        raise UnreadableImageError(_bad(images.place(index), error), FIX) from error


def _by_torchvision(encoded: bytes) -> ImageArray:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    with torch.inference_mode():
        return decode_jpeg(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), ImageReadMode.RGB).numpy()


def unreadable(encoded: Callable[[int], bytes], indices: IntArray) -> dict[int, str]:
    """Which of these images cannot be read, and why; all of them are decoded for it."""
    with closing(in_threads(lambda index: probe_image(encoded(index)), indices)) as every:
        walk = zip(indices.tolist(), track(every, len(indices), "looking for bad images"), strict=True)
        return {index: str(found) for index, found in walk if isinstance(found, BadImage)}


BLOCK = 8  # rows; where a JPEG's data end too early decoders leave its last ones gray, and say nothing


class ImageInfo(NamedTuple):
    """What a file turns out to hold."""

    format: str
    mode: str
    width: int
    height: int
    moving: bool  # of several frames
    exif_rotated: bool  # by EXIF
    blank: bool  # of one color, or gray at its end


def probe_image(encoded: bytes) -> ImageInfo:
    """Decode the whole image, and say what it is."""
    with opened(encoded) as image:
        turned = image.getexif().get(ORIENTATION, 1) not in (0, 1)
        found = (image.format or "unknown", image.mode, image.width, image.height, _moves(image), turned)
        gray = image.format == "JPEG" and _ends_gray(image)
        return ImageInfo(*found, blank=gray or all(high - low <= 3 for low, high in _levels(upright(image))))


def _ends_gray(image: "Image.Image") -> bool:
    end = image.crop((0, max(image.height - BLOCK, 0), image.width, image.height)).convert("RGB")
    return all(low >= 126 and high <= 130 for low, high in _levels(end))


def _levels(image: "Image.Image") -> tuple[tuple[int, int], ...]:
    """The darkest and the brightest of each channel."""
    return cast(tuple[tuple[int, int], ...], image.getextrema())


def _moves(image: "Image.Image") -> bool:
    """Return whether there is a second frame; a damaged one is no fault, since only the first is used.

    `n_frames` would read all frames of a GIF, of which a small file can have millions.
    """
    try:
        return image.format in MOVING and bool(getattr(image, "is_animated", False))
    except Exception:  # decoders raise anything
        return True


@contextmanager
def ignore_pillow_warnings() -> Iterator[None]:
    """Ignore Pillow's warnings while any thread decodes. They do not name the file, and what matters is checked here.

    `warnings.catch_warnings` is not thread-safe: it would restore the filters of another thread. Therefore the first thread
    adds one filter, and the last one removes it.
    """
    global _decoding_count
    with _decoding_lock:
        if _decoding_count == 0:
            warnings.filterwarnings("ignore", module=r"PIL\..*")
        _decoding_count += 1
    try:
        yield
    finally:
        with _decoding_lock:
            _decoding_count -= 1
            if _decoding_count == 0:
                own = [f for f in warnings.filters if f[0] == "ignore" and getattr(f[3], "pattern", None) == r"PIL\..*"]
                for entry in own:
                    warnings.filters.remove(entry)  # type: ignore[attr-defined]


@contextmanager
def opened(encoded: bytes) -> "Iterator[Image.Image]":
    """The image of a file; anything that a decoder raises on a damaged one is a BadImage."""
    from PIL import Image, UnidentifiedImageError

    try:
        if not encoded:
            raise BadImage("the file is empty")
        with ignore_pillow_warnings(), Image.open(io.BytesIO(encoded), formats=supported_formats()) as image:
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

    return _eight_bit(ImageOps.exif_transpose(image), image.format).convert("RGB")


def _refuse_bomb(image: "Image.Image") -> None:
    """PIL itself only warns up to twice its limit."""
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS
    if limit and image.width * image.height > limit:
        raise BadImage(f"{image.width}x{image.height} pixels may be a decompression bomb")


def _eight_bit(image: "Image.Image", format: str | None) -> "Image.Image":
    """PIL clips deeper grays to white on conversion; 16 bits are scaled, and where the range is unknown we say so."""
    from PIL import Image

    if image.mode.startswith("I;16") or (format, image.mode) == ("PPM", "I"):  # a PGM, of 16 bits at most
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise BadImage(f"its pixels are 32-bit, mode {image.mode}; save it with 8 bits a channel")
    return image
