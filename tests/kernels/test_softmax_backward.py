"""The backward kernel for few queries in Triton's interpreter against a per-sequence loop in fp64. More cases run on a GPU
(tests/gpu/test_softmax_backward.py)."""

import pytest
import torch
from attention_cases import LENGTHS, Problem, check, check_slices

from recsys_norm.kernels.gdpa.configs import Config
from recsys_norm.kernels.gdpa.launch import Spec
from recsys_norm.kernels.softmax import launch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernel on the GPU")

SMALL = Config(64, 16, 4, 1)  # several blocks of keys in short sequences


def spec_of(p, **more):
    return Spec(*(p.lengths | more).values(), (), p.options.get("scale", p.d**-0.5), None, None)


def run(p, config=SMALL):
    """(o, dq, dk, dv) by the forward kernel and this one."""
    o, lse = launch.forward(*p.arguments, spec_of(p))
    q, k, v, *offsets = p.arguments
    return o, *launch.few_queries(p.grad, q, k, v, o, lse, *offsets, spec_of(p), config=config)


@pytest.mark.parametrize("lengths", [n for n in LENGTHS if n != "length one"])  # it has a test of its own
def test_a4_a5_lengths_and_slack(lengths):
    for heads, dtype in ((1, torch.float16), (2, torch.bfloat16)):
        p = Problem(*LENGTHS[lengths], heads=heads, dtype=dtype, slack=3, offsets_dtype=torch.int64)
        p.options = dict(softmax=True)
        check(p, run(p))


def test_one_key_has_no_slope():
    """Its weight is 1 whatever the score: dv is the sum of the queries' gradients, dq and dk are roundings of 0."""
    p = Problem([1, 2, 1], [1, 1, 1], dtype=torch.float16)
    _, dq, dk, dv = run(p)
    assert dq.abs().max() < 4e-3 and dk.abs().max() < 4e-3
    grads = p.grad.float()
    torch.testing.assert_close(dv.float(), torch.stack([grads[0], grads[1] + grads[2], grads[3]]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("d", [16, 32, 128])
def test_a8_widths_and_a_full_block(d):
    p = Problem([64, 2], [40, 70], d=d, heads=1, dtype=torch.float16, options=dict(softmax=True))
    check(p, run(p))
    check(p, run(p, None))


def test_a7_slices_of_a_fused_projection():
    check_slices(Problem([20, 7], [20, 7], dtype=torch.float16, d=32), run)


def test_a10_large_scores_stay_finite():
    p = Problem([20], [40], dtype=torch.float16, options=dict(scale=1.0))
    p.q.fill_(600.0)
    p.k.fill_(-600.0)
    assert all(torch.isfinite(t).all() for t in run(p))


def test_a_maximum_that_is_too_small_stays_inside_the_tensors():
    p = Problem([70, 90], [20, 140], heads=1, dtype=torch.float16)
    o, lse = launch.forward(*p.arguments, spec_of(p))
    before = [t.clone() for t in (p.q, p.k, p.v, o)]
    q, k, v, *offsets = p.arguments
    launch.few_queries(p.grad, q, k, v, o, lse, *offsets, spec_of(p, max_q_len=16, max_k_len=64))
    assert all(torch.equal(tensor, copy) for tensor, copy in zip((p.q, p.k, p.v, o), before))


def test_keys_without_queries_get_zeros_whatever_they_hold():
    p = Problem([3, 0, 4], [5, 6, 2], dtype=torch.float16)
    expected = run(p)
    p.k[5:11], p.v[5:8], p.v[8:11] = float("nan"), float("inf"), float("nan")
    for actual, right in zip(run(p), expected):
        assert torch.equal(actual, right)


def test_more_queries_than_a_block_are_refused():
    p = Problem([65], [3], dtype=torch.float16)
    with pytest.raises(ValueError, match="64 queries per sequence and knows no mask, got max_q_len=65"):
        run(p)
    assert not launch.serves_few_queries(p.q, 1000, spec_of(p))
