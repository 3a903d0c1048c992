"""Gradients of norm_linear's parameters: a GEMM over the rows that scales them on the way in, and what finishes it.

    P = rstd * dy, rounded to the operand dtype;   raw = P^T x
    dW' = raw, for layer norm minus the mean of each of its rows
    dweight = dW' * gamma + outer(s, beta);   dgamma_k = sum_n weight_nk dW'_nk;   dbeta = weight^T s;   dbias = s
    with s = sum_m dy_m

Layer norm wants P^T (x - mean). As sum_k (x_mk - mean_m) = 0, that is P^T x with every row's mean taken away, so the
means of x are not needed here; and with a row's mean goes most of what a large mean of x costs the accumulators in
rounding. A row of equal values far from zero would cost more than that, by rstd = 1 / sqrt(eps), and has nothing to
give: its P is 0.

P never leaves registers: dy passes through them as the A operand, 64 columns n of it per consumer, transposed by
ldmatrix. What a consumer does to it competes with the tensor cores for registers and power, so it is little: for bf16,
rstd comes split in two bf16 values and P = fma(dy, high, dy * low), two instructions per pair that round as fp32 would.
The sums over rows are shared out: of the CTAs that see the same dy, each takes every so many slots.

Partitions of a CTA, which owns one tile of dW' and a range of rows:

    loader      one warp; TMA copies of dy and x into a ring of slots of 64 rows, with rstd, in two parts
    consumers   two warpgroups, 64 columns of dy each; while one slot is multiplied the next one is scaled
    row_dots    with DELTA, 2 warps and a loader of their own: sum_n dy_mn (y_mn - b'_n) = sum_k(g * xhat) for the
                gradient of x, a pass over dy and y that costs as much as a norm and here runs under the products

`dw_kernel` writes fp32 partials, `finish_kernel` adds them up, always in the same order, and applies the affine part,
`norms_kernel` does the last sum of dgamma and dbeta. A thread of the A operand holds values of the columns n and n + 8;
in the order of its registers bit 0 is m + 1, bit 1 is n + 8 and bit 2 is m + 8.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .dgrad_kernels import accumulator_layout, advance, load_dy, widen
from .variants import Tile, Variant

COLUMNS = gl.constexpr(64)  # of dy, per consumer
STEP = gl.constexpr(64)  # rows of a slot
DOT_ROWS = gl.constexpr(32)
DOT_COLUMNS = gl.constexpr(64)
DOT_SLOTS = gl.constexpr(3)


@gluon.constexpr_function
def operand_layout(columns):
    return gl.DotOperandLayout(operand_index=0, parent=accumulator_layout(1, 1, columns), k_width=2)


@gluon.constexpr_function
def lane_layout():
    """[64, 4]: one value per lane of a quad for each of its columns of dy."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )


@gluon.constexpr_function
def sum_asm(outputs, inputs):
    (out,), (start, a) = outputs, inputs
    lines = []
    for i in range(len(a)):
        row = (i >> 1) & 1
        lines.append(f"add.f32 {out[row]}, {(start if i in (0, 2) else out)[row]}, {a[i]};")
    return "\n".join(lines)


@gluon.jit
def without_constant_rows(rstd, rows, x_ptr, stride_x, limit):
    """rstd, 0 where all values of a row are equal and far from zero. `limit` is just below 1 / sqrt(eps): rstd above it
    means a variance of less than 2e-6 eps, and up to 8192 16-bit numbers of more than 512 sqrt(eps) that are not all
    equal vary by more. Only such rows are read."""
    first = gl.load(x_ptr + rows.to(gl.int64) * stride_x, mask=rstd > limit, other=0.0)
    return gl.where((rstd > limit) & (gl.abs(first.to(gl.float32)) * rstd > 512.0), 0.0, rstd)


@gluon.jit
def split_rstd(rstd, high_s, low_s, slot):
    """fp32 values as the sum of two of bf16; as they are for fp16, which has not the range for the parts."""
    high = rstd.to(high_s.dtype)
    high_s.index(slot).store(high)
    if high_s.dtype == gl.bfloat16:
        low_s.index(slot).store((rstd - high.to(gl.float32)).to(low_s.dtype))


