"""Tokens: made for one user, read by servers and learner, and refused if others can read them."""

from __future__ import annotations

import os

import pytest
from other_user import USER, call_as_other, needs_root, reachable_folder

from redraft.engine.settings import write_settings
from redraft.online.engine.config import read_config
from redraft.online.fleet.discovery import FleetConfig, read_fleet
from redraft.online.records.nats_config import Nats
from redraft.online.tokens import read_token, write_token
from redraft.recipes.cli.run import dispatch


def test_the_command_makes_a_token_of_256_bits_that_only_its_user_can_read(tmp_path, capsys):
    path = tmp_path / "token"
    assert dispatch(["fleet", "token", str(path)]) == 0
    token = read_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(bytes.fromhex(token)) == 32
    assert token not in capsys.readouterr().out
    assert dispatch(["fleet", "token", str(path)]) == 2
    assert f"{path} exists" in capsys.readouterr().err
    assert read_token(path) == token, "never overwritten"


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_a_token_that_no_other_user_can_read_is_taken_without_a_word(
    tmp_path, mode, caplog, capsys
):
    path = make_token(tmp_path, mode)
    assert len(read_token(path)) == 64
    assert Nats(credentials=path).credentials == path
    assert caplog.records == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o444, 0o660, 0o620, 0o602, 0o666])
def test_a_token_that_others_can_read_or_change_is_refused_by_all_who_read_it(tmp_path, mode):
    path = make_token(tmp_path, mode)
    content = path.read_text().strip()
    (tmp_path / "fleet.toml").write_text('[[servers]]\nurl = "http://a:1"\ntoken_file = "token"\n')
    for read in (
        lambda: read_config(write_settings({"token_file": str(path)})),
        lambda: FleetConfig(servers=("http://a:1",), token_file=path).token(),
        lambda: read_fleet(tmp_path / "fleet.toml", "t"),
        lambda: Nats(credentials=path),
    ):
        with pytest.raises(
            ValueError, match=rf"{path} .*\b{mode:04o}\b.*: chmod 600 {path}\b"
        ) as error:
            read()
        assert content not in str(error.value)


def test_a_token_of_the_shell_beside_a_file_leaves_server_and_learner_with_one(
    tmp_path, monkeypatch
):
    path = make_token(tmp_path, 0o600)
    monkeypatch.setenv("REDRAFT_TOKEN", "token-of-the-shell")
    server = read_config(
        write_settings({"token_file": str(path)}) | {"REDRAFT_TOKEN": "token-of-the-shell"}
    ).token
    assert server == FleetConfig(servers=("http://a:1",), token_file=path).token()
    assert server == path.read_text().strip()
    assert read_config({"REDRAFT_TOKEN": "token-of-the-shell"}).token == "token-of-the-shell"


@needs_root
def test_a_secret_mounted_with_a_group_is_read_by_a_process_of_that_group_only():
    """As in a pod with an fsGroup: the file belongs to root and to the group, with mode 0440."""
    with reachable_folder() as folder:
        path = make_token(folder, 0o440)
        os.chown(path, 0, USER)
        assert call_as_other(lambda: read_token(path)) == path.read_text().strip()
        assert "PermissionError" in call_as_other(lambda: read_token(path), group=USER + 1)


def make_token(folder, mode):
    path = folder / "token"
    write_token(path)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(("content", "told"), [("", "`redraft fleet token FILE`"), ("a\nb", "ASCII"),
                                               ("päss", "ASCII"), (" ", "empty"), ("a", "16"),
                                               ("fifteen letters", "16")])  # fmt: skip
def test_a_file_without_a_token_is_refused(tmp_path, content, told):
    (tmp_path / "token").write_text(content)
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(ValueError, match=told):
        read_token(tmp_path / "token")


@pytest.mark.parametrize(
    "content", [" ", "a", "fifteen letters", "a" * 16 + "\n", "pässwords of old"]
)
def test_the_variable_holds_a_token_that_a_file_could_hold(monkeypatch, content):
    monkeypatch.setenv("REDRAFT_TOKEN", content)
    for read in (
        lambda: read_config({"REDRAFT_TOKEN": content}),
        lambda: FleetConfig(servers=("http://a:1",)).token(),
    ):
        with pytest.raises(ValueError, match=r"^REDRAFT_TOKEN ") as error:
            read()
        assert "fifteen" not in str(error.value)
