"""Requests of a person to a learner, and what a line at the socket may be."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from waiting import in_event_loop

from redraft.online.daemon import control
from redraft.online.daemon.config import load_config


async def answer(request: dict[str, Any]) -> object:
    if request["do"] == "rollback":
        return control.WentBack(version="v000001", behind="http://a:1: \x1b]0;owned\x07\n\x9b")
    raise ValueError("\x1b[2J refused")


@in_event_loop
async def test_a_line_that_is_nested_deep_is_no_request_and_the_learner_lives(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    async with control.serve(tmp_path, answer):
        for line in (b"[" * 50_000, b"[" * 900 + b"]" * 900, b"{", b"1" * 6000, b"x" * 70_000):
            reader, writer = await asyncio.open_unix_connection(tmp_path / control.SOCKET)
            writer.write(line + b"\n")
            reply = await reader.read()
            assert not reply or "error" in json.loads(reply)
            writer.close()
        back = await control.ask(tmp_path, control.WentBack, do="rollback")
    assert back.version == "v000001"
    assert not failures
    assert "Traceback" not in capfd.readouterr().err


@in_event_loop
async def test_a_reply_is_printable(tmp_path: Path) -> None:
    async with control.serve(tmp_path, answer):
        back = await control.ask(tmp_path, control.WentBack, do="rollback")
        assert back.behind == r"http://a:1: \x1b]0;owned\x07\n\x9b"
        with pytest.raises(ValueError, match=r"^\\x1b\[2J refused$"):
            await control.ask(tmp_path, control.WentBack, do="swap")


@in_event_loop
async def test_a_reply_about_a_large_fleet_arrives_whole(tmp_path: Path) -> None:
    behind = "; ".join(f"http://10.0.{i // 250}.{i % 250}:8000 {'x' * 200}" for i in range(1000))

    async def go_back(request: dict[str, Any]) -> object:
        return control.WentBack(version="v000001", behind=behind)

    async with control.serve(tmp_path, go_back):
        back = await control.ask(tmp_path, control.WentBack, do="rollback")
    assert back.behind == behind


@pytest.mark.parametrize("nested", ["a = " + "[" * 100_000, "target = " + "[" * 200 + "]" * 200])
def test_settings_that_are_nested_deep_are_refused_in_a_line(tmp_path: Path, nested: str) -> None:
    path = tmp_path / "learner.toml"
    path.write_text(nested)
    with pytest.raises(ValueError, match=r"learner\.toml") as error:
        load_config(path)
    assert len(str(error.value).splitlines()) == 1
