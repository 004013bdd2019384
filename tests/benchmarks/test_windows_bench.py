"""The benchmark of windows by context: its texts, its commands, and its results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks import windows
from benchmarks.windows import Config, main, make_prompts, make_training, read_files
from redraft.files.checkpoint import load_tokenizer

TINY = Path("tests/assets/tiny-target")


def test_files_of_windowed_prompts_are_not_in_the_training_data() -> None:
    held_out, trained = ({*read_files(held_out=held_out)} for held_out in (True, False))
    assert len(held_out) > 10
    assert len(trained) > 4 * len(held_out)
    assert not held_out & trained


def test_a_prompt_fills_its_context_and_every_context_begins_at_the_same_places() -> None:
    tokenizer = load_tokenizer(TINY)
    cfg = Config(contexts=(192, 512), num_prompts=3)
    prompts = list(make_prompts(cfg, tokenizer))
    contents = [each["messages"][0]["content"] for each in prompts]
    for context in cfg.contexts:
        rows = [each for each in prompts if each["domain"] == str(context)]
        assert len(rows) == cfg.num_prompts
        for row in rows:
            text = tokenizer.apply_chat_template(
                row["messages"], tokenize=False, add_generation_prompt=True
            )
            count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
            assert context - 24 < count <= context
    short, long = contents[:3], contents[3:]
    begin = len(windows.QUESTION) + 100
    assert [text[:begin] for text in short] == [text[:begin] for text in long]


def test_a_row_of_training_is_filled_by_one_conversation() -> None:
    tokenizer = load_tokenizer(TINY)
    rows = make_training(256, tokenizer)
    for _, row in zip(range(5), rows, strict=False):
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) <= 256


def test_windowed_and_full_heads_are_trained_alike_and_a_killed_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[Sequence[str]] = []
    cfg = Config(
        target=TINY, lengths=(64, 128), contexts=(64, 192), window=32, num_prompts=2,
        tokens_per_step=256, output=tmp_path,
    )  # fmt: skip

    def run(*arguments: str) -> None:
        commands.append(arguments)
        if arguments[0] == "eval":
            tau = {"full-64": 1.25, "window-64": 1.5, "full-128": 2.0, "window-128": 1.75}
            rows: list[dict[str, Any]] = [
                {
                    "draft": name,
                    "domain": domain,
                    "by_num_speculative_tokens": [
                        {"forecast": {"tau": {"value": value, "low": value - 0.1, "high": 2.5}}}
                    ],
                }
                for name, value in tau.items()
                for domain in (None, "64", "192")
            ]
            (tmp_path / "eval").mkdir(exist_ok=True)
            (tmp_path / "eval/report.json").write_text(json.dumps({"results": rows}))

    monkeypatch.setattr(windows, "run_redraft", run)
    some = {kind: [*islice(read_files(held_out=kind), 8)] for kind in (True, False)}
    monkeypatch.setattr(windows, "read_files", lambda *, held_out: iter(some[held_out]))
    main(cfg)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.jsonl")}
    assert len(written) == 3
    main(cfg)
    # A training continues if its data are as they were, and nothing asks for a new one.
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert commands[:5] == commands[5:]
    assert not any("--overwrite" in command for command in commands)
    trained = commands[:4]
    for full, windowed in (trained[:2], trained[2:]):
        extra = [each for each in windowed if each not in full]
        assert "--head.window" in extra
        assert "--head.window" not in full
    tokens = [
        int(command[command.index("--loop.batch-size") + 1])
        * int(command[command.index("--loop.sequence-length") + 1])
        for command in trained
    ]
    assert tokens == [256] * 4, "all heads learn from as many tokens"
    results = json.loads((tmp_path / "windows.json").read_text())
    assert (results["tau_full_192"], results["tau_window_192"]) == (2.0, 1.75)
    assert results["interval_window_64"] == [1.65, 2.5]
    assert results["trained_at"]["64"]["tau_window_64"] == 1.5
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("head ")]
    assert [line.partition(":")[0] for line in heads[:4]] == [f"head {n} of 4" for n in range(1, 5)]


def test_lengths_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="in ascending order"):
        Config(lengths=(4096, 1024))


@pytest.mark.slow
def test_windows_by_context_are_measured_on_the_small_target(tmp_path: Path) -> None:
    cfg = Config(
        target=TINY, lengths=(64, 128), contexts=(64, 192), window=32, steps=4, num_prompts=2,
        max_tokens=16, tokens_per_step=512, draft_vocab_size=256, output=tmp_path,
    )  # fmt: skip
    main(cfg)
    found = json.loads((tmp_path / "windows.json").read_text())
    for context in cfg.contexts:
        for kind in ("full", "window"):
            low, high = found[f"interval_{kind}_{context}"]
            assert 1 <= low <= found[f"tau_{kind}_{context}"] <= high <= 4
    assert found["trained_at"]["64"].keys() == {
        f"{name}_{kind}_{context}"
        for name in ("tau", "interval")
        for kind in ("full", "window")
        for context in cfg.contexts
    }
    drafts = [tmp_path / f"{kind}-{length}/draft" for length in (64, 128) for kind in ("full", "window")]  # fmt: skip
    before = [(draft / "model.safetensors").read_bytes() for draft in drafts]
    main(cfg)  # nothing is trained again
    assert [(draft / "model.safetensors").read_bytes() for draft in drafts] == before
    assert (
        json.loads((tmp_path / "windows.json").read_text())["tau_full_64"] == found["tau_full_64"]
    )
