"""Technique `flashnorm`: the norm of q, the post-norm and both residuals inside the attention kernels.

A norm of k runs in front, once per key and not once per pair of blocks. The gradient at o comes from the norm kernel,
which reads the saved `o_hat`; what follows is `kernels.flashnorm`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_norm.ops.problem import Problem, Tensors, stores_hat

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MIN_ARCH = 80
_MIN_TRITON = (3, 6)
_MAX_WIDTH = 256
_MAX_HEADS = 64


class FlashNorm:
    """See the module. The order of tensors is documented in `recsys_norm.ops.norm_attention`."""

    name = "flashnorm"
    provider = "triton"

    def why_not(self, problem: Problem) -> str | None:
        spec = problem.attention
        if spec is None:
            return f"it serves norm_attention, not {problem.op}"
        if problem.device != "cuda" or problem.arch is None:
            return f"its kernels need a CUDA device and the tensors are on {problem.device}; use backend='unfused'"
        if problem.arch < _MIN_ARCH:
            return f"compute capability {problem.arch} is below {_MIN_ARCH}; use backend='unfused'"
        if problem.triton_version is None or problem.triton_version < _MIN_TRITON:
            found = "none" if problem.triton_version is None else "{}.{}".format(*problem.triton_version)
            return f"it needs triton >= 3.6 and {found} is installed; use backend='unfused'"
        if problem.dtype not in _DTYPES:
            return f"its kernels take bfloat16, float16 and float32, not {problem.dtype}; use backend='unfused'"
        if problem.d > _MAX_WIDTH:
            limit = f"it holds heads up to {_MAX_WIDTH} wide"
            return f"{limit} and these are {problem.d}; use more heads, or attention='eager'"
        if problem.H > _MAX_HEADS:
            return f"it merges the row sums of up to {_MAX_HEADS} heads and there are {problem.H}; `separate` serves it"
        if spec.softmax:
            return "it has no softmax; `separate` puts the norms around flash attention"
        if spec.post_norm is None and (spec.pre_norm is None or "q" not in spec.pre_norm_on):
            return "no norm of q or of the output is asked for, so there is none to fuse; `separate` serves it"
        return None

    def forward(self, problem: Problem, *tensors: Tensor | None) -> tuple[Tensors, Tensors]:
        from recsys_norm.kernels.flashnorm import launch

        q, k, v, q_offsets, k_offsets, *_, post_weight, post_bias, residual = tensors
        spec = problem.attention
        q, residual = _unit_stride(q), _unit_stride(residual)
        k, k_mean, k_rstd = _normed_k(problem, k, k_offsets, tensors[5:9])
        affine = post_weight is not None or post_bias is not None
        keep = spec.post_norm is not None and stores_hat(problem.training, affine, problem.residual, False)
        out, hat, (q_mean, q_rstd, o_mean, o_rstd) = launch.forward(
            q,
            k,
            _unit_stride(v),
            q_offsets,
            k_offsets,
            residual,
            _launch_spec(problem),
            _pre_norm(problem, tensors),
            launch.PostNorm(spec.post_norm, post_weight, post_bias),
            inner=spec.inner_residual,
            write_hat=keep,
            eps=problem.eps,
        )
        return (out,), (q_mean, q_rstd, k_mean, k_rstd, o_mean, o_rstd, hat)

    def backward(self, problem: Problem, saved: Tensors, grads: Tensors, needs: tuple[bool, ...]) -> Tensors:
        from recsys_norm.kernels.flashnorm import launch
        from recsys_norm.kernels.norm.attention import _pre_backward, _sides

        q, k, v, q_offsets, k_offsets = saved[:5]
        q_mean, q_rstd, k_mean, k_rstd = saved[11:15]
        result = [None] * 12
        to_q, to_k = any(needs[i] for i in (0, 5, 6)), any(needs[i] for i in (1, 2, 7, 8))
        do, result[9], result[10] = _post_backward(problem, saved, grads[0], needs, to_q or to_k)
        if not (to_q or to_k):
            return tuple(result)
        q, v = _unit_stride(q), _unit_stride(v)
        kn, *_ = _normed_k(problem, k, k_offsets, saved[5:9])
        spec, pre = _launch_spec(problem), _pre_norm(problem, saved, q_mean, q_rstd)
        attention = (do, q, kn, v, q_offsets, k_offsets)
        if to_q:
            dq, dweight, dbias = launch.backward_q(
                *attention, None, spec, pre, inner=problem.attention.inner_residual, dweight=needs[5], dbias=needs[6]
            )
            result[0] = dq if needs[0] else None
            result[5], result[6] = (None if x is None else x.to(problem.param_dtype) for x in (dweight, dbias))
        if to_k:
            dk, dv = launch.backward_k(*attention, spec, pre)
            _, side = _sides(problem.attention, q, k, q_offsets, k_offsets, saved[5:9])
            k_needs = (needs[1], *needs[7:9])
            result[1], result[7], result[8] = _pre_backward(problem, dk, side, k_mean, k_rstd, k_needs, None)
            result[2] = dv if needs[2] else None
        return tuple(result)


def _unit_stride(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _launch_spec(problem: Problem):
    from recsys_norm.kernels.gdpa.launch import Spec
    from recsys_norm.ops.activations import get, head_runs

    spec = problem.attention
    runs = [(first, end, get(name).code) for first, end, name in head_runs(spec.activation, problem.H)]
    reach = None if spec.window is None else spec.window - 1
    return Spec(spec.max_q_len, spec.max_k_len, runs, spec.scale, left=reach, right=0 if spec.causal else reach)


def _pre_norm(problem: Problem, tensors: Tensors, mean: Tensor | None = None, rstd: Tensor | None = None):
    """The norm on q. Over one head the two scopes are the same, and the one without an exchange serves both."""
    from recsys_norm.kernels.flashnorm.launch import PreNorm

    spec = problem.attention
    if spec.pre_norm is None or "q" not in spec.pre_norm_on:
        return PreNorm(None)
    return PreNorm(spec.pre_norm, spec.pre_norm_scope == "head", *tensors[5:7], mean, rstd)


def _normed_k(problem: Problem, k: Tensor, k_offsets: Tensor, parameters: Tensors):
    """(k after its norm, means, reciprocal deviations)."""
    from recsys_norm.kernels.norm.attention import _pre, _sides

    _, side = _sides(problem.attention, k, k, k_offsets, k_offsets, parameters)
    kn, mean, rstd = _pre(problem, k, side)
    return _unit_stride(kn), mean, rstd


def _post_backward(problem: Problem, saved: Tensors, dout: Tensor, needs: tuple[bool, ...], below: bool):
    """(gradient at o if `below`, dgamma, dbeta)."""
    from recsys_norm.kernels.norm.launch import norm_backward

    norm = problem.attention.post_norm
    if norm is None or not (below or needs[9] or needs[10]):
        return dout if below else None, None, None
    post_weight, o_rstd, hat = saved[9], saved[16], saved[17]
    g = norm_backward(
        dout.flatten(1),
        hat.flatten(1),
        None,
        o_rstd,
        post_weight,
        norm=norm,
        hat=True,
        write_dz=below,
        dweight=problem.param_dtype if needs[9] else None,
        dbias=problem.param_dtype if needs[10] else None,
        cut=(saved[3], 1),
    )
    return g.dz.view(dout.shape) if below else None, g.dweight, g.dbias
