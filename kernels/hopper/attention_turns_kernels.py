"""Forward of norm_attention with three warpgroups that take blocks in turn; arguments, cluster and messages are those of
attention_forward_kernels.py, whose steps it uses.

    qn = norm(q over all heads or one)
    o_h = act(scale * qn_h k_h^T) v_h (+ qn_h)
    out = norm(o over all heads) (+ residual)

A CTA has one head. Partitions:

    consumers   three warpgroups; each makes a whole block of 64 rows of q, from its statistics to its stores, one step after
                the other, while the other two are at other steps: waits for messages and products hide behind each other
    loader      blocks of q, and the keys and values of the next sequence while the present one is worked on; 4 warps, so
                that no warp is without a partition and the cluster can meet

Blocks of all sequences are counted through: consumer W has those whose number is W modulo 3. A block stays in its slot
until what was made of it is stored from there. A consumer looks for its block only when the one before it has been seen:
copies may arrive in another order, and it could take the slot's last phase for its next.

Each consumer has places for messages of its own, one per norm: a CTA sends for the first norm of a block when it has read
all messages for the second norm of its block before, which are sent after those for the first norm of that block have been
read. So both are exchanged, or none.
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

from .attention_activations import activate
from .attention_backward_common import FACTS, fact, keep_asm, meet_cluster, number, own_shift, pointer
from .attention_blocks import (
    FLAT,
    KEYS,
    LAYER,
    NONE,
    WIDTH,
    clear_rows,
    clear_values,
    find_sequence,
    first_values,
    following_sequence,
    keys_of,
    load_tile,
    load_vector,
    store_statistics,
    widen,
)
from .attention_exchange import MESSAGE, ROWS, collect, own_address, row_layout, send, tile_layout
from .attention_forward_kernels import OTHER, OWN, operand_layout
from .gdpa_backward_ranges import whole
from .postnorm_multiply import chunks_of
from .tile_rows import add_rows, chunk_layout, first_of_row, keep_chunk, load_chunk, store_rows
from .variants import Tile, Variant

CONSUMERS = gl.constexpr(3)
CHUNK, PANEL = gl.constexpr(64), gl.constexpr(8192)  # columns and bytes of half a block
# Of a note: the row of block 0 if blocks lay side by side, the row behind the sequence's last and the number of the block
# behind it, 0 if there is no sequence any more.
FIRST, STOP, BEHIND = (gl.constexpr(i) for i in range(3))


# What is needed now and then waits in shared memory and not in registers, at these places.
OUT, HAT, RESIDUAL, R_TOKEN, PITCH, COLUMN, RANK, HEADS = (gl.constexpr(i) for i in range(8))
Q_MEAN, Q_RSTD, O_MEAN, O_RSTD, Q_STEP, FORM = (gl.constexpr(i) for i in range(8, 14))
SCALE, EPS, INVERSE, Q_INVERSE, ZERO = (gl.constexpr(i) for i in range(14, 19))
Q_OFFSETS, K_OFFSETS, Q_WORDS, K_WORDS, MAX_KEYS, ROW, END, SEQUENCE = (gl.constexpr(i) for i in range(19, 27))
# Bits of FORM.
PRE_BIT, POST_BIT, RESIDUAL_BIT, CODE_BIT = gl.constexpr(0), gl.constexpr(2), gl.constexpr(4), gl.constexpr(16)
TALK, PER_HEAD, INNER, KEEP, Q_STORES = (gl.constexpr(64 << i) for i in range(5))


# ---- notes: what consumers want to know of a sequence ----------------------------------------------------------------


@gluon.constexpr_function
def _note(outputs, inputs):
    (at,), (first,), (stop,), (behind,) = inputs
    return f"st.shared.v4.b32 [{at}], {{{first}, {stop}, {behind}, {behind}}};"


@gluon.jit
def take_note(notes, place, first, stop, behind):
    """Every thread writes the same."""
    gl.inline_asm(_note, "r,r,r,r,~{memory}", [own_address(notes.index(place)), first, stop, behind], (), is_pure=False)


@gluon.constexpr_function
def _word(i):
    return f"ld.shared.b32 $0, [$1 + {4 * i}];"


@gluon.jit
def noted(notes, place, i: gl.constexpr):
    asm: gl.constexpr = _word(i)
    return gl.inline_asm(asm, "=r,r,~{memory}", [own_address(notes.index(place))], gl.int32, is_pure=False)


# ---- loader ----------------------------------------------------------------------------------------------------------


@gluon.jit
def loader(q_desc, k_desc, v_desc, q_s, k_s, v_s, notes, facts, q_full, q_free, kv_full, kv_free, kv_ready,
           SLOTS: gl.constexpr):  # fmt: skip
    meet_cluster()
    n = 0  # blocks
    turn = 0  # sequences
    row = whole(facts, ROW)
    b = whole(facts, SEQUENCE)
    while row < whole(facts, END):
        place = turn & 1
        step = whole(facts, Q_WORDS)
        sequence_end = gl.load(pointer(facts, Q_OFFSETS, gl.int32) + (b + 1) * step)
        stop = gl.minimum(sequence_end, whole(facts, END))
        at = pointer(facts, K_OFFSETS, gl.int32)
        first_key, keys = keys_of(at, whole(facts, K_WORDS), b, whole(facts, MAX_KEYS))
        mbarrier.wait(kv_free.index(place), ((turn >> 1) & 1) ^ 1)
        bar = kv_full.index(place)
        mbarrier.expect(bar, k_desc.nbytes_per_cta + v_desc.nbytes_per_cta)
        tma.async_load(k_desc, [first_key, whole(facts, COLUMN)], bar, k_s.index(place))
        tma.async_load(v_desc, [first_key, whole(facts, COLUMN)], bar, v_s.index(place))
        behind = n + (stop - row + ROWS - 1) // ROWS
        take_note(notes, place, row - n * ROWS, stop, behind)
        mbarrier.wait(bar, (turn >> 1) & 1)
        if keys < KEYS:  # what lies behind them belongs to others: with zeros nobody has to look
            clear_values(k_s.index(place), keys)
            clear_values(v_s.index(place), keys)
        mbarrier.arrive(kv_ready.index(place))
        while n < behind:
            slot = n % SLOTS
            mbarrier.wait(q_free.index(slot), ((n // SLOTS) & 1) ^ 1)
            load_tile(q_desc, q_s.index(slot), q_full.index(slot), row, whole(facts, COLUMN))
            row += ROWS
            n += 1
        row = stop
        turn += 1
        if row < whole(facts, END):
            b, _ = following_sequence(pointer(facts, Q_OFFSETS, gl.int32), whole(facts, Q_WORDS), b, row)
    place = turn & 1
    mbarrier.wait(kv_free.index(place), ((turn >> 1) & 1) ^ 1)
    take_note(notes, place, 0, 0, 0)  # no more sequences
    mbarrier.arrive(kv_ready.index(place))


# ---- consumers -------------------------------------------------------------------------------------------------------


@gluon.jit
def chunk_moments(a, b, kind):
    """Per row of two chunks side by side: mean (0 for RMS) and sum of squared deviations from it."""
    mean = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, chunk_layout()))
    if kind == LAYER:
        mean = (gl.sum(a, axis=1) + gl.sum(b, axis=1)) * (1.0 / WIDTH)
        a -= mean[:, None]
        b -= mean[:, None]
    square = gl.sum(a * a + b * b, axis=1)
    mean = gl.convert_layout(mean, row_layout(), assert_trivial=True)
    return mean, gl.convert_layout(square, row_layout(), assert_trivial=True)


@gluon.jit
def exchanged(mean, square, messages, bar, phase, facts, PEERS: gl.constexpr):
    heads = whole(facts, HEADS)
    send(messages, bar, whole(facts, RANK), heads, mean, square)
    return collect(messages, bar, phase, heads, PEERS)


@gluon.jit
def standardise(x, mean, rstd):
    S: gl.constexpr = gl.SliceLayout(1, chunk_layout())
    scale = gl.convert_layout(rstd, S, assert_trivial=True)[:, None]
    shift = gl.convert_layout(-mean * rstd, S, assert_trivial=True)[:, None]
    return gl.fma(x, gl.broadcast(scale, x)[0], gl.broadcast(shift, x)[0])


@gluon.jit
def scale_columns(x, vectors, i: gl.constexpr):
    """`vectors` holds, per chunk, weight and bias of the pre-norm and of the post-norm, each in two halves."""
    S: gl.constexpr = gl.SliceLayout(0, chunk_layout())
    return x * vectors.index(i).load(S)[None, :] + vectors.index(i + 2).load(S)[None, :]


@gluon.jit
def normalised(q, place, messages, bar, phase, vectors, facts, form, row, rows, PEERS: gl.constexpr):
    """A block of q after its norm, as two chunks; the statistics are stored by one CTA of the cluster, or by each of its own
    head."""
    dtype: gl.constexpr = q.dtype
    zero = whole(facts, ZERO)
    a = load_chunk(place, zero, dtype)
    b = load_chunk(place + PANEL, zero, dtype)
    kind = form >> PRE_BIT & 3
    mean, square = chunk_moments(a, b, kind)
    if form & TALK != 0:
        all_mean, all_square = exchanged(mean, square, messages, bar, phase, facts, PEERS)
        if form & PER_HEAD == 0:
            mean = all_mean
            square = all_square
    if kind != NONE:
        rstd = gl.rsqrt(square * number(facts, Q_INVERSE) + number(facts, EPS))
        if form & Q_STORES != 0:
            to_mean, to_rstd = pointer(facts, Q_MEAN, gl.float32), pointer(facts, Q_RSTD, gl.float32)
            store_statistics(to_mean, to_rstd, mean, rstd, first_values(q), row, rows, whole(facts, Q_STEP), kind)
        a = scale_columns(standardise(a, mean, rstd), vectors, 0)
        b = scale_columns(standardise(b, mean, rstd), vectors, 1)
    return a.to(dtype), b.to(dtype)


@gluon.jit
def attend(qa, qb, k, v, facts, form, ACT: gl.constexpr, FAST: gl.constexpr):
    """The two chunks of o."""
    W: gl.constexpr = operand_layout()
    zeros = gl.zeros([ROWS, KEYS], gl.float32, tile_layout())
    left, right = gl.convert_layout(qa, W, assert_trivial=True), gl.convert_layout(qb, W, assert_trivial=True)
    s = warpgroup_mma(left, k.slice(0, CHUNK, dim=1).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma(right, k.slice(CHUNK, CHUNK, dim=1).permute((1, 0)), s, is_async=True)
    s, left, right = warpgroup_mma_wait(0, deps=(s, left, right))
    p = activate(s, number(facts, SCALE), form >> CODE_BIT, ACT, FAST)
    o = warpgroup_mma(gl.convert_layout(p.to(qa.dtype), W), v, zeros, use_acc=False)
    a, b = chunks_of(o, 2)
    if form & INNER != 0:
        a += widen(qa)
        b += widen(qb)
    return a, b


@gluon.jit
def store_block(desc, tensor: gl.constexpr, a, b, q, place, facts, row, rows):
    """A whole block goes by TMA, which reads its place until tma.store_wait(0); of others TMA would also write the rows that
    follow, which belong to another sequence."""
    column = whole(facts, COLUMN)
    zero = whole(facts, ZERO)
    if rows == ROWS:
        keep_chunk(a, place, zero, q.dtype)
        keep_chunk(b, place + PANEL, zero, q.dtype)
        fence_async_shared()
        gl.barrier()
        tma.async_store(desc, [row, column], q)
    else:
        pitch = fact(facts, PITCH)
        at = pointer(facts, tensor, q.dtype) + row.to(gl.int64) * pitch + column
        store_rows(a, at, pitch, rows, zero)
        store_rows(b, at + CHUNK, pitch, rows, zero)


@gluon.jit
def finish(a, b, mean, square, q, place, out_desc, hat_desc, vectors, facts, form, row, rows):
    """Norm of o, residual and stores. TMA may still read q's place afterwards."""
    dtype: gl.constexpr = q.dtype
    kind = form >> POST_BIT & 3
    zero = whole(facts, ZERO)
    if kind != NONE:
        rstd = gl.rsqrt(square * number(facts, INVERSE) + number(facts, EPS))
        if whole(facts, RANK) == 0:
            first = first_of_row(a, mean.type)
            to_mean, to_rstd = pointer(facts, O_MEAN, gl.float32), pointer(facts, O_RSTD, gl.float32)
            store_statistics(to_mean, to_rstd, mean, rstd, first, row, rows, 1, kind)
        a = standardise(a, mean, rstd)
        b = standardise(b, mean, rstd)
    own = form >> RESIDUAL_BIT & 3 == OWN
    if form & KEEP != 0:
        # q is needed once more below: its place takes zhat only after it has been read.
        qa = load_chunk(place, zero, dtype).to(dtype)
        qb = load_chunk(place + PANEL, zero, dtype).to(dtype)
        gl.barrier()
        store_block(hat_desc, HAT, a, b, q, place, facts, row, rows)
        a = scale_columns(a, vectors, 4)
        b = scale_columns(b, vectors, 5)
        if own:
            a += widen(qa)
            b += widen(qb)
        tma.store_wait(0)
    else:
        if kind != NONE:
            a = scale_columns(a, vectors, 4)
            b = scale_columns(b, vectors, 5)
        if own:
            a += load_chunk(place, zero, dtype)
            b += load_chunk(place + PANEL, zero, dtype)
    if form >> RESIDUAL_BIT & 3 == OTHER:
        pitch = fact(facts, R_TOKEN)
        at = pointer(facts, RESIDUAL, dtype) + row.to(gl.int64) * pitch + whole(facts, COLUMN)
        a = add_rows(a, at, pitch, rows, CHUNK, zero)
        b = add_rows(b, at + CHUNK, pitch, rows, CHUNK, zero)
    gl.barrier()
    store_block(out_desc, OUT, a, b, q, place, facts, row, rows)


