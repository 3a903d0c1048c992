"""Backward of jagged attention without norms, for sequences of at most 128 keys. Per head, with s = scale * q k^T:

    p = act(s)    t = (dO v^T) * act'(s)    dV = p^T dO    dK = scale * t^T q    dQ = scale * t k

A program works through a range of (head, sequence) pairs, the same amount for every program. A sequence's keys and values
stay in shared memory while blocks of 64 queries pass; those of the next sequence are fetched meanwhile. Partitions:

    consumers   two warpgroups of 64 keys each: s^T and (dO v^T)^T in registers, whose products with dO and q add up in
                registers; t goes through shared memory, since each consumer makes half of the columns of dQ
    loader      one warp; TMA copies

Ranges are cut at multiples of 64 queries of a sequence. A program goes through its range from the end, so the part of a
sequence that the next program will need is the first thing it makes: it leaves its sums of dK and dV in memory. The part
whose beginning belongs to the program before is the last it makes, and it adds that one's sums. So every gradient is
written by one program and is the same in every run. Programs wait for each other: all must be resident at once.

Rows of q and dO past the end of a sequence become zeros before they are used, and so do keys and values.
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

from .attention_activations import tanh
from .barriers import await_phase
from .facts import PLAIN, keep_asm, own_shift
from .gdpa_backward_moves import (
    add_left,
    arrive,
    clear,
    clear_slack,
    keep_rows,
    leave,
    send_block,
    store_rows,
)  # fmt: skip
from .gdpa_backward_norm import add_block, fetch_terms, normalise_block, release_block, take_block
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
)  # fmt: skip
from .lazy_kernels import accumulator_layout
from .variants import Tile, Variant

STAGES = gl.constexpr(2)  # blocks of q and dO in shared memory
GELU, GELU_TANH = gl.constexpr(4), gl.constexpr(5)  # codes of recsys_norm.ops.activations

# ---- loader ----------------------------------------------------------------------------------------------------------


@gluon.jit
def load_pair(one_desc, one, other_desc, other, bar, row, column):
    tma.async_load(one_desc, [row, column], bar, one)
    tma.async_load(other_desc, [row, column], bar, other)


@gluon.jit
def loader(
    q_desc, k_desc, v_desc, do_desc, k_s, v_s, q_s, do_s, facts, notes, kv_full, kv_free, full, free, terms_s=None,
    NORMED: gl.constexpr = False,
):  # fmt: skip
    turn = 0
    for i in range(count_parts(facts)):
        head, row, begin, end, key, keys = part(facts, i)
        column = head * WIDTH
        row += begin
        rows = end - begin
        place = i & 1
        bar = kv_full.index(place)
        form = gl.where(begin > 0, ADD, 0) | gl.where((i == 0) & (whole(facts, LAST_QUERY) > 0), LEAVE, 0)
        await_phase(kv_free.index(place), ((i >> 1) & 1) ^ 1)
        note_part(notes, place, column, row, rows, key, keys, form)
        mbarrier.expect(bar, 4 * k_desc.nbytes_per_cta)
        for half in gl.static_range(2):
            at = 2 * place + half
            load_pair(k_desc, k_s.index(at), v_desc, v_s.index(at), bar, key + half * BLOCK, column)
        for first in range(0, rows, BLOCK):
            stage = turn % STAGES
            bar = full.index(stage)
            await_phase(free.index(stage), ((turn // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, 2 * q_desc.nbytes_per_cta)
            load_pair(q_desc, q_s.index(stage), do_desc, do_s.index(stage), bar, row + first, column)
            if NORMED:
                fetch_terms(terms_s.index(stage), bar, facts, row + first, rows - first)
            turn += 1


# ---- consumers -------------------------------------------------------------------------------------------------------


@gluon.jit
def activation(z, ACT: gl.constexpr, NORMED: gl.constexpr = False):
    """(act(x), 2 act'(x)) for x = 2 z, with t = tanh(u): y = z + z t and 2 y' = 1 + t + (1 - t^2) z du/dz. For gelu u is
    the fit of ../activations.py; its own slope serves as that of gelu to 2.7e-4, without a second special function."""
    z2 = z * z
    if ACT == GELU:
        z2 = gl.minimum(z2, 9.0)  # beyond, t is 1 or -1
        u = z * ((z2 * -0.010105827914476395 + 0.2943860505321868) * z2 + 1.5954356624572144)
        w = z * ((z2 * -0.050529139572381974 + 0.8831581515965604) * z2 + 1.5954356624572144)
    else:
        gl.static_assert(ACT == GELU_TANH)
        u = z * (z2 * 0.28541926508903503 + 1.5957691216057308)
        w = z * (z2 * 0.85625779526709 + 1.5957691216057308)
    t = tanh(u)
    if NORMED and ACT == GELU_TANH:  # in the order that spills nothing there
        slope = w * (1.0 - t * t) + (1.0 + t)
        return z * t + z, slope
    else:
        return z * t + z, w * (1.0 - t * t) + (1.0 + t)


@gluon.jit
def scores(k, q):
    """k q^T on its way."""
    s = gl.zeros([BLOCK, BLOCK], gl.float32, accumulator_layout(BLOCK))
    return warpgroup_mma(k, q.permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def await_block(q_s, do_s, full, turn, rows, facts):
    """Block `turn` in shared memory, zeros past its `rows`; without rows there is nothing to wait for."""
    stage = turn % STAGES
    if rows > 0:
        await_phase(full.index(stage), (turn // STAGES) & 1)
        if rows < BLOCK:
            clear(q_s.index(stage), rows, facts)
            clear(do_s.index(stage), rows, facts)
            fence_async_shared()
            gl.barrier()


@gluon.jit
def prepare_block(q_s, do_s, terms_s, full, normed, notes, place, turn, rows, facts, W: gl.constexpr):
    """Block `turn`, of which `rows` rows are left, normalised as soon as it is there."""
    stage = turn % STAGES
    normalise_block(
        q_s.index(stage), do_s.index(stage), terms_s.index(stage), full.index(stage), (turn // STAGES) & 1, normed,
        note(notes, place, COLUMN), rows, facts, W,
    )  # fmt: skip


@gluon.jit
def consume(
    dq_desc, k_s, v_s, q_s, do_s, t_s, dq_s, facts, notes, kv_free, full, free, t_full, t_free, dk, dv, turn, i, half,
    terms_s, normed, W: gl.constexpr, ACT: gl.constexpr, NORMED: gl.constexpr, INNER: gl.constexpr,
):  # fmt: skip
    """The blocks of a part. Shifts of `turn` that are always 0 keep the compiler from holding every tile's address in
    registers. A block's dQ leaves the registers when the tensor cores have work again, and while they make dK and dQ the
    next block is normalised."""
    dtype: gl.constexpr = k_s.dtype
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    k_panels = k_s.reinterpret(dtype, [8, BLOCK, BLOCK], t_s.layout)
    place = i & 1
    rows = note(notes, place, ROWS)
    if NORMED:
        if rows > 0:
            prepare_block(q_s, do_s, terms_s, full, normed, notes, place, turn, rows, facts, W)
    for first in range(0, rows, BLOCK):
        stage = turn % STAGES
        if NORMED:
            await_phase(normed, turn & 1)
        else:
            await_block(q_s, do_s, full, turn, rows - first, facts)
        s = scores(k_s.index(2 * place + W + (turn >> 28)), q_s.index(stage))
        g = scores(v_s.index(2 * place + W + (turn >> 30)), do_s.index(stage))
        if first > 0:
            row = note(notes, place, ROW) + first - BLOCK
            send_block(dq_desc, dq_s.index(W), facts, row, note(notes, place, COLUMN) + W * BLOCK, BLOCK, NORMED)
        elif i > 0:
            tma.store_wait(0)
            arrive(kv_free.index(place ^ 1))  # the sums of the part before have left it
        s = warpgroup_mma_wait(1, deps=(s,))
        p, slope = activation(s * half, ACT, NORMED)
        p = gl.convert_layout(p.to(dtype), operand, assert_trivial=True)
        dv = warpgroup_mma(p, do_s.index(stage), dv, is_async=True)
        g = warpgroup_mma_wait(1, deps=(g,))
        g *= slope
        await_phase(t_free, (turn & 1) ^ 1)  # the products of the block before have read t
        keep_rows(g, t_s.index(W), facts)
        fence_async_shared()
        arrive(t_full)
        t = gl.convert_layout(g.to(dtype), operand, assert_trivial=True)
        dk = warpgroup_mma(t, q_s.index(stage), dk, is_async=True)
        await_phase(t_full, turn & 1)
        dv, p = warpgroup_mma_wait(1, deps=(dv, p))
        dq = gl.zeros([BLOCK, BLOCK], gl.float32, accumulator_layout(BLOCK))
        z = turn >> 29
        at = 4 * place + W + z
        dq = warpgroup_mma(t_s.index(z).permute((1, 0)), k_panels.index(at), dq, use_acc=False, is_async=True)
        dq = warpgroup_mma(t_s.index(1 + z).permute((1, 0)), k_panels.index(at + 2), dq, is_async=True)
        turn += 1
        if NORMED:
            left = note(notes, place, ROWS) - BLOCK - first  # read again, so that no register holds it
            if left > 0:
                prepare_block(q_s, do_s, terms_s, full, normed, notes, place, turn, left, facts, W)
        if INNER:
            past = take_block(do_s.index(stage), facts, W)
        tma.store_wait(0)
        gl.barrier()
        dq, dk, t = warpgroup_mma_wait(0, deps=(dq, dk, t))
        if INNER:
            release_block(free.index(stage), past, facts)
        else:
            arrive(free.index(stage))
        arrive(t_free)
        if INNER:
            dq = add_block(dq, half, past)
        else:
            dq *= half  # t is twice what it should be
        keep_rows(dq, dq_s.index(W), facts)
    return dk, dv, turn


@gluon.jit
def consumer(
    dq_desc, dk_desc, dv_desc, k_s, v_s, q_s, do_s, t_s, dq_s, facts, notes, kv_full, kv_free, full, free, t_full,
    t_free, half, W: gl.constexpr, ACT: gl.constexpr, terms_s=None, normed=None, NORMED: gl.constexpr = False,
    INNER: gl.constexpr = False,
):  # fmt: skip
    wide: gl.constexpr = accumulator_layout(WIDTH)
    turn = 0
    for i in range(count_parts(facts)):
        place = i & 1
        await_phase(kv_full.index(place), (i >> 1) & 1)
        keys = note(notes, place, COUNT)
        if keys < KEYS:
            clear(k_s.index(2 * place + W), keys - W * BLOCK, facts)
            clear(v_s.index(2 * place + W), keys - W * BLOCK, facts)
            fence_async_shared()
            gl.barrier()
        dk = gl.zeros([BLOCK, WIDTH], gl.float32, wide)
        dv = gl.zeros([BLOCK, WIDTH], gl.float32, wide)
        dk, dv, turn = consume(
            dq_desc, k_s, v_s, q_s, do_s, t_s, dq_s, facts, notes, kv_free, full, free, t_full, t_free, dk, dv,
            turn, i, half, terms_s, normed, W, ACT, NORMED, INNER,
        )  # fmt: skip
        place = i & 1
        rows = note(notes, place, ROWS)
        last = (rows - 1) // BLOCK * BLOCK  # the last block's first row
        if rows > 0:
            row = note(notes, place, ROW) + last
            column = note(notes, place, COLUMN) + W * BLOCK
            send_block(dq_desc, dq_s.index(W), facts, row, column, rows - last, NORMED)
        elif i > 0:
            tma.store_wait(0)
            arrive(kv_free.index(place ^ 1))
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
                keep_rows(dv, v_s.index(2 * place + W), facts)
                fence_async_shared()
                gl.barrier()
                tma.async_store(dk_desc, [key, column], k_s.index(2 * place + W))
                tma.async_store(dv_desc, [key, column], v_s.index(2 * place + W))
    tma.store_wait(0)
    if W == 0:
        clear_slack(facts, DQ, Q_OFFSETS, Q_STEP, QUERIES)
    else:
        clear_slack(facts, DK, K_OFFSETS, K_STEP, KEY_ROWS)
        clear_slack(facts, DV, K_OFFSETS, K_STEP, KEY_ROWS)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["batch", "heads", "q_step", "k_step", "most", "T", "U"])
def gdpa_backward_kernel(
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
    q_offsets_ptr,  # [B + 1], of which every q_step-th 32-bit word is read
    k_offsets_ptr,
    sums_ptr,  # [programs, 2 * 2 * 64 * 128] fp32
    flags_ptr,  # [programs, 2] i32: 0, also afterwards
    pitch,
    batch,
    heads,
    q_step,
    k_step,
    most,  # keys of a sequence
    T,
    U,
    half_scale,
    ACT: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    tile: gl.constexpr = q_desc.layout
    k_s = gl.allocate_shared_memory(dtype, [4, BLOCK, WIDTH], tile)
    v_s = gl.allocate_shared_memory(dtype, [4, BLOCK, WIDTH], tile)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, WIDTH], tile)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, WIDTH], tile)
    t_s = gl.allocate_shared_memory(dtype, [2, BLOCK, BLOCK], dq_desc.layout)
    dq_s = gl.allocate_shared_memory(dtype, [2, BLOCK, BLOCK], dq_desc.layout)
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
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=8)
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
            U.to(gl.int64), gl.to_tensor(0).to(gl.int64))  # fmt: skip
    gl.inline_asm(keep_asm, "r,r,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l", kept, is_pure=False)
    gl.warp_specialize(
        [
            (consumer, (dq_desc, dk_desc, dv_desc, k_s, v_s, q_s, do_s, t_s, dq_s, facts, notes, kv_full, kv_free, full,
                        free, t_full, t_free, half_scale, gl.constexpr(0), ACT)),
            (consumer, (dq_desc, dk_desc, dv_desc, k_s, v_s, q_s, do_s, t_s, dq_s, facts, notes, kv_full, kv_free, full,
                        free, t_full, t_free, half_scale, gl.constexpr(1), ACT)),
            (loader, (q_desc, k_desc, v_desc, do_desc, k_s, v_s, q_s, do_s, facts, notes, kv_full, kv_free, full, free)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


ACTIVATIONS = {"gelu": GELU.value, "gelu_tanh": GELU_TANH.value}


def variants():
    for name, code in ACTIVATIONS.items():
        args = {f"{x}_desc": Tile("bf16", (64, 128)) for x in ("q", "k", "v", "do")}
        args |= {f"d{x}_desc": Tile("bf16", (64, 64 if x == "q" else 128)) for x in "qkv"}
        args |= {f"{x}_ptr": "*bf16:16" for x in ("dq", "dk", "dv")}
        args |= {"q_offsets_ptr": "*i32", "k_offsets_ptr": "*i32", "sums_ptr": "*fp32:16", "flags_ptr": "*i32"}
        args |= {"pitch": "i64:16"}
        args |= {x: "i32" for x in ("batch", "heads", "q_step", "k_step", "most", "T", "U")}
        args |= {"half_scale": "fp32", "ACT": code}
        yield Variant(f"gdpa_backward_{name}_bf16", gdpa_backward_kernel, args, maxnreg=168)


VARIANTS = list(variants())
