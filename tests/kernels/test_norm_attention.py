"""Technique `separate` of norm_attention, its norm kernels in Triton's interpreter where there is no GPU."""

from types import SimpleNamespace

import pytest
import torch
from norm_attention_cases import LENGTHS, arguments, check_own_residual, check_slack
from op_cases import FORCED

from recsys_norm import ops
from recsys_norm.kernels.norm import techniques
from recsys_norm.ops import registry
from recsys_norm.ops.torch_separate import NormAttention
from recsys_norm.testing import check_op

SEPARATE = dict(techniques())["norm_attention"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NORMS = [(None, None), (None, "rms"), ("rms", None), ("rms", "layer"), ("layer", "rms")]


@pytest.fixture(autouse=True)
def kernels_serve(monkeypatch):
    monkeypatch.setattr(registry, "_candidates", lambda problem, direction: ((SEPARATE,), ()))
    registry.reset_counts()
    yield
    assert set(registry.counts()["norm_attention"]) <= {"separate", "unfused"}


def run(lengths="ragged", more=None, **fields):
    t, options = arguments(lengths, device=DEVICE, **fields)
    return check_op("norm_attention", t, options | (more or {}), FORCED)


@pytest.mark.parametrize("lengths", [n for n in LENGTHS if n != "long"])
def test_a4_empty_sequences(lengths):
    post = None if lengths.startswith("all") else "rms"  # a row that is 0 everywhere has no defined direction
    run(lengths, dict(inner_residual=True), pre="layer", post=post, residual=True)


@pytest.mark.parametrize("pre,post", NORMS)
@pytest.mark.parametrize("inner", [True, False])
def test_norms_and_residuals(pre, post, inner):
    run(pre=pre, post=post, residual=inner, more=dict(inner_residual=inner, activation=("gelu", "silu")))
    run(pre=pre, post=post, affine=False, residual=not inner, more=dict(inner_residual=inner))


@pytest.mark.parametrize("on", ["q", "k", "qk"])
@pytest.mark.parametrize("scope", ["all_heads", "head"])
def test_sides_and_scopes(on, scope):
    run(pre="layer", on=on, scope=scope, more=dict(inner_residual=on != "k"))
    run(([3, 2, 5], [4, 6, 5]), pre="rms", on=on, scope=scope, more=dict(softmax=True, window=2))


def test_half_precision_with_fp32_parameters():
    run(pre="layer", post="rms", residual=True, dtype=torch.float16, param_dtype=torch.float32)


@pytest.mark.parametrize("pre,post", NORMS)
def test_a5_rows_past_the_last_offset(pre, post):
    for scope, inner in (("all_heads", True), ("head", False)):
        t, options = arguments(pre=pre, post=post, scope=scope, on="qk", residual=True, slack=3, device=DEVICE)
        check_slack(t, options | dict(inner_residual=inner), FORCED, 3, 1e-5)


def test_a7_slices_of_a_fused_projection():
    t, options = arguments("empty first", pre="layer", post="rms", device=DEVICE)
    qkv = torch.randn(9, 3 * 16, device=DEVICE)
    results = []
    for copy in (False, True):
        q, k, v = ((c.contiguous() if copy else c).unflatten(1, (2, 8)) for c in qkv.chunk(3, 1))
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        t |= dict(zip(("q_THd", "k_UHd", "v_UHd"), leaves)) | dict(k_offsets_B1=t["q_offsets_B1"])
        y = ops.norm_attention(**t, **options | dict(max_k_len=5), technique="separate")
        results.append([y, *torch.autograd.grad(y.sum(), leaves)])  # .sum(): an expanded gradient
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("pre,post", NORMS[1:])
def test_q_as_its_own_residual(pre, post):
    for scope, inner, slack in (("all_heads", True, 3), ("head", False, 0)):
        t, options = arguments(pre=pre, post=post, scope=scope, slack=slack, device=DEVICE)
        check_own_residual(t, options | dict(inner_residual=inner), FORCED, 1e-6)


@pytest.mark.parametrize("pre", ["layer", None])
def test_a5_own_residual_with_nan_past_the_last_offset(pre):
    """The op hands the gradient of the residual on as it is, and the technique cuts its rows."""
    t, options = arguments(pre=pre, post="rms", slack=3, device=DEVICE)
    y = ops.norm_attention(**t, residual=t["q_THd"], **options, **FORCED)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    dy[-3:] = float("nan")
    leaves = [v for v in t.values() if v.requires_grad]
    found = torch.autograd.grad(y, leaves, dy)
    expected = ops.norm_attention(**t, residual=t["q_THd"], **options, backend="unfused")
    dy[-3:] = 0
    for a, b in zip(found, torch.autograd.grad(expected, leaves, dy)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert not found[0][-3:].any()


def test_a20_frozen_inputs():
    t, options = arguments(pre="layer", post="rms", on="qk", residual=True, device=DEVICE)
    options |= dict(inner_residual=True)
    names = [n for n, v in t.items() if v.requires_grad]

    def gradients(live):
        used = {n: v.detach().requires_grad_(n in live) if v.is_floating_point() else v for n, v in t.items()}
        y = ops.norm_attention(**used, **options, technique="separate")
        return dict(zip(live, torch.autograd.grad(y.square().sum(), [used[n] for n in live])))

    everything = gradients(names)
    for name in names:
        torch.testing.assert_close(gradients([name])[name], everything[name])


def test_what_is_saved_is_what_the_plain_technique_saves(monkeypatch):
    """The backward of one technique may follow the forward of another."""
    plain = NormAttention()
    t, options = arguments(pre="layer", post="layer", on="qk", scope="head", residual=True, device=DEVICE)
    wanted = [v for v in t.values() if v.requires_grad]
    results = []
    for first, then in ((plain, plain), (SEPARATE, plain), (plain, SEPARATE)):
        mixed = SimpleNamespace(name="separate", provider="triton", forward=first.forward, backward=then.backward)
        monkeypatch.setattr(registry, "_candidates", lambda problem, direction, mixed=mixed: ((mixed,), ()))
        y = ops.norm_attention(**t, **options, technique="separate")
        results.append([y, *torch.autograd.grad(y.square().sum(), wanted)])
    for other in results[1:]:
        for a, b in zip(other, results[0]):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
