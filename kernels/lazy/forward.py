"""norm_linear as one GEMM that never writes norm(x): the norm is a row scale (and for LayerNorm a rank-one term).

    W' = W * gamma;  c_n = sum_k W'_nk;  b' = bias + W beta
    RMSNorm    y = r * (x W'^T) + b'
    LayerNorm  y = r * (x W'^T - mean * c) + b'

x is read once: the row sums accumulate while the product runs, or the statistics come from a small kernel before it.
fp32 inputs take the second way and subtract the mean from the tile in registers, since the rank-one term would cancel
digits that fp32 is expected to keep. Source: "Towards Free Normalization", lazy pre-norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys_norm.kernels.lazy.common import (
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
from recsys_norm.kernels.lazy.configs import GemmConfig
from recsys_norm.kernels.lazy.fold import Folded
from recsys_norm.kernels.lazy.stats import Stats


@triton.jit
def add_to_sums(x, shift, s1, s2, k, K, LAYER: tl.constexpr, EVEN_K: tl.constexpr, BK: tl.constexpr):
    """Add a tile to the row sums: of x^2, or of x - shift and its square. Columns past K hold 0 and must not count."""
    x = x.to(tl.float32)
    if LAYER:
        x = x - shift[:, None]
        if not EVEN_K:
            x = tl.where((k + tl.arange(0, BK) < K)[None, :], x, 0.0)
        s1 += tl.sum(x, 1)
    s2 += tl.sum(x * x, 1)
    return s1, s2


@triton.jit
def statistics(s1, s2, K, eps, LAYER: tl.constexpr):
    """(mean - shift, rstd, scale) from the shifted sums; scale is 0 for a constant row, whose deviations are 0."""
    mean = s1
    var = s2 / K.to(tl.float32)
    if LAYER:
        mean = s1 / K.to(tl.float32)
        var = tl.maximum(var - mean * mean, 0.0)
    rstd = tl.rsqrt(var + eps)
    scale = rstd
    if LAYER:
        scale = tl.where(var > 0.0, rstd, 0.0)
    return mean, rstd, scale


@triton.jit
def finish(
    acc, mean, scale, colsum_ptr, offset_ptr, col, N, RANK_ONE: tl.constexpr, HAS_OFFSET: tl.constexpr, BN: tl.constexpr
):
    """scale * (acc - mean * colsum) + offset, in fp32."""
    cols = col + tl.arange(0, BN)
    if RANK_ONE:
        colsum = tl.load(colsum_ptr + cols, mask=cols < N, other=0.0)
        acc = acc - mean[:, None] * colsum[None, :]
    acc = acc * scale[:, None]
    if HAS_OFFSET:
        acc = acc + tl.load(offset_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit(do_not_specialize=["M", "N", "K", "stride_x", "eps"])
def forward_kernel(
    x,  # tile source of [M, K]
    weight,  # tile source of [N, K], the folded weight
    y,  # tile target of [M, N]
    x_ptr,  # pointer to x, for the row's first element
    colsum_ptr,  # [N] fp32, read for LayerNorm
    offset_ptr,  # [N]
    mean_ptr,  # [M] fp32, relative to the row's first element, read or written
    rstd_ptr,  # [M] fp32, written with IN_LOOP
    scale_ptr,  # [M] fp32, read without IN_LOOP
    M,
    N,
    K,
    stride_x,
    eps,
    LAYER: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    IN_LOOP: tl.constexpr,  # statistics from the tiles of this kernel
    CENTRE: tl.constexpr,  # subtract the given mean from the tiles (fp32 LayerNorm)
    EVEN_K: tl.constexpr,  # no column of the last tile lies past K
    ALIGNED: tl.constexpr,  # K, N and the row stride are multiples of 8
    TMA: tl.constexpr,
    WAIT: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    if ALIGNED:
        K = (K // 8) * 8
        N = (N // 8) * 8
        stride_x = (stride_x // 8) * 8
    n_tiles = tl.cdiv(N, BN)
    tiles = tl.cdiv(M, BM) * n_tiles
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        row = (tile // n_tiles) * BM  # the tiles of a row block follow each other, so x comes from L2 after the first
        col = (tile % n_tiles) * BN
        rows = row + tl.arange(0, BM)
        live = rows < M
        shift = tl.zeros((BM,), tl.float32)
        mean = shift
        if LAYER:
            shift = tl.load(x_ptr + rows.to(tl.int64) * stride_x, mask=live, other=0.0).to(tl.float32)
            if not IN_LOOP:
                mean = tl.load(mean_ptr + rows, mask=live, other=0.0)
        s1 = tl.zeros((BM,), tl.float32)
        s2 = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            a = load_tile(x, row, k, M, K, stride_x, TMA, BM, BK)
            b = load_tile(weight, col, k, N, K, K, TMA, BN, BK)
            if CENTRE:
                a = (a - shift[:, None]) - mean[:, None]
            acc = matmul(a, b.T, acc, PRECISION)
            if IN_LOOP:
                s1, s2 = add_to_sums(a, shift, s1, s2, k, K, LAYER, EVEN_K, BK)
            acc = finished(acc, WAIT)
        if IN_LOOP:
            mean, rstd, scale = statistics(s1, s2, K, eps, LAYER)
            if col == 0:
                tl.store(rstd_ptr + rows, rstd, mask=live)
                if LAYER:
                    tl.store(mean_ptr + rows, mean, mask=live)
        else:
            scale = tl.load(scale_ptr + rows, mask=live, other=0.0)
        mean += shift
        RANK_ONE: tl.constexpr = LAYER and not CENTRE
        out_type: tl.constexpr = y.dtype if TMA else y.dtype.element_ty
        if SPLIT_STORE:
            left, right = halves(acc, BM, BN)
            HALF: tl.constexpr = BN // 2
            left = finish(left, mean, scale, colsum_ptr, offset_ptr, col, N, RANK_ONE, HAS_OFFSET, HALF)
            store_tile(y, rounded(left, out_type), row, col, M, N, TMA, BM, HALF)
            right = finish(right, mean, scale, colsum_ptr, offset_ptr, col + HALF, N, RANK_ONE, HAS_OFFSET, HALF)
            store_tile(y, rounded(right, out_type), row, col + HALF, M, N, TMA, BM, HALF)
        else:
            acc = finish(acc, mean, scale, colsum_ptr, offset_ptr, col, N, RANK_ONE, HAS_OFFSET, BN)
            store_tile(y, rounded(acc, out_type), row, col, M, N, TMA, BM, BN)


def forward(
    x: Tensor, folded: Folded, layer: bool, eps: float, config: GemmConfig, stats: Stats | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, mean, rstd). Without `stats` the kernel takes the statistics from its own tiles, as `config` must allow."""
    M, K = x.shape
    N = folded.weight.shape[0]
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    in_loop = stats is None
    if in_loop:
        mean, rstd = (torch.empty(M, device=x.device, dtype=torch.float32) for _ in range(2))
        scale = rstd
    else:
        mean, rstd, scale = stats
    tma = config.tma and all(fits_descriptor(t) for t in (x, folded.weight, y))
    half = config.BN // 2 if config.split_store else config.BN
    launch_forward(x, folded, y, mean, rstd, scale, layer, eps, config, tma, half, in_loop)
    return y, mean if layer else None, rstd


