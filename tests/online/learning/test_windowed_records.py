"""Records of a long text teach a windowed head what it sees in serving, row by row.

T = tokens, L = states of a token, D = size of one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from make_families import make_variant
from make_heads import HIDDEN, spread
from recorded_heads import make_head, make_record, with_states

from benchmarks.soak import poison
from redraft.files.folder import read_config
from redraft.heads.catalog import find_family
from redraft.heads.draft import DraftStep
from redraft.heads.target import Target
from redraft.online.engine.request_log import KEPT_STATES
from redraft.online.engine.worker import _count_kept_states
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.config import BufferConfig
from redraft.online.learning.replay import TrainingSequence, make_batches
from redraft.online.learning.scoring import score
from redraft.online.records.record import encode_record, read_frames

WINDOW, TOKENS = 9, 80
PLAIN = {"dspark": "from the anchor"}
NEEDED = [
    ("eagle3", {"num_layers": 1}, 8 + 3),
    ("eagle3", {"num_layers": 2}, 2 * 8 + 3),
    ("peagle", {"num_layers": 2}, 2 * 8 + 4),
    ("dflash", {}, 8 + 3),
    ("dspark", {}, 8 + 3),
]


def make_text(num_layers: int) -> TrainingSequence:
    """A text with a row and a state at each token but the last."""
    torch.manual_seed(0)
    states_TLD = torch.randn(TOKENS - 1, num_layers, HIDDEN).bfloat16()
    rows = TOKENS - 1
    return TrainingSequence(
        input_ids_T=np.arange(3, 3 + TOKENS, dtype=np.int32),
        rows_R=np.arange(rows),
        topk_ids_RK=np.tile(np.array([[1, 2]], np.int32), (rows, 1)),
        topk_log_probs_RK=np.log(np.full((rows, 2), 0.4, np.float32)),
        hidden_HLD=states_TLD.view(torch.int16).numpy().view(np.uint16),
    )


def without_states(text: TrainingSequence, begin: int) -> TrainingSequence:
    """The record of a segment whose states begin at this token."""
    return replace(text, hidden_begin=begin, hidden_HLD=text.hidden_HLD[begin:])


@torch.no_grad()
def compute(head: Any, text: TrainingSequence, needed: int) -> list[DraftStep]:
    (batch,) = make_batches(
        [text], num_batches=1, sequence_length=128, seed=0, reads="layers", needed_states=needed
    )
    signal = replace(batch.signal, aux_BTLD=batch.signal.aux_BTLD.float())
    steps: list[DraftStep] = head.draft_steps(batch, signal)
    return steps


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
@pytest.mark.parametrize(("family", "options", "needed"), NEEDED)
def test_a_row_without_the_states_that_a_windowed_head_reads_does_not_train(
    family: str, options: dict[str, Any], needed: int, layout: str, tmp_path: Path
) -> None:
    head, _ = make_variant(family, PLAIN.get(family, "plain"), window=WINDOW, **options)
    head.export(tmp_path, layout=layout, target_name="target")
    assert find_family(family).needed_states(read_config(tmp_path)) == needed
    text, begin = make_text(len(head.aux_layer_ids)), 30
    whole = compute(head, text, needed)
    # All rows of a text that is there from its first token on train, as in serving.
    assert int(whole[0].mask_BT.sum()) == TOKENS - 2
    segment = without_states(text, begin)
    for asked, is_exact in ((needed, True), (0, False)):
        found = compute(head, segment, asked)
        differs = False
        for k, (one, wanted) in enumerate(zip(map(spread, found), map(spread, whole), strict=True)):
            (rows_N,) = one.mask_BT[0].nonzero(as_tuple=True)
            assert rows_N.max() + one.shift == TOKENS - 2 - begin
            if asked:  # each label of the segment, from the first with enough states on
                # Every token of a block is predicted from the row of its first label.
                first = needed - 1 - (0 if head.is_block else k)
                assert rows_N.tolist() == list(range(first, TOKENS - 2 - begin - k))
            theirs_ND = wanted.hidden_BTD[0, rows_N + begin]
            differs |= not torch.allclose(one.hidden_BTD[0, rows_N], theirs_ND, atol=1e-4)
        assert differs is not is_exact


def test_a_record_shorter_than_the_windows_trains_all_its_rows() -> None:
    head, _ = make_variant("eagle3", "plain", window=64)
    segment = without_states(make_text(len(head.aux_layer_ids)), 30)
    (step, *_) = compute(head, segment, 63 + 3)
    assert int(step.mask_BT.sum()) == TOKENS - 2 - 30


@pytest.mark.parametrize(
    ("window", "options", "kept"),
    [(None, {}, KEPT_STATES), (9, {}, KEPT_STATES), (100, {}, 99 + 3), (100, {"num_layers": 2}, 198 + 3)],
)  # fmt: skip
def test_a_server_keeps_the_states_that_the_first_row_of_a_segment_needs(
    window: int | None, options: dict[str, Any], kept: int, tmp_path: Path
) -> None:
    head, _ = make_variant("eagle3", "plain", window=window, **options)
    head.export(tmp_path)
    worker = SimpleNamespace(
        redraft=SimpleNamespace(draft=SimpleNamespace(settings=read_config(tmp_path))),
        vllm_config=SimpleNamespace(
            speculative_config=SimpleNamespace(method="eagle3", parallel_drafting=False)
        ),
    )
    assert _count_kept_states(worker) == kept


def test_a_head_of_another_trainer_needs_as_many_states_as_it_would_train_steps() -> None:
    config = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": 2048}
    assert find_family("eagle3").needed_states(config) == 2047 + 7
    assert find_family("eagle1").needed_states(config) == 0


def test_records_with_rows_of_too_few_states_are_counted(random_target: Path) -> None:
    records = [
        msgspec.structs.replace(
            with_states(make_record(target_fingerprint=poison.TARGET), random_target, "eagle3", begin),
            request_id=f"cmpl-{begin}",
        )
        for begin in (0, 2, 5)
    ]  # fmt: skip
    frames = list(read_frames(b"".join(map(encode_record, records))))
    for needed, wanted in ((0, 0), (2, 2), (4, 2)):
        with Buffer(BufferConfig(folder=None), poison.TARGET, (3, 64), needed_states=needed) as one:
            assert one.append(frames, 0.0)["stored"] == 3
            assert one.status().counts.get("short_states", 0) == wanted


def test_the_gate_leaves_those_rows_out_too(random_target: Path, tmp_path: Path) -> None:
    family = find_family("eagle3")
    head = family.load(
        make_head("eagle3", random_target, tmp_path / "head"),
        lambda: Target.from_folder(random_target),
    ).eval()
    record = with_states(make_record(), random_target, "eagle3", 2)
    drafts = [
        score(
            head, [record], num_speculative_tokens=1, method="greedy", sequence_length=64,
            reads="layers", needed_states=needed,
        )[0].num_drafts
        for needed in (0, 4)
    ]  # fmt: skip
    assert drafts[0] > drafts[1] > 0
