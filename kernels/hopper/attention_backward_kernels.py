"""FlashNormAttention backward in one kernel: post-norm backward, GDPA backward and pre-norm backward.

    do = rstd_o * (g - mean(g) - o_hat * mean(g * o_hat))       g = dout * post weight, means over all heads
    qn = (q - mean) * rstd * weight + bias
    s = scale * qn k^T;   p = act(s);   t = (do v^T) * act'(s)  per head
    dv = p^T do;   dk = scale * t^T qn;   h = scale * t k (+ do: the inner residual)
    dq = rstd * (h * weight - mean(h * weight) - xhat * mean(h * weight * xhat)) (+ add)

A cluster works on one sequence, CTA r on its head r: K, V and the sums dk, dv stay on chip while blocks of 64 queries
pass. Row means are taken over the cluster: each CTA sends its part of every row to all of them through distributed
shared memory. Partitions of a CTA:

    consumers   two warpgroups, 64 keys each: the five products of a block, 32 queries at a time (that many registers)
    side        one warpgroup: TMA copies; do and qn of block i + 2 in the place of dout and o_hat; dq of block i

Shared memory: raw q in a ring of three blocks, dout and o_hat (then do and qn) in one of two, t and h once. All tiles are
64 x 64, one 128-byte swizzled panel. The side works in pairs of 16-bit values, a half warp to a row of 128 columns, with
accesses to shared memory by hand: every thread writes where it has read, so none needs a barrier.

Rows of a block past the sequence's end hold do = qn = 0 and are not stored; keys past its end hold k = v = 0, which
gives p = act(0) in rows of dv that are not stored, and t = 0.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .postnorm_normalise import pack, unpack
from .variants import Tile, Variant

BLOCK = gl.constexpr(64)  # queries of a block, keys of a consumer, columns of a panel
HALF = gl.constexpr(32)
WIDTH = gl.constexpr(128)  # of a head
STRIP = gl.constexpr(8)  # rows that the side has in registers at once
Q_SLOTS = gl.constexpr(3)
MAX_HEADS = gl.constexpr(8)
KINDS = gl.constexpr(3)  # of column sums: post weight, pre weight, pre bias
GELU, GELU_TANH = gl.constexpr(4), gl.constexpr(5)  # codes of recsys_norm.ops.activations
RMS, LAYER = gl.constexpr(1), gl.constexpr(2)  # kinds of a norm; 0: none
# Bits of `form`: two each for the kinds of the pre-norm and the post-norm, then whether there are the pre-norm's weight
# and bias, the post-norm's weight, the inner residual, and something to be added to dq.
PRE_BIT, POST_BIT = gl.constexpr(0), gl.constexpr(2)
HAS_WEIGHT, HAS_BIAS, HAS_POST = gl.constexpr(16), gl.constexpr(32), gl.constexpr(64)
INNER, ADD = gl.constexpr(128), gl.constexpr(256)
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def accumulator(columns):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


# ---- facts -----------------------------------------------------------------------------------------------------------

# What is needed now and then waits in shared memory and not in registers, at these places (8 bytes each).
Q, MEAN, RSTD, O_RSTD, WEIGHT, BIAS = (
    gl.constexpr(0),
    gl.constexpr(1),
    gl.constexpr(2),
    gl.constexpr(3),
    gl.constexpr(4),
    gl.constexpr(5),
)
POST, SUMS, DK, DV, Q_TOKEN, DK_TOKEN = (
    gl.constexpr(6),
    gl.constexpr(7),
    gl.constexpr(8),
    gl.constexpr(9),
    gl.constexpr(10),
    gl.constexpr(11),
)
KEYS, PRE_SLOPE, PRE_SHIFT, POST_SLOPE, POST_SHIFT = (
    gl.constexpr(12),
    gl.constexpr(13),
    gl.constexpr(14),
    gl.constexpr(15),
    gl.constexpr(16),
)
FACTS = gl.constexpr(32)


@gluon.constexpr_function
def shift_asm(outputs, inputs):
    (out,), (place,) = outputs[0], inputs[0]
    return f"""{{ .reg .u32 r, own; mov.u32 r, %cluster_ctarank;
 mapa.shared::cluster.u32 own, {place}, r; sub.u32 {out}, own, {place}; }}"""


@gluon.jit
def own_shift(place):
    """Inline assembly gets an address in shared memory as that of the cluster's first CTA: what leads to the own one."""
    return gl.inline_asm(shift_asm, "=r,r", [place], gl.int32, is_pure=False)


@gluon.constexpr_function
def keep_asm(outputs, inputs):
    (base,), (shift,), *values = inputs
    lines = [f"{{ .reg .u32 a; add.u32 a, {base}, {shift};"]
    return "\n".join([*lines, *(f"st.shared.b64 [a + {8 * i}], {value};" for i, (value,) in enumerate(values)), "}"])


@gluon.constexpr_function
def fact_asm(i):
    return f"""{{ .reg .u32 a, r; mov.u32 r, %cluster_ctarank; mapa.shared::cluster.u32 a, $1, r;
 ld.shared.b64 $0, [a + {8 * i}]; }}"""


@gluon.jit
def fact(facts, i: gl.constexpr):
    asm: gl.constexpr = fact_asm(i)
    return gl.inline_asm(asm, "=l,r", [facts], gl.int64, is_pure=False)


@gluon.jit
def number(facts, i: gl.constexpr):
    return fact(facts, i).to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def share(kind, least: gl.constexpr, heads):
    """1 / D as bits if a norm is of this kind or a later one, else 0."""
    value = gl.where(kind >= least, 1.0 / (heads * WIDTH).to(gl.float32), 0.0)
    return value.to(gl.int32, bitcast=True).to(gl.int64)


@gluon.jit
def pointer(facts, i: gl.constexpr, dtype: gl.constexpr):
    return fact(facts, i).to(gl.pointer_type(dtype))


