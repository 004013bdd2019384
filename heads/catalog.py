"""The table of draft families, one row each, with everything that other modules use.

To add a family, write a module with a `Config` and an implementation of `heads.draft.Draft`, and
add a row here. Training, export, forecast, doctor, serving and the learner need nothing else.

This module uses only the standard library. `heads.family` defines the fields of a row.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from redraft.files.folder import CONFIG, read_config, read_quantization, tensor_files
from redraft.files.foreign import find_foreign, names_for_match
from redraft.files.target_folder import TargetFolder
from redraft.heads.family import Family, FixedTokens, Training
from redraft.heads.provenance import read_provenance

IN_PARALLEL = Training(
    starts=("last_layers", "random"),
    layouts=("vllm", "speculators"),
    draft_vocab_size=32000,
    optimizer="muon",
    lr=2e-3,
    loop={"steps": 20000, "sequence_length": 2048},
)

# The order matters only for `tensors`: rows with more specific tensors come first.
FAMILIES: tuple[Family, ...] = (
    Family(
        name="mtp",
        title="MTP",
        draft="redraft.heads.families.mtp:Mtp",
        method="mtp",
        decoders=("v1", "v2"),
        # These are the prefixes of MiMo's and Qwen's layers, and a tensor of DeepSeek's layer.
        tensors=r"(model\.mtp_layers\.|mtp\.).*|.*\.eh_proj\.weight",
        reads="last",
        keeps_cache=True,
        can_sample=True,
        learns_online=True,
        is_in_target=True,
        parity="recurrent",
        checks="redraft.heads.doctor.mtp:CHECKS",
        options="redraft.heads.options:Mtp",
        training=Training(
            starts=("native", "last_layer", "random"),
            target="Qwen/Qwen3-Next-80B-A3B-Instruct",
            divergence="forward_kl",
            lr=2e-5,
            loop={"steps": 5000, "sequence_length": 2048},
        ),
    ),
    Family(
        name="peagle",
        title="P-EAGLE",
        draft="redraft.heads.families.peagle:PEagle",
        method="eagle3",
        # vLLM's V2 runner does not support parallel drafting for EAGLE.
        decoders=("v1",),
        # This row precedes EAGLE-3's, because a P-EAGLE head also has all tensors of an EAGLE-3
        # head.
        tensors="mask_hidden",
        architectures=(
            "PeagleLlamaForCausalLM",
            "PeagleQwen3ForCausalLM",
            "PEagleSpeculator",
            "PEagleDraftModel",
        ),
        reads="layers",
        layers_key="eagle_aux_hidden_state_layer_ids",
        is_parallel=True,
        varies_tokens=False,
        learns_online=True,
        trains_lm_head=True,
        # Only redraft's exports record this value.
        fixed_tokens=FixedTokens(("redraft.num_steps",)),
        parity="prefix_and_masks",
        checks="redraft.heads.doctor.peagle:CHECKS",
        options="redraft.heads.options:PEagle",
        training=IN_PARALLEL,
    ),
    Family(
        name="eagle3",
        title="EAGLE-3",
        draft="redraft.heads.families.eagle3:Eagle3",
        method="eagle3",
        decoders=("v1", "v2"),
        tensors=r"(midlayer|layers\.0)\.hidden_norm\.weight",
        architectures=(
            "LlamaForCausalLMEagle3",
            "Eagle3LlamaForCausalLM",
            "Eagle3Qwen3ForCausalLM",
            "Eagle3Speculator",
            "Eagle3DraftModel",
        ),
        reads="layers",
        layers_key="eagle_aux_hidden_state_layer_ids",
        chooses_locally=True,
        keeps_cache=True,
        can_sample=True,
        learns_online=True,
        trains_lm_head=True,
        parity="recurrent",
        checks="redraft.heads.doctor.eagle3:CHECKS",
        options="redraft.heads.options:Eagle3",
        training=Training(
            starts=("least_squares", "last_layer", "random"),
            options={"fc_norm": True},
            layouts=("vllm", "speculators"),
            draft_vocab_size=32000,
            divergence="forward_kl",
            optimizer="muon",
            lr=5e-4,
            loop={"steps": 20000, "sequence_length": 2048},
            # Candidates have only 16 steps, because the first one is already far better than a new
            # head.
            new_online={
                "optimizer": "muon",
                "lr": 2e-3,
                "warmup_steps": 5,
                "replay_per_step": 4,
                "records_per_candidate": 64,
                "patience": 6,
            },
        ),
    ),
    Family(
        name="dspark",
        title="DSpark",
        draft="redraft.heads.families.dspark:DSpark",
        method="dspark",
        # vLLM does not support it on the V1 runner.
        decoders=("v2",),
        tensors=r"markov_head\..*",
        # vLLM treats the second name like the first if the layers are Qwen3's.
        architectures=("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator"),
        reads="layers",
        layers_key="dflash_config.target_layer_ids",
        layers_offset=1,
        speculators_layers_key="aux_hidden_state_layer_ids",
        fixed_tokens=FixedTokens(("block_size",), unused=1, used_if="sample_from_anchor"),
        varies_tokens=False,
        can_sample=True,
        learns_online=True,
        parity="block",
        checks="redraft.heads.doctor.dspark:CHECKS",
        options="redraft.heads.options:DSpark",
        training=IN_PARALLEL,
    ),
    Family(
        name="dflash",
        title="DFlash",
        draft="redraft.heads.families.dflash:DFlash",
        method="dflash",
        decoders=("v1", "v2"),
        # The whole name must match, because EAGLE-3 has `midlayer.hidden_norm.weight`.
        tensors=r"hidden_norm\.weight",
        architectures=("DFlashDraftModel", "DFlashSpeculator"),
        reads="layers",
        layers_key="dflash_config.target_layer_ids",
        layers_offset=1,
        speculators_layers_key="aux_hidden_state_layer_ids",
        fixed_tokens=FixedTokens(("block_size", "dflash_config.block_size"), unused=1),
        varies_tokens=False,
        can_sample=True,
        learns_online=True,
        parity="block",
        checks="redraft.heads.doctor.dflash:CHECKS",
        options="redraft.heads.options:DFlash",
        training=IN_PARALLEL,
    ),
    Family(
        name="medusa",
        title="Medusa",
        draft="redraft.heads.families.medusa:Medusa",
        method="medusa",
        decoders=("v1",),
        last_vllm="0.32",
        tensors=r"(medusa_heads\.)?(blocks\.0\..*|0\.0\.linear\..*)",
        architectures=("MedusaModel",),
        attention="none",
        reads="last",
        fixed_tokens=FixedTokens(("num_heads", "medusa_num_heads")),
        varies_tokens=False,
        keeps_cache=True,
        parity="parallel",
        checks="redraft.heads.doctor.medusa:CHECKS",
        options="redraft.heads.options:Medusa",
        training=Training(
            options={"num_heads": 4},
            divergence="forward_kl",
            lr=5e-4,
            max_grad_norm=1.0,
            loop={"steps": 10000, "sequence_length": 2048},
        ),
    ),
    Family(
        name="eagle1",
        title="EAGLE-1",
        draft="redraft.heads.families.eagle1:Eagle1",
        method="eagle",
        decoders=("v1", "v2"),
        tensors=r"fc\.weight",
        # Exports have LlamaForCausalLM, which could be any Llama.
        architectures=("EagleLlamaForCausalLM",),
        reads="last",
        keeps_cache=True,
        can_sample=True,
        learns_online=True,
        parity="recurrent",
        checks="redraft.heads.doctor.shared:EAGLE1",
        options="redraft.heads.options:Eagle1",
        training=Training(
            divergence="forward_kl",
            lr=5e-5,
            loop={"steps": 20000, "sequence_length": 2048},
        ),
    ),
    Family(
        name="standalone",
        title="standalone draft",
        draft="redraft.heads.families.standalone:StandaloneDraft",
        method="draft_model",
        decoders=("v1", "v2"),
        # Every decoder has such a tensor, so the rows of all heads must precede this one.
        tensors=r".*\.layers\.0\..*",
        attention="model",
        can_sample=True,
        learns_online=True,
        parity="autoregressive",
        checks="redraft.heads.doctor.standalone:CHECKS",
        options="redraft.heads.options:Standalone",
        training=Training(
            options={"checkpoint": "meta-llama/Llama-3.2-3B-Instruct"},
            target="meta-llama/Llama-3.1-70B-Instruct",
            lr=1e-4,
            max_grad_norm=1.0,
        ),
    ),
    Family(name="ngram", title="n-gram lookup", method="ngram", decoders=("v1", "v2")),
    # vLLM runs n-gram lookups, which our plugin replaces with live counts.
    Family(
        name="retrieval",
        title="counted answers",
        method="ngram",
        decoders=("v1", "v2"),
        tensors=r"ngrams\.runs",
    ),
    Family(name="live", title="live counts", method="ngram", decoders=("v1", "v2")),
    Family(
        name="suffix",
        title="suffix decoding",
        method="suffix",
        decoders=("v1",),
        varies_tokens=False,
    ),
)


def find_family(name: str) -> Family:
    """Return the row for a family with weights. `name` may have dashes instead of underscores.

    Raises:
        ValueError: there is no such family.
    """
    known = {family.name: family for family in FAMILIES if not family.is_lookup}
    if (row := known.get(name.replace("-", "_"))) is None:
        raise ValueError(
            f"there is no draft family {name}: choose one of {', '.join(sorted(known))}"
        )
    return row


def find_method(method: str | None, *, parallel_drafting: bool = False) -> Family | None:
    """Return the row for a vLLM method, preferably with this `parallel_drafting` flag.

    None if there is none.
    """
    rows = [family for family in FAMILIES if family.method == method]
    # Only the flag distinguishes P-EAGLE from EAGLE-3. vLLM itself sets it for DFlash and DSpark,
    # whose rows do not use it.
    rows.sort(key=lambda family: family.is_parallel != parallel_drafting)
    return next(iter(rows), None)


def find_speculative(config: Mapping[str, Any]) -> Family | None:
    """Return the row for a `--speculative-config`, or None if there is none."""
    return find_method(
        config.get("method"), parallel_drafting=bool(config.get("parallel_drafting"))
    )


def list_lookups() -> list[str]:
    """Return the names of the families that look tokens up in the text and need no folder."""
    return [family.name for family in FAMILIES if family.is_lookup and not family.tensors]


def list_methods() -> list[str]:
    """Return vLLM's methods for drafts with weights, in alphabetical order."""
    return sorted({family.method for family in FAMILIES if not family.is_lookup})


