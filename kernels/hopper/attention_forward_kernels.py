"""Forward of norm_attention: both norms inside the attention kernel, a head per CTA, a cluster of CTAs per row.

    qn = norm(q over all heads or one)
    o_h = act(scale * qn_h k_h^T) v_h (+ qn_h)
    out = norm(o over all heads) (+ residual)

The cluster of H CTAs walks over blocks of 64 rows of q, none of which crosses a sequence's end; each CTA keeps the keys
and values of its head and the present sequence in shared memory. q is read once: the block stays in shared memory for
the residual, and its place then serves to bring the results into rows for the stores. One warpgroup does everything,
two CTAs share an SM and fill each other's gaps; copies of the next block and the next sequence run meanwhile.

Each CTA sends (mean, sum of squared deviations) of its part of a row to all CTAs of the cluster, itself included, and
merges what it gets by Chan's formula. Two message slots suffice: a CTA sends for exchange i + 2 when it has seen all
messages of i + 1, and those were sent after i was read.

The cluster's size is set by the launch, not by the compiler: to it this is a kernel of single CTAs. All of a thread's
values lie as in an accumulator: columns 2 (lane % 4) + {0, 1} + 8 j of rows lane / 4 and lane / 4 + 8.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from .attention_activations import GENERAL, activate
from .variants import Tile, Variant

ROWS = gl.constexpr(64)  # of a block
WIDTH = gl.constexpr(128)  # of a head
KEYS = gl.constexpr(128)  # most keys of a sequence
PEERS = gl.constexpr(8)  # most CTAs of a cluster
MESSAGE = gl.constexpr(128)  # fp32 values of a message: mean and squares of 64 rows
NONE, RMS, LAYER = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # kinds of a norm
OWN, OTHER = gl.constexpr(1), gl.constexpr(2)  # kinds of a residual: q, another tensor
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def tile_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])


@gluon.constexpr_function
def operand_layout():
    return gl.DotOperandLayout(operand_index=0, parent=tile_layout(), k_width=2)


@gluon.constexpr_function
def row_layout():
    return gl.SliceLayout(1, tile_layout())


@gluon.constexpr_function
def column_layout():
    return gl.SliceLayout(0, tile_layout())


@gluon.constexpr_function
def memory_layout():
    """For stores: 16 lanes cover a row with 16 bytes each."""
    return gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])


# ---- the cluster -----------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _send(outputs, inputs):
    """Lane l of a quad, whose lanes hold the same two rows, sends to CTAs l and l + 4."""
    (buffer,), (barrier,), (rank,), (heads,), mean, square = inputs
    values = f"{{{mean[0]}, {square[0]}, {mean[1]}, {square[1]}}}"
    send = f"""setp.lt.u32 p, peer, {heads};
    @p mapa.shared::cluster.u32 to, at, peer;
    @p mapa.shared::cluster.u32 done, {barrier}, peer;
    @p st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {values}, [done];
    """
    return f"""{{ .reg .pred p; .reg .b32 t, peer, at, to, done;
    mov.u32 t, %tid.x;
    shl.b32 at, {heads}, 9;
    setp.eq.u32 p, t, 0;
    @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], at;
    shr.u32 at, t, 2; shl.b32 at, at, 4; add.u32 at, at, {buffer};
    shl.b32 peer, {rank}, 9; add.u32 at, at, peer;
    and.b32 peer, t, 3;
    {send} add.u32 peer, peer, 4;
    {send} }}"""


@gluon.constexpr_function
def _await(outputs, inputs):
    (bar,), (phase,) = inputs
    return f"""{{ .reg .pred p;
    again: mbarrier.try_wait.parity.shared::cta.b64 p, [{bar}], {phase};
    @!p bra again; }}"""


@gluon.constexpr_function
def _merge(outputs, inputs):
    """Chan's formula over the heads, which have equal widths: mean of means, squares + WIDTH * deviations of means."""
    (mean, square), ((buffer,), (heads,), (inverse,)) = outputs, inputs
    names = [[f"v{j}{i}" for i in range(4)] for j in range(8)]
    lines = [f"{{ .reg .pred p<8>; .reg .b32 at; .reg .f32 d, e, {', '.join(n for four in names for n in four)};"]
    lines.append(f"mov.u32 at, %tid.x; shr.u32 at, at, 2; shl.b32 at, at, 4; add.u32 at, at, {buffer};")
    for j, four in enumerate(names):
        lines.append(f"setp.gt.u32 p{j}, {heads}, {j};")
        lines += [f"mov.f32 {n}, 0f00000000;" for n in four]
        lines.append(f"@p{j} ld.shared.v4.f32 {{{', '.join(four)}}}, [at + {512 * j}];")
    for i in range(2):
        lines.append(f"add.f32 {mean[i]}, {names[0][2 * i]}, {names[1][2 * i]};")
        lines.append(f"add.f32 {square[i]}, {names[0][2 * i + 1]}, {names[1][2 * i + 1]};")
        for four in names[2:]:
            lines.append(f"add.f32 {mean[i]}, {mean[i]}, {four[2 * i]};")
            lines.append(f"add.f32 {square[i]}, {square[i]}, {four[2 * i + 1]};")
        lines.append(f"mul.f32 {mean[i]}, {mean[i]}, {inverse}; mov.f32 e, 0f00000000;")
        for j, four in enumerate(names):
            lines.append(f"sub.f32 d, {four[2 * i]}, {mean[i]}; @p{j} fma.rn.f32 e, d, d, e;")
        lines.append(f"fma.rn.f32 {square[i]}, e, 0f43000000, {square[i]};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _own(outputs, inputs):
    return (
        f"{{ .reg .b32 r; mov.u32 r, %cluster_ctarank; mapa.shared::cluster.u32 {outputs[0][0]}, {inputs[0][0]}, r; }}"
    )


@gluon.jit
def own_address(place):
    """Inline assembly gets addresses of shared memory as those of the cluster's first CTA."""
    return gl.inline_asm(_own, "=r,r", [place], gl.int32, is_pure=False)


@gluon.jit
def await_phase(bar, phase):
    gl.inline_asm(_await, "r,r,~{memory}", [bar, phase], (), is_pure=False)


@gluon.jit
def meet_cluster():
    """Barriers are initialised, or: nobody writes into a CTA that has ended."""
    gl.inline_asm(
        "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.release.aligned; "
        "barrier.cluster.wait.acquire.aligned;",
        "~{memory}",
        [],
        (),
        is_pure=False,
    )


@gluon.jit
def exchange(mean, square, messages, arrived, count, rank, heads):
    """(mean, sum of squared deviations) of whole rows, from those of each CTA's part."""
    slot = count & 1
    buffer = own_address(messages.index(slot))
    bar = own_address(arrived.index(slot))
    kind: gl.constexpr = mean.type
    gl.inline_asm(_send, "r,r,r,r,f,f,f,f,~{memory}", [buffer, bar, rank, heads, mean, square], (), is_pure=False)
    await_phase(bar, (count >> 1) & 1)
    inverse = 1.0 / heads.to(gl.float32)
    return gl.inline_asm(
        _merge, "=&f,=&f,=&f,=&f,r,r,f,~{memory}", [buffer, heads, inverse], (kind, kind), is_pure=False
    )


# ---- norms -----------------------------------------------------------------------------------------------------------


@gluon.jit
def widen(x):
    """16-bit values in fp32; a pair of bf16 takes one shift and one mask."""
    if x.dtype == gl.bfloat16:
        asm: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        bits = gl.inline_asm_elementwise(asm, "=r,=r,r", [x], dtype=gl.int32, is_pure=True, pack=2)
        return bits.to(gl.float32, bitcast=True)
    else:
        return x.to(gl.float32)


@gluon.jit
def moments(x, kind):
    """Per row: mean (0 for RMS) and sum of squared deviations from it."""
    mean = gl.zeros([ROWS], gl.float32, row_layout())
    if kind == LAYER:
        mean = gl.sum(x, axis=1) * (1.0 / WIDTH)
        d = x - mean[:, None]
        square = gl.sum(d * d, axis=1)
    else:
        square = gl.sum(x * x, axis=1)
    return mean, square


@gluon.jit
def standardise(x, mean, rstd):
    scale, shift = gl.broadcast(rstd[:, None], x)[0], gl.broadcast((-mean * rstd)[:, None], x)[0]
    return gl.fma(x, scale, shift)


@gluon.jit
def scale_columns(x, weight, bias):
    return x * weight.load(column_layout())[None, :] + bias.load(column_layout())[None, :]


@gluon.jit
def load_vector(target, ptr, first, narrow, default: gl.constexpr, dtype: gl.constexpr):
    """A head's part of gamma or beta as fp32 in shared memory."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    cols = first + gl.arange(0, WIDTH, L)
    value = gl.full([WIDTH], default, gl.float32, L)
    if ptr.to(gl.int64) != 0:
        if narrow:
            value = gl.load(ptr.to(gl.pointer_type(dtype), bitcast=True) + cols).to(gl.float32)
        else:
            value = gl.load(ptr + cols)
    target.store(value)


# ---- memory ----------------------------------------------------------------------------------------------------------


@gluon.jit
def find_sequence(offsets_ptr, stride, batch, row):
    """The sequence that holds a row."""
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    found = 0
    for first in range(0, batch, 512):
        b = first + gl.arange(0, 512, L)
        ends = gl.load(offsets_ptr + (b + 1) * stride, mask=b < batch, other=2147483647)
        found += gl.sum((ends <= row).to(gl.int32), axis=0)
    return gl.minimum(found, batch - 1)


@gluon.jit
def load_keys(k_desc, v_desc, k_s, v_s, ready, row, column):
    mbarrier.expect(ready, k_desc.nbytes_per_cta + v_desc.nbytes_per_cta)
    tma.async_load(k_desc, [row, column], ready, k_s)
    tma.async_load(v_desc, [row, column], ready, v_s)


@gluon.jit
def clear_values(v_s, keys):
    """Zeros for values past the last key: what lies there is not ours, and 0 * NaN is NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    for i in gl.static_range(4):
        part = v_s.slice(32 * i, 32, dim=0)
        key = 32 * i + gl.arange(0, 32, gl.SliceLayout(1, L))
        value = part.load(L)
        part.store(gl.where((key < keys)[:, None], value, gl.zeros_like(value)))
    fence_async_shared()
    gl.barrier()


@gluon.jit
def store_rows(ptr, tile, place, row, rows, pitch, column):
    """A tile to `rows` rows of memory, by way of its place in shared memory."""
    L: gl.constexpr = memory_layout()
    place.store(tile)
    i = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    cols = column + gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    at = (row + i).to(gl.int64) * pitch
    mask = (i < rows)[:, None] & (cols >= 0)[None, :]
    gl.store(ptr + at[:, None] + cols[None, :], place.load(L), mask=mask)


@gluon.jit
def clear_rows(ptr, row, rows, pitch, column):
    L: gl.constexpr = memory_layout()
    i = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    cols = column + gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    at = (row + i).to(gl.int64) * pitch
    mask = (i < rows)[:, None] & (cols >= 0)[None, :]
    gl.store(ptr + at[:, None] + cols[None, :], gl.zeros([ROWS, WIDTH], ptr.dtype.element_ty, L), mask=mask)


@gluon.jit
def load_other(ptr, row, rows, token, column):
    """A residual that is not q."""
    i = gl.arange(0, ROWS, row_layout())
    cols = column + gl.arange(0, WIDTH, column_layout())
    at = (row + i).to(gl.int64) * token
    mask = (i < rows)[:, None] & (cols >= 0)[None, :]
    return gl.load(ptr + at[:, None] + cols[None, :], mask=mask, other=0.0)


@gluon.jit
def first_values(ptr, row, rows, token):
    i = gl.arange(0, ROWS, row_layout())
    return gl.load(ptr + (row + i).to(gl.int64) * token, mask=i < rows, other=0.0).to(gl.float32)


@gluon.jit
def store_statistics(mean_ptr, rstd_ptr, mean, rstd, first, row, rows, step, kind):
    """`step` values per row; the mean relative to the row's first element."""
    i = gl.arange(0, ROWS, row_layout())
    at = (row + i).to(gl.int64) * step
    gl.store(rstd_ptr + at, rstd, mask=i < rows)
    if kind == LAYER:
        gl.store(mean_ptr + at, mean - first, mask=i < rows)


@gluon.jit(do_not_specialize=["batch", "queries", "heads", "q_stride", "k_stride", "r_token", "max_keys"])
def attention_forward_kernel(
    q_desc,  # [T, H * 128]
    k_desc,  # [U, H * 128]
    v_desc,
    q_ptr,
    residual_ptr,  # [T, H, 128] of row stride r_token, read if residual == OTHER
    out_ptr,  # [T, H * 128] contiguous
    hat_ptr,  # likewise, the post-norm's standardised output, or null
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
    q_token,  # row stride of q
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
):
    dtype: gl.constexpr = q_desc.dtype
    FAST: gl.constexpr = dtype == gl.bfloat16
    cluster = gl.program_id(0) // heads
    rank = gl.program_id(0) - cluster * heads
    clusters = gl.num_programs(0) // heads
    pitch = heads * WIDTH
    column = rank * WIDTH
    code = (codes >> (4 * rank)) & 15

    q_s = gl.allocate_shared_memory(dtype, [2, ROWS, WIDTH], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [KEYS, WIDTH], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [KEYS, WIDTH], v_desc.layout)
    messages = gl.allocate_shared_memory(gl.float32, [2, PEERS * MESSAGE], FLAT)
    vectors = gl.allocate_shared_memory(gl.float32, [4, WIDTH], FLAT)
    q_full = mbarrier.allocate_mbarrier(batch=2)
    arrived = mbarrier.allocate_mbarrier(batch=2)
    ready = mbarrier.allocate_mbarrier()
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(arrived.index(i), count=1)
    mbarrier.init(ready, count=1)
    q_column = gl.where(per_head != 0, 0, column)
    load_vector(vectors.index(0), q_weight_ptr, q_column, narrow, 1.0, dtype)
    load_vector(vectors.index(1), q_bias_ptr, q_column, narrow, 0.0, dtype)
    load_vector(vectors.index(2), o_weight_ptr, column, narrow, 1.0, dtype)
    load_vector(vectors.index(3), o_bias_ptr, column, narrow, 0.0, dtype)
    total = gl.load(q_offsets_ptr + batch * q_stride)
    share = (total + clusters * ROWS - 1) // (clusters * ROWS) * ROWS
    row = cluster * share
    end = gl.minimum(row + share, total)
    b = find_sequence(q_offsets_ptr, q_stride, batch, row)
    sequence_end = gl.load(q_offsets_ptr + (b + 1) * q_stride)
    k_first = gl.load(k_offsets_ptr + b * k_stride)
    keys = gl.minimum(gl.load(k_offsets_ptr + (b + 1) * k_stride) - k_first, max_keys)
    meet_cluster()

    fresh = 1
    count = 0  # blocks
    sequences = 0
    exchanges = 0
    if row < end:
        load_keys(k_desc, v_desc, k_s, v_s, ready, k_first, column)
        mbarrier.expect(q_full.index(0), q_desc.nbytes_per_cta)
        tma.async_load(q_desc, [row, column], q_full.index(0), q_s.index(0))
    while row < end:
        rows = gl.minimum(gl.minimum(sequence_end, end) - row, ROWS)
        following = row + rows
        slot = count & 1
        place = q_s.index(slot)
        if following < end:
            fence_async_shared()
            gl.barrier()
            mbarrier.expect(q_full.index(slot ^ 1), q_desc.nbytes_per_cta)
            tma.async_load(q_desc, [following, column], q_full.index(slot ^ 1), q_s.index(slot ^ 1))
        first = gl.zeros([ROWS], gl.float32, row_layout())
        if pre == LAYER:
            first = first_values(q_ptr + gl.where(per_head != 0, column, 0), row, rows, q_token)

        # The norm of q.
        mbarrier.wait(q_full.index(slot), (count >> 1) & 1)
        qn = place.load(tile_layout())
        if pre != NONE:
            x = widen(qn)
            mean, square = moments(x, pre)
            members = 1
            if (per_head == 0) & (heads > 1):
                mean, square = exchange(mean, square, messages, arrived, exchanges, rank, heads)
                exchanges += 1
            if per_head == 0:
                members = heads
            rstd = gl.rsqrt(square * (1.0 / (members * WIDTH).to(gl.float32)) + eps)
            if per_head != 0:
                store_statistics(q_mean_ptr + rank, q_rstd_ptr + rank, mean, rstd, first, row, rows, heads, pre)
            elif rank == 0:
                store_statistics(q_mean_ptr, q_rstd_ptr, mean, rstd, first, row, rows, 1, pre)
            x = standardise(x, mean, rstd)
            qn = scale_columns(x, vectors.index(0), vectors.index(1)).to(dtype)

        # The two products.
        mbarrier.wait(ready, sequences & 1)
        if (fresh != 0) & (keys < KEYS):
            clear_values(v_s, keys)
        zeros = gl.zeros([ROWS, WIDTH], gl.float32, tile_layout())
        s = warpgroup_mma(gl.convert_layout(qn, operand_layout()), k_s.permute((1, 0)), zeros, use_acc=False)
        p = activate(s, scale, code, ACT, FAST)
        if keys < KEYS:
            key = gl.arange(0, KEYS, column_layout())
            p = gl.where((key < keys)[None, :], p, 0.0)
        o = warpgroup_mma(gl.convert_layout(p.to(dtype), operand_layout()), v_s, zeros, use_acc=False)

        # The next sequence's keys come while this block is finished.
        fresh = 0
        if (following == sequence_end) & (following < end):
            b += 1
            sequence_end = gl.load(q_offsets_ptr + (b + 1) * q_stride)
            while sequence_end <= following:
                b += 1
                sequence_end = gl.load(q_offsets_ptr + (b + 1) * q_stride)
            k_first = gl.load(k_offsets_ptr + b * k_stride)
            keys = gl.minimum(gl.load(k_offsets_ptr + (b + 1) * k_stride) - k_first, max_keys)
            fence_async_shared()
            gl.barrier()
            load_keys(k_desc, v_desc, k_s, v_s, ready, k_first, column)
            sequences += 1
            fresh = 1

        # The norm of o, and what is added.
        if inner != 0:
            o += widen(qn)
        if post != NONE:
            mean, square = moments(o, post)
            if heads > 1:
                mean, square = exchange(mean, square, messages, arrived, exchanges, rank, heads)
                exchanges += 1
            rstd = gl.rsqrt(square * (1.0 / pitch.to(gl.float32)) + eps)
            if rank == 0:
                origin = gl.zeros([ROWS], gl.float32, row_layout())
                store_statistics(o_mean_ptr, o_rstd_ptr, mean, rstd, origin, row, rows, 1, RMS)
            o = standardise(o, mean, rstd)
        raw = place.load(tile_layout())
        if hat_ptr.to(gl.int64) != 0:
            store_rows(hat_ptr, o.to(dtype), place, row, rows, pitch, column)
        if post != NONE:
            o = scale_columns(o, vectors.index(2), vectors.index(3))
        if residual == OWN:
            o += widen(raw)
        elif residual == OTHER:
            o += load_other(residual_ptr, row, rows, r_token, column).to(gl.float32)
        store_rows(out_ptr, o.to(dtype), place, row, rows, pitch, column)
        row = following
        count += 1

    # Rows past the last sequence.
    for first_row in range(total + cluster * ROWS, queries, clusters * ROWS):
        rows = gl.minimum(queries - first_row, ROWS)
        clear_rows(out_ptr, first_row, rows, pitch, column)
        if hat_ptr.to(gl.int64) != 0:
            clear_rows(hat_ptr, first_row, rows, pitch, column)
        nothing = gl.zeros([ROWS], gl.float32, row_layout())
        if pre != NONE:
            if per_head != 0:
                store_statistics(
                    q_mean_ptr + rank, q_rstd_ptr + rank, nothing, nothing, nothing, first_row, rows, heads, pre
                )
            elif rank == 0:
                store_statistics(q_mean_ptr, q_rstd_ptr, nothing, nothing, nothing, first_row, rows, 1, pre)
        if (post != NONE) & (rank == 0):
            store_statistics(o_mean_ptr, o_rstd_ptr, nothing, nothing, nothing, first_row, rows, 1, post)
    meet_cluster()


def variants():
    for dtype in ("bf16", "fp16"):
        for name, code in (("gelu", 4), ("gelu_tanh", 5), ("general", GENERAL.value)):
            args = {
                "q_desc": Tile(dtype, (64, 128)),
                "k_desc": Tile(dtype, (128, 128)),
                "v_desc": Tile(dtype, (128, 128)),
            }
            args |= {n: f"*{dtype}:16" for n in ("q_ptr", "residual_ptr", "out_ptr", "hat_ptr")}
            args |= {n: "*i32" for n in ("q_offsets_ptr", "k_offsets_ptr")}
            args |= {n: "*fp32" for n in ("q_weight_ptr", "q_bias_ptr", "o_weight_ptr", "o_bias_ptr")}
            args |= {n: "*fp32" for n in ("q_mean_ptr", "q_rstd_ptr", "o_mean_ptr", "o_rstd_ptr")}
            args |= {"q_token": "i64:8", "r_token": "i64:8", "q_stride": "i32", "k_stride": "i32"}
            args |= {n: "i32" for n in ("batch", "queries", "heads", "max_keys")}
            args |= {"scale": "fp32", "eps": "fp32"}
            args |= {n: "i32" for n in ("pre", "post", "per_head", "inner", "residual", "narrow", "codes")}
            yield Variant(
                f"attention_forward_{name}_{dtype}", attention_forward_kernel, args | {"ACT": code}, maxnreg=255
            )


VARIANTS = list(variants())
