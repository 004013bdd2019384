"""`redraft learner`, `versions`, `swap` and `rollback`, with a learner that runs and without one."""

from __future__ import annotations

import asyncio
import errno
import shutil
from dataclasses import replace

import pytest
from fake_fleet import TOKEN
from learner_world import QUICK, World, make_draft
from waiting import until

from redraft.files.folder import fingerprint
from redraft.files.lock import AlreadyOwnedError
from redraft.online.daemon import control
from redraft.online.daemon.config import load_config
from redraft.online.daemon.state import Phase, State, load, save
from redraft.online.fleet.registry import Registry
from redraft.recipes.cli.run import dispatch
from redraft.recipes.operate import forget, rollback, swap, versions


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)


@pytest.fixture(scope="module")
def draft(random_target, tmp_path_factory):
    return make_draft(random_target, tmp_path_factory.mktemp("draft"))


@pytest.fixture
def world(random_target, draft, tmp_path):
    return World.make(tmp_path, random_target, draft)


def publish(world):
    return world.registry.publish(
        lambda folder: shutil.copytree(world.draft, folder, dirs_exist_ok=True),
        target_fingerprint=fingerprint(world.target),
        provenance={"trained_from": "v000001"},
        evaluation={"verdict": "promote: tau 2.000 -> 2.100"},
    )


