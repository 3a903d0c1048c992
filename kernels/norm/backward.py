"""LayerNorm and RMSNorm over rows, backward: Triton kernels.

With zhat the normalised row, a = zhat * weight + bias, y = act(a) and dy the gradient at y:

    da = dy * act'(a);   t = da * weight;   dz = rstd * (t - mean(t) - zhat * mean(t * zhat)) (+ gradient of z itself)
    dweight = sum_rows da * zhat;   dbias = sum_rows da;   and sum_rows dz, the bias gradient of a linear that made z

without mean(t) for RMSNorm. Column sums are fp32 partials of a grid whose size depends on the problem and the GPU only,
added up by one small kernel: no atomics, the same bits in every run.
"""

import triton
import triton.language as tl

from recsys_norm.kernels.activations import IDENTITY, activate_with_slope
from recsys_norm.kernels.norm.forward import affine_cols, live_rows


@triton.jit
def through_activation(
    dy,
    hat,
    weight,
    bias,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACT: tl.constexpr,
    FAST: tl.constexpr,
):
    """(act(a), dy * act'(a)) of a = hat * weight + bias; weight and bias have hat's rank."""
    a = hat
    if HAS_WEIGHT:
        a = a * weight
    if HAS_BIAS:
        a = a + bias
    if ACT == IDENTITY:
        h = a
        da = dy
    else:
        h, slope = activate_with_slope(a, ACT, FAST)
        da = dy * slope
    return h, da


@triton.jit
def first_element(z, row_ptr, live, cols, STAGES: tl.constexpr):
    """[ROWS, 1]: z[:, 0], read again, or taken from the tile where the loop is pipelined: narrow loads are not."""
    if STAGES > 1:
        first = tl.sum(tl.where(cols == 0, z, 0.0), 1)
    else:
        first = tl.load(row_ptr, mask=live, other=0.0).to(tl.float32)
    return first[:, None]


@triton.jit
def standardized(z, first, mean, rstd, LAYER: tl.constexpr, SHIFT: tl.constexpr):
    """zhat of the row z from its first element and its mean relative to that; first, mean and rstd have z's rank. For
    16-bit rows the mean itself may be formed in fp32 (see `forward.centred`)."""
    if LAYER:
        if SHIFT:
            z = (z - first) - mean
        else:
            z = z - (first + mean)
    return z * rstd


