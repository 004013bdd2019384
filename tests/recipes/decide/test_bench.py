"""`redraft bench`: the flags, what it refuses, and the whole command with real servers."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import model_runners
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from redraft.distill.data.conversations import load_conversations
from redraft.engine import adaptive
from redraft.engine.counts import AcceptanceCounts
from redraft.engine.hardware import Machine
from redraft.engine.lookup_first import HeadLimits, mix
from redraft.engine.measure import Measurement, Output
from redraft.engine.prompts import Prompt
from redraft.engine.sampling import GREEDY
from redraft.engine.server import VllmServer
from redraft.eval.forecast.ngram import Ngram
from redraft.eval.serving import baseline, rounds
from redraft.eval.serving.bench_report import make_schema
from redraft.eval.serving.cost import AdaptivePoint
from redraft.eval.serving.prediction import Candidate
from redraft.eval.serving.rounds import PLAIN, Plan, Results, start_servers
from redraft.files.folder import fingerprint, read_config
from redraft.files.target_folder import TargetFolder
from redraft.heads.families.retrieval import Config as Counts
from redraft.heads.families.retrieval import Retrieval
from redraft.recipes import train
from redraft.recipes.cli.run import dispatch, find_recipe, parse_recipe
from redraft.recipes.decide import bench, candidates
from redraft.recipes.decide.bench import BenchConfig, Rounds, known_answers, main, serve_flags
from redraft.recipes.decide.candidates import (
    Making,
    finished_drafts,
    give_acceptance,
    make_lookups,
    make_trained,
    name_drafts,
    run_once,
    spread,
    training_command,
)
from redraft.recipes.demo.parts import ANSWERS


def test_layers_are_taken_at_equal_distances_with_the_first_and_the_last(tiny_target: Path) -> None:
    assert spread(2, TargetFolder.open(tiny_target)) == [0, 6]
    assert spread(3, TargetFolder.open(tiny_target)) == [0, 3, 6]
    assert spread(1, TargetFolder.open(tiny_target)) == [0]
    with pytest.raises(ValueError, match=r"7.*1.*6"):
        spread(7, TargetFolder.open(tiny_target))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": ("layer-2",)}, "--train layer-2 .*layers-N"),
        ({"train": ("eagle1-8k",)}, "--train eagle1-8k"),
        ({"train": ("ngram+eagle1-8k",)}, r"--train ngram\+eagle1-8k "),
        ({"train": ("ngram+dflash-8k",)}, r"\beagle3-Nk\b.*\bngram\b.*\bretrieval\b"),
        ({"rounds": 5}, r"--rounds 5\b.*95%.*\b6\b"),
        ({"concurrency": ()}, "--concurrency"),
        ({"concurrency": (0, 8)}, "--concurrency 0 8"),
        ({"concurrency": (8, 8)}, "--concurrency 8 8"),
    ],
)
def test_bad_flags_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchConfig(**changes)


def make_making(
    output: Path, target: Path, answers: str | None = "answers.jsonl", **changes: Any
) -> Making:
    cfg = BenchConfig(output=output, minutes=0.5, max_tokens=16, **changes)
    opened = TargetFolder.open(target)
    return Making(cfg=cfg, target=opened, answers=answers, prompts=output / "prompts.jsonl")


@pytest.mark.parametrize("name", ["layers-2", "medusa", "eagle3-4k", "dflash-4k", "peagle-4k"])
def test_every_family_takes_the_flags_of_its_training(
    name: str, tiny_target: Path, tmp_path: Path
) -> None:
    _, module, *args = training_command(make_making(tmp_path, tiny_target), name)
    assert module == "redraft.recipes.train"
    parsed = parse_recipe(*train.choose_recipe(args, module))
    assert parsed.loop.minutes == 0.5
    # The forecast is of the prompts of the first rounds.
    assert (parsed.data.prompts, parsed.data.num_prompts) == (str(tmp_path / "prompts.jsonl"), 32)
    assert parsed.output == tmp_path / name
    assert not parsed.prove.engine


def test_a_flag_for_the_trainings_replaces_that_of_the_comparison(
    tiny_target: Path, tmp_path: Path
) -> None:
    flags = ("--loop.batch-size", "2", "--init-tokens=64", "--loop.seed", "3")
    _, module, *args = training_command(
        make_making(tmp_path, tiny_target, flags=flags), "eagle3-4k"
    )
    parsed = parse_recipe(*train.choose_recipe(args, module))
    assert (parsed.loop.batch_size, parsed.loop.seed, parsed.init_tokens) == (2, 3, 64)
    assert (parsed.init, parsed.loop.sequence_length) == ("least_squares", 512)


def test_a_finished_draft_is_kept_and_one_of_other_flags_or_another_target_refused(
    tmp_path: Path, tiny_target: Path
) -> None:
    target = shutil.copytree(tiny_target, tmp_path / "target")
    folder = tmp_path / "layers-2"
    folder.mkdir()
    (folder / "report.json").write_text("{}")

    def run(*command: str) -> None:
        # There is no recipe x.py.
        run_once(folder, folder / "report.json", [*command], make_making(tmp_path, target))

    def keep(made: object) -> None:
        (tmp_path / "layers-2.command.json").write_text(json.dumps(made))

    keep({"command": ["x.py", "--a"], "target": fingerprint(target), "data": []})
    run("x.py", "--a")
    with pytest.raises(ValueError, match=r"layers-2.*--overwrite"):
        run("x.py", "--b")
    (target / "config.json").write_text(json.dumps({**read_config(target), "rope_theta": 1.0}))
    with pytest.raises(ValueError, match=r"/target.*--overwrite"):
        run("x.py", "--a")


@pytest.mark.parametrize(("temperature", "taus"), [(0.0, [1.5, None]), (0.7, [None, None])])
def test_a_forecast_is_shown_only_beside_rounds_of_greedy_requests_to_the_head_alone(
    temperature: float,
    taus: list[float | None],
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(candidates, "run_once", lambda *_: None)
    shutil.copytree("tests/assets/tiny-eagle3", tmp_path / "eagle3-8k" / "draft")
    report = {"offline": {"tau_forecast": 1.5}}
    (tmp_path / "eagle3-8k" / "report.json").write_text(json.dumps(report))
    making = make_making(tmp_path, tiny_target, temperature=temperature)
    made = list(make_trained(making, ("eagle3-8k", "ngram+eagle3-8k:2")))
    assert [candidate.tau_forecast for candidate in made] == taus
    assert bench.verify_adaptively(made[0]).tau_forecast is None


def test_a_draft_made_of_answers_or_prompts_that_have_changed_is_refused_or_made_again(
    tmp_path: Path, tiny_target: Path
) -> None:
    script, answers = tmp_path / "recipe.py", tmp_path / "answers.jsonl"
    # A recipe whose draft is what it was made of.
    script.write_text(
        "import pathlib, sys\nfolder, *read = map(pathlib.Path, sys.argv[1:])\nfolder.mkdir()\n"
        "(folder / 'report.json').write_text(' '.join(path.read_text() for path in read))\n"
    )

    def prepare(question: str, *, overwrite: bool = False) -> Making:
        questions = [{"messages": [{"role": "user", "content": question}], "domain": "all"}] * 4
        cfg = BenchConfig(
            target=str(tiny_target), data=str(answers), output=tmp_path, overwrite=overwrite
        )
        return bench.prepare(cfg, TargetFolder.open(tiny_target), questions)

    def make(name: str, making: Making) -> str:
        folder, read = (
            tmp_path / name,
            [answers] if name == "retrieval" else [answers, making.prompts],
        )
        command = [str(script), str(folder), *map(str, read)]
        run_once(folder, folder / "report.json", command, making)
        return (folder / "report.json").read_text().partition(" ")[0]

    answers.write_text("Monday's\n")
    assert [make(name, prepare("a")) for name in ("retrieval", "medusa")] == ["Monday's\n"] * 2
    script.write_text("raise SystemExit('made again')")
    assert [make(name, prepare("a")) for name in ("retrieval", "medusa")] == ["Monday's\n"] * 2
    # A training forecasts on the prompts; counted answers do not read them.
    assert make("retrieval", prepare("b")) == "Monday's\n"
    with pytest.raises(ValueError, match=r"medusa .*--overwrite"):
        make("medusa", prepare("b"))
    answers.write_text("Friday's answers\n")
    for name in ("retrieval", "medusa"):
        with pytest.raises(ValueError, match=rf"{name} .*--overwrite"):
            make(name, prepare("a"))
        with pytest.raises(ValueError, match=f"{name} failed"):
            make(name, prepare("a", overwrite=True))


def test_an_interrupted_training_starts_again_or_is_resumed(
    tmp_path: Path, tiny_target: Path
) -> None:
    folder = tmp_path / "layers-2"
    script = tmp_path / "recipe.py"
    # The first run is interrupted after its checkpoint; later ones finish, and report their
    # arguments.
    script.write_text(
        f"import pathlib, sys\nfolder = pathlib.Path({str(folder)!r})\n"
        "new = not (folder / 'checkpoints').is_dir() or '--overwrite' in sys.argv\n"
        "(folder / 'checkpoints').mkdir(parents=True, exist_ok=True)\n"
        "sys.exit(1) if new else (folder / 'report.json').write_text(' '.join(sys.argv[1:]))\n"
    )

    def run(**changes: Any) -> None:
        run_once(
            folder,
            folder / "report.json",
            [str(script)],
            make_making(tmp_path, tiny_target, **changes),
        )

    with pytest.raises(ValueError, match="layers-2"):
        run()
    # with --overwrite it starts anew, so it is interrupted again
    with pytest.raises(ValueError, match="layers-2"):
        run(overwrite=True)
    run()
    assert (folder / "report.json").is_file()


def test_a_head_behind_two_lookups_is_trained_once(tmp_path: Path, tiny_target: Path) -> None:
    script, folder = tmp_path / "recipe.py", tmp_path / "eagle3-8k"
    script.write_text(
        f"import pathlib\nfolder = pathlib.Path({str(folder)!r})\nfolder.mkdir()\n"
        "(folder / 'report.json').write_text('{}')\n"
        f"with open({str(tmp_path / 'runs')!r}, 'a') as file: file.write('x')\n"
    )
    making = make_making(tmp_path, tiny_target, overwrite=True)
    for _ in range(2):
        run_once(folder, folder / "report.json", [str(script)], making)
    assert (tmp_path / "runs").read_text() == "x"


class Servers:
    """Servers that do not start, and rounds of them.

    The group with the draft `broken` is interrupted.
    """

    def __init__(self) -> None:
        self.started: list[list[str]] = []
        self.broken = ""

    def measure(
        self,
        target: str,
        drafts: Mapping[str, Any],
        prompts: Sequence[Prompt],
        plan: Plan,
        logs: Path,
        *,
        alone: Plan | None = None,
        **options: Any,
    ) -> Results:
        self.started.append(list(drafts))
        if self.broken in drafts:
            raise KeyboardInterrupt

        def measurement(name: str) -> Measurement:
            counts = AcceptanceCounts.from_blocks([1, 0], 2)
            output = Output(token_ids=[1, 2, 3], counts=None if name == PLAIN else counts)
            # a time that no two measurements share
            return Measurement(
                prompts=prompts[:1],
                outputs=[output],
                full_s=time.perf_counter(),
                full_tokens=3,
                dtype="float32",
                counts=counts,
            )

        further = alone.prompts if alone else ()
        cells = [*((name, load) for name in drafts for load in plan.prompts)]
        return {cell: [measurement(cell[0])] for cell in cells + [(PLAIN, n) for n in further]}


def test_finished_groups_of_rounds_are_kept_whole(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = Servers()
    monkeypatch.setattr(bench, "measure_servers", servers.measure)
    (tmp_path / "c").mkdir()
    some = [
        *(Candidate(name, name, {"method": "ngram"}, 2) for name in ("a", "b")),
        Candidate("c", "c", {"method": "draft_model", "model": str(tmp_path / "c")}, 2),
    ]
    prompts = [Prompt(token_ids=[1, 2])]

    def measure(**changes: Any) -> list[Results]:
        cfg = BenchConfig(together=3, output=tmp_path / "drafts", **changes)
        rounds = Rounds(cfg, TargetFolder.open(tiny_target), None)
        return [rounds.measure_first(group, prompts) for group in (some[:2], some[2:])]

    servers.broken = "c"
    with pytest.raises(KeyboardInterrupt):
        measure()
    servers.broken = ""
    first, last = measure()
    # two drafts beside the target alone, then the last one; the first group was finished
    assert servers.started == [["none", "a", "b"], ["none", "c"], ["none", "c"]]
    assert set(last) == {("none", 1), ("none", 8), ("none", 4), ("none", 32), ("c", 1), ("c", 8)}
    assert last["none", 1] != first["none", 1], "each group has rounds of the target alone"
    assert measure() == [first, last]
    assert len(servers.started) == 3
    # a draft that was trained again, and other settings
    (tmp_path / "c" / "model.safetensors").write_text("new")
    assert measure()[0] == first
    assert servers.started[3:] == [["none", "c"]]
    measure(max_tokens=32)
    assert len(servers.started) == 6


def test_rounds_that_several_drafts_share_count_once(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = Servers()
    monkeypatch.setattr(bench, "measure_servers", servers.measure)
    rounds = Rounds(BenchConfig(together=3, output=tmp_path), TargetFolder.open(tiny_target), None)
    best: list[Any] = [
        SimpleNamespace(
            candidate=Candidate(name, name, {"method": "ngram"}, 2),
            speculative_config={"method": "ngram"},
        )
        for name in ("a", "b", "c")
    ]
    confirmed = rounds.confirm(best, [Prompt(token_ids=[1, 2])])
    assert servers.started == [["none", "a", "b"], ["none", "c"]]
    assert confirmed["a"] is confirmed["b"]
    assert [{name for name, _ in group} for group in rounds.groups] == [
        {"none", "a", "b"},
        {"none", "c"},
    ]


def test_no_prompt_that_chooses_confirms_too(tiny_target: Path) -> None:
    questions = [
        {"messages": [{"role": "user", "content": f"question {i % 10}"}], "domain": "all"}
        for i in range(64)
    ]
    first, rest = bench.render_prompts(BenchConfig(), TargetFolder.open(tiny_target), questions)
    chosen, confirming = ([tuple(prompt.token_ids) for prompt in some] for some in (first, rest))
    # Every fourth of them asks an even question: 0, 4, 8, 2, 6.
    assert (len(chosen), len(confirming)) == (len(set(chosen)), len(set(confirming))) == (5, 5)
    assert not set(chosen) & set(confirming)


def test_a_finished_draft_that_proposes_less_is_refused_before_the_trainings(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(
        {"hidden_norm.weight": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["DFlashDraftModel"], "block_size": 4})
    )
    monkeypatch.setattr(bench, "load_questions", lambda *_: [])
    monkeypatch.setattr(bench, "render_prompts", lambda *_: ([], []))
    monkeypatch.setattr(candidates, "run_once", lambda *_: pytest.fail("a training was started"))
    draft: dict[str, Any] = {"draft": (str(tmp_path),), "num_speculative_tokens": 5}
    cfg = BenchConfig(
        target=str(tiny_target), data="answers.jsonl", output=tmp_path / "drafts", **draft
    )
    with pytest.raises(ValueError, match=r"5.*DFlash.*3"):
        main(cfg)


def test_a_target_that_cannot_be_had_is_told_before_the_trainings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redraft.files.folder._download", lambda name, *patterns: "no network")
    monkeypatch.setattr(candidates, "run_once", lambda *_: pytest.fail("a training was started"))
    with pytest.raises(FileNotFoundError, match="redraft-tests/none"):
        main(BenchConfig(target="redraft-tests/none", data="answers.jsonl", output=tmp_path))


def test_the_answers_in_redraft_are_for_the_target_in_it(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[list[str]] = []

    def count(folder: Path, result: Path, command: list[str], *_: Any) -> None:
        counted.append(command)
        folder.mkdir(exist_ok=True)
        Retrieval(Counts(max_run=1), {(5,): (6, 0.9)}, [0.0, 0.1]).write(folder)

    monkeypatch.setattr(candidates, "run_once", count)

    def names(**changes: Any) -> list[str]:
        cfg = BenchConfig(train=(), output=tmp_path, **changes)
        making = make_making(tmp_path, tiny_target, answers=known_answers(cfg))
        return [made.name for made in make_lookups(making)]

    assert names() == ["ngram", "retrieval"]
    assert names(target="t", data="mine.jsonl") == ["ngram", "retrieval"]
    assert [command[command.index("--data") + 1] for command in counted] == [
        str(ANSWERS),
        "mine.jsonl",
    ]
    for flag, module, name, *args in counted:
        parsed = parse_recipe(*find_recipe(name, args))
        assert (flag, module) == ("-m", "redraft.recipes.cli")
        assert parsed.output == tmp_path / "retrieval", "a command that can be started"
    # finished drafts only: without answers nothing is counted
    assert names(target="t") == ["ngram"]
    assert len(counted) == 2


def test_trainings_without_answers_of_the_target_are_refused_with_the_command_that_writes_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert dispatch(["bench", "--target", "models/t", "--train", "medusa"]) == 2
    error = capsys.readouterr().err
    assert (
        "`redraft regenerate --target models/t --prompts stdlib-functions --output answers.jsonl`"
        in error
    )
    assert error.count("\n") == 1


def test_finished_drafts_have_different_names(tmp_path: Path) -> None:
    def names(*sources: str) -> list[str]:
        named = name_drafts(sources, ("layers-2",))
        assert tuple(map(str, named.values())) == tuple(s for s in sources if s != "ngram")
        return list(named)

    assert names("a/draft", "b/draft", "Qwen/Qwen3-0.6B") == ["a", "b", "Qwen3-0.6B"]
    assert names("x/a/draft", "y/a", "b") == ["x/a/draft", "y/a", "b"], "the whole source of both"
    assert names("ngram+a/draft:2") == ["ngram+a:2"]
    # names of drafts that are made here, and of the target alone
    assert names("old/layers-2/draft", "old/none", "old/retrieval") == [
        *("old/layers-2/draft", "old/none", "old/retrieval")
    ]
    assert names("ngram", "a/draft") == ["a"], "n-grams are measured in any case"
    for source in ("retrieval", "layers-2", "none"):
        with pytest.raises(ValueError, match=rf"--draft {source} .*\./{source}"):
            names(source)
    with pytest.raises(ValueError, match="--draft a/draft"):
        names("a/draft", "a/draft")
    with pytest.raises(ValueError, match=r"--train medusa\b.*\btwice"):
        BenchConfig(train=("medusa", "layers-2", "medusa"))


def test_a_finished_draft_may_have_its_weights_in_an_old_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"midlayer.hidden_norm.weight": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    (draft,) = finished_drafts(BenchConfig(draft=(str(tmp_path),)))
    assert draft.speculative_config["method"] == "eagle3"


def test_outputs_are_compared_only_where_the_target_can_be_loaded(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = TargetFolder.open(tiny_target)
    assert bench.can_judge(target, Machine(cpu_has_bfloat16=False))
    assert capsys.readouterr().out == ""
    assert not bench.can_judge(target, Machine(cpu_has_bfloat16=False, host_bytes=1 << 20))
    assert "memory" in capsys.readouterr().out
    shutil.copytree(tiny_target, tmp_path / "awq")
    packed = read_config(tiny_target) | {"quantization_config": {"quant_method": "awq"}}
    (tmp_path / "awq" / "config.json").write_text(json.dumps(packed))
    assert not bench.can_judge(TargetFolder.open(tmp_path / "awq"))
    assert "(awq)" in capsys.readouterr().out


def test_finished_drafts_forget_what_they_answered() -> None:
    (suffix,) = finished_drafts(BenchConfig(draft=("suffix",)))
    assert suffix.speculative_config["suffix_decoding_max_cached_requests"] == 0
    with pytest.raises(ValueError, match="redraft data count"):
        list(finished_drafts(BenchConfig(draft=("live",))))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--draft", "/nowhere"], "there is no draft /nowhere"),
        (
            ["--temperature", "1", "--min-p", "0.1"],
            "min_p 0.1 when it uses a draft: set --min-p 0.",
        ),
        (["--prompts", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--acceptance", "pyproject.toml", "--draft", "suffix"], "pyproject.toml is corrupt"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_2(
    flags: list[str],
    said: str,
    tiny_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "choose_mode", lambda *_, **__: pytest.fail("a server was started"))
    assert dispatch(["bench", "--target", str(tiny_target), "--output", str(tmp_path), *flags]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_acceptance_that_is_given_is_that_of_a_draft_of_this_name(tmp_path: Path) -> None:
    def entry(*rates: float) -> dict[str, Any]:
        told = {"acceptance_per_position": [{"value": rate} for rate in rates]}
        return {"num_speculative_tokens": len(rates), "forecast": told, "engine": None}

    def row(name: str, *rates: float) -> dict[str, Any]:
        fixed = {"temperature": 0.0, "domain": None}
        return {"draft": name, **fixed, "by_num_speculative_tokens": [entry(*rates)]}

    def give(report: dict[str, Any], *names: str) -> dict[str, Any]:
        path = tmp_path / "report.json"
        path.write_text(json.dumps(report))
        model = {"method": "draft_model", "model": "m"}
        some = [Candidate(name, name, model, 3) for name in names]
        ngram = Candidate("ngram", "n-grams", {"method": "ngram"}, 4)
        return {c.name: c.given for c in give_acceptance([ngram, *some], path, GREEDY)}

    two = {"results": [row("a", 0.6, 0.4), row("b", 0.5)]}
    assert give(two, "a", "c") == {"ngram": None, "a": [0.6, 0.4], "c": None}
    trained = {"draft": "runs/draft", "offline": {"forecast_per_position": [0.7]}}
    assert give(trained, "c") == {"ngram": None, "c": [0.7]}, "the only one"
    # The benchmark measures steps with up to 3 draft tokens.
    more = {"results": [row("a", 0.6, 0.5, 0.4, 0.3, 0.2)]}
    assert give(more, "a")["a"] == [0.6, 0.5, 0.4]
    with pytest.raises(ValueError, match=r"report\.json is about a, b,.*a=FOLDER"):
        give(two, "c")
    with pytest.raises(ValueError, match=r"about runs/draft"):
        give(trained, "c", "d")
    sampled = two | {"drafts": [{"name": "a", "is_sampled": True}]}
    with pytest.raises(ValueError, match="--draft-sample-method probabilistic"):
        give(sampled, "a")


def test_an_mtp_layer_that_the_target_lacks_is_refused(tiny_target: Path) -> None:
    for draft in ("mtp", "ngram+mtp"):
        cfg = BenchConfig(target=str(tiny_target), draft=(draft,))
        with pytest.raises(ValueError, match=rf"^{tiny_target} contains no MTP layer"):
            bench.read_finished(cfg, TargetFolder.open(tiny_target), GREEDY, has_penalties=False)


def test_the_acceptance_with_another_target_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    target, path = TargetFolder.open(tiny_target), tmp_path / "report.json"
    cfg = BenchConfig(target=str(tiny_target), acceptance=path)

    def read(fingerprint: str) -> None:
        about = {"name": "a target", "fingerprint": fingerprint}
        path.write_text(json.dumps({"target": about, "results": []}))
        bench.read_finished(cfg, target, GREEDY, has_penalties=False)

    with pytest.raises(
        ValueError, match=r"report\.json .*different target, a target: .*redraft eval"
    ):
        read("0123")
    with pytest.raises(ValueError, match="no acceptance by position"):
        read(target.fingerprint)


def test_what_to_append_to_vllm_serve_has_the_variables_of_a_mix() -> None:
    config = mix(
        Ngram().speculative_config, {"method": "eagle3", "model": "m"}, HeadLimits(tokens=2)
    )
    choice: Any = SimpleNamespace(speculative_config={**config, "num_speculative_tokens": 4})
    *variables, flag, pasted = shlex.split(serve_flags(choice))
    told = dict(variable.split("=") for variable in variables)
    lookup = json.loads(told.pop("REDRAFT_SETTINGS"))["lookup"]
    assert told == {"VLLM_PLUGINS": "redraft"}
    assert lookup == {"prompt_lookup_min": 2, "prompt_lookup_max": 4, "head_tokens": 2}
    assert flag == "--speculative-config"
    assert json.loads(pasted)["disable_padded_drafter_batch"] is True
    choice.speculative_config = {**Ngram().speculative_config, "num_speculative_tokens": 4}
    assert "VLLM_PLUGINS=redraft" in shlex.split(serve_flags(choice)), (
        "vLLM's V2 has another lookup"
    )
    choice.speculative_config = {"method": "eagle3", "model": "m", "num_speculative_tokens": 4}
    assert serve_flags(choice).startswith("--speculative-config ")


def test_the_engine_refuses_a_draft_in_one_line_with_its_cure(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft with another vocabulary."""
    config = AutoConfig.from_pretrained(tiny_target)
    config.vocab_size = 520
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "draft")

    def refuse(*_: Any, **__: Any) -> Results:
        raise ChildProcessError("vLLM did not start: vocab")

    monkeypatch.setattr(bench, "measure_servers", refuse)
    rounds = Rounds(BenchConfig(output=tmp_path), TargetFolder.open(tiny_target), None)
    model_config = {"method": "draft_model", "model": str(tmp_path / "draft")}
    with pytest.raises(ChildProcessError, match=r"vocab; .*contains no tokenizer") as refused:
        rounds.measure_first([Candidate("d", "d", model_config, 2)], [Prompt(token_ids=[1])])
    assert "\n" not in str(refused.value)


