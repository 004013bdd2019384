"""`redraft data score`: records of ids become what capture would have recorded in the server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from learner_world import make_records
from make_heads import make_random
from msgspec import structs
from transformers import LlamaForCausalLM

from redraft.files.folder import fingerprint
from redraft.heads.families import eagle1, eagle3
from redraft.heads.target import Target
from redraft.online.learning import rereading
from redraft.online.learning.replay import training_sequence
from redraft.online.records.record import PADDING, Record, decode_record, encode_frame, read_frames
from redraft.online.records.spool import SpoolWriter, spool_files
from redraft.recipes.cli.run import dispatch

K = 8


def ids_alone(record: Record) -> Record:
    """The record of an engine that reports no probabilities."""
    none = dict.fromkeys(
        ("row_positions", "row_branches", "row_drafts", "row_draft_probs", "row_accepted"), b""
    )
    rest = dict.fromkeys(("row_topk_ids", "row_topk_log_probs", "row_log_sum_exp"), b"")
    return structs.replace(record, **none, **rest, top_k=1, row_proposers=b"", hidden=b"")


def score(target: Path, records: list[Record], tmp_path: Path, *flags: str) -> list[Record]:
    SpoolWriter(tmp_path / "ids", "tap", 1 << 30).write([encode_frame(r) for r in records])
    args = ["data", "score", str(tmp_path / "ids"), "--target", str(target), "--logprobs", str(K)]
    args += ["--spool", str(tmp_path / "spool"), "--target-dtype", "float32"]
    assert dispatch([*args, *flags]) == 0
    assert spool_files(tmp_path / "ids") == []
    files = spool_files(tmp_path / "spool")
    return [record for path in files for _, record in read_frames(path.read_bytes())]


@pytest.fixture
def records(random_target: Path) -> list[Record]:
    return [ids_alone(record) for record in make_records(random_target, 3)]


def test_a_record_of_ids_gets_the_targets_distributions(
    random_target: Path, records: list[Record], tmp_path: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(random_target).eval()
    found = score(random_target, records, tmp_path)
    assert [r.record_id for r in found] == [r.record_id for r in records]
    for record, scored in zip(records, found, strict=True):
        ids, first = [*record.context_ids, *record.output_ids], len(record.context_ids)
        with torch.no_grad():
            logits_TV = model(torch.tensor([list(map(int, ids))])).logits[0]
        expected = logits_TV[first - 1 : -1].log_softmax(-1).topk(K)
        np.testing.assert_array_equal(scored.topk_ids, expected.indices)
        np.testing.assert_allclose(scored.topk_log_probs, expected.values, atol=1e-5)
        assert scored.positions.tolist() == list(range(first, len(ids)))
        assert scored.num_hidden == 0
        assert decode_record(encode_frame(scored)) == scored, "the learner would refuse it"
        assert len(training_sequence(scored).rows_R) == len(record.output_ids)


def test_a_head_gets_the_states_that_it_reads(
    random_target: Path, records: list[Record], tmp_path: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(random_target).eval()
    borrowed = Target.from_model(model)
    heads = {
        "layers": eagle3.Eagle3(eagle3.Config(aux_layer_ids=(0, 1, 2), num_steps=2), borrowed),
        "last": eagle1.Eagle1(eagle1.Config(), borrowed),
    }
    for name, head in heads.items():
        make_random(head).export(tmp_path / name / "draft")
        flags = ("--draft", str(tmp_path / name / "draft"))
        scored = score(random_target, records[:1], tmp_path / name, *flags)[0]
        ids = [int(i) for i in [*records[0].context_ids, *records[0].output_ids]]
        with torch.no_grad():
            out = model.model(torch.tensor([ids]), output_hidden_states=True)
        streams: list[torch.Tensor] = []
        hook = model.model.norm.register_forward_pre_hook(lambda _, args: streams.append(args[0]))  # noqa: B023
        with torch.no_grad():
            model.model(torch.tensor([ids]))
        hook.remove()
        states = [out.hidden_states[0][0], out.hidden_states[1][0], streams[0][0]]
        wanted = states if name == "layers" else [out.last_hidden_state[0]]
        expected = torch.stack(wanted, dim=1)[:-1].bfloat16()
        found = torch.from_numpy(scored.hidden_words.copy().view(np.int16)).view(torch.bfloat16)
        assert scored.hidden_shape == (len(wanted), model.config.hidden_size)
        torch.testing.assert_close(found.float(), expected.float(), atol=0.02, rtol=0.02)
        assert decode_record(encode_frame(scored)) == scored


def test_only_the_newest_states_of_a_long_text_are_kept(
    random_target: Path,
    records: list[Record],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The learner refuses records above a size, and would lose the text."""
    head = eagle1.Eagle1(eagle1.Config(), Target.from_folder(random_target))
    make_random(head).export(tmp_path / "draft")
    flags = ("--draft", str(tmp_path / "draft"))
    (whole,) = score(random_target, records[:1], tmp_path / "whole", *flags)
    state_bytes = len(whole.hidden) // whole.num_hidden
    bare_bytes = whole.num_bytes - len(whole.hidden)
    limit = rereading.NAMES_BYTES + bare_bytes + 5 * state_bytes
    monkeypatch.setattr(rereading, "MAX_RECORD_BYTES", limit)
    (scored,) = score(random_target, records[:1], tmp_path / "cut", *flags)
    assert (scored.num_hidden, scored.hidden_begin) == (5, whole.num_hidden - 5)
    assert scored.hidden == whole.hidden[-5 * state_bytes :]
    assert decode_record(encode_frame(scored)) == scored


