"""GEMM and row norm in one kernel, a row of the result spread over a group of CTAs (`cluster` of linear_norm).

    z = x W^T + bias (+ residual);  hat = rstd * (z - mean);  y = gamma * hat + beta (+ residual)

CTA r of a group of NC holds columns [r * BN, (r + 1) * BN) of the result and walks over row blocks of 128 together
with its group. Partitions of a CTA, each a function below:

    multiply (twice)   4 warps, 64 rows each: main loop, bias, statistics of its columns, z to shared memory in 16 bits
    gather             1 or 2 warps: statistics of whole rows from the group's messages
    normalise          2 or 4 warps: y (and zhat or z) to memory, in strips of 16 rows per warp
    load_operands      1 warp: tiles of x, and of W unless W's slice stays in shared memory (RES > 0)

`multiply` goes on with its next tile as soon as z is in shared memory, so the exchange, the norm and the stores run
under the main loops of both warpgroups. The group talks through L2 (postnorm_messages.py), not through a cluster's
shared memory: a GPU with 132 SMs holds 30 clusters of 4 but 33 groups, and NC need not be a power of two. All CTAs of
the grid must be resident at once, which a cooperative launch guarantees.

Layout facts: a chunk is 64 columns, the width of a 128-byte swizzled row of 16-bit values. Splitting an accumulator
into chunks moves no value to another thread; a thread holds columns 2 (lane % 4) + {0, 1} + 8 j of rows lane / 4 and
lane / 4 + 8.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .postnorm_messages import await_messages, next_base, publish, sequence_base, slot
from .variants import Tile, Variant

RMS, LAYER = gl.constexpr(1), gl.constexpr(2)
BM, HALF, BK, CHUNK = gl.constexpr(128), gl.constexpr(64), gl.constexpr(64), gl.constexpr(64)
ABSENT, NARROW, WIDE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # kinds of a parameter vector
# Bits of `form`: write zhat, write z (never both), add a residual to y, store the statistics.
HAT, SUM, AFTER, SAVE = gl.constexpr(1), gl.constexpr(2), gl.constexpr(4), gl.constexpr(8)
SKEW = gl.constexpr(2)  # k-blocks that the second warpgroup starts behind the first
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


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


# ---- operands --------------------------------------------------------------------------------------------------------


@gluon.jit
def load_operands(x_desc, w_desc, x_s, w_s, full, empty0, empty1, resident, rank, first, step, tiles, KT,
                  BN: gl.constexpr, ST: gl.constexpr, RES: gl.constexpr):  # fmt: skip
    if RES > 0:
        mbarrier.expect(resident, RES * BN * BK * 2)
        for block in gl.static_range(RES):  # those past K are filled with zeros
            tma.async_load(w_desc, [rank * BN, block * BK], resident, w_s.index(block))
    s = 0
    phase = 0
    for tile in range(first, tiles, step):
        for k in range(KT):
            mbarrier.wait(empty0.index(s), phase ^ 1)
            mbarrier.wait(empty1.index(s), phase ^ 1)
            bar = full.index(s)
            if RES > 0:
                mbarrier.expect(bar, BM * BK * 2)
            else:
                mbarrier.expect(bar, (BM + BN) * BK * 2)
            tma.async_load(x_desc, [tile * BM, k * BK], bar, x_s.index(2 * s))
            if RES == 0:
                tma.async_load(w_desc, [rank * BN, k * BK], bar, w_s.index(s))
            tma.async_load(x_desc, [tile * BM + HALF, k * BK], bar, x_s.index(2 * s + 1))
            s, phase = advance(s, phase, ST)


# ---- main loop and statistics ----------------------------------------------------------------------------------------


@gluon.jit
def product(
    x_s, w_s, full, empty, s, phase, KT, W: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr, RES: gl.constexpr
):
    acc = gl.zeros([HALF, BN], gl.float32, accumulator(BN))
    for k in range(KT):
        mbarrier.wait(full.index(s), phase)
        w = w_s.index(k if RES > 0 else s)
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
    """The same for the columns before `width` only."""
    (dst,), (src, values, mean, (width,)) = outputs, inputs
    lines = ["{ .reg .f32 d; .reg .pred p; .reg .b32 w;", "mov.u32 w, %laneid; and.b32 w, w, 3; shl.b32 w, w, 1;"]
    lines.append(f"sub.s32 w, {width}, w;")
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
        mean = over_lanes(p) / width.to(gl.float32)
        p = gl.zeros([HALF, 8], gl.float32, partial_layout())
        if width < NCH * CHUNK:
            for c in gl.static_range(NCH):
                left = width - c * CHUNK
                args = [p, chunks[c], mean, left]
                p = gl.inline_asm(_tail_square_asm, ("=&f", "f", "f", "f", "r"), args, p.type, is_pure=True)
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
def multiply(x_s, w_s, z_s, bias_s, full, empty, empty0, resident, z_full, z_free, r_full, space,
             group, rank, NC, width, step, tiles, KT, has_bias, before,
             W: gl.constexpr, NORM: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr, RES: gl.constexpr):  # fmt: skip
    NCH: gl.constexpr = BN // CHUNK
    L: gl.constexpr = accumulator(64)
    s = 0
    phase = 0
    sequence = sequence_base(space) + 1
    parity = 0
    if RES > 0:
        mbarrier.wait(resident, 0)
    if W == 1:
        if KT * ((tiles - group + step - 1) // step) > SKEW:
            mbarrier.wait(empty0.index(SKEW - 1), 0)
    for _ in range(group, tiles, step):
        acc, s, phase = product(x_s, w_s, full, empty, s, phase, KT, W, BN, ST, RES)
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
        publish(slot(space, group, W, parity, rank, NC), mean, m2, sequence)
        for c in gl.static_range(NCH):
            z_s.index(W * NCH + c).store(chunks[c].to(z_s.dtype))
        fence_async_shared()
        mbarrier.arrive(z_full.index(W))
        sequence += 1
        parity ^= 1


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


# ---- norm ------------------------------------------------------------------------------------------------------------


@gluon.jit
def gather(stats_s, s_full, z_free, space, group, rank, NC, N, step, tiles, eps,
           NORM: gl.constexpr, BN: gl.constexpr, SR: gl.constexpr):  # fmt: skip
    """Statistics of whole rows: one message per row and CTA of the group, merged by Chan's formula."""
    STRIPS: gl.constexpr = HALF // SR
    sequence = sequence_base(space) + 1
    parity = 0
    inverse = 1.0 / N.to(gl.float32)
    for _ in range(group, tiles, step):
        for w in range(2):
            mbarrier.wait(z_free.index(w), parity ^ 1)
            for i in range(STRIPS):
                at = slot(space, group, w, parity, 0, NC) + 2 * i * SR
                m, q, peer = await_messages(at, NC, sequence, SR)
                if NORM == LAYER:
                    count = gl.minimum(gl.maximum(N - peer * BN, 0), BN).to(gl.float32)[None, :]
                    mean = gl.sum(m * count, axis=1) * inverse
                    d = m - mean[:, None]
                    q += count * d * d
                    stats_s.index((2 * w + 1) * STRIPS + i).store(mean)
                q = gl.where((peer < NC)[None, :], q, 0.0)
                rstd = gl.rsqrt(gl.sum(q, axis=1) * inverse + eps)
                stats_s.index(2 * w * STRIPS + i).store(rstd)
            mbarrier.arrive(s_full.index(w))
        sequence += 1
        parity ^= 1


