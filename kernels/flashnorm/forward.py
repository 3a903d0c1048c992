"""FlashNormAttention forward:

    qn = norm(q);   o_h = act(scale * qn_h k_h^T) v_h (+ qn_h);   out = norm(o over all heads) (+ residual)

See `common` for how the post-norm's rows come together. Padded keys are zeros in k and v, and act(0) = 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recsys_norm.kernels.flashnorm.common import (
    ALL_HEADS,
    LAYER,
    PER_HEAD,
    last_arrival,
    load_fresh,
    load_norm,
    load_parts,
    own_statistics,
    standardized,
    vector,
)
from recsys_norm.kernels.flashnorm.streamed import attend
from recsys_norm.kernels.gdpa.common import in_window, load_tile, operand, sequence_bounds, store_tile, zero_rows
from recsys_norm.kernels.gdpa.elementwise import activate

SIZES = [
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "r_token", "r_head",
    "batch", "all_heads", "first_head", "heads", "splits", "blocks", "queries", "width", "max_keys",
    "scale", "left", "right", "eps",
]  # fmt: skip


@triton.jit
def query_norm(
    q, mean_ptr, rstd_ptr, first_base, m, limit, start, token, heads, head, width, cols, eps,
    PRE: tl.constexpr, HAS_MEAN: tl.constexpr, EVEN: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """(first, mean, rstd) of the rows m of q, which for a norm per head are computed here and stored."""
    if PRE == PER_HEAD:
        live = m < limit
        first = tl.load(first_base + m.to(tl.int64) * token, mask=live, other=0.0).to(tl.float32)
        mean, rstd = own_statistics(q.to(tl.float32), first, cols, width, eps, HAS_MEAN, EVEN)
        at = (start + m) * heads + head
        if HAS_MEAN:
            tl.store(mean_ptr + at, mean, mask=live)
        tl.store(rstd_ptr + at, rstd, mask=live)
    elif PRE == ALL_HEADS:
        first, mean, rstd = load_norm(mean_ptr, rstd_ptr, first_base, m, limit, start + m, token, HAS_MEAN, SHIFT)
    else:
        rstd = tl.zeros([m.shape[0]], tl.float32)
        first = rstd
        mean = rstd
    return first, mean, rstd


@triton.jit
def normed(
    q, first, mean, rstd, gamma, beta, PRE: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, SHIFT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The pre-norm of a tile of q, in its dtype."""
    y = q
    if PRE != 0:
        x = standardized(q.to(tl.float32), first, mean, rstd, HAS_MEAN, SHIFT or PRE == PER_HEAD)
        if HAS_WEIGHT or not EVEN:
            x = x * gamma
        if HAS_BIAS:
            x = x + beta
        y = operand(x, q, UPCAST)
    return y


