"""`redraft data count`: a folder that every command takes as a draft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from local_hub import NAME, run_with_hub, serve_model

from redraft.eval.forecast.draft_source import DraftSource
from redraft.files.folder import fingerprint, tensor_files
from redraft.heads.catalog import detect_family_by_tensors
from redraft.heads.families.retrieval import Retrieval
from redraft.recipes.cli.run import dispatch
from redraft.recipes.serve.serve import ServeConfig, speculative_config

TARGET = "tests/assets/tiny-target"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    ask = {"role": "user", "content": "What is the capital?"}
    rows = [
        {
            "messages": [
                ask,
                {"role": "assistant", "content": f"The capital of land {i} is town {i}."},
            ]
        }
        for i in range(30)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_counted_answers_are_a_draft_for_every_command(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "counted"
    command = ["data", "count", "--target", TARGET, "--data", str(source), "--output", str(folder)]
    assert dispatch(command) == 0
    assert "runs of up to 6 tokens ->" in capsys.readouterr().out
    assert Retrieval.read(folder).entries
    assert detect_family_by_tensors(tensor_files(folder), folder).name == "retrieval"
    assert json.loads((folder / "provenance.json").read_text())["target"] == TARGET
    config = DraftSource.parse(str(folder)).speculative()
    assert (config["method"], config["retrieval"]) == ("ngram", str(folder))
    served = speculative_config(
        ServeConfig(target=TARGET, draft=str(folder), num_speculative_tokens=6)
    )
    assert served == {**config, "num_speculative_tokens": 6}
    # the doctor compares passes of models, and there is none
    assert dispatch(["doctor", "--target", TARGET, "--draft", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "counted answers" in said
    assert "nothing to compare with a target" in said
    # a second run keeps the first's folder unless it is told not to
    assert dispatch(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert dispatch([*command, "--overwrite"]) == 0


def test_a_target_on_the_hub_is_there_before_the_counting(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from redraft.recipes.cli.run import dispatch; sys.exit(dispatch(sys.argv[1:]))"
    )
    command = [
        "data",
        "count",
        "--target",
        NAME,
        "--data",
        str(source),
        "--output",
        str(tmp_path / "counted"),
    ]
    files = {path.name: path.read_bytes() for path in Path(TARGET).iterdir()}
    with serve_model(files, broken="model.safetensors") as hub:
        done = run_with_hub(code, hub, tmp_path / "home", *command)
    assert done.returncode == 2
    assert f"redraft: {NAME} " in done.stderr
    assert "conversations" not in done.stdout, "nothing was counted"
    # the other files are in the cache now
    with serve_model(files) as hub:
        done = run_with_hub(code, hub, tmp_path / "home", *command)
    assert done.returncode == 0, done.stderr
    provenance = json.loads((tmp_path / "counted" / "provenance.json").read_text())
    assert (provenance["target"], provenance["target_fingerprint"]) == (
        NAME,
        fingerprint(Path(TARGET)),
    )
