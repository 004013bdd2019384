"""Two real servers, and clients streaming from them, for the online demos."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from redraft.distill.data.conversations import Conversation
from redraft.distill.data.packing import PackedDataset
from redraft.distill.data.samples import Sample, build_samples
from redraft.distill.loss.choice import Divergence
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.loop import make_accelerator
from redraft.distill.train.optim import Optim
from redraft.distill.train.step import Distillation
from redraft.engine.hardware import this_machine
from redraft.engine.machine import ENGINE_IS_CPU, environment
from redraft.engine.measure import Measurement, find_full_load
from redraft.engine.process import process_group
from redraft.engine.prompts import Prompt
from redraft.engine.sampling import GREEDY, PENALTIES
from redraft.engine.server import EAGER, Mode, VllmServer, wait_until_healthy
from redraft.engine.target_dtype import TargetDtype
from redraft.files.artifact import write_whole
from redraft.files.progress import Progress
from redraft.files.replaced import find_obstacle
from redraft.heads.families.standalone import StandaloneDraft
from redraft.online.daemon import control

SETTINGS = "demo.json"
"""File with a demo's settings. It also marks a folder as a demo's, which may be deleted."""

TENANT = "demo"
"""Tenant of the traffic to learn from. Measurements are sent without a tenant, so test prompts are
never trained on.
"""

MAX_NUM_SEQS = 16
"""Maximum number of requests that a server answers at once."""

KV_CACHE_BYTES = 128 << 20
"""Size of the KV cache, enough for 16 requests of 512 tokens to the small target."""

Runner = Literal["v1", "v2"]
"""vLLM's model runners."""

TRITON = Path(sys.prefix) / "triton-for-v2"
"""Folder of Triton, visible only to the processes of V2, because standalone drafts break if V1
finds it.
"""

TRITON_BACKEND = Path("tests/helpers/triton_on_cpu")
"""Backend with which Triton's interpreter runs the kernels of V2 on a CPU."""


def clear(folder: Path, reads: object = None, *, overwrite: bool) -> None:
    """Make an empty folder. With `overwrite`, an older demo in it is deleted.

    Raises:
        FileExistsError: the folder contains files that are not a demo's, or a path in `reads` (the
            settings).
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not (folder / SETTINGS).is_file():
            raise FileExistsError(
                f"{folder} contains files that do not belong to a demo: move them away first"
            )
        if obstacle := find_obstacle([folder], reads, lambda _: None):
            raise FileExistsError(f"{obstacle}: choose a different --output")
        if not overwrite:
            raise FileExistsError(
                f"{folder} contains an earlier demo: choose a different --output, or pass "
                f"--overwrite"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)


def begin_report(cfg: Any, day: datetime.date, *, resume: bool = False) -> dict[str, Any]:
    """Empty `cfg.output`, write the settings there, and return the first entries of the report.

    `day` is the date that the chat template writes during the whole run, if it writes today's date.
    With `resume`, a demo with the same settings is kept.

    Raises:
        FileExistsError: for the same reasons as in `clear`.
        ValueError: the demo to resume has different settings.
    """
    # Convert to JSON and back, so that paths become strings and tuples become lists, as in the
    # report.
    settings = json.loads(json.dumps(asdict(cfg), default=str))
    for flag in ("overwrite", "resume"):
        settings.pop(flag, None)
    if resume and (cfg.output / SETTINGS).is_file():
        if json.loads((cfg.output / SETTINGS).read_text()) != settings:
            raise ValueError(
                f"{cfg.output} contains a demo with different settings: repeat those settings, "
                f"or pass --overwrite"
            )
    else:
        clear(cfg.output, cfg, overwrite=cfg.overwrite)
        write_whole(cfg.output / SETTINGS, json.dumps(settings, indent=2) + "\n")
    return {
        "target": cfg.target.name,
        "command": shlex.join(sys.argv),
        "config": settings,
        "date": day.isoformat(),
        "environment": environment(),
    }


def fastest_precision() -> Literal["no", "bf16"]:
    """Return the faster mixed precision for training on this machine."""
    return "bf16" if this_machine().has_bfloat16 else "no"


def distil(
    draft: StandaloneDraft,
    target: Any,
    tokenizer: Any,
    conversations: Sequence[Conversation],
    *,
    day: datetime.date,
    name: str,
    steps: int,
    lr: float,
) -> None:
    """Train the draft on these conversations, in steps of 4,096 tokens."""
    samples, _ = build_samples(conversations, tokenizer, max_length=1024, day=day, progress=False)
    for _ in distil_on(samples, draft, target, name=name, steps=steps, optim=Optim(lr=lr)):
        pass


def distil_on(
    samples: Sequence[Sample],
    draft: Any,
    target: Any,
    *,
    name: str,
    steps: int,
    optim: Optim,
    rows: int = 4,
) -> Iterator[int]:
    """Train the draft in steps of `rows` x 1,024 tokens.

    Yields the number of labels read so far, for the first time before the first step.
    """
    data, num_labels = PackedDataset(samples, sequence_length=1024), 0
    accelerator, signal = (
        make_accelerator(1, fastest_precision(), None),
        InProcessTarget(target, draft.aux_layer_ids),
    )
    distillation = Distillation(draft, signal, Divergence(), optim, steps, accelerator)
    yield num_labels
    for step in Progress(range(steps), desc=f"distil on {name}", unit="step"):
        num_labels += distillation.step([data.batch(step, batch_size=rows)]).labels
        yield num_labels
    distillation.close()


@dataclass(frozen=True, kw_only=True)
class Server:
    """One vLLM with the plugin, on a separate core."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    dtype: TargetDtype = "float32"
    mode: Mode = "compiled"

    async def ready(self) -> None:
        """Wait until the server answers. Raises the same errors as `wait_until_healthy`."""
        await asyncio.to_thread(wait_until_healthy, self.url, self.process, self.log)

    def measured(self, num_speculative_tokens: int) -> VllmServer:
        """Return the same server as an argument for the measurements of `eval`."""
        return VllmServer(
            url=self.url,
            model="m",
            dtype=self.dtype,
            num_speculative_tokens=num_speculative_tokens,
            mode=self.mode,
        )


