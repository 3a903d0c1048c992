"""The post-norm kernel over clusters (postnorm_cluster_common.py) that stores results straight from registers, and loads a
residual into them. It serves what has one.

Rows of W come in such an order that a thread's columns of the result follow each other (postnorm_rows.py): so residuals
come and results go in 16 bytes per thread, from and to memory. For residuals that takes less time than 4 bytes, for results
more than TMA from shared memory (docs/techniques/cluster.md). k-blocks of W are awaited one by one. The loader has 4 warps,
so that no warp is without a partition and the cluster can meet.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .attention_blocks import FLAT
from .attention_exchange import MESSAGE
from .postnorm_cluster_common import (
    ABSENT,
    AFFINE,
    BEFORE,
    BK,
    COLUMNS,
    CONSUMERS,
    HAS_BIAS,
    ROWS,
    fetch_ahead,
    load_vector,
    standing,
)
from .postnorm_cluster_exchange import meet_cluster, release
from .postnorm_direct_steps import AFTER, BETA, BIAS, GAMMA, begin, finish, standardise
from .postnorm_multiply import accumulator, advance
from .postnorm_rows import column_of, load_rows
from .variants import Tile, Variant

# ---- loader ----------------------------------------------------------------------------------------------------------


@gluon.jit
def load_tile(x_desc, x_s, full, empty, tile, k, slot, phase, ST: gl.constexpr):
    """One k-block of a block of x, to the ring's next slot; returns the one after."""
    bar = full.index(slot)
    mbarrier.wait(empty.index(slot), phase)
    mbarrier.expect(bar, x_desc.nbytes_per_cta)
    tma.async_load(x_desc, [tile * ROWS, k * BK], bar, x_s.index(slot))
    return advance(slot, phase, ST)


@gluon.jit
def loader(x_desc, w_desc, x_s, w_s, full, empty, loaded, x_ptr, residual_ptr, column, group, first, step, tiles, M, KT,
           x_fetch, r_fetch, ST: gl.constexpr):  # fmt: skip
    meet_cluster()
    slot = 0
    phase = 1
    for tile in range(first, tiles, step):
        fetch_ahead(x_ptr, tile + step, M, x_fetch)
        if group == 0:
            fetch_ahead(residual_ptr, tile + step, M, r_fetch)
        for k in range(KT):
            if tile == first:
                place = w_s.index(k).reinterpret(w_s.dtype, [4, 4, 4, 2, BK], w_desc.layout)
                mbarrier.expect(loaded.index(k), w_desc.nbytes_per_cta)
                tma.async_load(w_desc, [column // 32, 0, 0, 0, k * BK], loaded.index(k), place)
            slot, phase = load_tile(x_desc, x_s, full, empty, tile, k, slot, phase, ST)


# ---- consumers -------------------------------------------------------------------------------------------------------


@gluon.jit
def multiply(x_s, w_s, full, loaded, follow, slot, phase, k, KT, turn, acc, FIRST: gl.constexpr):
    """One k-block. Passes the turn on when the last slot has been seen."""
    if turn == 0:
        mbarrier.wait(loaded.index(k), 0)
    mbarrier.wait(full.index(slot), phase)
    release(follow, k == KT - 1)
    w = w_s.index(k).permute((1, 0))
    return warpgroup_mma(x_s.index(slot), w, acc, use_acc=not FIRST, is_async=True)


@gluon.jit
def product(x_s, w_s, full, empty, loaded, turn, following, residual_ptr, r_pitch, row, end, column, width, step0, KT,
            ST: gl.constexpr):  # fmt: skip
    """A block of x times the CTA's part of W, and rows of the residual before `end`, which come under the last product."""
    slot = step0 % ST
    phase = (step0 // ST) & 1
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator(COLUMNS))
    acc = multiply(x_s, w_s, full, loaded, following, slot, phase, 0, KT, turn, acc, True)
    acc = warpgroup_mma_wait(1, deps=(acc,))  # for none
    slot, phase = advance(slot, phase, ST)
    for k in range(1, KT):
        acc = multiply(x_s, w_s, full, loaded, following, slot, phase, k, KT, turn, acc, False)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        release(empty.index(gl.where(slot == 0, ST - 1, slot - 1)), True)
        slot, phase = advance(slot, phase, ST)
    more = load_rows(residual_ptr, r_pitch, row, end, column, width)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release(empty.index(gl.where(slot == 0, ST - 1, slot - 1)), True)
    return acc, more


@gluon.jit
def consumer(y_ptr, side_ptr, x_s, w_s, vectors, messages, full, empty, loaded, turns, arrived, residual_ptr, mean_ptr,
             rstd_ptr, pitch, r_pitch, column, rank, members, N, first, step, tiles, M, KT, groups, form,
             eps, W: gl.constexpr, NORM: gl.constexpr, ST: gl.constexpr, PEERS: gl.constexpr):  # fmt: skip
    meet_cluster()
    dtype: gl.constexpr = x_s.dtype
    width = gl.minimum(N - rank * COLUMNS, COLUMNS)
    inverse = 1.0 / N.to(gl.float32)
    last = (N - (members - 1) * COLUMNS).to(gl.float32)  # columns of the last CTA
    count = W  # blocks of the CTA before this one
    turn = 0  # blocks of this consumer
    for tile in range(first + W * step, tiles, CONSUMERS * step):
        row = tile * ROWS
        mbarrier.wait(turns.index(W), (turn & 1) ^ (1 if W == 0 else 0))
        acc, more = product(x_s, w_s, full, empty, loaded, turn, turns.index((W + 1) % CONSUMERS), residual_ptr, r_pitch,
                            row, gl.where((form & BEFORE) != 0, M, 0), column, width, count * KT, KT, ST)  # fmt: skip
        at = 2 * W + (turn & 1)
        acc, mean, square = begin(acc, more, vectors, width, messages.index(at), arrived.index(at), rank, members, form,
                                  NORM, dtype)  # fmt: skip
        more = load_rows(residual_ptr, r_pitch, row, gl.where((form & AFTER) != 0, M, 0), column, width)
        acc = standardise(acc, mean, square, side_ptr, pitch, mean_ptr, rstd_ptr, row, M, column, width,
                          messages.index(at), arrived.index(at), (turn >> 1) & 1, rank, members, last, inverse, groups,
                          form, eps, NORM, PEERS)  # fmt: skip
        finish(acc, more, vectors, y_ptr, pitch, row, M, column, width, form, dtype)
        count += CONSUMERS
        turn += 1


# ---- kernel ----------------------------------------------------------------------------------------------------------


@gluon.jit
def init_barriers(full, empty, loaded, turns, arrived):
    """A slot is handed back, and a turn passed on, by a consumer's four warps."""
    SLOTS: gl.constexpr = full.shape[0]
    PARTS: gl.constexpr = loaded.shape[0]
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=4)
    for i in gl.static_range(PARTS):
        mbarrier.init(loaded.index(i), count=1)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(i), count=4)
    for i in gl.static_range(2 * CONSUMERS):
        mbarrier.init(arrived.index(i), count=1)
    gl.inline_asm("fence.mbarrier_init.release.cluster;", "~{memory}", [], (), is_pure=False)


