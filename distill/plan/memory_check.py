"""Check whether a training run fits into memory, before anything is loaded.

every process, on the device    the target (with servers, only embeddings and head); the draft: per weight,
                                4 bytes, 4 of gradient, 8 of optimizer state (4 for a matrix under Muon),
                                unless the ranks shard them
every machine, in host memory   the target once per process on it: each reads all of it before it is moved;
                                with --signal.shard once, for the process that reads it
"""

import itertools
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy

from redraft.distill.plan.held import DraftSize, Sharing
from redraft.distill.signal.sharded import processes_here
from redraft.distill.train.run_config import Signal, TrainConfig
from redraft.engine.hardware import Machine, this_machine
from redraft.files.target_folder import TargetFolder
from redraft.heads.family import Family

# Folder of launch configurations, which the wheel contains too.
LAUNCHES = Path(__file__).parents[2] / "recipes" / "accelerate"
TIGHT = 0.7  # fraction of memory above which a run warns that activations also need memory


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes that one process needs, without activations."""

    target: int
    draft: int
    host: int | None = None
    """Bytes that one process reads into host memory if the target is sharded. None if every process
    reads the target.
    """


@dataclass(frozen=True, kw_only=True)
class Room:
    device: str
    device_bytes: int | None
    """Memory of the device in bytes. None if the processes compute on the CPU."""
    host_bytes: int
    processes: int


def require_room(
    target: TargetFolder,
    signal: Signal,
    accelerator: Accelerator,
    draft: DraftSize,
    *,
    machine: Machine | None = None,
    optimizer: str = "adamw",
    command: str = "redraft plan",
) -> None:
    """Refuse a training run that cannot fit into memory.

    One process on each machine reports the reason, and the others exit with it. If memory is tight,
    the main process warns that activations need additional memory, and prints the `command` that
    calculates them. `optimizer` is the name of the draft's optimizer. `machine` is this machine by
    default.

    Raises:
        ValueError: the target or the draft does not fit (the message has the bytes and the ways
            out), or a config cannot be read.
    """
    if target.quantization:  # loading the model afterwards reports what to do
        return
    room, sizes = read_room(accelerator, machine), target.sizes
    is_shared = signal.shard and accelerator.num_processes > 1
    whole = target_bytes = sizes.whole
    if signal.url:
        target_bytes = sizes.outside
    elif is_shared:
        ranks = sizes.choose_ranks(accelerator.num_processes, room.processes, room.device_bytes)
        target_bytes = sizes.share(ranks)
    draft_bytes = round(sum(sharing_of(accelerator).share_out(draft.hold(optimizer)).values()))
    need = Need(target=target_bytes, draft=draft_bytes, host=whole if is_shared else None)
    try:
        check(target.name, need, room, has_servers=bool(signal.url))
    except ValueError:
        if not accelerator.is_local_main_process:
            # Raise one message per machine. The other processes exit without a message.
            raise SystemExit(2) from None
        raise
    taken = need.target + need.draft
    # A CPU has no memory of its own.
    if (
        accelerator.is_main_process
        and room.device_bytes is not None
        and taken > TIGHT * room.device_bytes
    ):
        print(
            f"warning: without activations, target and draft already need {_gb(taken)} of the "
            f"{_gb(room.device_bytes)} of {room.device}; to include activations, run {command}"
        )


def plan_command(family: Family, cfg: TrainConfig) -> str:
    """Return the command that calculates the memory of this training run."""
    flags = {
        "--target": cfg.target,
        "--family": family.name.replace("_", "-"),
        "--optim": cfg.optim.name,
        "--batch-size": str(cfg.loop.batch_size),
        "--sequence-length": str(cfg.loop.sequence_length),
    }
    return shlex.join(["redraft", "plan", *itertools.chain(*flags.items())])


def require_target_room(
    target: TargetFolder, device: torch.device, *, way_out: str, machine: Machine | None = None
) -> None:
    """Refuse a target that does not fit into this process, before it is loaded.

    The message contains the bytes and `way_out`.

    Raises:
        ValueError: device or host memory is too small.
    """
    if target.quantization:
        return
    sizes, machine = target.sizes, _on(device, machine)
    for place, num_bytes in (
        (str(device), machine.gpu_bytes),
        ("this machine's memory", machine.host_bytes),
    ):
        if num_bytes is not None and sizes.whole > num_bytes:
            raise ValueError(
                f"{target.name} takes {_gb(sizes.whole)} in this process: more than the "
                f"{_gb(num_bytes)} of {place}; {way_out}"
            )


def check(name: str, need: Need, room: Room, *, has_servers: bool) -> None:
    """Compare the needed bytes with the available memory.

    Raises:
        ValueError: device or host memory is too small.
    """
    both = need.target + need.draft
    ways = _ways_out(need, has_servers=has_servers)
    if room.device_bytes is not None and both > room.device_bytes:
        raise ValueError(
            f"{name} takes {_gb(need.target)} in every process, and the draft {_gb(need.draft)} "
            "(weights, gradients, "
            f"optimizer state): more than the {_gb(room.device_bytes)} of {room.device}; {ways}"
        )
    held = (
        "target and draft"
        if room.device_bytes is None
        else "the target, before it is moved to its GPU"
    )
    on_host = room.processes * (both if room.device_bytes is None else need.target)
    if need.host is not None:  # one process reads the target and sends the others their parts
        on_host = need.host + (room.processes * both if room.device_bytes is None else 0)
        if on_host > room.host_bytes:
            raise ValueError(
                f"{name}: one process reads the whole target into this machine's memory, {_gb(on_host)} "
                f"in all: more than {_gb(room.host_bytes)}; {ways}"
            )
    elif on_host > room.host_bytes:
        raise ValueError(
            f"{name}: every process reads {held} into this machine's memory, {_gb(on_host)} in all "
            "for "
            f"{room.processes}: more than its {_gb(room.host_bytes)}; start fewer processes, or "
            f"{ways}"
        )


def _ways_out(need: Need, *, has_servers: bool) -> str:
    if has_servers or need.draft > need.target:
        return f"shard the draft: accelerate launch --config_file {LAUNCHES}/fsdp2.yaml"
    share = (
        "" if need.host is not None else "shard the target over the processes: --signal.shard; or "
    )
    return share + (
        "run the target in vLLM servers on other GPUs: --signal.kind endpoint --signal.url URL, "
        "or --signal.kind cache --signal.url URL to read their answers from disk"
    )


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"


def sharing_of(accelerator: Accelerator) -> Sharing:
    ranks: int = accelerator.num_processes
    if accelerator.distributed_type == DistributedType.FSDP:
        if isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy):
            # Weights and states stay in host memory, and the device has only one layer at a time.
            return Sharing(weights=0, gradients=0, state=0)
        return Sharing.of("fsdp2", ranks)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        plugin = accelerator.deepspeed_plugin
        sharing = Sharing.of("fsdp2" if plugin.zero_stage == 3 else "zero2", ranks)
        offloads = plugin.offload_optimizer_device not in (None, "none")
        return replace(sharing, state=0) if offloads else sharing
    return Sharing()


def _on(device: torch.device, machine: Machine | None) -> Machine:
    if machine is not None:
        return machine
    return this_machine() if device.type == "cuda" else this_machine().without_gpu


def read_room(accelerator: Accelerator, machine: Machine | None = None) -> Room:
    """Return the memory of this process's device and machine, within a container's limit."""
    here = _on(accelerator.device, machine)
    return Room(
        device=str(accelerator.device),
        device_bytes=here.gpu_bytes,
        host_bytes=here.host_bytes,
        processes=processes_here(accelerator.num_processes),
    )
