"""Stopping and continuing: the final metrics are those of a run that was never stopped, to the last bit (CPU)."""

import json
import os
import shutil
import signal

import pytest

from recsys_norm.training.main import main
from recsys_norm.training.trainer import Trainer

RUN = ["trainer.max_epochs=2", "trainer.eval_every_epochs=0.5", "model.dropout=0.2", "trainer.checkpoint_every_steps=4"]
QUALITY = ("loss", "ne", "auc", "gauc", "calibration", "best_step", "steps")


def quality(run_dir):
    summary = json.loads((run_dir / "summary.json").read_text())
    return {name: summary[name] for name in QUALITY}


def send_at(monkeypatch, method, when):
    """SIGTERM arrives inside the named method of the trainer, at its `when`-th call."""
    original, calls = getattr(Trainer, method), []

    def watched(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == when:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, method, watched)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny):
    """The run directory of a run that nothing stopped."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    main(["train.py", *tiny, *RUN, f"hydra.run.dir={run_dir}"])
    return run_dir


@pytest.fixture
def losses(records):
    return lambda run_dir: [loss for record in records(run_dir, "train") for loss in record["step_loss"]]


# Inside a step, with the data made by a worker process; and inside the first validation (6 batches of training before).
@pytest.mark.parametrize("method, when, workers", [("_step", 15, 1), ("_logits", 8, 0)])
def test_sigterm_then_resume_is_exact(whole, train, losses, records, monkeypatch, tmp_path, method, when, workers):
    with monkeypatch.context() as patch:
        send_at(patch, method, when)
        with pytest.raises(SystemExit) as stop:
            train(*RUN, f"data.num_workers={workers}", name="stopped")
    assert stop.value.code == 128 + signal.SIGTERM
    run_dir = tmp_path / "stopped"
    assert not (run_dir / "summary.json").exists() and list((run_dir / "checkpoints").glob("step-*"))
    main(["train.py", f"trainer.resume={run_dir}"])  # everything else comes from the run itself
    assert quality(run_dir) == quality(whole)
    assert losses(run_dir) == losses(whole)
    assert records(run_dir, "validation")[-1]["loss"] == records(whole, "validation")[-1]["loss"]
    assert len(records(run_dir, "validation")) == len(records(whole, "validation")) == 4


def test_ctrl_c_reaches_the_whole_process_group(program, tiny, tmp_path):
    """A terminal and torchrun signal the loader's worker processes, too; they have to outlive the last step."""
    process = program(*tiny, "data.train_rows=100000", "data.num_workers=2", "hydra.run.dir=run")
    lines = iter(process.stdout.readline, "")
    assert any("step    8/" in line for line in lines)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, err[-2000:]
    assert "continue with trainer.resume=" in out and list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_resume_continues_from_a_copy_into_another_directory_and_backend(whole, train, tmp_path):
    """A22: what one backend saved another one loads. Nothing is left to train, so the same weights are evaluated."""
    copy = shutil.copytree(whole, tmp_path / "copy", symlinks=True)
    summary, run_dir = train(*RUN, "backend=unfused", f"trainer.resume={copy}", name="other")
    assert summary["backend"] == "unfused" and summary["steps"] == 24
    expected = quality(whole)
    for name in ("loss", "auc", "calibration"):
        assert summary[name] == pytest.approx(expected[name], abs=1e-5)
    best = (run_dir / "checkpoints" / "best").resolve(strict=True)
    assert best.parent == (run_dir / "checkpoints").resolve() and best.name == f"step-{expected['best_step']:08d}"


def test_resuming_with_another_model_lists_what_does_not_fit(whole, train, tmp_path, capsys):
    copy = shutil.copytree(whole, tmp_path / "copy", symlinks=True)
    with pytest.raises(SystemExit) as stop:
        train(*RUN, "model.mlp_dim=24", f"trainer.resume={copy}", name="other")
    error = capsys.readouterr().err
    assert stop.value.code == 1 and "has shape" in error and "dense/" in error and error.count("\n") == 1


def test_resume_without_a_checkpoint_is_one_line(train, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for directory in (tmp_path / "empty", tmp_path / "missing"):
        with pytest.raises(SystemExit) as stop:
            train(f"trainer.resume={directory}", name="other")
        error = capsys.readouterr().err
        assert stop.value.code == 1 and "trainer.resume" in error and str(directory) in error
