"""The command line: reads well, loads little, and turns its user's errors into one line."""

import errno
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import torch
from parse_flags import parse
from test_packaging import list_tracked
from waiting import wait_until

from benchmarks.studies import heads
from benchmarks.studies.presets import make_preset
from redraft.distill.data.conversations import load_conversations
from redraft.distill.train.run_config import Prove
from redraft.engine.process import free_port
from redraft.heads.catalog import list_trained
from redraft.recipes import train
from redraft.recipes.cli.commands import list_recipes
from redraft.recipes.cli.flags import list_flags, make_unchecked
from redraft.recipes.cli.run import (
    COMMANDS,
    Group,
    describe_error,
    dispatch,
    find_recipe,
    format_help,
    parse_recipe,
    run_guarded,
)
from redraft.recipes.cli.wrapping import NO_BREAK, wrap_prose
from redraft.recipes.serve.vllm_flags import CLASHES

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Optim:
    lr: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = 10
    """How long."""
    output: Path = Path("outputs")
    words: tuple[str, ...] = ()
    """What and how many;
    a value of each."""
    optim: Optim = field(default_factory=Optim)


@dataclass(frozen=True, kw_only=True)
class Switches:
    quick: bool = True
    """Run the slow part."""
    dry: bool = False
    """Changes nothing."""


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
    text = format_help()
    for name, command in COMMANDS.items():
        assert f"  {name} " in text
        assert command.summary in text
        assert command.example.startswith(f"redraft {name}")
    assert max(len(line) for line in text.splitlines()) <= 80


def test_help_wraps_prose_and_leaves_commands_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    command = f"$ redraft up {'x' * 60}"
    text = wrap_prose(f"{'word ' * 11}word\n(more) words.\n\n    {command}\n{command}\n")
    assert wrap_prose(f"{'word ' * 6}`redraft\ndata`").splitlines()[1] == "`redraft data`"
    first, second, *rest = text.splitlines()
    assert (first, second) == (("word " * 8).strip(), f"{'word ' * 4}(more) words.")
    assert rest == ["", f"    {command}", command]


def test_a_command_of_parts_lists_them_and_names_the_closest(capsys):
    with pytest.raises(SystemExit) as end:
        dispatch(["fleet", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(f"  {part} " in text for part in COMMANDS["fleet"].parts)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert dispatch(["fleet", "rolback"]) == 2
    assert "rollback" in capsys.readouterr().err
    assert len(COMMANDS) <= 20


def test_the_help_groups_its_commands():
    text = format_help()
    places = [text.index(f"\n{group.value}:\n") for group in Group]
    assert places == sorted(places)
    assert (
        text.index("\n  train ")
        < places[1]
        < text.index("\n  eval ")
        < places[2]
        < text.index("\n  learner ")
    )


@pytest.mark.parametrize(("name", "module"), list_recipes())
def test_every_command_is_a_recipe_in_this_folder(name, module):
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    assert source.startswith('"""')
    assert (
        re.search(r"^class \w+Config\b", source, re.MULTILINE)
        or "_config import " in source
        or "\ndef choose_recipe(" in source
    )
    assert "\ndef main(" in source


def test_the_console_script_starts_without_torch_or_the_engine():
    result = run_python(
        """
        import sys, recipes.cli.run
        assert recipes.cli.run.dispatch(["--help"]) == 0
        assert recipes.cli.run.dispatch(["trian"]) == 2
        assert recipes.cli.run.dispatch(["--version"]) == 0
        heavy = {"torch", "vllm", "transformers", "datasets", "numpy", "tyro", "httpx"} & set(sys.modules)
        assert not heavy, heavy
        """
    )
    assert result.returncode == 0, result.stderr
    assert "redraft 0." in result.stdout
    assert "'train'" in result.stderr


SHOW_ENVIRONMENT = """
import os
from redraft.recipes.cli import run
run.dispatch = lambda args: print(os.environ["GOMP_SPINCOUNT"], os.environ["TQDM_MININTERVAL"]) or 0
run.main()
"""


@pytest.mark.parametrize(("given", "shown"), [({}, "0 10"), ({"GOMP_SPINCOUNT": "500"}, "500 10")])
def test_threads_of_a_command_wait_without_spinning_unless_the_user_says_otherwise(given, shown):
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "TQDM_MININTERVAL")
    }
    command = [sys.executable, "-c", SHOW_ENVIRONMENT]
    result = subprocess.run(
        command, cwd=ROOT, env=environment | given, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout.strip()) == (0, shown), result.stderr


