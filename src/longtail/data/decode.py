"""Decoding image files to upright RGB images with 8 bits per channel, in threads. Images that cannot be read raise BadImage.

Pillow detects the format from the content of a file, so that a file named photo.jpg can have any format. Some formats start
another program (Ghostscript for EPS), others are rarely used and rarely tested. Therefore every call of `Image.open` on a file
that other people may have written passes `formats`.

`is_plain` finds the JPEG files that fast decoders read exactly as Pillow does. On a GPU, torchvision's nvJPEG decodes them,
which is six times as fast as sixteen CPU cores (results/stream.json). Its pixels differ slightly from those of the CPU
decoder, because rounding and chroma upsampling differ; evaluation and prediction therefore always decode on the CPU. torch is
imported when a GPU decoder is asked for, so that commands that only read files start quickly.
"""

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
from longtail.data.lazy_images import DecodedImages, ImageArray, IntArray, LazyImages, StreamedImages
from longtail.errors import UnreadableImageError, UserError
from longtail.progress import track
from longtail.torchrun import read_world

if TYPE_CHECKING:
    from PIL import Image
import functools
import struct
from typing import TYPE_CHECKING

from longtail.config import Decoding

if TYPE_CHECKING:
    import torch
    from torch import Tensor


ORIENTATION = 0x0112  # the EXIF tag; 1 is upright
QUEUED_PER_THREAD = 4  # images; each may have MAX_IMAGE_BYTES
MAX_IMAGE_BYTES = 2**29  # of a file; an uncompressed 8-bit image with the most pixels that Pillow accepts is smaller
SKIP_HINT = "replace or remove it, or leave such images out with --data.on_error skip"
ASSUMED_MEMORY = 8 * 2**30  # bytes, on systems that do not tell how much they have
MAX_EXIF_SEGMENTS = 256  # of a JPEG; one is usual, and each image of an MPO file has its own
MAX_COMMENTS = 256  # of a PPM file with pixels in digits
MAX_PROFILES = 256  # color profiles of a PNG; one is allowed, and each is decompressed to up to a megabyte
ANIMATED_FORMATS = ("GIF", "WEBP", "PNG", "AVIF")  # frames of other formats are pages or views
LAST_ROWS = 8  # decoders fill the end of a truncated JPEG with gray, without an error

_decoding_lock, _decoding_count = threading.Lock(), 0

T = TypeVar("T")


class BadImage(Exception):
    """Raised for an image that cannot be read; the message gives the reason in a few words."""


def lazy_encoded_images(
    labels: IntArray,
    class_names: tuple[str, ...],
    ids: npt.NDArray[Any],
    read_encoded: Callable[[int], bytes],
    sizes: IntArray | None,
    image_size: int,
    skip: bool,
    describe: Callable[[int], object] | None = None,
) -> LazyImages:
    """Return lazy images of encoded files, in a folder or in shards.

    Args:
        labels: The label of each image.
        class_names: The names of the classes.
        ids: The id of each image.
        read_encoded: Returns the content of the file with the given index.
        sizes: The bytes of each file.
        image_size: The height and width, in pixels, of decoded images.
        skip: Leave out images that cannot be read, instead of raising UserError.
        describe: Returns what error messages call the image with the given index; the default is its id.
    """

    def read(indices: IntArray) -> DecodedImages:
        return decode_images(read_encoded, indices, image_size, skip, describe or ids.__getitem__)

    return LazyImages(labels, class_names, ids, read, read_encoded, sizes, describe)


def decode_images(
    read_encoded: Callable[[int], bytes], indices: IntArray, size: int, skip: bool, describe: Callable[[int], object]
) -> DecodedImages:
    """Decode the center squares of images; for the arguments, see `lazy_encoded_images`."""
    images, unreadable = np.empty((len(indices), size, size, 3), np.uint8), dict[int, str]()
    order = np.argsort(indices, kind="stable")  # the order in which they are stored
    with closing(map_in_threads(lambda index: decode_square(read_encoded(index), size), indices[order])) as results:
        for i, result in zip(order, track(results, len(order), "reading images"), strict=True):
            if not isinstance(result, BadImage):
                images[i] = result
            elif skip:
                unreadable[int(i)] = str(result)
            else:
                raise unreadable_image_error(describe(int(indices[i])), result)
    return DecodedImages(images, dict(sorted(unreadable.items())))


