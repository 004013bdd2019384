"""The page's table of target families is true of the installed transformers."""

from __future__ import annotations

import contextlib

import pytest
from transformers import AutoConfig

from redraft.heads.nn.layers import LlamaShape
from tests.helpers.target_families import FAMILIES, MARKED, PAGE, TINY, rows, verdicts


@pytest.fixture(scope="module")
def table() -> list[str]:
    return list(rows())


@pytest.mark.slow
def test_the_page_has_the_table_of_the_installed_transformers(table: list[str]) -> None:
    # if this fails: python -m tests.helpers.target_families
    written = MARKED.search(PAGE.read_text())
    assert written is not None
    assert written[0].splitlines()[1:-1] == table


@pytest.mark.slow
def test_the_table_has_supported_and_refused_families(table: list[str]) -> None:
    assert len(table) == 2 + len(FAMILIES)
    assert sum(row.endswith("| yes | yes |") for row in table) >= 15
    assert verdicts("granite", {}) == ("yes", "yes")  # the released ones scale their logits


def test_a_config_with_a_size_for_each_layer_is_refused_in_a_line() -> None:
    config = AutoConfig.for_model("gemma4_text", **TINY)
    with contextlib.suppress(Exception):  # a newer release of transformers refuses to tell one size for all layers
        pytest.skip(f"this release of transformers has one size, {config.head_dim}")
    with pytest.raises(
        ValueError, match=r"no head can be made for Gemma4TextConfig.*'head_dim' is a per-layer attribute[^.]*$"
    ) as refused:
        LlamaShape.from_config(config)
    assert "\n" not in str(refused.value)
