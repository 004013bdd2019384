"""Measure a head's loss if its prompt's keys come from another head, as after a swap.

$ python -m benchmarks.studies.stale_keys    # the small target and head of the tests, a minute

vLLM keeps a head's keys in the cached blocks of a prompt. After a swap, such a block contains the
keys of the previous head. Here, the acceptance of a head is forecast on held-out text, while its
keys and values for the prompt are replaced with another head's (`--other`, by default the new head
that `redraft up` begins with), or with zeros, as for text that no head has read. tau is greedy,
with three draft tokens and the text's own tokens before them. Differences have 95% intervals over
texts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.results import write_results
from redraft.distill.data.conversations import load_conversations, split_held_out
from redraft.distill.data.packing import PackedDataset
from redraft.distill.data.samples import build_samples
from redraft.distill.signal.sources import InProcessTarget
from redraft.eval.forecast.rows import compare_rows, take_draft_steps
from redraft.eval.intervals import estimate_gain
from redraft.files.checkpoint import load_causal_lm
from redraft.files.target_folder import TargetFolder
from redraft.heads.catalog import find_family
from redraft.heads.target import Target
from redraft.recipes.cli.run import run_recipe
from redraft.recipes.serve.up import write_new_head

NUM_TOKENS = 3
Keys = Mapping[str, Tensor]
"""Outputs of the key and value projections."""


@dataclass(frozen=True, kw_only=True)
class Config:
    target: Path = Path("tests/assets/tiny-target")
    """Folder of the target."""
    head: Path = Path("tests/assets/tiny-eagle3")
    """Folder of an EAGLE-3 head."""
    other: Path | None = None
    """Folder of the previous head; by default, a new head with the target's last layer."""
    texts: int = 48
    """Number of held-out texts from the standard library."""
    output: Path = Path("outputs/bench/stale-keys.json")
    """File that receives the results."""


@torch.no_grad()
def main(cfg: Config) -> None:
    opened, target = TargetFolder.open(cfg.target), Target.from_folder(cfg.target)
    family = find_family("eagle3")
    with tempfile.TemporaryDirectory() as folder:
        if (other := cfg.other) is None:
            write_new_head(cfg.target, other := Path(folder) / "new", NUM_TOKENS)
        head, before = (
            family.load(each, lambda: target).float().eval() for each in (cfg.head, other)
        )
    model = load_causal_lm(cfg.target).float().eval()
    _, held_out = split_held_out(load_conversations("stdlib"), 0.05)
    samples, _ = build_samples(held_out, opened.tokenizer, max_length=500, progress=False)
    found: dict[str, list[tuple[float, float]]] = {"own": [], "other": [], "zero": []}
    lengths = []
    for sample in samples[: cfg.texts]:
        data = PackedDataset([sample], sequence_length=len(sample.input_ids))
        batch, size = data.batch(0, batch_size=1), int(np.flatnonzero(sample.loss_mask)[0])
        lengths.append((size, len(sample.input_ids)))
        theirs = run(before, model, batch, size)[1]
        accepted, own = run(head, model, batch, size)
        found["own"].append(accepted)
        zeros = {name: torch.zeros_like(values) for name, values in own.items()}
        for name, keys in (("other", theirs), ("zero", zeros)):
            found[name].append(run(head, model, batch, size, keys)[0])
    over = {name: np.array(rows) for name, rows in found.items()}
    report: dict[str, Any] = {
        "prompt_tokens": np.mean(lengths, 0)[0],
        "tokens": np.mean(lengths, 0)[1],
    }
    for name, rows in over.items():
        report[f"tau_{name}"] = 1 + rows[:, 0].sum() / rows[:, 1].sum()
        paired = np.stack([over["own"], rows])
        gain = estimate_gain(paired[..., 0].T, paired[..., 1].T)
        low, high = gain.interval()
        report[f"loss_{name}"] = [gain.value, low, high]
        print(
            f"{name}: tau {report[f'tau_{name}']:.3f}, loss {gain.value:.3f} [{low:.3f}, {high:.3f}]"
        )
    write_results(cfg.output, report)


def run(
    head: Any, model: Any, batch: Any, size: int, keys: Keys | None = None
) -> tuple[tuple[float, float], Keys]:
    """Return the numbers of accepted draft tokens and blocks in the answer, and the head's keys.

    If given, `keys` replace the keys and values of the first `size` tokens.
    """
    seen: dict[str, Tensor] = {}
    signal = InProcessTarget(model, head.aux_layer_ids)(batch)
    with replaced(head, size, keys, seen):
        steps = take_draft_steps(head, batch, signal, NUM_TOKENS)
    rows = [compare_rows(step, signal.distribution) for step in steps]
    agree_KT = torch.stack([row.agree_BT[0, size - 1 :] for row in rows]).float().cumprod(0)
    mask_T = rows[-1].mask_BT[0, size - 1 :]
    return (float(agree_KT.sum(0)[mask_T].sum()), float(mask_T.sum())), seen


@contextmanager
def replaced(head: Any, size: int, keys: Keys | None, seen: dict[str, Tensor]) -> Iterator[None]:
    """Replace the keys and values of the first `size` tokens in the block, and keep the head's own.

    Only the keys of the first draft step belong to the text.
    """

    def watch(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, out: Tensor) -> Tensor | None:
            if name in seen:
                return None
            seen[name] = out
            return None if keys is None else torch.cat([keys[name][:, :size], out[:, size:]], dim=1)

        return getattr(head.midlayer.self_attn, name).register_forward_hook(hook)

    handles = [watch(name) for name in ("k_proj", "v_proj")]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
