"""norm_linear's kernels, in Triton's interpreter where there is no GPU. Larger grids: tests/gpu/test_fused_gemm.py."""

import pytest
import torch
from op_cases import tensors_for

from recsys_norm import ops
from recsys_norm.kernels.compile import declared_architectures, run_checks
from recsys_norm.kernels.lazy import techniques
from recsys_norm.kernels.lazy.configs import NAIVE_MAX_FEATURES
from recsys_norm.ops import registry
from recsys_norm.ops.problem import Problem
from recsys_norm.testing import check_op

TECHNIQUES = {t.name: t for _, t in techniques()}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(params=["lazy", "naive"])
def technique(request, monkeypatch):
    """The public op runs this technique's kernels on this device, whichever it is."""
    monkeypatch.setattr(registry, "_candidates", lambda problem, direction: ((TECHNIQUES[request.param],), ()))
    return request.param


@pytest.fixture
def lazy(monkeypatch):
    monkeypatch.setattr(registry, "_candidates", lambda problem, direction: ((TECHNIQUES["lazy"],), ()))


def on_device(tensors):
    return {n: t if t is None else t.detach().to(DEVICE).requires_grad_(t.requires_grad) for n, t in tensors.items()}


def run(technique, norm, *, eps=1e-5, tensors=None, cancelling=None, backward=True, **shape):
    tensors = on_device(tensors or tensors_for("norm_linear", norm=norm, **shape))
    candidate = {"backend": "fused", "technique": technique}
    return check_op(
        "norm_linear", tensors, {"norm": norm, "eps": eps}, candidate, cancelling=cancelling, backward=backward
    )


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("dtype,param_dtype", [(FP32, None), (BF16, None), (FP16, FP32)])
def test_matches_reference(technique, norm, dtype, param_dtype):
    run(technique, norm, dtype=dtype, param_dtype=param_dtype, M=33, K=40, N=24)
    run(technique, norm, dtype=dtype, param_dtype=param_dtype, M=9, K=24, N=17, affine=False, bias=False)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("K,N", [(3, 65), (63, 1), (127, 17)])
def test_a8_sizes_that_are_not_powers_of_two(technique, norm, K, N):
    run(technique, norm, M=5, K=K, N=N, mean=5.0)


@pytest.mark.parametrize("norm,K,N", [("layer", 384, 40), ("rms", 760, 24), ("layer", 760, 24), ("layer", 1128, 17)])
def test_a8_wide_rows(lazy, norm, K, N):
    """Up to 512 features a block holds the whole row of the gradient; beyond, delta and eta come from the saved y."""
    run("lazy", norm, dtype=FP16, M=9, K=K, N=N, mean=5.0)


def test_a8_one_feature(technique):
    t = on_device(tensors_for("norm_linear", norm="layer", M=3, K=1, N=4, mean=5.0))
    y = ops.norm_linear(**t, norm="layer", technique=technique)
    (dx,) = torch.autograd.grad(y.sum(), t["x"])
    assert torch.equal(dx, torch.zeros_like(dx))


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("dtype,mean,scale", [(FP32, 1e3, 1.0), (FP32, 1e4, 1.0), (BF16, 100.0, 1.0)])
def test_a11_large_mean(technique, norm, dtype, mean, scale):
    run(technique, norm, dtype=dtype, M=17, K=48, N=24, mean=mean, scale=scale)


def test_a11_large_mean_beyond_one_block(lazy):
    run("lazy", "layer", M=5, K=600, N=17, mean=1e3)


@pytest.mark.parametrize("norm,eps", [("rms", 1e-5), ("rms", None), ("layer", 1e-6)])
def test_a12_eps_is_inside_the_root(technique, norm, eps):
    run(technique, norm, M=9, K=24, N=17, scale=1e-3, eps=eps)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a10_constant_rows(technique, norm):
    t = tensors_for("norm_linear", norm=norm, dtype=FP16, M=8, K=64, N=24)
    with torch.no_grad():
        t["x"][0], t["x"][1], t["x"][2], t["x"][3] = 0.0, 100.0, 65504.0, -65504.0
        t["x"][4, ::2], t["x"][4, 1::2] = 65504.0, -65504.0
    run(technique, norm, tensors=t, backward=False)
    t = on_device({n: p.detach() for n, p in t.items() if p is not None})
    y = ops.norm_linear(**t, norm=norm, technique=technique)
    if norm == "layer":  # a row without deviation gives the offset alone, whatever its value
        assert torch.equal(y[0], y[1]) and torch.equal(y[0], y[2]) and torch.equal(y[0], y[3])


def test_a7_strided_rows_and_expanded_gradients(technique):
    wide = torch.randn(9, 3 * 40, device=DEVICE)
    t = on_device(tensors_for("norm_linear", norm="layer", M=9, K=40, N=24))
    results = []
    for x in (wide[:, 40:80], wide[:, 40:80].contiguous()):
        leaves = [x.detach().requires_grad_()] + [t[n] for n in ("weight", "bias", "norm_weight", "norm_bias")]
        options = dict(bias=leaves[2], norm="layer", norm_weight=leaves[3], norm_bias=leaves[4])
        y = ops.norm_linear(leaves[0], leaves[1], technique=technique, **options)
        results.append([y, *torch.autograd.grad(y.sum(), leaves)])
    for a, b in zip(*results):
        assert torch.equal(a, b)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "norm_weight", "norm_bias"])
def test_a20_only_what_is_needed_is_computed(lazy, monkeypatch, wanted):
    from recsys_norm.kernels.lazy import backward, wgrad

    t = on_device(tensors_for("norm_linear", norm="layer", M=9, K=24, N=17))
    y = ops.norm_linear(**t, norm="layer", technique="lazy")
    everything = torch.autograd.grad(y.square().sum(), list(t.values()))
    expected = dict(zip(t, everything))[wanted]

    def forbidden(*args, **kwargs):
        raise AssertionError("a product for a gradient that nobody asked for")

    if wanted != "x":
        monkeypatch.setattr(backward, "dx", forbidden)
    if wanted not in ("weight", "norm_weight"):
        monkeypatch.setattr(wgrad, "product", forbidden)
        monkeypatch.setattr(wgrad, "product_of", forbidden)
    frozen = {n: p.detach().requires_grad_(n == wanted) for n, p in t.items()}
    y = ops.norm_linear(**frozen, norm="layer", technique="lazy")
    (grad,) = torch.autograd.grad(y.square().sum(), frozen[wanted])
    assert torch.allclose(grad, expected, rtol=1e-5, atol=1e-6)


def test_a9_limits_are_named():
    problem = Problem(
        op="norm_linear", norm="rms", M=8, K=513, N=8, dtype=BF16, param_dtype=BF16, eps=1e-5,
        device="cuda", arch=90, triton_version=(3, 6),
    )  # fmt: skip
    reason = TECHNIQUES["naive"].why_not(problem)
    assert str(NAIVE_MAX_FEATURES[2]) in reason and "513" in reason and "lazy" in reason
    assert TECHNIQUES["lazy"].why_not(problem) is None


def test_compiles_for_the_declared_architectures():
    rows = run_checks("recsys_norm.kernels.lazy.cases")
    declared = {k: v for k, v in declared_architectures().items() if k.startswith("lazy.")}
    assert {(r.kernel, r.arch) for r in rows} == {(k, a) for k, archs in declared.items() for a in archs}
    assert [r for r in rows if r.spill_bytes or r.serialized or r.blocks_per_sm < 1] == []
