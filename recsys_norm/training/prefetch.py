"""Batches of a loader on the device."""

from __future__ import annotations

import os
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
