"""The norm + GEMM kernels on a GPU: every technique of norm_linear, linear_norm and linear_norm_linear over the awkward
inputs. Most of the time goes to compiling; several processes with `-k` share the work through Triton's cache."""

import pytest
import torch
from op_cases import tensors_for

from recsys_norm import ops
from recsys_norm.kernels import deferred, lazy, postnorm
from recsys_norm.ops import registry
from recsys_norm.testing import check_op, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NORMS = ["rms", "layer"]
# (M, K, N): first those whose rows are multiples of 16 bytes, then odd ones.
ALIGNED = [(300, 512, 512), (257, 1128, 760), (129, 384, 384), (64, 256, 2048), (129, 2048, 128), (1030, 128, 64)]
ODD = [(1, 1, 1), (17, 63, 65), (65, 127, 129), (127, 760, 17), (63, 4097, 65), (127, 3, 17)]
SIZES = {
    (BF16, BF16): ALIGNED + ODD,
    (BF16, FP32): [(257, 1128, 760), (129, 384, 384), (65, 127, 129)],
    (FP16, FP16): [(300, 512, 512), (257, 1128, 760), (63, 4097, 65)],
    (FP32, FP32): [(129, 384, 384), (100, 760, 24), (64, 128, 72)],
}
TECHNIQUES = [(op, t) for package in (lazy, postnorm, deferred) for op, t in package.techniques()]
IDS = [f"{op}-{t.name}" for op, t in TECHNIQUES]


def on_gpu(tensors):
    return {n: t if t is None else t.detach().cuda().requires_grad_(t.requires_grad) for n, t in tensors.items()}


def run(op, technique, norm, *, options=None, tensors=None, **shape):
    tensors = on_gpu(tensors or tensors_for(op, norm=norm, **shape))
    registry.reset_counts()
    results = check_op(
        op, tensors, {"norm": norm, **(options or {})}, {"backend": "fused", "technique": registry.label(technique)}
    )
    assert set(registry.counts()[op]) == {technique.name, "unfused"}
    return results


def able(op, technique, M, K, N, dtype, **fields):
    """Whether the technique takes the problem; limits are tested by themselves."""
    arch = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    import triton

    from recsys_norm.ops.problem import Problem

    version = tuple(int(v) for v in triton.__version__.split(".")[:2])
    problem = Problem(
        op=op, norm="layer", M=M, K=K, N=N, N2=40, dtype=dtype, param_dtype=dtype, eps=1e-5, device="cuda", arch=arch,
        triton_version=version, **fields,
    )  # fmt: skip
    return technique.why_not(problem) is None


def shapes(op, technique, dtype, param_dtype):
    for M, K, N in SIZES[dtype, param_dtype]:
        if able(op, technique, M, K, N, dtype):
            if op != "norm_linear":  # the norm's own width
                N = max(N, 3)
            yield dict(M=M, K=K, N=N, N2=40 if N % 8 == 0 else 17)


