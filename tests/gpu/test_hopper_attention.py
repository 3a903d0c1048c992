"""FlashNormAttention on Hopper: the tolerance rule over heads, lengths, norms, activations and residuals; equal bits."""

import itertools

import pytest
import torch
from norm_attention_cases import LENGTHS, arguments, check_slack

from recsys_norm import ops
from recsys_norm.kernels.hopper import launch
from recsys_norm.ops import registry
from recsys_norm.testing import check_op

ARCH = 10 * torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
pytestmark = pytest.mark.skipif(launch.why_not(ARCH) is not None, reason="needs an H100 or H200")

POLICY = {"backend": "fused", "technique": "hopper/flashnorm"}
PFFN = dict(activation="gelu_tanh", inner_residual=True)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def lengths(batch, longest, seed=0):
    sizes = torch.randint(0, longest + 1, (batch,), generator=torch.Generator().manual_seed(seed)).tolist()
    sizes[batch // 2], sizes[-1] = 0, longest
    return sizes


def run(queries, keys, more=None, *, own=False, edit=None, backward=False, **fields):
    """`own`: the outer residual is q itself."""
    values = dict(H=4, d=128, dtype=BF16, pre="layer", post="rms", device="cuda")
    t, options = arguments((queries, keys), **values | fields)
    if own:
        t["residual"] = t["q_THd"]
    if edit is not None:
        with torch.no_grad():
            edit(t)
    registry.reset_counts()
    check_op("norm_attention", t, options | PFFN | (more or {}), POLICY, backward=backward)
    if sum(queries):  # without a row there is nothing to launch
        assert registry.counts()["norm_attention"]["flashnorm (hopper)"] >= 1


@pytest.mark.parametrize("name", LENGTHS)
def test_a4_empty_sequences(name):
    post = None if name.startswith("all") else "rms"  # a row that is 0 everywhere has no defined direction
    queries, keys = LENGTHS[name]
    run([20 * n for n in queries], [min(20 * n, 128) for n in keys], post=post, residual=True, backward=True)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("H", [1, 2, 3, 4, 8])
def test_a8_heads(H, dtype):
    run(lengths(9, 500), lengths(9, 128, 1), H=H, dtype=dtype, own=True)
    run(lengths(9, 500), [128] * 9, dict(scale=1 / 500), H=H, dtype=dtype, residual=True, backward=H == 4)


@pytest.mark.parametrize("pre,post", list(itertools.product([None, "rms", "layer"], repeat=2)))
@pytest.mark.parametrize("scope", ["all_heads", "head"])
def test_norms_and_residuals(pre, post, scope):
    norms = dict(pre=pre, post=post, scope=scope, H=2)
    run(lengths(5, 150), lengths(5, 90, 1), **norms, residual=True)
    run(lengths(5, 150), lengths(5, 90, 1), dict(inner_residual=False), **norms, own=True, dtype=FP16, param_dtype=FP32)
    run(lengths(5, 150), lengths(5, 90, 1), **norms, affine=False)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "activation",
    ["identity", "relu", "relu2", "leaky_relu", "gelu", "silu", "hardswish", ("gelu", "relu", "silu", "gelu_tanh")],
)
def test_activations(activation, dtype):
    for scale in (1.0, 1 / 300):
        run(lengths(6, 300), lengths(6, 128, 1), dict(activation=activation, scale=scale), own=True, dtype=dtype)


@pytest.mark.parametrize("on", ["k", "qk"])
def test_norm_of_keys(on):
    run(lengths(5, 150), lengths(5, 90, 1), on=on, post="layer")


def test_zeros_in_gamma_and_small_inputs():
    def edit(t):
        t["pre_norm_weight"][::3] = 0
        t["post_norm_weight"][::2] = 0
        t["q_THd"] *= 1e-3

    run(lengths(6, 300), lengths(6, 128), own=True, edit=edit)


def test_large_means_and_constant_rows():
    def edit(t):
        t["q_THd"] += 100
        t["q_THd"][::7] = 5

    run(lengths(6, 300), lengths(6, 128), residual=True, edit=edit)


def test_keys_and_values_of_one_projection():
    t, options = arguments((lengths(6, 300), [128] * 6), H=4, d=128, dtype=BF16, pre="layer", post="rms", device="cuda")
    both = torch.stack([t["k_UHd"].detach(), t["v_UHd"].detach()], dim=1)
    t["k_UHd"], t["v_UHd"] = both[:, 0].requires_grad_(), both[:, 1].requires_grad_()
    offsets = {n: v.int() for n, v in t.items() if "offsets" in n}
    check_op("norm_attention", t | offsets, options | PFFN, POLICY)


def test_many_short_sequences():
    run(lengths(3000, 5), lengths(3000, 128, 1), own=True)


def test_a5_rows_past_the_last_offset():
    t, options = arguments((lengths(6, 300), lengths(6, 128)), H=2, d=128, dtype=BF16, pre="layer", post="rms",
                           residual=True, slack=70, device="cuda")  # fmt: skip
    check_slack(t, options | PFFN, POLICY, 70, 3e-2)


@pytest.mark.parametrize("heads", [1, 4, 8])
def test_a18_a26_equal_bits(heads):
    t, options = arguments((lengths(200, 700), [128] * 200), H=heads, d=128, dtype=BF16, pre="layer", post="rms",
                           device="cuda")  # fmt: skip
    t["residual"] = t["q_THd"]
    with torch.no_grad():
        first = ops.norm_attention(**t, **options | PFFN, **POLICY)
        for _ in range(100):
            assert torch.equal(first, ops.norm_attention(**t, **options | PFFN, **POLICY))


def test_a_captured_graph_gives_equal_bits():
    t, options = arguments((lengths(60, 700), [128] * 60), H=4, d=128, dtype=BF16, pre="layer", post="rms",
                           residual=True, device="cuda")  # fmt: skip
    with torch.no_grad():
        expected = ops.norm_attention(**t, **options | PFFN, **POLICY)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ops.norm_attention(**t, **options | PFFN, **POLICY)
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, expected)
