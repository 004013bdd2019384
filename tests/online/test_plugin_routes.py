"""The plugin's routes over an engine of two ranks that fail as they are told: what no engine here can be made to do."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from heads.artifact import publish
from online import plugin_routes
from online.plugin_config import PluginConfig
from online.plugin_routes import Endpoint

LOADED = {"ok": True, "load_ms": 3.0, "checksum_before": "a", "checksum_after": "a"}
BROKEN = {"ok": False, "touched": True, "error": "OSError: the disk went away"}
REFUSED = {"ok": False, "touched": False, "error": "v000002 differs in config.json"}
OVERWRITTEN = LOADED | {"checksum_after": "b"}


@dataclass
class Engine:
    """What the routes ask of vLLM's engine client."""

    answers: Mapping[str, list[dict[str, Any]]]
    """Of every rank, by the worker's method."""
    calls: list[str] = field(default_factory=list)

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        status = {"draft_version": "v000001", "draft_intact": True, "target_intact": True}
        status |= {"target_fingerprint": "target", "capture": None}
        answer = {"redraft_status": [status] * 2, "redraft_commit": [None] * 2, **self.answers}[method]
        if not answer:
            raise RuntimeError("the engine died")
        return answer

    async def pause_generation(self, **how: Any) -> None:
        assert how == {"mode": "keep", "clear_cache": True}
        self.calls.append("pause")

    async def resume_generation(self) -> None:
        self.calls.append("resume")


@pytest.fixture
def registry(tmp_path):
    publish(tmp_path / "v000002", lambda folder: (folder / "weights").touch(), {"target_fingerprint": "target"})
    return tmp_path


def swap(registry, **answers):
    """The answer to a swap, and what the engine was asked meanwhile."""
    endpoint = Endpoint()
    endpoint.config = PluginConfig(registry=registry, token="right", allow_remote=True)
    endpoint.engine = engine = Engine(answers)
    app = FastAPI()
    endpoint.attach_router(app)
    client = TestClient(app, raise_server_exceptions=False)
    answer = client.post("/redraft/swap", json={"version": "v000002"}, headers={"Authorization": "Bearer right"})
    return answer, engine.calls[1:]


def test_a_swap_pauses_loads_on_all_ranks_and_names_the_version(registry):
    answer, calls = swap(registry, redraft_load=[LOADED, LOADED | {"load_ms": 5.0}])
    assert answer.status_code == 200
    assert calls == ["pause", "redraft_load", "redraft_commit", "resume"]
    assert (answer.json()["previous"], answer.json()["load_ms"]) == ("v000001", 5.0)


@pytest.mark.parametrize("ranks", [[LOADED, BROKEN], [BROKEN, BROKEN], [LOADED, REFUSED]])
def test_where_a_rank_fails_half_way_every_rank_gets_the_last_good_draft_back(registry, ranks):
    answer, calls = swap(registry, redraft_load=ranks, redraft_restore=[LOADED, LOADED])
    assert answer.status_code == 500
    assert "v000001 was put back" in answer.text
    assert calls == ["pause", "redraft_load", "redraft_restore", "resume"]


def test_where_nothing_was_touched_nothing_is_put_back(registry):
    answer, calls = swap(registry, redraft_load=[REFUSED, REFUSED])
    assert (answer.status_code, "still serving v000001" in answer.text) == (409, True)
    assert calls == ["pause", "redraft_load", "resume"]


def test_a_draft_that_can_not_be_put_back_is_told(registry):
    answer, calls = swap(registry, redraft_load=[BROKEN, LOADED], redraft_restore=[LOADED, BROKEN])
    assert (answer.status_code, "could not be put back" in answer.text) == (500, True)
    assert calls[-1] == "resume"


def test_a_target_that_was_overwritten_is_told(registry):
    answer, _ = swap(registry, redraft_load=[LOADED, OVERWRITTEN])
    assert (answer.status_code, "the target's weights changed" in answer.text) == (500, True)


def test_generation_is_resumed_whatever_happens(registry):
    answer, calls = swap(registry, redraft_load=[])
    assert answer.status_code == 500
    assert calls[-1] == "resume"


def test_tokens_are_compared_in_constant_time(registry, monkeypatch):
    compared = []

    def compare(given: bytes, wanted: bytes) -> bool:
        compared.append((given, wanted))
        return False

    monkeypatch.setattr(plugin_routes.hmac, "compare_digest", compare)
    assert plugin_routes.hmac is hmac
    answer, calls = swap(registry)
    assert answer.status_code == 401, "nothing else decides"
    assert compared == [(b"Bearer right", b"Bearer right")]
    assert calls == []
