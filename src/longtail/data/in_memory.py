"""Images that are passed from Python: arrays, tensors, lists of files, data frames, and data sets of torch and Hugging Face.

`read_memory` converts all of them to `InMemoryData`. Within `use_memory`, the data set with the name "memory" consists of these
images. pandas, torch and datasets are recognized only if they are imported already, so that this module needs none of them.
"""

import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longtail.data.decode import (
    BadImage,
    check_pixels,
    decoding_error_as_bad_image,
    lazy_encoded_images,
    map_in_threads,
    read_file,
    to_upright_rgb,
)
from longtail.data.folder import EVALUATION_NAMES, lazy_image_files, split_off_evaluation
from longtail.data.lazy_images import (
    ImageArray,
    IntArray,
    LazyImages,
    RawDataset,
    check_last_label,
    check_text,
    empty_class_notes,
)
from longtail.errors import UserError
from longtail.progress import track
from longtail.recipes import IN_MEMORY
from longtail.text import pluralize, preview

if TYPE_CHECKING:
    from PIL import Image


KINDS = (
    "a tuple (images, labels), a tuple (paths, labels), a pandas DataFrame, a torch Dataset, or a Hugging Face Dataset"
)
IMAGE_COLUMNS = ("path", "image")
LABEL_COLUMN = "label"
DETERMINISM_CHECKS = 8  # images that are read twice
NAME = "memory"

_current: ContextVar["InMemoryData | None"] = ContextVar("images in memory", default=None)


class EncodedImages(NamedTuple):
    """Images whose files are created or stored in memory."""

    read_encoded: Callable[[int], bytes]
    digests: npt.NDArray[np.str_]
    sizes: IntArray


class LabeledImages(NamedTuple):
    """Images and their labels as the user passed them: integers or names."""

    images: EncodedImages | list[Path]
    labels: list[Any]
    class_names: tuple[str, ...] | None = None
    """The names of integer labels, if they are known."""


@dataclass(frozen=True, eq=False)
class InMemoryData:
    """Training images, and test images if there are any, with the index of their classes."""

    train: LabeledImages
    test: LabeledImages | None
    class_names: tuple[str, ...]
    index_of: dict[Any, int]
    """The index of the class of each label."""

    def open(self, image_size: int, skip: bool) -> RawDataset:
        """Open the images as a data set, without decoding any.

        Args:
            image_size: The height and width, in pixels, of decoded images.
            skip: Leave out files that cannot be read.
        """
        parts = [part for part in (self.train, self.test) if part is not None]
        root = find_common_folder([path for part in parts if isinstance(part.images, list) for path in part.images])
        train, *tests = (self._open_part(part, root, image_size, skip) for part in parts)
        if not tests:
            return split_off_evaluation(NAME, train, "no test images were given")
        notes = empty_class_notes(self.class_names, train.counts, tests[0].counts, "evaluation", is_separate=True)
        return RawDataset(NAME, train, tests[0], int(train.counts.max()), tuple(notes))

    def _open_part(self, part: LabeledImages, root: Path, size: int, skip: bool) -> LazyImages:
        labels, images = np.array([self.index_of[label] for label in part.labels], np.int64), part.images
        if isinstance(images, list):
            ids = [path.relative_to(root).as_posix() for path in images]
            return lazy_image_files(root, ids, labels, self.class_names, size, skip)
        numbers = np.arange(len(labels))
        found = lazy_encoded_images(labels, self.class_names, numbers, images.read_encoded, images.sizes, size, skip)
        return replace(found, digests=images.digests)


@contextlib.contextmanager
def use_memory(data: InMemoryData | None) -> Iterator[None]:
    """Let the data set with the name "memory" consist of these images within the context."""
    token = _current.set(data)
    try:
        yield
    finally:
        _current.reset(token)


def find_memory() -> InMemoryData:
    """Return the images of the present context; raise UserError if there are none."""
    data = _current.get()
    if data is None:
        raise UserError(
            "the images of this run were passed from Python and are not stored: pass the same images to longtail.train, "
            "with resume=True to continue the run",
            kind="missing-file",
        )
    return data


# Reading


