"""The plugin's routes over a fake engine of two ranks that fail as told.

No real engine here can be made to do so.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI, WebSocket
from safetensors.numpy import save_file
from starlette.testclient import TestClient
from waiting import in_event_loop, until

from redraft.engine import hooks
from redraft.engine.counters import EMBEDS_BESIDE_DRAFT, LOG_STATS_OFF
from redraft.files.artifact import publish
from redraft.files.folder import lineage
from redraft.online.engine import routes as plugin_routes
from redraft.online.engine import swap_transaction
from redraft.online.engine.config import PluginConfig
from redraft.online.engine.engine_calls import DEAD, RefusedError
from redraft.online.engine.routes import Endpoint, OriginMiddleware, forward_origin, note_arguments
from redraft.online.engine.swap import Layout, require_same_layout
from redraft.online.engine.swap_transaction import Asked, Move, Swaps
from redraft.online.fleet.registry import Registry, hash_manifest
from redraft.online.records.origin import (
    EXTRA_ARGS_KEY,
    Origin,
    hash_salt,
    pack_arguments,
    read_origin_arguments,
    to_label,
)

READ = ["redraft_stage", "redraft_staged"]
LOADED = {"ok": True, "load_ms": 3.0, "checksum_before": "a", "checksum_after": "a"}
BROKEN = {"ok": False, "touched": True, "error": "OSError: the disk went away"}
REFUSED = {"ok": False, "touched": False, "error": "v000002 differs in config.json"}
OVERWRITTEN = LOADED | {"checksum_after": "b"}


@dataclass
class Engine:
    """The part of vLLM's engine client that the routes use."""

    answers: Mapping[str, list[dict[str, Any]]]
    """Answers of every rank, by the worker's method."""
    calls: list[str] = field(default_factory=list)
    told: list[str | None] = field(default_factory=list)
    """Folders and labels of the target that the ranks were told."""
    load_s: float = 0.0
    """Duration of a load, in seconds."""
    dies_in: str = ""
    """The method in which the engine dies. As in vLLM, it is never answered."""
    errored: bool = False
    is_asleep: bool = False
    num_pauses: int = 0
    """Pauses without a resumption."""
    pauses_in: str = ""
    """The method in which a trainer pauses too."""
    swappers: set[str] = field(default_factory=set)
    """Ids of the API processes that the ranks were told."""
    cache: str = "keep"
    """The fate of the cache, as the ranks tell it."""
    falls_asleep_in: str = ""
    """The method in which somebody else puts the engine to sleep."""
    refuses: dict[str, int] = field(default_factory=dict)
    """How often the engine refuses a call, by its name in `calls`."""
    moves: bool = False
    """Whether a pause is for other weights of the target, so that it clears the cache."""
    lineage: str = "lineage"
    keeps_external: bool = False
    """An external cache stays when the prefix cache is reset."""

    async def is_paused(self) -> bool:
        return self.is_asleep or self.num_pauses > 0

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method != "redraft_status":
            self.calls.append(method)
        if method in ("redraft_stage", "redraft_discard"):
            self.swappers.add(args[-1])
        status = {"draft_version": "v000001", "draft_intact": True, "target_intact": True}
        status |= {
            "target_fingerprint": "target",
            "target_lineage": self.lineage,
            "target_version": "17@a",
        }
        status |= {"capture": None, "asleep": self.is_asleep, "swap_cache": self.cache}
        if method in ("redraft_load_target", "redraft_name_target", "redraft_forget"):
            self.told.append(args[0])
        answer = {
            "redraft_status": [status] * 2,
            "redraft_stage": [{"ok": True}] * 2,
            "redraft_discard": [None] * 2,
            "redraft_commit": [None] * 2,
            "redraft_load_target": [{"ok": True}] * 2,
            "redraft_name_target": [None] * 2,
            **self.answers,
        }[method]
        if method == self.dies_in:
            self.errored = True
            await asyncio.Event().wait()
        self.is_asleep |= method == self.falls_asleep_in
        if method == self.pauses_in:
            await self.pause_generation(mode="keep", clear_cache=self.cache == "clear")
        if method == "redraft_load":
            await asyncio.sleep(self.load_s)
        if not answer:
            raise RuntimeError("the engine died")
        return answer

    async def pause_generation(self, **how: Any) -> None:
        assert how == {"mode": "keep", "clear_cache": self.cache == "clear" or self.moves}
        self._call("pause")
        self.num_pauses += 1

    async def reset_prefix_cache(self, **how: Any) -> bool:
        assert how == {"reset_running_requests": True, "reset_connector": True}
        self._call("reset_prefix_cache")
        return not self.keeps_external

    async def reset_encoder_cache(self) -> None:
        self._call("reset_encoder_cache")

    async def resume_generation(self) -> None:
        self._call("resume")
        self.num_pauses = 0

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.refuses.get(name, 0):
            self.refuses[name] -= 1
            raise Exception(
                f"Call to {name} method failed:\nnot now."
            )  # as vLLM's client raises what its engine said


@pytest.fixture
def registry(tmp_path):
    publish(
        tmp_path / "v000002",
        lambda folder: (folder / "weights").touch(),
        {"target_fingerprint": "target"},
    )
    return tmp_path


def staged(registry, version="v000002", **changes):
    """A rank's answer about a version in memory."""
    read = {
        "done": True,
        "error": "",
        "damaged": False,
        "manifest_sha256": hash_manifest(registry / version),
    }
    return read | changes


def make_client(registry, engine, *, can_pause=True, targets=()):
    endpoint = Endpoint()
    endpoint.config = PluginConfig(registry=registry, token="right", allow_remote=True)
    endpoint.swaps = Swaps(registry, engine, can_pause=can_pause, targets=targets)
    app = FastAPI()
    endpoint.attach_router(app)
    return TestClient(app, raise_server_exceptions=False, headers={"Authorization": "Bearer right"})


def swap(registry, load_s=0.0, body=None, **answers):
    """The answer to a swap, and the calls the engine received meanwhile."""
    engine = Engine({"redraft_staged": [staged(registry)] * 2} | answers, load_s=load_s)
    client = make_client(registry, engine)
    answer = client.post("/redraft/swap", json=body or {"version": "v000002"})
    return answer, engine.calls


