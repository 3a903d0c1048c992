"""Dense features from earlier rows only: what a service could have counted before it ranked the row."""

from __future__ import annotations

import numpy as np

STATISTICS = ("none", "online", "collaborative")
PRIOR = 5.0  # rows that a smoothed mean starts with, all at the mean of everything seen so far


def online_statistics(
    user: np.ndarray, item: np.ndarray, label: np.ndarray, time: np.ndarray, *, strict: bool = False
) -> np.ndarray:
    """[n, 6] float32 features of rows in time order; row i uses rows 0 .. i - 1 (with `strict`, earlier times) only.

    Per user and per item: log(1 + count) / 4 and the smoothed mean of the label minus the mean of all. Then
    log(1 + seconds) / 8 since the user's last row (0 for a first row), and the sum of both centred means.
    """
    n = len(label)
    first = np.searchsorted(time, time) if strict else np.arange(n)  # rows before first[i] are known to row i
    total = np.concatenate([[0.0], np.cumsum(label, dtype=np.float64)])[first]
    prior = (total + 0.5 * PRIOR) / (first + PRIOR)
    columns = []
    for group in (user, item):
        count, positive = _before(group, label, time, strict)
        columns += [np.log1p(count) / 4, (positive + PRIOR * prior) / (count + PRIOR) - prior]
    columns += [np.log1p(_since_last(user, time, strict)) / 8, columns[1] + columns[3]]
    return np.stack(columns, 1).astype(np.float32)


def _before(group: np.ndarray, label: np.ndarray, time: np.ndarray, strict: bool) -> tuple[np.ndarray, np.ndarray]:
    """Number of earlier rows of the same group, and the sum of their labels."""
    order = np.argsort(group, kind="stable")
    known, start = known_rows(group[order], time[order], strict)
    total = np.concatenate([[0.0], np.cumsum(label[order], dtype=np.float64)])
    count, positive = np.empty(len(group)), np.empty(len(group))
    count[order] = known - start
    positive[order] = total[known] - total[start]
    return count, positive


def _since_last(user: np.ndarray, time: np.ndarray, strict: bool) -> np.ndarray:
    order = np.argsort(user, kind="stable")
    known, start = known_rows(user[order], time[order], strict)
    gap = np.empty(len(user))
    gap[order] = np.where(known > start, time[order] - time[order][np.maximum(known - 1, 0)], 0)
    return gap


def known_rows(group: np.ndarray, time: np.ndarray, strict: bool) -> tuple[np.ndarray, np.ndarray]:
    """For rows sorted by group, then time: rows start[i] .. known[i] - 1 are the earlier ones of row i's group."""
    place = np.arange(len(group))
    new = np.concatenate([[True], group[1:] != group[:-1]])
    start = np.maximum.accumulate(np.where(new, place, 0))
    if not strict:
        return place, start
    new |= np.concatenate([[True], time[1:] != time[:-1]])
    return np.maximum.accumulate(np.where(new, place, 0)), start
