"""Backward of causal softmax self-attention, with or without a sliding window. Per head, with s = scale * q k^T:

    p = exp(s - lse)    t = p * (dO v^T - rowsum(dO * o))    dV = p^T dO    dK = scale * t^T q    dQ = scale * t k

A program takes whole (sequence, head) pairs, the longest first, and walks up the keys of a pair in parts of 128. Those keys
and values stay in shared memory while the blocks of 64 queries that see them pass; those of the next part are fetched
meanwhile. Partitions:

    consumers   two warpgroups of 64 keys each: s^T and (dO v^T)^T in registers, whose products with dO and q add up in
                registers; t goes through shared memory, since each consumer makes half of the columns of dQ
    loader      one warp; TMA copies, and two numbers of each query

A block of queries gets its dQ from several parts: the sums so far wait in memory (in L2, by their size), and the part that
holds the block's own keys is the last one and writes dQ. One program makes all of a pair's gradients in one order, so they
are the same in every run, and no program waits for another.

Of a part's blocks the first lies before all keys of the second consumer, and the last that the window can reach lies
behind all keys of the first: there the consumer gives a t of zeros. Rows of q and dO past the end of a sequence become
zeros before they are used, and so do keys and values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .barriers import await_phase
from .facts import PLAIN, keep_asm, number, own_shift
from .gdpa_backward_kernels import STAGES, await_block, scores
from .gdpa_backward_moves import arrive, clear, clear_slack, keep_rows, send_block, store_rows
from .gdpa_backward_ranges import (
    BLOCK,
    COLUMN,
    COUNT,
    DK,
    DQ,
    DV,
    FACTS,
    K_OFFSETS,
    K_STEP,
    KEY,
    KEY_ROWS,
    KEYS,
    Q_OFFSETS,
    Q_STEP,
    QUERIES,
    ROW,
    ROWS,
    WIDTH,
    note,
    whole,
)  # fmt: skip
from .lazy_kernels import accumulator_layout
from .softmax_backward_loader import count_parts, loader
from .softmax_backward_moves import PARTS, REACH, SCALE, WINDOW, blank, put_partial, slopes, take_partial, weights
from .variants import Tile, Variant

# ---- consumers -------------------------------------------------------------------------------------------------------


@gluon.jit
def half_of_dq(k_panels, t_s, turn, place, dq, W: gl.constexpr):
    """A consumer's columns of t k on their way."""
    z = turn >> 29
    at = 4 * place + W + z
    dq = warpgroup_mma(t_s.index(z).permute((1, 0)), k_panels.index(at), dq, use_acc=False, is_async=True)
    return warpgroup_mma(t_s.index(1 + z).permute((1, 0)), k_panels.index(at + 2), dq, is_async=True)


@gluon.jit
def is_new(facts, notes, place, first):
    """Whether no part before has seen this block of queries."""
    return (note(notes, place, KEY) == 0) | (first >= whole(facts, WINDOW) - 1)


@gluon.jit
def hand_on(dq, dq_desc, dq_s, facts, notes, place, first, W: gl.constexpr):
    """A block's dQ to where it belongs: to memory if this part holds its own keys, else to the sums that wait."""
    if first < KEYS:
        dq *= number(facts, SCALE)
        tma.store_wait(0)
        gl.barrier()
        keep_rows(dq, dq_s.index(W), facts)
        row = note(notes, place, ROW) + first
        column = note(notes, place, COLUMN) + W * BLOCK
        send_block(dq_desc, dq_s.index(W), facts, row, column, note(notes, place, ROWS) - first)
    else:
        put_partial(dq, facts, note(notes, place, KEY) + first, W)


@gluon.jit
def release_keys(kv_free, i):
    """The sums of the part before have left the place of its keys."""
    if i > 0:
        tma.store_wait(0)
        arrive(kv_free.index((i & 1) ^ 1))


