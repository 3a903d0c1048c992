"""What another kernel needs to normalise rows as `forward` does: y = (x - centre) * rstd * weight + bias."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 8  # rows or columns of a program


@triton.jit(do_not_specialize=["M", "N", "stride_x", "row_blocks"])
def terms_kernel(
    x_ptr,  # [M, N], row stride stride_x
    mean_ptr,  # [M] fp32, relative to the row's first element
    rstd_ptr,  # [M] fp32
    weight_ptr,  # [N]
    bias_ptr,
    rows_ptr,  # [M, 2] fp32: centre, rstd
    columns_ptr,  # [N / 8, 2, 8] fp32: weight, bias
    M,
    N,
    stride_x,
    row_blocks,
    LAYER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK rows in each of the first programs, BLOCK columns in each of the others."""
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if block < row_blocks:
        row = block.to(tl.int64) * BLOCK + lanes
        inside = row < M
        centre = tl.zeros((BLOCK,), tl.float32)
        if LAYER:
            centre = tl.load(x_ptr + row * stride_x, mask=inside, other=0.0).to(tl.float32)
            centre += tl.load(mean_ptr + row, mask=inside, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=inside, other=0.0)
        pair = tl.arange(0, 2)[None, :]
        tl.store(rows_ptr + 2 * row[:, None] + pair, tl.join(centre, rstd), mask=inside[:, None])
    else:
        column = (block - row_blocks) * BLOCK + lanes
        inside = column < N
        weight = tl.full((BLOCK,), 1.0, tl.float32)
        bias = tl.full((BLOCK,), -(1 << 31), tl.int32).to(tl.float32, bitcast=True)  # -0, which keeps the sign of a 0
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        to = columns_ptr + column // 8 * 16 + column % 8
        tl.store(to, weight, mask=inside)
        tl.store(to + 8, bias, mask=inside)


def terms(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(`[M, 2]`: centre and rstd of each row, `[N / 8, 2, 8]`: weight and bias of each 8 columns), fp32, of x `[M, N]` and
    what `norm_forward` has found; N a multiple of 8."""
    M, N = x.shape
    rows = torch.empty((M, 2), dtype=torch.float32, device=x.device)
    columns = torch.empty((N // 8, 2, 8), dtype=torch.float32, device=x.device)
    row_blocks = triton.cdiv(M, BLOCK)
    terms_kernel[(row_blocks + triton.cdiv(N, BLOCK),)](
        *(x, mean, rstd, weight, bias, rows, columns, M, N, x.stride(0), row_blocks),
        LAYER=mean is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return rows, columns