@triton.jit
def store_sums(
    partial_ptr, sum_weight, sum_bias, sum_dz, N, SUM_WEIGHT: tl.constexpr, SUM_BIAS: tl.constexpr, SUM_DZ: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program's [ROWS, BLOCK] sums: over its rows, or row by row where rows are of different groups."""
    cols = tl.arange(0, BLOCK)
    if GROUPS > 1:
        rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        place = (rows * N)[:, None] + cols[None, :]
        next_sum = tl.num_programs(0).to(tl.int64) * ROWS * N
        mask = cols[None, :] < N
    else:
        sum_weight = tl.sum(sum_weight, 0)
        sum_bias = tl.sum(sum_bias, 0)
        sum_dz = tl.sum(sum_dz, 0)
        place = tl.program_id(0).to(tl.int64) * N + cols
        next_sum = tl.num_programs(0).to(tl.int64) * N
        mask = cols < N
    if SUM_WEIGHT:
        tl.store(partial_ptr + place, sum_weight, mask=mask)
        place += next_sum
    if SUM_BIAS:
        tl.store(partial_ptr + place, sum_bias, mask=mask)
        place += next_sum
    if SUM_DZ:
        tl.store(partial_ptr + place, sum_dz, mask=mask)


@triton.jit(
    do_not_specialize=[
        "M",
        "N",
        "stride_dy",
        "stride_z",
        "stride_more",
        "stride_dsum",
        "last",
        "heads",
        "reciprocal",
    ],  # fmt: skip
)
def backward_kernel(
    dy_ptr,  # [M, N], row stride stride_dy
    z_ptr,  # [M, N], row stride stride_z: the row before the norm, or zhat itself (HAT)
    more_ptr,  # [M, N], row stride stride_more: another part of dy (MORE)
    dsum_ptr,  # [M, N], row stride stride_dsum: a gradient of z from elsewhere (DSUM)
    weight_ptr,  # [GROUPS * N], see forward.affine_cols
    bias_ptr,
    mean_ptr,  # [M] fp32, relative to the row's first element
    rstd_ptr,  # [M] fp32
    offsets_ptr,  # see forward.live_rows; where rows are cut, the gradients of the others are 0
    dz_ptr,  # [M, N] contiguous
    h_ptr,  # [M, N] contiguous: y again, for the gradient of a linear that follows
    partial_ptr,  # [sums, programs, N] fp32, sums in the order weight, bias, z; GROUPS > 1: [sums, programs * ROWS, N]
    M,
    N,
    stride_dy,
    stride_z,
    stride_more,
    stride_dsum,
    last,
    heads,
    reciprocal,  # 1 / N
    LAYER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FAST: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAT: tl.constexpr,
    MORE: tl.constexpr,
    DSUM: tl.constexpr,
    CUT: tl.constexpr,
    WRITE_DZ: tl.constexpr,
    WRITE_H: tl.constexpr,
    SUM_WEIGHT: tl.constexpr,
    SUM_BIAS: tl.constexpr,
    SUM_DZ: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A block of ROWS whole rows at a time, grid-strided; column sums stay in registers until the program ends. dy is 0
    in padded lanes and cut rows, which keeps them out of every sum.

    With GROUPS > 1, the number of rows of a whole turn of the grid is a multiple of GROUPS, so that a row of the block is
    always of the same group, and each such row has sums of its own.
    """
    N *= VEC
    stride_dy *= VEC
    stride_z *= VEC
    stride_more *= VEC
    stride_dsum *= VEC
    cols = tl.arange(0, BLOCK)[None, :]
    in_row = cols < N
    live = live_rows(M, offsets_ptr, last, heads, CUT)
    weight = tl.zeros((1, BLOCK), tl.float32)
    bias = tl.zeros((1, BLOCK), tl.float32)
    affine = affine_cols(tl.program_id(0) * ROWS + tl.arange(0, ROWS), cols, N, GROUPS)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + affine, mask=in_row, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + affine, mask=in_row, other=0.0).to(tl.float32)
    sum_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    sum_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    sum_dz = tl.zeros((ROWS, BLOCK), tl.float32)

    for block in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        keep = (rows < live)[:, None] & in_row
        in_tensor = (rows < M)[:, None] & in_row
        out = (rows * N)[:, None] + cols
        dy = tl.load(dy_ptr + (rows * stride_dy)[:, None] + cols, mask=keep, other=0.0).to(tl.float32)
        hat = tl.load(z_ptr + (rows * stride_z)[:, None] + cols, mask=keep, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < live, other=0.0)[:, None]
        if MORE:
            dy += tl.load(more_ptr + (rows * stride_more)[:, None] + cols, mask=keep, other=0.0).to(tl.float32)
        if DSUM:
            dsum = tl.load(dsum_ptr + (rows * stride_dsum)[:, None] + cols, mask=keep, other=0.0).to(tl.float32)
        if not HAT:
            first = rstd
            mean = rstd
            if LAYER:
                first = first_element(hat, z_ptr + rows * stride_z, rows < live, cols, STAGES)
                mean = tl.load(mean_ptr + rows, mask=rows < live, other=0.0)[:, None]
            hat = standardized(hat, first, mean, rstd, LAYER, SHIFT)
        h, da = through_activation(dy, hat, weight, bias, HAS_WEIGHT, HAS_BIAS, ACTIVATION, FAST)
        if WRITE_H:
            tl.store(h_ptr + out, h.to(h_ptr.dtype.element_ty), mask=in_tensor)
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
            dz = dz * rstd
            if DSUM:
                dz += dsum
            if WRITE_DZ:
                tl.store(dz_ptr + out, dz.to(dz_ptr.dtype.element_ty), mask=in_tensor)
            if SUM_DZ:
                sum_dz += dz

    store_sums(partial_ptr, sum_weight, sum_bias, sum_dz, N, SUM_WEIGHT, SUM_BIAS, SUM_DZ, GROUPS, ROWS, BLOCK)


@triton.jit
def load_hat(z_ptr, cols, keep, first, mean, rstd, LAYER: tl.constexpr, HAT: tl.constexpr):
    hat = tl.load(z_ptr + cols, mask=keep, other=0.0).to(tl.float32)
    if not HAT:
        hat = standardized(hat, first, mean, rstd, LAYER, True)
    return hat


@triton.jit(
    do_not_specialize=[
        "M",
        "N",
        "stride_dy",
        "stride_z",
        "stride_more",
        "stride_dsum",
        "last",
        "heads",
        "reciprocal",
    ],  # fmt: skip
)
def backward_wide_kernel(
    dy_ptr,
    z_ptr,
    more_ptr,
    dsum_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    offsets_ptr,
    dz_ptr,
    h_ptr,
    M,
    N,
    stride_dy,
    stride_z,
    stride_more,
    stride_dsum,
    last,
    heads,
    reciprocal,
    LAYER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FAST: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAT: tl.constexpr,
    MORE: tl.constexpr,
    DSUM: tl.constexpr,
    CUT: tl.constexpr,
    WRITE_DZ: tl.constexpr,
    WRITE_H: tl.constexpr,
    CHUNK: tl.constexpr,
    VEC: tl.constexpr,
):
    """dz and h for rows of any width: one row per program, in chunks. Column sums are columns_kernel's."""
    N *= VEC
    row = tl.program_id(0).to(tl.int64)
    live = row < live_rows(M, offsets_ptr, last, heads, CUT)
    dy_ptr += row * (stride_dy * VEC)
    z_ptr += row * (stride_z * VEC)
    if MORE:
        more_ptr += row * (stride_more * VEC)
    if DSUM:
        dsum_ptr += row * (stride_dsum * VEC)
    lanes = tl.arange(0, CHUNK)
    rstd = tl.load(rstd_ptr + row, mask=live, other=0.0)
    first = 0.0
    mean = 0.0
    if LAYER and not HAT:
        first = tl.load(z_ptr, mask=live, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=live, other=0.0)
    sum_t = tl.zeros((CHUNK,), tl.float32)
    sum_t_hat = tl.zeros((CHUNK,), tl.float32)
    for start in tl.range(0, N, CHUNK):
        cols = start + lanes
        in_row = cols < N
        keep = in_row & live
        dy = tl.load(dy_ptr + cols, mask=keep, other=0.0).to(tl.float32)
        if MORE:
            dy += tl.load(more_ptr + cols, mask=keep, other=0.0).to(tl.float32)
        hat = load_hat(z_ptr, cols, keep, first, mean, rstd, LAYER, HAT)
        weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32) if HAS_WEIGHT else 1.0
        bias = tl.load(bias_ptr + cols, mask=in_row, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
        h, t = through_activation(dy, hat, weight, bias, HAS_WEIGHT, HAS_BIAS, ACTIVATION, FAST)
        if WRITE_H:
            tl.store(h_ptr + row * N + cols, h.to(h_ptr.dtype.element_ty), mask=in_row)
        t = t * weight
        sum_t += t
        sum_t_hat += t * hat
    if WRITE_DZ:
        mean_t = tl.sum(sum_t, 0) * reciprocal if LAYER else 0.0
        mean_t_hat = tl.sum(sum_t_hat, 0) * reciprocal
        for start in tl.range(0, N, CHUNK):
            cols = start + lanes
            in_row = cols < N
            keep = in_row & live
            dy = tl.load(dy_ptr + cols, mask=keep, other=0.0).to(tl.float32)
            if MORE:
                dy += tl.load(more_ptr + cols, mask=keep, other=0.0).to(tl.float32)
            if DSUM:
                dsum = tl.load(dsum_ptr + cols, mask=keep, other=0.0).to(tl.float32)
            hat = load_hat(z_ptr, cols, keep, first, mean, rstd, LAYER, HAT)
            weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32) if HAS_WEIGHT else 1.0
            bias = tl.load(bias_ptr + cols, mask=in_row, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
            _, t = through_activation(dy, hat, weight, bias, HAS_WEIGHT, HAS_BIAS, ACTIVATION, FAST)
            dz = rstd * (t * weight - mean_t - hat * mean_t_hat)
            if DSUM:
                dz += dsum
            tl.store(dz_ptr + row * N + cols, dz.to(dz_ptr.dtype.element_ty), mask=in_row)


@triton.jit(
    do_not_specialize=["M", "N", "stride_dy", "stride_z", "stride_more", "stride_dsum", "last", "heads"],
)
def columns_kernel(
    dy_ptr,
    z_ptr,
    more_ptr,
    dsum_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    offsets_ptr,
    partial_ptr,  # [sums, programs, N] fp32, sums in the order weight, bias
    M,
    N,
    stride_dy,
    stride_z,
    stride_more,
    stride_dsum,
    last,
    heads,
    LAYER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FAST: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAT: tl.constexpr,
    MORE: tl.constexpr,
    DSUM: tl.constexpr,
    CUT: tl.constexpr,
    SUM_WEIGHT: tl.constexpr,
    SUM_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    VEC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Partial sums over rows of da (or of dy as it is) and of da * zhat, for one block of columns."""
    N *= VEC
    stride_dy *= VEC
    stride_z *= VEC
    stride_more *= VEC
    stride_dsum *= VEC
    live = live_rows(M, offsets_ptr, last, heads, CUT)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    in_row = cols < N
    sum_weight = tl.zeros((ROWS, COLS), tl.float32)
    sum_bias = tl.zeros((ROWS, COLS), tl.float32)
    weight = tl.zeros((1, COLS), tl.float32)
    bias = tl.zeros((1, COLS), tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(live, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        row_live = rows < live
        keep = row_live[:, None] & in_row
        da = tl.load(dy_ptr + (rows * stride_dy)[:, None] + cols, mask=keep, other=0.0).to(tl.float32)
        if MORE:
            da += tl.load(more_ptr + (rows * stride_more)[:, None] + cols, mask=keep, other=0.0).to(tl.float32)
        if SUM_WEIGHT or ACTIVATION != IDENTITY:
            hat = tl.load(z_ptr + (rows * stride_z)[:, None] + cols, mask=keep, other=0.0).to(tl.float32)
            if not HAT:
                rstd = tl.load(rstd_ptr + rows, mask=row_live, other=0.0)[:, None]
                first = rstd
                mean = rstd
                if LAYER:
                    first = tl.load(z_ptr + rows * stride_z, mask=row_live, other=0.0).to(tl.float32)[:, None]
                    mean = tl.load(mean_ptr + rows, mask=row_live, other=0.0)[:, None]
                hat = standardized(hat, first, mean, rstd, LAYER, True)
            _, da = through_activation(da, hat, weight, bias, HAS_WEIGHT, HAS_BIAS, ACTIVATION, FAST)
            if SUM_WEIGHT:
                sum_weight += da * hat
        if SUM_BIAS:
            sum_bias += da
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    place = tl.program_id(0).to(tl.int64) * N + cols
    if SUM_WEIGHT:
        tl.store(partial_ptr + place, tl.sum(sum_weight, 0), mask=cols < N)
        place += tl.num_programs(0).to(tl.int64) * N
    if SUM_BIAS:
        tl.store(partial_ptr + place, tl.sum(sum_bias, 0), mask=cols < N)


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
    VEC: tl.constexpr,
):
    """Add up the partials of one sum for one block of columns."""
    N *= VEC
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    which = tl.program_id(1)
    partial_ptr += which.to(tl.int64) * programs * N
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in tl.range(0, programs, ROWS):
        rows = start + tl.arange(0, ROWS)
        keep = (rows < programs)[:, None] & (cols < N)[None, :]
        total += tl.load(partial_ptr + (rows.to(tl.int64) * N)[:, None] + cols[None, :], mask=keep, other=0.0)
    column = tl.sum(total, 0)
    if which == 0:
        tl.store(first_ptr + cols, column.to(first_ptr.dtype.element_ty), mask=cols < N)
    if SUMS > 1:
        if which == 1:
            tl.store(second_ptr + cols, column.to(second_ptr.dtype.element_ty), mask=cols < N)
    if SUMS > 2:
        if which == 2:
            tl.store(third_ptr + cols, column.to(third_ptr.dtype.element_ty), mask=cols < N)
