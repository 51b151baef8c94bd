"""Files for hosting the project, which cannot be run here: workflows, templates, Dockerfile, CITATION.cff, pre-commit."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import longtail

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
SCHEMA = ("check-jsonschema", "--builtin-schema")
LINTERS = {
    "workflows, by their schema": [*SCHEMA, "vendor.github-workflows", *WORKFLOWS],
    "workflows, for security": ["zizmor", "--offline", "--quiet", ".github"],
    "issue forms": [*SCHEMA, "vendor.github-issue-forms", *FORMS],
    "links of the issue page": [*SCHEMA, "vendor.github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"],
    "dependabot": [*SCHEMA, "vendor.dependabot", ".github/dependabot.yml"],
    "citation": [*SCHEMA, "vendor.citation-file-format", "CITATION.cff"],
    "Dockerfile": ["hadolint", "Dockerfile"],
}


def read_yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def find_tool(name: str) -> str:
    """Return the path of a linter in this environment; skip the test if it has none."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (on some platforms there is no wheel)")
    return path


def list_steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in read_yaml(str(workflow))["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("name", LINTERS)
def test_linter_finds_nothing(name):
    tool, *args = LINTERS[name]
    done = subprocess.run([find_tool(tool), *map(str, args)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_linters_find_faults(tmp_path):
    """The commands above can fail."""
    workflow, dockerfile = tmp_path / "test.yml", tmp_path / "Dockerfile"
    workflow.write_text("on: push\njobs:\n  one:\n    steps: []\n")
    dockerfile.write_text("FROM python:latest\nRUN cd /tmp\n")
    for name, command in (
        ("check-jsonschema", [*SCHEMA[1:], "vendor.github-workflows", workflow]),
        ("hadolint", [dockerfile]),
    ):
        assert subprocess.run([find_tool(name), *command], capture_output=True).returncode == 1, name


def test_workflows_test_what_the_package_supports():
    jobs = read_yaml(".github/workflows/test.yml")["jobs"]
    supported = [word.rsplit(" ", 1)[1] for word in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", word)]
    assert jobs["linux"]["strategy"]["matrix"]["python"] == supported
    assert jobs["other-systems"]["strategy"]["matrix"]["system"] == ["macos-latest", "windows-latest"]
    commands = " ".join(step.get("run", "") for step in jobs["oldest-torch"]["steps"])
    for name in ("torch", "torchvision"):
        (requirement,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == name)
        (oldest,) = requirement.specifier
        assert f'"{name}=={oldest.version}.*"' in commands


def test_workflows_call_existing_targets_and_files():
    makefile = (ROOT / "Makefile").read_text()
    for step in (step for workflow in WORKFLOWS for step in list_steps(workflow) if "run" in step):
        for target in re.findall(r"\bmake ([\w-]+)", step["run"]):
            assert re.search(rf"^{target}:", makefile, re.M), target
        for path in re.findall(r"\b(?:tests|examples)/[\w/.]+", step["run"]):
            assert (ROOT / path).exists(), path


def test_release_stores_no_password():
    jobs = read_yaml(".github/workflows/release.yml")["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()
    assert read_yaml(".github/workflows/release.yml")["permissions"] == {"contents": "read"}


def test_version_and_addresses_agree():
    citation = read_yaml("CITATION.cff")
    assert citation["version"] == longtail.__version__
    assert citation["repository-code"] == PROJECT["urls"]["Source"]
    contact = read_yaml(".github/ISSUE_TEMPLATE/config.yml")["contact_links"]
    for url in [*PROJECT["urls"].values(), *(link["url"] for link in contact)]:
        assert url.startswith(citation["repository-code"])
        path = re.search(r"/(?:tree|blob)/main/(.+)$", url)
        assert path is None or (ROOT / path[1]).exists()


def test_changelog_begins_with_this_version():
    (first, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert Version(first) == Version(longtail.__version__)


def test_image_has_what_the_wheel_needs():
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    names = {name for line in copied for name in line.split()}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert names == allowed and all((ROOT / name).exists() for name in names)
    assert {"pyproject.toml", "README.md", "LICENSE", "src", "docs", "constraints.txt"} <= names


def test_pre_commit_runs_tools_of_the_environment():
    hooks = [hook for repo in read_yaml(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    dev = {Requirement(word).name for word in PROJECT["optional-dependencies"]["dev"]}
    tools = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in hooks}
    assert tools - {"make", "lint-imports"} <= dev and "lint-imports" in tools
