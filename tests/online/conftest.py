"""One real vLLM server for all tests of this folder.

It serves the random target, and a registry has drafts for it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from learner_world import World, make_draft, served_by
from real_broker import Broker, running_broker
from real_server import COPY, CORRUPT, FOREIGN, NOISY, RANDOM, TOKEN, WIDER, Server, running_server
from safetensors.torch import load_file, save_file

from redraft.files.artifact import publish
from redraft.online.learning import prompt_key


@pytest.fixture(autouse=True)
def known_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known key, so that the same prompts are held out in every run."""
    monkeypatch.setattr(prompt_key, "make_secret", lambda: bytes(prompt_key.KEY_BYTES))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner's end of an empty log waits for a record in each `take`."""
    monkeypatch.setattr("redraft.online.learning.stream.WAIT_S", 0.1)


@pytest.fixture(scope="session")
def registry(random_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions of a draft with the target's shape.

    Random, a copy of the target, the copy with noise, and invalid ones.
    """
    root = tmp_path_factory.mktemp("registry")
    weights = load_file(random_target / "model.safetensors")
    generator = torch.Generator().manual_seed(1)

    def noise(scale: float) -> dict[str, torch.Tensor]:
        return {
            name: tensor * (1 - scale)
            + scale * tensor.std() * torch.randn(tensor.shape, generator=generator)
            if tensor.ndim == 2
            else tensor
            for name, tensor in weights.items()
        }

    wider = weights | {"lm_head.weight": torch.zeros(len(weights["lm_head.weight"]) + 8, 64)}
    drafts = {
        RANDOM: noise(1.0),
        COPY: weights,
        NOISY: noise(0.05),
        CORRUPT: weights,
        WIDER: wider,
        FOREIGN: weights,
    }
    for version, tensors in drafts.items():

        def write(folder: Path, tensors: dict[str, torch.Tensor] = tensors) -> None:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
                shutil.copy(random_target / name, folder)

        publish(
            root / version, write, {"target_fingerprint": "another"} if version == FOREIGN else {}
        )
    file = root / CORRUPT / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    (root / "current").symlink_to(RANDOM)
    return root


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One real nats-server for all tests; each test uses a different fleet name."""
    with running_broker(tmp_path_factory.mktemp("nats") / "store") as broker:
        yield broker


@pytest.fixture(scope="session")
def server(
    random_target: Path, registry: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    options = ["--draft-sample-method", "probabilistic"]
    with running_server(
        random_target, registry, tmp_path_factory.mktemp("server"), options
    ) as running:
        yield running


@pytest.fixture
def served_world(
    server: Server, random_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    """A learner's surroundings with the real server, and an empty spool.

    The server replaces a fleet of fakes.
    """
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)
    with served_by(server, random_target, tmp_path) as world:
        yield world


@pytest.fixture(scope="session")
def noisy_draft(random_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft with which the tests of learners begin."""
    return make_draft(random_target, tmp_path_factory.mktemp("noisy-draft"))
