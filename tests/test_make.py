"""`make test-long` fetches a browser where it can, and never fails for want of one."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKE = shutil.which("make")


def made(place: Path, **commands: str) -> list[str]:
    """The lines that `make chromium` prints where there are just these commands, shell scripts all."""
    place.mkdir()
    for name, script in ({"id": "echo 0"} | commands).items():
        (place / name).write_text(f"#!/bin/sh\n{script}\n")
        (place / name).chmod(0o755)
    command, environment = [str(MAKE), "-s", "-C", str(ROOT), "chromium"], os.environ | {"PATH": str(place)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.skipif(MAKE is None, reason="no make here")
def test_a_browser_is_fetched_quietly_where_it_can_be(tmp_path):
    calls = tmp_path / "calls"
    apt = f'echo "noise"; echo "noise" >&2; echo "$0 $@" >> {calls}'
    assert made(tmp_path / "there", chromium="", **{"apt-get": apt}) == [] and not calls.exists()
    assert made(tmp_path / "root", **{"apt-get": apt}) == ["fetching Chromium, for tests that open pages"]
    assert [line.split("/")[-1] for line in calls.read_text().splitlines()] == [
        "apt-get -qq update",
        "apt-get -qq install -y chromium",
    ]
    skipped = "Chromium cannot be fetched here: tests that open pages will be skipped"
    assert made(tmp_path / "offline", **{"apt-get": "exit 100"})[-1] == skipped
    assert made(tmp_path / "elsewhere")[-1] == skipped  # no apt-get at all
    user = {"id": "echo 1000", "apt-get": apt}
    assert made(tmp_path / "user", **user, sudo='test "$1" = -n && shift && exec "$@"') == [
        "fetching Chromium, for tests that open pages"
    ]
    assert made(tmp_path / "nobody", **user, sudo="exit 1")[-1] == skipped
