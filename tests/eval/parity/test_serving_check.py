"""A draft in the real engine compared with its training steps.

Every divergence is named, with place and size.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from redraft.distill.signal.sources import InProcessTarget
from redraft.engine.counts import AcceptanceCounts
from redraft.engine.parity.run import Block, Dump, EngineRun, relative_difference, run_engine
from redraft.eval.parity.compare import compare
from redraft.heads.doctor.pair import Finding
from redraft.heads.families import eagle3, medusa, mtp
from redraft.heads.families.mtp_folder import as_mimo, stitch
from redraft.heads.families.mtp_layouts import MIMO
from redraft.heads.target import Target

NUM_TOKENS = 3
DRAFT_IDS = torch.arange(1, 256, 2)
PROMPTS = [
    torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (5, 12)
]

Broken = tuple[Any, Any, EngineRun]
"""The draft as trained, its target, and an engine serving a folder that was broken afterwards."""


def make_model() -> LlamaForCausalLM:
    """A random Llama with a head size that vLLM's CPU attention supports."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.2,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config).eval()


def make_random(head: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return head.eval()


def make_run(target: Path, method: str, draft: Path | None) -> EngineRun:
    speculative = {"method": method, "num_speculative_tokens": NUM_TOKENS}
    if draft is not None:
        speculative["model"] = str(draft)
    return EngineRun(
        target=str(target), speculative_config=speculative, prompts=PROMPTS, blocks_a_prompt=2
    )


def make_broken(
    folder: Path, method: str, head_of: Callable[[Target], Any], damage: Callable[[Path], None]
) -> Broken:
    model = make_model()
    model.save_pretrained(folder / "target")
    head = make_random(head_of(Target.from_model(model)))
    head.export(folder / "draft")
    damage(folder / "draft")
    return head, model, make_run(folder / "target", method, folder / "draft")


def make_eagle3(target: Target) -> Any:
    options = {"aux_layer_ids": (1, 2, 4), "norm_before_residual": True, "num_steps": NUM_TOKENS}
    return eagle3.Eagle3(eagle3.Config(**options), target, DRAFT_IDS)


def make_medusa(target: Target) -> Any:
    return medusa.Medusa(medusa.Config(), target)


def make_wrong_side(folder: Path) -> Broken:
    """A MiMo layer trained on the hidden state after the final norm.

    The engine never gives it that state.
    """
    make_model().save_pretrained(folder / "llama")
    as_mimo(folder / "llama", folder / "mimo")
    model = AutoModelForCausalLM.from_pretrained(folder / "mimo").eval()
    head = make_random(mtp.Mtp(mtp.Config(num_steps=NUM_TOKENS), Target.from_model(model)))
    head.layout, head.aux_layer_ids = replace(MIMO, reads_normed=True), ()
    stitch(
        folder / "mimo", head.checkpoint_tensors(), folder / "stitched", {"redraft": head.record()}
    )
    return head, model, make_run(folder / "stitched", "mtp", None)


def edit_config(*removed: str, **changed: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        config = {**json.loads(path.read_text()), **changed}
        path.write_text(
            json.dumps({key: value for key, value in config.items() if key not in removed})
        )

    return damage


def edit_tensors(*removed: str, **changed: torch.Tensor) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = {
            **load_file(path),
            **{name.replace("__", "."): tensor for name, tensor in changed.items()},
        }
        save_file(
            {name: tensor for name, tensor in tensors.items() if name not in removed},
            path,
            {"format": "pt"},
        )

    return damage


def nothing(_: Path) -> None:
    pass


OTHER_EMBEDDING = torch.randn(256, 64, generator=torch.Generator().manual_seed(9))

CASES: dict[str, tuple[str, Callable[[Path], Broken], str]] = {
    "unbroken": ("eagle3", lambda folder: make_broken(folder, "eagle3", make_eagle3, nothing), ""),
    "aux layers off by one": (
        "eagle3",
        lambda folder: make_broken(
            folder, "eagle3", make_eagle3, edit_config(eagle_aux_hidden_state_layer_ids=[2, 3, 5])
        ),
        "draft step 1: the target's feature differs at position 0",
    ),
    "norm_before_residual unset": (
        "eagle3",
        lambda folder: make_broken(
            folder, "eagle3", make_eagle3, edit_config("norm_before_residual")
        ),
        "draft step 1: the head's input differs at position 0",
    ),
    "random embedding": (
        "eagle3",
        lambda folder: make_broken(
            folder, "eagle3", make_eagle3, edit_tensors(embed_tokens__weight=OTHER_EMBEDDING)
        ),
        "draft step 1: the head's input differs at position 0",
    ),
    "d2t missing": (
        "eagle3",
        lambda folder: make_broken(folder, "eagle3", make_eagle3, edit_tensors("d2t", "t2d")),
        "training would propose",
    ),
    "norm_output set": (
        "eagle3",
        lambda folder: make_broken(folder, "eagle3", make_eagle3, edit_config(norm_output=True)),
        "draft step 2: the head's input differs",
    ),
    "dropped medusa bias": (
        "medusa",
        lambda folder: make_broken(folder, "medusa", make_medusa, edit_config("medusa_fc_bias")),
        "the head's input differs",
    ),
    "mtp on the wrong side of the norm": (
        "mtp",
        make_wrong_side,
        "draft step 1: the target's feature differs at position 0",
    ),
}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Broken, Dump]]:
    """Every case, run by one engine after the other in one process."""
    folder = tmp_path_factory.mktemp("serving-check")
    broken = {name: make(folder / str(i)) for i, (name, (_, make, _)) in enumerate(CASES.items())}
    ran = run_engine([run for _, _, run in broken.values()], folder)
    return {name: (case, dump) for (name, case), dump in zip(broken.items(), ran, strict=True)}


