"""norm_attention backward on Hopper: both norms' backward inside the attention kernel, the heads of a row on the CTAs of
a cluster (kernels in attention_backward_kernels.py)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from recsys_norm.kernels.hopper import launch
from recsys_norm.ops.problem import Problem, Tensors

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
WIDTH = 128  # of a head
MAX_KEYS = 128  # of a sequence, all in shared memory
MAX_HEADS = 8  # CTAs of a portable cluster
MAX_ROWS = 2**31 - 2**20  # row numbers have 32 bits
ACTIVATIONS = ("gelu", "gelu_tanh")
FINISH_COLUMNS = 32
KINDS = {None: 0, "rms": 1, "layer": 2}  # of a norm, as in the kernels
HAS_WEIGHT, INNER, ADD = 16, 128, 256  # bits of the kernel's `form`


def why_not(problem: Problem) -> str | None:
    """Which of the kernel's limits a problem exceeds; None if it fits."""
    spec, other = problem.attention, "use technique='separate'"
    if problem.dtype not in NAMES:
        return f"its kernels take bfloat16 and float16, not {problem.dtype}; {other}"
    if problem.d != WIDTH:
        return f"its heads are {WIDTH} wide and these are {problem.d}; {other}"
    if problem.H > MAX_HEADS:
        return f"a cluster holds {MAX_HEADS} heads and there are {problem.H}; {other}"
    if spec.softmax or len(set(spec.activation)) > 1 or spec.activation[0] not in ACTIVATIONS:
        found = "softmax" if spec.softmax else ", ".join(dict.fromkeys(spec.activation))
        return f"it has one of the activations {', '.join(ACTIVATIONS)} for all heads and not {found}; {other}"
    if spec.causal or spec.window is not None:
        return f"it has no masks within a sequence (causal={spec.causal}, window={spec.window}); {other}"
    if spec.max_k_len > MAX_KEYS:
        return f"it holds {MAX_KEYS} keys of a sequence and max_k_len is {spec.max_k_len}; {other}"
    if spec.pre_norm is not None and (spec.pre_norm_on != "q" or spec.pre_norm_scope != "all_heads"):
        return f"its pre-norm is one of q over all heads, not of {spec.pre_norm_on} ({spec.pre_norm_scope}); {other}"
    if problem.M > MAX_ROWS:
        return f"it numbers {MAX_ROWS} rows and q has {problem.M}; {other}"
    return launch.why_not(problem.arch)


@functools.cache
def _kernel(name: str, heads: int) -> launch.Kernel:
    """The kernel with its clusters of one CTA per head: the cubin leaves the size to the launch."""
    return launch.Kernel(name, "90", {**launch.manifest()["90"]["kernels"][name], "cluster": heads})


def as_rows(x: Tensor) -> Tensor:
    """[rows, H * d], x itself where TMA can read it as it lies."""
    rows, heads, d = x.shape
    dense = x.stride(2) == 1 and (x.stride(1) == d or heads == 1)
    if not dense or x.stride(0) % 8 or (x.stride(0) < heads * d and rows > 1) or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.as_strided((rows, heads * d), (max(x.stride(0), heads * d), 1))


def _words(offsets: Tensor) -> tuple[Tensor, int]:
    """Offsets as 32-bit words, and how many of these one takes."""
    offsets = offsets.contiguous()
    return offsets.view(torch.int32), offsets.element_size() // 4


def _vectors(parameters: tuple[Tensor | None, ...]) -> tuple[list[Tensor | None], int]:
    """The parameters as the kernel reads them, and a bit for each that is there."""
    vectors = [None if p is None else p.float().contiguous() for p in parameters]
    vectors = [p.clone() if p is not None and p.data_ptr() % 16 else p for p in vectors]
    return vectors, sum((p is not None) << i for i, p in enumerate(vectors))


def backward(problem: Problem, saved: Tensors, grads: Tensors, needs: tuple[bool, ...]) -> Tensors:
    """Gradients in the order of `recsys_norm.ops.norm_attention`; grads = (dout,) or (dout, add), where add is added to
    the gradient of q before that is rounded."""
    q, k, v, q_offsets, k_offsets, weight, bias, _, _, post_weight, _ = saved[:11]
    q_mean, q_rstd, _, _, _, o_rstd, hat = saved[11:]
    spec, (T, heads, d), U = problem.attention, q.shape, k.shape[0]
    D, batch = heads * d, q_offsets.numel() - 1
    dout, add = as_rows(grads[0]), None if len(grads) < 2 or grads[1] is None else as_rows(grads[1])
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    sums = torch.empty((batch, 3, D), dtype=torch.float32, device=q.device)
    totals = torch.empty((3, D), dtype=torch.float32, device=q.device)
    rows = as_rows(q)
    keys, values = (as_rows(t) if U else rows for t in (k, v))  # without keys nothing of these is used
    hat = dout if hat is None or spec.post_norm is None else as_rows(hat)
    (weight, bias, post_weight), given = _vectors((weight, bias, post_weight))
    form = KINDS[spec.pre_norm] | KINDS[spec.post_norm] << 2 | given * HAS_WEIGHT
    form |= (INNER if spec.inner_residual else 0) | (ADD if add is not None else 0)
    (q_words, q_step), (k_words, k_step) = _words(q_offsets), _words(k_offsets)
    name = NAMES[q.dtype]
    if batch:
        _kernel(f"attention_backward_{name}_{spec.activation[0]}", heads)(
            batch * heads,
            *(rows, keys, values, dout, hat, rows, q_words, k_words, q_mean, q_rstd, o_rstd, weight, bias, post_weight),
            *(add, dq, dk, dv, sums, rows.stride(0), (rows if add is None else add).stride(0) // 2, D // 2, D),
            *(q_step, k_step, heads, form, 0.5 * spec.scale),
        )
    _kernel(f"attention_backward_finish_{name}", 1)(
        -(-3 * D // FINISH_COLUMNS),
        *(sums, totals, dq, dk, dv, q_words, k_words, D, batch * q_step, batch * k_step, batch, 3 * D, T, U, D),
    )
    result: list[Tensor | None] = [None] * 12
    result[0:3] = dq, dk, dv
    result[5], result[6], result[9] = totals[1], totals[2], totals[0]
    if needs[10]:
        result[10] = _column_sum(grads[0], q_offsets)
    for i in (5, 6, 9, 10):
        if result[i] is not None:
            result[i] = result[i].to(problem.param_dtype, copy=True)  # an op may not return views of one tensor
    return tuple(g if need else None for g, need in zip(result, needs))


def _column_sum(dout: Tensor, offsets: Tensor) -> Tensor:
    """[D] fp32 over the rows of sequences: the gradient of the post-norm's bias."""
    live = torch.arange(dout.shape[0], device=dout.device) < offsets[-1]
    return torch.where(live[:, None], dout.flatten(1), 0).sum(0, dtype=torch.float32)
