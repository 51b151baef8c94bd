"""The cases: which file, field or array of which base is replaced by what, and which commands read it."""

import functools
import json
import os
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longtail import run_folder
from longtail.suspects import SUSPECTS, TRAINING_FEATURES
from tests.odd import hostile_values as values
from tests.odd.hostile_bases import EXPORT, Case, Place, Spec
from tests.odd.hostile_checkpoints import checkpoint_cases
from tests.odd.hostile_values import FILE_KINDS, LINKS, NODES, Exploding, shorten

# The commands that read each file of a finished run, of an unfinished run, and of two runs that are compared.
DESCRIBING = ("report", "table", "predict", "export", "eval", "board", "latency", "gradient", "predict-weights")
READERS = {
    run_folder.CONFIG: (*DESCRIBING, "from", "from-file", "resume"),
    run_folder.ENVIRONMENT: (*DESCRIBING, "resume"),
    run_folder.METRICS: DESCRIBING,
    run_folder.LOG: ("report", "board"),
    run_folder.CALIBRATION: ("predict", "predict-csv", "export", "eval"),
    run_folder.SKIPPED: ("report", "board", "eval"),
    "examples": ("report", "board", "eval"),
    "examples/index.json": ("report", "board", "eval"),
    "THUMBNAIL": ("report", "board"),
    "predictions.npz": ("report", "board", "table", "eval"),
    "features.npz": ("report", "board", "eval"),
    run_folder.GRADIENTS: ("report", "gradient", "board"),
    "checkpoint": ("resume", "eval", "report"),
    run_folder.CHECKPOINT: ("resume", "eval", "report"),
    run_folder.MODEL: ("predict", "export", "eval", "predict-weights", "predict-table"),
    run_folder.LOCK: ("resume", "board", "eval"),
}
BEGUN_READERS = {
    run_folder.CONFIG: ("resume", "report", "board", "from", "table"),
    run_folder.ENVIRONMENT: ("resume", "report", "board"),
    run_folder.LOG: ("resume", "report", "board", "resume-tensorboard", "resume-wandb"),
    run_folder.GRADIENTS: ("resume",),
    "checkpoint": ("resume", "report"),
    run_folder.CHECKPOINT: ("resume",),
    run_folder.LOCK: ("resume", "board", "report"),
    run_folder.SKIPPED: ("resume", "report"),
    run_folder.WANDB: ("resume-wandb",),
}
PAIR_READERS = {
    run_folder.CONFIG: ("report", "table", "board", "latency"),
    run_folder.ENVIRONMENT: ("report", "table", "board", "latency"),
    run_folder.METRICS: ("report", "table", "board", "latency"),
    run_folder.LOG: ("report", "board"),
    "predictions.npz": ("report", "board"),
    run_folder.GRADIENTS: ("report", "gradient"),
}
# Files that only runs on cached features have, or that they read in another way.
HEAD_READERS = {
    run_folder.ADAPTER: ("predict", "export", "eval", "predict-table"),
    run_folder.CALIBRATION: ("predict", "export", "report"),
    run_folder.CROSS_VALIDATION: ("report", "board", "resume-head"),
    TRAINING_FEATURES: ("report", "board", "eval"),
    "features.npz": ("report", "board"),
    "predictions.npz": ("report", "board"),
}
# Of the first teacher of a distillation, whose settings the student has.
TEACHER_READERS = {
    run_folder.CONFIG: ("distill",),
    run_folder.ENVIRONMENT: ("distill",),
    run_folder.METRICS: ("distill",),
    run_folder.MODEL: ("distill",),
}
FRESH_READERS = {
    run_folder.CONFIG: ("resume-head",),
    run_folder.ENVIRONMENT: ("resume-head",),
    run_folder.LOG: ("resume-head", "report"),
    run_folder.LOCK: ("resume-head",),
}
FRESH_WRITTEN = {
    "checkpoint": ("resume-head",),
    "examples": ("resume-head",),
    "features.npz": ("resume-head",),
    "predictions.npz": ("resume-head",),
    run_folder.ADAPTER: ("resume-head",),
    run_folder.CALIBRATION: ("resume-head",),
    run_folder.CROSS_VALIDATION: ("resume-head",),
    run_folder.METRICS: ("resume-head",),
    run_folder.MODEL: ("resume-head",),
    SUSPECTS: ("resume-head",),
    TRAINING_FEATURES: ("resume-head",),
}
READERS_OF = {
    "finished": READERS,
    "begun": BEGUN_READERS,
    "pair": PAIR_READERS,
    "head": HEAD_READERS,
    "teacher": TEACHER_READERS,
    "fresh": FRESH_READERS,
}
EXPORT_READERS = ("predict", "predict-train", "predict-csv", "predict-table", "export")
# Names that commands write to, in addition to those that they read.
WRITTEN = {
    "predictions.tmp.npz": ("eval",),
    "features.tmp.npz": ("eval",),
    "examples.tmp": ("eval",),
    "export": ("export",),
    "export/model.safetensors": ("export",),
    "export/model.safetensors.md": ("export",),
    "../table.md": ("table",),
    "../table.json": ("table",),
}
BEGUN_WRITTEN = {
    "checkpoint/state.tmp": ("resume",),
    "log.tmp": ("resume",),
    "gradients.tmp.npz": ("resume",),
    "predictions.tmp.npz": ("resume",),
    "features.tmp.npz": ("resume",),
    "examples.tmp": ("resume",),
    "examples": ("resume",),
    "predictions.npz": ("resume",),
    "features.npz": ("resume",),
    run_folder.MODEL: ("resume",),
    run_folder.CALIBRATION: ("resume",),
    run_folder.METRICS: ("resume", "report"),
    "tensorboard": ("resume-tensorboard",),
    "wandb": ("resume-wandb",),
}
BY_PROCESS = {
    ".PID.metrics.json": ("eval",),
    ".PID.calibration.json": ("eval",),
    "../.PID.table.md": ("table",),
    "../.PID.table.json": ("table",),
    "export/.PID.model.safetensors": ("export",),
    "export/.PID.model.safetensors.md": ("export",),
}


