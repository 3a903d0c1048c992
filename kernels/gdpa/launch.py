"""Launch the jagged attention kernels: block sizes, grids and output buffers.

Tensors are [rows, heads, d] with unit stride along d and any other strides. Heads with different activations are
launched apart, on views of the tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recsys_norm.kernels.gdpa import backward as backward_kernels
from recsys_norm.kernels.gdpa import configs
from recsys_norm.kernels.gdpa import forward as forward_kernels
from recsys_norm.kernels.gdpa import slack as slack_kernels
from recsys_norm.kernels.gdpa.configs import Config
from recsys_norm.kernels.hopper import gdpa_backward, gdpa_forward

FAR = 1 << 30  # a window bound that no pair of positions reaches
_MAX_GRID = (1 << 31) - 1
_WAVES = 8  # programs per slot of the GPU that a launch aims for, so that long sequences do not make a tail
_INTERPRETED_ARCH = 90


@dataclass(frozen=True)
class Spec:
    """What is computed. `runs` lists neighbouring heads with one activation as (first head, end head, code); query i sees
    keys i - left to i + right, None for no bound."""

    max_q_len: int
    max_k_len: int
    runs: Sequence[tuple[int, int, int]]
    scale: float
    left: int | None
    right: int | None

    @property
    def masked(self) -> bool:
        return self.left is not None or self.right is not None

    @property
    def scalars(self) -> tuple[int, float, int, int]:
        """The kernels' last run-time arguments: max_keys, scale, left, right."""
        bounds = (FAR if b is None else min(b, FAR) for b in (self.left, self.right))
        return (self.max_k_len, self.scale, *bounds)


@functools.cache
def _gpu(index: int) -> tuple[int, int]:
    """(architecture, number of SMs)."""
    properties = torch.cuda.get_device_properties(index)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


def device_of(tensor: Tensor) -> tuple[int, int]:
    return _gpu(tensor.device.index) if tensor.is_cuda else (_INTERPRETED_ARCH, 1)


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def check_supported(q: Tensor) -> None:
    """Raise ValueError naming the limit where the kernels cannot run."""
    if q.shape[2] > configs.MAX_WIDTH:
        raise ValueError(
            f"the jagged attention kernel holds head widths up to {configs.MAX_WIDTH}, got {q.shape[2]}; "
            "use more heads, or implementation='eager'"
        )
    arch = device_of(q)[0]
    if arch < 80:
        raise ValueError(
            f"the jagged attention kernel needs compute capability 8.0 or higher, this GPU has {arch / 10}; "
            "use implementation='eager'"
        )


def vector_of(tensors: Sequence[Tensor], d: int) -> int:
    """Elements per 16 bytes if every row of every tensor starts on such a boundary, else 1."""
    vector = 16 // tensors[0].element_size()
    aligned = d % vector == 0 and all(
        t.data_ptr() % 16 == 0 and t.stride(0) % vector == 0 and t.stride(1) % vector == 0 for t in tensors
    )
    return vector if aligned else 1


