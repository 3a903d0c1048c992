"""Technique `flashnorm` of norm_attention on Hopper: both norms inside the attention kernel, the heads of a row on the
CTAs of a cluster (kernels in attention_forward_kernels.py)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from recsys_norm.kernels.hopper import launch
from recsys_norm.kernels.hopper.lazy import NAMES
from recsys_norm.kernels.lazy.technique import cannot_run, on_device_of
from recsys_norm.ops.problem import Problem, Tensors, stores_hat

WIDTH = 128  # of a head
MAX_KEYS = 128  # of a sequence, all in shared memory
MAX_HEADS = 8  # CTAs of a portable cluster
PEERS = (4, 8)  # CTAs of a cluster that a kernel has room for
BLOCK_ROWS = 64
MAX_ROWS = 2**31 - 2**20  # row numbers have 32 bits
KINDS = {None: 0, "rms": 1, "layer": 2}  # of a norm, as in the kernels
NO_RESIDUAL, OWN_RESIDUAL, OTHER_RESIDUAL = 0, 1, 2  # likewise
SPECIAL = ("gelu", "gelu_tanh")  # activations with a kernel of their own


class FlashNorm:
    """See the module. The order of tensors is documented in `recsys_norm.ops.norm_attention`."""

    name = "flashnorm"
    provider = "hopper"
    adds_gradient = True

    def why_not(self, problem: Problem) -> str | None:
        spec = problem.attention
        if spec is None:
            return f"it serves norm_attention, not {problem.op}"
        if problem.device != "cuda":
            return f"its kernels need a CUDA device and the tensors are on {problem.device}; use backend='unfused'"
        reason = launch.why_not(problem.arch) or _limit(problem)
        if reason is None and (problem.training or (spec.pre_norm is not None and "k" in spec.pre_norm_on)):
            reason = cannot_run(problem)  # the norm of k and the backward are kernels of stock Triton
        return reason

    def forward(self, problem: Problem, *tensors: Tensor | None) -> tuple[Tensors, Tensors]:
        with on_device_of(tensors[0]):
            return forward(problem, *tensors)

    def backward(self, problem: Problem, saved: Tensors, grads: Tensors, needs: tuple[bool, ...]) -> Tensors:
        # What is saved is the same for every technique of the op, so another one's kernels can compute the gradients.
        from recsys_norm.kernels.norm.attention import backward

        return backward(problem, saved, grads, needs)


def _limit(problem: Problem) -> str | None:
    """Which of the kernel's limits a problem exceeds."""
    spec, other = problem.attention, "use technique='separate'"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels take bfloat16 and float16, not {problem.dtype}; {other}"
    if problem.d != WIDTH:
        return f"its heads are {WIDTH} wide and these are {problem.d}; {other}"
    if problem.H > MAX_HEADS:
        return f"a cluster holds {MAX_HEADS} heads and there are {problem.H}; {other}"
    if spec.softmax:
        return f"its activations are element-wise and softmax is not; {other}"
    if spec.causal or spec.window is not None:
        return f"it has no masks within a sequence (causal={spec.causal}, window={spec.window}); {other}"
    if spec.max_k_len > MAX_KEYS:
        return f"it holds {MAX_KEYS} keys of a sequence and max_k_len is {spec.max_k_len}; {other}"
    if problem.M > MAX_ROWS:
        return f"it numbers {MAX_ROWS} rows and q has {problem.M}; {other}"
    return None


class Result(NamedTuple):
    out: Tensor
    hat: Tensor | None
    q_mean: Tensor | None
    q_rstd: Tensor | None
    o_mean: Tensor | None
    o_rstd: Tensor | None


def forward(problem: Problem, *tensors: Tensor | None) -> tuple[Tensors, Tensors]:
    from recsys_norm.kernels.flashnorm.technique import _normed_k

    q, k, v, q_offsets, k_offsets, *parameters, residual = tensors
    k_mean = k_rstd = None
    if problem.attention.pre_norm is not None and "k" in problem.attention.pre_norm_on:
        k, k_mean, k_rstd = _normed_k(problem, k, k_offsets, tensors[5:9])
    post = parameters[4:]
    keep = problem.attention.post_norm is not None and stores_hat(
        problem.training, any(p is not None for p in post), problem.residual, False
    )
    r = attend(problem, q, k, v, q_offsets, k_offsets, parameters[:2], post, residual, keep)
    return (r.out,), (r.q_mean, r.q_rstd, k_mean, k_rstd, r.o_mean, r.o_rstd, r.hat)


