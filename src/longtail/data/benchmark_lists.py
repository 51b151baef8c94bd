"""Long-tailed sets that are published as lists: which files these are, and where they are looked for."""

import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from longtail.config import DataConfig
from longtail.data.lazy_images import RawDataset
from longtail.data.lists import open_lists
from longtail.errors import UserError

DECOUPLING = "github.com/facebookresearch/classifier-balancing, folder data"


class Lists(NamedTuple):
    train: str
    test: str


class Published(NamedTuple):
    lists: tuple[Lists, ...]
    """In the root; the first training list that is there counts."""
    source: str
    root: str
    """What their paths begin in."""
    images: tuple[int, int]
    """For training and evaluation, as published."""


PUBLISHED = {
    "imagenet-lt": Published(
        (Lists("ImageNet_LT_train.txt", "ImageNet_LT_test.txt"),),
        f"{DECOUPLING}/ImageNet_LT",
        "ImageNet's folder, with train/n01440764/*.JPEG and val/n01440764/*.JPEG",
        (115_846, 50_000),
    ),
    "inat2018": Published(
        (Lists("iNaturalist18_train.txt", "iNaturalist18_val.txt"), Lists("train2018.json", "val2018.json")),
        f"{DECOUPLING}/iNaturalist18 (or train2018.json and val2018.json of the competition)",
        "the folder of train_val2018/",
        (437_513, 24_426),
    ),
    "places-lt": Published(
        (Lists("Places_LT_train.txt", "Places_LT_test.txt"),),
        f"{DECOUPLING}/Places_LT",
        "Places365's folder, with train/airfield/*.jpg and val/airfield/*.jpg",
        (62_500, 36_500),
    ),
}


def open_published(config: DataConfig, skip: bool = False) -> RawDataset:
    """By its name; lists that are named stand in for those in the root."""
    known = PUBLISHED[config.name]
    if config.root is None:
        raise UserError(f"{config.name}: where are its images? add --data.root DIR, {known.root}")
    lists = next((pair for pair in known.lists if os.path.isfile(config.root / pair.train)), known.lists[0])
    train = config.train_list or _there(config.root / lists.train, "--data.train_list", known)
    test = config.test_list or _there(config.root / lists.test, "--data.test_list", known)
    opened = open_lists(train, test, config.root, config.columns, config.image_size, skip)
    found = len(opened.train.labels), len(opened.test.labels)
    return replace(opened, name=config.name, notes=(*opened.notes, *_others(config.name, known, found)))


def _there(path: Path, flag: str, known: Published) -> Path:
    if os.path.isfile(path):
        return path
    raise UserError(
        f"there is no {path}: get {path.name} from {known.source} and put it there, or name it with {flag}",
        kind="missing-file",
    )


def _others(name: str, known: Published, found: tuple[int, int]) -> list[str]:
    if found == known.images:
        return []
    here, there = (f"{train:,} training and {test:,} evaluation images" for train, test in (found, known.images))
    return [f"warning: {name} as published has {there}, these lists {here}"]
