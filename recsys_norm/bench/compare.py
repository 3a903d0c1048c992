"""Finished runs side by side: which are alike, whether their loss curves agree, who is how much faster.

Runs are alike, and form a group, where everything but the backend and the attention is the same: configuration, device,
number of processes, batch, seed. A path is a backend with an attention; runs of the same path are repetitions, and the
medians over them count. A run whose batches had their rows permuted (`trainer.row_order`) is a control.

Loss curves agree if mean_t |path_t - reference_t| <= 2 * mean_t |control_t - reference_t| over at most 300 steps, where
the reference is the unfused path and the control the same path with another order of summation; less than a unit in the
last place of an fp32 loss is no difference. A path that does not agree, that started from other weights or saw other
batches, is marked and not ranked. Speeds are those of the median step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recsys_norm.bench.compare_runs import Run, median

CURVE_STEPS = 300
TOLERANCE = 2.0
_STEADY = 1.5  # p80 / p20 of step times from which on the reader is warned
_LAST_PLACE = 2.0**-24  # of an fp32 number in [0.5, 1)
_BACKENDS = ("unfused", "compiled", "naive", "fused")
_IDENTITY = ("model", "data", "device", "world_size", "dtype", "batch", "seed")
# Settings that may differ between runs that are alike: the paths themselves, and what does not change a step.
_FREE = ("backend", "attention", "compare", "logger", "trainer.row_order", "trainer.test", "trainer.on_unsupported",
         "trainer.measure_norm_cost", "trainer.norm_cost_steps", "trainer.profile_steps",
         "trainer.profile_trace")  # fmt: skip
_NUMBERS = ("examples_per_s", "tokens_per_s", "norm_cost", "norm_share", "busy", "mfu", "peak_mem_bytes",
            "activation_mem_bytes", "loss", "ne", "auc", "gauc", "calibration")  # fmt: skip


def compare(runs: Sequence[Run]) -> dict[str, Any]:
    """The content of comparison.json: {"groups": [{"title", "settings", "env", "reference", "control", "paths",
    "notes"}, ..]}; a group's paths are in the order of their backends."""
    groups: dict[tuple, list[Run]] = {}
    known = [run for run in runs if run.summary is not None]
    for run in known:
        groups.setdefault(_key(run), []).append(run)
    for run in runs:
        if run.summary is None:
            groups.setdefault(_key_of_failed(run, groups), []).append(run)
    kept = [members for members in groups.values() if not all(run.control for run in members)]
    differing = _differing([members[0] for members in kept])
    return {"groups": [_group(members, differing) for members in kept]}


def _key(run: Run) -> tuple:
    gpu = (run.summary.get("env") or {}).get("gpu")
    facts = tuple(run.summary.get(name) for name in _IDENTITY)
    return gpu, facts, _settings(run)


def _settings(run: Run) -> tuple:
    def free(key: str) -> bool:
        return any(key == name or key.startswith(f"{name}.") for name in _FREE)

    set_ones = ((key, value) for key, value in run.config.items() if value is not None)  # null is as good as not there
    return tuple(sorted((key, repr(value)) for key, value in set_ones if not free(key)))


def _key_of_failed(run: Run, groups: dict[tuple, list[Run]]) -> tuple:
    """That of the finished runs with its configuration, from the same folder where there are several."""
    alike = [key for key in groups if key[-1] == _settings(run)]
    near = [key for key in alike if any(Path(r.folder).parent == Path(run.folder).parent for r in groups[key])]
    return next(iter(near or alike), (None, (), _settings(run)))


def _differing(runs: Sequence[Run]) -> list[str]:
    """Settings, by dotted key, in which the groups differ."""
    keys = sorted({key for run in runs for key, _ in _settings(run)})
    return [key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1]


def _group(runs: Sequence[Run], differing: Sequence[str]) -> dict[str, Any]:
    controls = [run for run in runs if run.control and run.summary is not None and run.losses]
    repeated: dict[tuple, list[Run]] = {}
    for run in runs:
        if not run.control:
            repeated.setdefault(run.path, []).append(run)
    order = sorted(repeated, key=_order)
    paths = [_path(repeated[path]) for path in order]
    first = {path: next((r for r in repeated[path] if r.losses), None) for path in order}
    reference = next((path for path in order if first[path] is not None), None)
    group = {
        "title": _title(runs),
        "settings": {key: runs[0].config.get(key) for key in differing},
        "env": next((run.summary["env"] for run in runs if run.summary and run.summary.get("env")), {}),
        "reference": None if reference is None else name_of(reference),
        "control": None,
        "paths": paths,
        "curves": {entry["path"]: first[path].losses for entry, path in zip(paths, order) if first[path] is not None},
    }
    if reference is not None:
        group["control"] = _control(first[reference], controls)
        for entry, path in zip(paths, order):
            entry["curve"] = _curve(first[path], first[reference], group["control"]) if first[path] else None
    for entry, path in zip(paths, order):
        entry["start"] = _alike(repeated[path], first.get(reference)) if reference else None
        entry["status"] = _status(entry)
    _gains(paths)
    group["notes"] = _notes(group, [run for run in runs if run.control])
    return group


