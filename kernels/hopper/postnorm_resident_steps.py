"""Of the post-norm kernel over clusters that stores through shared memory (postnorm_resident_kernels.py): what a consumer
does with a block of 64 rows and a CTA's 128 columns of z, in two chunks of 64 columns."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .attention_blocks import store_statistics
from .attention_exchange import row_layout, send
from .postnorm_cluster_common import AFFINE, BEFORE, BETA, BIAS, GAMMA, HAS_BIAS
from .postnorm_cluster_exchange import collect
from .postnorm_multiply import CHUNK, LAYER, accumulator, put, statistics
from .postnorm_normalise import AFTER, HAT, SAVE, SUM
from .postnorm_resident_rows import add_rows
from .postnorm_rows import first_of_row

CHUNKS = gl.constexpr(2)  # of a CTA's columns


@gluon.jit
def as_it_lies(p):
    """Of the result, for place p of a vector in shared memory."""
    return p


@gluon.jit
def add_residual(chunks, ptr, pitch, row, rows, column, width):
    for c in gl.static_range(CHUNKS):
        at = ptr + row.to(gl.int64) * pitch + (column + c * CHUNK)
        chunks = put(chunks, c, add_rows(chunks[c], at, pitch, rows, width - c * CHUNK), CHUNKS)
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
def store_row(desc, place, chunks, row, column, width):
    for c in gl.static_range(CHUNKS):
        if c * CHUNK < width:  # with several groups, the next one's columns follow
            store_chunk(desc, place, chunks[c], row, column + c * CHUNK)


@gluon.jit
def begin(chunks, vectors, residual_ptr, r_pitch, row, rows, column, width, messages, bar, rank, members, form,
          NORM: gl.constexpr):  # fmt: skip
    """z, and the statistics of its columns here, which are sent to the cluster."""
    S: gl.constexpr = gl.SliceLayout(0, accumulator(CHUNK))
    if form & HAS_BIAS:
        for c in gl.static_range(CHUNKS):
            bias = vectors.index(CHUNKS * BIAS + c).load(S)
            chunks = put(chunks, c, chunks[c] + bias[None, :], CHUNKS)
    if form & BEFORE:
        chunks = add_residual(chunks, residual_ptr, r_pitch, row, rows, column, width)
    mean, square = statistics(chunks, width, NORM, CHUNKS)
    mean = gl.convert_layout(mean, row_layout(), assert_trivial=True)
    square = gl.convert_layout(square, row_layout(), assert_trivial=True)
    if members > 1:
        send(messages, bar, rank, members, mean, square)
    return chunks, mean, square


@gluon.jit
def standardise(chunks, mean, square, side_desc, place, mean_ptr, rstd_ptr, row, rows, column, width, messages, bar,
                phase, rank, members, last, inverse, groups, form, eps,
                NORM: gl.constexpr, PEERS: gl.constexpr):  # fmt: skip
    """zhat of whole rows; z and zhat are stored where they are asked for. `last`: columns of the cluster's last CTA."""
    L: gl.constexpr = accumulator(CHUNK)
    if form & SUM:
        store_row(side_desc, place, chunks, row, column, width)
    if members > 1:
        mean, square = collect(messages, bar, phase, members, last, inverse, NORM, PEERS)
    rstd = gl.rsqrt(square * inverse + eps)
    if ((form & SAVE) != 0) & (rank == 0):
        start = first_of_row(chunks[0], mean.type)
        start = start.to(place.dtype).to(gl.float32)  # as it is read where z is kept
        store_statistics(mean_ptr, rstd_ptr, mean, rstd, start, row, rows, groups, NORM)
    scale = spread(rstd, L)
    shift = spread(-mean * rstd, L)
    for c in gl.static_range(CHUNKS):
        hat = chunks[c] * scale
        if NORM == LAYER:
            hat = gl.fma(chunks[c], gl.broadcast(scale, chunks[c])[0], gl.broadcast(shift, chunks[c])[0])
        chunks = put(chunks, c, hat, CHUNKS)
    if form & HAT:
        store_row(side_desc, place, chunks, row, column, width)
    return chunks


@gluon.jit
def finish(chunks, vectors, residual_ptr, r_pitch, y_desc, place, row, rows, column, width, form):
    """y from zhat."""
    S: gl.constexpr = gl.SliceLayout(0, accumulator(CHUNK))
    if form & AFFINE:
        for c in gl.static_range(CHUNKS):
            gamma = vectors.index(CHUNKS * GAMMA + c).load(S)
            beta = vectors.index(CHUNKS * BETA + c).load(S)
            chunks = put(chunks, c, chunks[c] * gamma[None, :] + beta[None, :], CHUNKS)
    if form & AFTER:
        chunks = add_residual(chunks, residual_ptr, r_pitch, row, rows, column, width)
    store_row(y_desc, place, chunks, row, column, width)
