"""The Hopper backward of norm_attention on a GPU, behind the forward of the separate kernels: the tolerance rule over
heads, lengths, norms and residuals, and equal bits."""

import itertools

import pytest
import torch
from norm_attention_cases import LENGTHS, arguments, check_own_residual, check_slack

from recsys_norm import ops
from recsys_norm.kernels.hopper import attention_backward, launch
from recsys_norm.ops import registry
from recsys_norm.testing import check_op

ARCH = 10 * torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
pytestmark = pytest.mark.skipif(launch.why_not(ARCH) is not None, reason="needs an H100 or H200 and its driver")

POLICY = {"backend": "fused", "technique": "test/backward"}
PFFN = dict(activation="gelu_tanh", inner_residual=True)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Backward:
    name = "backward"
    provider = "test"
    adds_gradient = True

    def why_not(self, problem):
        return None if problem.dtype == FP32 else attention_backward.why_not(problem)

    def forward(self, problem, *tensors):
        from recsys_norm.kernels.norm.attention import forward

        return forward(problem, *tensors)

    def backward(self, problem, saved, grads, needs):
        return attention_backward.backward(problem, saved, grads, needs)


@pytest.fixture(scope="module", autouse=True)
def technique():
    registry.register("norm_attention", Backward())
    yield
    registry._techniques["norm_attention"] = [t for t in registry.techniques("norm_attention") if t.provider != "test"]
    registry._candidates_of.cache_clear()


def lengths(batch, longest, seed=0):
    sizes = torch.randint(0, longest + 1, (batch,), generator=torch.Generator().manual_seed(seed)).tolist()
    sizes[batch // 2], sizes[-1] = 0, longest
    return sizes


def run(queries, keys, more=None, own=True, **fields):
    t, options = arguments((queries, keys), device="cuda", **{"d": 128, "dtype": BF16} | fields)
    if own:
        t["residual"] = t["q_THd"]
    return check_op("norm_attention", t, options | PFFN | (more or {}), POLICY)


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("H", [1, 4])
def test_a4_empty_sequences(name, H):
    post = None if name.startswith("all") else "rms"  # a row that is 0 everywhere has no defined direction
    queries, keys = LENGTHS[name]
    scale = 20 if max(keys) <= 6 else 1  # of one or two tiny rows the rule knows only their rounding
    run([scale * n for n in queries], [scale * n for n in keys], H=H, pre="layer", post=post)


@pytest.mark.parametrize("H", range(1, 9))
@pytest.mark.parametrize("longest", [64, 300])
def test_a8_heads(H, longest):
    run(lengths(6, longest), lengths(6, 128, 1), H=H, pre="layer", post="rms")
    run(lengths(6, longest), [128] * 6, H=H, pre="layer", post="rms", own=False)


@pytest.mark.parametrize("pre,post", list(itertools.product([None, "rms", "layer"], repeat=2)))
def test_norms_and_residuals(pre, post):
    for dtype, inner, affine in ((BF16, True, True), (BF16, pre is None, True), (FP16, True, False)):
        run(lengths(5, 150), lengths(5, 90, 1), dict(inner_residual=inner), pre=pre, post=post, H=2, dtype=dtype,
            affine=affine, own=inner, param_dtype=FP32)  # fmt: skip


@pytest.mark.parametrize("activation", attention_backward.ACTIVATIONS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_activations(activation, dtype):
    for scale in (0.003, 0.09, 0.2 if dtype == BF16 else 0.5):  # above, PyTorch's own error in bf16 passes the cap
        more = dict(activation=activation, scale=scale)
        run(lengths(6, 300), lengths(6, 128, 1), more, H=2, dtype=dtype, pre="layer", post="rms")


def test_zeros_in_gamma_and_small_inputs():
    t, options = arguments((lengths(6, 300), lengths(6, 128)), H=4, d=128, dtype=BF16, pre="layer", post="rms",
                           residual=True, device="cuda")  # fmt: skip
    with torch.no_grad():
        t["pre_norm_weight"][::3] = 0
        t["post_norm_weight"][::2] = 0
        t["q_THd"] *= 1e-3
    check_op("norm_attention", t, options | PFFN, POLICY)


def test_a5_rows_past_the_last_offset():
    t, options = arguments((lengths(6, 300), lengths(6, 128)), H=2, d=128, dtype=BF16, pre="layer", post="rms",
                           residual=True, slack=7, device="cuda")  # fmt: skip
    check_slack(t, options | PFFN, POLICY, 7, 3e-2)


def test_own_residual():
    t, options = arguments((lengths(6, 300), lengths(6, 128)), H=4, d=128, dtype=BF16, pre="layer", post="rms",
                           device="cuda")  # fmt: skip
    check_own_residual(t, options | PFFN, POLICY, 1e-2)


def test_a7_strided_keys_and_values():
    """Slices of one tensor, as the Kunlun PFFN has them, and 64-bit offsets."""
    t, options = arguments((lengths(6, 300), [128] * 6), H=4, d=128, dtype=BF16, pre="layer", post="rms", device="cuda")
    pair = torch.stack([t["k_UHd"].detach(), t["v_UHd"].detach()], 1)
    views = {"k_UHd": pair[:, 0].requires_grad_(), "v_UHd": pair[:, 1].requires_grad_()}
    dy = torch.randn_like(t["q_THd"])
    found = []
    for tensors in (t, t | views):
        y = ops.norm_attention(**tensors, **options | PFFN, **POLICY)
        found.append(torch.autograd.grad(y, [v for v in tensors.values() if v.requires_grad], dy))
    for a, b in zip(*found):
        assert torch.equal(a, b)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_a18_a26_equal_bits(heads):
    t, options = arguments((lengths(200, 700), [128] * 200), H=heads, d=128, dtype=BF16, pre="layer", post="rms",
                           device="cuda")  # fmt: skip
    t["residual"] = t["q_THd"]
    wanted = [x for n, x in t.items() if x.requires_grad and n != "residual"]
    y = ops.norm_attention(**t, **options | PFFN | dict(scale=1 / 700), **POLICY)
    dy = torch.randn_like(t["q_THd"])
    first = torch.autograd.grad(y, wanted, dy, retain_graph=True)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        for a, b in zip(first, torch.autograd.grad(y, wanted, dy, retain_graph=True)):
            different += (a != b).sum()
    assert not different.item()
