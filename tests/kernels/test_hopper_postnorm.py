"""Techniques `cluster` and `deferred` of provider hopper without a GPU: what they refuse, and that every plan names a
kernel that exists and holds its rows."""

import itertools

import pytest
import torch

from recsys_norm.kernels.hopper import deferred, launch, postnorm
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


def test_every_plan_has_a_kernel_that_holds_its_rows():
    for K, N in itertools.product((8, 256, 264, 384, 512, 520, 4096), (8, 128, 136, 384, 1024, 1032, 2048)):
        plan = postnorm.plan(K, N)
        assert -(-N // plan.columns) <= (postnorm.RESIDENT_GROUP if plan.resident else postnorm.MAX_GROUP)
        for dtype, norm in itertools.product(("bf16", "fp16"), ("rms", "layer")):
            kernel = KERNELS[postnorm.kernel_name(dtype, norm == "layer", plan)]
            box = {p["name"]: p["box"] for p in kernel["params"] if p["kind"] == "tile"}
            assert box["w_desc"] == [plan.columns, 64] and box["x_desc"] == [64, 64]
        assert plan.resident == 0 or plan.resident * 64 >= K
