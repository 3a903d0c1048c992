"""Zero the rows past the last sequence of a packed tensor, for kernels from elsewhere that leave them unwritten."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["last", "rows", "width"])
def zero_slack(x_ptr, offsets_ptr, last, rows, width, BLOCK: tl.constexpr):
    """x[offsets[last]:rows] = 0 for a contiguous [rows, width] tensor; each program takes every n-th block."""
    start = tl.load(offsets_ptr + last).to(tl.int64) * width + tl.program_id(0).to(tl.int64) * BLOCK
    end = rows.to(tl.int64) * width
    lanes = tl.arange(0, BLOCK)
    for at in tl.range(start, end, tl.num_programs(0).to(tl.int64) * BLOCK, num_stages=1):
        zeros = tl.zeros([BLOCK], tl.float32).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + at + lanes, zeros, mask=at + lanes < end)
