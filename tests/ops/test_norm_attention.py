"""norm_attention: the public function against the fp64 reference."""

import itertools

import pytest
import torch
from op_cases import FORCED

from recsys_norm import ops
from recsys_norm.testing import check_op

H, D = 2, 8
LENGTHS = {
    "ragged": ([3, 1, 5], [2, 4, 1]),
    "empty first": ([0, 0, 5, 4], [2, 3, 0, 4]),
    "empty last": ([4, 0], [3, 5]),
    "all queries empty": ([0, 0], [3, 2]),
    "all keys empty": ([3, 2], [0, 0]),
    "more keys": ([3, 1, 5], [4, 6, 5]),
    "length one": ([1, 1, 1], [1, 1, 1]),
}


def arguments(lengths="ragged", *, dtype=torch.float32, pre=None, post=None, scope="all_heads", on="q", affine=True,
              residual=False, slack=0, seed=0):  # fmt: skip
    g = torch.Generator().manual_seed(seed)

    def randn(*shape, mean=0.0):
        return (torch.randn(shape, generator=g) + mean).to(dtype).requires_grad_()

    q_len, k_len = LENGTHS[lengths]
    T, U = sum(q_len) + slack, sum(k_len) + slack
    t = {"q_THd": randn(T, H, D, mean=0.5), "k_UHd": randn(U, H, D), "v_UHd": randn(U, H, D)}
    offsets = [torch.tensor([0, *itertools.accumulate(n)]) for n in (q_len, k_len)]
    t["q_offsets_B1"], t["k_offsets_B1"] = offsets
    width = D if scope == "head" else H * D
    for side, norm, w in (("pre", pre, width), ("post", post, H * D)):
        if norm and affine:
            t[f"{side}_norm_weight"] = randn(w, mean=1.0)
            if norm == "layer":
                t[f"{side}_norm_bias"] = randn(w)
    if residual:
        t["residual"] = randn(T, H, D)
    options = dict(max_q_len=max(*q_len, 1), max_k_len=max(*k_len, 1), pre_norm=pre, post_norm=post)
    return t, options | dict(pre_norm_scope=scope, pre_norm_on=on)


CANDIDATES = [FORCED, {"backend": "unfused"}, {"backend": "unfused", "attention": "eager"}]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("candidate", CANDIDATES, ids=["separate", "unfused", "eager"])
def test_a4_lengths(lengths, candidate):
    if "empty" in lengths and lengths.startswith("all"):
        t, options = arguments(lengths, pre="layer", post=None, residual=True)
    else:
        t, options = arguments(lengths, pre="layer", post="rms", residual=True)
    check_op("norm_attention", t, options | dict(scale=0.3, inner_residual=True), candidate)


@pytest.mark.parametrize("pre,post", itertools.product([None, "rms", "layer"], repeat=2))
@pytest.mark.parametrize("affine", [True, False])
def test_norms(pre, post, affine):
    t, options = arguments(pre=pre, post=post, affine=affine, residual=affine)
    check_op("norm_attention", t, options | dict(scale=0.5), FORCED)
    check_op("norm_attention", t, options | dict(scale=0.5, inner_residual=True, activation=("gelu", "silu")), FORCED)


@pytest.mark.parametrize("on", ["q", "k", "qk"])
@pytest.mark.parametrize("scope", ["all_heads", "head"])
def test_sides_and_scopes(on, scope):
    t, options = arguments(pre="layer", scope=scope, on=on)
    check_op("norm_attention", t, options, FORCED)
    # rms: a softmax does not see the shift that a bias adds to every key, so that gradient is 0
    t, options = arguments("more keys", pre="rms", scope=scope, on=on)
    check_op("norm_attention", t, options | dict(softmax=True), FORCED)
    check_op("norm_attention", t, options | dict(softmax=True, window=2), FORCED)


def test_causal_softmax():
    t, options = arguments("more keys", pre="layer", post="rms", residual=True)
    check_op("norm_attention", t, options | dict(softmax=True, causal=True, window=3), FORCED)


def test_separate_parameters_for_q_and_k():
    t, options = arguments(pre="rms", scope="head", on="qk")
    weight = t.pop("pre_norm_weight").detach()
    pair = (weight, 2 * weight)
    y = ops.norm_attention(**t, **options, pre_norm_weight=pair, technique="separate")
    torch.testing.assert_close(y, ops.norm_attention(**t, **options, pre_norm_weight=pair, backend="unfused"))
    shared = ops.norm_attention(**t, **options, pre_norm_weight=weight, backend="unfused")
    assert not torch.allclose(y, shared)


def test_the_scale_sits_inside_the_activation():
    t, options = arguments()
    inside = ops.norm_attention(**t, **options, scale=0.1, technique="separate")
    outside = 0.1 * ops.norm_attention(**t, **options, scale=1.0, technique="separate")
    assert not torch.allclose(inside, outside, rtol=0.05)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=["separate", "unfused", "eager"])
