"""Write the table of an engine's loaders from its sources: what they read of a draft's folder.

    python tests/helpers/read_engine.py sglang 0.5.23 SITE-PACKAGES/sglang/srt > tests/assets/engines/sglang.json
    python tests/helpers/read_engine.py tensorrt_llm 1.4 SOURCES/tensorrt_llm > tests/assets/engines/tensorrt_llm.json

The table has names, keys and numbers, and no code. Nothing of the engine is imported. A source that
has moved fails with the name that is missing.

modules   for each family, the parts with weights: {N} stands for a layer's number
keys      the keys of config.json, and by section those of a section
stacked   the names that a loader joins into one
renamed   the names that a loader replaces
layers    [ids told, streams fed], and the streams of a target of N layers if none are told
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import json
import operator
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

KINDS = ("Linear", "Norm", "Embedding", "LMHead")
"""Ends of the names of classes with a weight, in any case."""

SECTIONS = {
    "eagle_config": "eagle_config",
    "dflash_cfg": "dflash_config",
    "dflash_config": "dflash_config",
    "dspark_cfg": "dspark_config",
}
"""Names of a section of config.json in the sources."""

CONFIGS = ("config", "self.config", "pretrained_config", "model_config.pretrained_config")
"""Names of config.json in the sources."""

ATTENTION, MLP = "layers.{N}.self_attn.", "layers.{N}.mlp."
LLAMA = (
    ("layers.{N}.", "models/llama.py:LlamaDecoderLayer"),
    (ATTENTION, "models/llama.py:LlamaAttention"),
    (MLP, "models/llama.py:LlamaMLP"),
)
DFLASH = (
    ("", "models/dflash.py:DFlashDraftModel"),
    ("layers.{N}.", "models/dflash.py:DFlashDecoderLayer"),
    (ATTENTION, "models/dflash.py:DFlashAttention"),
    (ATTENTION, "models/dflash.py:DFlashAttention._build_qkv_proj"),
    (MLP, "models/dflash.py:DFlashMLP"),
)
READ_BLOCKS = (
    "speculative/dflash_utils.py:parse_dflash_draft_config",
    "speculative/dflash_utils.py:get_dflash_layer_types",
    "speculative/dflash_utils.py:get_dflash_attention_sliding_window_size",
    "models/dflash.py:_get_dflash_attention_type",
)
TRT = "_torch/models/modeling_"
TRT_LAYER = (
    (ATTENTION, "_torch/attention/attention.py:Attention"),
    (MLP, "_torch/modules/gated_mlp.py:GatedMLP"),
)
TRT_DFLASH = (
    *TRT_LAYER,
    ("", f"{TRT}qwen3.py:Qwen3Model"),
    ("layers.{N}.", f"{TRT}qwen3.py:Qwen3DecoderLayer"),
    (ATTENTION, "_torch/attention/qk_norm_attention.py:QKNormRoPEAttention"),
    ("", f"{TRT}dflash.py:DFlashForCausalLM"),
)
TRT_BLOCK_KEYS = (
    f"{TRT}dflash.py:DFlashForCausalLM",
    f"{TRT}qwen3.py:Qwen3DecoderLayer",
    f"{TRT}qwen3.py:Qwen3Attention",
    "_torch/pyexecutor/config_utils.py:get_layer_attention_window",
)
ENGINES: dict[str, dict[str, Any]] = {
    "sglang": {
        "modules": {
            "eagle3": (
                *LLAMA,
                ("", "models/llama_eagle3.py:LlamaModel"),
                ("", "models/llama_eagle3.py:LlamaForCausalLMEagle3"),
                ("layers.{N}.", "models/llama_eagle3.py:LlamaDecoderLayer"),
            ),
            "eagle1": (*LLAMA, ("", "models/llama_eagle.py:LlamaModel")),
            "dflash": DFLASH,
            "dspark": (
                *DFLASH,
                ("markov_head.", "models/dspark.py:VanillaMarkov"),
                ("confidence_head.", "models/dspark.py:DSparkConfidenceHead"),
            ),
        },
        "keys": {
            "eagle3": (
                "models/llama_eagle3.py:",
                "model_executor/model_runner_components/spec_aux_hidden_state.py:"
                "_resolve_eagle_aux_hidden_state",
            ),
            "eagle1": ("models/llama_eagle.py:",),
            "dflash": (*READ_BLOCKS, *(place for _, place in DFLASH)),
            "dspark": (
                *READ_BLOCKS,
                *(place for _, place in DFLASH),
                "models/dspark.py:build_markov_head",
                "models/dspark.py:build_confidence_head",
                "speculative/dspark_components/dspark_config.py:parse_dspark_draft_config",
                "speculative/dspark_components/dspark_config.py:get_dspark_sample_from_anchor",
            ),
        },
        "architectures": {
            "eagle3": "models/llama_eagle3.py",
            "eagle1": "models/llama_eagle.py",
            "dflash": "models/dflash.py",
            "dspark": "models/dspark.py",
        },
        "stacked": "models/llama_eagle3.py:LlamaForCausalLMEagle3.load_weights",
        "renamed": "models/llama_eagle3.py:LlamaForCausalLMEagle3.load_weights",
        "layers": "models/llama.py:LlamaForCausalLM.set_eagle3_layers_to_capture",
    },
    "tensorrt_llm": {
        "modules": {
            "eagle3": (
                *TRT_LAYER,
                ("", f"{TRT}speculative.py:Eagle3DraftModel"),
                ("", f"{TRT}utils.py:DecoderModelForCausalLM"),
                ("layers.{N}.", f"{TRT}speculative.py:Eagle3DecoderLayer"),
                (ATTENTION, f"{TRT}speculative.py:Eagle3Attention"),
            ),
            "dflash": TRT_DFLASH,
            "dspark": (
                *TRT_DFLASH,
                ("markov_head.", f"{TRT}speculative.py:VanillaMarkov"),
                ("confidence_head.", f"{TRT}speculative.py:DSparkConfidenceHead"),
            ),
        },
        "keys": {
            "eagle3": (
                f"{TRT}speculative.py:Eagle3DraftModel",
                f"{TRT}speculative.py:Eagle3ForCausalLM",
                f"{TRT}speculative.py:Eagle3DecoderLayer",
                f"{TRT}speculative.py:Eagle3Attention",
            ),
            "dflash": TRT_BLOCK_KEYS,
            "dspark": (*TRT_BLOCK_KEYS, f"{TRT}dspark.py:_DSparkHeadMixin"),
        },
        "passed": {"eagle3": ("lm_head", f"{TRT}speculative.py:Eagle3ForCausalLM")},
        "names": {"dspark": (f"{TRT}dspark.py:", "_DSPARK_HEAD_WEIGHT_ALIASES")},
        "spellings": {"dspark": (f"{TRT}dflash.py:", "_DSPARK_HEAD_KEY_ALIASES")},
        "stacked": "_torch/models/checkpoints/hf/weight_mapper.py:HfWeightMapper.map_weights",
        "renamed": f"{TRT}speculative.py:Eagle3ForCausalLM.load_weights",
        "layers": "_torch/speculative/eagle3.py:Eagle3OneModelSpecMetadata.__post_init__",
        "saved": f"{TRT}qwen3.py:Qwen3DecoderLayer.forward",
    },
}  # fmt: skip


class Sources:
    """The parsed files of an engine, each read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.read: dict[str, str] = {}
        self.parse = cache(self._parse)

    def _parse(self, file: str) -> ast.Module:
        text = (self.root / file).read_bytes()
        self.read[file] = hashlib.sha256(text).hexdigest()[:16]
        return ast.parse(text)

    def find(self, place: str) -> ast.AST:
        """The module, class or function of "file:Class.function"."""
        file, _, path = place.partition(":")
        node: Any = self.parse(file)
        for name in filter(None, path.split(".")):
            named = [child for child in node.body if getattr(child, "name", "") == name]
            if not named:
                raise ValueError(f"{file} no longer has {path}")
            node = named[-1]
        return node


