"""Modules: torch.nn's numbers and keys, whatever the backend."""

import pytest
import torch

from recsys_norm import nn, ops, reference

FALLBACK = dict(backend="fused", on_unsupported="fallback")
pytestmark = pytest.mark.filterwarnings("ignore:.*cannot run")


def same_state(build):
    torch.manual_seed(0)
    a = build(backend="unfused")
    torch.manual_seed(0)
    b = build(**FALLBACK)
    assert list(a.state_dict()) == list(b.state_dict())
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))
    return a, b


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_norms_are_torchs(name):
    mine, torchs = getattr(nn, name)(24, **FALLBACK), getattr(torch.nn, name)(24)
    assert list(mine.state_dict()) == list(torchs.state_dict())
    x, residual = torch.randn(2, 3, 24), torch.randn(2, 3, 24)
    torch.testing.assert_close(mine(x), torchs(x))
    y, z = mine(x, residual, return_sum=True)
    torch.testing.assert_close(z, x + residual)
    torch.testing.assert_close(y, torchs(x + residual))
    with pytest.raises(ValueError, match="last dimension"):
        getattr(nn, name)((3, 24))


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_fused_linears(norm):
    x = torch.randn(2, 5, 16)
    gamma = {"rms": ["norm_weight"], "layer": ["norm_weight", "norm_bias"]}[norm]

    a, b = same_state(lambda **policy: nn.NormLinear(16, 12, norm=norm, **policy))
    assert list(a.state_dict()) == ["weight", "bias", *gamma]
    torch.testing.assert_close(a(x), b(x))
    torch.testing.assert_close(a(x), reference.norm_linear(x, norm=norm, **a.state_dict()))

    residual = torch.randn(2, 5, 12)
    for position in ("before", "after"):
        build = lambda **policy: nn.LinearNorm(16, 12, norm=norm, residual_position=position, **policy)  # noqa: B023, E731
        a, b = same_state(build)
        assert list(a.state_dict()) == ["weight", "bias", *gamma]
        torch.testing.assert_close(a(x, residual), b(x, residual))
    y, z = nn.LinearNorm(16, 12, norm=norm, residual_position="before", **FALLBACK)(x, residual, return_sum=True)
    assert y.shape == z.shape == residual.shape

    a, b = same_state(lambda **policy: nn.LinearNormLinear(16, 20, 12, norm=norm, activation="gelu", **policy))
    assert list(a.state_dict()) == ["weight1", "bias1", "weight2", "bias2", *gamma]
    torch.testing.assert_close(a(x), b(x))


def test_linears_start_as_torchs():
    torch.manual_seed(3)
    mine = nn.NormLinear(16, 12, norm="rms")
    torch.manual_seed(3)
    torchs = torch.nn.Linear(16, 12)
    assert torch.equal(mine.weight, torchs.weight) and torch.equal(mine.bias, torchs.bias)


def test_without_bias_and_affine():
    module = nn.LinearNormLinear(8, 8, 8, bias=False, norm="layer", norm_affine=False, **FALLBACK)
    assert list(module.state_dict()) == ["weight1", "weight2"]
    assert module(torch.randn(3, 8)).shape == (3, 8)


@pytest.mark.parametrize("scope", ["all_heads", "head"])
def test_norm_attention(scope):
    H, d = 2, 8
    options = dict(pre_norm="layer", pre_norm_scope=scope, post_norm="rms", inner_residual=True, scale=0.25)
    a, b = same_state(lambda **policy: nn.NormAttention(H, d, **options, **policy))
    assert list(a.state_dict()) == ["pre_norm_weight", "pre_norm_bias", "post_norm_weight"]
    assert a.pre_norm_weight.shape == (d if scope == "head" else H * d,)
    q, k, v = torch.randn(9, H, d), torch.randn(6, H, d), torch.randn(6, H, d)
    qo, ko = torch.tensor([0, 4, 4, 9]), torch.tensor([0, 3, 5, 6])
    lengths = dict(max_q_len=5, max_k_len=3)
    expected = ops.norm_attention(
        q, k, v, qo, ko, **lengths, backend="unfused", residual=q, **options, **a.state_dict()
    )
    torch.testing.assert_close(a(q, k, v, qo, ko, **lengths, residual=q), expected)
    torch.testing.assert_close(b(q, k, v, qo, ko, **lengths, residual=q), expected)


def test_bad_policy_is_refused_when_built():
    with pytest.raises(ValueError, match="backend='quick'"):
        nn.NormLinear(8, 8, norm="rms", backend="quick")
    with pytest.raises(ValueError, match="norm='batch'"):
        nn.NormLinear(8, 8, norm="batch")


@pytest.mark.parametrize(
    "norm", [torch.nn.RMSNorm(20), torch.nn.LayerNorm(20, eps=1e-3), torch.nn.LayerNorm(20, bias=False)]
)
def test_from_modules_share_parameters(norm):
    before, after = torch.nn.Linear(20, 12, bias=False), torch.nn.Linear(16, 20)
    act = torch.nn.GELU(approximate="tanh")
    x, y = torch.randn(3, 20), torch.randn(3, 16)
    chains = {
        nn.NormLinear.from_modules(norm, before, **FALLBACK): (x, (norm, before)),
        nn.LinearNorm.from_modules(after, norm, **FALLBACK): (y, (after, norm)),
        nn.LinearNormLinear.from_modules(after, norm, before, act, **FALLBACK): (y, (after, norm, act, before)),
        nn.LinearNormLinear.from_modules(after, norm, before, "relu", **FALLBACK).eval(): (
            y, (after, norm, torch.nn.ReLU(), before),
        ),
    }  # fmt: skip
    for fused, (value, modules) in chains.items():
        torch.testing.assert_close(fused(value), torch.nn.Sequential(*modules)(value))
        shared = {id(p) for module in modules for p in module.parameters()}
        assert {id(p) for p in fused.parameters()} == shared
        assert fused.eps == norm.eps
    norm.eval()
    assert not nn.NormLinear.from_modules(norm, before, **FALLBACK).training
    norm.train()


def test_from_modules_names_what_does_not_fit():
    linear, norm = torch.nn.Linear(8, 16), torch.nn.LayerNorm(8)
    with pytest.raises(
        TypeError, match="norm, linear in this order; got Linear in place of nn.LayerNorm or nn.RMSNorm"
    ):
        nn.NormLinear.from_modules(linear, norm)
    with pytest.raises(ValueError, match="Linear gives 16 features and LayerNorm takes 8"):
        nn.LinearNorm.from_modules(linear, norm)
    with pytest.raises(ValueError, match=r"LayerNorm over \(4, 8\) has more than one dimension"):
        nn.NormLinear.from_modules(torch.nn.LayerNorm((4, 8)), linear)
    with pytest.raises(TypeError, match="no op has the activation Tanh"):
        nn.LinearNormLinear.from_modules(linear, torch.nn.RMSNorm(16), torch.nn.Linear(16, 2), torch.nn.Tanh())
