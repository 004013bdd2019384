"""Turns of one conversation: one side of the held-out split, and one unit of the gate's evidence."""

from __future__ import annotations

import hmac
import itertools
import math
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_buffer import frames_of, make_record

from redraft.engine.counts import AcceptanceCounts
from redraft.online.daemon.judging import count_served
from redraft.online.learning import conversations as conversations_module
from redraft.online.learning.buffer import Buffer, Stored
from redraft.online.learning.buffer_file import INDEX_DTYPE, Index
from redraft.online.learning.config import BufferConfig
from redraft.online.learning.conversations import MAX_PROMPTS, Conversations
from redraft.online.learning.evidence import (
    OTHER,
    EvidenceLimits,
    choose_evidence,
    name_domains,
    take_fairly,
)
from redraft.online.learning.gate import Decision, Policy, judge
from redraft.online.learning.prompt_key import MAX_EARLIER, NO_HEADERS, Headers, PromptKey
from redraft.online.learning.scoring import RequestScore, pair_scores, sum_segments
from redraft.online.records.record import Record

START, END, USER, ASSISTANT, BREAK, SYSTEM = 1, 2, 3, 4, 5, 6
HEADER = [START, ASSISTANT, BREAK]
THINK, THINK_END, BREAKS = 10, 11, 12
NO_THOUGHT = [THINK, BREAKS, THINK_END, BREAKS]
FIRST_WORD = 100


def message(role: int, *words: int) -> list[int]:
    return [START, role, BREAK, *words, END, BREAK]


def to_bytes(ids: Iterable[int]) -> bytes:
    return np.array(list(ids), "<i4").tobytes()


WITH_TAGS = Headers(marks=frozenset({START, END}), tags=frozenset({to_bytes(NO_THOUGHT)}))


def make_turns(
    session: int,
    count: int,
    *,
    header: Sequence[int] = HEADER,
    kept: Sequence[int] = HEADER,
    common: Sequence[int] = (),
    **changes: Any,
) -> list[Record]:
    """The records of one session: its prompts end with `header`, of which the history keeps `kept`."""
    text, turns = [*message(SYSTEM, 50, 51, 52), *common], list[Record]()
    for turn in range(count):
        text += message(USER, FIRST_WORD + session, FIRST_WORD + turn)
        turns.append(make_turn([*text, *header], f"{session}-{turn}", **changes))
        text += [*kept, FIRST_WORD + 7 * turn, FIRST_WORD + session, END, BREAK]
    return turns


def make_turn(prompt: Sequence[int], name: str, **changes: Any) -> Record:
    number = sum(map(ord, name))
    return make_record(
        number,
        prompt=to_bytes(prompt),
        num_prompt_tokens=len(prompt),
        **({"request_id": name} | changes),
    )


def interleave(sessions: Iterable[Sequence[Record]]) -> list[Record]:
    """First the first turns of all sessions, then the second turns, and so on."""
    turns = itertools.zip_longest(*sessions)
    return [one for some in turns for one in some if one is not None]


def open_buffer(folder: Path | None, headers: Headers = NO_HEADERS, **config: Any) -> Buffer:
    return Buffer(
        BufferConfig(folder=folder, **({"held_out_fraction": 0.3} | config)),
        "target",
        headers=headers,
    )


def send(buffer: Buffer, records: Iterable[Record]) -> None:
    buffer.append(frames_of(*records), 0.0)


def sessions_of(stored: Iterable[Any]) -> set[str]:
    return {one.record.request_id.partition("-")[0] for one in stored}


def sides(buffer: Buffer) -> tuple[set[str], set[str]]:
    """The sessions that train, and those that judge."""
    return (
        sessions_of(buffer.fresh(0, 9999)),
        sessions_of(buffer.read(buffer.select_held_out(9999))),
    )


def conversations(buffer: Buffer) -> list[int]:
    found: list[int] = buffer._files.index()["conversation"].tolist()
    return found


# --- the side of a conversation


def test_all_turns_of_a_conversation_are_on_one_side_also_after_a_restart(tmp_path: Path) -> None:
    turns = interleave(make_turns(session, 8) for session in range(60))
    with open_buffer(tmp_path) as buffer:
        send(buffer, turns[:200])
        trained, judged = sides(buffer)
        assert trained | judged == {str(session) for session in range(60)}
        assert not trained & judged
        assert 8 <= len(judged) <= 30
    with open_buffer(tmp_path) as buffer:
        send(buffer, turns[200:])
        assert sides(buffer) == (trained, judged)
        assert len(set(conversations(buffer))) == 60


