"""Of the post-norm kernel whose CTAs form clusters (postnorm_resident_kernels.py): what a consumer does with a block of 64
rows and a CTA's columns of z, from registers, in chunks of 64 columns."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .attention_blocks import store_statistics
from .attention_exchange import row_layout, send
from .postnorm_cluster_exchange import collect
from .postnorm_multiply import accumulator, put, statistics
from .postnorm_normalise import AFTER, HAT, SAVE, SUM
from .tile_rows import add_rows, first_of_row

ROWS, CHUNK = gl.constexpr(64), gl.constexpr(64)
RMS, LAYER = gl.constexpr(1), gl.constexpr(2)
ABSENT, WIDE = gl.constexpr(0), gl.constexpr(2)  # kinds of a parameter vector; 1: in the dtype of x
BEFORE, HAS_BIAS, AFFINE = gl.constexpr(16), gl.constexpr(32), gl.constexpr(64)  # further bits of `form`
BIAS, GAMMA, BETA = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # order of the vectors in shared memory


@gluon.jit
def load_vector(vectors, which: gl.constexpr, ptr, kind, default: gl.constexpr, column, width, dtype: gl.constexpr,
                NCH: gl.constexpr):  # fmt: skip
    """A CTA's part of bias, gamma or beta as fp32 in shared memory, chunk by chunk."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for c in gl.static_range(NCH):
        j = c * CHUNK + gl.arange(0, CHUNK, L)
        value = gl.full([CHUNK], default, gl.float32, L)
        if kind == WIDE:
            value = gl.load(ptr + column + j, mask=j < width, other=default)
        elif kind != ABSENT:
            narrow = ptr.to(gl.pointer_type(dtype), bitcast=True)
            value = gl.load(narrow + column + j, mask=j < width, other=default).to(gl.float32)
        vectors.index(NCH * which + c).store(value)


@gluon.jit
def load_vectors(vectors, bias_ptr, gamma_ptr, beta_ptr, bias_kind, gamma_kind, beta_kind, column, width,
                 dtype: gl.constexpr, NCH: gl.constexpr):  # fmt: skip
    """All three; returns the bits of `form` that say which there are."""
    load_vector(vectors, BIAS, bias_ptr, bias_kind, 0.0, column, width, dtype, NCH)
    load_vector(vectors, GAMMA, gamma_ptr, gamma_kind, 1.0, column, width, dtype, NCH)
    load_vector(vectors, BETA, beta_ptr, beta_kind, 0.0, column, width, dtype, NCH)
    affine = (gamma_kind != ABSENT) | (beta_kind != ABSENT)
    return gl.where(bias_kind != ABSENT, HAS_BIAS, 0) | gl.where(affine, AFFINE, 0)


@gluon.jit
def add_residual(chunks, ptr, pitch, row, rows, column, width, NCH: gl.constexpr):
    for c in gl.static_range(NCH):
        at = ptr + row.to(gl.int64) * pitch + (column + c * CHUNK)
        chunks = put(chunks, c, add_rows(chunks[c], at, pitch, rows, width - c * CHUNK, 0), NCH)
    return chunks


@gluon.jit
def spread(values, L: gl.constexpr):
    """One value per row, beside each value of a chunk of the row."""
    return gl.convert_layout(values, gl.SliceLayout(1, L), assert_trivial=True)[:, None]


@gluon.jit
def store_chunk(desc, place, chunk, row, column):
    """TMA reads `place` until the next call, which waits."""
    tma.store_wait(0)
    gl.barrier()
    place.store(chunk.to(place.dtype))
    fence_async_shared()
    gl.barrier()
    tma.async_store(desc, [row, column], place)


@gluon.jit
def store_row(desc, place, chunks, row, column, width, NCH: gl.constexpr):
    for c in gl.static_range(NCH):
        if c * CHUNK < width:  # with several groups, the next one's columns follow
            store_chunk(desc, place, chunks[c], row, column + c * CHUNK)


@gluon.jit
def begin(chunks, vectors, residual_ptr, r_pitch, row, rows, column, width, messages, bar, rank, members, form,
          NORM: gl.constexpr, NCH: gl.constexpr):  # fmt: skip
    """z, and the statistics of its columns here, which are sent to the cluster."""
    S: gl.constexpr = gl.SliceLayout(0, accumulator(CHUNK))
    if form & HAS_BIAS:
        for c in gl.static_range(NCH):
            bias = vectors.index(NCH * BIAS + c).load(S)
            chunks = put(chunks, c, chunks[c] + bias[None, :], NCH)
    if form & BEFORE:
        chunks = add_residual(chunks, residual_ptr, r_pitch, row, rows, column, width, NCH)
    mean, square = statistics(chunks, width, NORM, NCH)
    mean = gl.convert_layout(mean, row_layout(), assert_trivial=True)
    square = gl.convert_layout(square, row_layout(), assert_trivial=True)
    if members > 1:
        send(messages, bar, rank, members, mean, square)
    return chunks, mean, square


@gluon.jit
def standardise(chunks, mean, square, side_desc, place, mean_ptr, rstd_ptr, row, rows, column, width, messages, bar,
                phase, rank, members, last, inverse, groups, form, eps, NORM: gl.constexpr, PEERS: gl.constexpr,
                NCH: gl.constexpr):  # fmt: skip
    """zhat of whole rows; z and zhat are stored where they are asked for. `last`: columns of the cluster's last CTA."""
    L: gl.constexpr = accumulator(CHUNK)
    if form & SUM:
        store_row(side_desc, place, chunks, row, column, width, NCH)
    if members > 1:
        mean, square = collect(messages, bar, phase, members, last, inverse, NORM, PEERS, NCH)
    rstd = gl.rsqrt(square * inverse + eps)
    if ((form & SAVE) != 0) & (rank == 0):
        start = first_of_row(chunks[0], mean.type)
        start = start.to(place.dtype).to(gl.float32)  # as it is read where z is kept
        store_statistics(mean_ptr, rstd_ptr, mean, rstd, start, row, rows, groups, NORM)
    scale = spread(rstd, L)
    shift = spread(-mean * rstd, L)
    for c in gl.static_range(NCH):
        hat = chunks[c] * scale
        if NORM == LAYER:
            hat = gl.fma(chunks[c], gl.broadcast(scale, chunks[c])[0], gl.broadcast(shift, chunks[c])[0])
        chunks = put(chunks, c, hat, NCH)
    if form & HAT:
        store_row(side_desc, place, chunks, row, column, width, NCH)
    return chunks


@gluon.jit
def finish(chunks, vectors, residual_ptr, r_pitch, y_desc, place, row, rows, column, width, form, NCH: gl.constexpr):
    """y from zhat."""
    S: gl.constexpr = gl.SliceLayout(0, accumulator(CHUNK))
    if form & AFFINE:
        for c in gl.static_range(NCH):
            gamma = vectors.index(NCH * GAMMA + c).load(S)
            beta = vectors.index(NCH * BETA + c).load(S)
            chunks = put(chunks, c, chunks[c] * gamma[None, :] + beta[None, :], NCH)
    if form & AFTER:
        chunks = add_residual(chunks, residual_ptr, r_pitch, row, rows, column, width, NCH)
    store_row(y_desc, place, chunks, row, column, width, NCH)
