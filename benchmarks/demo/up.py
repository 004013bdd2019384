"""Run `redraft up` from an empty folder to a draft that pays off.

The speed is compared over time with the same server without drafts.

    $ make demo-up                                # SmolLM2-135M-Instruct, 100 minutes on two cores: outputs/demo-up/
    $ make demo-up UP=--resume                    # continue after a kill
    $ python -m benchmarks.demo.up --overwrite --learn-s 60 --pairs 6 --target tests/assets/tiny-target

One command starts server and learner. Clients, 1 to 8 at once, ask for functions of the standard
library, and the learner trains on the answers. No question is asked twice: counted answers would
draft a repeated one whole. Speed is measured in pairs of blocks of further questions of this kind:
one at the server's own pace, one without drafts (`POST /redraft/pace`). Their ratio compares the
server with itself at 0 draft tokens, with the learner running in both cases, not with a plain vLLM.
Nothing is measured while a version is rolled out. In the middle, SIGKILL ends all processes, and
the same command continues. Then the workloads of `benchmarks.workloads` compare it with a plain
`vllm serve`, whose blocks run while the learner is paused: `never_slower`. At the end, the command starts again with
`--draft head`, to measure the head without counted answers, and the answers are compared with the
target's. A head is trained offline on the same records, and compared with every version.
"""

from __future__ import annotations

import asyncio
import itertools
import shlex
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import altair as alt
import httpx
import msgspec
import psutil

from benchmarks.demo.delays import account
from benchmarks.demo.fleet import MAX_NUM_SEQS, Traffic, answer_all, begin_report, find_rate
from benchmarks.demo.never_slower import Beside, estimate_ratio, learner_stopped
from benchmarks.demo.online_config import MAX_MODEL_LEN, SMOLLM2
from benchmarks.demo.online_config import Config as SceneConfig
from benchmarks.demo.online_outputs import compare_with_target, spread
from benchmarks.demo.online_stage import count_kv_bytes, make_scene, to_torch
from benchmarks.demo.up_versions import compare_versions, draw_learning
from benchmarks.workloads import list_workloads
from redraft.distill.data.day import choose_day
from redraft.distill.data.samples import held_out_prompts
from redraft.engine.process import free_port, process_group, start_group
from redraft.engine.prompts import Prompt
from redraft.engine.server import vllm_server, wait_until_healthy
from redraft.engine.target_dtype import TargetDtype
from redraft.eval.report.charts import PANEL_HEIGHT, Spec, to_spec
from redraft.eval.report.page import write_page
from redraft.files.artifact import write_whole
from redraft.files.checkpoint import load_causal_lm
from redraft.files.progress import Progress
from redraft.files.target_folder import TargetFolder
from redraft.online.daemon import control
from redraft.online.daemon.config import LearnerConfig, load_config
from redraft.online.fleet.registry import Registry
from redraft.online.journal import GateEntry, Journal, SwapEntry
from redraft.online.page.headline import describe_promoted
from redraft.online.tokens import read_token
from redraft.recipes.cli.run import run_recipe

TEMPLATE = Path(__file__).parent / "templates" / "up.html.j2"

LONGEST = 8192
"""Maximum length of the servers' texts, in tokens, if the target allows it."""

CLIENTS = (1, 2, 4, 8)
"""Numbers of concurrent requests, used in turn."""

LEAST_BLOCK = 2
"""Minimum number of requests in a block; with more clients, each sends one request. Blocks are
short, so that the machine's speed is constant within one; the first 200 requests make 25 pairs.
"""

WINDOW = 9
"""Number of successive pairs that prove a gain if all of them show one.

By default, the demo has 46 pairs with one client. Without any gain, 4% of the runs have nine faster
pairs in a row, and 29% have six.
"""

MOST_QUESTIONS = 6000
"""Maximum number of questions; the whole demo asks about 2,500."""

RESERVED = 50
"""Number of questions that are marked as asked at once. A resumed demo asks none of them again."""

WARM_UP_S = 30.0
"""Seconds of traffic before the head is measured alone, so that a new server finds its pace."""

ROLLING_OUT = ("publishing", "canary", "rolling")
"""Phases of the learner in which drafts are counted, or about to be."""