def _constants(q: Tensor, config: Config, code: int, spec: Spec, vector: int) -> dict[str, Any]:
    d = q.shape[2]
    interpreted = not q.is_cuda
    tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return {
        "ACT": code,
        "MASKED": spec.masked,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": configs.padded_width(d),
        "VEC": vector,
        "EVEN": configs.padded_width(d) == d,
        "FAST": q.dtype == torch.bfloat16 and not interpreted,
        "UPCAST": q.dtype == torch.bfloat16 and interpreted,
        "PRECISION": "tf32" if tf32 else "ieee",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def strides(vector: int, *tensors: Tensor) -> list[int]:
    return [stride // vector for t in tensors for stride in (t.stride(0), t.stride(1))]


def _is_plain(q: Tensor, spec: Spec) -> bool:
    """Whether the kernels of ../hopper may serve this: they take all heads at once, and no window."""
    return q.is_cuda and len(spec.runs) == 1 and not spec.masked


def _heads(first: int, end: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t[:, first:end] for t in tensors)


def block_count(length: int, block: int) -> int:
    return max(1, -(-length // block))


def program_count(most: int, groups: int, slots: int, waves: int = _WAVES) -> int:
    """Programs per (sequence, head): enough to fill the GPU's slots a few times over, at most one per block."""
    return max(1, min(most, block_count(waves * slots, groups)))


def grid_of(programs: int) -> tuple[int]:
    if programs > _MAX_GRID:
        raise ValueError(f"the launch needs {programs} programs and CUDA allows {_MAX_GRID}; split the batch")
    return (programs,)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    spec: Spec,
    *,
    config: Config | None = None,
    programs: int | None = None,
) -> Tensor:
    """o[T, H, d], on Hopper by a kernel of its own where that takes the tensors. `config` and `programs` (per
    sequence and head) override what is shipped for the kernels of this package, for tuning."""
    check_supported(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    batch, d = q_offsets.numel() - 1, q.shape[2]
    if batch == 0 or q.numel() == 0:
        return out.zero_()
    arch, sms = device_of(q)
    special = config is None and programs is None and _is_plain(q, spec)
    resident = configs.resident_block("forward", arch, d, q.element_size(), spec.max_k_len)
    if resident:
        kernel = forward_kernels.forward_resident
        config = config or configs.forward_resident(arch, d, resident)
    else:
        kernel = forward_kernels.forward_streamed
        config = config or configs.forward_streamed(arch, d, q.element_size())
    vector = vector_of((q, k, v, out), d)
    with on_device(q):
        for first, end, code in spec.runs:
            heads, blocks = end - first, block_count(spec.max_q_len, config.block_m)
            if resident:
                blocks = programs or program_count(
                    blocks, batch * heads, 2 * sms, configs.forward_waves(spec.max_q_len)
                )
            tensors = _heads(first, end, q, k, v, out)
            if special and gdpa_forward.fits(tensors[:3], batch, code, spec.max_k_len, arch):
                gdpa_forward.forward(tensors, q_offsets, k_offsets, code, spec.max_k_len, spec.scale)
                continue
            kernel[grid_of(batch * heads * blocks)](
                *tensors, q_offsets, k_offsets, *strides(vector, *tensors),
                batch, heads, blocks, q.shape[0], d // vector, *spec.scalars,
                **_constants(q, config, code, spec, vector),
            )  # fmt: skip
    return out


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    spec: Spec,
    *,
    config: Config | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), on Hopper by a kernel of its own where that takes the tensors. `config` and `splits` override what is
    shipped for the one-pass kernel of this package, for tuning."""
    check_supported(q)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if q_offsets.numel() == 1 or q.numel() + k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    arch, batch = device_of(q)[0], q_offsets.numel() - 1
    resident = configs.resident_block("backward", arch, q.shape[2], q.element_size(), spec.max_k_len)
    special = config is None and splits is None and _is_plain(q, spec)
    if resident:
        config = config or configs.backward_resident(arch, q.shape[2], resident)
    with on_device(q):
        for first, end, code in spec.runs:
            tensors = _heads(first, end, q, k, v, grad, dq, dk, dv)
            if special and gdpa_backward.fits(tensors[:4], batch, code, spec.max_k_len, arch):
                gdpa_backward.backward(tensors, q_offsets, k_offsets, code, spec.max_k_len, spec.scale)
            elif resident:
                _backward_resident(tensors, q_offsets, k_offsets, spec, code, config, splits)
            else:
                _backward_streamed(tensors, q_offsets, k_offsets, spec, code)
    return dq, dk, dv


def _launch_backward(kernel, config, programs, tensors, dk_split, q_offsets, k_offsets, spec, code) -> None:
    """One backward kernel on views of (q, k, v, grad, dq, dk, dv), with `programs` per sequence and head."""
    q, k, v, grad, dq, dk, dv = tensors
    batch, heads, d = q_offsets.numel() - 1, q.shape[1], q.shape[2]
    vector = vector_of((q, k, v, grad, dq, dk, dv), d)
    kernel[grid_of(batch * heads * programs)](
        q, k, v, grad, dq, dk, dv, q_offsets, k_offsets, *strides(vector, q, k, v, grad, dq, dk), dk_split,
        batch, heads, programs, q.shape[0], k.shape[0], d // vector, *spec.scalars,
        **_constants(q, config, code, spec, vector),
    )  # fmt: skip


def _backward_resident(tensors, q_offsets, k_offsets, spec, code, config, splits) -> None:
    q, dk, dv = tensors[0], *tensors[5:]
    sms = device_of(q)[1]
    groups = (q_offsets.numel() - 1) * q.shape[1]
    if splits is None:
        # A split costs a partial sum of dk and dv, so only a batch too small to fill the GPU is split.
        splits = 1 if groups >= 2 * sms else program_count(block_count(spec.max_q_len, 512), groups, sms // 2)
    kernel = backward_kernels.backward_resident
    if splits == 1:
        _launch_backward(kernel, config, 1, tensors, 0, q_offsets, k_offsets, spec, code)
        return
    partial = torch.empty((2, splits, *dk.shape), dtype=torch.float32, device=q.device)
    tensors = (*tensors[:5], partial[0, 0], partial[1, 0])
    _launch_backward(kernel, config, splits, tensors, dk.numel(), q_offsets, k_offsets, spec, code)
    dk.copy_(partial[0].sum(0))
    dv.copy_(partial[1].sum(0))


def _backward_streamed(tensors, q_offsets, k_offsets, spec, code) -> None:
    q = tensors[0]
    size = (device_of(q)[0], q.shape[2], q.element_size())
    config = configs.backward_dq(*size)
    programs = block_count(spec.max_q_len, config.block_m)
    _launch_backward(backward_kernels.backward_dq, config, programs, tensors, 0, q_offsets, k_offsets, spec, code)
    config = configs.backward_dkdv(*size)
    programs = block_count(spec.max_k_len, config.block_n)
    _launch_backward(backward_kernels.backward_dkdv, config, programs, tensors, 0, q_offsets, k_offsets, spec, code)


def zero_slack(tensor: Tensor, offsets: Tensor) -> None:
    """Zero the rows of a contiguous tensor from offsets[-1] on, without reading the offset on the host."""
    if tensor.numel() == 0:
        return
    width = tensor.numel() // tensor.shape[0]
    with on_device(tensor):
        slack_kernels.zero_slack[(2 * device_of(tensor)[1],)](
            tensor, offsets, offsets.numel() - 1, tensor.shape[0], width, BLOCK=4096, num_warps=4
        )
