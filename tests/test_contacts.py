"""Redraft connects to nobody whom the user has not named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("redraft/engine", "redraft/files", "heads", "eval", "distill", "online", "recipes")
FOREIGN = re.compile(r"\w+://(?:[\w-]+\.)+[a-z]{2,}")
KNOWN = {
    "https://json-schema.org",  # the name of a format
    "https://api.wandb.ai",  # the key of a login in netrc; asked for with --wandb only
    "http://vllm.default.svc",  # an example in an error
}


def find_hosts(source: str) -> set[str]:
    """Addresses of hosts in strings of the code, docstrings aside."""
    tree = ast.parse(source)
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told
    )
    return {host for text in strings for host in FOREIGN.findall(text)}


def test_the_code_names_no_host_of_others() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 200
    assert set().union(*(find_hosts(path.read_text()) for path in files)) == KNOWN


def test_a_host_in_the_code_is_found() -> None:
    source = 'def f():\n    """See https://docs.example.com."""\n    post(f"https://stats.example.com/{x}")'
    assert find_hosts(source) == {"https://stats.example.com"}
