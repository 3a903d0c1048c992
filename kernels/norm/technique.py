"""Technique `separate` on CUDA: one pass of the norm kernels, then cuBLAS. The floor that `fused` never falls below.

The norm's own work (residual, affine, activation, returned sum, column sums) is one read and one write of the rows, and
no GEMM or pass runs for a gradient that nobody asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from recsys_norm.kernels.norm.configs import group_limit
from recsys_norm.ops.problem import Problem, Tensors

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MIN_ARCH = 80
_MIN_TRITON = (3, 6)
_MAX_HEAD_WIDTH = 256  # kernels.gdpa


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + bias in x's dtype."""
    return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


_FEW_ROWS = 4096  # up to which a 16-bit product may be split: its parts then are few


def weight_product(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T x in fp32. cuBLAS may add the parts of a split sum in the output's dtype, so a 16-bit output would lose bits
    that grow with the number of rows."""
    if dy.dtype == torch.float32:
        return torch.mm(dy.t(), x)
    if dy.is_cuda:
        return torch.mm(dy.t(), x, out_dtype=torch.float32)
    return torch.mm(dy.t().float(), x.float())


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    if dy.dtype == weight.dtype and dy.is_cuda and len(dy) <= _FEW_ROWS:  # no copy, which would show in small problems
        return torch.mm(dy.t(), x)
    return weight_product(dy, x).to(weight.dtype)


class Separate:
    """See the module. The order of tensors is documented in the module of each op in `recsys_norm.ops`."""

    name = "separate"
    provider = "triton"
    adds_gradient = True  # read by the norm's backward pass
    takes_groups = True

    def why_not(self, problem: Problem) -> str | None:
        if problem.op not in OPS:
            return f"it serves {', '.join(OPS)}, not {problem.op}; use backend='unfused'"
        if problem.device != "cuda" or problem.arch is None:
            return f"its kernels need a CUDA device and the tensors are on {problem.device}; use backend='unfused'"
        if problem.arch < _MIN_ARCH:
            return f"compute capability {problem.arch} is below {_MIN_ARCH}; use backend='unfused'"
        if problem.triton_version is None or problem.triton_version < _MIN_TRITON:
            found = "none" if problem.triton_version is None else "{}.{}".format(*problem.triton_version)
            needed = "{}.{}".format(*_MIN_TRITON)
            return f"it needs triton >= {needed} and {found} is installed; use backend='unfused'"
        if problem.dtype not in _DTYPES:
            return f"its kernels take bfloat16, float16 and float32, not {problem.dtype}; use backend='unfused'"
        width = problem.N // problem.groups
        if problem.groups > 1 and width > (limit := group_limit(width, problem.dtype.itemsize)):
            return f"it holds groups of at most {limit} features and these are {width}; use backend='unfused'"
        attention = problem.attention
        if attention is not None and not attention.softmax and problem.d > _MAX_HEAD_WIDTH:
            limit = f"the attention kernel holds heads up to {_MAX_HEAD_WIDTH} wide"
            return f"{limit} and these are {problem.d}; use more heads, or attention='eager'"
        return None

    def forward(self, problem: Problem, *tensors: Tensor | None) -> tuple[Tensors, Tensors]:
        return OPS[problem.op][0](problem, *tensors)

    def backward(self, problem: Problem, saved: Tensors, grads: Tensors, needs: tuple[bool, ...]) -> Tensors:
        return OPS[problem.op][1](problem, saved, grads, needs)


def _norm_forward(problem, x, norm_weight, norm_bias, residual):
    from recsys_norm.kernels.norm.launch import norm_forward

    write_z = residual is not None
    norm = dict(norm=problem.norm, eps=problem.eps)
    out = norm_forward(x, norm_weight, norm_bias, **norm, before=residual, write_z=write_z)
    return (out.y, out.z), (out.mean, out.rstd)


def _norm_backward(problem, saved, grads, needs):
    from recsys_norm.kernels.norm.launch import norm_backward

    z, norm_weight, mean, rstd = saved
    dy, dsum = grads
    need_x, need_weight, need_bias, need_residual = needs
    if not any(needs):
        return None, None, None, None
    g = norm_backward(
        dy,
        z,
        mean,
        rstd,
        norm_weight,
        dsum=dsum,
        norm=problem.norm,
        write_dz=need_x or need_residual,
        dweight=norm_weight.dtype if need_weight else None,
        dbias=problem.param_dtype if need_bias else None,
    )
    return g.dz if need_x else None, g.dweight, g.dbias, g.dz if need_residual else None


def _norm_linear_forward(problem, x, weight, bias, norm_weight, norm_bias):
    from recsys_norm.kernels.norm.launch import norm_forward

    xn = norm_forward(x, norm_weight, norm_bias, norm=problem.norm, eps=problem.eps)
    return (project(xn.y, weight, bias),), (xn.mean, xn.rstd)


def _norm_linear_backward(problem, saved, grads, needs):
    from recsys_norm.kernels.norm.launch import column_sum, norm_backward, norm_forward

    x, weight, bias, norm_weight, norm_bias, mean, rstd, _ = saved
    dy, add = (*grads, None)[:2]
    need_x, need_weight, need_bias, need_norm_weight, need_norm_bias = needs
    need_affine = need_norm_weight or need_norm_bias
    dx = dweight = dbias = dnorm_weight = dnorm_bias = None
    if need_bias:
        dbias = column_sum(dy, bias.dtype)
    if need_x or (need_affine and not need_weight):
        g = norm_backward(
            torch.mm(dy, weight.to(dy.dtype)),
            x,
            mean,
            rstd,
            norm_weight,
            norm_bias,
            dsum=add,
            norm=problem.norm,
            write_dz=need_x,
            write_h=need_weight,
            dweight=norm_weight.dtype if need_norm_weight else None,
            dbias=norm_bias.dtype if need_norm_bias else None,
        )
        dx, dnorm_weight, dnorm_bias = g.dz, g.dweight, g.dbias
        if need_weight:
            dweight = weight_gradient(dy, g.h, weight)
    elif need_weight and not need_affine:
        xn = norm_forward(x, norm_weight, norm_bias, norm=problem.norm, eps=problem.eps).y
        dweight = weight_gradient(dy, xn, weight)
    elif need_weight:
        # Nothing below wants a gradient: those of the norm's parameters follow from dy^T zhat, without the GEMM to x.
        product = weight_product(dy, norm_forward(x, norm=problem.norm, eps=problem.eps).y)
        dweight = product if norm_weight is None else product * norm_weight.float()
        if need_norm_weight:
            dnorm_weight = (product * weight.float()).sum(0).to(norm_weight.dtype)
        if norm_bias is not None:
            total = column_sum(dy, torch.float32)
            dweight = torch.addr(dweight, total, norm_bias.float())
            if need_norm_bias:
                dnorm_bias = torch.mv(weight.float().t(), total).to(norm_bias.dtype)
        dweight = dweight.to(weight.dtype)
    return dx, dweight, dbias, dnorm_weight, dnorm_bias


def _rows_of(t: Tensor | None, width: int) -> Tensor | None:
    """The values of a matrix in rows of another width; the matrix itself where it has that."""
    return t if t is None or t.shape[1] == width else t.reshape(-1, width)


def _linear_norm_forward(problem, x, weight, bias, norm_weight, norm_bias, residual):
    from recsys_norm.kernels.norm.launch import norm_forward

    product = project(x, weight, bias)
    width = problem.N // problem.groups
    rows, residual = _rows_of(product, width), _rows_of(residual, width)
    before = residual if problem.residual == "before" else None
    keep_product = problem.return_sum and before is None  # which then is the sum
    out = norm_forward(
        rows,
        norm_weight,
        norm_bias,
        norm=problem.norm,
        eps=problem.eps,
        before=before,
        after=residual if problem.residual == "after" else None,
        write_z=problem.return_sum and not keep_product,
        write_hat=problem.stores_hat,
        overwrite=not keep_product,
        groups=problem.groups,
    )
    y, z, hat = (_rows_of(t, problem.N) for t in (out.y, rows if keep_product else out.z, out.hat))
    return (y, z), (out.mean, out.rstd, hat)


def _linear_norm_backward(problem, saved, grads, needs):
    from recsys_norm.kernels.norm.launch import norm_backward

    x, weight, norm_weight, mean, rstd, hat, z = saved
    dy, dsum = grads
    need_x, need_weight, need_bias, need_norm_weight, need_norm_bias, need_residual = needs
    before = problem.residual == "before"
    write_dz = need_x or need_weight or (need_residual and before)
    dx = dweight = dresidual = None
    if write_dz or need_bias or need_norm_weight or need_norm_bias:
        width = problem.N // problem.groups
        g = norm_backward(
            _rows_of(dy, width),
            _rows_of(z if hat is None else hat, width),
            mean,
            rstd,
            norm_weight,
            dsum=_rows_of(dsum, width),
            norm=problem.norm,
            hat=hat is not None,
            write_dz=write_dz,
            dweight=norm_weight.dtype if need_norm_weight else None,
            dbias=problem.param_dtype if need_norm_bias else None,
            dz_sum=problem.param_dtype if need_bias else None,
            groups=problem.groups,
        )
        dbias, dnorm_weight, dnorm_bias = g.dz_sum, g.dweight, g.dbias
        dz = _rows_of(g.dz, problem.N)
        if need_x:
            dx = torch.mm(dz, weight.to(dy.dtype))
        if need_weight:
            dweight = weight_gradient(dz, x, weight)
        if need_residual and before:
            dresidual = dz
    else:
        dbias = dnorm_weight = dnorm_bias = None
    if need_residual and not before:
        dresidual = dy
    return dx, dweight, dbias, dnorm_weight, dnorm_bias, dresidual


def _linear_norm_linear_forward(problem, x, weight1, bias1, weight2, bias2, norm_weight, norm_bias):
    from recsys_norm.kernels.norm.launch import norm_forward

    z = project(x, weight1, bias1)
    activation = problem.activation or "identity"
    h = norm_forward(z, norm_weight, norm_bias, norm=problem.norm, eps=problem.eps, activation=activation)
    return (project(h.y, weight2, bias2),), (z, h.mean, h.rstd)


def _linear_norm_linear_backward(problem, saved, grads, needs):
    from recsys_norm.kernels.norm.launch import column_sum, norm_backward, norm_forward

    x, weight1, weight2, norm_weight, norm_bias, z, mean, rstd = saved
    (dy,) = grads
    need_x, need_w1, need_b1, need_w2, need_b2, need_norm_weight, need_norm_bias = needs
    activation = problem.activation or "identity"
    dx = dw1 = db1 = dw2 = db2 = dnorm_weight = dnorm_bias = h = None
    if need_b2:
        db2 = column_sum(dy, problem.param_dtype)
    if need_x or need_w1 or need_b1 or need_norm_weight or need_norm_bias:
        g = norm_backward(
            torch.mm(dy, weight2.to(dy.dtype)),
            z,
            mean,
            rstd,
            norm_weight,
            norm_bias,
            norm=problem.norm,
            activation=activation,
            write_dz=need_x or need_w1,
            write_h=need_w2,
            dweight=norm_weight.dtype if need_norm_weight else None,
            dbias=norm_bias.dtype if need_norm_bias else None,
            dz_sum=problem.param_dtype if need_b1 else None,
        )
        h, db1, dnorm_weight, dnorm_bias = g.h, g.dz_sum, g.dweight, g.dbias
        if need_x:
            dx = torch.mm(g.dz, weight1.to(dy.dtype))
        if need_w1:
            dw1 = weight_gradient(g.dz, x, weight1)
    elif need_w2:
        h = norm_forward(z, norm_weight, norm_bias, norm=problem.norm, eps=problem.eps, activation=activation).y
    if need_w2:
        dw2 = weight_gradient(dy, h, weight2)
    return dx, dw1, db1, dw2, db2, dnorm_weight, dnorm_bias


def _attention_forward(problem, *tensors):
    from recsys_norm.kernels.norm import attention

    return attention.forward(problem, *tensors)


def _attention_backward(problem, saved, grads, needs):
    from recsys_norm.kernels.norm import attention

    return attention.backward(problem, saved, grads, needs)


OPS = {
    "norm": (_norm_forward, _norm_backward),
    "norm_linear": (_norm_linear_forward, _norm_linear_backward),
    "linear_norm": (_linear_norm_forward, _linear_norm_backward),
    "linear_norm_linear": (_linear_norm_linear_forward, _linear_norm_linear_backward),
    "norm_attention": (_attention_forward, _attention_backward),
}
