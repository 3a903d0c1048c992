"""Activations of norm_attention's kernels on fp32 tiles, by the codes of recsys_norm.ops.activations.

FAST: built on the hardware's tanh.approx, for bf16 data only, as in ../activations.py, where the fit of gelu and
the errors are written down.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

IDENTITY, RELU, RELU2, LEAKY_RELU = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
GELU, GELU_TANH, SILU, HARDSWISH = gl.constexpr(4), gl.constexpr(5), gl.constexpr(6), gl.constexpr(7)
GENERAL = gl.constexpr(-1)  # known at run time only

LEAKY_SLOPE = gl.constexpr(0.01)
SQRT_HALF = gl.constexpr(0.7071067811865476)
TANH_LINEAR = gl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
TANH_CUBIC = gl.constexpr(0.035677408136300125)  # sqrt(2 / pi) * 0.044715
PHI_0 = gl.constexpr(0.7977178336476507)
PHI_1 = gl.constexpr(0.03679825636186153)
PHI_2 = gl.constexpr(-0.0003158071221326992)


@gluon.jit
def tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def gated(x, half, u, FAST: gl.constexpr):
    """x (1 + tanh u) / 2, half being x / 2."""
    if FAST:
        return gl.fma(half, tanh(u), half)
    else:
        return x / (1.0 + gl.exp(-2.0 * u))


@gluon.jit
def gelu_tanh(s, scale, FAST: gl.constexpr):
    square = s * s
    u = s * (square * (scale * scale * scale * TANH_CUBIC) + scale * TANH_LINEAR)
    return gated(s * scale, s * (0.5 * scale), u, FAST)


@gluon.jit
def gelu(s, scale, FAST: gl.constexpr):
    x = s * scale
    if FAST:
        y = gl.minimum(x * x, 36.0)
        return gated(x, 0.5 * x, x * ((y * PHI_2 + PHI_1) * y + PHI_0), FAST)
    else:
        return x * (0.5 + 0.5 * gl.erf(x * SQRT_HALF))


@gluon.jit
def relu(x):
    return gl.where(x < 0.0, 0.0, x)  # a NaN stays visible


@gluon.jit
def activate(s, scale, code, ACT: gl.constexpr, FAST: gl.constexpr):
    """act(scale * s). ACT is a code, or GENERAL: then `code` tells, at run time."""
    if ACT == GELU_TANH:
        y = gelu_tanh(s, scale, FAST)
    elif ACT == GELU:
        y = gelu(s, scale, FAST)
    else:
        y = s * scale
        if code == GELU_TANH:
            y = gelu_tanh(s, scale, FAST)
        elif code == GELU:
            y = gelu(s, scale, FAST)
        elif code == SILU:
            y = gated(y, 0.5 * y, 0.5 * y, FAST)
        elif code == RELU:
            y = relu(y)
        elif code == RELU2:
            y = relu(y) * relu(y)
        elif code == LEAKY_RELU:
            y = gl.where(y < 0.0, y * LEAKY_SLOPE, y)
        elif code == HARDSWISH:
            y = y * gl.minimum(gl.maximum(y * (1.0 / 6.0) + 0.5, 0.0), 1.0)
    return y
