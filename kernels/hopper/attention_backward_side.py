"""Of the norm_attention backward (attention_backward_kernels.py): the side, which loads, normalises and writes dq.

Its turn i has four steps, in an order that lets messages and copies travel under other work:

    back_sums      block i       row sums of h * weight * xhat and h * weight, to the cluster
    front_sums     block i + 2   row sums of g * o_hat and g, to the cluster
    back           block i       dq to memory
    front          block i + 2   do and qn for the consumers
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .attention_backward_common import (
    ADD,
    BIAS,
    BLOCK,
    HAS_BIAS,
    HAS_POST,
    HAS_WEIGHT,
    KINDS,
    LAYER,
    MAX_HEADS,
    MEAN,
    O_RSTD,
    PLAIN,
    POST,
    POST_BIT,
    POST_SHIFT,
    POST_SLOPE,
    PRE_BIT,
    PRE_SHIFT,
    PRE_SLOPE,
    Q_SLOTS,
    Q_TOKEN,
    RSTD,
    STRIP,
    SUMS,
    WEIGHT,
    WIDTH,
    Q,
    fact,
    meet_cluster,
    number,
    own_shift,
    pointer,
)  # fmt: skip
from .attention_backward_strips import (
    bit_of,
    clear_messages,
    fold,
    load_live,
    load_pairs,
    parameter,
    piece_offsets,
    receive,
    send,
    store_pairs,
    strip_layout,
)  # fmt: skip
from .postnorm_normalise import pack, unpack

STRIPS = gl.constexpr(BLOCK.value // STRIP.value)


@gluon.jit
def issue_q(q_desc, q_s, q_full, row, column, block):
    slot = block % Q_SLOTS
    bar = q_full.index(slot)
    mbarrier.expect(bar, 2 * q_desc.nbytes_per_cta)
    tma.async_load(q_desc, [row, column], bar, q_s.index(2 * slot))
    tma.async_load(q_desc, [row, column + BLOCK], bar, q_s.index(2 * slot + 1))


@gluon.jit
def issue_x(dout_desc, hat_desc, do_s, qn_s, x_full, row, column, block):
    stage = block & 1
    bar = x_full.index(stage)
    mbarrier.expect(bar, 4 * dout_desc.nbytes_per_cta)
    for panel in gl.static_range(2):
        tma.async_load(dout_desc, [row, column + panel * BLOCK], bar, do_s.index(2 * stage + panel))
        tma.async_load(hat_desc, [row, column + panel * BLOCK], bar, qn_s.index(2 * stage + panel))


@gluon.jit
def row_vectors(facts, start, first, q_len, form, dtype: gl.constexpr):
    """Of a block's 64 rows: rstd, -mean * rstd, rstd of the post-norm."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows = first + gl.arange(0, BLOCK, L)
    live = rows < q_len
    at = start.to(gl.int64) + rows
    rstd = gl.full([BLOCK], 1.0, gl.float32, L)
    mean = gl.zeros([BLOCK], gl.float32, L)
    o_rstd = gl.full([BLOCK], 1.0, gl.float32, L)
    if form >> PRE_BIT & 3 != 0:
        rstd = gl.load(pointer(facts, RSTD, gl.float32) + at, mask=live, other=0.0)
        if form >> PRE_BIT & 3 == LAYER:
            mean = gl.load(pointer(facts, MEAN, gl.float32) + at, mask=live, other=0.0)
            mean += gl.load(pointer(facts, Q, dtype) + at * fact(facts, Q_TOKEN), mask=live, other=0.0).to(gl.float32)
    if form >> POST_BIT & 3 != 0:
        o_rstd = gl.load(pointer(facts, O_RSTD, gl.float32) + at, mask=live, other=0.0)
    return rstd, -mean * rstd, o_rstd


@gluon.jit
def load_keys(k_desc, v_desc, k_s, v_s, kv_full, row, column):
    mbarrier.expect(kv_full, 8 * k_desc.nbytes_per_cta)
    for half in gl.static_range(2):
        for panel in gl.static_range(2):
            at = [row + half * BLOCK, column + panel * BLOCK]
            tma.async_load(k_desc, at, kv_full, k_s.index(2 * half + panel))
            tma.async_load(v_desc, at, kv_full, v_s.index(2 * half + panel))


