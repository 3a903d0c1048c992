"""FlashNormAttention backward, the part that belongs to the queries. With qn = xhat * gamma + beta, s = scale * qn k^T,
p = act(s), g the gradient at o (the post-norm's backward) and t = (g v^T) * act'(s), all per head:

    dqn = scale * t k (+ g)
    dq = rstd * (gamma * dqn - mean(gamma * dqn) - xhat * mean(gamma * dqn * xhat))     means over the normalised row
    dgamma = sum_rows dqn * xhat;   dbeta = sum_rows dqn

without mean(gamma * dqn) for RMSNorm. The row sums need no product with the tile dqn:

    sum_c gamma dqn = sum_n t_n (scale k_n . gamma) (+ g . gamma)
    sum_c gamma dqn xhat = sum_n t_n (s_n - scale k_n . beta) (+ g . (qn - beta))
"""

from __future__ import annotations

import triton
import triton.language as tl

from recsys_norm.kernels.flashnorm.common import (
    ALL_HEADS,
    PER_HEAD,
    last_arrival,
    load_fresh,
    load_norm,
    load_parts,
    standardized,
    vector,
)
from recsys_norm.kernels.flashnorm.streamed import SOFTMAX, gradient, softmax_rows
from recsys_norm.kernels.gdpa.common import in_window, load_tile, operand, sequence_bounds, store_tile, zero_rows
from recsys_norm.kernels.gdpa.elementwise import activate_with_slope

SIZES = [
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "g_token", "g_head", "extra_token", "extra_head",
    "batch", "all_heads", "first_head", "heads", "splits", "blocks", "queries", "width", "max_keys",
    "scale", "left", "right",
]  # fmt: skip


