"""A model that is named by its hub name is there before work begins, or the error is one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from local_hub import COMMIT, NAME, NOWHERE, run_with_hub, serve_model
from safetensors.torch import save

from redraft.heads.files.folder import fetch_model

FETCH = "from redraft.heads.files.folder import fetch_model; print(fetch_model('owner/model'))"
FIND = "from redraft.heads.files.folder import model_folder; print(model_folder('owner/model'))"
TOKENIZER = "from huggingface_hub import hf_hub_download as load; "
TOKENIZER += "[load('owner/model', name) for name in ('config.json', 'tokenizer.json')]"

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": save({"weight": torch.zeros(2)}),
    "README.md": b"not needed",
    "onnx/config.json": b"not needed",
    "pytorch_model.bin": b"the same weights again",
}
READ = {"config.json", "tokenizer.json", "model.safetensors"}


def test_a_hub_model_is_downloaded_once_without_files_that_nobody_reads(tmp_path: Path) -> None:
    with serve_model(FILES) as hub:
        done = run_with_hub(FETCH, hub, tmp_path)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.name == COMMIT
    assert {path.name: path.read_bytes() for path in folder.rglob("*")} == {name: FILES[name] for name in READ}
    # without the hub: the cache will do, and so it does for a question about the folder
    for code in (FETCH, FIND):
        assert run_with_hub(code, NOWHERE, tmp_path).stdout.strip() == str(folder)


def test_old_repositories_give_their_only_weights(tmp_path: Path) -> None:
    old = {name: content for name, content in FILES.items() if name != "model.safetensors"}
    with serve_model(old) as hub:
        done = run_with_hub(FETCH, hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "pytorch_model.bin").is_file()


@pytest.mark.parametrize("case", ["nothing", "a tokenizer", "a file that the hub does not give"])
def test_a_model_without_its_weights_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    with serve_model(FILES, broken="model.safetensors") as hub:
        if case == "a tokenizer":
            assert run_with_hub(TOKENIZER, hub, tmp_path).returncode == 0
        done = run_with_hub(FETCH, hub if case == "a file that the hub does not give" else NOWHERE, tmp_path)
    assert done.returncode
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"FileNotFoundError: {NAME} is no folder here, and the hub does not give all of it: "), (
        done.stderr
    )


def test_a_folder_is_left_alone(tmp_path: Path) -> None:
    assert fetch_model(tmp_path) == tmp_path
    with pytest.raises(ValueError, match="redraft data import-gguf"):
        fetch_model("model.gguf")
