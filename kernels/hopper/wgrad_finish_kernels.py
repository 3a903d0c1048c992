"""What finishes the gradients of norm_linear's parameters, after the partials of wgrad_kernels.py:

    dW' = sum of the partials, for layer norm minus the mean of each of its rows
    dweight = dW' * gamma + outer(s, beta);   dgamma_k = sum_n weight_nk dW'_nk;   dbeta = weight^T s;   dbias = s

`finish_kernel` adds the partials up, always in the same order, and applies the affine part; `norms_kernel` does the last
sum of dgamma and dbeta. Both are launched before the kernel before them has ended, and wait for that.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .variants import Variant


@triton.jit
def finish_kernel(
    partial_ptr,  # [splits, N, K] fp32
    sums_ptr,  # [shares, 2, N] fp32
    weight_ptr,  # [N, K]
    gamma_ptr,  # [K] or null, like beta in the weight's dtype
    beta_ptr,  # [K] or null
    dweight_ptr,  # [N, K], like dbias in the weight's dtype
    dbias_ptr,  # [N]
    norm_ptr,  # [row blocks, 2, K] fp32: partial dgamma and dbeta
    N,
    K,
    splits,
    shares,
    LAYER: tl.constexpr,
    SPLITS: tl.constexpr,  # partials added at a time
    SHARES: tl.constexpr,  # and partial sums
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    gdc_launch_dependents()
    gdc_wait()
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    cols = tl.program_id(1) * BK + tl.arange(0, BK)
    live, inside = rows < N, cols < K
    keep = live[:, None] & inside[None, :]
    at = rows[:, None] * K + cols[None, :]
    part = tl.arange(0, SPLITS)
    total = tl.zeros((BN, BK), tl.float32)
    dy_sum = tl.zeros((BN,), tl.float32)
    across = tl.zeros((BN,), tl.float32)
    for start in range(0, splits, SPLITS):
        s = start + part
        there = s < splits
        block = partial_ptr + s.to(tl.int64)[:, None, None] * N * K + at[None, :, :]
        total += tl.sum(tl.load(block, mask=there[:, None, None] & keep[None, :, :], other=0.0), 0)
    share = tl.arange(0, SHARES)
    for start in range(0, shares, SHARES):
        s = start + share
        sums = sums_ptr + s[:, None] * (2 * N) + rows[None, :]
        mask = (s < shares)[:, None] & live[None, :]
        dy_sum += tl.sum(tl.load(sums, mask=mask, other=0.0), 0)
        if LAYER:
            across += tl.sum(tl.load(sums + N, mask=mask, other=0.0), 0)
    if LAYER:
        total -= (across / K)[:, None]
    weight = tl.load(weight_ptr + at, mask=keep, other=0.0).to(tl.float32)
    place = norm_ptr + tl.program_id(0) * (2 * K) + cols
    tl.store(place, tl.sum(tl.where(keep, weight * total, 0.0), 0), mask=inside)
    tl.store(place + K, tl.sum(weight * dy_sum[:, None], 0), mask=inside)
    gamma = tl.load(gamma_ptr + cols, mask=inside & (gamma_ptr.to(tl.int64) != 0), other=1.0).to(tl.float32)
    beta = tl.load(beta_ptr + cols, mask=inside & (beta_ptr.to(tl.int64) != 0), other=0.0).to(tl.float32)
    dweight = total * gamma[None, :] + dy_sum[:, None] * beta[None, :]
    tl.store(dweight_ptr + at, dweight.to(dweight_ptr.dtype.element_ty), mask=keep)
    if tl.program_id(1) == 0:
        tl.store(dbias_ptr + rows, dy_sum.to(dbias_ptr.dtype.element_ty), mask=live)


@triton.jit
def norms_kernel(
    norm_ptr,  # [row blocks, 2, K] fp32: partial dgamma and dbeta
    dgamma_ptr,  # [K]
    dbeta_ptr,  # [K]; written for layer norm
    row_blocks,
    K,
    LAYER: tl.constexpr,
    ROWS: tl.constexpr,  # partials added at a time
    BK: tl.constexpr,
):
    gdc_wait()
    cols = tl.program_id(0) * BK + tl.arange(0, BK)
    inside = cols < K
    dgamma = tl.zeros((BK,), tl.float32)
    dbeta = tl.zeros((BK,), tl.float32)
    for start in range(0, row_blocks, ROWS):
        blocks = start + tl.arange(0, ROWS)
        place = norm_ptr + blocks[:, None] * (2 * K) + cols[None, :]
        mask = (blocks < row_blocks)[:, None] & inside[None, :]
        dgamma += tl.sum(tl.load(place, mask=mask, other=0.0), 0)
        if LAYER:
            dbeta += tl.sum(tl.load(place + K, mask=mask, other=0.0), 0)
    tl.store(dgamma_ptr + cols, dgamma.to(dgamma_ptr.dtype.element_ty), mask=inside)
    if LAYER:
        tl.store(dbeta_ptr + cols, dbeta.to(dbeta_ptr.dtype.element_ty), mask=inside)


def variants():
    for dtype in ("bf16", "fp16", "fp32"):
        for norm in ("rms", "layer"):
            for form, (together, bn) in {"few": (2, 32), "many": (16, 8)}.items():
                args = {"partial_ptr": "*fp32:16", "sums_ptr": "*fp32:16", "weight_ptr": f"*{dtype}:16"}
                args |= {"gamma_ptr": f"*{dtype}:16", "beta_ptr": f"*{dtype}:16", "dweight_ptr": f"*{dtype}:16"}
                args |= {
                    "dbias_ptr": f"*{dtype}:16",
                    "norm_ptr": "*fp32:16",
                    "N": "i32:8",
                    "K": "i32:8",
                    "splits": "i32",
                }
                args |= {"shares": "i32", "LAYER": norm == "layer", "SPLITS": together}
                args |= {"SHARES": 32, "BN": bn, "BK": 64}
                yield Variant(f"dw_finish_{norm}_{dtype}_{form}", finish_kernel, args)
            args = {"norm_ptr": "*fp32:16", "dgamma_ptr": f"*{dtype}:16", "dbeta_ptr": f"*{dtype}:16"}
            args |= {"row_blocks": "i32", "K": "i32:8", "LAYER": norm == "layer", "ROWS": 32, "BK": 32}
            yield Variant(f"dw_norms_{norm}_{dtype}", norms_kernel, args)


VARIANTS = [*variants()]
