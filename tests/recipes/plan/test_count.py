"""The counts against counting by hand, and against the same step on real tensors.

They are also compared with memory that was measured.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import re
import shlex
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import target_families
import torch
import torch.nn.functional as F
from parse_flags import parse
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from benchmarks.training import bench as training
from benchmarks.training import gpu
from benchmarks.training import heads as bench_heads
from benchmarks.training.measure import OURS, _in_fresh_process, _resident_peak_bytes
from redraft.distill.loss.choice import Divergence
from redraft.distill.plan import counted_step as bench_step
from redraft.distill.plan.choices import SignalKind
from redraft.distill.plan.counted_step import (
    Counted,
    Plan,
    count_flops,
    count_step,
    count_target,
)
from redraft.distill.plan.held import (
    DRAFT_WEIGHTS,
    GRADIENTS,
    STATE,
    TARGET_WEIGHTS,
    DraftSize,
    Sharing,
)
from redraft.distill.plan.operations import (
    DEVICES,
    Operation,
    add_up,
)
from redraft.distill.plan.sizes import find_sizes
from redraft.distill.plan.weightless import (
    ACTIVATIONS,
    META,
    Count,
    Weightless,
    attention_flops,
    run_weightless,
)
from redraft.files.checkpoint import new_model
from redraft.heads.catalog import FAMILIES, FamilyName, find_family
from redraft.heads.families import dflash, dspark, eagle3, medusa
from redraft.recipes.cli.run import run_guarded
from redraft.recipes.plan import plan as command
from redraft.recipes.plan.count import (
    as_text,
    count,
    fit,
    make_plan,
    report,
    use_devices,
    ways_to_fit,
)
from redraft.recipes.plan.plan import PlanConfig

ROOT = Path(__file__).parents[3]
MEASUREMENTS = (ROOT / "docs/measurements.md").read_text()

TARGET = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16,
)  # fmt: skip
DRAFT = LlamaConfig(
    vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16,
)  # fmt: skip
PLAN = Plan(
    family="eagle3",
    target=TARGET,
    head=eagle3.Config(num_steps=3),
    draft_vocab_size=128,
    divergence=Divergence(name="lk_hybrid"),
    batch_size=2,
    sequence_length=24,
)


SMALL: dict[str, Any] = {"draft_vocab_size": 128, "sequence_length": 32, "num_steps": 2}

MIMO = Qwen2Config(
    architectures=["MiMoForCausalLM"], vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=8,
    num_attention_heads=4, num_key_value_heads=2, num_nextn_predict_layers=1,
)  # fmt: skip
"""`TARGET` with a place for an MTP layer."""


def plan_for(family: str, **changes: Any) -> Plan:
    head = DRAFT if family == "standalone" else find_family(family).options_class()()
    if family == "dflash":
        head = dflash.Config(num_layers=2, block_size=4, num_anchors=6)
    if family == "dspark":
        head = dspark.Config(num_layers=2, block_size=3, num_anchors=6, markov_rank=8)
    vocabulary = 128 if family in ("eagle3", "peagle", "dflash", "dspark") else 0
    target = MIMO if family == "mtp" else TARGET
    return replace(
        PLAN, family=family, target=target, head=head, **{"draft_vocab_size": vocabulary, **changes}
    )


@pytest.fixture
def tiny_target(tmp_path: Any) -> str:
    TARGET.save_pretrained(tmp_path)
    return str(tmp_path)


# ----------------------------------------------------------------------------------------------------------------
# FLOPs


def test_the_flops_of_an_eagle3_step_are_those_of_a_count_by_hand() -> None:
    batch, tokens, steps, hidden, inner, heads, key_heads, size, vocabulary, kept = (
        2,
        24,
        3,
        64,
        96,
        4,
        2,
        16,
        512,
        128,
    )
    rows = batch * tokens
    mix = 2 * rows * (3 * hidden) * hidden
    layer = (
        2
        * rows
        * (2 * hidden * (heads + 2 * key_heads) * size + heads * size * hidden + 3 * hidden * inner)
    )
    # every step sees the keys up to its own; those of later steps on its diagonal are no matrix
    # product
    attention = steps * 2 * batch * heads * 2 * size * (tokens * (tokens + 1) // 2)
    labelled = [batch * (tokens - 2 - k) for k in range(steps)]
    target_logits = 2 * batch * (tokens - 2) * hidden * vocabulary
    draft_logits = sum(2 * n * hidden * kept for n in labelled)
    # of the mix only the weights have a gradient; attention's backward has five products for the
    # forward's two, which are repeated
    backward = mix + 2 * steps * layer + 7 * attention // 2
    by_hand = mix + steps * layer + attention + target_logits + 3 * draft_logits + backward
    assert count_flops(count_step(replace(PLAN, signal="endpoint"))) == by_hand


def test_a_windowed_training_step_computes_the_pairs_of_its_window() -> None:
    """W T - W (W - 1) / 2 of the T (T + 1) / 2 pairs of a full head, in both passes."""

    def flops(tokens: int, window: int | None) -> int:
        head = replace(PLAN.head, num_steps=1, window=window)
        step = replace(PLAN, head=head, sequence_length=tokens, signal="endpoint")
        return count_flops(count_step(step))

    window, batch, heads, size = 512, 2, 4, 16
    # Two products in the forward pass, and seven in the backward pass, as above
    of_a_pair = (2 + 7) * 2 * batch * heads * size
    for tokens in (1024, 4096, 8192):
        left_out = tokens * (tokens + 1) // 2 - (window * tokens - window * (window - 1) // 2)
        assert flops(tokens, None) - flops(tokens, window) == of_a_pair * left_out


def test_the_flops_of_the_target_are_those_of_a_count_by_hand() -> None:
    rows, (q, kv) = 48, (64, 32)
    layer = 2 * rows * (64 * q + 2 * 64 * kv + q * 64 + 3 * 64 * 96)
    attention = 2 * 2 * 4 * (24 * 25 // 2) * (16 + 16)
    served = count_target(PLAN)
    assert count_flops(served) == 8 * (layer + attention)
    assert served.memory[TARGET_WEIGHTS] == pytest.approx(
        2 * _parameters(TARGET), rel=1e-3
    )  # beside a few buffers


def _parameters(config: LlamaConfig) -> int:
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    return 2 * config.vocab_size * 64 + 8 * layer + 64


def test_causal_attention_computes_the_scores_up_to_the_diagonal() -> None:
    q = torch.empty(2, 3, 5, 7, device="meta")
    full = attention_flops(q, q, q, is_causal=False, backward=False)
    assert full == 2 * 2 * 3 * 25 * (7 + 7)
    assert attention_flops(q, q, q, is_causal=True, backward=False) == full * 15 // 25
    assert attention_flops(q, q, q, is_causal=False, backward=True) == full * 5 // 2


# ------------------------------------------------------------------------------------------- with
# and without weights


@pytest.mark.parametrize("signal", ["model", "endpoint"])
@pytest.mark.parametrize(
    "family",
    [
        name
        if name in ("standalone", "eagle3", "dflash")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in get_args(FamilyName)
    ],
)
def test_without_weights_the_same_is_counted_as_with_them(family: str, signal: SignalKind) -> None:
    plan = plan_for(family, signal=signal, documents=3)
    weightless, real = (
        count_step(plan, shown_on=torch.device("cpu")),
        count_step(plan, weightless=False),
    )
    assert weightless.operations == real.operations
    assert weightless.memory == real.memory
    assert count_flops(real) > 0


def test_a_count_in_float32_is_the_same_too() -> None:
    plan = replace(PLAN, dtype=torch.float32, autocast=False, keeps_gradients=True)
    weightless, real = (
        count_step(plan, shown_on=torch.device("cpu")),
        count_step(plan, weightless=False),
    )
    assert (weightless.operations, weightless.memory) == (real.operations, real.memory)
    assert real.memory[GRADIENTS] == real.memory[DRAFT_WEIGHTS] - 128 * 8  # beside the ids


@pytest.mark.slow
def test_a_count_with_muon_is_the_same_too() -> None:
    plan = plan_for("eagle3", optimizer="muon")
    weightless, real = (
        count_step(plan, shown_on=torch.device("cpu")),
        count_step(plan, weightless=False),
    )
    assert (weightless.operations, weightless.memory) == (real.operations, real.memory)
    assert real.memory[STATE] < count_step(plan_for("eagle3")).memory[STATE]


def test_the_targets_signal_is_in_memory_during_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`Distillation.step` holds it in a local variable."""
    make_source, run_backward = bench_step.make_source, torch.autograd.backward
    signals: list[Any] = []
    alive: list[bool] = []

    def make_watched(*args: Any, **options: Any) -> Any:
        source = make_source(*args, **options)

        def watched(batch: Any) -> Any:
            signal = source(batch)
            signals.append(weakref.ref(signal))
            return signal

        return watched

    def backward(loss: torch.Tensor) -> None:
        alive.extend(signal() is not None for signal in signals)
        run_backward(loss)

    monkeypatch.setattr(bench_step, "make_source", make_watched)
    monkeypatch.setattr(torch.autograd, "backward", backward)
    count_step(plan_for("dflash", signal="model"))
    assert alive == [True]


