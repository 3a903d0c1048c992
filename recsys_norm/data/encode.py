"""Ids of an embedding table for raw values, by a hash or by a vocabulary of the training split.

Id 0 is for missing and unknown values. With encoding "hash", id = 1 + hash(value) mod (rows - 1), a function of the
value alone. With "vocabulary", values get a provisional code in the order in which they are first seen; `fit` then
gives ids 1 .. to those that occur at least `min_count` times in the training split, the most frequent first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recsys_norm.data.blocks import pa
from recsys_norm.data.errors import DataError

ENCODINGS = ("vocabulary", "hash")


@dataclass
class Encoder:
    """One table. `rows`: of the table; with a vocabulary an upper bound, None for none."""

    name: str
    encoding: str
    rows: int | None
    min_count: int = 1

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS:
            raise DataError(f"data: the encoding of {self.name!r} must be vocabulary or hash, got {self.encoding!r}")
        if self.encoding == "hash" and (self.rows is None or not 2 <= self.rows < 2**31):
            raise DataError(f"data: the hashed table {self.name!r} needs 2 .. 2^31 - 1 rows, got {self.rows}")
        if self.rows is not None and self.rows < 2:
            raise DataError(f"data: the table {self.name!r} needs at least 2 rows, got {self.rows}")
        self.codes: dict[object, int] = {}
        self.frozen = False

    def encode(self, values: pa.Array) -> np.ndarray:
        """[n] int32: ids of a hashed or fitted table, otherwise provisional codes."""
        if self.encoding == "hash" and pa.types.is_integer(values.type):
            given = values.is_valid().to_numpy(zero_copy_only=False)
            return np.where(given, self._hash(values.fill_null(0).cast(pa.int64(), safe=False).to_numpy()), 0).astype(
                np.int32
            )
        encoded = values.dictionary_encode()
        unique = encoded.dictionary.to_pylist()
        if self.encoding == "hash":
            codes = self._hash(np.array([str(value) for value in unique], dtype=object))
        elif self.frozen:
            codes = np.array([self.codes.get(value, 0) for value in unique], dtype=np.int64)
        else:
            known = self.codes
            codes = np.array([known.setdefault(value, len(known) + 1) for value in unique], dtype=np.int64)
        place = encoded.indices.fill_null(len(unique)).to_numpy(zero_copy_only=False)
        return np.append(codes, 0)[place].astype(np.int32)

    def _hash(self, values: np.ndarray) -> np.ndarray:
        from pandas.util import hash_array

        if len(values) == 0:
            return np.empty(0, dtype=np.int64)
        return (1 + hash_array(values, categorize=False) % np.uint64(self.rows - 1)).astype(np.int64)

    @property
    def fits(self) -> bool:
        """Whether `fit` has to be called with counts of the training split."""
        return self.encoding == "vocabulary" and not self.frozen

    def fit(self, counts: np.ndarray) -> np.ndarray:
        """Turn codes into ids. counts [codes + 1]: occurrences in the training split. Returns ids by code."""
        kept = np.flatnonzero(counts >= max(self.min_count, 1))
        kept = kept[kept > 0]
        kept = kept[np.argsort(-counts[kept], kind="stable")]
        if self.rows is not None:
            kept = kept[: self.rows - 1]
        ids = np.zeros(len(counts), dtype=np.int32)
        ids[kept] = np.arange(1, len(kept) + 1)
        self.codes = {value: int(ids[code]) for value, code in self.codes.items() if ids[code]}
        self.rows = len(kept) + 1
        self.frozen = True
        return ids

    def save(self, folder: Path) -> None:
        """Write the vocabulary as `<table>.parquet` with columns value and id."""
        if self.encoding == "vocabulary":
            table = pa.table(
                {"value": pa.array(list(self.codes)), "id": pa.array(list(self.codes.values()), pa.int32())}
            )
            pa.parquet.write_table(table, folder / f"{self.name}.parquet")

    def load(self, folder: Path) -> None:
        """Take the vocabulary that `save` wrote; values outside of it are unknown from now on."""
        if self.encoding != "vocabulary":
            return
        path = folder / f"{self.name}.parquet"
        if not path.exists():
            raise DataError(f"data.vocabulary: {str(folder)!r} has no vocabulary of the table {self.name!r}")
        table = pa.parquet.read_table(path)
        self.codes = dict(zip(table["value"].to_pylist(), table["id"].to_pylist()))
        self.rows = max(self.codes.values(), default=0) + 1
        self.frozen = True
