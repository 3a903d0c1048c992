"""Forward of norm_attention: both norms inside the attention kernel, a head per CTA, a cluster of CTAs per row.

    qn = norm(q over all heads or one)
    o_h = act(scale * qn_h k_h^T) v_h (+ qn_h)
    out = norm(o over all heads) (+ residual)

The cluster of H CTAs walks over blocks of 64 rows of q, none of which crosses a sequence's end; each CTA keeps the keys
and values of its head and the present sequence in shared memory. q is read once: a block stays in shared memory for the
residual, and its place then serves the stores. One warpgroup does everything, and two CTAs share an SM. In each turn it

    finishes block i:      activation, second product, norm, residual, stores
    begins block i + 1:    statistics (under the second product), norm, first product

so that the messages of one block travel under the work on the other. Copies of block i + 2 and of the next sequence's
keys and values run meanwhile. A CTA sends for the first norm of block i + 2 when it has seen all messages for the second
norm of block i, which are sent after those for the first norm of block i + 1 have been read: so one place per norm
suffices for the messages, as long as both are exchanged. A norm that is not asked for, or over one head, is exchanged
too if the other one is.

The cluster's size is set by the launch: to the compiler this is a kernel of single CTAs.
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

from .attention_activations import GENERAL, activate
from .attention_blocks import (
    FLAT,
    KEYS,
    LAYER,
    NONE,
    WIDTH,
    clear_rows,
    clear_values,
    column_layout,
    find_sequence,
    first_values,
    following_sequence,
    keys_of,
    load_other,
    load_tile,
    load_vector,
    store_statistics,
    store_tile,
    widen,
)
from .attention_exchange import MESSAGE, ROWS, collect, meet_cluster, row_layout, send, tile_layout
from .variants import Tile, Variant

OWN, OTHER = gl.constexpr(1), gl.constexpr(2)  # kinds of a residual: q, another tensor


@gluon.constexpr_function
def operand_layout():
    return gl.DotOperandLayout(operand_index=0, parent=tile_layout(), k_width=2)


@gluon.constexpr_function
def half_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])


# ---- norms -----------------------------------------------------------------------------------------------------------


@gluon.jit
def moments(x, kind):
    """Per row: mean (0 for RMS) and sum of squared deviations from it."""
    mean = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, x.type.layout))
    if kind == LAYER:
        mean = gl.sum(x, axis=1) * (1.0 / x.shape[1])
        d = x - mean[:, None]
        square = gl.sum(d * d, axis=1)
    else:
        square = gl.sum(x * x, axis=1)
    return mean, square


@gluon.jit
def half_moments(place, first: gl.constexpr, kind):
    mean, square = moments(widen(place.slice(first, WIDTH // 2, dim=1).load(half_layout())), kind)
    mean = gl.convert_layout(mean, row_layout(), assert_trivial=True)
    return mean, gl.convert_layout(square, row_layout(), assert_trivial=True)


@gluon.jit
def q_moments(place, kind):
    """In two halves, so that few values live beside a product in flight."""
    mean = gl.zeros([ROWS], gl.float32, row_layout())
    square = mean
    if kind != NONE:
        left, square = half_moments(place, 0, kind)
        right, more = half_moments(place, WIDTH // 2, kind)
        mean = 0.5 * (left + right)
        d = left - right
        square += more + d * d * (WIDTH // 4)
    return mean, square


@gluon.jit
def standardise(x, mean, rstd):
    shift = -mean * rstd
    return gl.fma(x, gl.broadcast(rstd[:, None], x)[0], gl.broadcast(shift[:, None], x)[0])


@gluon.jit
def scale_columns(x, weight, bias):
    return x * weight.load(column_layout())[None, :] + bias.load(column_layout())[None, :]


@gluon.jit
def first_column(x):
    cols = gl.arange(0, WIDTH, column_layout())
    return gl.sum(gl.where((cols == 0)[None, :], x, 0.0), axis=1)


@gluon.jit
def q_norm(place, mean, square, mean_ptr, rstd_ptr, vectors, row, rows, step, stores, inverse, eps, kind):
    """A block of q after its norm, whose statistics are stored if `stores`."""
    qn = place.load(tile_layout())
    if kind != NONE:
        rstd = gl.rsqrt(square * inverse + eps)
        if stores:
            store_statistics(mean_ptr, rstd_ptr, mean, rstd, first_values(place), row, rows, step, kind)
        x = standardise(widen(qn), mean, rstd)
        qn = scale_columns(x, vectors.index(0), vectors.index(1)).to(qn.dtype)
    return qn


@gluon.jit
def finish(o, mean, square, place, out_desc, hat_desc, out_ptr, hat_ptr, residual_ptr, mean_ptr, rstd_ptr, vectors, row,
           rows, pitch, column, r_token, inverse, eps, post, residual):  # fmt: skip
    """Norm of o, residual and stores. TMA may still read `place` afterwards."""
    dtype: gl.constexpr = place.dtype
    if post != NONE:
        rstd = gl.rsqrt(square * inverse + eps)
        if column == 0:
            first = gl.zeros([ROWS], gl.float32, row_layout())
            if post == LAYER:
                first = first_column(o)
            store_statistics(mean_ptr, rstd_ptr, mean, rstd, first, row, rows, 1, post)
        o = standardise(o, mean, rstd)
    q = place.load(tile_layout())
    if hat_ptr.to(gl.int64) != 0:
        store_tile(hat_desc, hat_ptr, o.to(dtype), place, row, rows, pitch, column)
    if post != NONE:
        o = scale_columns(o, vectors.index(2), vectors.index(3))
    if residual == OWN:
        o += widen(q)
    elif residual == OTHER:
        o += load_other(residual_ptr, row, rows, r_token, column)
    tma.store_wait(0)
    gl.barrier()
    store_tile(out_desc, out_ptr, o.to(dtype), place, row, rows, pitch, column)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["batch", "queries", "heads", "q_stride", "k_stride", "r_token", "max_keys"])
def attention_forward_kernel(
    q_desc,  # [T, H * 128]
    k_desc,  # [U, H * 128]
    v_desc,
    out_desc,  # [T, H * 128] contiguous
    hat_desc,  # likewise, the post-norm's standardised output, or anything
    residual_ptr,  # [T, H * 128] of row stride r_token, read if residual == OTHER
    out_ptr,
    hat_ptr,  # null: not written
    q_offsets_ptr,  # [B + 1]; of 8-byte integers the lower halves: strides of 2
    k_offsets_ptr,
    q_weight_ptr,  # [H * 128], or [128] per head; null: ones
    q_bias_ptr,  # null: zeros
    o_weight_ptr,
    o_bias_ptr,
    q_mean_ptr,  # [T] fp32, or [T, H] per head
    q_rstd_ptr,
    o_mean_ptr,  # [T] fp32
    o_rstd_ptr,
    r_token,
    q_stride,
    k_stride,
    batch,
    queries,  # T
    heads,
    max_keys,
    scale,
    eps,
    pre,  # kinds of the norms
    post,
    per_head,  # the pre-norm's scope
    inner,  # the inner residual
    residual,  # its kind
    narrow,  # parameters have the type of q
    codes,  # activation codes, 4 bits per head
    ACT: gl.constexpr,  # one code, or GENERAL: as in `codes`
    PEERS: gl.constexpr,  # most CTAs of a cluster
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

    q_s = gl.allocate_shared_memory(dtype, [2, ROWS, WIDTH], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [KEYS, WIDTH], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [KEYS, WIDTH], v_desc.layout)
    messages = gl.allocate_shared_memory(gl.float32, [2, PEERS * MESSAGE], FLAT)
    vectors = gl.allocate_shared_memory(gl.float32, [4, WIDTH], FLAT)
    q_full = mbarrier.allocate_mbarrier(batch=2)
    arrived = mbarrier.allocate_mbarrier(batch=2)  # messages: of the pre-norm, of the post-norm
    k_full = mbarrier.allocate_mbarrier()
    v_full = mbarrier.allocate_mbarrier()
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(arrived.index(i), count=1)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    load_vector(vectors.index(0), q_weight_ptr, column - first_place, narrow, 1.0, dtype)
    load_vector(vectors.index(1), q_bias_ptr, column - first_place, narrow, 0.0, dtype)
    load_vector(vectors.index(2), o_weight_ptr, column, narrow, 1.0, dtype)
    load_vector(vectors.index(3), o_bias_ptr, column, narrow, 0.0, dtype)
    total = gl.load(q_offsets_ptr + batch * q_stride)
    share = (total + clusters * ROWS - 1) // (clusters * ROWS) * ROWS
    row = cluster * share
    end = gl.minimum(row + share, total)
    b = find_sequence(q_offsets_ptr, q_stride, batch, row)
    sequence_end = gl.load(q_offsets_ptr + (b + 1) * q_stride)
    k_first, keys = keys_of(k_offsets_ptr, k_stride, b, max_keys)
    meet_cluster()

    fresh = 1  # the first block of a sequence
    count = 0  # blocks
    sequences = 0
    qn = gl.zeros([ROWS, WIDTH], dtype, tile_layout())
    s = gl.zeros([ROWS, WIDTH], gl.float32, tile_layout())
    zeros = gl.zeros([ROWS, WIDTH], gl.float32, tile_layout())
    if row < end:
        load_tile(q_desc, q_s.index(0), q_full.index(0), row, column)
        load_tile(k_desc, k_s, k_full, k_first, column)
        load_tile(v_desc, v_s, v_full, k_first, column)
        rows = gl.minimum(gl.minimum(sequence_end, end) - row, ROWS)
        if row + rows < end:
            load_tile(q_desc, q_s.index(1), q_full.index(1), row + rows, column)
        mbarrier.wait(q_full.index(0), 0)
        mean, square = q_moments(q_s.index(0), pre)
        if talk:
            send(messages.index(0), arrived.index(0), rank, heads, mean, square)
            all_mean, all_square = collect(messages.index(0), arrived.index(0), 0, heads, PEERS)
            if per_head == 0:
                mean = all_mean
                square = all_square
            meet_cluster()  # all have read their messages, whose places the next ones take
        qn = q_norm(q_s.index(0), mean, square, q_mean_ptr, q_rstd_ptr, vectors, row, rows, q_step, q_stores,
                    q_inverse, eps, pre)  # fmt: skip
        mbarrier.wait(k_full, 0)
        s = warpgroup_mma(gl.convert_layout(qn, operand_layout()), k_s.permute((1, 0)), zeros, use_acc=False)

    while row < end:
        rows = gl.minimum(gl.minimum(sequence_end, end) - row, ROWS)
        following = row + rows
        slot = count & 1
        present_keys = keys
        turn = (following == sequence_end) & (following < end)
        if turn:
            b, sequence_end = following_sequence(q_offsets_ptr, q_stride, b, following)
            k_first, keys = keys_of(k_offsets_ptr, k_stride, b, max_keys)
            gl.barrier()
            load_tile(k_desc, k_s, k_full, k_first, column)
        next_rows = gl.maximum(gl.minimum(gl.minimum(sequence_end, end) - following, ROWS), 0)

        # The second product of this block.
        p = activate(s, scale, code, ACT, FAST)
        if present_keys < KEYS:
            key = gl.arange(0, KEYS, column_layout())
            p = gl.where((key < present_keys)[None, :], p, 0.0)
        operand = gl.convert_layout(p.to(dtype), operand_layout())
        mbarrier.wait(v_full, sequences & 1)
        if (fresh != 0) & (present_keys < KEYS):
            clear_values(v_s, present_keys)
        o = warpgroup_mma(operand, v_s, zeros, use_acc=False, is_async=True)

        # Meanwhile the statistics of the next block; after the last one those of what lies there, for nothing.
        mbarrier.wait(q_full.index(slot ^ 1), ((count + 1) >> 1) & 1, pred=following < end)
        mean, square = q_moments(q_s.index(slot ^ 1), pre)
        if talk:
            send(messages.index(0), arrived.index(0), rank, heads, mean, square)
        o, operand = warpgroup_mma_wait(0, deps=(o, operand))
        fresh = 0
        if turn:
            fence_async_shared()
            gl.barrier()
            load_tile(v_desc, v_s, v_full, k_first, column)
            sequences += 1
            fresh = 1
        if inner != 0:
            o += widen(qn)
        o_mean, o_square = moments(o, post)
        if talk:
            all_mean, all_square = collect(messages.index(0), arrived.index(0), (count + 1) & 1, heads, PEERS)
            if per_head == 0:
                mean = all_mean
                square = all_square
            send(messages.index(1), arrived.index(1), rank, heads, o_mean, o_square)
        qn = q_norm(q_s.index(slot ^ 1), mean, square, q_mean_ptr, q_rstd_ptr, vectors, following, next_rows,
                    q_step, q_stores, q_inverse, eps, pre)  # fmt: skip
        if talk:
            o_mean, o_square = collect(messages.index(1), arrived.index(1), count & 1, heads, PEERS)
        finish(o, o_mean, o_square, q_s.index(slot), out_desc, hat_desc, out_ptr, hat_ptr, residual_ptr, o_mean_ptr,
               o_rstd_ptr, vectors, row, rows, pitch, column, r_token, inverse, eps, post, residual)  # fmt: skip
        mbarrier.wait(k_full, sequences & 1)
        s = warpgroup_mma(gl.convert_layout(qn, operand_layout()), k_s.permute((1, 0)), zeros, use_acc=False)
        if following + next_rows < end:
            tma.store_wait(0)
            fence_async_shared()
            gl.barrier()
            load_tile(q_desc, q_s.index(slot), q_full.index(slot), following + next_rows, column)
        row = following
        count += 1
    tma.store_wait(0)

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
    meet_cluster()  # nobody ends while others may write into its memory


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
        for name, code in (("gelu", 4), ("gelu_tanh", 5), ("general", GENERAL.value)):
            for peers in (4, 8):
                constants = {"ACT": code, "PEERS": peers}
                yield Variant(
                    f"attention_{name}_{dtype}_{peers}", attention_forward_kernel, args | constants, maxnreg=255
                )


VARIANTS = list(variants())
