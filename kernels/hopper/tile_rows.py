"""Rows of a [64, n] tile in registers, as an accumulator holds it, from and to memory and shared memory: by hand, since
addresses that the compiler makes of a thread's number live in registers through the whole kernel. `zero` is 0 but not to
the compiler, which makes everything anew then; 0 where there are registers enough.

A thread has pairs of columns 8 j + 2 (lane % 4) of rows lane / 4 and lane / 4 + 8 of its warp's 16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _places(at, pitch, rows, zero):
    """Text that sets `here` and `below` to a thread's first pair in its two rows, p and q to whether these are there."""
    return [
        ".reg .pred p, q; .reg .b32 t, v, u; .reg .b64 here, below, step;",
        f"mov.u32 t, %tid.x; add.u32 t, t, {zero}; and.b32 v, t, 96; shr.u32 v, v, 1; and.b32 t, t, 31;",
        "shr.u32 u, t, 2; add.u32 v, v, u;",
        f"setp.lt.s32 p, v, {rows}; and.b32 t, t, 3; shl.b32 t, t, 2; cvt.u64.u32 here, v;",
        f"mad.lo.s64 here, here, {pitch}, {at}; cvt.u64.u32 step, t; add.s64 here, here, step;",
        f"add.u32 v, v, 8; setp.lt.s32 q, v, {rows}; shl.b64 step, {pitch}, 3; add.s64 below, here, step;",
    ]


@gluon.constexpr_function
def _add(narrow, outputs, inputs):
    (out,), ((at,), (pitch,), (rows,), (width,), (zero,), values) = outputs, inputs
    n = len(values) // 4
    lines = ["{", *_places(at, pitch, rows, zero)]
    lines.append(f".reg .pred r, a, b; .reg .b16 h, l; .reg .b32 low<{n}>, high<{n}>; .reg .f32 even, odd;")
    for j in range(n):
        lines.append(f"mov.b32 low{j}, 0; mov.b32 high{j}, 0; setp.gt.s32 r, {width}, {8 * j};")
        lines.append("and.pred a, p, r; and.pred b, q, r;")
        lines.append(f"@a ld.global.b32 low{j}, [here + {16 * j}]; @b ld.global.b32 high{j}, [below + {16 * j}];")
    for j in range(n):
        for k, word in enumerate((f"low{j}", f"high{j}")):
            i = 4 * j + 2 * k
            if narrow == "bf16":
                lines.append(f"shl.b32 t, {word}, 16; mov.b32 even, t; and.b32 t, {word}, 0xffff0000; mov.b32 odd, t;")
            else:
                lines.append(f"mov.b32 {{l, h}}, {word}; cvt.f32.f16 even, l; cvt.f32.f16 odd, h;")
            lines.append(f"add.f32 {out[i]}, {values[i]}, even; add.f32 {out[i + 1]}, {values[i + 1]}, odd;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _add_bf16(outputs, inputs):
    return _add("bf16", outputs, inputs)


@gluon.constexpr_function
def _add_fp16(outputs, inputs):
    return _add("fp16", outputs, inputs)


@gluon.jit
def add_rows(tile, ptr, pitch, rows, width, zero):
    """tile + the 16-bit rows at ptr, `pitch` elements apart, of which `rows` are there, and `width` columns, a multiple of
    8."""
    asm: gl.constexpr = _add_bf16 if ptr.dtype.element_ty == gl.bfloat16 else _add_fp16
    args = [ptr, 2 * pitch, rows, width, zero, tile]
    return gl.inline_asm(asm, ("=f", "l", "l", "r", "r", "r", "f"), args, tile.type, is_pure=False)


@gluon.constexpr_function
def _store(narrow, inputs):
    (at,), (pitch,), (rows,), (zero,), values = inputs
    lines = ["{", *_places(at, pitch, rows, zero)]
    for j in range(len(values) // 4):
        left, right, left8, right8 = values[4 * j : 4 * j + 4]
        lines.append(f"cvt.rn.{narrow}x2.f32 v, {right}, {left}; @p st.global.b32 [here + {16 * j}], v;")
        lines.append(f"cvt.rn.{narrow}x2.f32 v, {right8}, {left8}; @q st.global.b32 [below + {16 * j}], v;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _store_bf16(outputs, inputs):
    return _store("bf16", inputs)


@gluon.constexpr_function
def _store_fp16(outputs, inputs):
    return _store("f16", inputs)


@gluon.jit
def store_rows(tile, ptr, pitch, rows, zero):
    """The first `rows` rows of a tile in 16 bits."""
    asm: gl.constexpr = _store_bf16 if ptr.dtype.element_ty == gl.bfloat16 else _store_fp16
    gl.inline_asm(asm, ("l", "l", "r", "r", "f"), [ptr, 2 * pitch, rows, zero, tile], (), is_pure=False)


# ---- shared memory: chunks of 64 columns, 128 bytes a row, whose 16-byte pieces are swizzled by the row ----------------


@gluon.constexpr_function
def _pieces(place, zero):
    """Text for matrix instructions: lane l has the address of row l % 8 of matrix l / 8 of four, rows r and r + 8 of 8
    columns, then of the next 8: `r`, to which `s`, xor 32 for every 16 columns, is added."""
    return [
        ".reg .b32 t, r, a, s;",
        f"mov.u32 t, %tid.x; add.u32 t, t, {zero};",
        "and.b32 r, t, 7; shr.u32 s, t, 4; and.b32 s, s, 1; xor.b32 s, s, r; shl.b32 s, s, 4;",
        "and.b32 a, t, 8; or.b32 r, r, a; and.b32 t, t, 96; shr.u32 t, t, 1; add.u32 r, r, t; shl.b32 r, r, 7;",
        f"add.u32 r, r, {place};",
    ]


@gluon.constexpr_function
def _widen(narrow, word, even, odd):
    if narrow == "bf16":
        return f"shl.b32 t, {word}, 16; mov.b32 {even}, t; and.b32 t, {word}, 0xffff0000; mov.b32 {odd}, t;"
    return f"mov.b32 {{l, h}}, {word}; cvt.f32.f16 {even}, l; cvt.f32.f16 {odd}, h;"


@gluon.constexpr_function
def _load_chunk(narrow, outputs, inputs):
    (out,), ((place,), (zero,)) = outputs, inputs
    lines = ["{", *_pieces(place, zero), ".reg .b32 x<16>; .reg .b16 h, l;"]
    for j in range(4):
        words = ", ".join(f"x{4 * j + i}" for i in range(4))
        lines.append(f"xor.b32 a, s, {32 * j}; add.u32 a, a, r;")
        lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{words}}}, [a];")
    lines += [_widen(narrow, f"x{i}", out[2 * i], out[2 * i + 1]) for i in range(16)]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _load_bf16(outputs, inputs):
    return _load_chunk("bf16", outputs, inputs)


@gluon.constexpr_function
def _load_fp16(outputs, inputs):
    return _load_chunk("fp16", outputs, inputs)


@gluon.constexpr_function
def chunk_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])


