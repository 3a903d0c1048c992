"""linear_norm in two kernels: a GEMM whose epilogue writes z and statistics per tile, then a pass that normalises.

The GEMM has no limit on N. Its per-tile (mean, M2) also serve where the norm is absorbed by the next GEMM (deferred).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys_norm.kernels.activations import IDENTITY
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
    near,
)
from recsys_norm.kernels.lazy.configs import GemmConfig
from recsys_norm.kernels.postnorm.naive import TYPES, centred, post_norm, pre_norm


@triton.jit
def finish_part(
    acc,
    bias_ptr,
    residual,
    z,
    first_ptr,
    mean_ptr,
    square_ptr,
    row,
    col,
    slot,
    M,
    N,
    stride_residual,
    LAYER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    TYPE: tl.constexpr,
    TMA: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Store a part of z and the statistics of its rows, at column col and in slot `slot`."""
    acc = pre_norm(acc, bias_ptr, residual, z, row, col, M, N, stride_residual, HAS_BIAS, ADD, True, TYPE, TMA, BM, BN)
    count = tl.minimum(N - col, BN).to(tl.float32)
    _, _, first, mean, square = centred(acc, acc, col, N, count, LAYER, False, BN)
    rows = row + tl.arange(0, BM)
    at = tl.cast(slot, tl.int64) * M + rows
    tl.store(square_ptr + at, square, mask=rows < M)
    if LAYER:
        tl.store(first_ptr + at, first, mask=rows < M)
        tl.store(mean_ptr + at, mean, mask=rows < M)


