"""Logs in files as a ranking data set: Criteo, KuaiRand, Parquet with a schema in the config, RecBole's `.inter`.

The files are read once (see `prepare`) into columns on disk, which every later run with the same files and settings
uses again. Batches are cut from memory maps of those columns: files may be larger than memory, resume is exact, and
any worker or rank can make any batch.

Training order: the split is cut into parts, the parts are put in a new order each epoch, and the rows of each
`shuffle_rows` consecutive ones are shuffled. With no more than `shuffle_rows` rows every order is possible.

With `negative_rate` r < 1, training sees all positives and a share r of the negatives of the main task. `logit` adds
log(1 / r) to the training logits, so that the model's own logits belong to the whole data; `weight` gives the kept
negatives the weight 1 / r, which is right for several tasks, too; `none` leaves predicted odds 1 / r times too high.
"""

from __future__ import annotations

import dataclasses
import filecmp
import logging
import math
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recsys_norm.data.batch import Batch, jagged
from recsys_norm.data.config import LogConfig
from recsys_norm.data.errors import DataError, damage
from recsys_norm.data.loader import Loader
from recsys_norm.data.schema import Event, IdFeature, Schema, Table
from recsys_norm.data.store import Store, default_folder, fingerprint, obtain

log = logging.getLogger(__name__)
SPLITS = ("train", "validation", "test")
CANDIDATE = "candidate.item"
PARTS = 16  # of a shuffle window
# Settings that batches are made with; all others decide what is prepared.
FREE = {"batch_size", "eval_batch_size", "num_workers", "prefetch", "standardize", "negative_correction"}
FREE |= {"shuffle_rows", "cache", "_target_", "_convert_"}


class Logs:
    """Data module. Options are the fields of `LogConfig`.

    Raises DataError (a ValueError) for files and settings that cannot work, TypeError for unknown options.
    """

    def __init__(self, **options: Any) -> None:
        self.config = LogConfig(**options)
        _check(self.config)
        from recsys_norm.data.formats import open_source  # needs pyarrow, which reading a prepared folder does not

        source = open_source(self.config)
        _check_columns(self.config, source)
        settings = {k: v for k, v in dataclasses.asdict(self.config).items() if k not in FREE}
        folder = Path(self.config.cache).expanduser() if self.config.cache else default_folder()
        self.store = obtain(folder / fingerprint(settings, source.paths()), lambda place: self._prepare(source, place))
        self._report_damage()

    def _prepare(self, source: Any, folder: Path) -> None:
        from recsys_norm.data.prepare import Preparation

        log.info(f"reading {len(source.files)} file(s), the first is {source.files[0][0]}")
        Preparation(self.config, source, folder).run()

    def _report_damage(self) -> None:
        if self.store.facts["damaged"]:
            log.warning(damage(self.store.facts["damaged"], self.store.facts["damaged_first"]))

    @cached_property
    def schema(self) -> Schema:
        """Pooled features have tables of their own; the item shares `item` with the events."""
        facts = self.store.facts
        columns = facts["columns_of"]
        sparse = [IdFeature(name, facts["pooled"][name]) for name in facts["singles"] + facts["bags"]]
        events = []
        for name, tables in facts["events"].items():
            fields = zip(("item", "action"), tables, strict=False)
            max_len = columns["sequences"].get(name, {}).get("max_len", self.config.max_len)
            events.append(Event(name, tuple(IdFeature(f"{name}.{f}", table) for f, table in fields), max_len))
        rate, sampled = self.config.negative_rate, self.config.negative_correction == "logit"
        return Schema(
            dense=len(columns["dense"]),
            sparse=tuple(sparse),
            candidates=(IdFeature(CANDIDATE, "item"),) if columns["item"] else (),
            events=tuple(events),
            tables=tuple(Table(name, rows) for name, rows in facts["tables"].items()),
            tasks=tuple(columns["label"]),
            base_rate=facts["base_rates"][0],
            logit_shift=-math.log(rate) if sampled and rate < 1 else 0.0,
        )

    def train_loader(
        self, *, rank: int = 0, world_size: int = 1, seed: int = 0, epoch: int = 0, pin_memory: bool | None = None
    ) -> Loader:
        """Batches of the training split in an order that `seed` and the epoch decide."""
        return self._loader("train", self.config.batch_size, rank, world_size, pin_memory, seed=seed, epoch=epoch)

    def eval_loader(self, split: str, *, rank: int = 0, world_size: int = 1, pin_memory: bool | None = None) -> Loader:
        """Batches of the "validation" or "test" split in the order of the files; the last one may be smaller."""
        if split not in SPLITS[1:]:
            raise ValueError(f"split must be one of {sorted(SPLITS[1:])}, got {split!r}")
        batch_size = self.config.eval_batch_size or self.config.batch_size
        return self._loader(split, batch_size, rank, world_size, pin_memory)

    def describe(self) -> dict[str, Any]:
        """Facts for logs: rows per split, share of positive labels, damaged rows, where the prepared data lies."""
        facts = self.store.facts
        described: dict[str, Any] = {f"{split}_rows": facts["rows"][split] for split in SPLITS}
        described |= {"base_rate": self.schema.base_rate, "damaged_rows": sum(facts["damaged"].values())}
        if self.config.negative_rate < 1:
            described["sampled_train_rows"] = facts["columns"]["rows/train"]["rows"]
        return described | {"prepared": str(self.store.folder)}

    def save(self, folder: Path) -> None:
        """Write vocabularies, dense statistics and the list of damaged rows into a run's folder. Where a run that is
        continued has them already, they have to be the same.

        Raises DataError naming what differs.
        """
        source, target = self.store.folder / "vocabulary", folder / "vocabulary"
        if target.is_dir():
            names = sorted({path.name for place in (source, target) for path in place.iterdir()})
            _, differ, missing = filecmp.cmpfiles(source, target, names, shallow=False)
            if differ or missing:
                raise DataError(
                    f"{', '.join(sorted(differ + missing))} in {target} is not what the data gives now; "
                    "continue with the files and data settings of the run that wrote it"
                )
            return
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy2(self.store.folder / "damaged.jsonl", folder)
        shutil.copytree(source, folder / ".vocabulary", dirs_exist_ok=True)
        (folder / ".vocabulary").rename(target)

    def _loader(self, split, batch_size, rank, world_size, pin_memory, *, seed=None, epoch=0) -> Loader:
        return Loader(
            LogRows(self.store, self.config, self.schema, split, seed),
            batch_size,
            rank=rank,
            world_size=world_size,
            epoch=epoch,
            advance=split == "train",
            num_workers=self.config.num_workers,
            prefetch=self.config.prefetch,
            pin_memory=pin_memory,
        )


