"""The measured table behind `backend="fused"`: which technique was fastest at which shape.

`choices.json` holds one row per op, norm, direction, architecture and shape, written by
`python -m recsys_norm.bench ops --retune`. A problem takes the technique of the nearest measured shape; what is far from all
of them, or of another architecture or precision, has no row and takes the registry's order.
"""

from __future__ import annotations

import functools
import json
import math
from importlib.resources import files
from pathlib import Path

from recsys_norm.ops.problem import Problem

FORWARD, BACKWARD = "forward", "backward"
MAX_DISTANCE = 1.0  # |log2| of the ratio in K or N: half to twice a measured width
_CASE = ("op", "norm", "direction", "M", "K", "N", "N2")
ROWS_WEIGHT = 0.25  # of |log2| of the ratio in M: rows matter less than widths
MAX_ROWS_DISTANCE = 4.0  # |log2| of the ratio in M: with few rows there are too few tiles for all multiprocessors


def path() -> Path:
    """Where the table of the installed package is."""
    return Path(str(files("recsys_norm.ops") / "choices.json"))


@functools.cache
def _rows() -> dict[tuple, list[dict]]:
    by_kind: dict[tuple, list[dict]] = {}
    for row in json.loads(path().read_text())["rows"]:
        by_kind.setdefault((row["op"], row["norm"], row["direction"], row["arch"]), []).append(row)
    return by_kind


def preferred(problem: Problem, direction: str) -> str | None:
    """ "provider/name" of the technique measured fastest near the problem, None where nothing near was measured."""
    if problem.dtype.itemsize != 2:  # the table is of bf16, which fp16 follows
        return None
    rows = _rows().get((problem.op, problem.norm, direction, problem.arch), [])
    near = [(distance, row) for row in rows if (distance := _distance(row, problem)) is not None]
    return min(near, key=lambda pair: pair[0])[1]["technique"] if near else None


def _distance(row: dict, problem: Problem) -> float | None:
    pairs = [(row[name], getattr(problem, name)) for name in ("K", "N", "N2")]
    if any((a == 0) != (b == 0) for a, b in pairs):
        return None
    widths = [abs(math.log2(a / b)) for a, b in pairs if a]
    rows = abs(math.log2(row["M"] / problem.M))
    if max(widths, default=0) > MAX_DISTANCE or rows > MAX_ROWS_DISTANCE:
        return None
    return sum(widths) + ROWS_WEIGHT * rows


def update(rows: list[dict], arch: int, env: dict, target: Path | None = None) -> Path:
    """Put measured rows in the place of those of the same case and architecture; all others stay."""
    target = target or path()
    table = json.loads(target.read_text()) if target.exists() else {"measured_on": {}, "rows": []}
    table["measured_on"][str(arch)] = env
    measured = {tuple(row[k] for k in _CASE) for row in rows}
    kept = [r for r in table["rows"] if r["arch"] != arch or tuple(r[k] for k in _CASE) not in measured]
    table["rows"] = kept + [{**row, "arch": arch} for row in rows]
    lines = ",\n  ".join(json.dumps(row) for row in table["rows"])
    target.write_text(f'{{\n "measured_on": {json.dumps(table["measured_on"])},\n "rows": [\n  {lines}\n ]\n}}\n')
    _rows.cache_clear()
    return target
