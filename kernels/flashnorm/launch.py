"""Launch the FlashNormAttention kernels: tiles, grids, scratch memory and outputs.

Tensors are [rows, heads, d] with unit stride along d; what is written is contiguous. Heads with different activations
are launched apart and meet at the same arrival counters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recsys_norm.kernels.flashnorm import backward_k as k_kernels
from recsys_norm.kernels.flashnorm import backward_q as q_kernels
from recsys_norm.kernels.flashnorm import configs
from recsys_norm.kernels.flashnorm import forward as forward_kernels
from recsys_norm.kernels.flashnorm import stats as stats_kernels
from recsys_norm.kernels.gdpa.configs import Config, padded_width
from recsys_norm.kernels.gdpa.launch import (
    Spec,
    block_count,
    device_of,
    grid_of,
    on_device,
    program_count,
    vector_of,
)

_ALL_HEADS, _PER_HEAD = 1, 2  # as in common
_POST = {None: 0, "rms": 1, "layer": 2}


@dataclass(frozen=True)
class PreNorm:
    """The norm on q: kind, scope, parameters and, for the backward, statistics (means relative to first elements)."""

    norm: str | None
    per_head: bool = False
    weight: Tensor | None = None
    bias: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {
            "PRE": 0 if self.norm is None else _PER_HEAD if self.per_head else _ALL_HEADS,
            "PRE_MEAN": self.norm == "layer",
            "PRE_WEIGHT": self.weight is not None,
            "PRE_BIAS": self.bias is not None,
        }

    def centre(self, q: Tensor) -> Tensor | None:
        """The mean as the kernels want it: itself for 16-bit rows, relative to the first element for fp32."""
        if self.mean is None or q.dtype == torch.float32:
            return self.mean
        return self.mean + (q[:, :, 0] if self.per_head else q[:, 0, 0])


@dataclass(frozen=True)
class PostNorm:
    norm: str | None
    weight: Tensor | None = None
    bias: Tensor | None = None


def _constants(q: Tensor, config: Config, vector: int, masked: bool) -> dict[str, Any]:
    d, interpreted = q.shape[2], not q.is_cuda
    tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return {
        "MASKED": masked,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": padded_width(d),
        "VEC": vector,
        "EVEN": padded_width(d) == d,
        "FAST": q.dtype == torch.bfloat16 and not interpreted,
        "UPCAST": q.dtype == torch.bfloat16 and interpreted,
        "PRECISION": "tf32" if tf32 else "ieee",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _strides(vector: int, *tensors: Tensor | None) -> list[int]:
    """Token and head strides in units of `vector`, zeros for a tensor that is not there."""
    return [0 if t is None else t.stride(i) // vector for t in tensors for i in (0, 1)]


def _empty(*shape: int, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def row_statistics(
    q: Tensor, q_offsets: Tensor, layer: bool, eps: float
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """(mean relative to the first element, mean, rstd) of the rows of q over all heads, [T] each; the second for 16-bit
    data only."""
    T, heads, d = q.shape
    shift = q.dtype == torch.float32
    rstd = _empty(T, like=q)
    mean = _empty(T, like=q) if layer else None
    centre = _empty(T, like=q) if layer and not shift else None
    vector = vector_of((q,), d)
    rows = configs.statistics_rows(heads, d)
    stats_kernels.row_statistics[(block_count(T, rows),)](
        q, q_offsets, mean, centre, rstd,
        q_offsets.numel() - 1, T, heads, d // vector, *_strides(vector, q), eps,
        HAS_MEAN=layer, SHIFT=shift, ROWS=rows, HEADS=configs.padded_heads(heads), BLOCK_D=padded_width(d), VEC=vector,
        num_warps=4,
    )  # fmt: skip
    return mean, centre, rstd


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    residual: Tensor | None,
    spec: Spec,
    pre: PreNorm,
    post: PostNorm,
    *,
    inner: bool,
    write_hat: bool,
    eps: float,
    config: Config | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
    """(out, hat, (q mean, q rstd, o mean, o rstd)). `config` and `splits` override what is shipped, for tuning."""
    T, heads, d = q.shape
    batch = q_offsets.numel() - 1
    arch, sms = device_of(q)
    resident = configs.resident_block(arch, d, q.element_size(), spec.max_k_len)
    config = config or configs.forward(arch, d, q.element_size(), resident)
    blocks = block_count(spec.max_q_len, config.block_m)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    hat = torch.empty_like(out) if write_hat else None
    q_mean = q_rstd = centre = o_mean = o_rstd = part = counters = None
    given = [t for t in (q, k, v, residual, out) if t is not None]
    vector = vector_of(given, d)
    with on_device(q):
        if pre.norm is not None and pre.per_head:
            q_rstd = _empty(T, heads, like=q)
            q_mean = centre = torch.empty_like(q_rstd) if pre.norm == "layer" else None
        elif pre.norm is not None:
            q_mean, centre, q_rstd = row_statistics(q, q_offsets, pre.norm == "layer", eps)
            centre = q_mean if centre is None else centre
        if post.norm is not None:
            o_rstd = _empty(T, like=q)
            o_mean = torch.empty_like(o_rstd) if post.norm == "layer" else None
            part = _empty(1 if o_mean is None else 2, T, heads, like=q)
            counters = torch.zeros(batch * blocks, dtype=torch.int32, device=q.device)
        for first, end, code in spec.runs:
            run = end - first
            programs = splits or program_count(blocks, batch * run, 2 * sms) if resident else blocks
            forward_kernels.forward[grid_of(batch * run * programs)](
                q, k, v, residual, out if hat is None else hat, out, hat,
                pre.weight, pre.bias, post.weight, post.bias,
                centre, q_rstd, o_mean, o_rstd, part, counters, q_offsets, k_offsets,
                *_strides(vector, q, k, v, residual),
                batch, heads, first, run, programs, blocks, T, d // vector, *spec.scalars, eps,
                ACT=code, RESIDENT=resident is not None, **pre.options, INNER=inner,
                POST=_POST[post.norm], POST_WEIGHT=post.weight is not None, POST_BIAS=post.bias is not None,
                RESIDUAL=residual is not None, WRITE_HAT=write_hat, HEADS=configs.padded_heads(heads),
                SHIFT=q.dtype == torch.float32, **_constants(q, config, vector, spec.masked),
            )  # fmt: skip
    return out, hat, (q_mean, q_rstd, o_mean, o_rstd)


def backward_q(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    extra: Tensor | None,
    spec: Spec,
    pre: PreNorm,
    *,
    inner: bool,
    dweight: bool,
    dbias: bool,
    config: Config | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dq, dgamma, dbeta), the latter two in fp32. `grad` is the gradient at o, `extra` is added to dq."""
    T, heads, d = q.shape
    batch = q_offsets.numel() - 1
    arch, sms = device_of(q)
    resident = configs.resident_block(arch, d, q.element_size(), spec.max_k_len)
    config = config or configs.backward_q(arch, d, q.element_size(), resident)
    blocks = block_count(spec.max_q_len, config.block_m)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    part = counters = columns = None
    vector = vector_of([t for t in (q, k, v, grad, dq, extra) if t is not None], d)
    with on_device(q):
        if pre.norm is not None and not pre.per_head:
            part = _empty(2 if pre.norm == "layer" else 1, T, heads, like=q)
            counters = torch.zeros(batch * blocks, dtype=torch.int32, device=q.device)
        if dweight or dbias:  # blocks that do not exist leave no sum
            columns = torch.zeros((T // config.block_m + batch, 2, heads * d), dtype=torch.float32, device=q.device)
        centre = pre.centre(q)
        for first, end, code in spec.runs:
            run = end - first
            programs = splits or program_count(blocks, batch * run, 2 * sms) if resident else blocks
            q_kernels.backward_q[grid_of(batch * run * programs)](
                q, k, v, grad, extra, dq, pre.weight, pre.bias, centre, pre.rstd, part, columns, counters,
                q_offsets, k_offsets, *_strides(vector, q, k, v, grad, extra),
                batch, heads, first, run, programs, blocks, T, d // vector, *spec.scalars,
                ACT=code, RESIDENT=resident is not None, **pre.options, INNER=inner, EXTRA=extra is not None,
                SUM_WEIGHT=dweight, SUM_BIAS=dbias, HEADS=configs.padded_heads(heads),
                SHIFT=q.dtype == torch.float32, **_constants(q, config, vector, spec.masked),
            )  # fmt: skip
        sums = [None, None]
        for i, wanted in enumerate((dweight, dbias)):
            if wanted:
                total = columns[:, i].sum(0)
                sums[i] = total.view(heads, d).sum(0) if pre.per_head else total
    return dq, *sums


def backward_k(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    spec: Spec,
    pre: PreNorm,
    *,
    config: Config | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(dk, dv) of the keys and values that the attention saw."""
    heads, d = q.shape[1:]
    batch = q_offsets.numel() - 1
    arch, sms = device_of(q)
    config = config or configs.backward_k(arch, d, q.element_size(), spec.max_k_len)
    dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    key_blocks = block_count(spec.max_k_len, config.block_n)
    if splits is None:
        # A split costs a partial sum of dk and dv, so only a batch too small to fill the GPU is split.
        groups = batch * heads * key_blocks
        splits = 1 if groups >= 2 * sms else program_count(block_count(spec.max_q_len, 512), groups, sms // 2)
    outputs = dk, dv
    if splits > 1:
        outputs = torch.empty((2, splits, *dk.shape), dtype=torch.float32, device=k.device).unbind(0)
    vector = vector_of((q, k, v, grad, dk), d)
    with on_device(q):
        centre = pre.centre(q)
        for first, end, code in spec.runs:
            run = end - first
            k_kernels.backward_k[grid_of(batch * run * key_blocks * splits)](
                q, k, v, grad, *outputs, pre.weight, pre.bias, centre, pre.rstd, q_offsets, k_offsets,
                *_strides(vector, q, k, v, grad), dk.numel(),
                batch, heads, first, run, splits, key_blocks, k.shape[0], d // vector, *spec.scalars,
                ACT=code, **pre.options, SHIFT=q.dtype == torch.float32,
                **_constants(q, config, vector, spec.masked),
            )  # fmt: skip
        if splits > 1:
            dk.copy_(outputs[0].sum(0))
            dv.copy_(outputs[1].sum(0))
    return dk, dv
