"""MovieLens as a ranking data set: will this user like this film, given what the user rated before?

label = rating >= min_rating. All interactions are put in time order (ties keep the order of the file); the first 80%
are for training, the next 10% for validation, the last 10% for the test. The history of a row holds the same user's
earlier interactions with their ratings, the latest `max_len` of them, oldest first; it crosses the borders of the
splits, as it would in service. With `strict_history` only events with an earlier timestamp count.

Ids that the training split lacks share id 0 of their table. `statistics` adds dense features, each computed from
earlier rows only: "online" those of `movielens_statistics`, "collaborative" also those of `movielens_collaborative`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch

from recsys_norm.data.batch import Batch, jagged
from recsys_norm.data.config import MovieLensConfig
from recsys_norm.data.loader import Loader
from recsys_norm.data.movielens_collaborative import LIKE, collaborative_statistics, content_of
from recsys_norm.data.movielens_files import Interactions, Item, locate, read
from recsys_norm.data.movielens_statistics import STATISTICS, online_statistics
from recsys_norm.data.schema import Event, IdFeature, Schema, Table

SPLITS = ("train", "validation", "test")
FEATURES = ("user", "age", "gender", "occupation", "zip", "genre", "year")
RATING_LEVELS = 11  # half stars from 0 to 5
EVENT = "long"  # the event type whose sizes the models define


class MovieLens:
    """Data module. Options are the fields of `MovieLensConfig`.

    Raises FileNotFoundError without a copy of the data (naming the command that fetches one), ValueError for damaged
    files and options outside their limits, TypeError for unknown options.
    """

    def __init__(self, **options: Any) -> None:
        self.config = MovieLensConfig(**options)
        _check(self.config)
        self.path = locate(self.config.path)
        self.columns = Columns(read(self.path, self.config.damaged), self.config)

    @cached_property
    def schema(self) -> Schema:
        columns, train = self.columns, self.columns.bounds["train"]
        tables = [Table(name, rows) for name, (rows, *_) in columns.sparse.items()]
        return Schema(
            dense=columns.dense.shape[1],
            sparse=tuple(IdFeature(name, name) for name in columns.sparse),
            candidates=(IdFeature("candidate.item", "item"),),
            events=(
                Event(
                    EVENT,
                    (IdFeature(f"{EVENT}.item", "item"), IdFeature(f"{EVENT}.rating", "rating")),
                    self.config.max_len,
                ),
            ),
            tables=(*tables, Table("item", columns.items), Table("rating", RATING_LEVELS)),
            base_rate=float(columns.label[slice(*train)].mean()),
        )

    def train_loader(
        self, *, rank: int = 0, world_size: int = 1, seed: int = 0, epoch: int = 0, pin_memory: bool | None = None
    ) -> Loader:
        """Batches of the training split in an order that `seed` and the epoch decide."""
        return self._loader("train", self.config.batch_size, rank, world_size, pin_memory, seed=seed, epoch=epoch)

    def eval_loader(self, split: str, *, rank: int = 0, world_size: int = 1, pin_memory: bool | None = None) -> Loader:
        """Batches of the "validation" or "test" split in time order; the last one may be smaller, or empty."""
        if split not in SPLITS[1:]:
            raise ValueError(f"split must be one of {sorted(SPLITS[1:])}, got {split!r}")
        batch_size = self.config.eval_batch_size or self.config.batch_size
        return self._loader(split, batch_size, rank, world_size, pin_memory)

    def describe(self) -> dict[str, Any]:
        """Facts for logs: rows per split, share of positive labels, users and items, file."""
        bounds = self.columns.bounds
        facts: dict[str, Any] = {f"{split}_rows": end - begin for split, (begin, end) in bounds.items()}
        facts |= {"base_rate": self.schema.base_rate, "users": len(np.unique(self.columns.user))}
        facts |= {"items": len(np.unique(self.columns.raw_item)), "path": str(self.path)}
        return facts

    def _loader(self, split, batch_size, rank, world_size, pin_memory, *, seed=None, epoch=0) -> Loader:
        return Loader(
            MovieLensRows(self.columns, split, seed, 0.0 if seed is None else self.config.history_dropout),
            batch_size,
            rank=rank,
            world_size=world_size,
            epoch=epoch,
            advance=split == "train",
            num_workers=self.config.num_workers,
            prefetch=self.config.prefetch,
            pin_memory=pin_memory,
        )


class Columns:
    """All interactions in time order, as arrays; the history of row i is `by_user[history_begin[i]:history_end[i]]`."""

    def __init__(self, data: Interactions, config: MovieLensConfig) -> None:
        order = np.argsort(data.time, kind="stable")
        self.user, self.raw_item = data.user[order], data.item[order]
        self.rating, self.time = data.rating[order], data.time[order]
        self.label = (self.rating >= config.min_rating).astype(np.float32)
        n = len(order)
        ends = [int(n * config.train_share), int(n * (config.train_share + config.validation_share)), n]
        self.bounds = dict(zip(SPLITS, zip([0, *ends], ends, strict=False), strict=True))
        for split, (begin, end) in self.bounds.items():
            if begin == end:
                raise ValueError(f"data.path: {n} interactions leave no row for the {split} split")
        self.item, self.items = _encode(self.raw_item, ends[0])
        self.level = np.clip(np.rint(self.rating * 2), 0, RATING_LEVELS - 1).astype(np.int64)
        self._find_histories(config)
        self.sparse = self._sparse_features(data, config.features, ends[0])
        self.dense = self._statistics(data, config)

    def _find_histories(self, config: MovieLensConfig) -> None:
        self.by_user = np.argsort(self.user, kind="stable")
        end = np.empty(len(self.user), dtype=np.int64)
        end[self.by_user] = np.arange(len(end))  # the place of a row in by_user is where its history ends
        user, time = self.user[self.by_user], self.time[self.by_user]
        if config.strict_history:
            first = np.concatenate([[True], (user[1:] != user[:-1]) | (time[1:] != time[:-1])])
            end = np.maximum.accumulate(np.where(first, np.arange(len(user)), 0))[end]
        start = np.searchsorted(user, self.user)  # where the user's rows begin
        self.history_end = end
        self.history_begin = np.maximum(start, end - config.max_len)

    def _statistics(self, data: Interactions, config: MovieLensConfig) -> np.ndarray:
        if config.statistics == "none":
            return np.empty((len(self.user), 0), dtype=np.float32)
        strict = config.strict_history
        features = online_statistics(self.user, self.raw_item, self.label, self.time, strict=strict)
        if config.statistics == "online":
            return features
        user = np.unique(self.user, return_inverse=True)[1]
        raw, item = np.unique(self.raw_item, return_inverse=True)
        content = content_of([data.items.get(i, Item()) for i in raw.tolist()])
        targets = self.rating, LIKE * self.label
        more = [collaborative_statistics(user, item, target, self.time, content, strict=strict) for target in targets]
        return np.concatenate([features, *more], 1)

    def _sparse_features(
        self, data: Interactions, wanted: list[str], n_train: int
    ) -> dict[str, tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """name -> (rows of the table, ids, begin, length): ids[begin[i] : begin[i] + length[i]] belong to row i."""
        features = {}
        for name in wanted:
            if name == "user":
                ids, rows = _encode(self.user, n_train)
            elif name == "year":
                years = np.array([data.items[i].year or 0 if i in data.items else 0 for i in self.raw_item.tolist()])
                ids, rows = _encode(years, n_train)
            elif name == "genre":
                features |= self._genres(data, n_train)
                continue
            else:
                ids, rows = _encode(_user_column(data, name, self.user), n_train)
            if rows > 2:  # one known value carries nothing
                features[name] = rows, ids, np.arange(len(ids)), np.ones(len(ids), dtype=np.int64)
        return features

    def _genres(self, data: Interactions, n_train: int) -> dict[str, tuple]:
        raw, place = np.unique(self.raw_item, return_inverse=True)
        genres = [data.items[i].genres if i in data.items else () for i in raw.tolist()]
        known = sorted({genre for i in np.unique(place[:n_train]).tolist() for genre in genres[i]})
        if len(known) < 2:
            return {}
        code = {genre: 1 + i for i, genre in enumerate(known)}
        ids = np.array([code.get(genre, 0) for entry in genres for genre in entry], dtype=np.int64)
        length = np.array([len(entry) for entry in genres], dtype=np.int64)
        return {"genre": (1 + len(known), ids, (np.cumsum(length) - length)[place], length[place])}


class MovieLensRows:
    """Rows of one split, in time order or, with a seed, shuffled anew each epoch; see `loader.Rows`.

    history_dropout: share of the events to leave out, which a seed, the epoch and the position decide.
    """

    def __init__(self, columns: Columns, split: str, seed: int | None = None, history_dropout: float = 0.0) -> None:
        self.columns = columns
        self.begin, self.end = columns.bounds[split]
        self.seed = seed
        self.history_dropout = history_dropout
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.end - self.begin

    def fetch(self, epoch: int, begin: int, end: int) -> Batch:
        columns, n = self.columns, end - begin
        row = self._rows(epoch, begin, end)
        at = self.begin + row
        events, lengths = ranges(columns.history_begin[at], columns.history_end[at] - columns.history_begin[at])
        if self.history_dropout:
            random = np.random.default_rng([self.seed, epoch, begin, 1])
            kept = random.random(len(events)) >= self.history_dropout
            lengths = np.bincount(np.repeat(np.arange(n), lengths)[kept], minlength=n)
            events = events[kept]
        events = columns.by_user[events]
        sparse = {}
        for name, (_, ids, first, length) in columns.sparse.items():
            sparse[name] = ids[ranges(first[at], length[at])[0]], length[at]
        age = np.repeat(columns.time[at], lengths) - columns.time[events]
        return Batch(
            dense=torch.from_numpy(columns.dense[at]),
            sparse=jagged(sparse, n),
            ids=jagged(
                {
                    "candidate.item": (columns.item[at], np.ones(n, dtype=np.int64)),
                    f"{EVENT}.item": (columns.item[events], lengths),
                    f"{EVENT}.rating": (columns.level[events], lengths),
                },
                n,
            ),
            ages={EVENT: torch.from_numpy(age.astype(np.float32))},
            label=torch.from_numpy(columns.label[at])[:, None],
            user_id=torch.from_numpy(columns.user[at]),
            row=torch.from_numpy(row),
        )

    def _rows(self, epoch: int, begin: int, end: int) -> np.ndarray:
        if self.seed is None:
            return np.arange(begin, end)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self))
        return self._order[1][begin:end]


def ranges(begin: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(begin[0] .. begin[0] + length[0] - 1, begin[1] .., ...) as one array, and the lengths."""
    shift = begin - (np.cumsum(length) - length)
    return np.repeat(shift, length) + np.arange(int(length.sum())), length


