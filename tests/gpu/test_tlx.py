"""The TLX kernel on a GPU: output and gradients by the tolerance rule, equal bits of many launches."""

import importlib.util

import pytest
import torch
from op_cases import tensors_for

from recsys_norm import ops
from recsys_norm.ops import registry
from recsys_norm.testing import check_op

pytest.importorskip("triton")
if importlib.util.find_spec("triton.language.extra.tlx") is None:
    pytest.skip("needs the Triton fork fbtriton", allow_module_level=True)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TLX = dict(backend="fused", technique="tlx")


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("M,K,N", [(300, 512, 512), (1, 64, 256), (129, 256, 2048)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear_norm(norm, M, K, N, dtype):
    tensors = tensors_for("linear_norm", norm=norm, M=M, K=K, N=N, dtype=dtype)
    tensors = {n: t if t is None else t.detach().cuda().requires_grad_() for n, t in tensors.items()}
    registry.reset_counts()
    check_op("linear_norm", tensors, {"norm": norm}, TLX)
    assert set(registry.counts()["linear_norm"]) == {"tlx (tlx)", "unfused"}


def test_a26_a_thousand_launches_give_equal_bits():
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(20_000, 512, generator=g, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(512, 512, generator=g, device="cuda", dtype=torch.bfloat16)
    first = ops.linear_norm(x, weight, norm="layer", **TLX)
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        same &= (ops.linear_norm(x, weight, norm="layer", **TLX) == first).all()
    assert bool(same)
