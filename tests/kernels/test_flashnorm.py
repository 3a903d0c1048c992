"""Technique `flashnorm` of norm_attention in Triton's interpreter, and its kernels compiled for every declared
architecture. Larger cases and equal bits of repeated runs are in tests/gpu/test_flashnorm.py."""

from types import SimpleNamespace

import pytest
import torch
from norm_attention_cases import LENGTHS, arguments, check_own_residual, check_slack
from op_cases import FORCED

from recsys_norm import ops
from recsys_norm.kernels.compile import declared_architectures, run_checks
from recsys_norm.kernels.flashnorm import launch, techniques
from recsys_norm.kernels.norm import techniques as norm_techniques
from recsys_norm.ops import registry
from recsys_norm.ops.activations import get
from recsys_norm.testing import check_op

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernels on the GPU")

FLASHNORM = dict(techniques())["norm_attention"]
SEPARATE = dict(norm_techniques())["norm_attention"]
POLICY = FORCED | {"technique": "flashnorm"}
NORMS = [("rms", None), (None, "layer"), ("layer", "rms"), ("rms", "layer")]
SEVERAL = ([70, 0, 33, 5], [40, 3, 0, 64])  # more than one block of queries, for 16-bit data


@pytest.fixture(autouse=True)
def kernels_serve(monkeypatch):
    monkeypatch.setattr(registry, "_candidates", lambda *_: ((FLASHNORM,), ()))
    registry.reset_counts()
    yield
    assert set(registry.counts().get("norm_attention", ())) <= {"flashnorm", "unfused"}


def run(lengths="ragged", more=None, **fields):
    t, options = arguments(lengths, **fields)
    return check_op("norm_attention", t, options | (more or {}), POLICY)


@pytest.mark.parametrize("lengths", [n for n in LENGTHS if n != "long"])
def test_a4_empty_sequences(lengths):
    post = None if lengths.startswith("all") else "rms"  # a row that is 0 everywhere has no defined direction
    run(lengths, dict(inner_residual=True), pre="layer", post=post, residual=True)


@pytest.mark.parametrize("pre,post", NORMS)
@pytest.mark.parametrize("inner", [True, False])
def test_norms_and_residuals(pre, post, inner):
    """fp32 streams its keys."""
    run(pre=pre, post=post, residual=inner, more=dict(inner_residual=inner, activation=("gelu", "silu")))
    run(pre=pre, post=post, affine=False, residual=not inner, more=dict(inner_residual=inner))


@pytest.mark.parametrize("pre,post", NORMS)
def test_keys_held_on_chip(pre, post):
    run(SEVERAL, pre=pre, post=post, residual=True, dtype=torch.float16, d=16, H=3, more=dict(inner_residual=True))


@pytest.mark.parametrize("on", ["q", "k", "qk"])
@pytest.mark.parametrize("scope", ["all_heads", "head"])
def test_sides_and_scopes(on, scope):
    run(pre="layer", post="rms", on=on, scope=scope, more=dict(inner_residual=on != "k"))
    run(SEVERAL, pre="layer", post="rms", on=on, scope=scope, d=16, dtype=torch.float16, param_dtype=torch.float32)


@pytest.mark.parametrize("H,d", [(1, 24), (3, 17), (5, 8)])
def test_a8_heads_and_widths_that_are_not_powers_of_two(H, d):
    for scope in ("all_heads", "head"):
        run(pre="layer", post="layer", H=H, d=d, scope=scope, residual=True, more=dict(inner_residual=True))


@pytest.mark.parametrize("causal,window", [(True, None), (False, 3), (True, 40)])
def test_causal_and_window(causal, window):
    more = dict(causal=causal, window=window, inner_residual=True)
    run(([70, 3], [80, 5]), more, pre="layer", post="rms", H=1)
    run(([70, 3], [80, 5]), more, pre="layer", post="rms", H=2, d=16, dtype=torch.float16)


