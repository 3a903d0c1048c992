"""What a technique is asked to compute, and what a technique is.

Shape legend (suffixes of tensor names): B batch, T packed tokens on the query side, U packed tokens on the key/value
side, H heads, d head width, M rows, K in-features, N out-features. Weights have the `nn.Linear` layout `[N, K]`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """The options of `norm_attention` that are not tensors; a technique may specialise on every field."""

    max_q_len: int
    max_k_len: int
    activation: tuple[str, ...]  # one name for all heads, or one per head
    softmax: bool
    scale: float
    causal: bool
    window: int | None
    pre_norm: str | None
    pre_norm_on: str  # "q" | "k" | "qk"
    pre_norm_scope: str  # "all_heads" | "head"
    post_norm: str | None
    inner_residual: bool


@dataclass(frozen=True)
class Problem:
    """One call of an op, without its data. Hashable, so that a choice can be cached and tabulated.

    M, K, N, N2 are row and feature counts (0 where the op has none); H and d are heads and head width of
    `norm_attention` (there M = T, K = N = H * d). `strides` are the strides of the first tensor as the technique gets it.
    `arch` is the compute capability as an integer (90 for H100/H200), None without CUDA.
    """

    op: str
    norm: str | None
    M: int
    K: int
    N: int
    dtype: torch.dtype
    param_dtype: torch.dtype
    eps: float
    N2: int = 0
    H: int = 0
    d: int = 0
    affine: bool = False  # a norm has a weight or a bias
    norm_bias: bool = False
    bias: bool = False
    activation: str | None = None
    residual: str | None = None  # None | "before" | "after"
    return_sum: bool = False
    groups: int = 1  # of `linear_norm`: how many norms share the N out-features
    training: bool = False
    strides: tuple[int, ...] = ()
    device: str = "cpu"
    arch: int | None = None
    triton_version: tuple[int, int] | None = None
    attention: AttentionSpec | None = None

    @functools.cached_property
    def case(self) -> Problem:
        """What a choice is made for. Problems whose rows round up to the same power of two are one case, or each jagged
        batch would be a new one."""
        return replace(self, M=1 << max(self.M - 1, 0).bit_length())

    @property
    def stores_hat(self) -> bool:
        return stores_hat(self.training, self.affine, self.residual, self.return_sum)


def stores_hat(training: bool, affine: bool, residual: str | None, return_sum: bool) -> bool:
    """Whether `linear_norm` stores zhat for its backward: where neither the output (no affine, no residual after) nor
    the returned sum holds it already. It is never recovered by dividing by the norm weight or by subtracting."""
    return training and not return_sum and (affine or residual == "after")


Tensors = tuple[Tensor | None, ...]
Results = tuple[Any, ...]  # tensors, and None where the op's order of tensors allows it


class Technique(Protocol):
    """One way to compute an op.

    `forward(problem, *tensors) -> (outputs, saved)` and `backward(problem, saved, grads, needs) -> grads` use the tensor
    order that the op's module documents (`recsys_norm.ops.norm_linear` and so on). What is saved is fixed by the op, so
    the backward of one technique can follow the forward of another. A saved mean is relative to the row's first element
    x_0: xhat = rstd * ((x - x_0) - mean), since an absolute one would be off by 5e-4 deviations in fp32 at mean /
    deviation = 1e4. `needs` holds one bool per input tensor; the grads
    of inputs that are not needed are None and cost nothing.

    A technique of norm_linear or norm_attention may set `adds_gradient = True`. Where its first tensor feeds a residual
    stream, `grads` then has a second entry, of that tensor's shape, which its gradient is to contain: added in fp32 before
    the one rounding. For a technique without the attribute the op adds afterwards, in a pass of its own.

    A technique of linear_norm may set `takes_groups = True`: then it can run problems with `groups` above 1, for which
    the saved mean and rstd are `[M * groups]`, row by row.

    A technique of norm_linear may set `takes_pieces = True`. Its dy may then be a tuple of matrices of one width that stand
    side by side, as the gradients of q, k and v do; for the others the op puts them together.
    """

    name: str
    provider: str  # torch | triton | hopper | helion | tlx

    def why_not(self, problem: Problem) -> str | None:
        """None if the technique can run the problem, else a sentence that names the limit and the alternative."""

    def forward(self, problem: Problem, *tensors: Tensor | None) -> tuple[Results, Results]: ...

    def backward(self, problem: Problem, saved: Tensors, grads: Tensors, needs: tuple[bool, ...]) -> Results: ...
