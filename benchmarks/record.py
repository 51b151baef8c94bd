"""Train one ResNet-32 (470,004 parameters) on CIFAR-100-LT at imbalance 100 as accurately as possible, with recorded trials.

    python benchmarks/record.py --data DATA --list
    python benchmarks/record.py --data DATA --only bs paco wide-bs --minutes 9
    python benchmarks/record.py --data DATA --only kd both-1600 --teachers wide-bs wide-paco --minutes 9
    python benchmarks/record.py --data DATA --only kd --estimate
    python benchmarks/record.py --data DATA --test kd-800 --minutes 9
    python benchmarks/record.py --pack FOLDER --only wide-bs; python benchmarks/record.py --unpack FOLDER

The trials are single networks, teachers (four times as wide, or several networks), and students of these teachers. Everything
is selected by the class-balanced accuracy on validation images (see benchmarks/factors.py), which take the place of the test
images in all runs. Only --test evaluates on the test set: a finished recipe with eight seeds, once.

Each trial is recorded in --results and is not repeated. Runs are in OUT/TRIAL/seedN. After --minutes a training stops with a
checkpoint, and the same command continues it. Before a trial starts, its time is estimated from some measured steps.

Seeds of a student have the same order and views of the images, so that the teachers run once for all seeds in parallel. With
--own-views they have their own, as the final recipe should have: the deviation over seeds then includes this variation.

The weights of teachers are stored in float16, in which they are measured and used. --pack writes them into files of a limited
size, and --unpack restores the run folders, with the same checksums, on another machine.
"""

import argparse
import json
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from factors import COSINE, IMBALANCE, format_line, last_epoch, prepare_config, with_changes, with_validation
from measure import describe_machine, free_memory, save, synchronize

from longtail import files, recipes, run_folder
from longtail.config import Config, DistillationSettings, from_dict
from longtail.data.sources import DataSet, Split
from longtail.engine.cuda_graph import make_step, use_own_stream
from longtail.engine.device import choose_device, preserve_global_settings
from longtail.engine.evaluate import Evaluator, in_test_mode, load_stored_network
from longtail.engine.loop import share_views, train_step
from longtail.engine.predictions import compute_logits
from longtail.engine.train import train
from longtail.engine.trainer import Trainer
from longtail.errors import Interrupted
from longtail.metrics import evaluate_predicted_classes, mean_std
from longtail.views import Views

BASE = "bs"
"""The trial that others are compared with."""
EIGHT = tuple(range(8))
CHECKPOINT_EVERY = 100
"""Epochs between checkpoints. A stopped training saves one, too."""
RESERVE = 20
"""Seconds of the time limit that are left for the last checkpoint."""
MEASURED_STEPS = 20
FILES = (run_folder.CONFIG, run_folder.ENVIRONMENT, run_folder.LOG, run_folder.METRICS)
"""The files of a run that are packed with the weights. The last one marks a finished run."""
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Trial:
    """A recipe, the seeds with which it is compared with others, and the trials whose networks teach it."""

    config: Config
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    teachers: tuple[str, ...] = ()
    is_teacher: bool = False


