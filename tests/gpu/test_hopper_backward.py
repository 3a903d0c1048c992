"""The Hopper backward of norm_linear on a GPU: the tolerance rule over the awkward inputs, gradients that are not
needed, equal bits in a thousand launches, also beside another process, and more than 2^31 elements."""

import multiprocessing

import pytest
import torch
from op_cases import SHARED_SPLITS, tensors_for

from recsys_norm import ops, reference
from recsys_norm.kernels.hopper import backward, dgrad, launch, lazy, wgrad
from recsys_norm.kernels.hopper.lazy import fold
from recsys_norm.testing import check_close_to_reference, check_op, relative_error

ARCH = 10 * torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
pytestmark = pytest.mark.skipif(launch.why_not(ARCH) is not None, reason="needs a Hopper GPU")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NORMS = ["rms", "layer"]
# One or more per form of the kernels, with sizes around their tiles.
SIZES = [
    (1, 8, 8), (3, 64, 24), (17, 128, 64), (63, 72, 200), (65, 256, 256), (127, 264, 2048), (129, 384, 384),
    (300, 512, 512), (257, 1128, 760), (129, 2048, 128), (64, 520, 136), (1030, 1024, 1024), (4097, 256, 72),
]  # fmt: skip


def on_gpu(tensors):
    return {n: t if t is None else t.detach().cuda().requires_grad_(t.requires_grad) for n, t in tensors.items()}


@pytest.fixture
def served(monkeypatch):
    """Calls that the Hopper backward served."""
    calls, original = [], backward.backward

    def count(norm, eps, saved, dy, needs, add=None):
        calls.append(needs)
        return original(norm, eps, saved, dy, needs, add)

    monkeypatch.setattr(backward, "backward", count)
    return calls


def check(tensors, norm, served, **options):
    before = len(served)
    check_op("norm_linear", on_gpu(tensors), {"norm": norm, **options}, {"technique": "hopper/lazy"})
    assert len(served) == before + 1


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype,param_dtype", [(BF16, BF16), (BF16, FP32), (FP16, FP16)])
def test_sizes(norm, dtype, param_dtype, served):
    for M, K, N in SIZES:
        for mean in (0.0, 5.0):
            tensors = tensors_for("norm_linear", M, K, N, norm=norm, dtype=dtype, param_dtype=param_dtype, mean=mean)
            check(tensors, norm, served)


@pytest.mark.parametrize("norm", NORMS)
def test_without_affine_and_bias_and_small_values(norm, served):
    for M, K, N in ((300, 512, 512), (129, 384, 256), (129, 1024, 256)):
        tensors = tensors_for("norm_linear", M, K, N, norm=norm, dtype=BF16, affine=False, bias=False, scale=1e-3)
        check(tensors, norm, served)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("K", [256, 384, 512, 760])
def test_a11_large_mean(norm, K, served):
    check(tensors_for("norm_linear", 300, K, 136, norm=norm, dtype=BF16, mean=100.0), norm, served)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("K", [256, 384, 512, 760])
def test_a10_constant_rows(norm, K, served):
    tensors = tensors_for("norm_linear", 300, K, 136, norm=norm, dtype=FP16)
    with torch.no_grad():
        for row, value in enumerate((0.0, 100.0, 65504.0, -65504.0)):
            tensors["x"][row] = value
        tensors["x"][4, ::2], tensors["x"][4, 1::2] = 65504.0, -65504.0
    check(tensors, norm, served)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a10_many_constant_rows_of_moderate_size(dtype, served):
    tensors = tensors_for("norm_linear", 300, 256, 136, norm="layer", dtype=dtype)
    with torch.no_grad():
        for rows, value in (
            (slice(0, 4), 3000.0),
            (slice(4, 8), 100.0),
            (slice(100, 103), 200.0),
            (slice(103, 123), -650.0),
        ):
            tensors["x"][rows] = value
    check(tensors, "layer", served)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("K", [256, 760])
