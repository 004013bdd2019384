"""`redraft eval` as its user runs it.

Killed, repeated, given bad input, and beside the real engine.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from redraft.engine.counts import AcceptanceCounts
from redraft.engine.measure import WARM_UP_TOKENS, Measurement, Output, measure, read_counters
from redraft.engine.prompts import Prompt
from redraft.engine.sampling import Sampling
from redraft.engine.server import VllmServer
from redraft.engine.target_dtype import default_target_dtype
from redraft.eval import served
from redraft.eval.forecast import teacher_forced
from redraft.eval.forecast.drafts import load_drafts
from redraft.eval.forecast.greedy import generate_answers
from redraft.files.checkpoint import load_tokenizer
from redraft.files.target_folder import TargetFolder
from redraft.heads.families import eagle1, medusa, retrieval
from redraft.heads.families.retrieval import Text, count_answers
from redraft.heads.target import LoadedTarget, Target
from redraft.recipes.cli.run import dispatch
from redraft.recipes.decide import evaluate
from redraft.recipes.decide.evaluate import EvalConfig, choose_day

Run = Callable[..., int]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen short conversations of two topics."""
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [
        {
            "messages": [{"role": "user", "content": f"import {'ast' * (i % 3 + 1)} {i}"}],
            "topic": ("code", "prose")[i % 2],
        }
        for i in range(16)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(served_pair: tuple[Path, Path], data: Path, tmp_path: Path) -> Run:
    """The command on the small pair, with further flags; its exit status."""

    def command(*flags: str, output: str = "out") -> int:
        flags_of = {
            "--target": str(served_pair[0]),
            "--prompts": str(data),
            "--max-tokens": "12",
            "--num-prompts": "8",
            "--batch-size": "4",
            "--output": str(tmp_path / output),
            "--temperature": "0",
        }
        given = [part for pair in flags_of.items() if pair[0] not in flags for part in pair]
        try:
            return dispatch(["eval", *given, *flags])
        except SystemExit as ended:
            return int(ended.code or 0)

    return command


def test_a_file_as_output_is_refused_by_its_flag(tmp_path: Path) -> None:
    (tmp_path / "report").write_text("mine")
    with pytest.raises(ValueError, match=f"{tmp_path / 'report'} is a file.*--output"):
        evaluate.check(EvalConfig(output=tmp_path / "report"))


def drafts_of(pair: tuple[Path, Path], *more: str) -> list[str]:
    return [
        part
        for draft in (f"noisy={pair[1]}", f"copy={pair[0]}", *more)
        for part in ("--draft", draft)
    ]


FORECAST = (
    "--no-engine",
    "--domain-column",
    "topic",
    "--temperature",
    "0",
    "1",
    "--num-speculative-tokens",
    "1",
    "3",
)


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def row_of(
    report: dict[str, Any], draft: str, domain: str | None = None, temperature: float = 0
) -> dict[str, Any]:
    rows = report["results"]
    return next(
        r
        for r in rows
        if (r["draft"], r["domain"], r["temperature"]) == (draft, domain, temperature)
    )


def test_drafts_of_every_kind_stand_side_by_side(run: Run, served_pair, tmp_path: Path) -> None:
    target = Target.from_model(LlamaForCausalLM.from_pretrained(served_pair[0]))
    torch.manual_seed(0)
    medusa.Medusa(medusa.Config(num_heads=2), target).export(tmp_path / "medusa")
    eagle1.Eagle1(eagle1.Config(), target).export(tmp_path / "eagle1")
    more = ["ngram", str(tmp_path / "medusa"), str(tmp_path / "eagle1")]
    flags = ("--draft-sample-method", "probabilistic")
    assert run(*FORECAST, *drafts_of(served_pair, *more), *flags) == 0
    report = report_of(tmp_path / "out")
    families = {draft["name"]: draft["family"] for draft in report["drafts"]}
    assert families == {
        "noisy": "standalone",
        "copy": "standalone",
        "ngram": "ngram",
        "medusa": "medusa",
        "eagle1": "eagle1",
    }
    for temperature in (0, 1):
        copy = row_of(report, "copy", temperature=temperature)
        assert copy["alpha"]["value"] == pytest.approx(1, abs=1e-4)
        told = [e["forecast"]["tau"]["value"] for e in copy["by_num_speculative_tokens"]]
        assert told == pytest.approx([2, 4], abs=1e-3), "k + 1"
    assert (
        1 < row_of(report, "noisy")["by_num_speculative_tokens"][1]["forecast"]["tau"]["value"] < 4
    )
    assert [
        e["num_speculative_tokens"] for e in row_of(report, "medusa")["by_num_speculative_tokens"]
    ] == [1]
    assert "medusa was trained to draft 2 tokens: k = 3 is left out." in report["notes"]
    assert report["domains"] == ["code", "prose"]
    assert {draft["name"] for draft in report["drafts"] if draft["is_sampled"]} == {
        "noisy",
        "copy",
        "eagle1",
    }


def test_the_same_command_gives_the_same_bytes_in_another_folder(
    run: Run, served_pair, tmp_path: Path
) -> None:
    for name in ("one", "other"):
        assert run(*FORECAST, *drafts_of(served_pair, "ngram"), output=name) == 0
    for file in ("report.json", "report.html", "report.md"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()
    assert (tmp_path / "one/run.json").is_file()


def test_a_report_names_its_type_and_another_is_measured_again(
    run: Run, served_pair, tmp_path: Path
) -> None:
    stored = tmp_path / "stored"
    LlamaForCausalLM.from_pretrained(served_pair[0], dtype=torch.bfloat16).save_pretrained(stored)
    load_tokenizer(served_pair[0]).save_pretrained(stored)
    flags, kept = (
        ("--no-engine", "--target", str(stored), "--draft", "ngram"),
        tmp_path / "out" / "kept",
    )
    for named in ((), ("--target-dtype", "float32"), ("--target-dtype", "bfloat16")):
        chosen = named[1] if named else default_target_dtype(stored, on_cpu=True)
        assert run(*flags, *named) == 0
        assert report_of(tmp_path / "out")["settings"]["target_dtype"] == chosen
        assert list((kept / str(chosen)).iterdir())
    mark = kept / "mark-0123456789abcdef.json"
    mark.touch()
    assert run(*flags) == 0
    assert mark.exists()
    (kept / "notes").touch()
    assert run(*flags, "--overwrite") == 2
    (kept / "notes").unlink()
    assert mark.exists()
    assert run(*flags, "--overwrite") == 0
    assert not mark.exists()
    assert not list((tmp_path / "out").glob(".*"))


def test_a_baseline_is_not_replaced_by_its_comparison(
    run: Run, served_pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--no-engine", "--target", str(served_pair[0]), "--draft", "ngram")
    assert run(*flags) == 0
    report = tmp_path / "out" / "report.json"
    before = report.read_bytes()
    (tmp_path / "link.json").symlink_to(report)
    for baseline in (report, tmp_path / "link.json"):
        assert run(*flags, "--baseline", str(baseline)) == 2
        assert f"--baseline {baseline} " in capsys.readouterr().err
    assert report.read_bytes() == before
    assert run(*flags, "--baseline", str(report), output="now") == 0


def test_a_killed_run_goes_on_with_the_batch_it_was_killed_in(
    run: Run,
    served_pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*FORECAST, *drafts_of(served_pair), output="whole") == 0
    evaluate, calls = teacher_forced.evaluate_batch, []

    def killed_in_the_third(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return evaluate(*args)

    monkeypatch.setattr(teacher_forced, "evaluate_batch", killed_in_the_third)
    assert run(*FORECAST, *drafts_of(served_pair), output="broken") == 2
    assert "redraft: interrupted" in capsys.readouterr().err
    assert run(*FORECAST, *drafts_of(served_pair), output="broken") == 0
    assert len(calls) == 3 + 2, "four batches, two of which were done"
    assert (tmp_path / "whole/report.json").read_bytes() == (
        tmp_path / "broken/report.json"
    ).read_bytes()


def test_a_further_draft_reuses_the_targets_answers(
    run: Run, served_pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*FORECAST, "--draft", str(served_pair[1])) == 0
    monkeypatch.setattr(
        teacher_forced, "generate_answers", lambda *_, **__: pytest.fail("it answers again")
    )
    assert run(*FORECAST, "--draft", str(served_pair[1]), "--draft", "ngram") == 0


def test_what_fell_against_the_baseline_is_exit_status_1(
    run: Run, served_pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*FORECAST, "--draft", f"d={served_pair[0]}", output="before") == 0
    baseline = ("--baseline", str(tmp_path / "before/report.json"))
    assert run(*FORECAST, "--draft", f"d={served_pair[0]}", *baseline, output="same") == 0
    assert run(*FORECAST, "--draft", f"d={served_pair[1]}", *baseline, "--max-loss", "0.02") == 1
    out = capsys.readouterr().out
    assert "fell by more than 2.0%" in out
    # four prompts of one domain prove no fall, eight of both do
    assert "d, k = 3, temperature 0: tau 4.000 -> " in out
    assert report_of(tmp_path / "out")["baseline"]["num_fell"] > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "no draft to evaluate"),
        (("--draft", "nowhere/at/all"), "there is no draft nowhere/at/all"),
        (("--draft", "TARGET", "--draft", "TARGET"), "two drafts have the name"),
        (("--draft", "TARGET", "--domain-column", "subject"), "has no column 'subject'"),
        (("--draft", "TARGET", "--max-prompt-tokens", "1"), "has a prompt of at most 1 tokens"),
        (("--draft", "TARGET", "--held-out", "0"), "--held-out is 0.0"),
        (("--draft", "TARGET", "--concurrency", "0"), "--concurrency is 0"),
        (("--draft", "TARGET", "--prompts", "nowhere.jsonl"), "nowhere.jsonl: no such file"),
        (("--draft", "TARGET", "--max-tokens", "600"), "exceed the target's window"),
        (("--draft", "TARGET", "--num-speculative-tokens", "0"), "at least 1"),
        (("--draft", "TARGET", "--baseline", "nowhere.json"), "does not exist"),
        (("--draft", "OTHER"), "logits"),
        (("--draft", "HEAD"), "was trained for a different target"),
        (
            ("--draft", "ngram", "--no-forecast"),
            "--no-forecast and --no-engine leave nothing to measure",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_leaves_what_is_there(
    flags: tuple[str, ...],
    said: str,
    run: Run,
    served_pair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/report.json").write_text("earlier")
    places = {"TARGET": str(served_pair[0]), "OTHER": "other", "HEAD": "head"}
    if "OTHER" in flags:
        places["OTHER"] = str(make_smaller(served_pair[0], tmp_path / "smaller"))
    if "HEAD" in flags:
        places["HEAD"] = str(make_foreign_head(served_pair[0], tmp_path / "head"))
    assert run("--no-engine", *(places.get(flag, flag) for flag in flags)) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("redraft: ")]
    assert len(error) == 1
    assert said in error[0]
    assert (tmp_path / "out/report.json").read_text() == "earlier"


def make_smaller(target: Path, folder: Path) -> Path:
    """A model with fewer logits and the same tokenizer."""
    model = LlamaForCausalLM.from_pretrained(target)
    model.resize_token_embeddings(448)
    model.save_pretrained(folder)
    for path in target.glob("*token*"):
        shutil.copy(path, folder)
    return folder


def make_foreign_head(target: Path, folder: Path) -> Path:
    medusa.Medusa(
        medusa.Config(), Target.from_model(LlamaForCausalLM.from_pretrained(target))
    ).export(folder)
    (folder / "provenance.json").write_text(
        json.dumps({"target_fingerprint": "00", "target": "somebody else's"})
    )
    return folder


def test_a_baseline_of_another_target_is_refused(
    run: Run, served_pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--no-engine", "--draft", "ngram", output="before") == 0
    flags = (
        "--target",
        str(served_pair[1]),
        "--draft",
        "ngram",
        "--baseline",
        str(tmp_path / "before/report.json"),
    )
    assert run("--no-engine", *flags) == 2
    assert re.search(r"before/report\.json .*\bbaseline\b.*\btarget\b", capsys.readouterr().err)


def test_a_baseline_without_a_temperature_is_refused_before_anything_is_measured(
    run: Run,
    served_pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--no-engine", "--draft", "ngram", output="before") == 0
    monkeypatch.setattr(teacher_forced, "evaluate_batch", lambda *_: pytest.fail("it forecasts"))
    baseline = ("--baseline", str(tmp_path / "before/report.json"))
    assert run("--no-engine", "--draft", "ngram", "--temperature", "0", "0.5", *baseline) == 2
    assert re.search(r"\bbaseline\b.*\b0\.5\b", capsys.readouterr().err)


@pytest.mark.parametrize("draft", ["live", "live+ngram"])
def test_live_counts_depend_on_earlier_answers_and_are_not_measured(
    run: Run, draft: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--no-engine", "--draft", draft) == 2
    assert "redraft data count" in capsys.readouterr().err


def test_suffix_decoding_needs_its_package_and_the_engine(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[object] = [None, object()]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found[0])
    assert run("--no-engine", "--draft", "suffix") == 2
    assert "pip install arctic-inference" in capsys.readouterr().err
    found.reverse()
    assert run("--no-engine", "--draft", "suffix") == 2
    assert "--no-engine" in capsys.readouterr().err


def test_a_target_that_does_not_fit_is_told_with_the_way_to_count_it(
    run: Run, served_pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = shutil.copytree(served_pair[0], tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"intermediate_size": 10**11}))
    assert run("--no-engine", "--draft", "ngram", "--target", str(target)) == 2
    error = capsys.readouterr().err
    assert "--no-forecast" in error


def test_a_quantised_target_is_refused_with_the_way_to_count_it(
    run: Run, served_pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = shutil.copytree(served_pair[0], tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    packed = {"quantization_config": {"quant_method": "awq"}}
    (target / "config.json").write_text(json.dumps(config | packed))
    assert run("--no-engine", "--draft", "ngram", "--target", str(target)) == 2
    error = capsys.readouterr().err
    assert re.search(r"\(awq\).*--no-forecast", error)
    assert "--signal" not in error, "a flag of another command"


@torch.no_grad()
def test_the_forecast_leaves_the_whole_gpu_to_the_engine(
    served_pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head borrows the target's embeddings and output head, which would stay there."""
    model = LlamaForCausalLM.from_pretrained(served_pair[0]).eval()
    target = LoadedTarget(files=TargetFolder.open(served_pair[0]), model=model)
    eagle1.Eagle1(eagle1.Config(), Target.from_model(model)).export(tmp_path / "eagle1")
    drafts = load_drafts([str(tmp_path / "eagle1")], target, "greedy")
    assert drafts[0].forecast is not None
    head = drafts[0].forecast.module

    def list_tensors() -> list[torch.Tensor]:
        borrowed = [head._embed_VD, head._head_VD, target.borrowed.embed_VD]
        return [*model.parameters(), *model.buffers(), *head.parameters(), *borrowed]

    def find_memory(tensors: Sequence[torch.Tensor]) -> set[int]:
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    before = [tensor.data for tensor in list_tensors()]
    monkeypatch.setattr(evaluate, "forecast_drafts", lambda *_: {})
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)  # as from a GPU
    protocol: Any = None
    assert evaluate.forecast_all(target, drafts, [], protocol, tmp_path) == {}
    assert not find_memory(before) & find_memory(list_tensors())


def test_sampled_answers_follow_the_target_and_do_not_depend_on_their_batch(served_pair) -> None:
    target = LlamaForCausalLM.from_pretrained(served_pair[0]).eval()
    prompt = Prompt(token_ids=[20, 30, 40, 50])
    options: dict[str, Any] = {
        "max_tokens": 6,
        "num_speculative_tokens": 2,
        "end_ids": [],
        "sampling": Sampling(temperature=0.7),
    }
    (alone,) = generate_answers(target, [prompt], **options, seed=1)
    others = [Prompt(token_ids=[60 + i] * (3 + i)) for i in range(3)]
    assert (
        generate_answers(target, [*others, prompt], **options, seed=1)[-1].output_ids
        == alone.output_ids
    )
    log_p_V = (target(torch.tensor([prompt.token_ids])).logits[0, -1].double() / 0.7).log_softmax(
        -1
    )
    p_V, options["max_tokens"] = log_p_V.exp(), 1
    drawn = [
        generate_answers(target, [prompt], **options, seed=s)[0].output_ids[0] for s in range(300)
    ]
    mean, spread = (
        float((p_V * log_p_V).sum()),
        float((p_V * log_p_V**2).sum() - (p_V * log_p_V).sum() ** 2) ** 0.5,
    )
    assert abs(float(log_p_V[drawn].mean()) - mean) < 3 * spread / 300**0.5


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An engine whose answers of 64 tokens take 57 steps.

    4 with a draft, of which 6 tokens are accepted, and 53 in which nothing was found. The requests
    in flight of every measurement.
    """
    concurrencies: list[int] = []

    @contextlib.contextmanager
    def start(*_: Any, **__: Any) -> Iterator[None]:
        yield None

    def count(
        server: None, prompts: Sequence[Prompt], *, concurrency: int, **_: Any
    ) -> Measurement:
        concurrencies.append(concurrency)
        counts = AcceptanceCounts(
            num_drafts=4, num_accepted=6, num_draft_tokens=12, accepted_per_position=(3, 2, 1)
        )
        outputs = [Output(token_ids=list(range(64)), counts=counts)] * len(prompts)
        return Measurement(
            prompts=prompts,
            outputs=outputs,
            full_s=1.0,
            full_tokens=64,
            dtype="float32",
            counts=None,
        )

    monkeypatch.setattr(served, "vllm_server", start)
    monkeypatch.setattr(served, "measure", count)
    return concurrencies


def test_without_forecasts_the_engines_steps_without_a_draft_count(
    run: Run, asked: list[int], tmp_path: Path
) -> None:
    flags = ("--draft", "ngram", "--num-speculative-tokens", "3", "--max-tokens", "64")
    taus = []
    # In one folder: counts beside a forecast, which are by draft, must not pass for counts by step.
    for forecast in ((), ("--no-forecast",)):
        assert run(*flags, *forecast) == 0
        (entry,) = row_of(report_of(tmp_path / "out"), "ngram")["by_num_speculative_tokens"]
        taus.append(entry["engine"]["tau"])
    assert taus == pytest.approx([1 + 6 / 4, 1 + 6 / 57], abs=1e-6)
    assert entry["engine"]["acceptance_per_position"] == pytest.approx(
        [3 / 57, 2 / 57, 1 / 57], abs=1e-6
    )


def test_counted_answers_are_counted_at_the_load_of_their_forecast(
    run: Run, asked: list[int], served_pair, tmp_path: Path
) -> None:
    """Eight requests in a step would halve their proposals, and the forecast is of one."""
    text = Text(ids=np.arange(20, 40, dtype=np.int32), is_label=np.ones(20, bool))
    (tmp_path / "answers").mkdir()
    count_answers([text], retrieval.Config()).write(tmp_path / "answers")
    torch.manual_seed(0)
    target = Target.from_model(LlamaForCausalLM.from_pretrained(served_pair[0]))
    eagle1.Eagle1(eagle1.Config(), target).export(tmp_path / "head")
    drafts = ("ngram", f"{tmp_path / 'answers'}", f"{tmp_path / 'answers'}+{tmp_path / 'head'}:1")
    flags = [part for draft in drafts for part in ("--draft", draft)]
    assert run(*flags, "--concurrency", "8") == 0
    assert asked == [8, 1, 1]
    noted = {
        note.split()[0]
        for note in report_of(tmp_path / "out")["notes"]
        if note.startswith("answers")
    }
    assert noted == {"answers", "answers+head:1"}
    assert run(*flags, "--concurrency", "8", "--no-forecast") == 0
    assert asked[3:] == [8, 8, 8], "nothing to compare with"


@pytest.mark.slow
@pytest.mark.vllm
def test_the_real_engine_counts_what_was_forecast_greedy_and_sampled(
    run: Run, served_pair, tmp_path: Path
) -> None:
    flags = (
        "--temperature",
        "0",
        "1",
        "--num-speculative-tokens",
        "3",
        "--draft-sample-method",
        "probabilistic",
    )
    sizes = ("--num-prompts", "16", "--max-tokens", "48")
    assert (
        run("--draft", f"noisy={served_pair[1]}", "--domain-column", "topic", *flags, *sizes) == 0
    )
    report = report_of(tmp_path / "out")
    for domain in (None, "code", "prose"):
        (entry,) = row_of(report, "noisy", domain)["by_num_speculative_tokens"]
        assert entry["engine"]["tau"] == pytest.approx(entry["forecast"]["tau"]["value"], abs=1e-6)
        told = [rate["value"] for rate in entry["forecast"]["acceptance_per_position"]]
        assert entry["engine"]["acceptance_per_position"] == pytest.approx(told, abs=1e-6)
    (sampled,) = row_of(report, "noisy", temperature=1)["by_num_speculative_tokens"]
    difference = sampled["engine"]["difference"]
    width = (
        difference["high"] - difference["low"]
    )  # nearly four standard errors: the engine draws anew every time
    assert abs(difference["value"]) < width < 0.5 * sampled["engine"]["tau"]

    # Without a forecast only the engine loads the target's layers.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(evaluate, "load_target", None)
        given = ("--draft", f"noisy={served_pair[1]}", "--domain-column", "topic", *flags, *sizes)
        assert run(*given, "--no-forecast") == 0
    alone = report_of(tmp_path / "out")
    (counted,) = row_of(alone, "noisy", "code")["by_num_speculative_tokens"]
    before = row_of(report, "noisy", "code")["by_num_speculative_tokens"][0]["engine"]
    assert counted["forecast"] is None
    assert counted["engine"]["tau"] == before["tau"]
    assert any("there is no forecast to compare them with" in line for line in alone["answer"])


@pytest.mark.slow
@pytest.mark.vllm
def test_an_engine_that_does_not_start_is_one_line_and_the_forecast_is_kept(
    run: Run,
    served_pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--draft", f"noisy={served_pair[1]}", "--num-speculative-tokens", "2")
    assert run(*flags, "--", "--no-such-flag") == 2
    assert re.search(r"redraft: noisy: .*--no-such-flag", capsys.readouterr().err)
    monkeypatch.setattr(
        teacher_forced, "evaluate_batch", lambda *_: pytest.fail("it forecasts again")
    )
    assert run(*flags, "--no-engine") == 0


@pytest.mark.vllm
def test_the_engines_counters_by_position_are_the_sum_of_its_requests(
    engine_with_draft: VllmServer,
) -> None:
    prompts = [Prompt(token_ids=[20 + i, 40, 60]) for i in range(8)]
    before = read_counters(engine_with_draft)
    counted = measure(engine_with_draft, prompts, max_tokens=24, concurrency=4).counts
    warm_up = measure(
        engine_with_draft, prompts[:4], max_tokens=WARM_UP_TOKENS, concurrency=4
    ).counts
    assert counted is not None
    assert warm_up is not None
    assert counted.accepted_per_position[0] > counted.accepted_per_position[2] > 0
    # two measurements, the second of which asks what both warm-ups asked
    assert read_counters(engine_with_draft) == before + counted + warm_up + warm_up + warm_up


@pytest.mark.vllm
@pytest.mark.slow
def test_the_real_engine_looks_up_what_the_forecast_does(
    run: Run, tiny_target: Path, tmp_path: Path
) -> None:
    """One request at a time.

    With several, vLLM 0.32 now and then proposes once where nothing occurred before: of these 16
    prompts, at 2 to 4 requests, one to three gain a draft of which nothing is accepted.
    """
    flags = (
        "--target",
        str(tiny_target),
        "--prompts",
        "stdlib",
        "--held-out",
        "0.05",
        "--draft",
        "ngram",
    )
    flags += ("--concurrency", "1", "--target-dtype", "float32")
    assert (
        run(*flags, "--num-speculative-tokens", "4", "--max-tokens", "96", "--num-prompts", "16")
        == 0
    )
    (entry,) = row_of(report_of(tmp_path / "out"), "ngram")["by_num_speculative_tokens"]
    assert entry["engine"]["num_drafts"] > 20
    assert entry["engine"]["tau"] == pytest.approx(entry["forecast"]["tau_per_draft"], abs=1e-6)


@pytest.mark.vllm
@pytest.mark.slow
def test_the_real_engine_drafts_from_counted_answers_as_forecast(
    run: Run, tiny_target: Path, data: Path, tmp_path: Path
) -> None:
    counted, answers = tmp_path / "counted", tmp_path / "answers.jsonl"
    rows = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    code = "import ast\n\n\ndef f(self):\n    return self.value\n" * 4
    answers.write_text(
        "".join(
            json.dumps({"messages": [*row, {"role": "assistant", "content": code}]}) + "\n"
            for row in rows
        )
    )
    flags = ["--target", str(tiny_target), "--data", str(answers), "--output", str(counted)]
    assert dispatch(["data", "count", *flags, "--retrieval.verify-cost", "0.01"]) == 0
    more = (
        "--target",
        str(tiny_target),
        "--concurrency",
        "1",
        "--max-tokens",
        "96",
        "--draft",
        str(counted),
    )
    more += ("--target-dtype", "float32")
    assert run(*more, "--num-speculative-tokens", "4") == 0
    (entry,) = row_of(report_of(tmp_path / "out"), "counted")["by_num_speculative_tokens"]
    assert entry["engine"]["num_drafts"] > 20
    assert entry["engine"]["tau"] == pytest.approx(entry["forecast"]["tau_per_draft"], abs=1e-6)
    mixed = f"{counted}+{tiny_target.parent / 'tiny-eagle3'}:1"
    assert (
        run(
            *more[:-4],
            "--draft",
            mixed,
            *more[-2:],
            "--num-speculative-tokens",
            "4",
            output="mixed",
        )
        == 0
    )
    (both,) = row_of(report_of(tmp_path / "mixed"), "counted+tiny-eagle3:1")[
        "by_num_speculative_tokens"
    ]
    assert both["engine"]["num_drafts"] > entry["engine"]["num_drafts"], (
        "the head drafts if nothing is counted"
    )
    assert both["engine"]["tau"] == pytest.approx(both["forecast"]["tau"]["value"], abs=1e-6)
    assert both["engine"]["tau"] > entry["forecast"]["tau"]["value"], (
        "more than the counted answers alone"
    )


@pytest.mark.vllm
@pytest.mark.slow
def test_the_real_engine_asks_the_head_where_no_ngram_matches(
    run: Run, tiny_target: Path, tmp_path: Path
) -> None:
    """The head's keys are whole.

    Were a step with n-grams not read by it, later tokens would be others.
    """
    head = tiny_target.parent / "tiny-eagle3"
    flags = (
        "--target",
        str(tiny_target),
        "--prompts",
        "stdlib",
        "--held-out",
        "0.05",
        "--concurrency",
        "1",
    )
    flags += ("--draft", f"ngram+{head}", "--draft", f"ngram+{head}:1", "--target-dtype", "float32")
    assert (
        run(*flags, "--num-speculative-tokens", "4", "--max-tokens", "96", "--num-prompts", "8")
        == 0
    )
    report = report_of(tmp_path / "out")
    names = ("ngram+tiny-eagle3", "ngram+tiny-eagle3:1")
    mixed, limited = (row_of(report, name)["by_num_speculative_tokens"][0] for name in names)
    for entry in (mixed, limited):
        assert entry["engine"]["num_drafts"] > 100
        assert entry["engine"]["tau"] == pytest.approx(entry["forecast"]["tau"]["value"], abs=1e-6)
        told = [rate["value"] for rate in entry["forecast"]["acceptance_per_position"]]
        assert entry["engine"]["acceptance_per_position"] == pytest.approx(told, abs=1e-6)
    assert mixed["engine"]["tau"] > limited["engine"]["tau"]
    assert limited["engine"]["acceptance_per_position"][3] > 0, "only n-grams have four tokens here"


def test_prompts_keep_their_date_on_another_day_and_beside_a_baseline(tmp_path: Path) -> None:
    cfg = EvalConfig(output=tmp_path)
    assert choose_day(cfg, {}) == datetime.date.today()
    (tmp_path / "kept" / "date").write_text("2024-02-28")  # measured until then, and killed
    assert choose_day(cfg, {}) == datetime.date(2024, 2, 28)
    assert choose_day(cfg, {"date": "2024-02-29"}) == datetime.date(2024, 2, 29)