@pytest.mark.parametrize("module", ["recipes.cli", "redraft.recipes.cli"])
def test_the_module_runs_as_the_console_script_does(module):
    result = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip() == format_help().strip()


HELPS = [
    *(name for name, _ in list_recipes() if name not in ("train", "adapt")),
    *(f"train {family}" for family in list_trained()),
]
HEAVY = ("torch", "transformers", "vllm", "datasets", "accelerate")

PRINT_EVERY_HELP = f"""
import contextlib, io, json, sys, time
from redraft.recipes.cli.run import dispatch

shown = {{}}
for name in {[*HELPS, "train", "adapt"]}:
    started, text = time.process_time(), io.StringIO()
    with contextlib.redirect_stdout(text):
        try:
            status = dispatch([*name.split(), "--help-all"])
        except SystemExit as end:
            status = end.code
    loaded = [library for library in {HEAVY} if library in sys.modules]
    shown[name] = {{"status": status, "text": text.getvalue(), "loaded": loaded, "s": time.process_time() - started}}
print(json.dumps(shown))
"""


@pytest.fixture(scope="module")
def shown():
    """By command: exit status, text, heavy libraries loaded and CPU seconds of --help-all.

    One process prints all.
    """
    result = run_python(PRINT_EVERY_HELP, COLUMNS="80")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", HELPS)
def test_the_help_of_a_command_loads_no_heavy_library(name, shown):
    print(f"redraft {name} --help: {shown[name]['s']:.2f} s of CPU")
    assert (shown[name]["status"], shown[name]["loaded"]) == (0, [])
    assert f"usage: redraft {name} " in shown[name]["text"]


def test_help_names_files_that_a_wheel_has(shown):
    """Those that git tracks (tests/test_packaging.py)."""
    text = "".join(one["text"] for one in shown.values())
    tracked = {Path(name) for name in list_tracked("recipes")}
    known = tracked.union(*(path.parents for path in tracked))
    named = set(re.findall(r"[\w./$-]*recipes/[\w./-]*\w", text))
    assert named
    assert not [name for name in named if Path(name) not in known]
    assert not re.findall(r"(?:\$|`) ?make \w+", text)


