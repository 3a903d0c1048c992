"""Backward of jagged attention on Hopper, for at most 128 keys per sequence (kernels in gdpa_backward_kernels.py and, with
the norm of the queries inside, gdpa_backward_normed_kernels.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recsys_norm.kernels.hopper import launch

ACTIVATIONS = {4: "gelu", 5: "gelu_tanh"}  # by the codes of recsys_norm.ops.activations
WIDTH = 128  # of a head
MAX_KEYS = 128  # of a sequence, all in shared memory
EXTRA = 64  # what a sequence costs beside its queries, in queries: as in the kernel
LEAST = 192  # what is worth a program, likewise
MAX_COST = 2**29  # of a batch, likewise: the kernel counts in 32 bits, and programs times units of 64


class Norm(NamedTuple):
    """What makes q of its rows before the norm: (q - centre) * rstd * weight + bias."""

    rows: Tensor  # [T, 2] fp32: centre and rstd
    columns: Tensor  # [H * 16, 2, 8] fp32: weight and bias of 8 columns
    inner: bool  # whether dq is to be the sum of the attention's and of grad, which an inner residual makes


def fits(tensors: tuple[Tensor, ...], sequences: int, code: int, max_keys: int, arch: int) -> bool:
    """Whether the kernel takes (q, k, v, grad), which are [rows, heads, d], with the activation of this code."""
    q = tensors[0]
    if q.dtype != torch.bfloat16 or q.shape[2] != WIDTH or code not in ACTIVATIONS or max_keys > MAX_KEYS:
        return False
    if q.shape[1] * (q.shape[0] + EXTRA * sequences) > MAX_COST or launch.why_not(arch) is not None:
        return False
    return all(readable(t) for t in tensors)


def readable(x: Tensor) -> bool:
    """Whether TMA can read [rows, heads, 128] as a matrix of whole rows."""
    rows, heads, d = x.shape
    if x.stride(2) != 1 or (heads > 1 and x.stride(1) != d) or x.data_ptr() % 16:
        return False
    return rows <= 1 or (x.stride(0) % 8 == 0 and x.stride(0) >= heads * d)


def as_matrix(x: Tensor) -> Tensor:
    """[rows, heads, d] as [rows, heads * d]."""
    rows, heads, d = x.shape
    return x.as_strided((rows, heads * d), (x.stride(0) if rows > 1 else heads * d, 1))


def backward(
    tensors: tuple[Tensor, ...],  # q, k, v, grad, dq, dk, dv, of which the last three are contiguous
    q_offsets: Tensor,
    k_offsets: Tensor,
    code: int,
    max_keys: int,
    scale: float,
    norm: Norm | None = None,
) -> None:
    """Fill dq, dk and dv, whole rows of them: it takes all heads. The caller has made sure that the rest fits (`fits`). With
    a norm, q is what comes before it, and dq the gradient of what comes after it; dq may be grad's memory."""
    q, k, _, _, dq, dk, dv = tensors
    batch, heads = q_offsets.numel() - 1, q.shape[1]
    some = next(t for t in tensors if t.shape[0])  # without rows there is no tensor map, and nothing that needs one
    maps = [as_matrix(t if t.shape[0] else some) for t in tensors]
    q_offsets, k_offsets = q_offsets.contiguous(), k_offsets.contiguous()
    cost = heads * (q.shape[0] + EXTRA * batch)
    programs = max(1, min(launch.multiprocessors(q.device), cost // LEAST))
    sums = torch.empty((programs, 2, MAX_KEYS, WIDTH), dtype=torch.float32, device=q.device)
    # Of this launch alone: CUDA graphs of torch.compile keep no tensor that outlives the call that made it.
    flags = torch.zeros(2 * launch.multiprocessors(q.device), dtype=torch.int32, device=q.device)
    form = "" if norm is None else "normed_inner_" if norm.inner else "normed_"
    launch.get(f"gdpa_backward_{form}{ACTIVATIONS[code]}_bf16")(
        programs,
        *(*maps, dq, dk, dv, q_offsets, k_offsets, sums, flags, *(norm or ())[:2]),
        *(dq.stride(0) if q.shape[0] else dk.stride(0), batch, heads),
        *(q_offsets.element_size() // 4, k_offsets.element_size() // 4, min(max_keys, MAX_KEYS)),
        *(q.shape[0], k.shape[0], 0.5 * scale),
        cooperative=True,
    )
