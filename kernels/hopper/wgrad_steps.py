"""What a consumer of the weight gradient's kernel (wgrad_kernels.py) does with a slot, and with a tile in the end.

P of a slot is 16 registers of two values each: register r belongs to rows m = 16 (r // 4) + 8 (r // 2 % 2) + {0, 1} + 2 t of
the slot and to the column n = 8 (r % 2) + g, with t = lane % 4 and g = lane / 4, of the 16 of a warp: what wgmma takes from
registers, 4 for every 16 rows. A product that runs reads them until it is waited for. Therefore all is written down as
assembly here: a tensor of 16-bit values would be taken apart and copied between the steps, and to keep the copy would
keep nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .barriers import await_phase

COLUMNS = gl.constexpr(64)  # of dy, per consumer
STEP = gl.constexpr(64)  # rows of a slot
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
def pack_asm(kind, inputs):
    """Store rstd of rows 2 l and 2 l + 1, which lane l has: 16 bytes for each lane of a quad and 16 rows, their values for
    m = 2 t + {0, 1} and for m + 8. For bf16, value = high + low, both bf16; fp16 has not the range for the parts."""
    (first, second), (at,) = inputs
    lines = ["{ .reg .b32 t, a, b, h, l; .reg .f32 x, y; mov.u32 t, %tid.x; and.b32 t, t, 31; and.b32 a, t, 24;"]
    lines += ["shl.b32 a, a, 3; and.b32 b, t, 3; shl.b32 b, b, 4; add.u32 a, a, b; and.b32 b, t, 4; shl.b32 b, b, 1;"]
    lines += [f"add.u32 a, a, b; add.u32 a, a, {at};"]
    if kind == "bf16":
        lines += [f"cvt.rn.bf16x2.f32 h, {second}, {first}; shl.b32 b, h, 16; mov.b32 x, b; and.b32 b, h, 0xffff0000;"]
        lines += [f"mov.b32 y, b; sub.f32 x, {first}, x; sub.f32 y, {second}, y; cvt.rn.bf16x2.f32 l, y, x;"]
    else:
        lines += [f"mov.b32 h, {first}; mov.b32 l, {second};"]
    return "\n".join([*lines, "st.shared.v2.b32 [a], {h, l}; }"])


@gluon.constexpr_function
def pack_text(kind):
    return pack_asm(kind, (("$0", "$1"), ("$2",)))


@gluon.jit
def pack_rstd(rstd, factors, kind: gl.constexpr):
    text: gl.constexpr = pack_text(kind)
    gl.inline_asm(text, "f,f,r,~{memory}", [rstd, factors], (), is_pure=False)


@gluon.constexpr_function
def places_asm(outputs, inputs):
    """Where a lane's rows of dy, of all columns of its warp, and its values of rstd begin."""
    dy, factors = outputs[0]
    return f"""{{ .reg .b32 t, r, i, c; mov.u32 t, %tid.x; and.b32 t, t, 127;
 and.b32 r, t, 7; bfe.u32 i, t, 4, 1; shl.b32 i, i, 3; add.u32 r, r, i; shl.b32 {dy}, r, 7;
 shr.u32 c, t, 5; shl.b32 c, c, 1; bfe.u32 i, t, 3, 1; add.u32 c, c, i; and.b32 r, r, 7; xor.b32 c, c, r; shl.b32 c, c, 4;
 add.u32 {dy}, {dy}, c; and.b32 c, t, 3; shl.b32 {factors}, c, 4; }}"""


@gluon.jit
def places():
    like = gl.zeros([128, 2], gl.int32, packed_layout(2))
    return gl.inline_asm(places_asm, ("=&r",), [], like.type, is_pure=False)