def launch_forward(x, folded, y, mean, rstd, scale, layer, eps, config, tma, half, in_loop):
    M, K = x.shape
    N = y.shape[1]
    tiles = triton.cdiv(M, config.BM) * triton.cdiv(N, config.BN)
    grid = min(tiles, config.blocks_per_sm * multiprocessors(x.device)) if config.persistent else tiles
    forward_kernel[(grid,)](
        descriptor(x, config.BM, config.BK) if tma else x,
        descriptor(folded.weight, config.BN, config.BK) if tma else folded.weight,
        descriptor(y, config.BM, half) if tma else y,
        x,
        folded.colsum,
        folded.offset,
        mean,
        rstd,
        scale,
        M,
        N,
        K,
        x.stride(0),
        eps,
        LAYER=layer,
        HAS_OFFSET=folded.offset is not None,
        IN_LOOP=in_loop,
        CENTRE=layer and x.dtype == torch.float32,
        EVEN_K=not (layer and in_loop) or K % config.BK == 0,
        ALIGNED=all(s % 8 == 0 for s in (K, N, x.stride(0))),
        TMA=tma,
        WAIT=config.wait,
        FLATTEN=config.flatten,
        SPLIT_STORE=config.split_store,
        PRECISION=dot_precision(x.dtype),
        BM=config.BM,
        BN=config.BN,
        BK=config.BK,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
