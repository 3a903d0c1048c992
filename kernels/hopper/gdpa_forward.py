"""Forward of jagged attention without norms on Hopper, for at most 128 keys per sequence (kernel in
gdpa_forward_kernels.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_norm.kernels.hopper import launch
from recsys_norm.kernels.hopper.gdpa_backward import ACTIVATIONS, MAX_COST, MAX_KEYS, WIDTH, as_matrix, readable

EXTRA = 128  # what a sequence costs beside its queries, in queries: as in the kernel
LEAST = 192  # what is worth a program, likewise


def fits(tensors: tuple[Tensor, ...], sequences: int, code: int, max_keys: int, arch: int) -> bool:
    """Whether the kernel takes (q, k, v), which are [rows, heads, d], with the activation of this code."""
    q = tensors[0]
    if q.dtype != torch.bfloat16 or q.shape[2] != WIDTH or code not in ACTIVATIONS or max_keys > MAX_KEYS:
        return False
    if q.shape[1] * (q.shape[0] + EXTRA * sequences) > MAX_COST or launch.why_not(arch) is not None:
        return False
    return all(readable(t) for t in tensors)


def forward(
    tensors: tuple[Tensor, ...],  # q, k, v, o, of which o is contiguous
    q_offsets: Tensor,
    k_offsets: Tensor,
    code: int,
    max_keys: int,
    scale: float,
) -> None:
    """Fill o, whole rows of it: it takes all heads. The caller has made sure that the rest fits (`fits`) and that there are
    queries."""
    q, k, _, o = tensors
    batch, heads = q_offsets.numel() - 1, q.shape[1]
    maps = [as_matrix(t if k.shape[0] else q) for t in tensors[1:3]]  # without rows there is no tensor map
    q_offsets, k_offsets = q_offsets.contiguous(), k_offsets.contiguous()
    programs = max(1, min(launch.multiprocessors(q.device), heads * (q.shape[0] + EXTRA * batch) // LEAST))
    launch.get(f"gdpa_forward_{ACTIVATIONS[code]}_bf16")(
        programs,
        *(as_matrix(q), *maps, o.flatten(1), o, q_offsets, k_offsets, o.stride(0), batch, heads),
        *(q_offsets.element_size() // 4, k_offsets.element_size() // 4, min(max_keys, MAX_KEYS)),
        *(q.shape[0], 0.5 * scale),
    )
