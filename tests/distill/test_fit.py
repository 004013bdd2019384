"""What does not fit is refused before anything is loaded, with bytes and a way out."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy
from train_on_ranks import FAMILIES, make_family_target
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.studies.presets import make_preset
from redraft.distill.plan import memory_check as fit
from redraft.distill.plan.held import (
    DRAFT_WEIGHTS,
    GRADIENTS,
    STATE,
    DraftSize,
    sketch_draft,
)
from redraft.distill.plan.memory_check import Need, Room, check, read_room, require_room, sharing_of
from redraft.distill.run.training_run import run
from redraft.distill.train.optim import Optim
from redraft.distill.train.run_config import Signal
from redraft.distill.train.step import make_optimizers
from redraft.engine.hardware import Machine, read_host_bytes
from redraft.files.target_folder import TargetFolder
from redraft.heads.catalog import find_family
from redraft.heads.families import eagle3
from redraft.heads.families.standalone import Init, from_config, prune_layers

LLAMA_70B = LlamaConfig(
    vocab_size=128_256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, head_dim=128, dtype="bfloat16",
)  # fmt: skip
MACHINE = Machine(
    gpu="H100", gpu_has_bfloat16=True, gpu_bytes=85_520_809_984, host_bytes=2 * 10**12
)
SMALL = DraftSize(weights=1, matrices=0)
H100 = Room(device="cuda:0", device_bytes=85_520_809_984, host_bytes=2 * 10**12, processes=8)
CUDA = torch.device("cuda", 0)


def size_head(target: TargetFolder) -> DraftSize:
    family = find_family("eagle3")
    return DraftSize.of(sketch_draft(family, eagle3.Config(), target.text_config, 32000))


def accelerator_of(kind: DistributedType, **settings: Any) -> Any:
    return SimpleNamespace(
        distributed_type=kind,
        num_processes=8,
        device=CUDA,
        is_local_main_process=True,
        is_main_process=True,
        **settings,
    )


def test_a_70b_target_is_refused_on_80_gb_with_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LLAMA_70B.save_pretrained(tmp_path)
    accelerator = accelerator_of(DistributedType.MULTI_GPU)
    target = TargetFolder.open(tmp_path)
    head = size_head(target)
    with pytest.raises(ValueError, match=r"141\.1 GB.*22\.4 GB.*85\.5 GB.*cuda:0"):
        require_room(target, Signal(), accelerator, head, machine=MACHINE)
    with pytest.raises(ValueError, match=r"282\.2 GB"):
        require_room(replace(target, dtype="float32"), Signal(), accelerator, head, machine=MACHINE)
    served = Signal(kind="endpoint", url=("http://t1:8001",))
    require_room(target, served, accelerator, head, machine=MACHINE)  # 4.2 + 22.4 GB
    accelerator.is_local_main_process = False
    with pytest.raises(SystemExit):  # only one process of a machine tells
        require_room(target, Signal(), accelerator, head, machine=MACHINE)


def test_a_70b_target_in_shards_fits_eight_gpus_of_80_gb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """17.1 GB of layers and 4.2 of embeddings and head, and 3.4 for two gathered layers."""
    LLAMA_70B.save_pretrained(tmp_path)
    target = TargetFolder.open(tmp_path)
    seen: list[Need] = []

    def look(name: str, need: Need, room: Room, *, has_servers: bool) -> None:
        seen.append(need)
        check(name, need, room, has_servers=has_servers)

    draft = DraftSize(weights=3_212_749_824, matrices=0)  # Llama-3.2-3B
    monkeypatch.setattr(fit, "check", look)
    plugin = SimpleNamespace(zero_stage=2, offload_optimizer_device="none")
    for accelerator in (
        accelerator_of(DistributedType.MULTI_GPU),
        accelerator_of(DistributedType.DEEPSPEED, deepspeed_plugin=plugin),
    ):
        require_room(target, Signal(shard=True), accelerator, draft, machine=MACHINE)
    assert [round(need.target / 1e9, 1) for need in seen] == [24.7, 24.7]
    assert [round(need.draft / 1e9, 1) for need in seen] == [51.4, 17.7]
    assert {round(need.host / 1e9, 1) for need in seen} == {141.1}
    accelerator = accelerator_of(DistributedType.MULTI_GPU)
    accelerator.num_processes = 1  # nobody to share with
    with pytest.raises(ValueError, match=r"takes 141\.1 GB"):
        require_room(target, Signal(shard=True), accelerator, draft, machine=MACHINE)
    small, accelerator = (
        replace(MACHINE, host_bytes=140 * 10**9),
        accelerator_of(DistributedType.MULTI_GPU),
    )
    with pytest.raises(ValueError, match=r"141\.1 GB.*140\.0 GB"):
        require_room(target, Signal(shard=True), accelerator, draft, machine=small)


def test_the_host_holds_the_target_once_for_each_process_of_the_machine() -> None:
    need = Need(target=16 * 10**9, draft=6 * 10**9)
    check("8B", need, replace(H100, host_bytes=129 * 10**9), has_servers=False)
    with pytest.raises(ValueError, match=r"128\.0 GB.*8.*127\.0 GB"):
        check("8B", need, replace(H100, host_bytes=127 * 10**9), has_servers=False)
    on_cpu = replace(H100, device="cpu", device_bytes=None, host_bytes=175 * 10**9)
    with pytest.raises(
        ValueError,
        match=r"176\.0 GB.*8.*175\.0 GB",
    ):
        check("8B", need, on_cpu, has_servers=False)
    check("8B", need, replace(on_cpu, processes=1), has_servers=False)


def test_the_way_out_is_the_one_that_helps() -> None:
    with pytest.raises(ValueError, match=r"--signal\.shard.*--signal\.kind"):
        check("70B", Need(target=141 * 10**9, draft=10**9), H100, has_servers=False)
    with pytest.raises(ValueError, match="cuda:0"):
        check("700B", Need(target=200 * 10**9, draft=10**9, host=1), H100, has_servers=False)
    for need, has_servers in (
        (Need(target=4 * 10**9, draft=128 * 10**9), True),
        (Need(target=10, draft=10**11), False),
    ):
        with pytest.raises(ValueError, match=r"fsdp2\.yaml") as error:
            check("8B", need, H100, has_servers=has_servers)
        assert Path(str(error.value).partition("--config_file ")[2].split()[0]).is_file()


def test_sharding_divides_the_bytes_of_a_weight() -> None:
    def bytes_by_weight(accelerator: Any) -> float:
        return sum(
            sharing_of(accelerator).share_out({DRAFT_WEIGHTS: 4, GRADIENTS: 4, STATE: 8}).values()
        )

    assert bytes_by_weight(accelerator_of(DistributedType.MULTI_GPU)) == 16
    for stage, offload, expected in (
        (2, "none", 4 + 12 / 8),
        (3, "none", 2),
        (2, "cpu", 4 + 4 / 8),
    ):
        plugin = SimpleNamespace(zero_stage=stage, offload_optimizer_device=offload)
        assert (
            bytes_by_weight(accelerator_of(DistributedType.DEEPSPEED, deepspeed_plugin=plugin))
            == expected
        )
    for offload, expected in ((None, 2), (CPUOffloadPolicy(), 0)):
        state = SimpleNamespace(fsdp_plugin=SimpleNamespace(cpu_offload=offload))
        assert bytes_by_weight(accelerator_of(DistributedType.FSDP, state=state)) == expected


def test_the_weights_of_a_draft_are_counted_as_they_are_made(random_target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_target)
    config = model.config
    drafts = {
        Init(layers=(0, 1)): prune_layers(model, (0, 1)).model,
        Init(checkpoint=str(random_target)): model,
    }
    family = find_family("standalone")
    for init, draft in drafts.items():
        size = DraftSize.of(sketch_draft(family, init, config))
        assert size.weights == sum(p.numel() for p in draft.parameters())
    made = from_config(config, num_layers=1, hidden_size=64)
    new = Init(num_layers=1, hidden_size=64)
    size = DraftSize.of(sketch_draft(family, new, config))
    assert size.weights == sum(p.numel() for p in made.parameters())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_state_is_counted_as_the_optimizers_keep_it(
    family: str, optimizer: Literal["adamw", "muon"]
) -> None:
    draft: Any = FAMILIES[family](make_family_target(family))
    size = DraftSize.of(draft)
    optimizers = make_optimizers(draft, Optim(name=optimizer))
    for parameter in draft.parameters():
        parameter.grad = torch.ones_like(parameter)
    for each in optimizers:
        each.step()
    kept = [x for each in optimizers for state in each.state.values() for x in state.values()]
    steps = [x for x in kept if not x.ndim]
    assert size.hold(optimizer)[STATE] == sum(x.numel() * x.element_size() for x in kept) - 4 * len(
        steps
    )
    assert size.weights == sum(parameter.numel() for parameter in draft.parameters())


def test_muon_takes_less_memory_and_lets_a_draft_fit(tmp_path: Path) -> None:
    """Four billion weights in matrices: 64 GB with AdamW, and 48 with Muon."""
    LLAMA_70B.save_pretrained(tmp_path)
    target = TargetFolder.open(tmp_path)
    machine = replace(MACHINE, gpu_bytes=60 * 10**9)
    accelerator, served = (
        accelerator_of(DistributedType.MULTI_GPU),
        Signal(kind="endpoint", url=("http://t1:8001",)),
    )

    draft = DraftSize(weights=4 * 10**9, matrices=4 * 10**9)
    with pytest.raises(ValueError, match=r"64\.0 GB"):
        require_room(target, served, accelerator, draft, machine=machine)
    require_room(target, served, accelerator, draft, machine=machine, optimizer="muon")


def test_a_tight_fit_is_told_once_with_the_command_that_counts_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """4.2 GB of embeddings and head of the target, and 16 bytes a weight, of 85.5 GB."""
    LLAMA_70B.save_pretrained(tmp_path)
    target = TargetFolder.open(tmp_path)
    served, accelerator = (
        Signal(kind="endpoint", url=("http://t1:8001",)),
        accelerator_of(DistributedType.MULTI_GPU),
    )

    def say(weights: int, machine: Machine = MACHINE) -> str:
        size = DraftSize(weights=weights, matrices=0)
        require_room(
            target,
            served,
            accelerator,
            size,
            machine=machine,
            command="redraft count this",
        )
        return capsys.readouterr().out

    assert say(3_400_000_000) == "", "58.6 GB"
    assert say(3_500_000_000) == (
        "warning: without activations, target and draft already need 60.2 GB of the 85.5 GB of "
        "cuda:0; to include activations, run redraft count this\n"
    )
    accelerator.is_main_process = False
    assert say(3_500_000_000) == ""
    accelerator.is_main_process = True
    assert say(3_500_000_000, MACHINE.without_gpu) == ""


@pytest.mark.parametrize("family", ["standalone", "eagle3"])
def test_a_run_that_does_not_fit_loads_nothing_and_leaves_no_folder(
    family: str, tmp_path: Path
) -> None:
    cfg = replace(make_preset(family), output=tmp_path / "run", mixed_precision=None)
    with pytest.raises(ValueError, match="tests/assets/tiny-target"):
        run(find_family(family), cfg, Machine(host_bytes=10**6))
    assert not (tmp_path / "run").exists()


def test_the_room_is_that_of_this_machine(tmp_path: Path) -> None:
    room = read_room(Accelerator(cpu=True))
    assert room.device_bytes is None
    assert room.processes == 1
    assert room.host_bytes == read_host_bytes() > 10**9
    limit = tmp_path / "memory.max"
    limit.write_text("1000\n")
    assert read_host_bytes(limit) == 1000
    limit.write_text("max\n")
    assert read_host_bytes(limit) > 10**9


BROKEN = {
    "no JSON": "{",
    "no model type": "{}",
    "text for a number": '{"model_type": "llama", "hidden_size": "x"}',
    "no heads": '{"model_type": "llama", "num_attention_heads": 0}',
    "an unknown type": '{"model_type": "llama", "dtype": "float99"}',
    "a missing key": '{"model_type": "llama", "rope_scaling": {"rope_type": "yarn"}}',
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=list(BROKEN))
def test_a_config_that_cannot_be_read_is_refused_in_a_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    target = TargetFolder.open(tmp_path)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))) as error:
        require_room(target, Signal(), accelerator_of(DistributedType.NO), SMALL)
    assert len(str(error.value).splitlines()) == 1


def test_a_target_or_draft_that_is_not_there_is_refused(tmp_path: Path) -> None:
    accelerator, nowhere = accelerator_of(DistributedType.MULTI_GPU), str(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        require_room(TargetFolder.open(nowhere), Signal(), accelerator, SMALL, machine=MACHINE)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        sketch_draft(find_family("standalone"), Init(checkpoint=nowhere), LLAMA_70B)


@pytest.mark.slow
def test_the_check_of_a_70b_target_takes_at_most_two_seconds(tmp_path: Path) -> None:
    LLAMA_70B.save_pretrained(tmp_path)
    target = TargetFolder.open(tmp_path)
    machine = replace(MACHINE, gpu_bytes=10**12, host_bytes=10**14)
    accelerator, began = accelerator_of(DistributedType.MULTI_GPU), time.process_time()
    require_room(target, Signal(), accelerator, size_head(target), machine=machine)
    assert time.process_time() - began < 2
