"""The load of one cell of a serving benchmark, by vLLM's own generator (`vllm bench serve`), and what its clients saw.

Load ──► prompts (vLLM's data sets; lines of a text cut to a length) ──► vllm.benchmarks.serve ──► Served

The generator runs in this process, through its own command line: a cell takes seconds, importing it ten.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from eval.engine import Server
from eval.kept import file_print, key_hash
from heads.artifact import write_whole

DATA_KINDS = ("random", "sonnet", "sharegpt", "jsonl")

WARM_UP_REQUESTS = 4

STATISTICS_TIMEOUT_S = 5

SONNET_REQUEST = "Go on with these lines:\n"


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the clients ask for."""

    data: str
    """`random`, `sonnet` (lines of the Python manual) or `sonnet:TEXT`, `sharegpt:JSON`, `jsonl:FILE` with `prompt`."""
    input_tokens: int | None
    """Of every prompt; None where the data has lengths of its own (sharegpt, jsonl)."""
    output_tokens: int
    """At most, of every answer."""
    num_prompts: int
    concurrency: int | None = None
    """Requests at once; None: as many as arrive."""
    request_rate: float | None = None
    """Requests per second, at the intervals of a Poisson process; None: the next as soon as one has ended."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in DATA_KINDS:
            raise ValueError(f"there is no data of kind {self.kind!r}: {', '.join(DATA_KINDS)} are known")
        if self.has_lengths_of_its_own and not self.file:
            raise ValueError(f"{self.kind} needs a file: {self.kind}:FILE")
        if self.file and not Path(self.file).is_file():
            raise FileNotFoundError(f"there is no file {self.file} to take {self.kind} prompts from")
        if self.num_prompts < 1:
            raise ValueError("there is nothing to measure: zero prompts were asked for")

    @property
    def kind(self) -> str:
        return self.data.partition(":")[0]

    @property
    def file(self) -> str:
        """That the prompts come from; empty where it is none of the user's."""
        return self.data.partition(":")[2]

    @property
    def has_lengths_of_its_own(self) -> bool:
        return self.kind in ("sharegpt", "jsonl")


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Milliseconds over the requests of a cell."""

    mean: float
    median: float
    p99: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Latency:
        values_ms = 1e3 * np.asarray(seconds or [0.0])
        return Latency(
            mean=float(values_ms.mean()),
            median=float(np.median(values_ms)),
            p99=float(np.percentile(values_ms, 99)),
        )


@dataclass(frozen=True, kw_only=True)
class Served:
    """What the clients saw."""

    num_requests: int
    duration_s: float
    mean_input_tokens: float
    num_output_tokens: int
    tokens_per_s: float
    """Output tokens of all requests over the time from the first request to the last answer."""
    requests_per_s: float
    ttft_ms: Latency
    """To the first token."""
    tpot_ms: Latency
    """Of every further token."""
    e2e_ms: Latency
    """Of a whole request."""
    num_steps: int
    """Target steps of all requests, behind their prefills."""
    step_s: float
    """Of one step that a request takes part in, prefills of others between included."""
    tau: float
    """Tokens per target step, those without anything drafted (n-grams) included; 1 without a draft."""
    acceptance_per_position: tuple[float, ...]
    """Share of the target steps that accepted a draft's tokens up to each."""

    @staticmethod
    def from_json(value: dict[str, Any]) -> Served:
        latencies = {key: Latency(**value[key]) for key in ("ttft_ms", "tpot_ms", "e2e_ms")}
        return Served(**{**value, **latencies, "acceptance_per_position": tuple(value["acceptance_per_position"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_load(server: Server, load: Load, folder: Path) -> Served:
    """Put the load on the server. Prompts that are made and the generator's own words are kept in `folder`.

    Raises:
        ValueError: the data holds no prompt, or the engine refuses one.
        ConnectionError: the server is not there, or went away.
    """
    _require_healthy(server)
    folder.mkdir(parents=True, exist_ok=True)
    arguments = ["--base-url", server.url, "--model", server.model, "--backend", "openai", "--temperature", "0"]
    arguments += ["--seed", str(load.seed), "--save-detailed", "--disable-tqdm"]
    arguments += ["--max-concurrency", str(load.concurrency)] if load.concurrency else []
    arguments += ["--request-rate", str(load.request_rate)] if load.request_rate else []
    arguments += data_arguments(load, server.model, folder)
    clock = _decode_time(server, at_least=0)
    for num_prompts in (min(WARM_UP_REQUESTS, load.num_prompts), load.num_prompts):
        before = clock
        result = _generate([*arguments, "--num-prompts", str(num_prompts)], folder / "load.log")
        _require_success(server, load, result)
        clock = _decode_time(server, at_least=before.requests + result["completed"])
    return served(result, clock.seconds - before.seconds)


def served(result: dict[str, Any], decode_s: float) -> Served:
    """The generator's result with its lists, in our words.

    `decode_s` is what the requests took behind their first tokens by the engine's clock, and a step's time that over
    the steps that they took. The clients' clocks would not do: a busy server sends several steps at once. Every step
    verifies a draft, so the engine's drafts are the steps; but where it finds nothing to look up, tokens that were not
    accepted are.
    """
    requests = list(zip(result["latencies"], result["ttfts"], result["output_lens"], strict=True))
    decode_tokens = sum(tokens - 1 for *_, tokens in requests)
    drafts, accepted = (result.get(f"spec_decode_{name}", 0) for name in ("num_drafts", "accepted_tokens"))
    steps = max(drafts, decode_tokens - accepted, 1)
    return Served(
        num_requests=result["completed"],
        duration_s=result["duration"],
        mean_input_tokens=result["total_input_tokens"] / result["completed"],
        num_output_tokens=result["total_output_tokens"],
        tokens_per_s=result["output_throughput"],
        requests_per_s=result["request_throughput"],
        ttft_ms=Latency.of(result["ttfts"]),
        tpot_ms=Latency.of([(latency - ttft) / (tokens - 1) for latency, ttft, tokens in requests if tokens > 1]),
        e2e_ms=Latency.of(result["latencies"]),
        num_steps=steps,
        step_s=decode_s / steps,
        tau=1 + accepted / steps,
        acceptance_per_position=tuple(
            rate * drafts / steps for rate in result.get("spec_decode_per_position_acceptance_rates", ())
        ),
    )


@dataclass(frozen=True, kw_only=True)
class DecodeTime:
    """What an engine's requests took behind their first tokens, since it started."""

    requests: int
    seconds: float


_DECODE_TIME = re.compile(r"^vllm:request_decode_time_seconds_(sum|count)\{.*\} (\S+)$", re.MULTILINE)


def _decode_time(server: Server, at_least: int) -> DecodeTime:
    """As soon as the engine counts that many requests: statistics follow the answers."""
    deadline = time.monotonic() + STATISTICS_TIMEOUT_S
    while True:
        found = _DECODE_TIME.findall(httpx.get(f"{server.url}/metrics", timeout=30).text)
        total = {name: sum(float(value) for kind, value in found if kind == name) for name in ("sum", "count")}
        if total["count"] >= at_least or time.monotonic() > deadline:
            return DecodeTime(requests=int(total["count"]), seconds=total["sum"])
        time.sleep(0.05)


def _require_healthy(server: Server) -> None:
    try:
        httpx.get(f"{server.url}/health", timeout=30).raise_for_status()
    except httpx.HTTPError as error:
        raise ConnectionError(f"cannot reach {server.url}: {error}") from error


def _require_success(server: Server, load: Load, result: dict[str, Any]) -> None:
    """Every request was answered."""
    if result["failed"] == 0:
        return
    _require_healthy(server)
    first = next(error for error in result["errors"] if error)
    raise ValueError(
        f"the server refused {result['failed']} of {len(result['errors'])} requests of {load.data}: "
        f"{first.strip().splitlines()[-1]}"
    )


def _generate(arguments: Sequence[str], log: Path) -> dict[str, Any]:
    """The result of `vllm bench serve ARGUMENTS`."""
    generator, parser = _generator()
    with log.open("a") as words, contextlib.redirect_stdout(words), _without_chatter():
        try:
            return dict(generator.main(parser.parse_args(list(arguments))))
        except IndexError as error:  # it draws further prompts from none
            raise ValueError(f"no conversation fits: see {log}") from error


@functools.cache
def _generator() -> tuple[Any, Any]:
    """(vLLM's load generator, the parser of its command line)"""
    with _without_chatter():
        from vllm.benchmarks import serve
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    return serve, parser


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def data_arguments(load: Load, tokenizer: str, folder: Path) -> list[str]:
    """What tells the generator where its prompts come from; lines are cut to a length once and kept in `folder`."""
    lengths = ["--output-len", str(load.output_tokens)]
    match load.kind:
        case "random":
            return ["--dataset-name", "random", "--input-len", str(load.input_tokens), *lengths]
        case "sharegpt":
            _require_conversations(Path(load.file))
            return ["--dataset-name", "sharegpt", "--dataset-path", load.file, *lengths]
        case "jsonl":
            _require_prompts(Path(load.file))
            return _custom(load.file, tokenizer) + lengths
    asked = [file_print(load.file), file_print(tokenizer), load.input_tokens, load.num_prompts, load.seed]
    prompts = folder / f"sonnet-{key_hash(asked)[:16]}.jsonl"
    if not prompts.is_file():
        write_sonnet(prompts, Path(load.file) if load.file else None, tokenizer, load)
    return _custom(str(prompts), tokenizer) + lengths


def _custom(path: str, tokenizer: str) -> list[str]:
    plain = [] if _tokenizer(tokenizer).chat_template else ["--skip-chat-template"]
    return ["--dataset-name", "custom", "--dataset-path", path, "--disable-shuffle", *plain]


def _require_conversations(path: Path) -> None:
    try:
        rows = json.loads(path.read_text())
        found = sum(len(row.get("conversations", ())) >= 2 for row in rows)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no ShareGPT file, a JSON list of conversations: {error}") from error
    if not found:
        raise ValueError(f"{path} has no conversation of two turns: there is nothing to measure")


def _require_prompts(path: Path) -> None:
    if path.suffix != ".jsonl":
        raise ValueError(f"{path} must be named .jsonl, with a `prompt` in every line")
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty: there is nothing to measure")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} line {number} is no JSON: {error}") from error
        if not isinstance(row, dict) or "prompt" not in row:
            raise ValueError(f"{path} line {number} has no column `prompt`")


@functools.lru_cache(maxsize=4)
def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def write_sonnet(output: Path, text: Path | None, tokenizer: str, load: Load) -> None:
    """Prompts of `load.input_tokens` tokens each (chat template included) from lines of a text, as JSON lines.

    The lines of each prompt are drawn anew, as vLLM's former sonnet data set did it with Shakespeare's: natural text of
    any length, and no two prompts with the same beginning.

    Raises: ValueError where the text has too few lines, or the length leaves no room beside the chat template.
    """
    if text is None:
        from pydoc_data.topics import topics

        words = "\n".join(topics[name] for name in sorted(topics))
    else:
        words = text.read_text()
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    if len(lines) < 2:
        raise ValueError(f"{text} has {len(lines)} lines: prompts are drawn from the lines of a text")
    assert load.input_tokens is not None, "lines have no length of their own"
    room = load.input_tokens - _num_tokens(tokenizer, SONNET_REQUEST)
    if room < 1:
        raise ValueError(f"{load.input_tokens} input tokens leave no room beside the chat template: ask for more")
    rng = np.random.default_rng(load.seed)
    prompts = [_sonnet(lines, tokenizer, load.input_tokens, room, rng) for _ in range(load.num_prompts)]
    write_whole(output, "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def _sonnet(lines: Sequence[str], tokenizer: str, input_tokens: int, room: int, rng: np.random.Generator) -> str:
    """One prompt: lines until the length is reached, the last cut to it as near as whole tokens allow."""
    body: list[int] = []
    while len(body) < room:
        line = lines[int(rng.integers(len(lines)))]
        body += _tokenizer(tokenizer).encode(line + "\n", add_special_tokens=False)
    for size in range(min(room + 4, len(body)), 0, -1):  # tokens at the seams may join
        prompt: str = SONNET_REQUEST + _tokenizer(tokenizer).decode(body[:size])
        if _num_tokens(tokenizer, prompt) <= input_tokens:
            return prompt
    return SONNET_REQUEST


def _num_tokens(tokenizer: str, prompt: str) -> int:
    """Tokens of a prompt as the server will see it."""
    known = _tokenizer(tokenizer)
    if known.chat_template:
        messages = [{"role": "user", "content": prompt}]
        prompt = known.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return len(known(prompt).input_ids)


def median_of(runs: Sequence[Served]) -> Served:
    """The run of the median speed: a whole run, so that its numbers belong together. Of two, the slower."""
    assert runs
    return sorted(runs, key=lambda run: run.tokens_per_s)[math.ceil(len(runs) / 2) - 1]
