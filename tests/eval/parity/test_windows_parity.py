"""Heads with windows in the real vLLM: what its drafter computes is what training computes.

Prompts reach past several blocks of the cache that the engine has evicted behind the window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import model_runners
import pytest
import torch
from test_serving_parity import (
    NUM_TOKENS,
    Dumps,
    Served,
    engine_run,
    make_eagle3,
    make_engine_target,
    make_peagle,
    make_served,
)

from redraft.distill.signal.sources import InProcessTarget
from redraft.engine.parity.run import run_engine
from redraft.eval.parity.compare import compare
from redraft.heads.families import dflash, dspark, eagle1, eagle3
from redraft.heads.target import Target
from tests.helpers import served_targets

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

W, PAGE = 9, 32  # the CPU kernel takes multiples of 32
PROMPTS = [
    torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (5, 21, 97)
]
BLOCK = {"mask_token_id": 255, "num_layers": 3, "aux_layer_ids": (1, 4), "block_size": 5}
Make = Callable[[Path], Served]


def block(family: str, layout: str = "vllm", **options: Any) -> Make:
    module, kind = (dflash, dflash.DFlash) if family == "dflash" else (dspark, dspark.DSpark)
    sizes = {**BLOCK, **({} if family == "dflash" else {"markov_rank": 16}), **options}

    def make(target: Target) -> Any:
        return kind(module.Config(**sizes), target)

    return lambda folder: make_served(
        folder, family, make, layout=layout, target_name=str(folder / "target")
    )


def eagle(layout: str = "vllm", qk_norm: bool = False, **options: Any) -> Make:
    return lambda folder: make_eagle3(
        folder, None, layout, {"qk_norm": qk_norm}, aux_layer_ids=(1, 4), **options
    )


def parallel(layout: str = "vllm", **options: Any) -> Make:
    return lambda folder: make_peagle(
        folder, None, layout, aux_layer_ids=(1, 4), num_layers=3, **options
    )


def beside_mistral(family: str, window: int | None) -> Make:
    """A head beside a target all of whose layers have a window of 16."""

    def make(target: Target) -> Any:
        if family == "eagle1":
            return eagle1.Eagle1(eagle1.Config(num_steps=NUM_TOKENS), target)
        if family == "dflash":
            return dflash.DFlash(
                dflash.Config(**{**BLOCK, "aux_layer_ids": (1, 3)}, window=window), target
            )
        return eagle3.Eagle3(
            eagle3.Config(num_steps=NUM_TOKENS, aux_layer_ids=(1, 3), window=window), target
        )

    def serve(folder: Path) -> Served:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(served_targets.SETTINGS, "mistral", {"sliding_window": 16})
            method = "eagle" if family == "eagle1" else family
            return make_served(folder, method, make, model_type="mistral")

    return serve


ON_V1: dict[str, Make] = {
    "dflash: causal windows, vllm": block("dflash", window=W),
    "dflash: causal windows, speculators": block("dflash", "speculators", window=W),
    "dflash: both directions, vllm": block("dflash", window=W, is_causal=False),
    "dflash: both directions, speculators": block("dflash", "speculators", window=W,
                                                  is_causal=False),
    "dflash: causal without windows": block("dflash", is_causal=True),
    "eagle3: window, vllm": eagle(window=W),
    "eagle3: window, speculators": eagle("speculators", window=W),
    "eagle3: window, norms of queries and keys": eagle(qk_norm=True, window=W),
    "eagle3: two layers": eagle(num_layers=2),
    "eagle3: three layers, window, speculators": eagle("speculators", window=W, num_layers=3),
    "peagle: windows, vllm": parallel(window=W),
    "peagle: windows, speculators": parallel("speculators", window=W),
    "eagle1: beside a target that slides": beside_mistral("eagle1", None),
    "eagle3: full, beside a target that slides": beside_mistral("eagle3", None),
    "eagle3: window, beside a target that slides": beside_mistral("eagle3", W),
    "dflash: full, beside a target that slides": beside_mistral("dflash", None),
}  # fmt: skip

ON_V2: dict[str, Make] = {
    "dflash: a full layer last": block("dflash", window=W, full_layers=(2,)),
    "dspark: causal windows": block("dspark", window=W),
    "dspark: both directions, speculators": block("dspark", "speculators", window=W,
                                                  is_causal=False),
    "dspark: a full layer last, speculators": block("dspark", "speculators", window=W,
                                                    full_layers=(2,)),
    "eagle3: a full layer last": eagle(window=W, num_layers=2, full_layers=(1,)),
}  # fmt: skip


def run(
    makers: Mapping[str, Make], folder: Path, environment: dict[str, str] | None = None
) -> Dumps:
    served = {name: make(folder / str(i)) for i, (name, make) in enumerate(makers.items())}
    runs = [
        replace(
            engine_run(each, max_tokens=24, recorded_prompts=3, blocks_a_prompt=6),
            prompts=PROMPTS,
            engine={"block_size": PAGE},
        )
        for each in served.values()
    ]
    ran = run_engine(runs, folder, environment)
    return {name: (each, dump) for (name, each), dump in zip(served.items(), ran, strict=True)}


@pytest.fixture(scope="module")
def on_v1(tmp_path_factory: pytest.TempPathFactory) -> Dumps:
    return run(ON_V1, tmp_path_factory.mktemp("windows"))


@pytest.fixture(scope="module")
def on_v2(tmp_path_factory: pytest.TempPathFactory) -> Dumps:
    return run(ON_V2, tmp_path_factory.mktemp("windows-v2"), model_runners.environment("v2"))


def differences(name: str, dumps: Dumps) -> list[str]:
    (draft, model, _, _), dump = dumps[name]
    assert len(dump.recorded()) >= 12
    signal = InProcessTarget(model, draft.aux_layer_ids)
    return [found.problem for found in compare(draft, name.split(":")[0], signal, dump)]


@pytest.mark.parametrize("name", ON_V1)
def test_a_served_window_is_the_trained_one(name: str, on_v1: Dumps) -> None:
    assert differences(name, on_v1) == []


@pytest.mark.parametrize("name", ON_V2)
def test_windows_served_by_v2_are_the_trained_ones(name: str, on_v2: Dumps) -> None:
    assert differences(name, on_v2) == []


def test_another_window_than_the_served_one_is_found(on_v1: Dumps) -> None:
    (draft, model, target, speculative), dump = on_v1["eagle3: window, vllm"]
    config = replace(draft.config, window=W + 1)
    wider = eagle3.Eagle3(config, Target.from_model(model))
    wider.load_state_dict(draft.state_dict())
    changed = {"eagle3": ((wider, model, target, speculative), dump)}
    assert differences("eagle3", changed) != []


def test_the_engine_target_has_room_for_the_prompts() -> None:
    positions = make_engine_target().config.max_position_embeddings
    assert positions >= max(map(len, PROMPTS)) + 24 + NUM_TOKENS
    assert max(map(len, PROMPTS)) > 3 * W + 2 * PAGE
