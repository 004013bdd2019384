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
