"""Jagged attention in plain PyTorch: `eager`, which autograd and torch.compile see through, and the forward and backward
that serve the CPU, which group sequences of similar length so that little is spent on padding.

Both compute 16-bit tensors in fp32. Padded keys and values are zeros, and act(0) = 0 for every activation, so padding
contributes nothing to values and exactly 0 to gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from recsys_norm.ops.activations import apply, apply_derivative
from recsys_norm.ops.inputs import without_autocast

_GROUP_SCORES = 1 << 22  # most scores of one group of sequences, 16 MB in fp32
_SMALL_GROUP = 1 << 16  # up to here one more call costs more than padding


@dataclass(frozen=True)
class Attention:
    """What is computed, without the tensors. `names` are activations (one, or one per head), None for softmax."""

    names: tuple[str, ...] | None
    scale: float
    causal: bool
    window: int | None

    @property
    def bounded(self) -> bool:
        return self.causal or self.window is not None

    def allowed(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """[queries, keys] mask: j <= i if causal, |i - j| < window; positions count from the sequence's start."""
        distance = torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)
        mask = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        return mask if self.window is None else mask & (distance.abs() < self.window)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _weights(scores_BHSL: Tensor, keep: Tensor | None, attention: Attention) -> Tensor:
    """What multiplies v. `keep` is None where every pair of the tile takes part or is padding of zeros."""
    if attention.names is not None:
        weights = apply(scores_BHSL, attention.names, head_dim=1)
        return weights if keep is None else weights * keep
    if keep is None:
        return scores_BHSL.softmax(-1)
    # The lowest finite number rather than -inf: a query without keys gives equal weights, then zeros, and no NaN.
    return scores_BHSL.masked_fill(~keep, torch.finfo(scores_BHSL.dtype).min).softmax(-1) * keep


# ---------------------------------------------------------------------------------------------------------------- eager


def _slots(offsets_B1: Tensor, rows: int, length: int) -> Tensor:
    """Where each packed row goes in [B * length] padded rows; rows of no sequence go to the extra slot at the end."""
    batch = offsets_B1.shape[0] - 1
    index = torch.arange(rows, device=offsets_B1.device)
    # In the whole of the offsets: for a part of them, torch 2.11's inductor searches from their start on a GPU.
    sequence = torch.searchsorted(offsets_B1, index.to(offsets_B1.dtype), right=True) - 1
    position = index - offsets_B1[sequence]
    inside = (sequence < batch) & (position < length)
    return torch.where(inside, sequence * length + position, batch * length)


def _pad(x_THd: Tensor, slots: Tensor, batch: int, length: int) -> Tensor:
    flat = x_THd.new_zeros(batch * length + 1, x_THd.shape[1] * x_THd.shape[2])
    flat = flat.index_copy(0, slots, x_THd.flatten(1))
    return flat[:-1].view(batch, length, *x_THd.shape[1:]).transpose(1, 2)


def eager(
    q_THd: Tensor,
    k_UHd: Tensor,
    v_UHd: Tensor,
    q_offsets_B1: Tensor,
    k_offsets_B1: Tensor,
    max_q_len: int,
    max_k_len: int,
    attention: Attention,
) -> Tensor:
    """Every sequence padded to the maximum lengths. No step depends on the values of the offsets."""
    batch = q_offsets_B1.shape[0] - 1
    dtype = _compute_dtype(q_THd.dtype)
    max_q_len, max_k_len = max(max_q_len, 1), max(max_k_len, 1)
    with without_autocast(q_THd):
        q_slots = _slots(q_offsets_B1, q_THd.shape[0], max_q_len)
        k_slots = _slots(k_offsets_B1, k_UHd.shape[0], max_k_len)
        q = _pad(q_THd.to(dtype), q_slots, batch, max_q_len)
        k = _pad(k_UHd.to(dtype), k_slots, batch, max_k_len)
        v = _pad(v_UHd.to(dtype), k_slots, batch, max_k_len)
        keep = None
        if attention.names is None:
            k_len = k_offsets_B1.diff()
            keep = (torch.arange(max_k_len, device=k.device) < k_len[:, None])[:, None, None, :]
        if attention.bounded:
            allowed = attention.allowed(max_q_len, max_k_len, q.device)
            keep = allowed if keep is None else keep & allowed
        weights = _weights(q @ k.transpose(-1, -2) * attention.scale, keep, attention)
        o = (weights @ v).transpose(1, 2).flatten(0, 1)
        extra = o.new_zeros(1, *o.shape[1:])
        return torch.cat([o, extra]).index_select(0, q_slots).to(q_THd.dtype)


# ----------------------------------------------------------------------------------------------------------- CPU kernels


@dataclass(frozen=True)
class _Side:
    """Rows of one group of sequences, padded to [g, length]. `valid` is None where nothing is padding, else `slots` lists
    the padded slots that hold a row."""

    rows: Tensor
    valid: Tensor | None
    slots: Tensor | None

    @staticmethod
    def of(offsets: Tensor, sequences: Tensor, length: int) -> _Side:
        start, end = offsets[sequences, None], offsets[sequences + 1, None]
        rows = start + torch.arange(length)
        valid = rows < end
        slots = valid.flatten().nonzero().squeeze(1)
        if slots.shape[0] == rows.numel():
            return _Side(rows, None, None)
        return _Side(rows.masked_fill_(~valid, 0), valid, slots)

    def take(self, x_THd: Tensor) -> Tensor:
        """[g, H, length, d], zeros in the padding, in the dtype of computation."""
        y = x_THd.index_select(0, self.rows.flatten()).to(_compute_dtype(x_THd.dtype))
        y = y.view(*self.rows.shape, *x_THd.shape[1:])
        if self.valid is not None:
            y.masked_fill_(~self.valid[:, :, None, None], 0)
        return y.transpose(1, 2)

    def put(self, out_THd: Tensor, values_BHSd: Tensor) -> None:
        rows, values = self.rows.flatten(), values_BHSd.transpose(1, 2).to(out_THd.dtype).flatten(0, 1)
        if self.slots is not None:
            rows, values = rows[self.slots], values.index_select(0, self.slots)
        out_THd.index_copy_(0, rows, values)


