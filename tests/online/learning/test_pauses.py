"""A learner on the cores of its servers computes while they are idle, and not much otherwise."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from recorded_heads import make_head, make_record, with_states
from waiting import wait_until

from redraft.engine.process import free_port
from redraft.online.learning import pauses
from redraft.online.learning.candidate import Candidate
from redraft.online.learning.config import Training
from redraft.online.learning.pauses import LONGEST, Pauses


class Server(http.server.ThreadingHTTPServer):
    """Answers /load as vLLM does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.running, self.asked = 0, 0
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked += 1
        body = json.dumps({"server_load": self.server.running}).encode()
        self.send_response(200 if self.path == "/load" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_no_micro_batch_is_computed_while_the_server_answers_and_all_are_once_it_is_idle(
    server: Server, random_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "LONGEST", 1e9)
    record = with_states(make_record(), random_target, "eagle3")
    candidate = Candidate(Training(sequence_length=64, accumulation=2), "eagle3", random_target)
    candidate.begin(make_head("eagle3", random_target, tmp_path / "v000001"))
    passed: list[float] = []
    courteous = Pauses(lambda: [server.url])

    def pause() -> float:
        passed.append(courteous.wait())
        return passed[-1]

    candidate.wait_for_servers, server.running = pause, 1
    # gradients are kept by thread
    step = threading.Thread(target=torch.enable_grad()(candidate.step), args=([record] * 4, 0))
    step.start()
    wait_until(lambda: server.asked >= 4)
    assert passed == []
    server.running = 0
    step.join()
    candidate.distillation.close()
    first_s, second_s = passed
    assert first_s > 3 * pauses.POLL_S
    assert second_s == 0
    assert candidate.paused_s == sum(passed)


def test_beside_servers_that_never_rest_it_computes_for_a_share_of_the_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.running, clock_s, computed_s = 2, [0.0], [0.0]
    clock = SimpleNamespace(  # of this module alone: threads of other tests sleep too
        monotonic=lambda: clock_s[0],
        process_time=lambda: computed_s[0],
        sleep=lambda seconds: clock_s.__setitem__(0, clock_s[0] + seconds),
    )
    monkeypatch.setattr(pauses, "time", clock)
    courteous, paused_s = Pauses(lambda: [server.url]), 0.0
    for _ in range(5):
        clock_s[0], computed_s[0] = clock_s[0] + 2, computed_s[0] + 2
        paused_s += courteous.wait()
    assert paused_s == pytest.approx(5 * 2 * LONGEST, rel=0.05)
    # time in which it computed nothing, because no record waited, gives no right to pause
    clock_s[0] += 100
    assert courteous.wait() == 0


def test_a_server_that_is_gone_is_not_waited_for() -> None:
    courteous = Pauses(lambda: [f"http://127.0.0.1:{free_port()}"])
    sum(range(10**6))
    assert courteous.wait() < pauses.POLL_S
