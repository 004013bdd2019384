"""Several teachers as one.

Real servers that are slow, die, come back, and come back as somebody else.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from teachers import Reply, Teacher, generated, log_probs, teaching
from test_signals import make_batch
from waiting import until

from redraft.distill.run.inputs import live_signal
from redraft.distill.signal import sources
from redraft.distill.signal.endpoint import Endpoint, RequestRefusedError
from redraft.distill.signal.endpoints import Endpoints
from redraft.distill.signal.sources import EndpointTarget
from redraft.distill.train.run_config import Signal
from redraft.files.target_folder import TargetFolder
from redraft.heads.draft import TopKTarget
from redraft.heads.target import LoadedTarget


def make_endpoints(teachers: Sequence[Teacher], concurrency: int = 2, **options: Any) -> Endpoints:
    members = [
        Endpoint(teacher.url, attempts=1, concurrency=concurrency, timeout_s=5)
        for teacher in teachers
    ]
    return Endpoints(
        members, **{"pause_s": 0.02, "longest_pause_s": 0.1, "patience_s": 0.5, **options}
    )


async def ask(endpoints: Endpoints, num: int, first: int = 0) -> list[int]:
    """The prompt that each answer is to, of `num` requests at once."""

    async def one(i: int) -> int:
        answer = await endpoints.post("/v1/completions", prompt=[i, i + 1], prompt_logprobs=1)
        return int(next(iter(answer["choices"][0]["prompt_logprobs"][1])))

    return await asyncio.gather(*(one(i) for i in range(first, first + num)))


def test_a_server_gets_as_much_as_it_can_do() -> None:
    all_but_two = threading.Event()

    def answer_last(request: dict[str, Any]) -> dict[str, Any]:
        assert all_but_two.wait(60)
        return log_probs(request)

    def answer_at_once(request: dict[str, Any]) -> dict[str, Any]:
        if len(fast.requests) == 58:
            all_but_two.set()
        return log_probs(request)

    with (
        teaching(Teacher(answer=answer_at_once)) as fast,
        teaching(Teacher(answer=answer_last)) as slow,
    ):
        assert asyncio.run(ask(make_endpoints([fast, slow]), 60)) == list(range(60))
    assert (len(fast.requests), len(slow.requests)) == (58, 2)


def test_a_long_prompt_weighs_more_than_a_short_one() -> None:
    async def one_long_then_short(endpoints: Endpoints) -> None:
        long = asyncio.create_task(
            endpoints.post("/v1/completions", prompt=list(range(50)), prompt_logprobs=1)
        )
        await until(lambda: len(one.requests) == 1)
        for i in range(3):
            await endpoints.post("/v1/completions", prompt=[i], prompt_logprobs=1)
        done.set()
        await long

    done = threading.Event()

    def answer_when_done(request: dict[str, Any]) -> dict[str, Any]:
        assert done.wait(60)
        return log_probs(request)

    with teaching(Teacher(answer=answer_when_done)) as one, teaching() as other:
        asyncio.run(one_long_then_short(make_endpoints([one, other], concurrency=8)))
    assert [len(request["prompt"]) for request in one.requests] == [50]
    assert len(other.requests) == 3


def test_requests_of_a_server_that_dies_go_to_the_other_and_it_is_used_again_when_it_is_back() -> (
    None
):
    async def through_a_death() -> None:
        with teaching(Teacher(delay_s=0.01)) as stays, ExitStack() as mortal:
            dies = mortal.enter_context(teaching(Teacher(delay_s=0.01)))
            endpoints = make_endpoints([stays, dies])
            asking = asyncio.create_task(ask(endpoints, 80))
            await until(lambda: len(dies.requests) > 2)
            await asyncio.to_thread(mortal.close)
            assert await asking == list(range(80))
            before = len(dies.requests)
            assert await ask(endpoints, 10) == list(range(10))
            assert len(dies.requests) == before
            with teaching(dies, port=dies.port):
                await until(lambda: not endpoints.members[1].is_dead)
                assert await ask(endpoints, 20) == list(range(20))
                assert len(dies.requests) > before

    asyncio.run(through_a_death())


def test_a_server_that_comes_back_with_another_model_is_not_asked() -> None:
    async def through_a_change() -> None:
        with teaching() as stays, ExitStack() as mortal:
            dies = mortal.enter_context(teaching())
            endpoints = make_endpoints([stays, dies])
            await ask(endpoints, 8)
            await asyncio.to_thread(mortal.close)
            await ask(endpoints, 8)
            dies.model, asked, probed = "another", len(dies.requests), dies.probes
            with teaching(dies, port=dies.port):
                await until(lambda: dies.probes >= probed + 2)
                await ask(endpoints, 8)
                assert len(dies.requests) == asked

    asyncio.run(through_a_change())


@pytest.mark.parametrize("listing", [b"<html>starting</html>", b"{}", b'{"data": null}', b"[]"])
def test_whatever_stands_in_for_a_server_that_starts_it_is_used_again_when_it_is_back(
    listing: bytes,
) -> None:
    async def through_a_start(server: Teacher) -> None:
        endpoints = make_endpoints([server], patience_s=30)
        assert await ask(endpoints, 1) == [0]
        server.status, server.listing = 503, listing
        asking = asyncio.create_task(ask(endpoints, 2))
        await until(lambda: server.probes >= 4)
        server.status, server.listing = 200, None
        assert await asyncio.wait_for(asking, 120) == [0, 1]

    with teaching() as server:
        asyncio.run(through_a_start(server))


def test_a_check_that_an_unexpected_answer_breaks_is_made_again() -> None:
    async def through_a_start(server: Teacher) -> None:
        endpoints, checked = make_endpoints([server], patience_s=30), []

        async def check(endpoint: Endpoint) -> None:
            checked.append(endpoint.url)
            if len(checked) == 2:
                raise KeyError("choices")

        await endpoints.require(check)
        server.status = 503
        asking = asyncio.create_task(ask(endpoints, 2))
        await until(lambda: endpoints.members[0].is_dead)
        server.status = 200
        assert await asyncio.wait_for(asking, 120) == [0, 1]
        assert len(checked) == 3

    with teaching() as server:
        asyncio.run(through_a_start(server))


def test_patience_ends_though_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the probe itself fails, or takes for ever."""

    async def probe_for_ever(endpoints: Endpoints, member: Any) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(Endpoints, "_probe", probe_for_ever)
    with (
        teaching(Teacher(status=503)) as server,
        pytest.raises(ConnectionError, match=re.escape(server.url)),
    ):
        asyncio.run(asyncio.wait_for(ask(make_endpoints([server]), 2), 120))


