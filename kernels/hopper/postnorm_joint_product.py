"""Of the post-norm kernel whose consumers run one text (postnorm_joint_kernels.py): barriers, loads by TMA and the product,
all by hand, because the language's calls synchronise every warp of a partition and all consumers are one.

Barriers and places come as addresses (attention_exchange.own_address), a kernel's tensor maps by their parameters' symbols.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

X_MAP, W_MAP, Y_MAP, SIDE_MAP = 0, 5, 10, 15  # numbers of the parameters: behind a map are two sizes and two strides


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
def _thread(outputs, inputs):
    return f"mov.u32 {outputs[0][0]}, %tid.x;"


@gluon.jit
def thread_number():
    """To be read once: each reading waits for those of shared memory."""
    return gl.inline_asm(_thread, "=r", [], gl.int32, is_pure=False)


@gluon.jit
def cluster_arrive():
    """Peers may send after this, once all threads of the cluster have come here and they themselves past cluster_wait."""
    gl.inline_asm("barrier.cluster.arrive.release.aligned;", "~{memory}", [], (), is_pure=False)


@gluon.jit
def cluster_wait():
    gl.inline_asm("barrier.cluster.wait.acquire.aligned;", "~{memory}", [], (), is_pure=False)


@gluon.jit
def meet_consumers():
    """All threads of the three, by a barrier that the compiler does not use."""
    gl.inline_asm("bar.sync 1, 384;", "~{memory}", [], (), is_pure=False)


@gluon.constexpr_function
def _await(outputs, inputs):
    (bar,), (phase,) = inputs
    return f"{{ .reg .pred p; {wait_text('again', bar, phase)} }}"


@gluon.jit
def await_phase(bar, phase):
    gl.inline_asm(_await, "r,r,~{memory}", [bar, phase], (), is_pure=False)


# ---- loads -----------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _expect(outputs, inputs):
    (bar,), (size,) = inputs
    return f"""{{ .reg .pred e; elect.sync _|e, 0xffffffff;
    @e mbarrier.arrive.expect_tx.shared::cta.b64 _, [{bar}], {size}; }}"""


@gluon.jit
def expect(bar, size):
    """One lane of a warp arrives and says how many bytes are to come."""
    gl.inline_asm(_expect, "r,r,~{memory}", [bar, size], (), is_pure=False)


@gluon.constexpr_function
def _load(number, inputs):
    (place,), (bar,), (k,), (row,) = inputs
    return f"""{{ .reg .pred e; .reg .b64 d; elect.sync _|e, 0xffffffff;
    {map_of(number)}
    @e cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [{place}], [d, {{{k}, {row}}}], [{bar}]; }}"""


@gluon.constexpr_function
def _load_x(outputs, inputs):
    return _load(X_MAP, inputs)


@gluon.constexpr_function
def _load_w(outputs, inputs):
    return _load(W_MAP, inputs)


@gluon.jit
def load_x(place, bar, k, row):
    """64 rows from `row` on, 64 columns from k on."""
    gl.inline_asm(_load_x, "r,r,r,r,~{memory}", [place, bar, k, row], (), is_pure=False)


@gluon.jit
def load_w(place, bar, k, row):
    """128 rows."""
    gl.inline_asm(_load_w, "r,r,r,r,~{memory}", [place, bar, k, row], (), is_pure=False)


# ---- bias ------------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _split(narrow, outputs, inputs):
    """Thread t writes row t % 128 of the tile: a bias as the sum of three 16-bit values, and zeros."""
    (tid,), (tile,), (v,) = inputs
    lines = ["{ .reg .b32 at, first, second, zero; .reg .b16 h<4>; .reg .f32 f, r;"]
    lines.append(f"and.b32 at, {tid}, 127; shl.b32 at, at, 4; add.u32 at, at, {tile}; mov.b32 zero, 0; mov.f32 r, {v};")
    for i in range(3):
        lines.append(f"cvt.rn.{narrow}.f32 h{i}, r; cvt.f32.{narrow} f, h{i}; sub.f32 r, r, f;")
    lines.append("mov.b16 h3, 0; mov.b32 first, {h0, h1}; mov.b32 second, {h2, h3};")
    return "\n".join([*lines, "st.shared.v4.b32 [at], {first, second, zero, zero}; fence.proxy.async.shared::cta; }"])


@gluon.constexpr_function
def _split_bf16(outputs, inputs):
    return _split("bf16", outputs, inputs)


@gluon.constexpr_function
def _split_fp16(outputs, inputs):
    return _split("f16", outputs, inputs)


@gluon.jit
def store_bias(tile, tid, values, dtype: gl.constexpr):
    """[128, 8] at `tile`, for `multiply`, from [128] fp32 with a value per thread."""
    asm: gl.constexpr = _split_bf16 if dtype == gl.bfloat16 else _split_fp16
    gl.inline_asm(asm, "r,r,f,~{memory}", [tid, tile, values], (), is_pure=False)


@gluon.constexpr_function
def add_bias(kind, acc):
    """Text that starts the accumulator with the bias, as a product: registers hold columns of ones for its three parts. 8
    rows of 16 bytes follow each other every 128, and columns from 8 on, which meet zeros, are read at the same place."""
    one, pair = ("0x3f80", "0x3f803f80") if kind == "bf16" else ("0x3c00", "0x3c003c00")
    registers = "{" + ", ".join(acc) + "}"
    return f"""setp.eq.u32 p, lane, 0; selp.b32 c, {pair}, 0, p; setp.eq.u32 p, lane, 1; selp.b32 c, {one}, c, p;
    mov.b32 d, 0; mov.b64 db, {{tile, eight}}; wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n128k16.f32.{kind}.{kind} {registers}, {{c, c, d, d}}, db, have, 1, 1, 0;"""


# ---- product ---------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def arrive_text(bar, wanted):
    """A warp arrives; `wanted` holds in one of its lanes or in none."""
    return f"bar.warp.sync 0xffffffff; @{wanted} mbarrier.arrive.shared::cta.b64 _, [{bar}];"


@gluon.constexpr_function
def products(kind, acc):
    """Text that issues a k-block: four products of 16 columns, 32 bytes apart. a and b: addresses in 16 bytes, the lower
    words of descriptors, whose upper ones say that 8 rows of 128 bytes follow each other every 1024, swizzled. `have`: the
    accumulator has a value."""
    registers = "{" + ", ".join(acc) + "}"
    product = f"wgmma.mma_async.sync.aligned.m64n128k16.f32.{kind}.{kind} {registers}, da, db, HAVE, 1, 1, 0, 0;"
    lines = ["wgmma.fence.sync.aligned;"]
    for i in range(4):
        lines.append(f"add.u32 c, a, {2 * i}; add.u32 d, b, {2 * i}; mov.b64 da, {{c, high}}; mov.b64 db, {{d, high}};")
        lines.append(product.replace("HAVE", "one" if i else "have"))
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned;"])


@gluon.constexpr_function
def _multiply(kind, outputs, inputs):
    """The warpgroup's 64 rows of x times W, plus the bias. It awaits its turn with everything at hand; k-block by k-block it
    awaits the slot and hands the one before back; when it has seen the last slot it passes the turn on. Few instructions per
    k-block: the other consumers' warps want to issue theirs besides, and no product may wait."""
    (acc,), scalars = outputs, inputs
    zeros = " ".join(f"mov.b32 {a}, 0;" for a in acc)  # that nothing reads, but their registers are free before
    x, w, tile, tid, biased, full, empty, turn, parity, follow, slot, phase, count, slots = (s[0] for s in scalars)
    return f"""{{ .reg .pred p, lead, back, one, have, more; .reg .b64 da, db;
    .reg .b32 k, f, t, a, b, c, d, high, first, end, start, apart, before, lane, tile, eight;
    {zeros}
    elect.sync _|lead, 0xffffffff; setp.ne.u32 back, {slots}, {slots}; setp.eq.u32 one, {slots}, {slots};
    mov.b32 high, 0x40000040; mov.b32 f, {phase}; sub.u32 apart, {empty}, {full};
    shl.b32 t, {slot}, 3; add.u32 t, t, {full}; shl.b32 end, {slots}, 3; add.u32 end, end, {full};
    shr.u32 start, {x}, 4; and.b32 start, start, 0x3fff; shl.b32 a, {slot}, 9; add.u32 a, a, start;
    shr.u32 b, {w}, 4; and.b32 b, b, 0x3fff; add.u32 k, {count}, -1; mov.b32 before, {empty};
    shr.u32 tile, {tile}, 4; and.b32 tile, tile, 0x3fff; mov.b32 eight, 8; and.b32 lane, {tid}, 3;
    setp.eq.u32 more, k, 0; setp.ne.u32 have, {slots}, {slots};
    {wait_text("mine", turn, parity)}
    setp.eq.u32 p, {biased}, 0; @p bra plain;
    {add_bias(kind, acc)}
    mov.pred have, one;
    plain: @more bra last;
    next: {wait_text("filled", "t", "f")}
    {products(kind, acc)}
    mov.pred have, one; add.u32 k, k, -1; setp.ne.u32 more, k, 0;
    add.u32 first, t, apart; add.u32 t, t, 8; add.u32 a, a, 512; add.u32 b, b, 1024;
    setp.eq.u32 p, t, end; selp.b32 t, {full}, t, p; selp.b32 a, start, a, p; @p xor.b32 f, f, 1;
    wgmma.wait_group.sync.aligned 1;
    {arrive_text("before", "back")}
    mov.b32 before, first; mov.pred back, lead;
    @more bra next;
    last: {wait_text("there", "t", "f")}
    {arrive_text(follow, "lead")}
    {products(kind, acc)}
    add.u32 first, t, apart;
    wgmma.wait_group.sync.aligned 1;
    {arrive_text("before", "back")}
    wgmma.wait_group.sync.aligned 0;
    {arrive_text("first", "lead")} }}"""


@gluon.constexpr_function
def _multiply_bf16(outputs, inputs):
    return _multiply("bf16", outputs, inputs)


@gluon.constexpr_function
def _multiply_fp16(outputs, inputs):
    return _multiply("f16", outputs, inputs)


OPERANDS = gl.constexpr(",".join(["=&f"] * 64 + ["r"] * 14 + ["~{memory}"]))


@gluon.jit
def multiply(
    x, w, tile, tid, biased, full, empty, turn, parity, follow, step, KT, dtype: gl.constexpr, ST: gl.constexpr
):
    """`tile`: the bias's, if `biased`; `turn`, `follow`: this consumer's and the next one's barrier; `step`: k-blocks of the
    CTA before this block."""
    asm: gl.constexpr = _multiply_bf16 if dtype == gl.bfloat16 else _multiply_fp16
    args = [x, w, tile, tid, biased, full, empty, turn, parity, follow, step % ST, (step // ST) & 1, KT, ST]
    return gl.inline_asm(asm, OPERANDS, args, tile_type(), is_pure=False)