def attend(
    problem: Problem,
    q: Tensor,  # [T, H, 128]
    k: Tensor,  # [U, H, 128], already normalised if it is to be
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    pre: tuple[Tensor | None, Tensor | None],  # weight and bias of the norm of q
    post: tuple[Tensor | None, Tensor | None],
    residual: Tensor | None,
    keep: bool,  # the post-norm's standardised output
) -> Result:
    spec, (T, heads, _) = problem.attention, q.shape
    pre_norm = spec.pre_norm if "q" in spec.pre_norm_on else None
    per_head = spec.pre_norm_scope == "head"
    kind = NO_RESIDUAL if residual is None else OWN_RESIDUAL if _same(residual, q) else OTHER_RESIDUAL
    rows = as_rows(q)
    other = as_rows(residual) if kind == OTHER_RESIDUAL else rows
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    hat = torch.empty_like(out) if keep else None
    q_mean, q_rstd = _statistics(pre_norm, (T, heads) if per_head else (T,), q.device)
    o_mean, o_rstd = _statistics(spec.post_norm, (T,), q.device)
    result = Result(out, hat, q_mean, q_rstd, o_mean, o_rstd)
    batch = q_offsets.numel() - 1
    if batch == 0:
        for t in result:
            if t is not None:
                t.zero_()
        return result
    keys, values = (as_rows(t) if t.shape[0] else rows for t in (k, v))  # without keys the kernel uses none of these
    parameters, narrow = _vectors((*pre, *post), q.dtype)
    kernel = kernel_for(spec.activation, q.dtype, heads)
    grid = heads * min(clusters(kernel, q.device), -(-T // BLOCK_ROWS))
    flat = [t.view(T, heads * WIDTH) for t in (out, hat if keep else out)]
    kernel(
        grid,
        *(rows, keys, values, *flat, other, out, hat, _words(q_offsets), _words(k_offsets), *parameters),
        *(q_mean, q_rstd, o_mean, o_rstd, other.stride(0)),
        *(q_offsets.element_size() // 4, k_offsets.element_size() // 4, batch, T, heads),
        *(min(spec.max_k_len, MAX_KEYS), spec.scale, problem.eps),
        *(KINDS[pre_norm], KINDS[spec.post_norm], int(per_head), int(spec.inner_residual), kind, narrow),
        activation_codes(spec.activation, heads),
    )
    return result


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype)


def as_rows(x: Tensor) -> Tensor:
    """[T, H, d] as [T, H * d], a copy where TMA cannot read it as it lies."""
    T, heads, d = x.shape
    token = x.stride(0) if T > 1 else heads * d
    fits = x.stride(2) == 1 and (heads == 1 or x.stride(1) == d) and token % 8 == 0 and token >= heads * d
    if not fits or x.data_ptr() % 16:
        x, token = x.clone(memory_format=torch.contiguous_format), heads * d
    return x.as_strided((T, heads * d), (token, 1))


def _statistics(norm: str | None, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """(mean, rstd) of a norm, as far as it has them."""
    rstd = None if norm is None else torch.empty(shape, dtype=torch.float32, device=device)
    return torch.empty_like(rstd) if norm == "layer" else None, rstd


def _vectors(parameters: tuple[Tensor | None, ...], dtype: torch.dtype) -> tuple[list[Tensor | None], int]:
    """The parameters, contiguous and of one dtype, and whether that is q's."""
    narrow = all(p is None or p.dtype == dtype for p in parameters)
    wanted = dtype if narrow else torch.float32
    return [None if p is None else p.to(wanted).contiguous() for p in parameters], int(narrow)


def _words(offsets: Tensor) -> Tensor:
    """Contiguous; the kernel reads the lower halves of 8-byte offsets."""
    return offsets.contiguous()


def activation_codes(names: tuple[str, ...], heads: int) -> int:
    """4 bits per head."""
    from recsys_norm.ops.activations import get

    codes = [get(name).code for name in (names * heads if len(names) == 1 else names)]
    return sum(code << (4 * head) for head, code in enumerate(codes))


@functools.cache
def kernel_for(activation: tuple[str, ...], dtype: torch.dtype, heads: int) -> launch.Kernel:
    """The kernel, to be launched on clusters of so many CTAs."""
    form = activation[0] if len(activation) == 1 and activation[0] in SPECIAL else "general"
    base = launch.get(f"attention_{form}_{NAMES[dtype]}_{next(p for p in PEERS if p >= heads)}")
    return launch.Kernel(base.name, base.arch, {**base.entry, "cluster": heads})


@functools.cache
def clusters(kernel: launch.Kernel, device: torch.device) -> int:
    return max(1, kernel.resident_clusters(device))