@gluon.jit
def vector(rows_s, at, strip):
    """A row vector's values for the rows of a strip."""
    return rows_s.index(at * STRIPS + strip).load(gl.SliceLayout(1, strip_layout()))


@gluon.jit
def back_sums(h_s, q_s, rows_s, back_s, facts, offsets, local, pre_weight, pre_bias, i, q_len, head, heads, form):
    slot = i % Q_SLOTS
    for strip in range(STRIPS):
        rows = strip * STRIP + local
        live = i * BLOCK + rows < q_len
        rstd = vector(rows_s, 2 * slot, strip)
        lift = vector(rows_s, 2 * slot + 1, strip)
        he, ho = unpack(load_live(h_s.index(0), offsets + strip * (STRIP * 128), live), q_s.dtype)
        xe, xo = unpack(load_live(q_s.index(2 * slot), offsets + strip * (STRIP * 128), live), q_s.dtype)
        xe = xe * rstd[:, None] + lift[:, None]
        xo = xo * rstd[:, None] + lift[:, None]
        pre_weight += fold(he * xe, ho * xo)
        pre_bias += fold(he, ho)
        we, wo = parameter(facts, WEIGHT, form & HAS_WEIGHT, 1.0)
        he = he * we[None, :]
        ho = ho * wo[None, :]
        dot = gl.sum(he * xe + ho * xo, axis=1)
        total = gl.sum(he + ho, axis=1)
        send(dot, total, rows, back_s.index((i & 1) * MAX_HEADS), bit_of(i), head, heads)
    return pre_weight, pre_bias


@gluon.jit
def front_sums(
    do_s, qn_s, rows_s, front_s, x_full, facts, offsets, local, post_weight, j, start, q_len, head, heads, form
):
    slot = j % Q_SLOTS
    rstd, lift, o_rstd = row_vectors(facts, start, j * BLOCK, q_len, form, do_s.dtype)
    mbarrier.wait(x_full.index(j & 1), (j >> 1) & 1)
    for strip in range(STRIPS):
        rows = strip * STRIP + local
        live = j * BLOCK + rows < q_len
        de, do = unpack(load_live(do_s.index(2 * (j & 1)), offsets + strip * (STRIP * 128), live), do_s.dtype)
        ze, zo = unpack(load_live(qn_s.index(2 * (j & 1)), offsets + strip * (STRIP * 128), live), do_s.dtype)
        post_weight += fold(de * ze, do * zo)
        ge, go = parameter(facts, POST, form & HAS_POST, 1.0)
        de = de * ge[None, :]
        do = do * go[None, :]
        dot = gl.sum(de * ze + do * zo, axis=1)
        total = gl.sum(de + do, axis=1)
        send(dot, total, rows, front_s.index((j & 1) * MAX_HEADS), bit_of(j), head, heads)
    store_rows(rows_s, 2 * slot, rstd)
    store_rows(rows_s, 2 * slot + 1, lift)
    store_rows(rows_s, 2 * Q_SLOTS + (j & 1), o_rstd)
    return post_weight


