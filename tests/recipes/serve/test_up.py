"""`redraft up`: most of it with stand-ins for the server and the learner, the whole with an engine."""

from __future__ import annotations

import argparse
import asyncio
import errno
import functools
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import stand_in_parts
import torch
import tyro
from local_server import serve_handler
from prometheus_client import CollectorRegistry, generate_latest
from real_server import START_TIMEOUT_S
from safetensors.torch import load_file, save_file
from test_serve import write_draft, write_dspark
from tokenizers import AddedToken
from waiting import PATIENCE_S, wait_until

from benchmarks.demo.fleet import Traffic
from benchmarks.pictures.terminal import Screen as Terminal
from redraft.engine.counters import find_counts
from redraft.engine.counts import AcceptanceCounts
from redraft.engine.engine_log import last_error
from redraft.engine.process import exiting_on_sigterm, free_port
from redraft.engine.prompts import Prompt
from redraft.files.checkpoint import load_tokenizer
from redraft.files.folder import read_config
from redraft.files.lock import AlreadyOwnedError, own
from redraft.files.target_folder import TargetFolder
from redraft.heads.catalog import detect_family
from redraft.heads.families.eagle3 import Config as Eagle3Config
from redraft.heads.families.eagle3 import Eagle3
from redraft.heads.target import Target
from redraft.online.daemon.config import LearnerConfig, load_config
from redraft.online.daemon.opening import open_buffer
from redraft.online.engine.config import CaptureConfig, ServerSample
from redraft.online.engine.feed import name_owner
from redraft.online.engine.pace_status import PaceMetrics
from redraft.online.fleet.reach import REFUSED
from redraft.online.fleet.registry import Registry
from redraft.online.journal import (
    AcceptanceEntry,
    BufferEntry,
    Entry,
    FaultEntry,
    GateEntry,
    Journal,
    ServerEntry,
    StateEntry,
    SwapEntry,
    to_stderr,
)
from redraft.online.learning.config import Judging
from redraft.recipes.serve import up, up_folder, up_parts
from redraft.recipes.serve.serve_config import ServeConfig
from redraft.recipes.serve.up_config import UpConfig
from redraft.recipes.serve.vllm_flags import REFUSED_FIELDS, SHARED_COUNTS, read_flags


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


