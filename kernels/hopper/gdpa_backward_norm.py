"""Of the backward of jagged attention whose queries come as they were before their norm (gdpa_backward_normed_kernels.py):

    q' = (q - centre) * rstd * weight + bias

with centre and rstd of a row, weight and bias of a column. A block is normalised where it lies in shared memory and rounded
to bf16, by the steps of the norm's own kernel. What the two operands of an instruction are worth is documented there; by
hand for the reasons given in gdpa_backward_moves.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .barriers import await_phase
from .facts import pointer
from .gdpa_backward_moves import arrive, clear
from .gdpa_backward_ranges import BLOCK, ZERO, whole
from .lazy_kernels import accumulator_layout

ROW_TERMS, COLUMN_TERMS = gl.constexpr(19), gl.constexpr(20)  # places among the facts
PANEL = gl.constexpr(2 * 64 * 64)  # bytes of 64 columns of a block


@gluon.constexpr_function
def _fetch(outputs, inputs):
    """Two rows a lane; every lane arrives when its copies have."""
    (to,), (bar,), (at,), (rows,), (zero,) = inputs
    return f"""{{ .reg .pred p; .reg .b32 t, to; .reg .b64 at; mov.u32 t, %tid.x; add.u32 t, t, {zero}; and.b32 t, t, 31;
    shl.b32 to, t, 3; cvt.u64.u32 at, to; add.s64 at, at, {at}; add.u32 to, to, {to};
    setp.lt.s32 p, t, {rows}; @p cp.async.ca.shared.global [to], [at], 8;
    add.u32 t, t, 32; setp.lt.s32 p, t, {rows}; @p cp.async.ca.shared.global [to + 256], [at + 256], 8;
    cp.async.mbarrier.arrive.noinc.shared.b64 [{bar}]; }}"""


@gluon.jit
def fetch_terms(terms, bar, facts, row, rows):
    """By one warp: (centre, rstd) of the block's first `rows` rows on their way; 32 arrivals."""
    at = pointer(facts, ROW_TERMS, gl.float32) + 2 * row.to(gl.int64)
    gl.inline_asm(_fetch, "r,r,l,r,r,~{memory}", [terms, bar, at, rows, whole(facts, ZERO)], (), is_pure=False)


@gluon.constexpr_function
def _piece(tile, panel, zero):
    """`a`: a thread's piece of 16 bytes in rows r, r + 16, .. of a panel, the same 8 columns, swizzled; `t`: which piece."""
    return [
        f"mov.u32 t, %tid.x; add.u32 t, t, {zero}; and.b32 t, t, 127; shr.u32 r, t, 3; and.b32 t, t, 7;",
        "and.b32 s, r, 7; xor.b32 s, s, t; shl.b32 s, s, 4; shl.b32 a, r, 7; add.u32 a, a, s;",
        f"add.u32 a, a, {tile}; add.u32 a, a, {panel};",
    ]


