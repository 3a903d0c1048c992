"""What a run tells while it runs: metrics.jsonl, TensorBoard, and a bar on a terminal or plain lines elsewhere."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recsys_norm.training.config import LoggerConfig

log = logging.getLogger("recsys_norm")

_SHORT = {"examples_per_s": "ex/s", "step_ms": "ms/step", "calibration": "cal"}


class RunLogger:
    """Writes for rank 0; on the other ranks every method does nothing.

    metrics.jsonl holds one object per line: step, split ("train", "validation", "test"), time (seconds since the epoch)
    and the metrics; a value that is not finite is null. A line about training has the loss of each step since the line
    before in `step_loss`.
    """

    def __init__(self, config: LoggerConfig, run_dir: Path, *, active: bool) -> None:
        self._active = active
        self._config = config
        self._run_dir = run_dir
        self._first_step = 0
        self._file = self._board = self._bar = None
        self._lines = config.progress != "none"

    def continue_from(self, run_dir: Path, step: int) -> None:
        """Start with what a resumed run wrote up to the step that it continues from."""
        self._first_step = step
        if not self._active:
            return
        source, kept = run_dir / "metrics.jsonl", []
        for line in source.read_text(encoding="utf-8").splitlines() if source.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):  # a line that was cut off when the process was killed
                record = json.loads(line)
                if record["step"] <= step and record["split"] != "test":
                    kept.append(line + "\n")
        temporary = self._run_dir / "metrics.tmp"
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, self._run_dir / "metrics.jsonl")

    def metrics(self, step: int, split: str, values: dict[str, Any], total: int) -> None:
        if not self._active:
            return
        if self._file is None:
            self._open()
        record = {"step": step, "split": split, "time": round(time.time(), 3), **values}
        try:
            self._file.write(json.dumps(finite(record)) + "\n")
            self._file.flush()
        except OSError as error:  # what is not written yet goes with the next record
            log.warning(f"metrics.jsonl could not be written at step {step}: {error}")
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{split}/{name}", value, step)
        if self._lines and (self._bar is None or split != "train"):
            log.info(f"{split:<10} step {step:>{len(str(total))}}/{total}  {_text(values)}")

    def _open(self) -> None:
        self._file = open(self._run_dir / "metrics.jsonl", "a", encoding="utf-8")
        if self._config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._run_dir / "tensorboard"), purge_step=self._first_step + 1)

    def progress(self, step: int, total: int, values: dict[str, Any] | None = None) -> None:
        """Move the bar; values are shown beside it."""
        wanted = self._config.progress == "bar" or (self._config.progress == "auto" and sys.stdout.isatty())
        if not (self._active and wanted):
            return
        if self._bar is None:
            self._bar = _Bar(total)
        shown = {name: values[name] for name in ("loss", "ne", "examples_per_s") if name in values} if values else None
        self._bar.update(step, _text(shown) if shown else None)

    def close(self) -> None:
        """Ends the bar, too, so that what is printed next stands below it."""
        for part in (self._bar, self._board, self._file):
            if part is not None:
                part.close()
        self._file = self._board = self._bar = None


class _Bar:
    """A rich progress bar; log lines go above it."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        text = TextColumn("{task.fields[text]}")
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(20), TimeRemainingColumn(), text)
        self._progress = Progress(*columns, refresh_per_second=4)
        self._progress.start()  # replaces sys.stdout by one that prints above the bar
        self._task = self._progress.add_task("train", total=total, text="")
        console = [h for h in logging.getLogger().handlers if type(h) is logging.StreamHandler]
        self._restore = [(handler, handler.setStream(sys.stdout)) for handler in console]

    def update(self, step: int, text: str | None) -> None:
        self._progress.update(self._task, completed=step, **({} if text is None else {"text": text}))

    def close(self) -> None:
        for handler, stream in self._restore:
            handler.setStream(stream or sys.stdout)
        self._progress.stop()


def _text(values: dict[str, Any]) -> str:
    def show(value: float) -> str:
        return f"{value:,.0f}" if abs(value) >= 1000 or isinstance(value, int) else f"{value:.4g}"

    shown = {_SHORT.get(k, k): v for k, v in values.items() if isinstance(v, (int, float)) and k != "lr"}
    return "  ".join(f"{name} {show(value)}" for name, value in shown.items())


def finite(value: Any) -> Any:
    """The value as strict JSON allows it: NaN and infinities become None, also inside lists and dicts."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# What torch and torchrec say about their own insides on every run.
_NOISE = (
    "Please use DTensor instead",
    "'set_vital' is deprecated",
    r"`torch\.distributed\.\w+` is deprecated",
)
_NOISY_LOGGERS = ("torchrec", "torch.fx._symbolic_trace")


@contextlib.contextmanager
def warnings_as_lines(active: bool) -> Iterator[None]:
    """Warnings become log lines, on rank 0 only."""

    def show(message, category, filename, lineno, file=None, line=None):
        if active:
            log.warning(f"warning: {' '.join(str(message).split())}")

    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not active:
        log.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        for pattern in _NOISE:
            warnings.filterwarnings("ignore", message=pattern)
        warnings.showwarning = show
        yield
