"""norm_linear as one GEMM whose rows are scaled: y = rstd * (x W'^T) + b', with the sums behind rstd taken on the way.

W' and b' hold the norm's affine part and, for layer norm, W' has centred rows (see fold_kernels.py), so that RMS and
LN share the epilogue. Partitions of a CTA, which works on tiles of 128 rows:

    loader      one warp; TMA copies of x and W into a ring of k-blocks (or of x alone, W staying in shared memory)
    consumers   two warpgroups of 64 rows each, with slots, epilogue buffers and barriers of their own: they never
                meet, so that one's epilogue runs under the other's matrix products

The products read both operands from shared memory. For the statistics a consumer reads its rows of x a second time, in
the layout of an A operand, where a thread holds values of the two rows (r and r + 8) that it also owns in the
accumulator: bit 0 of a value's register number is k + 1, bit 1 is row + 8, bit 2 is k + 8, and a quad of lanes shares
its rows.
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
from triton.language.extra.cuda import gdc_wait

from .barriers import arrive, await_phase
from .variants import Tile, Variant

ROWS = gl.constexpr(64)  # of a consumer
BK = gl.constexpr(64)  # one swizzle atom of 128 bytes
CHUNK = gl.constexpr(64)  # columns of one TMA store
BUFFERS = gl.constexpr(2)  # epilogue buffers per consumer


@gluon.constexpr_function
def accumulator_layout(columns):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def operand_layout(columns):
    return gl.DotOperandLayout(operand_index=0, parent=accumulator_layout(columns), k_width=2)


@gluon.constexpr_function
def quad_layout():
    """[64, 4]: what each lane of a quad holds for its rows."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )


@gluon.constexpr_function
def row_layout():
    return gl.SliceLayout(1, quad_layout())


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
    loaded: gl.shared_memory_descriptor  # one barrier per k-block of a resident W
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


# ---- row sums --------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _squares(outputs, inputs):
    (total,), (before, x) = outputs, inputs
    lines = []
    for i, value in enumerate(x):
        row = (i >> 1) & 1
        lines.append(f"fma.rn.f32 {total[row]}, {value}, {value}, {before[row] if i in (0, 2) else total[row]};")
    return "\n".join(lines)


