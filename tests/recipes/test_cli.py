"""The command line: reads well, loads little, and turns its user's errors into one line."""

import errno
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from recipes.cli import COMMANDS, dispatch, guarded, help_text, parse, user_error

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Optim:
    lr: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = 10
    """How long."""
    output: Path = Path("outputs")
    optim: Optim = field(default_factory=Optim)


PRESETS = {"demo": Config(steps=2, optim=Optim(lr=0.5))}


def run_python(code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )


def test_the_help_names_every_command_in_80_columns():
    text = help_text()
    for name, command in COMMANDS.items():
        assert f"  {name} " in text
        assert command.summary in text
        assert command.example.startswith(f"redraft {name}")
    assert max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_recipe_in_this_folder(name):
    source = (ROOT / f"{COMMANDS[name].module.replace('.', '/')}.py").read_text()
    assert source.startswith('"""')
    assert "\nclass Config" in source
    assert "\ndef main(cfg: Config)" in source


def test_the_console_script_starts_without_torch_or_the_engine():
    result = run_python(
        """
        import sys, recipes.cli
        assert recipes.cli.dispatch(["--help"]) == 0
        assert recipes.cli.dispatch(["dstill"]) == 2
        assert recipes.cli.dispatch(["--version"]) == 0
        heavy = {"torch", "vllm", "transformers", "datasets", "numpy", "tyro", "httpx"} & set(sys.modules)
        assert not heavy, heavy
        """
    )
    assert result.returncode == 0, result.stderr
    assert "redraft 0." in result.stdout
    assert "did you mean 'distill'?" in result.stderr


def test_a_command_far_from_all_gets_the_list(capsys):
    assert dispatch(["xyzzy"]) == 2
    assert "there is doctor, distill" in capsys.readouterr().err


def test_flags_change_what_a_preset_sets():
    chosen = parse(Config, "x", PRESETS, ["--preset", "demo", "--steps", "7"], prog="redraft x")
    assert chosen == Config(steps=7, optim=Optim(lr=0.5))
    assert parse(Config, "x", PRESETS, ["--steps=7", "--preset=demo"], prog="redraft x") == chosen
    assert parse(Config, "x", PRESETS, [], prog="redraft x") == Config()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--preset", "dem"], "there is no preset 'dem': did you mean 'demo'"),
        (["--preset", "xyzzy"], "there is demo"),
        (["--preset"], "--preset needs a name"),
    ],
)
def test_a_preset_that_is_not_there_is_refused(args, said):
    with pytest.raises(ValueError, match=said):
        parse(Config, "x", PRESETS, args, prog="redraft x")


def test_the_help_of_a_recipe_names_its_presets_and_fields(capsys):
    with pytest.raises(SystemExit) as end:
        parse(Config, "Do a thing.", PRESETS, ["--help"], prog="redraft thing")
    text = capsys.readouterr().out
    assert end.value.code == 0
    for expected in ("usage: redraft thing", "Do a thing.", "--preset {demo}", "How long.", "--optim.lr"):
        assert expected in text


def test_a_mistyped_flag_ends_with_2_and_a_suggestion(capsys):
    with pytest.raises(SystemExit) as end:
        parse(Config, "x", {}, ["--stpes", "3"], prog="redraft thing")
    assert end.value.code == 2
    assert "--steps" in capsys.readouterr().err


def disk_full() -> None:
    with open("/dev/full", "w") as file:
        file.write("x")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (FileNotFoundError("there is no folder x"), "there is no folder x"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x.json"), "No such file or directory: x.json"),
        (OSError(errno.ENOSPC, "no space left: needs 5 GB"), "no space left: needs 5 GB"),
        (httpx.ConnectError("cannot reach http://localhost:1"), "cannot reach http://localhost:1"),
        (KeyboardInterrupt(), "interrupted"),
        (
            ModuleNotFoundError("No module named 'vllm'"),
            "No module named 'vllm'; `redraft doctor` says what to install",
        ),
        (TypeError("a defect"), None),
        (AssertionError("a defect"), None),
    ],
)
def test_what_a_user_can_mend_is_one_line(error, line):
    assert user_error(error) == line


def test_a_real_full_disk_is_one_line(capsys):
    assert guarded(disk_full) == 2
    assert capsys.readouterr().err == "redraft: No space left on device\n"


RECIPE = """
from dataclasses import dataclass
from pathlib import Path
from recipes.cli import run_recipe

@dataclass(frozen=True, kw_only=True)
class Config:
    data: Path = Path("nowhere.jsonl")
    defect: bool = False

def main(cfg):
    if cfg.defect:
        raise TypeError("a defect")
    cfg.data.read_text()

run_recipe(main, Config, "A recipe.")
"""


def test_a_recipe_run_as_a_file_ends_with_one_line_and_2():
    result = run_python(RECIPE)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "redraft: No such file or directory: nowhere.jsonl\n"


def test_the_traceback_is_there_for_who_asks_and_for_defects():
    asked = run_python(RECIPE, REDRAFT_TRACEBACK="1")
    assert "Traceback" in asked.stderr
    assert "FileNotFoundError" in asked.stderr
    defect = run_python(RECIPE, "--defect")
    assert defect.returncode == 1
    assert "TypeError: a defect" in defect.stderr


def test_a_recipe_that_ends_well_returns():
    result = run_python(RECIPE, "--data", "pyproject.toml")
    assert (result.returncode, result.stderr) == (0, "")


def test_ctrl_c_is_one_line():
    result = run_python(RECIPE.replace("cfg.data.read_text()", "raise KeyboardInterrupt"))
    assert (result.returncode, result.stderr) == (2, "redraft: interrupted\n")


def test_a_reader_that_has_read_enough_is_no_error():
    command = [sys.executable, "-c", "from recipes.cli import main; main()", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == ""
