"""The softmax attention kernel in Triton's interpreter against a per-sequence loop in fp64, its log-sum-exp by the gradients
that follow from it, and what both kernels compile to. tests/gpu/test_jagged_softmax.py has the rest."""

import itertools

import pytest
import torch
from attention_cases import LENGTHS, Problem, check, check_slices, loop

from recsys_norm.kernels.compile import declared_architectures, run_checks
from recsys_norm.kernels.gdpa.configs import Config
from recsys_norm.kernels.gdpa.launch import Spec
from recsys_norm.kernels.softmax import configs, launch
from recsys_norm.testing import check_close_to_reference

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernel on the GPU")

SMALL = Config(32, 16, 4, 1)  # several blocks of queries and keys in short sequences
through_descriptors = configs.through_descriptors


@pytest.fixture(autouse=True)
def pointers(monkeypatch):
    """Keys and values row by row, which the interpreter, as a Hopper GPU, would not choose."""
    monkeypatch.setattr(configs, "through_descriptors", lambda arch, d: False)


def run(p, config=SMALL):
    """(o, lse) by the kernel, on CPU tensors."""
    o = dict(scale=p.d**-0.5, causal=False, window=None) | p.options
    reach = None if o["window"] is None else o["window"] - 1
    spec = Spec(*p.lengths.values(), (), o["scale"], left=reach, right=0 if o["causal"] else reach)
    return launch.forward(*p.arguments, spec, config=config)


def gradients(p, o, lse):
    """(dq, dk, dv) in fp64 by the formulas of a flash backward: weights exp(score - lse), D = sum(do * o)."""
    scale = p.options.get("scale", p.d**-0.5)
    q, k, v, o, do = (t.double().nan_to_num() for t in (p.q, p.k, p.v, o, p.grad))
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    starts = zip(itertools.accumulate([0, *p.q_len]), p.q_len, itertools.accumulate([0, *p.k_len]), p.k_len)
    for qs, ql, ks, kl in starts:
        i, j = slice(qs, qs + ql), slice(ks, ks + kl)
        distance = torch.arange(ql)[:, None] - torch.arange(kl)[None, :]
        keep = torch.ones_like(distance, dtype=torch.bool)
        if p.options.get("causal"):
            keep &= distance >= 0
        if p.options.get("window"):
            keep &= distance.abs() < p.options["window"]
        score = scale * torch.einsum("shd,lhd->hsl", q[i], k[j])
        weight = torch.exp(score - lse[:, i, None].double()) * keep
        slope = torch.einsum("shd,lhd->hsl", do[i], v[j]) - (do[i] * o[i]).sum(-1).T[:, :, None]
        ds = scale * weight * slope
        dq[i] = torch.einsum("hsl,lhd->shd", ds, k[j])
        dk[j] = torch.einsum("hsl,shd->lhd", ds, q[i])
        dv[j] = torch.einsum("hsl,shd->lhd", weight, do[i])
    return tuple(t.to(p.dtype) for t in (dq, dk, dv))


def check_all(p, config=SMALL):
    p.options = p.options | dict(softmax=True)
    o, lse = run(p, config)
    assert lse.shape == (p.heads, p.q.shape[0]) and lse.dtype == torch.float32 and not lse.isnan().any()
    assert not lse[:, sum(p.q_len) :].any()
    check(p, (o, *gradients(p, o, lse)))
    return o, lse


@pytest.mark.parametrize("lengths", [n for n in LENGTHS if n != "length one"])  # it has a test of its own
def test_a4_a5_lengths_and_slack(lengths):
    p = Problem(*LENGTHS[lengths], heads=1, dtype=torch.float16, slack=3, offsets_dtype=torch.int64)
    _, lse = check_all(p)
    without = torch.repeat_interleave(torch.tensor(p.k_len) == 0, torch.tensor(p.q_len))
    assert torch.equal(lse[:, : sum(p.q_len)].isinf().all(0), without)


