"""Model cards in Markdown: what users should know about a network."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from longtail import run_folder
from longtail.data.decode import IMAGE_FORMATS
from longtail.inference.formats import INPUT, describe_model
from longtail.inference.model import UNCALIBRATED, Model, Preprocessing
from longtail.metrics import SHOT_GROUPS
from longtail.reporting import run_artifacts
from longtail.reporting.significance import group_support
from longtail.text import escape_markdown, escape_nonprintable, format_percent, markdown_table

MAX_CLASSES = 50
"""Largest number of classes in the table; of more classes, the most frequent and the rarest are listed."""
GROUPS = {"top1": "all"} | {name: f"{name} ({group.description})" for name, group in SHOT_GROUPS.items()}
PREPROCESSING_NOTE = (
    "the probabilities of `longtail predict` require exactly these steps, as in the code above: another library's resizing, or "
    "one step instead of two, changes pixel values; 16-bit grayscale images are converted by taking their upper 8 bits"
)
LIMITS = """\
- The network can predict only the classes below. Other images are assigned to one of them, possibly with high confidence.
- The results apply to images like those of the test set. Other cameras, crops or locations change them.
- Rare classes were learned from few images: see their own row instead of the mean.
- A temperature calibrates confidence on average over classes, not for each class."""


def make_card(model: Model, to: str, file: str, difference: float, latency: dict[int, tuple[float, float]]) -> str:
    """Return the model card of an exported network.

    Args:
        model: The model.
        to: A key of `CODE`: the format, or "timm".
        file: Name of the exported file.
        difference: Largest difference between its logits and those of the original.
        latency: Milliseconds of the original and of the exported network, by batch size.
    """
    about = describe_model(model)
    record = run_folder.read(model.origin) if model.origin and (model.origin / run_folder.METRICS).is_file() else None
    parts = [
        f"# {escape_markdown(about['method'])}, {escape_markdown(about['network'])}",
        f"An image classifier of {len(model.class_names):,} classes, trained and exported by longtail {about['longtail']}.",
        "## Use\n\n" + f"```python\n{usage_code(to, file, model.preprocessing)}\n```",
        "## Input and output\n\n" + bullet_list(describe_io(about, to == "timm")),
        "## Probabilities\n\n" + bullet_list(describe_probabilities(model, about)),
        "## Data and results\n\n"
        + (describe_results(record) if record else "Not available: the network was not exported from a run folder."),
        "## Limits\n\n" + LIMITS,
        "## Checks\n\n" + bullet_list(describe_checks(difference, latency)),
        "## Classes\n\n" + class_table(model, record),
    ]
    return "\n\n".join(parts) + "\n"


def describe_io(about: dict[str, Any], for_timm: bool) -> list[str]:
    """Return sentences about input, outputs and preprocessing.

    Args:
        about: The description of the network.
        for_timm: Whether the network is a model of timm, which neither normalizes images nor computes probabilities.
    """
    cut = about["preprocessing"]
    size = about["config"]["data"]["image_size"]
    put = [f"`{name}`: {words}" for name, words in (about["input"] | about["outputs"]).items()]
    if for_timm:
        put = [
            f"input: normalized RGB images, float32 (batch, 3, {size}, {size})",
            f"`logits`: {about['outputs']['logits']}",
        ]
    where = "before the network" if for_timm else "inside the network"
    return [
        *put,
        f"to preprocess an image: {'; '.join(cut['steps'])} ({cut['resampling']})",
        PREPROCESSING_NOTE,
        f"normalization {where}: (pixel / 255 - {list(cut['mean'])}) / {list(cut['std'])}",
    ]


def describe_probabilities(model: Model, about: dict[str, Any]) -> list[str]:
    found = UNCALIBRATED
    if model.temperature is not None:
        fitted = "fitted on predictions for held-out images, with equal weight for each class"
        found = f"temperature {model.temperature:.4g}, {fitted}"
    adjustment = f"adjusted to: {escape_markdown(model.prior.name)}" if model.prior else "not adjusted"
    frequencies = f"the logits imply {about['logits_stand_for']}; probabilities are {adjustment}"
    return [found, frequencies]


def describe_results(record: run_folder.FinishedRun) -> str:
    metrics, data, commit = record.metrics, record.environment["data"], record.environment.get("commit")
    counts = data.get("counts") or metrics.get("counts") or [0]
    statements = [
        f"{data.get('images', sum(counts)):,} training images, {max(counts):,} in the largest class and {min(counts):,} in the "
        f"smallest ({escape_markdown(record.config.data.name)}, checksum {escape_markdown(data['checksum'])})",
        *describe_held_out(metrics, counts),
        "the network of the last epoch, evaluated once on the test set; percentages, for groups the mean over classes",
        f"seed {record.seed}" + (f", commit {escape_markdown(commit)}" if commit else ""),
    ]
    rows = [(name, format_percent(metrics.get(key)), count_test_images(record, key)) for key, name in GROUPS.items()]
    rows += [
        (name, format_percent(metrics.get(key)), "")
        for key, name in (("macro_f1", "macro F1"), ("ece", "calibration error (ECE), without temperature"))
    ]
    return (
        bullet_list(statements)
        + "\n\n"
        + markdown_table(("classes, by number of training images", "accuracy", "test images"), rows)
    )


def describe_held_out(metrics: dict[str, Any], counts: list[int]) -> list[str]:
    more = sum(metrics.get("counts") or counts) - sum(counts)
    return [f"{more:,} more images were held out for validation; the groups below count them too"] if more > 0 else []


def count_test_images(record: run_folder.FinishedRun, group: str) -> str:
    """Return the number of test images of a group of classes."""
    if group == "top1":
        images_C = run_artifacts.test_counts(record)
        images = None if images_C is None else int(images_C.sum())
    else:
        found = group_support(record, group)
        images = found.num_images if found else None
    return "–" if images is None else f"{images:,}"


def describe_checks(difference: float, latency: dict[int, tuple[float, float]]) -> list[str]:
    sizes = " and ".join(str(n) for n in latency)
    times = [
        f"batch {n}, on the exporting CPU: original {old:.1f} ms, exported {new:.1f} ms"
        for n, (old, new) in latency.items()
    ]
    compared = f"compared with the original after export, with batches of {sizes}"
    return [f"{compared}: logits differ by at most {difference:.1e}", *times]


def class_table(model: Model, record: run_folder.FinishedRun | None) -> str:
    """Return the table of classes, from the most frequent to the rarest."""
    counts = np.zeros(len(model.class_names), int) if model.counts is None else model.counts
    order = np.argsort(-counts, kind="stable").tolist()
    shown = order if len(order) <= MAX_CLASSES else [*order[: MAX_CLASSES // 2], None, *order[-MAX_CLASSES // 2 :]]
    accuracy, tested_C = (
        (record.metrics.get("per_class"), run_artifacts.test_counts(record)) if record else (None, None)
    )
    rows = [("…", "…", "…", "…") if c is None else class_row(model, c, accuracy, tested_C) for c in shown]
    return markdown_table(("class", "training images", "accuracy", "test images"), rows)


def class_row(
    model: Model, c: int, accuracy: list[float | None] | None, tested_C: np.ndarray | None
) -> tuple[str, str, str, str]:
    count = "–" if model.counts is None else f"{model.counts[c]:,}"
    tested = "–" if tested_C is None else f"{tested_C[c]:,}"
    return model.class_names[c], count, format_percent(accuracy[c] if accuracy else None), tested


def bullet_list(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


# Example code, from an image file to a class name. Only the safetensors format needs longtail.

PREPARED = '''\
def prepared(path):
    """Return an image file as input of the network, uint8 (3, {size}, {size})."""
    image = Image.open(path, formats={formats})
{decoded}
{cut}'''
SQUARE = """\
    image.draft(None, ({twice}, {twice}))  # decode a large JPEG at reduced size
    image = ImageOps.exif_transpose(image).convert("RGB")
    image = ImageOps.fit(image, ({size}, {size}), Image.Resampling.BILINEAR)"""
WHOLE = """\
    share = min({side} / max(image.size), 1)
    image.draft(None, [max(int(share * n), 1) for n in image.size])  # decode a large JPEG at reduced size
    image = ImageOps.exif_transpose(image).convert("RGB")
    image.thumbnail(({side}, {side}), Image.Resampling.BILINEAR, reducing_gap=None)"""
AS_IT_IS = """\
    return np.array(image).transpose(2, 0, 1)"""
CUT = '''\
    side = max(round({crop:g} * min(image.size)), 1)
    pixels = np.array(image, np.float32).transpose(2, 0, 1)
    pixels = resampling(image.height, side) @ pixels @ resampling(image.width, side).T
    return pixels.round().clip(0, 255).astype(np.uint8)


def resampling(length, side):
    """Return the matrix that resizes the central `side` pixels of a line to {size}: {interpolation}, antialiased, in floats."""
    pixel, scale = np.arange(length, dtype=np.float32) - (length - side) // 2 + 0.5, np.float32(side / {size})
    away = abs(pixel - (np.arange({size}, dtype=np.float32)[:, None] + 0.5) * scale) / max(scale, 1)
    weight = {weight} * (0 < pixel) * (pixel < side)
    return weight / weight.sum(1, keepdims=True)'''
WEIGHTS = {
    "bilinear": "np.maximum(1 - away, 0)",
    "bicubic": """\