def find_modules(node: ast.AST) -> Iterator[tuple[str, dict[str, Any]]]:
    """(attribute, sizes and bias) of every part with weights that a class makes."""
    for made in ast.walk(node):
        if not isinstance(made, ast.Assign):
            if isinstance(made, ast.Return) and isinstance(node, ast.FunctionDef):
                yield from _describe(node.name.removeprefix("_build_"), made.value)
            continue
        for target in made.targets:
            if isinstance(target, ast.Attribute):
                owner = ast.unparse(target).removeprefix("self.")
                yield from _describe(owner, made.value)


def _describe(name: str, value: ast.AST | None) -> Iterator[tuple[str, dict[str, Any]]]:
    calls = [call for call in ast.walk(value) if isinstance(call, ast.Call)] if value else []
    for call in calls:
        kind = ast.unparse(call.func).rpartition(".")[2]
        if not kind.lower().endswith(tuple(kind.lower() for kind in KINDS)) and kind != "norm_cls":
            continue
        in_list = (
            any(isinstance(each, ast.ListComp) for each in ast.walk(value)) if value else False
        )
        words = {word.arg: word.value for word in call.keywords}
        bias = words.get("bias")
        is_norm = "norm" in kind.lower()
        width = [words["hidden_size"]] if is_norm and "hidden_size" in words else []
        yield (
            f"{name}.{{N}}" if in_list else name,
            {
                "kind": "norm" if is_norm else kind,
                "sizes": [_size(each) for each in call.args or width],
                "bias": None
                if is_norm
                else kind == "Linear"
                if bias is None
                else bias.value
                if isinstance(bias, ast.Constant)
                else "config",
            },
        )
        return


