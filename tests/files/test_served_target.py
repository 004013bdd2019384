"""Targets that vLLM would serve otherwise than they teach, each with a way out that works."""

from __future__ import annotations

import base64
import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from local_hub import keep_in_cache
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from redraft.distill.data.conversations import load_conversations
from redraft.distill.data.rendering import Renderer
from redraft.distill.data.rows import read_rows
from redraft.distill.run.training_run import refuse
from redraft.distill.signal.features import load_skeleton
from redraft.distill.train.run_config import make_config
from redraft.engine.sampling import read_sampling
from redraft.files.checkpoint import end_ids, load_causal_lm, load_config, load_tokenizer
from redraft.files.folder import INDEX, WEIGHTS, check_model_folder, tensor_files
from redraft.files.served_target import (
    WITH_AUX,
    require_aux,
    require_served_alike,
    visible_length,
)
from redraft.files.target_folder import TargetFolder
from redraft.heads.catalog import FamilyName, find_family
from redraft.heads.options import Standalone
from redraft.heads.target import Target
from redraft.online.daemon.opening import read_vocab_size
from redraft.recipes.data import show as data_command
from redraft.recipes.serve import serve, serve_config
from tests.helpers.vllm_models import architectures, passes_inner_layers

TINY = Path("tests/assets/tiny-target")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "target"))


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def check(target: Path) -> None:
    check_model_folder(target)
    require_served_alike(TargetFolder.open(target))


