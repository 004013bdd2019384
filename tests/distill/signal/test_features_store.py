"""Hidden states through storage.

What is taken is what was written, or an error; no copy of it is made; and whatever a server names,
nothing outside of the storage is read, fetched or removed.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import fsspec
import pytest
import torch
from teachers import teaching
from torch import Tensor

from redraft.distill.signal.features_store import (
    BLOCK_BYTES,
    Leftovers,
    Storage,
    absolute,
    write_states,
)
from redraft.distill.signal.storage import StatesLostError


def make_states(tokens: int = 7, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tokens, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)


def take(url: str, **options: float) -> tuple[Tensor, list[int]]:
    parts: list[Tensor] = []
    held: list[int] = []

    def use(first: int, rows_tLD: Tensor, layers: Sequence[int]) -> None:
        assert first == sum(map(len, parts))
        parts.append(rows_tLD.clone())
        held[:] = layers

    Storage(url.rpartition("/")[0]).take(url, use, **options)
    return torch.cat(parts), held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", ["memory://states", "folder"])
def test_what_is_taken_is_what_was_written_and_nothing_stays(
    storage: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    url = absolute(storage if "://" in storage else str(tmp_path / storage)) + "/request-1"
    states_TLD = make_states(dtype=dtype)
    write_states(url, states_TLD, (0, 2, 5))
    taken_TLD, layers = take(url)
    assert taken_TLD.dtype == dtype
    assert torch.equal(taken_TLD, states_TLD)
    assert layers == [0, 2, 5]
    files, path = fsspec.core.url_to_fs(url)
    assert files.ls(files._parent(path)) == []


def test_states_that_nobody_reads_are_removed_without_another_request(tmp_path: Path) -> None:
    kept_s, leftovers = 0.5, Leftovers(0.5)
    urls = [f"{tmp_path}/request-{number}" for number in range(2)]
    leftovers.note("s4://no-such-storage/request")  # its error does not end the removal
    for url in urls:
        leftovers.note(url)
        write_states(url, make_states(), (0, 2, 5))
    begun_s = time.monotonic()
    while any(tmp_path.iterdir()):
        assert time.monotonic() - begun_s < 60
        time.sleep(0.01)
    assert time.monotonic() - begun_s > kept_s / 2


def test_states_in_float8_take_a_byte_a_number_and_come_as_torch_decodes_them(
    tmp_path: Path,
) -> None:
    url, states_TLD = (
        str(tmp_path / "states"),
        torch.randn(3 * BLOCK_BYTES // 4 // 2048 + 5, 2, 1024).bfloat16(),
    )
    write_states(url, states_TLD, (1, 4), "float8")
    assert Path(f"{url}.bin").stat().st_size == len(states_TLD) * 2 * (1024 + 4)
    taken_TLD, layers = take(url)
    assert (taken_TLD.dtype, layers) == (torch.float32, [1, 4])
    scale_TL1 = states_TLD.float().abs().amax(-1, keepdim=True) / 448
    assert torch.equal(
        taken_TLD, (states_TLD.float() / scale_TL1).to(torch.float8_e4m3fn).float() * scale_TL1
    )
    assert list(tmp_path.iterdir()) == []


def test_states_that_are_called_float8_and_are_not_are_an_error(tmp_path: Path) -> None:
    write_states(str(tmp_path / "states"), make_states(), (0, 1, 2))
    description = json.loads((tmp_path / "states.json").read_text())
    (tmp_path / "states.json").write_text(json.dumps(description | {"dtype": "float8"}))
    with pytest.raises(StatesLostError, match="CRC-32"):
        take(str(tmp_path / "states"))


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

    Storage(str(tmp_path)).take(url, use)
    assert rows == len(states_TLD)
    assert len(memories) == 1


@pytest.mark.parametrize("harm", ["flipped bit", "cut"])
def test_altered_states_are_an_error_and_are_removed(harm: str, tmp_path: Path) -> None:
    url = tmp_path / "states"
    write_states(str(url), make_states(), (0, 1, 2))
    data = bytearray((tmp_path / "states.bin").read_bytes())
    data[100] ^= 1
    (tmp_path / "states.bin").write_bytes(data if harm == "flipped bit" else data[:-8])
    with pytest.raises(StatesLostError, match="CRC-32" if harm == "flipped bit" else "truncated"):
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
    with pytest.raises(StatesLostError, match=r"0\.1"):
        take(str(tmp_path / "nothing"), wait_s=0.1)


# --------------------------------------------------------------------------------------------------------
# hostile names


def ignore(first: int, rows_tLD: Tensor, layers: Sequence[int]) -> None:
    pass


ELSEWHERE = [
    "{storage}/../secret",
    "{storage}/..",
    "{storage}/.hidden",
    "{storage}/",
    "{storage}",
    "{storage}//states",
    "{storage}/./states",
    "{storage}/below/states",
    "{storage}-beside/states",
    "{outside}/secret",
    "file://{storage}/states",
    "local://{outside}/secret",
    "{storage}/states?x",
    "{storage}/states#x",
    "{storage}/states%2f..%2fsecret",
    "{storage}/states*",
    "{storage}/states\0",
    "{storage}/states\n",
    "{storage}/" + 300 * "a",
    "states",
    "",
    "http://127.0.0.1:{port}/states",
    "{storage}/http://127.0.0.1:{port}/states",
    "simplecache::http://127.0.0.1:{port}/states",
    "{storage}/states::http://127.0.0.1:{port}/states",
    "reference::http://127.0.0.1:{port}/states",
    "zip://states::http://127.0.0.1:{port}/states",
]


@pytest.mark.parametrize("named", ELSEWHERE)
def test_a_name_outside_the_storage_is_refused_and_nothing_is_opened(
    named: str, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    for folder in (tmp_path, storage / "below", tmp_path / "storage-beside"):
        for name in ("secret", "states", ".hidden"):
            write_states(str(folder / name), make_states(), (0, 1, 2))
    before = sorted(tmp_path.rglob("*"))
    with teaching() as elsewhere:
        url = named.format(storage=storage, outside=tmp_path, port=elsewhere.port)
        with pytest.raises(ValueError, match=rf"{storage}\b.*--signal\.storage"):
            Storage(str(storage)).take(url, ignore, wait_s=0)
        assert (elsewhere.probes, elsewhere.requests) == (0, [])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["bin", "json"])
@pytest.mark.parametrize("trick", ["link", "dangling link", "pipe", "folder", "device"])
def test_a_link_or_a_pipe_in_the_storage_is_not_followed(
    trick: str, kind: str, tmp_path: Path
) -> None:
    storage, secret = tmp_path / "storage", tmp_path / f"secret.{kind}"
    write_states(str(storage / "states"), make_states(), (0, 1, 2))
    planted = storage / f"states.{kind}"
    planted.rename(secret)
    if trick == "pipe":
        os.mkfifo(planted)
    elif trick == "folder":
        planted.mkdir()
    else:
        planted.symlink_to(
            {"link": secret, "dangling link": tmp_path / "nowhere", "device": "/dev/zero"}[trick]
        )
    begun_s = time.monotonic()
    with pytest.raises(StatesLostError):
        Storage(str(storage)).take(str(storage / "states"), ignore, wait_s=600)
    assert time.monotonic() - begun_s < 60
    assert secret.stat().st_size > 0
    assert not planted.is_symlink()


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "load"},
        {"dtype": "__dict__"},
        {"dtype": "bool"},
        {"dtype": 1},
        {"shape": [7, 3]},
        {"shape": [7, 3, -16]},
        {"shape": [0, 3, 16]},
        {"shape": [7, 3, 1 << 30]},
        {"shape": [7, 2, 16]},
        {"shape": "7316"},
        {"layers": [0, 1, "2"]},
        {"layers": None},
        {"crc32": "0"},
    ],
)
def test_a_hostile_description_is_an_error_before_any_byte_is_read(
    change: dict[str, object], tmp_path: Path
) -> None:
    write_states(str(tmp_path / "states"), make_states(), (0, 1, 2))
    path = tmp_path / "states.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StatesLostError, match=next(iter(change))):
        Storage(str(tmp_path)).take(str(tmp_path / "states"), ignore, wait_s=600)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [b"[]", b"null", b"{}", b"3", b"[" * 60_000, b'{"dtype": "\xff', b"{" + b" " * (1 << 20)],
)
def test_any_other_description_is_an_error_too(content: bytes, tmp_path: Path) -> None:
    write_states(str(tmp_path / "states"), make_states(), (0, 1, 2))
    (tmp_path / "states.json").write_bytes(content)
    with pytest.raises(StatesLostError):
        Storage(str(tmp_path)).take(str(tmp_path / "states"), ignore, wait_s=0)


@pytest.mark.parametrize("storage", ["", "/", "s3://", "file:///"])
def test_a_storage_that_names_no_folder_is_refused(storage: str) -> None:
    with pytest.raises(ValueError, match=r"s3://bucket/states"):
        Storage(storage)


def test_a_storage_whose_package_is_missing_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ValueError, match=r"s3://bucket/states .*Install s3fs") as error:
        Storage("s3://bucket/states")
    assert "\n" not in str(error.value)