def test_one_by_one_too() -> None:
    with open_buffer(None) as buffer:
        for turn in interleave(make_turns(session, 5) for session in range(20)):
            send(buffer, [turn])
        assert len(set(conversations(buffer))) == 20


def test_turns_that_were_not_recorded_do_not_matter() -> None:
    """One request in ten is recorded by default."""
    with open_buffer(None) as buffer:
        for session in range(20):
            send(buffer, make_turns(session, 40)[session % 7 :: 10])
        assert len(set(conversations(buffer))) == 20


def test_a_conversation_keeps_its_side_when_its_first_turns_have_left_the_buffer(
    tmp_path: Path,
) -> None:
    sessions = [make_turns(session, 25, size_bytes=20_000) for session in range(6)]
    sides_of, first_of = defaultdict(set), dict[str, int]()
    with open_buffer(tmp_path, max_bytes=2 << 20) as buffer:
        for record in interleave(sessions):
            send(buffer, [record])
            row = buffer._files.index()[-1]
            session = record.request_id.partition("-")[0]
            sides_of[session].add(bool(row["held_out"]))
            first_of.setdefault(session, int(row["conversation"]))
            assert row["conversation"] == first_of[session]
        left = {one.record.request_id for one in buffer.fresh(0, 999)}
        assert buffer.status().counts["evicted"] >= 10
        assert not left & {f"{session}-0" for session in range(6)}
        assert len(buffer._conversations._by_prompt["acme"]) < 6 * 25 - 6, "nor are they known"
    assert {len(found) for found in sides_of.values()} == {1}


def test_the_share_of_requests_that_are_held_out_stays_right_on_average() -> None:
    with open_buffer(None, held_out_fraction=0.2) as buffer:
        buffer.append(frames_of(*(r for s in range(1000) for r in make_turns(s, 1 + s % 5))), 0.0)
        assert buffer._files.index()["held_out"].mean() == pytest.approx(0.2, abs=0.04)


def test_a_change_of_the_fraction_leaves_no_conversation_on_both_sides() -> None:
    turns = interleave(make_turns(session, 4) for session in range(100))
    with open_buffer(None, held_out_fraction=0.3) as buffer:
        send(buffer, turns[:200])
        buffer.config = replace(buffer.config, held_out_fraction=0.1)
        send(buffer, turns[200:])
        trained, judged = sides(buffer)
        assert not trained & judged
        assert judged


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        (HEADER, HEADER),
        ([*HEADER, *NO_THOUGHT], HEADER),
        ([*HEADER, *NO_THOUGHT], [*HEADER, *NO_THOUGHT]),
    ],
    ids=["ChatML", "tags that the history leaves out", "tags that it keeps"],
)
def test_tags_after_the_header_do_not_matter(header: list[int], kept: list[int]) -> None:
    with open_buffer(None, WITH_TAGS) as buffer:
        send(buffer, interleave(make_turns(s, 5, header=header, kept=kept) for s in range(10)))
        assert len(set(conversations(buffer))) == 10


def test_a_conversation_may_switch_its_reasoning_on_and_off() -> None:
    with_tags = make_turns(1, 6, header=[*HEADER, *NO_THOUGHT])
    without = make_turns(1, 6)
    with open_buffer(None, WITH_TAGS) as buffer:
        send(buffer, [with_tags[0], without[1], without[2], with_tags[3], without[4], with_tags[5]])
        assert len(set(conversations(buffer))) == 1


def test_a_header_of_a_tools_result_differs_from_that_of_a_question() -> None:
    """E.g. [/INST] and [/TOOL_RESULTS] of Mistral."""
    inst, results = 20, 21
    first = [7, 8, 9, inst]
    second = [*first, 30, 31, results]
    third = [*second, 40, END, 7, 7, inst]
    headers = Headers(marks=frozenset({inst, results}))
    with open_buffer(None, headers) as buffer:
        send(buffer, [make_turn(ids, str(n)) for n, ids in enumerate([first, second, third])])
        assert len(set(conversations(buffer))) == 1


def test_a_shared_system_prompt_and_shared_examples_join_nothing() -> None:
    examples = [*message(USER, 60, 61), *HEADER, 62, END, BREAK] * 3
    with open_buffer(None) as buffer:
        send(buffer, [make_turns(session, 1)[0] for session in range(50)])
        send(buffer, [make_turns(50 + session, 1, common=examples)[0] for session in range(50)])
        assert len(set(conversations(buffer))) == 100


