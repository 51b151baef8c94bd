"""Training on random images in the size of the paper's large data sets, with PaCo's recipes for them.

    python benchmarks/scale.py [--counts FILE] [--rows imagenet-lt/resnet50 ...] [--compiled] [--out FILE]

Images per second of complete steps (JPEG decoding, both views, networks, loss, queue) and memory are measured on one GPU. The
seconds of an epoch and the hours of the recipe are computed from them. Steps are captured, but not compiled. A run of the
recipe's length would also compile them, which takes minutes for each network and makes them faster (`--compiled`).

Eight GPUs were not available. Their hours are computed from the step of one process (not captured, not compiled, without our
kernels for views), plus the time to send gradients and averages twice over a link of LINK bytes per second. `hours_on_8`: each
GPU has an eighth of the batch, so the training is the same. `hours_on_8_larger`: each GPU has the whole batch, so a step uses
eight times as many images, which is a different training. Each process is assumed to have as many cores as the measured one.

Each image is one of 64 JPEGs in memory, so reading from disk is not included. `--counts` is a JSON file with the images of each
class as lists by name. Without it, counts decrease from the largest class to the smallest so that their sum is correct.
"""

import argparse
import io
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from measure import Row, describe_machine, format_table, free_memory, save, seconds_per_call
from PIL import Image
from step import make_runs

from longtail import recipes
from longtail.config import Config
from longtail.data.lazy_images import StreamedImages
from longtail.data.long_tail import checksum
from longtail.data.sources import DataSet, Split
from longtail.engine.cuda_graph import make_step, use_own_stream
from longtail.engine.device import choose_device, resolve_precision
from longtail.engine.loop import train_step
from longtail.engine.trainer import Trainer

LINK = 200e9  # bytes per second between GPUs of a machine: an assumption, below the specification of NVLink 4
BUDGET = 4.0  # seconds for each measurement


class Shape(NamedTuple):
    name: str  # in the file of counts
    classes: int
    images: int
    largest: int
    smallest: int


SHAPES = {
    "imagenet-lt": Shape("ImageNet_LT", 1000, 115_846, 1280, 5),
    "inat2018": Shape("iNaturalist18", 8142, 437_513, 1000, 2),
    "places-lt": Shape("Places_LT", 365, 62_500, 4980, 5),
    "imagenet": Shape("ImageNet", 1000, 1_281_167, 1300, 732),
}
ROWS = (
    "imagenet-lt/resnet50",
    "imagenet-lt/resnext50",
    "imagenet-lt/resnext101",
    "inat2018/resnet50",
    "inat2018/resnet152",
    "places-lt/resnet152",
    "imagenet/resnet50",
    "imagenet/resnet101",
    "imagenet/resnet200",
)


def make_counts(shape: Shape) -> np.ndarray:
    """Return counts from the largest to the smallest class, along a curve with the right sum."""
    position = np.linspace(1, 0, shape.classes)

    def compute(power: float) -> np.ndarray:
        return (shape.smallest * (shape.largest / shape.smallest) ** (position**power)).astype(np.int64)

    low, high = 0.01, 20.0  # the higher the power, the fewer images
    for _ in range(60):
        power = (low + high) / 2
        low, high = (power, high) if compute(power).sum() > shape.images else (low, power)
    counts = compute(high)
    rest = shape.images - counts.sum()
    inner = np.arange(1, shape.classes - 1)
    counts[inner] += rest // len(inner)
    counts[inner[: rest % len(inner)]] += 1
    return counts


