"""Launch the norm kernels on rows: pick the tile, allocate what is written, start the grid.

Sizes and strides are run-time arguments. A kernel is specialised on the width's power of two, on whether every row
starts on 16 bytes, and on what is computed; on nothing else.

`cut=(offsets, heads)` says that only the first offsets[-1] * heads rows hold tokens: the others are not read into any
result, and are 0 in what is written.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from recsys_norm.kernels.activations import IDENTITY
from recsys_norm.kernels.norm import backward, forward
from recsys_norm.kernels.norm.configs import (
    MAX_GROUP_WIDTH,
    WIDE,
    Backward,
    Columns,
    Forward,
    Tile,
    backward_config,
    column_tile,
    forward_config,
    pick_tile,
    reduce_tile,
)
from recsys_norm.ops.activations import get

Cut = tuple[Tensor, int]


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


def _stride(x: Tensor | None, vec: int) -> int:
    return 0 if x is None else x.stride(0) // vec


def _cut_arguments(cut: Cut | None) -> tuple[Tensor | None, tuple[int, int]]:
    """(offsets, (index of the last one, heads))."""
    return (None, (0, 0)) if cut is None else (cut[0], (cut[0].numel() - 1, cut[1]))


def _pick(width: int, *tensors: Tensor | None) -> Tile:
    given = [t for t in tensors if t is not None]
    return pick_tile(width, tuple(t.stride(0) for t in given), given[0].element_size())


def _check_groups(groups: int, M: int, N: int, tile: Tile) -> None:
    if groups > 1 and (M % groups or N > MAX_GROUP_WIDTH or tile.block is None):
        raise ValueError(
            f"{M} rows of {N} in {groups} groups: groups are whole, and as wide as configs.group_limit allows"
        )


def norm_forward(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    norm: str,
    eps: float,
    before: Tensor | None = None,
    after: Tensor | None = None,
    activation: str = "identity",
    write_z: bool = False,
    write_hat: bool = False,
    overwrite: bool = False,
    groups: int = 1,
    cut: Cut | None = None,
    config: Forward | None = None,
) -> Normed:
    """y = act(norm(z) * weight + bias) (+ after), z = x (+ before).

    Args:
        x, before, after: `[M, N]` with unit stride in the rows.
        write_z, write_hat: also return z or the normalised rows, in x's dtype.
        overwrite: x is a temporary of the caller's; one of the results takes its memory.
        groups: weight and bias are `[groups * N]`, those of `groups` rows side by side: row i has those of group
            i % groups. Above 1, N is at most MAX_GROUP_WIDTH.
        config: instead of the shipped one, for tuning.
    """
    M, N = x.shape
    tile = _pick(N, x, before, after)
    _check_groups(groups, M, N, tile)
    free = [x] if overwrite and x.is_contiguous() else []

    def buffer(wanted: bool) -> Tensor | None:
        if not wanted:
            return None
        return free.pop() if free else torch.empty((M, N), dtype=x.dtype, device=x.device)

    z, hat = buffer(write_z), buffer(write_hat)
    y = buffer(True)
    mean = torch.empty(M, dtype=torch.float32, device=x.device) if norm == "layer" else None
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    offsets, last = _cut_arguments(cut)
    arguments = (x, before, after, weight, bias, offsets, y, z, hat, mean, rstd)
    arguments += (M, N // tile.vec, *(_stride(t, tile.vec) for t in (x, before, after)), *last, 1.0 / N, eps)
    options = dict(
        LAYER=norm == "layer",
        ACTIVATION=get(activation).code,
        FAST=_is_fast(x),
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        BEFORE=before is not None,
        AFTER=after is not None,
        CUT=cut is not None,
        WRITE_Z=write_z,
        WRITE_HAT=write_hat,
        VEC=tile.vec,
    )
    if M == 0:
        return Normed(y, z, hat, mean, rstd)
    with _on(x.device):
        if tile.block is None:
            forward.forward_wide_kernel[(M,)](*arguments, **options, CHUNK=WIDE.chunk, num_warps=WIDE.warps)
        else:
            config = config or forward_config(tile.block, x.element_size())
            forward.forward_kernel[(triton.cdiv(M, config.rows),)](
                *arguments,
                **options,
                GROUPS=groups,
                SHIFT=x.dtype == torch.float32,
                ROWS=config.rows,
                BLOCK=tile.block,
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
    *,
    norm: str,
    dsum: Tensor | None = None,
    more_dy: Tensor | None = None,
    hat: bool = False,
    activation: str = "identity",
    write_dz: bool = True,
    write_h: bool = False,
    dweight: torch.dtype | None = None,
    dbias: torch.dtype | None = None,
    dz_sum: torch.dtype | None = None,
    groups: int = 1,
    cut: Cut | None = None,
    overwrite: bool = False,
    config: Backward | None = None,
) -> Gradients:
    """Gradients of `norm_forward`, as the formulas of `backward` have them.

    Args:
        dy, z, dsum, more_dy: `[M, N]` with unit stride in the rows. z: before the norm, or zhat if `hat`.
        bias: read for `write_h` and for an activation only.
        dsum: gradient of z from elsewhere, added to dz. more_dy: added to dy.
        write_dz, write_h: what to compute: dz, and h = y of the forward, both in z's dtype.
        dweight, dbias, dz_sum: dtype of that column sum, None to leave it out.
        groups: as in `norm_forward`; the sums are `[groups * N]` then.
        overwrite: dz may take dy's memory, and does where that is contiguous and of z's dtype.
        config: instead of the shipped one, for tuning.
    """
    M, N = z.shape
    bias = bias if write_h or activation != "identity" else None
    tile = _pick(N, dy, z, more_dy, dsum)
    _check_groups(groups, M, N, tile)
    dz = None
    if write_dz:
        fits = dy.is_contiguous() and dy.dtype == z.dtype and tile.block is not None  # wide rows: dy is read after dz
        dz = dy if overwrite and fits else torch.empty((M, N), dtype=z.dtype, device=z.device)
    h = torch.empty((M, N), dtype=z.dtype, device=z.device) if write_h else None
    offsets, last = _cut_arguments(cut)
    strides = (_stride(t, tile.vec) for t in (dy, z, more_dy, dsum))
    call = _Backward(
        inputs=(dy, z, more_dy, dsum, weight, bias, mean, rstd, offsets),
        outputs=(dz, h),
        sizes=(M, N // tile.vec, *strides, *last),
        options=dict(
            LAYER=norm == "layer",
            ACTIVATION=get(activation).code,
            FAST=_is_fast(z),
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            HAT=hat,
            MORE=more_dy is not None,
            DSUM=dsum is not None,
            CUT=cut is not None,
            VEC=tile.vec,
        ),
        sums=(dweight, dbias, dz_sum),
        groups=groups,
    )
    if config is None and tile.block is not None:
        more = write_h or any(t is not None for t in (more_dy, dsum, dz_sum))
        kind = "activation" if activation != "identity" else "more" if more else "plain"
        config = backward_config(tile.block, z.element_size(), norm, kind)
    if M == 0:
        zeros = (None if s is None else torch.zeros(groups * N, dtype=s, device=z.device) for s in call.sums)
        return Gradients(dz, h, *zeros)
    with _on(z.device):
        sums = _backward_wide(call) if config is None else _backward_rows(call, tile.block, config)
    return Gradients(dz, h, *sums)


def _is_fast(x: Tensor) -> bool:
    """Whether activations may use the hardware's tanh: for bf16 alone, and not where the interpreter runs the kernels."""
    return x.dtype == torch.bfloat16 and x.is_cuda