def test_the_printed_settings_can_be_read_back(capsys, tmp_path):
    assert dispatch(["learner", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert 'One of "no", "bf16".' in printed.replace("\n# ", " ")
    (tmp_path / "learner.toml").write_text(printed)
    assert load_config(tmp_path / "learner.toml").training.fresh_per_step == 4


def test_the_printed_settings_have_the_values_of_set(capsys, tmp_path):
    given = ["--set", "training.lr=5e-4", "--set", 'target="models/mine"', "--set=fleet.poll_s=5"]
    assert dispatch(["learner", "--print-config", *given]) == 0
    (tmp_path / "learner.toml").write_text(capsys.readouterr().out)
    config = load_config(tmp_path / "learner.toml")
    assert (config.training.lr, config.fleet.poll_s) == (5e-4, 5)
    assert config.target == tmp_path / "models/mine"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainig.lr=1", "did you mean training?"),
        ("training.lr=fast", "--set training.lr=fast is not valid TOML"),
        ('training.lr="fast"', "--set training.lr: "),
        ("training=1", "--set training must be a table"),
    ],
)
def test_a_wrong_set_is_refused_before_anything_is_printed(override, said, capsys):
    assert dispatch(["learner", "--print-config", "--set", override]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert (shown.err.count("\n"), shown.out) == (1, "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["learner", "--config", "absent.toml"], "redraft learner --print-config"),
        (["learner", "--set", "trainig.lr=1"], "did you mean training?"),
        (["learner"], "no servers are configured: set fleet.servers"),
        (
            ["learner", "--set", "trainig.lr=1"],
            "--set trainig.lr=1: there is no setting trainig: did you mean training?",
        ),
        (
            ["learner", "--set", "fleet.poll_s='x'"],
            "learner.toml with --set: fleet.poll_s: expected `float`, got `str`",
        ),
        (
            ["learner", "--set", "judging.draft_sample_method='x'"],
            "judging.draft_sample_method: invalid enum value 'x': choose from 'greedy', 'probabi",
        ),
        (
            ["learner", "--set", "training.mixed_precision='x'"],
            "training.mixed_precision: invalid enum value 'x': choose from 'no', 'bf16'",
        ),
        (["learner", "--set", "rollout.confidence=3"], "rollout.confidence must be between 0.5"),
        (["learner", "--set", "page.port=99999"], "page.port is 99999: a port is a number up to"),
        (["fleet", "swap", "v000007", "--config", "bare.toml"], "bare.toml: target is missing"),
        (["fleet", "swap", "v000007", "--config", "wrong.toml"], "wrong.toml: there is no setting"),
        (["fleet", "swap", "v000007", "--config", "new.toml"], "there is no registry "),
        (["fleet", "rollback", "--config", "new.toml"], "there is no registry "),
        (["fleet", "versions"], "there is no registry to list"),
        (["fleet", "versions", "--registry", "absent"], "there is no registry absent"),
        (["fleet", "swap", "v000007"], "has no version v000007: the newest are v000001"),
        (["fleet", "rollback"], "has no version before v000001"),
        (["fleet", "forget", "acme", "--config", "absent.toml"], "redraft learner --print-config"),
        (
            ["tap", "localhost:8000", "--target", "t"],
            "is not the address of a server: it must have the form http://",
        ),
    ],
)
def test_a_mistake_is_told_in_one_line(args, message, capsys, tmp_path, monkeypatch, world):
    monkeypatch.chdir(tmp_path)
    publish(world)
    world.registry.promote("v000001")
    (tmp_path / "learner.toml").write_text('target = "t"\nregistry = "registry"\nspool = "s"\n')
    (tmp_path / "bare.toml").write_text('spool = "s"\nregistry = "registry"\n')
    (tmp_path / "wrong.toml").write_text("[fleet]\nurls = []\n")
    (tmp_path / "new.toml").write_text('target = "t"\nregistry = "new"\nspool = "s"\n')
    capsys.readouterr()  # what made the draft drew bars
    assert dispatch(args) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_versions_are_listed_with_their_marks_and_reasons(capsys, world):
    for _ in range(3):
        publish(world)
    world.registry.promote("v000001")
    world.registry.promote("v000002")
    assert dispatch(["fleet", "versions", "--registry", str(world.registry.folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "v000003            from v000001, promote: tau 2.000 -> 2.100",
        "v000002  current   from v000001, promote: tau 2.000 -> 2.100",
        "v000001  previous  from v000001, promote: tau 2.000 -> 2.100",
    ]


def test_without_a_learner_the_command_itself_goes_by_way_of_the_canary(world):
    async def main():
        async with world.fleet():
            cfg = world.config()
            world.registry.promote(publish(world))
            good, bad = publish(world), publish(world)
            world.traffic.tau[bad] = 1.0
            assert (await swap.roll_out(cfg, good)).passed
            assert [fake.version for fake in world.fakes] == [good, good]
            refused = await swap.roll_out(cfg, bad)
            assert not refused.passed
            assert [fake.version for fake in world.fakes] == [good, good]
            assert await rollback.roll_back(cfg) == "v000001"
            assert [fake.version for fake in world.fakes] == ["v000001", "v000001"]
            world.fakes[1].stop()
            lines = await versions.live_lines(cfg)
            assert lines[0].startswith("no learner runs on")
            assert lines[1] == f"{world.fakes[0].url}: v000001"
            assert "does not answer" in lines[2]

    asyncio.run(main())


@pytest.mark.parametrize("trouble", ["Ctrl-C", "a full disk"])
def test_without_a_learner_a_swap_that_is_cut_short_leaves_no_server_on_the_candidate(
    trouble, world, monkeypatch, capsys
):
    async def main():
        async with world.fleet():
            world.registry.promote(publish(world))
            candidate = publish(world)
            policy = replace(QUICK, window_timeout_s=300)
            if trouble == "Ctrl-C":  # the comparison does not end by itself
                policy = replace(policy, min_drafts=10**9)
            else:
                monkeypatch.setattr(Registry, "promote", find_no_space)
            rollout = asyncio.ensure_future(swap.roll_out(world.config(rollout=policy), candidate))
            if trouble == "Ctrl-C":
                await until(lambda: world.fakes[0].version == candidate)
                rollout.cancel()
            with pytest.raises((asyncio.CancelledError, OSError)):
                await rollout
            assert world.fakes[0].swaps[-2:] == [candidate, "v000001"]
            assert [fake.version for fake in world.fakes] == ["v000001", "v000001"]
            assert capsys.readouterr().err.splitlines()[-1] == "all on v000001"

    def find_no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    asyncio.run(main())


def test_a_swap_that_is_cut_short_names_the_server_that_did_not_return(world, capsys):
    async def main():
        async with world.fleet():
            world.registry.promote(publish(world))
            candidate = publish(world)
            policy = replace(QUICK, window_timeout_s=300, min_drafts=10**9, rollback_timeout_s=0)
            rollout = asyncio.ensure_future(swap.roll_out(world.config(rollout=policy), candidate))
            await until(lambda: world.fakes[0].version == candidate)
            world.fakes[0].stop()
            rollout.cancel()
            with pytest.raises(asyncio.CancelledError):
                await rollout
            url = world.fakes[0].url
            assert url in capsys.readouterr().err.splitlines()[-1]

    asyncio.run(main())


def test_without_a_learner_a_rollback_that_missed_a_server_is_repeated_and_goes_no_further(world):
    async def main():
        async with world.fleet():
            for _ in range(3):
                world.registry.promote(publish(world))
            world.fakes[1].stop()
            with pytest.raises(ConnectionError, match=r"v000002 is current.*--to v000002"):
                await rollback.roll_back(world.config())
            await world.fakes[1].start()
            assert await rollback.roll_back(world.config(), "v000002") == "v000002"
            assert [fake.version for fake in world.fakes] == ["v000002", "v000002"]

    asyncio.run(main())


@pytest.mark.parametrize("has_gone_back", [True, False])
def test_a_learner_killed_during_a_rollback_leaves_the_fleet_one_version_back(
    has_gone_back, world, monkeypatch
):
    async def die(folder, answer, **request):
        if has_gone_back:
            world.registry.rollback(request["to"])
        raise control.NoLearnerError

    monkeypatch.setattr(control, "ask", die)

    async def main():
        for _ in range(3):
            world.registry.promote(publish(world))
        async with world.fleet():
            assert await rollback.roll_back(world.config()) == world.registry.current() == "v000002"
            assert [fake.version for fake in world.fakes] == ["v000002", "v000002"]

    asyncio.run(main())


@pytest.mark.parametrize(("to", "served"), [("", "v000002"), ("v000001", "v000001")])
def test_without_the_learner_that_rolled_it_out_a_candidate_is_taken_back_and_not_tried_again(
    to, served, world
):
    for _ in range(3):
        publish(world)
    world.registry.promote("v000001")
    world.registry.promote("v000002")
    cfg = world.config()
    cfg.folder.mkdir(exist_ok=True)
    save(State(phase=Phase.CANARY, candidate="v000003", num_looks=2), cfg.folder / "state.json")

    async def main():
        async with world.fleet():
            assert (
                await rollback.roll_back(world.config(), to) == world.registry.current() == served
            )
            assert [fake.version for fake in world.fakes] == [served, served]

    asyncio.run(main())
    state = load(cfg.folder / "state.json")
    assert (state.phase, state.candidate, state.num_looks) == (Phase.IDLE, None, 2)


@pytest.mark.parametrize("choose", ["roll back", "swap"])
@pytest.mark.parametrize(
    "state",
    [
        State(phase=Phase.JUDGING, candidate="checkpoint-000004", num_looks=2),
        State(phase=Phase.PUBLISHING, candidate="checkpoint-000004", num_looks=2),
        State(phase=Phase.CANARY, candidate="v000003", num_looks=2),
    ],
    ids=lambda state: state.phase.value,
)
def test_without_a_learner_a_chosen_version_ends_the_candidate_of_one_that_was_killed(
    state, choose, world
):
    for _ in range(3):
        publish(world)
    for version in ("v000001", "v000002"):
        world.registry.promote(version)
    path = world.config().folder / "state.json"
    path.parent.mkdir(exist_ok=True)
    save(state, path)

    async def main():
        async with world.fleet():
            cfg = world.config()
            if choose == "swap":
                assert (await swap.roll_out(cfg, "v000001")).passed
            else:
                assert await rollback.roll_back(cfg, "v000001") == "v000001"

    asyncio.run(main())
    assert world.registry.current() == "v000001"
    left = load(path)
    assert (left.phase, left.candidate, left.num_looks) == (Phase.IDLE, None, 2)


def test_a_rollback_to_a_version_never_served_leaves_a_rollout_as_it_was(world):
    for _ in range(2):
        publish(world)
    cfg = world.config()
    cfg.folder.mkdir(exist_ok=True)
    state = State(phase=Phase.CANARY, candidate="v000002", num_looks=2)
    save(state, cfg.folder / "state.json")

    async def main():
        with pytest.raises(FileNotFoundError, match="v000009"):
            await rollback.roll_back(cfg, "v000009")

    asyncio.run(main())
    assert load(cfg.folder / "state.json") == state


def test_with_a_learner_the_commands_ask_it(world):
    async def main():
        async with world.fleet(), world.learner() as task:
            cfg = world.config()
            await until(lambda: world.entries("state"), task)
            outcome = await swap.roll_out(cfg, publish(world))
            assert (outcome.passed, outcome.version, world.registry.current()) == (
                True,
                "v000002",
                "v000002",
            )
            assert (await versions.live_lines(cfg))[0] == "learner: idle"
            assert (await forget.delete_records(cfg, "nobody")).num_records == 0
            assert await rollback.roll_back(cfg) == "v000001"
            assert [fake.version for fake in world.fakes] == ["v000001", "v000001"]
            with pytest.raises(AlreadyOwnedError):
                await swap.roll_out(
                    replace(cfg, folder=world.root), "v000002"
                )  # it does not find the learner

    asyncio.run(main())