def test_retries_and_answers_to_the_same_prompt_are_one_conversation() -> None:
    first, second = make_turns(1, 2)
    with open_buffer(None) as buffer:
        for name in ("again", "best of n"):
            send(buffer, [first, make_turn(first.context_ids.tolist(), name)])
        send(buffer, [second, make_turns(2, 1)[0]])
        assert Counter(conversations(buffer)).most_common(1)[0][1] == 4
        assert len(set(conversations(buffer))) == 2


@pytest.mark.parametrize("prompt", [[], [START], HEADER, NO_THOUGHT])
def test_an_empty_prompt_and_one_of_a_header_alone_raise_nothing(prompt: list[int]) -> None:
    with open_buffer(None, WITH_TAGS) as buffer:
        record = make_record(1, prompt=to_bytes([*prompt, 77]), num_prompt_tokens=len(prompt))
        send(buffer, [record])
        assert conversations(buffer) == buffer._files.index()["prompt"].tolist()


def test_a_request_of_the_shared_prefix_alone_joins_a_bounded_number() -> None:
    """E.g. to fill the prefix cache."""
    prefix = make_turn([*message(SYSTEM, 50, 51, 52)], "prefix")
    with open_buffer(None) as buffer:
        send(buffer, [prefix, *(make_turns(session, 1)[0] for session in range(300))])
        sizes = Counter(conversations(buffer))
        assert sizes.most_common(1)[0][1] == MAX_PROMPTS
        assert len(sizes) == 1 + 301 - MAX_PROMPTS
        send(buffer, make_turns(299, 4)[1:])
        assert len(set(conversations(buffer))) == len(sizes), "later turns find their first"


def test_an_endless_conversation_is_neither_all_held_out_nor_all_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversations_module, "MAX_PROMPTS", 8)
    with open_buffer(None) as buffer:
        send(buffer, make_turns(1, 40))
        assert [len([*some]) for _, some in itertools.groupby(conversations(buffer))] == [8] * 5


def test_no_tenant_joins_the_conversations_of_others() -> None:
    prefix = make_turn([*message(SYSTEM, 50, 51, 52)], "prefix", tenant="attacker")
    with open_buffer(None) as buffer:
        send(buffer, [prefix, *(make_turns(session, 2)[0] for session in range(50))])
        assert len(set(conversations(buffer))) == 51


def test_conversations_with_the_same_first_prompt_are_separate_for_each_tenant() -> None:
    found = Conversations(np.empty(0, INDEX_DTYPE))
    for prompt in range(1, MAX_PROMPTS + 1):
        found.add(prompt, 1, "attacker")
    assert found.find(999, [1], "attacker") == 999, "it is full"
    found.add(1, 1, "victim")
    assert found.find(999, [1], "victim") == 1
    mine, other = (
        Stored(seq=1, record=make_turn([1, 2], "turn", tenant=tenant), conversation=1)
        for tenant in ("victim", "attacker")
    )
    assert mine.conversation_key != other.conversation_key


def test_records_of_an_earlier_release_are_read_and_can_be_continued(tmp_path: Path) -> None:
    sessions = [make_turns(session, 3) for session in range(20)]
    with open_buffer(tmp_path) as buffer:
        send(buffer, [turns[0] for turns in sessions])
        before = buffer._files.index().tolist()
    (path,) = tmp_path.glob("records-*.db")
    with closing(sqlite3.connect(path)) as file:
        file.execute("DROP TABLE conversations")
    with open_buffer(tmp_path) as buffer:
        assert buffer._files.index().tolist() == before
        send(buffer, [turn for turns in sessions for turn in turns[1:]])
        assert len(set(conversations(buffer))) == 20
        kept = buffer._files.index().tolist()
    with open_buffer(tmp_path) as buffer:
        assert buffer._files.index().tolist() == kept


def test_a_deleted_tenants_conversations_are_forgotten(tmp_path: Path) -> None:
    with open_buffer(tmp_path) as buffer:
        send(buffer, make_turns(1, 3))
        buffer.delete_tenant("acme", 0.0)
        assert conversations(buffer) == []
        send(buffer, make_turns(1, 4, time_s=1e9)[3:])
        assert conversations(buffer) == buffer._files.index()["prompt"].tolist()
        (path,) = tmp_path.glob("records-*.db")
        with closing(sqlite3.connect(path)) as file:
            assert file.execute("SELECT count(*) FROM conversations").fetchone() == (0,)


