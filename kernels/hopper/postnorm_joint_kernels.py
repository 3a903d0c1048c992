"""The post-norm kernel over clusters (postnorm_cluster_common.py) whose three consumers run one text, so that the
instructions of a block lie in the caches of instructions once instead of three times.

There are no partitions: 16 warps run the kernel, 12 of them consumers and one the loader, as their numbers say. After its
product no warp of a consumer waits for another one of its CTA: each exchanges the statistics of its own 16 rows and stores
them.
A multiprocessor's shared memory is what limits it where K is large: of 128 bytes a clock the products read 96. Hence the
bias comes as a product, gamma and beta in 16 bits where they are given so, and results leave by TMA. A residual is not
served.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .attention_blocks import FLAT
from .attention_exchange import MESSAGE, own_address
from .postnorm_cluster_common import (
    ABSENT,
    AFFINE,
    BK,
    COLUMNS,
    CONSUMERS,
    HAS_BIAS,
    ROWS,
    WIDE,
    fetch_ahead,
    load_vector,
    standing,
)
from .postnorm_joint_product import (
    await_phase,
    cluster_arrive,
    cluster_wait,
    expect,
    load_w,
    load_x,
    meet_consumers,
    multiply,
    store_bias,
    thread_number,
    warp_number,
)
from .postnorm_joint_steps import affine, collect, normalise, pack, save, scales, send, statistics
from .postnorm_joint_stores import PLACE, drain, store_rows
from .postnorm_multiply import advance
from .postnorm_normalise import HAT, SAVE, SUM
from .variants import Tile, Variant

WARPS = gl.constexpr(4)  # of a consumer
PACKED = gl.constexpr(128)  # a further bit of `form`: gamma and beta are read in 16 bits

# ---- loader ----------------------------------------------------------------------------------------------------------


@gluon.jit
def loader(x, w, full, empty, x_ptr, column, first, step, tiles, M, KT, fetch, ST: gl.constexpr):
    """W comes with the first block of x, k-block by k-block and on the same barriers."""
    slot = 0
    phase = 1
    for tile in range(first, tiles, step):
        fetch_ahead(x_ptr, tile + step, M, fetch)
        for k in range(KT):
            bar = full + 8 * slot
            await_phase(empty + 8 * slot, phase)
            if tile == first:
                expect(bar, 2 * (ROWS + COLUMNS) * BK)
                load_w(w + k * (2 * COLUMNS * BK), bar, k * BK, column)
            else:
                expect(bar, 2 * ROWS * BK)
            load_x(x + slot * (2 * ROWS * BK), bar, k * BK, tile * ROWS)
            slot, phase = advance(slot, phase, ST)


# ---- consumers -------------------------------------------------------------------------------------------------------


@gluon.jit
def consumer(x, w, bias, wide, packed, places, messages, full, empty, turns, arrived, mean_ptr, rstd_ptr, column, width,
             rank, members, N, first, step, tiles, M, KT, groups, form, eps, warp, tid, dtype: gl.constexpr,
             NORM: gl.constexpr, ST: gl.constexpr, PLACES: gl.constexpr, PEERS: gl.constexpr):  # fmt: skip
    if members > 1:  # a CTA without peers would wait for its other warps here
        cluster_wait()
    mine = warp // WARPS
    inverse = 1.0 / N.to(gl.float32)
    share = 1.0 / width.to(gl.float32)
    before_last = (members - 1) * COLUMNS  # columns
    part = (N - before_last).to(gl.float32) * inverse
    weight = before_last.to(gl.float32) * part
    follow = turns + 8 * gl.where(mine == CONSUMERS - 1, 0, mine + 1)
    count = mine  # blocks of the CTA before this one
    turn = 0  # blocks of this consumer
    for tile in range(first + mine * step, tiles, CONSUMERS * step):
        row = tile * ROWS
        parity = (turn & 1) ^ gl.where(mine == 0, 1, 0)
        acc = multiply(x, w, bias, tid, form & HAS_BIAS, full, empty, turns + 8 * mine, parity, follow, count * KT, KT,
                       dtype, ST)  # fmt: skip
        at = 2 * mine + (turn & 1)
        place = messages + at * (4 * PEERS * MESSAGE)
        bar = arrived + 8 * (WARPS * at + warp % WARPS)
        mean, square = statistics(acc, width, share, NORM)
        if members > 1:
            send(tid, place, bar, rank, members, mean, square, PEERS)
        if form & SUM:
            store_rows(acc, tid, places, row, column, width, dtype, True, PLACES)
        if members > 1:
            mean, square = collect(tid, place, bar, (turn >> 1) & 1, members, part, weight, NORM, PEERS)
        rstd, shift = scales(mean, square, inverse, eps)
        if ((form & SAVE) != 0) & (rank == 0):
            save(tid, mean_ptr, rstd_ptr, mean, rstd, acc, row, M, groups, NORM, dtype)
        acc = normalise(acc, rstd, shift, NORM)
        if form & HAT:
            store_rows(acc, tid, places, row, column, width, dtype, True, PLACES)
        if form & AFFINE:
            acc = affine(acc, tid, wide, packed, form & PACKED, dtype)
        store_rows(acc, tid, places, row, column, width, dtype, False, PLACES)
        count += CONSUMERS
        turn += 1
    drain()


# ---- kernel ----------------------------------------------------------------------------------------------------------


@gluon.jit
def init_barriers(barriers, arrivals: gl.constexpr):
    COUNT: gl.constexpr = barriers.shape[0]
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=arrivals)


@gluon.jit
def load_vectors(bias, vectors, wide, packed, tid, bias_ptr, gamma_ptr, beta_ptr, bias_kind, gamma_kind, beta_kind, column,
                 width, dtype: gl.constexpr):  # fmt: skip
    """By the consumers: the bias's tile, and per pair of columns gammas and betas, in fp32 and in 16 bits."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [16], [0])
    if bias_kind != ABSENT:
        store_bias(
            bias, tid, load_vector(bias_ptr, bias_kind, 0.0, gl.arange(0, COLUMNS, L), column, width, dtype), dtype
        )
    p = gl.arange(0, 2 * COLUMNS, L)
    j = 2 * (p >> 2) + (p & 1)
    gamma = load_vector(gamma_ptr, gamma_kind, 1.0, j, column, width, dtype)
    beta = load_vector(beta_ptr, beta_kind, 0.0, j, column, width, dtype)
    vectors.store(gl.where((p & 2) == 0, gamma, beta))
    meet_consumers()
    pack(tid, wide, packed, dtype)
    meet_consumers()


