"""Data that cannot be used: as a whole, or single rows of it."""

from __future__ import annotations

import collections
import json
from pathlib import Path

LISTED = 10_000  # damaged rows that are listed one by one; all are counted


class DataError(ValueError):
    """Files, rows or settings of a data set that cannot work. The message names the file or key and the way out."""


class Damaged:
    """Counts and lists the rows that are left out. With `fatal`, the first one is an error."""

    def __init__(self, fatal: bool) -> None:
        self.fatal = fatal
        self.counts: collections.Counter[str] = collections.Counter()  # by file
        self.rows: list[dict] = []  # {"file", "line" or "row", "reason"}

    def add(self, file: str, unit: str, line: int, reason: str) -> None:
        if self.fatal:
            raise DataError(f"{file}, {unit} {line}: {reason}; mend it, or leave such rows out with data.damaged=skip")
        self.counts[file] += 1
        if len(self.rows) < LISTED:
            self.rows.append({"file": file, unit: int(line), "reason": reason})

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def write(self, path: Path) -> None:
        """One JSON object per row."""
        path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))


def damage(counts: dict[str, int], first: list[dict]) -> str:
    """What was left out, for a log line: counts by file, and the first rows with their reasons."""
    files = ", ".join(f"{count:,} of {file}" for file, count in counts.items())
    examples = [(row["file"], "line" if "line" in row else "row", row["reason"], row) for row in first]
    shown = "; ".join(f"{file}, {unit} {row[unit]}: {reason}" for file, unit, reason, row in examples)
    return f"left out {sum(counts.values()):,} damaged rows ({files}); the first: {shown}"
