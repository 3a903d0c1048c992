"""linear_norm with one tile that spans the row of the result: GEMM, norm and residual in one kernel.

    z = x W^T + bias (+ residual "before");  zhat = rstd * (z - mean)
    y = act(zhat * gamma + beta) (+ residual "after")

Statistics are two-pass, from the accumulators, and the mean is relative to the row's first element. The row must fit in
the accumulators, which limits N (see configs).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys_norm.kernels.activations import activate
from recsys_norm.kernels.lazy.common import (
    descriptor,
    dot_precision,
    finished,
    fits_descriptor,
    halves,
    load_tile,
    matmul,
    multiprocessors,
    near,
    rounded,
    store_tile,
)
from recsys_norm.kernels.lazy.configs import GemmConfig
from recsys_norm.ops.activations import get

BEFORE = tl.constexpr(1)
AFTER = tl.constexpr(2)
RESIDUAL = {None: 0, "before": 1, "after": 2}


@triton.jit
def vector(ptr, col, N, BN: tl.constexpr):
    """[1, BN] fp32 of a per-column vector."""
    cols = col + tl.arange(0, BN)
    return tl.load(ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def pre_norm(
    acc,
    bias_ptr,
    residual,
    z,
    row,
    col,
    M,
    N,
    stride_residual,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    WRITE_Z: tl.constexpr,
    TYPE: tl.constexpr,
    TMA: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """acc + bias + residual in fp32, 0 past N. Where it is returned it is rounded first, as the backward sees it."""
    if HAS_BIAS:
        acc = acc + vector(bias_ptr, col, N, BN)
    if ADD:
        acc = acc + load_tile(residual, row, col, M, N, stride_residual, TMA, BM, BN).to(tl.float32)
    if WRITE_Z:
        stored = rounded(acc, TYPE)
        store_tile(z, stored, row, col, M, N, TMA, BM, BN)
        acc = stored.to(tl.float32)
    return acc


@triton.jit
def first_column(z, BN: tl.constexpr):
    """The row's first element, from a tile that starts at it."""
    return tl.sum(tl.where((tl.arange(0, BN) == 0)[None, :], z, 0.0), 1)


@triton.jit
def minus(z, row_value, col, N, BN: tl.constexpr):
    """z - row_value, 0 past N."""
    return tl.where((col + tl.arange(0, BN) < N)[None, :], z - row_value[:, None], 0.0)


@triton.jit
def centred(left, right, col, N, count, LAYER: tl.constexpr, SPLIT: tl.constexpr, PART: tl.constexpr):
    """(left - mean, right - mean, first element, mean relative to it, sum of squared deviations) of a tile of `count`
    columns from column col on, in one or two parts. The first element is taken off before anything is summed, so that
    a constant row has no deviation at all. For RMSNorm nothing is subtracted."""
    first = tl.zeros((left.shape[0],), tl.float32)
    mean = first
    if LAYER:
        first = first_column(left, PART)
        left = minus(left, first, col, N, PART)
        total = tl.sum(left, 1)
        if SPLIT:
            right = minus(right, first, col + PART, N, PART)
            total += tl.sum(right, 1)
        mean = total / count
        left = minus(left, mean, col, N, PART)
        if SPLIT:
            right = minus(right, mean, col + PART, N, PART)
    square = tl.sum(left * left, 1)
    if SPLIT:
        square += tl.sum(right * right, 1)
    return left, right, first, mean, square


