"""Backward of causal softmax self-attention on Hopper (kernel in softmax_backward_kernels.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_norm.kernels.hopper import launch
from recsys_norm.kernels.hopper.attention import as_rows

WIDTH = 128  # of a head
BLOCK = 64  # queries, as in the kernel
MOST_SLOTS = 16  # blocks of dQ that wait for more keys: 4 MB each on an H200, and more would not stay in L2
MOST_PAIRS = 2**30  # of a sequence and a head: the kernel counts in 32 bits
ZEROS = 512  # numbers that a program reads where a block has no sums yet


def fits(
    q: Tensor, q_offsets: Tensor, k_offsets: Tensor, left: int | None, right: int | None, longest: int, arch: int
) -> bool:
    """Whether the kernel takes q [T, heads, d] with these offsets, a window of `left` keys before a query's own and `right`
    behind, and sequences of up to `longest`."""
    if q.dtype != torch.bfloat16 or q.shape[2] != WIDTH or right != 0:
        return False
    if q_offsets.data_ptr() != k_offsets.data_ptr() or q_offsets.shape != k_offsets.shape:  # cross-attention
        return False
    if q_offsets.stride() != k_offsets.stride() or q_offsets.dtype != k_offsets.dtype:
        return False
    if slots(window_of(left, longest), longest) > MOST_SLOTS or q_offsets.numel() * q.shape[1] > MOST_PAIRS:
        return False
    return launch.why_not(arch) is None


def window_of(left: int | None, longest: int) -> int:
    """Keys that a query sees, itself included."""
    return longest if left is None else min(left + 1, longest)


def slots(window: int, longest: int) -> int:
    """A power of two, at least as many as the blocks of queries that can wait for more keys: of those that see some of 128
    keys all but the two that hold these keys."""
    blocks = min((window + 2 * BLOCK - 2) // BLOCK + 1, -(-longest // BLOCK))
    return 1 << max(blocks - 3, 0).bit_length()


def backward(
    tensors: tuple[Tensor, ...],  # q, k, v, grad, dq, dk, dv, of which the last three are contiguous
    offsets: Tensor,  # [B + 1]
    order: Tensor,  # int32 [B], sequences, the longest first
    stats: Tensor,  # fp32 [2, heads, T]: -log2(e) * lse, rowsum(grad * o)
    zeros: Tensor,  # fp32 [ZEROS]
    left: int | None,
    longest: int,
    scale: float,
) -> None:
    """Fill dq, dk and dv. The caller has made sure that it fits (`fits`) and that there are rows."""
    q, k, v, grad, dq, dk, dv = tensors
    batch, heads = offsets.numel() - 1, q.shape[1]
    offsets = offsets.contiguous()
    programs = min(launch.multiprocessors(q.device), batch * heads)
    window = window_of(left, longest)
    waiting = slots(window, longest)
    sums = torch.empty((programs, waiting, 2, BLOCK * BLOCK), dtype=torch.float32, device=q.device)
    launch.get("softmax_backward_bf16")(
        programs,
        *(as_rows(t) for t in (q, k, v, grad)),
        *(t.flatten(1) for t in (dq, dk, dv)),
        *(dq, dk, dv, offsets, order, stats, sums, zeros, dq.stride(0)),
        *(batch, heads, offsets.element_size() // 4, window, waiting, q.shape[0], k.shape[0], scale),
    )