def test_score_keeps_whole_records_and_leaves_those_of_another_target(
    random_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, bare, other = make_records(random_target, 3)
    other = structs.replace(ids_alone(other), target_fingerprint="f" * 64)
    found = score(random_target, [whole, ids_alone(bare), other], tmp_path)
    assert found[0] == whole
    assert [r.record_id for r in found] == [whole.record_id, bare.record_id]
    said = capsys.readouterr().out
    assert "1 scored, 1 complete, 1 of another target" in said


def test_a_later_segment_is_scored_with_the_text_of_an_earlier_file(
    random_target: Path, records: list[Record], tmp_path: Path
) -> None:
    """A server writes a file every second, so the segments of a long answer are in several files."""
    whole, lost = records[:2]
    begins, ends = zip(*(split(record, 10) for record in (whole, lost)), strict=True)
    ids = SpoolWriter(tmp_path / "ids", "server", 1 << 30)
    ids.write([encode_frame(begins[0])])
    ids.write([encode_frame(end) for end in ends])
    begin, end = score(random_target, [], tmp_path)
    (expected,) = score(random_target, [whole], tmp_path / "whole")
    assert (begin.record_id, end.record_id) == (begins[0].record_id, ends[0].record_id)
    assert decode_record(encode_frame(end)) == end, "the learner would refuse it"
    for name in ("positions", "topk_ids", "topk_log_probs"):
        found = np.concatenate([getattr(part, name) for part in (begin, end)])
        np.testing.assert_allclose(found, getattr(expected, name), atol=1e-5)


def split(record: Record, count: int) -> tuple[Record, Record]:
    """The record in two segments, the first with `count` tokens of the answer."""
    at, sent = 4 * count, len(record.context_ids) + count
    end = {"context": b"", "context_begin": sent, "output": record.output[at:], "sequence": 1}
    return structs.replace(record, output=record.output[:at]), structs.replace(record, **end)


def test_the_marks_of_replaced_rows_are_replaced_too(random_target: Path, tmp_path: Path) -> None:
    """While nothing is drafted, a server marks its rows, and a step may have lost its row."""
    (record,) = make_records(random_target, 1)
    sizes = {"row_topk_ids": 4 * record.top_k, "row_topk_log_probs": 4 * record.top_k}
    sizes |= dict.fromkeys(("row_positions", "row_branches", "row_drafts", "row_draft_probs"), 4)
    sizes |= {"row_log_sum_exp": 4, "row_accepted": 1}
    fewer = {name: getattr(record, name)[size:] for name, size in sizes.items()}
    fewer["row_proposers"] = bytes([PADDING]) * (len(record.positions) - 1)
    head = eagle1.Eagle1(eagle1.Config(), Target.from_folder(random_target))
    make_random(head).export(tmp_path / "draft")
    flags = ("--draft", str(tmp_path / "draft"))
    (scored,) = score(random_target, [structs.replace(record, **fewer)], tmp_path, *flags)
    assert decode_record(encode_frame(scored)) == scored, "the learner would refuse it"
    assert len(scored.positions) == len(record.output_ids)


def test_score_drops_no_record_if_nobody_empties_the_spool(
    random_target: Path,
    records: list[Record],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids = SpoolWriter(tmp_path / "ids", "tap", 1 << 30)
    for record in records:
        ids.write([encode_frame(record)])
    args = ["data", "score", str(tmp_path / "ids"), "--target", str(random_target)]
    args += ["--spool", str(tmp_path / "spool"), "--spool-bytes", "1"]
    found = []
    for left in (2, 1, 0):
        assert dispatch(args) == (2 if left else 0)
        assert len(spool_files(tmp_path / "ids")) == left
        if left:
            assert "is full (" in (said := capsys.readouterr().err)
            assert f"{left} files are left in {tmp_path / 'ids'}" in said
        (path,) = spool_files(tmp_path / "spool")
        found += [record for _, record in read_frames(path.read_bytes())]
        path.unlink()  # as a learner does
    assert [r.record_id for r in found] == [r.record_id for r in records]


def test_score_refuses_in_one_line(
    random_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--target", str(random_target), "--spool", str(tmp_path / "spool")]
    assert dispatch(["data", "score", str(tmp_path / "none"), *args]) == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "spool").mkdir()
    assert dispatch(["data", "score", str(tmp_path / "spool"), *args]) == 2
    assert "choose a different one" in capsys.readouterr().err
    (tmp_path / "ids").mkdir()
    gguf = ["--target", str(tmp_path / "target.gguf"), "--spool", str(tmp_path / "spool")]
    assert dispatch(["data", "score", str(tmp_path / "ids"), *gguf]) == 2
    assert "import-gguf" in capsys.readouterr().err
    assert fingerprint(random_target)