@gluon.constexpr_function
def packed(rows):
    """Layout of a strip of a chunk, [rows, 32] pairs of 16-bit values: 8 lanes cover a row with 16 bytes each."""
    return gl.BlockedLayout([1, 4], [4, 8], [rows // 16, 1], [1, 0])


@gluon.constexpr_function
def pairs_type(rows):
    return gl.distributed_type(gl.int32, [rows, 32], packed(rows))


@gluon.constexpr_function
def _load_asm(outputs, inputs):
    (values,), ((base,), offsets) = outputs, inputs
    lines = ["{ .reg .b32 a;"]
    for j, offset in enumerate(offsets):
        lines.append(f"add.u32 a, {base}, {offset}; ld.shared.v4.b32 {{{', '.join(values[4 * j : 4 * j + 4])}}}, [a];")
    return "\n".join(lines + ["}"])


@gluon.constexpr_function
def _store_asm(outputs, inputs):
    (base,), offsets, values = inputs
    lines = ["{ .reg .b32 a;"]
    for j, offset in enumerate(offsets):
        lines.append(f"add.u32 a, {base}, {offset}; st.shared.v4.b32 [a], {{{', '.join(values[4 * j : 4 * j + 4])}}};")
    return "\n".join(lines + ["}"])


@gluon.jit
def strip_offsets(SR: gl.constexpr):
    """Byte offsets of a thread's 16-byte pieces, one per row, in a strip with 128-byte swizzling."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [SR // 16, 1], [1, 0])
    rows = gl.arange(0, SR, gl.SliceLayout(1, L))[:, None]
    pieces = gl.arange(0, 8, gl.SliceLayout(0, L))[None, :]
    return rows * 128 + (pieces ^ (rows & 7)) * 16


@gluon.jit
def load_strip(strip, offsets, SR: gl.constexpr):
    """Shared-memory accesses by hand: every thread writes where it has read, so none needs a barrier, and loads and stores
    of a descriptor would get one each time."""
    return gl.inline_asm(_load_asm, ("=&r", "r", "r"), [strip, offsets], pairs_type(SR), is_pure=False)


@gluon.jit
def store_strip(strip, offsets, values):
    gl.inline_asm(_store_asm, ("r", "r", "r"), [strip, offsets, values], is_pure=False)


@gluon.jit
def unpack(pairs, dtype: gl.constexpr):
    """Even and odd columns as fp32."""
    if dtype == gl.bfloat16:
        text: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    else:
        text: gl.constexpr = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
    return gl.inline_asm_elementwise(text, "=&f,=&f,r", [pairs], dtype=(gl.float32, gl.float32), is_pure=True, pack=1)


@gluon.jit
def pack(even, odd, dtype: gl.constexpr):
    if dtype == gl.bfloat16:
        text: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        text: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(text, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def save_statistics(mean_ptr, rstd_ptr, z, mean, rstd, row, M, NORM: gl.constexpr):
    """rstd, and the mean relative to the row's first element; z has the even columns of the rows' first chunk."""
    rows = row + gl.arange(0, z.shape[0], gl.SliceLayout(1, z.type.layout))
    gl.store(rstd_ptr + rows, rstd, mask=rows < M)
    if NORM == LAYER:
        cols = gl.arange(0, z.shape[1], gl.SliceLayout(0, z.type.layout))
        first = gl.sum(gl.where((cols == 0)[None, :], z, 0.0), axis=1)
        gl.store(mean_ptr + rows, mean - first, mask=rows < M)


@gluon.jit
def load_after(ptr, pitch, row, col, M, N, SR: gl.constexpr):
    """Pairs of the residual that is added after the norm; `pitch` is its row stride in pairs."""
    rows = row + gl.arange(0, SR, gl.SliceLayout(1, packed(SR)))
    pairs = col // 2 + gl.arange(0, CHUNK // 2, gl.SliceLayout(0, packed(SR)))
    offsets = rows.to(gl.int64)[:, None] * pitch + pairs[None, :]
    return gl.load(ptr + offsets, mask=(rows < M)[:, None] & (pairs < N // 2)[None, :], other=0)


@gluon.jit
def normalise_strip(z_s, at, offsets, gamma_s, beta_s, mean_ptr, rstd_ptr, after_ptr, after_pitch, mean, rstd, row, rank,
                    M, N, form, NORM: gl.constexpr, BN: gl.constexpr, SR: gl.constexpr):  # fmt: skip
    """zhat takes the place of z in shared memory if it is written, and y if it is all that is written. Returns y."""
    L: gl.constexpr = packed(SR)
    dtype: gl.constexpr = z_s.dtype
    STRIPS: gl.constexpr = HALF // SR
    shift = -mean * rstd
    result = ()
    for c in gl.static_range(BN // CHUNK):
        here = z_s.index(at + c * STRIPS)
        col = rank * BN + c * CHUNK
        even, odd = unpack(load_strip(here, offsets, SR), dtype)
        if c == 0:
            if ((form & SAVE) != 0) & (rank == 0):
                save_statistics(mean_ptr, rstd_ptr, even, mean, rstd, row, M, NORM)
        even *= rstd[:, None]
        odd *= rstd[:, None]
        if NORM == LAYER:
            even += shift[:, None]
            odd += shift[:, None]
        if form & HAT:
            store_strip(here, offsets, pack(even, odd, dtype))
        even = even * gamma_s.index(2 * c).load(gl.SliceLayout(0, L))[None, :]
        odd = odd * gamma_s.index(2 * c + 1).load(gl.SliceLayout(0, L))[None, :]
        even += beta_s.index(2 * c).load(gl.SliceLayout(0, L))[None, :]
        odd += beta_s.index(2 * c + 1).load(gl.SliceLayout(0, L))[None, :]
        if form & AFTER:
            more_even, more_odd = unpack(load_after(after_ptr, after_pitch, row, col, M, N, SR), dtype)
            even += more_even
            odd += more_odd
        y = pack(even, odd, dtype)
        if (form & (HAT | SUM)) == 0:
            store_strip(here, offsets, y)
        result = result + (y,)
    return result


@gluon.jit
def write_strip(desc, z_s, at, row, rank, BN: gl.constexpr, SR: gl.constexpr):
    """Store the strip's chunks; all threads have written their share."""
    fence_async_shared()
    gl.barrier()
    for c in gl.static_range(BN // CHUNK):
        tma.async_store(desc, [row, rank * BN + c * CHUNK], z_s.index(at + c * (HALF // SR)))


@gluon.jit
def load_residual(r_desc, z_s, r_full, row, rank, w, BN: gl.constexpr, SR: gl.constexpr):
    """The residual that is added before the norm, to where z of the tile will be."""
    STRIPS: gl.constexpr = HALF // SR
    mbarrier.expect(r_full.index(w), HALF * BN * 2)
    for c in gl.static_range(BN // CHUNK):
        for i in gl.static_range(STRIPS):
            at = [row + i * SR, rank * BN + c * CHUNK]
            tma.async_load(r_desc, at, r_full.index(w), z_s.index((w * (BN // CHUNK) + c) * STRIPS + i))


@gluon.jit
def normalise(y_desc, side_desc, r_desc, z_s, stats_s, gamma_s, beta_s, z_full, s_full, z_free, r_full, space, mean_ptr,
              rstd_ptr, after_ptr, after_pitch, group, rank, M, N, step, tiles, before, form,
              NORM: gl.constexpr, BN: gl.constexpr, SR: gl.constexpr):  # fmt: skip
    NCH: gl.constexpr = BN // CHUNK
    STRIPS: gl.constexpr = HALF // SR
    L: gl.constexpr = gl.SliceLayout(1, packed(SR))
    base = sequence_base(space)
    offsets = strip_offsets(SR)
    parity = 0
    if before:
        for w in range(2):
            load_residual(r_desc, z_s, r_full, group * BM + w * HALF, rank, w, BN, SR)
    for tile in range(group, tiles, step):
        for w in range(2):
            mbarrier.wait(z_full.index(w), parity)
            mbarrier.wait(s_full.index(w), parity)
            for i in range(STRIPS):
                row = tile * BM + w * HALF + i * SR
                at = w * NCH * STRIPS + i
                rstd = stats_s.index(2 * w * STRIPS + i).load(L)
                mean = stats_s.index((2 * w + 1) * STRIPS + i).load(L) if NORM == LAYER else gl.zeros_like(rstd)
                y = normalise_strip(z_s, at, offsets, gamma_s, beta_s, mean_ptr, rstd_ptr, after_ptr, after_pitch, mean, rstd,
                                    row, rank, M, N, form, NORM, BN, SR)  # fmt: skip
                if form & (HAT | SUM):
                    write_strip(side_desc, z_s, at, row, rank, BN, SR)
                    tma.store_wait(0)  # then y can take its place
                    gl.barrier()
                    for c in gl.static_range(NCH):
                        store_strip(z_s.index(at + c * STRIPS), offsets, y[c])
                write_strip(y_desc, z_s, at, row, rank, BN, SR)
            tma.store_wait(0)
            fence_async_shared()
            gl.barrier()
            if before:
                if tile + step < tiles:
                    load_residual(r_desc, z_s, r_full, (tile + step) * BM + w * HALF, rank, w, BN, SR)
            mbarrier.arrive(z_free.index(w))
        parity ^= 1
    next_base(space, base, (tiles + step - 1) // step)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@gluon.jit
def load_vector(ptr, kind, default: gl.constexpr, col, N, target, dtype: gl.constexpr, BN: gl.constexpr, SPLIT: gl.constexpr):
    """A CTA's slice of bias, gamma or beta as fp32 in shared memory; SPLIT: even and odd columns of a chunk apart."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    PARTS: gl.constexpr = 2 if SPLIT else 1
    WIDTH: gl.constexpr = CHUNK // PARTS
    for c in gl.static_range(BN // WIDTH):
        cols = col + (c // PARTS) * CHUNK + PARTS * gl.arange(0, WIDTH, L) + c % PARTS
        value = gl.full([WIDTH], default, gl.float32, L)
        if kind == WIDE:
            value = gl.load(ptr + cols, mask=cols < N, other=default)
        elif kind == NARROW:
            narrow = ptr.to(gl.pointer_type(dtype), bitcast=True)
            value = gl.load(narrow + cols, mask=cols < N, other=default).to(gl.float32)
        target.index(c).store(value)


@gluon.jit(do_not_specialize=["M", "N", "KT", "NC", "groups"])
def postnorm_kernel(x_desc, w_desc, r_desc, y_desc, side_desc, bias_ptr, gamma_ptr, beta_ptr, mean_ptr, rstd_ptr,
                    after_ptr, space, after_pitch, M, N, KT, NC, groups, bias_kind, gamma_kind, beta_kind,
                    before, form, eps,
                    NORM: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr, RES: gl.constexpr, SR: gl.constexpr,
                    REGS: gl.constexpr):  # fmt: skip
    NCH: gl.constexpr = BN // CHUNK
    dtype: gl.constexpr = x_desc.dtype
    pid = gl.program_id(0)
    group = pid // NC
    rank = pid - group * NC
    tiles = (M + BM - 1) // BM
    width = gl.minimum(N - rank * BN, BN)
    x_s = gl.allocate_shared_memory(dtype, [2 * ST, HALF, BK], x_desc.layout)
    w_s = gl.allocate_shared_memory(dtype, [RES if RES > 0 else ST, BN, BK], w_desc.layout)
    z_s = gl.allocate_shared_memory(dtype, [2 * NCH, HALF, CHUNK], y_desc.layout)
    strips_s = z_s.reinterpret(dtype, [2 * NCH * (HALF // SR), SR, CHUNK], y_desc.layout)
    stats_s = gl.allocate_shared_memory(gl.float32, [4 * (HALF // SR), SR], VECTOR)  # rstd and mean
    bias_s = gl.allocate_shared_memory(gl.float32, [NCH, CHUNK], VECTOR)
    gamma_s = gl.allocate_shared_memory(gl.float32, [2 * NCH, CHUNK // 2], VECTOR)  # even columns, odd columns
    beta_s = gl.allocate_shared_memory(gl.float32, [2 * NCH, CHUNK // 2], VECTOR)
    full = mbarrier.allocate_mbarrier(batch=ST)
    empty0 = mbarrier.allocate_mbarrier(batch=ST)
    empty1 = mbarrier.allocate_mbarrier(batch=ST)
    resident = mbarrier.allocate_mbarrier()
    z_full = mbarrier.allocate_mbarrier(batch=2)
    z_free = mbarrier.allocate_mbarrier(batch=2)
    s_full = mbarrier.allocate_mbarrier(batch=2)
    r_full = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(ST):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty0.index(i), count=1)
        mbarrier.init(empty1.index(i), count=1)
    mbarrier.init(resident, count=1)
    for i in gl.static_range(2):
        mbarrier.init(z_full.index(i), count=1)
        mbarrier.init(z_free.index(i), count=1)
        mbarrier.init(s_full.index(i), count=1)
        mbarrier.init(r_full.index(i), count=1)
    load_vector(bias_ptr, bias_kind, 0.0, rank * BN, N, bias_s, dtype, BN, False)
    load_vector(gamma_ptr, gamma_kind, 1.0, rank * BN, N, gamma_s, dtype, BN, True)
    load_vector(beta_ptr, beta_kind, 0.0, rank * BN, N, beta_s, dtype, BN, True)
    gl.barrier()
    has_bias = bias_kind != ABSENT
    gl.warp_specialize([
        (multiply, (x_s, w_s, z_s, bias_s, full, empty0, empty0, resident, z_full, z_free, r_full, space,
                    group, rank, NC, width, groups, tiles, KT, has_bias, before, gl.constexpr(0), NORM, BN, ST, RES)),
        (multiply, (x_s, w_s, z_s, bias_s, full, empty1, empty0, resident, z_full, z_free, r_full, space,
                    group, rank, NC, width, groups, tiles, KT, has_bias, before, gl.constexpr(1), NORM, BN, ST, RES)),
        (normalise, (y_desc, side_desc, r_desc, strips_s, stats_s, gamma_s, beta_s, z_full, s_full, z_free, r_full, space,
                     mean_ptr, rstd_ptr, after_ptr, after_pitch, group, rank, M, N, groups, tiles, before, form, NORM, BN, SR)),
        (gather, (stats_s, s_full, z_free, space, group, rank, NC, N, groups, tiles, eps, NORM, BN, SR)),
        (load_operands, (x_desc, w_desc, x_s, w_s, full, empty0, empty1, resident, rank, group, groups, tiles, KT,
                         BN, ST, RES)),
    ], [4, SR // 16, SR // 32, 1], REGS)  # fmt: skip


def _variant(dtype, norm, bn, stages, resident):
    """With 256 columns per CTA a thread of `multiply` holds 128 accumulators, which ptxas takes with 12 warps only:
    then `normalise` is 2 warps. REGS are those of all partitions but the first, which gets the rest."""
    rows, maxnreg, regs = (32, 168, [176, 152, 152, 152]) if bn == 256 else (64, 128, [128, 176, 80, 80])
    kind = {"rms": 1, "layer": 2}[norm]
    tiles = {"x_desc": (64, 64), "w_desc": (bn, 64), "r_desc": (rows, 64), "y_desc": (rows, 64), "side_desc": (rows, 64)}
    args = {name: Tile(dtype, box) for name, box in tiles.items()}
    args |= dict.fromkeys("bias_ptr gamma_ptr beta_ptr mean_ptr rstd_ptr".split(), "*fp32:16")
    args |= {"after_ptr": "*i32:16", "space": "*i64:16", "after_pitch": "i64:4"}
    args |= dict.fromkeys("M N KT NC groups bias_kind gamma_kind beta_kind before form".split(), "i32")
    args |= {
        "N": "i32:8",
        "eps": "fp32",
        "NORM": kind,
        "BN": bn,
        "ST": stages,
        "RES": resident,
        "SR": rows,
        "REGS": regs,
    }
    shape = f"resident{resident}" if resident else "stream"
    return Variant(f"postnorm_{norm}_{dtype}_{bn}_{shape}", postnorm_kernel, args, num_warps=4, maxnreg=maxnreg)


SHAPES = [(256, 3, 0), (128, 3, 8), (128, 5, 6), (128, 7, 4)]  # columns per CTA, stages, resident k-blocks
VARIANTS = [_variant(d, n, *shape) for d in ("bf16", "fp16") for n in ("rms", "layer") for shape in SHAPES]
