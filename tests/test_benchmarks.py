"""The names that benchmarks, examples and tools import exist. The scripts are not run: many of them need a GPU or data sets."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path for folder in ("benchmarks", "examples", "tools") for path in (ROOT / folder).glob("*.py"))


def list_imports(script: Path) -> list[tuple[str, str]]:
    """Return the modules and names of the statements `from MODULE import NAME`."""
    nodes = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)]
    return [(node.module, alias.name) for node in nodes if node.module for alias in node.names]


def list_names(script: Path) -> set[str]:
    """Return the names that a script defines or imports at its top level."""
    names = set()
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        else:
            names |= {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return names


def has_name(module: str, name: str) -> bool:
    return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_imported_names_exist(script):
    imports = list_imports(script)
    sibling = {module: script.with_name(f"{module}.py") for module, _ in imports}
    missing = [
        (module, name)
        for module, name in imports
        if (sibling[module].exists() and name not in list_names(sibling[module]))
        or (module.split(".")[0] == "longtail" and not has_name(module, name))
    ]
    assert missing == []
