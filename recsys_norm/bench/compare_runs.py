"""What finished runs left behind, read from their folders."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class CompareError(ValueError):
    """There is nothing to compare. The message says what was looked for and where."""


@dataclass
class Run:
    """What one run left behind. `summary` is None where it failed, `error` where it did not."""

    folder: str
    summary: dict[str, Any] | None
    error: str | None = None
    config: dict[str, Any] = field(default_factory=dict)  # dotted keys
    losses: list[float] = field(default_factory=list)  # of each step
    clocks: dict[str, float] | None = None

    def of(self, name: str) -> Any:
        """A fact of the summary, or of the configuration where the run failed."""
        if self.summary is not None:
            return self.summary.get(name)
        key = {"backend": "backend.name", "compile": "backend.compile", "model": "model.name", "seed": "trainer.seed"}
        return self.config.get(key.get(name, name))

    @property
    def control(self) -> bool:
        start = (self.summary or {}).get("start") or {}
        return bool(start.get("row_order") or self.config.get("trainer.row_order"))

    @property
    def path(self) -> tuple[str, bool, str]:
        backend = self.of("backend")
        extra = bool(self.of("compile")) and backend != "compiled"
        return backend, extra, self.of("attention") or "fused"


def load(paths: Iterable[Path]) -> list[Run]:
    """The runs in and below each folder, and the summaries in each JSON file (a list of them, or one).

    Raises:
        CompareError: for a path that is not there, or where no path holds a run.
    """
    runs: list[Run] = []
    paths = [Path(path) for path in paths]
    for path in paths:
        if path.is_file():
            content = json.loads(path.read_text())
            runs += [Run(str(path), summary) for summary in (content if isinstance(content, list) else [content])]
        elif path.is_dir():
            found = {file.parent for name in ("summary.json", "failed.json") for file in path.rglob(name)}
            runs += [_read(folder) for folder in sorted(found, key=_natural)]
        else:
            raise CompareError(f"{path}: there is no such file or folder")
    runs = [run for run in runs if run.of("backend") is not None]
    if not runs:
        named = ", ".join(map(str, paths))
        raise CompareError(f"no finished run in {named}: looked for summary.json there and in all folders below")
    return runs


def _natural(path: Path) -> tuple:
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in path.parts)


def _read(folder: Path) -> Run:
    summary = _json(folder / "summary.json")
    failure = _json(folder / "failed.json") or {}
    return Run(
        str(folder),
        summary,
        failure.get("error"),
        _flat(_yaml(folder / ".hydra" / "config.yaml")),
        _losses(folder / "metrics.jsonl"),
        _clocks(folder / "clocks.csv"),
    )


def _json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _yaml(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    import yaml

    return yaml.safe_load(path.read_text()) or {}


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        flat |= _flat(inner, f"{name}.") if isinstance(inner, dict) else {name: inner}
    return flat


def _losses(path: Path) -> list[float]:
    losses: list[float] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # cut off when the process was killed
            break
        if record["split"] == "train":
            losses += record["step_loss"]
    return losses


def _clocks(path: Path) -> dict[str, float] | None:
    """Medians over the samples of the busiest device while it was at work; None without samples."""
    if not path.exists():
        return None
    with path.open(newline="") as file:
        rows = [
            {(key or "").strip(): (value or "").strip() for key, value in row.items()} for row in csv.DictReader(file)
        ]
    samples: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        values = {}
        for name, text in row.items():
            try:
                values[name.partition(" [")[0]] = float(text)
            except ValueError:  # "[N/A]", or the last line, cut off
                continue
        if values.get("utilization.gpu", 0) >= 50 and "clocks.current.sm" in values:
            samples.setdefault(row.get("index", "0"), []).append(values)
    if not samples:
        return None
    busiest = max(samples.values(), key=len)
    named = {"sm_mhz": "clocks.current.sm", "memory_mhz": "clocks.current.memory", "watts": "power.draw",
             "celsius": "temperature.gpu"}  # fmt: skip
    result = {key: median(sample.get(name) for sample in busiest) for key, name in named.items()}
    result["sm_mhz_lowest"] = min(sample["clocks.current.sm"] for sample in busiest)
    return {key: value for key, value in result.items() if value is not None}


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
