"""The Hopper backward of causal softmax self-attention without a GPU: what it takes, what it hands to its kernel, what that
wants to know of each query, and a walk over its blocks."""

import pytest
import torch

from recsys_norm.kernels.gdpa.launch import Spec
from recsys_norm.kernels.hopper import launch as hopper
from recsys_norm.kernels.hopper import softmax_backward
from recsys_norm.kernels.softmax import launch
from recsys_norm.kernels.softmax.configs import FIRST_QUERIES


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    monkeypatch.setattr(hopper, "_driver_version", lambda: 13000)
    hopper.why_not.cache_clear()
    yield
    hopper.why_not.cache_clear()


def test_what_it_takes():
    q, offsets = torch.randn(70, 2, 128).bfloat16(), torch.tensor([0, 20, 70])

    def fits(q=q, k_offsets=offsets, left=255, right=0, longest=1024, arch=90):
        return softmax_backward.fits(q, offsets, k_offsets, left, right, longest, arch)

    assert fits() and fits(left=None) and fits(left=0) and fits(longest=10**6)
    assert fits(k_offsets=offsets.view(3))  # the same numbers in memory
    assert not fits(k_offsets=offsets.clone()) and not fits(k_offsets=offsets[:2])
    assert not fits(left=None, right=None) and not fits(right=255)
    assert not fits(left=None, longest=4096) and not fits(left=1500, longest=4096)
    assert not fits(q.half()) and not fits(q[..., :64]) and not fits(arch=80)


