"""Model folders that are not what they should be are refused in one line."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from redraft.files.artifact import publish
from redraft.files.checkpoint import load_causal_lm, load_tokenizer, new_model
from redraft.files.folder import is_hub_name, model_folder
from tests.helpers.target_families import make_config


def make_model(**config: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, **config)).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model().save_pretrained(tmp_path / "model", max_shard_size="40KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    return tmp_path / "model"


def assert_one_line(error: pytest.ExceptionInfo[BaseException]) -> None:
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_folder_loads_with_equal_logits(tmp_path, tied):
    model = make_model(tie_word_embeddings=tied)
    publish(tmp_path / "model", model.save_pretrained, {})
    ids_BT = torch.arange(10)[None]
    loaded = load_causal_lm(tmp_path / "model")
    assert torch.equal(model(ids_BT).logits, loaded(ids_BT).logits)
    assert loaded.config._attn_implementation == "sdpa"
    assert load_causal_lm(tmp_path / "model", torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("load", [load_causal_lm, load_tokenizer])
def test_a_missing_folder_is_said_to_be_missing(tmp_path, load):
    with pytest.raises(FileNotFoundError, match="nowhere") as error:
        load(tmp_path / "nowhere")
    assert_one_line(error)


def test_a_folder_without_a_config_is_said_to_be_the_wrong_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_causal_lm(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(folder):
    with pytest.raises(FileNotFoundError, match=r"model\b.*tokenizer\.json"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"tokenizer.*{folder}\b") as error:
        load_tokenizer(folder)
    assert_one_line(error)


def test_a_truncated_shard_is_named(folder):
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ValueError, match=rf"{shard.name}\b.*truncated"):
        load_causal_lm(folder)


def test_a_missing_shard_is_named(folder):
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=rf"{shard.name}\b.*missing"):
        load_causal_lm(folder)


def test_a_flipped_bit_is_found_where_there_is_a_manifest(tmp_path):
    publish(tmp_path / "model", make_model().save_pretrained, {})
    weights = tmp_path / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load_causal_lm(tmp_path / "model")


def test_a_missing_weight_is_not_filled_with_random_numbers(tmp_path):
    make_model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"1.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_causal_lm(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path):
    make_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(ValueError, match=rf"model {tmp_path}:|lacks") as error:
        load_causal_lm(tmp_path)
    assert_one_line(error)


def test_an_unreadable_config_is_refused_in_one_line(tmp_path):
    make_model().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config\.json") as error:
        load_causal_lm(tmp_path)
    assert_one_line(error)


def test_a_hub_name_is_looked_up_and_its_absence_said_in_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert is_hub_name("redraft-tests/no-such-model")
    assert not is_hub_name("a/b/c")
    with pytest.raises(FileNotFoundError, match="redraft-tests/no-such-model") as error:
        load_causal_lm("redraft-tests/no-such-model")
    assert_one_line(error)
    with pytest.raises(FileNotFoundError, match=r"redraft-tests/no-such-model\b.*cache"):
        model_folder("redraft-tests/no-such-model")


def test_the_folder_of_a_local_model_is_itself(tmp_path):
    assert model_folder(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("model_type", "part"),
    [
        ("llama", None),
        ("deepseek_v3", "e_score_correction_bias"),
        ("nemotron_h", "e_score_correction_bias"),
        ("ernie4_5_moe", "gate.weight"),
    ],
)
def test_a_new_model_has_the_dtypes_of_a_loaded_one(
    model_type: str, part: str | None, tmp_path: Path
) -> None:
    config = make_config(model_type)
    new_model(config, torch.float32).save_pretrained(tmp_path)
    new, loaded = (
        {name: tensor.dtype for name, tensor in model.state_dict().items()}
        for model in (new_model(config, torch.bfloat16), load_causal_lm(tmp_path, torch.bfloat16))
    )
    assert new == loaded
    wide = {name for name, dtype in new.items() if dtype == torch.float32}
    assert bool(wide) == any(part is not None and part in name for name in new)