def test_a_server_may_be_dead_for_days() -> None:
    async def through_days() -> None:
        with teaching() as stays, ExitStack() as mortal:
            dies = mortal.enter_context(teaching())
            endpoints = make_endpoints([stays, dies])
            await ask(endpoints, 4)
            endpoints.members[1].failures = 2000
            await asyncio.to_thread(mortal.close)
            await ask(endpoints, 4)
            with teaching(dies, port=dies.port):
                await until(lambda: not endpoints.members[1].is_dead)

    asyncio.run(through_days())


def test_an_overloaded_server_is_left_alone_for_a_while() -> None:
    with teaching() as well, teaching(Teacher(status=503)) as busy:
        assert asyncio.run(
            ask(make_endpoints([well, busy], pause_s=60, longest_pause_s=60), 20)
        ) == list(range(20))
        assert 1 <= len(busy.requests) <= 2


def test_a_refused_request_is_not_asked_of_another_server() -> None:
    with teaching(Teacher(status=400)) as one, teaching(Teacher(status=400)) as other:
        with pytest.raises(RequestRefusedError, match="HTTP 400: no"):
            asyncio.run(ask(make_endpoints([one, other]), 1))
        assert len(one.requests) + len(other.requests) == 1


def test_when_all_are_dead_the_error_names_them_after_the_patience_is_over() -> None:
    with teaching() as one, teaching() as other:
        pass
    with pytest.raises(ConnectionError, match=rf"\b0\.5 s\b.*{one.url}, {other.url}"):
        asyncio.run(ask(make_endpoints([one, other]), 3))


def test_a_batch_shared_among_servers_has_the_signal_that_one_of_them_gives() -> None:
    batch = make_batch()
    with teaching() as one, teaching() as other:
        alone = EndpointTarget(make_endpoints([one]), k=5)(batch).distribution
        asked = len(one.requests)
        shared = EndpointTarget(make_endpoints([one, other]), k=5)(batch).distribution
        assert len(other.requests) > 0
        assert len(one.requests) - asked + len(other.requests) == asked
    assert isinstance(alone, TopKTarget)
    assert isinstance(shared, TopKTarget)
    assert torch.equal(alone.ids_BTK, shared.ids_BTK)
    assert torch.equal(alone.log_probs_BTK, shared.log_probs_BTK)
    assert int((alone.ids_BTK[..., 0] >= 0).sum()) > 20


class Limited(Teacher):
    """A teacher with a maximum length of 12 tokens, which a request's prompt and answer share."""

    def reply(self, request: dict[str, Any]) -> Reply:
        if len(request["prompt"]) + request["max_tokens"] > 12:
            return 400, {"error": {"message": "the maximum length is 12"}}
        return super().reply(request)


def test_a_document_of_the_servers_maximum_length_is_scored_up_to_its_last_label() -> None:
    batch = make_batch(rows=((12,),), width=12)
    with teaching(Limited()) as teacher:
        known = EndpointTarget(Endpoint(teacher.url), k=3)(batch).distribution
    assert isinstance(known, TopKTarget)
    is_label_T = batch.loss_mask_BT[0, 1:]
    assert is_label_T[-1]
    most_likely_T = known.ids_BTK[0, :-1, 0]
    assert torch.equal(most_likely_T[is_label_T], batch.input_ids_BT[0, :-1][is_label_T])


