"""After a swap the draft reads the text again.

Which blocks, against a model of every slot, and in the real engine.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import model_runners
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.fleet import turn_keys
from redraft.engine.settings import write_settings
from redraft.online.engine import worker as engine_worker
from redraft.online.engine.config import read_config
from redraft.online.engine.reread import Ledger, Rereader
from redraft.online.engine.worker_hooks import reread_before_steps

SIZE = 4


class Slots:
    """Keys of a draft, and a scheduler with a prefix cache.

    A key is the draft that wrote it and the text before it.
    """

    def __init__(self, seed, num_blocks=40):
        self.rng = np.random.default_rng(seed)
        self.draft = 0
        self.written = {}
        self.num_blocks = num_blocks
        self.cached = {}  # text of a whole number of blocks ─► the last block
        self.running = {}
        self.ledger = Ledger(0, SIZE)
        self.count = 0

    def write(self, request, begin, end):
        for position in range(begin, end):
            self.written[request["blocks"][position // SIZE], position % SIZE] = self.draft

    def start(self):
        base = [1] * int(self.rng.integers(0, 14))  # many prompts begin alike
        text = [*base, *self.rng.integers(0, 3, self.rng.integers(1, 8)).tolist()]
        blocks = []
        while (end := SIZE * (len(blocks) + 1)) < len(text) and tuple(text[:end]) in self.cached:
            blocks.append(self.cached[tuple(text[:end])])
        self.count += 1
        request = {
            "id": f"r{self.count}",
            "text": text,
            "blocks": blocks,
            "computed": SIZE * len(blocks),
        }
        request["new"] = True
        return request

    def allocate(self):
        """A block that nobody uses. If the cache has all others, an old text goes."""
        used = {block for request in self.running.values() for block in request["blocks"]}
        while not (free := set(range(1, self.num_blocks)) - used - set(self.cached.values())):
            del self.cached[next(text for text, block in self.cached.items() if block not in used)]
        return int(self.rng.choice(sorted(free)))

    def step(self):
        """One step: some requests start, some end, the others read or sample a few tokens."""
        ended = [name for name in self.running if self.rng.random() < 0.15]
        for name in ended:
            del self.running[name]
        if len(self.running) < 4:
            request = self.start()
            self.running[request["id"]] = request
        new, known = [], SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        )  # fmt: skip
        planned = []
        for request in self.running.values():
            begin = request["computed"]
            if begin == len(request["text"]):
                request["text"].append(int(self.rng.integers(0, 3)))
            end = min(len(request["text"]), begin + 6)
            added = []
            while SIZE * len(request["blocks"]) < end:
                added.append(self.allocate())
                request["blocks"].append(added[-1])
            if request.pop("new", False):
                new.append(
                    SimpleNamespace(
                        req_id=request["id"],
                        block_ids=(list(request["blocks"]),),
                        num_computed_tokens=begin,
                        prompt_token_ids=list(request["text"]),
                        prefill_token_ids=None,
                    )
                )
            else:
                known.req_ids.append(request["id"])
                known.new_block_ids.append((added,) if added else None)
                known.num_computed_tokens.append(begin)
            planned.append((request, begin, end))
        output = SimpleNamespace(
            finished_req_ids=set(ended), scheduled_new_reqs=new, scheduled_cached_reqs=known
        )  # fmt: skip
        return output, planned

    def run(self, max_tokens):
        """Run a step.

        Returns its requests that would draft from keys of an old draft, and the tokens read again.
        """
        output, planned = self.step()
        spans = self.ledger.choose(self.ledger.follow(output), max_tokens)
        for span in spans:
            assert span.begin % SIZE == 0
            self.write(self.running[span.request_id], span.begin, span.end)
        stale = [
            request["id"]
            for request, begin, _ in planned
            if any(
                self.written[request["blocks"][p // SIZE], p % SIZE] != self.draft
                for p in range(begin)
            )
        ]
        for request, begin, end in planned:
            self.write(request, begin, end)
            request["computed"] = end
            for last in range(SIZE, end + 1, SIZE):
                self.cached.setdefault(
                    tuple(request["text"][:last]), request["blocks"][last // SIZE - 1]
                )
        return stale, sum(span.end - span.begin for span in spans)


@pytest.mark.parametrize("seed", range(8))
def test_no_request_drafts_from_the_keys_of_an_old_draft(seed):
    slots = Slots(seed)
    found_stale = num_read = 0
    for step in range(300):
        if slots.rng.random() < 0.05:
            slots.draft += 1
            if step % 2:  # without this call they would
                slots.ledger.forget()
                stale, num_tokens = slots.run(max_tokens=10_000)
                assert not stale
                num_read += num_tokens
                continue
            stale, _ = slots.run(max_tokens=10_000)
            found_stale += len(stale)
            slots.ledger.forget()
            continue
        stale, num_tokens = slots.run(max_tokens=10_000)
        num_read += num_tokens
        assert not stale
    assert found_stale > 3
    assert num_read > 100


def test_nothing_is_read_twice_or_before_the_first_swap():
    slots = Slots(0)
    assert sum(slots.run(10_000)[1] for _ in range(50)) == 0
    slots.ledger.forget()
    assert slots.run(10_000)[1] > 0
    again = [slots.run(10_000)[1] for _ in range(40)]
    assert again[0] <= 14  # at most a cached prefix of a request that starts now
    assert again[20:] == [0] * 20


def test_a_step_reads_no_more_than_it_may_and_the_next_ones_go_on():
    slots = Slots(3)
    for _ in range(30):
        slots.run(10_000)
    slots.ledger.forget()
    slots.draft += 1
    counts = [slots.run(max_tokens=9)[1] for _ in range(30)]
    assert max(counts) == 8, "whole blocks"
    assert not slots.run(9)[0]


PARALLEL = {
    "tensor_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "is_moe_model": False,
    "data_parallel_size": 1,
}


def make_rereader(parallel=PARALLEL, agree=None, **changes):
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
        parallel_config=SimpleNamespace(**parallel),
    )
    spec = SimpleNamespace(
        block_size=SIZE, num_kv_heads=1, sliding_window=changes.pop("window", None)
    )
    groups = [SimpleNamespace(kv_cache_group_id=0, kv_cache_spec=spec, layer_names=["layer"])]
    runner = SimpleNamespace(execute_model=lambda scheduler_output, *rest: ("done", rest))
    rereader = Rereader(
        runner, SimpleNamespace(vllm_config=config, **changes), groups, lambda *_: [], agree
    )
    reread_before_steps(rereader)
    return runner, rereader


def test_an_error_ends_the_reading_and_not_the_server():
    runner, rereader = make_rereader()
    assert runner.execute_model(SimpleNamespace(), None) == ("done", (None,))
    assert rereader.error.startswith("AttributeError: ")
    assert runner.execute_model(SimpleNamespace(), 1) == ("done", (1,))


def test_if_one_rank_has_no_memory_to_read_no_rank_waits_for_it():
    """Two ranks in threads; the pass of either would wait for the other's."""
    met, answers, passes = threading.Barrier(2, timeout=300), [], []

    def agree(ok):
        answers.append(ok)
        met.wait()
        return all(answers)

    def fail(*_):
        raise torch.OutOfMemoryError("no memory")

    def make_rank(prepare):
        runner, rereader = make_rereader(PARALLEL | {"tensor_parallel_size": 2}, agree)
        rereader._follow = lambda _: rereader.read([])
        rereader._prepare, rereader._pass = prepare, lambda *inputs: passes.append(inputs)
        return runner, rereader

    ranks = [make_rank(fail), make_rank(lambda _: (torch.ones(1), None, {}, {}))]
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(runner.execute_model, None, i) for i, (runner, _) in enumerate(ranks)]
        assert [one.result(timeout=300) for one in done] == [("done", (0,)), ("done", (1,))]
    assert passes == []
    assert [bool(rereader.error) for _, rereader in ranks] == [True, True]