@pytest.mark.parametrize("family", list_trained())
def test_the_usual_help_of_a_training_fits_80_lines(family, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        dispatch(["train", family, "--help"])
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 80
    assert 12 <= len(read_flags(text)) <= 25


def test_the_settings_of_every_command_load_without_torch():
    code = """
        import sys
        from redraft.recipes.cli.commands import list_recipes
        from redraft.recipes.cli.run import find_recipe
        for name, _ in list_recipes():
            if name not in ("train", "adapt"):
                find_recipe(*(name.split()[0], name.split()[1:]))
        import redraft.recipes.adapt, redraft.recipes.train, redraft.distill.train.run_config
        assert "torch" not in sys.modules
        """
    assert run_python(code).returncode == 0


FLAG = re.compile(r"  (?P<flag>(?:-\w, )?--\w[\w.-]*|\[?[A-Z][A-Z_]+( \[.*\]\])?(?=$|  ))(?!\w).*")


def read_flags(text):
    """{flag: its help in one line}, of what tyro prints.

    It prints boxes or, for a stream without an encoding, none.
    """
    flags, name = {}, None
    for line in text.replace("│", " ").splitlines():
        if not line.startswith("  "):
            name = None
        elif found := FLAG.fullmatch(line):
            name = found["flag"]
            flags[name] = line.strip().partition("  ")[2]
        elif name:
            flags[name] += f" {line}"
    return {name: " ".join(text.split()) for name, text in flags.items()}


@pytest.mark.parametrize("name", HELPS)
def test_no_command_in_backticks_is_broken_over_lines(name, shown):
    broken = [line for line in shown[name]["text"].splitlines() if line.count("`") % 2]
    assert broken == []
    assert NO_BREAK not in shown[name]["text"]


@pytest.mark.parametrize("command", ["train", "adapt"])
def test_the_help_before_a_family_is_wrapped(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        dispatch([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("$ ")]) >= 2
    assert not [line for line in lines if len(line) > 80 and not line.startswith("$ ")]
    assert not [line for line in lines if line.count("`") % 2]


@pytest.mark.parametrize("name", HELPS)
def test_every_flag_says_what_it_does(name, shown):
    flags = read_flags(shown[name]["text"])
    assert "-h, --help" in flags
    assert not [
        flag
        for flag, text in flags.items()
        if re.fullmatch(r"(\((default|required|repeatable).*)?", text)
    ]
    assert "(default: )" not in shown[name]["text"]


ELSEWHERE = {
    *(f"--{clash.flag.replace('_', '-')}" for clash in CLASHES),
    *(
        "--shutdown-timeout",
        "--gpu-memory-utilization",
        "--kv-transfer-config",
        "--logprobs-mode",
        "--override-generation-config",
    ),
    *("--hf-overrides", "--enable-eplb", "--weight-transfer-config", "--host", "--api-key"),
    *("--default-chat-template-kwargs", "--override-generation-config.min_p", "--root-path"),
    *("--tensor-parallel-size", "--enable-server-load-tracking"),
    *("--lora-target-modules", "--max-loras"),
    *("--max-num-seqs", "--max-model-len"),  # all of these are vLLM flags
    "--num_processes",  # accelerate launch
    *("--max-steps", "--trainers", "--short"),  # benchmarks
    "--updates",  # recipes/rl_grpo.py
    "--full-attention-indices",  # speculators
    "--speculative-use-rejection-sampling",  # SGLang
    "--help-all",
    "--stop-timeout",  # docker
    *("--ngram.min", "--ngram.max", "--prove.ce-baseline"),  # removed, says the changelog
}
"""Flags in documents that no command lists."""


def test_every_flag_that_a_document_names_exists(shown):
    known = ELSEWHERE.union(*(re.findall(r"--[a-z][\w.-]+", shown[name]["text"]) for name in HELPS))
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/**/*.md")]
    documents += ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")
    named = {
        flag
        for path in documents
        for flag in re.findall(r"`(--[a-z][\w.-]*)[^`\n]*`", path.read_text())
    }
    assert len(named) > 40
    assert named <= known, named - known


def test_help_names_the_values(shown):
    assert "redraft serve [-h] [OPTIONS] TARGET [VLLM_ARG [VLLM_ARG ...]]" in shown["serve"]["text"]
    for flag in (
        "--draft DRAFT",
        "--verify-cost FLOAT",
        "--method {dflash,",
        "--targets [TARGET [",
    ):
        assert flag in shown["serve"]["text"]
    for name in HELPS:
        assert not re.search(r"None\b", " ".join(re.findall(r"--\S+ \S+", shown[name]["text"])))
        assert "(default: None)" not in shown[name]["text"]


def test_help_shows_the_form_of_a_switch_that_changes_it_and_the_parser_takes_both(capsys):
    with pytest.raises(SystemExit):
        parse(Switches, "x", {}, ["--help"], prog="redraft x")
    flags = read_flags(capsys.readouterr().out)
    assert flags.keys() == {"-h, --help", "--no-quick", "--dry"}
    assert flags["--no-quick"] == "Do not run the slow part."
    assert parse(Switches, "x", {}, ["--quick", "--no-dry"], prog="x") == Switches()
    assert parse(Switches, "x", {}, ["--no-quick", "--dry"], prog="x") == Switches(
        quick=False, dry=True
    )


def test_a_value_that_a_config_refuses_is_one_line(capsys):
    assert dispatch(["train", "eagle3", "--optim.lr", "-1"]) == 2
    assert dispatch(["plan", "--devices", "0"]) == 2
    shown = capsys.readouterr()
    first, second = shown.err.splitlines()
    assert ("-1.0" in first, "--devices is 0" in second, shown.out) == (True, True, "")


def test_the_docstring_of_a_field_is_folded_into_whole_lines(capsys):
    with pytest.raises(SystemExit):
        parse(Config, "x", {}, ["--help"], prog="redraft x")
    assert "how many; a value of" in read_flags(capsys.readouterr().out)["--words"]


def test_arguments_for_vllm_are_given_one_by_one():
    args = ["--engine-args=--tensor-parallel-size=8", "--engine-args=--max-model-len=4096"]
    assert parse(Prove, None, {}, args, prog="x").engine_args == (
        "--tensor-parallel-size=8",
        "--max-model-len=4096",
    )
    args = ["--tensor-parallel-size=4", "--enforce-eager"]
    for command, *flags in (
        ("bench", "--concurrency", "1", "2"),
        ("eval", "--draft", "d"),
        ("regenerate", "--prompts", "stdlib", "--output", "x"),
        ("serve", "t"),
        ("serve-features", "t"),
    ):
        assert parse_recipe(*find_recipe(command, [*flags, "--", *args])).vllm_args == tuple(args)
    args = ["--flags=--loop.steps", "--flags=2"]
    assert parse(heads.Config, None, {}, args, prog="x").flags == ("--loop.steps", "2")


PARTS = (
    *("count", "fleet_costs", "hook_work", "traffic", "candidates"),
    *("up_folder", "up_parts", "vllm_flags"),
)
"""Files of `redraft plan`, `bench`, `up` and `serve` beside the command."""
"""Files of `redraft plan`, `bench`, `up` and `serve` beside the command."""
COMMAND_FILES = [
    path
    for path in sorted((ROOT / "recipes").rglob("*.py"))
    if path.stem not in ("__init__", *PARTS)
    and not path.stem.endswith("_config")
    and path.parent.name not in ("demo", "cli")
]


LAUNCHED = ("train", "distill_llama3b", "rl_grpo")
"""Files that Python or `accelerate launch` starts."""


def test_every_file_is_a_command():
    modules = {
        ".".join(("redraft", *path.relative_to(ROOT).with_suffix("").parts))
        for path in COMMAND_FILES
    }
    assert modules == {
        *dict(list_recipes()).values(),
        "redraft.recipes.distill_llama3b",
        "redraft.recipes.rl_grpo",
    }


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_launched_file_prints_its_help(name):
    result = subprocess.run(
        [sys.executable, f"recipes/{name}.py", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert f"usage: recipes/{name}.py " in " ".join(result.stdout.split())


def test_a_command_far_from_all_gets_the_list(capsys):
    assert dispatch(["xyzzy"]) == 2
    assert "train, " in capsys.readouterr().err


def test_flags_change_what_a_preset_sets():
    chosen = parse(Config, "x", PRESETS, ["--preset", "demo", "--steps", "7"], prog="redraft x")
    assert chosen == Config(steps=7, optim=Optim(lr=0.5))
    assert parse(Config, "x", PRESETS, ["--steps=7", "--preset=demo"], prog="redraft x") == chosen
    assert parse(Config, "x", PRESETS, [], prog="redraft x") == Config()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--preset", "dem"], "'dem'.*'demo'"),
        (["--preset", "xyzzy"], "'xyzzy'.*demo"),
        (["--preset"], "--preset"),
    ],
)
def test_a_preset_that_is_not_there_is_refused(args, said):
    with pytest.raises(ValueError, match=said):
        parse(Config, "x", PRESETS, args, prog="redraft x")


def test_every_demo_of_the_small_target_computes_in_float32_on_every_machine():
    """It is stored in bfloat16, in which a CPU computes by default if it can."""
    demos = {name: make_preset(name.replace("-", "_")).target_dtype for name in list_trained()}
    assert "eagle3" in demos
    assert set(demos.values()) == {"float32"}


@pytest.mark.parametrize("command", ["train eagle3", "eval", "data score", "doctor", "bench"])
def test_the_type_of_the_target_has_one_flag(command, shown):
    assert "--target-dtype" in shown[command]["text"]
    assert " --dtype" not in shown[command]["text"]


def test_the_help_of_a_recipe_names_its_presets_and_fields(capsys):
    with pytest.raises(SystemExit) as end:
        parse(Config, "Do a thing.", PRESETS, ["--help"], prog="redraft thing")
    text = capsys.readouterr().out
    assert end.value.code == 0
    for expected in (
        "usage: redraft thing",
        "Do a thing.",
        "--preset {demo}",
        "How long.",
        "--optim.lr",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("plan --trget mimo-7b", ["--trget", "mean --target?", "`redraft plan train --help`"]),
        ("data a.jsonl --target t --held_uot 0.1", ["--held-out?", "`redraft data show --help`"]),
        ("data a.jsonl --data.strict", ["no flag --data.strict", "mean --strict?"]),
        ("data count --data a.jsonl --trget t", ["--target?", "`redraft data count --help`"]),
        (
            "bench --xyzzy",
            ["no flag --xyzzy: `redraft bench --help`", "flags for vLLM come after --"],
        ),
        ("train eagle3 --lr=1e-3", ["--optim.lr?", "`redraft train eagle3 --help-all`"]),
        ("train eagle3 --no-engine", ["mean --prove.no-engine?"]),
        (
            "fleet versions --print-config",
            ["no flag --print-config", "`redraft fleet versions --help`"],
        ),
        ("serve --drft ngram TARGET", ["no flag --drft", "mean --draft?"]),
    ],
)
def test_a_wrong_flag_is_one_line_with_the_closest_and_the_help_that_lists_it(
    command, named, capsys
):
    assert dispatch(command.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert [part for part in named if part not in error] == []


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("data count --data a.jsonl", "missing: --target TARGET; `redraft data count --help`"),
        ("data --target t", "missing: SOURCE; `redraft data show --help`"),
        (
            "plan --devices many",
            "--devices cannot be 'many': give INT; `redraft plan train --help`",
        ),
        ("plan --devices", "Missing value for argument '--devices'.*`redraft plan train --help`"),
        ("plan --signal all", "invalid choice 'all' .*'endpoint'.*`redraft plan train --help`"),
        ("plan more", "Unrecognized options: more; `redraft plan train --help`"),
        ("doctor -x", "Unrecognized options: -x; `redraft doctor --help`"),
        ("eval --max-loss x", "--max-loss cannot be 'x': give FLOAT; `redraft eval --help`"),
        (
            "train eagle3 --optim.max-grad-norm x",
            "--optim.max-grad-norm cannot be 'x': give FLOAT; `redraft train eagle3 --help-all`",
        ),
    ],
)
@pytest.mark.parametrize("columns", ["40", "200"])
def test_arguments_that_cannot_be_read_are_one_line(command, reason, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    assert dispatch(command.split()) == 2
    shown = capsys.readouterr()
    assert re.fullmatch(rf"redraft: {reason}.* lists all flags.*\n", shown.err)
    assert (shown.out, os.environ["COLUMNS"]) == ("", columns)


def test_a_mistyped_flag_ends_with_2_and_a_suggestion():
    result = run_python(RECIPE, "--dfeect")
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(
        r"redraft: there is no flag --dfeect: did you mean --defect\?.*\n", result.stderr
    )


@pytest.mark.parametrize("name", HELPS)
def test_the_flags_that_are_accepted_are_those_of_the_help(name, shown):
    first, *rest = name.split()
    recipe, _ = find_recipe(first, rest)
    flags = [
        flag
        for flag in list_flags(recipe.default or make_unchecked(recipe.config_type))
        if flag.forms
    ]
    listed = {flag for flag in read_flags(shown[name]["text"]) if flag.startswith("--")}
    assert listed <= {form for flag in flags for form in flag.forms}
    assert not [flag.name for flag in flags if listed.isdisjoint(flag.forms)]


def test_an_error_names_settings_as_the_command_that_ran_spells_them(
    random_target, tmp_path, monkeypatch, capsys
):
    def refusal(*args):
        assert dispatch(args) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "good", "completion": "yes"}\n{"odd": 1}\n')
    assert "(without --strict, " in refusal(
        "data", str(rows), "--target", str(random_target), "--strict"
    )
    monkeypatch.setattr(
        train, "main", lambda _, cfg: load_conversations(cfg.data.source, strict=cfg.data.strict)
    )
    flags = ("--data.source", str(rows), "--data.strict")
    assert "(without --data.strict, " in refusal("train", "eagle3", *flags)

    for command, said in (
        ("up TARGET --capture.fraction 2", "--capture.fraction is 2.0: it must be between 0 and 1"),
        ("serve TARGET --draft ngram --capture.fraction 2", "--capture.fraction is 2.0: "),
        ("serve TARGET --capture.nats.fleet a.b", "--capture.nats.fleet is 'a.b': "),
        ("tap http://a:1 --target t --fraction 2", "--fraction is 2.0: "),
        ("data count --target t --data d --retrieval.max-run 0", "--retrieval.max-run is 0: "),
        ("train eagle3 --optim.warmup-fraction 2", "--optim.warmup-fraction is 2.0: "),
        ("train eagle3 --divergence.beta 2", "--divergence.beta is 2.0: "),
        ("train peagle --head.keep-ratio 2", "--head.keep-ratio must be above 0 and at most 1, "),
        ("train dflash --head.full-layers 9", "--head.full-layers [9] do not exist: "),
        ("plan fleet --traffic.tau 9", "--traffic.tau is 9.0: with 3 draft tokens, "),
        (
            "train standalone --draft.checkpoint None",
            "a draft starts from a model, layers of the target or new layers: set "
            "--draft.checkpoint, --draft.layers or --draft.num-layers",
        ),
    ):
        assert refusal(*command.split()).startswith(f"redraft: {said}")


