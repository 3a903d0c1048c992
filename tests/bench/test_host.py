"""`benchmarks/host.py`: every case is measured, and the techniques are back afterwards."""

import importlib.util
from pathlib import Path

from recsys_norm.ops import jagged_torch, registry

PATH = Path(__file__).parents[2] / "benchmarks" / "host.py"


def test_every_case_is_measured_and_what_stood_in_is_gone():
    spec = importlib.util.spec_from_file_location("benchmarks_host", PATH)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    before = {op: registry.techniques(op) for op in script.OPS}, jagged_torch.grouped_forward
    with script.nothing_computed():
        found = script.measure("cpu", "", rounds=1, repeats=1)
        assert type(registry.techniques("norm")[0]) is script.Allocates
    assert len(found) == 8 and all(least > 0 for ways in found.values() for _, least in ways.values())
    after = {op: registry.techniques(op) for op in script.OPS}, jagged_torch.grouped_forward
    assert after == before
