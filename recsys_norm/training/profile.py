"""Where the time of a step goes.

`StepTimer` measures every step and its phases; on CUDA with events in the stream, so that nothing waits, and a phase is
the time that passes on the device, idle gaps included. `kernel_profile` reads a torch.profiler recording.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

PHASES = ("data", "forward", "backward", "optimizer")

# Kernels of eager PyTorch and of inductor (whose names list the operators they fuse) that normalise. Gradient clipping
# and attention have norms of another kind.
_NORM_KERNEL = re.compile(r"layer_?norm|rms_?norm|GammaBeta|rsqrt", re.IGNORECASE)
_OTHER_KERNEL = re.compile(r"attention|attn|gemm|_mm|matmul|linear|vector_norm|LpNorm|adam", re.IGNORECASE)


# Dense bf16 peak of one device, in flops per second.
_PEAKS = {"H100": 989e12, "H200": 989e12}


def peak_flops(device_name: str) -> float | None:
    """None for a device whose peak is not on record."""
    return next((peak for name, peak in _PEAKS.items() if name in device_name), None)


def percentile(values: list[float], share: float) -> float | None:
    """Linear interpolation between the closest ranks; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass
class StepTimes:
    """Measured steps: milliseconds, rows and tokens of this rank, one entry per step."""

    step_ms: list[float] = field(default_factory=list)
    phase_ms: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PHASES})
    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def percentiles(self) -> dict[str, float | None]:
        return {f"p{int(100 * share)}": percentile(self.step_ms, share) for share in (0.2, 0.5, 0.8)}

    def phases(self) -> dict[str, float | None]:
        """Median per phase."""
        return {name: percentile(values, 0.5) for name, values in self.phase_ms.items()}

    def per_second(self, counts: list[int]) -> float | None:
        seconds = sum(self.step_ms) / 1e3
        return sum(counts) / seconds if seconds > 0 else None


class StepTimer:
    """`begin`, then `mark(phase)` at the end of each phase (again and again with gradient accumulation), then `end`."""

    def __init__(self, device: torch.device, warmup: int) -> None:
        self._cuda = device.type == "cuda"
        self._warmup = warmup
        self._seen = 0
        self._marks: list[tuple[str, Any]] = []
        self._pending: list[tuple[list[tuple[str, Any]], int, int]] = []
        self._times = StepTimes()

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        self._marks = [("", self._now())]

    def mark(self, phase: str) -> None:
        self._marks.append((phase, self._now()))

    def end(self, rows: int, tokens: int, *, count: bool = True) -> None:
        """Close the step. Steps of the warm-up are not counted, nor those with count=False."""
        self._seen += 1
        if count and self._seen > self._warmup:
            self._pending.append((self._marks, rows, tokens))
            if self._cuda and len(self._pending) > 64:
                self._resolve(len(self._pending) - 8)  # old enough that the device is done with them

    def _resolve(self, count: int) -> None:
        if self._cuda and count:
            self._pending[count - 1][0][-1][1].synchronize()
        for marks, rows, tokens in self._pending[:count]:
            phases = dict.fromkeys(PHASES, 0.0)
            for (_, before), (phase, after) in zip(marks, marks[1:], strict=False):
                phases[phase] += before.elapsed_time(after) if self._cuda else 1e3 * (after - before)
            for name, value in phases.items():
                self._times.phase_ms[name].append(value)
            first, last = marks[0][1], marks[-1][1]
            self._times.step_ms.append(first.elapsed_time(last) if self._cuda else 1e3 * (last - first))
            self._times.rows.append(rows)
            self._times.tokens.append(tokens)
        del self._pending[:count]

    def times(self) -> StepTimes:
        """Everything measured so far; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        self._resolve(len(self._pending))
        return self._times


@functools.cache
def _own_norm_kernels() -> frozenset[str]:
    """Names of the project's kernels that only normalise."""
    try:
        import triton

        package = importlib.import_module("recsys_norm.kernels.norm")
    except ImportError:
        return frozenset()
    modules = (importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__))
    kernels = (value for module in modules for value in vars(module).values())
    return frozenset(value.fn.__name__ for value in kernels if isinstance(value, triton.runtime.JITFunction))