@gluon.jit
def load_chunk(place, zero, dtype: gl.constexpr):
    """[64, 64] in fp32 from its address in shared memory."""
    kind: gl.constexpr = gl.distributed_type(gl.float32, [64, 64], chunk_layout())
    asm: gl.constexpr = _load_bf16 if dtype == gl.bfloat16 else _load_fp16
    return gl.inline_asm(asm, ("=f", "r", "r"), [place, zero], kind, is_pure=False)


@gluon.constexpr_function
def _keep_chunk(narrow, inputs):
    (place,), (zero,), values = inputs
    lines = ["{", *_pieces(place, zero), ".reg .b32 x<4>;"]
    for j in range(4):
        for i in range(4):
            left, right = values[8 * j + 2 * i : 8 * j + 2 * i + 2]
            lines.append(f"cvt.rn.{narrow}x2.f32 x{i}, {right}, {left};")
        lines.append(f"xor.b32 a, s, {32 * j}; add.u32 a, a, r;")
        lines.append("stmatrix.sync.aligned.m8n8.x4.shared.b16 [a], {x0, x1, x2, x3};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _keep_bf16(outputs, inputs):
    return _keep_chunk("bf16", inputs)


@gluon.constexpr_function
def _keep_fp16(outputs, inputs):
    return _keep_chunk("f16", inputs)


@gluon.jit
def keep_chunk(chunk, place, zero, dtype: gl.constexpr):
    """In 16 bits into shared memory."""
    asm: gl.constexpr = _keep_bf16 if dtype == gl.bfloat16 else _keep_fp16
    gl.inline_asm(asm, ("r", "r", "f"), [place, zero, chunk], (), is_pure=False)


# ---- statistics ------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _first_of_row(outputs, inputs):
    """Value 0 of rows r and r + 8, from lane 0 of the quad to all four."""
    (out,), (x,) = outputs, inputs
    return "\n".join(f"shfl.sync.idx.b32 {out[row]}, {x[2 * row]}, 0, 0x1c1f, 0xffffffff;" for row in range(2))


@gluon.jit
def first_of_row(chunk, kind: gl.constexpr):
    """The first value of each row, of type `kind`."""
    return gl.inline_asm(_first_of_row, ("=f", "f"), [chunk], kind, is_pure=True)
