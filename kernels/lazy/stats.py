"""Row statistics alone, for the kernels that get them instead of taking them from their own tiles.

Blocks of a row are reduced to (mean, M2) and merged, so that no E[x^2] - E[x]^2 is ever formed; the row's first element
is subtracted before, so that a constant row has a variance of exactly zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys_norm.kernels.lazy.common import INTERPRETED, multiprocessors


@triton.jit(do_not_specialize=["M", "K", "stride_x", "eps"])
def stats_kernel(
    x_ptr,  # [M, K], row stride stride_x
    mean_ptr,  # [M] fp32, relative to the row's first element
    rstd_ptr,  # [M] fp32
    scale_ptr,  # [M] fp32: rstd, and 0 where the row is constant
    M,
    K,
    stride_x,
    eps,
    LAYER: tl.constexpr,
    ALIGNED: tl.constexpr,  # K and the row stride are multiples of 8
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if ALIGNED:
        K = (K // 8) * 8
        stride_x = (stride_x // 8) * 8
    for block in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS)
        live = rows < M
        row_ptr = x_ptr + rows.to(tl.int64) * stride_x
        mean = tl.zeros((ROWS,), tl.float32)
        m2 = tl.zeros((ROWS,), tl.float32)
        seen = tl.zeros((ROWS,), tl.float32)
        if LAYER:
            shift = tl.load(row_ptr, mask=live, other=0.0).to(tl.float32)
        for k in range(0, K, BLOCK):
            cols = k + tl.arange(0, BLOCK)
            keep = live[:, None] & (cols < K)[None, :]
            x = tl.load(row_ptr[:, None] + cols[None, :], mask=keep, other=0.0).to(tl.float32)
            if LAYER:
                count = tl.minimum(K - k, BLOCK).to(tl.float32)
                total = seen + count
                d = tl.where(keep, x - shift[:, None], 0.0)
                block_mean = tl.sum(d, 1) / count
                d = tl.where(keep, d - block_mean[:, None], 0.0)
                delta = block_mean - mean
                mean += delta * (count / total)
                m2 += tl.sum(d * d, 1) + delta * delta * (seen * count / total)
                seen = total
            else:
                m2 += tl.sum(x * x, 1)
        rstd = tl.rsqrt(m2 / K.to(tl.float32) + eps)
        scale = rstd
        if LAYER:
            tl.store(mean_ptr + rows, mean, mask=live)
            scale = tl.where(m2 > 0.0, rstd, 0.0)
        tl.store(rstd_ptr + rows, rstd, mask=live)
        tl.store(scale_ptr + rows, scale, mask=live)


class Stats(NamedTuple):
    """Row statistics, each [M] fp32. The mean is relative to the row's first element (an absolute one would be off by
    5e-4 deviations at mean / deviation = 1e4) and None for RMSNorm; scale is rstd, and 0 where the row is constant."""

    mean: Tensor | None
    rstd: Tensor
    scale: Tensor


def row_stats(x: Tensor, layer: bool, eps: float) -> Stats:
    """Statistics of the rows of x [M, K] (row stride free, last stride 1)."""
    M, K = x.shape
    mean, rstd, scale = (torch.empty(M, device=x.device, dtype=torch.float32) for _ in range(3))
    block = min(1024, max(16, triton.next_power_of_2(K)))
    rows = 128 if INTERPRETED else max(1, 4096 // block)
    grid = min(triton.cdiv(M, rows), 16 * multiprocessors(x.device))
    stats_kernel[(grid,)](
        x,
        mean,
        rstd,
        scale,
        M,
        K,
        x.stride(0),
        eps,
        LAYER=layer,
        ALIGNED=K % 8 == 0 and x.stride(0) % 8 == 0,
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
    )
    return Stats(mean if layer else None, rstd, scale)
