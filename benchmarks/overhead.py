"""Measure the cost of each part of redraft, against a plain `vllm serve` with vLLM's defaults.

$ python -m benchmarks.overhead                          # SmolLM2-135M-Instruct, 90 minutes on two quiet cores
$ python -m benchmarks.overhead --parts head states      # after a kill, rerun the same command
$ python -m benchmarks.overhead --clients 16 --questions 32    # a busy server
$ python -m benchmarks.overhead --target tests/assets/tiny-target --parts waits --rounds 6 --max-tokens 8

Each part is measured with its own server. It is compared with the plain server and with the server
that lacks only this part. The servers answer the same requests in interleaved blocks, and only one
of them computes at a time. Every block has its own cache salt, so requests share only the prefixes
that they share by design. Draft tokens change the speed of an answer, so servers with a draft
propose none, apart from vLLM's own speculation.

    questions   short prompts that share nothing
    sessions    four turns: each prompt extends the previous one, after a long prefix (one client)

Speeds and times are medians over rounds of the ratio within a round, with 95% intervals. `prefill`
is measured by the engine's clock, and `first_token` by the client's. `cpu` is the server processes'
CPU time per token, which is less sensitive to other work on the machine. The work of capture is
also split by stage, in CPU time, with tensors of the target's sizes.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil

from benchmarks.demo.never_slower import estimate_ratio
from benchmarks.demo.online_config import SMOLLM2
from benchmarks.demo.online_config import Config as SceneConfig
from benchmarks.demo.online_stage import make_scene
from benchmarks.overhead_capture import profile_capture
from redraft.distill.data.samples import held_out_prompts
from redraft.engine.counters import parse_prefix_cache
from redraft.engine.lookups import lookup_env
from redraft.engine.machine import engine_environment, environment
from redraft.engine.measure import measure
from redraft.engine.process import free_port, process_group
from redraft.engine.prompts import Prompt
from redraft.engine.server import IDLE_S, VllmServer, vllm_keys, vllm_server, wait_until_healthy
from redraft.engine.settings import read_settings, write_settings
from redraft.eval.report.page import write_page
from redraft.files.kept import compute_once
from redraft.files.progress import Progress
from redraft.files.target_folder import TargetFolder
from redraft.online.engine.config import CaptureConfig
from redraft.online.tokens import read_token
from redraft.recipes.cli.run import run_recipe
from redraft.recipes.serve.serve import plugin_environment, speculative_config
from redraft.recipes.serve.serve_config import ServeConfig
from redraft.recipes.serve.up import make_new_head

TEMPLATE = Path(__file__).parent / "templates" / "overhead.html.j2"

Name = Literal[
    "plain",
    "waits",
    "plugin",
    "scheduling",
    "graphs",
    "vllm_head",
    "last_block",
    "head",
    "text",
    "states",
    "counting",
    "lookups",
    "learner",
]


@dataclass(frozen=True, kw_only=True)
class Part:
    title: str
    against: Name = "plain"
    """Name of the server that lacks only this part."""


PARTS: Mapping[Name, Part] = {
    "waits": Part(title="engine core and workers sleep while they wait; fixes of the CPU build"),
    "plugin": Part(title="the plugin, loaded and idle", against="waits"),
    "scheduling": Part(title="asynchronous scheduling lost (--no-async-scheduling)"),
    "graphs": Part(title="compilation and CUDA graphs lost (--enforce-eager)"),
    "vllm_head": Part(title="vLLM's own speculation with the head: padding, prefix hits lost"),
    "last_block": Part(title="the prefix hits that it loses, used again", against="vllm_head"),
    "head": Part(title="the head: loaded (decoding), and reading prompts", against="plugin"),
    "text": Part(title="capture of text, all requests", against="head"),
    "states": Part(title="capture of hidden states as well", against="text"),
    "counting": Part(title="counting of answers", against="plugin"),
    "lookups": Part(title="lookups that hardly ever propose", against="counting"),
    "learner": Part(title="redraft up with its learner on the same cores", against="states"),
}

METRICS = ("speed", "decoding", "prefill", "first_token", "cpu")
"""Metrics. The first two are speeds: higher is better. For the others, lower is better."""

NUM_TOKENS = 3
TURNS = 4
KV_CACHE_BYTES = 256 << 20  # as of `vllm_server`


@dataclass(frozen=True, kw_only=True)
class Config:
    target: Path = SMOLLM2
    """Folder of the target, or the word `smollm2` for SmolLM2-135M-Instruct."""
    head: Path | None = None
    """Folder of an EAGLE or MTP head. By default, a new EAGLE-3 head made of the target's last
    layer.
    """
    parts: tuple[Name, ...] = tuple(PARTS)
    """Parts to measure."""
    rounds: int = 12
    """Number of blocks per workload and server. An interval needs at least 6."""
    questions: int = 4
    """Number of requests in a block of questions."""
    clients: int = 1
    """Number of clients. Several clients send questions only, because the turns of a session must
    follow one another.
    """
    prefix: int = 1425
    """Number of tokens that the requests of a session share, at most half of the target's context.
    """
    max_tokens: int = 48
    """Length of each answer, in tokens. It is fixed, because a model might end its answers at once
    and leave nothing to time.
    """
    output: Path = Path("outputs/overhead")
    """Folder for the report, the results of each part and the logs."""

    def __post_init__(self) -> None:
        if self.rounds < 6:
            raise ValueError(
                f"--rounds {self.rounds} is too few for a 95% interval: give at least 6"
            )
        if not 1 <= self.clients <= self.questions:
            raise ValueError(
                f"--clients {self.clients} must be at least 1, and at most --questions "
                f"{self.questions}"
            )
        if "plain" in self.parts:
            raise ValueError(
                "omit `plain` from --parts: every part is compared with the plain server"
            )


@dataclass(frozen=True, kw_only=True)
class Block:
    """Requests of one workload."""

    speed: float
    """Tokens/s."""
    decoding: float
    """Tokens/s after the first token, measured by the engine's clock."""
    prefill: float
    """Mean seconds."""
    first_token: float
    """Mean seconds."""
    cpu: float
    """CPU seconds of the server's processes per token."""
    hits: int
    """Number of tokens found in the prefix cache."""
    learner: float
    """CPU seconds of the learner, in total."""


