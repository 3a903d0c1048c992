"""Of the forward of jagged attention (gdpa_forward_kernels.py): what moves between shared memory and memory. By hand, for
the reasons that gdpa_backward_moves.py has."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .facts import fact, pointer
from .gdpa_backward_moves import keep_rows
from .gdpa_backward_ranges import BLOCK, DQ, PITCH, ZERO, whole

OUT = DQ  # where the address of o waits
PREFETCHED = gl.constexpr(128 * 32)  # words of the keys' offsets, by 128 threads and lines of 32


@gluon.constexpr_function
def _prefetch(outputs, inputs):
    """A tensor map has five parameters: itself, two sizes, two strides."""
    ((address,),) = inputs
    maps = [f"prefetch.param.tensormap [gdpa_forward_kernel_param_{5 * i}];" for i in range(4)]
    return "\n".join([*maps, f"prefetch.global.L2 [{address}];"])


@gluon.jit
def prefetch(k_offsets_ptr, words):
    """What the first copies wait for: the kernel's four tensor maps, which come first among its parameters, and where the
    keys of a sequence are."""
    word = gl.arange(0, PREFETCHED // 32, gl.BlockedLayout([1], [32], [4], [0])) * 32
    gl.inline_asm(_prefetch, "l,~{memory}", [k_offsets_ptr + gl.minimum(word, words)], (), is_pure=False)


@gluon.constexpr_function
def _clear(outputs, inputs):
    """A thread has a row of both panels, 128 bytes each; what is swizzled is zero, too."""
    (tile,), (rows,), (zero,) = inputs
    lines = [
        f"{{ .reg .pred p; .reg .b32 t, at, zero; mov.u32 t, %tid.x; add.u32 t, t, {zero}; mov.b32 zero, 0;",
        f"and.b32 t, t, 127; setp.ge.s32 p, t, {rows}; shl.b32 at, t, 7; add.u32 at, at, {tile};",
    ]
    for panel in range(2):
        for piece in range(8):
            lines.append(f"@p st.shared.v4.b32 [at + {16384 * panel + 16 * piece}], {{zero, zero, zero, zero}};")
    return "\n".join([*lines, "}"])


@gluon.jit
def clear_keys(tile, keys, facts):
    """Zero the rows of a [128, 128] tile from `keys` on."""
    gl.inline_asm(_clear, "r,r,r,~{memory}", [tile, keys, whole(facts, ZERO)], (), is_pure=False)


@gluon.constexpr_function
def _copy_rows(outputs, inputs):
    """16 threads have a row of 256 bytes, a piece of 16 bytes each, and then the row that is 8 further on. A row's pieces
    are swizzled by its number modulo 8, which stays. Rows that are not stored are read all the same: what a predicated
    load leaves as it was would have to live through the whole kernel."""
    (tile,), (to,), (pitch,), (rows,), (zero,) = inputs
    lines = [
        "{ .reg .pred p<8>; .reg .b32 t, r, s, a, x<32>; .reg .b64 at, step, row;",
        f"mov.u32 t, %tid.x; add.u32 t, t, {zero};",
        "and.b32 t, t, 127; shr.u32 r, t, 4; and.b32 s, t, 7; xor.b32 s, s, r; shl.b32 s, s, 4;",
        f"and.b32 a, t, 8; shl.b32 a, a, 10; add.u32 a, a, s; shl.b32 s, r, 7; add.u32 a, a, s; add.u32 a, a, {tile};",
        "and.b32 t, t, 15; shl.b32 t, t, 4; cvt.u64.u32 at, t;",
        f"add.s64 at, at, {to}; shl.b64 step, {pitch}, 1; cvt.u64.u32 row, r; mad.lo.s64 at, row, step, at;",
        "shl.b64 step, step, 3;",
    ]
    pieces = ["{" + ", ".join(f"x{4 * j + i}" for i in range(4)) + "}" for j in range(8)]
    for j, piece in enumerate(pieces):
        lines.append(f"setp.lt.s32 p{j}, r, {rows}; ld.shared.v4.b32 {piece}, [a + {1024 * j}]; add.u32 r, r, 8;")
    for j, piece in enumerate(pieces):
        lines.append(f"@p{j} st.global.v4.b32 [at], {piece}; add.s64 at, at, step;")
    return "\n".join([*lines, "}"])


@gluon.jit
def send_block(o, desc, place, facts, row, column, rows):
    """A block of o by way of shared memory. A whole one goes by TMA, which reads `place` until tma.store_wait(0); of others
    TMA would also write the rows that follow, which belong to another sequence."""
    keep_rows(o, place, facts)
    fence_async_shared()
    gl.barrier()
    if rows < BLOCK:
        pitch = fact(facts, PITCH)
        to = pointer(facts, OUT, place.dtype) + row.to(gl.int64) * pitch + column
        args = [place, to, pitch, rows, whole(facts, ZERO)]
        gl.inline_asm(_copy_rows, "r,l,l,r,r,~{memory}", args, (), is_pure=False)
    else:
        tma.async_store(desc, [row, column], place)
