"""norm_linear as one GEMM whose rows are scaled: y = rstd * (x W'^T) + b', with the sums behind rstd taken on the way.

W' and b' hold the norm's affine part and, for layer norm, W' has centred rows (see fold_kernels.py), so that RMS and
LN share the epilogue. Partitions of a CTA, which works on tiles of 128 rows:

    loader      one warp; TMA copies of x and W into a ring of k-blocks (or of x alone, W staying in shared memory)
    consumers   two warpgroups of 64 rows each, with slots, epilogue buffers and barriers of their own: they never
                meet, so that one's epilogue runs under the other's matrix products
    statistics  two warps; read every k-block of a row block's first tile, sum its rows, store mean and rstd and hand
                the rows' scale to the consumers. In the consumers the sums would delay the next products, the more
                the fewer k-blocks a tile has.

In the sums a lane holds 8 neighbouring columns, and 8 lanes a row of a k-block; in the order of the registers bits 0 to
2 are the column, the others the row.
"""

import os
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from .variants import Tile, Variant

ROWS = gl.constexpr(64)  # of a consumer
BK = gl.constexpr(64)  # one swizzle atom of 128 bytes
CHUNK = gl.constexpr(64)  # columns of one TMA store
BUFFERS = gl.constexpr(2)  # epilogue buffers per consumer
PART = gl.constexpr(32)  # rows that the statistics read at a time


@gluon.constexpr_function
def accumulator_layout(columns):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def block_layout():
    """[32, 64], as the statistics read a k-block."""
    return gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])


@gluon.constexpr_function
def lane_layout():
    """[32, 8]: what each lane holds for its rows."""
    return gl.BlockedLayout([1, 1], [4, 8], [2, 1], [1, 0])


@gluon.constexpr_function
def row_layout():
    return gl.SliceLayout(1, lane_layout())


# ---- which tiles a program computes ----------------------------------------------------------------------------------


