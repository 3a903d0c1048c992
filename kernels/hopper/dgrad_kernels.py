"""Gradient of x in norm_linear, and of z between two linears: one GEMM whose epilogue is the norm's backward.

    g = dy W'                                   gradient at xhat = rstd * (x - mean); W' holds the norm's weight
    delta = mean_k(g * xhat)
    dx = rstd * (g - xhat * delta) + add        for layer norm W' has centred rows, so that mean_k(g) = 0 already

add is a further gradient of x, of the residual stream that x comes from, or absent; the sum is rounded once.

As sum_k(g) = 0, sum_k(g * xhat) is rstd * sum_k(g * x), without the mean.

WHOLE: a CTA, or the two CTAs of a cluster, hold a whole row of g and take delta from the accumulators. Otherwise delta
is known before, from dy and the saved y, and a row may be spread over any number of tiles.

Partitions of a CTA, which works on tiles of 128 rows:

    loader      one warp; TMA copies into a ring of slots: first the operands of the product, then x, 64 rows a slot, then
                add, 64 columns of both consumers a slot
    consumers   two warpgroups of 64 rows each, which share slots but never wait for each other: one's epilogue runs
                under the other's matrix products

With MC = 2, one multicast brings W' to two CTAs that share columns. The first issues it once all four consumers have left
the slot; the second waits for its own two, so it may run ahead by the slots in a row that come without a multicast. Were
those more than the ring's four, it could leave a slot twice while the first waits for its last use, and the parity would be
back where it was. x takes two slots, add four more: with add there is neither multicast nor cluster.

x reaches registers as soon as it arrives, packed as it is, and its slot goes back to the loader before the epilogue. So
192 of a thread's 240 registers hold g and x, and the epilogue works in chunks of 64 columns, which is how add comes.

Layout facts: W' is read as it lies, [N, K], with the summed dimension outside (wgmma transposes). Splitting an
accumulator into chunks moves no value to another thread. A thread holds columns 2 (lane % 4) + {0, 1} + 8 j of rows
lane / 4 and lane / 4 + 8; in the order of its registers bit 0 is the column, bit 1 the second row. The middle dimension
of a [64, NC, columns] tensor is the CTA of the cluster.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    cluster,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .variants import Tile, Variant

ROWS = gl.constexpr(64)  # of a consumer
STEP = gl.constexpr(64)  # values of the summed dimension in a slot
CHUNK = gl.constexpr(64)  # columns of one TMA store
BUFFERS = gl.constexpr(2)  # epilogue buffers per consumer
CONSTANT = gl.constexpr(1048576.0)  # a row of up to 8192 16-bit values with a mean of so many deviations is constant
MESSAGE = gl.constexpr(64)  # one fp32 per row, from each CTA of a cluster to the other


@gluon.constexpr_function
def accumulator_layout(nc, mc, columns):
    split = [[0, 1]] if nc == 2 else [[1, 0]] if mc == 2 else []
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16], cga_layout=split
    )


@gluon.constexpr_function
def quad_layout(nc, mc, registers, lanes, columns):
    """[64 * MC, NC, columns] with rows as in an accumulator."""
    return gl.DistributedLinearLayout(
        reg_bases=registers,
        lane_bases=[*lanes, [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[[0, 1, 0]] if nc == 2 else [[64, 0, 0]] if mc == 2 else [],
        shape=[64 * mc, nc, columns],
    )


@gluon.constexpr_function
def chunk_layout(nc, mc):
    registers = [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]]
    return quad_layout(nc, mc, registers, [[0, 0, 2], [0, 0, 4]], 64)


@gluon.constexpr_function
def lane_layout(nc, mc):
    """[64 * MC, NC, 4]: one value per lane of a quad for each of its rows."""
    return quad_layout(nc, mc, [[8, 0, 0]], [[0, 0, 1], [0, 0, 2]], 4)


# ---- registers -------------------------------------------------------------------------------------------------------


@gluon.jit
def chunks(t):
    """[64, NC, n] as a tuple of [64, NC, 64]."""
    n: gl.constexpr = t.shape[2] // 2
    if n < CHUNK:
        return (gl.convert_layout(t, chunk_layout(t.shape[1], t.shape[0] // 64), assert_trivial=True),)
    else:
        a, b = t.reshape([t.shape[0], t.shape[1], 2, n]).permute((0, 1, 3, 2)).split()
        return chunks(a) + chunks(b)


@gluon.jit
def columns_of(t0, t1, NC: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr):
    """Chunks of the one or two parts that a CTA's columns have."""
    parts = chunks(t0.reshape([t0.shape[0], NC, P0]))
    if P1 > 0:
        parts = parts + chunks(t1.reshape([t1.shape[0], NC, P1]))
    return parts


