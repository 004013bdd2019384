"""Capture: the parts by hand, then records from the real engine.

They are compared with Hugging Face's forward pass.
"""

import errno
import logging
import multiprocessing
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM
from waiting import wait_until

from benchmarks.fleet import count_queued
from redraft.engine.counts import AcceptanceCounts
from redraft.online.engine import capture as capture_module
from redraft.online.engine import one_pass
from redraft.online.engine.capture import Capture
from redraft.online.engine.config import CaptureConfig
from redraft.online.engine.feed import Batch, Feed, _copy_rows, _find_runs, _read_states
from redraft.online.engine.one_pass import find_in_one_pass
from redraft.online.engine.reduction import ScratchMemory, find_largest, reduce_logits
from redraft.online.engine.request_log import (
    KEPT_STATES,
    RequestInfo,
    RequestLog,
    Rows,
    States,
    VerifiedStep,
)
from redraft.online.engine.runner_v1 import install_capture
from redraft.online.engine.runner_v2 import _Hooks
from redraft.online.engine.steps import (
    PART_BYTES,
    REDUCED_BYTES,
    TOKEN_BYTES,
    EngineStep,
    StepPart,
    StepQueue,
)
from redraft.online.learning.intake import count_acceptance
from redraft.online.learning.penalties import penalise
from redraft.online.learning.replay import training_sequence
from redraft.online.records.origin import EXTRA_ARGS_KEY, Origin
from redraft.online.records.publisher import HEADER_BYTES
from redraft.online.records.record import (
    LOOKUP,
    PADDING,
    Record,
    Sampling,
    decode_record,
    encode_frame,
    encode_record,
    join_text,
    read_frames,
)
from redraft.online.records.spool import SpoolWriter, spool_files
from redraft.recipes.plan.hook_work import DRAFTED, SCANNED, count_work

V, K = 50, 4


def make_info(**changes):
    fields = {
        "request_id": "cmpl-a",
        "prompt_ids": [1, 2, 3],
        "sampling": Sampling(),
        "max_tokens": 100,
        "stop_ids": frozenset(),
    }
    return RequestInfo(**(fields | changes))


def make_log(info, max_bytes=1 << 20):
    return RequestLog(info=info, max_bytes=max_bytes)


def make_verified(start, drafts, num_accepted):
    """A step in which row j has the made-up top ids 100 * start + j."""
    count = len(drafts) + 1
    ids_RK = np.repeat(100 * start + np.arange(count, dtype=np.int32)[:, None], K, axis=1)
    return VerifiedStep(
        start=start,
        draft_ids=np.array(drafts, np.int32),
        draft_probs=np.ones(len(drafts), np.float32),
        num_accepted=num_accepted,
        rows=Rows(
            topk_ids_RK=ids_RK,
            topk_log_probs_RK=np.zeros((count, K), np.float32),
            log_sum_exp_R=np.zeros(count, np.float32),
        ),
    )


def segment(log):
    record = log.cut_segment("boot", "target")
    return None if record is None else decode_record(encode_record(record))


def make_step(
    info, start, *, sampled, drafts, version="v000001", target="", logits_RV=None, proposer=0
):
    part = StepPart(
        request=info,
        start=start,
        sampled_row=0,
        num_drafts=len(drafts),
        proposer=proposer,
        first_row=0,
        first_draft=0,
    )
    return EngineStep(
        draft_version=version,
        target_version=target,
        parts=[part],
        finished=[],
        sampled_BK=torch.tensor([sampled + [-1] * (len(drafts) + 1 - len(sampled))]),
        logits_RV=torch.randn(len(drafts) + 1, V) if logits_RV is None else logits_RV,
        draft_ids_S=torch.tensor(drafts, dtype=torch.int32),
    )


# --- one request's log


def test_a_rejection_leaves_rows_that_hang_on_the_rejected_tokens():
    log = make_log(make_info())
    log.append(3, [7], None)  # the prompt's own step
    assert log.append(4, [8, 9], make_verified(4, [8, 50, 51], 1))
    record = segment(log)
    np.testing.assert_array_equal(record.context_ids, [1, 2, 3])
    np.testing.assert_array_equal(record.output_ids, [7, 8, 9])
    np.testing.assert_array_equal(record.positions, [4, 5, 6, 7])
    np.testing.assert_array_equal(record.branches, [0, 0, 1, 2])
    np.testing.assert_array_equal(record.draft_ids, [8, 50, 51, -1])
    np.testing.assert_array_equal(record.accepted, [True, False, False, False])
    np.testing.assert_array_equal(training_sequence(record).rows_R, [3, 4])


def test_steps_without_a_draft_have_rows_and_count_as_no_draft():
    log = make_log(make_info(max_tokens=6))
    for step in (
        make_verified(3, [], 0),  # the prompt's own
        make_verified(4, [8, 50], 1),
        make_verified(6, [], 0),
        make_verified(7, [], 0),
        make_verified(8, [12, 13], 2),  # the request ends within it
    ):
        log.append(step.start, list(range(step.start + 4, step.end + 4)), step)
    record = segment(log)
    np.testing.assert_array_equal(record.output_ids, [7, 8, 9, 10, 11, 12])
    np.testing.assert_array_equal(record.positions, [3, 4, 5, 6, 6, 7, 8])
    np.testing.assert_array_equal(record.draft_ids, [-1, 8, 50, -1, -1, -1, 12])
    assert count_acceptance(record) == AcceptanceCounts(
        num_drafts=2, num_accepted=2, num_draft_tokens=3
    )
    bare = make_log(make_info(max_tokens=1))
    bare.append(3, [7], make_verified(3, [], 0))
    assert count_acceptance(segment(bare)) == AcceptanceCounts.zero()


def test_the_text_of_a_request_is_sent_once():
    log = make_log(make_info())
    log.append(3, [7], None)
    log.append(4, [8, 9], make_verified(4, [8], 1))
    first = segment(log)
    assert segment(log) is None  # nothing new
    log.append(6, [10], make_verified(6, [60], 0))
    second = segment(log)
    assert (first.sequence, second.sequence) == (0, 1)
    assert (second.context_begin, len(second.context_ids), second.num_prompt_tokens) == (6, 0, 3)
    np.testing.assert_array_equal(second.output_ids, [10])
    assert first.record_id == second.previous_id != second.record_id
    whole = join_text(second, first.context + first.output)
    np.testing.assert_array_equal(whole.context_ids, [1, 2, 3, 7, 8, 9])
    log.append(
        5, [20], make_verified(5, [60], 0)
    )  # preempted: tokens 9 and 10 never counted, and 9 was sent
    third = segment(log)
    assert (third.context_begin, third.previous_id) == (5, second.record_id)
    whole = join_text(third, whole.context + whole.output)
    np.testing.assert_array_equal(
        np.concatenate([whole.context_ids, whole.output_ids]), [1, 2, 3, 7, 8, 20]
    )
    with pytest.raises(ValueError, match=r"\b5\b.*\b4\b"):
        join_text(third, whole.context[:16])


@pytest.mark.parametrize(
    "change", [{"max_tokens": 2}, {"stop_ids": frozenset({8})}], ids=["length", "stop"]
)
def test_the_record_ends_where_the_scheduler_cuts(change):
    log = make_log(make_info(**change))
    log.append(3, [7], None)
    log.append(4, [8, 9, 10], make_verified(4, [8, 9, 50], 2))
    assert log.is_complete
    record = segment(log)
    np.testing.assert_array_equal(record.output_ids, [7, 8])
    np.testing.assert_array_equal(record.positions, [4])  # no row of a text beyond the end


def test_tokens_that_the_scheduler_threw_away_are_forgotten_with_their_rows():
    log = make_log(make_info())
    log.append(3, [7], None)
    log.append(4, [8, 9], make_verified(4, [8], 1))
    log.append(6, [10, 11], make_verified(6, [10], 1))
    assert log.append(7, [20], None)  # resumed in the middle of the step: token 11 never counted
    log.append(8, [21], make_verified(8, [60], 0))
    record = segment(log)
    np.testing.assert_array_equal(record.output_ids, [7, 8, 9, 10, 20, 21])
    assert set(record.positions) == {4, 5, 8, 9}


def test_a_lost_step_is_noticed():
    log = make_log(make_info())
    log.append(3, [7], None)
    assert not log.append(5, [9], make_verified(5, [50], 0))


# --- queue, reduction, thread


