"""A worker process of the tests with several ranks: it waits for jobs and runs them in the process group it belongs to.

Starting Python, torch and torchrec takes longer than a run of the tiny model, so all checks share the same processes.
A job whose file says "restart" takes the place of the whole program: the worker ends with it if it fails, and torchrun
starts the workers again, which then take up the same job.
"""

import contextlib
import json
import math
import os
import sys
import time
import traceback
from pathlib import Path

RESTART = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def main(*overrides):
    from recsys_norm.training.main import main

    main(["train.py", *overrides])


def nan(what, rank, step, *overrides):
    """A run in which the loss or a gradient of one rank is not a number."""
    from recsys_norm.training.trainer import Trainer

    original = Trainer._loss

    def loss(self, logits, *rest):
        if (self.runtime.rank, self.progress.step) != (rank, step):
            return original(self, logits, *rest)
        if what == "gradient":
            logits.register_hook(lambda grad: grad * math.nan)
            return original(self, logits, *rest)
        return original(self, logits * math.nan, *rest)

    Trainer._loss = loss
    try:
        main(*overrides)
    finally:
        Trainer._loss = original


def hangs(rank, step, timeout_s, *overrides):
    """A run that hangs on one rank, unless torchrun started it again: then it may also take its time."""
    from recsys_norm.training.trainer import Trainer

    original = Trainer._rows
    first = RESTART == 0
    overrides = [*overrides, f"distributed.timeout_s={timeout_s if first else 120}"]

    def wait(self, batch):
        while first and (self.runtime.rank, self.progress.step) == (rank, step):
            time.sleep(0.1)
        return original(self, batch)

    Trainer._rows = wait
    try:
        main(*overrides)
    finally:
        Trainer._rows = original


def _run(job, folder, name):
    """Leaves the exit code and what was printed; `name.<restart>.err` is there even if the process dies."""
    answer = {"code": 0}
    paths = {kind: folder / f"{name}.{RESTART}.{kind}" for kind in ("out", "err")}
    with open(paths["out"], "w") as out, open(paths["err"], "w") as err:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                globals()[job["call"]](*job["arguments"])
            except SystemExit as stop:
                answer["code"] = stop.code
            except BaseException:
                answer["code"] = -1
                traceback.print_exc()
    if job["restart"] and answer["code"]:
        raise SystemExit(1)
    answer |= {kind: path.read_text() for kind, path in paths.items()}
    (folder / f"{name}.tmp").write_text(json.dumps(answer))
    os.replace(folder / f"{name}.tmp", folder / f"{name}.json")


def serve(folder, rank):
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    number = len(list(folder.glob(f"*.{rank}.json")))
    while not (folder / "end").exists():
        path = folder / f"{number}.job"
        if path.exists():
            _run(json.loads(path.read_text()), folder, f"{number}.{rank}")
            number += 1
        else:
            time.sleep(0.01)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(os.environ["RANK"]))