# ---- consumers -------------------------------------------------------------------------------------------------------


@gluon.jit
def tanh(x, FAST: gl.constexpr):
    if FAST:
        return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    else:
        return 2.0 / (1.0 + gl.exp(-2.0 * x)) - 1.0


@gluon.jit
def activate_with_slope(z, ACT: gl.constexpr, FAST: gl.constexpr):
    """(act(x), 2 act'(x)) for x = 2 z, in as few constants and intermediate values as the compiler has registers for;
    the forms are those of kernels/gdpa/elementwise.py. With t = tanh(u) and x = 2 z

        gelu_tanh   y = z + z t;   2 y' = (1 + t) (1 + x u' (1 - t)),   x u' = 3 u - 4 sqrt(2 / pi) z
        gelu        y = z + z t;   2 y' = 1 + t + 2 x phi(x),           t = erf(x / sqrt 2)
    """
    z2 = z * z
    if ACT == GELU_TANH:
        u = z * (z2 * 0.28541926508903503 + 1.5957691216057308)
        w = 3.0 * u - 3.1915382432114616 * z
        t = tanh(u, FAST)
        y = z * t + z
        slope = (1.0 + t) * (w * (1.0 - t) + 1.0)
    else:
        gl.static_assert(ACT == GELU)
        if FAST:
            m = gl.minimum(z2, 9.0)
            t = tanh(z * ((m * -0.010105827914476395 + 0.29438605010509496) * m + 1.5954356670379639), FAST)
        else:
            t = gl.erf(z * 1.4142135623730951)
        y = z * t + z
        slope = (1.0 + t) + z * (gl.exp2(z2 * -2.885390043258667) * 1.5957691216057308)
    return y, slope


@gluon.jit
def clear_rows(tile, first, length):
    """Zero the rows of a tile whose number, counted from `first`, is at or past `length`."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = first + gl.arange(0, BLOCK, gl.SliceLayout(1, L))
    values = tile.load(L)
    tile.store(gl.where((rows < length)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def store_sum(acc, ptr, token, column, first, length):
    L: gl.constexpr = acc.type.layout
    rows = first + gl.arange(0, BLOCK, gl.SliceLayout(1, L))
    cols = column + gl.arange(0, BLOCK, gl.SliceLayout(0, L))
    at = rows.to(gl.int64)[:, None] * token + cols[None, :]
    to = gl.max_contiguous(gl.multiple_of(ptr + at, [1, 16]), [1, 2])
    gl.store(to, acc.to(ptr.dtype.element_ty), mask=(rows < length)[:, None] & (cols >= 0)[None, :])


@gluon.jit
def scores(k, v, q_halves, do_halves, tile, z, W: gl.constexpr):
    """s^T and (do v^T)^T of 32 queries on their way, two groups of products each."""
    L: gl.constexpr = accumulator(HALF)
    s = gl.zeros([BLOCK, HALF], gl.float32, L)
    s = warpgroup_mma(k.index(2 * W + z), q_halves.index(tile).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(k.index(2 * W + 1 + z), q_halves.index(tile + 2).permute((1, 0)), s, is_async=True)
    g = gl.zeros([BLOCK, HALF], gl.float32, L)
    g = warpgroup_mma(v.index(2 * W + z), do_halves.index(tile).permute((1, 0)), g, use_acc=False, is_async=True)
    g = warpgroup_mma(v.index(2 * W + 1 + z), do_halves.index(tile + 2).permute((1, 0)), g, is_async=True)
    return s, g


@gluon.jit
def accumulate(a, tiles, tile, acc0, acc1):
    """acc += a tile for both panels of a tile with 32 queries."""
    acc0 = warpgroup_mma(a, tiles.index(tile), acc0, is_async=True)
    acc1 = warpgroup_mma(a, tiles.index(tile + 2), acc1, is_async=True)
    return acc0, acc1


@gluon.jit
def consume(
    k_s, v_s, q_halves, do_halves, do_s, t_s, h_s, ready, t_full, h_full, h_free, dk0, dk1, dv0, dv1, i, half, form,
    W: gl.constexpr, ACT: gl.constexpr, FAST: gl.constexpr,
):  # fmt: skip
    """Block i. Shifts of i that are always 0 keep the compiler from holding every tile's address in registers."""
    dtype: gl.constexpr = k_s.dtype
    wide: gl.constexpr = accumulator(BLOCK)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=wide, k_width=2)
    stage = i & 1
    mbarrier.wait(ready.index(stage), (i >> 1) & 1)
    s, g = scores(k_s, v_s, q_halves, do_halves, 4 * stage, i >> 30, W)
    s, g = warpgroup_mma_wait(0, deps=(s, g))
    p, slope = activate_with_slope(s * half, ACT, FAST)
    p0 = gl.convert_layout(p.to(dtype), operand, assert_trivial=True)
    dv0, dv1 = accumulate(p0, do_halves, 4 * stage + (i >> 29), dv0, dv1)
    t = (g * slope).to(dtype)
    t0 = gl.convert_layout(t, operand, assert_trivial=True)
    dk0, dk1 = accumulate(t0, q_halves, 4 * stage + (i >> 28), dk0, dk1)
    mbarrier.wait(h_full, (i & 1) ^ 1)  # the products of the block before have read t
    t_s.index(W).slice(0, HALF, dim=1).store(t)
    dv0, dv1, dk0, dk1, p0, t0 = warpgroup_mma_wait(0, deps=(dv0, dv1, dk0, dk1, p0, t0))
    s, g = scores(k_s, v_s, q_halves, do_halves, 4 * stage + 1 + (i >> 27), i >> 27, W)
    s, g = warpgroup_mma_wait(0, deps=(s, g))
    p, slope = activate_with_slope(s * half, ACT, FAST)
    p1 = gl.convert_layout(p.to(dtype), operand, assert_trivial=True)
    dv0, dv1 = accumulate(p1, do_halves, 4 * stage + 1 + (i >> 26), dv0, dv1)
    t = (g * slope).to(dtype)
    t1 = gl.convert_layout(t, operand, assert_trivial=True)
    dk0, dk1 = accumulate(t1, q_halves, 4 * stage + 1 + (i >> 25), dk0, dk1)
    t_s.index(W).slice(HALF, HALF, dim=1).store(t)
    fence_async_shared()
    mbarrier.arrive(t_full)
    mbarrier.wait(t_full, i & 1)
    z = i >> 24
    h = gl.zeros([BLOCK, BLOCK], gl.float32, wide)
    h = warpgroup_mma(t_s.index(z).permute((1, 0)), k_s.index(W + z), h, use_acc=False, is_async=True)
    h = warpgroup_mma(t_s.index(1 + z).permute((1, 0)), k_s.index(2 + W + z), h, is_async=True)
    h, dv0, dv1, dk0, dk1, p1, t1 = warpgroup_mma_wait(0, deps=(h, dv0, dv1, dk0, dk1, p1, t1))
    h *= half  # t is twice what it should be
    if form & INNER != 0:
        h += do_s.index(stage * 2 + W).load(wide).to(gl.float32)
    mbarrier.wait(h_free, (i & 1) ^ 1)
    h_s.index(W).store(h.to(dtype))
    fence_async_shared()
    mbarrier.arrive(h_full)
    return dk0, dk1, dv0, dv1