@pytest.mark.slow
def test_seven_steps_of_32k_tokens_take_less_than_twice_the_activations_of_one() -> None:
    """And 64k tokens of EAGLE-3 for an 8B target fit a GPU of 80 GB."""

    def long(num_steps: int, tokens: int) -> Counter[str]:
        asked = PlanConfig(
            signal="endpoint", batch_size=1, sequence_length=tokens, documents=1, num_steps=num_steps,
            gradient_checkpointing=num_steps > 1,
        )  # fmt: skip
        return count_step(make_plan(asked)).memory

    one, seven = long(1, 32_768), long(7, 32_768)
    print(
        f"activations: {one[ACTIVATIONS] / 1e9:.1f} GB of one step, {seven[ACTIVATIONS] / 1e9:.1f} "
        "GB of seven"
    )
    assert seven[ACTIVATIONS] < 2 * one[ACTIVATIONS]
    assert long(7, 65_536).total() < 80e9


@pytest.mark.parametrize(
    ("family", "kept"),
    [("standalone", 0), ("eagle3", 4096), pytest.param("eagle3", 0, marks=pytest.mark.slow)],
)
def test_the_kernels_move_hardly_more_than_the_logits_once_and_the_gradients_once(
    family: str, kept: int
) -> None:
    target = LlamaConfig(**{**TARGET.to_dict(), "vocab_size": 16_384})
    head = (
        LlamaConfig(**{**DRAFT.to_dict(), "vocab_size": 16_384})
        if family == "standalone"
        else PLAN.head
    )
    plan = replace(
        PLAN,
        family=family,
        target=target,
        head=head,
        draft_vocab_size=kept,
        sequence_length=256,
        batch_size=4,
    )
    forms = {
        form: count_step(replace(plan, divergence=replace(plan.divergence, form=form))).operations
        for form in ("kernel", "plain")
    }
    moved, flops = {}, {}
    for form, operations in forms.items():
        loss = [(work, times) for work, times in operations.items() if work.part == bench_step.LOSS]
        moved[form] = sum(work.num_bytes * times for work, times in loss if work.kind == "other")
        flops[form] = sum(work.flops * times for work, times in loss)
    labelled = [4 * 255] if family == "standalone" else [4 * (254 - k) for k in range(3)]
    logits = 2 * (max(labelled) * 16_384 + sum(labelled) * (kept or 16_384))
    gradients = 2 * sum(labelled) * (kept or 16_384)
    assert logits + gradients < moved["kernel"] < 1.5 * (logits + gradients)
    assert moved["plain"] > 4 * moved["kernel"]
    assert flops["kernel"] == flops["plain"]


