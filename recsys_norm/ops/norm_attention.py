"""`norm_attention`: attention on packed sequences between two norms (FlashNormAttention).

Technique tensors: forward `(q_THd, k_UHd, v_UHd, q_offsets_B1, k_offsets_B1, pre_q_weight, pre_q_bias, pre_k_weight,
pre_k_bias, post_weight, post_bias, residual_THd) -> (out_THd,), (q_mean, q_rstd, k_mean, k_rstd, o_mean, o_rstd, o_hat)`.
Statistics are fp32, `[T]` for a norm over all heads and `[T, H]` per head; those of a norm that is not asked for, and the
means of rms, are None. `o_hat` is the post-norm's standardised output, stored for the backward where `out` is not it
(see `stores_hat`). Backward saved: the forward's tensors but for the residual, then its saved tensors, `o_hat` always
given if there is a post-norm; grads `(dout,)`, or `(dout, dout)` where q is its own residual (`Technique.adds_gradient`);
needs and grads in the order of the forward's tensors, the residual's always False and None: its gradient is `dout`, and
the op passes it on.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from recsys_norm.ops import composite, inputs
from recsys_norm.ops.activations import resolve
from recsys_norm.ops.choices import BACKWARD
from recsys_norm.ops.identity import norms_are_identity
from recsys_norm.ops.library import (
    absent,
    backward_with,
    check_training,
    fake_gradients,
    gradients,
    make_problem,
    needed,
    present,
    stand_in,
    zero_gradients,
)
from recsys_norm.ops.operators import define
from recsys_norm.ops.problem import AttentionSpec, stores_hat
from recsys_norm.ops.registry import count, select

ParameterOrPair = Tensor | tuple[Tensor | None, Tensor | None] | None


def norm_attention(
    q_THd: Tensor,
    k_UHd: Tensor,
    v_UHd: Tensor,
    q_offsets_B1: Tensor,
    k_offsets_B1: Tensor,
    *,
    max_q_len: int,
    max_k_len: int,
    activation: str | tuple[str, ...] = "gelu",
    softmax: bool = False,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    pre_norm: str | None = None,
    pre_norm_on: str = "q",
    pre_norm_scope: str = "all_heads",
    pre_norm_weight: ParameterOrPair = None,
    pre_norm_bias: ParameterOrPair = None,
    post_norm: str | None = None,
    post_norm_weight: Tensor | None = None,
    post_norm_bias: Tensor | None = None,
    eps: float | None = 1e-5,
    inner_residual: bool = False,
    residual: Tensor | None = None,
    packed: bool = False,
    attention: str = "fused",
    backend: str = "fused",
    technique: str | None = None,
    on_unsupported: str = "raise",
) -> Tensor:
    """Attention of packed sequences with the norms before and after it:

        qn  = norm(q)                                   over all heads, or per head; k likewise where asked for
        o_h = act(scale * qn_h k_h^T) v_h  (+ qn_h)     element-wise activation (GDPA), or softmax
        out = norm(o over all heads)  (+ residual)

    Sequence b has queries `q_offsets[b]:q_offsets[b+1]` and keys `k_offsets[b]:k_offsets[b+1]`; either may be empty. Rows
    past the last offset are 0 in the output and in the gradients.

    Args:
        q_THd, k_UHd, v_UHd: bf16, fp16 or fp32, H heads of width d. Under autocast they are cast first.
        q_offsets_B1, k_offsets_B1: int32 or int64, length B + 1, from 0, on the device of q.
        max_q_len, max_k_len: upper bounds of the sequence lengths, as Python ints.
        activation: a name of `recsys_norm.ops.activations`, or one per head; without softmax only.
        softmax: softmax attention instead of GDPA.
        scale: factor of the scores, inside the activation; None is 1.0 for GDPA, d**-0.5 for softmax.
        causal, window: keep keys j <= i, and |i - j| < window; both count from the sequence's start.
        pre_norm, post_norm: None, "rms" or "layer".
        pre_norm_on: "q", "k" or "qk". pre_norm_scope: "all_heads" (over H * d) or "head" (over d).
        pre_norm_weight, pre_norm_bias: `[H * d]`, or `[d]` for scope "head"; a pair (for q, for k) where they differ.
        post_norm_weight, post_norm_bias: `[H * d]`.
        eps: of both norms, inside the square root.
        inner_residual: add the normalised q to each head's output. residual: `[T, H, d]`, added last.
        packed: promises that no row lies past the last offset, which saves the unfused path a masking pass.
        attention: "fused" (an attention kernel where one can run) or "eager" (pure PyTorch, for comparison).
        backend, technique, on_unsupported: see `recsys_norm.ops`.
    Returns:
        `[T, H, d]` in q's dtype. The backward may read it: do not modify it in place.
    Raises:
        TypeError, ValueError: for dtypes, shapes and options that do not fit. UnsupportedError: if the backend cannot
            run it.
    Source: "Towards Free Normalization", FlashNormAttention; GDPA from Kunlun.
    """
    op = "norm_attention"
    inputs.check_policy(op, backend, technique, on_unsupported)
    inputs.check_choice(op, "attention", attention, ("fused", "eager"))
    own_residual = residual is q_THd
    q, k, v, residual = inputs.autocast(q_THd, k_UHd, v_UHd, None if own_residual else residual)
    pre_q, pre_k = _sides(op, pre_norm, pre_norm_on, pre_norm_weight, pre_norm_bias)
    post = (post_norm_weight, post_norm_bias)
    _check_tensors(op, q, k, v, q_offsets_B1, k_offsets_B1, residual)
    _check_norms(op, q, pre_norm, pre_norm_on, pre_norm_scope, pre_q, pre_k, post_norm, post, eps)
    H, d = q.shape[1:]
    if norms_are_identity():
        pre_norm = post_norm = None
        pre_q = pre_k = post = (None, None)
    scale = float(scale) if scale is not None else d**-0.5 if softmax else 1.0
    spec: tuple = (max_q_len, max_k_len, ",".join(resolve(activation, H)), softmax, scale, causal, window)
    spec += (pre_norm, pre_norm_on, pre_norm_scope, post_norm, inner_residual)
    tensors = (q, k, v, *inputs.in_a_row(q_offsets_B1, k_offsets_B1))
    with inputs.without_autocast(q):
        plain = backend in ("unfused", "compiled")
        nothing_to_fuse = pre_norm is None and post_norm is None and technique is None
        if plain or attention == "eager" or nothing_to_fuse:
            label = "attention alone" + ("" if q.is_cuda else " (torch)") if nothing_to_fuse and not plain else backend
            count(op, f"{label}, eager attention" if attention == "eager" else label)
            implementation = "eager" if attention == "eager" else "auto"
            options = dict(spec=_unpack(*spec), eps=eps, packed=packed, implementation=implementation)
            function, residual = composite.norm_attention, q if own_residual else residual
            return composite.run(backend, function, *tensors, pre_q, pre_k, post, residual, **options)
        training = inputs.is_training(q, k, v, *pre_q, *pre_k, *post, residual)
        parameters = (*pre_q, *pre_k, *post)
        policy = (backend, technique or "", on_unsupported)
        flags = (packed, training, own_residual)
        return _forward_op(*tensors, *parameters, residual, *spec, eps, *flags, *policy)[0]


def _sides(op, pre_norm, on, weight, bias):
    """(weight, bias) of the norm on q and of the norm on k."""
    inputs.check_choice(op, "pre_norm_on", on, ("q", "k", "qk"))
    (q_weight, k_weight), (q_bias, k_bias) = (p if isinstance(p, tuple) else (p, p) for p in (weight, bias))
    if pre_norm is None and any(p is not None for p in (q_weight, k_weight, q_bias, k_bias)):
        raise ValueError(
            f"{op}: pre_norm_weight or pre_norm_bias given without pre_norm; pass pre_norm='rms' or 'layer'"
        )
    none = (None, None)
    return (q_weight, q_bias) if "q" in on else none, (k_weight, k_bias) if "k" in on else none


def _check_tensors(op, q, k, v, q_offsets, k_offsets, residual):
    if q.dim() != 3 or k.dim() != 3 or q.shape[1:] != k.shape[1:] or k.shape != v.shape:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"{op}: q [T, H, d] and k, v [U, H, d] need the same H and d; got {shapes}")
    inputs.check_dtypes(op, q, {"k": k, "v": v, "residual": residual}, {})
    inputs.check_shape(op, "residual", residual, tuple(q.shape), "q's shape")
    for name, offsets in (("q_offsets", q_offsets), ("k_offsets", k_offsets)):
        if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64) or offsets.shape[0] < 1:
            raise ValueError(
                f"{op}: {name} must be 1-D int32 or int64 of length B + 1; "
                f"got shape {tuple(offsets.shape)}, {offsets.dtype}"
            )
        if offsets.device != q.device:
            raise ValueError(f"{op}: {name} is on {offsets.device} and q on {q.device}; move one with .to()")
    if q_offsets.shape != k_offsets.shape:
        raise ValueError(
            f"{op}: q_offsets has {q_offsets.shape[0] - 1} sequences and k_offsets {k_offsets.shape[0] - 1}"
        )


def _check_norms(op, q, pre_norm, on, scope, pre_q, pre_k, post_norm, post, eps):
    H, d = q.shape[1:]
    inputs.check_choice(op, "pre_norm_scope", scope, ("all_heads", "head"))
    if pre_norm is not None:
        inputs.check_norm(op, pre_norm, pre_q[1] if pre_q[1] is not None else pre_k[1], eps)
    if post_norm is not None:
        inputs.check_norm(op, post_norm, post[1], eps)
    elif any(p is not None for p in post):
        raise ValueError(f"{op}: post_norm_weight or post_norm_bias given without post_norm; pass 'rms' or 'layer'")
    width = (d,) if scope == "head" else (H * d,)
    parameters = {}
    for name, p, shape in (
        ("pre_norm_weight of q", pre_q[0], width),
        ("pre_norm_bias of q", pre_q[1], width),
        ("pre_norm_weight of k", pre_k[0], width),
        ("pre_norm_bias of k", pre_k[1], width),
        ("post_norm_weight", post[0], (H * d,)),
        ("post_norm_bias", post[1], (H * d,)),
    ):
        if p is not None:
            inputs.check_shape(op, name, p, shape, "the width that is normalised")
            parameters[name] = p
    inputs.check_dtypes(op, q, {}, parameters)


def _unpack(max_q_len, max_k_len, activation, *rest) -> AttentionSpec:
    """The spec of its fields as arguments of a registered op, which takes no dataclass and no list of strings."""
    return AttentionSpec(max_q_len, max_k_len, tuple(activation.split(",")), *rest)


_spec_of = functools.lru_cache(maxsize=1024)(_unpack)  # outside of graphs, where the lengths are numbers


def _problem(q, k, parameters, residual, spec, eps, training):
    pre_q_weight, pre_q_bias, pre_k_weight, pre_k_bias, post_weight, post_bias = parameters
    norm_bias = pre_q_bias is not None or pre_k_bias is not None or post_bias is not None
    T, H, d = q.shape
    return make_problem(
        "norm_attention",
        q,
        parameters,
        norm=spec.post_norm or spec.pre_norm,
        eps=eps,
        K=H * d,
        N=H * d,
        H=H,
        d=d,
        affine=norm_bias or any(p is not None for p in (pre_q_weight, pre_k_weight, post_weight)),
        norm_bias=norm_bias,
        residual="after" if residual else None,
        training=training,
        attention=spec,
    )


@define("norm_attention")
def _forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    pre_q_weight: Tensor | None,
    pre_q_bias: Tensor | None,
    pre_k_weight: Tensor | None,
    pre_k_bias: Tensor | None,
    post_weight: Tensor | None,
    post_bias: Tensor | None,
    residual: Tensor | None,
    max_q_len: int,
    max_k_len: int,
    activation: str,
    softmax: bool,
    scale: float,
    causal: bool,
    window: int | None,
    pre_norm: str | None,
    pre_norm_on: str,
    pre_norm_scope: str,
    post_norm: str | None,
    inner_residual: bool,
    eps: float | None,
    packed: bool,
    training: bool,
    own_residual: bool,
    backend: str,
    technique: str,
    on_unsupported: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    parameters = (pre_q_weight, pre_q_bias, pre_k_weight, pre_k_bias, post_weight, post_bias)
    spec: tuple = (max_q_len, max_k_len, activation, softmax, scale, causal, window)
    spec += (pre_norm, pre_norm_on, pre_norm_scope, post_norm, inner_residual)
    residual = q if own_residual else residual
    tensors = (q, k, v, q_offsets, k_offsets, *parameters, residual)
    if q.numel() == 0:
        return _fake(*tensors, *spec, eps, packed, training, own_residual, backend, technique, on_unsupported)
    problem = _problem(q, k, parameters, residual is not None, _spec_of(*spec), eps, training)
    chosen = select(problem, backend, technique or None, on_unsupported)
    (out,), saved = chosen.forward(problem, *tensors)
    *statistics, hat = saved
    none = q_offsets.new_empty(0, dtype=torch.float32)
    results: tuple = (out, *(stand_in(s, none) for s in statistics), stand_in(hat, q))
    return results


@_forward_op.register_fake
def _fake(q, k, v, q_offsets, k_offsets, *rest):
    post, residual = rest[4:6], rest[6]
    spec, training = _unpack(*rest[7:19]), rest[21]
    residual = q if rest[22] else residual

    def statistics(x, norm, on, scope):
        shape = x.shape[:2] if scope == "head" else x.shape[:1]
        none = x.new_empty(0, dtype=torch.float32)
        rstd = x.new_empty(shape, dtype=torch.float32) if norm and on else none
        return torch.empty_like(rstd) if norm == "layer" and on else torch.empty_like(none), rstd

    out = q.new_empty(q.shape)
    hat = spec.post_norm is not None and _stores_hat(training, post, residual)
    return (
        out,
        *statistics(q, spec.pre_norm, "q" in spec.pre_norm_on, spec.pre_norm_scope),
        *statistics(k, spec.pre_norm, "k" in spec.pre_norm_on, spec.pre_norm_scope),
        *statistics(q, spec.post_norm, True, "all_heads"),
        torch.empty_like(out) if hat else absent(q),
    )


def _stores_hat(training, post, residual):
    return stores_hat(training, any(p is not None for p in post), None if residual is None else "after", False)


@define("norm_attention_backward")
def _backward_op(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    pre_q_weight: Tensor | None,
    pre_q_bias: Tensor | None,
    pre_k_weight: Tensor | None,
    pre_k_bias: Tensor | None,
    post_weight: Tensor | None,
    post_bias: Tensor | None,
    q_mean: Tensor,
    q_rstd: Tensor,
    k_mean: Tensor,
    k_rstd: Tensor,
    o_mean: Tensor,
    o_rstd: Tensor,
    o_hat: Tensor,
    residual: bool,
    max_q_len: int,
    max_k_len: int,
    activation: str,
    softmax: bool,
    scale: float,
    causal: bool,
    window: int | None,
    pre_norm: str | None,
    pre_norm_on: str,
    pre_norm_scope: str,
    post_norm: str | None,
    inner_residual: bool,
    eps: float | None,
    packed: bool,
    needs: list[bool],
    own_residual: bool,
    backend: str,
    technique: str,
    on_unsupported: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    parameters = (pre_q_weight, pre_q_bias, pre_k_weight, pre_k_bias, post_weight, post_bias)
    likes = (q, k, v, *parameters)
    if q.numel() == 0:
        return zero_gradients(likes, needs, q)
    spec: tuple = (max_q_len, max_k_len, activation, softmax, scale, causal, window)
    spec += (pre_norm, pre_norm_on, pre_norm_scope, post_norm, inner_residual)
    problem = _problem(q, k, parameters, residual, _spec_of(*spec), eps, True)
    chosen = select(problem, backend, technique or None, on_unsupported, BACKWARD)
    statistics = tuple(present(s) for s in (q_mean, q_rstd, k_mean, k_rstd, o_mean, o_rstd, o_hat))
    saved = (q, k, v, q_offsets, k_offsets, *parameters, *statistics)
    every = (*needs[:3], False, False, *needs[3:], False)
    dout = dout.contiguous()
    add = dout if own_residual else None
    if own_residual and not getattr(chosen, "adds_gradient", False):
        add = _valid_rows(dout, q_offsets, packed)
    dq, dk, dv, _, _, *rest, _ = backward_with(chosen, problem, saved, dout, add, every)
    return gradients((dq, dk, dv, *rest), likes, q)


@_backward_op.register_fake
def _backward_fake(dout, q, k, v, q_offsets, k_offsets, *rest):
    return fake_gradients((q, k, v, *rest[:6]), rest[28], q)


def _setup(ctx, inputs, output):
    q, k, v, q_offsets, k_offsets, *rest = inputs
    parameters, residual, ctx.spec = rest[:6], rest[6], rest[7:19]
    ctx.eps, ctx.packed, training, ctx.own_residual, *ctx.policy = rest[19:]
    ctx.training = training
    residual = q if ctx.own_residual else residual
    ctx.residual = residual is not None
    out, *statistics, hat = output
    ctx.mark_non_differentiable(*statistics, hat)
    ctx.set_materialize_grads(False)  # no zeros for the outputs that have no gradient
    post_norm = ctx.spec[10]
    if post_norm is not None and not _stores_hat(training, parameters[4:], residual):
        hat = out
    ctx.save_for_backward(q, k, v, q_offsets, k_offsets, *parameters, *statistics, hat)


def _backward(ctx, dout, *_):
    check_training("norm_attention", ctx.training)
    needs = (*ctx.needs_input_grad[:3], *ctx.needs_input_grad[5:11])
    options = (ctx.residual, *ctx.spec, ctx.eps, ctx.packed, list(needs), ctx.own_residual, *ctx.policy)
    saved = ctx.saved_tensors  # once: checkpointing refuses a second time
    dq, dk, dv, *rest = needed(_backward_op(dout, *saved, *options), needs)
    dresidual = None
    if ctx.needs_input_grad[11]:
        dresidual = _valid_rows(dout, saved[3], ctx.packed)
    return (dq, dk, dv, None, None, *rest, dresidual)


def _valid_rows(dout: Tensor, q_offsets: Tensor, packed: bool) -> Tensor:
    """The gradient of what is added last: 0 past the last offset."""
    if packed:
        return dout
    valid = torch.arange(dout.shape[0], device=dout.device) < q_offsets[-1]
    return torch.where(valid[:, None, None], dout, 0)


_forward_op.register_autograd(_backward, setup_context=_setup)
