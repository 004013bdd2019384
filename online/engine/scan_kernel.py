"""The Triton kernel that scans logits once. Imported only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def scan(logits, stride, vocab_size, maxima, peaks, sums, num_chunks, GROUP: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program for each row and chunk: the maximum of every group, the chunk's maximum, and its sum of exp."""
    # int64, because row * stride passes 2^31 at about 17,000 rows of 128k logits.
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    largest = tl.max(tl.reshape(values, (CHUNK // GROUP, GROUP)), axis=1)
    first_group = (row * num_chunks + chunk) * (CHUNK // GROUP)
    tl.store(maxima + first_group + tl.arange(0, CHUNK // GROUP), largest)
    peak = tl.max(largest, axis=0)
    # a chunk of -inf only would give nan
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    tl.store(peaks + row * num_chunks + chunk, peak)
    tl.store(sums + row * num_chunks + chunk, tl.sum(tl.exp(values - peak), axis=0))
