"""Random commands from the definition of the command line: its verbs and flags, with valid and odd values."""

import typing
from collections.abc import Sequence

from hypothesis import strategies as st

from longtail import recipes
from longtail.cli import COMMANDS, reference
from longtail.config import METHODS, Config, ViewConfig
from longtail.recipes import RECIPES

NUMBERS = [
    "",
    "9" * 30,
    "0",
    "1",
    "-1",
    "2",
    "1.5",
    "-0.0",
    "nan",
    "inf",
    "-inf",
    "1e309",
    "1e-320",
    "0x10",
    "1_0",
    "１",
    "x",
]
TEXTS = ["", " ", "x", "digits", "ü\u202e", "\x1b[31m", "a\nb", "--", "-", "%s{0}", "$(id)", "\udcff", "w" * 5000]
PLACES = [
    "empty empty.txt empty.csv empty.json empty.safetensors empty.pth empty.jpg bytes.txt bytes.json deep.json huge.json",
    "dangling loop circle full null numbers.txt network runs runs/ce/seed0 begun pets list.txt list.csv shards",
    "climbs.txt absolute.txt nul.txt long.txt labels.txt devices.txt field.csv quotes.csv inat.json",
    "shards-columns shards-labels shards-nothing shards-kinds shards-rows shards-cut shards-footer shards-empty",
    "bomb.pth bomb.pth.tar scalar.pth bomb.npz cut.safetensors header.safetensors described.safetensors spoilt",
    "pets/cat/0.png pets/cat/nothing.png pets/*/*.png gone gone/further list.txt/below spoilt/weights",
]
STRANGE = ["ünï côdé \n pets", "n" * 300, "n" * 300 + "/x", "a/" * 3000]
FRESH = [
    "out",
    "out/deeper",
    "out.json",
    "out.html",
    "out.svg",
    "out.pdf",
    "out.csv",
    "out.safetensors",
    "./-",
    "o\nu t.json",
]


def paths() -> st.SearchStrategy[str]:
    """Draw paths of files in the zoo, and of files that do not exist."""
    there = [name for line in PLACES for name in line.split()] + STRANGE
    return st.sampled_from([f"ZOO/{name}" for name in there] + FRESH + ["/proc/x", "", "\udcff"])


def kinds() -> dict[str, type]:
    """Return the class of the arguments of each verb."""
    parts = {name: reference.SUBCOMMANDS.get(name, {"": kind}) for name, (kind, _) in COMMANDS.items()}
    return {f"{verb} {part}".strip(): kind for verb, several in parts.items() for part, kind in several.items()}


def flags_of(kind: type) -> list[reference.Flag]:
    """Return the flags of a class and of its sections."""
    found = reference.list_flags(kind, "")
    for name, hint in typing.get_type_hints(kind).items():
        if name == "method" and reference.is_section(hint):
            found += [flag for method in METHODS.values() for flag in reference.list_flags(method, "method.")]
        elif reference.is_section(hint):
            found += reference.list_flags(typing.get_type_hints(Config)[name], f"{name}.")
        if name == "views":
            found += [flag for view in ("query", "key") for flag in reference.list_flags(ViewConfig, f"views.{view}.")]
    return found


def value(flag: reference.Flag) -> st.SearchStrategy[list[str]]:
    """Draw values of a flag, usually as many as it takes."""
    words = flag.values
    if words == "switch":
        return st.sampled_from([[], [], ["True"], ["x"]])
    few = st.lists(one(words), min_size=0, max_size=3) if "…" in words else st.just([])
    usual = st.lists(one(words), min_size=1, max_size=1)
    return st.one_of(usual, usual, usual, few, st.lists(st.sampled_from(TEXTS), max_size=2))


def one(words: str) -> st.SearchStrategy[str]:
    choices = [st.sampled_from(NUMBERS)] if "number" in words or words.startswith("integer") else []
    choices += [paths()] if "path" in words else []
    choices += [st.one_of(st.sampled_from(TEXTS), paths(), names())] if "text" in words else []
    choices += [st.sampled_from(words.split(" · "))] if "·" in words else []
    return st.one_of(*(choices or [st.sampled_from(TEXTS)]))


def names() -> st.SearchStrategy[str]:
    return st.sampled_from(
        [*RECIPES, "ce", "paco", "all", "uniform", "train", "latency", "framework", "extra", "gradient"]
    )


def firsts(verb: str) -> st.SearchStrategy[list[str]]:
    """Draw the positional arguments of a verb."""
    if verb in ("demo", "theory"):
        return st.just([])
    good = {verb: ["digits-lt"] for verb in ("train", "compare", "data inspect", "data shard")}
    good |= {
        "reproduce": ["methods", "ablations", "cifar100-lt"],
        "figure": ["latency", "gradient", "framework", "extra"],
    }
    likely = st.one_of(st.sampled_from(good.get(verb, ["ZOO/network", "ZOO/runs"])), paths(), names())
    return st.lists(likely, min_size=1, max_size=1 if verb in good and verb != "figure" else 3)


@st.composite
def commands(draw: st.DrawFn, verbs: Sequence[str]) -> list[str]:
    """Draw a verb, its positional arguments, and up to three flags."""
    verb = draw(st.sampled_from(verbs))
    args = [*verb.split(), *draw(firsts(verb))]
    flags = [flag for flag in flags_of(kinds()[verb]) if flag.name.startswith("--")]
    for flag in draw(st.lists(st.sampled_from(flags), max_size=3) if flags else st.just([])):
        name = draw(st.sampled_from([flag.name] * 8 + [flag.name[:-1], flag.name.replace("--", "--no_"), "--nonsense"]))
        args += [name, *draw(value(flag))]
    return args


SLOW = (
    "--train.execution",
    "--log.loggers",
    "--model.pretrained",
    "--resume",
    "--out",
)  # compile, call the network, or no setting


@st.composite
def trainings(draw: st.DrawFn) -> list[str]:
    """Draw trainings of one epoch on a small data set with one or two changed settings; half of them are valid."""
    method = draw(st.sampled_from(sorted(METHODS)))
    known = [f for f in flags_of(kinds()["train"]) if f.name.startswith("--") and "." in f.name and f.name not in SLOW]
    args = ["train", "digits-lt", "--log.progress", "none", "--train.device", "cpu"]
    for flag in draw(st.lists(st.sampled_from(known), min_size=1, max_size=2)):
        args += [flag.name, *draw(value(flag))]
    return [*args, "--train.epochs", "1", *(["--method", method] if method in recipes.METHODS else [])]