def _size(node: ast.AST) -> str:
    """A product of names and numbers, such as 2*hidden_size; "?" for anything else."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return "*".join(sorted((_size(node.left), _size(node.right))))
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) == "int":
        return _size(node.args[0])
    if isinstance(node, ast.Constant):
        return str(node.value)
    return getattr(node, "attr", None) or getattr(node, "id", None) or "?"


def find_passed(node: ast.AST) -> dict[str, str]:
    """{parameter: size} that a class passes to the constructor of its base."""
    return {
        str(word.arg): _size(word.value)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__"
        for word in call.keywords
    }


def find_keys(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(section or "", key) of everything that is read of config.json."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            words = [a.value for a in each.args if isinstance(a, ast.Constant) and a.value]
            called = ast.unparse(each.func)
            owner, _, last = called.rpartition(".")
            is_read = called in ("getattr", "_cfg_get") and "config" in ast.unparse(each.args[0])
            if called == "resolve_dspark_head_config":
                for section in ("", "dflash_config", "dspark_config"):
                    yield section, str(words[0])
            elif is_read and words:
                yield "", str(words[0])
            elif last == "get" and owner in SECTIONS and words:
                yield SECTIONS[owner], str(words[0])
        elif isinstance(each, ast.Subscript) and isinstance(each.slice, ast.Constant):
            if (owner := ast.unparse(each.value)) in SECTIONS:
                yield SECTIONS[owner], str(each.slice.value)
        elif (
            isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Load)
            and ast.unparse(each.value) in CONFIGS
        ):
            yield "", each.attr


def find_literal(node: ast.AST, name: str) -> Any:
    """The list or dictionary that a source assigns to `name`."""
    for each in ast.walk(node):
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == name:
            return ast.literal_eval(each.value)
    raise ValueError(f"the source no longer has {name}")


def find_stacked(node: ast.AST) -> dict[str, str]:
    """{name in a folder: name that the loader joins it into}."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "self.mapping.update":
            joined = ast.literal_eval(each.args[0])
            return {old: new for new, names in joined.items() for old in names}
    rows = find_literal(node, "stacked_params_mapping")
    return {old.strip("."): new.strip(".") for new, old, _ in rows}


def find_renamed(node: ast.AST) -> dict[str, str]:
    """{name in a folder: name in `modules`}, from a dictionary or from the calls of re.sub.

    A loader that renames `layers.0` to a name of its own takes both in a folder; `modules` has the
    former.
    """
    replaced = {}
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "re.sub":
            old, new = (ast.literal_eval(word) for word in each.args[:2])
            if "(" not in old:
                replaced[new.strip(".")] = old.replace("\\", "").strip("^.")
    return replaced or find_literal(node, "legacy_name_map")


OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.FloorDiv: operator.floordiv}


