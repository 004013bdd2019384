"""vLLM's adaptive verification: whether a server can have it, and vLLM's refusals in one line.

A step then verifies as many draft tokens as its confidences and the measured costs of rows say, and
the GPU decides whose tokens these are. vLLM names its conditions one by one, some of them only after
minutes of loading. Imports neither torch nor vLLM.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from redraft.engine.lookups import ON_DEVICE, needs_plugin
from redraft.engine.machine import ENGINE_IS_CPU
from redraft.files.folder import open_folder, read_config, text_sections
from redraft.heads.catalog import find_speculative

KEY = "enable_adaptive_verification"
"""Key of vLLM's --speculative-config."""

GRAPHS = "needs full CUDA graphs: leave out --enforce-eager and other CUDA graph modes"
LORA = "does not work with LoRA: leave out --enable-lora"
STAGES = "does not work with pipeline parallelism: use --tensor-parallel-size"
HYBRID = (
    "needs a target of attention layers alone, without Mamba layers, short convolutions or linear "
    "attention"
)
BACKEND = (
    "needs an attention backend that takes rows of any number per request: add "
    "--attention-backend TRITON_ATTN after the --"
)
V1 = "needs vLLM's V2 model runner: unset VLLM_USE_V2_MODEL_RUNNER, and take a draft that V2 serves"
ARGMAX = "reads the draft's logits, which use_local_argmax_reduction never computes"
UNSURE = (
    "needs a draft with a confidence for each token: a draft model, a head, or counted answers alone "
    "with --async-scheduling after the --"
)

FLAGS = {
    "enable_lora": LORA,
    "enforce_eager": GRAPHS,
    "enable_return_routed_experts": "does not return routed experts: leave out "
    "--enable-return-routed-experts",
    "enable_batch_sharded_sampling": "does not work with batch-sharded sampling: leave out "
    "--enable-batch-sharded-sampling",
    "return_sampling_mask": "does not return sampling masks: leave out --return-sampling-mask",
}
"""Switches of `vllm serve`, each with the condition that it breaks."""

READ = (
    *FLAGS,
    *("pipeline_parallel_size", "compilation_config", "optimization_level", "attention_backend"),
)
"""All flags that are looked at."""

KEEPS_STATES = ("mamba_", "ssm_", "conv_L", "linear_")
"""Beginnings of keys in the config.json of a target whose layers keep a state beside their keys."""

REFUSALS = (
    ("LoRA", LORA),
    ("full CUDA graphs", GRAPHS),
    ("pipeline parallelism", STAGES),
    ("attention backend", BACKEND),
    ("decode cudagraphs", BACKEND),
    ("use_local_argmax_reduction", ARGMAX),
    ("adaptive draft verification", V1),
    ("routed-experts", FLAGS["enable_return_routed_experts"]),
    ("atch-sharded sampling", FLAGS["enable_batch_sharded_sampling"]),
    ("sampling distribution replay", FLAGS["return_sampling_mask"]),
)
"""Words of vLLM's errors about adaptive verification, and the condition that each is about."""


def find_obstacle(
    flags: Mapping[str, str],
    target: str,
    speculative_config: Mapping[str, Any],
    *,
    environment: Mapping[str, str] = os.environ,
    on_cpu: bool = ENGINE_IS_CPU,
) -> str:
    """The condition for adaptive verification that a server violates; "" if none is known.

    `flags` are those of `vllm serve`, by name. The attention backend is left to vLLM, which chooses
    it based on the GPU.
    """
    family = find_speculative(speculative_config)
    if on_cpu:
        return f"{GRAPHS.partition(':')[0]}, and a CPU has none"
    on_device = speculative_config.get("method") == ON_DEVICE and needs_plugin(speculative_config)
    if not on_device and (family is None or family.is_lookup or needs_plugin(speculative_config)):
        return UNSURE  # vLLM ignores the request for these without a word
    is_v1 = family is not None and "v2" not in family.decoders
    if is_v1 or environment.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        return V1
    for flag, condition in FLAGS.items():
        if flags.get(flag, "false").lower() not in ("0", "false", "none", "off"):
            return condition
    if flags.get("pipeline_parallel_size", "1") != "1":
        return STAGES
    graphs = flags.get("compilation_config", "").upper()
    has_mode = re.search(r"NONE|PIECEWISE|FULL", graphs)
    if has_mode and "FULL" not in graphs:
        return GRAPHS
    is_low = flags.get("optimization_level") in ("0", "1") or flags.keys() & {"O0", "O1"}
    if is_low and not has_mode:
        return GRAPHS
    return HYBRID if _is_hybrid(target) else ""


def is_expected(flags: Mapping[str, str], target: str, capability: str | None) -> bool:
    """Whether vLLM's attention backend can replay graphs with any number of rows per request.

    FlashAttention 3 can, on GPUs of compute capability 9, and so can Triton's backend.
    `capability` is the GPU's, such as "9.0"; None if it is unknown.
    """
    backend = flags.get("attention_backend", "").upper()
    if any("kv_lora_rank" in section for section in _read_sections(target)):
        return False  # multi-head latent attention has backends of its own
    is_new = (capability or "").startswith("9.")
    return backend == "TRITON_ATTN" or (is_new and backend in ("", "FLASH_ATTN"))


def explain_refusal(error: str) -> str:
    """Replace vLLM's error about adaptive verification by one line; return other errors as is."""
    if "daptive" not in error or "verif" not in error:
        return error
    found = next((condition for words, condition in REFUSALS if words in error), "")
    return f"adaptive verification {found}, or give --pace off" if found else error


def read_capability() -> str | None:
    """The lowest compute capability of the GPUs, such as "9.0"; None if none can be queried."""
    if (
        ENGINE_IS_CPU
        or os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        or not shutil.which("nvidia-smi")
    ):
        return None
    ask = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    found = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.split()
    return min(found, default=None)  # all GPUs of a server should be alike: the oldest decides


def _is_hybrid(target: str) -> bool:
    return any(
        key.startswith(KEEPS_STATES) for section in _read_sections(target) for key in section
    )


def _read_sections(target: str) -> list[Mapping[str, Any]]:
    """The sections of the target's config.json; empty if the target is not downloaded yet."""
    try:
        return list(text_sections(read_config(open_folder(target))))
    except (OSError, ValueError):
        return []