@triton.jit(do_not_specialize=["M", "N", "K", "stride_x", "stride_residual"])
def gemm_kernel(
    x,  # tile source of [M, K]
    weight,  # tile source of [N, K]
    bias_ptr,  # [N]
    residual,  # tile source of [M, N]
    z,  # tile target of [M, N]
    first_ptr,  # [parts of N, M] fp32: first element of a row's part
    mean_ptr,  # [parts of N, M] fp32: mean of that part, relative to its first element
    square_ptr,  # [parts of N, M] fp32: sum of its squared deviations, or of its squares for RMSNorm
    M,
    N,
    K,
    stride_x,
    stride_residual,
    LAYER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ALIGNED: tl.constexpr,
    TMA: tl.constexpr,
    WAIT: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPLIT: tl.constexpr,
    TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    if ALIGNED:
        K = (K // 8) * 8
        N = (N // 8) * 8
        stride_x = (stride_x // 8) * 8
        stride_residual = (stride_residual // 8) * 8
    PART: tl.constexpr = BN // 2 if SPLIT else BN
    n_tiles = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * n_tiles, tl.num_programs(0), flatten=FLATTEN):
        row = (tile // n_tiles) * BM
        column = tile % n_tiles
        col = column * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            a = load_tile(x, row, k, M, K, stride_x, TMA, BM, BK)
            b = load_tile(weight, col, k, N, K, K, TMA, BN, BK)
            acc = matmul(a, b.T, acc, PRECISION)
            acc = finished(acc, WAIT)
        if SPLIT:
            left, right = halves(acc, BM, BN)
            finish_part(
                left, bias_ptr, residual, z, first_ptr, mean_ptr, square_ptr, row, col, 2 * column, M, N,
                stride_residual, LAYER, HAS_BIAS, ADD, TYPE, TMA, BM, PART,
            )  # fmt: skip
            col += PART
            if col < N:
                finish_part(
                    right, bias_ptr, residual, z, first_ptr, mean_ptr, square_ptr, row, col, 2 * column + 1, M, N,
                    stride_residual, LAYER, HAS_BIAS, ADD, TYPE, TMA, BM, PART,
                )  # fmt: skip
        else:
            finish_part(
                acc, bias_ptr, residual, z, first_ptr, mean_ptr, square_ptr, row, col, column, M, N,
                stride_residual, LAYER, HAS_BIAS, ADD, TYPE, TMA, BM, PART,
            )  # fmt: skip


@triton.jit(do_not_specialize=["M", "N", "tile_width", "eps"])
def merge_kernel(
    first_ptr,  # [parts, M] fp32, as the next two
    mean_ptr,
    square_ptr,
    row_mean_ptr,  # [M] fp32, relative to the row's first element
    rstd_ptr,  # [M] fp32
    scale_ptr,  # [M] fp32: rstd, and 0 where the row is constant
    M,
    N,
    tile_width,
    eps,
    LAYER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(mean, M2) of the parts of a row to mean and rstd: n and M2 add up, and M2 gains delta^2 * n_a * n_b / n."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = rows < M
    mean = tl.zeros((BLOCK,), tl.float32)
    m2 = tl.zeros((BLOCK,), tl.float32)
    seen = tl.zeros((BLOCK,), tl.float32)
    if LAYER:
        origin = tl.load(first_ptr + rows, mask=live, other=0.0)
    tiles = tl.cdiv(N, tile_width)
    for tile in range(0, tiles):
        at = tl.cast(tile, tl.int64) * M + rows
        m2 += tl.load(square_ptr + at, mask=live, other=0.0)
        if LAYER:
            count = tl.minimum(N - tile * tile_width, tile_width).to(tl.float32)
            total = seen + count
            part = tl.load(first_ptr + at, mask=live, other=0.0) - origin
            delta = part + tl.load(mean_ptr + at, mask=live, other=0.0) - mean
            mean += delta * (count / total)
            m2 += delta * delta * (seen * count / total)
            seen = total
    rstd = tl.rsqrt(m2 / N.to(tl.float32) + eps)
    scale = rstd
    if LAYER:
        tl.store(row_mean_ptr + rows, mean, mask=live)
        scale = tl.where(m2 > 0.0, rstd, 0.0)
    tl.store(rstd_ptr + rows, rstd, mask=live)
    tl.store(scale_ptr + rows, scale, mask=live)


@triton.jit(do_not_specialize=["M", "N", "stride_residual"])
def apply_kernel(
    z_ptr,  # [M, N] contiguous; y may be the same memory
    gamma_ptr,  # [N]
    beta_ptr,  # [N]
    residual,  # pointer to [M, N], row stride stride_residual
    y,  # [M, N] contiguous, as hat
    hat,
    first_ptr,  # [M] fp32: the row's first element
    mean_ptr,  # [M] fp32, relative to it
    rstd_ptr,  # [M] fp32
    M,
    N,
    stride_residual,
    LAYER: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    HAS_BETA: tl.constexpr,
    ADD: tl.constexpr,
    WRITE_HAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if ALIGNED:
        N = (N // 8) * 8
        stride_residual = (stride_residual // 8) * 8
    row = tl.program_id(0) * ROWS
    col = tl.program_id(1) * BLOCK
    rows = row + tl.arange(0, ROWS)
    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
    d = load_tile(z_ptr, row, col, M, N, N, False, ROWS, BLOCK).to(tl.float32)
    if LAYER:
        d = d - tl.load(first_ptr + rows, mask=rows < M, other=0.0)[:, None]
        d = d - tl.load(mean_ptr + rows, mask=rows < M, other=0.0)[:, None]
    post_norm(
        d, rstd, gamma_ptr, beta_ptr, residual, y, hat, row, col, M, N, stride_residual,
        HAS_GAMMA, HAS_BETA, IDENTITY, False, ADD, WRITE_HAT, TYPE, False, ROWS, BLOCK,
    )  # fmt: skip


class Product(NamedTuple):
    """z = x W^T + bias (+ residual) as stored, and its rows' statistics, each [M] fp32."""

    z: Tensor
    first: Tensor  # the row's first element (LayerNorm)
    mean: Tensor | None  # relative to it
    rstd: Tensor
    scale: Tensor  # rstd, and 0 where the row is constant


def gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    layer: bool,
    eps: float,
    config: GemmConfig,
) -> Product:
    """z with the statistics of its rows; a residual is added before they are taken."""
    M, K = x.shape
    N = weight.shape[0]
    x, weight = near(x), weight.to(x.dtype)
    residual = None if residual is None else near(residual)
    z = torch.empty(M, N, device=x.device, dtype=x.dtype)
    n_tiles = triton.cdiv(N, config.BN)
    tma = config.tma and all(fits_descriptor(t) for t in (x, weight, z))
    if tma and residual is not None and not fits_descriptor(residual):
        residual = residual.contiguous()
    part = config.BN // 2 if config.split_store else config.BN
    parts = torch.empty(3, triton.cdiv(N, part), M, device=x.device, dtype=torch.float32)

    def tile(t: Tensor | None, rows: int, cols: int):
        return descriptor(t, rows, cols) if tma and t is not None else t

    tiles = triton.cdiv(M, config.BM) * n_tiles
    grid = min(tiles, config.blocks_per_sm * multiprocessors(x.device)) if config.persistent else tiles
    gemm_kernel[(grid,)](
        tile(x, config.BM, config.BK),
        tile(weight, config.BN, config.BK),
        bias,
        tile(residual, config.BM, part),
        tile(z, config.BM, part),
        *parts,
        M,
        N,
        K,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        LAYER=layer,
        HAS_BIAS=bias is not None,
        ADD=residual is not None,
        ALIGNED=all(s % 8 == 0 for s in (K, N, x.stride(0), 0 if residual is None else residual.stride(0))),
        TMA=tma,
        WAIT=config.wait,
        FLATTEN=config.flatten,
        SPLIT=config.split_store,
        TYPE=TYPES[x.dtype],
        PRECISION=dot_precision(x.dtype),
        BM=config.BM,
        BN=config.BN,
        BK=config.BK,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    mean = torch.empty(M, device=x.device, dtype=torch.float32) if layer else None
    rstd, scale = (torch.empty(M, device=x.device, dtype=torch.float32) for _ in range(2))
    block = 512
    merge_kernel[(triton.cdiv(M, block),)](
        *parts, mean, rstd, scale, M, N, part, eps, LAYER=layer, BLOCK=block, num_warps=4
    )
    return Product(z, parts[0, 0], mean, rstd, scale)


def apply(
    product: Product,
    gamma: Tensor | None,
    beta: Tensor | None,
    residual: Tensor | None,
    *,
    write_hat: bool,
    keep_z: bool,
) -> tuple[Tensor, Tensor | None]:
    """(y, zhat or None) from z; a residual is added after the norm. Without keep_z, y takes z's memory."""
    z, first, mean, rstd, _ = product
    M, N = z.shape
    residual = None if residual is None else near(residual)
    y = torch.empty_like(z) if keep_z else z
    hat = torch.empty_like(z) if write_hat else None
    block = min(512, max(16, triton.next_power_of_2(N)))
    rows = 128 if INTERPRETED else max(1, 4096 // block)
    apply_kernel[(triton.cdiv(M, rows), triton.cdiv(N, block))](
        z,
        gamma,
        beta,
        residual,
        y,
        hat,
        first,
        mean,
        rstd,
        M,
        N,
        0 if residual is None else residual.stride(0),
        LAYER=mean is not None,
        HAS_GAMMA=gamma is not None,
        HAS_BETA=beta is not None,
        ADD=residual is not None,
        WRITE_HAT=write_hat,
        ALIGNED=all(s % 8 == 0 for s in (N, 0 if residual is None else residual.stride(0))),
        TYPE=TYPES[z.dtype],
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
    )
    return y, hat
