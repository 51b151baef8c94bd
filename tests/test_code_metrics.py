"""tools/code_metrics.py counts correctly on small sources, and on a real training step."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("code_metrics", ROOT / "tools/code_metrics.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def parsed(tool, tmp_path, monkeypatch):
    """A function that writes files of a package and of its tests, and returns their syntax trees."""
    monkeypatch.setattr(tool, "SOURCE", tmp_path)
    monkeypatch.setattr(tool, "TESTS", tmp_path)

    def parse(**files: str):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path = path.with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tool.parse_files(tmp_path)

    return parse


def test_lines_and_lengths(tool, parsed):
    trees = parsed(a="def f():\n    return 1\n\n\ndef g():\n    x = 1\n\n    def h(): pass\n    return h\n")
    assert tool.count_lines(trees) == 9
    assert sorted(node.name for node in tool.find_functions(trees)) == ["f", "g", "h"]
    assert tool.median_function_length(trees) == 2


def test_docstrings_that_begin_as_fragments(tool, parsed):
    bodies = ["What it is.", "Whatever it is.", "Of it.", "Return it.", "As is."]
    code = "\n".join(f'def f{i}():\n    """{text}"""' for i, text in enumerate(bodies))
    trees = parsed(a=f'"""What a module is does not count."""\n{code}\nclass C:\n    """That one."""\ndef g(): pass\n')
    assert tool.count_docstrings(trees) == {"total": 6, "fragments": 4}


def test_lists_of_metrics(tool, parsed):
    trees = parsed(
        a='A = ("top1", "many", "medium", "few")\n\nB = {"top1": 1, "ece": 2, "few": 3}\nC = ["top1", "top1", "ece"]\n'
    )
    assert tool.find_metric_lists(trees, 4) == ["a.py:1"]
    assert tool.find_metric_lists(trees, 3) == ["a.py:1", "a.py:3"]


def test_functions_with_a_single_caller(tool, parsed):
    first = "def once(): pass\ndef twice(): pass\ndef table(): pass\ndef never(): pass\ndef far(): pass\n"
    first += "def main():\n    once(), twice(), twice()\n\nALL = [table]\n"
    trees = parsed(pack__a=first, pack__b="from pack import a as other\nfrom pack.a import main\nother.far()\nmain()\n")
    assert tool.count_single_callers(trees) == {"total": 6, "called_once": 3, "same_module": 1}  # once, far, main


def test_assertions_on_text(tool, parsed):
    code = """
def test():
    assert x == "two words" and y == f"one {z} two three words"
    assert x == "two words", "a message does not count"
    assert "three words here" in x
    with pytest.raises(ValueError, match="three words here"):
        pass
"""
    trees = parsed(test_a=code, compat__test_b=code)
    assert tool.count_text_assertions(trees) == 3


def test_modules_that_an_import_loads(tool):
    loaded = tool.count_modules_loaded("longtail.errors")
    assert 2 <= loaded < tool.count_modules_loaded("longtail.recipes")


def test_the_path_to_the_loss_is_found(tool, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = tool.trace_path_to_loss()
    assert sys.getprofile() is None
    assert found["stack_functions"] == len(found["stack"]) > 2
    assert found["stack"][-1].startswith("losses/paco.py:")
    assert any(name.startswith("methods/") for name in found["path"])
    assert not any(name.startswith(("engine/", "losses/paco.py", "models/backbones.py")) for name in found["path"])
    assert found["calls"] == len(found["path"]) and 3 < found["files"] < found["calls"]
