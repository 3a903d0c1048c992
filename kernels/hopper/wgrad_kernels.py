"""Gradients of norm_linear's parameters: a GEMM over the rows that scales them on the way in.

    P = rstd * dy, rounded to the operand dtype;   raw = P^T x
    dW' = raw, for layer norm minus the mean of each of its rows

and the sums of dy over the rows. wgrad_finish_kernels.py makes the gradients of it.

Layer norm wants P^T (x - mean). As sum_k (x_mk - mean_m) = 0, that is P^T x with every row's mean taken away, so the
means of x are not needed here; and with a row's mean goes most of what a large mean of x costs the accumulators in
rounding. A row of equal values far from zero would cost more than that, by rstd = 1 / sqrt(eps), and has nothing to
give: its P is 0.

P never leaves registers: dy passes through them as the A operand, 64 columns n of it per consumer, transposed by
ldmatrix. What a consumer does to it competes with the tensor cores for registers and power, so it is little: for bf16,
rstd comes split in two bf16 values and P = fma(dy, high, dy * low), two instructions per pair that round as fp32 would.
The sums over rows are made of dy as it lies in registers, behind the products; they are shared out among the CTAs that see
the same dy. Every warp waits for slots and hands them back by itself.

Partitions of a CTA, which owns tiles of dW' and a range of rows:

    loader      one warp; TMA copies of dy and x into a ring of slots of 64 rows, with rstd (see pack_asm)
    consumers   two warpgroups, 64 columns of dy each
    row_dots    with DELTA, 2 warps and a loader of their own: see wgrad_row_dots.py

A consumer that waits for its products before it issues more leaves the tensor cores with nothing of its; the other one
fills the gap only while the two are out of step, and nothing keeps them so. Therefore a slot's products are issued
before those of the slot before are waited for, and a consumer runs dry only if scaling takes longer than the products of
a slot. P of two slots is in use at a time, so two steps stand in the loop's body, each with registers of its own: what a
running product reads is never copied. Within a slot the products of 16 rows at a time are queued, the first as soon as its
rows are scaled.

Programs: `tiles` of them for each whole split of the rows. If more are left than make a split, they share the remaining
rows, the last split, and each takes every so many tiles of it, one after another, through the same ring.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents

from .barriers import arrive
from .dgrad_kernels import accumulator_layout, advance, load_dy
from .variants import Tile, Variant
from .wgrad_row_dots import DOT_COLUMNS, DOT_ROWS, DOT_SLOTS, dots_loader, row_dots
from .wgrad_steps import COLUMNS, STEP, lane_layout, pack_rstd, places, store_part, take, wait_for


@gluon.jit
def own_part(tiles, steps, per_split):
    """This program's split, its first tile and how many programs it shares the tiles with; first slot and slots of the
    split. Each partition finds them for itself, so that none is kept for another."""
    split = gl.program_id(0) // tiles  # programs of the same rows run side by side and share them in L2
    rank = gl.program_id(0) % tiles
    sharers = gl.minimum(gl.num_programs(0) - split * tiles, tiles)
    first = split * per_split
    return split, rank, sharers, first, gl.minimum(steps - first, per_split)


@gluon.jit
def without_constant_rows(rstd, rows, x_ptr, stride_x, limit):
    """rstd, 0 where all values of a row are equal and far from zero. `limit` is just below 1 / sqrt(eps): rstd above it
    means a variance of less than 2e-6 eps, and up to 8192 16-bit numbers of more than 512 sqrt(eps) that are not all
    equal vary by more. Only such rows are read."""
    first = gl.load(x_ptr + rows.to(gl.int64) * stride_x, mask=rstd > limit, other=0.0)
    return gl.where((rstd > limit) & (gl.abs(first.to(gl.float32)) * rstd > 512.0), 0.0, rstd)


@gluon.jit
def loader(
    dy0_desc, dy1_desc, dy2_desc, piece, x0_desc, x1_desc, x_ptr, stride_x, limit, rstd_ptr, a_s, b0_s, b1_s, factor_s,
    full, free0, free1, M, steps, per_split, tiles, col_tiles, P0: gl.constexpr, P1: gl.constexpr,
    SLOTS: gl.constexpr, LAYER: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    _, rank, sharers, first, steps = own_part(tiles, steps, per_split)
    x_bytes: gl.constexpr = x0_desc.nbytes_per_cta + (x1_desc.nbytes_per_cta if P1 > 0 else 0)
    lanes: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    slot = 0
    phase = 0
    for tile in range(rank, tiles, sharers):
        n = (tile // col_tiles) * (2 * COLUMNS)
        k = (tile % col_tiles) * (P0 + P1)
        rows = first * STEP + gl.arange(0, STEP, lanes)
        rstd = gl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        for step in range(steps):
            m = (first + step) * STEP
            mbarrier.wait(free0.index(slot), phase ^ 1)
            mbarrier.wait(free1.index(slot), phase ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, 2 * dy0_desc.nbytes_per_cta + x_bytes)
            load_dy(dy0_desc, dy1_desc, dy2_desc, piece, m, n, bar, a_s.index(2 * slot), PIECES)
            load_dy(dy0_desc, dy1_desc, dy2_desc, piece, m, n + COLUMNS, bar, a_s.index(2 * slot + 1), PIECES)
            tma.async_load(x0_desc, [m, k], bar, b0_s.index(slot))
            if P1 > 0:
                tma.async_load(x1_desc, [m, k + P0], bar, b1_s.index(slot))
            if LAYER:
                rstd = without_constant_rows(rstd, rows, x_ptr, stride_x, limit)
            pack_rstd(rstd, factor_s.index(slot), "bf16" if a_s.dtype == gl.bfloat16 else "f16")
            arrive(bar, True)
            rows += STEP
            rstd = gl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
            slot, phase = advance(slot, phase, SLOTS)


@gluon.jit
def own_groups(share, shares, turn):
    """Which of the four times 16 rows of a slot this program sums, of those that see the same dy: with up to four of them
    each takes its part of every slot, else each takes every so many slots."""
    own = (1 << share) | (1 << (share + shares)) | (1 << (share + 2 * shares)) | (1 << (share + 3 * shares))
    return gl.where(shares > 4, gl.where(turn == share, 15, 0), own & 15)


@gluon.jit
def follow(
    p, a_s, b0_s, b1_s, factor_s, full, free, at, slot, phase, turn, acc0, acc1, sums, share, shares,
    W: gl.constexpr, P1: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Scale the slot after `slot` and queue its products behind those of `slot`, which read p; wait for the latter."""
    current = slot
    slot, phase = advance(slot, phase, SLOTS)
    turn = gl.where(turn == shares - 1, 0, turn + 1)
    following, sums, acc0, acc1 = take(
        a_s, b0_s, b1_s, factor_s, full, at, slot, phase, sums, own_groups(share, shares, turn), acc0, acc1, 1, W, P1
    )
    acc0, acc1 = wait_for(acc0, acc1, p, 1, P1)
    arrive(free.index(current), True)
    return following, slot, phase, turn, acc0, acc1, sums


