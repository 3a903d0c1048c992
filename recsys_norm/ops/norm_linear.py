"""`norm_linear`: a norm, then a linear.

Technique tensors: forward `(x_MK, weight_NK, bias_N, norm_weight_K, norm_bias_K) -> (y_MN,), (mean_M, rstd_M)`;
backward saved `(x, weight, bias, norm_weight, norm_bias, mean, rstd, y)`, grads `(dy,)` or `(dy, add_MK)` (see
`Technique.adds_gradient`; dy may be a tuple, `Technique.takes_pieces`), needs and grads in the order of the forward's
tensors. y is saved only for K > 512: up to there one block holds a whole row of the gradient at xhat and takes its means
from the accumulators; beyond, they come from dy and y before the GEMM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_norm.ops import composite, inputs
from recsys_norm.ops.choices import BACKWARD
from recsys_norm.ops.identity import norms_are_identity
from recsys_norm.ops.library import (
    absent,
    backward_with,
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

SAVE_OUTPUT_ABOVE = 512  # in-features


def norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: str,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float | None = 1e-5,
    backend: str = "fused",
    technique: str | None = None,
    on_unsupported: str = "raise",
) -> Tensor:
    """y = norm(x) @ weight.T + bias, the norm over x's last dimension.

    Args:
        x: `[..., K]`, bf16, fp16 or fp32; any strides, empty allowed. Under autocast it is cast first.
        weight, bias: `[N, K]` and `[N]` as in nn.Linear, in x's dtype or fp32.
        norm: "rms" (`x / sqrt(mean(x^2) + eps)`) or "layer" (`(x - mean) / sqrt(var + eps)`, biased variance).
        norm_weight, norm_bias: `[K]`, gamma and beta of the norm; "rms" takes no norm_bias.
        eps: inside the square root; None (rms only) means what F.rms_norm does in the installed torch.
        backend, technique, on_unsupported: see `recsys_norm.ops`.
    Returns:
        `[..., N]` in x's dtype. Where K > 512 the backward reads the result: do not modify it in place.
    Raises:
        TypeError, ValueError: for dtypes and shapes that do not fit. UnsupportedError: if the backend cannot run it.
    Source: "Towards Free Normalization", lazy pre-norm.
    """
    op = "norm_linear"
    inputs.check_policy(op, backend, technique, on_unsupported)
    inputs.check_norm(op, norm, norm_bias, eps)
    (x,) = inputs.autocast(x)
    inputs.check_features(op, x, weight)
    N, K = weight.shape
    parameters = {"weight": weight, "bias": bias, "norm_weight": norm_weight, "norm_bias": norm_bias}
    inputs.check_dtypes(op, x, {}, parameters)
    inputs.check_shape(op, "bias", bias, (N,), "out-features")
    inputs.check_shape(op, "norm_weight", norm_weight, (K,), "in-features")
    inputs.check_shape(op, "norm_bias", norm_bias, (K,), "in-features")
    with inputs.without_autocast(x):
        if norms_are_identity():
            return composite.linear(x, weight, bias)
        if backend in ("unfused", "compiled"):
            count(op, backend)
            options = dict(norm=norm, eps=eps)
            return composite.run(backend, composite.norm_linear, x, weight, bias, norm_weight, norm_bias, **options)
        training = inputs.is_training(x, *parameters.values())
        policy = (backend, technique or "", on_unsupported)
        y, _, _ = _forward_op(inputs.flat(x), weight, bias, norm_weight, norm_bias, norm, eps, training, *policy)
        return inputs.shaped_as(x, y)


def _problem(x, weight, bias, norm_weight, norm_bias, norm, eps, training):
    return make_problem(
        "norm_linear",
        x,
        (weight, bias, norm_weight, norm_bias),
        norm=norm,
        eps=eps,
        N=weight.shape[0],
        affine=norm_weight is not None or norm_bias is not None,
        norm_bias=norm_bias is not None,
        bias=bias is not None,
        training=training,
    )


@define("norm_linear")
def _forward_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: str,
    eps: float | None,
    training: bool,
    backend: str,
    technique: str,
    on_unsupported: str,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = (x, weight, bias, norm_weight, norm_bias)
    if x.shape[0] == 0:
        return _fake(*tensors, norm, eps, training, backend, technique, on_unsupported)
    tensors = (inputs.rows(x), weight.contiguous(), *tensors[2:])
    problem = _problem(*tensors, norm, eps, training)
    chosen = select(problem, backend, technique or None, on_unsupported)
    (y,), (mean, rstd) = chosen.forward(problem, *tensors)
    return y, stand_in(mean, rstd), rstd


@_forward_op.register_fake
def _fake(x, weight, bias, norm_weight, norm_bias, norm, eps, training, backend, technique, on_unsupported):
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    mean = absent(rstd) if norm == "rms" else torch.empty_like(rstd)
    return x.new_empty(x.shape[0], weight.shape[0]), mean, rstd


@define("norm_linear_backward")
def _backward_op(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    y: Tensor | None,
    norm: str,
    eps: float | None,
    needs: list[bool],
    backend: str,
    technique: str,
    on_unsupported: str,
    add: Tensor | None = None,
    second: Tensor | None = None,
    third: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`add` is one more gradient of x, which dx then contains; `second` and `third` hold what stands right of dy if
    that came in pieces of one width (see `recsys_norm.ops.graph_passes`)."""
    likes = (x, weight, bias, norm_weight, norm_bias)
    if x.shape[0] == 0:
        return zero_gradients(likes, needs, x)
    tensors = (inputs.rows(x), weight.contiguous(), *likes[2:])
    problem = _problem(*tensors, norm, eps, True)
    chosen = select(problem, backend, technique or None, on_unsupported, BACKWARD)
    saved = (*tensors, present(mean), rstd, y)
    add = None if add is None else inputs.rows(add)
    pieces = tuple(inputs.rows(piece) for piece in (dy, second, third) if piece is not None)
    grad = pieces if len(pieces) > 1 else pieces[0]
    return gradients(backward_with(chosen, problem, saved, grad, add, tuple(needs)), likes, x)


@_backward_op.register_fake
def _backward_fake(dy, x, weight, bias, norm_weight, norm_bias, mean, rstd, y, norm, eps, needs, *policy, **optional):
    return fake_gradients((x, weight, bias, norm_weight, norm_bias), needs, x)


def _setup(ctx, inputs, output):
    x, weight, bias, norm_weight, norm_bias, ctx.norm, ctx.eps, _, *ctx.policy = inputs
    y, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)  # no zeros for the outputs that have no gradient
    y = y if x.shape[1] > SAVE_OUTPUT_ABOVE else None
    ctx.save_for_backward(x, weight, bias, norm_weight, norm_bias, mean, rstd, y)


def _backward(ctx, dy, _dmean, _drstd):
    needs = ctx.needs_input_grad[:5]
    return needed(_backward_op(dy, *ctx.saved_tensors, ctx.norm, ctx.eps, list(needs), *ctx.policy), needs)


_forward_op.register_autograd(_backward, setup_context=_setup)
