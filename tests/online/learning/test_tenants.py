"""The power of one tenant over a learner's evidence and replay, with real buffers."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_buffer import frames_of, i32, make_record

from redraft.online.learning import prompt_key
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.config import BufferConfig, Replay
from redraft.online.learning.evidence import (
    FULL_TENANT,
    MAX_DOMAINS,
    OTHER,
    count_tenants,
    find_excess,
    take_fairly,
)
from redraft.online.learning.prompt_key import PromptKey, is_held_out
from redraft.online.records.record import Record

MAKE_SECRET = prompt_key.make_secret
"""The true one: tests get a known key."""

HONEST = [f"honest-{number}" for number in range(5)]


@contextlib.contextmanager
def opened(folder: Any = None, **config: Any) -> Any:
    with Buffer(BufferConfig(folder=folder, **config), "target") as buffer:
        yield buffer


def send(buffer: Buffer, *records: Record, now_s: float = 0.0) -> None:
    buffer.append(frames_of(*records), now_s)


def traffic(first: int, count: int, tenants: Any, **changes: Any) -> list[Record]:
    """Records of distinct prompts, by turns of these tenants."""
    return [
        make_record(first + n, tenant=tenants[n % len(tenants)], **changes) for n in range(count)
    ]


def judges(buffer: Buffer, per_domain: int = 200, **limits: Any) -> Counter[str]:
    """Requests of the gate's evidence by tenant."""
    stored = buffer.read(buffer.select_held_out(per_domain, **limits))
    return Counter({one.record.request_id: one.record.tenant for one in stored}.values())


def greatest_share(counts: Counter[str], tenant: str) -> float:
    return counts[tenant] / max(1, counts.total())


# --- the side of a prompt


def test_the_side_of_a_prompt_depends_on_prompt_and_key_alone() -> None:
    key = PromptKey.make()
    same = [
        make_record(n, prompt=i32(1, 2), domain=str(n), tenant=str(n), sequence=n)
        for n in range(50)
    ]
    assert len({key.hash(record).prompt for record in same}) == 1
    share = np.mean([is_held_out(key.hash(make_record(n)).prompt, 0.25) for n in range(2000)])
    assert share == pytest.approx(0.25, abs=0.05)