def map_in_threads(work: Callable[[int], T], indices: IntArray) -> Generator[T | BadImage]:
    """Yield `work(index)` for each index, in order; a BadImage that it raises is yielded.

    Only a few items are in progress at a time, to limit the memory.
    """

    def work_or_error(index: int) -> T | BadImage:
        try:
            return work(index)
        except BadImage as error:
            return error

    # Threads are enough: Pillow releases the interpreter lock while it decodes and resizes.
    workers = available_cores()
    with ThreadPoolExecutor(workers) as threads:
        waiting: deque[Future[T | BadImage]] = deque()
        try:
            for index in indices.tolist():
                if len(waiting) == QUEUED_PER_THREAD * workers:
                    yield waiting.popleft().result()
                waiting.append(threads.submit(work_or_error, index))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def available_cores() -> int:
    """Return the number of cores for this process; the processes that torchrun starts on a machine share its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // read_world().local_size, 1)


def machine_memory() -> int:
    """Return the memory of the machine in bytes; an assumption on systems without `sysconf`."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else ASSUMED_MEMORY


def available_memory() -> int:
    """Return the bytes of memory for this process, within the limit of its control group; shared as in `available_cores`."""
    memory = machine_memory()
    with contextlib.suppress(OSError, ValueError):  # no control group, or "max"
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory // read_world().local_size


def unreadable_image_error(image: object, reason: BadImage) -> UserError:
    """Return the error for an image, given by its path or id."""
    return UserError(f"{_describe_bad_image(image, reason)}: {SKIP_HINT}", kind="bad-image")


def _describe_bad_image(image: object, reason: BadImage) -> str:
    return f"cannot read the image {image} ({reason})"


def read_file(path: str | Path) -> bytes:
    """Return the content of an image file. Anything but a regular file of at most MAX_IMAGE_BYTES raises BadImage."""
    try:
        return files.read_bytes(path, MAX_IMAGE_BYTES)
    except MemoryError as error:
        raise UserError(
            f"not enough memory to read {path}: free some, or use fewer --data.workers", kind="out-of-memory"
        ) from error
    except OSError as error:
        raise_resource_shortage(error)
        if error.errno != errno.ENOENT:
            raise BadImage(str(error.strerror)) from error
        raise BadImage("it is not a file" if os.path.lexists(path) else "there is no such file") from error


def raise_resource_shortage(error: OSError) -> None:
    """Raise UserError if an error is due to a lack of memory or file descriptors, and not to the image."""
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise UserError(
            f"{error.strerror}: raise the limit of open files (ulimit -n), or free memory", kind="out-of-memory"
        ) from error


def decode_square(encoded: bytes, size: int) -> ImageArray:
    """Decode the upright center square of an image, resized to (size, size, 3)."""
    with open_image(encoded) as image:
        image.draft(None, (2 * size, 2 * size))  # a large JPEG is decoded at a fraction of its size
        return crop_center_square(image, size)


def crop_center_square(image: "Image.Image", size: int) -> ImageArray:
    """Return the upright center square of an open image; see `decode_square`."""
    from PIL import Image, ImageOps

    return np.asarray(ImageOps.fit(to_upright_rgb(image), (size, size), Image.Resampling.BILINEAR))


def decode_to_fit(encoded: bytes, side: int) -> ImageArray:
    """Decode a whole image, upright, as (3, height, width); it is shrunk if it exceeds a square of `side` pixels.

    Plain JPEGs are decoded by torchvision, in which threads do not block each other as they sometimes do in Pillow.
    """
    if is_plain(encoded, side):
        with contextlib.suppress(RuntimeError, ImportError):  # Pillow reads it anyway, or gives the reason
            return _decode_by_torchvision(encoded)
    with open_image(encoded) as image:
        scale = min(side / max(image.width, image.height), 1)
        image.draft(None, (max(int(image.width * scale), 1), max(int(image.height * scale), 1)))
        return shrink_to_fit(image, side)


def shrink_to_fit(image: "Image.Image", side: int) -> ImageArray:
    """Return an open image as an array (3, height, width); see `decode_to_fit`."""
    from PIL import Image

    smaller = to_upright_rgb(image)
    smaller.thumbnail((side, side), Image.Resampling.BILINEAR, reducing_gap=None)
    return np.asarray(smaller).transpose(2, 0, 1)


def decode_streamed(images: StreamedImages, index: int, side: int) -> ImageArray:
    """Decode an image of a streamed split; see `decode_to_fit`."""
    with bad_image_as_error(images, index):
        return decode_to_fit(images.read_encoded(index), side)


@contextmanager
def bad_image_as_error(images: StreamedImages, index: int) -> Iterator[None]:
    """Context manager that turns a BadImage into an error that names the image, for one process of several."""
    try:
        yield
    except BadImage as error:
        raise UnreadableImageError(_describe_bad_image(images.describe(index), error), SKIP_HINT) from error


def _decode_by_torchvision(encoded: bytes) -> ImageArray:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    with torch.inference_mode():
        return decode_jpeg(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), ImageReadMode.RGB).numpy()


