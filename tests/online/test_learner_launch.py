"""The learner as `accelerate launch` starts it, and what it says where its settings are wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_fleet import TOKEN
from learner_world import World, make_draft, make_records, ship, until

ENVIRONMENT = os.environ | {
    "REDRAFT_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]),
}  # fmt: skip
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]


@pytest.mark.slow
def test_accelerate_launches_it_and_it_ends_in_good_order(random_target, tmp_path):
    world = World.make(tmp_path, random_target, make_draft(random_target, tmp_path / "draft"))
    ship(world.spool, make_records(random_target, 60))

    async def main():
        async with world.fleet():
            (tmp_path / "learner.toml").write_text(
                f'target = "{world.target}"\nregistry = "registry"\nspool = "spool"\n'
                f'[draft]\ninitial = "{world.draft}"\n[fleet]\nservers = {[fake.url for fake in world.fakes]}\n'
                "[training]\nsequence_length = 64\n[page]\nport = 0\n"
            )
            command = [*LAUNCH, "-m", "online.learner", "--config", str(tmp_path / "learner.toml")]
            with (tmp_path / "log").open("w") as log:
                process = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log)
            try:
                await until(lambda: world.entries("training"), timeout_s=200)
                await until(lambda: all(fake.version == "v000001" for fake in world.fakes))
                # "process 123 on host": the learner itself, a child of the launcher
                os.kill(int((tmp_path / "registry" / "lock").read_text().split()[1]), signal.SIGTERM)
                await until(lambda: process.poll() is not None, timeout_s=60)
            finally:
                process.kill()
            assert process.returncode == 0, (tmp_path / "log").read_text()[-2000:]

    asyncio.run(main())
    assert list((tmp_path / "learner" / "checkpoints").iterdir()), "what was trained is kept"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "absent.toml"], "there is no absent.toml"),
        (["--config", "learner.toml", "--set", "trainig.lr=1"], "did you mean training?"),
    ],
)
def test_a_wrong_setting_is_one_line(arguments, message, tmp_path):
    (tmp_path / "learner.toml").write_text('target = "t"\nregistry = "r"\nspool = "s"\n')
    command = [sys.executable, "-m", "online.learner", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
