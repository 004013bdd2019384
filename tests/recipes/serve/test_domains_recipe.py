"""`redraft data domains` and `redraft router` as their user runs them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from redraft.online.settings import read_toml
from redraft.online.traffic.domains import Clusters
from redraft.online.traffic.router import RouterConfig
from redraft.recipes.cli.run import dispatch


def make_prompts(path, *, with_labels=True):
    """Two kinds of prompts that nobody could mix up."""
    rows = [
        {"prompt": f"def f{n}(self): return self.value_{n}", "topic": "code"} for n in range(60)
    ]
    rows += [
        {"prompt": f"Tell me a tale of {n} bears in the woods.", "topic": "tales"}
        for n in range(30)
    ]
    path.write_text(
        "".join(
            json.dumps(row if with_labels else {"prompt": row["prompt"]}) + "\n" for row in rows
        )
    )
    return str(path)


def test_it_says_how_large_and_how_pure_the_domains_are(tmp_path, capsys):
    data, output = make_prompts(tmp_path / "prompts.jsonl"), str(tmp_path / "domains")
    flags = ["--held-out", "0.3", "--domain-column", "topic"]
    assert dispatch(["data", "domains", "--prompts", data, "--output", output, *flags]) == 0
    said = capsys.readouterr().out
    assert "e.g. Tell me a tale of" in said
    assert "100.0% code" in said
    assert "purity: 100.0%" in said
    assert Clusters.read(tmp_path / "domains").names == ("code", "tales")
    assert dispatch(["data", "domains", "--prompts", data, "--output", output]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (
        dispatch(
            [
                "data",
                "domains",
                "--prompts",
                data,
                "--output",
                output,
                "--overwrite",
                "--num-domains",
                "3",
            ]
        )
        == 0
    )
    assert len(Clusters.read(tmp_path / "domains").names) == 3


def test_without_labels_it_says_nothing_of_purity(tmp_path, capsys):
    data = make_prompts(tmp_path / "prompts.jsonl", with_labels=False)
    assert (
        dispatch(["data", "domains", "--prompts", data, "--output", str(tmp_path / "domains")]) == 0
    )
    said = capsys.readouterr().out
    assert "domain-0" in said
    assert "purity" not in said


def test_the_printed_settings_can_be_read_back(tmp_path, capsys):
    assert dispatch(["router", "--print-config"]) == 0
    (tmp_path / "router.toml").write_text(capsys.readouterr().out)
    (tmp_path / "fleet.toml").write_text("")
    read = read_toml(
        tmp_path / "router.toml", RouterConfig, ['aliases.m-code="code"', "tap.logprobs=5"]
    )
    assert read.fleet == tmp_path / "fleet.toml"
    assert (read.aliases, read.tap.logprobs, read.tap.is_on) == ({"m-code": "code"}, 5, False)


def test_a_router_loads_neither_torch_nor_what_clusters_are_made_with():
    heavy = {"torch", "scipy", "transformers"}
    code = f"import sys, redraft.online.traffic.router; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "redraft router --print-config"),
        ('fleet = "absent.toml"', "absent.toml"),
        ('fleet = "fleet.toml"\nclusters = "absent"', "was not published by redraft"),
        ('fleet = "fleet.toml"\nclusters = "fleet.toml"', "fleet.toml"),
        ('fleet = "fleet.toml"\nprot = 1', "did you mean port?"),
        ('fleet = "fleet.toml"\n[tap]\nspool = "spool"', "set target to the folder of the model"),
        ('fleet = "fleet.toml"\n[aliases]\nm = "a\\nb"', "cannot be a domain"),
        ('fleet = "empty.toml"', "lists no servers"),
        ('fleet = "odd.toml"', "'10.0.0.5:8000' is not the address of a server"),
        ('fleet = "fleet.toml"\npoll_s = 0', "poll_s"),
    ],
)
def test_a_mistake_is_told_in_one_line(tmp_path, capsys, config, message):
    (tmp_path / "fleet.toml").write_text('[[servers]]\nurl = "http://127.0.0.1:1"\n')
    (tmp_path / "empty.toml").write_text("servers = []")
    (tmp_path / "odd.toml").write_text('[[servers]]\nurl = "10.0.0.5:8000"\n')
    if config is not None:
        (tmp_path / "router.toml").write_text(config)
    assert dispatch(["router", "--config", str(tmp_path / "router.toml")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
