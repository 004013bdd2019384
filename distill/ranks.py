"""The processes of one run: none outlives its launcher, and accelerate shards alike over GPUs and over CPU ranks.

accelerate launch, torchrun ──► rank 0, 1, ...     `make_accelerator` of `distill.loop` joins them
        killed? the kernel kills these ──┘
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from eval.process import LIBC, PR_SET_PDEATHSIG

LONGEST_WAIT = timedelta(hours=24)
"""Until the others give up on a rank that lives and says nothing: the first one may be caching the target, or proving a
draft. A rank that dies is noticed at once, by its launcher and by the connections that it leaves."""


LET_GO_S = 0.5
"""Microseconds are enough, but for a thread that waits for a core."""


def die_with_launcher() -> None:
    """Have the kernel kill this rank when its launcher dies: torchrun, killed, leaves its ranks training.

    A launcher that died before this call took with it the store without which no rank gets further than joining.
    """
    if "LOCAL_RANK" in os.environ and sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def join_on_cpu() -> None:
    """Join the ranks of a launch on a machine without a GPU, with what the launcher says of FSDP or DeepSpeed.

    Of its own accelerate reads these two for GPUs alone.
    """
    if uses_deepspeed():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    state = PartialState(cpu=True, timeout=LONGEST_WAIT)
    if state.distributed_type == DistributedType.MULTI_CPU and _asked_for("FSDP"):
        state.distributed_type = DistributedType.MULTI_GPU  # what it shards; device and backend stay the CPU's


def leave(accelerator: Accelerator) -> None:
    """End this rank's part of a launch in which all went well.

    gloo's threads may still hold tensors of the last collectives, and need the interpreter to let go of them: one that
    ends meanwhile aborts, and the launchers of other machines wait minutes for this one.
    """
    if accelerator.device.type == "cpu" and accelerator.num_processes > 1:
        time.sleep(LET_GO_S)
    accelerator.end_training()


def uses_deepspeed() -> bool:
    """The launcher asked for it."""
    return _asked_for("DEEPSPEED")


def _asked_for(plugin: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{plugin}", "false").lower() == "true"


def keep_models_whole() -> None:
    """Undo that `transformers` shards every model it loads under ZeRO-3: the target is not trained, and read whole."""
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def fit_deepspeed(accelerator: Accelerator, max_grad_norm: float) -> None:
    """Give DeepSpeed the recipe's settings: it clips and accumulates by itself, and has seen no data loader."""
    config: dict[str, Any] = accelerator.deepspeed_plugin.deepspeed_config
    config["gradient_clipping"] = max_grad_norm
    config["gradient_accumulation_steps"] = accelerator.gradient_accumulation_steps
    config["train_micro_batch_size_per_gpu"] = 1  # of no effect: the loss is divided by labels, not by rows
    # torch's fused AdamW, on the CPU too: the same arithmetic in every way of training, and no compiler needed
    config["zero_force_ds_cpu_optimizer"] = False
    from deepspeed.utils import groups  # an extra

    if groups._WORLD_GROUP is None:  # its own would wait ten minutes for a rank, and no longer
        groups._WORLD_GROUP = torch.distributed.new_group(timeout=LONGEST_WAIT)


def fit_fsdp(accelerator: Accelerator, module: nn.Module) -> None:
    """Give FSDP2 what it gathers one by one of this draft; it would keep to what it found in the first one."""
    plugin = accelerator.state.fsdp_plugin
    plugin.transformer_cls_names_to_wrap = module._no_split_modules
    if plugin.mixed_precision_policy is not None:
        # accelerate's own rounds to bfloat16 whatever goes in and comes out too: the target's log-probabilities, sums
        # over thousands of rows, gradients on their way. Inside autocast does what it does under DDP.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=plugin.mixed_precision_policy.param_dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
    if accelerator.device.type == "cpu" and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinned for a device that is not there


def shards_parameters(accelerator: Accelerator) -> bool:
    """No rank holds the whole draft but within a forward pass."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return bool(accelerator.deepspeed_plugin.zero_stage == 3)
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def layout(accelerator: Accelerator) -> str:
    """How the ranks share the state of training, in words: a checkpoint fits the same layout alone."""
    kind = {DistributedType.FSDP: "FSDP", DistributedType.DEEPSPEED: "DeepSpeed ZeRO"}.get(accelerator.distributed_type)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        kind = f"{kind}-{accelerator.deepspeed_plugin.zero_stage}"
    num = accelerator.num_processes
    return f"{num} process{'es' * (num > 1)}" + (f" of {kind}" if kind else "")