@gluon.jit(do_not_specialize=["M", "N", "KT", "members", "groups"])
def postnorm_joint_kernel(
    x_desc,  # [M, K]
    w_desc,  # [groups * N, K]
    y_desc,  # [M, groups * N] contiguous
    side_desc,  # likewise, zhat or z, or anything
    x_ptr,  # x again
    bias_ptr,  # [groups * N], as the next two fp32 or in the dtype of x
    gamma_ptr,
    beta_ptr,
    mean_ptr,  # [M, groups] fp32, relative to the first value of the norm's columns
    rstd_ptr,  # [M, groups] fp32
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
    PLACES: gl.constexpr,  # of a warp, for stores
    PEERS: gl.constexpr,  # most CTAs of a cluster
):
    dtype: gl.constexpr = x_desc.dtype
    rank, group, first, step, tiles, column, width = standing(members, groups, M, N)
    x_s = gl.allocate_shared_memory(dtype, [ST, ROWS, BK], x_desc.layout)
    w_s = gl.allocate_shared_memory(dtype, [RES, COLUMNS, BK], x_desc.layout)
    y_s = gl.allocate_shared_memory(dtype, [CONSUMERS * WARPS * PLACES, 16, BK], y_desc.layout)
    messages = gl.allocate_shared_memory(gl.float32, [2 * CONSUMERS, PEERS * MESSAGE], FLAT)
    bias = gl.allocate_shared_memory(dtype, [8 * COLUMNS], FLAT)
    vectors = gl.allocate_shared_memory(gl.float32, [2 * COLUMNS], FLAT)
    packed = gl.allocate_shared_memory(gl.int32, [COLUMNS], FLAT)
    full = mbarrier.allocate_mbarrier(batch=ST)
    empty = mbarrier.allocate_mbarrier(batch=ST)
    turns = mbarrier.allocate_mbarrier(batch=CONSUMERS)
    arrived = mbarrier.allocate_mbarrier(batch=2 * CONSUMERS * WARPS)
    init_barriers(full, 1)
    init_barriers(empty, WARPS)  # a slot is handed back, and a turn passed on, by a consumer's warps
    init_barriers(turns, WARPS)
    init_barriers(arrived, 1)
    gl.inline_asm("fence.mbarrier_init.release.cluster;", "~{memory}", [], (), is_pure=False)
    gl.barrier()
    cluster_arrive()
    form |= gl.where(bias_kind != ABSENT, HAS_BIAS, 0)
    form |= gl.where((gamma_kind != ABSENT) | (beta_kind != ABSENT), AFFINE, 0)
    form |= gl.where((gamma_kind != WIDE) & (beta_kind != WIDE), PACKED, 0)
    warp, tid = warp_number(), thread_number()
    x, w, full_at, empty_at = own_address(x_s), own_address(w_s), own_address(full), own_address(empty)
    if warp == CONSUMERS * WARPS:
        loader(x, w, full_at, empty_at, x_ptr, column, first, step, tiles, M, KT, fetch, ST)
    elif warp < CONSUMERS * WARPS:
        tile, wide, narrow = own_address(bias), own_address(vectors), own_address(packed)
        load_vectors(tile, vectors, wide, narrow, tid, bias_ptr, gamma_ptr, beta_ptr, bias_kind, gamma_kind, beta_kind,
                     column, width, dtype)  # fmt: skip
        places = own_address(y_s) + warp * (PLACES * PLACE)
        consumer(x, w, tile, wide, narrow, places, own_address(messages), full_at, empty_at, own_address(turns),
                 own_address(arrived), mean_ptr + group, rstd_ptr + group, column, width, rank, members, N, first, step,
                 tiles, M, KT, groups, form, eps, warp, tid, dtype, NORM, ST, PLACES, PEERS)  # fmt: skip
    if (warp >= CONSUMERS * WARPS) & (members > 1):
        cluster_wait()


