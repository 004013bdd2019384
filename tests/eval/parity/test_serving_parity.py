"""Serving computes what training computed.

Every head against the real vLLM, by inputs, outputs and drafted tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import model_runners
import pytest
import torch
from make_heads import make_random, make_target
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from redraft.distill.signal.sources import InProcessTarget
from redraft.engine.parity.run import Dump, EngineRun, run_engine
from redraft.eval.parity.compare import CURES, compare
from redraft.heads.families import dflash, dspark, eagle1, eagle3, medusa, mtp, peagle
from redraft.heads.families.mtp_folder import as_mimo, stitch
from redraft.heads.families.standalone import StandaloneDraft
from redraft.heads.shape import LlamaShape
from redraft.heads.target import Target
from tests.helpers.served_targets import make_served_target

pytestmark = pytest.mark.vllm

NUM_TOKENS = 3
PROMPTS = [
    torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (5, 12)
]

Served = tuple[Any, Any, Path, dict[str, Any]]
"""The draft and the target as modules, the folder served as the target, and how the draft is
served.
"""


def make_engine_target(**overrides: Any) -> Any:
    # a head size that vLLM's CPU attention supports
    sizes = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "head_dim": 32,
    }
    return make_target(**{**sizes, "num_key_value_heads": 1, "initializer_range": 0.2, **overrides})


def make_served(
    folder: Path, method: str, make: Callable[[Target], Any], model_type: str = "", **export: Any
) -> Served:
    model = make_served_target(model_type, 256) if model_type else make_engine_target()
    model.save_pretrained(folder / "target")
    head = make_random(make(Target.from_model(model)))
    head.export(folder / "draft", **export)
    return head, model, folder / "target", {"method": method, "model": str(folder / "draft")}


def make_eagle3(
    folder: Path,
    ids: Any,
    layout: str = "vllm",
    layer: dict[str, bool] | None = None,
    **options: Any,
) -> Served:
    """`layer` sets options of the layer's shape, which only heads of other trainers have."""

    def make(target: Target) -> Any:
        shape = replace(LlamaShape.from_config(target.config), **(layer or {}))
        return eagle3.Eagle3(eagle3.Config(num_steps=NUM_TOKENS, **options), target, ids, shape)

    return make_served(folder, "eagle3", make, layout=layout, target_name=str(folder / "target"))


def make_dflash(
    folder: Path, ids: Any, layer: dict[str, Any] | None = None, **options: Any
) -> Served:
    """`layer` sets what only heads of other trainers have."""

    def make(target: Target) -> Any:
        shape = replace(LlamaShape.from_config(target.config), **(layer or {}))
        config = dflash.Config(mask_token_id=255, num_layers=2, **options)
        return dflash.DFlash(config, target, ids, shape)

    return make_served(folder, "dflash", make)


def make_peagle(folder: Path, ids: Any, layout: str = "vllm", **options: Any) -> Served:
    def make(target: Target) -> Any:
        return peagle.PEagle(
            peagle.Config(num_steps=NUM_TOKENS + 1, mask_token_id=255, **options), target, ids
        )

    head, model, target, served = make_served(
        folder, "eagle3", make, layout=layout, target_name=str(folder / "target")
    )
    return head, model, target, {**served, "parallel_drafting": True}


def make_mimo(folder: Path, *, alone: bool) -> Served:
    make_engine_target(num_key_value_heads=1).save_pretrained(folder / "llama")
    as_mimo(folder / "llama", folder / "mimo")
    model = AutoModelForCausalLM.from_pretrained(folder / "mimo").eval()
    head = make_random(mtp.Mtp(mtp.Config(num_steps=NUM_TOKENS), Target.from_model(model)))
    if alone:
        head.export(folder / "draft")
        return head, model, folder / "mimo", {"method": "mtp", "model": str(folder / "draft")}
    stitch(folder / "mimo", head.checkpoint_tensors(), folder / "stitched", {})
    return head, model, folder / "stitched", {"method": "mtp"}


def make_standalone(folder: Path) -> Served:
    model = make_engine_target()
    model.save_pretrained(folder / "target")
    make_engine_target(seed=1, num_hidden_layers=2).save_pretrained(folder / "draft")
    draft = StandaloneDraft.load(folder / "draft").eval()
    return (
        draft,
        model,
        folder / "target",
        {"method": "draft_model", "model": str(folder / "draft")},
    )


