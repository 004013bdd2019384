"""The report of a serving benchmark.

Serving.json for programs, serving.md for a pull request, serving.html for people.

| key | content |
|---|---|
| `version` | version of this format, which serving.schema.json describes |
| `target`, `command`, `environment`, `duration_s` | served model, command line, machine, duration in seconds |
| `settings` | settings common to all tables: the first values of the sweep, the sampling, and the number of repeats |
| `drafts` | by name: title, the engine's configuration, acceptance by position, step costs, and the advice from both |
| `baseline` | the plain server to beat, as `eval.serving.baseline.Baseline` |
| `tables` | rows by question, as `eval.serving.sweep.build_row` makes them |
| `refused` | variants refused by the engine, with the reason |
| `ideal_source` | `engine` if `speedup_ideal` was measured, `cost model` if it was computed from the measured steps |
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from redraft.eval.engine.draft_source import shorten_name
from redraft.eval.engine.sampling import GREEDY, Sampling
from redraft.eval.engine.server import vllm_keys
from redraft.eval.report.page import TEMPLATES, charts_of, write_page
from redraft.eval.serving.cost import advise, has_one_acceptance
from redraft.eval.serving.sweep import QUESTIONS, fit_step_costs, pool_acceptance
from redraft.heads.files.artifact import write_whole
from redraft.heads.files.folder import read_as

VERSION = 1
GRID = "tokens"  # The question that varies two settings, so the table is two-dimensional.

Row = Mapping[str, Any]


def build_serving_report(
    tables: Mapping[str, Sequence[Row]],
    draft_configs: Mapping[str, Mapping[str, Any]],
    **facts: Any,
) -> dict[str, Any]:
    """The content of serving.json.

    `draft_configs` has vLLM's --speculative-config of every draft, without a number of tokens.
    `facts` are the keys that are not computed here: target, command, settings, baseline, refused,
    ideal_source, environment, duration_s.
    """
    drafts = {
        name: _summarise_draft(name, config, tables) for name, config in draft_configs.items()
    }
    return {**facts, "version": VERSION, "drafts": drafts, "tables": dict(tables)}


def _summarise_draft(
    name: str, config: Mapping[str, Any], tables: Mapping[str, Sequence[Row]]
) -> dict[str, Any]:
    timed = tables.get(GRID, ())
    # of the load whose steps were timed, because acceptance depends on the load
    rates, costs = pool_acceptance(timed, name), fit_step_costs(timed, name)
    # Else the rates would be mostly those of the largest load, or of other numbers of tokens.
    advice = advise(rates, costs) if rates and costs and has_one_acceptance(config) else None
    return {
        "title": shorten_name(name),
        "config": dict(config),
        "acceptance_per_position": rates,
        "costs": costs.to_json() if costs else None,
        "advice": advice.to_json() if advice else None,
        "speculative_config": advice.speculative_config(vllm_keys(config)) if advice else None,
    }


def read_serving(path: Path) -> dict[str, Any]:
    """Read a serving.json.

    Raises:
        FileNotFoundError
        ValueError: it is none of this version.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: `redraft bench` measures one")
    report = read_as(path, dict[str, Any], "give the serving.json of `redraft bench`")
    if report.get("version") != VERSION or "tables" not in report:
        raise ValueError(
            f"{path} is not a serving.json of version {VERSION}: measure again with `redraft bench`"
        )
    return report


def read_served_sampling(report: Mapping[str, Any]) -> Sampling:
    """How the requests of a serving.json were sampled.

    Reports that do not say it are of requests at temperature 0.
    """
    settings = report["settings"]
    return Sampling(**settings["sampling"]) if "sampling" in settings else GREEDY


def describe_sampling(report: Mapping[str, Any]) -> str:
    settings, words = report["settings"], read_served_sampling(report).words
    penalties = "".join(
        f", {name} {value:g}" for name, value in settings.get("penalties", {}).items()
    )
    return f"{words}{penalties}, drafts {settings.get('draft_sample_method', 'greedy')}"