@contextlib.contextmanager
def name_images(data: Any, test: Any = None) -> Iterator[str | Path]:
    """Yield the name by which recipes find images: a recipe or a path itself, or `IN_MEMORY`, which is valid in the context.

    Args:
        data: A recipe, a path, or images in memory; see `read_memory`.
        test: Test images in memory.
    """
    if not isinstance(data, str | Path):
        with use_memory(read_memory(data, test)):
            yield IN_MEMORY
    elif test is None:
        yield data
    else:
        raise UserError(
            f"test is given, but {data} is a recipe or a path: put the test images into its folder test/, or give them with "
            "--data.test_list",
            kind="conflict",
        )


def read_memory(data: Any, test: Any = None) -> InMemoryData:
    """Read labels and compute digests of images that are passed from Python.

    Args:
        data: The training images; see `KINDS`. A Hugging Face DatasetDict may contain the test images too.
        test: The test images, of any of the same kinds; None: a fifth of each class is used for evaluation.

    Raises:
        UserError: The images have an unknown type, cannot be read, or do not match their labels.
    """
    if is_instance(data, "datasets", "DatasetDict"):
        data, found = split_dataset_dict(data)
        test = found if test is None else test
    train = read_part(data, "data")
    tests = None if test is None else read_part(test, "test")
    names, index_of = find_classes(train)
    unknown = [label for label in (tests.labels if tests else ()) if label not in index_of]
    if unknown:
        raise UserError(
            f"test has the label {unknown[0]!r}, which is not one of the {len(names)} classes of the training images: use the "
            "same labels",
            kind="bad-labels",
        )
    return InMemoryData(train, tests, names, index_of)


def read_part(data: Any, argument: str) -> LabeledImages:
    """Return the images of one split with their labels.

    Args:
        data: The images; see `KINDS`.
        argument: The name of the argument, for messages.
    """
    if isinstance(data, tuple) and len(data) == 2:
        part = pair_images(*data, argument)
    elif is_instance(data, "pandas", "DataFrame"):
        part = read_frame(data, argument)
    elif is_instance(data, "datasets", "Dataset"):
        part = read_hugging_face(data, argument)
    elif is_instance(data, "torch.utils.data", "Dataset") and hasattr(data, "__len__"):
        part = read_torch(data, argument)
    else:
        raise UserError(f"{argument} has the type {type(data).__name__}: give a path, a recipe, {KINDS}")
    return part


def is_instance(value: Any, module: str, name: str) -> bool:
    """Return whether a value is an instance of a class, without importing its module.

    Args:
        value: The value.
        module: The module of the class.
        name: The name of the class.
    """
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def pair_images(images: Any, labels: Any, argument: str) -> LabeledImages:
    """Return images, or paths of images, with labels of the same number.

    Args:
        images: A sequence of paths or pictures, or an array or tensor of pictures.
        labels: A sequence, array or tensor of integers or names.
        argument: The name of the argument, for messages.
    """
    found = list_labels(labels, argument)
    try:
        count = len(images)
    except (TypeError, RuntimeError) as error:  # RuntimeError: a nested tensor
        raise UserError(
            f"{argument} has images of the type {type(images).__name__}: give an array, a tensor or a list"
        ) from error
    check_counts(count, len(found), argument)
    items: Sequence[Any] = images if isinstance(images, np.ndarray) or hasattr(images, "movedim") else list(images)
    if isinstance(items[0], str | Path):
        return LabeledImages(check_files(items, argument), found)
    return LabeledImages(encode_pictures(items.__getitem__, count, argument), found)


def check_counts(images: int, labels: int, argument: str) -> None:
    """Raise UserError unless there are images, and as many labels.

    Args:
        images: The number of images.
        labels: The number of labels.
        argument: The name of the argument, for messages.
    """
    if images != labels:
        raise UserError(
            f"{argument} has {pluralize(images, 'image')} but {pluralize(labels, 'label')}: give one label for each image",
            kind="bad-labels",
        )
    if not images:
        raise UserError(f"{argument} has no images", kind="too-few-data")


