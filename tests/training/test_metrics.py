"""Metrics against brute force over all pairs."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch

from recsys_norm.data.batch import Batch
from recsys_norm.training import metrics
from recsys_norm.training.runtime import Runtime

ONE = Runtime(0, 1, torch.device("cpu"), torch.float32)


def brute_auc(score, label, weight):
    won = pairs = 0.0
    for i, j in itertools.product(range(len(score)), repeat=2):
        if label[i] == 1 and label[j] == 0:
            pairs += weight[i] * weight[j]
            won += weight[i] * weight[j] * (1.0 if score[i] > score[j] else 0.5 if score[i] == score[j] else 0.0)
    return won / pairs if pairs else math.nan


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    score = rng.integers(0, 12, 200) / 4 - 1.5  # many ties
    label = (rng.random(200) < 0.4).astype(np.float32)
    user = rng.integers(-3, 25, 200)
    label[user == 2] = 1  # one class only
    label[user == 3] = 0
    return score.astype(np.float32), label, user, rng.random(200)


def test_auc_counts_ties_one_half(rows):
    score, label, _, weight = rows
    assert metrics.auc(score, label) == pytest.approx(brute_auc(score, label, np.ones(200)), abs=1e-12)
    assert metrics.auc(score, label, weight) == pytest.approx(brute_auc(score, label, weight), abs=1e-12)


def test_auc_of_constant_scores_is_one_half(rows):
    assert metrics.auc(np.zeros(200, np.float32), rows[1]) == 0.5


def test_gauc_is_weighted_by_rows_and_skips_users_with_one_class(rows):
    score, label, user, _ = rows
    values, weights, skipped = [], [], 0
    for u in np.unique(user):
        mine = user == u
        value = brute_auc(score[mine], label[mine], np.ones(mine.sum()))
        if math.isnan(value):
            skipped += 1
        else:
            values.append(value)
            weights.append(mine.sum())
    result = metrics.gauc(score, label, user)
    assert result.value == pytest.approx(np.average(values, weights=weights), abs=1e-12)
    assert (result.users, result.skipped) == (len(values), skipped) and skipped >= 2


def test_logloss_is_stable_for_large_logits():
    value = metrics.logloss(np.array([800.0, -800.0, 0.0]), np.array([1.0, 1.0, 0.0]))
    assert value == pytest.approx((0 + 800 + math.log(2)) / 3)


def batch_of(label, user=None, weight=None):
    return Batch(torch.zeros(len(label), 0), None, None, {}, label, user, weight)


def evaluate(logits, labels, user=None, base_rate=0.3, tasks=("click",), parts=3):
    evaluation = metrics.Evaluation(tasks, base_rate, ONE)
    for index in np.array_split(np.arange(len(logits)), parts):
        users = None if user is None else torch.from_numpy(user[index])
        evaluation.add(torch.from_numpy(logits[index]), batch_of(torch.from_numpy(labels[index]), users))
    return evaluation.compute()


def test_ne_divides_by_the_entropy_of_the_training_base_rate(rows):
    score, label, user, _ = rows
    result = evaluate(score[:, None], label[:, None], user)
    expected = metrics.logloss(score, label) / -(0.3 * math.log(0.3) + 0.7 * math.log(0.7))
    assert result["ne"] == pytest.approx(expected)
    assert result["calibration"] == pytest.approx((1 / (1 + np.exp(-score.astype(float)))).mean() / label.mean())
    assert result["rows"] == 200 and result["gauc_skipped"] >= 2


def test_values_that_the_data_does_not_allow_are_none(rows):
    score, label, _, _ = rows
    result = evaluate(score[:, None], label[:, None], user=None, base_rate=None)
    assert result["gauc"] is None and result["gauc_users"] is None and result["ne"] is None
    assert result["auc"] > 0


def test_one_class_gives_nan_and_one_warning(rows):
    """A23: an evaluation window with one class only."""
    score, _, user, _ = rows
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = evaluate(score[:, None], np.ones((200, 1), np.float32), user)
    assert math.isnan(result["auc"]) and math.isnan(result["gauc"]) and math.isfinite(result["loss"])
    assert len(caught) == 1 and "one class" in str(caught[0].message)
    assert result["gauc_skipped"] == len(np.unique(user)) and result["gauc_users"] == 0


def test_every_task_has_its_metrics(rows):
    score, label, user, _ = rows
    both = np.stack([label, 1 - label], 1)
    result = evaluate(np.stack([score, score], 1), both, user, tasks=("click", "buy"))
    assert result["auc/buy"] == pytest.approx(1 - result["auc"])
    assert result["ne/buy"] is None  # its training base rate is not known


def test_no_rows_at_all():
    result = evaluate(np.zeros((0, 1), np.float32), np.zeros((0, 1), np.float32), np.zeros(0, np.int64), parts=1)
    assert math.isnan(result["loss"]) and math.isnan(result["auc"]) and result["rows"] == 0


@pytest.mark.parametrize("weighted", [False, True])
def test_training_window_starts_anew_after_each_report(rows, weighted):
    """torchrec.metrics on the rows since the last report: NE by their own base rate."""
    score, label, _, weight = rows
    window = metrics.TrainingWindow(ONE)
    for part in np.array_split(np.arange(200), 4), np.array_split(np.arange(80), 3):
        taken = np.concatenate(part)
        for index in part:
            batch = batch_of(torch.from_numpy(label[index, None]), weight=torch.from_numpy(weight[index]))
            batch.weight = batch.weight if weighted else None
            window.add(torch.from_numpy(score[index, None]), batch)
        used = weight[taken] if weighted else np.ones(len(taken))
        base_rate = np.average(label[taken], weights=used)
        expected = metrics.logloss(score[taken], label[taken], used) / metrics.entropy(base_rate)
        mean = np.average(1 / (1 + np.exp(-score[taken].astype(float))), weights=used)
        assert window.compute() == pytest.approx({"ne": expected, "calibration": mean / base_rate}, rel=1e-6)
