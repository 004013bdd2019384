"""Measure the time of a training step with one document per row, as a ratio to packed rows.

    $ python -m benchmarks.studies.rows                  # eight families, 10 minutes on two cores

An EAGLE-3 head learns from the demo's shipped answers, on random targets with eight layers of the
same kinds as in the released models. For each batch, the same target reads packed rows and one
document per row, in alternating order. In packed rows, the states of all documents but the first
are wrong; only the time is compared. `tokens` is the ratio of token counts that training prints at
the start. Ratios are medians over batches, with 95% intervals.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.results import write_results
from redraft.distill.data.conversations import load_conversations
from redraft.distill.data.packing import PackedDataset
from redraft.distill.data.samples import build_samples
from redraft.distill.loss.choice import Divergence
from redraft.distill.signal.apart import padding_factor
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.objective import distill_loss
from redraft.eval.intervals import median_interval
from redraft.files.checkpoint import load_tokenizer, new_model
from redraft.heads.draft import Batch
from redraft.heads.families import eagle3
from redraft.heads.target import Target
from redraft.recipes.cli.run import run_recipe

ANSWERS = Path(__file__).parents[2] / "recipes/demo/assets/smollm2-answers.jsonl.zst"
TOKENIZER = Path(__file__).parents[2] / "tests/assets/tiny-target"

SIZES = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_ssm": 512,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
}
HYBRID = {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_5_text": DELTA,
    "qwen3_next": {**DELTA, **EXPERTS},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
    "granitemoehybrid": {**MAMBA, **EXPERTS, **HYBRID, "shared_intermediate_size": 256},
    "falcon_h1": MAMBA,
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 1,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"] * 2,
    },
    "gpt_oss": {**EXPERTS, "sliding_window": 128},
}  # fmt: skip
"""Settings in addition to SIZES, by model type."""


@dataclass(frozen=True, kw_only=True)
class Config:
    families: tuple[str, ...] = tuple(FAMILIES)
    """Model types."""
    batch_size: int = 4
    sequence_length: int = 512
    steps: int = 12
    """Number of batches for each family, after one batch that is not counted."""
    output: Path = Path("outputs/bench/rows.json")


def main(cfg: Config) -> None:
    data = load_data(cfg.sequence_length)
    batches = [data.batch(index, batch_size=cfg.batch_size) for index in range(cfg.steps + 1)]
    factor = statistics.fmean(padding_factor(batch.document_BT) for batch in batches[1:])
    print(
        f"{cfg.steps} batches of {cfg.batch_size} x {cfg.sequence_length} tokens: {factor:.2f} "
        "times the tokens"
    )
    rows = []
    for family in cfg.families:
        rows.append({"family": family, "tokens": factor, **measure(family, batches)})
        print(
            f"{family:18} "
            + ", ".join(
                f"{part} {rows[-1][part]['median']:.2f} [{rows[-1][part]['low']:.2f}, "
                f"{rows[-1][part]['high']:.2f}]"
                for part in ("step", "target")
            ),
            flush=True,
        )
    write_results(cfg.output, {"rows": rows, "settings": vars(cfg)})


def load_data(sequence_length: int) -> PackedDataset:
    conversations = load_conversations(str(ANSWERS))
    samples, _ = build_samples(
        conversations, load_tokenizer(TOKENIZER), max_length=sequence_length, progress=False
    )
    return PackedDataset(samples, sequence_length=sequence_length)


def measure(family: str, batches: list[Batch]) -> dict[str, Any]:
    """Return the ratios for the step and the target's pass, with the seconds of both row forms."""
    torch.manual_seed(0)
    settings = {**SIZES, **FAMILIES[family], "vocab_size": len(load_tokenizer(TOKENIZER))}
    if family == "nemotron_h":  # it counts `layers_block_type`
        settings.pop("num_hidden_layers")
    model = new_model(AutoConfig.for_model(family, **settings), torch.float32).requires_grad_(False)
    source = InProcessTarget(model, (2, 4, 5))
    head = eagle3.Eagle3(
        eagle3.Config(aux_layer_ids=(2, 4, 5), num_steps=3), Target.from_model(model)
    )
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-4)
    seconds: dict[str, list[tuple[float, float]]] = {"step": [], "target": []}
    for index, batch in enumerate(batches):
        taken: dict[bool, dict[str, float]] = {}
        for packs in (True, False) if index % 2 else (False, True):
            source.packs = packs
            start = time.perf_counter()
            signal = source(batch)
            of_target = time.perf_counter() - start
            distill_loss(
                head.draft_steps(batch, signal), batch, signal, Divergence(), scale=1e-3
            ).loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            taken[packs] = {"step": time.perf_counter() - start, "target": of_target}
        if index:  # the first one warms up
            for part, pairs in seconds.items():
                pairs.append((taken[True][part], taken[False][part]))
    return {part: describe(pairs) for part, pairs in seconds.items()}


def describe(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    median, (low, high) = median_interval([apart / packed for packed, apart in pairs])
    return {"median": median, "low": low, "high": high, "seconds": pairs}


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
