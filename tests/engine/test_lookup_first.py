"""A lookup before a head: the config, the limits, and refusals.

`test_evaluate` has a real engine.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from redraft.engine.lookup_first import HeadLimits, is_mixed, mix, read_mix
from redraft.engine.lookup_hooks import install
from redraft.engine.lookups import lookup_env
from redraft.engine.server import DROPS_A_BLOCK, describe_hits, vllm_keys
from redraft.engine.settings import write_settings
from redraft.eval.forecast.ngram import Ngram

LOOKUP = Ngram(min=2, max=3).speculative_config
EAGLE3 = {"method": "eagle3", "model": "head"}
FASTER = {"use_local_argmax_reduction": True, "disable_eagle_block_drop": True}


def test_a_mix_reaches_vllm_as_the_head_and_the_plugin_by_the_environment() -> None:
    config = mix(LOOKUP, EAGLE3, HeadLimits(tokens=2, requests=4))
    told = {"disable_padded_drafter_batch": True, **FASTER}
    assert vllm_keys(config) == {**EAGLE3, **told}
    assert vllm_keys(LOOKUP) == LOOKUP
    environment = lookup_env(config)
    told = {"prompt_lookup_min": 2, "prompt_lookup_max": 3, "head_tokens": 2, "head_requests": 4}
    assert read_mix(environment) == told
    assert is_mixed(config)
    assert not is_mixed(LOOKUP)
    assert not is_mixed(EAGLE3)
    assert (lookup_env(EAGLE3), read_mix(lookup_env(LOOKUP))) == (
        {},
        {"prompt_lookup_min": 2, "prompt_lookup_max": 3},
    )
    with pytest.raises(ValueError, match=r"lookup\.head_tokens is .two"):
        read_mix(write_settings({"lookup": told | {"head_tokens": "two"}}))


def test_only_a_greedy_head_with_its_own_vocabulary_chooses_there() -> None:
    assert vllm_keys(EAGLE3) == {**EAGLE3, **FASTER}
    for config in ({"method": "eagle"}, LOOKUP, {**EAGLE3, "draft_sample_method": "probabilistic"}):
        assert "use_local_argmax_reduction" not in vllm_keys(config)
    told = {"use_local_argmax_reduction": False, "disable_eagle_block_drop": False}
    assert vllm_keys({**EAGLE3, **told}) == {**EAGLE3, **told}


def test_beside_a_head_the_last_cached_block_of_a_prompt_is_read_too() -> None:
    from vllm.config.speculative import SpeculativeConfig

    for method in DROPS_A_BLOCK:
        config = vllm_keys({"method": method, "model": "head"})
        made = SpeculativeConfig.__new__(SpeculativeConfig)
        made.method = method
        made.disable_eagle_block_drop = config["disable_eagle_block_drop"]
        assert made.use_eagle()
        assert not made.use_eagle_block_drop()
    assert "disable_eagle_block_drop" not in vllm_keys({"method": "draft_model", "model": "small"})


def test_where_vllm_hashes_the_token_after_a_block_it_is_not_told_to_keep_the_block() -> None:
    for version, is_told in (("0.32.1", True), ("0.33.0", False), (None, True)):
        told = vllm_keys({"method": "mtp", "model": "head"}, version)
        assert ("disable_eagle_block_drop" in told) == is_told


@pytest.mark.parametrize(
    ("method", "version", "on_cpu", "said"),
    [("eagle3", "0.32.0", True, "with vLLM alone, all but the last one (128 tokens"),
     ("mtp", "0.32.0", False, "with vLLM alone, all but the last one (16 tokens"),
     ("eagle3", "0.33.0", False, "with a KV connector, all but the last one (16 tokens"),
     ("draft_model", "0.32.0", True, "all cached blocks of a prompt are reused")],
)  # fmt: skip
def test_a_line_tells_what_a_hit_of_the_prefix_cache_loses(
    method: str, version: str, on_cpu: bool, said: str
) -> None:
    line = describe_hits(method, version, on_cpu=on_cpu)
    assert said in line
    assert "reused" in line


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ({"method": "medusa"}, r"MTP, EAGLE-3, EAGLE-1, .*\bmedusa\b"),
        ({"method": "draft_model"}, r"EAGLE-1, .*\bdraft_model\b"),
        ({"method": "eagle3", "parallel_drafting": True}, r"EAGLE-1, .*\beagle3\b"),
        ({"method": "eagle3", "draft_sample_method": "probabilistic"}, "--draft-sample-method"),
        ({"method": "eagle3", "enable_adaptive_verification": True}, "adaptive verification"),
    ],
)
def test_a_draft_that_takes_no_lookup_is_refused_in_a_line(head: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        mix(LOOKUP, head, HeadLimits())


def test_the_head_drafts_within_its_limits() -> None:
    limits = HeadLimits(tokens=2, requests=4)
    assert [limits.choose(4, requests) for requests in (1, 4, 5)] == [2, 2, 0]
    assert limits.choose(1, 1) == 1, "vLLM's number for the batch size is a limit too"
    assert HeadLimits().choose(4, 100) == 4


def make_runner(**changes: Any) -> Any:
    config = {
        **EAGLE3,
        "disable_padded_drafter_batch": True,
        "draft_sample_method": "greedy",
    } | changes
    return SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=SimpleNamespace(**config)), drafter=None
    )


def test_a_runner_that_cannot_look_up_first_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = make_runner()
    install(alone)
    assert not hasattr(alone, "propose_draft_token_ids"), (
        "without the variables a head is left alone"
    )
    for name, value in lookup_env(mix(LOOKUP, EAGLE3, HeadLimits())).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match='"disable_padded_drafter_batch"'):
        install(make_runner(disable_padded_drafter_batch=False))
    with pytest.raises(ValueError, match=r"EAGLE-1, .*\bmedusa\b"):
        install(make_runner(method="medusa"))
    other = make_runner()
    del other.drafter
    with pytest.raises(ValueError, match=r"V1 and V2"):
        install(other)
