"""Techniques `lazy` and `naive` of norm_linear. Triton is imported when one of them runs."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from recsys_norm.kernels.lazy.configs import (
    NAIVE_MAX_FEATURES,
    WHOLE_ROW_FEATURES,
    Kind,
    dx_config,
    forward_config,
    naive_config,
    wgrad_by_blas,
    wgrad_config,
)
from recsys_norm.ops.inputs import resolve_eps
from recsys_norm.ops.problem import Problem, Tensors

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MIN_ARCH = 80
_MIN_TRITON = (3, 6)


def cannot_run(problem: Problem) -> str | None:
    """What every kernel of these packages needs."""
    if problem.device != "cuda" or problem.arch is None:
        return f"its kernels need a CUDA device and the tensors are on {problem.device}; use backend='unfused'"
    if problem.arch < _MIN_ARCH:
        return f"compute capability {problem.arch} is below {_MIN_ARCH}; use backend='unfused'"
    if problem.triton_version is None or problem.triton_version < _MIN_TRITON:
        found = "none" if problem.triton_version is None else "{}.{}".format(*problem.triton_version)
        return f"it needs triton >= {_MIN_TRITON[0]}.{_MIN_TRITON[1]} and {found} is installed; use backend='unfused'"
    if problem.dtype not in _DTYPES:
        return f"its kernels take bfloat16, float16 and float32, not {problem.dtype}; use backend='unfused'"
    return None


def on_device_of(t: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensors'."""
    if t.device.type != "cuda" or t.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(t.device)


def kind_of(*matrices: Tensor, width: int) -> Kind:
    """From the matrices that a kernel reads and the width of its result; the first gives dtype and device."""
    from recsys_norm.kernels.lazy.common import INTERPRETED, architecture, dot_precision, fits_descriptor

    first = matrices[0]
    aligned = all(fits_descriptor(t) and t.shape[1] * t.element_size() % 16 == 0 for t in matrices)
    aligned = aligned and width * first.element_size() % 16 == 0
    tf32 = dot_precision(first.dtype) == "tf32"
    return Kind(architecture(first), first.dtype, aligned, bool(INTERPRETED.value), tf32)


class Lazy:
    """y = rstd * (x W'^T - mean * c) + b': the norm as a row scale of the GEMM; backward by maths of the same form."""

    name = "lazy"
    provider = "triton"

    def why_not(self, problem: Problem) -> str | None:
        if problem.op != "norm_linear":
            return f"it serves norm_linear, not {problem.op}; use technique='separate'"
        return cannot_run(problem)

    def forward(self, problem: Problem, x, weight, bias, norm_weight, norm_bias) -> tuple[Tensors, Tensors]:
        from recsys_norm.kernels.lazy.common import near
        from recsys_norm.kernels.lazy.fold import fold
        from recsys_norm.kernels.lazy.forward import forward
        from recsys_norm.kernels.lazy.stats import row_stats

        x, layer, eps = near(x), problem.norm == "layer", resolve_eps(problem.eps, problem.dtype)
        with on_device_of(x):
            config = forward_config(kind_of(x, weight, width=problem.N), problem.N)
            folded = fold(weight, bias, norm_weight, norm_bias, x.dtype, colsum=layer and x.dtype != torch.float32)
            stats = None if config.in_loop else row_stats(x, layer, eps)
            y, mean, rstd = forward(x, folded, layer, eps, config, stats)
        return (y,), (mean, rstd)

    def backward(self, problem: Problem, saved: Tensors, grads: Tensors, needs: tuple[bool, ...]) -> Tensors:
        with on_device_of(grads[0]):
            return backward(problem.norm, saved, grads[0], needs)


def backward(norm: str, saved: Tensors, dy: Tensor, needs: tuple[bool, ...]) -> Tensors:
    """Gradients of norm_linear; no kernel runs for one that is not needed."""
    from recsys_norm.kernels.lazy import backward as gradients
    from recsys_norm.kernels.lazy import wgrad
    from recsys_norm.kernels.lazy.common import near
    from recsys_norm.kernels.lazy.fold import fold
    from recsys_norm.kernels.norm.launch import column_sum

    x, weight, bias, norm_weight, norm_bias, mean, rstd, y = saved
    x, dy = near(x), near(dy)
    need_x, need_weight, need_bias, need_gamma, need_beta = needs
    layer, K = norm == "layer", x.shape[1]
    stats = gradients.RowStats(mean, rstd)
    need_sum = need_bias or need_beta or (need_weight and norm_bias is not None)
    need_product = need_weight or need_gamma
    blas = need_product and wgrad_by_blas(kind_of(x, dy, width=K), K)
    dx = dy_sum = hat = None
    if need_x:
        whole = K <= WHOLE_ROW_FEATURES
        folded = fold(weight, bias, norm_weight, norm_bias, x.dtype, colsum=layer and not whole)
        coefs = None
        if not whole:
            coefs = gradients.coefficients(dy, y, folded.colsum, folded.offset, layer, need_sum)
            dy_sum = coefs.dy_sum
        config = dx_config(kind_of(x, dy, folded.weight, width=K), K, whole)
        dx, hat = gradients.dx(dy, folded.weight, x, stats, coefs, config, emit_hat=blas)
    if need_sum and dy_sum is None:
        dy_sum = column_sum(dy, torch.float32)
    dweight = dgamma = dbeta = None
    if need_product:
        if blas:
            partial = wgrad.product_of(dy, wgrad.write_hat(x, stats) if hat is None else hat)
        else:
            partial = wgrad.product(dy, x, stats, wgrad_config(kind_of(x, dy, width=K)))
        options = dict(dweight=need_weight, dgamma=need_gamma, dbeta=need_beta)
        dweight, dgamma, dbeta = wgrad.finish(partial, weight, norm_weight, norm_bias, dy_sum, **options)
    elif need_beta:
        dbeta = torch.mv(weight.float().t(), dy_sum)
    return dx, dweight, dy_sum if need_bias else None, dgamma, dbeta


class Naive:
    """One tile spans the row of x: normalise it, round it, multiply it."""

    name = "naive"
    provider = "triton"
    backward_of = "triton/lazy"

    def why_not(self, problem: Problem) -> str | None:
        if problem.op != "norm_linear":
            return f"it serves norm_linear, not {problem.op}; use technique='separate'"
        reason = cannot_run(problem)
        if reason is not None:
            return reason
        limit = NAIVE_MAX_FEATURES[problem.dtype.itemsize]
        if problem.K > limit:
            return (
                f"one tile must hold a whole row of x beside a slice of the weight in shared memory, which stops at "
                f"{limit} in-features for {problem.dtype} and x has {problem.K}; use technique='lazy' or 'separate'"
            )
        return None

    def forward(self, problem: Problem, x, weight, bias, norm_weight, norm_bias) -> tuple[Tensors, Tensors]:
        from recsys_norm.kernels.lazy.common import near
        from recsys_norm.kernels.lazy.naive import forward

        x = near(x)
        with on_device_of(x):
            config = naive_config(kind_of(x, weight, width=problem.N), problem.K)
            eps = resolve_eps(problem.eps, problem.dtype)
            y, mean, rstd = forward(x, weight, bias, norm_weight, norm_bias, problem.norm == "layer", eps, config)
        return (y,), (mean, rstd)

    backward = Lazy.backward
