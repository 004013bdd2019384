"""The Triton kernel for lookups on the device. The module is imported only if Triton is installed.

B = requests in a step, S = slots of the runner, K = maximum number of draft tokens, N = longest
run.

The input numbers of a step have 64 bits each. Floats are float64, so that products of probabilities
equal those on the host to the last bit:

    row | least_first | oldest epoch | by length of a run in the request [N + 1] |
    by kind of a run in the answers | (owner, hash of the owner) [B]
"""

from __future__ import annotations

import triton
import triton.language as tl

WAYS = tl.constexpr(8)
TOKEN_BITS, OWNER_BITS, VOTE_BITS = tl.constexpr(26), tl.constexpr(16), tl.constexpr(5)
OWNERS, VOTES, TOKENS = tl.constexpr(0xFFFF), tl.constexpr(31), tl.constexpr(0x3FFFFFF)
KINDS = tl.constexpr(32)
"""Number of vote counts per run length."""

FACTOR = tl.constexpr(0x9E3779B97F4A7C15)
FIRST_NUMBERS = tl.constexpr(3)
ANYONE, NO_OWNER = tl.constexpr(-1), tl.constexpr(-2)
BEHIND = tl.constexpr(1 << 40)
"""A number larger than any position, which combines a run's length and its position into one score.
"""


