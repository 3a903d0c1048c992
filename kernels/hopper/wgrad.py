"""norm_linear backward on Hopper, gradients of the parameters: see wgrad_kernels.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recsys_norm.kernels.hopper import launch
from recsys_norm.kernels.hopper.dgrad import pieces
from recsys_norm.kernels.hopper.lazy import NAMES, aligned, tma_ready

STEP = 64
TILE_ROWS = 128
TILE_COLUMNS = (256, 192)  # columns of a tile of dW'; what wastes less, then what is wider
FINISH = {"few": 32, "many": 8}  # rows of dW that a program finishes
FINISH_COLUMNS = 64
NORM_COLUMNS = 32
MANY_SPLITS = 6
BELOW_ONE = 1 - 1e-6
MAX_WAVES = 3  # of programs, one after another
# In steps of a program (0.8 us on an H200): what a program costs besides its steps, and an fp32 partial written and read.
PROGRAM_STEPS, PARTIAL_STEPS = 8, 3e-6
TILE_STEPS = 4  # what a further tile of a program costs


class Plan(NamedTuple):
    """How the rows are divided: fixed by the sizes, so that sums come out the same in every run."""

    columns: int
    tiles: int
    col_tiles: int
    steps: int
    per_split: int
    splits: int
    programs: int  # `tiles` per split; fewer for the last one, where each takes every so many tiles


def plan(M: int, N: int, K: int, programs: int, choice: tuple[int, ...] = TILE_COLUMNS) -> Plan:
    """Whole splits, of one program per tile each; where that is shorter, programs that are too few for one more share a
    last split of fewer rows."""
    columns = min(choice, key=lambda c: -(-K // c) * c)
    col_tiles = -(-K // columns)
    tiles = -(-N // TILE_ROWS) * col_tiles
    steps = -(-M // STEP)

    def cost(splits: int) -> float:
        waves = -(-tiles * splits // programs)
        return waves * (-(-steps // splits) + PROGRAM_STEPS) + splits * N * K * PARTIAL_STEPS

    full = {max(1, min(waves * programs // tiles, steps)) for waves in range(1, MAX_WAVES + 1)}
    chosen = min(sorted(full), key=cost)
    whole, left = divmod(programs, tiles)
    if whole and left:
        turns = -(-tiles // left)
        longest = -(-(turns * (steps + TILE_STEPS) - TILE_STEPS) // (1 + turns * whole))
        shared_cost = longest + PROGRAM_STEPS + (whole + 1) * N * K * PARTIAL_STEPS
        if steps > whole * longest and shared_cost < cost(chosen):
            return Plan(columns, tiles, col_tiles, steps, longest, whole + 1, programs)
    per_split = -(-steps // chosen)
    splits = -(-steps // per_split)
    return Plan(columns, tiles, col_tiles, steps, per_split, splits, tiles * splits)


class RowDots(NamedTuple):
    """delta_m = sum_n dy_mn (y_mn - offset_n), computed on the way for the gradient of x; see `makes_row_dots`."""

    y: Tensor | None  # [M, N] contiguous
    offset: Tensor | None  # [N] fp32: b' of the fold
    delta: Tensor | None  # [M] fp32, written


def makes_row_dots(dtype: torch.dtype) -> bool:
    """Whether `gradients` takes `row_dots`."""
    return dtype == torch.bfloat16


class Gradients(NamedTuple):
    """All in the parameters' dtype, or fp32 if they have several. None shares memory with another: an op may not return
    such."""

    dweight: Tensor
    dbias: Tensor
    dgamma: Tensor | None  # None if not asked for
    dbeta: Tensor | None  # None if not asked for, or for RMSNorm


def gradients(
    dy: Tensor | Sequence[Tensor],  # [M, N], bf16 or fp16; without row_dots also in pieces, see dgrad.fits_in_pieces
    x: Tensor,  # [M, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    layer: bool,
    rstd: Tensor,  # [M] fp32
    eps: float,  # in rstd
    row_dots: RowDots | None = None,
    affine: bool = True,  # those of gamma and beta too
) -> Gradients:
    """Of weight, bias, gamma and, for layer norm, beta; those of absent parameters are what they would be for gamma = 1,
    beta = 0."""
    given, piece, N = pieces(dy)
    x = tma_ready(x)
    norm = "layer" if layer else "rms"
    M, K = x.shape
    choice = TILE_COLUMNS[:1] if row_dots else TILE_COLUMNS
    p = plan(M, N, K, launch.multiprocessors(x.device), choice)
    partial = torch.empty(p.splits, N, K, device=x.device, dtype=torch.float32)
    sums = torch.empty(p.splits * p.col_tiles, 2, N, device=x.device, dtype=torch.float32)
    y, offset, delta = row_dots or RowDots(given[0], None, None)
    kernel = launch.get(f"dw_{norm}_{NAMES[x.dtype]}_{p.columns}{'_delta' if row_dots else ''}")
    limit = BELOW_ONE / math.sqrt(eps) if eps > 0 else math.inf
    tensors = (x, x, rstd, partial, sums, given[0], y, offset, delta, x)
    sizes = (M, N, K, p.tiles, p.col_tiles, p.steps, p.per_split)
    kernel(p.programs, *given, piece, *tensors, x.stride(0), limit, *sizes)
    if any(t is not None and t.dtype != weight.dtype for t in (bias, gamma, beta)):
        weight, gamma, beta = (None if t is None else t.float() for t in (weight, gamma, beta))
    return _finish(partial, sums, weight, gamma, beta, norm, affine)


def _finish(
    partial: Tensor, sums: Tensor, weight: Tensor, gamma: Tensor | None, beta: Tensor | None, norm: str, affine: bool
) -> Gradients:
    splits, N, K = partial.shape
    weight, gamma, beta = (None if t is None else aligned(t.contiguous()) for t in (weight, gamma, beta))
    form = "many" if splits >= MANY_SPLITS else "few"
    row_blocks = -(-N // FINISH[form])
    dweight = torch.empty_like(weight)
    dbias = weight.new_empty(N)
    norms = torch.empty(row_blocks, 2, K, device=weight.device, dtype=torch.float32)
    kernel = launch.get(f"dw_finish_{norm}_{NAMES[weight.dtype]}_{form}")
    grid = (row_blocks, -(-K // FINISH_COLUMNS), 1)
    kernel(grid, partial, sums, weight, gamma, beta, dweight, dbias, norms, N, K, splits, len(sums), after=True)
    if not affine:
        return Gradients(dweight, dbias, None, None)
    dgamma, dbeta = weight.new_empty(K), weight.new_empty(K) if norm == "layer" else None
    kernel = launch.get(f"dw_norms_{norm}_{NAMES[weight.dtype]}")
    kernel(-(-K // NORM_COLUMNS), norms, dgamma, dbeta, row_blocks, K, after=True)
    return Gradients(dweight, dbias, dgamma, dbeta)
