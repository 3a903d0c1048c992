"""Techniques of linear_norm: `naive`, `cluster` and `two_kernel`. Triton is imported when one of them runs.

Their backward is that of `separate`: the norm's is one pass over the rows, and both GEMMs that follow are plain.
"""

from __future__ import annotations

import torch

from recsys_norm.kernels.lazy.technique import cannot_run, kind_of, on_device_of
from recsys_norm.kernels.postnorm.configs import (
    CLUSTER_MAX_FEATURES,
    NAIVE_MAX_FEATURES,
    cluster_config,
    gemm_config,
    naive_config,
)
from recsys_norm.ops.inputs import resolve_eps
from recsys_norm.ops.problem import Problem, Tensors


class _LinearNorm:
    provider = "triton"
    backward_of = "triton/separate"

    def why_not(self, problem: Problem) -> str | None:
        if problem.op != "linear_norm":
            return f"it serves linear_norm, not {problem.op}; use technique='separate'"
        return cannot_run(problem)

    def backward(self, problem: Problem, saved: Tensors, grads: Tensors, needs: tuple[bool, ...]) -> Tensors:
        from recsys_norm.kernels.norm.technique import Separate

        return Separate().backward(problem, saved, grads, needs)


class Naive(_LinearNorm):
    """One tile spans the row of the result: GEMM, norm and residual in one kernel."""

    name = "naive"

    def why_not(self, problem: Problem) -> str | None:
        reason = super().why_not(problem)
        if reason is None and problem.N > NAIVE_MAX_FEATURES:
            return (
                f"one tile must hold a whole row of the result in its accumulators, which stops at "
                f"{NAIVE_MAX_FEATURES} out-features and the weight has {problem.N}; "
                "use technique='separate' or 'two_kernel'"
            )
        return reason

    def forward(self, problem: Problem, x, weight, bias, norm_weight, norm_bias, residual) -> tuple[Tensors, Tensors]:
        from recsys_norm.kernels.postnorm.naive import forward

        with on_device_of(x):
            y, z, hat, mean, rstd = forward(
                x,
                weight,
                bias,
                norm_weight,
                norm_bias,
                residual,
                layer=problem.norm == "layer",
                eps=resolve_eps(problem.eps, problem.dtype),
                position=problem.residual,
                write_z=problem.return_sum,
                write_hat=problem.stores_hat,
                config=naive_config(kind_of(x, weight, width=problem.N), problem.N),
            )
        return (y, z), (mean, rstd, hat)


class TwoKernel(_LinearNorm):
    """A GEMM that writes z and statistics per tile, then a pass that normalises."""

    name = "two_kernel"

    def forward(self, problem: Problem, x, weight, bias, norm_weight, norm_bias, residual) -> tuple[Tensors, Tensors]:
        from recsys_norm.kernels.postnorm.partial import apply, gemm

        before = residual if problem.residual == "before" else None
        after = residual if problem.residual == "after" else None
        with on_device_of(x):
            product = gemm(
                x,
                weight,
                bias,
                before,
                layer=problem.norm == "layer",
                eps=resolve_eps(problem.eps, problem.dtype),
                config=gemm_config(kind_of(x, weight, width=problem.N), problem.N),
            )
            keep = problem.return_sum
            y, hat = apply(product, norm_weight, norm_bias, after, write_hat=problem.stores_hat, keep_z=keep)
        return (y, product.z if keep else None), (product.mean, product.rstd, hat)


class Cluster(_LinearNorm):
    """The row of the result spread over a cluster of blocks that exchange its statistics."""

    name = "cluster"

    def why_not(self, problem: Problem) -> str | None:
        reason = super().why_not(problem)
        if reason is not None:
            return reason
        if not 90 <= problem.arch < 120:
            return f"compute capability {problem.arch} has no thread block clusters of 8; use technique='separate'"
        if problem.dtype == torch.float32:
            return "it takes bfloat16 and float16, not torch.float32; use technique='separate'"
        if problem.K % 8 or problem.N % 8:
            return (
                f"its rows must be multiples of 16 bytes, and K={problem.K}, N={problem.N} are not multiples of 8; "
                "use technique='separate'"
            )
        if problem.N > CLUSTER_MAX_FEATURES:
            return (
                f"a cluster of 8 blocks holds {CLUSTER_MAX_FEATURES} out-features and the weight has {problem.N}; "
                "use technique='separate'"
            )
        if problem.residual is not None and problem.triton_version < (3, 8):
            return (
                "before triton 3.8 a residual cannot be read in the layout of a cluster and {}.{} is installed; "
                "use technique='separate'".format(*problem.triton_version)
            )
        return None

    def forward(self, problem: Problem, x, weight, bias, norm_weight, norm_bias, residual) -> tuple[Tensors, Tensors]:
        from recsys_norm.kernels.postnorm.cluster import forward

        with on_device_of(x):
            y, z, hat, mean, rstd = forward(
                x,
                weight,
                bias,
                norm_weight,
                norm_bias,
                residual,
                layer=problem.norm == "layer",
                eps=resolve_eps(problem.eps, problem.dtype),
                config=cluster_config(kind_of(x, weight, width=problem.N), problem.N),
                position=problem.residual,
                write_z=problem.return_sum,
                write_hat=problem.stores_hat,
            )
        return (y, z), (mean, rstd, hat)
