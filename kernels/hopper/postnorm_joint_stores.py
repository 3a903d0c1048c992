"""Of the post-norm kernel whose consumers run one text (postnorm_joint_kernels.py): a warp's 16 rows of a CTA's 128 columns
go to memory 64 columns at a time. They change lanes in a place of the warp's own in shared memory, [16, 64], swizzled by 128
bytes, so that a store covers whole lines: TMA would want a fence before, and time to read the place after.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PLACE = gl.constexpr(2048)  # bytes


@gluon.constexpr_function
def by_matrices(narrow, values, chunk):
    """Lane l gives the address of row l % 8 + 8 (l / 8 % 2) of 8 columns, or of the 8 after these; `here` has it for the
    first, whose 16 bytes are at their number xor row % 8."""
    lines = ["and.b32 t, l, 7; shr.u32 u, l, 4; xor.b32 u, u, t; shl.b32 u, u, 4; and.b32 t, l, 15; shl.b32 t, t, 7;"]
    lines.append("add.u32 u, u, t; add.u32 here, place, u;")
    for pair in range(4):
        for i in range(4):
            n = 4 * (8 * chunk + 2 * pair + (i >> 1)) + 2 * (i & 1)
            lines.append(f"cvt.rn.{narrow}x2.f32 x{i}, {values[n + 1]}, {values[n]};")
        lines.append(f"xor.b32 t, here, {32 * pair};")
        lines.append("stmatrix.sync.aligned.m8n8.x4.shared.b16 [t], {x0, x1, x2, x3};")
    return lines


@gluon.constexpr_function
def by_quads(narrow, values, chunk):
    """Lane l has 8 neighbouring columns of each 32 in rows l / 4 and l / 4 + 8, at their number xor row % 8."""
    lines = ["shr.u32 t, l, 2; and.b32 u, l, 3; xor.b32 u, u, t; shl.b32 u, u, 4; shl.b32 t, t, 7;"]
    lines.append("add.u32 u, u, t; add.u32 here, place, u;")
    for part in range(2):
        lines.append(f"xor.b32 t, here, {64 * part};")
        for k in range(2):
            for i in range(4):
                n = 4 * (4 * (2 * chunk + part) + i) + 2 * k
                lines.append(f"cvt.rn.{narrow}x2.f32 x{i}, {values[n + 1]}, {values[n]};")
            lines.append(f"st.shared.v4.b32 [t+{1024 * k}], {{x0, x1, x2, x3}};")
    return lines


@gluon.constexpr_function
def places_of(tid, ptr, pitch, row, end, column, width):
    """Text for lane l, which stores columns 8 (l % 8) and the next 7 of rows l / 8 + 4 i: it sets at0 .. at3 to where they
    go in memory, p0 .. p3 to whether the rows are there, `left` to the columns that are there from those on, `from` to where
    the first row's are in a place."""
    lines = [f"and.b32 l, {tid}, 31; shr.u32 u, l, 3; and.b32 t, l, 7; shl.b32 left, t, 3;"]
    lines.append("xor.b32 from, t, u; shl.b32 from, from, 4; shl.b32 t, u, 7; add.u32 from, from, t;")
    lines.append(f"and.b32 t, {tid}, 96; shr.u32 t, t, 1; add.u32 u, u, t; add.u32 u, u, {row};")
    lines.append(
        f"add.u32 t, left, {column}; mul.wide.s32 step, t, 2; add.s64 step, step, {ptr}; sub.s32 left, {width}, left;"
    )
    lines.append(f"cvt.s64.s32 at0, u; mul.lo.s64 at0, at0, {pitch}; shl.b64 at0, at0, 1; add.s64 at0, at0, step;")
    lines.append(f"shl.b64 step, {pitch}, 3; setp.lt.s32 p0, u, {end};")
    for i in range(1, 4):
        lines.append(f"add.s64 at{i}, at{i - 1}, step; add.u32 t, u, {4 * i}; setp.lt.s32 p{i}, t, {end};")
    return lines


@gluon.constexpr_function
def _store(narrow, quads, inputs):
    """With several groups the next one's columns follow those before `width`."""
    (tid,), (place,), *where, values = inputs
    lines = ["{ .reg .pred p<4>, q, r; .reg .b32 l, t, u, place, here, left, from, x<4>, y<16>; .reg .b64 at<4>, step;"]
    lines += [f"mov.b32 place, {place};", *places_of(tid, *(w[0] for w in where)), "add.u32 from, from, place;"]
    for chunk in range(2):
        lines += by_quads(narrow, values, chunk) if quads else by_matrices(narrow, values, chunk)
        lines.append(f"bar.warp.sync 0xffffffff; setp.gt.s32 q, left, {64 * chunk}; xor.b32 t, from, 64;")
        for i in range(4):
            words = ", ".join(f"y{4 * i + j}" for j in range(4))
            lines.append(f"ld.shared.v4.b32 {{{words}}}, [{'t' if i & 1 else 'from'}+{512 * i}];")
        for i in range(4):
            words = ", ".join(f"y{4 * i + j}" for j in range(4))
            lines.append(f"and.pred r, p{i}, q; @r st.global.v4.b32 [at{i}+{128 * chunk}], {{{words}}};")
        lines.append("bar.warp.sync 0xffffffff;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def store_text(bf16, quads):
    operands = [f"${i}" for i in range(72)]
    return _store("bf16" if bf16 else "f16", quads, (*((o,) for o in operands[:8]), operands[8:]))


@gluon.jit
def store_rows(acc, tid, place, ptr, pitch, row, end, column, width, dtype: gl.constexpr, QUADS: gl.constexpr):
    """`place`: the warp's; `row`: the block's first, of those before `end`; `pitch`: row stride in elements."""
    asm: gl.constexpr = store_text(dtype == gl.bfloat16, QUADS)
    args = [tid, place, ptr, pitch, row, end, column, width, acc]
    gl.inline_asm(asm, ("r", "r", "l", "l", "r", "r", "r", "r", "f"), args, (), is_pure=False)
