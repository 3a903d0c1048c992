"""norm_linear backward, gradients of the parameters.

    dW' = dy^T xhat,  xhat = rstd * (x - mean) rounded to the operand dtype as the unfused form rounds it
    dweight = dW' * gamma + outer(s, beta);   dgamma_k = sum_n weight_nk dW'_nk;   dbeta = weight^T s;   dbias = s
    with s = sum_m dy_m

xhat is made in registers on the way to the product, or read where another kernel wrote it. Sums over M are split over
programs that write fp32 partials; one kernel adds them up and applies the affine part, so nothing is atomic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys_norm.kernels.lazy.backward import RowStats, normalized, row_stats
from recsys_norm.kernels.lazy.common import (
    INTERPRETED,
    descriptor,
    dot_precision,
    finished,
    fits_descriptor,
    load_tile,
    matmul,
    multiprocessors,
    rounded,
    store_tile,
)
from recsys_norm.kernels.lazy.configs import GemmConfig


@triton.jit(do_not_specialize=["M", "N", "K", "stride_dy", "stride_x", "rows_per_split"])
def wgrad_kernel(
    x,  # tile source of [M, K]
    dy,  # tile source of [M, N]
    partial_ptr,  # [splits, N, K] fp32
    x_ptr,  # pointer to x, for the row's first element
    mean_ptr,  # [M] fp32, as rstd
    rstd_ptr,
    M,
    N,
    K,
    stride_dy,
    stride_x,
    rows_per_split,  # a multiple of BM
    LAYER: tl.constexpr,
    ALIGNED: tl.constexpr,
    TMA: tl.constexpr,
    WAIT: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    if ALIGNED:
        K = (K // 8) * 8
        N = (N // 8) * 8
        stride_dy = (stride_dy // 8) * 8
        stride_x = (stride_x // 8) * 8
    k_tiles = tl.cdiv(K, BK)
    k = (tl.program_id(0) % k_tiles) * BK
    n = (tl.program_id(0) // k_tiles) * BN
    split = tl.program_id(1)
    start = split * rows_per_split
    stop = tl.minimum(start + rows_per_split, M)
    acc = tl.zeros((BK, BN), tl.float32)
    rows = start + tl.arange(0, BM)
    next_first, next_mean, next_rstd = row_stats(x_ptr, mean_ptr, rstd_ptr, rows, stop, stride_x, LAYER)
    for m in range(start, stop, BM):
        first = next_first  # the statistics of the next tile travel while this one is multiplied
        mean = next_mean
        rstd = next_rstd
        rows = m + BM + tl.arange(0, BM)
        next_first, next_mean, next_rstd = row_stats(x_ptr, mean_ptr, rstd_ptr, rows, stop, stride_x, LAYER)
        a = load_tile(x, m, k, M, K, stride_x, TMA, BM, BK)
        b = load_tile(dy, m, n, M, N, stride_dy, TMA, BM, BN)
        # Rows past M have rstd 0 and dy 0.
        xhat = rounded(normalized(a, first, mean, rstd, LAYER), a.dtype)
        acc = matmul(xhat.T, b, acc, PRECISION)
        acc = finished(acc, WAIT)
    target = partial_ptr + split.to(tl.int64) * N * K
    store_tile(target, acc.T, n, k, N, K, False, BN, BK)


@triton.jit(do_not_specialize=["M", "K", "stride_x"])
def hat_kernel(
    x_ptr,  # [M, K], row stride stride_x
    hat_ptr,  # [M, K] contiguous
    mean_ptr,
    rstd_ptr,
    M,
    K,
    stride_x,
    LAYER: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if ALIGNED:
        K = (K // 8) * 8
        stride_x = (stride_x // 8) * 8
    row = tl.program_id(0) * ROWS
    col = tl.program_id(1) * BLOCK
    rows = row + tl.arange(0, ROWS)
    first, mean, rstd = row_stats(x_ptr, mean_ptr, rstd_ptr, rows, M, stride_x, LAYER)
    x = load_tile(x_ptr, row, col, M, K, stride_x, False, ROWS, BLOCK)
    xhat = rounded(normalized(x, first, mean, rstd, LAYER), hat_ptr.dtype.element_ty)
    store_tile(hat_ptr, xhat, row, col, M, K, False, ROWS, BLOCK)


@triton.jit(do_not_specialize=["N", "K", "splits"])
def finish_kernel(
    partial_ptr,  # [splits, N, K] fp32
    weight_ptr,  # [N, K]
    gamma_ptr,  # [K]
    beta_ptr,  # [K]
    dy_sum_ptr,  # [N] fp32
    dweight_ptr,  # [N, K]
    norm_ptr,  # [2, row blocks, K] fp32: partial dgamma and dbeta
    N,
    K,
    splits,
    HAS_GAMMA: tl.constexpr,
    HAS_BETA: tl.constexpr,
    WRITE_WEIGHT: tl.constexpr,
    SUM_GAMMA: tl.constexpr,
    SUM_BETA: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    n = tl.program_id(0) * BN
    k = tl.program_id(1) * BK
    rows = n + tl.arange(0, BN)
    cols = k + tl.arange(0, BK)
    inside = cols < K
    keep = (rows < N)[:, None] & inside[None, :]
    at = rows[:, None].to(tl.int64) * K + cols[None, :]
    total = tl.zeros((BN, BK), tl.float32)
    size = N.to(tl.int64) * K
    for split in range(0, splits):
        total += tl.load(partial_ptr + split * size + at, mask=keep, other=0.0)
    out = tl.program_id(0).to(tl.int64) * K + cols
    if SUM_GAMMA or SUM_BETA:
        weight = tl.load(weight_ptr + at, mask=keep, other=0.0).to(tl.float32)
    if HAS_BETA or SUM_BETA:
        dy_sum = tl.load(dy_sum_ptr + rows, mask=rows < N, other=0.0)
    if SUM_GAMMA:
        tl.store(norm_ptr + out, tl.sum(weight * total, 0), mask=inside)
    if SUM_BETA:
        second = tl.num_programs(0).to(tl.int64) * K
        tl.store(norm_ptr + second + out, tl.sum(weight * dy_sum[:, None], 0), mask=inside)
    if WRITE_WEIGHT:
        if HAS_GAMMA:
            total = total * tl.load(gamma_ptr + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
        if HAS_BETA:
            beta = tl.load(beta_ptr + cols, mask=inside, other=0.0).to(tl.float32)
            total += dy_sum[:, None] * beta[None, :]
        tl.store(dweight_ptr + at, rounded(total, dweight_ptr.dtype.element_ty), mask=keep)


def write_hat(x: Tensor, stats: RowStats) -> Tensor:
    """xhat in x's dtype."""
    M, K = x.shape
    hat = torch.empty(M, K, device=x.device, dtype=x.dtype)
    block = min(512, max(16, triton.next_power_of_2(K)))
    rows = 128 if INTERPRETED else max(1, 4096 // block)
    hat_kernel[(triton.cdiv(M, rows), triton.cdiv(K, block))](
        x,
        hat,
        *stats,
        M,
        K,
        x.stride(0),
        LAYER=stats.mean is not None,
        ALIGNED=K % 8 == 0 and x.stride(0) % 8 == 0,
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
    )
    return hat


def product_of(dy: Tensor, hat: Tensor) -> Tensor:
    """dW' [1, N, K] in fp32 by the BLAS, from a written xhat."""
    if dy.dtype == torch.float32:
        return torch.mm(dy.t(), hat)[None]
    if dy.is_cuda:
        return torch.mm(dy.t(), hat, out_dtype=torch.float32)[None]
    return torch.mm(dy.t().float(), hat.float())[None]


def product(dy: Tensor, x: Tensor, stats: RowStats, config: GemmConfig) -> Tensor:
    """Partials [splits, N, K] of dW' in fp32; their number depends on the sizes only. BM is the summed dimension."""
    M, N = dy.shape
    K = x.shape[1]
    tiles = triton.cdiv(N, config.BN) * triton.cdiv(K, config.BK)
    wanted = max(1, config.blocks_per_sm * multiprocessors(x.device) // tiles)
    steps = triton.cdiv(triton.cdiv(M, config.BM), wanted)
    splits = triton.cdiv(M, steps * config.BM)
    partial = torch.empty(splits, N, K, device=x.device, dtype=torch.float32)
    tma = config.tma and all(fits_descriptor(t) for t in (x, dy))
    wgrad_kernel[(tiles, splits)](
        descriptor(x, config.BM, config.BK) if tma else x,
        descriptor(dy, config.BM, config.BN) if tma else dy,
        partial,
        x,
        *stats,
        M,
        N,
        K,
        dy.stride(0),
        x.stride(0),
        steps * config.BM,
        LAYER=stats.mean is not None,
        ALIGNED=all(s % 8 == 0 for s in (K, N, dy.stride(0), x.stride(0))),
        TMA=tma,
        WAIT=config.wait,
        PRECISION=dot_precision(x.dtype),
        BM=config.BM,
        BN=config.BN,
        BK=config.BK,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return partial


class ParameterGradients(NamedTuple):
    dweight: Tensor | None
    dgamma: Tensor | None
    dbeta: Tensor | None


def finish(
    partial: Tensor,
    weight: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    dy_sum: Tensor | None,
    *,
    dweight: bool,
    dgamma: bool,
    dbeta: bool,
) -> ParameterGradients:
    """Add the partials and apply the affine part. dgamma and dbeta are fp32."""
    splits, N, K = partial.shape
    bn, bk = (256, 256) if INTERPRETED else (32, 64)
    grid = (triton.cdiv(N, bn), triton.cdiv(K, bk))
    out = torch.empty_like(weight) if dweight else None
    norm = torch.empty(2, grid[0], K, device=weight.device, dtype=torch.float32) if dgamma or dbeta else None
    finish_kernel[grid](
        partial,
        weight,
        gamma,
        beta,
        dy_sum,
        out,
        norm,
        N,
        K,
        splits,
        HAS_GAMMA=gamma is not None,
        HAS_BETA=beta is not None and dweight,
        WRITE_WEIGHT=dweight,
        SUM_GAMMA=dgamma,
        SUM_BETA=dbeta,
        BN=bn,
        BK=bk,
        num_warps=4,
    )
    return ParameterGradients(out, norm[0].sum(0) if dgamma else None, norm[1].sum(0) if dbeta else None)
