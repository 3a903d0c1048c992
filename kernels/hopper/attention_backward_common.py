"""What the parts of the norm_attention backward (attention_backward_kernels.py) share: sizes, facts, the cluster."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK = gl.constexpr(64)  # queries of a block, keys of a consumer, columns of a panel
HALF = gl.constexpr(32)
WIDTH = gl.constexpr(128)  # of a head
STRIP = gl.constexpr(8)  # rows that the side has in registers at once
Q_SLOTS = gl.constexpr(3)
MAX_HEADS = gl.constexpr(8)
KINDS = gl.constexpr(3)  # of column sums: post weight, pre weight, pre bias
GELU, GELU_TANH = gl.constexpr(4), gl.constexpr(5)  # codes of recsys_norm.ops.activations
RMS, LAYER = gl.constexpr(1), gl.constexpr(2)  # kinds of a norm; 0: none
# Bits of `form`: two each for the kinds of the pre-norm and the post-norm, then whether there are the pre-norm's weight
# and bias, the post-norm's weight, the inner residual, and something to be added to dq.
PRE_BIT, POST_BIT = gl.constexpr(0), gl.constexpr(2)
HAS_WEIGHT, HAS_BIAS, HAS_POST = gl.constexpr(16), gl.constexpr(32), gl.constexpr(64)
INNER, ADD = gl.constexpr(128), gl.constexpr(256)
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

# What is needed now and then waits in shared memory and not in registers, at these places (8 bytes each).
Q, MEAN, RSTD, O_RSTD = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
WEIGHT, BIAS, POST, SUMS = gl.constexpr(4), gl.constexpr(5), gl.constexpr(6), gl.constexpr(7)
DK, DV, Q_TOKEN, DK_TOKEN, KEYS = gl.constexpr(8), gl.constexpr(9), gl.constexpr(10), gl.constexpr(11), gl.constexpr(12)
PRE_SLOPE, PRE_SHIFT = gl.constexpr(13), gl.constexpr(14)  # 1 / D, or 0 where the norm does not have the term
POST_SLOPE, POST_SHIFT = gl.constexpr(15), gl.constexpr(16)
FACTS = gl.constexpr(32)


@gluon.constexpr_function
def shift_asm(outputs, inputs):
    (out,), (place,) = outputs[0], inputs[0]
    return f"""{{ .reg .u32 r, own; mov.u32 r, %cluster_ctarank;
 mapa.shared::cluster.u32 own, {place}, r; sub.u32 {out}, own, {place}; }}"""


@gluon.jit
def own_shift(place):
    """Inline assembly gets an address in shared memory as that of the cluster's first CTA: what leads to the own one."""
    return gl.inline_asm(shift_asm, "=r,r", [place], gl.int32, is_pure=False)


@gluon.constexpr_function
def keep_asm(outputs, inputs):
    (base,), (shift,), *values = inputs
    lines = [f"{{ .reg .u32 a; add.u32 a, {base}, {shift};"]
    return "\n".join([*lines, *(f"st.shared.b64 [a + {8 * i}], {value};" for i, (value,) in enumerate(values)), "}"])


@gluon.constexpr_function
def fact_asm(i):
    return f"""{{ .reg .u32 a, r; mov.u32 r, %cluster_ctarank; mapa.shared::cluster.u32 a, $1, r;
 ld.shared.b64 $0, [a + {8 * i}]; }}"""


@gluon.jit
def fact(facts, i: gl.constexpr):
    asm: gl.constexpr = fact_asm(i)
    return gl.inline_asm(asm, "=l,r", [facts], gl.int64, is_pure=False)


@gluon.jit
def number(facts, i: gl.constexpr):
    return fact(facts, i).to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def share(kind, least: gl.constexpr, heads):
    """1 / D as bits if a norm is of this kind or a later one, else 0."""
    value = gl.where(kind >= least, 1.0 / (heads * WIDTH).to(gl.float32), 0.0)
    return value.to(gl.int32, bitcast=True).to(gl.int64)


@gluon.jit
def pointer(facts, i: gl.constexpr, dtype: gl.constexpr):
    return fact(facts, i).to(gl.pointer_type(dtype))


@gluon.jit
def meet_cluster():
    """All threads of all CTAs: nobody sends before the messages are cleared. Every partition begins with it."""
    asm: gl.constexpr = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;"
    gl.inline_asm(asm, "=r", [], gl.int32, is_pure=False)
