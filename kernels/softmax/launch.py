"""Launch the softmax attention kernels: when they serve, their grids and their output buffers.

Tensors are [rows, heads, d] with unit stride along d and any other strides.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
from recsys_norm.kernels.softmax import backward as backward_kernels
from recsys_norm.kernels.softmax import configs
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
    with on_device(q):
        kernels.forward[grid_of(batch * heads * blocks)](
            q, k, v, out, lse, q_offsets, k_offsets, *strides(vector, q, k, v, out),
            batch, heads, blocks, tokens, d // vector, *spec.scalars,
            MASKED=spec.masked, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_D=width,
            VEC=vector, EVEN=width == d, UPCAST=q.dtype == torch.bfloat16 and not q.is_cuda,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out, lse


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
