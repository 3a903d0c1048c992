"""Of the post-norm kernel whose consumers run one text (postnorm_joint_kernels.py): what a warp does with 16 rows and the
128 columns of z of a CTA. It waits for no other warp of the CTA.

Registers of an accumulator: bit 0 of a number is the column's bit 0, bit 1 the row + 8, the rest 8 columns.
"""

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .postnorm_joint_product import await_phase, row_type, tile_type
from .postnorm_multiply import RMS, _register_row
from .postnorm_rows import widen

SHARES = tuple(struct.pack(">f", 1 / (j + 1)).hex() for j in range(8))  # of a part of 128 columns after j others
WEIGHTS = tuple(struct.pack(">f", 128 * j / (j + 1)).hex() for j in range(8))
CAUTIOUS = "43800000"  # 256: where the mean's square is so many times the variance, squares are summed about the mean

# ---- gamma and beta --------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _pack(narrow, outputs, inputs):
    """Thread t packs two gammas, or two betas, of columns t / 2 * 2 and the next."""
    (tid,), (wide,), (packed,) = inputs
    return f"""{{ .reg .b32 t, at, word; .reg .f32 a, b; and.b32 t, {tid}, 127; shl.b32 at, t, 3; add.u32 at, at, {wide};
    ld.shared.v2.f32 {{a, b}}, [at]; cvt.rn.{narrow}x2.f32 word, b, a;
    shl.b32 at, t, 2; add.u32 at, at, {packed}; st.shared.b32 [at], word; }}"""


@gluon.constexpr_function
def _pack_bf16(outputs, inputs):
    return _pack("bf16", outputs, inputs)


@gluon.constexpr_function
def _pack_fp16(outputs, inputs):
    return _pack("f16", outputs, inputs)


@gluon.jit
def pack(tid, wide, packed, dtype: gl.constexpr):
    """Words of two columns each, gammas and betas in turns, from fp32 in that order."""
    asm: gl.constexpr = _pack_bf16 if dtype == gl.bfloat16 else _pack_fp16
    gl.inline_asm(asm, "r,r,r,~{memory}", [tid, wide, packed], (), is_pure=False)