@gluon.aggregate
class Schedule:
    """The tiles of this program: turns of neighbouring tiles of a row block, of which the first takes the rows'
    statistics.

    Streamed W: turns of `group` tiles go round the programs; what is left after the last full round is dealt tile by
    tile. Every other program begins with what is dealt to it, else all programs would read new rows from DRAM at the
    same time, and then none.
    Resident W: a program keeps to one column of tiles, in turns of one tile.
    """

    columns: gl.tensor
    group: gl.tensor
    whole: gl.tensor  # turns of `group` tiles
    count: gl.tensor  # turns
    RESIDENT: gl.constexpr

    @gluon.jit
    def create(M, N, group, BN: gl.constexpr, RESIDENT: gl.constexpr):
        row_blocks = (M + 2 * ROWS - 1) // (2 * ROWS)
        columns = (N + BN - 1) // BN
        programs = gl.num_programs(0)
        pid = gl.program_id(0)
        if RESIDENT:
            whole = programs // columns
            count = (row_blocks - pid // columns + whole - 1) // whole
        else:
            whole = row_blocks * columns // (group * programs)
            rest = row_blocks * columns - whole * programs * group
            count = whole + (rest - pid + programs - 1) // programs
        return Schedule(columns, group, whole, count, RESIDENT)

    @gluon.jit
    def turn(self, i):
        """(row block, first column of tiles, number of tiles)"""
        programs = gl.num_programs(0)
        pid = gl.program_id(0)
        if self.RESIDENT:
            return pid // self.columns + i * self.whole, pid % self.columns, self.group
        else:
            i += gl.where((pid & 1) == 1, self.whole, 0)
            i = gl.where(i >= self.count, i - self.count, i)
            dealt = i >= self.whole
            tile = gl.where(dealt, self.whole * (programs * (self.group - 1)), 0) + i * programs + pid
            tile = gl.where(dealt, tile, tile * self.group)
            row = tile // self.columns
            return row, tile - row * self.columns, gl.where(dealt, 1, self.group)


@gluon.jit
def advance(slot, phase, SLOTS: gl.constexpr):
    slot += 1
    wrap = slot == SLOTS
    return gl.where(wrap, 0, slot), gl.where(wrap, phase ^ 1, phase)


# ---- loader ----------------------------------------------------------------------------------------------------------


@gluon.aggregate
class Shared:
    """Buffers and barriers of a CTA. Slot s of the ring holds k-block s of x for consumer c at x[2 * s + c]."""

    x: gl.shared_memory_descriptor
    w: gl.shared_memory_descriptor  # the first 128 or 256 columns of a tile
    v: gl.shared_memory_descriptor  # the next 128 of a tile of 384, else unused
    y: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty0: gl.shared_memory_descriptor
    empty1: gl.shared_memory_descriptor
    empty2: gl.shared_memory_descriptor  # the statistics' own
    loaded: gl.shared_memory_descriptor  # one barrier per k-block of a resident W
    scale: gl.shared_memory_descriptor  # [2, 128]: the rows' scales, of two row blocks in turn
    ready: gl.shared_memory_descriptor
    taken: gl.shared_memory_descriptor
    SLOTS: gl.constexpr
    RESIDENT: gl.constexpr  # k-blocks of W that stay, 0 if W is streamed


@gluon.jit
def load_resident(shared, w, column, steps, BN: gl.constexpr):
    gdc_wait()
    for k in range(steps):
        bar = shared.loaded.index(k)
        mbarrier.expect(bar, w.nbytes_per_cta)
        tma.async_load(w, [column * BN, k * BK], bar, shared.w.index(k))


@gluon.jit
def loader(shared, x, w, v, M, N, K, group, BN: gl.constexpr):
    WIDE: gl.constexpr = BN == 384
    RESIDENT: gl.constexpr = shared.RESIDENT > 0
    schedule = Schedule.create(M, N, group, BN, RESIDENT)
    steps = (K + BK - 1) // BK
    slot = 0
    phase = 0
    ahead = gl.minimum(shared.SLOTS, schedule.count * steps)  # copies of x that can start before W is there
    if not RESIDENT:
        gdc_wait()
    for i in range(schedule.count):
        row, column, tiles = schedule.turn(i)
        row *= 2 * ROWS
        for j in range(tiles):
            for k in range(steps):
                mbarrier.wait(shared.empty0.index(slot), phase ^ 1)
                mbarrier.wait(shared.empty1.index(slot), phase ^ 1)
                mbarrier.wait(shared.empty2.index(slot), phase ^ 1)
                bar = shared.full.index(slot)
                if RESIDENT:
                    mbarrier.expect(bar, 2 * x.nbytes_per_cta)
                    tma.async_load(x, [row, k * BK], bar, shared.x.index(2 * slot))
                    tma.async_load(x, [row + ROWS, k * BK], bar, shared.x.index(2 * slot + 1))
                    if i * steps + k == ahead - 1:
                        load_resident(shared, w, column, steps, BN)
                else:
                    more: gl.constexpr = v.nbytes_per_cta if WIDE else 0
                    mbarrier.expect(bar, 2 * x.nbytes_per_cta + w.nbytes_per_cta + more)
                    tma.async_load(x, [row, k * BK], bar, shared.x.index(2 * slot))
                    tma.async_load(w, [(column + j) * BN, k * BK], bar, shared.w.index(slot))
                    if WIDE:
                        tma.async_load(v, [(column + j) * BN + 256, k * BK], bar, shared.v.index(slot))
                    tma.async_load(x, [row + ROWS, k * BK], bar, shared.x.index(2 * slot + 1))
                slot, phase = advance(slot, phase, shared.SLOTS)


# ---- barriers --------------------------------------------------------------------------------------------------------


# By hand: those of the language synchronise the warpgroup around every arrival, here each warp is on its own.


@gluon.constexpr_function
def _arrive(outputs, inputs):
    (bar,), (wanted,) = inputs
    return f"""{{ .reg .pred p, q;
    setp.ne.b32 q, {wanted}, 0;
    elect.sync _|p, 0xffffffff;
    and.pred p, p, q;
    @p mbarrier.arrive.shared::cta.b64 _, [{bar}]; }}"""


@gluon.constexpr_function
def _await(outputs, inputs):
    (bar,), (phase,) = inputs
    return f"""{{ .reg .pred p;
    again: mbarrier.try_wait.parity.shared::cta.b64 p, [{bar}], {phase};
    @!p bra.uni again; }}"""


@gluon.jit
def release(bar, wanted):
    """Hand a slot back, once per warp."""
    gl.inline_asm(_arrive, "r,r,~{memory}", [bar, wanted.to(gl.int32)], (), is_pure=False)


@gluon.jit
def await_phase(bar, phase):
    gl.inline_asm(_await, "r,r,~{memory}", [bar, phase], (), is_pure=False)


# ---- statistics ------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _squares(outputs, inputs):
    (total,), (before, x) = outputs, inputs
    lines = []
    for i, value in enumerate(x):
        row = i >> 3
        lines.append(f"fma.rn.f32 {total[row]}, {value}, {value}, {before[row] if i % 8 == 0 else total[row]};")
    return "\n".join(lines)


@gluon.constexpr_function
def _shifted(outputs, inputs):
    (first, second), (shift, first0, second0, x) = outputs, inputs
    lines = ["{ .reg .f32 d;"]
    for i, value in enumerate(x):
        row = i >> 3
        a, b = (first0[row], second0[row]) if i % 8 == 0 else (first[row], second[row])
        lines.append(f"sub.rn.f32 d, {value}, {shift[row]};")
        lines.append(f"add.rn.f32 {first[row]}, {a}, d; fma.rn.f32 {second[row]}, d, d, {b};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _first_of_row(outputs, inputs):
    """From the first of 8 lanes to all of them."""
    (out,), (x,) = outputs, inputs
    return "\n".join(f"shfl.sync.idx.b32 {out[row]}, {x[8 * row]}, 0, 0x181f, 0xffffffff;" for row in range(len(out)))


@gluon.jit
def widened(a):
    """fp32 values of 16-bit ones. A pair of bf16 takes one shift and one mask."""
    if a.dtype == gl.bfloat16:
        bits = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [a], dtype=gl.int32, is_pure=True, pack=2
        )
        return bits.to(gl.float32, bitcast=True)
    else:
        return a.to(gl.float32)


@gluon.aggregate
class Sums:
    """Of 32 rows, per lane: sum of x^2, or of x - x_0 and its square, x_0 being the row's first value. So no
    E[x^2] - E[x]^2 with a large mean."""

    shift: gl.tensor
    first: gl.tensor
    second: gl.tensor
    LAYER: gl.constexpr

    @gluon.jit
    def start(LAYER: gl.constexpr):
        nothing = gl.zeros([PART, 8], gl.float32, lane_layout())
        return Sums(nothing, nothing, nothing, LAYER)

    @gluon.jit
    def add(self, x, left, FIRST: gl.constexpr):
        """With a k-block, of which `left` columns belong to the row; beyond its end TMA has put zeros."""
        values = widened(x.load(block_layout()))
        shift = self.shift
        first = self.first
        kind = self.shift.type
        if self.LAYER:
            if FIRST:
                shift = gl.inline_asm(_first_of_row, ("=f", "f"), [values], kind, is_pure=True)
            if left < BK:
                columns = gl.arange(0, BK, gl.SliceLayout(0, block_layout()))
                same = gl.convert_layout(gl.max(shift, axis=1), gl.SliceLayout(1, block_layout()), assert_trivial=True)
                values = gl.where((columns < left)[None, :], values, same[:, None])
            arguments = [shift, self.first, self.second, values]
            constraints: gl.constexpr = ("=&f", "=&f", "f", "f", "f", "f")
            first, second = gl.inline_asm(_shifted, constraints, arguments, (kind, kind), is_pure=True)
        else:
            second = gl.inline_asm(_squares, ("=&f", "f", "f"), [self.second, values], kind, is_pure=True)
        return Sums(shift, first, second, self.LAYER)

    @gluon.jit
    def finish(self, K, eps):
        """(mean relative to x_0, rstd) of each row, and the scale of its result: 0 for a row of equal values, whose
        product with centred weights is rounding alone."""
        reciprocal = 1.0 / K.to(gl.float32)
        mean = gl.sum(self.first, axis=1) * reciprocal
        variance = gl.sum(self.second, axis=1) * reciprocal
        if self.LAYER:
            variance = gl.maximum(variance - mean * mean, 0.0)
        rstd = gl.rsqrt(variance + eps)
        if self.LAYER:
            return mean, rstd, gl.where(variance > 0.0, rstd, 0.0)
        else:
            return mean, rstd, rstd


@gluon.jit
def add_block(s0, s1, s2, s3, x, left, FIRST: gl.constexpr):
    s0 = s0.add(x.slice(0, PART, dim=0), left, FIRST)
    s1 = s1.add(x.slice(PART, PART, dim=0), left, FIRST)
    s2 = s2.add(x.slice(2 * PART, PART, dim=0), left, FIRST)
    s3 = s3.add(x.slice(3 * PART, PART, dim=0), left, FIRST)
    fence_async_shared()  # what was read through registers, before the TMA copy that refills the slot
    return s0, s1, s2, s3


@gluon.jit
def hand_over(sums, buffer, part: gl.constexpr, mean_ptr, rstd_ptr, row, M, wanted, K, eps):
    mean, rstd, scale = sums.finish(K, eps)
    buffer.slice(part * PART, PART, dim=0).store(scale)
    rows = row + part * PART + gl.arange(0, PART, row_layout())
    keep = (rows < M) & wanted
    gl.store(rstd_ptr + rows, rstd, mask=keep)
    if sums.LAYER:
        gl.store(mean_ptr + rows, mean, mask=keep)


@gluon.jit
def statistics(shared, mean_ptr, rstd_ptr, M, N, K, group, eps, LAYER: gl.constexpr, BN: gl.constexpr,
               TURNS: gl.constexpr):  # fmt: skip
    schedule = Schedule.create(M, N, group, BN, shared.RESIDENT > 0)
    blocks = shared.x.reinterpret(shared.x.dtype, [shared.SLOTS, 2 * ROWS, BK], shared.x.layout)
    steps = (K + BK - 1) // BK
    slot = 0
    phase = 0
    for i in range(schedule.count):
        row, column, tiles = schedule.turn(i)
        row *= 2 * ROWS
        nothing = Sums.start(LAYER)
        await_phase(shared.full.index(slot), phase)
        s0, s1, s2, s3 = add_block(nothing, nothing, nothing, nothing, blocks.index(slot), K, True)
        release(shared.empty2.index(slot), steps > 0)
        slot, phase = advance(slot, phase, shared.SLOTS)
        for k in range(1, steps):
            await_phase(shared.full.index(slot), phase)
            s0, s1, s2, s3 = add_block(s0, s1, s2, s3, blocks.index(slot), K - k * BK, False)
            release(shared.empty2.index(slot), steps > 0)
            slot, phase = advance(slot, phase, shared.SLOTS)
        mbarrier.wait(shared.taken.index(i & 1), ((i >> 1) & 1) ^ 1)
        buffer = shared.scale.index(i & 1)
        first = column == 0  # each row once
        hand_over(s0, buffer, 0, mean_ptr, rstd_ptr, row, M, first, K, eps)
        hand_over(s1, buffer, 1, mean_ptr, rstd_ptr, row, M, first, K, eps)
        hand_over(s2, buffer, 2, mean_ptr, rstd_ptr, row, M, first, K, eps)
        hand_over(s3, buffer, 3, mean_ptr, rstd_ptr, row, M, first, K, eps)
        mbarrier.arrive(shared.ready.index(i & 1))
        if TURNS:
            for k in range((tiles - 1) * steps):
                await_phase(shared.full.index(slot), phase)
                release(shared.empty2.index(slot), steps > 0)
                slot, phase = advance(slot, phase, shared.SLOTS)


# ---- consumers -------------------------------------------------------------------------------------------------------


@gluon.jit
def multiply(shared, empty, slot, phase, steps, acc, more, W: gl.constexpr, WIDE: gl.constexpr):
    """Products of a tile, both operands from shared memory. One k-block is in flight while the next is issued; a slot is
    released when its products are done."""
    for k in range(steps):
        if shared.RESIDENT > 0:
            await_phase(shared.loaded.index(k), 0)
        await_phase(shared.full.index(slot), phase)
        x = shared.x.index(2 * slot + W)
        w = shared.w.index(k if shared.RESIDENT > 0 else slot).permute((1, 0))
        acc = warpgroup_mma(x, w, acc, use_acc=k > 0, is_async=True)
        if WIDE:
            more = warpgroup_mma(x, shared.v.index(slot).permute((1, 0)), more, use_acc=k > 0, is_async=True)
            acc, more = warpgroup_mma_wait(2, deps=(acc, more))
        else:
            acc = warpgroup_mma_wait(1, deps=(acc,))
        # (a name that keeps the slot of the step before would be taken for loop-invariant by the compiler)
        release(empty.index(gl.where(slot == 0, shared.SLOTS - 1, slot - 1)), k > 0)
        slot, phase = advance(slot, phase, shared.SLOTS)
    if WIDE:
        acc, more = warpgroup_mma_wait(0, deps=(acc, more))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    release(empty.index(gl.where(slot == 0, shared.SLOTS - 1, slot - 1)), steps > 0)
    return acc, more, slot, phase


@gluon.jit
def halves(x):
    """Left and right half of a tile; no value moves to another thread."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()


@gluon.jit
def offsets(offset_ptr, column):
    return gl.load(offset_ptr + column + gl.arange(0, CHUNK, gl.SliceLayout(0, accumulator_layout(CHUNK))))


@gluon.jit
def put(y, buffer, acc, scale, offset, row, column):
    layout: gl.constexpr = accumulator_layout(CHUNK)
    acc = gl.convert_layout(acc, layout, assert_trivial=True)
    result = gl.fma(acc, gl.broadcast(scale[:, None], acc)[0], gl.broadcast(offset[None, :], acc)[0])
    tma.store_wait(BUFFERS - 1)
    buffer.store(result.to(buffer.dtype))
    fence_async_shared()
    tma.async_store(y, [row, column], buffer)


@gluon.jit
def finish_tile(shared, y, offset_ptr, acc, more, scale, row, column, BN: gl.constexpr, W: gl.constexpr):
    left, right = halves(acc)
    if BN > 128:
        c0, c1 = halves(left)
        c2, c3 = halves(right)
        if BN == 384:
            c4, c5 = halves(more)
            parts = (c0, c1, c2, c3, c4, c5)
        else:
            parts = (c0, c1, c2, c3)
    else:
        parts = (left, right)
    offset = offsets(offset_ptr, column)
    for i in gl.static_range(BN // CHUNK):
        following = offset
        if i + 1 < BN // CHUNK:
            following = offsets(offset_ptr, column + (i + 1) * CHUNK)
        put(y, shared.y.index(BUFFERS * W + i % BUFFERS), parts[i], scale, offset, row, column + i * CHUNK)
        offset = following


@gluon.jit
def take_scale(shared, i, W: gl.constexpr):
    await_phase(shared.ready.index(i & 1), (i >> 1) & 1)
    rows = shared.scale.index(i & 1).slice(W * ROWS, ROWS, dim=0)
    scale = rows.load(gl.SliceLayout(1, accumulator_layout(CHUNK)))
    release(shared.taken.index(i & 1), i >= 0)
    return scale


@gluon.jit
def consumer(shared, empty, y, offset_ptr, M, N, K, group, W: gl.constexpr, BN: gl.constexpr, TURNS: gl.constexpr):
    WIDE: gl.constexpr = BN == 384
    FIRST: gl.constexpr = 256 if WIDE else BN
    schedule = Schedule.create(M, N, group, BN, shared.RESIDENT > 0)
    steps = (K + BK - 1) // BK
    slot = 0
    phase = 0
    gdc_wait()
    for i in range(schedule.count):
        row, column, tiles = schedule.turn(i)
        row = row * (2 * ROWS) + W * ROWS
        acc = gl.zeros([ROWS, FIRST], gl.float32, accumulator_layout(FIRST))
        more = gl.zeros([ROWS, 128], gl.float32, accumulator_layout(128)) if WIDE else 0
        acc, more, slot, phase = multiply(shared, empty, slot, phase, steps, acc, more, W, WIDE)
        scale = take_scale(shared, i, W)
        finish_tile(shared, y, offset_ptr, acc, more, scale, row, column * BN, BN, W)
        if TURNS:
            for j in range(1, tiles):
                acc, more, slot, phase = multiply(shared, empty, slot, phase, steps, acc, more, W, WIDE)
                finish_tile(shared, y, offset_ptr, acc, more, scale, row, (column + j) * BN, BN, W)
    tma.store_wait(0)


@gluon.jit
def lazy_kernel(
    x,  # [M, K]
    w,  # [N, K], rounded and, for layer norm, centred
    v,  # the same, with a box of 128 rows
    y,  # [M, N]
    offset_ptr,  # [N] fp32, readable up to the next multiple of BN
    mean_ptr,  # [M] fp32, relative to the row's first value; not used for RMS
    rstd_ptr,  # [M] fp32
    M,
    N,
    K,
    group,  # divides the number of column tiles
    eps,
    LAYER: gl.constexpr,
    BN: gl.constexpr,
    SLOTS: gl.constexpr,
    RESIDENT: gl.constexpr,
    TURNS: gl.constexpr,  # group may be more than 1
    REGS0: gl.constexpr, REGS1: gl.constexpr, REGS2: gl.constexpr,
):
    full = mbarrier.allocate_mbarrier(batch=SLOTS)
    empty0 = mbarrier.allocate_mbarrier(batch=SLOTS)
    empty1 = mbarrier.allocate_mbarrier(batch=SLOTS)
    empty2 = mbarrier.allocate_mbarrier(batch=SLOTS)
    loaded = mbarrier.allocate_mbarrier(batch=RESIDENT if RESIDENT > 0 else 1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty0.index(i), count=4)
        mbarrier.init(empty1.index(i), count=4)
        mbarrier.init(empty2.index(i), count=2)
    for i in gl.static_range(RESIDENT):
        mbarrier.init(loaded.index(i), count=1)
    ready = mbarrier.allocate_mbarrier(batch=2)
    taken = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(taken.index(i), count=8)  # every warp of the consumers
    WIDE: gl.constexpr = BN == 384
    FIRST: gl.constexpr = 256 if WIDE else BN
    w_s = gl.allocate_shared_memory(w.dtype, [RESIDENT if RESIDENT > 0 else SLOTS, FIRST, BK], w.layout)
    shared = Shared(
        gl.allocate_shared_memory(x.dtype, [2 * SLOTS, ROWS, BK], x.layout),
        w_s,
        gl.allocate_shared_memory(v.dtype, [SLOTS, 128, BK], v.layout) if WIDE else w_s,
        gl.allocate_shared_memory(y.dtype, [2 * BUFFERS, ROWS, CHUNK], y.layout),
        full, empty0, empty1, empty2, loaded,
        gl.allocate_shared_memory(gl.float32, [2, 2 * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        ready, taken, SLOTS, RESIDENT,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consumer, (shared, empty0, y, offset_ptr, M, N, K, group, gl.constexpr(0), BN, TURNS)),
            (consumer, (shared, empty1, y, offset_ptr, M, N, K, group, gl.constexpr(1), BN, TURNS)),
            (statistics, (shared, mean_ptr, rstd_ptr, M, N, K, group, eps, LAYER, BN, TURNS)),
            (loader, (shared, x, w, v, M, N, K, group, BN)),
        ],
        [4, 2, 1],
        [REGS0, REGS1, REGS2],
    )  # fmt: skip


# columns of a tile, slots of the ring, k-blocks of W that stay in shared memory: together below 227 KB
FORMS = {"streamed256": (256, 4, 0), "streamed128": (128, 6, 0), "streamed384": (384, 3, 0),
         "resident256": (256, 4, 4), "resident128": (128, 6, 6)}  # fmt: skip


def variant(dtype, layer, form):
    BN, slots, resident = FORMS[form]
    args = {
        "x": Tile(dtype, (64, 64)),
        "w": Tile(dtype, (min(BN, 256), 64)),
        "v": Tile(dtype, (128, 64)),
        "y": Tile(dtype, (64, 64)),
        "offset_ptr": "*fp32:16",
        "mean_ptr": "*fp32:16",
        "rstd_ptr": "*fp32:16",
        **{name: "i32" for name in ("M", "N", "K", "group")},
        "eps": "fp32",
        "LAYER": layer,
        "BN": BN,
        "SLOTS": slots,
        "RESIDENT": resident,
        "TURNS": form == "streamed256",
        "REGS0": int(os.environ.get("R0","208")), "REGS1": int(os.environ.get("R1","104")),"REGS2": 24,
    }
    # 12 warps times 168 registers: 240 for each consumer, 24 for the loader
    name = f"lazysplit_{'layer' if layer else 'rms'}_{dtype}_{form}"
    return Variant(name, lazy_kernel, args, num_warps=4, maxnreg=int(os.environ.get("MR","168")))


VARIANTS = [variant(dtype, layer, form) for dtype in ("bf16", "fp16") for layer in (False, True) for form in FORMS]
