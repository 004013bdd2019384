"""The flagship recipe beside a real vLLM that holds its target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recipe_runs import build_command, run

from redraft.engine.server import VllmServer


@pytest.mark.vllm
def test_a_target_behind_a_vllm_server_needs_no_weights_here(
    engine_with_draft: VllmServer, served_pair: tuple[Path, Path], data: Path, tmp_path: Path
) -> None:
    signal = (
        "--signal.kind",
        "endpoint",
        "--signal.url",
        engine_with_draft.url,
        "--signal.k",
        "20",
    )
    draft = ("--draft.num-layers", "1", "--draft.hidden-size", "64")
    done = run(
        build_command(
            served_pair[0], data, tmp_path / "remote", "--loop.steps", "2", *signal, *draft
        )
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "remote/report.json").read_text())
    assert report["by_domain"].keys() == {"code", "prose"}
    assert report["offline"]["tau_forecast"] >= 1
