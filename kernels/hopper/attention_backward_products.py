"""Of the norm_attention backward (attention_backward_kernels.py): the consumers, which make the five products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .attention_backward_common import (
    BLOCK,
    DK,
    DK_TOKEN,
    DV,
    GELU,
    GELU_TANH,
    HALF,
    INNER,
    KEYS,
    WIDTH,
    fact,
    meet_cluster,
    pointer,
)  # fmt: skip


@gluon.constexpr_function
def accumulator(columns):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def tanh(x, FAST: gl.constexpr):
    if FAST:
        return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    else:
        asm: gl.constexpr = (  # 2 / (1 + 2^(-2 x log2 e)) - 1
            "mul.f32 $0, $1, 0fC038AA3B; ex2.approx.ftz.f32 $0, $0; add.f32 $0, $0, 0f3F800000; "
            "rcp.approx.ftz.f32 $0, $0; add.f32 $0, $0, $0; add.f32 $0, $0, 0fBF800000;"
        )
        return gl.inline_asm_elementwise(asm, "=&f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def activate_with_slope(z, ACT: gl.constexpr, FAST: gl.constexpr):
    """(act(x), 2 act'(x)) for x = 2 z, with few constants and intermediate values, as registers are short. The forms are
    those of kernels/gdpa/elementwise.py:

        gelu_tanh   t = tanh(u)            y = z + z t   2 y' = (1 + t) (1 + (1 - t) x du/dx)
        gelu        t = erf(x / sqrt 2)    y = z + z t   2 y' = 1 + t + 2 x phi(x)
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
            z2 = gl.minimum(z2, 9.0)  # beyond, the gate is 0 or 1 and phi is 0
            t = tanh(z * ((z2 - 29.1303249) * z2 - 157.872831) * -0.010105827914476395, FAST)
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