def make_trials(teachers: Sequence[str] = ("wide-bs",), own_views: bool = False) -> dict[str, Trial]:
    """Return all trials by name, from cheap to expensive.

    Args:
        teachers: The trials that teach the students. Names of students that others teach have their names appended.
        own_views: Whether each seed of a student has its own views, so that the deviation over seeds includes their effect.
            The teachers, which take most of the time, then run for each seed.
    """
    recipe = {name: recipes.cifar100_lt(name, IMBALANCE, "equal") for name in ("balanced-softmax", "paco")}
    bs = with_changes(recipe["balanced-softmax"], "optim", lr=0.2, **COSINE)
    single = {"bs": bs, "paco": recipe["paco"]}  # each with its best optimizer in results/schedule.json
    trials = {name: Trial(config, EIGHT, is_teacher=True) for name, config in single.items()}
    for name, config in single.items():
        ema = with_changes(config, "train", ema=0.999)
        trials |= {
            f"{name}-ema": Trial(ema),
            f"{name}-2-views": Trial(with_changes(ema, "method", views=2, consistency=1.0)),
            f"{name}-2-views-plain": Trial(with_changes(ema, "method", views=2)),
            f"{name}-4-views": Trial(with_changes(ema, "method", views=4, consistency=1.0)),
            f"{name}-sam-0.05": Trial(with_changes(ema, "optim", sam=0.05)),
            f"{name}-sam-0.2": Trial(with_changes(ema, "optim", sam=0.2)),
            f"{name}-800": Trial(with_changes(ema, "train", epochs=800)),
            f"{name}-2-views-800": Trial(
                with_changes(with_changes(ema, "train", epochs=800), "method", views=2, consistency=1.0)
            ),
        }
    wide = {name: with_changes(config, "model", name="resnet32x4_cifar") for name, config in single.items()}
    for name, config in wide.items():
        for suffix, epochs in (("", 200), ("-400", 400)):
            config = with_changes(config, "train", epochs=epochs, ema=0.999)
            trials[f"wide-{name}{suffix}"] = Trial(config, (0, 1, 2), is_teacher=True)
    sharp = with_changes(with_changes(wide["bs"], "train", epochs=200, ema=0.999), "optim", sam=0.1)
    trials["wide-bs-sam"] = Trial(sharp, (0, 1, 2), is_teacher=True)
    again = make_student(with_changes(wide["bs"], "train", epochs=200, ema=0.999), mixture="both", weight=0.9)
    trials["wide-mixtures"] = Trial(again, (0, 1, 2), ("wide-bs",), is_teacher=True)
    student = with_changes(bs, "train", ema=0.999, view_seed="own" if own_views else 0)
    students = {
        "kd": make_student(student),
        "kd-T2": make_student(student, temperature=2.0),
        "kd-0.9": make_student(student, weight=0.9),
        "kd-0.9-T2": make_student(student, weight=0.9, temperature=2.0),
        "kd-1": make_student(student, weight=1.0),
        "kd-1-T2": make_student(student, weight=1.0, temperature=2.0),
        "kd-without-ema": make_student(with_changes(student, "train", ema=0.0)),
        "standardized": make_student(student, weight=0.9, temperature=2.0, target="standardized"),
        "dkd": make_student(student, target="dkd"),
        "contrast": make_student(student, contrast=0.5),
        "contrast-T4": make_student(student, contrast=0.5, temperature=4.0),  # the weights of GML, 1 : 1 : 1
        "mixup": make_student(student, weight=1.0, mixture="mixup"),
        "cutmix": make_student(student, weight=1.0, mixture="cutmix"),
        "both": make_student(student, weight=1.0, mixture="both"),
        "both-0.9": make_student(student, weight=0.9, mixture="both"),
        "kd-2-views": make_student(student, views=2),
        "both-2-views": make_student(student, weight=1.0, mixture="both", views=2),
        "kd-800": with_changes(make_student(student), "train", epochs=800),
        "both-800": with_changes(make_student(student, weight=1.0, mixture="both"), "train", epochs=800),
        "both-1600": with_changes(make_student(student, weight=1.0, mixture="both"), "train", epochs=1600),
    }
    suffix = "" if tuple(teachers) == ("wide-bs",) else f" by {' and '.join(teachers)}"
    suffix += " with own views" * own_views
    return trials | {f"{name}{suffix}": Trial(each, teachers=tuple(teachers)) for name, each in students.items()}


def make_student(config: Config, **settings: Any) -> Config:
    """Return the configuration of a student, whose teachers are not set yet."""
    return replace(config, method=DistillationSettings(**settings))


def without_teachers(config: Config) -> Config:
    """Return the configuration of a trial, which names its teachers instead of having their checksums."""
    if not isinstance(config.method, DistillationSettings):
        return config
    return with_changes(config, "method", teachers=(), teacher_checksums=())


# Measuring networks


def predict(folder: Path, split: Split, data: DataSet, device: torch.device) -> np.ndarray:
    """Return the probabilities (N, C) of a finished run for equally common classes.

    Args:
        folder: The run folder.
        split: The images.
        data: The data set, for the counts of the classes.
        device: The device.
    """
    config = with_changes(run_folder.load_config(folder), "train", execution="eager")
    network = load_stored_network(folder / run_folder.MODEL, config, data.train.counts, device)
    views = Views(config.views, config.data.image_size)
    x_NF = Evaluator(network, data, views, device, config.train.batch_size).features(split)
    shift_C = network.prior().log().float().to(device)
    with in_test_mode(network):
        logits_NC = torch.cat(list(compute_logits(network.classify, x_NF, len(data.train.counts))))
    return (logits_NC - shift_C).softmax(1).cpu().numpy()


