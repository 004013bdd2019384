"""Trainers of other projects as sides of the heads' cases.

They are the projects' modules and losses, with the same sizes as ours. Each uses the same dtype of
the weights, random features and AdamW as ours, and trains the same parts. If a package is not
installed, its side is left out, and a result recorded on a different machine is printed instead.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks.training.measure import Against, Run, Step, adamw, can_compile


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the cases, the same for all trainers."""

    batch: int
    length: int
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    key_heads: int
    steps: int
    """Draft tokens."""
    layers: int = 1
    """Layers of the draft."""
    anchors: int = 0
    """Number of blocks in each row of the batch, for drafts that train blocks."""

    def config(self, family: type, **options: Any) -> Any:
        return family(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=self.hidden // self.heads,
            max_position_embeddings=self.length + self.steps,
            pad_token_id=0,
            tie_word_embeddings=False,
            **options,
        )


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A different project's trainer or loss, as it ships or compiled."""

    package: str
    """Name of the package to import."""
    name: str
    """Name in the report, the same for both forms."""
    description: str
    recorded: str
    """Result recorded on a different machine, in bfloat16, at the sizes of the cases."""
    build: Callable[..., Run]
    """Function that builds the run. For a draft's step, it is called with the sizes, the dtype and
    the device, and returns a whole run.
    """
    is_compiled: bool = False
    """Whether `torch.compile` is applied, by us or by the peer."""
    needs_gpu: bool = False

    def can_run(self, device: str) -> bool:
        if self.needs_gpu and device == "cpu":
            return False
        return self.is_installed and (can_compile(device) or not self.is_compiled)

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def list_sides(peers: Mapping[str, Peer], device: str) -> dict[str, Against]:
    """List the peers that can run on a device of this machine, as sides of a case."""
    return {
        name: Against(description=peer.description, peer=peer.name, is_compiled=peer.is_compiled)
        for name, peer in peers.items()
        if peer.can_run(device)
    }


def describe_absent(peers: Mapping[str, Peer], device: str) -> str:
    """Describe in one line which peers cannot run on the device, and why; empty if all can."""
    absent = [
        f"not installed here, recorded: {peer.recorded}"
        for peer in peers.values()
        if not peer.is_installed
    ]
    absent += [
        f"no {'GPU' if peer.needs_gpu and device == 'cpu' else 'compiler'} here: {name} is left out"
        for name, peer in peers.items()
        if peer.is_installed and not peer.can_run(device)
    ]
    return "; ".join(absent)


def speculators_eagle3(
    sizes: Sizes, dtype: torch.dtype, device: str, *, is_compiled: bool = False
) -> Run:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    layer = sizes.config(LlamaConfig, attn_implementation="sdpa")
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=sizes.vocabulary,
        # Our heads read these layers of a target with 8 layers (`aux_layers`).
        eagle_aux_hidden_state_layer_ids=[2, 4, 5],
    )
    model = _initialised(Eagle3DraftModel(config), dtype, device)
    options = {"ttt_steps": sizes.steps, "ttt_step_loss_decay": 0.8}
    return _speculators(model, sizes, dtype, device, is_compiled=is_compiled, **options)


def speculators_dflash(
    sizes: Sizes, dtype: torch.dtype, device: str, *, is_compiled: bool = False
) -> Run:
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    # A block of DFlash counts the anchor's slot, which proposes nothing. A block of DSpark proposes
    # in every slot.
    config = DFlashSpeculatorConfig(**_block_options(sizes, sizes.steps + 1))
    model = _initialised(DFlashDraftModel(config), dtype, device)
    anchors = sizes.batch * sizes.anchors
    return _speculators(model, sizes, dtype, device, is_compiled=is_compiled, max_anchors=anchors)


def speculators_dspark(
    sizes: Sizes, dtype: torch.dtype, device: str, *, is_compiled: bool = False
) -> Run:
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    config = DSparkSpeculatorConfig(**_block_options(sizes, sizes.steps))
    model = _initialised(DSparkDraftModel(config), dtype, device)
    ((overlap, _),) = _losses("tv", device, is_compiled=is_compiled).values()
    options = {"max_anchors": sizes.batch * sizes.anchors, "tv_loss_fn": overlap}
    return _speculators(model, sizes, dtype, device, is_compiled=is_compiled, **options)


def _block_options(sizes: Sizes, block_size: int) -> dict[str, Any]:
    return {
        "transformer_layer_config": sizes.config(Qwen3Config, attn_implementation="sdpa"),
        "draft_vocab_size": sizes.vocabulary,
        "block_size": block_size,
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "mask_token_id": sizes.vocabulary - 1,
    }


