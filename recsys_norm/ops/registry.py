"""Which technique computes an op: registration, choice, fallback and the counts that a run reports.

Techniques of the kernel packages are found on the first call that needs them.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections import Counter

import torch

from recsys_norm.ops.problem import Problem, Technique

BACKENDS = ("unfused", "compiled", "naive", "fused")
ON_UNSUPPORTED = ("raise", "fallback")

# Kernel packages with a `techniques()` that lists (op, technique) pairs.
_KERNEL_PACKAGES = ("norm", "lazy", "postnorm", "deferred")

# The order in which `fused` tries techniques, best first.
_ORDER: dict[str, tuple[str, ...]] = {
    "norm": ("separate",),
    "norm_linear": ("separate", "lazy", "naive"),
    "linear_norm": ("separate", "naive", "cluster", "two_kernel"),
    "linear_norm_linear": ("separate", "deferred", "naive"),
    "norm_attention": ("flashnorm", "separate"),
}

_techniques: dict[str, list[Technique]] = {}
_missing: dict[str, str] = {}  # kernel package -> why it could not be imported
_counts: dict[str, Counter[str]] = {}
_fallbacks: Counter[str] = Counter()


class UnsupportedError(NotImplementedError):
    """A backend or technique was asked for that cannot compute this problem. The message names the limit and a way out."""


def register(op: str, technique: Technique) -> None:
    """Add a technique to an op. One of the same name and provider is replaced."""
    known = _techniques.setdefault(op, [])
    known[:] = [t for t in known if (t.name, t.provider) != (technique.name, technique.provider)]
    known.append(technique)
    _candidates.cache_clear()


def techniques(op: str) -> list[Technique]:
    """All techniques registered for an op."""
    _load()
    return list(_techniques.get(op, ()))


@functools.cache
def _load() -> None:
    from recsys_norm.ops import torch_separate

    for op, technique in torch_separate.techniques():
        register(op, technique)
    for name in _KERNEL_PACKAGES:
        try:
            package = importlib.import_module(f"recsys_norm.kernels.{name}")
        except ImportError as error:
            _missing[name] = str(error)
            continue
        for op, technique in package.techniques():
            register(op, technique)


def _rank(op: str, technique: Technique) -> int:
    order = _ORDER.get(op, ())
    return order.index(technique.name) if technique.name in order else len(order)


@functools.lru_cache(maxsize=4096)
def _candidates(problem: Problem) -> tuple[tuple[Technique, ...], tuple[str, ...]]:
    """Kernel techniques that can run the problem, best first, and the reasons of those that cannot."""
    able, reasons = [], []
    if problem.device != "cuda":
        return (), (f"its kernels need a CUDA device and the tensors are on {problem.device}",)
    kernels = [t for t in techniques(problem.op) if t.provider != "torch"]
    for technique in sorted(kernels, key=lambda t: _rank(problem.op, t)):
        reason = technique.why_not(problem)
        if reason is None:
            able.append(technique)
        else:
            reasons.append(f"{technique.name}: {reason}")
    reasons += [f"kernels.{name} could not be imported: {why}" for name, why in _missing.items()]
    return tuple(able), tuple(reasons) or (f"no kernel for {problem.op} is installed",)


def _plain(problem: Problem) -> Technique:
    return next(t for t in techniques(problem.op) if t.provider == "torch")


def choose(problem: Problem) -> Technique:
    """The technique that `backend="fused"` takes for a problem.

    Raises:
        UnsupportedError: if no kernel can run it.
    """
    able, reasons = _candidates(problem)
    if not able:
        raise _unsupported(problem, "backend 'fused'", "; ".join(reasons))
    return able[0]


def select(problem: Problem, backend: str, technique: str | None, on_unsupported: str) -> Technique:
    """The technique that serves one call, counted.

    backend "fused" takes the best that can run, "naive" the one whose tile spans the whole row; `technique` forces one.
    If it cannot run, `on_unsupported="raise"` raises UnsupportedError, "fallback" takes the next one down
    (the separate norm kernel, then plain PyTorch), warns once per reason and counts it.
    """
    wanted = technique or ("naive" if backend == "naive" else None)
    able, _ = _candidates(problem)
    chosen = next((t for t in able if wanted in (None, t.name)), None)
    if chosen is None and technique == "separate":
        chosen = _plain(problem)  # asked for by name, the plain PyTorch form is no fallback
    if chosen is None:
        label = f"technique '{technique}'" if technique else f"backend '{backend}'"
        why = _why_not(problem, wanted)
        if on_unsupported == "raise":
            raise _unsupported(problem, label, why)
        chosen = next((t for t in able if t.name == "separate"), None) or _plain(problem)
        _note_fallback(f"{problem.op}: {label} cannot run: {why}; {chosen.name} ({chosen.provider}) serves it")
    count(problem.op, chosen.name if chosen.provider != "torch" else f"{chosen.name} (torch)")
    return chosen


def _why_not(problem: Problem, wanted: str | None) -> str:
    able, reasons = _candidates(problem)
    if wanted is None or problem.device != "cuda":
        return "; ".join(reasons)
    known = sorted({t.name for t in techniques(problem.op)})
    if wanted not in known:
        return f"this op has no technique of that name; it has {', '.join(known)}"
    return "; ".join(r.removeprefix(f"{wanted}: ") for r in reasons if r.startswith(f"{wanted}: "))


def _unsupported(problem: Problem, label: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{problem.op}: {label} cannot run this problem (M={problem.M}, K={problem.K}, N={problem.N}, "
        f"dtype={str(problem.dtype).removeprefix('torch.')}): {why}. "
        "Use backend='unfused' or 'compiled', or on_unsupported='fallback' to take the next one down."
    )


def _note_fallback(reason: str) -> None:
    if reason not in _fallbacks:
        warnings.warn(reason, stacklevel=2)
    _fallbacks[reason] += 1


@torch.compiler.assume_constant_result
def count(op: str, technique: str) -> int:
    """Count one call. Inside a compiled graph the count is per traced call, since the graph holds no Python."""
    _counts.setdefault(op, Counter())[technique] += 1
    return 0


def counts() -> dict[str, dict[str, int]]:
    """Calls per op and technique since the last reset; plain PyTorch techniques carry "(torch)"."""
    return {op: dict(c) for op, c in _counts.items()}


def fallbacks() -> dict[str, int]:
    """Calls that fell back, per reason, since the last reset."""
    return dict(_fallbacks)


def reset_counts() -> None:
    _counts.clear()
    _fallbacks.clear()