np.where(
        away < 1, (1.5 * away - 2.5) * away**2 + 1, np.where(away < 2, ((2.5 - 0.5 * away) * away - 4) * away + 2, 0)
    )""",
}
"""The weight of a pixel by its distance from the center, in the code above."""

ONNX = """\
import json
import numpy as np
import onnxruntime
from PIL import Image, ImageOps


{prepared}


session = onnxruntime.InferenceSession("{file}")
names = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
logits, probabilities = session.run(None, {{"{input}": prepared("photo.jpg")[None]}})
print(names[probabilities[0].argmax()], probabilities[0].max())"""
TORCH = """\
import json
import numpy as np
import torch
from PIL import Image, ImageOps


{prepared}


extra = {{"longtail.json": ""}}
network = torch.export.load("{file}", extra_files=extra).module()
names = json.loads(extra["longtail.json"])["class_names"]
with torch.no_grad():
    logits, probabilities = network(torch.from_numpy(prepared("photo.jpg")[None]))
print(names[probabilities[0].argmax()], float(probabilities[0].max()))"""
SAFETENSORS = """\
import longtail

model = longtail.load("{file}")
prediction = model("photo.jpg")  # or a PIL image, an array or a tensor
print(prediction.name, prediction.probability, prediction.top(5))"""
TIMM = """\
import json
import numpy as np
import timm
import torch
from PIL import Image, ImageOps


