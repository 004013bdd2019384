"""Describe a draft's folder without its target: its kind, layout, requirements and servers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from redraft.files.folder import CONFIG, read_config, read_quantization, tensor_files
from redraft.files.foreign import Foreign, match_foreign, names_for_match
from redraft.files.windows import is_mixed, served_views
from redraft.heads.catalog import find_method, match_tensors
from redraft.heads.doctor.pair import Finding
from redraft.heads.doctor.windows import view_findings
from redraft.heads.family import Family
from redraft.heads.provenance import read_provenance


def describe_draft(folder: Path) -> tuple[dict[str, str], list[Finding]]:
    """Describe a draft by its config.json and its tensor names: (facts to print, problems).

    Raises:
        FileNotFoundError: the folder has no weights.
        ValueError: config.json cannot be read.
    """
    config = read_config(folder) if (folder / CONFIG).is_file() else {}
    names = tensor_files(folder)
    facts = {"draft": str(folder)}
    layout = {"layout": "speculators" if "speculators_model_type" in config else "vllm"}
    if (foreign := match_foreign(config, names_for_match(folder, names))) is not None:
        facts |= {
            "kind": foreign.name,
            **layout,
            **dict(_describe_foreign(config, foreign, folder)),
        }
        return facts, [
            Finding(
                f"redraft has no module for {foreign.name}",
                "serve it as it is; redraft cannot train, forecast or check it",
            )
        ]
    family = match_tensors(names)
    if family is None:
        kind = "no draft of a known family"
        return facts | {"kind": kind}, [
            Finding(f"{folder} holds {kind}", "give the folder of a draft with weights")
        ]
    if family.is_lookup:
        target = read_provenance(folder).target or "not named"
        return describe_lookup(str(folder), family) | {"target": target}, list(_answers(folder))
    windows = list(view_findings(config, family.name)) if family.layers_key else []
    findings = [*other_architecture(config, family), *windows]
    facts |= {
        "kind": family.title,
        **layout,
        "target": ", ".join(_needs(config, family, folder)) or "not named",
    }
    if family.layers_key and not windows:
        views = served_views(config)
        facts["layers"] = "; ".join(f"{i}: {view}" for i, view in enumerate(views))
    facts["served"] = _served(config, family, has_windows=not windows)
    if method := read_quantization(folder) if config else None:
        findings.append(
            Finding(
                f"its weights are quantized ({method}): redraft cannot train or forecast it",
                "give redraft the weights from before quantization; vLLM serves these",
            )
        )
    return facts, findings


def other_architecture(config: Mapping[str, Any], family: Family) -> Iterator[Finding]:
    """Report the name of a DSpark head on a head without a Markov head (markov_rank 0).

    It is a DFlash head, but vLLM chooses its class by this name.
    """
    named = [name for name in config.get("architectures") or () if "DSpark" in name]
    is_dspark = config.get("speculators_model_type") == "dspark"
    if family.name != "dflash" or not (named or is_dspark):
        return
    cure = 'write "dflash" into speculators_model_type and speculators_config.algorithm'
    if not is_dspark:
        cure = (
            'write "architectures": ["DFlashDraftModel"], and move mask_token_id and '
            "target_layer_ids into dflash_config"
        )
    yield Finding(
        "config.json describes a DSpark head, but there is no Markov head: vLLM cannot load it",
        cure,
    )


def describe_lookup(source: str, family: Family) -> dict[str, str]:
    """Describe a lookup, which is a folder of counted answers or a name such as `live`."""
    served = f"by vLLM, with `redraft serve TARGET --draft {source}`"
    return {"draft": source, "kind": family.title, "served": served}


def _answers(folder: Path) -> Iterator[Finding]:
    from redraft.heads.families.retrieval import require_answers  # imports numpy

    try:
        require_answers(folder)
    except ValueError as error:
        yield Finding.of(error)


def _needs(config: Mapping[str, Any], family: Family, folder: Path) -> Iterator[str]:
    """Yield the draft's requirements for its target: name, sizes, vocabulary and layers."""
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    if name := verifier.get("name_or_path") or read_provenance(folder).target:
        yield str(name)
    layer = config.get("transformer_layer_config") or config
    if size := config.get("target_hidden_size") or layer.get("hidden_size"):
        yield f"hidden size {size}"
    if size := layer.get("vocab_size"):
        yield f"{size} tokens"
    if family.layers_key:
        layers = family.read_layers(config)
        yield f"its layers {layers} read" if layers else "the layers that it reads are not listed"


def _describe_foreign(
    config: Mapping[str, Any], kind: Foreign, folder: Path
) -> Iterator[tuple[str, str]]:
    """Yield what is known of a draft for which redraft has no module: its target, its servers."""
    family = find_method(kind.method) if kind.method else None
    if family is None:
        yield "served", "by no vLLM"
        return
    family = replace(family, decoders=kind.decoders or family.decoders)
    yield "target", ", ".join(_needs(config, family, folder)) or "not named"
    yield "served", _served(config, family, has_windows=False, first_vllm=kind.first_vllm)


def _served(
    config: Mapping[str, Any], family: Family, *, has_windows: bool, first_vllm: str = "0.32"
) -> str:
    decoders = family.decoders
    mixed = has_windows and family.layers_key and is_mixed(served_views(config))
    if mixed:
        decoders = tuple(name for name in decoders if name == "v2")
    runners = " and ".join(name.upper() for name in decoders) or "no runner"
    versions = f"up to {family.last_vllm}" if family.last_vllm else f"{first_vllm} and later"
    flag = ', "parallel_drafting": true' if family.is_parallel else ""
    most = family.max_tokens(config)
    limit = f", at most {most} tokens per step" if most else ""
    return f'by vLLM {versions}, {runners}, "method": "{family.method}"{flag}{limit}'
