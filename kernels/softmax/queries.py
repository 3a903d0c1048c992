"""What the Hopper backward (../hopper/softmax_backward_kernels.py) wants to know beforehand: two numbers of each query, and
the order of the sequences, the longest first. With p = exp(scale * q k^T - lse):

    stats[0, h, t] = -log2(e) * lse[h, t]        stats[1, h, t] = rowsum(dO * o) = rowsum(p * dO v^T)

o is rounded to 16 bits, and the error that this leaves in row n of a causal dQ falls as 1 / n: it grows with |o| and with
the mean key, and both fall as 1 / sqrt(n). In a sequence's second row it was up to ten times that of all other roundings,
from the ninth on it was not seen any more. So the first rows take the form on the right, whose keys are the same few rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recsys_norm.kernels.gdpa.common import in_window, load_tile, sequence_bounds

_LOG2E = tl.constexpr(1.4426950408889634)
RANKED = 32  # sequences that a program ranks


@triton.jit(
    do_not_specialize=["g_token", "g_head", "o_token", "o_head", "batch", "heads", "blocks", "queries", "width"]
)
def describe_queries(
    g_ptr, o_ptr, lse_ptr, offsets_ptr, zeros_ptr, stats_ptr, order_ptr,
    g_token, g_head, o_token, o_head,  # strides, in units of VEC elements
    batch, heads, blocks, queries, width,
    ZEROS: tl.constexpr, RANKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    VEC: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_M queries of one head; the first ones also rank RANKED sequences each, so there are at least
    batch / RANKED. lse is a contiguous [heads, queries]. Equally long sequences keep their order."""
    program = tl.program_id(0)
    if program == 0:
        tl.store(zeros_ptr + tl.arange(0, ZEROS), tl.zeros([ZEROS], tl.float32))
    if program * RANKED < batch:
        b = program * RANKED + tl.arange(0, RANKED)
        _, length = _lengths(offsets_ptr, b, batch)
        rank = tl.zeros([RANKED], tl.int32)
        for first in tl.range(0, batch, 64, num_stages=1):
            other = first + tl.arange(0, 64)
            there, rival = _lengths(offsets_ptr, other, batch)
            ahead = (rival[None, :] > length[:, None]) | (
                (rival[None, :] == length[:, None]) & (other[None, :] < b[:, None])
            )
            rank += tl.sum((ahead & there[None, :]).to(tl.int32), 1)
        tl.store(order_ptr + rank, b, mask=b < batch)
    head = program % heads
    rows = program // heads * BLOCK_M + tl.arange(0, BLOCK_M)
    if program // heads < blocks:
        cols = tl.arange(0, BLOCK_D)
        at = head.to(tl.int64) * VEC
        width = width * VEC
        g = load_tile(g_ptr + at * g_head, rows, queries, g_token * VEC, cols, width, EVEN, UPCAST)
        o = load_tile(o_ptr + at * o_head, rows, queries, o_token * VEC, cols, width, EVEN, UPCAST)
        inside = rows < queries
        at = head.to(tl.int64) * queries
        lse = tl.load(lse_ptr + at + rows, mask=inside, other=0.0)
        tl.store(stats_ptr + at + rows, lse * -_LOG2E, mask=inside)
        at += tl.cast(heads, tl.int64) * queries
        tl.store(stats_ptr + at + rows, tl.sum(g.to(tl.float32) * o.to(tl.float32), 1), mask=inside)


@triton.jit
def _lengths(offsets_ptr, b, batch):
    """Which of the sequences b there are, and how long they are."""
    there = b < batch
    start = tl.load(offsets_ptr + b, mask=there, other=0)
    return there, (tl.load(offsets_ptr + b + 1, mask=there, other=0) - start).to(tl.int32)


@triton.jit(
    do_not_specialize=[
        "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "g_token", "g_head",
        "heads", "queries", "width", "scale", "left",
    ]
)  # fmt: skip
def first_queries(
    q_ptr, k_ptr, v_ptr, g_ptr, offsets_ptr, stats_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head,  # strides, in units of VEC elements
    heads, queries, width, scale, left,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A program writes stats[1] again for the first BLOCK_M queries of one sequence and head, of which query i sees the keys
    i - left to i. It reads stats[0]."""
    head = tl.program_id(0) % heads
    start, length = sequence_bounds(offsets_ptr, tl.program_id(0) // heads)
    q_token, k_token, v_token, g_token = q_token * VEC, k_token * VEC, v_token * VEC, g_token * VEC
    width = width * VEC
    cols = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_M)
    at = head.to(tl.int64) * VEC
    q = load_tile(q_ptr + at * q_head + start * q_token, rows, length, q_token, cols, width, EVEN, UPCAST)
    k = load_tile(k_ptr + at * k_head + start * k_token, rows, length, k_token, cols, width, EVEN, UPCAST)
    g = load_tile(g_ptr + at * g_head + start * g_token, rows, length, g_token, cols, width, EVEN, UPCAST)
    v = load_tile(v_ptr + at * v_head + start * v_token, rows, length, v_token, cols, width, EVEN, UPCAST)
    stats_ptr += head.to(tl.int64) * queries + start
    lse = tl.load(stats_ptr + rows, mask=rows < length, other=float("-inf"))
    s = tl.dot(q, tl.trans(k))
    slope = tl.dot(g, tl.trans(v))
    weight = tl.math.exp2(s * (scale * _LOG2E) + lse[:, None])
    # Keys behind the query may hold anything.
    along = tl.where(in_window(rows[:, None], rows[None, :], left, 0), weight * slope, 0.0)
    stats_ptr += tl.cast(heads, tl.int64) * queries
    tl.store(stats_ptr + rows, tl.sum(along, 1), mask=rows < length)
