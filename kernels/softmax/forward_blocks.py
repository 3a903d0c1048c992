"""The forward of forward.py with keys and values through tensor descriptors (TMA), for widths that are powers of two."""

from __future__ import annotations

import triton
import triton.language as tl

from recsys_norm.kernels.gdpa.common import in_window, load_tile, sequence_bounds, store_tile, zero_rows
from recsys_norm.kernels.softmax.forward import absorb, log_sum_exp, zero_values

_LOG2E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-3.0e38)
_SIZES = [
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "o_token", "o_head",
    "batch", "heads", "blocks", "queries", "max_keys", "scale", "left", "right",
]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def forward_blocks(
    k_blocks, v_blocks,  # descriptors of [rows, columns from the first head's first to the last head's last]
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, q_offsets_ptr, k_offsets_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head,  # strides, in units of VEC elements
    batch, heads, blocks, queries, max_keys, scale, left, right,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    VEC: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """As `forward`. A block of keys that the sequence's end cuts would bring rows of the next sequence along, and 0 times
    what they hold may be NaN: it is loaded row by row, in front of the others, so that its latency hides behind that of
    the queries."""
    head = tl.program_id(0) % heads
    block = tl.program_id(0) // heads % blocks
    b = tl.program_id(0) // heads // blocks
    q_start, q_len = sequence_bounds(q_offsets_ptr, b)
    k_start, k_len = sequence_bounds(k_offsets_ptr, b)
    q_token, k_token, v_token, o_token = q_token * VEC, k_token * VEC, v_token * VEC, o_token * VEC
    k_column = head * k_head * VEC
    v_column = head * v_head * VEC
    cols = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, BLOCK_N)
    o_ptr += head.to(tl.int64) * o_head * VEC
    lse_ptr += head.to(tl.int64) * queries
    end = tl.load(q_offsets_ptr + batch).to(tl.int64)
    zero_rows(o_ptr, end, queries, b * blocks + block, batch * blocks, o_token, cols, BLOCK_D, BLOCK_M, True)
    zero_values(lse_ptr, end, queries, b * blocks + block, batch * blocks, BLOCK_M)
    first = block * BLOCK_M
    if first >= q_len:
        return
    k_len = tl.minimum(k_len, max_keys)
    whole = k_len // BLOCK_N * BLOCK_N
    lowest = 0
    highest = k_len
    if MASKED:
        lowest = tl.maximum(first - left, 0) // BLOCK_N * BLOCK_N
        highest = tl.minimum(k_len, first + BLOCK_M + right)
    rows = first + tl.arange(0, BLOCK_M)
    q_base = q_ptr + head.to(tl.int64) * q_head * VEC + q_start * q_token
    q = load_tile(q_base, rows, q_len, q_token, cols, BLOCK_D, True, UPCAST)
    tail = whole + keys
    tail_end = tl.where(highest > whole, k_len, 0)
    k_base = k_ptr + head.to(tl.int64) * k_head * VEC + k_start * k_token
    v_base = v_ptr + head.to(tl.int64) * v_head * VEC + k_start * v_token
    k_tail = load_tile(k_base, tail, tail_end, k_token, cols, BLOCK_D, True, UPCAST)
    v_tail = load_tile(v_base, tail, tail_end, v_token, cols, BLOCK_D, True, UPCAST)
    o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], _LOWEST, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    factor = scale * _LOG2E
    for _ in tl.range(0, (highest > tl.maximum(whole, lowest)).to(tl.int32), num_stages=1):
        s = tl.dot(q, tl.trans(k_tail))
        attends = tail[None, :] < k_len
        if MASKED:
            attends = attends & in_window(rows[:, None], tail[None, :], left, right)
        s = tl.where(attends, s, float("-inf"))
        o, peak, weight = absorb(s, v_tail, o, peak, weight, factor, UPCAST)
    k_row = k_start.to(tl.int32)
    for start in tl.range(lowest, tl.minimum(whole, highest), BLOCK_N):
        k = k_blocks.load([k_row + start, k_column])
        v = v_blocks.load([k_row + start, v_column])
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        s = tl.dot(q, tl.trans(k))
        if MASKED:
            s = tl.where(in_window(rows[:, None], (start + keys)[None, :], left, right), s, float("-inf"))
        o, peak, weight = absorb(s, v, o, peak, weight, factor, UPCAST)
    o, lse = log_sum_exp(o, peak, weight, scale)
    store_tile(o_ptr + q_start * o_token, o, rows, q_len, o_token, cols, BLOCK_D, True)
    tl.store(lse_ptr + q_start + rows, lse, mask=rows < q_len)
