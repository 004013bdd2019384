"""Agentic sessions: regenerated past their tool results, and learned by the server's token ids."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from teachers import Reply
from test_regenerate import contents, make_conversation, make_endpoint, serving
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from redraft.distill.data.conversations import load_conversations, read_conversation
from redraft.distill.data.packing import PackedDataset
from redraft.distill.data.rows import UnusableRowError
from redraft.distill.data.samples import Sample, build_samples
from redraft.distill.data.sessions import (
    TokenTurn,
    expand_turns,
    fit_results,
    pack_turns,
    read_turns,
)
from redraft.distill.run.inputs import live_signal
from redraft.distill.signal.endpoint import Endpoint
from redraft.distill.signal.features import EndpointHiddenStates, load_skeleton, server_args
from redraft.distill.signal.features_store import (
    Storage,
    name_states,
    write_states,
)
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.signal.storage import StatesLostError
from redraft.distill.signal.target_answers import Sampling, regenerate
from redraft.distill.train.run_config import Signal
from redraft.engine.server import vllm_server
from redraft.files.checkpoint import load_tokenizer
from redraft.files.target_folder import TargetFolder
from redraft.heads.draft import Batch, final_hidden, label_rows
from redraft.heads.target import LoadedTarget
from redraft.recipes.data import regenerate as recipe

TINY_TARGET = "tests/assets/tiny-target"
TOOLS = [{"type": "function", "function": {"name": "add", "description": None, "parameters": None}}]
STEPS = 3


def make_call(number: int, name: str = "data") -> dict[str, Any]:
    function = {"name": "add", "arguments": {"n": number}}
    return {"id": f"{name}-{number}", "type": "function", "function": function}


def make_session(**changes: Any) -> dict[str, Any]:
    """A question, then calls with a result each, and an answer. `changes` by place of the message."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "sum"}]
    for number in range(STEPS):
        call = make_call(number)
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": f"={number}", "tool_call_id": call["id"]})
    messages.append({"role": "assistant", "content": "old"})
    for place, message in changes.items():
        messages[int(place.removeprefix("at_"))] |= message
    return {"messages": messages, "domain": "agents", "tools": TOOLS}


class Target:
    """Calls `add` with the number of results so far, STEPS times, then says "done".

    It writes its answers in tokens that its tokenizer would not choose: letter by letter.
    """

    def __init__(self) -> None:
        self.tokenizer = load_tokenizer(TINY_TARGET)
        self.ids: list[tuple[list[int], list[int]]] = []

    def __call__(self, request: dict[str, Any]) -> Reply:
        results = [m for m in request["messages"] if m["role"] == "tool"]
        number = len(results)
        call = make_call(number, "target")
        function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}
        message: dict[str, Any] = {"role": "assistant", "content": "done"}
        if number < STEPS:
            said = {"content": "let us add", "tool_calls": [{**call, "function": function}]}
            message = {"role": "assistant", **said}
        text = message["content"] + (json.dumps(function) if number < STEPS else "")
        answer = [i for letter in text for i in self.tokenizer(letter)["input_ids"]]
        answer.append(self.tokenizer.convert_tokens_to_ids("<|end|>"))
        prompt = self.tokenizer.apply_chat_template(
            request["messages"], add_generation_prompt=True, return_dict=False
        )
        assert request["return_token_ids"] is True
        self.ids.append((prompt, answer))
        choice = {"message": message, "finish_reason": "stop", "token_ids": answer}
        return 200, {"choices": [choice], "prompt_token_ids": prompt}


def answer_session(
    conversation: dict[str, Any], output: Path, target: Callable[[dict[str, Any]], Reply]
) -> tuple[Any, list[dict[str, Any]]]:
    with serving(target) as (url, requests):
        stats = regenerate([conversation], make_endpoint(url), output, Sampling())
    return stats, requests


