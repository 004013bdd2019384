"""A small target with fitted drafts of the four families that llama.cpp serves, and their forecast.

K = draft tokens, N = rows, W = draft vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from make_gguf import write_gguf
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.llama_server import complete
from redraft.distill.signal.sources import InProcessTarget
from redraft.engine.counters import parse_counts
from redraft.engine.counts import AcceptanceCounts
from redraft.engine.prompts import Prompt
from redraft.eval.forecast.greedy import Continuation, forecast, greedy_continuations
from redraft.files.gguf_writer import GgufTarget
from redraft.files.target_folder import TargetFolder
from redraft.heads.catalog import find_family
from redraft.heads.doctor.pair import Pair
from redraft.heads.draft import Batch
from redraft.heads.families.standalone import StandaloneDraft, prune_layers
from redraft.heads.target import Target

VOCAB, LAYERS, MAX_TOKENS, K = 512, 5, 32, 3

OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"aux_layer_ids": (1, 2, 4), "num_steps": K},
    "dflash": {"aux_layer_ids": (1, 2, 4), "num_layers": 2, "block_size": K + 1},
    "dspark": {"aux_layer_ids": (1, 2, 4), "num_layers": 2, "block_size": K, "markov_rank": 16},
}
REDUCED = torch.arange(0, VOCAB, 2)
"""Target ids of a reduced draft vocabulary."""


@dataclass(kw_only=True)
class World:
    """A random target, the GGUF file of it, and its greedy answers to 30 prompts."""

    folder: TargetFolder
    gguf: GgufTarget
    model: Any
    answers: list[Continuation]
    drafts: dict[str, Path] = field(default_factory=dict)

    @property
    def borrowed(self) -> Target:
        return Target.from_model(self.model)

    def pair(self, draft: Path) -> Pair:
        return Pair.read(self.folder, draft)

    def forecast(self, draft: Path) -> AcceptanceCounts:
        """The counts of llama.cpp, by our own passes."""
        family = find_family(self.pair(draft).family.name)
        loaded: Any = family.load(draft, lambda: self.borrowed, torch.float32)
        signal = InProcessTarget(self.model, loaded.aux_layer_ids)
        told = forecast(loaded.eval(), signal, self.answers, K, max_tokens=MAX_TOKENS)
        return sum((p.counts for p in told.per_prompt), AcceptanceCounts.zero(K))


def make_world(tokenizer: PreTrainedTokenizerFast, path: Path) -> World:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    folder = path / "target"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    prompts = [Prompt(token_ids=torch.randint(16, VOCAB, (6 + i % 5,)).tolist()) for i in range(30)]
    answers = greedy_continuations(
        model, prompts, max_tokens=MAX_TOKENS, num_speculative_tokens=K, end_ids=(2, 3)
    )
    gguf = write_gguf(path / "target.gguf", folder, tokenizer)
    return World(
        folder=TargetFolder.open(folder), gguf=GgufTarget(gguf), model=model, answers=answers
    )


def make_draft(
    world: World,
    name: str,
    folder: Path,
    *,
    reduced: bool = False,
    num_steps: int = 16,
    **options: Any,
) -> Path:
    """A draft fitted to a third of the answers, so that it hits some tokens and misses others."""
    torch.manual_seed(1)
    draft: Any
    if name == "standalone":
        draft = prune_layers(world.model, [0, 4])
    else:
        family = find_family(name)
        config = family.options_class()(**{**OPTIONS.get(name, {}), **options})
        vocabulary = (REDUCED,) if reduced else ()
        draft = family.draft_class()(config, world.borrowed, *vocabulary)
    fit(draft, world, num_steps)
    if isinstance(draft, StandaloneDraft):
        draft.export(folder, torch.float32, tokenizer=world.folder.tokenizer)
    else:
        draft.export(folder, torch.float32)
    return folder


def fit(draft: Any, world: World, num_steps: int) -> None:
    if not num_steps:
        return
    texts = [[*a.prompt.token_ids, *a.output_ids, *a.beyond_ids] for a in world.answers[::3]]
    batch = Batch.padded(texts, num_prompt_tokens=1)
    signal = InProcessTarget(world.model, draft.aux_layer_ids)(batch)
    optimizer = torch.optim.Adam(draft.train().parameters(), lr=1e-2)
    for _ in range(num_steps):
        losses = []
        for step in draft.draft_steps(batch, signal, K):
            rows_N = step.mask_BT.flatten().nonzero().squeeze(1)
            labels_N = batch.input_ids_BT.roll(-1 - step.shift, 1).flatten()[rows_N]
            logits_NW = step.logits(rows_N)
            if step.draft_ids_W is not None:
                labels_N = torch.searchsorted(step.draft_ids_W, labels_N)
                is_in_N = (
                    step.draft_ids_W[labels_N.clamp(max=len(step.draft_ids_W) - 1)]
                    == (batch.input_ids_BT.roll(-1 - step.shift, 1).flatten()[rows_N])
                )
                logits_NW, labels_N = logits_NW[is_in_N], labels_N[is_in_N]
            losses.append(torch.nn.functional.cross_entropy(logits_NW, labels_N))
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
    draft.eval()


def serve(client: httpx.Client, world: World) -> tuple[list[list[int]], AcceptanceCounts]:
    """The answers of a fresh llama.cpp, and what it counted."""
    asked = [answer.prompt.token_ids for answer in world.answers]
    texts = [complete(client, prompt, MAX_TOKENS)["tokens"] for prompt in asked]
    return texts, parse_counts(client.get("/metrics").text)


def require_llama_cpp() -> None:
    pytest.importorskip("xllamacpp", reason="the package xllamacpp is not installed")
    pytest.importorskip("gguf", reason="the package gguf is not installed")
