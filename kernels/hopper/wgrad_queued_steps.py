"""Of the weight gradient's kernel with products in a queue (wgrad_queued_kernels.py): what a consumer does with a slot.

P of a slot is 16 registers of two values each: register r belongs to rows m = 16 (r // 4) + 8 (r // 2 % 2) + {0, 1} + 2 t of
the slot and to the column n = 8 (r % 2) + g, with t = lane % 4 and g = lane / 4, of the 16 of a warp: what wgmma takes from
registers, 4 for every 16 rows. A product that runs reads them until it is waited for. Therefore all is written down as
assembly here: a tensor of 16-bit values would be taken apart and copied between the steps, and to keep the copy would
keep nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROW_BYTES = 128  # of 64 columns in shared memory, with 128-byte swizzling
GROUPS = 4  # of 16 rows in a slot
# Descriptor of x as it lies in a slot, panels of 64 columns: 128-byte swizzling, 1024 bytes from 8 rows to the next, 8192
# bytes from panel to panel.
DESCRIPTOR = hex(1 << 62 | 1024 // 16 << 32 | 8192 // 16 << 16)


@gluon.constexpr_function
def packed_layout(registers):
    """[128, registers]: a row per thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1 << i] for i in range(registers.bit_length() - 1)],
        lane_bases=[[1 << i, 0] for i in range(5)],
        warp_bases=[[32, 0], [64, 0]],
        block_bases=[],
        shape=[128, registers],
    )


# ---- scaling ---------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def places_asm(outputs, inputs):
    """Where a lane's rows of dy, of all columns of its warp, and its values of rstd begin."""
    (dy, factors), (wide,) = outputs[0], inputs[0]
    return f"""{{ .reg .b32 t, r, i, c; .reg .pred p; mov.u32 t, %tid.x; and.b32 t, t, 127;
 and.b32 r, t, 7; bfe.u32 i, t, 4, 1; shl.b32 i, i, 3; add.u32 r, r, i; shl.b32 {dy}, r, 7;
 shr.u32 c, t, 5; shl.b32 c, c, 1; bfe.u32 i, t, 3, 1; add.u32 c, c, i; and.b32 r, r, 7; xor.b32 c, c, r; shl.b32 c, c, 4;
 add.u32 {dy}, {dy}, c; setp.ne.b32 p, {wide}, 0;
 and.b32 r, t, 24; shl.b32 r, r, 1; and.b32 c, t, 3; shl.b32 c, c, 3; selp.b32 {factors}, c, r, p; }}"""


@gluon.jit
def places(wide):
    like = gl.zeros([128, 2], gl.int32, packed_layout(2))
    return gl.inline_asm(places_asm, ("=&r", "r"), [wide], like.type, is_pure=False)


@gluon.constexpr_function
def load_lines(at, raw):
    """The 16 registers of dy, transposed."""
    load = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
    return [f"{load} {{{','.join(raw[4 * j : 4 * j + 4])}}}, [{at} + {16 * ROW_BYTES * j}];" for j in range(GROUPS)]


