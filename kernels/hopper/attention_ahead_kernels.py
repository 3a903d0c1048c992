"""The kernel of attention_staged_kernels.py with its consumers a step ahead: while the products of dK and dQ of a block run,
they take the activation of the next one, whose scores were made before. Nothing is on its way where the loop turns:

    t = (v dz^T) act'(s) of block b to shared memory    s of block b + 1    dK, dQ of block b
    act and act' of block b + 1 (meanwhile)             dV of block b + 1   dQ of block b to memory (meanwhile)
    v dz^T of block b + 1

So q is needed a block earlier than dz, and three blocks of q are in shared memory. With an inner residual dz is a part of
dQ: a block's waits in the place of that, where the block's products are added to it.
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

from .attention_backward_common import PLAIN, fact, keep_asm, own_shift, pointer
from .attention_backward_products import accumulator
from .attention_staged_kernels import ACTIVATIONS, fetch_pair, fetch_values
from .attention_staged_moves import (
    FEATURES,
    VECTORS,
    copy_panel,
    differentiate,
    expect_terms,
    keep_sum,
    normalise,
    take_terms,
)
from .gdpa_backward_kernels import activation, scores
from .gdpa_backward_moves import (
    add_left,
    arrive,
    arrive_if,
    clear,
    clear_slack,
    keep_panels,
    keep_rows,
    leave,
    send_block,
    store_rows,
)
from .gdpa_backward_ranges import (
    ADD,
    BLOCK,
    COLUMN,
    COUNT,
    DK,
    DQ,
    DV,
    EXTRA,
    FACTS,
    FORM,
    K_OFFSETS,
    K_STEP,
    KEY,
    KEY_ROWS,
    KEYS,
    LAST_QUERY,
    LEAVE,
    Q_OFFSETS,
    Q_STEP,
    QUERIES,
    ROW,
    ROWS,
    WIDTH,
    count_parts,
    cut,
    note,
    note_part,
    part,
    whole,
)
from .lazy_kernels import await_phase
from .variants import Tile, Variant

Q_STAGES, DO_STAGES = gl.constexpr(3), gl.constexpr(2)  # blocks of q and of dout in shared memory

# ---- side ------------------------------------------------------------------------------------------------------------


@gluon.jit
def fetch_q(q_desc, q_s, q_full, q_free, turn, row, column):
    """A block of q on its way, once the consumers are done with what was in its place."""
    stage = turn % Q_STAGES
    await_phase(q_free.index(stage), ((turn // Q_STAGES) & 1) ^ 1)
    mbarrier.expect(q_full, q_desc.nbytes_per_cta)
    tma.async_load(q_desc, [row, column], q_full, q_s.index(stage))


@gluon.jit
def fetch_dout(do_desc, hat_desc, do_s, hat_s, terms, facts, do_full, do_free, turn, row, rows, column):
    """The same for dout, with zhat and with what the norms need of its rows."""
    stage = turn % DO_STAGES
    await_phase(do_free.index(stage), ((turn // DO_STAGES) & 1) ^ 1)
    gl.barrier()  # all warps are done with zhat and the terms of the block before
    mbarrier.expect(do_full, 2 * do_desc.nbytes_per_cta)
    tma.async_load(hat_desc, [row, column], do_full, hat_s.index(0))
    tma.async_load(do_desc, [row, column], do_full, do_s.index(stage))
    take_terms(terms, row, rows, facts)
    gl.barrier()  # the terms are there


@gluon.jit
def prepare_block(q_s, do_s, hat_s, terms, facts, q_full, do_full, q_ready, do_ready, turn, rows, column):
    """qn and dz of a block, zeros past its `rows`."""
    q_stage, stage = turn % Q_STAGES, turn % DO_STAGES
    vectors = pointer(facts, VECTORS, gl.float32) + column
    await_phase(q_full, turn & 1)
    normalise(q_s.index(q_stage), terms, vectors, vectors + fact(facts, FEATURES), facts)
    if rows < BLOCK:
        gl.barrier()
        clear(q_s.index(q_stage), rows, facts)
    fence_async_shared()
    arrive(q_ready.index(q_stage))
    await_phase(do_full, turn & 1)
    differentiate(do_s.index(stage), hat_s.index(0), terms, vectors + 2 * fact(facts, FEATURES), facts)
    if rows < BLOCK:
        gl.barrier()
        clear(do_s.index(stage), rows, facts)
    fence_async_shared()
    arrive(do_ready.index(stage))


@gluon.jit
def side(
    q_desc, k_desc, v_desc, do_desc, hat_desc, k_s, v_s, q_s, do_s, hat_s, terms, facts, notes, kv_full, kv_free, v_full,
    v_free, q_full, do_full, q_ready, do_ready, q_free, do_free,
):  # fmt: skip
    """Waits for nothing but the consumers' progress in blocks that it has prepared: so nobody waits for ever."""
    turn = 0
    for i in range(count_parts(facts)):
        head, row, begin, end, key, keys = part(facts, i)
        column = head * WIDTH
        row += begin
        rows = end - begin
        place = i & 1
        form = gl.where(begin > 0, ADD, 0) | gl.where((i == 0) & (whole(facts, LAST_QUERY) > 0), LEAVE, 0)
        await_phase(kv_free.index(place), ((i >> 1) & 1) ^ 1)
        note_part(notes, place, column, row, rows, key, keys, form)
        gl.barrier()
        fetch_pair(k_desc, k_s, 2 * place, kv_full.index(place), key, column)
        expect_terms(row, rows, facts)
        if rows > 0:
            fetch_q(q_desc, q_s, q_full, q_free, turn, row, column)
        for first in range(0, rows, BLOCK):
            fetch_dout(
                do_desc, hat_desc, do_s, hat_s, terms, facts, do_full, do_free, turn, row + first, rows - first, column,
            )  # fmt: skip
            if first == 0:
                fetch_values(v_desc, v_s, v_full, v_free, i, key, column)
            prepare_block(
                q_s, do_s, hat_s, terms, facts, q_full, do_full, q_ready, do_ready, turn, rows - first, column,
            )  # fmt: skip
            turn += 1
            if first + BLOCK < rows:
                expect_terms(row + first + BLOCK, rows - first - BLOCK, facts)
                fetch_q(q_desc, q_s, q_full, q_free, turn, row + first + BLOCK, column)
        if rows <= 0:
            fetch_values(v_desc, v_s, v_full, v_free, i, key, column)


