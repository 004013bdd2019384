"""Lookups on vLLM's V2 runner against the same on V1, token by token.

Quick: both runners are stand-ins that read one stream of sampled tokens. With the engine: both real
runners, V2 in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from run_runners import run_capture

from redraft.engine.hooks import RunnerState
from redraft.engine.lookup_first import HeadLimits, mix
from redraft.engine.lookup_hooks import install
from redraft.engine.lookups import lookup_env
from redraft.engine.server import vllm_keys
from redraft.eval.forecast.draft_source import DraftSource
from redraft.eval.forecast.ngram import Ngram
from redraft.heads.families.eagle3 import Config, Eagle3
from redraft.heads.families.retrieval import Config as AnswersConfig
from redraft.heads.families.retrieval import Retrieval, Text, count_answers
from redraft.heads.target import Target
from redraft.online.engine import runner_v1, runner_v2
from redraft.online.learning.replay import training_sequence
from redraft.online.records.record import LOOKUP

MOST, LENGTH, SLOTS = 4, 64, 6
ALPHABET = 4
"""Few tokens: runs, ties and collisions are many."""


@dataclass
class Scheduled:
    num_spec_tokens_to_schedule: int = MOST


class Head:
    """Proposes tokens that follow from the newest one, for both runners."""

    @staticmethod
    def draft(newest: list[int], number: int) -> list[list[int]]:
        return [[(token + 1 + place) % ALPHABET for place in range(number)] for token in newest]


class RunnerV1:
    def __init__(self, speculative: Any) -> None:
        self.vllm_config = make_config(speculative)
        self.speculative_config = speculative
        self.drafter = None
        self.requests: dict[str, Any] = {}
        self.execute_model_state = None
        self.input_batch = SimpleNamespace(req_ids=[], token_ids_cpu=None, num_tokens_no_spec=None)

    def _on_request_state_removed(self, name: str, request: Any) -> None: ...

    def propose_draft_token_ids(self, scheduled: Any, sampled: Any, *_: Any) -> Any:
        newest = [tokens[-1] if tokens else 0 for tokens in sampled]
        return np.array(Head.draft(newest, scheduled.num_spec_tokens_to_schedule)).reshape(
            len(sampled), -1
        )

    def sample_tokens(self, names: list[str], sampled: list[list[int]], number: int) -> Any:
        texts = [self.requests[name] for name in names]
        ids_BT = np.zeros((len(names), LENGTH), np.int32)
        for row_T, request, tokens in zip(ids_BT, texts, sampled, strict=True):
            request.output_token_ids += tokens
            whole = [*request.prompt_token_ids, *request.output_token_ids]
            row_T[: len(whole)] = whole
        self.input_batch.req_ids, self.input_batch.token_ids_cpu = names, ids_BT
        self.input_batch.num_tokens_no_spec = np.array(
            [len(r.prompt_token_ids) + len(r.output_token_ids) for r in texts], np.int32
        )
        output = SimpleNamespace()
        self.drafts = []
        if number:
            drafts = self.propose_draft_token_ids(Scheduled(number), sampled)
            self.drafts = [list(map(int, draft)) for draft in drafts]
        return output

    def add(self, request: Any) -> None:
        self.requests[request.req_id] = request

    def end(self, names: list[str]) -> None:
        for name in sorted(names):
            self._on_request_state_removed(name, self.requests.pop(name))

    def step(self, names: list[str], sampled: list[list[int]], number: int) -> Any:
        output = self.sample_tokens(names, sampled, number)
        return self.drafts or [[] for _ in names], output


class RunnerV2:
    max_num_reqs, max_model_len, num_speculative_steps = SLOTS, LENGTH, MOST
    adaptive_verification = None

    def __init__(self, speculative: Any) -> None:
        self.vllm_config = make_config(speculative)
        self.speculative_config = speculative
        self.req_states = SimpleNamespace(
            req_id_to_index={}, draft_tokens=torch.zeros(SLOTS, MOST, dtype=torch.int64)
        )
        self.free = list(range(SLOTS))
        self.speculator = SimpleNamespace(propose=self.propose_by_head)

    def propose_by_head(self, batch: Any, *args: Any, num_speculative_tokens: int) -> torch.Tensor:
        drafts = torch.full((len(batch.req_ids), MOST), -1)
        drafts[:, :num_speculative_tokens] = torch.tensor(
            Head.draft(self.newest, num_speculative_tokens)
        ).reshape(len(batch.req_ids), -1)
        return drafts

    def add_requests(self, scheduler_output: Any) -> None:
        for request in scheduler_output.scheduled_new_reqs:
            self.req_states.req_id_to_index[request.req_id] = self.free.pop()

    def finish_requests(self, scheduler_output: Any) -> None:
        for name in scheduler_output.finished_req_ids | (
            scheduler_output.preempted_req_ids or set()
        ):
            if name in self.req_states.req_id_to_index:  # not if it was preempted before
                self.free.append(self.req_states.req_id_to_index.pop(name))

    def sample(self, hidden: Any, batch: Any, grammar: Any) -> Any:
        counts = torch.tensor([len(tokens) for tokens in self.sampled], dtype=torch.int32)
        ids_BK = torch.full((len(self.sampled), MOST + 1), 7)
        for row, tokens in zip(ids_BK, self.sampled, strict=True):
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        output = SimpleNamespace(sampled_token_ids=ids_BK, num_sampled=counts)
        return output, counts, counts

    def sample_tokens(self, batch: Any, number: int) -> Any:
        self.sample(None, batch, None)
        if number:
            padded = self.speculator.propose(
                batch, None, None, None, None, None, num_speculative_tokens=number
            )
            lists = self.take_draft_token_ids().draft_token_ids
            for row, draft in zip(padded.tolist(), lists, strict=True):
                assert row == draft + [-1] * (MOST - len(draft))
        return SimpleNamespace(model_runner_output=SimpleNamespace())

    def take_draft_token_ids(self) -> Any:
        return None

    def add(self, request: Any) -> None:
        new = SimpleNamespace(**vars(request), prefill_token_ids=list(request.prompt_token_ids))
        self.add_requests(SimpleNamespace(scheduled_new_reqs=[new]))

    def end(self, names: list[str]) -> None:
        ended = SimpleNamespace(finished_req_ids={*names}, preempted_req_ids=None)
        self.finish_requests(ended)

    def step(self, names: list[str], sampled: list[list[int]], number: int) -> Any:
        self.sampled, self.newest = sampled, [tokens[-1] if tokens else 0 for tokens in sampled]
        result = self.sample_tokens(SimpleNamespace(req_ids=names), number)
        taken = self.take_draft_token_ids()
        return taken.draft_token_ids if taken else [[] for _ in names], result.model_runner_output


def make_config(speculative: Any) -> Any:
    return SimpleNamespace(
        speculative_config=speculative,
        model_config=SimpleNamespace(max_model_len=LENGTH),
        scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


def make_request(number: int, rng: np.random.Generator) -> Any:
    params = SimpleNamespace(stop_token_ids=[], eos_token_id=None, max_tokens=None, extra_args=None)
    return SimpleNamespace(
        req_id=str(number),
        prompt_token_ids=rng.integers(0, ALPHABET, rng.integers(1, 12)).tolist(),
        output_token_ids=[],
        sampling_params=params,
        lora_request=None,
    )


def stream(runner: Any, seed: int, num_steps: int = 120) -> Iterator[tuple[Any, Any]]:
    """Drafts and foreign requests by step: requests join, end, wait and read prompts in parts."""
    rng, running, number = np.random.default_rng(seed), dict[str, int](), 0
    waiting: dict[str, list[int]] = {}
    for step in range(num_steps):
        ended = [name for name, length in running.items() if length > 40]
        runner.end(ended)
        running = {name: length for name, length in running.items() if name not in ended}
        while len(running) < SLOTS and rng.random() < 0.6:
            request = make_request(number, rng)
            runner.add(request)
            running[request.req_id], number = len(request.prompt_token_ids), number + 1
        names = [name for name in sorted(running) if rng.random() < 0.8]
        if not names:
            continue
        sampled = [rng.integers(0, ALPHABET, rng.integers(0, MOST + 2)).tolist() for _ in names]
        for name, tokens in zip(names, sampled, strict=True):
            running[name] += len(tokens)
        # at 0 nobody is asked, as with the pace
        most = 0 if step % 17 == 16 else int(rng.integers(1, MOST + 1))
        drafts, output = runner.step(names, sampled, most)
        verified = {name for name in names if waiting.get(name)}
        waiting |= dict(zip(names, drafts, strict=True))
        yield (
            {name: waiting[name] for name in names},
            verified & read_foreign(output),
        )


def read_foreign(output: Any) -> frozenset[str]:
    return output.redraft.foreign if hasattr(output, "redraft") else frozenset()


def make_answers(folder: Path) -> Path:
    ids = np.random.default_rng(9).integers(0, ALPHABET, 400).astype(np.int32)
    text = Text(ids=ids, is_label=np.ones(len(ids), bool))
    folder.mkdir(exist_ok=True)
    count_answers([text], AnswersConfig(verify_cost=0.02)).write(folder)
    return folder


@pytest.mark.parametrize("head", [None, "eagle3"], ids=["alone", "before a head"])
@pytest.mark.parametrize(
    "kind",
    [
        "live",
        "answers",
        pytest.param("ngram", marks=pytest.mark.slow),  # vLLM compiles its lookup
    ],
)
def test_lookup_on_v2_proposes_what_v1_does_token_by_token(
    kind: str, head: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup = {
        "ngram": Ngram(min=1, max=3).speculative_config,
        "live": Retrieval.speculative_config("live", verify_cost=0.02),
        "answers": Retrieval.speculative_config(make_answers(tmp_path / "answers")),
    }[kind]
    config = mix(lookup, {"method": head}, HeadLimits(tokens=2)) if head else lookup
    for name, value in lookup_env(config).items():
        monkeypatch.setenv(name, value)
    found = []
    for version, module in ((RunnerV1, runner_v1), (RunnerV2, runner_v2)):
        settings = {"method": "ngram", "num_speculative_tokens": MOST} | vllm_keys(config)
        runner = version(SimpleNamespace(**settings))
        if kind == "ngram" and not head and version is RunnerV1:
            from vllm.v1.spec_decode.ngram_proposer import NgramProposer

            vllms = NgramProposer(runner.vllm_config)  # V1 does that by itself
            batch = runner.input_batch
            runner.propose_draft_token_ids = lambda scheduled, sampled, vllms=vllms, batch=batch: (
                vllms.propose(
                    scheduled.num_spec_tokens_to_schedule,
                    sampled,
                    batch.num_tokens_no_spec,
                    batch.token_ids_cpu,
                )
            )
        install(runner)
        module.install_proposers(runner)
        if kind == "live":
            runner.redraft.counter.find_owner = lambda request: b"acme"
        found.append(list(stream(runner, seed=3)))
    assert len(found[0]) > 100
    for one, other in zip(*found, strict=True):
        assert one == other
    assert sum(len(drafts) for drafts, _ in found[0]) > 100
    assert any(foreign for _, foreign in found[0])


@pytest.mark.parametrize(("head", "waits"), [(None, 1), ("eagle3", 2)])
def test_lookup_on_v2_waits_for_the_sampled_tokens_and_for_a_heads_draft(
    head: str | None, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Retrieval.speculative_config("live")
    config = mix(config, {"method": head}, HeadLimits()) if head else config
    for name, value in lookup_env(config).items():
        monkeypatch.setenv(name, value)
    runner = RunnerV2(SimpleNamespace(**{"method": "ngram"} | vllm_keys(config)))
    install(runner)
    request = make_request(0, np.random.default_rng(0))
    runner.add(request)
    runner.step([request.req_id], [[1]], 0)  # the stand-in itself reads what is proposed
    counts, read = [0], torch.Tensor.tolist

    def count(tensor: torch.Tensor) -> Any:
        counts[0] += 1
        return read(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", count)
    batch = SimpleNamespace(req_ids=[request.req_id])
    for _ in range(5):
        runner.sample(None, batch, None)
        runner.speculator.propose(batch, *[None] * 5, num_speculative_tokens=MOST)
    assert counts[0] == 5 * waits


def test_lookup_on_v2_keeps_the_text_of_a_preempted_request_from_its_slots_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in lookup_env(Retrieval.speculative_config("live")).items():
        monkeypatch.setenv(name, value)
    runner = RunnerV2(SimpleNamespace(method="ngram"))
    runner.max_num_reqs, runner.free = 1, [0]
    install(runner)
    counter = runner.redraft.counter
    counter.find_owner = lambda request: request.sampling_params.extra_args
    rng = np.random.default_rng(0)
    for name, prompt in (("victim", [1, 2]), ("other", [3, 3])):
        request = make_request(0, rng)
        request.req_id, request.prompt_token_ids = name, prompt
        request.sampling_params.extra_args = name[:5].encode()
        runner.add(request)
        if name == "victim":
            runner.step([name], [[1, 2, 1]], 1)
            runner.finish_requests(
                SimpleNamespace(finished_req_ids=set(), preempted_req_ids={name})
            )
    runner.step(["other"], [[0, 0]], 1)
    ended = []
    runner.redraft.lookup.texts.on_end = lambda name, request: ended.append(
        (name, request.prompt_token_ids, request.output_token_ids)
    )
    runner.req_states.req_id_to_index["victim"] = 5
    runner.end(["victim", "other"])
    assert ended == [("other", [3, 3], [0, 0]), ("victim", [1, 2], [1, 2, 1])]


def test_lookup_on_v2_is_installed_on_a_runner_of_vllm_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in lookup_env(Retrieval.speculative_config("live")).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"V1.*V2.*SimpleNamespace"):
        install(SimpleNamespace())
    runner = RunnerV2(SimpleNamespace(method="ngram"))
    assert isinstance(runner_state(runner), RunnerState)


def runner_state(runner: Any) -> Any:
    install(runner)
    return runner.redraft


# --- the engine

PROMPTS = [np.random.default_rng(5).integers(8, 500, length).tolist() for length in (20, 12, 33)]
ROUNDS = [
    {"prompts": PROMPTS, "sampling": [{"max_tokens": 40}] * 3},
    {"prompts": PROMPTS, "sampling": [{"max_tokens": 40}] * 3},  # the answers are counted now
    {"prompts": [*PROMPTS, *PROMPTS[::-1]], "sampling": [{"max_tokens": 20}] * 6},
    {"prompts": PROMPTS[:2], "sampling": [{"max_tokens": 40}] * 2, "aborted": [1]},
]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("draft", ["live", "ngram", "live+head", "ngram+head"])
def test_lookup_on_v2_has_the_tokens_and_the_rows_of_v1_in_the_engine(
    draft: str, random_target: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    head = tmp_path / "head"
    Eagle3(Config(aux_layer_ids=(0, 1, 2)), Target.from_folder(random_target)).export(head)
    source = DraftSource.parse(draft.replace("head", str(head)))
    config = source.speculative()
    has_head = "+" in draft
    spec = {
        "target": str(random_target),
        "draft": str(head) if has_head else "ngram",
        "method": "eagle3" if has_head else "ngram",
        "rounds": ROUNDS,
        "speculative": vllm_keys(config),
    }
    runs = []
    for runner in ("v1", "v2"):
        # vLLM's lookup of n-grams leaves another number of OpenMP threads, which ends a CPU's
        # attention within the same step of V2.
        env = lookup_env(config) | {"NUMBA_NUM_THREADS": "1"}
        answers, counts, records = run_capture(runner, tmp_path / runner, more_env=env, **spec)
        rows = {
            record.request_id.rpartition("-")[0]: (
                record.positions.tolist(),
                record.draft_ids.tolist(),
                list(record.row_proposers),
                training_sequence(record).input_ids_T.tolist(),
            )
            for record in records
        }
        runs.append((answers, counts["counted_drafts"], rows))
    assert runs[0][0] == runs[1][0], "the answers"
    assert runs[0][2] == runs[1][2], "each draft token, and who proposed it"
    assert runs[0][1] == runs[1][1], "the drafts of the served version"
    kinds = [kind for _, _, kinds, _ in runs[1][2].values() for kind in kinds]
    assert kinds.count(LOOKUP) > 20
