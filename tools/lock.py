"""Write constraints.txt: the exact version of every package that the set-up installs.

Usage: python tools/lock.py OUTPUT PYTHON [PYTHON ...]

Every PYTHON is an interpreter that the lock must work for, such as `python3.11`; one that cannot be run is reported and left
out. The oldest interpreter chooses the newest releases that it can install. The next one has to accept the versions chosen so
far, and adds the packages that it needs in addition. Only where that is impossible does it choose for itself; the versions that
differ are then written with environment markers.

pip resolves from metadata, so that nothing large is downloaded. It considers wheels only: a bare machine has no compiler, and
the packages that build another one from source would not be pinned.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Dependencies on macOS and Windows alone, which a resolution on Linux does not find.
OTHER_PLATFORMS = ["appnope", "colorama"]

HEADER = """\
# Exact versions of everything that `make demo` and `make test` install, build dependencies included.
# Written by `make lock` for Python {pythons}. Do not edit by hand.
"""

# Prints the interpreter's version as "major.minor".
VERSION_CODE = "import sys; print('%d.%d' % sys.version_info[:2])"

# Prints what the build backend needs in addition to build-system.requires, for any way of building.
BUILD_HOOKS_CODE = """
import importlib, json, sys
backend = importlib.import_module(sys.argv[1])
hooks = [getattr(backend, f"get_requires_for_build_{kind}", list) for kind in ("sdist", "wheel", "editable")]
print(json.dumps(sorted({requirement for hook in hooks for requirement in hook()})))
"""

Pins = dict[str, str]  # version by normalized package name


def normalize_name(name: str) -> str:
    """Return the normalized form of a package name, as the packaging specifications define it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def public_version(version: str) -> str:
    """Return a version without its local part: "2.15.0+cpu" becomes "2.15.0"."""
    return version.partition("+")[0]


def find_interpreters(commands: list[str]) -> dict[str, str]:
    """Return the commands that run, keyed by their Python version ("3.12"), in ascending order of version."""
    found = {}
    for command in commands:
        try:
            result = subprocess.run([command, "-c", VERSION_CODE], capture_output=True, text=True, check=True)
            found[result.stdout.strip()] = command
        except (OSError, subprocess.CalledProcessError):
            print(f"warning: {command} cannot be run: the lock is not checked with it", file=sys.stderr)
    return dict(sorted(found.items(), key=lambda item: version_key(item[0])))


def version_key(python: str) -> tuple[int, ...]:
    """Return a sort key for a Python version such as "3.12"."""
    return tuple(int(part) for part in python.split("."))


def make_environment(command: str, folder: Path, build_requires: list[str]) -> Path:
    """Create a virtual environment with the newest pip and the build backend; return its interpreter."""
    subprocess.run([command, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip", *build_requires], check=True)
    return python


def resolve(python: Path, requirements: list[str], constraints: Pins, folder: Path) -> Pins:
    """Return the versions that pip would install into an empty environment; raise CalledProcessError if there are none."""
    report, pinned = folder / "report.json", folder / "constraints.txt"
    pinned.write_text("".join(f"{name}=={version}\n" for name, version in constraints.items()))
    command = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", report]
    command += [
        "--only-binary",
        ":all:",
        "--constraint",
        pinned,
        "--build-constraint",
        pinned,
        "--editable",
        ".[dev]",
        *requirements,
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    installs = [item for item in json.loads(report.read_text())["install"] if "dir_info" not in item["download_info"]]
    packages = [item["metadata"] for item in installs]
    return {normalize_name(package["name"]): public_version(package["version"]) for package in packages}


def format_lines(name: str, versions: dict[str, str]) -> list[str]:
    """Return the lines that pin one package, given its version by Python version in ascending order.

    A version applies from its own Python version on, until that of the next line. The first also applies to older ones.
    """
    starts = [
        python for i, python in enumerate(versions) if i == 0 or versions[python] != list(versions.values())[i - 1]
    ]
    lines = []
    for i, start in enumerate(starts):
        markers = [f'python_version >= "{start}"'] if i > 0 else []
        markers += [f'python_version < "{starts[i + 1]}"'] if i + 1 < len(starts) else []
        lines.append(f"{name}=={versions[start]}" + (f" ; {' and '.join(markers)}" if markers else ""))
    return lines


def format_constraints(resolved: dict[str, Pins]) -> str:
    """Return the text of the constraints file, given the versions of all packages by Python version in ascending order."""
    names = sorted({name for pins in resolved.values() for name in pins})
    text = HEADER.format(pythons=", ".join(resolved))
    for name in names:
        versions = {python: pins[name] for python, pins in resolved.items() if name in pins}
        text += "".join(line + "\n" for line in format_lines(name, versions))
    return text


def lock(interpreters: dict[str, str]) -> str:
    """Resolve the dependencies with every interpreter and return the text of the constraints file."""
    build_system = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    resolved: dict[str, Pins] = {}
    chosen: Pins = {}
    for version, command in interpreters.items():
        print(f"resolving for Python {version}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            python = make_environment(command, folder / "venv", build_system["requires"])
            hooks = [python, "-c", BUILD_HOOKS_CODE, build_system["build-backend"]]
            extra = json.loads(subprocess.run(hooks, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
            requirements = ["pip", *build_system["requires"], *extra, *OTHER_PLATFORMS]
            try:
                pins = resolve(python, requirements, chosen, folder)
            except subprocess.CalledProcessError:
                if not chosen:
                    raise
                print(f"Python {version} cannot install these versions: it chooses its own", file=sys.stderr)
                pins = resolve(python, requirements, {}, folder)
        resolved[version] = pins
        chosen = chosen | pins
    return format_constraints(resolved)


def main() -> None:
    """Run the script with the arguments of the command line."""
    if len(sys.argv) < 3:
        raise SystemExit("usage: python tools/lock.py OUTPUT PYTHON [PYTHON ...]")
    output, commands = Path(sys.argv[1]), sys.argv[2:]
    interpreters = find_interpreters(commands)
    if not interpreters:
        raise SystemExit("no interpreter can be run: name one, such as `make lock PYTHONS=python3.12`")
    output.write_text(lock(interpreters))
    print(f"wrote {output}", file=sys.stderr)


if __name__ == "__main__":
    main()
