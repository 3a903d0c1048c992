"""Jagged attention without norms on Hopper, backward and forward, on a GPU: the tolerance rule over heads, lengths, strides
and activations, rows past the last sequence, and equal bits."""

import pytest
import torch
from attention_cases import LENGTHS, Problem, check, loop

from recsys_norm import ops
from recsys_norm.kernels.gdpa import launch as gdpa
from recsys_norm.kernels.hopper import gdpa_backward, gdpa_forward, launch
from recsys_norm.ops.activations import get
from recsys_norm.reference import attention_one
from recsys_norm.testing import check_close_to_reference

ARCH = 10 * torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
pytestmark = pytest.mark.skipif(launch.why_not(ARCH) is not None, reason="needs an H100 or H200 and its driver")


def lengths(batch, longest, seed=0):
    sizes = torch.randint(0, longest + 1, (batch,), generator=torch.Generator().manual_seed(seed)).tolist()
    sizes[batch // 2], sizes[-1] = 0, longest
    return sizes


def problem(queries, keys, **more):
    more = dict(d=128, dtype=torch.bfloat16, device="cuda", options=dict(activation="gelu", scale=0.09)) | more
    return Problem(queries, keys, **more)


def backward(p, *views):
    """(dq, dk, dv) by this kernel; `views` are to be used in place of q, k, v and the gradient."""
    tensors = views or (p.q, p.k, p.v, p.grad)
    code = get(p.options["activation"]).code
    most = max([1, *p.k_len])
    assert gdpa_backward.fits(tensors, len(p.q_len), code, most, ARCH)
    grads = [torch.full(t.shape, float("nan"), device=t.device, dtype=t.dtype) for t in tensors[:3]]
    gdpa_backward.backward((*tensors, *grads), p.q_offsets, p.k_offsets, code, most, p.options["scale"])
    return grads


def check_gradients(p, found):
    check(p, (loop(p, p.dtype)[0], *found))


def run(queries, keys, **more):
    p = problem(queries, keys, **more)
    found = backward(p)
    check_gradients(p, found)
    return p, found


@pytest.mark.parametrize("name", [n for n in LENGTHS if n != "nothing"])
@pytest.mark.parametrize("heads", [1, 3])
def test_a4_empty_sequences(name, heads):
    queries, keys = LENGTHS[name]
    for scale in (1, 14):
        run([scale * n for n in queries], [(scale // 2 + 1) * n for n in keys], heads=heads, slack=5)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("longest", [64, 129, 700])
def test_a8_heads(heads, longest):
    run(lengths(6, longest), lengths(6, 128, 1), heads=heads)
    run(lengths(40, longest), [128] * 40, heads=heads)


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 127, 128])
@pytest.mark.parametrize("queries", [1, 63, 64, 65, 191, 192])
def test_block_edges(queries, keys):
    run([queries, 70, queries], [keys, 128, keys])


@pytest.mark.parametrize("activation", gdpa_backward.ACTIVATIONS.values())
def test_activations(activation):
    for scale in (0.001, 0.09, -0.3, 1.0):
        run(lengths(6, 300), lengths(6, 128, 1), options=dict(activation=activation, scale=scale))


def test_large_values():
    """Where the activation is 0 or linear."""
    for size in (5.0, 30.0):
        p = problem(lengths(6, 300), lengths(6, 128, 1))
        p.q *= size
        check_gradients(p, backward(p))


@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_a5_rows_past_the_last_offset(offsets_dtype):
    for slack in (1, 7, 1000):
        run(lengths(6, 300), lengths(6, 128, 1), heads=2, slack=slack, offsets_dtype=offsets_dtype)


def test_sequences_over_many_programs():
    for queries in ([20000, 1, 9000], [1] * 100 + [30000], [30000] + [1] * 100, [130] * 150):
        p, first = run(queries, [128 if n > 1 else 40 for n in queries], heads=2, slack=9)
        for _ in range(10):
            assert all(torch.equal(a, b) for a, b in zip(first, backward(p)))


def test_many_sequences():
    """More than the 512 that the search for a program's range takes in at once."""
    run(lengths(700, 40), lengths(700, 20, 1), heads=2, slack=3)


def test_a7_strided_tensors():
    """Keys and values as halves of one projection, heads of wider tensors."""
    p = problem(lengths(6, 300), lengths(6, 128, 1), heads=4)
    expected = backward(p)
    pair = torch.stack([p.k, p.v], 1)
    wide = [torch.cat([t, t], 1)[:, :4] for t in (p.q, p.grad)]
    found = backward(p, wide[0], pair[:, 0], pair[:, 1], wide[1])
    assert all(torch.equal(a, b) for a, b in zip(expected, found))


def test_what_does_not_fit():
    p = problem([70, 3], [100, 2], heads=2)
    code = get("gelu").code
    tensors = (p.q, p.k, p.v, p.grad)
    assert gdpa_backward.fits(tensors, 2, code, 128, ARCH)
    assert not gdpa_backward.fits(tensors, 2, get("silu").code, 128, ARCH)
    assert not gdpa_backward.fits(tensors, 2, code, 129, ARCH)
    assert not gdpa_backward.fits([t.half() for t in tensors], 2, code, 128, ARCH)
    assert not gdpa_backward.fits(tensors, 2, code, 128, 80)
    assert not gdpa_backward.fits((*tensors[:3], p.grad[:1, :1].expand(p.grad.shape)), 2, code, 128, ARCH)
    shifted = torch.cat([p.q.new_zeros(1), p.q.flatten()])[1:].view_as(p.q)
    assert not gdpa_backward.fits((shifted, *tensors[1:]), 2, code, 128, ARCH)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_a18_a26_equal_bits(heads):
    p = problem(lengths(200, 700), [128] * 200, heads=heads)
    first = backward(p)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        for a, b in zip(first, backward(p)):
            different += (a != b).sum()
    assert not different.item()


def test_a_captured_graph_gives_equal_bits():
    p = problem(lengths(60, 700), [128] * 60, heads=4)
    expected = backward(p)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = backward(p)
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(expected, found))


def test_the_op_uses_it(monkeypatch):
    calls = []
    monkeypatch.setattr(gdpa_backward, "backward", lambda *a, real=gdpa_backward.backward: calls.append(1) or real(*a))
    p = problem(lengths(6, 300), lengths(6, 128, 1), heads=4)
    check(p, p.run())
    assert calls
    p = problem(lengths(6, 300), lengths(6, 128, 1), heads=4, slack=70)
    p.options["activation"] = ("gelu", "gelu_tanh", "silu", "silu")  # it writes whole rows
    check(p, p.run())
    assert len(calls) == 1 and gdpa.device_of(p.q)[0] == 90


def test_graphs_of_torch_compile_hold_no_tensor_of_its_own():
    """They stop at a tensor in their memory that is none of their results, as one kept for the next launch would be."""
    p = problem([64] * 20, [128] * 20, heads=2)
    tensors = [t.detach().requires_grad_() for t in (p.q, p.k, p.v)]
    options = p.options | p.lengths

    def attend(q, k, v):
        return ops.jagged_attention(q, k, v, p.q_offsets, p.k_offsets, **options)

    expected = torch.autograd.grad(attend(*tensors), tensors, p.grad)
    replayed = torch.compile(attend, fullgraph=True, options={"triton.cudagraphs": True})
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        found = torch.autograd.grad(replayed(*tensors), tensors, p.grad)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))


