"""Run as a program by test_kills: trains once in peace, then kills the same run (SIGKILL) at random moments and
continues it each time, until it has ended. Each attempt is a fork of this process, so that it starts within 0.1 s.

killed.py FOLDER KILLS override ...   leaves FOLDER/whole and FOLDER/killed, and prints one JSON object.
"""

import itertools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path

from hydra import compose, initialize_config_module

from recsys_norm.training import main
from recsys_norm.training.run import run
from recsys_norm.training.trainer import Trainer


def attempt(config, folder, resume):
    """Start a run in a process of its own. Returns its id, and a pipe that has a byte to read when training begins."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    os.close(read)
    fit = Trainer.fit

    def begun(self):
        os.write(write, b"x")
        fit(self)

    Trainer.fit = begun
    config.trainer.resume = str(folder) if resume else None
    try:
        run(config, folder)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def finish(child):
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        raise SystemExit(f"a run that was left alone ended with {status}")


def saved(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def seconds_per_step(config, folder):
    """Train, and return the median time from one step (with its checkpoint) to the next."""
    original, times = Trainer._step, []

    def timed(self, batches):
        times.append(time.perf_counter())
        original(self, batches)

    Trainer._step = timed
    run(config, folder)
    Trainer._step = original
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def script(root, kills, overrides):
    main.register()
    with initialize_config_module("recsys_norm.configs", version_base="1.3"):
        config = main.checked(compose("config", overrides=overrides))
    step = seconds_per_step(config, root / "whole")
    moments, folder, done, resumed, unfinished = random.Random(0), root / "killed", 0, [], 0
    while done < kills:
        if not saved(folder):
            shutil.rmtree(folder, ignore_errors=True)
        steps = saved(folder)
        child, begun = attempt(config, folder, resume=bool(steps))
        # A fifth of the kills hits the start, too; the others training only.
        if done % 5:
            if os.read(begun, 1) != b"x":
                raise SystemExit(f"the run did not continue from {steps}: {os.waitpid(child, 0)}")
            time.sleep(moments.uniform(0, 2.5 * step))
        else:
            time.sleep(moments.uniform(0, 4 * step))
        os.close(begun)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if not os.WIFSIGNALED(status):  # steps are shorter than they were: once more from the start
            if os.waitstatus_to_exitcode(status):
                raise SystemExit(f"the run failed after kill {done}")
            shutil.rmtree(folder)
            step /= 2
            continue
        done += 1
        resumed += steps[-1:]
        unfinished += any((folder / "checkpoints").glob(".step-*"))
    child, _ = attempt(config, folder, resume=bool(saved(folder)))
    finish(child)
    print(json.dumps({"kills": done, "continued_from": resumed, "while_writing": unfinished}))


if __name__ == "__main__":
    script(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
