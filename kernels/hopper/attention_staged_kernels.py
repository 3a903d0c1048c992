"""Backward of norm_attention's middle for sequences of at most 128 keys: that of jagged attention (gdpa_backward_kernels.py)
with both norms on the way in. Per head, with c1 and c2 of row_terms_kernels.py:

    dz = r (dout gamma - c1 - zhat c2)    qn = norm(q)    dqn, dk, dv = gradients of attention(qn, k, v) for dz

q, dout and the post-norm's output zhat come as they are in memory; the four warps that fetch them also form qn and dz, in
place in shared memory, while the consumers work on the block before. So neither is ever written to memory. Of the values
there is one buffer only, which makes room for zhat: a sequence's values are needed last in the first half of its last
block, and those of the next sequence are fetched from then on. dV leaves through the memory of t and dQ.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .attention_backward_common import GELU, GELU_TANH, PLAIN, fact, keep_asm, own_shift, pointer
from .attention_staged_moves import FEATURES, VECTORS, differentiate, normalise, take_terms
from .gdpa_backward_kernels import STAGES, consumer
from .gdpa_backward_moves import arrive, clear
from .gdpa_backward_ranges import (
    ADD,
    BLOCK,
    EXTRA,
    FACTS,
    LAST_QUERY,
    LEAVE,
    WIDTH,
    count_parts,
    cut,
    note_part,
    part,
    whole,
)  # fmt: skip
from .lazy_kernels import await_phase
from .variants import Tile, Variant


@gluon.jit
def fetch_pair(desc, tiles, place, bar, row, column):
    """Keys or values of a sequence, 64 for each consumer."""
    mbarrier.expect(bar, 2 * desc.nbytes_per_cta)
    for half in range(2):
        tma.async_load(desc, [row + half * BLOCK, column], bar, tiles.index(place + half))


@gluon.jit
def fetch_values(v_desc, v_s, v_full, v_free, i, key, column):
    """Those of part i, once the consumers need no more of the part before."""
    await_phase(v_free, (i & 1) ^ 1)
    fetch_pair(v_desc, v_s, 0, v_full, key, column)


@gluon.jit
def fetch_block(q_desc, do_desc, hat_desc, q_s, do_s, hat_s, terms, facts, full, free, turn, row, rows, column):
    """A block on its way, once the consumers are done with the one two before."""
    stage = turn % STAGES
    bar = full.index(stage)
    await_phase(free.index(stage), ((turn // STAGES) & 1) ^ 1)
    gl.barrier()  # all warps are done with zhat and the terms of the block before
    mbarrier.expect(bar, 3 * q_desc.nbytes_per_cta)
    tma.async_load(hat_desc, [row, column], bar, hat_s.index(0))
    tma.async_load(do_desc, [row, column], bar, do_s.index(stage))
    tma.async_load(q_desc, [row, column], bar, q_s.index(stage))
    take_terms(terms, row, rows, facts)


@gluon.jit
def prepare_block(q_s, do_s, hat_s, terms, facts, full, ready, turn, rows, column):
    """qn and dz of a block, zeros past its `rows`."""
    stage = turn % STAGES
    gl.barrier()  # the terms are there
    await_phase(full.index(stage), (turn // STAGES) & 1)
    vectors = pointer(facts, VECTORS, gl.float32) + column
    differentiate(do_s.index(stage), hat_s.index(0), terms, vectors + 2 * fact(facts, FEATURES), facts)
    normalise(q_s.index(stage), terms, vectors, vectors + fact(facts, FEATURES), facts)
    if rows < BLOCK:
        gl.barrier()
        clear(q_s.index(stage), rows, facts)
        clear(do_s.index(stage), rows, facts)
    fence_async_shared()
    arrive(ready.index(stage))


@gluon.jit
def side(
    q_desc, k_desc, v_desc, do_desc, hat_desc, k_s, v_s, q_s, do_s, hat_s, terms, facts, notes, kv_full, kv_free, v_full,
    v_free, full, ready, free,
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
        for first in range(0, rows, BLOCK):
            fetch_block(
                q_desc, do_desc, hat_desc, q_s, do_s, hat_s, terms, facts, full, free, turn, row + first, rows - first,
                column,
            )  # fmt: skip
            if first == 0:
                fetch_values(v_desc, v_s, v_full, v_free, i, key, column)
            prepare_block(q_s, do_s, hat_s, terms, facts, full, ready, turn, rows - first, column)
            turn += 1
        if rows <= 0:
            fetch_values(v_desc, v_s, v_full, v_free, i, key, column)


@gluon.jit(do_not_specialize=["batch", "heads", "q_step", "k_step", "most", "T", "U"])
def attention_staged_kernel(
    q_desc,  # [T, heads * 128]
    k_desc,  # [U, heads * 128]
    v_desc,
    do_desc,
    hat_desc,
    dq_desc,  # rows `pitch` apart, as those of dk and dv
    dk_desc,
    dv_desc,
    q_ptr,  # rows q_pitch apart
    dq_ptr,
    dk_ptr,
    dv_ptr,
    o_rstd_ptr,  # [T] fp32, and [T, 2] fp32: what row_terms_kernel has made
    means_ptr,
    rstd_ptr,  # [T] fp32
    mean_ptr,
    vectors_ptr,  # [3, heads * 128] fp32: weight and bias of the pre-norm, weight of the post-norm
    q_offsets_ptr,  # [B + 1], of which every q_step-th 32-bit word is read
    k_offsets_ptr,
    sums_ptr,  # [programs, 2 * 2 * 64 * 128] fp32
    flags_ptr,  # [programs, 2] i32: 0, also afterwards
    q_pitch,
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
    v_s = gl.allocate_shared_memory(dtype, [2, BLOCK, WIDTH], tile)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, WIDTH], tile)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, WIDTH], tile)
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
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    ready = mbarrier.allocate_mbarrier(batch=STAGES)
    free = mbarrier.allocate_mbarrier(batch=STAGES)
    t_full = mbarrier.allocate_mbarrier()
    t_free = mbarrier.allocate_mbarrier()
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_free.index(i), count=8)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(ready.index(i), count=4)
        mbarrier.init(free.index(i), count=8)
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
                        v_free, ready, free, t_full, t_free, half_scale, gl.constexpr(0), ACT, gl.constexpr(True))),
            (consumer, (dq_desc, dk_desc, dv_desc, k_s, v_s, q_s, do_s, t_s, dq_s, facts, notes, kv_full, kv_free, v_full,
                        v_free, ready, free, t_full, t_free, half_scale, gl.constexpr(1), ACT, gl.constexpr(True))),
            (side, (q_desc, k_desc, v_desc, do_desc, hat_desc, k_s, v_s, q_s, do_s, hat_s, terms, facts, notes, kv_full,
                    kv_free, v_full, v_free, full, ready, free)),
        ],
        [4, 4],
        [232, 40],
    )  # fmt: skip


ACTIVATIONS = {"gelu": GELU.value, "gelu_tanh": GELU_TANH.value}


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
        yield Variant(f"attention_staged_{name}_bf16", attention_staged_kernel, args, maxnreg=168)


VARIANTS = list(variants())