def test_a_client_that_knows_everything_but_the_key_chooses_no_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts picked for another key, or for none, are held out as often as any others."""
    monkeypatch.setattr(prompt_key, "make_secret", MAKE_SECRET)
    guesses = [PromptKey.make(), PromptKey(b""), PromptKey(bytes(32))]
    candidates = [make_record(n) for n in range(1600)]
    for guess in guesses:
        picked = [record for record in candidates if is_held_out(guess.hash(record).prompt, 0.25)]
        with opened(held_out_fraction=0.25) as buffer:
            send(buffer, *picked)
            held_out = sum(buffer.status().num_held_out.values())
        assert len(picked) > 300
        assert held_out / len(picked) == pytest.approx(0.25, abs=0.12)


def test_the_key_is_secret_and_stays(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_key, "make_secret", MAKE_SECRET)
    path = tmp_path / "held-out.key"
    for _ in range(2):
        with opened(tmp_path, held_out_fraction=0.5) as buffer:
            send(buffer, *traffic(0, 40, [""]))
            first = buffer.select_held_out(40)
            assert path.stat().st_mode & 0o777 == 0o600
    with opened(tmp_path, held_out_fraction=0.5) as buffer:
        assert buffer.select_held_out(40) == first
        send(buffer, *traffic(0, 40, [""], server_id="another boot"))
        assert sum(buffer.status().num_held_out.values()) == 2 * len(first)
        assert judges(buffer).total() == len(first)
    assert len({MAKE_SECRET() for _ in range(100)}) == 100


def test_without_a_folder_the_key_reaches_no_disk(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with opened(None, held_out_fraction=0.5) as buffer:
        send(buffer, *traffic(0, 40, HONEST))
    assert list(tmp_path.iterdir()) == []


def drop_key(folder: Any) -> None:
    (folder / "held-out.key").unlink()


def flip_key(folder: Any) -> None:
    secret = bytearray((folder / "held-out.key").read_bytes())
    secret[5] ^= 1
    (folder / "held-out.key").write_bytes(secret)


def cut_key(folder: Any) -> None:
    (folder / "held-out.key").write_bytes(b"torn")


LOSSES = {
    drop_key: "held-out.key was missing: a new key holds out different prompts",
    flip_key: "held-out.key was not the key that was created here (it is now held-out.key.damaged): a "
    "new key",
    cut_key: "held-out.key did not contain a key (it is now held-out.key.damaged): a new key",
}


def sides(buffer: Buffer) -> tuple[list[int], list[int]]:
    """Numbers of the records that judge, and of those that train."""
    return buffer.select_held_out(999), [one.seq for one in buffer.fresh(0, 999)]


@pytest.mark.parametrize("lose", LOSSES)
def test_a_lost_key_is_replaced_and_told_and_records_keep_their_side(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, lose: Any
) -> None:
    monkeypatch.setattr(prompt_key, "make_secret", MAKE_SECRET)
    with opened(tmp_path, held_out_fraction=0.5) as buffer:
        send(buffer, *traffic(0, 60, HONEST))
        before = sides(buffer)
    lose(tmp_path)
    with opened(tmp_path, held_out_fraction=0.5) as buffer:
        (sentence,) = buffer.damage
        assert LOSSES[lose] in sentence
        assert "expired" in sentence
        assert sides(buffer) == before
    for name in ("held-out.key", "held-out.json"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    with opened(tmp_path, held_out_fraction=0.5) as buffer:
        assert buffer.damage == [], "it is told once"
        assert sides(buffer) == before


@pytest.mark.parametrize("lose", LOSSES)
def test_a_prompt_from_before_a_lost_key_still_counts_once(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, lose: Any
) -> None:
    monkeypatch.setattr(prompt_key, "make_secret", MAKE_SECRET)
    with opened(tmp_path, held_out_fraction=0.999999) as buffer:
        send(buffer, *traffic(0, 30, HONEST))
    lose(tmp_path)
    for boot in ("second", "third"):
        with opened(tmp_path, held_out_fraction=0.999999) as buffer:
            send(buffer, *traffic(0, 30, HONEST, server_id=boot))
            assert judges(buffer).total() == 30


class KilledError(Exception):
    pass


def kill_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the process before the write with this number, counted from 0."""
    left = [step]

    def patch(name: str) -> None:
        write = getattr(prompt_key, name)

        def write_or_die(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise KilledError
            return write(*arguments, **named)

        monkeypatch.setattr(prompt_key, name, write_or_die)

    for name in ("write_whole", "write_sealed", "set_aside"):
        patch(name)


WRITES = [*((drop_key, step) for step in range(3)), *((cut_key, step) for step in range(4))]


@pytest.mark.parametrize(("lose", "step"), WRITES)
@pytest.mark.parametrize("has_note", [True, False])
def test_a_kill_while_a_key_is_replaced_hides_no_damage(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, lose: Any, has_note: bool, step: int
) -> None:
    with opened(tmp_path, held_out_fraction=0.999999) as buffer:
        send(buffer, *traffic(0, 30, HONEST))
    lose(tmp_path)
    if not has_note:  # as an earlier release left the folder
        (tmp_path / "held-out.json").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(prompt_key, "make_secret", MAKE_SECRET)
        kill_at(step, patched)
        with pytest.raises(KilledError):
            Buffer(BufferConfig(folder=tmp_path), "target")
    with opened(tmp_path, held_out_fraction=0.999999) as buffer:
        assert len(buffer.damage) == 1
        send(buffer, *traffic(0, 30, HONEST, server_id="another boot"))
        assert judges(buffer).total() == 30


@pytest.mark.parametrize("step", range(2))
def test_a_kill_while_the_first_key_is_made_is_no_damage(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    with monkeypatch.context() as patched:
        kill_at(step, patched)
        with pytest.raises(KilledError):
            Buffer(BufferConfig(folder=tmp_path), "target")
    with opened(tmp_path) as buffer:
        assert buffer.damage == []


def test_a_key_without_a_note_is_of_an_earlier_release(tmp_path: Any) -> None:
    with opened(tmp_path, held_out_fraction=0.5) as buffer:
        send(buffer, *traffic(0, 40, HONEST))
        before = sides(buffer)
    secret, note = (tmp_path / "held-out.key").read_bytes(), tmp_path / "held-out.json"
    note.unlink()
    with opened(tmp_path, held_out_fraction=0.5) as buffer:
        assert (buffer.damage, sides(buffer)) == ([], before)
    assert note.exists()
    for damaged in ("", "{", "[]", note.read_text().replace("0", "1")):
        note.write_text(damaged)
        with opened(tmp_path, held_out_fraction=0.5) as buffer:
            (sentence,) = buffer.damage
            assert "held-out.json" in sentence
            assert sides(buffer) == before
        with opened(tmp_path) as buffer:
            assert buffer.damage == []
    assert (tmp_path / "held-out.key").read_bytes() == secret


# --- evidence


def test_a_prompt_sent_a_thousand_times_is_one_piece_of_evidence() -> None:
    with opened(held_out_fraction=0.999999) as buffer:
        send(buffer, *traffic(0, 30, ["monitoring"]))
        repeated = [
            make_record(100 + n, prompt=i32(1, 2), tenant="monitoring") for n in range(1000)
        ]
        send(buffer, *repeated)
        assert judges(buffer) == {"monitoring": 31}
        (newest,) = [
            s for s in buffer.read(buffer.select_held_out(200)) if s.record.context == i32(1, 2)
        ]
        assert newest.record.request_id == "cmpl-1099"


def test_all_segments_of_a_long_answer_are_one_request() -> None:
    with opened(held_out_fraction=0.999999) as buffer:
        send(buffer, *(make_record(7, sequence=segment) for segment in range(3)), make_record(8))
        assert len(buffer.select_held_out(200)) == 4
        assert judges(buffer) == {"acme": 2}
        send(buffer, *(make_record(7, sequence=segment, server_id="again") for segment in range(2)))
        assert len(buffer.select_held_out(200)) == 3, "the newest request of each prompt, whole"


def test_a_flood_of_one_tenant_is_at_most_its_share_of_the_evidence() -> None:
    """It was 200 of the newest 200."""
    with opened(held_out_fraction=0.999999) as buffer:
        send(buffer, *traffic(0, 300, HONEST))
        send(buffer, *traffic(1000, 2000, ["flood"]), now_s=1.0)
        found = judges(buffer)
    assert found.total() == 200
    assert found["flood"] == 40


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_share_is_a_setting(share: float) -> None:
    with opened(held_out_fraction=0.999999, tenant_share=share) as buffer:
        send(buffer, *traffic(0, 600, [f"honest-{n}" for n in range(20)]))
        send(buffer, *traffic(1000, 1000, ["flood"]), now_s=1.0)
        assert judges(buffer)["flood"] == 200 * share


def test_requests_without_a_tenant_are_one_tenants_together() -> None:
    with opened(held_out_fraction=0.999999) as buffer:
        send(buffer, *traffic(0, 300, HONEST))
        send(buffer, *traffic(1000, 1000, [""]), now_s=1.0)
        assert judges(buffer)[""] == 40
    with opened(held_out_fraction=0.999999) as buffer:
        send(buffer, *traffic(0, 300, [""]))
        assert judges(buffer) == {"": 200}, "alone they are everything"


def test_a_single_tenant_keeps_its_evidence_beside_a_stray_request() -> None:
    with opened(held_out_fraction=0.999999) as buffer:
        send(buffer, *traffic(0, 300, ["only"]), *traffic(1000, 3, ["stray"]))
        assert judges(buffer) == {"only": 197, "stray": 3}


def test_a_verdict_stays_possible_beside_small_tenants() -> None:
    with opened(held_out_fraction=0.999999) as buffer:
        send(buffer, *traffic(0, 300, ["large"]), *traffic(1000, FULL_TENANT, ["small"]))
        assert judges(buffer) == {"large": 20, "small": 20}
        assert judges(buffer, at_least=50, at_least_of_domain=50) == {"large": 30, "small": 20}


def test_a_share_is_kept_whatever_the_tenants() -> None:
    """Oracle: the definition, on random fleets."""
    rng = random.Random(0)
    for _ in range(300):
        tenants = [f"t{int(rng.paretovariate(0.7)) % 12}" for _ in range(rng.randrange(1, 400))]
        count, share = rng.randrange(1, 300), rng.choice([0.05, 0.2, 0.3, 1.0])
        taken = take_fairly(tenants, count, share, 0)
        found = Counter(tenants[position] for position in taken)
        full = count_tenants(tenants)
        assert len(taken) <= count
        assert taken == sorted(set(taken)), "the first ones of each"
        assert all(n <= max(share, 1 / full) * len(taken) + 1e-6 for n in found.values())
        assert len(take_fairly(tenants, count, share, count)) == min(count, len(tenants))


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [
        ([300], 1),
        ([300, 3], 1),
        ([300, 1, 1, 1], 1),
        ([300, 20], 2),
        ([90, 35, 10], 2),
        ([500, *[3] * 12], 8),
        ([500, *[1] * 12], 3),
        ([], 1),
    ],
)
def test_many_small_tenants_are_not_one_beside_a_large_one(counts: list[int], wanted: int) -> None:
    assert (
        count_tenants([f"t{n}" for n, count in enumerate(counts) for _ in range(count)]) == wanted
    )


# --- eviction


def test_what_a_tenant_has_beyond_its_share_is_its_oldest() -> None:
    tenants = np.array([*"ababababcc"], object)
    sizes = np.array([8, 1, 8, 1, 8, 1, 8, 1, 2, 2])  # a: 32 of 40
    assert find_excess(tenants, sizes, 0.2).nonzero()[0].tolist() == [0, 2]  # at most a third
    assert not find_excess(tenants, sizes, 1.0).any()
    assert not find_excess(np.array(["a", "a"], object), np.array([1, 9]), 0.2).any()
    assert not find_excess(np.array([], object), np.array([], int), 0.2).any()


def flood(buffer: Buffer) -> tuple[Counter[str], Counter[str]]:
    """Judges and records by tenant, where one tenant floods.

    It is one of 13 and sends five sixths of the requests, with answers eight times as long, and the
    buffer keeps a fifth of it all.
    """
    for begin in range(0, 1200, 48):
        sent = [
            make_record(n, tenant=f"honest-{n // 6 % 12}", size_bytes=4_000)
            if n % 6 == 0
            else make_record(n, tenant="flood", size_bytes=32_000)
            for n in range(begin, begin + 48)
        ]
        send(buffer, *sent, now_s=float(begin))
    stored = buffer.read(range(1, buffer.newest() + 1))
    return judges(buffer), Counter(one.record.tenant for one in stored)


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_tenant_that_sends_most_drives_out_its_own_records(
    tmp_path: Path, in_memory: bool
) -> None:
    config: dict[str, Any] = {"held_out_fraction": 0.5, "max_bytes": 8 << 20}
    folder = None if in_memory else tmp_path
    with opened(None, **config, tenant_share=1.0) as buffer:
        _, found = flood(buffer)
    assert found.total() - found["flood"] < 50, "the oldest go, whoever sent them"
    with opened(folder, **config) as buffer:
        evidence, found = flood(buffer)
        status, index = buffer.status(), buffer._files.index()
        assert found.total() - found["flood"] == 200, "all of the others' is there"
        assert greatest_share(evidence, "flood") <= 0.2
        assert evidence.total() > 80
        assert status.num_bytes <= 8 << 20
        assert status.num_files <= 24
        assert status.counts["evicted"] == 1200 - len(index)
        kept = index[index["tenant"] == "flood"]["time_s"]
        assert kept.min() > 800, "the newest of the flood"
        assert (np.diff(index["seq"]) > 0).all()
    if folder is not None:
        with opened(folder, **config) as buffer:
            assert buffer._files.index().tolist() == index.tolist()
            assert not buffer.damage


def test_a_kill_while_a_file_is_written_again_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, held_out_fraction=0.5, max_bytes=1 << 30) as buffer:
        files = buffer._files
        for begin in (0, 100):
            send(buffer, *traffic(begin, 100, HONEST))
            files._file_bytes = 0  # the next ones begin another file
        files._file_bytes = float(1 << 30)
        paths = [file.path for file in files.files]
        assert len(paths) == 2
        removed = paths[1].read_bytes()
        wanted = files.index()["seq"].tolist()
        assert files._write_again(files.files[1], np.ones(100, bool))
        assert len(files) == 1
    paths[1].write_bytes(removed)
    (tmp_path / "rewritten.db").write_bytes(removed[:5000])
    with opened(tmp_path, held_out_fraction=0.5) as buffer:
        assert buffer._files.index()["seq"].tolist() == wanted
        assert len(buffer._files) == 1
    assert not (tmp_path / "rewritten.db").exists()