@pytest.mark.parametrize("scope", ["all_heads", "head"])
def test_softmax(scope):
    more = dict(softmax=True, inner_residual=scope == "head")
    # seed 1: with seed 0 plain PyTorch itself errs ten times as much as with others
    run("empty middle", more, pre="rms", post="rms", on="qk", scope=scope, residual=True, seed=1)
    run(([70, 3], [80, 5]), more | dict(causal=True, window=9), pre="layer", post="layer", scope=scope, H=1)
    run(SEVERAL, more, pre="layer", post="rms", scope=scope, d=16, dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_long_sequence_split_over_programs(dtype):
    g = torch.Generator().manual_seed(0)
    q, grad = (torch.randn(200, 2, 16, generator=g).to(dtype) for _ in range(2))
    k, v = (torch.randn(70, 2, 16, generator=g).to(dtype) for _ in range(2))
    offsets = torch.tensor([0, 199, 200]), torch.tensor([0, 65, 70])
    mean, centre, rstd = launch.row_statistics(q, offsets[0], True, False, 1e-5)
    spec = launch.Spec(199, 65, [(0, 2, get("gelu").code)], 0.1, None, None)
    pre = launch.PreNorm("layer", False, None, None, mean, rstd, centre)
    whole, parts = (launch.backward(grad, q, k, v, *offsets, spec, pre, splits=n) for n in (1, 3))
    for a, b in zip(parts, whole):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    attention = (q, k, v, *offsets, None, spec, pre, launch.PostNorm(None))
    assert torch.equal(*(launch.forward(*attention, inner=True, splits=n)[0] for n in (1, 3)))


@pytest.mark.parametrize("pre,post", NORMS)
def test_a5_rows_past_the_last_offset(pre, post):
    for scope, inner in (("all_heads", True), ("head", False)):
        t, options = arguments(pre=pre, post=post, scope=scope, on="qk", residual=True, slack=3)
        check_slack(t, options | dict(inner_residual=inner), POLICY, 3, 1e-5)


@pytest.mark.parametrize("pre,post", NORMS)
def test_q_as_its_own_residual(pre, post):
    t, options = arguments(pre=pre, post=post, slack=3)
    check_own_residual(t, options | dict(inner_residual=True), POLICY, 1e-6)


def test_a11_a_large_mean():
    t, options = arguments(pre="layer", post="layer", residual=True)
    with torch.no_grad():
        t["q_THd"] += 1e3
    check_op("norm_attention", t, options | dict(inner_residual=True), POLICY)


def test_zeros_in_gamma():
    t, options = arguments(pre="layer", post="rms", residual=True)
    with torch.no_grad():
        t["pre_norm_weight"][::3] = 0
        t["post_norm_weight"][::2] = 0
    check_op("norm_attention", t, options | dict(inner_residual=True), POLICY)


def test_a7_slices_of_a_fused_projection():
    t, options = arguments("empty first", pre="layer", post="rms")
    qkv = torch.randn(9, 3 * 16)
    results = []
    for copy in (False, True):
        q, k, v = ((c.contiguous() if copy else c).unflatten(1, (2, 8)) for c in qkv.chunk(3, 1))
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        t |= dict(zip(("q_THd", "k_UHd", "v_UHd"), leaves)) | dict(k_offsets_B1=t["q_offsets_B1"])
        y = ops.norm_attention(**t, **options | dict(max_k_len=5), technique="flashnorm")
        results.append([y, *torch.autograd.grad(y.sum(), leaves)])  # .sum(): an expanded gradient
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


def test_a20_frozen_inputs():
    t, options = arguments(pre="layer", post="rms", on="qk", residual=True)
    options |= dict(inner_residual=True)
    names = [n for n, v in t.items() if v.requires_grad]

    def gradients(live):
        used = {n: v.detach().requires_grad_(n in live) if v.is_floating_point() else v for n, v in t.items()}
        y = ops.norm_attention(**used, **options, technique="flashnorm")
        return dict(zip(live, torch.autograd.grad(y.square().sum(), [used[n] for n in live])))

    everything = gradients(names)
    for name in names:
        torch.testing.assert_close(gradients([name])[name], everything[name])


def test_what_is_saved_is_what_other_techniques_save(monkeypatch):
    """The backward of one technique may follow the forward of another."""
    t, options = arguments(pre="layer", post="layer", on="qk", scope="head", residual=True)
    wanted = [v for v in t.values() if v.requires_grad]
    results = []
    for first, then in ((SEPARATE, SEPARATE), (FLASHNORM, SEPARATE), (SEPARATE, FLASHNORM)):
        mixed = SimpleNamespace(name="flashnorm", provider="triton", forward=first.forward, backward=then.backward)
        monkeypatch.setattr(registry, "_candidates", lambda *_, mixed=mixed: ((mixed,), ()))
        y = ops.norm_attention(**t, **options, technique="flashnorm")
        results.append([y, *torch.autograd.grad(y.square().sum(), wanted)])
    for other in results[1:]:
        for a, b in zip(other, results[0]):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def compiled():
    return run_checks("recsys_norm.kernels.flashnorm.cases")


def test_kernels_compile_for_every_declared_architecture(compiled):
    declared = {k: v for k, v in declared_architectures().items() if k.startswith("flashnorm.")}
    assert {(s.kernel, s.arch) for s in compiled} == {(k, arch) for k, archs in declared.items() for arch in archs}


def test_registers_spills_and_shared_memory_are_bounded(compiled):
    for s in compiled:
        # Two accumulators of 128 columns; most of what spills lives outside the loop.
        keeps_accumulators = s.kernel in ("flashnorm.backward_resident", "flashnorm.backward_k")
        assert s.spill_bytes <= (1200 if keeps_accumulators else 0), s
        assert s.blocks_per_sm >= 1 and not s.serialized, s
        if s.kernel == "flashnorm.forward" and "resident" in s.label and s.arch != 80:
            assert s.blocks_per_sm >= 2, s  # one program's matrix products hide the other's activations