VARIANTS: dict[str, Callable[[Path], Served]] = {
    "eagle1": lambda folder: make_served(
        folder, "eagle", lambda target: eagle1.Eagle1(eagle1.Config(num_steps=NUM_TOKENS), target)
    ),
    "eagle3: two layers, reduced vocabulary, vllm": lambda folder: make_eagle3(
        folder, torch.arange(1, 256, 2), aux_layer_ids=(1, 4)
    ),
    "eagle3: four layers, 3.1, shared head, vllm": lambda folder: make_eagle3(
        folder, None, aux_layer_ids=(0, 2, 3, 5), fc_norm=True, norm_output=True, own_head=False
    ),
    "eagle3: sizes of its own, vllm": lambda folder: make_eagle3(
        folder,
        None,
        aux_layer_ids=(1, 4),
        intermediate_size=160,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    ),
    "eagle3: two layers, norm before residual, speculators": lambda folder: make_eagle3(
        folder,
        torch.arange(0, 256, 2),
        "speculators",
        aux_layer_ids=(2, 3),
        norm_before_residual=True,
    ),
    "eagle3: norms of queries and keys, vllm": lambda folder: make_eagle3(
        folder, torch.arange(1, 256, 2), layer={"qk_norm": True}, aux_layer_ids=(1, 2, 4)
    ),
    "eagle3: norms of queries and keys, norm before fc, speculators": lambda folder: make_eagle3(
        folder, None, "speculators", {"qk_norm": True}, aux_layer_ids=(1, 2, 4), norm_before_fc=True
    ),
    "eagle3: biases of attention, norm before fc, vllm": lambda folder: make_eagle3(
        folder, None, layer={"attention_bias": True}, aux_layer_ids=(1, 2, 4), norm_before_fc=True
    ),
    "eagle1: granite": lambda folder: make_served(
        folder,
        "eagle",
        lambda target: eagle1.Eagle1(eagle1.Config(num_steps=NUM_TOKENS), target),
        "granite",
    ),
    "eagle3: gpt-oss": lambda folder: make_served(
        folder,
        "eagle3",
        lambda target: eagle3.Eagle3(
            eagle3.Config(num_steps=NUM_TOKENS, aux_layer_ids=(1, 2, 3)), target
        ),
        "gpt_oss",
    ),
    "eagle1: gemma 3": lambda folder: make_served(
        folder,
        "eagle",
        lambda target: eagle1.Eagle1(eagle1.Config(num_steps=NUM_TOKENS), target),
        "gemma3_text",
    ),
    "eagle3: gemma 4": lambda folder: make_served(
        folder,
        "eagle3",
        lambda target: eagle3.Eagle3(
            eagle3.Config(num_steps=NUM_TOKENS, aux_layer_ids=(1, 2, 3)), target
        ),
        "gemma4_text",
    ),
    "medusa": lambda folder: make_served(
        folder, "medusa", lambda target: medusa.Medusa(medusa.Config(num_layers=2), target)
    ),
    "dflash: two layers": lambda folder: make_dflash(
        folder, None, aux_layer_ids=(1, 4), block_size=4
    ),
    "dflash: reduced vocabulary, a longer block than is served": lambda folder: make_dflash(
        folder, torch.arange(1, 256, 2), aux_layer_ids=(1, 2, 5), block_size=8
    ),
    "dflash: biases of attention, heads that do not divide the hidden size": lambda folder: (
        make_dflash(
            folder,
            None,
            {"attention_bias": True, "num_attention_heads": 3},
            aux_layer_ids=(1, 4),
            block_size=4,
        )
    ),
    "peagle: three layers": lambda folder: make_peagle(
        folder, None, aux_layer_ids=(1, 4), num_layers=3
    ),
    "peagle: one layer, reduced vocabulary, norms, speculators": lambda folder: make_peagle(
        folder,
        torch.arange(0, 256, 2),
        "speculators",
        aux_layer_ids=(1, 2, 5),
        num_layers=1,
        norm_before_fc=True,
        norm_before_residual=True,
    ),
    "mtp: stitched into a mimo target": lambda folder: make_mimo(folder, alone=False),
    "mtp: in a folder of its own": lambda folder: make_mimo(folder, alone=True),
    "standalone": make_standalone,
}


