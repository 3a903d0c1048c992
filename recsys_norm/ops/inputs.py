"""Checks and conversions shared by the public ops: one clear error for bad input, autocast, eps, strides."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from recsys_norm.ops.registry import BACKENDS, ON_UNSUPPORTED

NORMS = ("rms", "layer")
ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def in_a_row(q_offsets: Tensor, k_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets as kernels read them, one after the other. One tensor given for both sides stays one."""
    first = q_offsets.contiguous()
    return first, first if k_offsets is q_offsets else k_offsets.contiguous()


def check_choice(op: str, name: str, value: Any, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{op}: {name}={value!r} is not one of {', '.join(map(repr, allowed))}")


def check_policy(op: str, backend: str, technique: str | None, on_unsupported: str) -> None:
    check_choice(op, "backend", backend, BACKENDS)
    check_choice(op, "on_unsupported", on_unsupported, ON_UNSUPPORTED)
    if technique is not None and backend in ("unfused", "compiled"):
        raise ValueError(
            f"{op}: technique={technique!r} needs backend='fused'; backend={backend!r} is plain PyTorch and has none"
        )


def check_norm(op: str, norm: str | None, norm_bias: Tensor | None, eps: float | None) -> None:
    check_choice(op, "norm", norm, NORMS)
    if norm == "rms" and norm_bias is not None:
        raise ValueError(f"{op}: norm='rms' has no norm_bias; pass norm='layer', or norm_bias=None")
    if norm == "layer" and eps is None:
        raise ValueError(f"{op}: eps=None is defined for norm='rms' only; pass a number for norm='layer'")


def check_shape(op: str, name: str, tensor: Tensor | None, shape: tuple[int, ...], meaning: str) -> None:
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {shape} ({meaning})")


def check_features(op: str, x: Tensor, weight: Tensor, name: str = "weight") -> None:
    if x.dim() == 0:
        raise ValueError(f"{op}: x needs at least one dimension, got a scalar")
    if weight.dim() != 2:
        raise ValueError(f"{op}: {name} needs shape [N, K] as in nn.Linear, got {tuple(weight.shape)}")
    if weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{op}: x has {x.shape[-1]} features and {name} [N, K]={tuple(weight.shape)} takes {weight.shape[1]}"
        )


def check_dtypes(
    op: str, x: Tensor, activations: dict[str, Tensor | None], parameters: dict[str, Tensor | None]
) -> None:
    """Activations share one of bf16, fp16, fp32; a parameter has the same dtype or is fp32; all on one device."""
    dtype, device = x.dtype, x.device
    if dtype not in ACTIVATION_DTYPES:
        raise TypeError(
            f"{op}: activations of {dtype} are not supported (bfloat16, float16, float32 are); "
            "recsys_norm.reference computes in any floating dtype"
        )
    for tensors, allowed in ((activations, (dtype,)), (parameters, (dtype, torch.float32))):
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if tensor.dtype not in allowed:
                wanted = " or ".join(str(d) for d in dict.fromkeys(allowed))
                raise TypeError(
                    f"{op}: {name} is {tensor.dtype} where x is {dtype}; it must be {wanted}: cast it with .to()"
                )
            if tensor.device != device:
                raise ValueError(f"{op}: {name} is on {tensor.device} and x on {device}; move one with .to()")


def autocast(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Activations in the autocast dtype where autocast is on for their device (parameters stay as they are)."""
    device, tensors = x.device.type, (x, *others)
    if device == "meta" or not torch.is_autocast_enabled(device):  # which has none to ask for
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """The ops choose every dtype themselves, so autocast must not reach inside."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def is_training(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def flat(x: Tensor) -> Tensor:
    """[.., K] as [M, K]. What is that already stays itself: a view would be one more node for autograd."""
    return x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 1 else x[None]  # reshape(-1, 0) is an error


def shaped_as(x: Tensor, y: Tensor) -> Tensor:
    """y [M, N], made of `flat(x)`, with the leading dimensions of x."""
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def rows(x: Tensor) -> Tensor:
    """A 2-D view, or a copy where no view has unit stride in the last dimension and disjoint rows."""
    if x.stride(1) == 1 or x.shape[1] == 1:
        if x.stride(0) >= x.shape[1] or x.shape[0] <= 1:
            return x
    return x.contiguous()


@functools.cache
def _default_rms_eps(dtype: torch.dtype) -> float:
    """The eps that F.rms_norm of the installed torch takes for eps=None: its dtype's epsilon in some versions, fp32's in
    others. Read off one value small enough for eps to decide the result."""
    v = 1e-3
    y = rms_norm(torch.full((1, 1), v, dtype=dtype), (1,)).item()
    seen = v * v * (1 / (y * y) - 1)
    return min((torch.finfo(dtype).eps, torch.finfo(torch.float32).eps), key=lambda eps: abs(seen - eps))


def resolve_eps(eps: float | None, dtype: torch.dtype) -> float:
    return _default_rms_eps(dtype) if eps is None else float(eps)
