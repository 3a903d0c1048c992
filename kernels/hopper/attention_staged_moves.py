"""Of the norm_attention backward in stages (attention_staged_kernels.py): the norms on tiles in shared memory.

By hand, so that few registers are enough. Of 128 threads each has 8 columns of every eighth row: thread t has columns
8 (t % 16) to 8 (t % 16) + 7 of rows t / 16 + 8 i. 16-byte pieces of a row are swizzled by the row's last three bits, which
are the same for all rows of a thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .attention_backward_common import fact
from .gdpa_backward_ranges import ZERO, whole

# Facts beside those of gdpa_backward_ranges.py. The addresses of statistics are 0 where there is no such norm.
O_RSTD, MEANS, RSTD, MEAN, Q, Q_PITCH, VECTORS, FEATURES = (gl.constexpr(i) for i in range(19, 27))

# What a row needs, 32 bytes: r, -r c1, -r c2 of the post-norm, nothing, then r and -r mu of the pre-norm, nothing twice.


@gluon.constexpr_function
def _place(zero, terms):
    """To a: a thread's first 16 bytes in a tile at 0; to f: the terms of its first row; to at: of its columns in fp32."""
    return f"""mov.u32 t, %tid.x; add.u32 t, t, {zero}; and.b32 t, t, 127;
    and.b32 c, t, 15; shr.u32 r, t, 4; and.b32 a, c, 7; xor.b32 a, a, r; shl.b32 a, a, 4; shl.b32 y, r, 7;
    add.u32 a, a, y; shr.u32 y, c, 3; shl.b32 y, y, 13; add.u32 a, a, y; shl.b32 f, r, 5; add.u32 f, f, {terms};
    cvt.u64.u32 at, c; shl.b64 at, at, 5;"""


@gluon.constexpr_function
def _load_vector(name, pointer):
    """8 values of a thread's columns."""
    halves = [", ".join(f"{name}{4 * half + i}" for i in range(4)) for half in range(2)]
    address = f"add.s64 vector, at, {pointer};"
    return [address, *(f"ld.global.nc.v4.f32 {{{names}}}, [vector + {16 * i}];" for i, names in enumerate(halves))]


@gluon.constexpr_function
def _unpack(word):
    """Two bf16 of a word to u and v."""
    return f"shl.b32 y, {word}, 16; mov.b32 u, y; and.b32 y, {word}, 0xffff0000; mov.b32 v, y;"


@gluon.constexpr_function
def _normalise(outputs, inputs):
    (tile,), (terms,), (weight,), (bias,), (zero,) = inputs
    lines = [
        "{ .reg .b32 t, r, c, a, f, y, x<4>; .reg .b64 at, vector; .reg .f32 g<8>, b<8>, s, m, u, v;",
        _place(zero, terms),
        f"add.u32 a, a, {tile};",
        *_load_vector("g", weight),
        *_load_vector("b", bias),
    ]
    for i in range(8):
        lines.append(f"ld.shared.v2.f32 {{s, m}}, [f + {256 * i + 16}];")
        lines.append(f"ld.shared.v4.b32 {{x0, x1, x2, x3}}, [a + {1024 * i}];")
        for k in range(4):
            lines.append(_unpack(f"x{k}") + " fma.rn.f32 u, u, s, m; fma.rn.f32 v, v, s, m;")
            lines.append(f"fma.rn.f32 u, u, g{2 * k}, b{2 * k}; fma.rn.f32 v, v, g{2 * k + 1}, b{2 * k + 1};")
            lines.append(f"cvt.rn.bf16x2.f32 x{k}, v, u;")
        lines.append(f"st.shared.v4.b32 [a + {1024 * i}], {{x0, x1, x2, x3}};")
    return "\n".join([*lines, "}"])


@gluon.jit
def normalise(tile, terms, weight, bias, facts):
    """q to norm(q) in place, for 64 rows of a head."""
    args = [tile, terms, weight, bias, whole(facts, ZERO)]
    gl.inline_asm(_normalise, "r,r,l,l,r,~{memory}", args, (), is_pure=False)