@triton.jit
def post_norm(
    d,
    rstd,
    gamma_ptr,
    beta_ptr,
    residual,
    y,
    hat,
    row,
    col,
    M,
    N,
    stride_residual,
    HAS_GAMMA: tl.constexpr,
    HAS_BETA: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FAST: tl.constexpr,
    ADD: tl.constexpr,
    WRITE_HAT: tl.constexpr,
    TYPE: tl.constexpr,
    TMA: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Store y, and zhat if it is wanted, from the deviations d."""
    d = d * rstd[:, None]
    if WRITE_HAT:
        store_tile(hat, rounded(d, TYPE), row, col, M, N, TMA, BM, BN)
    if HAS_GAMMA:
        d = d * vector(gamma_ptr, col, N, BN)
    if HAS_BETA:
        d = d + vector(beta_ptr, col, N, BN)
    d = activate(d, ACTIVATION, FAST)
    if ADD:
        d = d + load_tile(residual, row, col, M, N, stride_residual, TMA, BM, BN).to(tl.float32)
    store_tile(y, rounded(d, TYPE), row, col, M, N, TMA, BM, BN)


@triton.jit(do_not_specialize=["M", "N", "K", "stride_x", "stride_residual", "eps"])
def naive_kernel(
    x,  # tile source of [M, K]
    weight,  # tile source of [N, K]
    bias_ptr,  # [N]
    gamma_ptr,  # [N]
    beta_ptr,  # [N]
    residual,  # tile source of [M, N]
    y,  # tile target of [M, N], as the next two
    z,  # written with WRITE_Z
    hat,  # zhat, written with WRITE_HAT
    mean_ptr,  # [M] fp32, relative to the row's first element
    rstd_ptr,  # [M] fp32
    M,
    N,
    K,
    stride_x,
    stride_residual,
    eps,
    LAYER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    HAS_BETA: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FAST: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WRITE_Z: tl.constexpr,
    WRITE_HAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    TMA: tl.constexpr,
    WAIT: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPLIT: tl.constexpr,
    TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,  # >= N
    BK: tl.constexpr,
):
    if ALIGNED:
        K = (K // 8) * 8
        N = (N // 8) * 8
        stride_x = (stride_x // 8) * 8
        stride_residual = (stride_residual // 8) * 8
    width = N.to(tl.float32)
    PART: tl.constexpr = BN // 2 if SPLIT else BN
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM), tl.num_programs(0), flatten=FLATTEN):
        row = tile * BM
        rows = row + tl.arange(0, BM)
        live = rows < M
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            a = load_tile(x, row, k, M, K, stride_x, TMA, BM, BK)
            b = load_tile(weight, 0, k, N, K, K, TMA, BN, BK)
            acc = matmul(a, b.T, acc, PRECISION)
            acc = finished(acc, WAIT)
        if SPLIT:
            left, right = halves(acc, BM, BN)
        else:
            left = acc
            right = acc
        left = pre_norm(
            left, bias_ptr, residual, z, row, 0, M, N, stride_residual,
            HAS_BIAS, RESIDUAL == BEFORE, WRITE_Z, TYPE, TMA, BM, PART,
        )  # fmt: skip
        if SPLIT:
            right = pre_norm(
                right, bias_ptr, residual, z, row, PART, M, N, stride_residual,
                HAS_BIAS, RESIDUAL == BEFORE, WRITE_Z, TYPE, TMA, BM, PART,
            )  # fmt: skip
        left, right, _, mean, square = centred(left, right, 0, N, width, LAYER, SPLIT, PART)
        rstd = tl.rsqrt(square / width + eps)
        tl.store(rstd_ptr + rows, rstd, mask=live)
        if LAYER:
            tl.store(mean_ptr + rows, mean, mask=live)
        tl.debug_barrier()  # keeps the loads of the vectors below from being hoisted to where no register is free
        post_norm(
            left, rstd, gamma_ptr, beta_ptr, residual, y, hat, row, 0, M, N, stride_residual,
            HAS_GAMMA, HAS_BETA, ACTIVATION, FAST, RESIDUAL == AFTER, WRITE_HAT, TYPE, TMA, BM, PART,
        )  # fmt: skip
        if SPLIT:
            post_norm(
                right, rstd, gamma_ptr, beta_ptr, residual, y, hat, row, PART, M, N, stride_residual,
                HAS_GAMMA, HAS_BETA, ACTIVATION, FAST, RESIDUAL == AFTER, WRITE_HAT, TYPE, TMA, BM, PART,
            )  # fmt: skip


TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    residual: Tensor | None,
    *,
    layer: bool,
    eps: float,
    config: GemmConfig,
    position: str | None = None,
    activation: str = "identity",
    write_z: bool = False,
    write_hat: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """(y, z, zhat, mean, rstd); z and zhat are None unless asked for. config.BN must span the row."""
    M, K = x.shape
    N = weight.shape[0]
    x, weight = near(x), weight.to(x.dtype)
    residual = None if residual is None else near(residual)
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    z = torch.empty_like(y) if write_z else None
    hat = torch.empty_like(y) if write_hat else None
    mean = torch.empty(M, device=x.device, dtype=torch.float32) if layer else None
    rstd = torch.empty(M, device=x.device, dtype=torch.float32)
    tma = config.tma and all(fits_descriptor(t) for t in (x, weight, y))
    if tma and residual is not None and not fits_descriptor(residual):
        residual = residual.contiguous()
    part = config.BN // 2 if config.split_store else config.BN

    def tile(t: Tensor | None, rows: int, cols: int):
        return descriptor(t, rows, cols) if tma and t is not None else t

    tiles = triton.cdiv(M, config.BM)
    grid = min(tiles, config.blocks_per_sm * multiprocessors(x.device)) if config.persistent else tiles
    naive_kernel[(grid,)](
        tile(x, config.BM, config.BK),
        tile(weight, config.BN, config.BK),
        bias,
        gamma,
        beta,
        tile(residual, config.BM, part),
        tile(y, config.BM, part),
        tile(z, config.BM, part),
        tile(hat, config.BM, part),
        mean,
        rstd,
        M,
        N,
        K,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        LAYER=layer,
        HAS_BIAS=bias is not None,
        HAS_GAMMA=gamma is not None,
        HAS_BETA=beta is not None,
        ACTIVATION=get(activation).code,
        FAST=x.dtype == torch.bfloat16 and x.is_cuda,
        RESIDUAL=0 if residual is None else RESIDUAL[position],
        WRITE_Z=write_z,
        WRITE_HAT=write_hat,
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
    return y, z, hat, mean, rstd
