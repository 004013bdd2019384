"""The lock files: a hash for every file, and the versions that pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements"
ENGINES = ("cpu", "cuda")
INSTALLED = ("deepspeed", "report", "wandb", "nats", "gguf", "dev")


def read_lock(name: str) -> dict[str, list[str]]:
    """The versions of each package in a lock file: one, or one for each Python."""
    text = (REQUIREMENTS / f"{name}.txt").read_text().replace("\\\n", " ")
    versions: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            pinned, *hashes = line.split(" --hash=")
            assert hashes, f"{pinned} has no hash"
            assert all(re.fullmatch(r"sha256:[0-9a-f]{64}\s*", each) for each in hashes)
            requirement = Requirement(pinned)
            (version,) = requirement.specifier
            assert version.operator == "=="
            versions.setdefault(canonicalize_name(requirement.name), []).append(version.version)
    return versions


def list_requirements(*extras: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]
    return [Requirement(line) for line in asked]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_lock_holds_a_version_that_is_allowed_of_every_dependency(engine: str) -> None:
    lock = read_lock(engine)
    if engine == "cpu":
        assert "torch" not in lock, "its file depends on where it comes from"
        assert not [name for name in lock if name.startswith("nvidia-")]
        (line,) = [
            x
            for x in (REQUIREMENTS / "torch-cpu.txt").read_text().splitlines()
            if not x.startswith("#")
        ]
        lock["torch"] = [line.removeprefix("torch==")]
    for asked in list_requirements(engine, *INSTALLED):
        for version in lock[canonicalize_name(asked.name)]:
            assert asked.specifier.contains(version), (
                f"{asked}: the lock has {version}; run `make lock`"
            )


def test_every_dependency_has_a_floor() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for asked in list_requirements(*extras):
        assert {each.operator for each in asked.specifier} & {">=", "=="}, (
            f"{asked}: which versions does it work with?"
        )


def test_the_images_add_only_hashed_packages_that_vllm_does_not_bring() -> None:
    image, log = read_lock("image"), read_lock("log")
    assert {"nats-py", "nkeys", "tyro", "accelerate", "datasets"} <= image.keys()
    assert not {"vllm", "torch", "transformers", "numpy"} & image.keys()
    assert {"nats-py", "nkeys", "tyro", "setuptools"} <= log.keys()
    cuda = read_lock("cuda")
    for name, versions in (image | log).items():
        assert set(versions) <= set(cuda[name])


def test_the_environment_is_installed_from_the_lock_without_a_resolver() -> None:
    recipe = (
        (ROOT / "Makefile")
        .read_text()
        .partition("$(STAMP): pyproject.toml")[2]
        .partition("\nlock:")[0]
    )
    installs = [line for line in recipe.splitlines() if "pip install" in line]
    assert len(installs) == 4
    for line in installs:
        assert "--require-hashes" in line or (
            "--no-deps" in line and ("torch-cpu.txt" in line or "-e ." in line)
        )
