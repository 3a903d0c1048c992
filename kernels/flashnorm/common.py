"""What the FlashNormAttention kernels share: the pre-norm of a tile of q, and the parameters of a norm."""

from __future__ import annotations

import triton
import triton.language as tl

from recsys_norm.kernels.gdpa.common import load_tile, operand

# Scope of the pre-norm on q.
ALL_HEADS = tl.constexpr(1)
PER_HEAD = tl.constexpr(2)
# Kinds of the post-norm.
RMS = tl.constexpr(1)
LAYER = tl.constexpr(2)


@triton.jit
def vector(pointer, first, cols, width, GIVEN: tl.constexpr, DEFAULT: tl.constexpr):
    """[1, width] of a parameter from `first` on in fp32, DEFAULT everywhere if there is none, 0 in padded columns."""
    keep = cols < width
    if GIVEN:
        values = tl.load(pointer + first + cols, mask=keep, other=0.0).to(tl.float32)
    else:
        values = tl.where(keep, DEFAULT, 0.0).to(tl.float32)
    return values[None, :]


@triton.jit
def standardized(x, first, mean, rstd, HAS_MEAN: tl.constexpr, SHIFT: tl.constexpr):
    """(x - mean) * rstd of an fp32 tile. With SHIFT the mean is relative to `first`; else it is the mean itself."""
    if HAS_MEAN:
        if SHIFT:
            x = (x - first[:, None]) - mean[:, None]
        else:
            x = x - mean[:, None]
    return x * rstd[:, None]


@triton.jit
def own_statistics(x, first, cols, width, eps, HAS_MEAN: tl.constexpr, EVEN: tl.constexpr):
    """(mean relative to `first`, rstd) of the rows of an fp32 tile, padded columns aside."""
    mean = first
    if HAS_MEAN:
        x = x - first[:, None]
        if not EVEN:
            x = tl.where(cols[None, :] < width, x, 0.0)
        mean = tl.sum(x, 1) / width.to(tl.float32)
        x = x - mean[:, None]
    if not EVEN:
        x = tl.where(cols[None, :] < width, x, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / width.to(tl.float32) + eps)
    return mean, rstd


@triton.jit
def load_raw(
    q_base, first_base, mean_ptr, rstd_ptr, start, m, limit, token, heads, head, cols, width,
    PRE: tl.constexpr, HAS_MEAN: tl.constexpr, EVEN: tl.constexpr, SHIFT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """(q, first, mean, rstd) of rows m, zeros from row `limit` on. A sequence's statistics begin at row `start`,
    one per row or per row and head; with SHIFT the mean is relative to the row's element at `first_base`."""
    q = load_tile(q_base, m, limit, token, cols, width, EVEN, UPCAST)
    rstd = tl.zeros([m.shape[0]], tl.float32)
    mean = rstd
    first = rstd
    if PRE != 0:
        live = m < limit
        at = start + m
        if PRE == PER_HEAD:
            at = at * heads + head
        rstd = tl.load(rstd_ptr + at, mask=live, other=0.0)
        if HAS_MEAN:
            mean = tl.load(mean_ptr + at, mask=live, other=0.0)
            if SHIFT:
                first = tl.load(first_base + m.to(tl.int64) * token, mask=live, other=0.0).to(tl.float32)
    return q, first, mean, rstd


@triton.jit
def normed(
    q, first, mean, rstd, gamma, beta, PRE: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, SHIFT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The pre-norm of a tile of q, in its dtype."""
    y = q
    if PRE != 0:
        x = standardized(q.to(tl.float32), first, mean, rstd, HAS_MEAN, SHIFT)
        if HAS_WEIGHT or not EVEN:
            x = x * gamma
        if HAS_BIAS:
            x = x + beta
        y = operand(x, q, UPCAST)
    return y


@triton.jit
def load_normed(
    q_base, first_base, mean_ptr, rstd_ptr, gamma, beta, start, m, limit, token, heads, head, cols, width,
    PRE: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr, SHIFT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Both in one."""
    q, first, mean, rstd = load_raw(
        q_base, first_base, mean_ptr, rstd_ptr, start, m, limit, token, heads, head, cols, width,
        PRE, HAS_MEAN, EVEN, SHIFT, UPCAST,
    )  # fmt: skip
    return normed(q, first, mean, rstd, gamma, beta, PRE, HAS_MEAN, HAS_WEIGHT, HAS_BIAS, EVEN, SHIFT, UPCAST)
