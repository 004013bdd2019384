"""The benchmark of hidden states on their way, on a folder."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import states


def test_states_arrive_in_both_formats_and_nothing_stays(tmp_path: Path) -> None:
    storage = tmp_path / "states"
    cfg = states.Config(
        storages=(str(storage),),
        tokens=16,
        layers=2,
        hidden=8,
        texts=2,
        rounds=1,
        output=tmp_path / "out.json",
    )
    states.main(cfg)
    rows = json.loads(cfg.output.read_text())["states"]
    assert [(row["storage"], row["format"]) for row in rows] == [
        (str(storage), "exact"),
        (str(storage), "float8"),
    ]
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert (states.count_bytes(cfg, "exact"), states.count_bytes(cfg, "float8")) == (32, 24)
    assert not list(storage.iterdir())
