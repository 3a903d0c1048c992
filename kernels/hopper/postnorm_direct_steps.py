"""Of the post-norm kernel over clusters that stores from registers (postnorm_direct_kernels.py): what a consumer does with a
block of 64 rows and a CTA's 128 columns of z. Columns of the product are permuted as postnorm_rows.py says."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .attention_blocks import store_statistics
from .attention_exchange import row_layout, send
from .postnorm_cluster_common import AFFINE, BEFORE, COLUMNS, HAS_BIAS, ROWS
from .postnorm_cluster_exchange import collect
from .postnorm_multiply import LAYER, _plain_square_asm, _register_row, _square_asm, _sum_asm, partial_layout
from .postnorm_normalise import AFTER, HAT, SAVE, SUM
from .postnorm_rows import add_pairs, first_of_row, load_columns, store_rows

BIAS, GAMMA, BETA = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # order of the vectors in shared memory

# ---- statistics ------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _tail_square_asm(outputs, inputs):
    """Squares of the deviations from the mean, of the result's columns before `width` only."""
    (dst,), (src, values, mean, (width,)) = outputs, inputs
    lines = ["{ .reg .f32 d; .reg .pred p; .reg .b32 w;", "mov.u32 w, %tid.x; and.b32 w, w, 3; shl.b32 w, w, 3;"]
    lines.append(f"sub.s32 w, {width}, w;")
    lines += [f"mov.f32 {d}, {s};" for d, s in zip(dst, src)]
    for i, v in enumerate(values):
        r = _register_row(i) + 2 * (i & 1)
        if i % 16 == 0:
            lines.append(f"setp.gt.s32 p, w, {2 * i};")  # 32 columns of the result
        lines.append(f"sub.rn.f32 d, {v}, {mean[_register_row(i)]}; @p fma.rn.f32 {dst[r]}, d, d, {dst[r]};")
    return "\n".join(lines + ["}"])


@gluon.jit
def over_lanes(p):
    return gl.convert_layout(gl.sum(p, axis=1), row_layout(), assert_trivial=True)


@gluon.jit
def statistics(acc, width, NORM: gl.constexpr):
    """Per row: mean (0 for RMS) and sum of squared deviations from it, over the columns of this CTA. Columns at or past
    `width` are 0. Sums run within a thread, so that lanes meet once."""
    zero = gl.zeros([ROWS, 8], gl.float32, partial_layout())
    if NORM == LAYER:
        p = gl.inline_asm(_sum_asm, ("=&f", "f", "f"), [zero, acc], zero.type, is_pure=True)
        mean = over_lanes(p) * (1.0 / width.to(gl.float32))
        if width < COLUMNS:
            args = [zero, acc, mean, width]
            p = gl.inline_asm(_tail_square_asm, ("=&f", "f", "f", "f", "r"), args, zero.type, is_pure=True)
        else:
            p = gl.inline_asm(_square_asm, ("=&f", "f", "f", "f"), [zero, acc, mean], zero.type, is_pure=True)
        square = over_lanes(p)
    else:
        square = over_lanes(gl.inline_asm(_plain_square_asm, ("=&f", "f", "f"), [zero, acc], zero.type, is_pure=True))
        mean = gl.zeros_like(square)
    return mean, square


# ---- a block ---------------------------------------------------------------------------------------------------------


@gluon.jit
def begin(acc, more, vectors, width, messages, bar, rank, members, form, NORM: gl.constexpr, dtype: gl.constexpr):
    """z, and the statistics of its columns here, which are sent to the cluster. `more`: the residual before the norm."""
    if form & HAS_BIAS:
        acc += load_columns(vectors.index(BIAS))
    if form & BEFORE:
        acc = add_pairs(acc, more, dtype)
    mean, square = statistics(acc, width, NORM)
    if members > 1:
        send(messages, bar, rank, members, mean, square)
    return acc, mean, square


@gluon.jit
def standardise(acc, mean, square, side_ptr, pitch, mean_ptr, rstd_ptr, row, M, column, width, messages, bar, phase,
                rank, members, last, inverse, groups, form, eps, NORM: gl.constexpr, PEERS: gl.constexpr):  # fmt: skip
    """zhat of whole rows; z and zhat are stored where they are asked for. `last`: columns of the cluster's last CTA."""
    if form & SUM:
        store_rows(acc, side_ptr, pitch, row, M, column, width)
    if members > 1:
        mean, square = collect(messages, bar, phase, members, last, inverse, NORM, PEERS)
    rstd = gl.rsqrt(square * inverse + eps)
    if ((form & SAVE) != 0) & (rank == 0):
        start = first_of_row(acc, mean.type)
        start = start.to(side_ptr.dtype.element_ty).to(gl.float32)  # as it is read where z is kept
        store_statistics(mean_ptr, rstd_ptr, mean, rstd, start, row, M - row, groups, NORM)
    if NORM == LAYER:
        shift = -mean * rstd
        acc = gl.fma(acc, gl.broadcast(rstd[:, None], acc)[0], gl.broadcast(shift[:, None], acc)[0])
    else:
        acc *= rstd[:, None]
    if form & HAT:
        store_rows(acc, side_ptr, pitch, row, M, column, width)
    return acc


@gluon.jit
def finish(acc, more, vectors, y_ptr, pitch, row, M, column, width, form, dtype: gl.constexpr):
    """y from zhat. `more`: the residual after the norm."""
    if form & AFFINE:
        gamma = load_columns(vectors.index(GAMMA))
        beta = load_columns(vectors.index(BETA))
        acc = acc * gamma + beta
    if form & AFTER:
        acc = add_pairs(acc, more, dtype)
    store_rows(acc, y_ptr, pitch, row, M, column, width)