@pytest.mark.slow
def test_an_accelerator_takes_other_branches_than_the_cpu() -> None:
    cpu, accelerator = (
        count_step(PLAN, shown_on=torch.device("cpu")),
        count_step(PLAN, shown_on=META),
    )
    # the CPU's attention computes the later steps' few scores without products
    assert count_flops(accelerator) > count_flops(cpu)


def test_a_mixture_of_experts_is_counted_by_the_experts_that_a_token_meets() -> None:
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
    )  # fmt: skip
    products = Counter(work.flops for work in count_target(replace(PLAN, target=config)).operations)
    assert products[2 * (2 * 48) * 64 * (2 * 32)]  # gate and up
    assert products[2 * (2 * 48) * 32 * 64]  # down


def test_code_that_branches_on_weightless_values_is_refused() -> None:
    with Count(weightless=True), pytest.raises(ValueError, match=r"\baten\."):
        torch.randn(3).sum().item()


def test_bytes_are_what_a_kernel_reads_and_writes() -> None:
    with Count(weightless=True) as counting:
        table, x = torch.randn(1000, 16), torch.randn(8, 16)
        y, z = torch.randn(16, 4), torch.randn(8, 4)
        counting.begin("all")
        x.view(16, 8).T  # noqa: B018
        F.embedding(torch.tensor([1, 2, 3]), table)
        x.zero_()
        x.add_(1.0)
        for beta in (0, 1):  # x @ y, into the memory of z or added to it
            torch.addmm(z, x, y, beta=beta, out=z)
    moved = [work.num_bytes for work in counting.operations.elements() if work.num_bytes]
    gathered = 3 * 16 * 4
    assert sorted(moved) == sorted(
        [2 * gathered + 3 * 8, 512, 2 * 512, 512 + 256 + 128, 512 + 256 + 2 * 128]
    )


def test_a_view_keeps_the_memory_of_the_whole() -> None:
    with Count(weightless=True) as counting:
        whole = torch.randn(100, 10)
        part = whole[:1]
        del whole
        assert counting.memory.live.total() == 4000
        del part
        assert counting.memory.live.total() == 0
        assert counting.memory.peak.total() == 4000
        assert isinstance(torch.randn(2), Weightless)


HEADS = {
    "EAGLE-3": ("eagle3", eagle3.Config(num_steps=bench_heads.SIZES.steps, own_head=False)),
    "Medusa": ("medusa", medusa.Config(num_heads=bench_heads.SIZES.steps)),
}


def peak_of_second_step(family: str) -> int:
    """Resident memory at the worst moment of a step with an optimizer state.

    It is that above the libraries.
    """
    build = functools.partial(bench_heads.build_head, family, "float32", OURS, "cpu")
    build()()  # loads the code of all kernels
    gc.collect()
    before = resident_bytes_from_now()
    run = build()
    run()
    resident_bytes_from_now()
    run()
    return _resident_peak_bytes() - before


