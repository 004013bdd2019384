"""Checkpoints that hold code: each of their readers refuses it in one line, and it does not run."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launches import ROOT, accelerate_launch, require, run_all
from make_heads import make_signal, make_target
from torch.distributed.checkpoint import filesystem, metadata
from train_on_ranks import make_standalone, micro_batches

from redraft.distill.loss.choice import Divergence
from redraft.distill.train.loop import make_accelerator
from redraft.distill.train.optim import Optim
from redraft.distill.train.step import Distillation
from redraft.distill.train.unpickle import _KnownPickles, without_code


class Bomb:
    """Unpickled, it makes the file `mark`."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def save(value: object, path: Path) -> None:
    torch.save({"state": torch.zeros(2), "value": value}, path)


@pytest.mark.parametrize("legacy", [False, True])
def test_torch_load_builds_no_object_although_it_is_asked_to(legacy: bool, tmp_path: Path) -> None:
    path, mark = tmp_path / "optimizer.bin", tmp_path / "mark"
    torch.save({"value": Bomb(mark)}, path, _use_new_zipfile_serialization=not legacy)
    load: Callable[..., Any] = torch.load  # DeepSpeed's call
    with pytest.raises(ValueError, match=r"posix\.mkdir") as error, without_code(tmp_path):
        load(path, weights_only=False)
    assert len(str(error.value).splitlines()) == 1
    assert not mark.exists()
    load(path, weights_only=False)
    assert mark.exists(), "the bomb is one"


def test_what_deepspeed_saves_is_read_and_what_it_does_not_save_is_refused(tmp_path: Path) -> None:
    pytest.importorskip(
        "deepspeed", reason="DeepSpeed is not installed: pip install 'redraft[deepspeed]'"
    )
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    engine = TorchCheckpointEngine()
    scaler = DynamicLossScaler(2.0**8, 1000, 1.0, 2, False)
    save({"loss_scaler": scaler, "zero_stage": ZeroStageEnum.weights}, tmp_path / "good.pt")
    save(Bomb(tmp_path / "mark"), tmp_path / "bad.pt")
    with without_code(tmp_path, deepspeed=True):
        found = engine.load(tmp_path / "good.pt")["value"]
    assert (found["loss_scaler"].cur_scale, found["zero_stage"]) == (256.0, ZeroStageEnum.weights)
    with (
        pytest.raises(ValueError, match=r"posix\.mkdir"),
        without_code(tmp_path, deepspeed=True),
    ):
        engine.load(tmp_path / "bad.pt")
    assert not (tmp_path / "mark").exists()


def test_a_sharded_checkpoint_is_read_and_its_description_runs_no_code(tmp_path: Path) -> None:
    state = {"weight": torch.arange(6.0).view(2, 3).bfloat16(), "step": 7, "betas": (0.9, 0.95)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    read = {"weight": torch.zeros(2, 3, dtype=torch.bfloat16), "step": 0, "betas": (0.0, 0.0)}
    with without_code(tmp_path):
        dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(read["weight"], state["weight"])
    assert (read["step"], read["betas"]) == (7, (0.9, 0.95))

    described, mark = (tmp_path / ".metadata").read_bytes(), tmp_path / "mark"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ValueError, match=r"posix\.mkdir"), without_code(tmp_path):
        dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
    assert not mark.exists()

    (tmp_path / ".metadata").write_bytes(described)
    dcp.save({"step": Bomb(mark)}, checkpoint_id=tmp_path / "bytes", no_dist=True)
    with pytest.raises(ValueError, match=r"posix\.mkdir"), without_code(tmp_path):
        dcp.load({"step": 0}, checkpoint_id=tmp_path / "bytes", no_dist=True)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04\x8c\x05torch\x8c\x13serialization.os.sep\x93.",
        b"\x80\x04\x8c\x05torch\x8c\x0fhub.load\x00\x00\x00\x00\x00\x00\x00\x93.",
        b"ctorch.distributed.checkpoint.metadata\nos.system\n.",
        b"cbuiltins\neval\n.",
        b"cantigravity\ngeohash\n.",
        b"ctorch\nload\n.",
        b"cpathlib\nPath.home\n.",
        b"cbuiltins\ngetattr\n(ctorch\nSize\nVnumel\ntR.",
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nV__init__\ntR.",
    ],
)
def test_no_detour_leads_to_a_function(content: bytes, tmp_path: Path) -> None:
    dcp.save({"step": 7}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=rf"{tmp_path} .*\btensors\b"), without_code(tmp_path):
        dcp.load({"step": 0}, checkpoint_id=tmp_path, no_dist=True)


def test_a_member_of_an_enum_is_read_as_python_3_11_2_writes_it() -> None:
    kind = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    read = _KnownPickles().load(
        io.BytesIO(b"cbuiltins\ngetattr\n(" + kind + b"VTORCH_PRESERVE_FORMAT\ntR.")
    )
    assert read is metadata._MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT


def test_afterwards_all_is_as_it_was_and_other_errors_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    before = dict(os.environ)
    with pytest.raises(FileNotFoundError), without_code(tmp_path):
        torch.load(tmp_path / "absent", weights_only=True)
    assert dict(os.environ) == before
    assert vars(filesystem)["pickle"] is pickle


def make_distillation() -> Distillation:
    target = make_target()
    accelerator = make_accelerator(1, None, None)
    optim = Optim(lr=1e-2)
    return Distillation(
        make_standalone(target),
        lambda b: make_signal(target, b),
        Divergence(),
        optim,
        2,
        accelerator,
    )


def test_a_training_with_code_in_its_checkpoint_is_not_resumed(tmp_path: Path) -> None:
    distillation = make_distillation()
    distillation.step(micro_batches(0, 0, 1, 1))
    distillation.save(tmp_path / "checkpoint")
    distillation.resume(tmp_path / "checkpoint")
    save(Bomb(tmp_path / "mark"), tmp_path / "checkpoint" / "optimizer.bin")
    with pytest.raises(ValueError, match=r"checkpoint.*posix\.mkdir"):
        distillation.resume(tmp_path / "checkpoint")
    assert not (tmp_path / "mark").exists()
    distillation.close()


PLACES = {
    "fsdp2": "optimizer_0/.metadata",
    "zero2": "**/*optim_states.pt",
    "zero3": "**/*optim_states.pt",
}


@pytest.mark.slow
@pytest.mark.parametrize("config", PLACES)
def test_no_rank_resumes_code(config: str, tmp_path: Path) -> None:
    require(config)
    script = [
        str(ROOT / "tests/helpers/train_on_ranks.py"),
        str(tmp_path / "run"),
        "standalone",
        "--steps",
        "2",
    ]
    run_all(accelerate_launch(config), [*script, "--save-at", "1"])
    run_all(accelerate_launch(config), [*script, "--resume"])
    places = list((tmp_path / "run" / "standalone.checkpoint").glob(PLACES[config]))
    assert places
    for place in places:
        if config == "fsdp2":
            place.write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
        else:
            save(Bomb(tmp_path / "mark"), place)
    with pytest.raises(AssertionError, match=r"posix\.mkdir"):
        run_all(accelerate_launch(config), [*script, "--resume"])
    assert not (tmp_path / "mark").exists()
