"""Records beside adaptive verification: the verified rows, the same as without it.

The runner of these tests verifies made-up drafts by a made-up target. As in vLLM, the device knows
which request got how many tokens, the host has bounds, and the next step writes to the same buffers.
"""

import json
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import model_runners
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from redraft.online.engine import runner_v2
from redraft.online.engine.capture import Capture
from redraft.online.engine.config import CaptureConfig
from redraft.online.engine.request_log import RequestInfo
from redraft.online.engine.runner_v2 import _count_admitted, _Hooks
from redraft.online.engine.runners import install_capture
from redraft.online.learning.replay import training_sequence
from redraft.online.records.record import PADDING, Sampling, read_frames
from redraft.online.records.spool import spool_files

V, K, D, LAYERS, SLOTS = 40, 3, 4, 2, 8
LENGTHS = {"a": 5, "b": 3, "grammar": 4, "joined": 6, "chunked": 9, "masked": 7}
"""Prompts. `grammar` is not recorded, and all but its first draft token are invalid; the same holds
for `masked`, which is recorded. `joined` has a draft that nobody proposed. `chunked` is read in
chunks."""

CONSTRAINED = ("grammar", "masked")

ANSWER = 24
CHUNK = 4
WAITS = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__")


def draw(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(key) % (1 << 40))


def find_logits(text: list[int]) -> Tensor:
    return torch.randn(V, generator=draw(0, *text))


def find_states(text: list[int]) -> Tensor:
    return torch.randn(LAYERS, D, generator=draw(1, *text)).bfloat16()


def propose(text: list[int]) -> tuple[list[int], Tensor, Tensor]:
    """Draft tokens, of which two of three are the target's, their logits, and confidences."""
    drafts: list[int] = []
    for _ in range(K):
        luck = torch.rand(1, generator=draw(2, *text, *drafts))
        best = int(find_logits(text + drafts).argmax())
        drafts.append(best if luck < 0.7 else (best + 1) % V)
    logits = [torch.randn(V, generator=draw(3, *text, *drafts[:j])) for j in range(K)]
    return drafts, torch.stack(logits), torch.rand(K, generator=draw(4, *text))