{prepared}


folder = "{file}"  # as it was exported; a copy on the hub is "hf-hub:USER/NAME" for timm
network = timm.create_model(f"local-dir:{{folder}}", pretrained=True).eval()
with open(f"{{folder}}/config.json", encoding="utf-8") as file:
    facts = json.load(file)["longtail"]
mean, std = (torch.tensor(network.pretrained_cfg[name])[:, None, None] for name in ("mean", "std"))
with torch.no_grad():
    logits = network((torch.from_numpy(prepared("photo.jpg"))[None] / 255 - mean) / std)
probabilities = (logits / (facts["temperature"] or 1.0) + torch.tensor(facts["logit_shift"])).softmax(1)
print(facts["class_names"][probabilities[0].argmax()], float(probabilities[0].max()))"""
CODE = {"onnx": ONNX, "torch": TORCH, "safetensors": SAFETENSORS, "timm": TIMM}


def usage_code(to: str, file: str, preprocessing: Preprocessing) -> str:
    """Return example code for an exported file.

    Args:
        to: The format.
        file: Name of the file.
        preprocessing: The preprocessing of the network.
    """
    literal = escape_nonprintable(json.dumps(file, ensure_ascii=False)[1:-1])  # between quotes, in Python
    return CODE[to].format(file=literal, input=INPUT, prepared=preparation_code(preprocessing))


def preparation_code(preprocessing: Preprocessing) -> str:
    """Return the code of a function that preprocesses an image file with Pillow and NumPy."""
    size, side, crop = preprocessing.views.size, preprocessing.side, preprocessing.views.config.test_crop
    decoded = WHOLE.format(side=side) if side else SQUARE.format(size=size, twice=2 * size)
    name = preprocessing.views.config.interpolation
    is_cut = side or crop < 1
    cut = CUT.format(size=size, crop=crop, interpolation=name, weight=WEIGHTS[name]) if is_cut else AS_IT_IS
    formats = "[" + ", ".join(f'"{name}"' for name in IMAGE_FORMATS) + "]"
    return PREPARED.format(size=size, formats=formats, decoded=decoded, cut=cut)
