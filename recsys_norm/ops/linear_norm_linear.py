"""`linear_norm_linear`: linear, norm, activation, linear.

Technique tensors: forward `(x_MK, weight1_NK, bias1_N, weight2_N2N, bias2_N2, norm_weight_N, norm_bias_N) ->
(y_MN2,), (z_MN, mean_M, rstd_M)`; backward saved `(x, weight1, weight2, norm_weight, norm_bias, z, mean, rstd)`, grads
`(dy,)`, needs and grads in the order of the forward's tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_norm.ops import composite, inputs
from recsys_norm.ops.activations import ACTIVATIONS, get
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


def linear_norm_linear(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    norm: str,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float | None = 1e-5,
    activation: str | None = None,
    backend: str = "fused",
    technique: str | None = None,
    on_unsupported: str = "raise",
) -> Tensor:
    """Two linears with a norm, and an activation if named, between them:

        z = x @ weight1.T + bias1;  h = act(norm(z));  y = h @ weight2.T + bias2

    Args:
        x: `[..., K]`, bf16, fp16 or fp32; any strides, empty allowed. Under autocast it is cast first.
        weight1, bias1: `[N, K]` and `[N]`; weight2, bias2: `[N2, N]` and `[N2]`, in x's dtype or fp32.
        norm: "rms" (`z / sqrt(mean(z^2) + eps)`) or "layer" (`(z - mean) / sqrt(var + eps)`, biased variance).
        norm_weight, norm_bias: `[N]`, gamma and beta of the norm; "rms" takes no norm_bias.
        eps: inside the square root; None (rms only) means what F.rms_norm does in the installed torch.
        activation: None or a name of `recsys_norm.ops.activations`.
        backend, technique, on_unsupported: see `recsys_norm.ops`.
    Returns:
        `[..., N2]` in x's dtype. z and its statistics are saved for the backward; h is made again.
    Raises:
        TypeError, ValueError: for dtypes and shapes that do not fit. UnsupportedError: if the backend cannot run it.
    Source: "Towards Free Normalization", regrouping.
    """
    op = "linear_norm_linear"
    inputs.check_policy(op, backend, technique, on_unsupported)
    inputs.check_norm(op, norm, norm_bias, eps)
    inputs.check_choice(op, "activation", activation, (None, *ACTIVATIONS))
    (x,) = inputs.autocast(x)
    inputs.check_features(op, x, weight1, "weight1")
    N, K = weight1.shape
    if weight2.dim() != 2 or weight2.shape[1] != N:
        raise ValueError(
            f"{op}: weight2 needs shape [N2, {N}] to follow weight1's out-features, got {tuple(weight2.shape)}"
        )
    N2 = weight2.shape[0]
    parameters = {"weight1": weight1, "bias1": bias1, "weight2": weight2, "bias2": bias2}
    parameters |= {"norm_weight": norm_weight, "norm_bias": norm_bias}
    inputs.check_dtypes(op, x, {}, parameters)
    for name in ("bias1", "norm_weight", "norm_bias"):
        inputs.check_shape(op, name, parameters[name], (N,), "weight1's out-features")
    inputs.check_shape(op, "bias2", bias2, (N2,), "weight2's out-features")
    tensors = tuple(parameters.values())
    with inputs.without_autocast(x):
        if norms_are_identity():
            h = get(activation or "identity").forward(composite.linear(x, weight1, bias1))
            return composite.linear(h, weight2, bias2)
        if backend in ("unfused", "compiled"):
            count(op, backend)
            options = dict(norm=norm, eps=eps, activation=activation)
            return composite.run(backend, composite.linear_norm_linear, x, *tensors, **options)
        training = inputs.is_training(x, *tensors)
        policy = (backend, technique or "", on_unsupported)
        y, *_ = _forward_op(inputs.flat(x), *tensors, norm, eps, activation, training, *policy)
        return inputs.shaped_as(x, y)


def _problem(x, weight1, bias1, weight2, bias2, norm_weight, norm_bias, norm, eps, activation, training):
    return make_problem(
        "linear_norm_linear",
        x,
        (weight1, bias1, weight2, bias2, norm_weight, norm_bias),
        norm=norm,
        eps=eps,
        N=weight1.shape[0],
        N2=weight2.shape[0],
        affine=norm_weight is not None or norm_bias is not None,
        norm_bias=norm_bias is not None,
        bias=bias1 is not None,
        activation=None if activation == "identity" else activation,
        training=training,
    )


@define("linear_norm_linear")
def _forward_op(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: str,
    eps: float | None,
    activation: str | None,
    training: bool,
    backend: str,
    technique: str,
    on_unsupported: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors = (x, weight1, bias1, weight2, bias2, norm_weight, norm_bias)
    if x.shape[0] == 0:
        return _fake(*tensors, norm, eps, activation, training, backend, technique, on_unsupported)
    tensors = (inputs.rows(x), weight1.contiguous(), bias1, weight2.contiguous(), *tensors[4:])
    problem = _problem(*tensors, norm, eps, activation, training)
    chosen = select(problem, backend, technique or None, on_unsupported)
    (y,), (z, mean, rstd) = chosen.forward(problem, *tensors)
    return y, z, stand_in(mean, rstd), rstd


@_forward_op.register_fake
def _fake(x, weight1, bias1, weight2, bias2, norm_weight, norm_bias, norm, *_):
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    mean = absent(rstd) if norm == "rms" else torch.empty_like(rstd)
    return x.new_empty(x.shape[0], weight2.shape[0]), x.new_empty(x.shape[0], weight1.shape[0]), mean, rstd


@define("linear_norm_linear_backward")
def _backward_op(
    dy: Tensor,
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    z: Tensor,
    mean: Tensor,
    rstd: Tensor,
    norm: str,
    eps: float | None,
    activation: str | None,
    needs: list[bool],
    backend: str,
    technique: str,
    on_unsupported: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    likes = (x, weight1, bias1, weight2, bias2, norm_weight, norm_bias)
    if x.shape[0] == 0:
        return zero_gradients(likes, needs, x)
    x, weight1, weight2 = inputs.rows(x), weight1.contiguous(), weight2.contiguous()
    problem = _problem(x, weight1, bias1, weight2, bias2, norm_weight, norm_bias, norm, eps, activation, True)
    chosen = select(problem, backend, technique or None, on_unsupported, BACKWARD)
    saved = (x, weight1, weight2, norm_weight, norm_bias, z, present(mean), rstd)
    return gradients(chosen.backward(problem, saved, (inputs.rows(dy),), tuple(needs)), likes, x)


@_backward_op.register_fake
def _backward_fake(
    dy, x, weight1, bias1, weight2, bias2, norm_weight, norm_bias, z, mean, rstd, norm, eps, activation, needs, *_
):
    return fake_gradients((x, weight1, bias1, weight2, bias2, norm_weight, norm_bias), needs, x)


def _setup(ctx, inputs, output):
    *tensors, ctx.norm, ctx.eps, ctx.activation, _, backend, technique, on_unsupported = inputs
    ctx.policy = (backend, technique, on_unsupported)
    _, z, mean, rstd = output
    ctx.mark_non_differentiable(z, mean, rstd)
    ctx.set_materialize_grads(False)  # no zeros for the outputs that have no gradient
    ctx.save_for_backward(*tensors, z, mean, rstd)


def _backward(ctx, dy, _dz, _dmean, _drstd):
    needs = ctx.needs_input_grad[:7]
    grads = _backward_op(dy, *ctx.saved_tensors, ctx.norm, ctx.eps, ctx.activation, list(needs), *ctx.policy)
    return needed(grads, needs)


_forward_op.register_autograd(_backward, setup_context=_setup)
