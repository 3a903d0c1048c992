"""FlashNormAttention backward in one kernel: post-norm backward, GDPA backward and pre-norm backward.

    do = rstd_o * (g - mean(g) - o_hat * mean(g * o_hat))       g = dout * post weight, means over all heads
    qn = (q - mean) * rstd * weight + bias
    s = scale * qn k^T;   p = act(s);   t = (do v^T) * act'(s)  per head
    dv = p^T do;   dk = scale * t^T qn;   h = scale * t k (+ do: the inner residual)
    dq = rstd * (h * weight - mean(h * weight) - xhat * mean(h * weight * xhat)) (+ add)

A cluster works on one sequence, CTA r on its head r: K, V and the sums dk, dv stay on chip while blocks of 64 queries
pass. Row means are taken over the cluster: each CTA sends its part of every row to all of them through distributed
shared memory. Partitions of a CTA:

    consumers   two warpgroups, 64 keys each: the five products of a block, 32 queries at a time (that many registers)
    side        one warpgroup: TMA copies; do and qn of block i + 2 in the place of dout and o_hat; dq of block i

Source modules: attention_backward_products.py, attention_backward_side.py and what they share. The cluster's size is set
by the launch: to the compiler this is a kernel of single CTAs.

Shared memory: raw q in a ring of three blocks, dout and o_hat (then do and qn) in one of two, t and h once. All tiles are
64 x 64, one 128-byte swizzled panel. The side works in pairs of 16-bit values, a half warp to a row of 128 columns, with
accesses to shared memory by hand: every thread writes where it has read, so none needs a barrier.

Rows of a block past the sequence's end hold do = qn = 0 and are not stored; keys past its end hold k = v = 0, which
gives p = act(0) in rows of dv that are not stored, and t = 0.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .attention_backward_common import (
    BLOCK,
    FACTS,
    GELU,
    GELU_TANH,
    LAYER,
    MAX_HEADS,
    PLAIN,
    POST_BIT,
    PRE_BIT,
    Q_SLOTS,
    RMS,
    STRIP,
    WIDTH,
    keep_asm,
    own_shift,
    share,
)  # fmt: skip
from .attention_backward_products import consumer
from .attention_backward_side import side
from .variants import Tile, Variant


@gluon.jit(do_not_specialize=["heads", "form"])
def attention_backward_kernel(
    q_desc,  # [T, D]; D = heads * 128
    k_desc,  # [U, D]
    v_desc,
    dout_desc,  # [T, D]
    hat_desc,  # [T, D]: o_hat
    q_ptr,  # q again, for the first element of a row
    q_offsets_ptr,  # [B + 1], of which every q_step-th 32-bit word is read
    k_offsets_ptr,
    mean_ptr,  # [T] fp32: the pre-norm's mean, relative to that element; read for layer norm
    rstd_ptr,  # [T] fp32
    o_rstd_ptr,  # [T] fp32
    weight_ptr,  # [D] fp32: the pre-norm's parameters, then the post-norm's weight
    bias_ptr,
    post_ptr,
    add_ptr,  # pairs; what is added to dq, if ADD
    dq_ptr,  # pairs, [T, D / 2]
    dk_ptr,  # rows dk_token apart
    dv_ptr,
    sums_ptr,  # [B, KINDS, D] fp32
    q_token,
    add_pitch,
    dq_pitch,
    dk_token,
    q_step,
    k_step,
    heads,
    form,
    half_scale,
    ACT: gl.constexpr,
    FAST: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    tile: gl.constexpr = q_desc.layout
    b = gl.program_id(0) // heads
    head = gl.program_id(0) - b * heads
    start = gl.load(q_offsets_ptr + b * q_step)
    q_len = gl.load(q_offsets_ptr + (b + 1) * q_step) - start
    k_start = gl.load(k_offsets_ptr + b * k_step)
    k_len = gl.load(k_offsets_ptr + (b + 1) * k_step) - k_start
    blocks = (q_len + BLOCK - 1) // BLOCK
    k_s = gl.allocate_shared_memory(dtype, [4, BLOCK, BLOCK], tile)
    v_s = gl.allocate_shared_memory(dtype, [4, BLOCK, BLOCK], tile)
    q_s = gl.allocate_shared_memory(dtype, [2 * Q_SLOTS, BLOCK, BLOCK], tile)
    do_s = gl.allocate_shared_memory(dtype, [4, BLOCK, BLOCK], tile)
    qn_s = gl.allocate_shared_memory(dtype, [4, BLOCK, BLOCK], tile)
    t_s = gl.allocate_shared_memory(dtype, [2, BLOCK, BLOCK], tile)
    h_s = gl.allocate_shared_memory(dtype, [2, BLOCK, BLOCK], tile)
    rows_s = gl.allocate_shared_memory(gl.float32, [(2 * Q_SLOTS + 2) * (BLOCK // STRIP), STRIP], PLAIN)
    front_s = gl.allocate_shared_memory(gl.float32, [2 * MAX_HEADS, 2 * BLOCK], PLAIN)
    back_s = gl.allocate_shared_memory(gl.float32, [2 * MAX_HEADS, 2 * BLOCK], PLAIN)
    kv_full = mbarrier.allocate_mbarrier()
    kv_ready = mbarrier.allocate_mbarrier()
    t_full = mbarrier.allocate_mbarrier()
    h_full = mbarrier.allocate_mbarrier()
    h_free = mbarrier.allocate_mbarrier()
    q_full = mbarrier.allocate_mbarrier(batch=Q_SLOTS)
    x_full = mbarrier.allocate_mbarrier(batch=2)
    ready = mbarrier.allocate_mbarrier(batch=2)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_ready, count=2)
    mbarrier.init(t_full, count=2)
    mbarrier.init(h_full, count=2)
    mbarrier.init(h_free, count=1)
    for slot in gl.static_range(Q_SLOTS):
        mbarrier.init(q_full.index(slot), count=1)
    for stage in gl.static_range(2):
        mbarrier.init(x_full.index(stage), count=1)
        mbarrier.init(ready.index(stage), count=1)
    facts = gl.allocate_shared_memory(gl.int64, [FACTS], PLAIN)
    keys = k_start.to(gl.int64) * dk_token + head * WIDTH
    column = head * WIDTH
    pre = form >> PRE_BIT & 3
    post = form >> POST_BIT & 3
    kept = (facts, own_shift(facts), q_ptr, mean_ptr, rstd_ptr, o_rstd_ptr, weight_ptr + column, bias_ptr + column,
            post_ptr + column, sums_ptr, dk_ptr + keys, dv_ptr + keys, q_token, dk_token, k_len.to(gl.int64),
            share(pre, RMS, heads), share(pre, LAYER, heads), share(post, RMS, heads),
            share(post, LAYER, heads))  # fmt: skip
    gl.inline_asm(
        keep_asm,
        ("r", "r", "l", "l", "l", "l", "l", "l", "l", "l", "l", "l", "l", "l", "l", "l", "l", "l", "l"),
        kept,
        is_pure=False,
    )
    gl.warp_specialize(
        [
            (side, (q_desc, k_desc, v_desc, dout_desc, hat_desc, k_s, v_s, q_s, do_s, qn_s, h_s, rows_s, front_s, back_s,
                    facts, kv_full, q_full, x_full, ready, h_full, h_free, add_ptr, dq_ptr,
                    add_pitch, dq_pitch, start, q_len, k_start, head, heads, blocks, form)),
            (consumer, (k_s, v_s, qn_s, do_s, t_s, h_s, facts, kv_full, kv_ready, ready, t_full, h_full, h_free, blocks,
                        half_scale, form, gl.constexpr(0), ACT, FAST)),
            (consumer, (k_s, v_s, qn_s, do_s, t_s, h_s, facts, kv_full, kv_ready, ready, t_full, h_full, h_free, blocks,
                        half_scale, form, gl.constexpr(1), ACT, FAST)),
        ],
        [4, 4],
        [216, 216],
    )  # fmt: skip


@triton.jit
def finish_kernel(
    sums_ptr,  # [parts, width] fp32
    out_ptr,  # [width] fp32: the sums over the parts, always in the same order
    dq_ptr,  # [T, D], dk, dv rows dk_token apart: rows past the last sequence become 0
    dk_ptr,
    dv_ptr,
    q_offsets_ptr,
    k_offsets_ptr,
    dk_token,
    q_last,  # where the last offset is, in words of 32 bits
    k_last,
    parts,
    width,
    T,
    U,
    D,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ZEROS: tl.constexpr,
):
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, PARTS)
    keep = cols < width
    total = tl.zeros((PARTS, COLUMNS), tl.float32)
    for part in range(0, parts, PARTS):
        at = (part + rows).to(tl.int64)[:, None] * width + cols[None, :]
        total += tl.load(sums_ptr + at, mask=(part + rows < parts)[:, None] & keep[None, :], other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, 0), mask=keep)
    lanes = tl.arange(0, ZEROS)
    zeros = tl.zeros((ZEROS,), dq_ptr.dtype.element_ty)
    for row in range(tl.load(q_offsets_ptr + q_last) + tl.program_id(0), T, tl.num_programs(0)):
        for col in range(0, D, ZEROS):
            tl.store(dq_ptr + row.to(tl.int64) * D + col + lanes, zeros, mask=col + lanes < D)
    for row in range(tl.load(k_offsets_ptr + k_last) + tl.program_id(0), U, tl.num_programs(0)):
        for col in range(0, D, ZEROS):
            tl.store(dk_ptr + row.to(tl.int64) * dk_token + col + lanes, zeros, mask=col + lanes < D)
            tl.store(dv_ptr + row.to(tl.int64) * dk_token + col + lanes, zeros, mask=col + lanes < D)


ACTIVATIONS = {"gelu": GELU.value, "gelu_tanh": GELU_TANH.value}


def variants():
    for dtype in ("bf16", "fp16"):
        for name, code in ACTIVATIONS.items():
            args = {f"{x}_desc": Tile(dtype, (64, 64)) for x in ("q", "k", "v", "dout", "hat")}
            args |= {"q_ptr": f"*{dtype}:16", "q_offsets_ptr": "*i32", "k_offsets_ptr": "*i32"}
            args |= {f"{x}_ptr": "*fp32" for x in ("mean", "rstd", "o_rstd", "weight", "bias", "post")}
            args |= {"add_ptr": "*i32:16", "dq_ptr": "*i32:16", "dk_ptr": f"*{dtype}:16", "dv_ptr": f"*{dtype}:16"}
            args |= {"sums_ptr": "*fp32:16", "q_token": "i64:8", "add_pitch": "i64:4", "dq_pitch": "i64:4"}
            args |= {"dk_token": "i64:8"}
            args |= {
                "q_step": "i32",
                "k_step": "i32",
                "heads": "i32",
                "form": "i32",
                "half_scale": "fp32",
                "ACT": code,
                "FAST": dtype == "bf16",
            }
            yield Variant(f"attention_backward_{dtype}_{name}", attention_backward_kernel, args, maxnreg=168)


def finish_variants():
    for dtype in ("bf16", "fp16"):
        args = {"sums_ptr": "*fp32:16", "out_ptr": "*fp32:16"}
        args |= {f"{x}_ptr": f"*{dtype}:16" for x in ("dq", "dk", "dv")} | {
            "q_offsets_ptr": "*i32",
            "k_offsets_ptr": "*i32",
        }
        args |= {
            "dk_token": "i64:8",
            "q_last": "i32",
            "k_last": "i32",
            "parts": "i32",
            "width": "i32:8",
            "T": "i32",
            "U": "i32",
            "D": "i32:8",
        }
        args |= {"PARTS": 128, "COLUMNS": 32, "ZEROS": 512}
        yield Variant(f"attention_backward_finish_{dtype}", finish_kernel, args, num_warps=8)


VARIANTS = [*variants(), *finish_variants()]
