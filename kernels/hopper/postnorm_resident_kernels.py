"""The post-norm kernel over clusters (postnorm_cluster_common.py) that stores results through shared memory: a consumer puts
64 columns at a time into a place of its own, from which TMA takes them. W lies as in memory and comes as a whole.

It serves what has no residual. It can add one, 4 bytes per thread and load; postnorm_direct_kernels.py takes less time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .attention_blocks import FLAT
from .attention_exchange import MESSAGE
from .postnorm_cluster_common import (
    BK,
    COLUMNS,
    CONSUMERS,
    ROWS,
    fetch_ahead,
    init_barriers,
    load_tile,
    load_vectors,
    standing,
)
from .postnorm_cluster_exchange import meet_cluster, release
from .postnorm_multiply import CHUNK, accumulator, advance, chunks_of
from .postnorm_resident_steps import as_it_lies, begin, finish, standardise
from .variants import Tile, Variant

# ---- loader ----------------------------------------------------------------------------------------------------------


@gluon.jit
def loader(x_desc, w_desc, x_s, w_s, full, empty, loaded, x_ptr, column, first, step, tiles, M, KT, fetch,
           RES: gl.constexpr, ST: gl.constexpr):  # fmt: skip
    meet_cluster()
    mbarrier.expect(loaded.index(0), RES * w_desc.nbytes_per_cta)
    for block in gl.static_range(RES):  # those past K are filled with zeros
        tma.async_load(w_desc, [column, block * BK], loaded.index(0), w_s.index(block))
    slot = 0
    phase = 1
    for tile in range(first, tiles, step):
        fetch_ahead(x_ptr, tile + step, M, fetch)
        for k in range(KT):
            slot, phase = load_tile(x_desc, x_s, full, empty, tile, k, slot, phase, ST)


# ---- consumers -------------------------------------------------------------------------------------------------------


@gluon.jit
def product(x_s, w_s, full, empty, turns, following, step0, KT, ST: gl.constexpr):
    """A block of x times the CTA's part of W. Passes the turn on when all slots have been seen."""
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator(COLUMNS))
    slot = step0 % ST
    phase = (step0 // ST) & 1
    for k in range(KT):
        mbarrier.wait(full.index(slot), phase)
        acc = warpgroup_mma(x_s.index(slot), w_s.index(k).permute((1, 0)), acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        release(empty.index(gl.where(slot == 0, ST - 1, slot - 1)), k > 0)
        slot, phase = advance(slot, phase, ST)
    mbarrier.arrive(turns.index(following))
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release(empty.index(gl.where(slot == 0, ST - 1, slot - 1)), True)
    return acc


@gluon.jit
def consumer(y_desc, side_desc, x_s, w_s, y_s, vectors, messages, full, empty, loaded, turns, arrived, residual_ptr,
             mean_ptr, rstd_ptr, r_pitch, column, rank, members, N, first, step, tiles, M, KT, groups, form, eps,
             W: gl.constexpr, NORM: gl.constexpr, ST: gl.constexpr, PEERS: gl.constexpr):  # fmt: skip
    meet_cluster()
    width = gl.minimum(N - rank * COLUMNS, COLUMNS)
    inverse = 1.0 / N.to(gl.float32)
    last = (N - (members - 1) * COLUMNS).to(gl.float32)  # columns of the last CTA
    place = y_s.index(W)
    mbarrier.wait(loaded.index(0), 0)
    count = W  # blocks of the CTA before this one
    turn = 0  # blocks of this consumer
    for tile in range(first + W * step, tiles, CONSUMERS * step):
        mbarrier.wait(turns.index(W), (turn & 1) ^ (1 if W == 0 else 0))
        acc = product(x_s, w_s, full, empty, turns, (W + 1) % CONSUMERS, count * KT, KT, ST)
        row = tile * ROWS
        rows = gl.minimum(M - row, ROWS)
        chunks = chunks_of(acc, 2)
        at = 2 * W + (turn & 1)
        chunks, mean, square = begin(chunks, vectors, residual_ptr, r_pitch, row, rows, column, width,
                                     messages.index(at), arrived.index(at), rank, members, form, NORM)  # fmt: skip
        chunks = standardise(chunks, mean, square, side_desc, place, mean_ptr, rstd_ptr, row, rows, column, width,
                             messages.index(at), arrived.index(at), (turn >> 1) & 1, rank, members, last, inverse,
                             groups, form, eps, NORM, PEERS)  # fmt: skip
        finish(chunks, vectors, residual_ptr, r_pitch, y_desc, place, row, rows, column, width, form)
        count += CONSUMERS
        turn += 1
    tma.store_wait(0)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["M", "N", "KT", "members", "groups"])
def postnorm_resident_kernel(
    x_desc,  # [M, K]
    w_desc,  # [groups * N, K]
    y_desc,  # [M, groups * N] contiguous
    side_desc,  # likewise, zhat or z, or anything
    x_ptr,  # x again
    residual_ptr,  # [M, groups * N]
    bias_ptr,  # [groups * N], as the next two fp32 or in the dtype of x
    gamma_ptr,
    beta_ptr,
    mean_ptr,  # [M, groups] fp32, relative to the first value of the norm's columns
    rstd_ptr,  # [M, groups] fp32
    r_pitch,  # row stride of the residual
    M,
    N,  # columns of a norm
    KT,  # k-blocks
    members,  # CTAs of a cluster
    groups,
    fetch,  # bytes of ROWS rows of x if these follow each other without a gap, else 0
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
    w_s = gl.allocate_shared_memory(dtype, [RES, COLUMNS, BK], w_desc.layout)
    y_s = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, CHUNK], y_desc.layout)
    messages = gl.allocate_shared_memory(gl.float32, [2 * CONSUMERS, PEERS * MESSAGE], FLAT)
    vectors = gl.allocate_shared_memory(gl.float32, [6, CHUNK], FLAT)
    full = mbarrier.allocate_mbarrier(batch=ST)
    empty = mbarrier.allocate_mbarrier(batch=ST)
    loaded = mbarrier.allocate_mbarrier(batch=1)
    turns = mbarrier.allocate_mbarrier(batch=CONSUMERS)
    arrived = mbarrier.allocate_mbarrier(batch=2 * CONSUMERS)
    init_barriers(full, empty, loaded, turns, arrived, 1)
    form |= load_vectors(vectors, bias_ptr, gamma_ptr, beta_ptr, bias_kind, gamma_kind, beta_kind, column, width, dtype,
                         as_it_lies)  # fmt: skip
    gl.barrier()
    mean_ptr += group
    rstd_ptr += group
    gl.warp_specialize([
        (consumer, (y_desc, side_desc, x_s, w_s, y_s, vectors, messages, full, empty, loaded, turns, arrived,
                    residual_ptr, mean_ptr, rstd_ptr, r_pitch, column, rank, members, N, first, step, tiles, M, KT,
                    groups, form, eps, gl.constexpr(0), NORM, ST, PEERS)),
        (consumer, (y_desc, side_desc, x_s, w_s, y_s, vectors, messages, full, empty, loaded, turns, arrived,
                    residual_ptr, mean_ptr, rstd_ptr, r_pitch, column, rank, members, N, first, step, tiles, M, KT,
                    groups, form, eps, gl.constexpr(1), NORM, ST, PEERS)),
        (consumer, (y_desc, side_desc, x_s, w_s, y_s, vectors, messages, full, empty, loaded, turns, arrived,
                    residual_ptr, mean_ptr, rstd_ptr, r_pitch, column, rank, members, N, first, step, tiles, M, KT,
                    groups, form, eps, gl.constexpr(2), NORM, ST, PEERS)),
        (loader, (x_desc, w_desc, x_s, w_s, full, empty, loaded, x_ptr, column, first, step, tiles, M, KT, fetch, RES,
                  ST)),
    ], [4, 4, 4], [152, 152, 40])  # fmt: skip


