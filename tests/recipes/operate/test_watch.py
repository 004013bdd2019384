"""Watching real HTTP servers that serve real metrics text, and the real vLLM.

The servers restart and are absent at times.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler

import httpx
import pytest
from local_server import serve_handler

from redraft.engine.counts import AcceptanceCounts
from redraft.engine.measure import read_counters
from redraft.engine.server import VllmServer
from redraft.recipes.cli.run import dispatch
from redraft.recipes.operate.watch import (
    WatchConfig,
    format_counts,
    format_poll,
    main,
    poll_servers,
    read_server,
)


def make_metrics(drafts: int, accepted: tuple[int, ...]) -> str:
    """As vLLM writes it, with two engines."""
    labels = 'engine="{}",model_name="m"'
    text = ["# TYPE vllm:spec_decode_num_drafts counter"]
    for engine in (0, 1):
        mine = labels.format(engine)
        text.append(f"vllm:spec_decode_num_drafts_total{{{mine}}} {drafts / 2}")
        text.append(
            f"vllm:spec_decode_num_draft_tokens_total{{{mine}}} {drafts / 2 * len(accepted)}"
        )
        text.append(f"vllm:spec_decode_num_accepted_tokens_total{{{mine}}} {sum(accepted) / 2}")
        for position, count in enumerate(accepted):
            name = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{mine},position="{position}"}}'
            text += [f"{name} {count / 2}", f"{name.replace('_total', '_created')} 1.7e9"]
    return "\n".join([*text, "vllm:num_requests_running 3.0", ""])


class Metrics:
    """A server whose /metrics are the next of a list, the last for ever."""

    def __init__(self, pages: list[str | None]) -> None:
        self.pages = pages

    def next(self) -> str | None:
        return self.pages.pop(0) if len(self.pages) > 1 else self.pages[0]


@contextmanager
def serving(*pages: str | None) -> Iterator[str]:
    """The address of a server with these pages; None is an error 503."""
    metrics = Metrics(list(pages))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = metrics.next() if self.path == "/metrics" else None
            self.send_response(200 if page is not None else 503)
            self.end_headers()
            self.wfile.write((page or "").encode())

        def log_message(self, *_: object) -> None: ...

    with serve_handler(Handler) as url:
        yield url


def make_config(*urls: str, **changes: object) -> WatchConfig:
    values: dict[str, object] = {"urls": urls, "interval_s": 0.01, "polls": 1}
    return WatchConfig(**{**values, **changes})  # type: ignore[arg-type]


def test_a_reading_sums_the_engines() -> None:
    with serving(make_metrics(100, (60, 30))) as url:
        assert read_server(url + "/").counts == AcceptanceCounts(
            num_drafts=100, num_draft_tokens=200, num_accepted=90, accepted_per_position=(60, 30)
        )


PACE = """redraft_pace_tokens{requests="1",context="1024"} 3.0
redraft_pace_speed_ratio{requests="1",context="1024",bound="low"} 1.24
redraft_pace_speed_ratio{requests="1",context="1024",bound="speed"} 1.41
redraft_pace_speed_ratio{requests="1",context="1024",bound="high"} 1.64
redraft_pace_gain_ratio{bound="low"} 1.12
redraft_pace_gain_ratio{bound="speed"} 1.21
redraft_pace_gain_ratio{bound="high"} 1.3
redraft_pace_explored_ratio 0.004
"""


def test_a_server_that_chooses_the_number_of_tokens_has_a_second_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(make_metrics(100, (60, 30)) + PACE) as url:
        main(make_config(url, polls=1))
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert "1.90 tokens per drafted step" in first
    assert second.strip() == (
        "pace auto: 3 tokens at 1; 1.21x [1.12, 1.30] as fast as without drafts in this server, "
        "prompts included; 0.4% explored"
    )


@pytest.mark.parametrize(
    "after",
    [
        (20, (10, 5)),  # fewer than before
        (120, (70, 20)),  # more drafts, but fewer of them accepted
    ],
)
def test_after_a_restart_everything_counts(after: tuple[int, tuple[int, ...]]) -> None:
    with serving(make_metrics(100, (60, 30)), make_metrics(*after)) as url:
        _, second = poll_servers(make_config(url))
    assert (second.counts[url].num_drafts, second.counts[url].accepted_per_position) == after


def test_a_line_has_bars_numbers_and_pace() -> None:
    counts = AcceptanceCounts(
        num_drafts=1000,
        num_draft_tokens=3000,
        num_accepted=1500,
        accepted_per_position=(1000, 500, 0),
    )
    assert (
        format_counts(counts, 100.0)
        == "2.50 tokens per drafted step  |█▄ |  1.00 0.50 0.00  100 drafts/s"
    )
    assert (
        format_counts(counts, None)
        == "2.50 tokens per drafted step  |█▄ |  1.00 0.50 0.00  1,000 drafts so far"
    )
    assert format_counts(AcceptanceCounts.zero(), 10.0) == "no drafts"


def test_acceptance_is_shown_over_time() -> None:
    with serving(
        make_metrics(100, (60, 30)), make_metrics(200, (160, 120)), make_metrics(200, (160, 120))
    ) as url:
        first, second, third = poll_servers(make_config(url, polls=2))
    assert first.counts[url].tau == pytest.approx(1.9)
    assert second.counts[url].tau == pytest.approx(1 + 1.0 + 0.9), "of these 100 drafts alone"
    assert next(format_poll(third, "now")).endswith("no drafts")


def test_a_fleet_has_a_line_of_its_own() -> None:
    pages = [make_metrics(100, (100,)), make_metrics(200, (200,))]
    others = [make_metrics(100, (0,)), make_metrics(400, (0,))]
    with serving(*pages) as url, serving(*others) as other:
        _, second = poll_servers(make_config(url, other))
    shown = list(format_poll(second, "now"))
    assert [line.split()[1] for line in shown] == [url, other, "fleet"]
    assert "1.25 tokens per drafted step" in shown[2], "100 of 400 drafts were accepted"


def test_a_server_that_comes_back_is_read_on(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(make_metrics(100, (60,)), None, make_metrics(40, (20,))) as url:
        main(make_config(url, polls=2))
    first, away, back = capsys.readouterr().out.splitlines()
    assert "1.60 tokens per drafted step" in first
    assert f"{url}/metrics" in away
    assert "1.50 tokens per drafted step" in back, "all that the new process counted"


def test_the_pace_of_a_server_that_was_silent_is_over_the_whole_gap() -> None:
    pages = [make_metrics(100, (60,)), None, make_metrics(300, (180,))]
    others = [make_metrics(100, (60,)), make_metrics(200, (120,)), make_metrics(400, (240,))]
    with serving(*pages) as url, serving(*others) as other:
        _, away, back = poll_servers(make_config(url, other, polls=2, interval_s=0.2))
    gap_s = away.durations_s[other] + back.durations_s[other]
    assert away.durations_s.keys() == {other}
    assert back.pace(url) == pytest.approx(200 / gap_s)
    assert back.pace(url, other) == pytest.approx(200 / gap_s + 200 / back.durations_s[other])
    assert f"{200 / gap_s:,.0f} drafts/s" in next(format_poll(back, "now"))


def test_too_low_a_tau_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    pages = [make_metrics(1000, (900,)), make_metrics(1100, (950,)), make_metrics(1200, (1000,))]
    with serving(*pages) as url:
        assert_ends_with_1(make_config(url, min_tau=1.8, min_drafts=200, polls=5))
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 4, "100 drafts are too few to judge, 200 are not"
    assert shown[-1] == "1.50 tokens per drafted step over 200 drafts: below 1.8"


def assert_ends_with_1(cfg: WatchConfig) -> None:
    with pytest.raises(SystemExit) as end:
        main(cfg)
    assert end.value.code == 1


def test_a_tau_that_is_high_enough_ends_with_0() -> None:
    with serving(make_metrics(100, (60,)), make_metrics(400, (360,))) as url:
        main(make_config(url, min_tau=1.9, min_drafts=200))
        main(
            replace(make_config(url, min_tau=5.0), min_drafts=1)
        )  # its counters stand still: nothing to judge


@pytest.mark.parametrize(
    ("page", "said"),
    [(None, "cannot read"), ("vllm:num_requests_running 3.0\n", "runs without a draft")],
)
def test_a_server_that_cannot_be_watched_is_one_line_and_2(
    page: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(page) as url:
        assert dispatch(["fleet", "watch", url]) == 2
    error = capsys.readouterr().err
    assert error.startswith("redraft: ")
    assert said in error
    assert error.count("\n") == 1


def test_a_page_that_is_no_page_of_counters_reaches_no_terminal() -> None:
    words = "\x1b]0;owned\x07\x1b[2J" + "x" * 5000
    for page in (f'vllm:spec_decode_num_drafts_total{{a="{words}',
                 f"vllm:spec_decode_num_drafts_total {words}"):  # fmt: skip
        with serving(page) as url, pytest.raises(ValueError, match=url) as error:
            read_server(url)
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 400


def test_an_address_where_nobody_is_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["fleet", "watch", "http://127.0.0.1:9"]) == 2
    assert "http://127.0.0.1:9/metrics" in capsys.readouterr().err


@pytest.mark.vllm
def test_the_real_servers_counters_are_read(engine_with_draft: VllmServer) -> None:
    before = read_server(engine_with_draft.url).counts
    body = {
        "model": engine_with_draft.model,
        "prompt": [20, 30, 40],
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    }
    httpx.post(f"{engine_with_draft.url}/v1/completions", json=body, timeout=60).raise_for_status()
    while (now := read_server(engine_with_draft.url).counts) == before:
        time.sleep(0.05)  # statistics follow the tokens
    counts = read_counters(engine_with_draft)
    assert (now.num_drafts, now.accepted_per_position) == (
        counts.num_drafts,
        counts.accepted_per_position,
    )
    counted = now.since(before)
    assert counted is not None
    assert len(counted.accepted_per_position) == 3
    assert 23 <= counted.num_drafts + counted.num_accepted <= 23 + 3, (
        "the last block may go beyond the end"
    )
