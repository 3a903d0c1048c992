"""Runs of a very small model, in this process or as a program of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Small enough for a second or two of training; every part of the model and both events are there.
TINY = [
    "model=kunlun_tiny",
    "model.batch_size=16",
    "model.n_dense=3",
    "model.dim=16",
    "model.tables.count=2",
    "model.tables.rows=100",
    "model.tables.dim=8",
    "model.events.long.dim=16",
    "model.events.long.mean_len=4",
    "model.events.long.max_len=8",
    "model.events.long.window=4",
    "model.events.short.dim=8",
    "model.events.short.mean_len=2",
    "model.events.short.max_len=4",
    "model.n_sum=4",
    "model.fmb_tokens=2",
    "model.fmb_rank=4",
    "model.n_seeds=4",
    "model.n_summary=2",
    "model.mlp_dim=16",
    "data=synthetic",
    "data.train_rows=192",
    "data.validation_rows=40",
    "data.test_rows=72",
    "data.bayes_rows=2048",
    "data.vocabulary=50",
    "trainer.threads=1",
    "trainer.timing_warmup=2",
    "optimizer.warmup_steps=4",
    "logger.every_steps=4",
    "logger.tensorboard=false",
    "logger.progress=lines",
]


@pytest.fixture
def program(tmp_path):
    """program(*overrides) starts train.py as a process of its own, in an empty folder; it is ended with the test."""
    started = []

    def start(*overrides, launcher=(sys.executable,)):
        command = [*launcher, str(ROOT / "train.py"), *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def tiny():
    return list(TINY)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """train(*overrides, name="run") runs the tiny model here and returns (summary, run directory)."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides, name="run"):
        from recsys_norm.training.main import main

        run_dir = tmp_path / name
        main(["train.py", *TINY, f"hydra.run.dir={run_dir}", *overrides])
        return json.loads((run_dir / "summary.json").read_text()), run_dir

    return run


@pytest.fixture
def records():
    """records(run directory, split): the lines of metrics.jsonl about that split."""

    def read(run_dir, split):
        lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["split"] == split]

    return read
