"""The backward of jagged attention with the norm of the queries inside, on a GPU: the same bits as from normalised queries,
and norm_attention with and without it."""

import pytest
import torch
from attention_cases import Problem
from norm_attention_cases import arguments, check_slack

from recsys_norm import ops, reference
from recsys_norm.kernels.hopper import gdpa_backward, launch
from recsys_norm.kernels.norm import attention_inside as inside
from recsys_norm.kernels.norm.launch import norm_forward
from recsys_norm.kernels.norm.terms import terms
from recsys_norm.ops.activations import get
from recsys_norm.testing import relative_error

ARCH = 10 * torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
pytestmark = pytest.mark.skipif(launch.why_not(ARCH) is not None, reason="needs an H100 or H200 and its driver")
CANDIDATE = dict(backend="fused", technique="separate")


def lengths(batch, longest, seed=0):
    sizes = torch.randint(0, longest + 1, (batch,), generator=torch.Generator().manual_seed(seed)).tolist()
    sizes[batch // 2], sizes[-1] = 0, longest
    return sizes


def problem(queries, keys, **more):
    more = dict(d=128, dtype=torch.bfloat16, device="cuda", options=dict(activation="gelu", scale=0.09)) | more
    return Problem(queries, keys, **more)


def backward(p, q, norm=None, into=None):
    """(dq, dk, dv) by the kernel, the first in the memory of `into`."""
    tensors = (q, p.k, p.v, p.grad if into is None else into)
    code, most = get(p.options["activation"]).code, max([1, *p.k_len])
    assert gdpa_backward.fits(tensors, len(p.q_len), code, most, ARCH)
    grads = [torch.full(t.shape, float("nan"), device="cuda", dtype=t.dtype) for t in tensors[:3]]
    grads[0] = grads[0] if into is None else into
    options = (code, most, p.options["scale"], *([] if norm is None else [norm]))
    gdpa_backward.backward((*tensors, *grads), p.q_offsets, p.k_offsets, *options)
    return grads


def normed(p, kind="layer", weight=torch.bfloat16, zeros=False):
    """(numbers of rows and columns, q after the norm as these make it) for the problem's q."""
    g = torch.Generator().manual_seed(1)
    w = b = mean = None
    if weight is not None:
        w, b = ((torch.randn(p.heads * 128, generator=g) + m).to("cuda", weight) for m in (1.0, 0.0))
        b = b if kind == "layer" else None
        if zeros:
            w[::3] = 0
    live, rows = sum(p.q_len), p.q.flatten(1)
    x = rows.float()
    if kind == "layer":
        mean = (x - x[:, :1]).mean(1)
        x = x - (x[:, :1] + mean[:, None])
    return numbers_of(p, rows, mean, (x.square().mean(1) + 1e-5).rsqrt(), w, b, live)


def numbers_of(p, rows, mean, rstd, w, b, live):
    numbers = terms(rows, mean, rstd, w, b)
    w, b = (numbers[1][:, i].flatten().double() for i in (0, 1))
    hat = (rows.float() - numbers[0][:, :1]) * numbers[0][:, 1:]
    q = torch.zeros_like(p.q)
    q[:live] = (hat.double() * w + b).float()[:live].view(live, p.heads, 128)
    return numbers, q


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_what_is_normalised_has_the_norms_bits(kind):
    """Except where a mean that is made of the one relative to the row's first value is rounded otherwise."""
    p = problem(lengths(6, 300), lengths(6, 128, 1), heads=4, slack=9)
    g, live = torch.Generator().manual_seed(1), sum(p.q_len)
    w, b = ((torch.randn(512, generator=g) + m).to("cuda") for m in (1.0, 0.0))
    b = b if kind == "layer" else None
    out = norm_forward(p.q.flatten(1), w, b, norm=kind, eps=1e-5, cut=(p.q_offsets, 1))
    _, q = numbers_of(p, p.q.flatten(1), out.mean, out.rstd, w, b, live)
    other = (q != out.y.view_as(q))[:live].float().mean().item()
    assert other < 1e-3 if kind == "layer" else other == 0


def run(queries, keys, kind="layer", weight=torch.bfloat16, zeros=False, **more):
    p = problem(queries, keys, **more)
    p.q[: sum(p.q_len)] += 0.5
    numbers, q = normed(p, kind, weight, zeros)
    expected = backward(p, q)
    for a, b in zip(backward(p, p.q, gdpa_backward.Norm(*numbers, False)), expected):
        assert torch.equal(a, b)
    dq, dk, dv = backward(p, p.q, gdpa_backward.Norm(*numbers, True))
    assert torch.equal(dk, expected[1]) and torch.equal(dv, expected[2])
    live, rounding = sum(p.q_len), 2.0**-8
    total = expected[0][:live].double() + p.grad[:live].double()
    assert ((dq[:live] - total).abs() <= 1.01 * rounding * (expected[0][:live].abs() + total.abs()) + 1e-30).all()
    assert not dq[live:].any()
    for a, b in zip(backward(p, p.q, gdpa_backward.Norm(*numbers, True), into=p.grad.clone()), (dq, dk, dv)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8, 12, 16])
