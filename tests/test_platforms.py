"""Systems that lack parts of POSIX, such as Windows: the package is imported and trains without these parts."""

import os
import subprocess
import sys
from pathlib import Path

from longtail import run_folder

ROOT = Path(__file__).parents[1]
# Makes `import fcntl` and similar fail, and removes what Windows does not have from `os` and `signal`.
WITHOUT_POSIX = """
import os, signal, sys
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
for name in ("sysconf", "sched_getaffinity", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY", "getuid", "geteuid"):
    delattr(os, name)
del signal.SIGHUP
"""


def run_without_posix(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python without these parts of POSIX."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", WITHOUT_POSIX + code, *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_the_modules_are_absent_in_this_test():
    done = run_without_posix("import fcntl")
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr


def test_every_module_is_imported_and_help_is_shown():
    code = """
import importlib, pkgutil, longtail
from longtail.cli import main
assert main(["--help"]) == 0
for module in pkgutil.walk_packages(longtail.__path__, "longtail."):
    if module.name != "longtail.__main__":
        importlib.import_module(module.name)
"""
    done = run_without_posix(code)
    assert done.returncode == 0, done.stderr
    assert "longtail train" in done.stdout


def test_a_run_trains_and_is_reported(tmp_path):
    code = """
import sys
from dataclasses import replace
import longtail
from longtail import recipes
from longtail.reporting.run_artifacts import is_training

config = recipes.with_epochs(recipes.digits_lt(method="ce", imbalance=40), 1)
config = replace(config, train=replace(config.train, seeds=(0,), device="cpu"), log=replace(config.log, progress="none"))
(run,) = longtail.train(config, out=sys.argv[1])
assert is_training(run) is None  # unknown without locks
longtail.report([run], sys.argv[1] + "/report.html")
"""
    done = run_without_posix(code, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    metrics = run_folder.read(tmp_path / "run/seed0").metrics
    assert metrics["peak_memory"] == 0 and metrics["top1"] > 5
    assert (tmp_path / "run/report.html").exists()
