"""jagged_attention on the CPU: both paths against a per-sequence loop in fp64."""

import pytest
import torch
from attention_cases import LENGTHS, Problem, check, loop
from torch.utils.flop_counter import FlopCounterMode

from recsys_norm.ops import inputs, jagged_attention, jagged_torch
from recsys_norm.ops.activations import ACTIVATIONS

PATHS = ["auto", "eager"]
GDPA = dict(activation="gelu", scale=0.7)
SOFTMAX = dict(softmax=True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [GDPA, SOFTMAX], ids=["gdpa", "softmax"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a4_a5_lengths_and_slack(lengths, options, path):
    for slack, offsets_dtype in ((0, torch.int64), (3, torch.int32)):
        p = Problem(*LENGTHS[lengths], slack=slack, offsets_dtype=offsets_dtype, options=options)
        check(p, p.run(implementation=path))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [GDPA, SOFTMAX], ids=["gdpa", "softmax"])
def test_a3_no_sequences(options, path):
    for slack in (0, 4):
        p = Problem([], [], slack=slack, options=options)
        o, *grads = p.run(implementation=path)
        assert o.shape == (slack, 2, 16) and not o.any() and not any(g.any() for g in grads)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", [*ACTIVATIONS, ("gelu", "relu2"), ("silu", "silu")])
def test_activations_in_fp64(activation, path):
    p = Problem([5, 0, 9], [7, 3, 2], dtype=torch.float64, options=dict(activation=activation, scale=1.3))
    p.q *= 2  # reaches the outer pieces of hardswish
    for name, actual, expected in zip("o dq dk dv".split(), p.run(implementation=path), loop(p)):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11, msg=name)


def test_derivatives_are_those_of_autograd():
    x = torch.linspace(-6, 6, 49, dtype=torch.float64, requires_grad=True)  # hits 0, -3 and 3
    for name, activation in ACTIVATIONS.items():
        (expected,) = torch.autograd.grad(activation.forward(x).sum(), x)
        torch.testing.assert_close(activation.derivative(x.detach()), expected, msg=name)
        assert activation.forward(torch.zeros(1)).item() == 0, name


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_causal_and_window_count_from_the_start(softmax, causal, window, path):
    options = dict(softmax=softmax, causal=causal, window=window)
    for k_len in ([9, 1, 0, 16], [4, 6, 3, 20]):  # self-attention, then sides of different lengths
        p = Problem([9, 1, 0, 16], k_len, slack=2, dtype=torch.float64, options=options)
        for name, actual, expected in zip("o dq dk dv".split(), p.run(implementation=path), loop(p)):
            torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11, msg=name, check_dtype=True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("d", [1, 17, 96])
def test_dtypes_and_widths(d, dtype, path):
    for options in (GDPA, SOFTMAX | dict(causal=True)):
        p = Problem([30, 65, 2], [30, 65, 2], d=d, dtype=dtype, options=options)
        check(p, p.run(implementation=path))


def test_groups_of_similar_length(monkeypatch):
    """Many sequences make several groups, some with padding; a small bound on a group makes many more."""
    g = torch.Generator().manual_seed(3)
    q_len, k_len = torch.randint(0, 40, (60,), generator=g).tolist(), torch.randint(0, 9, (60,), generator=g).tolist()
    for most, small in ((1 << 22, 1 << 16), (1 << 22, 1), (200, 1)):
        monkeypatch.setattr(jagged_torch, "_GROUP_SCORES", most)
        monkeypatch.setattr(jagged_torch, "_SMALL_GROUP", small)
        for options in (GDPA, SOFTMAX | dict(window=5)):
            p = Problem(q_len, k_len, slack=1, dtype=torch.float64, options=options)
            for actual, expected in zip(p.run(), loop(p)):
                torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [GDPA, SOFTMAX], ids=["gdpa", "softmax"])
