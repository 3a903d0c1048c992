"""The file formats: which files, which columns, and what each column is for.

parquet   any columns, named in `data.columns`; sequences are list columns, or a user's own earlier rows
criteo    label, 13 numbers, 26 categories per line, separated by tabs (Criteo Display Advertising Challenge)
kuairand  log_*.csv of KuaiRand (pure, 1K, 27K) with user_features*.csv and video_features_basic*.csv beside them
recbole   RecBole's atomic files: x.inter with x.user and x.item beside it; `name:type` headers
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recsys_norm.data import blocks
from recsys_norm.data.blocks import Block, TextFormat, pa, pc
from recsys_norm.data.errors import Damaged, DataError

if TYPE_CHECKING:
    from recsys_norm.data.config import LogConfig

SPLITS = ("train", "validation", "test")
NUMBERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
CRITEO = TextFormat("\t", quotes=False, names=("label", *NUMBERS, *CATEGORIES))
CSV = TextFormat(",", quotes=True)
ATOMIC = TextFormat("\t", quotes=False, typed=True)
PATTERNS = {
    "parquet": ("**/*.parquet",),
    "criteo": ("train.txt*", "day_*", "*.tsv*"),
    "kuairand": ("log_standard*.csv*", "log_random*.csv*"),
    "recbole": ("*.inter*",),
}
KUAIRAND_USER = ("user_active_degree", "follow_user_num_range", "fans_user_num_range", "register_days_range")
KUAIRAND_VIDEO = ("author_id", "video_type", "upload_type", "music_type", "tag")


@dataclass(frozen=True)
class SequenceOf:
    """A sequence in list columns: items, actions (or None), times (or None); its items look up `table`."""

    item: str
    action: str | None
    time: str | None
    max_len: int
    table: str


@dataclass(frozen=True)
class Columns:
    """What the columns of a log are for; see `ColumnsConfig`."""

    label: tuple[str, ...]
    user_id: str | None = None
    timestamp: str | None = None
    item: str | None = None
    action: str | None = None
    weight: str | None = None
    dense: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    sequences: dict[str, SequenceOf] = field(default_factory=dict)
    time_unit: str = "s"
    threshold: float | None = None  # the label is column >= threshold; None: it holds 0 and 1

    def names(self) -> list[str]:
        """Every column, once."""
        single = (self.user_id, self.timestamp, self.item, self.action, self.weight)
        lists = [name for s in self.sequences.values() for name in (s.item, s.action, s.time)]
        return list(dict.fromkeys(n for n in (*self.label, *single, *self.dense, *self.sparse, *lists) if n))


@dataclass
class Side:
    """A table beside the log, which adds columns to the rows with the same key. It is held in memory."""

    path: Path
    layout: TextFormat
    key: str
    names: tuple[str, ...]
    separators: dict[str, str]  # of columns with several values

    def load(self, damaged: Damaged) -> None:
        parts = []
        for block in blocks.text_blocks(self.path, self.layout, (self.key, *self.names), damaged, 1 << 24):
            columns = {name: block.tokens(name, required=name == self.key) for name in (self.key, *self.names)}
            parts.append(pa.RecordBatch.from_pydict(columns).filter(pa.array(block.ok)))
        table = pa.Table.from_batches(parts).combine_chunks()
        self.columns = {name: table[name].combine_chunks() for name in table.column_names}
        for name, separator in self.separators.items():
            self.columns[name] = split(self.columns[name], separator)
        self.keys = self.columns.pop(self.key)

    def join(self, block: Block) -> None:
        """Add the columns to a block; null where the key is unknown."""
        place = pc.index_in(block.tokens(self.key), self.keys)
        for name, values in self.columns.items():
            block.columns[name] = values.take(place)


@dataclass
class Source:
    """The files of a log and how they are read."""

    files: list[tuple[Path, str | None]]  # with the split that a file belongs to, where files decide
    columns: Columns
    layout: TextFormat | None = None  # None: Parquet
    sides: list[Side] = field(default_factory=list)

    def paths(self) -> list[Path]:
        return [path for path, _ in self.files] + [side.path for side in self.sides]

    def blocks(self, damaged: Damaged, buffer_bytes: int, buffer_rows: int) -> Iterator[tuple[Block, str | None]]:
        """All rows, block by block, with the split of their file."""
        for side in self.sides:
            side.load(damaged)
        joined = {name for side in self.sides for name in side.names}
        wanted = [name for name in self.columns.names() if name not in joined]
        for path, part in self.files:
            if self.layout is None:
                stream = blocks.parquet_blocks(path, wanted, damaged, buffer_rows)
            else:
                stream = blocks.text_blocks(path, self.layout, wanted, damaged, buffer_bytes)
            lists = [name for name, kind in self._kinds(path).items() if kind.endswith("_seq") and name in wanted]
            for block in stream:
                for name in lists:
                    block.columns[name] = split(block.tokens(name), " ")
                for side in self.sides:
                    side.join(block)
                yield block, part

    def _kinds(self, path: Path) -> dict[str, str]:
        return blocks.header(path, self.layout) if self.layout is not None and self.layout.typed else {}


def split(text: pa.Array, separator: str) -> pa.Array:
    """Lists of the parts of each text; null gives null."""
    return pc.split_pattern(pc.utf8_trim(text, characters=separator), separator)


def open_source(config: LogConfig) -> Source:
    """The source that a configuration names.

    Raises DataError for an unknown format, files that are not there, and settings that the format does not have.
    """
    makers = {"parquet": _parquet, "criteo": _criteo, "kuairand": _kuairand, "recbole": _recbole}
    if config.format not in makers:
        raise DataError(f"data.format: {config.format!r} is not one of {', '.join(makers)}")
    return makers[config.format](config, _files(config))


def _files(config: LogConfig) -> list[tuple[Path, str | None]]:
    given = {part: getattr(config.files, part) for part in SPLITS}
    if config.split == "files":
        missing = [part for part in SPLITS if not given[part]]
        if missing:
            raise DataError(f"data.split=files needs data.files.{missing[0]}: a file, a folder or a pattern, or a list")
        return [(path, part) for part in SPLITS for path in _expand(f"data.files.{part}", given[part], config.format)]
    if any(given.values()):
        raise DataError(f"data.files belongs to data.split=files, and data.split is {config.split!r}")
    if not config.path:
        raise DataError("data.path: name a file, a folder or a pattern, or a list of them")
    return [(path, None) for path in _expand("data.path", config.path, config.format)]


def _expand(key: str, given: object, kind: str) -> list[Path]:
    found: list[Path] = []
    for entry in [given] if isinstance(given, (str, Path)) else list(given):
        place = Path(entry).expanduser()
        if place.is_dir():
            matches = [path for pattern in PATTERNS[kind] for path in sorted(place.glob(pattern)) if path.is_file()]
            if not matches:
                raise DataError(f"{key}: the folder {str(place)!r} holds none of {', '.join(PATTERNS[kind])}")
        else:
            matches = [Path(name) for name in sorted(glob.glob(str(place), recursive=True))]
            if not matches:
                raise DataError(f"{key}: {str(place)!r} does not exist")
        found += matches
    return list(dict.fromkeys(found))


def _parquet(config: LogConfig, files: list) -> Source:
    given = config.columns
    labels = [given.label] if isinstance(given.label, str) else list(given.label or [])
    if not labels:
        raise DataError("data.columns.label: name the column of the label, or a list of columns")
    for name, sequence in given.sequences.items():
        if sequence.time and not given.timestamp:
            raise DataError(f"data.columns.sequences.{name}.time needs data.columns.timestamp: ages are the difference")
    columns = Columns(
        label=tuple(labels),
        user_id=given.user_id,
        timestamp=given.timestamp,
        item=given.item,
        action=given.action,
        weight=given.weight,
        dense=tuple(given.dense),
        sparse=tuple(given.sparse),
        sequences={
            name: SequenceOf(s.item, s.action, s.time, s.max_len or config.max_len, s.table)
            for name, s in given.sequences.items()
        },
        time_unit=given.time_unit,
        threshold=config.label_threshold,
    )
    return Source(files, columns)


def _criteo(config: LogConfig, files: list) -> Source:
    return Source(
        files, Columns(("label",), dense=NUMBERS, sparse=CATEGORIES, threshold=config.label_threshold), CRITEO
    )


def _kuairand(config: LogConfig, files: list) -> Source:
    folder, sides = files[0][0].parent, []
    for key, pattern, wanted in (
        ("user_id", "user_features*.csv*", KUAIRAND_USER),
        ("video_id", "video_features_basic*.csv*", KUAIRAND_VIDEO),
    ):
        for path in sorted(folder.glob(pattern))[:1]:
            there = blocks.header(path, CSV)
            blocks.require_columns(path, [key], there)
            sides.append(Side(path, CSV, key, tuple(name for name in wanted if name in there), {}))
            if "tag" in sides[-1].names:
                sides[-1].separators["tag"] = ","
    columns = Columns(
        label=tuple(config.tasks),
        user_id="user_id",
        timestamp="time_ms",
        item="video_id",
        dense=("duration_ms",),
        sparse=("user_id", "tab", *(name for side in sides for name in side.names)),
        time_unit="ms",
        threshold=config.label_threshold,
    )
    return Source(files, columns, CSV, sides)


def _recbole(config: LogConfig, files: list) -> Source:
    path = files[0][0]
    kinds, sides = blocks.header(path, ATOMIC), []
    for key, ending in (("user_id", ".user"), ("item_id", ".item")):
        stem = path.name.split(".inter")[0]
        for beside in sorted(path.parent.glob(f"{glob.escape(stem)}{ending}*"))[:1]:
            there = blocks.header(beside, ATOMIC)
            blocks.require_columns(beside, [key], there)
            names = tuple(name for name, kind in there.items() if kind.startswith("token") and name != key)
            separators = {name: " " for name in names if there[name] == "token_seq"}
            sides.append(Side(beside, ATOMIC, key, names, separators))
    used = ("rating", "label", "timestamp")
    label = "label" if "label" in kinds else "rating"
    columns = Columns(
        label=(label,),
        user_id="user_id",
        timestamp="timestamp" if "timestamp" in kinds else None,
        item="item_id",
        action="rating" if "rating" in kinds else None,
        dense=tuple(name for name, kind in kinds.items() if kind == "float" and name not in used),
        sparse=("user_id", *(name for side in sides for name in side.names)),
        threshold=config.label_threshold if label == "rating" else None,
    )
    return Source(files, columns, ATOMIC, sides)


def seconds(values: np.ndarray, unit: str) -> np.ndarray:
    """Times in seconds from numbers in `unit`."""
    return values / {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[unit]