def make_dspark(folder: Path, ids: Any, **options: Any) -> Served:
    def make(target: Target) -> Any:
        return dspark.DSpark(
            dspark.Config(mask_token_id=255, num_layers=2, markov_rank=16, **options), target, ids
        )

    return make_served(folder, "dspark", make)


ON_V2: dict[str, Callable[[Path], Served]] = {
    "standalone": VARIANTS["standalone"],
    "eagle1": VARIANTS["eagle1"],
    "eagle3: two layers, reduced vocabulary, vllm": VARIANTS[
        "eagle3: two layers, reduced vocabulary, vllm"
    ],
    "eagle3: four layers, 3.1, shared head, vllm": VARIANTS[
        "eagle3: four layers, 3.1, shared head, vllm"
    ],
    "mtp: in a folder of its own": VARIANTS["mtp: in a folder of its own"],
    "dflash: two layers": VARIANTS["dflash: two layers"],
    "dspark: from the anchor": lambda folder: make_dspark(
        folder, None, aux_layer_ids=(1, 4), block_size=NUM_TOKENS
    ),
    "dspark: from the first mask, no confidence, a longer block than is served": lambda folder: (
        make_dspark(
            folder,
            None,
            aux_layer_ids=(1, 4),
            block_size=8,
            sample_from_anchor=False,
            confidence_head=False,
        )
    ),
    "dspark: reduced vocabulary, a longer block than is served": lambda folder: make_dspark(
        folder, torch.arange(1, 256, 2), aux_layer_ids=(1, 2, 5), block_size=7
    ),
}
"""Run by vLLM's V2 model runner, which most GPUs have by default and DSpark always needs."""

QUICK = [
    "eagle1: granite",
    "eagle3: gpt-oss",
    "eagle3: two layers, norm before residual, speculators",
    "medusa",
    "dflash: reduced vocabulary, a longer block than is served",
    "peagle: one layer, reduced vocabulary, norms, speculators",
    "mtp: in a folder of its own",
    "standalone",
]
"""Each family once, with the options that are most often wrong. An engine takes as long as fifty
other tests.
"""

OF_GEMMA = ("eagle1: gemma 3", "eagle3: gemma 4")


def engine_run(served: Served, **options: Any) -> EngineRun:
    _, _, target, speculative = served
    speculative = {"num_speculative_tokens": NUM_TOKENS, **speculative}
    return EngineRun(target=str(target), speculative_config=speculative, prompts=PROMPTS, **options)


Dumps = dict[str, tuple[Served, Dump]]