@gluon.constexpr_function
def fetch_lines(kind, raw, dy_at, factor_at, dy, factors):
    """dy, transposed, and rstd: two bf16 per value for bf16, else fp32."""
    load = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
    lines = [".reg .b32 a, f, high<8>, low<8>; .reg .b16 u, v; .reg .f32 fx, fy, factor<16>;"]
    lines.append(f"add.u32 a, {dy}, {dy_at}; add.u32 f, {factors}, {factor_at};")
    for j in range(GROUPS):
        if kind == "bf16":
            four, form = f"high{2 * j}, low{2 * j}, high{2 * j + 1}, low{2 * j + 1}", "b32"
        else:
            four, form = ", ".join(f"factor{4 * j + i}" for i in range(4)), "f32"
        lines.append(f"{load} {{{','.join(raw[4 * j : 4 * j + 4])}}}, [a + {16 * ROW_BYTES * j}];")
        lines.append(f"ld.shared.v4.{form} {{{four}}}, [f + {64 * j}];")
    return lines


@gluon.constexpr_function
def scale_lines(kind, p, raw, j):
    """P of 16 rows: fma(dy, high, dy * low) for bf16, else the product in fp32, rounded."""
    lines = []
    for r in range(4 * j, 4 * j + 4):
        i = r // 2
        if kind == "bf16":
            lines.append(f"mul.rn.bf16x2 a, {raw[r]}, low{i}; fma.rn.bf16x2 {p[r]}, {raw[r]}, high{i}, a;")
        else:
            lines.append(f"mov.b32 {{u, v}}, {raw[r]}; cvt.f32.f16 fx, u; cvt.f32.f16 fy, v;")
            lines.append(f"mul.rn.f32 fx, fx, factor{2 * i}; mul.rn.f32 fy, fy, factor{2 * i + 1};")
            lines.append(f"cvt.rn.f16x2.f32 {p[r]}, fy, fx;")
    return lines


