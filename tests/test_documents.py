"""The documents name files, commands and make targets that exist."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import pytest

from redraft.online.daemon.config import load_config
from redraft.recipes.cli.commands import COMMANDS

ROOT = Path(__file__).parents[1]
LISTED = subprocess.run(
    ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()
DOCUMENTS = [ROOT / name for name in LISTED if (ROOT / name).is_file()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file(document):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not missing


def list_anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_anchor_leads_to_a_heading(document):
    links = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", document.read_text())
    missing = [
        link for link in links if link[1] not in list_anchors(document.parent / link[0] if link[0] else document)
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


def test_every_make_target_in_the_documents_exists():
    text = "\n".join(map(read_code, DOCUMENTS))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE))
    assert len(named) > 5
    assert named <= targets, named - targets


def test_every_recipe_in_the_documents_exists():
    text = "\n".join(map(read_code, DOCUMENTS))
    named = {name for name in re.findall(r"\brecipes/[\w/-]+\.(?:py|yaml)", text) if "NAME" not in name}
    assert len(named) > 2
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_every_test_that_a_document_names_exists():
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    tests = {name for source in sources for name in re.findall(r"^(?:async )?def (test_\w+)", source, re.MULTILINE)}
    named = {name for document in DOCUMENTS for name in re.findall(r"`(test_\w+)`", document.read_text())}
    assert len(named) > 30
    assert named <= tests, named - tests


def test_every_page_and_module_of_the_site_exists():
    site = runpy.run_path(str(ROOT / "docs/build_site.py"))
    pages = [name for names in site["GUIDES"].values() for name in names]
    modules = [f"{name.replace('.', '/')}.py" for names in site["PUBLIC"].values() for name in names]
    assert not [name for name in [*pages, *modules] if not (ROOT / name).is_file()]
    assert {path.name for path in ROOT.glob("docs/*.md")} <= {Path(page).name for page in pages}


def test_the_documents_stay_short():
    readme, changelog = ((ROOT / name).read_text() for name in ("README.md", "CHANGELOG.md"))
    guides = [path.read_text() for path in ROOT.glob("docs/*.md")]
    assert len(readme.splitlines()) <= 120
    assert len(readme.partition("```bash")[0].splitlines()) < 25
    assert len(changelog.splitlines()) <= 60
    assert sum(len(text.split()) for text in (readme, changelog, *guides)) <= 23_000


@pytest.mark.parametrize("name", ["README.md", "docs/tutorial.md"])
def test_the_learner_reads_the_settings_in_the_documents(name, tmp_path):
    (written,) = re.findall(
        r"^cat > learner.toml <<'END'\n(.*?)^END$", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "learner.toml").write_text(written)
    config = load_config(tmp_path / "learner.toml")
    assert config.fleet.servers
    assert config.fleet.token_file