# ---- forward ---------------------------------------------------------------------------------------------------------


def forward(p, *views):
    """o by this kernel; `views` are to be used in place of q, k and v."""
    tensors = views or (p.q, p.k, p.v)
    code, most = get(p.options["activation"]).code, max([1, *p.k_len])
    assert gdpa_forward.fits(tensors, len(p.q_len), code, most, ARCH)
    o = torch.full(tensors[0].shape, float("nan"), device="cuda", dtype=torch.bfloat16)
    gdpa_forward.forward((*tensors, o), p.q_offsets, p.k_offsets, code, most, p.options["scale"])
    return o


def one_by_one(p, dtype):
    options = dict(activations=(p.options["activation"],), softmax=False, causal=False, window=None)
    sequences = zip(*(t.to(dtype)[: sum(n)].split(n) for t, n in ((p.q, p.q_len), (p.k, p.k_len), (p.v, p.k_len))))
    return torch.cat([attention_one(*one, scale=p.options["scale"], **options) for one in sequences])


def check_output(p, o):
    rows = sum(p.q_len)
    assert not o[rows:].any(), "rows past the last sequence are not 0"
    expected = one_by_one(p, torch.float64)
    if expected.any():
        check_close_to_reference(o[:rows], one_by_one(p, p.dtype), expected, dtype=p.dtype, name="o")
    else:
        assert not o.any()