@gluon.jit
def back(
    h_s,
    q_s,
    rows_s,
    back_s,
    facts,
    offsets,
    local,
    add_ptr,
    dq_ptr,
    add_pitch,
    dq_pitch,
    i,
    start,
    q_len,
    head,
    heads,
    form,
):
    """dq = rstd * h * weight + slope * q + constant (+ add)."""
    S: gl.constexpr = strip_layout()
    pairs = gl.arange(0, BLOCK, gl.SliceLayout(0, S))
    slot = i % Q_SLOTS
    for strip in range(STRIPS):
        rows = strip * STRIP + local
        live = (i * BLOCK + rows < q_len)[:, None] & (pairs >= 0)[None, :]
        at = (start.to(gl.int64) + i * BLOCK + rows)[:, None]
        more = gl.zeros([STRIP, BLOCK], gl.int32, S)
        if form & ADD != 0:
            more = gl.load(add_ptr + at * add_pitch + (head * BLOCK + pairs)[None, :], mask=live, other=0)
        rstd = vector(rows_s, 2 * slot, strip)
        lift = vector(rows_s, 2 * slot + 1, strip)
        dot, total = receive(rows, back_s.index((i & 1) * MAX_HEADS), bit_of(i), head, heads)
        he, ho = unpack(load_pairs(h_s.index(0), offsets + strip * (STRIP * 128)), q_s.dtype)
        xe, xo = unpack(load_pairs(q_s.index(2 * slot), offsets + strip * (STRIP * 128)), q_s.dtype)
        me, mo = unpack(more, q_s.dtype)
        we, wo = parameter(facts, WEIGHT, form & HAS_WEIGHT, 1.0)
        slope = -dot * number(facts, PRE_SLOPE) * rstd
        constant = -total * number(facts, PRE_SHIFT) * rstd + slope * lift
        slope = slope * rstd
        me = he * we[None, :] * rstd[:, None] + (xe * slope[:, None] + (constant[:, None] + me))
        mo = ho * wo[None, :] * rstd[:, None] + (xo * slope[:, None] + (constant[:, None] + mo))
        gl.store(dq_ptr + at * dq_pitch + (head * BLOCK + pairs)[None, :], pack(me, mo, q_s.dtype), mask=live)


@gluon.jit
def front(do_s, qn_s, q_s, rows_s, front_s, facts, offsets, local, j, q_len, head, heads, form):
    """do = o_rstd * g + slope * o_hat + constant and qn, each in the place of what it is made of."""
    slot = j % Q_SLOTS
    for strip in range(STRIPS):
        rows = strip * STRIP + local
        live = j * BLOCK + rows < q_len
        here = offsets + strip * (STRIP * 128)
        o_rstd = vector(rows_s, 2 * Q_SLOTS + (j & 1), strip)
        dot, total = receive(rows, front_s.index((j & 1) * MAX_HEADS), bit_of(j), head, heads)
        slope = -dot * number(facts, POST_SLOPE) * o_rstd
        constant = -total * number(facts, POST_SHIFT) * o_rstd
        de, do = unpack(load_live(do_s.index(2 * (j & 1)), here, live), do_s.dtype)
        ge, go = parameter(facts, POST, form & HAS_POST, 1.0)
        de = de * ge[None, :] * o_rstd[:, None]
        do = do * go[None, :] * o_rstd[:, None]
        ze, zo = unpack(load_live(qn_s.index(2 * (j & 1)), here, live), do_s.dtype)
        de += ze * slope[:, None] + constant[:, None]
        do += zo * slope[:, None] + constant[:, None]
        store_pairs(do_s.index(2 * (j & 1)), here, pack(de, do, do_s.dtype))
        rstd = vector(rows_s, 2 * slot, strip)
        lift = vector(rows_s, 2 * slot + 1, strip)
        xe, xo = unpack(load_pairs(q_s.index(2 * slot), here), do_s.dtype)
        we, wo = parameter(facts, WEIGHT, form & HAS_WEIGHT, 1.0)
        be, bo = parameter(facts, BIAS, form & HAS_BIAS, 0.0)
        xe = (xe * rstd[:, None] + lift[:, None]) * we[None, :] + be[None, :]
        xo = (xo * rstd[:, None] + lift[:, None]) * wo[None, :] + bo[None, :]
        normed = pack(xe, xo, do_s.dtype)
        store_pairs(qn_s.index(2 * (j & 1)), here, gl.where(live[:, None], normed, gl.zeros_like(normed)))


@gluon.jit
def store_rows(rows_s, at, values):
    """64 values, in as many places as a block has strips."""
    rows_s.reinterpret(gl.float32, [2 * Q_SLOTS + 2, BLOCK], PLAIN).index(at).store(values)