def _groups(q_offsets: Tensor, k_offsets: Tensor, heads: int) -> Iterator[tuple[Tensor, int, int]]:
    """(sequences, longest query side, longest key side) of sequences of similar length, bounded in size. Sequences
    without queries or without keys have nothing to compute."""
    q_len, k_len = q_offsets.diff().tolist(), k_offsets.diff().tolist()
    order = sorted((b for b in range(len(q_len)) if q_len[b] and k_len[b]), key=lambda b: (-q_len[b], -k_len[b]))
    start = 0
    while start < len(order):
        longest, keys, end = q_len[order[start]], 0, start
        while end < len(order):
            more = max(keys, k_len[order[end]])
            scores = (end - start) * longest * more * heads
            full = scores + longest * more * heads > _GROUP_SCORES
            shorter = scores > _SMALL_GROUP and 3 * q_len[order[end]] < 2 * longest
            if end > start and (full or shorter):
                break
            keys, end = more, end + 1
        yield torch.tensor(order[start:end]), longest, keys
        start = end


def _keep(k: _Side, queries: int, keys: int, attention: Attention) -> Tensor | None:
    keep = None
    if attention.names is None and k.valid is not None:
        keep = k.valid[:, None, None, :]
    if attention.bounded:
        allowed = attention.allowed(queries, keys, torch.device("cpu"))
        keep = allowed if keep is None else keep & allowed
    return keep


@torch.no_grad()
def grouped_forward(
    q_THd: Tensor, k_UHd: Tensor, v_UHd: Tensor, q_offsets_B1: Tensor, k_offsets_B1: Tensor, attention: Attention
) -> Tensor:
    """o, on the CPU."""
    out = torch.zeros(q_THd.shape, dtype=q_THd.dtype)
    with torch.autocast("cpu", enabled=False):
        for sequences, queries, keys in _groups(q_offsets_B1, k_offsets_B1, q_THd.shape[1]):
            q_side, k_side = _Side.of(q_offsets_B1, sequences, queries), _Side.of(k_offsets_B1, sequences, keys)
            q, k, v = q_side.take(q_THd), k_side.take(k_UHd), k_side.take(v_UHd)
            keep = _keep(k_side, queries, keys, attention)
            q_side.put(out, _weights((q @ k.transpose(-1, -2)).mul_(attention.scale), keep, attention) @ v)
    return out


@torch.no_grad()
def grouped_backward(
    grad_THd: Tensor,
    q_THd: Tensor,
    k_UHd: Tensor,
    v_UHd: Tensor,
    q_offsets_B1: Tensor,
    k_offsets_B1: Tensor,
    attention: Attention,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), on the CPU; the scores are computed again."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (q_THd, k_UHd, v_UHd))
    with torch.autocast("cpu", enabled=False):
        for sequences, queries, keys in _groups(q_offsets_B1, k_offsets_B1, q_THd.shape[1]):
            q_side, k_side = _Side.of(q_offsets_B1, sequences, queries), _Side.of(k_offsets_B1, sequences, keys)
            q, k, v, g = q_side.take(q_THd), k_side.take(k_UHd), k_side.take(v_UHd), q_side.take(grad_THd)
            keep = _keep(k_side, queries, keys, attention)
            scores = (q @ k.transpose(-1, -2)).mul_(attention.scale)
            weights = _weights(scores, keep, attention)
            k_side.put(dv, weights.transpose(-1, -2) @ g)
            t = g @ v.transpose(-1, -2)
            if attention.names is None:
                t = weights * (t - (t * weights).sum(-1, keepdim=True))
            else:
                t.mul_(apply_derivative(scores, attention.names, head_dim=1))
                if keep is not None:
                    t.mul_(keep)
            t.mul_(attention.scale)
            q_side.put(dq, t @ k)
            k_side.put(dk, t.transpose(-1, -2) @ q)
    return dq, dk, dv


def check_lengths(name: str, offsets_B1: Tensor, rows: int, max_len: int) -> None:
    """Offsets on the CPU start at 0, do not decrease, and fit the rows and the maximum length.

    Raises:
        ValueError: naming the value and the limit.
    """
    lengths = offsets_B1.diff()
    if int(offsets_B1[0]) != 0 or bool((lengths < 0).any()):
        raise ValueError(f"{name}_offsets must start at 0 and not decrease, got {offsets_B1.tolist()[:8]}...")
    if int(offsets_B1[-1]) > rows:
        raise ValueError(f"{name}_offsets end at {int(offsets_B1[-1])}, and {name} has {rows} rows")
    if lengths.numel() and int(lengths.max()) > max_len:
        raise ValueError(f"max_{name}_len={max_len} is less than the longest sequence, {int(lengths.max())}; raise it")