@pytest.mark.parametrize("method", ["redraft_status", "redraft_stage", "redraft_load"])
def test_no_request_outlives_the_engine(registry, method):
    """A server that waits for such a request never ends, and is never started again."""
    engine = Engine(
        {"redraft_staged": [staged(registry)] * 2, "redraft_load": [LOADED] * 2}, dies_in=method
    )
    client, began_s = make_client(registry, engine), time.monotonic()
    answer = client.post("/redraft/swap", json={"version": "v000002"})
    assert answer.status_code == 503
    assert "died" in answer.text
    assert time.monotonic() - began_s < 60


def test_a_swap_pauses_loads_on_all_ranks_and_names_the_version(registry):
    answer, calls = swap(registry, redraft_load=[LOADED, LOADED | {"load_ms": 5.0}])
    assert answer.status_code == 200
    assert calls == [*READ, "pause", "redraft_load", "redraft_commit", "resume", "redraft_discard"]
    assert (answer.json()["previous"], answer.json()["load_ms"]) == ("v000001", 5.0)


def test_the_ranks_can_tell_one_api_process_from_another(registry):
    engine = Engine({"redraft_staged": [staged(registry)] * 2, "redraft_load": [LOADED] * 2})
    for number in (1, 2):
        assert (
            make_client(registry, engine)
            .post("/redraft/swap", json={"version": "v000002"})
            .status_code
            == 200
        )
        assert len(engine.swappers) == number


@pytest.mark.parametrize("cache", ["keep", "draft", "clear"])
@pytest.mark.parametrize("can_pause", [True, False])
def test_the_target_reads_again_only_if_asked(registry, cache, can_pause):
    engine = Engine(
        {"redraft_staged": [staged(registry)] * 2, "redraft_load": [LOADED] * 2}, cache=cache
    )
    client = make_client(registry, engine, can_pause=can_pause)
    assert client.post("/redraft/swap", json={"version": "v000002"}).is_success
    assert ("pause" in engine.calls) is can_pause  # which has asserted whether it clears
    assert ("reset_prefix_cache" in engine.calls) is (cache == "clear" and not can_pause)


@pytest.mark.parametrize("ranks", [[LOADED, BROKEN], [BROKEN, BROKEN], [LOADED, REFUSED]])
def test_where_a_rank_fails_half_way_every_rank_gets_the_last_good_draft_back(registry, ranks):
    answer, calls = swap(registry, redraft_load=ranks, redraft_restore=[LOADED, LOADED])
    assert answer.status_code == 500
    assert "v000001 was restored" in answer.text
    assert calls == [
        *READ,
        "pause",
        "redraft_load",
        *READ,
        "redraft_restore",
        "resume",
        "redraft_discard",
    ]


def test_stages_of_a_pipeline_without_the_draft_do_not_stop_a_swap(registry):
    with_draft = {"redraft_stage": [None, {"ok": True}], "redraft_staged": [None, staged(registry)]}
    answer, calls = swap(registry, redraft_load=[None, LOADED], **with_draft)
    assert (answer.status_code, answer.json()["load_ms"]) == (200, LOADED["load_ms"])
    answer, calls = swap(
        registry, redraft_load=[None, BROKEN], redraft_restore=[None, LOADED], **with_draft
    )
    assert (answer.status_code, "v000001 was restored" in answer.text) == (500, True)
    answer, calls = swap(registry, redraft_stage=[None, None])
    assert (answer.status_code, "no rank" in answer.text) == (409, True)
    assert "redraft_load" not in calls


class Replicas(Engine):
    """Two engines of two ranks each, as with data parallelism.

    The second one answers as told, the first one well.
    """

    @property
    def engine_core(self) -> Replicas:
        return self

    async def call_utility_all_async(self, utility: str, method: str = "", *rest: Any) -> list[Any]:
        if utility == "redraft_domains":
            return [{"code": [6, 2, 2, 2, 1]}, {"code": [1, 1, 0], "": [9, 3, 1, 1, 0, 0, 0]}]
        assert (utility, rest[0], rest[2]) == ("collective_rpc", None, None)
        told = await self.collective_rpc(method, rest[1])
        well = {"redraft_load": [LOADED] * 2, "redraft_restore": [LOADED] * 2}
        return [well.get(method, told), told]


def test_a_rank_that_fails_in_another_replica_fails_the_swap(registry):
    engine = Replicas({"redraft_staged": [staged(registry)] * 2, "redraft_load": [LOADED, BROKEN]}
                      | {"redraft_restore": [LOADED, LOADED]})  # fmt: skip
    answer = make_client(registry, engine).post("/redraft/swap", json={"version": "v000002"})
    assert (answer.status_code, "v000001 was restored" in answer.text) == (500, True)
    assert "redraft_commit" not in engine.calls


def test_the_counters_of_all_replicas_are_added_up(registry, monkeypatch):
    monkeypatch.setattr(hooks, "_installed", {"domains"})
    status = {
        "draft_version": "v000001",
        "draft_intact": True,
        "target_intact": True,
        "target_fingerprint": "target",
    }
    status |= {"asleep": False}
    capture = {"records": 3, "last_error": "", "spool_files": 1}
    ranks = [status | {"capture": capture}, status | {"capture": None}]
    engine = Replicas({"redraft_status": ranks})
    found = make_client(registry, engine).get("/redraft/status").json()
    assert found["capture"] == {"records": 6, "last_error": "", "spool_files": 2}
    assert found["num_ranks"] == 4
    assert found["positions"] == {"code": [[3, 2], [2, 1]], "": [[3, 1], [1, 0], [0, 0]]}
    assert found["drafts"] == [6, 16, 3, 1, 0]


def test_replicas_of_different_weights_have_no_version_in_common(registry):
    def ask(*versions):
        status = {
            "draft_version": "",
            "draft_intact": True,
            "target_intact": True,
            "target_fingerprint": "target",
        }
        ranks = [
            status | {"asleep": False, "capture": {}, "target_version": version}
            for version in versions
        ]
        # only one rank of each replica records, and the others have parts of the weights
        ranks = [
            part
            for rank in ranks
            for part in (rank | {"capture": {"records": 1}}, rank | {"target_version": "@part"})
        ]
        return (
            make_client(registry, Engine({"redraft_status": ranks}))
            .get("/redraft/status")
            .json()["target_version"]
        )

    assert (ask("17@a", "17@a"), ask("17@a", ""), ask("17@a", None), ask("")) == (
        "17@a",
        None,
        None,
        "",
    )


def test_weights_that_are_unclear_on_one_rank_have_no_version(registry):
    status = {
        "draft_version": "",
        "draft_intact": True,
        "target_intact": True,
        "target_fingerprint": "target",
    }
    status |= {"asleep": False, "target_version": "17@a"}
    ranks = [
        status | {"capture": {"records": 1}},
        status | {"capture": None, "target_version": None},
    ]
    engine = Engine({"redraft_status": ranks})
    assert make_client(registry, engine).get("/redraft/status").json()["target_version"] is None


