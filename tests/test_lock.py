"""tools/lock.py: versions of several Pythons as one file of constraints, with a pip that only pretends to resolve."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]

# An interpreter that knows its version, creates environments that contain itself, and resolves from a table. A constraint that
# is not in the table makes it fail, as pip does where a version does not exist for an interpreter.
INTERPRETER = """#!{executable}
import json, pathlib, shutil, sys
args, table = sys.argv[1:], {table!r}
if args[0] == "-c":
    print("{version}" if "version_info" in args[1] else json.dumps(["editables~=0.3"]))
elif args[1] == "venv":
    shutil.copy(__file__, pathlib.Path(args[2], "bin").mkdir(parents=True) or pathlib.Path(args[2], "bin/python"))
elif "--report" in args:
    assert {{"--dry-run", "--only-binary", ".[dev]", "editables~=0.3"}} < set(args) and "pip" in args[2:]
    constraints = pathlib.Path(args[args.index("--constraint") + 1]).read_text().split()
    chosen = dict(line.split("==") for line in constraints)
    pins = {{name: chosen.get(name.lower(), versions[-1]) for name, versions in table.items()}}
    if any(pins[name] not in versions for name, versions in table.items()):
        sys.exit("no matching distribution")
    install = [{{"download_info": {{}}, "metadata": dict(name=name, version=pins[name])}} for name in pins]
    install.append({{"download_info": dict(dir_info={{}}), "metadata": dict(name="longtail", version="0.2.0")}})
    pathlib.Path(args[args.index("--report") + 1]).write_text(json.dumps(dict(install=install)))
"""


@pytest.fixture(scope="module")
def lock():
    spec = importlib.util.spec_from_file_location("lock", ROOT / "tools/lock.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interpreter(folder: Path, version: str, **table: list[str]) -> str:
    """Write an interpreter that can install these versions of packages, oldest first; return its path."""
    path = folder / f"python{version}"
    path.write_text(INTERPRETER.format(executable=sys.executable, version=version, table=table))
    path.chmod(0o755)
    return str(path)


def locked(folder: Path, *interpreters: str) -> list[str]:
    """Run the script; return the lines that it has written, without comments."""
    output = folder / "constraints.txt"
    subprocess.run([sys.executable, ROOT / "tools/lock.py", output, *interpreters], check=True, capture_output=True)
    return [line for line in output.read_text().splitlines() if not line.startswith("#")]


def test_oldest_python_chooses_and_others_add_what_they_need(tmp_path):
    old = interpreter(tmp_path, "3.9", NumPy=["1.0", "2.0"], Torch_Vision=["3.0+cpu"])
    new = interpreter(tmp_path, "3.12", NumPy=["1.0", "2.0", "2.5"], extra=["7"])
    assert locked(tmp_path, new, old) == ["extra==7", "numpy==2.0", "torch-vision==3.0"]


def parse(line: str) -> tuple[str, list[str]]:
    """Return the requirement of a line, and the versions of Python that its marker selects."""
    requirement = Requirement(line)
    pythons = ("3.11", "3.12", "3.13")
    marker = requirement.marker
    chosen = [p for p in pythons if marker is None or marker.evaluate({"python_version": p})]
    return f"{requirement.name}{requirement.specifier}", chosen


def test_versions_that_no_python_shares_have_markers(tmp_path):
    old = interpreter(tmp_path, "3.11", a=["1"], b=["1", "2"], c=["1"])
    middle = interpreter(tmp_path, "3.12", a=["2"], b=["2"], c=["1", "3"])
    new = interpreter(tmp_path, "3.13", a=["3"], b=["2"], c=["3"])
    assert [parse(line) for line in locked(tmp_path, old, middle, new)] == [
        ("a==1", ["3.11"]),
        ("a==2", ["3.12"]),
        ("a==3", ["3.13"]),
        ("b==2", ["3.11", "3.12", "3.13"]),
        ("c==1", ["3.11"]),
        ("c==3", ["3.12", "3.13"]),
    ]


def test_python_follows_the_next_older_one_that_chose_for_itself(tmp_path):
    old = interpreter(tmp_path, "3.11", a=["1"])
    middle = interpreter(tmp_path, "3.12", a=["2"])
    new = interpreter(tmp_path, "3.13", a=["2", "3"])
    found = [parse(line) for line in locked(tmp_path, old, middle, new)]
    assert found == [("a==1", ["3.11"]), ("a==2", ["3.12", "3.13"])]


def test_interpreter_that_cannot_be_run_is_left_out(tmp_path, lock, capsys):
    there = interpreter(tmp_path, "3.12", a=["1"])
    assert lock.find_interpreters([str(tmp_path / "python3.13"), there]) == {"3.12": there}
    assert "python3.13" in capsys.readouterr().err
    nothing = subprocess.run([sys.executable, ROOT / "tools/lock.py", tmp_path / "x", tmp_path / "python3.13"])
    assert nothing.returncode == 1 and not (tmp_path / "x").exists()


def test_dependencies_that_cannot_be_resolved_leave_the_file_alone(tmp_path):
    (tmp_path / "constraints.txt").write_text("a==1\n")
    broken = interpreter(tmp_path, "3.12", a=["0"])
    Path(broken).write_text(Path(broken).read_text().replace("if any(", "if True or any("))
    with pytest.raises(subprocess.CalledProcessError) as failed:
        locked(tmp_path, broken)
    assert b"no matching distribution" in failed.value.stderr
    assert (tmp_path / "constraints.txt").read_text() == "a==1\n"


def test_a_name_is_normalized_and_a_version_is_public(lock):
    assert [lock.normalize_name(name) for name in ("Foo.Bar_baz", "a--b")] == ["foo-bar-baz", "a-b"]
    assert [lock.public_version(version) for version in ("2.15.0+cpu", "1.0b1")] == ["2.15.0", "1.0b1"]


def test_header_names_the_pythons(lock):
    text = lock.format_constraints({"3.11": {"a": "1"}, "3.12": {"a": "1"}})
    assert "3.11, 3.12" in text and text.endswith("\na==1\n")
    assert json.dumps(text).count("\\n") == 3
