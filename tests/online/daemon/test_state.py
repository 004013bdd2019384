"""The learner's states: transitions allowed by the table, and the state after a kill."""

import json
import multiprocessing
import random
import time

import pytest

from redraft.files.sealed import DamagedError, write_sealed
from redraft.online.daemon.state import (
    TRANSITIONS,
    Event,
    IllegalEventError,
    Phase,
    State,
    advance,
    load,
    save,
)


def test_a_candidate_goes_all_the_way_and_back_to_idle():
    state = State()
    state = advance(state, Event.BEGIN)
    assert state.phase is Phase.TRAINING
    state = advance(state, Event.TRAINED, candidate="step-100")
    state = advance(state, Event.PROMOTED, reason="gain +0.2")
    assert state == State(phase=Phase.PUBLISHING, candidate="step-100", reason="gain +0.2")
    state = advance(state, Event.PUBLISHED, candidate="v000002")
    state = advance(state, Event.PASSED)
    assert (state.phase, state.candidate) == (Phase.ROLLING, "v000002")
    assert advance(state, Event.ROLLED_OUT) == State()


@pytest.mark.parametrize("event", [Event.REJECTED, Event.INCONCLUSIVE])
def test_no_verdict_but_promotion_leads_to_publishing(event):
    judging = State(phase=Phase.JUDGING, candidate="step-1")
    assert advance(judging, event, reason="why") == State(phase=Phase.IDLE, reason="why")
    leading = [pair for pair, phase in TRANSITIONS.items() if phase is Phase.PUBLISHING]
    assert leading == [(Phase.JUDGING, Event.PROMOTED)]


def test_every_pair_outside_the_table_raises():
    for phase in Phase:
        for event in Event:
            if (phase, event) not in TRANSITIONS:
                with pytest.raises(IllegalEventError, match=rf"'{event.value}' .*\b{phase.value}"):
                    advance(State(phase=phase), event)


def test_a_person_passes_the_gate_but_not_the_canary():
    state = advance(State(), Event.SWAP_REQUESTED, candidate="v000007")
    assert (state.phase, state.candidate) == (Phase.CANARY, "v000007")


def test_halt_is_possible_everywhere_and_only_resume_ends_it():
    for phase in Phase:
        assert advance(State(phase=phase), Event.HALT).phase is Phase.HALTED
    halted = State(phase=Phase.HALTED)
    assert advance(halted, Event.RESUME) == State()
    assert {event for phase, event in TRANSITIONS if phase is Phase.HALTED} == {
        Event.HALT,
        Event.RESUME,
    }


def test_every_phase_is_reachable_and_can_be_left():
    reached = {Phase.IDLE}
    while (
        more := {after for (before, _), after in TRANSITIONS.items() if before in reached} - reached
    ):
        reached |= more
    assert reached == set(Phase)
    assert {before for (before, _), after in TRANSITIONS.items() if after is not before} == set(
        Phase
    )


def test_a_state_is_the_same_after_saving(tmp_path):
    assert load(tmp_path / "state.json") == State()
    for phase in Phase:
        state = State(phase=phase, candidate="v000003", reason="1.2 -> 1.4", num_looks=7)
        save(state, tmp_path / "state.json")
        assert load(tmp_path / "state.json") == state


def test_looks_are_counted_until_a_version_is_rolled_out():
    state = State(phase=Phase.JUDGING, candidate="step-1", num_looks=3)
    state = advance(state, Event.PROMOTED)
    for event in (Event.PUBLISHED, Event.ROLLED_BACK):
        state = advance(state, event, candidate="v000002")
    assert (state.phase, state.num_looks) == (Phase.IDLE, 3), (
        "the incumbent is the same: its count goes on"
    )
    assert (
        advance(
            State(phase=Phase.ROLLING, candidate="v000003", num_looks=3), Event.ROLLED_OUT
        ).num_looks
        == 0
    )


def test_an_inconclusive_canary_ends_at_idle():
    canary = State(phase=Phase.CANARY, candidate="v000002", num_looks=2)
    assert advance(canary, Event.INCONCLUSIVE) == State(phase=Phase.IDLE, num_looks=2)


def test_a_state_of_an_earlier_redraft_has_no_looks(tmp_path):
    (tmp_path / "state.json").write_text(
        json.dumps({"phase": "idle", "candidate": None, "reason": "why"})
    )
    assert load(tmp_path / "state.json") == State(reason="why")


def test_a_state_of_a_later_redraft_is_read_as_far_as_it_is_known(tmp_path):
    write_sealed(
        tmp_path / "state.json",
        {"phase": "canary", "candidate": "v000003", "num_looks": 3, "mood": "good"},
    )
    assert load(tmp_path / "state.json") == State(
        phase=Phase.CANARY, candidate="v000003", num_looks=3
    )


def write(content):
    return lambda path: path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_text(""),
        lambda path: path.write_text("{"),
        lambda path: path.write_bytes(b"\xff\xfe"),
        write([]),
        write({"phase": "asleep", "candidate": None, "reason": ""}),
        write({"phase": "idle", "candidate": 3, "reason": ""}),
        lambda path: write_sealed(path, {"phase": "canary", "candidate": None, "reason": ""}),
    ],
    ids=["empty", "torn", "binary", "list", "phase", "field", "candidate"],
)
def test_a_file_that_holds_no_state_is_damaged(tmp_path, write):
    write(tmp_path / "state.json")
    with pytest.raises(DamagedError, match=r"state\.json\b"):
        load(tmp_path / "state.json")


def test_no_flipped_bit_and_no_cut_makes_another_state(tmp_path):
    path = tmp_path / "state.json"
    state = State(
        phase=Phase.CANARY, candidate="v000012", reason="gain +0.2 [0.1, 0.3]", num_looks=3
    )
    save(state, path)
    whole = path.read_bytes()
    changed = [whole[:size] for size in range(len(whole))]
    changed += [
        whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
        for at in range(len(whole))
        for bit in range(8)
    ]
    for content in changed:
        path.write_bytes(content)
        try:
            found = load(path)
        except DamagedError:
            continue
        assert found == state, content


def test_a_state_of_a_later_release_is_not_taken_for_damage(tmp_path):
    write_sealed(tmp_path / "state.json", {"phase": "idle"}, layout=2)
    with pytest.raises(ValueError, match=r"state\.json .*\(layout 2\)") as error:
        load(tmp_path / "state.json")
    assert not isinstance(error.value, DamagedError)


def save_forever(path):
    number = 0
    while True:
        save(
            State(phase=Phase.CANARY, candidate=f"v{number:06d}", reason="x" * (number % 5000)),
            path,
        )
        number += 1


def test_a_kill_while_saving_leaves_a_whole_state(tmp_path):
    path = tmp_path / "state.json"
    save(State(phase=Phase.CANARY, candidate="v000000"), path)
    rng = random.Random(0)
    for _ in range(15):
        writer = multiprocessing.get_context("fork").Process(target=save_forever, args=(path,))
        writer.start()
        time.sleep(rng.uniform(0.01, 0.06))
        writer.kill()
        writer.join()
        assert load(path).phase is Phase.CANARY
