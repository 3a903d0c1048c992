"""Block sizes that the attention kernels ship with, by GPU family, head width and element size; nothing is tuned at run
time. Families differ by shared memory: "large" has 160 KB or more per block (A100, H100/H200, B200), "small" has 99 KB
(consumer and inference cards).
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_WIDTH = 256
RESIDENT_KEYS = 128  # keys and values of one head that fit on chip together with their gradients
_RESIDENT_WIDTH = 128


@dataclass(frozen=True)
class Config:
    """One kernel's tile: queries, keys, warps, and stages of the load pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def padded_width(d: int) -> int:
    """Columns of a tile that holds head width d: a power of two, at least what a matrix instruction takes."""
    return max(16, 1 << (d - 1).bit_length())


def family(arch: int) -> str:
    return "large" if arch in (80, 90) or 100 <= arch < 120 else "small"


def resident_block(kernel: str, arch: int, d: int, itemsize: int, max_keys: int) -> int | None:
    """Keys per tile of the kernels that hold a sequence's keys on chip, or None where the keys must be streamed."""
    if itemsize != 2 or max_keys > RESIDENT_KEYS or padded_width(d) > _RESIDENT_WIDTH:
        return None
    if kernel == "backward" and padded_width(d) > 64 and (family(arch) == "small" or arch >= 100):
        return None  # too little shared memory, or accumulators that spill
    return 64 if max_keys <= 64 else 128


def forward_resident(arch: int, d: int, block_n: int) -> Config:
    return Config(64, block_n, 4, 1)


def forward_waves(max_queries: int) -> int:
    """Programs for each slot of the GPU that a launch of `forward_resident` aims for: each loads its keys, and long
    sequences make a tail."""
    return 4 if max_queries <= 1024 else 8


def backward_resident(arch: int, d: int, block_n: int) -> Config:
    width = padded_width(d)
    if family(arch) == "small":
        return Config(32, block_n, 8, 1)
    if arch == 80:
        return Config(32 if width == 128 else 64, block_n, 8, 2)
    if block_n == 64 and width == 128:
        return Config(32, block_n, 4, 3)
    return Config(64, block_n, 8, 3)


def forward_streamed(arch: int, d: int, itemsize: int) -> Config:
    width = padded_width(d)
    if itemsize == 4:
        return Config(32, 32, 4, 1)
    if family(arch) == "small":
        return Config(64, 32 if width == 256 else 64, 4, 1 if width >= 128 else 2)
    if width == 256:
        return Config(128, 64, 8, 2) if arch == 90 else Config(64, 64, 8, 2)
    return Config(128, 64, 8, 3)


def backward_dq(arch: int, d: int, itemsize: int) -> Config:
    width = padded_width(d)
    if itemsize == 4:
        return Config(16, 16, 4, 1) if width == 256 else Config(32, 32, 4, 1)
    if family(arch) == "small":
        return Config(32 if width == 256 else 64, 32, 4, 1)
    return Config(64, 64, 8 if width == 256 else 4, 2)


def backward_dkdv(arch: int, d: int, itemsize: int) -> Config:
    width = padded_width(d)
    if itemsize == 4:
        return Config(16, 16, 4, 1) if width == 256 else Config(32, 32, 4, 1)
    if family(arch) == "small":
        return Config(32, 32 if width == 256 else 64, 8, 1)
    if width == 256:
        return Config(32, 64, 8, 2)
    return Config(64, 128, 8, 3) if arch == 90 else Config(64, 64, 8, 2)