def test_the_full_queue_lets_the_oldest_go_and_counts_it():
    queue = StepQueue(max_steps=2, max_light_steps=3)
    for times in (1, 2):  # the second time, the queue has forgotten the first
        for start in (4, 5, 6, 7):
            queue.put(make_step(make_info(), start, sampled=[7], drafts=[50]))
        assert (queue.num_dropped_steps, queue.num_steps_without_rows) == (times, 2 * times)
        taken = [(step.parts[0].start, step.num_rows) for _ in range(2) for step in queue.take()]
        assert taken == [(5, 0), (6, 2), (7, 2)]
        assert queue.take() == []


def make_light_step(info, start, **changes):
    return replace(
        make_step(info, start, sampled=[7], drafts=[]), logits_RV=None, draft_ids_S=None, **changes
    )


def test_a_thousand_light_steps_wait_for_a_stuck_thread_without_a_gap(tmp_path):
    is_taken, goes_on = threading.Event(), threading.Event()

    class Event:
        def synchronize(self):
            is_taken.set()
            assert goes_on.wait(30)

    info = make_info(max_tokens=1003)
    capture = Capture(CaptureConfig(spool=tmp_path, logprobs=K), "boot", "target", "v000001")
    capture.queue.put(make_light_step(info, 3, computed=Event()))
    capture.start()
    assert is_taken.wait(30)
    for start in range(4, 1004):
        capture.queue.put(make_light_step(info, start))
    capture.queue.put(make_step(info, 1004, sampled=[8, 9], drafts=[8]))
    goes_on.set()
    capture.stop()
    status = capture.status()
    assert (status["dropped_steps_queue_full"], status["steps_without_rows_queue_full"]) == (0, 0)
    assert not status.get("broken_requests_gap")
    (record,) = [
        record for path in spool_files(tmp_path) for _, record in read_frames(path.read_bytes())
    ]
    text = np.concatenate([record.context_ids, record.output_ids])
    np.testing.assert_array_equal(text, [1, 2, 3, *[7] * 1001, 8, 9])
    np.testing.assert_array_equal(record.positions, [1004, 1005])


def test_the_thread_of_capture_stays_on_the_workers_gpu_and_on_a_stream_of_its_own(
    tmp_path, monkeypatch
):
    """A new thread is on the first GPU, where its first call would take memory for a context."""
    calls = []

    def note(name, made=None):
        return lambda *args: calls.append((threading.current_thread().name, name, *args)) or made

    for name, made in (("set_device", None), ("Stream", "a stream"), ("set_stream", None)):
        monkeypatch.setattr(torch.cuda, name, note(name, made))
    gpu = torch.device("cuda", 3)
    capture = Capture(CaptureConfig(spool=tmp_path, logprobs=K), "boot", "target", "v000001", gpu)
    computed = SimpleNamespace(synchronize=note("wait"))
    capture.queue.put(make_light_step(make_info(), 3, computed=computed))
    assert calls == []
    capture.start()
    capture.stop()
    thread = "redraft-capture"
    assert calls == [
        (thread, "set_device", gpu),
        (thread, "Stream", gpu),
        (thread, "set_stream", "a stream"),
        (thread, "wait"),
    ]
    assert not capture.counts["errors_reduce"]


def test_light_steps_are_bounded_by_bytes_too_with_the_prompts_that_they_hold():
    def put_all(**limits):
        queue = StepQueue(max_steps=4, max_light_steps=100, **limits)
        for start in range(40):
            queue.put(make_light_step(make_info(), start, num_new_tokens=1000))
        num_taken = 0
        while steps := queue.take():
            num_taken += len(steps)
        return num_taken, queue.num_dropped_steps

    one = make_light_step(make_info(), 3, num_new_tokens=1000).num_light_bytes
    assert one > 1000 * sys.getsizeof(10**6)
    assert put_all(max_light_bytes=10 * one) == (10, 30)
    assert put_all(max_light_bytes=one) == (4, 36), "as many as may have rows always wait"
    assert put_all() == (40, 0)


def test_the_sizes_of_a_light_step_are_not_underestimated():
    (part,) = make_light_step(make_info(), 3).parts
    num_numbers = len(StepPart.__struct_fields__) - 1
    assert 8 + sys.getsizeof(part) + num_numbers * sys.getsizeof(10**6) <= PART_BYTES
    prompt = list(range(10**6, 10**6 + 1000))
    assert sys.getsizeof(prompt) + sum(map(sys.getsizeof, prompt)) <= TOKEN_BYTES * len(prompt)


def make_request(name="a", length=3, **changes):
    """A request as vLLM's scheduler announces it; `changes` are of its sampling parameters."""
    unset = (
        *("structured_outputs", "min_tokens", "bad_words", "allowed_token_ids", "stop_token_ids"),
        *("eos_token_id", "thinking_token_budget", "watermarking", "trace_decode_token_ids"),
        "logit_bias",
    )
    marked = {"extra_args": {EXTRA_ARGS_KEY: Origin()._asdict()}, "max_tokens": 9}
    marked["extra_args"] |= changes.pop("extra_args", {})
    fields = dict.fromkeys(unset) | marked | msgspec.structs.asdict(Sampling()) | changes
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=[1] * length,
        sampling_params=SimpleNamespace(**fields),
        lora_request=None,
        mm_features=[],
        prompt_embeds=None,
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"watermarking": True}, "watermark"),
        ({"trace_decode_token_ids": [1]}, "forced_tokens"),
        ({"logit_bias": {5: 1.0}}, "logit_bias"),
        ({"logit_bias": {}}, ""),
        ({"max_tokens": 1}, "one_token"),
        ({"max_tokens": None}, ""),
        ({"extra_args": {"of_a_plugin": 1}}, "custom_arguments"),
        ({"extra_args": {"kv_transfer_params": {}}}, ""),
        ({"watermarking": False}, ""),
    ],
)
def test_a_request_whose_tokens_are_not_the_plain_targets_is_counted_and_not_recorded(
    tmp_path, changes, reason
):
    capture = Capture(CaptureConfig(spool=tmp_path), "boot", "target", "v000001")
    Feed(capture, max_model_len=100).add(make_request(**changes))
    assert capture.counts == {f"skipped_requests_{reason}" if reason else "captured_requests": 1}


def test_a_streamed_input_is_recorded_up_to_its_second_part(tmp_path):
    capture = Capture(CaptureConfig(spool=tmp_path), "boot", "target", "v000001")
    feed, request = Feed(capture, max_model_len=100), make_request()
    info = feed.add(request)
    assert feed.add(request) is info
    # The answer 7, 8 has ended, and 9 takes the place of 8. The next token has the index 5, as if
    # it followed 8.
    request.prompt_token_ids = [*request.prompt_token_ids, 7, 9]
    assert [feed.add(request), feed.add(request), feed.finished] == [None, None, ["a"]]
    feed.end("a")
    assert (feed.requests, feed.finished) == ({}, ["a"])


@pytest.mark.parametrize("prompt_ids", [None, [1, 0, 0]], ids=["embeddings", "mixed with text"])
@pytest.mark.parametrize("hidden_states", [False, True])
def test_a_request_with_embeddings_in_its_prompt_is_not_recorded(
    tmp_path, prompt_ids, hidden_states
):
    request = make_request()
    request.prompt_token_ids, request.prompt_embeds = prompt_ids, torch.zeros(3, 8)
    config = CaptureConfig(spool=tmp_path, hidden_states=hidden_states)
    capture = Capture(config, "boot", "target", "v000001")
    assert Feed(capture, max_model_len=100).add(request) is None
    assert capture.counts == {"skipped_requests_multimodal": 1}


def test_a_request_with_images_is_recorded_for_a_head_from_the_first_token_after_them(tmp_path):
    request = make_request(length=20)
    places = [SimpleNamespace(offset=offset, length=length) for offset, length in ((9, 4), (1, 6))]
    request.mm_features = [SimpleNamespace(mm_position=place) for place in places]
    without = Capture(CaptureConfig(spool=tmp_path), "boot", "target", "v000001")
    assert Feed(without, max_model_len=100).add(request) is None
    assert without.counts == {"skipped_requests_multimodal": 1}
    capture = Capture(
        CaptureConfig(spool=tmp_path, hidden_states=True), "boot", "target", "v000001"
    )
    log = make_log(Feed(capture, max_model_len=100).add(request))
    states_HLD = np.arange(21 * 8, dtype=np.uint16).reshape(-1, 2, 4)
    log.add_states([States(0, states_HLD[:8]), States(8, states_HLD[8:20])])
    assert sum(states.num_bytes for states in log.states) == 7 * 16
    log.append(20, [7], None)
    log.append(21, [8], make_verified(21, [50], 0))
    log.add_states([States(20, states_HLD[20:])])
    record = segment(log)
    assert record.hidden_begin == 13
    np.testing.assert_array_equal(record.hidden_words, states_HLD[13:])
    np.testing.assert_array_equal(record.positions, [21, 22])


