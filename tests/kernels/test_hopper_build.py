"""The Hopper cubins without a GPU: of the sources beside them, within the hardware, and clear about their limits."""

import hashlib
import itertools
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recsys_norm.kernels.hopper import build, launch, lazy
from recsys_norm.ops import registry
from recsys_norm.ops.problem import Problem

ROOT = Path(__file__).parents[2]
AOT = ROOT / ".venv-aot"
ENTRIES = launch.manifest()["90"]
KERNELS = ENTRIES["kernels"]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def problem(**fields):
    values = dict(op="norm_linear", norm="rms", M=64, K=64, N=64, dtype=BF16, param_dtype=BF16, eps=1e-5)
    return Problem(**values | dict(device="cuda", arch=90, triton_version=(3, 6)) | fields)


@pytest.fixture
def driver(monkeypatch):
    """A driver that supports CUDA 13.0, on machines without one."""
    monkeypatch.setattr(launch, "_driver_version", lambda: 13000)
    launch.why_not.cache_clear()
    yield lambda version: (monkeypatch.setattr(launch, "_driver_version", version), launch.why_not.cache_clear())
    launch.why_not.cache_clear()


# ---- the archive -----------------------------------------------------------------------------------------------------


def test_cubins_are_of_these_sources():
    for arch, modules in build.declared_sources().items():
        assert not build.stale_modules(arch, modules), "sources have changed: run `make cubins`"
        assert set(launch.manifest()[str(arch)]["modules"]) == set(modules)


def test_archive_holds_what_the_manifest_says():
    assert (build.HERE / ENTRIES["archive"]).stat().st_size <= build.MAX_ARCHIVE_BYTES
    cubins = build.read_archive(ENTRIES)
    assert cubins
    for name, cubin in cubins.items():
        assert cubin[:4] == b"\x7fELF" and hashlib.sha256(cubin).hexdigest() == KERNELS[name]["sha256"], name


# Bytes, stores and loads, of what the whole kernel holds: a thread's number, addresses, parameters.
SPILLS = {
    "attention_staged_kernels": 310,
    "attention_ahead_kernels": 310,
    "attention_turns_kernels": 1200,
}


def test_kernels_fit_the_hardware():
    assert ENTRIES["compiler"].startswith(f"triton {build.TRITON_VERSION}") and ENTRIES["min_driver"] >= 12000
    for name, k in KERNELS.items():
        assert k["spills"] <= SPILLS.get(k["module"], 0), name
        assert 0 < k["registers"] <= 255 and k["num_warps"] * 32 * k["registers"] <= 65536, name
        assert k["shared"] + k["static_shared"] <= 227 * 1024, name
        assert 1 <= k["cluster"] <= 16 and k["num_warps"] <= 32, name
        assert all(p["kind"] == "tile" or p["kind"] in launch._FORMATS for p in k["params"]), name


def test_a_changed_neighbour_makes_a_module_stale(tmp_path):
    for name, text in (("SOURCES", "a 90\n"), ("a.py", "from .b import x\n"), ("b.py", "x = 1\n"), ("c.py", "")):
        (tmp_path / name).write_text(text)
    before = build.source_hash("a", tmp_path)
    (tmp_path / "c.py").write_text("y = 1\n")
    assert build.source_hash("a", tmp_path) == before
    (tmp_path / "b.py").write_text("x = 2\n")
    assert build.source_hash("a", tmp_path) != before
    assert build.stale_modules(90, ["a"], tmp_path) == ["a"]


def test_builds_merge(tmp_path):
    (tmp_path / "SOURCES").write_text("a 90\nb 90\n")

    def entry(module, cubin):
        return {"module": module, "size": len(cubin)}, cubin

    build.merge(90, ("t", 1), {"a": ("1", {"a1": entry("a", b"one"), "a2": entry("a", b"two")})}, tmp_path)
    build.merge(90, ("t", 1), {"b": ("2", {"b1": entry("b", b"three")})}, tmp_path)
    build.merge(90, ("t", 1), {"a": ("3", {"a1": entry("a", b"four")})}, tmp_path)  # a2 is gone
    manifest = build.json.loads((tmp_path / "manifest.json").read_text())["90"]
    assert build.read_archive(manifest, tmp_path) == {"a1": b"four", "b1": b"three"}
    assert manifest["modules"] == {"a": "3", "b": "2"}
    (tmp_path / "SOURCES").write_text("b 90\n")  # and now all of a is
    build.merge(90, ("t", 1), {}, tmp_path)
    assert list(build.json.loads((tmp_path / "manifest.json").read_text())["90"]["kernels"]) == ["b1"]


@pytest.mark.skipif(
    not (AOT / ".installed").exists(), reason="needs .venv-aot with triton 3.9 (`make cubins` makes it)"
)
def test_a_rebuild_gives_the_same_bytes():
    names = ["fold_centred_fp32_bf16_512", "lazy_rms_bf16_resident128"]
    command = [AOT / "bin" / "python", "-m", "kernels.hopper.build", *(f"--check={name}" for name in names)]
    settings = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- the launcher ----------------------------------------------------------------------------------------------------


