"""Count the code: statements by room, wrapped names of vLLM, commands, flags.

    python -m benchmarks.house              # the table of this tree
    python -m benchmarks.house --json       # the same as JSON, to compare two trees
    python -m benchmarks.house --walk       # the returns of the target's walk, one per line

No check depends on these figures. In a review, they show whether a change reduces the number of
concepts.

The walk is traced while a `Run` of the tiny target is built. A return is a call that enters a room
that the walk had already left; calls below `load_data` do not count. Calls into files/folder.py are
counted over the whole `Run`.
"""

import argparse
import ast
import io
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from redraft.engine.hooks import TABLE
from redraft.heads.catalog import find_family, list_trained
from redraft.recipes.cli.commands import COMMANDS
from redraft.recipes.cli.run import dispatch, find_recipe, parse_recipe

ROOT = Path(__file__).parents[1]

GROUND = ("engine", "files")  # Rooms whose folders are in `redraft/` itself.

ROOMS = ("distill", "eval", "heads", "online", "recipes", "redraft")


def list_sources(*packages: str) -> Iterator[Path]:
    """Return the Python files in these folders, without links."""
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not any(parent.is_symlink() for parent in (path, *path.parents)):
                yield path


def count_statements(tree: ast.AST) -> int:
    """Count the statements of a module, without docstrings and field documentation."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.stmt))
    return sum(
        not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in nodes
    )


def find_room(parts: Sequence[str]) -> str:
    """Return the room of a file, given the parts of its path."""
    return "/".join(parts[:2] if len(parts) > 2 else parts[:1])


def count_rooms() -> dict[str, int]:
    """Count the statements by package and room."""
    counts: Counter[str] = Counter()
    for path in list_sources(*ROOMS, "benchmarks", "tests"):
        parts = path.relative_to(ROOT).parts
        room = parts[0] if parts[0] == "tests" else find_room(parts)
        counts[room] += count_statements(ast.parse(path.read_text(encoding="utf-8")))
    return dict(counts)


def count_wrapped() -> dict[str, list[str]]:
    """Return vLLM's wrapped names (`Class.method`) from the table, by the wrapping file."""
    found: dict[str, list[str]] = {}
    for hook in TABLE:
        file = f"{hook.by.partition(':')[0].replace('.', '/')}.py"
        found.setdefault(file, []).extend(name.rpartition(":")[2] for name in hook.names)
    return found


def count_functions() -> dict[str, float]:
    """Return the length of the longest function and the linter suppressions per 1,000 lines."""
    longest, ignores, lines = 0, 0, 0
    for path in list_sources(*ROOMS):
        source = path.read_text(encoding="utf-8")
        ignores += len(re.findall(r"# (?:type: ignore|noqa)", source))
        lines += source.count("\n")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                longest = max(longest, (node.end_lineno or node.lineno) - node.lineno + 1)
    return {
        "longest function": longest,
        "ignores per 1,000 lines": round(1000 * ignores / lines, 2),
    }


def count_commands() -> dict[str, int]:
    """Count the commands of `redraft`, and the distinct flags on all help pages."""
    os.environ["COLUMNS"] = "200"
    pages = [
        (*name.split(), *kind, "--help-all" if name == "train" else "--help")
        for name, kind in list_pages()
    ]
    flags: set[str] = set()
    for page in pages:
        with redirect_stdout(io.StringIO()) as shown, suppress(SystemExit):
            dispatch(page)
        # Without the dot that ends a sentence.
        flags |= set(re.findall(r"--[a-z][\w-]*(?:\.[a-z][\w-]*)*", shown.getvalue()))
    return {"commands": len(COMMANDS), "help pages": len(pages), "flags": len(flags)}


def list_pages() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return (command, subcommands) for each help page."""
    for name, command in COMMANDS.items():
        if command.parts:
            yield from ((f"{name} {part}", ()) for part in command.parts)
        elif name == "train":
            yield from ((name, (family,)) for family in list_trained())
        else:
            yield name, ()


def walk_target() -> tuple[list[str], int]:
    """List the returns to a room, and count the calls that open folders, while a `Run` is built."""
    from redraft.distill.run.inputs import load_data  # imports torch
    from redraft.distill.run.training_run import Run

    steps: list[tuple[str, bool, str]] = []
    below_data = False

    def trace(frame: FrameType, event: str, _: Any) -> None:
        nonlocal below_data
        code, name = frame.f_code, frame.f_globals.get("__name__", "")
        if code is load_data.__code__ and event in ("call", "return"):
            below_data = event == "call"
        # Resuming a generator is not a call.
        is_step = event == "call" and not code.co_name.startswith("<")
        if is_step and name.startswith("redraft.") and (not steps or steps[-1][0] != name):
            caller = frame.f_back
            at = f"{caller.f_code.co_qualname}:{caller.f_lineno}" if caller else ""
            steps.append((name, below_data, f"{code.co_qualname}, called by {at}"))

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.jsonl"
        row = {"prompt": "Write a function.", "completion": "def f(): return 1"}
        data.write_text(
            "".join(json.dumps(row | {"prompt": f"{row['prompt']} {k}"}) + "\n" for k in range(400))
        )
        flags = ["eagle3", "--target", str(ROOT / "tests/assets/tiny-target")]
        flags += ["--data.source", str(data), "--output", f"{folder}/out", "--prove.no-engine"]
        flags += ["--draft-vocab-size", "0", "--loop.batch-size", "1"]
        recipe, rest = find_recipe("train", flags)
        cfg = parse_recipe(recipe, rest)
        sys.setprofile(trace)
        try:
            Run(find_family("eagle3"), cfg)
        finally:
            sys.setprofile(None)
    seen, before, returns = set[str](), "", list[str]()
    for name, of_data, call in steps:
        if of_data:
            continue
        path = name.removeprefix("redraft.").split(".")
        room = find_room(["redraft", *path] if path[0] in GROUND else path)
        if room != before and room in seen:
            returns.append(f"{room:16} {call}")
        before = room
        seen.add(room)
    return returns, sum(name.endswith("files.folder") for name, *_ in steps)


def count_house() -> dict[str, Any]:
    rooms = count_rooms()
    package = sum(count for room, count in rooms.items() if room.split("/")[0] in ROOMS)
    returns, opens = walk_target()
    return {
        "statements": {"package": package, **rooms},
        "wrapped names of vLLM": count_wrapped(),
        "functions": count_functions(),
        "command line": count_commands(),
        "target's walk": {"returns to a room": len(returns), "entries of files/folder.py": opens},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--walk", action="store_true", help="list the returns of the target's walk")
    args = parser.parse_args()
    if args.walk:
        print("\n".join(walk_target()[0]))
        return
    house = count_house()
    if args.json:
        print(json.dumps(house, indent=2))
        return
    for title, counts in house.items():
        print(f"{title}:")
        for name, count in counts.items():
            shown = (
                f"{len(count):6}  {', '.join(count)}" if isinstance(count, list) else f"{count:6}"
            )
            print(f"  {name:32} {shown}")


if __name__ == "__main__":
    main()