@gluon.jit
def consumer(
    a_s, b0_s, b1_s, factor_s, full, free, partial_ptr, sums_ptr, N, K, steps, per_split, tiles, col_tiles,
    W: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, SLOTS: gl.constexpr, LAYER: gl.constexpr,
):  # fmt: skip
    split, rank, sharers, _, steps = own_part(tiles, steps, per_split)
    at = places()
    slot = 0
    phase = 0
    for tile in range(rank, tiles, sharers):
        share = tile % col_tiles
        acc0 = gl.zeros([COLUMNS, P0], gl.float32, accumulator_layout(1, 1, P0))
        acc1 = acc0
        if P1 > 0:
            acc1 = gl.zeros([COLUMNS, P1], gl.float32, accumulator_layout(1, 1, P1))
        sums = gl.zeros([COLUMNS, 4], gl.float32, lane_layout())
        turn = 0
        p, sums, acc0, acc1 = take(
            a_s, b0_s, b1_s, factor_s, full, at, slot, phase, sums, own_groups(share, col_tiles, 0), acc0, acc1, 0, W, P1,
        )  # fmt: skip
        for _ in range((steps - 1) // 2):
            q, slot, phase, turn, acc0, acc1, sums = follow(
                p, a_s, b0_s, b1_s, factor_s, full, free, at, slot, phase, turn, acc0, acc1, sums, share, col_tiles,
                W, P1, SLOTS,
            )  # fmt: skip
            p, slot, phase, turn, acc0, acc1, sums = follow(
                q, a_s, b0_s, b1_s, factor_s, full, free, at, slot, phase, turn, acc0, acc1, sums, share, col_tiles,
                W, P1, SLOTS,
            )  # fmt: skip
        acc0, acc1 = wait_for(acc0, acc1, p, 0, P1)
        arrive(free.index(slot), True)
        slot, phase = advance(slot, phase, SLOTS)
        if steps % 2 == 0:  # one more, with nothing running: no copy of what a product reads is safe
            turn = gl.where(turn == col_tiles - 1, 0, turn + 1)
            q, sums, acc0, acc1 = take(
                a_s, b0_s, b1_s, factor_s, full, at, slot, phase, sums, own_groups(share, col_tiles, turn), acc0, acc1,
                1, W, P1,
            )  # fmt: skip
            acc0, acc1 = wait_for(acc0, acc1, q, 0, P1)
            arrive(free.index(slot), True)
            slot, phase = advance(slot, phase, SLOTS)
        row = (tile // col_tiles) * (2 * COLUMNS) + W * COLUMNS
        part = partial_ptr + split.to(gl.int64) * N * K
        place = sums_ptr + (split * col_tiles + share) * 2 * N
        store_results(acc0, acc1, gl.sum(sums, axis=1), part, place, row, share * (P0 + P1), N, K, P1, LAYER)


@gluon.jit
def store_results(acc0, acc1, sums, partial_ptr, sums_ptr, row, k, N, K, P1: gl.constexpr, LAYER: gl.constexpr):
    """A consumer's part of a tile, the sums of dy and, for layer norm, those of the part's rows."""
    store_part(acc0, partial_ptr, row, k, N, K)
    if P1 > 0:
        store_part(acc1, partial_ptr, row, k + acc0.shape[1], N, K)
    if LAYER:
        across = gl.sum(acc0, axis=1)
        if P1 > 0:
            across += gl.convert_layout(gl.sum(acc1, axis=1), across.type.layout, assert_trivial=True)
        rows = row + gl.arange(0, COLUMNS, across.type.layout)
        gl.store(sums_ptr + N + rows, across, mask=rows < N)
    rows = row + gl.arange(0, COLUMNS, sums.type.layout)
    gl.store(sums_ptr + rows, sums, mask=rows < N)


@gluon.jit
def own_row_dots(offset_ptr, delta_ptr, dots_s, ready, taken, M, N, steps, per_split, tiles):
    _, rank, sharers, first, steps = own_part(tiles, steps, per_split)
    row_dots(offset_ptr, delta_ptr, dots_s, ready, taken, M, N, first, steps, rank, sharers)


@gluon.jit
def own_dots_loader(dy_desc, y_desc, dots_s, ready, taken, N, steps, per_split, tiles):
    _, rank, sharers, first, steps = own_part(tiles, steps, per_split)
    dots_loader(dy_desc, y_desc, dots_s, ready, taken, N, first, steps, rank, sharers)


@gluon.jit
def dw_kernel(
    dy0_desc,  # [M, N]; without DELTA it may be the first `piece` columns of dy
    dy1_desc,  # and these the next
    dy2_desc,
    piece,
    x0_desc,  # [M, K]; the columns of a tile come in parts of P0 and, with P1 > 0, P1
    x1_desc,
    rstd_ptr,  # [M] fp32
    partial_ptr,  # [splits, N, K] fp32
    sums_ptr,  # [splits * col_tiles, 2, N] fp32: sums of dy and, for layer norm, of the rows of `partial`
    dots_dy_desc,  # dy again and what follows up to delta: with DELTA
    dots_y_desc,  # [M, N]
    offset_ptr,  # [N] fp32: b'
    delta_ptr,  # [M] fp32
    x_ptr,  # x again, for the first element of a row (layer norm)
    stride_x,
    limit,  # just below 1 / sqrt(eps)
    M,
    N,
    K,
    tiles,
    col_tiles,
    steps,  # slots of 64 rows in all
    steps_per_split,
    P0: gl.constexpr,
    P1: gl.constexpr,
    SLOTS: gl.constexpr,
    LAYER: gl.constexpr,
    DELTA: gl.constexpr,
):
    gdc_launch_dependents()  # finish_kernel waits for the end
    dtype: gl.constexpr = dy0_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a_s = gl.allocate_shared_memory(dtype, [2 * SLOTS, STEP, COLUMNS], dy0_desc.layout)
    b0_s = gl.allocate_shared_memory(dtype, [SLOTS, STEP, P0], x0_desc.layout)
    b1_s = b0_s
    if P1 > 0:
        b1_s = gl.allocate_shared_memory(dtype, [SLOTS, STEP, P1], x1_desc.layout)
    factor_s = gl.allocate_shared_memory(gl.int32, [SLOTS, STEP], plain)  # rstd as pack_rstd leaves it
    full = mbarrier.allocate_mbarrier(batch=SLOTS)
    free0 = mbarrier.allocate_mbarrier(batch=SLOTS)
    free1 = mbarrier.allocate_mbarrier(batch=SLOTS)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=2)  # the copies, and rstd by the loader's own hand
        mbarrier.init(free0.index(i), count=4)  # warps
        mbarrier.init(free1.index(i), count=4)
    if DELTA:
        dots_s = gl.allocate_shared_memory(dtype, [2 * DOT_SLOTS, DOT_ROWS, DOT_COLUMNS], dots_dy_desc.layout)
        ready = mbarrier.allocate_mbarrier(batch=DOT_SLOTS)
        taken = mbarrier.allocate_mbarrier(batch=DOT_SLOTS)
        for i in gl.static_range(DOT_SLOTS):
            mbarrier.init(ready.index(i), count=1)
            mbarrier.init(taken.index(i), count=1)
        gl.warp_specialize(
            [
                (consumer, (a_s, b0_s, b1_s, factor_s, full, free0, partial_ptr, sums_ptr, N, K, steps,
                            steps_per_split, tiles, col_tiles, gl.constexpr(0), P0, P1, SLOTS, LAYER)),
                (consumer, (a_s, b0_s, b1_s, factor_s, full, free1, partial_ptr, sums_ptr, N, K, steps,
                            steps_per_split, tiles, col_tiles, gl.constexpr(1), P0, P1, SLOTS, LAYER)),
                (own_row_dots, (offset_ptr, delta_ptr, dots_s, ready, taken, M, N, steps, steps_per_split, tiles)),
                (own_dots_loader, (dots_dy_desc, dots_y_desc, dots_s, ready, taken, N, steps, steps_per_split, tiles)),
                (loader, (dy0_desc, dy1_desc, dy2_desc, piece, x0_desc, x1_desc, x_ptr, stride_x, limit, rstd_ptr, a_s,
                          b0_s, b1_s, factor_s, full, free0, free1, M, steps, steps_per_split, tiles,
                          col_tiles, P0, P1, SLOTS, LAYER, not DELTA)),
            ],
            [4, 2, 1, 1],
            [216, 72, 72, 72],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (a_s, b0_s, b1_s, factor_s, full, free0, partial_ptr, sums_ptr, N, K, steps,
                            steps_per_split, tiles, col_tiles, gl.constexpr(0), P0, P1, SLOTS, LAYER)),
                (consumer, (a_s, b0_s, b1_s, factor_s, full, free1, partial_ptr, sums_ptr, N, K, steps,
                            steps_per_split, tiles, col_tiles, gl.constexpr(1), P0, P1, SLOTS, LAYER)),
                (loader, (dy0_desc, dy1_desc, dy2_desc, piece, x0_desc, x1_desc, x_ptr, stride_x, limit, rstd_ptr, a_s,
                          b0_s, b1_s, factor_s, full, free0, free1, M, steps, steps_per_split, tiles,
                          col_tiles, P0, P1, SLOTS, LAYER, not DELTA)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip


# Forms by the columns of a tile of dW': (parts, slots, whether delta comes along).
FORMS = {"256": (256, 0, 4, False), "192": (128, 64, 5, False), "256_delta": (256, 0, 4, True)}


def variants():
    for dtype in ("bf16", "fp16"):
        for norm in ("rms", "layer"):
            for form, (p0, p1, slots, delta) in FORMS.items():
                if delta and dtype == "fp16":  # its fp32 copies of dy would spill
                    continue
                args = {f"dy{i}_desc": Tile(dtype, (64, 64)) for i in range(3)} | {"piece": "i32"}
                args |= {"x0_desc": Tile(dtype, (64, p0)), "x1_desc": Tile(dtype, (64, p1 or p0))}
                args |= {"rstd_ptr": "*fp32:16", "partial_ptr": "*fp32:16", "sums_ptr": "*fp32:16"}
                args |= {"dots_dy_desc": Tile(dtype, (32, 64)), "dots_y_desc": Tile(dtype, (32, 64))}
                args |= {"offset_ptr": "*fp32:16", "delta_ptr": "*fp32:16", "x_ptr": f"*{dtype}", "stride_x": "i64"}
                args |= {"limit": "fp32", "M": "i32", "N": "i32:8", "K": "i32:8"}
                args |= {"tiles": "i32", "col_tiles": "i32", "steps": "i32", "steps_per_split": "i32"}
                args |= {"P0": p0, "P1": p1, "SLOTS": slots, "LAYER": norm == "layer", "DELTA": delta}
                yield Variant(f"dw_{norm}_{dtype}_{form}", dw_kernel, args, maxnreg=168)


VARIANTS = [*variants()]
