"""A method is added by its own files, a line in the recipes and a row in the docs: no test of the others has to know its name.

The one that is added here, for the length of a test, is that of docs/methods.md, as it stands there but for its name.
"""

import importlib.util
import inspect
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from longtail import recipes
from longtail.cli import reference
from longtail.config import METHODS, method_settings, to_dict
from longtail.methods import Method, find_method
from longtail.methods.base import reweight_frequencies
from tests import test_autoconfig, test_docs, test_large, test_recipes
from tests.conftest import tiny
from tests.engine import test_train
from tests.methods import test_prior
from tests.raises import fails

ROOT = test_docs.ROOT
PAGE = (ROOT / "docs/methods.md").read_text()
FILES = dict(re.findall(r"^```text\n# (\S+\.py)\n(.*?)^```", PAGE, re.S | re.M))
SETTINGS, CLASS, RECIPE, TEST = FILES
NAME = "thrown-away"


def renamed(path: str) -> str:
    """Return a block of the page with another method name, because the method of the page may have been added already."""
    return FILES[path].replace('"los"', f'"{NAME}"')


def content(path: str) -> str:
    """Return the content of a file after the page was followed: the settings are appended to those of the other methods."""
    return f"{(ROOT / path).read_text()}\n\n{FILES[path]}" if path == SETTINGS else FILES[path]


def imported(path: str, folder: Path, monkeypatch) -> ModuleType:
    """Import a block of the page under its module name, from a file, because the reference reads the source of settings.

    The settings are a part of a file; they become a module of their own with the names of that file.
    """
    name, imports = path.removeprefix("src/").removesuffix(".py").replace("/", "."), ""
    if path == SETTINGS:
        name, imports = f"{name}_added", f"from {name} import *\n"
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(imports + renamed(path))
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def added(monkeypatch, tmp_path) -> type[Method]:
    """Add the method, and return its class. Settings, class and preset are registered until the test ends."""
    monkeypatch.setitem(METHODS, NAME, None)
    monkeypatch.setattr(Method, "BY_SETTINGS", dict(Method.BY_SETTINGS))
    new = imported(SETTINGS, tmp_path, monkeypatch)
    monkeypatch.setattr(method_settings, "LOSSettings", new.LOSSettings, raising=False)
    kind = imported(CLASS, tmp_path, monkeypatch).LOS
    imports, line = renamed(RECIPE).split("\n\n")
    names = dict(vars(recipes.method_presets))
    exec(imports, names)
    monkeypatch.setitem(recipes.METHODS, NAME, eval(f"{{{line.strip()}}}", names)[NAME])
    assert find_method(recipes.METHODS[NAME].settings_class) is kind
    return kind


@pytest.mark.parametrize("path", [SETTINGS, CLASS, TEST])
@pytest.mark.parametrize("asked", [["check"], ["format", "--check"]])
def test_its_files_are_as_ruff_wants_them(path, asked):
    command = [sys.executable, "-m", "ruff", *asked, "--stdin-filename", str(ROOT / path), "-"]
    done = subprocess.run(command, input=content(path), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_test_passes(added, tmp_path, monkeypatch):
    tests = vars(imported(TEST, tmp_path, monkeypatch))
    (name,) = (name for name in tests if name.startswith("test_"))
    tests[name]()


def test_it_needs_no_stored_losses(added, tmp_path, monkeypatch):
    stored = json.loads(test_train.LOSSES.read_text())
    monkeypatch.setattr(test_train, "losses_of", lambda method, _: stored[method])  # which is tested there
    test_train.test_a_refactor_reproduces_these_losses(tmp_path)
    monkeypatch.delitem(recipes.METHODS, "paco")
    with pytest.raises(AssertionError):  # those that have them must be there
        test_train.test_a_refactor_reproduces_these_losses(tmp_path)


def test_its_losses_are_added_to_those_that_are_stored(added, tmp_path):
    file, before = tmp_path / "losses.json", test_train.LOSSES.read_text()
    file.write_text(before)
    missing = [name for name in recipes.METHODS if name not in json.loads(before)]
    assert test_train.store_losses(file, tmp_path) == missing and NAME in missing
    assert file.read_text().startswith(before.removesuffix("\n}\n") + ",\n")
    assert len(json.loads(file.read_text())[NAME]) == 4  # two epochs of each stage
    assert test_train.store_losses(file, tmp_path) == []


@pytest.mark.parametrize("power", [1.0, 0.5, 0.0])
def test_prior_of_an_added_method(power, added, monkeypatch):
    """The frequencies may be those of training, uniform, or between them."""
    monkeypatch.setattr(
        added, "prior", lambda self: reweight_frequencies(Method.prior(self), Method.prior(self) ** (power - 1))
    )
    test_prior.test_every_method_has_a_prior()


def test_it_may_hold_images_out(added, tmp_path, monkeypatch):
    held_out = replace(recipes.METHODS[NAME], data={"val_fraction": 0.1})
    monkeypatch.setitem(recipes.METHODS, NAME, held_out)
    test_recipes.test_equal_setting_is_one_budget()
    test_large.test_equal_is_one_budget("imagenet-lt")
    test_autoconfig.test_choices_do_not_depend_on_the_method(tmp_path)


def test_the_docs_ask_for_a_row_and_for_make_docs(added, tmp_path, monkeypatch):
    checks = test_docs.test_every_method_is_in_the_docs, test_docs.test_the_reference_is_current
    for check in checks:
        with pytest.raises(AssertionError):
            check()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/methods.md").write_text(f"{PAGE}\n| `{NAME}` | labels that are nearly flat | two |\n")
    (tmp_path / "docs/commands.md").write_text(reference.make_page())
    monkeypatch.setattr(test_docs, "ROOT", tmp_path)
    for check in checks:
        check()
    described = reference.make_page().partition(f"### {NAME}\n\n")[2].partition("\n")[0]
    assert described.endswith(inspect.getdoc(METHODS[NAME]))


def test_a_run_by_a_method_that_is_not_imported_says_so(tmp_path, capsys):
    """A similar name is not suggested for stored runs, only for names that a user gives."""
    tree = to_dict(tiny("ce"))
    tree["method"] = {"name": "cdt"}
    for name, text in (("config", json.dumps(tree)), ("environment", "{}"), ("metrics", "{}")):
        (tmp_path / f"{name}.json").write_text(text)
    said = fails(capsys, ["table", str(tmp_path)], "unknown-name", "config.json", "'cdt'", "longtail.table")
    assert "'crt'" not in said
    fails(capsys, ["train", "digits-lt", "--method", "cdt"], "unknown-name", "'cdt'", "'crt'")