@triton.jit
def load_block(
    q_base, g_base, first_base, mean_ptr, rstd_ptr, gamma, beta, start, m, limit, q_token, g_token, heads, head,
    cols, width, PRE: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    SUMS: tl.constexpr, EVEN: tl.constexpr, SHIFT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """(qn, g, first, mean, rstd of q, sum of g * gamma * xhat, sum of g * gamma) of rows m; the sums where SUMS."""
    q = load_tile(q_base, m, limit, q_token, cols, width, EVEN, UPCAST)
    g = load_tile(g_base, m, limit, g_token, cols, width, EVEN, UPCAST)
    sum_hat = tl.zeros([m.shape[0]], tl.float32)
    sum_plain = sum_hat
    first, mean, rstd = sum_hat, sum_hat, sum_hat
    qn = q
    if PRE != 0:
        at = start + m
        if PRE == PER_HEAD:
            at = at * heads + head
        first, mean, rstd = load_norm(mean_ptr, rstd_ptr, first_base, m, limit, at, q_token, HAS_MEAN, SHIFT)
        x = standardized(q.to(tl.float32), first, mean, rstd, HAS_MEAN, SHIFT)
        if HAS_WEIGHT or not EVEN:
            x = x * gamma
        if SUMS:
            sum_hat = tl.sum(g.to(tl.float32) * x, 1)
            if HAS_MEAN:
                sum_plain = tl.sum(g.to(tl.float32) * gamma, 1)
        if HAS_BIAS:
            x = x + beta
        qn = operand(x, q, UPCAST)
    return qn, g, first, mean, rstd, sum_hat, sum_plain


@triton.jit
def store_columns(
    columns_ptr, x, hat, block, row, column, cols, width, WEIGHT: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """The block's part of dgamma and dbeta, from dqn and xhat; rows past the end are 0 in dqn."""
    at = block * 2 * row + column + cols
    if WEIGHT:
        tl.store(columns_ptr + at, tl.sum(x * hat, 0), mask=cols < width)
    if BIAS:
        tl.store(columns_ptr + at + row, tl.sum(x, 0), mask=cols < width)


@triton.jit
def finish(
    q_ptr, dq_ptr, extra_ptr, weight_ptr, mean_ptr, rstd_ptr, part_ptr, columns_ptr, start, m, limit,
    q_token, q_head, extra_token, extra_head, block, heads, queries, width,
    HAS_MEAN: tl.constexpr, HAS_WEIGHT: tl.constexpr, EXTRA: tl.constexpr, SUM_WEIGHT: tl.constexpr,
    SUM_BIAS: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """dq of rows m from dqn, which every head has left in dq."""
    live = m < limit
    rows = start + m
    row = heads * width
    count = row.to(tl.float32)
    first, mean, rstd = load_norm(mean_ptr, rstd_ptr, q_ptr + start * q_token, m, limit, rows, q_token, HAS_MEAN, SHIFT)
    mean_hat = tl.sum(load_parts(part_ptr, rows, live, heads, HEADS), 1) / count
    mean_plain = mean_hat
    if HAS_MEAN:
        plain_ptr = part_ptr + tl.cast(queries, tl.int64) * heads
        mean_plain = tl.sum(load_parts(plain_ptr, rows, live, heads, HEADS), 1) / count
    strips = tl.cdiv(width, CHUNK)
    for i in tl.range(0, heads * strips, num_stages=1):  # strips of columns, for which the registers suffice
        h = i // strips
        cols = i % strips * CHUNK + tl.arange(0, CHUNK)
        column = start * row + h * width
        x = load_fresh(dq_ptr + column, m, limit, row, cols, width, EVEN)
        q = load_tile(q_ptr + start * q_token + q_head.to(tl.int64) * h, m, limit, q_token, cols, width, EVEN, True)
        if EXTRA:
            e_base = extra_ptr + start * extra_token + extra_head.to(tl.int64) * h
            more = load_tile(e_base, m, limit, extra_token, cols, width, EVEN, True)
        hat = standardized(q, first, mean, rstd, HAS_MEAN, SHIFT)
        store_columns(columns_ptr, x, hat, block, row, h * width, cols, width, SUM_WEIGHT, SUM_BIAS)
        if HAS_WEIGHT:
            x = x * vector(weight_ptr, h * width, cols, width, True, 1.0)
        x = x - hat * mean_hat[:, None]
        if HAS_MEAN:
            x = x - mean_plain[:, None]
        x = x * rstd[:, None]
        if EXTRA:
            x += more
        store_tile(dq_ptr + column, x, m, limit, row, cols, width, EVEN)


@triton.jit(do_not_specialize=SIZES)
def backward_q(
    q_ptr, k_ptr, v_ptr, g_ptr, extra_ptr, dq_ptr,  # dq [queries, all_heads, width], contiguous
    weight_ptr, bias_ptr, mean_ptr, rstd_ptr, part_ptr, columns_ptr, lse_ptr, count_ptr,
    q_offsets_ptr, k_offsets_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, extra_token, extra_head,  # in units of VEC
    batch, all_heads, first_head, heads, splits, blocks, queries, width, max_keys, scale, left, right,
    ACT: tl.constexpr, MASKED: tl.constexpr, RESIDENT: tl.constexpr,
    PRE: tl.constexpr, PRE_MEAN: tl.constexpr, PRE_WEIGHT: tl.constexpr, PRE_BIAS: tl.constexpr,
    INNER: tl.constexpr, EXTRA: tl.constexpr, SUM_WEIGHT: tl.constexpr, SUM_BIAS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr, EVEN: tl.constexpr,
    SHIFT: tl.constexpr, FAST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs as in `forward`. `extra` is added to dq at the end. columns: [block, 2, all_heads * width] partial sums
    of dgamma and dbeta, where block b's first is start // BLOCK_M + b, which no two sequences share. lse, of softmax:
    [2, queries, all_heads], what `streamed.softmax_rows` returns, for `backward_k`."""
    FOLDED: tl.constexpr = RESIDENT and PRE == ALL_HEADS  # row sums from the scores, not from the tile dqn
    CHUNK: tl.constexpr = min(BLOCK_D, 64)
    head = first_head + tl.program_id(0) % heads
    split = tl.program_id(0) // heads % splits
    b = tl.program_id(0) // heads // splits
    start, q_len = sequence_bounds(q_offsets_ptr, b)
    k_start, k_len = sequence_bounds(k_offsets_ptr, b)
    q_token, k_token, v_token, g_token = q_token * VEC, k_token * VEC, v_token * VEC, g_token * VEC
    q_head, k_head, v_head, g_head = q_head * VEC, k_head * VEC, v_head * VEC, g_head * VEC
    extra_token, extra_head = extra_token * VEC, extra_head * VEC
    width = width * VEC
    row = all_heads * width
    cols = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    total = tl.load(q_offsets_ptr + batch).to(tl.int64)
    column = head * width
    worker = b * splits + split
    zero_rows(dq_ptr + column, total, queries, worker, batch * splits, row, cols, width, BLOCK_M, EVEN)
    if split * BLOCK_M >= q_len:
        return
    k_len = tl.minimum(k_len, max_keys)
    first_base = q_ptr + start * q_token
    q_base = first_base + head.to(tl.int64) * q_head
    affine = column
    if PRE == PER_HEAD:
        first_base = q_base
        affine = 0
    g_base = g_ptr + head.to(tl.int64) * g_head + start * g_token
    k_base = k_ptr + head.to(tl.int64) * k_head + k_start * k_token
    v_base = v_ptr + head.to(tl.int64) * v_head + k_start * v_token
    gamma = vector(weight_ptr, affine, cols, width, PRE_WEIGHT, 1.0)
    beta = vector(bias_ptr, affine, cols, width, PRE_BIAS, 0.0)
    if RESIDENT:
        k = load_tile(k_base, keys, k_len, k_token, cols, width, EVEN, UPCAST)
        v = load_tile(v_base, keys, k_len, v_token, cols, width, EVEN, UPCAST)
    if FOLDED:
        # Two columns of a third product with t: what the mean of a layer norm and beta take off the row sums.
        k_gamma = tl.sum(k.to(tl.float32) * gamma, 1) * scale
        k_beta = tl.sum(k.to(tl.float32) * beta, 1) * scale
        side = tl.arange(0, 16)[None, :]
        k_sums = operand(tl.where(side == 0, k_gamma[:, None], tl.where(side == 1, k_beta[:, None], 0.0)), k, UPCAST)
    m = split * BLOCK_M + rows
    qn, g, first, mean, rstd, sum_hat, sum_plain = load_block(
        q_base, g_base, first_base, mean_ptr, rstd_ptr, gamma, beta, start, m, q_len, q_token, g_token, all_heads, head,
        cols, width, PRE, PRE_MEAN, PRE_WEIGHT, PRE_BIAS, INNER and FOLDED, EVEN, SHIFT, UPCAST,
    )  # fmt: skip
    for block in tl.range(split, tl.cdiv(q_len, BLOCK_M), splits, num_stages=1):
        m = block * BLOCK_M + rows
        if RESIDENT:
            s = tl.dot(qn, tl.trans(k), input_precision=PRECISION) * scale
            t = tl.dot(g, tl.trans(v), input_precision=PRECISION) * activate_with_slope(s, ACT, FAST)[1]
            if MASKED:
                t = tl.where(in_window(m[:, None], keys[None, :], left, right), t, 0.0)
            if FOLDED:
                sum_hat += tl.sum(t * s, 1)
            t = operand(t, k, UPCAST)
            if FOLDED and (PRE_MEAN or PRE_BIAS):
                taken = tl.dot(t, k_sums, input_precision=PRECISION)
                sum_hat -= tl.sum(tl.where(side == 1, taken, 0.0), 1)
                sum_plain += tl.sum(tl.where(side == 0, taken, 0.0), 1)
            x = tl.dot(t, k, input_precision=PRECISION)
        else:
            lse = tl.zeros([BLOCK_M], tl.float32)
            delta = lse
            if ACT == SOFTMAX:
                lse, delta = softmax_rows(
                    qn, g, k_base, v_base, block * BLOCK_M, m, k_len, k_token, v_token, cols, width, scale, left, right,
                    MASKED, BLOCK_M, BLOCK_N, EVEN, UPCAST, PRECISION,
                )  # fmt: skip
                at = (start + m) * all_heads + head
                tl.store(lse_ptr + at, lse, mask=m < q_len)
                tl.store(lse_ptr + tl.cast(queries, tl.int64) * all_heads + at, delta, mask=m < q_len)
            x = gradient(
                qn, g, lse, delta, k_base, v_base, block * BLOCK_M, m, k_len, k_token, v_token, cols, width, scale,
                left, right, ACT, MASKED, BLOCK_M, BLOCK_N, BLOCK_D, EVEN, FAST, UPCAST, PRECISION,
            )  # fmt: skip
        x = x * scale
        if INNER:  # read again (from L2): it would take registers all along
            x += load_tile(g_base, m, q_len, g_token, cols, width, EVEN, UPCAST).to(tl.float32)
        place = start * row + column
        own_block = start // BLOCK_M + b + block
        if PRE == 0:
            if EXTRA:
                e_base = extra_ptr + start * extra_token + head.to(tl.int64) * extra_head
                x += load_tile(e_base, m, q_len, extra_token, cols, width, EVEN, True)
            store_tile(dq_ptr + place, x, m, q_len, row, cols, width, EVEN)
        else:
            if not FOLDED:
                q = load_tile(q_base, m, q_len, q_token, cols, width, EVEN, UPCAST)
                hat = standardized(q.to(tl.float32), first, mean, rstd, PRE_MEAN, SHIFT)
                scaled = x * gamma
                sum_hat = tl.sum(scaled * hat, 1)
                if PRE_MEAN:
                    sum_plain = tl.sum(scaled, 1)
            if PRE == PER_HEAD:
                store_columns(columns_ptr, x, hat, own_block, row, column, cols, width, SUM_WEIGHT, SUM_BIAS)
                scaled = scaled - hat * (sum_hat / width.to(tl.float32))[:, None]
                if PRE_MEAN:
                    scaled = scaled - (sum_plain / width.to(tl.float32))[:, None]
                scaled = scaled * rstd[:, None]
                if EXTRA:
                    e_base = extra_ptr + start * extra_token + head.to(tl.int64) * extra_head
                    scaled += load_tile(e_base, m, q_len, extra_token, cols, width, EVEN, True)
                store_tile(dq_ptr + place, scaled, m, q_len, row, cols, width, EVEN)
            else:
                store_tile(dq_ptr + place, x, m, q_len, row, cols, width, EVEN)
                at = (start + m) * all_heads + head
                tl.store(part_ptr + at, sum_hat, mask=m < q_len)
                if PRE_MEAN:
                    tl.store(part_ptr + tl.cast(queries, tl.int64) * all_heads + at, sum_plain, mask=m < q_len)
                if last_arrival(count_ptr + b * blocks + block, all_heads):
                    finish(
                        q_ptr, dq_ptr, extra_ptr, weight_ptr, mean_ptr, rstd_ptr, part_ptr, columns_ptr, start, m,
                        q_len, q_token, q_head, extra_token, extra_head, own_block, all_heads, queries, width,
                        PRE_MEAN, PRE_WEIGHT, EXTRA, SUM_WEIGHT, SUM_BIAS, HEADS, CHUNK, EVEN, SHIFT,
                    )  # fmt: skip
        # Read and normalised here and not where it is used: there it would be in the layout of a product's left
        # operand, in which every thread needs 64 values of gamma and beta.
        m += splits * BLOCK_M
        qn, g, first, mean, rstd, sum_hat, sum_plain = load_block(
            q_base, g_base, first_base, mean_ptr, rstd_ptr, gamma, beta, start, m, q_len, q_token, g_token, all_heads,
            head, cols, width, PRE, PRE_MEAN, PRE_WEIGHT, PRE_BIAS, INNER and FOLDED, EVEN, SHIFT, UPCAST,
        )  # fmt: skip