Blocks = dict[str, dict[str, list[Block]]]
"""Blocks by workload and server."""


def main(cfg: Config) -> None:
    scene = make_scene(SceneConfig(target=cfg.target))
    target = scene.target.absolute()
    cfg.output.mkdir(parents=True, exist_ok=True)
    head = cfg.head
    if head is None:
        head = make_new_head(target, cfg.output / "head", NUM_TOKENS, is_required=True).folder
    assert head is not None
    opened = TargetFolder.open(target)
    questions = held_out_prompts(
        scene.traffic["code"],
        opened.tokenizer,
        num_prompts=2 * cfg.rounds * max(cfg.questions, TURNS),
        max_length=160,
    )
    loads = make_loads(cfg, questions, opened.text_config.max_position_embeddings)
    key = [str(target), opened.fingerprint, str(head), cfg.rounds, cfg.max_tokens]
    key += [cfg.clients, loads]
    found: dict[Name, Blocks] = {}
    with contextlib.ExitStack() as stack:
        servers = Servers(cfg, target, head.absolute(), stack)
        for name in cfg.parts:
            found[name] = compute_once(
                cfg.output / "kept",
                name,
                [*key, name, asdict(PARTS[name]), engine_environment()],
                Blocks,
                lambda name=name: measure_part(name, servers, cfg, loads),  # type: ignore[misc]
            )
            print("\n".join(describe(name, summarise(name, found[name]))))
    rows = {
        name: asdict(PARTS[name]) | {"loads": summarise(name, blocks)}
        for name, blocks in found.items()
    }
    report = {
        "target": target.name,
        "command": " ".join(sys.argv),
        "config": json.loads(json.dumps(asdict(cfg), default=str)),
        "environment": environment(),
        "parts": rows,
        "capture": profile_capture(opened.text_config, cfg.max_tokens),
    }
    page = write_page(cfg.output, report, TEMPLATE, lambda _: {}, extras={"metrics": METRICS})
    print(f"report: {page}")


