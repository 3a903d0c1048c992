"""Arrivals on barriers by hand: those of the language synchronise the warpgroup around every one."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def arrive_asm(outputs, inputs):
    """One lane of a warp arrives when the whole warp has come so far, if it is wanted."""
    (bar,), (wanted,) = inputs
    return f"""{{ .reg .pred p, q;
    setp.ne.b32 q, {wanted}, 0;
    bar.warp.sync 0xffffffff;
    elect.sync _|p, 0xffffffff;
    and.pred p, p, q;
    @p mbarrier.arrive.shared::cta.b64 _, [{bar}]; }}"""


@gluon.constexpr_function
def await_asm(outputs, inputs):
    (bar,), (phase,) = inputs
    return f"""{{ .reg .pred p;
    again: mbarrier.try_wait.parity.shared::cta.b64 p, [{bar}], {phase};
    @!p bra.uni again; }}"""


@gluon.jit
def await_phase(bar, phase):
    gl.inline_asm(await_asm, "r,r,~{memory}", [bar, phase], (), is_pure=False)


@gluon.jit
def arrive(bar, wanted):
    """Once per warp."""
    gl.inline_asm(arrive_asm, "r,r,~{memory}", [bar, gl.to_tensor(wanted).to(gl.int32)], (), is_pure=False)
