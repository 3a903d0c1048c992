"""Rows of a residual beside a [64, n] tile in registers, as an accumulator holds it, 4 bytes at a time, by hand: addresses
that the compiler makes of a thread's number live in registers through the whole kernel.

A thread has pairs of columns 8 j + 2 (lane % 4) of rows lane / 4 and lane / 4 + 8 of its warp's 16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .postnorm_rows import widen


@gluon.constexpr_function
def _places(at, pitch, rows):
    """Text that sets `here` and `below` to a thread's first pair in its two rows, p and q to whether these are there."""
    return [
        ".reg .pred p, q; .reg .b32 t, v, u; .reg .b64 here, below, step;",
        "mov.u32 t, %tid.x; and.b32 v, t, 96; shr.u32 v, v, 1; and.b32 t, t, 31;",
        "shr.u32 u, t, 2; add.u32 v, v, u;",
        f"setp.lt.s32 p, v, {rows}; and.b32 t, t, 3; shl.b32 t, t, 2; cvt.u64.u32 here, v;",
        f"mad.lo.s64 here, here, {pitch}, {at}; cvt.u64.u32 step, t; add.s64 here, here, step;",
        f"add.u32 v, v, 8; setp.lt.s32 q, v, {rows}; shl.b64 step, {pitch}, 3; add.s64 below, here, step;",
    ]


@gluon.constexpr_function
def _add(narrow, outputs, inputs):
    (out,), ((at,), (pitch,), (rows,), (width,), values) = outputs, inputs
    n = len(values) // 4
    lines = ["{", *_places(at, pitch, rows)]
    lines.append(f".reg .pred r, a, b; .reg .b16 h, l; .reg .b32 low<{n}>, high<{n}>; .reg .f32 even, odd;")
    for j in range(n):
        lines.append(f"mov.b32 low{j}, 0; mov.b32 high{j}, 0; setp.gt.s32 r, {width}, {8 * j};")
        lines.append("and.pred a, p, r; and.pred b, q, r;")
        lines.append(f"@a ld.global.b32 low{j}, [here + {16 * j}]; @b ld.global.b32 high{j}, [below + {16 * j}];")
    for j in range(n):
        for k, word in enumerate((f"low{j}", f"high{j}")):
            i = 4 * j + 2 * k
            lines.append(widen(narrow, word))
            lines.append(f"add.f32 {out[i]}, {values[i]}, even; add.f32 {out[i + 1]}, {values[i + 1]}, odd;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _add_bf16(outputs, inputs):
    return _add("bf16", outputs, inputs)


@gluon.constexpr_function
def _add_fp16(outputs, inputs):
    return _add("fp16", outputs, inputs)


@gluon.jit
def add_rows(tile, ptr, pitch, rows, width):
    """tile + the 16-bit rows at ptr, `pitch` elements apart, of which `rows` are there, and `width` columns, a multiple of
    8."""
    asm: gl.constexpr = _add_bf16 if ptr.dtype.element_ty == gl.bfloat16 else _add_fp16
    args = [ptr, 2 * pitch, rows, width, tile]
    return gl.inline_asm(asm, ("=f", "l", "l", "r", "r", "f"), args, tile.type, is_pure=False)
