"""Drafts of redraft in a real llama.cpp: the target's text, and exactly the forecast's counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_cpp_world import VOCAB, World, make_draft, make_world, require_llama_cpp, serve
from make_gguf import write_gguf
from transformers import (
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks.llama_server import complete, serving
from redraft.files.folder import CONFIG
from redraft.files.gguf import open_gguf
from redraft.files.gguf_rope import rope_factors
from redraft.files.gguf_writer import GgufTarget
from redraft.files.target_folder import TargetFolder
from redraft.heads.engines import llama_cpp
from redraft.heads.engines.exporting import export_draft, require_exportable
from redraft.heads.engines.llama_cpp import FILE, TYPES, require_same_target
from redraft.heads.engines.table import Export, find_engine
from redraft.recipes.cli.run import dispatch


@pytest.fixture(scope="module")
def world(
    small_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> World:
    require_llama_cpp()
    return make_world(small_tokenizer, tmp_path_factory.mktemp("llama.cpp"))


ENGINE = find_engine("llama.cpp")


def write(world: World, draft: Path, gguf: GgufTarget | None = None) -> Path:
    """The exported GGUF file of a draft."""
    output, gguf = draft.with_name("exported"), gguf or world.gguf
    export = Export(pair=world.pair(draft), output=output, num_tokens=3, gguf=gguf.path)
    export_draft(ENGINE, export, overwrite=False)
    return output / FILE


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("standalone", {}),
        ("eagle3", {"reduced": True}),
        ("eagle3", {"norm_before_residual": True, "norm_before_fc": True, "own_head": False}),
        ("dflash", {"reduced": True}),
        ("dspark", {"reduced": True}),
        ("dspark", {"sample_from_anchor": False, "block_size": 4}),
    ],
    ids=["standalone", "eagle3", "eagle3-norms", "dflash", "dspark", "dspark-no-anchor"],
)
def test_llama_cpp_counts_as_the_forecast_says(
    world: World, name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """30 prompts, float32: the same answers, drafts, draft tokens and accepted tokens."""
    draft = make_draft(world, name, tmp_path / "draft", **options)
    file = write(world, draft)
    with serving(world.gguf.path, draft=file, kind=TYPES[name]) as client:
        texts, counts = serve(client, world)
    assert texts == [answer.output_ids for answer in world.answers]
    expected = world.forecast(draft)
    assert counts == expected
    assert counts.tau > 1.1, "no draft token was right: the comparison would show no fault"


@pytest.mark.parametrize(
    ("model_class", "config_class"),
    [(Qwen2ForCausalLM, Qwen2Config), (Qwen3ForCausalLM, Qwen3Config)],
    ids=["qwen2", "qwen3"],
)
def test_llama_cpp_reads_a_standalone_draft_of_qwen(
    world: World, model_class: Any, config_class: Any, tmp_path: Path
) -> None:
    """Served alone, its text is the model's."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}
    model = model_class(config_class(**sizes, **heads, **ids, initializer_range=0.2)).eval()
    for bias in (p for n, p in model.named_parameters() if n.endswith("bias")):
        torch.nn.init.normal_(bias)
    model.save_pretrained(tmp_path / "draft")
    tokenizer = world.folder.tokenizer
    tokenizer.add_special_tokens({"unk_token": "<|pad|>"})  # or Qwen 2's class adds its own
    tokenizer.save_pretrained(tmp_path / "draft")
    file = write(world, tmp_path / "draft")
    prompt = world.answers[0].prompt.token_ids
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=[2, 3]
    )
    with serving(file) as client:
        assert complete(client, prompt, 24)["tokens"] == expected[0, len(prompt) :].tolist()