# --- domains


def test_invented_domains_give_a_tenant_no_more_evidence_and_no_place_in_the_table() -> None:
    """6,000 made-up domains brought all of the tenant's held-out records into every verdict."""
    with opened(held_out_fraction=0.999999) as buffer:
        send(
            buffer,
            *traffic(0, 300, HONEST, domain="code"),
            *traffic(300, 300, HONEST, domain="prose"),
        )
        invented = [
            make_record(1000 + n, tenant="flood", domain=f"invented-{n % 600}") for n in range(2000)
        ]
        send(buffer, *invented, now_s=1.0)
        found, names = judges(buffer), buffer.refresh_names()
    assert set(names.values()) == {"code", "prose", OTHER}
    assert greatest_share(found, "flood") <= 0.2
    assert found.total() >= 400


def test_domains_of_a_single_tenant_keep_their_names_up_to_a_number() -> None:
    with opened(held_out_fraction=0.5) as buffer:
        send(
            buffer,
            *(make_record(n, tenant="", domain=f"d{min(n % 400, 100)}") for n in range(2000)),
        )
        names = buffer.refresh_names()
    assert len(names) == 101
    assert len(set(names.values())) == MAX_DOMAINS + 1
    assert names["d100"] == "d100", "the largest"


def test_a_domain_that_an_operator_names_is_judged_by_itself() -> None:
    with opened(held_out_fraction=0.999999) as buffer:
        send(buffer, *traffic(0, 200, HONEST), *traffic(500, 50, ["bank"], domain="sql"))
        assert buffer.refresh_names() == {"code": "code", "sql": OTHER}
        buffer.known_domains = frozenset({"sql"})
        assert buffer.refresh_names() == {"code": "code", "sql": "sql"}


