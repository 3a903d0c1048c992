"""The unfused path: ordinary PyTorch calls that autograd and torch.compile see through.

Parameters are cast to the activation dtype at each use, as autocast does for a linear.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from recsys_norm.ops.activations import get
from recsys_norm.ops.jagged_attention import jagged_attention
from recsys_norm.ops.problem import AttentionSpec


def cast(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else parameter.to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), cast(bias, x.dtype))


def normalize(x: Tensor, norm: str | None, weight: Tensor | None, bias: Tensor | None, eps: float | None) -> Tensor:
    if norm is None:
        return x
    weight, bias = cast(weight, x.dtype), cast(bias, x.dtype)
    if norm == "rms":
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    assert eps is not None  # inputs.check_norm: None is for rms
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def norm(x, norm_weight, norm_bias, residual, *, norm, eps, return_sum):
    z = x if residual is None else x + residual
    y = normalize(z, norm, norm_weight, norm_bias, eps)
    return (y, z) if return_sum else y


def group_by_group(function: Callable, groups: int, x: Tensor, parameters: dict, residual: Tensor | None, **options):
    """`linear_norm` of each group of out-features by itself, side by side."""

    def parts(t: Tensor | None, dim: int) -> Sequence[Tensor | None]:
        return [None] * groups if t is None else t.chunk(groups, dim)

    own = [dict(zip(parameters, values)) for values in zip(*(parts(t, 0) for t in parameters.values()), strict=True)]
    each = [function(x, **p, residual=r, **options) for p, r in zip(own, parts(residual, -1), strict=True)]
    return tuple(torch.cat(r, -1) for r in zip(*each)) if options["return_sum"] else torch.cat(each, -1)


def norm_linear(x, weight, bias, norm_weight, norm_bias, *, norm, eps):
    return linear(normalize(x, norm, norm_weight, norm_bias, eps), weight, bias)


def linear_norm(
    x, weight, bias, norm_weight, norm_bias, residual, *, norm, eps, residual_position, return_sum, groups=1
):
    if groups > 1:
        parameters = dict(weight=weight, bias=bias, norm_weight=norm_weight, norm_bias=norm_bias)
        options = dict(norm=norm, eps=eps, residual_position=residual_position, return_sum=return_sum)
        return group_by_group(linear_norm, groups, x, parameters, residual, **options)
    z = linear(x, weight, bias)
    if residual is not None and residual_position == "before":
        z = z + residual
    y = normalize(z, norm, norm_weight, norm_bias, eps)
    if residual is not None and residual_position == "after":
        y = y + residual
    return (y, z) if return_sum else y


def linear_norm_linear(x, weight1, bias1, weight2, bias2, norm_weight, norm_bias, *, norm, eps, activation):
    h = normalize(linear(x, weight1, bias1), norm, norm_weight, norm_bias, eps)
    return linear(get(activation or "identity").forward(h), weight2, bias2)


def norm_over_heads(x: Tensor, norm: str | None, weight: Tensor | None, bias: Tensor | None, eps, scope: str) -> Tensor:
    """x [T, H, d], normalised over d ("head") or over H * d ("all_heads")."""
    if norm is None or scope == "head":
        return normalize(x, norm, weight, bias, eps)
    return normalize(x.flatten(1), norm, weight, bias, eps).view(x.shape)


def norm_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    pre_q: tuple[Tensor | None, Tensor | None],
    pre_k: tuple[Tensor | None, Tensor | None],
    post: tuple[Tensor | None, Tensor | None],
    residual: Tensor | None,
    *,
    spec: AttentionSpec,
    eps: float | None,
    packed: bool,
    implementation: str,
) -> Tensor:
    """Norms around the jagged attention op. `packed` promises that no row lies past the last offset; without it such
    rows are cut off from values and gradients."""
    valid = None
    if not packed:
        valid = (torch.arange(q.shape[0], device=q.device) < q_offsets[-1])[:, None, None]
        valid_k = (torch.arange(k.shape[0], device=k.device) < k_offsets[-1])[:, None, None]
        q, k, v = torch.where(valid, q, 0), torch.where(valid_k, k, 0), torch.where(valid_k, v, 0)
    if "q" in spec.pre_norm_on:
        q = norm_over_heads(q, spec.pre_norm, *pre_q, eps, spec.pre_norm_scope)
    if "k" in spec.pre_norm_on:
        k = norm_over_heads(k, spec.pre_norm, *pre_k, eps, spec.pre_norm_scope)
    o = jagged_attention(
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
    if spec.inner_residual:
        o = o + q
    o = norm_over_heads(o, spec.post_norm, *post, eps, "all_heads")
    if residual is not None:
        o = o + residual
    return o if valid is None else torch.where(valid, o, 0)


@functools.cache
def compiled(function: Callable) -> Callable:
    return torch.compile(function)


def run(backend: str, function: Callable, *args, **kwargs):
    """Call a composite as it is, or through torch.compile unless a surrounding graph is being compiled anyway."""
    if backend == "compiled" and not torch.compiler.is_compiling():
        function = compiled(function)
    return function(*args, **kwargs)
