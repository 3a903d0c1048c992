"""How long Triton takes to compile the kernels of a run."""

from __future__ import annotations

from typing import Any

import torch

from recsys_norm.training.compiling import CompileClock


class KernelClock:
    """Seconds that Triton spent in this process on compiling kernels, or on fetching them from its cache.

    What happens while torch.compile is at work counts there, see `CompileClock`. None on a device without Triton
    kernels, and where the installed triton does not tell.
    """

    def __init__(self, device: torch.device, compiling: CompileClock) -> None:
        self._wanted = device.type == "cuda"
        self._compiling = compiling
        self._knobs: Any = None
        self._before: Any = None
        self._microseconds = 0

    def __enter__(self) -> KernelClock:
        if self._wanted:
            try:
                from triton import knobs

                self._before, self._knobs = knobs.compilation.listener, knobs.compilation
            except (ImportError, AttributeError):
                return self
            self._knobs.listener = self.note
        return self

    def __exit__(self, *_: Any) -> None:
        if self._knobs is not None:
            self._knobs.listener = self._before

    def note(self, *, times: Any, **event: Any) -> None:
        """Triton's listener: called after each compilation, with its duration in microseconds."""
        if not self._compiling.running:
            self._microseconds += times.total
        if self._before is not None:
            self._before(times=times, **event)

    @property
    def seconds(self) -> float | None:
        return None if self._knobs is None else self._microseconds / 1e6
