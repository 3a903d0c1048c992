"""Block sizes of the lazy kernels: data, chosen by measurement, no tuning at run time.

`BM` counts rows of x, `BN` columns of the result and `BK` the summed dimension; in wgrad BM is the summed dimension and
[BN, BK] a tile of dW. Only a few configurations exist per kernel, so that no call compiles for long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

WHOLE_ROW_FEATURES = 512  # up to this K a block holds a whole row of the gradient at xhat; beyond, y is saved
NAIVE_MAX_FEATURES = {2: 512, 4: 128}  # by bytes per value: [64 rows, K] beside a slice of W in shared memory
WGRAD_MAX_FEATURES = 512  # up to this K xhat is made on the way into the weight gradient
COEFFICIENT_COLUMNS = 4096  # values per step of the row sums over dy and y


@dataclass(frozen=True)
class GemmConfig:
    """One configuration of a GEMM kernel. `wait` ends every iteration with the matrix product, which Hopper needs where
    a tile feeds both it and ordinary instructions; `split_store` halves the staging buffer of the epilogue."""

    BM: int
    BN: int
    BK: int
    num_stages: int
    num_warps: int
    in_loop: bool = False
    wait: bool = False
    tma: bool = False
    persistent: bool = False
    blocks_per_sm: int = 1
    flatten: bool = False
    split_store: bool = False


# What the interpreter runs: few, large blocks, through the code paths of Hopper.
_INTERPRETED = GemmConfig(128, 128, 128, 1, 4, in_loop=True, tma=True, persistent=True)

_EXACT = GemmConfig(64, 64, 16, 3, 8)  # fp32 products without tensor cores
_ODD = GemmConfig(64, 64, 32, 3, 4, in_loop=True, wait=True)  # rows that do not start on 16 bytes

_FORWARD = {
    80: GemmConfig(128, 128, 64, 3, 8, in_loop=True),
    90: GemmConfig(128, 256, 64, 4, 8, in_loop=True, wait=True, tma=True, persistent=True, split_store=True),
    100: GemmConfig(128, 128, 64, 3, 8, tma=True, persistent=True),
}
_GIVEN = dict(num_stages=4)  # over the forward's configuration on Hopper, where the statistics are given
_DX_WHOLE = {
    80: {128: GemmConfig(128, 128, 32, 3, 8), 256: GemmConfig(64, 256, 32, 3, 8), 512: GemmConfig(32, 512, 32, 3, 8)},
    90: {
        128: GemmConfig(128, 128, 64, 3, 8, tma=True, persistent=True),
        256: GemmConfig(128, 256, 64, 4, 8, tma=True, persistent=True, split_store=True),
        512: GemmConfig(64, 512, 32, 4, 8, tma=True, persistent=True),
    },
    100: {
        128: GemmConfig(128, 128, 64, 3, 8, tma=True, persistent=True),
        256: GemmConfig(128, 256, 64, 3, 8, tma=True, persistent=True, split_store=True),
        512: GemmConfig(32, 512, 32, 3, 8, split_store=True),
    },
}
_DX_TILED = {
    80: GemmConfig(128, 128, 32, 3, 8),
    90: GemmConfig(128, 256, 64, 4, 8, tma=True, persistent=True, split_store=True),
    100: GemmConfig(128, 128, 64, 3, 8, tma=True, persistent=True),
}
_WGRAD = {
    80: GemmConfig(32, 128, 128, 3, 8),
    90: GemmConfig(64, 256, 128, 4, 8, wait=True, tma=True),
    100: GemmConfig(64, 128, 128, 3, 8, tma=True),
}


def generation(arch: int) -> int:
    """80, 90 or 100: which tensor cores and copy engines a compute capability has."""
    return 100 if 100 <= arch < 120 else 90 if arch == 90 else 80


@dataclass(frozen=True)
class Kind:
    """What the choice of a configuration depends on, sizes apart."""

    arch: int
    dtype: torch.dtype
    aligned: bool  # sizes and row strides are multiples of 16 bytes, and so are the base addresses
    interpreted: bool = False
    tf32: bool = False  # fp32 products may take tensor cores


def forward_config(kind: Kind, N: int) -> GemmConfig:
    if kind.interpreted:
        return replace(_INTERPRETED, in_loop=kind.dtype != torch.float32)
    if kind.dtype == torch.float32:
        return replace(_EXACT, wait=generation(kind.arch) == 90)
    if not kind.aligned:
        return replace(_ODD, in_loop=generation(kind.arch) != 100)
    config = _FORWARD[generation(kind.arch)]
    return replace(config, BN=128, split_store=False) if N <= 128 < config.BN else config


def given_config(kind: Kind, N: int) -> GemmConfig:
    """For row statistics that are known before."""
    config = forward_config(kind, N)
    if not config.in_loop:
        return config
    given = replace(config, in_loop=False, wait=False)
    return replace(given, **_GIVEN) if given.tma and not kind.interpreted else given


def dx_config(kind: Kind, K: int, whole: bool) -> GemmConfig:
    width = 128 if K <= 128 else 256 if K <= 256 else 512
    if kind.interpreted:
        return replace(_INTERPRETED, BN=width if whole else 128)
    if kind.dtype == torch.float32:
        exact = replace(_EXACT, BM=32, split_store=True)
        return replace(exact, BM=8 if width == 512 and not kind.tf32 else 16, BN=width) if whole else exact
    if not kind.aligned:
        odd = replace(_ODD, BM=32, wait=False, split_store=True)
        return replace(odd, BM=32 if width == 128 else 16, BN=width, BK=16, num_warps=8) if whole else odd
    arch = generation(kind.arch)
    return _DX_WHOLE[arch][width] if whole else _DX_TILED[arch]


def wgrad_by_blas(kind: Kind, K: int) -> bool:
    """Whether dy^T xhat is left to the BLAS, with xhat written by the kernel before, rather than made on the way in."""
    if kind.dtype == torch.float32:
        return True
    return not kind.interpreted and (not kind.aligned or K > WGRAD_MAX_FEATURES)


def wgrad_config(kind: Kind) -> GemmConfig:
    """For rows of 16-bit values that are multiples of 16 bytes."""
    return _INTERPRETED if kind.interpreted else _WGRAD[generation(kind.arch)]


def naive_config(kind: Kind, K: int) -> GemmConfig:
    width = 128 if K <= 128 else 512
    if kind.interpreted:
        return replace(_INTERPRETED, BK=width)
    if kind.dtype == torch.float32:
        return GemmConfig(32, 32, width, 2, 4)
    tma = kind.aligned and kind.arch >= 90
    if not kind.aligned and width > 128:
        return GemmConfig(32, 32, width, 2, 8)
    return GemmConfig(64, 64 if width <= 128 else 32, width, 2, 4 if width <= 128 else 8, tma=tma)
