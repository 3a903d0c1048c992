"""Forward of jagged attention without norms, for sequences of at most 128 keys: o = act(scale * q k^T) v per head.

A program works through a range of (head, sequence) pairs, the same amount for every program. A sequence's keys and values
stay in shared memory while blocks of 64 queries pass; those of the next sequence are fetched meanwhile. Partitions:

    consumers   warpgroups that take blocks in turn: scores in registers, o to the place of its queries and from there to
                memory
    loader      one warp; TMA copies

Each consumer has two places: one's queries come while it works on the other's. A place is free when the store of its block
has read it, which a consumer waits for when its next block's product is on its way.

Ranges are cut at multiples of 64 queries of a sequence. Keys and values past the end of a sequence become zeros, and
act(0) = 0; queries past its end give rows that are not stored.
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
from .gdpa_backward_kernels import GELU, GELU_TANH, load_pair
from .gdpa_backward_moves import arrive, clear_slack
from .gdpa_backward_ranges import (
    BLOCK,
    COLUMN,
    COUNT,
    FACTS,
    KEYS,
    Q_OFFSETS,
    Q_STEP,
    QUERIES,
    ROW,
    ROWS,
    WIDTH,
    count_parts,
    note,
    note_part,
    part,
)  # fmt: skip
from .gdpa_forward_moves import OUT, clear_keys, prefetch, send_block
from .gdpa_forward_ranges import cuts
from .lazy_kernels import accumulator_layout
from .variants import Tile, Variant

CONSUMERS = gl.constexpr(3)
SLOTS = gl.constexpr(6)  # places of blocks: two for each consumer

# ---- loader ----------------------------------------------------------------------------------------------------------


@gluon.jit
def loader(q_desc, k_desc, v_desc, k_s, v_s, q_s, facts, notes, kv_full, kv_free, full, free):
    """Parts without queries are left out; one of no rows is the end. What a sequence's last copies take beyond it is what
    the next ones begin with, and waits in L2 then."""
    turn = 0
    i = 0
    for n in range(count_parts(facts) - 1, -1, -1):
        head, row, begin, end, key, keys = part(facts, n)
        if end > begin:
            column = head * WIDTH
            place = i & 1
            bar = kv_full.index(place)
            await_phase(kv_free.index(place), ((i >> 1) & 1) ^ 1)
            note_part(notes, place, column, row + begin, end - begin, key, keys, 0)
            mbarrier.expect(bar, 2 * k_desc.nbytes_per_cta)
            load_pair(k_desc, k_s.index(place), v_desc, v_s.index(place), bar, key, column)
            for first in range(begin, end, BLOCK):
                slot = turn % SLOTS
                await_phase(free.index(slot), ((turn // SLOTS) & 1) ^ 1)
                mbarrier.expect(full.index(slot), q_desc.nbytes_per_cta)
                tma.async_load(q_desc, [row + first, column], full.index(slot), q_s.index(slot))
                turn += 1
            i += 1
    place = i & 1
    await_phase(kv_free.index(place), ((i >> 1) & 1) ^ 1)
    nothing = i - i
    note_part(notes, place, nothing, nothing, nothing, nothing, nothing, nothing)
    arrive(kv_full.index(place))


# ---- consumers -------------------------------------------------------------------------------------------------------


@gluon.jit
def activation(z, ACT: gl.constexpr):
    """act(2 z): z + z tanh(u), for gelu with the fit of ../activations.py."""
    z2 = z * z
    if ACT == GELU:
        z2 = gl.minimum(z2, 9.0)  # beyond, tanh is 1 or -1
        u = z * ((z2 * -0.010105827914476395 + 0.2943860505321868) * z2 + 1.5954356624572144)
    else:
        gl.static_assert(ACT == GELU_TANH)
        u = z * (z2 * 0.28541926508903503 + 1.5957691216057308)
    return z * tanh(u) + z


@gluon.jit
def attend(q, k, v, free, earlier, half, W: gl.constexpr, ACT: gl.constexpr):
    """o of a block. Under its first product the block `earlier` leaves its place, from the second block on."""
    wide: gl.constexpr = accumulator_layout(WIDTH)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=wide, k_width=2)
    s = gl.zeros([BLOCK, KEYS], gl.float32, wide)
    s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
    if earlier >= 0:
        tma.store_wait(0)
        arrive(free.index(W + CONSUMERS * (earlier & 1)))
    s = warpgroup_mma_wait(0, deps=(s,))
    p = gl.convert_layout(activation(s * half, ACT).to(q.dtype), operand, assert_trivial=True)
    o = gl.zeros([BLOCK, WIDTH], gl.float32, wide)
    o = warpgroup_mma(p, v, o, use_acc=False, is_async=True)
    o, p = warpgroup_mma_wait(0, deps=(o, p))
    return o


@gluon.jit
def consumer(
    o_desc, k_s, v_s, q_s, facts, notes, kv_full, kv_free, full, free, half, W: gl.constexpr, ACT: gl.constexpr
):  # fmt: skip
    """Every CONSUMERS-th block from the W-th on. Shifts that are always 0 keep the compiler from holding every tile's
    address in registers."""
    if W == CONSUMERS - 1:
        clear_slack(facts, OUT, Q_OFFSETS, Q_STEP, QUERIES)
    turn = 0  # own blocks so far
    skip = W + 0  # blocks of others before the next own one
    i = 0
    await_phase(kv_full.index(0), 0)
    rows = note(notes, 0, ROWS)
    while rows > 0:
        place = i & 1
        keys = note(notes, place, COUNT)
        if (keys < KEYS) & (skip * BLOCK < rows):
            # All consumers do that, each before it reads, so that none waits for another: zeros over zeros.
            clear_keys(k_s.index(place), keys, facts)
            clear_keys(v_s.index(place), keys, facts)
            fence_async_shared()
            gl.barrier()
        for first in range(skip * BLOCK, rows, CONSUMERS * BLOCK):
            slot = W + CONSUMERS * (turn & 1)
            await_phase(full.index(slot), (turn >> 1) & 1)
            k = k_s.index(place + (turn >> 30))
            v = v_s.index(place + (turn >> 29))
            o = attend(q_s.index(slot), k, v, free, turn - 1, half, W, ACT)
            row = note(notes, place, ROW) + first
            column = note(notes, place, COLUMN)
            send_block(o, o_desc, q_s.index(slot), facts, row, column, note(notes, place, ROWS) - first)
            turn += 1
        arrive(kv_free.index(place))
        blocks = (rows + BLOCK - 1) // BLOCK
        skip += (gl.maximum(blocks - skip, 0) + CONSUMERS - 1) // CONSUMERS * CONSUMERS - blocks
        i += 1
        await_phase(kv_full.index(i & 1), (i >> 1) & 1)
        rows = note(notes, i & 1, ROWS)
    tma.store_wait(0)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["batch", "heads", "q_step", "k_step", "most", "T"])
def gdpa_forward_kernel(
    q_desc,  # [T, heads * 128]
    k_desc,  # [U, heads * 128]
    v_desc,
    o_desc,  # [T, heads * 128], rows `pitch` apart
    o_ptr,
    q_offsets_ptr,  # [B + 1], of which every q_step-th 32-bit word is read
    k_offsets_ptr,
    pitch,
    batch,
    heads,
    q_step,
    k_step,
    most,  # keys of a sequence
    T,
    half_scale,
    ACT: gl.constexpr,
):
    prefetch(k_offsets_ptr, batch * k_step)
    dtype: gl.constexpr = q_desc.dtype
    k_s = gl.allocate_shared_memory(dtype, [2, KEYS, WIDTH], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [2, KEYS, WIDTH], v_desc.layout)
    q_s = gl.allocate_shared_memory(dtype, [SLOTS, BLOCK, WIDTH], q_desc.layout)
    facts = gl.allocate_shared_memory(gl.int64, [FACTS], PLAIN)
    notes = gl.allocate_shared_memory(gl.int32, [16], PLAIN)
    kv_full = mbarrier.allocate_mbarrier(batch=2)
    kv_free = mbarrier.allocate_mbarrier(batch=2)
    full = mbarrier.allocate_mbarrier(batch=SLOTS)
    free = mbarrier.allocate_mbarrier(batch=SLOTS)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_free.index(i), count=4 * CONSUMERS)  # warps
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=4)
    first, first_query, last, last_query = cuts(
        q_offsets_ptr, q_step, batch, heads, gl.program_id(0), gl.num_programs(0)
    )
    # Places as the backward has them, which needs more.
    kept = (facts, own_shift(facts), q_offsets_ptr, k_offsets_ptr, q_step.to(gl.int64), k_step.to(gl.int64),
            batch.to(gl.int64), most.to(gl.int64), first.to(gl.int64), first_query.to(gl.int64), last.to(gl.int64),
            last_query.to(gl.int64), o_ptr, o_ptr, o_ptr, o_ptr, o_ptr, pitch, T.to(gl.int64), T.to(gl.int64),
            gl.to_tensor(0).to(gl.int64))  # fmt: skip
    gl.inline_asm(keep_asm, "r,r,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l", kept, is_pure=False)
    gl.warp_specialize(
        [
            (consumer, (o_desc, k_s, v_s, q_s, facts, notes, kv_full, kv_free, full, free, half_scale,
                        gl.constexpr(0), ACT)),
            (consumer, (o_desc, k_s, v_s, q_s, facts, notes, kv_full, kv_free, full, free, half_scale,
                        gl.constexpr(1), ACT)),
            (consumer, (o_desc, k_s, v_s, q_s, facts, notes, kv_full, kv_free, full, free, half_scale,
                        gl.constexpr(2), ACT)),
            (loader, (q_desc, k_desc, v_desc, k_s, v_s, q_s, facts, notes, kv_full, kv_free, full, free)),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )  # fmt: skip


ACTIVATIONS = {"gelu": GELU.value, "gelu_tanh": GELU_TANH.value}


def variants():
    for name, code in ACTIVATIONS.items():
        args = {f"{x}_desc": Tile("bf16", (128 if x in "kv" else 64, 128)) for x in "qkvo"}
        args |= {"o_ptr": "*bf16:16", "q_offsets_ptr": "*i32", "k_offsets_ptr": "*i32", "pitch": "i64:16"}
        args |= {x: "i32" for x in ("batch", "heads", "q_step", "k_step", "most", "T")}
        args |= {"half_scale": "fp32", "ACT": code}
        yield Variant(f"gdpa_forward_{name}_bf16", gdpa_forward_kernel, args, maxnreg=128)


VARIANTS = list(variants())