def find_best_row(report: Mapping[str, Any]) -> Row | None:
    """The row of the draft with the highest speed-up on the base load, first of the proven ones."""
    rows = [
        row
        for row in report["tables"].get("draft", ())
        if row["draft"] and row["speedup"] is not None
    ]
    return max(rows, key=lambda row: (_is_faster(row), row["speedup"]), default=None)


def find_fastest(report: Mapping[str, Any]) -> dict[int, Row | None]:
    """The row with the highest proven speed-up at every measured concurrency, or None."""
    rows = report["tables"].get(GRID, ())
    # All concurrencies get an entry first, so one without a faster draft stays None.
    found: dict[int, Row | None] = dict.fromkeys(sorted({row["concurrency"] for row in rows}))
    for row in rows:
        best = found[row["concurrency"]]
        if _is_faster(row) and (best is None or row["speedup"] > best["speedup"]):
            found[row["concurrency"]] = row
    return found


def _is_faster(row: Row) -> bool:
    """Whether output with this draft is faster than without, by the whole interval if there is one."""
    if not row["draft"] or row["speedup"] is None:
        return False
    # One round has no interval: the ratio alone decides.
    return bool((row.get("speedup_interval") or [row["speedup"]])[0] > 1)


def _first_draft_rows(report: Mapping[str, Any]) -> list[Row]:
    return [
        row for row in report["tables"][GRID] if row["draft"] in (None, report["settings"]["draft"])
    ]


def write_serving(folder: Path, report: Mapping[str, Any]) -> Path:
    """Write serving.json, .md and .html; returns serving.html's path, or serving.json's."""
    extras = {
        "questions": QUESTIONS,
        "header": HEADER,
        "speedup_column": HEADER.index("speed-up"),
        "format_row": format_row,
        "grid": build_grid(_first_draft_rows(report)) if GRID in report["tables"] else None,
        "shorten_name": shorten_name,
        "best": find_best_row(report),
        "describe_speedup": describe_speedup,
        "sampling": describe_sampling(report),
    }
    charts = charts_of("redraft.eval.serving.charts")
    page = write_page(
        folder, report, TEMPLATES / "serving.html.j2", charts, stem="serving", extras=extras
    )
    write_whole(folder / "serving.md", render_markdown(report))
    return page


def render_markdown(report: Mapping[str, Any]) -> str:
    lines = [f"# Serving {report['target']}", "", *compose_answer(report), ""]
    for question, rows in report["tables"].items():
        is_grid = question == GRID
        header, body = (
            build_grid(_first_draft_rows(report))
            if is_grid
            else (HEADER, [format_row(row) for row in rows])
        )
        lines += [f"## {QUESTIONS[question]}", "", *_markdown_table(header, body), ""]
    for name, draft in report["drafts"].items():
        if draft["advice"]:
            lines += [
                f"## How many tokens to draft: {shorten_name(name)}",
                "",
                f"{draft['advice']['sentence']}",
                "",
            ]
            lines += [
                "Expected speed-up:",
                "",
                *_markdown_table(*build_speedup_grid(draft["advice"])),
                "",
            ]
    lines += [f"Not measured: {entry['what']}: {entry['reason']}" for entry in report["refused"]]
    environment = ", ".join(f"{name} {value}" for name, value in report["environment"].items())
    return "\n".join([*lines, "", f"`{report['command']}`; {environment}", ""])


def compose_answer(report: Mapping[str, Any]) -> Iterator[str]:
    if row := find_best_row(report):
        k, concurrency = row["num_speculative_tokens"], row["concurrency"]
        yield (
            f"With {shorten_name(row['draft'])} and {k} draft token{'s' if k > 1 else ''}, output "
            "is "
            f"{describe_speedup(row)} with {concurrency} concurrent "
            f"request{'s' if concurrency > 1 else ''}, "
            f"at {row['measured']['tau']:.2f} tokens per target step."
        )
    for name, draft in report["drafts"].items():
        if draft["advice"]:
            yield f"{shorten_name(name)}: {draft['advice']['sentence']}."
    yield f"Requests were sampled at {describe_sampling(report)}."


