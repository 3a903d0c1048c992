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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .attention_activations import GENERAL, activate
from .variants import Tile, Variant

ROWS = gl.constexpr(64)  # of a block
WIDTH = gl.constexpr(128)  # of a head
KEYS = gl.constexpr(128)  # most keys of a sequence
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
def _merge_of(peers, outputs, inputs):
    """Chan's formula over the heads, which have equal widths: mean of means, squares + WIDTH * deviations of means."""
    (mean, square), ((buffer,), (heads,), (inverse,)) = outputs, inputs
    names = [[f"v{j}{i}" for i in range(4)] for j in range(peers)]
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
def _merge4(outputs, inputs):
    return _merge_of(4, outputs, inputs)


@gluon.constexpr_function
def _merge8(outputs, inputs):
    return _merge_of(8, outputs, inputs)


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
def send(buffer, bar, rank, heads, mean, square):
    args = [own_address(buffer), own_address(bar), rank, heads, mean, square]
    gl.inline_asm(_send, "r,r,r,r,f,f,f,f,~{memory}", args, (), is_pure=False)


@gluon.jit
def collect(buffer, bar, phase, heads, PEERS: gl.constexpr):
    """(mean, sum of squared deviations) of whole rows, from those of each CTA's part."""
    kind: gl.constexpr = gl.distributed_type(gl.float32, [ROWS], row_layout())
    await_phase(own_address(bar), phase)
    inverse = 1.0 / heads.to(gl.float32)
    merge: gl.constexpr = _merge4 if PEERS == 4 else _merge8
    return gl.inline_asm(
        merge, "=&f,=&f,=&f,=&f,r,r,f,~{memory}", [own_address(buffer), heads, inverse], (kind, kind), is_pure=False
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
def first_column(x):
    cols = gl.arange(0, WIDTH, column_layout())
    return gl.sum(gl.where((cols == 0)[None, :], x, 0.0), axis=1)


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
def put_rows(desc, ptr, tile, place, row, rows, pitch, column, BULK: gl.constexpr):
    """A tile to memory: a whole one by TMA, which reads `place` until tma.store_wait(0)."""
    if BULK:
        if rows == ROWS:
            place.store(tile)
            fence_async_shared()
            gl.barrier()
            tma.async_store(desc, [row, column], place)
        else:
            store_rows(ptr, tile, place, row, rows, pitch, column)
    else:
        store_rows(ptr, tile, place, row, rows, pitch, column)


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
def first_values(ptr, row, rows, token, kind, per_head, column):
    """What the means of a layer norm are relative to."""
    first = gl.zeros([ROWS], gl.float32, row_layout())
    if kind == LAYER:
        i = gl.arange(0, ROWS, row_layout())
        at = (row + i).to(gl.int64) * token + gl.where(per_head != 0, column, 0)
        first = gl.load(ptr + at, mask=i < rows, other=0.0).to(gl.float32)
    return first


@gluon.jit
def load_tile(desc, place, ready, row, column):
    mbarrier.expect(ready, desc.nbytes_per_cta)
    tma.async_load(desc, [row, column], ready, place)


@gluon.constexpr_function
def half_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])