def test_an_error_among_the_ranks_ends_the_server_instead_of_letting_it_wait():
    runner, rereader = make_rereader(PARALLEL | {"tensor_parallel_size": 2}, lambda ok: ok)
    rereader._follow = lambda _: rereader.read([])
    rereader._prepare = lambda _: (torch.ones(1), None, {}, {})
    rereader._pass = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        runner.execute_model(None)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"window": 64}, "window"),
        ({"vocab_mapping": 1}, "vocabulary"),
        ({"parallel": PARALLEL | {"decode_context_parallel_size": 2}}, "ranks"),
        ({"parallel": PARALLEL | {"is_moe_model": True, "data_parallel_size": 2}}, "experts"),
    ],
)
def test_keys_of_an_unknown_layout_are_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        make_rereader(**changes)


def test_the_setting_is_read_and_a_wrong_one_is_told():
    assert read_config({}).swap.cache == "auto"
    assert read_config(write_settings({"swap": {"cache": "draft"}})).swap.cache == "draft"
    with pytest.raises(ValueError, match=r"swap\.cache.*flush.*draft"):
        read_config(write_settings({"swap": {"cache": "flush"}}))


@pytest.mark.parametrize(
    ("asked", "method", "error", "chosen"),
    [
        ("auto", "draft_model", None, "draft"),
        (
            "auto",
            "draft_model",
            "a draft with sliding windows cannot reread text after a swap",
            "clear",
        ),
        ("auto", "an unknown method", None, "clear"),
        ("auto", "eagle3", None, "keep"),
        ("auto", "medusa", None, "keep"),
        ("auto", "eagle3, parallel", None, "clear"),
        ("auto", "dflash", None, "clear"),
        ("clear", "eagle3", None, "clear"),
        ("keep", "draft_model", None, "keep"),
        ("clear", "draft_model", None, "clear"),
    ],
)
def test_by_default_the_cache_is_kept_for_heads_of_one_layer_and_read_again_by_drafts_that_can(
    monkeypatch, asked, method, error, chosen
):
    def install(runner):
        if error:
            raise ValueError(error)
        return object()

    monkeypatch.setattr(engine_worker, "install_reread", install)
    state = engine_worker.WorkerState(server_id="server")
    method, _, parallel = method.partition(", ")
    speculative = SimpleNamespace(method=method, parallel_drafting=bool(parallel))
    worker = SimpleNamespace(
        redraft=state,
        model_runner=SimpleNamespace(get_draft_model=object),
        vllm_config=SimpleNamespace(speculative_config=speculative),
    )
    engine_worker._prepare_cache(worker, asked)
    assert (state.swap_cache, state.rereader is not None) == (chosen, chosen == "draft")
    if asked == "auto" and chosen == "clear":
        with pytest.raises(ValueError, match=r"--swap\.cache|\bdraft\b.*\breread\b"):
            engine_worker._prepare_cache(worker, "draft")


