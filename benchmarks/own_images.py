"""Accuracy and time of the automatic settings and of alternatives on folders of photographs.

    python benchmarks/own_images.py FOLDER… [--rows default …] [--seeds 0 1 2 3 4] [--runs FOLDER] [--cache FOLDER] [--out FILE]

The rows are the automatic settings (`default`), those of version 0.1, class-balanced logistic regression of scikit-learn on
the same features, single methods on the same features, and trained parts of the backbone. Rows and seeds that are in FILE
already are not measured again, so an interrupted measurement continues. FILE (results/own_images.json) and the page beside it
are written after each row.

The features of each folder are computed once, in a new cache; this time is reported separately and added to the rows that
need it. With --cache an interrupted measurement does not compute them again. Times are processor seconds of all threads on a
CPU, which depend less on other work of the machine, and wall seconds on a GPU. No setting was chosen on the test images: the
rules of `longtail.autoconfig` come from folds of the training images.
"""

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Row, describe_machine, save
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import longtail
from longtail import files, run_folder
from longtail.data.sources import DataSet, load
from longtail.engine.device import choose_device
from longtail.engine.features import FrozenFeatures, cached_features
from longtail.engine.head_runs import make_frozen_trunk
from longtail.metrics import evaluate_predictions, shot_groups
from longtail.reporting.result_rows import format_mean_std
from longtail.reporting.run_artifacts import read_predictions
from longtail.reporting.significance import paired_half_width
from longtail.suspects import PREDICTIONS
from longtail.text import pluralize

METRICS = ("top1", "many", "medium", "few", "ece", "calibrated_ece")
DEFAULT = "default"


@dataclass(frozen=True)
class Entry:
    """A row of the table: settings of `longtail.train`, or a logistic regression on some of the views."""

    title: str
    settings: dict[str, Any] = field(default_factory=dict)
    regression_views: int = 0
    """The number of views that a logistic regression is fitted to; 0: not a logistic regression."""
    is_frozen: bool = False
    """Whether a head is trained on cached features, also where this is not automatic."""


ENTRIES = {
    DEFAULT: Entry("automatic settings"),
    "version-0.1": Entry(
        "settings of version 0.1 without a GPU",
        {
            "method": "paco",
            "data.cached_views": 0,
            "model": "tf_efficientnet_lite0",
            "views.interpolation": "bilinear",
        },
    ),
    "regression-1": Entry("logistic regression, plain image", regression_views=1),
    "regression-5": Entry("logistic regression, all views", regression_views=5),
    "ncm": Entry("nearest class mean, cached views", {"method": "ncm"}, is_frozen=True),
    "balanced-softmax": Entry("Balanced Softmax, cached views", {"method": "balanced-softmax"}, is_frozen=True),
    "paco": Entry("PaCo, cached views", {"method": "paco"}, is_frozen=True),
    "lora": Entry("PaCo, LoRA", {"method": "paco", "model.trainable": "lora"}),
    "last-block": Entry("PaCo, last block", {"method": "paco", "model.trainable": "last-block"}),
    "all": Entry("PaCo, all layers", {"method": "paco", "model.trainable": "all"}),
}


