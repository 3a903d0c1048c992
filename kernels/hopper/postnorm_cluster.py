"""linear_norm on Hopper with W in the shared memory of a cluster of CTAs, over which a row of the result is spread (kernels
in postnorm_resident_kernels.py)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from recsys_norm.kernels.hopper import launch
from recsys_norm.kernels.hopper.lazy import NAMES, aligned, tma_ready

ROWS, BLOCK = 64, 64  # of a block, k-block
COLUMNS = 128  # of a CTA
SHAPES = ((4, 4), (6, 4), (8, 4), (8, 8))  # k-blocks of W and CTAs at most, as shared memory bounds them
MAX_K = BLOCK * SHAPES[-1][0]
MAX_FEATURES = COLUMNS * SHAPES[-1][1]  # of a norm; 8 CTAs are the largest cluster that every device runs
FORM = "direct"  # of the kernel: resident, direct or spread
_ABSENT, _NARROW, _WIDE = 0, 1, 2  # kinds of a vector, as in the kernels
_HAT, _SUM, _AFTER, _SAVE, _BEFORE = 1, 2, 4, 8, 16  # bits of `form`, likewise


class Result(NamedTuple):
    y: Tensor
    z: Tensor | None
    hat: Tensor | None
    mean: Tensor | None
    rstd: Tensor


def why_not(K: int, N: int, groups: int) -> str | None:
    """N: all out-features. Each of several groups begins with a CTA's first column."""
    width = N // groups
    if K > MAX_K:
        return f"it holds {MAX_K} in-features in shared memory and there are {K}"
    if width > MAX_FEATURES:
        return f"a cluster holds {MAX_FEATURES} out-features of a norm and there are {width}"
    if groups > 1 and width % COLUMNS:
        return f"it takes groups of multiples of {COLUMNS} out-features, not of {width}"
    return None


@functools.cache
def kernel_for(dtype: torch.dtype, layer: bool, K: int, members: int, form: str) -> launch.Kernel:
    """The kernel, to be launched on clusters of so many CTAs."""
    blocks, peers = next(s for s in SHAPES if BLOCK * s[0] >= K and s[1] >= members)
    if form == "spread" and layer and peers == 8:
        form = "direct"
    base = launch.get(f"postnorm_{form}_{'layer' if layer else 'rms'}_{NAMES[dtype]}_{blocks}_{peers}")
    return launch.Kernel(base.name, base.arch, {**base.entry, "cluster": members})


@functools.cache
def clusters_at_once(kernel: launch.Kernel, device: torch.device) -> int:
    return max(1, kernel.resident_clusters(device))


def forward(
    x: Tensor,  # [M, K], bf16 or fp16
    weight: Tensor,  # [N, K]
    bias: Tensor | None,  # [N], like gamma and beta in x's dtype or fp32
    gamma: Tensor | None,
    beta: Tensor | None,
    residual: Tensor | None,  # [M, N], added at `position`
    *,
    layer: bool,
    eps: float,
    position: str | None,  # "before" or "after" the norm
    groups: int = 1,
    write_z: bool = False,
    write_hat: bool = False,
    saves: bool = True,
) -> Result:
    """y, z if asked for, zhat if asked for, mean relative to the norm's first value (layer norm only) and rstd, the last
    two [M * groups]."""
    x, weight = tma_ready(x), aligned(weight.to(x.dtype))
    (M, K), N = x.shape, weight.shape[0]
    members = -(-N // groups // COLUMNS)
    kernel = kernel_for(x.dtype, layer, K, members, FORM)
    clusters = groups * min(max(1, clusters_at_once(kernel, x.device) // groups), -(-M // ROWS))
    y = x.new_empty(M, N)
    side = torch.empty_like(y) if write_z or write_hat else None
    rstd = x.new_empty(M * groups, dtype=torch.float32)
    mean = torch.empty_like(rstd) if layer else None
    residual = None if residual is None else tma_ready(residual)
    vectors = [None if t is None else aligned(t.contiguous()) for t in (bias, gamma, beta)]
    kinds = [_ABSENT if t is None else _WIDE if t.dtype == torch.float32 else _NARROW for t in vectors]
    form = _HAT * write_hat + _SUM * write_z + _SAVE * saves
    if residual is not None:
        form += {"before": _BEFORE, "after": _AFTER}[str(position)]
    gapless = x.stride(0) == K
    fetched = ROWS * K * x.element_size() if gapless else 0
    other = y if side is None else side
    pitch = 0 if residual is None else residual.stride(0)
    if FORM == "resident":
        matrices = (x, weight, y, other, x, residual)
        pointers = (*vectors, mean, rstd, pitch)
        sizes = (M, N // groups, -(-K // BLOCK), members, groups, fetched)
    else:
        matrices = (x, quads(weight), x, y, other, residual)
        pointers = (*vectors, mean, rstd, N, pitch)
        also = ROWS * N * x.element_size() if pitch == N else 0
        sizes = (M, N // groups, -(-K // BLOCK), members, groups, fetched, also)
    kernel(members * clusters, *matrices, *pointers, *sizes, *kinds, form, eps)
    return Result(y, side if write_z else None, side if write_hat else None, mean, rstd)


def quads(weight: Tensor) -> Tensor:
    """[N / 32, 4, 4, 2, K] with row 32 J + 8 q + 2 i + e of W at [J, i, q, e]: a view, where 32 divides N."""
    N, K = weight.shape
    if N % 32:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, -N % 32))
    return weight.view(-1, 4, 4, 2, K).transpose(1, 2)
