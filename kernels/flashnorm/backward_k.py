"""FlashNormAttention backward, the part that belongs to the keys and values. With g, s, p and t as in `backward_q`:

    dv = p^T g;   dk = scale * t^T qn

Products are formed transposed, [keys, queries], so that p^T and t^T come out in the layout in which the next product
wants its left operand. q is normalised again on its way from memory to shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recsys_norm.kernels.flashnorm.common import PER_HEAD, load_norm, standardized, vector
from recsys_norm.kernels.flashnorm.streamed import SOFTMAX
from recsys_norm.kernels.gdpa.common import in_window, load_tile, operand, sequence_bounds, store_tile, zero_rows
from recsys_norm.kernels.gdpa.elementwise import activate_with_slope

SIZES = [
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "g_token", "g_head", "part",
    "batch", "all_heads", "first_head", "heads", "splits", "key_blocks", "queries", "keys_total", "width", "max_keys",
    "scale", "left", "right",
]  # fmt: skip
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=SIZES)
def backward_k(
    q_ptr, k_ptr, v_ptr, g_ptr, dk_ptr, dv_ptr,  # dk, dv [splits, keys_total, all_heads, width], contiguous
    weight_ptr, bias_ptr, mean_ptr, rstd_ptr, lse_ptr, q_offsets_ptr, k_offsets_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, part,  # strides; part: of splits, in elements
    batch, all_heads, first_head, heads, splits, key_blocks, queries, keys_total, width, max_keys, scale, left, right,
    ACT: tl.constexpr, MASKED: tl.constexpr,
    PRE: tl.constexpr, PRE_MEAN: tl.constexpr, PRE_WEIGHT: tl.constexpr, PRE_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr, EVEN: tl.constexpr,
    SHIFT: tl.constexpr, FAST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program keeps a block of keys of one head and streams every `splits`-th block of the queries that see them."""
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
    column = head * width
    first_base = q_ptr + start * q_token
    q_base = first_base + head.to(tl.int64) * q_head
    affine = column
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
        q = load_tile(q_base, m, q_len, q_token, cols, width, EVEN, UPCAST)
        g = load_tile(g_base, m, q_len, g_token, cols, width, EVEN, UPCAST)
        if PRE != 0:
            at = start + m
            if PRE == PER_HEAD:
                at = at * all_heads + head
            first, mean, rstd = load_norm(mean_ptr, rstd_ptr, first_base, m, q_len, at, q_token, PRE_MEAN, SHIFT)
            q = standardized(q.to(tl.float32), first, mean, rstd, PRE_MEAN, SHIFT)
            if PRE_WEIGHT or not EVEN:
                q = q * gamma
            if PRE_BIAS:
                q = q + beta
            q = operand(q, k, UPCAST)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(g), input_precision=PRECISION)
        if ACT == SOFTMAX:
            live = m < q_len
            at = (start + m) * all_heads + head
            lse = tl.load(lse_ptr + at, mask=live, other=0.0)
            delta = tl.load(lse_ptr + tl.cast(queries, tl.int64) * all_heads + at, mask=live, other=0.0)
            p = tl.exp2(s * (scale * _LOG2E) - lse[None, :])
            t = p * (dp - delta[None, :])
        else:
            p, slope = activate_with_slope(s * scale, ACT, FAST)
            t = dp * slope
        if MASKED:
            allowed = in_window(m[None, :], n[:, None], left, right)
            p = tl.where(allowed, p, 0.0)
            t = tl.where(allowed, t, 0.0)
        dv = tl.dot(operand(p, g, UPCAST), g, dv, input_precision=PRECISION)
        dk = tl.dot(operand(t, q, UPCAST), q, dk, input_precision=PRECISION)
    # Computed anew, so that nothing but the accumulators lives through the loop.
    k_start, k_len = sequence_bounds(k_offsets_ptr, b)
    split = tl.program_id(0) // heads % splits
    n = key_block * BLOCK_N + tl.arange(0, BLOCK_N)
    place = split.to(tl.int64) * part + head * width + k_start * row
    store_tile(dk_ptr + place, dk * scale, n, k_len, row, cols, width, EVEN)
    store_tile(dv_ptr + place, dv, n, k_len, row, cols, width, EVEN)
    total = tl.load(k_offsets_ptr + batch).to(tl.int64)
    offset = split.to(tl.int64) * part + head * width
    worker = b * key_blocks + key_block
    zero_rows(dk_ptr + offset, total, keys_total, worker, batch * key_blocks, row, cols, width, BLOCK_M, EVEN)
    zero_rows(dv_ptr + offset, total, keys_total, worker, batch * key_blocks, row, cols, width, BLOCK_M, EVEN)
