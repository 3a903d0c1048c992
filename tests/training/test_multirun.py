"""Sweeps: which runs in which order, each in a process of its own, and what makes their comparison fair."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recsys_norm.data.config import LengthConfig, SyntheticEventConfig
from recsys_norm.data.synthetic import Synthetic
from recsys_norm.training import fairness, main
from recsys_norm.training.compiling import CompileClock
from recsys_norm.training.kernel_clock import KernelClock
from recsys_norm.training.multirun import Point, Schedule, one_error
from recsys_norm.training.runtime import Runtime


def settings(rounds=1, controls=0, timeout_s=None):
    return SimpleNamespace(rounds=rounds, controls=controls, timeout_s=timeout_s)


def points(*backends, extra=()):
    return [Point(i, Path(f"sweep/{i}"), (f"backend={b}", *extra), (), b, "fused") for i, b in enumerate(backends)]


def test_rounds_alternate_and_controls_come_last():
    schedule = Schedule(points("fused", "unfused", "naive"), settings(rounds=3, controls=2), Path("sweep"), True)
    named = [(str(run.folder), run.backend) for run in schedule.runs]
    assert named == [
        ("sweep/0", "fused"), ("sweep/1", "unfused"), ("sweep/2", "naive"),
        ("sweep/round-2/2", "naive"), ("sweep/round-2/1", "unfused"), ("sweep/round-2/0", "fused"),
        ("sweep/round-3/0", "fused"), ("sweep/round-3/1", "unfused"), ("sweep/round-3/2", "naive"),
        ("sweep/control/1-1", "unfused"), ("sweep/control/1-2", "unfused"),
    ]  # fmt: skip
    assert [run.number for run in schedule.runs] == list(range(11))
    assert schedule.runs[-1].overrides[-1] == "trainer.row_order=2"


def test_each_group_of_paths_has_its_control():
    seeds = [point for seed in (0, 1) for point in points("unfused", "fused", extra=(f"trainer.seed={seed}",))]
    alone = points("fused", extra=("trainer.seed=2",))
    controls = [run for run in Schedule([*seeds, *alone], settings(controls=1), Path("s"), True).runs[5:]]
    assert [run.overrides[1] for run in controls] == ["trainer.seed=0", "trainer.seed=1"]
    assert all(run.backend == "unfused" and run.overrides[-1] == "trainer.row_order=1" for run in controls)


def test_the_command_of_a_run():
    point = Point(3, Path("a b'c=d/0"), ("backend=fused",), ("--config-dir", "mine"))
    assert point.command() == [
        sys.executable, "-m", "recsys_norm.training", "--config-dir", "mine", "backend=fused",
        r"hydra.run.dir='a b\'c=d/0'", "hydra.job.num=3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "argv, chosen",
    [
        (["-m", "backend=unfused,fused"], True),
        (["--multirun", "backend=choice(unfused,fused)", "trainer.max_steps=5"], True),
        (["-m", "attention=eager,fused"], True),
        (["-m", "trainer.seed=0,1"], False),
        (["-m", "backend=fused"], False),
        (["backend=fused"], False),
        (["backend=unfused,fused", "-m"], True),
        (["-m", "backend=unfused,fused", "experiment=benchmark"], False),
        (["-m", "backend=unfused,fused", "~experiment"], False),
    ],
)
def test_a_sweep_over_backends_is_a_comparison(argv, chosen):
    result = main._with_comparison(["train.py", *argv])
    added = [arg for arg in result if arg not in argv]
    assert added == ["train.py", *["experiment=comparison"] * chosen]
    assert result[-1] == argv[-1]  # a flag may stand at the end, overrides behind it would be lost


# -- processes


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """programs(text, ..) makes a schedule of Python programs in place of training runs."""

    def schedule(*texts, timeout_s=None):
        found = [Point(i, tmp_path / str(i), (text,)) for i, text in enumerate(texts)]
        monkeypatch.setattr(Point, "command", lambda self: [sys.executable, "-c", self.overrides[0]])
        return Schedule(found, settings(timeout_s=timeout_s), tmp_path, True)

    return schedule


def error_of(folder):
    return json.loads((folder / "failed.json").read_text())["error"]


def test_the_runs_after_a_failed_one_are_made(programs, tmp_path, capfd):
    failing = "import sys; print('noise', file=sys.stderr); print('error: no such thing', file=sys.stderr); sys.exit(1)"
    killed = "import os; os.kill(os.getpid(), 9)"
    raising = "raise ValueError('bad\\nsecond line')"
    assert programs(failing, killed, raising, "print('fine')").run() == 3
    assert error_of(tmp_path / "0") == "no such thing"
    assert error_of(tmp_path / "1") == "it was ended by SIGKILL (out of memory?)"
    assert error_of(tmp_path / "2") == "ValueError: bad"
    assert not (tmp_path / "3" / "failed.json").exists()
    out, err = capfd.readouterr()
    assert "run 4 of 4" in out and "fine" in out and "noise" in err


def test_a_run_that_takes_too_long_is_stopped(programs, tmp_path):
    assert programs("import time; time.sleep(60)", "pass", timeout_s=1).run() == 1
    assert error_of(tmp_path / "0") == "it was stopped after compare.timeout_s=1 seconds"


def test_a_signal_ends_the_run_and_the_sweep(programs, tmp_path):
    waiting = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path('stopped').touch(), sys.exit(143)))\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(60)"
    )
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        schedule = programs(waiting, "import pathlib; pathlib.Path('second').touch()")

        def interrupt():
            while not Path("ready").exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(SystemExit) as stop:
            schedule.run()
        thread.join()
        assert stop.value.code == 128 + signal.SIGTERM
        assert Path("stopped").exists() and not Path("second").exists()
    finally:
        os.chdir(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the fused path has to fail for want of CUDA")
def test_a_sweep_ends_with_a_comparison_though_a_path_fails(program, tiny, tmp_path):
    """A path that fails has its one error in the table; the others finish, and are judged by the control."""
    sweep = [
        "-m",
        "backend=unfused,fused",
        "trainer.on_unsupported=raise",
        "trainer.max_steps=6",
        "hydra.sweep.dir=s w",
    ]
    process = program(*sweep, *tiny, "trainer.norm_cost_steps=1")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 1, err[-2000:]
    (group,) = json.loads((tmp_path / "s w" / "comparison.json").read_text())["groups"]
    unfused, fused = group["paths"]
    assert (
        unfused["rank"] == 1
        and unfused["status"] == "agrees"
        and unfused["start"] == {"weights": True, "batches": True}
    )
    assert fused["status"] == "failed" and "CUDA" in fused["error"]
    assert group["control"]["steps"] == len(group["curves"]["unfused"]) == 6
    control, curve = group["control"]["curves"][0], group["curves"]["unfused"]
    assert control == pytest.approx(curve, abs=1e-4)  # the same sums in another order
    assert f"fused failed: {fused['error']}" in " ".join(out.split()).replace("* ", "")
    start = json.loads((tmp_path / "s w" / "control" / "0-1" / "summary.json").read_text())["start"]
    assert start["row_order"] == 1
    assert (tmp_path / "s w" / "comparison.png").exists() and not (tmp_path / "outputs").exists()


def test_the_kernel_clock_leaves_out_what_torch_compile_counts():
    clock = CompileClock()
    kernels = KernelClock(torch.device("cpu"), clock)
    with clock, kernels:
        assert kernels.seconds is None  # no kernels on a CPU
    kernels._knobs = SimpleNamespace()
    for running, microseconds in ((False, 1_500_000), (True, 9), (False, 500_000)):
        clock._began = 0.0 if running else None
        kernels.note(
            src=None, metadata={}, metadata_group={}, times=SimpleNamespace(total=microseconds), cache_hit=False
        )
    assert kernels.seconds == 2.0


def test_one_error_of_what_was_said():
    said = ["Error executing job with overrides: ['a']", "[rank0]: Traceback (most recent call last):",
            "[rank0]: RuntimeError: no memory, Error or not", "[W] something at exit"]  # fmt: skip
    assert one_error(said, 1) == "RuntimeError: no memory, Error or not"
    assert one_error(["error: no such key", "x"], 1) == "no such key"
    assert one_error(["error on rank 1: it died"], 1) == "error on rank 1: it died"
    assert one_error(["what happened"], 3) == "what happened" and one_error([], 3) == "it ended with exit code 3"


# -- fairness


@pytest.fixture(scope="module")
def data():
    events = {"long": SyntheticEventConfig(4, 8), "short": SyntheticEventConfig(2, 4)}
    sizes = dict(batch_size=16, n_dense=3, tables=2, rows=100, vocabulary=50, events=events, bayes_rows=64)
    return Synthetic(**sizes, train_rows=64, lengths=LengthConfig(empty=0.3))


def alone():
    return Runtime(0, 1, torch.device("cpu"), torch.float32)


def test_parts_of_a_table_add_up_to_the_checksum_of_the_whole():
    table = torch.randn(10, 6)
    parts = [(0, 0, table[:4, :4]), (0, 4, table[:4, 4:]), (4, 0, table[4:])]
    total = sum(int(fairness.checksum(part, row, column)) for row, column, part in parts)
    assert fairness._wrapped(total) == int(fairness.checksum(table))
    swapped = table[[1, 0, *range(2, 10)]]
    nudged = table.clone()
    nudged[9, 5] = torch.nextafter(nudged[9, 5], torch.tensor(9.0))
    assert len({int(fairness.checksum(t)) for t in (table, swapped, nudged, table.flip(1))}) == 4
    for dtype in (torch.bfloat16, torch.float64, torch.int64):
        assert int(fairness.checksum(table.to(dtype))) != 0
    assert int(fairness.checksum(torch.zeros(0, 3))) == 0


def test_a_permuted_batch_has_the_same_rows(data):
    batch = next(iter(data.train_loader()))
    order = torch.randperm(16)
    moved = fairness.permuted(batch, data.schema, order)
    for new, old in enumerate(order.tolist()):
        assert int(moved.row[new]) == int(batch.row[old]) and torch.equal(moved.dense[new], batch.dense[old])
        for part in ("sparse", "ids"):
            ours, theirs = getattr(moved, part), getattr(batch, part)
            for key in theirs.keys():
                assert torch.equal(ours[key].to_dense()[new], theirs[key].to_dense()[old])
        for event in data.schema.events:
            ages = [
                _row(b.ages[event.name], b.ids[event.fields[0].name].lengths(), i)
                for b, i in ((moved, new), (batch, old))
            ]
            assert torch.equal(*ages)


def _row(values, lengths, index):
    end = int(lengths.cumsum(0)[index])
    return values[end - int(lengths[index]) : end]


def test_the_digest_is_of_the_batches_as_the_data_gives_them(data):
    def record(seed=0, row_order=0):
        start = fairness.Start(alone(), data.schema, 0, row_order)
        loader = start.watch(data.train_loader(seed=seed))
        batches = list(loader)
        assert len(batches) == len(loader) == 4 and loader.state_dict()["rows"] == 64
        return start.record(), batches

    (plain, batches), (again, _), (other, moved) = record(), record(), record(row_order=1)
    assert plain["batches"] == again["batches"] == other["batches"] != record(seed=1)[0]["batches"]
    assert (plain["row_order"], other["row_order"], plain["first_batches"]) == (0, 1, 4)
    assert any(not torch.equal(a.row, b.row) for a, b in zip(batches, moved))
    assert all(torch.equal(a.row.sort()[0], b.row.sort()[0]) for a, b in zip(batches, moved))


def test_the_digest_of_the_weights():
    def digest(**tensors):
        start = fairness.Start(alone(), None, 0, 0)
        start.weights(tensors)
        return start.record()["weights"]

    a, b = torch.randn(4, 3), torch.randn(4, 3)
    assert digest(x=a, y=b) == digest(y=b.clone(), x=a.clone()) != digest(x=b, y=a)
