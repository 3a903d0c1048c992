"""Of GEMM and row norm in one kernel, a row of the result spread over the CTAs of a cluster (`cluster` of linear_norm,
where W stays in shared memory): what both such kernels have in common.

    z = x W^T + bias (+ residual);  hat = rstd * (z - mean);  y = gamma * hat + beta (+ residual)

    postnorm_joint_kernels.py     consumers run one text; stores results through shared memory, and has no residual
    postnorm_direct_kernels.py    stores them, and loads a residual, straight from and to registers

CTA r of a cluster has 128 columns of the result and of W, which it keeps, and walks over blocks of 64 rows together with
its cluster. With several groups, norms over equal parts of the columns, each cluster serves one of them. A loader brings
tiles of x; three consumers, warpgroups that take blocks in turn, make products, statistics of the CTA's columns, those of
whole rows by messages through distributed shared memory, norm and stores.

While one consumer multiplies, the other two exchange, normalise and store. Their slots of x follow each other in one
ring, so a consumer begins only when the one before has seen all of its slots filled: otherwise it could take a slot's
next phase for its last.

A consumer sends its part of block i after it has read all parts of its block before, which every peer sent after reading
those of the block before that: two places per consumer suffice. Every message is awaited by whom it was sent to, so none
arrives at a CTA that has ended.

The cluster's size is set by the launch: to the compiler these are kernels of single CTAs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS, COLUMNS, BK = gl.constexpr(64), gl.constexpr(128), gl.constexpr(64)  # of a block: rows, a CTA's columns; k-block
CONSUMERS = gl.constexpr(3)
ABSENT, WIDE = gl.constexpr(0), gl.constexpr(2)  # kinds of a parameter vector; 1: in the dtype of x
BEFORE, HAS_BIAS, AFFINE = gl.constexpr(16), gl.constexpr(32), gl.constexpr(64)  # further bits of `form`


@gluon.jit
def standing(members, groups, M, N):
    """(rank in the cluster, group, first block, blocks from one to the next, blocks in all, first column, columns)."""
    cluster = gl.program_id(0) // members
    rank = gl.program_id(0) - cluster * members
    first = cluster // groups
    group = cluster - first * groups
    step = gl.num_programs(0) // (members * groups)
    tiles = (M + ROWS - 1) // ROWS
    column = group * N + rank * COLUMNS
    width = gl.minimum(N - rank * COLUMNS, COLUMNS)
    return rank, group, first, step, tiles, column, width


# ---- parameter vectors -----------------------------------------------------------------------------------------------


@gluon.jit
def load_vector(ptr, kind, default: gl.constexpr, j, column, width, dtype: gl.constexpr):
    """Values j of a CTA's part of bias, gamma or beta as fp32."""
    value = gl.full(j.shape, default, gl.float32, j.type.layout)
    if kind == WIDE:
        value = gl.load(ptr + column + j, mask=j < width, other=default)
    elif kind != ABSENT:
        narrow = ptr.to(gl.pointer_type(dtype), bitcast=True)
        value = gl.load(narrow + column + j, mask=j < width, other=default).to(gl.float32)
    return value


# ---- x ---------------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _fetch(outputs, inputs):
    """One thread of the cluster's first CTA asks for a contiguous piece of memory to be brought into L2."""
    (address,), (size,) = inputs
    return f"""{{ .reg .pred p, q; .reg .b32 t;
    mov.u32 t, %cluster_ctarank; setp.eq.u32 q, t, 0;
    mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.and.u32 p, t, 0, q;
    @p cp.async.bulk.prefetch.L2.global [{address}], {size}; }}"""


@gluon.jit
def fetch_ahead(ptr, ahead, M, size):
    """Block `ahead` of whole rows that follow each other without a gap, if `size`, its bytes, is not 0."""
    if (size != 0) & ((ahead + 1) * ROWS <= M):
        at = ptr.to(gl.int64) + ahead.to(gl.int64) * size
        gl.inline_asm(_fetch, "l,r", [at, size], (), is_pure=False)
