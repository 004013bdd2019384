"""The command that a tight fit prints counts the step of the very training."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType

from benchmarks.studies.presets import make_preset
from redraft.distill.loss.choice import Divergence
from redraft.distill.plan.held import STATE, standalone_config
from redraft.distill.plan.step import Plan
from redraft.distill.run import memory
from redraft.distill.run.config import Loop, Signal, StandaloneConfig, make_config
from redraft.distill.run.count_command import count_command
from redraft.distill.run.run import run
from redraft.distill.train.optim import Optim
from redraft.eval.engine.hardware import Machine
from redraft.heads.catalog import find_family
from redraft.heads.families.standalone import Init
from redraft.heads.files.checkpoint import load_text_config
from redraft.heads.files.target_folder import TargetFolder
from redraft.recipes.cli.run import parse
from redraft.recipes.plan.count import as_text, count, make_plan
from redraft.recipes.plan.plan import Train as Counting

HEADS = ("eagle3", "dflash", "dspark", "peagle", "eagle1", "medusa", "mlp_speculator")


def launch(ranks: int = 1, kind: Any = DistributedType.NO, precision: str = "bf16", **settings: Any) -> Any:
    device = torch.device("cuda", 0)
    return SimpleNamespace(
        num_processes=ranks, distributed_type=kind, mixed_precision=precision, device=device, **settings
    )


def read(command: str) -> Counting:
    """The config of the command, by the parser that a shell's user meets."""
    program, name, part, *flags = shlex.split(command)
    assert (program, name, part) == ("redraft", "plan", "train")
    cfg: Counting = parse(Counting, None, {}, flags, prog="redraft")
    return cfg


def plan_of(family: str, cfg: Any, accelerator: Any) -> Plan:
    return make_plan(read(count_command(family, cfg, TargetFolder.open(cfg.target), accelerator)))


@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize("is_preset", [True, False])
def test_every_head_is_counted_with_its_options(family: str, is_preset: bool, random_target: Path) -> None:
    cfg: Any = make_preset(family) if is_preset else make_config(find_family(family))
    options = cfg.head
    if family == "medusa":
        options = replace(options, num_layers=2)
    if hasattr(options, "recompute"):
        options = replace(options, recompute=True)
    loop = Loop(batch_size=3, sequence_length=160)
    cfg = replace(cfg, target=str(random_target), head=options, loop=loop, divergence=Divergence(name="reverse_kl"))
    plan = plan_of(family, cfg, launch())
    assert (plan.family, plan.head, plan.divergence) == (family, options, cfg.divergence)
    assert (plan.batch_size, plan.sequence_length, plan.autocast) == (3, 160, True)
    assert plan.target.to_dict() == load_text_config(str(random_target)).to_dict()
    assert plan.draft_vocab_size == min(getattr(cfg, "draft_vocab_size", 0), plan.target.vocab_size)
    assert plan.dtype == torch.float32, "as stored"
    assert plan.gradient_checkpointing == hasattr(options, "recompute")


def test_a_standalone_draft_is_counted_however_it_begins(random_target: Path) -> None:
    target = load_text_config(str(random_target))
    for init in (Init(checkpoint=str(random_target)), Init(layers=(0, 1)), Init(num_layers=3, hidden_size=128)):
        cfg = StandaloneConfig(target=str(random_target), draft=init, gradient_checkpointing=True)
        plan = plan_of("standalone", cfg, launch(precision="no"))
        assert plan.head.to_diff_dict() == standalone_config(init, target).to_diff_dict()
        assert (plan.gradient_checkpointing, plan.autocast, plan.optimizer) == (True, False, "adamw")


SERVED = Signal(kind="endpoint", url=("http://t1:8001", "http://t2:8001"), exact=True)


@pytest.mark.parametrize(
    ("accelerator", "signal", "flags"),
    [
        (launch(), Signal(), ""),
        (launch(), Signal(kind="cache"), ""),
        (launch(), Signal(shard=True), ""),
        (launch(), SERVED, "--features cached --exact"),
        (launch(8, DistributedType.MULTI_GPU), Signal(shard=True), "--devices 8 --shard-target"),
        (launch(8, DistributedType.FSDP), Signal(kind="cache"), "--devices 8 --sharding fsdp2"),
        *(
            (
                launch(4, DistributedType.DEEPSPEED, deepspeed_plugin=SimpleNamespace(zero_stage=stage)),
                SERVED,
                f"--features cached --exact --devices 4 --sharding {sharding}",
            )
            for stage, sharding in ((2, "zero2"), (3, "fsdp2"))
        ),
    ],
)
def test_the_launch_and_the_place_of_the_target_are_told(
    accelerator: Any, signal: Signal, flags: str, random_target: Path
) -> None:
    cfg = StandaloneConfig(target=str(random_target), draft=Init(layers=(0,)), signal=signal)
    command = count_command("standalone", cfg, TargetFolder.open(cfg.target), accelerator)
    assert command.endswith(f"--sequence-length 4096 {flags}".rstrip())
    read(command)


def test_the_command_counts_the_state_of_the_optimizer_and_prints_its_tables(random_target: Path) -> None:
    states = {}
    for name in ("adamw", "muon"):
        cfg = StandaloneConfig(
            target=str(random_target),
            draft=Init(layers=(0, 1)),
            optim=Optim(name=name),  # type: ignore[arg-type]
            loop=Loop(batch_size=1, sequence_length=64),
        )
        counting = read(count_command("standalone", cfg, TargetFolder.open(cfg.target), launch()))
        result = count(counting)
        assert any(line.startswith("memory at its peak") for line in as_text(counting, result, {}))
        states[name] = result.step.memory[STATE]
    assert states["muon"] < states["adamw"]


@pytest.mark.parametrize("family", ["standalone", "eagle3"])
def test_a_run_that_fits_tightly_prints_the_command_of_its_training(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends where it would open its folder."""

    def stop(*_: object, **__: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(memory, "TIGHT", 0.0)
    monkeypatch.setattr("redraft.distill.run.folder.RunFolder.open", stop)
    cfg = replace(make_preset(family), output=tmp_path / "run", mixed_precision="no", optim=Optim(name="muon"))
    machine = Machine(gpu="H100", gpu_has_bfloat16=True, gpu_shared_bytes=232_448, gpu_bytes=10**12)
    with pytest.raises(InterruptedError):
        run(find_family(family), cfg, machine)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: "))
    counting = read(line.partition("this counts them: ")[2])
    assert (counting.family, counting.target, counting.optimizer) == (family, cfg.target, "muon")
    assert (counting.batch_size, counting.sequence_length) == (cfg.loop.batch_size, cfg.loop.sequence_length)


def test_options_that_are_no_json_or_not_the_familys_are_refused_in_a_line() -> None:
    for flags, message in (
        ({"head": "num_layers=3"}, "--head num_layers=3 is not a JSON object"),
        ({"head": '{"layers": 3}'}, "--head .* unexpected keyword argument 'layers'"),
        ({"head": "[]"}, "--head .* is not a JSON object"),
        ({"divergence": '{"name": "kl"}'}, "--divergence .* is not a JSON object of its options"),
        ({"family": "standalone", "draft": "{}"}, "--draft .* none is given"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            make_plan(Counting(**{"target": "llama-3.2-1b", **flags}))
        assert len(str(error.value).splitlines()) == 1
