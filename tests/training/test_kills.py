"""kill -9 at random moments of a run that saves all the time: it continues, and ends as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

KILLS = 20
SMALL = [
    "model.layers=1",
    "model.events.long.layers=1",
    "model.events.short.layers=1",
    "model.dropout=0.2",
    "trainer.max_epochs=2.5",
    "trainer.eval_every_epochs=1",
    "trainer.checkpoint_every_steps=1",
    "trainer.keep_last=2",
    "logger.progress=none",
]


def test_kill_9_at_random_moments(tiny, tmp_path, records):
    command = [sys.executable, str(Path(__file__).with_name("killed.py")), str(tmp_path), str(KILLS), *tiny, *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)
    assert report["kills"] == KILLS and len(set(report["continued_from"])) >= 5
    whole, killed = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "killed"))
    for name in ("loss", "ne", "auc", "gauc", "calibration", "best_step", "steps"):
        assert killed[name] == whole[name], name
    for split in ("validation", "test"):
        lines = [[line["loss"] for line in records(tmp_path / name, split)] for name in ("whole", "killed")]
        assert lines[0] == lines[1]
    curves = [
        [loss for line in records(tmp_path / name, "train") for loss in line["step_loss"]]
        for name in ("whole", "killed")
    ]
    assert curves[0] == curves[1] and len(curves[0]) == whole["steps"]
