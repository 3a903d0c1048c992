"""Technique `deferred` of linear_norm_linear on Hopper: the norm between the linears as a row scale of the second.

    z = x W1^T + b1                        cuBLAS
    y = rstd * (z W2'^T) + b2'             the kernel of technique `lazy`, which takes the statistics of z on its way

The lazy kernel sums z while its product runs, so the first GEMM needs no epilogue of its own and norm(z) is never
written. An activation does not commute with the row scale. Backward: the second linear's is that of `lazy`, up to 512
features between the linears, where it needs no saved y; beyond, that of `separate`.
"""

from __future__ import annotations

from dataclasses import replace

from recsys_norm.kernels.hopper import lazy
from recsys_norm.kernels.lazy.technique import on_device_of
from recsys_norm.ops.inputs import resolve_eps
from recsys_norm.ops.problem import Problem, Tensors


class Deferred:
    """The norm between two linears, applied in the second; no activation."""

    name = "deferred"
    provider = "hopper"

    def why_not(self, problem: Problem) -> str | None:
        if problem.op != "linear_norm_linear":
            return f"it serves linear_norm_linear, not {problem.op}; use technique='separate'"
        if problem.activation not in (None, "identity"):
            return (
                f"activation {problem.activation!r} does not commute with the row scale that it moves past the second "
                "linear; use technique='separate'"
            )
        second = replace(problem, op="norm_linear", K=problem.N, N=problem.N2, N2=0, strides=(problem.N, 1))
        return lazy.Lazy().why_not(second)

    def forward(self, problem: Problem, x, weight1, bias1, weight2, bias2, norm_weight, norm_bias):
        from recsys_norm.kernels.norm.technique import project

        eps = resolve_eps(problem.eps, problem.dtype)
        with on_device_of(x):
            z = project(x, weight1, bias1)
            y, mean, rstd = lazy.forward(z, weight2, bias2, norm_weight, norm_bias, problem.norm == "layer", eps)
        return (y,), (z, mean, rstd)

    def backward(self, problem: Problem, saved: Tensors, grads: Tensors, needs: tuple[bool, ...]) -> Tensors:
        from recsys_norm.kernels.deferred.technique import backward

        return backward(problem, saved, grads, needs, lazy.Lazy())