def list_labels(labels: Any, argument: str) -> list[Any]:
    """Return labels as a list of Python integers or strings.

    Args:
        labels: A sequence, array or tensor.
        argument: The name of the argument, for messages.
    """
    try:
        values = labels.tolist() if hasattr(labels, "tolist") else labels
    except (TypeError, RuntimeError):  # a tensor without values, or of an unusual type
        values = None
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise UserError(f"{argument} has labels of the type {type(labels).__name__}: give a list", kind="bad-labels")
    return [to_label(value, argument) for value in values]


def to_label(value: Any, argument: str) -> int | str:
    """Return a label as a Python integer or string; other values raise UserError.

    Args:
        value: The label, which may be a scalar of NumPy or torch.
        argument: The name of the argument, for messages.
    """
    found = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    if type(found) not in (int, str):
        shown = repr(found)[:80]
        raise UserError(f"{argument} has the label {shown}: labels must be integers or names", kind="bad-labels")
    return found


# Kinds of data


def read_frame(frame: Any, argument: str) -> LabeledImages:
    """Return the images of a pandas DataFrame.

    Args:
        frame: The DataFrame.
        argument: The name of the argument, for messages.
    """
    columns = list(frame.columns)
    column = find_image_column(columns, argument)
    for name in (column, LABEL_COLUMN):
        if columns.count(name) > 1:
            raise UserError(f"{argument} has several columns {name!r}: keep one of them", kind="bad-list")
    return pair_images(frame[column].tolist(), frame[LABEL_COLUMN], argument)


def find_image_column(columns: Sequence[Any], argument: str) -> str:
    """Return the name of the column of images or paths; raise UserError if it or the column of labels is missing.

    Args:
        columns: The names of all columns.
        argument: The name of the argument, for messages.
    """
    found = next((column for column in IMAGE_COLUMNS if column in columns), None)
    if found is None or LABEL_COLUMN not in columns:
        raise UserError(
            f"{argument} has the columns {preview(columns, 8)}: rename them to {' or '.join(IMAGE_COLUMNS)}, and "
            f"{LABEL_COLUMN}",
            kind="bad-list",
        )
    return found


def read_torch(dataset: Any, argument: str) -> LabeledImages:
    """Return the images of a torch Dataset, whose items are pairs (image, label) and do not change.

    Args:
        dataset: The Dataset.
        argument: The name of the argument, for messages.
    """
    labels: list[Any] = [None] * len(dataset)
    check_counts(len(labels), len(labels), argument)

    def read(index: int) -> Any:
        try:
            item = dataset[index]
        except Exception as error:  # code of the user, or of a library
            raise UserError(
                f"item {index} of {argument} cannot be read ({type(error).__name__}: {str(error)[:200]}): repair or remove it",
                kind="bad-image",
            ) from error
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UserError(
                f"item {index} of {argument} has the type {type(item).__name__}: items must be pairs (image, label)"
            )
        labels[index] = item[1]
        return item[0]

    images = encode_pictures(read, len(labels), argument)
    again = encode_pictures(read, min(len(labels), DETERMINISM_CHECKS), argument)
    if (changed := np.where(again.digests != images.digests[: len(again.digests)])[0]).size:
        raise UserError(
            f"item {changed[0]} of {argument} changes when it is read again: remove random transforms, because longtail "
            "makes its own views",
            kind="conflict",
        )
    names = getattr(dataset, "classes", None)
    is_named = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    return LabeledImages(images, list_labels(labels, argument), tuple(names) if names and is_named else None)


def split_dataset_dict(found: Any) -> tuple[Any, Any]:
    """Return the training and the test images of a Hugging Face DatasetDict; the latter are None if there are none."""
    if "train" not in found:
        raise UserError(
            f"the DatasetDict has the splits {preview(found, 8)}: rename the training split to train", kind="bad-list"
        )
    return found["train"], next((found[name] for name in EVALUATION_NAMES if name in found), None)


