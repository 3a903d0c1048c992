"""The softmax attention kernel on a GPU: its output, and the gradients that torch's flash backward forms from its output and
log-sum-exp, against fp64."""

import pytest
import torch
from attention_cases import LENGTHS, Problem, check

from recsys_norm.kernels.gdpa.configs import Config
from recsys_norm.kernels.gdpa.launch import Spec
from recsys_norm.kernels.softmax import configs, launch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DTYPES = [torch.bfloat16, torch.float16]


def problem(q_len, k_len, **more):
    options = more.pop("options", {}) | dict(softmax=True)
    return Problem(q_len, k_len, device="cuda", options=options, **more)


def mixed_lengths(batch, longest, seed=0):
    lengths = torch.randint(0, longest + 1, (batch,), generator=torch.Generator().manual_seed(seed)).tolist()
    lengths[batch // 2], lengths[-1] = 0, longest
    return lengths


def run(p, config=None):
    """(o, lse, dq, dk, dv): the kernel, then the backward of the op."""
    causal, window = p.options.get("causal", False), p.options.get("window")
    reach = None if window is None else window - 1
    lengths, scale = p.lengths.values(), p.options.get("scale", p.d**-0.5)
    spec = Spec(*lengths, (), scale, left=reach, right=0 if causal else reach)
    o, lse = launch.forward(*p.arguments, spec, config=config)
    backward = torch.ops.recsys_norm.jagged_softmax_backward
    return o, lse, *backward(p.grad, *p.arguments, o, lse, *lengths, scale, causal, window)


def check_all(p, config=None):
    o, lse, *grads = run(p, config)
    check(p, (o, *grads))
    assert not lse[:, sum(p.q_len) :].any()
    return o, lse


def flash(p):
    """(o, lse) of torch's flash attention."""
    causal, window = p.options.get("causal", False), p.options.get("window")
    reach = -1 if window is None else window - 1
    return torch.ops.aten._flash_attention_forward(
        p.q, p.k, p.v, p.q_offsets.int(), p.k_offsets.int(), *p.lengths.values(), 0.0, causal and window is None, False,
        scale=p.d**-0.5, window_size_left=reach, window_size_right=0 if causal else reach,
    )[:2]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a4_a5_lengths_and_slack(lengths, dtype):
    for slack, offsets_dtype in ((0, torch.int64), (5, torch.int32)):
        check_all(problem(*LENGTHS[lengths], dtype=dtype, slack=slack, offsets_dtype=offsets_dtype))


@pytest.fixture
def pointers(monkeypatch):
    """Keys and values row by row on every GPU."""
    monkeypatch.setattr(configs, "through_descriptors", lambda arch, d: False)


@pytest.mark.parametrize("causal,window", [(True, None), (False, 20), (True, 20), (True, 1), (True, 256)])
@pytest.mark.parametrize("longest", [100, 600])
def test_causal_and_window(longest, causal, window, pointers):
    lengths = mixed_lengths(6, longest)
    for d in (64, 128):
        p = problem(lengths, lengths, d=d, dtype=torch.bfloat16, slack=7, options=dict(causal=causal, window=window))
        if window == 1:  # softmax over one key has no slope; its output is the value
            o, _, *_ = run(p)
            assert torch.equal(o[: sum(lengths)], p.v[: sum(lengths)])
        else:
            check_all(p)


WIDTHS = [(8, torch.float16), (40, torch.bfloat16), (96, torch.bfloat16), (256, torch.bfloat16)]


@pytest.mark.parametrize("d,dtype", WIDTHS)
def test_a8_widths(d, dtype):
    for q_longest in (64, 150):
        check_all(problem(mixed_lengths(4, q_longest), mixed_lengths(4, 260, 1), d=d, dtype=dtype, slack=3))


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_pooling(heads):
    p = problem([64] * 40, mixed_lengths(40, 1000), heads=heads, d=128, dtype=torch.bfloat16, slack=4)
    check_all(p)


def test_log_sum_exp_is_that_of_flash_attention():
    lengths = mixed_lengths(12, 700)
    for q_len, options in ((lengths, dict(causal=True, window=256)), ([64] * 12, dict()), (lengths, dict(causal=True))):
        p = problem(q_len, lengths, d=128, dtype=torch.bfloat16, options=options)
        (o, lse), (o_flash, lse_flash) = run(p)[:2], flash(p)
        assert torch.equal(lse.isinf(), lse_flash.isinf())
        torch.testing.assert_close(lse, lse_flash, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(o.float(), o_flash.float(), rtol=2e-2, atol=1e-2)


def test_a7_strides_and_misaligned_tensors(pointers):
    """Misaligned tensors have no descriptors, and these take the keys of a sequence in another order."""
    lengths = [130, 70]
    p = problem(lengths, lengths, d=64, dtype=torch.bfloat16, options=dict(causal=True, window=50))
    o, lse, *_ = run(p)
    fused = torch.stack([p.q, p.k, p.v], 1).unbind(1)
    shifted = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view_as(t) for t in (p.q, p.k, p.v)]  # 2 bytes off
    for tensors in (fused, shifted):
        p.q, p.k, p.v = tensors
        actual, actual_lse, *grads = run(p)
        assert torch.equal(actual, o) and torch.equal(actual_lse, lse)
        check(p, (actual, *grads))


@pytest.mark.parametrize("softmax", [True, False])
def test_a7_strided_offsets(softmax):
    p = problem([130, 70], [130, 70], d=128, dtype=torch.bfloat16)
    p.options["softmax"] = softmax
    expected = p.run()
    p.q_offsets, p.k_offsets = torch.stack([p.q_offsets, p.k_offsets], 1).unbind(1)
    for actual, right in zip(p.run(), expected):
        torch.testing.assert_close(actual, right)


def test_a_nan_stays_in_its_sequence():
    lengths = [70, 33, 100]
    p = problem(lengths, lengths, d=64, dtype=torch.bfloat16, options=dict(causal=True, window=50))
    o, lse, *_ = run(p)
    for x in (p.q, p.k, p.v):
        x[70:103] = float("nan")
    actual, actual_lse, *_ = run(p)
    for rows in (slice(0, 70), slice(103, 203)):
        assert torch.equal(actual[rows], o[rows]) and torch.equal(actual_lse[:, rows], lse[:, rows])
    assert actual[70:103].isnan().all()


def test_two_runs_give_equal_bits():
    lengths = mixed_lengths(48, 700)
    p = problem(lengths, lengths, heads=4, d=128, dtype=torch.bfloat16, options=dict(causal=True, window=256))
    first = run(p)[:2]
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, run(p)[:2]))


