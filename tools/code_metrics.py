"""Print figures about the structure and the language of the code: `make metrics`.

    python tools/code_metrics.py [--json]

They are meant for comparison before and after a change. Each function below says how it counts. Two figures need the
package to be importable, because they are measured on running code: the modules that an import loads, and the calls
between the training loop and the loss.
"""

import argparse
import ast
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE, TESTS = ROOT / "src", ROOT / "tests"
PACKAGE = "longtail"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Trees = dict[Path, ast.Module]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    wants_json = parser.parse_args().json
    trees = parse_files(SOURCE)
    metrics = {
        "files": len(trees),
        "lines": count_lines(trees),
        "functions": len(list(find_functions(trees))),
        "median_function_length": median_function_length(trees),
        "single_caller": count_single_callers(trees),
        "docstrings": count_docstrings(trees),
        "metric_lists": {str(least): find_metric_lists(trees, least) for least in (4, 3)},
        "text_assertions": count_text_assertions(parse_files(TESTS)),
        "modules_loaded": count_modules_loaded(f"{PACKAGE}.methods.paco"),
        "path_to_loss": trace_path_to_loss(),
    }
    print(json.dumps(metrics, indent=1) if wants_json else describe(metrics))


def describe(metrics: dict[str, Any]) -> str:
    """Return the figures as lines of text."""
    single, docs, lists, path = (
        metrics[key] for key in ("single_caller", "docstrings", "metric_lists", "path_to_loss")
    )
    once = f"{single['called_once']:,} of {single['total']:,}, {single['same_module']:,} of them from their own module"
    rows = {
        "Python files in src": f"{metrics['files']:,} with {metrics['lines']:,} lines",
        "functions and methods": f"{metrics['functions']:,}, median length {metrics['median_function_length']:g} lines",
        "top-level functions called once": once,
        "docstrings that begin as fragments": f"{docs['fragments']:,} of {docs['total']:,}",
        "test assertions on text": f"{metrics['text_assertions']:,}",
        "lists of metrics": f"{len(lists['4'])} with at least four names, {len(lists['3'])} with at least three",
        "modules loaded by methods.paco": f"{metrics['modules_loaded']:,}",
        "calls from the loop to the loss": f"{path['calls']} functions in {path['files']} files",
        "functions on the stack at the loss": f"{path['stack_functions']} in {path['stack_files']} files",
    }
    return "\n".join([*(f"{name:36}{value}" for name, value in rows.items()), *(f"  {name}" for name in path["stack"])])


# Source code


def parse_files(folder: Path) -> Trees:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}


def count_lines(trees: Trees) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in trees)


def find_functions(trees: Trees) -> Iterator[Function]:
    """Yield all functions and methods, nested ones too."""
    for tree in trees.values():
        yield from (node for node in ast.walk(tree) if isinstance(node, Function))


def median_function_length(trees: Trees) -> float:
    """Return the median number of lines from `def` to the last line of the body."""
    return statistics.median((node.end_lineno or node.lineno) - node.lineno + 1 for node in find_functions(trees))


FRAGMENT = re.compile(r"(Of|What|Whether|Who|As|That|Where)\b")


def count_docstrings(trees: Trees) -> dict[str, int]:
    """Count the docstrings of functions and classes, and those that begin like a fragment of a sentence."""
    nodes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, Function | ast.ClassDef)]
    texts = [text for node in nodes if (text := ast.get_docstring(node))]
    return {"total": len(texts), "fragments": sum(bool(FRAGMENT.match(text)) for text in texts)}


METRICS = {"top1", "many", "medium", "few", "macro_f1", "ece", "knn_top1"}


def find_metric_lists(trees: Trees, least: int) -> list[str]:
    """Return the places of list, tuple, set and dict literals that have at least so many names of metrics."""
    found = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict):
                items = node.keys if isinstance(node, ast.Dict) else node.elts
                names = {item.value for item in items if isinstance(item, ast.Constant)}
                if len(names & METRICS) >= least:
                    found.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    return found


class Definition(NamedTuple):
    module: str
    name: str


class Use(NamedTuple):
    module: str
    is_call: bool


def count_single_callers(trees: Trees) -> dict[str, int]:
    """Count the top-level functions that src names exactly once, by a call; and those of them called in their own module.

    Names are resolved through `from ... import`, also where a module is imported; uses in tests do not count.
    """
    modules = {path: module_name(path) for path in trees}
    defined = {
        Definition(modules[path], node.name)
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, Function)
    }
    uses: dict[Definition, list[Use]] = defaultdict(list)
    for path, tree in trees.items():
        for definition, use in find_uses(tree, modules[path], defined):
            uses[definition].append(use)
    single = [(d, found[0]) for d, found in uses.items() if len(found) == 1 and found[0].is_call]
    same = sum(definition.module == use.module for definition, use in single)
    return {"total": len(defined), "called_once": len(single), "same_module": same}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_uses(tree: ast.Module, module: str, defined: set[Definition]) -> Iterator[tuple[Definition, Use]]:
    """Yield where a module uses top-level functions of the package."""
    names = {d.name: d for d in defined if d.module == module}
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                definition = Definition(node.module, alias.name)
                if definition in defined:
                    names[alias.asname or alias.name] = definition
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        found = None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found = names.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            found = Definition(imported[node.value.id], node.attr)
        if found in defined:
            yield found, Use(module, id(node) in called)


