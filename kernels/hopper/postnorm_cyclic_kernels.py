"""GEMM and row norm in one kernel, a row of the result spread over the CTAs of a cluster (`cluster` of linear_norm, where
W streams through shared memory).

    z = x W^T + bias (+ residual);  hat = rstd * (z - mean);  y = gamma * hat + beta (+ residual)

CTA r of a cluster has 256 columns of the result and walks over blocks of 64 rows together with its cluster. Partitions:

    consumers   two warpgroups that take blocks in turn: products, statistics of the CTA's columns, those of whole rows by
                messages through distributed shared memory, norm and stores, all from registers
    loader      tiles of W and x; 4 warps, so that no warp is without a partition and the cluster can meet

W's k-blocks come round and round: stage g holds number g modulo KT for both consumers, and beside it that k-block of x for
each consumer that multiplies. A product needs every k-block once, in any order, so a consumer begins with whichever is
next. It multiplies in KT stages, then lets PASSING stages go by, which the tensor cores work on for the other consumer
alone, while it finishes its block. The second one is half a period behind the first.

A consumer waits for every stage and hands it back, also one that it lets go by: so it never takes a slot's next phase for
its last, and the loader is never more than a ring ahead of it.

The places for messages are two per consumer, as in postnorm_resident_kernels.py, which also says why none arrives late.
The cluster's size is set by the launch: to the compiler this is a kernel of single CTAs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .attention_blocks import FLAT
from .attention_exchange import MESSAGE
from .postnorm_cluster_exchange import meet_cluster, release
from .postnorm_cluster_steps import CHUNK, ROWS, begin, finish, load_vectors, standardise
from .postnorm_multiply import accumulator, advance, chunks_of
from .variants import Tile, Variant

COLUMNS, BK, CHUNKS = gl.constexpr(256), gl.constexpr(64), gl.constexpr(4)
PASSING = gl.constexpr(4)  # stages
CONSUMERS = gl.constexpr(2)


@gluon.jit
def blocks_of(tiles, first, step, W: gl.constexpr):
    """How many blocks a consumer has: first + (2 i + W) step for i = 0, 1 .."""
    return gl.maximum(tiles - first - W * step + CONSUMERS * step - 1, 0) // (CONSUMERS * step)


@gluon.jit
def stages_of(tiles, first, step, KT):
    """Stages until both consumers have finished."""
    period = KT + PASSING
    behind = blocks_of(tiles, first, step, 1)
    return gl.maximum(blocks_of(tiles, first, step, 0) * period, gl.where(behind > 0, period // 2 + behind * period, 0))


# ---- loader ----------------------------------------------------------------------------------------------------------


@gluon.jit
def loader(x_desc, w_desc, x_s, w_s, full, empty, column, first, step, tiles, KT, ST: gl.constexpr):
    meet_cluster()
    period = KT + PASSING
    slot = 0
    phase = 1
    k = 0
    at0 = 0  # stage of the period of each consumer, which multiplies in the first KT
    at1 = -(period // 2)
    tile0 = first
    tile1 = first + step
    for _ in range(stages_of(tiles, first, step, KT)):
        mbarrier.wait(empty.index(slot), phase)
        bar = full.index(slot)
        one = (at0 < KT) & (tile0 < tiles)
        other = (at1 >= 0) & (at1 < KT) & (tile1 < tiles)
        if one & other:
            mbarrier.expect(bar, w_desc.nbytes_per_cta + 2 * x_desc.nbytes_per_cta)
        elif one | other:
            mbarrier.expect(bar, w_desc.nbytes_per_cta + x_desc.nbytes_per_cta)
        else:
            mbarrier.expect(bar, w_desc.nbytes_per_cta)
        if one:
            tma.async_load(x_desc, [tile0 * ROWS, k * BK], bar, x_s.index(2 * slot))
        tma.async_load(w_desc, [column, k * BK], bar, w_s.index(slot))
        if other:
            tma.async_load(x_desc, [tile1 * ROWS, k * BK], bar, x_s.index(2 * slot + 1))
        slot, phase = advance(slot, phase, ST)
        k = gl.where(k + 1 == KT, 0, k + 1)
        at0 += 1
        at1 += 1
        tile0 = gl.where(at0 == period, tile0 + CONSUMERS * step, tile0)
        tile1 = gl.where(at1 == period, tile1 + CONSUMERS * step, tile1)
        at0 = gl.where(at0 == period, 0, at0)
        at1 = gl.where(at1 == period, 0, at1)


# ---- consumers -------------------------------------------------------------------------------------------------------


@gluon.jit
def product(x_s, w_s, full, empty, slot, phase, KT, W: gl.constexpr, ST: gl.constexpr):
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator(COLUMNS))
    for k in range(KT):
        mbarrier.wait(full.index(slot), phase)
        w = w_s.index(slot).permute((1, 0))
        acc = warpgroup_mma(x_s.index(2 * slot + W), w, acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        release(empty.index(gl.where(slot == 0, ST - 1, slot - 1)), k > 0)
        slot, phase = advance(slot, phase, ST)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release(empty.index(gl.where(slot == 0, ST - 1, slot - 1)), True)
    return acc, slot, phase


@gluon.jit
def let_pass(full, empty, slot, phase, ST: gl.constexpr):
    mbarrier.wait(full.index(slot), phase)
    release(empty.index(slot), True)
    return advance(slot, phase, ST)


@gluon.jit
def consumer(y_desc, side_desc, x_s, w_s, y_s, vectors, messages, full, empty, arrived, residual_ptr, mean_ptr, rstd_ptr,
             r_pitch, column, rank, members, N, first, step, tiles, M, KT, form, eps, W: gl.constexpr,
             NORM: gl.constexpr, ST: gl.constexpr, PEERS: gl.constexpr):  # fmt: skip
    meet_cluster()
    width = gl.minimum(N - rank * COLUMNS, COLUMNS)
    inverse = 1.0 / N.to(gl.float32)
    last = (N - (members - 1) * COLUMNS).to(gl.float32)  # columns of the last CTA
    place = y_s.index(W)
    slot = 0
    phase = 0
    before = W * ((KT + PASSING) // 2)
    for _ in range(before):
        slot, phase = let_pass(full, empty, slot, phase, ST)
    blocks = blocks_of(tiles, first, step, W)
    for turn in range(blocks):
        acc, slot, phase = product(x_s, w_s, full, empty, slot, phase, KT, W, ST)
        row = (first + (CONSUMERS * turn + W) * step) * ROWS
        rows = gl.minimum(M - row, ROWS)
        chunks = chunks_of(acc, CHUNKS)
        at = 2 * W + (turn & 1)
        chunks, mean, square = begin(chunks, vectors, residual_ptr, r_pitch, row, rows, column, width,
                                     messages.index(at), arrived.index(at), rank, members, form, NORM, CHUNKS)  # fmt: skip
        slot, phase = let_pass(full, empty, slot, phase, ST)
        chunks = standardise(chunks, mean, square, side_desc, place, mean_ptr, rstd_ptr, row, rows, column, width,
                             messages.index(at), arrived.index(at), (turn >> 1) & 1, rank, members, last, inverse, 1,
                             form, eps, NORM, PEERS, CHUNKS)  # fmt: skip
        slot, phase = let_pass(full, empty, slot, phase, ST)
        finish(chunks, vectors, residual_ptr, r_pitch, y_desc, place, row, rows, column, width, form, CHUNKS)
        for _left in gl.static_range(PASSING - 2):
            slot, phase = let_pass(full, empty, slot, phase, ST)
    for _ in range(before + blocks * (KT + PASSING), stages_of(tiles, first, step, KT)):
        slot, phase = let_pass(full, empty, slot, phase, ST)
    tma.store_wait(0)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["M", "N", "KT", "members"])
def postnorm_cyclic_kernel(
    x_desc,  # [M, K]
    w_desc,  # [N, K]
    y_desc,  # [M, N] contiguous
    side_desc,  # likewise, zhat or z, or anything
    residual_ptr,  # [M, N]
    bias_ptr,  # [N], as the next two fp32 or in the dtype of x
    gamma_ptr,
    beta_ptr,
    mean_ptr,  # [M] fp32, relative to the row's first value
    rstd_ptr,  # [M] fp32
    r_pitch,  # row stride of the residual
    M,
    N,
    KT,  # k-blocks
    members,  # CTAs of a cluster
    bias_kind,
    gamma_kind,
    beta_kind,
    form,
    eps,
    NORM: gl.constexpr,
    ST: gl.constexpr,  # stages in shared memory
    PEERS: gl.constexpr,  # most CTAs of a cluster
):
    dtype: gl.constexpr = x_desc.dtype
    first = gl.program_id(0) // members
    rank = gl.program_id(0) - first * members
    step = gl.num_programs(0) // members
    tiles = (M + ROWS - 1) // ROWS
    column = rank * COLUMNS
    width = gl.minimum(N - column, COLUMNS)
    x_s = gl.allocate_shared_memory(dtype, [2 * ST, ROWS, BK], x_desc.layout)
    w_s = gl.allocate_shared_memory(dtype, [ST, COLUMNS, BK], w_desc.layout)
    y_s = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, CHUNK], y_desc.layout)
    messages = gl.allocate_shared_memory(gl.float32, [2 * CONSUMERS, PEERS * MESSAGE], FLAT)
    vectors = gl.allocate_shared_memory(gl.float32, [3 * CHUNKS, CHUNK], FLAT)
    full = mbarrier.allocate_mbarrier(batch=ST)
    empty = mbarrier.allocate_mbarrier(batch=ST)
    arrived = mbarrier.allocate_mbarrier(batch=2 * CONSUMERS)
    for i in gl.static_range(ST):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=8)  # all warps of both consumers
    for i in gl.static_range(2 * CONSUMERS):
        mbarrier.init(arrived.index(i), count=1)
    gl.inline_asm("fence.mbarrier_init.release.cluster;", "~{memory}", [], (), is_pure=False)
    form |= load_vectors(vectors, bias_ptr, gamma_ptr, beta_ptr, bias_kind, gamma_kind, beta_kind, column, width, dtype,
                         CHUNKS)  # fmt: skip
    gl.barrier()
    gl.warp_specialize([
        (consumer, (y_desc, side_desc, x_s, w_s, y_s, vectors, messages, full, empty, arrived, residual_ptr, mean_ptr,
                    rstd_ptr, r_pitch, column, rank, members, N, first, step, tiles, M, KT, form, eps, gl.constexpr(0),
                    NORM, ST, PEERS)),
        (consumer, (y_desc, side_desc, x_s, w_s, y_s, vectors, messages, full, empty, arrived, residual_ptr, mean_ptr,
                    rstd_ptr, r_pitch, column, rank, members, N, first, step, tiles, M, KT, form, eps, gl.constexpr(1),
                    NORM, ST, PEERS)),
        (loader, (x_desc, w_desc, x_s, w_s, full, empty, column, first, step, tiles, KT, ST)),
    ], [4, 4], [232, 40])  # fmt: skip


def _variant(dtype, norm):
    tiles = {"x_desc": (64, 64), "w_desc": (256, 64), "y_desc": (64, 64), "side_desc": (64, 64)}
    args = {name: Tile(dtype, box) for name, box in tiles.items()}
    args |= {"residual_ptr": f"*{dtype}:16"}
    args |= dict.fromkeys("bias_ptr gamma_ptr beta_ptr".split(), "*fp32:16")
    args |= {"mean_ptr": "*fp32", "rstd_ptr": "*fp32", "r_pitch": "i64:8"}
    args |= dict.fromkeys("M N KT members bias_kind gamma_kind beta_kind form".split(), "i32")
    args |= {"N": "i32:8", "eps": "fp32", "NORM": {"rms": 1, "layer": 2}[norm], "ST": 4, "PEERS": 4}
    return Variant(f"postnorm_cyclic_{norm}_{dtype}", postnorm_cyclic_kernel, args, maxnreg=168)


VARIANTS = [_variant(d, n) for d in ("bf16", "fp16") for n in ("rms", "layer")]