def test_where_it_is_chosen(monkeypatch):
    offsets = torch.arange(300)
    q = torch.randn(299, 2, 128).bfloat16()
    spec = Spec(1, 1, (), 0.1, 255, 0)
    assert launch.serves_causal(q, offsets, offsets, spec)
    assert not launch.serves_causal(q, offsets, offsets.clone(), spec)  # cross-attention
    assert not launch.serves_causal(q[:100], offsets[:101], offsets[:101], spec)  # too few for all multiprocessors
    for arch in (80, 100):
        monkeypatch.setattr(launch, "device_of", lambda tensor, arch=arch: (arch, 1))
        assert not launch.serves_causal(q, offsets, offsets, spec)


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 66, 127, 128, 129, 130, 192, 256, 300, 10**6])
@pytest.mark.parametrize("length", [1, 64, 65, 128, 129, 300, 1000])
def test_sums_of_dq_wait_in_places_of_their_own(window, length):
    """The kernel's order: parts of 128 keys, of each all blocks of queries that see some. A new block starts from
    zero, and the part with the block's own keys ends it."""
    window = softmax_backward.window_of(window - 1, length)
    places = softmax_backward.slots(window, length)
    assert places & (places - 1) == 0
    waiting, seen, done = {}, {}, set()
    reach = (window + 126) // 64 * 64 + 64
    for key in range(0, length, 128):
        for first in range(0, min(length - key, reach), 64):
            block = (key + first) // 64
            place = block & (places - 1)
            if not (key == 0 or first >= window - 1):
                assert waiting.pop(place) == block
            else:
                assert block not in seen
            seen.setdefault(block, []).append(key)
            if first < 128:
                assert block not in done
                done.add(block)
            else:
                assert place not in waiting
                waiting[place] = block
    assert not waiting and done == set(range(-(-length // 64)))
    for block, keys in seen.items():
        least = max(64 * block - window + 1, 0) // 128 * 128
        assert keys == list(range(least, 64 * block + 1, 128))


def test_what_the_kernel_gets(monkeypatch):
    calls = []
    monkeypatch.setattr(hopper, "get", lambda name: lambda *a, **options: calls.append((name, a, options)))
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)
    three = torch.randn(71, 3, 2, 128).bfloat16()
    q, k, v = three.unbind(1)
    grad = q[:1, :1].expand(q.shape)
    grads = [torch.empty(q.shape, dtype=q.dtype) for _ in range(3)]
    offsets = torch.tensor([0, 20, 60])
    zeros, stats, order = launch.describe_queries(grad, q, torch.randn(2, 71), offsets)
    softmax_backward.backward((q, k, v, grad, *grads), offsets, order, stats, zeros, 255, 1000, 0.5)
    ((name, (programs, *args), options),) = calls
    entry = hopper.manifest()["90"]["kernels"][name]
    assert len(args) == len(entry["params"]) and not options and programs == 4
    assert entry["spills"] == 0 and entry["cluster"] == 1
    for parameter, a in zip(entry["params"], args):
        if parameter["kind"] == "tile":
            assert a.shape == (71, 256) and a.stride(1) == 1 and a.stride(0) % 8 == 0
        else:
            assert isinstance(a, torch.Tensor) == (parameter["kind"] == "pointer")
    named = dict(zip((p["name"] for p in entry["params"]), args))
    assert named["q_desc"].data_ptr() == q.data_ptr() and named["q_desc"].stride(0) == 768
    assert named["step"] == 2 and named["window"] == 256 and named["slots"] == 4 and named["pitch"] == 256
    assert named["sums_ptr"].shape == (4, 4, 2, 4096) and named["nothing_ptr"].numel() == 512
    assert named["T"] == named["U"] == 71 and named["scale"] == 0.5


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernel on the GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_what_it_wants_to_know_of_each_query(dtype, offsets_dtype):
    lengths = torch.randint(0, 9, (70,), generator=torch.Generator().manual_seed(0))
    offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(offsets_dtype)
    T = int(offsets[-1]) + 3
    grad, out = torch.randn(2, T, 3, 128).to(dtype)
    lse = torch.randn(3, T)
    lse[1, 2] = float("inf")
    zeros, stats, order = launch.describe_queries(grad, out, lse, offsets)
    assert not zeros.any() and zeros.numel() == softmax_backward.ZEROS
    torch.testing.assert_close(stats[0], -lse / torch.log(torch.tensor(2.0)))
    torch.testing.assert_close(stats[1], (grad.float() * out.float()).sum(-1).T, rtol=1e-4, atol=1e-4)
    assert order.tolist() == sorted(range(70), key=lambda b: (-lengths[b], b))


def causal_sums(tensors, lengths, scale, left):
    """(log-sum-exp, rowsum(p * grad v^T)), both [H, T], in fp64, of the tensors grad, q, k, v."""
    found = []
    sequences = zip(*(t.double().transpose(0, 1).split(lengths, 1) for t in tensors))
    for g, q, k, v in sequences:
        distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        hidden = (distance < 0) | (distance > (10**6 if left is None else left))
        score = (scale * q @ k.mT).masked_fill(hidden, float("-inf"))
        found.append((score.logsumexp(-1), (score.softmax(-1) * (g @ v.mT)).sum(-1)))
    return tuple(torch.cat(parts, 1) for parts in zip(*found))


SIZES = [3, 0, 16, 1, 17, 0, 40, 2]


def first_queries(dtype, d, left, offsets_dtype=torch.int32, slack=3):
    """Arguments of describe_first_queries, with thirds of one projection, then the stats that it leaves."""
    T, scale = sum(SIZES), d**-0.5
    three, grad = torch.randn(T + slack, 3, 3, d).to(dtype), torch.randn(T + slack, 3, d).to(dtype)
    tensors = (grad, *three.unbind(1))
    lse, along = causal_sums([t[:T] for t in tensors], SIZES, scale, left)
    given = torch.full((2, 3, T + slack), float("nan"))
    given[0, :, :T] = -lse / torch.log(torch.tensor(2.0))
    expected = given.clone()
    position = torch.cat([torch.arange(n) for n in SIZES])
    first = torch.nn.functional.pad(position < FIRST_QUERIES, (0, slack))
    expected[1][:, first] = along[:, first[:T]].float()
    offsets = torch.cat([torch.zeros(1), torch.tensor(SIZES).cumsum(0)]).to(offsets_dtype)
    return given, tensors, offsets, Spec(40, 40, (), scale, left, 0), expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernel on the GPU")
@pytest.mark.parametrize("left", [None, 0, 4, 15, 30])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [24, 128])
def test_the_first_queries_of_a_sequence(dtype, left, d):
    offsets_dtype = torch.int64 if d == 24 else torch.int32
    stats, tensors, offsets, spec, expected = first_queries(dtype, d, left, offsets_dtype)
    launch.describe_first_queries(stats, *tensors, offsets, spec)
    torch.testing.assert_close(stats, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same kernel on the GPU")
def test_a_nan_stays_with_the_first_queries_of_its_sequence():
    stats, tensors, offsets, spec, expected = first_queries(torch.float16, 32, None)
    start, end = 20, 37  # 17 queries
    for x in tensors:
        x[start:end] = float("nan")
    stats[0, :, start:end] = float("nan")
    launch.describe_first_queries(stats, *tensors, offsets, spec)
    expected[:, :, start:end] = float("nan")
    torch.testing.assert_close(stats, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_the_numbers_that_the_backward_gets(monkeypatch):
    """Those of a sequence's first queries do not know the output, which is rounded."""
    calls = []
    monkeypatch.setattr(softmax_backward, "backward", lambda *a: calls.append(a))
    _, (grad, q, k, v), offsets, spec, expected = first_queries(torch.float16, 128, 255)
    lse = expected[0] * -torch.log(torch.tensor(2.0))
    out = torch.ones_like(q)
    launch.causal_backward(grad, q, k, v, out, lse, offsets, spec)
    ((_, _, _, stats, *_),) = calls
    others = expected[1].isnan()
    torch.testing.assert_close(stats[1][~others], expected[1][~others], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stats[1][others], grad.float().sum(-1).T[others], rtol=1e-4, atol=1e-4)


def test_nothing_to_do():
    q = torch.randn(3, 2, 128).bfloat16()
    lse = torch.zeros(2, 3)
    for x, offsets in ((q, torch.tensor([0])), (q[:0], torch.tensor([0, 0]))):
        grads = launch.causal_backward(x, x, x, x, x, lse, offsets, Spec(1, 1, (), 0.1, None, 0))
        assert all(g.shape == x.shape and not g.any() for g in grads)
