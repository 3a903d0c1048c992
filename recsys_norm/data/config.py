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
    damaged: str = "raise"  # raise | skip: what a damaged row of the ratings does
    strict_history: bool = False  # only events with a strictly earlier timestamp
    history_dropout: float = 0.0  # share of a history's events, drawn anew each epoch, that training does not see
    statistics: str = "none"  # none | online | collaborative: dense features computed from earlier rows
    train_share: float = 0.8
    validation_share: float = 0.1


@dataclass
class SequenceConfig:
    """A sequence in list columns of a Parquet file, oldest event first; `action` and `time` are optional.

    Its items look up `table`; with the name "item" (the default) they share it with `columns.item`.
    """

    item: str = MISSING
    action: str | None = None
    time: str | None = None
    max_len: int | None = None  # the latest so many events are used; None: data.max_len
    table: str = "item"


@dataclass
class ColumnsConfig:
    """Which columns of a Parquet file are what.

    label: a column, or a list of columns (tasks; the first one is the main task).
    user_id: for metrics per user, histories and data.split=last_out. item: the candidate that is ranked.
    timestamp: of the row; a number in `time_unit`, or an Arrow timestamp. action: what the user did with the item, for
        histories. weight: of the row in the loss and in the metrics.
    dense: numbers; empty fields become the mean. sparse: ids, one or (list columns) any number per row.
    """

    label: Any = None
    user_id: str | None = None
    timestamp: str | None = None
    item: str | None = None
    action: str | None = None
    weight: str | None = None
    dense: list[str] = field(default_factory=list)
    sparse: list[str] = field(default_factory=list)
    sequences: dict[str, SequenceConfig] = field(default_factory=dict)
    time_unit: str = "s"  # s | ms | us | ns


@dataclass
class TableConfig:
    """How the values of one table become ids; what is None is taken from the data set."""

    encoding: str | None = None  # vocabulary | hash
    rows: int | None = None  # of the table: with a hash exactly, with a vocabulary at most
    min_count: int | None = None


@dataclass
class HistoryConfig:
    """A user's own earlier rows as a sequence of events.

    enabled: None is "where the columns allow it and there are no list columns".
    event: the name of the sequence, which the model needs sizes for.
    strict: only rows of an earlier timestamp; otherwise also rows of the same time that come earlier in the files.
    """

    enabled: bool | None = None
    event: str = "long"
    strict: bool = True


@dataclass
class FilesConfig:
    """For split=files: a file, a folder, a pattern, or a list of them, per split."""

    train: Any = None
    validation: Any = None
    test: Any = None


@dataclass
class LogConfig(LoaderConfig):
    """Logs in files; see `logs`. What changes the prepared data is in the first part, the rest is free to change."""

    _target_: str = "recsys_norm.data.logs.Logs"
    _convert_: str = "object"
    format: str = MISSING  # parquet | criteo | kuairand | recbole
    path: Any = None  # a file, a folder, a pattern, or a list of them
    files: FilesConfig = field(default_factory=FilesConfig)
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)  # parquet
    tasks: list[str] = field(default_factory=lambda: ["is_click", "long_view", "is_like"])  # kuairand
    label_threshold: float | None = None  # the label is column >= label_threshold; None: it holds 0 and 1
    split: str = "time"  # time | order (of the files) | last_out (by user) | files
    train_share: float = 0.8
    validation_share: float = 0.1
    max_len: int = 100
    history: HistoryConfig = field(default_factory=HistoryConfig)
    encoding: str = "vocabulary"  # vocabulary (of the training split) | hash
    hash_rows: int = 1_000_000
    min_count: int = 1  # rarer values share id 0 with unknown ones
    tables: dict[str, TableConfig] = field(default_factory=dict)
    vocabulary: str | None = None  # a run directory whose vocabularies and dense statistics are used
    log_dense: bool = False  # sign(x) * log(1 + |x|)
    negative_rate: float = 1.0  # share of the negative training rows (of the main task) that are kept
    damaged: str = "skip"  # skip | raise
    buffer_bytes: int = 4 << 20  # of a text file in memory at a time; a line has to fit
    buffer_rows: int = 8_192  # of a Parquet file, or of a prepared column, in memory at a time

    standardize: bool = True  # dense features by mean and deviation of the training split; empty ones become 0
    negative_correction: str = "logit"  # logit | weight | none: how predictions stay calibrated, see `logs`
    shuffle_rows: int = 262_144  # training rows are shuffled in windows of so many rows, and the windows' parts anew
    cache: str | None = None  # folder for prepared data; None: ~/.cache/recsys_norm


def register(config_store: Any) -> None:
    """Store the structured configs; yaml files refer to them as `base_synthetic`, `base_movielens`, `base_log`."""
    config_store.store(group="data", name="base_synthetic", node=SyntheticConfig)
    config_store.store(group="data", name="base_movielens", node=MovieLensConfig)
    config_store.store(group="data", name="base_log", node=LogConfig)
