"""Inside torch.compile a registered op is a black box, while inductor fuses a norm of its own with what stands beside it. So
a converted module calls the op there only where a kernel takes the norm into the GEMM, forward or backward; where the best
technique is the norm kernel and then cuBLAS, it hands plain PyTorch to inductor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recsys_norm.nn.policy import Policy
from recsys_norm.ops import registry
from recsys_norm.ops.choices import BACKWARD, FORWARD
from recsys_norm.ops.library import arch_of, triton_version
from recsys_norm.ops.problem import Problem

ROWS = 1 << 18  # of the measurements that the choice rests on; the rows of a graph may not be known


def arguments(
    policy: Policy, op: str, x: Tensor, norm: dict[str, Any], K: int, N: int, **fields: Any
) -> dict[str, Any]:
    """backend, technique and on_unsupported for one call. `fields` are further names of `Problem`."""
    how = policy.arguments()
    if torch.compiler.is_compiling() and policy.backend == "fused" and policy.technique is None and on_device(x):
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        affine = norm["norm_weight"] is not None or norm["norm_bias"] is not None
        names = tuple(fields.items())
        if nothing_fused(op, norm["norm"], affine, norm["norm_bias"] is not None, K, N, dtype, names):
            how["backend"] = "compiled"  # which in a graph is plain PyTorch
    return how


def on_device(x: Tensor) -> bool:
    """Whether there are kernels to choose from."""
    return x.is_cuda


@torch.compiler.assume_constant_result
def nothing_fused(
    op: str, norm: str, affine: bool, norm_bias: bool, K: int, N: int, dtype: torch.dtype, fields: tuple[Any, ...]
) -> bool:
    """Whether the best technique computes norm and GEMM apart, forward and backward, in training."""
    problem = Problem(
        op=op,
        norm=norm,
        M=ROWS,
        K=K,
        N=N,
        dtype=dtype,
        param_dtype=dtype,
        eps=1e-5,
        affine=affine,
        norm_bias=norm_bias,
        training=True,
        strides=(K, 1),
        device="cuda",
        arch=arch_of(torch.device("cuda", torch.cuda.current_device())),
        triton_version=triton_version(),
        **dict(fields),
    )
    try:
        return all(registry.choose(problem, way).name == "separate" for way in (FORWARD, BACKWARD))
    except registry.UnsupportedError:
        return False  # the op says what it misses
