"""GEMM and row norm in one kernel, a row of the result spread over a group of CTAs (`cluster` of linear_norm, where W
streams through shared memory).

    z = x W^T + bias (+ residual);  hat = rstd * (z - mean);  y = gamma * hat + beta (+ residual)

CTA r of a group of NC holds columns [r * BN, (r + 1) * BN) of the result and walks over row blocks of 128 together
with its group. Partitions of a CTA, each a function below:

    multiply (twice)   4 warps, 64 rows each: main loop, bias, statistics of its columns, z to shared memory in 16 bits
    gather             1 warp: statistics of whole rows from the group's messages
    normalise          2 warps: y (and zhat or z) to memory, in strips of 16 rows per warp
    load_operands      1 warp: tiles of x and W

`multiply` goes on with its next tile as soon as z is in shared memory, so the exchange, the norm and the stores run
under the main loops of both warpgroups. The group talks through L2 (postnorm_messages.py), not through a cluster's
shared memory: a GPU with 132 SMs holds 30 clusters of 4 but 33 groups, and NC need not be a power of two. All CTAs of
the grid must be resident at once, which a cooperative launch guarantees.

Layout facts: a chunk is 64 columns, the width of a 128-byte swizzled row of 16-bit values. Splitting an accumulator
into chunks moves no value to another thread; a thread holds columns 2 (lane % 4) + {0, 1} + 8 j of rows lane / 4 and
lane / 4 + 8.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .postnorm_multiply import BK, BM, CHUNK, HALF, load_operands, multiply
from .postnorm_normalise import gather, normalise
from .variants import Tile, Variant

ABSENT, NARROW, WIDE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # kinds of a parameter vector
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def load_vector(
    ptr, kind, default: gl.constexpr, col, N, target, dtype: gl.constexpr, BN: gl.constexpr, SPLIT: gl.constexpr
):
    """A CTA's slice of bias, gamma or beta as fp32 in shared memory; SPLIT: even and odd columns of a chunk apart."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    PARTS: gl.constexpr = 2 if SPLIT else 1
    WIDTH: gl.constexpr = CHUNK // PARTS
    for c in gl.static_range(BN // WIDTH):
        cols = col + (c // PARTS) * CHUNK + PARTS * gl.arange(0, WIDTH, L) + c % PARTS
        value = gl.full([WIDTH], default, gl.float32, L)
        if kind == WIDE:
            value = gl.load(ptr + cols, mask=cols < N, other=default)
        elif kind == NARROW:
            narrow = ptr.to(gl.pointer_type(dtype), bitcast=True)
            value = gl.load(narrow + cols, mask=cols < N, other=default).to(gl.float32)
        target.index(c).store(value)


@gluon.jit(do_not_specialize=["M", "N", "KT", "NC", "groups"])
def postnorm_kernel(x_desc, w_desc, r_desc, y_desc, side_desc, bias_ptr, gamma_ptr, beta_ptr, mean_ptr, rstd_ptr,
                    after_ptr, space, after_pitch, M, N, KT, NC, groups, bias_kind, gamma_kind, beta_kind,
                    before, form, eps, NORM: gl.constexpr, BN: gl.constexpr, ST: gl.constexpr, SR: gl.constexpr,
                    PEERS: gl.constexpr):  # fmt: skip
    NCH: gl.constexpr = BN // CHUNK
    dtype: gl.constexpr = x_desc.dtype
    pid = gl.program_id(0)
    group = pid // NC
    rank = pid - group * NC
    tiles = (M + BM - 1) // BM
    width = gl.minimum(N - rank * BN, BN)
    x_s = gl.allocate_shared_memory(dtype, [2 * ST, HALF, BK], x_desc.layout)
    w_s = gl.allocate_shared_memory(dtype, [ST, BN, BK], w_desc.layout)
    z_s = gl.allocate_shared_memory(dtype, [2 * NCH, HALF, CHUNK], y_desc.layout)
    strips_s = z_s.reinterpret(dtype, [2 * NCH * (HALF // SR), SR, CHUNK], y_desc.layout)
    stats_s = gl.allocate_shared_memory(gl.float32, [8, 32], VECTOR)  # per warpgroup rstd, mean
    strip_stats_s = stats_s.reinterpret(gl.float32, [4 * (HALF // SR), SR], VECTOR)
    bias_s = gl.allocate_shared_memory(gl.float32, [NCH, CHUNK], VECTOR)
    gamma_s = gl.allocate_shared_memory(gl.float32, [2 * NCH, CHUNK // 2], VECTOR)  # even columns, odd columns
    beta_s = gl.allocate_shared_memory(gl.float32, [2 * NCH, CHUNK // 2], VECTOR)
    full = mbarrier.allocate_mbarrier(batch=ST)
    empty0 = mbarrier.allocate_mbarrier(batch=ST)
    empty1 = mbarrier.allocate_mbarrier(batch=ST)
    z_full = mbarrier.allocate_mbarrier(batch=2)
    z_free = mbarrier.allocate_mbarrier(batch=2)
    s_full = mbarrier.allocate_mbarrier(batch=2)
    r_full = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(ST):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty0.index(i), count=1)
        mbarrier.init(empty1.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(z_full.index(i), count=1)
        mbarrier.init(z_free.index(i), count=1)
        mbarrier.init(s_full.index(i), count=1)
        mbarrier.init(r_full.index(i), count=1)
    load_vector(bias_ptr, bias_kind, 0.0, rank * BN, N, bias_s, dtype, BN, False)
    load_vector(gamma_ptr, gamma_kind, 1.0, rank * BN, N, gamma_s, dtype, BN, True)
    load_vector(beta_ptr, beta_kind, 0.0, rank * BN, N, beta_s, dtype, BN, True)
    gl.barrier()
    has_bias = bias_kind != ABSENT
    gl.warp_specialize([
        (multiply, (x_s, w_s, z_s, bias_s, full, empty0, empty0, z_full, z_free, r_full, space, group,
                    rank, NC, width, groups, tiles, KT, has_bias, before, gl.constexpr(0), NORM, BN, ST)),
        (multiply, (x_s, w_s, z_s, bias_s, full, empty1, empty0, z_full, z_free, r_full, space, group,
                    rank, NC, width, groups, tiles, KT, has_bias, before, gl.constexpr(1), NORM, BN, ST)),
        (normalise, (y_desc, side_desc, r_desc, strips_s, strip_stats_s, gamma_s, beta_s, z_full, s_full, z_free,
                     r_full, space, mean_ptr, rstd_ptr, after_ptr, after_pitch, group, rank, M, N, groups, tiles,
                     before, form, NORM, BN, SR)),
        (gather, (stats_s, s_full, z_free, space, group, NC, N, groups, tiles, eps, 0, 2, NORM, BN, PEERS)),
        (load_operands, (x_desc, w_desc, x_s, w_s, full, empty0, empty1, rank, group, groups, tiles, KT,
                         BN, ST)),
    ], [4, SR // 16, 1, 1])  # fmt: skip


def _variant(dtype, norm):
    """A thread of `multiply` holds 128 accumulators and needs 168 registers, so that 12 warps are all that fit. Partitions
    do not ask for registers of their own: without setmaxnreg ptxas spills nothing."""
    boxes = {"x_desc": (64, 64), "w_desc": (256, 64), "r_desc": (32, 64), "y_desc": (32, 64), "side_desc": (32, 64)}
    args = {name: Tile(dtype, box) for name, box in boxes.items()}
    args |= dict.fromkeys("bias_ptr gamma_ptr beta_ptr mean_ptr rstd_ptr".split(), "*fp32:16")
    args |= {"after_ptr": "*i32:16", "space": "*i64:16", "after_pitch": "i64:4"}
    args |= dict.fromkeys("M N KT NC groups bias_kind gamma_kind beta_kind before form".split(), "i32")
    args |= {"N": "i32:8", "eps": "fp32", "NORM": {"rms": 1, "layer": 2}[norm]}
    args |= {"BN": 256, "ST": 3, "SR": 32, "PEERS": 8}
    return Variant(f"postnorm_stream_{norm}_{dtype}", postnorm_kernel, args, maxnreg=168)


VARIANTS = [_variant(d, n) for d in ("bf16", "fp16") for n in ("rms", "layer")]
