"""Launch the norm kernels on rows: pick the tile, allocate what is written, start the grid.

Sizes and strides are run-time arguments. A kernel is specialised on the width's power of two, on whether every row
starts on 16 bytes, and on what is computed; on nothing else.
"""

from __future__ import annotations

import contextlib
import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from recsys_norm.kernels.norm import backward, forward
from recsys_norm.kernels.norm.configs import (
    WIDE,
    Config,
    backward_config,
    column_tile,
    forward_config,
    pick_tile,
    reduce_tile,
)

_RESIDUAL = {None: 0, "before": 1, "after": 2}


class Normed(NamedTuple):
    y: Tensor
    z: Tensor | None
    hat: Tensor | None
    mean: Tensor | None
    rstd: Tensor


class Gradients(NamedTuple):
    dz: Tensor | None
    h: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    dz_sum: Tensor | None


@functools.cache
def _processors(device: torch.device) -> int:
    """Streaming multiprocessors; a few without CUDA, where kernels run in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _programs(M: int, config: Config, device: torch.device) -> int:
    blocks = triton.cdiv(M, config.rows)
    return blocks if config.per_sm == 0 else min(blocks, config.per_sm * _processors(device))


def norm_forward(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    norm: str,
    eps: float,
    position: str | None = None,
    activation: str = "identity",
    write_z: bool = False,
    write_hat: bool = False,
    overwrite: bool = False,
    config: Config | None = None,
) -> Normed:
    """y = act(norm(z) * weight + bias), z = x (+ residual if position is "before"; "after" adds it to y).

    Args:
        x, residual: `[M, N]` with unit stride in the rows, M > 0.
        write_z, write_hat: also return z or the normalised rows, in x's dtype.
        overwrite: x is a temporary of the caller's; one of the results takes its memory.
        config: instead of the shipped one, for tuning.
    """
    M, N = x.shape
    position = position if residual is not None else None
    strides = (x.stride(0),) + (() if residual is None else (residual.stride(0),))
    tile = pick_tile(N, strides, x.element_size())
    free = [x] if overwrite and x.is_contiguous() else []

    def buffer(wanted: bool) -> Tensor | None:
        if not wanted:
            return None
        return free.pop() if free else torch.empty((M, N), dtype=x.dtype, device=x.device)

    z, hat = buffer(write_z), buffer(write_hat)
    y = buffer(True)
    mean = torch.empty(M, dtype=torch.float32, device=x.device) if norm == "layer" else None
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    pointers = (x, residual, weight, bias, y, z, hat, mean, rstd)
    sizes = (M, N, x.stride(0), 0 if residual is None else residual.stride(0), eps)
    options = dict(
        LAYER=norm == "layer",
        ACTIVATION=activation,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        RESIDUAL=_RESIDUAL[position],
        WRITE_Z=write_z,
        WRITE_HAT=write_hat,
        VEC=tile.vec,
    )
    with _on(x.device):
        if tile.block is None:
            forward.forward_wide_kernel[(M,)](*pointers, *sizes, **options, CHUNK=WIDE.chunk, num_warps=WIDE.warps)
        else:
            config = config or forward_config(tile.block, x.element_size())
            forward.forward_kernel[(_programs(M, config, x.device),)](
                *pointers,
                *sizes,
                **options,
                REFINE=x.dtype == torch.float32,
                ROWS=config.rows,
                BLOCK=tile.block,
                STAGES=config.stages,
                num_warps=config.warps,
            )
    return Normed(y, z, hat, mean, rstd)


def norm_backward(
    dy: Tensor,
    z: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    dsum: Tensor | None = None,
    *,
    norm: str,
    hat: bool = False,
    activation: str = "identity",
    write_dz: bool = True,
    write_h: bool = False,
    dweight: torch.dtype | None = None,
    dbias: torch.dtype | None = None,
    dz_sum: torch.dtype | None = None,
    config: Config | None = None,
) -> Gradients:
    """Gradients of `norm_forward`, as the formulas of `backward` have them.

    Args:
        dy, z, dsum: `[M, N]` with unit stride in the rows, M > 0. z is the row before the norm, or zhat if `hat`.
        bias: read for `write_h` and for an activation only.
        dsum: gradient of z from elsewhere, added to dz.
        write_dz, write_h: what to compute: dz, and h = y of the forward, both in z's dtype.
        dweight, dbias, dz_sum: dtype of that column sum, None to leave it out.
        config: instead of the shipped one, for tuning.
    """
    M, N = z.shape
    bias = bias if write_h or activation != "identity" else None
    strides = (dy.stride(0), z.stride(0)) + (() if dsum is None else (dsum.stride(0),))
    tile = pick_tile(N, strides, z.element_size())
    dz = torch.empty((M, N), dtype=z.dtype, device=z.device) if write_dz else None
    h = torch.empty((M, N), dtype=z.dtype, device=z.device) if write_h else None
    call = _Backward(
        tensors=(dy, z, dsum, weight, bias, mean, rstd, dz, h),
        sizes=(M, N, dy.stride(0), z.stride(0), 0 if dsum is None else dsum.stride(0)),
        options=dict(
            LAYER=norm == "layer",
            ACTIVATION=activation,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            HAT=hat,
            REFINE=z.dtype == torch.float32 and norm == "layer" and not hat,
            VEC=tile.vec,
        ),
        sums=(dweight, dbias, dz_sum),
    )
    if config is None and tile.block is not None:
        heavy = write_h or activation != "identity" or dsum is not None or dz_sum is not None
        config = backward_config(tile.block, z.element_size(), heavy)
    with _on(z.device):
        sums = _backward_wide(call) if config is None else _backward_rows(call, tile.block, config)
    return Gradients(dz, h, *sums)


class _Backward(NamedTuple):
    tensors: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]
    options: dict
    sums: tuple[torch.dtype | None, ...]


def _backward_rows(call: _Backward, block: int, config: Config) -> list[Tensor | None]:
    dy, z, dsum, weight, bias, mean, rstd, dz, h = call.tensors
    M, N = z.shape
    sum_weight, sum_bias, sum_dz = (s is not None for s in call.sums)
    programs = _programs(M, config, z.device)
    partial = _partials(call.sums, programs, N, z.device)
    backward.backward_kernel[(programs,)](
        *call.tensors,
        partial,
        *call.sizes,
        **call.options,
        ADD_DSUM=dsum is not None,
        WRITE_DZ=dz is not None,
        WRITE_H=h is not None,
        SUM_WEIGHT=sum_weight,
        SUM_BIAS=sum_bias,
        SUM_DZ=sum_dz,
        ROWS=config.rows,
        BLOCK=block,
        STAGES=config.stages,
        num_warps=config.warps,
    )
    return _reduce(partial, call.sums, N)


def _backward_wide(call: _Backward) -> list[Tensor | None]:
    dy, z, dsum, weight, bias, mean, rstd, dz, h = call.tensors
    sum_weight, sum_bias, sum_dz = call.sums
    M, N = z.shape
    refine = call.options["REFINE"]
    rest = torch.empty(M, dtype=torch.float32, device=z.device) if refine else None
    rounded = dz
    if sum_dz is not None and dz is None:
        rounded = torch.empty((M, N), dtype=z.dtype, device=z.device)
    if rounded is not None or h is not None or refine:
        backward.backward_wide_kernel[(M,)](
            *(dy, z, dsum, weight, bias, mean, rest, rstd, rounded, h),
            *call.sizes,
            **call.options,
            ADD_DSUM=dsum is not None,
            WRITE_DZ=rounded is not None,
            WRITE_H=h is not None,
            CHUNK=WIDE.chunk,
            num_warps=WIDE.warps,
        )
    sums = _columns(dy, z, weight, bias, mean, rest, rstd, call.options, (sum_weight, sum_bias))
    return [*sums, None if sum_dz is None else column_sum(rounded, sum_dz)]


def _columns(dy, z, weight, bias, mean, rest, rstd, options, sums) -> list[Tensor | None]:
    if sums == (None, None):
        return [None, None]
    M, N = dy.shape
    tile = column_tile(N)
    strips = triton.cdiv(N, tile.cols)
    programs = min(triton.cdiv(M, tile.rows), triton.cdiv(tile.per_sm * _processors(dy.device), strips))
    partial = _partials(sums, programs, N, dy.device)
    backward.columns_kernel[(programs, strips)](
        *(dy, z, weight, bias, mean, rest, rstd, partial),
        *(M, N, dy.stride(0), 0 if z is None else z.stride(0)),
        **options,
        SUM_WEIGHT=sums[0] is not None,
        SUM_BIAS=sums[1] is not None,
        ROWS=tile.rows,
        COLS=tile.cols,
        num_warps=tile.warps,
    )
    return _reduce(partial, sums, N)


def column_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over the rows of x `[M, N]`, in fp32, returned in `dtype`."""
    options = dict(
        LAYER=False,
        ACTIVATION="identity",
        HAS_WEIGHT=False,
        HAS_BIAS=False,
        HAT=True,
        REFINE=False,
        VEC=pick_tile(x.shape[1], (x.stride(0),), x.element_size()).vec,
    )
    with _on(x.device):
        return _columns(x, None, None, None, None, None, None, options, (None, dtype))[1]


def _partials(sums, programs: int, N: int, device: torch.device) -> Tensor | None:
    count = sum(s is not None for s in sums)
    return torch.empty((count, programs, N), dtype=torch.float32, device=device) if count else None


def _reduce(partial: Tensor | None, sums, N: int) -> list[Tensor | None]:
    """The column sums, None where not asked for."""
    if partial is None:
        return [None] * len(sums)
    results = [None if s is None else torch.empty(N, dtype=s, device=partial.device) for s in sums]
    given = [r for r in results if r is not None]
    tile = reduce_tile(partial.shape[1])
    backward.reduce_kernel[(triton.cdiv(N, tile.cols), len(given))](
        partial,
        *(given + [None] * (3 - len(given))),
        partial.shape[1],
        N,
        SUMS=len(given),
        ROWS=tile.rows,
        COLS=tile.cols,
        num_warps=tile.warps,
    )
    return results
