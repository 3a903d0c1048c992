"""The measured table that `fused` chooses by."""

import json
from dataclasses import replace

import pytest
import torch

from recsys_norm.ops import choices, registry
from recsys_norm.ops.problem import Problem

PROBLEM = Problem("norm_linear", "rms", 200_000, 512, 512, torch.bfloat16, torch.float32, 1e-5, device="cuda", arch=90)


class Able:
    def __init__(self, provider, name):
        self.provider, self.name = provider, name

    def why_not(self, problem):
        return None if problem.K <= 4096 else "K is above 4096; technique 'separate' has no limit"


def row(technique, **fields):
    shape = dict(op="norm_linear", norm="rms", direction="forward", M=262144, K=512, N=512, N2=0)
    return shape | fields | {"technique": technique}


@pytest.fixture
def table(tmp_path, monkeypatch):
    target = tmp_path / "choices.json"
    monkeypatch.setattr(choices, "path", lambda: target)
    known = [Able("triton", "separate"), Able("triton", "lazy"), Able("hopper", "lazy")]
    monkeypatch.setattr(registry, "techniques", lambda op: known)
    registry._candidates_of.cache_clear()

    def write(*rows, arch=90):
        choices.update(list(rows), arch, {"gpu": "none"}, target)
        registry._candidates_of.cache_clear()
        return target

    yield write
    registry._candidates_of.cache_clear()
    choices._rows.cache_clear()


def test_the_nearest_measured_shape_decides(table):
    table(row("hopper/lazy"), row("triton/lazy", K=2048), row("triton/separate", direction="backward"))
    assert choices.preferred(PROBLEM, "forward") == "hopper/lazy"
    assert choices.preferred(replace(PROBLEM, K=1500), "forward") == "triton/lazy"
    assert registry.label(registry.choose(replace(PROBLEM, K=700))) == "hopper/lazy"
    assert registry.label(registry.choose(replace(PROBLEM, K=700), "backward")) == "triton/separate"


def test_far_from_everything_measured_the_order_decides(table):
    table(row("hopper/lazy"))
    for far in (dict(K=64), dict(N=2048), dict(arch=100), dict(dtype=torch.float32), dict(norm="layer"), dict(N2=512),
                dict(M=512), dict(M=1 << 23)):  # fmt: skip
        problem = replace(PROBLEM, **far)
        assert choices.preferred(problem, "forward") is None
        assert registry.label(registry.choose(problem)) == "triton/separate"


def test_rows_count_less_than_widths(table):
    table(row("triton/lazy", M=4096), row("hopper/lazy", M=262144), row("triton/separate", K=1024))
    assert choices.preferred(replace(PROBLEM, M=2048), "forward") == "triton/lazy"
    assert choices.preferred(replace(PROBLEM, M=100), "forward") is None  # but one tile of rows is another problem


def test_what_cannot_run_is_not_chosen(table):
    table(row("hopper/lazy", K=8192))
    assert choices.preferred(replace(PROBLEM, K=8192), "forward") == "hopper/lazy"
    with pytest.raises(registry.UnsupportedError):
        registry.choose(replace(PROBLEM, K=8192))


def test_a_technique_is_forced_by_name_or_by_provider_and_name(table):
    table(row("hopper/lazy"))
    assert registry.label(registry.select(PROBLEM, "fused", "lazy", "raise")) == "hopper/lazy"
    assert registry.label(registry.select(PROBLEM, "fused", "triton/lazy", "raise")) == "triton/lazy"
    with pytest.raises(registry.UnsupportedError, match="K is above 4096"):
        registry.select(replace(PROBLEM, K=8192), "fused", "triton/lazy", "raise")
    with pytest.raises(registry.UnsupportedError, match="no technique of that name"):
        registry.select(PROBLEM, "fused", "tlx/lazy", "raise")


def test_retuning_replaces_the_same_cases_of_one_architecture(table):
    table(row("hopper/lazy"), row("triton/lazy", op="linear_norm"))
    table(row("triton/lazy"), arch=100)
    target = table(row("triton/separate"))
    rows = {(r["op"], r["arch"]): r["technique"] for r in json.loads(target.read_text())["rows"]}
    assert rows == {
        ("norm_linear", 90): "triton/separate",
        ("linear_norm", 90): "triton/lazy",
        ("norm_linear", 100): "triton/lazy",
    }


def test_the_shipped_table_names_techniques_that_exist():
    choices._rows.cache_clear()
    for (op, _, direction, _), rows in choices._rows().items():
        assert direction in ("forward", "backward")
        known = {registry.label(t) for t in registry.techniques(op)}
        assert {r["technique"] for r in rows} <= known