def test_heads(heads):
    for kind in ("layer", "rms"):
        run(lengths(6, 300), lengths(6, 128, 1), kind, heads=heads, slack=9)
    run(lengths(40, 700), [128] * 40, heads=heads)


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 128])
@pytest.mark.parametrize("queries", [1, 63, 64, 65, 191, 192])
def test_block_edges(queries, keys):
    run([queries, 70, 0, queries], [keys, 128, 5, keys])


@pytest.mark.parametrize("activation", gdpa_backward.ACTIVATIONS.values())
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32, None])
def test_parameters(activation, weight):
    for kind in ("layer", "rms"):
        for zeros in (False, True):
            options = dict(activation=activation, scale=0.09)
            run(lengths(6, 300), lengths(6, 128, 1), kind, weight, zeros, options=options, slack=70)


def test_sequences_over_many_programs():
    for queries in ([20000, 1, 9000], [1] * 100 + [30000], [30000] + [1] * 100, [130] * 150, lengths(700, 40)):
        run(queries, [128 if n > 1 else 40 for n in queries], heads=2, slack=9, offsets_dtype=torch.int64)


def test_constant_and_large_rows():
    p = problem(lengths(6, 300), lengths(6, 128, 1))
    p.q[10:20] = 3.0
    p.q[20:30] += 1000.0
    numbers, q = normed(p)
    assert all(torch.equal(a, b) for a, b in zip(backward(p, p.q, gdpa_backward.Norm(*numbers, False)), backward(p, q)))


@pytest.mark.parametrize("heads", [1, 4, 8])
def test_equal_bits_and_a_captured_graph(heads):
    p = problem(lengths(200, 700), [128] * 200, heads=heads)
    numbers, _ = normed(p)
    for inner in (False, True):
        norm = gdpa_backward.Norm(*numbers, inner)
        first = backward(p, p.q, norm)
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for turn in range(1000):  # every second one in the gradient's memory, where that is possible
            into = p.grad.clone() if inner and turn % 2 else None
            for a, b in zip(first, backward(p, p.q, norm, into)):
                different += (a != b).sum()
        assert not different.item()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = backward(p, p.q, norm)
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(first, found))


# ---- norm_attention --------------------------------------------------------------------------------------------------


def case(heads=4, **more):
    queries, keys = lengths(12, 300), lengths(12, 128, 1)
    options = dict(H=heads, d=128, dtype=torch.bfloat16, pre="layer", post="rms", device="cuda") | more
    t, options = arguments((queries, keys), **options)
    return t, options | dict(activation="gelu", inner_residual=True)


def gradients(t, options, function=None):
    """By the op, or by another function."""
    leaves = {n: x.detach().requires_grad_(x.requires_grad) for n, x in t.items()}
    wanted = {n: x for n, x in leaves.items() if x.requires_grad}
    run, policy = (ops.norm_attention, CANDIDATE) if function is None else (function, {})
    y = run(**leaves, residual=leaves["q_THd"], **options, **policy)
    dy = torch.randn(y.shape, generator=torch.Generator("cuda").manual_seed(0), device="cuda").bfloat16().to(y.dtype)
    return dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), dy)))