# --- the cost


def test_the_cost_of_a_long_prompt_is_bounded() -> None:
    (last,) = make_turns(1, 50)[-1:]
    key = PromptKey(b"secret")
    assert len(list(key.hash_earlier(last.prompt, NO_HEADERS))) < 5 * 50
    same = to_bytes([BREAK] * 32_000)
    assert len(list(key.hash_earlier(same, WITH_TAGS))) == 2 * MAX_EARLIER


def test_the_hashes_are_those_of_the_earlier_prompts_longest_first() -> None:
    turns, key = make_turns(1, 6), PromptKey(b"secret")
    found = list(key.hash_earlier(turns[-1].prompt, NO_HEADERS))
    places = [found.index(key.hash(turn).prompt) for turn in turns]
    assert places == sorted(places, reverse=True)


# --- single turns: nothing changes


def choose_as_before(
    held_out: Index, names: Mapping[str, str], limits: EvidenceLimits
) -> list[int]:
    """The choice of earlier releases, which knew no conversations."""
    held_out = held_out[held_out["time_s"] >= limits.since_s]
    found: dict[int, int] = {}
    for row, prompt in reversed(list(enumerate(held_out["prompt"].tolist()))):
        found.setdefault(prompt, row)
    newest, by_domain = list(found.values()), defaultdict(list)
    for row in newest:
        by_domain[names.get(held_out["domain"][row], OTHER)].append(row)
    tenants, chosen = held_out["tenant"], set[int]()
    for rows in by_domain.values():
        taken = take_fairly(
            [tenants[row] for row in rows],
            limits.per_domain,
            limits.tenant_share,
            limits.at_least_of_domain,
        )
        chosen |= {rows[position] for position in taken}
    rows = [row for row in newest if row in chosen]
    taken = take_fairly(
        [tenants[row] for row in rows], len(rows), limits.tenant_share, limits.at_least
    )
    requests = held_out["request"][[rows[position] for position in taken]]
    return [int(seq) for seq in held_out["seq"][np.isin(held_out["request"], requests)]]


def test_without_later_turns_the_evidence_is_that_of_earlier_releases() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        size = int(rng.integers(1, 400))
        index = np.zeros(size, INDEX_DTYPE)
        index["seq"], index["time_s"] = np.arange(size) + 1, np.arange(size)
        index["prompt"] = index["conversation"] = rng.integers(1, 2 * size, size)
        index["request"] = index["prompt"] * 3 + rng.integers(0, 3, size)
        index["domain"] = rng.choice(np.array(["code", "prose", "rare"], object), size)
        index["tenant"] = rng.choice(np.array(["a", "b", "c", "d", "e", "f"], object), size)
        index["held_out"] = True
        limits = EvidenceLimits(
            per_domain=int(rng.integers(1, 200)),
            tenant_share=float(rng.choice([0.2, 0.5, 1.0])),
            at_least=int(rng.integers(0, 30)),
            at_least_of_domain=int(rng.integers(0, 30)),
            since_s=float(rng.choice([-math.inf, size / 3])),
        )
        names = name_domains(index, ())
        assert choose_evidence(index, names, limits) == choose_as_before(index, names, limits)


def test_without_later_turns_the_split_is_that_of_earlier_releases(tmp_path: Path) -> None:
    records = [make_record(number) for number in range(300)]
    records += [make_record(number, server_id="again", sequence=1) for number in range(100)]
    with open_buffer(tmp_path, WITH_TAGS, held_out_fraction=0.25) as buffer:
        buffer.append(frames_of(*records), 0.0)
        index = buffer._files.index()
        secret = (tmp_path / "held-out.key").read_bytes()
    for record, row in zip(records, index, strict=True):
        digest = hmac.digest(secret, record.context[:8], "sha256")
        first = int.from_bytes(digest[:8], "big", signed=True)
        assert (row["prompt"], row["conversation"]) == (first, first)
        assert row["held_out"] == (first + 2**63 < 0.25 * 2**64)


# --- the evidence


def test_the_turns_of_few_conversations_are_scored_within_the_limit() -> None:
    with open_buffer(None, held_out_fraction=0.999999) as buffer:
        send(buffer, interleave(make_turns(session, 20) for session in range(10)))
        for limit, wanted in ((10, 1), (59, 5), (200, 20), (9, 1)):
            stored = list(buffer.read(buffer.select_held_out(limit)))
            turns = defaultdict(list)
            for one in stored:
                turns[one.conversation].append(int(one.record.request_id.partition("-")[2]))
            assert {len(found) for found in turns.values()} == {wanted}
            assert len(turns) == min(10, limit)
            assert all(found[-1] == 19 for found in turns.values()), "the newest is among them"
            gaps = {b - a for found in turns.values() for a, b in itertools.pairwise(found)}
            assert len(gaps) <= 1, "evenly spaced"


