"""Settings of a command in a TOML file."""

from __future__ import annotations

import os
import shlex
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.studies.presets import make_preset
from redraft.distill.train.run_config import make_config
from redraft.heads.catalog import find_family, list_trained
from redraft.online.daemon.config import load_config
from redraft.online.fleet.discovery import list_servers
from redraft.recipes import train
from redraft.recipes.cli.commands import COMMANDS, list_recipes
from redraft.recipes.cli.config_file import read_config, render_config
from redraft.recipes.cli.run import dispatch, find_recipe, parse_recipe


@pytest.mark.parametrize("name", list_trained())
def test_a_printed_config_is_read_back_as_it_was(name: str, tmp_path: Path) -> None:
    family = name.replace("-", "_")
    changed = make_preset(family)
    path = tmp_path / "config.toml"
    path.write_text(render_config(changed))
    assert read_config(path, make_config(find_family(family))) == changed


OWN_CONFIG = ("learner", "fleet versions", "fleet swap", "fleet rollback", "fleet forget")
"""Commands whose --config names the settings of a service."""

EXAMPLES = [
    each.example
    for command in COMMANDS.values()
    for each in ([command] if command.module else command.parts.values())
    if not each.example.startswith(
        ("redraft adapt", "redraft tap", *(f"redraft {name}" for name in OWN_CONFIG))
    )
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_file_replaces_all_flags_of_a_command(
    example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, name, *words = shlex.split(example)
    recipe, args = find_recipe(name, words)
    end = args.index("--") if "--" in args else len(args)
    with pytest.raises(SystemExit):
        parse_recipe(recipe, [*args[:end], "--print-config", *args[end:]])
    path = tmp_path / "config.toml"
    path.write_text(capsys.readouterr().out)
    assert parse_recipe(recipe, ["--config", str(path)]) == parse_recipe(recipe, args)


def test_flags_add_what_a_file_lacks_and_mend_what_the_config_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.toml"
    path.write_text("num_speculative_tokens = 0\n")
    flags = ["Qwen/Qwen3-8B", "--draft", "ngram", "--num-speculative-tokens", "5"]
    assert parse_recipe(*find_recipe("serve", [*flags, "--config", str(path)])) == parse_recipe(
        *find_recipe("serve", flags)
    )
    assert dispatch(["serve", "--config", str(path)]) == 2
    assert capsys.readouterr().err.startswith("redraft: missing: TARGET; ")


@pytest.mark.parametrize(
    "name", [name for name, _ in list_recipes() if name not in ("train", "adapt")]
)
def test_help_names_the_flags_of_files(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dispatch([*name.split(), "--help-all"])
    text = capsys.readouterr().out
    assert "--config" in text
    assert ("--print-config" in text) == (name not in OWN_CONFIG or name == "learner")


def test_help_is_printed_before_the_flags_of_another_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["Qwen/Qwen3-8B", "--help-all", "--", "--port", "8001"]
    with pytest.raises(SystemExit) as end:
        parse_recipe(*find_recipe("serve", flags))
    assert end.value.code == 0
    assert "--print-config" in capsys.readouterr().out
    flags = ["Qwen/Qwen3-8B", "--draft", "ngram", "--", "--config", "vllm.yaml", "--help-all"]
    assert parse_recipe(*find_recipe("serve", flags)).vllm_args == (
        "--config",
        "vllm.yaml",
        "--help-all",
    )


@pytest.mark.parametrize("which", ["--help", "--help-all"])
@pytest.mark.parametrize("name", list_trained())
def test_help_of_a_training_names_the_flags_of_files(
    name: str, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        dispatch(["train", name, which])
    assert {"--config", "--print-config"} <= set(capsys.readouterr().out.split())


def test_flags_win_over_the_file_and_the_file_over_the_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "eagle3.toml"
    path.write_text('output = "runs/x"\n[optim]\nlr = 2e-3\nname = "muon"\n[head]\nnum-steps = 5\n')
    args = ["eagle3", "--config", str(path), "--optim.lr", "3e-4"]
    cfg = parse_recipe(*train.choose_recipe(args, "redraft train"))
    assert (cfg.optim.lr, cfg.optim.name, cfg.head.num_steps, cfg.output) == (
        3e-4,
        "muon",
        5,
        Path("runs/x"),
    )
    assert cfg.loop == make_config(find_family("eagle3")).loop
    with pytest.raises(SystemExit) as end:
        dispatch(["train", *args, "--print-config"])
    assert end.value.code == 0
    path.write_text(capsys.readouterr().out)
    assert parse_recipe(*train.choose_recipe(["eagle3", "--config", str(path)], "")) == cfg


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[optim]\nlrr = 1.0\n", "did you mean optim.lr?"),
        ("[optm]\nlr = 1.0\n", "did you mean optim?"),
        ('[optim]\nlr = "fast"\n', "optim.lr"),
        ("optim = 3\n", "[optim]"),
        ("[optim]\nlr = 0.0\n", "0.0"),
        ("lr = \n", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_the_setting(
    text: str, part: str, tmp_path: Path
) -> None:
    path = tmp_path / "eagle3.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        parse_recipe(*train.choose_recipe(["eagle3", "--config", str(path)], ""))
    assert str(path) in str(error.value)
    assert part in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_file_that_is_not_there_and_a_family_that_is_not_there_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch(["train", "eagle3", "--config", str(tmp_path / "none.toml")]) == 2
    assert dispatch(["train", "eagle4"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "none.toml" in first
    assert "eagle4" in second


def test_a_file_of_settings_may_begin_with_a_mark_and_be_a_pipe(tmp_path: Path) -> None:
    text = "\ufefftarget = 't'\nregistry = 'r'\nspool = 's'\n"
    file, pipe = tmp_path / "learner.toml", tmp_path / "pipe.toml"
    file.write_text(text, "utf-8")
    os.mkfifo(pipe)
    threading.Thread(target=lambda: pipe.write_text(text, "utf-8"), daemon=True).start()
    for path in (file, pipe):
        assert load_config(path).target == tmp_path / "t"
    (tmp_path / "fleet.toml").write_text("\ufeff[[servers]]\nurl = 'http://a:1'\n", "utf-8")
    assert [server.url for server in list_servers(tmp_path / "fleet.toml")] == ["http://a:1"]


@pytest.mark.parametrize("command", [["learner"], ["train", "eagle3"]])
def test_a_folder_of_settings_is_not_called_missing(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch([*command, "--config", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"redraft: Is a directory: {tmp_path}\n"


def test_none_is_a_text_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    default = make_config(find_family("standalone"))
    path.write_text('[draft]\ncheckpoint = "None"\nnum_layers = 2\n')
    cfg = read_config(path, default)
    assert cfg == replace(default, draft=replace(default.draft, checkpoint=None, num_layers=2))
