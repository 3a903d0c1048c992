"""Technique `helion`: forwards written in Helion, for comparison; `fused` takes them only by name or by measurement.

The backward is that of `separate`: what is saved is the same for every technique of an op.
"""

from __future__ import annotations

import functools
from importlib import metadata
from importlib.util import find_spec

import torch
from torch import Tensor

from recsys_norm.kernels.helion.configs import MAX_ROW, lazy_tile, postnorm_tile
from recsys_norm.ops.inputs import resolve_eps
from recsys_norm.ops.problem import Problem, Tensors

MIN_VERSION = (1, 0)


@functools.cache
def missing() -> str | None:
    """Why Helion cannot be used here, None if it can."""
    if find_spec("helion") is None:
        return "the package helion is not installed: pip install helion"
    found = metadata.version("helion")
    if tuple(int(part) for part in found.split(".")[:2]) < MIN_VERSION:
        return f"it needs helion >= {MIN_VERSION[0]}.{MIN_VERSION[1]} and {found} is installed: pip install -U helion"
    return None


class _Helion:
    name = "helion"
    provider = "helion"
    op = ""

    def why_not(self, problem: Problem) -> str | None:
        from recsys_norm.kernels.lazy.technique import cannot_run

        if problem.op != self.op:
            return f"it serves {self.op} here, not {problem.op}; use technique='separate'"
        if missing() is not None:
            return f"{missing()}; or use technique='separate'"
        reason = cannot_run(problem)
        if reason is not None:
            return reason
        if problem.dtype == torch.float32:
            return "it takes bfloat16 and float16, not torch.float32; use technique='separate'"
        if problem.M * max(problem.K, problem.N) >= 1 << 31:
            return f"it counts in 32 bits and M={problem.M} rows are too many; use technique='separate'"
        return None

    def backward(self, problem: Problem, saved: Tensors, grads: Tensors, needs: tuple[bool, ...]) -> Tensors:
        from recsys_norm.kernels.norm.technique import Separate

        return Separate().backward(problem, saved, grads, needs)


class NormLinear(_Helion):
    """Lazy pre-norm: y = r * (x W'^T - mean * c) + b'."""

    op = "norm_linear"
    adds_gradient = True  # as its backward does

    def forward(self, problem: Problem, x, weight, bias, norm_weight, norm_bias) -> tuple[Tensors, Tensors]:
        from recsys_norm.kernels.helion.kernels import compiled, lazy
        from recsys_norm.kernels.lazy.fold import fold
        from recsys_norm.kernels.lazy.technique import on_device_of

        layer = problem.norm == "layer"
        with on_device_of(x):
            folded = fold(weight, bias, norm_weight, norm_bias, x.dtype, colsum=layer)
            offset = x.new_empty(0) if folded.offset is None else folded.offset.detach()
            arguments = (x, folded.weight, folded.colsum, offset, resolve_eps(problem.eps, problem.dtype))
            run = compiled(lazy, lazy_tile(problem.N))
            y, mean, rstd = run(*arguments, layer, folded.offset is not None, True)
        return (y,), (mean if layer else None, rstd)


class LinearNorm(_Helion):
    """Naive fusion: one tile spans the row of the result."""

    op = "linear_norm"

    def why_not(self, problem: Problem) -> str | None:
        reason = super().why_not(problem)
        if reason is None and (problem.N > MAX_ROW or problem.N & (problem.N - 1) or problem.N < 16):
            return (
                f"one tile holds a whole row of the result, a power of two from 16 to {MAX_ROW}, and the weight has "
                f"{problem.N} out-features; use technique='separate'"
            )
        return reason

    def forward(self, problem: Problem, x, weight, bias, norm_weight, norm_bias, residual) -> tuple[Tensors, Tensors]:
        from recsys_norm.kernels.helion.kernels import compiled, postnorm
        from recsys_norm.kernels.lazy.technique import on_device_of

        layer = problem.norm == "layer"
        with on_device_of(x):
            y, z, hat, mean, rstd = compiled(postnorm, postnorm_tile(problem.N))(
                x,
                weight.to(x.dtype),
                *(_own(t, x) for t in (bias, norm_weight, norm_bias, residual)),
                resolve_eps(problem.eps, problem.dtype),
                layer,
                bias is not None,
                norm_weight is not None,
                norm_bias is not None,
                problem.residual == "before",
                problem.residual == "after",
                problem.return_sum,
                problem.stores_hat,
            )
        z, hat = (z if problem.return_sum else None), (hat if problem.stores_hat else None)
        return (y, z), (mean if layer else None, rstd, hat)


def _own(t: Tensor | None, like: Tensor) -> Tensor:
    """A tensor object that no other argument is: Helion compiles in which arguments are the same one."""
    return like.new_empty(0) if t is None else t.detach()