def make_jpegs(number: int = 64) -> list[bytes]:
    """Return JPEGs of 500 x 375 pixels: smooth noise plus fine noise, with about as many bytes as a photograph."""
    rng, found = np.random.default_rng(0), []
    for _ in range(number):
        coarse = Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)).resize(
            (500, 375), Image.Resampling.BICUBIC
        )
        fine = np.asarray(coarse).astype(np.int64) + rng.integers(-16, 17, (375, 500, 1))
        file = io.BytesIO()
        Image.fromarray(fine.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
        found.append(file.getvalue())
    return found


def make_data(counts: np.ndarray, config: Config) -> DataSet:
    encoded, labels = make_jpegs(), np.repeat(np.arange(len(counts)), counts)
    side = round(config.data.image_size * 16 / 7)
    images = StreamedImages(lambda i: encoded[i % len(encoded)], str, side, config.data.workers)
    source = Split(images, labels, tuple(map(str, range(len(counts)))), np.arange(len(labels)))
    return DataSet("dry", source, None, source, checksum(labels))


def time_step(run: Trainer, seconds: float) -> float:
    """Return the seconds of a training step."""
    with use_own_stream(run.device):
        step_on, count = make_step([run], train_step), itertools.count()

        def once() -> None:
            at = next(count)
            run.prepare(at)
            step_on()
            run.count_step()

        found = seconds_per_call(once, run.device, 10 if run.device.type == "cuda" else 1, seconds)
    run.batches.close()
    return found


def measure_row(name: str, counts: np.ndarray, args: argparse.Namespace, device: torch.device) -> Row:
    recipe, network = name.split("/")
    config = recipes.make(recipe, network=network)
    epochs = config.train.epochs
    config = replace(
        config,
        data=replace(config.data, image_size=args.size),
        model=replace(config.model, pretrained=False),
        # an epoch is too short for `auto` to compile
        train=replace(
            config.train,
            batch_size=args.batch or config.train.batch_size,
            epochs=epochs if args.compiled else 1,
        ),
    )
    data, batch = make_data(counts, config), config.train.batch_size
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    one, how, sent = measure_steps(config, data, args.seconds, device)
    made = time.perf_counter() - start
    memory = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None
    row: Row = {"row": name, "step": how, "batch": batch, "images_per_second": batch / one, "GB": memory}
    per_epoch = len(data.train.labels) / batch
    row |= {"s_per_epoch": per_epoch * one, "epochs": epochs, "hours": epochs * per_epoch * one / 3600}
    for key, each in (("hours_on_8", max(batch // 8, 2)), ("hours_on_8_larger", batch)):
        part = replace(config, train=replace(config.train, batch_size=each, execution="eager"))
        together = measure_steps(part, data, args.seconds, device)[0] + 2 * sent / LINK
        row[key] = epochs * len(data.train.labels) / (8 * each) * together / 3600
    return row | {"took_s": made}


def measure_steps(config: Config, data: DataSet, seconds: float, device: torch.device) -> tuple[float, str, int]:
    """Return the seconds of a step, its execution mode, and the bytes of the gradients of a network."""
    (run,) = make_runs(config, 1, data, device)
    found = time_step(run, seconds), run.step_mode, sum(t.numel() * 4 for t in run.method.net.state_dict().values())
    del run
    free_memory()
    return found


def measure(args: argparse.Namespace) -> Row:
    device, stored = choose_device(args.device), json.loads(args.counts.read_text()) if args.counts else {}
    rows: list[Row] = []
    for name in args.rows:
        shape = SHAPES[name.split("/")[0]]
        counts = np.array(stored[shape.name]) if shape.name in stored else make_counts(shape)
        rows.append(measure_row(name, counts, args, device))
        print(format_table(rows[-1:]), flush=True)
        free_memory()
        save(args.out, make_result(rows, args, device))
    return make_result(rows, args, device)


def make_result(rows: Sequence[Row], args: argparse.Namespace, device: torch.device) -> Row:
    how = {
        "precision": resolve_precision(recipes.make("imagenet-lt").train, device),
        "link": LINK,
        "counts": bool(args.counts),
    }
    return {"what": (__doc__ or "").strip(), **describe_machine(device), **how, "rows": list(rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--counts",
        type=Path,
        help="JSON file with lists of class counts: ImageNet_LT, iNaturalist18, Places_LT",
    )
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="compile the steps (minutes for each network)",
    )
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, help="batch size (default: that of the recipe)")
    parser.add_argument("--seconds", type=float, default=BUDGET, help="time for each measurement")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(format_table(measure(args)["rows"]))


if __name__ == "__main__":
    main()
