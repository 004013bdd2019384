"""On-policy batches: text written by the draft, for the target to label (GKD, arXiv 2306.13649).

Only a standalone draft can write text. A head cannot: it learns from text written by the target, as when served.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from redraft.heads.draft import Batch
from redraft.heads.families.standalone import StandaloneDraft


def is_on_policy(step: int, fraction: float, seed: int) -> bool:
    """True for `fraction` of the steps. Only seed and step decide, so a resumed run repeats the choice."""
    return random.Random(f"on-policy {seed} {step}").random() < fraction


@torch.no_grad()
def draft_written(
    draft: StandaloneDraft,
    batch: Batch,
    *,
    pad_id: int,
    end_ids: Sequence[int],
    seed: int,
    max_tokens: int | None = None,
) -> Batch:
    """The batch's prompts, one per row, each followed by text from the draft: as long as the
    longest labelled text, at most `max_tokens`. A function of (weights, batch, seed)."""
    prompts, longest = _prompts(batch)
    width = max(len(prompt) for prompt in prompts)
    device = batch.input_ids_BT.device
    # padded on the left, because `generate` continues every row at its right end
    ids_BT = torch.full((len(prompts), width), pad_id, device=device)
    for row, prompt in zip(ids_BT, prompts, strict=True):
        row[width - len(prompt) :] = prompt
    real_BT = torch.arange(width, device=device) >= width - torch.tensor([[len(p)] for p in prompts], device=device)
    was_training = draft.training
    draft.eval()
    # Forked: the generators of the training (dropout) go on as if nothing had been drawn.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        written_BT = draft.model.generate(
            input_ids=ids_BT,
            attention_mask=real_BT.long(),
            max_new_tokens=min(longest, max_tokens or longest),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,  # generation_config.json may hold other values; those are meant for users
            min_p=None,
            repetition_penalty=1.0,
            pad_token_id=pad_id,
            eos_token_id=list(end_ids),
        )
    draft.train(was_training)
    answers = [_until_end(row[width:], end_ids) for row in written_BT]
    texts = [torch.cat(parts) for parts in zip(prompts, answers, strict=True)]
    return Batch.padded(texts, [len(prompt) for prompt in prompts], pad_id=pad_id, device=device)


def _prompts(batch: Batch) -> tuple[list[Tensor], int]:
    """(every document's tokens before the first label, the length of the longest labelled text in tokens)."""
    prompts, budget = [], 1
    for ids_T, labels_T, document_T in zip(batch.input_ids_BT, batch.loss_mask_BT, batch.document_BT, strict=True):
        for document in range(int(document_T.max()) + 1):
            inside_T = document_T == document
            # Of 0s and 1s, the first maximum is the first label.
            first = int(labels_T[inside_T].long().argmax())
            if labels_T[inside_T].any() and first > 0:
                prompts.append(ids_T[inside_T][:first])
                budget = max(budget, int(labels_T[inside_T].sum()))
    return prompts, budget


def _until_end(answer_T: Tensor, end_ids: Sequence[int]) -> Tensor:
    ends = torch.isin(answer_T, torch.tensor(list(end_ids), device=answer_T.device)).nonzero()
    return answer_T[: int(ends[0]) + 1] if len(ends) else answer_T