def test_a20_only_what_is_needed(norm, K, served):
    names = ["x", "weight", "bias", "norm_weight", "norm_bias"]
    for needed in (["x"], ["weight"], ["bias"], ["norm_weight"], ["x", "bias"], names[:3], names[1:]):
        tensors = tensors_for("norm_linear", 300, K, 136, norm=norm, dtype=BF16)
        tensors = {n: t if t is None else t.detach().requires_grad_(n in needed) for n, t in tensors.items()}
        check(tensors, norm, served)
        assert tuple(served[-1]) == tuple(n in needed and tensors[n] is not None for n in names)


def test_a7_strides_and_expanded_gradients(served):
    tensors = on_gpu(tensors_for("norm_linear", 300, 256, 256, norm="rms", dtype=BF16))
    del tensors["norm_bias"]
    wide = torch.randn(300, 3 * 256 + 8, device="cuda").to(BF16)
    for view in (wide[:, 256:512], wide[:, 8:264], wide.flip(0)[:, :256]):
        found = []
        for x in (view, view.contiguous().clone()):
            leaves = {**tensors, "x": x.detach().requires_grad_()}
            y = ops.norm_linear(**leaves, norm="rms", technique="hopper/lazy")
            found.append(torch.autograd.grad(y.sum(), list(leaves.values())))
        assert all(torch.equal(a, b) for a, b in zip(*found))
    assert len(served) == 6


def gradients_of_x(op, tensors, norm, dy, **options):
    y = op(**tensors, norm=norm, **options)
    return torch.autograd.grad(y, tensors["x"], dy.to(y.dtype))[0]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("M,K,N", [(300, 128, 64), (1030, 256, 256), (129, 264, 136), (4097, 384, 384), (20000, 512, 512),
                                   (1, 520, 8), (129, 520, 72), (1030, 760, 264), (257, 1128, 760), (20000, 1024, 192),
                                   (65, 2048, 512), (4097, 2048, 136)])  # fmt: skip
def test_a_gradient_of_the_residual_stream_is_added(M, K, N, dtype, norm):
    """In the dtype's one rounding, whatever its row stride and address; without it nothing changes."""
    t = on_gpu(tensors_for("norm_linear", M, K, N, norm=norm, dtype=dtype, mean=1.0))
    dy = torch.randn(M, N, device="cuda").to(dtype)
    wide = torch.randn(M, 2 * K + 9, device="cuda").to(dtype)
    double = {n: p if p is None else p.detach().double().requires_grad_() for n, p in t.items()}
    truth = gradients_of_x(reference.norm_linear, double, norm, dy)
    unfused = gradients_of_x(ops.norm_linear, t, norm, dy, backend="unfused")
    x, weight, bias, gamma, beta = (t[n].detach() if t[n] is not None else None for n in list(t))
    y, mean, rstd = lazy.forward(x, weight, bias, gamma, beta, norm == "layer", 1e-5)
    saved = (x, weight, bias, gamma, beta, mean, rstd, y if K > 512 else None)
    run = lambda add: backward.backward(norm, 1e-5, saved, dy, (True, False, False, False, False), add)[0]  # noqa: E731
    plain = run(None)
    assert torch.equal(plain, run(torch.zeros_like(x)))
    for add in (
        wide[:, :K].contiguous(),
        wide.view(-1)[: M * (2 * K + 8)].view(M, -1)[:, 8 : K + 8],
        wide[:, 1 : K + 1],
    ):
        check_close_to_reference(run(add), unfused + add, truth + add.double(), dtype=dtype, name="dx with a sum")


def problem(M, K, N, layer, dtype=BF16):
    """dy, x, weight, gamma, beta, mean, rstd for the kernels themselves."""
    x, dy = torch.randn(M, K, device="cuda").to(dtype), torch.randn(M, N, device="cuda").to(dtype)
    weight, gamma = (torch.randn(N, K, device="cuda") * K**-0.5).to(dtype), torch.randn(K, device="cuda").to(dtype)
    shifted = x.float() - x[:, :1].float()
    mean = shifted.mean(1) if layer else None
    rstd = torch.rsqrt((shifted.var(1, correction=0) if layer else x.float().square().mean(1)) + 1e-5)
    return dy, x, weight, gamma, gamma if layer else None, mean, rstd


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("M,K,width,count", [(1003, 512, 512, 3), (300, 256, 256, 2), (777, 384, 64, 3), (129, 128, 192, 2),
                                             (65, 512, 72, 3), (300, 760, 256, 2), (40000, 512, 512, 3)])  # fmt: skip