def test_a_config_file_spells_a_refused_setting_as_its_key(tmp_path, capsys):
    path = tmp_path / "count.toml"
    path.write_text("[retrieval]\nmax_run = 0\n")
    assert dispatch(["data", "count", "--config", str(path)]) == 2
    assert f"{path}: retrieval.max_run is 0: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train eagle3 --head.head-dim 0", "--head.head-dim is 0: it must be at least 1"),
        ("train eagle3 --head.step-decay -2", "--head.step-decay is -2.0: it must be at least 0"),
        ("train dflash --head.gamma 0", "--head.gamma must be above 0"),
        (
            "data count --data a --target t --sequence-length 0",
            "--sequence-length is 0: it must be at least 2",
        ),
        (
            "data count --data a --target t --retrieval.max-entries 0",
            "--retrieval.max-entries is 0: it must be at least 1",
        ),
        (
            "serve t --draft ngram --capture.spool-bytes 0",
            "--capture.spool-bytes is 0: it must be at least 1",
        ),
        ("train eagle3 --prove.concurrency 0", "--prove.concurrency is 0: it must be at least 1"),
        (
            "train eagle3 --overwrite=true",
            "--overwrite takes no value: give --overwrite or --no-overwrite",
        ),
        ("plan trian", "redraft plan has no part 'trian': did you mean 'train'?"),
        ("data showw a.jsonl", "redraft data has no part 'showw': did you mean 'show'?"),
    ],
)
def test_what_no_setting_flag_or_part_can_be_is_named(command, said, capsys):
    assert dispatch(command.split()) == 2
    assert capsys.readouterr().err == f"redraft: {said}\n"


