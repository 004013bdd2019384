"""Promises that every family keeps, in every variant.

What engines and training take for granted.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from make_families import VARIANTS, make_variant
from make_heads import (
    assert_every_parameter_learns,
    assert_packed_equals_unpacked,
    assert_round_trip,
    assert_training_equals_decoding,
)

from redraft.heads.catalog import FAMILIES

CASES = [
    pytest.param(name, variant, id=f"{name}, {variant}")
    for name, variants in VARIANTS.items()
    for variant in variants
]

every_variant = pytest.mark.parametrize(("name", "variant"), CASES)

TRAINED_WITH: dict[str, dict[str, Any]] = {
    "peagle": {"keep_ratio": 0.5, "min_share": 0.3},
    "dflash": {"num_anchors": 5, "gamma": 3.0},
    "dspark": {"num_anchors": 5, "gamma": 3.0},
}
"""Options that no engine reads, and an export keeps."""


def test_every_head_of_the_catalog_is_here() -> None:
    assert VARIANTS.keys() == {family.name for family in FAMILIES if family.is_head}


@every_variant
def test_training_sees_what_decoding_sees(name: str, variant: str, tmp_path: Path) -> None:
    head, model = make_variant(name, variant, tmp_path)
    for num_tokens in (1, head.max_tokens or 5):
        assert_training_equals_decoding(head, model, num_tokens)


@every_variant
def test_packed_documents_do_not_see_each_other(name: str, variant: str, tmp_path: Path) -> None:
    if variant.startswith("qwen3"):
        pytest.skip("the target's linear attention reads across documents")
    assert_packed_equals_unpacked(*make_variant(name, variant, tmp_path))


@every_variant
def test_every_parameter_learns(name: str, variant: str, tmp_path: Path) -> None:
    head, model = make_variant(name, variant, tmp_path)
    if variant == "deepseek":  # its router sends no token to some experts here
        head.block.mlp.gate.top_k = 4
        head.block.mlp.gate.topk_group = 2
    assert_every_parameter_learns(head, model)


@every_variant
def test_an_export_loads_equal(name: str, variant: str, tmp_path: Path) -> None:
    head, model = make_variant(name, variant, tmp_path, **TRAINED_WITH.get(name, {}))
    assert_round_trip(head, model, tmp_path / "head")
    if "layout" in inspect.signature(head.export).parameters:
        assert_round_trip(
            head, model, tmp_path / "of speculators", layout="speculators", target_name="target"
        )
