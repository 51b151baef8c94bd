"""Images per second from JPEG files on disk to PaCo's step (ResNet-50, 224 pixels, batch 128), and of each stage.

    python benchmarks/stream.py --tiles PATH/TO/IMAGES [--out FILE] [--workers 16] [--profile]

All parts are measured in one run:

`step`       the step alone, on views that are in its buffers
`views`      both views of a batch that is on the device
`read`       reading and decoding files (on the GPU if it supports this), and copying the images to the device
`read, CPU`  the same with decoding in threads
`together`   all of these, as in training
`nvJPEG`     torchvision's decoder on the GPU, from bytes in memory
`PIL`        the usual DataLoader, whose worker processes make both views, without the copy to the device

`--profile` lists the longest operations of each stream of the GPU in a batch.

The files are mosaics of 8 x 6 real images of 64 pixels (512 x 384 pixels, JPEG of quality 90, about as many bytes as a
photograph of that size), in 1,000 classes. They are read so often that the operating system caches them.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import resource
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from measure import Row, count_cores, describe_machine, format_table, save, seconds_per_call
from PIL import Image
from reference import Blur, measure_loader
from step import make_runs
from torch.profiler import ProfilerActivity, profile
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

from longtail import recipes
from longtail.config import Config
from longtail.data.lazy_images import StreamedImages
from longtail.data.loader import Loader, make_loader
from longtail.data.sources import load
from longtail.engine.cuda_graph import make_step, use_own_stream
from longtail.engine.device import CUDA_QUEUES, choose_device, resolve_precision
from longtail.engine.loop import train_step
from longtail.engine.trainer import Trainer

ACROSS, DOWN, TILE = 8, 6, 64
TILES = 4096  # number of images that mosaics are made of
CLASSES = 1000  # each has at least eight images
BUDGET = 4.0  # seconds for each measurement
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the profiler


def make_mosaics(tiles: Path, folder: Path, images: int) -> int:
    """Write mosaics to CLASS/NUMBER.jpg, and return the mean size of a file in bytes."""
    found, rng = (
        sorted(f for f in tiles.rglob("*") if f.suffix.lower() in (".jpg", ".jpeg", ".png")),
        np.random.default_rng(0),
    )
    drawn = [found[i] for i in rng.permutation(len(found))[:TILES]]
    pixels_THWC, classes = np.stack([read_tile(file) for file in drawn]), min(CLASSES, images // 8)
    chosen = rng.integers(0, len(drawn), (images, DOWN, ACROSS))

    def one(number: int) -> int:
        mosaic = pixels_THWC[chosen[number]].transpose(0, 2, 1, 3, 4).reshape(DOWN * TILE, ACROSS * TILE, 3)
        path = folder / f"{number % classes:03}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mosaic).save(path, quality=90)
        return path.stat().st_size

    with ThreadPoolExecutor(count_cores()) as threads:
        return int(np.mean(list(threads.map(one, range(images)))))


def read_tile(file: Path) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB").resize((TILE, TILE)))


def make_config(folder: Path, args: argparse.Namespace) -> Config:
    config = recipes.make("imagenet-lt", method="paco")
    data = replace(config.data, name="folder", root=folder, image_size=args.size, load="stream", workers=args.threads)
    model = replace(config.model, name=args.network, norm=args.norm)
    train = replace(config.train, batch_size=args.batch, execution=args.step)
    return replace(config, data=data, model=model, train=train)


def measure_parts(run: Trainer, seconds: float, profiles: bool) -> tuple[dict[str, float], Row, list[Row]]:
    """Return the images per second of each part, the used memory before and after the last part, and its profile."""
    step_on, batches, count = make_step([run], train_step), run.batches, itertools.count()

    def step() -> None:
        batches.cursor.fill_(0)  # otherwise it would move past the end of the views
        step_on()

    def read(loader: Loader) -> None:
        loader.seek(*divmod(next(count), run.steps_per_epoch))

    def together() -> None:
        at = next(count)
        run.prepare(at)
        step_on()
        run.count_step()

    def rate(name: str, work: Callable[[], object]) -> float:
        nonlocal count
        count = itertools.count()
        calls = 20 if run.device.type == "cuda" else 1
        found = run.loader.batch_size / seconds_per_call(work, run.device, calls, seconds)
        print(f"{name}: {found:,.0f} images per second", flush=True)
        return found

    together()
    rates = {"step": rate("step", step), "views": rate("views", batches.make_views)}
    rates["read"] = rate("read", lambda: read(run.loader))
    if run.device.type == "cuda":
        with contextlib.closing(make_cpu_loader(run)) as loader:
            rates["read, CPU"] = rate("read, CPU", lambda: read(loader))
    rate("together, to warm up", together)  # threads and allocators have their memory after it
    before = measure_used_memory(run.device)
    rates["together"] = rate("together", together)
    after = measure_used_memory(run.device)
    return (
        rates,
        {"before": before, "after": after, "batches": next(count)},
        profile_streams(together) if profiles else [],
    )


def profile_streams(work: Callable[[], None], batches: int = 20) -> list[Row]:
    """Return the busy milliseconds per batch of each GPU stream and of all together, and their longest operations."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(batches):
                work()
            torch.cuda.synchronize()
        found.export_chrome_trace(file.name)
        events = [e for e in json.loads(Path(file.name).read_text())["traceEvents"] if e.get("cat") in ON_DEVICE]
    every = sorted({e["args"]["stream"] for e in events})
    rows = [summarize_events(f"stream {s}", [e for e in events if e["args"]["stream"] == s], batches) for s in every]
    return [summarize_events("any stream", events, batches), *rows]