def _order(path: tuple[str, bool, str]) -> tuple:
    backend, extra, attention = path
    known = _BACKENDS.index(backend) if backend in _BACKENDS else len(_BACKENDS)
    return attention == "eager", known, extra


def name_of(path: tuple[str, bool, str]) -> str:
    backend, extra, attention = path
    return backend + ("+compile" if extra else "") + ("" if attention == "fused" else f", {attention} attention")


def _title(runs: Sequence[Run]) -> str:
    run = next((run for run in runs if run.summary is not None), None)
    if run is None:
        return f"{runs[0].of('model')}, no run finished"
    summary = run.summary
    env, size = summary.get("env") or {}, summary.get("world_size", 1)
    device = env.get("gpu") or str(summary.get("device", "")).upper()
    device = f"{size} x {device}" if size and size > 1 else device
    rows = f"{summary['batch']:,} rows a step"
    parts = (f"{summary['model']} on {summary['data']}", device, summary["dtype"], rows, f"seed {summary['seed']}")
    return ", ".join(parts)


def _path(runs: Sequence[Run]) -> dict[str, Any]:
    """The record of a path: medians over its runs."""
    done = [run.summary for run in runs if run.summary is not None]
    backend, extra, attention = runs[0].path
    entry: dict[str, Any] = {
        "path": name_of(runs[0].path),
        "backend": backend,
        "compile": extra or backend == "compiled",
        "attention": attention,
        "runs": len(done),
        "folders": [run.folder for run in runs],
        "error": next((run.error for run in runs if run.error), None),
    }
    for name in _NUMBERS:
        entry[name] = median(summary.get(name) for summary in done)
    entry["examples_per_s_mean"] = entry["examples_per_s"]
    for name, parts in (("step_ms", ("p20", "p50", "p80")), ("phase_ms", ("data", "forward", "backward", "optimizer"))):
        entry[name] = {part: median((summary.get(name) or {}).get(part) for summary in done) for part in parts}
    if entry["step_ms"]["p50"]:  # one interrupted step does not move the median
        rows = median(summary["batch"] for summary in done)
        entry["examples_per_s"] = rows * 1e3 / entry["step_ms"]["p50"]
    entry["step_ms_of_runs"] = [(summary.get("step_ms") or {}).get("p50") for summary in done]
    for name in ("compile_s", "tune_s"):  # the first run pays, the others find what it left in the caches
        known = [summary[name] for summary in done if summary.get(name) is not None]
        entry[name] = max(known, default=None)
    for name in ("steps", "measured_steps", "techniques", "fallbacks", "split", "bayes_auc"):
        entry[name] = done[0].get(name) if done else None
    fallbacks, calls = _total(entry["fallbacks"]), sum(map(_total, (entry["techniques"] or {}).values()))
    entry["fallback_share"] = fallbacks / calls if calls else None
    entry["clocks"] = next((run.clocks for run in runs if run.clocks), None)
    cost, step = entry["norm_cost"], entry["step_ms"]["p50"]
    entry["norm_ms"] = None if cost is None or step is None else cost * step
    return entry


def _total(counts: dict[str, int] | None) -> int:
    return sum((counts or {}).values())


def difference(a: Sequence[float], b: Sequence[float]) -> tuple[float | None, int]:
    """(mean over the common first steps, at most 300, of |a_t - b_t|, the number of those steps)."""
    pairs = list(zip(a, b))[:CURVE_STEPS]
    if not pairs:
        return None, 0
    return sum(abs(x - y) if x is not None and y is not None else float("inf") for x, y in pairs) / len(pairs), len(
        pairs
    )


def _control(reference: Run, controls: Sequence[Run]) -> dict[str, Any] | None:
    """How far the reference is from itself with another order of summation; the mean over the controls."""
    controls = [run for run in controls if run.path == reference.path]
    values = [difference(run.losses, reference.losses) for run in controls]
    if not values:
        return None
    mean = sum(value for value, _ in values) / len(values)
    curves = [run.losses[:CURVE_STEPS] for run in controls]
    return {"runs": len(values), "steps": values[0][1], "mean_abs_difference": mean, "curves": curves,
            "folders": [run.folder for run in controls]}  # fmt: skip


def _curve(run: Run, reference: Run, control: dict[str, Any] | None) -> dict[str, Any]:
    value, steps = difference(run.losses, reference.losses)
    limit = None if control is None else max(TOLERANCE * control["mean_abs_difference"], _LAST_PLACE)
    whole = len(run.losses) == len(reference.losses)
    agrees = True if run is reference else None if limit is None else value is not None and whole and value <= limit
    return {
        "mean_abs_difference": value,
        "limit": limit,
        "steps": steps,
        "agrees": agrees,
        "reference": run is reference,
    }