def score(probabilities_NC: np.ndarray, split: Split, data: DataSet) -> dict[str, float | None]:
    """Return the class-balanced accuracy on images, and the accuracy of many-, medium- and few-shot classes and the ECE."""
    guess_N, confidence_N = probabilities_NC.argmax(1), probabilities_NC.max(1).clip(0, 1)
    found = evaluate_predicted_classes(guess_N, confidence_N, split.labels, data.counts, split.class_names)
    accuracy = float(np.mean([a for a in found["per_class"] if a is not None]))
    return {"accuracy": accuracy, **{name: found[name] for name in ("many", "medium", "few", "ece")}}


def score_runs(folders: Sequence[Path], split: Split, data: DataSet, device: torch.device) -> dict[str, Any]:
    """Return the scores of each run as lists, and as "ensemble" those of the mean of their probabilities.

    Args:
        folders: The run folders.
        split: The images.
        data: The data set.
        device: The device.
    """
    every = [predict(folder, split, data, device) for folder in folders]
    scores = [score(probabilities, split, data) for probabilities in every]
    found: dict[str, Any] = {name: [each[name] for each in scores] for name in scores[0]}
    return found | ({"ensemble": score(np.mean(every, 0), split, data)} if len(every) > 1 else {})


# Storing teachers


def store_half(folder: Path) -> None:
    """Store the weights of a finished run in float16. What is stored already is not written again."""
    path = folder / run_folder.MODEL
    weights = safetensors.torch.load_file(path)
    if any(tensor.dtype == torch.float32 for tensor in weights.values()):
        halves = {name: t.half() if t.is_floating_point() else t for name, t in weights.items()}
        files.write_bytes(path, safetensors.torch.save(halves))


def pack(folders: Sequence[Path], out: Path, root: Path, limit: int) -> list[Path]:
    """Write run folders into files of a limited size, and return the files.

    Args:
        folders: The run folders. Their weights must be smaller than the limit.
        out: The folder of the files.
        root: The folder to which the stored paths are relative.
        limit: The largest size of the weights in a file in bytes.
    """
    bundles: list[tuple[int, list[Path]]] = []
    for folder in sorted(folders, key=lambda each: -(each / run_folder.MODEL).stat().st_size):
        size = (folder / run_folder.MODEL).stat().st_size
        if size > limit:
            raise SystemExit(f"{folder}: {size / MEBIBYTE:.1f} MiB of weights do not fit into a file")
        room = next((i for i, (used, _) in enumerate(bundles) if used + size <= limit), None)
        used, others = (0, []) if room is None else bundles.pop(room)
        bundles.append((used + size, [*others, folder]))
    paths = []
    for number, (_, members) in enumerate(bundles):
        tensors: dict[str, torch.Tensor] = {}
        texts: dict[str, str] = {}
        for folder in members:
            name = folder.relative_to(root).as_posix()
            weights = safetensors.torch.load_file(folder / run_folder.MODEL)
            tensors |= {f"{name}:{key}": tensor for key, tensor in weights.items()}
            texts |= {f"{name}/{file}": (folder / file).read_text() for file in FILES}
        paths.append(out / f"runs{number}.safetensors")
        out.mkdir(parents=True, exist_ok=True)
        files.write_bytes(paths[-1], safetensors.torch.save(tensors, metadata=texts))
    return paths


def unpack(path: Path, root: Path) -> list[Path]:
    """Restore the run folders of a file, unless they exist; return all of them.

    Args:
        path: The file.
        root: The folder to which the stored paths are relative.
    """
    with safetensors.safe_open(os.fspath(path), framework="pt") as stored:
        texts = stored.metadata()
    tensors = safetensors.torch.load_file(path)
    names = sorted({name.rpartition("/")[0] for name in texts})
    for name in names:
        folder = root / name
        if not (folder / run_folder.METRICS).exists():
            folder.mkdir(parents=True, exist_ok=True)
            weights = {key.removeprefix(f"{name}:"): t for key, t in tensors.items() if key.startswith(f"{name}:")}
            files.write_bytes(folder / run_folder.MODEL, safetensors.torch.save(weights))
            for file in FILES:
                files.write_text(folder / file, texts[f"{name}/{file}"])
    return [root / name for name in names]


