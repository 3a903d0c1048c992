"""GEMM and row norm in one kernel, a row of the result spread over the CTAs of a cluster (`cluster` of linear_norm, where
W stays in shared memory).

    z = x W^T + bias (+ residual);  hat = rstd * (z - mean);  y = gamma * hat + beta (+ residual)

CTA r of a cluster has 128 columns of the result and of W, which it keeps, and walks over blocks of 64 rows together with
its cluster. With several groups, norms over equal parts of the columns, each cluster serves one of them. Partitions:

    consumers   three warpgroups that take blocks in turn: products, statistics of the CTA's columns, those of whole rows by
                messages through distributed shared memory, norm and stores, all from registers
    loader      tiles of x; 4 warps, so that no warp is without a partition and the cluster can meet

Rows of W come in such an order that a thread's columns of the result follow each other (postnorm_rows.py): so residuals
come and results go in 16 bytes per thread, from and to memory, past shared memory, whose bandwidth the products need (96 of
128 bytes a clock, and x comes besides), and no warp of a consumer waits for another after the product.

While one consumer multiplies, the other two exchange, normalise and store. Their slots of x follow each other in one
ring, so a consumer begins only when the one before has seen all of its slots filled: otherwise it could take a slot's
next phase for its last.

A consumer sends its part of block i after it has read all parts of its block before, which every peer sent after reading
those of the block before that: two places per consumer suffice. Every message is awaited by whom it was sent to, so none
arrives at a CTA that has ended.

The cluster's size is set by the launch: to the compiler this is a kernel of single CTAs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .attention_backward_common import meet_cluster
from .attention_blocks import FLAT
from .attention_exchange import MESSAGE, own_address
from .postnorm_cluster_exchange import release
from .postnorm_direct_steps import AFTER, BEFORE, COLUMNS, ROWS, begin, finish, load_vectors, standardise
from .postnorm_multiply import accumulator, advance
from .postnorm_rows import load_rows
from .variants import Tile, Variant

BK = gl.constexpr(64)
CONSUMERS = gl.constexpr(3)


# ---- loader ----------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _fetch(outputs, inputs):
    """One thread of the cluster's first CTA asks for a contiguous piece of memory to be brought into L2."""
    (address,), (size,) = inputs
    return f"""{{ .reg .pred p, q; .reg .b32 t;
    mov.u32 t, %cluster_ctarank; setp.eq.u32 q, t, 0;
    mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.and.u32 p, t, 0, q;
    @p cp.async.bulk.prefetch.L2.global [{address}], {size}; }}"""


@gluon.jit
def fetch_ahead(ptr, ahead, M, size):
    """Block `ahead` of whole rows that follow each other without a gap, if `size`, its bytes, is not 0."""
    if (size != 0) & ((ahead + 1) * ROWS <= M):
        at = ptr.to(gl.int64) + ahead.to(gl.int64) * size
        gl.inline_asm(_fetch, "l,r", [at, size], (), is_pure=False)


@gluon.constexpr_function
def _spread(outputs, inputs):
    """One thread has a tile of x copied to all CTAs of the cluster; x_desc is the kernel's first parameter."""
    (place,), (bar,), (row,), (column,), (members,) = inputs
    return f"""{{ .reg .pred p, e; .reg .b32 t; .reg .b16 m; .reg .b64 d;
    mov.u32 t, %tid.x; and.b32 t, t, 127; setp.lt.u32 p, t, 32;
    bar.warp.sync 0xffffffff;
    elect.sync _|e, 0xffffffff; and.pred p, p, e;
    mov.b32 t, 1; shl.b32 t, t, {members}; add.u32 t, t, -1; cvt.u16.u32 m, t;
    mov.b64 d, postnorm_direct_kernel_param_0; cvta.param.u64 d, d;
    @p cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [{place}],
        [d, {{{column}, {row}}}], [{bar}], m; }}"""


@gluon.constexpr_function
def _hand_back(outputs, inputs):
    (bar,), (owner,) = inputs
    return f"""{{ .reg .pred p; .reg .b32 to;
    bar.warp.sync 0xffffffff;
    elect.sync _|p, 0xffffffff;
    mapa.shared::cluster.u32 to, {bar}, {owner};
    @p mbarrier.arrive.shared::cluster.b64 _, [to]; }}"""


