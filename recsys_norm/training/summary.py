"""summary.json: what a run was, what it cost and what it reached. Every field is always there, None where it could not
be measured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from recsys_norm.training.logging import finite

FIELDS = (
    "backend",
    "model",
    "data",
    "device",
    "dtype",
    "steps",
    "batch",
    "examples_per_s",
    "tokens_per_s",
    "step_ms",
    "phase_ms",
    "norm_share",
    "kernel_ms",
    "norm_cost",
    "mfu",
    "peak_mem_bytes",
    "activation_mem_bytes",
    "loss",
    "ne",
    "auc",
    "gauc",
    "split",
    "bayes_auc",
    "techniques",
    "fallbacks",
    "compile_s",
    "tune_s",
    "seed",
    "env",
)


def write(run_dir: Path, summary: dict[str, Any]) -> Path:
    """Write summary.json in one piece: readers see the old file or the new one."""
    missing = [name for name in FIELDS if name not in summary]
    if missing:
        raise KeyError(f"summary lacks {', '.join(missing)}")
    path = run_dir / "summary.json"
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(finite(summary), file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path


def table(summary: dict[str, Any], path: Path) -> str:
    """The lines printed at the end of a run."""
    bayes = summary["bayes_auc"]
    auc = (_number(summary["auc"], ".4f") or "undefined") + (f"   (Bayes {bayes:.4f})" if bayes is not None else "")
    steps = " / ".join(_number(value, ".1f") for value in summary["step_ms"].values() if value is not None)
    phases = ", ".join(
        f"{name} {_number(value, '.1f')}" for name, value in summary["phase_ms"].items() if value is not None
    )
    fallbacks = sum(summary["fallbacks"].values())
    rows = [
        ("run", f"{summary['model']} on {summary['data']}, backend {summary['backend']}, {summary['device']}"),
        ("steps", f"{summary['steps']} of {summary['batch']} rows, {summary['dtype']}"),
        (f"{summary['split']} loss", _number(summary["loss"], ".4f")),
        (f"{summary['split']} NE", _number(summary["ne"], ".4f")),
        (f"{summary['split']} AUC", auc),
        (f"{summary['split']} GAUC", _number(summary["gauc"], ".4f")),
        ("examples/s", _number(summary["examples_per_s"], ",.0f")),
        ("step ms", f"{steps}   (p20 / p50 / p80)" if steps else None),
        ("phases ms", phases or None),
        ("norm cost", _number(summary["norm_cost"], ".1%")),
        ("norm share", _number(summary["norm_share"], ".1%")),
        ("MFU", _number(summary["mfu"], ".1%")),
        ("fallbacks", f"{fallbacks} calls, {len(summary['fallbacks'])} reasons" if fallbacks else None),
        ("summary", str(path)),
    ]
    return "\n".join(f"{name:<12}  {text}" for name, text in rows if text is not None)


def _number(value: float | None, style: str) -> str | None:
    return None if value is None else format(value, style)