def test_where_nothing_was_touched_nothing_is_put_back(registry):
    answer, calls = swap(registry, redraft_load=[REFUSED, REFUSED])
    assert (answer.status_code, "still serving v000001" in answer.text) == (409, True)
    assert calls == [*READ, "pause", "redraft_load", "resume", "redraft_discard"]


def test_a_draft_that_cannot_be_restored_is_reported(registry):
    answer, calls = swap(registry, redraft_load=[BROKEN, LOADED], redraft_restore=[LOADED, BROKEN])
    assert (answer.status_code, "could not be restored" in answer.text) == (500, True)
    assert calls[-2:] == ["resume", "redraft_discard"]


def test_a_load_that_no_rank_answers_is_a_line_and_puts_the_last_good_draft_back(registry):
    answer, calls = swap(registry, redraft_load=[], redraft_restore=[LOADED, LOADED])
    told = "a rank gave no answer: the engine died; v000001 was restored"
    assert (answer.status_code, answer.json()["detail"]) == (500, told)
    assert calls == [
        *READ,
        "pause",
        "redraft_load",
        *READ,
        "redraft_restore",
        "resume",
        "redraft_discard",
    ]
    answer, calls = swap(registry, redraft_load=[], redraft_restore=[])
    assert (answer.status_code, "and v000001 could not be restored" in answer.text) == (500, True)
    assert calls[-2:] == ["resume", "redraft_discard"]


def test_a_target_that_was_overwritten_is_told(registry):
    answer, _ = swap(registry, redraft_load=[LOADED, OVERWRITTEN])
    assert (answer.status_code, "target's weights" in answer.text) == (500, True)


def test_generation_is_resumed_whatever_happens(registry):
    answer, calls = swap(registry, redraft_load=[])
    assert answer.status_code == 500
    assert calls[-2:] == ["resume", "redraft_discard"]


@pytest.mark.parametrize("falls_asleep_in", ["", "redraft_staged"])
def test_an_engine_that_sleeps_is_left_alone(registry, falls_asleep_in):
    engine = Engine({"redraft_staged": [staged(registry)] * 2}, falls_asleep_in=falls_asleep_in)
    engine.is_asleep = not falls_asleep_in
    answer = make_client(registry, engine).post(SWAP, json=BODY)
    assert (answer.status_code, "sleeping" in answer.text) == (409, True)
    assert not {"pause", "redraft_load", "resume"} & set(engine.calls)