def test_a7_strides(options, path):
    p = Problem([7, 4], [7, 4], heads=2, d=6, options=options | dict(implementation=path))
    rows = p.q.shape[0]
    expected = p.run()

    def run(q, k, v):
        o = jagged_attention(q, k, v, p.q_offsets, p.k_offsets, **p.lengths, **p.options)
        return (o, *torch.autograd.grad(o, (q, k, v), p.grad))

    fused = torch.stack([p.q, p.k, p.v], 1).requires_grad_()  # one projection, sliced
    every_other = [torch.repeat_interleave(t, 2, 2)[..., ::2].requires_grad_() for t in (p.q, p.k, p.v)]
    heads_outside = [t.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for t in (p.q, p.k, p.v)]
    for tensors in (fused.unbind(1), every_other, heads_outside):
        assert not tensors[0].is_contiguous() and tensors[0].shape[0] == rows
        for actual, right in zip(run(*tensors), expected):
            assert torch.equal(actual, right)
    q = p.q.detach().requires_grad_()
    o = jagged_attention(q, p.k, p.v, p.q_offsets, p.k_offsets, **p.lengths, **p.options)
    (expanded,) = torch.autograd.grad(o.sum(), q, retain_graph=True)
    (whole,) = torch.autograd.grad(o, q, torch.ones_like(o))
    assert torch.equal(expanded, whole)


def test_gradcheck_of_eager():
    p = Problem([3, 0, 1], [2, 1, 2], heads=2, d=2, slack=1, dtype=torch.float64)
    inputs = [t.nan_to_num().requires_grad_() for t in (p.q, p.k, p.v)]
    more = [dict(activation="silu", scale=0.5), dict(activation=("gelu_tanh", "identity"), causal=True, window=2)]
    for options in (*more, dict(softmax=True), dict(softmax=True, causal=True, window=2)):

        def function(q, k, v, options=options):
            return jagged_attention(q, k, v, p.q_offsets, p.k_offsets, **p.lengths, **options, implementation="eager")

        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("op", ["gdpa", "jagged_softmax"])
def test_opcheck(op):
    p = Problem([5, 0, 3], [2, 4, 3], slack=2)
    tensors = [t.nan_to_num().requires_grad_() for t in (p.q, p.k, p.v)] + [p.q_offsets, p.k_offsets]
    options = ("gelu,silu", 0.5, False, 3) if op == "gdpa" else (0.5, True, None)
    library = torch.ops.recsys_norm
    torch.library.opcheck(getattr(library, op).default, (*tensors, 5, 4, *options))
    saved = () if op == "gdpa" else tuple(x.detach() for x in library.jagged_softmax(*tensors, 5, 4, *options))
    backward = (p.grad.nan_to_num(), *(t.detach() for t in tensors), *saved, 5, 4, *options)
    torch.library.opcheck(getattr(library, f"{op}_backward").default, backward)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [GDPA, SOFTMAX | dict(causal=True)], ids=["gdpa", "softmax"])
def test_a13_a14_one_graph_for_all_batches(options, path):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(jagged_attention, fullgraph=True, backend=counter)
    g = torch.Generator().manual_seed(0)
    for step in range(20):
        q_len, k_len = torch.randint(0, 9, (2, 6), generator=g).tolist()
        q_len[0] = k_len[0] = 2
        p = Problem(q_len, k_len, seed=step)
        q, k, v = (t.requires_grad_() for t in (p.q, p.k, p.v))
        arguments = (q, k, v, p.q_offsets, p.k_offsets)
        more = options | dict(max_q_len=9, max_k_len=9, implementation=path)
        actual, expected = compiled(*arguments, **more), jagged_attention(*arguments, **more)
        torch.testing.assert_close(actual, expected)
        grads = (torch.autograd.grad(o, (q, k, v), p.grad) for o in (actual, expected))
        for a, e in zip(*grads):
            torch.testing.assert_close(a, e)
    assert counter.frame_count <= 2


def test_a17_autocast_and_mixed_dtypes():
    p = Problem([4, 2], [3, 5])
    for path in PATHS:
        with torch.autocast("cpu", torch.bfloat16):
            o, *grads = p.run(implementation=path) if p.grad.dtype == torch.bfloat16 else _run_cast(p, path)
        assert o.dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in grads)
        whole = p.run(implementation=path)
        torch.testing.assert_close(o.float(), whole[0], rtol=2e-2, atol=2e-2)
    with pytest.raises(TypeError, match="v is torch.float16 where q is torch.float32"):
        jagged_attention(p.q, p.k, p.v.half(), p.q_offsets, p.k_offsets, **p.lengths)


def _run_cast(p, path):
    q, k, v = (t.detach().requires_grad_() for t in (p.q, p.k, p.v))
    o = jagged_attention(q, k, v, p.q_offsets, p.k_offsets, **p.lengths, implementation=path)
    return (o, *torch.autograd.grad(o, (q, k, v), p.grad.bfloat16()))


