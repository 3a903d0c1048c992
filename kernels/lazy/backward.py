"""norm_linear backward, gradient of x: one GEMM with a row-scalar epilogue.

    g = dy W'                                  gradient at xhat = rstd * (x - mean)
    delta = mean_k(g * xhat) = (1/K) sum_n dy_n (y_n - b'_n);   eta = mean_k(g) = (1/K) sum_n dy_n c_n  (LayerNorm)
    dx = rstd * (g - eta - xhat * delta)

Up to K = 512 a block holds the whole row of g and takes delta and eta from its accumulators; beyond, both are known
before the GEMM, from dy and the saved y. Source: maths of "Towards Free Normalization", lazy pre-norm.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys_norm.kernels.lazy.common import (
    INTERPRETED,
    descriptor,
    dot_precision,
    finished,
    fits_descriptor,
    halves,
    load_tile,
    matmul,
    multiprocessors,
    rounded,
    store_tile,
)
from recsys_norm.kernels.lazy.configs import COEFFICIENT_COLUMNS, GemmConfig


@triton.jit
def normalized(x, first, mean, rstd, LAYER: tl.constexpr):
    """xhat in fp32. The mean is relative to the row's first element, which fp32 rows are shifted by before."""
    if LAYER:
        if x.dtype == tl.float32:
            x = (x - first[:, None]) - mean[:, None]
        else:
            x = x.to(tl.float32) - (first + mean)[:, None]
    return x.to(tl.float32) * rstd[:, None]


@triton.jit
def row_stats(x_ptr, mean_ptr, rstd_ptr, rows, end, stride_x, LAYER: tl.constexpr):
    """(first element of x, mean relative to it, rstd) of rows, 0 past the end."""
    live = rows < end
    rstd = tl.load(rstd_ptr + rows, mask=live, other=0.0)
    first = rstd
    mean = rstd
    if LAYER:
        first = tl.load(x_ptr + rows.to(tl.int64) * stride_x, mask=live, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=live, other=0.0)
    return first, mean, rstd


