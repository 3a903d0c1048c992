"""Technique `staged` of norm_attention on Hopper: the backward in three passes over the tokens, of which the middle one
is bound by its products and so hides what it reads:

    1  row_terms_kernels.py         the post-norm's sums over whole rows; its parameters' gradients
    2  attention_ahead_kernels.py   post-norm's backward, norm of q, attention's backward, a head at a time on chip
    3  kernels/norm/backward.py     the pre-norm's backward, with the residual's gradient

A pass over [T, H * d] that norms and attention apart would make, and these do not: the gradient between the norm and the
attention, written and read, and the normalised q, likewise. The forward is `flashnorm`'s, up to 8 heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recsys_norm.kernels.hopper import attention, gdpa_backward, launch
from recsys_norm.kernels.lazy.technique import cannot_run, on_device_of
from recsys_norm.ops.problem import Problem, Tensors

KERNEL = "attention_ahead"  # or "attention_staged": the kernel of pass 2
MAX_HEADS = 16
BLOCKS = (128, 256, 512, 1024, 2048)  # row widths of the kernels of row_terms_kernels.py
PER_MULTIPROCESSOR = 16  # programs of these


class Staged:
    """See the module. The order of tensors is documented in `recsys_norm.ops.norm_attention`."""

    name = "staged"
    provider = "hopper"
    adds_gradient = True

    def why_not(self, problem: Problem) -> str | None:
        if problem.attention is None:
            return f"it serves norm_attention, not {problem.op}"
        if problem.device != "cuda":
            return f"its kernels need a CUDA device and the tensors are on {problem.device}; use backend='unfused'"
        return launch.why_not(problem.arch) or _limit(problem) or cannot_run(problem)

    def forward(self, problem: Problem, *tensors: Tensor | None) -> tuple[Tensors, Tensors]:
        flashnorm = attention.FlashNorm()
        if flashnorm.why_not(problem) is None:
            return flashnorm.forward(problem, *tensors)
        from recsys_norm.kernels.norm.attention import forward

        return forward(problem, *tensors)

    def backward(self, problem: Problem, saved: Tensors, grads: Tensors, needs: tuple[bool, ...]) -> Tensors:
        with on_device_of(saved[0]):
            return backward(problem, saved, grads, needs)


def _limit(problem: Problem) -> str | None:
    """Which of the kernels' limits a problem exceeds."""
    spec, other = problem.attention, "use technique='separate'"
    names = tuple(gdpa_backward.ACTIVATIONS.values())
    if problem.dtype != torch.bfloat16:
        return f"its kernels take bfloat16, not {problem.dtype}; {other}"
    if problem.d != gdpa_backward.WIDTH:
        return f"its heads are {gdpa_backward.WIDTH} wide and these are {problem.d}; {other}"
    if problem.H > MAX_HEADS:
        return f"it takes {MAX_HEADS} heads and there are {problem.H}; {other}"
    if spec.softmax or len(set(spec.activation)) > 1 or spec.activation[0] not in names:
        found = "softmax" if spec.softmax else ", ".join(dict.fromkeys(spec.activation))
        return f"it has one of the activations {', '.join(names)} for all heads and not {found}; {other}"
    if spec.causal or spec.window is not None:
        return f"it has no masks within a sequence (causal={spec.causal}, window={spec.window}); {other}"
    if spec.max_k_len > gdpa_backward.MAX_KEYS:
        return f"it holds {gdpa_backward.MAX_KEYS} keys of a sequence and max_k_len is {spec.max_k_len}; {other}"
    if spec.pre_norm is not None and (spec.pre_norm_on != "q" or spec.pre_norm_scope != "all_heads"):
        return f"its pre-norm is one of q over all heads, not of {spec.pre_norm_on} ({spec.pre_norm_scope}); {other}"
    if spec.inner_residual and KERNEL != "attention_ahead":
        return f"its kernel {KERNEL} has no inner residual; {other}"
    if problem.H * problem.M > gdpa_backward.MAX_COST:
        return f"it numbers {gdpa_backward.MAX_COST} pairs of rows and heads and there are {problem.H * problem.M}; {other}"
    return None


def backward(problem: Problem, saved: Tensors, grads: Tensors, needs: tuple[bool, ...]) -> Tensors:
    """Gradients in the order of `recsys_norm.ops.norm_attention`; grads = (dout,) or (dout, add), where add is added to
    the gradient of q before that is rounded."""
    from recsys_norm.kernels.norm.attention import _pre_backward, _sides

    q, k, v, q_offsets, k_offsets, *parameters = saved[:11]
    q_mean, q_rstd = saved[11:13]
    batch = q_offsets.numel() - 1
    too_many = problem.H * (problem.M + gdpa_backward.EXTRA * batch) > gdpa_backward.MAX_COST
    if too_many or batch == 0:  # which the problem, that has no batch size, does not tell
        from recsys_norm.kernels.norm.attention import backward as separate

        return separate(problem, saved, grads, needs)
    result: list[Tensor | None] = [None] * 12
    terms = row_terms(problem, saved, grads[0], biased=needs[10])
    result[9] = terms.sum_of(0, problem.param_dtype) if needs[9] else None
    result[10] = terms.sum_of(1, problem.param_dtype) if needs[10] else None
    if not (any(needs[:3]) or any(needs[5:7])):
        return tuple(result)
    dq, dk, dv = attend_backward(problem, saved, terms)
    result[1], result[2] = dk if needs[1] else None, dv if needs[2] else None
    add = (*grads, None)[1]
    q_side, _ = _sides(problem.attention, q, k, q_offsets, k_offsets, parameters)
    if q_side is None and add is not None:
        from recsys_norm.kernels.gdpa.launch import zero_slack

        dq.add_(add)
        zero_slack(dq, q_offsets)
    q_needs = (needs[0], *needs[5:7])
    result[0], result[5], result[6] = _pre_backward(problem, dq, q_side, q_mean, q_rstd, q_needs, None, add)
    return tuple(result)


