"""linear_norm on Hopper with W in the shared memory of a cluster of CTAs, over which a row of the result is spread. Two
kernels: `direct` stores results and loads a residual straight from and to registers and serves what has a residual
(postnorm_direct_kernels.py); `joint` serves the rest (postnorm_joint_kernels.py)."""

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
_ABSENT, _NARROW, _WIDE = 0, 1, 2  # kinds of a vector, as in the kernels
HAT, SUM, AFTER, SAVE, _BEFORE = 1, 2, 4, 8, 16  # bits of `form`, likewise


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
def kernel_for(way: str, dtype: torch.dtype, layer: bool, K: int, members: int) -> launch.Kernel:
    """The kernel, to be launched on clusters of so many CTAs."""
    blocks, peers = next(s for s in SHAPES if BLOCK * s[0] >= K and s[1] >= members)
    norm = "layer" if layer else "rms"
    base = launch.get(f"postnorm_{way}_{norm}_{NAMES[dtype]}_{blocks}_{peers}")
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
    way = "joint" if residual is None else "direct"
    kernel = kernel_for(way, x.dtype, layer, K, members)
    clusters = groups * min(max(1, clusters_at_once(kernel, x.device) // groups), -(-M // ROWS))
    y = x.new_empty(M, N)
    side = torch.empty_like(y) if write_z or write_hat else None
    rstd = x.new_empty(M * groups, dtype=torch.float32)
    mean = torch.empty_like(rstd) if layer else None
    residual = None if residual is None else tma_ready(residual)
    vectors, kinds = parameter_vectors(bias, gamma, beta)
    form = HAT * write_hat + SUM * write_z + SAVE * saves
    other, ends = y if side is None else side, (*vectors, mean, rstd)
    sizes = (M, N // groups, -(-K // BLOCK), members, groups, gapless_bytes(x))
    if residual is None:
        args = (x, weight, y, other, x, *ends, *sizes)
    else:
        form += {"before": _BEFORE, "after": AFTER}[str(position)]
        fetch = gapless_bytes(residual)
        args = (x, quads(weight), x, y, other, residual, *ends, N, residual.stride(0), *sizes, fetch)
    kernel(members * clusters, *args, *kinds, form, eps)
    return Result(y, side if write_z else None, side if write_hat else None, mean, rstd)


def parameter_vectors(*parameters: Tensor | None) -> tuple[list[Tensor | None], list[int]]:
    """Vectors as kernels read them, and their kinds."""
    vectors = [None if t is None else aligned(t.contiguous()) for t in parameters]
    kinds = [_ABSENT if t is None else _WIDE if t.dtype == torch.float32 else _NARROW for t in vectors]
    return vectors, kinds


def gapless_bytes(t: Tensor) -> int:
    """Of a block's rows, if they follow each other without a gap, else 0: they are fetched ahead as one piece."""
    return ROWS * t.shape[1] * t.element_size() if t.stride(0) == t.shape[1] else 0


def quads(weight: Tensor) -> Tensor:
    """[N / 32, 4, 4, 2, K] with row 32 J + 8 q + 2 i + e of W at [J, i, q, e], as `direct` takes it: a view,
    where 32 divides N."""
    N, K = weight.shape
    if N % 32:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, -N % 32))
    return weight.view(-1, 4, 4, 2, K).transpose(1, 2)
