"""The learner as `accelerate launch` starts it, and the messages for wrong settings."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from fake_fleet import TOKEN
from learner_world import World, make_draft, make_records, ship
from test_learner_kills import assert_every_record_is_there_and_was_trained_once
from waiting import until

from redraft.engine.process import free_port
from redraft.files.artifact import verify
from redraft.recipes.cli.run import dispatch

ENVIRONMENT = os.environ | {
    "REDRAFT_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3]),
}  # fmt: skip
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
DDP = [
    "--config_file",
    str(Path(__file__).parents[3] / "recipes/accelerate/ddp.yaml"),
    "--main_process_port",
    "0",
]
LAUNCHES = {
    1: [*ACCELERATE, "--cpu", "--num_processes", "1"],
    2: [*ACCELERATE, *DDP, "--num_processes", "2", "--mixed_precision", "no"],
}
GONE_S = 120
START_S = 900
"""A launch imports torch and accelerate several times, on a busy machine for minutes."""


@pytest.fixture
def world(random_target, tmp_path):
    return World.make(tmp_path, random_target, make_draft(random_target, tmp_path / "draft"))


@contextmanager
def launched(world, ranks, page_port=0):
    """Start the learner on this many ranks, as a user would."""
    config, log = world.root / "learner.toml", world.root / "log"
    config.write_text(
        f'target = "{world.target}"\nregistry = "registry"\nspool = "spool"\n'
        f'[draft]\ninitial = "{world.draft}"\n[fleet]\nservers = '
        f"{[fake.url for fake in world.fakes]}\n"
        "[training]\nsequence_length = 64\nfresh_per_step = 4\nreplay_per_step = "
        "12\nrecords_per_candidate = 32\n"
        f"[page]\nport = {page_port}\n"
    )
    with log.open("a") as output:
        command = [
            *LAUNCHES[ranks],
            "-m",
            "redraft.recipes.cli",
            "learner",
            "--config",
            str(config),
        ]
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=output, stderr=output)
    try:
        yield process
    finally:
        if process.poll() is None:  # a test that failed: the learner outlives its launcher
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait()


def owner(world):
    """The rank that owns the registry: the learner itself."""
    return int((world.root / "registry" / "lock").read_text().split()[1])  # "process 123 on host"


async def returned(world, process, timeout_s=600):
    await until(lambda: process.poll() is not None, timeout_s=timeout_s)
    print((world.root / "log").read_text()[-3000:])
    return process.returncode


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAUNCHES)
def test_accelerate_launches_it_and_it_ends_in_good_order(world, ranks):
    ship(world.spool, make_records(world.target, 60))
    page_port = free_port()

    async def main():
        async with world.fleet():
            with launched(world, ranks, page_port) as process:
                await until(lambda: world.entries("training"), timeout_s=START_S)
                await until(lambda: all(fake.version == "v000001" for fake in world.fakes))
                _, half_a_request = await asyncio.open_connection("127.0.0.1", page_port)
                half_a_request.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
                os.kill(owner(world), signal.SIGTERM)
                assert await returned(world, process) == 0
                half_a_request.close()

    asyncio.run(main())
    checkpoints = list((world.root / "learner" / "checkpoints").iterdir())
    assert checkpoints, "what was trained is kept"
    for checkpoint in checkpoints:
        verify(checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("ranks_then", LAUNCHES)
def test_when_its_second_rank_is_killed_the_learner_ends_and_the_next_one_goes_on(
    world, ranks_then
):
    records = make_records(world.target, 120)

    async def main():
        async with world.fleet():
            ship(world.spool, records[:60])
            with launched(world, 2) as process:
                await until(lambda: world.entries("gate"), timeout_s=START_S)
                ranks = psutil.Process(process.pid).children()
                assert len(ranks) == 2
                next(rank for rank in ranks if rank.pid != owner(world)).kill()
                ship(world.spool, records[60:90])
                assert await returned(world, process, GONE_S) != 0
                assert not any(rank.is_running() for rank in ranks)
            with launched(world, ranks_then) as process:
                ship(world.spool, records[90:])
                await until(
                    lambda: (
                        world.last("buffer", "records") + world.last("buffer", "held_out")
                        == len(records)
                    )
                )
                await until(lambda: world.last("buffer", "lag_records") < 4)
                os.kill(owner(world), signal.SIGTERM)
                assert await returned(world, process) == 0

    asyncio.run(main())
    assert_every_record_is_there_and_was_trained_once(world, records)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "absent.toml"], "there is no absent.toml"),
        (["--config", "learner.toml", "--set", "trainig.lr=1"], "did you mean training?"),
    ],
)
def test_a_wrong_setting_is_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "learner.toml").write_text('target = "t"\nregistry = "r"\nspool = "s"\n')
    monkeypatch.chdir(tmp_path)
    assert dispatch(["learner", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said.splitlines()[-1]
    assert "Traceback" not in said
