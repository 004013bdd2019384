"""The fused divergence on a GPU, in Triton: one program per row.

p is the target, q the draft, and z are logits. A program reads one row's draft logits and target
logits, and overwrites the draft logits by the gradient. It reads a row in tiles: first the log sum
exp of q, then the sums over the outcomes, then the gradient. All arithmetic is in float32. The
formulas are in `distill.loss.gradients`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG_ZERO = tl.constexpr(-1e4)  # As in `distill.loss.outcomes`.
FAR_BELOW = tl.constexpr(-1e30)  # The smallest logit: finite, because -inf - -inf is NaN.
TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32, as in `loss.gradients`


@triton.jit
def _at_least(x, floor):
    """Return max(x, floor), but NaN for NaN, so that the training step is skipped.

    For NaN, a GPU's plain max would return the floor.
    """
    return tl.maximum(x, floor, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _load(row_ptr, columns, width, inverse_temperature):
    """Load logits / temperature in float32; columns outside the row get FAR_BELOW."""
    z = tl.load(row_ptr + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
    return _at_least(z * inverse_temperature, FAR_BELOW)


@triton.jit
def _below(p, q):
    """Return 1 if q < p, 0 if q > p, and 1/2 if they are equal."""
    return tl.where(q < p, 1.0, tl.where(q > p, 0.0, 0.5))


@triton.jit
def _log_mixture(p, q, beta):
    return tl.log(_at_least(beta * p + (1 - beta) * q, TINY))


@triton.jit
def _sums(log_p, log_q, beta, NAME: tl.constexpr):
    """Return (alpha, a, b) summed over these outcomes, for `_value` and `_gradient`."""
    p, q = tl.exp(log_p), tl.exp(log_q)
    alpha = tl.sum(tl.minimum(p, q, propagate_nan=tl.PropagateNan.ALL), 0)
    a, b = 0 * alpha, 0 * alpha
    if NAME == "forward_kl" or NAME == "lk_hybrid":
        a = tl.sum(p * (log_p - log_q), 0)
    if NAME == "reverse_kl":
        a = tl.sum(q * (log_q - log_p), 0)
    if NAME == "jensen_shannon":
        log_m = _log_mixture(p, q, beta)
        a, b = tl.sum(p * (log_p - log_m), 0), tl.sum(q * (log_q - log_m), 0)
    if NAME == "total_variation" or NAME == "neg_log_alpha" or NAME == "lk_hybrid":
        b = tl.sum(q * _below(p, q), 0)
    return alpha, a, b


@triton.jit
def _value(mass, alpha, a, b, beta, eta, NAME: tl.constexpr):
    """Return a row's divergence from its sums; 0 for cross_entropy. `mass` is the sum of p."""
    kl = a - mass * tl.log(_at_least(mass, TINY))
    value = 0 * a
    if NAME == "forward_kl":
        value = kl
    if NAME == "reverse_kl":
        value = a
    if NAME == "jensen_shannon":
        value = beta * (a - (1 - mass) * tl.log(beta)) + (1 - beta) * b
    if NAME == "total_variation":
        value = 1 - alpha
    if NAME == "neg_log_alpha":
        value = -tl.log(_at_least(alpha, TINY))
    if NAME == "lk_hybrid":
        weight = tl.exp(-eta * alpha)
        value = weight * kl + (1 - weight) * (1 - alpha)
    return value


@triton.jit
def _gradient(log_p, log_q, mass, alpha, a, b, beta, eta, NAME: tl.constexpr):
    """Return the gradient with respect to logits / temperature.

    For cross_entropy, the caller still has to subtract the label's one-hot term.
    """
    p, q = tl.exp(log_p), tl.exp(log_q)
    d = q
    if NAME == "forward_kl":
        d = mass * q - p
    if NAME == "reverse_kl":
        d = q * (log_q - log_p - a)
    if NAME == "jensen_shannon":
        d = (1 - beta) * q * (log_q - _log_mixture(p, q, beta) - b)
    if NAME == "total_variation":
        d = q * (b - _below(p, q))
    if NAME == "neg_log_alpha":
        d = q * (b - _below(p, q)) / _at_least(alpha, TINY)
    if NAME == "lk_hybrid":
        weight = tl.exp(-eta * alpha)
        d = weight * (mass * q - p) + (1 - weight) * q * (b - _below(p, q))
    return d


@triton.jit
def _slope(z, inverse_cap):
    """The derivative of cap * tanh(logit / cap) at the capped logit z."""
    capped = _at_least(z * inverse_cap, -1.0)
    return 1 - capped * capped


@triton.jit
def _log_sum_exp(row_ptr, width, inverse_temperature, BLOCK: tl.constexpr):
    """Return (log sum exp, largest logit, first column with the largest logit) of a row."""
    # Online softmax (arXiv 1805.02867) needs only one pass: a new maximum rescales the sum so far.
    largest, total, at = -2e30, 0.0, 0  # below every logit
    for start in range(0, width, BLOCK):
        z = _load(row_ptr, start + tl.arange(0, BLOCK), width, inverse_temperature)
        tile_largest, tile_at = tl.max(z, 0, return_indices=True)
        # `>` and the left tie-breaking of `tl.max` make the first of several equal logits win.
        at = tl.where(tile_largest > largest, start + tile_at, at)
        new_largest = tl.maximum(largest, tile_largest)
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(z - new_largest), 0)
        largest = new_largest
    return largest + tl.log(total), largest, at


