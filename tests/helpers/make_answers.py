"""Records of finished texts, as of a server without a draft.

R = rows, K = kept top-k ids.
"""

from collections.abc import Iterable, Iterator

import torch

from redraft.distill.data.packing import collate
from redraft.distill.data.samples import Sample
from redraft.distill.signal.sources import InProcessTarget, top_k
from redraft.distill.signal.transfer import to_device
from redraft.heads.draft import ExactTarget, label_rows
from redraft.online.records.record import Record, Sampling, text_rows


@torch.no_grad()
def make_answers(
    samples: Iterable[Sample], target: InProcessTarget, target_fingerprint: str, *, k: int = 32
) -> Iterator[Record]:
    """One record per sample, with the target's distribution at every label."""
    for number, sample in enumerate(samples):
        batch = to_device(collate([[sample]], len(sample.input_ids)), target.model.device)
        rows_R = label_rows(batch, 0).flatten().nonzero().squeeze(1)
        exact = target(batch).distribution
        assert isinstance(exact, ExactTarget)
        ids_RK, log_probs_RK = top_k(exact, rows_R, k)
        first = int(rows_R[0]) + 1
        yield Record(
            server_id="offline",
            request_id=f"{sample.conversation[:32]}-{number}",
            sequence=0,
            time_s=0.0,
            domain=sample.domain,
            target_fingerprint=target_fingerprint,
            sampling=Sampling(),
            num_prompt_tokens=first,
            top_k=k,
            context=sample.input_ids[:first].astype("<i4").tobytes(),
            output=sample.input_ids[first:].astype("<i4").tobytes(),
            # row t contains the distribution of token t + 1, and a record counts by that token
            **text_rows(rows_R.cpu().numpy() + 1, ids_RK.cpu().numpy(), log_probs_RK.cpu().numpy()),
        )