@gluon.constexpr_function
def _differentiate(outputs, inputs):
    (tile,), (hat,), (terms,), (weight,), (zero,) = inputs
    lines = [
        "{ .reg .b32 t, r, c, a, f, h, y, x<4>, z<4>; .reg .b64 at, vector; .reg .f32 g<8>, s, m, n, u, v, p, q;",
        _place(zero, terms),
        f"add.u32 h, a, {hat}; add.u32 a, a, {tile};",
        *_load_vector("g", weight),
    ]
    for i in range(8):
        lines.append(f"ld.shared.v4.f32 {{s, m, n, u}}, [f + {256 * i}];")
        lines.append(f"ld.shared.v4.b32 {{z0, z1, z2, z3}}, [h + {1024 * i}];")
        lines.append(f"ld.shared.v4.b32 {{x0, x1, x2, x3}}, [a + {1024 * i}];")
        for k in range(4):
            lines.append(_unpack(f"z{k}") + " fma.rn.f32 p, u, n, m; fma.rn.f32 q, v, n, m;")
            lines.append(_unpack(f"x{k}") + f" mul.f32 u, u, g{2 * k}; mul.f32 v, v, g{2 * k + 1};")
            lines.append(f"fma.rn.f32 u, u, s, p; fma.rn.f32 v, v, s, q; cvt.rn.bf16x2.f32 x{k}, v, u;")
        lines.append(f"st.shared.v4.b32 [a + {1024 * i}], {{x0, x1, x2, x3}};")
    return "\n".join([*lines, "}"])


@gluon.jit
def differentiate(tile, hat, terms, weight, facts):
    """The gradient of the op's output to that of the attention's, in place, for 64 rows of a head."""
    args = [tile, hat, terms, weight, whole(facts, ZERO)]
    gl.inline_asm(_differentiate, "r,r,r,l,r,~{memory}", args, (), is_pure=False)


@gluon.constexpr_function
def _take_terms(outputs, inputs):
    (place,), (row,), (rows,), (o_rstd,), (means,), (rstd,), (mean,), (q,), (pitch,), (zero,) = inputs
    return f"""{{ .reg .pred p, in, has; .reg .b32 t, y; .reg .b64 i, at; .reg .f32 s, m, n, c, first, r, none;
    mov.u32 t, %tid.x; add.u32 t, t, {zero}; and.b32 t, t, 127; setp.lt.u32 p, t, 64; setp.lt.s32 in, t, {rows};
    and.pred in, in, p; add.u32 y, t, {row}; cvt.u64.u32 i, y;
    mov.f32 s, 0f3F800000; mov.f32 r, 0f3F800000; mov.f32 m, 0f00000000; mov.f32 n, 0f00000000;
    mov.f32 c, 0f00000000; mov.f32 none, 0f00000000; mov.b32 y, 0;
    setp.ne.s64 has, {o_rstd}, 0; and.pred has, has, in; mad.lo.s64 at, i, 4, {o_rstd}; @has ld.global.nc.f32 s, [at];
    mad.lo.s64 at, i, 8, {means}; @has ld.global.nc.v2.f32 {{m, n}}, [at];
    mul.f32 m, m, s; mul.f32 n, n, s;
    setp.ne.s64 has, {rstd}, 0; and.pred has, has, in; mad.lo.s64 at, i, 4, {rstd}; @has ld.global.nc.f32 r, [at];
    setp.ne.s64 has, {mean}, 0; and.pred has, has, in; mad.lo.s64 at, i, 4, {mean}; @has ld.global.nc.f32 c, [at];
    shl.b64 at, {pitch}, 1; mad.lo.s64 at, i, at, {q}; @has ld.global.nc.u16 y, [at]; shl.b32 y, y, 16; mov.b32 first, y;
    add.f32 c, c, first; mul.f32 c, c, r; neg.f32 c, c;
    shl.b32 y, t, 5; add.u32 y, y, {place};
    @p st.shared.v4.f32 [y], {{s, m, n, none}}; @p st.shared.v4.f32 [y + 16], {{r, c, none, none}}; }}"""


@gluon.jit
def take_terms(place, row, rows, facts):
    """What the norms need of each of `rows` rows from `row` on, at most 64, to shared memory. The saved mean of q is
    relative to the row's first element."""
    args = [place, row, rows, fact(facts, O_RSTD), fact(facts, MEANS), fact(facts, RSTD), fact(facts, MEAN),
            fact(facts, Q), fact(facts, Q_PITCH), whole(facts, ZERO)]  # fmt: skip
    gl.inline_asm(_take_terms, "r,r,r,l,l,l,l,l,l,r,~{memory}", args, (), is_pure=False)


