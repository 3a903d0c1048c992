"""The post-norm kernel over clusters (postnorm_cluster_common.py) whose three consumers run one text, so that the
instructions of a block lie in the caches of instructions once instead of three times.

There are no partitions: 16 warps run the kernel, 12 of them consumers and one the loader, as their numbers say. After its
product no warp of a consumer waits for another one of its CTA: each exchanges the statistics of its own 16 rows and stores
them. A block's accumulator starts with the bias, and with the residual where that comes before the norm.

With QUADS, W's rows come in such an order that a residual comes in 16 bytes per thread (postnorm_rows.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .attention_blocks import FLAT
from .attention_exchange import MESSAGE, own_address
from .postnorm_cluster_common import (
    ABSENT,
    AFFINE,
    BEFORE,
    BK,
    COLUMNS,
    CONSUMERS,
    ROWS,
    WIDE,
    fetch_ahead,
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
    thread_number,
    warp_number,
)
from .postnorm_joint_steps import (
    add_residual,
    affine,
    begin,
    collect,
    load_residual,
    normalise,
    save,
    scales,
    send,
    statistics,
)
from .postnorm_joint_stores import PLACE, store_rows
from .postnorm_multiply import advance
from .postnorm_normalise import AFTER, HAT, SAVE, SUM
from .variants import Tile, Variant

WARPS = gl.constexpr(4)  # of a consumer

# ---- loader ----------------------------------------------------------------------------------------------------------


@gluon.jit
def loader(x, w, full, empty, x_ptr, residual_ptr, column, group, first, step, tiles, M, KT, x_fetch, r_fetch,
           QUADS: gl.constexpr, ST: gl.constexpr):  # fmt: skip
    """W comes with the first block of x, k-block by k-block and on the same barriers."""
    slot = 0
    phase = 1
    for tile in range(first, tiles, step):
        fetch_ahead(x_ptr, tile + step, M, x_fetch)
        if group == 0:
            fetch_ahead(residual_ptr, tile + step, M, r_fetch)
        for k in range(KT):
            bar = full + 8 * slot
            await_phase(empty + 8 * slot, phase)
            if tile == first:
                expect(bar, 2 * (ROWS + COLUMNS) * BK)
                load_w(w + k * (2 * COLUMNS * BK), bar, k * BK, column // 32 if QUADS else column, QUADS)
            else:
                expect(bar, 2 * ROWS * BK)
            load_x(x + slot * (2 * ROWS * BK), bar, k * BK, tile * ROWS)
            slot, phase = advance(slot, phase, ST)


# ---- consumers -------------------------------------------------------------------------------------------------------


@gluon.jit
def consumer(x, w, keep, vectors, messages, full, empty, turns, arrived, y_ptr, side_ptr, residual_ptr, mean_ptr, rstd_ptr,
             pitch, r_pitch, column, width, rank, members, N, first, step, tiles, M, KT, groups, form, eps, warp,
             dtype: gl.constexpr, NORM: gl.constexpr, QUADS: gl.constexpr, ST: gl.constexpr,
             PEERS: gl.constexpr):  # fmt: skip
    if members > 1:  # a CTA without peers would wait for its other warps here
        cluster_wait()
    mine = warp // WARPS
    tid = thread_number()
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
        acc = begin(tid, vectors, QUADS)
        if QUADS:
            if form & BEFORE:
                before = load_residual(residual_ptr, r_pitch, row, M, column, width, 0)
                then = load_residual(residual_ptr, r_pitch, row, M, column, width, 1)
                acc = add_residual(acc, before, then, dtype)
        parity = (turn & 1) ^ gl.where(mine == 0, 1, 0)
        acc = multiply(acc, x, w, full, empty, turns + 8 * mine, parity, follow, count * KT, KT, dtype, ST)
        at = 2 * mine + (turn & 1)
        place = messages + at * (4 * PEERS * MESSAGE)
        bar = arrived + 8 * (WARPS * at + warp % WARPS)
        mean, square = statistics(acc, tid, width, share, NORM, QUADS)
        if members > 1:
            send(tid, place, bar, rank, members, mean, square, PEERS)
        if form & SUM:
            store_rows(acc, tid, keep, side_ptr, pitch, row, M, column, width, dtype, QUADS)
        if members > 1:
            mean, square = collect(tid, place, bar, (turn >> 1) & 1, members, part, weight, NORM, PEERS)
        rstd, shift = scales(mean, square, inverse, eps)
        if ((form & SAVE) != 0) & (rank == 0):
            save(tid, mean_ptr, rstd_ptr, mean, rstd, acc, row, M, groups, NORM, dtype)
        acc = normalise(acc, rstd, shift, NORM)
        if form & HAT:
            store_rows(acc, tid, keep, side_ptr, pitch, row, M, column, width, dtype, QUADS)
        if form & AFFINE:
            acc = affine(acc, tid, vectors + 8 * COLUMNS, QUADS)
        if QUADS:
            if form & AFTER:  # not loaded before, for want of registers
                left = load_residual(residual_ptr, r_pitch, row, M, column, width, 0)
                right = load_residual(residual_ptr, r_pitch, row, M, column, width, 1)
                acc = add_residual(acc, left, right, dtype)
        store_rows(acc, tid, keep, y_ptr, pitch, row, M, column, width, dtype, QUADS)
        count += CONSUMERS
        turn += 1


# ---- kernel ----------------------------------------------------------------------------------------------------------


@gluon.jit
def init_barriers(barriers, arrivals: gl.constexpr):
    COUNT: gl.constexpr = barriers.shape[0]
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=arrivals)


@gluon.jit
def load_vector(ptr, kind, default: gl.constexpr, j, column, width, dtype: gl.constexpr):
    """Values j of a CTA's part of bias, gamma or beta as fp32."""
    value = gl.full([2 * COLUMNS], default, gl.float32, j.type.layout)
    if kind == WIDE:
        value = gl.load(ptr + column + j, mask=j < width, other=default)
    elif kind != ABSENT:
        narrow = ptr.to(gl.pointer_type(dtype), bitcast=True)
        value = gl.load(narrow + column + j, mask=j < width, other=default).to(gl.float32)
    return value


