"""The jagged attention kernels on a GPU: the whole grid against fp64, equal bits, large and misaligned tensors."""

import pytest
import torch
from attention_cases import LENGTHS, Problem, check, loop

from recsys_norm.ops import jagged_attention
from recsys_norm.ops.activations import ACTIVATIONS
from recsys_norm.testing import check_close_to_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def problem(q_len, k_len, **more):
    return Problem(q_len, k_len, device="cuda", **more)


def mixed_lengths(batch, longest, seed=0):
    lengths = torch.randint(0, longest + 1, (batch,), generator=torch.Generator().manual_seed(seed)).tolist()
    lengths[batch // 2], lengths[-1] = 0, longest
    return lengths


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a4_a5_lengths_and_slack(lengths, softmax, dtype):
    for slack, offsets_dtype in ((0, torch.int64), (5, torch.int32)):
        p = problem(
            *LENGTHS[lengths], dtype=dtype, slack=slack, offsets_dtype=offsets_dtype, options=dict(softmax=softmax)
        )
        check(p, p.run())


@pytest.mark.parametrize("activation", [*ACTIVATIONS, ("silu", "gelu", "gelu")])
def test_activations(activation):
    dtypes = [torch.bfloat16, torch.float32] + [torch.float16] * (activation in ("gelu", "gelu_tanh"))
    for dtype in dtypes:
        for k_longest in (100, 300):  # keys held on chip, keys streamed
            p = problem(mixed_lengths(5, 200), mixed_lengths(5, k_longest, 1), heads=3, d=64, dtype=dtype)
            p.options = dict(activation=activation, scale=0.9)
            check(p, p.run())


# Every width once in bf16, since each costs its kernels' compilation; the other dtypes where they differ in the code.
WIDTHS = [(d, torch.bfloat16) for d in (16, 24, 32, 63, 64, 96, 100, 128, 200, 256)]
WIDTHS += [(96, torch.float16), (63, torch.float32), (256, torch.float32)]


@pytest.mark.parametrize("d,dtype", WIDTHS)
def test_a8_widths(d, dtype):
    for k_longest in (64, 128, 260) if d == 128 else (128, 260):
        p = problem(mixed_lengths(4, 150), mixed_lengths(4, k_longest, 1), heads=2, d=d, dtype=dtype, slack=3)
        p.options = dict(activation="gelu_tanh", scale=0.5)
        check(p, p.run())


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("causal,window", [(True, None), (False, 20), (True, 20), (True, 1), (False, 1000)])
@pytest.mark.parametrize("longest", [100, 300])
def test_causal_and_window(longest, causal, window, softmax):
    options = dict(causal=causal, window=window, softmax=softmax)
    lengths = mixed_lengths(6, longest)
    p = problem(lengths, lengths, d=64, dtype=torch.bfloat16, slack=7, options=options)
    p.k_offsets = p.q_offsets  # self-attention: one offsets tensor, which softmax needs for its flash kernel
    check(p, p.run())
    p = problem(lengths, mixed_lengths(6, longest, 1), d=64, dtype=torch.bfloat16, options=options)
    check(p, p.run())


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("scale", [1.0, 1 / 1024])
def test_target_shape(heads, scale):
    p = problem(mixed_lengths(48, 700), [128] * 48, heads=heads, d=128, dtype=torch.bfloat16)
    p.options = dict(activation="gelu_tanh", scale=scale)
    first = p.run()
    check(p, first)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, p.run()))


def test_few_long_sequences_are_split_and_stay_deterministic():
    p = problem([9000, 1, 4000], [128, 70, 3], heads=2, d=128, dtype=torch.bfloat16, slack=9)
    p.options = dict(activation="gelu", scale=0.2)
    first = p.run()
    check(p, first)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, p.run()))


def test_a18_softmax_is_deterministic_when_asked():
    p = problem([300, 500], [300, 500], d=64, dtype=torch.bfloat16, options=dict(softmax=True))
    torch.use_deterministic_algorithms(True)
    first = p.run()
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, p.run()))


