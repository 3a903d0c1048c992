"""FlashNormAttention backward, per head. With qn = norm(q), g the gradient at z (the post-norm's backward),
s = scale * qn k^T, p = act(s) and t = (g v^T) * act'(s):

    dv = p^T g;   dk = scale * t^T qn;   dqn = scale * t k

qn is made again from q on its way to shared memory. The inner residual's part of the gradient, g, joins in the
pre-norm's backward and not here: a tile that feeds both asynchronous products and registers gets one buffer too few
from Triton's pipeliner. For softmax t = p * (g v^T - delta), p = 2^(s log2(e) - top) * inverse; `backward_q` makes the
row vectors for `backward_k`. Products that make dk and dv are formed transposed, [keys, queries], so that p^T and t^T
come out in the layout in which the next product wants its left operand. There are no atomics: each row of a gradient is
written by one program, or as one partial sum per split, added up in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recsys_norm.kernels.activations import activate_with_slope
from recsys_norm.kernels.flashnorm.common import PER_HEAD, load_normed, vector
from recsys_norm.kernels.flashnorm.streamed import LOG2E, SOFTMAX, gradient, softmax_rows
from recsys_norm.kernels.gdpa.common import in_window, load_tile, operand, sequence_bounds, store_tile, zero_rows

SIZES = [
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "g_token", "g_head", "part",
    "batch", "all_heads", "first_head", "heads", "splits", "key_blocks", "queries", "keys_total", "width", "max_keys",
    "scale", "left", "right",
]  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def backward_resident(
    q_ptr, k_ptr, v_ptr, g_ptr, dq_ptr, dk_ptr, dv_ptr,  # all three contiguous; dk, dv [splits, keys_total, ..]
    weight_ptr, bias_ptr, mean_ptr, rstd_ptr, rows_ptr, q_offsets_ptr, k_offsets_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head,  # strides, in units of VEC elements
    part, batch, all_heads, first_head, heads, splits, key_blocks, queries, keys_total, width, max_keys,
    scale, left, right,
    ACT: tl.constexpr, MASKED: tl.constexpr,
    PRE: tl.constexpr, PRE_MEAN: tl.constexpr, PRE_WEIGHT: tl.constexpr, PRE_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr, EVEN: tl.constexpr,
    SHIFT: tl.constexpr, FAST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Every sequence has at most BLOCK_N keys: one pass makes all three gradients. A program keeps one head's keys,
    values and their gradients on chip and walks every `splits`-th block of the sequence's queries. part: elements from
    one split's dk to the next."""
    head = first_head + tl.program_id(0) % heads
    split = tl.program_id(0) // heads % splits
    b = tl.program_id(0) // heads // splits
    start, q_len = sequence_bounds(q_offsets_ptr, b)
    k_start, k_len = sequence_bounds(k_offsets_ptr, b)
    q_token, k_token, v_token, g_token = q_token * VEC, k_token * VEC, v_token * VEC, g_token * VEC
    q_head, k_head, v_head, g_head = q_head * VEC, k_head * VEC, v_head * VEC, g_head * VEC
    width = width * VEC
    row = all_heads * width
    cols = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_M)
    key_rows = tl.arange(0, BLOCK_N)
    first_base = q_ptr + start * q_token
    q_base = first_base + head.to(tl.int64) * q_head
    affine = head * width
    if PRE == PER_HEAD:
        first_base = q_base
        affine = 0
    g_base = g_ptr + head.to(tl.int64) * g_head + start * g_token
    dq_base = dq_ptr + start * row + head * width
    gamma = vector(weight_ptr, affine, cols, width, PRE_WEIGHT, 1.0)
    beta = vector(bias_ptr, affine, cols, width, PRE_BIAS, 0.0)
    k_len = tl.minimum(k_len, max_keys)
    k_base = k_ptr + head.to(tl.int64) * k_head + k_start * k_token
    v_base = v_ptr + head.to(tl.int64) * v_head + k_start * v_token
    k = load_tile(k_base, key_rows, k_len, k_token, cols, width, EVEN, UPCAST)
    v = load_tile(v_base, key_rows, k_len, v_token, cols, width, EVEN, UPCAST)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for begin in tl.range(split * BLOCK_M, q_len, splits * BLOCK_M):
        m = begin + rows
        qn = load_normed(
            q_base, first_base, mean_ptr, rstd_ptr, gamma, beta, start, m, q_len, q_token, all_heads, head, cols, width,
            PRE, PRE_MEAN, PRE_WEIGHT, PRE_BIAS, EVEN, SHIFT, UPCAST,
        )  # fmt: skip
        g = load_tile(g_base, m, q_len, g_token, cols, width, EVEN, UPCAST)
        s = tl.dot(k, tl.trans(qn), input_precision=PRECISION) * scale
        dp = tl.dot(v, tl.trans(g), input_precision=PRECISION)
        p, slope = activate_with_slope(s, ACT, FAST)
        t = dp * slope
        if MASKED:
            allowed = in_window(m[None, :], key_rows[:, None], left, right)
            p = tl.where(allowed, p, 0.0)
            t = tl.where(allowed, t, 0.0)
        dv = tl.dot(operand(p, g, UPCAST), g, dv, input_precision=PRECISION)
        t = operand(t, qn, UPCAST)
        dk = tl.dot(t, qn, dk, input_precision=PRECISION)
        if (
            BLOCK_D >= 64
        ):  # t^T k would need the transposed t back in registers; a product has at least 64 rows on Hopper
            dq = tl.trans(tl.dot(tl.trans(k), t, input_precision=PRECISION)) * scale
        else:
            dq = tl.dot(tl.trans(t), k, input_precision=PRECISION) * scale
        store_tile(dq_base, dq, m, q_len, row, cols, width, EVEN)
    # What follows is computed anew from here on, so that nothing but the accumulators lives through the loop.
    k_start, k_len = sequence_bounds(k_offsets_ptr, b)
    split = tl.program_id(0) // heads % splits
    column = head * width
    offset = split.to(tl.int64) * part + column
    key_rows = tl.arange(0, BLOCK_N)
    store_tile(dk_ptr + offset + k_start * row, dk * scale, key_rows, k_len, row, cols, width, EVEN)
    store_tile(dv_ptr + offset + k_start * row, dv, key_rows, k_len, row, cols, width, EVEN)
    q_total = tl.load(q_offsets_ptr + batch).to(tl.int64)
    k_total = tl.load(k_offsets_ptr + batch).to(tl.int64)
    worker = b * splits + split
    zero_rows(dq_ptr + column, q_total, queries, worker, batch * splits, row, cols, width, BLOCK_M, EVEN)
    zero_rows(dk_ptr + offset, k_total, keys_total, b, batch, row, cols, width, BLOCK_M, EVEN)
    zero_rows(dv_ptr + offset, k_total, keys_total, b, batch, row, cols, width, BLOCK_M, EVEN)


