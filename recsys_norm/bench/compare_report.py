"""A comparison as text, Markdown, JSON and picture. Metrics are rows and paths are columns."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_WIDTH = 118
_NONE = "-"


def report(comparison: dict[str, Any], folder: Path) -> str:
    """Write the files and return the table with their names."""
    files = write(comparison, folder)
    return f"{text(comparison)}\n\ncomparison  {'  '.join(map(str, files))}"


def write(comparison: dict[str, Any], folder: Path) -> list[Path]:
    """Write comparison.json, comparison.md, comparison.svg and comparison.png into the folder; returns their paths.

    Without matplotlib there is no picture.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "comparison.json", folder / "comparison.md"]
    files[0].write_text(json.dumps(comparison, indent=1) + "\n")
    files[1].write_text(markdown(comparison))
    try:
        from recsys_norm.bench.compare_plot import plot
    except ImportError as error:
        print(f"no picture: {error}")
        return files
    return files + plot(comparison, folder)


def text(comparison: dict[str, Any]) -> str:
    return "\n\n".join(_text(group) for group in comparison["groups"])


def markdown(comparison: dict[str, Any]) -> str:
    return "\n".join(_markdown(group) for group in comparison["groups"])


def rows(group: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """(label, one cell per path); rows that no path has a value for are left out."""
    paths = group["paths"]
    table = [(label, [cell(entry) or _NONE for entry in paths]) for label, cell in _cells(paths)]
    return [(label, cells) for label, cells in table if set(cells) != {_NONE}]


def _cells(paths: Sequence[dict[str, Any]]) -> list[tuple[str, Callable[[dict[str, Any]], str | None]]]:
    def number(style: str, *keys: str, scale: float = 1.0) -> Callable[[dict[str, Any]], str | None]:
        def cell(entry: dict[str, Any]) -> str | None:
            value: Any = entry
            for key in keys:
                value = None if value is None else value.get(key)
            return None if value is None else format(value * scale, style)

        return cell

    def count(entry: dict[str, Any]) -> str | None:
        return None if entry["fallbacks"] is None else f"{sum(entry['fallbacks'].values()):,}"

    gib = 2.0**-30
    table = [
        ("rank", lambda e: str(e["rank"]) if e["rank"] else e["status"]),
        ("examples/s", number(",.0f", "examples_per_s")),
        ("  over unfused (norms)", number(".2f", "gain", "norms")),
        ("  over compiled", number(".2f", "gain", "compiled")),
        ("  over eager attention", number(".2f", "gain", "attention")),
        ("  mean over all steps", number(",.0f", "examples_per_s_mean")),
        ("tokens/s", number(",.0f", "tokens_per_s")),
        ("step ms p50", number(".1f", "step_ms", "p50")),
        ("  p20 / p80", lambda e: _pair(e["step_ms"]["p20"], e["step_ms"]["p80"])),
        *[(f"  {phase}", number(".1f", "phase_ms", phase)) for phase in ("data", "forward", "backward", "optimizer")],
        ("norm cost, ms", number(".1f", "norm_ms")),
        ("norm cost", number(".1%", "norm_cost")),
        ("norm share", number(".1%", "norm_share")),
        ("GPU busy", number(".0%", "busy")),
        ("MFU", number(".1%", "mfu")),
        ("memory, GiB", number(".1f", "peak_mem_bytes", scale=gib)),
        ("  activations, GiB", number(".1f", "activation_mem_bytes", scale=gib)),
        ("compiling, s (apart)", number(".0f", "compile_s")),
        ("tuning, s (apart)", number(".0f", "tune_s")),
        ("test NE", number(".4f", "ne")),
        ("test AUC", number(".4f", "auc")),
        ("test loss", number(".4f", "loss")),
        ("loss curve", _verdict),
        ("  mean |difference|", _difference),
        *[(f"{op} by", _served(op)) for op in _ops(paths)],
        ("fallback calls", count),
        ("SM clock, MHz", number(",.0f", "clocks", "sm_mhz")),
        ("power, W", number(".0f", "clocks", "watts")),
    ]
    if any(entry["runs"] > 1 for entry in paths):
        table.append(("runs", lambda e: str(e["runs"])))
        table.append(("  step ms of each", lambda e: " ".join(f"{ms:.1f}" for ms in e["step_ms_of_runs"] if ms)))
    return table


def _pair(low: float | None, high: float | None) -> str | None:
    return None if low is None or high is None else f"{low:.1f} / {high:.1f}"


def _verdict(entry: dict[str, Any]) -> str | None:
    curve = entry.get("curve")
    if curve is None:
        return None
    if curve["reference"]:
        return "reference"
    return {True: "agrees", False: "DIVERGES", None: "not judged"}[curve["agrees"]]


def _difference(entry: dict[str, Any]) -> str | None:
    curve = entry.get("curve")
    if curve is None or curve["reference"]:
        return None
    return f"{curve['mean_abs_difference']:.1e}"


def _ops(paths: Sequence[dict[str, Any]]) -> list[str]:
    return sorted({op for entry in paths for op in entry["techniques"] or ()})


def _served(op: str) -> Callable[[dict[str, Any]], str | None]:
    def cell(entry: dict[str, Any]) -> str | None:
        served = (entry["techniques"] or {}).get(op)
        if not served:
            return None
        names = sorted(served, key=served.get, reverse=True)
        return names[0] + (f" +{len(names) - 1}" if len(names) > 1 else "")

    return cell


def _legend(group: dict[str, Any]) -> list[str]:
    """How to read the loss curves' rows, and the conditions."""
    env, control, told = group["env"], group["control"], []
    first = next((entry for entry in group["paths"] if entry["steps"]), None)
    if first:
        told.append(f"{first['steps']} steps, {first['measured_steps']} of them timed; speeds are of the median step")
    if control:
        limit = next(entry["curve"]["limit"] for entry in group["paths"] if entry.get("curve"))
        several = f", mean of {control['runs']}" if control["runs"] > 1 else ""
        told.append(
            f"loss curves: mean |difference| to {group['reference']} over {control['steps']} steps; at most "
            f"{limit:.1e} is allowed, twice what another order of the rows within each "
            f"batch changes{several}"
        )
    versions = ", ".join(f"{name} {env[name]}" for name in ("torch", "triton", "torchrec", "driver") if env.get(name))
    if versions:
        told.append(versions)
    return told


def _text(group: dict[str, Any]) -> str:
    names = [entry["path"] for entry in group["paths"]]
    table = rows(group)
    first = max(len(label) for label, _ in [("", []), *table])
    widths = [max(len(cell) for cell in (name, *column)) for name, column in zip(names, zip(*(c for _, c in table)))]
    lines = [_heading(group), "", " " * first + "".join(f"  {name:>{w}}" for name, w in zip(names, widths))]
    lines += [f"{label:<{first}}" + "".join(f"  {c:>{w}}" for c, w in zip(cells, widths)) for label, cells in table]
    for line in (*_legend(group), *group["notes"]):
        lines += textwrap.wrap(line, _WIDTH, initial_indent="* ", subsequent_indent="  ")
    return "\n".join(lines)


def _heading(group: dict[str, Any]) -> str:
    settings = " ".join(f"{key}={value}" for key, value in group["settings"].items())
    return f"{group['title']}  [{settings}]" if settings else group["title"]


def _markdown(group: dict[str, Any]) -> str:
    names = [entry["path"] for entry in group["paths"]]
    lines = [f"**{_heading(group)}**", "", f"| | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for label, cells in rows(group):
        indent = "&nbsp;&nbsp;" if label.startswith("  ") else ""
        lines.append(f"| {indent}{label.strip().replace('|', chr(92) + '|')} | {' | '.join(cells)} |")
    lines += ["", *[f"- {line}" for line in (*_legend(group), *group["notes"])], ""]
    return "\n".join(lines)