def test_dy_in_pieces_gives_the_bits_of_the_whole(M, K, width, count, dtype, norm):
    """Where the kernels read the pieces, and where they are put together (72 columns, 760 in-features)."""
    dy, x, weight, gamma, beta, mean, rstd = problem(M, K, count * width, norm == "layer", dtype)
    wide = torch.randn(M, 2 * width, device="cuda").to(dtype)
    pieces = (*(part.contiguous() for part in dy.split(width, 1)[:-1]), wide[:, width:])
    whole, add = torch.cat(pieces, 1), torch.randn_like(x)
    saved = (x, weight, None, gamma, beta, mean, rstd, torch.randn_like(dy) if K > 512 else None)
    for more in (None, add):
        for needs in ((True, True, True, True, norm == "layer"), (True, True, False, False, False)):
            got, expected = (backward.backward(norm, 1e-5, saved, d, needs, more) for d in (pieces, whole))
            assert all(torch.equal(a, b) for a, b, need in zip(got, expected, needs) if need)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "M,K,N",
    [
        (300, 512, 512),
        *((128 * 150 + 17, K, 192) for K in (128, 256, 384, 512, 1024)),
        (262144, 512, 512),
        (65536, 512, 1024),
        (40000, 1024, 1024),
    ],
)
def test_a26_a_thousand_launches_with_equal_bits(norm, M, K, N):
    """Through every form of the kernels: clusters, persistent loops, rings that wrap many times."""
    dy, x, weight, gamma, beta, mean, rstd = problem(M, K, N, norm == "layer")
    folded, offset = fold(weight, None, gamma, beta, BF16, centre=norm == "layer")
    given = K > 512
    y = torch.randn_like(dy) if given else None
    add = torch.randn_like(x)

    def run():
        delta = torch.full_like(rstd, float("nan")) if given and wgrad.makes_row_dots(BF16) else None
        dots = None if delta is None else wgrad.RowDots(y, offset, delta)
        grads = wgrad.gradients(dy, x, weight, None, gamma, beta, norm == "layer", rstd, 1e-5, dots)
        if given and delta is None:
            delta = dgrad.row_dots(dy, y, offset)
        both = [dgrad.dx(dy, folded, x, mean, rstd, delta, more) for more in (None, add)]
        return *both, *(g for g in grads if g is not None), *([delta] if given else [])

    first = run()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for a, b in zip(run(), first):
            different += (a != b).sum()
    assert different.item() == 0


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("M,K,N", SHARED_SPLITS)
def test_programs_that_share_the_last_split(M, K, N, norm, served):
    check(tensors_for("norm_linear", M, K, N, norm=norm, dtype=BF16), norm, served)


def parameters(M, K, N, norm, dtype):
    """All gradients of parameters and, beyond 512 in-features, delta."""
    torch.manual_seed(M)
    dy, x, weight, gamma, beta, mean, rstd = problem(M, K, N, norm == "layer", dtype)
    dots = None
    if K > 512 and wgrad.makes_row_dots(dtype):
        dots = wgrad.RowDots(torch.randn_like(dy), torch.randn(N, device="cuda"), torch.full_like(rstd, float("nan")))
    grads = wgrad.gradients(dy, x, weight, None, gamma, beta, norm == "layer", rstd, 1e-5, dots)
    return [*(g for g in grads if g is not None), *([dots.delta] if dots else [])]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_programs_that_share_a_split_give_the_bits_of_programs_of_their_own(dtype, norm, monkeypatch):
    plan = wgrad.plan

    def own(*args):
        p = plan(*args)
        return p._replace(programs=p.tiles * p.splits)

    for M, K, N in SHARED_SPLITS:
        monkeypatch.setattr(wgrad, "plan", plan)
        shared = parameters(M, K, N, norm, dtype)
        monkeypatch.setattr(wgrad, "plan", own)
        assert all(torch.equal(a, b) for a, b in zip(shared, parameters(M, K, N, norm, dtype))), (M, K, N)


