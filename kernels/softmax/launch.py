"""Launch the softmax attention kernels: when they serve, their grids and their output buffers.

Tensors are [rows, heads, d] with unit stride along d and any other strides.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from recsys_norm.kernels.gdpa.configs import Config, padded_width
from recsys_norm.kernels.gdpa.launch import (
    Spec,
    block_count,
    check_supported,
    device_of,
    grid_of,
    on_device,
    strides,
    vector_of,
)
from recsys_norm.kernels.hopper import softmax_backward as hopper
from recsys_norm.kernels.softmax import backward as backward_kernels
from recsys_norm.kernels.softmax import configs, forward_blocks, queries
from recsys_norm.kernels.softmax import forward as kernels


def serves(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> bool:
    """Whether the kernel can take the case and was measured to be faster than torch's flash attention there."""
    d = q.shape[2]
    if spec.scale <= 0 or vector_of((q, k, v), d) == 1:
        return False
    return configs.chosen(device_of(q)[0], d, spec.max_q_len, spec.max_k_len, spec.masked)


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, spec: Spec, *, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """o [T, H, d] and the natural log-sum-exp of each row's scores, fp32 [H, T]: +inf for a query without keys, 0 past the
    last offset.

    bf16 or fp16, d up to 256, spec.scale positive; `spec.runs` is not used. `config` overrides the shipped tile, for tuning.
    """
    check_supported(q)
    if spec.scale <= 0:
        raise ValueError(f"the softmax kernel needs a positive scale, got {spec.scale}; use implementation='eager'")
    tokens, heads, d = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    batch = q_offsets.numel() - 1
    if batch == 0 or q.numel() == 0:
        return out.zero_(), lse.zero_()
    config = config or configs.tile(device_of(q)[0], d)
    blocks = block_count(spec.max_q_len, config.block_m)
    vector = vector_of((q, k, v, out), d)
    width = padded_width(d)
    constants = {
        "MASKED": spec.masked,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": width,
        "VEC": vector,
        "UPCAST": q.dtype == torch.bfloat16 and not q.is_cuda,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    tensors = (q, k, v, out, lse, q_offsets, k_offsets, *strides(vector, q, k, v, out), batch, heads, blocks, tokens)
    grid = grid_of(batch * heads * blocks)
    with on_device(q):
        if configs.through_descriptors(device_of(q)[0], d) and vector > 1 and _has_descriptor(k) and _has_descriptor(v):
            both = (_blocks(k, config.block_n), _blocks(v, config.block_n))
            forward_blocks.forward_blocks[grid](*both, *tensors, *spec.scalars, **constants)
        else:
            kernels.forward[grid](*tensors, d // vector, *spec.scalars, EVEN=width == d, **constants)
    return out, lse


def _columns(x: Tensor) -> int:
    """From the first head's first to the last head's last, of x [.., heads, d]."""
    return (x.shape[1] - 1) * x.stride(1) + x.shape[2]


def _has_descriptor(x: Tensor) -> bool:
    return 0 < x.shape[0] < 2**31 and x.stride(0) >= _columns(x)


def _blocks(x: Tensor, rows: int) -> TensorDescriptor:
    """Blocks of `rows` rows and one head, of a matrix whose columns are those of all heads."""
    return TensorDescriptor(x, [x.shape[0], _columns(x)], [x.stride(0), 1], [rows, x.shape[2]])


def serves_few_queries(q: Tensor, batch: int, spec: Spec) -> bool:
    """Whether the backward kernel can take the case and was measured to be faster than torch's flash attention there."""
    if spec.masked or spec.max_q_len > configs.MOST_QUERIES or spec.scale <= 0:
        return False
    return configs.few_queries_chosen(device_of(q)[0], q.shape[2], batch * q.shape[1])


def few_queries(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    spec: Spec,
    *,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous, of softmax attention without a mask, with at most MOST_QUERIES queries per sequence.

    grad, q, out [T, H, d] and k, v [U, H, d] with unit stride along d, bf16 or fp16; lse fp32 [H, T], +inf for a query
    without keys. Rows past the last offset get 0. `config` overrides the shipped tile, for tuning.
    """
    check_supported(q)
    if spec.masked or spec.max_q_len > configs.MOST_QUERIES:
        raise ValueError(
            f"the kernel holds {configs.MOST_QUERIES} queries per sequence and knows no mask, got "
            f"max_q_len={spec.max_q_len}; use torch's flash attention"
        )
    queries, heads, d = q.shape
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    batch = q_offsets.numel() - 1
    if batch == 0 or q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    config = config or configs.few_queries_tile()
    tensors = (q, k, v, grad, out)
    vector = vector_of((*tensors, dq, dk), d)
    width = padded_width(d)
    with on_device(q):
        backward_kernels.few_queries[grid_of(batch * heads)](
            *tensors, lse.contiguous(), dq, dk, dv, q_offsets, k_offsets, *strides(vector, *tensors, dq, dk),
            batch, heads, queries, k.shape[0], d // vector, spec.max_k_len, spec.scale,
            BLOCK_M=configs.MOST_QUERIES, BLOCK_N=config.block_n, BLOCK_D=width,
            VEC=vector, EVEN=width == d, UPCAST=q.dtype == torch.bfloat16 and not q.is_cuda,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return dq, dk, dv


def serves_causal(q: Tensor, q_offsets: Tensor, k_offsets: Tensor, spec: Spec) -> bool:
    """Whether the causal backward on Hopper can take the case and is chosen."""
    arch = device_of(q)[0]
    if not configs.causal_backward_chosen(arch, (q_offsets.numel() - 1) * q.shape[1]):
        return False
    return hopper.fits(q, q_offsets, k_offsets, spec.left, spec.right, spec.max_q_len, arch)


def causal_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, offsets: Tensor, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous, of causal softmax self-attention with or without a window, on Hopper.

    grad, q, out [T, H, d] and k, v [U, H, d] with unit stride along d, for which `hopper.fits` holds; lse fp32 [H, T].
    Rows past the last offset get 0. Deterministic.
    """
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if offsets.numel() == 1 or q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    zeros, stats, order = describe_queries(grad, out, lse, offsets)
    describe_first_queries(stats, grad, q, k, v, offsets, spec)
    with on_device(q):
        tensors = (q, k, v, grad, dq, dk, dv)
        hopper.backward(tensors, offsets, order, stats, zeros, spec.left, spec.max_q_len, spec.scale)
    return dq, dk, dv


def describe_queries(grad: Tensor, out: Tensor, lse: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """hopper.ZEROS zeros; fp32 [2, H, T], -log2(e) * lse and rowsum(grad * out); the sequences, int32, the longest first."""
    tokens, heads, d = grad.shape
    batch = offsets.numel() - 1
    # One buffer, whose beginning is aligned to 16 bytes whatever T is.
    numbers = torch.empty(hopper.ZEROS + 2 * heads * tokens, dtype=torch.float32, device=grad.device)
    zeros, stats = numbers[: hopper.ZEROS], numbers[hopper.ZEROS :].view(2, heads, tokens)
    order = torch.empty(batch, dtype=torch.int32, device=grad.device)
    vector, width = vector_of((grad, out), d), padded_width(d)
    config = configs.queries_tile()
    blocks = block_count(tokens, config.block_m)
    with on_device(grad):
        queries.describe_queries[grid_of(max(heads * blocks, block_count(batch, queries.RANKED)))](
            grad, out, lse.contiguous(), offsets, zeros, stats, order, *strides(vector, grad, out),
            batch, heads, blocks, tokens, d // vector,
            ZEROS=hopper.ZEROS, RANKED=queries.RANKED, BLOCK_M=config.block_m, BLOCK_D=width, VEC=vector,
            EVEN=width == d, UPCAST=grad.dtype == torch.bfloat16 and not grad.is_cuda,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return zeros, stats, order


def describe_first_queries(
    stats: Tensor, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, spec: Spec
) -> None:
    """rowsum(grad * out) of each sequence's first queries in stats [2, H, T], without the rounding of out."""
    tokens, heads, d = grad.shape
    tensors = (q, k, v, grad)
    vector, width = vector_of(tensors, d), padded_width(d)
    config = configs.first_queries_tile()
    *_, scale, left, _ = spec.scalars
    with on_device(grad):
        queries.first_queries[grid_of((offsets.numel() - 1) * heads)](
            *tensors, offsets, stats, *strides(vector, *tensors), heads, tokens, d // vector, scale, left,
            BLOCK_M=config.block_m, BLOCK_D=width, VEC=vector, EVEN=width == d,
            UPCAST=grad.dtype == torch.bfloat16 and not grad.is_cuda,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
