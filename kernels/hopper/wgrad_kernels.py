"""Gradients of norm_linear's parameters: a GEMM over the rows that scales them on the way in, and what finishes it.

    P = rstd * dy, rounded to the operand dtype;   raw = P^T x
    dW' = raw_nk - raw_n0 - sum_m mean_m P_mn      (layer norm; the mean is relative to the row's first element)
    dweight = dW' * gamma + outer(s, beta);   dgamma_k = sum_n weight_nk dW'_nk;   dbeta = weight^T s;   dbias = s
    with s = sum_m dy_m

raw_n0 is the sum of the first elements times P, so that raw_n0 + sum_m mean_m P_mn takes away the whole mean, and with
it what a large mean costs the accumulators in rounding: that is nearly the same for all k.

P never leaves registers: dy passes through them as the A operand, 64 columns n of it per consumer, transposed by
ldmatrix. The sums over rows come from the same registers. Partitions of a CTA, which owns one tile of dW' and a range
of rows:

    loader      one warp; TMA copies of dy, x, rstd and mean into a ring of slots of 64 rows
    consumers   two warpgroups, 64 columns of dy each; while one slot is multiplied the next one is scaled

`dw_kernel` writes fp32 partials, `finish_kernel` adds them up, always in the same order, and applies the affine part. A
thread of the A operand holds values of the columns n and n + 8; in the order of its registers bit 0 is m + 1, bit 1 is
n + 8 and bit 2 is m + 8.
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

from .dgrad_kernels import accumulator_layout, add_products, advance, widen
from .variants import Tile, Variant

COLUMNS = gl.constexpr(64)  # of dy, per consumer
STEP = gl.constexpr(64)  # rows of a slot


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
def loader(
    dy_desc, x0_desc, x1_desc, rstd_desc, mean_desc, a_s, b0_s, b1_s, rstd_s, mean_s, full, free0, free1, n, k, first,
    steps, P0: gl.constexpr, P1: gl.constexpr, SLOTS: gl.constexpr, LAYER: gl.constexpr,
):  # fmt: skip
    x_bytes: gl.constexpr = x0_desc.nbytes_per_cta + (x1_desc.nbytes_per_cta if P1 > 0 else 0)
    vectors: gl.constexpr = rstd_desc.nbytes_per_cta * (2 if LAYER else 1)
    slot = 0
    phase = 0
    for step in range(steps):
        m = (first + step) * STEP
        mbarrier.wait(free0.index(slot), phase ^ 1)
        mbarrier.wait(free1.index(slot), phase ^ 1)
        bar = full.index(slot)
        mbarrier.expect(bar, 2 * dy_desc.nbytes_per_cta + x_bytes + vectors)
        tma.async_load(rstd_desc, [m], bar, rstd_s.index(slot))
        if LAYER:
            tma.async_load(mean_desc, [m], bar, mean_s.index(slot))
        tma.async_load(dy_desc, [m, n], bar, a_s.index(2 * slot))
        tma.async_load(dy_desc, [m, n + COLUMNS], bar, a_s.index(2 * slot + 1))
        tma.async_load(x0_desc, [m, k], bar, b0_s.index(slot))
        if P1 > 0:
            tma.async_load(x1_desc, [m, k + P0], bar, b1_s.index(slot))
        slot, phase = advance(slot, phase, SLOTS)


@gluon.jit
def scaled(
    a_s, rstd_s, mean_s, full, slot, phase, total, shift, W: gl.constexpr, P0: gl.constexpr, LAYER: gl.constexpr
):  # fmt: skip
    """P^T of a slot, [n, m], with the sums of dy and of mean * P."""
    A: gl.constexpr = operand_layout(P0)
    M_: gl.constexpr = gl.SliceLayout(0, A)
    mbarrier.wait(full.index(slot), phase)
    dy = a_s.index(2 * slot + W).permute((1, 0)).load(A)
    value = widen(dy)
    total = gl.inline_asm(sum_asm, ("=&f", "f", "f"), [total, value], total.type)
    p = (value * rstd_s.index(slot).load(M_)[None, :]).to(dy.dtype)
    if LAYER:
        mean = gl.broadcast(mean_s.index(slot).load(M_)[None, :], value)[0]
        shift = add_products(shift, widen(p), mean)
    return p, total, shift


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
    a_s, b0_s, b1_s, rstd_s, mean_s, full, free, partial_ptr, sums_ptr, n, k, N, K, steps,
    W: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, SLOTS: gl.constexpr, LAYER: gl.constexpr,
):  # fmt: skip
    acc0 = gl.zeros([COLUMNS, P0], gl.float32, accumulator_layout(1, 1, P0))
    acc1 = acc0
    if P1 > 0:
        acc1 = gl.zeros([COLUMNS, P1], gl.float32, accumulator_layout(1, 1, P1))
    total = gl.zeros([COLUMNS, 4], gl.float32, lane_layout())
    shift = total
    slot = 0
    phase = 0
    p, total, shift = scaled(a_s, rstd_s, mean_s, full, slot, phase, total, shift, W, P0, LAYER)
    for step in range(steps - 1):
        acc0, acc1 = multiply(p, b0_s, b1_s, slot, acc0, acc1, step > 0, P1)
        current = slot
        slot, phase = advance(slot, phase, SLOTS)
        following, total, shift = scaled(a_s, rstd_s, mean_s, full, slot, phase, total, shift, W, P0, LAYER)
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
    if k == 0:
        R: gl.constexpr = gl.SliceLayout(1, lane_layout())
        rows = row + gl.arange(0, COLUMNS, R)
        gl.store(sums_ptr + rows, gl.sum(total, axis=1), mask=rows < N)
        if LAYER:
            gl.store(sums_ptr + N + rows, gl.sum(shift, axis=1), mask=rows < N)


@gluon.jit
def dw_kernel(
    dy_desc,  # [M, N]
    x0_desc,  # [M, K]; the columns of a tile come in parts of P0 and, with P1 > 0, P1
    x1_desc,
    rstd_desc,  # [M] fp32
    mean_desc,  # [M] fp32; read for layer norm
    partial_ptr,  # [splits, N, K] fp32
    sums_ptr,  # [splits, 2, N] fp32: sums of dy and, for layer norm, of mean * P
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
):
    dtype: gl.constexpr = dy_desc.dtype
    vector: gl.constexpr = rstd_desc.layout
    a_s = gl.allocate_shared_memory(dtype, [2 * SLOTS, STEP, COLUMNS], dy_desc.layout)
    b0_s = gl.allocate_shared_memory(dtype, [SLOTS, STEP, P0], x0_desc.layout)
    b1_s = b0_s
    if P1 > 0:
        b1_s = gl.allocate_shared_memory(dtype, [SLOTS, STEP, P1], x1_desc.layout)
    rstd_s = gl.allocate_shared_memory(gl.float32, [SLOTS, STEP], vector)
    mean_s = rstd_s
    if LAYER:
        mean_s = gl.allocate_shared_memory(gl.float32, [SLOTS, STEP], vector)
    full = mbarrier.allocate_mbarrier(batch=SLOTS)
    free0 = mbarrier.allocate_mbarrier(batch=SLOTS)
    free1 = mbarrier.allocate_mbarrier(batch=SLOTS)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free0.index(i), count=1)
        mbarrier.init(free1.index(i), count=1)
    split = gl.program_id(0) // tiles  # programs of the same rows run side by side and share them in L2
    tile = gl.program_id(0) % tiles
    n = (tile // col_tiles) * (2 * COLUMNS)
    k = (tile % col_tiles) * (P0 + P1)
    first = split * steps_per_split
    steps = gl.minimum(steps - first, steps_per_split)
    partial_ptr += split.to(gl.int64) * N * K
    sums_ptr += split * 2 * N
    gl.warp_specialize(
        [
            (consumer, (a_s, b0_s, b1_s, rstd_s, mean_s, full, free0, partial_ptr, sums_ptr, n, k, N, K, steps,
                        gl.constexpr(0), P0, P1, SLOTS, LAYER)),
            (consumer, (a_s, b0_s, b1_s, rstd_s, mean_s, full, free1, partial_ptr, sums_ptr, n, k, N, K, steps,
                        gl.constexpr(1), P0, P1, SLOTS, LAYER)),
            (loader, (dy_desc, x0_desc, x1_desc, rstd_desc, mean_desc, a_s, b0_s, b1_s, rstd_s, mean_s, full, free0,
                      free1, n, k, first, steps, P0, P1, SLOTS, LAYER)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@triton.jit
def finish_kernel(
    partial_ptr,  # [splits, N, K] fp32
    sums_ptr,  # [splits, 2, N] fp32
    weight_ptr,  # [N, K]
    gamma_ptr,  # [K] or null, like beta in the weight's dtype
    beta_ptr,  # [K] or null
    dweight_ptr,  # [N, K]
    dbias_ptr,  # [N] fp32
    norm_ptr,  # [row blocks, 2, K] fp32: partial dgamma and dbeta
    N,
    K,
    splits,
    LAYER: tl.constexpr,
    SPLITS: tl.constexpr,  # added at a time
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
    shift = tl.zeros((BN,), tl.float32)
    for start in range(0, splits, SPLITS):
        s = start + part
        there = s < splits
        block = partial_ptr + s.to(tl.int64)[:, None, None] * N * K + at[None, :, :]
        total += tl.sum(tl.load(block, mask=there[:, None, None] & keep[None, :, :], other=0.0), 0)
        sums = sums_ptr + s[:, None] * (2 * N) + rows[None, :]
        mask = there[:, None] & live[None, :]
        dy_sum += tl.sum(tl.load(sums, mask=mask, other=0.0), 0)
        if LAYER:
            shift += tl.sum(tl.load(sums + N, mask=mask, other=0.0), 0)
            firsts = partial_ptr + s.to(tl.int64)[:, None] * N * K + (rows * K)[None, :]
            shift += tl.sum(tl.load(firsts, mask=mask, other=0.0), 0)
    if LAYER:
        total -= shift[:, None]
    weight = tl.load(weight_ptr + at, mask=keep, other=0.0).to(tl.float32)
    place = norm_ptr + tl.program_id(0) * (2 * K) + cols
    tl.store(place, tl.sum(tl.where(keep, weight * total, 0.0), 0), mask=inside)
    tl.store(place + K, tl.sum(weight * dy_sum[:, None], 0), mask=inside)
    gamma = tl.load(gamma_ptr + cols, mask=inside & (gamma_ptr.to(tl.int64) != 0), other=1.0).to(tl.float32)
    beta = tl.load(beta_ptr + cols, mask=inside & (beta_ptr.to(tl.int64) != 0), other=0.0).to(tl.float32)
    dweight = total * gamma[None, :] + dy_sum[:, None] * beta[None, :]
    tl.store(dweight_ptr + at, dweight.to(dweight_ptr.dtype.element_ty), mask=keep)
    if tl.program_id(1) == 0:
        tl.store(dbias_ptr + rows, dy_sum, mask=live)


# Forms by the columns of a tile of dW': (parts, slots).
FORMS = {"256": (256, 0, 4), "192": (128, 64, 5)}


def product_variants():
    vector = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    for dtype in ("bf16", "fp16"):
        for norm in ("rms", "layer"):
            for form, (p0, p1, slots) in FORMS.items():
                args = {"dy_desc": Tile(dtype, (64, 64))}
                args |= {"x0_desc": Tile(dtype, (64, p0)), "x1_desc": Tile(dtype, (64, p1 or p0))}
                args |= {"rstd_desc": Tile("fp32", (64,), vector), "mean_desc": Tile("fp32", (64,), vector)}
                args |= {"partial_ptr": "*fp32:16", "sums_ptr": "*fp32:16", "N": "i32:8", "K": "i32:8"}
                args |= {"tiles": "i32", "col_tiles": "i32", "steps": "i32", "steps_per_split": "i32"}
                args |= {"P0": p0, "P1": p1, "SLOTS": slots, "LAYER": norm == "layer"}
                yield Variant(f"dw_{norm}_{dtype}_{form}", dw_kernel, args, maxnreg=168)


def finish_variants():
    for dtype in ("bf16", "fp16", "fp32"):
        for norm in ("rms", "layer"):
            for form, (together, bn) in {"few": (2, 32), "many": (8, 8)}.items():
                args = {"partial_ptr": "*fp32:16", "sums_ptr": "*fp32:16", "weight_ptr": f"*{dtype}:16"}
                args |= {"gamma_ptr": f"*{dtype}:16", "beta_ptr": f"*{dtype}:16", "dweight_ptr": f"*{dtype}:16"}
                args |= {"dbias_ptr": "*fp32:16", "norm_ptr": "*fp32:16", "N": "i32:8", "K": "i32:8", "splits": "i32"}
                args |= {"LAYER": norm == "layer", "SPLITS": together, "BN": bn, "BK": 64}
                yield Variant(f"dw_finish_{norm}_{dtype}_{form}", finish_kernel, args)


VARIANTS = [*product_variants(), *finish_variants()]
