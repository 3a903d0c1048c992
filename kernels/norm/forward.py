"""LayerNorm and RMSNorm over rows, forward: Triton kernels.

    z = x (+ residual);  zhat = (z - mean(z)) / sqrt(var(z) + eps);  y = act(zhat * weight + bias) (+ residual)

with z in place of z - mean(z) for RMSNorm. A residual is added before the norm or after it. Statistics are fp32 and
come from the row in registers, never as E[z^2] - E[z]^2; padded lanes do not enter them. Addresses are 64-bit.
"""

import triton
import triton.language as tl

from recsys_norm.kernels.activations import activate

BEFORE = tl.constexpr(1)
AFTER = tl.constexpr(2)


@triton.jit
def aligned(value, VEC: tl.constexpr):
    """The same value, which the launch promises to be a multiple of VEC; the product tells the compiler."""
    return (value // VEC) * VEC


@triton.jit
def exact_mean(total, N, reciprocal):
    """total / N, correctly rounded from the rounded 1 / N, so that a constant row of 16-bit values has no deviation.
    Costs two multiply-adds where a division would branch."""
    guess = total * reciprocal
    return tl.fma(tl.fma(-guess, N, total), reciprocal, guess)


@triton.jit
def centred(z, mean, reciprocal, cols, N, REFINE: tl.constexpr):
    """(z - mean, what is left of its mean). An fp32 mean of fp32 values is off by up to half its last bit, which is
    1e-4 deviations at mean/std = 1e4; REFINE finds that rest from the exact differences."""
    d = tl.where((cols < N)[None, :], z - mean[:, None], 0.0)
    rest = tl.zeros_like(mean)
    if REFINE:
        rest = tl.sum(d, 1) * reciprocal
    return d, rest


@triton.jit
def subtract_rest(d, rest, cols, N, REFINE: tl.constexpr):
    if REFINE:
        d = tl.where((cols < N)[None, :], d - rest[:, None], 0.0)
    return d


@triton.jit(do_not_specialize=["M", "N", "stride_x", "stride_residual", "eps"])
def forward_kernel(
    x_ptr,  # [M, N], row stride stride_x
    residual_ptr,  # [M, N], row stride stride_residual
    weight_ptr,  # [N]
    bias_ptr,  # [N]
    y_ptr,  # [M, N] contiguous, as z and hat; any of the three may be x itself
    z_ptr,
    hat_ptr,
    mean_ptr,  # [M] fp32
    rstd_ptr,  # [M] fp32
    M,
    N,
    stride_x,
    stride_residual,
    eps,
    LAYER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WRITE_Z: tl.constexpr,
    WRITE_HAT: tl.constexpr,
    REFINE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row block of ROWS whole rows at a time, grid-strided, so that weight and bias are read once per program."""
    N = aligned(N, VEC)
    stride_x = aligned(stride_x, VEC)
    stride_residual = aligned(stride_residual, VEC)
    width = N.to(tl.float32)
    reciprocal = tl.div_rn(1.0, width)
    cols = tl.arange(0, BLOCK)
    weight = tl.zeros((BLOCK,), tl.float32)
    bias = tl.zeros((BLOCK,), tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)

    for block in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        keep = (rows < M)[:, None] & (cols < N)[None, :]
        out = rows[:, None] * N + cols[None, :]
        z = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask=keep, other=0.0).to(tl.float32)
        if RESIDUAL != 0:
            residual = tl.load(
                residual_ptr + rows[:, None] * stride_residual + cols[None, :], mask=keep, other=0.0
            ).to(tl.float32)
        if RESIDUAL == BEFORE:
            z = z + residual
        if WRITE_Z:  # the backward sees the rounded z, so its statistics are taken
            rounded = z.to(z_ptr.dtype.element_ty)
            tl.store(z_ptr + out, rounded, mask=keep)
            z = rounded.to(tl.float32)
        if LAYER:
            mean = exact_mean(tl.sum(z, 1), width, reciprocal)
            d, rest = centred(z, mean, reciprocal, cols, N, REFINE)
            var = tl.sum(d * d, 1) * reciprocal
            if REFINE:
                var = tl.maximum(var - rest * rest, 0.0)
                d = subtract_rest(d, rest, cols, N, REFINE)
                mean = mean + rest
            tl.store(mean_ptr + rows, mean, mask=rows < M)
        else:
            d = z
            var = tl.sum(z * z, 1) * reciprocal
        rstd = tl.rsqrt(var + eps)
        tl.store(rstd_ptr + rows, rstd, mask=rows < M)
        y = d * rstd[:, None]
        if WRITE_HAT:
            tl.store(hat_ptr + out, y.to(hat_ptr.dtype.element_ty), mask=keep)
        if HAS_WEIGHT:
            y = y * weight[None, :]
        if HAS_BIAS:
            y = y + bias[None, :]
        y = activate(y, ACTIVATION)
        if RESIDUAL == AFTER:
            y = y + residual
        tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=keep)


@triton.jit
def load_sum(
    x_ptr, residual_ptr, z_ptr, cols, N, RESIDUAL: tl.constexpr, WRITE_Z: tl.constexpr
):  # part of one row of z, rounded as it will be stored
    z = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    if RESIDUAL == BEFORE:
        z = z + tl.load(residual_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    if WRITE_Z:
        z = z.to(z_ptr.dtype.element_ty).to(tl.float32)
    return z


@triton.jit(do_not_specialize=["M", "N", "stride_x", "stride_residual", "eps"])
def forward_wide_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    z_ptr,
    hat_ptr,
    mean_ptr,
    rstd_ptr,
    M,
    N,
    stride_x,
    stride_residual,
    eps,
    LAYER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WRITE_Z: tl.constexpr,
    WRITE_HAT: tl.constexpr,
    CHUNK: tl.constexpr,
    VEC: tl.constexpr,
):
    """As forward_kernel for rows of any width: one row per program, in chunks, read two or three times (from L2)."""
    N = aligned(N, VEC)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * aligned(stride_x, VEC)
    y_ptr += row * N
    if RESIDUAL != 0:
        residual_ptr += row * aligned(stride_residual, VEC)
    if WRITE_Z:
        z_ptr += row * N
    if WRITE_HAT:
        hat_ptr += row * N
    lanes = tl.arange(0, CHUNK)
    reciprocal = tl.div_rn(1.0, N.to(tl.float32))

    mean = 0.0
    if LAYER:
        total = tl.zeros((CHUNK,), tl.float32)
        for start in tl.range(0, N, CHUNK):
            total += load_sum(x_ptr, residual_ptr, z_ptr, start + lanes, N, RESIDUAL, WRITE_Z)
        mean = tl.sum(total, 0) * reciprocal
    # Sums shifted by the mean as fp32 has it; what is left of the mean is small and is taken off exactly.
    first = tl.zeros((CHUNK,), tl.float32)
    second = tl.zeros((CHUNK,), tl.float32)
    for start in tl.range(0, N, CHUNK):
        cols = start + lanes
        d = load_sum(x_ptr, residual_ptr, z_ptr, cols, N, RESIDUAL, WRITE_Z) - mean
        d = tl.where(cols < N, d, 0.0)
        first += d
        second += d * d
    var = tl.sum(second, 0) * reciprocal
    rest = 0.0
    if LAYER:
        rest = tl.sum(first, 0) * reciprocal
        var = tl.maximum(var - rest * rest, 0.0)
        tl.store(mean_ptr + row, mean + rest)
    rstd = tl.rsqrt(var + eps)
    tl.store(rstd_ptr + row, rstd)

    for start in tl.range(0, N, CHUNK):
        cols = start + lanes
        keep = cols < N
        z = load_sum(x_ptr, residual_ptr, z_ptr, cols, N, RESIDUAL, WRITE_Z)
        if RESIDUAL == AFTER:
            residual = tl.load(residual_ptr + cols, mask=keep, other=0.0).to(tl.float32)
        if WRITE_Z:
            tl.store(z_ptr + cols, z.to(z_ptr.dtype.element_ty), mask=keep)
        y = ((z - mean) - rest) * rstd
        if WRITE_HAT:
            tl.store(hat_ptr + cols, y.to(hat_ptr.dtype.element_ty), mask=keep)
        if HAS_WEIGHT:
            y = y * tl.load(weight_ptr + cols, mask=keep, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y = y + tl.load(bias_ptr + cols, mask=keep, other=0.0).to(tl.float32)
        y = activate(y, ACTIVATION)
        if RESIDUAL == AFTER:
            y = y + residual
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=keep)
