"""Run the load of one cell of a serving benchmark with vLLM's load generator (`vllm bench serve`).

Load ──► prompts (vLLM's data sets, or lines of a text cut to a length) ──► vllm.benchmarks.serve
──► LoadResult

The generator runs in this process, with arguments as on the command line, because importing it
takes ten seconds and a cell only a few.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from redraft.eval.engine.measure import (
    MOST_REPEATS,
    changed_speed,
    time_steps,
    wait_for_decode_time,
)
from redraft.eval.engine.sampling import PENALTIES, Sampling, list_penalties
from redraft.eval.engine.server import VllmServer
from redraft.heads.files.artifact import write_whole
from redraft.heads.files.kept import fingerprint_path, hash_key

DATA_KINDS = ("random", "sonnet")
FILE_KINDS = {".json": "sharegpt", ".jsonl": "jsonl"}
WARM_UP_REQUESTS = 4
SONNET_REQUEST = "Go on with these lines:\n"  # measured cells have this wording: do not change it


@dataclass(frozen=True, kw_only=True)
class Load:
    data: (
        str  # `random`, `sonnet`, `sonnet:TEXT`, ShareGPT's FILE.json, or FILE.jsonl with `prompt`
    )
    input_tokens: int | None  # of every prompt; None for data of fixed lengths
    output_tokens: int  # Maximum length of every answer.
    num_prompts: int
    sampling: Sampling  # of every request, beside the penalties of the target's folder
    concurrency: int  # Number of requests in flight: one is sent as soon as another one has ended.
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in DATA_KINDS and not self.has_fixed_lengths:
            raise ValueError(
                f"no prompts are called {self.data!r}: give random, sonnet, FILE.jsonl or FILE.json"
            )
        if self.file and not Path(self.file).is_file():
            raise FileNotFoundError(
                f"{self.file}, the file of the {self.kind} prompts, does not exist"
            )
        if self.num_prompts < 1:
            raise ValueError(
                f"there is nothing to measure: the number of prompts is {self.num_prompts}"
            )

    @property
    def kind(self) -> str:
        name = self.data.partition(":")[0]
        return name if name in DATA_KINDS else FILE_KINDS.get(Path(self.data).suffix, name)

    @property
    def file(self) -> str:
        return self.data if self.has_fixed_lengths else self.data.partition(":")[2]

    @property
    def has_fixed_lengths(self) -> bool:
        return self.kind in FILE_KINDS.values()


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Statistics over the requests of a cell, in milliseconds."""

    mean: float
    median: float
    p99: float

    @staticmethod
    def from_seconds(seconds: Sequence[float]) -> Latency:
        values_ms = 1e3 * np.asarray(seconds or [0.0])
        return Latency(
            mean=float(values_ms.mean()),
            median=float(np.median(values_ms)),
            p99=float(np.percentile(values_ms, 99)),
        )


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    num_requests: int
    duration_s: float
    mean_input_tokens: float
    num_output_tokens: int
    tokens_per_s: float  # output, from the first request to the last answer
    requests_per_s: float
    ttft_ms: Latency  # Time to the first token.
    tpot_ms: Latency  # Time per further token.
    e2e_ms: Latency  # Time of a whole request.
    num_steps: int  # Target steps of all requests, without prefills.
    step_s: float  # mean of a request's step, including prefills of others in between
    tau: float  # with steps in which n-grams found nothing; 1 without a draft
    acceptance_per_position: tuple[float, ...]  # share of steps that accept up to each position
    half_step_s: tuple[float, float] | None = None  # As of `Measurement`, by the client's clock.
    repeats: int = 0  # earlier runs discarded because the server changed speed


def run_load(server: VllmServer, load: Load, folder: Path) -> LoadResult:
    """Run a load on a server.

    Generated prompts and the generator's output are kept in `folder`. A run in which the server
    changes speed by more than a third is repeated (`changed_speed`), at most `MOST_REPEATS` times.

    Raises:
        ValueError: if the data has no prompt or the engine refuses one.
        ConnectionError: if the server is not reachable.
    """
    _require_healthy(server)
    folder.mkdir(parents=True, exist_ok=True)
    arguments = ["--base-url", server.url, "--model", server.model, "--backend", "openai"]
    arguments += ["--extra-body", json.dumps(sampling_fields(load, server.model))]
    # `convert_result` needs the times of every request, which only the detailed result has.
    arguments += ["--seed", str(load.seed), "--save-detailed", "--disable-tqdm"]
    arguments += ["--max-concurrency", str(load.concurrency)]
    arguments += data_arguments(load, server.model, folder)
    clock = wait_for_decode_time(server, at_least=0)
    # the first pass is a warm-up: a few requests of the same load, whose result is dropped
    for number in range(-1, MOST_REPEATS + 1):
        num_prompts = min(WARM_UP_REQUESTS, load.num_prompts) if number < 0 else load.num_prompts
        before = clock
        result = _generate([*arguments, "--num-prompts", str(num_prompts)], folder / "load.log")
        _require_success(server, load, result)
        # The engine's statistics arrive after the answers: without the wait, the load would get the
        # warm-up's.
        clock = wait_for_decode_time(server, at_least=before.requests + result["completed"])
        run = replace(
            convert_result(result, clock.seconds - before.seconds), repeats=max(0, number)
        )
        if number >= 0 and not changed_speed(run.half_step_s):
            break
    return run