# Trials


class Record:
    """Train trials and keep their records in a file.

    Args:
        args: The arguments of the command.
        trials: All trials by name.
    """

    def __init__(self, args: argparse.Namespace, trials: dict[str, Trial]) -> None:
        self.args, self.trials = args, trials
        self.book: dict[str, Any] = json.loads(args.results.read_text()) if args.results.exists() else {}
        self.device = choose_device(args.device)
        self._data: DataSet | None = None

    def data(self) -> DataSet:
        """Return the usual training and test images, with the validation images of benchmarks/factors.py."""
        if self._data is None:
            self._data = with_validation(self.prepare(BASE, (0,)))
        return self._data

    def validation_data(self) -> DataSet:
        """Return the images of a trial, whose test images are the validation images."""
        data = self.data()
        assert data.val is not None
        return replace(data, test=data.val, val=None)

    def prepare(self, name: str, seeds: Sequence[int]) -> Config:
        """Return the configuration of a trial without its teachers."""
        config = self.trials[name].config
        epochs = self.args.epochs or config.train.epochs
        config = prepare_config(config, self.args.data, epochs, tuple(seeds))
        return with_changes(config, "train", checkpoint_every=CHECKPOINT_EVERY, device=self.args.device)

    def seeds(self, name: str) -> tuple[int, ...]:
        return tuple(self.args.seeds or self.trials[name].seeds)

    def folders(self, name: str, seeds: Sequence[int]) -> list[Path]:
        return [self.args.out / folder_name(name) / f"seed{seed}" for seed in seeds]

    def teacher_folders(self, name: str) -> list[Path]:
        """Return the run folders of the teachers of a trial."""
        return [
            folder
            for teacher in self.trials[name].teachers
            for folder in self.folders(teacher, self.trials[teacher].seeds)
        ]

    def is_recorded(self, name: str, seeds: Sequence[int]) -> bool:
        """Return whether the results have this trial with the same settings, the same teachers and all of these seeds."""
        record = self.book.get(name)
        if record is None or not set(seeds) <= set(record["seeds"]):
            return False
        stored = without_teachers(from_dict(Config, record["identity"])).identity()
        return stored == self.prepare(name, seeds).identity() and record["teachers"] == [*self.trials[name].teachers]

    def with_teachers(self, name: str, config: Config) -> Config:
        """Return the configuration of a trial with its teachers, which are trained first if they do not exist."""
        for teacher in self.trials[name].teachers:
            self.measure(teacher, self.trials[teacher].seeds)
            self.train(teacher, self.trials[teacher].seeds)  # they may be recorded, and their runs on another machine
        found = [run_folder.read(folder) for folder in self.teacher_folders(name)]
        if not found:
            return config
        checksums = tuple(map(run_folder.hash_network, found))
        return with_changes(config, "method", teachers=tuple(run.folder for run in found), teacher_checksums=checksums)

    def train(self, name: str, seeds: Sequence[int]) -> Config:
        """Train the runs of a trial that are not finished, and return their configuration."""
        folders = self.folders(name, seeds)
        config = self.prepare(name, seeds)
        unfinished = [s for s, f in zip(seeds, folders, strict=True) if not (f / run_folder.METRICS).exists()]
        if unfinished:
            config = self.with_teachers(name, config)
            estimate = self.estimate(name, replace(config, train=replace(config.train, seeds=tuple(unfinished))))
            print(f"{name}, seeds {' '.join(map(str, unfinished))}: {estimate}", flush=True)
            train(config, folders[0].parent, resume=True, data=self.validation_data())
        if self.trials[name].is_teacher:
            for folder in folders:
                store_half(folder)
        return run_folder.load_config(folders[0])

    def measure(self, name: str, seeds: Sequence[int]) -> dict[str, Any]:
        """Return the record of a trial; train and measure it first if there is none."""
        if not self.is_recorded(name, seeds):
            start = time.perf_counter()
            config, folders = self.train(name, seeds), self.folders(name, seeds)
            data = self.data()
            assert data.val is not None
            found = score_runs(folders, data.val, data, self.device)
            ends, metrics = [last_epoch(f) for f in folders], [run_folder.read(f).metrics for f in folders]
            kept = {key: [end.get(key) for end in ends] for key in ("loss", "accuracy", "distillation", "consistency")}
            self.book[name] = {
                "validation": found.pop("accuracy"),
                **found,
                "training": kept,
                **{key: [each[key] for each in metrics] for key in ("seconds", "setup_seconds", "together")},
                "seeds": list(seeds),
                "teachers": [*self.trials[name].teachers],
                "identity": config.identity(),
                **describe_machine(self.device),
                "wall_seconds": round(time.perf_counter() - start),
            }
            save(self.args.results, self.book)
        return dict(self.book[name])

    def test(self, name: str) -> dict[str, Any]:
        """Return the scores of eight seeds of a recipe on the test set; measure them first if they are not recorded."""
        record = self.measure(name, EIGHT)
        if "test" not in record:
            self.train(name, EIGHT)  # the runs may have been left on another machine
            data = self.data()
            self.book[name]["test"] = score_runs(self.folders(name, EIGHT), data.test, data, self.device)
            save(self.args.results, self.book)
        return dict(self.book[name]["test"])

    def estimate(self, name: str, config: Config) -> str:
        """Return the time of a step and of the training, from some steps. Nothing is compiled for this."""
        short = with_changes(config, "train", epochs=1)
        groups = [
            config.train.seeds[i : i + config.train.parallel_seeds]
            for i in range(0, len(config.train.seeds), config.train.parallel_seeds)
        ]
        if self.device.type == "cpu":
            groups = [(seed,) for seed in config.train.seeds]
        step, steps = measure_step(short, groups[0], self.validation_data(), self.device, self.folders(name, (0,))[0])
        seconds = sum(len(group) / len(groups[0]) for group in groups) * config.train.epochs * steps * step
        return f"{1000 * step:.2f} ms a step of {len(groups[0])} seeds, about {seconds / 60:.1f} minutes"

    def format(self, name: str) -> str:
        """Return a line with the validation accuracy, the difference from the base, and the other scores of a trial."""
        record, base = self.book[name], self.book.get(BASE)
        line = format_line(name, record, record)
        if base is not None and name != BASE:
            shared = sorted(set(record["seeds"]) & set(base["seeds"]))
            if len(shared) > 1:
                line = format_line(name, *(pick_seeds(each, shared) for each in (record, base)))
        taught = [value for value in record["training"]["distillation"] if value is not None]
        parts = [line, format_groups(record), f"{max(record['seconds']):.0f} s"]
        parts += [f"training KL {mean_std(taught)[0]:.3f}"] if taught else []
        parts += [f"ensemble {record['ensemble']['accuracy']:.1f}"] if "ensemble" in record else []
        return "   ".join(parts)