class Folder:
    """A folder of images with the features of its images.

    Args:
        path: The folder.
        options: The arguments of the command.
    """

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.path, self.options = path, options
        self.device = choose_device(options.device)
        self.settings: dict[str, Any] = {"device": options.device, "model": options.model}
        self.cached = {"model.trainable": "head", "data.cached_views": options.views}
        self.config = longtail.choose_config(path, **self.settings, **self.cached, method="balanced-softmax")
        self.data: DataSet = load(self.config.data)
        self.features: FrozenFeatures | None = None

    def extract(self) -> float:
        """Compute the features, or read them from the cache; return the seconds."""
        trunk = make_frozen_trunk(self.config, self.data, self.device)
        start = self.clock()
        self.features = cached_features(self.config, self.data, trunk, self.device)
        return self.clock() - start

    def clock(self) -> float:
        """Return processor seconds on a CPU, and wall seconds on a GPU."""
        return time.process_time() if self.device.type == "cpu" else time.perf_counter()

    def measure(self, entry: Entry, seed: int, runs: Path) -> Row:
        """Return metrics, seconds, and the correctly predicted test images of a seed.

        Args:
            entry: What is measured.
            seed: The seed.
            runs: The folder for runs.
        """
        work = self.fit_regression if entry.regression_views else self.train
        start = self.clock()
        found = work(entry, seed, runs)
        return found | {"seed": seed, "seconds": self.clock() - start}

    def fit_regression(self, entry: Entry, seed: int, runs: Path) -> Row:
        """Fit a logistic regression on standardized features of the plain image, or of all views."""
        assert self.features is not None
        views = self.features.train_VNF[: entry.regression_views].numpy()
        X, y = views.reshape(-1, views.shape[2]), np.tile(self.data.train.labels, len(views))
        model = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=1000))
        scores = model.fit(X, y).predict_log_proba(self.features.test_NF.numpy())
        metrics = evaluate_predictions(
            scores, self.data.test.labels, self.data.train.counts, self.data.train.class_names
        )
        return describe(metrics, scores.argmax(1) == self.data.test.labels) | {"cached": True}

    def train(self, entry: Entry, seed: int, runs: Path) -> Row:
        """Train and evaluate as `longtail train` does."""
        folder = runs / f"seed-{seed}"
        settings = self.settings | (self.cached if entry.is_frozen else {}) | entry.settings
        (run,) = longtail.train(self.path, folder, (folder / f"seed{seed}").exists(), seeds=(seed,), **settings)
        finished = run_folder.read(run)
        stored = read_predictions(finished)
        assert stored is not None
        return describe(finished.metrics, stored.correct_N) | {
            "calibrated_ece": calibrated_ece(run),
            "method": finished.config.method.name,
            "image_size": finished.config.data.image_size,
            "epochs": finished.config.train.epochs,
            "cached": finished.config.data.cached_views > 0,
        }


def describe(metrics: dict[str, Any], hits_N: np.ndarray) -> Row:
    """Return the metrics of the table, and the indices of the correctly predicted test images."""
    return {name: metrics.get(name) for name in METRICS} | {"hits": np.flatnonzero(hits_N).tolist()}


def calibrated_ece(run: Path) -> float | None:
    """Return the calibration error of the probabilities that `longtail predict` gives; None without a temperature.

    Args:
        run: The run folder. Its temperature was fitted without the test images.
    """
    model = longtail.load(run, device="cpu")
    if model.temperature is None:
        return None
    with np.load(run / PREDICTIONS) as stored:
        p_NC = model.probabilities(torch.from_numpy(stored["logits"])).clamp(min=torch.finfo(torch.float64).tiny)
        metrics = evaluate_predictions(p_NC.log(), stored["labels"], model.counts, model.class_names)
    return float(metrics["ece"])


def run(options: argparse.Namespace) -> None:
    """Measure what is missing, and write the results after each seed."""
    stored: Row = json.loads(options.out.read_text()) if options.out.exists() else {"folders": {}}
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["LONGTAIL_CACHE"] = str(options.cache or temporary)
        for path in options.folders:
            folder = Folder(path, options)
            key = f"{path.resolve().name}, {folder.device.type}"
            found = stored["folders"].setdefault(key, {"rows": {}})
            seconds = folder.extract()
            found |= {
                "where": describe_machine(folder.device),
                "model": folder.config.model.name,
                "image_size": folder.config.data.image_size,
                "views": folder.config.data.cached_views,
                "counts": folder.data.train.counts.tolist(),
                "test_labels": folder.data.test.labels.tolist(),
            }
            found.setdefault("features_seconds", seconds)
            for name in options.rows:
                entry, rows = ENTRIES[name], found["rows"].setdefault(name, [])
                seeds = options.seeds[:1] if entry.regression_views else options.seeds  # no randomness
                for seed in seeds:
                    if any(row["seed"] == seed for row in rows):
                        continue
                    rows.append(folder.measure(entry, seed, options.runs / key.replace(", ", "-") / name))
                    print(key, name, {k: v for k, v in rows[-1].items() if k != "hits"}, flush=True)
                    save(options.out, stored)
                    files.write_text(options.out.with_suffix(".md"), make_page(stored))


# Page


