"""The Helion kernels on a GPU: outputs and gradients by the tolerance rule, equal bits of two runs."""

import pytest
import torch
from op_cases import tensors_for

from recsys_norm import ops
from recsys_norm.ops import registry
from recsys_norm.testing import check_op

pytest.importorskip("helion")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HELION = dict(backend="fused", technique="helion")


def run(op, norm, options=None, **case):
    tensors = tensors_for(op, norm=norm, **case)
    tensors = {n: t if t is None else t.detach().cuda().requires_grad_(t.requires_grad) for n, t in tensors.items()}
    registry.reset_counts()
    check_op(op, tensors, {"norm": norm, **(options or {})}, HELION)
    assert set(registry.counts()[op]) == {"helion (helion)", "unfused"}


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("M,K,N", [(300, 512, 512), (129, 200, 72), (1, 64, 256)])
def test_norm_linear(norm, M, K, N):
    run("norm_linear", norm, M=M, K=K, N=N, dtype=BF16, param_dtype=FP32, mean=5.0)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("M,K,N", [(300, 512, 512), (129, 200, 128)])
def test_linear_norm(norm, M, K, N):
    run("linear_norm", norm, M=M, K=K, N=N, dtype=BF16)


def test_linear_norm_with_a_residual():
    before = dict(residual_position="before", return_sum=True)
    run("linear_norm", "layer", before, M=100, K=64, N=128, dtype=FP16, residual=True)
    run("linear_norm", "rms", dict(residual_position="after"), M=100, K=64, N=128, dtype=BF16, residual=True)


def test_without_affine_and_bias():
    run("norm_linear", "layer", M=100, K=256, N=128, dtype=BF16, affine=False, bias=False)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_two_runs_give_equal_bits(norm):
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(65536, 512, generator=g, device="cuda", dtype=BF16)
    weight = torch.randn(512, 512, generator=g, device="cuda", dtype=BF16)
    first = ops.norm_linear(x, weight, norm=norm, **HELION)
    for _ in range(20):
        assert torch.equal(ops.norm_linear(x, weight, norm=norm, **HELION), first)