@gluon.constexpr_function
def _shifted(outputs, inputs):
    (first, second), (shift, first0, second0, x) = outputs, inputs
    lines = ["{ .reg .f32 d;"]
    for i, value in enumerate(x):
        row = (i >> 1) & 1
        a, b = (first0[row], second0[row]) if i in (0, 2) else (first[row], second[row])
        lines.append(f"sub.rn.f32 d, {value}, {shift[row]};")
        lines.append(f"add.rn.f32 {first[row]}, {a}, d; fma.rn.f32 {second[row]}, d, d, {b};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _shifted_half(outputs, inputs):
    """Of the first 8 of 16 columns."""
    return _shifted(outputs, (*inputs[:3], inputs[3][:4]))


@gluon.constexpr_function
def _first_of_row(outputs, inputs):
    """Value 0 of rows r and r + 8, from lane 0 of the quad to all four."""
    (out,), (x,) = outputs, inputs
    return "\n".join(f"shfl.sync.idx.b32 {out[row]}, {x[2 * row]}, 0, 0x1c1f, 0xffffffff;" for row in range(2))


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
    """Per lane: sum of x^2, or of x - x_0 and its square, x_0 being the row's first value. So no E[x^2] - E[x]^2 with a
    large mean."""

    shift: gl.tensor
    first: gl.tensor
    second: gl.tensor
    LAYER: gl.constexpr

    @gluon.jit
    def start(x, LAYER: gl.constexpr, WANTED: gl.constexpr):
        """For rows whose first k-block is in x."""
        nothing = gl.zeros([ROWS, 4], gl.float32, quad_layout())
        shift = nothing
        if LAYER and WANTED:
            values = widened(x.slice(0, 16, dim=1).load(operand_layout(128)))
            shift = gl.inline_asm(_first_of_row, ("=f", "f"), [values], shift.type, is_pure=True)
        return Sums(shift, nothing, nothing, LAYER)

    @gluon.jit
    def add_slice(self, x, HALF: gl.constexpr):
        """With 16 columns, or the first 8 of them."""
        values = widened(x.load(operand_layout(128)))
        first = self.first
        kind = self.shift.type
        if self.LAYER:
            asm: gl.constexpr = _shifted_half if HALF else _shifted
            arguments = [self.shift, self.first, self.second, values]
            constraints: gl.constexpr = ("=&f", "=&f", "f", "f", "f", "f")
            first, second = gl.inline_asm(asm, constraints, arguments, (kind, kind), is_pure=True)
        else:
            second = gl.inline_asm(_squares, ("=&f", "f", "f"), [self.second, values], kind, is_pure=True)
        return Sums(self.shift, first, second, self.LAYER)

    @gluon.jit
    def add(self, x, left):
        """With a k-block; `left` columns of the row remain from its start. Beyond the row's end TMA has put zeros."""
        sums = self
        if self.LAYER:
            if left >= BK:
                for j in gl.static_range(BK // 16):
                    sums = sums.add_slice(x.slice(16 * j, 16, dim=1), False)
            else:
                for j in gl.static_range(BK // 16):
                    if left >= 16 * j + 16:
                        sums = sums.add_slice(x.slice(16 * j, 16, dim=1), False)
                    elif left >= 16 * j + 8:
                        sums = sums.add_slice(x.slice(16 * j, 16, dim=1), True)
        else:
            for j in gl.static_range(BK // 16):
                sums = sums.add_slice(x.slice(16 * j, 16, dim=1), False)
        return sums

    @gluon.jit
    def finish(self, K, eps):
        """(mean relative to x_0, rstd) of each row, and the scale of its result: 0 for a row of equal values, whose
        product with centred weights is rounding alone."""
        reciprocal = 1.0 / K.to(gl.float32)
        mean = gl.convert_layout(gl.sum(self.first, axis=1), row_layout()) * reciprocal
        variance = gl.convert_layout(gl.sum(self.second, axis=1), row_layout()) * reciprocal
        if self.LAYER:
            variance = gl.maximum(variance - mean * mean, 0.0)
        rstd = gl.rsqrt(variance + eps)
        if self.LAYER:
            return mean, rstd, gl.where(variance > 0.0, rstd, 0.0)
        else:
            return mean, rstd, rstd


# ---- consumers -------------------------------------------------------------------------------------------------------


@gluon.jit
def multiply(shared, empty, slot, phase, steps, K, acc, more, W: gl.constexpr, LAYER: gl.constexpr, STATS: gl.constexpr,
             WIDE: gl.constexpr):  # fmt: skip
    """Products of a tile, both operands from shared memory, and the row sums from a second read of x. One k-block is in
    flight while the next is issued; a slot is released when its products are done."""
    await_phase(shared.full.index(slot), phase)
    sums = Sums.start(shared.x.index(2 * slot + W), LAYER, STATS)
    for k in range(steps):
        if shared.RESIDENT > 0:
            await_phase(shared.loaded.index(k), 0)
        await_phase(shared.full.index(slot), phase)
        x = shared.x.index(2 * slot + W)
        w = shared.w.index(k if shared.RESIDENT > 0 else slot).permute((1, 0))
        acc = warpgroup_mma(x, w, acc, use_acc=k > 0, is_async=True)
        if WIDE:
            more = warpgroup_mma(x, shared.v.index(slot).permute((1, 0)), more, use_acc=k > 0, is_async=True)
        if STATS:
            sums = sums.add(x, K - k * BK)
        if WIDE:
            acc, more = warpgroup_mma_wait(2, deps=(acc, more))
        else:
            acc = warpgroup_mma_wait(1, deps=(acc,))
        if STATS:
            fence_async_shared()  # what was read through registers, before the TMA copy that refills the slot
        # (a name that keeps the slot of the step before would be taken for loop-invariant by the compiler)
        arrive(empty.index(gl.where(slot == 0, shared.SLOTS - 1, slot - 1)), k > 0)
        slot, phase = advance(slot, phase, shared.SLOTS)
    if WIDE:
        acc, more = warpgroup_mma_wait(0, deps=(acc, more))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    arrive(empty.index(gl.where(slot == 0, shared.SLOTS - 1, slot - 1)), steps > 0)
    return acc, more, sums, slot, phase


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
    scale = gl.convert_layout(scale, gl.SliceLayout(1, layout), assert_trivial=True)
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
def consumer(shared, empty, y, offset_ptr, mean_ptr, rstd_ptr, M, N, K, group, eps, W: gl.constexpr,
             LAYER: gl.constexpr, BN: gl.constexpr, TURNS: gl.constexpr):  # fmt: skip
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
        acc, more, sums, slot, phase = multiply(shared, empty, slot, phase, steps, K, acc, more, W, LAYER, True, WIDE)
        mean, rstd, scale = sums.finish(K, eps)
        rows = row + gl.arange(0, ROWS, row_layout())
        keep = (rows < M) & (column == 0)  # each row once
        gl.store(rstd_ptr + rows, rstd, mask=keep)
        if LAYER:
            gl.store(mean_ptr + rows, mean, mask=keep)
        finish_tile(shared, y, offset_ptr, acc, more, scale, row, column * BN, BN, W)
        if TURNS:
            for j in range(1, tiles):
                acc, more, sums, slot, phase = multiply(
                    shared, empty, slot, phase, steps, K, acc, more, W, LAYER, False, WIDE
                )
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
):
    full = mbarrier.allocate_mbarrier(batch=SLOTS)
    empty0 = mbarrier.allocate_mbarrier(batch=SLOTS)
    empty1 = mbarrier.allocate_mbarrier(batch=SLOTS)
    loaded = mbarrier.allocate_mbarrier(batch=RESIDENT if RESIDENT > 0 else 1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty0.index(i), count=4)
        mbarrier.init(empty1.index(i), count=4)
    for i in gl.static_range(RESIDENT):
        mbarrier.init(loaded.index(i), count=1)
    WIDE: gl.constexpr = BN == 384
    FIRST: gl.constexpr = 256 if WIDE else BN
    w_s = gl.allocate_shared_memory(w.dtype, [RESIDENT if RESIDENT > 0 else SLOTS, FIRST, BK], w.layout)
    shared = Shared(
        gl.allocate_shared_memory(x.dtype, [2 * SLOTS, ROWS, BK], x.layout),
        w_s,
        gl.allocate_shared_memory(v.dtype, [SLOTS, 128, BK], v.layout) if WIDE else w_s,
        gl.allocate_shared_memory(y.dtype, [2 * BUFFERS, ROWS, CHUNK], y.layout),
        full, empty0, empty1, loaded, SLOTS, RESIDENT,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consumer, (shared, empty0, y, offset_ptr, mean_ptr, rstd_ptr, M, N, K, group, eps, gl.constexpr(0),
                        LAYER, BN, TURNS)),
            (consumer, (shared, empty1, y, offset_ptr, mean_ptr, rstd_ptr, M, N, K, group, eps, gl.constexpr(1),
                        LAYER, BN, TURNS)),
            (loader, (shared, x, w, v, M, N, K, group, BN)),
        ],
        [4, 1],
        [240, 24],
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
    }
    # 12 warps times 168 registers: 240 for each consumer, 24 for the loader
    name = f"lazy_{'layer' if layer else 'rms'}_{dtype}_{form}"
    return Variant(name, lazy_kernel, args, num_warps=4, maxnreg=168)


VARIANTS = [variant(dtype, layer, form) for dtype in ("bf16", "fp16") for layer in (False, True) for form in FORMS]
