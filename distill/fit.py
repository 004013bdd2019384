"""Whether a training fits into memory, answered before anything is loaded.

    every process, on the device    the target, or with servers only embeddings and head;  the draft: 4 bytes a weight,
                                    4 of gradient, 8 of optimizer state (4 for a matrix under Muon), as far as the
                                    ranks do not share them out
    every machine, in host memory   the target once for each process on it: each reads it whole before it moves;
                                    with --signal.shard once, for the process that reads it

Activations come on top. If the rest takes most of the memory, the run says so, with the command that counts them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import AutoConfig, AutoModelForCausalLM

from redraft.distill.inputs import Signal, choose_dtype
from redraft.distill.signal.sharded import TargetSizes, device_bytes, processes_here, size_weights
from redraft.distill.train.muon import split
from redraft.eval.engine.target_dtype import TargetDtype
from redraft.heads.catalog import find_family
from redraft.heads.families.standalone import Init, from_config
from redraft.heads.files.checkpoint import load_text_config, register_models
from redraft.heads.target import Target

WEIGHT_BYTES, GRADIENT_BYTES, STATE_BYTES = 4, 4, 8
"""By weight of the draft: trained in float32 with AdamW, which keeps two means."""

MOMENTUM_BYTES = 4
"""Muon's state, by weight in a matrix."""

TIGHT = 0.7
"""Share of the memory from which on a run says that activations come on top."""

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes of one process, before activations."""

    target: int
    draft: int
    host: int | None = None
    """Bytes that one process of a launch reads into host memory, if the target is shared out. Else every process reads
    the target."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """The memory of a machine."""

    device: str
    device_bytes: int | None
    """None if the processes compute on the CPU."""
    host_bytes: int
    processes: int
    """Processes on this machine."""


def require_room(
    target: str,
    signal: Signal,
    accelerator: Accelerator,
    count_draft: Callable[[Any], DraftSize],
    dtype: TargetDtype | None = None,
    *,
    optimizer: str = "adamw",
    tell: Callable[[], str] = lambda: "redraft plan",
) -> None:
    """Refuse a training that cannot fit. One process of each machine tells, the others leave with it.

    If it fits tightly, the main process says that activations come on top, and which command counts them: `tell()`.
    `count_draft(config)` is the draft's size, by the target's text config. `dtype` is the target's
    (`choose_dtype`), and `optimizer` the name of the draft's.

    Raises:
        ValueError: the target or the draft does not fit. The message has the bytes and the ways out.
    """
    try:
        config, sizes = _size_target(target, choose_dtype(target, dtype, accelerator.device))
        draft = count_draft(config)
    except Exception:  # transformers raises a dozen types for a config; the loading that follows reports each in a line
        return
    room = read_room(accelerator)
    is_shared = signal.shard and accelerator.num_processes > 1
    target_bytes = sizes.whole
    if signal.url:
        target_bytes = sizes.outside
    elif is_shared:
        ranks = sizes.choose_ranks(accelerator.num_processes, room.processes, room.device_bytes)
        target_bytes = sizes.share(ranks)
    draft_bytes = round(draft.weights * bytes_by_weight(accelerator, draft.state_bytes(optimizer) / draft.weights))
    need = Need(target=target_bytes, draft=draft_bytes, host=sizes.whole if is_shared else None)
    try:
        check(target, need, room, has_servers=bool(signal.url))
    except ValueError:
        if not accelerator.is_local_main_process:
            # One message for each machine: the other processes leave without a word.
            raise SystemExit(2) from None
        raise
    if accelerator.is_main_process and is_tight(need, room):
        assert room.device_bytes is not None
        print(
            f"warning: target and draft take {_gb(need.target + need.draft)} of the {_gb(room.device_bytes)} of "
            f"{room.device}, and activations come on top; this counts them: {tell()}"
        )


def is_tight(need: Need, room: Room) -> bool:
    """Whether a device has no more left for activations than a share of 1 - `TIGHT`. A CPU has no memory of its own."""
    return room.device_bytes is not None and need.target + need.draft > TIGHT * room.device_bytes


def require_target_room(name: str, device: torch.device, dtype: torch.dtype | None, *, way_out: str) -> None:
    """Refuse a target that does not fit into this one process, before it is loaded.

    Raises:
        ValueError: device or host memory is too small. The message has the bytes and `way_out`.
    """
    try:
        _, sizes = _size_target(name, dtype)
    except Exception:  # as in `require_room`
        return
    for place, num_bytes in ((str(device), device_bytes(device)), ("this machine's memory", _host_bytes())):
        if num_bytes is not None and sizes.whole > num_bytes:
            raise ValueError(
                f"{name} takes {_gb(sizes.whole)} in this process: more than the {_gb(num_bytes)} of {place}; {way_out}"
            )


def check(name: str, need: Need, room: Room, *, has_servers: bool) -> None:
    """Compare need and room.

    Raises:
        ValueError: device or host memory is too small.
    """
    both = need.target + need.draft
    ways = _ways_out(need, has_servers=has_servers)
    if room.device_bytes is not None and both > room.device_bytes:
        raise ValueError(
            f"{name} takes {_gb(need.target)} in every process, and the draft {_gb(need.draft)} (weights, gradients, "
            f"optimizer state): more than the {_gb(room.device_bytes)} of {room.device}; {ways}"
        )
    held = "target and draft" if room.device_bytes is None else "the target, on the way to its GPU"
    on_host = room.processes * (both if room.device_bytes is None else need.target)
    if need.host is not None:  # one process reads the target and gives the others a part
        on_host = need.host + (room.processes * both if room.device_bytes is None else 0)
        if on_host > room.host_bytes:
            raise ValueError(
                f"{name}: one process reads all of it into this machine's memory, {_gb(on_host)} in all: more than "
                f"{_gb(room.host_bytes)}; {ways}"
            )
    elif on_host > room.host_bytes:
        raise ValueError(
            f"{name}: every process reads {held} into this machine's memory, {_gb(on_host)} in all for "
            f"{room.processes}: more than its {_gb(room.host_bytes)}; start fewer processes, or {ways}"
        )


def _ways_out(need: Need, *, has_servers: bool) -> str:
    if has_servers or need.draft > need.target:
        return "shard the draft: accelerate launch --config_file recipes/accelerate/fsdp2.yaml"
    share = "" if need.host is not None else "share it out over the processes: --signal.shard; or "
    return share + (
        "let vLLM servers hold the target, on other GPUs: --signal.kind endpoint --signal.url URL, "
        "or --signal.kind cache --signal.url URL to read their answers from disk"
    )


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"


# -------------------------------------------------------------------------------------------------------------- sizes


def _size_target(name: str, dtype: torch.dtype | None) -> tuple[Any, TargetSizes]:
    """(text config, bytes).

    Raises:
        ValueError: the weights are stored in fewer bits than the config's type.
    """
    register_models()
    config = AutoConfig.from_pretrained(name)
    if getattr(config, "quantization_config", None):
        raise ValueError(f"{name} is quantised")
    return config.get_text_config(), size_weights(config, dtype or config.dtype or torch.float32)


@dataclass(frozen=True, kw_only=True)
class DraftSize:
    """Weights of a draft."""

    weights: int
    matrices: int
    """Those in matrices that Muon moves (`distill.train.muon.split`)."""

    @staticmethod
    def of(module: torch.nn.Module) -> DraftSize:
        matrices, rest = split(module)
        in_matrices = sum(weight.numel() for weight in matrices)
        return DraftSize(weights=in_matrices + sum(weight.numel() for weight in rest), matrices=in_matrices)

    def state_bytes(self, optimizer: str) -> int:
        """Bytes that the optimizer keeps for them, apart from a count of steps for each tensor of AdamW's."""
        matrices = self.matrices if optimizer == "muon" else 0
        return MOMENTUM_BYTES * matrices + STATE_BYTES * (self.weights - matrices)