def read_hugging_face(dataset: Any, argument: str) -> LabeledImages:
    """Return the images of a Hugging Face Dataset, whose encoded files are read when they are needed.

    Args:
        dataset: The Dataset.
        argument: The name of the argument, for messages.
    """
    column = find_image_column(dataset.column_names, argument)
    image_type = sys.modules["datasets"].Image
    labels = list_labels(list(dataset.with_format(None)[LABEL_COLUMN]), argument)
    names = getattr(dataset.features[LABEL_COLUMN], "names", None)
    if not isinstance(dataset.features[column], image_type):
        return pair_images(list(dataset.with_format(None)[column]), labels, argument)
    files = dataset.with_format(None).select_columns([column]).cast_column(column, image_type(decode=False))

    def read_encoded(index: int) -> bytes:
        row = files[index][column] or {}
        if row.get("bytes") is not None:
            return row["bytes"]
        if row.get("path") is None:
            raise BadImage("it is missing")
        return read_file(row["path"])

    check_counts(len(files), len(labels), argument)
    encoded = digest_images(lambda index: hash_content(read_encoded(index)), len(files), argument)
    images = EncodedImages(read_encoded, *encoded)
    return LabeledImages(images, labels, tuple(names) if names else None)


class Digest(NamedTuple):
    """The digest of an image, and the number of bytes of its encoded file."""

    digest: str
    size: int


def hash_content(content: bytes) -> Digest:
    """Return the digest and the size of a file."""
    return Digest(hashlib.blake2b(content, digest_size=8).hexdigest(), len(content))


def encode_pictures(read: Callable[[int], Any], count: int, argument: str) -> EncodedImages:
    """Return pictures as encoded images. Each of them is read once, and then whenever it is needed.

    Args:
        read: Returns the picture with an index: a PIL image, an array or a tensor. It is called by one thread at a time.
        count: The number of pictures.
        argument: The name of the argument, for messages.
    """
    lock = threading.Lock()  # a Dataset, or a PIL image that is not loaded yet, need not support threads

    def encode(index: int) -> EncodedPicture:
        with lock:
            return encode_picture(read(index))

    def describe(index: int) -> Digest:
        encoded = encode(index)
        return Digest(encoded.digest, len(encoded.content))

    return EncodedImages(lambda index: encode(index).content, *digest_images(describe, count, argument))


def digest_images(
    describe: Callable[[int], Digest], count: int, argument: str
) -> tuple[npt.NDArray[np.str_], IntArray]:
    """Return the digests and the sizes of all images. An image that cannot be read raises UserError.

    Args:
        describe: Returns digest and size of the image with an index.
        count: The number of images.
        argument: The name of the argument, for messages.
    """
    found: list[Digest] = []
    for index, result in enumerate(track(map_in_threads(describe, np.arange(count)), count, f"reading {argument}")):
        if isinstance(result, BadImage):
            raise UserError(f"cannot use image {index} of {argument} ({result})", kind="bad-image")
        found.append(result)
    return np.array([image.digest for image in found], np.str_), np.array([image.size for image in found], np.int64)


# Files


def check_files(paths: Sequence[Any], argument: str) -> list[Path]:
    """Return the absolute paths of image files; raise UserError for items that are not paths.

    Args:
        paths: The paths.
        argument: The name of the argument, for messages.
    """
    for index, path in enumerate(paths):
        if not isinstance(path, str | Path):
            raise UserError(f"image {index} of {argument} has the type {type(path).__name__}, and others are paths")
        check_text(str(path), f"image {index} of {argument}", "path")
    found = [Path(os.path.abspath(path)) for path in paths]
    missing = [
        path for path in found if not os.path.exists(path)
    ]  # Path.exists raises errors, such as that of a long name
    if missing:
        raise UserError(
            f"{len(missing):,} of the {len(found):,} files of {argument} do not exist ({preview(missing)}): check the paths",
            kind="missing-file",
        )
    return found


def find_common_folder(paths: Sequence[Path]) -> Path:
    """Return the deepest folder that contains all files; the working directory if there are none."""
    return Path(os.path.commonpath([path.parent for path in paths])) if paths else Path()


# Classes


