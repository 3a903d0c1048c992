"""Of the backward of windowed softmax attention (softmax_backward_kernels.py): what the consumers do to scores in registers,
partial sums of dQ, and the loader's numbers of a block's queries.

A thread of an accumulator holds, for every 8 columns, two neighbours each of its rows r and r + 8. A score's row is a key,
its column a query. By hand for the reasons given in gdpa_backward_moves.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .facts import fact, pointer
from .gdpa_backward_moves import program_id
from .gdpa_backward_ranges import BLOCK, FLAGS, QUERIES, SUMS, ZERO, whole

TILE = gl.constexpr(BLOCK * BLOCK)  # numbers of a consumer's half of a block of dQ

# Places among the facts that the ranges of gdpa_backward_ranges.py have there and this kernel does not.
WINDOW, HEADS, ORDER, PARTS, ROUNDS, NOTHING = (gl.constexpr(i) for i in (5, 6, 7, 8, 9, FLAGS.value))
REACH, SCALE, SLOTS, STATS, PLANE = (gl.constexpr(i) for i in range(19, 24))


@gluon.constexpr_function
def _weights(outputs, inputs):
    """exp2(score * factor + column's number), 0 where not 0 <= query - key < window, of which `distance` is the
    block's first query minus its first key. Masks only where the block's corners need them."""
    (p,), ((at,), (factor,), (distance,), (window,), (zero,), s) = outputs, inputs
    lines = [
        "{ .reg .pred q; .reg .b32 t, c, r, x; .reg .f32 a, b;",
        f"mov.u32 t, %tid.x; add.u32 t, t, {zero}; and.b32 c, t, 3; shl.b32 r, c, 3; add.u32 r, r, {at};",
    ]
    for j in range(len(s) // 4):
        lines.append(f"ld.shared.v2.f32 {{a, b}}, [r + {32 * j}];")
        for i in range(4 * j, 4 * j + 4):
            lines.append(f"fma.rn.f32 {p[i]}, {s[i]}, {factor}, {'ab'[i & 1]}; ex2.approx.ftz.f32 {p[i]}, {p[i]};")
    lines += [
        f"setp.gt.s32 q, {distance}, 0; add.s32 x, {distance}, 64; setp.le.and.s32 q, x, {window}, q; @q bra.uni done;",
        "shl.b32 c, c, 1; shr.u32 r, t, 2; and.b32 r, r, 7; sub.s32 c, c, r;",
        f"shr.u32 r, t, 1; and.b32 r, r, 48; sub.s32 c, c, r; add.s32 c, c, {distance};",
    ]
    for i, value in enumerate(p):
        lines.append(f"add.s32 x, c, {8 * (i // 4) + i % 2 - 8 * (i // 2 % 2)}; setp.ge.u32 q, x, {window};")
        lines.append(f"@q mov.b32 {value}, 0;")
    return "\n".join([*lines, "done: }"])


@gluon.jit
def weights(s, stats, factor, distance, facts):
    args = [stats, factor, distance, whole(facts, WINDOW), whole(facts, ZERO), s]
    return gl.inline_asm(_weights, ("=&f", "r", "f", "r", "r", "r", "f"), args, s.type, is_pure=False)


@gluon.constexpr_function
def _slopes(outputs, inputs):
    """weight * (dO v^T - column's number)."""
    (out,), ((at,), (zero,), p, g) = outputs, inputs
    lines = [
        "{ .reg .b32 r; .reg .f32 a, b, x;",
        f"mov.u32 r, %tid.x; add.u32 r, r, {zero}; and.b32 r, r, 3; shl.b32 r, r, 3; add.u32 r, r, {at};",
    ]
    for j in range(len(p) // 4):
        lines.append(f"ld.shared.v2.f32 {{a, b}}, [r + {256 + 32 * j}];")
        for i in range(4 * j, 4 * j + 4):
            lines.append(f"sub.f32 x, {g[i]}, {'ab'[i & 1]}; mul.f32 {out[i]}, x, {p[i]};")
    return "\n".join([*lines, "}"])


@gluon.jit
def slopes(p, g, stats, facts):
    args = [stats, whole(facts, ZERO), p, g]
    return gl.inline_asm(_slopes, ("=&f", "r", "r", "f", "f"), args, p.type, is_pure=False)


# A block of dQ that more keys will add to waits in memory as the registers hold it: each thread reads what it wrote.


@gluon.jit
def partial_of(facts, position, W: gl.constexpr):
    """Where this program keeps the sums of the block whose first query has this position in its sequence."""
    slot = (position // BLOCK) & whole(facts, SLOTS)
    place = (program_id() * (whole(facts, SLOTS) + 1) + slot) * 2 + W
    return pointer(facts, SUMS, gl.float32) + place.to(gl.int64) * TILE


@gluon.constexpr_function
def _take(outputs, inputs):
    (values,), ((at,), (step,), (zero,)) = outputs, inputs
    lines = [
        f"{{ .reg .b32 t; .reg .b64 at, step; mov.u32 t, %tid.x; add.u32 t, t, {zero};",
        f"and.b32 t, t, 127; shl.b32 t, t, 4; cvt.u64.u32 at, t; add.s64 at, at, {at}; cvt.u64.u32 step, {step};",
    ]
    for j in range(len(values) // 4):
        lines.append(f"ld.global.v4.f32 {{{', '.join(values[4 * j : 4 * j + 4])}}}, [at]; add.s64 at, at, step;")
    return "\n".join([*lines, "}"])


@gluon.jit
def take_partial(like, facts, position, new, W: gl.constexpr):
    """The block's sums so far, on their way; zeros for a new one, from a place that stays in the cache."""
    at = gl.where(new, pointer(facts, NOTHING, gl.float32), partial_of(facts, position, W))
    args = [at, gl.where(new, 0, 2048), whole(facts, ZERO)]
    return gl.inline_asm(_take, ("=&f", "l", "r", "r"), args, like.type, is_pure=False)


@gluon.constexpr_function
def _put(outputs, inputs):
    (to,), (zero,), values = inputs
    lines = [
        f"{{ .reg .b32 t; .reg .b64 at; mov.u32 t, %tid.x; add.u32 t, t, {zero};",
        f"and.b32 t, t, 127; shl.b32 t, t, 4; cvt.u64.u32 at, t; add.s64 at, at, {to};",
    ]
    for j in range(len(values) // 4):
        lines.append(f"st.global.v4.f32 [at + {2048 * j}], {{{', '.join(values[4 * j : 4 * j + 4])}}};")
    return "\n".join([*lines, "}"])


@gluon.jit
def put_partial(dq, facts, position, W: gl.constexpr):
    args = [partial_of(facts, position, W), whole(facts, ZERO), dq]
    gl.inline_asm(_put, ("l", "r", "f"), args, (), is_pure=False)


@gluon.constexpr_function
def _blank(outputs, inputs):
    (tile,), (zero,) = inputs
    lines = [
        f"{{ .reg .b32 t, zero; mov.u32 t, %tid.x; add.u32 t, t, {zero}; mov.b32 zero, 0;",
        f"and.b32 t, t, 127; shl.b32 t, t, 4; add.u32 t, t, {tile};",
    ]
    lines += [f"st.shared.v4.b32 [t + {2048 * j}], {{zero, zero, zero, zero}};" for j in range(4)]
    return "\n".join([*lines, "}"])


@gluon.jit
def blank(tile, facts):
    """Zero a [64, 64] tile of 16-bit numbers."""
    gl.inline_asm(_blank, "r,r,~{memory}", [tile, whole(facts, ZERO)], (), is_pure=False)


@gluon.constexpr_function
def _fetch(outputs, inputs):
    (to,), (at,), (plane,), (rows,), (zero,) = inputs
    return f"""{{ .reg .pred p, q; .reg .b32 t, r; .reg .b64 at; .reg .f32 a, b, c, d;
    mov.u32 t, %tid.x; add.u32 t, t, {zero}; and.b32 t, t, 31;
    setp.lt.s32 p, t, {rows}; add.u32 r, t, 32; setp.lt.s32 q, r, {rows};
    shl.b32 t, t, 2; cvt.u64.u32 at, t; add.s64 at, at, {at}; add.u32 t, t, {to};
    mov.b32 a, 0xff800000; mov.b32 b, a; mov.b32 c, 0; mov.b32 d, 0;
    @p ld.global.f32 a, [at]; @q ld.global.f32 b, [at + 128];
    add.s64 at, at, {plane};
    @p ld.global.f32 c, [at]; @q ld.global.f32 d, [at + 128];
    st.shared.f32 [t], a; st.shared.f32 [t + 128], b; st.shared.f32 [t + 256], c; st.shared.f32 [t + 384], d; }}"""


@gluon.jit
def fetch_stats(stats, facts, head, row, rows):
    """By one warp: the two numbers of each of a block's queries; past `rows` those with which a weight is 0."""
    at = pointer(facts, STATS, gl.float32) + head.to(gl.int64) * fact(facts, QUERIES) + row
    args = [stats, at, fact(facts, PLANE), rows, whole(facts, ZERO)]
    gl.inline_asm(_fetch, "r,l,l,r,r,~{memory}", args, (), is_pure=False)