@pytest.mark.parametrize("k_longest", [100, 300])
def test_a7_strides_and_misaligned_tensors(k_longest):
    p = problem([130, 70], [k_longest, 70], d=64, dtype=torch.bfloat16)
    expected = p.run()

    def run(q, k, v):
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        o = jagged_attention(q, k, v, p.q_offsets, p.k_offsets, **p.lengths)
        return (o, *torch.autograd.grad(o, (q, k, v), p.grad))

    wide = [torch.cat([t, t], 1)[:, : p.heads] for t in (p.q, p.k, p.v)]  # slices of a fused projection
    shifted = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view_as(t) for t in (p.q, p.k, p.v)]  # 2 bytes off
    every_other = [torch.repeat_interleave(t, 2, 2)[..., ::2] for t in (p.q, p.k, p.v)]
    for tensors in (wide, every_other):
        for actual, right in zip(run(*tensors), expected):
            assert torch.equal(actual, right)
    check(p, [t.detach() for t in run(*shifted)])


@pytest.mark.parametrize("max_k_len", [100, 200])  # keys held on chip, keys streamed
def test_a6_more_than_two_billion_elements(max_k_len):
    T, H, d = (1 << 31) // (8 * 128) + 4096, 8, 128
    need = 5 * T * H * d * 2
    if torch.cuda.mem_get_info()[0] < 1.2 * need:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of free memory")
    torch.use_deterministic_algorithms(False)  # filling new memory with NaN would double the footprint
    last = 1000
    q = torch.zeros(T, H, d, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 200, H, d, device="cuda", dtype=torch.bfloat16).unbind()
    q[-last:] = torch.randn(last, H, d, device="cuda", dtype=torch.bfloat16)
    q_offsets = torch.tensor([0, T - last, T], device="cuda")
    k_offsets = torch.tensor([0, 100, 200], device="cuda")
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    o = jagged_attention(q, k, v, q_offsets, k_offsets, max_q_len=T, max_k_len=max_k_len, scale=0.1)
    grad = torch.ones(1, H, d, device="cuda", dtype=torch.bfloat16).expand_as(o)
    grads = torch.autograd.grad(o, (q, k, v), grad)
    small = Problem([last], [100], heads=H, d=d, dtype=torch.bfloat16, device="cuda", options=dict(scale=0.1))
    small.q, small.k, small.v, small.grad = q[-last:].detach(), k[100:].detach(), v[100:].detach(), grad[-last:]
    check(small, [o[-last:].detach(), grads[0][-last:], grads[1][100:], grads[2][100:]])
    assert not o[: T - last].any()  # zero queries


@pytest.mark.parametrize("options", [dict(), dict(softmax=True, causal=True, window=50)], ids=["gdpa", "softmax"])
def test_a13_compiles_without_graph_breaks(options):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a, **kw: 2 * jagged_attention(*a, **kw), fullgraph=True)
    for longest in (60, 100, 130):
        lengths = mixed_lengths(5, longest)
        p = problem(lengths, lengths, d=64, dtype=torch.bfloat16)
        q, k, v = (t.requires_grad_() for t in (p.q, p.k, p.v))
        arguments = (q, k, v, p.q_offsets, p.q_offsets)
        o = compiled(*arguments, max_q_len=200, max_k_len=200, **options)
        expected = 2 * jagged_attention(*arguments, max_q_len=200, max_k_len=200, **options)
        torch.testing.assert_close(o, expected)
        for a, e in zip(*(torch.autograd.grad(x, (q, k, v), p.grad) for x in (o, expected))):
            torch.testing.assert_close(a, e, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("op", ["gdpa", "jagged_softmax"])
def test_opcheck(op):
    p = problem([50, 0, 33], [50, 0, 33], d=32, dtype=torch.float16)
    tensors = [t.requires_grad_() for t in (p.q, p.k, p.v)] + [p.q_offsets, p.k_offsets]
    options = ("gelu,silu", 0.5, False, 3) if op == "gdpa" else (0.5, False, None)
    torch.library.opcheck(getattr(torch.ops.recsys_norm, op).default, (*tensors, 50, 50, *options))


def test_a10_extreme_values_stay_finite():
    p = problem([65, 3], [128, 2], d=128, dtype=torch.float16, options=dict(activation="gelu", scale=1e-4))
    p.q.fill_(255.0)
    p.k.fill_(-255.0)
    o, *grads = p.run()
    expected = loop(p)
    assert all(torch.isfinite(t).all() for t in (o, *grads))
    check_close_to_reference(o, loop(p, torch.float16)[0], expected[0])


def test_eager_on_cuda_agrees():
    p = problem([40, 0, 13], [33, 5, 2], d=32, slack=3)
    check(p, p.run(implementation="eager"))
