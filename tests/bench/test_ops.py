"""What `bench ops` makes of its measurements; the timing itself needs a GPU."""

import json
import sys

import pytest
import torch

from recsys_norm.bench import __main__ as command
from recsys_norm.bench import ops as bench
from recsys_norm.bench import processes
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


def test_fused_has_the_error_of_what_it_chose():
    case = Case("norm_linear", "rms", 1024, 512, 256)
    own = measured(case, "hopper/lazy", 1.0, 1.0, 0.5) | {"rel_err": 5e-3}
    records = bench.merge([[own, measured(case, "fused", 1.0, 1.0, 0.5) | {"technique": "hopper/lazy"}]])
    bench.add_errors_of_fused(records)
    assert [r["rel_err"] for r in records] == [5e-3, 5e-3]


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


class Clock:
    """A stopwatch by which candidates take the given milliseconds, 1 where nothing is given."""

    def __init__(self, **given):
        self._given = given

    def time(self, functions, launches, warmup=2):
        return {name: [self._given.get(name, 1.0)] * launches for name in functions}


def test_only_candidates_near_the_fastest_get_all_launches():
    given = dict(fast=2.0, near=2.2, far=3.0, gemm=1.0, norm=0.5)
    times = bench.time_near_best(dict.fromkeys(given), 12, Clock(**given), always=("gemm", "norm"))
    assert {name: len(t) for name, t in times.items()} == dict(fast=12, near=12, far=5, gemm=12, norm=12)
    times = bench.time_near_best(dict.fromkeys(given), 4, Clock(**given))
    assert {len(t) for t in times.values()} == {4}


def test_candidates_are_checked_then_timed(monkeypatch):
    case = Case("norm_linear", "rms", 32, 16, 24, dtype=torch.float32)
    shapes = {"x": (32, 16), "weight": (24, 16), "bias": (24,), "norm_weight": (16,)}
    tensors = {n: torch.randn(shape, requires_grad=True) for n, shape in shapes.items()} | {"norm_bias": None}
    monkeypatch.setattr(Case, "tensors", lambda self: tensors)
    labels = {
        "unfused": dict(backend="unfused"),
        "right": dict(technique="separate"),
        "unknown": dict(technique="none"),
    }
    monkeypatch.setattr(bench, "candidates", lambda case, wanted=None: labels)
    monkeypatch.setattr(bench, "gemms", lambda *_: None)
    monkeypatch.setattr(bench, "norm_alone", lambda *_: None)
    verdicts = bench.check_case(case, ["forward", "backward"])
    assert verdicts["right"]["backward"]["skipped"] is None and verdicts["right"]["backward"]["rel_err"] < 1e-5
    assert "technique 'none' cannot run" in verdicts["unknown"]["forward"]["skipped"]

    original = bench.Subject.backward
    wrong = lambda self: tuple(1.1 * g for g in original(self))  # noqa: E731
    monkeypatch.setattr(bench.Subject, "backward", wrong)
    assert bench.check_case(case, ["backward"])["right"]["backward"]["skipped"] == "wrong result"

    records = list(bench.time_case(case, ["forward", "backward"], verdicts, 7, Clock()))
    found = {(r["backend"], r["direction"]): r for r in records}
    assert found["right", "backward"]["times"] == [1.0] * 7
    assert found["right", "forward"]["technique"] == "torch/separate"
    assert found["unknown", "forward"]["times"] is None
    merged = {(r["backend"], r["direction"]): r for r in bench.merge([records])}
    assert merged["right", "forward"]["ms"] == 1.0 and merged["unknown", "forward"]["ms"] is None


STAND_IN = """
import json, sys
from recsys_norm.bench import ops as bench
from recsys_norm.bench.processes import case_of
mode, cases = json.loads(sys.argv[1])
cases = [case_of(c) for c in cases]
say = lambda **message: print(json.dumps(message), flush=True)
if mode == "check":
    for index in range(len(cases)):
        say(verdict={"case": index, "found": {"fused": {"forward": {}}, "triton/separate": {"forward": {}}}})
say(ready=True)
go = json.loads(sys.stdin.readline())["go"]
say(self_test=SELF_TEST)
for index, case in enumerate(cases):
    for label in go["verdicts"][index]:
        if label not in go["without"]:
            times = [1.0 + go["seed"]] * go["launches"]
            say(record=bench.record(case, "forward", label, times=times, gemm_times=times, norm_times=times))
say(done=True)
"""


def run_stand_ins(tmp_path, runs, self_test=1.0, **options):
    def command(mode, cases, settings):
        arguments = json.dumps([mode, [processes.case_fields(c) for c in cases]])
        return [sys.executable, "-c", STAND_IN.replace("SELF_TEST", str(self_test)), arguments]

    cases = [Case("norm_linear", "rms", 1024, 512, 256)]
    return processes.run(cases, {}, 9, runs, tmp_path / "ops.jsonl", command=command, **options)


def test_processes_measure_in_turn_and_leave_a_journal(tmp_path):
    chosen = []
    result = run_stand_ins(tmp_path, 3, retune=lambda rows, environment: chosen.extend(rows))
    assert result["self_test"] == [1.0] * 3
    by_label = {r["backend"]: r for r in result["records"]}
    assert by_label["triton/separate"]["ms"] == 2.0 and by_label["triton/separate"]["launches"] == 9
    # what `fused` chooses is known after the first process
    assert [row["technique"] for row in chosen] == ["triton/separate"]
    assert by_label["fused"]["ms"] == 2.5 and by_label["fused"]["processes"] == 2
    journal = [json.loads(line) for line in (tmp_path / "ops.jsonl").read_text().splitlines()]
    assert [(r["process"], r["backend"]) for r in journal] == [
        (0, "triton/separate"), *((seed, label) for seed in (1, 2) for label in ("fused", "triton/separate"))
    ]  # fmt: skip


def test_a_timer_that_is_off_reports_nothing(tmp_path):
    with pytest.raises(processes.Failed, match="1.50 of it"):
        run_stand_ins(tmp_path, 1, self_test=1.5)


def test_a_process_that_dies_is_named(tmp_path):
    with pytest.raises(processes.Failed, match="exit status 3"):
        processes.run([], {}, 9, 1, tmp_path / "ops.jsonl", command=lambda *_: [sys.executable, "-c", "exit(3)"])
