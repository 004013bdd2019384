"""A vLLM that redraft does not know is refused in one line, and 0.33 keeps its better defaults."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest

from redraft.engine import hooks, machine
from redraft.engine.hooks import SUPPORTED, find_unsupported
from redraft.engine.server import require_runner, vllm_keys
from redraft.online.engine import plugin, routes, worker


@pytest.mark.parametrize(
    ("version", "is_known"),
    [
        ("0.31.2", False),
        ("0.32.0", True),
        ("0.33.0rc1", True),
        ("0.33.1.dev12+gabc", True),
        ("0.34.0.dev3+gabc", False),
        ("1.0", False),
        (None, True),
    ],
)
def test_a_release_is_known_or_named_in_one_line(version: str | None, is_known: bool) -> None:
    error = find_unsupported(version)
    assert (error == "") is is_known
    if not is_known:
        assert str(version) in error
        assert SUPPORTED in error
        assert "\n" not in error
        for config in (None, {"method": "ngram"}, {"method": "eagle3", "model": "head"}):
            with pytest.raises(ValueError, match=re.escape(f"vLLM {version} is installed")):
                require_runner(config, {}, version=version)


def test_the_plugin_of_a_newer_vllm_wraps_nothing_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed: list[Any] = []
    monkeypatch.setattr(plugin, "is_enabled", lambda: True)
    monkeypatch.setattr(machine, "VLLM_VERSION", "0.34.0")
    monkeypatch.setattr(hooks, "install_if_asked", installed.append)
    with caplog.at_level(logging.ERROR, logger="vllm.redraft"):
        plugin.register()
    assert installed == []
    (record,) = caplog.records
    assert "0.34.0" in record.getMessage()
    assert record.exc_info is None


def test_in_a_newer_vllm_no_request_passes_through_the_plugin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugins = pytest.importorskip("vllm.plugins")
    monkeypatch.setenv("VLLM_PLUGINS", "redraft")
    assert [one.name for one in plugins.load_endpoint_plugins(("generate",))] == ["redraft"]
    monkeypatch.setattr(routes, "VLLM_VERSION", "0.34.0")
    assert plugins.load_endpoint_plugins(("generate",)) == []


def test_the_hashes_of_vllm_0_33_need_no_dropped_block() -> None:
    for method in ("eagle", "eagle3", "mtp"):
        config = {"method": method, "model": "head"}
        assert vllm_keys(config, "0.32.0")["disable_eagle_block_drop"] is True
        assert "disable_eagle_block_drop" not in vllm_keys(config, "0.33.0")


def test_a_head_with_a_quantised_copy_of_the_targets_is_not_swapped() -> None:
    speculative = SimpleNamespace(draft_lm_head_quantization="fp8")
    server: Any = SimpleNamespace(
        redraft=SimpleNamespace(draft=object(), asleep=False),
        model_runner=SimpleNamespace(get_draft_model=object),
        vllm_config=SimpleNamespace(speculative_config=speculative),
    )
    with pytest.raises(ValueError, match="draft_lm_head_quantization"):
        worker._require_swappable(server)
