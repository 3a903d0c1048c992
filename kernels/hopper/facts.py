"""What a kernel needs now and then and keeps in shared memory instead of registers: 8-byte values by their places.

Inline assembly gets an address in shared memory as that of the cluster's first CTA: hence the `mapa`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def shift_asm(outputs, inputs):
    (out,), (place,) = outputs[0], inputs[0]
    return f"""{{ .reg .u32 r, own; mov.u32 r, %cluster_ctarank;
 mapa.shared::cluster.u32 own, {place}, r; sub.u32 {out}, own, {place}; }}"""


@gluon.jit
def own_shift(place):
    """What leads from the first CTA's address to the own one."""
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
def pointer(facts, i: gl.constexpr, dtype: gl.constexpr):
    return fact(facts, i).to(gl.pointer_type(dtype))
