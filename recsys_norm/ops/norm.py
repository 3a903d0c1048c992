"""`layer_norm` and `rms_norm`, with the residual add fused.

Technique tensors: forward `(x_MN, norm_weight_N, norm_bias_N, residual_MN) -> (y, z), (mean, rstd)`; backward
saved `(z, norm_weight, mean, rstd)`, grads `(dy, dz)`, needs and grads in the order of the forward's tensors.
z is x + residual, None without a residual (then x itself is saved).
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_norm.ops import composite, inputs
from recsys_norm.ops.choices import BACKWARD
from recsys_norm.ops.identity import norms_are_identity
from recsys_norm.ops.library import (
    absent,
    fake_gradients,
    gradients,
    make_problem,
    needed,
    present,
    stand_in,
    zero_gradients,
)
from recsys_norm.ops.operators import define
from recsys_norm.ops.registry import count, select


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    return_sum: bool = False,
    backend: str = "fused",
    technique: str | None = None,
    on_unsupported: str = "raise",
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm over the last dimension, of x or of x + residual:

        z = x (+ residual);  y = (z - mean(z)) / sqrt(var(z) + eps) * weight + bias      (biased variance)

    Args:
        x: `[..., N]`, bf16, fp16 or fp32; any strides, empty allowed. Under autocast it is cast first.
        weight, bias: `[N]` in x's dtype or fp32, or None.
        residual: as x, added before the norm.
        return_sum: also return z (the residual stream), with gradients for both.
        backend, technique, on_unsupported: see `recsys_norm.ops`.
    Returns:
        y `[..., N]` in x's dtype, or (y, z).
    Raises:
        TypeError, ValueError: for dtypes and shapes that do not fit. UnsupportedError: if the backend cannot run it.
    Source: Ba, Kiros, Hinton, "Layer Normalization", 2016.
    """
    return _norm("layer_norm", "layer", x, weight, bias, eps, residual, return_sum, backend, technique, on_unsupported)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-5,
    *,
    residual: Tensor | None = None,
    return_sum: bool = False,
    backend: str = "fused",
    technique: str | None = None,
    on_unsupported: str = "raise",
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension, of x or of x + residual:

        z = x (+ residual);  y = z / sqrt(mean(z^2) + eps) * weight

    Arguments as in `layer_norm`; eps=None means what `torch.nn.functional.rms_norm` does in the installed torch.
    Source: Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    return _norm("rms_norm", "rms", x, weight, None, eps, residual, return_sum, backend, technique, on_unsupported)


def _norm(op, norm, x, weight, bias, eps, residual, return_sum, backend, technique, on_unsupported):
    inputs.check_policy(op, backend, technique, on_unsupported)
    inputs.check_norm(op, norm, bias, eps)
    x, residual = inputs.autocast(x, residual)
    if x.dim() == 0:
        raise ValueError(f"{op}: x needs at least one dimension, got a scalar")
    inputs.check_dtypes(op, x, {"residual": residual}, {"weight": weight, "bias": bias})
    inputs.check_shape(op, "weight", weight, (x.shape[-1],), "x's last dimension")
    inputs.check_shape(op, "bias", bias, (x.shape[-1],), "x's last dimension")
    inputs.check_shape(op, "residual", residual, tuple(x.shape), "x's shape")
    if norms_are_identity():
        z = x if residual is None else x + residual
        return (z, z) if return_sum else z
    with inputs.without_autocast(x):
        if backend in ("unfused", "compiled"):
            count("norm", backend)
            options = dict(norm=norm, eps=eps, return_sum=return_sum)
            return composite.run(backend, composite.norm, x, weight, bias, residual, **options)
        flat = None if residual is None else inputs.flat(residual)
        training = inputs.is_training(x, weight, bias, residual)
        policy = (backend, technique or "", on_unsupported)
        y, z, _, _ = _norm_op(inputs.flat(x), weight, bias, flat, norm, eps, training, *policy)
        y = inputs.shaped_as(x, y)
        if not return_sum:
            return y
        return y, x if residual is None else inputs.shaped_as(x, z)


