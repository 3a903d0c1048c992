"""`python -m recsys_norm.bench ops`: every backend and technique of the GEMM ops, beside cuBLAS and a compiled norm.

`recsys_norm.bench.processes` runs this in fresh processes and merges their records. Only what agrees with the fp64
reference is timed: the first process checks every candidate on every case. All candidates are launched a few times; those
near the fastest then get the full number of launches, and the two baselines with them. Reported are medians over the
processes' medians; `hidden_lo` and `hidden_hi` are the extremes over processes.

    hidden   = (t_gemm + t_norm - t) / t_norm       the share of the norm's own time that is gone
    roofline = max(least bytes / copy bandwidth, FLOPs / matrix rate) / t
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from recsys_norm import ops, reference
from recsys_norm.bench.cases import GRID, Case, gemms, norm_alone
from recsys_norm.bench.timing import Stopwatch, percentile
from recsys_norm.ops import registry
from recsys_norm.testing import CAP, TINY, relative_error

# Ceilings measured on an H200: a large device copy and an 8192^3 bf16 product.
COPY_BYTES_PER_S = 4.27e12
MATRIX_FLOPS_PER_S = 790e12
SCREENING = 5  # launches of every candidate
NEAR = 1.15  # of the fastest's time: who gets the full number of launches
PLAIN = ("unfused", "compiled", "fused")


def default_cases(M: int, op: str, norms: list[str], shapes: list[tuple[int, int]]) -> list[Case]:
    return [Case(op, norm, M, K, N) for K, N in shapes for norm in norms]


def candidates(case: Case, wanted: list[str] | None = None) -> dict[str, dict]:
    """Arguments of each run of the op by its label: the plain backends, every technique (or those wanted, as
    "provider/name"), and what `fused` chooses."""
    labels = {"unfused": {"backend": "unfused"}, "compiled": {"backend": "compiled"}}
    for technique in registry.techniques(case.op):
        if technique.provider != "torch" and (wanted is None or registry.label(technique) in wanted):
            labels[registry.label(technique)] = {"backend": "fused", "technique": registry.label(technique)}
    return labels | {"fused": {"backend": "fused"}}


def same_backward(op: str, label: str) -> str | None:
    """The technique whose backward this one takes over as it is."""
    found = next((t for t in registry.techniques(op) if registry.label(t) == label), None)
    return getattr(found, "backward_of", None)


class Subject:
    """One candidate on one case: forward, backward and both as callables on the same tensors."""

    def __init__(self, case: Case, tensors: dict, arguments: dict, grads: list | None):
        self._case, self._function = case, getattr(ops, case.op)
        self._tensors, self._arguments = tensors, case.options() | arguments
        self._wanted = [t for t in tensors.values() if t is not None]
        self.outputs = self.forward()
        self.grads = grads or [torch.randn_like(o) for o in self.outputs]

    def forward(self) -> tuple:
        out = self._function(**self._tensors, **self._arguments)
        return out if isinstance(out, tuple) else (out,)

    def backward(self) -> tuple:
        return torch.autograd.grad(self.outputs, self._wanted, self.grads, retain_graph=True)

    def both(self) -> tuple:
        return torch.autograd.grad(self.forward(), self._wanted, self.grads)

    def technique(self, direction: str) -> str | None:
        """The technique that serves a direction ("both": the backward's), or the plain backend's name."""
        registry.reset_counts()
        getattr(self, direction)()
        served = next(reversed(registry.counts().get(self._case.op, {})), None)
        if served is None or served in PLAIN:
            return served
        name, _, provider = served.rstrip(")").partition(" (")  # as registry.counts has it
        return f"{provider or 'triton'}/{name}"


class Truth:
    """What a case should give, in fp64; gradients are computed when they are first asked for."""

    def __init__(self, case: Case, tensors: dict, grads: list):
        self._case = case
        double = {n: None if t is None else t.detach().double().requires_grad_() for n, t in tensors.items()}
        self._wanted = [t for t in double.values() if t is not None]
        outputs = getattr(reference, case.op)(**double, **case.options())
        self._outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        self._cotangents = grads
        self._grads: tuple | None = None

    def errors(self, subject: Subject, direction: str) -> list[float]:
        """Relative errors of what a direction computes."""
        pairs = []
        if direction != "backward":
            pairs += [(a, r, True) for a, r in zip(subject.outputs, self._outputs)]
        if direction != "forward":
            if self._grads is None:
                self._grads = torch.autograd.grad(self._outputs, self._wanted, [g.double() for g in self._cotangents])
            by_row = [t.shape[0] == self._case.M for t in self._wanted]
            pairs += list(zip(subject.backward(), self._grads, by_row))
        return [relative_error(a, r, rows=rows) for a, r, rows in pairs]


Verdict = dict  # rel_err, rel_err_unfused, and skipped: why a candidate gets no time


def check_case(case: Case, directions: list[str], wanted: list[str] | None = None) -> dict[str, dict[str, Verdict]]:
    """Verdicts by candidate and direction."""
    tensors, subjects, grads = case.tensors(), {}, None
    verdicts: dict[str, dict[str, Verdict]] = {}
    for label, arguments in candidates(case, wanted).items():
        try:
            subjects[label] = Subject(case, tensors, arguments, grads)
        except Exception as error:  # a kernel that fails must not cost the measurements of the others
            why = str(error) if isinstance(error, ops.UnsupportedError) else f"{type(error).__name__}: {error}"
            verdicts[label] = {d: {"skipped": why} for d in directions}
            continue
        grads = subjects[label].grads
    truth = Truth(case, tensors, grads)
    for direction in directions:
        unfused = truth.errors(subjects["unfused"], direction)
        allowed = [2 * min(e, CAP[case.dtype]) + TINY[case.dtype] for e in unfused]
        for label, subject in subjects.items():
            verdicts.setdefault(label, {})[direction] = verdict = {"rel_err_unfused": max(unfused), "skipped": None}
            if direction == "backward" and (same := same_backward(case.op, label)):
                verdict["skipped"] = f"its backward is that of {same}"
                continue
            try:
                found = truth.errors(subject, direction)
            except Exception as error:
                verdict["skipped"] = f"{type(error).__name__}: {error}"
                continue
            verdict["rel_err"] = max(found) if math.isfinite(max(found)) else None
            if not all(e <= a for e, a in zip(found, allowed)):
                verdict["skipped"] = "wrong result"
    return verdicts


def compile_case(case: Case, directions: list[str], wanted: list[str] | None = None) -> None:
    """Run what is compiled at its first call: torch.compile's candidates, and the techniques wanted ([]: none)."""
    tensors, grads = case.tensors(), None
    for label, arguments in candidates(case, wanted).items():
        if label != "compiled" and (wanted == [] or label in PLAIN):
            continue
        try:
            subject = Subject(case, tensors, arguments, grads)
            grads = subject.grads
            if label == "compiled" or same_backward(case.op, label) is None:
                subject.backward()
        except Exception as error:  # what it means for the candidate is for check_case to say
            if not isinstance(error, ops.UnsupportedError):
                print(f"{case}, {label}: {type(error).__name__}: {error}", file=sys.stderr)
    for direction in directions:
        norm_alone(case, tensors, direction)()


def time_case(
    case: Case, directions: list[str], verdicts: dict, launches: int, watch: Stopwatch, wanted: list[str] | None = None
) -> Iterator[dict]:
    """Records of one case in this process."""
    tensors, subjects, grads = case.tensors(), {}, None
    for label, arguments in candidates(case, wanted).items():
        if any(v["skipped"] is None for v in verdicts.get(label, {}).values()):
            subjects[label] = Subject(case, tensors, arguments, grads)
            grads = subjects[label].grads
    if not subjects:
        return
    for direction in directions:
        right = [label for label in subjects if verdicts[label][direction]["skipped"] is None]
        functions = {label: getattr(subjects[label], direction) for label in right}
        functions |= {"gemm": gemms(case, tensors, direction), "norm": norm_alone(case, tensors, direction)}
        times = time_near_best(functions, launches, watch, always=("gemm", "norm", "compiled", "fused"))
        for label, found in verdicts.items():
            fields = {**found[direction], "times": rounded(times.get(label))}
            if label in right:
                fields["technique"] = subjects[label].technique(direction)
            alone = {f"{name}_times": rounded(times[name]) for name in ("gemm", "norm")}
            yield record(case, direction, label, **alone, **fields)


def rounded(times: list[float] | None) -> list[float] | None:
    return None if times is None else [round(ms, 5) for ms in times]


def time_near_best(functions: dict, launches: int, watch: Stopwatch, always: tuple[str, ...] = ()) -> dict:
    """Times by name: a few launches of all, the rest of `launches` of those within NEAR of the fastest and of `always`.
    What leaves out the norm ("gemm") or the GEMM ("norm") is no competitor."""
    few = min(SCREENING, launches)
    times = watch.time(functions, few)
    medians = {name: statistics.median(t) for name, t in times.items()}
    best = min((ms for name, ms in medians.items() if name not in ("gemm", "norm")), default=0.0)
    near = {name: f for name, f in functions.items() if name in always or medians[name] <= NEAR * best}
    if launches > few:
        for name, more in watch.time(near, launches - few, warmup=1).items():
            times[name] += more
    return times


def record(case: Case, direction: str, label: str, **fields) -> dict:
    return {
        "op": case.op,
        "direction": direction,
        "norm": case.norm,
        "affine": case.affine,
        "bias": case.bias,
        "residual": case.residual,
        "activation": case.activation,
        "M": case.M,
        "K": case.K,
        "N": case.N,
        "N2": case.N2,
        "dtype": str(case.dtype).removeprefix("torch."),
        "backend": label,
        **fields,
    }


KEY = ("op", "direction", "norm", "affine", "bias", "residual", "activation", "M", "K", "N", "N2", "dtype", "backend")


def merge(runs: list[list[dict]]) -> list[dict]:
    """One record per case, direction and candidate from the records of several runs."""
    grouped: dict[tuple, list[dict]] = {}
    for run in runs:
        for r in run:
            grouped.setdefault(tuple(r[k] for k in KEY), []).append(r)
    return [_merge_one(dict(zip(KEY, key)), group) for key, group in grouped.items()]


def _merge_one(merged: dict, group: list[dict]) -> dict:
    first = group[0]
    merged |= {k: first.get(k) for k in ("rel_err", "rel_err_unfused", "skipped")}
    merged["technique"] = next((r["technique"] for r in reversed(group) if r.get("technique")), None)
    timed = [r for r in group if r.get("times")]
    if len(timed) < len(group) or not timed:
        return merged | {"ms": None, "skipped": merged["skipped"] or "wrong result in one run"}
    medians = [statistics.median(r["times"]) for r in timed]
    gemm = [statistics.median(r["gemm_times"]) for r in timed]
    norm = [statistics.median(r["norm_times"]) for r in timed]
    everything = [t for r in timed for t in r["times"]]
    hidden = [(g + n - t) / n for g, n, t in zip(gemm, norm, medians)]
    case = Case(
        **{k: merged[k] for k in ("op", "norm", "M", "K", "N", "affine", "bias", "residual", "activation")},
        dtype=getattr(torch, merged["dtype"]),
    )
    flops = case.gemm_flops() * {"forward": 1, "backward": 2, "both": 3}[merged["direction"]]
    floor = max(case.least_bytes(merged["direction"]) / COPY_BYTES_PER_S, flops / MATRIX_FLOPS_PER_S)
    ms, gemm_ms, norm_ms = statistics.median(medians), statistics.median(gemm), statistics.median(norm)
    return merged | {
        "ms": ms,
        "ms_p20": percentile(everything, 0.2),
        "ms_p80": percentile(everything, 0.8),
        "gemm_ms": gemm_ms,
        "norm_ms": norm_ms,
        "hidden": (gemm_ms + norm_ms - ms) / norm_ms,
        "hidden_lo": min(hidden),
        "hidden_hi": max(hidden),
        "roofline": 1e3 * floor / ms,
        "launches": len(everything),
        "processes": len(timed),
    }


def add_errors_of_fused(records: list[dict]) -> None:
    """Give what `fused` chose the error of that technique's own record: the check may have run with another choice."""
    by_label = {tuple(r[k] for k in KEY): r for r in records}
    for r in records:
        if r["backend"] == "fused" and r["technique"] is not None:
            own = by_label.get((*(r[k] for k in KEY[:-1]), r["technique"]))
            if own is not None and own.get("rel_err") is not None:
                r["rel_err"] = own["rel_err"]


def add_compiled(records: list[dict]) -> None:
    """Put the compiled backend's time beside every record of its case."""
    case = KEY[:-1]
    compiled = {tuple(r[k] for k in case): r["ms"] for r in records if r["backend"] == "compiled"}
    for r in records:
        r["compiled_ms"] = compiled.get(tuple(r[k] for k in case))


FLOOR = "triton/separate"
MARGIN = 0.98  # a technique is chosen over the floor if it takes less than this share of its time


def winners(records: list[dict]) -> list[dict]:
    """Rows of the table that `fused` chooses by (`recsys_norm.ops.choices`): the fastest right technique of each case."""
    rows: dict[tuple, dict[str, dict]] = {}
    for r in records:
        if r["ms"] is not None and "/" in r["backend"] and r["direction"] != "both":
            rows.setdefault(tuple(r[k] for k in KEY[:-1]), {})[r["backend"]] = r
    chosen = []
    for row in rows.values():
        best = min(row.values(), key=lambda r: r["ms"])
        floor = row.get(FLOOR)
        if floor is not None and best["ms"] > MARGIN * floor["ms"]:
            best = floor
        fields = {k: best[k] for k in ("op", "norm", "direction", "M", "K", "N", "N2")}
        floor_ms = None if floor is None else round(floor["ms"], 4)
        chosen.append({**fields, "technique": best["backend"], "ms": round(best["ms"], 4), "separate_ms": floor_ms})
    return chosen


def table(records: list[dict]) -> str:
    """Plain text, a line per case and direction, a column per candidate."""
    labels = list(dict.fromkeys(r["backend"] for r in records))
    head = f"{'op':18} {'norm':5} {'dir':8} {'M':>8} {'K':>5} {'N':>5} {'gemm':>7} {'norm':>7} "
    lines = [head + " ".join(f"{label.removeprefix('triton/'):>14}" for label in labels) + "   fused hidden"]
    rows: dict[tuple, dict[str, dict]] = {}
    for r in records:
        rows.setdefault(tuple(r[k] for k in KEY[:-1]), {})[r["backend"]] = r
    for row in rows.values():
        r = next((r for r in row.values() if r["ms"]), next(iter(row.values())))
        line = f"{r['op']:18} {r['norm']:5} {r['direction']:8} {r['M']:8} {r['K']:5} {r['N']:5} "
        line += f"{r.get('gemm_ms', 0):7.3f} {r.get('norm_ms', 0):7.3f} "
        for label in labels:
            ms = row.get(label, {}).get("ms")
            line += f"{ms:14.3f} " if ms else f"{'-':>14} "
        fused = row.get("fused", {})
        line += (
            f"  {fused['hidden']:5.0%} [{fused['hidden_lo']:.0%}, {fused['hidden_hi']:.0%}] " if fused.get("ms") else ""
        )
        lines.append(line + (fused.get("technique") or ""))
    return "\n".join(lines)


def write(result: dict, folder: Path, name: str) -> None:
    """JSON, CSV and a plot."""
    import csv

    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1))
    columns = list(dict.fromkeys(k for r in result["records"] for k in r))
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(result["records"])
    from recsys_norm.bench.plot import plot_ops

    plot_ops(result, folder / f"{name}.png")


def shapes_of(text: str) -> list[tuple[int, int]]:
    if text == "grid":
        return GRID
    return [tuple(int(n) for n in pair.split("x")) for pair in text.split(",")]
