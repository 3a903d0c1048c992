"""Tile helpers that the jagged attention kernels share.

Addresses are int64 throughout: 32 x 32 -> 64 bit products cost one instruction and no loop-invariant registers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_bounds(offsets_ptr, b):
    """First row (int64) and length (int32) of sequence b."""
    start = tl.load(offsets_ptr + b).to(tl.int64)
    end = tl.load(offsets_ptr + b + 1).to(tl.int64)
    return start, (end - start).to(tl.int32)


@triton.jit
def _row_offsets(rows, stride):
    return rows.to(tl.int64)[:, None] * stride


@triton.jit
def load_tile(base, rows, limit, stride, cols, width, EVEN: tl.constexpr, UPCAST: tl.constexpr):
    """Rows (int32) of a [.., width] matrix at `base`, zeros from row `limit` on and beyond `width`."""
    mask = rows[:, None] < limit
    if not EVEN:
        mask = mask & (cols[None, :] < width)
    tile = tl.load(base + _row_offsets(rows, stride) + cols[None, :], mask=mask, other=0.0)
    if UPCAST:
        tile = tile.to(tl.float32)  # the interpreter computes bf16 as integers
    return tile


@triton.jit
def store_tile(base, tile, rows, limit, stride, cols, width, EVEN: tl.constexpr):
    mask = rows[:, None] < limit
    if not EVEN:
        mask = mask & (cols[None, :] < width)
    tl.store(base + _row_offsets(rows, stride) + cols[None, :], tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def zero_rows(base, first, last, worker, workers, stride, cols, width, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """Zero rows [first, last) of a [.., width] matrix, `worker` of `workers` taking every workers-th tile."""
    worker, workers = tl.cast(worker, tl.int64), tl.cast(workers, tl.int64)
    rows = tl.arange(0, ROWS)
    zeros = tl.zeros([ROWS, cols.shape[0]], tl.float32)
    for row in tl.range(first + worker * ROWS, last, workers * ROWS, num_stages=1):
        store_tile(base, zeros, row + rows, last, stride, cols, width, EVEN)


@triton.jit
def in_window(query, key, left, right):
    """Which pairs of positions attend: query - left <= key <= query + right."""
    distance = key - query
    return (distance <= right) & (distance >= -left)


@triton.jit
def operand(tile, like, UPCAST: tl.constexpr):
    """An fp32 tile as an operand of a product with `like`."""
    if UPCAST:
        return tile
    else:
        return tile.to(like.dtype)