@dataclass(frozen=True, kw_only=True)
class Config:
    target: Path = SMOLLM2
    """Folder of the target, or the word `smollm2` for SmolLM2-135M-Instruct."""
    target_dtype: TargetDtype | None = None
    """Dtype of the target. By default, bfloat16 if the target is stored in it and this machine
    computes in it, and float32 for the small target.
    """
    parts: Path = Path("outputs/parts")
    """Folder of the downloaded model and prompts, kept for later runs."""
    output: Path = Path("outputs/demo-up")
    """Folder for the report and for the folder of `redraft up`."""
    overwrite: bool = False
    """Replace the demo in `output`."""
    resume: bool = False
    """Continue the demo in `output` after a kill, with the measurements that it saved."""
    workload_pairs: int = 20
    """Number of block pairs per workload in the comparison with a plain server. An interval needs
    at least 6.
    """
    pairs: int = 24
    """Number of block pairs at the start, at the end with one client, and with the head alone. An
    interval needs at least 6.
    """
    learn_s: float = 480
    """Duration of the traffic to learn from, in seconds, with a pair of blocks each minute."""
    max_tokens: int = 48
    """Maximum length of an answer, in tokens."""
    checked_answers: int = 80
    """Maximum number of answers to compare with the target's greedy tokens."""

    def __post_init__(self) -> None:
        for flag, pairs in (("pairs", self.pairs), ("workload-pairs", self.workload_pairs)):
            if pairs < 6:
                raise ValueError(f"--{flag} {pairs} is too few for a 95% interval: give at least 6")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two blocks with the same number of questions."""

    s: float
    """Seconds since the server was first ready."""
    clients: int
    auto: float
    """Tokens/s at the server's own pace."""
    undrafted: float
    """Tokens/s without drafts."""
    version: str

    @property
    def ratio(self) -> float:
        return self.auto / self.undrafted


def main(cfg: Config) -> None:
    began_s, day = time.perf_counter(), choose_day()
    scene = make_scene(
        SceneConfig(target=cfg.target, target_dtype=cfg.target_dtype, parts=cfg.parts)
    )
    report = begin_report(cfg, day, resume=cfg.resume) | {
        "target": scene.target.name,
        "dtype": scene.dtype,
    }
    opened, code = TargetFolder.open(scene.target), "code"

    questions = held_out_prompts(
        scene.traffic[code], opened.tokenizer, num_prompts=MOST_QUESTIONS, max_length=160, day=day
    )
    # Twice the longest text of the workloads, so that their cached prefixes fit as well.
    kv_bytes = 2 * count_kv_bytes(opened.text_config, 1, scene.dtype)
    longest = min(LONGEST, opened.text_config.max_position_embeddings)
    play = Play(cfg, scene.target.absolute(), scene.dtype, kv_bytes, questions, longest)
    try:
        asyncio.run(play.run())
    finally:
        play.stop()
    report |= play.describe()
    target = load_causal_lm(scene.target, to_torch(scene.dtype)).eval()
    exact = (
        target
        if scene.dtype == "float32"
        else load_causal_lm(scene.target, to_torch("float32")).eval()
    )
    report["outputs"] = compare_with_target(
        spread(play.seen.texts, cfg.checked_answers), target, exact
    )
    report["lossless"] = report["outputs"]["lossless"]
    report["duration_s"] = round(time.perf_counter() - began_s, 1)

    def charts(report: Mapping[str, Any]) -> dict[str, Spec]:
        return {"speed": draw(report), **draw_learning(report["learning"])}

    page = write_page(cfg.output, report, TEMPLATE, charts)
    print(summarise(report["up"]))
    print(f"report: {page}")