# --- the engine


@pytest.fixture(scope="module")
def turned(served_pair, tmp_path_factory):
    """The draft of `served_pair` as another draft.

    It computes the same, and all its keys have the other sign.
    """
    folder = tmp_path_factory.mktemp("turned")
    shutil.copytree(served_pair[1], folder, dirs_exist_ok=True)
    save_file(
        turn_keys(load_file(folder / "model.safetensors")),
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def run(pair, swap, runner, cache, folder, **changes):
    rng = np.random.default_rng(0)
    cached, running = (
        [rng.integers(8, 500, length).tolist() for length in (150, 70, 97)] for _ in range(2)
    )
    spec = {
        "target": str(pair[0]),
        "draft": str(pair[1]),
        "method": "draft_model",
        "swap": swap and str(swap),
    }
    spec |= {"cached": cached, "running": running} | changes
    environment = model_runners.environment(runner) | write_settings(
        {"registry": str(folder), "swap": {"cache": cache}}
    )
    command = [
        sys.executable,
        Path(__file__).parents[2] / "helpers/run_kept_cache.py",
        json.dumps(spec),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, env=environment)
    line = next((line for line in done.stdout.splitlines() if line.startswith("REPORT")), None)
    assert line, done.stderr[-4000:]
    return json.loads(line.removeprefix("REPORT"))


ROUNDS = ("first", "again", "running", "after")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_with_its_text_read_again_a_draft_accepts_as_if_it_had_always_served(
    runner, served_pair, turned, tmp_path
):
    """Running requests and cached prompts alike. Without it, the old keys cost both."""
    without = run(served_pair, None, runner, "draft", tmp_path)
    again = run(served_pair, turned, runner, "draft", tmp_path)
    kept = run(served_pair, turned, runner, "keep", tmp_path)
    narrow = run(served_pair, turned, runner, "draft", tmp_path, max_tokens=16)
    assert again["status"]["swap_cache"] == "draft"
    for name in ROUNDS:
        assert {**again[name], "accepted": 0} == {**without[name], "accepted": 0}, name
        assert again[name]["accepted"] >= 0.95 * without[name]["accepted"], (
            name
        )  # 95 of 98 in the running requests
        assert not again["status"]["reread_error"]
        assert kept[name]["answers"] == narrow[name]["answers"] == without[name]["answers"], (
            "nothing else changes text"
        )
        assert kept[name]["found"] == without[name]["found"], name
    assert again["after"]["found"] == again["again"]["found"] > 200
    assert kept["after"]["accepted"] < 0.8 * again["after"]["accepted"]
    assert kept["running"]["accepted"] < again["running"]["accepted"]
    # the running requests once, then the cached prompts
    assert again["status"]["reread_tokens"] >= 2 * again["after"]["found"]
    assert without["status"]["reread_tokens"] == kept["status"]["reread_tokens"] == 0
    # a step may read half a block: the last requests wait
    assert kept["after"]["accepted"] < narrow["after"]["accepted"] <= again["after"]["accepted"]


@pytest.mark.vllm
@pytest.mark.slow
def test_a_cleared_cache_is_read_again_by_the_target(served_pair, turned, tmp_path):
    without, cleared = (run(served_pair, swap, "v1", "clear", tmp_path) for swap in (None, turned))
    assert cleared["after"]["found"] == 0 < without["after"]["found"]
    assert [cleared[name]["answers"] for name in ROUNDS] == [
        without[name]["answers"] for name in ROUNDS
    ]
    assert cleared["status"]["reread_tokens"] == 0