def count_head(family: str, options: Any, draft_vocab_size: int, target_config: Any) -> DraftSize:
    """The size of an untrained head of a family."""
    with torch.device("meta"):
        weight_VD = torch.empty(target_config.vocab_size, target_config.hidden_size)
        target = Target(config=target_config, embed_VD=weight_VD, head_VD=weight_VD)
        # On the CPU, with values: a head checks the ids when it is made (`check_ids`).
        kept = (torch.arange(draft_vocab_size, device="cpu"),) if draft_vocab_size else ()
        return DraftSize.of(find_family(family).draft_class()(options, target, *kept))


def count_standalone(init: Init, target_config: Any) -> DraftSize:
    """The size of a standalone draft."""
    with torch.device("meta"):
        return DraftSize.of(AutoModelForCausalLM.from_config(standalone_config(init, target_config)))


def standalone_config(init: Init, target_config: Any) -> Any:
    """The text config of a standalone draft."""
    if init.num_layers:
        with torch.device("meta"):
            return from_config(target_config, num_layers=init.num_layers, hidden_size=init.hidden_size).model.config
    if not init.layers:
        assert init.checkpoint is not None
        return load_text_config(init.checkpoint)
    config = copy.deepcopy(target_config)
    config.num_hidden_layers = len(init.layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in init.layers]
    return config


def bytes_by_weight(accelerator: Accelerator, state_bytes: float = STATE_BYTES) -> float:
    """Bytes on a device for each weight of the draft, as the launch shares them out. `state_bytes` is the mean of the
    optimizer's."""
    ranks: int = accelerator.num_processes
    if accelerator.distributed_type == DistributedType.FSDP:
        offloads = isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
        # Offloaded, weights and states stay in host memory: the device holds a layer at a time.
        return 0 if offloads else (WEIGHT_BYTES + GRADIENT_BYTES + state_bytes) / ranks
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        plugin = accelerator.deepspeed_plugin
        weights: float = WEIGHT_BYTES / ranks if plugin.zero_stage == 3 else WEIGHT_BYTES
        offloads = plugin.offload_optimizer_device not in (None, "none")
        return weights + GRADIENT_BYTES / ranks + (0 if offloads else state_bytes / ranks)
    return WEIGHT_BYTES + GRADIENT_BYTES + state_bytes


def read_room(accelerator: Accelerator) -> Room:
    """The memory of this process's device and machine. A container's limit counts."""
    return Room(
        device=str(accelerator.device),
        device_bytes=device_bytes(accelerator.device),
        host_bytes=_host_bytes(),
        processes=processes_here(accelerator.num_processes),
    )


def _host_bytes() -> int:
    """The memory of this machine, or of this container."""
    num_bytes: int = psutil.virtual_memory().total
    if CGROUP_LIMIT.is_file() and (limit := CGROUP_LIMIT.read_text().strip()).isdigit():
        # cgroup v2. Without a limit the file says `max`.
        num_bytes = min(num_bytes, int(limit))
    return num_bytes
