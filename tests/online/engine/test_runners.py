"""vLLM's two model runners give the same records, bit for bit.

V2 runs here in Triton's interpreter.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from run_runners import run_capture
from transformers import LlamaForCausalLM

from redraft.engine.hooks import RunnerState
from redraft.engine.lookup_first import HeadLimits, mix
from redraft.engine.lookups import lookup_env
from redraft.engine.server import vllm_keys
from redraft.engine.settings import write_settings
from redraft.eval.forecast.ngram import Ngram
from redraft.heads.families.eagle3 import Config, Eagle3
from redraft.heads.target import Target
from redraft.online.engine import runner_v1, runner_v2
from redraft.online.engine.config import TABLE, make_table
from redraft.online.engine.domains import StepNotes
from redraft.online.engine.runners import describe_runner, find_runner, install_capture
from redraft.online.learning.intake import count_acceptance
from redraft.online.learning.replay import training_sequence
from redraft.online.records.record import LOOKUP, PADDING, Record

# --- which runner, and why


@pytest.mark.parametrize(
    ("version", "changes", "variables", "told"),
    [
        ("v2", {}, {}, "V2 model runner"),
        ("v1", {"method": "medusa"}, {}, "V1 model runner: only this runner serves Medusa"),
        (
            "v1",
            {"method": "suffix"},
            {},
            "V1 model runner: only this runner serves suffix decoding",
        ),
        (
            "v1",
            {"parallel_drafting": True},
            {},
            "V1 model runner: only this runner serves drafts that propose in parallel",
        ),
        (
            "v1",
            {"method": "dflash", "parallel_drafting": True},
            {},
            "V1 model runner: chosen by vLLM",
        ),
        (
            "v1",
            {"use_heterogeneous_vocab": True},
            {},
            "V1 model runner: only this runner serves drafts whose vocab",
        ),
        (
            "v1",
            {},
            {"VLLM_USE_V2_MODEL_RUNNER": "0"},
            "V1 model runner: VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        ("v1", {}, {}, "V1 model runner: chosen by vLLM"),
        (None, {}, {}, "unknown model runner"),
    ],
)
def test_the_reason_for_a_runner_is_told_in_a_line(version, changes, variables, told):
    fields = {"method": "draft_model", "parallel_drafting": False, "use_heterogeneous_vocab": False}
    config = SimpleNamespace(speculative_config=SimpleNamespace(**fields | changes))
    assert describe_runner(version, config, variables).startswith(told)


def test_a_runner_of_another_name_is_not_recorded():
    class GPUModelRunner:
        pass

    assert find_runner(GPUModelRunner()) is None
    with pytest.raises(ValueError, match=r"V1.*V2"):
        install_capture(GPUModelRunner(), None)


@pytest.mark.parametrize("part", ["batch_sharder", "pcp_manager"])
def test_batches_that_v2_arranges_on_the_device_are_not_recorded(part):
    parts = {"batch_sharder": None, "pcp_manager": None} | {part: object()}
    with pytest.raises(ValueError, match="recorded"):
        runner_v2.install_capture(SimpleNamespace(**parts), None)


def test_v2_hidden_states_are_those_of_real_steps_however_vllm_calls():
    """Its start-up runs pass arguments by keyword, its steps by position."""
    proposed, put = [], []
    hooks = runner_v2._Hooks.__new__(runner_v2._Hooks)
    hooks._propose, hooks.feed = (
        lambda *args, **options: proposed.append((args, options)),
        SimpleNamespace(),
    )
    hooks.feed.put_states = put.append
    hooks.capture = SimpleNamespace(
        reporting=lambda stage: nullcontext()
    )  # an exception ends the test
    hooks.propose(
        input_batch="batch", last_hidden_states="last", aux_hidden_states=["one"], dummy_run=True
    )
    assert put == []
    step = ("batch", "attention", "slots", "last", ["one", "two"], "sampled")
    hooks.propose(*step, num_speculative_tokens=2)
    hooks.propose(*step[:4], None, num_speculative_tokens=0)
    assert put == [["one", "two"], ["last"]]
    assert [len(args) for args, _ in proposed] == [0, 6, 5]


class Runner:
    """The part of vLLM's V1 runner in which draft tokens are verified and proposed."""

    def __init__(self, method="eagle3"):
        self.input_batch, self.speculative_config = (
            SimpleNamespace(req_ids=[]),
            SimpleNamespace(method=method),
        )
        self.requests = dict.fromkeys("abcd")
        self.execute_model_state = None
        self.redraft = RunnerState()
        self.redraft.lookup = SimpleNamespace(looked_up=frozenset(), skip=lambda: None)

    def propose_draft_token_ids(self):
        return None

    def sample_tokens(self, proposes):
        if proposes:
            self.propose_draft_token_ids()
        return SimpleNamespace()

    def step(self, requests, *, looked_up="", proposes=True):
        """The requests whose drafts this step's output names as another proposer's."""
        self.input_batch.req_ids, self.redraft.lookup.looked_up = (
            list(requests),
            frozenset(looked_up),
        )
        return "".join(
            sorted(getattr(self.sample_tokens(proposes), "redraft", StepNotes()).foreign)
        )


