"""Choice, fallback, counting and errors of the ops."""

import warnings

import pytest
import torch

from recsys_norm import ops
from recsys_norm.ops import registry

X, W = torch.randn(5, 8), torch.randn(6, 8)
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without CUDA")


@no_cuda
@pytest.mark.parametrize("backend", ["fused", "naive"])
def test_a2_a_kernel_backend_on_cpu_is_one_clear_error(backend):
    with pytest.raises(ops.UnsupportedError) as error:
        ops.norm_linear(X, W, norm="rms", backend=backend)
    text = str(error.value)
    assert f"backend '{backend}'" in text and "CUDA" in text and "on cpu" in text
    assert "on_unsupported='fallback'" in text and "M=5, K=8, N=6" in text


@no_cuda
def test_a2_fallback_is_warned_once_and_counted():
    ops.reset_counts()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            y = ops.norm_linear(X, W, norm="rms", on_unsupported="fallback")
    torch.testing.assert_close(y, ops.norm_linear(X, W, norm="rms", backend="unfused"))
    assert len([w for w in caught if "fused" in str(w.message)]) == 1
    (reason,) = ops.fallbacks()
    assert "backend 'fused'" in reason and ops.fallbacks()[reason] == 3
    assert ops.counts()["norm_linear"] == {"separate (torch)": 3, "unfused": 1}


@no_cuda
def test_a9_forced_technique_that_cannot_run():
    with pytest.raises(ops.UnsupportedError, match="technique 'lazy'.*CUDA"):
        ops.norm_linear(X, W, norm="rms", technique="lazy")
    with pytest.raises(ops.UnsupportedError, match="technique 'nonsense'"):
        ops.norm_linear(X, W, norm="rms", technique="nonsense")


class Limited:
    """A registered technique that serves up to 4 features, on any device."""

    name, provider = "limited", "triton"

    def why_not(self, problem):
        return None if problem.K <= 4 else f"K={problem.K} is above 4; technique 'separate' has no limit"


def test_choice_is_by_order_and_by_limit(monkeypatch):
    from dataclasses import replace

    from recsys_norm.ops.problem import Problem

    problem = Problem("made_up", "rms", 1, 4, 4, torch.float32, torch.float32, 1e-5, device="cuda")

    class Other(Limited):
        name = "separate"

        def why_not(self, problem):
            return None

    registry.register("made_up", Other())
    registry.register("made_up", Limited())
    monkeypatch.setitem(registry._ORDER, "made_up", ("limited", "separate"))
    registry._candidates_of.cache_clear()
    assert registry.choose(problem).name == "limited"
    wide = replace(problem, K=5)
    assert registry.choose(wide).name == "separate"
    with pytest.raises(ops.UnsupportedError, match="K=5 is above 4; technique 'separate' has no limit"):
        registry.select(wide, "fused", "limited", "raise")
    with pytest.warns(UserWarning, match="K=5 is above 4"):
        assert registry.select(wide, "fused", "limited", "fallback").name == "separate"


@pytest.mark.parametrize(
    "change,error,words",
    [
        (dict(norm="batch"), ValueError, ["norm='batch'", "'rms'", "'layer'"]),
        (dict(norm="rms", norm_bias=torch.zeros(8)), ValueError, ["norm_bias", "layer"]),
        (dict(norm="layer", eps=None), ValueError, ["eps=None"]),
        (dict(backend="quick"), ValueError, ["backend='quick'", "'fused'"]),
        (dict(on_unsupported="ignore"), ValueError, ["on_unsupported='ignore'"]),
        (dict(backend="unfused", technique="lazy"), ValueError, ["technique='lazy'", "backend='fused'"]),
        (dict(weight=torch.zeros(6, 9)), ValueError, ["8 features", "(6, 9)"]),
        (dict(weight=torch.zeros(6)), ValueError, ["[N, K]", "(6,)"]),
        (dict(bias=torch.zeros(5)), ValueError, ["bias", "(5,)", "(6,)"]),
        (dict(norm_weight=torch.zeros(6)), ValueError, ["norm_weight", "(6,)", "(8,)"]),
        (dict(weight=W.double()), TypeError, ["weight", "float64", "float32"]),
        (dict(weight=W.half()), TypeError, ["weight", "float16"]),
        (dict(x=X.double()), TypeError, ["float64", "reference"]),
        (dict(x=X.to(torch.int32)), TypeError, ["int32"]),
        (dict(x=torch.tensor(1.0)), ValueError, ["scalar"]),
    ],
)
def test_bad_input_is_one_error_that_names_it(change, error, words):
    arguments = dict(x=X, weight=W, norm="rms") | change
    with pytest.raises(error) as caught:
        ops.norm_linear(**arguments)
    assert all(word in str(caught.value) for word in ["norm_linear", *words]), str(caught.value)


def test_bad_input_of_the_other_ops():
    with pytest.raises(ValueError, match="return_sum=True needs residual_position='before'"):
        ops.linear_norm(X, W, norm="rms", residual=torch.zeros(5, 6), return_sum=True)
    with pytest.raises(ValueError, match=r"residual has shape \(5, 8\), expected \(5, 6\)"):
        ops.linear_norm(X, W, norm="rms", residual=X)
    with pytest.raises(ValueError, match="activation='swish'.*'silu'"):
        ops.linear_norm_linear(X, W, None, W.t(), None, norm="rms", activation="swish")
    with pytest.raises(ValueError, match=r"weight2 needs shape \[N2, 6\]"):
        ops.linear_norm_linear(X, W, None, W, None, norm="rms")
    with pytest.raises(TypeError, match="residual is torch.float16"):
        ops.rms_norm(X, residual=X.half())


def test_norms_as_identity_leaves_the_linears():
    with ops.norms_as_identity():
        torch.testing.assert_close(ops.norm_linear(X, W, norm="rms", backend="unfused"), X @ W.t())
        y, z = ops.linear_norm(
            X, W, norm="layer", residual=torch.ones(5, 6), residual_position="before", return_sum=True
        )
        torch.testing.assert_close(y, X @ W.t() + 1)
        assert torch.equal(ops.rms_norm(X, torch.full((8,), 3.0)), X)
    assert not torch.equal(ops.rms_norm(X, backend="unfused"), X)