@contextlib.contextmanager
def start_server(
    target: Path,
    registry: Path,
    *,
    spool: Path,
    token_file: Path,
    num_speculative_tokens: int,
    max_model_len: int,
    core: int,
    port: int,
    log: Path,
    dtype: TargetDtype = "float32",
    mode: Mode = "compiled",
    kv_cache_bytes: int = KV_CACHE_BYTES,
    options: Sequence[str] = (),
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start `redraft serve` with the registry's current draft.

    The server is not ready yet (`Server.ready`). `options` are further options of `redraft serve`,
    `arguments` are arguments of vLLM, and `environment` has further environment variables.
    """
    command = [
        *(
            sys.executable,
            "-m",
            "redraft.recipes.cli",
            "serve",
            str(target),
            "--registry",
            str(registry),
        ),
        *("--num-speculative-tokens", str(num_speculative_tokens), "--token-file", str(token_file)),
        *("--capture.spool", str(spool), "--capture.tenants", TENANT, *options),
        *(
            "--",
            "--port",
            str(port),
            "--host",
            "127.0.0.1",
            "--served-model-name",
            "m",
            "--dtype",
            dtype,
        ),
        *([EAGER] if mode == "eager" else []),
        *("--max-model-len", str(max_model_len), "--max-num-seqs", str(MAX_NUM_SEQS)),
        *("--kv-cache-memory-bytes", str(kv_cache_bytes), "--no-enable-prefix-caching"),
        # If two flags contradict each other, the last one counts, so `arguments` may turn the
        # prefix cache on.
        *("--per-request-spec-decode-metrics", "detailed", *arguments),
    ]
    # By default vLLM would bind both servers to the first core.
    bound = {
        "VLLM_CPU_OMP_THREADS_BIND": str(core % (os.cpu_count() or 1)),
        "VLLM_NO_USAGE_STATS": "1",
    }
    with process_group(command, log=log, env={**bound, **(environment or {})}) as process:
        yield Server(
            url=f"http://127.0.0.1:{port}", process=process, log=log, dtype=dtype, mode=mode
        )


@contextlib.asynccontextmanager
async def start_learner(folder: Path) -> AsyncIterator[None]:
    """Run `redraft learner` with the folder's learner.toml.

    It keeps its state there, and is not bound to a core.
    """
    command = [
        sys.executable,
        "-m",
        "redraft.recipes.cli",
        "learner",
        "--config",
        str(folder / "learner.toml"),
    ]
    log, socket = folder / "logs" / "learner.log", folder / "learner" / control.SOCKET
    socket.unlink(missing_ok=True)  # of a learner that was killed
    # One thread is enough, because the servers leave only about one of two cores free.
    with process_group(command, log=log, env={"OMP_NUM_THREADS": "1"}) as process:
        # The socket exists once the learner answers; before that, `control.ask` would fail to
        # connect.
        while not socket.exists():
            if process.poll() is not None:
                raise ChildProcessError(f"the learner did not start: see {log}")
            await asyncio.sleep(0.2)
        yield
        if process.poll() is not None:
            # A learner that has died must not be mistaken for one with nothing to do.
            raise ChildProcessError(f"the learner stopped early: see {log}")


def runner_environment(runner: Runner | None, *, on_cpu: bool = ENGINE_IS_CPU) -> dict[str, str]:
    """Variables of a server with this model runner; empty if vLLM chooses.

    Raises:
        FileNotFoundError: V2 is to run on a CPU, and Triton or the backend for its interpreter is
            missing.
    """
    if runner is None:
        return {}
    chosen = {"VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0"}
    if runner == "v1" or not on_cpu:
        return chosen
    if not TRITON_BACKEND.is_dir():
        raise FileNotFoundError(
            f"V2 on a CPU needs {TRITON_BACKEND}: start from the top of redraft's source tree"
        )
    if not TRITON.is_dir():
        raise FileNotFoundError(
            f"V2 on a CPU needs Triton in {TRITON}: `python -m pytest "
            "tests/distill/loss/test_kernels.py` installs it (700 MB)"
        )
    path = [str(TRITON), str(TRITON_BACKEND.absolute()), os.environ.get("PYTHONPATH", "")]
    return chosen | {
        "TRITON_INTERPRET": "1",
        "VLLM_PLUGINS": "redraft,cpu_triton",
        "PYTHONPATH": ":".join(filter(None, path)),
    }


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One streamed answer as a client received it."""

    prompt: Prompt
    server: str
    token_ids: list[int]
    times_s: list[float]
    """Monotonic times of the request and of every chunk."""
    counts: list[int]
    """Number of tokens at each of these times."""


class Traffic:
    """`clients` that stream from the servers. A client pauses for `pause_s` after every answer.

    Each prompt is asked once, and a client stops when no prompts are left. A workload that repeats
    its questions passes `itertools.cycle`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        prompts: Mapping[str, Iterable[Prompt]],
        *,
        clients: int,
        max_tokens: int,
        pause_s: float,
        captured: bool = True,
    ):
        self.urls, self.clients, self.max_tokens, self.pause_s = urls, clients, max_tokens, pause_s
        self.captured = captured
        self._prompts = {domain: iter(some) for domain, some in prompts.items()}
        self.domain = next(iter(prompts))
        """Domain of the next requests."""
        self.answers: list[Answer] = []
        self.failures: list[str] = []

    @contextlib.asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        """Send traffic while the block runs, then wait for the answers in flight."""
        is_over = asyncio.Event()

        async def client(number: int, http: httpx.AsyncClient) -> None:
            while not is_over.is_set():
                # All clients share one iterator.
                if (prompt := next(self._prompts[self.domain], None)) is None:
                    return
                try:
                    url = self.urls[number % len(self.urls)]
                    self.answers.append(
                        await stream(http, url, prompt, self.max_tokens, captured=self.captured)
                    )
                except (httpx.HTTPError, ValueError) as error:
                    self.failures.append(repr(error))
                await asyncio.sleep(self.pause_s)

        async with httpx.AsyncClient(timeout=60) as http:
            running = [asyncio.create_task(client(number, http)) for number in range(self.clients)]
            try:
                yield
            finally:
                is_over.set()
                await asyncio.gather(*running)

    def longest_gap_ms(self, server: str, begin_s: float, end_s: float) -> float:
        """Return the longest wait for a chunk in any stream of this server.

        Only waits that ended within the given period count.
        """
        longest_s = 0.0
        for answer in self.answers:
            if answer.server == server:
                # Count from the first chunk on, because the wait for it is queueing and prefill,
                # not a gap in a stream.
                for earlier, later in itertools.pairwise(answer.times_s[1:]):
                    if begin_s < later <= end_s:
                        longest_s = max(longest_s, later - earlier)
        return 1e3 * longest_s


async def stream(
    http: httpx.AsyncClient, url: str, prompt: Prompt, max_tokens: int, *, captured: bool
) -> Answer:
    """Request one streamed greedy answer.

    Raises:
        httpx.HTTPError: if the request fails.
        ValueError: if the stream contains an error or no token.
    """
    body = {
        "model": "m",
        "prompt": prompt.token_ids,
        "max_tokens": max_tokens,
        # Set all fields, because a server takes unset ones from the target's
        # generation_config.json.
        **asdict(GREEDY),
        **PENALTIES,
        "stream": True,
        "return_token_ids": True,
    }
    headers = {"X-Redraft-Domain": prompt.domain}
    headers |= {"X-Redraft-Tenant": TENANT} if captured else {"X-Redraft-Opt-Out": "1"}
    token_ids: list[int] = []
    times_s, counts = [time.monotonic()], [0]
    async with http.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            # The status 200 has already been sent, so a later failure can only be reported in the
            # stream.
            if "error" in event:
                raise ValueError(str(event["error"]))
            times_s.append(time.monotonic())
            for choice in event["choices"]:
                token_ids += choice.get("token_ids") or []
            counts.append(len(token_ids) - sum(counts))
    if not token_ids:
        raise ValueError("an answer without a token")
    return Answer(prompt=prompt, server=url, token_ids=token_ids, times_s=times_s, counts=counts)


def read_tau(measurement: Measurement) -> float:
    assert measurement.counts is not None, "the server has a draft"
    return measurement.counts.tau


async def answer_all(
    urls: Sequence[str],
    prompts: Iterable[Prompt],
    clients: int,
    max_tokens: int,
    *,
    captured: float,
) -> list[Answer]:
    """Stream the answers to all prompts, with a share `captured` of requests."""
    # All clients share one iterator, so no client idles while prompts are left.
    waiting, answers = iter(enumerate(prompts)), list[Answer]()

    async def client(number: int, http: httpx.AsyncClient) -> None:
        for index, prompt in waiting:
            # Spread evenly rather than at random: a share of 0.1 captures requests 9, 19, 29, ...
            is_captured = int((index + 1) * captured) > int(index * captured)
            answers.append(
                await stream(
                    http, urls[number % len(urls)], prompt, max_tokens, captured=is_captured
                )
            )

    async with httpx.AsyncClient(timeout=60) as http:
        await asyncio.gather(*(client(number, http) for number in range(clients)))
    return answers


def find_rate(answers: Sequence[Answer]) -> float:
    """Return the output tokens/s of all answers together.

    The rate covers only the time when every client has a request in progress.
    """
    full_s, num_tokens = find_full_load(
        [list(zip(a.times_s, a.counts, strict=True)) for a in answers]
    )
    return num_tokens / full_s


async def measure_rates(
    urls: Sequence[str], prompts: Sequence[Prompt], *, rounds: int, clients: int, max_tokens: int
) -> dict[float, list[float]]:
    """Return tokens/s while none, a tenth and all of the requests are captured.

    Each round begins with a different share.
    """
    rates: dict[float, list[float]] = {0.0: [], 0.1: [], 1.0: []}
    for number in Progress(range(rounds), desc="cost of capture", unit="round"):
        order = list(rates)
        # Round 0: 0, 0.1, 1. Round 1: 0.1, 1, 0. So no share is always first.
        for share in order[number % 3 :] + order[: number % 3]:
            rates[share].append(
                find_rate(await answer_all(urls, prompts, clients, max_tokens, captured=share))
            )
    return rates