def test_drafts_of_lookups_and_padding_are_named_when_they_are_verified():
    runner = Runner()
    runner_v1.install_proposers(runner)
    assert runner.step("abc", looked_up="b") == ""
    assert runner.redraft.proposers.foreign == {"b": LOOKUP}
    assert runner.step("ac", proposes=False) == "b", "b waits, and a name too many counts nothing"
    assert runner.redraft.proposers.foreign == {"a": PADDING, "b": LOOKUP, "c": PADDING}
    del runner.requests["c"]
    assert runner.step("ab") == "abc"
    assert runner.redraft.proposers.foreign == {}
    assert runner.step("ab") == ""


def test_a_server_without_a_draft_model_counts_no_draft_as_one_of_a_version():
    runner = Runner("suffix")
    runner_v1.install_proposers(runner)
    runner.step("a")
    assert runner.redraft.proposers.foreign == {"a": LOOKUP}


def test_a_wrapped_output_names_them_too():
    runner = Runner()
    inner = SimpleNamespace()
    runner.sample_tokens = lambda: SimpleNamespace(_model_runner_output=inner)
    runner_v1.install_proposers(runner)
    runner.redraft.proposers.foreign = {"a": LOOKUP}
    runner.sample_tokens()
    assert inner.redraft.foreign == {"a"}


def test_drafts_of_a_request_that_joins_are_padding():
    runner = Runner()
    runner_v1.install_proposers(runner)
    runner.step("a")
    drafts = {
        name: [-1, -1] for name in "abd"
    }  # "c" has none; of "a" the scheduler does not know them yet
    scheduled = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in "bc"],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={"d"}),
        scheduled_spec_decode_tokens=drafts,
    )
    runner.execute_model_state = SimpleNamespace(scheduler_output=scheduled)
    assert runner.step("abcd") == "bd"
    runner.execute_model_state = None
    assert runner.step("abcd") == ""


# --- the engine


def strip(record):
    """A record's content, without what differs from run to run.

    VLLM appends a random part to a request's id.
    """
    request = record.request_id.rpartition("-")[0]
    return msgspec.structs.replace(record, time_s=0.0, server_id="", request_id=request)


def by_request(records):
    return sorted(map(strip, records), key=lambda record: (record.request_id, record.sequence))


def list_differences(first, second):
    """The fields in which two lists of records differ, for a message that can be read."""
    if len(first) != len(second):
        return [f"{len(first)} and {len(second)} records"]
    names = msgspec.structs.fields(Record)
    return [
        (one.request_id, field.name)
        for one, other in zip(first, second, strict=True)
        for field in names
        if getattr(one, field.name) != getattr(other, field.name)
    ]


@pytest.fixture(scope="module")
def drafts(random_target, served_pair, tmp_path_factory):
    """By vLLM's method: a target and a draft."""
    folder = tmp_path_factory.mktemp("head")
    torch.manual_seed(0)
    Eagle3(Config(aux_layer_ids=(0, 1, 2)), Target.from_folder(random_target)).export(folder)
    return {"draft_model": served_pair, "eagle3": (random_target, folder)}


def make_prompts(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(8, 500, length).tolist() for length in lengths]


CASES = {
    "plain": {},
    "prompts in chunks": {"prompts": make_prompts(150, 20, 33)},
    # Of 129 tokens, 128 are cached: vLLM pads the draft of a request that joins with one token to
    # read. Beside heads it reads the last cached block again, so there is none.
    "cached prompts": {"prompts": [make_prompts(150)[0][:129], *make_prompts(150)]},
    "a seed without sampling, penalties, logprobs, stop tokens": {
        "prompts": make_prompts(20, 12, 33, seed=1),
        "sampling": [
            {"seed": 3, "repetition_penalty": 1.3},
            {"presence_penalty": 0.7, "logprobs": 3},
            {"stop_token_ids": list(range(8, 60)), "max_tokens": 40},
        ],
    },
    "n = 2": {"prompts": make_prompts(16, seed=2), "sampling": [{"n": 2, "temperature": 0.01}]},
    "an abort": {
        "prompts": make_prompts(20, 12, seed=3),
        "sampling": [{"max_tokens": 60}] * 2,
        "aborted": [1],
    },
    "more requests than run at once": {"prompts": make_prompts(*range(10, 16), seed=4)},
}
"""Rounds of one engine, at temperature 0 unless they set another; with `plain` the prompts are
PLAIN.
"""