def folder_name(name: str) -> str:
    """Return the name of the folder of a trial."""
    return name.replace(" ", "-")


def format_groups(scores: dict[str, Any]) -> str:
    """Return the mean accuracies of many-, medium- and few-shot classes; a dash where there are no such classes."""
    means = [[value for value in scores[key] if value is not None] for key in ("many", "medium", "few")]
    return " / ".join(f"{mean_std(values)[0]:.1f}" if values else "–" for values in means)


def pick_seeds(record: dict[str, Any], seeds: Sequence[int]) -> dict[str, Any]:
    """Return the validation accuracy of some seeds of a record."""
    by_seed = dict(zip(record["seeds"], record["validation"], strict=True))
    return {"validation": [by_seed[seed] for seed in seeds]}


def measure_step(
    config: Config, seeds: Sequence[int], data: DataSet, device: torch.device, folder: Path
) -> tuple[float, int]:
    """Return the seconds of a step of some seeds in parallel, and the number of steps of an epoch.

    Args:
        config: The configuration. If it has few steps, they are captured or fused, but not compiled.
        seeds: The seeds.
        data: The images.
        device: The device.
        folder: Where the run folder would be. Nothing is written.
    """
    trainers: list[Trainer] = []
    times = []
    with preserve_global_settings():
        for seed in seeds:
            trainers.append(Trainer(config, seed, data, folder, device, trainers[0] if trainers else None))
        share_views(trainers)
        steps_per_epoch = trainers[0].steps_per_epoch
        steps = min(MEASURED_STEPS, steps_per_epoch) if device.type == "cuda" else 2
        with use_own_stream(device):
            run_step = make_step(trainers, train_step)
            for step in range(steps):
                for trainer in trainers:
                    trainer.prepare(step)
                run_step()
                if step in (0, steps - 1):
                    synchronize(device)
                    times.append(time.perf_counter())
        for trainer in trainers:
            trainer.batches.close()
    del run_step, trainers
    free_memory()
    return (times[-1] - times[0]) / max(steps - 1, 1), steps_per_epoch


