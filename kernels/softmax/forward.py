"""Forward kernel: o = softmax(scale * q k^T) v and lse = log(sum(exp(scale * q k^T))) per sequence and head.

The running maximum starts at a finite number, so that a row which has seen no key yet needs no case of its own:
exp(-inf - finite) = 0. A query without keys gets o = 0 and lse = +inf, with which a backward that forms the weights as
exp(score - lse) finds them 0. Rows past the last sequence are written as zeros by the same launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recsys_norm.kernels.gdpa.common import in_window, load_tile, operand, sequence_bounds, store_tile, zero_rows

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(-3.0e38)
_SIZES = [
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "o_token", "o_head",
    "batch", "heads", "blocks", "queries", "width", "max_keys", "scale", "left", "right",
]  # fmt: skip


@triton.jit
def zero_values(base, first, last, worker, workers, COUNT: tl.constexpr):
    worker, workers = tl.cast(worker, tl.int64), tl.cast(workers, tl.int64)
    lanes = tl.arange(0, COUNT)
    for at in tl.range(first + worker * COUNT, last, workers * COUNT, num_stages=1):
        tl.store(base + at + lanes, tl.zeros([COUNT], tl.float32), mask=at + lanes < last)


@triton.jit
def absorb(s, v, o, peak, weight, factor, UPCAST: tl.constexpr):
    """One block of scores (-inf where a pair does not attend) and values into the running output, maximum and sum."""
    above = tl.maximum(peak, tl.max(s, 1))
    # Not s * factor - above * factor: fused, that differs from 0 by the rounding of a product, which large scores feel.
    p = tl.math.exp2((s - above[:, None]) * factor)
    shrink = tl.math.exp2((peak - above) * factor)
    weight = weight * shrink + tl.sum(p, 1)
    o = tl.dot(operand(p, v, UPCAST), v, o * shrink[:, None])
    return o, above, weight


@triton.jit
def log_sum_exp(o, peak, weight, scale):
    """The finished output, and the log-sum-exp."""
    seen = weight > 0.0
    weight = tl.where(seen, weight, 1.0)
    lse = tl.where(seen, peak * scale + tl.math.log2(weight) * _LN2, float("inf"))
    return o * (1.0 / weight)[:, None], lse


@triton.jit(do_not_specialize=_SIZES)
def forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, q_offsets_ptr, k_offsets_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head,  # strides, in units of VEC elements
    batch, heads, blocks, queries, width, max_keys, scale, left, right,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    VEC: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A program takes one block of queries of one sequence and head and streams the keys and values that its window
    reaches. Heads are neighbours in the grid, as they are in memory. lse is a contiguous [heads, queries]."""
    head = tl.program_id(0) % heads
    block = tl.program_id(0) // heads % blocks
    b = tl.program_id(0) // heads // blocks
    q_start, q_len = sequence_bounds(q_offsets_ptr, b)
    k_start, k_len = sequence_bounds(k_offsets_ptr, b)
    q_token, k_token, v_token, o_token = q_token * VEC, k_token * VEC, v_token * VEC, o_token * VEC
    width = width * VEC
    cols = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, BLOCK_N)
    o_ptr += head.to(tl.int64) * o_head * VEC
    lse_ptr += head.to(tl.int64) * queries
    end = tl.load(q_offsets_ptr + batch).to(tl.int64)
    zero_rows(o_ptr, end, queries, b * blocks + block, batch * blocks, o_token, cols, width, BLOCK_M, EVEN)
    zero_values(lse_ptr, end, queries, b * blocks + block, batch * blocks, BLOCK_M)
    first = block * BLOCK_M
    if first >= q_len:
        return
    k_base = k_ptr + head.to(tl.int64) * k_head * VEC + k_start * k_token
    v_base = v_ptr + head.to(tl.int64) * v_head * VEC + k_start * v_token
    q_base = q_ptr + head.to(tl.int64) * q_head * VEC + q_start * q_token
    k_len = tl.minimum(k_len, max_keys)
    rows = first + tl.arange(0, BLOCK_M)
    q = load_tile(q_base, rows, q_len, q_token, cols, width, EVEN, UPCAST)
    o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], _LOWEST, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    factor = scale * _LOG2E
    lowest = 0
    highest = k_len
    seen_by_last = 0  # the first key that the block's last query sees
    seen_by_first = k_len  # the key after the last one that the block's first query sees
    if MASKED:
        lowest = tl.maximum(first - left, 0) // BLOCK_N * BLOCK_N
        highest = tl.minimum(k_len, first + BLOCK_M + right)
        seen_by_last = first + BLOCK_M - 1 - left
        seen_by_first = tl.minimum(k_len, first + right + 1)
    for start in tl.range(lowest, highest, BLOCK_N):
        k = load_tile(k_base, start + keys, k_len, k_token, cols, width, EVEN, UPCAST)
        v = load_tile(v_base, start + keys, k_len, v_token, cols, width, EVEN, UPCAST)
        s = tl.dot(q, tl.trans(k))
        if (start < seen_by_last) | (start + BLOCK_N > seen_by_first):
            key = (start + keys)[None, :]
            attends = key < k_len
            if MASKED:
                attends = attends & in_window(rows[:, None], key, left, right)
            s = tl.where(attends, s, float("-inf"))
        o, peak, weight = absorb(s, v, o, peak, weight, factor, UPCAST)
    o, lse = log_sum_exp(o, peak, weight, scale)
    store_tile(o_ptr + q_start * o_token, o, rows, q_len, o_token, cols, width, EVEN)
    tl.store(lse_ptr + q_start + rows, lse, mask=rows < q_len)