def _encode(raw: np.ndarray, n_train: int) -> tuple[np.ndarray, int]:
    """Ids 1 .. for the values of the first n_train entries, 0 for all others, and the number of ids."""
    known = np.unique(raw[:n_train])
    place = np.minimum(np.searchsorted(known, raw), len(known) - 1)
    return np.where(known[place] == raw, place + 1, 0).astype(np.int64), len(known) + 1


def _user_column(data: Interactions, name: str, user: np.ndarray) -> np.ndarray:
    """A property per row as text; ages by decade, zip codes by region (the first digit)."""
    values = {}
    for raw, known in data.users.items():
        value = known.get(name, "")
        values[raw] = (
            f"{int(value) // 10}" if name == "age" and value.isdigit() else value[:1] if name == "zip" else value
        )
    return np.array([values.get(raw, "") for raw in user.tolist()])


def _check(config: MovieLensConfig) -> None:
    if config.damaged not in ("raise", "skip"):
        raise ValueError(f"data.damaged must be raise or skip, got {config.damaged!r}")
    if config.statistics not in STATISTICS:
        raise ValueError(f"data.statistics must be one of {', '.join(STATISTICS)}, got {config.statistics!r}")
    unknown = [name for name in config.features if name not in FEATURES]
    if unknown:
        raise ValueError(f"data.features: {unknown} are unknown, choose from {', '.join(FEATURES)}")
    for name in ("batch_size", "max_len"):
        if getattr(config, name) < 1:
            raise ValueError(f"data.{name} must be at least 1, got {getattr(config, name)}")
    if not 0 <= config.history_dropout < 1:
        raise ValueError(f"data.history_dropout must lie in [0, 1), got {config.history_dropout}")
    shares = config.train_share, config.validation_share
    if min(shares) <= 0 or sum(shares) >= 1:
        raise ValueError(f"data.train_share and data.validation_share must leave rows for the test, got {shares}")