@gluon.jit
def widen(x):
    """16-bit values in fp32; a pair of bf16 takes one shift and one mask."""
    if x.dtype == gl.bfloat16:
        asm: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        bits = gl.inline_asm_elementwise(asm, "=r,=r,r", [x], dtype=gl.int32, is_pure=True, pack=2)
        return bits.to(gl.float32, bitcast=True)
    else:
        return x.to(gl.float32)


@gluon.jit
def widen_again(x, zero):
    """The same in a form that ptxas does not merge with `widen`: it would keep all fp32 copies and spill them."""
    if x.dtype == gl.bfloat16:
        asm: gl.constexpr = "prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;"
        bits = gl.inline_asm_elementwise(asm, "=r,=r,r", [x], dtype=gl.int32, is_pure=True, pack=2)
        return bits.to(gl.float32, bitcast=True)
    else:
        asm: gl.constexpr = "xor.b32 $0, $1, $2;"
        same = gl.inline_asm_elementwise(asm, "=r,r,r,r", [x, zero], dtype=x.dtype, is_pure=True, pack=2)
        return same.to(gl.float32)


@gluon.constexpr_function
def dot_asm(outputs, inputs):
    (out,), (start, a, b) = outputs, inputs
    lines = []
    for i in range(len(a)):
        row = (i >> 1) & 1
        lines.append(f"fma.rn.f32 {out[row]}, {a[i]}, {b[i]}, {(start if i in (0, 2) else out)[row]};")
    return "\n".join(lines)


@gluon.jit
def add_products(dot, a, b):
    """dot + the products of a chunk, row by row; in one block, so that few of the products' operands live at a time."""
    return gl.inline_asm(dot_asm, ("=&f", "f", "f", "f"), [dot, a, b], dot.type)


@gluon.constexpr_function
def exchange_asm(outputs, inputs):
    """The lanes of a quad hold the same two values and its first lane sends them. Addresses come as those of CTA 0."""
    (out,), (value, buffer, barrier, phase) = outputs, inputs
    return f"""{{
 .reg .pred p; .reg .u32 t, quad, own, other, from, done, to, ready; .reg .f32 a, b;
 mov.u32 t, %tid.x; and.b32 t, t, 127; shr.u32 quad, t, 2; shl.b32 quad, quad, 3;
 mov.u32 own, %cluster_ctarank; xor.b32 other, own, 1;
 mapa.shared::cluster.u32 from, {buffer[0]}, own; mapa.shared::cluster.u32 done, {barrier[0]}, own;
 mapa.shared::cluster.u32 to, {buffer[0]}, other; mapa.shared::cluster.u32 ready, {barrier[0]}, other;
 add.u32 from, from, quad; add.u32 to, to, quad;
 setp.eq.u32 p, t, 0;
 @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [done], 256;
 and.b32 t, t, 3; setp.eq.u32 p, t, 0;
 @p st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [to], {{{value[0]}, {value[1]}}}, [ready];
WAIT:
 mbarrier.try_wait.parity.shared::cta.b64 p, [done], {phase[0]};
 @!p bra WAIT;
 ld.shared.v2.f32 {{a, b}}, [from];
 add.f32 {out[0]}, {value[0]}, a; add.f32 {out[1]}, {value[1]}, b;
}}"""


@gluon.jit
def across_cluster(value, buffers, barriers, count, W: gl.constexpr):
    """value + the other CTA's. Two buffers in turn suffice: the other CTA sends for exchange i + 2 after it has seen
    what this one sends for i + 1, and that is sent after i was read."""
    at = W * 2 + (count & 1)
    args = [value, buffers.index(at), barriers.index(at), (count >> 1) & 1]
    return gl.inline_asm(exchange_asm, ("=&f", "f", "r", "r", "r"), args, value.type)


