"""Options of training: averaged weights, left-out negatives, several tasks, weights, workers that fail."""

import json
import math
import os
import re
import signal
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from recsys_norm.training.averaging import WeightAverage
from recsys_norm.training.health import Health
from recsys_norm.training.main import main
from recsys_norm.training.prefetch import worker_failure


class Optimized:
    """What WeightAverage needs of Optimizers."""

    def __init__(self, module):
        self.parameters = dict(module.named_parameters())
        self.loads = 0

    def loaded(self):
        self.loads += 1


def test_the_average_is_the_recurrence():
    module = nn.Linear(3, 2)
    average = WeightAverage(Optimized(module), 0.3)
    expected = {name: p.detach().clone() for name, p in module.named_parameters()}
    for step in range(5):
        with torch.no_grad():
            for p in module.parameters():
                p.add_(torch.randn_like(p))
        average.update(step)
        decay = min(0.3, (1 + step) / (10 + step))
        expected = {n: decay * expected[n] + (1 - decay) * p.detach() for n, p in module.named_parameters()}
    current = {name: p.detach().clone() for name, p in module.named_parameters()}
    with average.applied():
        for name, p in module.named_parameters():
            torch.testing.assert_close(p.detach(), expected[name])
            assert not torch.equal(p, current[name])
    assert all(torch.equal(p, current[name]) for name, p in module.named_parameters())


EMA = ["trainer.ema_decay=0.9", "trainer.eval_every_epochs=0.5", "optimizer.dense.lr=0.01"]


def test_the_average_is_evaluated_and_survives_a_stop(train, records, monkeypatch, tmp_path):
    from recsys_norm.training.trainer import Trainer

    plain, plain_dir = train(*EMA[1:], name="plain")
    whole, whole_dir = train(*EMA, name="whole")
    curves = [[loss for line in records(d, "train") for loss in line["step_loss"]] for d in (plain_dir, whole_dir)]
    assert curves[0] == curves[1]  # training does not see the average
    losses = [[line["loss"] for line in records(d, "validation")] for d in (plain_dir, whole_dir)]
    assert all(a != b for a, b in zip(*losses, strict=True))
    original = Trainer._step

    def stopped(self, batches):
        if self.progress.step == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", stopped)
        with pytest.raises(SystemExit):
            train(*EMA, name="stopped")
    main(["train.py", f"trainer.resume={tmp_path / 'stopped'}"])
    resumed = json.loads((tmp_path / "stopped" / "summary.json").read_text())
    assert all(resumed[name] == whole[name] for name in ("loss", "auc", "ne", "best_step"))
    assert records(tmp_path / "stopped", "validation")[-1]["loss"] == losses[1][-1]


# -- logs


def write_kuairand(folder, n=600, clicks=0.2):
    rng = np.random.default_rng(0)
    folder.mkdir()
    lines = ["user_id,video_id,time_ms,is_click,long_view,is_like,duration_ms,tab"]
    for i in range(n):
        video = rng.integers(0, 20)
        y = [int(rng.random() < p) for p in (clicks * (1.6 if video % 2 else 0.4), 0.3, 0.3)]
        lines.append(f"{rng.integers(0, 12)},{video},{1000 * i},{y[0]},{y[1]},{y[2]},{rng.integers(1000, 9000)},1")
    (folder / "log_standard_pure.csv").write_text("\n".join(lines) + "\n")
    return folder


def run_files(tiny, tmp_path, data, *overrides):
    sizes = [o for o in tiny if not o.startswith("data")]
    main(["train.py", *sizes, f"data={data}", f"data.cache={tmp_path / 'cache'}", "hydra.run.dir=run", *overrides])
    return json.loads((tmp_path / "run" / "summary.json").read_text())


