"""The post-norm kernel over clusters (postnorm_cluster_common.py) whose three consumers run one text, so that the
instructions of a block lie in the caches of instructions once instead of three times.

There are no partitions: 16 warps run the kernel, 12 of them consumers and one the loader, as their numbers say. After its
product no warp of a consumer waits for another one of its CTA: each exchanges the statistics of its own 16 rows and stores
them. A block's accumulator starts with the bias. The kernel serves what has no residual: its parameters of one are left from
a form that served any.

Where K is large a multiprocessor's shared memory is the limit: of 128 bytes a clock the products read 96.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .attention_blocks import FLAT
from .attention_exchange import MESSAGE, own_address
from .postnorm_cluster_common import (
    ABSENT,
    AFFINE,
    BETA,
    BIAS,
    BK,
    COLUMNS,
    CONSUMERS,
    GAMMA,
    ROWS,
    WIDE,
    fetch_ahead,
    standing,
)
from .postnorm_cluster_exchange import meet_cluster
from .postnorm_joint_product import await_phase, load_w, load_x, multiply, warp_number
from .postnorm_joint_steps import (
    affine,
    begin,
    collect,
    normalise,
    save,
    scales,
    send,
    statistics,
)
from .postnorm_joint_stores import drain, store_rows
from .postnorm_multiply import advance
from .postnorm_normalise import HAT, SAVE, SUM
from .variants import Tile, Variant

WARPS = gl.constexpr(4)  # of a consumer

# ---- loader ----------------------------------------------------------------------------------------------------------


@gluon.jit
def loader(x, w, full, empty, loaded, x_ptr, residual_ptr, column, group, first, step, tiles, M, KT, x_fetch, r_fetch,
           ST: gl.constexpr):  # fmt: skip
    slot = 0
    phase = 1
    for tile in range(first, tiles, step):
        fetch_ahead(x_ptr, tile + step, M, x_fetch)
        if group == 0:
            fetch_ahead(residual_ptr, tile + step, M, r_fetch)
        for k in range(KT):
            if tile == first:
                load_w(w + k * (2 * COLUMNS * BK), loaded + 8 * k, k * BK, column)
            await_phase(empty + 8 * slot, phase)
            load_x(x + slot * (2 * ROWS * BK), full + 8 * slot, k * BK, tile * ROWS)
            slot, phase = advance(slot, phase, ST)


# ---- consumers -------------------------------------------------------------------------------------------------------


@gluon.jit
def consumer(x, w, places, vectors, messages, full, empty, loaded, turns, arrived, residual_ptr, mean_ptr, rstd_ptr, r_pitch,
             column, width, rank, members, N, first, step, tiles, M, KT, groups, form, eps, warp, dtype: gl.constexpr,
             NORM: gl.constexpr, ST: gl.constexpr, PLACES: gl.constexpr, PEERS: gl.constexpr):  # fmt: skip
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
        acc = begin(vectors + 4 * BIAS * COLUMNS)
        await_phase(turns + 8 * mine, (turn & 1) ^ gl.where(mine == 0, 1, 0))
        acc = multiply(acc, x, w, full, empty, loaded, follow, count * KT, KT, turn, dtype, ST)
        at = 2 * mine + (turn & 1)
        place = messages + at * (4 * PEERS * MESSAGE)
        bar = arrived + 8 * (WARPS * at + warp % WARPS)
        mean, square = statistics(acc, width, share, NORM)
        if members > 1:
            send(place, bar, rank, members, mean, square, PEERS)
        if form & SUM:
            store_rows(acc, places, row, column, width, dtype, True, PLACES)
        if members > 1:
            mean, square = collect(place, bar, (turn >> 1) & 1, members, part, weight, NORM, PEERS)
        rstd, shift = scales(mean, square, inverse, eps)
        if ((form & SAVE) != 0) & (rank == 0):
            save(mean_ptr, rstd_ptr, mean, rstd, acc, row, M, groups, NORM, dtype)
        acc = normalise(acc, rstd, shift, NORM)
        if form & HAT:
            store_rows(acc, places, row, column, width, dtype, True, PLACES)
        if form & AFFINE:
            acc = affine(acc, vectors + 4 * GAMMA * COLUMNS, vectors + 4 * BETA * COLUMNS)
        store_rows(acc, places, row, column, width, dtype, False, PLACES)
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
def load_vector(vectors, which: gl.constexpr, ptr, kind, default: gl.constexpr, column, width, dtype: gl.constexpr):
    """A CTA's part of bias, gamma or beta as fp32 in shared memory."""
    j = gl.arange(0, COLUMNS, gl.BlockedLayout([1], [32], [16], [0]))
    value = gl.full([COLUMNS], default, gl.float32, j.type.layout)
    if kind == WIDE:
        value = gl.load(ptr + column + j, mask=j < width, other=default)
    elif kind != ABSENT:
        narrow = ptr.to(gl.pointer_type(dtype), bitcast=True)
        value = gl.load(narrow + column + j, mask=j < width, other=default).to(gl.float32)
    vectors.index(which).store(value)


