"""Element-wise activations for Triton kernels, on fp32 tiles, by name. The names and formulas are those of
`recsys_norm.ops.activations`; the plain forms here carry no approximation beyond fp32's.

The name is a constexpr, so a kernel holds the code of one activation only.
"""

import triton
import triton.language as tl

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
_GELU_SCALE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi): tanh(u) = 2 * sigmoid(2 * u) - 1
_GELU_CUBIC = tl.constexpr(0.044715)
_LEAKY_SLOPE = tl.constexpr(0.01)


@triton.jit
def activate(x, NAME: tl.constexpr):
    """act(x), x in fp32."""
    if NAME == "identity":
        y = x
    elif NAME == "relu":
        y = tl.maximum(x, 0.0)
    elif NAME == "relu2":
        r = tl.maximum(x, 0.0)
        y = r * r
    elif NAME == "leaky_relu":
        y = tl.where(x > 0, x, x * _LEAKY_SLOPE)
    elif NAME == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif NAME == "gelu_tanh":
        y = x * tl.sigmoid((x + x * x * x * _GELU_CUBIC) * _GELU_SCALE)
    elif NAME == "silu":
        y = x * tl.sigmoid(x)
    else:
        tl.static_assert(NAME == "hardswish", "unknown activation")
        y = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    return y


@triton.jit
def activate_with_slope(x, NAME: tl.constexpr):
    """(act(x), act'(x)), x in fp32. Slopes at kinks are those of torch.autograd."""
    if NAME == "identity":
        y = x
        slope = tl.full(x.shape, 1.0, tl.float32)
    elif NAME == "relu":
        y = tl.maximum(x, 0.0)
        slope = tl.where(x > 0, 1.0, 0.0)
    elif NAME == "relu2":
        r = tl.maximum(x, 0.0)
        y = r * r
        slope = 2.0 * r
    elif NAME == "leaky_relu":
        slope = tl.where(x > 0, 1.0, _LEAKY_SLOPE)
        y = x * slope
    elif NAME == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * _SQRT_HALF))
        y = x * cdf
        slope = cdf + x * _INV_SQRT_2PI * tl.exp(-0.5 * x * x)
    elif NAME == "gelu_tanh":
        s = tl.sigmoid((x + x * x * x * _GELU_CUBIC) * _GELU_SCALE)
        y = x * s
        slope = s + y * (1.0 - s) * _GELU_SCALE * (1.0 + x * x * (3 * _GELU_CUBIC))
    elif NAME == "silu":
        s = tl.sigmoid(x)
        y = x * s
        slope = s * (1.0 + x * (1.0 - s))
    else:
        tl.static_assert(NAME == "hardswish", "unknown activation")
        y = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * (1.0 / 6.0)
        slope = tl.where(x <= -3.0, 0.0, tl.where(x < 3.0, x * (1.0 / 3.0) + 0.5, 1.0))
    return y, slope
