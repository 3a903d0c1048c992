"""Techniques `cluster` and `deferred` of provider hopper on a GPU: the tolerance rule over awkward inputs, and no race
between the CTAs that share a row."""

import pytest
import torch
from op_cases import tensors_for

from recsys_norm import ops
from recsys_norm.kernels.hopper import launch
from recsys_norm.ops import registry
from recsys_norm.testing import check_op

ARCH = 10 * torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
pytestmark = pytest.mark.skipif(launch.why_not(ARCH) is not None, reason="needs an H100 or H200 and its driver")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NORMS = ["rms", "layer"]
# One tile and less, several; rows on 1 to 8 CTAs with W resident (K <= 512, N <= 1024) and streamed; K, N beside a tile's
# edge.
SIZES = [
    (1, 8, 8), (3, 64, 128), (17, 72, 40), (63, 256, 136), (65, 384, 384), (127, 512, 512), (129, 760, 760),
    (20000, 448, 512), (5000, 136, 904), (257, 1128, 1128), (1030, 128, 1024),
    (300, 4096, 128), (200, 1024, 1024), (130, 512, 2048), (129, 2048, 2048),
]  # fmt: skip
FORMS = [(None, False), ("after", False), ("before", False), ("before", True), (None, True)]


def on_gpu(tensors):
    return {n: t if t is None else t.detach().cuda().requires_grad_(t.requires_grad) for n, t in tensors.items()}


def run(norm, *, options=None, tensors=None, backward=False, **shape):
    """The backward is that of `separate`, tested by itself; here it shows that what is saved fits."""
    tensors = on_gpu(tensors or tensors_for("linear_norm", norm=norm, **shape))
    registry.reset_counts()
    check_op(
        "linear_norm", tensors, {"norm": norm, **(options or {})}, {"technique": "hopper/cluster"}, backward=backward
    )
    assert set(registry.counts()["linear_norm"]) == {"cluster (hopper)", "unfused"}


def inference(tensors, **options):
    with torch.no_grad():
        return ops.linear_norm(**tensors, technique="hopper/cluster", **options)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("M,K,N", SIZES)
def test_sizes(norm, M, K, N):
    run(norm, M=M, K=K, N=N, dtype=BF16, mean=5.0, backward=N == 512)
    run(norm, M=M, K=K, N=N, dtype=FP16, param_dtype=FP32)
    run(norm, M=M, K=K, N=N, dtype=BF16, affine=False, bias=False, scale=1e-3)
    for position in ("before", "after"):  # another kernel, where W is resident
        run(norm, options={"residual_position": position}, M=M, K=K, N=N, dtype=BF16, residual=True, mean=5.0)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("position,return_sum", FORMS)
@pytest.mark.parametrize("K,N", [(256, 384), (1024, 512), (128, 1000)])
def test_residual_and_returned_sum(norm, position, return_sum, K, N):
    options = {"return_sum": return_sum} | ({"residual_position": position} if position else {})
    for affine in (True, False):
        shape = dict(M=300, K=K, N=N, dtype=BF16, residual=position is not None, affine=affine)
        run(norm, options=options, backward=N == 384, **shape)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "M,K,N,groups", [(300, 512, 1024, 2), (65, 72, 512, 4), (130, 256, 1536, 3), (20000, 512, 1024, 2)]
)
def test_groups(norm, M, K, N, groups):
    for position, return_sum in FORMS:
        options = {"groups": groups, "return_sum": return_sum} | ({"residual_position": position} if position else {})
        shape = dict(M=M, K=K, N=N, dtype=BF16, residual=position is not None, mean=2.0)
        run(norm, options=options, backward=M < 1000, **shape)


@pytest.mark.parametrize("norm", NORMS)
def test_a_large_mean_of_the_rows_of_the_result(norm):
    """LN's mean is taken off before squaring where it is large, also in the last, narrower slice of a row."""
    for N, mean in ((256, 5), (760, 5), (384, 50), (760, 50), (512, 1000)):
        t = tensors_for("linear_norm", norm=norm, M=300, K=512, N=N, dtype=FP16, param_dtype=FP32)
        with torch.no_grad():
            t["bias"] += mean
        run(norm, tensors=t)


def test_constant_and_zero_rows():
    for norm in NORMS:
        t = tensors_for("linear_norm", norm=norm, M=300, K=512, N=512, dtype=BF16, bias=False)
        with torch.no_grad():
            t["x"][:3] = 0
            t["x"][128:131] = 100
        run(norm, tensors=t)
        t = tensors_for("linear_norm", norm=norm, M=300, K=512, N=384, dtype=BF16)
        with torch.no_grad():
            t["x"][:3], t["bias"][:] = 0, 3  # rows of z that are constant and not zero
        run(norm, tensors=t)


def test_a7_strides_and_misalignment():
    t = on_gpu(tensors_for("linear_norm", M=300, K=256, N=256, dtype=BF16))
    wide = torch.randn(300, 3 * 256 + 8, device="cuda").to(BF16)
    flat = torch.randn(300 * 256 + 1, device="cuda").to(BF16)
    for view in (wide[:, 256:512], wide[:, 1:257], flat[1:].view(300, 256), wide[:256, :300].t()[:, :256]):
        for residual in (None, torch.randn(len(view), 256, device="cuda").to(BF16)):
            whole = {**t, "residual": residual}
            y, expected = (inference({**whole, "x": x}, norm="layer") for x in (view, view.contiguous().clone()))
            assert torch.equal(y, expected)
    residual = torch.randn(300, 300, device="cuda").to(BF16)
    for view in (residual[:, :256], residual[:, 3:259]):
        for position in ("before", "after"):
            options = {"norm": "layer", "residual_position": position}
            y, expected = (inference({**t, "residual": r}, **options) for r in (view, view.contiguous()))
            assert torch.equal(y, expected)


