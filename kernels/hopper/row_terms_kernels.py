"""What the post-norm's backward needs of whole rows, so that it can be done a head at a time afterwards
(attention_staged_kernels.py). With zhat the post-norm's output before weight and bias, r its reciprocal deviation and
D the width of a row:

    t = dout weight    c1 = sum(t) / D (layer norm only)    c2 = sum(t zhat) / D    means = (-c1, -c2)
    dweight = sum_rows dout zhat    dbias = sum_rows dout    as fp32 partials of each program, no atomics

so that the gradient at the norm's input is r (t - c1 - c2 zhat). For the kernel that follows, the parameters are also
copied, as fp32 and with what absent ones stand for, and its flags cleared, which saves launches.
"""

import triton
import triton.language as tl

from .variants import Variant


@triton.jit
def parameter(narrow_ptr, wide_ptr, narrow, cols, D, absent: tl.constexpr):
    """A parameter in bf16 or fp32, `absent` without one."""
    there = (cols < D) & (wide_ptr.to(tl.int64) != 0)
    short = tl.load(narrow_ptr + cols, mask=there & (narrow != 0), other=absent).to(tl.float32)
    long = tl.load(wide_ptr + cols, mask=there & (narrow == 0), other=absent)
    return tl.where(narrow != 0, short, long)


@triton.jit
def row_terms_kernel(
    dout_ptr,  # [T, D] bf16, rows dout_pitch apart
    hat_ptr,  # [T, D] bf16
    weight_ptr,  # [D] in bf16 (narrow) or fp32, or null, of the post-norm; then weight and bias of the pre-norm
    pre_weight_ptr,
    pre_bias_ptr,
    offsets_ptr,  # whose word `last` tells how many rows hold tokens
    means_ptr,  # [T, 2] fp32
    vectors_ptr,  # [3, D] fp32: weight and bias of the pre-norm, weight of the post-norm
    partial_ptr,  # [1 or 2, programs, D] fp32: of dweight and, if `biased`, of dbias
    flags_ptr,  # [flags] i32
    dout_pitch,
    hat_pitch,
    last,
    T,  # 0 without a post-norm: no rows are read
    D,
    narrow,
    layer,
    biased,
    flags,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    narrow_ptr = tl.pointer_type(tl.bfloat16)
    weight = parameter(weight_ptr.to(narrow_ptr), weight_ptr, narrow, cols, D, 1.0)
    if tl.program_id(0) == 0:
        pre_weight = parameter(pre_weight_ptr.to(narrow_ptr), pre_weight_ptr, narrow, cols, D, 1.0)
        pre_bias = parameter(pre_bias_ptr.to(narrow_ptr), pre_bias_ptr, narrow, cols, D, 0.0)
        tl.store(vectors_ptr + cols, pre_weight, mask=inside)
        tl.store(vectors_ptr + D + cols, pre_bias, mask=inside)
        tl.store(vectors_ptr + 2 * D + cols, weight, mask=inside)
        for first in range(0, flags, BLOCK):
            tl.store(flags_ptr + first + cols, tl.zeros((BLOCK,), tl.int32), mask=first + cols < flags)
    slope = -1.0 / D
    shift = tl.where(layer != 0, slope, 0.0)
    sum_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    sum_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    live = tl.minimum(tl.load(offsets_ptr + last), T)
    for block in tl.range(tl.program_id(0), tl.cdiv(live, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = block * ROWS + tl.arange(0, ROWS)
        keep = (rows < live)[:, None] & inside[None, :]
        at = rows.to(tl.int64)[:, None]
        dout = tl.load(dout_ptr + at * dout_pitch + cols[None, :], mask=keep, other=0.0).to(tl.float32)
        hat = tl.load(hat_ptr + at * hat_pitch + cols[None, :], mask=keep, other=0.0).to(tl.float32)
        product = dout * hat
        sum_weight += product
        sum_bias += dout
        c1 = tl.sum(dout * weight[None, :], 1)
        c2 = tl.sum(product * weight[None, :], 1)
        tl.store(means_ptr + 2 * rows.to(tl.int64), shift * c1, mask=rows < live)
        tl.store(means_ptr + 2 * rows.to(tl.int64) + 1, slope * c2, mask=rows < live)
    place = tl.program_id(0).to(tl.int64) * D + cols
    tl.store(partial_ptr + place, tl.sum(sum_weight, 0), mask=inside)
    if biased != 0:
        tl.store(partial_ptr + tl.num_programs(0).to(tl.int64) * D + place, tl.sum(sum_bias, 0), mask=inside)


# Longest row -> rows of a step, warps: those of ../norm/configs.py, which keep the most loads in flight.
SHAPES = {128: (4, 1), 256: (2, 1), 512: (1, 1), 1024: (1, 2), 2048: (1, 4)}


def variants():
    for block, (rows, warps) in SHAPES.items():
        args = {"dout_ptr": "*bf16:16", "hat_ptr": "*bf16:16"}
        args |= {f"{x}_ptr": "*fp32:16" for x in ("weight", "pre_weight", "pre_bias")}
        args |= {"offsets_ptr": "*i32", "means_ptr": "*fp32:16", "vectors_ptr": "*fp32:16", "partial_ptr": "*fp32:16"}
        args |= {"flags_ptr": "*i32:16"}
        args |= {"dout_pitch": "i64:8", "hat_pitch": "i64:8", "last": "i32", "T": "i32", "D": "i32:16"}
        args |= {
            "narrow": "i32",
            "layer": "i32",
            "biased": "i32",
            "flags": "i32",
            "BLOCK": block,
            "ROWS": rows,
            "STAGES": 3,
        }
        yield Variant(f"row_terms_{block}", row_terms_kernel, args, num_warps=warps)


VARIANTS = list(variants())
