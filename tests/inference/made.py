"""Finished runs without training: folders as `longtail train` leaves them, of a network with random weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from longtail import files, methods, run_folder
from longtail.config import Config, DataConfig, to_dict
from longtail.data.sources import load
from longtail.engine import evaluate
from longtail.engine.environment import stored_resolution
from longtail.views import Views
from tests.conftest import tiny

CPU = torch.device("cpu")


def finished_run(folder: Path, config: Config, seed: int = 0) -> Path:
    """Write a finished run by a real evaluation; its batch norms have the statistics of the training images."""
    torch.manual_seed(seed)
    data, views = load(config.data), Views(config.views, config.data.image_size)
    method = methods.make(config, data.train.counts)
    method.set_stage(method.stages[-1])
    method.train()
    batch = next(evaluate.iterate_frames(data.train, np.arange(len(data.train.labels)), 64, CPU))
    for _ in range(20):
        method.features(views.plain(*batch))
    folder.mkdir(parents=True)
    environment = {"seed": seed, "started": "", "precision": "fp32", "commit": None, "versions": {}, "parameters": 1}
    about = {"checksum": data.checksum, "images": len(data.train.labels), "counts": data.train.counts.tolist()}
    files.write_json(folder / run_folder.CONFIG, to_dict(config))
    about |= {"resolution": stored_resolution(data.train), "notes": []}
    files.write_json(folder / run_folder.ENVIRONMENT, environment | {"data": about})
    cost = dict.fromkeys(evaluate.TRAINING_COSTS, 1.0)
    evaluate.Evaluator(method, data, views, CPU, 32).finish(folder, cost)
    return folder


def photographs(
    root: Path, classes=("cat", "dog", "eel"), n: int | tuple[int, ...] = 8, seed: int = 0, low: int = 20
) -> Path:
    """Write images of many shapes; those of a class have similar colors."""
    rng = np.random.default_rng(seed)
    for c, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(n if isinstance(n, int) else n[c]):
            height, width = rng.integers(low, 3 * low, 2)
            pixels = rng.normal(60 + 60 * c, 30, (height, width, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.{'jpg' if i % 2 else 'png'}")
    return root


def folder_config(root: Path, method: str = "paco", **data) -> Config:
    config = tiny(method)
    values = {"name": "folder", "root": root, "image_size": 16, "imbalance": 1.0} | data
    return replace(config, data=DataConfig(**values))