def describe_speedup(row: Row) -> str:
    if not row.get("speedup_interval"):
        return "not compared with that of no draft (--repeats 2 or more give an interval)"
    low, high = row["speedup_interval"]
    if low <= 1 <= high:
        return f"as fast as without (95% interval {low:.2f}x to {high:.2f}x)"
    return f"{row['speedup']:.2f}x as fast (95% interval {low:.2f}x to {high:.2f}x)"


HEADER = (
    *(
        "draft",
        "k",
        "speed-up",
        "E2E speed-up",
        "ideal",
        "tau",
        "tokens/s",
        "TTFT ms",
        "TPOT ms",
        "E2E ms",
    ),
    *("concurrency", "input", "data"),
)


def format_row(row: Row) -> list[str]:
    measured = row["measured"]
    return [
        shorten_name(row["draft"]) if row["draft"] else "none",
        str(row["num_speculative_tokens"] or "–"),
        _format_with_interval(row),
        *(
            _format_ratio(row[key] if row["draft"] else None)
            for key in ("speedup_e2e", "speedup_ideal")
        ),
        f"{measured['tau']:.2f}" if row["draft"] else "–",
        f"{measured['tokens_per_s']:,.0f}",
        *(f"{measured[key]['mean']:,.1f}" for key in ("ttft_ms", "tpot_ms", "e2e_ms")),
        str(row["concurrency"]),
        f"{measured['mean_input_tokens']:.0f}",
        Path(row["data"]).name if ":" in row["data"] else row["data"],
    ]


def build_grid(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of speed-up and tokens/s by concurrency and number of draft tokens, from the
    rows of one draft.
    """
    ks = sorted({row["num_speculative_tokens"] for row in rows} - {0})
    cells = {(row["concurrency"], row["num_speculative_tokens"]): row for row in rows}
    concurrency = sorted({b for b, _ in cells})
    body = []
    for b in concurrency:
        speedups = [_format_speedup(cells.get((b, k))) for k in ks]
        body.append([str(b), _format_speed(cells.get((b, 0))), *speedups])
    return ["concurrent requests", "no draft, tokens/s", *(f"k = {k}" for k in ks)], body


def _format_speed(row: Row | None) -> str:
    return "–" if row is None else f"{row['measured']['tokens_per_s']:,.0f}"


def _format_speedup(row: Row | None) -> str:
    return "–" if row is None else f"{_format_ratio(row['speedup'])} ({_format_speed(row)})"


def _format_with_interval(row: Row) -> str:
    """The speed-up with its 95% interval, or a note that it comes from a single round."""
    if not row["draft"] or row["speedup"] is None:
        return "–"
    if not row.get("speedup_interval"):
        return f"{_format_ratio(row['speedup'])}, one round"
    low, high = row["speedup_interval"]
    return (
        f"{'equal' if low <= 1 <= high else _format_ratio(row['speedup'])} [{low:.2f}, {high:.2f}]"
    )


def _format_ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def build_speedup_grid(advice: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of the expected speed-up by batch size and k."""
    ks = sorted({row["num_speculative_tokens"] for row in advice["table"]} - {0})
    by_batch: dict[int, dict[int, float]] = {}
    for row in advice["table"]:
        by_batch.setdefault(row["batch_size"], {})[row["num_speculative_tokens"]] = row["speedup"]
    rows = [[str(b), *(f"{speedups[k]:.2f}x" for k in ks)] for b, speedups in by_batch.items()]
    return ["batch size", *(f"k = {k}" for k in ks)], rows


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for cells in rows:
        yield "| " + " | ".join(cells) + " |"
