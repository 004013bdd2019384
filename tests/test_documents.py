"""The documents name files, commands and make targets that exist."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from redraft.heads.families.eagle3 import Config, Eagle3
from redraft.heads.target import Target
from redraft.online.daemon.account import Account
from redraft.online.daemon.config import load_config
from redraft.online.engine.pace_status import PaceMetrics
from redraft.online.journal import Journal
from redraft.online.page.telemetry import Telemetry
from redraft.online.records.guard import Guard
from redraft.recipes.cli.commands import COMMANDS, list_recipes
from redraft.recipes.cli.run import find_recipe, parse_recipe

ROOT = Path(__file__).parents[1]
LISTED = subprocess.run(
    ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()
DOCUMENTS = [ROOT / name for name in LISTED if (ROOT / name).is_file()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file(document):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
    missing = [
        link for link in links if "://" not in link and not (document.parent / link).exists()
    ]
    assert not missing


def list_anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub writes them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_anchor_leads_to_a_heading(document):
    links = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", document.read_text())
    missing = [
        link
        for link in links
        if link[1] not in list_anchors(document.parent / link[0] if link[0] else document)
    ]
    assert not missing


def read_code(document: Path) -> str:
    """The fenced blocks of a document, and every span of code in backticks on a line."""
    text = document.read_text()
    fenced = re.findall(r"^```.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*fenced, *re.findall(r"`([^`\n]+)`", text)])


def test_every_command_in_the_documents_exists():
    text = "\n".join(map(read_code, DOCUMENTS))
    named = set(re.findall(r"^redraft ([a-z][a-z0-9-]*)", text, re.MULTILINE))
    assert len(named) > 10
    assert named <= COMMANDS.keys(), named - COMMANDS.keys()
    parts = set(re.findall(r"^redraft fleet ([a-z-]+)", text, re.MULTILINE))
    assert parts
    assert parts <= COMMANDS["fleet"].parts.keys()


def list_commands() -> Iterator[tuple[str, ...]]:
    """The words of each `redraft` command in fenced blocks and in the help.

    Those of each launch of one are included.
    """
    blocks = "\n".join(
        code
        for document in DOCUMENTS
        for code in re.findall(r"^```bash\n(.*?)^```", document.read_text(), re.M | re.S)
    )
    examples = [
        each.example for command in COMMANDS.values() for each in (command, *command.parts.values())
    ]
    for _, module in list_recipes():
        for name in filter(importlib.util.find_spec, (module, f"{module}_config")):
            text = importlib.import_module(name).__doc__ or ""
            examples += re.findall(r"^ *\$ (.*)$", text.replace("\\\n", " "), re.MULTILINE)
    for line in [*blocks.replace("\\\n", " ").splitlines(), *examples]:
        if found := re.match(
            r"\s*(?:[A-Z_]+=(?:\$\(\(.*?\)\)|\S+) )*(redraft|accelerate launch) (.*)", line
        ):
            words = shlex.split(re.split(r" (?:2?>|&|\|)", found[2])[0], comments=True)
            if found[1] == "redraft":
                yield tuple(words)
            elif "recipes/train.py" in words:
                yield ("train", *words[words.index("recipes/train.py") + 1 :])
            elif "redraft.recipes.cli" in words:
                yield tuple(words[words.index("redraft.recipes.cli") + 1 :])


@pytest.mark.parametrize("words", sorted(set(list_commands())), ids=" ".join)
def test_every_command_in_the_documents_is_read(words, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    if words[0] == "adapt":  # reads the draft first
        target = Target.from_folder(request.getfixturevalue("random_target"))
        Eagle3(Config(aux_layer_ids=(0, 1, 2)), target).export(tmp_path / words[1])
    if words[0] == "train" and "--config" in words:
        Path(words[words.index("--config") + 1]).touch()
    code: object = 0
    try:
        parse_recipe(*find_recipe(words[0], words[1:]))
    except SystemExit as ended:  # after --help and --print-config
        code = ended.code
    assert code == 0


def test_every_make_target_in_the_documents_exists():
    text = "\n".join(map(read_code, DOCUMENTS))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE))
    assert len(named) > 5
    assert named <= targets, named - targets


def test_every_recipe_in_the_documents_exists():
    text = "\n".join(map(read_code, DOCUMENTS))
    named = {
        name for name in re.findall(r"\brecipes/[\w/-]+\.(?:py|yaml)", text) if "NAME" not in name
    }
    assert len(named) > 2
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_every_test_that_a_document_names_exists():
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    tests = {
        name
        for source in sources
        for name in re.findall(r"^(?:async )?def (test_\w+)", source, re.MULTILINE)
    }
    named = {
        name for document in DOCUMENTS for name in re.findall(r"`(test_\w+)`", document.read_text())
    }
    assert len(named) > 30
    assert named <= tests, named - tests


def test_the_reference_lists_every_metric_and_route(tmp_path):
    registry = CollectorRegistry()
    PaceMetrics(registry)
    metrics = [*Telemetry().registry.collect(), *registry.collect(), *Guard().collect()]
    metrics += Account(Journal(tmp_path)).collect()
    text = (ROOT / "docs/reference.md").read_text()
    assert set(re.findall(r"`(redraft_[a-z_]+)`", text)) == {
        f"{metric.name}{'_total' if metric.type == 'counter' else ''}" for metric in metrics
    }
    routes = (ROOT / "online/engine/routes.py").read_text()
    assert set(re.findall(r"`(?:GET|POST) (/redraft/[a-z]+)`", text)) == set(
        re.findall(r'add_api_route\("(/redraft/[a-z]+)"', routes)
    )


def test_every_page_and_module_of_the_site_exists():
    site = runpy.run_path(str(ROOT / "docs/build_site.py"))
    pages = [name for names in site["GUIDES"].values() for name in names]
    modules = [
        f"redraft/{name.replace('.', '/')}.py"
        for names in site["PUBLIC"].values()
        for name in names
    ]
    assert not [name for name in [*pages, *modules] if not (ROOT / name).is_file()]
    assert {path.name for path in ROOT.glob("docs/*.md")} <= {Path(page).name for page in pages}


@pytest.mark.parametrize("name", ["docs/rl.md", "docs/tutorial.md"])
def test_the_learner_reads_the_settings_in_the_documents(name, tmp_path):
    (written,) = re.findall(
        r"^cat > learner.toml <<'END'\n(.*?)^END$",
        (ROOT / name).read_text(),
        re.MULTILINE | re.DOTALL,
    )
    (tmp_path / "learner.toml").write_text(written)
    config = load_config(tmp_path / "learner.toml")
    assert config.fleet.servers
    assert config.fleet.token_file