@gluon.constexpr_function
def _affine(outputs, inputs):
    (out,), (values, (tid,), (base,)) = outputs, inputs
    lines = [f"{{ .reg .b32 t; .reg .f32 g<64>; and.b32 t, {tid}, 3; shl.b32 t, t, 4; add.u32 t, t, {base};"]
    for j in range(16):
        lines.append(f"ld.shared.v4.f32 {{{', '.join(f'g{4 * j + i}' for i in range(4))}}}, [t + {64 * j}];")
    for i, (o, v) in enumerate(zip(out, values)):
        g = (i & ~3) + (i & 1)
        lines.append(f"fma.rn.f32 {o}, {v}, g{g}, g{g + 2};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _affine_packed(narrow, outputs, inputs):
    (out,), (values, (tid,), (base,)) = outputs, inputs
    lines = ["{ .reg .b32 at, t, w<32>; .reg .b16 h, l; .reg .f32 even, odd, g0, g1;"]
    lines.append(f"and.b32 at, {tid}, 3; shl.b32 at, at, 3; add.u32 at, at, {base};")
    lines += [f"ld.shared.v2.b32 {{w{2 * j}, w{2 * j + 1}}}, [at + {32 * j}];" for j in range(16)]
    for j in range(16):
        lines.append(
            f"{widen(narrow, f'w{2 * j}')} mov.f32 g0, even; mov.f32 g1, odd; {widen(narrow, f'w{2 * j + 1}')}"
        )
        for i in range(4 * j, 4 * j + 4):
            lines.append(f"fma.rn.f32 {out[i]}, {values[i]}, g{i & 1}, {'odd' if i & 1 else 'even'};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _affine_bf16(outputs, inputs):
    return _affine_packed("bf16", outputs, inputs)


@gluon.constexpr_function
def _affine_fp16(outputs, inputs):
    return _affine_packed("fp16", outputs, inputs)


TIED = gl.constexpr(",".join(["=f"] * 64 + [str(i) for i in range(64)] + ["r", "r", "~{memory}"]))


@gluon.jit
def affine(acc, tid, wide, packed, use_packed, dtype: gl.constexpr):
    """Reading shared memory is what the kernel has least time for, so 16-bit parameters are read as such."""
    asm: gl.constexpr = _affine_bf16 if dtype == gl.bfloat16 else _affine_fp16
    if use_packed:
        acc = gl.inline_asm(asm, TIED, [acc, tid, packed], tile_type(), is_pure=False)
    else:
        acc = gl.inline_asm(_affine, TIED, [acc, tid, wide], tile_type(), is_pure=False)
    return acc


# ---- statistics ------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def over_quad(names):
    """Text that sums values over the four lanes that have the same rows."""
    lines = []
    for lane in (2, 1):
        lines += [f"shfl.sync.bfly.b32 t{i}, {name}, {lane}, 0x1f, 0xffffffff;" for i, name in enumerate(names)]
        lines += [f"add.f32 {name}, {name}, t{i};" for i, name in enumerate(names)]
    return lines


@gluon.constexpr_function
def sums(values, powers):
    """Text for the sums of values (s0, s1) and of their squares (q0, q1) in a thread's two rows, each in two chains."""
    lines = []
    for i, v in enumerate(values):
        r, start = _register_row(i) + 2 * (i & 1), i < 4
        if 1 in powers:
            lines.append(f"mov.f32 s{r}, {v};" if start else f"add.f32 s{r}, s{r}, {v};")
        if 2 in powers:
            lines.append(f"mul.f32 q{r}, {v}, {v};" if start else f"fma.rn.f32 q{r}, {v}, {v}, q{r};")
    names = [n for n, power in (("s", 1), ("q", 2)) if power in powers]
    return lines + [f"add.f32 {n}{r}, {n}{r}, {n}{r + 2};" for n in names for r in range(2)]


@gluon.constexpr_function
def _squares(outputs, inputs):
    (square,), (values,) = outputs, inputs
    lines = ["{ .reg .f32 q<4>, t<2>;", *sums(values, (2,)), *over_quad(["q0", "q1"])]
    return "\n".join([*lines, f"mov.f32 {square[0]}, q0; mov.f32 {square[1]}, q1; }}"])


@gluon.constexpr_function
def deviations(values, mean, width):
    """Text for q0 and q1 as sums of squared deviations from the mean, of the columns before `width`, a multiple of 8."""
    lines = [f"mov.f32 q{r}, 0f00000000;" for r in range(4)]
    for i, v in enumerate(values):
        r = _register_row(i)
        if i % 4 == 0:
            lines.append(f"setp.gt.s32 p, {width}, {2 * i};")
        lines.append(f"sub.f32 t0, {v}, {mean[r]}; @p fma.rn.f32 q{r + 2 * (i & 1)}, t0, t0, q{r + 2 * (i & 1)};")
    return lines + [f"add.f32 q{r}, q{r}, q{r + 2};" for r in range(2)] + over_quad(["q0", "q1"])


@gluon.constexpr_function
def _moments(outputs, inputs):
    """Mean and squared deviations of the columns before `width`; those after are 0. In one pass over the values, and where
    that loses digits, as with a large mean or in constant rows, in a second one."""
    (mean, square), (values, (width,), (share,)) = outputs, inputs
    lines = [f"{{ .reg .f32 s<4>, q<4>, t<4>, many; .reg .pred p, c; .reg .b32 w; mov.f32 many, 0f{CAUTIOUS};"]
    lines += [*sums(values, (1, 2)), *over_quad(["s0", "q0", "s1", "q1"])]
    for r in range(2):
        lines.append(f"mul.f32 {mean[r]}, s{r}, {share}; mul.f32 t{r}, s{r}, {mean[r]};")
        lines.append(f"sub.f32 {square[r]}, q{r}, t{r}; mul.f32 t{r + 2}, {square[r]}, many;")
    lines.append("setp.gt.f32 p, t0, t2; setp.gt.f32 c, t1, t3; or.pred p, p, c; vote.sync.any.pred p, p, 0xffffffff;")
    lines += ["@!p bra done;", *deviations(values, mean, width)]
    return "\n".join([*lines, *(f"mov.f32 {square[r]}, q{r};" for r in range(2)), "done: mov.b32 w, 0; }"])


@gluon.jit
def statistics(acc, width, share, NORM: gl.constexpr):
    """Per row: mean (0 for RMS) and sum of squared deviations from it, over the CTA's columns. `share`: 1 / width."""
    kind: gl.constexpr = row_type()
    if NORM == RMS:
        square = gl.inline_asm(_squares, ("=&f", "f"), [acc], kind, is_pure=False)
        mean = gl.zeros_like(square)
    else:
        args = [acc, width, share]
        mean, square = gl.inline_asm(_moments, ("=&f", "=&f", "f", "r", "f"), args, (kind, kind), is_pure=False)
    return mean, square


# ---- whole rows ------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _send(peers, inputs):
    """Lane l of a quad sends its rows' part to CTAs l and l + 4; lane 0 of the warp says how much the warp awaits."""
    (tid,), (buffer,), (bar,), (rank,), (members,), mean, square = inputs
    values = f"{{{mean[0]}, {square[0]}, {mean[1]}, {square[1]}}}"
    send = f"""setp.lt.u32 p, peer, {members};
    @p mapa.shared::cluster.u32 to, at, peer;
    @p mapa.shared::cluster.u32 done, {bar}, peer;
    @p st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {values}, [done];
    """
    return f"""{{ .reg .pred p; .reg .b32 peer, at, to, done;
    and.b32 at, {tid}, 31; setp.eq.u32 p, at, 0; shl.b32 at, {members}, 7;
    @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [{bar}], at;
    and.b32 at, {tid}, 124; shl.b32 at, at, 2; add.u32 at, at, {buffer};
    shl.b32 peer, {rank}, 9; add.u32 at, at, peer;
    and.b32 peer, {tid}, 3;
    {"add.u32 peer, peer, 4; ".join([send] * (peers // 4))} }}"""


@gluon.constexpr_function
def _send4(outputs, inputs):
    return _send(4, inputs)


@gluon.constexpr_function
def _send8(outputs, inputs):
    return _send(8, inputs)


@gluon.jit
def send(tid, buffer, bar, rank, members, mean, square, PEERS: gl.constexpr):
    """The CTA's part of a warp's rows to everyone."""
    asm: gl.constexpr = _send4 if PEERS == 4 else _send8
    args = [tid, buffer, bar, rank, members, mean, square]
    gl.inline_asm(asm, "r,r,r,r,r,f,f,f,f,~{memory}", args, (), is_pure=False)


@gluon.constexpr_function
def part_of(peer, members):
    """Text that loads a part of a thread's two rows, zeros where there is no such peer."""
    lines = [f"setp.gt.u32 p, {members}, {peer};", *(f"mov.f32 v{i}, 0f00000000;" for i in range(4))]
    return [*lines, f"@p ld.shared.v4.f32 {{v0, v1, v2, v3}}, [at + {512 * peer}];"]


@gluon.constexpr_function
def collected(layer, peers, outputs, inputs):
    """Chan's formula, part by part: a part of n columns after m others moves the mean by n / (m + n) of their difference and
    adds m n / (m + n) of its square. All parts have 128 columns but the last, `part` and `weight` are its two factors."""
    (mean, square), ((tid,), (buffer,), (members,), (part,), (weight,)) = outputs, inputs
    lines = ["{ .reg .pred p, q; .reg .b32 at; .reg .f32 d, f, g, v<4>;"]
    lines.append(f"and.b32 at, {tid}, 124; shl.b32 at, at, 2; add.u32 at, at, {buffer};")
    for j in range(peers):
        lines += part_of(j, members)
        if j == 0:
            lines += [f"mov.f32 {mean[i]}, v{2 * i}; mov.f32 {square[i]}, v{2 * i + 1};" for i in range(2)]
            continue
        if layer:
            lines.append(f"setp.eq.u32 q, {members}, {j + 1};")
            for name, values, ending in (("f", SHARES, part), ("g", WEIGHTS, weight)):
                lines.append(f"selp.f32 {name}, 0f{values[j]}, 0f00000000, p; selp.f32 {name}, {ending}, {name}, q;")
        for i in range(2):
            lines.append(f"add.f32 {square[i]}, {square[i]}, v{2 * i + 1};")
            if layer:
                lines.append(f"sub.f32 d, v{2 * i}, {mean[i]}; fma.rn.f32 {mean[i]}, d, f, {mean[i]};")
                lines.append(f"mul.f32 v{2 * i}, d, g; fma.rn.f32 {square[i]}, v{2 * i}, d, {square[i]};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def collect_text(layer, peers):
    operands = [f"${i}" for i in range(9)]
    return collected(layer, peers, (operands[:2], operands[2:4]), tuple((o,) for o in operands[4:]))


@gluon.jit
def collect(tid, buffer, bar, phase, members, part, weight, NORM: gl.constexpr, PEERS: gl.constexpr):
    """(mean, or 0 for RMS; sum of squared deviations from it) of whole rows, once all parts are there."""
    kind: gl.constexpr = row_type()
    asm: gl.constexpr = collect_text(NORM != RMS, PEERS)
    await_phase(bar, phase)
    args = [tid, buffer, members, part, weight]
    return gl.inline_asm(asm, "=&f,=&f,=&f,=&f,r,r,r,f,f,~{memory}", args, (kind, kind), is_pure=False)


@gluon.constexpr_function
def _scales(outputs, inputs):
    (rstd, shift), (mean, square, (inverse,), (eps,)) = outputs, inputs
    lines = []
    for r in range(2):
        lines.append(f"fma.rn.f32 {rstd[r]}, {square[r]}, {inverse}, {eps}; rsqrt.approx.f32 {rstd[r]}, {rstd[r]};")
        lines.append(f"mul.f32 {shift[r]}, {mean[r]}, {rstd[r]}; neg.f32 {shift[r]}, {shift[r]};")
    return "\n".join(lines)


@gluon.constexpr_function
def _normalise(outputs, inputs):
    (out,), (values, scale, shift) = outputs, inputs
    text = "fma.rn.f32 {}, {}, {}, {};"
    return "\n".join(
        text.format(o, v, scale[_register_row(i)], shift[_register_row(i)]) for i, (o, v) in enumerate(zip(out, values))
    )


@gluon.constexpr_function
def _normalise_rms(outputs, inputs):
    (out,), (values, scale) = outputs, inputs
    return "\n".join(f"mul.f32 {o}, {v}, {scale[_register_row(i)]};" for i, (o, v) in enumerate(zip(out, values)))


@gluon.jit
def scales(mean, square, inverse, eps):
    """(rstd, -mean * rstd) of whole rows."""
    kind: gl.constexpr = row_type()
    args = [mean, square, inverse, eps]
    return gl.inline_asm(_scales, ("=&f", "=&f", "f", "f", "f", "f"), args, (kind, kind), is_pure=True)


@gluon.jit
def normalise(acc, rstd, shift, NORM: gl.constexpr):
    if NORM == RMS:
        hat = gl.inline_asm(_normalise_rms, ("=f", "f", "f"), [acc, rstd], tile_type(), is_pure=True)
    else:
        hat = gl.inline_asm(_normalise, ("=f", "f", "f", "f"), [acc, rstd, shift], tile_type(), is_pure=True)
    return hat


@gluon.constexpr_function
def _save(layer, narrow, outputs, inputs):
    """Lane l of a quad stores one value: rstd of its first or second row, or the mean of one less the row's first value, as
    that is read where z is kept."""
    (t,), (mean_ptr,), (rstd_ptr,), mean, rstd, values, (row,), (end,), (groups,) = inputs
    lines = ["{ .reg .pred p, q, m; .reg .b32 v, u; .reg .f32 a, f, d<2>; .reg .b16 h; .reg .b64 at, n;"]
    lines.append(f"and.b32 v, {t}, 96; shr.u32 v, v, 1; and.b32 u, {t}, 28; shr.u32 u, u, 2; add.u32 v, v, u;")
    lines.append(f"and.b32 u, {t}, 1; setp.ne.u32 q, u, 0; shl.b32 u, u, 3; add.u32 v, v, u; add.u32 v, v, {row};")
    lines.append(f"and.b32 u, {t}, 2; setp.ne.u32 m, u, 0; setp.lt.s32 p, v, {end}; mov.b64 at, {rstd_ptr};")
    lines.append(f"selp.f32 a, {rstd[1]}, {rstd[0]}, q; mul.wide.s32 n, v, {groups}; shl.b64 n, n, 2;")
    for r in range(2 if layer else 0):
        lines.append(f"shfl.sync.idx.b32 f, {values[2 * r]}, 0, 0x1c1f, 0xffffffff;")
        lines.append(f"cvt.rn.{narrow}.f32 h, f; cvt.f32.{narrow} f, h; sub.f32 d{r}, {mean[r]}, f;")
    if layer:
        lines.append(f"selp.f32 f, d1, d0, q; @m mov.f32 a, f; @m mov.b64 at, {mean_ptr};")
    else:
        lines.append("setp.eq.and.u32 p, u, 0, p;")
    return "\n".join([*lines, "add.s64 at, at, n; @p st.global.f32 [at], a; }"])


@gluon.constexpr_function
def _save_rms(outputs, inputs):
    return _save(False, "", outputs, inputs)


@gluon.constexpr_function
def _save_bf16(outputs, inputs):
    return _save(True, "bf16", outputs, inputs)


@gluon.constexpr_function
def _save_fp16(outputs, inputs):
    return _save(True, "f16", outputs, inputs)


@gluon.jit
def save(tid, mean_ptr, rstd_ptr, mean, rstd, acc, row, end, groups, NORM: gl.constexpr, dtype: gl.constexpr):
    """`row`: the block's first; `groups` values per row."""
    layer: gl.constexpr = _save_bf16 if dtype == gl.bfloat16 else _save_fp16
    asm: gl.constexpr = _save_rms if NORM == RMS else layer
    args = [tid, mean_ptr, rstd_ptr, mean, rstd, acc, row, end, groups]
    gl.inline_asm(asm, ("r", "l", "l", "f", "f", "f", "r", "r", "r"), args, (), is_pure=False)