def summarize_events(name: str, events: list[Row], batches: int) -> Row:
    """Return the total time of events, in which overlaps count once, and the longest operations."""
    busy, until, by_name = 0.0, 0.0, collections.Counter[str]()
    for event in sorted(events, key=lambda e: e["ts"]):
        start, end = event["ts"], event["ts"] + event["dur"]
        busy, until = busy + max(end - max(start, until), 0), max(until, end)
        by_name[event["name"][:60]] += event["dur"]
    most = ", ".join(f"{kernel} {us / 1000 / batches:.2f}" for kernel, us in by_name.most_common(4))
    return {"part": name, "ms_a_batch": busy / 1000 / batches, "of_them_ms": most}


def make_cpu_loader(run: Trainer) -> Loader:
    source = run.data.train
    assert isinstance(source.images, StreamedImages)
    images = replace(source.images, decode="cpu")
    loader = make_loader(replace(source, images=images), run.loader.batch_size, run.seed, run.device)
    loader.set_stage("uniform", 0, run.config.train.epochs)
    return loader


def measure_nvjpeg(folder: Path, batch: int, device: torch.device, seconds: float) -> float:
    """Return the images per second of nvJPEG, which keeps the sizes of images and does not copy them onto canvases."""
    from torchvision.io import ImageReadMode, decode_jpeg, read_file

    files = sorted(folder.rglob("*.jpg"))[: 4 * batch]
    parts = [[read_file(str(f)) for f in files[i : i + batch]] for i in range(0, len(files), batch)]
    turn = itertools.cycle(parts)
    return batch / seconds_per_call(
        lambda: decode_jpeg(next(turn), ImageReadMode.RGB, device=device), device, 4, seconds
    )


def measure_used_memory(device: torch.device) -> Row:
    """Return the used memory in megabytes."""
    host = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    on_device = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    return {"host": host // 2**20, "device": on_device // 2**20}


def make_views(size: int) -> list[T.Compose]:
    """Return the transforms of an image: RandAugment for the query, and SimAugment for the key."""
    crop = [T.RandomResizedCrop(size, scale=(0.08, 1.0)), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4)]
    last = [T.ToTensor(), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    sim = [T.RandomGrayscale(0.2), T.RandomApply([Blur(0.1, 2.0)], 0.5)]
    return [T.Compose([*crop, T.RandAugment(2, 10), *last]), T.Compose([*crop, *sim, *last])]


def measure_data_loader(folder: Path, size: int, batch: int, workers: int, seconds: float) -> float:
    """Return the images per second for which worker processes make both views."""
    views = make_views(size)
    images = ImageFolder(folder, lambda image: [view(image) for view in views])
    return measure_loader(images, batch, workers, seconds)


def measure(args: argparse.Namespace) -> Row:
    os.environ.update(CUDA_QUEUES)
    device = choose_device(args.device)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        size = make_mosaics(args.tiles, folder, args.images)
        print(f"{args.images:,} mosaics of {size:,} bytes", flush=True)
        config = make_config(folder, args)
        (run,) = make_runs(config, 1, load(config.data), device)
        with use_own_stream(device):
            rates, memory, found = measure_parts(run, args.seconds, args.profile)
        run.batches.close()
        if device.type == "cuda":
            rates["nvJPEG"] = measure_nvjpeg(folder, args.batch, device, args.seconds)
        if args.workers:
            rates["PIL"] = measure_data_loader(folder, args.size, args.batch, args.workers, args.seconds)
    rows = [{"part": name, "images_per_second": n, "of_the_step": n / rates["step"]} for name, n in rates.items()]
    settings = {"network": args.network, "size": args.size, "batch": args.batch, "norm": args.norm, "bytes": size}
    how = {
        "step": run.step_mode,
        "precision": resolve_precision(config.train, device),
        "workers": args.workers,
        "megabytes": memory,
    }
    return {
        "what": (__doc__ or "").strip(),
        **describe_machine(device),
        **settings,
        **how,
        "rows": rows,
        "streams": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=Path, required=True, help="folder with images, also in subfolders")
    parser.add_argument("--images", type=int, default=8192, help="number of mosaics")
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--norm", default="batch")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--step", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="number of decoding threads; 0: one per core")
    parser.add_argument(
        "--workers", type=int, default=16, help="processes of the usual DataLoader; 0: do not measure it"
    )
    parser.add_argument("--seconds", type=float, default=BUDGET, help="time for each measurement")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = measure(args)
    print(format_table(found["rows"]))
    for row in found["streams"]:
        print(f"{row['part']}: {row['ms_a_batch']:.2f} ms per batch ({row['of_them_ms']})")
    save(args.out, found)


if __name__ == "__main__":
    main()