# Most k-blocks, slots of x, places of a warp and CTAs of a cluster that fit into shared memory together.
SHAPES = [(4, 12, 2, 4), (6, 8, 2, 4), (8, 7, 1, 4), (8, 5, 1, 8)]


def _variant(dtype, norm, resident, slots, places, peers):
    boxes = {"x_desc": (64, 64), "w_desc": (128, 64), "y_desc": (16, 64), "side_desc": (16, 64)}
    args = {name: Tile(dtype, box) for name, box in boxes.items()} | {"x_ptr": f"*{dtype}:16"}
    args |= dict.fromkeys("bias_ptr gamma_ptr beta_ptr".split(), "*fp32:16")
    args |= {"mean_ptr": "*fp32", "rstd_ptr": "*fp32"}
    args |= dict.fromkeys("M N KT members groups fetch bias_kind gamma_kind beta_kind form".split(), "i32")
    args |= {"N": "i32:8", "fetch": "i32:16", "eps": "fp32"}
    args |= {"NORM": {"rms": 1, "layer": 2}[norm], "RES": resident, "ST": slots, "PLACES": places, "PEERS": peers}
    name = f"postnorm_joint_{norm}_{dtype}_{resident}_{peers}"
    return Variant(name, postnorm_joint_kernel, args, num_warps=16, maxnreg=128)


VARIANTS = [_variant(d, n, *shape) for d in ("bf16", "fp16") for n in ("rms", "layer") for shape in SHAPES]
