"""What a fused norm leaves out of memory."""

import pytest
import torch

from recsys_norm import ops
from recsys_norm.ops import registry

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

M, K, N = 65536, 512, 256


def peak_bytes(norm, **how):
    """Of a forward and backward of sum(relu(norm_linear(x))^2), over what is there before."""
    g = torch.Generator("cuda").manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, device="cuda", generator=g).bfloat16().requires_grad_()

    tensors = dict(x=randn(M, K), weight=randn(N, K), bias=randn(N), norm_weight=randn(K))
    tensors["norm_bias"] = randn(K) if norm == "layer" else None
    for _ in range(2):  # the first step loads kernels
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.relu(ops.norm_linear(**tensors, norm=norm, **how)).square().sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
        for t in tensors.values():
            if t is not None:
                t.grad = None
    return peak


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("technique", ["triton/lazy", "hopper/lazy"])
def test_norm_of_x_is_never_in_memory(norm, technique):
    try:
        fused = peak_bytes(norm, technique=technique)
    except ops.UnsupportedError as error:
        pytest.skip(str(error))
    unfused = peak_bytes(norm, backend="unfused")
    assert fused <= unfused - 2 * M * K, f"{fused} bytes against {unfused}, norm(x) has {2 * M * K}"
    assert registry.counts()["norm_linear"]
