"""Technique `separate` for `norm_attention`: the norm kernels before and after the project's attention kernels.

The inner residual and the outer one are read by the post-norm's pass, in the backward the gradient that comes past the
attention by the pre-norm's. Rows past the last offset are cut off inside the kernels: what they hold reaches nothing.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from recsys_norm.ops.problem import AttentionSpec, Problem, Tensors, stores_hat

_FLASH_WIDTH = 256  # head width that torch's flash attention holds


class Normalised(NamedTuple):
    """A pre-norm's input as rows, its parameters, and how its rows are cut; None for a side without a norm."""

    rows: Tensor
    weight: Tensor | None
    bias: Tensor | None
    cut: tuple[Tensor, int]


def forward(problem: Problem, *tensors: Tensor | None) -> tuple[Tensors, Tensors]:
    """In the order of `recsys_norm.ops.norm_attention`."""
    from recsys_norm.kernels.gdpa.launch import zero_slack
    from recsys_norm.kernels.norm.launch import norm_forward

    q, k, v, q_offsets, k_offsets, *parameters, post_weight, post_bias, residual = tensors
    spec = problem.attention
    q_side, k_side = _sides(spec, q, k, q_offsets, k_offsets, parameters)
    qn, *q_stats = _pre(problem, q, q_side)
    kn, *k_stats = _pre(problem, k, k_side)
    o = _attend(qn, kn, v, q_offsets, k_offsets, spec)
    if spec.post_norm is None:
        for extra in (qn if spec.inner_residual else None, residual):
            if extra is not None:
                o.add_(extra)
                zero_slack(o, q_offsets)
        return (o,), (*q_stats, *k_stats, None, None, None)
    keep = stores_hat(problem.training, post_weight is not None or post_bias is not None, problem.residual, False)
    out = norm_forward(
        o.flatten(1),
        post_weight,
        post_bias,
        norm=spec.post_norm,
        eps=problem.eps,
        before=_rows(qn) if spec.inner_residual else None,
        after=None if residual is None else _rows(residual),
        write_hat=keep,
        overwrite=True,
        cut=(q_offsets, 1),
    )
    hat = out.hat.view(q.shape) if keep else None
    return (out.y.view(q.shape),), (*q_stats, *k_stats, out.mean, out.rstd, hat)


def backward(problem: Problem, saved: Tensors, grads: Tensors, needs: tuple[bool, ...]) -> Tensors:
    from recsys_norm.kernels.gdpa.launch import zero_slack
    from recsys_norm.kernels.norm import attention_inside as inside
    from recsys_norm.kernels.norm.launch import norm_backward

    q, k, v, q_offsets, k_offsets, *parameters, post_weight, post_bias = saved[:11]
    q_mean, q_rstd, k_mean, k_rstd, _, o_rstd, hat = saved[11:]
    spec = problem.attention
    below = any(needs[:3]) or any(needs[5:9])
    result = [None] * 12
    do, add = (*grads, None)[:2]
    own = spec.post_norm is not None  # do is this function's
    if own and (below or needs[9] or needs[10]):
        g = norm_backward(
            do.flatten(1),
            hat.flatten(1),
            None,
            o_rstd,
            post_weight,
            norm=spec.post_norm,
            hat=True,
            write_dz=below,
            dweight=problem.param_dtype if needs[9] else None,
            dbias=problem.param_dtype if needs[10] else None,
            cut=(q_offsets, 1),
        )
        do = g.dz.view(q.shape) if below else None
        result[9:11] = g.dweight, g.dbias
        del g  # as all that follows, a tensor goes when nothing needs it any more: they are of the size of q
    if not below:
        return tuple(result)
    q_side, k_side = _sides(spec, q, k, q_offsets, k_offsets, parameters)
    kn, *_ = _pre(problem, k, k_side)
    past = do if spec.inner_residual else None
    if inside.fits(problem, q, kn, v, do, q_offsets):
        norm = inside.norm_of(*q_side[:3], q_mean, q_rstd, spec.inner_residual)
        dq, dk, dv = inside.backward(do, q, kn, v, q_offsets, k_offsets, spec, norm, overwrite=own)
        past = None
    else:
        qn, *_ = _pre(problem, q, q_side)
        dq, dk, dv = _attend_backward(do, qn, kn, v, q_offsets, k_offsets, spec)
        del qn
    del do, kn
    if q_side is None:
        for extra in (past, add):
            if extra is not None:
                dq.add_(extra)
                zero_slack(dq, q_offsets)
    q_needs, k_needs = (needs[0], *needs[5:7]), (needs[1], *needs[7:9])
    result[0], result[5], result[6] = _pre_backward(problem, dq, q_side, q_mean, q_rstd, q_needs, past, add)
    result[1], result[7], result[8] = _pre_backward(problem, dk, k_side, k_mean, k_rstd, k_needs)
    result[2] = dv if needs[2] else None
    return tuple(result)