@pytest.mark.parametrize("cache", ["keep", "clear"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_swap_in_somebody_elses_pause_leaves_it_paused(registry, cache, fails):
    load = {"redraft_load": [LOADED, BROKEN if fails else LOADED], "redraft_restore": [LOADED] * 2}
    engine = Engine({"redraft_staged": [staged(registry)] * 2, **load}, num_pauses=1, cache=cache)
    answer = make_client(registry, engine).post(SWAP, json=BODY)
    assert answer.status_code == (500 if fails else 200), answer.text
    assert (engine.num_pauses, {"pause", "resume"} & set(engine.calls)) == (1, set())
    assert ("reset_prefix_cache" in engine.calls) is (cache == "clear" and not fails)


@pytest.mark.parametrize("pauses_in", ["redraft_load", "redraft_commit"])
def test_whoever_pauses_during_a_swap_finds_the_engine_paused_after_it(registry, pauses_in):
    answers = {"redraft_staged": [staged(registry)] * 2, "redraft_load": [LOADED] * 2}
    engine = Engine(answers, pauses_in=pauses_in)
    client = make_client(registry, engine)
    assert client.post(SWAP, json=BODY).status_code == 200
    assert (engine.calls.count("pause"), "resume" in engine.calls) == (2, False)
    engine.num_pauses, engine.pauses_in = 0, ""
    assert client.post(SWAP, json=BODY).status_code == 200
    assert engine.calls[-2:] == ["resume", "redraft_discard"]


def test_an_engine_that_falls_asleep_during_a_swap_is_resumed_by_whoever_wakes_it(registry):
    answers = {"redraft_staged": [staged(registry)] * 2, "redraft_load": [REFUSED, REFUSED]}
    engine = Engine(answers, falls_asleep_in="redraft_load")
    assert make_client(registry, engine).post(SWAP, json=BODY).status_code == 409
    assert engine.calls == [*READ, "pause", "redraft_load", "redraft_discard"]


@pytest.mark.vllm
def test_replicas_with_shared_experts_pause_only_together():
    """An API server that reaches only some of them would wait for the others without end."""
    from vllm.config import ParallelConfig

    def make(is_moe, **changes):
        parallel = ParallelConfig(
            **{"data_parallel_size": 2, "data_parallel_size_local": 1} | changes
        )
        return SimpleNamespace(
            parallel_config=parallel, model_config=SimpleNamespace(is_moe=is_moe)
        )

    for balancer in ("data_parallel_external_lb", "data_parallel_hybrid_lb"):
        assert not swap_transaction.can_pause(make(is_moe=True, **{balancer: True}))
        assert swap_transaction.can_pause(make(is_moe=False, **{balancer: True}))
    assert swap_transaction.can_pause(make(is_moe=True, data_parallel_size_local=2))
    assert swap_transaction.can_pause(make(is_moe=True, data_parallel_size=1))


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


# --- reading before the pause


@pytest.mark.parametrize(
    ("rank", "code", "told"),
    [
        (
            {"error": "model.safetensors is corrupt", "damaged": True},
            422,
            "v000002 is damaged: model.safetensors",
        ),
        (
            {"error": "v000002 differs in config.json"},
            409,
            "differs in config.json; still serving v000001",
        ),
        ({"manifest_sha256": "0" * 64}, 409, "changed while it was read"),
    ],
)
def test_a_version_that_cannot_be_read_never_pauses_the_engine(registry, rank, code, told):
    answer, calls = swap(registry, redraft_staged=[staged(registry), staged(registry, **rank)])
    assert (answer.status_code, told in answer.text) == (code, True), answer.text
    assert calls == [*READ, "redraft_discard"]


def test_a_storage_that_hangs_on_the_ranks_ends_in_504_without_a_pause(registry, monkeypatch):
    monkeypatch.setattr(swap_transaction, "STAGE_TIMEOUT_S", 0.3)
    answer, calls = swap(registry, redraft_staged=[staged(registry), staged(registry, done=False)])
    assert (answer.status_code, "longer" in answer.text) == (504, True)
    assert "still serving v000001" in answer.text
    assert calls[-1] == "redraft_discard"
    assert not {"pause", "redraft_load"} & set(calls)


def hanging(read, hangs):
    """`read`, which waits for `hangs` before v000002."""

    def read_version(folder):
        assert folder.name != "v000002" or hangs.wait(60)
        return read(folder)

    return read_version


def test_a_version_that_hangs_in_the_api_process_leaves_other_routes_and_versions_alone(
    registry, monkeypatch
):
    """Also its event loop, and the threads that vLLM shares with asyncio."""
    publish(registry / "v000003", lambda folder: (folder / "weights").touch(), {})
    monkeypatch.setattr(swap_transaction, "STAGE_TIMEOUT_S", 0.3)
    hangs, read = threading.Event(), swap_transaction._read_version
    monkeypatch.setattr(swap_transaction, "_read_version", hanging(read, hangs))
    engine = Engine(
        {"redraft_staged": [staged(registry, "v000003")] * 2, "redraft_load": [LOADED] * 2}
    )
    codes = []
    with make_client(registry, engine) as client:
        for _ in range(6):
            asked = threading.Thread(
                target=lambda: codes.append(client.post(SWAP, json=BODY).status_code)
            )
            asked.start()
            began_s = time.monotonic()
            assert client.get("/redraft/status").status_code == 200
            assert time.monotonic() - began_s < 0.25
            asked.join()
            assert codes[-1] == 504
        assert [thread.name for thread in threading.enumerate()].count("redraft-registry") == 1
        assert engine.calls == []
        assert client.post(SWAP, json={"version": "v000003"}).json()["swapped"]
    hangs.set()


class HungVersion(Engine):
    """An engine whose ranks never finish reading v000002."""

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        answers = await super().collective_rpc(method, args)
        if method == "redraft_stage":
            self.reading = Path(args[0]).name
        if method == "redraft_staged" and self.reading == "v000002":
            return [answer | {"done": False} for answer in answers]
        return answers


@in_event_loop
async def test_a_version_that_hangs_gives_way_to_the_next_one_and_to_the_way_back(registry):
    publish(registry / "v000001", lambda folder: (folder / "weights").touch(), {})
    publish(registry / "v000003", lambda folder: (folder / "weights").touch(), {})
    answers = {"redraft_staged": [staged(registry, "v000003")] * 2, "redraft_load": [LOADED] * 2}
    engine = HungVersion(answers)
    swaps = Swaps(registry, engine)
    for version, is_swapped in (("v000003", True), ("v000001", False)):
        engine.calls.clear()
        hung = [asyncio.ensure_future(swaps.swap(Asked(version="v000002"))) for _ in range(3)]
        await until(lambda: "redraft_staged" in engine.calls)
        report = await asyncio.wait_for(swaps.swap(Asked(version=version)), 60)
        assert (report["version"], report["swapped"]) == (version, is_swapped)
        for refusal in await asyncio.gather(*hung, return_exceptions=True):
            assert isinstance(refusal, RefusedError)
            assert (refusal.code, version in refusal.why) == (409, True)
        assert engine.calls.count("redraft_stage") == 1 + is_swapped, "those behind it read nothing"


@pytest.mark.parametrize(
    "asked", [{"version": "v000099"}, {"version": "v000004"}, {"manifest_sha256": "0" * 64}]
)
@in_event_loop
async def test_what_cannot_be_served_displaces_no_version_that_is_being_read(registry, asked):
    publish(registry / "v000003", lambda folder: (folder / "weights").touch(), {})
    publish(
        registry / "v000004",
        lambda folder: (folder / "weights").touch(),
        {"target_fingerprint": "another"},
    )
    engine = HungVersion({"redraft_staged": [staged(registry)] * 2, "redraft_load": [LOADED] * 2})
    swaps = Swaps(registry, engine)
    reading = asyncio.ensure_future(swaps.swap(Asked(version="v000002")))
    await until(lambda: "redraft_staged" in engine.calls)
    with pytest.raises(RefusedError):
        await swaps.swap(Asked(**{"version": "v000003"} | asked))
    engine.reading = "ends"
    assert (await asyncio.wait_for(reading, 60))["version"] == "v000002"


@in_event_loop
async def test_of_two_versions_the_one_asked_for_later_wins_although_it_was_found_first(
    registry, monkeypatch
):
    publish(registry / "v000003", lambda folder: (folder / "weights").touch(), {})
    hangs, read = threading.Event(), swap_transaction._read_version
    monkeypatch.setattr(swap_transaction, "_read_version", hanging(read, hangs))
    engine = Engine(
        {"redraft_staged": [staged(registry, "v000003")] * 2, "redraft_load": [LOADED] * 2}
    )
    swaps = Swaps(registry, engine)
    earlier = asyncio.ensure_future(swaps.swap(Asked(version="v000002")))
    await until(lambda: swaps._reads)
    assert (await swaps.swap(Asked(version="v000003")))["version"] == "v000003"
    hangs.set()
    with pytest.raises(RefusedError, match=r"v000002\b.*\bv000003"):
        await earlier
    assert engine.calls.count("redraft_load") == 1


@in_event_loop
async def test_a_swap_asked_for_twice_does_not_begin_again(registry):
    engine = Engine({"redraft_staged": [staged(registry)] * 2, "redraft_load": [LOADED] * 2})
    swaps = Swaps(registry, engine)
    reports = await asyncio.gather(*(swaps.swap(Asked(version="v000002")) for _ in range(2)))
    assert [report["version"] for report in reports] == ["v000002"] * 2
    assert engine.calls.index("redraft_commit") < engine.calls.index("redraft_stage", 2)


def test_a_load_that_hangs_is_given_up_and_generation_resumed(registry, monkeypatch):
    monkeypatch.setattr(swap_transaction, "PAUSE_TIMEOUT_S", 0.2)
    answer, calls = swap(registry, load_s=30, redraft_load=[LOADED, LOADED])
    assert (answer.status_code, "v000002" in answer.text) == (504, True)
    assert calls == [*READ, "pause", "redraft_load", "resume", "redraft_discard"]


# --- an engine that refuses


CLEAR_OR_KEEP = (
    "swap again when no request waits for a KV cache transfer, or restart this server "
    "with --swap.cache keep"
)
REFUSED_RESET = (
    "the engine could not empty its cache: Call to reset_prefix_cache method failed: not now"
)


def swap_refused(registry, refuses=None, *, can_pause=True, restored=LOADED, **engine):
    """The answer of an engine that refuses, in a line, and its calls after the draft was read."""
    answers = {"redraft_load": [LOADED] * 2, "redraft_restore": [restored] * 2}
    engine = Engine(
        {"redraft_staged": [staged(registry)] * 2, **answers}, refuses=dict(refuses or {}), **engine
    )
    answer = make_client(registry, engine, can_pause=can_pause).post(SWAP, json=BODY)
    assert "\n" not in answer.text
    assert engine.calls.pop() == "redraft_discard"
    return answer.status_code, answer.json()["detail"], engine.calls[len(READ) :]


@pytest.mark.parametrize(
    ("cache", "problem", "cure"),
    [("clear", "pause and empty its cache", CLEAR_OR_KEEP), ("keep", "pause", "swap again")],
)
def test_a_pause_that_is_refused_leaves_the_draft_and_goes_on(registry, cache, problem, cure):
    code, told, calls = swap_refused(registry, cache=cache, refuses={"pause": 1})
    assert code == 503
    assert re.search(rf"{problem}: .* pause .*: not now; .*\bv000001: {cure}$", told)
    assert calls == ["pause", "resume"]


@pytest.mark.parametrize(
    "changes", [{"refuses": {"reset_prefix_cache": 1}}, {"keeps_external": True}]
)
@pytest.mark.parametrize("restored", [LOADED, BROKEN])
def test_where_the_cache_cannot_be_emptied_the_last_good_draft_is_restored(
    registry, changes, restored
):
    code, told, calls = swap_refused(
        registry, can_pause=False, restored=restored, cache="clear", **changes
    )
    assert calls == ["redraft_load", "reset_prefix_cache", *READ, "redraft_restore"]
    problem = (
        REFUSED_RESET
        if "refuses" in changes
        else "the engine could not empty its cache: its KV connector did not"
    )
    assert told.startswith(problem)
    if restored is LOADED:
        assert (code, told.endswith(f"; v000001 was restored: {CLEAR_OR_KEEP}")) == (503, True)
    else:
        assert (
            code,
            told.endswith("; and v000001 could not be restored: swap to a good version"),
        ) == (500, True)


def test_generation_is_resumed_as_soon_as_the_pause_is_complete(registry, monkeypatch):
    monkeypatch.setattr(swap_transaction, "RESUME_POLL_S", 0.01)
    engine = Engine(
        {"redraft_staged": [staged(registry)] * 2, "redraft_load": [LOADED] * 2},
        refuses={"resume": 3},
    )
    assert make_client(registry, engine).post(SWAP, json=BODY).is_success
    assert engine.calls[-5:] == [*["resume"] * 4, "redraft_discard"]


def test_an_engine_that_never_resumes_is_told(registry, monkeypatch):
    monkeypatch.setattr(swap_transaction, "RESUME_POLL_S", 0.01)
    monkeypatch.setattr(swap_transaction, "RESUME_TIMEOUT_S", 0.2)
    code, told, calls = swap_refused(registry, refuses={"resume": 10**6})
    assert code == 503
    assert re.search(r" resume .*: not now\b", told)
    assert calls.count("resume") > 2


@pytest.mark.parametrize("refused", ["pause", "resume"])
def test_a_dead_engine_is_not_asked_again(registry, refused):
    code, told, calls = swap_refused(registry, refuses={refused: 10**6}, errored=True)
    assert (code, told) == (503, DEAD)
    assert calls.count("resume") == 1


# --- which version


SWAP, BODY = "/redraft/swap", {"version": "v000002"}


@pytest.fixture
def owned(tmp_path):
    """A learner's registry with two versions."""
    registry = Registry(tmp_path / "owned")
    with registry.owned():
        for _ in range(2):
            registry.publish(
                lambda folder: (folder / "w").touch(),
                target_fingerprint="target",
                provenance={},
                evaluation={},
            )
    return registry


def test_the_version_of_this_registry_with_these_bytes_is_taken(owned):
    body = BODY | vars(owned.identify("v000002"))
    answer, _ = swap(owned.folder, body=body, redraft_load=[LOADED, LOADED])
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"registry": "0" * 32}, "not from 000000000000: give each server one learner"),
        ({"manifest_sha256": "0" * 64}, "not 000000000000: copy the registry again"),
    ],
)
def test_a_version_of_another_registry_or_with_other_bytes_is_refused(owned, changed, told):
    answer, calls = swap(owned.folder, body=BODY | vars(owned.identify("v000002")) | changed)
    assert (answer.status_code, told in answer.text) == (409, True), answer.text
    assert calls == []


