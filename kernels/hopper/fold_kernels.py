"""Fold the affine part of a norm into the linear that follows it: one small kernel, run in every call.

    folded = weight * gamma, rounded to the activation dtype;   offset_n = bias_n + sum_k weight_nk beta_k

CENTRE, for layer norm: every row of `folded` sums to zero. LN needs (x - mean) W'^T; with centred rows the mean drops
out of x W'^T by itself, so that the GEMM's epilogue has no term in the mean. Subtracting the row's mean and rounding is
not enough: the roundings of 512 values sum to about 6 units in the last place, which a mean of a few deviations
multiplies into a visible error. So the shift is corrected until the ROUNDED values sum to zero, and what is left goes
to the smallest value of the row, whose own rounding is some 500 times finer. Weights that are 16-bit numbers already
would all round the same way after the shift, and the sum would jump past zero: a dither of half a unit in the last
place, a fixed pattern over the columns, makes it follow the shift.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from .variants import Variant


@triton.jit
def dithered(value, dither, dtype: tl.constexpr):
    """`value` rounded to `dtype` after adding `dither` units in its last place."""
    power = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    unit: tl.constexpr = 2.0**-7 if dtype == tl.bfloat16 else 2.0**-10
    return (value + dither * power * unit).to(dtype)


@triton.jit
def centred(folded, keep, cols, K, dtype: tl.constexpr):
    """Rows minus their mean, in `dtype`, such that the rounded values sum to zero."""
    golden = cols.to(tl.float32) * 0.6180339887
    dither = (golden - tl.floor(golden) - 0.5)[None, :]
    shift = -tl.sum(folded, 1) / K
    result = dithered(folded + shift[:, None], dither, dtype)
    for _ in tl.static_range(2):
        left = tl.sum(tl.where(keep, result.to(tl.float32), 0.0), 1)
        shift -= left / K
        result = dithered(folded + shift[:, None], dither, dtype)
    value = tl.where(keep, result.to(tl.float32), 0.0)
    left = tl.sum(value, 1)
    size = tl.where(keep, tl.abs(value), float("inf"))
    place = tl.min(tl.where(size == tl.min(size, 1)[:, None], cols[None, :], K), 1)
    return tl.where(cols[None, :] == place[:, None], value - left[:, None], value)


@triton.jit
def fold_kernel(
    weight_ptr,  # [N, K] contiguous, K a multiple of 8
    gamma_ptr,  # [K] or null, like beta and bias in the weight's dtype
    beta_ptr,  # [K] or null
    bias_ptr,  # [N] or null
    folded_ptr,  # [N, K] contiguous; null: `folded` is the weight itself and only the offset is wanted
    offset_ptr,  # [N] fp32
    N,
    K,
    CENTRE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least K
):
    gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    inside = cols < K
    keep = (rows < N)[:, None] & inside[None, :]
    at = rows.to(tl.int64)[:, None] * K + cols[None, :]
    weight = tl.load(weight_ptr + at, mask=keep, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + cols, mask=inside & (beta_ptr.to(tl.int64) != 0), other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + rows, mask=(rows < N) & (bias_ptr.to(tl.int64) != 0), other=0.0).to(tl.float32)
    tl.store(offset_ptr + rows, bias + tl.sum(weight * beta[None, :], 1), mask=rows < N)
    gamma = tl.load(gamma_ptr + cols, mask=inside & (gamma_ptr.to(tl.int64) != 0), other=1.0).to(tl.float32)
    folded = weight * gamma[None, :]
    dtype: tl.constexpr = folded_ptr.dtype.element_ty
    if CENTRE:
        folded = centred(folded, keep, cols, K, dtype)
    tl.store(folded_ptr + at, folded.to(dtype), mask=keep & (folded_ptr.to(tl.int64) != 0))


def variants():
    """One per dtype of the parameters and of the activations, norm, and longest row."""
    for parameter, activation in (("bf16", "bf16"), ("fp32", "bf16"), ("fp16", "fp16"), ("fp32", "fp16")):
        for centre in (False, True):
            for block, rows, warps in ((512, 4, 4), (2048, 1, 4), (8192, 1, 16)):
                pointers = {f"{name}_ptr": f"*{parameter}:16" for name in ("weight", "gamma", "beta", "bias")}
                args = {
                    **pointers,
                    "folded_ptr": f"*{activation}:16",
                    "offset_ptr": "*fp32:16",
                    "N": "i32",
                    "K": "i32:8",
                }
                args |= {"CENTRE": centre, "ROWS": rows, "BLOCK": block}
                name = f"fold_{'centred_' if centre else ''}{parameter}_{activation}_{block}"
                yield Variant(name, fold_kernel, args, num_warps=warps)


VARIANTS = list(variants())