class Seen(msgspec.Struct):
    """All measurements so far, saved in the output folder so that a killed demo can continue."""

    finished: list[str] = []
    """Parts of the demo that are finished."""
    reserved: int = 0
    """Number of questions that may have been asked."""
    start_s: float = 0.0
    ready_s: float = 0.0
    """Time when the server was first ready, in seconds since the epoch."""
    pairs: list[Pair] = []
    """Pairs measured on the server with counted answers."""
    alone: list[Pair] = []
    """Pairs measured with the head alone."""
    first: int = 0
    """Number of pairs measured before the learner starts to learn."""
    last: int = 0
    """Number of pairs measured before the final ones."""
    restarts_s: list[float] = []
    """Times of the kill and of the first answer after it, in seconds since `ready_s`."""
    cut_by_kill: int = 0
    never_slower: dict[str, Any] = {}
    pace: dict[str, Any] = {}
    texts: list[tuple[list[int], list[int]]] = []
    """Token ids of the traffic's prompts and answers."""
    failures: list[str] = []
    counted: int = 0
    """Number of failures in finished parts. An interrupted part's failures are dropped, because its
    servers were stopped.
    """


@dataclass
class Play:
    """The demo's run: the command, its clients, and all observations."""

    cfg: Config
    target: Path
    dtype: TargetDtype
    kv_bytes: int
    questions: Sequence[Prompt]
    longest: int = MAX_MODEL_LEN
    """Maximum length of the servers' texts, in tokens."""
    seen: Seen = field(default_factory=Seen)
    _process: Any = None

    def __post_init__(self) -> None:
        self.folder, self.url = self.cfg.output.absolute() / "up", f"http://127.0.0.1:{free_port()}"
        self._seen_path = self.cfg.output / "measured.json"
        if self._seen_path.is_file():
            self.seen = msgspec.json.decode(self._seen_path.read_bytes(), type=Seen)
        questions = self._ask_once()
        self.traffic = Traffic(
            [self.url],
            {"code": questions},
            clients=4,
            max_tokens=self.cfg.max_tokens,
            pause_s=0.2,
        )
        self._waiting = questions

    def command(self, *options: str) -> list[str]:
        arguments = list_arguments(self.url, self.dtype, self.kv_bytes, self.longest)
        given = ["up", str(self.target), "--folder", str(self.folder), "--capture.fraction", "1"]
        return [*given, *options, "--", *arguments]

    @property
    def learner(self) -> LearnerConfig:
        return load_config(self.folder / "learner.toml")

    def _ask_once(self) -> Iterator[Prompt]:
        """Yield the questions that no earlier run can have asked."""
        for number in range(self.seen.reserved, len(self.questions)):
            if number == self.seen.reserved:
                self.seen.reserved = number + RESERVED
                self.save()
            yield self.questions[number]

    def save(self) -> None:
        """Save the measurements and the answers so far."""
        answers, failures = self.traffic.answers, self.traffic.failures
        self.seen.texts += [(list(a.prompt.token_ids), list(a.token_ids)) for a in answers]
        self.seen.failures += failures
        answers.clear()
        failures.clear()
        write_whole(self._seen_path, msgspec.json.encode(self.seen))

    async def run(self) -> None:
        """Play the parts that are not finished."""
        seen, half_s = self.seen, self.cfg.learn_s / 2
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            "first": self.measure_first,
            "learning": lambda: self.learn(half_s),
            "kill": self.kill,
            "learning on": lambda: self.learn(half_s),
            "last": self.measure_last,
            "plain": self.compare_with_plain,
            "alone": self.measure_alone,
        }
        for name, play in parts.items():
            if name in seen.finished:
                continue
            if self._process is None and name != "alone":
                start_s = self.start()
                if not seen.ready_s:
                    seen.start_s, seen.ready_s = start_s, time.time()
            del seen.failures[seen.counted :]
            await play()
            self.save()
            seen.counted = len(seen.failures)
            seen.finished.append(name)
            self.save()

    async def measure_first(self) -> None:
        for number in Progress(range(self.cfg.pairs), desc="first requests", unit="pair"):
            if number >= len(self.seen.pairs):
                await self.measure(CLIENTS[number % len(CLIENTS)])
        self.seen.first = len(self.seen.pairs)

    async def measure_last(self) -> None:
        self.seen.last = self.seen.last or len(self.seen.pairs)
        for number in Progress(range(2 * self.cfg.pairs), desc="last requests", unit="pair"):
            if self.seen.last + number >= len(self.seen.pairs):
                clients = 1 if number < self.cfg.pairs else CLIENTS[number % len(CLIENTS)]
                await self.measure(clients)

    async def measure_alone(self) -> None:
        await self.restart_without_counts()
        for number in Progress(range(self.cfg.pairs), desc="the head alone", unit="pair"):
            if number >= len(self.seen.alone):
                await self.measure(1, self.seen.alone)

    def start(self, *options: str) -> float:
        """Start the command, wait until it serves, and return how many seconds that took."""
        began_s, log = time.monotonic(), self.folder.parent / "up.log"
        command = [sys.executable, "-m", "redraft.recipes.cli", *self.command(*options)]
        self._process = start_group(command, log=log, env={"VLLM_NO_USAGE_STATS": "1"})
        wait_until_healthy(self.url, self._process, log, name="redraft up")
        return time.monotonic() - began_s

    def stop(self) -> None:
        """Stop the command, and wait until its learner exits, because its files are read next."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    async def kill(self) -> None:
        """End all processes at once while clients wait, and start the command again."""
        async with self.traffic.flowing():
            await asyncio.sleep(5)
            self.save()
            failed, at_s = len(self.seen.failures), time.time()
            leader = psutil.Process(self._process.pid)
            for process in [*leader.children(recursive=True), leader]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            await asyncio.sleep(1)
        self.save()
        self.seen.cut_by_kill = len(self.seen.failures) - failed
        del self.seen.failures[failed:]
        await asyncio.to_thread(self.start)
        self.seen.restarts_s = [at_s - self.seen.ready_s, time.time() - self.seen.ready_s]

    async def compare_with_plain(self) -> None:
        """Compare each workload with a plain server of the same target (`never_slower`)."""
        await self.settle()
        tokenizer = TargetFolder.open(self.target).tokenizer
        arguments = list_arguments("", self.dtype, self.kv_bytes, self.longest)
        with vllm_server(
            self.target,
            log=self.folder.parent / "plain.log",
            vllm_defaults=True,
            mode="compiled",
            extra_args=arguments,
        ) as plain:
            resting = partial(learner_stopped, self._process.pid)
            beside = Beside(
                plain=plain.url, up=self.url, resting=resting, count_head=self.count_head
            )
            found = self.seen.never_slower
            for workload in list_workloads(tokenizer, self._waiting, self.longest):
                if workload.name in found:
                    continue
                await self.settle()
                found[workload.name] = await beside.compare(workload, self.cfg.workload_pairs)
                self.save()
        self.seen.pace = (await self.ask("GET", "status"))["pace"]

    async def count_head(self) -> float:
        """Count the accepted tokens of the served version, without lookups."""
        _, _, *accepted = (await self.ask("GET", "status"))["drafts"]
        return float(sum(accepted))

    async def restart_without_counts(self) -> None:
        """Stop the command, start it again with the head alone, and warm up."""
        if self._process is not None:
            await self.settle()
            await asyncio.to_thread(self.stop)
        await asyncio.to_thread(self.start, "--draft", "head")
        self.traffic.clients = 1
        async with self.traffic.flowing():
            await asyncio.sleep(WARM_UP_S)

    async def settle(self) -> None:
        """Send traffic until no version is being rolled out, because a canary waits for drafts."""
        if await self.is_rolling_out():
            async with self.traffic.flowing():
                while await self.is_rolling_out():
                    await asyncio.sleep(0.5)

    async def is_rolling_out(self) -> bool:
        with suppress(control.NoLearnerError):  # it starts
            standing = await control.ask(self.learner.folder, control.Standing, do="status")
            return standing.phase in ROLLING_OUT
        return False

    async def learn(self, duration_s: float) -> None:
        """Send traffic to learn from, at a changing number of clients.

        There are two pairs of blocks each minute.
        """
        parts = max(1, round(duration_s / 60))
        for number in Progress(range(parts), desc="traffic", unit="min"):
            self.traffic.clients = CLIENTS[-1 - number % len(CLIENTS)]
            async with self.traffic.flowing():
                await asyncio.sleep(duration_s / parts)
            for clients in (1, CLIENTS[number % len(CLIENTS)]):
                await self.measure(clients)

    async def measure(self, clients: int, pairs: list[Pair] | None = None) -> None:
        """Add one more pair of blocks; for each client count, the kinds take turns going first.

        They are added to `pairs`, by default those with counted answers.

        Raises:
            ValueError: all questions have been asked.
        """
        await self.settle()
        pairs = self.seen.pairs if pairs is None else pairs
        rates = {}
        paces = [("undrafted", "0"), ("auto", "auto")]
        for name, pace in reversed(paces) if len(pairs) // len(CLIENTS) % 2 else paces:
            block = list(itertools.islice(self._waiting, max(LEAST_BLOCK, clients)))
            if not block:
                raise ValueError(
                    f"all {len(self.questions)} questions were asked: pass a smaller --learn-s"
                )
            await self.ask("POST", "pace", {"pace": pace})
            rates[name] = find_rate(
                await answer_all([self.url], block, clients, self.cfg.max_tokens, captured=1.0)
            )
        await self.ask("POST", "pace", {"pace": "auto"})
        version = (await self.ask("GET", "status"))["draft_version"]
        at_s = time.time() - self.seen.ready_s
        pairs.append(Pair(s=at_s, clients=clients, version=version, **rates))
        self.save()

    async def ask(self, method: str, route: str, body: Any = None) -> dict[str, Any]:
        """Return the answer of one of the plugin's routes. Raises httpx.HTTPError."""
        headers = {"Authorization": f"Bearer {read_token(self.folder / 'token')}"}
        async with httpx.AsyncClient(timeout=60, headers=headers) as http:
            answer = await http.request(method, f"{self.url}/redraft/{route}", json=body)
            answer.raise_for_status()
            return dict(answer.json())

    def describe(self) -> dict[str, Any]:
        """Describe the pairs, and the swaps that the learner recorded, on one clock."""
        seen, journal = self.seen, Journal(self.learner.folder / "journal").read().entries
        swaps = [
            e
            for e in journal
            if isinstance(e, SwapEntry) and e.outcome in ("swapped", "rolled_back")
        ]
        last = seen.pairs[seen.last :]
        by_clients = {n: estimate([p for p in last if p.clients == n]) for n in CLIENTS}
        return {
            "up": {
                "promoted": len(Registry(self.learner.registry).promoted()) - 1,
                "start_s": seen.start_s,
                "speed_first": estimate(seen.pairs[: seen.first]),
                "with_counts": by_clients[1],
                "head_alone": estimate(seen.alone),
                "speed_last_by_clients": {str(n): found for n, found in by_clients.items()},
                "time_to_gain_s": find_gain(seen.pairs),
                "never_slower": seen.never_slower,
                "explored_share": seen.pace["explored"],
                "requests": len(seen.texts)
                + sum(2 * max(LEAST_BLOCK, pair.clients) for pair in seen.pairs + seen.alone),
                "failed": len(seen.failures),
                "failures": seen.failures[:5],
                "cut_by_kill": seen.cut_by_kill,
                "restart_s": seen.restarts_s[1] - seen.restarts_s[0],
                "pace": seen.pace["line"],
            },
            "started": f"redraft {shlex.join(self.command())}",
            "passed_gate": sum(
                isinstance(e, GateEntry) and e.verdict == "promote" for e in journal
            ),
            "pairs": [{**vars(pair), "ratio": pair.ratio} for pair in seen.pairs],
            "swaps": [
                {"s": e.time_s - seen.ready_s, "version": e.version, "outcome": e.outcome}
                for e in swaps
            ],
            "kill_s": seen.restarts_s,
            "delays": account(journal),
            "learning": compare_versions(self.learner, journal, seen.ready_s),
        }


