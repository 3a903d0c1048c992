"""Launch the backward kernel for few queries per sequence: when it serves, and the gradients it makes."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_norm.kernels.gdpa.configs import Config, padded_width
from recsys_norm.kernels.gdpa.launch import (
    Spec,
    check_supported,
    device_of,
    grid_of,
    on_device,
    strides,
    vector_of,
)
from recsys_norm.kernels.softmax import backward as kernels

MOST_QUERIES = 64  # per sequence, in one block
TILE = Config(64, 64, 4, 2)
_MEASURED = dict(arch=90, d=128)
_LEAST_PROGRAMS = 512  # one per sequence and head, of very different lengths: fewer leave multiprocessors idle


def serves(q: Tensor, batch: int, spec: Spec) -> bool:
    """Whether the kernel can take the case and was measured to be faster than torch's flash attention there."""
    if spec.masked or spec.max_q_len > MOST_QUERIES or spec.scale <= 0:
        return False
    measured = device_of(q)[0] == _MEASURED["arch"] and q.shape[2] == _MEASURED["d"]
    return measured and batch * q.shape[1] >= _LEAST_PROGRAMS


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
    """(dq, dk, dv), contiguous, of softmax attention without a mask and with at most MOST_QUERIES queries per sequence.

    grad, q, out [T, H, d] and k, v [U, H, d] with unit stride along d, bf16 or fp16; lse fp32 [H, T], +inf for a query
    without keys. Rows past the last offset get 0. `config` overrides the shipped tile, for tuning.
    """
    check_supported(q)
    if spec.masked or spec.max_q_len > MOST_QUERIES:
        raise ValueError(
            f"the kernel holds {MOST_QUERIES} queries per sequence and knows no mask, got max_q_len={spec.max_q_len}; "
            "use torch's flash attention"
        )
    queries, heads, d = q.shape
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    batch = q_offsets.numel() - 1
    if batch == 0 or q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    config = config or TILE
    tensors = (q, k, v, grad, out)
    vector = vector_of((*tensors, dq, dk), d)
    width = padded_width(d)
    with on_device(q):
        kernels.few_queries[grid_of(batch * heads)](
            *tensors, lse.contiguous(), dq, dk, dv, q_offsets, k_offsets, *strides(vector, *tensors, dq, dk),
            batch, heads, queries, k.shape[0], d // vector, spec.max_k_len, spec.scale,
            BLOCK_M=MOST_QUERIES, BLOCK_N=config.block_n, BLOCK_D=width,
            VEC=vector, EVEN=width == d, UPCAST=q.dtype == torch.bfloat16 and not q.is_cuda,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return dq, dk, dv
