"""Splits and histories of a log whose columns are on disk, in memory that does not grow with it.

Rows keep the order of the files. A split is a number per row: 0 training, 1 validation, 2 test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from recsys_norm.data.store import Writer

TRAIN, VALIDATION, TEST = range(3)
GROUPS = 256  # of users at most: each is a file while rows are sorted into them
MIX = np.uint64(0x9E3779B97F4A7C15)


def pieces(n: int, size: int) -> Iterator[slice]:
    """0 .. n - 1 in slices of up to `size`."""
    return (slice(begin, min(begin + size, n)) for begin in range(0, n, size))


def by_order(n: int, shares: tuple[float, float], size: int) -> Iterator[np.ndarray]:
    """The first rows are for training, the last ones for the test."""
    ends = [int(n * shares[0]), int(n * sum(shares))]
    for part in pieces(n, size):
        yield np.searchsorted(ends, np.arange(part.start, part.stop), side="right").astype(np.uint8)


def by_time(time: np.ndarray, shares: tuple[float, float], size: int) -> Iterator[np.ndarray]:
    """Training before one moment, the test from another on; rows of the same moment are in the same split."""
    n = len(time)
    moments = [smallest(time, min(int(n * share), n - 1), size) for share in (shares[0], sum(shares))]
    for part in pieces(n, size):
        yield np.searchsorted(moments, time[part], side="right").astype(np.uint8)


def smallest(values: np.ndarray, k: int, size: int) -> float:
    """The k-th smallest value (from 0), by histograms of a range that gets narrower until it holds at most `size`."""
    chunks = [values[part] for part in pieces(len(values), size)]  # maps, not copies
    low, high = min(float(c.min()) for c in chunks), max(float(c.max()) for c in chunks)
    while low < high:
        edges = np.unique(np.linspace(low, high, 4097))
        counts = sum(np.histogram(chunk, edges)[0] for chunk in chunks)
        below = sum(int((chunk < low).sum()) for chunk in chunks)
        if counts.sum() <= size:
            inside = np.concatenate([chunk[(chunk >= low) & (chunk <= high)] for chunk in chunks])
            return float(np.sort(inside)[k - below])
        if len(edges) == 2:  # neighbouring numbers
            return low if k < below + sum(int((chunk == low).sum()) for chunk in chunks) else high
        place = int(np.searchsorted(below + np.cumsum(counts), k, side="right"))
        low, high = float(edges[place]), float(edges[place + 1])
    return low


def users(
    folder: Path, user: np.ndarray, time: np.ndarray | None, size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(row, user, time) of groups of whole users, sorted by user, then time, then row.

    Rows go into a file per group of users first, so that a group of about `size` rows (or n / GROUPS) is in memory.
    """
    n = len(user)
    groups = min(-(-n // size), GROUPS)
    if groups <= 1:
        yield _sorted(np.arange(n), np.asarray(user), None if time is None else np.asarray(time))
        return
    kind = np.dtype([("row", np.int64), ("user", np.int64), ("time", np.float64)])
    paths = [folder / f"users-{group}.tmp" for group in range(groups)]
    for part in pieces(n, size):
        rows = np.empty(part.stop - part.start, dtype=kind)
        rows["row"], rows["user"] = np.arange(part.start, part.stop), user[part]
        rows["time"] = 0.0 if time is None else time[part]
        group = ((rows["user"].astype(np.uint64) * MIX) >> np.uint64(33)).astype(np.int64) % groups
        order = np.argsort(group, kind="stable")
        for path, chunk in zip(paths, np.split(rows[order], np.searchsorted(group[order], np.arange(1, groups)))):
            with open(path, "ab") as file:
                file.write(chunk.tobytes())
    for path in paths:
        rows = np.fromfile(path, dtype=kind)
        path.unlink()
        yield _sorted(rows["row"], rows["user"], rows["time"])


def _sorted(row: np.ndarray, user: np.ndarray, time: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    time = np.zeros(len(row)) if time is None else time
    order = np.lexsort((row, time, user))
    return row[order], user[order], time[order]


def by_last(split: np.ndarray, row: np.ndarray, user: np.ndarray) -> None:
    """Each user's last row is for the test and the one before it for validation, where the user has three or more."""
    first = np.flatnonzero(np.r_[True, user[1:] != user[:-1]]) if len(user) else np.empty(0, dtype=np.int64)
    count = np.diff(np.r_[first, len(user)])
    last = (first + count - 1)[count >= 3]
    split[row[last]], split[row[last - 1]] = TEST, VALIDATION


def history(row: np.ndarray, user: np.ndarray, time: np.ndarray, strict: bool) -> tuple[np.ndarray, np.ndarray]:
    """(start, end) per entry of a group of `users`: its history is start .. end - 1 of the group, oldest first.

    With `strict` only rows of an earlier time belong to it, otherwise also those that are earlier in the file.
    """
    place = np.arange(len(row))
    new = np.r_[True, user[1:] != user[:-1]] if len(row) else np.empty(0, dtype=bool)
    start = np.maximum.accumulate(np.where(new, place, 0)) if len(row) else place
    if not strict or not len(row):
        return start, place
    moment = new | np.r_[True, time[1:] != time[:-1]]
    return start, np.maximum.accumulate(np.where(moment, place, 0))


def write_split(writer: Writer, parts: Iterator[np.ndarray]) -> np.ndarray:
    for part in parts:
        writer.append("split", part)
    return writer.flush("split")