def sampling_fields(load: Load, target: str) -> dict[str, float]:
    """The sampling parameters of every request.

    The generator itself would turn a repetition penalty off.
    """
    return PENALTIES | list_penalties(target) | asdict(load.sampling)


def convert_result(result: dict[str, Any], decode_s: float) -> LoadResult:
    """Convert the generator's detailed result.

    `decode_s` is the time of requests after the first token by the engine's clock: a busy server
    sends several steps at once.
    """
    requests = list(zip(result["latencies"], result["ttfts"], result["output_lens"], strict=True))
    decode_tokens = sum(tokens - 1 for *_, tokens in requests)
    # The generator leaves these out if nothing was proposed during the load.
    drafts, accepted = (
        result.get(f"spec_decode_{name}", 0) for name in ("num_drafts", "accepted_tokens")
    )
    # A step verifies one draft. An n-gram draft may find nothing for a step: then count the
    # target's own tokens, one a step. The drafts may exceed these by the steps whose tokens were
    # cut off at the length of the answer.
    steps = max(drafts, decode_tokens - accepted, 1)
    return LoadResult(
        num_requests=result["completed"],
        duration_s=result["duration"],
        mean_input_tokens=result["total_input_tokens"] / result["completed"],
        num_output_tokens=result["total_output_tokens"],
        tokens_per_s=result["output_throughput"],
        requests_per_s=result["request_throughput"],
        ttft_ms=Latency.from_seconds(result["ttfts"]),
        tpot_ms=Latency.from_seconds(
            [(latency - ttft) / (tokens - 1) for latency, ttft, tokens in requests if tokens > 1]
        ),
        e2e_ms=Latency.from_seconds(result["latencies"]),
        num_steps=steps,
        step_s=decode_s / steps,
        tau=1 + accepted / steps,
        # The generator's rates are per draft. n-grams have steps without one.
        acceptance_per_position=tuple(
            rate * drafts / steps
            for rate in result.get("spec_decode_per_position_acceptance_rates", ())
        ),
        half_step_s=time_steps(_arrivals(result))[1],
    )


def _arrivals(result: Mapping[str, Any]) -> list[list[float]]:
    requests = zip(result["start_times"], result["ttfts"], result["itls"], strict=True)
    return [list(itertools.accumulate([start, ttft, *gaps])) for start, ttft, gaps in requests]


def _require_healthy(server: VllmServer) -> None:
    try:
        httpx.get(f"{server.url}/health", timeout=30, trust_env=False).raise_for_status()
    except httpx.HTTPError as error:
        raise ConnectionError(f"cannot reach {server.url}: {error}") from error


def _require_success(server: VllmServer, load: Load, result: dict[str, Any]) -> None:
    """Raise ValueError unless every request was answered."""
    if result["failed"] == 0:
        return
    _require_healthy(server)
    first = next(error for error in result["errors"] if error)
    raise ValueError(
        f"the server refused {result['failed']} of {len(result['errors'])} {load.data} requests: "
        f"{first.strip().splitlines()[-1]}"
    )


def _generate(arguments: Sequence[str], log: Path) -> dict[str, Any]:
    generator, parser = _generator()
    with log.open("a") as output, contextlib.redirect_stdout(output), _quiet_logging():
        try:
            return dict(generator.main(parser.parse_args(list(arguments))))
        except (
            IndexError
        ) as error:  # the generator draws prompts from an empty list if it filtered all of them out
            raise ValueError(
                f"no conversation fits the length limits of the generator: see {log}"
            ) from error


@functools.cache
def _generator() -> tuple[Any, Any]:
    with _quiet_logging():
        from vllm.benchmarks import serve
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    return serve, parser