def make_loads(
    cfg: Config, questions: Sequence[Prompt], context: int
) -> dict[str, list[list[Prompt]]]:
    """Return the requests of each block, by workload."""
    some = iter(questions)
    single = [[next(some) for _ in range(cfg.questions)] for _ in range(cfg.rounds)]
    if cfg.clients > 1:
        return {"questions": single}
    text = [token for question in questions for token in question.token_ids]
    size, sessions = min(cfg.prefix, context // 2), []
    for number in range(cfg.rounds):
        # Each block gets a different prefix of the same kind of text.
        ids = [text[(number * 97 + i) % len(text)] for i in range(size)]
        turns = []
        for _ in range(TURNS):
            ids = (ids + next(some).token_ids)[: context - cfg.max_tokens - 1]
            turns.append(Prompt(token_ids=ids))
        sessions.append(turns)
    return {"questions": single, "sessions": sessions}


@dataclass
class Servers:
    """The parts' servers. The plain server is started once, when the first part needs it."""

    cfg: Config
    target: Path
    head: Path
    stack: contextlib.ExitStack
    plain: VllmServer | None = None

    def start(self, name: Name, stack: contextlib.ExitStack) -> VllmServer:
        """Start a server that runs until the stack closes."""
        if name == "plain":
            self.plain = self.plain or self._start(name, self.stack)
            return self.plain
        return self._start(name, stack)

    def _start(self, name: Name, stack: contextlib.ExitStack) -> VllmServer:
        if name == "learner":
            return stack.enter_context(self._up())
        arguments, variables = self.describe(name)
        mode: Literal["eager", "compiled"] = "eager" if name == "graphs" else "compiled"
        started = vllm_server(
            self.target,
            log=self.cfg.output / f"vllm-{name}.log",
            vllm_defaults=True,
            mode=mode,
            extra_args=arguments,
            extra_env=variables,
        )
        return stack.enter_context(started)

    def describe(self, name: Name) -> tuple[list[str], dict[str, str]]:
        """Return a server's own arguments and environment variables, without the common ones."""
        own_wait = write_settings({"engine_wait": False})
        if name in ("plain", "scheduling", "graphs"):
            return (["--no-async-scheduling"] if name == "scheduling" else []), own_wait
        if name == "waits":
            return [], {}
        if name in ("vllm_head", "last_block"):
            config = speculative_config(self._serve())
            config["use_local_argmax_reduction"] = False
            config["disable_eagle_block_drop"] = name == "last_block"
            return ["--speculative-config", json.dumps(vllm_keys(config))], own_wait
        if name == "plugin":
            return [], plugin_environment(self._serve(), {})
        counted: dict[str, Any] = {"draft": "live"}
        counted |= {"verify_cost": 1.0} if name == "lookups" else {}
        capture = CaptureConfig()
        if name in ("text", "states"):
            spool = self.cfg.output.absolute() / f"spool-{name}"
            capture = CaptureConfig(spool=spool, hidden_states=name == "states")
        serve = self._serve(
            pace="off" if name == "lookups" else "0",
            capture=capture,
            **(counted if name in ("counting", "lookups") else {}),
        )
        config = speculative_config(serve)
        variables = plugin_environment(serve, {})
        variables |= lookup_env(config, read_settings(variables))
        return ["--speculative-config", json.dumps(vllm_keys(config))], variables

    def _serve(self, **options: Any) -> ServeConfig:
        given: dict[str, Any] = {"draft": str(self.head), "num_speculative_tokens": NUM_TOKENS}
        return ServeConfig(target=str(self.target), **(given | options))

    @contextlib.contextmanager
    def _up(self) -> Iterator[VllmServer]:
        """Start `redraft up` with a new head and 0 draft tokens. It records all requests."""
        folder, port = self.cfg.output.absolute() / "up", free_port()
        log, url = self.cfg.output / "up.log", f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "redraft.recipes.cli", "up", str(self.target)]
        command += ["--folder", str(folder), "--draft", "head", "--capture.fraction", "1", "--"]
        command += ["--port", str(port), "--max-model-len", "auto"]
        command += ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
        with process_group(command, log=log, env={"VLLM_NO_USAGE_STATS": "1"}) as process:
            wait_until_healthy(url, process, log, name="redraft up")
            headers = {"Authorization": f"Bearer {read_token(folder / 'token')}"}
            httpx.post(
                f"{url}/redraft/pace", json={"pace": "0"}, headers=headers, timeout=60
            ).raise_for_status()
            learner = find_learner(port)
            learner.suspend()
            try:
                yield VllmServer(
                    url=url, model=str(self.target), dtype="auto", num_speculative_tokens=0
                )
            finally:
                learner.resume()