def list_trained() -> list[str]:
    """Return the names of the trainable families as on the command line, alphabetically."""
    return sorted(family.name.replace("_", "-") for family in FAMILIES if family.training)


def list_learning() -> list[str]:
    """Return the names of the families that support online learning, in alphabetical order."""
    return sorted(family.name for family in FAMILIES if family.learns_online)


if TYPE_CHECKING:
    Method = str
    FamilyName = str
else:
    # Types of choices for command lines. mypy cannot read a type that is made from a table.
    Method = Literal[tuple(list_methods())]
    FamilyName = Literal[tuple(list_trained())]


def detect_family(folder: Path) -> Family:
    """Detect a draft's family from the tensors in its folder.

    The `config.json` may name a different family.

    Raises:
        FileNotFoundError: the folder has no weights.
        ValueError: no row matches, or redraft has no module for this kind of draft.
    """
    return detect_family_by_tensors(tensor_files(folder), folder)


def detect_family_by_tensors(names: Collection[str], folder: Path) -> Family:
    """Detect a draft's family as `detect_family` does, from tensor names that are already known.

    Raises:
        ValueError: as for `detect_family`.
    """
    config = read_config(folder) if (folder / CONFIG).is_file() else {}
    if (foreign := find_foreign(config, names_for_match(folder, names))) is not None:
        raise ValueError(f"{folder} holds {foreign}")
    if (family := match_tensors(names)) is not None:
        method = read_quantization(folder) if config else None
        if method and family.is_head and not family.is_in_target:
            raise ValueError(
                f"{folder} contains a quantized head ({method}), which vLLM serves; give redraft the "
                "unquantized weights"
            )
        return family
    # The state dict may have been saved from a wrapper, which adds a prefix to all names.
    for name in sorted(names):
        parts = name.split(".")
        for depth in range(1, len(parts)):
            prefix, rest = ".".join(parts[:depth]), ".".join(parts[depth:])
            inside = [other.removeprefix(f"{prefix}.") for other in names]
            if match_tensors([rest]) and (family := match_tensors(inside)) is not None:
                raise ValueError(
                    f"{folder} has {family.title} tensors whose names begin with {prefix}., such "
                    f"as {name}: save the tensors without this prefix"
                )
    example = min(names, default="none")
    raise ValueError(f"{folder} contains no draft of a known family: its tensors include {example}")