class LogRows:
    """Rows of one split, in the order of the files or, with a seed, shuffled anew each epoch; see `loader.Rows`."""

    def __init__(self, store: Store, config: LogConfig, schema: Schema, split: str, seed: int | None = None) -> None:
        facts = store.facts
        self.store = store
        self.split = split
        self.seed = seed
        self.window = config.shuffle_rows
        self.tables = {feature.name: feature.table for feature in schema.sparse + schema.ids}
        self.singles, self.bags, self.item = facts["singles"], facts["bags"], bool(schema.candidates)
        self.events = [(event.name, [field.name for field in event.fields]) for event in schema.events]
        width = len(facts["dense_mean"])
        self.mean = np.array(facts["dense_mean"] if config.standardize else [0.0] * width, dtype=np.float32)
        self.scale = np.array(facts["dense_deviation"] if config.standardize else [1.0] * width, dtype=np.float32)
        weighted = split == "train" and config.negative_correction == "weight"
        self.negative_weight = 1 / config.negative_rate if weighted else 1.0
        self._window: tuple[tuple[int, int], np.ndarray] | None = None

    def __len__(self) -> int:
        return self.store.facts["columns"][f"rows/{self.split}"]["rows"]

    def fetch(self, epoch: int, begin: int, end: int) -> Batch:
        store, n = self.store, end - begin
        row = self._order(epoch, begin, end)
        at = store[f"rows/{self.split}"][row]
        label = store["label"][at]
        single = store["single"][at]
        one = np.ones(n, dtype=np.int64)
        sparse = {name: (self._ids(name, single[:, i]), one) for i, name in enumerate(self.singles)}
        for name in self.bags:
            place, length = self._places(f"bag/{name}", at)
            sparse[name] = self._ids(name, store[f"bag/{name}"][place]), length
        ids, ages = {}, {}
        if self.item:
            ids[CANDIDATE] = self._ids(CANDIDATE, single[:, -1]), one
        for name, fields in self.events:
            place, length = self._places(f"event/{name}", at)
            for field in fields:
                ids[field] = self._ids(field, store[f"event/{name}/{field.rpartition('.')[2]}"][place]), length
            ages[name] = torch.from_numpy(self._ages(name, at, place, length))
        return Batch(
            dense=torch.from_numpy(self._dense(at)),
            sparse=jagged(sparse, n),
            ids=jagged(ids, n) if ids else None,
            ages=ages,
            label=torch.from_numpy(label),
            user_id=torch.from_numpy(store["user"][at]) if "user" in store else None,
            weight=self._weight(at, label),
            row=torch.from_numpy(row),
        )

    def _ids(self, feature: str, codes: np.ndarray) -> np.ndarray:
        name = f"ids/{self.tables[feature]}"
        return self.store[name][codes] if name in self.store else codes

    def _places(self, name: str, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        begin, length = self.store[f"{name}/begin"][at], self.store[f"{name}/length"][at].astype(np.int64)
        return np.repeat(begin - (np.cumsum(length) - length), length) + np.arange(int(length.sum())), length

    def _ages(self, name: str, at: np.ndarray, place: np.ndarray, length: np.ndarray) -> np.ndarray:
        if f"event/{name}/age" in self.store:
            return self.store[f"event/{name}/age"][place]
        age = np.repeat(self.store["time"][at], length) - self.store[f"event/{name}/time"][place]
        return age.astype(np.float32)

    def _dense(self, at: np.ndarray) -> np.ndarray:
        return np.nan_to_num((self.store["dense"][at] - self.mean) / self.scale, copy=False, nan=0.0)

    def _weight(self, at: np.ndarray, label: np.ndarray) -> torch.Tensor | None:
        if "weight" not in self.store and self.negative_weight == 1.0:
            return None
        weight = self.store["weight"][at] if "weight" in self.store else np.ones(len(at), dtype=np.float32)
        return torch.from_numpy(np.where(label[:, 0] > 0, weight, weight * np.float32(self.negative_weight)))

    def _order(self, epoch: int, begin: int, end: int) -> np.ndarray:
        """Row numbers, within the split, at positions begin .. end - 1 of the epoch's order."""
        if self.seed is None:
            return np.arange(begin, end)
        size = max(self.window // PARTS, 1) * PARTS
        found = []
        for window in range(begin // size, -(-end // size)):
            rows = self._rows_of(epoch, window, size)
            found.append(rows[max(begin - window * size, 0) : end - window * size])
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def _rows_of(self, epoch: int, window: int, size: int) -> np.ndarray:
        """Rows of a shuffle window. A short last part keeps its place at the end, so that windows have a fixed size."""
        if self._window is None or self._window[0] != (epoch, window):
            n, part = len(self), size // PARTS
            order = np.random.default_rng([self.seed, epoch]).permutation(n // part)
            if n % part:
                order = np.append(order, n // part)
            chosen = order[window * PARTS : (window + 1) * PARTS]
            rows = (chosen[:, None] * part + np.arange(part)).ravel()
            rows = np.random.default_rng([self.seed, epoch, window]).permutation(rows[rows < n])
            self._window = (epoch, window), rows
        return self._window[1]


def _check(config: LogConfig) -> None:
    choices = {
        "split": ("time", "order", "last_out", "files"),
        "damaged": ("skip", "raise"),
        "negative_correction": ("logit", "weight", "none"),
    }
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise DataError(f"data.{name} must be one of {', '.join(allowed)}, got {getattr(config, name)!r}")
    if config.columns.time_unit not in ("s", "ms", "us", "ns"):
        raise DataError(f"data.columns.time_unit must be s, ms, us or ns, got {config.columns.time_unit!r}")
    for name in ("batch_size", "max_len", "min_count", "buffer_bytes", "buffer_rows", "shuffle_rows"):
        if getattr(config, name) < 1:
            raise DataError(f"data.{name} must be at least 1, got {getattr(config, name)}")
    if not 0 < config.negative_rate <= 1:
        raise DataError(f"data.negative_rate must be above 0 and at most 1, got {config.negative_rate}")
    shares = config.train_share, config.validation_share
    if config.split in ("time", "order") and (min(shares) <= 0 or sum(shares) >= 1):
        raise DataError(f"data.train_share and data.validation_share must leave rows for the test, got {shares}")


def _check_columns(config: LogConfig, source: Any) -> None:
    columns = source.columns
    if config.split == "time" and columns.timestamp is None:
        raise DataError("data.split=time needs a timestamp column; without one use data.split=order or files")
    if config.split == "last_out" and columns.user_id is None:
        raise DataError("data.split=last_out needs a column of user ids; without one use time, order or files")
    if config.negative_rate < 1 and len(columns.label) > 1 and config.negative_correction == "logit":
        raise DataError(
            f"data.negative_correction=logit is for one task and the tasks are {', '.join(columns.label)}: leaving out "
            f"negatives of {columns.label[0]!r} shifts the others, too; use data.negative_correction=weight"
        )