def _alike(runs: Sequence[Run], reference: Run | None) -> dict[str, bool | None]:
    """Whether all runs started from the reference's weights and saw its batches; None where they do not say."""

    def same(name: str) -> bool | None:
        starts = [
            ((run.summary or {}).get("start") or {}).get(name) for run in (*runs, reference) if run and run.summary
        ]
        return None if None in starts or len(starts) < 2 else len(set(starts)) == 1

    return {"weights": same("weights"), "batches": same("batches")}


def _status(entry: dict[str, Any]) -> str:
    if entry["runs"] == 0:
        return "failed"
    if entry["start"] and False in entry["start"].values():
        return "not comparable"
    curve = entry.get("curve")
    if curve is not None and curve["agrees"] is False:
        return "diverged"
    return "agrees" if curve is not None and curve["agrees"] else "not judged"


def _gains(paths: Sequence[dict[str, Any]]) -> None:
    """Ratios of examples/s. norms, compiled: over unfused and over compiled with the same attention. attention: over
    the same backend with eager attention. rank: 1 is the fastest; None for a path that is not ranked."""
    ranked = [entry for entry in paths if entry["status"] in ("agrees", "not judged") and entry["examples_per_s"]]
    speed = {(e["backend"], e["compile"], e["attention"]): e["examples_per_s"] for e in ranked}
    for entry in paths:
        mine, attention = entry["examples_per_s"], entry["attention"]

        def over(*key: Any, mine=mine, entry=entry) -> float | None:
            return mine / speed[key] if entry in ranked and key in speed else None

        eager = over(entry["backend"], entry["compile"], "eager") if attention != "eager" else None
        entry["gain"] = {
            "norms": over("unfused", False, attention),
            "compiled": over("compiled", True, attention),
            "attention": eager,
        }
        entry["rank"] = None
    for place, entry in enumerate(sorted(ranked, key=lambda e: -e["examples_per_s"]), 1):
        entry["rank"] = place


def _notes(group: dict[str, Any], controls: Sequence[Run]) -> list[str]:
    """What a reader has to know before the numbers, one sentence each."""
    notes = []
    for entry in group["paths"]:
        name = entry["path"]
        if entry["error"]:
            notes.append(f"{name} failed: {entry['error']}")
        for what, same in (entry["start"] or {}).items():
            if same is False:
                there = "started from other initial weights" if what == "weights" else "saw other batches"
                notes.append(f"{name} {there} than {group['reference']}: it is not ranked")
        if entry["status"] == "diverged":
            curve = entry["curve"]
            if curve["mean_abs_difference"] <= curve["limit"]:
                notes.append(
                    f"{name} made other steps than {group['reference']} ({curve['steps']} in common): not ranked"
                )
            else:
                notes.append(
                    f"{name} diverges from {group['reference']}: its losses differ by "
                    f"{curve['mean_abs_difference']:.2g} on average over {curve['steps']} steps, and "
                    f"{curve['limit']:.2g} is allowed; it is not ranked"
                )
        if entry["fallbacks"]:
            notes.append(_fallback_note(name, entry))
    notes += [f"the control run failed: {run.error}" for run in controls if run.error and run.summary is None]
    if unsteady := [e["path"] for e in group["paths"] if e["rank"] and _unsteady(e["step_ms"])]:
        notes.append(
            f"step times of {', '.join(unsteady)} scatter (p80 above {_STEADY} x p20): something else may have used "
            "this machine; compare.rounds=3 alternates the paths three times"
        )
    if group["control"] is None and len(group["paths"]) > 1:
        notes.append("loss curves are not judged: no control run (compare.controls=1 makes one)")
    return notes


def _fallback_note(name: str, entry: dict[str, Any]) -> str:
    """Which ops another technique served than the backend's own, and why."""
    told = "; ".join(f"{why} ({', '.join(ops)})" for why, ops in why_fallback(entry).items())
    share = entry["fallback_share"]
    calls = f"{_total(entry['fallbacks']):,} calls" + ("" if share is None else f" ({min(share, 1):.0%})")
    return (
        f"{name} is a fallback here, {calls}: {told}" if is_fallback(entry) else f"{name} fell back in {calls}: {told}"
    )


def _unsteady(step_ms: dict[str, float | None]) -> bool:
    return step_ms["p20"] is not None and step_ms["p80"] > _STEADY * step_ms["p20"]


def why_fallback(entry: dict[str, Any]) -> dict[str, list[str]]:
    """The ops that fell back, by reason."""
    served: dict[str, list[str]] = {}
    for reason in entry["fallbacks"]:
        op, _, rest = reason.partition(": ")
        served.setdefault(rest.partition(" cannot run: ")[2] or rest, []).append(op)
    return served


def is_fallback(entry: dict[str, Any]) -> bool:
    """Whether most calls of a path were served by something else than its backend."""
    return bool(entry["fallbacks"]) and (entry["fallback_share"] is None or entry["fallback_share"] > 0.5)