# Cases


def make_cases(bases: Path) -> list[Case]:
    """Return all cases, in an order in which each kind is spread evenly over the numbers."""
    families = [
        [*file_cases()],
        [*json_cases(bases)],
        [*text_cases(bases)],
        [*array_cases(bases)],
        [*archive_cases(bases)],
        [*checkpoint_cases(bases)],
        [*weight_cases(bases)],
        [*description_cases(bases)],
        [*thumbnail_cases()],
        [*name_cases()],
    ]
    for i, family in enumerate(families):
        random.Random(i).shuffle(family)
    cases = []
    for number, (base, what, change, commands, options) in enumerate(values.interleave(*families)):
        some = choose_commands(number, commands)
        cases.append(Case(number, base, what, change, some, **options))
    return cases


def choose_commands(number: int, commands: tuple[str, ...], most: int = 2) -> tuple[str, ...]:
    rng = random.Random(number)
    return tuple(rng.sample(commands, min(most, len(commands))))


def locate(place: Place, name: str) -> Path:
    if name == "THUMBNAIL":
        return min((place.run / "examples").glob("*.png"))
    return place.run / name.replace("PID", str(os.getpid()))


def file_cases() -> Iterator[Spec]:
    """Replace each file by links, devices, folders, damaged content and files without end."""

    def spec(base: str, name: str, kind: str, commands: tuple[str, ...], late: bool = False) -> Spec:
        def change(place: Place, rng: random.Random) -> None:
            path = locate(place, name)
            if name == run_folder.ADAPTER:  # which is read if there is no other file of the weights
                (place.run / run_folder.MODEL).unlink()
            path.parent.mkdir(exist_ok=True)
            FILE_KINDS[kind](path, place.outside, rng)

        return base, f"{base} {name}: {kind}", change, commands, {"late": late}

    for base, read, written in (
        ("finished", READERS, WRITTEN),
        ("begun", BEGUN_READERS, BEGUN_WRITTEN),
        ("head", HEAD_READERS, {}),
        ("teacher", TEACHER_READERS, {}),
        ("fresh", FRESH_READERS, FRESH_WRITTEN),
    ):
        for name, commands in read.items():
            for kind in FILE_KINDS:
                yield spec(base, name, kind, commands)
        for name, commands in written.items():
            for kind in (*LINKS, *NODES):
                yield spec(base, name, kind, commands)
    for name, commands in BY_PROCESS.items():
        for kind in (*LINKS, *NODES):
            yield spec("finished", name, kind, commands, late=True)
    for kind in FILE_KINDS:
        yield spec("export", EXPORT, kind, EXPORT_READERS)


