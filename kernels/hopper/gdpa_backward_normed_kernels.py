"""Backward of jagged attention with the norm of the queries inside: gdpa_backward_kernels.py on q as it was before its norm.

    q' = (q - centre) * rstd * weight + bias, rounded to bf16: what the attention was given
    dQ' = scale * t k, or with an inner residual, which hands dO past the attention, scale * t k + dO

The consumers normalise a block in shared memory while the tensor cores make dK and dQ of the block before. With the inner
residual dQ' may be written where dO lies: a block of it is stored after that block of dO was read, and of other blocks only
rows past a sequence's end are read, which become zeros.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .facts import PLAIN, keep_asm, own_shift
from .gdpa_backward_kernels import STAGES, consumer, loader
from .gdpa_backward_kernels import VARIANTS as PLAIN_VARIANTS
from .gdpa_backward_ranges import BLOCK, EXTRA, FACTS, WIDTH, cut
from .variants import Variant

COPIES = gl.constexpr(1 + 32)  # arrivals for a block: the loader's, and with the rows' numbers its lanes'


@gluon.jit(do_not_specialize=["batch", "heads", "q_step", "k_step", "most", "T", "U"])
def gdpa_backward_normed_kernel(
    q_desc,  # [T, heads * 128], before the norm
    k_desc,  # [U, heads * 128]
    v_desc,
    do_desc,
    dq_desc,  # rows `pitch` apart, as those of dk and dv; may be dO
    dk_desc,
    dv_desc,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    q_offsets_ptr,  # [B + 1], of which every q_step-th 32-bit word is read
    k_offsets_ptr,
    sums_ptr,  # [programs, 2 * 2 * 64 * 128] fp32
    flags_ptr,  # [programs, 2] i32: 0, also afterwards
    row_terms_ptr,  # [T, 2] fp32: centre and rstd
    column_terms_ptr,  # [heads * 16, 2, 8] fp32: weight and bias of 8 columns
    pitch,
    batch,
    heads,
    q_step,
    k_step,
    most,  # keys of a sequence
    T,
    U,
    half_scale,
    ACT: gl.constexpr,
    INNER: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    tile: gl.constexpr = q_desc.layout
    k_s = gl.allocate_shared_memory(dtype, [4, BLOCK, WIDTH], tile)
    v_s = gl.allocate_shared_memory(dtype, [4, BLOCK, WIDTH], tile)
    q_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, WIDTH], tile)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, WIDTH], tile)
    t_s = gl.allocate_shared_memory(dtype, [2, BLOCK, BLOCK], dq_desc.layout)
    dq_s = gl.allocate_shared_memory(dtype, [2, BLOCK, BLOCK], dq_desc.layout)
    terms_s = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK], PLAIN)
    facts = gl.allocate_shared_memory(gl.int64, [FACTS], PLAIN)
    notes = gl.allocate_shared_memory(gl.int32, [16], PLAIN)
    kv_full = mbarrier.allocate_mbarrier(batch=2)
    kv_free = mbarrier.allocate_mbarrier(batch=2)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    free = mbarrier.allocate_mbarrier(batch=STAGES)
    t_full = mbarrier.allocate_mbarrier()
    t_free = mbarrier.allocate_mbarrier()
    normed = mbarrier.allocate_mbarrier()
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_free.index(i), count=8)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=COPIES)
        mbarrier.init(free.index(i), count=8)
    mbarrier.init(t_full, count=8)
    mbarrier.init(t_free, count=8)
    mbarrier.init(normed, count=8)
    total = (gl.load(q_offsets_ptr + batch * q_step) + EXTRA * batch) * heads
    units = (total + BLOCK - 1) // BLOCK
    x = gl.program_id(0) * units // gl.num_programs(0) * BLOCK
    first, first_query = cut(q_offsets_ptr, q_step, batch, heads, gl.minimum(x, total))
    x = (gl.program_id(0) + 1) * units // gl.num_programs(0) * BLOCK
    last, last_query = cut(q_offsets_ptr, q_step, batch, heads, gl.minimum(x, total))
    kept = (facts, own_shift(facts), q_offsets_ptr, k_offsets_ptr, q_step.to(gl.int64), k_step.to(gl.int64),
            batch.to(gl.int64), most.to(gl.int64), first.to(gl.int64), first_query.to(gl.int64), last.to(gl.int64),
            last_query.to(gl.int64), dq_ptr, dk_ptr, dv_ptr, sums_ptr, flags_ptr, pitch, T.to(gl.int64),
            U.to(gl.int64), gl.to_tensor(0).to(gl.int64), row_terms_ptr, column_terms_ptr)  # fmt: skip
    gl.inline_asm(keep_asm, "r,r,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l", kept, is_pure=False)
    NORMED: gl.constexpr = True
    gl.warp_specialize(
        [
            (consumer, (dq_desc, dk_desc, dv_desc, k_s, v_s, q_s, do_s, t_s, dq_s, facts, notes, kv_full, kv_free, full,
                        free, t_full, t_free, half_scale, gl.constexpr(0), ACT, terms_s, normed, NORMED, INNER)),
            (consumer, (dq_desc, dk_desc, dv_desc, k_s, v_s, q_s, do_s, t_s, dq_s, facts, notes, kv_full, kv_free, full,
                        free, t_full, t_free, half_scale, gl.constexpr(1), ACT, terms_s, normed, NORMED, INNER)),
            (loader, (q_desc, k_desc, v_desc, do_desc, k_s, v_s, q_s, do_s, facts, notes, kv_full, kv_free, full, free,
                      terms_s, NORMED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def variants():
    for plain in PLAIN_VARIANTS:
        for form, inner in (("normed", False), ("normed_inner", True)):
            args = {}
            for name, value in plain.args.items():
                if name == "pitch":
                    args |= {"row_terms_ptr": "*fp32:16", "column_terms_ptr": "*fp32:16"}
                args[name] = value
            name = plain.name.replace("backward", f"backward_{form}")
            yield Variant(name, gdpa_backward_normed_kernel, args | {"INNER": inner}, maxnreg=168)


VARIANTS = list(variants())
