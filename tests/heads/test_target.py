from __future__ import annotations

from pathlib import Path

import pytest
import torch
from make_heads import make_target
from safetensors.torch import save_file

from redraft.files.folder import tensor_files
from redraft.files.tensors import read_tensors
from redraft.heads.target import Target, aux_layers


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"], ids=["one file", "sharded"])
def test_a_folder_gives_the_embeddings_and_the_head_of_its_model(
    tied: bool, shard_size: str, tmp_path: Path
) -> None:
    model = make_target(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(set(tensor_files(tmp_path).values())) > 1) is (shard_size == "20KB")
    target, wanted = Target.from_folder(tmp_path), Target.from_model(model)
    assert torch.equal(target.embed_VD, wanted.embed_VD)
    assert torch.equal(target.head_VD, wanted.head_VD)
    assert torch.equal(target.embed_VD, target.head_VD) is tied
    assert target.config.num_hidden_layers == wanted.config.num_hidden_layers


def test_copies_beside_an_mtp_layer_are_not_the_targets(tmp_path: Path) -> None:
    model = make_target()
    model.save_pretrained(tmp_path)
    tensors = read_tensors(tmp_path, tensor_files(tmp_path))
    copies = {
        f"{prefix}.embed_tokens.weight": torch.zeros(2, 2) for prefix in ("model.layers.5", "mtp")
    }
    save_file({**tensors, **copies}, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(Target.from_folder(tmp_path).embed_VD, Target.from_model(model).embed_VD)


def test_a_folder_without_embeddings_is_refused(tmp_path: Path) -> None:
    make_target().save_pretrained(tmp_path)
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"embed_tokens\.weight"):
        Target.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ("lm_head.qweight", torch.int32),
        ("lm_head.weight_packed", torch.int32),
        ("lm_head.weight", torch.float8_e4m3fn),
        ("model.embed_tokens.weight", torch.uint8),
    ],
)
def test_a_quantised_output_head_is_refused_and_not_taken_for_a_tied_one(
    stored: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    make_target().save_pretrained(tmp_path)
    tensors = read_tensors(tmp_path, tensor_files(tmp_path))
    packed = tensors.pop(f"{stored.rpartition('.')[0]}.weight").to(dtype)
    save_file({**tensors, stored: packed}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{tmp_path} .*quantised {stored}"):
        Target.from_folder(tmp_path)


def test_a_copy_of_rows_that_a_quantised_target_has_in_float16_is_a_copy(tmp_path: Path) -> None:
    target, name = Target.from_model(make_target()), "embed_tokens.weight"
    rows = target.embed_VD.bfloat16()
    rows[0] *= 1e-5  # float16 has few bits for such numbers
    stored = rows.half()
    assert not torch.equal(stored.bfloat16(), rows)
    target.drop_copy(tensors := {name: rows}, name, stored, tmp_path)
    assert tensors == {}
    with pytest.raises(ValueError, match=rf"{name} differs"):
        target.drop_copy({name: rows * 1.01}, name, stored, tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} .*model\.safetensors\.index\.json"):
        Target.from_folder(tmp_path)


def test_default_aux_layers_of_a_shallow_target_are_refused_with_the_flag() -> None:
    assert aux_layers((), 7) == (2, 3, 4)
    for num_layers in range(2, 7):
        with pytest.raises(ValueError, match=r"--head\.aux-layer-ids [\d ]+$") as refused:
            aux_layers((), num_layers)
        some = tuple(map(int, str(refused.value).partition("--head.aux-layer-ids ")[2].split()))
        assert aux_layers(some, num_layers) == some
    for wrong in ((3, 1), (1, 1), (1, 9)):
        with pytest.raises(ValueError, match=r"--head\.aux-layer-ids"):
            aux_layers(wrong, 7)
