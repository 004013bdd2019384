"""Metrics from the journal's writes, and the alert rules and dashboard made for them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from make_journal import SERVERS, make_journal
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from redraft.distill.train.loop import write_offline_unless_logged_in
from redraft.online.daemon.account import Account
from redraft.online.journal import (
    AcceptanceEntry,
    BufferEntry,
    FaultEntry,
    GateEntry,
    Journal,
    ServerEntry,
    StalenessEntry,
    StateEntry,
    SwapEntry,
    TrainingEntry,
)
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.config import BufferConfig
from redraft.online.page.telemetry import DROP_REASONS, MAX_VALUES, Telemetry, to_wandb
from redraft.online.records.guard import Guard
from redraft.online.records.record import CorruptRecordError

NOW_S = 1_800_000_000.0
ROOT = Path(__file__).parents[3]
GRAFANA = ROOT / "recipes" / "deploy" / "grafana"
PROMTOOL = shutil.which("promtool")
promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool is installed: apt-get install prometheus"
)

Key = tuple[str, frozenset[tuple[str, str]]]


def samples(telemetry: Telemetry) -> dict[Key, float]:
    """The values that a scrape sees."""
    families = text_string_to_metric_families(generate_latest(telemetry.registry).decode())
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in families
        for s in family.samples
    }


def value(telemetry: Telemetry, name: str, **labels: str) -> float | None:
    return samples(telemetry).get((name, frozenset(labels.items())))


def make_observed(folder: Path) -> tuple[Journal, Telemetry]:
    telemetry = Telemetry()
    return Journal(folder, [telemetry.observe]), telemetry


def make_hour(folder: Path) -> tuple[list[Any], Telemetry]:
    """A journal of an hour, and metrics that observed every entry."""
    entries, telemetry = make_journal(folder, NOW_S).read().entries, Telemetry()
    account = Account(Journal(folder))
    account.begin_fault("disk_full", "records")
    guard = Guard()
    with guard.round("ingest"):
        raise KeyError
    for collector in (account, guard):
        telemetry.registry.register(collector)
    for entry in entries:
        telemetry.observe(entry)
    return entries, telemetry


def test_every_count_is_the_sum_over_the_journal(tmp_path: Path):
    entries, telemetry = make_hour(tmp_path)
    for server in SERVERS:
        of_server = [e for e in entries if isinstance(e, AcceptanceEntry) and e.server == server]
        drafts = value(telemetry, "redraft_drafts_total", server=server)
        accepted = value(telemetry, "redraft_accepted_tokens_total", server=server)
        assert drafts == sum(entry.drafts for entry in of_server)
        assert accepted == sum(entry.accepted for entry in of_server)
        at = [
            value(
                telemetry,
                "redraft_accepted_tokens_at_position_total",
                server=server,
                position=str(position),
            )
            for position in range(1, 5)
        ]
        assert sum(filter(None, at)) == accepted
    code = [e for e in entries if isinstance(e, AcceptanceEntry) and e.domain == "code"]
    assert value(telemetry, "redraft_domain_drafts_total", domain="code") == sum(
        entry.drafts for entry in code
    )
    swaps = [entry for entry in entries if isinstance(entry, SwapEntry)]
    assert value(telemetry, "redraft_swaps_total", outcome="rolled_back") == 1
    assert value(telemetry, "redraft_swaps_total", outcome="refused") == 0
    assert value(telemetry, "redraft_swap_duration_seconds_count") == len(swaps)
    took_s = sum(swap.duration_ms or 0 for swap in swaps) / 1e3
    assert value(telemetry, "redraft_swap_duration_seconds_sum") == pytest.approx(took_s)


def test_gauges_are_the_last_entry_of_their_kind(tmp_path: Path):
    entries, telemetry = make_hour(tmp_path)
    last_gate = [entry for entry in entries if isinstance(entry, GateEntry)][-1]
    assert value(telemetry, "redraft_gate_gain_tokens", bound="mean") == last_gate.gain
    assert value(telemetry, "redraft_gate_gain_tokens", bound="low") == last_gate.low
    assert value(telemetry, "redraft_buffer_records") == 24000
    assert value(telemetry, "redraft_phase", phase="training") == 1
    assert (
        sum(number for (name, _), number in samples(telemetry).items() if name == "redraft_phase")
        == 1
    )
    assert value(telemetry, "redraft_last_entry_timestamp_seconds") == NOW_S


def test_a_server_has_one_version(tmp_path: Path):
    _, telemetry = make_hour(tmp_path)
    versions = [
        dict(labels) for name, labels in samples(telemetry) if name == "redraft_server_draft_info"
    ]
    assert sorted(row["server"] for row in versions) == sorted(SERVERS)
    assert {row["version"] for row in versions} == {"v000012"}


def test_a_server_that_has_left_leaves_no_series_and_may_come_again(tmp_path: Path):
    journal, telemetry = make_observed(tmp_path)
    look = {"drafts": 10, "accepted": 12, "accepted_at": (8, 4), "tau": 2.2}
    for server in ("http://a:1", "http://b:1"):
        journal.write(ServerEntry(server=server, change="joined"))
        journal.write(AcceptanceEntry(server=server, draft_version="v000003", **look))
    journal.write(ServerEntry(server="http://a:1", change="left"))
    journal.write(ServerEntry(server="http://never-looked-at:1", change="left"))
    assert {
        dict(labels)["server"] for _, labels in samples(telemetry) if "server" in dict(labels)
    } == {"http://b:1"}
    journal.write(AcceptanceEntry(server="http://a:1", draft_version="v000004", **look))
    assert (
        value(telemetry, "redraft_server_draft_info", server="http://a:1", version="v000004") == 1
    )
    assert (
        value(telemetry, "redraft_server_draft_info", server="http://a:1", version="v000003")
        is None
    )


def test_what_is_not_known_is_not_zero(tmp_path: Path):
    journal, telemetry = make_observed(tmp_path)
    for name in ("redraft_train_loss_nats", "redraft_buffer_records", "redraft_lag_seconds"):
        number = value(telemetry, name)
        assert number != number, name
    journal.write(TrainingEntry(step=1, loss=float("inf"), records_seen=1))
    loss = value(telemetry, "redraft_train_loss_nats")
    assert loss != loss
    journal.write(BufferEntry(records=5, bytes=1, held_out=0, lag_records=3))
    lag_s = value(telemetry, "redraft_lag_seconds")
    assert lag_s != lag_s
    journal.write(BufferEntry(records=5, bytes=1, held_out=0))
    assert value(telemetry, "redraft_lag_seconds") == 0


def test_totals_count_on_when_they_start_over(tmp_path: Path):
    journal, telemetry = make_observed(tmp_path)
    for total in (3, 5, 5, 2):
        journal.write(BufferEntry(records=1, bytes=1, held_out=0, dropped={"corrupt": total}))
        journal.write(TrainingEntry(step=1, loss=1.0, records_seen=10 * total, skipped=total))
    assert value(telemetry, "redraft_dropped_records_total", reason="corrupt") == 7
    assert value(telemetry, "redraft_trained_records_total") == 40
    assert value(telemetry, "redraft_skipped_records_total") == 4


def test_what_a_learner_skipped_before_its_restart_is_no_increase_after_it(tmp_path: Path):
    """Otherwise, each restart would look as if training were slower than traffic."""
    journal, telemetry = make_observed(tmp_path)
    assert value(telemetry, "redraft_skipped_records_total") == 0
    for records in (100_004, 100_008):  # a checkpoint has the totals
        journal.write(TrainingEntry(step=9, loss=1.0, records_seen=records, skipped=5_000))
    assert value(telemetry, "redraft_skipped_records_total") == 0
    assert value(telemetry, "redraft_trained_records_total") == 4


def test_clients_cannot_make_labels_without_end(tmp_path: Path):
    journal, telemetry = make_observed(tmp_path)
    for number in range(1000):
        fields = {"drafts": 1, "accepted": 1, "tau": 2.0}
        journal.write(AcceptanceEntry(draft_version="v000001", domain=f"d{number}", **fields))
        journal.write(FaultEntry(what=f"f{number}"))
    for name in ("redraft_domain_drafts_total", "redraft_faults_total"):
        found = {key: number for key, number in samples(telemetry).items() if key[0] == name}
        assert len(found) == MAX_VALUES + 1
        assert sum(found.values()) == 1000
        assert max(found.values()) == 1000 - MAX_VALUES, "the rest is one series, `other`"


def test_the_buffers_reasons_are_there_before_the_first_drop(tmp_path: Path):
    files = [ROOT / "online" / "learning" / name for name in ("buffer.py", "rolling_files.py")]
    texts = [file.read_text() for file in files]
    counted = {reason for text in texts for reason in re.findall(r'counts\["(\w+)"\]', text)}
    assert "unknown_penalty" in counted
    assert counted <= {*DROP_REASONS}
    with Buffer(BufferConfig(), "a target") as buffer:
        buffer.append([(b"damaged", CorruptRecordError("torn"))], now_s=1.0)
        assert set(buffer.status().counts) <= set(DROP_REASONS)
    for reason in DROP_REASONS:
        assert value(Telemetry(), "redraft_dropped_records_total", reason=reason) == 0


# ---------------------------------------------------------------- rules and dashboard
def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    return json.loads((GRAFANA / "dashboard.json").read_text())


def expressions() -> list[str]:
    """Every PromQL expression we ship, with Grafana's variables filled in."""
    board = dashboard()
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    found += [annotation["expr"] for annotation in board["annotations"]["list"]]
    found += [rule["expr"] for rule in alerts()]
    return [
        re.sub(r"\$__\w+", "5m", expr).replace("$instance", ".*").replace("$server", ".*")
        for expr in found
    ]