def test_a_step_tells_the_prompts_of_its_new_requests_once(tmp_path):
    capture = Capture(CaptureConfig(spool=tmp_path), "boot", "target", "v000001")
    feed = Feed(capture, max_model_len=100)
    for name, length in (("a", 3), ("b", 4)):
        request = make_request(name, length)
        info = feed.add(request)
        feed.add(request)
    batch = Batch(
        infos=[info],
        first_reads=[0, 1],
        num_drafts=[0],
        proposers=[0],
        first_rows=[0],
        first_drafts=[0],
        starts=[4],
        is_partial=[False],
    )
    tensors = {
        "sampled_BK": torch.tensor([[7]]),
        "logits_RV": None,
        "draft_ids_S": None,
        "draft_probs_S": None,
    }
    assert [feed.make_step(batch, **tensors).num_new_tokens for _ in range(2)] == [7, 0]


def test_requests_that_ended_are_known_of_steps_that_were_let_go_too():
    queue = StepQueue(max_steps=1, max_light_steps=1)
    for ended in (["cmpl-a"], ["cmpl-b"], []):
        queue.put(EngineStep(draft_version="v000001", parts=[], finished=ended))
    assert [step.finished for step in queue.take()] == [["cmpl-a", "cmpl-b"]]


def test_the_queue_is_bounded_by_bytes_and_the_newest_steps_keep_their_rows():
    one = make_step(make_info(), 4, sampled=[7], drafts=[50])
    for count in range(1, 11):
        queue, starts = StepQueue(max_bytes=2 * one.num_bytes), list(range(4, 4 + count))
        for start in starts:
            queue.put(make_step(make_info(), start, sampled=[7], drafts=[50]))
        taken = queue.take()
        assert [step.parts[0].start for step in taken if step.num_bytes] == starts[-2:]
        assert [step.parts[0].start for step in taken] == starts
        assert (queue.num_steps_without_rows, queue.num_dropped_steps) == (max(0, count - 2), 0)
    small = StepQueue(max_bytes=1)
    small.put(one)
    assert small.take() == [one]


