"""The workflow files ask for what the tree has.

Make targets, Python versions, files and the version of the package.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read_jobs(path: Path) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return jobs


def list_commands(path: Path) -> list[str]:
    steps = [step for job in read_jobs(path).values() for step in job.get("steps", ())]
    return [line for step in steps for line in step.get("run", "").splitlines()]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_target_and_file_of_a_workflow_is_there(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in list_commands(path):
        command, *arguments = shlex.split(line)
        if command == "make":
            assert {word for word in arguments if "=" not in word} <= targets, line
        if command.startswith("."):
            assert (ROOT / command).is_file(), line
    steps = [step for job in read_jobs(path).values() for step in job.get("steps", ())]
    files = [step["with"]["file"] for step in steps if "file" in step.get("with", {})]
    assert all((ROOT / name).is_file() for name in files)


def test_every_python_that_the_package_allows_is_tested() -> None:
    tested = read_jobs(ROOT / ".github/workflows/ci.yml")["check-and-test"]["strategy"]["matrix"][
        "python"
    ]
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert tested == [f"3.{minor}" for minor in range(30) if f"3.{minor}" in allowed]


def test_the_citation_names_the_version_of_the_package() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["license"]) == (PROJECT["version"], PROJECT["license"])
