"""Of the post-norm kernel (postnorm_kernels.py): loads, main loop and the statistics of a CTA's columns."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .postnorm_messages import publish, sequence_base, slot

RMS, LAYER = gl.constexpr(1), gl.constexpr(2)
BM, HALF, BK, CHUNK = gl.constexpr(128), gl.constexpr(64), gl.constexpr(64), gl.constexpr(64)
SKEW = gl.constexpr(2)  # k-blocks that the second warpgroup starts behind the first


@gluon.constexpr_function
def accumulator(n):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, 16])


@gluon.jit
def advance(s, phase, ST: gl.constexpr):
    s += 1
    wrap = s == ST
    return gl.where(wrap, 0, s), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def halves(t):
    n: gl.constexpr = t.shape[1] // 2
    return t.reshape([t.shape[0], 2, n]).permute(0, 2, 1).split()


@gluon.jit
def chunks_of(acc, NCH: gl.constexpr):
    """The accumulator as a tuple of [64, 64] chunks."""
    L: gl.constexpr = accumulator(64)
    a, b = halves(acc)
    if NCH == 2:
        chunks = (gl.convert_layout(a, L, assert_trivial=True), gl.convert_layout(b, L, assert_trivial=True))
    else:
        a0, a1 = halves(a)
        b0, b1 = halves(b)
        chunks = (
            gl.convert_layout(a0, L, assert_trivial=True),
            gl.convert_layout(a1, L, assert_trivial=True),
            gl.convert_layout(b0, L, assert_trivial=True),
            gl.convert_layout(b1, L, assert_trivial=True),
        )
    return chunks


@gluon.jit
def load_operands(x_desc, w_desc, x_s, w_s, full, empty0, empty1, rank, first, step, tiles, KT,
                  BN: gl.constexpr, ST: gl.constexpr):  # fmt: skip
    s = 0
    phase = 0
    for tile in range(first, tiles, step):
        for k in range(KT):
            mbarrier.wait(empty0.index(s), phase ^ 1)
            mbarrier.wait(empty1.index(s), phase ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, (BM + BN) * BK * 2)
            tma.async_load(x_desc, [tile * BM, k * BK], bar, x_s.index(2 * s))
            tma.async_load(w_desc, [rank * BN, k * BK], bar, w_s.index(s))
            tma.async_load(x_desc, [tile * BM + HALF, k * BK], bar, x_s.index(2 * s + 1))
            s, phase = advance(s, phase, ST)


@gluon.jit
def product(x_s, w_s, full, empty, s, phase, KT, W: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr):
    acc = gl.zeros([HALF, BN], gl.float32, accumulator(BN))
    for k in range(KT):
        mbarrier.wait(full.index(s), phase)
        w = w_s.index(s)
        acc = warpgroup_mma(x_s.index(2 * s + W), w.permute((1, 0)), acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        before = gl.where(s == 0, ST - 1, s - 1)  # its product is done
        mbarrier.arrive(empty.index(before), pred=k > 0)
        s, phase = advance(s, phase, ST)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    last = gl.where(s == 0, ST - 1, s - 1)
    mbarrier.arrive(empty.index(last))
    return acc, s, phase


@gluon.constexpr_function
def partial_layout():
    """[64, 8]: four running sums per thread, two for each of its rows of an accumulator."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0], [0, 4]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 8],
    )


@gluon.constexpr_function
def _register_row(i):
    # Registers of an accumulator: bit 0 is the column's bit 0, bit 1 the row + 8.
    return (i >> 1) & 1


@gluon.constexpr_function
def _sum_asm(outputs, inputs):
    (dst,), (src, values) = outputs, inputs
    lines = []
    for i, v in enumerate(values):
        r = _register_row(i) + 2 * (i & 1)
        lines.append(f"add.rn.f32 {dst[r]}, {src[r] if i < 4 else dst[r]}, {v};")
    return "\n".join(lines)


@gluon.constexpr_function
def _square_asm(outputs, inputs):
    (dst,), (src, values, mean) = outputs, inputs
    lines = ["{ .reg .f32 d;"]
    for i, v in enumerate(values):
        r = _register_row(i) + 2 * (i & 1)
        lines.append(f"sub.rn.f32 d, {v}, {mean[_register_row(i)]};")
        lines.append(f"fma.rn.f32 {dst[r]}, d, d, {src[r] if i < 4 else dst[r]};")
    return "\n".join(lines + ["}"])


@gluon.constexpr_function
def _tail_square_asm(outputs, inputs):
    """The same for the columns before `width` only, of a chunk whose first column is `first`."""
    (dst,), (src, values, mean, (width,), (first,)) = outputs, inputs
    lines = ["{ .reg .f32 d; .reg .pred p; .reg .b32 w;", "mov.u32 w, %laneid; and.b32 w, w, 3; shl.b32 w, w, 1;"]
    lines.append(f"sub.s32 w, {width}, w; sub.s32 w, w, {first};")
    lines += [f"mov.f32 {d}, {s};" for d, s in zip(dst, src)]
    for i, v in enumerate(values):
        r = _register_row(i) + 2 * (i & 1)
        lines.append(f"sub.rn.f32 d, {v}, {mean[_register_row(i)]}; setp.gt.s32 p, w, {8 * (i >> 2) + (i & 1)};")
        lines.append(f"@p fma.rn.f32 {dst[r]}, d, d, {dst[r]};")
    return "\n".join(lines + ["}"])


