"""Of the norm_attention backward (attention_backward_kernels.py): the side's way with registers and messages.

A strip is 8 rows of 64 pairs of 16-bit values; half a warp holds a row, 16 bytes a lane.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .attention_backward_common import BLOCK, MAX_HEADS, STRIP, WIDTH, pointer


@gluon.constexpr_function
def strip_layout():
    """[8, 64] pairs: 16 lanes cover a row with 16 bytes each."""
    return gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])


@gluon.constexpr_function
def piece_layout():
    """[8, 16]: one value per 16-byte piece of a strip."""
    return gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])


@gluon.constexpr_function
def strip_type():
    return gl.distributed_type(gl.int32, [8, 64], strip_layout())


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
    """Byte offsets of a thread's pieces in the two panels of a block, for its first strip."""
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