def resident_bytes_from_now() -> int:
    """Resident memory. The peak is forgotten."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident_peak_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("family", list(HEADS))
def test_the_peak_is_within_15_percent_of_memory_measured_on_this_cpu(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "MALLOC_MMAP_THRESHOLD_", str(1 << 16)
    )  # a freed tensor leaves the process at once
    name, head = HEADS[family]
    plan = Plan(
        family=name,
        target=bench_heads.FAMILIES[family].target(),
        head=head,
        divergence=Divergence(),
        signal="endpoint",
        batch_size=bench_heads.SIZES.batch,
        sequence_length=bench_heads.SIZES.length,
        dtype=torch.float32,
        autocast=False,
    )
    counted = count_step(plan, shown_on=torch.device("cpu")).memory.total()
    measured = _in_fresh_process(peak_of_second_step, family, threads=1)
    print(f"{family}: {counted / 2**20:.0f} MiB counted, {measured / 2**20:.0f} MiB measured")
    assert counted == pytest.approx(measured, rel=0.15)


# -------------------------------------------------------------------------------------------------------
# devices

H100 = DEVICES[0]


def test_a_benchmarks_estimate_takes_the_longest_of_computing_moving_and_being_launched() -> None:
    def seconds(kind: Any, flops: int, num_bytes: int) -> float:
        work = Operation("a part", kind, flops, num_bytes)
        return gpu.estimate_s(Counter({work: 2}), H100) / 2

    assert seconds("product", 10**12, 1) == pytest.approx(1e12 / 989.4e12 / 0.65)
    assert seconds("attention", 10**12, 1) == pytest.approx(1e12 / 989.4e12 / 0.4)
    assert seconds("other", 0, 10**9) == pytest.approx(1e9 / 3.35e12 / 0.85)
    assert seconds("other", 0, 8) == pytest.approx(5e-6)
    assert seconds("other", 0, 0) == 0  # a view


def counted_target(weights: int) -> Counted:
    return Counted(operations=Counter(), memory=Counter({TARGET_WEIGHTS: weights}))


def test_a_target_elsewhere_is_served_by_the_fewest_devices_that_hold_it() -> None:
    cfg = PlanConfig(signal="endpoint", devices=8)
    # 141 GB need 4 of 64 GB
    large, small = counted_target(141 * 10**9), counted_target(16 * 10**9)
    assert use_devices(cfg, large, H100) == (4, 4)
    assert use_devices(replace(cfg, devices=4), large, H100) == (4, 0)
    assert use_devices(cfg, small, H100) == (1, 7)
    assert use_devices(cfg, None, H100) == (0, 8)


def test_a_cache_is_written_first_by_all_devices_and_trained_from_then() -> None:
    cfg, target = PlanConfig(signal="cache", devices=8), counted_target(141 * 10**9)
    assert use_devices(cfg, target, H100) == (8, 8)
    assert use_devices(replace(cfg, devices=7), target, H100) == (4, 7)
    assert use_devices(replace(cfg, devices=3), target, H100) == (4, 0)


def test_sharding_divides_what_it_shares_out() -> None:
    memory = {STATE: 80, GRADIENTS: 40, DRAFT_WEIGHTS: 40, ACTIVATIONS: 5}
    assert sum(Sharing.of("none", 8).share_out(memory).values()) == 165
    assert sum(Sharing.of("zero2", 8).share_out(memory).values()) == 10 + 5 + 40 + 5
    assert sum(Sharing.of("fsdp2", 8).share_out(memory).values()) == 10 + 5 + 5 + 5


def test_only_the_devices_that_train_share_out(tiny_target: str) -> None:
    cfg = PlanConfig(target=tiny_target, **SMALL, signal="endpoint", devices=4)
    result = count(replace(cfg, sharding="fsdp2"))
    for on in result.on.values():
        assert on.trainers == 3
        assert on.memory_bytes == sum(
            Sharing.of("fsdp2", on.trainers).share_out(result.step.memory).values()
        )


def test_a_target_in_shards_leaves_two_whole_layers_and_a_share(tiny_target: str) -> None:
    cfg = PlanConfig(target=tiny_target, **SMALL, devices=4)
    whole, shared = count(cfg), count(replace(cfg, shard=True))
    config = AutoConfig.from_pretrained(tiny_target)
    layer = (
        sum(
            w.numel() for w in AutoModelForCausalLM.from_config(config).model.layers[0].parameters()
        )
        * 2
    )
    layers = config.num_hidden_layers * layer
    for device in DEVICES:
        before, after = whole.on[device.name], shared.on[device.name]
        # A quarter of the layers stays, and two whole layers are there in a pass.
        assert before.memory_bytes - after.memory_bytes == pytest.approx(
            0.75 * layers - 2 * layer, abs=2
        )


@pytest.mark.slow
@pytest.mark.parametrize(("column", "target"), [(0, {"signal": "endpoint"}), (1, {"shard": True})])
def test_the_memory_of_a_70b_target_in_the_docs_is_the_one_that_is_counted(
    column: int, target: dict[str, Any]
) -> None:
    """The table of docs/measurements.md.

    Draft, optimizer and gradients, activations, target, all of it; in GB.
    """
    cells = "".join(row[1 + column] for row in read_rows("on each GPU that trains"))
    told = re.findall(r"([\d.]+) GB", cells)
    cfg = PlanConfig(
        target="llama-3.3-70b", family="standalone", devices=8, batch_size=2, sharding="zero2"
    )
    result = count(replace(cfg, gradient_checkpointing=True, **target))
    on = result.on["H100"]
    parts = Sharing.of("zero2", on.trainers).share_out(result.step.memory)
    draft = [parts[DRAFT_WEIGHTS], parts[STATE] + parts[GRADIENTS], parts[ACTIVATIONS]]
    counted = [*draft, on.memory_bytes - sum(draft), on.memory_bytes]
    assert told == [f"{num_bytes / 1e9:.1f}" for num_bytes in counted]


def read_rows(first_cell: str) -> list[list[str]]:
    """The cells of the rows under a table's head in docs/measurements.md."""
    rows = []
    for line in MEASUREMENTS.partition(f"| {first_cell} |")[2].splitlines()[2:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip(" `") for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("row", read_rows("draft for target"), ids=lambda row: row[0])
def test_the_steps_in_the_docs_are_the_ones_that_are_counted(row: list[str]) -> None:
    _, flags, gflop, megabytes, memory, fits = row
    cfg = parse(PlanConfig, None, {}, shlex.split(flags), prog="redraft plan")
    result = count(cfg)
    total = add_up(result.step.operations, result.step.operations)
    assert gflop == f"{total.flops / result.plan.tokens / 1e9:.1f}"
    assert megabytes == f"{total.num_bytes / result.plan.tokens / 1e6:.0f}"
    assert memory == f"{result.step.memory.total() / 1e9:.1f} GB"
    assert fits == ", ".join(name for name, on in result.on.items() if on.fits)


@pytest.mark.slow
@pytest.mark.parametrize("row", read_rows("draft steps"), ids=lambda row: row[0])
def test_the_activations_in_the_docs_are_the_ones_that_are_counted(row: list[str]) -> None:
    steps, _, flag = row[0].replace("`", "").partition(", with ")
    asked = [
        "--signal",
        "endpoint",
        "--batch-size",
        "1",
        "--sequence-length",
        "32768",
        "--documents",
        "1",
    ]
    cfg = parse(
        PlanConfig, None, {}, [*asked, "--num-steps", steps, *flag.split()], prog="redraft plan"
    )
    assert row[1] == f"{count_step(make_plan(cfg)).memory[ACTIVATIONS] / 1e9:.1f} GB"


# ----------------------------------------------------------------------------------------------------------
# the command


def test_the_command_writes_what_it_counts(tiny_target: str, tmp_path: Path) -> None:
    cfg = PlanConfig(
        target=tiny_target, **SMALL, tokens=1e6, devices=2, json=tmp_path / "plan.json"
    )
    command.main(cfg)
    told = json.loads((tmp_path / "plan.json").read_text())
    step = count_step(make_plan(cfg))
    assert told["tokens_per_step"] == 8 * 32
    assert told["flops"] == count_flops(step) / 256
    assert (
        told["bytes"]
        == sum(work.num_bytes * times for work, times in step.operations.items()) / 256
    )
    assert told["memory_bytes"] == step.memory.total() == sum(told["memory"].values())
    assert all(told["fits"].values())
    # A million tokens in steps of 256 on each of two devices.
    assert set(told["steps"].values()) == {1954}


@pytest.mark.slow
def test_the_tables_say_what_does_not_fit_and_what_would() -> None:
    cfg = PlanConfig(
        target="llama-3.3-70b", devices=8, batch_size=1, sequence_length=64, tokens=1e9
    )
    result = count(cfg)
    assert result.step.memory[TARGET_WEIGHTS] == pytest.approx(141.1e9, rel=1e-3)
    assert not result.on["H100"].fits
    text = "\n".join(as_text(cfg, result, {}))
    assert f"does not fit: {result.step.memory.total() / 1e9:,.1f} of 80 GB" in text
    assert "to fit H100: --signal endpoint or cache" in text


def test_served_hidden_states_come_from_the_host_and_the_target_is_counted_apart(
    tiny_target: str,
) -> None:
    cfg = PlanConfig(target=tiny_target, **SMALL, signal="endpoint", devices=4)
    result = count(cfg)
    assert (
        result.step.signal_bytes == 256 * 4 * 64 * 2
    )  # the last state and three layers, in bfloat16
    assert "target" not in {work.part for work in result.step.operations}
    assert result.served is not None
    text = "\n".join(as_text(cfg, result, {}))
    assert "the target on other GPUs" in text
    assert "serve the target and" in text


def test_a_standalone_draft_is_counted_with_the_vocabulary_of_its_target(tiny_target: str) -> None:
    plan = make_plan(PlanConfig(family="standalone", target=tiny_target, checkpoint="llama-3.2-1b"))
    assert (plan.head.vocab_size, plan.divergence.name, plan.sequence_length) == (
        512,
        "lk_hybrid",
        4096,
    )
    small = replace(plan, head=DRAFT, batch_size=1, sequence_length=64)
    kept, recomputed = count_step(small), count_step(replace(small, gradient_checkpointing=True))
    assert count_flops(recomputed) > count_flops(kept)
    assert recomputed.memory[ACTIVATIONS] < kept.memory[ACTIVATIONS]


def test_known_sizes_are_those_of_the_models() -> None:
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        models = {"llama-3.1-8b": 8.030, "llama-3.2-3b": 3.213, "qwen3-8b": 8.191, "mimo-7b": 7.623}
        for name, billions in models.items():
            model = AutoModelForCausalLM.from_config(find_sizes(name))
            assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(
                billions, abs=1e-3
            )


@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3"])
def test_a_target_with_images_is_counted_whole(tmp_path: Path, model_type: str) -> None:
    config = target_families.make_config(model_type)
    config.save_pretrained(tmp_path)
    cfg = PlanConfig(target=str(tmp_path), batch_size=1, sequence_length=16, draft_vocab_size=0)
    with torch.device("meta"):
        model = new_model(config, torch.bfloat16)
    size = sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))
    assert count(cfg).step.memory[TARGET_WEIGHTS] == size > 0


