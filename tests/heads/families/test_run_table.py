"""The table of live counts against a dictionary, and what may be seen, kept and forgotten."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from redraft.heads.families.run_table import (
    MOST_VOTES,
    OWNERS,
    TOKENS,
    WAYS,
    Entries,
    Found,
    RunTable,
)

ACME, INITECH = b"acmesalt", b"initsalt"


def encode(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def make_table(max_entries: int = 4096, window: int = 1000, *, shares: bool = False) -> RunTable:
    return RunTable(max_entries=max_entries, window=window, shares=shares)


def count_by_hand(rows: dict[tuple[int, ...], list[int]], run: tuple[int, ...], token: int) -> None:
    kept = rows.setdefault(run, [token, 0])
    if kept[0] == token:
        kept[1] = min(MOST_VOTES, kept[1] + 1)
    elif kept[1]:
        kept[1] -= 1
    else:
        kept[:] = token, 1


def test_a_table_with_room_votes_as_a_dictionary_does() -> None:
    rng, table = np.random.default_rng(0), make_table(1 << 16)
    rows: dict[bytes, dict[tuple[int, ...], list[int]]] = {ACME: {}, INITECH: {}}
    for _ in range(3000):
        owner = (ACME, INITECH)[rng.integers(2)]
        last = rng.integers(0, 5, rng.integers(1, 7)).tolist()
        token = int(rng.integers(0, 5))
        table.add(encode(*last), token, owner)
        for begin in range(len(last)):
            count_by_hand(rows[owner], tuple(last[begin:]), token)
        asked = rng.integers(0, 5, 6).tolist()
        for seen, runs in rows.items():
            expected = next(
                (
                    Found(6 - begin, runs[run][1], runs[run][0])
                    for begin in range(6)
                    if (run := tuple(asked[begin:])) in runs
                ),
                None,
            )
            assert table.find(encode(*asked), seen) == expected
    assert table.num_runs == sum(map(len, rows.values()))


def test_a_million_runs_take_a_twentieth_of_what_a_dictionary_takes() -> None:
    tracemalloc.start()
    table = make_table(1_000_000)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert table.num_bytes == 16 * 1_000_000
    assert taken == pytest.approx(table.num_bytes, rel=0.1), "and the owners' numbers"


def test_a_full_table_keeps_the_newest_runs_and_finds_no_wrong_one() -> None:
    table, rng = make_table(1024), np.random.default_rng(1)
    followers = {}
    for number in range(20_000):
        table.begin_text()
        run, token = tuple(rng.integers(0, 1 << 20, 3).tolist()), number & TOKENS
        followers[run] = token
        table.add(encode(*run), token, ACME)
    found = {run: table.find(encode(*run), ACME) for run in followers}
    newest = list(followers)[-100:]
    assert sum(found[run] is not None for run in newest) > 95
    whole = {run: its for run, its in found.items() if its and its.length == 3}
    assert {run: its.token for run, its in whole.items()} == {run: followers[run] for run in whole}
    assert table.num_runs <= 1024


def test_a_run_is_drafted_while_its_token_was_confirmed_in_the_window() -> None:
    table = make_table(window=20)
    table.add(encode(1, 2), 3, ACME)
    for number in range(19):
        assert table.find(encode(1, 2), ACME) is not None, number
        table.begin_text()
        table.add(encode(1, 2), 9, INITECH)
    for _ in range(10):
        table.begin_text()
    assert table.find(encode(1, 2), ACME) is None
    assert table.find(encode(1, 2), INITECH) == Found(2, MOST_VOTES, 9), "the other's is newer"
    table.add(encode(1, 2), 4, ACME)
    assert table.find(encode(1, 2), ACME) == Found(2, 1, 4), "the old token has no vote left"


def test_with_the_same_hash_an_owner_still_sees_no_run_of_another() -> None:
    table = make_table()
    table.add(encode(1, 2), 3, ACME)
    table.add(encode(9), 9, INITECH)
    table._owners[INITECH] = table._owners[INITECH][0], table._owners[ACME][1]
    assert table.find(encode(1, 2), INITECH) is None
    table.add(encode(1, 2), 7, INITECH)
    assert table.find(encode(1, 2), INITECH) == Found(2, 1, 7), "none of the other's votes"
    assert table.find(encode(1, 2), ACME) is None
    assert table.find(encode(1, 2), b"nobodyXX") is None


def test_tenants_that_share_see_each_other_and_what_is_forgotten_was_nobody_elses() -> None:
    table = make_table(shares=True)
    for owner, token in ((ACME, 3), (INITECH, 3), (ACME, 3)):
        table.add(encode(1, 2), token, owner)
    table.add(encode(5), 6, ACME)
    table.add(encode(7), 8, INITECH)
    table.add(encode(7), 9, ACME)
    assert table.find(encode(1, 2), b"newtsalt") == Found(2, 3, 3)
    assert table.find(encode(1, 2), b"newtpepp") is None, "of another salt"
    assert table.forget(b"acme") == 3
    assert table.find(encode(5), INITECH) is None
    assert table.find(encode(7), INITECH) == Found(1, 0, 8), "the token of the one who stays"


def test_counts_come_back_as_they_were_unless_the_settings_have_changed() -> None:
    rng, table = np.random.default_rng(2), make_table(window=50)
    for _ in range(400):
        table.begin_text()
        for owner in (ACME, INITECH):
            table.add(encode(*rng.integers(0, 9, 4)), int(rng.integers(9)), owner)
    tensors, numbers = table.read()
    again = make_table(window=50)
    assert again.restore(tensors, numbers)
    assert again.num_runs == table.num_runs
    for _ in range(300):
        last, owner = encode(*rng.integers(0, 9, 5)), (ACME, INITECH)[rng.integers(2)]
        assert again.find(last, owner) == table.find(last, owner)
        for each in (table, again):
            each.add(last, 1, owner)
    for other in (make_table(window=51), make_table(8192, 50), make_table(window=50, shares=True)):
        assert not other.restore(tensors, numbers)
        assert other.num_runs == 0


def test_owners_without_number_end_nothing_and_cost_the_idle_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = make_table(max_entries=64, window=8)
    for number in range(OWNERS + 50):
        if number % 3 == 0:
            table.begin_text()
        table.add(encode(1), 2, number.to_bytes(8, "little"))
    newest = (OWNERS + 49).to_bytes(8, "little")
    assert table.find(encode(1), newest) == Found(1, 1, 2)
    assert len(table._owners) < 1000
    assert len(table._owners) + len(table._free) == OWNERS + 1


def test_a_token_beyond_the_rows_is_not_counted() -> None:
    table = make_table()
    for token in (-1, TOKENS + 1):
        table.add(encode(1), token, ACME)
    assert table.find(encode(1), ACME) is None
    table.add(encode(-1, 2**31 - 1), TOKENS, ACME)
    assert table.find(encode(-1, 2**31 - 1), ACME) == Found(2, 1, TOKENS)
    assert WAYS * make_table(max_entries=1)._num_buckets == WAYS


def test_entries_of_a_folder_are_found_as_in_a_dictionary_in_a_tenth_of_its_memory() -> None:
    rng = np.random.default_rng(3)
    rows = {
        tuple(rng.integers(0, 7, rng.integers(1, 7)).tolist()): (
            int(rng.integers(99)),
            rng.random(),
        )
        for _ in range(3000)
    }
    rows[(2**31 - 1,)] = 0, 0.5
    entries = Entries.of(rows, 6)
    assert dict(entries) == rows
    assert (0,) * 7 not in entries
    assert () not in entries
    for _ in range(3000):
        asked = rng.integers(0, 8, 6).tolist()
        expected = next(
            (rows[run] for begin in range(6) if (run := tuple(asked[begin:])) in rows), None
        )
        assert entries.find(encode(*asked)) == expected
    none = Entries.of({}, 6)
    assert (len(none), none.find(encode(1, 2)), dict(none)) == (0, None, {})
    runs_RN = rng.integers(0, 50_000, (100_000, 6)).astype(np.int32)
    many = Entries(runs_RN, np.zeros(100_000), np.zeros(100_000))
    assert many.num_bytes / 100_000 == pytest.approx(44, abs=3)
