"""Reads a log once and leaves what training needs on disk: checked columns, splits, histories, vocabularies.

Everything streams: a block of the files, or a slice of a column, is in memory at a time. What grows with the data is
the vocabularies (with their distinct values), and the row numbers of a shuffle window.

Columns of the store, n rows in the order of the files:
    label [n, tasks], dense [n, dense] (NaN: empty), user [n], time [n], weight [n]
    single [n, features]      codes of the sparse features with one value, then the item
    bag/<name> [values]       codes of a sparse feature with many, with bag/<name>/begin and /length [n]
    event/<name>/item, /action [events], and /age or /time; with event/<name>/begin and /length [n]
    rows/<split>              the rows of a split;  ids/<table>: codes to ids, for a vocabulary
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from recsys_norm.data import splits
from recsys_norm.data.blocks import pa
from recsys_norm.data.config import LogConfig
from recsys_norm.data.encode import Encoder
from recsys_norm.data.errors import Damaged, DataError
from recsys_norm.data.formats import SPLITS, Source
from recsys_norm.data.parse import Parsed, parse
from recsys_norm.data.splits import MIX, pieces
from recsys_norm.data.store import Writer

log = logging.getLogger(__name__)
ITEM, ACTION = "item", "action"  # tables of the item and of the actions of histories


class Preparation:
    """One pass over `source` into `folder`."""

    def __init__(self, config: LogConfig, source: Source, folder: Path) -> None:
        self.config = config
        self.source = source
        self.folder = folder
        self.columns = source.columns
        self.writer = Writer(folder)
        self.damaged = Damaged(config.damaged == "raise")
        self.encoders: dict[str, Encoder] = {}
        self.pooled = self._pooled_tables()
        self.lists: dict[str, bool] = {}  # sparse column -> whether it holds any number of ids per row
        self.size = config.buffer_rows
        self.events: dict[str, list[str]] = {}  # sequence -> tables of its fields
        self.rows = 0
        self._maps: dict[str, np.ndarray] = {}

    def run(self) -> None:
        try:
            self._read()
            split = self._split()
            facts = self._facts(split)
            self._save_vocabularies(facts)
            self.writer.close(facts)
        except BaseException:
            self.writer.abandon()
            raise

    # -- reading

    def _read(self) -> None:
        config, begin = self.config, {}
        for block, part in self.source.blocks(self.damaged, config.buffer_bytes, config.buffer_rows):
            rows = parse(block, self.columns, log_dense=config.log_dense)
            if len(rows):
                self._write(rows, begin)
                if part is not None:
                    self.writer.append("split", np.full(len(rows), SPLITS.index(part), dtype=np.uint8))
                self.rows += len(rows)
        if self.rows == 0:
            first = f"; the first: {self.damaged.rows[0]}" if self.damaged.rows else ""
            raise DataError(f"data.path: all {self.damaged.total} rows are damaged{first}")

    def _write(self, rows: Parsed, begin: dict[str, int]) -> None:
        append, n = self.writer.append, len(rows)
        append("label", rows.label)
        append("dense", rows.dense)
        for name in ("user", "time", "weight"):
            if getattr(rows, name) is not None:
                append(name, getattr(rows, name))
        single = []
        for name, (values, length) in rows.sparse.items():
            if self.lists.setdefault(name, length is not None) != (length is not None):
                raise DataError(f"column {name!r} holds lists in one file and single values in another")
            codes = self._encode(self.pooled[name], values)
            if length is None:
                single.append(codes)
            else:
                self._append_lists(f"bag/{name}", {"": codes}, length, begin)
        if rows.item is not None:
            single.append(self._encode(ITEM, rows.item))
        append("single", np.stack(single, 1) if single else np.empty((n, 0), dtype=np.int32))
        if self.keeps_history:
            append("action", self._actions(rows))
        for name, events in rows.events.items():
            of = self.columns.sequences[name]
            fields = {"/item": self._encode(of.table, events.item), "/age": events.age}
            self.events[name] = [of.table]
            if events.action is not None:
                self.events[name].append(f"{name}_action")
                fields["/action"] = self._encode(f"{name}_action", events.action)
            self._append_lists(f"event/{name}", fields, events.length, begin)

    def _append_lists(
        self, name: str, fields: dict[str, np.ndarray], length: np.ndarray, begin: dict[str, int]
    ) -> None:
        start = begin.get(name, 0)
        self.writer.append(f"{name}/begin", start + np.cumsum(length) - length)
        self.writer.append(f"{name}/length", length.astype(np.int32))
        begin[name] = start + int(length.sum())
        for field, values in fields.items():
            self.writer.append(name + field, values)

    def _actions(self, rows: Parsed) -> np.ndarray:
        if rows.action is not None:
            return self._encode(ACTION, rows.action)
        # Which of the labels are set, one bit each; 0 stays free for "unknown".
        return 1 + (rows.label.astype(np.int32) << np.arange(rows.label.shape[1], dtype=np.int32)).sum(
            1, dtype=np.int32
        )

    def _encode(self, table: str, values: pa.Array) -> np.ndarray:
        return self._encoder(table).encode(values)

    def _encoder(self, table: str) -> Encoder:
        if table not in self.encoders:
            config = self.config
            given = config.tables.get(table)
            encoding = (given and given.encoding) or config.encoding
            rows = (given and given.rows) or (config.hash_rows if encoding == "hash" else None)
            encoder = Encoder(table, encoding, rows, (given and given.min_count) or config.min_count)
            if config.vocabulary:
                encoder.load(vocabulary_folder(config.vocabulary))
            self.encoders[table] = encoder
        return self.encoders[table]

    @property
    def keeps_history(self) -> bool:
        return keeps_history(self.config, self.source)

    def _pooled_tables(self) -> dict[str, str]:
        """sparse column -> its table: TorchRec takes no dots, and sequences have tables of their own."""
        taken = {of.table for of in self.columns.sequences.values()}
        taken |= {f"{name}_action" for name in self.columns.sequences}
        taken |= {ITEM} if self.columns.item else set()
        taken |= {ACTION} if self.keeps_history else set()
        tables: dict[str, str] = {}
        for name in self.columns.sparse:
            table = name.replace(".", "_")
            while table in taken:
                table += "_pooled"
            taken.add(table)
            tables[name] = table
        return tables

    # -- splits and histories

    def _split(self) -> np.ndarray:
        """Split of each row, and the histories where they are a user's own rows."""
        config, writer = self.config, self.writer
        shares = config.train_share, config.validation_share
        time = writer.flush("time") if "time" in writer.columns else None
        if config.split == "files":
            split = writer.flush("split")
        elif config.split == "time":
            split = splits.write_split(writer, splits.by_time(time, shares, self.size))
        elif config.split == "order":
            split = splits.write_split(writer, splits.by_order(self.rows, shares, self.size))
        else:
            zeros = (np.zeros(p.stop - p.start, dtype=np.uint8) for p in pieces(self.rows, self.size))
            split = splits.write_split(writer, zeros)
        if config.split == "last_out" or self.keeps_history:
            self._by_user(split, time)
        return split

    def _by_user(self, split: np.ndarray, time: np.ndarray | None) -> None:
        config, writer, name = self.config, self.writer, f"event/{self.config.history.event}"
        if self.keeps_history:
            for part in pieces(self.rows, self.size):
                writer.append(f"{name}/begin", np.zeros(part.stop - part.start, dtype=np.int64))
                writer.append(f"{name}/length", np.zeros(part.stop - part.start, dtype=np.int32))
            begin, length = writer.flush(f"{name}/begin"), writer.flush(f"{name}/length")
            single, action = writer.flush("single"), writer.flush("action")
            self.events[config.history.event] = [ITEM, ACTION]
        first = 0
        for row, user, at in splits.users(self.folder, writer.flush("user"), time, max(self.size, 1 << 10)):
            if config.split == "last_out":
                splits.by_last(split, row, user)
            if self.keeps_history:
                start, end = splits.history(row, user, at, config.history.strict)
                start = np.maximum(start, end - config.max_len)
                begin[row], length[row] = first + start, end - start
                writer.append(f"{name}/item", single[row, -1])
                writer.append(f"{name}/action", action[row])
                writer.append(f"{name}/time", at)
                first += len(row)

    # -- what depends on the training split

    def _facts(self, split: np.ndarray) -> dict[str, Any]:
        label, dense = self.writer.flush("label"), self.writer.flush("dense")
        tasks, width = label.shape[1], dense.shape[1]
        rows, positive = [0, 0, 0], np.zeros(tasks)
        total, square, known = np.zeros(width), np.zeros(width), np.zeros(width)
        counts = {t: np.zeros(len(e.codes) + 1, dtype=np.int64) for t, e in self.encoders.items() if e.fits}
        for part in pieces(self.rows, self.size):
            of = split[part]
            for index, name in enumerate(SPLITS):
                at = part.start + np.flatnonzero(of == index)
                rows[index] += len(at)
                if index == splits.TRAIN:
                    positive += label[at].sum(0)
                    values = dense[at].astype(np.float64)
                    given = ~np.isnan(values)
                    total += np.where(given, values, 0).sum(0)
                    square += np.where(given, values**2, 0).sum(0)
                    known += given.sum(0)
                    self._count(counts, at)
                    at = self._sampled(at, label)
                self.writer.append(f"rows/{name}", at)
        self._require_rows(rows, positive)
        mean = total / np.maximum(known, 1)
        deviation = np.sqrt(np.maximum(square / np.maximum(known, 1) - mean**2, 0))
        for table, count in counts.items():
            self.writer.append(f"ids/{table}", self.encoders[table].fit(count))
        return {
            "columns_of": asdict(self.columns),
            "rows": dict(zip(SPLITS, rows, strict=True)),
            "base_rates": (positive / rows[0]).tolist(),
            "dense_mean": mean.tolist(),
            "dense_deviation": np.where(deviation > 0, deviation, 1.0).tolist(),
            "pooled": self.pooled,
            "bags": [name for name, several in self.lists.items() if several],
            "singles": [name for name, several in self.lists.items() if not several],
            "events": self.events,
            "tables": {name: encoder.rows for name, encoder in self.encoders.items()} | self._action_rows(),
            "damaged": dict(self.damaged.counts),
            "damaged_first": self.damaged.rows[:5],
        }

    def _action_rows(self) -> dict[str, int]:
        made = self.keeps_history and not self.columns.action
        return {ACTION: 1 + (1 << len(self.columns.label))} if made else {}

    def _count(self, counts: dict[str, np.ndarray], at: np.ndarray) -> None:
        """Add the occurrences of codes in the training rows `at`."""
        for table, count in counts.items():
            for codes in self._codes_of(table, at):
                count += np.bincount(codes, minlength=len(count))

    def _codes_of(self, table: str, at: np.ndarray):
        flush = self._map
        names = [name for name, several in self.lists.items() if not several]
        for index, name in enumerate(names):
            if self.pooled[name] == table:
                yield flush("single")[at, index]
        if table == ITEM and self.columns.item:
            yield flush("single")[at, len(names)]
        if table == ACTION and self.keeps_history:
            yield flush("action")[at]
        for name, several in self.lists.items():
            if several and self.pooled[name] == table:
                yield flush(f"bag/{name}")[self._places(f"bag/{name}", at)]
        for name in self.columns.sequences:
            for field, of in zip(("item", "action"), self.events[name], strict=False):
                if of == table:
                    yield flush(f"event/{name}/{field}")[self._places(f"event/{name}", at)]

    def _map(self, name: str) -> np.ndarray:
        """A column that is complete."""
        if name not in self._maps:
            self._maps[name] = self.writer.flush(name)
        return self._maps[name]

    def _places(self, name: str, at: np.ndarray) -> np.ndarray:
        begin, length = self._map(f"{name}/begin")[at], self._map(f"{name}/length")[at]
        return np.repeat(begin - (np.cumsum(length) - length), length) + np.arange(int(length.sum()))

    def _sampled(self, at: np.ndarray, label: np.ndarray) -> np.ndarray:
        """The training rows without the negatives that are left out: a function of the row's number."""
        rate = self.config.negative_rate
        if rate >= 1:
            return at
        bits = (at.astype(np.uint64) + np.uint64(1)) * MIX
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        chance = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB) >> np.uint64(11)
        return at[(label[at, 0] > 0) | (chance < rate * 2.0**53)]

    def _require_rows(self, rows: list[int], positive: np.ndarray) -> None:
        for name, count in zip(SPLITS, rows, strict=True):
            if count == 0:
                raise DataError(f"data.split={self.config.split}: {self.rows} rows leave none for the {name} split")
        for task, count in zip(self.columns.label, positive, strict=True):
            if count in (0, rows[0]):
                raise DataError(
                    f"the label column {task!r} has one class only: all {rows[0]} training rows are {int(count > 0)}; "
                    "check the column, data.label_threshold and the split"
                )

    def _save_vocabularies(self, facts: dict[str, Any]) -> None:
        folder = vocabulary_folder(self.folder)
        folder.mkdir(exist_ok=True)
        if self.config.vocabulary:
            saved = json.loads((vocabulary_folder(self.config.vocabulary) / "dense.json").read_text())
            if saved["columns"] != list(self.columns.dense):
                raise DataError(f"data.vocabulary: it was saved with the dense columns {saved['columns']}")
            facts["dense_mean"], facts["dense_deviation"] = saved["mean"], saved["deviation"]
        for encoder in self.encoders.values():
            encoder.save(folder)
        dense = {
            "columns": list(self.columns.dense),
            "mean": facts["dense_mean"],
            "deviation": facts["dense_deviation"],
        }
        (folder / "dense.json").write_text(json.dumps(dense))
        self.damaged.write(self.folder / "damaged.jsonl")


def keeps_history(config: LogConfig, source: Source) -> bool:
    """Whether a row's events are the same user's earlier rows."""
    columns = source.columns
    possible = bool(columns.item and columns.user_id and columns.timestamp)
    wanted = possible and not columns.sequences if config.history.enabled is None else config.history.enabled
    if wanted and not possible:
        raise DataError("data.history.enabled needs data.columns.user_id, item and timestamp")
    return wanted


def vocabulary_folder(folder: str | Path) -> Path:
    """Where vocabularies lie in a prepared folder and in a run directory's `data`."""
    place = Path(folder).expanduser()
    for inner in (place / "data" / "vocabulary", place / "vocabulary"):
        if inner.is_dir():
            return inner
    return place / "vocabulary"