class Server:
    """Answers LENGTHS' prompts; `admit` has the verified of the scheduled draft tokens, by request."""

    def __init__(self, tmp_path, admit):
        config = CaptureConfig(spool=tmp_path, logprobs=4, hidden_states=True)
        self.capture = Capture(config, "boot", "target", "draft")
        self.manager = SimpleNamespace(_confidence_probs=torch.zeros(SLOTS, K))
        states = SimpleNamespace(temperature=SimpleNamespace(gpu=torch.full((SLOTS,), 0.7)))
        runner = SimpleNamespace(
            max_model_len=100,
            speculative_config=SimpleNamespace(method="eagle3"),
            sampler=SimpleNamespace(sampling_states=states),
            speculator=None,
            adaptive_verification=self.manager,
        )
        self.hooks = _Hooks(runner, self.capture)
        self.hooks._propose = lambda *args, **options: None
        self.admit = admit
        self.text = {name: [ord(name[0]) % V] * n for name, n in LENGTHS.items()}
        self.read = dict.fromkeys(LENGTHS, 0)
        self.drafts: dict[str, list[int]] = {}
        self.draft_logits = torch.zeros(SLOTS, K, V)
        self.cu_num_logits = torch.zeros(SLOTS + 1, dtype=torch.int32)
        self.query_start_loc = torch.zeros(SLOTS + 1, dtype=torch.int32)
        self.num_trimmed = self.num_empty = 0
        for name, length in LENGTHS.items():
            info = RequestInfo(
                request_id=name, prompt_ids=self.text[name][:], sampling=Sampling(temperature=0.7),
                max_tokens=ANSWER, stop_ids=frozenset(),
            )  # fmt: skip
            self.hooks.feed.requests[name] = None if name == "grammar" else info
            assert len(info.prompt_ids) == length

    def run(self) -> dict[str, list[int]]:
        """Answers."""
        step = 0
        while open_ones := [
            name for name, n in LENGTHS.items() if len(self.text[name]) < n + ANSWER
        ]:
            self.step(open_ones, step)
            for name in open_ones:
                if len(self.text[name]) >= LENGTHS[name] + ANSWER:
                    self.hooks.feed.end(name)
            step += 1
        self.hooks.feed.flush()
        self.capture._apply_or_close(self.capture.queue.take())  # long after the steps
        assert not [key for key in self.capture.counts if key.startswith(("error", "broken"))]
        return {name: self.text[name][n : n + ANSWER] for name, n in LENGTHS.items()}

    def step(self, names: list[str], number: int) -> None:
        names = sorted(names, key=lambda name: name not in self.drafts)  # as vLLM sorts a batch
        scheduled = [len(self.drafts.get(name, ())) for name in names]
        admitted = self.admit(names, scheduled, number)
        fresh = [
            min(CHUNK, len(self.text[name]) - self.read[name]) if name == "chunked"
            else len(self.text[name]) - self.read[name]
            for name in names
        ]  # fmt: skip
        # 1. What is read, and the rows of logits.
        ids, positions, places, slots, row_reads, rows, states = [], [], [], [], [], [], []
        samples: list[list[int]] = []
        for slot, (name, num_fresh, num_drafts) in enumerate(
            zip(names, fresh, admitted, strict=True)
        ):
            begin = self.read[name]
            drafts = self.drafts.get(name, [])[:num_drafts]
            known = self.text[name][: begin + num_fresh]
            is_end = begin + num_fresh == len(self.text[name])
            for place, token in enumerate([*known[begin:], *drafts]):
                ids.append(token)
                positions.append(begin + place)
                states.append(find_states([*known, *drafts][: begin + place + 1]))
            first = len(ids) - num_drafts - 1
            found: list[int] = []
            for j in range(num_drafts + 1):
                row_reads.append(first + j)
                places.append(j)
                slots.append(slot)
                rows.append(find_logits(known + drafts[:j]))
                # the row of an invalid token gives nothing
                is_valid = name not in CONSTRAINED or j < 2
                if is_end and is_valid and found == drafts[:j]:
                    found.append(int(rows[-1].argmax()))
            samples.append(found)
        # 2. The batch, with the device's numbers exact and the host's as in vLLM.
        count, total, budget = len(names), len(ids), sum(admitted)
        num_reads = np.array([f + a for f, a in zip(fresh, admitted, strict=True)])
        host_reads = num_reads.copy()
        is_trimmed = 0 < budget < sum(scheduled)
        group = sum(n > 0 for n in scheduled)
        if is_trimmed:  # spread evenly
            host_reads[:group] = np.array(fresh[:group]) + budget // group
            host_reads[: budget % group] += 1
        host_rows = np.array(scheduled if is_trimmed else admitted) + 1
        self.cu_num_logits[: count + 1] = torch.tensor([0, *np.cumsum(np.array(admitted) + 1)])
        self.query_start_loc[: count + 1] = torch.tensor([0, *np.cumsum(num_reads)])
        self.num_trimmed += is_trimmed
        self.num_empty += budget == 0 < sum(scheduled)
        batch = SimpleNamespace(
            num_reqs=count, req_ids=names, num_tokens=total, num_draft_tokens=budget,
            num_draft_tokens_per_req=np.array(scheduled) if sum(scheduled) else None,
            cu_num_logits=self.cu_num_logits[: count + 1],
            cu_num_logits_np=np.array([0, *np.cumsum(host_rows)]),
            query_start_loc=self.query_start_loc[: count + 1],
            query_start_loc_np=np.array([0, *np.cumsum(host_reads)]),
            num_computed_prefill_tokens_np=np.array(
                [min(self.read[name], LENGTHS[name]) for name in names]
            ),
            prefill_len_np=np.array([LENGTHS[name] for name in names]),
            input_ids=torch.tensor(ids), positions=torch.tensor(positions),
            logits_indices=torch.tensor(row_reads), idx_mapping=torch.arange(count),
            expanded_idx_mapping=torch.tensor(slots), expanded_local_pos=torch.tensor(places),
        )  # fmt: skip
        sampled_BK = torch.full((count, K + 1), 7)  # leftovers behind the valid ones
        for row, found in enumerate(samples):
            sampled_BK[row, : len(found)] = torch.tensor(found)
        output = SimpleNamespace(
            sampled_token_ids=sampled_BK, num_sampled=torch.tensor([*map(len, samples)])
        )
        self.hooks._padded = frozenset({"joined"} if number == 1 else ())
        is_masked = [names[slot] in CONSTRAINED for slot in slots]
        is_invalid = [masked and j > 1 for masked, j in zip(is_masked, places, strict=True)]
        drafted = () if budget == 0 else (self.draft_logits.clone(), torch.tensor(is_invalid))
        streams = torch.stack(states, 1)
        # 3. The hooks, and the buffers of the next step. The grammar's mask is applied in place.
        logits_RV = torch.stack(rows)
        self.hooks._mask = lambda masked_RV, *_: masked_RV.masked_fill_(
            torch.tensor(is_masked)[:, None], -torch.inf
        )
        if constrained := [name for name in names if name in CONSTRAINED]:
            self.hooks.mask(logits_RV, batch, constrained)
        self.hooks.sampled(output, logits_RV, batch, *drafted)
        self.hooks.propose(None, None, None, streams[-1], list(streams))
        self.cu_num_logits.fill_(99)
        self.query_start_loc.fill_(99)
        self.continue_with(names, samples, fresh)

    def continue_with(self, names: list[str], samples: list[list[int]], fresh: list[int]) -> None:
        self.drafts = {}
        going: list[str] = []
        for name, found, num_fresh in zip(names, samples, fresh, strict=True):
            self.read[name] += num_fresh + max(0, len(found) - 1)
            self.text[name] += found
            if found and len(self.text[name]) < LENGTHS[name] + ANSWER:
                going.append(name)
        # Slots are places in the next batch: those with drafts come first, in the same order.
        for slot, name in enumerate(sorted(going, key=list(LENGTHS).index)):
            self.drafts[name], self.draft_logits[slot], confidence_K = propose(self.text[name])
            self.manager._confidence_probs[slot] = confidence_K

    def read_records(self):
        return [record for _, record in read_frames(b"".join(map(bytes, self.capture._waiting)))]