@pytest.mark.parametrize("op,technique", TECHNIQUES, ids=IDS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype,param_dtype", SIZES)
def test_a8_sizes(op, technique, norm, dtype, param_dtype):
    for shape in shapes(op, technique, dtype, param_dtype):
        tensors = tensors_for(op, norm=norm, dtype=dtype, param_dtype=param_dtype, mean=5.0, **shape)
        if shape["K"] == 1:  # a sum of few terms that cancel
            tensors["x"] = tensors["x"].detach()
        run(op, technique, norm, tensors=tensors)


@pytest.mark.parametrize("op,technique", TECHNIQUES, ids=IDS)
@pytest.mark.parametrize("norm", NORMS)
def test_without_affine_and_bias(op, technique, norm):
    for M, K, N in ((300, 512, 512), (129, 1024, 256)):
        if able(op, technique, M, K, N, BF16):
            run(op, technique, norm, M=M, K=K, N=N, N2=40, dtype=BF16, affine=False, bias=False, scale=1e-3)


@pytest.mark.parametrize("op,technique", TECHNIQUES, ids=IDS)
def test_a12_eps_decides_small_inputs(op, technique):
    for norm in NORMS:
        for eps in (1e-5, 1e-6):
            shape = dict(M=129, K=384, N=384, N2=40, dtype=BF16, bias=False, scale=1e-3)
            run(op, technique, norm, options={"eps": eps}, **shape)


@pytest.mark.parametrize("technique", [t for op, t in TECHNIQUES if op == "linear_norm"], ids=lambda t: t.name)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("position,return_sum", [("after", False), ("before", False), ("before", True)])
def test_residual_and_returned_sum(technique, norm, position, return_sum):
    options = {"residual_position": position, "return_sum": return_sum}
    for (M, K, N), dtype in (((300, 256, 512), BF16), ((129, 384, 384), BF16), ((65, 127, 129), FP16)):
        if able("linear_norm", technique, M, K, N, dtype, residual=position, return_sum=return_sum):
            for affine in (True, False):
                shape = dict(M=M, K=K, N=N, dtype=dtype, residual=True, affine=affine)
                run("linear_norm", technique, norm, options=options, **shape)


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu2"])
def test_activation_between_two_linears(activation):
    naive = next(t for op, t in TECHNIQUES if op == "linear_norm_linear" and t.name == "naive")
    for norm in NORMS:
        shape = dict(M=300, K=128, N=384, N2=40, dtype=BF16)
        run("linear_norm_linear", naive, norm, options={"activation": activation}, **shape)


@pytest.mark.parametrize("op,technique", TECHNIQUES, ids=IDS)
@pytest.mark.parametrize("dtype,mean", [(BF16, 100.0), (FP32, 1e3), (FP32, 1e4)])
def test_a11_large_mean(op, technique, dtype, mean):
    if op != "norm_linear":
        pytest.skip("the norm of these ops sees the linear's result, not x")
    for M, K, N in ((129, 384, 384), (100, 760, 24)):
        if able(op, technique, M, K, N, dtype):
            for norm in NORMS:
                run(op, technique, norm, M=M, K=K, N=N, dtype=dtype, mean=mean)


@pytest.mark.parametrize("technique", [t for op, t in TECHNIQUES if op == "norm_linear"], ids=lambda t: t.name)
@pytest.mark.parametrize("norm", NORMS)
def test_a10_constant_rows(technique, norm):
    t = tensors_for("norm_linear", norm=norm, dtype=FP16, M=300, K=384, N=136)
    with torch.no_grad():
        for row, value in enumerate((0.0, 100.0, 65504.0, -65504.0)):
            t["x"][row] = value
        t["x"][4, ::2], t["x"][4, 1::2] = 65504.0, -65504.0
    run("norm_linear", technique, norm, tensors=t)
    if norm == "layer":
        t = on_gpu({n: p.detach() for n, p in t.items()})
        y = ops.norm_linear(**t, norm=norm, technique=registry.label(technique))
        assert torch.equal(y[:4], y[:1].expand(4, -1))


@pytest.mark.parametrize("op,technique", TECHNIQUES, ids=IDS)
def test_a7_strides_misalignment_and_expanded_gradients(op, technique):
    t = on_gpu(tensors_for(op, M=300, K=256, N=256, N2=40, dtype=BF16))
    wide = torch.randn(300, 3 * 256 + 8, device="cuda").to(BF16)
    flat = torch.randn(300 * 256 + 1, device="cuda").to(BF16)
    views = [wide[:, 256:512], wide[:, 1:257], flat[1:].view(300, 256), wide[:256, :300].t(), wide[:, : 2 * 256 : 2]]
    for view in views:
        results = []
        for x in (view, view.contiguous().clone()):
            leaves = {**t, "x": x.detach().requires_grad_()}
            y = getattr(ops, op)(**leaves, norm="layer", technique=registry.label(technique))
            wanted = {n: p for n, p in leaves.items() if p is not None}
            results.append([y, *torch.autograd.grad(y.sum(), list(wanted.values()))])
        for a, b in zip(*results):  # a misaligned view may take other tiles, which add up in another order
            assert relative_error(a, b.double(), rows=False, cancelling=1e3) < 8e-3


@pytest.mark.parametrize("op,technique", TECHNIQUES, ids=IDS)
@pytest.mark.parametrize("norm", NORMS)
def test_a18_same_bits_every_time(op, technique, norm):
    for M, K, N in ((40000, 512, 512), (40000, 1024, 256), (20000, 256, 384)):
        if not able(op, technique, M, K, N, BF16):
            continue
        t = on_gpu(tensors_for(op, norm=norm, M=M, K=K, N=N, N2=256, dtype=BF16))
        leaves = [p for p in t.values() if p is not None]
        first = None
        for _ in range(10):
            y = getattr(ops, op)(**t, norm=norm, technique=registry.label(technique))
            results = [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]
            first = first or results
            assert all(torch.equal(a, b) for a, b in zip(first, results))


def test_a26_a_thousand_clusters_give_the_same_bits():
    cluster = next(t for op, t in TECHNIQUES if t.name == "cluster")
    for N in (256, 512, 1024):
        if not able("linear_norm", cluster, 4096, 256, N, BF16):
            pytest.skip("no clusters on this device")
        t = {n: p.detach() for n, p in on_gpu(tensors_for("linear_norm", M=4096, K=256, N=N, dtype=BF16)).items()}
        first = ops.linear_norm(**t, norm="layer", technique="triton/cluster")
        for _ in range(1000):
            assert torch.equal(first, ops.linear_norm(**t, norm="layer", technique="triton/cluster"))


@pytest.mark.parametrize("norm", NORMS)
def test_a16_parameter_gradients_over_many_rows(norm):
    technique = next(t for op, t in TECHNIQUES if t.name == "lazy")
    for param_dtype in (BF16, FP32):
        run("norm_linear", technique, norm, M=131072, K=256, N=128, dtype=BF16, param_dtype=param_dtype)


@pytest.mark.parametrize("norm", NORMS)
def test_a6_more_than_2_to_the_31_elements(norm):
    M, K, N, tail = 2**31 // 512 + 1000, 512, 32, 1000
    free, _ = torch.cuda.mem_get_info()
    if free < 40 * 2**30:
        pytest.skip("needs 40 GiB of free memory")
    t = on_gpu(tensors_for("norm_linear", norm=norm, M=1, K=K, N=N, dtype=BF16))
    x = torch.randn(M, K, device="cuda", dtype=BF16)
    dy = torch.randn(M, N, device="cuda", dtype=BF16)

    def grads(rows):
        leaves = {**t, "x": x[rows].detach().requires_grad_()}
        y = ops.norm_linear(**leaves, norm=norm, technique="triton/lazy")
        wanted = [p for p in leaves.values() if p is not None]
        return y, torch.autograd.grad(y, wanted, dy[rows])

    y, (dx, dweight, *_) = grads(slice(None))
    y_tail, (dx_tail, *_) = grads(slice(M - tail, M))
    assert torch.equal(y[-tail:], y_tail) and torch.equal(dx[-tail:], dx_tail)
    total = torch.zeros(N, K, device="cuda", dtype=torch.float64)
    for start in range(0, M, 2**19):
        total += grads(slice(start, start + 2**19))[1][1].double()
    assert relative_error(dweight, total, rows=False) < 5e-3
