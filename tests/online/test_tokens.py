"""Tokens: made for one user, read by servers and learner, and a warning if others can read them."""

from __future__ import annotations

import logging

import pytest

from redraft.online.engine.config import read_config
from redraft.online.fleet.discovery import FleetConfig, read_fleet
from redraft.online.tokens import read_token, write_token
from redraft.recipes.cli import dispatch


def test_the_command_makes_a_token_of_256_bits_that_only_its_user_can_read(tmp_path, capsys, caplog):
    path = tmp_path / "token"
    assert dispatch(["token", str(path)]) == 0
    token = read_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(bytes.fromhex(token)) == 32
    assert token not in capsys.readouterr().out
    assert dispatch(["token", str(path)]) == 2
    assert f"{path} exists" in capsys.readouterr().err
    assert read_token(path) == token, "never overwritten"
    assert caplog.records == []


def test_a_token_that_others_can_read_is_warned_about_once(tmp_path, caplog):
    for name, mode in (("group", 0o640), ("all", 0o644), ("mine", 0o600)):
        path = tmp_path / name
        write_token(path)
        path.chmod(mode)
    (tmp_path / "fleet.toml").write_text('[[servers]]\nurl = "http://a:1"\ntoken_file = "group"\n')
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            read_config({"REDRAFT_TOKEN_FILE": str(tmp_path / "all")})
            FleetConfig(servers=("http://a:1",), token_file=tmp_path / "mine").token()
            read_fleet(tmp_path / "fleet.toml", "", "t")
    told = [record.getMessage() for record in caplog.records]
    assert [f"chmod 600 {tmp_path / name}" in line for name, line in zip(("all", "group"), told, strict=True)] == 2 * [
        True
    ]
    assert not any(read_token(tmp_path / "all") in line for line in told)


@pytest.mark.parametrize(("content", "told"), [("", "is empty"), ("a\nb", "holds no token"),
                                               ("päss", "holds no token")])  # fmt: skip
def test_a_file_without_a_token_is_refused(tmp_path, content, told):
    (tmp_path / "token").write_text(content)
    with pytest.raises(ValueError, match=told):
        read_token(tmp_path / "token")
