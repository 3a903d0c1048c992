"""Fused norms in models that were written without them."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import recsys_norm
from recsys_norm.conversion import swaps
from recsys_norm.ops import registry


class Attention(nn.Module):
    """As in timm: one linear for q, k and v."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        B, S, C = x.shape
        q, k, v = self.qkv(x).reshape(B, S, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        o = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(o.transpose(1, 2).reshape(B, S, C))


class Block(nn.Module):
    """A pre-norm block with submodules for attention and feed-forward network."""

    def __init__(self, width=16, norm=nn.LayerNorm):
        super().__init__()
        self.norm1, self.attn, self.norm2 = norm(width), Attention(width, 2), norm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gated(nn.Module):
    """An HSTU-like unit: norm, one linear for four parts, pointwise attention, norm, gate, linear."""

    def __init__(self, width=16):
        super().__init__()
        self.norm_in, self.uvqk = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.norm_out, self.out = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        u, v, q, k = nn.functional.silu(self.uvqk(self.norm_in(x))).chunk(4, -1)
        o = nn.functional.silu(q @ k.transpose(-1, -2)) @ v / x.shape[-2]
        return x + self.out(self.norm_out(o) * u)


class HouseRMSNorm(nn.Module):
    """As in Hugging Face's models: its own name for eps, weight applied after the cast."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-3

    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class HouseLayerNorm(nn.LayerNorm):
    """As in timm: a subclass with a forward of its own."""

    def forward(self, x):
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class ShiftedRMSNorm(HouseRMSNorm):
    """As in Gemma: the weight is stored minus one."""

    def forward(self, hidden_states):
        x = hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (1 + self.weight) * x


class GatedRMSNorm(HouseRMSNorm):
    """A norm that takes one more argument, where it is given."""

    def forward(self, hidden_states, gate=None):
        y = super().forward(hidden_states)
        return y if gate is None else y * torch.sigmoid(gate)


class Branching(nn.Module):
    """What torch.fx cannot follow, around something that it can."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = Block(), nn.RMSNorm(16)

    def forward(self, x):
        x = self.inner(x)
        return self.norm(x) if x.sum() > -1e30 else x


def mlp():
    return nn.Sequential(
        nn.Linear(16, 24),
        nn.LayerNorm(24),
        nn.ReLU(),
        nn.Linear(24, 20),
        nn.RMSNorm(20, eps=1e-3),
        nn.Tanh(),
        nn.Linear(20, 16),
    )


def encoder(**options):
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=False)


MODELS = {
    "block": Block,
    "rms block": lambda: Block(norm=nn.RMSNorm),
    "house block": lambda: Block(norm=HouseRMSNorm),
    "subclass block": lambda: Block(norm=HouseLayerNorm),
    "gated": Gated,
    "branching": Branching,
    "mlp": mlp,
    "pre-norm": lambda: encoder(norm_first=True, activation="gelu"),
    "post-norm": lambda: encoder(norm_first=False, bias=False),
    "sequence first": lambda: nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0),
}
KINDS = {
    "block": {"norm_linear": 2},
    "rms block": {"norm_linear": 2},
    "house block": {"norm_linear": 2},
    "subclass block": {"norm_linear": 2},
    "gated": {"norm_linear": 1, "norm": 1},
    "branching": {"norm_linear": 2, "norm": 1},
    "mlp": {"linear_norm_linear": 1, "linear_norm": 0},
    "pre-norm": {"transformer encoder layer": 2, "norm": 1},
    "post-norm": {"transformer encoder layer": 2, "norm": 1},
    "sequence first": {"transformer encoder layer": 1},
}


def made(name, seed=0):
    torch.manual_seed(seed)
    model = MODELS[name]()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:  # or a wrong weight or bias of a norm would not show
                p.add_(0.3 * torch.randn_like(p))
    return model


def results(model, x, *args, **kwargs):
    x = x.clone().requires_grad_()
    y = model(x, *args, **kwargs)
    wanted = [x, *model.parameters()]
    return [y, *torch.autograd.grad((y * torch.linspace(0.5, 2, y.shape[-1])).sum(), wanted)]


def assert_same(a, b):
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_same_results_parameters_and_keys(name):
    model = made(name)
    x = torch.randn(3, 5, 16)
    before, keys, classes = results(model, x), list(model.state_dict()), [type(m) for m in model.modules()]
    parameters = list(model.parameters())
    registry.reset_counts()
    with pytest.warns(UserWarning, match="CUDA"):  # on a CPU a counted fallback
        report = recsys_norm.convert(model)
        assert_same(results(model, x), before)
    assert report and registry.counts()
    kinds = [kind for kind, _ in report.replaced]
    assert {kind: kinds.count(kind) for kind in KINDS[name]} == KINDS[name]
    assert list(model.state_dict()) == keys and all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(isinstance(m, c) for m, c in zip(model.modules(), classes, strict=True))
    again = recsys_norm.convert(model)
    assert not again and "nothing replaced" in str(again)
    assert recsys_norm.revert(model) and [type(m) for m in model.modules()] == classes
    assert_same(results(model, x), before)
    assert not recsys_norm.revert(model)


