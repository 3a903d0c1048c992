"""Plain PyTorch truth for every op, written for reading. Runs in the dtype of its inputs; tests run it in fp64.

Nothing here is fast. Signatures are those of `recsys_norm.ops` without the arguments that pick an implementation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from recsys_norm.ops.activations import apply, get, resolve


def normalize(x: Tensor, norm: str | None, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Over the last dimension. layer: `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, with the biased variance.
    rms: `x / sqrt(mean(x^2) + eps) * weight`."""
    if norm is None:
        return x
    if norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


def layer_norm(x, weight=None, bias=None, eps=1e-5, *, residual=None, return_sum=False):
    z = x if residual is None else x + residual
    y = normalize(z, "layer", weight, bias, eps)
    return (y, z) if return_sum else y


def rms_norm(x, weight=None, eps=1e-5, *, residual=None, return_sum=False):
    z = x if residual is None else x + residual
    y = normalize(z, "rms", weight, None, eps)
    return (y, z) if return_sum else y


def norm_linear(x, weight, bias=None, *, norm, norm_weight=None, norm_bias=None, eps=1e-5):
    return linear(normalize(x, norm, norm_weight, norm_bias, eps), weight, bias)


def linear_norm(
    x,
    weight,
    bias=None,
    *,
    norm,
    norm_weight=None,
    norm_bias=None,
    eps=1e-5,
    residual=None,
    residual_position="after",
    return_sum=False,
    groups=1,
):
    z = linear(x, weight, bias)
    if residual is not None and residual_position == "before":
        z = z + residual
    affine = (None if p is None else p.unflatten(0, (groups, -1)) for p in (norm_weight, norm_bias))
    y = normalize(z.unflatten(-1, (groups, -1)), norm, *affine, eps).flatten(-2)
    if residual is not None and residual_position == "after":
        y = y + residual
    return (y, z) if return_sum else y


def linear_norm_linear(
    x, weight1, bias1, weight2, bias2, *, norm, norm_weight=None, norm_bias=None, eps=1e-5, activation=None
):
    h = normalize(linear(x, weight1, bias1), norm, norm_weight, norm_bias, eps)
    return linear(get(activation or "identity").forward(h), weight2, bias2)


def attention_one(q, k, v, *, activations, softmax, scale, causal, window):
    """Attention of one sequence: q [S, H, d], k and v [L, H, d] -> [S, H, d].

    GDPA: `act(scale * q k^T) v`, element-wise, no softmax. Query i and key j count from the sequence's start; `causal`
    keeps j <= i, `window` keeps |i - j| < window.
    """
    S, L = q.shape[0], k.shape[0]
    score = scale * torch.einsum("shd,lhd->hsl", q, k)
    distance = torch.arange(S, device=q.device)[:, None] - torch.arange(L, device=q.device)[None, :]
    keep = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        keep &= distance >= 0
    if window is not None:
        keep &= distance.abs() < window
    if softmax:
        weight = torch.softmax(score.masked_fill(~keep, float("-inf")), -1)
        weight = torch.where(keep.any(-1, keepdim=True), weight, 0.0)  # a query without keys: 0, not NaN
    else:
        weight = apply(score, activations, head_dim=0) * keep
    return torch.einsum("hsl,lhd->shd", weight, v)


def norm_attention(
    q_THd,
    k_UHd,
    v_UHd,
    q_offsets_B1,
    k_offsets_B1,
    *,
    max_q_len,
    max_k_len,
    activation="gelu",
    softmax=False,
    scale=None,
    causal=False,
    window=None,
    pre_norm=None,
    pre_norm_on="q",
    pre_norm_scope="all_heads",
    pre_norm_weight=None,
    pre_norm_bias=None,
    post_norm=None,
    post_norm_weight=None,
    post_norm_bias=None,
    eps=1e-5,
    inner_residual=False,
    residual=None,
):
    H, d = q_THd.shape[1:]
    if scale is None:
        scale = d**-0.5 if softmax else 1.0

    def pair(p):
        return p if isinstance(p, tuple) else (p, p)

    def pre(x, side):
        if pre_norm is None or side not in pre_norm_on:
            return x
        weight, bias = (pair(p)["qk".index(side)] for p in (pre_norm_weight, pre_norm_bias))
        if pre_norm_scope == "head":
            return normalize(x, pre_norm, weight, bias, eps)
        return normalize(x.flatten(1), pre_norm, weight, bias, eps).view_as(x)

    q, k = pre(q_THd, "q"), pre(k_UHd, "k")
    rows = []
    q_offsets, k_offsets = q_offsets_B1.tolist(), k_offsets_B1.tolist()
    options = dict(activations=resolve(activation, H), softmax=softmax, scale=scale, causal=causal, window=window)
    for b in range(len(q_offsets) - 1):
        qs, ks = slice(q_offsets[b], q_offsets[b + 1]), slice(k_offsets[b], k_offsets[b + 1])
        o = attention_one(q[qs], k[ks], v_UHd[ks], **options)
        if inner_residual:
            o = o + q[qs]
        o = normalize(o.flatten(1), post_norm, post_norm_weight, post_norm_bias, eps).view_as(o)
        rows.append(o if residual is None else o + residual[qs])
    rows.append(q_THd.new_zeros(q_THd.shape[0] - q_offsets[-1], H, d))  # slack rows past the last offset
    return torch.cat(rows)
