"""Activations inside Triton kernels, by the codes of recsys_norm.ops.activations.

FAST selects forms built on the hardware's tanh.approx, for bf16 data only: its largest relative error is 2^-11, and
gelu's Phi(x) = (1 + tanh(x P(x^2))) / 2 with a quadratic P adds at most 1.9e-5, where half a bf16 ulp is 2^-9.
The interpreter has no inline assembly, so FAST is off there.
"""

from __future__ import annotations

import triton
import triton.language as tl

IDENTITY = tl.constexpr(0)
RELU = tl.constexpr(1)
RELU2 = tl.constexpr(2)
LEAKY_RELU = tl.constexpr(3)
GELU = tl.constexpr(4)
GELU_TANH = tl.constexpr(5)
SILU = tl.constexpr(6)
HARDSWISH = tl.constexpr(7)

_LEAKY_SLOPE = tl.constexpr(0.01)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
_NEG_HALF_LOG2E = tl.constexpr(-0.7213475204444817)
_TANH_LINEAR = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
_TANH_CUBIC = tl.constexpr(0.035677408136300125)  # sqrt(2 / pi) * 0.044715
_TWICE_SLOPE_LINEAR = tl.constexpr(1.5957691216057308)  # 2 u' = 2 sqrt(2 / pi) (1 + 3 * 0.044715 x^2)
_TWICE_SLOPE_CUBIC = tl.constexpr(0.21406444881780074)
# Minimax fit of atanh(erf(x / sqrt 2)) / x in x^2, weighted by the slope of tanh; beyond x^2 = 36 Phi is 0 or 1.
_PHI_0 = tl.constexpr(0.7977178336476507)
_PHI_1 = tl.constexpr(0.03679825636186153)
_PHI_2 = tl.constexpr(-0.0003158071221326992)


@triton.jit
def _relu(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)  # a NaN stays visible, as in PyTorch


@triton.jit
def _gate(u, FAST: tl.constexpr):
    """(1 + tanh(u)) / 2, which is sigmoid(2u)."""
    if FAST:
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1)
        return 0.5 * t + 0.5
    else:
        return 1.0 / (1.0 + tl.exp(-2.0 * u))


@triton.jit
def _normal_cdf(x, FAST: tl.constexpr):
    """Phi(x) = (1 + erf(x / sqrt 2)) / 2."""
    if FAST:
        y = tl.minimum(x * x, 36.0)
        return _gate(x * ((y * _PHI_2 + _PHI_1) * y + _PHI_0), FAST)
    else:
        return 0.5 + 0.5 * tl.math.erf(x * _SQRT_HALF)


@triton.jit
def activate(x, ACT: tl.constexpr, FAST: tl.constexpr):
    """act(x) of an fp32 tile."""
    if ACT == IDENTITY:
        y = x
    elif ACT == RELU:
        y = _relu(x)
    elif ACT == RELU2:
        y = _relu(x) * _relu(x)
    elif ACT == LEAKY_RELU:
        y = tl.maximum(x, x * _LEAKY_SLOPE, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == GELU:
        y = x * _normal_cdf(x, FAST)
    elif ACT == GELU_TANH:
        y = x * _gate(x * (x * x * _TANH_CUBIC + _TANH_LINEAR), FAST)
    elif ACT == SILU:
        y = x * _gate(0.5 * x, FAST)
    else:
        tl.static_assert(ACT == HARDSWISH)
        y = x * tl.minimum(tl.maximum(x * (1.0 / 6.0) + 0.5, 0.0), 1.0)
    return y


@triton.jit
def activate_with_slope(x, ACT: tl.constexpr, FAST: tl.constexpr):
    """(act(x), act'(x)) of an fp32 tile, sharing what the two have in common."""
    if ACT == IDENTITY:
        y = x
        slope = x * 0.0 + 1.0
    elif ACT == RELU:
        y = _relu(x)
        slope = tl.where(x > 0.0, 1.0, 0.0)
    elif ACT == RELU2:
        r = _relu(x)
        y = r * r
        slope = 2.0 * r
    elif ACT == LEAKY_RELU:
        y = tl.maximum(x, x * _LEAKY_SLOPE, propagate_nan=tl.PropagateNan.ALL)
        slope = tl.where(x > 0.0, 1.0, _LEAKY_SLOPE)
    elif ACT == GELU:
        g = _normal_cdf(x, FAST)
        y = x * g
        slope = g + x * (tl.exp2(x * x * _NEG_HALF_LOG2E) * _INV_SQRT_2PI)
    elif ACT == GELU_TANH:
        x2 = x * x
        g = _gate(x * (x2 * _TANH_CUBIC + _TANH_LINEAR), FAST)
        y = x * g
        # g' = 2 g (1 - g) u'
        slope = g + (g - g * g) * x * (x2 * _TWICE_SLOPE_CUBIC + _TWICE_SLOPE_LINEAR)
    elif ACT == SILU:
        g = _gate(0.5 * x, FAST)
        y = x * g
        slope = g + (g - g * g) * x
    else:
        tl.static_assert(ACT == HARDSWISH)
        inner = x * (1.0 / 6.0) + 0.5
        y = x * tl.minimum(tl.maximum(inner, 0.0), 1.0)
        slope = tl.where(x > -3.0, tl.where(x < 3.0, inner + x * (1.0 / 6.0), 1.0), 0.0)
    return y, slope