def read_tree(file: Path) -> Any:
    text = file.read_text()
    return [json.loads(line) for line in text.splitlines()] if file.suffix == ".jsonl" else json.loads(text)


def write_tree(file: Path, tree: Any) -> None:
    lines = file.suffix == ".jsonl"
    file.write_text("".join(values.dump(row) + "\n" for row in tree) if lines else values.dump(tree))


def json_cases(bases: Path) -> Iterator[Spec]:
    """Replace each field of each JSON document by values of other types, ranges and sizes."""

    def spec(base: str, name: str, path: values.JsonPath, draw: Callable[[random.Random, Any], Any]) -> Spec:
        def change(place: Place, rng: random.Random) -> str:
            tree = read_tree(place.run / name)
            value = draw(rng, values.get_value(tree, path))
            write_tree(place.run / name, values.set_value(tree, path, value))
            return shorten(value)

        return base, f"{base} {name}: {'.'.join(map(str, path))}", change, READERS_OF[base][name], {}

    for (base, name), count in FIELD_CASES.items():
        tree = read_tree(bases / {"pair": "finished"}.get(base, base) / "seed0" / name)
        for i, path in enumerate(values.json_paths(tree)):
            for n in range(count):
                yield spec(base, name, path, functools.partial(draw_value, i + n))
    for name, path in SWEPT_NUMBERS:
        for number in (*values.RANGES, *values.NOT_FINITE):
            yield spec("finished", name, path, functools.partial(draw_fixed, number))
    for name, path in SWEPT_LISTS:
        old = values.get_value(read_tree(bases / "finished/seed0" / name), path)
        for variant in values.list_variants(old)[::2]:
            yield spec("finished", name, path, functools.partial(draw_fixed, variant))


def draw_value(category: int, rng: random.Random, old: Any) -> Any:
    return values.draw_value(rng, old, category)


def draw_fixed(value: Any, rng: random.Random, old: Any) -> Any:
    return value


SWEPT_NUMBERS = [(run_folder.CALIBRATION, ("temperature",)), (run_folder.ENVIRONMENT, ("data", "resolution"))]
"""Numbers of which every extreme value is tried."""
SWEPT_LISTS = [
    (run_folder.METRICS, ("class_names",)),
    (run_folder.METRICS, ("counts",)),
    (run_folder.METRICS, ("per_class",)),
    (run_folder.ENVIRONMENT, ("data", "counts")),
]
FIELD_CASES = {
    ("finished", run_folder.CONFIG): 3,
    ("finished", run_folder.ENVIRONMENT): 3,
    ("finished", run_folder.METRICS): 3,
    ("finished", run_folder.LOG): 2,
    ("finished", run_folder.CALIBRATION): 7,
    ("finished", run_folder.SKIPPED): 2,
    ("finished", "examples/index.json"): 3,
    ("head", run_folder.CALIBRATION): 2,
    ("head", run_folder.CROSS_VALIDATION): 1,
    ("teacher", run_folder.CONFIG): 1,
    ("teacher", run_folder.ENVIRONMENT): 1,
    ("fresh", run_folder.CONFIG): 1,
    ("fresh", run_folder.LOG): 2,
    ("begun", run_folder.ENVIRONMENT): 2,
    ("begun", run_folder.LOG): 2,
    ("begun", run_folder.WANDB): 7,
    ("pair", run_folder.ENVIRONMENT): 1,
    ("pair", run_folder.METRICS): 2,
}
"""Values that are tried of each field."""


def text_cases(bases: Path) -> Iterator[Spec]:
    """Replace each JSON document as a whole."""

    def spec(base: str, name: str, kind: str, commands: tuple[str, ...]) -> Spec:
        def change(place: Place, rng: random.Random) -> None:
            file = place.run / name
            file.write_bytes(values.damaged_texts(file.read_text())[kind])

        return base, f"{base} {name}: {kind}", change, commands, {}

    for base in ("finished", "begun", "head", "fresh"):
        for name, commands in READERS_OF[base].items():
            if name.endswith((".json", ".jsonl")):
                for kind in values.damaged_texts(""):
                    yield spec(base, name, kind, commands)


