"""DFlash and DSpark in the layout of the package `speculators`.

Its models open here and ours there, with equal logits.

B = batch, T = tokens, S = slots of a block, D = hidden, W = draft vocabulary.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from make_heads import (
    HIDDEN,
    VOCAB,
    assert_round_trip,
    make_batch,
    make_ids,
    make_random,
    make_signal,
    make_target,
    spread,
)
from safetensors.torch import load_file
from torch import Tensor

from redraft.heads.catalog import detect_family, detect_family_by_tensors
from redraft.heads.draft import Batch, TargetSignal
from redraft.heads.families import dflash, dspark
from redraft.heads.families.dflash_layouts import translate
from redraft.heads.target import Target

MASK, RANK, SLOTS = VOCAB - 1, 6, 4
AUX = (1, 2, 4)
DRAFT_IDS = torch.arange(3, VOCAB, 4)

# (family, options of the head under the keys of config.json, reduced vocabulary)
VARIANTS: dict[str, tuple[str, dict[str, Any], Tensor | None]] = {
    "dflash": ("dflash", {}, None),
    "dflash, reduced vocabulary": ("dflash", {}, DRAFT_IDS),
    "dspark": ("dspark", {"markov_rank": RANK}, None),
    "dspark, reduced vocabulary": ("dspark", {"markov_rank": RANK}, DRAFT_IDS),
    "dspark, from the first mask": (
        "dspark",
        {"markov_rank": RANK, "sample_from_anchor": False},
        DRAFT_IDS,
    ),
    "dspark, without confidence": (
        "dspark",
        {"markov_rank": RANK, "enable_confidence_head": False},
        None,
    ),
}


def make_head(variant: str, model: Any) -> Any:
    name, options, draft_ids = VARIANTS[variant]
    sizes = {"aux_layer_ids": AUX, "num_layers": 2, "block_size": SLOTS, "mask_token_id": MASK}
    ours = {"enable_confidence_head": "confidence_head"}
    chosen = {ours.get(key, key): value for key, value in options.items()}
    module, kind = (dflash, dflash.DFlash) if name == "dflash" else (dspark, dspark.DSpark)
    torch.manual_seed(0)
    return make_random(
        kind(module.Config(**{**sizes, **chosen}), Target.from_model(model), draft_ids)
    )


def make_theirs(variant: str, target: Path) -> Any:
    """A random model of the package, for the target in a folder."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    name, options, draft_ids = VARIANTS[variant]
    module = importlib.import_module(f"speculators.models.{name}")
    config_class, model_class = (
        getattr(module, f"{'DFlash' if name == 'dflash' else 'DSpark'}{end}")
        for end in ("SpeculatorConfig", "DraftModel")
    )
    layer = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=40,  # unlike the target's in all that a head may choose
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=12,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        attn_implementation="eager",
    )
    method = SpeculatorsConfig(
        algorithm=name,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=SLOTS - 1)],
        default_proposal_method="greedy",
        verifier=VerifierConfig.from_pretrained(str(target)),
    )
    theirs = model_class(
        config_class(
            transformer_layer_config=layer,
            draft_vocab_size=VOCAB if draft_ids is None else len(draft_ids),
            block_size=SLOTS,
            aux_hidden_state_layer_ids=list(AUX),
            mask_token_id=MASK,
            speculators_config=method,
            **options,
        )
    )
    if draft_ids is not None:
        kept = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, draft_ids, True)
        theirs.load_vocab_mappings(kept, draft_ids - torch.arange(len(draft_ids)))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    theirs.load_verifier_weights()
    return theirs.eval()


@torch.no_grad()
def their_logits(
    theirs: Any, batch: Batch, signal: TargetSignal
) -> tuple[list[int], Tensor, Tensor | None]:
    """The package's training pass.

    (anchors, logits [anchors, S, W], logits of the confidence [anchors, S]).
    """
    from speculators.models.attention import create_float_mask

    # its default is flex attention, which wants a compiler
    theirs._attn_impl, theirs._create_mask_fn = "eager", create_float_mask
    for layer in theirs.layers:
        layer.self_attn.config._attn_implementation = "eager"
    core = importlib.import_module(type(theirs).__module__)
    last_step, given = inspect.signature(core.compute_metrics), {}

    def keep(*args: Any, **options: Any) -> tuple[Tensor, dict[str, Any]]:
        given.update(last_step.bind(*args, **options).arguments)
        return torch.zeros(()), {}

    num_anchors = batch.input_ids_BT.shape[1] - SLOTS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "compute_metrics", keep)
        assert signal.aux_BTLD is not None
        theirs(
            signal.aux_BTLD.flatten(2),
            batch.input_ids_BT,
            torch.ones_like(batch.loss_mask_BT),
            torch.zeros(*batch.input_ids_BT.shape, HIDDEN),
            batch.document_BT,
            batch.position_ids_BT,
            max_anchors=num_anchors,
        )
    confidence = given.get("confidence_logits")
    confidence_AS = None if confidence is None else confidence.view(num_anchors, SLOTS)
    # all rows are labels, so every one is an anchor but the last, after which no block fits
    return list(range(num_anchors)), given["logits"].view(num_anchors, SLOTS, -1), confidence_AS