@gluon.jit
def keep_vector(vectors, which: gl.constexpr, ptr, kind, default: gl.constexpr, column, width, dtype: gl.constexpr):
    """A CTA's part of bias, gamma or beta as fp32 in shared memory, in the order of a thread's columns."""
    j = column_of(gl.arange(0, COLUMNS, gl.BlockedLayout([1], [32], [4], [0])))
    vectors.index(which).store(load_vector(ptr, kind, default, j, column, width, dtype))


@gluon.jit(do_not_specialize=["M", "N", "KT", "members", "groups"])
def postnorm_direct_kernel(
    x_desc,  # [M, K]
    w_desc,  # [groups * N / 32, 4, 4, 2, K]: row 32 J + 8 q + 2 i + e of W is at [J, i, q, e]
    x_ptr,  # x again
    y_ptr,  # [M, groups * N]
    side_ptr,  # likewise, zhat or z, or anything
    residual_ptr,  # [M, groups * N]
    bias_ptr,  # [groups * N], as the next two fp32 or in the dtype of x
    gamma_ptr,
    beta_ptr,
    mean_ptr,  # [M, groups] fp32, relative to the first value of the norm's columns
    rstd_ptr,  # [M, groups] fp32
    pitch,  # row stride of y
    r_pitch,  # row stride of the residual
    M,
    N,  # columns of a norm
    KT,  # k-blocks
    members,  # CTAs of a cluster
    groups,
    x_fetch,  # bytes of ROWS rows of x if these follow each other without a gap, else 0
    r_fetch,  # of the residual, likewise
    bias_kind,
    gamma_kind,
    beta_kind,
    form,
    eps,
    NORM: gl.constexpr,
    RES: gl.constexpr,  # k-blocks of W that there is room for
    ST: gl.constexpr,  # slots of x
    PEERS: gl.constexpr,  # most CTAs of a cluster
):
    dtype: gl.constexpr = x_desc.dtype
    rank, group, first, step, tiles, column, width = standing(members, groups, M, N)
    x_s = gl.allocate_shared_memory(dtype, [ST, ROWS, BK], x_desc.layout)
    w_s = gl.allocate_shared_memory(dtype, [RES, COLUMNS, BK], x_desc.layout)
    messages = gl.allocate_shared_memory(gl.float32, [2 * CONSUMERS, PEERS * MESSAGE], FLAT)
    vectors = gl.allocate_shared_memory(gl.float32, [3, COLUMNS], FLAT)
    full = mbarrier.allocate_mbarrier(batch=ST)
    empty = mbarrier.allocate_mbarrier(batch=ST)
    loaded = mbarrier.allocate_mbarrier(batch=RES)
    turns = mbarrier.allocate_mbarrier(batch=CONSUMERS)
    arrived = mbarrier.allocate_mbarrier(batch=2 * CONSUMERS)
    init_barriers(full, empty, loaded, turns, arrived)
    keep_vector(vectors, BIAS, bias_ptr, bias_kind, 0.0, column, width, dtype)
    keep_vector(vectors, GAMMA, gamma_ptr, gamma_kind, 1.0, column, width, dtype)
    keep_vector(vectors, BETA, beta_ptr, beta_kind, 0.0, column, width, dtype)
    form |= gl.where(bias_kind != ABSENT, HAS_BIAS, 0)
    form |= gl.where((gamma_kind != ABSENT) | (beta_kind != ABSENT), AFFINE, 0)
    gl.barrier()
    mean_ptr += group
    rstd_ptr += group
    gl.warp_specialize([
        (consumer, (y_ptr, side_ptr, x_s, w_s, vectors, messages, full, empty, loaded, turns, arrived, residual_ptr,
                    mean_ptr, rstd_ptr, pitch, r_pitch, column, rank, members, N, first, step, tiles, M, KT, groups,
                    form, eps, gl.constexpr(0), NORM, ST, PEERS)),
        (consumer, (y_ptr, side_ptr, x_s, w_s, vectors, messages, full, empty, loaded, turns, arrived, residual_ptr,
                    mean_ptr, rstd_ptr, pitch, r_pitch, column, rank, members, N, first, step, tiles, M, KT, groups,
                    form, eps, gl.constexpr(1), NORM, ST, PEERS)),
        (consumer, (y_ptr, side_ptr, x_s, w_s, vectors, messages, full, empty, loaded, turns, arrived, residual_ptr,
                    mean_ptr, rstd_ptr, pitch, r_pitch, column, rank, members, N, first, step, tiles, M, KT, groups,
                    form, eps, gl.constexpr(2), NORM, ST, PEERS)),
        (loader, (x_desc, w_desc, x_s, w_s, full, empty, loaded, x_ptr, residual_ptr, column, group, first, step, tiles, M,
                  KT, x_fetch, r_fetch, ST)),
    ], [4, 4, 4], [160, 160, 32])  # fmt: skip