def test_a_request_without_a_domain_is_of_all() -> None:
    with opened(held_out_fraction=0.5) as buffer:
        send(buffer, *traffic(0, 40, HONEST, domain=""))
        assert buffer.refresh_names() == {"": "all"}


# --- replay


def replayed_share(buffer: Buffer, tenant: str, draws: int = 40, count: int = 20) -> float:
    drawn = [
        record
        for seed in range(draws)
        for record in buffer.replay(count, through=10**9, now_s=0.0, seed=seed, policy=Replay())
    ]
    assert len(drawn) == draws * count
    return sum(record.tenant == tenant for record in drawn) / len(drawn)


def test_a_tenant_whose_answers_are_never_accepted_does_not_own_the_replay() -> None:
    """Half of the records were 68% of the replay, because refused drafts weigh more."""
    records = [*traffic(0, 200, HONEST), *traffic(1000, 200, ["flood"], wrong=4)]
    with opened(held_out_fraction=0, tenant_share=1.0) as buffer:
        send(buffer, *records)
        assert replayed_share(buffer, "flood") > 0.5
    with opened(held_out_fraction=0) as buffer:
        send(buffer, *records)
        assert replayed_share(buffer, "flood") == pytest.approx(0.2, abs=0.01)


def test_replay_is_filled_also_where_one_tenant_has_nearly_everything() -> None:
    with opened(held_out_fraction=0) as buffer:
        send(buffer, *traffic(0, 200, ["only"]), *traffic(1000, 25, ["small"]))
        assert replayed_share(buffer, "only") == 0.5