ARRAYS = {
    ("finished", "features.npz"): ("features", "labels"),
    ("finished", "predictions.npz"): ("logits", "labels"),
    ("pair", "predictions.npz"): ("logits",),
    ("finished", run_folder.GRADIENTS): ("norms", "stages"),
    ("begun", run_folder.GRADIENTS): ("norms",),
    ("head", TRAINING_FEATURES): ("features", "labels", "ids", "probabilities_label", "suggested"),
}


def read_arrays(file: Path) -> dict[str, np.ndarray]:
    with np.load(file, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


def array_cases(bases: Path) -> Iterator[Spec]:
    """Replace each array of each archive by arrays of other types, shapes and values."""

    def spec(base: str, name: str, array: str, kind: str, commands: tuple[str, ...]) -> Spec:
        def change(place: Place, rng: random.Random) -> None:
            arrays = read_arrays(place.run / name)
            fresh = values.array_variants(arrays[array])[kind]()
            changed = arrays | {array: fresh}
            kept = {key: value for key, value in changed.items() if value is not None}
            np.savez_compressed(place.run / name, **kept)  # type: ignore[arg-type]

        return base, f"{base} {name}: {array} {kind}", change, commands, {}

    for (base, name), arrays in ARRAYS.items():
        for array in arrays:
            for kind in values.array_variants(np.zeros((4, 4))):
                yield spec(base, name, array, kind, READERS_OF[base][name][:3])


def archive_cases(bases: Path) -> Iterator[Spec]:
    """Replace one member of each archive by a bomb, a pickle or a header that promises much."""

    def spec(base: str, name: str, array: str, kind: str, commands: tuple[str, ...]) -> Spec:
        def change(place: Place, rng: random.Random) -> None:
            file = place.run / name
            damages = values.npz_damages(read_arrays(file), array, Exploding(place.outside / "exploded"))
            file.write_bytes(damages[kind]())

        return base, f"{base} {name}: {array} {kind}", change, commands, {}

    for (base, name), (array, *_) in ARRAYS.items():
        if base != "pair":
            for kind in values.npz_damages({array: np.zeros(2)}, array, None):
                yield spec(base, name, array, kind, READERS_OF[base][name][:3])


# Weights and exported files


def weight_cases(bases: Path) -> Iterator[Spec]:
    """Replace the header or the tensors of a file of weights, in a run folder and as an exported file."""

    def spec(base: str, name: str, kind: str, commands: tuple[str, ...]) -> Spec:
        def change(place: Place, rng: random.Random) -> None:
            if name == run_folder.ADAPTER:
                (place.run / run_folder.MODEL).unlink()
            file = place.run / name
            file.write_bytes(values.safetensors_damages(file.read_bytes())[kind]())

        return base, f"{base} {name}: {kind}", change, commands, {}

    content = (bases / "export" / EXPORT).read_bytes()
    for kind in values.safetensors_damages(content):
        yield spec("finished", run_folder.MODEL, kind, READERS[run_folder.MODEL])
        yield spec("export", EXPORT, kind, EXPORT_READERS)
        yield spec("head", run_folder.ADAPTER, kind, HEAD_READERS[run_folder.ADAPTER])
        yield spec("teacher", run_folder.MODEL, kind, TEACHER_READERS[run_folder.MODEL])


def description_cases(bases: Path) -> Iterator[Spec]:
    """Replace each field of the description in an exported file, and the whole description."""

    def rewrite(place: Place, text: str) -> None:
        file = place.run / EXPORT
        header, data = values.split_safetensors(file.read_bytes())
        header["__metadata__"] = header["__metadata__"] | {"longtail": text}
        file.write_bytes(values.join_safetensors(header, data))

    def read(file: Path) -> str:
        return str(values.split_safetensors(file.read_bytes())[0]["__metadata__"]["longtail"])

    def on_field(path: values.JsonPath, category: int, fixed: Any = None) -> Spec:
        def change(place: Place, rng: random.Random) -> str:
            tree = json.loads(read(place.run / EXPORT))
            value = values.draw_value(rng, values.get_value(tree, path), category) if fixed is None else fixed
            rewrite(place, values.dump(values.set_value(tree, path, value)))
            return shorten(value)

        return "export", f"export description: {'.'.join(map(str, path))}", change, EXPORT_READERS, {}

    def on_whole(kind: str) -> Spec:
        def change(place: Place, rng: random.Random) -> None:
            text = values.damaged_texts(read(place.run / EXPORT))[kind].decode("utf-8", "surrogateescape")
            rewrite(place, text.encode("utf-8", "replace").decode())

        return "export", f"export description: {kind}", change, EXPORT_READERS, {}

    tree = json.loads(read(bases / "export" / EXPORT))
    for i, path in enumerate(values.json_paths(tree)):
        used = path[0] in ("class_names", "counts", "prior", "temperature", "preprocessing", "config")
        count = 2 if path[0] == "config" else 7 if used and path[0] != "preprocessing" else 3
        for n in range(count):
            yield on_field(path, i + n)
    for path in (("temperature",), ("prior", "shares", 0), ("counts", 0), ("preprocessing", "side")):
        for number in (*values.RANGES, *values.NOT_FINITE):
            yield on_field(path, 0, number)
    for path in (("class_names",), ("counts",), ("prior", "shares")):
        for variant in values.list_variants(values.get_value(tree, path))[::2]:
            yield on_field(path, 0, variant)
    for kind in values.damaged_texts(""):
        yield on_whole(kind)


NAMES = [
    "<script>alert(1)<",
    '"><img src=x onerror=alert(1)>',
    "\x1b[31mred\x07\x1b]0;title\x07",
    "a\nb\r\tc",
    "\u202egnp.exe",
    "\udcff\udcfe",
    "a|b|c",
    "[red][bold]",
    "=1+1",
    "-o",
    " ",
    "$(id)",
    "%s{0}",
    "n" * 255,
]


def name_cases() -> Iterator[Spec]:
    """Give the run folder a hostile name, and put it into a folder with one; or surround it by very many folders."""
    commands = ("report", "table", "board", "latency", "gradient", "predict", "export", "eval", "from", "distill")

    def add(what: str, change: Callable[[Place], object], verbs: tuple[str, ...]) -> Iterator[Spec]:
        for verb in verbs:
            yield "finished", f"finished folder: {what}", lambda place, rng: change(place) and None, (verb,), {}

    for i, name in enumerate(NAMES):
        verbs = tuple((commands * 2)[i % len(commands) :][:4])
        yield from add(f"renamed {name!r}", lambda place, name=name: place.run.rename(place.run.with_name(name)), verbs)
    verbs = ("report", "table", "board", "predict")
    yield from add("a folder 1,500 deep beside it", lambda place: nest_folders(place.top, 1_500), verbs)
    yield from add("3,000 folders beside it", lambda place: [(place.top / f"{i}").mkdir() for i in range(3_000)], verbs)
    yield from add("links in a circle", lambda place: (place.run / "again").symlink_to(place.top), verbs)
    yield from add("50 copies of its JSON files", lambda place: copy_documents(place, 50), verbs)


def nest_folders(top: Path, depth: int) -> None:
    for _ in range(depth):
        top = top / "d"
        os.mkdir(top)


def copy_documents(place: Place, count: int) -> None:
    for i in range(count):
        folder = place.top / f"seed{i + 1}"
        folder.mkdir()
        for name in (run_folder.CONFIG, run_folder.ENVIRONMENT, run_folder.METRICS, run_folder.LOG):
            text = (place.run / name).read_text()
            (folder / name).write_text(text.replace('"seed": 0', f'"seed": {i + 1}'))


def thumbnail_cases() -> Iterator[Spec]:
    """Replace a thumbnail by decompression bombs, other formats and files that are not images."""
    for kind in values.image_damages():

        def change(place: Place, rng: random.Random, kind: str = kind) -> None:
            locate(place, "THUMBNAIL").write_bytes(damaged_image(kind))

        yield "finished", f"finished thumbnail: {kind}", change, READERS["THUMBNAIL"], {}


@functools.cache
def damaged_image(kind: str) -> bytes:
    return values.image_damages()[kind]()


# Selections


def select_fast(cases: Sequence[Case]) -> list[int]:
    """Return the numbers of about sixty cases: one for each file of each base, with alternating kinds of changes."""
    groups: dict[str, list[int]] = {}
    for case in cases:
        if not case.on_disk:
            groups.setdefault(case.what.split(":")[0], []).append(case.number)
    return sorted(numbers[7 * i % len(numbers)] for i, numbers in enumerate(groups.values()))


def select_real(cases: Sequence[Case], real: Collection[str], count: int = 60) -> list[int]:
    """Return evenly spaced numbers of cases whose first command can be run as a real process."""
    usable = [case.number for case in cases if case.commands[0] in real and not case.late]
    return usable[:: len(usable) // count][:count]