# ---- sums of dy -------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def lane_layout():
    """[64, 4]: one value per lane of a quad for each of its columns of dy."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )


@gluon.constexpr_function
def sum_lines(kind, raw, sums, j):
    """sums += the columns of 16 rows, if bit j of `groups` is set in g."""
    lines = [f"and.b32 a, g, {1 << j}; setp.eq.b32 none, a, 0; @none bra.uni OVER{j};"]
    for r in range(4 * j, 4 * j + 4):
        if kind == "bf16":
            low, high = f"shl.b32 a, {raw[r]}, 16; mov.b32 t, a;", f"and.b32 a, {raw[r]}, 0xffff0000; mov.b32 t, a;"
        else:
            low, high = f"mov.b32 {{u, v}}, {raw[r]}; cvt.f32.f16 t, u;", "cvt.f32.f16 t, v;"
        lines += [f"{part} add.f32 {sums[r % 2]}, {sums[r % 2]}, t;" for part in (low, high)]
    return [*lines, f"OVER{j}:"]


# ---- products --------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def product_line(kind, acc, p, j, descriptor):
    a = ",".join(p[4 * j : 4 * j + 4])
    name = f"wgmma.mma_async.sync.aligned.m64n{2 * len(acc)}k16.f32.{kind}.{kind}"
    return f"{name} {{{','.join(acc)}}}, {{{a}}}, {descriptor}, more, 1, 1, 1;"


@gluon.constexpr_function
def descriptor_lines(name, x):
    return [f"shr.u32 a, {x}, 4; cvt.u64.u32 {name}, a; or.b64 {name}, {name}, {DESCRIPTOR};"]


@gluon.constexpr_function
def next_rows(name):
    return f"add.u64 {name}, {name}, {16 * ROW_BYTES // 16};"


@gluon.constexpr_function
def take_asm(kind, p0, p1):
    """acc = (acc if follows else 0) + P^T x of a slot, scaled and multiplied 16 rows after 16 rows; sums += columns of dy
    of the rows that bits of `groups` say, behind their products. Operands are both parts of acc, P, sums, the parts and
    sums again (tied), the two places, dy, rstd, both parts of x, follows, groups."""
    n0, n = p0 // 2, (p0 + p1) // 2
    acc, p, sums = ([f"${first + i}" for i in range(count)] for first, count in ((0, n), (n, 16), (n + 16, 2)))
    dy_at, factor_at, dy, factors, x0, x1, follows, groups = (f"${2 * n + 20 + i}" for i in range(8))
    raw = [f"raw{i}" for i in range(16)]
    parts = [(acc[:n0], "d", x0), (acc[n0:], "e", x1)][: 2 if p1 else 1]
    lines = ["{ .reg .b64 d, e; .reg .pred more, none; .reg .b32 raw<16>, g; .reg .f32 t;"]
    lines += [*fetch_lines(kind, raw, dy_at, factor_at, dy, factors), f"setp.ne.b32 more, {follows}, 0;"]
    for _, name, x in parts:
        lines += descriptor_lines(name, x)
    lines.append(f"mov.b32 g, {groups};")
    for j in range(GROUPS):
        lines += [*scale_lines(kind, p, raw, j), "wgmma.fence.sync.aligned;"]
        lines += [product_line(kind, part, p, j, name) for part, name, _ in parts]
        lines += ["wgmma.commit_group.sync.aligned;", *(next_rows(name) for _, name, _ in parts)]
        lines += ["setp.eq.b32 more, f, f;", *sum_lines(kind, raw, sums, j)]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def take_constraints(registers):
    tied = [*range(registers), registers + 16, registers + 17]
    return ",".join(["=f"] * registers + ["=&r"] * 16 + ["=f"] * 2 + [str(i) for i in tied] + ["r"] * 8)


@gluon.jit
def take(
    a_s, b0_s, b1_s, factor_s, full, at, slot, phase, sums, groups, acc0, acc1, follows,
    W: gl.constexpr, P1: gl.constexpr,
):  # fmt: skip
    """Scale a slot and queue its products; add up dy of some groups of 16 rows."""
    like = gl.zeros([128, 16], gl.int32, packed_layout(16))
    kind: gl.constexpr = "bf16" if a_s.dtype == gl.bfloat16 else "f16"
    await_phase(full.index(slot), phase)
    asm: gl.constexpr = take_asm(kind, acc0.shape[1], P1)
    constraints: gl.constexpr = take_constraints((acc0.shape[1] + P1) // 2)
    places_of = [at, a_s.index(2 * slot + W), factor_s.index(slot), b0_s.index(slot), b1_s.index(slot), follows, groups]
    if P1 > 0:
        types: gl.constexpr = (acc0.type, acc1.type, like.type, sums.type)
        acc0, acc1, p, sums = gl.inline_asm(asm, constraints, [acc0, acc1, sums] + places_of, types, is_pure=False)
    else:
        types: gl.constexpr = (acc0.type, like.type, sums.type)
        acc0, p, sums = gl.inline_asm(asm, constraints, [acc0, sums] + places_of, types, is_pure=False)
    return p, sums, acc0, acc1


@gluon.constexpr_function
def wait_constraints(registers):
    values = ["=f"] * registers + ["=r"] * 16
    return ",".join([*values, *(str(i) for i in range(len(values)))])


@gluon.constexpr_function
def wait_text(slots):
    return f"wgmma.wait_group.sync.aligned {slots * GROUPS};"


@gluon.jit
def wait_for(acc0, acc1, p, slots: gl.constexpr, P1: gl.constexpr):
    """Until only the products of the last so many slots run; p is what the slot before them gave, in use until here."""
    constraints: gl.constexpr = wait_constraints((acc0.shape[1] + P1) // 2)
    asm: gl.constexpr = wait_text(slots)
    if P1 > 0:
        acc0, acc1, p = gl.inline_asm(asm, constraints, [acc0, acc1, p], (acc0.type, acc1.type, p.type), is_pure=False)
    else:
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