@gluon.jit
def consumer(
    k_s, v_s, q_s, do_s, t_s, h_s, facts, kv_full, kv_ready, ready, t_full, h_full, h_free, blocks, half, form,
    W: gl.constexpr, ACT: gl.constexpr, FAST: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_s.dtype
    wide: gl.constexpr = accumulator(BLOCK)
    meet_cluster()
    q_halves = q_s.reinterpret(dtype, [8, HALF, BLOCK], q_s.layout)
    do_halves = do_s.reinterpret(dtype, [8, HALF, BLOCK], do_s.layout)
    mbarrier.wait(kv_full, 0)
    k_len = fact(facts, KEYS).to(gl.int32)
    if k_len < WIDTH:
        for panel in gl.static_range(2):
            clear_rows(k_s.index(2 * W + panel), W * BLOCK, k_len)
            clear_rows(v_s.index(2 * W + panel), W * BLOCK, k_len)
    fence_async_shared()
    mbarrier.arrive(kv_ready)
    mbarrier.wait(kv_ready, 0)
    dk0 = gl.zeros([BLOCK, BLOCK], gl.float32, wide)
    dk1 = gl.zeros([BLOCK, BLOCK], gl.float32, wide)
    dv0 = gl.zeros([BLOCK, BLOCK], gl.float32, wide)
    dv1 = gl.zeros([BLOCK, BLOCK], gl.float32, wide)
    for i in range(blocks):
        dk0, dk1, dv0, dv1 = consume(
            k_s, v_s, q_halves, do_halves, do_s, t_s, h_s, ready, t_full, h_full, h_free, dk0, dk1, dv0, dv1, i,
            half, form, W, ACT, FAST,
        )  # fmt: skip
    k_len = fact(facts, KEYS).to(gl.int32)
    dk_ptr = pointer(facts, DK, dtype)
    dv_ptr = pointer(facts, DV, dtype)
    token = fact(facts, DK_TOKEN)
    store_sum(dk0 * half, dk_ptr, token, 0, W * BLOCK, k_len)
    store_sum(dk1 * half, dk_ptr, token, BLOCK, W * BLOCK, k_len)
    store_sum(dv0, dv_ptr, token, 0, W * BLOCK, k_len)
    store_sum(dv1, dv_ptr, token, BLOCK, W * BLOCK, k_len)


# ---- cluster ---------------------------------------------------------------------------------------------------------


@gluon.jit
def meet_cluster():
    """All threads of all CTAs: nobody sends before the messages are cleared. Every partition begins with it."""
    asm: gl.constexpr = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;"
    gl.inline_asm(asm, "=r", [], gl.int32, is_pure=False)


@gluon.constexpr_function
def send_asm(outputs, inputs):
    """Lane j of a half warp, whose lanes hold the same rows, writes to CTA j."""
    a, b, (row, *_), (buffer,), (rank,), (heads,) = inputs
    lines = [
        "{ .reg .pred p, q; .reg .u32 j, at, to;",
        f"mov.u32 j, %laneid; and.b32 j, j, 15; setp.eq.u32 q, j, {rank};",
        f"setp.lt.u32 p, j, {heads}; setp.ne.and.u32 p, j, {rank}, p;",
        f"shl.b32 at, {rank}, 6; add.u32 at, at, {row}; shl.b32 at, at, 3; add.u32 at, at, {buffer};",
        f"mapa.shared::cluster.u32 at, at, {rank}; @p mapa.shared::cluster.u32 to, at, j;",
    ]
    for n, (x, y) in enumerate(zip(a, b)):  # a thread's rows are 8 apart
        lines.append(f"@q st.volatile.shared::cta.v2.b32 [at + {64 * n}], {{{x}, {y}}};")
        lines.append(f"@p st.relaxed.cluster.shared::cluster.v2.b32 [to + {64 * n}], {{{x}, {y}}};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def receive_asm(outputs, inputs):
    """Poll until the rows' values carry the bit. What does not come, because a CTA is gone, ends the kernel with an
    error after some seconds."""
    a, b = outputs
    (row, *_), (buffer,), (rank,), (slot,), (bit,) = inputs
    lines = [
        "{ .reg .pred p, lost; .reg .u32 at, t, wrong, tries; mov.u32 tries, 0;",
        f"shl.b32 at, {slot}, 6; add.u32 at, at, {row}; shl.b32 at, at, 3; add.u32 at, at, {buffer};",
        f"mapa.shared::cluster.u32 at, at, {rank};",
        "POLL: mov.u32 wrong, 0;",
    ]
    for n, (x, y) in enumerate(zip(a, b)):
        lines.append(f"ld.volatile.shared::cta.v2.b32 {{{x}, {y}}}, [at + {64 * n}];")
        lines.append(f"xor.b32 t, {x}, {bit}; or.b32 wrong, wrong, t; xor.b32 t, {y}, {bit}; or.b32 wrong, wrong, t;")
    lines.append(f"add.u32 tries, tries, 1; setp.gt.u32 lost, tries, {1 << 24}; @lost trap;")
    lines.append("and.b32 wrong, wrong, 1; setp.ne.u32 p, wrong, 0; @p bra POLL; }")
    return "\n".join(lines)


@gluon.jit
def send(a, b, rows, buffer, bit, rank, heads):
    """The rows' two sums of this CTA to all CTAs of the cluster. The last bit of a value tells which of a buffer's uses
    it belongs to, so that no barrier is needed. Two buffers in turn suffice: a warp sends for block i + 2 after it has
    seen what the others sent for block i + 1, and they sent that after they had read what it sent for block i."""
    x = (a.to(gl.int32, bitcast=True) & -2) | bit
    y = (b.to(gl.int32, bitcast=True) & -2) | bit
    args = [x, y, rows, buffer, rank, heads]
    gl.inline_asm(send_asm, ("r", "r", "r", "r", "r", "r"), args, is_pure=False)


@gluon.jit
def receive(rows, buffer, bit, rank, heads):
    """The rows' two sums over all heads, always added in the same order."""
    R: gl.constexpr = gl.SliceLayout(1, strip_layout())
    T: gl.constexpr = gl.distributed_type(gl.int32, [STRIP], R)
    a = gl.zeros([STRIP], gl.float32, R)
    b = a
    for head in range(heads):
        args = [rows, buffer, rank, head, bit]
        x, y = gl.inline_asm(receive_asm, ("=&r", "=&r", "r", "r", "r", "r", "r"), args, (T, T), is_pure=False)
        a += x.to(gl.float32, bitcast=True)
        b += y.to(gl.float32, bitcast=True)
    return a, b


@gluon.jit
def clear_messages(messages):
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    whole = messages.reinterpret(gl.float32, [2 * MAX_HEADS, 2 * BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    whole.store(gl.zeros([2 * MAX_HEADS, 2 * BLOCK], gl.float32, L))


@gluon.jit
def bit_of(block):
    """What the messages of a block carry; buffers begin with zeros."""
    return (block >> 1 & 1) ^ 1


# ---- side ------------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def strip_layout():
    """[16, 64] pairs: 16 lanes cover a row with 16 bytes each."""
    return gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])


@gluon.constexpr_function
def piece_layout():
    """[16, 16]: one value per 16-byte piece of a strip."""
    return gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])


