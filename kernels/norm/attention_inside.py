"""The backward of norm_attention with the norm of q inside that of the attention, on Hopper: the normalised q, which is not
kept, is not made again in a pass of its own, and where an inner residual hands the gradient past the attention, the
attention's kernel adds it, so that the pre-norm's pass need not read it."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_norm.ops.problem import AttentionSpec, Problem


def fits(problem: Problem, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, q_offsets: Tensor) -> bool:
    """Whether the kernel takes q as it is before the norm, [T, H, d], with normalised k and the gradient at the output."""
    spec = problem.attention
    normed = spec.pre_norm is not None and "q" in spec.pre_norm_on and spec.pre_norm_scope == "all_heads"
    if not (normed and q.is_cuda) or spec.softmax or spec.causal or spec.window is not None:
        return False
    if len(set(spec.activation)) > 1 or q_offsets.numel() == 1 or q.numel() == 0 or k.numel() == 0:
        return False
    from recsys_norm.kernels.gdpa.launch import device_of
    from recsys_norm.kernels.hopper import gdpa_backward

    tensors = (q, k, v, grad)
    return gdpa_backward.fits(tensors, q_offsets.numel() - 1, _code(spec), spec.max_k_len, device_of(q)[0])


def _code(spec: AttentionSpec) -> int:
    from recsys_norm.ops.activations import get

    return get(spec.activation[0]).code


def norm_of(rows: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor, inner: bool):
    """What the kernel needs to normalise `rows` [T, H * d] as the forward did."""
    from recsys_norm.kernels.hopper.gdpa_backward import Norm
    from recsys_norm.kernels.norm.terms import terms

    return Norm(*terms(rows, mean, rstd, weight, bias), inner)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    spec: AttentionSpec,
    norm,
    *,
    overwrite: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the normalised q, dk, dv), contiguous; the first in the memory of `grad` if that may be overwritten."""
    from recsys_norm.kernels.gdpa.launch import on_device
    from recsys_norm.kernels.hopper import gdpa_backward

    dq = grad if overwrite and grad.is_contiguous() else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (k, v))
    with on_device(q):
        tensors = (q, k, v, grad, dq, dk, dv)
        gdpa_backward.backward(tensors, q_offsets, k_offsets, _code(spec), spec.max_k_len, spec.scale, norm)
    return dq, dk, dv
