"""The benchmark's cases on tiny sizes.

Their sides compute the same, and what they are measured with measures.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import model_runners
import pytest
import torch

from benchmarks.training import bench as bench_training
from benchmarks.training import heads as bench_heads
from benchmarks.training import losses as bench_losses
from benchmarks.training.bench import Config, lines, main, make_report, worth_measuring
from benchmarks.training.heads import FORWARD_KL, FORWARD_KL_COMPILED, NAIVE, build_head, head_cases
from benchmarks.training.losses import FUSED_LOSSES, KL_PEERS, LIGER_LOSSES
from benchmarks.training.measure import (
    FLOOR,
    OURS,
    OURS_COMPILED,
    Against,
    Case,
    DtypeName,
    Matmul,
    Measurement,
    Required,
    Run,
    Side,
    Step,
    _start,
    adamw,
    can_compile,
    matmuls_alone,
    measure,
)
from benchmarks.training.peers import PEERS, Peer, describe_absent, list_sides
from redraft.engine.hardware import Machine
from redraft.heads import catalog

TINY = dataclasses.replace(
    bench_heads.SIZES, length=16, hidden=32, intermediate=48, vocabulary=128, heads=4, key_heads=2
)


@pytest.mark.parametrize("family", list(bench_heads.FAMILIES))
def test_ours_and_the_naive_form_of_a_head_train_alike(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_heads, "SIZES", TINY)
    ours, naive = (build_head(family, "float32", side, "cpu") for side in (OURS, NAIVE))
    for _ in range(3):  # the losses of the later steps show the gradients of those before
        torch.testing.assert_close(ours(), naive(), rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Medusa", "EAGLE-3"])
def test_ours_compiled_trains_as_ours(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_compile("cpu"):
        pytest.skip("there is no C++ compiler here")
    monkeypatch.setattr(bench_heads, "SIZES", TINY)
    compiles = []
    monkeypatch.setattr(
        torch,
        "compile",
        lambda *args, make=torch.compile, **kw: compiles.append(1) or make(*args, **kw),
    )
    ours, compiled = (build_head(family, "float32", side, "cpu") for side in (OURS, OURS_COMPILED))
    for _ in range(3):
        torch.testing.assert_close(compiled(), ours(), rtol=1e-4, atol=0)
    assert compiles


def test_the_floor_of_a_head_has_the_products_of_a_hand_count() -> None:
    tokens, hidden, vocabulary = 1024, 512, 32_768
    to_vocabulary = 2.0 * tokens * hidden * vocabulary
    # one product for the target; forward, and backward twice, for each of three heads and of three
    # blocks
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
    assert (
        sum(event.count for event in profiler.key_averages() if event.key == "aten::mm") == 4
    )  # of 256 rows


def build_sleepy(side: str, device: str) -> Run:
    """Ours takes a tenth of the other's time and of its memory."""

    def run() -> torch.Tensor:
        time.sleep(0.02 if side == OURS else 0.2)
        torch.ones(((8 if side == OURS else 80) << 20) // 4)
        return torch.tensor(2.0)

    return run


def make_case(
    build: object = build_sleepy,
    name: str = "sleepy",
    dtype: DtypeName = "float32",
    **against: Against,
) -> Case:
    """A case of the family medusa with the requirement of half the memory and twice the speed."""
    return Case(
        name=name,
        family="medusa",
        against=against or {"slow": Against(description="one that sleeps longer", peer="slow")},
        tokens=100,
        dtype=dtype,
        matmuls=(Matmul(count=1, rows=8, inner=8, columns=8),),
        build=build,  # type: ignore[arg-type]
        required={name: Required(speed=2.0, memory=0.5) for name in against or ("slow",)},
    )


@pytest.mark.slow
def test_a_case_is_measured_in_speed_and_memory_against_each_side() -> None:
    case = dataclasses.replace(make_case(), required={"slow": Required(speed=2.0, memory=0.05)})
    result = measure(case, rounds=3, threads=1, device="cpu")
    assert 2 < result.speed_ratio["slow"] < 20  # 10, on a machine that may be busy
    assert result.sides[OURS].tokens_per_s == pytest.approx(
        100 / sorted(result.sides[OURS].wall_s)[1]
    )
    assert result.sides[OURS].tokens_per_s <= 100 / 0.02
    assert result.sides[OURS].peak_mib == pytest.approx(8, abs=3)
    assert result.sides["slow"].peak_mib == pytest.approx(80, abs=3)
    assert set(result.speed_ratio) == {"slow", FLOOR}
    table = "\n".join(lines(case, result))
    assert "PASS (at least 2)" in table
    assert "BELOW TARGET (at most 0.05)" in table


def build_learner(side: str, device: str) -> Run:
    """It trains 16 MiB, and its first run takes 200 MiB more, as a compiler would."""
    weight = torch.ones(16 << 18, requires_grad=True)
    first = [True]

    def loss() -> torch.Tensor:
        if first.pop() if first else False:
            torch.ones(200 << 18)
        return weight.sum()

    return Step(loss, [weight], adamw)


@pytest.mark.slow
def test_the_peak_has_gradients_and_the_optimizer_s_state_and_nothing_of_the_compiler() -> None:
    case = make_case(
        build_learner, compiled=Against(description="compiles", peer="learner", is_compiled=True)
    )
    result = measure(case, rounds=1, threads=1, device="cpu")
    for side in (OURS, "compiled"):
        assert result.sides[side].peaks_mib == pytest.approx(
            [48] * 3, abs=4
        )  # a gradient and AdamW's two averages
    assert "memory 1." in next(line for line in lines(case, result) if "compiles" in line)


def build_broken(side: str, device: str) -> Run:
    """A side that fails if it is called broken."""

    def run() -> torch.Tensor:
        if "broken" in side:
            raise RuntimeError("no kernel for this\nand a long trace")
        return torch.tensor(2.0)

    return run


def test_a_side_that_does_not_run_or_compile_is_told_and_left_out() -> None:
    against = {
        "as shipped": Against(description="one that runs", peer="peer"),
        "broken": Against(description="one that does not", peer="other"),
        "broken, compiled": Against(description="one that does not", peer="peer", is_compiled=True),
    }
    case = make_case(build_broken, **against)
    runs, losses, left_out = _start(case, "cpu")
    assert left_out == dict.fromkeys(
        ("broken", "broken, compiled"), "RuntimeError: no kernel for this"
    )
    assert set(runs) == set(losses) == {OURS, "as shipped"}
    result = make_measurement(case, {"as shipped": [2.0] * 3}, {"as shipped": [20.0] * 3}, left_out)
    told = [line for line in lines(case, result) if "broken" in line]
    assert len(told) == 2
    assert all(
        line.endswith(
            "left out, because it does not run on this machine: RuntimeError: no kernel for this"
        )
        for line in told
    )


def test_our_side_must_run() -> None:
    def build(side: str, device: str) -> Run:
        return build_broken("broken" if side == OURS else side, device)

    with pytest.raises(RuntimeError, match="kernel"):
        _start(make_case(build, peer=Against(description="one that runs", peer="peer")), "cpu")


# -----------------------------------------------------------------------------------------------------------
# the report


def make_measurement(
    case: Case,
    times: dict[str, list[float]],
    peaks: dict[str, list[float]],
    left_out: dict[str, str] | None = None,
) -> Measurement:
    """The measurement of sides with these seconds and MiB.

    Ours takes 1, 2 and 1 s, and 10, 11 and 12 MiB.
    """
    seconds = {OURS: [1.0, 2.0, 1.0], **times, FLOOR: [1.0, 1.0, 1.0]}
    mib = {OURS: [10.0, 11.0, 12.0], **peaks}
    sides = {
        name: Side(
            tokens_per_s=100.0,
            wall_s=wall,
            cpu_s=wall,
            peak_mib=sorted(mib[name])[1] if name in mib else None,
            peaks_mib=mib.get(name, []),
            loss=1.0,
        )
        for name, wall in seconds.items()
    }
    return Measurement(
        case=case.name,
        sides=sides,
        speed_ratio=dict.fromkeys(sides, 1.0),
        cpu_time_ratio=dict.fromkeys(sides, 1.0),
        gflops_per_s=1.0,
        threads=1,
        left_out=left_out or {},
    )


ENVIRONMENT = {"date": "2026-11-23 12:00 UTC", "processor": "made up"}
BOTH = {
    "Peer": Against(description="as shipped", peer="peer"),
    "Peer, compiled": Against(description="compiled", peer="peer", is_compiled=True),
}


def test_the_report_has_the_ratio_to_the_compiled_peer_in_the_worst_of_the_bfloat16_cases() -> None:
    good, bad, other = (
        make_case(name=name, dtype=dtype, **BOTH)  # type: ignore[arg-type]
        for name, dtype in (("good", "bfloat16"), ("bad", "bfloat16"), ("other", "float32"))
    )
    shipped_s, shipped_mib = [9.0, 9.0, 9.0], [90.0, 90.0, 90.0]
    measured = [
        (
            case,
            make_measurement(
                case,
                {"Peer": shipped_s, "Peer, compiled": times},
                {"Peer": shipped_mib, "Peer, compiled": peaks},
            ),
        )
        for case, times, peaks in (
            (good, [3.0, 6.0, 5.0], [20.0, 22.0, 24.0]),
            (bad, [2.0, 3.0, 4.0], [40.0, 44.0, 48.0]),
            (other, [1.0, 1.0, 1.0], [11.0, 11.0, 11.0]),
        )
    ]
    report = make_report(measured, {"environment": ENVIRONMENT, "device": "cpu", "rounds": 3})
    assert report["ratio"] == {
        "medusa": {
            "peer": {"median": 2.0, "low": 1.5, "high": 4.0, "compiled": True, "case": "bad"}
        }
    }
    assert report["memory"] == {
        "medusa": {
            "peer": {
                "median": 0.5,
                "low": 10 / 24,
                "high": 12 / 20,
                "compiled": True,
                "case": "good",
            }
        }
    }
    assert [case["case"] for case in report["cases"]] == ["good", "bad", "other"]
    assert report["cases"][0]["sides"]["Peer"]["wall_s"] == shipped_s
    assert (report["date"], report["environment"], report["rounds"]) == (
        ENVIRONMENT["date"],
        ENVIRONMENT,
        3,
    )
    assert json.loads(json.dumps(report)) == report


def test_compiled_peers_are_compared_with_ours_compiled() -> None:
    case = dataclasses.replace(make_case(name="case", dtype="bfloat16", **BOTH), compiles=True)
    times = {OURS_COMPILED: [0.5] * 3, "Peer": [4.0] * 3, "Peer, compiled": [2.0] * 3}
    peaks = {OURS_COMPILED: [5.0] * 3, "Peer": [40.0] * 3, "Peer, compiled": [20.0] * 3}
    result = make_measurement(case, times, peaks)
    report = make_report([(case, result)], {"environment": ENVIRONMENT})
    assert report["ratio"]["medusa"]["peer"]["median"] == 4.0
    assert report["memory"]["medusa"]["peer"]["median"] == 0.25
    shipped, compiled = (line for line in lines(case, result) if "Peer" in line)
    assert "ours 4.00x (2.00 to 4.00)" in shipped
    assert "ours 4.00x (4.00 to 4.00)" in compiled
    assert len([line for line in lines(case, result) if "the time of its matmuls" in line]) == 2
    without = make_measurement(
        case, {"Peer, compiled": [2.0] * 3}, {"Peer, compiled": [20.0] * 3}, {OURS_COMPILED: "no"}
    )
    report = make_report([(case, without)], {"environment": ENVIRONMENT})
    assert report["ratio"]["medusa"]["peer"]["median"] == 2.0, (
        "ours as it is, if it does not compile"
    )


def test_without_a_bfloat16_case_the_report_takes_float32() -> None:
    case = make_case(name="only", dtype="float32", **BOTH)
    result = make_measurement(case, {"Peer": [4.0] * 3}, {"Peer": [40.0] * 3})
    report = make_report([(case, result)], {"environment": ENVIRONMENT})
    assert report["ratio"]["medusa"]["peer"]["case"] == "only"


def test_a_peer_that_does_not_compile_is_compared_as_it_ships_and_an_absent_one_is_in_no_report() -> (
    None
):
    case = make_case(name="case", dtype="bfloat16", **BOTH)
    times, peaks = {"Peer": [4.0, 4.0, 4.0]}, {"Peer": [40.0, 40.0, 40.0]}
    result = make_measurement(case, times, peaks, left_out={"Peer, compiled": "RuntimeError: no"})
    report = make_report([(case, result)], {"environment": ENVIRONMENT})
    assert report["ratio"]["medusa"]["peer"] == {
        "median": 4.0,
        "low": 2.0,
        "high": 4.0,
        "compiled": False,
        "case": "case",
    }
    assert not report["memory"]["medusa"]["peer"]["compiled"]
    alone = make_report([(case, make_measurement(case, {}, {}))], {"environment": ENVIRONMENT})
    assert alone["ratio"] == alone["memory"] == {"medusa": {}}


def test_a_line_says_whether_the_ratios_pass_and_their_range() -> None:
    case = make_case(name="case", dtype="bfloat16", **BOTH)
    result = make_measurement(
        case,
        {"Peer": [2.0, 4.0, 6.0], "Peer, compiled": [1.0, 3.0, 1.0]},
        {"Peer": [22.0] * 3, "Peer, compiled": [20.0] * 3},
    )
    _, _, shipped, compiled = lines(case, result)
    assert "ours 2.00x (2.00 to 6.00) PASS (at least 2)" in shipped
    assert "memory 0.50x PASS (at most 0.5)" in shipped
    assert "ours 1.00x (1.00 to 1.50) BELOW TARGET (at least 2)" in compiled
    assert "memory 0.55x BELOW TARGET (at most 0.5)" in compiled


def test_the_file_is_written_after_every_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output, cases = tmp_path / "report.json", [make_case(name=name) for name in ("first", "second")]
    seen = []

    def look(case: Case, **_: object) -> Measurement:
        seen.append(
            [one["case"] for one in json.loads(output.read_text())["cases"]]
            if output.exists()
            else []
        )
        return make_measurement(case, {"slow": [4.0] * 3}, {"slow": [40.0] * 3})

    monkeypatch.setattr(bench_training, "list_cases", lambda _: cases)
    monkeypatch.setattr(bench_training, "measure", look)
    main(Config(output=output, device="cpu"))
    assert seen == [[], ["first"]]
    report = json.loads(output.read_text())
    assert report["ratio"]["medusa"]["slow"]["median"] == 4.0
    assert report["date"] == report["environment"]["date"]


# ------------------------------------------------------------------------------------------------------------
# the peers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "peer"),
    [
        *((family, "speculators") for family in ("EAGLE-3", "MTP", "DFlash", "DSpark", "P-EAGLE")),
        ("Medusa", "ModelOpt"),
    ],
)
def test_a_compiled_peer_trains_like_the_one_that_ships(
    family: str, peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not PEERS[family][f"{peer}, compiled"].can_run("cpu"):
        pytest.skip(f"{peer} or a compiler is not installed here")
    monkeypatch.setattr(bench_heads, "SIZES", TINY)
    losses = []
    for side in (peer, f"{peer}, compiled"):
        torch.manual_seed(0)
        run = build_head(family, "float32", side, "cpu")
        losses.append([float(run()) for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][0] != losses[0][2], "it trains"


@pytest.mark.slow
@pytest.mark.parametrize("side", KL_PEERS)
@pytest.mark.parametrize("precision", ["mixed", "weights"])
def test_every_peer_of_the_kl_step_trains_as_ours_does(
    side: str, precision: bench_losses.Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not KL_PEERS[side].can_run("cpu"):
        pytest.skip(f"{side}: the package or a compiler is not installed here")
    monkeypatch.setattr(bench_losses, "STEP_LENGTH", 16)
    ours, theirs = (
        bench_losses.build_kl_step(128, precision, name, "cpu") for name in (OURS, side)
    )
    # a sum in bfloat16, of losses from 0.14 to 0.07
    assert [float(ours()) for _ in range(3)] == pytest.approx(
        [float(theirs()) for _ in range(3)], rel=0.04
    )


@pytest.mark.slow
@pytest.mark.parametrize("side", LIGER_LOSSES)
def test_the_loss_alone_of_liger_is_ours(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not LIGER_LOSSES[side].can_run("cpu"):
        pytest.skip("liger-kernel or a compiler is not installed here")
    monkeypatch.setattr(bench_losses, "NUM_TOKENS", 16)
    runs = [bench_losses.build_fused_loss(128, "float32", name, "cpu") for name in (OURS, side)]
    assert float(runs[0]()) == pytest.approx(float(runs[1]()), rel=1e-4)
    for ours, theirs in zip(*(run.trained for run in runs if isinstance(run, Step)), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)


IN_THE_INTERPRETER = """
import torch
from benchmarks.training import losses
losses.NUM_TOKENS, losses.HIDDEN = 6, 16
runs = [losses.build_fused_loss(100, "float32", side, "cpu") for side in ("ours", losses.SPECULATORS)]
torch.testing.assert_close(runs[0](), runs[1]())
for ours, theirs in zip(runs[0].trained, runs[1].trained, strict=True):
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
"""


@pytest.mark.slow
def test_the_loss_alone_of_speculators_is_ours() -> None:
    pytest.importorskip("speculators")
    command = [sys.executable, "-c", IN_THE_INTERPRETER]
    done = subprocess.run(
        command, env=model_runners.environment("v2"), capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_on_a_gpu_the_loss_has_the_sizes_of_an_8b_target() -> None:
    on_cpu, on_gpu = (
        bench_losses.fused_loss_case(128, "bfloat16", device) for device in ("cpu", "cuda")
    )
    assert (on_cpu.tokens, on_cpu.matmuls[0].inner) == (1024, 512)
    assert (on_gpu.tokens, on_gpu.matmuls[0].inner) == (4096, 4096)
    assert bench_losses.SPECULATORS not in on_cpu.against
    assert (bench_losses.SPECULATORS in on_gpu.against) == FUSED_LOSSES[
        bench_losses.SPECULATORS
    ].is_installed


def test_a_peer_that_is_absent_or_cannot_be_compiled_is_no_side_and_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make_peer(package: str, *, is_compiled: bool = False) -> Peer:
        return Peer(
            package=package,
            name="peer",
            description="described",
            recorded=f"{package} recorded",
            build=build_sleepy,
            is_compiled=is_compiled,
        )

    peers = {
        "Absent": make_peer("no_such_package"),
        "Peer": make_peer("torch"),
        "Peer, compiled": make_peer("torch", is_compiled=True),
    }
    monkeypatch.setenv("CXX", sys.executable)  # anything that is there
    assert list_sides(peers, "cpu") == {
        "Peer": Against(description="described", peer="peer"),
        "Peer, compiled": Against(description="described", peer="peer", is_compiled=True),
    }
    assert describe_absent(peers, "cpu") == "not installed here, recorded: no_such_package recorded"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert list(list_sides(peers, "cpu")) == ["Peer"]
    assert describe_absent(peers, "cpu").endswith("; no compiler here: Peer, compiled is left out")


def test_the_cases_run_without_any_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peer, "is_installed", property(lambda peer: False))
    cases = bench_training.list_cases("cpu")
    assert {name for case in cases for name in case.against} == {
        NAIVE,
        FORWARD_KL,
        FORWARD_KL_COMPILED,
    }
    assert all(case.note for case in cases if case.family != "lk_hybrid")


def test_every_case_has_a_name_of_its_own_and_names_what_is_not_installed() -> None:
    cases = bench_training.list_cases("cpu")
    assert len({case.name for case in cases}) == len(cases) == 4 + 3 + 12 + 1
    families = {case.family for case in cases}
    assert families - {row.name for row in catalog.FAMILIES} == {"kl", "fused_kl", "lk_hybrid"}
    assert families >= {"eagle3", "medusa", "mtp", "dflash", "dspark", "peagle"}
    of_family = {
        f"{title}, {bench_heads.sizes_of(title).steps} steps": peers
        for title, peers in PEERS.items()
    }
    for case in cases:
        peers = {"kl": KL_PEERS, "fused_kl": FUSED_LOSSES, "lk_hybrid": {}}.get(case.family)
        peers = of_family[case.name.rsplit(", vocabulary", 1)[0]] if peers is None else peers
        for name, peer in peers.items():
            assert (name in case.against) == peer.can_run("cpu")
            assert (peer.recorded in case.note) != peer.is_installed
            assert peer.is_compiled == name.endswith(", compiled")
            assert peer.name == name.split(",")[0].lower()


def test_every_aim_names_a_peer_of_the_family() -> None:
    for title, family in bench_heads.FAMILIES.items():
        assert set(family.aims) <= set(PEERS[title]), title


def test_a_case_that_does_not_exist_is_told_with_those_that_do() -> None:
    with pytest.raises(ValueError, match=r"'eagle-9'.*32k"):
        main(Config(cases="eagle-9"))


def test_a_machine_is_measured_in_the_types_that_it_computes_in() -> None:
    cases = head_cases("cpu")
    assert {case.dtype for case in worth_measuring(cases, Machine())} == {"float32"}
    assert worth_measuring(cases, Machine(gpu="H100", gpu_has_bfloat16=True)) == cases
    assert worth_measuring(cases, Machine(cpu_has_bfloat16=True)) == cases
