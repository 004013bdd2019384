"""serving.json for programs, serving.md for a pull request, serving.html for people: what a serving benchmark measured.

| key | holds |
|---|---|
| `version` | of this form, which serving.schema.json describes |
| `target`, `command`, `environment`, `duration_s` | what was served, and how and where it was measured |
| `settings` | what all tables share: the first values of the sweep, repeats |
| `drafts` | by name: title, the engine's configuration, acceptance by position, step costs, and the advice from both |
| `tables` | by question, rows as `eval.serving_bench.row` makes them |
| `refused` | what the engine would not serve, with its reason |
| `ideal_source` | whether `speedup_ideal` was measured in the engine or follows from the steps that were |
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.cost import advise
from eval.report import write_page
from eval.serving_bench import QUESTIONS, acceptance, step_costs
from heads.artifact import write_whole

VERSION = 1

GRID = "tokens"
"""The question that varies two things."""

Row = Mapping[str, Any]


def serving_report(
    tables: Mapping[str, Sequence[Row]], draft_configs: Mapping[str, Mapping[str, Any]], **facts: Any
) -> dict[str, Any]:
    """The whole report; `draft_configs` is vLLM's --speculative-config of every draft, without a number of tokens.

    `facts` are the keys that nothing here computes: target, command, settings, refused, ideal_source, environment,
    duration_s.
    """
    rows = [row for some in tables.values() for row in some]
    drafts = {name: _draft(name, config, tables, rows) for name, config in draft_configs.items()}
    return {**facts, "version": VERSION, "drafts": drafts, "tables": dict(tables)}


def _draft(
    name: str, config: Mapping[str, Any], tables: Mapping[str, Sequence[Row]], rows: Sequence[Row]
) -> dict[str, Any]:
    # Of the load whose steps were timed: others accept otherwise, with some numbers of tokens only.
    own = [row for row in tables.get("tokens", ()) if row["draft"] == name] or tables.get("draft", ())
    rates, costs = acceptance(own or rows, name), step_costs(tables.get("tokens", ()), name)
    advice = advise(rates, costs) if rates and costs else None
    return {
        "title": title(name),
        "config": dict(config),
        "acceptance_per_position": rates,
        "costs": costs.to_json() if costs else None,
        "advice": advice.to_json() if advice else None,
        "speculative_config": advice.speculative_config(config) if advice else None,
    }


def title(draft: str) -> str:
    """A draft as a table names it: the last part of its folder or hub name that says something."""
    path = Path(draft)
    return path.parent.name if path.name == "draft" and path.parent.name else path.name or draft


def read_serving(path: Path) -> dict[str, Any]:
    """A serving.json.

    Raises: ValueError where it is none, or one of another version; FileNotFoundError.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: `redraft bench` measures one")
    try:
        report: dict[str, Any] = json.loads(path.read_text())
        version = report.get("version"), "tables" in report
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no serving.json: {error}") from error
    if version != (VERSION, True):
        raise ValueError(f"{path} is no serving.json of version {VERSION}: measure again with `redraft bench`")
    return report


def best_row(report: Mapping[str, Any]) -> Row | None:
    """The draft that sped the base load up most; None where no draft was measured."""
    rows = [row for row in report["tables"].get("draft", ()) if row["draft"] and row["speedup"] is not None]
    return max(rows, key=lambda row: row["speedup"], default=None)


def write_serving(folder: Path, report: Mapping[str, Any]) -> Path:
    """Write serving.json, serving.md and serving.html into `folder`; the path of the last that could be written."""
    extras = {
        "questions": QUESTIONS,
        "header": HEADER,
        "speedup_column": HEADER.index("speed-up"),
        "cells_of": cells_of,
        "grid": grid_of(report["tables"][GRID]) if GRID in report["tables"] else None,
        "title": title,
        "best": best_row(report),
    }
    page = write_page(folder, report, "serving.html.j2", "serving_charts.charts", stem="serving", extras=extras)
    write_whole(folder / "serving.md", markdown(report))
    return page


