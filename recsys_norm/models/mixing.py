"""Linear maps over tokens. B rows, n and m tokens, D width."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from recsys_norm.ops.operators import define


def mix(weight_mn: Tensor, x_BnD: Tensor) -> Tensor:
    """Linear over tokens: [m, n] x [B, n, D] -> [B, m, D]."""
    return torch.bmm(weight_mn.to(x_BnD.dtype).expand(x_BnD.shape[0], -1, -1), x_BnD)


def mix_behind(first_BkD: Tensor, weight_mn: Tensor, x_BnD: Tensor) -> Tensor:
    """`cat([first, mix(weight, x)], 1)`: [B, k, D], [m, n], [B, n, D] -> [B, k + m, D], with the product written where it
    belongs, so that only `first` is copied."""
    result: Tensor = _mix_behind_op(first_BkD, weight_mn.to(x_BnD.dtype), x_BnD)
    return result


@define("mix_behind")
def _mix_behind_op(first: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    result = _mix_behind_fake(first, weight, x)
    _fill(result, first)
    torch.bmm(weight.expand(x.shape[0], -1, -1), x, out=result[:, first.shape[1] :])
    return result


def _fill(result: Tensor, first: Tensor) -> None:
    """result[:, :k] = first, in words of 8 bytes where that can be: a strided copy takes its time by the element."""
    words = first.is_contiguous() and first.dtype == result.dtype
    if words and first.shape[-1] * first.itemsize % 8 == 0 and first.data_ptr() % 8 == 0:
        result, first = result.view(torch.int64), first.view(torch.int64)
    result[:, : first.shape[1]] = first


@_mix_behind_op.register_fake
def _mix_behind_fake(first: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], first.shape[1] + weight.shape[0], x.shape[2])


@register_flop_formula(torch.ops.recsys_norm.mix_behind)
def _mix_behind_flops(first, weight, x, *args, **kwargs) -> int:
    return 2 * x[0] * weight[0] * weight[1] * x[2]


def _setup(ctx, inputs, output) -> None:
    first, weight, x = inputs
    ctx.k = first.shape[1]
    ctx.save_for_backward(weight, x)


def _backward(ctx, grad):
    weight, x = ctx.saved_tensors
    need_first, need_weight, need_x = ctx.needs_input_grad[:3]
    first, mixed = grad[:, : ctx.k], grad[:, ctx.k :]
    dweight = torch.bmm(mixed, x.mT).sum(0) if need_weight else None
    dx = torch.bmm(weight.mT.expand(x.shape[0], -1, -1), mixed) if need_x else None
    return first if need_first else None, dweight, dx


_mix_behind_op.register_autograd(_backward, setup_context=_setup)
