"""Statistics of the rows of q, for kernels that see one head at a time and need them before the first product."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["batch", "queries", "heads", "width", "token", "head", "eps"])
def row_statistics(
    q_ptr, offsets_ptr, mean_ptr, centre_ptr, rstd_ptr,  # the last three [queries, programs along axis 1]
    batch, queries, heads, width, token, head, eps,  # token, head: strides; they and width in units of VEC elements
    HAS_MEAN: tl.constexpr, SHIFT: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Over `heads` heads from each program's own on: all of them in one program, or one in each. rstd and, for a layer
    norm, the mean relative to the row's first element and (without SHIFT) the mean itself, which 16-bit rows can be
    centred with. Rows past the last sequence count as zeros."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < tl.load(offsets_ptr + batch).to(tl.int64)
    width = width * VEC
    at = rows * token * VEC + tl.program_id(1).to(tl.int64) * head * VEC
    column = tl.arange(0, HEADS * BLOCK_D)
    h = column // BLOCK_D
    col = column % BLOCK_D
    inside = (h < heads) & (col < width)
    keep = live[:, None] & inside[None, :]
    place = h.to(tl.int64) * head * VEC + col
    x = tl.load(q_ptr + at[:, None] + place[None, :], mask=keep, other=0.0).to(tl.float32)
    count = (heads * width).to(tl.float32)
    out = rows * tl.num_programs(1) + tl.program_id(1)
    if HAS_MEAN:
        first = tl.load(q_ptr + at, mask=live, other=0.0).to(tl.float32)
        x = tl.where(inside[None, :], x - first[:, None], 0.0)
        mean = tl.sum(x, 1) / count
        x = tl.where(inside[None, :], x - mean[:, None], 0.0)
        tl.store(mean_ptr + out, mean, mask=rows < queries)
        if not SHIFT:
            tl.store(centre_ptr + out, first + mean, mask=rows < queries)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / count + eps)
    tl.store(rstd_ptr + out, rstd, mask=rows < queries)
