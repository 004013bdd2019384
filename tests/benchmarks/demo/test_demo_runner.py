"""The command and the environment of a demo's server: model runner, type, cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.demo import fleet, online
from benchmarks.demo.fleet import runner_environment, start_server
from redraft.engine.machine import ENGINE_IS_CPU


@pytest.fixture
def triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of Triton for an engine on a CPU."""
    folder = tmp_path / "triton-for-v2"
    folder.mkdir()
    monkeypatch.setattr(fleet, "TRITON", folder)
    return folder


def test_vllm_chooses_unless_a_runner_is_asked_for() -> None:
    assert runner_environment(None) == {}
    assert runner_environment("v1") == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert runner_environment("v2", on_cpu=False) == {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def test_on_a_cpu_v2_runs_in_tritons_interpreter(
    triton: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    found = runner_environment("v2", on_cpu=True)
    assert (found["VLLM_USE_V2_MODEL_RUNNER"], found["TRITON_INTERPRET"]) == ("1", "1")
    first, backend, last = found["PYTHONPATH"].split(":")
    assert (first, last) == (str(triton), "elsewhere")
    assert (Path(backend) / "cpu_triton" / "plugin.py").is_file()
    assert found["VLLM_PLUGINS"] == "redraft,cpu_triton"


@pytest.mark.skipif(not ENGINE_IS_CPU, reason="vLLM for CPUs alone needs Triton from us")
def test_without_triton_the_demo_is_refused_before_an_older_one_is_deleted(
    triton: Path, tmp_path: Path
) -> None:
    triton.rmdir()
    output = tmp_path / "demo"
    output.mkdir()
    (output / fleet.SETTINGS).write_text("{}")
    (output / "report.html").write_text("of an older demo")
    with pytest.raises(FileNotFoundError, match=r"\(700 MB\)"):
        online.main(online.Config(runner="v2", output=output, overwrite=True))
    assert (output / "report.html").is_file()


def test_elsewhere_than_in_the_source_tree_v2_is_refused_too(
    triton: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="triton_on_cpu"):
        runner_environment("v2", on_cpu=True)


def test_a_server_gets_type_cache_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    @contextmanager
    def run(command: list[str], *, log: Path, env: dict[str, str]) -> Iterator[Any]:
        started.append((command, env))
        yield SimpleNamespace()

    monkeypatch.setattr(fleet, "process_group", run)
    given: dict[str, Any] = {
        "spool": tmp_path,
        "token_file": tmp_path,
        "num_speculative_tokens": 2,
        "max_model_len": 64,
        "core": 1,
        "port": 1234,
        "log": tmp_path / "log",
    }
    with start_server(tmp_path, tmp_path, **given) as server:
        assert server.measured(2).dtype == "float32"
    changes: dict[str, Any] = {
        "dtype": "bfloat16",
        "kv_cache_bytes": 999,
        "environment": {"A": "b"},
    }
    with start_server(tmp_path, tmp_path, **given, **changes) as server:
        assert server.measured(2).dtype == "bfloat16"

    def option(command: list[str], name: str) -> str:
        return command[command.index(name) + 1]

    (plain, usual), (changed, environment) = started
    assert (option(plain, "--dtype"), option(changed, "--dtype")) == ("float32", "bfloat16")
    sizes = [option(command, "--kv-cache-memory-bytes") for command in (plain, changed)]
    assert sizes == [str(128 << 20), "999"]
    assert environment == usual | {"A": "b"}
    assert usual["VLLM_CPU_OMP_THREADS_BIND"] == str(1 % (os.cpu_count() or 1))
