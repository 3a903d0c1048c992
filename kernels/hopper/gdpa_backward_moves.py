"""Of the backward of jagged attention (gdpa_backward_kernels.py): what moves between registers, shared memory and memory,
and how consumers and programs tell each other.

Much of it is by hand. The language's arrivals synchronise the warpgroup; addresses that it makes of a thread's number live
in registers through the whole kernel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .facts import fact, pointer
from .gdpa_backward_ranges import BATCH, BLOCK, DQ, FLAGS, PITCH, SUMS, WIDTH, ZERO, whole

# Arrivals by hand: those of the language synchronise the warpgroup around each, here every warp is on its own.


@gluon.constexpr_function
def _arrive(outputs, inputs):
    ((bar,),) = inputs
    return f"""{{ .reg .pred p; bar.warp.sync 0xffffffff; elect.sync _|p, 0xffffffff;
    @p mbarrier.arrive.shared::cta.b64 _, [{bar}]; }}"""


@gluon.jit
def arrive(bar):
    gl.inline_asm(_arrive, "r,~{memory}", [bar], (), is_pure=False)


@gluon.constexpr_function
def _clear(outputs, inputs):
    """A thread has half a row of 128 bytes in both panels; what is swizzled is zero, too."""
    (tile,), (rows,), (zero,) = inputs
    lines = [
        f"{{ .reg .pred p; .reg .b32 t, at, zero; mov.u32 t, %tid.x; add.u32 t, t, {zero}; mov.b32 zero, 0;",
        f"and.b32 t, t, 127; shr.u32 at, t, 1; setp.ge.s32 p, at, {rows}; shl.b32 at, t, 6; add.u32 at, at, {tile};",
    ]
    for place in (0, 16, 32, 48, 8192, 8208, 8224, 8240):
        lines.append(f"@p st.shared.v4.b32 [at + {place}], {{zero, zero, zero, zero}};")
    return "\n".join([*lines, "}"])


@gluon.jit
def clear(tile, rows, facts):
    """Zero the rows of a [64, 128] tile from `rows` on."""
    gl.inline_asm(_clear, "r,r,r,~{memory}", [tile, rows, whole(facts, ZERO)], (), is_pure=False)


# A thread of an accumulator holds, for every 8 columns, two neighbours each of its rows r and r + 8. Addresses that are
# computed once and by hand take few registers.


@gluon.constexpr_function
def _store_rows(outputs, inputs):
    (to,), (pitch,), (rows,), (zero,), values = inputs
    lines = [
        f"{{ .reg .pred p, q; .reg .b32 t, r, v; .reg .b64 at, below, step; mov.u32 t, %tid.x; add.u32 t, t, {zero};",
        "and.b32 t, t, 127;",
        "and.b32 r, t, 31; shr.u32 r, r, 2; shr.u32 v, t, 5; shl.b32 v, v, 4; add.u32 r, r, v;",
        f"setp.lt.s32 p, r, {rows}; add.u32 v, r, 8; setp.lt.s32 q, v, {rows};",
        f"shl.b64 step, {pitch}, 1; cvt.u64.u32 at, r; mad.lo.s64 at, at, step, {to}; and.b32 t, t, 3; shl.b32 t, t, 2;",
        "cvt.u64.u32 below, t; add.s64 at, at, below; shl.b64 step, step, 3; add.s64 below, at, step;",
    ]
    for j in range(len(values) // 4):
        left, right, left8, right8 = values[4 * j : 4 * j + 4]
        lines.append(f"cvt.rn.bf16x2.f32 v, {right}, {left}; @p st.global.b32 [at + {16 * j}], v;")
        lines.append(f"cvt.rn.bf16x2.f32 v, {right8}, {left8}; @q st.global.b32 [below + {16 * j}], v;")
    return "\n".join([*lines, "}"])


@gluon.jit
def store_rows(tile, facts, tensor: gl.constexpr, row, column, rows):
    """The first `rows` rows of a tile straight from registers."""
    pitch = fact(facts, PITCH)
    to = pointer(facts, tensor, gl.bfloat16) + row.to(gl.int64) * pitch + column
    gl.inline_asm(
        _store_rows, ("l", "l", "r", "r", "f"), [to, pitch, rows, whole(facts, ZERO), tile], (), is_pure=False
    )


@gluon.constexpr_function
def _keep_rows(outputs, inputs):
    """Lane l has the address of row l % 8 of matrix l / 8 of the four that one instruction stores: rows r and r + 8 of
    8 columns, then of the next 8."""
    (tile,), (zero,), values = inputs
    lines = [
        f"{{ .reg .b32 t, r, a, s, x<4>; mov.u32 t, %tid.x; add.u32 t, t, {zero};",
        "and.b32 r, t, 7; shr.u32 s, t, 4; and.b32 s, s, 1;",
        "xor.b32 s, s, r; shl.b32 s, s, 4; and.b32 a, t, 8; or.b32 r, r, a; and.b32 t, t, 96; shr.u32 t, t, 1;",
        f"add.u32 r, r, t; shl.b32 r, r, 7; add.u32 r, r, {tile};",
    ]
    for j in range(len(values) // 8):
        for i in range(4):
            left, right = values[8 * j + 2 * i : 8 * j + 2 * i + 2]
            lines.append(f"cvt.rn.bf16x2.f32 x{i}, {right}, {left};")
        lines.append(f"xor.b32 a, s, {32 * (j % 4)}; add.u32 a, a, r;")
        lines.append(f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [a + {8192 * (j // 4)}], {{x0, x1, x2, x3}};")
    return "\n".join([*lines, "}"])


@gluon.jit
def keep_rows(tile, place, facts):
    """A tile of 128 columns into shared memory, for TMA."""
    gl.inline_asm(_keep_rows, ("r", "r", "f"), [place, whole(facts, ZERO), tile], (), is_pure=False)


@gluon.constexpr_function
def _leave(outputs, inputs):
    """16 bytes a thread, its neighbour's beside them."""
    (to,), (zero,), values = inputs
    lines = [
        f"{{ .reg .b32 t; .reg .b64 at; mov.u32 t, %tid.x; add.u32 t, t, {zero};",
        "and.b32 t, t, 127; shl.b32 t, t, 4; cvt.u64.u32 at, t;",
        f"add.s64 at, at, {to};",
    ]
    for j in range(len(values) // 4):
        lines.append(f"st.global.v4.f32 [at + {2048 * j}], {{{', '.join(values[4 * j : 4 * j + 4])}}};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _take(outputs, inputs):
    (sums,), ((at,), (zero,), values) = outputs, inputs
    lines = [
        f"{{ .reg .b32 t; .reg .b64 at; .reg .f32 a, b, c, d; mov.u32 t, %tid.x; add.u32 t, t, {zero};",
        "and.b32 t, t, 127; shl.b32 t, t, 4;",
        f"cvt.u64.u32 at, t; add.s64 at, at, {at};",
    ]
    for j in range(len(values) // 4):
        lines.append(f"ld.global.v4.f32 {{a, b, c, d}}, [at + {2048 * j}];")
        lines += [f"add.f32 {sums[4 * j + i]}, {values[4 * j + i]}, {x};" for i, x in enumerate("abcd")]
    return "\n".join([*lines, "}"])


@gluon.jit
def sums_of(facts, program, W: gl.constexpr):
    """Where a program leaves this consumer's sums of dK; those of dV follow."""
    return pointer(facts, SUMS, gl.float32) + (2 * program + W).to(gl.int64) * (2 * BLOCK * WIDTH)


@gluon.constexpr_function
def _raise(outputs, inputs):
    (flag,), (zero,) = inputs
    return f"""{{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; add.u32 t, t, {zero};
    and.b32 t, t, 127; setp.eq.u32 p, t, 0;
    @p st.release.gpu.global.b32 [{flag}], 1; }}"""


@gluon.constexpr_function
def _await(outputs, inputs):
    ((flag,),) = inputs
    return f"""{{ .reg .pred p; .reg .b32 t;
    again: ld.acquire.gpu.global.b32 t, [{flag}]; setp.eq.u32 p, t, 0; @p bra again; }}"""


@gluon.constexpr_function
def _lower(outputs, inputs):
    (flag,), (zero,) = inputs
    return f"""{{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; add.u32 t, t, {zero};
    and.b32 t, t, 127; setp.eq.u32 p, t, 0;
    @p st.relaxed.gpu.global.b32 [{flag}], 0; }}"""


@gluon.jit
def program_id():
    """Asked anew each time, so that no address that depends on it is held in registers for long."""
    return gl.inline_asm("mov.u32 $0, %ctaid.x;", "=r", [], gl.int32, is_pure=False)


@gluon.jit
def leave(dk, dv, facts, W: gl.constexpr):
    """The sums so far to the next program."""
    program = program_id()
    to = sums_of(facts, program, W)
    zero = whole(facts, ZERO)
    gl.inline_asm(_leave, ("l", "r", "f"), [to, zero, dk], (), is_pure=False)
    gl.inline_asm(_leave, ("l", "r", "f"), [to + BLOCK * WIDTH, zero, dv], (), is_pure=False)
    gl.inline_asm("fence.acq_rel.gpu;", "~{memory}", [], (), is_pure=False)
    gl.barrier()
    flag = pointer(facts, FLAGS, gl.int32) + 2 * program + W
    gl.inline_asm(_raise, "l,r,~{memory}", [flag, zero], (), is_pure=False)


@gluon.jit
def add_left(dk, dv, facts, W: gl.constexpr):
    """Add what the program before has left."""
    program = program_id() - 1
    flag = pointer(facts, FLAGS, gl.int32) + 2 * program + W
    gl.inline_asm(_await, "l,~{memory}", [flag], (), is_pure=False)
    at = sums_of(facts, program, W)
    zero = whole(facts, ZERO)
    dk = gl.inline_asm(_take, ("=&f", "l", "r", "f"), [at, zero, dk], dk.type, is_pure=False)
    gl.barrier()  # so that fewer values are on their way at once
    dv = gl.inline_asm(_take, ("=&f", "l", "r", "f"), [at + BLOCK * WIDTH, zero, dv], dv.type, is_pure=False)
    gl.barrier()
    gl.inline_asm(_lower, "l,r,~{memory}", [flag, zero], (), is_pure=False)  # for the next launch
    return dk, dv


@gluon.constexpr_function
def _copy(inputs, read):
    """A thread copies half a row of 128 bytes, whose 16-byte pieces are swizzled in shared memory. `read`: the predicate
    of what is read, if any."""
    (tile,), (to,), (pitch,), (rows,), (zero,) = inputs
    lines = [
        f"{{ .reg .pred p; .reg .b32 t, r, s, a, x<4>; .reg .b64 at, step; mov.u32 t, %tid.x; add.u32 t, t, {zero};",
        "and.b32 t, t, 127;",
        f"shr.u32 r, t, 1; setp.lt.s32 p, r, {rows}; and.b32 s, r, 7; shl.b32 a, r, 7; add.u32 a, a, {tile};",
        f"shl.b64 step, {pitch}, 1; cvt.u64.u32 at, r; mad.lo.s64 at, at, step, {to}; and.b32 t, t, 1; shl.b32 r, t, 6;",
        "cvt.u64.u32 step, r; add.s64 at, at, step; shl.b32 t, t, 2; xor.b32 s, s, t; shl.b32 s, s, 4;",
    ]
    for j in range(4):
        lines.append(f"xor.b32 r, s, {16 * j}; add.u32 r, r, a; {read}ld.shared.v4.b32 {{x0, x1, x2, x3}}, [r];")
        lines.append(f"@p st.global.v4.b32 [at + {16 * j}], {{x0, x1, x2, x3}};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _copy_rows(outputs, inputs):
    return _copy(inputs, "@p ")


@gluon.constexpr_function
def _copy_rows_read_all(outputs, inputs):
    """What a predicated load leaves as it was stays in registers through the kernel's loop: here nothing does."""
    return _copy(inputs, "")


@gluon.jit
def send_block(desc, place, facts, row, column, rows, READ_ALL: gl.constexpr = False):
    """A block of dQ from shared memory. A whole one goes by TMA, which reads `place` until tma.store_wait(0); of others
    TMA would also write the rows that follow, which belong to another sequence."""
    fence_async_shared()
    gl.barrier()
    if rows < BLOCK:
        pitch = fact(facts, PITCH)
        to = pointer(facts, DQ, place.dtype) + row.to(gl.int64) * pitch + column
        copy: gl.constexpr = _copy_rows_read_all if READ_ALL else _copy_rows
        gl.inline_asm(copy, "r,l,l,r,r,~{memory}", [place, to, pitch, rows, whole(facts, ZERO)], (), is_pure=False)
    else:
        tma.async_store(desc, [row, column], place)


@gluon.constexpr_function
def _clear_row(outputs, inputs):
    (to,), (size,), (zero,) = inputs
    return f"""{{ .reg .pred p; .reg .b32 t, zero; .reg .b64 at; mov.u32 t, %tid.x; add.u32 t, t, {zero};
    and.b32 t, t, 127; shl.b32 t, t, 4;
    setp.lt.s32 p, t, {size}; cvt.u64.u32 at, t; add.s64 at, at, {to}; mov.b32 zero, 0;
    @p st.global.v4.b32 [at], {{zero, zero, zero, zero}}; }}"""


@gluon.jit
def clear_slack(facts, tensor: gl.constexpr, offsets: gl.constexpr, step: gl.constexpr, rows: gl.constexpr):
    """Zero a tensor's rows past the last sequence."""
    total = gl.load(pointer(facts, offsets, gl.int32) + whole(facts, BATCH) * whole(facts, step))
    for row in range(total + program_id(), whole(facts, rows), gl.num_programs(0)):
        to = pointer(facts, tensor, gl.int16) + row * fact(facts, PITCH)
        for column in range(0, whole(facts, PITCH), 1024):
            args = [to + column, 2 * (whole(facts, PITCH) - column), whole(facts, ZERO)]
            gl.inline_asm(_clear_row, "l,r,r,~{memory}", args, (), is_pure=False)
