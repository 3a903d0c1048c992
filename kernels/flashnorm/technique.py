"""Technique `flashnorm`: the norm of q and the inner residual inside the attention kernels, for one head the post-norm.

What `separate` moves through memory and this does not: the normalised q, written and read in the forward and again in
the backward, and read once more with the inner residual. Over more than one head the post-norm is a pass of the norm
kernel, which adds the outer residual: no program of these kernels sees a whole row. A norm of k runs in front, once per
key and not once per pair of blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_norm.kernels.flashnorm import configs
from recsys_norm.ops.problem import Problem, Tensors, stores_hat

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MIN_ARCH = 80
_MIN_TRITON = (3, 6)


class FlashNorm:
    """See the module. The order of tensors is documented in `recsys_norm.ops.norm_attention`."""

    name = "flashnorm"
    provider = "triton"
    adds_gradient = True

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
        if problem.d > configs.MAX_WIDTH:
            limit = f"it holds heads up to {configs.MAX_WIDTH} wide"
            return f"{limit} and these are {problem.d}; use more heads, or attention='eager'"
        norms_q = spec.pre_norm is not None and "q" in spec.pre_norm_on
        if not norms_q and not spec.inner_residual and (spec.post_norm is None or problem.H > 1):
            return "nothing fuses without a norm of q, an inner residual or a post-norm of one head; use 'separate'"
        row = configs.padded_heads(problem.H) * configs.padded_width(problem.d)
        if norms_q and spec.pre_norm_scope == "all_heads" and row > configs.MAX_ROW:
            limit = f"it takes the statistics of rows up to {configs.MAX_ROW} wide in powers of two"
            return f"{limit} and these are {problem.H} x {problem.d}; use 'separate'"
        return None

    def forward(self, problem: Problem, *tensors: Tensor | None) -> tuple[Tensors, Tensors]:
        from recsys_norm.kernels.flashnorm import launch

        q, k, v, q_offsets, k_offsets, *_, post_weight, post_bias, residual = tensors
        spec = problem.attention
        q, residual = _unit_stride(q), _unit_stride(residual)
        k, k_mean, k_rstd = _normed_k(problem, k, k_offsets, tensors[5:9])
        pre = _pre_norm(problem, tensors)
        post = launch.PostNorm(spec.post_norm, post_weight, post_bias)
        affine = post_weight is not None or post_bias is not None
        keep = spec.post_norm is not None and stores_hat(problem.training, affine, problem.residual, False)
        attention = (q, k, _unit_stride(v), q_offsets, k_offsets)
        whole = spec.post_norm is None or problem.H == 1
        out, hat, o_mean, o_rstd = launch.forward(
            *attention,
            residual if whole else None,
            _launch_spec(problem),
            pre,
            post if whole else launch.PostNorm(None),
            inner=spec.inner_residual,
            write_hat=keep and whole,
            eps=problem.eps,
        )
        if not whole:
            out, hat, o_mean, o_rstd = _post_norm(problem, out, post, residual, q_offsets, keep)
        return (out,), (pre.mean, pre.rstd, k_mean, k_rstd, o_mean, o_rstd, hat)

    def backward(self, problem: Problem, saved: Tensors, grads: Tensors, needs: tuple[bool, ...]) -> Tensors:
        from recsys_norm.kernels.flashnorm import launch
        from recsys_norm.kernels.gdpa.launch import zero_slack
        from recsys_norm.kernels.norm.attention import _pre_backward, _sides

        q, k, v, q_offsets, k_offsets = saved[:5]
        q_mean, q_rstd, k_mean, k_rstd = saved[11:15]
        result = [None] * 12
        below = any(needs[:3]) or any(needs[5:9])
        dout, add = (*grads, None)[:2]
        do, result[9], result[10] = _post_backward(problem, saved, dout, needs, below)
        if not below:
            return tuple(result)
        q = _unit_stride(q)
        kn, *_ = _normed_k(problem, k, k_offsets, saved[5:9])
        dq, dk, dv = launch.backward(
            do,
            q,
            kn,
            _unit_stride(v),
            q_offsets,
            k_offsets,
            _launch_spec(problem),
            _pre_norm(problem, saved, q_mean, q_rstd),
        )
        q_side, k_side = _sides(problem.attention, q, k, q_offsets, k_offsets, saved[5:9])
        q_needs, k_needs = (needs[0], *needs[5:7]), (needs[1], *needs[7:9])
        past = do if problem.attention.inner_residual else None
        if q_side is None:
            for extra in (past, add):
                if extra is not None:
                    dq.add_(extra)
                    zero_slack(dq, q_offsets)
        result[0], result[5], result[6] = _pre_backward(problem, dq, q_side, q_mean, q_rstd, q_needs, past, add)
        result[1], result[7], result[8] = _pre_backward(problem, dk, k_side, k_mean, k_rstd, k_needs)
        result[2] = dv if needs[2] else None
        return tuple(result)


def _unit_stride(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _launch_spec(problem: Problem):
    from recsys_norm.kernels.flashnorm.launch import SOFTMAX
    from recsys_norm.kernels.gdpa.launch import Spec
    from recsys_norm.ops.activations import get, head_runs

    spec = problem.attention
    runs = [(first, end, get(name).code) for first, end, name in head_runs(spec.activation, problem.H)]
    if spec.softmax:
        runs = [(0, problem.H, SOFTMAX)]
    reach = None if spec.window is None else spec.window - 1
    return Spec(spec.max_q_len, spec.max_k_len, runs, spec.scale, left=reach, right=0 if spec.causal else reach)


def _pre_norm(problem: Problem, tensors: Tensors, mean: Tensor | None = None, rstd: Tensor | None = None):
    """The norm on q, with its statistics: the saved ones if given, else computed."""
    from recsys_norm.kernels.flashnorm.launch import PreNorm, centre_of, row_statistics

    spec, q = problem.attention, tensors[0]
    if spec.pre_norm is None or "q" not in spec.pre_norm_on:
        return PreNorm(None)
    per_head = spec.pre_norm_scope == "head"
    if rstd is not None:
        return PreNorm(spec.pre_norm, per_head, *tensors[5:7], mean, rstd, centre_of(q, mean))
    mean, centre, rstd = row_statistics(_unit_stride(q), tensors[3], spec.pre_norm == "layer", per_head, problem.eps)
    return PreNorm(spec.pre_norm, per_head, *tensors[5:7], mean, rstd, centre)


def _normed_k(problem: Problem, k: Tensor, k_offsets: Tensor, parameters: Tensors):
    """(k after its norm, means, reciprocal deviations)."""
    from recsys_norm.kernels.norm.attention import _pre, _sides

    _, side = _sides(problem.attention, k, k, k_offsets, k_offsets, parameters)
    kn, mean, rstd = _pre(problem, k, side)
    return _unit_stride(kn), mean, rstd


def _post_norm(problem: Problem, z: Tensor, post, residual: Tensor | None, q_offsets: Tensor, keep: bool):
    """(out, hat, mean, rstd) of z, whose memory is used again."""
    from recsys_norm.kernels.norm.attention import _rows
    from recsys_norm.kernels.norm.launch import norm_forward

    out = norm_forward(
        z.flatten(1),
        post.weight,
        post.bias,
        norm=post.norm,
        eps=problem.eps,
        after=None if residual is None else _rows(residual),
        write_hat=keep,
        overwrite=True,
        cut=(q_offsets, 1),
    )
    return out.y.view(z.shape), out.hat.view(z.shape) if keep else None, out.mean, out.rstd


def _post_backward(problem: Problem, saved: Tensors, dout: Tensor, needs: tuple[bool, ...], below: bool):
    """(gradient at z if `below`, dgamma, dbeta)."""
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
