"""LayerNorm and RMSNorm over rows, backward: Triton kernels.

With zhat the normalised row, a = zhat * weight + bias, y = act(a) and dy the gradient at y:

    da = dy * act'(a);   t = da * weight;   dz = rstd * (t - mean(t) - zhat * mean(t * zhat)) (+ gradient of z itself)
    dweight = sum_rows da * zhat;   dbias = sum_rows da;   and sum_rows dz, the bias gradient of a linear that made z

without mean(t) for RMSNorm. Column sums are fp32 partials of a grid whose size depends on the problem and the GPU only,
added up by one small kernel: no atomics, the same bits in every run.
"""

import triton
import triton.language as tl

from recsys_norm.kernels.activations import activate_with_slope
from recsys_norm.kernels.norm.forward import aligned, centred, subtract_rest


@triton.jit
def through_activation(dy, hat, weight, bias, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, NAME: tl.constexpr):
    """(act(a), dy * act'(a)) of a = hat * weight + bias; weight and bias have hat's rank."""
    a = hat
    if HAS_WEIGHT:
        a = a * weight
    if HAS_BIAS:
        a = a + bias
    if NAME == "identity":
        h = a
        da = dy
    else:
        h, slope = activate_with_slope(a, NAME)
        da = dy * slope
    return h, da


