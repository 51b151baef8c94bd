"""Synthetic run folders, finished or in progress, and a parser of the page."""

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from PIL import Image

from longtail import files, recipes, run_folder
from longtail.config import Config, to_dict
from longtail.metrics import evaluate_predicted_classes
from longtail.reporting.html import VOID_TAGS

PER_CLASS = 8  # test images
FEW = [300, 120, 12, 4]  # training images of a few classes


def make_run(
    folder: Path, config: Config, seed: int, counts: list[int], names: list[str] | None = None, right=0.5
) -> Path:
    """Write a finished run whose network classifies a fraction `right` of the images of each class correctly."""
    folder.mkdir(parents=True)
    rng, classes = np.random.default_rng([seed, *config.method.name.encode()]), len(counts)
    y_N = np.arange(classes).repeat(PER_CLASS)
    guess_N = np.where(
        rng.random(len(y_N)) < np.broadcast_to(right, classes)[y_N], y_N, rng.integers(classes, size=len(y_N))
    )
    names = names or [f"class {c}" for c in range(classes)]
    metrics = evaluate_predicted_classes(guess_N, rng.uniform(0.2, 1, len(y_N)), y_N, counts, names)
    metrics |= {"knn_top1": 50.0, "latency_b64": 3.0 + seed, "seconds": 60.0, "peak_memory": 10**9, "together": 1}
    data = {"checksum": "0", "images": sum(counts), "counts": counts, "notes": []}
    environment = {"seed": seed, "commit": "abc", "device": "CPU", "started": "2026-01-01", "precision": "fp32"}
    log = [{"stage": "train", "epoch": e, "epochs": 5, "loss": 5 - e, "lr": 0.1, "P_sup": 0.1 * e} for e in range(5)]
    (folder / run_folder.METRICS).write_text(json.dumps(metrics))
    files.write_json(folder / run_folder.CONFIG, to_dict(replace(config, train=replace(config.train, seeds=(seed,)))))
    files.write_json(folder / run_folder.ENVIRONMENT, environment | {"data": data, "parameters": 1000})
    (folder / run_folder.LOG).write_text("".join(json.dumps(row) + "\n" for row in log))
    np.savez(
        folder / "features.npz",
        features=rng.normal(size=(40, 8)).astype(np.float16),
        labels=y_N[np.arange(40) % len(y_N)],
    )
    (folder / "examples").mkdir()
    Image.fromarray(rng.integers(0, 255, (96, 96, 3), dtype=np.uint8)).save(folder / "examples/0.png")
    rare = [{"class": classes - 1, "accuracy": 12.5, "items": [0]}]
    pairs = [{"truth": 0, "predicted": 1, "share": 0.25, "items": [0]}]
    index = {"confusions": pairs, "best_rare": rare, "worst_rare": rare}
    (folder / "examples/index.json").write_text(json.dumps(index))
    return folder


def begin_run(
    folder: Path, epochs: int, method: str = "ce", seed: int = 0, total: int | None = 8, day: int = 2
) -> Path:
    """Write a run in progress, after `epochs` epochs."""
    config = recipes.digits_lt(method)
    folder.mkdir(parents=True, exist_ok=True)
    data = {"checksum": "0", "images": sum(FEW), "counts": FEW, "notes": []}
    environment = {"seed": seed, "commit": "abc", "device": "CPU", "started": f"2026-01-{day:02}", "precision": "fp32"}
    files.write_json(folder / run_folder.CONFIG, to_dict(replace(config, train=replace(config.train, seeds=(seed,)))))
    files.write_json(
        folder / run_folder.ENVIRONMENT, environment | {"data": data} | ({"epochs": total} if total else {})
    )
    (folder / run_folder.LOG).write_text("".join(log_line(e) for e in range(epochs)))
    return folder


def log_line(epoch: int) -> str:
    row = {"stage": "train", "epoch": epoch, "epochs": 8, "loss": 5 - epoch / 2, "seconds": 10 + epoch, "lr": 0.1}
    return json.dumps(row | ({"val_accuracy": 50.0 + epoch} if epoch % 2 else {})) + "\n"


class Page(HTMLParser):
    """A parsed page: elements with attributes, text by kind of element, and tables as rows of (text, value) cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.inside: list[str | None] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.classes: dict[str, list[str]] = {}
        self.tables: list[list[list[tuple[str, str | None]]]] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), (tag, attrs)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append(("", dict(attrs).get("data-value")))
        if tag not in VOID_TAGS:
            self.open.append(tag)
            self.inside.append(dict(attrs).get("class"))
            if dict(attrs).get("class"):
                self.classes.setdefault(str(dict(attrs)["class"]), []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"
        self.inside.pop()

    def handle_data(self, data: str) -> None:
        for tag in self.open[-1:]:
            self.text.setdefault(tag, []).append(data)
        for kind in {kind for kind in self.inside if kind}:
            self.classes[kind][-1] += data
        if {"td", "th"} & {*self.open}:
            said, value = self.tables[-1][-1][-1]
            self.tables[-1][-1][-1] = said + data, value

    def kinds(self) -> list[str | None]:
        """Return the kinds of the caveats."""
        return [given["data-kind"] for _, given in self.elements if "data-kind" in given]

    def missing(self) -> list[str]:
        """Return the notes on what cannot be shown."""
        return self.classes.get("missing", [])

    def words(self) -> str:
        """Return all visible text."""
        return " ".join("".join(parts) for tag, parts in self.text.items() if tag not in ("style", "script"))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def under_way(page: Page) -> dict[str, dict[str, tuple[str, str | None]]]:
    """Return the table of unfinished runs: (text, value) by heading for each run."""
    for head, *body in page.tables:
        if head[0][0] == "run":
            return {row[0][0].strip(): dict(zip([text for text, _ in head], row, strict=True)) for row in body}
    return {}
