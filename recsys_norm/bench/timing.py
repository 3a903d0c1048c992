"""GPU timing that can be trusted: candidates interleaved in random order, cold L2, the host ahead of the device.

A time is the distance of two CUDA events around one call. Before each call a buffer larger than L2 is written, so that no
candidate finds its inputs cached, and the device is kept busy for longer than the host took to queue the call in the
warm-up: what is measured is the device's work, not Python's.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 1 << 28  # several times the 50-60 MB of L2 of a Hopper or Blackwell GPU
CYCLES_PER_S = 2e9  # of the device clock, at most
HEAD_START_S = (1e-4, 4e-3)  # least and most that the device waits for the host


class Stopwatch:
    """Times callables on the current CUDA device."""

    def __init__(self, seed: int = 0):
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self._random = random.Random(seed)

    def time(
        self, candidates: dict[str, Callable[[], object]], launches: int, warmup: int = 2
    ) -> dict[str, list[float]]:
        """Milliseconds of each launch of each candidate; every round runs all of them once, in random order."""
        head_start = {name: self._warm_up(function, warmup) for name, function in candidates.items()}
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in candidates}
        order = list(candidates)
        for _ in range(launches):
            self._random.shuffle(order)
            for name in order:
                self._flush.zero_()
                torch.cuda._sleep(head_start[name])
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                candidates[name]()
                end.record()
                events[name].append((start, end))
            torch.cuda.synchronize()
        return {name: [a.elapsed_time(b) for a, b in pairs] for name, pairs in events.items()}

    def _warm_up(self, function: Callable[[], object], calls: int) -> int:
        """Cycles that the host may take to queue one call: half as much again as the longest of `calls` took."""
        longest = 0.0
        for i in range(1 + calls):
            torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            longest = max(longest, time.perf_counter() - start if i else 0.0)  # the first call may compile
        torch.cuda.synchronize()
        least, most = HEAD_START_S
        return int(CYCLES_PER_S * min(max(1.5 * longest, least), most))

    def self_test(self) -> float:
        """Measured over true duration of a kernel that spins for a known number of nanoseconds; 1.0 is perfect.

        The truth comes from the device's own nanosecond clock, read inside the kernel.
        """
        from recsys_norm.bench.spin import spin

        duration = torch.zeros(1, dtype=torch.int64, device="cuda")
        times = self.time({"spin": lambda: spin[(1,)](duration, 2_000_000)}, launches=9)
        return statistics.median(times["spin"]) / (duration.item() / 1e6)


def percentile(values: list[float], q: float) -> float:
    """The q-quantile of values, q in [0, 1], by linear interpolation."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
