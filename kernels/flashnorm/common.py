"""What the FlashNormAttention kernels share: rows of a norm that spans all heads, seen from programs that own one head.

A program keeps one head's keys and values on chip and walks blocks of queries, so that a row is spread over as many
programs as there are heads. Each leaves its part of the row and of the row's sums in memory; the one that arrives last
at a block finds all parts in L2 and finishes the block. Who is last changes from run to run, what it computes does not:
the parts are added in the order of the heads. The arrival counter is the only atomic, and it counts integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Scope of the pre-norm on q.
ALL_HEADS = tl.constexpr(1)
PER_HEAD = tl.constexpr(2)
# Kinds of the post-norm.
RMS = tl.constexpr(1)
LAYER = tl.constexpr(2)


@triton.jit
def last_arrival(count_ptr, heads):
    """Whether this program is the last of `heads` at a block. What the others stored before is visible afterwards."""
    tl.debug_barrier()
    return tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == heads - 1


@triton.jit
def load_fresh(base, rows, limit, stride, cols, width, EVEN: tl.constexpr):
    """As gdpa.common.load_tile in fp32, for tiles that another program may have written: past the L1 cache."""
    mask = rows[:, None] < limit
    if not EVEN:
        mask = mask & (cols[None, :] < width)
    at = rows.to(tl.int64)[:, None] * stride + cols[None, :]
    return tl.load(base + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def load_parts(part_ptr, rows, live, heads, HEADS: tl.constexpr):
    """[rows, HEADS]: what every head left for these rows (int64), 0 beyond `heads`."""
    head = tl.arange(0, HEADS)
    keep = live[:, None] & (head < heads)[None, :]
    return tl.load(part_ptr + rows[:, None] * heads + head[None, :], mask=keep, other=0.0, cache_modifier=".cg")


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
def load_norm(
    mean_ptr, rstd_ptr, first_base, rows, limit, at, token, HAS_MEAN: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """(first, mean, rstd) of rows whose statistics lie at `at`, zeros from row `limit` on. With SHIFT the mean is
    relative to the row's first element, at `first_base`; else it is the mean itself and first is not used."""
    live = rows < limit
    rstd = tl.load(rstd_ptr + at, mask=live, other=0.0)
    mean = rstd
    first = rstd
    if HAS_MEAN:
        mean = tl.load(mean_ptr + at, mask=live, other=0.0)
        if SHIFT:
            first = tl.load(first_base + rows.to(tl.int64) * token, mask=live, other=0.0).to(tl.float32)
    return first, mean, rstd


@triton.jit
def standardized(x, first, mean, rstd, HAS_MEAN: tl.constexpr, SHIFT: tl.constexpr):
    """(x - mean) * rstd of an fp32 tile."""
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
