"""Drafts that vLLM would not serve as asked are refused in a line, before anything starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from redraft.engine import server
from redraft.engine.server import require_runner, require_servable, vllm_server
from redraft.eval.forecast.draft_source import DraftSource
from redraft.files.windows import View
from redraft.heads.catalog import FAMILIES, find_family
from redraft.heads.family import Family

V2_ONLY = [family for family in FAMILIES if family.method and "v1" not in family.decoders]
V1_ONLY = [family for family in FAMILIES if family.method and "v2" not in family.decoders]

BLOCKS = {
    "dflash": {"block_size": 4},
    "dspark": {"block_size": 3},
    "medusa": {"num_heads": 3},
    "peagle": {"redraft": {"family": "peagle", "num_steps": 3}},
}
"""The config.json of drafts of three tokens, by family."""


EVERY = "0.32.4"  # the last vLLM that serves every family


@pytest.mark.parametrize(
    ("family", "asked", "needed", "taken"),
    [*((f, "0", "V2", "V1") for f in V2_ONLY), *((f, "1", "V1", "V2") for f in V1_ONLY)],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_draft_is_refused_if_the_variable_asks_for_a_runner_without_its_proposer(
    family: Family, asked: str, needed: str, taken: str
) -> None:
    require_runner(family.speculative, {}, on_cpu=False, version=EVERY)
    environment = {"VLLM_USE_V2_MODEL_RUNNER": asked}
    variable = f"VLLM_USE_V2_MODEL_RUNNER={asked}"
    named = rf"\b{needed}\b.* {re.escape(family.title)}\b.* {variable}\b.*\b{taken}\b"
    with pytest.raises(ValueError, match=named):
        require_runner(family.speculative, environment, version=EVERY)
    with pytest.raises(ValueError, match=rf"{named}.*, or wait$"):
        require_runner(family.speculative, environment, way_out=", or wait", version=EVERY)


def test_on_a_cpu_vllm_takes_v1_and_refuses_the_drafts_of_v2() -> None:
    for family in V2_ONLY:
        with pytest.raises(ValueError, match=rf"{family.title}.*CPU.*V1.*GPU"):
            require_runner(family.speculative, {}, on_cpu=True)
    for family in V1_ONLY:
        require_runner(family.speculative, {}, on_cpu=True, version=EVERY)


@pytest.mark.parametrize("version", ["0.33.0", "0.33.1+cu130", "0.33.2rc1"])
def test_a_newer_vllm_that_no_longer_has_the_proposer_is_refused(version: str) -> None:
    require_runner(find_family("eagle3").speculative, {}, version=version)
    medusa = find_family("medusa").speculative
    require_runner(medusa, {}, version=EVERY)
    with pytest.raises(ValueError, match=rf"{re.escape(version)} .*Medusa.*\b0\.32\b"):
        require_runner(medusa, {}, version=version)


def test_p_eagle_is_among_the_drafts_of_v1_and_eagle_3_is_not() -> None:
    assert {family.name for family in V1_ONLY} == {"peagle", "medusa", "suffix"}
    assert [family.name for family in V2_ONLY] == ["dspark"]
    environment = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    require_runner(
        find_family("eagle3").speculative, environment
    )  # the same method without the flag
    with pytest.raises(ValueError, match=r"\bV1\b.*suffix.*VLLM_USE_V2_MODEL_RUNNER=1"):
        require_runner(DraftSource.parse("suffix").speculative(), environment)


MIXED = (View(512, True), View())


@pytest.mark.parametrize("name", ["dflash", "eagle3"])
def test_windows_beside_full_layers_need_v2(name: str) -> None:
    speculative = find_family(name).speculative
    require_runner(speculative, {}, views=MIXED, on_cpu=False)
    require_runner(speculative, {"VLLM_USE_V2_MODEL_RUNNER": "1"}, views=MIXED, on_cpu=True)
    require_runner(speculative, {}, views=(View(512, True),) * 2, on_cpu=True)
    with pytest.raises(ValueError, match=r"V2.*with and without windows.*CPU.*V1"):
        require_runner(speculative, {}, views=MIXED, on_cpu=True)
    with pytest.raises(ValueError, match=r"V2.*with and without windows.*RUNNER=0 selects V1"):
        require_runner(speculative, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, views=MIXED)


def test_no_runner_serves_a_p_eagle_head_with_windows_beside_full_layers() -> None:
    with pytest.raises(ValueError, match=r"no model runner.*P-EAGLE.*full-layers"):
        require_runner(find_family("peagle").speculative, {}, views=MIXED, on_cpu=False)


KINDS = {
    "all layers alike": [(View(512, True),) * 2, (View(),) * 2],
    "both windowed and full layers": [MIXED],
    "any windows": [(View(512, True),) * 2, MIXED],
}
"""Views of the layers, by their words in the table of docs/engines.md."""


def test_the_table_of_windows_says_which_runner_serves_which_head() -> None:
    page = (Path(__file__).parents[2] / "docs/engines.md").read_text()
    _, _, section = page.partition("\n## Windows in heads\n")
    rows = [line.strip("|").split("|") for line in section.partition("\n\n")[0].splitlines()]
    assert [cell.strip() for cell in rows[0]] == ["head", "V1", "V2"]
    titles = {family.title: family for family in FAMILIES}
    checked = set()
    for head, *cells in rows[2:]:
        names, _, kind = head.strip().partition(": ")
        for name in names.split(", "):
            for runner, cell in zip("01", cells, strict=True):
                for views in KINDS[kind]:
                    assert is_served(titles[name], runner, views) is (cell.strip() == "yes")
            checked.add((name, kind))
    windowed = {family.title for family in FAMILIES if family.layers_key}
    assert {name for name, _ in checked} == windowed
    assert len(checked) == 2 * len(windowed) - 1, "DSpark has one row"


def is_served(family: Family, runner: str, views: tuple[View, ...]) -> bool:
    environment = {"VLLM_USE_V2_MODEL_RUNNER": runner}
    try:
        require_runner(family.speculative, environment, views=views, on_cpu=False)
    except ValueError:
        return False
    return True


def test_windows_are_read_from_the_folder_before_a_server_starts(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention"]
    config = {"num_hidden_layers": 2, "layer_types": types, "sliding_window": 512,
              "dflash_config": {"block_size": 4}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    served = {"method": "dflash", "model": str(tmp_path), "num_speculative_tokens": 3}
    environment = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    with pytest.raises(ValueError, match="with and without windows"):
        require_servable(served, environment)
    (tmp_path / "config.json").write_text(json.dumps({**config, "layer_types": types[:1] * 2}))
    require_servable(served, environment)
    with pytest.raises(ValueError, match=r"4 draft tokens.*proposes 3\b"):
        require_servable({**served, "num_speculative_tokens": 4}, environment)


@pytest.mark.parametrize("name", BLOCKS)
def test_more_tokens_than_a_draft_proposes_are_refused_before_a_server_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(server, "process_group", start)
    (tmp_path / "config.json").write_text(json.dumps(BLOCKS[name]))
    family = find_family(name)
    config = {**family.speculative, "model": str(tmp_path), "num_speculative_tokens": 3}
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "0" if "v1" in family.decoders else "1"}
    require_servable(config, runner)
    four = {**config, "num_speculative_tokens": 4}
    with (
        pytest.raises(
            ValueError, match=rf"^4 .*{tmp_path}.* 3\b.*--num-speculative-tokens to at most 3\b"
        ),
        vllm_server("target", log=tmp_path / "vllm.log", speculative_config=four, extra_env=runner),
    ):
        pass
    assert not (tmp_path / "vllm.log").exists()


def test_drafts_of_any_number_and_drafts_to_download_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BLOCKS["dflash"]))
    many = {"num_speculative_tokens": 9}
    require_servable({"method": "eagle3", "model": str(tmp_path), **many})
    require_servable({"method": "dflash", "model": "nobody/is-here", **many})
    require_servable(
        {"method": "dflash", "model": str(tmp_path / "nowhere"), **many}
    )  # vLLM tells that
    require_servable({"method": "ngram", **many})
    require_servable(None)