def test_parameters_lie_as_the_compiler_wants_them():
    """As in the PTX: a map on 64 bytes, its sizes, its strides on 8 bytes, then scalars, then two pointers."""
    params = [
        {"name": "x", "kind": "tile", "dtype": "bf16", "box": [64, 64], "swizzle": 3},
        {"name": "n", "kind": "i32"},
        {"name": "w", "kind": "tile", "dtype": "bf16", "box": [1, 64, 64], "swizzle": 3},
        {"name": "p", "kind": "pointer"},
    ]
    kernel = launch.Kernel("k", "90", {"params": params, "shared": 0})
    x, w = [0, 256, 260, 264, 272], [128, 284, 288, 292, 296, 304, 312]
    assert kernel._offsets == [*x, 280, *w, 320, 328, 336] and kernel._bytes == 344
    assert kernel._maps == [0, None, 128, None]


def test_unknown_kernels_and_bad_tensors_are_named():
    with pytest.raises(KeyError, match="no kernel 'nothing' for sm_90"):
        launch.get("nothing")
    tile = launch._Tile({"name": "x", "kind": "tile", "dtype": "bf16", "box": [64, 64], "swizzle": 3})
    with pytest.raises(ValueError, match="parameter x takes a 2-D tensor of bf16"):
        tile.encode(torch.zeros(8, 8), 0)
    with pytest.raises(ValueError, match="parameter x needs .* multiples of 16 bytes .* make it contiguous"):
        tile.encode(torch.zeros(8, 12, dtype=BF16)[:, :8], 0)


def test_why_not_checks_device_driver_and_bindings(driver, monkeypatch):
    assert launch.why_not(90) is None
    assert "CUDA device" in launch.why_not(None)
    assert "compute capability 9.0 (H100, H200) and this device has 8.0" in launch.why_not(80)
    assert "this device has 10.0" in launch.why_not(100)

    def missing():
        raise ImportError("No module named 'cuda'")

    driver(lambda: ENTRIES["min_driver"] - 10)
    assert "update the driver" in launch.why_not(90)
    driver(missing)
    assert "cuda.bindings" in launch.why_not(90)
    monkeypatch.setattr(launch, "manifest", lambda: {})
    launch.why_not.cache_clear()
    assert "make cubins" in launch.why_not(90)


# ---- technique lazy --------------------------------------------------------------------------------------------------


def test_lazy_is_registered():
    assert ("lazy", "hopper") in {(t.name, t.provider) for t in registry.techniques("norm_linear")}


@pytest.mark.parametrize(
    "fields,reason",
    [
        ({}, None),
        ({"dtype": FP16, "param_dtype": FP32, "K": 8, "N": 8, "strides": (72, 1)}, None),
        ({"norm": "layer"}, None),
        ({"op": "linear_norm"}, "serves norm_linear"),
        ({"device": "cpu"}, "tensors are on cpu"),
        ({"arch": 80}, "compute capability 9.0"),
        ({"dtype": FP32}, "bfloat16 and float16, not torch.float32"),
        ({"K": 12}, "in-features is 12, not a multiple of 8"),
        ({"N": 17}, "out-features is 17"),
        ({"strides": (68, 1)}, "row stride of x is 68"),
        ({"K": 8200}, "stops at 8192 in-features"),
        ({"training": True, "triton_version": None}, "it needs triton"),
    ],
)
def test_lazy_says_what_it_cannot_do(fields, reason, driver):
    found = lazy.Lazy().why_not(problem(**fields))
    assert found is None if reason is None else reason in found


def test_lazy_picks_a_kernel_that_exists_and_fits(monkeypatch):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    sizes = [1, 129, 8192, 262144], [8, 256, 264, 384, 392, 4096], [8, 128, 136, 256, 264, 384, 392, 640, 2048]
    for M, K, N, dtype, layer in itertools.product(*sizes, (BF16, FP16), (False, True)):
        kernel, grid, group = lazy.pick(None, dtype, layer, M, K, N)
        width = int(kernel.name[-3:])
        columns, blocks = -(-N // width), -(-M // 128)
        assert 1 <= grid <= min(132, columns * blocks) and columns % group == 0
        assert columns * width <= -(-N // 384) * 384
        if "resident" in kernel.name:
            assert columns == 1 and K <= lazy.RESIDENT_K[width] and group == 1


def test_every_fold_exists(monkeypatch):
    calls = []

    def get(name):
        assert name in KERNELS, name
        return lambda grid, *args: calls.append((grid, KERNELS[name]["params"], args))

    monkeypatch.setattr(lazy, "launch", SimpleNamespace(get=get))
    for dtype, param in ((BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32)):
        for K in (8, 512, 520, 2048, 8192):
            for centre in (False, True):
                weight, vector = torch.zeros(17, K, dtype=param), torch.zeros(K, dtype=FP32)
                folded, offset = lazy.fold(weight, None, vector, None, dtype, centre=centre)
                assert folded.dtype == dtype and folded.shape == weight.shape and offset.shape == (384,)
                folded, _ = lazy.fold(weight, None, None, None, dtype, centre=centre)
                assert (folded is weight) == (param == dtype and not centre)
    assert all(len(params) == len(args) for _, params, args in calls) and len(calls) == 80