@gluon.jit
def loader(
    dy0_desc, dy1_desc, dy2_desc, piece, x0_desc, x1_desc, x_ptr, stride_x, limit, rstd_ptr, a_s, b0_s, b1_s, high_s,
    low_s, full, free0, free1, M, n, k, first, steps, P0: gl.constexpr, P1: gl.constexpr, SLOTS: gl.constexpr,
    LAYER: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    x_bytes: gl.constexpr = x0_desc.nbytes_per_cta + (x1_desc.nbytes_per_cta if P1 > 0 else 0)
    lanes: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    rows = first * STEP + gl.arange(0, STEP, lanes)
    rstd = gl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
    slot = 0
    phase = 0
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
        split_rstd(rstd, high_s, low_s, slot)
        mbarrier.arrive(bar)
        rows += STEP
        rstd = gl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        slot, phase = advance(slot, phase, SLOTS)


@gluon.jit
def times_rstd(dy, high_s, low_s, slot, L: gl.constexpr):
    """rstd * dy, rounded once."""
    high = high_s.index(slot).load(L)
    if dy.dtype == gl.bfloat16:
        low = low_s.index(slot).load(L)
        asm: gl.constexpr = "{ .reg .b32 t; mul.rn.bf16x2 t, $1, $3; fma.rn.bf16x2 $0, $1, $2, t; }"
        high = gl.broadcast(high[None, :], dy)[0]
        low = gl.broadcast(low[None, :], dy)[0]
        return gl.inline_asm_elementwise(asm, "=r,r,r,r", [dy, high, low], dtype=dy.dtype, is_pure=True, pack=2)
    else:
        return (dy.to(gl.float32) * high[None, :]).to(dy.dtype)


@gluon.jit
def scaled(a_s, high_s, low_s, full, slot, phase, total, sums, W: gl.constexpr, P0: gl.constexpr):
    """P^T of a slot, [n, m]; if `sums`, with the sum of dy."""
    A: gl.constexpr = operand_layout(P0)
    mbarrier.wait(full.index(slot), phase)
    dy = a_s.index(2 * slot + W).permute((1, 0)).load(A)
    p = times_rstd(dy, high_s, low_s, slot, gl.SliceLayout(0, A))
    if sums:
        total = gl.inline_asm(sum_asm, ("=&f", "f", "f"), [total, widen(dy)], total.type)
    return p, total


@gluon.jit
def multiply(p, b0_s, b1_s, slot, acc0, acc1, more, P1: gl.constexpr):
    acc0 = warpgroup_mma(p, b0_s.index(slot), acc0, use_acc=more, is_async=True)
    if P1 > 0:
        acc1 = warpgroup_mma(p, b1_s.index(slot), acc1, use_acc=more, is_async=True)
    return acc0, acc1


@gluon.jit
def finish_product(acc0, acc1, p, P1: gl.constexpr):
    if P1 > 0:
        acc0, acc1, p = warpgroup_mma_wait(0, deps=(acc0, acc1, p))
    else:
        acc0, p = warpgroup_mma_wait(0, deps=(acc0, p))
    return acc0, acc1


@gluon.jit
def store_part(acc, out_ptr, n, k, N, K):
    L: gl.constexpr = acc.type.layout
    rows = n + gl.arange(0, acc.shape[0], gl.SliceLayout(1, L))
    cols = k + gl.arange(0, acc.shape[1], gl.SliceLayout(0, L))
    at = rows.to(gl.int64)[:, None] * K + cols[None, :]
    gl.store(out_ptr + at, acc, mask=(rows < N)[:, None] & (cols < K)[None, :])


@gluon.jit
def consumer(
    a_s, b0_s, b1_s, high_s, low_s, full, free, partial_ptr, sums_ptr, n, k, N, K, steps, share, shares,
    W: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, SLOTS: gl.constexpr, LAYER: gl.constexpr,
):  # fmt: skip
    acc0 = gl.zeros([COLUMNS, P0], gl.float32, accumulator_layout(1, 1, P0))
    acc1 = acc0
    if P1 > 0:
        acc1 = gl.zeros([COLUMNS, P1], gl.float32, accumulator_layout(1, 1, P1))
    total = gl.zeros([COLUMNS, 4], gl.float32, lane_layout())
    slot = 0
    phase = 0
    turn = 0
    p, total = scaled(a_s, high_s, low_s, full, slot, phase, total, share == 0, W, P0)
    for step in range(steps - 1):
        acc0, acc1 = multiply(p, b0_s, b1_s, slot, acc0, acc1, step > 0, P1)
        current = slot
        slot, phase = advance(slot, phase, SLOTS)
        turn = gl.where(turn == shares - 1, 0, turn + 1)
        following, total = scaled(a_s, high_s, low_s, full, slot, phase, total, turn == share, W, P0)
        acc0, acc1 = finish_product(acc0, acc1, p, P1)
        fence_async_shared()
        mbarrier.arrive(free.index(current))
        p = following
    acc0, acc1 = multiply(p, b0_s, b1_s, slot, acc0, acc1, steps > 1, P1)
    acc0, acc1 = finish_product(acc0, acc1, p, P1)

    row = n + W * COLUMNS
    store_part(acc0, partial_ptr, row, k, N, K)
    if P1 > 0:
        store_part(acc1, partial_ptr, row, k + P0, N, K)
    if LAYER:
        across = gl.sum(acc0, axis=1)
        if P1 > 0:
            across += gl.convert_layout(gl.sum(acc1, axis=1), across.type.layout, assert_trivial=True)
        rows = row + gl.arange(0, COLUMNS, across.type.layout)
        gl.store(sums_ptr + N + rows, across, mask=rows < N)
    rows = row + gl.arange(0, COLUMNS, gl.SliceLayout(1, lane_layout()))
    gl.store(sums_ptr + rows, gl.sum(total, axis=1), mask=rows < N)


@gluon.jit
def dots_loader(dy_desc, y_desc, dots_s, ready, taken, N, first, steps, tile, tiles):
    slot = 0
    phase = 0
    for group in range(tile, steps * (STEP // DOT_ROWS), tiles):
        m = first * STEP + group * DOT_ROWS
        for n in range(0, N, DOT_COLUMNS):
            mbarrier.wait(taken.index(slot), phase ^ 1)
            bar = ready.index(slot)
            mbarrier.expect(bar, 2 * dy_desc.nbytes_per_cta)
            tma.async_load(dy_desc, [m, n], bar, dots_s.index(2 * slot))
            tma.async_load(y_desc, [m, n], bar, dots_s.index(2 * slot + 1))
            slot, phase = advance(slot, phase, DOT_SLOTS)


@gluon.jit
def row_dots(offset_ptr, delta_ptr, dots_s, ready, taken, M, N, first, steps, tile, tiles):
    """The rows of a split in groups of 32, dealt out to the CTAs that share the split. 8 lanes cover 64 columns."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    R: gl.constexpr = gl.SliceLayout(1, L)
    slot = 0
    phase = 0
    for group in range(tile, steps * (STEP // DOT_ROWS), tiles):
        dot = gl.zeros([DOT_ROWS, 8], gl.float32, gl.BlockedLayout([1, 1], [4, 8], [2, 1], [1, 0]))
        for n in range(0, N, DOT_COLUMNS):
            cols = n + gl.arange(0, DOT_COLUMNS, gl.SliceLayout(0, L))
            offset = gl.load(offset_ptr + cols, mask=cols < N, other=0.0)
            mbarrier.wait(ready.index(slot), phase)
            dy = dots_s.index(2 * slot).load(L)
            y = dots_s.index(2 * slot + 1).load(L)
            fence_async_shared()
            mbarrier.arrive(taken.index(slot))
            slot, phase = advance(slot, phase, DOT_SLOTS)
            product = widen(dy) * (widen(y) - offset[None, :])
            part = gl.sum(product.reshape([DOT_ROWS, 8, 8]), axis=2)
            dot += gl.convert_layout(part, dot.type.layout, assert_trivial=True)
        rows = first * STEP + group * DOT_ROWS + gl.arange(0, DOT_ROWS, R)
        gl.store(delta_ptr + rows, gl.convert_layout(gl.sum(dot, axis=1), R), mask=rows < M)


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
    dtype: gl.constexpr = dy0_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a_s = gl.allocate_shared_memory(dtype, [2 * SLOTS, STEP, COLUMNS], dy0_desc.layout)
    b0_s = gl.allocate_shared_memory(dtype, [SLOTS, STEP, P0], x0_desc.layout)
    b1_s = b0_s
    if P1 > 0:
        b1_s = gl.allocate_shared_memory(dtype, [SLOTS, STEP, P1], x1_desc.layout)
    part: gl.constexpr = gl.bfloat16 if dtype == gl.bfloat16 else gl.float32
    high_s = gl.allocate_shared_memory(part, [SLOTS, STEP], plain)
    low_s = high_s
    if dtype == gl.bfloat16:
        low_s = gl.allocate_shared_memory(part, [SLOTS, STEP], plain)
    full = mbarrier.allocate_mbarrier(batch=SLOTS)
    free0 = mbarrier.allocate_mbarrier(batch=SLOTS)
    free1 = mbarrier.allocate_mbarrier(batch=SLOTS)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=2)  # the copies, and rstd by the loader's own hand
        mbarrier.init(free0.index(i), count=1)
        mbarrier.init(free1.index(i), count=1)
    split = gl.program_id(0) // tiles  # programs of the same rows run side by side and share them in L2
    tile = gl.program_id(0) % tiles
    share = tile % col_tiles
    n = (tile // col_tiles) * (2 * COLUMNS)
    k = share * (P0 + P1)
    first = split * steps_per_split
    steps = gl.minimum(steps - first, steps_per_split)
    partial_ptr += split.to(gl.int64) * N * K
    sums_ptr += (split * col_tiles + share) * 2 * N
    if DELTA:
        dots_s = gl.allocate_shared_memory(dtype, [2 * DOT_SLOTS, DOT_ROWS, DOT_COLUMNS], dots_dy_desc.layout)
        ready = mbarrier.allocate_mbarrier(batch=DOT_SLOTS)
        taken = mbarrier.allocate_mbarrier(batch=DOT_SLOTS)
        for i in gl.static_range(DOT_SLOTS):
            mbarrier.init(ready.index(i), count=1)
            mbarrier.init(taken.index(i), count=1)
        gl.warp_specialize(
            [
                (consumer, (a_s, b0_s, b1_s, high_s, low_s, full, free0, partial_ptr, sums_ptr, n, k, N, K, steps,
                            share, col_tiles, gl.constexpr(0), P0, P1, SLOTS, LAYER)),
                (consumer, (a_s, b0_s, b1_s, high_s, low_s, full, free1, partial_ptr, sums_ptr, n, k, N, K, steps,
                            share, col_tiles, gl.constexpr(1), P0, P1, SLOTS, LAYER)),
                (row_dots, (offset_ptr, delta_ptr, dots_s, ready, taken, M, N, first, steps, tile, tiles)),
                (dots_loader, (dots_dy_desc, dots_y_desc, dots_s, ready, taken, N, first, steps, tile, tiles)),
                (loader, (dy0_desc, dy1_desc, dy2_desc, piece, x0_desc, x1_desc, x_ptr, stride_x, limit, rstd_ptr, a_s,
                          b0_s, b1_s, high_s, low_s, full, free0, free1, M, n, k, first, steps, P0, P1, SLOTS, LAYER,
                          not DELTA)),
            ],
            [4, 2, 1, 1],
            [216, 72, 72, 72],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (a_s, b0_s, b1_s, high_s, low_s, full, free0, partial_ptr, sums_ptr, n, k, N, K, steps,
                            share, col_tiles, gl.constexpr(0), P0, P1, SLOTS, LAYER)),
                (consumer, (a_s, b0_s, b1_s, high_s, low_s, full, free1, partial_ptr, sums_ptr, n, k, N, K, steps,
                            share, col_tiles, gl.constexpr(1), P0, P1, SLOTS, LAYER)),
                (loader, (dy0_desc, dy1_desc, dy2_desc, piece, x0_desc, x1_desc, x_ptr, stride_x, limit, rstd_ptr, a_s,
                          b0_s, b1_s, high_s, low_s, full, free0, free1, M, n, k, first, steps, P0, P1, SLOTS, LAYER,
                          not DELTA)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


@triton.jit
def finish_kernel(
    partial_ptr,  # [splits, N, K] fp32
    sums_ptr,  # [shares, 2, N] fp32
    weight_ptr,  # [N, K]
    gamma_ptr,  # [K] or null, like beta in the weight's dtype
    beta_ptr,  # [K] or null
    dweight_ptr,  # [N, K], like dbias in the weight's dtype
    dbias_ptr,  # [N]
    norm_ptr,  # [row blocks, 2, K] fp32: partial dgamma and dbeta
    N,
    K,
    splits,
    shares,
    LAYER: tl.constexpr,
    SPLITS: tl.constexpr,  # partials added at a time
    SHARES: tl.constexpr,  # and partial sums
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    cols = tl.program_id(1) * BK + tl.arange(0, BK)
    live, inside = rows < N, cols < K
    keep = live[:, None] & inside[None, :]
    at = rows[:, None] * K + cols[None, :]
    part = tl.arange(0, SPLITS)
    total = tl.zeros((BN, BK), tl.float32)
    dy_sum = tl.zeros((BN,), tl.float32)
    across = tl.zeros((BN,), tl.float32)
    for start in range(0, splits, SPLITS):
        s = start + part
        there = s < splits
        block = partial_ptr + s.to(tl.int64)[:, None, None] * N * K + at[None, :, :]
        total += tl.sum(tl.load(block, mask=there[:, None, None] & keep[None, :, :], other=0.0), 0)
    share = tl.arange(0, SHARES)
    for start in range(0, shares, SHARES):
        s = start + share
        sums = sums_ptr + s[:, None] * (2 * N) + rows[None, :]
        mask = (s < shares)[:, None] & live[None, :]
        dy_sum += tl.sum(tl.load(sums, mask=mask, other=0.0), 0)
        if LAYER:
            across += tl.sum(tl.load(sums + N, mask=mask, other=0.0), 0)
    if LAYER:
        total -= (across / K)[:, None]
    weight = tl.load(weight_ptr + at, mask=keep, other=0.0).to(tl.float32)
    place = norm_ptr + tl.program_id(0) * (2 * K) + cols
    tl.store(place, tl.sum(tl.where(keep, weight * total, 0.0), 0), mask=inside)
    tl.store(place + K, tl.sum(weight * dy_sum[:, None], 0), mask=inside)
    gamma = tl.load(gamma_ptr + cols, mask=inside & (gamma_ptr.to(tl.int64) != 0), other=1.0).to(tl.float32)
    beta = tl.load(beta_ptr + cols, mask=inside & (beta_ptr.to(tl.int64) != 0), other=0.0).to(tl.float32)
    dweight = total * gamma[None, :] + dy_sum[:, None] * beta[None, :]
    tl.store(dweight_ptr + at, dweight.to(dweight_ptr.dtype.element_ty), mask=keep)
    if tl.program_id(1) == 0:
        tl.store(dbias_ptr + rows, dy_sum.to(dbias_ptr.dtype.element_ty), mask=live)


@triton.jit
def norms_kernel(
    norm_ptr,  # [row blocks, 2, K] fp32: partial dgamma and dbeta
    dgamma_ptr,  # [K]
    dbeta_ptr,  # [K]; written for layer norm
    row_blocks,
    K,
    LAYER: tl.constexpr,
    ROWS: tl.constexpr,  # partials added at a time
    BK: tl.constexpr,
):
    cols = tl.program_id(0) * BK + tl.arange(0, BK)
    inside = cols < K
    dgamma = tl.zeros((BK,), tl.float32)
    dbeta = tl.zeros((BK,), tl.float32)
    for start in range(0, row_blocks, ROWS):
        blocks = start + tl.arange(0, ROWS)
        place = norm_ptr + blocks[:, None] * (2 * K) + cols[None, :]
        mask = (blocks < row_blocks)[:, None] & inside[None, :]
        dgamma += tl.sum(tl.load(place, mask=mask, other=0.0), 0)
        if LAYER:
            dbeta += tl.sum(tl.load(place + K, mask=mask, other=0.0), 0)
    tl.store(dgamma_ptr + cols, dgamma.to(dgamma_ptr.dtype.element_ty), mask=inside)
    if LAYER:
        tl.store(dbeta_ptr + cols, dbeta.to(dbeta_ptr.dtype.element_ty), mask=inside)


# Forms by the columns of a tile of dW': (parts, slots, whether delta comes along).
FORMS = {"256": (256, 0, 4, False), "192": (128, 64, 5, False), "256_delta": (256, 0, 4, True)}


def product_variants():
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
                yield Variant(f"dw_split_{norm}_{dtype}_{form}", dw_kernel, args, maxnreg=168)


def finish_variants():
    for dtype in ("bf16", "fp16", "fp32"):
        for norm in ("rms", "layer"):
            for form, (together, bn) in {"few": (2, 32), "many": (8, 8)}.items():
                args = {"partial_ptr": "*fp32:16", "sums_ptr": "*fp32:16", "weight_ptr": f"*{dtype}:16"}
                args |= {"gamma_ptr": f"*{dtype}:16", "beta_ptr": f"*{dtype}:16", "dweight_ptr": f"*{dtype}:16"}
                args |= {
                    "dbias_ptr": f"*{dtype}:16",
                    "norm_ptr": "*fp32:16",
                    "N": "i32:8",
                    "K": "i32:8",
                    "splits": "i32",
                }
                args |= {"shares": "i32", "LAYER": norm == "layer", "SPLITS": together}
                args |= {"SHARES": 32, "BN": bn, "BK": 64}
                yield Variant(f"dw_split_finish_{norm}_{dtype}_{form}", finish_kernel, args)
            args = {"norm_ptr": "*fp32:16", "dgamma_ptr": f"*{dtype}:16", "dbeta_ptr": f"*{dtype}:16"}
            args |= {"row_blocks": "i32", "K": "i32:8", "LAYER": norm == "layer", "ROWS": 32, "BK": 32}
            yield Variant(f"dw_split_norms_{norm}_{dtype}", norms_kernel, args)


VARIANTS = [*product_variants(), *finish_variants()]
