"""The Hopper backward of causal softmax self-attention on a GPU: the tolerance rule over heads, lengths, windows and
strides, rows past the last sequence, and equal bits."""

import pytest
import torch
from attention_cases import LENGTHS, Problem, check, loop

from recsys_norm.kernels.gdpa.launch import Spec
from recsys_norm.kernels.hopper import launch as hopper
from recsys_norm.kernels.hopper import softmax_backward
from recsys_norm.kernels.softmax import launch

ARCH = 10 * torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
pytestmark = pytest.mark.skipif(hopper.why_not(ARCH) is not None, reason="needs an H100 or H200 and its driver")


def lengths(batch, longest, seed=0):
    sizes = torch.randint(0, longest + 1, (batch,), generator=torch.Generator().manual_seed(seed)).tolist()
    sizes[batch // 2], sizes[-1] = 0, longest
    return sizes


def problem(sizes, window=256, **more):
    options = dict(softmax=True, causal=True, window=window) | more.pop("options", {})
    p = Problem(sizes, sizes, **dict(d=128, dtype=torch.bfloat16, device="cuda") | more, options=options)
    p.k_offsets = p.q_offsets  # self-attention: one offsets tensor
    return p


def arguments(p):
    return *p.lengths.values(), p.options.get("scale", p.d**-0.5), True, p.options["window"]


def forward(p):
    return torch.ops.recsys_norm.jagged_softmax(*p.arguments, *arguments(p))


def backward(p, o, lse, views=None):
    """(dq, dk, dv) by this kernel; `views` are to be used in place of q, k, v and the gradient."""
    q, k, v, grad = views or (p.q, p.k, p.v, p.grad)
    longest, _, scale, _, window = arguments(p)
    left = None if window is None else window - 1
    assert softmax_backward.fits(q, p.q_offsets, p.k_offsets, left, 0, longest, ARCH)
    return launch.causal_backward(grad, q, k, v, o, lse, p.q_offsets, Spec(longest, longest, (), scale, left, 0))


def run(sizes, window=256, **more):
    p = problem(sizes, window, **more)
    o, lse = forward(p)
    found = backward(p, o, lse)
    check(p, (o, *found))
    return p, found


@pytest.mark.parametrize("name", [n for n in LENGTHS if n != "nothing"])
@pytest.mark.parametrize("heads", [1, 3])
def test_a4_empty_sequences(name, heads):
    for scale in (1, 30):
        run([scale * n for n in LENGTHS[name][0]], heads=heads, slack=5)


@pytest.mark.parametrize("window", [2, 63, 64, 65, 127, 128, 129, 192, 193, 256, 300, 1000, None])
@pytest.mark.parametrize("longest", [100, 700])
def test_windows(window, longest):
    run(lengths(6, longest), window, slack=7)


def test_queries_that_see_few_keys():
    """Their dQ is as good as that of the others: the rounding of the output, large where few values are averaged, and the
    mean of few keys are not in it."""
    p = problem([400] * 20, heads=8)
    dq, *_ = backward(p, *forward(p))
    expected = loop(p)[1]
    size = expected.norm(dim=2)
    error = ((dq.double() - expected).norm(dim=2) / size.clamp_min(size.median())).view(20, 400, 8)
    assert error[:, :16].max() < 2 * error[:, 64:].max()


def test_a_window_of_one_key_has_no_slope():
    """softmax is 1: dv is the gradient itself."""
    p = problem(lengths(6, 300), 1)
    dq, dk, dv = backward(p, *forward(p))
    assert dq.abs().max() < 1e-2 and dk.abs().max() < 1e-2
    torch.testing.assert_close(dv, p.grad, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 319, 320, 321, 384, 385])
def test_block_edges(size):
    run([size, 70, size])
    run([size, 70, size], 64)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_a8_heads(heads):
    run(lengths(6, 600), heads=heads)
    run(lengths(40, 129), heads=heads)


@pytest.mark.parametrize("scale", [0.001, 0.09, 1.0])
def test_scales(scale):
    run(lengths(6, 400), options=dict(scale=scale))


@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_a5_rows_past_the_last_offset(offsets_dtype):
    for slack in (1, 7, 1000):
        run(lengths(6, 300), heads=2, slack=slack, offsets_dtype=offsets_dtype)


def test_many_sequences():
    """More pairs of a sequence and a head for a program than it counts at once."""
    p = problem([1, 5, 3] * 12000, heads=2, slack=3)
    o, lse = forward(p)
    few = 3 * 40
    end = sum(p.q_len[:few])
    small = problem(p.q_len[:few], heads=2)
    for name in ("q", "k", "v", "grad"):
        setattr(small, name, getattr(p, name)[:end].clone())
    for found, expected in zip(backward(p, o, lse), backward(small, *forward(small))):
        assert torch.equal(found[:end], expected) and not found[-3:].any() and found[-4].any()


