"""Launch the FlashNormAttention kernels: tiles, grids, scratch memory and outputs.

Tensors are [rows, heads, d] with unit stride along d; what is written is contiguous. Heads with different activations
are launched apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recsys_norm.kernels.flashnorm import backward as backward_kernels
from recsys_norm.kernels.flashnorm import configs
from recsys_norm.kernels.flashnorm import forward as forward_kernels
from recsys_norm.kernels.flashnorm import stats as stats_kernels
from recsys_norm.kernels.gdpa.configs import Config, padded_width
from recsys_norm.kernels.gdpa.launch import Spec, block_count, device_of, grid_of, on_device, program_count, vector_of

SOFTMAX = -1  # in place of an activation's code, as in streamed
_ALL_HEADS, _PER_HEAD = 1, 2  # as in common
_POST = {None: 0, "rms": 1, "layer": 2}


@dataclass(frozen=True)
class PreNorm:
    """The norm on q: kind, scope, parameters, statistics (means relative to first elements), and the means as kernels
    want them: themselves for 16-bit rows, the relative ones for fp32."""

    norm: str | None
    per_head: bool = False
    weight: Tensor | None = None
    bias: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None
    centre: Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {
            "PRE": 0 if self.norm is None else _PER_HEAD if self.per_head else _ALL_HEADS,
            "PRE_MEAN": self.norm == "layer",
            "PRE_WEIGHT": self.weight is not None,
            "PRE_BIAS": self.bias is not None,
        }


def centre_of(q: Tensor, mean: Tensor | None) -> Tensor | None:
    """`PreNorm.centre` from saved means, [T] or [T, H]."""
    if mean is None or q.dtype == torch.float32:
        return mean
    return mean + (q[:, 0, 0] if mean.dim() == 1 else q[:, :, 0])


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
        "SHIFT": q.dtype == torch.float32,
        "FAST": q.dtype == torch.bfloat16 and not interpreted,
        "UPCAST": q.dtype == torch.bfloat16 and interpreted,
        "PRECISION": "tf32" if tf32 else "ieee",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _strides(vector: int, *tensors: Tensor | None) -> list[int]:
    """Token and head strides in units of `vector`, zeros for a tensor that is not there."""
    return [0 if t is None else t.stride(i) // vector for t in tensors for i in (0, 1)]


def _resident(direction: str, q: Tensor, spec: Spec) -> int | None:
    """Keys per tile where a sequence's keys stay on chip, None where they are streamed."""
    if spec.runs[0][2] == SOFTMAX:
        return None
    return configs.resident_block(direction, device_of(q)[0], q.shape[2], q.element_size(), spec.max_k_len)