def run_forward(queries, keys, **more):
    p = problem(queries, keys, **more)
    o = forward(p)
    check_output(p, o)
    return p, o


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("heads", [1, 3])
def test_forward_a4_empty_sequences(name, heads):
    queries, keys = LENGTHS[name]
    for scale in (1, 14):
        run_forward([scale * n for n in queries], [(scale // 2 + 1) * n for n in keys], heads=heads, slack=5)
    if sum(queries):
        run_forward(queries, keys, heads=heads)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("longest", [64, 129, 700])
def test_forward_a8_heads(heads, longest):
    run_forward(lengths(6, longest), lengths(6, 128, 1), heads=heads)
    run_forward(lengths(40, longest), [128] * 40, heads=heads)


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 127, 128])
@pytest.mark.parametrize("queries", [1, 63, 64, 65, 191, 192, 400])
def test_forward_block_edges(queries, keys):
    run_forward([queries, 70, queries], [keys, 128, keys])


@pytest.mark.parametrize("activation", gdpa_forward.ACTIVATIONS.values())
def test_forward_activations(activation):
    for scale in (0.001, 0.09, -0.3, 1.0):
        run_forward(lengths(6, 300), lengths(6, 128, 1), options=dict(activation=activation, scale=scale))


@pytest.mark.parametrize("activation", gdpa_forward.ACTIVATIONS.values())
def test_forward_large_values(activation):
    for size in (5.0, 30.0):
        p = problem(lengths(6, 300), lengths(6, 128, 1), options=dict(activation=activation, scale=0.09))
        p.q *= size
        check_output(p, forward(p))


@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_forward_a5_rows_past_the_last_offset(offsets_dtype):
    for slack in (1, 7, 1000):
        run_forward(lengths(6, 300), lengths(6, 128, 1), heads=2, slack=slack, offsets_dtype=offsets_dtype)


def test_forward_sequences_over_many_programs():
    for queries in ([20000, 1, 9000], [1] * 100 + [30000], [30000] + [1] * 100, [130] * 150):
        p, first = run_forward(queries, [128 if n > 1 else 40 for n in queries], heads=2, slack=9)
        for _ in range(10):
            assert torch.equal(first, forward(p))


def test_forward_many_sequences():
    """More than the 1,024 that the search for a program's range takes in at once."""
    run_forward(lengths(2500, 40), lengths(2500, 20, 1), heads=2, slack=3)


def test_forward_a7_strided_tensors():
    p = problem(lengths(6, 300), lengths(6, 128, 1), heads=4)
    expected = forward(p)
    pair = torch.stack([p.k, p.v], 1)
    wide = torch.cat([p.q, p.q], 1)[:, :4]
    assert torch.equal(forward(p, wide, pair[:, 0], pair[:, 1]), expected)


def test_forward_a_nan_stays_in_its_sequence():
    p = problem([200, 70, 300, 65, 10], [128, 100, 30, 128, 64], heads=2)
    clean = forward(p)
    p.q[200 + 3, 1] = p.k[128 + 100 + 29, 0, 5] = p.v[-1, 1, 7] = float("nan")
    found = forward(p).isnan()
    wrong = torch.zeros_like(found)
    wrong[200 + 3, 1] = wrong[270:570, 0] = wrong[-10:, 1, 7] = True
    assert torch.equal(found, wrong) and torch.equal(forward(p)[~wrong], clean[~wrong])


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_forward_a18_a26_equal_bits(heads):
    p = problem(lengths(200, 700), [128] * 200, heads=heads)
    first = forward(p)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        different += (first != forward(p)).sum()
    assert not different.item()


def test_forward_a_captured_graph_gives_equal_bits():
    p = problem(lengths(60, 700), [128] * 60, heads=4, slack=300)
    expected = forward(p)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = forward(p)
    for _ in range(3):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(expected, found)


def test_forward_a6_more_than_two_billion_elements():
    T, H, last = (1 << 31) // (8 * 128) + 4096, 8, 1000
    if torch.cuda.mem_get_info()[0] < 5 * T * H * 128:
        pytest.skip("needs 10 GiB of free memory")
    p = problem([last], [100], heads=H)
    q = torch.zeros(T, H, 128, device="cuda", dtype=torch.bfloat16)
    q[-last:] = p.q
    o = torch.empty_like(q)
    k, v = (torch.cat([t, t]) for t in (p.k, p.v))
    q_offsets, k_offsets = torch.tensor([0, T - last, T], device="cuda"), torch.tensor([0, 100, 200], device="cuda")
    gdpa_forward.forward((q, k, v, o), q_offsets, k_offsets, get("gelu").code, 128, p.options["scale"])
    check_output(p, o[-last:])
    assert not o[:-last].any()


def test_the_op_uses_the_forward_where_it_fits(monkeypatch):
    calls = []
    monkeypatch.setattr(gdpa_forward, "forward", lambda *a, real=gdpa_forward.forward: calls.append(1) or real(*a))
    p = problem(lengths(6, 300), lengths(6, 128, 1), heads=4, slack=70)
    check(p, p.run())
    assert len(calls) == 1
    shifted = torch.cat([p.q.new_zeros(1), p.q.flatten()])[1:].view_as(p.q)  # 2 bytes off: the stock kernel takes it
    p.q = shifted
    check(p, p.run())
    assert len(calls) == 1