def test_steps_wait_until_there_are_enough_to_reduce_together():
    queue = StepQueue()
    half = make_step(
        make_info(), 4, sampled=[7], drafts=[50], logits_RV=torch.empty(2, REDUCED_BYTES // 16)
    )
    queue.put(half)
    assert not queue.is_due.is_set()
    queue.put(half)
    queue.put(half)
    assert queue.is_due.is_set()
    assert [len(queue.take()), queue.is_due.is_set(), len(queue.take())] == [2, False, 1]


@pytest.mark.parametrize("num_steps", range(1, 13))
@pytest.mark.parametrize("steps_a_batch", [0, 3, 6])
def test_the_bound_holds_whenever_steps_are_taken(num_steps, steps_a_batch):
    one = make_step(
        make_info(), 4, sampled=[7], drafts=[50], logits_RV=torch.empty(2, REDUCED_BYTES // 8)
    )
    queue = StepQueue(max_steps=8, max_bytes=3 * one.num_bytes, max_light_steps=8)
    for number in range(1, num_steps + 1):
        queue.put(one)
        if steps_a_batch and number % steps_a_batch == 0:
            queue.take()
    held = [step.num_bytes for steps in iter(queue.take, []) for step in steps]
    assert sum(held) <= queue.max_bytes
    assert len(held) <= 8
    assert held == sorted(held), "the oldest lose their rows first"
    assert not queue.is_due.is_set()
    for _ in range(4):
        queue.put(one)
    held = [step.num_bytes for steps in iter(queue.take, []) for step in steps]
    assert held == [0, *[one.num_bytes] * 3], "what was taken does not count any more"


def test_a_step_without_rows_leaves_no_gap_in_the_text(tmp_path):
    info = make_info(max_tokens=6)
    steps = [
        make_step(info, 3, sampled=[7], drafts=[]),
        make_step(info, 4, sampled=[8, 9], drafts=[8, 50]).give_up_rows(),
        make_step(info, 6, sampled=[10], drafts=[60]),
        make_step(info, 7, sampled=[11, 12], drafts=[11]),
    ]
    capture, (record,) = run_capture(tmp_path, steps)
    np.testing.assert_array_equal(record.output_ids, [7, 8, 9, 10, 11, 12])
    np.testing.assert_array_equal(record.positions, [3, 6, 7, 7, 8])
    assert not capture.status().get("broken_requests_gap")
    text = training_sequence(record)
    np.testing.assert_array_equal(text.input_ids_T[:9], [1, 2, 3, 7, 8, 9, 10, 11, 12])


def test_rows_that_the_hook_has_reduced_become_the_same_records(tmp_path):
    torch.manual_seed(0)
    info = make_info(max_tokens=5)
    steps = [
        make_step(info, 3, sampled=[7], drafts=[]),
        make_step(info, 4, sampled=[8, 9], drafts=[8, 50]),
        make_step(info, 6, sampled=[10, 11], drafts=[10, 51]),
    ]
    steps[0] = replace(steps[0], logits_RV=None, draft_ids_S=None)
    reduced = [
        replace(step, logits_RV=None, largest=find_in_one_pass(step.logits_RV, K))
        for step in steps[1:]
    ]
    _, (wanted,) = run_capture(tmp_path / "all", steps)
    _, (found,) = run_capture(tmp_path / "largest", [steps[0], *reduced])
    np.testing.assert_array_equal(found.topk_ids, wanted.topk_ids)
    np.testing.assert_allclose(found.topk_log_probs, wanted.topk_log_probs, atol=1e-6)
    np.testing.assert_allclose(found.log_sum_exp, wanted.log_sum_exp, atol=1e-6)
    np.testing.assert_array_equal(found.positions, wanted.positions)


def test_a_step_of_a_fleet_leaves_little_in_the_queue():
    sizes = count_queued(num_requests=8, num_drafts=3, vocab_size=2000)
    assert sizes == {"bytes_per_step": 8 * 4 * (32 * 8 + 4), "bytes_by_reference": 8 * 4 * 2000 * 2}


def test_the_hook_of_a_fleet_reads_the_logits_once_and_launches_few_kernels():
    (row,) = count_work(("eagle3, peagle",), (256,), (128_256,))
    assert row["bytes_queued"] == 256 * 4 * (32 * 8 + 4) + 256 * 4 * 3 * 4096 * 2
    logits_bytes = 256 * 4 * 128_256 * 2
    assert logits_bytes < row["bytes_by_part"][SCANNED] < 1.2 * logits_bytes
    assert 256 * 3 * 128_256 * 2 < row["bytes_by_part"][DRAFTED] < 1.01 * 256 * 3 * 128_256 * 2
    assert row["kernels"] < 30
    (alone,) = count_work(("eagle3, peagle",), (1,), (128_256,))
    assert alone["kernels"] == row["kernels"], "no loop over requests"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reduction_is_the_log_softmax(dtype):
    logits_RV = (torch.randn(5, V, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    rows = reduce_logits([logits_RV[:2], logits_RV[2:]], K, ScratchMemory())
    log_probs_RV = logits_RV.double().log_softmax(-1)
    np.testing.assert_allclose(rows.topk_log_probs_RK, log_probs_RV.topk(K).values, atol=1e-5)
    ids_RK = torch.from_numpy(rows.topk_ids_RK).long()  # any of several equal logits
    np.testing.assert_allclose(rows.topk_log_probs_RK, log_probs_RV.gather(1, ids_RK), atol=1e-5)
    assert rows.topk_log_probs_RK.dtype == np.float32
    np.testing.assert_allclose(rows.log_sum_exp_R, logits_RV.double().logsumexp(-1), atol=1e-5)


# From no group at all to groups that do not divide the vocabulary evenly.
@pytest.mark.parametrize("size", [3, 64, 1000, 4099])
@pytest.mark.parametrize("kind", ["distinct", "full of ties", "masked", "all alike"])
def test_the_largest_logits_are_those_of_a_sort(size, kind):
    logits_RV = torch.randn(7, size, generator=torch.Generator().manual_seed(size)) * 5 - 3
    if kind == "full of ties":
        logits_RV = logits_RV.round()
    elif kind == "masked":
        logits_RV[:, ::2] = -torch.inf
    elif kind == "all alike":
        logits_RV[:] = -1.5
    k = min(16, size)
    found_RK, ids_RK = find_largest(logits_RV, k)
    assert torch.equal(found_RK, logits_RV.sort(descending=True).values[:, :k])
    assert torch.equal(found_RK, logits_RV.gather(1, ids_RK))
    assert all(len(set(ids)) == k for ids in ids_RK.tolist())


def test_the_first_of_the_kept_ids_is_what_a_greedy_target_says():
    logits_RV = torch.randn(50, 4099, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    logits_RV[:, 7] = logits_RV[:, 4000] = logits_RV.max() + 1  # two that are equal
    assert torch.equal(find_largest(logits_RV, 32)[1][:, 0], logits_RV.argmax(-1))


def test_the_kernels_get_only_addresses_for_which_triton_compiles_them_once(monkeypatch):
    given = []

    class Kernels:
        def __getattr__(self, name):
            return self

        def __getitem__(self, grid):
            return lambda *args, **options: given.extend(x for x in args if torch.is_tensor(x))

    monkeypatch.setattr(one_pass, "find_kernels", Kernels)
    for num_rows in (1, 2, 3):
        logits_RV, draft_N = torch.zeros(num_rows, 3 * one_pass.CHUNK), torch.arange(num_rows)
        one_pass.find_in_one_pass(logits_RV, K)
        one_pass.gather_probs(logits_RV[:, None], draft_N, 0 * draft_N, draft_N, draft_N.float())
    assert len(given) > 3 * 6
    assert all(tensor.data_ptr() % 16 == 0 for tensor in given)


def run_capture(folder, steps, **config):
    capture = Capture(
        CaptureConfig(spool=folder, logprobs=K, **config), "boot", "target", "v000001"
    )
    for step in steps:
        capture.queue.put(step)
    capture.start()
    capture.stop()
    files = spool_files(folder) if folder.is_dir() else []
    frames = [frame for path in files for frame in read_frames(path.read_bytes())]
    return capture, [record for _, record in frames]


def test_steps_become_records_of_one_draft_version_each(tmp_path):
    info = make_info(max_tokens=6)
    steps = [
        make_step(info, 3, sampled=[7], drafts=[]),
        make_step(info, 4, sampled=[8, 9], drafts=[8, 50]),
        make_step(
            info, 6, sampled=[10], drafts=[52, 51], version="v000002"
        ),  # proposed before the swap
        make_step(info, 7, sampled=[11, 12], drafts=[11, 53], version="v000002"),
    ]
    capture, records = run_capture(tmp_path, steps)
    assert [record.draft_version for record in records] == ["v000001", "v000002"]
    assert [record.sequence for record in records] == [0, 1]
    assert (records[1].context_begin, len(records[1].context_ids)) == (7, 0)
    assert [[i for i in record.draft_ids if i >= 0] for record in records] == [
        [8, 50, 52, 51],
        [11, 53],
    ]
    wanted = steps[1].logits_RV.double().log_softmax(-1).topk(K)
    np.testing.assert_allclose(records[0].topk_log_probs[1:4], wanted.values, atol=1e-5)
    assert capture.status()["records"] == 2
    assert capture.status()["shipped_records"] == 2


def test_a_record_names_the_weights_that_verified_it_and_none_is_of_unclear_ones(tmp_path):
    info, other = make_info(max_tokens=9), make_info(max_tokens=9, request_id="cmpl-b")
    steps = [
        make_step(info, 3, sampled=[7], drafts=[]),
        make_step(info, 4, sampled=[8, 9], drafts=[8, 50]),
        make_step(
            info, 6, sampled=[10], drafts=[52, 51], target="17@0123456789ab"
        ),  # proposed before the push
        make_step(info, 7, sampled=[11, 12], drafts=[11, 53]),
        make_step(other, 3, sampled=[7], drafts=[]),
        make_step(other, 4, sampled=[8, 9], drafts=[8, 50]),
        make_step(other, 6, sampled=[10], drafts=[52, 51], target=None),
        make_step(other, 7, sampled=[11, 12], drafts=[11, 53], target="18@123456789abc"),
    ]
    steps.append(
        EngineStep(
            draft_version="v000001", parts=[], finished=["cmpl-1", info.request_id, "cmpl-b"]
        )
    )
    capture, records = run_capture(tmp_path, steps)
    named = [
        (record.target_version, [i for i in record.draft_ids if i >= 0])
        for record in records
        if record.request_id != "cmpl-b"
    ]
    assert named == [("", [8, 50]), ("17@0123456789ab", [52, 51]), ("", [11, 53])]
    (before,) = [record for record in records if record.request_id == "cmpl-b"]
    assert (before.target_version, [i for i in before.draft_ids if i >= 0]) == ("", [8, 50])
    assert capture.status()["broken_requests_target_unclear"] == 1
    assert {record.target for record in records} == {"target", "target@0123456789ab"}


def read_after(step, begin, value, *, sampled=True):
    """The step in which the target read the tokens from `begin` on, each with states of `value`."""
    part = step.parts[0]
    num_read = part.start + part.num_drafts - begin
    part = msgspec.structs.replace(part, num_read=num_read, sampled_row=0 if sampled else None)
    return replace(
        step, parts=[part], states_NLD=torch.full((num_read, 1, 8), value, dtype=torch.bfloat16)
    )


@pytest.mark.parametrize("cached", [0, 4], ids=["read again", "from the prefix cache"])
@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_record_has_the_states_of_the_weights_that_it_names(tmp_path, cached, in_chunks):
    """A new target empties the cache: the request is read once more, at first maybe in part."""
    info = make_info(max_tokens=9, prompt_ids=[1, 2, 3, 4, 5])
    steps = [
        read_after(make_step(info, 5, sampled=[7], drafts=[]), 0, 1),
        read_after(make_step(info, 6, sampled=[8, 9], drafts=[8, 50]), 5, 1),
    ]
    begin = cached
    if in_chunks:
        begin = 6
        steps.append(
            read_after(
                make_step(info, begin, sampled=[], drafts=[], target="17@a"),
                cached,
                2,
                sampled=False,
            )
        )
    steps.append(read_after(make_step(info, 8, sampled=[10], drafts=[], target="17@a"), begin, 2))
    steps.append(read_after(make_step(info, 9, sampled=[11], drafts=[53], target="17@a"), 8, 2))
    steps.append(
        EngineStep(draft_version="v000001", parts=[], finished=["cmpl-1", info.request_id])
    )
    _, records = run_capture(tmp_path, steps, hidden_states=True)
    ones, twos = (
        torch.full((), value, dtype=torch.bfloat16).view(torch.int16).item() for value in (1.0, 2.0)
    )
    found = [
        (one.target_version, one.hidden_begin, one.num_hidden, set(one.hidden_words.ravel()))
        for one in records
    ]
    assert found == [("", 0, 7, {ones}), ("17@a", cached, 9 - cached, {twos})]


def test_a_request_of_which_unclear_weights_read_a_part_is_not_recorded(tmp_path):
    info = make_info(max_tokens=9)
    steps = [
        read_after(make_step(info, 2, sampled=[], drafts=[], target=None), 0, 1, sampled=False),
        read_after(make_step(info, 3, sampled=[7], drafts=[]), 2, 1),
        read_after(make_step(info, 4, sampled=[8], drafts=[50]), 3, 1),
        EngineStep(draft_version="v000001", parts=[], finished=["cmpl-1", info.request_id]),
    ]
    capture, records = run_capture(tmp_path, steps, hidden_states=True)
    assert records == []
    assert capture.status()["broken_requests_target_unclear"] == 1


def test_a_record_tells_lookups_and_padding_from_the_versions_tokens_and_only_these_count(tmp_path):
    info = make_info(max_tokens=7)
    steps = [
        make_step(info, 3, sampled=[7], drafts=[]),
        make_step(info, 4, sampled=[8, 9], drafts=[8, 50]),
        make_step(info, 6, sampled=[10, 11, 12], drafts=[10, 11], proposer=LOOKUP),
        make_step(info, 9, sampled=[13], drafts=[0, 0], proposer=PADDING),
    ]
    _, (record,) = run_capture(tmp_path, steps)
    assert record.draft_version == "v000001"
    assert list(record.row_proposers) == [0] * 4 + [LOOKUP] * 3 + [PADDING] * 3
    assert count_acceptance(record) == AcceptanceCounts(
        num_drafts=1, num_accepted=1, num_draft_tokens=2
    )
    (plain,) = run_capture(
        tmp_path / "plain", [make_step(make_info(max_tokens=1), 3, sampled=[7], drafts=[8])]
    )[1]
    assert plain.row_proposers == b""
    assert plain.is_own.all()


def make_shared_step(starts, sampled, drafts, draft_probs=None):
    """A step of requests a and b; between them is a third one, not captured."""
    count = len(drafts[0])
    infos = (make_info(), make_info(request_id="cmpl-b", prompt_ids=[4, 5]))
    parts = [
        StepPart(
            request=info,
            start=start,
            sampled_row=row,
            num_drafts=count,
            first_row=row * (count + 1),
            first_draft=row * count,
        )
        for info, start, row in zip(infos, starts, (0, 2), strict=True)
    ]
    return EngineStep(
        draft_version="v000001",
        parts=parts,
        finished=[],
        sampled_BK=torch.tensor([sampled[0], [49] * len(sampled[0]), sampled[1]]),
        logits_RV=torch.randn(3 * (count + 1), V) if count else None,
        draft_ids_S=torch.tensor([*drafts[0], *[49] * count, *drafts[1]], dtype=torch.int32)
        if count
        else None,
        draft_probs_S=draft_probs,
    )


def test_steps_that_are_reduced_together_keep_their_own_rows_and_drafts(tmp_path):
    torch.manual_seed(0)
    steps = [
        make_shared_step((3, 2), ([7], [8]), ([], [])),
        make_shared_step((4, 3), ([9, 10, -1], [11, -1, -1]), ([9, 12], [13, 14])),
        make_shared_step(
            (6, 4), ([15, -1], [16, 17]), ([18], [16]), torch.tensor([0.25, 0.5, 0.75])
        ),
        EngineStep(draft_version="v000001", parts=[], finished=["cmpl-a", "cmpl-b"]),
    ]
    _, records = run_capture(tmp_path, steps)
    assert [record.request_id for record in records] == ["cmpl-a", "cmpl-b"]
    first, second = steps[1].logits_RV, steps[2].logits_RV
    for record, logits_RV in zip(
        records,
        (torch.cat([first[:3], second[:2]]), torch.cat([first[6:], second[4:]])),
        strict=True,
    ):
        np.testing.assert_array_equal(record.topk_ids, logits_RV.topk(K).indices)
        np.testing.assert_allclose(record.log_sum_exp, logits_RV.logsumexp(-1), atol=1e-5)
    np.testing.assert_array_equal(records[0].draft_ids, [9, 12, -1, 18, -1])
    np.testing.assert_array_equal(records[1].draft_ids, [13, 14, -1, 16, -1])
    np.testing.assert_array_equal(
        records[0].draft_probs, np.array([1, 1, np.nan, 0.25, np.nan], np.float32)
    )
    np.testing.assert_array_equal(
        records[1].draft_probs, np.array([1, 1, np.nan, 0.75, np.nan], np.float32)
    )
    np.testing.assert_array_equal(records[1].accepted, [False, False, False, True, False])


def test_nothing_of_a_step_is_read_before_its_device_has_computed_it(tmp_path):
    wanted = make_step(make_info(max_tokens=2), 3, sampled=[7, 8], drafts=[7])
    tensors = ("sampled_BK", "logits_RV", "draft_ids_S")
    early = replace(wanted, **{name: torch.zeros_like(getattr(wanted, name)) for name in tensors})

    class Event:
        def synchronize(self):
            for name in tensors:
                getattr(early, name).copy_(getattr(wanted, name))

    (record,) = run_capture(tmp_path, [replace(early, computed=Event())])[1]
    np.testing.assert_array_equal(record.output_ids, [7, 8])
    np.testing.assert_array_equal(record.topk_ids, wanted.logits_RV.topk(K).indices)


def test_what_only_the_device_knows_of_a_step_is_read_by_the_thread(tmp_path):
    """Of steps that are scheduled ahead: where they begin, and how many tokens they sampled."""
    info = make_info(max_tokens=3)
    first, second = (
        make_step(info, 3, sampled=[7], drafts=[]),
        make_step(info, 4, sampled=[8, 9], drafts=[8, 50]),
    )
    ahead = replace(
        second,
        parts=[msgspec.structs.replace(second.parts[0], start=99)],
        sampled_BK=torch.tensor([[8, 9, 77]]),  # the last one is a leftover
        num_sampled_B=torch.tensor([2]),
        starts_B=torch.tensor([4]),
    )
    ((wanted,), (found,)) = (
        run_capture(tmp_path / name, [first, step])[1]
        for name, step in (("a", second), ("b", ahead))
    )
    assert msgspec.structs.replace(found, time_s=wanted.time_s) == wanted
    np.testing.assert_array_equal(found.output_ids, [7, 8, 9])


def test_at_temperature_zero_the_drafts_best_token_is_certain(tmp_path):
    """vLLM keeps logits in place of the probabilities."""
    info = make_info(max_tokens=3, sampling=Sampling(temperature=0.0))
    second = replace(
        make_step(info, 4, sampled=[8, 9], drafts=[8, 50]), draft_probs_S=torch.tensor([17.5, -3.0])
    )
    (record,) = run_capture(tmp_path, [make_step(info, 3, sampled=[7], drafts=[]), second])[1]
    np.testing.assert_array_equal(record.draft_probs, np.array([np.nan, 1, 1, np.nan], np.float32))


@pytest.mark.parametrize(
    ("kept", "num_runs"), [([0, 1, 2, 3], 1), ([1, 2], 1), ([0, 2, 3], 2), ([0, 2], 2)]
)
def test_states_of_the_recorded_requests_are_read_in_few_slices(kept, num_runs):
    counts, begins = [3, 1, 4, 2], [0, 3, 4, 8]
    parts = [
        StepPart(request=make_info(), start=2, sampled_row=i, num_drafts=0, first_row=0, first_draft=0,
                 num_read=counts[i], first_read=begins[i])
        for i in kept
    ]  # fmt: skip
    streams_ND = torch.randn(2, 12, 5)  # two layers; the last two rows are padding
    rows = [row for i in kept for row in range(begins[i], begins[i] + counts[i])]
    states_NLD = _read_states(_find_runs(parts), list(streams_ND))
    assert torch.equal(states_NLD, streams_ND[:, rows].transpose(0, 1).bfloat16())
    assert len(_find_runs(parts)) == num_runs
    streams_ND.zero_()
    assert states_NLD.abs().sum() > 0, "a copy"


def test_few_rows_of_many_are_copied_and_found_again():
    logits_RV = torch.randn(12, V)
    parts = [
        StepPart(
            request=make_info(),
            start=3,
            sampled_row=row,
            num_drafts=drafts,
            first_row=first,
            first_draft=0,
        )
        for row, (drafts, first) in enumerate([(2, 1), (0, 4), (1, 9)])
    ]
    moved, kept_RV = _copy_rows(parts, logits_RV)
    assert torch.equal(kept_RV, logits_RV[[1, 2, 3, 4, 9, 10]])
    assert [part.first_row for part in moved] == [0, 3, 4]


def test_of_a_long_text_no_more_hidden_states_are_kept_than_a_record_holds():
    log = make_log(
        make_info(prompt_ids=[1] * 1000), max_bytes=100 * 2 * 8 + 4 * 1001 + 53
    )  # states, text, a row
    states_HLD = np.arange(1001 * 8, dtype=np.uint16).reshape(-1, 2, 4)
    for begin in range(0, 1000, 500):  # a prompt, read in chunks larger than the kept states
        log.add_states([States(begin, states_HLD[begin : begin + 500])])
        assert sum(states.words_HLD.base is None for states in log.states) == len(log.states), (
            "no view of a whole step"
        )
    for begin in range(960, 1000, 7):
        log.add_states([States(begin, states_HLD[begin : begin + 7].copy())])  # and read once more
    assert sum(states.num_bytes for states in log.states) <= 2 * log.max_bytes
    log.append(1000, [5], make_verified(1000, [], 0))
    log.add_states([States(1000, states_HLD[1000:].copy())])
    record = segment(log)
    assert (record.hidden_begin, len(record.hidden_words)) == (901, 100)
    np.testing.assert_array_equal(record.hidden_words, states_HLD[901:])
    assert sum(states.num_bytes for states in log.states) == KEPT_STATES * 2 * 8


@pytest.mark.parametrize(("kept", "wanted"), [(KEPT_STATES, KEPT_STATES), (95, 95), (400, 125)])
def test_a_segment_begins_with_the_states_that_the_heads_window_reads(kept, wanted):
    """At most a quarter of the record, 125 of 500 states."""
    log = RequestLog(info=make_info(prompt_ids=[1] * 300), max_bytes=500 * 16, kept_states=kept)
    states_HLD = np.arange(301 * 8, dtype=np.uint16).reshape(-1, 2, 4)
    log.add_states([States(0, states_HLD)])
    log.append(300, [5], make_verified(300, [], 0))
    segment(log)
    (left,) = log.states
    assert (left.begin, left.end) == (301 - wanted, 301)
    np.testing.assert_array_equal(left.words_HLD, states_HLD[-wanted:])


@pytest.mark.parametrize("hidden_format", ["bfloat16", "float8"])
def test_records_of_the_largest_heads_fit_a_message_of_the_log_and_lose_no_row(hidden_format):
    """A target of 8,192 numbers, of which a head reads three layers.

    NATS takes 8 MiB with the headers.
    """
    config = CaptureConfig(
        ingest="nats://127.0.0.1:4222", hidden_states=True, hidden_format=hidden_format
    )
    state_bytes = 8192 + 4 if hidden_format == "float8" else 2 * 8192
    rng = np.random.default_rng(0)

    def make_states(begin, count):
        words = np.frombuffer(rng.bytes(3 * state_bytes * count), np.uint8)  # cannot be compressed
        return [
            States(
                begin,
                (words if hidden_format == "float8" else words.view(np.uint16)).reshape(
                    count, 3, -1
                ),
            )
        ]

    log = make_log(make_info(prompt_ids=list(range(1024)), max_tokens=1000), config.record_bytes)
    log.append(1024, [7], make_verified(1024, [], 0))
    log.add_states(make_states(1024 - 384, 384))  # of the prompt: they alone make no record full
    records = []
    for start in range(1025, 1025 + 400, 2):  # two tokens a step, one of them drafted
        assert log.append(start, [8, 9], make_verified(start, [8], 1))
        log.add_states(make_states(start - 1, 2))
        if log.is_full:
            records.append(log.cut_segment("boot", "target"))
    records.append(log.cut_segment("boot", "target"))
    sizes = [len(encode_frame(record)) for record in records]
    assert max(sizes) + HEADER_BYTES < 8 << 20
    assert min(sizes[:-1]) > 7 << 20, "no more records than needed"
    for record in records:
        # EAGLE-3's first step predicts the token of a row from the state two tokens before
        assert record.hidden_shape == (3, 8192)
        assert (record.positions - 2 >= record.hidden_begin).all()
        assert record.hidden_begin + record.num_hidden >= record.positions.max()
    found = np.concatenate([record.positions for record in records])
    np.testing.assert_array_equal(np.unique(found), np.arange(1024, 1425))


def test_a_dropped_step_ends_the_record_before_it(tmp_path):
    info = make_info()
    steps = [
        make_step(info, 3, sampled=[7], drafts=[]),
        make_step(info, 4, sampled=[8], drafts=[50]),
        make_step(info, 6, sampled=[9], drafts=[51]),
        make_step(info, 7, sampled=[9], drafts=[51]),
    ]
    capture, records = run_capture(tmp_path, steps)
    np.testing.assert_array_equal(records[0].output_ids, [7, 8])
    assert len(records) == 1
    assert capture.status()["broken_requests_gap"] == 1


def test_a_spool_that_cannot_be_written_costs_records_only(tmp_path):
    (tmp_path / "spool").write_text("in the way")
    info = make_info(max_tokens=2)
    steps = [
        make_step(info, 3, sampled=[7], drafts=[]),
        make_step(info, 4, sampled=[8], drafts=[50]),
    ]
    capture, records = run_capture(tmp_path / "spool", steps)
    assert records == []
    assert capture.status()["dropped_records_spool"] == 1
    assert capture.status()["last_error"]


def test_errors_of_capture_are_logged_once_each_without_a_users_words(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(capture_module, "logger", logging.getLogger("capture"))
    capture = Capture(CaptureConfig(spool=tmp_path), "b", "t", "v")
    for number in range(3):
        with capture.reporting("hook"):
            raise KeyError(f"a secret, {number}")
        with capture.reporting("spool"):
            raise PermissionError(errno.EACCES, "Permission denied", f"spool/.{number}.partial")
    hook, spool = (record.getMessage() for record in caplog.records)
    assert "KeyError in test_errors_of_capture" in hook
    assert "PermissionError (Permission denied) in test_errors_of_capture" in spool
    assert capture.status()["errors_hook"] == capture.status()["errors_spool"] == 3
    assert "secret" not in caplog.text + capture.status()["last_error"]


def test_sampling_keeps_the_fraction_it_is_told_and_only_the_tenants(tmp_path):
    capture = Capture(CaptureConfig(spool=tmp_path, fraction=0.3, tenants=("a",)), "b", "t", "v")
    kept = [capture.is_sampled(f"cmpl-{i}", "a") for i in range(4000)]
    assert 0.25 < np.mean(kept) < 0.35
    assert kept == [capture.is_sampled(f"cmpl-{i}", "a") for i in range(4000)]
    assert not any(capture.is_sampled(f"cmpl-{i}", "b") for i in range(100))
    assert capture.counts["skipped_requests_tenant"] == 100


def test_the_spool_lets_the_oldest_go_above_its_budget_whoever_wrote_it(tmp_path):
    old, new = SpoolWriter(tmp_path, "old", 1000), SpoolWriter(tmp_path, "new", 1000)
    old.write([b"x" * 400])
    old.write([b"y" * 400])
    new.write([b"z" * 400])
    assert [path.read_bytes()[:1] for path in spool_files(tmp_path)] == [b"y", b"z"]
    assert new.num_evicted_files == 1
    new.write([b"w" * 5000])  # above the budget on its own
    assert [path.read_bytes()[:1] for path in spool_files(tmp_path)] == [b"w"]


def write_until_killed(folder, number):
    writer = SpoolWriter(folder, f"boot{number}", 1 << 30)
    frame = encode_record(segment_of_one())
    while True:
        writer.write([frame] * 50)


def segment_of_one():
    log = make_log(make_info())
    log.append(3, [7], None)
    log.append(4, [8], make_verified(4, [50], 0))
    return log.cut_segment("boot", "target")


def test_a_server_killed_while_it_writes_leaves_whole_files_and_its_rest_is_cleared_away(tmp_path):
    fork = multiprocessing.get_context("fork")
    for number in range(10):
        server = fork.Process(target=write_until_killed, args=(tmp_path, number))
        server.start()
        wait_until(lambda number=number: len(spool_files(tmp_path)) >= 5 * (number + 1))
        server.kill()
        server.join()
    frames = [frame for path in spool_files(tmp_path) for frame in read_frames(path.read_bytes())]
    assert all(isinstance(record, Record) for _, record in frames)
    left = tmp_path / ".0-killed-0.partial"
    left.write_bytes(b"users' text")
    writer = SpoolWriter(tmp_path, "next", 1 << 30)
    writer.write([b"x"])
    assert left.exists(), "another server may be writing it"
    os.utime(left, (0, 0))
    writer.write([b"x"])
    assert not left.exists()


def test_nobody_else_reads_a_spool_that_was_made_here(tmp_path):
    SpoolWriter(tmp_path / "spool", "boot", 1000).write([b"x"])
    assert (tmp_path / "spool").stat().st_mode & 0o077 == 0


def test_a_hook_that_fails_costs_records_and_nothing_else(tmp_path):
    """As with an engine whose internals have changed: this runner has no attributes at all."""
    sampled = SimpleNamespace(sampled_token_ids=None)
    runner = SimpleNamespace(
        _sample=lambda logits, metadata: sampled,
        sample_tokens=None,
        _get_spec_decode_draft_probs=lambda metadata: None,
        _on_request_state_removed=lambda request_id, state: None,
        propose_draft_token_ids=lambda *tensors: "drafts",
        max_model_len=256,
    )
    capture = Capture(
        CaptureConfig(spool=tmp_path, hidden_states=True), "boot", "target", "v000001"
    )
    install_capture(runner, capture)
    assert runner._sample(None, None) is sampled
    runner._sample.__self__.feed.unread = make_step(make_info(), 3, sampled=[7], drafts=[])
    assert runner.propose_draft_token_ids("too", "few") == "drafts"
    assert (capture.counts["errors_hook"], capture.counts["errors_hidden_states"]) == (1, 1)


def test_logits_that_v1_changes_in_a_step_without_drafts_are_recorded_as_they_were(tmp_path):
    def sample(logits_RV, metadata):
        # as vLLM's sampler does with float32; its rejection sampler changes a copy
        logits_RV /= 0.5
        return SimpleNamespace(sampled_token_ids=torch.tensor([[7]]))

    request = make_request()
    runner = SimpleNamespace(
        _sample=sample,
        sample_tokens=None,
        _get_spec_decode_draft_probs=None,
        _on_request_state_removed=None,
        propose_draft_token_ids=None,
        max_model_len=100,
        requests={"a": request},
        query_start_loc=SimpleNamespace(np=np.array([0, 3])),
        input_batch=SimpleNamespace(
            req_ids=["a"], num_reqs=1, num_computed_tokens_cpu=np.array([0])
        ),
        discard_request_mask=SimpleNamespace(np=np.array([False])),
    )
    capture = Capture(CaptureConfig(spool=tmp_path), "boot", "target", "v000001")
    install_capture(runner, capture)
    logits_RV = torch.randn(1, V)
    before_RV = logits_RV.clone()
    runner._sample(logits_RV, None)
    (step,) = capture.queue.take()
    assert torch.equal(step.logits_RV, before_RV)
    assert not torch.equal(logits_RV, before_RV)
    assert (step.parts[0].start, step.parts[0].num_drafts) == (3, 0)


def test_a_step_of_requests_that_are_not_recorded_copies_and_reads_nothing(tmp_path):
    class Logits:
        """Has neither values nor a copy."""

        dtype = torch.float32

    # without the tensors of a step
    runner = SimpleNamespace(
        _sample=lambda *_: SimpleNamespace(sampled_token_ids=None),
        sample_tokens=None,
        _get_spec_decode_draft_probs=None,
        _on_request_state_removed=None,
        propose_draft_token_ids=lambda *_: None,
        max_model_len=100,
        requests={name: make_request(name) for name in "ab"},
        input_batch=SimpleNamespace(req_ids=["a", "b"], num_reqs=2),
    )
    config = CaptureConfig(spool=tmp_path, fraction=0, hidden_states=True)
    capture = Capture(config, "boot", "target", "v000001")
    install_capture(runner, capture)
    for _ in range(3):
        runner._sample(Logits(), None)
        runner.propose_draft_token_ids(*[None] * 5, [None])
    assert capture.counts == {"skipped_requests_fraction": 2}
    assert capture.queue.take() == []


@pytest.mark.parametrize("recorded_is_last", [False, True])
def test_the_end_of_a_request_is_known_at_once_when_the_engine_falls_idle(
    tmp_path, recorded_is_last
):
    """Whichever of two requests goes last, only one of them recorded.

    No step may follow for a long time.
    """
    runner = SimpleNamespace(
        _sample=None,
        sample_tokens=None,
        _get_spec_decode_draft_probs=None,
        _on_request_state_removed=lambda request_id, state: None,
        propose_draft_token_ids=None,
        requests={"recorded": None, "other": None},
        max_model_len=256,
    )
    capture = Capture(CaptureConfig(spool=tmp_path), "boot", "target", "v000001")
    install_capture(runner, capture)
    runner._sample.__self__.feed.requests = {"recorded": make_info(), "other": None}
    for request_id in sorted(runner.requests, reverse=not recorded_is_last):
        del runner.requests[request_id]
        runner._on_request_state_removed(request_id, None)
    assert [step.finished for step in capture.queue.take()] == [["recorded"]]


def make_broken_step(request_id, finished):
    step = make_step(make_info(request_id=request_id), 3, sampled=[7], drafts=[50])
    return replace(
        step, parts=[msgspec.structs.replace(step.parts[0], sampled_row=5)], finished=finished
    )


def test_a_step_that_cannot_be_reduced_costs_itself_only(tmp_path):
    info = make_info(max_tokens=2)
    broken = make_broken_step("cmpl-b", finished=["cmpl-c"])
    steps = [
        make_step(info, 3, sampled=[7], drafts=[]),
        make_step(info, 4, sampled=[8], drafts=[50]),
    ]
    capture = Capture(CaptureConfig(spool=tmp_path, logprobs=K), "boot", "target", "v000001")
    capture.queue.put(make_step(make_info(request_id="cmpl-c"), 3, sampled=[7], drafts=[]))
    capture.start()
    wait_until(lambda: capture.status()["open_requests"])
    capture.queue.put(broken)
    wait_until(lambda: capture.counts["errors_reduce"])
    for step in steps:
        capture.queue.put(step)
    capture.stop()
    assert capture.status()["shipped_records"] == 2
    # It reached its length limit, but has not been reported as finished yet.
    assert capture.status()["open_requests"] == 1


@pytest.mark.parametrize("stage", ["encode", "spool"])
def test_a_record_that_cannot_be_written_costs_itself_only(tmp_path, monkeypatch, stage):
    """Whatever is raised, also when a failed reduction closes the requests that ended.

    The thread goes on.
    """
    capture = Capture(CaptureConfig(spool=tmp_path, logprobs=K), "boot", "target", "v000001")
    place, name = {"encode": (capture_module, "encode_frame"), "spool": (SpoolWriter, "write")}[
        stage
    ]
    original, failures = getattr(place, name), iter([RuntimeError("cannot"), None])

    def fail_once(*arguments):
        if error := next(failures, None):
            raise error
        return original(*arguments)

    monkeypatch.setattr(place, name, fail_once)
    first, second = (make_info(request_id=name, max_tokens=9) for name in ("cmpl-a", "cmpl-b"))
    capture.start()
    for info in (first, second):
        capture.queue.put(make_step(info, 3, sampled=[7], drafts=[]))
        capture.queue.put(make_step(info, 4, sampled=[8], drafts=[50]))
        capture.queue.put(make_broken_step("cmpl-c", finished=[info.request_id]))
        wanted = capture.counts[f"errors_{stage}"] + capture.counts["shipped_records"] + 1

        def is_done(wanted=wanted):
            return capture.counts[f"errors_{stage}"] + capture.counts["shipped_records"] == wanted

        wait_until(is_done, capture.status)
    capture.stop()
    assert (capture.counts[f"errors_{stage}"], capture.counts["shipped_records"]) == (1, 1)


# --- the engine


@pytest.fixture(scope="module")
def reference(random_target):
    return LlamaForCausalLM.from_pretrained(random_target, dtype=torch.float32).eval()


@torch.no_grad()
def target_log_probs(model, ids_T, temperature=1.0):
    logits_TV = model(input_ids=torch.tensor(np.array(ids_T))[None].long()).logits[0]
    return (logits_TV / temperature).double().log_softmax(-1).numpy()


def make_prompts(count, length, seed):
    return np.random.default_rng(seed).integers(8, 500, (count, length)).tolist()


@pytest.fixture(scope="module")
def greedy(server):
    """Responses to prompts of 20 and of 150 tokens under a half-good draft, and records.

    More than one step reads the longer ones.
    """
    server.swap(server.noisy)
    prompts = [*make_prompts(3, 20, 0), *make_prompts(2, 150, 1)]
    with ThreadPoolExecutor() as pool:
        responses = list(
            pool.map(
                lambda prompt: server.complete(prompt, max_tokens=40, ignore_eos=True), prompts
            )
        )
    return prompts, responses, server.records(responses)


@pytest.fixture(scope="module")
def sampled(server):
    """The same with temperature, top-p and penalties."""
    server.swap(server.noisy)
    parameters = {
        "temperature": 0.7,
        "top_p": 0.9,
        "presence_penalty": 0.5,
        "ignore_eos": True,
        "max_tokens": 40,
    }
    prompts = make_prompts(4, 30, 2)
    with ThreadPoolExecutor() as pool:
        responses = list(pool.map(lambda prompt: server.complete(prompt, **parameters), prompts))
    return prompts, responses, server.records(responses)


def by_request(responses, records):
    return [
        [r for r in records if r.request_id.startswith(response["id"])] for response in responses
    ]


@pytest.mark.vllm
@pytest.mark.parametrize("traffic", ["greedy", "sampled"])
def test_the_captured_distribution_is_the_targets_before_sampling_parameters(
    traffic, request, reference
):
    _, _, records = request.getfixturevalue(traffic)
    num_rows = num_refused = 0
    for record in records:
        sequence = training_sequence(record)
        expected_TV = target_log_probs(reference, sequence.input_ids_T)[sequence.rows_R]
        found_RK = np.take_along_axis(expected_TV, sequence.topk_ids_RK.astype(np.int64), -1)
        np.testing.assert_allclose(sequence.topk_log_probs_RK, found_RK, atol=1e-3)
        largest_RK = -np.sort(-expected_TV, -1)[:, : record.top_k]
        np.testing.assert_allclose(sequence.topk_log_probs_RK, largest_RK, atol=1e-3)
        num_rows += len(sequence.rows_R)
        num_refused += int((record.branches > 0).sum())
    assert num_rows > 100
    assert num_refused > 20, "the draft is too good for this test"


@pytest.mark.vllm
@pytest.mark.parametrize("traffic", ["greedy", "sampled"])
def test_the_record_has_the_text_of_the_response_and_every_token_once(traffic, request):
    prompts, responses, records = request.getfixturevalue(traffic)
    for prompt, response, segments in zip(
        prompts, responses, by_request(responses, records), strict=True
    ):
        output = np.concatenate([record.output_ids for record in segments])
        np.testing.assert_array_equal(output, response["choices"][0]["token_ids"])
        np.testing.assert_array_equal(segments[0].context_ids, prompt)
        labelled = np.concatenate([record.positions[record.branches == 0] for record in segments])
        np.testing.assert_array_equal(labelled, len(prompt) + np.arange(len(output)))


@pytest.mark.vllm
@pytest.mark.parametrize("traffic", ["greedy", "sampled"])
def test_a_draft_token_is_accepted_exactly_where_it_is_the_texts_token(traffic, request):
    _, _, records = request.getfixturevalue(traffic)
    accepted = []
    for record in records:
        text = np.concatenate([record.context_ids, record.output_ids])
        rows = (record.branches == 0) & (record.draft_ids >= 0)
        np.testing.assert_array_equal(
            record.accepted[rows], record.draft_ids[rows] == text[record.positions[rows]]
        )
        assert not record.accepted[~rows].any()
        accepted += record.accepted[rows].tolist()
    assert 0.1 < np.mean(accepted) < 0.95  # both cases occur


@pytest.mark.vllm
def test_the_sampling_parameters_come_with_the_record(sampled):
    assert all(
        record.sampling
        == Sampling(temperature=pytest.approx(0.7), top_p=pytest.approx(0.9), presence_penalty=0.5)
        for record in sampled[2]
    )


@pytest.mark.vllm
def test_above_temperature_zero_a_copy_of_the_target_is_always_accepted_and_its_probability_is_the_targets(
    server, reference
):
    server.swap(server.copy)
    responses = [
        server.complete(prompt, temperature=0.7, ignore_eos=True)
        for prompt in make_prompts(3, 20, 3)
    ]
    records = server.records(responses)
    accepted = np.concatenate([record.accepted[record.draft_ids >= 0] for record in records])
    assert accepted.mean() > 0.99
    for record in records:
        text = training_sequence(record)
        expected_TV = target_log_probs(reference, text.input_ids_T, temperature=0.7)[text.rows_R]
        draft_ids_R = record.draft_ids[record.branches == 0]
        drafted = draft_ids_R >= 0
        expected = expected_TV[np.arange(len(drafted)), draft_ids_R][drafted]
        found = np.log(record.draft_probs[record.branches == 0][drafted])
        np.testing.assert_allclose(found, expected, atol=2e-3)


@pytest.mark.vllm
def test_the_record_ends_at_the_stop_token(server):
    server.swap(server.copy)
    (prompt,) = make_prompts(1, 20, 4)
    free = server.complete(prompt, ignore_eos=True)["choices"][0]["token_ids"]
    response = server.complete(prompt, stop_token_ids=[free[9]], ignore_eos=True)
    (record,) = server.records([response])
    assert response["choices"][0]["finish_reason"] == "stop"
    np.testing.assert_array_equal(record.output_ids, response["choices"][0]["token_ids"])


@pytest.mark.vllm
def test_headers_label_the_record_and_keep_it_out(server):
    prompts = make_prompts(2, 20, 5)
    labels = {"X-Redraft-Tenant": "acme", "X-Redraft-Domain": "code"}
    opted_out = server.status()["capture"].get("skipped_requests_opt_out", 0)
    labelled = server.complete(prompts[0], headers=labels)
    spoofed = server.complete(prompts[0], vllm_xargs={"redraft": "nonsense"})
    refused = server.complete(prompts[1], headers=labels | {"X-Redraft-Opt-Out": "1"})
    later = server.complete(prompts[0], headers={"X-Redraft-Opt-Out": "0"})
    records = server.records([labelled, spoofed, later])
    assert {(r.tenant, r.domain) for r in records if r.request_id.startswith(labelled["id"])} == {
        ("acme", "code")
    }
    assert {r.tenant for r in records if not r.request_id.startswith(labelled["id"])} == {""}
    assert not [r for r in server.all_records() if r.request_id.startswith(refused["id"])]
    assert server.status()["capture"]["skipped_requests_opt_out"] == opted_out + 1


@pytest.mark.vllm
def test_a_chat_requests_arguments_and_its_structured_output_are_in_its_record(server):
    prompt = {"model": "m", "messages": [{"role": "user", "content": "why"}], "max_tokens": 8}
    asked = {
        "chat_template_kwargs": {
            "enable_thinking": False,
            "documents": [{"title": "a", "text": "long"}],
        }
    }
    bound = {"structured_outputs": {"choice": ["yes", "no"]}}
    answers = []
    for more in ({}, asked, bound):
        answer = server.http.post(
            "/v1/chat/completions", json=prompt | more | {"return_token_ids": True}
        )
        assert answer.status_code == 200, answer.text
        answers.append(answer.json())
    found = {
        next(i for i, answer in enumerate(answers) if record.request_id.startswith(answer["id"])): (
            record.template_arguments,
            record.constraints,
        )
        for record in server.records(answers)
    }
    assert found == {
        0: ("", ()),
        1: ('{"enable_thinking": false}', ()),
        2: ("", ("structured_output",)),
    }


PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3}


@pytest.mark.vllm
def test_after_its_penalties_a_record_says_what_the_engine_writes_and_accepts(server):
    """Penalties are exact.

    At temperature 0 the penalised target's best token is the engine's, so drafts are accepted as it
    is drafted.
    """
    server.swap(server.noisy)
    prompts = make_prompts(6, 20, 7)
    with ThreadPoolExecutor() as pool:
        responses = list(
            pool.map(
                lambda p: server.complete(p, max_tokens=40, ignore_eos=True, **PENALTIES), prompts
            )
        )
    records = server.records(responses)
    written, best, plain = [], [], []
    for record in records:
        rows = record.branches == 0
        text = np.concatenate([record.context_ids, record.output_ids])
        written += text[record.positions[rows]].tolist()
        best += penalise(record).topk_ids[rows, 0].tolist()
        plain += record.topk_ids[rows, 0].tolist()
    assert len(written) > 150
    assert np.mean(np.array(plain) != written) > 0.1, "the penalties change a part of the text"
    assert best == written


@pytest.mark.vllm
def test_serving_goes_on_without_a_spool_and_capture_resumes_by_itself(server):
    away = server.spool.with_name("away")
    server.spool.rename(away)
    server.spool.write_text("in the way")
    before = server.status()["capture"].get("dropped_records_spool", 0)
    prompts = make_prompts(2, 20, 7)
    server.complete(prompts[0], ignore_eos=True)
    wait_until(lambda: server.status()["capture"].get("dropped_records_spool", 0) > before)
    server.spool.unlink()
    away.rename(server.spool)
    (record, *_) = server.records([server.complete(prompts[1], ignore_eos=True)])
    assert isinstance(record, Record)


def test_v2_reads_the_probabilities_of_recorded_drafts_only():
    """Two requests of three are recorded.

    The logits of the third are not numbers, and none is read.
    """
    generator = torch.Generator().manual_seed(0)
    num_drafts, vocabulary = [40, 3, 50], 97
    logits_BJV = torch.randn(5, 50, vocabulary, generator=generator)
    slots, temperature_B = [4, 0, 2], torch.tensor([0.0, 9.0, 0.7, 9.0, 1.3])
    logits_BJV[0] = torch.nan
    first_rows = [0, 41, 45]
    slots_R = [
        slot for slot, count in zip(slots, num_drafts, strict=True) for _ in range(count + 1)
    ]
    places_R = [place for count in num_drafts for place in range(count + 1)]
    ids_R = torch.randint(vocabulary, (len(slots_R),), generator=generator)
    batch = SimpleNamespace(
        expanded_idx_mapping=torch.tensor(slots_R),
        expanded_local_pos=torch.tensor(places_R, dtype=torch.int32),
    )
    known = SimpleNamespace(
        infos=["recorded", None, "recorded"],
        first_drafts=[row + 1 for row in first_rows],
        num_drafts=num_drafts,
    )
    states = SimpleNamespace(temperature=SimpleNamespace(gpu=temperature_B))
    runner = SimpleNamespace(
        runner=SimpleNamespace(sampler=SimpleNamespace(sampling_states=states))
    )
    found_R = _Hooks._read_draft_probs(runner, batch, logits_BJV, ids_R, known)
    for row, (slot, place) in enumerate(zip(slots_R, places_R, strict=True)):
        if slot == 0 or place == 0:
            assert found_R[row] == 0
        else:
            warmth = float(temperature_B[slot]) or 1.0
            expected = (logits_BJV[slot, place - 1].double() / warmth).softmax(0)[ids_R[row]]
            assert float(found_R[row]) == pytest.approx(float(expected), rel=1e-5)
