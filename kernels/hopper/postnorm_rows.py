"""Rows of a [64, 128] accumulator from and to memory, 16 bytes at a time, for a product whose columns are permuted
(postnorm_direct_kernels.py): column 32 J + 8 q + 2 i + e of the result is column 32 J + 8 i + 2 q + e of the product. So a
thread, which has pairs of columns 8 j + 2 q of the product in rows lane / 4 and lane / 4 + 8 of its warp's 16, q = lane % 4,
has 8 columns of the result that follow each other, and a quad of lanes 32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .attention_exchange import own_address
from .postnorm_multiply import accumulator


@gluon.jit
def column_of(p):
    """Of the result, for place p of a vector in shared memory: there a quad has 16 columns, of which each lane reads 4."""
    return (p & ~31) | (((p >> 2) & 3) << 3) | (((p >> 4) & 1) << 2) | (p & 3)


@gluon.constexpr_function
def _vector(outputs, inputs):
    (out,), ((base,),) = outputs, inputs
    lines = [f"{{ .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 3; shl.b32 t, t, 4; add.u32 t, t, {base};"]
    lines += [f"ld.shared.v4.f32 {{{', '.join(out[4 * i : 4 * i + 4])}}}, [t + {64 * i}];" for i in range(8)]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def columns_type():
    return gl.distributed_type(gl.float32, [128], gl.SliceLayout(0, accumulator(128)))


@gluon.jit
def load_columns(place):
    """A vector in shared memory, one value per column of the product."""
    kind: gl.constexpr = columns_type()
    return gl.inline_asm(_vector, ("=f", "r"), [own_address(place)], kind, is_pure=False)[None, :]


@gluon.constexpr_function
def _places(ptr, pitch, row, end, column, width):
    """Text that sets `here` and `below` to a thread's first column in its two rows, p and q to whether these are there, and
    `left` to the columns from there on. All anew from what does not change: addresses would live through the product."""
    return [
        ".reg .pred p, q, r, a, b; .reg .b32 t, v, left; .reg .b64 here, below, step;",
        "mov.u32 t, %tid.x; and.b32 v, t, 96; shr.u32 v, v, 1; and.b32 t, t, 31; shr.u32 left, t, 2; add.u32 v, v, left;",
        f"add.u32 v, v, {row}; setp.lt.s32 p, v, {end}; and.b32 t, t, 3; shl.b32 t, t, 3; sub.s32 left, {width}, t;",
        f"add.u32 t, t, {column}; shl.b32 t, t, 1; cvt.u64.u32 step, t; add.s64 here, {ptr}, step;",
        f"shl.b64 step, {pitch}, 1; cvt.s64.s32 below, v; mad.lo.s64 here, below, step, here;",
        f"add.u32 v, v, 8; setp.lt.s32 q, v, {end}; shl.b64 step, {pitch}, 4; add.s64 below, here, step;",
    ]


@gluon.constexpr_function
def _there(part):
    return f"setp.gt.s32 r, left, {32 * part}; and.pred a, p, r; and.pred b, q, r;"


@gluon.constexpr_function
def _load(outputs, inputs):
    (out,), places = outputs, [i[0] for i in inputs]
    lines = ["{", *_places(*places)]
    lines += [f"mov.b32 {o}, 0;" for o in out]
    for part in range(4):
        lines.append(_there(part))
        for k, (there, row) in enumerate((("a", "here"), ("b", "below"))):
            words = ", ".join(out[8 * part + 4 * k : 8 * part + 4 * k + 4])
            lines.append(f"@{there} ld.global.v4.b32 {{{words}}}, [{row} + {64 * part}];")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def pairs_type():
    return gl.distributed_type(gl.int32, [64, 64], accumulator(64))


@gluon.jit
def load_rows(ptr, pitch, row, end, column, width):
    """Pairs of 16-bit values of rows row, row + 1 .. before `end` and of `width` columns, a multiple of 8, from `column` on;
    0 elsewhere. `pitch`: row stride in elements."""
    args = [ptr, pitch, row, end, column, width]
    return gl.inline_asm(_load, ("=&r", "l", "l", "r", "r", "r", "r"), args, pairs_type(), is_pure=False)


@gluon.constexpr_function
def widen(narrow, word):
    """Text that sets `even` and `odd` to the two 16-bit values of a word."""
    if narrow == "bf16":
        return f"shl.b32 t, {word}, 16; mov.b32 even, t; and.b32 t, {word}, 0xffff0000; mov.b32 odd, t;"
    return f"mov.b32 {{l, h}}, {word}; cvt.f32.f16 even, l; cvt.f32.f16 odd, h;"


@gluon.constexpr_function
def _add(narrow, outputs, inputs):
    """Word 8 J + 4 k + i of the pairs has the registers e + 2 k + 4 (4 J + i) of the accumulator, k: row + 8."""
    (out,), (words, values) = outputs, inputs
    lines = ["{ .reg .b16 h, l; .reg .b32 t; .reg .f32 even, odd;"]
    for w, word in enumerate(words):
        i = 4 * (4 * (w >> 3) + (w & 3)) + 2 * (w >> 2 & 1)
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
def add_pairs(acc, pairs, dtype: gl.constexpr):
    asm: gl.constexpr = _add_bf16 if dtype == gl.bfloat16 else _add_fp16
    return gl.inline_asm(asm, ("=f", "r", "f"), [pairs, acc], acc.type, is_pure=True)


@gluon.constexpr_function
def _store(narrow, inputs):
    *places, values = inputs
    lines = ["{", *_places(*(place[0] for place in places)), ".reg .b32 x<4>;"]
    for part in range(4):
        lines.append(_there(part))
        for k, (there, row) in enumerate((("a", "here"), ("b", "below"))):
            for i in range(4):
                n = 4 * (4 * part + i) + 2 * k
                lines.append(f"cvt.rn.{narrow}x2.f32 x{i}, {values[n + 1]}, {values[n]};")
            lines.append(f"@{there} st.global.v4.b32 [{row} + {64 * part}], {{x0, x1, x2, x3}};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _store_bf16(outputs, inputs):
    return _store("bf16", inputs)


@gluon.constexpr_function
def _store_fp16(outputs, inputs):
    return _store("f16", inputs)


@gluon.jit
def store_rows(acc, ptr, pitch, row, end, column, width):
    asm: gl.constexpr = _store_bf16 if ptr.dtype.element_ty == gl.bfloat16 else _store_fp16
    args = [ptr, pitch, row, end, column, width, acc]
    gl.inline_asm(asm, ("l", "l", "r", "r", "r", "r", "f"), args, (), is_pure=False)


@gluon.constexpr_function
def _first_of_row(outputs, inputs):
    """Value 0 of rows r and r + 8, from lane 0 of the quad to all four."""
    (out,), (x,) = outputs, inputs
    return "\n".join(f"shfl.sync.idx.b32 {out[row]}, {x[2 * row]}, 0, 0x1c1f, 0xffffffff;" for row in range(2))


@gluon.jit
def first_of_row(chunk, kind: gl.constexpr):
    """The first value of each row, of type `kind`."""
    return gl.inline_asm(_first_of_row, ("=f", "f"), [chunk], kind, is_pure=True)
