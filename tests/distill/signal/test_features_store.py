"""Hidden states through storage: what is taken is what was written, or an error; and no copy of it is made."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import fsspec
import pytest
import torch
from torch import Tensor

from redraft.distill.signal.features_store import BLOCK_BYTES, StatesLostError, absolute, take_states, write_states


def make_states(tokens: int = 7, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tokens, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)


def take(url: str, **options: float) -> tuple[Tensor, list[int]]:
    parts: list[Tensor] = []
    held: list[int] = []

    def use(first: int, rows_tLD: Tensor, layers: Sequence[int]) -> None:
        assert first == sum(map(len, parts))
        parts.append(rows_tLD.clone())
        held[:] = layers

    take_states(url, use, **options)
    return torch.cat(parts), held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", ["memory://states", "folder"])
def test_what_is_taken_is_what_was_written_and_nothing_stays(storage: str, dtype: torch.dtype, tmp_path: Path) -> None:
    url = absolute(storage if "://" in storage else str(tmp_path / storage)) + "/request-1"
    states_TLD = make_states(dtype=dtype)
    write_states(url, states_TLD, (0, 2, 5))
    taken_TLD, layers = take(url)
    assert taken_TLD.dtype == dtype
    assert torch.equal(taken_TLD, states_TLD)
    assert layers == [0, 2, 5]
    files, path = fsspec.core.url_to_fs(url)
    assert files.ls(files._parent(path)) == []


def test_states_larger_than_a_block_come_in_blocks_that_use_one_memory(tmp_path: Path) -> None:
    states_TLD = torch.arange(3 * BLOCK_BYTES // 4, dtype=torch.float32).view(-1, 4, 1024)
    url = str(tmp_path / "large")
    write_states(url, states_TLD, (1, 2, 3, 4))
    memories, rows = set(), 0

    def use(first: int, rows_tLD: Tensor, _: Sequence[int]) -> None:
        nonlocal rows
        assert torch.equal(rows_tLD, states_TLD[first : first + len(rows_tLD)])
        memories.add(rows_tLD.data_ptr())
        rows += len(rows_tLD)

    take_states(url, use)
    assert rows == len(states_TLD)
    assert len(memories) == 1


@pytest.mark.parametrize("harm", ["flipped bit", "cut"])
def test_altered_states_are_an_error_and_are_removed(harm: str, tmp_path: Path) -> None:
    url = tmp_path / "states"
    write_states(str(url), make_states(), (0, 1, 2))
    data = bytearray((tmp_path / "states.bin").read_bytes())
    data[100] ^= 1
    (tmp_path / "states.bin").write_bytes(data if harm == "flipped bit" else data[:-8])
    with pytest.raises(StatesLostError, match="corrupt: its CRC-32 is" if harm == "flipped bit" else "is truncated"):
        take(str(url))
    assert list(tmp_path.iterdir()) == []


def test_a_reader_waits_for_a_description_that_is_whole(tmp_path: Path) -> None:
    write_states(str(tmp_path / "done"), make_states(), (0, 1, 2))
    description = (tmp_path / "done.json").read_text()
    (tmp_path / "done.bin").rename(tmp_path / "late.bin")

    def write_slowly() -> None:
        for length in (0, len(description) // 2, len(description)):
            time.sleep(0.1)
            (tmp_path / "late.json").write_text(description[:length])

    writer = threading.Thread(target=write_slowly)
    writer.start()
    assert torch.equal(take(str(tmp_path / "late"), wait_s=5)[0], make_states())
    writer.join()
    assert json.loads(description)["shape"] == [7, 3, 16]


def test_states_that_never_come_are_an_error_that_names_them(tmp_path: Path) -> None:
    with pytest.raises(StatesLostError, match=r"nothing did not come within 0\.1 s"):
        take(str(tmp_path / "nothing"), wait_s=0.1)