@gluon.jit
def store_columns(facts, scratch, sums, kind: gl.constexpr, heads, column):
    """One row of sums per program. Row 2 w + h of `sums` has columns 2 c + h from warp w; `scratch` is where they meet."""
    L: gl.constexpr = gl.BlockedLayout([8, 1], [1, 32], [1, 4], [1, 0])
    scratch.index(kind).store(sums)
    gl.barrier()
    total = gl.sum(scratch.index(kind).load(L).reshape([4, 2, BLOCK]), axis=0)
    ptr = pointer(facts, SUMS, gl.float32) + (gl.program_id(0) // heads * KINDS + kind).to(gl.int64) * (heads * WIDTH)
    odd = gl.arange(0, 2, gl.SliceLayout(1, total.type.layout))[:, None]
    cols = column + 2 * gl.arange(0, BLOCK, gl.SliceLayout(0, total.type.layout))[None, :]
    gl.store(ptr + (cols + odd), total)


@gluon.jit
def side(
    q_desc, k_desc, v_desc, dout_desc, hat_desc, k_s, v_s, q_s, do_s, qn_s, h_s, rows_s, front_s, back_s, facts,
    kv_full, q_full, x_full, ready, h_full, h_free, add_ptr, dq_ptr, add_pitch, dq_pitch,
    start, q_len, k_start, head, heads, blocks, form,
):  # fmt: skip
    clear_messages(front_s)
    clear_messages(back_s)
    meet_cluster()
    column = head * WIDTH
    load_keys(k_desc, v_desc, k_s, v_s, kv_full, k_start, column)
    for j in range(gl.minimum(blocks, 2)):
        issue_q(q_desc, q_s, q_full, start + j * BLOCK, column, j)
        issue_x(dout_desc, hat_desc, do_s, qn_s, x_full, start + j * BLOCK, column, j)
    if blocks > 2:
        issue_q(q_desc, q_s, q_full, start + 2 * BLOCK, column, 2)
    offsets = piece_offsets() + own_shift(facts)
    local = gl.arange(0, STRIP, gl.SliceLayout(1, strip_layout()))
    post_weight = gl.zeros([STRIP, BLOCK], gl.float32, strip_layout())
    pre_weight = post_weight
    pre_bias = post_weight
    for i in range(-2, blocks):
        j = i + 2
        if i >= 0:
            mbarrier.wait(h_full, i & 1)  # the consumers are done with the block: its stage can be filled again
            if j < blocks:
                issue_x(dout_desc, hat_desc, do_s, qn_s, x_full, start + j * BLOCK, column, j)
            pre_weight, pre_bias = back_sums(
                h_s, q_s, rows_s, back_s, facts, offsets, local, pre_weight, pre_bias, i, q_len, head, heads, form
            )
        if j < blocks:
            post_weight = front_sums(
                do_s,
                qn_s,
                rows_s,
                front_s,
                x_full,
                facts,
                offsets,
                local,
                post_weight,
                j,
                start,
                q_len,
                head,
                heads,
                form,
            )
        if i >= 0:
            back(
                h_s, q_s, rows_s, back_s, facts, offsets, local, add_ptr, dq_ptr, add_pitch, dq_pitch, i, start, q_len,
                head, heads, form,
            )  # fmt: skip
            fence_async_shared()
            mbarrier.arrive(h_free)
            if i + Q_SLOTS < blocks:
                issue_q(q_desc, q_s, q_full, start + (i + Q_SLOTS) * BLOCK, column, i + Q_SLOTS)
        if j < blocks:
            mbarrier.wait(q_full.index(j % Q_SLOTS), (j // Q_SLOTS) & 1)
            front(do_s, qn_s, q_s, rows_s, front_s, facts, offsets, local, j, q_len, head, heads, form)
            fence_async_shared()
            mbarrier.arrive(ready.index(j & 1))
    scratch = h_s.reinterpret(gl.float32, [KINDS, 8, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    store_columns(facts, scratch, post_weight, 0, heads, column)
    store_columns(facts, scratch, pre_weight, 1, heads, column)
    store_columns(facts, scratch, pre_bias, 2, heads, column)