@define("norm")
def _norm_op(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    residual: Tensor | None,
    norm: str,
    eps: float | None,
    training: bool,
    backend: str,
    technique: str,
    on_unsupported: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        return _norm_fake(x, norm_weight, norm_bias, residual, norm, eps, training, backend, technique, on_unsupported)
    x = inputs.rows(x)
    residual = None if residual is None else inputs.rows(residual)
    problem = _problem(x, norm_weight, norm_bias, residual is not None, norm, eps, training)
    chosen = select(problem, backend, technique or None, on_unsupported)
    (y, z), (mean, rstd) = chosen.forward(problem, x, norm_weight, norm_bias, residual)
    return y, stand_in(z, x), stand_in(mean, rstd), rstd


@_norm_op.register_fake
def _norm_fake(x, norm_weight, norm_bias, residual, norm, eps, training, backend, technique, on_unsupported):
    z = absent(x) if residual is None else x.new_empty(x.shape)
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    return x.new_empty(x.shape), z, absent(rstd) if norm == "rms" else torch.empty_like(rstd), rstd


def _problem(x, norm_weight, norm_bias, residual, norm, eps, training):
    return make_problem(
        "norm",
        x,
        (norm_weight, norm_bias),
        norm=norm,
        eps=eps,
        N=x.shape[1],
        affine=norm_weight is not None or norm_bias is not None,
        norm_bias=norm_bias is not None,
        residual="before" if residual else None,
        return_sum=residual,
        training=training,
    )


@define("norm_backward")
def _norm_backward_op(
    dy: Tensor,
    dz: Tensor | None,
    z: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    residual: bool,
    norm: str,
    eps: float | None,
    needs: list[bool],
    backend: str,
    technique: str,
    on_unsupported: str,
) -> tuple[Tensor, Tensor, Tensor]:
    likes = (z, norm_weight, norm_bias)
    if z.numel() == 0:
        return zero_gradients(likes, needs, z)
    z, dy = inputs.rows(z), inputs.rows(dy)
    dz = None if dz is None else inputs.rows(dz)
    problem = _problem(z, norm_weight, norm_bias, residual, norm, eps, True)
    chosen = select(problem, backend, technique or None, on_unsupported, BACKWARD)
    saved = (z, norm_weight, present(mean), rstd)
    grads = chosen.backward(problem, saved, (dy, dz), (*needs, False))
    return gradients(grads[:3], likes, z)


@_norm_backward_op.register_fake
def _norm_backward_fake(dy, dz, z, norm_weight, norm_bias, mean, rstd, residual, norm, eps, needs, *policy):
    return fake_gradients((z, norm_weight, norm_bias), needs, z)


def _setup(ctx, inputs, output):
    x, norm_weight, norm_bias, residual, ctx.norm, ctx.eps, _, *ctx.policy = inputs
    _, z, mean, rstd = output
    ctx.residual = residual is not None
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)  # no zeros for the outputs that have no gradient
    ctx.save_for_backward(z if ctx.residual else x, norm_weight, norm_bias, mean, rstd)


def _backward(ctx, dy, dz, _dmean, _drstd):
    need_x, need_weight, need_bias, need_residual = ctx.needs_input_grad[:4]
    z, norm_weight, norm_bias, mean, rstd = ctx.saved_tensors
    needs = [need_x or need_residual, need_weight, need_bias]
    dy = torch.zeros_like(z) if dy is None else dy
    dz = None if not ctx.residual else torch.zeros_like(z) if dz is None else dz
    dx, dweight, dbias = _norm_backward_op(
        dy, dz, z, norm_weight, norm_bias, mean, rstd, ctx.residual, ctx.norm, ctx.eps, needs, *ctx.policy
    )
    return needed((dx, dweight, dbias, dx), ctx.needs_input_grad)


_norm_op.register_autograd(_backward, setup_context=_setup)
