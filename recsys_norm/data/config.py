"""Structured configs of the data sets. `register` makes them known to Hydra as `data/base_<name>`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class LoaderConfig:
    """What every data set has: rows per batch and rank, and how batches are made."""

    batch_size: int = MISSING
    eval_batch_size: int | None = None  # None: batch_size
    num_workers: int | None = None  # processes that make batches; None: up to 4 with CUDA, 0 (none) without
    prefetch: int = 2  # batches in flight per worker


@dataclass
class SyntheticEventConfig:
    """One event sequence. `decay` and `weight` shape what it contributes to the true logit (see `synthetic`)."""

    mean_len: int = MISSING
    max_len: int = MISSING
    decay: float = 0.7
    weight: float = 2.0


@dataclass
class LengthConfig:
    """Lengths of histories.

    distribution: "uniform" on 1 .. 2 * mean_len - 1; "fixed" at mean_len; "zipf" on 1 .. max_len with
        P(length) ~ length ** -exponent (the mean follows from max_len and exponent, mean_len is not used).
    empty: share of histories without any event.
    long_user: one row in every `batch_size` rows has max_len events.
    """

    distribution: str = "uniform"
    exponent: float = 1.0
    empty: float = 0.0
    long_user: bool = False


@dataclass
class SyntheticConfig(LoaderConfig):
    _target_: str = "recsys_norm.data.synthetic.Synthetic"
    _convert_: str = "object"
    n_dense: int = MISSING
    tables: int = MISSING  # pooled tables; the item and the action table come on top
    rows: int = MISSING  # rows of each pooled table and of the item table
    vocabulary: int | None = 100  # ids in use per table, spread over its rows; None: all rows
    popularity: float = 1.0  # Zipf exponent of the ids
    multi_hot: int = 3  # the last pooled table has 0 .. multi_hot ids per row, the others exactly one
    classes: int = 2
    actions: int = 4
    users: int = 1000
    events: dict[str, SyntheticEventConfig] = field(default_factory=dict)
    lengths: LengthConfig = field(default_factory=LengthConfig)
    static_weight: float = 1.5
    bias: float = -0.5
    train_rows: int = 524_288
    validation_rows: int = 8_192
    test_rows: int = 32_768
    bayes_rows: int = 131_072
    seed: int = 0
    pool: int | None = None  # rotate this many training batches instead of making new ones


@dataclass
class MovieLensConfig(LoaderConfig):
    _target_: str = "recsys_norm.data.movielens.MovieLens"
    _convert_: str = "object"
    path: str | None = None  # a folder or a ratings file; None: the copy inside an installed recbole wheel
    max_len: int = 100
    features: list[str] = field(default_factory=lambda: ["genre", "year"])  # pooled id features, see `movielens`
    min_rating: float = 4.0  # the label is rating >= min_rating
    strict_history: bool = False  # only events with a strictly earlier timestamp
    statistics: str = "none"  # none | online: dense features computed from earlier rows
    train_share: float = 0.8
    validation_share: float = 0.1


def register(config_store: Any) -> None:
    """Store the structured configs; yaml files refer to them as `base_synthetic` and `base_movielens`."""
    config_store.store(group="data", name="base_synthetic", node=SyntheticConfig)
    config_store.store(group="data", name="base_movielens", node=MovieLensConfig)