# Ragged rows and columns, tiles of every remainder of the ring's four slots, one tile and many per CTA.
WIDE = [(300, 520, 64), (1003, 2048, 128), (4097, 760, 264), (19217, 1024, 192), (20000, 1536, 256)]


def meet(barrier):
    """Start work on the GPU when the other process can, too."""
    torch.zeros(1, device="cuda")
    barrier.wait(60)


def differing_elements(norm, dtype, launches):
    """Of dx with a sum, in so many launches, from the first of them."""
    torch.manual_seed(0)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for M, K, N in WIDE:
        dy, x, weight, gamma, beta, mean, rstd = problem(M, K, N, norm == "layer", dtype)
        folded, _ = fold(weight, None, gamma, beta, dtype, centre=norm == "layer")
        delta, add = torch.randn_like(rstd), torch.randn_like(x)
        first = dgrad.dx(dy, folded, x, mean, rstd, delta, add)
        for _ in range(launches):
            different += (dgrad.dx(dy, folded, x, mean, rstd, delta, add) != first).sum()
    return different.item()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a26_wide_rows_with_a_sum_repeat_their_bits(dtype, norm):
    assert differing_elements(norm, dtype, 300) == 0


def test_a26_two_processes_share_a_gpu():
    """dx of wide rows with a sum once deadlocked, as far as seen only while another process used the GPU, too."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(2, meet, (context.Barrier(2),)) as pool:  # leaving it ends processes that hang
        calls = [(norm, dtype, 2000) for dtype in (BF16, FP16) for norm in NORMS]
        assert pool.starmap_async(differing_elements, calls, chunksize=1).get(timeout=100) == [0] * 4


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_row_dots_alone_and_with_the_parameters(dtype):
    dy, x, weight, gamma, beta, mean, rstd = problem(1003, 760, 520, True, dtype)
    y, offset = torch.randn_like(dy), torch.randn(768, device="cuda")
    found = [dgrad.row_dots(dy, y, offset)]
    if wgrad.makes_row_dots(dtype):
        found.append(torch.full_like(rstd, float("nan")))
        wgrad.gradients(dy, x, weight, None, gamma, beta, True, rstd, 1e-5, wgrad.RowDots(y, offset, found[1]))
    truth = (dy.double() * (y.double() - offset[:520].double())).sum(1)
    for delta in found:
        assert relative_error(delta, truth) < 1e-5


@pytest.mark.parametrize("norm", NORMS)
def test_a6_more_than_2_to_the_31_elements(norm):
    M, K, N, tail = (1 << 31) // 512 + 1000, 512, 512, 700
    if torch.cuda.mem_get_info()[0] < 16 * M * K:
        pytest.skip("needs 34 GB of free memory")
    small = on_gpu(tensors_for("norm_linear", tail, K, N, norm=norm, dtype=BF16))
    small = {n: t if t is None else t.detach() for n, t in small.items()}
    x = torch.zeros(M, K, device="cuda", dtype=BF16)
    x[-tail:] = small["x"]
    dy = torch.zeros(M, N, device="cuda", dtype=BF16)
    dy[-tail:] = torch.randn(tail, N, device="cuda")
    leaves = {n: t if t is None else t.clone().requires_grad_() for n, t in {**small, "x": x}.items()}
    wanted = [n for n, t in leaves.items() if t is not None]
    y = ops.norm_linear(**leaves, norm=norm, technique="hopper/lazy")
    grads = dict(zip(wanted, torch.autograd.grad(y, [leaves[n] for n in wanted], dy)))
    double = {n: t if t is None else t.double().requires_grad_() for n, t in small.items()}
    truth = torch.autograd.grad(
        reference.norm_linear(**double, norm=norm), [double[n] for n in wanted], dy[-tail:].double()
    )
    assert not grads["x"][:-tail].any()
    for name, expected in zip(wanted, truth):
        actual = grads[name][-tail:] if name == "x" else grads[name]
        assert relative_error(actual, expected, rows=name == "x") < 1e-2, name
