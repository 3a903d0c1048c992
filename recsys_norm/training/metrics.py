"""Ranking metrics of a whole split, over all ranks.

logloss = mean of -(y log p + (1 - y) log(1 - p));   NE = logloss / entropy(base rate of the TRAINING split)
AUC = P(score of a positive > score of a negative), ties count one half
GAUC = AUC per user, averaged with the users' rows as weights; users with one class only are left out and counted
calibration = mean p / mean y

The metrics of recent training rows are torchrec.metrics' (`TrainingWindow`). An evaluation has its own: torchrec's NE
divides by the entropy of the rows it sees, and its AUC does not count ties one half.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recsys_norm.data.batch import Batch
from recsys_norm.training.runtime import Runtime


def entropy(rate: float) -> float:
    """Of a Bernoulli variable, in nats."""
    return -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0)


def logloss(logit: np.ndarray, label: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Weighted mean of log(1 + exp(logit)) - label * logit, in float64; labels may be fractions."""
    logit = logit.astype(np.float64)
    return float(np.average(np.logaddexp(0, logit) - label * logit, weights=weight))


def auc_per_group(
    score: np.ndarray, label: np.ndarray, group: np.ndarray, weight: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(group ids, AUC of each group, rows of each group); the AUC of a group with one class is NaN.

    score, label in {0, 1}, group, weight: [n]. Sorted once, then sums over runs of equal scores.
    """
    order = np.lexsort((score, group))
    score, label, group = score[order], label[order] > 0, group[order]
    weight = np.ones(len(score)) if weight is None else weight[order].astype(np.float64)
    new_group = np.r_[True, group[1:] != group[:-1]]
    runs = np.flatnonzero(new_group | np.r_[True, score[1:] != score[:-1]])
    positive = np.add.reduceat(np.where(label, weight, 0.0), runs)
    negative = np.add.reduceat(np.where(label, 0.0, weight), runs)
    first = np.flatnonzero(new_group[runs])  # the first run of each group
    total_positive, total_negative = np.add.reduceat(positive, first), np.add.reduceat(negative, first)
    below = np.cumsum(negative) - negative
    below -= np.repeat(below[first], np.diff(np.r_[first, len(runs)]))  # negatives of this group with a lower score
    wins = np.add.reduceat(positive * (below + negative / 2), first)
    pairs = total_positive * total_negative
    with np.errstate(invalid="ignore", divide="ignore"):
        values = np.where(pairs > 0, wins / pairs, np.nan)
    starts = np.flatnonzero(new_group)
    return group[starts], values, np.diff(np.r_[starts, len(score)])


def auc(score: np.ndarray, label: np.ndarray, weight: np.ndarray | None = None) -> float:
    """NaN if only one class is there."""
    if len(score) == 0:
        return math.nan
    return float(auc_per_group(score, label, np.zeros(len(score), np.int8), weight)[1][0])


@dataclass
class Gauc:
    """value: NaN if no user has both classes; users: with both; skipped: with one class."""

    value: float
    users: int
    skipped: int


def gauc(score: np.ndarray, label: np.ndarray, user: np.ndarray) -> Gauc:
    if len(score) == 0:
        return Gauc(math.nan, 0, 0)
    _, values, rows = auc_per_group(score, label, user)
    both = ~np.isnan(values)
    value = float(np.average(values[both], weights=rows[both])) if both.any() else math.nan
    return Gauc(value, int(both.sum()), int((~both).sum()))


class Evaluation:
    """Collects the rows of a split and computes its metrics over all ranks."""

    def __init__(self, tasks: tuple[str, ...], base_rate: float | None, runtime: Runtime) -> None:
        self._tasks = tasks
        self._base_rate = base_rate
        self._runtime = runtime
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._users: list[Tensor] = []
        self._weights: list[Tensor] = []

    def add(self, logits: Tensor, batch: Batch) -> None:
        """logits [B, n_tasks]. Kept on the device until `compute`, so that no batch waits for a copy."""
        self._logits.append(logits.detach().float())
        self._labels.append(batch.label)
        if batch.user_id is not None:
            self._users.append(batch.user_id)
        if batch.weight is not None:
            self._weights.append(batch.weight)

    def compute(self) -> dict[str, float | int | None]:
        """loss, ne, auc, gauc, gauc_users, gauc_skipped, calibration, rows of the first task, the same on every rank;
        `<name>/<task>` for further tasks. None where the data has no user ids or the base rate is unknown."""
        n = len(self._tasks)
        rows = sum(len(part) for part in self._logits)
        logits, labels = self._join(self._logits, (n,), rows), self._join(self._labels, (n,), rows)
        users = self._join(self._users, (), rows, torch.int64)
        weights = self._join(self._weights, (), rows)
        metrics: dict[str, float | int | None] = {}
        if self._runtime.main:
            for index, task in enumerate(self._tasks):
                base_rate = self._base_rate if index == 0 else None
                values = _metrics(task, logits[:, index], labels[:, index], users, weights, base_rate)
                metrics |= values if index == 0 else {f"{name}/{task}": value for name, value in values.items()}
        return self._runtime.broadcast(metrics)

    def _join(
        self, parts: list[Tensor], shape: tuple[int, ...], rows: int, dtype: torch.dtype = torch.float32
    ) -> np.ndarray | None:
        """All ranks' rows on rank 0. None elsewhere, and where no rank has this column."""
        if int(self._runtime.sum(torch.tensor(len(parts)))) == 0:
            return None
        joined = torch.cat(parts).cpu() if parts else torch.zeros((rows, *shape), dtype=dtype)
        joined = self._runtime.gather(joined)
        return None if joined is None else joined.numpy()


class TrainingWindow:
    """Loss, NE and calibration of the first task over the training rows since the last `compute`, over all ranks.

    NE divides by the entropy of these rows' own base rate, which is the training base rate up to sampling noise.
    `logit_shift` is added to the logits, see `Schema`.
    """

    def __init__(self, runtime: Runtime, logit_shift: float = 0.0) -> None:
        from torchrec.metrics.calibration import CalibrationMetric
        from torchrec.metrics.metrics_config import RecTaskInfo
        from torchrec.metrics.ne import NEMetric

        task = RecTaskInfo(name="main", label_name="label", prediction_name="prediction", weight_name="weight")
        self._metrics = [
            kind(
                world_size=runtime.size,
                my_rank=runtime.rank,
                batch_size=1,  # the window is what one update brings
                tasks=[task],
                window_size=runtime.size,
                compute_on_all_ranks=True,
                process_group=runtime.group,
            ).to(runtime.device)
            for kind in (NEMetric, CalibrationMetric)
        ]
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []
        self._logit_shift = logit_shift

    def add(self, logits: Tensor, batch: Batch) -> None:
        label = batch.label[:, 0]
        weight = torch.ones_like(label) if batch.weight is None else batch.weight
        self._rows.append((logits.detach()[:, 0].double() + self._logit_shift, label.double(), weight.double()))

    def compute(self) -> dict[str, float]:
        """{"ne", "calibration"}; call it on every rank. Empties the window."""
        logit, label, weight = (torch.cat(column) for column in zip(*self._rows, strict=True))
        self._rows.clear()
        values = {}
        for name, metric in zip(("ne", "calibration"), self._metrics, strict=True):
            metric.reset()
            metric.update(predictions={"main": logit.sigmoid()}, labels={"main": label}, weights={"main": weight})
            result = metric.compute()
            values[name] = next(float(value) for key, value in result.items() if "lifetime" in key)
        return values


def _metrics(
    task: str,
    logit: np.ndarray,
    label: np.ndarray,
    user: np.ndarray | None,
    weight: np.ndarray | None,
    base_rate: float | None,
) -> dict[str, float | int | None]:
    metrics: dict[str, float | int | None] = {"rows": len(label), "loss": math.nan, "calibration": math.nan}
    if len(label):
        metrics["loss"] = logloss(logit, label, weight)
        mean_label = float(np.average(label, weights=weight))
        probability = 1 / (1 + np.exp(-logit.astype(np.float64).clip(-700, 700)))
        mean_probability = float(np.average(probability, weights=weight))
        metrics["calibration"] = mean_probability / mean_label if mean_label else math.nan
    spread = entropy(base_rate) if base_rate is not None else 0.0
    metrics["ne"] = metrics["loss"] / spread if spread > 0 else None
    metrics["auc"] = auc(logit, label, weight)
    if math.isnan(metrics["auc"]):
        warnings.warn(f"AUC of {task!r} is undefined (nan): its {len(label)} rows hold one class only", stacklevel=2)
    grouped = gauc(logit, label, user) if user is not None else None
    metrics["gauc"] = grouped.value if grouped else None
    metrics["gauc_users"] = grouped.users if grouped else None
    metrics["gauc_skipped"] = grouped.skipped if grouped else None
    return metrics
