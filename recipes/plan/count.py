"""Calculate the compute and memory of a training step on GPUs, and print tables.

sizes of target and draft ─► counted_step.py ─► work and memory, counted
--devices, --signal, --sharding ─► use_devices ─► devices for serving and training, memory of each, steps
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from redraft.distill.data.vocabulary import choose_size
from redraft.distill.plan.counted_step import (
    LOSS,
    Counted,
    Plan,
    count_step,
    count_target,
)
from redraft.distill.plan.held import SIGNAL, TARGET_WEIGHTS, Sharing
from redraft.distill.plan.operations import (
    DEVICES,
    KINDS,
    Device,
    Operation,
    Work,
    add_up,
    parts_of,
)
from redraft.distill.plan.sizes import find_sizes, stored_bits
from redraft.distill.plan.weightless import ACTIVATIONS
from redraft.distill.train.run_config import HeadConfig, make_config
from redraft.files.served_target import require_positions
from redraft.files.target_sizes import size_weights
from redraft.heads.catalog import find_family
from redraft.recipes.plan.plan import PlanConfig

# Share of a server's memory for weights. The rest is for the KV cache and activations.
SERVED_SHARE = 0.8


def make_plan(cfg: PlanConfig) -> Plan:
    """The sizes of the step: the defaults of the family's command, overridden by the flags.

    Raises:
        ValueError: the model does not exist, or a flag does not fit the family.
    """
    family = find_family(cfg.family)
    recipe = make_config(family)
    whole = find_sizes(cfg.target_name)
    target = whole.get_text_config()
    if cfg.signal == "model" and stored_bits(whole):
        raise ValueError(
            f"{cfg.target_name} is quantised, so it must run on servers: use --signal endpoint or "
            "cache"
        )
    if cfg.sequence_length is not None:
        require_positions(target, cfg.sequence_length, "--sequence-length", cfg.target_name)
    usual = family.training.draft_vocab_size if family.training else None
    if cfg.draft_vocab_size and usual is None:
        raise ValueError(
            f"{cfg.family} does not support --draft-vocab-size: it uses the target's vocabulary"
        )
    if cfg.gradient_checkpointing and not family.can_recompute:
        raise ValueError(
            f"{family.title} does not support --gradient-checkpointing: remove the flag"
        )
    return Plan(
        family=family.name,
        target=target,
        whole=whole,
        head=_choose_head(cfg, recipe.head)
        if isinstance(recipe, HeadConfig)
        else _find_draft(cfg, target),
        draft_vocab_size=choose_size(cfg.draft_vocab_size, usual, target.vocab_size),
        divergence=recipe.divergence,
        optimizer=cfg.optim or recipe.optim.name,
        max_grad_norm=recipe.optim.max_grad_norm,
        signal=cfg.signal,
        top_k=recipe.signal.k,
        batch_size=cfg.batch_size or recipe.loop.batch_size,
        sequence_length=cfg.sequence_length or recipe.loop.sequence_length,
        documents=cfg.documents,
        dtype=getattr(torch, cfg.target_dtype),
        autocast=cfg.mixed_precision == "bf16",
        keeps_gradients=cfg.devices > 1,
        gradient_checkpointing=cfg.gradient_checkpointing,
        exact=cfg.exact,
    )


def _choose_head(cfg: PlanConfig, usual: Any) -> Any:
    """Return the options of a head.

    They are the command's defaults, except that --num-steps sets how many tokens the head learns to
    draft.
    """
    if cfg.num_steps is None:
        return usual
    numbers = {name: value + 1 for name, value in vars(usual).items() if type(value) is int}
    (name,) = (
        name
        for name in numbers
        if replace(usual, **{name: numbers[name]}).num_tokens != usual.num_tokens
    )
    return replace(usual, **{name: cfg.num_steps})


def _find_draft(cfg: PlanConfig, target: Any) -> Any:
    if cfg.num_steps is not None:
        raise ValueError(
            "standalone drafts do not support --num-steps: they learn one step for any number of "
            "tokens"
        )
    draft = find_sizes(cfg.checkpoint).get_text_config()
    draft.vocab_size = target.vocab_size  # padded as in `redraft train`
    return draft


# ---------------------------------------------------------------------------------------------------------------
# result


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    memory_bytes: float
    """Peak memory of a training device, after sharding."""
    fits: bool
    targets: int
    """Number of devices that serve the target. With a cache, they serve first and train afterwards.
    """
    trainers: int
    """Number of devices that train. 0 if there are too few devices to serve the target and train.
    """


@dataclass(frozen=True, kw_only=True)
class Result:
    plan: Plan
    step: Counted
    served: Counted | None
    """The target's forward pass, if it runs outside the training process."""
    on: dict[str, OnDevice]