def assert_same_logits(head: Any, theirs: Any, model: Any) -> None:
    batch = make_batch([[make_ids(13, seed=5), make_ids(9, seed=6), make_ids(8, seed=7)]])
    signal = make_signal(model, batch, head.aux_layer_ids)
    anchors, logits_ASW, confidence_AS = their_logits(theirs, batch, signal)
    with torch.no_grad():
        steps = [*map(spread, head.draft_steps(batch, signal))]
    num_compared = 0
    for k, step in enumerate(steps):
        ours_TW = step.logits(torch.arange(batch.input_ids_BT.shape[1]))
        for anchor in anchors:
            row, slot = anchor - 1, head.config.first_slot + k
            if anchor == 0 or not step.mask_BT[0, row]:
                continue
            torch.testing.assert_close(ours_TW[row], logits_ASW[anchor, slot], atol=1e-5, rtol=1e-5)
            if step.confidence_BT is not None:
                assert confidence_AS is not None
                mine = step.confidence_BT[0, row]
                torch.testing.assert_close(mine, confidence_AS[anchor, slot], atol=1e-5, rtol=1e-5)
            num_compared += 1
    # Of the documents' 13, 9 and 8 tokens, 11, 7 and 3 begin a block whose first token is a label;
    # the batch's last four begin none.
    assert num_compared == sum(21 - 2 * k for k in range(len(steps)))
    assert (confidence_AS is not None) == (getattr(head, "confidence_head", None) is not None)


@pytest.fixture
def target(tmp_path: Path) -> tuple[Any, Path]:
    pytest.importorskip("speculators", reason="pip install speculators==0.9.0 to compare with it")
    model = make_target()
    model.save_pretrained(tmp_path / "target")
    return model, tmp_path / "target"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_of_the_package_opens_and_computes_the_same(
    variant: str, target: tuple[Any, Path], tmp_path: Path
) -> None:
    model, folder = target
    theirs = make_theirs(variant, folder)
    theirs.save_pretrained(tmp_path / "draft")
    family = detect_family(tmp_path / "draft")
    assert family.name == VARIANTS[variant][0]
    names = load_file(tmp_path / "draft" / "model.safetensors").keys()
    assert detect_family_by_tensors(names, tmp_path / "draft") is family
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert family.read_layers(config) == list(AUX)

    head = family.load(tmp_path / "draft", lambda: Target.from_folder(folder))
    assert (head.aux_layer_ids, head.max_tokens) == (AUX, family.max_tokens(config))
    assert_same_logits(head, theirs, model)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_package_loads_an_export_and_computes_the_same(
    variant: str, target: tuple[Any, Path], tmp_path: Path
) -> None:
    import speculators

    model, folder = target
    head = make_head(variant, model)
    head.export(tmp_path / "draft", layout="speculators", target_name=str(folder))
    theirs = speculators.SpeculatorModel.from_pretrained(str(tmp_path / "draft")).eval()
    state = theirs.state_dict()
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in tensors.items())
    # all else in the package's model is the target's
    assert not any(tensor.isnan().any() for tensor in state.values())
    extra = {
        "embed_tokens.weight",
        "lm_head.weight",
        "verifier_lm_head.weight",
        "verifier_norm.weight",
    }
    assert state.keys() - tensors.keys() <= extra
    assert_same_logits(head, theirs, model)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_package_writes_what_we_write(
    variant: str, target: tuple[Any, Path], tmp_path: Path
) -> None:
    """Loaded there and saved again.

    The same tensors, and the same keys of config.json but for the versions.
    """
    import speculators

    model, folder = target
    head = make_head(variant, model)
    head.export(tmp_path / "ours", layout="speculators", target_name=str(folder))
    speculators.SpeculatorModel.from_pretrained(str(tmp_path / "ours")).save_pretrained(
        tmp_path / "theirs"
    )
    mine, its = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert mine.keys() == its.keys()
    assert all(torch.equal(tensor, its[name]) for name, tensor in mine.items())
    ours, theirs = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs")
    )
    layer = ours.pop("transformer_layer_config")
    del ours["torch_dtype"]
    assert {key: theirs[key] for key in ours} == ours
    saved = theirs["transformer_layer_config"]
    assert {key: saved[key] for key in layer if key in saved} == {
        key: layer[key] for key in layer if key in saved
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_export_loads_equal(variant: str, tmp_path: Path) -> None:
    model = make_target()
    head = make_head(variant, model)
    loaded = assert_round_trip(
        head, model, tmp_path / "draft", layout="speculators", target_name="target"
    )
    # the learner writes a later version like the earlier one
    loaded.export(tmp_path / "later", like=tmp_path / "draft")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "later" / name).read_bytes() == (tmp_path / "draft" / name).read_bytes()