# The command


def stop_after(seconds: float) -> None:
    """Interrupt this process after a time, as Ctrl-C does: a training saves a checkpoint first."""

    def interrupt(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored in processes that a shell starts in the background
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))


def choose(trials: dict[str, Trial], names: Sequence[str]) -> Iterator[str]:
    """Yield the names of trials that begin with one of the given names and a space, or equal it; all if none is given."""
    for name in names:
        if not any(trial.partition(" ")[0] == name for trial in trials):
            raise SystemExit(f"no trial {name!r}: there are {', '.join(trials)}")
    yield from (trial for trial in trials if not names or trial.partition(" ")[0] in names)


def main(argv: Sequence[str] | None = None, trials: dict[str, Trial] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/record"))
    parser.add_argument("--results", type=Path, default=Path("results/record.json"))
    parser.add_argument("--only", nargs="+", default=[], metavar="TRIAL", help="the trials to train; default: all")
    parser.add_argument("--test", nargs="+", default=[], metavar="TRIAL", help="evaluate these recipes on the test set")
    parser.add_argument(
        "--teachers", nargs="+", default=["wide-bs"], metavar="TRIAL", help="the trials that teach the students"
    )
    parser.add_argument(
        "--own-views", action="store_true", help="seeds of students do not share views and teacher outputs"
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the trial")
    parser.add_argument("--epochs", type=int, help="another length of all trials, for a short test")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--list", action="store_true", help="print all trials and their records")
    parser.add_argument("--estimate", action="store_true", help="print the estimated times, and train nothing")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="write the finished runs of --only into files")
    parser.add_argument("--unpack", type=Path, metavar="FOLDER", help="restore runs from these files")
    parser.add_argument("--limit", type=float, default=15.5, help="largest size of such a file, in MiB")
    args = parser.parse_args(argv)
    record = Record(args, trials or make_trials(args.teachers, args.own_views))
    chosen = list(choose(record.trials, args.test or args.only))
    if args.unpack:
        for path in sorted(args.unpack.glob("*.safetensors")):
            print(*unpack(path, args.out), sep="\n")
    elif args.pack:
        found = [folder for name in chosen for folder in record.folders(name, record.seeds(name))]
        finished = [folder for folder in found if (folder / run_folder.METRICS).exists()]
        print(*pack(finished, args.pack, args.out, round(args.limit * MEBIBYTE)), sep="\n")
    elif args.list:
        for name in chosen:
            print(record.format(name) if name in record.book else f"{name:32} not recorded", flush=True)
    elif args.estimate:
        for name in chosen:
            if all((folder / run_folder.METRICS).exists() for folder in record.teacher_folders(name)):
                config = record.with_teachers(name, record.prepare(name, record.seeds(name)))
                print(f"{name:32} {record.estimate(name, config)}", flush=True)
            else:
                print(f"{name:32} its teachers {', '.join(record.trials[name].teachers)} are not trained", flush=True)
    else:
        return run_trials(record, chosen, args.minutes)
    return 0


def run_trials(record: Record, names: Sequence[str], minutes: float) -> int:
    """Train or test trials until the time is over; return 0, or 1 if some are left."""
    if math.isfinite(minutes):
        stop_after(60 * minutes - RESERVE)
    try:
        for name in names:
            if record.args.test:
                test = record.test(name)
                mean, std = mean_std(test["accuracy"])
                print(f"{name}, test: {mean:.2f} ± {std or 0:.2f}   {format_groups(test)}", flush=True)
            else:
                record.measure(name, record.seeds(name))
                print(record.format(name), flush=True)
    except (Interrupted, KeyboardInterrupt) as stop:
        print(f"stopped: {stop or 'the time is over'}; run the same command to continue", flush=True)
        return 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
