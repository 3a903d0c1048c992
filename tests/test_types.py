"""The type checker passes on the public packages, and a program that uses them gets their types."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")
ROOT = Path(__file__).parents[1]

PROGRAM = """
import torch
from torch import Tensor, nn
import recsys_norm
from recsys_norm.nn import LinearNorm, NormLinear
from recsys_norm.ops import norm_linear

y: Tensor = norm_linear(torch.randn(4, 8), torch.randn(16, 8), norm="rms", backend="unfused")
layer: nn.Module = NormLinear(8, 16, norm="layer", device="cpu", dtype=torch.bfloat16)
report = recsys_norm.convert(nn.Sequential(layer), "fused")
names: list[tuple[str, tuple[str, ...]]] = report.replaced
undone: bool = recsys_norm.revert(layer)
weight: nn.Parameter = LinearNorm(8, 16, norm="rms").weight
"""

WRONG = {
    'norm_linear(torch.randn(4, 8), torch.randn(16, 8), norm="rms", epsilon=1e-5)': 'Unexpected keyword argument "epsilon"',
    "norm_linear(torch.randn(4, 8), None, norm='rms')": 'Argument 2 to "norm_linear"',
    "NormLinear(8, '16', norm='rms')": 'Argument 2 to "NormLinear"',
    "recsys_norm.convert(model=3)": 'Argument "model" to "convert"',
}


def mypy(*arguments):
    command = [sys.executable, "-m", "mypy", "--no-error-summary", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert not done.stderr, done.stderr
    return [line for line in done.stdout.splitlines() if ": note:" not in line]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("types") / "cache"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_public_packages_pass(cache):
    assert mypy("--cache-dir", cache) == []


def test_programs_get_the_types(cache, tmp_path):
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(PROGRAM)
    wrong.write_text(PROGRAM + "\n".join(WRONG) + "\n")
    options = ("--cache-dir", cache, "--no-warn-unused-configs")  # the sections for this package's modules
    assert mypy(*options, right) == []
    errors = mypy(*options, wrong)
    assert len(errors) == len(WRONG), errors
    for error, expected in zip(errors, WRONG.values()):
        assert expected in error