@gluon.jit
def hand_back(empty, slot, owners, SPREAD: gl.constexpr):
    """Once per warp, to the CTA that fills this slot in all CTAs."""
    if SPREAD:
        args = [own_address(empty.index(slot)), slot & (owners - 1)]
        gl.inline_asm(_hand_back, "r,r,~{memory}", args, (), is_pure=False)
    else:
        release(empty.index(slot), True)


@gluon.jit
def loader(x_desc, w_desc, x_s, w_s, full, empty, loaded, x_ptr, residual_ptr, column, group, first, step, tiles, M, KT,
           rank, members, owners, x_fetch, r_fetch, ST: gl.constexpr,
           SPREAD: gl.constexpr):  # fmt: skip
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
            bar = full.index(slot)
            if SPREAD:
                mine = (slot & (owners - 1)) == rank
                if mine:
                    mbarrier.wait(empty.index(slot), phase)
                else:  # all of the bytes of the slot's use before have come
                    mbarrier.wait(bar, phase)
                mbarrier.expect(bar, x_desc.nbytes_per_cta)
                if mine:
                    args = [own_address(x_s.index(slot)), own_address(bar), tile * ROWS, k * BK, members]
                    gl.inline_asm(_spread, "r,r,r,r,r,~{memory}", args, (), is_pure=False)
            else:
                mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(bar, x_desc.nbytes_per_cta)
                tma.async_load(x_desc, [tile * ROWS, k * BK], bar, x_s.index(slot))
            slot, phase = advance(slot, phase, ST)
    if SPREAD:  # nobody ends while another CTA may still hand it a slot
        meet_cluster()


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
            owners, ST: gl.constexpr, SPREAD: gl.constexpr):  # fmt: skip
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
        hand_back(empty, gl.where(slot == 0, ST - 1, slot - 1), owners, SPREAD)
        slot, phase = advance(slot, phase, ST)
    more = load_rows(residual_ptr, r_pitch, row, end, column, width)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    hand_back(empty, gl.where(slot == 0, ST - 1, slot - 1), owners, SPREAD)
    return acc, more


@gluon.jit
def consumer(y_ptr, side_ptr, x_s, w_s, vectors, messages, full, empty, loaded, turns, arrived, residual_ptr, mean_ptr,
             rstd_ptr, pitch, r_pitch, column, rank, members, owners, N, first, step, tiles, M, KT, groups,
             form, eps, W: gl.constexpr, NORM: gl.constexpr, ST: gl.constexpr, PEERS: gl.constexpr,
             SPREAD: gl.constexpr):  # fmt: skip
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
                            row, gl.where((form & BEFORE) != 0, M, 0), column, width, count * KT, KT, owners, ST,
                            SPREAD)  # fmt: skip
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
    if SPREAD:
        meet_cluster()


@gluon.constexpr_function
def _initialise(outputs, inputs):
    """A barrier for a number of arrivals that is known at launch."""
    (bar,), (count,) = inputs
    return f"""{{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
    @p mbarrier.init.shared::cta.b64 [{bar}], {count}; }}"""


