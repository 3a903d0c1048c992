"""Techniques `cluster` and `deferred` of provider hopper without a GPU: what they refuse, and what kernels get."""

import pytest
import torch

from recsys_norm.kernels.hopper import deferred, launch, postnorm, postnorm_cluster
from recsys_norm.ops.problem import Problem

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = launch.manifest()["90"]["kernels"]


def problem(**fields):
    values = dict(op="linear_norm", norm="rms", M=64, K=64, N=64, dtype=BF16, param_dtype=BF16, eps=1e-5)
    return Problem(**values | dict(device="cuda", arch=90, triton_version=(3, 6)) | fields)


@pytest.fixture
def driver(monkeypatch):
    """A driver that supports CUDA 13.0, on machines without one."""
    monkeypatch.setattr(launch, "_driver_version", lambda: 13000)
    launch.why_not.cache_clear()
    yield
    launch.why_not.cache_clear()


@pytest.mark.parametrize(
    "fields,reason",
    [
        ({}, None),
        ({"dtype": FP16, "param_dtype": FP32, "K": 8, "N": 2048, "norm": "layer", "residual": "before"}, None),
        ({"M": 2**31 // 512 + 300, "N": 512}, None),
        ({"op": "norm_linear"}, "serves linear_norm"),
        ({"device": "cpu"}, "tensors are on cpu"),
        ({"arch": 100}, "compute capability 9.0"),
        ({"dtype": FP32}, "bfloat16 and float16, not torch.float32"),
        ({"K": 12}, "in-features is 12, not a multiple of 8"),
        ({"N": 17}, "out-features is 17"),
        ({"strides": (68, 1)}, "row stride of x is 68"),
        ({"N": 2056}, "holds 2048 out-features and the weight has 2056"),
        ({"N": 4096, "K": 512, "groups": 4}, None),
        ({"N": 2304, "groups": 2}, "holds 1024 out-features of a norm and there are 1152"),
        ({"N": 1024, "K": 520, "groups": 2}, "it holds 512 in-features in shared memory and there are 520"),
        ({"N": 384, "groups": 2}, "groups of multiples of 128 out-features, not of 192"),
        ({"training": True, "triton_version": None}, "it needs triton"),
    ],
)
def test_cluster_says_what_it_cannot_do(fields, reason, driver):
    found = postnorm.Cluster().why_not(problem(**fields))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    "fields,reason",
    [
        ({"K": 17}, None),  # the first GEMM is cuBLAS
        ({"activation": "identity"}, None),
        ({"norm": "layer"}, None),
        ({"op": "linear_norm"}, "serves linear_norm_linear"),
        ({"activation": "silu"}, "'silu' does not commute"),
        ({"N": 20}, "in-features is 20, not a multiple of 8"),
        ({"N2": 12}, "out-features is 12"),
        ({"N": 8200}, "stops at 8192"),
        ({"dtype": FP32}, "not torch.float32"),
    ],
)
def test_deferred_says_what_it_cannot_do(fields, reason, driver):
    found = deferred.Deferred().why_not(problem(**{"op": "linear_norm_linear", "N2": 64} | fields))
    assert found is None if reason is None else reason in found


@pytest.fixture
def calls(monkeypatch):
    """What kernels are launched with, on a device of 132 SMs."""
    found = []
    monkeypatch.setattr(launch.Kernel, "__call__", lambda self, *a, **options: found.append((self, a, options)))
    monkeypatch.setattr(launch.Kernel, "resident_clusters", lambda self, device: 132 // self.entry["cluster"])
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    postnorm_cluster.clusters_at_once.cache_clear()
    yield found
    postnorm_cluster.clusters_at_once.cache_clear()


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("K,N", [(520, 128), (4096, 1024), (8, 1032), (512, 2048)])
def test_what_the_kernels_get_where_w_streams(norm, dtype, K, N, calls):
    x, weight = torch.randn(300, K).to(dtype), torch.randn(N, K).to(dtype)
    assert postnorm_cluster.why_not(K, N, 1) is not None
    out = postnorm.forward(x, weight, None, None, None, None, layer=norm == "layer", eps=1e-5, position=None)
    (found, (grid, *args), options), = calls  # fmt: skip
    params = found.entry["params"]
    assert found.name == f"postnorm_stream_{norm}_{'bf16' if dtype == BF16 else 'fp16'}" and options == {
        "cooperative": True
    }
    assert len(args) == len(params)
    named = dict(zip((p["name"] for p in params), args))
    members = -(-N // postnorm.COLUMNS)
    assert members <= postnorm.MAX_GROUP and named["NC"] == members and grid == members * named["groups"]
    assert named["groups"] == 3 and named["KT"] == -(-K // 64) and named["y_desc"] is out.y  # blocks of 128 rows
    box = {p["name"]: p["box"] for p in params if p["kind"] == "tile"}
    assert box["w_desc"] == [postnorm.COLUMNS, 64] and box["x_desc"] == [64, 64]


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("position", [None, "before", "after"])
@pytest.mark.parametrize(
    "K,N,groups,kernel,members",
    [(8, 8, 1, "bf16_4_4", 1), (264, 384, 1, "bf16_6_4", 3), (512, 1024, 2, "bf16_8_4", 4), (512, 1000, 1, "bf16_8_8", 8)],
)  # fmt: skip
def test_what_the_cluster_kernels_get(norm, position, K, N, groups, kernel, members, calls):
    """A residual picks the kernel that loads it into registers, none the one that stores through shared memory."""
    x, weight, residual = (torch.randn(shape).to(BF16) for shape in ((70, K), (N, K), (70, N)))
    gamma = torch.randn(N)
    out = postnorm_cluster.forward(
        x, weight, None, gamma, None, None if position is None else residual, layer=norm == "layer", eps=1e-5,
        position=position, groups=groups, write_hat=True,
    )  # fmt: skip
    (found, (grid, *args), options), = calls  # fmt: skip
    way = "direct" if position else "joint"
    assert found.name == f"postnorm_{way}_{norm}_{kernel}" and found.entry["cluster"] == members and not options
    assert grid == members * groups * 2  # blocks of 64 rows
    assert len(args) == len(found.entry["params"])
    for parameter, a in zip(found.entry["params"], args):
        if parameter["kind"] == "tile":
            assert a.dim() == len(parameter["box"]) and parameter["box"][-1] == 64 and a.stride(-1) == 1
        elif parameter["kind"] == "pointer":
            assert a is None or isinstance(a, torch.Tensor)
        else:
            assert isinstance(a, (int, float)), parameter
    named = dict(zip((x["name"] for x in found.entry["params"]), args))
    assert (named["M"], named["N"], named["KT"], named["members"]) == (70, N // groups, -(-K // 64), members)
    assert named["groups"] == groups and named["x_ptr"] is named["x_desc"] and out.z is None
    kinds = [named[f"{v}_kind"] for v in ("bias", "gamma", "beta")]
    assert kinds == [0, 2, 0] and named["gamma_ptr"] is not None and named["bias_ptr"] is None
    assert named["form"] == 1 + 8 + {None: 0, "after": 4, "before": 16}[position]
    assert out.rstd.shape == (70 * groups,) and (out.mean is None) == (norm == "rms")
    assert named["rstd_ptr"] is out.rstd and named["mean_ptr"] is out.mean
    if position is None:
        assert named["side_desc"] is out.hat and named["y_desc"] is out.y and torch.equal(named["w_desc"], weight)
        assert named["fetch"] == 128 * K
    else:
        assert named["side_ptr"] is out.hat and named["y_ptr"] is out.y and named["residual_ptr"] is not None
        assert torch.equal(named["w_desc"], postnorm_cluster.quads(weight))
        assert [named[n] for n in ("x_fetch", "r_fetch", "pitch", "r_pitch")] == [128 * K, 128 * N, N, N]


@pytest.mark.parametrize("with_residual", [True, False])
def test_rows_with_gaps_are_not_fetched_ahead(with_residual, calls):
    x, weight, residual = torch.randn(70, 72).to(BF16), torch.randn(128, 64).to(BF16), torch.randn(70, 136).to(BF16)
    residual = residual[:, :128] if with_residual else None
    postnorm_cluster.forward(x[:, :64], weight, None, None, None, residual, layer=True, eps=1e-5, position="before")
    (found, (_, *args), _), = calls  # fmt: skip
    named = dict(zip((p["name"] for p in found.entry["params"]), args))
    if with_residual:
        assert [named[n] for n in ("x_fetch", "r_fetch", "pitch", "r_pitch")] == [0, 0, 128, 136]
    else:
        assert named["fetch"] == 0
