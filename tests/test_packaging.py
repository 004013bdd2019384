"""The wheel: everything is in it, under one name.

It works where another package has a top-level `recipes`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("distill", "eval", "heads", "online", "recipes")

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"

LOAD_ENTRY_POINTS = """
from importlib.metadata import distribution
loaded = {f"{point.group}:{point.name}": point.load() for point in distribution("redraft").entry_points}
print(*sorted(loaded))
print(loaded["vllm.general_plugins:redraft"].__code__.co_filename)
"""


def list_tracked(*folders: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


@pytest.mark.parametrize("folder", ["distill", "eval", "heads", "online"])
def test_a_package_opens_on_twelve_names_at_most(folder):
    names = {name.split("/")[1] for name in list_tracked(folder)} - {"__init__.py"}
    assert len(names) <= 12, sorted(names)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tree as git tracks it, built in a copy with its links.

    Setuptools writes beside its input.
    """
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in list_tracked(*FOLDERS, "redraft", "pyproject.toml", "README.md", "LICENSE"):
        copy = source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            copy.symlink_to((ROOT / name).readlink())
        else:
            copy.write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-c", BUILD, str(output)], cwd=source, check=True, capture_output=True
    )
    (built,) = output.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with the wheel and a foreign `recipes` that fails if imported.

    torchtune brings one.
    """
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    for name in FOLDERS:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise RuntimeError('this is not redraft')\n")
    return folder


def run_installed(installed: Path, *args: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, *args],
        cwd=installed,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_every_file_of_ours_under_one_name(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in names} == {"redraft", "redraft-0.1.0.dist-info"}
    assert {f"redraft/{name}" for name in list_tracked(*FOLDERS)} <= names
    assert not any("benchmarks" in name or "/tests/" in name for name in names)


def test_an_installed_command_runs_beside_packages_of_the_folders_names(installed: Path) -> None:
    assert "usage: redraft COMMAND" in run_installed(
        installed, "-m", "redraft.recipes.cli", "--help"
    )
    assert "usage: redraft train eagle3" in run_installed(
        installed, "-m", "redraft.recipes.cli", "train", "eagle3", "--help"
    )


def test_a_training_of_a_wheel_starts_under_accelerate(installed: Path) -> None:
    train = ("redraft.recipes.cli", "train", "eagle3", "--target", "T", "--print-config")
    launch = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")
    assert run_installed(installed, *launch, "-m", *train) == run_installed(installed, "-m", *train)


def test_every_entry_point_of_the_wheel_loads(installed: Path) -> None:
    *names, where = run_installed(installed, "-c", LOAD_ENTRY_POINTS).split()
    assert names == [
        "console_scripts:redraft",
        "vllm.endpoint_plugins:redraft",
        "vllm.general_plugins:redraft",
        "vllm.general_plugins:redraft_engine_wait",
    ]
    assert Path(where).is_relative_to(installed)
