"""Backward kernels. With s = scale * q k^T, p = act(s), g = dO v^T (all per head):

    dV = p^T dO        t = g * act'(s)        dK = scale * t^T q        dQ = scale * t k

Products are formed transposed, [keys, queries], so that p^T and t^T come out of one product in the layout in which the
next one wants its left operand. There are no atomics: each gradient row is written by one program (or as one partial
sum per split, added up in a fixed order afterwards), so two runs agree to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recsys_norm.kernels.activations import activate_with_slope
from recsys_norm.kernels.gdpa.common import in_window, load_tile, operand, sequence_bounds, store_tile, zero_rows

_SIZES = [
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "g_token", "g_head",
    "dq_token", "dq_head", "dk_token", "dk_head", "dk_split",
    "batch", "heads", "splits", "queries", "keys", "width", "max_keys", "scale", "left", "right",
]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def backward_resident(
    q_ptr, k_ptr, v_ptr, g_ptr, dq_ptr, dk_ptr, dv_ptr, q_offsets_ptr, k_offsets_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head,  # strides, in units of VEC elements
    dq_token, dq_head, dk_token, dk_head, dk_split,  # dv has the strides of dk; dk_split counts elements
    batch, heads, splits, queries, keys, width, max_keys, scale, left, right,
    ACT: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    VEC: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Every sequence has at most BLOCK_N keys: one pass makes all three gradients. A program keeps one head's keys,
    values and their gradients on chip and walks every `splits`-th block of the sequence's queries; with more than one
    split, dk and dv are partial sums at multiples of dk_split."""
    split = tl.program_id(0) % splits
    head = tl.program_id(0) // splits % heads
    b = tl.program_id(0) // splits // heads
    q_start, q_len = sequence_bounds(q_offsets_ptr, b)
    k_start, k_len = sequence_bounds(k_offsets_ptr, b)
    q_token, k_token, v_token, g_token = q_token * VEC, k_token * VEC, v_token * VEC, g_token * VEC
    dq_token, dk_token = dq_token * VEC, dk_token * VEC
    width = width * VEC
    cols = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_M)
    key_rows = tl.arange(0, BLOCK_N)
    dq_ptr += head.to(tl.int64) * dq_head * VEC
    k_len = tl.minimum(k_len, max_keys)
    k_base = k_ptr + head.to(tl.int64) * k_head * VEC + k_start * k_token
    v_base = v_ptr + head.to(tl.int64) * v_head * VEC + k_start * v_token
    q_base = q_ptr + head.to(tl.int64) * q_head * VEC + q_start * q_token
    g_base = g_ptr + head.to(tl.int64) * g_head * VEC + q_start * g_token
    dq_base = dq_ptr + q_start * dq_token
    k = load_tile(k_base, key_rows, k_len, k_token, cols, width, EVEN, UPCAST)
    v = load_tile(v_base, key_rows, k_len, v_token, cols, width, EVEN, UPCAST)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for first in tl.range(split * BLOCK_M, q_len, splits * BLOCK_M):
        m = first + rows
        q = load_tile(q_base, m, q_len, q_token, cols, width, EVEN, UPCAST)
        g = load_tile(g_base, m, q_len, g_token, cols, width, EVEN, UPCAST)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
        dp = tl.dot(v, tl.trans(g), input_precision=PRECISION)
        p, slope = activate_with_slope(s, ACT, FAST)
        t = dp * slope
        if MASKED:
            allowed = in_window(m[None, :], key_rows[:, None], left, right)
            p = tl.where(allowed, p, 0.0)
            t = tl.where(allowed, t, 0.0)
        dv = tl.dot(operand(p, g, UPCAST), g, dv, input_precision=PRECISION)
        t = operand(t, q, UPCAST)
        dk = tl.dot(t, q, dk, input_precision=PRECISION)
        if (
            BLOCK_D >= 64
        ):  # t^T k would need the transposed t back in registers; a product has at least 64 rows on Hopper
            dq = tl.trans(tl.dot(tl.trans(k), t, input_precision=PRECISION)) * scale
        else:
            dq = tl.dot(tl.trans(t), k, input_precision=PRECISION) * scale
        store_tile(dq_base, dq, m, q_len, dq_token, cols, width, EVEN)
    # What follows is computed anew from here on, so that nothing but the accumulators lives through the loop.
    k_start, k_len = sequence_bounds(k_offsets_ptr, b)
    k_offset = head.to(tl.int64) * dk_head * VEC + split.to(tl.int64) * dk_split
    key_rows = tl.arange(0, BLOCK_N)
    store_tile(dk_ptr + k_offset + k_start * dk_token, dk * scale, key_rows, k_len, dk_token, cols, width, EVEN)
    store_tile(dv_ptr + k_offset + k_start * dk_token, dv, key_rows, k_len, dk_token, cols, width, EVEN)
    q_total = tl.load(q_offsets_ptr + batch).to(tl.int64)
    k_total = tl.load(k_offsets_ptr + batch).to(tl.int64)
    worker = b * splits + split
    zero_rows(dq_ptr, q_total, queries, worker, batch * splits, dq_token, cols, width, BLOCK_M, EVEN)
    zero_rows(dk_ptr + k_offset, k_total, keys, b, batch, dk_token, cols, width, BLOCK_M, EVEN)
    zero_rows(dv_ptr + k_offset, k_total, keys, b, batch, dk_token, cols, width, BLOCK_M, EVEN)