def test_every_expression_asks_for_metrics_and_labels_that_exist(tmp_path: Path):
    _, telemetry = make_hour(tmp_path)
    scraped = samples(telemetry)
    names = {name for name, _ in scraped}
    labels = {label for _, pairs in scraped for label, _ in pairs} | {"instance"}
    assert len(expressions()) > 30
    for expr in expressions():
        expr = expr.replace("(up == 0", "(0")  # Prometheus sets this itself
        asked = re.findall(r"\bredraft_\w+", expr)
        assert asked, expr
        assert set(asked) <= names, expr
        asked_labels = re.findall(r"[{,]\s*(\w+)\s*=", expr)
        asked_labels += [
            name for group in re.findall(r"by \(([^)]*)\)", expr) for name in group.split(", ")
        ]
        assert set(asked_labels) <= labels, expr
        for label, wanted in re.findall(r'(\w+)=~?"([\w|]+)"', expr):
            there = {dict(pairs).get(label) for name, pairs in scraped if name in asked}
            assert set(wanted.split("|")) <= there, f"{label} is never {wanted} in {expr}"


def test_every_metric_is_on_the_dashboard(tmp_path: Path):
    _, telemetry = make_hour(tmp_path)
    shown = set(re.findall(r"\bredraft_\w+", " ".join(expressions())))
    for family in text_string_to_metric_families(generate_latest(telemetry.registry).decode()):
        names = {family.name, f"{family.name}_total", f"{family.name}_bucket"}
        assert (
            names & shown or family.name.endswith("_created") or family.name == "redraft_train_step"
        ), family.name