def test_the_number_of_draft_tokens_and_the_target_are_written(tmp_path: Path) -> None:
    head = make_head("dspark", make_target(architectures=["LlamaForCausalLM"]))
    head.export(tmp_path, layout="speculators", target_name="org/target")
    section = json.loads((tmp_path / "config.json").read_text())["speculators_config"]
    assert section["verifier"] == {
        "name_or_path": "org/target",
        "architectures": ["LlamaForCausalLM"],
    }
    assert section["proposal_methods"][0]["speculative_tokens"] == SLOTS
    head.export(tmp_path, layout="speculators", num_speculative_tokens=2)
    section = json.loads((tmp_path / "config.json").read_text())["speculators_config"]
    assert section["proposal_methods"][0]["speculative_tokens"] == 2


@pytest.mark.vllm
@pytest.mark.parametrize("variant", VARIANTS)
def test_vllm_reads_the_same_from_either_layout(variant: str, tmp_path: Path) -> None:
    """Without an engine: the configs, and the functions by which vLLM's drafters read them."""
    from types import SimpleNamespace

    from vllm.model_executor.models.qwen3_dflash import (
        _dflash_layer_causal,
        dflash_has_any_non_causal,
    )
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.configs.eagle import EAGLEConfig
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
    from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

    head = make_head(variant, make_target())
    read = []
    for layout in ("vllm", "speculators"):
        head.export(tmp_path / layout, layout=layout, target_name="target")
        config = get_config(tmp_path / layout, trust_remote_code=False)
        if layout == "vllm" and head.family == "dflash":  # as vLLM's `SpeculativeConfig` does
            config = EAGLEConfig(config, method="dflash", model_type="eagle")
        keys = [
            "draft_vocab_size",
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
        ]
        keys += [
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "hidden_act",
            "vocab_size",
            "rope_parameters",
        ]
        keys += ["max_position_embeddings", "attention_bias", "layer_types", "architectures"]
        if head.family == "dspark":
            keys += [
                "sample_from_anchor",
                "markov_rank",
                "markov_head_type",
                "block_size",
                "mask_token_id",
            ]
            keys += ["enable_confidence_head", "confidence_head_with_markov", "target_layer_ids"]
        spec = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
        read.append(
            {
                **{key: getattr(config, key) for key in keys},
                "aux layers": get_eagle3_aux_layers_from_config(spec),
                "mask": get_parallel_drafting_token_id(config),
                "causal": [
                    _dflash_layer_causal(config, i) for i in range(config.num_hidden_layers)
                ],
                "both ways": dflash_has_any_non_causal(config),
                "own anchor": (getattr(config, "dflash_config", None) or {}).get(
                    "sample_from_anchor", False
                ),
            }
        )
    plain, nested = read
    assert nested == plain
    assert (plain["aux layers"], plain["mask"], plain["causal"]) == (AUX, MASK, [False, False])


def edit_config(folder: Path, *removed: str, **changed: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changed}
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in removed}))


@pytest.mark.parametrize(
    ("variant", "removed", "changed", "message"),
    [
        ("dflash", "", {"sample_from_anchor": True}, r"\(sample_from_anchor\)"),
        ("dspark", "sample_from_anchor", {}, "sample_from_anchor"),
        ("dflash", "mask_token_id", {}, "mask_token_id"),
        ("dspark", "", {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
        ("dspark", "", {"markov_head_type": "rnn"}, r"Markov.*\brnn\b"),
        ("dspark", "", {"confidence_head_with_markov": False}, r"confidence.*Markov"),
    ],
)
def test_another_kind_of_head_is_refused(
    variant: str, removed: str, changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = make_target()
    head = make_head(variant, model)
    head.export(tmp_path, layout="speculators")
    edit_config(tmp_path, removed, **changed)
    with pytest.raises(ValueError, match=message):
        type(head).load(tmp_path, Target.from_model(model))


@pytest.mark.parametrize("variant", ["dflash", "dspark"])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act.*\bgelu\b.*\bsilu\b"),
    ],
)
def test_other_layers_are_refused(
    variant: str, changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = make_target()
    head = make_head(variant, model)
    head.export(tmp_path, layout="speculators")
    layer = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    edit_config(tmp_path, transformer_layer_config={**layer, **changed})
    with pytest.raises(ValueError, match=message):
        type(head).load(tmp_path, Target.from_model(model))


def test_the_defaults_of_the_package_stand_for_absent_keys(
    target: tuple[Any, Path], tmp_path: Path
) -> None:
    """A section without a head size means Qwen3's 128 to the package.

    Of several rotations it takes the window's.
    """
    from speculators.models.dflash import DFlashSpeculatorConfig
    from speculators.models.utils import flatten_rope_parameters

    config = {
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": list(AUX),
        "mask_token_id": MASK,
        "block_size": SLOTS,
        "transformer_layer_config": {
            "num_hidden_layers": 1,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    }
    theirs = DFlashSpeculatorConfig(**config).transformer_layer_config
    found = translate(config, tmp_path)
    assert found["rope_parameters"] == flatten_rope_parameters(theirs).rope_parameters
    for key in (
        "head_dim",
        "num_key_value_heads",
        "intermediate_size",
        "rms_norm_eps",
        "hidden_act",
        "layer_types",
    ):
        assert found[key] == getattr(theirs, key), key