PLAIN = make_prompts(20, 12, 33, seed=5)

PAIRS = [
    pytest.param(("eagle3", True), id="eagle3-async", marks=pytest.mark.slow),
    pytest.param(("eagle3", False), id="eagle3-sync", marks=pytest.mark.slow),
    pytest.param(("draft_model", True), id="draft_model-async", marks=pytest.mark.slow),
    pytest.param(("draft_model", False), id="draft_model-sync", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=PAIRS)
def both(request, drafts, tmp_path_factory):
    """Answers, counters and records of both runners for all cases: V1's, then V2's."""
    method, schedules_ahead = request.param
    target, draft = drafts[method]
    spec = {
        "target": str(target),
        "draft": str(draft),
        "method": method,
        "engine": {"async_scheduling": schedules_ahead},
        "rounds": [{"prompts": PLAIN} | case for case in CASES.values()],
    }
    folder = tmp_path_factory.mktemp("spools")
    return [
        run_capture(runner, folder / runner, schedules_ahead, **spec) for runner in ("v1", "v2")
    ]


@pytest.mark.vllm
@pytest.mark.parametrize("case", CASES)
def test_both_runners_give_the_same_records(both, case, request):
    number = list(CASES).index(case)
    answers, records = [], []
    for all_answers, _, all_records in both:
        answers.append(all_answers[number])
        records.append(
            by_request(record for record in all_records if f"round{number}-" in record.request_id)
        )
    assert answers[0] == answers[1]
    assert list_differences(*records) == []
    assert sum(len(record.positions) for record in records[0]) > 20
    assert all(record.hidden for record in records[0])
    is_padded = any(PADDING in record.row_proposers for record in records[0])
    method, _ = request.node.callspec.params["both"]
    assert is_padded is (case == "cached prompts" and method == "draft_model")


@pytest.mark.vllm
def test_both_runners_count_the_same(both):
    is_of_time = {"shipped_bytes", "spool_files"}  # when a file is cut, and how well it compresses
    first, second = [
        {name: counts[name] for name in counts.keys() - is_of_time} for _, counts, _ in both
    ]
    assert first == second
    assert (
        first["captured_requests"]
        == sum(len(case.get("prompts", PLAIN)) for case in CASES.values()) + 1
    )


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "schedules_ahead"), [("eagle3", True), ("eagle3", False), ("draft_model", False)]
)
def test_preempted_requests_give_the_same_records(drafts, tmp_path, method, schedules_ahead):
    """Four answers want 20 blocks of the 14 there are.

    A request loses its keys, and is computed again later.
    """
    target, draft = drafts[method]
    prompts = make_prompts(60, 61, 62, 63, seed=6)
    spec = {
        "target": str(target),
        "draft": str(draft),
        "method": method,
        "engine": {"async_scheduling": schedules_ahead, "num_gpu_blocks_override": 14},
        "rounds": [{"prompts": prompts, "sampling": [{"max_tokens": 80}] * 4}],
    }
    runs = [
        run_capture(runner, tmp_path / runner, schedules_ahead, preempts=True, **spec)
        for runner in ("v1", "v2")
    ]
    assert runs[0][0] == runs[1][0]
    first, second = [by_request(records) for _, _, records in runs]
    assert list_differences(first, second) == []
    texts = {record.request_id: training_sequence(record).input_ids_T.tolist() for record in first}
    wanted = [prompt + answer for prompt, (answer,) in zip(prompts, runs[0][0][0], strict=True)]
    assert sorted(texts.values()) == sorted(wanted)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_sampled_drafts_are_recorded_with_their_probability(
    runner, random_target, registry, tmp_path
):
    """With a copy of the target as draft it is the target's; at temperature 0 it is 1."""
    asked = {
        "prompts": make_prompts(20, 12, 33),
        "sampling": [{"temperature": 0.7, "seed": 5}] * 2 + [{}],
    }
    spec = {
        "target": str(random_target),
        "draft": str(registry / "v000002"),
        "method": "draft_model",
    }
    spec |= {"speculative": {"draft_sample_method": "probabilistic"}, "rounds": [asked]}
    _, _, records = run_capture(runner, tmp_path / "spool", **spec)
    model = LlamaForCausalLM.from_pretrained(random_target, dtype=torch.float32).eval()
    temperatures = []
    for record in records:
        text = training_sequence(record)
        assert not record.branches.any(), "a draft token of a copy was rejected"
        logits_TV = model(torch.tensor(text.input_ids_T)[None].long()).logits[0].detach().double()
        drafted = record.draft_ids >= 0
        assert record.accepted[drafted].all()
        found_R = np.log(record.draft_probs[drafted])
        temperature = record.sampling.temperature
        log_probs_TV = (
            (logits_TV / temperature).log_softmax(-1).numpy()
            if temperature
            else np.zeros_like(logits_TV)
        )
        wanted_R = log_probs_TV[text.rows_R[drafted], record.draft_ids[drafted]]
        np.testing.assert_allclose(found_R, wanted_R, atol=2e-3)
        assert drafted.sum() > 8
        temperatures.append(temperature)
    assert sorted(temperatures) == pytest.approx([0, 0.7, 0.7])


