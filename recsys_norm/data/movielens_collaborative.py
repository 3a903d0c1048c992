"""What a collaborative filter would have predicted for each row, had it been kept up to date with the earlier rows.

Source of the model: Koren, Bell, Volinsky: Matrix factorization techniques for recommender systems. Computer 42, 2009.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from recsys_norm.data.movielens_files import Item
from recsys_norm.data.movielens_statistics import known_rows

FACTORS = 8  # learned features of an item
REFITS = 20  # fits of the item features, spread evenly over the rows
SWEEPS = 2  # alternations of each fit, which starts from the one before
RIDGE_FACTOR, RIDGE_CONTENT, RIDGE_BIAS = 8.0, 15.0, 2.0
SMOOTH_ITEM, SMOOTH_USER = 5.0, 3.0  # rows with a deviation of 0 that the mean of an item and of a user start with
RECENT = 0.15  # weight of the latest row in the moving average
LIKE = 2.5  # a like in stars, so that one set of ridges suits both


def collaborative_statistics(
    user: np.ndarray,
    item: np.ndarray,
    value: np.ndarray,
    time: np.ndarray,
    content: np.ndarray,
    *,
    strict: bool = False,
) -> np.ndarray:
    """[n, 4] float32 features of rows in time order; row i uses rows 0 .. i - 1 (with `strict`, earlier times) only.

        value = mean + b_item + a_user + w_user . [v_item | content_item]

    Returns the prediction minus the mean, its last term, a_user, and the moving average of what the predictions for the
    user's last rows missed. The mean, b and v are fitted by alternating least squares after each twentieth of the rows,
    to all rows up to there; a and w of a user are the ridge solution over all of its earlier rows. The first twentieth,
    before any fit, has zeros.

    user, item: [n] codes 0 .. ; value [n]: stars, or LIKE for a row that was liked and 0 for the others;
    content: [items, C] known features of the items, C may be 0.
    """
    edges = np.linspace(0, len(value), REFITS + 1).astype(np.int64)
    if strict:  # rows of one time belong to one fit, which knows none of them
        edges[1:-1] = np.searchsorted(time, time[edges[1:-1]])
    model = FactorModel(int(user.max()) + 1, content)
    features = np.zeros((len(value), 4))
    for begin, end in pairwise(np.unique(edges)[1:]):
        model.fit(user[:begin], item[:begin], value[:begin])
        features[begin:end, :3] = model.follow(user[:end], item[:end], value[:end], time[:end], begin, strict)
        features[begin:end, 3] = value[begin:end] - model.mean - features[begin:end, 0]
    features[:, 3] = _moving_average(features[:, 3], user, time, strict)
    return features.astype(np.float32)


class FactorModel:
    """The model of `collaborative_statistics`. `x` [items, D] = [v | content | 1] are the features of the items."""

    def __init__(self, users: int, content: np.ndarray) -> None:
        items, known = content.shape
        factors = np.random.default_rng(0).normal(0, 0.1, (items, FACTORS))
        self.x = np.hstack([factors, content, np.ones((items, 1))])
        self.ridge = np.diag([RIDGE_FACTOR] * FACTORS + [RIDGE_CONTENT] * known + [RIDGE_BIAS])
        self.users = users
        self.mean, self.item_bias = 0.0, np.zeros(items)

    def fit(self, user: np.ndarray, item: np.ndarray, value: np.ndarray) -> None:
        items = len(self.x)
        self.mean = value.mean()
        user_bias = np.zeros(self.users)
        for _ in range(SWEEPS):
            self.item_bias = _smooth_mean(value - self.mean - user_bias[user], item, items, SMOOTH_ITEM)
            user_bias = _smooth_mean(value - self.mean - self.item_bias[item], user, self.users, SMOOTH_USER)
        target = value - self.mean - self.item_bias[item]
        by_user, by_item = _groups(user), _groups(item)
        w = np.zeros((self.users, self.x.shape[1]))
        for _ in range(SWEEPS):
            for rows in by_user:
                x = self.x[item[rows]]
                w[user[rows[0]]] = np.linalg.solve(x.T @ x + self.ridge, x.T @ target[rows])
            for rows in by_item:
                of, at = w[user[rows]], item[rows[0]]
                missing = target[rows] - of[:, FACTORS:] @ self.x[at, FACTORS:]
                of = of[:, :FACTORS]
                self.x[at, :FACTORS] = np.linalg.solve(of.T @ of + self.ridge[:FACTORS, :FACTORS], of.T @ missing)

    def follow(self, user, item, value, time, begin: int, strict: bool) -> np.ndarray:
        """[rows - begin, 3]: prediction - mean, w . [v | content] and a for the rows from `begin` on, one by one."""
        result = np.zeros((len(value) - begin, 3))
        target = value - self.mean - self.item_bias[item]
        unseen = np.bincount(item[:begin], minlength=len(self.x)) == 0
        features = self.x.copy()
        features[unseen, :FACTORS] = 0
        for rows in _groups(user):
            first = np.searchsorted(rows, begin)
            if first == len(rows):
                continue
            past, now = rows[:first], rows[first:]
            known = known_rows(user[rows], time[rows], strict)[0][first:] - first  # of the rows from `begin` on
            x_past, x = features[item[past]], features[item[now]]
            normal = x_past.T @ x_past + self.ridge + _before(x[:, :, None] * x[:, None, :], known)
            right = x_past.T @ target[past] + _before(x * target[now, None], known)
            w = np.linalg.solve(normal, right[:, :, None])[:, :, 0]
            bias, taste = w[:, -1], (w * x)[:, :-1].sum(1)
            result[now - begin] = np.stack([self.item_bias[item[now]] + bias + taste, taste, bias], 1)
        return result


def content_of(items: list[Item]) -> np.ndarray:
    """[len(items), genres + 1] float64: a flag per genre, and the year in units of 20 years around 1990."""
    genres = sorted({genre for entry in items for genre in entry.genres})
    flags = [[genre in entry.genres for genre in genres] for entry in items]
    years = [[((entry.year or 1990) - 1990) / 20] for entry in items]
    return np.hstack([np.array(flags, dtype=np.float64).reshape(len(items), -1), np.array(years)])


def _before(values: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Sum of the first count[i] values, for each i."""
    return np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, 0)])[count]


def _groups(group: np.ndarray) -> list[np.ndarray]:
    """The places of each value, in order."""
    order = np.argsort(group, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(group[order])) + 1)


def _smooth_mean(value: np.ndarray, group: np.ndarray, groups: int, prior: float) -> np.ndarray:
    return np.bincount(group, value, groups) / (np.bincount(group, minlength=groups) + prior)


def _moving_average(value: np.ndarray, group: np.ndarray, time: np.ndarray, strict: bool) -> np.ndarray:
    """m <- m + RECENT (value - m) over the earlier rows of the same group, from 0 on."""
    order = np.argsort(group, kind="stable")
    known, start = known_rows(group[order], time[order], strict)
    after = np.empty(len(value))
    for place, row in enumerate(order.tolist()):
        last = after[place - 1] if place > start[place] else 0.0
        after[place] = last + RECENT * (value[row] - last)
    average = np.empty(len(value))
    average[order] = np.where(known > start, after[np.maximum(known - 1, 0)], 0.0)
    return average
