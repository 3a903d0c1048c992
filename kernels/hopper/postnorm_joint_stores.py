"""Of the post-norm kernel whose consumers run one text (postnorm_joint_kernels.py): a warp's 16 rows of a CTA's 128 columns
go to memory by TMA, 64 columns at a time, through places of the warp's own in shared memory, each [16, 64], swizzled by 128
bytes."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .postnorm_joint_product import SIDE_MAP, Y_MAP, map_of

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
def _store(number, places, narrow, inputs):
    """As many chunks of 64 columns at once as there are places, after the last stores have read these. With several groups
    the next one's columns follow those before `width`."""
    (tid,), (base,), (row,), (column,), (width,), values = inputs
    lines = ["{ .reg .pred p, q; .reg .b32 l, t, u, place, here, x<4>, at, down; .reg .b64 d;"]
    lines.append(f"and.b32 l, {tid}, 31; setp.eq.u32 p, l, 0;")
    lines.append(f"and.b32 down, {tid}, 96; shr.u32 down, down, 1; add.u32 down, down, {row}; {map_of(number)}")
    for first in range(0, 2, places):
        chunks = range(first, first + places)
        lines.append("@p cp.async.bulk.wait_group.read 0; bar.warp.sync 0xffffffff;")
        for chunk in chunks:
            lines.append(f"add.u32 place, {base}, {PLACE.value * (chunk - first)};")
            lines += by_matrices(narrow, values, chunk)
        lines.append("fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff;")
        for chunk in chunks:
            lines.append(f"setp.gt.and.s32 q, {width}, {64 * chunk}, p; add.u32 at, {column}, {64 * chunk};")
            lines.append(f"add.u32 place, {base}, {PLACE.value * (chunk - first)};")
            lines.append("@q cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [d, {at, down}], [place];")
        lines.append("@p cp.async.bulk.commit_group;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def store_text(side, places, bf16):
    operands = [f"${i}" for i in range(69)]
    inputs = (*((o,) for o in operands[:5]), operands[5:])
    return _store(SIDE_MAP if side else Y_MAP, places, "bf16" if bf16 else "f16", inputs)


@gluon.jit
def store_rows(acc, tid, places, row, column, width, dtype: gl.constexpr, SIDE: gl.constexpr, PLACES: gl.constexpr):
    """To y, or to what is stored beside it. `places`: the warp's first; `row`: the block's first."""
    asm: gl.constexpr = store_text(SIDE, PLACES, dtype == gl.bfloat16)
    args = [tid, places, row, column, width, acc]
    gl.inline_asm(asm, ("r", "r", "r", "r", "r", "f"), args, (), is_pure=False)


@gluon.constexpr_function
def _drain(outputs, inputs):
    return "cp.async.bulk.wait_group 0;"


@gluon.jit
def drain():
    """Before a CTA ends, its shared memory has been read."""
    gl.inline_asm(_drain, "~{memory}", [], (), is_pure=False)