@functools.lru_cache(maxsize=2)
def count(cfg: PlanConfig) -> Result:
    """Count the step's operations and bytes, and derive the memory for every kind of device."""
    plan = make_plan(cfg)
    step = count_step(plan)
    served = None if plan.signal == "model" else count_target(plan)
    if served and (bits := stored_bits(plan.whole)):
        served.memory[TARGET_WEIGHTS] = (
            served.memory[TARGET_WEIGHTS] * bits // (8 * plan.dtype.itemsize)
        )
    on = {d.name: on_device(cfg, plan, step, served, d) for d in DEVICES}
    return Result(plan=plan, step=step, served=served, on=on)


def on_device(
    cfg: PlanConfig, plan: Plan, step: Counted, served: Counted | None, device: Device
) -> OnDevice:
    memory = step.memory
    if cfg.shard:
        sizes = size_weights(plan.whole or plan.target, plan.dtype)
        elsewhere = sizes.whole - sizes.share(cfg.devices)
        memory = Counter({**memory, TARGET_WEIGHTS: memory[TARGET_WEIGHTS] - elsewhere})
    targets, trainers = use_devices(cfg, served, device)
    # Shard only over the trainers, because the target's devices hold no part of the draft.
    sharing = Sharing.of(cfg.sharding, trainers or cfg.devices)
    memory_bytes = sum(sharing.share_out(memory).values())
    return OnDevice(
        memory_bytes=memory_bytes,
        fits=memory_bytes <= device.memory_bytes,
        targets=targets,
        trainers=trainers,
    )


def fit(cfg: PlanConfig, device: Device) -> PlanConfig:
    """Return settings with which the step fits on a device.

    Recompute activations if the given settings do not fit, and also reduce the batch size if that
    is not enough.
    """
    if count(cfg).on[device.name].memory_bytes <= device.memory_bytes:
        return cfg
    if find_family(cfg.family).can_recompute and not cfg.gradient_checkpointing:
        return fit(replace(cfg, gradient_checkpointing=True), device)
    # Activations and the signal grow with the batch size. The rest is constant.
    result = count(cfg)
    by_row = (result.step.memory[ACTIVATIONS] + result.step.memory[SIGNAL]) / result.plan.batch_size
    left = device.memory_bytes - result.on[device.name].memory_bytes
    smaller = replace(cfg, batch_size=max(1, result.plan.batch_size + math.floor(left / by_row)))
    return smaller if cfg.batch_size == 1 else fit(smaller, device)