@triton.jit(do_not_specialize=SIZES)
def backward_q(
    q_ptr, k_ptr, v_ptr, g_ptr, dq_ptr, dk_ptr, dv_ptr,
    weight_ptr, bias_ptr, mean_ptr, rstd_ptr, rows_ptr, q_offsets_ptr, k_offsets_ptr,  # rows [3, queries, all_heads]
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head,
    part, batch, all_heads, first_head, heads, splits, key_blocks, queries, keys_total, width, max_keys,
    scale, left, right,
    ACT: tl.constexpr, MASKED: tl.constexpr,
    PRE: tl.constexpr, PRE_MEAN: tl.constexpr, PRE_WEIGHT: tl.constexpr, PRE_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr, EVEN: tl.constexpr,
    SHIFT: tl.constexpr, FAST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dqn for any number of keys: a program keeps a block of queries and streams keys and values (`splits` is the
    number of programs per sequence and head)."""
    head = first_head + tl.program_id(0) % heads
    split = tl.program_id(0) // heads % splits
    b = tl.program_id(0) // heads // splits
    start, q_len = sequence_bounds(q_offsets_ptr, b)
    k_start, k_len = sequence_bounds(k_offsets_ptr, b)
    q_token, k_token, v_token, g_token = q_token * VEC, k_token * VEC, v_token * VEC, g_token * VEC
    q_head, k_head, v_head, g_head = q_head * VEC, k_head * VEC, v_head * VEC, g_head * VEC
    width = width * VEC
    row = all_heads * width
    cols = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_M)
    total = tl.load(q_offsets_ptr + batch).to(tl.int64)
    column = head * width
    worker = b * splits + split
    zero_rows(dq_ptr + column, total, queries, worker, batch * splits, row, cols, width, BLOCK_M, EVEN)
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
    k_len = tl.minimum(k_len, max_keys)
    for begin in tl.range(split * BLOCK_M, q_len, splits * BLOCK_M, num_stages=1):
        m = begin + rows
        qn = load_normed(
            q_base, first_base, mean_ptr, rstd_ptr, gamma, beta, start, m, q_len, q_token, all_heads, head, cols, width,
            PRE, PRE_MEAN, PRE_WEIGHT, PRE_BIAS, EVEN, SHIFT, UPCAST,
        )  # fmt: skip
        g = load_tile(g_base, m, q_len, g_token, cols, width, EVEN, UPCAST)
        top = tl.zeros([BLOCK_M], tl.float32)
        inverse = top
        delta = top
        if ACT == SOFTMAX:
            top, inverse, delta = softmax_rows(
                qn, g, k_base, v_base, begin, m, k_len, k_token, v_token, cols, width, scale, left, right,
                MASKED, BLOCK_M, BLOCK_N, EVEN, UPCAST, PRECISION,
            )  # fmt: skip
            at = (start + m) * all_heads + head
            plane = tl.cast(queries, tl.int64) * all_heads
            tl.store(rows_ptr + at, top, mask=m < q_len)
            tl.store(rows_ptr + plane + at, inverse, mask=m < q_len)
            tl.store(rows_ptr + 2 * plane + at, delta, mask=m < q_len)
        dq = scale * gradient(
            qn, g, top, inverse, delta, k_base, v_base, begin, m, k_len, k_token, v_token, cols, width, scale,
            left, right, ACT, MASKED, BLOCK_M, BLOCK_N, BLOCK_D, EVEN, FAST, UPCAST, PRECISION,
        )  # fmt: skip
        store_tile(dq_ptr + start * row + column, dq, m, q_len, row, cols, width, EVEN)


@triton.jit(do_not_specialize=SIZES)
def backward_k(
    q_ptr, k_ptr, v_ptr, g_ptr, dq_ptr, dk_ptr, dv_ptr,
    weight_ptr, bias_ptr, mean_ptr, rstd_ptr, rows_ptr, q_offsets_ptr, k_offsets_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head,
    part, batch, all_heads, first_head, heads, splits, key_blocks, queries, keys_total, width, max_keys,
    scale, left, right,
    ACT: tl.constexpr, MASKED: tl.constexpr,
    PRE: tl.constexpr, PRE_MEAN: tl.constexpr, PRE_WEIGHT: tl.constexpr, PRE_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr, EVEN: tl.constexpr,
    SHIFT: tl.constexpr, FAST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv for any number of keys: a program keeps a block of keys of one head and streams every `splits`-th block
    of the queries that see them."""
    head = first_head + tl.program_id(0) % heads
    split = tl.program_id(0) // heads % splits
    key_block = tl.program_id(0) // heads // splits % key_blocks
    b = tl.program_id(0) // heads // splits // key_blocks
    start, q_len = sequence_bounds(q_offsets_ptr, b)
    k_start, k_len = sequence_bounds(k_offsets_ptr, b)
    q_token, k_token, v_token, g_token = q_token * VEC, k_token * VEC, v_token * VEC, g_token * VEC
    q_head, k_head, v_head, g_head = q_head * VEC, k_head * VEC, v_head * VEC, g_head * VEC
    width = width * VEC
    row = all_heads * width
    cols = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_M)
    n = key_block * BLOCK_N + tl.arange(0, BLOCK_N)
    first_base = q_ptr + start * q_token
    q_base = first_base + head.to(tl.int64) * q_head
    affine = head * width
    if PRE == PER_HEAD:
        first_base = q_base
        affine = 0
    g_base = g_ptr + head.to(tl.int64) * g_head + start * g_token
    gamma = vector(weight_ptr, affine, cols, width, PRE_WEIGHT, 1.0)
    beta = vector(bias_ptr, affine, cols, width, PRE_BIAS, 0.0)
    seen = tl.minimum(k_len, max_keys)
    k = load_tile(k_ptr + head.to(tl.int64) * k_head + k_start * k_token, n, seen, k_token, cols, width, EVEN, UPCAST)
    v = load_tile(v_ptr + head.to(tl.int64) * v_head + k_start * v_token, n, seen, v_token, cols, width, EVEN, UPCAST)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    lowest = split * BLOCK_M
    highest = q_len
    if MASKED:
        lowest += tl.maximum(key_block * BLOCK_N - right, 0) // BLOCK_M * BLOCK_M
        highest = tl.minimum(q_len, key_block * BLOCK_N + BLOCK_N + left)
    for begin in tl.range(lowest, highest, splits * BLOCK_M):
        m = begin + rows
        qn = load_normed(
            q_base, first_base, mean_ptr, rstd_ptr, gamma, beta, start, m, q_len, q_token, all_heads, head, cols, width,
            PRE, PRE_MEAN, PRE_WEIGHT, PRE_BIAS, EVEN, SHIFT, UPCAST,
        )  # fmt: skip
        g = load_tile(g_base, m, q_len, g_token, cols, width, EVEN, UPCAST)
        s = tl.dot(k, tl.trans(qn), input_precision=PRECISION) * scale
        dp = tl.dot(v, tl.trans(g), input_precision=PRECISION)
        if ACT == SOFTMAX:
            at = (start + m) * all_heads + head
            plane = tl.cast(queries, tl.int64) * all_heads
            top = tl.load(rows_ptr + at, mask=m < q_len, other=0.0)
            inverse = tl.load(rows_ptr + plane + at, mask=m < q_len, other=0.0)
            delta = tl.load(rows_ptr + 2 * plane + at, mask=m < q_len, other=0.0)
            p = tl.exp2(s * LOG2E - top[None, :]) * inverse[None, :]
            t = p * (dp - delta[None, :])
        else:
            p, slope = activate_with_slope(s, ACT, FAST)
            t = dp * slope
        if MASKED:
            allowed = in_window(m[None, :], n[:, None], left, right)
            p = tl.where(allowed, p, 0.0)
            t = tl.where(allowed, t, 0.0)
        dv = tl.dot(operand(p, g, UPCAST), g, dv, input_precision=PRECISION)
        dk = tl.dot(operand(t, qn, UPCAST), qn, dk, input_precision=PRECISION)
    # Computed anew, so that nothing but the accumulators lives through the loop.
    k_start, k_len = sequence_bounds(k_offsets_ptr, b)
    n = key_block * BLOCK_N + tl.arange(0, BLOCK_N)
    offset = (tl.program_id(0) // heads % splits).to(tl.int64) * part + head * width
    store_tile(dk_ptr + offset + k_start * row, dk * scale, n, k_len, row, cols, width, EVEN)
    store_tile(dv_ptr + offset + k_start * row, dv, n, k_len, row, cols, width, EVEN)
    total = tl.load(k_offsets_ptr + batch).to(tl.int64)
    worker = b * key_blocks + key_block
    zero_rows(dk_ptr + offset, total, keys_total, worker, batch * key_blocks, row, cols, width, BLOCK_M, EVEN)
    zero_rows(dv_ptr + offset, total, keys_total, worker, batch * key_blocks, row, cols, width, BLOCK_M, EVEN)
