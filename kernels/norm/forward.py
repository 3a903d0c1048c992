"""LayerNorm and RMSNorm over rows, forward: Triton kernels.

    z = x (+ before);  zhat = (z - mean(z)) / sqrt(var(z) + eps);  y = act(zhat * weight + bias) (+ after)

with z in place of z - mean(z) for RMSNorm. Statistics are fp32 and come from the row in registers, never as
E[z^2] - E[z]^2; padded lanes do not enter them. The mean is stored relative to the row's first element, which keeps it
exact where it is large against the deviation. Addresses are 64-bit; widths and strides come in units of VEC values, so
that the compiler sees which accesses are 16 bytes wide.
"""

import triton
import triton.language as tl

from recsys_norm.kernels.activations import activate


@triton.jit
def exact_mean(total, width, reciprocal):
    """total / width, correctly rounded from the rounded 1 / width, so that a constant row of 16-bit values has no
    deviation. Costs two multiply-adds where a division would branch."""
    guess = total * reciprocal
    return tl.fma(tl.fma(-guess, width, total), reciprocal, guess)


@triton.jit
def centred(z, first, in_row, N, reciprocal, SHIFT: tl.constexpr):
    """(z - mean, mean - first), 0 outside the row. An fp32 row is shifted by its first element before it is summed: its
    fp32 mean would be off by 1e-4 deviations at mean / deviation = 1e4."""
    if SHIFT:
        z = tl.where(in_row, z - first[:, None], 0.0)
        mean = tl.sum(z, 1) * reciprocal
        centre = mean
    else:
        centre = exact_mean(tl.sum(z, 1), N.to(tl.float32), reciprocal)
        mean = centre - first
    return z - tl.where(in_row, centre[:, None], 0.0), mean


@triton.jit
def live_rows(M, offsets_ptr, last, heads, CUT: tl.constexpr):
    """Rows that count: all, or `heads` for each of the first offsets[last] tokens."""
    live = tl.cast(M, tl.int64)
    if CUT:
        live = tl.minimum(live, tl.load(offsets_ptr + last).to(tl.int64) * heads)
    return live


@triton.jit
def affine_cols(rows, cols, N, GROUPS: tl.constexpr):
    """Where a row's weight and bias are: those of GROUPS rows stand side by side, row i has those of group i % GROUPS."""
    if GROUPS > 1:
        cols = (rows % GROUPS * N)[:, None] + cols
    return cols


@triton.jit(
    do_not_specialize=["M", "N", "stride_x", "stride_before", "stride_after", "last", "heads", "reciprocal", "eps"]
)
def forward_kernel(
    x_ptr,  # [M, N], row stride stride_x
    before_ptr,  # [M, N], row stride stride_before: added before the norm
    after_ptr,  # [M, N], row stride stride_after: added after it
    weight_ptr,  # [GROUPS * N], see affine_cols
    bias_ptr,  # [GROUPS * N]
    offsets_ptr,  # see live_rows; where rows are cut, the others read as 0 and y is 0
    y_ptr,  # [M, N] contiguous, as z and hat; any of the three may be x itself
    z_ptr,
    hat_ptr,
    mean_ptr,  # [M] fp32
    rstd_ptr,  # [M] fp32
    M,
    N,
    stride_x,
    stride_before,
    stride_after,
    last,
    heads,
    reciprocal,  # 1 / N
    eps,
    LAYER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FAST: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    CUT: tl.constexpr,
    WRITE_Z: tl.constexpr,
    WRITE_HAT: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
):
    """ROWS whole rows per program."""
    N *= VEC
    stride_x *= VEC
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    in_row = cols < N
    live = rows < live_rows(M, offsets_ptr, last, heads, CUT)
    keep = live[:, None] & in_row
    x_rows = x_ptr + rows * stride_x
    z = tl.load(x_rows[:, None] + cols, mask=keep, other=0.0).to(tl.float32)
    first = tl.zeros((ROWS,), tl.float32)
    if LAYER:
        first = tl.load(x_rows, mask=live, other=0.0).to(tl.float32)
    if BEFORE:
        before_rows = before_ptr + rows * (stride_before * VEC)
        z += tl.load(before_rows[:, None] + cols, mask=keep, other=0.0).to(tl.float32)
        if LAYER:
            first += tl.load(before_rows, mask=live, other=0.0).to(tl.float32)
    weight = tl.zeros((1, BLOCK), tl.float32)
    bias = tl.zeros((1, BLOCK), tl.float32)
    affine = affine_cols(rows, cols, N, GROUPS)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + affine, mask=in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + affine, mask=in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)

    out = (rows * N)[:, None] + cols
    in_tensor = (rows < M)[:, None] & in_row
    if WRITE_Z:  # the backward sees the rounded z, so its statistics are taken
        rounded = z.to(z_ptr.dtype.element_ty)
        tl.store(z_ptr + out, rounded, mask=in_tensor)
        z = rounded.to(tl.float32)
        first = first.to(z_ptr.dtype.element_ty).to(tl.float32)
    if LAYER:
        z, mean = centred(z, first, in_row, N, reciprocal, SHIFT)
        tl.store(mean_ptr + rows, mean, mask=rows < M)
    rstd = tl.rsqrt(tl.sum(z * z, 1) * reciprocal + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    y = z * rstd[:, None]
    if WRITE_HAT:
        tl.store(hat_ptr + out, y.to(hat_ptr.dtype.element_ty), mask=in_tensor)
    if HAS_WEIGHT:
        y = y * weight
    if HAS_BIAS:
        y = y + bias
    y = activate(y, ACTIVATION, FAST)
    if AFTER:
        after_rows = after_ptr + rows * (stride_after * VEC)
        y += tl.load(after_rows[:, None] + cols, mask=keep, other=0.0).to(tl.float32)
    if CUT:
        y = tl.where(live[:, None], y, 0.0)
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=in_tensor)


