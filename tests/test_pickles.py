"""No file that redraft reads may run code: no pickle, no unsafe loader, in any of our files."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "jsonpickle",
}
LOADERS = {"read_pickle", "unsafe_load", "full_load", "unsafe_load_all"}
NAMES = {"load": {"yaml.load"}, "load_all": {"yaml.load_all"}, "eval": {"eval"}, "exec": {"exec"}}
ASKS = "from_pretrained without trust_remote_code=False: transformers would ask on the terminal"
SWITCHES = {"weights_only", "allow_pickle", "trust_remote_code"}
EXCEPT = {"distill/train/unpickle.py", "tests/distill/train/test_unpickle.py"}
"""The restricted unpickler, and its test, which attacks it."""


def find_loaders(source: str) -> Iterator[tuple[int, str]]:
    """(line, reason) of everything in `source` that can run code from a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = {alias.name.partition(".")[0] for alias in node.names} & MODULES
            yield from ((node.lineno, f"import {name}") for name in found)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] in MODULES:
                yield node.lineno, f"from {node.module}"
            if node.module == "torch" and any(alias.name == "load" for alias in node.names):
                yield node.lineno, "from torch import load"
        elif isinstance(node, ast.Call):
            yield from _judge(node)


def _judge(call: ast.Call) -> Iterator[tuple[int, str]]:
    last = getattr(call.func, "attr", getattr(call.func, "id", ""))
    given = {
        keyword.arg: ast.unparse(keyword.value)
        for keyword in call.keywords
        if keyword.arg in SWITCHES
    }
    if (
        last == "load"
        and ast.unparse(call.func).endswith("torch.load")
        and given.get("weights_only") != "True"
    ):
        yield call.lineno, "torch.load without weights_only=True"
    if (
        last == "from_pretrained"
        and ast.unparse(call.func).startswith("Auto")
        and "trust_remote_code" not in given
    ):
        yield call.lineno, ASKS
    for switch in ("allow_pickle", "trust_remote_code"):
        if given.get(switch, "False") != "False":
            yield call.lineno, switch
    if last in LOADERS or (last in NAMES and ast.unparse(call.func) in NAMES[last]):
        yield call.lineno, last


def list_sources() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.splitlines() if name not in EXCEPT]


def test_no_file_of_ours_reads_what_could_run_code() -> None:
    sources = list_sources()
    assert len(sources) > 200
    found = [
        f"{name}:{line}: {why}"
        for name in sources
        for line, why in find_loaders((ROOT / name).read_text())
        if why != ASKS or not name.startswith(("tests/", "benchmarks/"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import os, dill as d",
        "from joblib import load",
        "from torch import load",
        "import torch; torch.load(path)",
        "x.torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "np.load(path, allow_pickle=True)",
        "pd.read_pickle(path)",
        "yaml.load(text, Loader=Loader)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "AutoConfig.from_pretrained(name)",
        "eval(text)",
    ],
)
def test_each_way_to_run_code_is_found(line: str) -> None:
    assert list(find_loaders(line))


def test_safe_loaders_are_not_found() -> None:
    assert not list(
        find_loaders(
            "torch.load(path, weights_only=True); yaml.safe_load(text); json.load(file); "
            "model.eval()"
        )
    )
