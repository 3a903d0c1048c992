"""Backward kernel for few queries per sequence. With p = exp(scale * q k^T - lse), g = dO (all per head):

    dV = p^T g        t = p * (g v^T - rowsum(g * o))        dK = scale * t^T q        dQ = scale * t k

Where all queries of a sequence fit into one block, one program makes all three gradients in one pass over the keys. The
products are formed transposed, [keys, queries], so that p^T and t^T come out of one product in the layout in which the
next one wants its left operand. No atomics: every row is written by one program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recsys_norm.kernels.gdpa.common import load_tile, operand, sequence_bounds, store_tile, zero_rows

_LOG2E = tl.constexpr(1.4426950408889634)
_SIZES = [
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "g_token", "g_head", "o_token", "o_head",
    "dq_token", "dq_head", "dk_token", "dk_head", "heads", "batch", "queries", "keys", "width", "max_keys", "scale",
]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def few_queries(
    q_ptr, k_ptr, v_ptr, g_ptr, o_ptr, lse_ptr, dq_ptr, dk_ptr, dv_ptr, q_offsets_ptr, k_offsets_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, o_token, o_head,  # in units of VEC elements
    dq_token, dq_head, dk_token, dk_head,  # dv has the strides of dk
    batch, heads, queries, keys, width, max_keys, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    VEC: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A program takes one head of one sequence, of at most BLOCK_M queries. lse is a contiguous [heads, queries], +inf
    for a query without keys, whose weights are then 0."""
    head = tl.program_id(0) % heads
    b = tl.program_id(0) // heads
    q_start, q_len = sequence_bounds(q_offsets_ptr, b)
    k_start, k_len = sequence_bounds(k_offsets_ptr, b)
    q_token, k_token, v_token, g_token, o_token = (
        q_token * VEC,
        k_token * VEC,
        v_token * VEC,
        g_token * VEC,
        o_token * VEC,
    )
    dq_token, dk_token = dq_token * VEC, dk_token * VEC
    width = width * VEC
    cols = tl.arange(0, BLOCK_D)
    m = tl.arange(0, BLOCK_M)
    block = tl.arange(0, BLOCK_N)
    at = head.to(tl.int64) * VEC
    q = load_tile(q_ptr + at * q_head + q_start * q_token, m, q_len, q_token, cols, width, EVEN, UPCAST)
    g = load_tile(g_ptr + at * g_head + q_start * g_token, m, q_len, g_token, cols, width, EVEN, UPCAST)
    o = load_tile(o_ptr + at * o_head + q_start * o_token, m, q_len, o_token, cols, width, EVEN, UPCAST)
    along = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)[None, :]
    lse = tl.load(lse_ptr + head.to(tl.int64) * queries + q_start + m, mask=m < q_len, other=float("inf"))
    lse = (lse * _LOG2E)[None, :]
    dq_ptr += at * dq_head
    dk_ptr += at * dk_head
    dv_ptr += at * dk_head
    k_base = k_ptr + at * k_head + k_start * k_token
    v_base = v_ptr + at * v_head + k_start * v_token
    dk_base = dk_ptr + k_start * dk_token
    dv_base = dv_ptr + k_start * dk_token
    k_read = tl.where(q_len > 0, k_len, 0)  # keys without queries get 0, whatever they hold
    dq = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
    factor = scale * _LOG2E
    for start in tl.range(0, tl.minimum(k_len, max_keys), BLOCK_N):
        n = start + block
        k = load_tile(k_base, n, k_read, k_token, cols, width, EVEN, UPCAST)
        v = load_tile(v_base, n, k_read, v_token, cols, width, EVEN, UPCAST)
        s = tl.dot(k, tl.trans(q))
        dp = tl.dot(v, tl.trans(g))
        p = tl.where((n < k_len)[:, None], tl.math.exp2(s * factor - lse), 0.0)
        t = operand(p * (dp - along), q, UPCAST)
        store_tile(dv_base, tl.dot(operand(p, g, UPCAST), g), n, k_len, dk_token, cols, width, EVEN)
        store_tile(dk_base, tl.dot(t, q) * scale, n, k_len, dk_token, cols, width, EVEN)
        dq = tl.dot(tl.trans(k), t, dq)
    store_tile(dq_ptr + q_start * dq_token, tl.trans(dq) * scale, m, q_len, dq_token, cols, width, EVEN)
    q_total = tl.load(q_offsets_ptr + batch).to(tl.int64)
    k_total = tl.load(k_offsets_ptr + batch).to(tl.int64)
    zero_rows(dq_ptr, q_total, queries, b, batch, dq_token, cols, width, BLOCK_M, EVEN)
    zero_rows(dk_ptr, k_total, keys, b, batch, dk_token, cols, width, BLOCK_M, EVEN)
    zero_rows(dv_ptr, k_total, keys, b, batch, dk_token, cols, width, BLOCK_M, EVEN)