# ---- consumers -------------------------------------------------------------------------------------------------------


@gluon.jit
def keep_t(g, t_s, t_full, t_free, turn, facts, W: gl.constexpr):
    """This consumer's half of t to shared memory, where both consumers' halves then are."""
    await_phase(t_free, (turn & 1) ^ 1)  # the products of the block before have read t
    keep_rows(g, t_s.index(W), facts)
    fence_async_shared()
    arrive(t_full)


@gluon.jit
def gradients(t_s, q, k_panels, dk, at, z, W: gl.constexpr):
    """dK and this consumer's half of dQ on their way, 3 groups of products; `z` is always 0."""
    dk = warpgroup_mma(t_s.index(W + z), q, dk, is_async=True)
    dq = gl.zeros([BLOCK, BLOCK], gl.float32, accumulator(BLOCK))
    dq = warpgroup_mma(t_s.index(z).permute((1, 0)), k_panels.index(at), dq, use_acc=False, is_async=True)
    dq = warpgroup_mma(t_s.index(1 + z).permute((1, 0)), k_panels.index(at + 2), dq, is_async=True)
    return dk, dq


@gluon.jit
def activated(s, half, ACT: gl.constexpr, dtype: gl.constexpr):
    """(act(s) as an operand, twice act'(s))."""
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator(WIDTH), k_width=2)
    p, slope = activation(s * half, ACT)
    return gl.convert_layout(p.to(dtype), operand, assert_trivial=True), slope


