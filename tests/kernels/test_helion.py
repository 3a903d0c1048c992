"""Technique `helion`: an optional package, and what it takes."""

import importlib.util

import pytest
import torch

from recsys_norm.kernels.helion import technique
from recsys_norm.ops import registry
from recsys_norm.ops.problem import Problem


def problem(op, **fields):
    fields = dict(M=1024, K=512, N=512, dtype=torch.bfloat16, norm="layer", arch=90, device="cuda") | fields
    return Problem(op=op, param_dtype=torch.float32, eps=1e-5, triton_version=(3, 6), **fields)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(technique, "missing", lambda: None)


def named(op):
    return next(t for t in registry.techniques(op) if registry.label(t) == "helion/helion")


@pytest.mark.parametrize("op", ["norm_linear", "linear_norm"])
def test_without_the_package_it_says_how_to_get_it(op, monkeypatch):
    monkeypatch.setattr(technique, "find_spec", lambda name: None)
    technique.missing.cache_clear()
    assert "pip install helion" in named(op).why_not(problem(op)) and "separate" in named(op).why_not(problem(op))
    technique.missing.cache_clear()


def test_an_old_package_is_refused(monkeypatch):
    monkeypatch.setattr(technique, "find_spec", lambda name: object())
    for version, old in (("0.3.3", True), ("1.0.0", False), ("2.1", False)):
        monkeypatch.setattr(technique.metadata, "version", lambda name, version=version: version)
        technique.missing.cache_clear()
        assert (version in (technique.missing() or "")) == old
    technique.missing.cache_clear()


@pytest.mark.parametrize(
    "op,fields,limit",
    [
        ("norm_linear", {}, None),
        ("norm_linear", dict(K=200, N=72), None),
        ("norm_linear", dict(dtype=torch.float32), "float32"),
        ("norm_linear", dict(M=1 << 22), "4194304"),
        ("norm_linear", dict(arch=75), "75"),
        ("linear_norm", dict(N=128), None),
        ("linear_norm", dict(N=1024), "512"),
        ("linear_norm", dict(N=384), "power of two"),
    ],
)
def test_limits(installed, op, fields, limit):
    reason = named(op).why_not(problem(op, **fields))
    assert reason is None if limit is None else limit in reason and ("separate" in reason or "unfused" in reason)


def test_it_serves_its_own_op(installed):
    assert "linear_norm" in named("norm_linear").why_not(problem("linear_norm"))


@pytest.mark.skipif(importlib.util.find_spec("helion") is None, reason="needs the package helion")
@pytest.mark.parametrize("layer", [False, True])
def test_the_generated_triton_waits_and_masks(layer):
    from recsys_norm.kernels.helion.configs import lazy_tile
    from recsys_norm.kernels.helion.kernels import compiled, lazy

    x, weight = torch.randn(70, 200, dtype=torch.bfloat16), torch.randn(72, 200, dtype=torch.bfloat16)
    bound = compiled(lazy, lazy_tile(72)).bind((x, weight, torch.randn(72), torch.randn(72), 1e-5, layer, True, True))
    text = bound.to_triton_code(bound.kernel.configs[0])
    assert "inline_asm_elementwise" in text and "num_stages=3" in text
    assert ("indices_2 < " in text or "< v_" in text) if layer else True