def find_unreadable(read_encoded: Callable[[int], bytes], indices: IntArray) -> dict[int, str]:
    """Decode all images with these indices, and return those that cannot be read: index -> reason."""
    with closing(map_in_threads(lambda index: probe_image(read_encoded(index)), indices)) as results:
        tracked = track(results, len(indices), "looking for unreadable images")
        pairs = zip(indices.tolist(), tracked, strict=True)
        return {index: str(result) for index, result in pairs if isinstance(result, BadImage)}


class ImageInfo(NamedTuple):
    """The properties of an image file."""

    format: str
    mode: str  # of Pillow, such as "RGB"
    width: int
    height: int
    animated: bool
    exif_rotated: bool
    blank: bool  # of a single color, or gray at its end


def probe_image(encoded: bytes) -> ImageInfo:
    """Decode a whole image and return its properties."""
    with open_image(encoded) as image:
        exif_rotated = image.getexif().get(ORIENTATION, 1) not in (0, 1)
        format, mode, width, height, animated = image.format, image.mode, image.width, image.height, _is_animated(image)
        blank = (format == "JPEG" and _ends_gray(image)) or all(
            high - low <= 3 for low, high in _channel_ranges(to_upright_rgb(image))
        )
        return ImageInfo(format or "unknown", mode, width, height, animated, exif_rotated, blank)


def _ends_gray(image: "Image.Image") -> bool:
    end = image.crop((0, max(image.height - LAST_ROWS, 0), image.width, image.height)).convert("RGB")
    return all(low >= 126 and high <= 130 for low, high in _channel_ranges(end))


def _channel_ranges(image: "Image.Image") -> tuple[tuple[int, int], ...]:
    """Return the smallest and the largest value of each channel."""
    return cast(tuple[tuple[int, int], ...], image.getextrema())


def _is_animated(image: "Image.Image") -> bool:
    """Return whether there is a second frame, which may be damaged, since only the first is used.

    `n_frames` would read all frames of a GIF, of which a small file can have millions.
    """
    try:
        return image.format in ANIMATED_FORMATS and bool(getattr(image, "is_animated", False))
    except Exception:  # decoders may raise anything
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
def open_image(encoded: bytes) -> "Iterator[Image.Image]":
    """Context manager that opens an image. Any exception of a decoder, as for a damaged file, becomes a BadImage."""
    from PIL import Image

    with decoding_error_as_bad_image():
        if not encoded:
            raise BadImage("the file is empty")
        _check_repetitions(encoded)
        with ignore_pillow_warnings(), Image.open(io.BytesIO(encoded), formats=supported_formats()) as image:
            check_pixels(image)
            yield image


@contextmanager
def decoding_error_as_bad_image() -> Iterator[None]:
    """Context manager that turns any exception of a decoder into a BadImage."""
    from PIL import UnidentifiedImageError

    try:
        yield
    except BadImage:
        raise
    except UnidentifiedImageError as error:  # its message names an object in memory
        raise BadImage("it is not an image of a supported format") from error
    except Exception as error:  # decoders may raise anything
        raise BadImage(" ".join(str(error).split()) or type(error).__name__) from error


def to_upright_rgb(image: "Image.Image") -> "Image.Image":
    """Return the first frame in RGB, rotated according to EXIF."""
    from PIL import ImageOps

    return _to_eight_bits(ImageOps.exif_transpose(image), image.format).convert("RGB")


def _check_repetitions(encoded: bytes) -> None:
    """Raise BadImage for parts of a file for each of which Pillow copies all others again, or decompresses a megabyte."""
    if encoded.startswith(JPEG_START) and encoded.count(b"Exif\0\0") > MAX_EXIF_SEGMENTS:
        raise BadImage(f"it has more than {MAX_EXIF_SEGMENTS} EXIF segments")
    if encoded.startswith((b"P1", b"P2", b"P3")) and encoded.count(b"#") > MAX_COMMENTS:
        raise BadImage(f"it has more than {MAX_COMMENTS} comments")
    if encoded.startswith(b"\x89PNG") and encoded.count(b"iCCP") > MAX_PROFILES:
        raise BadImage(f"it has more than {MAX_PROFILES} color profiles")


def check_pixels(image: "Image.Image") -> None:
    """Raise BadImage for no pixels, or for more than Pillow's limit, up to twice of which Pillow only warns."""
    from PIL import Image

    if not image.width * image.height:
        raise BadImage("it has no pixels")
    limit = Image.MAX_IMAGE_PIXELS
    if limit and image.width * image.height > limit:
        raise BadImage(f"{image.width}x{image.height} pixels may be a decompression bomb")