@pytest.mark.parametrize("name", ["mlp", "block", "house block", "subclass block", "post-norm"])
def test_copies_and_pickles_are_converted_models_of_their_own(name):
    model, x = made(name), torch.randn(2, 5, 16)
    recsys_norm.convert(model, "unfused")
    expected = results(model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
        assert_same(results(other, x), expected)
        assert not recsys_norm.convert(other)
        with torch.no_grad():
            for p in model.parameters():
                p.div_(1.5)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain = made(name, seed=1)
    plain.load_state_dict(torch.load(file))
    assert_same(results(plain, x), expected)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_masks_of_an_encoder_layer(norm_first, batch_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
    x = torch.randn(3, 5, 16) if batch_first else torch.randn(5, 3, 16)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    cases = [
        dict(src_key_padding_mask=padding),
        dict(src_mask=causal, is_causal=True),
        dict(src_mask=causal, src_key_padding_mask=torch.zeros(3, 5).masked_fill(padding, float("-inf"))),
        dict(src_mask=torch.randn(6, 5, 5)),
        dict(src_mask=torch.rand(5, 5) > 2),
    ]
    expected = [results(layer, x, **case) for case in cases]
    one = results(layer, x[0] if batch_first else x[:, 0])
    recsys_norm.convert(layer, "unfused")
    for case, values in zip(cases, expected):
        assert_same(results(layer, x, **case), values)
    assert_same(results(layer, x[0] if batch_first else x[:, 0]), one)


def test_dropout_of_an_encoder_layer():
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.5, batch_first=True)
    x = torch.randn(64, 5, 16)
    recsys_norm.convert(layer, "unfused")
    assert not torch.equal(layer(x), layer(x))
    fused = layer.eval()(x)
    recsys_norm.revert(layer)
    torch.testing.assert_close(fused, layer(x), rtol=1e-4, atol=1e-5)


def test_float64_and_nested_tensors_go_the_old_way():
    model = made("mlp").double()
    x = torch.randn(3, 16, dtype=torch.float64)
    expected = results(model, x)
    recsys_norm.convert(model)
    for a, b in zip(results(model, x), expected, strict=True):
        assert torch.equal(a, b)


def test_what_is_left_and_why():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear, self.wide = nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm((4, 8))

        def forward(self, x):
            return self.wide(self.linear(self.norm(self.linear(self.norm(x)))))

    model = Shared()
    report = recsys_norm.convert(model, "unfused")
    assert report.replaced == [("norm", ("norm",))]
    assert "more than once" in report.left["norm"] and "2 dimensions" in report.left["wide"]
    hooked = made("mlp")
    seen = []
    hooked[1].register_forward_hook(lambda module, args, output: seen.append(output.std()))
    report = recsys_norm.convert(hooked, "unfused")
    assert "hooks" in str(report) and "linear_norm_linear" not in str(report)
    hooked(torch.randn(64, 16) * 100)
    assert float(seen[0].detach()) == pytest.approx(1.0, abs=0.2)  # the hook still sees the norm's output


def test_a_norm_that_computes_something_else_is_left_and_named():
    model = nn.Sequential(nn.Linear(16, 16), ShiftedRMSNorm(16), nn.Linear(16, 4))
    x = torch.randn(3, 16)
    expected, state = model(x), torch.get_rng_state()
    report = recsys_norm.convert(model, "unfused")
    assert not report and report.left == {"1": "ShiftedRMSNorm does not compute what nn.LayerNorm or nn.RMSNorm does"}
    assert torch.equal(model(x), expected) and type(model[1]) is ShiftedRMSNorm
    assert torch.equal(torch.get_rng_state(), state)


def test_more_arguments_of_a_norm_go_the_old_way():
    norm = GatedRMSNorm(16)
    x, gate = torch.randn(3, 16), torch.randn(3, 16)
    expected = norm(x), norm(x, gate), norm(x, gate=gate)
    assert recsys_norm.convert(norm, "unfused").replaced == [("norm", ("",))]
    assert_same([norm(x), norm(x, gate), norm(x, gate=gate)], expected)


def test_models_of_a_library_with_norms_of_its_own():
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    x = torch.randn(1, 3, 224, 224)
    expected = model.eval()(x)
    report = recsys_norm.convert(model, "unfused")
    assert [kind for kind, _ in report.replaced] == ["norm_linear", "norm_linear", "norm"] and not report.left
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mlp", "block", "pre-norm", "post-norm"])
def test_small_inputs_on_a_gpu_go_the_old_way(name, monkeypatch):
    least = lambda module: module.__dict__[swaps.STATE]["min_elements"]  # noqa: E731
    monkeypatch.setattr(swaps.Swapped, "small", lambda self, x: self.normalised(x) < least(self))
    model, x = made(name), torch.randn(3, 5, 16)
    expected = results(model, x)
    registry.reset_counts()
    recsys_norm.convert(model, "unfused")
    assert all(torch.equal(a, b) for a, b in zip(results(model, x), expected, strict=True)) and not registry.counts()
    recsys_norm.convert(model, "unfused", min_elements=1 + 15 * (24 if name == "mlp" else 16))
    results(model, x)
    assert not registry.counts()
    recsys_norm.convert(model, "unfused", min_elements=15 * (24 if name == "mlp" else 16))
    assert_same(results(model, x), expected)
    assert registry.counts()


def test_nothing_to_do():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    report = recsys_norm.convert(model)
    assert not report and str(report) == "nothing replaced" and type(model[0]) is nn.Linear
    with pytest.raises(TypeError, match="nn.Module"):
        recsys_norm.convert([model])


def test_another_backend_later():
    model = made("mlp")
    recsys_norm.convert(model, "unfused")
    assert "backend='unfused'" in repr(model)
    assert not recsys_norm.convert(model, "compiled") and "backend='compiled'" in repr(model)
