"""Techniques of linear_norm_linear. Triton is imported when one of them runs.

`deferred`: the first GEMM writes z and statistics per tile, the second applies the norm as a row scale of its result:

    z = x W1^T + b1;   y = rstd * (z W2'^T - mean * c) + b2'
    W2' = W2 * gamma;   c = row sums of W2';   b2' = b2 + W2 beta

`naive`: one tile spans the row of z and writes act(norm(z)); the second GEMM is plain. An activation does not commute
with the row scale, so `deferred` has none.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from recsys_norm.kernels.lazy.configs import WHOLE_ROW_FEATURES, given_config
from recsys_norm.kernels.lazy.technique import Lazy, cannot_run, kind_of, on_device_of
from recsys_norm.kernels.postnorm.configs import NAIVE_MAX_FEATURES, gemm_config, naive_config
from recsys_norm.ops.inputs import resolve_eps
from recsys_norm.ops.problem import Problem, Technique, Tensors


class _LinearNormLinear:
    provider = "triton"

    def why_not(self, problem: Problem) -> str | None:
        if problem.op != "linear_norm_linear":
            return f"it serves linear_norm_linear, not {problem.op}; use technique='separate'"
        return cannot_run(problem)

    def backward(self, problem: Problem, saved: Tensors, grads: Tensors, needs: tuple[bool, ...]) -> Tensors:
        from recsys_norm.kernels.norm.technique import Separate

        return Separate().backward(problem, saved, grads, needs)


class Deferred(_LinearNormLinear):
    """The norm between two linears as a row scale of the second; no limit on the width."""

    name = "deferred"

    def why_not(self, problem: Problem) -> str | None:
        reason = super().why_not(problem)
        if reason is None and problem.activation not in (None, "identity"):
            return (
                f"activation {problem.activation!r} does not commute with the row scale that it moves past the second "
                "linear; use technique='separate' or 'naive'"
            )
        return reason

    def forward(self, problem: Problem, x, weight1, bias1, weight2, bias2, norm_weight, norm_bias):
        from recsys_norm.kernels.lazy.fold import fold
        from recsys_norm.kernels.lazy.forward import forward
        from recsys_norm.kernels.lazy.stats import Stats
        from recsys_norm.kernels.postnorm.partial import gemm

        layer, eps = problem.norm == "layer", resolve_eps(problem.eps, problem.dtype)
        with on_device_of(x):
            config = gemm_config(kind_of(x, weight1, width=problem.N), problem.N)
            product = gemm(x, weight1, bias1, None, layer=layer, eps=eps, config=config)
            z, stats = product.z, Stats(product.mean, product.rstd, product.scale)
            folded = fold(weight2, bias2, norm_weight, norm_bias, x.dtype, colsum=layer and x.dtype != torch.float32)
            config = given_config(kind_of(z, weight2, width=problem.N2), problem.N2)
            y, mean, rstd = forward(z, folded, layer, eps, config, stats)
        return (y,), (z, mean, rstd)

    def backward(self, problem: Problem, saved: Tensors, grads: Tensors, needs: tuple[bool, ...]) -> Tensors:
        return backward(problem, saved, grads, needs, Lazy())


def second_linear(problem: Problem) -> Problem:
    """The norm and the second linear as a problem of norm_linear."""
    return replace(problem, op="norm_linear", K=problem.N, N=problem.N2, N2=0, strides=(problem.N, 1))


def backward(
    problem: Problem, saved: Tensors, grads: Tensors, needs: tuple[bool, ...], technique: Technique
) -> Tensors:
    """The second linear's gradients, and dz, by a technique of norm_linear; then the first linear's. Where no block holds a
    whole row between the linears, that would need y, which is not saved: technique `separate` serves."""
    from recsys_norm.kernels.norm.launch import column_sum
    from recsys_norm.kernels.norm.technique import Separate, weight_gradient

    if problem.N > WHOLE_ROW_FEATURES:
        return Separate().backward(problem, saved, grads, needs)
    x, weight1, weight2, norm_weight, norm_bias, z, mean, rstd = saved
    need_z = any(needs[:3])
    second = (z, weight2, None, norm_weight, norm_bias, mean, rstd, None)
    with on_device_of(x):
        wanted = (need_z, *needs[3:])
        dz, dw2, db2, dgamma, dbeta = technique.backward(second_linear(problem), second, grads, wanted)
        dx = torch.mm(dz, weight1.to(dz.dtype)) if needs[0] else None
        dw1 = weight_gradient(dz, x, weight1) if needs[1] else None
        db1 = column_sum(dz, torch.float32) if needs[2] else None
    return dx, dw1, db1, dw2, db2, dgamma, dbeta


class Naive(_LinearNormLinear):
    """One tile spans the row of z: GEMM, norm and activation in one kernel, then a plain GEMM."""

    name = "naive"
    backward_of = "triton/separate"

    def why_not(self, problem: Problem) -> str | None:
        reason = super().why_not(problem)
        if reason is None and problem.N > NAIVE_MAX_FEATURES:
            return (
                "one tile must hold a whole row between the linears in its accumulators, which stops at "
                f"{NAIVE_MAX_FEATURES} features and there are {problem.N}; use technique='separate'"
            )
        return reason

    def forward(self, problem: Problem, x, weight1, bias1, weight2, bias2, norm_weight, norm_bias):
        from recsys_norm.kernels.norm.technique import project
        from recsys_norm.kernels.postnorm.naive import forward

        with on_device_of(x):
            h, z, _, mean, rstd = forward(
                x,
                weight1,
                bias1,
                norm_weight,
                norm_bias,
                None,
                layer=problem.norm == "layer",
                eps=resolve_eps(problem.eps, problem.dtype),
                config=naive_config(kind_of(x, weight1, width=problem.N), problem.N),
                activation=problem.activation or "identity",
                write_z=True,
            )
            y = project(h, weight2, bias2)
        return (y,), (z, mean, rstd)
