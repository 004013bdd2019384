"""The command that a tight fit prints counts the training."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from parse_flags import parse

from benchmarks.studies.presets import make_preset
from redraft.distill.plan import memory_check
from redraft.distill.run.training_run import run
from redraft.distill.train.optim import Optim
from redraft.engine.hardware import Machine
from redraft.heads.catalog import find_family
from redraft.recipes.plan.plan import PlanConfig


def read(command: str) -> PlanConfig:
    """The config of the command, by the parser that a shell's user meets."""
    program, name, *flags = shlex.split(command)
    assert (program, name) == ("redraft", "plan")
    cfg: PlanConfig = parse(PlanConfig, None, {}, flags, prog="redraft")
    return cfg


@pytest.mark.parametrize("family", ["standalone", "eagle3"])
def test_a_run_that_fits_tightly_prints_the_command_of_its_training(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends where it would open its folder."""

    def stop(*_: object, **__: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(memory_check, "TIGHT", 0.0)
    monkeypatch.setattr("redraft.distill.train.run_folder.RunFolder.open", stop)
    cfg = replace(
        make_preset(family), output=tmp_path / "run", mixed_precision="no", optim=Optim(name="muon")
    )
    machine = Machine(gpu="H100", gpu_has_bfloat16=True, gpu_shared_bytes=232_448, gpu_bytes=10**12)
    with pytest.raises(InterruptedError):
        run(find_family(family), cfg, machine)
    (line,) = (
        line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")
    )
    counting = read(line.partition("to include activations, run ")[2])
    assert (counting.family, counting.target, counting.optim) == (family, cfg.target, "muon")
    assert (counting.batch_size, counting.sequence_length) == (
        cfg.loop.batch_size,
        cfg.loop.sequence_length,
    )
