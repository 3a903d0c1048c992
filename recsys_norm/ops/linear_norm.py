"""`linear_norm`: a linear, then a norm, with the residual stream before or after it.

Technique tensors: forward `(x_MK, weight_NK, bias_N, norm_weight_N, norm_bias_N, residual_MN) ->
(y_MN, z_MN), (mean_M, rstd_M, zhat_MN)`; backward saved `(x, weight, norm_weight, mean, rstd, hat, z)`, grads `(dy, dz)`,
needs and grads in the order of the forward's tensors. z is the un-normalised sum, given only where it is returned (then
`hat` is None and is made from z); zhat is stored only where `stores_hat` says so, else `hat` is y itself. With G =
`problem.groups` above 1, mean and rstd are [M * G].
"""

from __future__ import annotations

import functools
import operator

import torch
from torch import Tensor

from recsys_norm.ops import composite, inputs
from recsys_norm.ops.choices import BACKWARD
from recsys_norm.ops.identity import norms_are_identity
from recsys_norm.ops.library import (
    absent,
    arch_of,
    check_training,
    fake_gradients,
    gradients,
    make_problem,
    needed,
    present,
    stand_in,
    triton_version,
    zero_gradients,
)
from recsys_norm.ops.operators import define
from recsys_norm.ops.problem import Problem, stores_hat
from recsys_norm.ops.registry import UnsupportedError, choose, count, select

_MANY_ROWS = 1 << 18


def linear_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: str,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float | None = 1e-5,
    residual: Tensor | None = None,
    residual_position: str = "after",
    return_sum: bool = False,
    groups: int = 1,
    backend: str = "fused",
    technique: str | None = None,
    on_unsupported: str = "raise",
) -> Tensor | tuple[Tensor, Tensor]:
    """A linear followed by a norm over its out-features:

        "after":  y = norm(x @ weight.T + bias) + residual
        "before": z = x @ weight.T + bias + residual;  y = norm(z)

    Args:
        x: `[..., K]`, bf16, fp16 or fp32; any strides, empty allowed. Under autocast it is cast first.
        weight, bias: `[N, K]` and `[N]` as in nn.Linear, in x's dtype or fp32.
        norm: "rms" (`z / sqrt(mean(z^2) + eps)`) or "layer" (`(z - mean) / sqrt(var + eps)`, biased variance).
        norm_weight, norm_bias: `[N]`, gamma and beta of the norm; "rms" takes no norm_bias.
        eps: inside the square root; None (rms only) means what F.rms_norm does in the installed torch.
        residual: `[..., N]` in x's dtype.
        residual_position: "before" or "after" the norm.
        return_sum: with a residual before (or none), also return z, with gradients for both.
        groups: normalise that many equal parts of the N out-features each by itself: linears that read the same x, and
            the norms behind them, in one call (norm_weight and norm_bias are side by side, too).
        backend, technique, on_unsupported: see `recsys_norm.ops`.
    Returns:
        y `[..., N]` in x's dtype, or (y, z). The backward may read y: do not modify it in place.
    Raises:
        TypeError, ValueError: for dtypes and shapes that do not fit. UnsupportedError: if the backend cannot run it.
    Source: "Towards Free Normalization", multi-CTA norm.
    """
    op = "linear_norm"
    inputs.check_policy(op, backend, technique, on_unsupported)
    inputs.check_norm(op, norm, norm_bias, eps)
    inputs.check_choice(op, "residual_position", residual_position, ("before", "after"))
    if return_sum and residual is not None and residual_position == "after":
        raise ValueError(f"{op}: return_sum=True needs residual_position='before'; after the norm there is no sum")
    x, residual = inputs.autocast(x, residual)
    inputs.check_features(op, x, weight)
    N, K = weight.shape
    if groups < 1 or N % groups:
        raise ValueError(f"{op}: groups={groups} do not divide the {N} out-features; every group has equally many")
    parameters = {"weight": weight, "bias": bias, "norm_weight": norm_weight, "norm_bias": norm_bias}
    inputs.check_dtypes(op, x, {"residual": residual}, parameters)
    for name in ("bias", "norm_weight", "norm_bias"):
        inputs.check_shape(op, name, parameters[name], (N,), "out-features")
    inputs.check_shape(op, "residual", residual, (*x.shape[:-1], N), "x's leading dimensions and out-features")
    position = None if residual is None else residual_position
    with inputs.without_autocast(x):
        if norms_are_identity():
            z = composite.linear(x, weight, bias)
            z = z if residual is None else z + residual
            return (z, z) if return_sum else z
        if backend in ("unfused", "compiled"):
            count(op, backend)
            options = dict(
                norm=norm, eps=eps, residual_position=residual_position, return_sum=return_sum, groups=groups
            )
            args = (x, weight, bias, norm_weight, norm_bias, residual)
            return composite.run(backend, composite.linear_norm, *args, **options)
        if groups > 1 and backend == "naive":  # whose tile spans one norm's row
            how = dict(backend=backend, technique=technique, on_unsupported=on_unsupported)
            each = dict(norm=norm, eps=eps, residual_position=residual_position, return_sum=return_sum)
            return composite.group_by_group(linear_norm, groups, x, parameters, residual, **each, **how)
        flat = None if residual is None else inputs.flat(residual)
        training = inputs.is_training(x, *parameters.values(), residual)
        tensors = (inputs.flat(x), weight, bias, norm_weight, norm_bias, flat)
        affine = norm_weight is not None or norm_bias is not None
        keep = return_sum
        if position != "before" and stores_hat(training, affine, position, return_sum):
            widths = operator.index(K), operator.index(N)  # a graph of any width has no constant result
            keep = _product_is_written(norm, x.dtype, *widths, affine, groups, x.device, backend, technique)
            technique = "separate" if keep else technique
        policy = (backend, technique or "", on_unsupported)
        y, z, *_ = _forward_op(*tensors, norm, eps, position, keep, groups, training, *policy)
        y = inputs.shaped_as(x, y)
        return (y, inputs.shaped_as(x, z)) if return_sum else y


