"""The models that `benchmarks/convert.py` measures, small and without a GPU: what is checked and what is reported."""

import importlib.util
from pathlib import Path

import pytest
import torch

from recsys_norm.bench.convert import AFTER, Case, copied, techniques_of
from recsys_norm.bench.convert_models import KINDS, SMALL, dlrm

pytestmark = pytest.mark.filterwarnings("ignore:.*CUDA device")
REPLACED = {
    "encoder pre-norm": {"transformer encoder layer": 2, "norm": 1},
    "encoder post-norm": {"transformer encoder layer": 2, "norm": 1},
    "dlrm": {"linear_norm_linear": 2, "norm": 1},
    "hstu": {"norm_linear": 2, "norm": 2},
    "pre-norm block": {"norm_linear": 4},
    "pre-norm block rms": {"norm_linear": 4},
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_converted_and_right(name):
    case = Case(KINDS[name], SMALL, device="cpu")
    kinds = [kind for kind, _ in case.report.replaced]
    assert {kind: kinds.count(kind) for kind in kinds} == REPLACED[name] and not case.report.left
    found = case.check()[AFTER]
    assert {"output"} | {n for n, _ in case.original.named_parameters()} <= {c.name.partition(": ")[2] for c in found}
    assert sum(sum(by.values()) for by in techniques_of(case).values()) > 0


def test_a_wrong_model_is_not_timed():
    case = Case(KINDS["pre-norm block"], SMALL, device="cpu")
    with torch.no_grad():
        case.candidates[AFTER][0].norm1.weight.mul_(1.1)
    with pytest.raises(AssertionError, match="after: "):
        case.check()


def test_tables_that_train_in_their_backward():
    case = Case(KINDS["dlrm"], SMALL, device="cpu", build=lambda size: dlrm(size, fused_tables=True))
    assert copied(case.original).tables is case.original.tables
    names = {c.name for c in case.check()[AFTER]}
    assert "after: output" in names and "after: head.weight" in names and not any("tables" in n for n in names)


def test_table_of_records():
    path = Path(__file__).parents[2] / "benchmarks" / "convert.py"
    spec = importlib.util.spec_from_file_location("benchmarks_convert", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    times = dict(tokens=10, gpu_ms=1.0, host_ms=0.5, peak_bytes=1e6, error_ratio=0.3, kind="hstu")
    found = [dict(times, candidate="before", ms=2.0), dict(times, candidate="after", ms=1.0)]
    (line,) = script.table(found).splitlines()
    assert "hstu" in line and "(0.500)" in line and "2.000 ->   1.000 ms" in line