def as_scheduled(names, scheduled, number):
    return scheduled


def trim(names, scheduled, number):
    """None, all, or some of the tokens, unevenly."""
    luck = np.random.default_rng(number)
    if number % 4 == 3:
        return [0] * len(scheduled)
    return [int(luck.integers(0, n + 1)) for n in scheduled] if number % 4 else scheduled


def collect_rows(records):
    """Rows by request, tokens before and branch; states by request and place; kinds of rows."""
    rows, states, kinds = {}, {}, Counter()
    for record in records:
        name = record.request_id.rpartition("-")[0] or record.request_id  # no random end
        i32 = lambda raw: np.frombuffer(raw, np.int32)  # noqa: E731
        positions, branches = i32(record.row_positions), i32(record.row_branches)
        drafts, probs = i32(record.row_drafts), np.frombuffer(record.row_draft_probs, np.float32)
        accepted = np.frombuffer(record.row_accepted, np.uint8)
        count = len(positions)
        parts = [
            i32(raw).reshape(count, -1)
            for raw in (record.row_topk_ids, record.row_topk_log_probs, record.row_log_sum_exp)
        ]
        for i, position in enumerate(positions.tolist()):
            branch = int(branches[i])
            key = (name, record.context_begin + position, *drafts[i - branch : i].tolist())
            rows[key] = tuple(part[i].tobytes() for part in parts)
            if drafts[i] >= 0:
                kinds["drafts"] += 1
                kinds["accepted"] += int(accepted[i])
                rows[(*key, "draft", int(drafts[i]))] = probs[i].tobytes()
            kinds["branches" if branch else "text"] += 1
        kinds["padded"] += record.row_proposers.count(PADDING)
        words = np.frombuffer(record.hidden, np.uint16).reshape(-1, *record.hidden_shape)
        for place, of_token in enumerate(words):
            states[name, record.hidden_begin + place] = of_token.tobytes()
    return rows, states, kinds


def drop_last(states):
    """The tokens with states but for an answer's last, which is read only as an accepted draft."""
    return {(name, place) for name, place in states if place < LENGTHS[name] + ANSWER - 1}


@pytest.fixture(scope="module")
def untrimmed(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("untrimmed"), as_scheduled)
    answers = server.run()
    return answers, collect_rows(server.read_records()), server.read_records()


