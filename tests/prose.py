"""Find the words in docstrings, comments and documents that are wrong in any text.

    python tests/prose.py     prints every such line; exit status 1 if there is one

Everything else about prose is for a reader to judge, not for a count.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("distill", "eval", "heads", "online", "recipes", "redraft/engine", "redraft/files")

WRONG = re.compile(
    r"\bcan not\b|\bfor ever\b|\banew\b|\bhas not\b(?= (a|any|the)\b)", re.IGNORECASE
)

WRONG_OPENING = re.compile(r"(What|Whose|Of|Where|Return where|Returns where|Returns if)\b")
"""No docstring begins with these: it names the thing first."""

CODE = re.compile(r"`[^`]*`|```.*?```|https?://\S+", re.DOTALL)


def read_passages(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, text, whether it is a docstring) of the prose in a Python or Markdown file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        plain = CODE.sub(lambda code: "\n" * code[0].count("\n"), source)
        yield from ((number, line, False) for number, line in enumerate(plain.splitlines(), 1))
        return
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def find_wrong(path: Path) -> Iterator[str]:
    """`file:line: text` for every passage with a wrong word or opening."""
    for number, text, is_docstring in read_passages(path):
        opens_badly = is_docstring and WRONG_OPENING.match(text)
        if opens_badly or WRONG.search(CODE.sub(" ", text)):
            yield f"{path}:{number}: {text.strip().splitlines()[0][:120]}"


def list_files(root: Path) -> list[Path]:
    """The Python files of the packages and all Markdown files that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md"], cwd=root, capture_output=True, text=True, check=True
    )
    names = [Path(name) for name in listed.stdout.splitlines()]
    wanted = (
        name
        for name in names
        if name.suffix == ".md" or name.as_posix().startswith(tuple(f"{one}/" for one in PACKAGES))
    )
    return [root / name for name in wanted if (root / name).is_file()]


if __name__ == "__main__":
    found = [line for path in list_files(Path(__file__).parents[1]) for line in find_wrong(path)]
    print("\n".join(found) or "no wrong words")
    sys.exit(1 if found else 0)
