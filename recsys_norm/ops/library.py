"""What the registered ops share: a custom op has a fixed number of tensors, so one that is absent travels as an empty
tensor."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from recsys_norm.ops.inputs import resolve_eps
from recsys_norm.ops.problem import Problem, Technique, Tensors

Gradients = tuple[Any, ...]  # tensors, as many as the op's schema says


def absent(like: Tensor) -> Tensor:
    return like.new_empty(0)


def stand_in(tensor: Tensor | None, like: Tensor) -> Tensor:
    return absent(like) if tensor is None else tensor


def present(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None or tensor.numel() == 0 else tensor


def gradients(grads: Gradients, likes: Gradients, x: Tensor) -> Gradients:
    """A technique's gradients as op outputs: in the dtype of what they are gradients of, empty where not computed."""
    pairs = zip(grads, likes, strict=True)
    return tuple(absent(x) if g is None else g if g.dtype is like.dtype else g.to(like.dtype) for g, like in pairs)


def fake_gradients(likes: Gradients, needs: list[bool], x: Tensor) -> Gradients:
    return tuple(like.new_empty(like.shape) if need else absent(x) for like, need in zip(likes, needs, strict=True))


def zero_gradients(likes: Gradients, needs: list[bool], x: Tensor) -> Gradients:
    """For calls without rows."""
    zeros = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) if n else absent(x) for t, n in zip(likes, needs))
    return tuple(zeros)


def backward_with(
    technique: Technique,
    problem: Problem,
    saved: Tensors,
    grad: Any,
    add: Tensor | None,
    needs: tuple[bool, ...],
) -> Gradients:
    """The technique's gradients, that of its first tensor with `add` in it. `grad`: a tensor, or a tuple of pieces side by
    side."""
    if isinstance(grad, tuple) and not getattr(technique, "takes_pieces", False):
        grad = torch.cat(grad, 1)
    if add is None or not needs[0]:
        return technique.backward(problem, saved, (grad,), needs)
    if getattr(technique, "adds_gradient", False):
        return technique.backward(problem, saved, (grad, add), needs)
    first, *rest = technique.backward(problem, saved, (grad,), needs)
    return (first.add_(add), *rest)


def check_training(op: str, training: bool) -> None:
    """A call that needed no gradients when it was traced leaves out what the backward reads."""
    if not training:
        raise RuntimeError(
            f"{op}: this call was traced or exported where nothing required gradients and kept nothing for a backward; "
            "trace it with gradients enabled and inputs or parameters that require them"
        )


def needed(grads: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    return tuple(g if need else None for g, need in zip(grads, needs))


@functools.cache
def arch_of(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def triton_version() -> tuple[int, int] | None:
    try:
        import triton
    except ImportError:
        return None
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def make_problem(op: str, x: Tensor, parameters: tuple[Tensor | None, ...], **fields: Any) -> Problem:
    """The Problem of rows x; `fields` are the Problem's own names. The parameter dtype is fp32 if any parameter is, and
    eps is a number."""
    single = any(p is not None and p.dtype is torch.float32 for p in parameters)
    return _problem_of(op, x.shape, x.stride(), x.dtype, x.device, torch.float32 if single else x.dtype, **fields)


@functools.lru_cache(maxsize=4096)  # made once, as a training step asks for the same ones again and again
def _problem_of(op, shape, strides, dtype, device, param_dtype, *, eps, **fields) -> Problem:
    cuda = device.type == "cuda"
    return Problem(
        op=op,
        M=shape[0],
        K=fields.pop("K", shape[1]),
        dtype=dtype,
        param_dtype=param_dtype,
        eps=resolve_eps(eps, dtype),
        strides=strides,
        device=device.type,
        arch=arch_of(device),
        triton_version=triton_version() if cuda else None,
        **fields,
    )