def speculators_peagle(
    sizes: Sizes, dtype: torch.dtype, device: str, *, is_compiled: bool = False
) -> Run:
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig

    config = PEagleSpeculatorConfig(
        transformer_layer_config=sizes.config(LlamaConfig, attn_implementation="sdpa"),
        draft_vocab_size=sizes.vocabulary,
        eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        mask_token_id=sizes.vocabulary - 1,
    )
    model = _initialised(PEagleDraftModel(config), dtype, device)
    return _speculators(
        model, sizes, dtype, device, is_compiled=is_compiled, num_depths=sizes.steps
    )


def _speculators(
    model: Any, sizes: Sizes, dtype: torch.dtype, device: str, *, is_compiled: bool, **options: Any
) -> Run:
    """Return a training step of a model of speculators, with KL, on random features.

    The target's parts are frozen.
    """
    for frozen in ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"):
        model.get_submodule(frozen).requires_grad_(False)
    ids, documents = _packed(sizes, device)
    given = {
        "hidden_states": torch.randn(1, ids.numel(), 3 * sizes.hidden).to(device, dtype),
        "verifier_last_hidden_states": torch.randn(1, ids.numel(), sizes.hidden).to(device, dtype),
        "input_ids": ids,
        "document_ids": documents,
        "loss_mask": torch.ones_like(ids, dtype=torch.bool),
        "loss_config": _losses("kl_div", device, is_compiled=is_compiled),
    }
    return _training(model, lambda: model(**given, **options)[1])


def _losses(
    name: str, device: str, *, is_compiled: bool
) -> dict[str, tuple[Callable[..., Tensor], float]]:
    """Return the losses of speculators, with weights, by name."""
    from speculators.losses import resolve_loss_config

    losses = resolve_loss_config(
        name, "eager" if device == "cpu" else "fused"
    )  # fused needs Triton
    return {
        name: (torch.compile(function) if is_compiled else function, weight)
        for name, (function, weight) in losses.items()
    }


def speculators_mtp(
    sizes: Sizes, dtype: torch.dtype, device: str, *, is_compiled: bool = False
) -> Run:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    config = MTPSpeculatorConfig(
        transformer_layer_config=sizes.config(Qwen3Config, attn_implementation="sdpa"),
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=sizes.steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
    )
    model = _initialised(MTPDraftModel(config), dtype, device)
    for frozen in ("embed_tokens", "lm_head"):
        model.get_submodule(frozen).requires_grad_(False)
    ids, _ = _packed(sizes, device)
    ids = ids.view(sizes.batch, sizes.length)
    hidden = torch.randn(*ids.shape, sizes.hidden).to(device, dtype)
    forward = torch.compile(model, dynamic=False) if is_compiled else model
    return _training(
        model, lambda: forward(ids, hidden, step_weights=[0.8**k for k in range(sizes.steps)])[1]
    )


def modelopt_eagle3(sizes: Sizes, dtype: torch.dtype, device: str) -> Run:
    options = {
        "eagle_offline": True,
        "eagle_ttt_steps": sizes.steps,
        "eagle_loss_decay_factor": 0.8,
        "eagle_mix_hidden_states": False,
        "eagle_architecture_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
            "use_last_layernorm": True,
            "intermediate_size": sizes.intermediate,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.key_heads,
            "head_dim": sizes.hidden // sizes.heads,
        },
    }
    model = _modelopt(sizes, dtype, device, "eagle", options)
    # ModelOpt creates this module at the first step, with an argument that transformers 5.19 has
    # removed.
    model.eagle_module.rotary_emb = LlamaRotaryEmbedding(model.eagle_config).to(device)
    ids = torch.randint(sizes.vocabulary, (sizes.batch, sizes.length), device=device)
    given = {
        "base_model_hidden_states": torch.randn(*ids.shape, sizes.hidden).to(device, dtype),
        "aux_hidden_states": torch.randn(*ids.shape, 3 * sizes.hidden).to(device, dtype),
    }
    return _training(model, lambda: model(input_ids=ids, base_model_outputs=given).loss)


