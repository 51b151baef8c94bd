"""The Python functions of the commands with random arguments: they succeed, or raise a UserError or a TypeError."""

import contextlib
import io
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import longtail
from longtail import UserError, recipes, theory
from longtail.config import Config, from_dict, to_dict
from tests.odd.harness import SECONDS, STEADY, Zoo, before_the_work, in_folder, within
from tests.odd.words import FRESH, PLACES, STRANGE

ODD = [
    None,
    True,
    -1,
    0,
    10**400,
    2**70,
    math.nan,
    math.inf,
    -math.inf,
    1.5,
    1e-320,
    "",
    "x",
    "a\0b",
    "\udcff",
    b"bytes",
]
ODD += [(), [], {}, [None], [[]], {"cat": math.nan}, {1: 2}, object(), Path("a\0b"), print]
THERE = [f"ZOO/{name}" for line in PLACES for name in line.split()] + [f"ZOO/{name}" for name in STRANGE] + FRESH

IMAGES = [(np.zeros((10, 8, 8), np.uint8), [0, 1] * 5), ([], []), (["x.png"], "x"), ({}, {}), ([[]], [None])]
CONFIGS = [recipes.digits_lt("ce"), recipes.digits_lt("paco")]

# The function by name, and some valid values of each argument.
TWINS = {
    "train": (longtail.train, {"config": CONFIGS, "out": THERE, "resume": [True]}),
    "choose_config": (
        longtail.choose_config,
        {"data": ["digits-lt", *THERE, *IMAGES], "test": IMAGES, "method": ["ce"], "lr": [0.1], "seeds": [0, (1, 2)]},
    ),
    "evaluate": (longtail.evaluate, {"run": THERE, "data_root": THERE, "device": ["cpu", "cuda"]}),
    "table": (longtail.table, {"paths": THERE, "out": THERE}),
    "report": (longtail.report, {"paths": THERE, "out": THERE}),
    "figure": (
        longtail.figure,
        {"name": ["latency", "gradient", "framework", "extra"], "sources": THERE, "out": THERE},
    ),
    "inspect": (longtail.inspect, {"data": [c.data for c in CONFIGS], "quick": [True]}),
    "shard": (longtail.shard, {"data": [c.data for c in CONFIGS], "out": THERE, "megabytes": [1, 10**9]}),
    "compare": (
        longtail.compare,
        {"data": ["digits-lt", *THERE], "methods": ["ce", "all", ["ce"]], "seeds": [[0], (1, 2)]},
    ),
    "reproduce": (
        longtail.reproduce,
        {"name": ["methods", "ablations"], "results": THERE, "seeds": [[0]], "minutes": [0, 1]},
    ),
    "theory": (
        theory.table,
        {"recipe": ["digits-lt", None], "counts": [[5, 1], None, *map(Path, THERE)], "queue": [0, 64]},
    ),
    "predict": (
        longtail.predict,
        {"run": ["ZOO/network"], "images": THERE, "top": [1, 99], "prior": ["uniform", *THERE]},
    ),
    "load": (
        longtail.load,
        {"path": THERE, "device": ["cpu"], "prior": ["train", *THERE], "class_names": [["a", "b"]]},
    ),
    "export": (longtail.export, {"run": ["ZOO/network", *THERE], "to": ["safetensors", "onnx"], "out": THERE}),
    "demo": (longtail.demo, {"out": THERE, "seeds": [(0,), (0, 1)]}),
    "watch": (longtail.watch, {"paths": THERE, "port": [0, 70000]}),
    "make": (recipes.make, {"name": ["digits-lt", "cifar100-lt", *THERE], "method": ["ce"], "imbalance": [1.0, 100]}),
}


def calls(name: str) -> st.SearchStrategy[dict]:
    """Draw arguments; each is valid or arbitrary."""
    known = TWINS[name][1]
    return st.fixed_dictionaries({key: st.sampled_from([*good, *good, *ODD]) for key, good in known.items()})


def answers(odd: Zoo, name: str, words: dict) -> None:
    root = str(odd.root)
    given = {key: type(v)(str(v).replace("ZOO", root)) if isinstance(v, str | Path) else v for key, v in words.items()}
    quiet = contextlib.redirect_stdout(io.StringIO())
    with in_folder(odd.place), before_the_work(), within(SECONDS), quiet, contextlib.redirect_stderr(io.StringIO()):
        try:
            TWINS[name][0](**given)
        except (UserError, TypeError) as error:
            assert str(error).strip()
        finally:
            if odd.changed():
                odd.put_back()
    assert not (odd.root / "exploded").exists()


def asked(odd: Zoo, name: str, times: int) -> None:
    @settings(STEADY, max_examples=times)
    @given(calls(name))
    def each(arguments):
        answers(odd, name, arguments)

    each()


@pytest.mark.parametrize("name", TWINS)
def test_every_twin(name, odd):
    asked(odd, name, 6)


@pytest.mark.long
@pytest.mark.parametrize("name", TWINS)
def test_every_twin_many_times(name, odd):
    asked(odd, name, 60)


# Configurations


TREES = st.recursive(
    st.sampled_from([None, True, -1, 0, 1, 3, 10**400, math.nan, math.inf, 0.5, "", "digits", "ce", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "epochs", "x", ""]), inner),
    max_leaves=6,
)


def places(tree: dict, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the path of every section and value."""
    inner = [place for key, value in tree.items() if isinstance(value, dict) for place in places(value, (*above, key))]
    return [*inner, *((*above, key) for key in tree)]


@st.composite
def edited(draw: st.DrawFn) -> dict:
    """Draw the JSON of a valid configuration with one or two changes."""
    tree = to_dict(draw(st.sampled_from(CONFIGS)))
    for _ in range(draw(st.integers(1, 2))):
        *above, last = draw(st.sampled_from(places(to_dict(CONFIGS[0]))))
        place = tree
        for key in above:
            place = place.setdefault(key, {}) if isinstance(place, dict) else {}
        if isinstance(place, dict):
            place[draw(st.sampled_from([last, last, last, "new"]))] = draw(TREES)
    return tree


def understood(tree: dict) -> None:
    """Check that a configuration survives a round trip, or raises a UserError."""
    try:
        config = from_dict(Config, tree)
    except UserError as error:
        assert str(error).strip()
    else:
        assert from_dict(Config, to_dict(config)) == config


@settings(STEADY, max_examples=60)
@given(edited())
def test_edited_configurations(tree):
    understood(tree)


@pytest.mark.long
@settings(STEADY, max_examples=1000)
@given(edited())
def test_many_edited_configurations(tree):
    understood(tree)