@triton.jit
def _store_values(values_ptr, row, num_rows, value, alpha, alpha_greedy):
    tl.store(values_ptr + row, value)
    tl.store(values_ptr + num_rows + row, alpha)
    tl.store(values_ptr + 2 * num_rows + row, alpha_greedy)


@triton.jit
def target_rows(
    logits_ptr,  # [C, V]
    ids_ptr,  # [W], the target id of every draft id; unused unless REDUCED
    kept_ptr,  # [C, W], gets the logits of the draft's ids if REDUCED
    sums_ptr,  # [2, C], gets the log sum exp over V, and p's mass on the draft's ids
    num_rows,
    width,
    draft_width,
    inverse_temperature,
    REDUCED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * width
    log_sum, _, _ = _log_sum_exp(row_ptr, width, inverse_temperature, BLOCK)
    mass = 1.0
    if REDUCED:
        mass = 0.0
        for start in range(0, draft_width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < draft_width
            ids = tl.load(ids_ptr + columns, mask=inside, other=0)
            z = tl.load(row_ptr + ids, mask=inside, other=float("-inf"))
            tl.store(kept_ptr + row * draft_width + columns, z, mask=inside)
            scaled = _at_least(z.to(tl.float32) * inverse_temperature, FAR_BELOW)
            mass += tl.sum(tl.exp(_at_least(scaled - log_sum, LOG_ZERO)), 0)
    tl.store(sums_ptr + row, log_sum)
    tl.store(sums_ptr + num_rows + row, mass)


@triton.jit
def draft_rows(
    logits_ptr,  # [M, W], becomes scale * gradient
    target_ptr,  # [C, W], the target's logits on the draft's ids
    sums_ptr,  # [2, C], of `target_rows`
    # [M], the draft rows sorted by target row, so that concurrent programs read the same target row
    order_ptr,
    place_ptr,  # [M], the target row of each draft row
    scale_ptr,  # [M]
    label_ptr,  # [C], column of the label, or -1; only for cross_entropy
    values_ptr,  # [3, M], gets divergence, alpha and alpha_greedy
    num_rows,
    num_target_rows,
    width,
    inverse_temperature,
    beta,
    eta,
    inverse_cap,  # applies to logits / temperature; 0 if there is no cap
    NAME: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # int64, because row * width may pass 2**31: seven draft steps of 2,048 rows by 151,936 columns
    # do.
    row = tl.load(order_ptr + tl.program_id(0)).to(tl.int64)
    place = tl.load(place_ptr + row).to(tl.int64)
    row_ptr, p_ptr = logits_ptr + row * width, target_ptr + place * width
    log_sum_p, mass = tl.load(sums_ptr + place), tl.load(sums_ptr + num_target_rows + place)
    scale = tl.load(scale_ptr + row).to(tl.float32)
    label, z_label = -1, 0.0
    if NAME == "cross_entropy":
        # These are read before anything is overwritten: the reductions below come between them and
        # the stores.
        label = tl.load(label_ptr + place).to(tl.int32)
        z_label = _load(row_ptr, tl.maximum(label, 0), width, inverse_temperature)
    log_sum_q, _, best = _log_sum_exp(row_ptr, width, inverse_temperature, BLOCK)

    alpha, a, b = 0.0, 0.0, 0.0
    # The gradients of KL and cross_entropy need no sums, so the next loop over both rows is their
    # only one.
    if NAME != "forward_kl" and NAME != "cross_entropy":
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            log_q = _at_least(
                _load(row_ptr, columns, width, inverse_temperature) - log_sum_q, LOG_ZERO
            )
            log_p = _at_least(
                _load(p_ptr, columns, width, inverse_temperature) - log_sum_p, LOG_ZERO
            )
            tile_alpha, tile_a, tile_b = _sums(log_p, log_q, beta, NAME)
            alpha, a, b = alpha + tile_alpha, a + tile_a, b + tile_b
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = _load(row_ptr, columns, width, inverse_temperature)
        log_q = _at_least(z - log_sum_q, LOG_ZERO)
        log_p = _at_least(_load(p_ptr, columns, width, inverse_temperature) - log_sum_p, LOG_ZERO)
        d = _gradient(log_p, log_q, mass, alpha, a, b, beta, eta, NAME)
        if NAME == "forward_kl" or NAME == "cross_entropy":
            tile_alpha, tile_a, tile_b = _sums(log_p, log_q, beta, NAME)
            alpha, a, b = alpha + tile_alpha, a + tile_a, b + tile_b
        if NAME == "cross_entropy":
            d = tl.where(label >= 0, d - tl.where(columns == label, 1.0, 0.0), 0.0)
        d *= _slope(z, inverse_cap)
        tl.store(
            row_ptr + columns, (scale * d).to(logits_ptr.dtype.element_ty), mask=columns < width
        )

    value = _value(mass, alpha, a, b, beta, eta, NAME)
    if NAME == "cross_entropy":
        value = tl.where(label >= 0, -_at_least(z_label - log_sum_q, LOG_ZERO), 0.0)
    # p is only read, so this may come after the stores to q's row.
    z_best = _load(p_ptr, best, width, inverse_temperature)
    _store_values(
        values_ptr, row, num_rows, value, alpha, tl.exp(_at_least(z_best - log_sum_p, LOG_ZERO))
    )


@triton.jit
def top_k_rows(
    logits_ptr,  # [M, W], becomes scale * gradient
    columns_ptr,  # [C, K], the draft's column of each kept id, or -1
    log_p_ptr,  # [C, K + 1], the kept ids and the tail
    place_ptr,  # [M], the target row of each draft row
    scale_ptr,  # [M]
    label_ptr,  # [C], column of the label, or -1; only for cross_entropy
    values_ptr,  # [3, M], gets divergence, alpha and alpha_greedy
    num_rows,
    width,
    num_kept,
    beta,
    eta,
    inverse_cap,
    NAME: tl.constexpr,
    BLOCK: tl.constexpr,
    OUTCOMES: tl.constexpr,  # a power of 2, at least K + 1
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(place_ptr + row).to(tl.int64)
    row_ptr = logits_ptr + row * width
    scale = tl.load(scale_ptr + row).to(tl.float32)
    label, z_label = -1, 0.0
    if NAME == "cross_entropy":
        label = tl.load(label_ptr + place).to(tl.int32)
        z_label = _load(row_ptr, tl.maximum(label, 0), width, 1.0)

    # Remove the kept ids' logits from the row. The rest is the tail.
    lane = tl.arange(0, OUTCOMES)
    kept = tl.load(columns_ptr + place * num_kept + lane, mask=lane < num_kept, other=-1).to(
        tl.int32
    )
    z_kept = tl.load(row_ptr + kept, mask=kept >= 0, other=float("-inf")).to(tl.float32)
    z_kept = _at_least(z_kept, FAR_BELOW)
    tl.debug_barrier()  # wait, because several threads use the same lane
    nothing = tl.full(kept.shape, float("-inf"), tl.float32).to(logits_ptr.dtype.element_ty)
    tl.store(row_ptr + kept, nothing, mask=kept >= 0)
    tl.debug_barrier()
    z_tail, best_z, best = _log_sum_exp(row_ptr, width, 1.0, BLOCK)
    z_tail = _at_least(z_tail, FAR_BELOW)

    z = tl.where(lane == num_kept, z_tail, z_kept)
    largest = tl.max(z, 0)
    log_sum = largest + tl.log(tl.sum(tl.exp(z - largest), 0))
    log_q = _at_least(z - log_sum, LOG_ZERO)
    log_p = tl.load(
        log_p_ptr + place * (num_kept + 1) + lane, mask=lane <= num_kept, other=LOG_ZERO
    ).to(tl.float32)
    mass = tl.sum(tl.exp(log_p), 0)
    alpha, a, b = _sums(log_p, log_q, beta, NAME)
    d = _gradient(log_p, log_q, mass, alpha, a, b, beta, eta, NAME)
    d_tail = tl.sum(tl.where(lane == num_kept, d, 0.0), 0)

    # The tail's gradient is distributed over the ids by their share of the tail, which is 0 for a
    # kept id.
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        # If no id is left for the tail, q of the tail and d_tail are 0.
        z_row = _load(row_ptr, columns, width, 1.0)
        d_row = tl.exp(z_row - z_tail) * d_tail
        if NAME == "cross_entropy":
            d_row = tl.where(label >= 0, d_row - tl.where(columns == label, 1.0, 0.0), 0.0)
        d_row = (scale * d_row * _slope(z_row, inverse_cap)).to(logits_ptr.dtype.element_ty)
        tl.store(row_ptr + columns, d_row, mask=columns < width)
    tl.debug_barrier()
    if NAME == "cross_entropy":
        d = tl.where(label >= 0, d - tl.where(kept == label, 1.0, 0.0), 0.0)
    d *= _slope(z_kept, inverse_cap)
    tl.store(row_ptr + kept, (scale * d).to(logits_ptr.dtype.element_ty), mask=kept >= 0)

    value = _value(mass, alpha, a, b, beta, eta, NAME)
    if NAME == "cross_entropy":
        value = tl.where(label >= 0, -_at_least(z_label - log_sum, LOG_ZERO), 0.0)
    # The draft's token is the argmax, and the first of equal ones. If it is in the tail, its p is
    # unknown and counts as 0.
    best_kept = tl.max(z_kept, 0)
    first = tl.min(tl.where((z_kept == best_kept) & (kept >= 0), kept, width), 0)
    is_kept = (best_kept > best_z) | ((best_kept == best_z) & (first < best))
    greedy = tl.sum(tl.where((kept == first) & (kept >= 0), tl.exp(log_p), 0.0), 0)
    _store_values(values_ptr, row, num_rows, value, alpha, tl.where(is_kept, greedy, 0.0))
