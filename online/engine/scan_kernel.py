"""Triton kernels for the capture hook. The module is imported only if Triton is installed.

R = rows, V = vocabulary, C = chunks of a row, K = kept ids, N = draft tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scan(
    logits,
    stride,
    vocab_size,
    maxima,
    peaks,
    sums,
    num_chunks,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Scan one chunk of one row in each program.

    It stores the maximum of every group, the chunk's maximum, and the chunk's sum of exp.
    """
    # int64, because row * stride passes 2^31 at about 17,000 rows of 128k logits.
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=-float("inf")).to(
        tl.float32
    )
    largest = tl.max(tl.reshape(values, (CHUNK // GROUP, GROUP)), axis=1)
    first_group = (row * num_chunks + chunk) * (CHUNK // GROUP)
    tl.store(maxima + first_group + tl.arange(0, CHUNK // GROUP), largest)
    store_sum(peaks, sums, row * num_chunks + chunk, values, tl.max(largest, axis=0))


@triton.jit
def scan_drafts(
    logits,
    slots,
    steps,
    slot_stride,
    step_stride,
    temperatures,
    vocab_size,
    peaks,
    sums,
    num_chunks,
    CHUNK: tl.constexpr,
):
    """Scan one chunk for one draft token in each program.

    It stores the chunk's maximum after division by the temperature, and its sum of exp.
    """
    draft, chunk = tl.program_id(0), tl.program_id(1)
    slot, step = tl.load(slots + draft).to(tl.int64), tl.load(steps + draft).to(tl.int64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    row = logits + slot * slot_stride + step * step_stride
    values = tl.load(row + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    values = values / tl.load(temperatures + draft)
    store_sum(peaks, sums, draft * num_chunks + chunk, values, tl.max(values, axis=0))


@triton.jit
def store_sum(peaks, sums, place, values, peak):
    """Store a chunk's maximum, `peak`, and its sum of exp(value - maximum)."""
    # A chunk that contains only -inf would give NaN.
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    tl.store(peaks + place, peak)
    tl.store(sums + place, tl.sum(tl.exp(values - peak), axis=0))


@triton.jit
def join_chunks(peaks, sums, totals, num_chunks, WIDTH: tl.constexpr):
    """Compute the log-sum-exp of one row from its chunks in each program.

    WIDTH is a power of two, and at least the number of chunks.
    """
    row, chunks = tl.program_id(0), tl.arange(0, WIDTH)
    inside = chunks < num_chunks
    chunk_sums = tl.load(sums + row * num_chunks + chunks, mask=inside, other=0.0)
    chunk_peaks = tl.load(peaks + row * num_chunks + chunks, mask=inside, other=0.0)
    # A chunk that has only -inf has the peak 0, which may be far above the row's true peak.
    chunk_peaks = tl.where(chunk_sums > 0, chunk_peaks, -float("inf"))
    peak = tl.max(chunk_peaks, axis=0)
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    tl.store(totals + row, peak + tl.log(tl.sum(chunk_sums * tl.exp(chunk_peaks - peak), axis=0)))


@triton.jit
def read_groups(logits, stride, vocab_size, groups, values, num_groups, GROUP: tl.constexpr):
    """Read the logits of one chosen group of one row in each program.

    They are stored in float32, with -inf beyond the end of the vocabulary.
    """
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = tl.load(groups + row * num_groups + place)
    ids = group * GROUP + tl.arange(0, GROUP)
    found = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=-float("inf")).to(
        tl.float32
    )
    tl.store(values + (row * num_groups + place) * GROUP + tl.arange(0, GROUP), found)


@triton.jit
def find_ids(groups, places, ids, num_groups, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Find the token ids for one row in each program.

    They are the ids of the logits at these positions in the chosen groups.
    """
    row, kept = tl.program_id(0), tl.arange(0, WIDTH)
    inside = kept < num_groups
    place = tl.load(places + row * num_groups + kept, mask=inside, other=0)
    group = tl.load(groups + row * num_groups + place // GROUP, mask=inside, other=0)
    tl.store(
        ids + row * num_groups + kept, (group * GROUP + place % GROUP).to(tl.int32), mask=inside
    )