@triton.jit(do_not_specialize=["M", "N", "stride_dy", "stride_z", "stride_dsum"])
def backward_kernel(
    dy_ptr,  # [M, N], row stride stride_dy
    z_ptr,  # [M, N], row stride stride_z: the row before the norm, or zhat itself (HAT)
    dsum_ptr,  # [M, N], row stride stride_dsum: gradient of z from elsewhere
    weight_ptr,
    bias_ptr,
    mean_ptr,  # [M] fp32
    rstd_ptr,  # [M] fp32
    dz_ptr,  # [M, N] contiguous
    h_ptr,  # [M, N] contiguous: y again, for the gradient of a linear that follows
    partial_ptr,  # [sums, programs, N] fp32, sums in the order weight, bias, z
    M,
    N,
    stride_dy,
    stride_z,
    stride_dsum,
    LAYER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAT: tl.constexpr,
    ADD_DSUM: tl.constexpr,
    WRITE_DZ: tl.constexpr,
    WRITE_H: tl.constexpr,
    SUM_WEIGHT: tl.constexpr,
    SUM_BIAS: tl.constexpr,
    SUM_DZ: tl.constexpr,
    REFINE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A block of ROWS whole rows at a time, grid-strided; column sums stay in registers until the program ends."""
    N = aligned(N, VEC)
    stride_dy = aligned(stride_dy, VEC)
    stride_z = aligned(stride_z, VEC)
    stride_dsum = aligned(stride_dsum, VEC)
    reciprocal = tl.div_rn(1.0, N.to(tl.float32))
    cols = tl.arange(0, BLOCK)
    weight = tl.zeros((1, BLOCK), tl.float32)
    bias = tl.zeros((1, BLOCK), tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    sum_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    sum_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    sum_dz = tl.zeros((ROWS, BLOCK), tl.float32)

    for block in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        keep = (rows < M)[:, None] & (cols < N)[None, :]
        out = rows[:, None] * N + cols[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * stride_dy + cols[None, :], mask=keep, other=0.0).to(tl.float32)
        hat = tl.load(z_ptr + rows[:, None] * stride_z + cols[None, :], mask=keep, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        if not HAT:
            if LAYER:
                mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
                hat, rest = centred(hat, mean, reciprocal, cols, N, REFINE)
                hat = subtract_rest(hat, rest, cols, N, REFINE)
            hat = hat * rstd[:, None]
        h, da = through_activation(dy, hat, weight, bias, HAS_WEIGHT, HAS_BIAS, ACTIVATION)
        if WRITE_H:
            tl.store(h_ptr + out, h.to(h_ptr.dtype.element_ty), mask=keep)
        if SUM_WEIGHT:
            sum_weight += da * hat
        if SUM_BIAS:
            sum_bias += da
        if WRITE_DZ or SUM_DZ:
            if HAS_WEIGHT:
                da = da * weight
            dz = da - hat * (tl.sum(da * hat, 1) * reciprocal)[:, None]
            if LAYER:
                dz = dz - (tl.sum(da, 1) * reciprocal)[:, None]
            dz = dz * rstd[:, None]
            if ADD_DSUM:
                dz += tl.load(
                    dsum_ptr + rows[:, None] * stride_dsum + cols[None, :], mask=keep, other=0.0
                ).to(tl.float32)
            if WRITE_DZ:
                tl.store(dz_ptr + out, dz.to(dz_ptr.dtype.element_ty), mask=keep)
            if SUM_DZ:
                sum_dz += dz

    place = tl.program_id(0).to(tl.int64) * N + cols
    next_sum = tl.num_programs(0).to(tl.int64) * N
    if SUM_WEIGHT:
        tl.store(partial_ptr + place, tl.sum(sum_weight, 0), mask=cols < N)
        place += next_sum
    if SUM_BIAS:
        tl.store(partial_ptr + place, tl.sum(sum_bias, 0), mask=cols < N)
        place += next_sum
    if SUM_DZ:
        tl.store(partial_ptr + place, tl.sum(sum_dz, 0), mask=cols < N)


@triton.jit
def load_hat(z_ptr, cols, keep, mean, rest, rstd, HAT: tl.constexpr):
    hat = tl.load(z_ptr + cols, mask=keep, other=0.0).to(tl.float32)
    if not HAT:
        hat = ((hat - mean) - rest) * rstd
    return hat


@triton.jit(do_not_specialize=["M", "N", "stride_dy", "stride_z", "stride_dsum"])
def backward_wide_kernel(
    dy_ptr,
    z_ptr,
    dsum_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rest_ptr,  # [M] fp32, written where REFINE: what is left of the mean of z - mean, for columns_kernel
    rstd_ptr,
    dz_ptr,
    h_ptr,
    M,
    N,
    stride_dy,
    stride_z,
    stride_dsum,
    LAYER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAT: tl.constexpr,
    ADD_DSUM: tl.constexpr,
    WRITE_DZ: tl.constexpr,
    WRITE_H: tl.constexpr,
    REFINE: tl.constexpr,
    CHUNK: tl.constexpr,
    VEC: tl.constexpr,
):
    """dz and h for rows of any width: one row per program, in chunks. Column sums are columns_kernel's."""
    N = aligned(N, VEC)
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * aligned(stride_dy, VEC)
    z_ptr += row * aligned(stride_z, VEC)
    lanes = tl.arange(0, CHUNK)
    reciprocal = tl.div_rn(1.0, N.to(tl.float32))
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    rest = 0.0
    if LAYER and not HAT:
        mean = tl.load(mean_ptr + row)
        if REFINE:
            total = tl.zeros((CHUNK,), tl.float32)
            for start in tl.range(0, N, CHUNK):
                cols = start + lanes
                z = tl.load(z_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
                total += tl.where(cols < N, z - mean, 0.0)
            rest = tl.sum(total, 0) * reciprocal
            tl.store(rest_ptr + row, rest)
    sum_t = tl.zeros((CHUNK,), tl.float32)
    sum_t_hat = tl.zeros((CHUNK,), tl.float32)
    for start in tl.range(0, N, CHUNK):
        cols = start + lanes
        keep = cols < N
        dy = tl.load(dy_ptr + cols, mask=keep, other=0.0).to(tl.float32)
        hat = load_hat(z_ptr, cols, keep, mean, rest, rstd, HAT)
        weight = tl.load(weight_ptr + cols, mask=keep, other=0.0).to(tl.float32) if HAS_WEIGHT else 1.0
        bias = tl.load(bias_ptr + cols, mask=keep, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
        h, t = through_activation(dy, hat, weight, bias, HAS_WEIGHT, HAS_BIAS, ACTIVATION)
        if WRITE_H:
            tl.store(h_ptr + row * N + cols, h.to(h_ptr.dtype.element_ty), mask=keep)
        t = t * weight
        sum_t += t
        sum_t_hat += t * hat
    if WRITE_DZ:
        mean_t = tl.sum(sum_t, 0) * reciprocal if LAYER else 0.0
        mean_t_hat = tl.sum(sum_t_hat, 0) * reciprocal
        for start in tl.range(0, N, CHUNK):
            cols = start + lanes
            keep = cols < N
            dy = tl.load(dy_ptr + cols, mask=keep, other=0.0).to(tl.float32)
            hat = load_hat(z_ptr, cols, keep, mean, rest, rstd, HAT)
            weight = tl.load(weight_ptr + cols, mask=keep, other=0.0).to(tl.float32) if HAS_WEIGHT else 1.0
            bias = tl.load(bias_ptr + cols, mask=keep, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
            _, t = through_activation(dy, hat, weight, bias, HAS_WEIGHT, HAS_BIAS, ACTIVATION)
            dz = rstd * (t * weight - mean_t - hat * mean_t_hat)
            if ADD_DSUM:
                dsum_row = dsum_ptr + row * aligned(stride_dsum, VEC)
                dz += tl.load(dsum_row + cols, mask=keep, other=0.0).to(tl.float32)
            tl.store(dz_ptr + row * N + cols, dz.to(dz_ptr.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["M", "N", "stride_dy", "stride_z"])
def columns_kernel(
    dy_ptr,
    z_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rest_ptr,
    rstd_ptr,
    partial_ptr,  # [sums, programs, N] fp32, sums in the order weight, bias
    M,
    N,
    stride_dy,
    stride_z,
    LAYER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAT: tl.constexpr,
    SUM_WEIGHT: tl.constexpr,
    SUM_BIAS: tl.constexpr,
    REFINE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    VEC: tl.constexpr,
):
    """Partial sums over rows of da (or of dy as it is) and of da * zhat, for one block of columns."""
    N = aligned(N, VEC)
    stride_dy = aligned(stride_dy, VEC)
    stride_z = aligned(stride_z, VEC)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    keep_cols = cols < N
    sum_weight = tl.zeros((ROWS, COLS), tl.float32)
    sum_bias = tl.zeros((ROWS, COLS), tl.float32)
    weight = tl.zeros((1, COLS), tl.float32)
    bias = tl.zeros((1, COLS), tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=keep_cols, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=keep_cols, other=0.0).to(tl.float32)[None, :]
    for block in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        rows = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        keep_rows = rows < M
        keep = keep_rows[:, None] & keep_cols[None, :]
        da = tl.load(dy_ptr + rows[:, None] * stride_dy + cols[None, :], mask=keep, other=0.0).to(tl.float32)
        if SUM_WEIGHT or ACTIVATION != "identity":
            hat = tl.load(z_ptr + rows[:, None] * stride_z + cols[None, :], mask=keep, other=0.0).to(tl.float32)
            if not HAT:
                if LAYER:
                    hat -= tl.load(mean_ptr + rows, mask=keep_rows, other=0.0)[:, None]
                    if REFINE:
                        hat -= tl.load(rest_ptr + rows, mask=keep_rows, other=0.0)[:, None]
                hat *= tl.load(rstd_ptr + rows, mask=keep_rows, other=0.0)[:, None]
            _, da = through_activation(da, hat, weight, bias, HAS_WEIGHT, HAS_BIAS, ACTIVATION)
            if SUM_WEIGHT:
                sum_weight += da * hat
        if SUM_BIAS:
            sum_bias += da
    place = tl.program_id(0).to(tl.int64) * N + cols
    if SUM_WEIGHT:
        tl.store(partial_ptr + place, tl.sum(sum_weight, 0), mask=keep_cols)
        place += tl.num_programs(0).to(tl.int64) * N
    if SUM_BIAS:
        tl.store(partial_ptr + place, tl.sum(sum_bias, 0), mask=keep_cols)


@triton.jit(do_not_specialize=["programs", "N"])
def reduce_kernel(
    partial_ptr,  # [sums, programs, N] fp32
    first_ptr,  # [N] each, any dtype; one per sum
    second_ptr,
    third_ptr,
    programs,
    N,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Add up the partials of one sum for one block of columns."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    which = tl.program_id(1)
    partial_ptr += which.to(tl.int64) * programs * N
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in tl.range(0, programs, ROWS):
        rows = start + tl.arange(0, ROWS)
        keep = (rows < programs)[:, None] & (cols < N)[None, :]
        total += tl.load(partial_ptr + rows[:, None].to(tl.int64) * N + cols[None, :], mask=keep, other=0.0)
    column = tl.sum(total, 0)
    if which == 0:
        tl.store(first_ptr + cols, column.to(first_ptr.dtype.element_ty), mask=cols < N)
    if SUMS > 1:
        if which == 1:
            tl.store(second_ptr + cols, column.to(second_ptr.dtype.element_ty), mask=cols < N)
    if SUMS > 2:
        if which == 2:
            tl.store(third_ptr + cols, column.to(third_ptr.dtype.element_ty), mask=cols < N)