@gluon.constexpr_function
def _plain_square_asm(outputs, inputs):
    (dst,), (src, values) = outputs, inputs
    lines = []
    for i, v in enumerate(values):
        r = _register_row(i) + 2 * (i & 1)
        lines.append(f"fma.rn.f32 {dst[r]}, {v}, {v}, {src[r] if i < 4 else dst[r]};")
    return "\n".join(lines)


@gluon.jit
def over_lanes(p):
    L: gl.constexpr = gl.SliceLayout(1, accumulator(64))
    return gl.convert_layout(gl.sum(p, axis=1), L, assert_trivial=True)


@gluon.jit
def statistics(chunks, width, NORM: gl.constexpr, NCH: gl.constexpr):
    """Per row: mean (0 for RMS) and sum of squared deviations from it, over the columns of this CTA. Columns at or past
    `width` are 0. Sums run within a thread, unlike gl.sum per chunk, so that lanes meet once per tile."""
    p = gl.zeros([HALF, 8], gl.float32, partial_layout())
    if NORM == LAYER:
        for c in gl.static_range(NCH):
            p = gl.inline_asm(_sum_asm, ("=&f", "f", "f"), [p, chunks[c]], p.type, is_pure=True)
        mean = over_lanes(p) * (1.0 / width.to(gl.float32))
        p = gl.zeros([HALF, 8], gl.float32, partial_layout())
        if width < NCH * CHUNK:
            for c in gl.static_range(NCH):
                args = [p, chunks[c], mean, width, gl.to_tensor(c * CHUNK)]
                p = gl.inline_asm(_tail_square_asm, ("=&f", "f", "f", "f", "r", "r"), args, p.type, is_pure=True)
        else:
            for c in gl.static_range(NCH):
                p = gl.inline_asm(_square_asm, ("=&f", "f", "f", "f"), [p, chunks[c], mean], p.type, is_pure=True)
        m2 = over_lanes(p)
    else:
        for c in gl.static_range(NCH):
            p = gl.inline_asm(_plain_square_asm, ("=&f", "f", "f"), [p, chunks[c]], p.type, is_pure=True)
        m2 = over_lanes(p)
        mean = gl.zeros_like(m2)
    return mean, m2


@gluon.jit
def multiply(x_s, w_s, z_s, bias_s, full, empty, empty0, z_full, z_free, r_full, space,
             group, rank, NC, width, step, tiles, KT, has_bias, before,
             W: gl.constexpr, NORM: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr):  # fmt: skip
    NCH: gl.constexpr = BN // CHUNK
    L: gl.constexpr = accumulator(64)
    s = 0
    phase = 0
    mine = slot(space, group, W, 0, rank, NC)
    sequence = sequence_base(space) + 1
    if W == 1:
        if KT * ((tiles - group + step - 1) // step) > SKEW:
            mbarrier.wait(empty0.index(SKEW - 1), 0)
    for _ in range(group, tiles, step):
        parity = (sequence & 1) ^ 1  # of the tiles so far: bases are even
        acc, s, phase = product(x_s, w_s, full, empty, s, phase, KT, W, BN, ST)
        chunks = chunks_of(acc, NCH)
        if has_bias:
            for c in gl.static_range(NCH):
                b = bias_s.index(c).load(gl.SliceLayout(0, L))
                chunks = put(chunks, c, chunks[c] + b[None, :], NCH)
        if before:
            mbarrier.wait(r_full.index(W), parity)
            for c in gl.static_range(NCH):
                r = z_s.index(W * NCH + c).load(L).to(gl.float32)
                chunks = put(chunks, c, chunks[c] + r, NCH)
        else:
            mbarrier.wait(z_free.index(W), parity ^ 1)
        mean, m2 = statistics(chunks, width, NORM, NCH)
        publish(mine + parity * (NC * 128), mean, m2, sequence)
        for c in gl.static_range(NCH):
            z_s.index(W * NCH + c).store(chunks[c].to(z_s.dtype))
        fence_async_shared()
        mbarrier.arrive(z_full.index(W))
        sequence += 1


@gluon.jit
def put(chunks, i: gl.constexpr, value, NCH: gl.constexpr):
    """The tuple with element i replaced."""
    if NCH == 2:
        result = (value if i == 0 else chunks[0], value if i == 1 else chunks[1])
    else:
        result = (
            value if i == 0 else chunks[0],
            value if i == 1 else chunks[1],
            value if i == 2 else chunks[2],
            value if i == 3 else chunks[3],
        )
    return result
