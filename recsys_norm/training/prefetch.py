"""Batches of a loader on the device."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from recsys_norm.data.batch import Batch
from recsys_norm.training.runtime import ignored_signals, kept_rng


class DeviceBatches:
    """Iterates over one pass of a loader, with its batches on `device`.

    A batch is fetched when it is asked for. On CUDA that is when the host has queued the step before it, and the copy
    runs on a side stream, so loading and copying overlap with the device's work (the copy only from pinned memory).
    `state` is the loader's state after the batch that was yielded last. Starting the loader leaves the global random
    generators as they were: a resumed run draws the same numbers as one that never stopped.
    """

    def __init__(self, loader: Iterable[Batch], device: torch.device) -> None:
        self._loader = loader
        if getattr(loader, "num_workers", 0) and not isinstance(loader.worker_init_fn, _OwnGroup):
            loader.worker_init_fn = _OwnGroup(loader.worker_init_fn)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Batch]:
        with ignored_signals(), kept_rng():
            batches = iter(self._loader)
            batch = next(batches, None)
        while batch is not None:
            self.state = self._loader.state_dict() if hasattr(self._loader, "state_dict") else None
            yield self._move(batch)
            batch = next(batches, None)

    def _move(self, batch: Batch) -> Batch:
        if self._stream is None:
            return batch.to(self._device)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            batch = batch.to(self._device, non_blocking=True)
        current.wait_stream(self._stream)
        batch.record_stream(current)
        return batch


class _OwnGroup:
    """Runs first in each worker process, which leaves the program's process group: Ctrl-C and torchrun signal the whole
    group, and a worker that dies of it would take the run down before its checkpoint. It still ends with its parent."""

    def __init__(self, before: Callable[[int], None] | None) -> None:
        self._before = before

    def __call__(self, worker: int) -> None:
        os.setpgrp()
        if self._before is not None:
            self._before(worker)


def worker_failure(error: BaseException) -> str | None:
    """What happened to a worker process of the loader, in one line; None for an error of another kind.

    Both come up in the main process wherever it is at that moment: what was raised in a worker, with its traceback as
    text, and the end of a worker by a signal.
    """
    text = str(error)
    raised = re.match(r"Caught (\S+) in DataLoader worker process (\d+)\.", text)
    if raised:
        lines = [line.strip() for line in text.strip().splitlines()]
        places = re.findall(r'File "([^"]+)", line (\d+)', text)
        where = f" ({places[-1][0]}:{places[-1][1]})" if places else ""
        return f"data worker {raised[2]} failed: {lines[-1]}{where}"
    ended = re.search(r"DataLoader worker \(pid[()s]* ?[\d, ]+\) ([^.]+)", text)
    if ended is None:
        return None
    hint = "; the system ends processes like that where memory runs out: lower data.num_workers or data.prefetch"
    return f"a data worker {ended[1].strip()}{hint if 'Killed' in ended[1] else ''}"
