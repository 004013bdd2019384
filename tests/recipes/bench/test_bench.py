"""The benchmark's cases on tiny sizes: their sides compute the same, and what they are measured with measures."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from redraft.recipes.bench import heads as bench_heads
from redraft.recipes.bench import losses as bench_losses
from redraft.recipes.bench import training as bench_training
from redraft.recipes.bench.heads import NAIVE, build_head, head_cases
from redraft.recipes.bench.losses import TRL, TRL_COMPILED
from redraft.recipes.bench.measure import FLOOR, OURS, Case, Matmul, Required, Run, can_compile, matmuls_alone, measure
from redraft.recipes.bench.peers import PEERS
from redraft.recipes.bench.training import Config, lines, main, worth_measuring

TINY = dataclasses.replace(
    bench_heads.SIZES, length=16, hidden=32, intermediate=48, vocabulary=128, heads=4, key_heads=2
)


@pytest.mark.parametrize("family", list(bench_heads.FAMILIES))
def test_ours_and_the_naive_form_of_a_head_train_alike(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_heads, "SIZES", TINY)
    ours, naive = (build_head(family, "float32", side, "cpu") for side in (OURS, NAIVE))
    for _ in range(3):  # the losses of the later steps show the gradients of those before
        torch.testing.assert_close(ours(), naive(), rtol=1e-4, atol=0)


def test_the_floor_of_a_head_has_the_products_of_a_hand_count() -> None:
    tokens, hidden, vocabulary = 1024, 512, 32_768
    to_vocabulary = 2.0 * tokens * hidden * vocabulary
    # one product for the target; forward, and backward twice, for each of three heads and of three blocks
    expected = to_vocabulary * (1 + 3 * 3) + 2.0 * tokens * hidden * hidden * 3 * 3
    assert sum(m.flops for m in bench_heads.FAMILIES["Medusa"].matmuls()) == expected
    frozen = to_vocabulary * (1 + 3 * 2)  # no gradient of a frozen head
    layer = 2 * hidden * (512 + 256 + 256) + hidden * hidden + 3 * hidden * 1408
    features = 2 * 3 * hidden * hidden  # forward and weights: no gradient of the target's features
    eagle = frozen + 2.0 * tokens * (3 * 3 * layer + features)
    assert sum(m.flops for m in bench_heads.FAMILIES["EAGLE-3"].matmuls()) == eagle


def test_the_matmuls_alone_are_as_many_as_they_claim() -> None:
    run = matmuls_alone([Matmul(count=2, rows=512, inner=8, columns=16)], torch.float32, "cpu")
    with torch.profiler.profile() as profiler:
        run()
    assert sum(event.count for event in profiler.key_averages() if event.key == "aten::mm") == 4  # of 256 rows


def build_sleepy(side: str, device: str) -> Run:
    """Ours takes a tenth of the other's time and of its memory."""

    def run() -> torch.Tensor:
        time.sleep(0.02 if side == OURS else 0.2)
        torch.ones(((8 if side == OURS else 80) << 20) // 4)
        return torch.tensor(2.0)

    return run


@pytest.mark.slow
def test_a_case_is_measured_in_speed_and_memory_against_each_side() -> None:
    case = Case(
        name="sleepy",
        against={"slow": "one that sleeps longer"},
        tokens=100,
        dtype="float32",
        matmuls=(Matmul(count=1, rows=8, inner=8, columns=8),),
        build=build_sleepy,
        required={"slow": Required(speed=2.0, memory=0.05)},
    )
    result = measure(case, rounds=3, threads=1, device="cpu")
    assert 2 < result.speed_ratio["slow"] < 20  # 10, on a machine that may be busy
    assert result.sides[OURS].tokens_per_s == pytest.approx(100 / sorted(result.sides[OURS].wall_s)[1])
    assert result.sides[OURS].tokens_per_s <= 100 / 0.02
    assert result.sides[OURS].peak_mib == pytest.approx(8, abs=3)
    assert result.sides["slow"].peak_mib == pytest.approx(80, abs=3)
    assert set(result.speed_ratio) == {"slow", FLOOR}
    table = "\n".join(lines(case, result))
    assert "PASS (at least 2)" in table
    assert "BELOW TARGET (at most 0.05)" in table


@pytest.mark.slow
@pytest.mark.parametrize("family", ["EAGLE-3", "MTP", "DFlash", "DSpark", "P-EAGLE"])
def test_a_compiled_peer_trains_like_the_one_that_ships(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not PEERS[family]["speculators, compiled"].can_run:
        pytest.skip("speculators or a compiler is not installed here")
    monkeypatch.setattr(bench_heads, "SIZES", TINY)
    losses = []
    for side in ("speculators", "speculators, compiled"):
        torch.manual_seed(0)
        run = build_head(family, "float32", side, "cpu")
        losses.append([float(run()) for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][0] != losses[0][2], "it trains"


@pytest.mark.slow
def test_trl_compiled_has_the_loss_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_compile():
        pytest.skip("no compiler is installed here")
    monkeypatch.setattr(bench_losses, "STEP_VOCABULARY", 128)
    monkeypatch.setattr(bench_losses, "STEP_LENGTH", 16)
    losses = {}
    for side in (OURS, TRL, TRL_COMPILED):
        run = bench_losses.build_kl_step("weights", side, "cpu")
        losses[side] = float(run())
    # a sum in bfloat16, of losses near 0.14
    assert losses[TRL] == pytest.approx(losses[TRL_COMPILED], rel=0.02)
    assert losses[OURS] == pytest.approx(losses[TRL], rel=0.02)


@pytest.mark.slow
def test_the_memory_of_a_side_that_compiles_is_not_shown() -> None:
    case = Case(
        name="sleepy",
        against={"slow": "one that sleeps longer"},
        tokens=100,
        dtype="float32",
        matmuls=(Matmul(count=1, rows=8, inner=8, columns=8),),
        build=build_sleepy,
        compiled=frozenset({"slow"}),
    )
    result = measure(case, rounds=1, threads=1, device="cpu")
    assert result.sides["slow"].peak_mib is None
    assert "memory" not in list(lines(case, result))[-1]
    assert result.speed_ratio["slow"] > 2


def test_every_case_has_a_name_of_its_own_and_names_what_is_not_installed() -> None:
    names = [case.name for section in bench_training.SECTIONS for case in section()]
    assert len(set(names)) == len(names) == 4 + len(bench_losses.kl_step_cases()) + 12
    for case in head_cases():
        for name, peer in bench_heads.PEERS[case.name.split(",")[0]].items():
            assert (name in case.against) == peer.can_run
            assert (peer.recorded in case.note) != peer.is_installed
            assert (name in case.compiled) == peer.is_compiled == name.endswith(", compiled")
    compiled = {case.name: case.compiled for case in bench_losses.kl_step_cases()}
    assert set(compiled.values()) == {frozenset({TRL_COMPILED})}


def test_a_case_that_does_not_exist_is_told_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="no case's name contains 'eagle-9': choose from fused loss, vocabulary 32k"):
        main(Config(cases="eagle-9"))


def test_a_cpu_is_measured_in_the_types_that_it_computes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = head_cases()
    monkeypatch.setattr(bench_training, "computes_bfloat16", lambda: False)
    assert {case.dtype for case in worth_measuring(cases, "cpu")} == {"float32"}
    assert worth_measuring(cases, "cuda") == cases
    monkeypatch.setattr(bench_training, "computes_bfloat16", lambda: True)
    assert worth_measuring(cases, "cpu") == cases
