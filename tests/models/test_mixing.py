"""Linear maps over tokens: the product written behind other tokens is what torch.cat of it gives."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from recsys_norm.models.mixing import mix, mix_behind


def tensors(dtype=torch.float64, B=3, k=2, m=5, n=4, D=6):
    torch.manual_seed(0)
    shapes = ((B, k, D), (m, n), (B, n, D))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def stacked(first, weight, x):
    return torch.cat([first, mix(weight, x)], 1)


@pytest.mark.parametrize("sizes", [{}, dict(k=0), dict(B=1), dict(B=0), dict(m=1, n=1)], ids=str)
@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False), (True, False, False)], ids=str)
def test_it_is_the_stack(sizes, needs):
    given = [t.detach().requires_grad_(need) for t, need in zip(tensors(**sizes), needs)]
    result, wanted = mix_behind(*given), stacked(*given)
    cotangent = torch.randn_like(wanted)
    leaves = [t for t in given if t.requires_grad]
    found, expected = (torch.autograd.grad(y, leaves, cotangent) for y in (result, wanted))
    torch.testing.assert_close([result, *found], [wanted, *expected])
    assert result.is_contiguous()


def test_numerical_gradients():
    assert torch.autograd.gradcheck(mix_behind, tensors())


def test_views_of_any_stride():
    first, weight, x = (t.detach() for t in tensors())
    wide = torch.stack([first, first], 3)[..., 1]
    torch.testing.assert_close(
        mix_behind(wide, weight.t().contiguous().t(), x.transpose(1, 2).contiguous().transpose(1, 2)),
        stacked(first, weight, x),
    )


def test_the_weight_takes_the_dtype_of_the_tokens():
    first, weight, x = (t.detach().float() for t in tensors())
    result = mix_behind(first.bfloat16(), weight, x.bfloat16())
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, stacked(first.bfloat16(), weight, x.bfloat16()))


def test_one_node_of_a_graph():
    torch.library.opcheck(torch.ops.recsys_norm.mix_behind.default, tensors(torch.float32))
    compiled = torch.compile(mix_behind, backend="aot_eager", fullgraph=True)
    given = tensors()
    torch.testing.assert_close(compiled(*given), stacked(*given))


def test_flops_are_those_of_the_product():
    given = tensors()
    with FlopCounterMode(display=False) as found:
        mix_behind(*given).sum().backward()
    with FlopCounterMode(display=False) as wanted:
        stacked(*given).sum().backward()
    assert found.get_total_flops() == wanted.get_total_flops() > 0