def test_a_share_of_the_evidence_is_a_share_of_the_conversations() -> None:
    with open_buffer(None, held_out_fraction=0.999999) as buffer:
        for session in range(60):
            send(buffer, make_turns(session, 1, tenant=f"honest-{session % 5}"))
        send(buffer, make_turns(1000, 60, tenant="agent"))
        send(buffer, [r for s in range(60) for r in make_turns(2000 + s, 3, tenant="flood")])
        stored = list(buffer.read(buffer.select_held_out(200)))
        by_tenant = Counter(
            tenant for tenant, _ in {(one.record.tenant, one.conversation) for one in stored}
        )
        assert by_tenant["flood"] <= 0.2 * by_tenant.total()
        assert by_tenant["agent"] == 1


def test_what_a_version_served_is_counted_by_conversation() -> None:
    with open_buffer(None) as buffer:
        send(buffer, interleave(make_turns(session, 4) for session in range(3)))
        counts = count_served(buffer.read(range(1, 13)), "v000001")
        assert len(counts) == 3
        assert {one.num_draft_tokens for one in counts.values()} == {16}


# --- the bounds

BETWEEN, WITHIN = 0.2, 0.15
"""Standard deviations of a candidate's gain in tau: between conversations, and between the turns of
one.
"""


def simulate_turns(
    rng: np.random.Generator, num_conversations: int, gain: float
) -> tuple[list[tuple[int, RequestScore]], list[tuple[int, RequestScore]]]:
    """Scores of candidate and incumbent, by turn of agents with 4 to 50 turns each."""
    ours, theirs = list[tuple[int, RequestScore]](), list[tuple[int, RequestScore]]()
    for conversation in range(1, num_conversations + 1):
        num_turns = int(rng.integers(4, 51))
        level, own_gain = rng.normal(2.0, 0.3), rng.normal(gain, BETWEEN)
        for _ in range(num_turns):
            drafts = int(rng.integers(15, 60))
            served = max(0.0, rng.normal(level, 0.35)) * drafts
            change = rng.normal(own_gain, WITHIN) * drafts
            for scores, accepted in ((theirs, served), (ours, max(0.0, served + change))):
                counts = AcceptanceCounts(num_drafts=drafts, num_accepted=accepted)
                scores.append((conversation, RequestScore("code", counts)))
    return ours, theirs


def pair_turns(
    ours: list[tuple[int, RequestScore]],
    theirs: list[tuple[int, RequestScore]],
    *,
    as_one: bool,
) -> Any:
    """Return the units that the gate compares: conversations or, as before, single turns."""
    sides = [
        sum_segments(
            (conversation if as_one else ("boot", str(number)), score)
            for number, (conversation, score) in enumerate(scores)
        )
        for scores in (ours, theirs)
    ]
    return pair_scores(*sides, {"code": "code"})[:3]


def measure_coverage(
    trials: int, num_conversations: int, *, as_one: bool, seed: int = 0
) -> tuple[float, float]:
    """Share of 95% intervals that contain the gain, and of promotions of a candidate at the bar."""
    rng = np.random.default_rng(seed)
    policy, num_inside, num_promoted = Policy(), 0, 0
    for _ in range(trials):
        turns = simulate_turns(rng, num_conversations, policy.min_gain)
        paired = pair_turns(*turns, as_one=as_one)
        # The upper bound has the policy's confidence at every look; at 97.5%, it is the end of a
        # two-sided 95% interval.
        overall = judge(*paired, Policy(confidence=0.975)).overall
        assert overall is not None
        num_inside += abs(overall.value - policy.min_gain) <= overall.upper - overall.value
        num_promoted += judge(*paired, policy).decision is Decision.PROMOTE
    return num_inside / trials, num_promoted / trials


def test_the_gates_bounds_hold_for_agents() -> None:
    coverage, promoted = measure_coverage(80, 30, as_one=True)
    assert coverage > 0.9
    assert promoted < 0.06
    coverage, promoted = measure_coverage(80, 30, as_one=False)
    assert coverage < 0.6, "if turns count as requests"
    assert promoted > 0.15
