"""FlashNormAttention forward:

    qn = norm(q);   z_h = act(scale * qn_h k_h^T) v_h (+ qn_h);   out = norm(z over all heads) (+ residual)

The norm of q happens on its way to shared memory and the inner residual on the way out, so that neither qn nor the
attention's own output exists in memory. With one head the post-norm's row is in the program's registers, too; with more
the kernel leaves z, for a pass of the norm kernel. Padded keys are zeros in k and v, and act(0) = 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from recsys_norm.kernels.activations import activate
from recsys_norm.kernels.flashnorm.common import (
    LAYER,
    PER_HEAD,
    load_normed,
    load_raw,
    normed,
    own_statistics,
    standardized,
    vector,
)
from recsys_norm.kernels.flashnorm.streamed import attend
from recsys_norm.kernels.gdpa.common import in_window, load_tile, operand, sequence_bounds, store_tile, zero_rows

SIZES = [
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "r_token", "r_head",
    "batch", "all_heads", "first_head", "heads", "splits", "queries", "width", "max_keys",
    "scale", "left", "right", "eps",
]  # fmt: skip


@triton.jit
def post_norm(
    z, hat_base, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, start, m, limit, cols, width, eps,
    POST: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, WRITE_HAT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The post-norm of rows that are whole, for one head."""
    first = tl.sum(tl.where(cols[None, :] == 0, z, 0.0), 1)
    mean, rstd = own_statistics(z, first, cols, width, eps, POST == LAYER, EVEN)
    if POST == LAYER:
        tl.store(mean_ptr + start + m, mean, mask=m < limit)
    tl.store(rstd_ptr + start + m, rstd, mask=m < limit)
    y = standardized(z, first, mean, rstd, POST == LAYER, True)
    if WRITE_HAT:
        store_tile(hat_base, y, m, limit, width, cols, width, EVEN)
    if HAS_WEIGHT:
        y = y * vector(weight_ptr, 0, cols, width, True, 1.0)
    if HAS_BIAS:
        y = y + vector(bias_ptr, 0, cols, width, True, 0.0)
    return y


@triton.jit(do_not_specialize=SIZES)
def forward(
    q_ptr, k_ptr, v_ptr, residual_ptr, out_ptr, hat_ptr,  # the last two [queries, all_heads, width], contiguous
    pre_weight_ptr, pre_bias_ptr, post_weight_ptr, post_bias_ptr, q_mean_ptr, q_rstd_ptr, o_mean_ptr, o_rstd_ptr,
    q_offsets_ptr, k_offsets_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, r_token, r_head,  # strides, in units of VEC elements
    batch, all_heads, first_head, heads, splits, queries, width, max_keys, scale, left, right, eps,
    ACT: tl.constexpr, MASKED: tl.constexpr, RESIDENT: tl.constexpr,
    PRE: tl.constexpr, PRE_MEAN: tl.constexpr, PRE_WEIGHT: tl.constexpr, PRE_BIAS: tl.constexpr,
    INNER: tl.constexpr, POST: tl.constexpr, POST_WEIGHT: tl.constexpr, POST_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, WRITE_HAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, VEC: tl.constexpr, EVEN: tl.constexpr,
    SHIFT: tl.constexpr, FAST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs of one sequence are neighbours, heads innermost; each walks every `splits`-th block of the sequence's
    queries. RESIDENT: at most BLOCK_N keys, loaded once; else they are streamed for every block of queries. POST needs
    all_heads = 1."""
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
    affine = column
    if PRE == PER_HEAD:
        first_base = q_base
        affine = 0
    k_base = k_ptr + head.to(tl.int64) * k_head + k_start * k_token
    v_base = v_ptr + head.to(tl.int64) * v_head + k_start * v_token
    gamma = vector(pre_weight_ptr, affine, cols, width, PRE_WEIGHT, 1.0)
    beta = vector(pre_bias_ptr, affine, cols, width, PRE_BIAS, 0.0)
    if RESIDENT:
        k = load_tile(k_base, keys, k_len, k_token, cols, width, EVEN, UPCAST)
        v = load_tile(v_base, keys, k_len, v_token, cols, width, EVEN, UPCAST)
    qn = load_normed(
        q_base, first_base, q_mean_ptr, q_rstd_ptr, gamma, beta, start, split * BLOCK_M + rows, q_len, q_token,
        all_heads, head, cols, width, PRE, PRE_MEAN, PRE_WEIGHT, PRE_BIAS, EVEN, SHIFT, UPCAST,
    )  # fmt: skip
    for block in tl.range(split, tl.cdiv(q_len, BLOCK_M), splits, num_stages=1):
        m = block * BLOCK_M + rows
        # The next block is on its way in registers while this one is worked on.
        q, first, mean, rstd = load_raw(
            q_base, first_base, q_mean_ptr, q_rstd_ptr, start, m + splits * BLOCK_M, q_len, q_token, all_heads, head,
            cols, width, PRE, PRE_MEAN, EVEN, SHIFT, UPCAST,
        )  # fmt: skip
        if RESIDENT:
            p = activate(tl.dot(qn, tl.trans(k), input_precision=PRECISION) * scale, ACT, FAST)
            if MASKED:
                p = tl.where(in_window(m[:, None], keys[None, :], left, right), p, 0.0)
            z = tl.dot(operand(p, v, UPCAST), v, input_precision=PRECISION)
        else:
            z = attend(
                qn, k_base, v_base, block * BLOCK_M, m, k_len, k_token, v_token, cols, width, scale, left, right,
                ACT, MASKED, BLOCK_M, BLOCK_N, BLOCK_D, EVEN, FAST, UPCAST, PRECISION,
            )  # fmt: skip
        if INNER:
            z += qn.to(tl.float32)
        place = start * row + column
        if POST != 0:
            z = post_norm(
                z, hat_ptr + place, post_weight_ptr, post_bias_ptr, o_mean_ptr, o_rstd_ptr, start, m, q_len, cols,
                width, eps, POST, POST_WEIGHT, POST_BIAS, WRITE_HAT, EVEN,
            )  # fmt: skip
        if RESIDUAL:
            r_base = residual_ptr + start * r_token + head.to(tl.int64) * r_head
            z += load_tile(r_base, m, q_len, r_token, cols, width, EVEN, UPCAST).to(tl.float32)
        store_tile(out_ptr + place, z, m, q_len, row, cols, width, EVEN)
        # Normalised here and not where it is used: there it would be in the layout of a product's left operand, in
        # which every thread needs 64 values of gamma and beta.
        qn = normed(q, first, mean, rstd, gamma, beta, PRE, PRE_MEAN, PRE_WEIGHT, PRE_BIAS, EVEN, SHIFT, UPCAST)