# Most k-blocks, slots of x and CTAs of a cluster that fit into shared memory together.
SHAPES = [(4, 12, 4), (6, 10, 4), (8, 7, 4), (8, 6, 8)]


def _variant(dtype, norm, resident, slots, peers):
    tiles = {"x_desc": (64, 64), "w_desc": (128, 64), "y_desc": (64, 64), "side_desc": (64, 64)}
    args = {name: Tile(dtype, box) for name, box in tiles.items()}
    args |= {f"{name}_ptr": f"*{dtype}:16" for name in ("x", "residual")}
    args |= dict.fromkeys("bias_ptr gamma_ptr beta_ptr".split(), "*fp32:16")
    args |= {"mean_ptr": "*fp32", "rstd_ptr": "*fp32", "r_pitch": "i64:8"}
    args |= dict.fromkeys("M N KT members groups fetch bias_kind gamma_kind beta_kind form".split(), "i32")
    args |= {"N": "i32:8", "fetch": "i32:16", "eps": "fp32"}
    args |= {"NORM": {"rms": 1, "layer": 2}[norm], "RES": resident, "ST": slots, "PEERS": peers}
    name = f"postnorm_resident_{norm}_{dtype}_{resident}_{peers}"
    return Variant(name, postnorm_resident_kernel, args, maxnreg=128)


VARIANTS = [_variant(d, n, *shape) for d in ("bf16", "fp16") for n in ("rms", "layer") for shape in SHAPES]