@gluon.jit(do_not_specialize=["M", "N", "KT", "members", "groups"])
def postnorm_joint_kernel(
    x_desc,  # [M, K]
    y_desc,  # [M, groups * N] contiguous
    side_desc,  # likewise, zhat or z, or anything
    w_desc,  # [groups * N, K]
    x_ptr,  # x again
    residual_ptr,  # none
    bias_ptr,  # [groups * N], as the next two fp32 or in the dtype of x
    gamma_ptr,
    beta_ptr,
    mean_ptr,  # [M, groups] fp32, relative to the first value of the norm's columns
    rstd_ptr,  # [M, groups] fp32
    r_pitch,  # 0
    M,
    N,  # columns of a norm
    KT,  # k-blocks
    members,  # CTAs of a cluster
    groups,
    x_fetch,  # bytes of ROWS rows of x if these follow each other without a gap, else 0
    r_fetch,  # 0
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
    vectors = gl.allocate_shared_memory(gl.float32, [3, COLUMNS], FLAT)
    full = mbarrier.allocate_mbarrier(batch=ST)
    empty = mbarrier.allocate_mbarrier(batch=ST)
    loaded = mbarrier.allocate_mbarrier(batch=RES)
    turns = mbarrier.allocate_mbarrier(batch=CONSUMERS)
    arrived = mbarrier.allocate_mbarrier(batch=2 * CONSUMERS * WARPS)
    init_barriers(full, 1)
    init_barriers(empty, WARPS)  # a slot is handed back, and a turn passed on, by a consumer's warps
    init_barriers(loaded, 1)
    init_barriers(turns, WARPS)
    init_barriers(arrived, 1)
    gl.inline_asm("fence.mbarrier_init.release.cluster;", "~{memory}", [], (), is_pure=False)
    load_vector(vectors, BIAS, bias_ptr, bias_kind, 0.0, column, width, dtype)
    load_vector(vectors, GAMMA, gamma_ptr, gamma_kind, 1.0, column, width, dtype)
    load_vector(vectors, BETA, beta_ptr, beta_kind, 0.0, column, width, dtype)
    form |= gl.where((gamma_kind != ABSENT) | (beta_kind != ABSENT), AFFINE, 0)
    gl.barrier()
    meet_cluster()
    warp = warp_number()
    x, w, vectors_at, messages_at = own_address(x_s), own_address(w_s), own_address(vectors), own_address(messages)
    full_at, empty_at, loaded_at = own_address(full), own_address(empty), own_address(loaded)
    if warp == CONSUMERS * WARPS:
        loader(x, w, full_at, empty_at, loaded_at, x_ptr, residual_ptr, column, group, first, step, tiles, M, KT, x_fetch,
               r_fetch, ST)  # fmt: skip
    elif warp < CONSUMERS * WARPS:
        places = own_address(y_s) + warp * (2048 * PLACES)
        consumer(x, w, places, vectors_at, messages_at, full_at, empty_at, loaded_at, own_address(turns),
                 own_address(arrived), residual_ptr, mean_ptr + group, rstd_ptr + group, r_pitch, column, width, rank,
                 members, N, first, step, tiles, M, KT, groups, form, eps, warp, dtype, NORM, ST, PLACES,
                 PEERS)  # fmt: skip


# Most k-blocks, slots of x, places of a warp and CTAs of a cluster that fit into shared memory together.
SHAPES = [(4, 12, 2, 4), (6, 8, 2, 4), (8, 7, 1, 4), (8, 6, 1, 8)]


def _variant(dtype, norm, resident, slots, places, peers):
    boxes = {"x_desc": (64, 64), "y_desc": (16, 64), "side_desc": (16, 64), "w_desc": (128, 64)}
    args = {name: Tile(dtype, box) for name, box in boxes.items()}
    args |= {f"{name}_ptr": f"*{dtype}:16" for name in ("x", "residual")}
    args |= dict.fromkeys("bias_ptr gamma_ptr beta_ptr".split(), "*fp32:16")
    args |= {"mean_ptr": "*fp32", "rstd_ptr": "*fp32", "r_pitch": "i64:8"}
    args |= dict.fromkeys("M N KT members groups x_fetch r_fetch bias_kind gamma_kind beta_kind form".split(), "i32")
    args |= {"N": "i32:8", "x_fetch": "i32:16", "r_fetch": "i32:16", "eps": "fp32"}
    args |= {"NORM": {"rms": 1, "layer": 2}[norm], "RES": resident, "ST": slots, "PLACES": places}
    args["PEERS"] = peers
    name = f"postnorm_joint_{norm}_{dtype}_{resident}_{peers}"
    return Variant(name, postnorm_joint_kernel, args, num_warps=16, maxnreg=128)


VARIANTS = [_variant(d, n, *shape) for d in ("bf16", "fp16") for n in ("rms", "layer") for shape in SHAPES]