@pytest.mark.vllm
@pytest.mark.slow
def test_ngrams_before_a_head_change_no_answer_and_no_text_of_a_record(drafts, tmp_path):
    target, head = drafts["eagle3"]
    alone = {"model": str(head), "method": "eagle3"}
    mixed = mix(Ngram(min=1, max=3).speculative_config, alone, HeadLimits())
    spec = {"target": str(target), "draft": str(head), "method": "eagle3"}
    spec["rounds"] = [{"prompts": PLAIN} | case for case in CASES.values()]
    runs = [
        run_capture(
            "v1",
            tmp_path / name,
            speculative=vllm_keys(config),
            more_env=lookup_env(config),
            **spec,
        )
        for name, config in (("alone", alone), ("mixed", mixed))
    ]
    assert runs[0][0] == runs[1][0]
    texts, drafts = [], []
    for _, counts, records in runs:
        records = by_request(records)
        texts.append([(r.request_id, training_sequence(r).input_ids_T.tolist()) for r in records])
        assert all(record.hidden for record in records)
        own = [count_acceptance(record).num_drafts for record in records]
        assert sum(own) == counts["counted_drafts"], (
            "the scheduler counts the head's drafts only, as records do"
        )
        # Each ends with a row without a draft token, and so does the prefill.
        all_drafts = [int((record.draft_ids == -1).sum()) - 1 for record in records]
        assert (sum(own) < sum(all_drafts)) is (len(drafts) == 1), "only beside lookups"
        drafts.append([record.draft_ids.tolist() for record in records])
    assert texts[0] == texts[1]
    assert sum(one != other for one, other in zip(*drafts, strict=True)) > 8, (
        "n-grams drafted in most answers"
    )


# --- a number of draft tokens that changes


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("runner", "schedules_ahead"), [("v1", True), ("v1", False), ("v2", True), ("v2", False)]
)
def test_the_number_changes_live_and_at_0_the_draft_reads_prompts_alone(
    drafts, tmp_path, runner, schedules_ahead
):
    target, draft = drafts["eagle3"]
    asked = {"prompts": PLAIN, "sampling": [{"max_tokens": 40}] * 3}
    spec = {
        "target": str(target),
        "draft": str(draft),
        "method": "eagle3",
        "engine": {"async_scheduling": schedules_ahead},
        "speculative": {TABLE: make_table(3)},
        "rounds": [asked | {"pace": pace} for pace in ("0", "3", "1", "auto")],
    }
    answers, told, records = run_capture(
        runner, tmp_path, schedules_ahead, write_settings({"pace": "auto"}), **spec
    )
    off, most, one, auto = told["seen"]
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    for prompt, found in zip(PLAIN, zip(*answers, strict=True), strict=True):
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=-1
        )
        assert found == ([ids[0, len(prompt) :].tolist()],) * 4, "the text is the target's"
    assert [off["numbers"], most["numbers"], one["numbers"]] == [[0], [3], [1]]
    assert off["calls"] <= 3 < 10 < most["calls"]
    assert 0 in auto["numbers"]
    assert next(row["steps"] for row in told["pace"]["cells"] if row["requests"] == 3) > 10
    # A step without a draft is recorded like any other: distribution and hidden states of each
    # token.
    by_request = {record.request_id.rpartition("-")[0]: record for record in records}
    for number in range(3):
        bare, drafted = (by_request[f"round{pace}-{number}"] for pace in (0, 1))
        assert (bare.draft_ids == -1).all()
        assert count_acceptance(bare).num_drafts == 0 < count_acceptance(drafted).num_drafts
        np.testing.assert_array_equal(bare.positions, len(PLAIN[number]) + np.arange(40))
        of_text = drafted.branches == 0
        np.testing.assert_array_equal(drafted.positions[of_text], bare.positions)
        np.testing.assert_allclose(bare.topk_log_probs, drafted.topk_log_probs[of_text], atol=1e-3)
        states = [training_sequence(record).hidden_HLD for record in (bare, drafted)]
        assert len(states[0]) == len(states[1]) == len(PLAIN[number]) + 39
