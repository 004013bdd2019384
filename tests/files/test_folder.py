"""A model that is named by its hub name is there before work begins, or the error is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from local_hub import COMMIT, NAME, NOWHERE, keep_in_cache, run_with_hub, serve_model
from safetensors.torch import save

from redraft.files.folder import (
    fetch_model,
    fingerprint,
    model_folder,
    read_config,
    read_quantization,
)

FETCH = "from redraft.files.folder import fetch_model; print(fetch_model('owner/model'))"
FIND = "from redraft.files.folder import model_folder; print(model_folder('owner/model'))"
TOKENIZER = "from huggingface_hub import hf_hub_download as load; "
TOKENIZER += "[load('owner/model', name) for name in ('config.json', 'tokenizer.json')]"

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": save({"weight": torch.zeros(2)}),
    "README.md": b"not needed",
    "onnx/config.json": b"not needed",
    "pytorch_model.bin": b"the same weights again",
    "consolidated.safetensors": b"and again",
}
READ = {"config.json", "tokenizer.json", "model.safetensors"}


def test_a_hub_model_is_downloaded_once_without_files_that_nobody_reads(tmp_path: Path) -> None:
    with serve_model(FILES) as hub:
        done = run_with_hub(FETCH, hub, tmp_path)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.name == COMMIT
    assert {path.name: path.read_bytes() for path in folder.rglob("*")} == {
        name: FILES[name] for name in READ
    }
    # without the hub: the cache will do, and so it does for a question about the folder
    for code in (FETCH, FIND):
        assert run_with_hub(code, NOWHERE, tmp_path).stdout.strip() == str(folder)


def test_a_revision_in_the_hubs_cache_is_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, other = (
        keep_in_cache(make_folder(tmp_path / "main"), tmp_path / "cache", monkeypatch),
        "f" * 40,
    )
    kept = model_folder(name).parent
    make_folder(kept / other)
    (kept.parent / "refs" / "v2").write_text(other)
    for revision, commit in ((None, COMMIT), ("main", COMMIT), ("v2", other), (other, other)):
        assert model_folder(name, revision) == kept / commit
    with pytest.raises(FileNotFoundError, match=f"^{name} at revision v3 "):
        model_folder(name, "v3")
    assert model_folder(kept / COMMIT, "v2") == kept / COMMIT, "vLLM reads a folder as it is"


def make_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_bytes(FILES["config.json"])
    return folder


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
        done = run_with_hub(
            FETCH, hub if case == "a file that the hub does not give" else NOWHERE, tmp_path
        )
    assert done.returncode
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"FileNotFoundError: {NAME} "), done.stderr


def test_a_folder_is_left_alone(tmp_path: Path) -> None:
    assert fetch_model(tmp_path) == tmp_path
    with pytest.raises(ValueError, match=r"`redraft data import-gguf model\.gguf\b"):
        fetch_model("model.gguf")


OPEN = "from redraft.files.folder import open_folder; print(open_folder('owner/model'))"


def test_a_hub_model_is_opened_without_its_weights(tmp_path: Path) -> None:
    with serve_model(FILES) as hub:
        done = run_with_hub(OPEN, hub, tmp_path)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert {path.name for path in folder.iterdir()} == READ - {"model.safetensors"}
    assert run_with_hub(OPEN, NOWHERE, tmp_path).stdout.strip() == str(folder)


def write(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "beside", "found"),
    [
        ({}, None, None),
        ({"quantization_config": {"quant_method": "awq"}}, None, "awq"),
        ({"compression_config": {"format": "pack"}}, None, "packed"),
        ({"text_config": {"quantization_config": {"quant_algo": "FP8"}}}, None, "FP8"),
        ({}, {"quantization": {"quant_algo": "NVFP4"}}, "NVFP4"),
    ],
)
def test_a_quantisation_is_found_wherever_its_tool_writes_it(
    tmp_path: Path, config: dict[str, Any], beside: dict[str, Any] | None, found: str | None
) -> None:
    write(tmp_path, **config)
    if beside is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert read_quantization(tmp_path) == found


@pytest.mark.parametrize("section", ["{", "[1, 2]", '"words"'])
def test_every_reader_names_a_corrupt_config(tmp_path: Path, section: str) -> None:
    (tmp_path / "config.json").write_text(section)
    for read in (read_quantization, read_config, fingerprint):
        with pytest.raises(ValueError, match=r"config\.json") as error:
            read(tmp_path)
        assert "\n" not in str(error.value)


def test_a_file_left_in_the_folder_is_not_a_part_of_the_model(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(FILES["model.safetensors"])
    before = fingerprint(tmp_path)
    (tmp_path / "training_args.bin").write_bytes(b"of a trainer")
    (tmp_path / "pytorch_model.bin").write_bytes(b"the same weights again")
    assert fingerprint(tmp_path) == before


def test_a_folder_that_is_almost_a_model_is_explained(tmp_path: Path) -> None:
    (tmp_path / "run" / "draft").mkdir(parents=True)
    (tmp_path / "run" / "draft" / "config.json").write_text("{}")
    (tmp_path / "mistral").mkdir()
    (tmp_path / "mistral" / "params.json").write_text("{}")
    for name, match in (("run", f"{tmp_path}/run/draft"), ("mistral", r"params\.json .*Mistral")):
        with pytest.raises(FileNotFoundError, match=match):
            read_config(tmp_path / name)