@gluon.jit
def half_moments(place, first: gl.constexpr, kind):
    """Of 64 of the columns."""
    L: gl.constexpr = gl.SliceLayout(1, half_layout())
    x = widen(place.slice(first, WIDTH // 2, dim=1).load(half_layout()))
    mean = gl.zeros([ROWS], gl.float32, L)
    if kind == LAYER:
        mean = gl.sum(x, axis=1) * (2.0 / WIDTH)
        d = x - mean[:, None]
        square = gl.sum(d * d, axis=1)
    else:
        square = gl.sum(x * x, axis=1)
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
def q_norm(place, mean, square, first, mean_ptr, rstd_ptr, vectors, row, rows, rank, heads, kind, per_head, eps):
    """A block of q after its norm, whose statistics are stored."""
    qn = place.load(tile_layout())
    if kind != NONE:
        members = gl.where(per_head != 0, 1, heads)
        rstd = gl.rsqrt(square * (1.0 / (members * WIDTH).to(gl.float32)) + eps)
        if per_head != 0:
            store_statistics(mean_ptr + rank, rstd_ptr + rank, mean, rstd, first, row, rows, heads, kind)
        elif rank == 0:
            store_statistics(mean_ptr, rstd_ptr, mean, rstd, first, row, rows, 1, kind)
        x = standardise(widen(qn), mean, rstd)
        qn = scale_columns(x, vectors.index(0), vectors.index(1)).to(qn.dtype)
    return qn


@gluon.jit
def store_statistics(mean_ptr, rstd_ptr, mean, rstd, first, row, rows, step, kind):
    """`step` values per row; the mean relative to the row's first element."""
    i = gl.arange(0, ROWS, row_layout())
    at = (row + i).to(gl.int64) * step
    gl.store(rstd_ptr + at, rstd, mask=i < rows)
    if kind == LAYER:
        gl.store(mean_ptr + at, mean - first, mask=i < rows)


@gluon.jit(do_not_specialize=["batch", "queries", "heads", "q_stride", "k_stride", "r_token", "max_keys"])
def attention_pipelined_kernel(
    q_desc,  # [T, H * 128]
    k_desc,  # [U, H * 128]
    v_desc,
    out_desc,
    hat_desc,
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
    BULK: gl.constexpr,
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

    q_s = gl.allocate_shared_memory(dtype, [2, ROWS, WIDTH], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [KEYS, WIDTH], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [KEYS, WIDTH], v_desc.layout)
    messages = gl.allocate_shared_memory(gl.float32, [2, PEERS * MESSAGE], FLAT)
    vectors = gl.allocate_shared_memory(gl.float32, [4, WIDTH], FLAT)
    q_full = mbarrier.allocate_mbarrier(batch=2)
    arrived = mbarrier.allocate_mbarrier(batch=2)
    k_ready = mbarrier.allocate_mbarrier()
    v_ready = mbarrier.allocate_mbarrier()
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(arrived.index(i), count=1)
    mbarrier.init(k_ready, count=1)
    mbarrier.init(v_ready, count=1)
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
    talk = (((pre != NONE) & (per_head == 0)) | (post != NONE)) & (heads > 1)
    qn = gl.zeros([ROWS, WIDTH], dtype, tile_layout())
    s = gl.zeros([ROWS, WIDTH], gl.float32, tile_layout())
    zeros = gl.zeros([ROWS, WIDTH], gl.float32, tile_layout())
    if row < end:
        mbarrier.expect(q_full.index(0), q_desc.nbytes_per_cta)
        tma.async_load(q_desc, [row, column], q_full.index(0), q_s.index(0))
        load_tile(k_desc, k_s, k_ready, k_first, column)
        load_tile(v_desc, v_s, v_ready, k_first, column)
        rows = gl.minimum(gl.minimum(sequence_end, end) - row, ROWS)
        if row + rows < end:
            mbarrier.expect(q_full.index(1), q_desc.nbytes_per_cta)
            tma.async_load(q_desc, [row + rows, column], q_full.index(1), q_s.index(1))
        first = first_values(q_ptr, row, rows, q_token, pre, per_head, column)
        mbarrier.wait(q_full.index(0), 0)
        mean, square = q_moments(q_s.index(0), pre)
        if talk:
            send(messages.index(0), arrived.index(0), rank, heads, mean, square)
            if per_head == 0:
                mean, square = collect(messages.index(0), arrived.index(0), 0, heads, PEERS)
            else:
                await_phase(own_address(arrived.index(0)), 0)
            meet_cluster()  # the next message to the same place waits until all have read this one
        qn = q_norm(
            q_s.index(0),
            mean,
            square,
            first,
            q_mean_ptr,
            q_rstd_ptr,
            vectors,
            row,
            rows,
            rank,
            heads,
            pre,
            per_head,
            eps,
        )
        mbarrier.wait(k_ready, 0)
        s = warpgroup_mma(gl.convert_layout(qn, operand_layout()), k_s.permute((1, 0)), zeros, use_acc=False)
    while row < end:
        rows = gl.minimum(gl.minimum(sequence_end, end) - row, ROWS)
        following = row + rows
        slot = count & 1
        place = q_s.index(slot)
        next_place = q_s.index(slot ^ 1)
        more = following < end
        old_keys = keys
        turn = (following == sequence_end) & more
        if turn:
            b += 1
            sequence_end = gl.load(q_offsets_ptr + (b + 1) * q_stride)
            while sequence_end <= following:
                b += 1
                sequence_end = gl.load(q_offsets_ptr + (b + 1) * q_stride)
            k_first = gl.load(k_offsets_ptr + b * k_stride)
            keys = gl.minimum(gl.load(k_offsets_ptr + (b + 1) * k_stride) - k_first, max_keys)
            gl.barrier()
            load_tile(k_desc, k_s, k_ready, k_first, column)
        next_rows = gl.maximum(gl.minimum(gl.minimum(sequence_end, end) - following, ROWS), 0)
        first = first_values(q_ptr, following, next_rows, q_token, pre, per_head, column)

        # The second product of this block.
        p = activate(s, scale, code, ACT, FAST)
        if old_keys < KEYS:
            key = gl.arange(0, KEYS, column_layout())
            p = gl.where((key < old_keys)[None, :], p, 0.0)
        operand = gl.convert_layout(p.to(dtype), operand_layout())
        mbarrier.wait(v_ready, sequences & 1)
        if (fresh != 0) & (old_keys < KEYS):
            clear_values(v_s, old_keys)
        o = warpgroup_mma(operand, v_s, zeros, use_acc=False, is_async=True)

        # Meanwhile the statistics of the next block.
        mbarrier.wait(q_full.index(slot ^ 1), ((count + 1) >> 1) & 1, pred=more)
        mean, square = q_moments(next_place, pre)
        if talk:
            send(messages.index(0), arrived.index(0), rank, heads, mean, square)
        o, operand = warpgroup_mma_wait(0, deps=(o, operand))

        fresh = 0
        if turn:
            fence_async_shared()
            gl.barrier()
            load_tile(v_desc, v_s, v_ready, k_first, column)
            sequences += 1
            fresh = 1
        if inner != 0:
            o += widen(qn)
        o_mean, o_square = moments(o, post)
        if talk:
            if per_head == 0:
                mean, square = collect(messages.index(0), arrived.index(0), (count + 1) & 1, heads, PEERS)
            else:
                await_phase(own_address(arrived.index(0)), (count + 1) & 1)
            send(messages.index(1), arrived.index(1), rank, heads, o_mean, o_square)
        qn = q_norm(
            next_place,
            mean,
            square,
            first,
            q_mean_ptr,
            q_rstd_ptr,
            vectors,
            following,
            next_rows,
            rank,
            heads,
            pre,
            per_head,
            eps,
        )
        # The norm of o, and what is added.
        if talk:
            o_mean, o_square = collect(messages.index(1), arrived.index(1), count & 1, heads, PEERS)
        if post != NONE:
            rstd = gl.rsqrt(o_square * (1.0 / pitch.to(gl.float32)) + eps)
            if rank == 0:
                origin = gl.zeros([ROWS], gl.float32, row_layout())
                if post == LAYER:
                    origin = first_column(o)
                store_statistics(o_mean_ptr, o_rstd_ptr, o_mean, rstd, origin, row, rows, 1, post)
            o = standardise(o, o_mean, rstd)
        raw = place.load(tile_layout())
        if hat_ptr.to(gl.int64) != 0:
            put_rows(hat_desc, hat_ptr, o.to(dtype), place, row, rows, pitch, column, BULK)
        if post != NONE:
            o = scale_columns(o, vectors.index(2), vectors.index(3))
        if residual == OWN:
            o += widen(raw)
        elif residual == OTHER:
            o += load_other(residual_ptr, row, rows, r_token, column).to(gl.float32)
        out = o.to(dtype)
        mbarrier.wait(k_ready, sequences & 1)
        if BULK:
            tma.store_wait(0)
            gl.barrier()
        put_rows(out_desc, out_ptr, out, place, row, rows, pitch, column, BULK)
        s = warpgroup_mma(gl.convert_layout(qn, operand_layout()), k_s.permute((1, 0)), zeros, use_acc=False)
        if following + next_rows < end:
            if BULK:
                tma.store_wait(0)
            fence_async_shared()
            gl.barrier()
            mbarrier.expect(q_full.index(slot), q_desc.nbytes_per_cta)
            tma.async_load(q_desc, [following + next_rows, column], q_full.index(slot), place)
        row = following
        count += 1

    if BULK:
        tma.store_wait(0)

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
                "out_desc": Tile(dtype, (64, 128)),
                "hat_desc": Tile(dtype, (64, 128)),
            }
            args |= {n: f"*{dtype}:16" for n in ("q_ptr", "residual_ptr", "out_ptr", "hat_ptr")}
            args |= {n: "*i32" for n in ("q_offsets_ptr", "k_offsets_ptr")}
            args |= {n: "*fp32" for n in ("q_weight_ptr", "q_bias_ptr", "o_weight_ptr", "o_bias_ptr")}
            args |= {n: "*fp32" for n in ("q_mean_ptr", "q_rstd_ptr", "o_mean_ptr", "o_rstd_ptr")}
            args |= {"q_token": "i64:8", "r_token": "i64:8", "q_stride": "i32", "k_stride": "i32"}
            args |= {n: "i32" for n in ("batch", "queries", "heads", "max_keys")}
            args |= {"scale": "fp32", "eps": "fp32"}
            args |= {n: "i32" for n in ("pre", "post", "per_head", "inner", "residual", "narrow", "codes")}
            for form, bulk, peers in (("bulk", True, 8), ("small", True, 4)):
                yield Variant(
                    f"attention_{form}_{name}_{dtype}",
                    attention_pipelined_kernel,
                    args | {"ACT": code, "BULK": bulk, "PEERS": peers},
                    maxnreg=255,
                )


VARIANTS = list(variants())
