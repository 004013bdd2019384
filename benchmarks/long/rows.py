"""Take training steps on one long row of a tiny target, in a separate process.

    python -m benchmarks.long.rows eagle3 131072

The module prints, as JSON, the peak memory above weights and optimizer, and the tokens per second.
The target runs in this process, activations are recomputed in the backward pass, and all tokens but
the first are labels.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MistralConfig, MistralForCausalLM

from redraft.distill.loss.choice import Divergence
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.loop import make_accelerator, peak_rss_mib
from redraft.distill.train.optim import Optim
from redraft.distill.train.step import Distillation
from redraft.heads.draft import Batch
from redraft.heads.families import dflash, eagle3
from redraft.heads.target import Target

VOCABULARY, HIDDEN, AUX = 4096, 32, (1, 2, 4)
DRAFT_IDS = torch.arange(0, VOCABULARY, 16)
WINDOW = 512
WARM_UP = 2048
"""Number of tokens in the first row. It is not measured, because it creates the optimizer's state.
"""

CASES = ("eagle3", "eagle3-window", "dflash", "dflash-window")
"""With `-window`, layers of target and draft see WINDOW positions; otherwise they see the whole
row.
"""


def make_target(window: int | None) -> MistralForCausalLM:
    """Make a random target whose rows may have 131,072 tokens."""
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=window,
        max_position_embeddings=1 << 17,
    )
    return MistralForCausalLM(config).eval()


def make_draft(case: str, target: Target, window: int | None) -> nn.Module:
    if case.startswith("eagle3"):
        return eagle3.Eagle3(
            eagle3.Config(aux_layer_ids=AUX, num_steps=3, window=window), target, DRAFT_IDS
        )
    blocks = dflash.Config(
        aux_layer_ids=AUX,
        num_layers=2,
        block_size=8,
        mask_token_id=VOCABULARY - 1,
        window=window,
    )
    return dflash.DFlash(blocks, target, DRAFT_IDS)


def make_row(length: int) -> Batch:
    """Make a row with one document of random tokens."""
    ids_T = torch.randint(0, VOCABULARY - 1, (length,))
    return Batch.packed([[(ids_T, torch.ones(length, dtype=torch.bool))]], width=length)


def measure(case: str, length: int, steps: int) -> dict[str, Any]:
    """Measure training for `steps` steps on one row of this length."""
    torch.manual_seed(0)
    window = WINDOW if case.endswith("-window") else None
    model = make_target(window)
    draft: Any = make_draft(case, Target.from_model(model), window)
    draft.recomputes = True
    distillation = Distillation(
        draft,
        InProcessTarget(model, draft.aux_layer_ids),
        Divergence(),
        Optim(),
        steps + 1,
        make_accelerator(1, "no", None),
    )
    distillation.step([make_row(WARM_UP)])
    row, held = make_row(length), _resident_bytes()
    start_s = time.perf_counter()
    for _ in range(steps):
        distillation.step([row])
    seconds = time.perf_counter() - start_s
    # The first row was shorter, so the peak belongs to these steps.
    peak = peak_rss_mib() * 2**20 - held
    return {
        "case": case,
        "tokens": length,
        "steps": steps,
        "peak_mib": peak / 2**20,
        "bytes_per_token": peak / length,
        "tokens_per_s": steps * length / seconds,
    }


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("tokens", type=int)
    parser.add_argument("--steps", type=int, default=1)
    given = parser.parse_args()
    print(json.dumps(measure(given.case, given.tokens, given.steps)))