def complaint(target: Path, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as raised:
        check(target)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_usual_target_passes(target: Path) -> None:
    check(target)
    require_aux(TargetFolder.open(target), "eagle3")


def test_longrope_is_refused_beyond_the_original_length(target: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 16,
        "long_factor": [4.0] * 16,
    }
    path = target / "config.json"
    head_dim = json.loads(path.read_text())["head_dim"]
    rope |= {"short_factor": [1.0] * (head_dim // 2), "long_factor": [4.0] * (head_dim // 2)}
    shape = {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": 512,
    }
    edit(path, **shape, max_position_embeddings=4096, rope_parameters=rope, rope_scaling=None)
    assert "max_position_embeddings to 512" in complaint(target)
    edit(path, max_position_embeddings=512)
    check(target)


QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "sliding_window": 64,
    "use_sliding_window": True,
}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 1024),
        ({**MISTRAL, "sliding_window": 64}, 64),
        ({**MISTRAL, "sliding_window": 0}, 1024),
        ({**QWEN, "max_window_layers": 0}, 64),
        ({**QWEN, "max_window_layers": 1}, 1024),
    ],
)
def test_a_draft_sees_as_much_as_vllm_will_show_it(
    target: Path, changes: dict[str, Any], length: int
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    edit(target / "config.json", **changes)
    served = EngineArgs(model=str(target), dtype="float32").create_engine_config()
    assert (served.cache_config.sliding_window or served.model_config.max_model_len) == length
    config = TargetFolder.open(target).text_config
    for is_head, most in ((False, length), (True, 1024)):  # a head computes the window itself
        found = [visible_length(config, asked, is_head=is_head) for asked in (None, 4096, 32)]
        assert found == [most, most, 32]


@pytest.mark.parametrize("family", ["eagle3", "standalone"])
def test_a_long_row_beyond_the_targets_positions_is_refused(
    target: Path, family: FamilyName
) -> None:
    small = {"draft_vocab_size": 0} if family == "eagle3" else {"draft": Standalone(num_layers=1)}
    cfg: Any = replace(make_config(find_family(family)), target=str(target), **small)
    refuse(find_family(family), cfg)  # the default, 2,048 or more: of short conversations
    for length, is_refused in ((1024, False), (1025, True)):
        asked = replace(cfg, loop=replace(cfg.loop, sequence_length=length))
        wrong = r"--loop\.sequence-length is 1025\b.*\b1,024 positions: choose at most 1024$"
        with pytest.raises(ValueError, match=wrong) if is_refused else nullcontext():
            refuse(find_family(family), asked)


def test_ids_beyond_the_embeddings_are_refused(target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_tokens(["<|late|>", "<|later|>"])
    tokenizer.save_pretrained(target)
    assert "4,098 ids" in complaint(target)
    assert "4,096 embeddings" in complaint(target)
    data = target / "data.jsonl"
    data.write_text(json.dumps({"prompt": "why?", "completion": "so"}) + "\n")
    with pytest.raises(ValueError, match="4,098 ids"):
        data_command.main(data_command.ShowConfig(source=str(data), target=str(target)))
    edit(target / "config.json", vocab_size=4098)
    check(target)


def test_a_padding_token_needs_no_row(target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_special_tokens({"pad_token": "<|filler|>"})
    tokenizer.save_pretrained(target)
    check(target)
    tokenizer.chat_template = "<|filler|>" + tokenizer.chat_template
    tokenizer.save_pretrained(target)
    assert "'<|filler|>'" in complaint(target)


def test_a_head_left_beside_tied_embeddings_is_refused(target: Path) -> None:
    weights = load_file(target / WEIGHTS)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * 2
    save_file(weights, target / WEIGHTS, {"format": "pt"})
    edit(target / "config.json", tie_word_embeddings=True)
    (target / "manifest.json").unlink(missing_ok=True)
    assert re.search(r"\blm_head\.weight\b.*\bmodel\.embed_tokens\.weight\b", complaint(target))
    edit(target / "config.json", tie_word_embeddings=False)
    check(target)
    edit(target / "config.json", tie_word_embeddings=True)
    del weights["lm_head.weight"]
    save_file(weights, target / WEIGHTS, {"format": "pt"})
    check(target)


def test_a_head_for_a_target_without_vllms_interface_is_refused(target: Path) -> None:
    edit(target / "config.json", architectures=["MixtralForCausalLM"])
    family = find_family("eagle3")
    cfg: Any = replace(make_config(family), target=str(target), draft_vocab_size=0)
    with pytest.raises(ValueError, match=r"MixtralForCausalLM.*eagle3.*--prove\.no-engine"):
        refuse(family, cfg)
    _, opened, _ = refuse(family, replace(cfg, prove=replace(cfg.prove, engine=False)))
    assert opened.folder == target


@pytest.mark.parametrize(
    ("model_type", "family", "message"),
    [
        ("siglip_vision_model", "standalone", "SiglipVisionConfig"),
        ("siglip_vision_model", "eagle3", "SiglipVisionConfig"),
        ("t5", "eagle1", "T5Config"),
        ("falcon_mamba", "eagle1", "FalconMambaConfig.*max_position_embeddings"),
    ],
)
def test_a_target_that_nothing_covers_is_refused_before_anything_is_loaded(
    model_type: str, family: str, message: str, target: Path
) -> None:
    AutoConfig.for_model(model_type).save_pretrained(target)
    row = find_family(family)
    cfg: Any = replace(make_config(row), target=str(target), output=target / "run")
    with pytest.raises(ValueError, match=message) as refused:
        refuse(row, cfg)
    assert "\n" not in str(refused.value)


@pytest.mark.vllm
def test_the_interface_is_known_for_the_installed_vllm() -> None:
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    of_transformers = {
        name
        for mapping in mappings
        for names in mapping.values()
        for name in ([names] if isinstance(names, str) else names)
    }
    known = architectures().keys() & (of_transformers | {"MiMoForCausalLM"})
    assert len(known) > 100
    assert {name for name in known if passes_inner_layers(name)} == WITH_AUX


def test_two_sets_of_weights_are_refused_with_both_names(target: Path) -> None:
    names = list(load_file(target / WEIGHTS))
    shutil.copy(target / WEIGHTS, target / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (target / INDEX).write_text(json.dumps(index))
    message = complaint(target)
    assert WEIGHTS in message
    assert INDEX in message
    with pytest.raises(ValueError, match=INDEX):
        tensor_files(target)
    served = serve_config.ServeConfig(target=str(target), draft="ngram")
    with pytest.raises(ValueError, match=INDEX):
        serve.server_command(served)
    (target / WEIGHTS).unlink()
    check(target)
    serve.server_command(served)


@pytest.mark.parametrize(
    ("file", "read"),
    [
        (INDEX, check_model_folder),
        ("generation_config.json", lambda folder: end_ids(folder, load_tokenizer(folder))),
        ("generation_config.json", read_sampling),
        ("config.json", load_config),
        ("config.json", load_causal_lm),
        ("config.json", read_vocab_size),
        ("tokenizer.json", load_tokenizer),
        ("tokenizer_config.json", load_tokenizer),
    ],
)
def test_a_corrupt_file_is_named(target: Path, file: str, read: Any) -> None:
    (target / "manifest.json").unlink(missing_ok=True)
    (target / file).write_text('{"weight_map": {')
    with pytest.raises(ValueError, match=re.escape(file)) as raised:
        read(target)
    assert "\n" not in str(raised.value)


def test_an_adapter_names_its_base_and_what_to_do(target: Path) -> None:
    adapter = target.parent / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "our/base"})
    )
    with pytest.raises(FileNotFoundError, match="our/base"):
        check_model_folder(adapter)
    shutil.copytree(target, adapter, dirs_exist_ok=True)  # the merged model
    check(adapter)


def test_a_tokenizer_with_code_of_its_own_is_not_run(target: Path) -> None:
    whole = (target / "tokenizer.json").read_text()
    (target / "tokenizer.json").unlink()
    (target / "tokenization_ours.py").write_text("raise SystemExit('this code must not run')")
    auto_map = {"AutoTokenizer": ["tokenization_ours.OurTokenizer", None]}
    edit(target / "tokenizer_config.json", tokenizer_class="OurTokenizer", auto_map=auto_map)
    with pytest.raises(ValueError, match=r"auto_map.*tokenizer\.json"):
        load_tokenizer(target)
    (target / "tokenizer.json").write_text(whole)
    edit(target / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", auto_map=None)
    check(target)


def test_a_type_with_torch_before_it_is_named(target: Path) -> None:
    edit(target / "config.json", dtype=None, torch_dtype="torch.bfloat16")
    with pytest.raises(ValueError, match=r'config\.json.*"dtype": "bfloat16"'):
        load_config(target)
    edit(target / "config.json", dtype="bfloat16", torch_dtype=None)
    assert load_config(target).dtype is not None


def test_a_template_of_a_processor_is_read(target: Path) -> None:
    template = load_tokenizer(target).chat_template
    (target / "chat_template.jinja").unlink()
    assert load_tokenizer(target).chat_template is None
    (target / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(target).chat_template == template


def test_two_chat_templates_that_disagree_are_refused_with_both_names(target: Path) -> None:
    template = load_tokenizer(target).chat_template
    (target / "chat_template.json").write_text(json.dumps({"chat_template": f"{template}\n"}))
    assert load_tokenizer(target).chat_template == template
    (target / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    with pytest.raises(ValueError, match=r"chat_template\.jinja .*chat_template\.json"):
        load_tokenizer(target)
    (target / "chat_template.jinja").unlink()
    assert load_tokenizer(target).chat_template == "{{ messages }}"
    edit(target / "tokenizer_config.json", chat_template=template)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json .*chat_template\.json"):
        load_tokenizer(target)


def test_a_hub_name_is_read_as_its_folder(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mistral_common")
    template = (target / "chat_template.jinja").read_text()
    (target / "chat_template.jinja").rename(tmp_path / "template")
    (target / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    edit(target / "config.json", eos_token_id=[2, 7])
    (target / "generation_config.json").unlink()
    name = keep_in_cache(target, tmp_path / "processor", monkeypatch)
    assert load_tokenizer(name).chat_template == template
    assert end_ids(name, load_tokenizer(name)) == (2, 7)
    assert load_causal_lm(name).config.vocab_size == load_config(name).vocab_size
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.json"):
        (target / file).unlink()
    write_tekken(target)
    name = keep_in_cache(target, tmp_path / "tekken", monkeypatch)
    assert load_tokenizer(name).get_vocab() == load_tokenizer(target).get_vocab()


def test_end_ids_of_config_json_count_without_a_generation_config(target: Path) -> None:
    edit(target / "config.json", eos_token_id=[2, 7, 9])
    assert end_ids(target, load_tokenizer(target)) == (2,)
    (target / "generation_config.json").unlink()
    assert end_ids(target, load_tokenizer(target)) == (2, 7, 9)
    edit(target / "config.json", eos_token_id=None, text_config={"eos_token_id": [2, 11]})
    assert end_ids(target, load_tokenizer(target)) == (2, 11), "of a wrapper of text and images"


def test_weights_in_a_bin_file_are_named_with_the_conversion(target: Path) -> None:
    (target / WEIGHTS).rename(target / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin.*save_file"):
        tensor_files(target)


def test_weights_under_another_name_are_named_with_the_way_out(target: Path) -> None:
    """As in the folders of Medusa's authors, and in an interrupted download."""
    names = list(tensor_files(target))
    (target / WEIGHTS).rename(target / "medusa_lm_head.safetensors")
    with pytest.raises(FileNotFoundError, match=rf"medusa_lm_head\.safetensors: .*\b{WEIGHTS}"):
        tensor_files(target)
    (target / "medusa_lm_head.safetensors").rename(target / WEIGHTS)
    assert list(tensor_files(target)) == names
    shutil.copy(target / WEIGHTS, target / "model-1.safetensors")
    (target / WEIGHTS).rename(target / "model-2.safetensors")
    with pytest.raises(FileNotFoundError, match=rf"model-1\.safetensors: .*\b{INDEX}\b"):
        tensor_files(target)
    for path in target.glob("model-*"):
        path.rename(path.with_suffix(".pt"))
    with pytest.raises(FileNotFoundError, match=r"model-1\.pt: "):
        tensor_files(target)


def test_a_target_of_text_and_images_is_tied_by_its_wrappers_word(target: Path) -> None:
    """Of Qwen3-VL, the section of the text often says nothing, and its default is tied."""
    weights = load_file(target / WEIGHTS)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * 2
    save_file(weights, target / WEIGHTS, {"format": "pt"})
    text = {"vocab_size": 4096, "hidden_size": 256}
    for is_tied in (False, True):
        wrapper = {
            "model_type": "qwen3_vl_moe",
            "text_config": text,
            "tie_word_embeddings": is_tied,
        }
        (target / "config.json").write_text(json.dumps(wrapper))
        opened = TargetFolder.open(target)
        assert opened.text_config.tie_word_embeddings
        if is_tied:
            with pytest.raises(ValueError, match="lm_head"):
                require_served_alike(opened)
        else:
            require_served_alike(opened)


@pytest.mark.parametrize("num_files", [1, 2])
def test_a_target_in_bin_files_lends_its_tensors(target: Path, num_files: int) -> None:
    whole, weights = Target.from_folder(target), load_file(target / WEIGHTS)
    (target / WEIGHTS).unlink()
    names = sorted(weights)
    for number in range(num_files):
        part = {name: weights[name] for name in names[number::num_files]}
        torch.save(
            part,
            target / ("pytorch_model.bin" if num_files == 1 else f"pytorch_model-{number}.bin"),
        )
    lent = Target.from_folder(target)
    assert torch.equal(lent.embed_VD, whole.embed_VD)
    assert torch.equal(lent.head_VD, whole.head_VD)
    skeleton = load_skeleton(TargetFolder.open(target), None, torch.device("cpu"))
    assert torch.equal(skeleton.get_output_embeddings().weight, whole.head_VD.to(skeleton.dtype))
    damaged = next(target.glob("*.bin"))
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(ValueError, match=re.escape(damaged.name)):
        Target.from_folder(target)


def test_a_folder_of_save_to_disk_is_read_by_split(tmp_path: Path) -> None:
    import datasets

    rows = [{"prompt": "why?", "completion": "so"}] * 3
    splits = {
        "train": datasets.Dataset.from_list(rows),
        "test": datasets.Dataset.from_list(rows[:1]),
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert len(load_conversations(str(tmp_path / "saved"))) == 3
    assert len(load_conversations(str(tmp_path / "saved"), split="test")) == 1
    with pytest.raises(ValueError, match="train, test"):
        load_conversations(str(tmp_path / "saved"), split="dev")
    splits["test"].save_to_disk(tmp_path / "one")
    assert len(load_conversations(str(tmp_path / "one"), split="any")) == 1


def test_a_data_set_with_several_configs_names_them_and_takes_one(tmp_path: Path) -> None:
    for name in ("easy", "hard"):
        (tmp_path / f"{name}.csv").write_text(f"prompt\n{name}\n")
    configs = "".join(
        f"- config_name: {name}\n  data_files: {name}.csv\n" for name in ("easy", "hard")
    )
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    from redraft.distill.data.rows import _load_hub

    with pytest.raises(ValueError, match=r"'easy', 'hard'.*:CONFIG"):
        _load_hub(str(tmp_path), "train")
    (row,) = read_rows(f"{tmp_path}:hard", "train")
    assert row.values == {"prompt": "hard"}


def write_tekken(folder: Path) -> None:
    """A tokenizer of bytes in Mistral's format."""
    from mistral_common.tokens.tokenizers.base import SpecialTokens

    special = list(
        dict.fromkeys(["<unk>", "<s>", "</s>", *(token.value for token in SpecialTokens)])
    )
    controls = [
        {"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(special)
    ]
    pieces = [bytes([i]) for i in range(256)] + [b"hi"]
    config = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+",
        "num_vocab_tokens": len(pieces),
        "default_vocab_size": len(pieces) + len(special),
        "default_num_special_tokens": len(special),
        "version": "v13",
    }
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(p).decode(), "token_str": None}
        for i, p in enumerate(pieces)
    ]
    (folder / "tekken.json").write_text(
        json.dumps({"config": config, "vocab": vocab, "special_tokens": controls})
    )


def test_a_tekken_tokenizer_alone_renders_as_mistral_common_does(target: Path) -> None:
    pytest.importorskip("mistral_common")
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (target / name).unlink()
    write_tekken(target)
    render = Renderer(load_tokenizer(target), {})
    chat = [{"role": "user", "content": "hi you"}, {"role": "assistant", "content": "hi hi"}]
    messages = [{"role": "system", "content": "Be kind."}, *chat, chat[0]]
    theirs = MistralTokenizer.from_file(str(target / "tekken.json"))
    expected = theirs.encode_chat_completion(ChatCompletionRequest(messages=messages)).tokens
    assert render.tokenise([render(messages, prompt=True)]) == [expected]
    ((prompt, answer),) = [
        (turn.prompt, turn.answer)
        for turn in render.turns({"messages": chat, "domain": "all"}, lambda turn: turn)[0]
    ]
    assert (prompt[-7:], answer) == ("[/INST]", "hi hi</s>")