# ---- kernel ----------------------------------------------------------------------------------------------------------


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
    SPREAD: gl.constexpr,  # each tile of x is read once per cluster
):
    dtype: gl.constexpr = x_desc.dtype
    cluster = gl.program_id(0) // members
    rank = gl.program_id(0) - cluster * members
    first = cluster // groups
    group = cluster - first * groups
    step = gl.num_programs(0) // (members * groups)
    tiles = (M + ROWS - 1) // ROWS
    owners = gl.where(members >= 4, 4, gl.where(members >= 2, 2, 1))  # CTAs that fill slots of x
    column = group * N + rank * COLUMNS
    width = gl.minimum(N - rank * COLUMNS, COLUMNS)
    x_s = gl.allocate_shared_memory(dtype, [ST, ROWS, BK], x_desc.layout)
    w_s = gl.allocate_shared_memory(dtype, [RES, COLUMNS, BK], x_desc.layout)
    messages = gl.allocate_shared_memory(gl.float32, [2 * CONSUMERS, PEERS * MESSAGE], FLAT)
    vectors = gl.allocate_shared_memory(gl.float32, [3, COLUMNS], FLAT)
    full = mbarrier.allocate_mbarrier(batch=ST)
    empty = mbarrier.allocate_mbarrier(batch=ST)
    loaded = mbarrier.allocate_mbarrier(batch=RES)
    turns = mbarrier.allocate_mbarrier(batch=CONSUMERS)
    arrived = mbarrier.allocate_mbarrier(batch=2 * CONSUMERS)
    for i in gl.static_range(ST):
        mbarrier.init(full.index(i), count=1)
        args = [own_address(empty.index(i)), (4 * members if SPREAD else 4)]  # a consumer's warps in all CTAs
        gl.inline_asm(_initialise, "r,r,~{memory}", args, (), is_pure=False)
    for i in gl.static_range(RES):
        mbarrier.init(loaded.index(i), count=1)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(i), count=4)
    for i in gl.static_range(2 * CONSUMERS):
        mbarrier.init(arrived.index(i), count=1)
    gl.inline_asm("fence.mbarrier_init.release.cluster;", "~{memory}", [], (), is_pure=False)
    form |= load_vectors(vectors, bias_ptr, gamma_ptr, beta_ptr, bias_kind, gamma_kind, beta_kind, column, width, dtype)
    gl.barrier()
    mean_ptr += group
    rstd_ptr += group
    gl.warp_specialize([
        (consumer, (y_ptr, side_ptr, x_s, w_s, vectors, messages, full, empty, loaded, turns, arrived, residual_ptr,
                    mean_ptr, rstd_ptr, pitch, r_pitch, column, rank, members, owners, N, first, step, tiles, M, KT, groups,
                    form, eps, gl.constexpr(0), NORM, ST, PEERS, SPREAD)),
        (consumer, (y_ptr, side_ptr, x_s, w_s, vectors, messages, full, empty, loaded, turns, arrived, residual_ptr,
                    mean_ptr, rstd_ptr, pitch, r_pitch, column, rank, members, owners, N, first, step, tiles, M, KT, groups,
                    form, eps, gl.constexpr(1), NORM, ST, PEERS, SPREAD)),
        (consumer, (y_ptr, side_ptr, x_s, w_s, vectors, messages, full, empty, loaded, turns, arrived, residual_ptr,
                    mean_ptr, rstd_ptr, pitch, r_pitch, column, rank, members, owners, N, first, step, tiles, M, KT, groups,
                    form, eps, gl.constexpr(2), NORM, ST, PEERS, SPREAD)),
        (loader, (x_desc, w_desc, x_s, w_s, full, empty, loaded, x_ptr, residual_ptr, column, group, first, step, tiles, M,
                  KT, rank, members, owners, x_fetch, r_fetch, ST,
                  SPREAD)),
    ], [4, 4, 4], [160, 160, 32])  # fmt: skip


# Most k-blocks, slots of x and CTAs of a cluster that fit into shared memory together.
SHAPES = [(4, 15, 4), (6, 12, 4), (8, 10, 4), (8, 9, 8)]


def _variant(dtype, norm, resident, slots, peers, spread):
    args = {"x_desc": Tile(dtype, (64, 64)), "w_desc": Tile(dtype, (4, 4, 4, 2, 64))}
    args |= {f"{name}_ptr": f"*{dtype}:16" for name in ("x", "y", "side", "residual")}
    args |= dict.fromkeys("bias_ptr gamma_ptr beta_ptr".split(), "*fp32:16")
    args |= {"mean_ptr": "*fp32", "rstd_ptr": "*fp32", "pitch": "i64:8", "r_pitch": "i64:8"}
    args |= dict.fromkeys("M N KT members groups x_fetch r_fetch bias_kind gamma_kind beta_kind form".split(), "i32")
    args |= {"N": "i32:8", "x_fetch": "i32:16", "r_fetch": "i32:16", "eps": "fp32"}
    args |= {"NORM": {"rms": 1, "layer": 2}[norm], "RES": resident, "ST": slots, "PEERS": peers, "SPREAD": spread}
    name = f"postnorm_{'spread' if spread else 'direct'}_{norm}_{dtype}_{resident}_{peers}"
    return Variant(name, postnorm_direct_kernel, args, maxnreg=128)


VARIANTS = [
    _variant(d, n, *shape, spread)
    for d in ("bf16", "fp16")
    for n in ("rms", "layer")
    for shape in SHAPES
    for spread in (False, True)
    if not (spread and n == "layer" and shape[2] == 8)  # would spill
]