def test_a_server_whose_registry_has_no_id_stays_with_the_first_learner(registry):
    engine = Engine({"redraft_staged": [staged(registry)] * 2, "redraft_load": [LOADED, LOADED]})
    with make_client(registry, engine) as client:
        assert client.post(SWAP, json=BODY | {"registry": "a" * 32}).status_code == 200
        assert client.get("/redraft/status").json()["registry"] == "a" * 32
        assert client.post(SWAP, json=BODY | {"registry": "b" * 32}).status_code == 409
        assert client.post(SWAP, json=BODY).status_code == 200, "a learner of an earlier release"


def test_the_same_name_with_other_bytes_is_not_served_already(registry):
    publish(
        registry / "v000001",
        lambda folder: (folder / "weights").touch(),
        {"target_fingerprint": "target"},
    )
    status = {
        "draft_version": "v000001",
        "draft_intact": True,
        "target_intact": True,
        "target_fingerprint": "target",
    }
    status |= {"asleep": False}
    for manifest, is_swapped in (
        (hash_manifest(registry / "v000001"), False),
        ("0" * 64, True),
        ("", False),
    ):
        ranks = [status | {"capture": None, "manifest_sha256": manifest}]
        answer, _ = swap(
            registry, body={"version": "v000001"}, redraft_status=ranks, redraft_load=[LOADED],
            redraft_staged=[staged(registry, "v000001")],
        )  # fmt: skip
        assert answer.json()["swapped"] is is_swapped


def make_layout(name, **changes):
    return Layout(
        folder=Path(name),
        **{"settings": {"hidden_size": 4}, "tensors": {"w": "[4] of floats"}} | changes,
    )


REFUSALS = {
    "no such version": lambda registry: swap_transaction._read_version(registry / "v000009"),
    "another target": lambda registry: swap_transaction._require_target(
        swap_transaction._read_version(registry / "v000002"), "x", "lineage"
    ),
    "other settings": lambda _: require_same_layout(
        make_layout("v1"), make_layout("v2", settings={"hidden_size": 8})
    ),
    "other tensors": lambda _: require_same_layout(
        make_layout("v1"), make_layout("v2", tensors={"w": "[8] of floats"})
    ),
}