def calculate(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """The value of an expression of whole numbers and lists, without running code of the source."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return names[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [calculate(part, names) for part in parts]
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATIONS[type(op)](calculate(left, names), calculate(right, names))
        case ast.ListComp(
            elt=part, generators=[ast.comprehension(target=ast.Name(id=name), iter=of)]
        ):
            return [calculate(part, {**names, name: one}) for one in calculate(of, names)]
    raise ValueError(f"the source computes layers by {ast.unparse(node)}")


def compute_layers(node: ast.AST, first: int) -> dict[str, Any]:
    """The streams that a target feeds, computed by the expressions of its function.

    `first` is the stream that the engine calls 0. A loader that only sorts the ids feeds them.
    """
    told, untold = [0, 1, 3], {}
    fed = told
    for each in ast.walk(node):
        if not (
            isinstance(each, ast.Assign) and "layers_to_capture" in ast.unparse(each.targets[0])
        ):
            continue
        if isinstance(each.value, ast.ListComp):
            fed = calculate(each.value, {"layer_ids": told})
        elif isinstance(each.value, ast.List | ast.Tuple) and len(each.value.elts) > 1:
            untold = {str(n): calculate(each.value, {"num_layers": n}) for n in (7, 32, 36)}
    if not untold:
        raise ValueError("the source no longer computes layers_to_capture")
    return {
        "told": [told, [layer + first for layer in fed]],
        "untold": {n: [layer + first for layer in layers] for n, layers in untold.items()},
    }


def saves_outputs(node: ast.AST) -> bool:
    """Whether a layer saves the stream after its MLP: then stream 1 has the number 0."""
    lines = {
        ast.unparse(each.func).rpartition(".")[2]: each.lineno
        for each in ast.walk(node)
        if isinstance(each, ast.Call)
    }
    return lines["maybe_capture_hidden_states"] > lines["mlp"]


def read_engine(name: str, version: str, root: Path) -> dict[str, Any]:
    """The table."""
    spec, sources = ENGINES[name], Sources(root)
    table: dict[str, Any] = {
        "engine": name, "version": version, "date": datetime.date.today().isoformat(),
        "modules": {}, "keys": {}, "architectures": {},
    }  # fmt: skip
    for family, places in spec["modules"].items():
        table["modules"][family] = {
            prefix + attribute: made
            for prefix, place in places
            for attribute, made in find_modules(sources.find(place))
        }
    for family, (part, place) in spec.get("passed", {}).items():
        passed = find_passed(sources.find(place))
        sizes = table["modules"][family][part]["sizes"]
        table["modules"][family][part]["sizes"] = [passed.get(size, size) for size in sizes]
    for family, (place, name) in spec.get("names", {}).items():
        for aliases in find_literal(sources.find(place), name).values():
            part, _, kind = aliases[0].rpartition(".")
            if kind == "bias" and part in table["modules"][family]:
                table["modules"][family][part]["bias"] = True
    for family, places in spec["keys"].items():
        read: dict[str, set[str]] = {}
        for place in places:
            for section, key in find_keys(sources.find(place)):
                read.setdefault(section, set()).add(key)
        if family in spec.get("spellings", {}):
            place, name = spec["spellings"][family]
            for key, others in find_literal(sources.find(place), name).items():
                for known in read.values():
                    known.update(others if key in known else ())
        table["keys"][family] = {section: sorted(read[section]) for section in sorted(read)}
    for family, file in spec.get("architectures", {}).items():
        entry = next(
            node.value
            for node in sources.parse(file).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass"
        )
        names = entry.elts if isinstance(entry, ast.List) else [entry]
        table["architectures"][family] = [ast.unparse(each) for each in names]
    table["stacked"] = find_stacked(sources.find(spec["stacked"]))
    table["renamed"] = find_renamed(sources.find(spec["renamed"]))
    first = int("saved" in spec and saves_outputs(sources.find(spec["saved"])))
    table["layers"] = compute_layers(sources.find(spec["layers"]), first)
    return {**table, "sources": sources.read}


if __name__ == "__main__":
    engine, release, folder = sys.argv[1:]
    text = json.dumps(read_engine(engine, release, Path(folder)), indent=1)
    # one line for each list and each part
    print(re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda each: re.sub(r"\s+", " ", each[0]), text))
