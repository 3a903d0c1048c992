"""Row dots of the weight gradient's kernel (wgrad_kernels.py), for the gradient of x: with DELTA, two warps and a loader of
their own compute sum_n dy_mn (y_mn - b'_n) = sum_k (g * xhat)_mk, a pass over dy and y that costs as much as a norm and
here runs under the products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .dgrad_kernels import advance, widen
from .wgrad_steps import STEP

DOT_ROWS = gl.constexpr(32)
DOT_COLUMNS = gl.constexpr(64)
DOT_SLOTS = gl.constexpr(3)


@gluon.jit
def dots_loader(dy_desc, y_desc, dots_s, ready, taken, N, first, steps, tile, tiles):
    slot = 0
    phase = 0
    for group in range(tile, steps * (STEP // DOT_ROWS), tiles):
        m = first * STEP + group * DOT_ROWS
        for n in range(0, N, DOT_COLUMNS):
            mbarrier.wait(taken.index(slot), phase ^ 1)
            bar = ready.index(slot)
            mbarrier.expect(bar, 2 * dy_desc.nbytes_per_cta)
            tma.async_load(dy_desc, [m, n], bar, dots_s.index(2 * slot))
            tma.async_load(y_desc, [m, n], bar, dots_s.index(2 * slot + 1))
            slot, phase = advance(slot, phase, DOT_SLOTS)


@gluon.jit
def row_dots(offset_ptr, delta_ptr, dots_s, ready, taken, M, N, first, steps, tile, tiles):
    """The rows of a split in groups of 32, dealt out to the CTAs that share the split. 8 lanes cover 64 columns."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    R: gl.constexpr = gl.SliceLayout(1, L)
    slot = 0
    phase = 0
    for group in range(tile, steps * (STEP // DOT_ROWS), tiles):
        dot = gl.zeros([DOT_ROWS, 8], gl.float32, gl.BlockedLayout([1, 1], [4, 8], [2, 1], [1, 0]))
        for n in range(0, N, DOT_COLUMNS):
            cols = n + gl.arange(0, DOT_COLUMNS, gl.SliceLayout(0, L))
            offset = gl.load(offset_ptr + cols, mask=cols < N, other=0.0)
            mbarrier.wait(ready.index(slot), phase)
            dy = dots_s.index(2 * slot).load(L)
            y = dots_s.index(2 * slot + 1).load(L)
            fence_async_shared()
            mbarrier.arrive(taken.index(slot))
            slot, phase = advance(slot, phase, DOT_SLOTS)
            product = widen(dy) * (widen(y) - offset[None, :])
            part = gl.sum(product.reshape([DOT_ROWS, 8, 8]), axis=2)
            dot += gl.convert_layout(part, dot.type.layout, assert_trivial=True)
        rows = first * STEP + group * DOT_ROWS + gl.arange(0, DOT_ROWS, R)
        gl.store(delta_ptr + rows, gl.convert_layout(gl.sum(dot, axis=1), R), mask=rows < M)
