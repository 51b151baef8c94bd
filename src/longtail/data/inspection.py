"""Inspecting a data set before training: class counts, image sizes, unreadable and duplicate files."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from longtail.config import Config, DataConfig
from longtail.data.decode import BadImage, ImageInfo, map_in_threads, probe_image
from longtail.data.in_memory import name_images
from longtail.data.lazy_images import LazyImages, RawDataset, SkippedImage
from longtail.data.sources import draw_long_tail, open_data
from longtail.metrics import shot_groups
from longtail.progress import track
from longtail.recipes import make


class InspectedImage(NamedTuple):
    """The properties of an image file that was read."""

    split: str
    id: str
    label: int
    size: int  # bytes
    digest: bytes
    info: ImageInfo


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect`. Widths, heights and bytes are (smallest, median, largest)."""

    name: str
    class_names: tuple[str, ...]
    counts: list[int]  # training images of each class
    test_counts: list[int]
    imbalance: float
    shot_groups: dict[str, int]
    notes: tuple[str, ...]
    read: int = 0  # images that were decoded
    width: tuple[float, ...] = ()
    height: tuple[float, ...] = ()
    bytes: tuple[float, ...] = ()
    formats: dict[str, int] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)
    exif_rotated: int = 0
    animated: int = 0
    unreadable: list[SkippedImage] = field(default_factory=list)
    blank: list[str] = field(default_factory=list)
    """Images of a single color, or gray at their end, as decoders return for files whose content was partly overwritten."""
    duplicates: list[list[str]] = field(default_factory=list)
    """Groups of identical files in the same class and split."""
    in_several_classes: list[list[str]] = field(default_factory=list)
    """Groups of identical files in several classes."""
    leaked: list[list[str]] = field(default_factory=list)
    """Groups of identical files in both the training and the evaluation images."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        tree = asdict(self)
        return tree | {"unreadable": [{"id": i, "why": why} for i, why in self.unreadable]}


def inspect(data: Any, quick: bool = False) -> Inspection:
    """Inspect a data set, as `longtail data inspect` does.

    Args:
        data: A DataConfig, or anything that `longtail.train` accepts: a Config, a recipe, a path, or images in memory.
        quick: Only count labels and missing files, instead of reading every image.
    """
    if isinstance(data, Config):
        data = data.data
    if isinstance(data, DataConfig):
        return _inspect(data, quick)
    with name_images(data) as name:
        return _inspect(make(name).data, quick)


def _inspect(data: DataConfig, quick: bool) -> Inspection:
    opened = open_data(replace(data, on_error="skip"))  # missing files are reported, not raised
    drawn, notes = draw_long_tail(opened, data)
    splits = {"train": opened.train.subset(drawn), "test": opened.test}
    result = _inspect_labels(opened, splits["train"], notes)
    if quick:
        return replace(result, unreadable=[image for images in splits.values() for image in find_missing(images)])
    readable: list[InspectedImage] = []
    unreadable: list[SkippedImage] = []
    for split, images in splits.items():
        results = map_in_threads(image_inspector(images, split), np.arange(len(images.labels)))
        for index, found in enumerate(track(results, len(images.labels), f"reading {split}")):
            if isinstance(found, BadImage):
                unreadable.append(SkippedImage(str(images.ids[index]), str(found)))
            else:
                readable.append(found)
    return _add_images(result, readable, unreadable)


def _inspect_labels(opened: RawDataset, train: LazyImages, notes: Sequence[str]) -> Inspection:
    counts = train.counts
    return Inspection(
        name=opened.name,
        class_names=train.class_names,
        counts=counts.tolist(),
        test_counts=opened.test.counts.tolist(),
        imbalance=int(counts.max()) / max(int(counts.min()), 1),
        shot_groups={name: int(mask.sum()) for name, mask in shot_groups(counts).items()},
        notes=(*opened.notes, *notes),
    )


def find_missing(images: LazyImages) -> list[SkippedImage]:
    """Return the files that are missing or empty, without reading any."""
    if images.sizes is None:
        return []
    return [SkippedImage(str(images.ids[i]), "the file is missing or empty") for i in np.where(images.sizes == 0)[0]]


def image_inspector(images: LazyImages, split: str) -> Callable[[int], InspectedImage]:
    """Return a function that reads the image with an index and returns its properties."""

    def inspect_image(index: int) -> InspectedImage:
        file = images.read_encoded(index)
        digest = hashlib.blake2b(file, digest_size=16).digest()
        return InspectedImage(
            split, str(images.ids[index]), int(images.labels[index]), len(file), digest, probe_image(file)
        )

    return inspect_image


def _add_images(result: Inspection, readable: list[InspectedImage], unreadable: list[SkippedImage]) -> Inspection:
    """Return the result with what reading the images has found."""
    by_digest: dict[bytes, list[InspectedImage]] = {}
    for image in readable:
        by_digest.setdefault(image.digest, []).append(image)
    identical = [group for group in by_digest.values() if len(group) > 1]
    leaked = [group for group in identical if len({image.split for image in group}) > 1]
    in_several_classes = [group for group in identical if len({image.label for image in group}) > 1]
    duplicates = [group for group in identical if len({(image.split, image.label) for image in group}) == 1]
    found = {
        "read": len(readable),
        "width": _min_median_max([image.info.width for image in readable]),
        "height": _min_median_max([image.info.height for image in readable]),
        "bytes": _min_median_max([image.size for image in readable]),
        "formats": dict(Counter(image.info.format for image in readable).most_common()),
        "modes": dict(Counter(image.info.mode for image in readable).most_common()),
        "exif_rotated": sum(image.info.exif_rotated for image in readable),
        "animated": sum(image.info.animated for image in readable),
        "unreadable": unreadable,
        "blank": [f"{image.split}: {image.id}" for image in readable if image.info.blank],
        "duplicates": [[image.id for image in group] for group in duplicates],
        "in_several_classes": [[image.id for image in group] for group in in_several_classes],
        "leaked": [[f"{image.split}: {image.id}" for image in group] for group in leaked],
    }
    return Inspection(**(vars(result) | found))


def _min_median_max(values: list[int]) -> tuple[float, ...]:
    return (float(min(values)), float(np.median(values)), float(max(values))) if values else ()
