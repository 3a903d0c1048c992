"""Technique `separate` in plain PyTorch: the norm, then the GEMM, with the backward written out as in the papers.

It serves `fused` where no kernel can (CPU, most of all) and keeps the ops' saved tensors meaningful there. Statistics are
fp32, two-pass. Every function works on rows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from recsys_norm.ops.activations import get
from recsys_norm.ops.composite import linear
from recsys_norm.ops.jagged_attention import jagged_attention
from recsys_norm.ops.problem import Problem, stores_hat


def statistics(x: Tensor, norm: str, eps: float) -> tuple[Tensor | None, Tensor]:
    """Mean relative to the row's first element (None for rms) and reciprocal deviation per row, fp32.

    An absolute fp32 mean would be off by 5e-4 deviations at mean / deviation = 1e4; the shifted one is not.
    """
    x = x.float()
    if norm == "rms":
        return None, torch.rsqrt(x.square().mean(-1) + eps)
    _, mean, rstd = torch.native_layer_norm(x - x[..., :1], x.shape[-1:], None, None, eps)
    return mean.squeeze(-1), rstd.squeeze(-1)


def standardize(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    """xhat = rstd * (x - x_0 - mean), fp32, with the mean relative to the row's first element x_0."""
    x = x.float()
    if mean is not None:
        x = (x - x[..., :1]) - mean[..., None]
    return x * rstd[..., None]