def test_one_key_gives_its_value_and_its_score():
    p = Problem([1, 2, 1], [1, 1, 1], dtype=torch.float16)
    o, lse = run(p)
    owner = torch.tensor([0, 1, 1, 2])
    assert torch.equal(o, p.v[owner])
    score = (p.q.float() * p.k[owner].float()).sum(-1).T * p.d**-0.5
    torch.testing.assert_close(lse, score, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal,window", [(True, None), (False, 3), (True, 40), (True, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_causal_and_window(causal, window, dtype):
    for q_len, k_len in (([70, 4], [70, 4]), ([50, 5], [30, 2]), ([20], [90])):
        p = Problem(q_len, k_len, heads=1, dtype=dtype, slack=1, options=dict(causal=causal, window=window))
        o, _ = run(p)
        p.options = p.options | dict(softmax=True)
        rows = sum(q_len)
        check_close_to_reference(o[:rows], loop(p, dtype)[0][:rows], loop(p)[0][:rows], dtype=dtype, name="o")
        if window != 1:
            check_all(p)


@pytest.mark.parametrize("d", [8, 24, 128])
def test_a8_widths(d):
    check_all(Problem([33, 2], [40, 3], d=d, dtype=torch.float16))


def test_shipped_tiles():
    for q_len, k_len in (([150, 3], [150, 3]), ([64, 64], [200, 0])):
        check_all(Problem(q_len, k_len, heads=1, dtype=torch.float16), config=None)


def test_a7_slices_of_a_fused_projection():
    check_slices(Problem([20, 7], [20, 7], dtype=torch.float16, d=24), run)


@pytest.fixture
def descriptors(monkeypatch, pointers):
    """Where they are chosen, and the number of launches with them."""
    calls = []
    blocks = launch._blocks
    monkeypatch.setattr(configs, "through_descriptors", through_descriptors)
    monkeypatch.setattr(launch, "_blocks", lambda x, rows: calls.append(rows) or blocks(x, rows))
    return lambda: len(calls) // 2


@pytest.mark.parametrize("lengths", [n for n in LENGTHS if n != "length one"])
def test_keys_through_descriptors(lengths, descriptors):
    p = Problem(*LENGTHS[lengths], heads=2, d=32, dtype=torch.float16, slack=3)
    check_all(p)
    assert descriptors() == 1


@pytest.mark.parametrize("causal,window", [(True, None), (False, 3), (True, 40)])
def test_keys_through_descriptors_with_masks(causal, window, descriptors):
    for q_len, k_len in (([70, 4], [70, 4]), ([50, 5], [30, 2]), ([20], [90])):
        p = Problem(q_len, k_len, heads=1, dtype=torch.bfloat16, slack=1, options=dict(causal=causal, window=window))
        check_all(p)
    assert descriptors() == 3


def test_descriptors_of_slices(descriptors):
    """Thirds of one projection, where a tensor's rows overlap the next one's; a width, or rows, that have no descriptor."""
    p = Problem([40, 7], [40, 7], dtype=torch.float16, d=32)
    expected = run(p)
    p.q, p.k, p.v = torch.stack([p.q, p.k, p.v], 1).unbind(1)
    assert all(torch.equal(a, b) for a, b in zip(run(p), expected)) and descriptors() == 2
    p.k = p.k[:1].expand(p.k.shape)
    run(p)
    check_all(Problem([20, 7], [20, 7], dtype=torch.float16, d=24))
    assert descriptors() == 2


def test_where_descriptors_are_chosen():
    assert through_descriptors(90, 128) and through_descriptors(90, 32)
    assert not through_descriptors(90, 24) and not through_descriptors(80, 128) and not through_descriptors(100, 128)


def test_a10_large_scores_stay_finite():
    p = Problem([20], [40], dtype=torch.float16, options=dict(scale=1.0))
    p.q.fill_(65504.0)
    p.k.fill_(-65504.0)
    o, lse = run(p)
    torch.testing.assert_close(o, p.v.mean(0).expand_as(o), rtol=1e-2, atol=1e-3)
    assert torch.isfinite(lse).all()


def test_a_maximum_that_is_too_small_stays_inside_the_tensors():
    p = Problem([70, 90], [20, 140], heads=1, dtype=torch.float16)
    before = [t.clone() for t in (p.q, p.k, p.v)]
    launch.forward(*p.arguments, Spec(16, 64, (), 1.0, None, None))
    for tensor, copy in zip((p.q, p.k, p.v), before):
        assert torch.equal(tensor, copy)


def test_limits_are_named():
    p = Problem([2], [2], d=264, dtype=torch.float16)
    with pytest.raises(ValueError, match="256, got 264"):
        run(p)
    p = Problem([2], [2], dtype=torch.float16, options=dict(scale=-1.0))
    with pytest.raises(ValueError, match="positive scale, got -1.0"):
        run(p)


def test_it_serves_what_was_measured():
    p = Problem([3], [3], d=128, dtype=torch.float16)
    q, k, v, *_ = p.arguments

    def serves(max_q_len, max_k_len, left, right, scale=0.1, tensors=(q, k, v)):
        return launch.serves(*tensors, Spec(max_q_len, max_k_len, (), scale, left, right))

    assert serves(1024, 1024, 255, 0) and serves(4096, 4096, None, 0) and serves(64, 1024, None, None)
    assert not serves(65, 1024, None, None) and not serves(4097, 4097, 255, 0) and not serves(64, 64, 3, 0, scale=-1.0)
    shifted = torch.cat([q.new_zeros(1), q.flatten()])[1:].view_as(q)
    assert not serves(64, 64, 3, 0, tensors=(shifted, k, v))
    assert not serves(64, 64, 3, 0, tensors=[t[..., :64] for t in (q, k, v)])


@pytest.fixture(scope="module")
def compiled():
    return run_checks("recsys_norm.kernels.softmax.cases")


def test_the_kernels_compile_for_every_declared_architecture(compiled):
    declared = {k: v for k, v in declared_architectures().items() if k.startswith("softmax.")}
    assert {(s.kernel, s.arch) for s in compiled} == {(k, arch) for k, archs in declared.items() for arch in archs}


def test_registers_spills_and_shared_memory_are_bounded(compiled):
    for s in compiled:
        if s.kernel == "softmax.few_queries":
            # Stores and loads together; tiles that spill nothing were measured to be slower on long sequences.
            assert s.spill_bytes <= 400 and s.blocks_per_sm >= (2 if s.arch == 90 else 1) and not s.serialized, s
            continue
        assert s.spill_bytes == 0 and s.blocks_per_sm >= 2 and not s.serialized, s
        if s.arch == 90 and "d128" in s.label:
            assert s.blocks_per_sm >= 3, s  # what the tile was chosen for
