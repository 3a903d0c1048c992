"""torch.library's own checks, torch.compile and fp64 gradients of the reference."""

import pytest
import torch
from op_cases import FORCED, GEMM_OPS, tensors_for

from recsys_norm import ops, reference


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


POLICY = ("fused", "separate", "raise")


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_opcheck(norm):
    """Schema, fake kernel, autograd registration and dynamic shapes of every registered op."""
    library = torch.ops.recsys_norm
    t = tensors_for("norm", norm=norm, residual=True)
    args = (t["x"], t["weight"], t.get("bias"), t["residual"], norm, 1e-5, True, *POLICY)
    torch.library.opcheck(library.norm.default, args)
    t = tensors_for("norm_linear", norm=norm)
    torch.library.opcheck(library.norm_linear.default, (*t.values(), norm, 1e-5, True, *POLICY))
    t = tensors_for("linear_norm", norm=norm, residual=True, N=24)
    for position, return_sum, groups in (("before", True, 1), ("after", False, 3)):
        options = (norm, 1e-5, position, return_sum, groups, True, *POLICY)
        torch.library.opcheck(library.linear_norm.default, (*t.values(), *options))
    t = tensors_for("linear_norm_linear", norm=norm)
    torch.library.opcheck(library.linear_norm_linear.default, (*t.values(), norm, 1e-5, "gelu", True, *POLICY))


def call(op, tensors, **options):
    if op == "norm":
        return ops.layer_norm(**tensors, **options)
    return getattr(ops, op)(**tensors, norm="layer", **options)


@pytest.mark.parametrize("op", GEMM_OPS)
@pytest.mark.parametrize("candidate", [FORCED, {"backend": "unfused"}, {"backend": "compiled"}], ids=str)
def test_a13_compiles_without_graph_breaks(op, candidate):
    """fullgraph, forward and backward, 2-D then 4-D inputs."""
    compiled = torch.compile(lambda t: call(op, t, **candidate), fullgraph=True, backend="aot_eager")
    for shape in ((17, 24), (2, 3, 4, 24)):
        t = tensors_for(op)
        t["x"] = torch.randn(shape, requires_grad=True)
        wanted = [v for v in t.values() if v is not None]
        actual, expected = compiled(t), call(op, t, backend="unfused")
        torch.testing.assert_close(actual, expected)
        grads = torch.autograd.grad(actual.square().sum(), wanted)
        for a, b in zip(grads, torch.autograd.grad(expected.square().sum(), wanted)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_compiled_backend_runs_outside_a_graph():
    t = tensors_for("norm_linear")
    actual = ops.norm_linear(**t, norm="layer", backend="compiled")
    torch.testing.assert_close(actual, ops.norm_linear(**t, norm="layer", backend="unfused"))
    (grad,) = torch.autograd.grad(actual.sum(), t["norm_bias"])
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("op", GEMM_OPS)
def test_a14_twenty_row_counts_compile_at_most_twice(op):
    compilations = 0

    def backend(graph, inputs):
        nonlocal compilations
        compilations += 1
        return graph.forward

    function = torch.compile(lambda t: call(op, t, **FORCED), fullgraph=True, backend=backend)
    t = tensors_for(op)
    for rows in range(3, 23):
        t["x"] = torch.randn(rows, 24)
        assert function(t).shape[0] == rows
    assert compilations <= 2


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_reference_gradients_in_fp64(norm):
    def double(tensors):
        return {n: None if t is None else t.detach().double().requires_grad_() for n, t in tensors.items()}

    for op in ("norm_linear", "linear_norm", "linear_norm_linear"):
        t = double(tensors_for(op, M=3, K=4, N=5, N2=2, norm=norm))
        names = [n for n, v in t.items() if v is not None]
        options = {"activation": "gelu"} if op == "linear_norm_linear" else {}
        fixed = {n: None for n in t if n not in names}
        function = lambda *a: getattr(reference, op)(**dict(zip(names, a)), **fixed, norm=norm, **options)  # noqa: B023, E731
        assert torch.autograd.gradcheck(function, [t[n] for n in names])