def find_classes(train: LabeledImages) -> tuple[tuple[str, ...], dict[Any, int]]:
    """Return the names of the classes that the training labels define, and the index of the class of each label.

    Integers are the indices of classes, and names are sorted.
    """
    labels = set(train.labels)
    if all(isinstance(label, str) for label in labels):
        names = tuple(sorted(check_text(label, "the labels", "class name") for label in labels))
        return names, {name: index for index, name in enumerate(names)}
    numbers = sorted(label for label in labels if isinstance(label, int))
    if len(numbers) < len(labels) or numbers[0] < 0:
        raise UserError(
            f"the labels are {preview(map(repr, sorted(labels, key=str)))}: give either names, or integers from 0",
            kind="bad-labels",
        )
    check_last_label("the data set", numbers[-1], len(numbers))
    names = train.class_names or tuple(map(str, range(numbers[-1] + 1)))
    if numbers[-1] >= len(names):
        raise UserError(f"label {numbers[-1]}: there are names of {len(names)} classes only", kind="bad-labels")
    for name in names:
        check_text(name, "the data set", "class name")
    return names, {index: index for index in range(len(names))}


# Pictures


CHANNEL_COUNTS = (1, 3, 4)
"""Possible numbers of channels: grayscale, RGB, and RGB with alpha."""
GRAYSCALE_MODES = ("1", "L", "LA", "La", "I;16", "I;16B", "I;16L", "I;16N")


class EncodedPicture(NamedTuple):
    """A picture as the content of an uncompressed image file."""

    content: bytes
    digest: str
    """Identifies the pixels and the size; it does not depend on the type of the picture."""


def encode_picture(picture: Any) -> EncodedPicture:
    """Encode a PIL image, an array or a tensor as PPM, or as PGM if it is grayscale, which is fast and lossless."""
    image = to_pil_image(picture)
    is_gray = image.mode in GRAYSCALE_MODES
    with decoding_error_as_bad_image():  # a PIL image of a file is decoded now
        rgb = to_upright_rgb(image)
    pixels = rgb.tobytes()
    digest = hashlib.blake2b(f"{rgb.width}x{rgb.height} ".encode() + pixels, digest_size=8).hexdigest()
    kind, pixels = ("P5", rgb.getchannel(0).tobytes()) if is_gray else ("P6", pixels)
    return EncodedPicture(f"{kind} {rgb.width} {rgb.height} 255\n".encode() + pixels, digest)


def to_pil_image(picture: Any) -> "Image.Image":
    """Convert a PIL image, an array or a tensor to a PIL image; raise a BadImage if that is impossible or it is too large.

    Arrays have the shape (height, width[, channels]), tensors ([channels,] height, width), with uint8 values or floats from
    0 to 1.
    """
    from PIL import Image

    if isinstance(picture, Image.Image):
        if picture.format == "EPS":
            raise BadImage("EPS data is not read, because Pillow would start Ghostscript")
        check_pixels(picture)
        return picture
    if is_instance(picture, "torch", "Tensor"):
        try:
            picture = (
                picture.float() if str(picture.dtype) == "torch.bfloat16" else picture
            )  # which NumPy does not have
            picture = (picture.movedim(0, -1) if picture.dim() == 3 else picture).detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:
            raise BadImage(f"a tensor of the type {picture.dtype}, {picture.layout} cannot be converted") from error
    if not isinstance(picture, np.ndarray):
        raise BadImage(f"{type(picture).__name__} is not an image: give a path, a PIL image, an array or a tensor")
    picture = picture[..., None] if picture.ndim == 2 else picture
    if picture.ndim != 3 or picture.shape[2] not in CHANNEL_COUNTS or not picture.size:
        order = "arrays are (height, width, channels), tensors (channels, height, width)"
        raise BadImage(f"its shape is {tuple(picture.shape)}: {order}")
    gray = picture.shape[2] == 1
    image = Image.fromarray(np.ascontiguousarray(to_uint8(picture)[..., 0] if gray else to_uint8(picture)))
    check_pixels(image)
    return image


def to_uint8(picture: np.ndarray) -> ImageArray:
    """Convert floats from 0 to 1 to uint8; raise a BadImage for other values."""
    if picture.dtype == np.uint8:
        return picture
    if not np.issubdtype(picture.dtype, np.floating):
        raise BadImage(f"its values have the type {picture.dtype}: give uint8, or floats from 0 to 1")
    if not (picture >= 0).all() or not (picture <= 1).all():  # NaN fails both
        raise BadImage("its floats are not all in the range 0 to 1: give the image without normalization")
    return np.rint(picture * 255).astype(np.uint8)
