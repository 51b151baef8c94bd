"""`longtail data inspect`: what a source holds, and what is wrong with it, before anything is trained."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from longtail.config import DataConfig
from longtail.data.decode import BadImage, ImageInfo, in_threads, probe_image
from longtail.data.lazy_images import LazyImages, RawDataset, Skipped
from longtail.data.long_tail import shot_groups
from longtail.data.sources import long_tail, open_data
from longtail.progress import track


class Seen(NamedTuple):
    """An image file that was read."""

    split: str
    id: str
    label: int
    size: int  # bytes
    digest: bytes
    look: ImageInfo


@dataclass(frozen=True)
class Inspection:
    """All that was found. Sizes in pixels and bytes are (smallest, median, largest)."""

    name: str
    class_names: tuple[str, ...]
    counts: list[int]  # of training images
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
    unreadable: list[Skipped] = field(default_factory=list)
    blank: list[str] = field(default_factory=list)
    """Of one color, or gray at their end: what decoders make of a file whose data are lost but whose last bytes are there."""
    duplicates: list[list[str]] = field(default_factory=list)
    """Files of the same bytes, in one class and one part."""
    in_several_classes: list[list[str]] = field(default_factory=list)
    """Files of the same bytes in several classes."""
    leaked: list[list[str]] = field(default_factory=list)
    """Files of the same bytes in training and evaluation."""

    def to_dict(self) -> dict[str, Any]:
        tree = asdict(self)
        return tree | {"unreadable": [{"id": i, "why": why} for i, why in self.unreadable]}


def inspect(data: DataConfig, quick: bool = False) -> Inspection:
    """Counts from the labels alone; then, unless `quick`, every image decoded and compared. The twin of `data inspect`."""
    opened = open_data(replace(data, on_error="skip"))  # a file that is missing is a finding
    drawn, notes = long_tail(opened, data)
    parts = {"train": opened.train.subset(drawn), "test": opened.test}
    about = _counted(opened, parts["train"], notes)
    if quick:
        return replace(about, unreadable=[image for pool in parts.values() for image in absent(pool)])
    good: list[Seen] = []
    bad: list[Skipped] = []
    for split, pool in parts.items():
        every = in_threads(looking(pool, split), np.arange(len(pool.labels)))
        for place, found in enumerate(track(every, len(pool.labels), f"reading {split}")):
            if isinstance(found, BadImage):
                bad.append(Skipped(str(pool.ids[place]), str(found)))
            else:
                good.append(found)
    return _with_images(about, good, bad)


def _counted(opened: RawDataset, train: LazyImages, notes: Sequence[str]) -> Inspection:
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


def absent(pool: LazyImages) -> list[Skipped]:
    """What can be said without reading an image."""
    if pool.sizes is None:
        return []
    return [Skipped(str(pool.ids[i]), "the file is missing or empty") for i in np.where(pool.sizes == 0)[0]]


def looking(pool: LazyImages, split: str) -> Callable[[int], Seen]:
    def one(index: int) -> Seen:
        file = pool.encoded(index)
        digest = hashlib.blake2b(file, digest_size=16).digest()
        return Seen(split, str(pool.ids[index]), int(pool.labels[index]), len(file), digest, probe_image(file))

    return one


def _with_images(about: Inspection, good: list[Seen], bad: list[Skipped]) -> Inspection:
    alike: dict[bytes, list[Seen]] = {}
    for seen in good:
        alike.setdefault(seen.digest, []).append(seen)
    groups = [group for group in alike.values() if len(group) > 1]
    leaked, torn = (
        [group for group in groups if len({getattr(seen, what) for seen in group}) > 1] for what in ("split", "label")
    )
    plain = [group for group in groups if len({(seen.split, seen.label) for seen in group}) == 1]
    found = {
        "read": len(good),
        "width": _spread([seen.look.width for seen in good]),
        "height": _spread([seen.look.height for seen in good]),
        "bytes": _spread([seen.size for seen in good]),
        "formats": dict(Counter(seen.look.format for seen in good).most_common()),
        "modes": dict(Counter(seen.look.mode for seen in good).most_common()),
        "exif_rotated": sum(seen.look.exif_rotated for seen in good),
        "animated": sum(seen.look.moving for seen in good),
        "unreadable": bad,
        "blank": [f"{seen.split}: {seen.id}" for seen in good if seen.look.blank],
        "duplicates": _ids(plain),
        "in_several_classes": _ids(torn),
        "leaked": [[f"{seen.split}: {seen.id}" for seen in group] for group in leaked],
    }
    return Inspection(**(vars(about) | found))


def _spread(values: list[int]) -> tuple[float, ...]:
    return (float(min(values)), float(np.median(values)), float(max(values))) if values else ()


def _ids(groups: list[list[Seen]]) -> list[list[str]]:
    return [[seen.id for seen in group] for group in groups]