def test_a5_rows_past_the_last_offset(candidate):
    """NaN in the slack rows of every input reaches neither output nor gradients, and their own gradients are 0."""
    t, options = arguments(pre="layer", post="rms", residual=True, slack=3)
    options |= dict(inner_residual=True, scale=0.5)
    with torch.no_grad():
        for name in ("q_THd", "k_UHd", "v_UHd", "residual"):
            t[name][-3:] = float("nan")
    y = ops.norm_attention(**t, **options, **candidate)
    wanted = {n: v for n, v in t.items() if v.requires_grad}
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    grads = dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), dy)))
    assert torch.equal(y[-3:], torch.zeros(3, H, D))
    cut = {n: v.detach()[:-3].requires_grad_() if v.dim() == 3 else v for n, v in t.items()}
    expected = ops.norm_attention(**cut, **options, backend="unfused")
    torch.testing.assert_close(y[:-3], expected)
    again = torch.autograd.grad(expected, [cut[n] for n in wanted], dy[:-3])
    for (name, grad), right in zip(grads.items(), again):
        if grad.dim() == 3:
            assert torch.equal(grad[-3:], torch.zeros(3, H, D)), name
            grad = grad[:-3]
        torch.testing.assert_close(grad, right, msg=name)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=["separate", "unfused", "eager"])
def test_a13_a14_compiles_once_for_all_lengths(candidate):
    torch._dynamo.reset()
    compilations = 0

    def backend(graph, inputs):
        nonlocal compilations
        compilations += 1
        return graph.forward

    @torch.compile(fullgraph=True, backend=backend)
    def function(t):
        return ops.norm_attention(
            **t,
            max_q_len=8,
            max_k_len=8,
            pre_norm="layer",
            post_norm="rms",
            inner_residual=True,
            packed=True,
            **candidate,
        )

    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        t, options = arguments(pre="layer", post="rms")
        q_len, k_len = torch.randint(0, 8, (2, 5), generator=g)
        q_len[0] = k_len[0] = 2
        for name, lengths in (("q", q_len), ("k", k_len)):
            t[f"{name}_offsets_B1"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        t["q_THd"] = torch.randn(int(q_len.sum()), H, D, requires_grad=True)
        t["k_UHd"], t["v_UHd"] = (torch.randn(int(k_len.sum()), H, D, requires_grad=True) for _ in range(2))
        y = function(t)
        more = dict(max_q_len=8, max_k_len=8, pre_norm="layer", post_norm="rms", inner_residual=True)
        torch.testing.assert_close(y, ops.norm_attention(**t, **more, backend="unfused"))
        y.sum().backward()
    assert compilations <= 2


def test_opcheck():
    t, options = arguments(pre="layer", post="rms", residual=True)
    policy = ("fused", "separate", "raise")
    parameters = (t["pre_norm_weight"], t["pre_norm_bias"], None, None, t["post_norm_weight"], None)
    tensors = [t[n] for n in ("q_THd", "k_UHd", "v_UHd", "q_offsets_B1", "k_offsets_B1")]
    spec = (5, 4, "gelu", False, 0.5, False, None, "layer", "q", "all_heads", "rms", True)
    args = (*tensors, *parameters, t["residual"], *spec, 1e-5, False, True, False, *policy)
    torch.library.opcheck(torch.ops.recsys_norm.norm_attention.default, args)
    own = (*tensors, *parameters, None, *spec, 1e-5, False, True, True, *policy)
    torch.library.opcheck(torch.ops.recsys_norm.norm_attention.default, own)


def test_a20_frozen_inputs():
    t, options = arguments(pre="layer", post="rms", residual=True)
    names = [n for n, v in t.items() if v.requires_grad]

    def gradients(live):
        used = {n: v.detach().requires_grad_(n in live) if v.is_floating_point() else v for n, v in t.items()}
        y = ops.norm_attention(**used, **options, technique="separate")
        return dict(zip(live, torch.autograd.grad(y.square().sum(), [used[n] for n in live])))

    everything = gradients(names)
    for name in names:
        torch.testing.assert_close(gradients([name])[name], everything[name])


@pytest.mark.parametrize(
    "change,error,words",
    [
        (dict(activation="swish"), ValueError, ["swish", "silu"]),
        (dict(activation=("gelu", "gelu", "gelu")), ValueError, ["3 names", "2 heads"]),
        (dict(pre_norm_on="v"), ValueError, ["pre_norm_on='v'"]),
        (dict(pre_norm_scope="token"), ValueError, ["pre_norm_scope='token'"]),
        (dict(pre_norm_weight=torch.ones(16)), ValueError, ["without pre_norm"]),
        (dict(pre_norm="rms", pre_norm_weight=torch.ones(8)), ValueError, ["(8,)", "(16,)"]),
        (dict(post_norm="rms", post_norm_bias=torch.ones(16)), ValueError, ["norm_bias"]),
        (dict(q_offsets_B1=torch.tensor([0.0, 9.0])), ValueError, ["q_offsets", "float32"]),
        (dict(q_offsets_B1=torch.tensor([0, 9])), ValueError, ["1 sequences", "3"]),
        (dict(k_UHd=torch.ones(7, 3, 8)), ValueError, ["(7, 3, 8)"]),
        (dict(v_UHd=torch.ones(7, 2, 8).half()), TypeError, ["v is torch.float16"]),
    ],
)
def test_bad_input_is_one_error_that_names_it(change, error, words):
    t, options = arguments()
    with pytest.raises(error) as caught:
        ops.norm_attention(**(t | options | change))
    assert all(word in str(caught.value) for word in words), str(caught.value)