# The pace changes `most`. Triton would compile the kernel again for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["most"])
def follow_chains(
    texts,
    text_stride,
    lengths,
    slots,
    num_sampled,
    last_sampled,
    numbers,
    hashes,
    rows,
    drafts,
    counts,
    confidences,
    num_buckets,
    most,
    longest_text,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_RUNS: tl.constexpr,
    NUM_KINDS: tl.constexpr,
    NUM_PROBES: tl.constexpr,
    IS_LIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draft the tokens of one request in each program, one after another.

    The kernel stores the tokens, their number, and each token's probability given that all earlier
    ones are right. After the last token, the request's newest token is repeated with probability 0,
    because the target processes a row for each position, and every row needs a token.
    """
    batch = tl.program_id(0)
    slot = tl.load(slots + batch).to(tl.int64)
    length = tl.load(lengths + slot).to(tl.int64)
    text, draft = texts + slot * text_stride, drafts + batch * K
    columns = tl.arange(0, WIDTH)
    newest = tl.load(last_sampled + slot).to(tl.int64)
    tl.store(draft + columns, tl.zeros([WIDTH], tl.int64) + newest, mask=columns < K)
    tl.store(confidences + batch * K + columns, tl.zeros([WIDTH], tl.float32), mask=columns < K)
    by_length = numbers + FIRST_NUMBERS
    owners = by_length + NUM_RUNS + 1 + NUM_KINDS
    owner = tl.load(owners + 2 * batch)
    start = tl.load(owners + 2 * batch + 1).to(tl.uint64, bitcast=True)
    oldest = tl.load(numbers + 2)
    row = tl.load(numbers).to(tl.float64, bitcast=True)  # as in `Retrieval.propose`
    least = tl.load(numbers + 1).to(tl.float64, bitcast=True)
    # A request whose prompt has not been read completely has no new token, and gets no draft.
    limit = tl.minimum(tl.cast(most, tl.int64), longest_text - length)
    limit = tl.where(tl.load(num_sampled + batch) > 0, limit, 0)
    count, product = length - length, tl.full([], 1.0, tl.float64)
    expected, cost = product, product
    is_open = limit > 0
    while is_open:
        tl.debug_barrier()  # wait, because a single thread wrote the tokens after `length`
        end = length + count
        run, place = find_in_text(text, draft, length, end, NUM_RUNS, BLOCK)
        token = read(text, draft, length, place + 1, run > 0)
        probability = tl.load(by_length + run).to(tl.float64, bitcast=True)
        kind, counted = find_in_table(
            text, draft, length, end, owner, start, oldest, hashes, rows, num_buckets,
            NUM_RUNS, NUM_PROBES, IS_LIVE,
        )  # fmt: skip
        kinds = by_length + NUM_RUNS + 1
        its = tl.load(kinds + kind, mask=kind >= 0, other=0).to(tl.float64, bitcast=True)
        # If both are equal, the request's own text takes precedence.
        is_counted = its > probability
        token = tl.where(is_counted, counted, token)
        probability = tl.where(is_counted, its, probability)
        is_found = is_counted | (run > 0)
        product *= probability
        is_open = is_found & (product >= tl.where(count == 0, least, 0.0))
        is_open = is_open & (product * cost >= row * expected)
        expected, cost = expected + product, cost + row
        if is_open:
            tl.store(draft + count, token)
            tl.store(confidences + batch * K + count, probability.to(tl.float32))
        count += is_open.to(tl.int64)
        is_open = is_open & (count < limit)
    tl.store(counts + batch, count.to(tl.int32))


@triton.jit
def read(text, draft, length, places, inside):
    """Return the tokens at these positions in a text of `length` tokens followed by its draft."""
    is_text = places < length
    written = tl.load(text + places, mask=inside & is_text, other=0).to(tl.int64)
    drafted = tl.load(draft + places - length, mask=inside & (places >= length), other=0)
    return tl.where(is_text, written, drafted)


@triton.jit
def find_in_text(text, draft, length, end, NUM_RUNS: tl.constexpr, BLOCK: tl.constexpr):
    """Find the longest suffix of the tokens before `end` that occurs earlier.

    Return its length, and the position of the last token of its earliest occurrence.
    """
    newest = read(text, draft, length, end - 1, end > 0)
    best = end - end
    begin = end - end
    while (begin < end - 1) & (best < NUM_RUNS * BEHIND):
        places = begin + tl.arange(0, BLOCK)
        inside = places < end - 1  # a token follows this place
        is_equal = inside & (read(text, draft, length, places, inside) == newest)
        if tl.max(is_equal.to(tl.int32), axis=0) > 0:
            run = is_equal.to(tl.int64)
            for back in tl.static_range(1, NUM_RUNS):
                is_equal = is_equal & (places >= back)
                wanted = read(text, draft, length, end - 1 - back, end > back)
                is_equal = is_equal & (read(text, draft, length, places - back, is_equal) == wanted)
                run += is_equal.to(tl.int64)
            score = tl.where(run > 0, run * BEHIND + (BEHIND - 1 - places), 0)
            best = tl.maximum(best, tl.max(score, axis=0))
        begin += BLOCK
    return best // BEHIND, BEHIND - 1 - best % BEHIND


@triton.jit
def find_in_table(
    text,
    draft,
    length,
    end,
    owner,
    start,
    oldest,
    hashes,
    rows,
    num_buckets,
    NUM_RUNS: tl.constexpr,
    NUM_PROBES: tl.constexpr,
    IS_LIVE: tl.constexpr,
):
    """Find the longest suffix of the tokens before `end` that is a run in the table.

    Return the run's kind, or -1 if there is none, and the token that follows the run.
    """
    hashed, ways = start, tl.arange(0, WAYS)
    kind, token = owner - owner - 1, owner - owner
    size = tl.cast(num_buckets, tl.uint64)
    for back in tl.static_range(NUM_RUNS):
        inside = (end > back) & (owner != NO_OWNER)
        last = read(text, draft, length, end - 1 - back, inside).to(tl.uint64, bitcast=True)
        hashed = (hashed ^ last) * FACTOR
        hashed = hashed ^ (hashed >> 29)
        wanted = tl.where(hashed == 0, 1, hashed)
        bucket = (wanted % size).to(tl.int64, bitcast=True)
        for _ in tl.static_range(NUM_PROBES):
            places = bucket * WAYS + ways
            found = tl.load(hashes + places, mask=(ways >= 0) & inside, other=0)
            is_hit = (found == wanted.to(tl.int64, bitcast=True)) & inside
            row = tl.sum(tl.load(rows + places, mask=is_hit, other=0), axis=0)
            is_run = tl.max(is_hit.to(tl.int32), axis=0) > 0
            bucket = tl.where(bucket + 1 == num_buckets, 0, bucket + 1)
            row = row.to(tl.uint64, bitcast=True)
            above = (row >> (TOKEN_BITS + OWNER_BITS)).to(tl.int64, bitcast=True)
            its_kind = above
            if IS_LIVE:
                its_owner = (row >> TOKEN_BITS).to(tl.int64, bitcast=True) & OWNERS
                is_run = is_run & ((owner == ANYONE) | (its_owner == owner))
                is_run = is_run & ((above >> VOTE_BITS) >= oldest)
                its_kind = KINDS * (back + 1) + (above & VOTES)
            kind = tl.where(is_run, its_kind, kind)
            its_token = row.to(tl.int64, bitcast=True) & TOKENS
            token = tl.where(is_run, its_token, token)
    return kind, token
