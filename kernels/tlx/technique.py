"""Technique `tlx`: the forward of linear_norm in TLX, for comparison. The backward is that of `separate`.

TLX is imported as `triton.language.extra.tlx`, which the Triton fork `fbtriton` has and Triton itself has not. The fork is
installed as `triton`, in its place, so that one environment has either.
"""

from __future__ import annotations

import functools
import importlib

import torch

from recsys_norm.ops.inputs import resolve_eps
from recsys_norm.ops.problem import Problem, Tensors

WIDTHS = (256, 512, 1024, 2048)  # out-features: blocks of 128 or 256 columns, at most 8 to a cluster
DEPTH = 64  # in-features per step


@functools.cache
def missing() -> str | None:
    """Why TLX cannot be used here, None if it can."""
    try:
        importlib.import_module("triton.language.extra.tlx")
    except ImportError:
        try:
            found = f"triton {importlib.import_module('triton').__version__}"
        except ImportError:
            found = "no triton"
        return (
            f"TLX is part of the Triton fork fbtriton and {found} is installed: "
            "pip install fbtriton in an environment of its own, where it takes the place of triton"
        )
    return None


def tile(N: int) -> dict[str, int]:
    """CTAS blocks of BM x BN per cluster, BK in-features per step in STAGES buffers."""
    BN, stages = (128, 4) if N == 256 else (256, 3)
    return dict(CTAS=N // BN, BM=128, BN=BN, BK=DEPTH, STAGES=stages)


class LinearNorm:
    """The row of the result spread over a cluster, whose blocks exchange its statistics."""

    name = "tlx"
    provider = "tlx"

    def why_not(self, problem: Problem) -> str | None:
        from recsys_norm.kernels.lazy.technique import cannot_run

        if problem.op != "linear_norm":
            return f"it serves linear_norm, not {problem.op}; use technique='separate'"
        if missing() is not None:
            return f"{missing()}; or use technique='cluster' or 'separate'"
        reason = cannot_run(problem)
        if reason is not None:
            return reason
        if problem.arch != 90:
            return f"its product is Hopper's (90) and the device is {problem.arch}; use technique='separate'"
        if problem.dtype == torch.float32:
            return "it takes bfloat16 and float16, not torch.float32; use technique='separate'"
        if problem.residual is not None or problem.return_sum:
            return "it has neither a residual nor the returned sum; use technique='separate'"
        if problem.K % DEPTH or problem.N not in WIDTHS:
            return (
                f"it takes multiples of {DEPTH} in-features and {', '.join(map(str, WIDTHS))} out-features, not "
                f"K={problem.K}, N={problem.N}; use technique='separate'"
            )
        return None

    def forward(self, problem: Problem, x, weight, bias, norm_weight, norm_bias, residual) -> tuple[Tensors, Tensors]:
        import triton

        from recsys_norm.kernels.lazy.common import fits_descriptor
        from recsys_norm.kernels.lazy.technique import on_device_of
        from recsys_norm.kernels.tlx.kernels import linear_norm_kernel

        (M, K), N, layer = x.shape, problem.N, problem.norm == "layer"
        x = x if fits_descriptor(x) else x.clone(memory_format=torch.contiguous_format)  # copies of 16 bytes
        y = torch.empty(M, N, device=x.device, dtype=x.dtype)
        hat = torch.empty_like(y) if problem.stores_hat else None
        mean = torch.empty(M, device=x.device, dtype=torch.float32) if layer else None
        rstd = torch.empty(M, device=x.device, dtype=torch.float32)
        sizes = tile(N)
        with on_device_of(x):
            linear_norm_kernel[(triton.cdiv(M, sizes["BM"]) * sizes["CTAS"],)](
                x,
                weight.to(x.dtype),
                bias,
                norm_weight,
                norm_bias,
                y,
                hat,
                mean,
                rstd,
                M,
                K,
                x.stride(0),
                resolve_eps(problem.eps, problem.dtype),
                LAYER=layer,
                HAS_BIAS=bias is not None,
                HAS_GAMMA=norm_weight is not None,
                HAS_BETA=norm_bias is not None,
                WRITE_HAT=hat is not None,
                **sizes,
                num_warps=8,
                ctas_per_cga=(sizes["CTAS"], 1, 1),
            )
        return (y, None), (mean, rstd, hat)

    def backward(self, problem: Problem, saved: Tensors, grads: Tensors, needs: tuple[bool, ...]) -> Tensors:
        from recsys_norm.kernels.norm.technique import Separate

        return Separate().backward(problem, saved, grads, needs)


def compile_for_hopper(N: int, layer: bool, hat: bool):
    """The kernel compiled for compute capability 9.0, without a GPU; what a test looks at."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from recsys_norm.kernels.tlx.kernels import linear_norm_kernel as kernel

    values = dict(LAYER=layer, HAS_BIAS=True, HAS_GAMMA=True, HAS_BETA=layer, WRITE_HAT=hat) | tile(N)
    kinds = {"M": "i32", "K": "i32", "stride_x": "i32", "eps": "fp32"}
    kinds |= {f"{name}_ptr": "*bf16" for name in ("x", "w", "y", "hat")}
    kinds |= {f"{name}_ptr": "*fp32" for name in ("bias", "gamma", "beta", "mean", "rstd")}
    signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
    even = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in kinds.keys() - {"M", "eps"}
    }
    options = dict(num_warps=8, ctas_per_cga=(values["CTAS"], 1, 1))
    return triton.compile(ASTSource(kernel, signature, values, even), target=GPUTarget("cuda", 90, 32), options=options)