def list_arguments(url: str, dtype: str, kv_bytes: int, longest: int = MAX_MODEL_LEN) -> list[str]:
    """List the arguments of a vLLM server at this address, or without a port if it is empty."""
    server = {
        "served-model-name": "m", "dtype": dtype, "max-model-len": longest,
        "max-num-seqs": MAX_NUM_SEQS, "kv-cache-memory-bytes": kv_bytes,
    }  # fmt: skip
    server |= {"port": httpx.URL(url).port} if url else {}
    return [text for name, value in server.items() for text in (f"--{name}", str(value))]


@contextmanager
def serving(
    target: Path,
    options: Sequence[str],
    arguments: Sequence[str] = (),
    *,
    dtype: str,
    kv_bytes: int,
    log: Path,
    env: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Start `redraft serve` with these options, wait until it answers, and yield its address.

    `arguments` are further arguments of vLLM.
    """
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "redraft.recipes.cli", "serve", str(target), *options]
    command += ["--", *list_arguments(url, dtype, kv_bytes), *arguments]
    env = {"VLLM_NO_USAGE_STATS": "1", **(env or {})}
    with process_group(command, log=log, env=env) as process:
        wait_until_healthy(url, process, log, name="redraft serve")
        yield url


def estimate(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Estimate the median ratio of the pairs, with its 95% interval if there are enough for one."""
    return estimate_ratio([pair.ratio for pair in pairs])


def find_gain(pairs: Sequence[Pair]) -> float | None:
    """Find the start of the first WINDOW successive pairs that are all faster with drafts.

    Only pairs with one client count.
    """
    alone = [pair for pair in pairs if pair.clients == 1]
    for number in range(len(alone) - WINDOW + 1):
        if min(pair.ratio for pair in alone[number : number + WINDOW]) > 1:
            return alone[number].s
    return None


def summarise(up: Mapping[str, Any]) -> str:
    def words(found: Mapping[str, Any]) -> str:
        if found["interval"] is None:
            return "unknown" if found["ratio"] is None else f"{found['ratio']:.2f}x"
        low, high = found["interval"]
        return f"{found['ratio']:.2f}x [{low:.2f}, {high:.2f}]"

    gain = up["time_to_gain_s"]
    return "\n".join(
        [
            f"{describe_promoted(up['promoted'])}",
            f"against the same server without drafts: first {words(up['speed_first'])}; last, at "
            f"one client, {words(up['with_counts'])} with counted answers and "
            f"{words(up['head_alone'])} by the head alone",
            "no gain is shown" if gain is None else f"faster from {gain:.0f} s on",
            f"{up['requests']} requests, {up['failed']} failed, {up['cut_by_kill']} cut off by the "
            f"kill; {up['explored_share']:.2%} of the time lost in probes",
            *(
                f"{name} beside plain vLLM: tokens/s {words(found['tokens_s'])}, time to the first "
                f"token {words(found['first_token'])}, {found['failed']} failed"
                for name, found in up["never_slower"].items()
            ),
        ]
    )


def draw(report: Mapping[str, Any]) -> Spec:
    """Draw the speed relative to no drafts over time, with a line at every swap and at the kill."""
    minutes = [{**pair, "minutes": pair["s"] / 60} for pair in report["pairs"]]
    points = alt.Chart(alt.Data(values=minutes)).encode(
        x=alt.X("minutes:Q", title="minutes since the server was ready", axis=alt.Axis(grid=False)),
        y=alt.Y("ratio:Q", title="speed against no drafts", scale=alt.Scale(zero=False)),
        color=alt.Color("clients:N", title="clients", legend=alt.Legend(orient="top")),
        tooltip=["version:N", "clients:Q", alt.Tooltip("ratio:Q", format=".2f")],
    )
    events = [{"minutes": swap["s"] / 60, "event": swap["version"]} for swap in report["swaps"]]
    events += [
        {"minutes": s / 60, "event": name}
        for s, name in zip(report["kill_s"], ("kill -9", "continued"), strict=False)
    ]
    marks = alt.Chart(alt.Data(values=events)).encode(x="minutes:Q")
    rules = marks.mark_rule(strokeDash=[4, 4], color="currentColor", opacity=0.5)
    names = marks.mark_text(angle=270, align="right", dy=-6, y=4, color="currentColor").encode(
        text="event:N"
    )
    plain = (
        alt.Chart(alt.Data(values=[{"ratio": 1}]))
        .mark_rule(color="currentColor", opacity=0.6)
        .encode(y="ratio:Q")
    )
    return to_spec(
        (plain + rules + names + points.mark_point(size=60, filled=True, opacity=0.9)).properties(
            width="container", height=PANEL_HEIGHT
        )
    )


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
