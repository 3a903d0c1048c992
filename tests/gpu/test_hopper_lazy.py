"""Technique `lazy` of norm_linear on Hopper over the awkward inputs. No kernel is compiled: the cubins are shipped."""

import pytest
import torch
from op_cases import tensors_for

from recsys_norm import ops
from recsys_norm.kernels.hopper import launch
from recsys_norm.kernels.hopper import lazy as hopper
from recsys_norm.ops import registry
from recsys_norm.testing import check_op, relative_error

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TECHNIQUE = "hopper/lazy"
NORMS = ["rms", "layer"]
# One per kernel: W resident in tiles of 128 and 256 columns, streamed in tiles of 128, 256 and 384; then ragged edges
# of M, K and N, several tiles per program, turns of several tiles.
SIZES = [(300, 128, 64), (300, 256, 256), (129, 2048, 128), (257, 512, 512), (129, 384, 384)]
SIZES += [(1, 8, 8), (3, 64, 8), (17, 72, 136), (63, 760, 200), (65, 1128, 760), (127, 536, 1152), (4097, 128, 264)]
SIZES += [(40000, 256, 200), (40000, 520, 512), (40000, 384, 384), (40000, 512, 1024), (300, 4104, 64)]


def on_gpu(tensors):
    return {n: t if t is None else t.detach().cuda().requires_grad_(t.requires_grad) for n, t in tensors.items()}


def run(norm, tensors=None, backward=False, **shape):
    tensors = on_gpu(tensors or tensors_for("norm_linear", norm=norm, **shape))
    registry.reset_counts()
    results = check_op("norm_linear", tensors, {"norm": norm}, {"technique": TECHNIQUE}, backward=backward)
    assert "lazy (hopper)" in registry.counts()["norm_linear"]
    return results


def forward(tensors, norm):
    """(y, mean, rstd) of the technique itself."""
    t = [tensors[n] for n in ("x", "weight", "bias", "norm_weight", "norm_bias")]
    return hopper.forward(*[None if p is None else p.detach() for p in t], norm == "layer", 1e-5)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype,param_dtype", [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32)])
def test_sizes(norm, dtype, param_dtype):
    for M, K, N in SIZES:
        # the backward has tests of its own; here it shows that what is saved suits it and that the op finds it
        shape = dict(M=M, K=K, N=N, dtype=dtype, param_dtype=param_dtype, mean=5.0)
        run(norm, backward=(M, K, N) in SIZES[1:5], **shape)


@pytest.mark.parametrize("norm", NORMS)
def test_without_affine_and_bias(norm):
    for M, K, N in ((300, 256, 256), (300, 512, 512), (129, 1024, 384)):
        for dtype, param_dtype in ((BF16, BF16), (FP16, FP32)):
            shape = dict(M=M, K=K, N=N, dtype=dtype, param_dtype=param_dtype)
            run(norm, affine=False, bias=False, scale=1e-3, **shape)
            run(norm, affine=False, bias=True, scale=30.0, **shape)


def test_parameters_of_mixed_dtypes():
    t = tensors_for("norm_linear", M=300, K=512, N=512, dtype=BF16)
    t["norm_weight"] = t["norm_weight"].detach().float().requires_grad_()
    t["bias"] = t["bias"].detach().float().requires_grad_()
    run("layer", tensors=t)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("K,N", [(256, 256), (384, 384), (512, 512), (1128, 264)])
def test_a11_large_mean(norm, K, N):
    run(norm, M=300, K=K, N=N, dtype=BF16, mean=100.0)
    run(norm, M=300, K=K, N=N, dtype=FP16, mean=100.0)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("K,N", [(256, 256), (384, 384), (520, 512)])
def test_saved_statistics(norm, K, N):
    """Also of rows whose first value, the shift of the sums, is far from the others."""
    t = on_gpu(tensors_for("norm_linear", norm=norm, M=20000, K=K, N=N, dtype=BF16, mean=3.0))
    with torch.no_grad():
        t["x"][::7, 0] = 1000.0
        x = t["x"].double()
    _, mean, rstd = forward(t, norm)
    centre = (x - x[:, :1]).mean(1)
    variance = x.var(1, correction=0) if norm == "layer" else x.square().mean(1)
    torch.testing.assert_close(rstd.double(), (variance + 1e-5).rsqrt(), rtol=2e-4, atol=0)
    if norm == "layer":
        assert ((mean.double() - centre).abs() < 1e-5 * (variance.sqrt() + centre.abs())).all()
    else:
        assert mean is None


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("K,N", [(256, 256), (384, 384), (520, 512)])
def test_a10_constant_rows(norm, K, N):
    t = tensors_for("norm_linear", norm=norm, dtype=FP16, M=300, K=K, N=N)
    with torch.no_grad():
        for row, value in enumerate((0.0, 100.0, 65504.0, -65504.0)):
            t["x"][row] = value
        t["x"][4, ::2], t["x"][4, 1::2] = 65504.0, -65504.0
    run(norm, tensors=t)
    if norm == "layer":
        y, _, _ = forward(on_gpu(t), norm)
        assert torch.equal(y[:4], y[:1].expand(4, -1))


