"""Of the post-norm kernel whose consumers run one text (postnorm_joint_kernels.py): barriers, loads by TMA and the product,
all by hand, because the language's calls synchronise every warp of a partition and all consumers are one.

Barriers and places come as addresses (attention_exchange.own_address), a kernel's tensor maps by their parameters' symbols.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

X_MAP, Y_MAP, SIDE_MAP, W_MAP = 0, 5, 10, 15  # numbers of the parameters: behind a map are two sizes and two strides


@gluon.constexpr_function
def layout(n=128):
    """[4 * 64, n] over 16 warps: a warpgroup has an accumulator of 64 rows; the last one, which loads, has none."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[16, 1], instr_shape=[16, n, 16])


@gluon.constexpr_function
def tile_type():
    return gl.distributed_type(gl.float32, [256, 128], layout())


@gluon.constexpr_function
def row_type():
    return gl.distributed_type(gl.float32, [256], gl.SliceLayout(1, layout()))


@gluon.constexpr_function
def map_of(number):
    """Text that sets d to the address of a tensor map."""
    return f"mov.b64 d, postnorm_joint_kernel_param_{number}; cvta.param.u64 d, d;"


@gluon.constexpr_function
def wait_text(label, bar, phase):
    return f"{label}: mbarrier.try_wait.parity.shared::cta.b64 p, [{bar}], {phase}; @!p bra {label};"


@gluon.constexpr_function
def _warp(outputs, inputs):
    """From lane 0, so that the compiler sees one value for the warp."""
    out = outputs[0][0]
    return f"mov.u32 {out}, %tid.x; shr.u32 {out}, {out}, 5; shfl.sync.idx.b32 {out}, {out}, 0, 0x1f, 0xffffffff;"


@gluon.jit
def warp_number():
    return gl.inline_asm(_warp, "=r", [], gl.int32, is_pure=False)


@gluon.constexpr_function
def _await(outputs, inputs):
    (bar,), (phase,) = inputs
    return f"{{ .reg .pred p; {wait_text('again', bar, phase)} }}"


@gluon.jit
def await_phase(bar, phase):
    gl.inline_asm(_await, "r,r,~{memory}", [bar, phase], (), is_pure=False)


# ---- loads -----------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _load(number, size, inputs):
    """One lane expects `size` bytes on a barrier and asks for them."""
    (place,), (bar,), (k,), (row,) = inputs
    return f"""{{ .reg .pred e; .reg .b64 d; .reg .b32 zero;
    elect.sync _|e, 0xffffffff; mov.b32 zero, 0;
    {map_of(number)}
    @e mbarrier.arrive.expect_tx.shared::cta.b64 _, [{bar}], {size};
    @e cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [{place}], [d, {{{k}, {row}}}], [{bar}]; }}"""


@gluon.constexpr_function
def _load_x(outputs, inputs):
    return _load(X_MAP, 8192, inputs)


@gluon.constexpr_function
def _load_w(outputs, inputs):
    return _load(W_MAP, 16384, inputs)


@gluon.jit
def load_x(place, bar, k, row):
    """64 rows from `row` on, 64 columns from k on."""
    gl.inline_asm(_load_x, "r,r,r,r,~{memory}", [place, bar, k, row], (), is_pure=False)


@gluon.jit
def load_w(place, bar, k, row):
    """128 rows."""
    gl.inline_asm(_load_w, "r,r,r,r,~{memory}", [place, bar, k, row], (), is_pure=False)


# ---- product ---------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def arrive_text(bar, wanted):
    """One lane of a warp arrives, where the predicate `wanted` holds."""
    return f"bar.warp.sync 0xffffffff; elect.sync _|r, 0xffffffff; and.pred r, r, {wanted}; " + (
        f"@r mbarrier.arrive.shared::cta.b64 _, [{bar}];"
    )


@gluon.constexpr_function
def _multiply(kind, outputs, inputs):
    """The warpgroup's 64 rows of x times W, added to the accumulator. k-block by k-block it awaits the slot (and, with its
    first block, that part of W), passes the turn on when it has seen the last, and hands the slot before back.

    A descriptor is an address in 16 bytes; 8 rows of 128 bytes follow each other every 1024; swizzled by 128 bytes."""
    (acc,), (_, (x,), (w,), (full,), (empty,), (loaded,), (follow,), (slot,), (phase,), (count,), (slots,), (turn,)) = (
        outputs,
        inputs,
    )
    registers = "{" + ", ".join(acc) + "}"
    product = f"wgmma.mma_async.sync.aligned.m64n128k16.f32.{kind}.{kind} {registers}, da, db, one, 1, 1, 0, 0;"
    products = f" {chr(10)} add.s64 da, da, 2; add.s64 db, db, 2; {chr(10)} ".join([product] * 4)
    return f"""{{ .reg .pred p, q, r, one, more; .reg .b32 k, s, f, t, a, b, before; .reg .b64 da, db;
    mov.b32 k, 0; setp.eq.u32 one, k, 0; mov.b32 s, {slot}; mov.b32 f, {phase}; mov.b32 before, {empty};
    next: setp.ne.u32 q, {turn}, 0; @q bra ready;
    shl.b32 t, k, 3; add.u32 t, t, {loaded};
    {wait_text("again", "t", 0)}
    ready: shl.b32 t, s, 3; add.u32 t, t, {full};
    {wait_text("filled", "t", "f")}
    add.u32 t, k, 1; setp.eq.u32 q, t, {count};
    {arrive_text(follow, "q")}
    shl.b32 a, s, 13; add.u32 a, a, {x}; shl.b32 b, k, 14; add.u32 b, b, {w};
    shr.u32 a, a, 4; and.b32 a, a, 0x3fff; shr.u32 b, b, 4; and.b32 b, b, 0x3fff; mov.b32 t, 0x40000040;
    mov.b64 da, {{a, t}}; mov.b64 db, {{b, t}};
    wgmma.fence.sync.aligned;
    {products}
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 1;
    setp.ne.u32 q, k, 0;
    {arrive_text("before", "q")}
    shl.b32 before, s, 3; add.u32 before, before, {empty};
    add.u32 s, s, 1; setp.eq.u32 q, s, {slots}; @q mov.b32 s, 0; @q xor.b32 f, f, 1;
    add.u32 k, k, 1; setp.lt.u32 more, k, {count}; @more bra next;
    wgmma.wait_group.sync.aligned 0;
    {arrive_text("before", "one")} }}"""


@gluon.constexpr_function
def _multiply_bf16(outputs, inputs):
    return _multiply("bf16", outputs, inputs)


@gluon.constexpr_function
def _multiply_fp16(outputs, inputs):
    return _multiply("f16", outputs, inputs)


TIED = gl.constexpr(",".join(["=f"] * 64 + [str(i) for i in range(64)] + ["r"] * 11 + ["~{memory}"]))


@gluon.jit
def multiply(acc, x, w, full, empty, loaded, follow, step, KT, turn, dtype: gl.constexpr, ST: gl.constexpr):
    """`step`: k-blocks of the CTA before this block; `turn`: blocks of this consumer before it."""
    asm: gl.constexpr = _multiply_bf16 if dtype == gl.bfloat16 else _multiply_fp16
    args = [acc, x, w, full, empty, loaded, follow, step % ST, (step // ST) & 1, KT, ST, turn]
    return gl.inline_asm(asm, TIED, args, tile_type(), is_pure=False)
