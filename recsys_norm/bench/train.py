"""`python -m recsys_norm.bench train`: training steps of the backends with fixed settings.

The same as `python train.py -m experiment=benchmark backend=.. model=..`: batches from a pool, so that making them is
not measured, and no judgement of loss curves. `python train.py -m backend=..` compares quality, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def run(
    models: str, backends: str, attention: str, rounds: int, out: Path, name: str, overrides: Sequence[str] = ()
) -> int:
    """Run the sweep in `out`/`name` and write the summaries of its runs to `out`/`name`.json. Returns the exit code."""
    from recsys_norm.bench import compare_runs
    from recsys_norm.training.main import main

    folder = Path(out) / name
    swept = [f"model={models}", f"backend={backends}", f"attention={attention}", f"compare.rounds={rounds}"]
    fixed = ["experiment=benchmark", "backend.compile_eval=false", "compare.controls=0", f"hydra.sweep.dir={folder}"]
    code = 0
    try:
        main(["train.py", "-m", *swept, *fixed, *overrides])
    except SystemExit as stop:
        code = int(stop.code or 0)
    if not folder.is_dir():  # a setting was refused
        return code
    summaries = [run.summary for run in compare_runs.load([folder]) if run.summary is not None]
    (Path(out) / f"{name}.json").write_text(json.dumps(summaries, indent=1) + "\n")
    return code