def match_tensors(names: Collection[str]) -> Family | None:
    """Return the first row whose pattern matches one of these tensor names, or None."""
    for family in FAMILIES:
        if family.tensors and any(re.fullmatch(family.tensors, name) for name in names):
            return family
    return None


def require_head(folder: Path, name: str, target: TargetFolder) -> None:
    """Reject a folder unless it contains a head of family `name` for this target's lineage.

    Raises:
        FileNotFoundError: the folder has no weights.
        ValueError: the head belongs to a different family, or was trained for a different target
            (`require_trained_for`).
    """
    if (found := detect_family(folder).name) != name:
        raise ValueError(
            f"{folder} contains a {found} head, not a {name} head: use `redraft train {found}`"
        )
    require_trained_for(folder, target)


def require_trained_for(folder: Path, target: TargetFolder) -> None:
    """Reject a draft whose provenance names a target of a different lineage.

    `files.folder.lineage` defines the lineage. A draft from another trainer does not name a target,
    and passes. A different version of the target, such as a fine-tune, passes too.

    Raises:
        ValueError: the draft was trained for a target of a different lineage.
    """
    made = read_provenance(folder)
    if made.target_fingerprint not in ("", target.fingerprint) and not made.names_lineage(
        target.lineage
    ):
        raise ValueError(
            f"{folder} was trained for a different target than {target.name}: "
            f"{made.target or 'unnamed'}"
        )
