"""Tiles of the Helion kernels. No Helion is needed to read them."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROW = 512  # out-features that the accumulators of one tile hold


@dataclass(frozen=True)
class Tile:
    """rows x columns of the result per program, `depth` in-features at a time; columns None: the whole row."""

    rows: int
    columns: int | None
    depth: int
    warps: int
    stages: int
    tma: bool = False


def lazy_tile(N: int) -> Tile:
    return Tile(128, 128 if N <= 128 else 256, 64, 8, 3)


def postnorm_tile(N: int) -> Tile:
    return Tile(128 if N <= 256 else 64, None, 64, 8, 3)