def test_adaptive_verification_records_each_verified_row_as_without_it(untrimmed, tmp_path):
    answers, (rows, states, kinds), _ = untrimmed
    server = Server(tmp_path, trim)
    assert server.run() == answers
    assert server.num_trimmed > 5
    assert server.num_empty > 2
    found_rows, found_states, found_kinds = collect_rows(server.read_records())
    for all_of, found in ((rows, found_rows), (states, found_states)):
        both = all_of.keys() & found.keys()
        assert len(both) > 60
        assert {key: found[key] for key in both} == {key: all_of[key] for key in both}
    text = {key for key in rows if len(key) == 2}
    assert text == {key for key in found_rows if len(key) == 2}, "each token of an answer has a row"
    assert drop_last(found_states) == drop_last(states)
    assert {key[0] for key in found_rows} == {*LENGTHS} - {"grammar"}
    assert found_kinds["drafts"] < kinds["drafts"]
    assert kinds["padded"] == K + 1, "rows of the draft that nobody proposed"
    assert 0 < found_kinds["padded"] <= K + 1
    assert found_kinds["accepted"] > 0
    of_masked = [row for key, row in found_rows.items() if key[0] == "masked" and len(key) == 2]
    for _, log_probs, log_sum_exp in of_masked:
        values = np.frombuffer(log_probs + log_sum_exp, np.float32)
        assert np.isfinite(values).all(), "from before the mask"
    assert len(of_masked) == ANSWER


def test_a_confidence_learns_the_same_beside_adaptive_verification(untrimmed, tmp_path):
    """DSpark's learns alpha from whole distributions at the tokens of the text.

    None is chosen by the trim.
    """
    server = Server(tmp_path, trim)
    server.run()
    all_of, found = (
        {record.request_id: training_sequence(record) for record in records}
        for records in (untrimmed[2], server.read_records())
    )
    assert all_of.keys() == found.keys()
    for name, text in all_of.items():
        assert len(text.rows_R) >= ANSWER - 1
        for part, value in vars(text).items():
            ours = getattr(found[name], part)
            if part == "hidden_HLD":  # but for the last token (`drop_last`)
                num_read = LENGTHS[name] + ANSWER - 1
                assert min(len(ours), len(value)) >= num_read
                ours, value = ours[:num_read], value[:num_read]
            np.testing.assert_array_equal(ours, value)


def test_adaptive_verification_of_nothing_records_text_alone(untrimmed, tmp_path):
    answers, (rows, _, _), _ = untrimmed
    server = Server(tmp_path, lambda names, scheduled, number: [0] * len(scheduled))
    assert server.run() == answers
    found, _, kinds = collect_rows(server.read_records())
    assert found == {key: row for key, row in rows.items() if len(key) == 2}
    assert kinds["drafts"] == kinds["branches"] == 0


@contextmanager
def counting_waits(monkeypatch, waits: Counter):
    """Calls of tensors that wait for the device."""
    with monkeypatch.context() as patch:
        for name in WAITS:
            method = getattr(Tensor, name)

            def counted(self, *args, name=name, method=method, **options):
                waits[name] += 1
                return method(self, *args, **options)

            patch.setattr(Tensor, name, counted)
        yield


def test_adaptive_verification_adds_no_wait_for_the_device(tmp_path, monkeypatch):
    waits = {}
    for mode, admit in (("all", as_scheduled), ("trim", trim)):
        server, waits[mode] = Server(tmp_path, admit), Counter()
        sampled, proposed = server.hooks.sampled, server.hooks.propose

        def watched(call, mode=mode):
            def call_and_count(*args, **options):
                with counting_waits(monkeypatch, waits[mode]):
                    return call(*args, **options)

            return call_and_count

        server.hooks.sampled, server.hooks.propose = watched(sampled), watched(proposed)
        server.run()
        assert bool(server.num_trimmed) is (mode == "trim")
    assert waits["trim"] == waits["all"] == Counter()
    with counting_waits(monkeypatch, waits["all"]):
        assert torch.ones(3).tolist()
    assert waits["all"] == {"tolist": 1}


def test_the_confidence_of_admitted_tokens_is_compared_with_their_acceptance(tmp_path):
    server = Server(tmp_path, trim)
    found: list[tuple[np.ndarray, int]] = []
    server.capture.calibration.add = lambda predicted_J, accepted: found.append(
        (predicted_J.copy(), accepted)
    )
    server.run()
    told = {tuple(propose(server.text[name][:end])[2].numpy()) for name in LENGTHS
            for end in range(LENGTHS[name], len(server.text[name]) + 1)}  # fmt: skip
    lengths = Counter(len(predicted) for predicted, _ in found)
    assert set(lengths) == {0, 1, 2, 3}
    for predicted, accepted in found:
        assert accepted <= len(predicted)
        assert any(tuple(predicted) == whole[: len(predicted)] for whole in told)


