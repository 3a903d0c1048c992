"""Tiles of the FlashNormAttention kernels: those of kernels.gdpa where the work is the same."""

from __future__ import annotations

from recsys_norm.kernels.gdpa import configs as gdpa
from recsys_norm.kernels.gdpa.configs import Config, padded_width

MAX_WIDTH = gdpa.MAX_WIDTH
STATISTICS_VALUES = 4096  # of a tile of rows, for 4 warps


def resident_block(arch: int, d: int, itemsize: int, max_keys: int) -> int | None:
    """Keys per tile where a sequence's keys stay on chip, None where they are streamed."""
    return gdpa.resident_block("forward", arch, d, itemsize, max_keys)


def forward(arch: int, d: int, itemsize: int, resident: int | None) -> Config:
    return gdpa.forward_resident(arch, d, resident) if resident else gdpa.forward_streamed(arch, d, itemsize)


def backward_q(arch: int, d: int, itemsize: int, resident: int | None) -> Config:
    if not resident:
        return gdpa.backward_dq(arch, d, itemsize)
    if gdpa.family(arch) == "small":
        return Config(32, resident, 4, 1)
    return Config(64, resident, 4, 1)


def backward_k(arch: int, d: int, itemsize: int, max_keys: int) -> Config:
    config = gdpa.backward_dkdv(arch, d, itemsize)
    if arch == 90 and config.block_m == 64 and padded_width(d) == 128:
        config = Config(64, 128, 8, 2)
    if max_keys <= 64 and config.block_n > 64:
        return Config(config.block_m, 64, 4, config.num_stages)
    return config


def statistics_rows(heads: int, d: int) -> int:
    """Rows per program, a power of two."""
    return max(1, STATISTICS_VALUES // (padded_heads(heads) * padded_width(d)))


def padded_heads(heads: int) -> int:
    return 1 << (heads - 1).bit_length()