def affine(xhat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        xhat = xhat * weight.float()
    return xhat if bias is None else xhat + bias.float()


def norm_backward(dy: Tensor, xhat: Tensor, rstd: Tensor, weight: Tensor | None, norm: str) -> Tensor:
    """dx = rstd * (t - mean(t) - xhat * mean(t * xhat)) with t = dy * weight; no mean(t) for rms."""
    t = dy.float() if weight is None else dy.float() * weight.float()
    inner = t - xhat * (t * xhat).mean(-1, keepdim=True)
    if norm == "layer":
        inner = inner - t.mean(-1, keepdim=True)
    return rstd[..., None] * inner


def in_groups(t: Tensor | None, groups: int) -> Tensor | None:
    """[.., N] -> [.., groups, N / groups]"""
    return None if t is None else t.unflatten(-1, (groups, -1))


def weight_gradient(dy: Tensor, x: Tensor, like: Tensor) -> Tensor:
    """dy^T x, accumulated and returned in the weight's dtype."""
    if like.dtype != x.dtype:
        dy, x = dy.float(), x.float()
    return (dy.mT @ x).to(like.dtype)


def column_sum(x: Tensor, like: Tensor) -> Tensor:
    return x.float().sum(0).to(like.dtype)


class _Plain:
    name = "separate"
    provider = "torch"

    def why_not(self, problem: Problem) -> str | None:
        return None


class Norm(_Plain):
    def forward(self, problem, x, norm_weight, norm_bias, residual):
        z = x if residual is None else x + residual
        mean, rstd = statistics(z, problem.norm, problem.eps)
        y = affine(standardize(z, mean, rstd), norm_weight, norm_bias).to(x.dtype)
        return (y, None if residual is None else z), (mean, rstd)

    def backward(self, problem, saved, grads, needs):
        z, norm_weight, mean, rstd = saved
        dy, dz = grads
        zhat = standardize(z, mean, rstd)
        dx = dweight = dbias = None
        if needs[0] or needs[3]:
            dx = norm_backward(dy, zhat, rstd, norm_weight, problem.norm)
            dx = (dx if dz is None else dx + dz.float()).to(z.dtype)
        if needs[1]:
            dweight = column_sum(dy.float() * zhat, norm_weight)
        if needs[2]:
            dbias = dy.float().sum(0).to(problem.param_dtype)
        return dx if needs[0] else None, dweight, dbias, dx if needs[3] else None


class NormLinear(_Plain):
    def forward(self, problem, x, weight, bias, norm_weight, norm_bias):
        mean, rstd = statistics(x, problem.norm, problem.eps)
        xn = affine(standardize(x, mean, rstd), norm_weight, norm_bias).to(x.dtype)
        return (linear(xn, weight, bias),), (mean, rstd)

    def backward(self, problem, saved, grads, needs):
        x, weight, bias, norm_weight, norm_bias, mean, rstd, _ = saved
        (dy,) = grads
        xhat = standardize(x, mean, rstd)
        dx = dweight = dbias = dnorm_weight = dnorm_bias = None
        if needs[1]:
            dweight = weight_gradient(dy, affine(xhat, norm_weight, norm_bias).to(x.dtype), weight)
        if needs[2]:
            dbias = column_sum(dy, bias)
        if needs[0] or needs[3] or needs[4]:
            g = dy @ weight.to(dy.dtype)
            if needs[0]:
                dx = norm_backward(g, xhat, rstd, norm_weight, problem.norm).to(x.dtype)
            if needs[3]:
                dnorm_weight = column_sum(g.float() * xhat, norm_weight)
            if needs[4]:
                dnorm_bias = column_sum(g, norm_bias)
        return dx, dweight, dbias, dnorm_weight, dnorm_bias


class LinearNorm(_Plain):
    """Rows are [M, groups, N / groups] here, statistics [M * groups] outside."""

    takes_groups = True

    def forward(self, problem, x, weight, bias, norm_weight, norm_bias, residual):
        z = linear(x, weight, bias)
        if problem.residual == "before":
            z = z + residual
        grouped = functools.partial(in_groups, groups=problem.groups)
        mean, rstd = statistics(grouped(z), problem.norm, problem.eps)
        zhat = standardize(grouped(z), mean, rstd).flatten(1)
        y = affine(zhat, norm_weight, norm_bias)
        if problem.residual == "after":
            y = y + residual.float()
        keep = problem.stores_hat
        hat = zhat.to(x.dtype) if keep else None
        mean = None if mean is None else mean.flatten()
        return (y.to(x.dtype), z if problem.return_sum else None), (mean, rstd.flatten(), hat)

    def backward(self, problem, saved, grads, needs):
        x, weight, norm_weight, mean, rstd, hat, z = saved
        dy, dsum = grads
        grouped = functools.partial(in_groups, groups=problem.groups)
        rstd = rstd.view(len(x), problem.groups)
        mean = None if mean is None else mean.view(rstd.shape)
        zhat = standardize(grouped(z), mean, rstd) if hat is None else grouped(hat).float()
        dx = dweight = dbias = dnorm_weight = dnorm_bias = dresidual = None
        if needs[3]:
            dnorm_weight = column_sum(dy.float() * zhat.flatten(1), norm_weight)
        if needs[4]:
            dnorm_bias = dy.float().sum(0).to(problem.param_dtype)
        before = problem.residual == "before"
        if needs[5] and not before:
            dresidual = dy
        if needs[0] or needs[1] or needs[2] or (needs[5] and before):
            dz = norm_backward(grouped(dy), zhat, rstd, grouped(norm_weight), problem.norm).flatten(1)
            dz32 = dz if dsum is None else dz + dsum.float()
            dz = dz32.to(x.dtype)
            if needs[0]:
                dx = dz @ weight.to(dz.dtype)
            if needs[1]:
                dweight = weight_gradient(dz, x, weight)
            if needs[2]:
                dbias = dz32.sum(0).to(problem.param_dtype)
            if needs[5] and before:
                dresidual = dz
        return dx, dweight, dbias, dnorm_weight, dnorm_bias, dresidual


class LinearNormLinear(_Plain):
    def forward(self, problem, x, weight1, bias1, weight2, bias2, norm_weight, norm_bias):
        z = linear(x, weight1, bias1)
        mean, rstd = statistics(z, problem.norm, problem.eps)
        h = self._hidden(problem, standardize(z, mean, rstd), norm_weight, norm_bias).to(x.dtype)
        return (linear(h, weight2, bias2),), (z, mean, rstd)

    def _hidden(self, problem, zhat, norm_weight, norm_bias):
        return get(problem.activation or "identity").forward(affine(zhat, norm_weight, norm_bias))

    def backward(self, problem, saved, grads, needs):
        x, weight1, weight2, norm_weight, norm_bias, z, mean, rstd = saved
        (dy,) = grads
        zhat = standardize(z, mean, rstd)
        dx = dw1 = db1 = dw2 = db2 = dnorm_weight = dnorm_bias = None
        a = affine(zhat, norm_weight, norm_bias)
        act = get(problem.activation or "identity")
        if needs[3]:
            dw2 = weight_gradient(dy, act.forward(a).to(x.dtype), weight2)
        if needs[4]:
            db2 = dy.float().sum(0).to(problem.param_dtype)
        if any(needs[i] for i in (0, 1, 2, 5, 6)):
            dh = dy @ weight2.to(dy.dtype)
            da = dh.float() * act.derivative(a)
            if needs[5]:
                dnorm_weight = column_sum(da * zhat, norm_weight)
            if needs[6]:
                dnorm_bias = column_sum(da, norm_bias)
            if any(needs[i] for i in (0, 1, 2)):
                dz32 = norm_backward(da, zhat, rstd, norm_weight, problem.norm)
                dz = dz32.to(x.dtype)
                if needs[0]:
                    dx = dz @ weight1.to(dz.dtype)
                if needs[1]:
                    dw1 = weight_gradient(dz, x, weight1)
                if needs[2]:
                    db1 = dz32.sum(0).to(problem.param_dtype)
        return dx, dw1, db1, dw2, db2, dnorm_weight, dnorm_bias


class NormAttention(_Plain):
    """Norms around `jagged_attention`; its backward runs the attention again, in plain PyTorch."""

    def forward(self, problem, q, k, v, q_offsets, k_offsets, pqw, pqb, pkw, pkb, post_weight, post_bias, residual):
        spec, eps = problem.attention, problem.eps
        q, k, v = cut(q, q_offsets), cut(k, k_offsets), cut(v, k_offsets)
        q, q_stats = _pre(q, spec, "q", eps, pqw, pqb)
        k, k_stats = _pre(k, spec, "k", eps, pkw, pkb)
        o = _attend(q, k, v, q_offsets, k_offsets, spec)
        if spec.inner_residual:
            o = o + q
        o_stats, hat = (None, None), None
        if spec.post_norm is not None:
            o_stats = statistics(o.flatten(1), spec.post_norm, eps)
            hat = standardize(o.flatten(1), *o_stats)
            o = affine(hat, post_weight, post_bias).view(q.shape)
            hat = hat.view(q.shape).to(problem.dtype)
        if residual is not None:
            o = o.float() + residual.float()
        out = cut(o.to(problem.dtype), q_offsets)
        affine_post = post_weight is not None or post_bias is not None
        keep = stores_hat(problem.training, affine_post, problem.residual, False)
        return (out.contiguous(),), (*q_stats, *k_stats, *o_stats, hat if keep else None)

    def backward(self, problem, saved, grads, needs):
        q, k, v, q_offsets, k_offsets, pqw, pqb, pkw, pkb, post_weight, post_bias, *stats = saved
        q_mean, q_rstd, k_mean, k_rstd, _, o_rstd, hat = stats
        spec = problem.attention
        q, k, v = cut(q, q_offsets), cut(k, k_offsets), cut(v, k_offsets)
        dout = cut(grads[0], q_offsets)
        out = [None] * 12
        do = dout
        if spec.post_norm is not None:
            hat, flat = hat.flatten(1).float(), dout.flatten(1)
            out[9] = (flat.float() * hat).sum(0) if needs[9] else None
            out[10] = flat.float().sum(0) if needs[10] else None
            do = norm_backward(flat, hat, o_rstd, post_weight, spec.post_norm).view(q.shape).to(problem.dtype)
        if any(needs[:3]) or any(needs[5:9]):
            qn, q_hat = _pre_again(q, spec, "q", q_mean, q_rstd, pqw, pqb)
            kn, k_hat = _pre_again(k, spec, "k", k_mean, k_rstd, pkw, pkb)
            dq, dk, dv = _attend_backward(do, qn, kn, v, q_offsets, k_offsets, spec)
            if spec.inner_residual:
                dq = dq + do
            out[0], out[5], out[6] = _pre_backward(dq, q_hat, q_rstd, spec, pqw, (needs[0], *needs[5:7]), problem.dtype)
            out[1], out[7], out[8] = _pre_backward(dk, k_hat, k_rstd, spec, pkw, (needs[1], *needs[7:9]), problem.dtype)
            out[2] = dv if needs[2] else None
        return tuple(out)


def cut(x: Tensor, offsets: Tensor) -> Tensor:
    """x with the rows past the last offset set to zero."""
    if x.device.type == "cpu" and int(offsets[-1]) == x.shape[0]:
        return x
    return torch.where((torch.arange(x.shape[0], device=x.device) < offsets[-1])[:, None, None], x, 0)


def _attend(q, k, v, q_offsets, k_offsets, spec, implementation="auto"):
    return jagged_attention(
        q,
        k,
        v,
        q_offsets,
        k_offsets,
        max_q_len=spec.max_q_len,
        max_k_len=spec.max_k_len,
        activation=spec.activation,
        softmax=spec.softmax,
        scale=spec.scale,
        causal=spec.causal,
        window=spec.window,
        implementation=implementation,
    )


def _attend_backward(do, q, k, v, q_offsets, k_offsets, spec):
    """(dq, dk, dv) of `_attend`, which is computed again."""
    if spec.softmax and q.device.type == "cpu":
        unused = q.new_empty(0)  # the output and its log-sum-exp, which the CPU computes again
        options = (spec.max_q_len, spec.max_k_len, spec.scale, spec.causal, spec.window)
        return torch.ops.recsys_norm.jagged_softmax_backward(
            do, q, k, v, q_offsets, k_offsets, unused, unused, *options
        )
    if spec.softmax:
        # torch.func, since ordinary autograd is off inside a registered op
        eager = functools.partial(_attend, q_offsets=q_offsets, k_offsets=k_offsets, spec=spec, implementation="eager")
        return torch.func.vjp(eager, q, k, v)[1](do)
    options = (spec.max_q_len, spec.max_k_len, ",".join(spec.activation), spec.scale, spec.causal, spec.window)
    return torch.ops.recsys_norm.gdpa_backward(do, q, k, v, q_offsets, k_offsets, *options)


def _pre(x, spec, side, eps, weight, bias):
    if spec.pre_norm is None or side not in spec.pre_norm_on:
        return x, (None, None)
    rows = x if spec.pre_norm_scope == "head" else x.flatten(1)
    stats = statistics(rows, spec.pre_norm, eps)
    return affine(standardize(rows, *stats), weight, bias).to(x.dtype).view(x.shape), stats


def _pre_again(x, spec, side, mean, rstd, weight, bias):
    if rstd is None:
        return x, None
    rows = x if spec.pre_norm_scope == "head" else x.flatten(1)
    hat = standardize(rows, mean, rstd)
    return affine(hat, weight, bias).to(x.dtype).view(x.shape), hat


def _pre_backward(dx, hat, rstd, spec, weight, needs, dtype):
    if hat is None:
        return (dx if needs[0] else None), None, None
    dy = dx.reshape(hat.shape).float()
    width = hat.shape[-1]
    return (
        norm_backward(dy, hat, rstd, weight, spec.pre_norm).view(dx.shape).to(dtype) if needs[0] else None,
        (dy * hat).reshape(-1, width).sum(0) if needs[1] else None,
        dy.reshape(-1, width).sum(0) if needs[2] else None,
    )


def techniques() -> list[tuple[str, Any]]:
    """(op, `Technique`) pairs; their methods name the tensors that the protocol takes as one list."""
    return [
        ("norm", Norm()),
        ("norm_linear", NormLinear()),
        ("linear_norm", LinearNorm()),
        ("linear_norm_linear", LinearNormLinear()),
        ("norm_attention", NormAttention()),
    ]