def find_tree(port: int) -> psutil.Process:
    """Find the child of this process that has the port in its arguments and listens on it."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if str(port) in child.cmdline():
                return child
    raise ProcessLookupError(f"no child of this process listens on port {port}")


def find_learner(port: int) -> psutil.Process:
    """Find the learner that belongs to the `redraft up` at a port."""
    return next(child for child in find_tree(port).children() if "learner" in child.cmdline())


def count_cpu(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and its descendants."""
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def measure_part(
    name: Name, servers: Servers, cfg: Config, loads: Mapping[str, Sequence[Sequence[Prompt]]]
) -> Blocks:
    """Measure blocks of the plain server, and of servers with and without this part."""
    names = list(dict.fromkeys(("plain", PARTS[name].against, name)))
    found: Blocks = {load: {each: [] for each in names} for load in loads}
    with contextlib.ExitStack() as stack:
        running = {each: servers.start(each, stack) for each in names}
        blocks = cfg.rounds * len(loads) * len(names)
        with Progress(total=blocks, desc=name, unit="block") as bar:
            for number in range(cfg.rounds):
                turn = number % len(names)
                for load, rounds in loads.items():
                    for each in [*names[turn:], *names[:turn]]:
                        found[load][each].append(
                            measure_block(running[each], rounds[number], cfg, each == "learner")
                        )
                        bar.update()
    return found


def measure_block(
    server: VllmServer, prompts: Sequence[Prompt], cfg: Config, has_learner: bool
) -> Block:
    port = httpx.URL(server.url).port
    assert port is not None
    time.sleep(IDLE_S)  # the previous server's worker is still spinning
    tree = find_tree(port)
    learner = find_learner(port) if has_learner else None
    if learner:
        learner.resume()
    before = count_cpu(tree), count_cpu(learner) if learner else 0.0, read_hits(server)
    try:
        run = measure(
            server,
            prompts,
            max_tokens=cfg.max_tokens,
            concurrency=cfg.clients,
            ignore_eos=True,
        )
        learned = count_cpu(learner) - before[1] if learner else 0.0
        cpu = count_cpu(tree) - before[0] - learned
    finally:
        if learner:
            learner.suspend()
    tokens = run.num_output_tokens
    assert run.decode_s
    assert run.prefill_s
    assert run.ttft_s
    return Block(
        speed=run.tokens_per_s,
        decoding=(tokens - len(prompts)) / run.decode_s,
        prefill=run.prefill_s / len(prompts),
        first_token=run.ttft_s,
        cpu=cpu / tokens,
        hits=read_hits(server) - before[2],
        learner=learned,
    )


def read_hits(server: VllmServer) -> int:
    text = httpx.get(f"{server.url}/metrics", timeout=30, trust_env=False).text
    return parse_prefix_cache(text).hits


def summarise(name: Name, blocks: Blocks) -> dict[str, Any]:
    """Return the ratios to the plain server and to the one without this part, by metric."""
    found: dict[str, Any] = {}
    for load, by_server in blocks.items():
        ours, others = by_server[name], {"plain": by_server["plain"]}
        others["without"] = by_server[PARTS[name].against]
        found[load] = {
            metric: {kind: ratio(metric, ours, other) for kind, other in others.items()}
            for metric in METRICS
        }
        found[load]["hits"] = {
            kind: sum(block.hits for block in some)
            for kind, some in (others | {"with": ours}).items()
        }
        found[load]["learner_cpu_s"] = statistics.fmean(block.learner for block in ours)
    return found


def ratio(metric: str, ours: Sequence[Block], theirs: Sequence[Block]) -> dict[str, Any]:
    """Return the median ratio of a metric over rounds, with its 95% interval."""
    return estimate_ratio(
        [getattr(one, metric) / getattr(two, metric) for one, two in zip(ours, theirs, strict=True)]
    )


def describe(name: Name, summary: Mapping[str, Any]) -> Iterator[str]:
    """Format the results as lines for a terminal."""
    yield f"{name}: {PARTS[name].title}"
    for load, found in summary.items():
        shown = [f"{metric} {show(found[metric]['plain'])}" for metric in METRICS]
        yield f"  {load}, over plain: {', '.join(shown)}"
        if PARTS[name].against != "plain":
            shown = [f"{metric} {show(found[metric]['without'])}" for metric in METRICS]
            yield f"  {load}, over {PARTS[name].against}: {', '.join(shown)}"


def show(found: Mapping[str, Any]) -> str:
    low, high = found["interval"] or (float("nan"), float("nan"))
    return f"{found['ratio']:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