@gluon.jit
def consumer(out_desc, hat_desc, q_s, k_s, v_s, notes, messages, vectors, facts, q_full, q_free, kv_free, kv_ready,
             arrived, turns, W: gl.constexpr, ACT: gl.constexpr, FAST: gl.constexpr, SLOTS: gl.constexpr,
             PEERS: gl.constexpr):  # fmt: skip
    meet_cluster()
    turn = 0  # sequences
    n = W  # blocks of the cluster, of which every third is this consumer's
    mbarrier.wait(kv_ready.index(0), 0)
    while noted(notes, turn & 1, BEHIND) > 0:
        place = turn & 1
        while n < noted(notes, place, BEHIND):
            slot = n % SLOTS
            row = noted(notes, place, FIRST) + n * ROWS
            rows = gl.minimum(noted(notes, place, STOP) - row, ROWS)
            q = q_s.index(slot)
            mbarrier.wait(turns.index(W), ((n // CONSUMERS) & 1) ^ (1 if W == 0 else 0))
            mbarrier.wait(q_full.index(slot), (n // SLOTS) & 1)
            mbarrier.arrive(turns.index((W + 1) % CONSUMERS))
            form = whole(facts, FORM)
            at = own_address(q)
            phase = (n // CONSUMERS) & 1
            qa, qb = normalised(q, at, messages.index(2 * W), arrived.index(2 * W), phase, vectors, facts, form, row, rows,
                                PEERS)  # fmt: skip
            a, b = attend(qa, qb, k_s.index(place), v_s.index(place), facts, form, ACT, FAST)
            mean, square = chunk_moments(a, b, form >> POST_BIT & 3)
            if form & TALK != 0:
                mean, square = exchanged(mean, square, messages.index(2 * W + 1), arrived.index(2 * W + 1), phase, facts,
                                         PEERS)  # fmt: skip
            finish(a, b, mean, square, q, at, out_desc, hat_desc, vectors, facts, form, row, rows)
            tma.store_wait(0)
            fence_async_shared()
            gl.barrier()
            mbarrier.arrive(q_free.index(slot))
            n += CONSUMERS
        mbarrier.arrive(kv_free.index(place))
        turn += 1
        mbarrier.wait(kv_ready.index(turn & 1), (turn >> 1) & 1)
    tma.store_wait(0)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def kept_kinds(values):
    return ("r", "r", *("l",) * values)


@gluon.jit
def word(x):
    """As 64 bits."""
    return gl.to_tensor(x).to(gl.int64)


@gluon.jit
def bits(x):
    return gl.to_tensor(x).to(gl.int32, bitcast=True).to(gl.int64)


@gluon.jit(do_not_specialize=["batch", "queries", "heads", "q_stride", "k_stride", "r_token", "max_keys"])
def attention_turns_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    hat_desc,
    residual_ptr,
    out_ptr,
    hat_ptr,
    q_offsets_ptr,
    k_offsets_ptr,
    q_weight_ptr,
    q_bias_ptr,
    o_weight_ptr,
    o_bias_ptr,
    q_mean_ptr,
    q_rstd_ptr,
    o_mean_ptr,
    o_rstd_ptr,
    r_token,
    q_stride,
    k_stride,
    batch,
    queries,
    heads,
    max_keys,
    scale,
    eps,
    pre,
    post,
    per_head,
    inner,
    residual,
    narrow,
    codes,
    ACT: gl.constexpr,
    PEERS: gl.constexpr,
    SLOTS: gl.constexpr,  # blocks of q in shared memory
):
    dtype: gl.constexpr = q_desc.dtype
    FAST: gl.constexpr = dtype == gl.bfloat16
    cluster = gl.program_id(0) // heads
    rank = gl.program_id(0) - cluster * heads
    clusters = gl.num_programs(0) // heads
    pitch = heads * WIDTH
    column = rank * WIDTH
    code = (codes >> (4 * rank)) & 15
    talk = (((pre != NONE) & (per_head == 0)) | (post != NONE)) & (heads > 1)
    inverse = 1.0 / pitch.to(gl.float32)
    own = per_head != 0  # the pre-norm's statistics are those of this head
    q_inverse = gl.where(own, 1.0 / WIDTH, inverse)
    q_step = gl.where(own, heads, 1)
    q_stores = own | (rank == 0)
    q_mean_ptr += gl.where(own, rank, 0)
    q_rstd_ptr += gl.where(own, rank, 0)
    first_place = gl.where(own, column, 0)

    q_s = gl.allocate_shared_memory(dtype, [SLOTS, ROWS, WIDTH], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [2, KEYS, WIDTH], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [2, KEYS, WIDTH], v_desc.layout)
    messages = gl.allocate_shared_memory(gl.float32, [2 * CONSUMERS, PEERS * MESSAGE], FLAT)
    vectors = gl.allocate_shared_memory(gl.float32, [4, WIDTH], FLAT)
    notes = gl.allocate_shared_memory(gl.int32, [2, 4], FLAT)
    facts = gl.allocate_shared_memory(gl.int64, [FACTS], FLAT)
    q_full = mbarrier.allocate_mbarrier(batch=SLOTS)
    q_free = mbarrier.allocate_mbarrier(batch=SLOTS)
    arrived = mbarrier.allocate_mbarrier(batch=2 * CONSUMERS)  # per consumer: of the pre-norm, of the post-norm
    turns = mbarrier.allocate_mbarrier(batch=CONSUMERS)
    kv_full = mbarrier.allocate_mbarrier(batch=2)
    kv_free = mbarrier.allocate_mbarrier(batch=2)
    kv_ready = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
    for i in gl.static_range(2 * CONSUMERS):
        mbarrier.init(arrived.index(i), count=1)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_free.index(i), count=CONSUMERS)
        mbarrier.init(kv_ready.index(i), count=1)
    gl.inline_asm("fence.mbarrier_init.release.cluster;", "~{memory}", [], (), is_pure=False)
    load_vector(vectors.index(0), q_weight_ptr, column - first_place, narrow, 1.0, dtype)
    load_vector(vectors.index(1), q_bias_ptr, column - first_place, narrow, 0.0, dtype)
    load_vector(vectors.index(2), o_weight_ptr, column, narrow, 1.0, dtype)
    load_vector(vectors.index(3), o_bias_ptr, column, narrow, 0.0, dtype)
    total = gl.load(q_offsets_ptr + batch * q_stride)
    share = (total + clusters * ROWS - 1) // (clusters * ROWS) * ROWS
    row = cluster * share
    end = gl.minimum(row + share, total)
    b = find_sequence(q_offsets_ptr, q_stride, batch, row)

    # Rows past the last sequence.
    for first_row in range(total + cluster * ROWS, queries, clusters * ROWS):
        rows = gl.minimum(queries - first_row, ROWS)
        nothing = gl.zeros([ROWS], gl.float32, row_layout())
        clear_rows(out_ptr, first_row, rows, pitch, column)
        if hat_ptr.to(gl.int64) != 0:
            clear_rows(hat_ptr, first_row, rows, pitch, column)
        if (pre != NONE) & q_stores:
            store_statistics(q_mean_ptr, q_rstd_ptr, nothing, nothing, nothing, first_row, rows, q_step, pre)
        if (post != NONE) & (rank == 0):
            store_statistics(o_mean_ptr, o_rstd_ptr, nothing, nothing, nothing, first_row, rows, 1, post)
    form = (pre << PRE_BIT) | (post << POST_BIT) | (residual << RESIDUAL_BIT) | (code << CODE_BIT)
    form |= gl.where(talk, TALK, 0) | gl.where(own, PER_HEAD, 0) | gl.where(inner != 0, INNER, 0)
    form |= gl.where(hat_ptr.to(gl.int64) != 0, KEEP, 0) | gl.where(q_stores, Q_STORES, 0)
    kept = (facts, own_shift(facts), out_ptr, hat_ptr, residual_ptr, r_token, word(pitch), word(column), word(rank),
            word(heads), q_mean_ptr, q_rstd_ptr, o_mean_ptr, o_rstd_ptr, word(q_step), word(form), bits(scale),
            bits(eps), bits(inverse), bits(q_inverse), word(0), q_offsets_ptr, k_offsets_ptr, word(q_stride),
            word(k_stride), word(max_keys), word(row), word(end), word(b))  # fmt: skip
    kinds: gl.constexpr = kept_kinds(27)
    gl.inline_asm(keep_asm, kinds, kept, is_pure=False)
    gl.barrier()
    halves = vectors.reinterpret(gl.float32, [8, CHUNK], FLAT)
    gl.warp_specialize([
        (consumer, (out_desc, hat_desc, q_s, k_s, v_s, notes, messages, halves, facts, q_full, q_free, kv_free, kv_ready,
                    arrived, turns, gl.constexpr(0), ACT, FAST, SLOTS, PEERS)),
        (consumer, (out_desc, hat_desc, q_s, k_s, v_s, notes, messages, halves, facts, q_full, q_free, kv_free, kv_ready,
                    arrived, turns, gl.constexpr(1), ACT, FAST, SLOTS, PEERS)),
        (consumer, (out_desc, hat_desc, q_s, k_s, v_s, notes, messages, halves, facts, q_full, q_free, kv_free, kv_ready,
                    arrived, turns, gl.constexpr(2), ACT, FAST, SLOTS, PEERS)),
        (loader, (q_desc, k_desc, v_desc, q_s, k_s, v_s, notes, facts, q_full, q_free, kv_full, kv_free, kv_ready,
                  SLOTS)),
    ], [4, 4, 4], [160, 160, 32])  # fmt: skip


def variants():
    pointers = ("q_weight", "q_bias", "o_weight", "o_bias", "q_mean", "q_rstd", "o_mean", "o_rstd")
    for dtype in ("bf16", "fp16"):
        args = {f"{n}_desc": Tile(dtype, (128 if n in "kv" else 64, 128)) for n in ("q", "k", "v", "out", "hat")}
        args |= {f"{n}_ptr": f"*{dtype}:16" for n in ("residual", "out", "hat")}
        args |= {f"{n}_offsets_ptr": "*i32" for n in ("q", "k")}
        args |= {f"{n}_ptr": "*fp32" for n in pointers}
        args |= {"r_token": "i64:8", "q_stride": "i32", "k_stride": "i32"}
        args |= {n: "i32" for n in ("batch", "queries", "heads", "max_keys")}
        args |= {"scale": "fp32", "eps": "fp32"}
        args |= {n: "i32" for n in ("pre", "post", "per_head", "inner", "residual", "narrow", "codes")}
        for name, code in (("gelu", 4), ("gelu_tanh", 5)):
            for peers, slots in ((4, 5), (8, 4)):
                constants = {"ACT": code, "PEERS": peers, "SLOTS": slots}
                yield Variant(
                    f"attention_turns_{name}_{dtype}_{peers}", attention_turns_kernel, args | constants, maxnreg=128
                )


VARIANTS = list(variants())