@triton.jit(do_not_specialize=_SIZES)
def backward_dq(
    q_ptr, k_ptr, v_ptr, g_ptr, dq_ptr, dk_ptr, dv_ptr, q_offsets_ptr, k_offsets_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head,
    dq_token, dq_head, dk_token, dk_head, dk_split,
    batch, heads, splits, queries, keys, width, max_keys, scale, left, right,
    ACT: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    VEC: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq for any number of keys: a program keeps a block of queries and streams keys and values (`splits` is the number
    of programs per sequence and head)."""
    split = tl.program_id(0) % splits
    head = tl.program_id(0) // splits % heads
    b = tl.program_id(0) // splits // heads
    q_start, q_len = sequence_bounds(q_offsets_ptr, b)
    k_start, k_len = sequence_bounds(k_offsets_ptr, b)
    q_token, k_token, v_token = q_token * VEC, k_token * VEC, v_token * VEC
    g_token, dq_token = g_token * VEC, dq_token * VEC
    width = width * VEC
    cols = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_M)
    key_rows = tl.arange(0, BLOCK_N)
    dq_ptr += head.to(tl.int64) * dq_head * VEC
    total = tl.load(q_offsets_ptr + batch).to(tl.int64)
    zero_rows(dq_ptr, total, queries, b * splits + split, batch * splits, dq_token, cols, width, BLOCK_M, EVEN)
    k_base = k_ptr + head.to(tl.int64) * k_head * VEC + k_start * k_token
    v_base = v_ptr + head.to(tl.int64) * v_head * VEC + k_start * v_token
    q_base = q_ptr + head.to(tl.int64) * q_head * VEC + q_start * q_token
    g_base = g_ptr + head.to(tl.int64) * g_head * VEC + q_start * g_token
    dq_base = dq_ptr + q_start * dq_token
    k_len = tl.minimum(k_len, max_keys)
    for first in tl.range(split * BLOCK_M, q_len, splits * BLOCK_M, num_stages=1):
        m = first + rows
        q = load_tile(q_base, m, q_len, q_token, cols, width, EVEN, UPCAST)
        g = load_tile(g_base, m, q_len, g_token, cols, width, EVEN, UPCAST)
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        lowest = 0
        highest = k_len
        if MASKED:
            lowest = tl.maximum(first - left, 0) // BLOCK_N * BLOCK_N
            highest = tl.minimum(k_len, first + BLOCK_M + right)
        for start in tl.range(lowest, highest, BLOCK_N):
            n = start + key_rows
            k = load_tile(k_base, n, k_len, k_token, cols, width, EVEN, UPCAST)
            v = load_tile(v_base, n, k_len, v_token, cols, width, EVEN, UPCAST)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            dp = tl.dot(g, tl.trans(v), input_precision=PRECISION)
            t = dp * activate_with_slope(s, ACT, FAST)[1]
            if MASKED:
                t = tl.where(in_window(m[:, None], n[None, :], left, right), t, 0.0)
            dq = tl.dot(operand(t, k, UPCAST), k, dq, input_precision=PRECISION)
        store_tile(dq_base, dq * scale, m, q_len, dq_token, cols, width, EVEN)


@triton.jit(do_not_specialize=_SIZES)
def backward_dkdv(
    q_ptr, k_ptr, v_ptr, g_ptr, dq_ptr, dk_ptr, dv_ptr, q_offsets_ptr, k_offsets_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head,
    dq_token, dq_head, dk_token, dk_head, dk_split,
    batch, heads, splits, queries, keys, width, max_keys, scale, left, right,
    ACT: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    VEC: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv for any number of keys: a program keeps a block of keys and streams the queries that can see it
    (`splits` is the number of programs per sequence and head)."""
    split = tl.program_id(0) % splits
    head = tl.program_id(0) // splits % heads
    b = tl.program_id(0) // splits // heads
    q_start, q_len = sequence_bounds(q_offsets_ptr, b)
    k_start, k_len = sequence_bounds(k_offsets_ptr, b)
    q_token, k_token, v_token = q_token * VEC, k_token * VEC, v_token * VEC
    g_token, dk_token = g_token * VEC, dk_token * VEC
    width = width * VEC
    cols = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_M)
    key_rows = tl.arange(0, BLOCK_N)
    dk_ptr += head.to(tl.int64) * dk_head * VEC
    dv_ptr += head.to(tl.int64) * dk_head * VEC
    total = tl.load(k_offsets_ptr + batch).to(tl.int64)
    worker = b * splits + split
    zero_rows(dk_ptr, total, keys, worker, batch * splits, dk_token, cols, width, BLOCK_N, EVEN)
    zero_rows(dv_ptr, total, keys, worker, batch * splits, dk_token, cols, width, BLOCK_N, EVEN)
    k_base = k_ptr + head.to(tl.int64) * k_head * VEC + k_start * k_token
    v_base = v_ptr + head.to(tl.int64) * v_head * VEC + k_start * v_token
    q_base = q_ptr + head.to(tl.int64) * q_head * VEC + q_start * q_token
    g_base = g_ptr + head.to(tl.int64) * g_head * VEC + q_start * g_token
    k_len = tl.minimum(k_len, max_keys)
    for start in tl.range(split * BLOCK_N, k_len, splits * BLOCK_N, num_stages=1):
        n = start + key_rows
        k = load_tile(k_base, n, k_len, k_token, cols, width, EVEN, UPCAST)
        v = load_tile(v_base, n, k_len, v_token, cols, width, EVEN, UPCAST)
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        lowest = 0
        highest = q_len
        if MASKED:
            lowest = tl.maximum(start - right, 0) // BLOCK_M * BLOCK_M
            highest = tl.minimum(q_len, start + BLOCK_N + left)
        for first in tl.range(lowest, highest, BLOCK_M):
            m = first + rows
            q = load_tile(q_base, m, q_len, q_token, cols, width, EVEN, UPCAST)
            g = load_tile(g_base, m, q_len, g_token, cols, width, EVEN, UPCAST)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
            dp = tl.dot(v, tl.trans(g), input_precision=PRECISION)
            p, slope = activate_with_slope(s, ACT, FAST)
            t = dp * slope
            if MASKED:
                allowed = in_window(m[None, :], n[:, None], left, right)
                p = tl.where(allowed, p, 0.0)
                t = tl.where(allowed, t, 0.0)
            dv = tl.dot(operand(p, g, UPCAST), g, dv, input_precision=PRECISION)
            dk = tl.dot(operand(t, q, UPCAST), q, dk, input_precision=PRECISION)
        store_tile(dk_ptr + k_start * dk_token, dk * scale, n, k_len, dk_token, cols, width, EVEN)
        store_tile(dv_ptr + k_start * dk_token, dv, n, k_len, dk_token, cols, width, EVEN)
