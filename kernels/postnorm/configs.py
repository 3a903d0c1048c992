"""Block sizes of the post-norm kernels: data, chosen by measurement, no tuning at run time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from recsys_norm.kernels.lazy.configs import GemmConfig, Kind, generation

NAIVE_MAX_FEATURES = 512  # out-features of one tile: the accumulators of [64 rows, N] fill the registers of a block

_INTERPRETED = GemmConfig(128, 128, 128, 1, 4, tma=True, persistent=True)

_NAIVE = {
    80: {128: GemmConfig(64, 128, 32, 3, 4), 256: GemmConfig(64, 256, 32, 3, 8), 512: GemmConfig(32, 512, 32, 3, 8)},
    90: {
        128: GemmConfig(128, 128, 64, 3, 8, tma=True, persistent=True),
        256: GemmConfig(128, 256, 64, 4, 8, tma=True, persistent=True, split_store=True),
        512: GemmConfig(64, 512, 32, 4, 8, tma=True, persistent=True),
    },
    100: {
        128: GemmConfig(128, 128, 64, 3, 8, tma=True, persistent=True),
        256: GemmConfig(64, 256, 64, 3, 8, tma=True, persistent=True, split_store=True),
        512: GemmConfig(32, 512, 32, 3, 8, split_store=True),
    },
}
_GEMM = {
    80: GemmConfig(128, 128, 32, 3, 8),
    90: GemmConfig(128, 256, 64, 4, 8, tma=True, persistent=True, split_store=True),
    100: GemmConfig(128, 128, 64, 3, 8, tma=True, persistent=True),
}


def naive_config(kind: Kind, N: int) -> GemmConfig:
    width = 128 if N <= 128 else 256 if N <= 256 else 512
    if kind.interpreted:
        return replace(_INTERPRETED, BN=width, split_store=width > 128)
    if kind.dtype == torch.float32:
        rows = 8 if width == 512 and not kind.tf32 else 16
        return GemmConfig(rows, width, 16, 3, 8, wait=generation(kind.arch) == 90, split_store=True)
    if not kind.aligned:
        return GemmConfig(32 if width == 128 else 16, width, 16, 3, 8, split_store=True)
    return _NAIVE[generation(kind.arch)][width]


def gemm_config(kind: Kind, N: int) -> GemmConfig:
    if kind.interpreted:
        return replace(_INTERPRETED, split_store=True)
    if kind.dtype == torch.float32:
        return GemmConfig(32, 64, 16, 3, 8, wait=generation(kind.arch) == 90, split_store=True)
    if not kind.aligned:
        return GemmConfig(32, 64, 32, 3, 4, split_store=True)
    config = _GEMM[generation(kind.arch)]
    return replace(config, BN=128) if N <= 128 < config.BN else config


CLUSTER_MAX_FEATURES = 1024  # 8 blocks of 128 columns: the largest cluster that every device of the generation takes


@dataclass(frozen=True)
class ClusterConfig:
    """A cluster of `blocks` blocks holds BM rows of BN columns, BN / blocks each."""

    blocks: int
    BM: int
    BN: int
    BK: int
    num_stages: int
    num_warps: int


def cluster_config(kind: Kind, N: int) -> ClusterConfig:
    """Blocks of 128 columns and few enough registers for two to share a multiprocessor: while one normalises, the other
    multiplies."""
    blocks = 2 if N <= 256 else 4 if N <= 512 else 8
    if kind.interpreted:
        return ClusterConfig(blocks, 128, 128 * blocks, 128, 1, 4)
    return ClusterConfig(blocks, 128, 128 * blocks, 64, 3, 4)