def test_llama_cpp_gets_matrices_in_the_type_of_the_draft(world: World, tmp_path: Path) -> None:
    draft = make_draft(world, "dspark", tmp_path / "float32", num_steps=0, reduced=True)
    loaded = world.pair(draft).family.draft_class().load(draft, world.borrowed)
    loaded.export(tmp_path / "bfloat16", torch.bfloat16)
    found = {t.name: t for t in open_gguf(write(world, tmp_path / "bfloat16")).tensors}
    types = {name: tensor.tensor_type.name for name, tensor in found.items()}
    assert types["fc.weight"] == types["blk.1.attn_q.weight"] == types["markov_w1.weight"] == "BF16"
    assert types["conf_proj.weight"] == types["output_norm.weight"] == "F32"
    bits = torch.from_numpy(found["fc.weight"].data.copy()).view(torch.bfloat16)
    assert torch.equal(bits.view(loaded.fc.weight.shape), loaded.fc.weight.bfloat16())
    assert found["d2t"].data.tolist() == list(range(0, VOCAB, 2))


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("eagle3", {"aux_layer_ids": (1, 2, 5)}, "after the last layer"),
        ("dflash", {"aux_layer_ids": (1, 2, 5)}, "after the last layer"),
        ("eagle3", {"aux_layer_ids": (1, 2)}, "exactly 3"),
        ("eagle3", {"fc_norm": True}, "--head.no-fc-norm"),
        ("eagle3", {"norm_output": True}, "--head.no-norm-output"),
        ("eagle3", {"num_layers": 2}, "EAGLE-3 has one"),
        ("eagle3", {"window": 32}, "window of 32"),
        ("dflash", {"is_causal": True}, "attends causally"),
        ("dspark", {"confidence_head": False}, "without a confidence head"),
        ("peagle", {"aux_layer_ids": (1, 2, 4), "mask_token_id": 0}, "does not support P-EAGLE"),
        ("eagle1", {}, "does not support EAGLE-1"),
        ("medusa", {}, "does not support Medusa"),
    ],
)
def test_what_llama_cpp_reads_wrongly_is_refused(
    world: World, name: str, options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    draft = make_draft(world, name, tmp_path / "draft", num_steps=0, **options)
    with pytest.raises(ValueError, match=told) as raised:
        write(world, draft)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == [draft]


@pytest.mark.parametrize(
    ("name", "rope", "is_served"),
    [
        ("eagle3", "llama3", True),
        ("standalone", "llama3", True),
        ("dflash", "llama3", False),
        ("eagle3", "yarn", False),
    ],
)
def test_llama_cpp_gets_rotations_that_its_reader_of_the_family_computes(
    world: World, name: str, rope: str, is_served: bool, tmp_path: Path
) -> None:
    draft = make_draft(world, name, tmp_path / "draft", num_steps=0)
    config = json.loads((draft / CONFIG).read_text())
    config["rope_parameters"] = {**LLAMA3_ROPE, "rope_type": rope}
    (draft / CONFIG).write_text(json.dumps(config))
    if is_served:
        names = {tensor.name for tensor in open_gguf(write(world, draft)).tensors}
        assert "rope_freqs.weight" in names
        return
    with pytest.raises(ValueError, match=f"have the type {rope}"):
        require_exportable(ENGINE, world.pair(draft))


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama_cpp_gets_the_divisors_of_llama_3s_rotation() -> None:
    config = LlamaConfig(head_dim=128, rope_parameters=LLAMA3_ROPE)
    scaled = LlamaRotaryEmbedding(config).inv_freq
    plain = 500000.0 ** -(torch.arange(0, 128, 2).double() / 128)
    expected = (plain / scaled.double()).float()
    torch.testing.assert_close(rope_factors(config.to_dict()), expected, rtol=1e-6, atol=0)


def test_a_gguf_file_of_another_target_is_refused_for_llama_cpp(
    world: World, small_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = world.model
    require_same_target(world.folder, world.gguf)
    other = tmp_path / "other"
    moved = type(model)(model.config)
    moved.save_pretrained(other)
    file = GgufTarget(write_gguf(tmp_path / "other.gguf", other, small_tokenizer))
    with pytest.raises(ValueError, match=r"different embeddings"):
        require_same_target(world.folder, file)
    config = LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": 4})
    type(model)(config).save_pretrained(other)
    small_tokenizer.save_pretrained(other)
    with pytest.raises(ValueError, match=r"has 5 layers, but the target .* 4"):
        require_same_target(TargetFolder.open(other), world.gguf)


def test_llama_cpp_gives_a_head_no_streams_of_some_targets(
    world: World, small_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    draft = make_draft(world, "eagle3", tmp_path / "draft", num_steps=0)
    folder = world.folder.folder
    file = write_gguf(tmp_path / "gemma.gguf", folder, small_tokenizer, architecture="gemma2")
    with pytest.raises(ValueError, match="inner layers of a gemma2 target"):
        write(world, draft, GgufTarget(file))


def test_the_command_names_llama_cpps_type_of_draft(world: World, tmp_path: Path) -> None:
    draft = make_draft(world, "dspark", tmp_path / "draft", num_steps=0)
    export = Export(pair=world.pair(draft), output=Path("d"), num_tokens=3, gguf=Path("t.gguf"))
    assert llama_cpp.serve(export) == (
        "llama-server -m t.gguf -md d/draft.gguf --spec-type draft-dspark --spec-draft-n-max 3"
    )


def test_export_for_llama_cpp_wants_the_targets_file(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = make_draft(world, "eagle3", tmp_path / "draft", num_steps=0)
    args = ["export", str(draft), "--engine", "llama.cpp", "--target", world.folder.name]
    assert dispatch(args) == 2
    assert "set --gguf" in capsys.readouterr().err
    assert dispatch([*args, "--gguf", str(draft / CONFIG)]) == 2
    assert "not a GGUF file" in capsys.readouterr().err
    assert dispatch([*args, "--gguf", str(world.gguf.path)]) == 0
    assert "written for llama.cpp b11549 (run)" in capsys.readouterr().out
    assert (tmp_path / "draft-llama.cpp" / FILE).is_file()
