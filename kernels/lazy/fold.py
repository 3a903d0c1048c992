"""Fold the affine part of a norm into the linear that follows it: one small kernel, run in every call.

folded = weight * gamma (rounded to the activation dtype);   colsum_n = sum_k folded_nk (of the rounded values);
offset_n = bias_n + sum_k weight_nk beta_k
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys_norm.kernels.lazy.common import INTERPRETED, rounded


@triton.jit(do_not_specialize=["N", "K"])
def fold_kernel(
    weight_ptr,  # [N, K] contiguous
    gamma_ptr,  # [K]
    beta_ptr,  # [K]
    bias_ptr,  # [N]
    folded_ptr,  # [N, K] contiguous, activation dtype
    colsum_ptr,  # [N] fp32
    offset_ptr,  # [N] fp32
    N,
    K,
    HAS_GAMMA: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WRITE: tl.constexpr,  # False: `folded` is the weight itself
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < N
    start = rows.to(tl.int64) * K
    colsum = tl.zeros((ROWS,), tl.float32)
    offset = tl.zeros((ROWS,), tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias_ptr + rows, mask=live, other=0.0).to(tl.float32)
    for k in range(0, K, BLOCK):
        cols = k + tl.arange(0, BLOCK)
        keep = live[:, None] & (cols < K)[None, :]
        at = start[:, None] + cols[None, :]
        weight = tl.load(weight_ptr + at, mask=keep, other=0.0).to(tl.float32)
        if HAS_BETA:
            beta = tl.load(beta_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
            offset += tl.sum(weight * beta[None, :], 1)
        if HAS_GAMMA:
            weight = weight * tl.load(gamma_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)[None, :]
        folded = rounded(weight, folded_ptr.dtype.element_ty)
        if WRITE:
            tl.store(folded_ptr + at, folded, mask=keep)
        colsum += tl.sum(folded.to(tl.float32), 1)
    tl.store(colsum_ptr + rows, colsum, mask=live)
    tl.store(offset_ptr + rows, offset, mask=live)


@dataclass(frozen=True)
class Folded:
    """A linear with the norm's affine part folded in; `offset` is None where it would be zero."""

    weight: Tensor  # [N, K], activation dtype
    colsum: Tensor  # [N] fp32
    offset: Tensor | None  # [N]


def fold(
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    dtype: torch.dtype,
    *,
    colsum: bool,
) -> Folded:
    """Fold for activations of `dtype`. `colsum` says whether the column sums are wanted; where nothing is to be folded
    and they are not, no kernel runs."""
    N, K = weight.shape
    write = gamma is not None or weight.dtype != dtype
    if not (write or beta is not None or colsum):
        return Folded(weight, weight.new_empty(0, dtype=torch.float32), bias)
    folded = torch.empty_like(weight, dtype=dtype) if write else weight
    sums = torch.empty(2, N, device=weight.device, dtype=torch.float32)
    rows, block = (64, 512) if INTERPRETED else (4, min(1024, triton.next_power_of_2(K)))
    fold_kernel[(triton.cdiv(N, rows),)](
        weight,
        gamma,
        beta,
        bias,
        folded,
        sums[0],
        sums[1],
        N,
        K,
        HAS_GAMMA=gamma is not None,
        HAS_BETA=beta is not None,
        HAS_BIAS=bias is not None,
        WRITE=write,
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
    )
    return Folded(folded, sums[0], sums[1] if bias is not None or beta is not None else None)
