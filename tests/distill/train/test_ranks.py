"""Training on two processes by every shipped config.

The numbers of one process, and checkpoints that go on exactly.

Float32 sums in another order differ in the last digits. AdamW divides by the size of a gradient, so
these digits become a whole step if the gradient is all but zero. The trainings compared here
therefore have an `eps` well above rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import train_on_ranks
from launches import ROOT, accelerate_launch, fork_ranks, read_launch, require, run_all

SCRIPT = str(ROOT / "tests/helpers/train_on_ranks.py")
FAMILIES = [
    "standalone",
    "tied",
    "eagle1",
    "eagle3",
    "dflash",
    "dspark",
    "peagle",
    "medusa",
    "mtp",
    "mtp-moe",
]
CONFIGS: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "fsdp2": (),
    "fsdp2-offload": ("--fsdp_offload_params", "true"),
    "zero2": (),
    "zero2-offload": ("--offload_optimizer_device", "cpu"),
    "zero3": (),
    "zero3-offload": ("--offload_optimizer_device", "cpu", "--offload_param_device", "cpu"),
}
LAYOUTS = {
    "": "1 process",
    "ddp": "2 processes",
    "fsdp2": "2 processes of FSDP",
    "zero2": "2 processes of DeepSpeed ZeRO-2",
    "zero3": "2 processes of DeepSpeed ZeRO-3",
}
SGD = ("--steps", "1", "--optimizer", "sgd", "--lr", "0.1")


def train(
    config: str | None, output: Path, *args: str, nodes: int = 1, forks: bool = False
) -> dict[str, Any]:
    """What each family's training came to, on two processes by a config, or on one without any.

    With `forks`, they have the environment of accelerate's launcher, but are forks.
    """
    name, options = (config or "").removesuffix("-offload"), CONFIGS.get(config or "", ())
    if config is None:
        fork_ranks(train_on_ranks.main, train_on_ranks.parse([str(output), *args]))
    elif forks:
        work = train_on_ranks.parse([str(output), *args])
        fork_ranks(train_on_ranks.main, work, ranks=2, environment=read_launch(config))
    else:
        require(name)
        run_all(accelerate_launch(name, *options, nodes=nodes), [SCRIPT, str(output), *args])
    results = read_results(output)
    for result in results.values():
        assert (result["layout"], result["offloads"]) == (
            LAYOUTS[name],
            "offload" in (config or ""),
        )
    return results


def read_results(output: Path) -> dict[str, Any]:
    return {path.stem: torch.load(path, weights_only=True) for path in output.glob("*.pt")}


def assert_same(one: dict[str, Any], other: dict[str, Any], tolerance: float) -> None:
    assert one.keys() == other.keys()
    assert one
    for family, expected in one.items():
        found = other[family]
        assert found["labels"] == expected["labels"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert found["tau"] == pytest.approx(expected["tau"], rel=1e-3)
        assert found["weights"].keys() == expected["weights"].keys(), family
        for name, weight in expected["weights"].items():
            difference = float((found["weights"][name].float() - weight).abs().max())
            assert difference <= tolerance, f"{family} {name}: {difference}"


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every family's training by one process: a step of gradient descent, and eight of AdamW."""
    folder = tmp_path_factory.mktemp("one")
    return {
        "sgd": train(None, folder / "sgd", *FAMILIES, *SGD),
        "adamw": train(None, folder / "adamw", *FAMILIES),
    }


def chosen(results: dict[str, Any], families: list[str]) -> dict[str, Any]:
    return {family: results[family] for family in families}


@pytest.mark.parametrize("config", ["fsdp2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_sharded_drafts_take_the_step_of_one_process(config: str, tmp_path: Path) -> None:
    families = ["standalone", "eagle3", "dspark"]
    one = train(None, tmp_path / "one", *families, *SGD)
    two = train(config, tmp_path / "two", *families, *SGD, forks=config == "fsdp2")
    assert_same(one, two, 1e-6)


def test_muon_moves_the_matrices_of_two_ranks_as_those_of_one(tmp_path: Path) -> None:
    """Over three steps.

    Muon makes all directions equal, also those in which a gradient is only rounding.
    """
    work = ["eagle3", "--steps", "3", "--optimizer", "muon"]
    one = train(None, tmp_path / "one", *work)
    cfg = train_on_ranks.parse([str(tmp_path / "two"), *work])
    fork_ranks(train_on_ranks.main, cfg, ranks=2)
    two = read_results(cfg.output)
    assert two["eagle3"]["layout"] == LAYOUTS["ddp"]
    assert_same(one, two, 1e-4)


@pytest.mark.slow
def test_mixed_precision_of_shards_rounds_products_and_neither_sums_nor_what_the_target_says(
    tmp_path: Path,
) -> None:
    work = ["standalone", "eagle3", *SGD, "--judged", "11"]
    one = train(None, tmp_path / "one", *work)
    run_all(
        accelerate_launch("fsdp2", "--mixed_precision", "bf16"),
        [SCRIPT, str(tmp_path / "two"), *work],
    )
    for family, expected in one.items():
        found = torch.load(tmp_path / "two" / f"{family}.pt", weights_only=True)
        assert found["num_rows"] == expected["num_rows"], (
            "an odd number above 256, which bfloat16 does not have"
        )
        assert expected["num_rows"] > 256
        assert expected["num_rows"] % 2
        for name in ("loss", "grad_norm", "tau"):
            assert found[name] == pytest.approx(expected[name], rel=0.02), name


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_family_trains_as_on_one_process(
    config: str, nodes: int, one_process: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    assert_same(
        one_process["sgd"], train(config, tmp_path / "sgd", *FAMILIES, *SGD, nodes=nodes), 1e-6
    )
    assert_same(
        one_process["adamw"], train(config, tmp_path / "adamw", *FAMILIES, nodes=nodes), 1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "fsdp2", "zero2", "zero3"])
def test_micro_batches_on_two_processes_make_the_step_of_one(
    config: str, one_process: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    families = ["standalone", "eagle3"]
    found = train(config, tmp_path / "two", *families, *SGD, "--accumulation", "2")
    assert_same(chosen(one_process["sgd"], families), found, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["fsdp2", "ddp"])
def test_a_step_that_is_dropped_leaves_no_gradient_for_the_next(
    config: str, tmp_path: Path
) -> None:
    work = ["eagle3", "--optimizer", "sgd", "--steps", "3", "--lr", "1", "--poison-at", "1"]
    one = train(None, tmp_path / "one", *work)
    two = train(config, tmp_path / "two", *work, "--accumulation", "2")
    for results in (one, two):
        assert results["eagle3"]["skipped"] == [False, True, False]
        # The loss of the dropped step is not a number, so it is not compared.
        results["eagle3"]["loss"][1] = 0.0
    assert_same(one, two, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_a_resumed_training_is_that_of_an_unbroken_one_bit_for_bit(
    config: str, tmp_path: Path
) -> None:
    families = ["standalone", "eagle3"]
    whole = train(config, tmp_path / "run", *families, "--save-at", "4")
    resumed = train(config, tmp_path / "run", *families, "--resume")
    for family in families:
        assert len(resumed[family]["loss"]) == 4
        assert resumed[family]["loss"] == whole[family]["loss"][4:]
        for name, weight in whole[family]["weights"].items():
            assert torch.equal(resumed[family]["weights"][name], weight), f"{family} {name}"