# ---- ring ------------------------------------------------------------------------------------------------------------


@gluon.jit
def advance(slot, phase, SLOTS: gl.constexpr):
    slot += 1
    wrap = slot == SLOTS
    return gl.where(wrap, 0, slot), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def load(desc0, desc1, row, col, width: gl.constexpr, bar, b0, b1, P1: gl.constexpr):
    """64 rows of a matrix, the columns of this CTA."""
    tma.async_load(desc0, [row, col], bar, b0)
    if P1 > 0:
        tma.async_load(desc1, [row, col + width], bar, b1)


@gluon.jit
def rows_in(buffers, i, desc):
    """A buffer as a place for rows, which are split over the cluster where those of W' or dy are not."""
    return buffers.index(i).reinterpret(desc.dtype, desc.block_shape, desc.layout)


@gluon.jit
def chunk_column(col, i: gl.constexpr, NC: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr):
    """Where chunk i of a CTA's columns is. The two chunks of a cluster are one tile to TMA, which takes the second CTA's
    to be one chunk further; it is P0 or P1 further and the rest is added here."""
    rank = 0
    if NC > 1:
        rank = gl.inline_asm("mov.u32 $0, %cluster_ctarank;", "=r", [], gl.int32, is_pure=True)
    if i * CHUNK < P0:
        return col + rank * (P0 - CHUNK) + i * CHUNK
    else:
        return col + NC * P0 + rank * (P1 - CHUNK) + (i * CHUNK - P0)


@gluon.jit
def await_free(free0, free1, both, slot, phase, MC: gl.constexpr):
    mbarrier.wait(free0.index(slot), phase ^ 1)
    mbarrier.wait(free1.index(slot), phase ^ 1)
    if MC > 1:
        mbarrier.wait(both.index(slot), phase ^ 1)


@gluon.jit
def release(free, both, slot, MC: gl.constexpr):
    mbarrier.arrive(free.index(slot))
    if MC > 1:
        mbarrier.arrive(both.index(slot))


@gluon.jit
def load_dy(dy0_desc, dy1_desc, dy2_desc, piece, row, n, bar, buffer, PIECES: gl.constexpr):
    """A tile of dy, which with PIECES may lie in memory as up to three matrices of `piece` columns each."""
    if PIECES:
        if n < piece:
            tma.async_load(dy0_desc, [row, n], bar, buffer)
        else:
            if n < 2 * piece:
                tma.async_load(dy1_desc, [row, n - piece], bar, buffer)
            else:
                tma.async_load(dy2_desc, [row, n - 2 * piece], bar, buffer)
    else:
        tma.async_load(dy0_desc, [row, n], bar, buffer)