@triton.jit
def load_sum(x_ptr, before_ptr, z_ptr, cols, keep, BEFORE: tl.constexpr, WRITE_Z: tl.constexpr):
    """Part of one row of z, rounded as it will be stored."""
    z = tl.load(x_ptr + cols, mask=keep, other=0.0).to(tl.float32)
    if BEFORE:
        z = z + tl.load(before_ptr + cols, mask=keep, other=0.0).to(tl.float32)
    if WRITE_Z:
        z = z.to(z_ptr.dtype.element_ty).to(tl.float32)
    return z


@triton.jit(
    do_not_specialize=["M", "N", "stride_x", "stride_before", "stride_after", "last", "heads", "reciprocal", "eps"]
)
def forward_wide_kernel(
    x_ptr,
    before_ptr,
    after_ptr,
    weight_ptr,
    bias_ptr,
    offsets_ptr,
    y_ptr,
    z_ptr,
    hat_ptr,
    mean_ptr,
    rstd_ptr,
    M,
    N,
    stride_x,
    stride_before,
    stride_after,
    last,
    heads,
    reciprocal,
    eps,
    LAYER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FAST: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    CUT: tl.constexpr,
    WRITE_Z: tl.constexpr,
    WRITE_HAT: tl.constexpr,
    CHUNK: tl.constexpr,
    VEC: tl.constexpr,
):
    """As forward_kernel for rows of any width: one row per program, in chunks, read two or three times (from L2)."""
    N *= VEC
    row = tl.program_id(0).to(tl.int64)
    live = row < live_rows(M, offsets_ptr, last, heads, CUT)
    x_ptr += row * (stride_x * VEC)
    y_ptr += row * N
    if BEFORE:
        before_ptr += row * (stride_before * VEC)
    if AFTER:
        after_ptr += row * (stride_after * VEC)
    if WRITE_Z:
        z_ptr += row * N
    if WRITE_HAT:
        hat_ptr += row * N
    lanes = tl.arange(0, CHUNK)

    shift = 0.0
    if LAYER:
        first = load_sum(x_ptr, before_ptr, z_ptr, lanes, (lanes < 1) & live, BEFORE, WRITE_Z)
        shift = tl.sum(first, 0)
        total = tl.zeros((CHUNK,), tl.float32)
        for start in tl.range(0, N, CHUNK):
            keep = (start + lanes < N) & live
            z = load_sum(x_ptr, before_ptr, z_ptr, start + lanes, keep, BEFORE, WRITE_Z)
            total += tl.where(keep, z - shift, 0.0)
        mean = tl.sum(total, 0) * reciprocal
        tl.store(mean_ptr + row, mean)
    else:
        mean = 0.0
    squares = tl.zeros((CHUNK,), tl.float32)
    for start in tl.range(0, N, CHUNK):
        keep = (start + lanes < N) & live
        z = load_sum(x_ptr, before_ptr, z_ptr, start + lanes, keep, BEFORE, WRITE_Z)
        d = tl.where(keep, (z - shift) - mean, 0.0)
        squares += d * d
    rstd = tl.rsqrt(tl.sum(squares, 0) * reciprocal + eps)
    tl.store(rstd_ptr + row, rstd)

    for start in tl.range(0, N, CHUNK):
        cols = start + lanes
        in_row = cols < N
        keep = in_row & live
        z = load_sum(x_ptr, before_ptr, z_ptr, cols, keep, BEFORE, WRITE_Z)
        if AFTER:
            after = tl.load(after_ptr + cols, mask=keep, other=0.0).to(tl.float32)
        if WRITE_Z:
            tl.store(z_ptr + cols, z.to(z_ptr.dtype.element_ty), mask=in_row)
        y = ((z - shift) - mean) * rstd
        if WRITE_HAT:
            tl.store(hat_ptr + cols, y.to(hat_ptr.dtype.element_ty), mask=in_row)
        if HAS_WEIGHT:
            y = y * tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y = y + tl.load(bias_ptr + cols, mask=in_row, other=0.0).to(tl.float32)
        y = activate(y, ACTIVATION, FAST)
        if AFTER:
            y = y + after
        if CUT:
            y = tl.where(live, y, 0.0)
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=in_row)