def test_a10_large_scores_stay_finite():
    p = problem([65, 3], [128, 2], d=128, dtype=torch.float16, options=dict(scale=1.0))
    p.q.fill_(65504.0)
    p.k.fill_(-65504.0)
    o, lse, *_ = run(p)
    assert torch.isfinite(lse).all()
    for rows, keys in ((slice(0, 65), slice(0, 128)), (slice(65, 68), slice(128, 130))):
        mean = p.v[keys].float().mean(0).expand(rows.stop - rows.start, -1, -1)
        torch.testing.assert_close(o[rows].float(), mean, rtol=1e-2, atol=1e-3)


def test_a6_more_than_two_billion_elements():
    T, H, d = (1 << 31) // (8 * 128) + 4096, 8, 128
    need = 2 * T * H * d * 2 + 4 * T * H
    if torch.cuda.mem_get_info()[0] < 1.2 * need:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of free memory")
    torch.use_deterministic_algorithms(False)  # filling new memory with NaN would double the footprint
    last = 1000
    x = torch.zeros(T, H, d, device="cuda", dtype=torch.bfloat16)
    x[-last:] = torch.randn(last, H, d, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([0, T - last, T], device="cuda")
    spec = Spec(T, T, (), d**-0.5, left=255, right=0)
    o, lse = launch.forward(x, x, x, offsets, offsets, spec)
    small = torch.tensor([0, last], device="cuda")
    tail = x[-last:].clone()
    expected, expected_lse = launch.forward(tail, tail, tail, small, small, spec)
    assert torch.equal(o[-last:], expected) and torch.equal(lse[:, -last:], expected_lse)
    assert not o[:-last].any()


@pytest.fixture
def descriptors(monkeypatch):
    """The number of launches with them, where they are chosen."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("keys through descriptors are for Hopper")
    calls = []
    blocks = launch._blocks
    monkeypatch.setattr(launch, "_blocks", lambda x, rows: calls.append(rows) or blocks(x, rows))
    return lambda: len(calls) // 2


@pytest.mark.parametrize("case", LENGTHS)
def test_descriptors_lengths_and_slack(case, descriptors):
    check_all(problem(*LENGTHS[case], d=128, dtype=torch.bfloat16, slack=5))
    assert descriptors() == 1


@pytest.mark.parametrize("causal,window", [(False, None), (True, None), (False, 20), (True, 20), (True, 256)])
def test_descriptors_with_masks(causal, window, descriptors):
    for longest in (100, 600):
        lengths = mixed_lengths(6, longest)
        options = dict(causal=causal, window=window)
        check_all(problem(lengths, lengths, d=128, dtype=torch.bfloat16, slack=7, options=options))
    assert descriptors() == 2


def test_descriptors_slices_nan_and_equal_bits(descriptors):
    lengths = [70, 33, 100] * 20
    p = problem(lengths, lengths, heads=4, d=128, dtype=torch.bfloat16, options=dict(causal=True, window=50))
    o, lse, *_ = run(p)
    p.q, p.k, p.v = torch.stack([p.q, p.k, p.v], 1).unbind(1)
    for _ in range(300):
        actual, actual_lse = launch.forward(*p.arguments, Spec(100, 100, (), p.d**-0.5, left=49, right=0))
        assert torch.equal(actual, o) and torch.equal(actual_lse, lse)
    for x in (p.q, p.k, p.v):
        x[70:103] = float("nan")
    actual, actual_lse, *_ = run(p)
    for rows in (slice(0, 70), slice(103, sum(lengths))):
        assert torch.equal(actual[rows], o[rows]) and torch.equal(actual_lse[:, rows], lse[:, rows])
    assert actual[70:103].isnan().all() and descriptors() == 302


def test_other_tiles_agree():
    lengths = mixed_lengths(6, 300)
    for config in (Config(64, 64, 4, 2), Config(128, 32, 8, 3)):
        for options in (dict(causal=True, window=100), dict()):
            check_all(problem(lengths, lengths, d=128, dtype=torch.bfloat16, slack=2, options=options), config)


@pytest.mark.parametrize("pooling", [False, True])
def test_the_op_takes_the_kernel_where_it_serves(pooling):
    lengths = mixed_lengths(30, 600)
    options = dict() if pooling else dict(causal=True, window=256)
    p = problem(
        [64] * 30 if pooling else lengths, lengths, heads=4, d=128, dtype=torch.bfloat16, slack=9, options=options
    )
    if not pooling:
        p.k_offsets = p.q_offsets  # self-attention: one offsets tensor
    spec = Spec(*p.lengths.values(), (), p.d**-0.5, left=None if pooling else 255, right=None if pooling else 0)
    arguments = (*p.lengths.values(), p.d**-0.5, not pooling, options.get("window"))
    o, lse = torch.ops.recsys_norm.jagged_softmax(*p.arguments, *arguments)
    if launch.serves(p.q, p.k, p.v, spec):
        expected = launch.forward(*p.arguments, spec)
        assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])
    check(p, p.run())
