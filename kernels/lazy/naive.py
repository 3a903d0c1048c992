"""norm_linear with one tile that spans the row of x: load it, normalise it in place, multiply it by every slice of W.

Statistics are two-pass and norm(x) is rounded once, as in the unfused form. The row must fit beside a slice of W in
shared memory, which limits K (see configs.NAIVE_MAX_FEATURES).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys_norm.kernels.lazy.common import (
    descriptor,
    dot_precision,
    fits_descriptor,
    load_tile,
    matmul,
    rounded,
    store_tile,
)
from recsys_norm.kernels.lazy.configs import GemmConfig


@triton.jit(do_not_specialize=["M", "N", "K", "stride_x", "eps"])
def naive_kernel(
    x_ptr,  # [M, K], row stride stride_x
    weight,  # tile source of [N, K], activation dtype
    y,  # tile target of [M, N]
    gamma_ptr,  # [K]
    beta_ptr,  # [K]
    bias_ptr,  # [N]
    mean_ptr,  # [M] fp32, relative to the row's first element
    rstd_ptr,  # [M] fp32
    M,
    N,
    K,
    stride_x,
    eps,
    LAYER: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,  # >= K
):
    if ALIGNED:
        K = (K // 8) * 8
        N = (N // 8) * 8
        stride_x = (stride_x // 8) * 8
    row = tl.program_id(0) * BM
    rows = row + tl.arange(0, BM)
    live = rows < M
    cols = tl.arange(0, BK)
    inside = cols < K
    width = K.to(tl.float32)
    x = load_tile(x_ptr, row, 0, M, K, stride_x, False, BM, BK)
    h = x.to(tl.float32)
    if LAYER:
        shift = tl.load(x_ptr + rows.to(tl.int64) * stride_x, mask=live, other=0.0).to(tl.float32)
        h = tl.where(inside[None, :], h - shift[:, None], 0.0)
        centre = tl.sum(h, 1) / width
        h = tl.where(inside[None, :], h - centre[:, None], 0.0)
        tl.store(mean_ptr + rows, centre, mask=live)
    rstd = tl.rsqrt(tl.sum(h * h, 1) / width + eps)
    tl.store(rstd_ptr + rows, rstd, mask=live)
    h = h * rstd[:, None]
    if HAS_GAMMA:
        h = h * tl.load(gamma_ptr + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    if HAS_BETA:
        h = h + tl.load(beta_ptr + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    h = rounded(h, x.dtype)
    for n in range(0, N, BN):
        w = load_tile(weight, n, 0, N, K, K, TMA, BN, BK)
        acc = matmul(h, w.T, tl.zeros((BM, BN), tl.float32), PRECISION)
        if HAS_BIAS:
            columns = n + tl.arange(0, BN)
            acc = acc + tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        store_tile(y, rounded(acc, x.dtype), row, n, M, N, TMA, BM, BN)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    layer: bool,
    eps: float,
    config: GemmConfig,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, mean, rstd). config.BK must span the row."""
    M, K = x.shape
    N = weight.shape[0]
    weight = weight.to(x.dtype)
    y = torch.empty(M, N, device=x.device, dtype=x.dtype)
    mean, rstd = (torch.empty(M, device=x.device, dtype=torch.float32) for _ in range(2))
    tma = config.tma and fits_descriptor(weight) and fits_descriptor(y)
    naive_kernel[(triton.cdiv(M, config.BM),)](
        x,
        descriptor(weight, config.BN, config.BK) if tma else weight,
        descriptor(y, config.BM, config.BN) if tma else y,
        gamma,
        beta,
        bias,
        mean,
        rstd,
        M,
        N,
        K,
        x.stride(0),
        eps,
        LAYER=layer,
        HAS_GAMMA=gamma is not None,
        HAS_BETA=beta is not None,
        HAS_BIAS=bias is not None,
        ALIGNED=all(s % 8 == 0 for s in (K, N, x.stride(0))),
        TMA=tma,
        PRECISION=dot_precision(x.dtype),
        BM=config.BM,
        BN=config.BN,
        BK=config.BK,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return y, mean if layer else None, rstd
