"""Describe a draft's folder without its target: its kind, layout, requirements and servers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from redraft.files.folder import CONFIG, find_quantization, read_config, tensor_files
from redraft.files.foreign import match_foreign
from redraft.files.windows import is_mixed, served_views
from redraft.heads.catalog import match_tensors
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
    if (foreign := match_foreign(config, names)) is not None:
        serves = f'by vLLM, "method": "{foreign.method}"' if foreign.method else "by no vLLM"
        facts |= {"kind": foreign.name, "served": serves}
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
    findings = list(view_findings(config, family.name)) if family.layers_key else []
    facts |= {
        "kind": family.title,
        "layout": "speculators" if "speculators_model_type" in config else "vllm",
        "target": ", ".join(_needs(config, family, folder)) or "not named",
    }
    if family.layers_key and not findings:
        views = served_views(config)
        facts["layers"] = "; ".join(f"{i}: {view}" for i, view in enumerate(views))
    facts["served"] = _served(config, family, has_windows=not findings)
    if method := find_quantization(config):
        findings.append(
            Finding(
                f"its weights are quantized ({method}): redraft cannot train or forecast it",
                "give redraft the weights from before quantization; vLLM serves these",
            )
        )
    return facts, findings


def describe_lookup(source: str, family: Family) -> dict[str, str]:
    """Describe a lookup, which is a folder of counted answers or a name such as `live`."""
    served = f"by vLLM, with `redraft serve TARGET --draft {source}`"
    return {"draft": source, "kind": family.title, "served": served}


def _answers(folder: Path) -> Iterator[Finding]:
    from redraft.heads.families.retrieval import require_answers  # imports numpy

    try:
        require_answers(folder)
    except ValueError as error:
        problem, _, cure = str(error).partition(": ")
        yield Finding(problem, cure)


def _needs(config: Mapping[str, Any], family: Family, folder: Path) -> Iterator[str]:
    """Yield the draft's requirements for its target: name, sizes, vocabulary and layers."""
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    if name := verifier.get("name_or_path") or read_provenance(folder).target:
        yield str(name)
    layer = config.get("transformer_layer_config") or config
    if size := layer.get("hidden_size"):
        yield f"hidden size {size}"
    if size := layer.get("vocab_size"):
        yield f"{size} tokens"
    if family.layers_key:
        try:
            yield f"its layers {family.read_layers(config)} read"
        except (KeyError, TypeError):
            yield "the layers that it reads are not listed"


def _served(config: Mapping[str, Any], family: Family, *, has_windows: bool) -> str:
    decoders = family.decoders
    mixed = has_windows and family.layers_key and is_mixed(served_views(config))
    if mixed:
        decoders = tuple(name for name in decoders if name == "v2")
    runners = " and ".join(name.upper() for name in decoders) or "no runner"
    versions = f"up to {family.last_vllm}" if family.last_vllm else "0.32 and later"
    flag = ', "parallel_drafting": true' if family.is_parallel else ""
    most = family.max_tokens(config)
    limit = f", at most {most} tokens per step" if most else ""
    return f'by vLLM {versions}, {runners}, "method": "{family.method}"{flag}{limit}'
