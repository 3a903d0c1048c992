"""One block of queries against all keys that it sees, which pass by in blocks: o, and the gradient at the queries.

For softmax the maximum and the sum of a row are kept as they grow, in base 2; the gradient needs the finished ones and
takes the keys twice. A row that sees no key has o = 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recsys_norm.kernels.activations import activate, activate_with_slope
from recsys_norm.kernels.gdpa.common import in_window, load_tile, operand

SOFTMAX = tl.constexpr(-1)  # among the activations' codes
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _key_range(first, k_len, left, right, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys that queries first .. first + BLOCK_M see, rounded down to a block."""
    lowest = 0
    highest = k_len
    if MASKED:
        lowest = tl.maximum(first - left, 0) // BLOCK_N * BLOCK_N
        highest = tl.minimum(k_len, first + BLOCK_M + right)
    return lowest, highest


@triton.jit
def masked_scores(s, m, n, k_len, left, right, scale, MASKED: tl.constexpr):
    """Base-2 scores of [m, n], minus infinity for pairs that do not attend."""
    allowed = (n < k_len)[None, :]
    if MASKED:
        allowed = allowed & in_window(m[:, None], n[None, :], left, right)
    return tl.where(allowed, s * (scale * LOG2E), float("-inf"))


@triton.jit
def _shift(top):
    """What to subtract from a row of scores, finite for a row that has seen no key."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def attend(
    qn, k_base, v_base, first, m, k_len, k_token, v_token, cols, width, scale, left, right,
    ACT: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr, FAST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o of queries m, which begin at `first`."""
    keys = tl.arange(0, BLOCK_N)
    o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    lowest, highest = _key_range(first, k_len, left, right, MASKED, BLOCK_M, BLOCK_N)
    for start in tl.range(lowest, highest, BLOCK_N):
        n = start + keys
        k = load_tile(k_base, n, k_len, k_token, cols, width, EVEN, UPCAST)
        v = load_tile(v_base, n, k_len, v_token, cols, width, EVEN, UPCAST)
        s = tl.dot(qn, tl.trans(k), input_precision=PRECISION)
        if ACT == SOFTMAX:
            s = masked_scores(s, m, n, k_len, left, right, scale, MASKED)
            higher = tl.maximum(top, tl.max(s, 1))
            shift = _shift(higher)
            p = tl.exp2(s - shift[:, None])
            fade = tl.exp2(top - shift)
            total = total * fade + tl.sum(p, 1)
            o = o * fade[:, None]
            top = higher
        else:
            p = activate(s * scale, ACT, FAST)
            if MASKED:
                p = tl.where(in_window(m[:, None], n[None, :], left, right), p, 0.0)
        o = tl.dot(operand(p, v, UPCAST), v, o, input_precision=PRECISION)
    if ACT == SOFTMAX:
        o = o / tl.where(total == 0.0, 1.0, total)[:, None]
    return o


@triton.jit
def softmax_rows(
    qn, g, k_base, v_base, first, m, k_len, k_token, v_token, cols, width, scale, left, right,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(base-2 maximum, reciprocal sum of exponentials relative to it, sum of p * (g v^T)) of each row; (0, 1, 0) of a
    row that sees no key."""
    keys = tl.arange(0, BLOCK_N)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    product = tl.zeros([BLOCK_M], tl.float32)
    lowest, highest = _key_range(first, k_len, left, right, MASKED, BLOCK_M, BLOCK_N)
    for start in tl.range(lowest, highest, BLOCK_N):
        n = start + keys
        k = load_tile(k_base, n, k_len, k_token, cols, width, EVEN, UPCAST)
        v = load_tile(v_base, n, k_len, v_token, cols, width, EVEN, UPCAST)
        s = tl.dot(qn, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(g, tl.trans(v), input_precision=PRECISION)
        s = masked_scores(s, m, n, k_len, left, right, scale, MASKED)
        higher = tl.maximum(top, tl.max(s, 1))
        shift = _shift(higher)
        p = tl.exp2(s - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(p, 1)
        product = product * fade + tl.sum(p * dp, 1)
        top = higher
    inverse = 1.0 / tl.where(total > 0.0, total, 1.0)
    return _shift(top), inverse, product * inverse


@triton.jit
def gradient(
    qn, g, top, inverse, delta, k_base, v_base, first, m, k_len, k_token, v_token, cols, width, scale, left, right,
    ACT: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr, FAST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """t k of queries m, where t is the gradient at the scores; top, inverse and delta are those of `softmax_rows`."""
    keys = tl.arange(0, BLOCK_N)
    x = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    lowest, highest = _key_range(first, k_len, left, right, MASKED, BLOCK_M, BLOCK_N)
    for start in tl.range(lowest, highest, BLOCK_N):
        n = start + keys
        k = load_tile(k_base, n, k_len, k_token, cols, width, EVEN, UPCAST)
        v = load_tile(v_base, n, k_len, v_token, cols, width, EVEN, UPCAST)
        s = tl.dot(qn, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(g, tl.trans(v), input_precision=PRECISION)
        if ACT == SOFTMAX:
            s = masked_scores(s, m, n, k_len, left, right, scale, MASKED)
            t = tl.exp2(s - top[:, None]) * inverse[:, None] * (dp - delta[:, None])
        else:
            t = dp * activate_with_slope(s * scale, ACT, FAST)[1]
            if MASKED:
                t = tl.where(in_window(m[:, None], n[None, :], left, right), t, 0.0)
        x = tl.dot(operand(t, k, UPCAST), k, x, input_precision=PRECISION)
    return x
