"""The offline replay of the demo's training, its statistics, and the settings the demo forces."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner_world import ANSWER_TOKENS, PROMPT_TOKENS, World, make_draft, make_records

from benchmarks.demo.online_config import SMALL, Config, describe_settings, forced_settings
from benchmarks.demo.online_replay import Replayer
from benchmarks.demo.online_report import (
    describe_cost,
    describe_gap,
    estimate_overhead,
    estimate_share,
)
from benchmarks.demo.online_stage import Scene, write_learner_config
from redraft.engine.prompts import Prompt
from redraft.eval.intervals import UNBOUNDED, median_interval
from redraft.files.checkpoint import load_causal_lm
from redraft.files.folder import fingerprint
from redraft.files.target_folder import TargetFolder
from redraft.online.daemon.config import LearnerConfig
from redraft.online.daemon.opening import provide_first_version
from redraft.online.learning.buffer import Buffer
from redraft.online.records.record import encode_record


def make_counts(rng: np.random.Generator, tau: Any, prompts: int = 48) -> np.ndarray:
    """Accepted tokens and drafts of every prompt, around the given tau.

    One more axis for several taus.
    """
    drafts_N = rng.integers(15, 45, prompts).astype(float)
    accepted = (np.asarray(tau)[..., None] - 1) * drafts_N
    return np.stack([accepted, np.broadcast_to(drafts_N, accepted.shape)], axis=-1)


def test_the_share_of_the_gap_is_that_of_exact_counts() -> None:
    def make(tau: Any) -> np.ndarray:
        return make_counts(np.random.default_rng(0), tau)

    found = estimate_share(make(1.2), make([1.8, 1.84, 1.76]), make([2.0, 2.0, 2.0]))
    assert found["shares"] == pytest.approx([0.75, 0.8, 0.7])
    assert found["share"] == pytest.approx(0.75)
    # every prompt tells the same, so only seeds vary: t(0.975, 2) * 0.05 / sqrt(3)
    assert found["interval"] == pytest.approx(
        (0.75 - 4.3027 * 0.05 / 3**0.5, 0.75 + 4.3027 * 0.05 / 3**0.5), abs=1e-3
    )


def test_there_is_no_share_without_a_gap_and_no_interval_with_one_seed() -> None:
    def make(tau: Any) -> np.ndarray:
        return make_counts(np.random.default_rng(0), tau)

    nothing = estimate_share(make(1.2), make([1.3, 1.3]), make([1.1, 1.3]))
    assert nothing["share"] is nothing["interval"] is None
    assert describe_gap(nothing | {"seeds": [0, 1]}) == "no gap to close"
    single = estimate_share(make(1.2), make([1.8]), make([2.0]))
    assert single["share"] == pytest.approx(0.75)
    assert single["interval"] is None
    assert "no interval" in describe_gap(single | {"seeds": [0]})


def test_the_interval_of_the_share_holds_the_truth_over_seeds_and_prompts() -> None:
    rng, held = np.random.default_rng(1), 0
    trials = 300
    for _ in range(trials):
        hard_N = 0.3 * rng.standard_normal(48)  # how hard a prompt is shifts all drafts
        fit_N = 0.15 * rng.standard_normal(48)  # a prompt may profit more or less from learning
        drafts_N = rng.integers(15, 45, 48).astype(float)

        def counts(
            tau: float,
            fit: float,
            hard_N: Any = hard_N,
            fit_N: Any = fit_N,
            drafts_N: Any = drafts_N,
        ) -> Any:
            rates_N = tau - 1 + hard_N + fit * fit_N
            return np.stack([rates_N * drafts_N, drafts_N], axis=-1)

        learned = np.stack([counts(1.8 + 0.02 * rng.standard_normal(), 1) for _ in range(3)])
        ceiling = np.stack([counts(2.0 + 0.02 * rng.standard_normal(), 1) for _ in range(3)])
        low, high = estimate_share(counts(1.2, 0), learned, ceiling)["interval"]
        held += low <= 0.75 <= high
    assert held / trials >= 0.93


def test_the_median_interval_is_the_order_statistics_of_the_sign_test() -> None:
    assert median_interval(range(1, 7)) == (3.5, (1.0, 6.0))  # 2 / 64 outside
    assert median_interval(range(1, 17)) == (8.5, (4.0, 13.0))  # the table of the sign test
    assert median_interval([1.0, 2.0, 3.0])[1] == UNBOUNDED


def test_the_median_interval_holds_the_median_of_skewed_rounds() -> None:
    rng = np.random.default_rng(0)
    for size in (6, 16):
        held = [
            low <= 1 <= high
            for _, (low, high) in (median_interval(rng.lognormal(0, 1, size)) for _ in range(2000))
        ]
        assert np.mean(held) >= 0.95 - 0.01


def test_a_cost_that_the_interval_cannot_tell_from_none_is_called_equal() -> None:
    without = np.full(16, 100.0)
    noise = np.linspace(-3, 3, 16)
    assert describe_cost(*estimate_overhead(list(without + noise), list(without))).startswith(
        "equal"
    )
    assert describe_cost(*estimate_overhead(list(without - 10 + noise), list(without))).startswith(
        "10.0% (95%"
    )
    assert describe_cost(*estimate_overhead([90.0], [100.0])) == "unknown, too few rounds"


def test_the_demo_changes_only_the_settings_it_lists(tmp_path: Path) -> None:
    cfg = Config()
    scene = Scene(
        target=SMALL,
        dtype="float32",
        domains=("code", "prose"),
        about={},
        training=[],
        traffic={},
        test={},
    )
    config = asdict(write_learner_config(cfg, scene, tmp_path, servers=["http://127.0.0.1:1"]))
    defaults = asdict(LearnerConfig(target=Path("t"), registry=Path("r"), spool=Path("s")))
    changed = {
        f"{table}.{key}"
        for table, values in config.items()
        if isinstance(values, dict)
        for key, value in values.items()
        if value != defaults[table][key]
    }
    listed = {row["setting"]: row for row in describe_settings(forced_settings(cfg))}
    addresses = {"draft.initial", "fleet.servers", "fleet.token_file"}
    assert changed - addresses == set(listed)
    assert all(row["reason"] for row in listed.values())
    assert not any(name.startswith(("gate.", "buffer.")) for name in listed), (
        "the gate's evidence is the default's"
    )


def test_the_replay_trains_on_the_records_and_judges_both_drafts(
    random_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = make_draft(random_target, tmp_path / "noisy", noise=0.2)
    world = World.make(tmp_path, random_target, draft, servers=0)
    cfg = world.config()
    provide_first_version(cfg, world.registry, TargetFolder.open(random_target))
    records = [
        *make_records(random_target, 40, domain="code"),
        *make_records(random_target, 120, seed=1, domain="prose"),
    ]
    with Buffer(cfg.buffer_config, fingerprint(random_target)) as buffer:
        buffer.append([(encode_record(record), record) for record in records], time.time())
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(token_ids=rng.integers(20, 400, PROMPT_TOKENS).tolist(), domain="prose")
        for _ in range(24)
    ]
    target = load_causal_lm(random_target).eval()
    replayer = Replayer(cfg, target, prompts, 2, ANSWER_TOKENS)
    found = replayer.run(64, "prose", range(2), tmp_path / "ceiling")
    assert (found["steps"], found["num_prompts"], found["seeds"]) == (16, 24, [0, 1])
    assert len(found["tau_learned"]) == len(found["tau_ceiling"]) == 2
    assert min(found["tau_learned"] + found["tau_ceiling"]) > found["tau_before"], (
        "both have learned"
    )
    assert (tmp_path / "ceiling" / "config.json").is_file()