@pytest.mark.parametrize("data", ["criteo", "parquet", "recbole"])
def test_a_run_on_each_format(tiny, tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    overrides = ["data.path=log", "trainer.max_steps=2"]
    (tmp_path / "log").mkdir()
    if data == "criteo":
        lines = [f"{i % 2}" + f"\t{i}" * 13 + f"\t{i % 5:08x}" * 26 for i in range(200)]
        (tmp_path / "log" / "train.txt").write_text("\n".join(lines))
    elif data == "recbole":
        lines = [f"{i % 7}\t{i % 11}\t{1 + i % 5}\t{i}" for i in range(200)]
        head = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
        (tmp_path / "log" / "x.inter").write_text("\n".join([head, *lines]))
    else:
        rows = [
            dict(y=i % 2, user=i % 7, t=i, item=i % 11, price=0.5 * i, tags=["a", "b"][: i % 3], w=1.0 + i % 2)
            | {"seen": [1, 2, 3][: i % 4], "how": [0, 1, 0][: i % 4], "when": [-3, -2, -1][: i % 4]}
            for i in range(200)
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log" / "x.parquet")
        overrides += [f"data.columns.{k}" for k in ("label=y", "user_id=user", "timestamp=t", "item=item", "weight=w")]
        overrides += ["data.columns.dense=[price]", "data.columns.sparse=[tags,user]", "+data.tables={user: {rows: 4}}"]
        overrides += ["+data.columns.sequences={long: {item: seen, action: how, time: when, max_len: 2}}"]
    result = run_files(tiny, tmp_path, data, *overrides)
    assert result["data"] == data and result["steps"] == 2 and math.isfinite(result["loss"])
    assert (result["gauc"] is None) == (data == "criteo")
    assert (tmp_path / "run" / "data" / "vocabulary" / "dense.json").exists()
    if data == "parquet":
        assert pq.read_table("run/data/vocabulary/user.parquet").num_rows == 3  # and the row for all others


@pytest.fixture
def logs(tmp_path, tiny, monkeypatch):
    """logs(*overrides): a run on a small KuaiRand log; (summary, run directory)."""
    sizes = [o for o in tiny if not o.startswith("data") or o == "data=synthetic"]
    sizes[sizes.index("data=synthetic")] = "data=kuairand"
    folder = write_kuairand(tmp_path / "log")
    monkeypatch.chdir(tmp_path)

    def run(*overrides, name="run"):
        data = [f"data.path={folder}", f"data.cache={tmp_path / 'cache'}"]
        main(["train.py", *sizes, *data, f"hydra.run.dir={tmp_path / name}", *overrides])
        return json.loads((tmp_path / name / "summary.json").read_text()), tmp_path / name

    return run


def test_several_tasks_and_what_the_data_fitted_is_kept_with_the_run(logs, records):
    result, run_dir = logs("trainer.max_steps=4")
    line = records(run_dir, "test")[0]
    assert {"loss", "loss/long_view", "loss/is_like", "auc", "auc/long_view", "gauc/is_like"} <= set(line)
    assert result["loss"] == line["loss"] and math.isfinite(line["loss/is_like"])
    saved = {path.name for path in (run_dir / "data" / "vocabulary").iterdir()}
    assert {"item.parquet", "user_id.parquet", "tab.parquet", "dense.json"} <= saved
    main(["train.py", f"trainer.resume={run_dir}", "trainer.max_steps=6"])  # with the same vocabularies: goes on
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 6


def test_resuming_with_other_data_is_one_line(logs, tmp_path, capsys):
    _, run_dir = logs("trainer.max_steps=2")
    log = tmp_path / "log" / "log_standard_pure.csv"
    log.write_text(log.read_text().replace(",3,", ",33,"))
    with pytest.raises(SystemExit):
        main(["train.py", f"trainer.resume={run_dir}", "trainer.max_steps=4"])
    error = capsys.readouterr().err
    assert "is not what the data gives now" in error and error.count("\n") == 1


def test_damaged_data_ends_a_run_with_one_line(logs, tmp_path, capsys):
    log = tmp_path / "log" / "log_standard_pure.csv"
    log.write_text(log.read_text().replace("\n5,", "\nnobody;5,", 1).replace(",1000,", ",later,", 1))
    with pytest.raises(SystemExit) as stop:
        logs("data.damaged=raise")
    error = capsys.readouterr().err
    assert stop.value.code == 1 and error.count("\n") == 1
    assert error.startswith("error: data: ") and "log_standard_pure.csv, line 3: time_ms is 'later'" in error


@pytest.mark.parametrize("correction, low, high", [("logit", 0.9, 1.1), ("weight", 0.9, 1.1), ("none", 1.7, 9.0)])
def test_calibration_with_left_out_negatives(tmp_path, correction, low, high):
    """A logit per film, fitted to a quarter of the negatives by the trainer's loss: predictions are those of the whole
    data, unless nothing is corrected."""
    from recsys_norm.data.logs import Logs
    from recsys_norm.training.trainer import Trainer

    options = dict(format="kuairand", path=str(write_kuairand(tmp_path / "log", 4000)), cache=str(tmp_path / "cache"))
    options |= dict(batch_size=4000, num_workers=0, tasks=["is_click"])
    whole = next(iter(Logs(**options).train_loader()))
    module = Logs(**options, negative_rate=0.25, negative_correction=correction)
    batch = next(iter(module.train_loader()))
    assert 0.3 < len(batch) / len(whole) < 0.5
    trainer = Fake()
    trainer.schema = module.schema
    logit = torch.zeros(module.schema.rows("item"), 1, requires_grad=True)
    item = [b.ids["candidate.item"].values() for b in (batch, whole)]
    optimizer = torch.optim.LBFGS([logit], max_iter=50)

    def loss():
        optimizer.zero_grad()
        value = Trainer._loss(trainer, logit[item[0]], batch, [len(batch)])
        value.backward()
        return value

    optimizer.step(loss)
    calibration = logit[item[1]].sigmoid().mean() / whole.label.mean()
    assert low < calibration < high


class Fake:
    """An object with the attributes that a test gives it."""


def test_the_training_loss_uses_the_shift(train, monkeypatch):
    """BCE of logit + shift, for the first task alone."""
    from recsys_norm.training.trainer import Trainer

    trainer, batch = Fake(), Fake()
    trainer.schema = Fake()
    trainer.schema.logit_shift = math.log(4)
    batch.label, batch.weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([2.0, 0.5])
    logits = torch.tensor([[0.3, -1.0], [-0.2, 0.7]])
    shifted = logits + torch.tensor([math.log(4), 0.0])
    bce = nn.functional.binary_cross_entropy_with_logits(shifted, batch.label, reduction="none")
    expected = (bce.sum(1) * batch.weight).sum() / 2
    torch.testing.assert_close(Trainer._loss(trainer, logits, batch, [2]), expected)


def test_training_goes_on_where_the_disk_is_full(train, monkeypatch, capsys, records):
    """The best validation is the one whose checkpoint is on disk."""
    from recsys_norm.training import checkpoint

    write, seen = checkpoint._write_synced, []

    def full(path, value):
        step = int(path.parent.name.rpartition("-")[2])
        seen.append(step)
        if step > 4:
            raise OSError(28, "No space left on device")
        write(path, value)

    monkeypatch.setattr(checkpoint, "_write_synced", full)
    result, run_dir = train("trainer.eval_every_steps=4", "trainer.max_steps=12", "optimizer.dense.lr=0.01")
    shown = capsys.readouterr().out
    for step in (8, 12):
        assert f"the checkpoint of step {step} could not be written: [Errno 28] No space left on device" in shown
    assert "the last complete one is of step 4" in shown
    losses = [line["loss"] for line in records(run_dir, "validation")]
    assert min(losses) < losses[0] and result["best_step"] == 4 and {8, 12} < set(seen)
    assert [path.name for path in (run_dir / "checkpoints").glob("step-*")] == ["step-00000004"]
    assert result["loss"] > 0 and len(records(run_dir, "test")) == 1


def spoil(monkeypatch, what):
    """In a worker process, the batch at position 64 of the order fails."""
    from recsys_norm.data.synthetic import SyntheticRows

    original, parent = SyntheticRows.fetch, os.getpid()

    def fetch(self, epoch, begin, end):
        if begin == 64 and os.getpid() != parent:
            what()
        return original(self, epoch, begin, end)

    monkeypatch.setattr(SyntheticRows, "fetch", fetch)


def fail():
    raise ValueError("row 64 has no name")


@pytest.mark.parametrize(
    "what, message",
    [
        (fail, r"data worker 0 failed: ValueError: row 64 has no name \(.*test_options.py:\d+\)"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "a data worker is killed by signal: Killed; .* memory runs out"),
    ],
    ids=["exception", "killed"],
)
def test_a_worker_that_fails_ends_the_run_with_its_cause(train, monkeypatch, capsys, what, message):
    spoil(monkeypatch, what)
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)  # how soon a dead worker is missed
    with pytest.raises(SystemExit) as stop:
        train("data.num_workers=1")
    error = capsys.readouterr().err
    assert stop.value.code == 1
    assert re.search(message, error), error
    assert error.strip().count("\n") == 0 or what is not fail


def test_other_errors_are_not_taken_for_a_workers():
    assert worker_failure(RuntimeError("out of memory")) is None
    ended = worker_failure(
        RuntimeError("DataLoader worker (pid(s) 12, 13) exited unexpectedly with exit code 3. Details")
    )
    assert ended == "a data worker exited unexpectedly with exit code 3"


def test_reading_data_has_no_limit_of_time():
    """A process that reads a log for the first time, or waits for the one that does, is not taken for a hanging one."""
    ended = []

    class Watched(Health):
        def _give_up(self, own, waits):
            ended.append(own)
            self._end.set()

    with Watched(torch.distributed.HashStore(), 0, 2, timeout_s=0.5) as health:
        with health.unlimited("reading the data"):
            time.sleep(1.6)
            assert not ended
        time.sleep(1.6)
    assert len(ended) == 1 and "no progress for" in ended[0]
