"""Profile a vLLM step with a draft, and find the share that redraft's code takes.

$ python -m benchmarks.step_profile --draft outputs/eagle3/draft       # SmolLM2 on a CPU, 10 minutes
$ python -m benchmarks.step_profile --draft HEAD --num-speculative-tokens 3 --steps 40

    engine in this process ─► steps of one request ─► parts: schedule, target, sampler, draft, update
                                                   └► calls and copies of a step, by whose code they are

Each case runs in its own process: plain vLLM without a draft and with 1, 3 and 6 draft tokens (the
target reads 2, 4 and 7 rows), then the same with redraft's plugin, recording nothing, recording
everything, or with a pace. A first pass only times the parts of a step. A second pass counts Python
calls by file, and tensor operations. Counts are the same on every machine; times need a quiet one.
vLLM's V1 runner computes with one thread here, because two threads of an in-process engine slow
each other down.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from benchmarks.results import write_results
from redraft.engine.settings import read_settings, write_settings
from redraft.files.setting_error import require_least
from redraft.recipes.cli.run import run_recipe
from redraft.recipes.demo.parts import make_target

PARTS = {
    "schedule": "schedule",
    "target": "execute_model",
    "sampler": "_sample",
    "draft": "propose_draft_token_ids",
    "update": "update_from_output",
}
"""Parts of a step, with the methods of scheduler and runner that they consist of."""
COPIES = (
    "aten.clone",
    "aten.copy_",
    "aten._to_copy",
    "aten.cat",
    "aten.stack",
    "aten.index_select",
)
PACKAGES = ("redraft", "heads", "distill", "eval", "online", "recipes")
MARK = "PROFILE "


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine."""

    name: str
    target: str
    draft: str | None
    num_tokens: int
    plugin: bool = False
    captured: float = 0.0
    """Share of the requests to record."""
    pace: str = "off"
    warm_up: int
    steps: int
    spool: str


@dataclass(frozen=True, kw_only=True)
class Config:
    draft: Path
    """EAGLE-3 head of the target."""
    target: str | None = None
    """Folder of the target. By default, SmolLM2-135M-Instruct, created in --parts."""
    parts: Path = Path("outputs/parts")
    """Folder of the default target."""
    num_speculative_tokens: tuple[int, ...] = (1, 3, 6)
    """Numbers of draft tokens per step. The target reads one row more."""
    steps: int = 60
    """Number of steps in each pass."""
    warm_up: int = 10
    """Steps before."""
    output: Path = Path("outputs/step-profile")

    def __post_init__(self) -> None:
        require_least(self, steps=1, warm_up=1)
        if min(self.num_speculative_tokens, default=0) < 1:
            raise ValueError("--num-speculative-tokens: give numbers of at least 1")