def test_an_agentic_session_is_answered_past_three_tool_results_token_by_token(
    tmp_path: Path,
) -> None:
    output, target = tmp_path / "answers.jsonl", Target()
    stats, requests = answer_session(make_session(), output, target)
    assert (stats.done, len(requests), sum(stats.departed.values())) == (1, STEPS + 1, 0)
    # The results are the data's, and name the target's calls.
    results = [m for m in requests[-1]["messages"] if m["role"] == "tool"]
    assert [(r["content"], r["tool_call_id"]) for r in results] == [
        (f"={number}", f"target-{number}") for number in range(STEPS)
    ]
    (conversation,) = load_conversations(str(output))
    assert [(p.tolist(), a.tolist()) for p, a in expand_turns(conversation["turns"])] == target.ids
    samples, stats = build_samples(
        [conversation], target.tokenizer, max_length=1024, progress=False
    )
    # Each label is a token that the target wrote, where it wrote it.
    learned = [sample.input_ids[sample.loss_mask].tolist() for sample in samples]
    assert [i for ids in learned for i in ids] == [i for _, answer in target.ids for i in answer]
    assert (stats.exact, stats.labels) == (STEPS + 1, sum(len(a) for _, a in target.ids))
    assert set(stats.ends) == {"<|end|>"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"at_3": {"tool_calls": [make_call(7)]}}, "a different call"),
        ({"at_3": {"tool_calls": [make_call(1), make_call(2)]}}, "a different call"),
        ({"at_3": {"tool_calls": []}}, "the data does not"),
        ({"at_4": {"role": "user"}}, "no result for a call"),
        ({"at_5": {"role": "tool"}}, "result without a call"),
    ],
)
def test_an_agentic_session_ends_where_the_target_departs_from_the_data(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    output = tmp_path / "answers.jsonl"
    stats, _ = answer_session(make_session(**changes), output, Target())
    (conversation,) = load_conversations(str(output))
    assert [m["role"] for m in conversation["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert len(conversation["turns"]) == 2
    ((why, count),) = stats.departed.items()
    assert (reason in why, count) == (True, 1)
    assert f"1 end {why}" in str(stats)


def test_an_agentic_result_without_a_call_ends_the_session(tmp_path: Path) -> None:
    result = {"role": "tool", "content": "=1"}
    session = make_conversation("a", "old", "b")
    session["messages"].insert(3, result)
    with serving() as (url, requests):
        output = tmp_path / "answers.jsonl"
        stats = regenerate([session], make_endpoint(url), output, Sampling())
    assert (len(requests), [*stats.departed.values()]) == (1, [1])
    assert contents(output) == {("a", "a! (1)", "b")}


def test_agentic_results_of_parallel_calls_follow_the_names_of_the_calls() -> None:
    ours = {"role": "assistant", "content": "", "tool_calls": [make_call(n, "t") for n in (1, 2)]}
    theirs = {**ours, "tool_calls": [make_call(n) for n in (1, 2)]}
    results = [
        {"role": "tool", "content": str(n), "tool_call_id": f"data-{n}", "name": "add"}
        for n in (2, 1)
    ]
    fitted = fit_results(ours, theirs, results)
    assert [(r["content"], r["tool_call_id"]) for r in fitted if isinstance(r, dict)] == [
        ("1", "t-1"),
        ("2", "t-2"),
    ]


def test_a_server_without_token_ids_is_asked_without_them(tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"

    def strict(request: dict[str, Any]) -> Reply:
        if "return_token_ids" in request:
            return 400, {"error": {"message": "Unrecognized argument: return_token_ids"}}
        return 200, {"choices": [{"message": {"content": "so"}, "finish_reason": "stop"}]}

    stats, _ = answer_session(make_conversation("a", "old", "b"), output, strict)
    assert (stats.done, stats.refused, stats.without_ids) == (1, 0, 1)
    assert contents(output) == {("a", "so", "b", "so")}
    assert "turns" not in load_conversations(str(output))[0]


def test_token_ids_of_another_tokenizer_are_not_learned(tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    answer_session(make_session(), output, Target())
    row = json.loads(output.read_text())
    for turn in row["token_ids"]:
        turn["answer"] = [i + 1 for i in turn["answer"]]
    output.write_text(json.dumps(row) + "\n")
    tokenizer = load_tokenizer(TINY_TARGET)
    conversations = load_conversations(str(output))
    _, stats = build_samples(conversations, tokenizer, max_length=1024, progress=False)
    assert (stats.foreign_ids, stats.exact) == (1, 0)


def test_token_ids_after_unused_ones_are_learned(tmp_path: Path) -> None:
    """Of a tokenizer with fewer tokens than its largest id, as tiktoken's vocabularies have."""
    output, target = tmp_path / "answers.jsonl", Target()
    written = json.loads(target.tokenizer.backend_tokenizer.to_str())
    moved = len(target.tokenizer) + 7
    written["model"]["vocab"]["<|end|>"] = moved
    for token in written["added_tokens"]:
        token["id"] = moved if token["content"] == "<|end|>" else token["id"]
    target.tokenizer._tokenizer = Tokenizer.from_str(json.dumps(written))
    assert target.tokenizer.convert_tokens_to_ids("<|end|>") == moved > len(target.tokenizer)
    answer_session(make_session(), output, target)
    _, stats = build_samples(
        load_conversations(str(output)), target.tokenizer, max_length=1024, progress=False
    )
    assert (stats.foreign_ids, stats.exact) == (0, STEPS + 1)


def test_special_tokens_that_a_server_leaves_out_of_the_text_are_learned(tmp_path: Path) -> None:
    output, tokenizer = tmp_path / "answers.jsonl", load_tokenizer(TINY_TARGET)
    prompt = tokenizer("<|user|>why<|assistant|>", add_special_tokens=False)["input_ids"]
    written = tokenizer("so<|system|>it is<|end|>", add_special_tokens=False)["input_ids"]

    def reply(_: dict[str, Any]) -> Reply:
        message = {"role": "assistant", "content": "soit is"}
        choice = {"message": message, "finish_reason": "stop", "token_ids": written}
        return 200, {"choices": [choice], "prompt_token_ids": prompt}

    answer_session(make_conversation("why"), output, reply)
    (sample,), stats = build_samples(
        load_conversations(str(output)), tokenizer, max_length=99, progress=False
    )
    assert (stats.exact, stats.foreign_ids) == (1, 0)
    assert sample.input_ids[sample.loss_mask].tolist() == written


def test_an_answer_with_token_ids_that_the_data_excludes_is_not_learned(tmp_path: Path) -> None:
    output, target = tmp_path / "answers.jsonl", Target()
    answer_session(make_session(), output, target)
    row = json.loads(output.read_text())
    row["messages"][1]["weight"] = 0
    output.write_text(json.dumps(row) + "\n")
    samples, stats = build_samples(
        load_conversations(str(output)), target.tokenizer, max_length=1024, progress=False
    )
    learned = [sample.input_ids[sample.loss_mask].tolist() for sample in samples]
    assert [i for ids in learned for i in ids] == [i for _, ids in target.ids[1:] for i in ids]
    assert (stats.exact, stats.refused_answers.total()) == (STEPS, 1)


def test_speculators_rows_are_learned_by_their_ids_and_each_answer_once(tmp_path: Path) -> None:
    tokenizer, source = load_tokenizer(TINY_TARGET), tmp_path / "speculators.jsonl"
    messages: list[dict[str, Any]] = [{"role": "user", "content": "sum"}]
    rows, wanted = [], []
    for number, said in enumerate(("one", "two")):
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        # The thought is only in the ids.
        answer = tokenizer(f"hm {said}", add_special_tokens=False)["input_ids"]
        messages += [{"role": "assistant", "content": said}]
        rows.append(
            {
                "id": f"0_gen{number}",
                "input_ids": [*prompt, *answer],
                "loss_mask": [0] * len(prompt) + [1] * len(answer),
                "conversations": [*messages],
                "metadata": {"finish_reason": "length"},
            }
        )
        wanted.append(answer)
        messages += [{"role": "user", "content": "more"}]

    def learn(**changes: Any) -> tuple[list[list[int]], Any]:
        source.write_text("".join(json.dumps(row | changes) + "\n" for row in rows))
        conversations = load_conversations(str(source))
        samples, stats = build_samples(conversations, tokenizer, max_length=99, progress=False)
        return sorted(s.input_ids[s.loss_mask].tolist() for s in samples), stats

    learned, stats = learn()
    assert (learned, stats.exact) == (sorted(wanted), 2)
    # Ids of another tokenizer: the text is learned, still once, and without an end of turn.
    for row in rows:
        row["input_ids"] = [token + 1 for token in row["input_ids"]]
    learned, stats = learn()
    assert stats.foreign_ids == 2
    assert sorted(map(tokenizer.decode, learned)) == ["one", "two"]
    # A mask that does not fit is not read.
    learned, _ = learn(loss_mask=[1])
    assert sorted(map(tokenizer.decode, learned)) == ["one", "one<|end|>two"]


def test_packed_turns_are_the_turns_and_share_no_text() -> None:
    rng = np.random.default_rng(0)
    turns, text = [], np.zeros(0, np.int32)
    for number in range(50):
        prompt = np.concatenate([text, rng.integers(0, 99, 20).astype(np.int32)])
        if number == 30:  # an earlier turn is rewritten
            prompt[100] += 1
        answer = rng.integers(0, 99, 10).astype(np.int32)
        turns.append(TokenTurn(prompt, answer))
        text = np.concatenate([prompt, answer])
    packed = pack_turns(turns)
    for (prompt, answer), ours in zip(expand_turns(read_turns(packed)), turns, strict=True):
        np.testing.assert_array_equal(prompt, ours.prompt_P)
        np.testing.assert_array_equal(answer, ours.answer_A)
    num_ids = sum(len(turn["prompt"]) + len(turn["answer"]) for turn in packed)
    assert num_ids == 50 * 30 + (30 * 30 - 100)


@pytest.mark.parametrize(
    "damage",
    [{"kept": 1}, {"kept": -1}, {"prompt": [1.5]}, {"answer": "12"}, {"prompt": [-1]}],
)
def test_damaged_token_ids_are_refused(damage: dict[str, Any]) -> None:
    (packed,) = pack_turns([TokenTurn(np.array([1, 2], np.int32), np.array([3], np.int32))])
    with pytest.raises(UnusableRowError, match="token ids"):
        read_turns([packed | damage])


def test_tools_without_a_parser_are_refused_before_the_server_starts(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps(make_session()) + "\n")
    config = recipe.RegenerateConfig(
        prompts=str(prompts), output=tmp_path / "answers.jsonl", target=TINY_TARGET
    )
    with pytest.raises(ValueError, match=r"1 of 1 conversations have tools.*--tool-call-parser"):
        recipe.main(config)


class StatesTarget:
    """Answers in sessions that only grow, and writes the states of all tokens that it has read."""

    def __init__(self, storage: str, *, breaks: bool = False) -> None:
        self.storage, self.breaks = storage, breaks
        self.text: list[int] = []

    def __call__(self, request: dict[str, Any]) -> Reply:
        assert request["kv_transfer_params"] == {"include_output_tokens": True}
        number = sum(m["role"] == "tool" for m in request["messages"])
        prompt = [*self.text, 100 + number, 7, 8]
        answer = [20 + number, 30 + number, 2]
        self.text = [*prompt, *answer]
        url = f"{self.storage}/cmpl-{number}"
        write_states(url, make_states(self.text[: 3 if self.breaks else -1]), (1, 2))
        call = make_call(number, "target")
        function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}
        calls = {"tool_calls": [{**call, "function": function}]} if number < STEPS else {}
        message = {"role": "assistant", "content": "so", **calls}
        choice = {"message": message, "finish_reason": "stop", "token_ids": answer}
        states = {"kv_transfer_params": {"hidden_states": url}}
        return 200, {"choices": [choice], "prompt_token_ids": prompt, **states}


def make_states(token_ids: list[int]) -> torch.Tensor:
    """[T, L, D], each state a function of the tokens so far."""
    sums_T = torch.tensor(token_ids, dtype=torch.float32).cumsum(0)
    return sums_T[:, None, None] + torch.arange(8.0).view(2, 4)


def keep_states(folder: Path, **manners: bool) -> tuple[Any, StatesTarget, Storage]:
    target = StatesTarget(str(folder / "server"), **manners)
    kept = Storage(str(folder / "kept"))
    with serving(target) as (url, _):
        endpoint, output = make_endpoint(url), folder / "answers.jsonl"
        states = (Storage(target.storage), kept)
        stats = regenerate([make_session()], endpoint, output, Sampling(), states=states)
    return stats, target, kept


def test_an_agentic_sessions_states_are_kept_once_and_read_without_a_server(tmp_path: Path) -> None:
    stats, target, kept = keep_states(tmp_path)
    text = target.text
    # Of 4 turns, the states of the last hold all others: 23 tokens, and not 5 + 11 + 17 + 23.
    assert (stats.tokens_kept, stats.states_lost, len(text)) == (23, 0, 24)
    assert sorted(path.suffix for path in (tmp_path / "kept").iterdir()) == [".bin", ".json"]
    assert not list((tmp_path / "server").iterdir())
    found = torch.zeros(23, 2, 4)

    def use(first: int, states_tLD: torch.Tensor, layers: Sequence[int]) -> None:
        found[first : first + len(states_tLD)] = states_tLD
        assert list(layers) == [1, 2]

    for _ in range(2):  # they stay
        description = kept.read(text[:-1], use)
        assert description is not None
        assert torch.equal(found, make_states(text[:-1]))
    assert kept.read(text[:-2], use) is None
    # A damaged or truncated file is found, and not used.
    (bits,) = (tmp_path / "kept").glob("*.bin")
    bits.write_bytes(bytes(len(bits.read_bytes())))
    with pytest.raises(StatesLostError, match="CRC-32"):
        kept.read(text[:-1], use)
    bits.write_bytes(bits.read_bytes()[:-1])
    with pytest.raises(StatesLostError, match=f"{bits}.*truncated"):
        kept.read(text[:-1], use)
    bits.unlink()
    with pytest.raises(StatesLostError, match=f"{bits}.*No such file"):
        kept.read(text[:-1], use)


def test_states_of_another_number_of_tokens_are_counted_and_not_kept(tmp_path: Path) -> None:
    stats, _, _ = keep_states(tmp_path, breaks=True)
    assert (stats.done, stats.tokens_kept, stats.states_lost) == (1, 0, STEPS + 1)
    assert "the states of 4 answers were lost" in str(stats)
    assert not list((tmp_path / "kept").iterdir())


def test_a_server_that_sends_no_states_to_keep_is_named(tmp_path: Path) -> None:
    states = (Storage(str(tmp_path / "server")), Storage(str(tmp_path / "kept")))
    with serving() as (url, _), pytest.raises(ConnectionError, match=f"{url} .*serve-features"):
        regenerate(
            [make_conversation("a")], make_endpoint(url), tmp_path / "a", Sampling(), states=states
        )


def test_states_are_kept_from_a_server_of_hidden_states_only(tmp_path: Path) -> None:
    config = recipe.RegenerateConfig(
        prompts="stdlib-functions",
        output=tmp_path / "a.jsonl",
        target=TINY_TARGET,
        keep_states=str(tmp_path),
    )
    with pytest.raises(ValueError, match=r"--keep-states.*serve-features"):
        recipe.main(config)


def test_a_batch_is_read_from_kept_states_and_the_server_is_asked_for_the_rest(
    random_target: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_target, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    samples = [
        Sample(
            input_ids=rng.integers(1, 500, length).astype(np.int32),
            loss_mask=np.arange(length) >= 3,
            conversation=str(length),
            domain="agents",
        )
        for length in (9, 14)
    ]
    kept = tmp_path / "kept"
    for sample in samples:  # as a server writes them: of all tokens but the last
        ids = sample.input_ids.tolist()
        alone = Batch.packed([[(sample.input_ids, sample.loss_mask)]], width=len(ids))
        aux_BTLD = InProcessTarget(model, (0, 1, 2))(alone).aux_BTLD
        assert aux_BTLD is not None
        write_states(f"{kept}/{name_states(ids[:-1])}", aux_BTLD[0, :-1].contiguous(), (0, 1, 2))
    batch = next(PackedDataset(samples, sequence_length=32, seed=0).in_order(4))
    opened = TargetFolder.open(random_target)
    source = EndpointHiddenStates(
        Endpoint("http://127.0.0.1:9", attempts=1), model, (0, 1), str(tmp_path), opened, str(kept)
    )
    read, exact = source(batch), InProcessTarget(model, (0, 1))(batch)
    assert (source.num_kept, source.num_asked) == (2, 0)
    is_label_row_BT = label_rows(batch, 0)
    for one, other in ((read.aux_BTLD, exact.aux_BTLD), (final_hidden(read), final_hidden(exact))):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one[is_label_row_BT], other[is_label_row_BT])
    # Without one of them, the server is asked, and this one is gone.
    Storage(str(kept)).forget(samples[0].input_ids[:-1].tolist())
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9"):
        source(batch)
    assert source.num_asked == 1


def test_kept_states_are_refused_where_nothing_reads_them() -> None:
    with pytest.raises(ValueError, match=r"--signal.kept.*--signal.url"):
        Signal(kept="states")
    signal = Signal(kind="endpoint", url=("http://127.0.0.1:9",), kept="states")
    with pytest.raises(ValueError, match=r"--signal.kept.*--signal.exact"):
        live_signal(signal, LoadedTarget(files=TargetFolder.open(TINY_TARGET), model=None), None)


@pytest.mark.slow
@pytest.mark.vllm
def test_an_agentic_session_of_an_engine_is_learned_by_the_targets_own_ids(tmp_path: Path) -> None:
    extra = ["--enable-auto-tool-choice", "--tool-call-parser=words", "--dtype=float32"]
    extra += ["--tool-parser-plugin", str(Path("tests/helpers/word_call_parser.py").resolve())]
    opened = TargetFolder.open(TINY_TARGET)
    last = opened.text_config.num_hidden_layers
    extra += server_args((0, 1), last, str(tmp_path / "server"))
    output = tmp_path / "answers.jsonl"
    kept = Storage(str(tmp_path / "kept"))
    with vllm_server(TINY_TARGET, log=tmp_path / "log", extra_args=extra) as server:
        # 1. A client talks to the target: its session is the data, its ids are the truth.
        messages: list[dict[str, Any]] = [{"role": "user", "content": "def add(a, b):"}]
        wanted: list[tuple[list[int], list[int]]] = []
        for number in range(STEPS + 1):
            reply = httpx.post(
                f"{server.url}/v1/chat/completions",
                json={
                    "model": server.model,
                    "messages": messages,
                    "tools": TOOLS,
                    "temperature": 0,
                    "max_tokens": 200,
                    "return_token_ids": True,
                },
                timeout=600,
            ).json()
            choice = reply["choices"][0]
            wanted.append((reply["prompt_token_ids"], choice["token_ids"]))
            messages.append({"role": "assistant", **choice["message"]})
            for call in choice["message"].get("tool_calls") or ():
                result = {"role": "tool", "content": f"={number}", "tool_call_id": call["id"]}
                messages.append(result)
        shutil.rmtree(tmp_path / "server")  # the client's own states, which nobody reads
        # 2. Regenerated, it is the same.
        data = read_conversation({"messages": messages, "tools": TOOLS})
        sampling = Sampling(temperature=0, max_tokens=200)
        endpoint = make_endpoint(server.url, model=server.model)
        states = (Storage(str(tmp_path / "server")), kept)
        stats = regenerate([data], endpoint, output, sampling, states=states)
        # 3. A batch is read from what was kept: no server is asked, which would compute it again.
        samples, counted = build_samples(
            load_conversations(str(output)), opened.tokenizer, max_length=1024, progress=False
        )
        batch = next(PackedDataset(samples, sequence_length=1024, seed=0).in_order(4))
        skeleton = load_skeleton(opened, torch.float32, torch.device("cpu"))
        source = EndpointHiddenStates(
            Endpoint(server.url), skeleton, (0, 1), str(tmp_path), opened, str(tmp_path / "kept")
        )
        read = source(batch)
        assert (source.num_kept, source.num_asked) == (len(samples), 0)
    assert (stats.done, sum(stats.departed.values()), stats.cut) == (1, 0, 0)
    (conversation,) = load_conversations(str(output))
    assert [(p.tolist(), a.tolist()) for p, a in expand_turns(conversation["turns"])] == wanted
    # 4. transformers' greedy choice is each of the labels.
    target = AutoModelForCausalLM.from_pretrained(TINY_TARGET, dtype=torch.float32).eval()
    for prompt, answer in wanted:
        with torch.no_grad():
            logits_TV = target(torch.tensor([prompt + answer])).logits[0]
        chosen = logits_TV[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert chosen == answer
    assert counted.exact == STEPS + 1
    # 5. The states are those of transformers in this process.
    exact = InProcessTarget(target, (0, 1))(batch)
    is_label_row_BT = label_rows(batch, 0)
    assert read.aux_BTLD is not None
    assert exact.aux_BTLD is not None
    torch.testing.assert_close(
        read.aux_BTLD[is_label_row_BT], exact.aux_BTLD[is_label_row_BT], atol=1e-3, rtol=1e-3
    )
    torch.testing.assert_close(
        final_hidden(read)[is_label_row_BT],
        final_hidden(exact)[is_label_row_BT],
        atol=1e-3,
        rtol=1e-3,
    )