def test_a_flag_given_twice_is_refused_unless_it_takes_more(capsys):
    flags = ["--target", "t", "--data.source", "a.jsonl", "--data.source=b.jsonl"]
    assert dispatch(["train", "eagle3", *flags]) == 2
    assert dispatch(["data", "a.jsonl", "--sample_tokens", "1", "--sample-tokens", "2"]) == 2
    assert dispatch(["train", "eagle3", *flags[:2], "--overwrite", "--no-overwrite"]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert ("--data.source" in first, "--sample-tokens" in second) == (True, True)
    assert "--overwrite is given 2 times" in third


def test_a_flag_is_no_value_of_the_one_before_it(capsys):
    assert dispatch(["train", "eagle3", "--config", "--target", "t"]) == 2
    assert "--config needs a value" in capsys.readouterr().err


def disk_full() -> None:
    with open("/dev/full", "w") as file:
        file.write("x")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (FileNotFoundError("there is no folder x"), "there is no folder x"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "x.json"),
            "No such file or directory: x.json",
        ),
        (
            IsADirectoryError(errno.EISDIR, "Is a directory", ".x.1.partial", None, "x"),
            "Is a directory: x",
        ),
        (OSError(errno.ENOSPC, "no space left: needs 5 GB"), "no space left: needs 5 GB"),
        (httpx.ConnectError("cannot reach http://localhost:1"), "cannot reach http://localhost:1"),
        (KeyboardInterrupt(), "interrupted"),
        (
            ModuleNotFoundError("No module named 'vllm'"),
            "No module named 'vllm'; `redraft doctor` lists what to install",
        ),
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 80 GiB."
            ),
            "CUDA out of memory. Tried to allocate 2 GiB. Use smaller batches (for a training run, a "
            "smaller --loop.batch-size with a larger --optim.accumulation), or a GPU with more "
            "memory: `redraft plan` calculates what a training step needs",
        ),
        (TypeError("a defect"), None),
        (AssertionError("a defect"), None),
    ],
)
def test_what_a_user_can_mend_is_one_line(error, line):
    assert describe_error(error) == line


