"""linear_norm in TLX, the low-level extension of the Triton fork `fbtriton`: a cluster of blocks shares the rows.

    z = x W^T + bias;   zhat = r * (z - mean);   y = gamma * zhat + beta

Each block of a cluster multiplies BM rows of x by its own N / CTAS rows of W and keeps the product in registers. The
blocks exchange per row the mean and the sum of squared deviations of their part through each other's shared memory and
merge them (equal counts), so z never leaves the chip. Source: "Towards Free Normalization", multi-CTA post-norm.

Shape legend: M rows, K in-features, N out-features.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx


@triton.jit
def spread(part, slots, rank, barrier, CTAS: tl.constexpr):
    """Put this block's [BM, 1] into slot `rank` of every block of the cluster."""
    tlx.local_store(slots[rank], part)
    for peer in tl.static_range(CTAS):
        if rank != peer:
            tlx.async_remote_shmem_store(slots[rank], part, peer, barrier)


@triton.jit
def product(
    x_ptr, w_ptr, row, col, M, K, stride_x, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr
):
    """x[rows] @ w[cols].T in fp32. K is a multiple of BK; rows past M read the last one."""
    rows = tl.minimum(row + tl.arange(0, BM), M - 1)
    ks = tl.arange(0, BK)
    x_ptrs = x_ptr + rows[:, None].to(tl.int64) * stride_x + ks[None, :]
    w_ptrs = w_ptr + (col + tl.arange(0, BN))[:, None] * K + ks[None, :]
    x_tiles = tlx.local_alloc((BM, BK), tlx.dtype_of(x_ptr), STAGES)
    w_tiles = tlx.local_alloc((BN, BK), tlx.dtype_of(w_ptr), STAGES)
    steps = K // BK
    for i in tl.static_range(STAGES - 1):
        live = i < steps
        tx = tlx.async_load(x_ptrs + i * BK, x_tiles[i], mask=(ks < BK)[None, :] & live)
        tw = tlx.async_load(w_ptrs + i * BK, w_tiles[i], mask=(ks < BK)[None, :] & live)
        tlx.async_load_commit_group([tx, tw])
    acc = tl.zeros((BM, BN), tl.float32)
    for step in tl.range(0, steps, num_stages=0):
        tlx.async_load_wait_group(STAGES - 2)
        slot = step % STAGES
        acc = tlx.async_dot(x_tiles[slot], tlx.local_trans(w_tiles[slot]), acc)
        acc = tlx.async_dot_wait(1, acc)  # the product before this one is done with the slot that is filled next
        ahead = step + STAGES - 1
        live = ahead < steps
        tx = tlx.async_load(x_ptrs + ahead * BK, x_tiles[ahead % STAGES], mask=(ks < BK)[None, :] & live)
        tw = tlx.async_load(w_ptrs + ahead * BK, w_tiles[ahead % STAGES], mask=(ks < BK)[None, :] & live)
        tlx.async_load_commit_group([tx, tw])
    return tlx.async_dot_wait(0, acc)


@triton.jit
def linear_norm_kernel(
    x_ptr,  # [M, K], row stride stride_x
    w_ptr,  # [N, K] contiguous
    bias_ptr,  # [N]
    gamma_ptr,  # [N]
    beta_ptr,  # [N]
    y_ptr,  # [M, N]
    hat_ptr,  # [M, N], written with WRITE_HAT
    mean_ptr,  # [M] fp32, of the row relative to its first element, written with LAYER
    rstd_ptr,  # [M] fp32
    M,
    K,
    stride_x,
    eps,
    LAYER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    HAS_BETA: tl.constexpr,
    WRITE_HAT: tl.constexpr,
    CTAS: tl.constexpr,  # of a cluster, along the grid's x
    BM: tl.constexpr,
    BN: tl.constexpr,  # N / CTAS
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    N: tl.constexpr = CTAS * BN
    rank = tlx.cluster_cta_rank()
    barrier = tlx.alloc_barriers(num_barriers=1)
    MESSAGES: tl.constexpr = 3 if LAYER else 1
    tlx.barrier_expect_bytes(barrier[0], size=(CTAS - 1) * BM * 4 * MESSAGES)
    tlx.cluster_barrier()  # every barrier is there before a peer writes
    row, col = (tl.program_id(0) // CTAS) * BM, rank * BN
    z = product(x_ptr, w_ptr, row, col, M, K, stride_x, BM, BN, BK, STAGES)
    rows, cols = row + tl.arange(0, BM), col + tl.arange(0, BN)
    if HAS_BIAS:
        z += tl.load(bias_ptr + cols).to(tl.float32)[None, :]
    squares = tlx.local_alloc((BM, 1), tl.float32, CTAS)
    if LAYER:
        means = tlx.local_alloc((BM, 1), tl.float32, CTAS)
        firsts = tlx.local_alloc((BM, 1), tl.float32, CTAS)
        own = tl.sum(z, 1, keep_dims=True) / BN
        rounded = z.to(y_ptr.dtype.element_ty).to(tl.float32)
        first = tl.sum(tl.where((tl.arange(0, BN) == 0)[None, :], rounded, 0.0), 1, keep_dims=True)
        spread(own, means, rank, barrier[0], CTAS)
        spread(first, firsts, rank, barrier[0], CTAS)
        spread(tl.sum((z - own) * (z - own), 1, keep_dims=True), squares, rank, barrier[0], CTAS)
    else:
        spread(tl.sum(z * z, 1, keep_dims=True), squares, rank, barrier[0], CTAS)
    tlx.barrier_wait(barrier[0], 0)
    total = tl.zeros((BM, 1), tl.float32)
    mean = tl.zeros((BM, 1), tl.float32)
    if LAYER:
        for i in tl.static_range(CTAS):
            mean += tlx.local_load(means[i])
        mean = mean / CTAS
        for i in tl.static_range(CTAS):
            apart = tlx.local_load(means[i]) - mean
            total += BN * apart * apart
    for i in tl.static_range(CTAS):
        total += tlx.local_load(squares[i])
    scale = tl.rsqrt(total / N + eps)
    live = rows < M
    if rank == 0:
        tl.store(rstd_ptr + rows, tl.reshape(scale, (BM,)), mask=live)
        if LAYER:
            relative = mean - tlx.local_load(firsts[0])
            tl.store(mean_ptr + rows, tl.reshape(relative, (BM,)), mask=live)
    z = (z - mean) * scale
    at = rows[:, None].to(tl.int64) * N + cols[None, :]
    if WRITE_HAT:
        tl.store(hat_ptr + at, z.to(hat_ptr.dtype.element_ty), mask=live[:, None])
    if HAS_GAMMA:
        z = z * tl.load(gamma_ptr + cols).to(tl.float32)[None, :]
    if HAS_BETA:
        z = z + tl.load(beta_ptr + cols).to(tl.float32)[None, :]
    tl.store(y_ptr + at, z.to(y_ptr.dtype.element_ty), mask=live[:, None])