def _to_eight_bits(image: "Image.Image", format: str | None) -> "Image.Image":
    """Return the image with at most 8 bits per channel.

    Pillow's conversion would clip grayscale images with more bits to white. 16 bits are scaled; 32-bit images, whose range is
    unknown, raise BadImage.
    """
    from PIL import Image

    if image.mode.startswith("I;16") or (format, image.mode) == ("PPM", "I"):  # a PGM, of 16 bits at most
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise BadImage(f"it has 32 bits per pixel, mode {image.mode}; save it with 8 bits per channel")
    return image


# JPEG headers


JPEG_START, JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # frame headers; the three excluded ones are tables
APPLICATION = 0xE1  # the marker of EXIF and XMP segments
SHORT = 3  # the type that the value of the EXIF tag ORIENTATION should have

Decoder = Callable[["list[Tensor]"], "list[Tensor]"]
"""A function that decodes JPEG files (bytes as uint8 tensors) to images (3, height, width) on its device.

It raises RuntimeError if it cannot decode them."""


class JpegHeader(NamedTuple):
    """The properties of a JPEG that its header segments contain."""

    height: int
    width: int
    channels: int
    bits: int
    orientation: int
    """EXIF orientation: 1 is upright, 0 is one that could not be parsed."""


def read_jpeg_header(encoded: bytes) -> JpegHeader | None:
    """Return the header of a JPEG, or None for other formats and for files that are damaged before their pixel data."""
    if not encoded.startswith(JPEG_START):
        return None
    position, orientation = 2, 1
    try:
        while True:
            prefix, marker, length = struct.unpack_from(">BBH", encoded, position)
            if prefix != 0xFF:
                return None
            if marker == 0xFF:  # padding
                position += 1
            elif marker in FRAME_MARKERS:
                bits, height, width, channels = struct.unpack_from(">BHHB", encoded, position + 4)
                return JpegHeader(height, width, channels, bits, orientation)
            else:
                if marker == APPLICATION and orientation == 1:
                    orientation = _read_orientation(encoded[position + 4 : position + 2 + length])
                position += 2 + length
    except struct.error:
        return None


def is_plain(encoded: bytes, side: int) -> bool:
    """Return whether a file is a JPEG that any decoder can read: upright, gray or three colors, 8 bits, not truncated.

    Its size must not exceed a square of `side` pixels, so that it does not have to be resized.
    """
    header = read_jpeg_header(encoded)
    return (
        header is not None
        and header.orientation == 1
        and header.channels in (1, 3)
        and header.bits == 8
        and max(header.height, header.width) <= side
        and encoded.endswith(JPEG_END)
    )


def _read_orientation(segment: bytes) -> int:
    if segment.startswith(b"Exif\0\0"):
        return _read_exif_orientation(segment[6:])
    return 0 if b"tiff:Orientation" in segment else 1  # XMP, which Pillow uses if EXIF has no orientation


def _read_exif_orientation(tiff: bytes) -> int:
    """Return the orientation from the first directory of the TIFF structure that EXIF contains."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return 0
    try:
        (directory,) = struct.unpack_from(f"{order}I", tiff, 4)
        (entries,) = struct.unpack_from(f"{order}H", tiff, directory)
        for entry in range(entries):
            tag, kind, value = struct.unpack_from(f"{order}HH4xH", tiff, directory + 2 + 12 * entry)
            if tag == ORIENTATION:
                return (value or 1) if kind == SHORT else 0
    except struct.error:
        return 0
    return 1


# Decoding on a GPU


def make_decoder(device: "torch.device", setting: Decoding) -> Decoder | None:
    """Return the decoder for `--data.decode`, or None if images are decoded on the CPU."""
    if setting == "cpu" or (setting == "auto" and device.type != "cuda"):
        return None
    if device.type == "cuda" and _is_decoder_available(device):
        return functools.partial(_decode_on_gpu, device=device)
    if setting == "gpu":
        raise UserError(
            "--data.decode gpu needs a CUDA device and a torchvision with nvJPEG: use --data.decode auto",
            kind="conflict",
        )
    return None


@functools.cache
def _is_decoder_available(device: "torch.device") -> bool:
    """Decode a small image to find out whether torchvision was built with nvJPEG and still has its decoders."""
    import torch

    try:
        from torchvision.io import encode_jpeg

        gray = torch.full((3, 16, 16), 128, dtype=torch.uint8)
        return (_decode_on_gpu([encode_jpeg(gray)], device)[0].int() - 128).abs().max().item() <= 1
    except (ImportError, AttributeError, RuntimeError):
        return False


def _decode_on_gpu(encoded: "list[Tensor]", device: "torch.device") -> "list[Tensor]":
    """Decode on the current stream, after waiting for it.

    nvJPEG writes on a stream of its own and does not check whether the memory that it gets is still being read on the current
    one (https://github.com/pytorch/vision/pull/9606).
    """
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    torch.cuda.current_stream(device).synchronize()
    return decode_jpeg(encoded, ImageReadMode.RGB, device=device)


# Formats


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