def make_page(stored: Row) -> str:
    """Return the Markdown page of the results."""
    lines = [
        "# Photographs in a folder",
        "",
        "Created by `python benchmarks/own_images.py` from [own_images.json](own_images.json). Accuracy in percent on the test"
        " images, as mean ± standard deviation over seeds; *many*, *medium* and *few* are classes with more than 100, 20 to 100"
        " and fewer than 20 training images; ECE is the expected calibration error, first of the logits and then of the"
        " probabilities of `longtail predict`, which divides logits by a temperature from the training images. *Difference*"
        " is the mean class accuracy of the automatic settings minus that of the row, with a 95 % interval over test images,"
        " paired by image.",
    ]
    for key, folder in stored["folders"].items():
        place, seconds = folder["where"], "seconds" if key.endswith("cuda") else "CPU seconds"
        machine = f"{place['machine']}, {place['cpu_cores']} cores" if key.endswith("cpu") else place["machine"]
        lines += [
            "",
            f"## {key}",
            "",
            f"{sum(folder['counts']):,} training images of {len(folder['counts'])} classes ({max(folder['counts'])} to"
            f" {min(folder['counts'])} per class), {len(folder['test_labels']):,} test images. {folder['model']} at"
            f" {folder['image_size']} pixels, {pluralize(folder['views'], 'augmented view')}. Machine: {machine}; commit"
            f" {place['commit']}. Computing the features took {folder['features_seconds']:.0f} {seconds}, which are included"
            " in the rows that use them (for a single view, its share of the images).",
            *folder.get("notes", []),
            "",
            f"| | all | many | medium | few | ECE | calibrated ECE | {seconds} | seeds | difference, all | difference, few |",
            "|---|" + 10 * "---:|",
        ]
        lines += [make_row(folder, name) for name in ENTRIES if folder["rows"].get(name)]
    return "\n".join(lines) + "\n"


def make_row(folder: Row, name: str) -> str:
    """Return the row of the table of a folder.

    Args:
        folder: The results of the folder.
        name: The name of the row.
    """
    rows, entry = folder["rows"][name], ENTRIES[name]
    known = [[row[metric] for row in rows if row.get(metric) is not None] for metric in METRICS]
    cells = [format_mean_std(values) for values in known]
    seconds = np.mean([row["seconds"] for row in rows])
    if rows[0]["cached"]:
        seconds += folder["features_seconds"] * share_of_views(folder, entry.regression_views)
    has_default = name != DEFAULT and bool(folder["rows"].get(DEFAULT))
    cells += [f"{seconds:,.0f}", str(len(rows))]
    cells += [compare(folder, name, metric) if has_default else "" for metric in ("top1", "few")]
    return f"| {entry.title} | {' | '.join(cells)} |"


def share_of_views(folder: Row, views: int) -> float:
    """Return the share of the forward passes that a row needs.

    Args:
        folder: The results of the folder.
        views: The number of views of each training image; 0 for all.
    """
    train, test, most = sum(folder["counts"]), len(folder["test_labels"]), 1 + folder["views"]
    return (min(views or most, most) * train + test) / (most * train + test)


def compare(folder: Row, name: str, metric: str = "top1") -> str:
    """Return the difference of the automatic settings to a row, with its 95 % interval over test images.

    Args:
        folder: The results of the folder.
        name: The name of the row.
        metric: "top1" for all classes, or the name of a shot group.
    """
    labels_N, d_N = np.array(folder["test_labels"]), mean_hits(folder, DEFAULT) - mean_hits(folder, name)
    if metric != "top1":
        chosen_N = shot_groups(folder["counts"])[metric][labels_N]
        d_N, labels_N = d_N[chosen_N], labels_N[chosen_N]
    if not len(d_N):
        return "–"
    classes, class_N = np.unique(labels_N, return_inverse=True)
    difference = 100 * np.mean([d_N[class_N == number].mean() for number in range(len(classes))])
    return f"{difference:+.1f} ± {paired_half_width(d_N, class_N):.1f}"


def mean_hits(folder: Row, name: str) -> np.ndarray:
    """Return for each test image the share of seeds that predict it correctly."""
    hits_N = np.zeros(len(folder["test_labels"]))
    for row in folder["rows"][name]:
        hits_N[row["hits"]] += 1 / len(folder["rows"][name])
    return hits_N


def main() -> None:
    """Measure, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--rows", nargs="+", default=list(ENTRIES), choices=list(ENTRIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--views", type=int, default=4)
    parser.add_argument("--model")
    parser.add_argument("--cache", type=Path, help="feature cache, new for each FILE; default: a temporary folder")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--runs", type=Path, default=Path("runs/own_images"))
    parser.add_argument("--out", type=Path, default=Path("results/own_images.json"))
    options = parser.parse_args()
    torch.manual_seed(0)
    run(options)
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