def run_variants(
    makers: Mapping[str, Callable[[Path], Served]],
    folder: Path,
    environment: dict[str, str] | None = None,
) -> Dumps:
    """Every variant, run by one engine after the other in one process."""
    served = {name: make(folder / str(i)) for i, (name, make) in enumerate(makers.items())}
    ran = run_engine([engine_run(each) for each in served.values()], folder, environment)
    return {name: (each, dump) for (name, each), dump in zip(served.items(), ran, strict=True)}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Dumps:
    return run_variants({name: VARIANTS[name] for name in QUICK}, tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def further_dumps(tmp_path_factory: pytest.TempPathFactory) -> Dumps:
    further = {name: make for name, make in VARIANTS.items() if name not in QUICK}
    return run_variants(further, tmp_path_factory.mktemp("further-parity"))


@pytest.fixture(scope="module")
def dumps_of_v2(tmp_path_factory: pytest.TempPathFactory) -> Dumps:
    return run_variants(
        ON_V2, tmp_path_factory.mktemp("parity-v2"), model_runners.environment("v2")
    )


def assert_serving_sees_what_training_saw(family: str, served: Served, dump: Dump) -> None:
    draft, model, _, _ = served
    assert len(dump.recorded()) >= 6
    assert {block.request for block in dump.recorded() if block.num_output == 1} == {0, 1}
    signal = None if family == "standalone" else InProcessTarget(model, draft.aux_layer_ids)
    assert compare(draft, family, signal, dump) == []


@pytest.mark.parametrize("name", QUICK)
def test_serving_sees_what_training_saw(name: str, dumps: Dumps) -> None:
    assert_serving_sees_what_training_saw(name.split(":")[0], *dumps[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in QUICK])
def test_serving_sees_what_training_saw_with_further_options(
    name: str, further_dumps: Dumps
) -> None:
    assert_serving_sees_what_training_saw(name.split(":")[0], *further_dumps[name])


@pytest.mark.parametrize(
    "name",
    [
        "eagle1: granite",
        "eagle3: gpt-oss",
        *(pytest.param(name, marks=pytest.mark.slow) for name in OF_GEMMA),
    ],
)
def test_the_output_is_that_of_transformers(name: str, request: pytest.FixtureRequest) -> None:
    (_, model, _, _), dump = request.getfixturevalue("dumps" if name in QUICK else "further_dumps")[
        name
    ]
    for prompt, output in zip(PROMPTS, dump.outputs, strict=True):
        ids = list(prompt)
        for _ in output:  # each token from a whole pass
            with torch.no_grad():
                ids.append(
                    int(
                        model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()
                    )
                )
        assert ids[len(prompt) :] == output


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_V2)
def test_serving_by_v2_sees_what_training_saw(name: str, dumps_of_v2: Dumps) -> None:
    served, dump = dumps_of_v2[name]
    assert_serving_sees_what_training_saw(name.split(":")[0], served, dump)
    estimates = sum(len(block.confidence) for block in dump.recorded())
    has_confidence = getattr(served[0], "confidence_head", None) is not None
    assert estimates == (NUM_TOKENS * len(dump.recorded()) if has_confidence else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        ("markov_head.markov_w1.weight", "tokens"),
        ("markov_head.markov_w2.weight", "tokens"),
        ("confidence_head.proj.bias", "confidence"),
        ("norm.weight", "step 1"),
    ],
)
def test_another_dspark_head_than_the_one_served_is_told(
    tensor: str, kind: str, dumps_of_v2: Dumps
) -> None:
    (head, model, _, _), dump = dumps_of_v2["dspark: from the anchor"]
    other = copy.deepcopy(head)
    with torch.no_grad():
        other.get_parameter(tensor).neg_()
    found = compare(other, "dspark", InProcessTarget(model, head.aux_layer_ids), dump)
    assert CURES[kind] in [finding.cure for finding in found]


def make_native_target(layout: str) -> Any:
    sizes = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "initializer_range": 0.2,
        "max_position_embeddings": 128,
    }
    torch.manual_seed(0)
    if layout == "qwen3_next":
        # full attention in all layers: the CPU build has no kernels for linear attention, and MTP
        # layers do not use it
        sparse = {
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
            "layer_types": ["full_attention"] * 3,
        }
        return Qwen3NextForCausalLM(
            Qwen3NextConfig(**sizes, **sparse, num_key_value_heads=1, head_dim=64)
        ).eval()
    # the only latent size that vLLM's CPU kernel supports
    latent = {
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    sparse = {"n_routed_experts": 4, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1}
    sparse |= {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }  # as published; transformers assumes these values
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(**sizes, **latent, **sparse, num_key_value_heads=2)
    ).eval()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["qwen3_next", "deepseek"])
def test_native_mtp(layout: str, tmp_path: Path) -> None:
    model = make_native_target(layout)
    model.save_pretrained(tmp_path / "target")
    head = make_random(mtp.Mtp(mtp.Config(num_steps=NUM_TOKENS), Target.from_model(model)))
    stitch(
        tmp_path / "target",
        head.checkpoint_tensors(),
        tmp_path / "stitched",
        {"num_nextn_predict_layers": 1},
    )
    speculative, options = {"method": "mtp"}, {}
    if layout == "deepseek":
        # The backend for AMX has bfloat16 only. The CPU kernel of vLLM 0.32 misplaces the rotation
        # where the rotated part of a query is a slice of it, as here: without it, and with none in
        # our layer, rows agree to 1e-6.
        speculative |= {
            "attention_backend": "CPU_MLA"
        }  # a draft's layer does not follow the target's
        options = {"engine": {"attention_backend": "CPU_MLA"}, "native_rotary": True}
    served = (head, model, tmp_path / "stitched", speculative)
    (dump,) = run_engine([engine_run(served, **options)], tmp_path / "engine")
    assert_serving_sees_what_training_saw("mtp", served, dump)