@pytest.mark.parametrize(
    ("case", "told", "cure"),
    [
        (
            "no such version",
            "no version 'v000009' in the registry",
            "ask for one that `redraft fleet versions` lists, and copy",
        ),
        (
            "another target",
            "was trained for target target, but this server runs x",
            "give the server the registry of its",
        ),
        (
            "other settings",
            "differs from the loaded draft in config.json (hidden_size)",
            "restart the server with v2, or",
        ),
        (
            "other tensors",
            "in 1 tensors (w is [8] of floats instead of [4] of floats)",
            "restart the server with v2, or publish a draft with",
        ),
    ],
)
def test_whoever_is_refused_a_version_reads_what_to_do(registry, case, told, cure):
    with pytest.raises((RefusedError, ValueError)) as error:
        REFUSALS[case](registry)
    message = str(error.value)
    assert f"{told}: {cure}" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (json.dumps({"version": "v" + 5000 * "1"}), 404),
        (json.dumps({"version": "v\u0661\u0661\u0661\u0661\u0661\u0661"}), 404),
        ('{"version": ' + 100_000 * "[", 400),
        (json.dumps({"version": "v000002", "registry": 3}), 400),
        ("[]", 400),
    ],
)
def test_an_odd_body_is_the_callers_mistake(registry, content, code):
    client = make_client(registry, Engine({}))
    assert client.post(SWAP, content=content).status_code == code


def test_a_provenance_without_end_is_damage_of_the_version(registry):
    (registry / "v000002" / "provenance.json").write_text(100_000 * "[")
    answer, calls = swap(registry)
    assert (answer.status_code, calls) == (422, [])


@pytest.mark.parametrize(
    ("method", "embeds", "stats_off", "notes"),
    [
        ("eagle3", False, False, []),
        ("eagle3", True, False, [EMBEDS_BESIDE_DRAFT]),
        ("ngram", True, True, [LOG_STATS_OFF]),
    ],
)
def test_flags_beside_which_something_does_not_work_are_noted(method, embeds, stats_off, notes):
    model = SimpleNamespace(enable_prompt_embeds=embeds)
    config = SimpleNamespace(speculative_config=SimpleNamespace(method=method), model_config=model)
    assert plugin_routes.list_notes(config, SimpleNamespace(disable_log_stats=stats_off)) == notes


# --- live counts


def test_a_tenant_is_forgotten_on_all_ranks_under_the_name_of_its_records(registry):
    engine, long = Engine({"redraft_forget": [3, 4]}), "a" * 100
    client = make_client(registry, engine)
    answer = client.post("/redraft/forget", json={"tenant": long})
    assert (answer.status_code, answer.json()) == (200, {"live_runs": 7})
    assert engine.told == [to_label(long)]
    for body in ({"tenant": " "}, {"tenant": 5}, {}, []):
        assert client.post("/redraft/forget", json=body).status_code == 400
    headers = {"Authorization": "Bearer x"}
    assert client.post("/redraft/forget", json={"tenant": "a"}, headers=headers).status_code == 401
    assert engine.calls == ["redraft_forget"]


# --- the pace


@pytest.mark.parametrize(
    ("body", "pacer", "code", "taken"),
    [
        ({"pace": "off"}, {"pace": "3", "cells": []}, 200, ["off"]),
        ({"pace": "0"}, {"pace": "0", "cells": []}, 200, ["0"]),
        ({"pace": 2}, {"pace": "2", "cells": []}, 200, ["2"]),
        ({"pace": "fast"}, {"pace": "2", "cells": []}, 400, []),
        ({"number": 2}, {"pace": "2", "cells": []}, 400, []),
        ([], {"pace": "2", "cells": []}, 400, []),
        ({"pace": "auto"}, None, 409, ["auto"]),
        ({"pace": "adaptive"}, {"pace": "auto", "cells": []}, 409, ["adaptive"]),
        ({"pace": "2"}, {"pace": "2", "adaptive": True, "cells": []}, 200, ["2"]),
    ],
)
def test_a_pace_is_taken_while_the_server_runs(registry, monkeypatch, body, pacer, code, taken):
    told = []

    async def ask(method, pace):
        told.append(pace)
        return [pacer]

    engine = Engine({})
    engine.engine_core = SimpleNamespace(call_utility_all_async=ask)
    client = make_client(registry, engine)
    monkeypatch.setattr(hooks, "_installed", {"pace"})
    answer = client.post("/redraft/pace", json=body)
    assert (answer.status_code, told) == (code, taken)
    if code == 200:
        verifies = ", adaptive" * pacer.get("adaptive", False)
        assert answer.json() == pacer | {"line": f"pace {pacer['pace']}{verifies}"}
    else:
        assert "pace" in answer.json()["detail"]


def test_a_server_without_pace_takes_none(registry):
    assert (
        make_client(registry, Engine({})).post("/redraft/pace", json={"pace": "off"}).status_code
        == 409
    )


# --- the target weights

MOVE = "/redraft/target"
TORN = {"ok": False, "touched": True, "error": "OSError: the disk went away"}