@triton.jit
def finish(
    o_ptr, out_ptr, hat_ptr, residual_ptr, weight_ptr, bias_ptr, part_ptr, mean_ptr, rstd_ptr,
    start, m, limit, r_token, r_head, heads, queries, width, eps,
    POST: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    WRITE_HAT: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Post-norm and outer residual of rows m of a sequence that begins at row `start`, once every head is there."""
    live = m < limit
    rows = start + m
    row = heads * width
    count = row.to(tl.float32)
    total = tl.sum(load_parts(part_ptr, rows, live, heads, HEADS), 1)
    mean = total
    first = total
    if POST == LAYER:  # merge the heads' means and squared deviations
        means = load_parts(part_ptr + tl.cast(queries, tl.int64) * heads, rows, live, heads, HEADS)
        first = tl.load(o_ptr + rows * row, mask=live, other=0.0, cache_modifier=".cg").to(tl.float32)
        head = tl.arange(0, HEADS)
        keep = live[:, None] & (head < heads)[None, :]
        if SHIFT:  # each mean is relative to its head's first element
            at = rows[:, None] * row + (head * width)[None, :]
            own = tl.load(o_ptr + at, mask=keep, other=0.0, cache_modifier=".cg")
            means += tl.where(keep, own.to(tl.float32) - first[:, None], 0.0)
        mean = tl.sum(means, 1) / heads.to(tl.float32)
        deviation = tl.where(keep, means - mean[:, None], 0.0)
        total += tl.sum(deviation * deviation, 1) * width.to(tl.float32)
        if SHIFT:
            tl.store(mean_ptr + rows, mean, mask=live)
        else:
            tl.store(mean_ptr + rows, mean - first, mask=live)
    rstd = tl.rsqrt(total / count + eps)
    tl.store(rstd_ptr + rows, rstd, mask=live)
    strips = tl.cdiv(width, CHUNK)
    for i in tl.range(0, heads * strips, num_stages=1):  # strips of columns, for which the registers suffice
        h = i // strips
        cols = i % strips * CHUNK + tl.arange(0, CHUNK)
        column = start * row + h * width
        y = load_fresh(o_ptr + column, m, limit, row, cols, width, EVEN)
        if RESIDUAL:
            r_base = residual_ptr + start * r_token + r_head.to(tl.int64) * h
            more = load_tile(r_base, m, limit, r_token, cols, width, EVEN, True)
        y = standardized(y, first, mean, rstd, POST == LAYER, SHIFT)
        if WRITE_HAT:
            store_tile(hat_ptr + column, y, m, limit, row, cols, width, EVEN)
        if HAS_WEIGHT:
            y = y * vector(weight_ptr, h * width, cols, width, True, 1.0)
        if HAS_BIAS:
            y = y + vector(bias_ptr, h * width, cols, width, True, 0.0)
        if RESIDUAL:
            y += more
        store_tile(out_ptr + column, y, m, limit, row, cols, width, EVEN)


@triton.jit(do_not_specialize=SIZES)
def forward(
    q_ptr, k_ptr, v_ptr, residual_ptr, o_ptr, out_ptr, hat_ptr,  # the last three [queries, all_heads, width]
    pre_weight_ptr, pre_bias_ptr, post_weight_ptr, post_bias_ptr,
    q_mean_ptr, q_rstd_ptr, o_mean_ptr, o_rstd_ptr, part_ptr, count_ptr, q_offsets_ptr, k_offsets_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, r_token, r_head,  # strides, in units of VEC elements
    batch, all_heads, first_head, heads, splits, blocks, queries, width, max_keys, scale, left, right, eps,
    ACT: tl.constexpr, MASKED: tl.constexpr, RESIDENT: tl.constexpr,
    PRE: tl.constexpr, PRE_MEAN: tl.constexpr, PRE_WEIGHT: tl.constexpr, PRE_BIAS: tl.constexpr,
    INNER: tl.constexpr, POST: tl.constexpr, POST_WEIGHT: tl.constexpr, POST_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, WRITE_HAT: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr, EVEN: tl.constexpr,
    SHIFT: tl.constexpr, FAST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs of one sequence are neighbours, heads innermost; each walks every `splits`-th block of the sequence's
    queries. RESIDENT: at most BLOCK_N keys, loaded once; else they are streamed for every block of queries. o is where
    heads leave their results before the post-norm: hat if it is written, else out. `blocks` counters per sequence."""
    CHUNK: tl.constexpr = min(BLOCK_D, 64)
    head = first_head + tl.program_id(0) % heads
    split = tl.program_id(0) // heads % splits
    b = tl.program_id(0) // heads // splits
    start, q_len = sequence_bounds(q_offsets_ptr, b)
    k_start, k_len = sequence_bounds(k_offsets_ptr, b)
    q_token, k_token, v_token, r_token = q_token * VEC, k_token * VEC, v_token * VEC, r_token * VEC
    q_head, k_head, v_head, r_head = q_head * VEC, k_head * VEC, v_head * VEC, r_head * VEC
    width = width * VEC
    row = all_heads * width
    cols = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    total = tl.load(q_offsets_ptr + batch).to(tl.int64)
    worker = b * splits + split
    column = head * width
    zero_rows(out_ptr + column, total, queries, worker, batch * splits, row, cols, width, BLOCK_M, EVEN)
    if WRITE_HAT:
        zero_rows(hat_ptr + column, total, queries, worker, batch * splits, row, cols, width, BLOCK_M, EVEN)
    if split * BLOCK_M >= q_len:
        return
    k_len = tl.minimum(k_len, max_keys)
    first_base = q_ptr + start * q_token
    q_base = first_base + head.to(tl.int64) * q_head
    if PRE == PER_HEAD:
        first_base = q_base
    k_base = k_ptr + head.to(tl.int64) * k_head + k_start * k_token
    v_base = v_ptr + head.to(tl.int64) * v_head + k_start * v_token
    affine = column
    if PRE == PER_HEAD:
        affine = 0
    gamma = vector(pre_weight_ptr, affine, cols, width, PRE_WEIGHT, 1.0)
    beta = vector(pre_bias_ptr, affine, cols, width, PRE_BIAS, 0.0)
    if RESIDENT:
        k = load_tile(k_base, keys, k_len, k_token, cols, width, EVEN, UPCAST)
        v = load_tile(v_base, keys, k_len, v_token, cols, width, EVEN, UPCAST)
    m = split * BLOCK_M + rows
    q = load_tile(q_base, m, q_len, q_token, cols, width, EVEN, UPCAST)
    first, mean, rstd = query_norm(
        q, q_mean_ptr, q_rstd_ptr, first_base, m, q_len, start, q_token, all_heads, head, width, cols, eps,
        PRE, PRE_MEAN, EVEN, SHIFT,
    )  # fmt: skip
    qn = normed(q, first, mean, rstd, gamma, beta, PRE, PRE_MEAN, PRE_WEIGHT, PRE_BIAS, EVEN, SHIFT, UPCAST)
    for block in tl.range(split, tl.cdiv(q_len, BLOCK_M), splits, num_stages=1):
        m = block * BLOCK_M + rows
        # The next block is on its way in registers while this one is worked on.
        following = m + splits * BLOCK_M
        q_next = load_tile(q_base, following, q_len, q_token, cols, width, EVEN, UPCAST)
        first, mean, rstd = query_norm(
            q_next, q_mean_ptr, q_rstd_ptr, first_base, following, q_len, start, q_token, all_heads, head, width, cols,
            eps, PRE, PRE_MEAN, EVEN, SHIFT,
        )  # fmt: skip
        if RESIDENT:
            p = activate(tl.dot(qn, tl.trans(k), input_precision=PRECISION) * scale, ACT, FAST)
            if MASKED:
                p = tl.where(in_window(m[:, None], keys[None, :], left, right), p, 0.0)
            o = tl.dot(operand(p, v, UPCAST), v, input_precision=PRECISION)
        else:
            o = attend(
                qn, k_base, v_base, block * BLOCK_M, m, k_len, k_token, v_token, cols, width, scale, left, right,
                ACT, MASKED, BLOCK_M, BLOCK_N, BLOCK_D, EVEN, FAST, UPCAST, PRECISION,
            )  # fmt: skip
        if INNER:
            o += qn.to(tl.float32)
        place = start * row + column
        if POST == 0:
            if RESIDUAL:
                r_base = residual_ptr + start * r_token + head.to(tl.int64) * r_head
                o += load_tile(r_base, m, q_len, r_token, cols, width, EVEN, UPCAST).to(tl.float32)
            store_tile(out_ptr + place, o, m, q_len, row, cols, width, EVEN)
        else:
            store_tile(o_ptr + place, o, m, q_len, row, cols, width, EVEN)
            at = (start + m) * all_heads + head
            if POST == LAYER:
                if SHIFT:
                    o = o - tl.sum(tl.where(cols[None, :] == 0, o, 0.0), 1)[:, None]
                    if not EVEN:
                        o = tl.where(cols[None, :] < width, o, 0.0)
                centre = tl.sum(o, 1) / width.to(tl.float32)
                tl.store(part_ptr + tl.cast(queries, tl.int64) * all_heads + at, centre, mask=m < q_len)
                o = o - centre[:, None]
                if not EVEN:
                    o = tl.where(cols[None, :] < width, o, 0.0)
            tl.store(part_ptr + at, tl.sum(o * o, 1), mask=m < q_len)
            if last_arrival(count_ptr + b * blocks + block, all_heads):
                finish(
                    o_ptr, out_ptr, hat_ptr, residual_ptr, post_weight_ptr, post_bias_ptr, part_ptr, o_mean_ptr,
                    o_rstd_ptr, start, m, q_len, r_token, r_head, all_heads, queries, width, eps,
                    POST, POST_WEIGHT, POST_BIAS, RESIDUAL, WRITE_HAT, HEADS, CHUNK, EVEN, SHIFT,
                )  # fmt: skip
        # Normalised here and not where it is used: there it would be in the layout of a product's left operand, in
        # which every thread needs 64 values of gamma and beta.
        qn = normed(q_next, first, mean, rstd, gamma, beta, PRE, PRE_MEAN, PRE_WEIGHT, PRE_BIAS, EVEN, SHIFT, UPCAST)