def markdown(report: Mapping[str, Any]) -> str:
    """The answer, a table for every question, and the configuration to paste."""
    lines = [f"# Serving {report['target']}", "", *answer(report), ""]
    for question, rows in report["tables"].items():
        lines += [f"## {QUESTIONS[question]}", "", *_table(question, rows), ""]
    for name, draft in report["drafts"].items():
        if draft["advice"]:
            lines += [f"## How many tokens to draft: {title(name)}", "", f"{draft['advice']['sentence']}", ""]
            lines += [*_advice_table(draft["advice"]), ""]
    lines += [f"Not measured: {entry['what']}: {entry['reason']}" for entry in report["refused"]]
    environment = ", ".join(f"{name} {value}" for name, value in report["environment"].items())
    return "\n".join([*lines, "", f"`{report['command']}`; {environment}", ""])


def answer(report: Mapping[str, Any]) -> Iterator[str]:
    """What somebody decides by, a sentence each."""
    if row := best_row(report):
        yield (
            f"With {title(row['draft'])} and {row['num_speculative_tokens']} draft tokens the server writes "
            f"{row['speedup']:.2f}x as fast at {row['concurrency']} requests at once, "
            f"{row['measured']['tau']:.2f} tokens per target step."
        )
    for name, draft in report["drafts"].items():
        if draft["advice"]:
            yield f"{title(name)}: {draft['advice']['sentence']}."


HEADER = (
    *("draft", "k", "speed-up", "E2E speed-up", "ideal", "tau", "tokens/s", "TTFT ms", "TPOT ms", "E2E ms"),
    *("at once", "requests/s", "input", "data"),
)


def cells_of(row: Row) -> list[str]:
    """A row as text, in the order of `HEADER`."""
    measured = row["measured"]
    quantized = f" ({row['quantization']})" if row["quantization"] else ""
    return [
        f"{title(row['draft'])}{quantized}" if row["draft"] else "none",
        str(row["num_speculative_tokens"] or "–"),
        *(_ratio(row[key] if row["draft"] else None) for key in ("speedup", "speedup_e2e", "speedup_ideal")),
        f"{measured['tau']:.2f}" if row["draft"] else "–",
        f"{measured['tokens_per_s']:,.0f}",
        *(f"{measured[key]['mean']:,.1f}" for key in ("ttft_ms", "tpot_ms", "e2e_ms")),
        str(row["concurrency"] or "–"),
        f"{row['request_rate']:g}" if row["request_rate"] else "–",
        f"{measured['mean_input_tokens']:.0f}",
        Path(row["data"]).name if ":" in row["data"] else row["data"],
    ]


def grid_of(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of speed-up and tokens/s over concurrency and number of draft tokens, of one draft's rows."""
    ks = sorted({row["num_speculative_tokens"] for row in rows} - {0})
    cells = {(row["concurrency"], row["num_speculative_tokens"]): row for row in rows}
    concurrency = sorted({b for b, _ in cells})
    body = [[str(b), _speed(cells.get((b, 0))), *(_sped(cells.get((b, k))) for k in ks)] for b in concurrency]
    return ["requests at once", "none, tokens/s", *(f"k = {k}" for k in ks)], body


def _speed(row: Row | None) -> str:
    return "–" if row is None else f"{row['measured']['tokens_per_s']:,.0f}"


def _sped(row: Row | None) -> str:
    return "–" if row is None else f"{_ratio(row['speedup'])} ({_speed(row)})"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def _table(question: str, rows: Sequence[Row]) -> Iterator[str]:
    header, body = grid_of(rows) if question == GRID else (HEADER, [cells_of(row) for row in rows])
    yield from _markdown_table(header, body)


def _advice_table(advice: Mapping[str, Any]) -> Iterator[str]:
    """Expected speed-up, a row for each batch size and a column for each k."""
    yield from _markdown_table(*speedup_grid(advice))


def speedup_grid(advice: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of the expected speed-up over batch size and k."""
    ks = sorted({row["num_speculative_tokens"] for row in advice["table"]} - {0})
    by_batch: dict[int, dict[int, float]] = {}
    for row in advice["table"]:
        by_batch.setdefault(row["batch_size"], {})[row["num_speculative_tokens"]] = row["speedup"]
    rows = [[str(b), *(f"{speedups[k]:.2f}x" for k in ks)] for b, speedups in by_batch.items()]
    return ["requests in a step", *(f"k = {k}" for k in ks)], rows


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for cells in rows:
        yield "| " + " | ".join(cells) + " |"