@gluon.jit
def load_vectors(vectors, bias_ptr, gamma_ptr, beta_ptr, bias_kind, gamma_kind, beta_kind, column, width,
                 dtype: gl.constexpr):  # fmt: skip
    """By the consumers. Four values per pair of columns: its biases twice; its gammas and betas. A thread has such pairs in
    two rows."""
    p = gl.arange(0, 2 * COLUMNS, gl.BlockedLayout([1], [32], [16], [0]))
    j = 2 * (p >> 2) + (p & 1)
    vectors.index(0).store(load_vector(bias_ptr, bias_kind, 0.0, j, column, width, dtype))
    gamma = load_vector(gamma_ptr, gamma_kind, 1.0, j, column, width, dtype)
    beta = load_vector(beta_ptr, beta_kind, 0.0, j, column, width, dtype)
    vectors.index(1).store(gl.where((p & 2) == 0, gamma, beta))


@gluon.jit(do_not_specialize=["M", "N", "KT", "members", "groups"])
def postnorm_joint_kernel(
    x_desc,  # [M, K]
    w_desc,  # [groups * N, K], or with QUADS as postnorm_cluster.quads gives it
    x_ptr,  # x again
    y_ptr,  # [M, groups * N]
    side_ptr,  # likewise, zhat or z, or anything
    residual_ptr,  # [M, groups * N], with QUADS
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
    QUADS: gl.constexpr,
    RES: gl.constexpr,  # k-blocks of W that there is room for
    ST: gl.constexpr,  # slots of x
    PEERS: gl.constexpr,  # most CTAs of a cluster
):
    dtype: gl.constexpr = x_desc.dtype
    rank, group, first, step, tiles, column, width = standing(members, groups, M, N)
    x_s = gl.allocate_shared_memory(dtype, [ST, ROWS, BK], x_desc.layout)
    w_s = gl.allocate_shared_memory(dtype, [RES, COLUMNS, BK], x_desc.layout)
    y_s = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, BK], x_desc.layout)
    messages = gl.allocate_shared_memory(gl.float32, [2 * CONSUMERS, PEERS * MESSAGE], FLAT)
    vectors = gl.allocate_shared_memory(gl.float32, [2, 2 * COLUMNS], FLAT)
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
    form |= gl.where((gamma_kind != ABSENT) | (beta_kind != ABSENT), AFFINE, 0)
    warp = warp_number()
    x, w, vectors_at, messages_at = own_address(x_s), own_address(w_s), own_address(vectors), own_address(messages)
    full_at, empty_at = own_address(full), own_address(empty)
    if warp == CONSUMERS * WARPS:
        loader(x, w, full_at, empty_at, x_ptr, residual_ptr, column, group, first, step, tiles, M, KT, x_fetch,
               r_fetch, QUADS, ST)  # fmt: skip
    elif warp < CONSUMERS * WARPS:
        load_vectors(vectors, bias_ptr, gamma_ptr, beta_ptr, bias_kind, gamma_kind, beta_kind, column, width, dtype)
        meet_consumers()
        keep = own_address(y_s) + warp * PLACE
        consumer(x, w, keep, vectors_at, messages_at, full_at, empty_at, own_address(turns), own_address(arrived), y_ptr,
                 side_ptr, residual_ptr, mean_ptr + group, rstd_ptr + group, pitch, r_pitch, column, width, rank, members,
                 N, first, step, tiles, M, KT, groups, form, eps, warp, dtype, NORM, QUADS, ST, PEERS)  # fmt: skip
    if (warp >= CONSUMERS * WARPS) & (members > 1):
        cluster_wait()


# Most k-blocks, slots of x and CTAs of a cluster that fit into shared memory together.
SHAPES = [(4, 15, 4), (6, 11, 4), (8, 7, 4), (8, 6, 8)]


def _variant(dtype, norm, quads, resident, slots, peers):
    args = {"x_desc": Tile(dtype, (64, 64)), "w_desc": Tile(dtype, (4, 4, 4, 2, 64) if quads else (128, 64))}
    args |= {f"{name}_ptr": f"*{dtype}:16" for name in ("x", "y", "side", "residual")}
    args |= dict.fromkeys("bias_ptr gamma_ptr beta_ptr".split(), "*fp32:16")
    args |= {"mean_ptr": "*fp32", "rstd_ptr": "*fp32", "pitch": "i64:8", "r_pitch": "i64:8"}
    args |= dict.fromkeys("M N KT members groups x_fetch r_fetch bias_kind gamma_kind beta_kind form".split(), "i32")
    args |= {"N": "i32:8", "x_fetch": "i32:16", "r_fetch": "i32:16", "eps": "fp32"}
    args |= {"NORM": {"rms": 1, "layer": 2}[norm], "QUADS": quads, "RES": resident, "ST": slots, "PEERS": peers}
    name = f"postnorm_joint_{'quads' if quads else 'rows'}_{norm}_{dtype}_{resident}_{peers}"
    return Variant(name, postnorm_joint_kernel, args, num_warps=16, maxnreg=128)


VARIANTS = [
    _variant(dtype, norm, quads, *shape)
    for dtype in ("bf16", "fp16")
    for norm in ("rms", "layer")
    for quads in (False, True)
    for shape in SHAPES
]