def test_a6_more_values_than_32_bits_count():
    M, K, N = 2**31 // 512 + 300, 64, 512
    if torch.cuda.mem_get_info()[0] < 14 * 2**30:
        pytest.skip("needs 14 GiB of free memory")
    t = on_gpu(tensors_for("linear_norm", M=1, K=K, N=N, dtype=BF16))
    t = {n: p.detach() for n, p in t.items()}
    t["x"] = torch.randn(M, K, device="cuda", dtype=BF16)
    residual = torch.randn(300, N, device="cuda", dtype=BF16)
    for position in ("before", "after"):
        whole = torch.zeros(M, N, device="cuda", dtype=BF16)
        whole[-300:] = residual
        y = inference({**t, "residual": whole}, norm="layer", residual_position=position)
        last = inference({**t, "x": t["x"][-300:], "residual": residual}, norm="layer", residual_position=position)
        assert torch.equal(y[-300:], last)
        del whole, y
    y, last = inference(t, norm="layer"), inference({**t, "x": t["x"][-300:]}, norm="layer")
    assert torch.equal(y[-300:], last)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(
    "M,K,N",
    [(300, 512, 512), *((30000, w, w) for w in (256, 384, 512, 1024)), (30000, 512, 2048), (262144, 512, 512)],
)
def test_a26_a_thousand_launches_give_the_same_bits(norm, residual, M, K, N):
    """On all SMs, with as many tiles per group as make every slot of the messages be used again."""
    t = on_gpu(tensors_for("linear_norm", norm=norm, M=M, K=K, N=N, dtype=BF16, residual=residual))
    options = {"residual_position": "before"} if residual else {}
    with torch.no_grad():
        outs = lambda: ops.linear_norm(  # noqa: E731
            **t, norm=norm, technique="hopper/cluster", return_sum=True, **options
        )
        first = outs()
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            for a, b in zip(first, outs()):
                different += (a != b).sum()
    assert not different.item()


def test_other_group_sizes_in_between_leave_no_stale_message():
    problems = [
        {n: p.detach() for n, p in on_gpu(tensors_for("linear_norm", M=M, K=K, N=N, dtype=BF16)).items()}
        for M, K, N in ((5000, 256, 256), (300, 512, 1000), (20000, 1024, 512), (129, 64, 2048))
    ]
    first = [inference(t, norm="layer") for t in problems]
    for i in range(200):
        at = (i * 7) % len(problems)
        assert torch.equal(first[at], inference(problems[at], norm="layer"))


def test_streams_and_graphs_have_their_own_messages():
    t = on_gpu(tensors_for("linear_norm", M=20000, K=256, N=512, dtype=BF16))
    t = {n: p.detach() for n, p in t.items()}
    expected = inference(t, norm="layer")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = inference(t, norm="layer")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(50):
        replayed.zero_()
        graph.replay()
        with torch.cuda.stream(side):
            beside = inference(t, norm="layer")
        here = inference(t, norm="layer")
        torch.cuda.synchronize()
        assert all(torch.equal(expected, y) for y in (replayed, beside, here))


def test_graphs_of_torch_compile_hold_no_tensor_of_its_own():
    """They stop at a tensor in their memory that is none of their results, as one kept for the next launch would be."""
    t = {n: p.detach() for n, p in on_gpu(tensors_for("linear_norm", M=300, K=512, N=512, dtype=BF16)).items()}

    def normalised(x):
        return ops.linear_norm(**(t | {"x": x}), norm="rms", technique="hopper/cluster")

    t.pop("norm_bias")
    expected = normalised(t["x"])
    replayed = torch.compile(normalised, fullgraph=True, options={"triton.cudagraphs": True})
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(replayed(t["x"]), expected)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("M,K,N,N2", [(1, 8, 8, 8), (65, 72, 384, 40), (300, 512, 2048, 512), (129, 1024, 760, 1024)])
def test_deferred(norm, M, K, N, N2):
    for fields in (
        dict(dtype=BF16, mean=5.0),
        dict(dtype=FP16, param_dtype=FP32),
        dict(dtype=BF16, affine=False, bias=False),
    ):
        tensors = on_gpu(tensors_for("linear_norm_linear", norm=norm, M=M, K=K, N=N, N2=N2, **fields))
        registry.reset_counts()
        check_op("linear_norm_linear", tensors, {"norm": norm}, {"technique": "hopper/deferred"})
        assert set(registry.counts()["linear_norm_linear"]) == {"deferred (hopper)", "unfused"}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("M", [300, 262144])
def test_a26_a_thousand_launches_of_deferred_give_the_same_bits(norm, M):
    t = on_gpu(tensors_for("linear_norm_linear", norm=norm, M=M, K=512, N=512, N2=512, dtype=BF16))
    with torch.no_grad():
        outs = lambda: ops.linear_norm_linear(**t, norm=norm, technique="hopper/deferred")  # noqa: E731
        first, different = outs(), torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            different += (first != outs()).sum()
    assert not different.item()
