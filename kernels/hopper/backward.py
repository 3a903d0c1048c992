"""norm_linear backward on Hopper: first the gradients of the parameters, then the gradient of x (formulas in the
kernels' modules). Beyond 512 in-features the second needs a dot product of each row of dy and y."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recsys_norm.kernels.hopper import dgrad, wgrad
from recsys_norm.kernels.hopper.lazy import MAX_K, fold
from recsys_norm.ops.problem import Tensors


def why_not(dtype: torch.dtype, K: int, N: int) -> str | None:
    """None if these kernels can compute the gradients, else the limit."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the Hopper backward takes bfloat16 and float16, not {dtype}"
    if K % 8 or N % 8:
        return f"TMA wants multiples of 16 bytes, so of 8 features, and there are {K} in-features and {N} out-features"
    if K > MAX_K:
        return f"the Hopper backward stops at {MAX_K} in-features and x has {K}"
    return None


def backward(
    norm: str,
    eps: float,
    saved: Tensors,
    dy: Tensor | Sequence[Tensor],
    needs: tuple[bool, ...],
    add: Tensor | None = None,
) -> Tensors:
    """Gradients of norm_linear in the order of its inputs, that of x plus `add`; no kernel runs for one that is not
    needed. dy may come in pieces that stand side by side."""
    x, weight, bias, gamma, beta, mean, rstd, y = saved
    need_x, need_weight, need_bias, need_gamma, need_beta = needs
    dx = dweight = dbias = dgamma = dbeta = delta = None
    if not any(needs):
        return dx, dweight, dbias, dgamma, dbeta
    alone = not (need_weight or need_gamma) and (need_bias or need_beta)  # a sum of columns, by another kernel
    if not isinstance(dy, Tensor) and (alone or not dgrad.fits_in_pieces(dy, x.shape[1])):
        dy = torch.cat(tuple(dy), 1)
    if need_x:
        folded, offset = fold(weight, bias, gamma, beta, x.dtype, centre=norm == "layer")
    given = need_x and x.shape[1] > dgrad.WHOLE_ROW_FORMS[-1]
    parameters = need_weight or need_gamma
    together = given and parameters and wgrad.makes_row_dots(x.dtype)
    if given and not together:
        delta = dgrad.row_dots(dy, y, offset)
    if parameters:
        row_dots = None
        if together:
            delta = torch.empty_like(rstd)
            row_dots = wgrad.RowDots(y, offset, delta)
        dweight, dbias, dgamma, dbeta = wgrad.gradients(
            dy, x, weight, bias, gamma, beta, norm == "layer", rstd, eps, row_dots, affine=need_gamma or need_beta
        )
    elif need_bias or need_beta:
        from recsys_norm.kernels.norm.launch import column_sum

        dbias = column_sum(dy, torch.float32)
        dbeta = torch.mv(weight.float().t(), dbias) if need_beta else None
    if need_x:
        dx = dgrad.dx(dy, folded, x, mean, rstd, delta, add)
    found = (dx, dweight, dbias, dgamma, dbeta)
    return tuple(t if need else None for t, need in zip(found, needs))
