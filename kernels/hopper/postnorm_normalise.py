"""Of the post-norm kernel (postnorm_kernels.py): statistics of whole rows, the norm and what is written."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .postnorm_messages import await_messages, next_base, sequence_base, slot
from .postnorm_multiply import BM, CHUNK, HALF, LAYER

# Bits of `form`: write zhat, write z (never both), add a residual to y, store the statistics.
HAT, SUM, AFTER, SAVE = gl.constexpr(1), gl.constexpr(2), gl.constexpr(4), gl.constexpr(8)


@gluon.jit
def gather(stats_s, s_full, z_free, space, group, NC, N, step, tiles, eps, w_first, w_end,
           NORM: gl.constexpr, BN: gl.constexpr, PEERS: gl.constexpr):  # fmt: skip
    """Statistics of whole rows of warpgroups w_first to w_end: one message per row and CTA of the group, merged by
    Chan's formula, 32 rows at a time."""
    sequence = sequence_base(space) + 1
    inverse = 1.0 / N.to(gl.float32)
    for _ in range(group, tiles, step):
        parity = (sequence & 1) ^ 1
        for w in range(w_first, w_end):
            for i in range(2):
                m, q, peer = await_messages(slot(space, group, w, parity, 0, NC) + 64 * i, NC, sequence, PEERS)
                if i == 0:
                    mbarrier.wait(z_free.index(w), parity ^ 1)  # the statistics of the tile before have been read
                if NORM == LAYER:
                    count = gl.minimum(gl.maximum(N - peer * BN, 0), BN).to(gl.float32)[None, :]
                    mean = gl.sum(m * count, axis=1) * inverse
                    d = m - mean[:, None]
                    q += count * d * d
                    stats_s.index(4 * w + 2 + i).store(mean)
                q = gl.where((peer < NC)[None, :], q, 0.0)
                rstd = gl.rsqrt(gl.sum(q, axis=1) * inverse + eps)
                stats_s.index(4 * w + i).store(rstd)
            mbarrier.arrive(s_full.index(w))
        sequence += 1


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
    """Shared-memory accesses by hand: every thread writes where it has read, so none needs a barrier, and loads and
    stores of a descriptor would get one each time."""
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
def normalise_pair(z_s, at, chunk, offsets, gamma_s, beta_s, mean_ptr, rstd_ptr, after_ptr, after_pitch, mean, rstd,
                   row, rank, M, N, form, NORM: gl.constexpr, BN: gl.constexpr, SR: gl.constexpr):  # fmt: skip
    """Two chunks of a strip. zhat takes the place of z in shared memory if it is written, and y if it is all that is
    written. Returns y."""
    L: gl.constexpr = packed(SR)
    dtype: gl.constexpr = z_s.dtype
    STRIPS: gl.constexpr = HALF // SR
    shift = -mean * rstd
    result = ()
    for c in gl.static_range(2):
        here = z_s.index(at + c * STRIPS)
        col = rank * BN + (chunk + c) * CHUNK
        even, odd = unpack(load_strip(here, offsets, SR), dtype)
        if c == 0:
            if ((form & SAVE) != 0) & (rank == 0) & (chunk == 0):
                save_statistics(mean_ptr, rstd_ptr, even, mean, rstd, row, M, NORM)
        even *= rstd[:, None]
        odd *= rstd[:, None]
        if NORM == LAYER:
            even += shift[:, None]
            odd += shift[:, None]
        if form & HAT:
            store_strip(here, offsets, pack(even, odd, dtype))
        even = even * gamma_s.index(2 * (chunk + c)).load(gl.SliceLayout(0, L))[None, :]
        odd = odd * gamma_s.index(2 * (chunk + c) + 1).load(gl.SliceLayout(0, L))[None, :]
        even += beta_s.index(2 * (chunk + c)).load(gl.SliceLayout(0, L))[None, :]
        odd += beta_s.index(2 * (chunk + c) + 1).load(gl.SliceLayout(0, L))[None, :]
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
def write_pair(desc, z_s, at, row, col, SR: gl.constexpr):
    """Store two chunks of a strip; all threads have written their share."""
    fence_async_shared()
    gl.barrier()
    tma.async_store(desc, [row, col], z_s.index(at))
    tma.async_store(desc, [row, col + CHUNK], z_s.index(at + HALF // SR))


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
                rstd = stats_s.index(2 * w * STRIPS + i).load(L)
                mean = stats_s.index((2 * w + 1) * STRIPS + i).load(L) if NORM == LAYER else gl.zeros_like(rstd)
                for chunk in range(0, NCH, 2):
                    at = (w * NCH + chunk) * STRIPS + i
                    col = rank * BN + chunk * CHUNK
                    y = normalise_pair(z_s, at, chunk, offsets, gamma_s, beta_s, mean_ptr, rstd_ptr, after_ptr,
                                       after_pitch, mean, rstd, row, rank, M, N, form, NORM, BN, SR)  # fmt: skip
                    if form & (HAT | SUM):
                        write_pair(side_desc, z_s, at, row, col, SR)
                        tma.store_wait(0)  # then y can take its place
                        gl.barrier()
                        store_strip(z_s.index(at), offsets, y[0])
                        store_strip(z_s.index(at + STRIPS), offsets, y[1])
                    write_pair(y_desc, z_s, at, row, col, SR)
            tma.store_wait(0)
            fence_async_shared()
            gl.barrier()
            if before:
                if tile + step < tiles:
                    load_residual(r_desc, z_s, r_full, (tile + step) * BM + w * HALF, rank, w, BN, SR)
            mbarrier.arrive(z_free.index(w))
        parity ^= 1
    next_base(space, base, (tiles + step - 1) // step)
