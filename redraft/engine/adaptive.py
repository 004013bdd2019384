"""vLLM's adaptive verification: whether a server supports it, and vLLM's errors in one line.

With adaptive verification, the number of draft tokens that a step verifies depends on the draft's
confidences and the measured costs of rows. The GPU decides which tokens are verified. vLLM reports
unmet conditions one at a time, some of them only after minutes of loading. This module imports
neither torch nor vLLM.
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
"""Key in vLLM's --speculative-config."""

GRAPHS = "needs full CUDA graphs: remove --enforce-eager and other CUDA graph modes"
LORA = "does not work with LoRA: remove --enable-lora"
STAGES = "does not work with pipeline parallelism: use --tensor-parallel-size"
HYBRID = (
    "needs a target that has only attention layers, without Mamba layers, short convolutions or "
    "linear attention"
)
BACKEND = (
    "needs an attention backend that supports any number of rows per request: add "
    "--attention-backend TRITON_ATTN after the --"
)
V1 = "needs vLLM's V2 model runner: unset VLLM_USE_V2_MODEL_RUNNER, and use a draft that V2 serves"
ARGMAX = "needs the draft's logits, which are not computed with use_local_argmax_reduction"
UNSURE = (
    "needs a draft with a confidence for each token: a draft model, a head, or counted answers without "
    "a head and with --async-scheduling after the --"
)

FLAGS = {
    "enable_lora": LORA,
    "enforce_eager": GRAPHS,
    "enable_return_routed_experts": "does not return routed experts: remove "
    "--enable-return-routed-experts",
    "enable_batch_sharded_sampling": "does not work with batch-sharded sampling: remove "
    "--enable-batch-sharded-sampling",
    "return_sampling_mask": "does not return sampling masks: remove --return-sampling-mask",
}
"""Switches of `vllm serve`, with the condition that each violates."""

READ = (
    *FLAGS,
    *("pipeline_parallel_size", "compilation_config", "optimization_level", "attention_backend"),
)
"""All flags that this module reads."""

KEEPS_STATES = ("mamba_", "ssm_", "conv_L", "linear_")
"""Prefixes of the config.json keys that mark targets whose layers keep a state in addition to keys
and values.
"""

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
"""Words in vLLM's errors about adaptive verification, with the condition to report for each."""


def find_obstacle(
    flags: Mapping[str, str],
    target: str,
    speculative_config: Mapping[str, Any],
    *,
    environment: Mapping[str, str] = os.environ,
    on_cpu: bool = ENGINE_IS_CPU,
) -> str:
    """Return the condition for adaptive verification that a server violates; "" if none is known.

    `flags` are the flags of `vllm serve`, by name. The attention backend is not checked, because
    vLLM chooses it based on the GPU.
    """
    family = find_speculative(speculative_config)
    if on_cpu:
        return f"{GRAPHS.partition(':')[0]}, which do not exist on a CPU: use a GPU"
    on_device = speculative_config.get("method") == ON_DEVICE and needs_plugin(speculative_config)
    if not on_device and (family is None or family.is_lookup or needs_plugin(speculative_config)):
        return UNSURE  # for these drafts, vLLM ignores the setting without an error
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

    FlashAttention 3 can, on GPUs of compute capability 9, and so can the Triton backend.
    `capability` is the GPU's compute capability, such as "9.0", or None if it is unknown.
    """
    backend = flags.get("attention_backend", "").upper()
    if any("kv_lora_rank" in section for section in _read_sections(target)):
        return False  # multi-head latent attention uses different backends
    is_new = (capability or "").startswith("9.")
    return backend == "TRITON_ATTN" or (is_new and backend in ("", "FLASH_ATTN"))


def explain_refusal(error: str) -> str:
    """Shorten vLLM's error about adaptive verification to one line.

    Return other errors unchanged.
    """
    if "daptive" not in error or "verif" not in error:
        return error
    found = next((condition for words, condition in REFUSALS if words in error), "")
    return f"adaptive verification {found}, or use --pace off" if found else error


def read_capability() -> str | None:
    """Return the GPUs' lowest compute capability, such as "9.0". None if it cannot be queried."""
    if (
        ENGINE_IS_CPU
        or os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        or not shutil.which("nvidia-smi")
    ):
        return None
    ask = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    found = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.split()
    # A server's GPUs should be identical. If they are not, the oldest one decides.
    return min(found, default=None)


def _is_hybrid(target: str) -> bool:
    return any(
        key.startswith(KEEPS_STATES) for section in _read_sections(target) for key in section
    )


def _read_sections(target: str) -> list[Mapping[str, Any]]:
    """Return the sections of the target's config.json; empty if it is not downloaded yet."""
    try:
        return list(text_sections(read_config(open_folder(target))))
    except (OSError, ValueError):
        return []
