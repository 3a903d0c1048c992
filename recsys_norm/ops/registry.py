"""Which technique computes an op: registration, choice, fallback and the counts that a run reports.

Techniques of the kernel packages are found on the first call that needs them.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections import Counter

import torch

from recsys_norm.ops import choices
from recsys_norm.ops.problem import Problem, Technique

BACKENDS = ("unfused", "compiled", "naive", "fused")
ON_UNSUPPORTED = ("raise", "fallback")

# Kernel packages with a `techniques()` that lists (op, technique) pairs.
_KERNEL_PACKAGES = ("norm", "lazy", "postnorm", "deferred", "hopper", "flashnorm", "helion", "tlx")

# The order in which `fused` tries techniques where nothing near the problem was measured (`choices`), best first.
_ORDER: dict[str, tuple[str, ...]] = {
    "norm": ("separate",),
    "norm_linear": ("separate", "lazy", "naive"),
    "linear_norm": ("separate", "naive", "cluster", "two_kernel"),
    "linear_norm_linear": ("separate", "deferred", "naive"),
    "norm_attention": ("separate", "flashnorm"),
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
    _candidates_of.cache_clear()


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


def label(technique: Technique) -> str:
    """ "provider/name": the two together tell techniques of an op apart, and `technique=` takes either form."""
    return f"{technique.provider}/{technique.name}"


def _named(technique: Technique, wanted: str) -> bool:
    return wanted in (technique.name, label(technique))


def _rank(technique: Technique, problem: Problem, direction: str) -> int:
    if label(technique) == choices.preferred(problem, direction):
        return -1
    order = _ORDER.get(problem.op, ())
    return order.index(technique.name) if technique.name in order else len(order)


def _candidates(problem: Problem, direction: str) -> tuple[tuple[Technique, ...], tuple[str, ...]]:
    """Kernel techniques that can run the problem, best first, and the reasons of those that cannot."""
    return _candidates_of(problem.case, direction)


@functools.lru_cache(maxsize=4096)
def _candidates_of(problem: Problem, direction: str) -> tuple[tuple[Technique, ...], tuple[str, ...]]:
    able, reasons = [], []
    if problem.device != "cuda":
        return (), (f"its kernels need a CUDA device and the tensors are on {problem.device}",)
    kernels = [t for t in techniques(problem.op) if t.provider != "torch"]
    for technique in sorted(kernels, key=lambda t: _rank(t, problem, direction)):
        reason = _no_groups(technique, problem) or technique.why_not(problem)
        if reason is None:
            able.append(technique)
        else:
            reasons.append(f"{technique.name}: {reason}")
    reasons += [f"kernels.{name} could not be imported: {why}" for name, why in _missing.items()]
    return tuple(able), tuple(reasons) or (f"no kernel for {problem.op} is installed",)


def _no_groups(technique: Technique, problem: Problem) -> str | None:
    if problem.groups == 1 or getattr(technique, "takes_groups", False):
        return None
    return f"it normalises whole rows, not {problem.groups} groups of features; use technique='separate'"


def _plain(problem: Problem) -> Technique:
    return next(t for t in techniques(problem.op) if t.provider == "torch")


def choose(problem: Problem, direction: str = choices.FORWARD) -> Technique:
    """The technique that `backend="fused"` takes for a problem: the one measured fastest near it, if it can run.

    Raises:
        UnsupportedError: if no kernel can run it.
    """
    able, reasons = _candidates(problem, direction)
    if not able:
        raise _unsupported(problem, "backend 'fused'", "; ".join(reasons))
    return able[0]


def select(
    problem: Problem, backend: str, technique: str | None, on_unsupported: str, direction: str = choices.FORWARD
) -> Technique:
    """The technique that serves one call, counted.

    backend "fused" takes the best that can run, "naive" the one whose tile spans the whole row; `technique` forces one, by
    its name or as "provider/name". The backward is chosen by itself: what is saved suits all techniques of an op.
    If it cannot run, `on_unsupported="raise"` raises UnsupportedError, "fallback" takes the next one down
    (the separate norm kernel, then plain PyTorch), warns once per reason and counts it.
    """
    wanted = technique or ("naive" if backend == "naive" else None)
    able, _ = _candidates(problem, direction)
    chosen = next((t for t in able if wanted is None or _named(t, wanted)), None)
    if chosen is None and technique == "separate":
        chosen = _plain(problem)  # asked for by name, the plain PyTorch form is no fallback
    if chosen is None:
        asked = f"technique '{technique}'" if technique else f"backend '{backend}'"
        why = _why_not(problem, wanted)
        if on_unsupported == "raise":
            raise _unsupported(problem, asked, why)
        chosen = next((t for t in able if t.name == "separate"), None) or _plain(problem)
        _note_fallback(f"{problem.op}: {asked} cannot run: {why}; {chosen.name} ({chosen.provider}) serves it")
    count(problem.op, chosen.name if chosen.provider == "triton" else f"{chosen.name} ({chosen.provider})")
    return chosen


def _why_not(problem: Problem, wanted: str | None) -> str:
    _, reasons = _candidates(problem, choices.FORWARD)
    if wanted is None or problem.device != "cuda":
        return "; ".join(reasons)
    if not any(_named(t, wanted) for t in techniques(problem.op)):
        known = sorted({t.name for t in techniques(problem.op)})
        return f"this op has no technique of that name; it has {', '.join(known)}"
    prefix = f"{wanted.rpartition('/')[2]}: "
    return "; ".join(r.removeprefix(prefix) for r in reasons if r.startswith(prefix))


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
    """Begin `counts()` and `fallbacks()` anew."""
    _counts.clear()
    _fallbacks.clear()
