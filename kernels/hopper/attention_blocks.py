"""Of norm_attention's forward kernel: what moves between memory, shared memory and registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .attention_exchange import ROWS, own_address, row_layout, tile_layout

WIDTH = gl.constexpr(128)  # of a head
KEYS = gl.constexpr(128)  # most keys of a sequence
NONE, RMS, LAYER = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # kinds of a norm
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def column_layout():
    return gl.SliceLayout(0, tile_layout())


@gluon.constexpr_function
def memory_layout():
    """16 lanes cover a row with 16 bytes each."""
    return gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])


@gluon.jit
def widen(x):
    """16-bit values in fp32; a pair of bf16 takes one shift and one mask."""
    if x.dtype == gl.bfloat16:
        asm: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        bits = gl.inline_asm_elementwise(asm, "=r,=r,r", [x], dtype=gl.int32, is_pure=True, pack=2)
        return bits.to(gl.float32, bitcast=True)
    else:
        return x.to(gl.float32)


@gluon.jit
def load_vector(target, ptr, first, narrow, default: gl.constexpr, dtype: gl.constexpr):
    """A head's part of gamma or beta as fp32 in shared memory; `narrow`: it has the type of q."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    cols = first + gl.arange(0, WIDTH, L)
    value = gl.full([WIDTH], default, gl.float32, L)
    if ptr.to(gl.int64) != 0:
        if narrow:
            value = gl.load(ptr.to(gl.pointer_type(dtype), bitcast=True) + cols).to(gl.float32)
        else:
            value = gl.load(ptr + cols)
    target.store(value)


# ---- sequences -------------------------------------------------------------------------------------------------------


@gluon.jit
def find_sequence(offsets_ptr, stride, batch, row):
    """The sequence that holds a row."""
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    found = 0
    for first in range(0, batch, 512):
        b = first + gl.arange(0, 512, L)
        ends = gl.load(offsets_ptr + (b + 1) * stride, mask=b < batch, other=2147483647)
        found += gl.sum((ends <= row).to(gl.int32), axis=0)
    return gl.minimum(found, batch - 1)


@gluon.jit
def following_sequence(offsets_ptr, stride, b, row):
    """The first sequence after b that is not empty, and its end; it begins at `row`."""
    b += 1
    end = gl.load(offsets_ptr + (b + 1) * stride)
    while end <= row:
        b += 1
        end = gl.load(offsets_ptr + (b + 1) * stride)
    return b, end


@gluon.jit
def keys_of(offsets_ptr, stride, b, most):
    """First key and number of keys."""
    first = gl.load(offsets_ptr + b * stride)
    return first, gl.minimum(gl.load(offsets_ptr + (b + 1) * stride) - first, most)


# ---- tiles -----------------------------------------------------------------------------------------------------------


@gluon.jit
def load_tile(desc, place, ready, row, column):
    mbarrier.expect(ready, desc.nbytes_per_cta)
    tma.async_load(desc, [row, column], ready, place)


@gluon.jit
def clear_values(v_s, keys):
    """Zeros for values past the last key: what lies there belongs to others, and 0 * NaN is NaN."""
    L: gl.constexpr = memory_layout()
    for i in gl.static_range(4):
        part = v_s.slice(32 * i, 32, dim=0)
        key = 32 * i + gl.arange(0, 32, gl.SliceLayout(1, L))
        value = part.load(L)
        part.store(gl.where((key < keys)[:, None], value, gl.zeros_like(value)))
    fence_async_shared()
    gl.barrier()


@gluon.jit
def places(row, rows, pitch, column, L: gl.constexpr):
    """(offsets, mask) of the first `rows` rows of a tile in memory."""
    i = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    cols = column + gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    return ((row + i).to(gl.int64) * pitch)[:, None] + cols[None, :], (i < rows)[:, None] & (cols >= 0)[None, :]


@gluon.jit
def store_tile(desc, ptr, tile, place, row, rows, pitch, column):
    """A tile to memory by way of shared memory. A whole one goes by TMA, which reads `place` until tma.store_wait(0);
    of others TMA would also write the rows that follow, which belong to another sequence."""
    place.store(tile)
    if rows == ROWS:
        fence_async_shared()
        gl.barrier()
        tma.async_store(desc, [row, column], place)
    else:
        at, mask = places(row, rows, pitch, column, memory_layout())
        gl.store(ptr + at, place.load(memory_layout()), mask=mask)


@gluon.jit
def clear_rows(ptr, row, rows, pitch, column):
    at, mask = places(row, rows, pitch, column, memory_layout())
    gl.store(ptr + at, gl.zeros([ROWS, WIDTH], ptr.dtype.element_ty, memory_layout()), mask=mask)


@gluon.jit
def load_other(ptr, row, rows, pitch, column):
    """A residual that is not q."""
    at, mask = places(row, rows, pitch, column, tile_layout())
    return gl.load(ptr + at, mask=mask, other=0.0).to(gl.float32)


# ---- statistics ------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _first(narrow):
    """Column 0 of rows lane / 4 and lane / 4 + 8 of a warp's 16; 16-byte pieces are swizzled by the row."""
    widen = "mov.b32 {out}, {{zero, h}};" if narrow == "bf16" else "cvt.f32.f16 {out}, h;"
    first, second = (widen.format(out=out) for out in ("$0", "$1"))
    return f"""{{ .reg .b32 t, r, at; .reg .b16 h, zero; mov.b16 zero, 0;
    mov.u32 t, %tid.x; and.b32 r, t, 28; shr.u32 at, r, 2; and.b32 t, t, 96; shr.u32 t, t, 1; add.u32 t, t, at;
    shl.b32 t, t, 7; shl.b32 at, at, 4; add.u32 at, at, t; add.u32 at, at, $2;
    ld.shared.b16 h, [at]; {first}
    ld.shared.b16 h, [at + 1024]; {second} }}"""


@gluon.jit
def first_values(place):
    """The first value of each row of a tile in shared memory, of this head."""
    kind: gl.constexpr = gl.distributed_type(gl.float32, [ROWS], row_layout())
    asm: gl.constexpr = _first("bf16" if place.dtype == gl.bfloat16 else "fp16")
    return gl.inline_asm(asm, "=f,=f,r,~{memory}", [own_address(place)], kind, is_pure=False)


@gluon.jit
def store_statistics(mean_ptr, rstd_ptr, mean, rstd, first, row, rows, step, kind):
    """`step` values per row; the mean relative to the row's first element."""
    i = gl.arange(0, ROWS, row_layout())
    at = (row + i).to(gl.int64) * step
    gl.store(rstd_ptr + at, rstd, mask=i < rows)
    if kind == LAYER:
        gl.store(mean_ptr + at, mean - first, mask=i < rows)
