"""Technique `tlx`: needs a fork of Triton; what it takes, and where the fork is there, that it compiles for Hopper."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
import torch

from recsys_norm.kernels.tlx import technique
from recsys_norm.ops import registry
from recsys_norm.ops.problem import Problem

triton = pytest.importorskip("triton")
HAS_TLX = importlib.util.find_spec("triton.language.extra.tlx") is not None


def problem(**fields):
    fields = dict(M=1024, K=512, N=512, dtype=torch.bfloat16, norm="layer", arch=90, device="cuda") | fields
    return Problem(op="linear_norm", param_dtype=torch.float32, eps=1e-5, triton_version=(3, 7), **fields)


def named():
    return next(t for t in registry.techniques("linear_norm") if registry.label(t) == "tlx/tlx")


@pytest.mark.skipif(HAS_TLX, reason="this triton has TLX")
def test_without_the_fork_it_says_what_is_installed():
    reason = named().why_not(problem())
    assert "fbtriton" in reason and triton.__version__ in reason and "'cluster'" in reason


@pytest.mark.parametrize(
    "fields,limit",
    [
        ({}, None),
        (dict(N=2048, K=64), None),
        (dict(dtype=torch.float32), "float32"),
        (dict(arch=100), "100"),
        (dict(residual="after"), "residual"),
        (dict(residual="before", return_sum=True), "residual"),
        (dict(N=384), "N=384"),
        (dict(K=200), "K=200"),
    ],
)
def test_limits(monkeypatch, fields, limit):
    monkeypatch.setattr(technique, "missing", lambda: None)
    reason = named().why_not(problem(**fields))
    assert reason is None if limit is None else limit in reason and "separate" in reason


@pytest.mark.parametrize("N", technique.WIDTHS)
def test_the_blocks_of_a_cluster_cover_the_row(N):
    sizes = technique.tile(N)
    assert sizes["CTAS"] * sizes["BN"] == N and sizes["CTAS"] <= 8


COMPILE = """
import subprocess, sys, triton
from recsys_norm.kernels.tlx.technique import compile_for_hopper
compiled = compile_for_hopper(512, sys.argv[1] == "True", hat=True)
open(sys.argv[2], "wb").write(compiled.asm["cubin"])
print(*compiled.metadata.cluster_dims, *(t in compiled.asm["ptx"] for t in ("wgmma.mma_async", "shared::cluster")))
print(subprocess.check_output([triton.knobs.nvidia.cuobjdump.path, "-res-usage", sys.argv[2]], text=True))
"""


@pytest.mark.skipif(not HAS_TLX, reason="needs the Triton fork fbtriton")
@pytest.mark.parametrize("layer", [False, True])
def test_it_compiles_for_hopper_without_spilling(layer, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(layer), str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 1 1 True True\n")
    assert re.search(r"LOCAL:0\b", done.stdout) and re.search(r"STACK:0\b", done.stdout)
