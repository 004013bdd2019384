"""Write the sources of the documentation site: `make docs` builds outputs/site/html from them.

    README.md, docs/*.md, ...   the pages; their links to code lead to copies of the files
    commands.md                 `--help-all` of every command
    settings.md                 every key of the settings files, with its default
    api/*.md                    the docstrings of the public modules, read by mkdocstrings

$ python docs/build_site.py outputs/site
$ python docs/build_site.py --finish outputs/site/html     # after the build: search without a network
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from redraft.files.settings import render_example
from redraft.heads.catalog import list_trained
from redraft.online.daemon.config import LearnerConfig
from redraft.online.traffic.tap import TapConfig
from redraft.recipes.cli.commands import COMMANDS, list_recipes
from redraft.recipes.cli.run import dispatch

ROOT = Path(__file__).resolve().parents[1]

GUIDES = {
    "Home": ["README.md"],
    "Start": ["docs/start.md", "docs/tutorial.md"],
    "Decide": ["docs/decide.md", "docs/evaluation.md", "docs/bench.md", "docs/doctor.md"],
    "Train": [
        "docs/fine-tune.md", "docs/training.md", "docs/several-gpus.md", "docs/agents.md", "docs/lookups.md",
    ],
    "Learn from traffic": [
        "docs/online.md", "docs/recording.md", "docs/tap.md", "docs/rl.md", "docs/fleet.md",
    ],
    "Operate": ["docs/pace.md", "docs/runbook.md", "docs/capacity.md", "recipes/deploy/kubernetes/README.md"],
    "Reference": ["docs/engines.md", "docs/reference.md", "docs/glossary.md"],
    "Evidence": ["docs/measurements.md", "docs/proof.md"],
    "Trust": ["docs/threat-model.md", "SECURITY.md", "docs/privacy.md", "docs/licences.md"],
    "Project": ["ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"],
}  # fmt: skip

PUBLIC = {
    "Drafts": ["heads.draft", "heads.family", "heads.catalog", "heads.target", "heads.options"],
    "Files": [
        "files.artifact",
        "files.folder",
        "files.target_folder",
        "files.gguf",
    ],
    "Losses": ["distill.loss.choice", "distill.loss.outcomes", "distill.loss.fused"],
    "Training": [
        "distill.train.run_config",
        "distill.run.training_run",
        "distill.train.optim",
        "distill.signal.sources",
    ],
    "Measuring": ["eval.acceptance", "engine.counts", "eval.intervals", "eval.forecast.greedy"],
    "Records": [
        "online.records.record",
        "online.records.spool",
        "online.fleet.registry",
        "online.learning.gate",
    ],
}
"""Titles and modules of the API reference."""

SHIM = "https://unpkg.com/iframe-worker/shim"
"""The script by which pages opened from a folder can search."""

STYLE = """/* Tables use a wide window, and diagrams of 98 characters fit a narrow one. */
@media (min-width: 76.25em) { .md-grid { max-width: min(76rem, 100vw - 2.4rem); } }
.md-typeset pre > code { font-size: 0.72em; }
/* Commands and comments wrap; diagrams and outputs do not. */
.md-typeset :is(.language-bash, .language-toml) pre > code { white-space: pre-wrap; }
/* A table without a head has no bar. */
.md-typeset table:not([class]) th { min-width: 3rem; }
.md-typeset table:not([class]) :is(th, td) { padding: 0.7em 0.9em; }
.md-typeset thead:not(:has(th:not(:empty))) { display: none; }
/* Long names are broken only after _ and /, and flags at their hyphens only in a narrow table. */
.md-typeset :is(th, td) code { word-break: normal; overflow-wrap: normal; }
.flag { white-space: nowrap; }
@media (max-width: 44.9em) { :is(th, td) .flag { white-space: normal; } }
@media (min-width: 45em) {
  .md-typeset td:first-child code { white-space: nowrap; }
  td:first-child code wbr { display: none; }
}
/* A heading's link stays on the heading's last line. */
.md-typeset .headerlink { margin-right: -2em; }
/* Every name in a class or module is an attribute. */
.doc-label:is(.doc-label-class-attribute, .doc-label-instance-attribute, .doc-label-module-attribute) {
  display: none;
}
.doc-label code { color: inherit; }
"""

FLAG_OR_LONG = re.compile(r"(?<![\w/])(?P<flag>--?[a-z][\w.-]*)|\S{18,}")
BREAK_AFTER = re.compile(r"[_/](?=\w)")
INLINE_CODE = re.compile(r"(?<!<pre>)<code>([^<]*)</code>")
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def main(folder: Path) -> None:
    """Write pages and configuration into `folder`.

    Raises:
        FileNotFoundError: a page links to a file that does not exist.
    """
    pages = folder / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir(parents=True)
    for picture in ROOT.glob("docs/*.[ps][nv]g"):
        (pages / "docs").mkdir(exist_ok=True)
        shutil.copy(picture, pages / "docs")
    known = {name for names in GUIDES.values() for name in names}
    for name in known:
        _write(
            pages / _page(name),
            LINK.sub(lambda link, name=name: _lead(link, name, known, pages), _read(name)),
        )
    _write(pages / "site.css", STYLE)
    _write(pages / "commands.md", "\n".join(_commands()))
    _write(pages / "settings.md", "\n".join(_settings()))
    for title, modules in PUBLIC.items():
        lines = [f"# {title}", *(f"\n::: redraft.{module}" for module in modules)]
        _write(pages / f"api/{title.lower()}.md", "\n".join(lines))
    (folder / "zensical.toml").write_text(_configuration())


def finish(html: Path) -> None:
    """Replace the address of `SHIM` in every page with its copy in docs/, and mark breaks in code.

    Raises:
        RuntimeError: a page still loads it from the network.
    """
    script = _read("docs/iframe-worker.js")
    for page in html.rglob("*.html"):
        text = page.read_text().replace(f' src="{SHIM}" type="text/javascript">', f">{script}")
        if f'"{SHIM}"' in text:
            raise RuntimeError(f"{page} loads {SHIM}")
        page.write_text(INLINE_CODE.sub(_mark_breaks, text))


def _mark_breaks(code: re.Match[str]) -> str:
    """Return inline code whose flags stay in one piece, and whose long names may break after _ and /."""

    def mark(part: re.Match[str]) -> str:
        if part["flag"]:
            return f'<span class="flag">{part[0]}</span>'
        return BREAK_AFTER.sub(r"\g<0><wbr>", part[0])

    return f"<code>{FLAG_OR_LONG.sub(mark, code[1])}</code>"


def _read(name: str) -> str:
    return (ROOT / name).read_text()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _page(name: str) -> str:
    return "index.md" if name == "README.md" else name


def _lead(link: re.Match[str], name: str, known: set[str], pages: Path) -> str:
    """The link, which leads to another page or to the copy of a file."""
    before, goal, anchor, after = link.groups()
    if ":" in goal:
        return link.group()
    path = (ROOT / name).parent.joinpath(goal).resolve()
    there = path.relative_to(ROOT).as_posix()
    if not path.exists():
        raise FileNotFoundError(f"{name} links to {goal}, which does not exist")
    if there not in known and path.suffix not in {".png", ".svg"}:
        there = _copy(path, pages)
    relative = os.path.relpath(_page(there), Path(_page(name)).parent)
    return f"{before}{relative}{anchor or ''}{after}"


def _copy(path: Path, pages: Path) -> str:
    """The page with the text of a file, or the list of a folder."""
    name = path.relative_to(ROOT).as_posix()
    page = f"source/{name}.md"
    if path.is_dir():
        files = sorted(
            file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()
        )
        text = "\n".join(f"- `{file}`" for file in files if "__pycache__" not in file)
    else:
        text = (
            f"````{path.suffix.removeprefix('.').replace('py', 'python')}\n{path.read_text()}\n````"
        )
    _write(pages / page, f"# {name}\n\n{text}")
    return page


def _commands() -> Iterator[str]:
    """The lines of the command reference."""
    yield "# Commands\nEvery command with all of its flags, as `--help-all` prints them."
    for name, _ in list_recipes():
        words = name.split()
        names = [[*words, family] for family in list_trained()] if name == "train" else [words]
        summary = (
            COMMANDS[words[0]].parts[words[1]].summary if words[1:] else COMMANDS[words[0]].summary
        )
        yield f"\n## redraft {name}\n\n{summary}."
        for each in names:
            if len(names) > 1:
                yield f"\n### redraft {' '.join(each)}"
            yield f"\n```text\n{_help(each)}\n```"


def _settings() -> Iterator[str]:
    """The lines of the reference of settings files."""
    yield "# Settings\nEvery key of the settings files, with its default and its meaning."
    for title, config in {"learner.toml": LearnerConfig, "tap.toml": TapConfig}.items():
        yield f"\n## {title}\n\n```toml\n{render_example(config)}\n```"


def _help(words: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        dispatch([*words, "--help-all"])
    return text.getvalue().strip().replace("```", "'''")


def _configuration() -> str:
    sections = {
        **GUIDES,
        "Commands and settings": ["commands.md", "settings.md"],
        "API": [f"api/{title.lower()}.md" for title in PUBLIC],
    }
    lines = []
    for title, names in sections.items():
        pages = ", ".join(f'"{_page(name)}"' for name in names)
        lines.append(f'  {{"{title}" = {pages if len(names) == 1 else f"[{pages}]"}}},')
    nav = "\n".join(lines)
    return f'''[project]
site_name = "redraft"
site_description = "Draft models for speculative decoding, trained and kept trained"
docs_dir = "pages"
site_dir = "html"
use_directory_urls = false
extra_css = ["site.css"]
nav = [
{nav}
]

[project.theme]
font = false
features = ["content.code.copy", "navigation.footer", "navigation.top", "toc.follow"]

# The pictures follow the system's colours, so the pages do too, without a switch. The first
# palette stands for the other two; without it, the first visit would decide for good.
[[project.theme.palette]]
media = "(prefers-color-scheme)"

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"

[project.plugins.offline]

[project.plugins.mkdocstrings.handlers.python]
paths = ["{ROOT}"]

[project.plugins.mkdocstrings.handlers.python.options]
docstring_style = "google"
docstring_section_style = "list"
show_source = false
show_root_heading = true
members_order = "source"
'''


if __name__ == "__main__":
    finish(Path(sys.argv[2])) if sys.argv[1] == "--finish" else main(Path(sys.argv[1]))
