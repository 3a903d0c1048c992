"""Tile shapes of the norm kernels, as data; `python benchmarks/norm_alone.py --tune` times them against others."""

from __future__ import annotations

import functools
from typing import NamedTuple


class Tile(NamedTuple):
    """How a row meets the lanes: a block of lanes that holds it (None: it is walked in chunks), and how many values
    start on 16 bytes."""

    block: int | None
    vec: int


class Config(NamedTuple):
    """Rows per step, warps, programs per multiprocessor (0: a program per step), stages of the loop over steps."""

    rows: int
    warps: int
    per_sm: int
    stages: int = 1


class Columns(NamedTuple):
    rows: int
    cols: int
    warps: int
    per_sm: int = 0


class Chunks(NamedTuple):
    chunk: int
    warps: int


# Twelve shapes per kernel: these with 16-byte accesses, and a few for rows that start at odd addresses or have an odd
# width, which are read value by value whatever the block.
_ALIGNED_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_OTHER_BLOCKS = (128, 512, 2048, 8192)

# For 16-bit values. A tile is 8 to 32 values per thread; programs per multiprocessor as registers allow.
_FORWARD = {
    64: Config(32, 4, per_sm=8),
    128: Config(16, 4, per_sm=8),
    256: Config(8, 4, per_sm=8),
    512: Config(4, 4, per_sm=8),
    1024: Config(1, 1, per_sm=16),
    2048: Config(1, 4, per_sm=8),
    4096: Config(1, 8, per_sm=4),
    8192: Config(1, 16, per_sm=2),
}
# The second column is for kernels that write or sum more than dz, dweight and dbias: fewer programs fit.
_BACKWARD = {
    64: (Config(16, 4, per_sm=7), Config(16, 4, per_sm=5)),
    128: (Config(8, 4, per_sm=7), Config(8, 4, per_sm=5)),
    256: (Config(4, 4, per_sm=7), Config(4, 4, per_sm=5)),
    512: (Config(2, 4, per_sm=7), Config(2, 4, per_sm=5)),
    1024: (Config(1, 4, per_sm=7), Config(1, 4, per_sm=5)),
    2048: (Config(1, 4, per_sm=4), Config(1, 4, per_sm=3)),
    4096: (Config(1, 16, per_sm=1), Config(1, 16, per_sm=1)),
    8192: (Config(1, 16, per_sm=1), None),  # None: registers would spill, so the row is walked in chunks
}
WIDE = Chunks(chunk=4096, warps=8)
_COLUMNS = {cols: Columns(4096 // cols, cols, warps=4, per_sm=8) for cols in (64, 256)}
_REDUCE = Columns(rows=256, cols=16, warps=8)
_REDUCE_FEW = Columns(rows=16, cols=512, warps=8)


def _shapes(blocks_of_vec: dict[int, tuple[int, ...]]) -> list[Tile]:
    return [Tile(block, vec) for vec, blocks in blocks_of_vec.items() for block in blocks]


# Every tile that `pick_tile` can return for rows in registers, by bytes of a value; read by the compile checks.
SHIPPED_TILES = {itemsize: _shapes({16 // itemsize: _ALIGNED_BLOCKS, 1: _OTHER_BLOCKS}) for itemsize in (2, 4)}


@functools.lru_cache(maxsize=1024)
def pick_tile(width: int, strides: tuple[int, ...], itemsize: int) -> Tile:
    """The tile for rows of `width` values that start `strides` values apart (one stride per tensor)."""
    vec = 16 // itemsize
    if any(s % vec for s in (width, *strides)):
        vec = 1
    blocks = _ALIGNED_BLOCKS if vec > 1 else _OTHER_BLOCKS
    return Tile(next((b for b in blocks if b >= width), None), vec)


def forward_config(block: int, itemsize: int) -> Config:
    return _for_size(_FORWARD[block], itemsize)


def backward_config(block: int, itemsize: int, heavy: bool) -> Config | None:
    """None where the row has to be walked in chunks."""
    config = _BACKWARD[block][heavy]
    return None if config is None else _for_size(config, itemsize)


def _for_size(config: Config, itemsize: int) -> Config:
    """fp32 rows are twice as long in bytes: half as many at a time, or spread over twice the warps."""
    if itemsize < 4 or config.warps == 16:
        return config
    if config.rows > 1:
        return config._replace(rows=config.rows // 2)
    return config._replace(warps=2 * config.warps, per_sm=max(1, config.per_sm // 2))


def column_tile(width: int) -> Columns:
    return _COLUMNS[64 if width <= 64 else 256]


def reduce_tile(programs: int) -> Columns:
    """Many partials are added by narrow blocks, so that enough of them run at a time; few by wide ones."""
    return _REDUCE if programs > _REDUCE_FEW.rows else _REDUCE_FEW