@torch.compiler.assume_constant_result
def _product_is_written(norm, dtype, K, N, affine, groups, device, backend, technique) -> bool:
    """Whether the technique for a large number of rows is `separate`, whose GEMM leaves z in memory: keeping that for the
    backward then costs less than writing zhat."""
    if device.type != "cuda" or backend != "fused" or technique is not None:
        return device.type == "cuda" and technique in ("separate", "triton/separate")
    try:
        return choose(_of_many_rows(norm, dtype, K, N, affine, groups, device)).name == "separate"
    except UnsupportedError:  # what follows from that is for `select` to say
        return False


@functools.lru_cache(maxsize=1024)
def _of_many_rows(norm, dtype, K, N, affine, groups, device) -> Problem:
    fields = dict(op="linear_norm", norm=norm, M=_MANY_ROWS, K=K, N=N, dtype=dtype, param_dtype=dtype, eps=1e-5)
    where = dict(device=device.type, arch=arch_of(device), triton_version=triton_version())
    return Problem(**fields, affine=affine, groups=groups, training=True, **where)


def _problem(x, weight, bias, norm_weight, norm_bias, norm, eps, position, return_sum, groups, training):
    return make_problem(
        "linear_norm",
        x,
        (weight, bias, norm_weight, norm_bias),
        norm=norm,
        eps=eps,
        N=weight.shape[0],
        affine=norm_weight is not None or norm_bias is not None,
        norm_bias=norm_bias is not None,
        bias=bias is not None,
        residual=position,
        return_sum=return_sum,
        groups=groups,
        training=training,
    )