@pytest.fixture
def switch(monkeypatch):
    calls = []
    real, fits = inside.backward, inside.fits
    monkeypatch.setattr(inside, "backward", lambda *a, **o: calls.append(1) or real(*a, **o))

    def turn(on):
        monkeypatch.setattr(inside, "fits", fits if on else lambda *_: False)
        return calls

    return turn


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("post", ["rms", None])
def test_the_op_has_the_same_bits(heads, post, switch):
    """Where the norm's mean is not made anew, and the sum with what comes past the attention is not rounded once less."""
    for on in ("q", "qk"):
        t, options = case(heads, pre="rms", post=post, on=on, slack=3)
        options |= dict(inner_residual=False)
        with torch.no_grad():
            for x in (t[n] for n in ("q_THd", "k_UHd", "v_UHd")):
                x[-3:] = 0
        switch(False)
        expected = gradients(t, options)
        calls = switch(True)
        found = gradients(t, options)
        assert calls and all(torch.equal(found[n], expected[n]) for n in expected)


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("pre", ["layer", "rms"])
def test_the_op_errs_no_more(inner, pre, switch):
    """Against fp64, beside the norm kernels around the attention's."""
    for more in (dict(), dict(post="layer", affine=False), dict(post=None), dict(on="qk", param_dtype=torch.float32)):
        t, options = case(pre=pre, **more)
        options |= dict(inner_residual=inner)
        double = {n: x.detach().double() if x.is_floating_point() else x for n, x in t.items()}
        double = {n: x.requires_grad_(t[n].requires_grad) for n, x in double.items()}
        exact = gradients(double, options | dict(eps=1e-5), reference.norm_attention)
        found = {}
        for on in (False, True):
            calls = switch(on)
            before = len(calls)
            found[on] = gradients(t, options | dict(eps=1e-5))
            assert len(calls) == before + on
        for name in exact:
            old, new = (relative_error(found[on][name], exact[name], rows=False) for on in (False, True))
            assert new <= 1.05 * old + 1e-3, (name, old, new)


def test_rows_past_the_last_offset(switch):
    calls = switch(True)
    for inner in (True, False):
        t, options = case(residual=True, slack=3)
        check_slack(t, options | dict(inner_residual=inner), CANDIDATE, 3, 3e-2)
    assert calls


def test_what_it_serves(switch):
    from recsys_norm.ops.norm_attention import _problem, _unpack

    def serves(
        activation="gelu", scope="all_heads", on="q", causal=False, softmax=False, most=128, dtype=torch.bfloat16
    ):
        q, k = (torch.zeros(n, 4, 128, device="cuda", dtype=dtype) for n in (70, 40))
        spec = _unpack(70, most, activation, softmax, 0.1, causal, None, "layer", on, scope, "rms", True)
        offsets = torch.tensor([0, 70], device="cuda")
        return inside.fits(_problem(q, k, (None,) * 6, False, spec, 1e-5, True), q, k, k, q, offsets)

    switch(True)
    assert serves() and serves(activation="gelu_tanh") and serves(on="qk")
    assert not serves(scope="head") and not serves(on="k") and not serves(activation="silu")
    assert not serves(activation="gelu,gelu,gelu_tanh,gelu") and not serves(causal=True) and not serves(softmax=True)
    assert not serves(most=129) and not serves(dtype=torch.float16)


def test_memory(switch):
    """The gradients of the attention's output and of both sides of the pre-norm take turns in one tensor."""
    t, options = case(heads=8)
    t["q_THd"] = torch.randn(1 << 15, 8, 128, device="cuda").bfloat16().requires_grad_()
    t["q_offsets_B1"] = torch.arange(13, device="cuda") * 2000
    options |= dict(max_q_len=2000)
    peaks = {}
    for on in (False, True):
        switch(on)  # off, both sides of the pre-norm have one tensor, and the output's gradient another
        y = ops.norm_attention(**t, residual=t["q_THd"], **options, **CANDIDATE)
        dy = torch.ones_like(y)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(y, t["q_THd"], dy)
        peaks[on] = (torch.cuda.max_memory_allocated() - before) / y.nbytes
        del y, dy
    assert peaks[True] < 1.5 < 2.9 < peaks[False], peaks