@gluon.jit
def consume_none(
    dq_desc, k_s, t_s, dq_s, facts, notes, kv_free, full, free, t_full, t_free, turn, i, first, W: gl.constexpr
):  # fmt: skip
    """A block of queries that sees none of this consumer's keys: its share of the other one's dQ."""
    k_panels = k_s.reinterpret(k_s.dtype, [8, BLOCK, BLOCK], t_s.layout)
    place = i & 1
    stage = turn % STAGES
    await_phase(full.index(stage), (turn // STAGES) & 1)
    if W == 1:  # the part's first block
        release_keys(kv_free, i)
    await_phase(t_free, (turn & 1) ^ 1)
    blank(t_s.index(W), facts)
    fence_async_shared()
    arrive(t_full)
    dq = gl.zeros([BLOCK, BLOCK], gl.float32, accumulator_layout(BLOCK))
    new = is_new(facts, notes, place, first)
    past = take_partial(dq, facts, note(notes, place, KEY) + first, new, W)
    await_phase(t_full, turn & 1)
    dq = half_of_dq(k_panels, t_s, turn, place, dq, W)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    arrive(free.index(stage))
    arrive(t_free)
    hand_on(dq + past, dq_desc, dq_s, facts, notes, place, first, W)
    return turn + 1


@gluon.jit
def consume(
    dq_desc, k_s, v_s, q_s, do_s, t_s, dq_s, stats_s, facts, notes, kv_free, full, free, t_full, t_free, dk, dv, turn, i,
    factor, W: gl.constexpr,
):  # fmt: skip
    """The blocks of a part that see keys of this consumer. Shifts of `turn` that are always 0 keep the compiler from holding
    every tile's address in registers."""
    dtype: gl.constexpr = k_s.dtype
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    k_panels = k_s.reinterpret(dtype, [8, BLOCK, BLOCK], t_s.layout)
    place = i & 1
    begin = W * BLOCK
    end = gl.minimum(note(notes, place, ROWS), whole(facts, REACH) - (1 - W) * BLOCK)
    for first in range(begin, end, BLOCK):
        stage = turn % STAGES
        await_block(q_s, do_s, full, turn, note(notes, place, ROWS) - first, facts)
        s = scores(k_s.index(2 * place + W + (turn >> 28)), q_s.index(stage))
        g = scores(v_s.index(2 * place + W + (turn >> 30)), do_s.index(stage))
        if W == 0:
            if first == 0:
                release_keys(kv_free, i)
        s = warpgroup_mma_wait(1, deps=(s,))
        p = weights(s, stats_s.index(stage), factor, first - begin, facts)
        weight = gl.convert_layout(p.to(dtype), operand, assert_trivial=True)
        dv = warpgroup_mma(weight, do_s.index(stage), dv, is_async=True)
        g = warpgroup_mma_wait(1, deps=(g,))
        g = slopes(p, g, stats_s.index(stage), facts)
        await_phase(t_free, (turn & 1) ^ 1)  # the products of the block before have read t
        keep_rows(g, t_s.index(W), facts)
        fence_async_shared()
        arrive(t_full)
        t = gl.convert_layout(g.to(dtype), operand, assert_trivial=True)
        dk = warpgroup_mma(t, q_s.index(stage), dk, is_async=True)
        new = is_new(facts, notes, place, first)
        past = take_partial(s, facts, note(notes, place, KEY) + first, new, W)
        await_phase(t_full, turn & 1)
        dv, weight = warpgroup_mma_wait(1, deps=(dv, weight))
        dq = gl.zeros([BLOCK, BLOCK], gl.float32, accumulator_layout(BLOCK))
        dq = half_of_dq(k_panels, t_s, turn, place, dq, W)
        turn += 1
        dq, dk, t = warpgroup_mma_wait(0, deps=(dq, dk, t))
        arrive(free.index(stage))
        arrive(t_free)
        hand_on(dq + past, dq_desc, dq_s, facts, notes, place, first, W)
    return dk, dv, turn


@gluon.jit
def store_sums(dk, dv, dk_desc, dv_desc, k_s, v_s, facts, notes, t_free, turn, place, W: gl.constexpr):
    dk *= number(facts, SCALE)
    column = note(notes, place, COLUMN)
    key = note(notes, place, ROW) + W * BLOCK
    keys = note(notes, place, COUNT)
    if keys < KEYS:
        store_rows(dk, facts, DK, key, column, keys - W * BLOCK)
        store_rows(dv, facts, DV, key, column, keys - W * BLOCK)
    else:
        await_phase(t_free, (turn & 1) ^ 1)  # nobody reads the keys any more
        keep_rows(dk, k_s.index(2 * place + W), facts)
        keep_rows(dv, v_s.index(2 * place + W), facts)
        fence_async_shared()
        gl.barrier()
        tma.async_store(dk_desc, [key, column], k_s.index(2 * place + W))
        tma.async_store(dv_desc, [key, column], v_s.index(2 * place + W))


@gluon.jit
def consumer(
    dq_desc, dk_desc, dv_desc, k_s, v_s, q_s, do_s, t_s, dq_s, stats_s, facts, notes, kv_full, kv_free, full, free,
    t_full, t_free, factor, W: gl.constexpr,
):  # fmt: skip
    wide: gl.constexpr = accumulator_layout(WIDTH)
    turn = 0
    for i in range(whole(facts, PARTS)):
        place = i & 1
        await_phase(kv_full.index(place), (i >> 1) & 1)
        keys = note(notes, place, COUNT)
        if keys < KEYS:
            clear(k_s.index(2 * place + W), keys - W * BLOCK, facts)
            clear(v_s.index(2 * place + W), keys - W * BLOCK, facts)
            fence_async_shared()
            gl.barrier()
        if W == 1:
            turn = consume_none(
                dq_desc, k_s, t_s, dq_s, facts, notes, kv_free, full, free, t_full, t_free, turn, i, 0, W
            )  # fmt: skip
        dk = gl.zeros([BLOCK, WIDTH], gl.float32, wide)
        dv = gl.zeros([BLOCK, WIDTH], gl.float32, wide)
        dk, dv, turn = consume(
            dq_desc, k_s, v_s, q_s, do_s, t_s, dq_s, stats_s, facts, notes, kv_free, full, free, t_full, t_free, dk, dv,
            turn, i, factor, W,
        )  # fmt: skip
        if W == 0:
            last = whole(facts, REACH) - BLOCK
            if note(notes, place, ROWS) > last:
                turn = consume_none(
                    dq_desc, k_s, t_s, dq_s, facts, notes, kv_free, full, free, t_full, t_free, turn, i, last, W
                )  # fmt: skip
        store_sums(dk, dv, dk_desc, dv_desc, k_s, v_s, facts, notes, t_free, turn, place, W)
    tma.store_wait(0)
    if W == 0:
        clear_slack(facts, DQ, Q_OFFSETS, Q_STEP, QUERIES)
    else:
        clear_slack(facts, DK, K_OFFSETS, K_STEP, KEY_ROWS)
        clear_slack(facts, DV, K_OFFSETS, K_STEP, KEY_ROWS)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["batch", "heads", "step", "window", "slots", "T", "U"])
def softmax_backward_kernel(
    q_desc,  # [T, heads * 128]
    k_desc,  # [U, heads * 128]
    v_desc,
    do_desc,
    dq_desc,  # rows `pitch` apart, as those of dk and dv
    dk_desc,
    dv_desc,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    offsets_ptr,  # [B + 1], of which every step-th 32-bit word is read
    order_ptr,  # [B]: sequences, the longest first
    stats_ptr,  # [2, heads, T]: -log2(e) * lse, then rowsum(dO * o)
    sums_ptr,  # [programs, slots, 2 * 64 * 64] fp32, slots a power of two
    nothing_ptr,  # [512] zeros
    pitch,
    batch,
    heads,
    step,
    window,
    slots,
    T,
    U,
    scale,
):
    dtype: gl.constexpr = q_desc.dtype
    tile: gl.constexpr = q_desc.layout
    k_s = gl.allocate_shared_memory(dtype, [4, BLOCK, WIDTH], tile)
    v_s = gl.allocate_shared_memory(dtype, [4, BLOCK, WIDTH], tile)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, WIDTH], tile)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, WIDTH], tile)
    t_s = gl.allocate_shared_memory(dtype, [2, BLOCK, BLOCK], dq_desc.layout)
    dq_s = gl.allocate_shared_memory(dtype, [2, BLOCK, BLOCK], dq_desc.layout)
    stats_s = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK], PLAIN)
    facts = gl.allocate_shared_memory(gl.int64, [FACTS], PLAIN)
    notes = gl.allocate_shared_memory(gl.int32, [16], PLAIN)
    kv_full = mbarrier.allocate_mbarrier(batch=2)
    kv_free = mbarrier.allocate_mbarrier(batch=2)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    free = mbarrier.allocate_mbarrier(batch=STAGES)
    t_full = mbarrier.allocate_mbarrier()
    t_free = mbarrier.allocate_mbarrier()
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_free.index(i), count=8)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(free.index(i), count=8)
    mbarrier.init(t_full, count=8)
    mbarrier.init(t_free, count=8)
    rounds = (batch * heads + gl.num_programs(0) - 1) // gl.num_programs(0)
    parts = count_parts(offsets_ptr, order_ptr, step, batch, heads, rounds)
    reach = (window + 2 * BLOCK - 2) // BLOCK * BLOCK + BLOCK  # queries that see some of 128 keys, in whole blocks
    plane = 4 * heads.to(gl.int64) * T
    kept = (facts, own_shift(facts), offsets_ptr, offsets_ptr, step.to(gl.int64), step.to(gl.int64), batch.to(gl.int64),
            window.to(gl.int64), heads.to(gl.int64), order_ptr, parts.to(gl.int64), rounds.to(gl.int64), dq_ptr, dk_ptr,
            dv_ptr, sums_ptr, nothing_ptr, pitch, T.to(gl.int64), U.to(gl.int64), gl.to_tensor(0).to(gl.int64),
            reach.to(gl.int64), scale.to(gl.int32, bitcast=True).to(gl.int64), (slots - 1).to(gl.int64), stats_ptr,
            plane)  # fmt: skip
    gl.inline_asm(keep_asm, "r,r" + ",l" * 24, kept, is_pure=False)
    factor = scale * 1.4426950408889634
    gl.warp_specialize(
        [
            (consumer, (dq_desc, dk_desc, dv_desc, k_s, v_s, q_s, do_s, t_s, dq_s, stats_s, facts, notes, kv_full,
                        kv_free, full, free, t_full, t_free, factor, gl.constexpr(0))),
            (consumer, (dq_desc, dk_desc, dv_desc, k_s, v_s, q_s, do_s, t_s, dq_s, stats_s, facts, notes, kv_full,
                        kv_free, full, free, t_full, t_free, factor, gl.constexpr(1))),
            (loader, (q_desc, k_desc, v_desc, do_desc, k_s, v_s, q_s, do_s, stats_s, facts, notes, kv_full, kv_free,
                      full, free)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def variants():
    args = {f"{x}_desc": Tile("bf16", (64, 128)) for x in ("q", "k", "v", "do")}
    args |= {f"d{x}_desc": Tile("bf16", (64, 64 if x == "q" else 128)) for x in "qkv"}
    args |= {f"{x}_ptr": "*bf16:16" for x in ("dq", "dk", "dv")}
    args |= {"offsets_ptr": "*i32", "order_ptr": "*i32"}
    args |= {f"{x}_ptr": "*fp32:16" for x in ("stats", "sums", "nothing")}
    args |= {"pitch": "i64:16"}
    args |= {x: "i32" for x in ("batch", "heads", "step", "window", "slots", "T", "U")}
    args |= {"scale": "fp32"}
    yield Variant("softmax_backward_bf16", softmax_backward_kernel, args, maxnreg=168)


VARIANTS = list(variants())