@pytest.fixture
def checkpoint(tmp_path):
    """A folder of checkpoints, and a checkpoint in it."""
    folder = tmp_path / "checkpoints" / "step-17"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({"w": np.zeros(2, np.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def move(registry, checkpoint):
    """Asks an engine to load the checkpoint; returns the answer and the engine."""

    def ask(engine=None, **body):
        engine = engine or make_moving(registry, checkpoint)
        client = make_client(registry, engine, targets=(checkpoint.parent,))
        return client.post(MOVE, json={"version": "17", "path": str(checkpoint)} | body), engine

    return ask


def make_moving(registry, checkpoint, kind=Engine, **fields):
    answers = {"redraft_staged": [staged(registry)] * 2, "redraft_load": [LOADED] * 2} | fields.pop(
        "answers", {}
    )
    return kind(answers, **{"moves": True, "lineage": lineage(checkpoint)} | fields)


def test_target_and_draft_are_loaded_in_one_pause(move, checkpoint):
    target = ["redraft_load_target", "redraft_name_target"]
    for body, staging, draft in (
        ({}, [], []),
        ({"draft": "v000002"}, READ, ["redraft_load", "redraft_commit"]),
    ):
        answer, engine = move(**body)
        assert answer.status_code == 200, answer.text
        assert (answer.json()["target_version"], answer.json()["draft_version"]) == (
            "17@a",
            "v000001",
        )
        assert engine.calls == [
            *staging,
            "pause",
            *target,
            *draft,
            "resume",
            *(["redraft_discard"] if draft else []),
        ]
        assert engine.told == [str(checkpoint), "17"]


def test_a_name_alone_touches_nothing(registry):
    engine = Engine({})
    assert make_client(registry, engine).post(MOVE, json={"version": "18"}).status_code == 200
    assert (engine.calls, engine.told) == (["redraft_name_target"], ["18"])


@pytest.mark.parametrize("draft", [{}, {"draft": "v000002"}])
def test_a_trainers_pause_stays_and_no_key_of_the_old_weights_does(
    move, registry, checkpoint, draft
):
    answer, engine = move(make_moving(registry, checkpoint, num_pauses=1), **draft)
    assert (answer.status_code, engine.num_pauses) == (200, 1)
    calls = [call for call in engine.calls if call not in READ]
    assert calls[:3] == ["redraft_load_target", "reset_prefix_cache", "reset_encoder_cache"]
    assert "resume" not in calls


class Failing(Engine):
    """An engine that fails to load the target weights once."""

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        answer = await super().collective_rpc(method, args)
        return [{"ok": True}, TORN] if method == "redraft_load_target" and args[0] else answer


def test_where_a_rank_fails_all_get_the_weights_of_before(move, registry, checkpoint):
    answer, engine = move(make_moving(registry, checkpoint, Failing))
    assert (answer.status_code, "keeps its old weights" in answer.text) == (500, True), answer.text
    assert engine.told == [str(checkpoint), None]
    assert engine.calls[-1] == "resume"


def test_half_new_weights_serve_nobody_until_a_load_succeeds(registry, checkpoint):
    engine = make_moving(
        registry, checkpoint, answers={"redraft_load_target": [{"ok": True}, TORN]}
    )
    client, body = (
        make_client(registry, engine, targets=(checkpoint.parent,)),
        {"path": str(checkpoint)},
    )
    answer = client.post(MOVE, json=body)
    assert (answer.status_code, "paused" in answer.text) == (500, True)
    assert engine.num_pauses == 1
    engine.answers = {}
    assert client.post(MOVE, json=body).status_code == 200
    assert engine.num_pauses == 0


def test_a_draft_that_fails_after_the_target_is_told_with_the_new_weights(
    move, registry, checkpoint
):
    engine = make_moving(registry, checkpoint, answers={"redraft_load": [REFUSED] * 2})
    answer, _ = move(engine, draft="v000002")
    assert answer.status_code == 409
    assert re.search(r"\btarget\b.*\bnew\b.*\bv000002\b", answer.json()["detail"])
    assert engine.calls[-2:] == ["resume", "redraft_discard"]


@in_event_loop
async def test_two_trainers_at_once_take_turns(registry, checkpoint):
    other = checkpoint.parent / "step-18"
    shutil.copytree(checkpoint, other)
    engine = make_moving(registry, checkpoint, load_s=0.01)
    swaps = Swaps(registry, engine, targets=(checkpoint.parent,))
    moves = [
        Move(folder=str(path), label=path.name, draft="v000002") for path in (checkpoint, other) * 3
    ]
    await asyncio.gather(*map(swaps.move, moves))
    assert engine.num_pauses == 0
    turns = " ".join(engine.calls).split("redraft_stage ")
    turn = (
        "redraft_staged pause redraft_load_target redraft_name_target redraft_load "
        "redraft_commit resume"
    )
    assert [each.strip() for each in turns] == ["", *[f"{turn} redraft_discard"] * 6]
    assert [Path(folder).name for folder in engine.told[::2]] == engine.told[1::2]


@in_event_loop
async def test_a_trainer_that_is_killed_between_target_and_draft_leaves_a_whole_move(
    registry, checkpoint
):
    engine = make_moving(registry, checkpoint, load_s=0.05)
    swaps = Swaps(registry, engine, targets=(checkpoint.parent,))
    asked = Move(folder=str(checkpoint), label="17", draft="v000002")
    request = asyncio.ensure_future(plugin_routes._run(swaps.move, asked))
    await until(lambda: "redraft_load" in engine.calls)
    request.cancel()
    await until(lambda: "redraft_discard" in engine.calls)
    assert engine.calls[-4:] == ["redraft_load", "redraft_commit", "resume", "redraft_discard"]
    assert engine.num_pauses == 0


def test_weights_from_anywhere_else_are_not_opened(move, checkpoint, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (checkpoint.parent / "link").symlink_to(outside)
    (checkpoint.parent / "empty").mkdir()
    paths = {
        str(outside): 403,
        str(checkpoint.parent / "link"): 403,
        f"{checkpoint.parent}/../outside": 403,
        f"{checkpoint.parent}-beside": 403,
        "checkpoints/step-17": 403,
        "/": 403,
        f"{checkpoint}\0": 422,
        str(checkpoint.parent / "empty"): 404,
        str(checkpoint.parent / "gone"): 404,
    }
    for path, code in paths.items():
        answer, engine = move(path=path)
        assert (answer.status_code, engine.calls) == (code, []), (path, answer.text)


def test_no_weights_behind_a_link_and_no_pipe_are_opened(move, checkpoint, tmp_path):
    weights = checkpoint / "model.safetensors"
    weights.rename(tmp_path / "outside.safetensors")
    weights.symlink_to(tmp_path / "outside.safetensors")
    answer, engine = move()
    assert (answer.status_code, engine.calls) == (403, []), answer.text
    weights.unlink()
    (tmp_path / "outside.safetensors").rename(weights)
    os.mkfifo(checkpoint / "beside.safetensors")
    answer, engine = move()
    assert (answer.status_code, engine.calls) == (422, []), answer.text
    (checkpoint / "beside.safetensors").unlink()
    assert move()[0].status_code == 200


def test_target_weights_are_read_whole_before_the_pause(move, checkpoint, monkeypatch):
    """A storage that hangs stops this read, and nobody else."""
    read, opened = swap_transaction.read_through, threading.Event()
    hanging = threading.Event()

    def hang(files):
        opened.set()
        hanging.wait()
        read(files)

    monkeypatch.setattr(swap_transaction, "read_through", hang)
    monkeypatch.setattr(swap_transaction, "TARGET_TIMEOUT_S", 0.3)
    answer, engine = move()
    assert (answer.status_code, engine.calls, opened.is_set()) == (504, [], True)
    hanging.set()


def test_another_model_is_not_loaded(move, registry, checkpoint):
    answer, engine = move(make_moving(registry, checkpoint, lineage="another"))
    assert (answer.status_code, engine.calls) == (409, [])


@pytest.mark.parametrize("body", [{}, {"draft": "v000002"}, {"version": 17}, {"path": ["/"]}, []])
def test_a_move_to_nothing_is_the_callers_mistake(registry, body):
    engine = Engine({})
    assert make_client(registry, engine).post(MOVE, json=body).status_code == 400
    assert engine.calls == []


def test_a_server_without_folders_loads_no_target(registry, checkpoint):
    answer = make_client(registry, Engine({})).post(MOVE, json={"path": str(checkpoint)})
    assert (answer.status_code, "--targets FOLDER" in answer.text) == (503, True)
    answer = make_client(registry, Engine({})).post(
        MOVE, json={"version": "1"}, headers={"Authorization": "Bearer x"}
    )
    assert answer.status_code == 401


def test_the_origin_of_each_kind_of_connection_reaches_the_engine() -> None:
    given: list[Any] = []
    engine = SimpleNamespace(
        generate=lambda prompt, sampling_params: given.append(sampling_params.extra_args)
    )
    forward_origin(engine, lambda salt: salt)

    def generate() -> None:
        params = SimpleNamespace(
            extra_args={"other": 1, EXTRA_ARGS_KEY: Origin("forged")._asdict()}
        )
        engine.generate(prompts.pop(0), sampling_params=params)

    prompts: list[Any] = [
        {"prompt_token_ids": [1], "cache_salt": "s"},
        SimpleNamespace(cache_salt="s"),
        "a",
        {"prompt_token_ids": [1]},
        {"prompt_token_ids": [1]},
    ]
    app = FastAPI()
    app.add_middleware(OriginMiddleware)

    @app.get("/http")
    async def answer() -> None:
        generate()

    @app.websocket("/websocket")
    async def answer_socket(socket: WebSocket) -> None:
        await socket.accept()
        await asyncio.create_task(asyncio.to_thread(generate))
        await socket.close()

    chat = SimpleNamespace(
        _effective_chat_template_kwargs=lambda asked: (
            {"add_generation_prompt": True, "cohere_format": "cmd4"} | asked
        )
    )
    note_arguments(chat)
    note_arguments(None)  # of a server without a chat API

    @app.get("/chat")
    async def answer_chat() -> None:
        assert len(chat._effective_chat_template_kwargs({"enable_thinking": False})) == 3
        generate()

    client, headers = TestClient(app), {"X-Redraft-Tenant": "acme", "X-Redraft-Opt-Out": "1"}
    client.get("/http", headers=headers)
    for more in (headers, {}):
        with client.websocket_connect("/websocket", headers=more) as socket:
            socket.receive()
    client.get("/chat", headers=headers)
    generate()  # of a caller whose headers the middleware has not read
    told = Origin("acme", opt_out=True, cache_salt=hash_salt("s"))
    assert "s" != told.cache_salt != hash_salt("\ud800") != hash_salt("") == ""
    chatted = told._replace(cache_salt="", arguments='{"enable_thinking": false}')
    assert list(map(read_origin_arguments, given)) == [told, told, Origin(), chatted, None]
    assert all(arguments["other"] == 1 for arguments in given)


@pytest.mark.parametrize(
    ("cache", "method", "is_salted"),
    [("keep", "eagle3", True), ("keep", "medusa", False), ("draft", "draft_model", False),
     ("clear", "dflash", False)],
)  # fmt: skip
@in_event_loop
async def test_after_a_swap_no_request_finds_a_block_with_keys_of_another_draft(
    registry, cache, method, is_salted
):
    def write(folder: Path) -> None:
        (folder / "weights").write_text("others")

    publish(registry / "v000001", write, {"target_fingerprint": "target"})
    engine = Engine({"redraft_load": [LOADED] * 2}, cache=cache)
    ask, serving = engine.collective_rpc, "v000001"

    async def collective_rpc(name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        shown = {"method": method, "draft_version": serving}
        shown |= {"manifest_sha256": hash_manifest(registry / serving)}
        answer = await ask(name, args)
        return [rank | shown for rank in answer] if name == "redraft_status" else answer

    engine.collective_rpc = collective_rpc
    swaps = Swaps(registry, engine)
    assert [swaps.salt_for(given) for given in (None, "tenant")] == [None, "tenant"]
    engine.answers |= {"redraft_staged": [staged(registry)] * 2}
    assert (await swaps.swap(Asked(version="v000002")))["swapped"]
    salts = [swaps.salt_for(given) for given in (None, "", "tenant")]
    assert (salts != [None, "", "tenant"]) is is_salted
    assert (salts[0] == salts[1] != salts[2]) is is_salted
    serving = "v000002"
    engine.answers |= {"redraft_staged": [staged(registry, "v000001")] * 2}
    assert (await swaps.swap(Asked(version="v000001")))["swapped"]
    assert [swaps.salt_for(given) for given in (None, "tenant")] == [None, "tenant"]


@pytest.mark.parametrize("prompt", [{"cache_salt": "s"}, {}, SimpleNamespace(cache_salt="s")])
def test_the_salt_reaches_the_engine_in_any_kind_of_prompt(prompt):
    given: list[Any] = []
    engine = SimpleNamespace(generate=lambda prompt, sampling_params: given.append(prompt))
    forward_origin(engine, lambda salt: f"v000002/{salt or ''}")
    engine.generate(prompt, sampling_params=SimpleNamespace(extra_args=None))
    read = given[0].get if isinstance(prompt, dict) else partial(getattr, given[0])
    assert read("cache_salt") == ("v000002/" if prompt == {} else "v000002/s")


def test_a_stream_of_inputs_which_has_no_salt_reaches_the_engine_after_a_swap():
    async def speak() -> AsyncIterator[str]:
        yield "input"

    stream, given = speak(), list[Any]()
    engine = SimpleNamespace(generate=lambda prompt, sampling_params: given.append(prompt))
    forward_origin(engine, lambda salt: "v000002/")
    engine.generate(stream, sampling_params=SimpleNamespace(extra_args=None))
    assert given == [stream]


def test_only_short_plain_arguments_of_the_template_are_packed() -> None:
    given = {"thinking": True, "documents": [1], "effort": "high", "continue_final_message": False}
    assert pack_arguments(given) == '{"effort": "high", "thinking": true}'
    assert pack_arguments({"documents": None}) == pack_arguments({"a": "b" * 200}) == ""