@gluon.constexpr_function
def _normalise(outputs, inputs):
    """Two rows of a thread's four are on their way at once."""
    (tile,), (terms,), (columns,), (panel,), (zero,) = inputs
    lines = ["{ .reg .b32 t, r, a, s, x<8>; .reg .f32 c<2>, d<2>, w<8>, b<8>, low, high; .reg .b64 at;"]
    lines += _piece(tile, panel, zero)
    lines.append(
        f"shl.b32 s, t, 6; cvt.u64.u32 at, s; add.s64 at, at, {columns}; shl.b32 s, r, 3; add.u32 s, s, {terms};"
    )
    for name, place in (("w", 0), ("b", 32)):
        for half in range(2):
            four = ", ".join(f"{name}{4 * half + i}" for i in range(4))
            lines.append(f"ld.global.nc.v4.f32 {{{four}}}, [at + {place + 16 * half}];")
    words = [[f"x{4 * (i % 2) + j}" for j in range(4)] for i in range(4)]
    loads = [f"ld.shared.v4.b32 {{{', '.join(four)}}}, [a + {2048 * i}];" for i, four in enumerate(words)]
    loads = [f"{load} ld.shared.v2.f32 {{c{i % 2}, d{i % 2}}}, [s + {128 * i}];" for i, load in enumerate(loads)]
    lines.append(loads[0])
    for i in range(4):
        lines += loads[i + 1 : i + 2]
        for j, x in enumerate(words[i]):
            lines.append(f"shl.b32 low, {x}, 16; and.b32 high, {x}, 0xffff0000;")
            for value, column in (("low", 2 * j), ("high", 2 * j + 1)):
                lines.append(f"sub.rn.f32 {value}, {value}, c{i % 2}; mul.rn.f32 {value}, {value}, d{i % 2};")
                lines.append(f"fma.rn.f32 {value}, {value}, w{column}, b{column};")
            lines.append(f"cvt.rn.bf16x2.f32 {x}, high, low;")
        lines.append(f"st.shared.v4.b32 [a + {2048 * i}], {{{', '.join(words[i])}}};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _clear_pieces(outputs, inputs):
    """What a thread has normalised of the rows from `rows` on."""
    (tile,), (rows,), (panel,), (zero,) = inputs
    lines = ["{ .reg .pred p; .reg .b32 t, r, a, s, zero;", *_piece(tile, panel, zero), "mov.b32 zero, 0;"]
    for i in range(4):
        lines.append(f"add.u32 t, r, {16 * i}; setp.ge.s32 p, t, {rows};")
        lines.append(f"@p st.shared.v4.b32 [a + {2048 * i}], {{zero, zero, zero, zero}};")
    return "\n".join([*lines, "}"])


@gluon.jit
def normalise_block(q, do, terms, bar, phase, normed, column, rows, facts, W: gl.constexpr):
    """A block that has arrived: this consumer's 64 columns of q are normalised and, with all of dO, 0 from `rows` on. 4 of
    the 8 arrivals that the consumers wait for."""
    await_phase(bar, phase)
    columns = pointer(facts, COLUMN_TERMS, gl.float32) + 2 * (column + W * 64)
    args = [q, terms, columns, W * PANEL, whole(facts, ZERO)]
    gl.inline_asm(_normalise, "r,r,l,r,r,~{memory}", args, (), is_pure=False)
    if rows < BLOCK:
        where = [q, rows, W * PANEL, whole(facts, ZERO)]
        gl.inline_asm(_clear_pieces, "r,r,r,r,~{memory}", where, (), is_pure=False)
        clear(do, rows, facts)
    fence_async_shared()
    arrive(normed)


# dQ, whose columns are those of dO: a thread holds the same places of both.


@gluon.constexpr_function
def _take(outputs, inputs):
    """As moves._keep_rows, the other way."""
    (words,), ((tile,), (panel,), (zero,)) = outputs, inputs
    lines = [
        f"{{ .reg .b32 t, r, a, s; mov.u32 t, %tid.x; add.u32 t, t, {zero};",
        "and.b32 r, t, 7; shr.u32 s, t, 4; and.b32 s, s, 1;",
        "xor.b32 s, s, r; shl.b32 s, s, 4; and.b32 a, t, 8; or.b32 r, r, a; and.b32 t, t, 96; shr.u32 t, t, 1;",
        f"add.u32 r, r, t; shl.b32 r, r, 7; add.u32 r, r, {tile}; add.u32 r, r, {panel};",
    ]
    for j in range(4):
        four = ", ".join(words[4 * j : 4 * j + 4])
        lines.append(f"xor.b32 a, s, {32 * j}; add.u32 a, a, r;")
        lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{four}}}, [a];")
    return "\n".join([*lines, "}"])


@gluon.jit
def take_block(do, facts, W: gl.constexpr):
    """This consumer's columns of dO as pairs, each in the register of the pair of dQ; its shape means nothing."""
    pairs: gl.constexpr = gl.distributed_type(gl.int32, [64, 32], accumulator_layout(32))
    args = [do, W * PANEL, whole(facts, ZERO)]
    return gl.inline_asm(_take, ("=&r", "r", "r", "r"), args, pairs, is_pure=False)


@gluon.constexpr_function
def _release(outputs, inputs):
    """The barrier's address is made of a word of each instruction's that read them."""
    (bar,), (zero,), words = inputs
    lines = ["{ .reg .pred p; .reg .b32 x, y;", f"or.b32 x, {words[0]}, {words[4]}; or.b32 y, {words[8]}, {words[12]};"]
    lines.append(f"or.b32 x, x, y; and.b32 x, x, {zero}; add.u32 x, x, {bar};")
    lines.append("bar.warp.sync 0xffffffff; elect.sync _|p, 0xffffffff; @p mbarrier.arrive.shared::cta.b64 _, [x]; }")
    return "\n".join(lines)


@gluon.jit
def release_block(bar, pairs, facts):
    """Arrive where the loader waits, once `pairs` are in registers: a copy by TMA may overtake a read that is on its way."""
    gl.inline_asm(_release, ("r", "r", "r"), [bar, whole(facts, ZERO), pairs], (), is_pure=False)


@gluon.constexpr_function
def _add(outputs, inputs):
    (sums,), ((factor,), values, words) = outputs, inputs
    lines = ["{ .reg .b32 x;"]
    for i, word in enumerate(words):
        lines.append(f"shl.b32 x, {word}, 16; fma.rn.f32 {sums[2 * i]}, {values[2 * i]}, {factor}, x;")
        lines.append(f"and.b32 x, {word}, 0xffff0000; fma.rn.f32 {sums[2 * i + 1]}, {values[2 * i + 1]}, {factor}, x;")
    return "\n".join([*lines, "}"])


@gluon.jit
def add_block(dq, factor, pairs):
    """dq * factor + dO."""
    return gl.inline_asm(_add, ("=&f", "f", "f", "r"), [factor, dq, pairs], dq.type)