# Most k-blocks, slots of x and CTAs of a cluster that fit into shared memory together.
SHAPES = [(4, 15, 4), (6, 12, 4), (8, 10, 4), (8, 9, 8)]


def _variant(dtype, norm, resident, slots, peers):
    args = {"x_desc": Tile(dtype, (64, 64)), "w_desc": Tile(dtype, (4, 4, 4, 2, 64))}
    args |= {f"{name}_ptr": f"*{dtype}:16" for name in ("x", "y", "side", "residual")}
    args |= dict.fromkeys("bias_ptr gamma_ptr beta_ptr".split(), "*fp32:16")
    args |= {"mean_ptr": "*fp32", "rstd_ptr": "*fp32", "pitch": "i64:8", "r_pitch": "i64:8"}
    args |= dict.fromkeys("M N KT members groups x_fetch r_fetch bias_kind gamma_kind beta_kind form".split(), "i32")
    args |= {"N": "i32:8", "x_fetch": "i32:16", "r_fetch": "i32:16", "eps": "fp32"}
    args |= {"NORM": {"rms": 1, "layer": 2}[norm], "RES": resident, "ST": slots, "PEERS": peers}
    return Variant(f"postnorm_direct_{norm}_{dtype}_{resident}_{peers}", postnorm_direct_kernel, args, maxnreg=128)


VARIANTS = [_variant(d, n, *shape) for d in ("bf16", "fp16") for n in ("rms", "layer") for shape in SHAPES]