@contextlib.contextmanager
def measuring_quickly() -> Iterator[None]:
    """Start no server twice, and do not wait until the numbers of a measurement are good."""
    kept: dict[str, VllmServer] = {}
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        @contextlib.contextmanager
        def start_once(
            target: str, drafts: Mapping[str, Any], logs: Path, **options: Any
        ) -> Iterator[dict[str, VllmServer]]:
            asked = {name: repr((target, draft, options)) for name, draft in drafts.items()}
            new = {name: draft for name, draft in drafts.items() if asked[name] not in kept}
            if new:
                started = stack.enter_context(start_servers(target, new, logs, **options))
                kept.update((asked[name], server) for name, server in started.items())
            yield {name: kept[asked[name]] for name in drafts}

        patch.setattr(rounds, "start_servers", start_once)
        patch.setattr(rounds, "IDLE_S", 0)
        patch.setattr("redraft.engine.measure.WARM_UP_TOKENS", 2)
        patch.setattr(rounds, "changed_speed", lambda _: False)
        patch.setattr(baseline, "BANDWIDTH_BYTES", 1 << 20)
        yield


@pytest.fixture(scope="module")
def report(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[BenchConfig, Any]:
    """A benchmark of a head and n-grams at its smallest, with requests as the target samples."""
    target = shutil.copytree(tiny_target, tmp_path_factory.mktemp("bench") / "target")
    named = json.loads((target / "generation_config.json").read_text()) | {"temperature": 0.8}
    (target / "generation_config.json").write_text(json.dumps(named))
    cfg = BenchConfig(
        target=str(target),
        draft=("tests/assets/tiny-eagle3",),
        prompts="stdlib",
        max_prompt_tokens=64,
        max_tokens=8,
        num_speculative_tokens=1,
        concurrency=(2, 1),
        together=3,
        vllm_args=("--enforce-eager",),
        output=target.parent / "out",
    )
    with measuring_quickly():
        main(cfg)
    return cfg, json.loads((cfg.output / "report.json").read_text())


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_benchmark_reports_speed_and_advice_by_its_schema(
    report: tuple[BenchConfig, Any],
) -> None:
    cfg, content = report
    jsonschema.validate(content, make_schema())
    assert [draft["name"] for draft in content["drafts"]] == ["ngram", "tiny-eagle3"]
    for draft in content["drafts"]:
        assert set(draft["measured"]) == set(draft["predicted"]) == {"1", "2"}
        assert len(draft["measured"]["1"]["ratios"]) == 2
        assert draft["measured"]["1"]["ttft_ms"] > 0
        assert "--speculative-config" in draft["serve"]
    (confirmed,) = (d["confirmed"] for d in content["drafts"] if d["name"] == "ngram")
    assert len(confirmed["1"]["ratios"]) == 6
    assert content["settings"]["sampling"]["temperature"] == 0.8
    assert content["lossless"] is None, "sampled answers cannot be compared"
    assert "temperature 0.8" in (cfg.output / "report.html").read_text()


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_the_plain_server_has_the_defaults_of_vllm(report: tuple[BenchConfig, Any]) -> None:
    cfg, content = report
    named = content["baseline"]["not_default"]
    assert "'max_model_len': -1" in named
    assert not {"prefix_caching", "max_num_seqs"} & set(re.findall(r"\w+", named))
    log = (cfg.output / "logs" / f"vllm-{PLAIN}.log").read_text()
    assert "enable_prefix_caching=True" in log


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_finished_benchmark_measures_nothing_again(
    report: tuple[BenchConfig, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, content = report
    monkeypatch.setattr(bench, "measure_servers", lambda *_, **__: pytest.fail("measured again"))
    with measuring_quickly():
        main(cfg)
    again = json.loads((cfg.output / "report.json").read_text())
    assert again["drafts"] == content["drafts"]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(2700)
def test_the_command_makes_serves_and_compares_drafts(tiny_target: Path, tmp_path: Path) -> None:
    rows = load_conversations("stdlib")[:120]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = BenchConfig(
        target=str(tiny_target),
        train=("layers-2", "eagle3-4k", "ngram+eagle3-4k:2"),
        minutes=0.1,
        data=str(tmp_path / "answers.jsonl"),
        prompts=str(tmp_path / "answers.jsonl"),
        temperature=0.0,
        max_tokens=16,
        together=3,
        flags=("--loop.batch-size", "2", "--loop.sequence-length", "256"),
        output=tmp_path / "drafts",
    )
    main(cfg)
    report = json.loads((cfg.output / "report.json").read_text())
    assert [draft["name"] for draft in report["drafts"]] == [
        *("ngram", "retrieval", "layers-2", "eagle3-4k", "ngram+eagle3-4k:2")
    ]
    for draft in report["drafts"]:
        assert draft["measured"]["1"]["tau"] >= 1
        # the prediction with the number of tokens that was measured is that measurement
        served = draft["by_tokens"]["1"][-1]
        assert served["num_speculative_tokens"] == draft["num_speculative_tokens"]
        assert served["speedup"] == pytest.approx(draft["measured"]["1"]["ratio"], rel=0.5)
        # The forecast is of the prompts that the engine answered.
        if draft["tau_forecast"] is not None and not draft["chooses_length"]:
            assert draft["measured"]["8"]["tau"] == pytest.approx(draft["tau_forecast"], abs=0.2)
    assert all(len(d["confirmed"]["1"]["ratios"]) == 6 for d in report["drafts"] if d["confirmed"])
    if report["served"]:
        assert report["lossless"]["lossless"]
    assert (cfg.output / "report.html").is_file()


def test_adaptive_verification_is_refused_before_the_start_and_asked_for_models_only(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ValueError, match="--pace adaptive needs full CUDA graphs, which do not exist on a CPU"
    ):
        bench.require_pace(BenchConfig(draft=("ngram",), pace="adaptive"), str(tiny_target))
    find = partial(adaptive.find_obstacle, environment={}, on_cpu=False)
    monkeypatch.setattr(adaptive, "find_obstacle", find)
    with pytest.raises(ValueError, match="draft with a confidence"):
        bench.require_pace(BenchConfig(draft=("suffix",), pace="adaptive"), str(tiny_target))
    lora = BenchConfig(train=("layers-2",), pace="adaptive", vllm_args=("--enable-lora",))
    with pytest.raises(ValueError, match="--enable-lora"):
        bench.require_pace(lora, str(tiny_target))
    fits = ("layers-2", "eagle3-4k", "ngram+eagle3-4k:2")
    bench.require_pace(BenchConfig(train=fits, pace="adaptive"), str(tiny_target))
    for other in ("medusa", "peagle-4k"):
        cfg = BenchConfig(train=(*fits, other), pace="adaptive")
        with pytest.raises(ValueError, match=rf"V2 model runner.*for --train {other}\b"):
            bench.require_pace(cfg, str(tiny_target))
    mixed = BenchConfig(train=("ngram+eagle3-4k",), pace="adaptive")
    with pytest.raises(ValueError, match="draft with a confidence"):
        bench.require_pace(mixed, str(tiny_target))
    model = Candidate("m", "m", {"method": "draft_model", "model": "m"}, 2, given=(0.5, 0.2))
    found = bench.verify_adaptively(model)
    assert found.speculative_config[adaptive.KEY]
    assert found.chooses_length, "a step has as many tokens as vLLM verifies"
    assert found.given is None
    ngram = Candidate("n", "n", {"method": "ngram"}, 2)
    assert bench.verify_adaptively(ngram) == ngram
    head = {"method": "eagle3", "model": "m"}
    first = Candidate("f", "f", mix(Ngram().speculative_config, head, HeadLimits()), 2)
    assert bench.verify_adaptively(first) == first
    curve = (AdaptivePoint(threshold=0.0, tau=2.0, rows=3.0),)
    told = replace(model, curve=curve)
    assert bench.drop_curve(told, BenchConfig(), str(tiny_target)).curve == curve
    assert bench.drop_curve(told, lora, str(tiny_target)).curve == ()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(2700)
def test_a_benchmark_measures_adaptive_verification_of_real_servers(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V2 runs in Triton's interpreter without CUDA graphs, and a row costs a seventh of a step."""
    for name, value in model_runners.adaptive_environment("trim").items():
        monkeypatch.setenv(name, value)
    find = partial(adaptive.find_obstacle, on_cpu=False)
    monkeypatch.setattr(adaptive, "find_obstacle", find)
    # Its servers need the plain server's mode to have graphs, and here no mode has any.
    monkeypatch.setattr(bench, "choose_mode", lambda *_, **__: ("compiled", {}))
    limits = ["--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--max-model-len", "320"]
    cfg = BenchConfig(
        target=str(tiny_target),
        draft=("tests/assets/tiny-eagle3",),
        prompts="stdlib",
        temperature=0.0,
        max_prompt_tokens=64,
        max_tokens=12,
        concurrency=(2,),
        together=3,
        pace="adaptive",
        vllm_args=(*limits, "-cc.mode=0", "-cc.cudagraph_mode=FULL"),
        output=tmp_path / "out",
    )
    with measuring_quickly():
        main(cfg)
    report = json.loads((cfg.output / "report.json").read_text())
    jsonschema.validate(report, make_schema())
    ngram, head = report["drafts"]
    assert "vLLM chooses which of them to verify" in head["advice"]
    assert "vLLM" not in ngram["advice"]
    assert f'"{adaptive.KEY}": true' in head["serve"]
    measured = head["measured"]["2"]
    drafted = measured["rows_per_token"] * measured["tau"] - 1
    assert 0 < drafted < cfg.num_speculative_tokens, "only verified tokens are counted"
    assert measured["accepted_per_s"] == pytest.approx(
        measured["tokens_per_s"] * (1 - 1 / measured["tau"])
    )
    log = (cfg.output / "logs" / "vllm-tiny-eagle3.log").read_text()
    assert "Using V2 Model Runner" in log
