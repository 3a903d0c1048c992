"""linear_norm's and linear_norm_linear's kernels, in Triton's interpreter where there is no GPU. Larger grids are in
tests/gpu/test_fused_gemm.py."""

import pytest
import torch
from op_cases import tensors_for

from recsys_norm import ops
from recsys_norm.kernels import deferred, postnorm
from recsys_norm.kernels.compile import declared_architectures, run_checks
from recsys_norm.kernels.postnorm.configs import CLUSTER_MAX_FEATURES, NAIVE_MAX_FEATURES
from recsys_norm.ops import registry
from recsys_norm.ops.problem import Problem
from recsys_norm.testing import check_op

POST = {t.name: t for _, t in postnorm.techniques()}
DEFERRED = {t.name: t for _, t in deferred.techniques()}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def serve(monkeypatch):
    """The public op runs one technique's kernels on this device, whichever it is."""

    def choose(technique):
        monkeypatch.setattr(registry, "_candidates", lambda problem, direction: ((technique,), ()))

    return choose


def run(op, technique, options, **shape):
    tensors = tensors_for(op, norm=options["norm"], **shape)
    tensors = {n: t if t is None else t.detach().to(DEVICE).requires_grad_() for n, t in tensors.items()}
    return check_op(op, tensors, options, {"backend": "fused", "technique": technique})


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize(
    "position,return_sum,residual,affine",
    [("after", False, False, True), ("after", False, True, False), ("before", True, True, True)],
)
@pytest.mark.parametrize("technique", POST)
def test_linear_norm(serve, technique, norm, position, return_sum, residual, affine):
    serve(POST[technique])
    options = {"norm": norm, "residual_position": position, "return_sum": return_sum}
    for dtype, param_dtype, M, K, N in ((FP16, None, 9, 16, 304), (BF16, FP32, 33, 40, 24)):
        shape = dict(M=M, K=K, N=N, dtype=dtype, param_dtype=param_dtype, residual=residual, affine=affine)
        run("linear_norm", technique, options, **shape)


@pytest.mark.parametrize("technique", ["naive", "two_kernel"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_fp32_and_sizes_that_are_not_powers_of_two(serve, technique, norm):
    serve(POST[technique])
    for K, N in ((17, 3), (65, 129), (3, 65)):
        run("linear_norm", technique, {"norm": norm, "residual_position": "before"}, M=5, K=K, N=N, residual=True)


@pytest.mark.parametrize("technique", POST)
def test_a10_constant_rows(serve, technique):
    """Rows of z without deviation: the offset alone, exactly."""
    serve(POST[technique])
    x, weight = torch.zeros(4, 16, dtype=FP16, device=DEVICE), torch.randn(40, 16, device=DEVICE).half()
    x[1], weight[:, 3] = torch.nn.functional.one_hot(torch.tensor(3), 16).half(), 100.0
    beta = torch.randn(40, device=DEVICE).half()
    options = dict(norm="layer", norm_bias=beta, technique=technique)
    y = ops.linear_norm(x, weight, **options)
    assert torch.equal(y, beta.expand(4, 40))


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("N", [24, 304, 600])
def test_deferred(serve, norm, N):
    """Up to 512 features the second linear's backward holds a whole row; beyond, the separate form serves it."""
    serve(DEFERRED["deferred"])
    options = {"norm": norm, "activation": None}
    run("linear_norm_linear", "deferred", options, M=9, K=16, N=N, N2=40, dtype=FP16)
    if N == 24:
        run("linear_norm_linear", "deferred", options, M=17, K=24, N=N, N2=9)
        run("linear_norm_linear", "deferred", options, M=17, K=40, N=N, N2=17, dtype=BF16, param_dtype=FP32)


@pytest.mark.parametrize("norm,activation", [("rms", "silu"), ("layer", "gelu"), ("layer", None)])
def test_naive_between_two_linears(serve, norm, activation):
    serve(DEFERRED["naive"])
    for dtype in (FP16, FP32):
        run(
            "linear_norm_linear", "naive", {"norm": norm, "activation": activation}, M=9, K=16, N=40, N2=24, dtype=dtype
        )


def problem(op, **fields):
    common = dict(norm="layer", M=8, K=64, N=64, N2=8, dtype=BF16, param_dtype=BF16, eps=1e-5, device="cuda", arch=90)
    return Problem(op=op, **{**common, "triton_version": (3, 6), **fields})


@pytest.mark.parametrize(
    "technique,fields,limit",
    [
        (POST["naive"], dict(N=NAIVE_MAX_FEATURES + 8), str(NAIVE_MAX_FEATURES)),
        (POST["cluster"], dict(N=CLUSTER_MAX_FEATURES + 8), str(CLUSTER_MAX_FEATURES)),
        (POST["cluster"], dict(N=68), "multiples of 8"),
        (POST["cluster"], dict(residual="after"), "3.8"),
        (POST["cluster"], dict(dtype=FP32), "float32"),
        (POST["cluster"], dict(arch=80), "80"),
        (DEFERRED["deferred"], dict(activation="gelu"), "gelu"),
        (DEFERRED["naive"], dict(N=NAIVE_MAX_FEATURES + 8), str(NAIVE_MAX_FEATURES)),
    ],
)
def test_a9_limits_are_named(technique, fields, limit):
    op = "linear_norm" if technique in POST.values() else "linear_norm_linear"
    reason = technique.why_not(problem(op, **fields))
    assert limit in reason and "technique=" in reason
    assert technique.why_not(problem(op)) is None


def test_compiles_for_the_declared_architectures():
    rows = run_checks("recsys_norm.kernels.postnorm.cases")
    declared = {k: v for k, v in declared_architectures().items() if k.startswith("postnorm.")}
    assert {(r.kernel, r.arch) for r in rows} == {(k, a) for k, archs in declared.items() for a in archs}
    assert [r for r in rows if r.spill_bytes or r.serialized or r.blocks_per_sm < 1] == []
