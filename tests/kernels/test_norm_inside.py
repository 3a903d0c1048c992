"""The backward of norm_attention with the norm of q inside the attention's kernel, without a GPU: what that kernel needs, in
Triton's interpreter, and the way around it, with PyTorch in its place."""

import pytest
import torch
from norm_attention_cases import arguments, check_own_residual, check_slack
from op_cases import FORCED

from recsys_norm.kernels.hopper import gdpa_backward
from recsys_norm.kernels.norm import attention_inside as inside
from recsys_norm.kernels.norm import techniques
from recsys_norm.kernels.norm.launch import norm_backward, norm_forward
from recsys_norm.kernels.norm.terms import terms
from recsys_norm.ops import registry
from recsys_norm.testing import check_op

SEPARATE = dict(techniques())["norm_attention"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype,param_dtype", [(torch.float32, torch.float32), (torch.float16, torch.float32)])
def test_terms(norm, affine, dtype, param_dtype):
    """Of rows with any stride; columns beyond one program's."""
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(1100, 40, generator=g) + 3).to(DEVICE, dtype)[:, :24]
    weight, bias = ((torch.randn(24, generator=g)).to(DEVICE, param_dtype) if affine else None for _ in range(2))
    out = norm_forward(x, weight, bias, norm=norm, eps=1e-5)
    rows, columns = terms(x, out.mean, out.rstd, weight, bias)
    assert torch.equal(rows[:, 1], out.rstd)
    centre = x.float().mean(1) if norm == "layer" else torch.zeros(1100, device=DEVICE)
    torch.testing.assert_close(rows[:, 0], centre, atol=2e-6, rtol=0)
    w, b = (columns[:, i].flatten() for i in (0, 1))
    y = ((x.float() - rows[:, :1]) * rows[:, 1:]) * w + b
    torch.testing.assert_close(y.to(dtype), out.y, atol=1e-3 if dtype == torch.float16 else 1e-5, rtol=1e-3)
    if not affine:
        assert (w == 1).all() and (b == 0).all() and b.signbit().all()


def test_terms_of_many_columns():
    x = torch.randn(2, 2048, device=DEVICE)
    weight, bias = torch.randn(2, 2048, device=DEVICE)
    _, columns = terms(x, None, torch.ones(2, device=DEVICE), weight, bias)
    assert torch.equal(columns[:, 0].flatten(), weight) and torch.equal(columns[:, 1].flatten(), bias)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_gradient_may_take_the_memory_of_the_one_it_is_made_of(norm):
    g = torch.Generator().manual_seed(0)
    x, dy, more = (torch.randn(37, 24, generator=g).to(DEVICE) for _ in range(3))
    out = norm_forward(x, norm=norm, eps=1e-5)
    options = dict(norm=norm, more_dy=more, dweight=torch.float32, dbias=torch.float32)
    expected = norm_backward(dy, x, out.mean, out.rstd, **options)
    found = norm_backward(dy, x, out.mean, out.rstd, overwrite=True, **options)
    assert found.dz.data_ptr() == dy.data_ptr() and expected.dz.data_ptr() != dy.data_ptr()
    for name in ("dz", "dweight", "dbias"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    gaps = torch.cat([more, more], 1)[:, :24]
    spaced = norm_backward(gaps, x, out.mean, out.rstd, norm=norm, overwrite=True).dz
    assert torch.equal(spaced, norm_backward(more, x, out.mean, out.rstd, norm=norm).dz) and torch.equal(gaps, more)
    wide, dy = torch.randn(2, 3, 70000, device=DEVICE)
    out = norm_forward(wide, norm=norm, eps=1e-5)
    assert norm_backward(dy, wide, out.mean, out.rstd, norm=norm, overwrite=True).dz.data_ptr() != dy.data_ptr()


# ---- the way around the kernel ---------------------------------------------------------------------------------------


def in_place_of_the_kernel(tensors, q_offsets, k_offsets, code, max_keys, scale, norm):
    from recsys_norm.ops.jagged_torch import Attention, grouped_backward

    q, k, v, grad, dq, dk, dv = tensors
    centre, rstd = norm.rows[:, :1], norm.rows[:, 1:]
    weight, bias = (norm.columns[:, i].flatten() for i in (0, 1))
    hat = ((q.flatten(1) - centre) * rstd * weight + bias).view(q.shape)
    live = int(q_offsets[-1])
    kept = grad.clone()
    attention = Attention((gdpa_backward.ACTIVATIONS[code],), scale, False, None)
    grads = grouped_backward(grad, hat.to(q.dtype), k, v, q_offsets, k_offsets, attention)
    for to, g in zip((dq, dk, dv), grads):
        to.copy_(g)
    if norm.inner:
        dq[:live] += kept[:live]


@pytest.fixture
def stands_in(monkeypatch):
    calls = []

    def backward(*args):
        calls.append(args)
        return in_place_of_the_kernel(*args)

    def fits(problem, *tensors):
        spec = problem.attention
        return spec.pre_norm is not None and "q" in spec.pre_norm_on and spec.pre_norm_scope == "all_heads"

    monkeypatch.setattr(inside, "fits", fits)
    monkeypatch.setattr(gdpa_backward, "backward", backward)
    monkeypatch.setattr(registry, "_candidates", lambda problem, direction: ((SEPARATE,), ()))
    registry.reset_counts()
    yield calls
    assert set(registry.counts()["norm_attention"]) <= {"separate", "unfused"}


@pytest.mark.parametrize("pre", ["layer", "rms"])
@pytest.mark.parametrize("post", ["rms", None])
@pytest.mark.parametrize("inner", [True, False])
def test_gradients(pre, post, inner, stands_in):
    for on, residual, affine in (("q", True, True), ("qk", False, False)):
        t, options = arguments(pre=pre, post=post, on=on, residual=residual, affine=affine, device=DEVICE)
        options |= dict(inner_residual=inner, activation="gelu")
        check_op("norm_attention", t, options, FORCED)
    assert stands_in and all(c[6].inner == inner for c in stands_in)
    # The gradient at the post-norm's input is this op's own, that at the output is not.
    assert all((c[0][3].data_ptr() == c[0][4].data_ptr()) == (post is not None) for c in stands_in)


@pytest.mark.parametrize("inner", [True, False])
def test_rows_past_the_last_offset_and_q_as_its_own_residual(inner, stands_in):
    t, options = arguments(pre="layer", post="rms", residual=True, slack=3, device=DEVICE)
    options |= dict(inner_residual=inner, activation="gelu")
    check_slack(t, options, FORCED, 3, 1e-5)
    t, options = arguments("empty first", pre="layer", post="rms", device=DEVICE)
    check_own_residual(t, options | dict(inner_residual=inner, activation="gelu"), FORCED, 1e-5)
    assert stands_in


def test_it_serves_nothing_on_the_cpu():
    from recsys_norm.ops.norm_attention import _problem, _unpack

    t, _ = arguments(H=2, d=128, dtype=torch.bfloat16)
    q, k, v, offsets = t["q_THd"], t["k_UHd"], t["v_UHd"], t["q_offsets_B1"]
    spec = _unpack(5, 4, "gelu,gelu", False, 0.1, False, None, "layer", "q", "all_heads", "rms", True)
    problem = _problem(q, k, (None,) * 6, False, spec, 1e-5, True)
    assert not inside.fits(problem, q, k, v, q, offsets)