class Terms(NamedTuple):
    """What pass 1 leaves: rows of dout and of the post-norm's output for pass 2, and what row_terms_kernel makes."""

    dout: Tensor
    hat: Tensor
    means: Tensor
    vectors: Tensor
    partial: Tensor
    flags: (
        Tensor  # of this launch alone: CUDA graphs of torch.compile keep no tensor that outlives the call that made it
    )

    def sum_of(self, which: int, dtype: torch.dtype) -> Tensor:
        """The gradient of the post-norm's weight (0) or bias (1)."""
        from recsys_norm.kernels.norm.launch import _reduce

        return _reduce(self.partial[which : which + 1], (dtype,), self.partial.shape[2])[0]


def row_terms(problem: Problem, saved: Tensors, dout: Tensor, biased: bool = False) -> Terms:
    q_offsets, hat, spec = saved[3], saved[17], problem.attention
    T, D = problem.M, problem.H * problem.d
    dout = attention.as_rows(dout)
    hat = dout if spec.post_norm is None else attention.as_rows(hat)
    wanted = (saved[9], saved[5], saved[6])  # weight of the post-norm, weight and bias of the pre-norm
    parameters, narrow = attention._vectors(wanted, problem.dtype)
    parameters = [p.clone() if p is not None and p.data_ptr() % 16 else p for p in parameters]
    block = next(b for b in BLOCKS if b >= D)
    programs = 1
    if spec.post_norm is not None:
        programs = min(-(-T // max(1, 512 // block)), PER_MULTIPROCESSOR * launch.multiprocessors(dout.device))
    new = dict(dtype=torch.float32, device=dout.device)
    means, vectors = torch.empty((T, 2), **new), torch.empty((3, D), **new)
    partial = torch.empty((2 if biased else 1, programs, D), **new)
    flags = torch.empty(2 * launch.multiprocessors(dout.device), dtype=torch.int32, device=dout.device)
    step = q_offsets.element_size() // 4
    launch.get(f"row_terms_{block}")(
        programs,
        *(
            dout,
            hat,
            *parameters,
            q_offsets.contiguous(),
            means,
            vectors,
            partial,
            flags,
            dout.stride(0),
            hat.stride(0),
        ),
        *((q_offsets.numel() - 1) * step, T if spec.post_norm is not None else 0, D, narrow),
        *(int(spec.post_norm == "layer"), int(biased), flags.numel()),
    )
    return Terms(dout, hat, means, vectors, partial, flags)


def attend_backward(problem: Problem, saved: Tensors, terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the normalised q, dk, dv), contiguous, 0 past the last offset."""
    q, k, v, q_offsets, k_offsets = saved[:5]
    q_mean, q_rstd, o_rstd = saved[11], saved[12], saved[16]
    spec, (T, heads, _), U, batch = problem.attention, q.shape, k.shape[0], q_offsets.numel() - 1
    rows = attention.as_rows(q)
    keys, values = (attention.as_rows(t) if U else rows for t in (k, v))  # without keys nothing of these is used
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    flat = dq.view(T, -1)
    maps = [rows, keys, values, terms.dout, terms.hat, flat, *(t.view(U, -1) if U else flat for t in (dk, dv))]
    cost = heads * (T + gdpa_backward.EXTRA * batch)
    programs = max(1, min(launch.multiprocessors(q.device), cost // gdpa_backward.LEAST))
    sums = torch.empty((programs, 2, gdpa_backward.MAX_KEYS, gdpa_backward.WIDTH), dtype=torch.float32, device=q.device)
    launch.get(f"{KERNEL}{'_inner' if spec.inner_residual else ''}_{spec.activation[0]}_bf16")(
        programs,
        *(*maps, rows, dq, dk, dv, o_rstd, terms.means, q_rstd, q_mean, terms.vectors),
        *(
            q_offsets.contiguous(),
            k_offsets.contiguous(),
            sums,
            terms.flags,
            rows.stride(0),
            flat.stride(0),
            batch,
            heads,
        ),
        *(q_offsets.element_size() // 4, k_offsets.element_size() // 4, min(spec.max_k_len, gdpa_backward.MAX_KEYS)),
        *(T, U, 0.5 * spec.scale),
        cooperative=True,
    )
    return dq, dk, dv