# Tests


def count_text_assertions(trees: Trees) -> int:
    """Count `assert` statements, and `match=` arguments, that contain a string of three words or more.

    tests/compat is left out: its snapshot consists of names.
    """
    count = 0
    for path, tree in trees.items():
        if "compat" in path.relative_to(TESTS).parts:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                count += has_sentence(node.test)
            elif isinstance(node, ast.keyword) and node.arg == "match":
                count += has_sentence(node.value)
    return count


def has_sentence(node: ast.AST) -> bool:
    strings = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return any(len(text.split()) >= 3 for text in strings)


# Running code


def count_modules_loaded(module: str) -> int:
    """Count the package's own modules that one import loads, in a fresh process."""
    code = f"import sys, {module}; print(sum(f'{{n}}.'.startswith('{PACKAGE}.') for n in sys.modules))"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


LOOP = "fit"  # the function of engine/ that has the training loop
LOSS = "losses/paco.py"  # where the equation is: its first method with the name below ends the path
EQUATION = "forward"
NETWORKS = "models/backbones.py"  # layers of the network, which are no part of the path


def trace_path_to_loss() -> dict[str, Any]:
    """Train PaCo on the digits until the first step enters the equation, and describe the calls that led there.

    `calls` counts the distinct functions that a reader follows from the training loop to the equation: all that are
    called between the engine, which has made the batch, and the file of the equation, also where they have returned by
    then; the layers of the network do not count. `files` counts their files, that of the loop and that of the equation.
    `stack` has the functions on the call stack when the equation is entered, without the loop and the equation.
    """
    sys.path.insert(0, str(SOURCE))
    from dataclasses import replace

    import torch

    import longtail
    from longtail import recipes

    torch.set_num_threads(1)
    config = recipes.digits_lt("paco")
    config = replace(
        config,
        train=replace(config.train, epochs=1, device="cpu"),
        log=replace(config.log, progress="none"),
    )
    tracer = Tracer()
    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(tracer)
        try:
            longtail.train(config, folder)
        except Found:
            pass
        finally:
            sys.setprofile(None)
    return tracer.describe()


class Found(BaseException):
    """Ends the training once the equation was entered."""


class Tracer:
    """A profile function that follows the package's calls from the training loop to the equation."""

    def __init__(self) -> None:
        self.folder = str(SOURCE / PACKAGE)
        self.entered: list[str] = []
        self.stack: list[str] = []
        self.loop = ""

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(self.folder):
            return
        name = self.name_of(frame)
        if name.startswith("engine/") and name.endswith(f":{LOOP}"):
            self.loop = name
        elif self.loop and name.startswith(LOSS) and name.endswith(f".{EQUATION}"):
            self.stack = self.stack_above(frame)
            raise Found
        elif self.loop:
            self.entered.append(name)

    def name_of(self, frame: Any) -> str:
        """Return a function as `engine/train.py:fit`."""
        path = Path(frame.f_code.co_filename).relative_to(self.folder)
        return f"{path.as_posix()}:{frame.f_code.co_qualname}"

    def stack_above(self, frame: Any) -> list[str]:
        """Return the package's functions on the stack between the loop and a frame, the outermost first."""
        found: list[str] = []
        frame = frame.f_back
        while frame is not None:
            if frame.f_code.co_filename.startswith(self.folder):
                name = self.name_of(frame)
                if name.startswith("engine/") and name.endswith(f":{LOOP}"):
                    return found[::-1]
                found.append(name)
            frame = frame.f_back
        raise RuntimeError(f"no function {LOOP} of engine/ is on the stack")

    def describe(self) -> dict[str, Any]:
        if not self.stack:
            raise RuntimeError(f"no method {EQUATION} of {LOSS} was called: adapt the names in {Path(__file__).name}")
        path = self.path()
        return {
            "calls": len(set(path)),
            "files": count_files([self.loop, *path, LOSS]),
            "path": path,
            "stack": self.stack,
            "stack_functions": len(set(self.stack)),
            "stack_files": count_files(self.stack),
        }

    def path(self) -> list[str]:
        """Return the functions that were called between the engine and the file of the equation, in order."""
        end = next(i for i, name in enumerate(self.entered) if name.startswith(LOSS))
        engine = [i for i, name in enumerate(self.entered[:end]) if name.startswith("engine/")]
        between = self.entered[engine[-1] + 1 : end]
        return list(dict.fromkeys(name for name in between if not name.startswith(NETWORKS)))


def count_files(names: list[str]) -> int:
    return len({name.partition(":")[0] for name in names})


if __name__ == "__main__":
    main()