class _Backward(NamedTuple):
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor | None, Tensor | None]
    sizes: tuple[int, ...]
    options: dict
    sums: tuple[torch.dtype | None, ...]
    groups: int


def _backward_rows(call: _Backward, block: int, config: Backward) -> list[Tensor | None]:
    z, (dz, h) = call.inputs[1], call.outputs
    M, N = z.shape
    sum_weight, sum_bias, sum_dz = (s is not None for s in call.sums)
    programs = min(triton.cdiv(M, config.rows), config.per_sm * _processors(z.device))
    partials = programs
    if call.groups > 1:
        turn = call.groups // math.gcd(call.groups, config.rows)  # programs whose rows together hold every group
        programs = triton.cdiv(programs, turn) * turn
        partials = programs * config.rows
    partial = _partials(call.sums, partials, N, z.device)
    backward.backward_kernel[(programs,)](
        *call.inputs,
        *call.outputs,
        partial,
        *call.sizes,
        1.0 / N,
        **call.options,
        WRITE_DZ=dz is not None,
        WRITE_H=h is not None,
        SUM_WEIGHT=sum_weight,
        SUM_BIAS=sum_bias,
        SUM_DZ=sum_dz,
        GROUPS=call.groups,
        SHIFT=z.dtype == torch.float32,
        ROWS=config.rows,
        BLOCK=block,
        STAGES=config.stages,
        num_warps=config.warps,
    )
    if partial is not None:  # the partials of one row of each group, side by side
        partial = partial.view(len(partial), partials // call.groups, call.groups * N)
    return _reduce(partial, call.sums, call.groups * N)


def _backward_wide(call: _Backward) -> list[Tensor | None]:
    z, (dz, h) = call.inputs[1], call.outputs
    sum_weight, sum_bias, sum_dz = call.sums
    M, N = z.shape
    rounded = torch.empty_like(z) if sum_dz is not None and dz is None else dz
    if rounded is not None or h is not None:
        backward.backward_wide_kernel[(M,)](
            *call.inputs,
            rounded,
            h,
            *call.sizes,
            1.0 / N,
            **call.options,
            WRITE_DZ=rounded is not None,
            WRITE_H=h is not None,
            CHUNK=WIDE.chunk,
            num_warps=WIDE.warps,
        )
    sums = _columns(call.inputs, call.sizes, call.options, (sum_weight, sum_bias), column_tile(N))
    return [*sums, None if sum_dz is None else column_sum(rounded, sum_dz)]


def _columns(inputs, sizes, options, sums, tile: Columns) -> list[Tensor | None]:
    if sums == (None, None):
        return [None, None]
    dy = inputs[0]
    M, N = dy.shape
    strips = triton.cdiv(N, tile.cols)
    programs = min(triton.cdiv(M, tile.rows), triton.cdiv(tile.per_sm * _processors(dy.device), strips))
    partial = _partials(sums, programs, N, dy.device)
    backward.columns_kernel[(programs, strips)](
        *inputs,
        partial,
        *sizes,
        **options,
        SUM_WEIGHT=sums[0] is not None,
        SUM_BIAS=sums[1] is not None,
        ROWS=tile.rows,
        COLS=tile.cols,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return _reduce(partial, sums, N)


def column_sum(x: Tensor, dtype: torch.dtype, tile: Columns | None = None) -> Tensor:
    """Sum over the rows of x `[M, N]`, in fp32, returned in `dtype`. `tile` instead of the shipped one, for tuning."""
    M, N = x.shape
    vec = _pick(N, x).vec
    options = dict.fromkeys(("LAYER", "HAS_WEIGHT", "HAS_BIAS", "MORE", "DSUM", "CUT"), False)
    options |= dict(ACTIVATION=IDENTITY.value, FAST=False, HAT=True, VEC=vec)
    with _on(x.device):
        sizes = (M, N // vec, x.stride(0) // vec, *(0,) * 5)
        return _columns((x, *(None,) * 8), sizes, options, (None, dtype), tile or column_tile(N, plain=True))[1]


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
    vec = 1 if N % 4 else 4
    backward.reduce_kernel[(triton.cdiv(N, tile.cols), len(given))](
        partial,
        *(given + [None] * (3 - len(given))),
        partial.shape[1],
        N // vec,
        SUMS=len(given),
        ROWS=tile.rows,
        COLS=tile.cols,
        VEC=vec,
        num_warps=tile.warps,
    )
    return results
