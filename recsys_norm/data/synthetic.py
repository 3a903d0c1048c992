"""Synthetic clicks whose label depends on the order of the user's own history; the best possible AUC is known.

See `generator` for the true model. Rows are made on the fly, so there is no file and an epoch never repeats: each pass
over the training split has `train_rows` new rows. Validation and test depend on `seed` alone.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch

from recsys_norm.data.batch import Batch, jagged
from recsys_norm.data.config import SyntheticConfig
from recsys_norm.data.generator import Generator
from recsys_norm.data.loader import Loader
from recsys_norm.data.schema import Event, IdFeature, Schema, Table

MAX_VOCABULARY = 1 << 24  # bits of an event's hash that choose its item
BAYES, VALIDATION, TEST, TRAIN = range(4)  # streams of the generator; TRAIN and above are training passes


class Synthetic:
    """Data module. Options are the fields of `SyntheticConfig`.

    Raises ValueError for options outside their limits, and TypeError for unknown options, naming them.
    """

    def __init__(self, **options: Any) -> None:
        self.config = SyntheticConfig(**options)
        _check(self.config)
        self.generator = Generator(self.config)

    @cached_property
    def schema(self) -> Schema:
        """Tables `sparse_0` .. (pooled), `item` (candidate and histories) and `action`."""
        config = self.config
        sparse = tuple(IdFeature(f"sparse_{i}", f"sparse_{i}") for i in range(config.tables))
        events = tuple(
            Event(name, (IdFeature(f"{name}.item", "item"), IdFeature(f"{name}.action", "action")), event.max_len)
            for name, event in config.events.items()
        )
        tables = [Table(feature.table, config.rows) for feature in sparse] + [Table("item", config.rows)]
        if events:
            tables.append(Table("action", config.actions))
        base_rate, bayes_auc = self._truth
        return Schema(
            dense=config.n_dense,
            sparse=sparse,
            candidates=(IdFeature("candidate.item", "item"),),
            events=events,
            tables=tuple(tables),
            base_rate=base_rate,
            bayes_auc=bayes_auc,
        )

    def train_loader(
        self, *, rank: int = 0, world_size: int = 1, seed: int = 0, epoch: int = 0, pin_memory: bool | None = None
    ) -> Loader:
        """Batches of new rows; `seed` and the epoch choose which. pin_memory None: pin where CUDA is available."""
        config = self.config
        pool = config.pool and config.pool * config.batch_size * world_size
        rows = SyntheticRows(self.generator, TRAIN, config.train_rows, seed=seed, pool=pool)
        return Loader(
            rows,
            config.batch_size,
            rank=rank,
            world_size=world_size,
            epoch=epoch,
            advance=True,
            num_workers=config.num_workers,
            prefetch=config.prefetch,
            pin_memory=pin_memory,
        )

    def eval_loader(self, split: str, *, rank: int = 0, world_size: int = 1, pin_memory: bool | None = None) -> Loader:
        """Batches of the "validation" or "test" split in a fixed order; the last one may be smaller, or empty."""
        sizes = {
            "validation": (VALIDATION, self.config.validation_rows),
            "test": (TEST, self.config.test_rows),
        }
        if split not in sizes:
            raise ValueError(f"split must be one of {sorted(sizes)}, got {split!r}")
        return Loader(
            SyntheticRows(self.generator, *sizes[split]),
            self.config.eval_batch_size or self.config.batch_size,
            rank=rank,
            world_size=world_size,
            num_workers=self.config.num_workers,
            prefetch=self.config.prefetch,
            pin_memory=pin_memory,
        )

    def describe(self) -> dict[str, Any]:
        """Facts for logs: rows per split, share of positive labels, Bayes AUC."""
        config = self.config
        return {
            "train_rows": config.train_rows,
            "validation_rows": config.validation_rows,
            "test_rows": config.test_rows,
            "base_rate": self.schema.base_rate,
            "bayes_auc": self.schema.bayes_auc,
        }

    @cached_property
    def _truth(self) -> tuple[float, float]:
        """(share of positive labels, AUC of the true probabilities) on `bayes_rows` rows of a stream of their own."""
        chunks = np.array_split(np.arange(self.config.bayes_rows), -(-self.config.bayes_rows // 8192))
        logit = np.concatenate([self.generator.rows(BAYES, chunk, truncate=True).logit for chunk in chunks])
        probability = 1.0 / (1.0 + np.exp(-logit))
        return float(probability.mean()), expected_auc(logit, probability)


class SyntheticRows:
    """Rows of one split; see `loader.Rows`. `pool`: positions wrap around after so many rows, and batches are kept."""

    def __init__(
        self, generator: Generator, stream: int, total: int, *, seed: int | None = None, pool: int | None = None
    ) -> None:
        self.generator = generator
        self.stream = stream
        self.total = total
        self.seed = seed
        self.pool = pool
        self._kept: dict[tuple[int, int], Batch] = {}

    def __len__(self) -> int:
        return self.total

    def fetch(self, epoch: int, begin: int, end: int) -> Batch:
        if self.pool is None:
            return self._make(epoch, begin, end)
        key = begin % self.pool, begin % self.pool + end - begin
        if key not in self._kept:
            self._kept[key] = self._make(0, *key)
        return self._kept[key]

    def _make(self, epoch: int, begin: int, end: int) -> Batch:
        stream = self.stream if self.seed is None else self.stream + epoch + (self.seed << 32)
        index = np.arange(begin, end)
        rows = self.generator.rows(stream, index)
        one = np.ones(len(index), dtype=np.int64)
        ids = {"candidate.item": (rows.candidate, one)}
        for name, (lengths, item, action, _) in rows.events.items():
            ids[f"{name}.item"] = item, lengths
            ids[f"{name}.action"] = action, lengths
        return Batch(
            dense=torch.from_numpy(rows.dense),
            sparse=jagged({f"sparse_{i}": column for i, column in enumerate(rows.sparse)}, len(index)),
            ids=jagged(ids, len(index)),
            ages={name: torch.from_numpy(event[3]) for name, event in rows.events.items()},
            label=torch.from_numpy(rows.label)[:, None],
            user_id=torch.from_numpy(rows.user),
            row=torch.from_numpy(index),
        )


def expected_auc(score: np.ndarray, probability: np.ndarray) -> float:
    """AUC of `score` when row i is positive with `probability[i]`, in expectation over the labels:

        sum_ij p_i (1 - p_j) ([s_i > s_j] + [s_i = s_j] / 2)  /  sum_i p_i sum_j (1 - p_j)

    With labels 0 and 1 as probabilities it is the usual AUC. NaN if there is no positive or no negative mass.
    """
    order = np.argsort(score, kind="stable")
    score, p = score[order], probability[order].astype(np.float64)
    start = np.flatnonzero(np.concatenate([[True], score[1:] != score[:-1]]))
    positive, negative = np.add.reduceat(p, start), np.add.reduceat(1.0 - p, start)
    below = np.cumsum(negative) - negative
    mass = positive.sum() * negative.sum()
    return float((positive * (below + negative / 2)).sum() / mass) if mass > 0 else float("nan")


def _check(config: SyntheticConfig) -> None:
    limits = {
        "batch_size": (1, None), "n_dense": (0, None), "tables": (0, None), "rows": (1, None), "classes": (1, 255),
        "actions": (2, 65536), "users": (1, None), "multi_hot": (0, 64), "train_rows": (1, None),
        "validation_rows": (0, None), "test_rows": (0, None), "bayes_rows": (1, None),
    }  # fmt: skip
    for name, (low, high) in limits.items():
        _require(name, getattr(config, name), low, high)
    if config.vocabulary is not None:
        _require("vocabulary", config.vocabulary, 1, min(config.rows, MAX_VOCABULARY))
    elif config.rows > MAX_VOCABULARY:
        raise ValueError(f"data.vocabulary=null uses all {config.rows} rows; set it to at most {MAX_VOCABULARY}")
    if config.pool is not None:
        _require("pool", config.pool, 1, None)
    lengths = config.lengths
    if lengths.distribution not in ("uniform", "zipf", "fixed"):
        raise ValueError(f"data.lengths.distribution must be uniform, zipf or fixed, got {lengths.distribution!r}")
    _require("lengths.empty", lengths.empty, 0.0, 1.0)
    for name, event in config.events.items():
        longest = {"uniform": 2 * event.mean_len - 1, "fixed": event.mean_len, "zipf": 1}[lengths.distribution]
        _require(f"events.{name}.max_len", event.max_len, max(longest, 1), None)
        _require(f"events.{name}.mean_len", event.mean_len, 1, None)
        _require(f"events.{name}.decay", event.decay, 0.0, 1.0)


def _require(name: str, value: float, low: float, high: float | None) -> None:
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"data.{name} must be {limit}, got {value}")
