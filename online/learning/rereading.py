"""Run the target over recorded token ids, for its distributions and a head's input states.

A server that reports no probabilities produces records that contain only ids
(`online.traffic.dialects`). A proxy in front of a server that does report them still gets no hidden
states. One pass of the target over a record's text computes both, as capture would have done in the
server.

R = rows, K = kept top-k ids, T = tokens, L = hidden states of one token, D = size of each hidden
state.
"""

from pathlib import Path

import numpy as np
import torch
from msgspec import structs

from redraft.distill.signal.sources import InProcessTarget, top_k
from redraft.files.plain import open_file
from redraft.heads.draft import Batch, ExactTarget, final_hidden
from redraft.heads.family import Reads
from redraft.online.learning.segments import Segments, Text
from redraft.online.records.record import (
    MAX_RECORD_BYTES,
    CorruptRecordError,
    Record,
    encode_frame,
    read_frames,
    text_rows,
)
from redraft.online.records.spool import SpoolWriter

MAX_TEXT_BYTES = 64 << 20  # Maximum size of all texts kept for later segments.
NAMES_BYTES = 16 << 10  # Room in a record for everything but its arrays.


class Texts:
    """Texts of the newest records, which a segment in a later file may continue."""

    def __init__(self) -> None:
        self._texts: dict[str, Text] = {}
        self._num_bytes = 0

    def find(self, record_id: str) -> Text | None:
        return self._texts.get(record_id)

    def add(self, record: Record, frame_bytes: int) -> None:
        self._drop(record.previous_id)  # a segment has only one successor
        self._drop(record.record_id)  # after a kill, a file is processed again
        text = Text(record.context + record.output, frame_bytes)
        self._texts[record.record_id] = text
        self._num_bytes += len(text.ids)
        while self._num_bytes > MAX_TEXT_BYTES:
            self._drop(next(iter(self._texts)))

    def _drop(self, record_id: str) -> None:
        if dropped := self._texts.pop(record_id, None):
            self._num_bytes -= len(dropped.ids)


def needs_reading(record: Record, reads: Reads) -> bool:
    """Whether a record lacks data that a draft learns from: distributions or, for a head, states.

    A record with draft tokens comes from the plugin and is complete.
    """
    has_drafts = bool((record.draft_ids >= 0).any())
    has_states = reads == "nothing" or bool(record.hidden)
    return not has_drafts and not (len(record.positions) and has_states)


@torch.no_grad()
def read_again(
    record: Record, target: InProcessTarget, reads: Reads, k: int, device: torch.device
) -> Record:
    """Return the record with the target's top k at every output token and a head's input states."""
    ids_T = np.concatenate([record.context_ids, record.output_ids])
    first, count = len(record.context_ids), len(record.output_ids)
    signal = target(Batch.padded([ids_T.tolist()], num_prompt_tokens=first, device=device))
    exact = signal.distribution
    assert isinstance(exact, ExactTarget)
    # Row t predicts token t + 1, and a record's rows are numbered by that token.
    rows_R = torch.arange(first - 1, first - 1 + count, device=device)
    ids_RK, log_probs_RK = top_k(exact, rows_R, k)
    read = structs.replace(
        record,
        top_k=k,
        **text_rows(first + np.arange(count), ids_RK.cpu().numpy(), log_probs_RK.cpu().numpy()),
    )
    if reads == "nothing":
        return read
    states_TLD = final_hidden(signal)[0, :, None] if reads == "last" else signal.aux_BTLD[0]  # type: ignore[index]
    # A server does not process the last token of an answer, so it has no state for this token.
    # The learner refuses larger records, so in a long text, only the newest tokens keep their
    # states, as in capture.
    room = MAX_RECORD_BYTES - NAMES_BYTES - read.num_bytes + len(read.hidden)
    begin = max(0, len(states_TLD) - 1 - room // (2 * states_TLD[0].numel()))
    words = states_TLD[begin:-1].bfloat16().view(torch.int16).cpu().numpy()
    shape = (int(states_TLD.shape[1]), int(states_TLD.shape[2]))
    return structs.replace(read, hidden_begin=begin, hidden_shape=shape, hidden=words.tobytes())


def read_file(
    path: Path,
    target: InProcessTarget,
    fingerprint: str,
    reads: Reads,
    k: int,
    out: SpoolWriter,
    texts: Texts,
) -> dict[str, int]:
    """Write the scored records of a spool file, remove the file, and count records by outcome.

    If a run is killed, the next run processes the file again, but the learner accepts a record id
    only once. `texts` are the texts in earlier files; the function adds this file's. A later segment
    cannot be scored if its beginning is unknown, and counts as unreadable.

    Raises:
        OSError: the output cannot be written. The file is then kept.
    """
    counts = {"scored": 0, "complete": 0, "of another target": 0, "unreadable": 0}
    frames = []
    with open_file(path) as file:
        for frame, record in Segments(texts.find).join(read_frames(file), ()):
            if isinstance(record, CorruptRecordError) or not len(record.output_ids):
                counts["unreadable"] += 1
                continue
            if not record.context_begin:
                texts.add(record, len(frame))
            if record.target != fingerprint:
                counts["of another target"] += 1
            elif not needs_reading(record, reads):
                frames.append(encode_frame(record))
                counts["complete"] += 1
            elif record.context_begin:
                counts["unreadable"] += 1
            else:
                device = target.model.device
                frames.append(encode_frame(read_again(record, target, reads, k, device)))
                counts["scored"] += 1
    if frames:
        out.write(frames)
    path.unlink()
    return counts