@pytest.mark.parametrize("norm", NORMS)
def test_a7_strides_and_misalignment(norm):
    t = on_gpu(tensors_for("norm_linear", norm=norm, M=300, K=256, N=256, dtype=BF16))
    wide = torch.randn(300, 3 * 256 + 8, device="cuda").to(BF16)
    flat = torch.randn(300 * 256 + 1, device="cuda").to(BF16)
    row = torch.randn(1, 256, device="cuda").to(BF16).expand(300, 256)
    for x in (
        wide[:, 256:512],
        wide[:, 1:257],
        flat[1:].view(300, 256),
        row,
        wide[:1, :256],
        wide[:256, :300].t()[:, :256],
    ):
        same = {**t, "x": x.contiguous().clone()}
        y = ops.norm_linear(**{**t, "x": x}, norm=norm, technique=TECHNIQUE)
        assert torch.equal(y, ops.norm_linear(**same, norm=norm, technique=TECHNIQUE))
    with pytest.raises(ops.UnsupportedError, match="row stride of x is 260"):
        ops.norm_linear(
            **{**t, "x": wide.view(-1)[: 260 * 300].view(300, 260)[:, :256]}, norm=norm, technique=TECHNIQUE
        )


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "M,K,N",
    [
        (300, 512, 512),
        *((40000, *size) for size in ((256, 256), (384, 384), (512, 512), (512, 2048))),
        (262144, 512, 512),
    ],
)
def test_a18_a26_a_thousand_launches_give_the_same_bits(norm, M, K, N):
    t = on_gpu(tensors_for("norm_linear", norm=norm, M=M, K=K, N=N, dtype=BF16))
    first, wrong = forward(t, norm), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for a, b in zip(first, forward(t, norm)):
            if a is not None:
                wrong += (a != b).any()
    assert wrong.item() == 0


@pytest.mark.parametrize("norm", NORMS)
def test_a6_more_than_2_to_the_31_elements(norm):
    K, N, tail = 512, 520, 1000
    M = 2**31 // 512 + 1000
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free memory")
    t = on_gpu(tensors_for("norm_linear", norm=norm, M=1, K=K, N=N, dtype=BF16))
    x = torch.randn(M, K, device="cuda", dtype=BF16)
    whole, last = forward({**t, "x": x}, norm), forward({**t, "x": x[-tail:]}, norm)
    assert all(torch.equal(a[-tail:], b) for a, b in zip(whole, last) if a is not None)


def test_streams_and_graphs():
    t = on_gpu(tensors_for("norm_linear", M=4096, K=512, N=512, dtype=BF16))
    expected = forward(t, "layer")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late = {**t, "x": t["x"].detach() * 1}  # ready only after the sleep: a launch elsewhere would read too early
        found = forward(late, "layer")
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros_like(t["x"])
    with torch.cuda.graph(graph):
        found = forward({**t, "x": x}, "layer")
    x.copy_(t["x"].detach())
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(expected, found))


def test_launches_keep_no_tensor_and_their_table_is_bounded():
    t = on_gpu(tensors_for("norm_linear", M=2048, K=256, N=256, dtype=BF16))
    forward(t, "rms")
    before = torch.cuda.memory_allocated()
    for rows in range(1, launch.MAX_KEPT + 100):
        forward({**t, "x": t["x"][:rows]}, "rms")
    assert torch.cuda.memory_allocated() == before
    assert 0 < len(launch.get("lazy_rms_bf16_resident256")._kept) <= launch.MAX_KEPT


@pytest.mark.parametrize("norm", NORMS)
def test_results_do_not_depend_on_the_rows_around(norm):
    """A row gives the same bits in whatever tile, turn or grid it is computed."""
    t = on_gpu(tensors_for("norm_linear", norm=norm, M=40000, K=512, N=1024, dtype=BF16))
    whole = forward(t, norm)
    for start, rows in ((0, 1), (128, 200), (33, 5000)):
        part = forward({**t, "x": t["x"][start : start + rows]}, norm)
        assert all(torch.equal(a[start : start + rows], b) for a, b in zip(whole, part) if a is not None)


@pytest.mark.parametrize("K", [8, 512, 2048, 8192])
@pytest.mark.parametrize("dtype,param_dtype", [(BF16, BF16), (FP16, FP32)])
def test_fold(K, dtype, param_dtype):
    """W' is the rounded product, and centred rows sum to zero far below the rounding of one value."""
    t = on_gpu(tensors_for("norm_linear", M=1, K=K, N=100, dtype=dtype, param_dtype=param_dtype))
    weight, bias, gamma, beta = (t[n].detach() for n in ("weight", "bias", "norm_weight", "norm_bias"))
    folded, offset = hopper.fold(weight, bias, gamma, beta, dtype, centre=False)
    product = weight.double() * gamma.double()
    assert torch.equal(folded, (weight.float() * gamma.float()).to(dtype))
    assert relative_error(offset[:100], bias.double() + weight.double() @ beta.double(), rows=False) < 1e-5
    unit = torch.finfo(dtype).eps
    for scale, wanted in ((gamma, product), (None, weight.double())):
        centred, _ = hopper.fold(weight, bias, scale, beta, dtype, centre=True)
        exact = wanted - wanted.mean(1, keepdim=True)
        assert relative_error(centred, exact, rows=False) < 0.75 * unit
        assert (centred.double().sum(1).abs() <= 0.02 * unit * exact.norm(dim=1)).all()
