"""Tiles of the FlashNormAttention kernels: those of kernels.gdpa where the work is the same."""

from __future__ import annotations

from recsys_norm.kernels.gdpa import configs as gdpa
from recsys_norm.kernels.gdpa.configs import Config, padded_width

MAX_WIDTH = gdpa.MAX_WIDTH
MAX_ROW = 16384  # values of a row of q over all heads, padded, that one program takes the statistics of
STATISTICS_VALUES = 4096  # of a tile of rows, for 4 warps

backward_resident = gdpa.backward_resident
backward_q = gdpa.backward_dq
backward_k = gdpa.backward_dkdv


def resident_block(direction: str, arch: int, d: int, itemsize: int, max_keys: int) -> int | None:
    """Keys per tile where a sequence's keys stay on chip, None where they are streamed."""
    if direction == "backward" and arch < 90:
        return None  # operands from registers: with a tile of q on top of the accumulators they spill
    return gdpa.resident_block(direction, arch, d, itemsize, max_keys)


def forward(arch: int, d: int, itemsize: int, resident: int | None) -> Config:
    return gdpa.forward_resident(arch, d, resident) if resident else gdpa.forward_streamed(arch, d, itemsize)


def statistics_rows(heads: int, d: int) -> int:
    """Rows per program, a power of two."""
    return max(1, STATISTICS_VALUES // (padded_heads(heads) * padded_width(d)))


def padded_heads(heads: int) -> int:
    return 1 << (heads - 1).bit_length()
