"""Wheel and sdist contain what the package needs and nothing else, and the wheel works on its own."""

import os
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.test_cli import FAST, images

ROOT = Path(__file__).parents[1]
NEEDED = ("reporting/page.css", "reporting/page.js", "reporting/watch.js", "reporting/framework.svg")
NEEDED += (*(f"kernels/{name}.cu" for name in ("canvas", "resnet", "sgd", "views")), "__main__.py")
BESIDE = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO", ".gitignore"}  # of the sdist

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """Build wheel and sdist with hatchling directly, so that nothing is downloaded."""
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    code = "import sys, hatchling.build as b; print(b.build_wheel(sys.argv[1])); print(b.build_sdist(sys.argv[1]))"
    said = subprocess.run([sys.executable, "-c", code, out], cwd=ROOT, capture_output=True, text=True, check=True)
    wheel, sdist = (out / name for name in said.stdout.split()[-2:])
    return wheel, sdist


def test_wheel_has_the_whole_package_and_nothing_else(built):
    names = zipfile.ZipFile(built[0]).namelist()
    there = {str(f.relative_to(ROOT / "src")) for f in (ROOT / "src/longtail").rglob("*") if f.is_file()}
    there = {name for name in there if "__pycache__" not in name}
    there |= {f"longtail/docs/{page.name}" for page in (ROOT / "docs").iterdir()}  # for `longtail docs`
    assert {name for name in names if ".dist-info/" not in name} == there
    assert {f"longtail/{name}" for name in NEEDED} <= there
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_has_the_same_and_what_builds_it(built):
    with tarfile.open(built[1]) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    inside = {name for name in zipfile.ZipFile(built[0]).namelist() if ".dist-info/" not in name}
    inside = {name.removeprefix("longtail/") if "/docs/" in name else f"src/{name}" for name in inside}
    assert inside < names and names - inside <= BESIDE and names > {"pyproject.toml", "README.md", "LICENSE"}


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """Return `longtail` of a new environment with the wheel; dependencies are those of this environment."""
    place = tmp_path_factory.mktemp("clean")
    venv.create(place, with_pip=False, symlinks=True)
    inside = next(place.glob("lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", inside, built[0]]
    subprocess.run(pip, check=True)
    # By .pth, after its own packages; .pth files in there, such as that of an editable checkout, are not read.
    (inside / "borrowed.pth").write_text("".join(f"{folder}\n" for folder in site.getsitepackages()))
    script = place / "bin/longtail"
    script.write_text(f"#!{place}/bin/python\nfrom longtail.cli import console_script\n\nconsole_script()\n")
    script.chmod(0o755)
    return script


def test_the_wheel_works_outside_of_the_checkout(installed, tmp_path):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

    def longtail(*args: str) -> str:
        done = subprocess.run([installed, *args], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        return done.stdout

    where = subprocess.run(
        [installed.parent / "python", "-c", "import longtail; print(longtail.__file__)"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert where.startswith(str(installed.parents[1])), where
    assert longtail("--version").startswith("longtail ") and "cifar100-lt" in longtail("recipes")
    assert "data" in longtail("docs").split() and "parquet" in longtail("docs", "data")
    longtail("train", "digits-lt", "--method", "paco", *FAST, "--out", "run")
    longtail("report", "run", "-o", "page.html")
    longtail("figure", "framework", "-o", "framework.svg")
    pets = images(tmp_path / "pets", split="", n=2)
    assert "cat" in longtail("predict", "run", str(pets), "--top", "1", "--device", "cpu")
    longtail("export", "run", "--to", "safetensors", "-o", "network.safetensors")
    assert "<style>" in (tmp_path / "page.html").read_text() and (tmp_path / "network.safetensors.md").exists()