@gluon.constexpr_function
def _expect_terms(outputs, inputs):
    (row,), (rows,), (o_rstd,), (means,), (rstd,), (mean,), (q,), (pitch,), (zero,) = inputs
    lines = [
        f"{{ .reg .pred in, has; .reg .b32 t, y; .reg .b64 i, at; mov.u32 t, %tid.x; add.u32 t, t, {zero};",
        f"and.b32 t, t, 127; setp.lt.s32 in, t, {rows}; add.u32 y, t, {row}; cvt.u64.u32 i, y;",
    ]
    for size, pointer in ((4, o_rstd), (8, means), (4, rstd), (4, mean)):
        lines.append(f"setp.ne.s64 has, {pointer}, 0; and.pred has, has, in; mad.lo.s64 at, i, {size}, {pointer};")
        lines.append("@has prefetch.global.L2 [at];")
    lines.append(f"shl.b64 at, {pitch}, 1; mad.lo.s64 at, i, at, {q}; @has prefetch.global.L2 [at]; }}")
    return "\n".join(lines)


@gluon.jit
def expect_terms(row, rows, facts):
    """What `take_terms` will read of the next rows, to L2."""
    args = [row, gl.minimum(rows, 64), fact(facts, O_RSTD), fact(facts, MEANS), fact(facts, RSTD), fact(facts, MEAN),
            fact(facts, Q), fact(facts, Q_PITCH), whole(facts, ZERO)]  # fmt: skip
    gl.inline_asm(_expect_terms, "r,r,l,l,l,l,l,l,r", args, (), is_pure=False)


# ---- inner residual: its gradient is dz, which waits in the place of dQ ------------------------------------------------


@gluon.constexpr_function
def _matrix_rows(zero):
    """Text that sets r and s to what the addresses of four matrices of a panel are made of (_keep_rows of
    gdpa_backward_moves.py)."""
    return [
        f".reg .b32 t, r, a, s, x<4>; mov.u32 t, %tid.x; add.u32 t, t, {zero};",
        "and.b32 r, t, 7; shr.u32 s, t, 4; and.b32 s, s, 1;",
        "xor.b32 s, s, r; shl.b32 s, s, 4; and.b32 a, t, 8; or.b32 r, r, a; and.b32 t, t, 96; shr.u32 t, t, 1;",
        "add.u32 r, r, t; shl.b32 r, r, 7;",
    ]


@gluon.constexpr_function
def _copy_panel(outputs, inputs):
    (source,), (target,), (zero,) = inputs
    lines = ["{", *_matrix_rows(zero), ".reg .b32 b;"]
    for j in range(4):
        lines.append(f"xor.b32 a, s, {32 * j}; add.u32 a, a, r; add.u32 b, a, {source}; add.u32 a, a, {target};")
        lines.append("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {x0, x1, x2, x3}, [b];")
        lines.append("stmatrix.sync.aligned.m8n8.x4.shared.b16 [a], {x0, x1, x2, x3};")
    return "\n".join([*lines, "}"])


@gluon.jit
def copy_panel(source, target, facts, W: gl.constexpr):
    """This consumer's 64 columns of dz. Each warp copies the rows that it adds to later."""
    asm: gl.constexpr = "add.u32 $0, $1, 8192;" if W == 1 else "mov.u32 $0, $1;"
    panel = gl.inline_asm(asm, "=r,r", [source], gl.int32, is_pure=False)
    gl.inline_asm(_copy_panel, "r,r,r,~{memory}", [panel, target, whole(facts, ZERO)], (), is_pure=False)


@gluon.constexpr_function
def _keep_sum(outputs, inputs):
    (place,), (zero,), (factor,), values = inputs
    lines = ["{", *_matrix_rows(zero), ".reg .f32 even, odd;", f"add.u32 r, r, {place};"]
    for j in range(4):
        lines.append(f"xor.b32 a, s, {32 * j}; add.u32 a, a, r;")
        lines.append("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {x0, x1, x2, x3}, [a];")
        for i in range(4):
            left, right = values[8 * j + 2 * i : 8 * j + 2 * i + 2]
            lines.append(f"shl.b32 t, x{i}, 16; mov.b32 even, t; and.b32 t, x{i}, 0xffff0000; mov.b32 odd, t;")
            lines.append(f"fma.rn.f32 even, {left}, {factor}, even; fma.rn.f32 odd, {right}, {factor}, odd;")
            lines.append(f"cvt.rn.bf16x2.f32 x{i}, odd, even;")
        lines.append("stmatrix.sync.aligned.m8n8.x4.shared.b16 [a], {x0, x1, x2, x3};")
    return "\n".join([*lines, "}"])


@gluon.jit
def keep_sum(tile, factor, place, facts):
    """place += factor * tile, [64, 64]."""
    gl.inline_asm(_keep_sum, ("r", "r", "f", "f"), [place, whole(facts, ZERO), factor, tile], (), is_pure=False)
