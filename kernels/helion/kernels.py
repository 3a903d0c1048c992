"""The two forwards as Helion kernels, which become Triton. The widths of a row are compiled in, the number of rows is not.

    lazy      y = r * (x W'^T - mean * c) + b'     the norm as a scale of the product's rows, x read once
    postnorm  y = norm(x W^T + bias)               one tile spans the row of the product

Shape legend: M rows, K in-features, N out-features.
"""

from __future__ import annotations

import functools

import helion
import helion.language as hl
import torch
from torch import Tensor

from recsys_norm.kernels.helion.configs import Tile


def _product_done(acc):
    """The same value, used by no instruction: a use inside the loop makes Triton wait for the asynchronous matrix product
    before the iteration ends, since its pipeliner refills a tile that feeds a product and a sum one step too early."""
    return hl.inline_asm_elementwise("", "=f,0", [acc], dtype=torch.float32, is_pure=True, pack=1)


def lazy(
    x: Tensor,  # [M, K]
    weight: Tensor,  # [N, K], the folded weight
    colsum: Tensor,  # [N] fp32, read with `layer`
    offset: Tensor,  # [N], read with `has_offset`
    eps: float,
    layer: hl.constexpr,
    has_offset: hl.constexpr,
    wait: hl.constexpr,  # for the product in every step; Triton's interpreter cannot
):
    M, K = x.size()
    N = weight.size(0)
    K = hl.specialize(K)
    N = hl.specialize(N)
    y = torch.empty([M, N], dtype=x.dtype, device=x.device)
    mean = torch.empty([M], dtype=torch.float32, device=x.device)  # relative to the row's first element
    rstd = torch.empty([M], dtype=torch.float32, device=x.device)
    for tile_m, tile_n in hl.tile([M, N]):
        acc = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        total = hl.zeros([tile_m], dtype=torch.float32)
        squares = hl.zeros([tile_m], dtype=torch.float32)
        first = x[tile_m, 0].to(torch.float32)
        for tile_k in hl.tile(K):
            part = x[tile_m, tile_k]
            acc = torch.addmm(acc, part, weight[tile_n, tile_k].T)
            wide = part.to(torch.float32)
            if layer:
                # Helion leaves out its own mask here: past K the tile holds 0, and 0 - first would count
                wide = torch.where((tile_k.index < K)[None, :], wide - first[:, None], 0.0)
                total = total + wide.sum(-1)
            squares = squares + (wide * wide).sum(-1)
            if wait:
                acc = _product_done(acc)
        variance = squares / K
        if layer:
            centre = total / K
            variance = torch.clamp(variance - centre * centre, min=0.0)
            mean[tile_m] = centre
            acc = acc - (first + centre)[:, None] * colsum[tile_n][None, :]
        scale = torch.rsqrt(variance + eps)
        rstd[tile_m] = scale
        if layer:
            scale = torch.where(variance > 0.0, scale, 0.0)  # what a constant row leaves is rounding
        acc = acc * scale[:, None]
        if has_offset:
            acc = acc + offset[tile_n].to(torch.float32)[None, :]
        y[tile_m, tile_n] = acc.to(x.dtype)
    return y, mean, rstd


def postnorm(
    x: Tensor,  # [M, K]
    weight: Tensor,  # [N, K]
    bias: Tensor,  # [N], read with `has_bias`; likewise the next three
    gamma: Tensor,  # [N]
    beta: Tensor,  # [N]
    residual: Tensor,  # [M, N], added before or after the norm
    eps: float,
    layer: hl.constexpr,
    has_bias: hl.constexpr,
    has_gamma: hl.constexpr,
    has_beta: hl.constexpr,
    before: hl.constexpr,
    after: hl.constexpr,
    write_z: hl.constexpr,
    write_hat: hl.constexpr,
):
    M, K = x.size()
    N = weight.size(0)
    K = hl.specialize(K)
    N = hl.specialize(N)
    y = torch.empty([M, N], dtype=x.dtype, device=x.device)
    z = torch.empty([M if write_z else 0, N], dtype=x.dtype, device=x.device)
    hat = torch.empty([M if write_hat else 0, N], dtype=x.dtype, device=x.device)
    mean = torch.empty([M], dtype=torch.float32, device=x.device)  # relative to the row's first element
    rstd = torch.empty([M], dtype=torch.float32, device=x.device)
    for tile_m in hl.tile(M):
        acc = hl.zeros([tile_m, N], dtype=torch.float32)
        for tile_k in hl.tile(K):
            acc = torch.addmm(acc, x[tile_m, tile_k], weight[:, tile_k].T)
        if has_bias:
            acc = acc + bias[:].to(torch.float32)[None, :]
        if before:
            acc = acc + residual[tile_m, :].to(torch.float32)
        if write_z:
            z[tile_m, :] = acc.to(x.dtype)
        if layer:
            centre = acc.sum(-1) / N
            start = torch.where((hl.arange(N) == 0)[None, :], acc.to(x.dtype).to(torch.float32), 0.0).sum(-1)
            mean[tile_m] = centre - start
            acc = acc - centre[:, None]
        scale = torch.rsqrt((acc * acc).sum(-1) / N + eps)
        rstd[tile_m] = scale
        acc = acc * scale[:, None]
        if write_hat:
            hat[tile_m, :] = acc.to(x.dtype)
        if has_gamma:
            acc = acc * gamma[:].to(torch.float32)[None, :]
        if has_beta:
            acc = acc + beta[:].to(torch.float32)[None, :]
        if after:
            acc = acc + residual[tile_m, :].to(torch.float32)
        y[tile_m, :] = acc.to(x.dtype)
    return y, z, hat, mean, rstd


@functools.cache
def compiled(function, tile: Tile) -> helion.Kernel:
    """A kernel with one configuration, which nothing tunes at run time."""
    sizes = [tile.rows, tile.depth] if tile.columns is None else [tile.rows, tile.columns, tile.depth]
    options: dict = dict(num_warps=tile.warps, num_stages=tile.stages)
    if tile.columns is not None:
        options |= dict(
            loop_orders=[[1, 0]]
        )  # the tiles of a row block follow each other: x comes from L2 after the first
    if tile.tma:
        options |= dict(indexing="tensor_descriptor")
    return helion.kernel(function, config=helion.Config(block_sizes=sizes, **options), static_shapes=False)
