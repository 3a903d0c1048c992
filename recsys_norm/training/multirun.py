"""Sweeps: `python train.py -m backend=unfused,fused ...` runs every point in a process of its own and compares them.

Hydra's own launcher runs all jobs in one process, where each inherits what the one before left: compiled graphs, tuned
kernels, a fragmented allocator. Here a job only says what it would run. When Hydra has composed them all, each runs as
`python -m recsys_norm.training` in its folder of the sweep, `compare.rounds` times in alternating order, then the
control runs. After one that fails, which leaves `failed.json`, the next one starts. Under torchrun every rank starts
its part of each run.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from recsys_norm.training import runtime

log = logging.getLogger(__name__)

DEFERRED = "deferred"  # what a job returns that runs later
_BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
_OWN_HYDRA_KEYS = re.compile(r"hydra\.(run\.|sweep|mode|job\.num)|hydra/(launcher|sweeper)")
_REPORTED = "sweep reported"
_GRACE_S = 60  # for a checkpoint, after a signal
_CONTROL = ("trainer.test=false", "trainer.measure_norm_cost=false", "trainer.profile_steps=0")
_CLOCKS = "index,timestamp,clocks.current.sm,clocks.current.memory,power.draw,temperature.gpu,utilization.gpu"


def deferred(isolate: bool) -> bool:
    """Whether `Comparison` will run the job that Hydra runs now, a point of a sweep, in a process of its own."""
    hydra = HydraConfig.get()
    return (
        isolate
        and hydra.mode == RunMode.MULTIRUN
        and "comparison" in hydra.callbacks
        and hydra.launcher.get("_target_") == _BASIC
    )


@dataclass(frozen=True)
class Point:
    """One run of the sweep. number: tells it from the others; backend, attention: of the composed configuration."""

    number: int
    folder: Path
    overrides: tuple[str, ...]
    flags: tuple[str, ...] = ()  # --config-dir and --config-name
    backend: str = ""
    attention: str = ""

    @property
    def group(self) -> tuple[str, ...]:
        """The overrides that are no matter of the path: points that share them are compared."""
        return tuple(o for o in self.overrides if not re.match(r"\+*(backend\b|attention=)", o))

    def command(self) -> list[str]:
        folder = str(self.folder).replace("\\", "\\\\").replace("'", "\\'")
        own = (f"hydra.run.dir='{folder}'", f"hydra.job.num={self.number}")
        return [sys.executable, "-m", "recsys_norm.training", *self.flags, *self.overrides, *own]


class Comparison(Callback):
    """Hydra callback, `hydra.callbacks.comparison`. Ends the program with 1 if a run failed."""

    def __init__(self) -> None:
        self._points: list[Point] = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if job_return.status == JobStatus.COMPLETED and job_return.return_value == DEFERRED:
            self._points.append(_point(config, job_return))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        world = runtime.world()
        main = world.rank == 0
        failed, reported = 0, True
        try:
            if self._points:
                failed = Schedule(self._points, config.compare, folder, main).run()
        finally:  # a sweep that was stopped compares what it has
            if main:
                reported = report(folder)
            if world.store is not None:  # torchrun ends all ranks when the first one ends with an error
                world.store.set(_REPORTED, "") if main else world.store.wait([_REPORTED])
        if failed or not reported:
            raise SystemExit(1)


def report(folder: Path) -> bool:
    """Compare the runs in the folder of a sweep, write the comparison into it and print the table.

    False after an error, which is logged: Hydra would turn it into a warning.
    """
    from recsys_norm.bench import compare, compare_report, compare_runs

    try:
        comparison = compare.compare(compare_runs.load([folder]))
        print(f"\n{compare_report.report(comparison, folder)}", flush=True)
    except compare_runs.CompareError as error:
        print(f"no comparison: {error}", flush=True)
    except Exception:
        log.exception(f"the runs in {folder} could not be compared")
        return False
    return True


def _point(config: DictConfig, job: JobReturn) -> Point:
    hydra = config.hydra
    given = [o for o in OmegaConf.to_container(hydra.overrides.hydra) if not _OWN_HYDRA_KEYS.match(o.lstrip("+~"))]
    folders = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    flags = [part for folder in folders for part in ("--config-dir", folder)]
    return Point(
        number=hydra.job.num,
        folder=Path(hydra.runtime.output_dir),
        overrides=(*job.overrides, *given),
        flags=(*flags, "--config-name", hydra.job.config_name),
        backend=config.backend.name,
        attention=config.attention,
    )


class Schedule:
    """The runs of a sweep in the order in which they are made.

    Round after round, every second one backwards, so that what drifts meets all paths alike; then `controls` runs per
    group of at least two points: the unfused point (else the first) with the rows of each batch in another order.
    """

    def __init__(self, points: Sequence[Point], settings: Any, sweep: Path, main: bool) -> None:
        self._sweep = sweep
        self._main = main
        self._timeout_s = settings.timeout_s
        self._stopped: list[int] = []  # signals
        self._child: subprocess.Popen | None = None
        self.runs = self._plan(points, settings.rounds, settings.controls)

    def _plan(self, points: Sequence[Point], rounds: int, controls: int) -> list[Point]:
        runs = list(points)
        for again in range(1, rounds):
            folders = [self._sweep / f"round-{again + 1}" / point.folder.name for point in points]
            repeated = [
                replace(p, folder=f, overrides=(*p.overrides, "trainer.test=false")) for p, f in zip(points, folders)
            ]
            runs += repeated[::-1] if again % 2 else repeated
        groups: dict[tuple[str, ...], list[Point]] = {}
        for point in points:
            groups.setdefault(point.group, []).append(point)
        for members in groups.values():
            if len(members) < 2:
                continue
            reference = min(members, key=lambda p: (p.backend != "unfused", p.attention != "fused"))
            for order in range(1, controls + 1):
                overrides = (*reference.overrides, *_CONTROL, f"trainer.row_order={order}")
                runs.append(replace(reference, folder=self._sweep / "control" / f"{reference.folder.name}-{order}",
                                    overrides=overrides))  # fmt: skip
        return [replace(run, number=number) for number, run in enumerate(runs)]

    def run(self) -> int:
        """Make all runs; returns how many failed. Exits with 128 + the signal's number after a signal."""
        failed = 0
        common = set.intersection(*(set(run.overrides) for run in self.runs))
        with self._signals():
            for run in self.runs:
                if self._main:
                    own = " ".join(override for override in run.overrides if override not in common)
                    print(f"\nrun {run.number + 1} of {len(self.runs)}: {own}", flush=True)
                    run.folder.mkdir(parents=True, exist_ok=True)
                error = self._run(run)
                if self._stopped:
                    raise SystemExit(128 + self._stopped[0])
                if error is not None:
                    failed += 1
                    if self._main:
                        (run.folder / "failed.json").write_text(json.dumps({"error": error}) + "\n")
        return failed

    def _run(self, run: Point) -> str | None:
        """The error of the run in one line, None if it went well."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        last: deque[str] = deque(maxlen=200)
        with _clocks(run.folder / "clocks.csv" if self._main else None):
            self._child = subprocess.Popen(run.command(), env=environment, stderr=subprocess.PIPE, text=True)
            reader = threading.Thread(target=_pass_on, args=(self._child.stderr, last), daemon=True)
            reader.start()
            late = not self._wait()
            reader.join(timeout=5)
        code, self._child = self._child.returncode, None
        if late:
            return f"it was stopped after compare.timeout_s={self._timeout_s:g} seconds"
        return None if code == 0 else one_error(last, code)

    def _wait(self) -> bool:
        """Wait for the child's end. False if it took longer than it may."""
        try:
            self._child.wait(self._timeout_s)
            return True
        except subprocess.TimeoutExpired:
            self._child.terminate()
        try:
            self._child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        return False

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """A signal ends the run at hand, which saves a checkpoint, and with it the sweep."""

        def handle(signum: int, frame: Any) -> None:
            self._stopped.append(signum)
            if self._child is not None:
                # A terminal's Ctrl-C reached the child, too; twice would interrupt it at once.
                self._child.send_signal(signal.SIGTERM if len(self._stopped) < 3 else signal.SIGKILL)

        before = {signum: signal.signal(signum, handle) for signum in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


def one_error(lines: Sequence[str], code: int) -> str:
    """What a process said last about why it ended with this code."""
    for line in reversed(lines):
        line = re.sub(r"^\[rank\d+\]: ", "", line)  # torch puts it before a traceback
        if re.match(r"error\b|[\w.]*(Error|Exception|Interrupt)(:|$)", line):
            return line.removeprefix("error: ")
    if code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"it was ended by {signal.Signals(-code).name}{hint}"
    return lines[-1] if lines else f"it ended with exit code {code}"


def _pass_on(source: IO[str], last: deque[str]) -> None:
    for line in source:
        sys.stderr.write(line)
        sys.stderr.flush()
        if line.strip():
            last.append(line.strip())


@contextmanager
def _clocks(path: Path | None) -> Iterator[None]:
    """Meanwhile nvidia-smi, where there is one, writes the GPUs' clocks, power and temperature into a CSV file."""
    program = shutil.which("nvidia-smi") if path is not None else None
    if program is None:
        yield
        return
    command = [program, f"--query-gpu={_CLOCKS}", "--format=csv,nounits", "--loop-ms=500"]
    with path.open("w") as file:
        logger = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            logger.terminate()
            logger.wait()
