"""`redraft export` writes a folder and prints the command, or refuses in one line with nothing lost."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from make_heads import HIDDEN, make_random, make_target

from redraft.files.artifact import publish
from redraft.heads.families import eagle3, mtp, retrieval
from redraft.heads.families.mtp_folder import as_mimo, stitch
from redraft.heads.target import Target
from redraft.recipes.cli.run import dispatch


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A published EAGLE-3 head that names its target."""
    model = make_target()
    model.save_pretrained(tmp_path / "target")
    config = eagle3.Config(aux_layer_ids=(1, 2, 4))
    head = make_random(eagle3.Eagle3(config, Target.from_model(model), torch.arange(0, 90, 2)))
    publish(tmp_path / "draft", head.export, {"target": str(tmp_path / "target")})
    return tmp_path / "draft"


def test_export_for_sglang_prints_its_command_and_its_state(
    draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch(["export", str(draft), "--engine", "sglang"]) == 0
    said = capsys.readouterr().out.splitlines()
    output = f"{draft}-sglang"
    assert said[0] == f"written for SGLang 0.5.23 (its loaders were read, not run): {output}"
    assert f"--speculative-draft-model-path {output} " in said[-1]
    made = json.loads((Path(output) / "provenance.json").read_text())
    assert made["exported_for"] == {"engine": "sglang", "version": "0.5.23", "from": str(draft)}
    assert dispatch(["export", str(draft), "--engine", "sglang"]) == 2  # it is there


def test_export_for_tensorrt_and_vllm_prints_what_starts_them(
    draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["export", str(draft), "--num-speculative-tokens", "5", "--output", str(tmp_path / "t")]
    assert dispatch([*args, "--engine", "tensorrt-llm"]) == 0
    command = f"trtllm-serve {tmp_path}/target --extra_llm_api_options {tmp_path}/t/spec.yaml"
    assert capsys.readouterr().out.splitlines()[-1] == command
    assert dispatch([*args, "--overwrite", "--engine", "vllm"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    spoken = {"method": "eagle3", "model": f"{tmp_path}/t", "num_speculative_tokens": 5}
    start = f"vllm serve {tmp_path}/target --speculative-config"
    assert last == f"{start} '{json.dumps(spoken)}'"


def test_export_refuses_in_one_line_and_writes_nothing(
    draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*args: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert dispatch(["export", *args]) == 2
        assert sorted(tmp_path.rglob("*")) == before
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1
        return said[0]

    config = json.loads((draft / "config.json").read_text())
    # another layer than in training: the file's manifest goes too
    (draft / "manifest.json").unlink()
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 3]
    (draft / "config.json").write_text(json.dumps(config))
    assert re.search(r"\[0, 1, 3\].*\[1, 2, 4\]", refused(str(draft), "--engine", "sglang"))
    (draft / "provenance.json").unlink()
    assert "--target" in refused(str(draft), "--engine", "sglang")
    text = retrieval.Text(
        ids=np.array([1, 2, 3, 1, 2, 3], np.int32), is_label=np.ones(6, dtype=bool)
    )
    counted = retrieval.count_answers([text], retrieval.Config())
    publish(tmp_path / "counted", counted.write, {})
    assert "counted answers" in refused(str(tmp_path / "counted"), "--engine", "sglang")


def test_export_of_a_targets_own_layer_writes_nothing_and_refuses_mimos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_target(num_attention_heads=4, head_dim=HIDDEN // 4).save_pretrained(tmp_path / "llama")
    as_mimo(tmp_path / "llama", tmp_path / "mimo")
    head = make_random(mtp.Mtp(mtp.Config(), Target.from_folder(tmp_path / "mimo")))
    stitched = tmp_path / "stitched"
    stitch(tmp_path / "mimo", head.checkpoint_tensors(), stitched, {"redraft": head.record()})
    assert dispatch(["export", str(stitched), "--engine", "vllm"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("nothing to write")
    assert '{"method": "mtp", "num_speculative_tokens": 3}' in said
    for engine in ("sglang", "tensorrt-llm"):
        assert dispatch(["export", str(stitched), "--engine", engine]) == 2
        assert "MiMo" in capsys.readouterr().err
    head.export(tmp_path / "alone")
    args = ["export", str(tmp_path / "alone"), "--engine", "vllm", "--target", str(stitched)]
    assert dispatch(args) == 2
    assert "alone" in capsys.readouterr().err