def compared(name: str, dumps: dict[str, tuple[Broken, Dump]]) -> list[Finding]:
    (head, model, _), dump = dumps[name]
    return compare(head, CASES[name][0], InProcessTarget(model, head.aux_layer_ids), dump)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("name", [name for name in CASES if name != "unbroken"])
def test_the_engine_shows_where_a_broken_checkpoint_diverges(
    name: str, dumps: dict[str, tuple[Broken, Dump]]
) -> None:
    first = compared(name, dumps)[0]
    assert CASES[name][2] in first.problem
    assert re.search(r"\(prompt 0\b.*\b1 tokens\b", first.problem)
    assert first.cure


@pytest.mark.slow
@pytest.mark.vllm
def test_an_unbroken_checkpoint_diverges_nowhere_and_a_changed_dump_does(
    dumps: dict[str, tuple[Broken, Dump]],
) -> None:
    assert compared("unbroken", dumps) == []
    case, dump = dumps["unbroken"]

    def problem(change: Callable[[Block], None]) -> str:
        (run, block) = dump.run, dump.recorded()[0]
        copies = [
            {k: v.clone() if torch.is_tensor(v) else v for k, v in each.items()}
            for each in block.passes
        ]
        for each in copies:
            each["out"] = [out.clone() for out in each["out"]]
        changed = replace(block, passes=copies, drafted=list(block.drafted))
        change(changed)
        alone = Dump(run=run, outputs=dump.outputs, blocks=[changed])
        (finding,) = compared("unbroken", {"unbroken": (case, alone)})
        return finding.problem

    def shift_positions(block: Block) -> None:
        block.passes[0]["positions"] += 1

    def change_id(block: Block) -> None:
        block.passes[0]["input_ids"][2] ^= 1

    def scale_hidden(block: Block) -> None:
        block.passes[1]["out"][0][0] *= 1.01

    assert re.search(r"step 1, row 0\b.*\bpositions 1\b.*\b0\b", problem(shift_positions))
    assert re.search(r"step 1, row 2\b.*\bids\b", problem(change_id))
    assert re.search(r"step 2\b.*\binput\b.*\bposition 5\b.*\b0\.01\b", problem(scale_hidden))


def test_a_difference_is_relative_to_the_largest_entry_of_its_row() -> None:
    its = torch.tensor([[1.0, -4.0], [0.0, 2.0]])
    torch.testing.assert_close(relative_difference(its + torch.tensor([[0.0, 1.0], [0.0, 0.0]]), its),
                               torch.tensor([0.25, 0.0]))  # fmt: skip
    assert relative_difference(torch.full((1, 2), torch.nan), its[:1]).item() == math.inf


def make_counts(*accepted: int) -> AcceptanceCounts:
    return AcceptanceCounts.from_blocks(accepted, 3)


def test_counts_leave_out_a_block_cut_by_the_end() -> None:
    run = EngineRun(target="", speculative_config={"num_speculative_tokens": 3}, prompts=[[1], [2]])
    at = [(0, 1), (0, 3), (0, 7), (1, 1), (1, 2)]
    blocks = [Block(request=request, num_output=n, drafted=[], passes=[]) for request, n in at]
    dump = Dump(run=run, outputs=[[0] * 9, [0] * 9], blocks=blocks)
    assert dump.counts_by_prompt() == [make_counts(1, 3), make_counts(0)]
    assert dump.counts() == make_counts(1, 3, 0)


def test_counts_leave_out_the_step_that_vllm_starts_before_it_knows_the_end() -> None:
    """As with asynchronous scheduling, vLLM's default on a GPU."""
    run = EngineRun(target="", speculative_config={"num_speculative_tokens": 3}, prompts=[[1], [2]])
    at = [(0, 1), (0, 3), (0, 7), (0, 9), (1, 1), (1, 2), (1, 6)]
    blocks = [Block(request=request, num_output=n, drafted=[], passes=[]) for request, n in at]
    dump = Dump(run=run, outputs=[[0] * 6, [0] * 2], blocks=blocks)
    assert dump.counts_by_prompt() == [make_counts(1, 3), make_counts(0)]
    assert sum(dump.counts_by_context().values(), make_counts()) == make_counts(1, 3, 0)


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_that_refuses_the_draft_says_why(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "target")
    run = make_run(tmp_path / "target", "eagle3", tmp_path / "nowhere")
    with pytest.raises(ChildProcessError, match=r"nowhere.*\.log\b"):
        run_engine([run], tmp_path / "engine")