@contextlib.contextmanager
def _quiet_logging() -> Iterator[None]:
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def data_arguments(load: Load, tokenizer: str, folder: Path) -> list[str]:
    """The generator's arguments for the prompts of a load.

    Prompts made of lines are written to `folder` once.
    """
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
    asked = [
        fingerprint_path(load.file),
        fingerprint_path(tokenizer),
        load.input_tokens,
        load.num_prompts,
        load.seed,
    ]
    prompts = folder / f"sonnet-{hash_key(asked)[:16]}.jsonl"
    if not prompts.is_file():
        write_sonnet(prompts, Path(load.file) if load.file else None, tokenizer, load)
    return _custom(str(prompts), tokenizer) + lengths


def _custom(path: str, tokenizer: str) -> list[str]:
    # By default the generator applies the chat template, which a base model does not have.
    plain = [] if _tokenizer(tokenizer).chat_template else ["--skip-chat-template"]
    return ["--dataset-name", "custom", "--dataset-path", path, "--disable-shuffle", *plain]


def _require_conversations(path: Path) -> None:
    try:
        rows = json.loads(path.read_text())
        found = sum(len(row.get("conversations", ())) >= 2 for row in rows)
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a ShareGPT file, which is a JSON list of conversations: {error}"
        ) from error
    if not found:
        raise ValueError(
            f"{path} has no conversation of at least two turns: there is nothing to measure"
        )


def _require_prompts(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty: there is nothing to measure")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} line {number} is not JSON: {error}") from error
        if not isinstance(row, dict) or "prompt" not in row:
            raise ValueError(f"{path} line {number} has no column `prompt`")


@functools.lru_cache(maxsize=4)
def _tokenizer(name: str) -> Any:
    from redraft.heads.files.checkpoint import load_tokenizer  # loads transformers

    return load_tokenizer(name)


def write_sonnet(output: Path, text: Path | None, tokenizer: str, load: Load) -> None:
    """Write prompts of `load.input_tokens` tokens each, including the chat template, as JSON lines.

    Each prompt is made of random lines of a text, as vLLM's former sonnet data set did with
    Shakespeare's sonnets. This gives natural text of any length, and prompts that share no prefix.

    Raises:
        ValueError: if the text has too few lines, or the chat template leaves no room for them.
    """
    if text is None:
        # In every Python's standard library: prose without a download.
        from pydoc_data.topics import topics

        source = "\n".join(topics[name] for name in sorted(topics))
    else:
        source = text.read_text()
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    if len(lines) < 2:
        raise ValueError(
            f"{text} has {len(lines)} lines: prompts are made of lines of a text, give one with 2 "
            "or more"
        )
    assert load.input_tokens is not None, "sonnet prompts need a length"
    room = load.input_tokens - _num_tokens(tokenizer, SONNET_REQUEST)
    if room < 1:
        raise ValueError(
            f"{load.input_tokens} input tokens leave no room for text beside the chat template: "
            "ask for more"
        )
    rng = np.random.default_rng(load.seed)
    prompts = [
        _sonnet(lines, tokenizer, load.input_tokens, room, rng) for _ in range(load.num_prompts)
    ]
    write_whole(output, "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def _sonnet(
    lines: Sequence[str], tokenizer: str, input_tokens: int, room: int, rng: np.random.Generator
) -> str:
    """One prompt: random lines, cut to at most `input_tokens` tokens with the chat template."""
    body: list[int] = []
    while len(body) < room:
        line = lines[int(rng.integers(len(lines)))]
        body += _tokenizer(tokenizer).encode(line + "\n", add_special_tokens=False)
    # Encoded again each time, because decoding and encoding are not inverse.
    for size in range(
        min(room + 4, len(body)), 0, -1
    ):  # at the seam with the request, tokens may merge
        prompt: str = SONNET_REQUEST + _tokenizer(tokenizer).decode(body[:size])
        if _num_tokens(tokenizer, prompt) <= input_tokens:
            return prompt
    return SONNET_REQUEST


def _num_tokens(tokenizer: str, prompt: str) -> int:
    known = _tokenizer(tokenizer)
    if known.chat_template:
        messages = [{"role": "user", "content": prompt}]
        prompt = known.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return len(known(prompt).input_ids)


def median_run(runs: Sequence[LoadResult]) -> LoadResult:
    """The run with the median speed, or the slower of the two in the middle.

    A whole run, because medians of each number separately would not be consistent with each other.
    """
    assert runs
    return sorted(runs, key=lambda run: run.tokens_per_s)[math.ceil(len(runs) / 2) - 1]
