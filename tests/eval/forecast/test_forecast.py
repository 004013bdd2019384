"""Random Llamas of two layers.

The oracle is the reference sampler, which does not use teacher forcing.

B = batch, T = tokens, D = hidden, V = vocabulary, W = draft vocabulary, K = num_speculative_tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from autoregressive import token_by_token
from make_heads import take_rows
from reference_sampler import NextLogits, Propose, sample
from torch import Tensor
from transformers import LlamaForCausalLM, MistralConfig, Qwen2_5_VLConfig

from redraft.engine.counts import AcceptanceCounts
from redraft.engine.prompts import Prompt
from redraft.eval.forecast.greedy import (
    Continuation,
    forecast,
    greedy_continuations,
    metric_sums,
    quick_metrics,
    require_window,
)
from redraft.heads.draft import (
    Batch,
    DraftStep,
    ExactTarget,
    TargetSignal,
    TopKTarget,
    attention_mask,
    label_rows,
)

K = 3
MAX_TOKENS = 24
END_IDS = range(3, 30)
"""About one token in twenty ends an answer, so answers have different lengths."""


@pytest.fixture(scope="module")
def target(random_target: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(random_target).eval()


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    return [
        Prompt(
            token_ids=torch.randint(6, 512, (length,), generator=generator).tolist(),
            domain=("code", "prose")[length % 2],
        )
        for length in (5, 17, 8, 12, 30, 9)
    ]


@pytest.fixture(scope="module")
def continuations(target: Any, prompts: list[Prompt]) -> list[Continuation]:
    return greedy_continuations(
        target,
        prompts,
        max_tokens=MAX_TOKENS,
        num_speculative_tokens=K,
        end_ids=END_IDS,
        batch_size=4,
    )


def make_noisy_copy(model: Any, noise: float) -> Any:
    torch.manual_seed(1)
    copy = LlamaForCausalLM(model.config).eval()
    state = {
        k: v + noise * v.std() * torch.randn_like(v) if v.ndim > 1 else v
        for k, v in model.state_dict().items()
    }
    copy.load_state_dict(state)
    return copy


def hidden_states(model: Any, batch: Batch) -> Tensor:
    return model.model(
        input_ids=batch.input_ids_BT,
        attention_mask=attention_mask(batch),
        position_ids=batch.position_ids_BT,
    ).last_hidden_state


def exact_signal(target: Any) -> Callable[[Batch], TargetSignal]:
    return lambda batch: TargetSignal(
        distribution=ExactTarget(
            hidden_BTD=hidden_states(target, batch), head_VD=target.lm_head.weight
        )
    )


def top_k_signal(target: Any, k: int) -> Callable[[Batch], TargetSignal]:
    def signal(batch: Batch) -> TargetSignal:
        log_p = (hidden_states(target, batch) @ target.lm_head.weight.T).log_softmax(-1).topk(k)
        return TargetSignal(
            distribution=TopKTarget(ids_BTK=log_p.indices, log_probs_BTK=log_p.values)
        )

    return signal


class LMDraft:
    """A language model as a draft, with all or part of the vocabulary."""

    is_autoregressive = True
    is_block = False

    def __init__(self, model: Any, draft_ids_W: Tensor | None = None) -> None:
        self.model, self.draft_ids_W = model, draft_ids_W

    def draft_steps(
        self, batch: Batch, signal: TargetSignal, num_steps: int | None = None
    ) -> list[DraftStep]:
        head = self.model.lm_head.weight
        return [
            DraftStep(
                hidden_BTD=hidden_states(self.model, batch),
                head_WD=head if self.draft_ids_W is None else head[self.draft_ids_W],
                shift=0,
                mask_BT=label_rows(batch, 0),
                draft_ids_W=self.draft_ids_W,
            )
        ]


class HeadsDraft:
    """Like Medusa: head i predicts token t + 2 + i from the target's state of t.

    Here a random matrix does so.
    """

    is_autoregressive = False
    is_block = False

    def __init__(self, target: Any, num_heads: int) -> None:
        self.target = target
        generator = torch.Generator().manual_seed(2)
        size = target.config.hidden_size
        self.matrices = [
            torch.eye(size) * 0.1 + torch.randn(size, size, generator=generator)
            for _ in range(num_heads)
        ]

    def draft_steps(
        self, batch: Batch, signal: TargetSignal, num_steps: int | None = None
    ) -> list[DraftStep]:
        assert isinstance(signal.distribution, ExactTarget)
        return [
            DraftStep(
                hidden_BTD=signal.distribution.hidden_BTD @ matrix,
                head_WD=signal.distribution.head_VD,
                shift=1 + i,
                mask_BT=label_rows(batch, 1 + i),
            )
            for i, matrix in enumerate(self.matrices)
        ]

    def propose(
        self,
        prefix: Sequence[int],
        num_tokens: int,
        temperature: float,
        generator: torch.Generator | None,
    ) -> list[tuple[int, Tensor]]:
        """The target has not read the last token yet.

        The heads read the state of the token before it.
        """
        hidden_D = self.target.model(input_ids=torch.tensor([prefix[:-1]])).last_hidden_state[0, -1]
        tokens = [
            int((hidden_D @ m @ self.target.lm_head.weight.T).argmax()) for m in self.matrices
        ]
        one_hot = torch.eye(self.target.config.vocab_size)
        return [(token, one_hot[token]) for token in tokens[:num_tokens]]


def next_logits(model: Any) -> NextLogits:
    return lambda tokens: model(input_ids=torch.tensor([list(tokens)])).logits[0, -1]


@torch.no_grad()
def counts_of_sampler(
    target: Any, propose: Propose, continuation: Continuation
) -> AcceptanceCounts:
    tokens, counts = sample(
        next_logits(target),
        propose,
        continuation.prompt.token_ids,
        num_speculative_tokens=K,
        max_tokens=len(continuation.output_ids),
        temperature=0.0,
    )
    assert tokens == continuation.output_ids
    return counts


@torch.no_grad()
def test_batched_greedy_answers_equal_transformers_one_by_one(
    target: Any, continuations: list[Continuation]
):
    lengths = {len(c.output_ids) for c in continuations}
    assert len(lengths) > 2, "the answers should end at different lengths"
    for c in continuations:
        alone = target.generate(
            torch.tensor([c.prompt.token_ids]),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=list(END_IDS),
        )
        assert c.output_ids == alone[0, len(c.prompt.token_ids) :].tolist()


@torch.no_grad()
def test_text_beyond_an_answer_is_the_targets_greedy_text_too(
    target: Any, continuations: list[Continuation]
):
    for c in continuations:
        text = [*c.prompt.token_ids, *c.output_ids]
        for token in c.beyond_ids:
            assert token == int(next_logits(target)(text).argmax())
            text.append(token)
        assert len(c.beyond_ids) == K - 1


def test_answers_of_an_interrupted_run_are_kept_by_batch(
    target: Any, continuations: list[Continuation]
):
    prompts = [c.prompt for c in continuations]
    kept: dict[int, list[Continuation]] = {}
    computed = []

    def keep(batch: list[Prompt], compute: Callable[[], list[Continuation]]) -> list[Continuation]:
        key = hash(str(batch))
        if key not in kept:
            computed.append(len(batch))
            if len(computed) == 3:
                raise KeyboardInterrupt
            kept[key] = compute()
        return kept[key]

    def answer() -> list[Continuation]:
        return greedy_continuations(
            target,
            prompts,
            max_tokens=MAX_TOKENS,
            num_speculative_tokens=K,
            end_ids=END_IDS,
            batch_size=2,
            keep=keep,
        )

    with pytest.raises(KeyboardInterrupt):
        answer()
    assert len(kept) == 2
    assert answer() == continuations
    # The first two batches were not computed again.
    assert computed == [2] * (len(prompts) // 2 + 1)


def test_a_prompt_that_does_not_fit_the_window_is_refused(target: Any):
    with pytest.raises(ValueError, match=r"500.*512"):
        greedy_continuations(
            target,
            [Prompt(token_ids=[7] * 500)],
            max_tokens=20,
            num_speculative_tokens=K,
            end_ids=[2],
        )


def test_the_window_of_a_target_of_text_and_images_is_its_language_models():
    text = {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "max_position_embeddings": 40,
    }
    target = SimpleNamespace(config=Qwen2_5_VLConfig(text_config=text))
    require_window(target, [Prompt(token_ids=[1] * 30)], 10)
    with pytest.raises(ValueError, match=r"\b30\b.*\b11\b.*\b40\b"):
        require_window(target, [Prompt(token_ids=[1] * 30)], 11)


def test_the_window_of_all_layers_is_a_drafts_too_and_only_heads_compute_it() -> None:
    target = SimpleNamespace(config=MistralConfig(sliding_window=40, max_position_embeddings=64))
    require_window(target, [Prompt(token_ids=[1] * 30)], 10, is_head=False)
    with pytest.raises(ValueError, match=r"\b30\b.*\b11\b.*\b40\b"):
        require_window(target, [Prompt(token_ids=[1] * 30)], 11, is_head=False)
    require_window(target, [Prompt(token_ids=[1] * 30)], 34)
    with pytest.raises(ValueError, match=r"\b30\b.*\b35\b.*\b64\b"):
        require_window(target, [Prompt(token_ids=[1] * 30)], 35)


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_forecast_counts_equal_the_reference_samplers(
    target: Any, continuations: list[Continuation], noise: float
):
    draft = make_noisy_copy(target, noise)
    result = forecast(LMDraft(draft), exact_signal(target), continuations, K)
    expected = [
        counts_of_sampler(target, token_by_token(next_logits(draft)), c) for c in continuations
    ]
    assert [p.counts for p in result.per_prompt] == expected
    assert 1.0 < result.overall.tau < K + 1


def test_forecast_of_heads_equals_the_reference_samplers(
    target: Any, continuations: list[Continuation]
):
    draft = HeadsDraft(target, K)
    # Random heads are almost never accepted and would test nothing: fit each to the text by least
    # squares.
    fit_heads(draft, target, continuations)
    result = forecast(draft, exact_signal(target), continuations, K)
    assert [p.counts for p in result.per_prompt] == [
        counts_of_sampler(target, draft.propose, c) for c in continuations
    ]
    assert result.overall.tau > 1.2


@torch.no_grad()
def fit_heads(draft: HeadsDraft, target: Any, continuations: list[Continuation]) -> None:
    for i in range(len(draft.matrices)):
        sources, labels = [], []
        for c in continuations:
            ids = torch.tensor([[*c.prompt.token_ids, *c.output_ids, *c.beyond_ids]])
            hidden_TD = target.model(input_ids=ids).last_hidden_state[0]
            sources.append(hidden_TD[: -2 - i])
            labels.append(target.lm_head.weight[ids[0, 2 + i :]])
        draft.matrices[i] = torch.linalg.lstsq(torch.cat(sources), torch.cat(labels)).solution


def test_a_copy_of_the_target_is_always_accepted(target: Any, continuations: list[Continuation]):
    summary = forecast(LMDraft(target), exact_signal(target), continuations, K).overall
    assert summary.tau == K + 1
    assert summary.alpha == pytest.approx(1.0, abs=1e-5)
    assert summary.acceptance_per_position == [1.0] * K


def test_alpha_and_alpha_greedy_are_means_over_the_answers_rows(
    target: Any, continuations: list[Continuation]
):
    draft = make_noisy_copy(target, 0.05)
    summary = forecast(LMDraft(draft), exact_signal(target), continuations, K).overall
    alphas, greedy = [], []
    with torch.no_grad():
        for c in continuations:
            ids = torch.tensor([[*c.prompt.token_ids, *c.output_ids]])
            rows = slice(len(c.prompt.token_ids) - 1, ids.shape[1] - 1)
            p, q = (m(input_ids=ids).logits[0, rows].double().softmax(-1) for m in (target, draft))
            alphas += torch.minimum(p, q).sum(-1).tolist()
            greedy += p[torch.arange(len(p)), q.argmax(-1)].tolist()
    assert summary.num_output_tokens == len(alphas)
    assert summary.alpha == pytest.approx(sum(alphas) / len(alphas), abs=1e-5)
    assert summary.alpha_greedy == pytest.approx(sum(greedy) / len(greedy), abs=1e-5)


def test_domains_add_up_to_the_whole(target: Any, continuations: list[Continuation]):
    result = forecast(
        LMDraft(make_noisy_copy(target, 0.05)), exact_signal(target), continuations, K
    )
    assert list(result.by_domain) == ["code", "prose"]
    assert (
        sum(d.num_output_tokens for d in result.by_domain.values())
        == result.overall.num_output_tokens
    )
    code = forecast(
        LMDraft(make_noisy_copy(target, 0.05)),
        exact_signal(target),
        [c for c in continuations if c.prompt.domain == "code"],
        K,
    )
    assert result.by_domain["code"] == code.overall
    assert set(result.to_json()) == {*vars(result.overall), "by_domain"}


def test_a_reduced_draft_vocabulary_is_mapped_and_misses_count(
    target: Any, continuations: list[Continuation]
):
    kept_W = torch.arange(0, 512, 2)
    draft = make_noisy_copy(target, 0.02)
    result = forecast(LMDraft(draft, kept_W), exact_signal(target), continuations, K)

    def reduced(tokens: Sequence[int]) -> Tensor:
        return next_logits(draft)(tokens) + torch.where(torch.arange(512) % 2 == 0, 0.0, -torch.inf)

    assert [p.counts for p in result.per_prompt] == [
        counts_of_sampler(target, token_by_token(reduced), c) for c in continuations
    ]
    whole = forecast(LMDraft(draft), exact_signal(target), continuations, K).overall
    assert 0.1 < result.overall.alpha < whole.alpha


def test_a_top_k_target_bounds_alpha_from_below_and_is_exact_with_all_ids(
    target: Any, continuations: list[Continuation]
):
    draft = LMDraft(make_noisy_copy(target, 0.05))
    exact = forecast(draft, exact_signal(target), continuations, K).overall
    everything = forecast(draft, top_k_signal(target, 512), continuations, K).overall
    some = forecast(draft, top_k_signal(target, 16), continuations, K).overall
    assert everything.alpha == pytest.approx(exact.alpha, abs=1e-5)
    assert everything.alpha_greedy == pytest.approx(exact.alpha_greedy, abs=1e-5)
    assert exact.alpha - 0.3 < some.alpha < exact.alpha
    assert some.tau == exact.tau


def test_more_draft_tokens_than_heads_are_refused(target: Any, continuations: list[Continuation]):
    with pytest.raises(ValueError, match=r"\b2\b.*num_speculative_tokens.*\b3$"):
        forecast(HeadsDraft(target, 2), exact_signal(target), continuations, K)


def make_packed_batch() -> Batch:
    """Two documents and padding in row 0, one document in row 1; questions are 4 tokens long."""
    generator = torch.Generator().manual_seed(3)
    document_BT = torch.tensor([[0] * 12 + [1] * 10 + [-1] * 4, [0] * 26])
    positions = [*range(12), *range(10), *range(4)], [*range(26)]
    position_ids_BT = torch.tensor([list(row) for row in positions])
    return Batch(
        input_ids_BT=torch.randint(6, 512, (2, 26), generator=generator),
        loss_mask_BT=(position_ids_BT >= 4) & (document_BT >= 0),
        document_BT=document_BT,
        position_ids_BT=position_ids_BT,
    )


@torch.no_grad()
def test_held_out_metrics_equal_a_plain_loop_over_the_documents(target: Any):
    draft, batch = make_noisy_copy(target, 0.05), make_packed_batch()
    alphas, accepted = [], []
    for row, first, last in ((0, 0, 12), (0, 12, 22), (1, 0, 26)):
        ids = batch.input_ids_BT[row : row + 1, first:last]
        p, q = (m(input_ids=ids).logits[0].double().softmax(-1) for m in (target, draft))
        agree = (p.argmax(-1) == q.argmax(-1)).tolist()
        alphas += torch.minimum(p, q).sum(-1)[3:-1].tolist()
        for start in range(3, last - first - K):
            block = agree[start : start + K]
            accepted.append(block.index(False) if False in block else K)
    result = quick_metrics(metric_sums(LMDraft(draft), batch, exact_signal(target)(batch), K))
    assert result.num_rows == len(alphas) == 8 + 6 + 22
    assert result.alpha == pytest.approx(sum(alphas) / len(alphas), abs=1e-5)
    assert result.tau == pytest.approx(1 + sum(accepted) / len(accepted))
    assert result.acceptance_per_position == [
        sum(a > j for a in accepted) / len(accepted) for j in range(K)
    ]


def test_held_out_metrics_add_up_over_batches(target: Any):
    draft, batch = LMDraft(make_noisy_copy(target, 0.05)), make_packed_batch()
    first, second = (take_rows(batch, slice(i, i + 1)) for i in range(2))
    parts = [metric_sums(draft, part, exact_signal(target)(part), K) for part in (first, second)]
    whole = metric_sums(draft, batch, exact_signal(target)(batch), K)
    assert parts[0][0] > 0
    assert parts[1][0] > 0
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-6, atol=1e-6)


def test_held_out_batches_without_a_label_are_refused(target: Any):
    batch = make_packed_batch()
    unlabelled = Batch(**{**vars(batch), "loss_mask_BT": torch.zeros_like(batch.loss_mask_BT)})
    with pytest.raises(ValueError, match="label"):
        quick_metrics(metric_sums(LMDraft(target), unlabelled, exact_signal(target)(unlabelled), K))
