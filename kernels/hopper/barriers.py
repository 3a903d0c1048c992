"""Arrivals on barriers by hand: those of the language synchronise the warpgroup around every one."""

from triton.experimental import gluon


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
