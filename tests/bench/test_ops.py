"""What `bench ops` makes of its measurements; the timing itself needs a GPU."""

import json

import pytest
import torch

from recsys_norm.bench import __main__ as command
from recsys_norm.bench import ops as bench
from recsys_norm.bench.cases import Case
from recsys_norm.bench.timing import percentile


def measured(case, label, ms, gemm, norm, **fields):
    times = dict(times=[ms] * 3, gemm_times=[gemm] * 3, norm_times=[norm] * 3)
    return bench.record(case, "forward", label, rel_err=1e-3, rel_err_unfused=2e-3, technique=label, **times, **fields)


def test_hidden_is_the_share_of_the_norm_that_is_gone():
    case = Case("norm_linear", "rms", 1024, 512, 256)
    runs = [
        [measured(case, "fused", 1.1, 1.0, 0.5), measured(case, "compiled", 1.5, 1.0, 0.5)],
        [measured(case, "fused", 1.3, 1.0, 0.5), measured(case, "compiled", 1.5, 1.0, 0.5)],
    ]
    records = bench.merge(runs)
    bench.add_compiled(records)
    fused, compiled = records
    assert (fused["hidden_lo"], fused["hidden_hi"]) == pytest.approx((0.4, 0.8))
    assert fused["ms"] == pytest.approx(1.2) and fused["hidden"] == pytest.approx(0.6)
    assert compiled["hidden"] == pytest.approx(0.0) and fused["compiled_ms"] == 1.5
    least = 2 * (1024 * 512 + 1024 * 256 + 512 * 256) / bench.COPY_BYTES_PER_S
    assert fused["roofline"] == pytest.approx(max(least, 2 * 1024 * 512 * 256 / bench.MATRIX_FLOPS_PER_S) * 1e3 / 1.2)
    assert "60% [40%, 80%] fused" in bench.table(records)


def test_a_candidate_that_was_wrong_once_gets_no_time():
    case = Case("norm_linear", "rms", 1024, 512, 256)
    wrong = measured(case, "lazy", 0.1, 1.0, 0.5) | {"times": None, "skipped": "wrong result"}
    (record,) = bench.merge([[measured(case, "lazy", 0.1, 1.0, 0.5)], [wrong]])
    assert record["ms"] is None and "wrong result" in record["skipped"]


def test_files_and_picture(tmp_path):
    case = Case("norm_linear", "layer", 1024, 512, 256)
    records = bench.merge([[measured(case, label, 1.2, 1.0, 0.5) for label in ("unfused", "compiled", "fused")]])
    bench.add_compiled(records)
    bench.write({"env": {"gpu": "none"}, "records": records}, tmp_path, "ops")
    assert len(json.loads((tmp_path / "ops.json").read_text())["records"]) == 3
    assert (tmp_path / "ops.csv").read_text().count("\n") == 4
    assert (tmp_path / "ops.png").stat().st_size > 1000


def test_the_grid_and_shapes():
    assert bench.shapes_of("grid")[0] == (256, 256) and bench.shapes_of("8x16,32x8") == [(8, 16), (32, 8)]
    assert [c.normalized for c in bench.default_cases(4, "linear_norm", ["rms"], [(8, 16)])] == [16]


def test_percentile():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0 and percentile([0.0, 1.0], 0.2) == pytest.approx(0.2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without CUDA")
def test_without_cuda_it_says_so(capsys):
    assert command.main(["ops"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_winners_need_a_margin_over_the_floor():
    cases = [Case("norm_linear", "rms", 1024, K, 256) for K in (512, 1024)]
    runs = []
    for case, lazy in zip(cases, (0.99, 0.9)):
        runs += [measured(case, "triton/separate", 1.0, 0.8, 0.3), measured(case, "hopper/lazy", lazy, 0.8, 0.3)]
        runs += [measured(case, "compiled", 0.5, 0.8, 0.3)]  # no technique
    chosen = bench.winners(bench.merge([runs]))
    assert [row["technique"] for row in chosen] == ["triton/separate", "hopper/lazy"]
    assert (chosen[1]["ms"], chosen[1]["separate_ms"]) == (0.9, 1.0)