@triton.jit(do_not_specialize=["M", "N", "stride_dy"])
def coefficients_kernel(
    dy_ptr,  # [M, N], row stride stride_dy
    y_ptr,  # [M, N] contiguous
    colsum_ptr,  # [N] fp32
    offset_ptr,  # [N]
    delta_ptr,  # [M] fp32, times K
    eta_ptr,  # [M] fp32, times K
    partial_ptr,  # [programs, N] fp32: sums of dy over the rows of a program
    M,
    N,
    stride_dy,
    LAYER: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    SUM_ROWS: tl.constexpr,  # write partial sums of dy; needs N <= BLOCK
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if ALIGNED:
        N = (N // 8) * 8
        stride_dy = (stride_dy // 8) * 8
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS)
        live = rows < M
        delta = tl.zeros((ROWS,), tl.float32)
        eta = tl.zeros((ROWS,), tl.float32)
        for n in range(0, N, BLOCK):
            cols = n + tl.arange(0, BLOCK)
            inside = cols < N
            keep = live[:, None] & inside[None, :]
            at = rows[:, None].to(tl.int64) * N + cols[None, :]
            dy_at = rows[:, None].to(tl.int64) * stride_dy + cols[None, :]
            dy = tl.load(dy_ptr + dy_at, mask=keep, other=0.0).to(tl.float32)
            y = tl.load(y_ptr + at, mask=keep, other=0.0).to(tl.float32)
            if HAS_OFFSET:
                y = y - tl.load(offset_ptr + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
            delta += tl.sum(dy * y, 1)
            if LAYER:
                eta += tl.sum(dy * tl.load(colsum_ptr + cols, mask=inside, other=0.0)[None, :], 1)
            if SUM_ROWS:
                total += dy
        tl.store(delta_ptr + rows, delta, mask=live)
        if LAYER:
            tl.store(eta_ptr + rows, eta, mask=live)
    if SUM_ROWS:
        cols = tl.arange(0, BLOCK)
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * N + cols, tl.sum(total, 0), mask=cols < N)


class Coefficients(NamedTuple):
    """K * delta and K * eta per row, and the sum of dy over the rows if it came along."""

    delta: Tensor
    eta: Tensor | None
    dy_sum: Tensor | None


def coefficients(
    dy: Tensor, y: Tensor, colsum: Tensor, offset: Tensor | None, layer: bool, want_sum: bool
) -> Coefficients:
    M, N = dy.shape
    block = min(COEFFICIENT_COLUMNS, triton.next_power_of_2(N))
    rows = 64 if INTERPRETED else max(1, COEFFICIENT_COLUMNS // block)
    grid = min(triton.cdiv(M, rows), 4 * multiprocessors(dy.device))
    sum_rows = want_sum and block >= N
    out = torch.empty(2, M, device=dy.device, dtype=torch.float32)
    partial = torch.empty(grid, N, device=dy.device, dtype=torch.float32) if sum_rows else out
    coefficients_kernel[(grid,)](
        dy,
        y,
        colsum,
        offset,
        out[0],
        out[1],
        partial,
        M,
        N,
        dy.stride(0),
        LAYER=layer,
        HAS_OFFSET=offset is not None,
        SUM_ROWS=sum_rows,
        ALIGNED=N % 8 == 0 and dy.stride(0) % 8 == 0,
        ROWS=rows,
        BLOCK=block,
        num_warps=8 if block > 2048 else 4,
    )
    return Coefficients(out[0], out[1] if layer else None, partial.sum(0) if sum_rows else None)


@triton.jit
def means(g, x, stats, LAYER: tl.constexpr):
    """(sum of g * xhat, sum of g) over the columns of a tile. Past K the folded weight is 0, and g with it."""
    delta = tl.sum(g * normalized(x, stats[0], stats[1], stats[2], LAYER), 1)
    eta = delta
    if LAYER:
        eta = tl.sum(g, 1)
    return delta, eta


@triton.jit
def apply(
    g,
    x,
    stats,
    delta,
    eta,
    dx,
    row,
    col,
    M,
    K,
    LAYER: tl.constexpr,
    TMA: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Store rstd * (g - eta - xhat * delta)."""
    xhat = normalized(x, stats[0], stats[1], stats[2], LAYER)
    g = g - xhat * delta[:, None]
    if LAYER:
        g = g - eta[:, None]
    g = g * stats[2][:, None]
    store_tile(dx, rounded(g, x.dtype), row, col, M, K, TMA, BM, BK)


@triton.jit(do_not_specialize=["M", "N", "K", "stride_dy", "stride_x"])
def dx_kernel(
    dy,  # tile source of [M, N]
    weight,  # tile source of [N, K], the folded weight
    x,  # tile source of [M, K]
    dx,  # tile target of [M, K]
    hat,  # tile target of [M, K]: xhat, written with EMIT_HAT
    x_ptr,  # pointer to x, for the row's first element
    mean_ptr,  # [M] fp32, as the next three
    rstd_ptr,
    delta_ptr,  # read without WHOLE, as eta
    eta_ptr,
    M,
    N,
    K,
    stride_dy,
    stride_x,
    LAYER: tl.constexpr,
    WHOLE: tl.constexpr,  # one tile spans the row: BK >= K
    EMIT_HAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    TMA: tl.constexpr,
    WAIT: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,  # columns of dx
    BN: tl.constexpr,  # columns of dy per step
):
    if ALIGNED:
        K = (K // 8) * 8
        N = (N // 8) * 8
        stride_dy = (stride_dy // 8) * 8
        stride_x = (stride_x // 8) * 8
    k_tiles = tl.cdiv(K, BK)
    tiles = tl.cdiv(M, BM) * k_tiles
    width = K.to(tl.float32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        row = (tile // k_tiles) * BM
        col = (tile % k_tiles) * BK
        rows = row + tl.arange(0, BM)
        live = rows < M
        acc = tl.zeros((BM, BK), tl.float32)
        for n in range(0, N, BN):
            a = load_tile(dy, row, n, M, N, stride_dy, TMA, BM, BN)
            b = load_tile(weight, n, col, N, K, K, TMA, BN, BK)
            acc = matmul(a, b, acc, PRECISION)
            acc = finished(acc, WAIT)
        stats = row_stats(x_ptr, mean_ptr, rstd_ptr, rows, M, stride_x, LAYER)
        eta = stats[2]
        if not WHOLE:
            delta = tl.load(delta_ptr + rows, mask=live, other=0.0)
            if LAYER:
                eta = tl.load(eta_ptr + rows, mask=live, other=0.0)
        if SPLIT:  # halves of x are read when they are used, twice if need be
            HALF: tl.constexpr = BK // 2
            left, right = halves(acc, BM, BK)
            if WHOLE:
                x_left = load_tile(x, row, col, M, K, stride_x, TMA, BM, HALF)
                delta, eta = means(left, x_left, stats, LAYER)
                x_right = load_tile(x, row, col + HALF, M, K, stride_x, TMA, BM, HALF)
                delta_right, eta_right = means(right, x_right, stats, LAYER)
                delta += delta_right
                eta += eta_right
            delta /= width
            eta /= width
            x_left = load_tile(x, row, col, M, K, stride_x, TMA, BM, HALF)
            apply(left, x_left, stats, delta, eta, dx, row, col, M, K, LAYER, TMA, BM, HALF)
            x_right = load_tile(x, row, col + HALF, M, K, stride_x, TMA, BM, HALF)
            col += HALF
            apply(right, x_right, stats, delta, eta, dx, row, col, M, K, LAYER, TMA, BM, HALF)
        else:
            x_tile = load_tile(x, row, col, M, K, stride_x, TMA, BM, BK)
            if WHOLE:  # then read x again: kept across both uses, its fp32 copy would not fit beside acc
                delta, eta = means(acc, x_tile, stats, LAYER)
                tl.debug_barrier()
                x_tile = load_tile(x, row, col, M, K, stride_x, TMA, BM, BK)
            delta /= width
            eta /= width
            apply(acc, x_tile, stats, delta, eta, dx, row, col, M, K, LAYER, TMA, BM, BK)
        if EMIT_HAT:  # x once more, now that the accumulators are free
            tl.debug_barrier()
            PART: tl.constexpr = BK // 2 if SPLIT else BK
            col = (tile % k_tiles) * BK
            for part in tl.static_range(BK // PART):
                at = col + part * PART
                x_tile = load_tile(x, row, at, M, K, stride_x, TMA, BM, PART)
                xhat = normalized(x_tile, stats[0], stats[1], stats[2], LAYER)
                store_tile(hat, rounded(xhat, x_tile.dtype), row, at, M, K, TMA, BM, PART)


class RowStats(NamedTuple):
    """What normalises x: each [M] fp32, the mean relative to the row's first element, None for RMSNorm."""

    mean: Tensor | None
    rstd: Tensor


def dx(
    dy: Tensor,
    weight: Tensor,
    x: Tensor,
    stats: RowStats,
    coefs: Coefficients | None,
    config: GemmConfig,
    *,
    emit_hat: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(dx, xhat or None). Without `coefs` a tile must span the row: config.BN >= K.

    `config` names tiles as the forward does: BM rows, BN columns of the result, BK of the summed dimension.
    """
    M, N = dy.shape
    K = weight.shape[1]
    out = torch.empty(M, K, device=x.device, dtype=x.dtype)
    hat = torch.empty_like(out) if emit_hat else out
    tma = config.tma and all(fits_descriptor(t) for t in (dy, weight, x, out))
    part = config.BN // 2 if config.split_store else config.BN
    tiles = triton.cdiv(M, config.BM) * triton.cdiv(K, config.BN)
    grid = min(tiles, config.blocks_per_sm * multiprocessors(x.device)) if config.persistent else tiles

    def tile(t: Tensor, rows: int, cols: int):
        return descriptor(t, rows, cols) if tma else t

    dx_kernel[(grid,)](
        tile(dy, config.BM, config.BK),
        tile(weight, config.BK, config.BN),
        tile(x, config.BM, part),
        tile(out, config.BM, part),
        tile(hat, config.BM, part),
        x,
        stats.mean,
        stats.rstd,
        None if coefs is None else coefs.delta,
        None if coefs is None else coefs.eta,
        M,
        N,
        K,
        dy.stride(0),
        x.stride(0),
        LAYER=stats.mean is not None,
        WHOLE=coefs is None,
        EMIT_HAT=emit_hat,
        ALIGNED=all(s % 8 == 0 for s in (K, N, dy.stride(0), x.stride(0))),
        TMA=tma,
        WAIT=config.wait,
        FLATTEN=config.flatten,
        SPLIT=config.split_store,
        PRECISION=dot_precision(x.dtype),
        BM=config.BM,
        BK=config.BN,
        BN=config.BK,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out, hat if emit_hat else None
