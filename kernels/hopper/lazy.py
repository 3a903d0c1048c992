"""Technique `lazy` of norm_linear on Hopper: one GEMM with the norm as a row scale (kernels in lazy_kernels.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_norm.kernels.hopper import launch
from recsys_norm.kernels.lazy.technique import cannot_run, on_device_of
from recsys_norm.ops.inputs import resolve_eps
from recsys_norm.ops.problem import Problem, Tensors

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
MAX_K = 8192  # the fold kernel holds a row of W in registers
FOLD_BLOCKS = {512: 4, 2048: 1, 8192: 1}  # longest row -> rows per block
TILE_ROWS = 128
WIDTHS = (256, 384)  # columns of a tile, 128 where N is no more
RESIDENT_K = {128: 384, 256: 256}  # columns of a tile -> longest row of W of which so many stay in shared memory
L2_BYTES = 18e6  # of x that may wait in L2 for further tiles without being read again, measured on an H200


def shape_reason(problem: Problem) -> str | None:
    """What the TMA kernels ask of a problem's sizes, dtype and strides; None if it fits."""
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels take bfloat16 and float16, not {problem.dtype}; use a technique of provider 'triton'"
    stride = problem.strides[0] if problem.strides else problem.K
    for what, value in (("in-features", problem.K), ("out-features", problem.N), ("the row stride of x", stride)):
        if value % 8:
            return (
                f"TMA wants multiples of 16 bytes and {what} is {value}, not a multiple of 8; use technique='separate'"
            )
    return None


class Lazy:
    """y = rstd * (x W'^T) + b': statistics on the way through the GEMM, affine part and mean folded into W' and b'."""

    name = "lazy"
    provider = "hopper"
    adds_gradient = True
    takes_pieces = True

    def why_not(self, problem: Problem) -> str | None:
        if problem.op != "norm_linear":
            return f"it serves norm_linear, not {problem.op}; use technique='separate'"
        if problem.device != "cuda":
            return f"its kernels need a CUDA device and the tensors are on {problem.device}; use backend='unfused'"
        reason = launch.why_not(problem.arch) or shape_reason(problem)
        if reason is None and problem.K > MAX_K:
            reason = f"it stops at {MAX_K} in-features and x has {problem.K}; use technique='separate'"
        return reason or (cannot_run(problem) if problem.training else None)

    def forward(self, problem: Problem, x, weight, bias, norm_weight, norm_bias) -> tuple[Tensors, Tensors]:
        eps = resolve_eps(problem.eps, problem.dtype)
        with on_device_of(x):
            y, mean, rstd = forward(x, weight, bias, norm_weight, norm_bias, problem.norm == "layer", eps)
        return (y,), (mean, rstd)

    def backward(self, problem: Problem, saved: Tensors, grads: Tensors, needs: tuple[bool, ...]) -> Tensors:
        from recsys_norm.kernels.hopper.backward import backward

        eps = resolve_eps(problem.eps, problem.dtype)
        dy, add = grads if len(grads) == 2 else (grads[0], None)
        with on_device_of(saved[0]):  # dy may come in pieces
            return backward(problem.norm, eps, saved, dy, needs, add)


def aligned(t: Tensor) -> Tensor:
    """The tensor itself, or a copy where TMA cannot read it: at an address that is not a multiple of 16, or with rows
    that overlap."""
    fits = t.data_ptr() % 16 == 0 and (t.dim() == 1 or t.stride(0) >= t.shape[1])
    return t if fits else t.clone(memory_format=torch.contiguous_format)


def tma_ready(t: Tensor) -> Tensor:
    """The matrix itself, or a contiguous copy where TMA cannot read it as it lies."""
    fits = t.stride(1) == 1 and t.stride(0) % 8 == 0 and (t.stride(0) >= t.shape[1] or t.shape[0] == 1)
    # Not contiguous(): it leaves the stride of a single row as it is.
    return aligned(t) if fits else t.clone(memory_format=torch.contiguous_format)


def forward(
    x: Tensor,  # [M, K], bf16 or fp16, row stride a multiple of 8
    weight: Tensor,  # [N, K] contiguous
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    layer: bool,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, mean relative to the row's first value (layer norm only) and rstd."""
    x = aligned(x)
    (M, K), N = x.shape, weight.shape[0]
    kernel, grid, group = pick(x.device, x.dtype, layer, M, K, N)
    # All memory first: the second launch may start before the first has ended, and nothing may come between them.
    y = x.new_empty(M, N)
    rstd = x.new_empty(M, dtype=torch.float32)
    mean = torch.empty_like(rstd) if layer else None
    folded, offset = fold(weight, bias, gamma, beta, x.dtype, centre=layer)
    kernel(grid, x, folded, folded, y, offset, mean, rstd, M, N, K, group, eps, after=True)
    return y, mean, rstd


def pick(
    device: torch.device, dtype: torch.dtype, layer: bool, M: int, K: int, N: int
) -> tuple[launch.Kernel, int, int]:
    """Kernel, grid and column tiles per turn."""
    width = 128 if N <= 128 else min(WIDTHS, key=lambda w: (-(-N // w) * w, w))
    columns, programs = -(-N // width), launch.multiprocessors(device)
    resident = columns == 1 and K <= RESIDENT_K.get(width, 0)
    name = f"lazy_{'layer' if layer else 'rms'}_{NAMES[dtype]}_{'resident' if resident else 'streamed'}{width}"
    group = turn(layer, K, columns, programs) if width == 256 else 1
    return launch.get(name), min(programs, columns * -(-M // TILE_ROWS)), group


def turn(layer: bool, K: int, columns: int, programs: int) -> int:
    """Column tiles that a program computes of one row block, one after another: the more, the fewer statistics, which
    weigh most for LN, but then more rows of x have to stay in L2 at a time."""
    limit, most = (4 * L2_BYTES, 8 if K <= 1024 else 4) if layer else (L2_BYTES, 4)
    fits = [g for g in (8, 4, 2) if g <= most and columns % g == 0]
    return next((g for g in fits if programs * g / columns * TILE_ROWS * 2 * K <= limit), 1)


def fold(
    weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, dtype: torch.dtype, *, centre: bool
) -> tuple[Tensor, Tensor]:
    """(W', b') of fold_kernels.py; b' has fp32 values and room for whole tiles."""
    N, K = weight.shape
    vectors = [t for t in (bias, gamma, beta) if t is not None]
    if any(t.dtype != weight.dtype for t in vectors):
        weight, bias, gamma, beta = (None if t is None else t.float() for t in (weight, bias, gamma, beta))
    weight, bias, gamma, beta = (None if t is None else aligned(t.contiguous()) for t in (weight, bias, gamma, beta))
    write = centre or gamma is not None or weight.dtype != dtype
    folded = torch.empty_like(weight, dtype=dtype) if write else weight
    offset = torch.empty(-(-N // WIDTHS[-1]) * WIDTHS[-1], device=weight.device, dtype=torch.float32)
    block = next(b for b in FOLD_BLOCKS if b >= K)
    name = f"fold_{'centred_' if centre else ''}{NAMES[weight.dtype]}_{NAMES[dtype]}_{block}"
    launch.get(name)(-(-N // FOLD_BLOCKS[block]), weight, gamma, beta, bias, folded if write else None, offset, N, K)
    return folded, offset
