"""Write CIFAR-100-LT as a folder of PNG files, for benchmarks/own_images.py.

    python benchmarks/cifar_folder.py FOLDER --data DATA [--imbalance 100]

FOLDER gets train/CLASS/*.png with the images of the long-tailed subset, and test/CLASS/*.png with all test images. DATA is the
folder that contains cifar-100-python.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from longtail import recipes
from longtail.data.sources import Split, load


def write_split(split: Split, folder: Path) -> None:
    """Write the images of a split as FOLDER/CLASS/NUMBER.png.

    Args:
        split: The images, in memory.
        folder: The output folder.
    """
    for name in split.class_names:
        (folder / name).mkdir(parents=True)
    assert isinstance(split.images, np.ndarray)
    for number, (pixels, label) in enumerate(zip(split.images, split.labels, strict=True)):
        Image.fromarray(pixels).save(folder / split.class_names[label] / f"{number:05}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--imbalance", type=float, default=100)
    options = parser.parse_args()
    config = recipes.cifar100_lt(imbalance=options.imbalance).data
    data = load(replace(config, root=options.data, download=False))
    write_split(data.train, options.folder / "train")
    write_split(data.test, options.folder / "test")
    print(f"{len(data.train.labels):,} training images and {len(data.test.labels):,} test images in {options.folder}")


if __name__ == "__main__":
    main()