@gluon.jit
def remember(do_s, dq_s, stage, facts, W: gl.constexpr, INNER: gl.constexpr):
    """dz of a block to the place of its dQ, which nothing is in or leaves."""
    if INNER:
        copy_panel(do_s.index(stage), dq_s.index(W), facts, W)


@gluon.jit
def keep_dq(dq, half, dq_s, facts, W: gl.constexpr, INNER: gl.constexpr):
    """For TMA. t is twice what it should be, and `half` half of the scale."""
    if INNER:
        keep_sum(dq, half, dq_s.index(W), facts)
    else:
        keep_rows(dq * half, dq_s.index(W), facts)


@gluon.jit
def first_block(k_s, v_s, q_s, do_s, dq_s, facts, kv_free, q_ready, do_ready, do_free, dv, turn, i, half, W: gl.constexpr,
                ACT: gl.constexpr, INNER: gl.constexpr):  # fmt: skip
    """Of a part: t in registers, and dV."""
    q_stage, stage = turn % Q_STAGES, turn % DO_STAGES
    place = i & 1
    await_phase(q_ready.index(q_stage), (turn // Q_STAGES) & 1)
    s = scores(k_s.index(2 * place + W + (turn >> 28)), q_s.index(q_stage))
    if i > 0:
        tma.store_wait(0)
        arrive(kv_free.index(place ^ 1))  # the sums of the part before have left it
        gl.barrier()  # and t_s, dq_s
    s = warpgroup_mma_wait(0, deps=(s,))
    p, slope = activated(s, half, ACT, k_s.dtype)
    await_phase(do_ready.index(stage), (turn // DO_STAGES) & 1)
    dv = warpgroup_mma(p, do_s.index(stage), dv, is_async=True)
    g = scores(v_s.index(W + (turn >> 30)), do_s.index(stage))
    g, dv, p = warpgroup_mma_wait(0, deps=(g, dv, p))
    remember(do_s, dq_s, stage, facts, W, INNER)
    arrive(do_free.index(stage))
    return dv, g * slope


@gluon.jit
def consume(
    dq_desc, k_s, v_s, q_s, do_s, t_s, dq_s, facts, notes, kv_free, v_free, q_ready, do_ready, q_free, do_free, t_full,
    t_free, dk, dv, turn, i, half, W: gl.constexpr, ACT: gl.constexpr, INNER: gl.constexpr,
):  # fmt: skip
    """The blocks of a part, of which there is at least one. Shifts of `turn` that are always 0 keep the compiler from
    holding every tile's address in registers."""
    dtype: gl.constexpr = k_s.dtype
    k_panels = k_s.reinterpret(dtype, [8, BLOCK, BLOCK], t_s.layout)
    place = i & 1
    dv, g = first_block(
        k_s, v_s, q_s, do_s, dq_s, facts, kv_free, q_ready, do_ready, do_free, dv, turn, i, half, W, ACT, INNER
    )
    rows = note(notes, place, ROWS)
    arrive_if(v_free, rows <= BLOCK)
    for first in range(BLOCK, rows, BLOCK):
        keep_t(g, t_s, t_full, t_free, turn, facts, W)
        ahead = (turn + 1) % Q_STAGES
        await_phase(q_ready.index(ahead), ((turn + 1) // Q_STAGES) & 1)
        s = scores(k_s.index(2 * place + W + (turn >> 28)), q_s.index(ahead))
        await_phase(t_full, turn & 1)
        z = turn >> 29
        dk, dq = gradients(t_s, q_s.index(turn % Q_STAGES), k_panels, dk, 4 * place + W + z, z, W)
        s = warpgroup_mma_wait(3, deps=(s,))
        p, slope = activated(s, half, ACT, dtype)
        stage = (turn + 1) % DO_STAGES
        await_phase(do_ready.index(stage), ((turn + 1) // DO_STAGES) & 1)
        dv = warpgroup_mma(p, do_s.index(stage), dv, is_async=True)
        dk, dq = warpgroup_mma_wait(1, deps=(dk, dq))
        arrive(q_free.index(turn % Q_STAGES))
        arrive(t_free)
        turn += 1
        tma.store_wait(0)
        gl.barrier()
        keep_dq(dq, half, dq_s, facts, W, INNER)
        fence_async_shared()
        gl.barrier()
        row = note(notes, place, ROW) + first - BLOCK
        tma.async_store(dq_desc, [row, note(notes, place, COLUMN) + W * BLOCK], dq_s.index(W))
        g = scores(v_s.index(W + (turn >> 30)), do_s.index(stage))
        g, dv, p = warpgroup_mma_wait(0, deps=(g, dv, p))
        if INNER:
            tma.store_wait(0)
            gl.barrier()  # dQ of the block before has left
        remember(do_s, dq_s, stage, facts, W, INNER)
        arrive(do_free.index(stage))
        arrive_if(v_free, first + BLOCK >= rows)
        g *= slope
    keep_t(g, t_s, t_full, t_free, turn, facts, W)
    await_phase(t_full, turn & 1)
    z = turn >> 29
    dk, dq = gradients(t_s, q_s.index(turn % Q_STAGES), k_panels, dk, 4 * place + W + z, z, W)
    tma.store_wait(0)
    gl.barrier()
    dk, dq = warpgroup_mma_wait(0, deps=(dk, dq))
    arrive(q_free.index(turn % Q_STAGES))
    arrive(t_free)
    turn += 1
    keep_dq(dq, half, dq_s, facts, W, INNER)
    last = (rows - 1) // BLOCK * BLOCK  # the last block's first row
    row = note(notes, place, ROW) + last
    send_block(dq_desc, dq_s.index(W), facts, row, note(notes, place, COLUMN) + W * BLOCK, rows - last)
    return dk, dv, turn


@gluon.jit
def finish_part(dk_desc, dv_desc, k_s, t_s, dq_s, facts, notes, t_free, dk, dv, turn, i, half, W: gl.constexpr):
    """A part's dK and dV to memory, or to the program that has the rest of the sequence."""
    place = i & 1
    if note(notes, place, FORM) & ADD != 0:
        dk, dv = add_left(dk, dv, facts, W)
    if note(notes, place, FORM) & LEAVE != 0:
        leave(dk, dv, facts, W)
    else:
        dk *= half
        column = note(notes, place, COLUMN)
        key = note(notes, place, KEY) + W * BLOCK
        keys = note(notes, place, COUNT)
        if keys < KEYS:
            store_rows(dk, facts, DK, key, column, keys - W * BLOCK)
            store_rows(dv, facts, DV, key, column, keys - W * BLOCK)
        else:
            await_phase(t_free, (turn & 1) ^ 1)  # nobody reads the keys any more
            keep_rows(dk, k_s.index(2 * place + W), facts)
            tma.store_wait(0)
            gl.barrier()  # the last block's dQ has left
            keep_panels(dv, t_s.index(W), dq_s.index(W), facts)
            fence_async_shared()
            gl.barrier()
            tma.async_store(dk_desc, [key, column], k_s.index(2 * place + W))
            tma.async_store(dv_desc, [key, column], t_s.index(W))
            tma.async_store(dv_desc, [key, column + BLOCK], dq_s.index(W))


@gluon.jit
def consumer(
    dq_desc, dk_desc, dv_desc, k_s, v_s, q_s, do_s, t_s, dq_s, facts, notes, kv_full, kv_free, v_full, v_free, q_ready,
    do_ready, q_free, do_free, t_full, t_free, half, W: gl.constexpr, ACT: gl.constexpr, INNER: gl.constexpr,
):  # fmt: skip
    wide: gl.constexpr = accumulator(WIDTH)
    turn = 0
    for i in range(count_parts(facts)):
        place = i & 1
        await_phase(kv_full.index(place), (i >> 1) & 1)
        await_phase(v_full, i & 1)
        keys = note(notes, place, COUNT)
        if keys < KEYS:
            clear(k_s.index(2 * place + W), keys - W * BLOCK, facts)
            clear(v_s.index(W), keys - W * BLOCK, facts)
            fence_async_shared()
            gl.barrier()
        dk = gl.zeros([BLOCK, WIDTH], gl.float32, wide)
        dv = gl.zeros([BLOCK, WIDTH], gl.float32, wide)
        if note(notes, place, ROWS) > 0:
            dk, dv, turn = consume(
                dq_desc, k_s, v_s, q_s, do_s, t_s, dq_s, facts, notes, kv_free, v_free, q_ready, do_ready, q_free,
                do_free, t_full, t_free, dk, dv, turn, i, half, W, ACT, INNER,
            )  # fmt: skip
        else:
            if i > 0:
                tma.store_wait(0)
                arrive(kv_free.index(place ^ 1))
                gl.barrier()
            arrive(v_free)
        finish_part(dk_desc, dv_desc, k_s, t_s, dq_s, facts, notes, t_free, dk, dv, turn, i, half, W)
    tma.store_wait(0)
    if W == 0:
        clear_slack(facts, DQ, Q_OFFSETS, Q_STEP, QUERIES)
    else:
        clear_slack(facts, DK, K_OFFSETS, K_STEP, KEY_ROWS)
        clear_slack(facts, DV, K_OFFSETS, K_STEP, KEY_ROWS)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["batch", "heads", "q_step", "k_step", "most", "T", "U"])
def attention_ahead_kernel(
    q_desc,  # the parameters are those of attention_staged_kernel
    k_desc,
    v_desc,
    do_desc,
    hat_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    q_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    o_rstd_ptr,
    means_ptr,
    rstd_ptr,
    mean_ptr,
    vectors_ptr,
    q_offsets_ptr,
    k_offsets_ptr,
    sums_ptr,
    flags_ptr,
    q_pitch,
    pitch,
    batch,
    heads,
    q_step,
    k_step,
    most,
    T,
    U,
    half_scale,
    ACT: gl.constexpr,
    INNER: gl.constexpr,  # whether the normalised q is added to what attention makes
):
    dtype: gl.constexpr = q_desc.dtype
    tile: gl.constexpr = q_desc.layout
    k_s = gl.allocate_shared_memory(dtype, [4, BLOCK, WIDTH], tile)
    v_s = gl.allocate_shared_memory(dtype, [2, BLOCK, WIDTH], tile)
    q_s = gl.allocate_shared_memory(dtype, [Q_STAGES, BLOCK, WIDTH], tile)
    do_s = gl.allocate_shared_memory(dtype, [DO_STAGES, BLOCK, WIDTH], tile)
    hat_s = gl.allocate_shared_memory(dtype, [1, BLOCK, WIDTH], tile)
    t_s = gl.allocate_shared_memory(dtype, [2, BLOCK, BLOCK], dq_desc.layout)
    dq_s = gl.allocate_shared_memory(dtype, [2, BLOCK, BLOCK], dq_desc.layout)
    terms = gl.allocate_shared_memory(gl.float32, [8 * BLOCK], PLAIN)
    facts = gl.allocate_shared_memory(gl.int64, [FACTS], PLAIN)
    notes = gl.allocate_shared_memory(gl.int32, [16], PLAIN)
    kv_full = mbarrier.allocate_mbarrier(batch=2)
    kv_free = mbarrier.allocate_mbarrier(batch=2)
    v_full = mbarrier.allocate_mbarrier()
    v_free = mbarrier.allocate_mbarrier()
    q_full = mbarrier.allocate_mbarrier()
    do_full = mbarrier.allocate_mbarrier()
    q_ready = mbarrier.allocate_mbarrier(batch=Q_STAGES)
    do_ready = mbarrier.allocate_mbarrier(batch=DO_STAGES)
    q_free = mbarrier.allocate_mbarrier(batch=Q_STAGES)
    do_free = mbarrier.allocate_mbarrier(batch=DO_STAGES)
    t_full = mbarrier.allocate_mbarrier()
    t_free = mbarrier.allocate_mbarrier()
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_free.index(i), count=8)
        mbarrier.init(do_ready.index(i), count=4)
        mbarrier.init(do_free.index(i), count=8)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_ready.index(i), count=4)
        mbarrier.init(q_free.index(i), count=8)
    mbarrier.init(q_full, count=1)
    mbarrier.init(do_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(v_free, count=8)
    mbarrier.init(t_full, count=8)
    mbarrier.init(t_free, count=8)
    total = (gl.load(q_offsets_ptr + batch * q_step) + EXTRA * batch) * heads
    units = (total + BLOCK - 1) // BLOCK
    x = gl.program_id(0) * units // gl.num_programs(0) * BLOCK
    first, first_query = cut(q_offsets_ptr, q_step, batch, heads, gl.minimum(x, total))
    x = (gl.program_id(0) + 1) * units // gl.num_programs(0) * BLOCK
    last, last_query = cut(q_offsets_ptr, q_step, batch, heads, gl.minimum(x, total))
    kept = (facts, own_shift(facts), q_offsets_ptr, k_offsets_ptr, q_step.to(gl.int64), k_step.to(gl.int64),
            batch.to(gl.int64), most.to(gl.int64), first.to(gl.int64), first_query.to(gl.int64), last.to(gl.int64),
            last_query.to(gl.int64), dq_ptr, dk_ptr, dv_ptr, sums_ptr, flags_ptr, pitch, T.to(gl.int64),
            U.to(gl.int64), gl.to_tensor(0).to(gl.int64), o_rstd_ptr, means_ptr, rstd_ptr, mean_ptr, q_ptr, q_pitch,
            vectors_ptr, (heads * WIDTH).to(gl.int64))  # fmt: skip
    gl.inline_asm(keep_asm, "r,r" + ",l" * 27, kept, is_pure=False)
    gl.warp_specialize(
        [
            (consumer, (dq_desc, dk_desc, dv_desc, k_s, v_s, q_s, do_s, t_s, dq_s, facts, notes, kv_full, kv_free, v_full,
                        v_free, q_ready, do_ready, q_free, do_free, t_full, t_free, half_scale, gl.constexpr(0), ACT,
                        INNER)),
            (consumer, (dq_desc, dk_desc, dv_desc, k_s, v_s, q_s, do_s, t_s, dq_s, facts, notes, kv_full, kv_free, v_full,
                        v_free, q_ready, do_ready, q_free, do_free, t_full, t_free, half_scale, gl.constexpr(1), ACT,
                        INNER)),
            (side, (q_desc, k_desc, v_desc, do_desc, hat_desc, k_s, v_s, q_s, do_s, hat_s, terms, facts, notes, kv_full,
                    kv_free, v_full, v_free, q_full, do_full, q_ready, do_ready, q_free, do_free)),
        ],
        [4, 4],
        [232, 40],
    )  # fmt: skip


def variants():
    for name, code in ACTIVATIONS.items():
        args = {f"{x}_desc": Tile("bf16", (64, 128)) for x in ("q", "k", "v", "do", "hat")}
        args |= {f"d{x}_desc": Tile("bf16", (64, 128 if x == "k" else 64)) for x in "qkv"}
        args |= {f"{x}_ptr": "*bf16:16" for x in ("q", "dq", "dk", "dv")}
        args |= {f"{x}_ptr": "*fp32" for x in ("o_rstd", "means", "rstd", "mean")}
        args |= {"vectors_ptr": "*fp32:16", "q_offsets_ptr": "*i32", "k_offsets_ptr": "*i32"}
        args |= {"sums_ptr": "*fp32:16", "flags_ptr": "*i32", "q_pitch": "i64:8", "pitch": "i64:16"}
        args |= {x: "i32" for x in ("batch", "heads", "q_step", "k_step", "most", "T", "U")}
        args |= {"half_scale": "fp32", "ACT": code}
        for inner in (False, True):
            form = "attention_ahead_inner" if inner else "attention_ahead"
            yield Variant(f"{form}_{name}_bf16", attention_ahead_kernel, args | {"INNER": inner}, maxnreg=168)


VARIANTS = list(variants())