def count_served(folder: Path, **more: Any) -> int:
    """Bytes of a target's weights on its servers."""
    (folder / "config.json").write_text(json.dumps({**TARGET.to_dict(), **more}))
    cfg = PlanConfig(target=str(folder), **SMALL, signal="endpoint", devices=2)
    if more:
        with pytest.raises(ValueError, match=r"--signal endpoint\b"):
            count(replace(cfg, signal="model"))
    found = count(cfg).served
    assert found is not None
    return found.memory[TARGET_WEIGHTS]


@pytest.fixture(scope="module")
def whole_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    return count_served(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(
    ("about", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "mxfp4"}, 4),
        ({"quant_method": "awq", "bits": 4}, 4),
        ({"quant_method": "gptq", "bits": 8}, 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
            },
            4,
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
    ],
)
def test_a_quantised_target_is_served_at_its_size(
    tmp_path: Path, whole_bytes: int, about: dict[str, Any], bits: int
) -> None:
    assert count_served(tmp_path, quantization_config=about) == whole_bytes * bits // 16


@pytest.mark.slow
def test_mtp_is_counted_for_a_target_with_a_place_for_its_layer() -> None:
    told = report(PlanConfig(family="mtp", batch_size=1, sequence_length=64))[1]
    assert (told["target"], told["family"]) == ("mimo-7b", "mtp")
    # The released model has 7.83 billion weights: the target's 7.62, and the layer's, here in
    # float32.
    assert told["memory"]["draft's weights"] == pytest.approx(4 * 0.211e9, rel=0.01)
    assert (PlanConfig().target_name, PlanConfig(family="mtp", target="qwen3-8b").target_name) == (
        "llama-3.1-8b",
        "qwen3-8b",
    )
    with pytest.raises(ValueError, match="MTP"):
        count(PlanConfig(family="mtp", target="llama-3.1-8b", sequence_length=64))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"target": "./llama-3.1-80b"}, r"\bllama-3\.1-8b\b"),
        ({"family": "standalone", "num_steps": 3}, r"standalone.*--num-steps\b"),
        ({"family": "medusa", "draft_vocab_size": 100}, r"medusa.*--draft-vocab-size\b"),
        (
            {"family": "medusa", "gradient_checkpointing": True},
            r"Medusa.*--gradient-checkpointing\b",
        ),
        ({"documents": 2000}, r"\b2000\b.*\b2048\b"),
        ({"draft_vocab_size": 200_000}, r"^--draft-vocab-size 200000\b.*\b128256\b"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(PlanConfig(**flags))


def test_numbers_that_make_no_training_are_refused() -> None:
    for flags in (
        {"devices": 0},
        {"batch_size": 0},
        {"num_steps": 0},
        {"tokens": -1.0},
        {"tokens": math.inf},
        {"sharding": "zero2"},
        {"shard": True},
    ):
        with pytest.raises(ValueError, match=next(iter(flags)).replace("_", "[-_]")):
            PlanConfig(**flags)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", [name for name in get_args(FamilyName) if name != "peagle"])
def test_the_closed_form_is_what_a_step_keeps(family: str, optimizer: Any) -> None:
    """Beside ids of a reduced vocabulary and AdamW's counts of steps."""
    plan = plan_for(family, signal="endpoint", optimizer=optimizer, keeps_gradients=True)
    counted = count_step(plan).memory
    draft = bench_step.make_models(plan, torch.device("meta"))[1]
    for holder, num_bytes in DraftSize.of(draft).hold(optimizer).items():
        assert counted[holder] == pytest.approx(num_bytes, rel=0.02), holder


def test_hidden_states_for_a_standalone_draft_are_counted() -> None:
    plan = plan_for("standalone", signal="endpoint")
    top_k, exact = count_step(plan), count_step(replace(plan, exact=True))
    assert exact.signal_bytes == plan.tokens * plan.target.hidden_size * 2  # bfloat16
    assert top_k.signal_bytes == plan.tokens * plan.top_k * (8 + 4)
    for flags in ({"family": "standalone"}, {"family": "eagle3", "signal": "endpoint"}):
        with pytest.raises(ValueError, match="--exact"):
            PlanConfig(exact=True, **flags)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["standalone", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_activations_that_are_computed_again_are_no_model_flops(family: str) -> None:
    plan = plan_for(family)
    again = replace(plan, gradient_checkpointing=True)
    counted = count_step(again)
    assert (
        gpu.count_model_flops(again, counted)
        == count_flops(count_step(plan))
        < count_flops(counted)
    )
    assert gpu.count_model_flops(plan, count_step(plan)) == count_flops(count_step(plan))


@pytest.mark.slow
def test_a_step_that_does_not_fit_computes_activations_again_and_then_has_fewer_rows(
    tiny_target: str,
) -> None:
    cfg = PlanConfig(target=tiny_target, draft_vocab_size=128, sequence_length=64, batch_size=8)
    whole, again = (
        count(one).on["H100"].memory_bytes
        for one in (cfg, replace(cfg, gradient_checkpointing=True))
    )
    assert again < whole

    def fit_in(num_bytes: float) -> PlanConfig:
        small = replace(H100, memory_bytes=num_bytes)
        found = fit(cfg, small)
        assert found == cfg or next(ways_to_fit(cfg, small)).startswith("--gradient-checkpointing")
        return found

    assert fit_in(whole) == cfg
    assert fit_in((whole + again) / 2) == replace(cfg, gradient_checkpointing=True)
    assert fit_in(again - 1) == replace(cfg, gradient_checkpointing=True, batch_size=7)


@pytest.mark.parametrize(
    ("family", "option"),
    [
        *((name, "num_steps") for name in ("eagle1", "eagle3", "mtp", "peagle")),
        *((name, "block_size") for name in ("dflash", "dspark")),
        ("medusa", "num_heads"),
    ],
)
def test_the_number_of_steps_changes_one_option(family: str, option: str) -> None:
    usual, changed = (
        make_plan(PlanConfig(family=family, num_steps=steps)).head for steps in (None, 5)
    )
    assert changed == replace(usual, **{option: 5}) != usual


def test_every_family_with_weights_can_be_counted() -> None:
    assert set(get_args(FamilyName)) == {
        family.name.replace("_", "-") for family in FAMILIES if not family.is_lookup
    }


# ----------------------------------------------------------------------------------------------------------------
# a GPU


@pytest.mark.parametrize(
    "family", ["standalone", "mtp", pytest.param("eagle3", marks=pytest.mark.slow)]
)
def test_the_step_that_is_counted_is_the_one_that_is_run(family: str, tiny_target: str) -> None:
    """On the CPU, because every line but the memory's is the same; the sheet is that of an H100."""
    plan, sheet = plan_for(family), gpu.find_device("NVIDIA H100 80GB HBM3")
    assert sheet is not None
    result = gpu.measure_plan(
        gpu.Config(target=tiny_target), plan, torch.device("cpu"), sheet, rounds=1
    )
    assert result.tokens == 48
    per_token = result.flops_per_s / result.tokens_per_s
    assert per_token * result.tokens == pytest.approx(count_flops(count_step(plan)))
    assert result.mfu == pytest.approx(result.flops_per_s / 989.4e12)
    assert result.peak_gb is None
    assert result.estimated_tokens_per_s
    assert f"{family} " in gpu.describe(result)


@pytest.mark.slow
def test_a_step_runs_with_compiled_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    timed = gpu.time_step(
        plan_for("eagle3"), torch.device("cpu"), rounds=1, warm_up=1, compiles=True
    )
    assert timed.seconds > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 2
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_family_that_cannot_run_is_told_and_the_others_go_on(
    tiny_target: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, cpu = tmp_path / "gpu.json", torch.device("cpu")
    time_step, written = gpu.time_step, []

    def run(plan: Plan, device: torch.device, *, rounds: int, compiles: bool) -> gpu.Timed:
        written.append(len(json.loads(out.read_text())["results"]) if out.exists() else 0)
        if plan.family == "eagle1":
            raise RuntimeError("no kernel image\nfor this device")
        return time_step(plan, device, rounds=rounds, compiles=compiles)

    monkeypatch.setattr(gpu, "time_step", run)
    cfg = gpu.Config(target=tiny_target, batch_size=1, sequence_length=32, documents=1)
    gpu.measure_all(cfg, ("medusa", "mtp", "eagle1", "eagle3"), cpu, "a CPU", rounds=1, output=out)
    report = json.loads(out.read_text())
    assert [result["family"] for result in report["results"]] == ["medusa", "eagle3"]
    assert written == [0, 1, 1], "the file is written after every family"
    (mtp, eagle1) = report["left_out"]
    assert (mtp["family"], mtp["target"]) == ("mtp", tiny_target)
    assert mtp["reason"].startswith("redraft has no MTP layout for the model type llama")
    assert eagle1["reason"] == "RuntimeError: no kernel image"
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 5
    assert told[1].endswith(f"left out: {mtp['reason']}")
    assert told[-1] == f"written to {out}"
    with pytest.raises(ValueError, match="family"):
        gpu.measure_all(cfg, ("mtp",), cpu, "a CPU", rounds=1, output=out)
    assert json.loads(out.read_text())["results"] == []


@pytest.mark.slow
def test_on_a_gpu_mtp_gets_a_target_with_a_place_for_its_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans: list[Plan] = []
    monkeypatch.setattr(gpu, "measure_plan", lambda cfg, plan, *_: plans.append(plan))
    cfg = gpu.Config(batch_size=1, sequence_length=64)
    assert list(gpu.measure(cfg, gpu.FAMILIES, torch.device("cpu"), None, 1)) == [None] * 5
    assert {plan.family: plan.target.num_hidden_layers for plan in plans} == {
        "standalone": 32,
        "eagle3": 32,
        "medusa": 32,
        "mtp": 36,
        "dflash": 32,
    }
    assert gpu.explain(torch.cuda.OutOfMemoryError("tried to allocate 2 GiB\nof 80")) == (
        "it does not fit (tried to allocate 2 GiB)"
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", gpu.FAMILIES)
def test_every_step_that_is_measured_fits_an_h100(family: FamilyName) -> None:
    cfg = gpu.choose_sizes(gpu.Config(), family, H100)
    on = count(cfg).on["H100"]
    assert on.fits, f"{on.memory_bytes / 1e9:.1f} GB"


@pytest.mark.slow
@pytest.mark.parametrize("family", gpu.FAMILIES)
def test_a_measured_step_names_the_flags_that_count_it(family: FamilyName) -> None:
    cfg = gpu.choose_sizes(gpu.Config(batch_size=1, sequence_length=64), family, H100)
    counting = parse(PlanConfig, None, {}, shlex.split(gpu.write_flags(cfg)), prog="redraft plan")
    assert str(make_plan(counting)) == str(make_plan(cfg))


@pytest.mark.parametrize("family", ["eagle3", "dflash"])
def test_a_draft_is_wholly_on_the_device_of_the_measurement(family: str) -> None:
    target, draft = bench_step.make_models(
        plan_for(family, draft_vocab_size=64), torch.device("meta")
    )
    for model in (target, draft):
        assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {
            "meta"
        }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_measurement_ends_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(lambda: training.main(training.Config(gpu=True))) == 2
    assert re.match("redraft: .*GPU.*`redraft plan`", capsys.readouterr().err.splitlines()[-1])


def write_config(path: Path, **config: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config))
    return path


def test_a_config_is_read_under_any_name_and_its_own_error_is_told(tmp_path: Path) -> None:
    llama = LlamaConfig(num_hidden_layers=3).to_dict()
    for name in ("config.json", "small-llama.json"):
        path = write_config(tmp_path / "good" / name, **llama)
        assert find_sizes(str(path)).num_hidden_layers == 3
    assert find_sizes(str(tmp_path / "good")).num_hidden_layers == 3
    write_config(tmp_path / "kimi" / "config.json", model_type="kimi_k2")
    write_config(
        tmp_path / "bert" / "config.json", model_type="bert", architectures=["BertForMaskedLM"]
    )
    (tmp_path / "torn.json").write_text('{"model_type"')
    refused = {
        "kimi": "kimi_k2",
        "bert": "encoder",
        "torn.json": "corrupt",
        "gone": "known without",
    }
    for name, match in refused.items():
        with pytest.raises((ValueError, OSError), match=match):
            find_sizes(str(tmp_path / name))


@pytest.mark.parametrize(("target", "positions"), [("llama-3.1-8b", 131072), ("qwen3-8b", 40960)])
def test_a_long_row_beyond_the_targets_positions_is_not_counted(
    target: str, positions: int
) -> None:
    make_plan(PlanConfig(target=target, sequence_length=positions))
    wrong = rf"--sequence-length is {positions + 1}\b.*at most {positions}"
    with pytest.raises(ValueError, match=wrong):
        make_plan(PlanConfig(target=target, sequence_length=positions + 1))


def test_experts_in_float32_are_counted_without_their_kernel() -> None:
    def made(*shape: int, dtype: torch.dtype = torch.float32) -> Weightless:
        return Weightless(torch.empty(*shape, dtype=dtype, device="meta"))

    product = torch.ops.aten._grouped_mm.default
    given = (made(8, 16), made(2, 16, 32), made(2, dtype=torch.int32))
    out = run_weightless(product, given, {})
    assert (tuple(out.shape), out.dtype) == ((8, 32), torch.float32)
