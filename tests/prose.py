"""Check that the prose of the house stays plain English: a few tell-tale words per thousand, and openings to avoid.

    python tests/prose.py                     totals against the limits; exit status 1 above any of them
    python tests/prose.py --worst 20          the files with the most hits
    python tests/prose.py heads/draft.py ...  every hit of these files, with its line

Prose is every docstring and comment of the five packages, and every Markdown file. The limits for both are twice the
mean rate of four well-read code bases of the field (nanochat, speculators, prime-rl, SpecForge).
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("distill", "eval", "heads", "online", "recipes")

MAX_PER_THOUSAND = {
    r"where": 1.7,
    r"what": 0.7,
    r"that": 8.9,
    r"its|their": 5.5,
    r"own": 1.2,
    r"behind": 0.4,
}
"""Highest rate of a word, per thousand words of prose."""

MAX_IN_DOCUMENTS = {
    r"of": 20,
    r"\w+'s": 7.5,
    r"(?:those|that) of": 0.1,
    r"tells?|told": 0.15,
    r"goes on|go on": 0.1,
    r"(?:so|as) many": 0.3,
    r"holds": 0.7,
}
"""The same for Markdown, against English that sounds translated: an alarm, not a goal. Write a noun before a noun."""

MAX_IN_CODE = {r"of": 44, r"\w+'s": 14.8, r"(?:those|that) of": 1.2, r"tells?|told": 0.55, r"goes on|go on": 0.25}
"""The same for docstrings and comments, at the rates of today: they only fall."""

FORBIDDEN_OPENING = re.compile(r"(What|Whose|Of|Where|Return where|Returns where|Returns if)\b")
"""No docstring begins so: name the thing first."""

FORBIDDEN = re.compile(r"\bcan not\b|\bfor ever\b|\banew\b", re.IGNORECASE)

CODE = re.compile(r"`[^`]*`|```.*?```|https?://\S+", re.DOTALL)


@dataclass(frozen=True)
class Passage:
    """One docstring, comment or paragraph."""

    path: Path
    line: int
    text: str
    is_docstring: bool = False


def read_passages(path: Path) -> Iterator[Passage]:
    """The prose of a Python or Markdown file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        fenced = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), source, flags=re.DOTALL)
        for number, line in enumerate(fenced.splitlines(), 1):
            yield Passage(path, number, line)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Passage(path, node.lineno, node.value.value, is_docstring=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Passage(path, token.start[0], token.string)


def count_words(passages: Sequence[Passage]) -> int:
    return sum(len(re.findall(r"[A-Za-z']+", CODE.sub(" ", passage.text))) for passage in passages)


def count_hits(passages: Sequence[Passage], pattern: str) -> int:
    found = re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE)
    return sum(len(found.findall(CODE.sub(" ", passage.text))) for passage in passages)


def find_forbidden(passages: Sequence[Passage]) -> Iterator[str]:
    """Openings and spellings that are never right, as `file:line: text`."""
    for passage in passages:
        opens_badly = passage.is_docstring and FORBIDDEN_OPENING.match(passage.text)
        if opens_badly or FORBIDDEN.search(CODE.sub(" ", passage.text)):
            yield f"{passage.path}:{passage.line}: {passage.text.strip().splitlines()[0][:120]}"


def list_files(root: Path) -> list[Path]:
    """Python files of the packages and Markdown files, as git tracks them."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=root, capture_output=True, text=True, check=True)
    names = (Path(name) for name in listed.stdout.splitlines())
    wanted = (name for name in names if name.suffix == ".md" or name.parts[0] in PACKAGES)
    return [root / name for name in wanted if (root / name).is_file()]


def print_hits(passages: Sequence[Passage]) -> None:
    for passage in passages:
        words = re.compile(rf"\b(?:{'|'.join(limits_of(passage.path))})\b", re.IGNORECASE)
        for offset, line in enumerate(passage.text.splitlines() or [""]):
            if words.search(CODE.sub(" ", line)):
                print(f"{passage.path}:{passage.line + offset}: {line.strip()}")


def limits_of(path: Path) -> dict[str, float]:
    """Every limit that a file counts for."""
    return MAX_PER_THOUSAND | (MAX_IN_DOCUMENTS if path.suffix == ".md" else MAX_IN_CODE)


def print_worst(passages: Sequence[Passage], number: int) -> None:
    by_file: dict[Path, list[Passage]] = {}
    for passage in passages:
        by_file.setdefault(passage.path, []).append(passage)
    hits = {path: sum(count_hits(some, word) for word in limits_of(path)) for path, some in by_file.items()}
    for path in sorted(hits, key=lambda path: -hits[path])[:number]:
        print(f"{hits[path]:5} hits in {count_words(by_file[path]):6} words  {path}")


def check_rates(title: str, passages: Sequence[Passage], limits: dict[str, float]) -> bool:
    """Print every rate beside its limit; return whether all are within."""
    words = count_words(passages)
    is_well = True
    print(f"{words:,} words of {title}, hits per thousand:")
    for word, limit in limits.items():
        rate = 1000 * count_hits(passages, word) / max(words, 1)
        is_well &= rate <= limit
        print(f"  {word:18} {rate:6.2f}  (at most {limit}){'' if rate <= limit else '  TOO MANY'}")
    return is_well


def check(passages: Sequence[Passage]) -> bool:
    """Print every rate beside its limit, and every forbidden opening; return whether all is well."""
    documents = [passage for passage in passages if passage.path.suffix == ".md"]
    code = [passage for passage in passages if passage.path.suffix != ".md"]
    is_well = check_rates("prose", passages, MAX_PER_THOUSAND)
    is_well &= check_rates("documents", documents, MAX_IN_DOCUMENTS)
    is_well &= check_rates("code", code, MAX_IN_CODE)
    forbidden = list(find_forbidden(passages))
    for line in forbidden[:20]:
        print(line)
    if forbidden:
        print(f"{len(forbidden)} passages begin or spell something as plain English does not")
    return is_well and not forbidden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="print every hit of these files instead")
    parser.add_argument("--worst", type=int, default=0, help="list this many files with the most hits")
    args = parser.parse_args()
    root = Path(__file__).parents[1]
    passages = [passage for path in args.files or list_files(root) for passage in read_passages(path)]
    if args.worst:
        print_worst(passages, args.worst)
    if args.files:
        print_hits(passages)
    sys.exit(0 if check(passages) else 1)


if __name__ == "__main__":
    main()
