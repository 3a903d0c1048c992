"""`benchmarks/others.py` without a GPU and without the other libraries: functions of this file stand for theirs."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from recsys_norm.bench.cases import GRID, Case

pytestmark = pytest.mark.filterwarnings("ignore:.*CUDA device")
M, K, N = 33, 24, 40
CASES = [Case(op, norm, M, K, N) for op in ("norm_linear", "linear_norm") for norm in ("rms", "layer")]


@pytest.fixture
def script(monkeypatch):
    path = Path(__file__).parents[2] / "benchmarks" / "others.py"
    spec = importlib.util.spec_from_file_location("benchmarks_others", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "OWN", {"unfused": {"backend": "unfused"}, "fused": {"backend": "fused"}})
    monkeypatch.setattr(Case, "tensors", tensors)
    return module


def tensors(case, seed=0):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape, scale=1.0, mean=0.0):
        return (torch.randn(shape, generator=g) * scale + mean).to(case.dtype).requires_grad_()

    return {
        "x": randn(case.M, case.K, mean=0.5),
        "weight": randn(case.N, case.K, scale=case.K**-0.5),
        "bias": randn(case.N),
        "norm_weight": randn(case.normalized, scale=0.2, mean=1.0),
        "norm_bias": randn(case.normalized, scale=0.2) if case.norm == "layer" else None,
    }


def rms(x, weight, bias):
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


def layer(x, weight, bias):
    assert weight.dtype == bias.dtype == torch.float32  # the only parameters that QuACK takes
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, 1e-5).to(x.dtype)


class InPlace(torch.autograd.Function):
    """As Liger's RMS norm: the gradient of x is written where that of y was."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return rms(x, weight, None)

    @staticmethod
    def backward(ctx, dy):
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            dx, dweight = torch.autograd.grad(rms(x, weight, None), (x, weight), dy)
        return dy.copy_(dx), dweight


class Watch:
    """Runs every candidate once and calls it a millisecond."""

    def time(self, candidates, launches):
        for run in candidates.values():
            run()
        return {name: [1.0] * launches for name in candidates}


def test_the_grid_is_that_of_the_ops_table(script):
    found = [c for K, N in script.GRID for norm in script.NORMS for c in script.cases(norm, K, N, script.ROWS)]
    assert {(c.op, c.norm, c.K, c.N) for c in found} == {
        (o, n, *s) for o in script.OPS for n in script.NORMS for s in GRID
    }
    assert len(found) == 28 and all(c.M == 262_144 and c.affine and c.bias and c.dtype == torch.bfloat16 for c in found)


def test_what_is_missing_is_named(script, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "quack", None)
    norms, missing = script.importable()
    assert (
        norms == {}
        and set(missing) == {"liger", "quack"}
        and all("ModuleNotFoundError" in why for why in missing.values())
    )
    monkeypatch.setitem(script.LIBRARIES, "quack", lambda: {"rms": rms})
    monkeypatch.setattr(sys, "argv", ["others.py"])
    result = script.run(types.SimpleNamespace(shapes=[], rows=M, launches=1, json=None))
    line = capsys.readouterr().out.splitlines()[0]
    assert "liger is missing: ModuleNotFoundError" in line and line.endswith("; quack is there")
    assert {"gpu", "driver", "torch", "date", "quack-kernels", "nvidia-cutlass-dsl"} <= set(result["env"])
    assert "liger" in result["missing"] and result["records"] == []


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op}-{c.norm}")
def test_records_and_their_table(script, case):
    """Right norms are timed, wrong ones are not, a lacking one says so, and so does `fused` without a GPU."""
    norms = {
        "liger": {
            "rms": lambda x, w, b: InPlace.apply(x, w),
            "layer": lambda x, w, b: layer(x, w.float(), b.float() + 0.1),
        },
        "quack": {"rms": rms, "layer": layer},
        "other": {},
    }
    records = list(script.measure(case, norms, Watch(), launches=4))
    json.dumps(records, allow_nan=False)
    by = {(r["backend"], r["direction"]): r for r in records}
    assert set(by) == {(b, d) for b in (*norms, "unfused", "fused") for d in ("forward", "both")}
    for (label, _), r in by.items():
        assert (r["op"], r["norm"], r["M"], r["K"], r["N"]) == (case.op, case.norm, M, K, N)
        right = label in ("quack", "unfused") or (label == "liger" and case.norm == "rms")
        assert (r["ms"] == 1.0 and r["launches"] == 4 and r["error_of_allowed"] <= 1) if right else r["ms"] is None
    assert by["unfused", "both"]["technique"] == "unfused" and "technique" not in by["quack", "both"]
    reason = by["other", "both"]["skipped"]
    assert reason == f"other has no {case.norm} norm" and "CUDA" in by["fused", "both"]["skipped"]
    assert by["liger", "both"]["skipped"] == (None if case.norm == "rms" else "wrong result")
    assert "wrong result" in script.row(records) or case.norm == "rms"


def test_table_shows_times_over_fused(script):
    ms = {"liger": 3.0, "compiled": 2.0, "fused": 1.25}
    key = dict(op="linear_norm", norm="layer", K=8, N=16)
    records = [dict(key, backend=b, direction=d, ms=t) for b, t in ms.items() for d in ("forward", "both")]
    records[0]["ms"] = None
    lines = script.table(records).splitlines()
    assert lines[0] == "| K -> N | norm by | 8 -> 16 |" and lines[1] == "|---|---|---|"
    assert lines[2:] == [
        "| linear_norm LN | Liger | - / 2.40 |",
        "| linear_norm LN | compiled | 1.60 / 1.60 |",
        "| linear_norm LN | fused, ms | 1.250 / 1.250 |",
    ]


def test_layer_norm_from_two_halves(script, monkeypatch):
    """QuACK has layer norm's forward and backward apart; without the second it lacks the norm."""
    quack = types.ModuleType("quack.rmsnorm")

    def halves(x, weight, bias, eps, return_rstd, return_mean):
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        return y, rstd, mean

    def backward(x, weight, dy, rstd, mean):
        return torch.ops.aten.native_layer_norm_backward(dy, x, x.shape[-1:], mean, rstd, weight, weight, [True] * 3)

    quack.layernorm_fwd, quack.layernorm_bwd, quack.rmsnorm = halves, backward, None
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.rmsnorm", quack)
    x, weight, bias = (torch.randn(s, dtype=torch.double, requires_grad=True) for s in ((5, 8), 8, 8))
    assert torch.autograd.gradcheck(script.quack()["layer"], (x, weight, bias))
    del quack.layernorm_bwd
    with pytest.raises(script.ops.UnsupportedError, match="no backward of layer norm"):
        script.candidate(CASES[1], "quack", {"quack": script.quack()}, tensors(CASES[1]), None)
