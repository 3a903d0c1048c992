"""The backward kernel for few queries on a GPU against fp64, and what the op takes it for."""

import pytest
import torch
from attention_cases import LENGTHS, Problem, check

from recsys_norm.kernels.gdpa.launch import Spec
from recsys_norm.kernels.softmax import launch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DTYPES = [torch.bfloat16, torch.float16]


def problem(q_len, k_len, **more):
    return Problem(q_len, k_len, device="cuda", options=dict(softmax=True), **more)


def spec_of(p):
    return Spec(*p.lengths.values(), (), p.d**-0.5, None, None)


def run(p):
    """(o, dq, dk, dv): the op's forward, then the kernel."""
    q, k, v, *offsets = p.arguments
    o, lse = torch.ops.recsys_norm.jagged_softmax(*p.arguments, *p.lengths.values(), p.d**-0.5, False, None)
    return o, *launch.few_queries(p.grad, q, k, v, o, lse, *offsets, spec_of(p))


def lengths(batch, longest, seed=0):
    lengths = torch.randint(0, longest + 1, (batch,), generator=torch.Generator().manual_seed(seed)).tolist()
    lengths[batch // 2], lengths[-1] = 0, longest
    return lengths


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LENGTHS)
def test_a4_a5_lengths_and_slack(case, dtype):
    for d in (16, 128):
        p = problem(*LENGTHS[case], dtype=dtype, d=d, slack=5, offsets_dtype=torch.int64)
        check(p, run(p))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3, 4])
def test_many_keys(dtype, heads):
    for q_len in ([64] * 40, lengths(40, 64, seed=1)):
        p = problem(q_len, lengths(40, 1024), heads=heads, d=128, dtype=dtype, slack=7)
        check(p, run(p))


@pytest.mark.parametrize("heads", [2, 4])
def test_a7_slices_and_what_the_op_takes(heads):
    p = problem([64] * 300, lengths(300, 700), heads=heads, d=128, dtype=torch.bfloat16)
    expected = run(p)
    assert launch.serves_few_queries(p.q, 300, spec_of(p)) == (torch.cuda.get_device_capability() == (9, 0))
    assert not launch.serves_few_queries(p.q, 20, spec_of(p))
    p.k, p.v = torch.stack([p.k, p.v], 1).unbind(1)
    for actual, right in zip(p.run(), expected):
        torch.testing.assert_close(actual, right, rtol=2e-2, atol=2e-2)
    for actual, right in zip(run(p), expected):
        assert torch.equal(actual, right)


def test_a18_a26_equal_bits():
    p = problem([64] * 200, lengths(200, 1024), heads=4, d=128, dtype=torch.bfloat16)
    first = run(p)
    for _ in range(300):
        for a, b in zip(run(p), first):
            assert torch.equal(a, b)
