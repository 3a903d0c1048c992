"""Tile shapes of the norm kernels, as data; `python benchmarks/norm_alone.py --tune` times them against others."""

from __future__ import annotations

import functools
from typing import NamedTuple


class Tile(NamedTuple):
    """How a row meets the lanes: a block of lanes that holds it (None: it is walked in chunks), and how many values
    start on 16 bytes."""

    block: int | None
    vec: int


class Forward(NamedTuple):
    """Rows per program, and warps."""

    rows: int
    warps: int


class Backward(NamedTuple):
    """Rows per step, warps, programs per multiprocessor, stages of the loop over steps."""

    rows: int
    warps: int
    per_sm: int
    stages: int = 1


class Columns(NamedTuple):
    rows: int
    cols: int
    warps: int
    per_sm: int = 0
    stages: int = 1


class Chunks(NamedTuple):
    chunk: int
    warps: int


# Eleven shapes per kernel: these with 16-byte accesses, and a few for rows that start at odd addresses or have an odd
# width, which are read value by value whatever the block.
_ALIGNED_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_OTHER_BLOCKS = (128, 512, 2048)

# For 16-bit values; 256 to 2048 are the fastest of those timed on an H200 (see benchmarks/NOTES.md). Few values per
# thread and many small programs keep the most loads in flight.
_FORWARD = {
    64: Forward(16, 1),
    128: Forward(8, 1),
    256: Forward(8, 1),
    512: Forward(2, 1),
    1024: Forward(2, 2),
    2048: Forward(1, 2),
    4096: Forward(1, 4),
    8192: Forward(1, 8),
}
# One warp up to 512, since it adds up a row without a barrier; wider rows leave few programs per multiprocessor, and
# there a pipelined loop keeps loads in flight.
_BACKWARD = {
    "layer": {
        64: Backward(8, 1, per_sm=16),
        128: Backward(4, 1, per_sm=16),
        256: Backward(2, 1, per_sm=16, stages=3),
        512: Backward(1, 1, per_sm=12, stages=3),
        1024: Backward(1, 2, per_sm=8, stages=3),
        2048: Backward(1, 4, per_sm=4, stages=3),
        4096: Backward(1, 8, per_sm=2, stages=3),
        8192: Backward(1, 16, per_sm=1),
    },
    "rms": {
        64: Backward(8, 1, per_sm=20),
        128: Backward(4, 1, per_sm=20),
        256: Backward(2, 1, per_sm=16, stages=3),
        512: Backward(1, 1, per_sm=12, stages=3),
        1024: Backward(1, 4, per_sm=6, stages=3),
        2048: Backward(1, 4, per_sm=3, stages=3),
        4096: Backward(1, 8, per_sm=2, stages=3),
        8192: Backward(1, 16, per_sm=1),
    },
}
# For kernels that read, write or sum more than dy, z, dz, dweight and dbias: fewer programs fit.
_MORE = {
    64: Backward(16, 4, per_sm=5),
    128: Backward(8, 4, per_sm=5),
    256: Backward(2, 1, per_sm=12, stages=3),
    512: Backward(1, 1, per_sm=12, stages=3),
    1024: Backward(1, 2, per_sm=6, stages=3),
    2048: Backward(1, 4, per_sm=3, stages=3),
    4096: Backward(1, 16, per_sm=1),
    8192: None,  # registers would spill, so the row is walked in chunks
}
# With an activation on top, which holds registers and takes time of its own.
_ACTIVATION = _MORE | {
    256: Backward(2, 1, per_sm=10, stages=3),
    512: Backward(1, 1, per_sm=8, stages=3),
    1024: Backward(1, 4, per_sm=4, stages=3),
    2048: Backward(1, 8, per_sm=2, stages=3),
}
MAX_GROUP_WIDTH = 4096  # wider rows may be walked in chunks, by kernels that know one weight for all rows
WIDE = Chunks(chunk=2048, warps=4)
_COLUMNS = {cols: Columns(4096 // cols, cols, warps=4, per_sm=8) for cols in (64, 256)}
# Without a norm: rows of one tensor only, so there is room for a pipelined loop.
_PLAIN_COLUMNS = {c: Columns(2048 // c, c, warps=2, per_sm=8, stages=3) for c in (64, 256)}
_REDUCE = Columns(rows=1024, cols=8, warps=8)
_REDUCE_FEW = Columns(rows=16, cols=512, warps=8)


def _shapes(blocks_of_vec: dict[int, tuple[int, ...]]) -> list[Tile]:
    return [Tile(block, vec) for vec, blocks in blocks_of_vec.items() for block in blocks]


def group_limit(width: int, itemsize: int) -> int:
    """The widest groups that registers hold: where rows do not start on 16 bytes, blocks end earlier."""
    return MAX_GROUP_WIDTH if width * itemsize % 16 == 0 else _OTHER_BLOCKS[-1]


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


def forward_config(block: int, itemsize: int) -> Forward:
    return _for_size(_FORWARD[block], itemsize)


def backward_config(block: int, itemsize: int, norm: str, kind: str = "plain") -> Backward | None:
    """For a backward that computes dz, dweight and dbias ("plain"), that reads, writes or sums "more", or that also has an
    "activation". None where the row has to be walked in chunks."""
    config = {"plain": _BACKWARD[norm], "more": _MORE, "activation": _ACTIVATION}[kind][block]
    if config is None or itemsize < 4:
        return config
    stages = 1 if block >= 2048 else config.stages  # or the buffers of the stages would not fit
    return _for_size(config, itemsize)._replace(per_sm=max(1, config.per_sm // 2), stages=stages)


def _for_size(config, itemsize: int):
    """fp32 rows are twice as long in bytes: half as many at a time, or spread over twice the warps."""
    if itemsize < 4 or config.warps == 16:
        return config
    if config.rows > 1:
        return config._replace(rows=config.rows // 2)
    return config._replace(warps=2 * config.warps)


def column_tile(width: int, plain: bool = False) -> Columns:
    """For columns_kernel, `plain` where it sums dy as it is."""
    return (_PLAIN_COLUMNS if plain else _COLUMNS)[64 if width <= 64 else 256]


def reduce_tile(programs: int) -> Columns:
    """Many partials are added by narrow blocks, so that enough of them run at a time; few by wide ones."""
    return _REDUCE if programs > _REDUCE_FEW.rows else _REDUCE_FEW
