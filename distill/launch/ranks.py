"""The processes of one run.

No process outlives the launcher, and accelerate shards over CPU ranks as over GPUs.

accelerate launch, torchrun ──► rank 0, 1, ...     `make_accelerator` of `distill.train.loop` joins them
        killed? the kernel kills these ──┘
"""

import os
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from redraft.engine.process import LIBC, PR_SET_PDEATHSIG

LONGEST_WAIT = timedelta(hours=24)
"""How long the ranks wait for a rank that is alive but does not respond. The time is long because
the first rank may be caching the target, or measuring a draft in the engine. A dead rank is noticed
at once, by the launcher and by closed connections.
"""

# Time for DeepSpeed to compile its CPU extension, which usually takes a minute.
LONGEST_BUILD_S = 1800
# Time for gloo's threads to release tensors, which takes microseconds unless a thread waits.
LET_GO_S = 0.5


def die_with_launcher() -> None:
    """Have the kernel kill this rank when the launcher dies.

    A killed torchrun would leave its ranks training.
    """
    if "LOCAL_RANK" in os.environ and sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def require_gpus() -> None:
    """Raise ValueError if this machine has fewer GPUs than processes of the launch.

    accelerate lets processes share a GPU, which NCCL refuses with a long error.
    """
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if processes > max(gpus, 1):
        raise ValueError(
            f"{processes} processes were started on a machine with {gpus} GPU{'s' * (gpus > 1)}: "
            "start one process per GPU (accelerate launch --num_processes)"
        )


def join_on_cpu() -> None:
    """Join the ranks of a launch on a machine without a GPU.

    accelerate reads the launcher's FSDP or DeepSpeed settings only for GPUs; this function applies
    them.
    """
    if uses_deepspeed():
        # Set it before deepspeed is first imported, because deepspeed reads it then.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        refuse_abandoned_build()
    # All instances of PartialState share one state, so the Accelerator finds the group joined here
    # and does not join a second one.
    state = PartialState(cpu=True, timeout=LONGEST_WAIT)
    if state.distributed_type == DistributedType.MULTI_CPU and _is_requested("FSDP"):
        state.distributed_type = (
            DistributedType.MULTI_GPU
        )  # accelerate shards only for this type; device and backend remain the CPU's


def refuse_abandoned_build() -> None:
    """Look for the lock that a killed build of DeepSpeed's extension leaves behind.

    PyTorch would wait forever for its release.

    Raises:
        TimeoutError: a lock is older than any build.
    """
    from torch.utils.cpp_extension import (
        get_default_build_root,
    )  # imported here, because it is slow and only needed for DeepSpeed

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in root.rglob("lock"):
        with suppress(FileNotFoundError):  # the build may finish now and remove its lock
            if time.time() - lock.stat().st_mtime > LONGEST_BUILD_S:
                raise TimeoutError(
                    f"a build of DeepSpeed's extension was killed and left a lock: delete {lock}"
                )


def leave(accelerator: Accelerator) -> None:
    """End this rank's part in a successful launch.

    gloo's threads may still refer to tensors of the last collectives, and need the interpreter to
    release them. If the interpreter exits in the meantime, the process aborts, and the launchers on
    other machines wait minutes for this process.
    """
    if accelerator.device.type == "cpu" and accelerator.num_processes > 1:
        time.sleep(LET_GO_S)
    accelerator.end_training()


def uses_deepspeed() -> bool:
    return _is_requested("DEEPSPEED")


def _is_requested(plugin: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{plugin}", "false").lower() == "true"


def keep_models_whole() -> None:
    """Stop `transformers` from sharding every model under ZeRO-3.

    The target is not trained, and every rank reads all of it.
    """
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def fit_deepspeed(accelerator: Accelerator, max_grad_norm: float) -> None:
    """Give DeepSpeed the recipe's settings, because it clips and accumulates gradients itself."""
    config: dict[str, Any] = accelerator.deepspeed_plugin.deepspeed_config
    config["gradient_clipping"] = max_grad_norm
    config["gradient_accumulation_steps"] = accelerator.gradient_accumulation_steps
    # Required but without effect: the loss is divided by labels, not by rows.
    config["train_micro_batch_size_per_gpu"] = 1
    # Use torch's fused AdamW on the CPU too: the arithmetic is then the same in every launch, and
    # no compiler is needed.
    config["zero_force_ds_cpu_optimizer"] = False
    from deepspeed.utils import groups  # an extra

    # With the default, ranks would wait only ten minutes for each other.
    if groups._WORLD_GROUP is None:
        groups._WORLD_GROUP = torch.distributed.new_group(timeout=LONGEST_WAIT)


def fit_fsdp(accelerator: Accelerator, module: nn.Module) -> None:
    """Set which modules of this draft FSDP2 gathers one by one.

    Otherwise, it would reuse the modules of the first draft that it received.
    """
    plugin = accelerator.state.fsdp_plugin
    plugin.transformer_cls_names_to_wrap = module._no_split_modules
    if plugin.mixed_precision_policy is not None:
        # accelerate's policy would also round inputs, outputs and reduced gradients to bfloat16,
        # including the target's log-probabilities and sums over thousands of rows. Inside the
        # modules, autocast rounds as under DDP.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=plugin.mixed_precision_policy.param_dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
    if accelerator.device.type == "cpu" and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(
            pin_memory=False
        )  # on a CPU, there is no device to pin memory for


def shards_parameters(accelerator: Accelerator) -> bool:
    """Whether no rank has the whole draft outside a forward pass."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # Stages 1 and 2 shard the optimizer's state and the gradients, but not the parameters.
        return bool(accelerator.deepspeed_plugin.zero_stage == 3)
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def describe_layout(accelerator: Accelerator) -> str:
    """Return the number of ranks and how they shard, e.g. "2 processes of FSDP".

    A checkpoint fits only the layout with which it was saved.
    """
    kind = {DistributedType.FSDP: "FSDP", DistributedType.DEEPSPEED: "DeepSpeed ZeRO"}.get(
        accelerator.distributed_type
    )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        kind = f"{kind}-{accelerator.deepspeed_plugin.zero_stage}"
    num = accelerator.num_processes
    ranks = "1 process" if num == 1 else f"{num} processes"
    return f"{ranks} of {kind}" if kind else ranks


def require_whole_matrices(optimizer: str, accelerator: Accelerator) -> None:
    """Raise ValueError if Muon would train matrices that ranks or DeepSpeed split."""
    if optimizer == "muon" and (uses_deepspeed() or shards_parameters(accelerator)):
        raise ValueError(
            f"muon needs whole matrices, but {describe_layout(accelerator)} shard them: launch "
            "with DDP (accelerate launch --multi_gpu), or give --optim.name adamw and its --optim.lr, "
            "e.g. 1e-4 for an 8B target"
        )