def only_normalises(kernel: str) -> bool:
    """Whether a CUDA kernel of this name exists for a norm alone.

    Under torch.compile a norm is fused with the element-wise work beside it; such a kernel counts as a whole.
    """
    if kernel in _own_norm_kernels():
        return True
    return _NORM_KERNEL.search(kernel) is not None and _OTHER_KERNEL.search(kernel) is None


@dataclass
class KernelProfile:
    """norm_share: time in kernels that only normalise / time in all kernels. busy: share of the recorded time in which
    at least one kernel or copy ran. kernel_ms: time per kernel name and step."""

    norm_share: float | None
    busy: float | None
    kernel_ms: dict[str, float]


def kernel_profile(kernels: Iterable[tuple[str, float, float]], steps: int) -> KernelProfile:
    """From (name, start, duration) of everything that ran on the device, in microseconds, over whole steps."""
    spans = sorted((start, start + duration, name) for name, start, duration in kernels)
    if not spans:
        return KernelProfile(None, None, {})
    total = norm = covered = 0.0
    per_name: dict[str, float] = {}
    last = spans[0][0]
    for start, end, name in spans:
        total += end - start
        norm += (end - start) * only_normalises(name)
        covered += max(0.0, end - max(start, last))
        last = max(last, end)
        per_name[name] = per_name.get(name, 0.0) + (end - start) / 1e3 / steps
    per_name = dict(sorted(per_name.items(), key=lambda item: -item[1]))
    return KernelProfile(norm / total, covered / (last - spans[0][0]), per_name)


def device_events(profiler: torch.profiler.profile) -> list[tuple[str, float, float]]:
    """(name, start, duration) in microseconds of the kernels and copies of a finished recording."""
    from torch.autograd import DeviceType

    return [
        (event.name, float(event.time_range.start), float(event.time_range.elapsed_us()))
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


class StepRecorder:
    """Runs torch.profiler over `steps` steps of training after the `first` ones; `kernels` is what it found.

    On a CPU only where a `trace` (a file for a trace viewer) is wanted. `write`: whether this process writes it.
    """

    def __init__(self, device: torch.device, first: int, steps: int, trace: Path | None, *, write: bool) -> None:
        self._device, self._first, self._trace, self._write = device, first, trace, write
        self._steps = steps if device.type == "cuda" or trace is not None else 0
        self._profiler: torch.profiler.profile | None = None
        self.kernels: KernelProfile | None = None

    @property
    def active(self) -> bool:
        return self._profiler is not None

    def before(self, taken: int) -> None:
        """To be called before each step, with the number of steps taken."""
        if self._steps == 0 or taken != self._first:
            return
        cuda, activity = self._device.type == "cuda", torch.profiler.ProfilerActivity
        activities = ([activity.CUDA] if cuda else []) + ([activity.CPU] if self._trace is not None or not cuda else [])
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=self._steps)
        self._profiler = torch.profiler.profile(activities=activities, schedule=schedule)
        self._profiler.start()

    def after(self, taken: int, *, last: bool) -> None:
        """To be called after each step."""
        if self._profiler is None:
            return
        recorded = taken - self._first - 1  # the profiler's own first step does not count
        if recorded < self._steps and not last:
            self._profiler.step()
            return
        profiler, self._profiler = self._profiler, None
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        profiler.stop()
        if recorded < 1:
            return
        self.kernels = kernel_profile(device_events(profiler), recorded)
        if self._trace is not None and self._write:
            profiler.export_chrome_trace(str(self._trace))


def alternate(variants: dict[str, Any], pairs: int, device: torch.device, *, warmup: int = 3) -> dict[str, list[float]]:
    """Milliseconds of each call, the variants taking turns so that a drifting clock meets all of them alike."""
    for step in variants.values():
        for _ in range(warmup):
            step()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(pairs):
        for name, step in variants.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def norm_cost(times: dict[str, list[float]]) -> float:
    """1 - median without norms / median with norms."""
    return 1 - statistics.median(times["without"]) / statistics.median(times["with"])