def row_statistics(q: Tensor, q_offsets: Tensor, layer: bool, per_head: bool, eps: float) -> tuple[Tensor | None, ...]:
    """(means relative to the row's first element, means as `PreNorm.centre` has them, rstd), [T] each, or [T, H] per
    head."""
    T, heads, d = q.shape
    programs, heads = (heads, 1) if per_head else (1, heads)
    shift = q.dtype == torch.float32
    rstd = torch.empty((T, programs) if per_head else T, dtype=torch.float32, device=q.device)
    mean = torch.empty_like(rstd) if layer else None
    centre = torch.empty_like(rstd) if layer and not shift else None
    vector = vector_of((q,), d)
    rows = configs.statistics_rows(heads, d)
    with on_device(q):
        stats_kernels.row_statistics[(block_count(T, rows), programs)](
            q, q_offsets, mean, centre, rstd,
            q_offsets.numel() - 1, T, heads, d // vector, *_strides(vector, q), eps,
            HAS_MEAN=layer, SHIFT=shift, ROWS=rows, HEADS=configs.padded_heads(heads), BLOCK_D=padded_width(d),
            VEC=vector, num_warps=4,
        )  # fmt: skip
    return mean, mean if centre is None else centre, rstd


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
    write_hat: bool = False,
    eps: float = 0.0,
    config: Config | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(out, hat, o mean, o rstd); a post-norm needs one head. `config` and `splits` override what is shipped, for
    tuning."""
    T, heads, d = q.shape
    batch = q_offsets.numel() - 1
    arch, sms = device_of(q)
    resident = _resident("forward", q, spec)
    config = config or configs.forward(arch, d, q.element_size(), resident)
    blocks = block_count(spec.max_q_len, config.block_m)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    hat = torch.empty_like(out) if write_hat else None
    o_rstd = torch.empty(T, dtype=torch.float32, device=q.device) if post.norm is not None else None
    o_mean = torch.empty_like(o_rstd) if post.norm == "layer" else None
    vector = vector_of([t for t in (q, k, v, residual, out) if t is not None], d)
    with on_device(q):
        for first, end, code in spec.runs:
            run = end - first
            programs = splits or program_count(blocks, batch * run, 2 * sms) if resident else blocks
            forward_kernels.forward[grid_of(batch * run * programs)](
                q, k, v, residual, out, hat, pre.weight, pre.bias, post.weight, post.bias,
                pre.centre, pre.rstd, o_mean, o_rstd, q_offsets, k_offsets, *_strides(vector, q, k, v, residual),
                batch, heads, first, run, programs, T, d // vector, *spec.scalars, eps,
                ACT=code, RESIDENT=resident is not None, **pre.options, INNER=inner,
                POST=_POST[post.norm], POST_WEIGHT=post.weight is not None, POST_BIAS=post.bias is not None,
                RESIDUAL=residual is not None, WRITE_HAT=write_hat, **_constants(q, config, vector, spec.masked),
            )  # fmt: skip
    return out, hat, o_mean, o_rstd


def backward(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient at the normalised q without the inner residual's part, dk, dv). `grad` is the gradient at z; `config`
    and `splits` override what is shipped for the one-pass kernel, for tuning."""
    call = _Backward(grad, q, k, v, q_offsets, k_offsets, spec, pre)
    arch, sms = device_of(q)
    resident = _resident("backward", q, spec)
    size = (arch, q.shape[2], q.element_size())
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with on_device(q):
        if resident:
            config = config or configs.backward_resident(arch, q.shape[2], resident)
            return dq, *call.keys(backward_kernels.backward_resident, config, dq, None, 1, splits)
        config = configs.backward_q(*size)
        rows = None
        if spec.runs[0][2] == SOFTMAX:
            rows = torch.empty((3, *q.shape[:2]), dtype=torch.float32, device=q.device)
        call.launch(
            backward_kernels.backward_q, config, (dq, dq, dq), rows, block_count(spec.max_q_len, config.block_m), 1
        )
        config = configs.backward_k(*size)
        blocks = block_count(spec.max_k_len, config.block_n)
        return dq, *call.keys(backward_kernels.backward_k, config, dq, rows, blocks, None)


@dataclass(frozen=True)
class _Backward:
    """The arguments that the backward kernels share."""

    grad: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor
    k_offsets: Tensor
    spec: Spec
    pre: PreNorm

    def launch(self, kernel: Any, config: Config, outputs, rows: Tensor | None, splits: int, key_blocks: int) -> None:
        q, k, spec = self.q, self.k, self.spec
        batch, heads, d = self.q_offsets.numel() - 1, q.shape[1], q.shape[2]
        inputs = (q, k, self.v, self.grad)
        vector = vector_of((*inputs, outputs[0]), d)
        for first, end, code in spec.runs:
            kernel[grid_of(batch * (end - first) * key_blocks * splits)](
                *inputs, *outputs, self.pre.weight, self.pre.bias, self.pre.centre, self.pre.rstd, rows,
                self.q_offsets, self.k_offsets, *_strides(vector, *inputs), k.numel(),
                batch, heads, first, end - first, splits, key_blocks, q.shape[0], k.shape[0], d // vector,
                *spec.scalars, ACT=code, **self.pre.options,
                **_constants(q, config, vector, spec.masked),
            )  # fmt: skip

    def keys(self, kernel: Any, config: Config, dq: Tensor, rows: Tensor | None, key_blocks: int, splits: int | None):
        """(dk, dv)."""
        k, spec, sms = self.k, self.spec, device_of(self.q)[1]
        dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
        if splits is None:
            # A split costs a partial sum of dk and dv, so only a batch too small to fill the GPU is split.
            groups = (self.q_offsets.numel() - 1) * self.q.shape[1] * key_blocks
            splits = 1 if groups >= 2 * sms else program_count(block_count(spec.max_q_len, 512), groups, sms // 2)
        if splits == 1:
            self.launch(kernel, config, (dq, dk, dv), rows, 1, key_blocks)
            return dk, dv
        partial = torch.empty((2, splits, *k.shape), dtype=torch.float32, device=k.device)
        self.launch(kernel, config, (dq, *partial.unbind(0)), rows, splits, key_blocks)
        dk.copy_(partial[0].sum(0))
        dv.copy_(partial[1].sum(0))
        return dk, dv