def test_no_word_in_an_error_steers_the_terminal(capsys):
    def fail() -> None:
        raise ValueError("the server says \x1b]0;title\x07 and \x9b2J")

    assert run_guarded(fail) == 2
    assert capsys.readouterr().err == "redraft: the server says \\x1b]0;title\\x07 and \\x9b2J\n"


def test_a_name_that_is_not_utf_8_is_refused_before_the_work(capsys):
    assert dispatch(["data", "caf\udce9.jsonl", "--target", "t"]) == 2
    assert (
        capsys.readouterr().err
        == "redraft: caf\\udce9.jsonl is not UTF-8: rename the file or folder\n"
    )


def test_a_real_full_disk_is_one_line(capsys):
    assert run_guarded(disk_full) == 2
    assert capsys.readouterr().err == f"redraft: {os.strerror(errno.ENOSPC)}\n"


RECIPE = """
from dataclasses import dataclass
from pathlib import Path
from redraft.recipes.cli.run import run_recipe

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
    assert re.fullmatch(r"redraft: [^\n]*\bnowhere\.jsonl\n", result.stderr)


def test_the_traceback_is_there_for_who_asks_and_for_defects():
    asked = run_python(RECIPE, REDRAFT_TRACEBACK="1")
    assert "Traceback" in asked.stderr
    assert "FileNotFoundError" in asked.stderr
    defect = run_python(RECIPE, "--defect")
    assert defect.returncode == 1
    assert "TypeError: a defect" in defect.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_an_encoding_lacks_is_shown_escaped_and_ends_nothing(encoding):
    shown = r"print('\u300c \udce9')"
    result = run_python(RECIPE.replace("cfg.data.read_text()", shown), PYTHONIOENCODING=encoding)
    assert (result.returncode, result.stderr) == (0, "")
    assert r"\udce9" in result.stdout
    assert (r"\u300c" in result.stdout) == (encoding != "utf-8")


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


def test_a_tap_outlives_the_reader_of_its_output(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "redraft.recipes.cli",
        "tap",
        f"http://127.0.0.1:{free_port()}",
    ]
    command += ["--target", str(tmp_path), "--spool", str(tmp_path / "spool"), "--admin-port", "0"]
    tap = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        tap.stdout.close()  # its first line is a broken pipe
        wait_until(lambda: is_listening(port) or tap.poll() is not None)
        assert tap.poll() is None
    finally:
        tap.terminate()
        tap.wait()


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
