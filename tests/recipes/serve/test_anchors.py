"""`redraft data anchors` from data to the records that a learner replays."""

from __future__ import annotations

from pathlib import Path

import pytest

from redraft.files.folder import fingerprint
from redraft.online.learning.anchors import read_anchors
from redraft.recipes.cli.run import dispatch


def test_every_label_of_the_data_is_a_row_that_the_learner_reads(
    random_target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "anchors"
    flags = [
        "--target",
        str(random_target),
        "--data",
        str(data),
        "--output",
        str(output),
        "--sequence-length",
        "128",
    ]
    assert dispatch(["data", "anchors", *flags, "--num-conversations", "6", "--logprobs", "5"]) == 0
    records = read_anchors(output, fingerprint(random_target))
    assert f"anchors: {len(records)} records" in capsys.readouterr().out
    for record in records:
        assert record.topk_ids.shape == (len(record.positions), 5)
        assert len(record.context_ids) + len(record.output_ids) <= 128
        assert (record.positions >= record.num_prompt_tokens).all(), "the assistant's tokens alone"
    with pytest.raises(
        ValueError, match=rf"{output} .*{records[0].target_fingerprint[:12]}, .*\banother: "
    ):
        read_anchors(output, "another")


def test_anchors_that_are_there_are_not_replaced_unasked(
    random_target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "anchors").write_text("RDR1 and so on")
    flags = [
        "--target",
        str(random_target),
        "--data",
        str(data),
        "--output",
        str(tmp_path / "anchors"),
    ]
    assert dispatch(["data", "anchors", *flags]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "anchors").read_text() == "RDR1 and so on"
    (tmp_path / "letter").write_text("mine")
    for name, read in (("letter", data), ("anchors", tmp_path / "anchors")):
        flags[3:] = [str(read), "--output", str(tmp_path / name), "--overwrite"]
        assert dispatch(["data", "anchors", *flags]) == 2
        assert "--overwrite" not in capsys.readouterr().err
    assert (tmp_path / "letter").read_text() == "mine"
    assert (tmp_path / "anchors").read_text() == "RDR1 and so on"


def test_an_interrupted_run_leaves_the_provenance_of_the_anchors_that_are_there(
    random_target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("interrupted")

    monkeypatch.setattr("redraft.online.learning.anchors.write_anchors", fail)
    (tmp_path / "anchors").write_text("RDR1 and so on")
    (tmp_path / "anchors.json").write_text("of mine")
    flags = [
        "--target",
        str(random_target),
        "--data",
        str(data),
        "--output",
        str(tmp_path / "anchors"),
        "--overwrite",
    ]
    assert dispatch(["data", "anchors", *flags, "--num-conversations", "2"]) == 2
    assert (tmp_path / "anchors.json").read_text() == "of mine"