def test_a18_two_runs_agree_to_the_bit():
    p = Problem([50, 3, 20], [9, 2, 11], heads=3, d=32)
    for options in (GDPA, SOFTMAX):
        for first, second in zip(p.run(**options), p.run(**options)):
            assert torch.equal(first, second)


@pytest.mark.parametrize("options", [GDPA, SOFTMAX], ids=["gdpa", "softmax"])
def test_a20_frozen_inputs(options):
    p = Problem([4, 2], [3, 5], options=options)
    expected = p.run()[1:]
    for live in ([0], [1], [2], [0, 2]):
        tensors = [t.detach().requires_grad_(i in live) for i, t in enumerate((p.q, p.k, p.v))]
        o = jagged_attention(*tensors, p.q_offsets, p.k_offsets, **p.lengths, **options)
        o.backward(p.grad)
        for i, t in enumerate(tensors):
            assert (t.grad is not None) == (i in live)
            assert i not in live or torch.equal(t.grad, expected[i])


def test_flops_count_the_pairs_that_attend():
    for options in (dict(), dict(causal=True), dict(window=3), dict(causal=True, window=3), dict(window=50)):
        p = Problem([7, 0, 4], [3, 5, 9], heads=2, d=8)
        i, j = torch.arange(7)[:, None], torch.arange(9)
        pairs = 0
        for ql, kl in zip(p.q_len, p.k_len):
            keep = (i < ql) & (j < kl)
            keep &= (j <= i) if options.get("causal") else True
            keep &= (i - j).abs() < options.get("window", 100)
            pairs += int(keep.sum())
        for kind in (GDPA, SOFTMAX):
            with FlopCounterMode(display=False) as counter:
                p.run(**kind, **options)
            assert counter.get_total_flops() == (4 + 10) * pairs * 2 * 8


@pytest.mark.parametrize(
    "change,error,words",
    [
        (dict(activation="swish"), ValueError, ["'swish'", "silu"]),
        (dict(activation=("gelu",) * 3), ValueError, ["3 names", "2 heads"]),
        (dict(implementation="cuda"), ValueError, ["'cuda'", "eager"]),
        (dict(window=0), ValueError, ["window=0"]),
        (dict(max_q_len=-1), ValueError, ["max_q_len=-1"]),
        (dict(max_q_len=2), ValueError, ["max_q_len=2", "4"]),
        (dict(max_k_len=2, softmax=True), ValueError, ["max_k_len=2", "5"]),
        (dict(max_k_len=2, implementation="eager"), ValueError, ["max_k_len=2", "5"]),
        (dict(q_THd=torch.ones(6, 32)), ValueError, ["(6, 32)"]),
        (dict(k_UHd=torch.ones(8, 3, 16)), ValueError, ["(8, 3, 16)"]),
        (dict(q_THd=torch.ones(6, 2, 16).int()), TypeError, ["int32"]),
        (dict(q_offsets_B1=torch.tensor([0.0, 6.0])), ValueError, ["q_offsets", "float32"]),
        (dict(k_offsets_B1=torch.tensor([0, 8])), ValueError, ["2 sequences", "1"]),
        (dict(q_offsets_B1=torch.tensor([0, 4, 7])), ValueError, ["end at 7", "6 rows"]),
        (dict(q_offsets_B1=torch.tensor([0, 4, 2])), ValueError, ["not decrease"]),
    ],
)
def test_bad_input_is_one_error_that_names_it(change, error, words):
    p = Problem([4, 2], [3, 5])
    names = "q_THd k_UHd v_UHd q_offsets_B1 k_offsets_B1".split()
    with pytest.raises(error) as caught:
        jagged_attention(**(dict(zip(names, p.arguments)) | p.lengths | change))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_kernels_get_offsets_in_a_row():
    both = torch.tensor([[0, 0], [3, 2], [5, 4]], dtype=torch.int32)
    q, k = inputs.in_a_row(both[:, 0], both[:, 1])
    assert q.is_contiguous() and k.is_contiguous() and q.tolist() == [0, 3, 5] and k.tolist() == [0, 2, 4]
    column = both[:, 0]
    first, second = inputs.in_a_row(column, column)
    assert first is second  # what attention with a window asks for