@gluon.constexpr_function
def strip_type():
    return gl.distributed_type(gl.int32, [STRIP, 64], strip_layout())


@gluon.constexpr_function
def load_asm(outputs, inputs):
    (values,), ((base,), (offset, *_)) = outputs, inputs
    lines = [f"{{ .reg .b32 a; add.u32 a, {base}, {offset};"]
    for j in range(len(values) // 4):  # rows 8 apart
        lines.append(f"ld.shared.v4.b32 {{{', '.join(values[4 * j : 4 * j + 4])}}}, [a + {1024 * j}];")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def store_asm(outputs, inputs):
    (base,), (offset, *_), values = inputs
    lines = [f"{{ .reg .b32 a; add.u32 a, {base}, {offset};"]
    for j in range(len(values) // 4):
        lines.append(f"st.shared.v4.b32 [a + {1024 * j}], {{{', '.join(values[4 * j : 4 * j + 4])}}};")
    return "\n".join([*lines, "}"])


@gluon.jit
def piece_offsets():
    """Byte offsets of a thread's pieces in the two panels of a block, for its first 16 rows."""
    rows = gl.arange(0, STRIP, gl.SliceLayout(1, piece_layout()))[:, None]
    pieces = gl.arange(0, 16, gl.SliceLayout(0, piece_layout()))[None, :]
    return (pieces >> 3) * 8192 + rows * 128 + ((pieces & 7) ^ (rows & 7)) * 16


@gluon.jit
def load_pairs(block, offsets):
    """Pairs of a strip; `block` is the first panel."""
    return gl.inline_asm(load_asm, ("=&r", "r", "r"), [block, offsets], strip_type(), is_pure=False)


@gluon.jit
def load_live(block, offsets, live):
    pairs = load_pairs(block, offsets)
    return gl.where(live[:, None], pairs, gl.zeros_like(pairs))


@gluon.jit
def store_pairs(block, offsets, values):
    gl.inline_asm(store_asm, ("r", "r", "r"), [block, offsets, values], is_pure=False)


@gluon.jit
def parameter(facts, place: gl.constexpr, given, default: gl.constexpr):
    """Even and odd columns of a head's part of a parameter."""
    C: gl.constexpr = gl.SliceLayout(0, strip_layout())
    W: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
    values = gl.full([WIDTH], default, gl.float32, W)
    if given != 0:
        values = gl.load(gl.multiple_of(pointer(facts, place, gl.float32) + gl.arange(0, WIDTH, W), 16))
    even, odd = values.reshape([BLOCK, 2]).split()
    return gl.convert_layout(even, C, assert_trivial=True), gl.convert_layout(odd, C, assert_trivial=True)


@gluon.constexpr_function
def fold_asm(outputs, inputs):
    (out,), (even, odd) = outputs, inputs
    lines = ["{ .reg .pred p; .reg .u32 l; .reg .f32 a, b; mov.u32 l, %laneid; setp.lt.u32 p, l, 16;"]
    for x, e, o in zip(out, even, odd):
        lines.append(f"selp.f32 a, {e}, {o}, p; selp.f32 b, {o}, {e}, p; shfl.sync.bfly.b32 b, b, 16, 31, -1;")
        lines.append(f"add.f32 {x}, a, b;")
    return "\n".join([*lines, "}"])


@gluon.jit
def fold(even, odd):
    """Sums over the two half warps, of which the first keeps the even columns and the second the odd ones."""
    return gl.inline_asm(fold_asm, ("=&f", "f", "f"), [even, odd], even.type, is_pure=True)


@gluon.jit
def row_sums(even, odd):
    return gl.sum(even + odd, axis=1)


@gluon.jit
def issue_q(q_desc, q_s, q_full, row, column, block):
    slot = block % Q_SLOTS
    bar = q_full.index(slot)
    mbarrier.expect(bar, 2 * q_desc.nbytes_per_cta)
    tma.async_load(q_desc, [row, column], bar, q_s.index(2 * slot))
    tma.async_load(q_desc, [row, column + BLOCK], bar, q_s.index(2 * slot + 1))


@gluon.jit
def issue_x(dout_desc, hat_desc, do_s, qn_s, x_full, row, column, block):
    stage = block & 1
    bar = x_full.index(stage)
    mbarrier.expect(bar, 4 * dout_desc.nbytes_per_cta)
    for panel in gl.static_range(2):
        tma.async_load(dout_desc, [row, column + panel * BLOCK], bar, do_s.index(2 * stage + panel))
        tma.async_load(hat_desc, [row, column + panel * BLOCK], bar, qn_s.index(2 * stage + panel))


@gluon.jit
def row_vectors(facts, start, first, q_len, form, dtype: gl.constexpr):
    """Of a block's 64 rows: rstd, -mean * rstd, rstd of the post-norm."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows = first + gl.arange(0, BLOCK, L)
    live = rows < q_len
    at = start.to(gl.int64) + rows
    rstd = gl.full([BLOCK], 1.0, gl.float32, L)
    mean = gl.zeros([BLOCK], gl.float32, L)
    o_rstd = gl.full([BLOCK], 1.0, gl.float32, L)
    if form >> PRE_BIT & 3 != 0:
        rstd = gl.load(pointer(facts, RSTD, gl.float32) + at, mask=live, other=0.0)
        if form >> PRE_BIT & 3 == LAYER:
            mean = gl.load(pointer(facts, MEAN, gl.float32) + at, mask=live, other=0.0)
            mean += gl.load(pointer(facts, Q, dtype) + at * fact(facts, Q_TOKEN), mask=live, other=0.0).to(gl.float32)
    if form >> POST_BIT & 3 != 0:
        o_rstd = gl.load(pointer(facts, O_RSTD, gl.float32) + at, mask=live, other=0.0)
    return rstd, -mean * rstd, o_rstd


@gluon.jit
def side(
    q_desc, k_desc, v_desc, dout_desc, hat_desc, k_s, v_s, q_s, do_s, qn_s, h_s, rows_s, front_s, back_s, facts,
    kv_full, q_full, x_full, ready, h_full, h_free, add_ptr, dq_ptr, add_pitch, dq_pitch,
    start, q_len, k_start, head, heads, blocks, form,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    S: gl.constexpr = strip_layout()
    R: gl.constexpr = gl.SliceLayout(1, S)
    C: gl.constexpr = gl.SliceLayout(0, S)
    STRIPS: gl.constexpr = BLOCK // STRIP
    clear_messages(front_s)
    clear_messages(back_s)
    meet_cluster()
    column = head * WIDTH
    mbarrier.expect(kv_full, 8 * k_desc.nbytes_per_cta)
    for half in gl.static_range(2):
        for panel in gl.static_range(2):
            tma.async_load(
                k_desc, [k_start + half * BLOCK, column + panel * BLOCK], kv_full, k_s.index(2 * half + panel)
            )
            tma.async_load(
                v_desc, [k_start + half * BLOCK, column + panel * BLOCK], kv_full, v_s.index(2 * half + panel)
            )
    for j in range(gl.minimum(blocks, 2)):
        issue_q(q_desc, q_s, q_full, start + j * BLOCK, column, j)
        issue_x(dout_desc, hat_desc, do_s, qn_s, x_full, start + j * BLOCK, column, j)
    if blocks > 2:
        issue_q(q_desc, q_s, q_full, start + 2 * BLOCK, column, 2)
    offsets = piece_offsets() + own_shift(facts)
    local = gl.arange(0, STRIP, R)
    pairs = gl.arange(0, BLOCK, C)
    post_weight = gl.zeros([STRIP, BLOCK], gl.float32, S)
    pre_weight = post_weight
    pre_bias = post_weight
    for i in range(-2, blocks):
        j = i + 2
        if i >= 0:  # block i: sums of the pre-norm's backward
            mbarrier.wait(h_full, i & 1)
            if j < blocks:
                issue_x(dout_desc, hat_desc, do_s, qn_s, x_full, start + j * BLOCK, column, j)
            slot = i % Q_SLOTS
            for strip in range(STRIPS):
                rows = strip * STRIP + local
                live = i * BLOCK + rows < q_len
                rstd = rows_s.index((2 * slot) * STRIPS + strip).load(R)
                lift = rows_s.index((2 * slot + 1) * STRIPS + strip).load(R)
                he, ho = unpack(load_live(h_s.index(0), offsets + strip * (STRIP * 128), live), dtype)
                xe, xo = unpack(load_live(q_s.index(2 * slot), offsets + strip * (STRIP * 128), live), dtype)
                xe = xe * rstd[:, None] + lift[:, None]
                xo = xo * rstd[:, None] + lift[:, None]
                pre_weight += fold(he * xe, ho * xo)
                pre_bias += fold(he, ho)
                we, wo = parameter(facts, WEIGHT, form & HAS_WEIGHT, 1.0)
                he = he * we[None, :]
                ho = ho * wo[None, :]
                dot = row_sums(he * xe, ho * xo)
                total = row_sums(he, ho)
                send(dot, total, rows, back_s.index((i & 1) * MAX_HEADS), bit_of(i), head, heads)
        if j < blocks:  # block i + 2: sums of the post-norm's backward
            slot = j % Q_SLOTS
            next_rstd, next_shift, next_o = row_vectors(facts, start, j * BLOCK, q_len, form, dtype)
            mbarrier.wait(x_full.index(j & 1), (j >> 1) & 1)
            for strip in range(STRIPS):
                rows = strip * STRIP + local
                live = j * BLOCK + rows < q_len
                de, do = unpack(load_live(do_s.index(2 * (j & 1)), offsets + strip * (STRIP * 128), live), dtype)
                ze, zo = unpack(load_live(qn_s.index(2 * (j & 1)), offsets + strip * (STRIP * 128), live), dtype)
                post_weight += fold(de * ze, do * zo)
                ge, go = parameter(facts, POST, form & HAS_POST, 1.0)
                de = de * ge[None, :]
                do = do * go[None, :]
                dot = row_sums(de * ze, do * zo)
                total = row_sums(de, do)
                send(dot, total, rows, front_s.index((j & 1) * MAX_HEADS), bit_of(j), head, heads)
            store_rows(rows_s, 2 * slot, next_rstd)
            store_rows(rows_s, 2 * slot + 1, next_shift)
            store_rows(rows_s, 2 * Q_SLOTS + (j & 1), next_o)
        if i >= 0:  # block i: dq
            slot = i % Q_SLOTS
            for strip in range(STRIPS):
                rows = strip * STRIP + local
                live = i * BLOCK + rows < q_len
                at = (start.to(gl.int64) + i * BLOCK + rows)[:, None]
                more = gl.zeros([STRIP, BLOCK], gl.int32, S)
                if form & ADD != 0:
                    more = gl.load(add_ptr + at * add_pitch + (head * BLOCK + pairs)[None, :],
                                   mask=live[:, None] & (pairs >= 0)[None, :], other=0)  # fmt: skip
                rstd = rows_s.index((2 * slot) * STRIPS + strip).load(R)
                lift = rows_s.index((2 * slot + 1) * STRIPS + strip).load(R)
                dot, total = receive(rows, back_s.index((i & 1) * MAX_HEADS), bit_of(i), head, heads)
                he, ho = unpack(load_pairs(h_s.index(0), offsets + strip * (STRIP * 128)), dtype)
                xe, xo = unpack(load_pairs(q_s.index(2 * slot), offsets + strip * (STRIP * 128)), dtype)
                me, mo = unpack(more, dtype)
                we, wo = parameter(facts, WEIGHT, form & HAS_WEIGHT, 1.0)
                # dq = rstd * h * weight + slope * xhat + constant (+ add), xhat = rstd * q + lift
                slope = -dot * number(facts, PRE_SLOPE) * rstd
                constant = -total * number(facts, PRE_SHIFT) * rstd + slope * lift
                slope = slope * rstd
                me = he * we[None, :] * rstd[:, None] + (xe * slope[:, None] + (constant[:, None] + me))
                mo = ho * wo[None, :] * rstd[:, None] + (xo * slope[:, None] + (constant[:, None] + mo))
                gl.store(dq_ptr + at * dq_pitch + (head * BLOCK + pairs)[None, :], pack(me, mo, dtype),
                         mask=live[:, None] & (pairs >= 0)[None, :])  # fmt: skip
            fence_async_shared()
            mbarrier.arrive(h_free)
            if i + Q_SLOTS < blocks:
                issue_q(q_desc, q_s, q_full, start + (i + Q_SLOTS) * BLOCK, column, i + Q_SLOTS)
        if j < blocks:  # block i + 2: do and qn
            slot = j % Q_SLOTS
            mbarrier.wait(q_full.index(slot), (j // Q_SLOTS) & 1)
            for strip in range(STRIPS):
                rows = strip * STRIP + local
                live = j * BLOCK + rows < q_len
                here = offsets + strip * (STRIP * 128)
                o_rstd = rows_s.index((2 * Q_SLOTS + (j & 1)) * STRIPS + strip).load(R)
                dot, total = receive(rows, front_s.index((j & 1) * MAX_HEADS), bit_of(j), head, heads)
                slope = -dot * number(facts, POST_SLOPE) * o_rstd
                constant = -total * number(facts, POST_SHIFT) * o_rstd
                de, do = unpack(load_live(do_s.index(2 * (j & 1)), here, live), dtype)
                ge, go = parameter(facts, POST, form & HAS_POST, 1.0)
                de = de * ge[None, :] * o_rstd[:, None]
                do = do * go[None, :] * o_rstd[:, None]
                ze, zo = unpack(load_live(qn_s.index(2 * (j & 1)), here, live), dtype)
                de += ze * slope[:, None] + constant[:, None]
                do += zo * slope[:, None] + constant[:, None]
                store_pairs(do_s.index(2 * (j & 1)), here, pack(de, do, dtype))
                rstd = rows_s.index((2 * slot) * STRIPS + strip).load(R)
                lift = rows_s.index((2 * slot + 1) * STRIPS + strip).load(R)
                xe, xo = unpack(load_pairs(q_s.index(2 * slot), here), dtype)
                we, wo = parameter(facts, WEIGHT, form & HAS_WEIGHT, 1.0)
                be, bo = parameter(facts, BIAS, form & HAS_BIAS, 0.0)
                xe = (xe * rstd[:, None] + lift[:, None]) * we[None, :] + be[None, :]
                xo = (xo * rstd[:, None] + lift[:, None]) * wo[None, :] + bo[None, :]
                normed = pack(xe, xo, dtype)
                normed = gl.where(live[:, None], normed, gl.zeros_like(normed))
                store_pairs(qn_s.index(2 * (j & 1)), here, normed)
            fence_async_shared()
            mbarrier.arrive(ready.index(j & 1))
    scratch = h_s.reinterpret(gl.float32, [KINDS, 8, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    store_columns(facts, scratch, post_weight, 0, heads, column)
    store_columns(facts, scratch, pre_weight, 1, heads, column)
    store_columns(facts, scratch, pre_bias, 2, heads, column)


@gluon.jit
def store_rows(rows_s, at, values):
    """64 values in four places of 16, one per strip."""
    rows_s.reinterpret(gl.float32, [2 * Q_SLOTS + 2, BLOCK], PLAIN).index(at).store(values)


@gluon.jit
def store_columns(facts, scratch, sums, kind: gl.constexpr, heads, column):
    """One row of sums per program. Row 2 w + h of `sums` has columns 2 c + h from warp w; `scratch` is where they meet."""
    L: gl.constexpr = gl.BlockedLayout([8, 1], [1, 32], [1, 4], [1, 0])
    scratch.index(kind).store(sums)
    gl.barrier()
    total = gl.sum(scratch.index(kind).load(L).reshape([4, 2, BLOCK]), axis=0)
    ptr = pointer(facts, SUMS, gl.float32) + (gl.program_id(0) // heads * KINDS + kind).to(gl.int64) * (heads * WIDTH)
    odd = gl.arange(0, 2, gl.SliceLayout(1, total.type.layout))[:, None]
    cols = column + 2 * gl.arange(0, BLOCK, gl.SliceLayout(0, total.type.layout))[None, :]
    gl.store(ptr + (cols + odd), total)


@gluon.jit(do_not_specialize=["heads", "form"])
def attention_backward_kernel(
    q_desc,  # [T, D]; D = heads * 128
    k_desc,  # [U, D]
    v_desc,
    dout_desc,  # [T, D]
    hat_desc,  # [T, D]: o_hat
    q_ptr,  # q again, for the first element of a row
    q_offsets_ptr,  # [B + 1], of which every q_step-th 32-bit word is read
    k_offsets_ptr,
    mean_ptr,  # [T] fp32: the pre-norm's mean, relative to that element; read for layer norm
    rstd_ptr,  # [T] fp32
    o_rstd_ptr,  # [T] fp32
    weight_ptr,  # [D] fp32: the pre-norm's parameters, then the post-norm's weight
    bias_ptr,
    post_ptr,
    add_ptr,  # pairs; what is added to dq, if ADD
    dq_ptr,  # pairs, [T, D / 2]
    dk_ptr,  # rows dk_token apart
    dv_ptr,
    sums_ptr,  # [B, KINDS, D] fp32
    q_token,
    add_pitch,
    dq_pitch,
    dk_token,
    q_step,
    k_step,
    heads,
    form,
    half_scale,
    ACT: gl.constexpr,
    FAST: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    tile: gl.constexpr = q_desc.layout
    b = gl.program_id(0) // heads
    head = gl.program_id(0) - b * heads
    start = gl.load(q_offsets_ptr + b * q_step)
    q_len = gl.load(q_offsets_ptr + (b + 1) * q_step) - start
    k_start = gl.load(k_offsets_ptr + b * k_step)
    k_len = gl.load(k_offsets_ptr + (b + 1) * k_step) - k_start
    blocks = (q_len + BLOCK - 1) // BLOCK
    k_s = gl.allocate_shared_memory(dtype, [4, BLOCK, BLOCK], tile)
    v_s = gl.allocate_shared_memory(dtype, [4, BLOCK, BLOCK], tile)
    q_s = gl.allocate_shared_memory(dtype, [2 * Q_SLOTS, BLOCK, BLOCK], tile)
    do_s = gl.allocate_shared_memory(dtype, [4, BLOCK, BLOCK], tile)
    qn_s = gl.allocate_shared_memory(dtype, [4, BLOCK, BLOCK], tile)
    t_s = gl.allocate_shared_memory(dtype, [2, BLOCK, BLOCK], tile)
    h_s = gl.allocate_shared_memory(dtype, [2, BLOCK, BLOCK], tile)
    rows_s = gl.allocate_shared_memory(gl.float32, [(2 * Q_SLOTS + 2) * (BLOCK // STRIP), STRIP], PLAIN)
    front_s = gl.allocate_shared_memory(gl.float32, [2 * MAX_HEADS, 2 * BLOCK], PLAIN)
    back_s = gl.allocate_shared_memory(gl.float32, [2 * MAX_HEADS, 2 * BLOCK], PLAIN)
    kv_full = mbarrier.allocate_mbarrier()
    kv_ready = mbarrier.allocate_mbarrier()
    t_full = mbarrier.allocate_mbarrier()
    h_full = mbarrier.allocate_mbarrier()
    h_free = mbarrier.allocate_mbarrier()
    q_full = mbarrier.allocate_mbarrier(batch=Q_SLOTS)
    x_full = mbarrier.allocate_mbarrier(batch=2)
    ready = mbarrier.allocate_mbarrier(batch=2)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_ready, count=2)
    mbarrier.init(t_full, count=2)
    mbarrier.init(h_full, count=2)
    mbarrier.init(h_free, count=1)
    for slot in gl.static_range(Q_SLOTS):
        mbarrier.init(q_full.index(slot), count=1)
    for stage in gl.static_range(2):
        mbarrier.init(x_full.index(stage), count=1)
        mbarrier.init(ready.index(stage), count=1)
    facts = gl.allocate_shared_memory(gl.int64, [FACTS], PLAIN)
    keys = k_start.to(gl.int64) * dk_token + head * WIDTH
    column = head * WIDTH
    pre = form >> PRE_BIT & 3
    post = form >> POST_BIT & 3
    kept = (facts, own_shift(facts), q_ptr, mean_ptr, rstd_ptr, o_rstd_ptr, weight_ptr + column, bias_ptr + column, post_ptr + column,
            sums_ptr, dk_ptr + keys, dv_ptr + keys, q_token, dk_token, k_len.to(gl.int64), share(pre, RMS, heads),
            share(pre, LAYER, heads), share(post, RMS, heads), share(post, LAYER, heads))  # fmt: skip
    gl.inline_asm(
        keep_asm,
        ("r", "r", "l", "l", "l", "l", "l", "l", "l", "l", "l", "l", "l", "l", "l", "l", "l", "l", "l"),
        kept,
        is_pure=False,
    )
    gl.warp_specialize(
        [
            (side, (q_desc, k_desc, v_desc, dout_desc, hat_desc, k_s, v_s, q_s, do_s, qn_s, h_s, rows_s, front_s, back_s,
                    facts, kv_full, q_full, x_full, ready, h_full, h_free, add_ptr, dq_ptr,
                    add_pitch, dq_pitch, start, q_len, k_start, head, heads, blocks, form)),
            (consumer, (k_s, v_s, qn_s, do_s, t_s, h_s, facts, kv_full, kv_ready, ready, t_full, h_full, h_free, blocks,
                        half_scale, form, gl.constexpr(0), ACT, FAST)),
            (consumer, (k_s, v_s, qn_s, do_s, t_s, h_s, facts, kv_full, kv_ready, ready, t_full, h_full, h_free, blocks,
                        half_scale, form, gl.constexpr(1), ACT, FAST)),
        ],
        [4, 4],
        [216, 216],
    )  # fmt: skip


@triton.jit
def finish_kernel(
    sums_ptr,  # [parts, width] fp32
    out_ptr,  # [width] fp32: the sums over the parts, always in the same order
    dq_ptr,  # [T, D], dk, dv rows dk_token apart: rows past the last sequence become 0
    dk_ptr,
    dv_ptr,
    q_offsets_ptr,
    k_offsets_ptr,
    dk_token,
    q_last,  # where the last offset is, in words of 32 bits
    k_last,
    parts,
    width,
    T,
    U,
    D,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ZEROS: tl.constexpr,
):
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, PARTS)
    keep = cols < width
    total = tl.zeros((PARTS, COLUMNS), tl.float32)
    for part in range(0, parts, PARTS):
        at = (part + rows).to(tl.int64)[:, None] * width + cols[None, :]
        total += tl.load(sums_ptr + at, mask=(part + rows < parts)[:, None] & keep[None, :], other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, 0), mask=keep)
    lanes = tl.arange(0, ZEROS)
    zeros = tl.zeros((ZEROS,), dq_ptr.dtype.element_ty)
    for row in range(tl.load(q_offsets_ptr + q_last) + tl.program_id(0), T, tl.num_programs(0)):
        for col in range(0, D, ZEROS):
            tl.store(dq_ptr + row.to(tl.int64) * D + col + lanes, zeros, mask=col + lanes < D)
    for row in range(tl.load(k_offsets_ptr + k_last) + tl.program_id(0), U, tl.num_programs(0)):
        for col in range(0, D, ZEROS):
            tl.store(dk_ptr + row.to(tl.int64) * dk_token + col + lanes, zeros, mask=col + lanes < D)
            tl.store(dv_ptr + row.to(tl.int64) * dk_token + col + lanes, zeros, mask=col + lanes < D)


ACTIVATIONS = {"gelu": GELU.value, "gelu_tanh": GELU_TANH.value}


def variants():
    for dtype in ("bf16", "fp16"):
        for name, code in ACTIVATIONS.items():
            args = {f"{x}_desc": Tile(dtype, (64, 64)) for x in ("q", "k", "v", "dout", "hat")}
            args |= {"q_ptr": f"*{dtype}:16", "q_offsets_ptr": "*i32", "k_offsets_ptr": "*i32"}
            args |= {f"{x}_ptr": "*fp32" for x in ("mean", "rstd", "o_rstd", "weight", "bias", "post")}
            args |= {"add_ptr": "*i32:16", "dq_ptr": "*i32:16", "dk_ptr": f"*{dtype}:16", "dv_ptr": f"*{dtype}:16"}
            args |= {"sums_ptr": "*fp32:16", "q_token": "i64:8", "add_pitch": "i64:4", "dq_pitch": "i64:4"}
            args |= {"dk_token": "i64:8"}
            args |= {
                "q_step": "i32",
                "k_step": "i32",
                "heads": "i32",
                "form": "i32",
                "half_scale": "fp32",
                "ACT": code,
                "FAST": dtype == "bf16",
            }
            yield Variant(f"attention_backward_{dtype}_{name}", attention_backward_kernel, args, maxnreg=168)


def finish_variants():
    for dtype in ("bf16", "fp16"):
        args = {"sums_ptr": "*fp32:16", "out_ptr": "*fp32:16"}
        args |= {f"{x}_ptr": f"*{dtype}:16" for x in ("dq", "dk", "dv")} | {
            "q_offsets_ptr": "*i32",
            "k_offsets_ptr": "*i32",
        }
        args |= {
            "dk_token": "i64:8",
            "q_last": "i32",
            "k_last": "i32",
            "parts": "i32",
            "width": "i32:8",
            "T": "i32",
            "U": "i32",
            "D": "i32:8",
        }
        args |= {"PARTS": 128, "COLUMNS": 32, "ZEROS": 512}
        yield Variant(f"attention_backward_finish_{dtype}", finish_kernel, args, num_warps=8)


VARIANTS = [*variants(), *finish_variants()]