def modelopt_medusa(
    sizes: Sizes, dtype: torch.dtype, device: str, *, is_compiled: bool = False
) -> Run:
    model = _modelopt(
        sizes, dtype, device, "medusa", {"medusa_num_heads": sizes.steps, "medusa_num_layers": 1}
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("medusa_heads" in name)
    ids = torch.randint(sizes.vocabulary, (sizes.batch, sizes.length), device=device)
    model.model = _Given(torch.randn(*ids.shape, sizes.hidden).to(device, dtype))
    forward = torch.compile(model, dynamic=False) if is_compiled else model
    # Accessed by key, because the compiled form returns an output without attributes.
    return _training(model, lambda: forward(input_ids=ids, labels=ids)["loss"])


class _Given(nn.Module):
    """Replaces the target's layers by a given output."""

    def __init__(self, hidden_BTD: Tensor) -> None:
        super().__init__()
        self.last_hidden_state, self.past_key_values, self.hidden_states, self.attentions = (
            hidden_BTD,
            None,
            None,
            None,
        )

    def forward(self, **_: Any) -> _Given:
        return self


def _modelopt(
    sizes: Sizes, dtype: torch.dtype, device: str, mode: str, options: dict[str, Any]
) -> Any:
    import modelopt.torch.speculative as speculative

    model = LlamaForCausalLM(sizes.config(LlamaConfig)).to(device, dtype)
    with contextlib.redirect_stdout(io.StringIO()):
        speculative.convert(model, [(mode, options)])
    return model.to(dtype).train()


def _initialised(model: nn.Module, dtype: torch.dtype, device: str) -> Any:
    """Fill embeddings and heads, which start as NaN.

    speculators would load them from the target.
    """
    for parameter in model.parameters():
        if not torch.isfinite(parameter).all():
            nn.init.normal_(parameter, std=0.02)
    return model.to(device, dtype).train()


def _packed(sizes: Sizes, device: str) -> tuple[Tensor, Tensor]:
    """Return ids and document numbers, [1, all tokens], in the form expected by speculators."""
    ids = torch.randint(sizes.vocabulary, (1, sizes.batch * sizes.length), device=device)
    return ids, torch.arange(sizes.batch, device=device).repeat_interleave(sizes.length)[None]


def _training(model: nn.Module, loss: Run) -> Step:
    return Step(loss, (p for p in model.parameters() if p.requires_grad), adamw)


CONDITIONS = "tokens/s on 2 cores with AMX, 2026-11"
ON_EPYC = "tokens per CPU-second on one EPYC core, 2026-11"
ON_AMX = "tokens per CPU-second on one core with AMX, 2026-11"


def both_forms(
    title: str,
    build: Callable[..., Run],
    *,
    package: str,
    descriptions: tuple[str, str],
    recorded: tuple[str, str],
) -> dict[str, Peer]:
    """Return a peer as it ships and compiled, under `title` and `title, compiled`.

    The two forms are in this order. `build` also accepts `is_compiled`.
    """
    return {
        name: Peer(
            package=package,
            name=title.lower(),
            description=description,
            recorded=result,
            build=functools.partial(build, is_compiled=is_compiled),
            is_compiled=is_compiled,
        )
        for name, description, result, is_compiled in zip(
            (title, f"{title}, compiled"), descriptions, recorded, (False, True), strict=True
        )
    }


def _of_speculators(
    build: Callable[..., Run], recorded: str, recorded_compiled: str
) -> dict[str, Peer]:
    """Return a model of speculators trained with KL, as it ships and with its losses compiled."""
    return both_forms(
        "speculators",
        build,
        package="speculators",
        descriptions=("speculators' model, KL", "the same with its losses compiled"),
        recorded=(
            f"speculators 0.9: {recorded}",
            f"speculators 0.9, its losses compiled: {recorded_compiled}",
        ),
    )


PEERS: dict[str, dict[str, Peer]] = {
    "EAGLE-3": {
        **_of_speculators(speculators_eagle3, f"216 {CONDITIONS}", f"213 {ON_EPYC}"),
        "ModelOpt, compiled": Peer(
            package="modelopt",
            name="modelopt",
            description="ModelOpt's model, cross-entropy on the target's probabilities, compiled "
            "as it ships",
            recorded=f"ModelOpt 0.47, compiled: 432 {CONDITIONS}; SpecForge 0.2, compiled: 256",
            build=modelopt_eagle3,
            is_compiled=True,
        ),
    },
    "DFlash": _of_speculators(speculators_dflash, f"127 {ON_AMX}", "not measured"),
    "DSpark": _of_speculators(speculators_dspark, f"99 {ON_AMX}", "not measured"),
    "P-EAGLE": _of_speculators(speculators_peagle, "not measured", "not measured"),
    "Medusa": both_forms(
        "ModelOpt",
        modelopt_medusa,
        package="modelopt",
        descriptions=(
            "ModelOpt's model, cross-entropy on the text",
            "the same, compiled as a whole",
        ),
        recorded=(f"ModelOpt 0.47: 507 {CONDITIONS}", "ModelOpt 0.47 compiled: not measured"),
    ),
    "MTP": both_forms(
        "speculators",
        speculators_mtp,
        package="speculators",
        descriptions=(
            "speculators' model of Qwen3's layer, cross-entropy on the text",
            "the same, compiled as a whole, as it is on a GPU",
        ),
        recorded=(f"speculators 0.9: 436 {CONDITIONS}", "speculators 0.9 compiled: not measured"),
    ),
}