@define("linear_norm")
def _forward_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    residual: Tensor | None,
    norm: str,
    eps: float | None,
    position: str | None,
    return_sum: bool,
    groups: int,
    training: bool,
    backend: str,
    technique: str,
    on_unsupported: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = (x, weight, bias, norm_weight, norm_bias, residual)
    if x.shape[0] == 0:
        options = (norm, eps, position, return_sum, groups, training, backend, technique, on_unsupported)
        return _fake(*tensors, *options)
    x, weight = inputs.rows(x), weight.contiguous()
    residual = None if residual is None else inputs.rows(residual)
    parameters = (weight, bias, norm_weight, norm_bias)
    problem = _problem(x, *parameters, norm, eps, position, return_sum, groups, training)
    chosen = select(problem, backend, technique or None, on_unsupported)
    (y, z), (mean, rstd, zhat) = chosen.forward(problem, x, *parameters, residual)
    return y, stand_in(z, x), stand_in(mean, rstd), rstd, stand_in(zhat, x)


@_forward_op.register_fake
def _fake(
    x, weight, bias, norm_weight, norm_bias, residual, norm, eps, position, return_sum, groups, training, *policy
):
    y = x.new_empty(x.shape[0], weight.shape[0])
    rstd = x.new_empty(x.shape[0] * groups, dtype=torch.float32)
    hat = stores_hat(training, norm_weight is not None or norm_bias is not None, position, return_sum)
    return (
        y,
        torch.empty_like(y) if return_sum else absent(x),
        absent(rstd) if norm == "rms" else torch.empty_like(rstd),
        rstd,
        torch.empty_like(y) if hat else absent(x),
    )


@define("linear_norm_backward")
def _backward_op(
    dy: Tensor,
    dz: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    hat: Tensor | None,
    z: Tensor | None,
    norm: str,
    eps: float | None,
    position: str | None,
    needs: list[bool],
    groups: int,
    backend: str,
    technique: str,
    on_unsupported: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    likes = (x, weight, bias, norm_weight, norm_bias, dy)
    if x.shape[0] == 0:
        return zero_gradients(likes, needs, x)
    x, weight, dy = inputs.rows(x), weight.contiguous(), inputs.rows(dy)
    dz = None if dz is None else inputs.rows(dz)
    problem = _problem(x, weight, bias, norm_weight, norm_bias, norm, eps, position, z is not None, groups, True)
    chosen = select(problem, backend, technique or None, on_unsupported, BACKWARD)
    saved = (x, weight, norm_weight, present(mean), rstd, hat, z)
    return gradients(chosen.backward(problem, saved, (dy, dz), tuple(needs)), likes, x)


@_backward_op.register_fake
def _backward_fake(dy, dz, x, weight, bias, norm_weight, norm_bias, mean, rstd, hat, z, norm, eps, position, needs, *_):
    return fake_gradients((x, weight, bias, norm_weight, norm_bias, dy), needs, x)


def _setup(ctx, inputs, output):
    x, weight, bias, norm_weight, norm_bias, _, ctx.norm, ctx.eps, ctx.position, return_sum, *rest = inputs
    ctx.groups, training, *ctx.policy = rest
    ctx.training = training
    y, z, mean, rstd, zhat = output
    ctx.mark_non_differentiable(mean, rstd, zhat)
    ctx.set_materialize_grads(False)  # z may be kept for the backward alone
    ctx.return_sum = return_sum
    affine = norm_weight is not None or norm_bias is not None
    hat = zhat if stores_hat(training, affine, ctx.position, return_sum) else y
    hat, z = (None, z) if return_sum else (hat, None)
    ctx.save_for_backward(x, weight, bias, norm_weight, norm_bias, mean, rstd, hat, z)


def _backward(ctx, dy, dz, _dmean, _drstd, _dhat):
    needs = ctx.needs_input_grad[:6]
    check_training("linear_norm", ctx.training)
    dz = dz if ctx.return_sum else None
    dy = torch.zeros_like(dz) if dy is None else dy
    if needs[5] and ctx.position == "after":  # the residual's gradient is dy itself
        needs = (*needs[:5], False)
    options = (ctx.norm, ctx.eps, ctx.position, list(needs), ctx.groups, *ctx.policy)
    grads = list(needed(_backward_op(dy, dz, *ctx.saved_tensors, *options), needs))
    if ctx.needs_input_grad[5] and ctx.position == "after":
        grads[5] = dy
    return tuple(grads)


_forward_op.register_autograd(_backward, setup_context=_setup)
