"""Library code leaves global state unchanged: settings of torch and matplotlib, warning filters, environment variables."""

import ast
import importlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

SOURCE = Path(__file__).parents[1] / "src/longtail"

# Importing these packages changes the environment, warning filters or settings of torch, so they are imported first.
OTHER_PACKAGES = [
    "matplotlib.figure",
    "onnxruntime",
    "pandas",
    "PIL.Image",
    "pyarrow.parquet",
    "scipy.special",
    "sklearn.linear_model",
    "timm",
    "torch._dynamo",
    "torchvision.transforms.v2",
    "tyro",
]
IMPORT_ALL = f"""
import importlib, json, os, pkgutil
for name in {OTHER_PACKAGES}:
    importlib.import_module(name)
from tests.test_global_state import read_state, read_backend
before = read_state(), read_backend()
import longtail
for module in pkgutil.walk_packages(longtail.__path__, "longtail."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
after = read_state(), read_backend()
print(json.dumps([name for name in before[0] if before[0][name] != after[0][name]] + ["backend"] * (before[1] != after[1])))
"""


def read_state() -> dict[str, Any]:
    cudnn, dynamo = torch.backends.cudnn, torch._dynamo.config
    return {
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.allow_tf32, cudnn.deterministic),
        "matmul": (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.fp32_precision),
        "dynamo": (dynamo.suppress_errors, dynamo.recompile_limit),
        "threads": torch.get_num_threads(),
        "random": (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()),
        "filters": list(warnings.filters),
        "logging": (list(logging.root.handlers), logging.root.level, list(logging.getLogger("longtail").handlers)),
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "matplotlib": {name: value for name, value in matplotlib.rcParams.items() if name != "backend"},
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
    }


def read_backend() -> Any:
    """Return the backend of matplotlib without selecting one, which reading it from `rcParams` would do."""
    return dict.__getitem__(matplotlib.rcParams, "backend")


def test_imports_change_no_global_state():
    environment = os.environ | {"MPLBACKEND": ""}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_training_evaluation_and_report_restore_all_settings(tmp_path):
    import longtail  # here, because the test of imports imports this file first
    from tests.conftest import tiny

    for name in OTHER_PACKAGES:
        importlib.import_module(name)
    before, backend = read_state(), read_backend()
    (folder,) = longtail.train(tiny("paco", epochs=1), tmp_path)
    assert read_state() == before
    longtail.evaluate(folder)
    assert read_state() == before
    longtail.report([folder], tmp_path / "report.html")
    assert read_state() == before
    longtail.table([folder], tmp_path)
    longtail.figure("extra", out=tmp_path / "extra.png")
    assert read_state() == before
    assert read_backend() in (backend, "agg", "Agg")


def test_only_progress_and_verbose_output_is_printed_outside_of_the_command_line():
    """All other messages are logged, so that programs which use the library can select them."""
    printing = set()
    for path in SOURCE.rglob("*.py"):
        calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        if any(isinstance(func, ast.Name) and func.id == "print" for func in calls):
            printing.add(path.relative_to(SOURCE).as_posix())
    assert {path for path in printing if not path.startswith("cli/")} == {
        "engine/loggers.py",
        "progress.py",
        "sklearn.py",
    }


def test_training_writes_nothing_to_standard_output(tmp_path, capsys):
    import longtail
    from tests.conftest import tiny

    (folder,) = longtail.train(tiny("ce", epochs=1), tmp_path)
    longtail.report([folder], tmp_path / "report.html")
    assert capsys.readouterr().out == ""