def use_devices(cfg: PlanConfig, served: Counted | None, device: Device) -> tuple[int, int]:
    """Return (devices that serve the target, devices that train).

    A target outside the training process is served by the smallest group of 1, 2, 4, ... devices
    that can hold it. A cache is written by as many such groups as possible, and then all devices
    train.
    """
    if served is None:
        return 0, cfg.devices
    # E.g. 141 GB of weights on devices of 80 GB, of which 64 GB hold weights: 141 / 64 = 2.2, so 4
    # devices.
    group = 2 ** max(
        0,
        math.ceil(math.log2(served.memory[TARGET_WEIGHTS] / (SERVED_SHARE * device.memory_bytes))),
    )
    if cfg.signal == "cache":
        return (whole, cfg.devices) if (whole := cfg.devices // group * group) else (group, 0)
    return group, max(0, cfg.devices - group)


# -------------------------------------------------------------------------------------------------------------
# printing

FORMS = {
    "kernel": "Triton's kernels (a GPU's default)",
    "plain": "PyTorch's operations (--divergence.form plain)",
}


def report(cfg: PlanConfig) -> tuple[list[str], dict[str, Any]]:
    """Return (lines for a terminal, numbers for JSON)."""
    result = count(cfg)
    forms = count_forms(cfg, result)
    return list(as_text(cfg, result, forms)), as_json(cfg, result, forms)


def count_forms(cfg: PlanConfig, result: Result) -> dict[str, Work]:
    """Count the divergence's work for each implementation.

    They are the Triton kernels, which `result` has already counted for a GPU, and PyTorch
    operations.
    """
    plan = replace(result.plan, divergence=replace(result.plan.divergence, form="plain"))
    forms = {"kernel": result.step.operations, "plain": count_step(plan).operations}
    return {
        form: add_up(operations, [work for work in operations if work.part == LOSS])
        for form, operations in forms.items()
    }


def as_json(cfg: PlanConfig, result: Result, forms: dict[str, Work]) -> dict[str, Any]:
    total = add_up(result.step.operations, result.step.operations)
    told = {
        "target": cfg.target_name,
        "family": cfg.family,
        "signal": cfg.signal,
        "tokens_per_step": result.plan.tokens,
        "flops": total.flops / result.plan.tokens,
        "bytes": total.num_bytes / result.plan.tokens,
        "memory_bytes": result.step.memory.total(),
        "memory": dict(result.step.memory),
        "sharded_memory_bytes": {name: round(on.memory_bytes) for name, on in result.on.items()},
        "fits": {name: on.fits for name, on in result.on.items()},
    }
    told["divergence"] = {
        form: {
            "bytes": work.num_bytes / result.plan.tokens,
            "calls": work.calls,
        }
        for form, work in forms.items()
    }
    if cfg.tokens is not None:
        told["steps"] = {
            name: count_steps(cfg, result, on) for name, on in result.on.items() if on.trainers
        }
    return told


def count_steps(cfg: PlanConfig, result: Result, on: OnDevice) -> int:
    """Return the optimizer steps for --tokens.

    A step processes one batch on every training device.
    """
    assert cfg.tokens is not None, "set by --tokens"
    return math.ceil(cfg.tokens / (result.plan.tokens * on.trainers))


def as_text(cfg: PlanConfig, result: Result, forms: dict[str, Work]) -> Iterator[str]:
    plan = result.plan
    yield (
        f"{find_family(cfg.family).title} for {cfg.target_name}, --signal {cfg.signal}: a step of "
        f"{plan.batch_size} x {plan.sequence_length} tokens on one device, {plan.documents} "
        "conversations a row"
        f", {cfg.mixed_precision if plan.autocast else 'float32'}"
    )
    yield "counted, not measured"
    yield ""
    yield from work_table(cfg, result)
    yield ""
    for form, work in forms.items():
        moved = f"{work.num_bytes / plan.tokens / 1e6:,.2f} MB/token, {work.calls:,} calls"
        yield f"divergence, {FORMS[form]}: {moved}"
    yield ""
    yield from memory_table(result)
    yield ""
    yield from device_table(cfg, result)
    yield from advice(cfg, result)


def work_table(cfg: PlanConfig, result: Result) -> Iterator[str]:
    """Yield a row for each part of the step and for each kind of operation."""
    operations, tokens = result.step.operations, result.plan.tokens
    yield f"{'':<20}{'GFLOP/token':>12}{'MB/token':>10}{'calls':>9}"

    def row(name: str, chosen: list[Operation]) -> str:
        work = add_up(operations, chosen)
        moved = f"{work.num_bytes / tokens / 1e6:>10,.2f}{work.calls:>9,}"
        return f"{name:<20}{work.flops / tokens / 1e9:>12,.2f}{moved}"

    for part in parts_of(operations):
        yield row(part, [work for work in operations if work.part == part])
    yield row("all", list(operations))
    for kind, title in KINDS.items():
        yield row(f"  {title}", [work for work in operations if work.kind == kind])
    if result.step.signal_bytes:
        per_token = result.step.signal_bytes / tokens / 1e6
        yield f"{'signal from the host':<32}{per_token:>10,.3f}"


def memory_table(result: Result) -> Iterator[str]:
    """Yield the peak memory of a training device, before sharding."""
    for holder, num in result.step.memory.most_common():
        if num >= 5e6:
            yield f"{holder:<24}{num / 1e9:>8,.2f} GB"
    yield f"{'memory at its peak':<24}{result.step.memory.total() / 1e9:>8,.2f} GB"


def device_table(cfg: PlanConfig, result: Result) -> Iterator[str]:
    """Yield a row for each kind of device."""
    for d in DEVICES:
        on = result.on[d.name]
        room = (
            f"{'fits' if on.fits else 'does not fit'}: {on.memory_bytes / 1e9:,.1f} of "
            f"{d.memory_bytes / 1e9:.0f} GB"
        )
        use = {
            "model": f"{on.trainers} train",
            "endpoint": f"{on.targets} serve the target and {on.trainers} train",
            "cache": f"{on.targets} write the cache, then {on.trainers} train",
        }[cfg.signal]
        if not on.trainers:
            few = "one device is" if cfg.devices == 1 else f"{cfg.devices} devices are"
            use = f"{few} too few to serve the target and train"
        elif cfg.tokens is not None:
            use += f", {count_steps(cfg, result, on):,} steps for {cfg.tokens:,.0f} tokens"
        yield f"{d.name}: {room}; {use}"


def advice(cfg: PlanConfig, result: Result) -> Iterator[str]:
    """Yield lines about a target on separate devices, the cache size, and flags to fit the step."""
    if result.served is not None:
        work = add_up(result.served.operations, result.served.operations)
        yield (
            f"the target on other GPUs: {result.served.memory[TARGET_WEIGHTS] / 1e9:,.0f} GB, "
            f"{work.flops / result.plan.tokens / 1e9:,.2f} GFLOP/token"
        )
    if cfg.signal == "cache":
        per_token = result.step.signal_bytes / result.plan.tokens
        whole = (
            f", {per_token * cfg.tokens / 1e12:,.1f} TB for {cfg.tokens:,.0f} tokens"
            if cfg.tokens
            else ""
        )
        yield f"the cache takes {per_token / 1e3:,.1f} kB per token{whole}"
    for d in DEVICES:
        if not result.on[d.name].fits:
            yield f"to fit {d.name}: {', or '.join(ways_to_fit(cfg, d))}"


def ways_to_fit(cfg: PlanConfig, device: Device) -> Iterator[str]:
    """Yield flags that reduce the step's memory."""
    own = fit(cfg, device)
    fits = count(own).on[device.name].memory_bytes <= device.memory_bytes
    if fits:
        again = (
            "--gradient-checkpointing"
            if own.gradient_checkpointing > cfg.gradient_checkpointing
            else ""
        )
        rows = (
            f"--batch-size {own.batch_size} (with accumulation)"
            if own.batch_size != cfg.batch_size
            else ""
        )
        yield f"{again} {rows}".strip()
    if cfg.signal == "model":
        yield "--signal endpoint or cache"
        if cfg.devices > 1 and not cfg.shard:
            yield "--shard"
    if cfg.devices > 1 and cfg.sharding != "fsdp2":
        yield "--sharding fsdp2"
    elif not fits:
        yield "several --devices with --sharding fsdp2" if cfg.devices == 1 else "more --devices"
