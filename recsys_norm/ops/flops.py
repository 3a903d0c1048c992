"""FLOP formulas of the registered ops, so that `torch.utils.flop_counter` sees through them. GEMMs and attention count,
norms do not; a gradient that is not needed costs nothing."""

from __future__ import annotations

from math import prod

from torch import ops as torch_ops
from torch.utils.flop_counter import register_flop_formula

import recsys_norm.ops.linear_norm
import recsys_norm.ops.linear_norm_linear
import recsys_norm.ops.norm_attention
import recsys_norm.ops.norm_linear  # noqa: F401

_library = torch_ops.recsys_norm


@register_flop_formula(_library.norm_linear)
def _norm_linear(x_shape, weight_shape, *args, out_shape=None, **kwargs) -> int:
    return 2 * x_shape[0] * prod(weight_shape)


@register_flop_formula(_library.linear_norm)
def _linear_norm(x_shape, weight_shape, *args, out_shape=None, **kwargs) -> int:
    return 2 * x_shape[0] * prod(weight_shape)


@register_flop_formula(_library.norm_linear_backward)
def _norm_linear_backward(
    dy, x, weight, bias, norm_weight, norm_bias, mean, rstd, y, norm, eps, needs, *args, **kwargs
):
    gemms = int(needs[0] or needs[3] or needs[4]) + int(needs[1])
    return 2 * x[0] * prod(weight) * gemms


@register_flop_formula(_library.linear_norm_backward)
def _linear_norm_backward(
    dy, dz, x, weight, bias, norm_weight, norm_bias, mean, rstd, hat, z, norm, eps, position, needs, *args, **kwargs
):
    return 2 * x[0] * prod(weight) * (int(needs[0]) + int(needs[1]))


@register_flop_formula(_library.linear_norm_linear)
def _linear_norm_linear(x, weight1, bias1, weight2, *args, **kwargs) -> int:
    return 2 * x[0] * (prod(weight1) + prod(weight2))


@register_flop_formula(_library.linear_norm_linear_backward)
def _linear_norm_linear_backward(
    dy, x, weight1, bias1, weight2, bias2, norm_weight, norm_bias, z, mean, rstd, norm, eps, act, needs, *args, **kwargs
):
    through = int(any(needs[i] for i in (0, 1, 2, 5, 6)))
    return 2 * x[0] * (prod(weight1) * (int(needs[0]) + int(needs[1])) + prod(weight2) * (through + int(needs[3])))
