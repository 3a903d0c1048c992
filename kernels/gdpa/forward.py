"""Forward kernels: o = act(scale * q k^T) v per sequence and head.

Padded keys are loaded as zeros in both k and v, and act(0) = 0, so they contribute exactly nothing. Rows past the last
sequence are written as zeros by the same launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recsys_norm.kernels.activations import activate
from recsys_norm.kernels.gdpa.common import in_window, load_tile, operand, sequence_bounds, store_tile, zero_rows

_SIZES = [
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "o_token", "o_head",
    "batch", "heads", "blocks", "queries", "width", "max_keys", "scale", "left", "right",
]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def forward_resident(
    q_ptr, k_ptr, v_ptr, o_ptr, q_offsets_ptr, k_offsets_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head,  # strides, in units of VEC elements
    batch, heads, blocks, queries, width, max_keys, scale, left, right,
    ACT: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    VEC: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Every sequence has at most BLOCK_N keys: a program keeps one head's keys and values on chip and walks every
    `blocks`-th block of the sequence's queries, so any query length is covered whatever `blocks` is."""
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks % heads
    b = tl.program_id(0) // blocks // heads
    q_start, q_len = sequence_bounds(q_offsets_ptr, b)
    k_start, k_len = sequence_bounds(k_offsets_ptr, b)
    q_token, k_token, v_token, o_token = q_token * VEC, k_token * VEC, v_token * VEC, o_token * VEC
    width = width * VEC
    cols = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    o_ptr += head.to(tl.int64) * o_head * VEC
    total = tl.load(q_offsets_ptr + batch).to(tl.int64)
    zero_rows(o_ptr, total, queries, b * blocks + block, batch * blocks, o_token, cols, width, BLOCK_M, EVEN)
    if block * BLOCK_M >= q_len:
        return
    k_base = k_ptr + head.to(tl.int64) * k_head * VEC + k_start * k_token
    v_base = v_ptr + head.to(tl.int64) * v_head * VEC + k_start * v_token
    q_base = q_ptr + head.to(tl.int64) * q_head * VEC + q_start * q_token
    o_base = o_ptr + q_start * o_token
    k_len = tl.minimum(k_len, max_keys)
    k = load_tile(k_base, keys, k_len, k_token, cols, width, EVEN, UPCAST)
    v = load_tile(v_base, keys, k_len, v_token, cols, width, EVEN, UPCAST)
    q = load_tile(q_base, block * BLOCK_M + rows, q_len, q_token, cols, width, EVEN, UPCAST)
    for first in tl.range(block * BLOCK_M, q_len, blocks * BLOCK_M, num_stages=1):
        # The next block is on its way in registers while this one is worked on: a third buffer in shared memory would
        # cost the second program per SM, and with two buffers the copy would only start when this block is done.
        following = first + blocks * BLOCK_M + rows
        q_next = load_tile(q_base, following, q_len, q_token, cols, width, EVEN, UPCAST)
        p = activate(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, ACT, FAST)
        if MASKED:
            p = tl.where(in_window(first + rows[:, None], keys[None, :], left, right), p, 0.0)
        o = tl.dot(operand(p, v, UPCAST), v, input_precision=PRECISION)
        store_tile(o_base, o, first + rows, q_len, o_token, cols, width, EVEN)
        q = q_next


@triton.jit(do_not_specialize=_SIZES)
def forward_streamed(
    q_ptr, k_ptr, v_ptr, o_ptr, q_offsets_ptr, k_offsets_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head,  # strides, in units of VEC elements
    batch, heads, blocks, queries, width, max_keys, scale, left, right,
    ACT: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    VEC: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Any number of keys: a program keeps a block of queries and streams the keys and values its window reaches."""
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks % heads
    b = tl.program_id(0) // blocks // heads
    q_start, q_len = sequence_bounds(q_offsets_ptr, b)
    k_start, k_len = sequence_bounds(k_offsets_ptr, b)
    q_token, k_token, v_token, o_token = q_token * VEC, k_token * VEC, v_token * VEC, o_token * VEC
    width = width * VEC
    cols = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    o_ptr += head.to(tl.int64) * o_head * VEC
    total = tl.load(q_offsets_ptr + batch).to(tl.int64)
    zero_rows(o_ptr, total, queries, b * blocks + block, batch * blocks, o_token, cols, width, BLOCK_M, EVEN)
    k_base = k_ptr + head.to(tl.int64) * k_head * VEC + k_start * k_token
    v_base = v_ptr + head.to(tl.int64) * v_head * VEC + k_start * v_token
    q_base = q_ptr + head.to(tl.int64) * q_head * VEC + q_start * q_token
    o_base = o_ptr + q_start * o_token
    k_len = tl.minimum(k_len, max_keys)
    for first in tl.range(block * BLOCK_M, q_len, blocks * BLOCK_M, num_stages=1):
        q = load_tile(q_base, first + rows, q_len, q_token, cols, width, EVEN, UPCAST)
        o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        lowest = 0
        highest = k_len
        if MASKED:
            lowest = tl.maximum(first - left, 0) // BLOCK_N * BLOCK_N
            highest = tl.minimum(k_len, first + BLOCK_M + right)
        for start in tl.range(lowest, highest, BLOCK_N):
            k = load_tile(k_base, start + keys, k_len, k_token, cols, width, EVEN, UPCAST)
            v = load_tile(v_base, start + keys, k_len, v_token, cols, width, EVEN, UPCAST)
            p = activate(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, ACT, FAST)
            if MASKED:
                p = tl.where(in_window(first + rows[:, None], start + keys[None, :], left, right), p, 0.0)
            o = tl.dot(operand(p, v, UPCAST), v, o, input_precision=PRECISION)
        store_tile(o_base, o, first + rows, q_len, o_token, cols, width, EVEN)
