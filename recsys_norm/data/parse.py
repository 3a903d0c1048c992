"""From a block of a file to the rows of a log: numbers checked, lists matched, damaged rows left out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recsys_norm.data.blocks import Block, floats, is_list, pa
from recsys_norm.data.errors import DataError
from recsys_norm.data.formats import Columns, SequenceOf, seconds

Tokens = tuple[pa.Array, np.ndarray | None]  # values, and the number of them per row (None: one per row)


@dataclass
class Events:
    """Sequences of n rows: lengths [n], and item, action, age of all events, packed, oldest first."""

    length: np.ndarray
    item: pa.Array
    action: pa.Array | None
    age: np.ndarray


@dataclass
class Parsed:
    """n rows that can be used."""

    label: np.ndarray  # [n, tasks] float32
    dense: np.ndarray  # [n, dense] float32, NaN where a field is empty
    user: np.ndarray | None  # [n] int64
    time: np.ndarray | None  # [n] float64 seconds
    weight: np.ndarray | None  # [n] float32
    item: pa.Array | None
    action: pa.Array | None
    sparse: dict[str, Tokens]
    events: dict[str, Events]

    def __len__(self) -> int:
        return len(self.label)


def parse(block: Block, columns: Columns, *, log_dense: bool) -> Parsed:
    """The usable rows of a block; the others are rejected with a reason."""
    label = np.stack([_label(block, name, columns.threshold) for name in columns.label], 1)
    dense = [block.numbers(name) for name in columns.dense]
    user = _user(block, columns.user_id) if columns.user_id else None
    time = _times(block, columns) if columns.timestamp else None
    weight = block.numbers(columns.weight, required=True) if columns.weight else None
    if weight is not None:
        block.reject(weight < 0, lambda i: f"{columns.weight} is {weight[i]}, a weight below 0")
    item = block.tokens(columns.item, required=True) if columns.item else None
    action = block.tokens(columns.action) if columns.action else None
    sparse = {name: _Lists(block, name) for name in columns.sparse}
    events = {name: _Sequence(block, name, of, columns, time) for name, of in columns.sequences.items()}
    keep = block.ok
    dense = np.stack([column[keep] for column in dense], 1) if dense else np.empty((int(keep.sum()), 0))
    if log_dense:
        dense = np.sign(dense) * np.log1p(np.abs(dense))
    mask = pa.array(keep)
    return Parsed(
        label=label[keep].astype(np.float32),
        dense=dense.astype(np.float32),
        user=None if user is None else user[keep],
        time=None if time is None else time[keep],
        weight=None if weight is None else weight[keep].astype(np.float32),
        item=None if item is None else item.filter(mask),
        action=None if action is None else action.filter(mask),
        sparse={name: lists.kept(keep) for name, lists in sparse.items()},
        events={name: sequence.kept(keep) for name, sequence in events.items()},
    )


def _label(block: Block, name: str, threshold: float | None) -> np.ndarray:
    values = block.numbers(name, required=True)
    if threshold is not None:
        return values >= threshold
    wrong = (values != 0) & (values != 1)
    block.reject(wrong, lambda i: f"{name} is {values[i]:g}, neither 0 nor 1 (data.label_threshold makes labels of it)")
    return values


def _times(block: Block, columns: Columns) -> np.ndarray:
    values = block.numbers(columns.timestamp, required=True)
    return values if _has_unit(block.columns[columns.timestamp].type) else seconds(values, columns.time_unit)


def _has_unit(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind)


def _user(block: Block, name: str) -> np.ndarray:
    """[n] int64: whole numbers as they are, everything else by its 64-bit hash."""
    tokens = block.tokens(name, required=True)
    if pa.types.is_integer(tokens.type):
        return tokens.fill_null(0).cast(pa.int64(), safe=False).to_numpy(zero_copy_only=False)
    from pandas.util import hash_array

    encoded = tokens.cast(pa.string()).fill_null("").dictionary_encode()
    hashes = hash_array(np.array(encoded.dictionary.to_pylist(), dtype=object))
    return hashes.view(np.int64)[encoded.indices.to_numpy()]


class _Lists:
    """A column with any number of ids per row, or with one."""

    def __init__(self, block: Block, name: str) -> None:
        if is_list(block.columns[name].type):
            self.values, self.length = block.lists(name)
        else:
            self.values, self.length = block.tokens(name), None

    def kept(self, keep: np.ndarray) -> Tokens:
        if self.length is None:
            return self.values.filter(pa.array(keep)), None
        return self.values.filter(pa.array(np.repeat(keep, self.length))), self.length[keep]


class _Sequence:
    """One event sequence in list columns. Rejects rows whose lists disagree, or whose events are out of order or later
    than the row."""

    def __init__(self, block: Block, name: str, of: SequenceOf, columns: Columns, time: np.ndarray | None) -> None:
        self.max_len = of.max_len
        given = {"items": of.item, "actions": of.action, "times": of.time}
        for column in filter(None, given.values()):
            if not is_list(block.columns[column].type):
                kind = block.columns[column].type
                raise DataError(f"{block.file}: {column!r} of sequence {name!r} holds {kind}, not lists")
        lists = {what: block.lists(column) for what, column in given.items() if column}
        self.values = {what: values for what, (values, _) in lists.items()}
        self.lengths = {what: length for what, (_, length) in lists.items()}
        self.length = self.lengths["items"]
        differ = np.any([length != self.length for length in self.lengths.values()], axis=0)
        block.reject(differ, lambda i: f"sequence {name}: " + ", ".join(f"{v[i]} {k}" for k, v in self.lengths.items()))
        if of.time:
            self._check_ages(block, name, columns, time)

    def _check_ages(self, block: Block, name: str, columns: Columns, time: np.ndarray) -> None:
        length, flat = self.lengths["times"], self.values["times"]
        at = floats(flat) if _has_unit(flat.type) else seconds(floats(flat), columns.time_unit)
        row = np.repeat(np.arange(len(length)), length)
        age = time[row] - at
        late, disorder = np.zeros(len(block), dtype=bool), np.zeros(len(block), dtype=bool)
        late[row[~(age >= 0)]] = True
        disorder[row[1:][(row[1:] == row[:-1]) & (at[1:] < at[:-1])]] = True
        block.reject(late, lambda i: f"sequence {name}: an event without a time, or later than the row")
        block.reject(disorder, lambda i: f"sequence {name}: the events are not in the order of time, oldest first")
        self.age_of_times = age

    def kept(self, keep: np.ndarray) -> Events:
        """The kept rows, the latest `max_len` events of each."""
        mask = np.repeat(keep, self.length)
        back = np.repeat(np.cumsum(self.length), self.length) - np.arange(len(mask))  # 1 is the latest
        part = {
            what: values.filter(pa.array(np.repeat(keep, self.lengths[what]))) for what, values in self.values.items()
        }
        recent = back[mask] <= self.max_len
        if "times" in self.values:
            age = self.age_of_times[np.repeat(keep, self.lengths["times"])]
        else:
            age = np.zeros(len(recent))
        chosen = pa.array(recent)
        action = part["actions"].filter(chosen) if "actions" in part else None
        length = np.minimum(self.length[keep], self.max_len)
        return Events(length, part["items"].filter(chosen), action, age[recent].astype(np.float32))
