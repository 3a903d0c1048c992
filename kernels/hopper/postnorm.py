"""Technique `cluster` of linear_norm on Hopper: a row of the result spread over several CTAs, which are a cluster and hold W
(postnorm_cluster.py), or a group that W streams through (kernels in postnorm_kernels.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_norm.kernels.hopper import launch, postnorm_cluster
from recsys_norm.kernels.hopper.lazy import NAMES, aligned, shape_reason, tma_ready
from recsys_norm.kernels.hopper.postnorm_cluster import AFTER, HAT, SAVE, SUM, Result, parameter_vectors
from recsys_norm.kernels.lazy.technique import cannot_run, on_device_of
from recsys_norm.ops.inputs import resolve_eps
from recsys_norm.ops.problem import Problem, Tensors

TILE_ROWS = 128
MAX_GROUP = 8  # CTAs that share a row
COLUMNS = 256  # of a CTA
MAX_FEATURES = MAX_GROUP * COLUMNS
_MESSAGES = 4 * 64  # per CTA: two slots for each warpgroup, 64 rows each


class Cluster:
    """GEMM, norm, affine part and residual in one kernel; the CTAs that share a row exchange its statistics."""

    name = "cluster"
    provider = "hopper"
    takes_groups = True

    def why_not(self, problem: Problem) -> str | None:
        if problem.op != "linear_norm":
            return f"it serves linear_norm, not {problem.op}; use technique='separate'"
        if problem.device != "cuda":
            return f"its kernels need a CUDA device and the tensors are on {problem.device}; use backend='unfused'"
        reason = launch.why_not(problem.arch) or shape_reason(problem)
        unfit = postnorm_cluster.why_not(problem.K, problem.N, problem.groups)
        if reason is None and unfit is not None and problem.groups > 1:
            reason = f"{unfit}; use technique='separate'"
        elif reason is None and unfit is not None and problem.N > MAX_FEATURES:
            reason = (
                f"a group of {MAX_GROUP} blocks holds {MAX_FEATURES} out-features and the weight has {problem.N}; "
                "use technique='separate'"
            )
        return reason or (cannot_run(problem) if problem.training else None)

    def forward(self, problem: Problem, x, weight, bias, norm_weight, norm_bias, residual) -> tuple[Tensors, Tensors]:
        options = dict(
            layer=problem.norm == "layer",
            eps=resolve_eps(problem.eps, problem.dtype),
            position=problem.residual,
            write_z=problem.return_sum,
            write_hat=problem.stores_hat,
            saves=problem.training,
        )
        tensors = (x, weight, bias, norm_weight, norm_bias, residual)
        with on_device_of(x):
            if postnorm_cluster.why_not(problem.K, problem.N, problem.groups) is None:
                out = postnorm_cluster.forward(*tensors, groups=problem.groups, **options)
            else:
                out = forward(*tensors, **options)
        return (out.y, out.z), (out.mean, out.rstd, out.hat)

    def backward(self, problem: Problem, saved: Tensors, grads: Tensors, needs: tuple[bool, ...]) -> Tensors:
        # What is saved is the same for every technique of the op, so another one's kernels can compute the gradients.
        from recsys_norm.kernels.norm.technique import Separate

        return Separate().backward(problem, saved, grads, needs)


def forward(
    x: Tensor,  # [M, K], bf16 or fp16, row stride a multiple of 8
    weight: Tensor,  # [N, K] contiguous
    bias: Tensor | None,  # [N], like gamma and beta in x's dtype or fp32
    gamma: Tensor | None,
    beta: Tensor | None,
    residual: Tensor | None,  # [M, N], added at `position`
    *,
    layer: bool,
    eps: float,
    position: str | None,  # "before" or "after" the norm
    write_z: bool = False,
    write_hat: bool = False,
    saves: bool = True,
) -> Result:
    """y, z if asked for, zhat if asked for, mean relative to the row's first value (layer norm only) and rstd; W streams."""
    x, weight = aligned(x), aligned(weight.to(x.dtype))
    (M, K), N = x.shape, weight.shape[0]
    members, blocks = -(-N // COLUMNS), -(-M // TILE_ROWS)
    groups = min(launch.multiprocessors(x.device) // members, blocks)
    y = x.new_empty(M, N)
    side = torch.empty_like(y) if write_z or write_hat else None
    rstd = x.new_empty(M, dtype=torch.float32)
    mean = torch.empty_like(rstd) if layer else None
    residual = None if residual is None else tma_ready(residual)
    before, after = position == "before", position == "after"
    vectors, kinds = parameter_vectors(bias, gamma, beta)
    form = HAT * write_hat + SUM * write_z + AFTER * after + SAVE * saves
    kernel = launch.get(f"postnorm_stream_{'layer' if layer else 'rms'}_{NAMES[x.dtype]}")
    kernel(
        members * groups,
        *(x, weight, residual if before else y, y, y if side is None else side),
        *(*vectors, mean, rstd, residual if after else None, message_space(x.device)),
        *(residual.stride(0) // 2 if after else 0, M, N, -(-K // 64), members, groups, *kinds, int(before), form, eps),
        cooperative=True,
    )
    return Result(y, side if write_z else None, side if write_hat else None, mean, rstd)


def message_space(device: torch.device) -> Tensor:
    """Memory for the messages of one launch. It is not kept for the next: CUDA graphs of torch.compile stop at a tensor
    that outlives the call that made it, and a captured graph may be replayed on any stream. So messages are numbered from 0
    in every launch, where the kernel could go on from the last number of the one before."""
    size = 2 + launch.multiprocessors(device) * _MESSAGES * 2
    return torch.zeros(size, dtype=torch.int64, device=device)
