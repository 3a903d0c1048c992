"""A checkpoint is there as a whole or not at all."""

import os
import resource
import subprocess
import sys
import textwrap

import pytest
import torch

from recsys_norm.training import checkpoint
from recsys_norm.training.checkpoint import Checkpoints
from recsys_norm.training.runtime import RunError, Runtime

ONE = Runtime(0, 1, torch.device("cpu"), torch.float32)


def tensors(value=0.0):
    return {"dense/w": torch.full((3, 2), value), "optimizer/step": torch.tensor(value)}


def loaded(folder, step):
    target = tensors(-1.0)
    Checkpoints(folder, ONE).load(step, target)
    return target


def save(checkpoints, step, best=None):
    local = {"rng": [1, "name", torch.arange(3)], "data": {"epoch": step}}
    return checkpoints.save(step, tensors(float(step)), {"step": step}, local, best)


def test_round_trip(tmp_path):
    checkpoints = Checkpoints(tmp_path, ONE)
    assert checkpoints.steps() == [] and save(checkpoints, 7)
    assert loaded(tmp_path, 7)["dense/w"].tolist() == [[7.0, 7.0]] * 3
    assert checkpoints.progress(7) == {"step": 7}
    local = checkpoints.local(7, 0)
    assert local["data"] == {"epoch": 7} and local["rng"][2].tolist() == [0, 1, 2]


def test_keeps_the_last_and_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path, ONE, keep_last=2)
    for step in range(1, 7):
        save(checkpoints, step, best=2 if step >= 2 else None)
    assert checkpoints.steps() == [2, 5, 6]
    assert (tmp_path / "checkpoints" / "best").resolve() == checkpoints.path(2).resolve()


@pytest.mark.parametrize("moment", ["_write_synced", "_sync_folder"])
def test_a_process_killed_while_it_writes_leaves_the_previous_checkpoint(tmp_path, moment):
    """The process ends on the spot, as under kill -9, after the tensors and before the checkpoint is complete."""
    script = f"""
        import os, sys, torch
        from recsys_norm.training import checkpoint
        from recsys_norm.training.runtime import Runtime
        checkpoints = checkpoint.Checkpoints({str(tmp_path)!r}, Runtime(0, 1, torch.device("cpu"), torch.float32))
        save = lambda step: checkpoints.save(step, {{"dense/w": torch.full((3, 2), float(step)),
            "optimizer/step": torch.tensor(float(step))}}, {{"step": step}}, {{}}, None)
        assert save(1)
        checkpoint.{moment} = lambda *_: os._exit(9)
        save(2)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 9
    checkpoints = Checkpoints(tmp_path, ONE)
    assert checkpoints.steps() == [1] and loaded(tmp_path, 1)["dense/w"][0, 0] == 1.0
    assert save(checkpoints, 2) and checkpoints.steps() == [2]  # what the dead process left is no obstacle


def test_a_full_disk_keeps_the_previous_checkpoint_and_says_so(tmp_path, monkeypatch, caplog):
    checkpoints = Checkpoints(tmp_path, ONE)
    save(checkpoints, 1)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_synced", full)
    with caplog.at_level("WARNING"):
        assert not save(checkpoints, 2)
    assert "No space left on device" in caplog.text and "step 1" in caplog.text
    assert checkpoints.steps() == [1] and loaded(tmp_path, 1)["optimizer/step"] == 1.0
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


def test_a_disk_that_fills_up_while_tensors_are_written(tmp_path, caplog):
    """The system refuses to write on in the middle of a file of tensors, as it does where the disk is full."""
    checkpoints = Checkpoints(tmp_path, ONE)
    large = lambda value: {"dense/w": torch.full((1 << 16, 2), value), "optimizer/step": torch.tensor(value)}  # noqa: E731
    assert checkpoints.save(1, large(1.0), {"step": 1}, {}, None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, limits[1]))
    try:
        with caplog.at_level("WARNING"):
            assert not checkpoints.save(2, large(2.0), {"step": 2}, {}, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "step 2 could not be written" in caplog.text and "the last complete one is of step 1" in caplog.text
    assert checkpoints.steps() == [1] and os.listdir(tmp_path / "checkpoints") == ["step-00000001"]
    target = large(0.0)
    checkpoints.load(1, target)
    assert (target["dense/w"] == 1.0).all()
    assert checkpoints.save(3, large(3.0), {"step": 3}, {}, None) and checkpoints.steps() == [3]


def test_what_does_not_fit_is_listed_and_nothing_is_changed(tmp_path):
    save(Checkpoints(tmp_path, ONE), 1)
    target = {"dense/w": torch.zeros(4, 2), "dense/new": torch.zeros(1), "optimizer/step": torch.zeros(())}
    with pytest.raises(RunError, match=r"lacks dense/new; dense/w has shape \[3, 2\] and the model \[4, 2\]"):
        Checkpoints(tmp_path, ONE).load(1, target)
    assert target["optimizer/step"] == 0.0
