"""Exports beside the tables of the engines' loaders: names, shapes, keys and layer numbers.

`tests/helpers/read_engine.py` makes a table from an engine's sources. Where the loader itself can be
imported, it reads an export too.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from make_heads import HIDDEN, VOCAB
from read_engine import read_engine
from test_export import (
    AUX,
    IDS,
    KEY,
    convert,
    make_pair,
    of_dflash,
    of_dspark,
    of_eagle1,
    of_eagle3,
)

from redraft.files.foreign import default_layers
from redraft.heads.engines.table import ENGINES

TABLES = {
    path.stem.replace("_", "-"): json.loads(path.read_text())
    for path in (Path(__file__).parents[2] / "assets/engines").glob("*.json")
}
HEADS = {
    "eagle3": of_eagle3(num_layers=2),
    "eagle3 with norms": of_eagle3(num_layers=1, fc_norm=True, norm_output=True),
    "eagle3 with a norm of all": of_eagle3(norm_before_fc=True),
    "eagle1": of_eagle1,
    "dflash": of_dflash(),
    "dspark": of_dspark(),
}
CASES = [
    (engine, head)
    for engine in ("sglang", "tensorrt-llm")
    for head in HEADS
    if (engine, head) != ("tensorrt-llm", "eagle1")
]
IGNORED = {"t2d"}
"""Tensors that a loader skips by name."""

ARITHMETIC = {
    "eagle3": ("draft_vocab_size", "fc_norm", "norm_output", "num_hidden_layers", "rms_norm_eps"),
    "eagle1": ("num_hidden_layers",),
    "dflash": ("block_size", "layer_types", "num_hidden_layers", "rms_norm_eps"),
    "dspark": ("block_size", "markov_rank", "markov_head_type", "layer_types", "rms_norm_eps"),
}
"""Keys of an export that change what a head computes."""


def find_part(name: str, table: dict[str, Any], family: str) -> tuple[str, dict[str, Any]]:
    """(name, description) of the part that takes a tensor, as the loader names it."""
    for old, new in table["renamed"].items():
        name = re.sub(rf"(^|\.){old}\.", rf"\g<1>{new}.", name)
    *words, last = name.split(".")
    words = [table["stacked"].get(word, word) for word in words]
    place = re.sub(r"\.\d+(?=\.|$)", ".{N}", ".".join(words))
    assert last in ("weight", "bias"), name
    return place, table["modules"][family][place]


def product(size: str, config: Any) -> int | None:
    """The number behind a size of a table; None if it is computed elsewhere."""
    sizes = {
        **config,
        "hidden_size_in": HIDDEN,
        "num_aux_hidden_states": len(AUX),
        "num_capture_layers": len(AUX),
        "num_context_features": len(AUX),
        "draft_vocab_size": config.get("draft_vocab_size") or VOCAB,
    }
    factors = [sizes.get(f, int(f) if f.isdigit() else None) for f in size.split("*")]
    return None if None in factors else math.prod(factors)


@pytest.mark.parametrize(("engine", "head"), CASES, ids=[f"{e}: {h}" for e, h in CASES])
def test_sglang_and_tensorrt_have_a_place_for_every_tensor_of_an_export(
    engine: str, head: str, tmp_path: Path
) -> None:
    written, table = convert(make_pair(tmp_path, HEADS[head]), engine), TABLES[engine]
    family, taken = written.family.name, set()
    for name, shape in written.shapes.items():
        if name in IGNORED:
            continue
        if name == "d2t":  # offsets, added to 0, 1, 2, ...
            assert family == "eagle3"
            continue
        place, part = find_part(name, table, family)
        taken.add(place)
        if name.endswith(".bias"):
            assert part["bias"], name
        elif place.split(".")[-1] not in table["stacked"].values():
            sizes = [product(size, written.config) for size in part["sizes"]]
            sizes = sizes[::-1] if part["kind"].endswith("Linear") else sizes
            for mine, its in zip(shape, sizes, strict=True):
                assert its in (mine, None), (name, shape, part)
    optional = {"embed_tokens", "embed_proj", "lm_head", "input_norm", "fc_norm.{N}"}
    optional |= {"enorm", "eh_proj"}  # made for a section with `eh_proj_before_attn` only
    # SGLang's later layers have a norm that they do not apply, EAGLE-1's layer none
    unused = {"layers.{N}.input_layernorm"} if family == "eagle1" else set()
    assert table["modules"][family].keys() - taken <= optional | unused
    for key in ARITHMETIC[family]:
        assert key in written.config
        assert key in table["keys"][family][""] or family == "eagle1" or key == "layer_types"


@pytest.mark.parametrize("engine", TABLES)
def test_sglang_and_tensorrt_feed_the_layers_of_training(engine: str, tmp_path: Path) -> None:
    table = TABLES[engine]
    told, fed = table["layers"]["told"]
    assert fed == list(AUX)
    written = convert(make_pair(tmp_path, of_eagle3()), engine)
    if engine == "sglang":
        assert KEY in table["keys"]["eagle3"]["eagle_config"]
        assert KEY not in table["keys"]["eagle3"][""]
        assert written.config["eagle_config"][KEY] == told
    else:
        options = json.loads((written.draft / "spec.yaml").read_text())["speculative_config"]
        assert options["eagle3_layers_to_capture"] == told
    for count, streams in table["layers"]["untold"].items():
        assert default_layers(int(count)) == streams


def test_sglang_knows_the_architectures_and_tensorrt_the_sections(tmp_path: Path) -> None:
    sglang, tensorrt = TABLES["sglang"], TABLES["tensorrt-llm"]
    for head in ("eagle3", "eagle1", "dflash", "dspark"):
        written = convert(make_pair(tmp_path / head, HEADS[head]), "sglang")
        (name,) = written.config["architectures"]
        assert name in sglang["architectures"][head]
    assert "is_causal" in sglang["keys"]["dflash"][""]
    assert "causal" not in sglang["keys"]["dflash"]["dflash_config"]
    assert "norm_before_residual" not in sglang["keys"]["eagle3"][""]
    assert "sample_from_anchor" in sglang["keys"]["dspark"][""]
    assert "norm_before_fc" not in tensorrt["keys"]["eagle3"][""]
    assert {"shift_label", "target_layer_ids"} <= {*tensorrt["keys"]["dspark"]["dflash_config"]}


def test_the_tables_are_of_the_versions_that_the_rules_name() -> None:
    for engine in ENGINES:
        if not engine.is_run:
            table = TABLES[engine.name]
            assert table["version"].endswith(engine.version)
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", table["date"])
            assert table["sources"]


@pytest.mark.parametrize(("package", "root"), [("sglang", "srt"), ("tensorrt_llm", ".")])
def test_the_installed_sglang_or_tensorrt_has_the_loaders_of_the_table(
    package: str, root: str
) -> None:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    table = TABLES[package.replace("_", "-")]
    read = read_engine(package, table["version"], Path(found.submodule_search_locations[0]) / root)
    for key in ("modules", "keys", "architectures", "stacked", "renamed", "layers"):
        assert read[key] == table[key]


@pytest.mark.parametrize("head", ["dflash", "dspark"])
def test_sglangs_own_reader_takes_the_keys_of_an_export(head: str, tmp_path: Path) -> None:
    place = "sglang.srt.speculative.dspark_components.dspark_config"
    try:
        reader = importlib.import_module(place)
    except ImportError as error:
        pytest.skip(f"SGLang's loader does not import: {error}")
    config = convert(make_pair(tmp_path, HEADS[head]), "sglang").config
    read = reader.parse_dflash_draft_config(draft_hf_config=dict(config))
    assert read.target_layer_ids == [layer - 1 for layer in AUX]
    assert (read.block_size, read.mask_token_id) == (4, VOCAB - 1)
    if head == "dspark":
        read = reader.parse_dspark_draft_config(draft_hf_config=dict(config))
        assert (read.gamma, read.markov_rank, read.markov_head_type) == (4, 8, "vanilla")
        assert reader.get_dspark_sample_from_anchor(dict(config))
    assert len(IDS) < VOCAB