def main(cfg: Config) -> None:
    """Profile each case in its own process.

    Raises:
        ValueError: a case failed, after it printed the reason.
    """
    target = cfg.target or str(make_target(cfg.parts))
    rows = []
    for case in list_cases(cfg, target):
        command = [sys.executable, "-m", "benchmarks.step_profile", MARK]
        command.append(msgspec.json.encode(case).decode())
        done = subprocess.run(command, env=environment_of(case), stdout=subprocess.PIPE, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        if done.returncode or not lines:
            raise ValueError(f"{case.name} failed: its output is above")
        rows.append({**asdict(case), **json.loads(lines[-1].removeprefix(MARK))})
        print(describe(rows[-1]), flush=True)
    write_results(cfg.output / "report.json", {"rows": rows})


def list_cases(cfg: Config, target: str) -> list[Case]:
    def case(name: str, num_tokens: int, **options: Any) -> Case:
        return Case(
            name=name, target=target, draft=str(cfg.draft.absolute()) if num_tokens else None,
            num_tokens=num_tokens, warm_up=cfg.warm_up, steps=cfg.steps,
            spool=str((cfg.output / "spool").absolute()), **options,
        )  # fmt: skip

    numbers = cfg.num_speculative_tokens
    cases = [case("no draft", 0), *(case(f"{number} tokens", number) for number in numbers)]
    for number in numbers:
        name = f"{number} tokens, plugin"
        cases += [
            case(name, number, plugin=True),
            case(f"{name}, all recorded", number, plugin=True, captured=1.0),
            case(f"{name}, pace", number, plugin=True, pace=str(number)),
        ]
    return cases


def environment_of(case: Case) -> dict[str, str]:
    """Return the environment variables of a case's process."""
    env = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "VLLM_PLUGINS": "redraft" if case.plugin else "redraft_engine_wait",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if case.plugin:
        capture = {"spool": case.spool, "hidden_states": True, "fraction": case.captured}
        env |= write_settings(read_settings(), {"capture": capture, "pace": case.pace})
    return env


# ------------------------------------------------------------------------------------------------------
# in the process of a case


def profile(case: Case) -> dict[str, Any]:
    """Return the parts of a step in milliseconds, and its calls and operations."""
    from vllm import LLM

    from redraft.online.engine.config import TABLE, make_table

    speculative: dict[str, Any] = {}
    if case.num_tokens:
        speculative = {
            "method": "eagle3",
            "model": case.draft,
            "num_speculative_tokens": case.num_tokens,
        }
        if case.pace != "off":
            speculative[TABLE] = make_table(case.num_tokens)
    llm = LLM(
        model=case.target, enforce_eager=True, skip_tokenizer_init=True, max_num_seqs=4,
        max_model_len=2048, kv_cache_memory_bytes=128 << 20, enable_prefix_caching=False,
        async_scheduling=False, speculative_config=speculative or None,
    )  # fmt: skip
    step = begin(llm.llm_engine, 3 * (case.warm_up + 2 * case.steps) * (1 + case.num_tokens))
    for _ in range(case.warm_up):
        step()
    return {
        "ms": time_parts(llm.llm_engine.engine_core.engine_core, step, case.steps),
        **count(step, case.steps),
    }


def begin(engine: Any, num_tokens: int) -> Callable[[], object]:
    """Start a request, and return a function that runs one engine step."""
    from vllm import SamplingParams

    from redraft.online.records.origin import EXTRA_ARGS_KEY, Origin

    params = SamplingParams(
        temperature=0, max_tokens=min(num_tokens, 1900), ignore_eos=True, detokenize=False
    )
    params.extra_args = {EXTRA_ARGS_KEY: Origin()._asdict()}
    engine.add_request("profiled", {"prompt_token_ids": list(range(100, 140))}, params)
    return engine.step  # type: ignore[no-any-return]


def time_parts(core: Any, step: Callable[[], object], steps: int) -> dict[str, float]:
    """Return the median milliseconds of a step and its parts."""
    runner = core.model_executor.driver_worker.worker.model_runner
    spent: dict[str, list[float]] = {name: [] for name in PARTS}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_time(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent[name].append(1e3 * (time.perf_counter() - began_s))

        return call_and_time

    whole = []
    with ExitStack() as patched:
        for name, method in PARTS.items():
            owner = core.scheduler if hasattr(core.scheduler, method) else runner
            if hasattr(owner, method):
                call = timed(name, getattr(owner, method))
                patched.enter_context(mock.patch.object(owner, method, call))
        for _ in range(steps):
            began_s = time.perf_counter()
            step()
            whole.append(1e3 * (time.perf_counter() - began_s))
    found = {name: statistics.median(some) for name, some in spent.items() if some}
    found["step"] = statistics.median(whole)
    return {**found, "between": found["step"] - sum(found.get(name, 0.0) for name in PARTS)}


def count(step: Callable[[], object], steps: int) -> dict[str, Any]:
    """Count the Python calls and the tensor operations of a step."""
    from torch.utils._python_dispatch import TorchDispatchMode

    operations: Counter[str] = Counter()

    class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            operations[str(func)] += 1
            return func(*args, **(kwargs or {}))

    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        step()
    profiler.disable()
    with Counted():  # type: ignore[no-untyped-call]
        for _ in range(steps):
            step()
    calls, own = read_calls(profiler)
    copies = sum(number for name, number in operations.items() if name.startswith(COPIES))
    return {
        "calls": calls / steps,
        "own_calls": sum(own.values()) / steps,
        "own_by_function": {name: number / steps for name, number in own.most_common(25)},
        "operations": sum(operations.values()) / steps,
        "copies": copies / steps,
    }


def read_calls(profiler: cProfile.Profile) -> tuple[int, Counter[str]]:
    """Return (number of Python calls, calls to redraft's functions by file and name)."""
    stats: Any = pstats.Stats(profiler)
    root = Path(__file__).resolve().parents[1]
    calls, own = 0, Counter[str]()
    for (path, _, name), (_, number, *_) in stats.stats.items():
        calls += number
        place = Path(os.path.realpath(path))  # `redraft` contains links to the packages
        if place.is_relative_to(root) and place.relative_to(root).parts[0] in PACKAGES:
            own[f"{place.relative_to(root)}:{name}"] += number
    return calls, own


def describe(row: Mapping[str, Any]) -> str:
    ms = row["ms"]
    parts = ", ".join(f"{name} {ms[name]:.2f}" for name in (*PARTS, "between") if name in ms)
    return (
        f"{row['name']:34} {ms['step']:.2f} ms a step ({parts}); {row['calls']:,.0f} calls, ours "
        f"{row['own_calls']:.0f}; {row['operations']:.0f} operations, {row['copies']:.0f} copies"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == [MARK]:
        found = profile(msgspec.json.decode(sys.argv[2], type=Case))
        print(f"\n{MARK}{json.dumps(found)}", flush=True)
    else:
        run_recipe(main, Config, __doc__)