def serve_ids(
    tokenizer: Any, shift: int = 0, beyond: int = 0
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers of a server whose tokenizer gives other ids.

    They differ by `shift`, and it answers with ids from `beyond` on.
    """

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if isinstance(request["prompt"], str):
            ids = tokenizer(request["prompt"], add_special_tokens=False)["input_ids"]
            return {"choices": [{"prompt_token_ids": [token + shift for token in ids]}]}
        *entries, last = [
            {str(beyond + i): {"logprob": -1.0 - i} for i in range(3)} for _ in request["prompt"]
        ]
        choice = {"prompt_logprobs": [None, *entries], **generated(last)}
        return {"choices": [choice | {"token_ids": [beyond] * request["max_tokens"]}]}

    return answer


def open_source(opened: TargetFolder, *teachers: Teacher) -> EndpointTarget:
    signal = Signal(kind="endpoint", url=tuple(teacher.url for teacher in teachers), k=3)
    source = live_signal(signal, LoadedTarget(files=opened, model=None), None)
    assert isinstance(source, EndpointTarget)
    return source


def test_servers_of_another_vocabulary_are_refused_by_their_ids(random_target: Path) -> None:
    opened = TargetFolder.open(random_target)
    ours, size = serve_ids(opened.tokenizer), opened.text_config.vocab_size
    with (
        teaching(Teacher(answer=ours)) as right,
        teaching(Teacher(answer=serve_ids(opened.tokenizer, 1))) as wrong,
    ):
        known = open_source(opened, right)(make_batch()).distribution
        assert isinstance(known, TopKTarget)
        assert set(known.ids_BTK.flatten().tolist()) == {-1, 0, 1, 2}
        with pytest.raises(ValueError, match=f"^{wrong.url} serves a different target"):
            open_source(opened, right, wrong)
        assert [request["prompt"] for request in wrong.requests] == [sources.WORDS], (
            "nothing was learned from it"
        )
    # The last id of the vocabulary, and the first one beyond it.
    answers = [serve_ids(opened.tokenizer, beyond=beyond) for beyond in (size - 3, size - 2)]
    with (
        teaching(Teacher(answer=answers[0])) as last,
        teaching(Teacher(answer=answers[1])) as beyond,
    ):
        known = open_source(opened, last)(make_batch()).distribution
        assert isinstance(known, TopKTarget)
        assert int(known.ids_BTK.max()) == size - 1
        with pytest.raises(ValueError, match=rf"^{beyond.url}\b.*\b{size}\b.*\b{size}\b"):
            open_source(opened, beyond)(make_batch())
        beyond.answer = serve_ids(opened.tokenizer, beyond=size)
        with pytest.raises(ValueError, match=rf"^{beyond.url}\b.*\b{size}\b.*\b{size}\b"):
            open_source(opened, beyond).greedy([[1, 2]], 4)


def test_a_servers_greedy_text_is_without_the_targets_own_penalties(random_target: Path) -> None:
    """A server applies those of generation_config.json to requests that set none (Qwen 2.5)."""
    opened = TargetFolder.open(random_target)
    with teaching(Teacher(answer=serve_ids(opened.tokenizer))) as teacher:
        open_source(opened, teacher).greedy([[1, 2]], 4)
        asked = teacher.requests[-1]
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert asked["temperature"] == 0
    assert {name: asked.get(name) for name in neutral} == neutral


def test_a_server_with_another_name_is_named_once(
    random_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = TargetFolder.open(random_target)
    ours = serve_ids(opened.tokenizer)
    with (
        teaching(Teacher(answer=ours, model="an-alias")) as alias,
        teaching(Teacher(model=opened.name)) as named,
    ):
        named.answer = ours
        for _ in range(2):
            open_source(opened, alias, named)
        said = capsys.readouterr().out.splitlines()
        assert len(said) == 1
        assert all(word in said[0] for word in (alias.url, "an-alias", opened.name))


ONE = {"1": {"logprob": -1.0}}


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ([], "`prompt_logprobs`.*engine itself"),
        ([{"text": "x"}], "`prompt_logprobs`.*engine itself"),
        (None, "`prompt_logprobs`.*engine itself"),
        ([{"prompt_logprobs": [None]}], "a form that vLLM does not use"),
        ([{"prompt_logprobs": [-1.0] * 26}], "a form that vLLM does not use"),
        ([{"prompt_logprobs": [{"the": {"logprob": -1.0}}] * 26}], "a form that vLLM does not use"),
        ([{"prompt_logprobs": [ONE] * 26}], "a form that vLLM does not use"),
        ([{"prompt_logprobs": [ONE] * 26, **generated(ONE)}], r"\b1 .*not 3.*--signal\.k"),
    ],
)
def test_a_gateway_that_drops_what_a_teacher_sends_is_named(choices: Any, reason: str) -> None:
    with teaching(Teacher(answer=lambda request: {"choices": choices})) as gateway:
        source = EndpointTarget(Endpoint(gateway.url), k=3)
        with pytest.raises(ValueError, match=f"{gateway.url} sends .*{reason}"):
            source(make_batch())
        with pytest.raises(ValueError, match=f"{gateway.url} sends no `token_ids`"):
            source.greedy([[1, 2]], 4)