class Running:
    """A `redraft up` in a process of its own."""

    def __init__(
        self, log: Path, command: list[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        with log.open("wb") as output:
            # a shell's job in the background ignores SIGINT, and so would this process
            heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
            env = {**os.environ, **(environment or {})}
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, preexec_fn=heeds, env=env
            )

    def until(self, text: str, timeout_s: float = PATIENCE_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while text not in (said := self.log.read_text()):
            assert self.process.poll() is None, said
            assert time.monotonic() < deadline_s, said
            time.sleep(0.05)

    def end(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def start(tmp_path):
    """Start `redraft up` with stand-ins for the parts."""
    runs: list[Running] = []

    def start(*arguments: str) -> Running:
        log = tmp_path / f"up{len(runs)}.log"
        runs.append(Running(log, [sys.executable, stand_in_parts.__file__, "up", *arguments]))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.end(signal.SIGTERM)


def read_urls(folder: Path) -> list[str]:
    return [server.url for server in up_folder.read_fleet(folder)]


def events(folder: Path) -> list[str]:
    path = folder / "events"
    return path.read_text().splitlines() if path.exists() else []


def test_one_command_begins_continues_and_ends_in_order(start, target, tmp_path):
    # a path that JSON would write as two surrogates, which TOML forbids
    folder, port, draft = tmp_path / "all", str(free_port()), write_draft(tmp_path / '𝄞 "draft"')
    command = (target, "--folder", str(folder), "--draft", draft, "--", "--port", port)
    first = start(*command)
    first.until(f"ready: http://127.0.0.1:{port}")
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    first.until("learner: disk_full 28")
    first.until("\nserver: the draft takes 0.1 GB\n")
    wait_until(lambda: len(events(folder)) == 3)
    published, *parts = events(folder)
    assert published == "v000001 is published"
    assert {line.partition(" begins")[0] for line in parts} == {"learner", f"server {port}"}
    settings = load_config(folder / "learner.toml")
    assert (str(settings.target), str(settings.draft.initial)) == (target, draft)
    assert settings.draft.family == "standalone"
    with pytest.raises(AlreadyOwnedError, match=rf"{folder} .*\(process {first.process.pid} on "):
        up.main(UpConfig(target=target, folder=folder, draft=draft, vllm_args=("--port", port)))

    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    wait_until(
        lambda: {"learner ends", f"server {port} ends"} <= {*events(folder)}
    )  # the kernel told them
    token = (folder / "token").read_text()
    (folder / "events").unlink()
    again = start(*command)
    again.until("ready: ")
    wait_until(lambda: len(events(folder)) == 2)
    assert again.end() == 0
    assert events(folder)[2:] == [f"server {port} ends", "learner ends"]
    assert (folder / "token").read_text() == token
    assert "5 requests done, 2 running" in again.log.read_text()


def test_a_learner_that_dies_is_started_again_while_the_server_serves_and_others_join(
    start, target, tmp_path
):
    folder, port, other = tmp_path / "all", str(free_port()), str(free_port())
    run = start(
        target,
        "--folder",
        str(folder),
        "--draft",
        write_draft(tmp_path / "draft"),
        "--",
        "--port",
        port,
    )
    run.until("ready: ")
    wait_until(lambda: "learner begins" in str(events(folder)))
    begun = [line.split() for line in events(folder) if line.startswith("learner")]
    assert psutil.Process(int(begun[0][-1])).nice() == 19
    (server,) = [line.split() for line in events(folder) if line.startswith("server")]
    assert psutil.Process(int(server[-1])).nice() == os.getpriority(os.PRIO_PROCESS, 0)
    os.kill(int(begun[0][-1]), signal.SIGKILL)
    run.until("restarting in 1 s, serving continues")
    wait_until(
        lambda: len([line for line in events(folder) if line.startswith("learner begins")]) == 2
    )
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200

    joined = start(target, "--join", str(folder), "--", "--port", other)
    joined.until("ready: ")
    urls = [f"http://127.0.0.1:{one}" for one in (port, other)]
    wait_until(lambda: read_urls(folder) == urls)
    assert joined.end() == 0
    assert read_urls(folder) == urls[:1]
    server = next(
        line.split()[-1] for line in events(folder) if line.startswith(f"server {port} begins")
    )
    os.kill(int(server), signal.SIGKILL)
    assert run.process.wait(PATIENCE_S) == 2
    assert "redraft: the server exited" in run.log.read_text()
    assert events(folder)[-1] == "learner ends"


@pytest.fixture
def interruptible():
    """A shell's job in the background ignores SIGINT, and so would the tests that it runs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_fleet_is_locked_leaves_no_lock_behind(number, tmp_path, monkeypatch):
    open_file = os.open

    def interrupted(*arguments: Any) -> int:
        descriptor = open_file(*arguments)
        os.kill(os.getpid(), number)
        return descriptor

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", interrupted)
        with exiting_on_sigterm(), pytest.raises((SystemExit, KeyboardInterrupt)):
            up_folder.list_server(tmp_path, "http://127.0.0.1:84")
    # the traceback is gone, but a descriptor would stay open
    with own(tmp_path / "fleet.lock", "a change"):
        pass
    assert read_urls(tmp_path) == ["http://127.0.0.1:84"]


def test_serving_outlives_the_reader_of_its_output(target, tmp_path):
    folder, port = tmp_path / "all", str(free_port())
    command = [sys.executable, stand_in_parts.__file__, "up", target, "--folder", str(folder)]
    command += ["--draft", write_draft(tmp_path / "draft"), "--", "--port", port]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert any(b"ready: " in line for line in run.stdout)
        run.stdout.close()
        wait_until(lambda: "learner begins" in str(events(folder)))
        for count in (2, 3):  # each death is a line
            begun = [line for line in events(folder) if line.startswith("learner begins")]
            os.kill(int(begun[-1].split()[-1]), signal.SIGKILL)
            wait_until(lambda: str(events(folder)).count("learner begins") == count)  # noqa: B023
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        run.send_signal(signal.SIGTERM)
        run.wait(PATIENCE_S)
        assert events(folder)[-2:] == [f"server {port} ends", "learner ends"]
    finally:
        run.kill()
        run.wait()


def test_a_draft_that_the_learner_refuses_ends_it_before_the_server_begins(start, target, tmp_path):
    folder, draft = tmp_path / "all", write_draft(tmp_path / "broken")
    command = (target, "--folder", str(folder), "--", "--port", str(free_port()))
    run = start(*command[:3], "--draft", draft, *command[3:])
    assert run.process.wait(PATIENCE_S) == 2
    assert "redraft: the draft does not fit\n" in run.log.read_text()
    assert events(folder) == [], "neither the learner nor the server has begun"
    up.make_plan(
        UpConfig(
            target=target,
            folder=folder,
            draft=write_draft(tmp_path / "good"),
            vllm_args=command[4:],
        )
    )


def test_each_mistake_is_one_line_before_anything_is_written(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    port = free_port()
    draft, used = write_draft(tmp_path / "draft"), tmp_path / "used"
    used.mkdir()
    (used / "notes").touch()

    def refuse(error, said, *vllm_args, **changes):
        before = sorted(tmp_path.rglob("*"))
        given = {
            "target": target,
            "vllm_args": ("--port", str(port), *vllm_args),
            "draft": draft,
        } | changes
        with pytest.raises(error, match=said):
            up.make_plan(UpConfig(**given))
        assert sorted(tmp_path.rglob("*")) == before

    assert up.make_plan(
        UpConfig(target=target, vllm_args=("--port", str(port)), draft=draft)
    ).url.endswith(str(port))
    refuse(FileNotFoundError, "nowhere", target="./nowhere")
    refuse(FileNotFoundError, "nowhere", draft="./nowhere")
    refuse(FileExistsError, rf"{used} .*--folder", folder=used)
    refuse(FileNotFoundError, "learner.toml", draft=None, join=used)
    refuse(ValueError, "--join", join=used)
    refuse(ValueError, "--port abc", "--port", "abc")
    refuse(ValueError, rf"--draft ngram\+{draft}: .* {draft}\b", draft=f"ngram+{draft}")
    for flags in (
        ["--model", "x"],
        ["--speculative-config", "{}"],
        ["--uds", "/x"],
        ["--data-parallel-size", "2"],
    ):
        refuse(ValueError, f"^{flags[0]} ", *flags)
    refuse(ValueError, "^--data-parallel-size ", "-dp", "2")
    refuse(ValueError, "^--pipeline-parallel-size ", "-pp=2")
    for name in ("spool", "ingest", "nats.fleet", "hidden-states"):  # set here, or for others
        with pytest.raises(SystemExit):
            tyro.cli(UpConfig, args=[target, f"--capture.{name}", "x"])
    (block := tmp_path / "block").mkdir()
    write_dspark(block)
    refuse(ValueError, "DSpark", draft=str(block))
    up.make_plan(UpConfig(target=target, vllm_args=("--port", str(port), "-dp", "1"), draft=draft))
    refuse(OSError, rf"Errno {errno.ENOSPC}.*/proc", folder=Path("/proc/all"))
    with socket.create_server(("127.0.0.1", port)):
        refuse(ValueError, rf"port {port}\b.*--port 8001")

    folder = tmp_path / "all"
    plan = up.make_plan(
        UpConfig(target=target, folder=folder, draft=draft, vllm_args=("--port", str(port)))
    )
    (folder / "registry" / "current").mkdir(parents=True)
    (folder / "learner.toml").write_text(up.render_settings(plan, plan.draft, 0))
    (folder / "token").touch()
    up.make_plan(
        UpConfig(target=target, folder=folder, draft=draft, vllm_args=("--port", str(port)))
    )
    refuse(
        ValueError,
        rf"{folder} .*{draft}: .*--draft",
        folder=folder,
        draft=write_draft(tmp_path / "another"),
    )
    (other := tmp_path / "other").mkdir()
    (other / "config.json").write_text("{}")
    refuse(ValueError, rf"{folder} .*{target}: .*--folder", folder=folder, target=str(other))


@pytest.mark.parametrize("port", ["0", "80800", "-1", "8e3"])
def test_a_port_that_no_server_can_have_is_refused(target, port):
    with pytest.raises(ValueError, match=f"^--port {port} "):
        up.make_plan(UpConfig(target=target, draft="live", vllm_args=(f"--port={port}",)))


def test_a_port_is_taken_only_at_the_addresses_on_which_something_listens():
    with socket.create_server(("127.0.0.2", 0)) as listening:
        port = listening.getsockname()[1]
        taken = [up.is_taken(port, host) for host in ("127.0.0.2", "", "0.0.0.0")]
        free = [
            up.is_taken(port, host) for host in ("127.0.0.1", "localhost", "no.such.host.invalid")
        ]
    assert (taken, free) == ([True] * 3, [False] * 3)


@pytest.mark.parametrize("config", [UpConfig, ServeConfig])
def test_a_server_that_would_draft_nothing_is_refused(config):
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"^--num-speculative-tokens {count} "):
            config(target="x", num_speculative_tokens=count)


def test_a_folder_that_was_there_becomes_private_with_everything_in_it(
    target, tmp_path, monkeypatch
):
    monkeypatch.setattr(up, "publish_first", stand_in_parts.publish_first)
    (folder := tmp_path / "all").mkdir()
    (folder / "spool").mkdir()
    folder.chmod(0o755)
    (folder / "token").touch(0o600)
    draft, port = write_draft(tmp_path / "draft"), str(free_port())
    plan = up.make_plan(
        UpConfig(target=target, folder=folder, draft=draft, vllm_args=("--port", port))
    )
    up.make_private(plan.folder)
    assert up.prepare(plan)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "spool")] == [0o700] * 2
    (folder / "up.lock").symlink_to(Path(target) / "config.json")
    with pytest.raises(OSError, match=r"up\.lock"):
        up.make_plan(plan.cfg)
    assert (Path(target) / "config.json").read_text() == "{}"


def test_before_the_first_request_it_says_what_is_recorded_and_how_to_stop_it(target, tmp_path):
    tiny_eagle3 = Path(__file__).parents[2] / "assets" / "tiny-eagle3"
    assert UpConfig(target="x").capture.fraction == 0.1
    folder = tmp_path / "all"
    plan = up.make_plan(
        UpConfig(target=target, folder=folder, vllm_args=("--port", str(free_port())))
    )
    folder.mkdir()
    head = up.DraftSource(source=str(tiny_eagle3))
    (folder / "learner.toml").write_text(up.render_settings(plan, head, 0))
    cfg = load_config(folder / "learner.toml")
    assert cfg.buffer.max_bytes <= shutil.disk_usage(folder).free // 4 + (1 << 30)
    capture = ServerSample(fraction=0.25, tenants=("acme",), spool_bytes=5 * 10**8)
    said = "\n".join(up_folder.describe_records(cfg, capture))
    config = read_config(tiny_eagle3)
    layers, width = len(config["eagle_aux_hidden_state_layer_ids"]), config["hidden_size"]
    for part in (
        "25% of all requests of the tenants acme", "hidden states", str(folder / "spool"),
        str(folder / "learner" / "buffer"), "mode 0700", f"{layers * width * 2 / 1e3:.1f} kB per token",
        "0.5 GB per server", f"{cfg.buffer.max_bytes / 1e9:.1f} GB", "after 7 days",
        "X-Redraft-Opt-Out: 1", "--capture.fraction 0 ", "redraft fleet forget TENANT",
    ):  # fmt: skip
        assert part in said, part
    (nothing,) = up_folder.describe_records(cfg, ServerSample(fraction=0))
    assert nothing.startswith("records nothing")


def test_without_records_there_is_no_learner_and_the_newest_version_drafts(
    target, tmp_path, capsys
):
    folder, draft = tmp_path / "all", write_draft(tmp_path / "draft")
    given = UpConfig(
        target=target,
        folder=folder,
        draft=draft,
        vllm_args=("--port", str(free_port())),
        capture=ServerSample(fraction=0),
    )
    plan = up.make_plan(given)
    folder.mkdir()
    assert not up.prepare(plan)
    assert "--capture.fraction 0" in capsys.readouterr().out
    assert not (folder / "learner.toml").exists()
    (current := folder / "registry" / "current").mkdir(parents=True)
    for has_begun, first, expected in (
        (False, plan.draft, draft), (True, None, str(current)), (False, None, "live"),
    ):  # fmt: skip
        command = up.serve_command(replace(plan, draft=first, has_begun=has_begun), learns=False)
        assert command[command.index("--draft") + 1] == expected
        assert "--capture.spool" not in command


def test_members_that_end_in_any_way_leave_the_list_and_what_others_wrote_stays(tmp_path):
    folder, written = tmp_path, 'url = "http://10.0.0.5:8000"\ntoken_file = "other"\n'
    (folder / "fleet.toml").write_text(f"[[servers]]\n{written}")
    # In a shell's job in the background, SIGINT is ignored: this process heeds it in any case.
    script = (
        "import signal, sys, time, pathlib; from redraft.recipes.serve.up_folder import listed\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with listed(pathlib.Path(sys.argv[1]), sys.argv[2]): print(1, flush=True); time.sleep(60)"
    )
    urls = [f"http://127.0.0.1:{port}" for port in (81, 82, 83)]
    members = [
        subprocess.Popen([sys.executable, "-c", script, str(folder), url], stdout=subprocess.PIPE)
        for url in urls
    ]
    try:
        for member in members:
            assert member.stdout.readline()
        assert sorted(read_urls(folder)[1:]) == urls, "at the same time"
        members[0].kill()
        members[0].wait()
        with up_folder.listed(folder, "http://127.0.0.1:84"):
            assert set(read_urls(folder)[1:]) == {*urls[1:], "http://127.0.0.1:84"}
    finally:
        for member in members:
            member.send_signal(signal.SIGINT)
            member.wait()
            member.stdout.close()
    assert (folder / "fleet.toml").read_text() == f"[[servers]]\n{written}"


def test_a_folder_follows_the_snapshot_of_the_hub_with_which_it_began(target, tmp_path):
    port, snapshots = str(free_port()), tmp_path / "hub" / "snapshots"
    old, new, elsewhere = snapshots / "1", snapshots / "2", tmp_path / "elsewhere" / "2"
    for folder in (old, new, elsewhere):
        shutil.copytree(target, folder)
    draft, folder = write_draft(tmp_path / "draft"), tmp_path / "all"
    plan = up.make_plan(
        UpConfig(target=str(old), folder=folder, draft=draft, vllm_args=("--port", port))
    )
    (folder / "registry" / "current").mkdir(parents=True)
    (folder / "learner.toml").write_text(up.render_settings(plan, plan.draft, 0))
    assert (
        up.make_plan(UpConfig(target=str(new), folder=folder, vllm_args=("--port", port))).target
        == old
    )
    with pytest.raises(ValueError, match=rf"{folder} .*{old}\b.*--folder"):
        up.make_plan(UpConfig(target=str(elsewhere), folder=folder, vllm_args=("--port", port)))


def test_what_the_user_gives_reaches_the_server(target, tmp_path):
    draft, folder = write_draft(tmp_path / "draft"), tmp_path / "all"
    capture = ServerSample(fraction=0.1, tenants=("a", "b"), hidden_format="float8")
    args = ("--port", str(free_port()), "--host", "10.0.0.5", "--served-model-name", "mine")
    given = UpConfig(
        target=target,
        folder=folder,
        draft=draft,
        vllm_args=args,
        capture=capture,
        num_speculative_tokens=5,
    )
    plan = up.make_plan(given)
    folder.mkdir()
    (folder / "learner.toml").write_text(up.render_settings(plan, plan.draft, 0))
    before, after = (" ".join(part) for part in split_at(up.serve_command(plan, learns=True), "--"))
    for said in (
        "--num-speculative-tokens 5",
        "--allow-remote",
        "--capture.fraction 0.1",
        "--capture.tenants a b",
    ):
        assert said in before
    assert "--capture.hidden-format float8" in before
    assert after.count("--served-model-name") == 1
    cfg = tyro.cli(ServeConfig, args=[*before.split()[4:], "--", *after.split()])
    assert cfg.capture == CaptureConfig(spool=folder / "spool", **vars(capture))
    plain = replace(plan, cfg=replace(given, capture=ServerSample()))
    options, _ = split_at(up.serve_command(plain, learns=True), "--")
    assert tyro.cli(ServeConfig, args=options[4:]).capture == CaptureConfig(spool=folder / "spool")
    options, _ = split_at(up.serve_command(replace(plan, draft=None), learns=False), "--")
    cfg = tyro.cli(ServeConfig, args=options[4:])
    assert (cfg.draft, cfg.capture) == ("live", CaptureConfig(**vars(capture))), (
        "live counts heed the tenants"
    )


@pytest.mark.parametrize(("family", "learns", "expected"), [
    ("eagle3", True, "live+CURRENT"), ("mtp", True, "live+CURRENT"), ("dflash", True, None),
    ("standalone", True, None), ("eagle3", False, "live"),
])  # fmt: skip
def test_live_counts_go_before_a_head_if_a_lookup_costs_no_step_ahead(
    target, tmp_path, family, learns, expected
):
    folder = tmp_path / "all"
    expected = expected and expected.replace("CURRENT", str(folder / "registry" / "current"))
    draft = write_draft(tmp_path / "draft") if learns else None
    plan = up.make_plan(
        UpConfig(target=target, folder=folder, draft=draft, vllm_args=("--port", str(free_port())))
    )
    folder.mkdir()
    if plan.draft:
        settings = up.render_settings(plan, plan.draft, 0).replace('"standalone"', f'"{family}"')
        (folder / "learner.toml").write_text(settings)
    for on_cpu in (True, False):
        command = up.serve_command(plan, learns=learns, on_cpu=on_cpu)
        given = command[command.index("--draft") + 1] if "--draft" in command else None
        assert given == (expected if on_cpu or not learns else None)
        # At the first start, the learner has not written the first version yet.
        notes = up.list_notes(up.DraftSource.parse(given) if given else None)
        assert (SHARED_COUNTS in notes) is bool(given and given.startswith("live"))
        keeps = "--live.folder" in command
        assert keeps is bool(given and given.startswith("live"))
        assert not keeps or command[command.index("--live.folder") + 1] == str(
            folder / "live" / "server"
        )
    if learns:
        alone = replace(plan, cfg=replace(plan.cfg, draft="head"))
        assert "--draft" not in up.serve_command(alone, learns=True, on_cpu=True)


def test_a_folder_that_has_begun_serves_on_a_full_disk(target, tmp_path, monkeypatch):
    folder, draft = tmp_path / "all", write_draft(tmp_path / "draft")
    vllm_args = ("--port", str(free_port()))
    plan = up.make_plan(UpConfig(target=target, folder=folder, draft=draft, vllm_args=vllm_args))
    (folder / "registry" / "current").mkdir(parents=True)
    (folder / "learner.toml").write_text(up.render_settings(plan, plan.draft, 0))
    monkeypatch.setattr(up, "LEAST_FREE_BYTES", 1 << 62)
    assert up.make_plan(UpConfig(target=target, folder=folder, vllm_args=vllm_args)).has_begun

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(up_folder, "write_whole", fail)
        with up_folder.listed(folder, plan.url):
            full.undo()
            up_folder.list_server(folder, plan.url)  # by the watch, once there is space
            assert read_urls(folder) == [plan.url]


def test_a_head_alone_is_the_head_that_a_folder_began_with_or_a_new_one(target, tmp_path):
    folder, vllm_args = tmp_path / "all", ("--port", str(free_port()))
    given = UpConfig(target=target, folder=folder, draft="head", vllm_args=vllm_args)
    plan = up.make_plan(given)
    assert plan.draft is None
    with pytest.raises(ValueError, match=r"--capture\.fraction 0: .* no head"):
        up.make_plan(replace(given, capture=ServerSample(fraction=0)))
    (folder / "registry" / "current").mkdir(parents=True)
    head = up.DraftSource(source=write_draft(tmp_path / "draft"))
    settings = up.render_settings(replace(plan, draft=head), head, 0)
    (folder / "learner.toml").write_text(settings.replace('"standalone"', '"eagle3"'))
    assert up.make_plan(given).has_begun
    (folder / "learner.toml").write_text(settings)
    with pytest.raises(ValueError, match=r"--draft head: .*--folder"):
        up.make_plan(given)


def test_a_head_that_is_required_and_cannot_be_made_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--draft head: no head can be created"):
        up.make_new_head(tmp_path / "absent", tmp_path / "draft", 3, is_required=True)


def split_at(items, mark):
    place = items.index(mark)
    return items[:place], items[place + 1 :]


def test_a_log_that_is_moved_or_cut_ends_nothing(tmp_path):
    part = up_parts.Part("server", [sys.executable, "-c", "print('one')"], tmp_path / "log")
    part.start()
    part.process.wait()
    assert part.read_lines() == ["one"]
    part.log.rename(tmp_path / "moved")
    assert part.read_lines() == []
    assert "exit status 0" in part.why_ended
    part.log.write_text("a\n")
    assert part.read_lines() == []
    with part.log.open("a") as log:
        log.write("b\n")
    assert part.read_lines() == ["b"]


def test_a_log_is_bounded_and_no_line_is_missed(tmp_path):
    script = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
    part = up_parts.Part("server", ["tee"], tmp_path / "log", most_bytes=100)
    part.process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=part.log.open("ab")
    )
    said, read = [f"line {number:02d}" for number in range(40)], []
    for line in said:
        size = part.log.stat().st_size
        part.process.stdin.write(f"{line}\n".encode())
        part.process.stdin.flush()
        wait_until(lambda: part.log.stat().st_size > size)  # noqa: B023
        read += part.read_lines()
        assert part.log.stat().st_size <= 108
    part.process.stdin.close()
    part.process.wait()
    assert read == said
    assert "line 35" in part.log.with_suffix(".before").read_text() + part.log.read_text()


def test_a_log_that_cannot_be_copied_or_read_ends_nothing(tmp_path):
    part = up_parts.Part("server", ["true"], tmp_path / "log", most_bytes=3)
    part.start()
    part.process.wait()
    part.log.with_suffix(".before").mkdir()  # in place of a full disk: no file can be written
    part.log.write_text("one\n")
    assert part.read_lines() == ["one"]
    assert part.log.read_text() == ""
    part.log.unlink()
    part.log.mkdir()
    assert part.read_lines() == []


@pytest.mark.parametrize(
    ("gpus", "flags", "gpu", "arguments"),
    [
        ([], {}, "", ("--gpu-memory-utilization", "0.75")),
        ([], {"gpu_memory_utilization": "0.6"}, "", ()),
        (["0"], {}, "0", ("--gpu-memory-utilization", "0.75")),
        (["0"], {"gpu_memory_utilization": "0.6"}, "0", ()),
        (["0", "1"], {}, "1", ()),
        (["4", "5", "6", "7"], read_flags(["-tp", "4"]), "7", ("--gpu-memory-utilization", "0.75")),
        (["4", "5", "6", "7"], {"tensor_parallel_size": "2"}, "7", ()),
        (["0", "1"], read_flags(["--tensor-par", "2", "--gpu-memory-util=0.6"]), "1", ()),
    ],
)
def test_the_learner_takes_a_spare_gpu_or_a_share_of_the_last(gpus, flags, gpu, arguments):
    place = up.place_learner(gpus, flags)
    assert (place.gpu, place.vllm_args) == (gpu, arguments)
    assert gpu in place.line
    assert ("75%" in place.line) == bool(arguments and gpus)
    assert place.shares == ("pauses while requests run" in place.line)
    assert place.shares == (int(flags.get("tensor_parallel_size") or 1) >= len(gpus))


def test_a_learner_on_the_servers_device_leaves_it_time(target, tmp_path):
    assert up.spare_cores({"OMP_NUM_THREADS": "1"}) == {"OMP_NUM_THREADS": "1"}
    folder, draft = tmp_path / "all", write_draft(tmp_path / "draft")
    plan = up.make_plan(
        UpConfig(target=target, folder=folder, draft=draft, vllm_args=("--port", str(free_port())))
    )
    folder.mkdir()
    for gpus, shares in (([], True), (["0"], True), (["0", "1"], False)):
        placed = replace(plan, place=up.place_learner(gpus, {}))
        (folder / "learner.toml").write_text(up.render_settings(placed, plan.draft, 0))
        cfg = load_config(folder / "learner.toml")
        assert (cfg.fleet.shares_device, cfg.training.accumulation > 1) == (shares, shares)
        assert (cfg.judging.held_out_per_domain < Judging().held_out_per_domain) == (gpus == [])
        # A domain with fewer requests is not judged separately.
        assert cfg.judging.held_out_per_domain > 2 * cfg.gate.min_domain_requests
        _, given = split_at(up.serve_command(placed, learns=True), "--")
        assert ("--enable-server-load-tracking" in given) == shares
        assert ("--gpu-memory-utilization" in given) == shares
        joined = replace(placed, cfg=replace(plan.cfg, join=True))
        assert "--gpu-memory-utilization" not in up.serve_command(joined, learns=True)


@pytest.mark.parametrize("gpus", [[], ["0"], ["0", "1"]], ids=["CPU", "shared", "own GPU"])
def test_a_learner_on_the_servers_gpu_starts_when_the_server_is_ready(
    gpus, target, tmp_path, monkeypatch, capsys
):
    """While vLLM starts, it takes all new use of the GPU's memory for its own."""
    folder, draft = tmp_path / "all", write_draft(tmp_path / "draft")
    plan = up.make_plan(
        UpConfig(target=target, folder=folder, draft=draft, vllm_args=("--port", str(free_port())))
    )
    plan = replace(plan, place=up.place_learner(gpus, {}))
    folder.mkdir()
    (folder / "learner.toml").write_text(up.render_settings(plan, plan.draft, 0))
    events = []

    class Part(up_parts.Part):
        def start(self):
            events.append(self.name)
            self.process = SimpleNamespace(poll=lambda: None)

        def stop(self, timeout_s):
            self.process = None

    class Meter(up_parts.Meter):
        def read(self, now_s):
            if "ready" in events:
                raise KeyboardInterrupt
            events.append("ready")
            self.is_ready = True
            return "ready"

    monkeypatch.setattr(up, "Part", Part)
    monkeypatch.setattr(up, "Meter", Meter)
    monkeypatch.setattr(up, "LOOK_S", 0)
    with pytest.raises(KeyboardInterrupt):
        up.run(plan, learns=True)
    waits = gpus == ["0"]
    assert events == (["server", "ready", "learner"] if waits else ["learner", "server", "ready"])
    assert ("starts when the server is ready" in capsys.readouterr().out) == waits


def test_on_a_cpu_the_learner_leaves_a_core_to_the_server(monkeypatch):
    monkeypatch.setattr(up, "count_cores", lambda: 4)
    assert up.spare_cores({}) == {"OMP_NUM_THREADS": "3"}


def test_the_status_line_counts_since_the_last_reading():
    registry = CollectorRegistry()
    gain = {"speed": 1.2, "low": 1.1, "high": 1.3}
    cell = {"requests": 1, "context": 1024, "tokens": 3, "speed": 1.4, "low": 1.2, "high": 1.6}
    PaceMetrics(registry).show({"pace": "auto", "cells": [cell], "gain": gain, "explored": 0.005})
    page = generate_latest(registry).decode()

    def metrics(tokens, drafts, accepted, cached=0):
        named = {"drafts": drafts, "draft_tokens": 3 * drafts, "accepted_tokens": accepted}
        lines = [
            f'vllm:spec_decode_num_{name}_total{{engine="0"}} {value}'
            for name, value in named.items()
        ]
        lines += [
            f"vllm:prefix_cache_{name}_total {n}"
            for name, n in (("queries", 4 * cached), ("hits", cached))
        ]
        return "\n".join(
            [*lines, f"vllm:generation_tokens_total {tokens}", "vllm:request_success_total 7", page]
        )

    meter = up_parts.Meter("http://127.0.0.1:1")
    assert meter.read(0) == "the server is starting"
    meter.describe(metrics(1000, 100, 100), 10)
    meter.is_ready = True
    shown = meter.describe(metrics(1100, 140, 160), 12)
    assert "cached" not in shown
    assert "| 25% of prompt tokens cached |" in meter.describe(metrics(1100, 140, 160, 100), 13)
    assert shown.startswith(
        "7 requests done, 0 running | 50.0 tokens/s | 2.50 tokens per drafted step | pace auto: 3 "
        "tokens at 1; 1.20x [1.10, 1.30] as fast as without drafts in this server, including prompts; "
    )


def test_of_a_tracebacks_lines_the_last_one_is_shown(tmp_path, capsys):
    part, screen = up_parts.Part("server", [], tmp_path / "log"), up_parts.Screen(is_terminal=False)
    engine = "(EngineCore pid=7) ERROR 11-27 10:00:00 [core.py:9]"
    lines = [
        "(EngineCore pid=7) WARNING 11-27 10:00:00 [pace.py:1] redraft: --pace auto is off: x",
        "INFO well",
        f"{engine} Traceback",
        f"{engine} ValueError: x",
        '{"ERROR": 1}',
        "warning: the draft has 64 positions: train another",
        "warning: --uds is said before the start",
    ]
    up_parts.show_lines(screen, part, lines)
    up_parts.show_lines(screen, part, lines[:1])
    told = "server: --pace auto is off: x\n"
    warned = "server: warning: the draft has 64 positions: train another\n"
    more = f"server: ValueError: x (1 more in {part.log})\n"
    assert capsys.readouterr().out == f"{told}{warned}{more}{told}"


def test_no_client_writes_a_line_or_a_cause_of_death(tmp_path, capsys):
    """Words of clients in the log of the API server, each ended as vLLM's logger ends it."""
    api = "(APIServer pid=6) ERROR 11-27 10:00:00 [serving.py:9]"
    words = ["the model `DiskError: replace disk 3`", "DiskError: forged", "redraft: --pace is off"]
    words += ["x\u2028RuntimeError: forged", "\x1b[2Jx", "(EngineCore pid=7) ERROR ValueError: x"]
    part = up_parts.Part("server", [], tmp_path / "log")
    part.process = subprocess.Popen(["sleep", "60"])
    log = "INFO:     Application startup complete.\n"
    log += "".join(f"{api} {word}\r\n" for word in words)
    log += 'INFO:     127.0.0.1:9 - "GET /ERROR HTTP/1.1" 404 Not Found\n'
    part.log.write_text(log)
    part.takes_requests = True
    up_parts.show_lines(up_parts.Screen(is_terminal=False), part, part.read_lines())
    assert capsys.readouterr().out == ""
    assert last_error(part.log) == "its log states no cause"
    with part.log.open("a") as file:
        file.write("(EngineCore pid=7) ERROR 11-27 10:00:00 [core.py:9] OSError: no device\n")
        file.write(f"{api} ValueError: forged\r\n")
    assert last_error(part.log) == "OSError: no device"
    part.process.kill()
    part.process.wait()
    assert part.why_ended.startswith("killed by SIGKILL")
    up_parts.Screen(is_terminal=False).say("\x1b]0;title\x07 of a server")
    assert capsys.readouterr().out == r"\x1b]0;title\x07 of a server" + "\n"


def test_a_status_is_wrapped_in_the_terminal_and_replaced_as_a_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    screen, shown = up_parts.Screen(is_terminal=True), Terminal(width=40)
    status = (
        "12 requests done | 20.1 tokens/s | pace auto: 3 tokens at 1; 1.36x [1.26, 1.46] as fast as"
    )
    screen.update(f"{status} without drafts | v2 | learner: training", 0)
    screen.update("13 requests done | v2 | learner: judging", 1)
    screen.say("learner: http://127.0.0.1:8000 serves v3")
    screen.update(f"{status} without drafts | v3 | learner: training", 2)
    shown.write(capsys.readouterr().out.replace("\n", "\r\n"), 0)
    assert ["".join(char for char, _ in row.cells).rstrip() for row in shown.rows] == [
        "learner: http://127.0.0.1:8000 serves v3",
        "12 requests done | 20.1 tokens/s",
        "pace auto: 3 tokens at 1; 1.36x [1.26,",
        "1.46] as fast as without drafts | v3",
        "learner: training",
    ]


def test_a_server_that_hides_its_counters_is_not_said_to_start():
    with serve_handler(BaseHTTPRequestHandler) as url:  # which knows no GET
        assert up_parts.Meter(url).read(0) == "the server answers /metrics with status 501"


def test_answers_that_fail_are_in_the_status_line():
    page = 'http_requests_total{handler="/v1/completions",method="POST",status="%s"} 3.0'
    meter = up_parts.Meter("http://127.0.0.1:1")
    assert "failed" not in meter.describe(page % "4xx", 1)
    assert "3 failed (5xx)" in meter.describe(page % "5xx", 2)


def test_the_log_of_a_learner_tells_phase_version_and_fault(tmp_path, capsys):
    learned, journal = up_parts.Learned(), Journal(tmp_path, observers=[to_stderr])

    def tell(*entries, is_served=True):
        for entry in entries:
            journal.write(entry)
        lines = capsys.readouterr().err.splitlines()
        said = [learned.read(line, is_served=is_served) for line in lines]
        return learned.phase, learned.version, "".join(said)

    for line in (
        "Traceback",
        "{",
        "[]",
        "3",
        '{"kind": "mood"}',
        '{"kind": "state", "phase": "cheerful"}',
    ):
        assert learned.read(line, is_served=True) == ""
    assert tell() == ("starts", "", "")
    counts = {"drafts": 1.0, "accepted": 1.0, "tau": 2.0}
    told = AcceptanceEntry(server="http://a", draft_version="v000001", **counts)
    assert tell(StateEntry(phase="training"), told) == ("training", "v000001", "")
    assert tell(AcceptanceEntry(draft_version="v000000", **counts))[1] == "v000001", (
        "of records, not of a server"
    )
    refused, swapped = (
        SwapEntry(server="http://a", version=version, outcome=outcome)
        for version, outcome in (("v000003", "refused"), ("v000002", "swapped"))
    )
    refusal = "http://a does not serve v3 (refused): it is torn"
    assert tell(msgspec.structs.replace(refused, reason="it is torn"))[1:] == ("v000001", refusal)
    assert tell(swapped) == ("training", "v000002", "http://a serves v2")
    full = FaultEntry(what="disk_full", detail="28", reason="no space")
    assert tell(full)[2] == "disk_full 28: no space"
    back = {"from_version": "v000002", "outcome": "rolled_back", "reason": "tau fell"}
    assert tell(SwapEntry(server="http://a", version="v000001", **back))[1:] == (
        "v000001",
        "http://a returned from v2 to v1: tau fell",
    )
    gate = {"incumbent": "v000001", "tau_incumbent": 1.4, "tau_candidate": 1.62, "requests": 44}
    passed = "v2 passed the gate on 44 requests, with tau 1.62 (now 1.40); it is rolled out to the servers"
    assert tell(GateEntry(verdict="promote", candidate="v000002", **gate))[2] == passed
    assert tell(GateEntry(verdict="reject", candidate="v000003", **gate))[2] == ""
    loads, wrong = (
        FaultEntry(what="server_unreachable", detail="http://a", reason=f"http://a: {reason}")
        for reason in (REFUSED, "answers GET /redraft/status with 401")
    )
    assert tell(loads, is_served=False)[2] == "", "nothing listens while a server loads"
    assert "nothing listens" in tell(loads)[2]
    assert "with 401" in tell(wrong, is_served=False)[2]


def test_a_learner_that_keeps_dying_waits_longer_each_time():
    restarts, said, starts = up_parts.Restarts(), [], []

    class Dead:
        name, begun_s, has_ended, why_ended = "learner", 0.0, True, "ValueError: x"

        def start(self):
            starts.append(now_s)
            self.begun_s = now_s

    learner, now_s = Dead(), 0.0
    while len(starts) < 8:
        restarts.follow(learner, now_s, said.append)
        now_s += 1
    waits = [later - earlier for earlier, later in zip([-1, *starts], starts, strict=False)]
    assert waits == [2, 3, 5, 9, 17, 33, 61, 61]  # a second more, in which it was seen to be dead
    assert "ValueError: x" in said[0]


def test_a_new_head_is_one_that_a_learner_begins_with(tiny_target, tmp_path):
    up.write_new_head(tiny_target, tmp_path / "draft", 3, most_ids=100)
    assert detect_family(tmp_path / "draft").name == "eagle3"
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    proposed = {*range(100), *TargetFolder.open(tiny_target).end_ids}
    assert set((tensors["d2t"] + torch.arange(len(tensors["d2t"]))).tolist()) == proposed
    folder = tmp_path / "all"
    plan = up.make_plan(
        UpConfig(target=str(tiny_target), folder=folder, vllm_args=("--port", str(free_port())))
    )
    folder.mkdir()
    (folder / "learner.toml").write_text(
        up.render_settings(plan, up.DraftSource(source=str(tmp_path / "draft")), 0)
    )
    cfg = load_config(folder / "learner.toml")
    width = read_config(tiny_target)["hidden_size"]
    assert (cfg.training.optimizer, cfg.training.lr) == (
        "muon",
        pytest.approx(min(2e-3, 1.15 / width), rel=0.05),
    )
    up.publish_first(folder / "learner.toml")
    assert Registry(cfg.registry).current() == "v000001"


def test_a_new_head_proposes_the_words_that_answers_of_a_chat_are_full_of(tiny_target, tmp_path):
    target = shutil.copytree(tiny_target, tmp_path / "target")
    tokenizer = TargetFolder.open(target).tokenizer
    (word,) = tokenizer.convert_ids_to_tokens([300])
    tokenizer.add_tokens([AddedToken(word, special=False)])
    tokenizer.save_pretrained(target)
    up.write_new_head(target, tmp_path / "draft", 3, most_ids=100)
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    proposed = (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).tolist()
    assert set(proposed) == {*range(100), 300, *TargetFolder.open(target).end_ids}


def quantise(target: Path, folder: Path) -> Path:
    """A copy whose layers are packed as AWQ does it."""
    shutil.copytree(target, folder)
    tensors = load_file(folder / "model.safetensors")
    packed = {
        name.replace("_proj.weight", "_proj.qweight"): tensor.to(torch.int32)
        if "_proj" in name
        else tensor.to(torch.float16)
        for name, tensor in tensors.items()
    }
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    config = read_config(folder) | {"quantization_config": {"quant_method": "awq"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def begin(plan: up.Plan, draft: Path) -> LearnerConfig:
    """Publish a folder's first version, as `redraft up` does."""
    plan.folder.mkdir()
    settings = plan.folder / "learner.toml"
    settings.write_text(up.render_settings(plan, up.DraftSource(source=str(draft)), 0))
    up.publish_first(settings)
    return load_config(settings)


def test_a_quantised_target_has_a_new_head_too_that_says_where_it_starts(
    tiny_target, tmp_path, capsys
):
    target = quantise(tiny_target, tmp_path / "target")
    assert str(up.make_new_head(target, tmp_path / "draft", 3)) == str(tmp_path / "draft")
    assert re.search(r"random weights.*\(awq\).*--draft", capsys.readouterr().out)
    head = load_file(tmp_path / "draft" / "model.safetensors")
    norm = load_file(target / "model.safetensors")["model.norm.weight"]
    assert torch.equal(head["norm.weight"], norm.bfloat16())
    plan = up.make_plan(
        UpConfig(
            target=str(target), folder=tmp_path / "all", vllm_args=("--port", str(free_port()))
        )
    )
    cfg = begin(plan, tmp_path / "draft")
    assert Registry(cfg.registry).current() == "v000001"


def test_a_learner_takes_an_eagle_3_head_that_lists_no_layers(tiny_target, tmp_path):
    head = Eagle3(Eagle3Config(), Target.from_folder(tiny_target))
    head.lm_head.weight.data *= 1.01  # a trained head differs from the target's
    head.export(tmp_path / "draft")
    config = read_config(tmp_path / "draft")
    for key in ("eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states", "redraft"):
        del config[key]
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    vllm_args = ("--port", str(free_port()))
    draft = str(tmp_path / "draft")
    plan = up.make_plan(
        UpConfig(target=str(tiny_target), folder=tmp_path / "all", draft=draft, vllm_args=vllm_args)
    )
    cfg = begin(plan, tmp_path / "draft")
    width = 2 * 3 * config["hidden_size"]
    shown = f"{width / 1e3:.1f} kB per token"
    assert any(shown in line for line in up_folder.describe_records(cfg, ServerSample()))
    with open_buffer(cfg, Registry(cfg.registry), "0" * 64):
        pass


def test_a_share_of_a_gpu_that_fits_no_training_step_is_warned_of(tiny_target, tmp_path):
    up.write_new_head(tiny_target, tmp_path / "draft", 3, most_ids=100)
    vllm_args = ("--port", str(free_port()))
    plan = up.make_plan(
        UpConfig(target=str(tiny_target), folder=tmp_path / "all", vllm_args=vllm_args)
    )
    plan = replace(plan, place=up.place_learner(["3"], {}))
    cfg = begin(plan, tmp_path / "draft")
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    num_weights = sum(t.numel() for name, t in tensors.items() if name not in ("d2t", "t2d"))
    config = read_config(tiny_target)
    tables = 2 - bool(config.get("tie_word_embeddings"))
    need = 12 * num_weights + 2 * tables * config["vocab_size"] * config["hidden_size"]
    assert up.find_shortage(plan, cfg, 4 * need) == ""
    warning = up.find_shortage(plan, cfg, 4 * need - 8)
    assert re.search(r"GPU 3 .*--gpu-memory-utilization.*--capture\.fraction 0", warning)
    half = replace(plan, flags={"gpu_memory_utilization": "0.5"})
    assert up.find_shortage(half, cfg, 4 * need - 8) == ""
    assert up.find_shortage(half, cfg, 2 * need - 8)
    assert up.find_shortage(replace(plan, flags={"gpu_memory_utilization": "x"}), cfg, 1) == ""


def test_the_memory_of_a_gpu_is_read_or_unknown(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\ncase "$*" in *--id=1) echo 24564;; *) echo none;; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert up.read_gpu_bytes("1") == 24564 << 20
    assert up.read_gpu_bytes("9") == 0


def test_a_target_of_too_few_layers_has_live_counts(random_target, tmp_path, capsys):
    assert str(up.make_new_head(random_target, tmp_path / "draft", 3)) == "live"
    assert "a target of 2 layers" in capsys.readouterr().out
    assert not (tmp_path / "draft").exists()


# --- the engine


def up_command(target: Path, port: str, *options: str) -> list[str]:
    command = [sys.executable, "-m", "redraft.recipes.cli", "up", str(target), *options]
    command += [
        "--",
        "--port",
        port,
        "--host",
        "127.0.0.1",
        "--dtype",
        "float32",
        "--max-model-len",
        "512",
    ]
    command += ["--enforce-eager", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]
    return [*command, "--kv-cache-memory-bytes", str(64 << 20), "--served-model-name", "m"]


def read_status(folder: Path, port: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {(folder / 'token').read_text().strip()}"}
    return httpx.get(f"http://127.0.0.1:{port}/redraft/status", headers=headers, timeout=600).json()


def answer(
    port: str,
    prompt: list[int],
    salt: str | None = None,
    seed: int | None = None,
    **headers: str,
) -> list[int]:
    """24 tokens, greedy ones without a seed."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 24, "ignore_eos": True}
    body |= {"temperature": 0 if seed is None else 1, "seed": seed}
    body |= {"return_token_ids": True, "cache_salt": salt}
    found = httpx.post(
        f"http://127.0.0.1:{port}/v1/completions", json=body, headers=headers, timeout=600
    )
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["token_ids"]


def test_up_passes_a_pace_on_and_refuses_one_before_it_writes_a_file(target, tmp_path):
    folder, args = tmp_path / "all", ("--port", str(free_port()))
    for pace, said in (
        ("fast", "fast is not a valid pace"),
        ("adaptive", "--pace adaptive needs full CUDA"),
    ):
        with pytest.raises(ValueError, match=said):
            up.main(UpConfig(target=target, folder=folder, pace=pace, vllm_args=args))
    assert not folder.exists()
    plan = up.make_plan(
        UpConfig(target=target, folder=folder, pace="2", draft="ngram", vllm_args=args)
    )
    command = up.serve_command(plan, learns=False)
    assert command[command.index("--pace") + 1] == "2"


@pytest.mark.vllm
@pytest.mark.slow
def test_from_an_empty_folder_a_head_is_served_paced_recorded_and_stopped(tiny_target, tmp_path):
    folder, port = tmp_path / "all", str(free_port())
    command = up_command(tiny_target, port, "--folder", str(folder), "--capture.fraction", "1")
    run = Running(tmp_path / "log", command)
    try:
        run.until("ready: ", START_TIMEOUT_S)
        for _ in range(8):
            answer(port, list(range(20, 60)))
        status = read_status(folder, port)
        assert status["draft_version"] == "v000001"
        assert status["pace"]["line"].startswith("pace auto: ")
        # Its one layer is as large as each of the target's seven.
        assert status["draft_bytes"]["kv_cache"] == pytest.approx((64 << 20) / 8, rel=0.05)
        weights = (folder / "registry" / "v000001" / "model.safetensors").stat().st_size
        assert status["draft_bytes"]["weights"] == pytest.approx(weights, rel=0.05)
        sizes = (size / 1e9 for size in status["draft_bytes"].values())
        run.until(
            "server: the draft takes {:.3f} GB for weights and {:.3f} GB of the KV cache".format(
                *sizes
            )
        )
        run.until("server: --pace at 0 tokens: the draft only reads prompts")
        wait_until(
            lambda: [
                e
                for e in journal(folder)
                if isinstance(e, BufferEntry) and e.records + e.held_out >= 8
            ]
        )
    finally:
        code = run.end()
    assert code == 0, run.log.read_text()
    assert (folder / "logs" / "server.log").exists()


@pytest.fixture(scope="module")
def live_server(tiny_target, tmp_path_factory):
    """Port and folder of `redraft up` with its default draft, started from an empty folder.

    On a CPU, live counts draft before a new head. Its output has lost its reader.
    """
    folder, port = tmp_path_factory.mktemp("live") / "all", str(free_port())
    command = up_command(tiny_target, port, "--folder", str(folder), "--pace", "off")
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        said = []
        for line in run.stdout:
            said.append(line.decode())
            if said[-1].startswith("ready: "):
                break
        assert said[-1].startswith("ready: "), "".join(said)
        run.stdout.close()
        yield port, folder
        assert run.poll() is None, "it serves on"
    finally:
        run.terminate()
        run.wait()


@pytest.mark.vllm
def test_live_counts_draft_what_the_same_tenant_was_answered_before_until_it_is_forgotten(
    live_server,
):
    port, folder = live_server
    asked = {"heard": list(range(20, 60)), "private": list(range(120, 160))}
    private = {"X-Redraft-Opt-Out": "1"}

    def accept(prompt: list[int], salt: str | None = None, **headers: str) -> tuple[list[int], int]:
        """The answer, and how many of its tokens were drafted."""
        before = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        found = answer(port, prompt, salt, **headers)
        after = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        counts = find_counts(after) or AcceptanceCounts.zero()
        new = counts.since(find_counts(before) or AcceptanceCounts.zero()) or counts
        return found, round(new.num_drafts * (new.tau - 1))

    first, others = accept(asked["heard"]), accept(asked["private"], **private)
    for _ in range(4):  # later steps count finished answers
        again = accept(asked["heard"])
    later = accept(asked["private"], **private)
    strangers = [
        accept(asked["heard"], **private),
        accept(asked["heard"], **{"X-Redraft-Tenant": "spy"}),
        accept(asked["heard"], "a salt"),
    ]
    accept(asked["heard"], **{"X-Redraft-Tenant": "spy"})
    found = httpx.post(
        f"http://127.0.0.1:{port}/redraft/forget",
        json={"tenant": "spy"},
        headers={"Authorization": f"Bearer {(folder / 'token').read_text().strip()}"},
    )
    file = folder / "live" / "server" / "live-0.safetensors"
    content = file.read_bytes()  # at once without what was forgotten
    forgotten = accept(asked["heard"], **{"X-Redraft-Tenant": "spy"})
    kept = accept(asked["heard"])
    # its own answers would be drafted for it from the second time on
    sampled = [answer(port, asked["heard"][:20], seed=7) for _ in range(6)]
    prompts = [
        list(range(first, first + 5 + 3 * number))
        for number, first in enumerate(range(200, 2600, 200))
    ]
    alone = [answer(port, prompt) for prompt in prompts]
    with ThreadPoolExecutor(6) as clients:  # drafts of different lengths in a step
        together = [list(clients.map(functools.partial(answer, port), prompts)) for _ in range(3)]
    assert again[0] == first[0], "drafts change no answer"
    assert again[1] >= 15 > first[1], "of 24 tokens, three in four steps of four"
    assert later[0] == others[0]
    assert later[1] < 10, "nothing was learned from it"
    for stranger in (*strangers, forgotten):
        assert stranger[0] == first[0]
        assert stranger[1] < 10, "others are not drafted what one was answered"
    assert (found.status_code, found.json()["live_runs"] > 20) == (200, True), found.text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    named = [name_owner(tenant).hex().encode() in content for tenant in ("spy", "")]
    assert named == [False, True]
    assert kept[1] >= 15
    assert together == [alone] * 3
    assert sampled == sampled[:1] * 6, "drafts change no answer of a seed"


@pytest.mark.vllm
def test_beside_a_draft_vllm_refuses_two_fields_of_a_request_and_takes_the_others(live_server):
    url = f"http://127.0.0.1:{live_server[0]}/v1/completions"
    plain = {"model": "m", "prompt": "The module os is", "max_tokens": 12, "temperature": 0}

    def ask(**fields):
        return httpx.post(url, json=plain | fields, timeout=600)

    def texts(**fields):
        found = ask(**fields)
        assert found.status_code == 200, found.text
        return [choice["text"] for choice in found.json()["choices"]]

    refused = {"min_p": {"min_p": 0.1, "temperature": 1}, "logit_bias": {"logit_bias": {"5": 100}}}
    assert set(refused) == set(REFUSED_FIELDS)
    for name, fields in refused.items():
        found = ask(**fields)
        assert (found.status_code, name in found.text) == (400, True), found.text
    (greedy,) = texts()
    same = {"prompt_logprobs": 2, "logprobs": 3, "priority": 3, "min_tokens": 8, "best_of": 2}
    for name, value in same.items():
        assert texts(**{name: value}) == [greedy], name
    assert re.fullmatch("[0-9]{3}", texts(structured_outputs={"regex": "[0-9]{3}"})[0])
    assert len(texts(n=3, temperature=1)) == 3
    assert len(texts(use_beam_search=True, n=2)) == 2
    word = greedy.split()[0]
    assert word not in texts(bad_words=[word])[0].split()


def journal(folder: Path) -> list[Entry]:
    return Journal(folder / "learner" / "journal").read().entries


QUICK_LEARNER = {
    "training": "records_per_candidate = 64\nsequence_length = 128",
    "fleet": "poll_s = 1",
    "gate": "min_gain = 0.0\nconfidence = 0.6\nmin_requests = 10\nmin_domain_requests = 10",
    "rollout": "warm_up_s = 0\nmin_drafts = 200\nmax_loss = 0.5\npoll_s = 0.5\nwatch_s = 1",
}
"""Settings of a learner that promotes what a minute of training has made better."""


@pytest.mark.vllm
@pytest.mark.slow
def test_a_version_is_promoted_and_swapped_and_a_server_that_joins_serves_it(tiny_target, tmp_path):
    folder, ports = tmp_path / "all", [str(free_port()), str(free_port())]
    everything = ("--capture.fraction", "1")
    command = up_command(tiny_target, ports[0], "--folder", str(folder), *everything)
    one_core = [{"VLLM_CPU_OMP_THREADS_BIND": str(core)} for core in range(2)]
    run = Running(tmp_path / "first", command)
    wait_until((folder / "registry" / "current").exists)
    assert run.end() == 0, run.log.read_text()
    settings = (folder / "learner.toml").read_text()
    for table, lines in QUICK_LEARNER.items():
        before, _, after = settings.partition(f"[{table}]\n")
        own, mark, rest = after.partition("\n[")
        for key in re.findall(r"^\w+ = ", lines, re.MULTILINE):
            own = re.sub(rf"^{key}.*\n?", "", own, flags=re.MULTILINE)
        settings = f"{before}[{table}]\n{lines}\n{own}{mark}{rest}"
    (folder / "learner.toml").write_text(settings)

    tokens = load_tokenizer(tiny_target)(Path(argparse.__file__).read_text())["input_ids"]
    prompts = [
        Prompt(token_ids=tokens[i : i + 32], domain="code") for i in range(0, len(tokens) - 32, 11)
    ]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    traffic = Traffic(urls[:1], {"code": prompts}, clients=4, max_tokens=24, pause_s=0.1)

    async def until_promoted() -> None:
        async with asyncio.timeout(900), traffic.flowing():
            while (await asyncio.to_thread(read_status, folder, ports[0]))[
                "draft_version"
            ] == "v000001":
                await asyncio.sleep(1)

    runs = [Running(tmp_path / "again", command, one_core[0])]
    try:
        runs[0].until("ready: ", START_TIMEOUT_S)
        asyncio.run(until_promoted())
        assert traffic.failures == []
        joining = up_command(tiny_target, ports[1], "--join", str(folder), *everything)
        runs.append(Running(tmp_path / "joined", joining, one_core[1]))
        runs[1].until("ready: ", START_TIMEOUT_S)
        registry = Registry(folder / "registry")
        wait_until(
            lambda: (
                {read_status(folder, port)["draft_version"] for port in ports}
                == {registry.current()}
            )
        )
        assert registry.current() != "v000001"
        assert urls[0] in {
            e.server for e in journal(folder) if isinstance(e, SwapEntry) and e.outcome == "swapped"
        }
        changes = [(e.server, e.change) for e in journal(folder) if isinstance(e, ServerEntry)]
        # a learner that starts again sees its server join again
        assert list(dict.fromkeys(changes)) == [(url, "joined") for url in urls]
        assert answer(ports[0], tokens[:32]) == answer(ports[1], tokens[:32])
    finally:
        parts = [
            part
            for run in runs
            for part in psutil.Process(run.process.pid).children(recursive=True)
        ]
        codes = [run.end() for run in reversed(runs)]
    assert codes == [0, 0], [run.log.read_text() for run in runs]
    assert len(parts) >= 5
    assert not any(part.is_running() for part in parts)
    assert "stopping the server, then the learner" in runs[0].log.read_text()
    assert read_urls(folder) == urls[:1]