# --- counts for the scheduler


def test_adaptive_verification_names_the_admitted_tokens_with_the_copied_output(monkeypatch):
    events: list[str] = []

    class Output:
        def __init__(self):
            self.sampler_output = SimpleNamespace(num_rejected=torch.tensor([1, 0, 0, 3]))
            self.num_sampled_tokens_np = np.array([2, 1, 0, 1])
            self.copy_event = SimpleNamespace(record=lambda stream: events.append(stream))

        def get_output(self):
            events.append("awaited")
            return SimpleNamespace(req_ids=["a", "b", "chunk", "d"])

    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    runner = SimpleNamespace(output_copy_stream="copies", main_stream="main")
    sample = _count_admitted(runner, lambda: Output())
    result = sample().get_output()
    assert events == ["copies", "awaited"], "the same event again, and one wait as before"
    assert result.redraft.admitted == {"a": 2, "b": 0, "chunk": -1, "d": 3}
    assert _count_admitted(runner, lambda: None)() is None


@pytest.mark.parametrize("method", ["fly", "synthetic"])
def test_answers_of_a_lossy_acceptance_are_not_recorded(method):
    class GPUModelRunner:
        speculative_config = SimpleNamespace(rejection_sample_method=method)

    GPUModelRunner.__module__, GPUModelRunner.__qualname__ = runner_v2.RUNNER.rsplit(".", 1)
    with pytest.raises(ValueError, match=f"rejection_sample_method {method}"):
        install_capture(GPUModelRunner(), None)


# --- vLLM's own manager, in Triton's interpreter


def answer_on_cpu(mode, spool, target, draft):
    """Answers, scheduler's draft tokens, manager's decisions and records of a real engine."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(8, 500, length).tolist() for length in (20, 12, 33, 14)]
    longer = [rng.integers(8, 500, length).tolist() for length in (150, 20, 33, 9)]
    spec = {
        "target": str(target), "draft": str(draft), "method": "draft_model", "spool": str(spool),
        "engine": {"async_scheduling": True},
        "speculative": {"draft_sample_method": "probabilistic"},
        "rounds": [{"prompts": prompts}, {"prompts": longer}],
    }  # fmt: skip
    helper = Path(model_runners.__file__).with_name("adaptive_on_cpu.py")
    done = subprocess.run(
        [sys.executable, str(helper), mode, json.dumps(spec)], capture_output=True, text=True,
        env=model_runners.environment("v2", schedules_ahead=True),
    )  # fmt: skip
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    told = {name: json.loads(rest) for name, *rest in lines if name in ("REPORT", "DECIDED")
            for rest in rest}  # fmt: skip
    assert "REPORT" in told, done.stderr[-3000:]
    counts = told["REPORT"]["status"]["capture"]
    assert not [key for key, value in counts.items() if value and key.startswith(("err", "broken"))]
    records = [r for path in spool_files(spool) for _, r in read_frames(path.read_bytes())]
    return told["REPORT"], told["DECIDED"], collect_rows(records)


@pytest.mark.vllm
@pytest.mark.slow
def test_adaptive_verification_of_vllm_is_recorded_bit_for_bit(tmp_path):
    """The draft is a noisy copy of the target; one prompt is read in chunks beside verification."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=512,
        tie_word_embeddings=False, initializer_range=0.3, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(shape)
    model.save_pretrained(tmp_path / "target")
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data += 0.03 * weight.std() * torch.randn_like(weight)
    model.save_pretrained(tmp_path / "draft")
    (off, _, whole), (found, decided, trimmed) = [
        answer_on_cpu(mode, tmp_path / mode, tmp_path / "target", tmp_path / "draft")
        for mode in ("off", "trim")
    ]
    assert found["answers"] == off["answers"]
    assert sum(0 < budget < asked for budget, asked in decided) > 8
    assert sum(budget == 0 < asked for budget, asked in decided) > 2
    for all_of, rows in zip(whole[:2], trimmed[:2], strict=True):
        both = all_of.keys() & rows.keys()
        assert len(both) > 100
        assert {key: rows[key] for key in both} == {key: all_of[key] for key in both}
    text = {key for key in whole[0] if len(key) == 2}
    assert text <= trimmed[0].keys()
    counted = found["counted_drafts"]
    admitted, asked = (sum(column) for column in zip(*decided, strict=True))
    assert counted <= admitted < asked
    assert any(found["status"]["confidence"]), "no confidence was compared"