def test_panels_do_not_overlap_and_every_one_has_a_source():
    cells: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        its = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not its & cells, panel["title"]
        assert max(x for x, _ in its) < 24
        assert panel["datasource"]["uid"] == "${datasource}"
        cells |= its
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)


def test_every_alert_says_what_it_means():
    for rule in alerts():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert {"summary", "description"} <= set(rule["annotations"])


@promtool
def test_promtool_takes_every_expression_and_the_exposition(tmp_path: Path):
    assert PROMTOOL is not None
    rules = [
        {"record": f"test:e{number}", "expr": expr} for number, expr in enumerate(expressions())
    ]
    (tmp_path / "dashboard.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]})
    )
    for path in (tmp_path / "dashboard.yaml", GRAFANA / "alerts.yaml"):
        done = subprocess.run(
            [PROMTOOL, "check", "rules", path], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    _, telemetry = make_hour(tmp_path / "journal")
    text = generate_latest(telemetry.registry)
    done = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


QUIET = {
    'up{job="any",instance="one"}': "1x600",
    'up{job="other",instance="one"}': "0x600",
    'redraft_last_entry_timestamp_seconds{job="any",instance="one"}': "0+60x600",
    'redraft_phase{phase="halted"}': "0x600",
    'redraft_drafts_total{server="a"}': "0+600x600",
    'redraft_accepted_tokens_total{server="a"}': "0+1200x600",
    'redraft_server_draft_info{server="a",version="v1"}': "1x600",
    'redraft_server_draft_info{server="b",version="v1"}': "1x600",
    'redraft_swaps_total{outcome="swapped"}': "0x240 20x360",
    'redraft_swaps_total{outcome="rolled_back"}': "3x600",
    'redraft_swaps_total{outcome="refused"}': "0x600",
    'redraft_dropped_records_total{reason="evicted"}': "0+50x600",
    'redraft_dropped_records_total{reason="corrupt"}': "4x600",
    "redraft_skipped_records_total": "9x600",
    "redraft_lag_seconds": "5x600",
    "redraft_lag_records": "9x600",
    'redraft_failed_rounds_total{task="watch"}': "0x300 3x300",
    'redraft_current_faults{what="server_note"}': "1x600",
    'redraft_current_faults{what="server_unreachable"}': "_x300 1x10 _x290",
    'redraft_gate_verdicts_total{verdict="inconclusive"}': "0x60 0+1x540",
    'redraft_gate_verdicts_total{verdict="promote"}': "0x60 0+1x540",
    'redraft_gate_verdicts_total{verdict="reject"}': "0x600",
}
"""Ten hours of a working learner, one sample per minute."""

LAST = 'redraft_last_entry_timestamp_seconds{job="any",instance="one"}'

TROUBLE = {
    "RedraftDraftHardlyAccepted": {'redraft_accepted_tokens_total{server="a"}': "0+12x600"},
    "RedraftHalted": {'redraft_phase{phase="halted"}': "0x300 1x300"},
    "RedraftSilent": {LAST: "0+60x500 30000x100"},
    "RedraftFault": {'redraft_current_faults{what="disk_full"}': "_x500 1x100"},
    "RedraftTaskFails": {'redraft_failed_rounds_total{task="ingest"}': "_x500 1+60x100"},
    "RedraftRolledBack": {'redraft_swaps_total{outcome="rolled_back"}': "3x595 4x5"},
    "RedraftSwapRefused": {'redraft_swaps_total{outcome="refused"}': "0x595 1x5"},
    "RedraftFleetSplit": {
        'redraft_server_draft_info{server="b",version="v1"}': "1x300 stale",
        'redraft_server_draft_info{server="b",version="v2"}': "_x300 1x300",
    },
    "RedraftRecordsDropped": {'redraft_dropped_records_total{reason="corrupt"}': "4x595 6x5"},
    "RedraftBehindTraffic": {"redraft_skipped_records_total": "9x500 9+5x100"},
    "RedraftGateUndecided": {'redraft_gate_verdicts_total{verdict="promote"}': "7x600"},
}


def fired(changes: dict[str, str], folder: Path) -> set[str]:
    """The alerts firing at the end of ten hours, as evaluated by promtool."""
    assert PROMTOOL is not None
    folder.mkdir()
    series = [{"series": name, "values": values} for name, values in (QUIET | changes).items()]
    names = [rule["alert"] for rule in alerts() if "alert" in rule]
    tests = [{"interval": "1m", "input_series": series,
              "alert_rule_test": [{"eval_time": "10h", "alertname": name} for name in names]}]  # fmt: skip
    unit = {
        "rule_files": [str(GRAFANA / "alerts.yaml")],
        "evaluation_interval": "1m",
        "tests": tests,
    }
    (folder / "unit.yaml").write_text(yaml.safe_dump(unit))
    done = subprocess.run(
        [PROMTOOL, "test", "rules", folder / "unit.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    return set(re.findall(r"alertname:\s*(\w+)", done.stdout + done.stderr))


@promtool
def test_a_learner_that_works_raises_no_alert(tmp_path: Path):
    assert fired({}, tmp_path / "quiet") == set()


@promtool
def test_one_of_several_learners_that_cannot_be_scraped_is_missed(tmp_path: Path):
    another = {
        'up{job="any",instance="another"}': "1x500 0x100",
        LAST.replace("one", "another"): "0+60x500 stale",
    }
    assert fired(another, tmp_path / "one") == {"RedraftSilent"}


SWAPPED = 'redraft_swaps_total{outcome="swapped"}'
LAG_S, LAG = "redraft_lag_seconds", "redraft_lag_records"


@promtool
@pytest.mark.parametrize(
    ("changes", "is_behind"),
    [
        # Nothing is trained during a rollout.
        ({SWAPPED: "0+1x600", "redraft_skipped_records_total": "9+5x600"}, False),
        # Three records at night, or a learner that sleeps.
        ({LAG_S: "0+60x600", LAG: "3x600"}, False),
        ({LAG_S: "0+60x600", LAG: "100x600"}, False),
        # Training hangs.
        ({LAG_S: "5x480 5+60x120", LAG: "9x480 9+20x120"}, True),
    ],
)
def test_a_rollout_a_sleep_and_a_night_are_not_behind_the_traffic(
    tmp_path: Path, changes: dict[str, str], is_behind: bool
):
    assert fired(changes, tmp_path / "lag") == ({"RedraftBehindTraffic"} if is_behind else set())


@promtool
@pytest.mark.parametrize("alert", TROUBLE)
def test_an_alert_is_raised_by_its_trouble_and_by_nothing_else(tmp_path: Path, alert: str):
    assert fired(TROUBLE[alert], tmp_path / alert) == {alert}


@promtool
def test_an_alarm_that_fails_whenever_it_may_run_is_told(tmp_path: Path):
    every_ten_minutes = " ".join(f"{count}x9" for count in range(1, 13))
    failures = {'redraft_failed_rounds_total{task="alarm"}': f"_x479 {every_ten_minutes}"}
    assert fired(failures, tmp_path / "alarm") == {"RedraftTaskFails"}


def test_every_alert_has_its_trouble():
    assert {rule["alert"] for rule in alerts() if "alert" in rule} == set(TROUBLE)


# ---------------------------------------------------------------- Weights & Biases
@pytest.mark.parametrize(
    ("content", "mode"),
    [
        (None, "offline"),
        ("machine github.com login a password b\n", "offline"),
        ("machine api.wandb.ai login user password key\n", None),
        ("machine\n", "offline"),
        ("\xff\xfe", "offline"),
    ],
)
def test_wandb_is_offline_unless_netrc_has_its_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, mode: str | None
):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    if content is not None:
        (tmp_path / ".netrc").write_bytes(content.encode("latin-1"))
        (tmp_path / ".netrc").chmod(0o600)
    write_offline_unless_logged_in()
    assert os.environ.get("WANDB_MODE") == mode
    os.environ.pop("WANDB_MODE", None)


def test_wandb_offline_gets_every_number_and_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for timeout in ("WANDB_INIT_TIMEOUT", "WANDB_X_SERVICE_WAIT"):
        monkeypatch.setenv(timeout, "300")  # a busy machine is slow, not wrong
    journal = Journal(tmp_path / "journal", [to_wandb("redraft", tmp_path / "wandb")])
    journal.write(TrainingEntry(step=3, loss=0.5, alpha=0.625, records_seen=8))
    journal.write(StateEntry(phase="halted", reason="the disk is full"))
    journal.write(
        AcceptanceEntry(server="http://a:1", draft_version="v000001", drafts=4, accepted=6, tau=2.5)
    )
    summary = dict(wandb.run.summary)
    wandb.finish()
    assert summary["training/alpha"] == 0.625
    assert summary["acceptance/http://a:1/tau"] == 2.5
    assert not any("reason" in key for key in summary)
    (written,) = (tmp_path / "wandb").rglob("*.wandb")
    deadline = time.monotonic() + 600
    while b"training/alpha" not in written.read_bytes():  # wandb's process writes the file
        assert time.monotonic() < deadline, f"{written} lacks the training's numbers"
        time.sleep(0.2)


def test_a_sleeping_learner_tells_its_staleness_and_the_steps_it_saved(tmp_path: Path):
    telemetry = Telemetry()
    journal = Journal(tmp_path, observers=[telemetry.observe])
    numbers = {
        "tau_then": 2.0,
        "tau_now": 1.9,
        "loss": 0.1,
        "low": -0.05,
        "high": 0.25,
        "requests": 60,
    }
    journal.write(StalenessEntry(version="v000002", is_asleep=True, steps_saved=48, **numbers))
    text = generate_latest(telemetry.registry).decode()
    assert 'redraft_staleness_tokens{bound="mean"} 0.1' in text
    assert 'redraft_staleness_tokens{bound="low"} -0.05' in text
    assert "redraft_asleep 1.0" in text
    assert "redraft_saved_steps 48.0" in text