@gluon.constexpr_function
def scale_bf16_asm(outputs, inputs):
    """rstd comes as two bf16: P = fma(dy, high, dy * low)."""
    (p,), ((dy_at, factor_at), (dy,), (high,), (low,)) = outputs, inputs
    lines = ["{ .reg .b32 a, h, l, t, high<8>, low<8>;"]
    lines += [f"add.u32 a, {dy}, {dy_at}; add.u32 h, {high}, {factor_at}; add.u32 l, {low}, {factor_at};"]
    lines += load_lines("a", p)
    for half in range(2):
        for name, at in (("high", "h"), ("low", "l")):
            four = ",".join(f"{name}{4 * half + i}" for i in range(4))
            lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{four}}}, [{at} + {64 * half}];")
    for r in range(16):
        lines.append(f"mul.rn.bf16x2 t, {p[r]}, low{r // 2}; fma.rn.bf16x2 {p[r]}, {p[r]}, high{r // 2}, t;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def scale_fp16_asm(outputs, inputs):
    """rstd comes in fp32: the product in fp32, rounded."""
    (p,), ((dy_at, factor_at), (dy,), (factors,)) = outputs, inputs
    lines = ["{ .reg .b32 a, f; .reg .b16 u, v; .reg .f32 x, y, f0, f1;"]
    lines += [f"add.u32 a, {dy}, {dy_at}; add.u32 f, {factors}, {factor_at};"]
    lines += load_lines("a", p)
    for r in range(16):
        if r % 2 == 0:
            lines.append(f"ld.shared.v2.f32 {{f0, f1}}, [f + {32 * (r // 2)}];")
        lines.append(f"mov.b32 {{u, v}}, {p[r]}; cvt.f32.f16 x, u; cvt.f32.f16 y, v;")
        lines.append(f"mul.rn.f32 x, x, f0; mul.rn.f32 y, y, f1; cvt.rn.f16x2.f32 {p[r]}, y, x;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def sum_bf16_asm(outputs, inputs):
    (out,), (start, (dy_at, _), (dy,)) = outputs, inputs
    raw = [f"raw{r}" for r in range(16)]
    lines = [f"{{ .reg .b32 a, t, raw<16>; add.u32 a, {dy}, {dy_at};", *load_lines("a", raw)]
    for r in range(16):
        row, first = r % 2, (start if r < 2 else out)[r % 2]
        lines.append(f"shl.b32 t, {raw[r]}, 16; add.f32 {out[row]}, {first}, t;")
        lines.append(f"and.b32 t, {raw[r]}, 0xffff0000; add.f32 {out[row]}, {out[row]}, t;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def sum_fp16_asm(outputs, inputs):
    (out,), (start, (dy_at, _), (dy,)) = outputs, inputs
    raw = [f"raw{r}" for r in range(16)]
    lines = [f"{{ .reg .b32 a, raw<16>; .reg .b16 u, v; .reg .f32 t; add.u32 a, {dy}, {dy_at};", *load_lines("a", raw)]
    for r in range(16):
        row, first = r % 2, (start if r < 2 else out)[r % 2]
        lines.append(f"mov.b32 {{u, v}}, {raw[r]}; cvt.f32.f16 t, u; add.f32 {out[row]}, {first}, t;")
        lines.append(f"cvt.f32.f16 t, v; add.f32 {out[row]}, {out[row]}, t;")
    return "\n".join([*lines, "}"])


@gluon.jit
def scaled(a_s, high_s, low_s, full, at, slot, phase, total, sums, W: gl.constexpr):
    """P^T of a slot; if `sums`, with the sum of dy, which is read again for it: registers are scarce."""
    like = gl.zeros([128, 16], gl.int32, packed_layout(16))
    mbarrier.wait(full.index(slot), phase)
    dy = a_s.index(2 * slot + W)
    high = high_s.index(slot)
    if a_s.dtype == gl.bfloat16:
        args = [at, dy, high, low_s.index(slot)]
        p = gl.inline_asm(scale_bf16_asm, ("=&r", "r", "r", "r", "r"), args, like.type, is_pure=False)
        if sums:
            total = gl.inline_asm(sum_bf16_asm, ("=&f", "f", "r", "r"), [total, at, dy], total.type, is_pure=False)
    else:
        p = gl.inline_asm(scale_fp16_asm, ("=&r", "r", "r", "r"), [at, dy, high], like.type, is_pure=False)
        if sums:
            total = gl.inline_asm(sum_fp16_asm, ("=&f", "f", "r", "r"), [total, at, dy], total.type, is_pure=False)
    return p, total


# ---- products --------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def product_asm(kind, columns):
    """acc = (acc if more else 0) + P^T x of a slot: $ numbers are acc, acc again (tied), p, x, more."""
    n = columns // 2
    acc = ",".join(f"${i}" for i in range(n))
    lines = ["{ .reg .b32 t; .reg .b64 d; .reg .pred more;", f"setp.ne.b32 more, ${2 * n + 17}, 0;"]
    lines += [f"shr.u32 t, ${2 * n + 16}, 4; cvt.u64.u32 d, t; or.b64 d, d, {DESCRIPTOR}; wgmma.fence.sync.aligned;"]
    for j in range(GROUPS):
        a = ",".join(f"${2 * n + 4 * j + i}" for i in range(4))
        name = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}"
        lines.append(f"{name} {{{acc}}}, {{{a}}}, d, more, 1, 1, 1;")
        lines.append(f"add.u64 d, d, {16 * ROW_BYTES // 16}; setp.eq.b32 more, t, t;")
    return "\n".join([*lines[:-1], "wgmma.commit_group.sync.aligned; }"])


@gluon.constexpr_function
def product_constraints(columns):
    n = columns // 2
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["r"] * 18)


@gluon.jit
def product(p, x, acc, more):
    kind: gl.constexpr = "bf16" if x.dtype == gl.bfloat16 else "f16"
    asm: gl.constexpr = product_asm(kind, acc.shape[1])
    constraints: gl.constexpr = product_constraints(acc.shape[1])
    return gl.inline_asm(asm, constraints, [acc, p, x, more], acc.type, is_pure=False)


@gluon.jit
def multiply(p, b0_s, b1_s, slot, acc0, acc1, more, P1: gl.constexpr):
    """Queue the products of a slot."""
    acc0 = product(p, b0_s.index(slot), acc0, more)
    if P1 > 0:
        acc1 = product(p, b1_s.index(slot), acc1, more)
    return acc0, acc1


@gluon.constexpr_function
def wait_constraints(registers):
    values = ["=f"] * registers + ["=r"] * 16
    return ",".join([*values, *(str(i) for i in range(len(values)))])


@gluon.jit
def wait_for(acc0, acc1, p, slots: gl.constexpr, P1: gl.constexpr):
    """Until only the products of the last so many slots run; p is what the slot before them gave, in use until here."""
    constraints: gl.constexpr = wait_constraints((acc0.shape[1] + P1) // 2)
    if P1 > 0:
        asm: gl.constexpr = f"wgmma.wait_group.sync.aligned {2 * slots};"
        acc0, acc1, p = gl.inline_asm(asm, constraints, [acc0, acc1, p], (acc0.type, acc1.type, p.type), is_pure=False)
    else:
        asm: gl.constexpr = f"wgmma.wait_group.sync.aligned {slots};"
        acc0, p = gl.inline_asm(asm, constraints, [acc0, p], (acc0.type, p.type), is_pure=False)
    return acc0, acc1


# ---- results ---------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def store_asm(outputs, inputs):
    """64 rows of an accumulator; sizes are multiples of 8, so 8 columns are inside together or not at all."""
    acc, (start,), (rows,), (columns,), (stride,) = inputs
    lines = [
        """{ .reg .b32 t, g, c; .reg .b64 a, b; .reg .pred low, high, p;
 mov.u32 t, %tid.x; and.b32 t, t, 127; and.b32 c, t, 3; shl.b32 c, c, 1;
 shr.u32 g, t, 5; shl.b32 g, g, 4; bfe.u32 t, t, 2, 3; add.u32 g, g, t;"""
    ]
    lines += [f"setp.lt.s32 low, g, {rows}; add.s32 t, g, 8; setp.lt.s32 high, t, {rows};"]
    lines += [f"mad.lo.s32 t, g, {stride}, c; mul.wide.s32 a, t, 4; add.s64 a, a, {start};"]
    lines += [f"mul.wide.s32 b, {stride}, 32; add.s64 b, b, a;"]
    for j in range(len(acc) // 4):
        for name, at, i in (("low", "a", 4 * j), ("high", "b", 4 * j + 2)):
            lines.append(f"setp.gt.and.s32 p, {columns}, {8 * j}, {name};")
            lines.append(f"@p st.global.v2.f32 [{at} + {32 * j}], {{{acc[i]}, {acc[i + 1]}}};")
    return "\n".join([*lines, "}"])


@gluon.jit
def store_part(acc, out_ptr, n, k, N, K):
    """Of [N, K] the rows from n and the columns from k on. One address per row: as tensors there would be 64, which the
    compiler computes before it needs them."""
    start = (out_ptr + n.to(gl.int64) * K + k).to(gl.int64)
    args = [acc, start, N - n, K - k, K]
    gl.inline_asm(store_asm, ("f", "l", "r", "r", "r"), args, (), is_pure=False)