@gluon.jit
def loader(
    dy0_desc, dy1_desc, dy2_desc, piece, w0_desc, w1_desc, x0_desc, x1_desc, add_desc, a_s, b0_s, b1_s, full, free0,
    free1, both, tiles, col_tiles, steps, NC: gl.constexpr, MC: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr,
    SLOTS: gl.constexpr, PIECES: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    width: gl.constexpr = NC * P0
    x_bytes: gl.constexpr = x0_desc.nbytes_per_cta + (x1_desc.nbytes_per_cta if P1 > 0 else 0)  # as of a step's W'
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = (tile // col_tiles) * (2 * MC * ROWS)
        col = (tile % col_tiles) * (NC * (P0 + P1))
        for step in range(steps):
            await_free(free0, free1, both, slot, phase, MC)
            bar = full.index(slot)
            mbarrier.expect(bar, x_bytes + 2 * dy0_desc.nbytes_per_cta)
            load_dy(dy0_desc, dy1_desc, dy2_desc, piece, row, step * STEP, bar, a_s.index(2 * slot), PIECES)
            if MC > 1:
                tma.async_load(w0_desc, [step * STEP, col], bar, b0_s.index(slot), multicast=True)
            else:
                load(w0_desc, w1_desc, step * STEP, col, width, bar, b0_s.index(slot), b1_s.index(slot), P1)
            below = row + MC * ROWS
            load_dy(dy0_desc, dy1_desc, dy2_desc, piece, below, step * STEP, bar, a_s.index(2 * slot + 1), PIECES)
            slot, phase = advance(slot, phase, SLOTS)
        for part in gl.static_range(2):
            await_free(free0, free1, both, slot, phase, MC)
            bar = full.index(slot)
            mbarrier.expect(bar, x_bytes)
            if MC > 1:
                tma.async_load(x0_desc, [row + part * MC * ROWS, col], bar, rows_in(b0_s, slot, x0_desc))
            else:
                load(x0_desc, x1_desc, row + part * ROWS, col, width, bar, b0_s.index(slot), b1_s.index(slot), P1)
            slot, phase = advance(slot, phase, SLOTS)
        if ADD:
            for i in gl.static_range((P0 + P1) // CHUNK):
                await_free(free0, free1, both, slot, phase, MC)
                bar = full.index(slot)
                mbarrier.expect(bar, 2 * add_desc.nbytes_per_cta)
                at = chunk_column(col, i, NC, P0, P1)
                tma.async_load(add_desc, [row, at], bar, rows_in(a_s, 2 * slot, add_desc))
                tma.async_load(add_desc, [row + MC * ROWS, at], bar, rows_in(a_s, 2 * slot + 1, add_desc))
                slot, phase = advance(slot, phase, SLOTS)


@gluon.jit
def product(
    a_s, b0_s, b1_s, full, free, both, slot, phase, steps,
    NC: gl.constexpr, MC: gl.constexpr, W: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """g of 64 rows in one or two parts (without a second part that one is the first again)."""
    acc0 = gl.zeros([ROWS * MC, NC * P0], gl.float32, accumulator_layout(NC, MC, P0))
    acc1 = acc0
    if P1 > 0:
        acc1 = gl.zeros([ROWS, NC * P1], gl.float32, accumulator_layout(NC, 1, P1))
    for step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        a = a_s.index(2 * slot + W)
        acc0 = warpgroup_mma(a, b0_s.index(slot), acc0, use_acc=step > 0, is_async=True)
        if P1 > 0:
            acc1 = warpgroup_mma(a, b1_s.index(slot), acc1, use_acc=step > 0, is_async=True)
            acc0, acc1 = warpgroup_mma_wait(2, deps=(acc0, acc1))
        else:
            acc0 = warpgroup_mma_wait(1, deps=(acc0,))
        # Triton 3.9 treats a variable that remembers the slot across iterations as loop-invariant.
        last = gl.where(slot == 0, SLOTS - 1, slot - 1)
        mbarrier.arrive(free.index(last), pred=step > 0)
        if MC > 1:
            mbarrier.arrive(both.index(last), pred=step > 0)
        slot, phase = advance(slot, phase, SLOTS)
    if P1 > 0:
        acc0, acc1 = warpgroup_mma_wait(0, deps=(acc0, acc1))
    else:
        acc0 = warpgroup_mma_wait(0, deps=(acc0,))
    release(free, both, gl.where(slot == 0, SLOTS - 1, slot - 1), MC)
    return columns_of(acc0, acc1 if P1 > 0 else acc0, NC, P0, P1), slot, phase


@gluon.jit
def pass_on(full, free, both, slot, phase, MC: gl.constexpr, SLOTS: gl.constexpr):
    """A slot that is meant for the other consumer."""
    mbarrier.wait(full.index(slot), phase)
    release(free, both, slot, MC)
    return advance(slot, phase, SLOTS)


@gluon.jit
def take_rows(
    x_desc, b0_s, b1_s, full, free, both, slot, phase,
    NC: gl.constexpr, MC: gl.constexpr, W: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """This consumer's 64 rows of x, as they are."""
    if W == 1:
        slot, phase = pass_on(full, free, both, slot, phase, MC, SLOTS)
    mbarrier.wait(full.index(slot), phase)
    if MC > 1:
        t0 = rows_in(b0_s, slot, x_desc).load(accumulator_layout(NC, MC, P0))
    else:
        t0 = b0_s.index(slot).load(accumulator_layout(NC, 1, P0))
    t1 = t0
    if P1 > 0:
        t1 = b1_s.index(slot).load(accumulator_layout(NC, 1, P1))
    fence_async_shared()
    release(free, both, slot, MC)
    slot, phase = advance(slot, phase, SLOTS)
    if W == 0:
        slot, phase = pass_on(full, free, both, slot, phase, MC, SLOTS)
    return columns_of(t0, t1, NC, P0, P1), slot, phase


@gluon.jit
def take_chunk(
    desc, a_s, full, free, both, slot, phase, NC: gl.constexpr, MC: gl.constexpr, W: gl.constexpr, SLOTS: gl.constexpr
):
    """The next 64 columns of add."""
    mbarrier.wait(full.index(slot), phase)
    t = rows_in(a_s, 2 * slot + W, desc).load(accumulator_layout(NC, MC, CHUNK))
    fence_async_shared()
    release(free, both, slot, MC)
    slot, phase = advance(slot, phase, SLOTS)
    return chunks(t.reshape([ROWS * MC, NC, CHUNK]))[0], slot, phase


# ---- consumers -------------------------------------------------------------------------------------------------------


@gluon.jit
def store_chunk(
    values, desc, buffers, row, col,
    i: gl.constexpr, NC: gl.constexpr, W: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr,
):  # fmt: skip
    buffer = buffers.index(W * BUFFERS + i % BUFFERS)
    tma.store_wait(BUFFERS - 1)
    gl.barrier()
    buffer.store(values.to(desc.dtype).reshape([values.shape[0], NC * CHUNK]))
    fence_async_shared()
    gl.barrier()
    tma.async_store(desc, [row, chunk_column(col, i, NC, P0, P1)], buffer)


@gluon.jit
def consumer(
    a_s, b0_s, b1_s, c_s, full, free, free0, both, x_desc, messages, arrived, dx_desc, x_ptr, mean_ptr, rstd_ptr,
    delta_ptr, stride_x, M, inverse_k, tiles, col_tiles, steps,
    NC: gl.constexpr, MC: gl.constexpr, W: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, SLOTS: gl.constexpr,
    SKEW: gl.constexpr, LAYER: gl.constexpr, WHOLE: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    R: gl.constexpr = gl.SliceLayout(2, chunk_layout(NC, MC))
    slot = 0
    phase = 0
    count = 0
    if W == 1 and SKEW > 0:
        mbarrier.wait(free0.index(SKEW - 1), 0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = (tile // col_tiles) * (2 * MC * ROWS) + W * (MC * ROWS)
        col = (tile % col_tiles) * (NC * (P0 + P1))
        # What the epilogue needs of a row travels while the product is made.
        rows = gl.arange(0, ROWS * MC, gl.SliceLayout(1, R))[:, None] + gl.zeros([ROWS * MC, NC], gl.int32, R) + row
        live = rows < M
        rstd = gl.load(rstd_ptr + rows, mask=live, other=0.0)
        if LAYER:
            first = gl.load(x_ptr + rows.to(gl.int64) * stride_x, mask=live, other=0.0)
            mean = gl.load(mean_ptr + rows, mask=live, other=0.0)
        if not WHOLE:
            delta = gl.load(delta_ptr + rows, mask=live, other=0.0)
        g, slot, phase = product(a_s, b0_s, b1_s, full, free, both, slot, phase, steps, NC, MC, W, P0, P1, SLOTS)
        x, slot, phase = take_rows(x_desc, b0_s, b1_s, full, free, both, slot, phase, NC, MC, W, P0, P1, SLOTS)
        if WHOLE:
            dot = gl.zeros([ROWS, NC, 4], gl.float32, lane_layout(NC, 1))
            for i in gl.static_range(len(g)):
                dot = add_products(dot, g[i], widen(x[i]))
            delta = gl.convert_layout(gl.sum(dot, axis=2), R, assert_trivial=True)
            if NC > 1:
                delta = across_cluster(delta, messages, arrived, count, W)
            delta = delta * rstd
        slope = -delta * inverse_k * rstd * rstd
        if LAYER:
            mean += first.to(gl.float32)
            slope = gl.where(gl.abs(mean) * rstd < CONSTANT, slope, 0.0)
            shift = -slope * mean
        for i in gl.static_range(len(g)):
            v = widen_again(x[i], M >> 31) if WHOLE else widen(x[i])
            if LAYER:
                v = v * slope[:, :, None] + shift[:, :, None]
            else:
                v = v * slope[:, :, None]
            v = g[i] * rstd[:, :, None] + v
            if ADD:
                more, slot, phase = take_chunk(dx_desc, a_s, full, free, both, slot, phase, NC, MC, W, SLOTS)
                v += widen(more)
            store_chunk(v, dx_desc, c_s, row, col, i, NC, W, P0, P1)
        count += 1
    tma.store_wait(0)


@gluon.jit
def dx_kernel(
    dy0_desc,  # [M, N]; with WHOLE it may be the first `piece` columns of dy
    dy1_desc,  # and these the next
    dy2_desc,
    piece,
    w0_desc,  # W' [N, K]; a CTA's columns come in parts of P0 and, with P1 > 0, P1
    w1_desc,
    x0_desc,  # [M, K]
    x1_desc,
    dx_desc,  # [M, K]
    add_desc,  # [M, K], read with ADD
    x_ptr,  # x again, for the first element of a row
    mean_ptr,  # [M] fp32, relative to that element (layer norm)
    rstd_ptr,  # [M] fp32
    delta_ptr,  # [M] fp32, K * delta; read without WHOLE
    stride_x,
    M,
    inverse_k,
    tiles,
    col_tiles,
    steps,
    NC: gl.constexpr,  # CTAs of a cluster that share rows
    MC: gl.constexpr,  # CTAs of a cluster that share columns: W' is multicast to them
    P0: gl.constexpr,
    P1: gl.constexpr,
    SLOTS: gl.constexpr,
    SKEW: gl.constexpr,  # slots that the second consumer starts behind the first
    LAYER: gl.constexpr,
    WHOLE: gl.constexpr,
    ADD: gl.constexpr,
):
    dtype: gl.constexpr = dy0_desc.dtype
    a_s = gl.allocate_shared_memory(dtype, [2 * SLOTS, ROWS * MC, STEP], dy0_desc.layout)
    b0_s = gl.allocate_shared_memory(dtype, [SLOTS, STEP, NC * P0], w0_desc.layout)
    b1_s = b0_s
    if P1 > 0:
        b1_s = gl.allocate_shared_memory(dtype, [SLOTS, STEP, NC * P1], w1_desc.layout)
    c_s = gl.allocate_shared_memory(dtype, [2 * BUFFERS, ROWS * MC, NC * CHUNK], dx_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=SLOTS)
    free0 = mbarrier.allocate_mbarrier(batch=SLOTS)
    free1 = mbarrier.allocate_mbarrier(batch=SLOTS)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free0.index(i), count=1)
        mbarrier.init(free1.index(i), count=1)
    both = full
    if MC > 1:  # in the first CTA, which issues the multicasts: the slot is free in all
        both = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout(cga_layout=[[0]]))
        for i in gl.static_range(SLOTS):
            mbarrier.init(both.index(i), count=2)
    messages = full
    arrived = full
    if NC > 1:
        layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=[[1]])
        messages = gl.allocate_shared_memory(gl.float32, [4, NC * MESSAGE], layout)
        arrived = mbarrier.allocate_mbarrier(batch=4)
        for i in gl.static_range(4):
            mbarrier.init(arrived.index(i), count=1)
    if NC * MC > 1:
        cluster.barrier()
    gl.warp_specialize(
        [
            (consumer, (a_s, b0_s, b1_s, c_s, full, free0, free0, both, x0_desc, messages, arrived, dx_desc, x_ptr,
                        mean_ptr, rstd_ptr, delta_ptr, stride_x, M, inverse_k, tiles, col_tiles, steps, NC, MC,
                        gl.constexpr(0), P0, P1, SLOTS, SKEW, LAYER, WHOLE, ADD)),
            (consumer, (a_s, b0_s, b1_s, c_s, full, free1, free0, both, x0_desc, messages, arrived, dx_desc, x_ptr,
                        mean_ptr, rstd_ptr, delta_ptr, stride_x, M, inverse_k, tiles, col_tiles, steps, NC, MC,
                        gl.constexpr(1), P0, P1, SLOTS, SKEW, LAYER, WHOLE, ADD)),
            (loader, (dy0_desc, dy1_desc, dy2_desc, piece, w0_desc, w1_desc, x0_desc, x1_desc, add_desc, a_s, b0_s, b1_s,
                      full, free0, free1, both, tiles, col_tiles, steps, NC, MC, P0, P1, SLOTS, WHOLE, ADD)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
    if NC * MC > 1:
        cluster.barrier()  # a CTA must not end while the other may still write into it


@triton.jit
def row_dots_kernel(
    dy_ptr,  # [M, N]
    y_ptr,  # [M, N] contiguous
    offset_ptr,  # [N] fp32: b'
    delta_ptr,  # [M] fp32: sum_n dy (y - b')
    M,
    N,
    stride_dy,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < M
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for n in range(0, N, BLOCK):
        cols = n + tl.arange(0, BLOCK)
        keep = live[:, None] & (cols < N)[None, :]
        dy = tl.load(dy_ptr + rows.to(tl.int64)[:, None] * stride_dy + cols[None, :], mask=keep, other=0.0)
        y = tl.load(y_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :], mask=keep, other=0.0)
        offset = tl.load(offset_ptr + cols, mask=cols < N, other=0.0)
        total += dy.to(tl.float32) * (y.to(tl.float32) - offset[None, :])
    tl.store(delta_ptr + rows, tl.sum(total, 1), mask=live)


# Forms by the longest row that they take: (NC, MC, P0, P1, slots, skew).
FORMS = {
    "128": (1, 1, 128, 0, 5, 2),
    "256": (1, 1, 256, 0, 4, 2),
    "384": (2, 1, 128, 64, 4, 2),
    "512": (2, 1, 256, 0, 4, 2),
    "any": (1, 2, 256, 0, 4, 2),
}


def layouts(nc, mc):
    """dy, W', rows."""
    same, rows, columns = [[0, 0]], [[1, 0]], [[0, 1]]
    splits = (same, columns, columns) if nc == 2 else (rows, same, rows) if mc == 2 else ([], [], [])
    return (gl.NVMMASharedLayout(128, 16, 2, cga_layout=split) for split in splits)


def variant(dtype, norm, form, add):
    nc, mc, p0, p1, slots, skew = FORMS[form]
    mc = 1 if add else mc  # see above: MC = 2 could deadlock
    dy, w, rows = layouts(nc, mc)
    args = {f"dy{i}_desc": Tile(dtype, (64 * mc, 64), dy) for i in range(3)} | {"piece": "i32"}
    args |= {f"w{i}_desc": Tile(dtype, (64, nc * (p or p0)), w) for i, p in enumerate((p0, p1))}
    args |= {f"x{i}_desc": Tile(dtype, (64 * mc, nc * (p or p0)), rows) for i, p in enumerate((p0, p1))}
    args |= {name: Tile(dtype, (64 * mc, nc * 64), rows) for name in ("dx_desc", "add_desc")}
    args |= {"x_ptr": f"*{dtype}", "mean_ptr": "*fp32", "rstd_ptr": "*fp32", "delta_ptr": "*fp32"}
    args |= {"stride_x": "i64", "M": "i32", "inverse_k": "fp32"}
    args |= {"tiles": "i32", "col_tiles": "i32", "steps": "i32"}
    args |= {"NC": nc, "MC": mc, "P0": p0, "P1": p1, "SLOTS": slots, "SKEW": skew}
    args |= {"LAYER": norm == "layer", "WHOLE": form != "any", "ADD": add}
    name = f"dx_{norm}_{dtype}_{form}{'_add' if add else ''}"
    return Variant(name, dx_kernel, args, num_ctas=nc * mc, maxnreg=168)


def variants():
    for dtype in ("bf16", "fp16"):
        for norm in ("rms", "layer"):
            for form in FORMS:
                for add in (False, True):
                    yield variant(dtype, norm, form, add)


def row_dots_variants():
    for dtype in ("bf16", "fp16"):
        args = {"dy_ptr": f"*{dtype}:16", "y_ptr": f"*{dtype}:16", "offset_ptr": "*fp32:16", "delta_ptr": "*fp32:16"}
        args |= {"M": "i32", "N": "i32:8", "stride_dy": "i64:8", "ROWS": 8, "BLOCK": 512}
        yield Variant(f"row_dots_{dtype}", row_dots_kernel, args)


VARIANTS = [*variants(), *row_dots_variants()]