def test_a7_strided_and_misaligned_tensors():
    """q, k and v as thirds of one projection, heads of wider tensors, rows off a 16-byte boundary, one gradient for all."""
    p = problem(lengths(6, 300), heads=4)
    o, lse = forward(p)
    expected = backward(p, o, lse)
    three = torch.stack([p.q, p.k, p.v], 1)
    wide = torch.cat([p.grad, p.grad], 1)[:, 4:]
    shifted = torch.cat([p.q.new_zeros(1), p.q.flatten()])[1:].view_as(p.q)
    for views in ((three[:, 0], three[:, 1], three[:, 2], wide), (shifted, p.k, p.v, p.grad)):
        assert all(torch.equal(a, b) for a, b in zip(expected, backward(p, o, lse, views)))
    one = p.grad[:1, :1].expand(p.grad.shape)
    same = backward(p, o, lse, (p.q, p.k, p.v, one.contiguous()))
    assert all(torch.equal(a, b) for a, b in zip(same, backward(p, o, lse, (p.q, p.k, p.v, one))))


def test_a_nan_stays_in_its_sequence():
    p = problem([70, 33, 300])
    o, lse = forward(p)
    expected = backward(p, o, lse)
    for x in (p.q, p.k, p.v, p.grad, o):
        x[70:103] = float("nan")
    for a, b in zip(backward(p, o, lse), expected):
        assert torch.equal(a[:70], b[:70]) and torch.equal(a[103:], b[103:])
    assert a[70:103].isnan().all()


def test_what_does_not_fit():
    p = problem([70, 3])
    fits = softmax_backward.fits
    assert fits(p.q, p.q_offsets, p.k_offsets, 255, 0, 1024, ARCH)
    assert not fits(p.q, p.q_offsets, p.k_offsets.clone(), 255, 0, 1024, ARCH)
    assert not fits(p.q, p.q_offsets, p.k_offsets, 255, 255, 1024, ARCH)
    assert not fits(p.q.half(), p.q_offsets, p.k_offsets, 255, 0, 1024, ARCH)
    assert not fits(p.q, p.q_offsets, p.k_offsets, None, 0, 4096, ARCH)
    assert not fits(p.q, p.q_offsets, p.k_offsets, 255, 0, 1024, 80)


def test_a6_more_than_two_billion_elements():
    T, H, d = (1 << 31) // (8 * 128) + 4096, 8, 128
    need = 5 * T * H * d * 2 + 16 * T * H
    if torch.cuda.mem_get_info()[0] < 1.2 * need:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of free memory")
    torch.use_deterministic_algorithms(False)  # filling new memory with NaN would double the footprint
    last = 1000
    x = torch.zeros(T, H, d, device="cuda", dtype=torch.bfloat16)
    x[-last:] = torch.randn(last, H, d, device="cuda", dtype=torch.bfloat16)
    p = problem([last], heads=H)
    p.q = p.k = p.v = p.grad = x[-last:].clone()
    o, lse = forward(p)
    expected = backward(p, o, lse)
    offsets = torch.tensor([0, T - last, T], device="cuda", dtype=torch.int32)
    wide = torch.zeros(H, T, device="cuda")
    wide[:, -last:] = lse
    spec = Spec(T, T, (), d**-0.5, 255, 0)
    out = torch.zeros_like(x)
    out[-last:] = o
    for found, right in zip(launch.causal_backward(x, x, x, x, out, wide, offsets, spec), expected):
        assert torch.equal(found[-last:], right) and not found[:-last].any()


@pytest.mark.parametrize("heads,window", [(1, 256), (4, 256), (2, 64), (4, None)])
def test_a18_a26_equal_bits(heads, window):
    p = problem(lengths(200, 1024), window, heads=heads)
    o, lse = forward(p)
    first = backward(p, o, lse)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000 if heads == 4 and window else 100):
        for a, b in zip(first, backward(p, o, lse)):
            different += (a != b).sum()
    assert not different.item()


def test_a_captured_graph_gives_equal_bits():
    p = problem(lengths(60, 700), heads=4)
    o, lse = forward(p)
    expected = backward(p, o, lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = backward(p, o, lse)
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(expected, found))


def test_the_op_uses_it(monkeypatch):
    calls = []
    real = softmax_backward.backward
    monkeypatch.setattr(softmax_backward, "backward", lambda *a: calls.append(1) or real(*a))
    p = problem(lengths(150, 300), heads=4, slack=9)
    check(p, p.run())
    assert len(calls) == 1
    p.options["causal"] = False
    p.run()
    few = problem(lengths(6, 300), heads=4)
    few.run()
    assert len(calls) == 1