def _rows(x: Tensor, width: int | None = None) -> Tensor:
    """[T, H, d] as rows of `width` values (all heads if None) with unit stride, a copy where no view is one."""
    rows = x.reshape(-1, width or x.shape[1] * x.shape[2])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _sides(spec: AttentionSpec, q, k, q_offsets, k_offsets, parameters) -> list[Normalised | None]:
    heads, d = q.shape[1:]
    per_head = spec.pre_norm_scope == "head"
    sides = []
    for side, x, offsets, pair in (("q", q, q_offsets, parameters[:2]), ("k", k, k_offsets, parameters[2:])):
        normed = spec.pre_norm is not None and side in spec.pre_norm_on
        cut = (offsets, heads if per_head else 1)
        sides.append(Normalised(_rows(x, d if per_head else None), *pair, cut) if normed else None)
    return sides


def _pre(problem: Problem, x: Tensor, side: Normalised | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(normalised x, means, reciprocal deviations)."""
    from recsys_norm.kernels.norm.launch import norm_forward

    if side is None:
        return x, None, None
    norm, per_head = problem.attention.pre_norm, problem.attention.pre_norm_scope == "head"
    out = norm_forward(side.rows, side.weight, side.bias, norm=norm, eps=problem.eps, cut=side.cut)
    mean, rstd = (t.view(x.shape[:2]) if per_head and t is not None else t for t in (out.mean, out.rstd))
    return out.y.view(x.shape), mean, rstd


def _pre_backward(
    problem: Problem,
    dy: Tensor,
    side: Normalised | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    needs: tuple[bool, bool, bool],
    past: Tensor | None = None,
    add: Tensor | None = None,
):
    """(dx, dweight, dbias). `past` is added to dy and `add` to dx, where there is a norm. dy is this
    module's, so dx may take its memory."""
    from recsys_norm.kernels.norm.launch import norm_backward

    if not any(needs):
        return None, None, None
    if side is None:
        return dy if needs[0] else None, None, None
    width = side.rows.shape[1]
    g = norm_backward(
        _rows(dy, width),
        side.rows,
        None if mean is None else mean.flatten(),
        rstd.flatten(),
        side.weight,
        norm=problem.attention.pre_norm,
        more_dy=None if past is None else _rows(past, width),
        dsum=None if add is None else _rows(add, width),
        write_dz=needs[0],
        dweight=problem.param_dtype if needs[1] else None,
        dbias=problem.param_dtype if needs[2] else None,
        cut=side.cut,
        overwrite=True,
    )
    return g.dz.view(dy.shape) if needs[0] else None, g.dweight, g.dbias


def _has_softmax_kernel(q: Tensor, q_offsets: Tensor, k_offsets: Tensor, spec: AttentionSpec) -> bool:
    """torch's flash attention aligns the ends of query and key sequences; the op counts from their starts."""
    if not q.is_cuda:
        return True
    if q.dtype == torch.float32 or q.shape[2] % 8 or q.shape[2] > _FLASH_WIDTH:
        return False
    return q_offsets.data_ptr() == k_offsets.data_ptr() or not (spec.causal or spec.window is not None)


def _options(spec: AttentionSpec) -> tuple:
    """The arguments of the registered attention ops that follow the tensors."""
    own = () if spec.softmax else (",".join(spec.activation),)
    return (spec.max_q_len, spec.max_k_len, *own, spec.scale, spec.causal, spec.window)


def _eager(q, k, v, q_offsets, k_offsets, spec: AttentionSpec) -> Tensor:
    from recsys_norm.ops.jagged_attention import jagged_attention

    options = dict(max_q_len=spec.max_q_len, max_k_len=spec.max_k_len, scale=spec.scale, causal=spec.causal)
    options |= dict(window=spec.window, softmax=True, implementation="eager")
    return jagged_attention(q, k, v, q_offsets, k_offsets, **options)


def _attend(q, k, v, q_offsets, k_offsets, spec: AttentionSpec) -> Tensor:
    """Attention of the normalised q and k, contiguous, zero past the last offset."""
    tensors = (q, k, v, q_offsets, k_offsets)
    if not spec.softmax:
        return torch.ops.recsys_norm.gdpa(*tensors, *_options(spec))
    if _has_softmax_kernel(q, q_offsets, k_offsets, spec):
        return torch.ops.recsys_norm.jagged_softmax(*tensors, *_options(spec))[0]
    return _eager(*tensors, spec).contiguous()


def _attend_backward(do, q, k, v, q_offsets, k_offsets, spec: AttentionSpec) -> tuple[Tensor, ...]:
    """(dq, dk, dv), contiguous. Softmax attention runs again: the op keeps neither its output nor its log-sum-exp."""
    tensors = (q, k, v, q_offsets, k_offsets)
    if not spec.softmax:
        return torch.ops.recsys_norm.gdpa_backward(do, *tensors, *_options(spec))
    if _has_softmax_kernel(q, q_offsets, k_offsets, spec):
        again = torch.ops.recsys_norm.jagged_softmax(*tensors, *_options(spec))
        return torch.ops.recsys_norm.jagged_softmax_backward(do, *tensors, *again, *_options(spec))
    eager = functools.partial(_eager, q_offsets=q_offsets, k_offsets=k_offsets, spec=spec)
    _, vjp = torch.func.vjp(eager, q, k, v)  # ordinary autograd is off inside a registered op
    return tuple(g.contiguous() for g in vjp(do))
