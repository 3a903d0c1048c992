"""Files as a stream of blocks: Arrow columns with the line that each row came from, whatever the size of the file.

Rows that cannot be used are rejected with a reason; `Damaged` counts and lists them.
"""

from __future__ import annotations

import csv
import lzma
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from recsys_norm.data.errors import Damaged, DataError

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv
    import pyarrow.parquet
except ImportError as error:
    raise DataError("this data format is read with pyarrow, which is not installed: pip install pyarrow") from error

ATOMIC_TYPES = ("token", "token_seq", "float", "float_seq")
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


@dataclass
class Block:
    """n rows of one file. `line` [n] are lines of a text file (from 1) or rows of a Parquet file (from 0)."""

    file: str
    unit: str  # line | row
    line: np.ndarray
    columns: dict[str, pa.Array]
    damaged: Damaged
    ok: np.ndarray = field(init=False)  # [n] bool

    def __post_init__(self) -> None:
        self.ok = np.ones(len(self.line), dtype=bool)

    def __len__(self) -> int:
        return len(self.line)

    def reject(self, mask: np.ndarray, reason: Callable[[int], str]) -> None:
        """Leave out the rows of the mask [n]; a row is counted once, with its first reason."""
        for index in np.flatnonzero(mask & self.ok):
            self.ok[index] = False
            self.damaged.add(self.file, self.unit, int(self.line[index]), reason(int(index)))

    def numbers(self, name: str, *, required: bool = False) -> np.ndarray:
        """[n] float64, NaN where the field is empty. Rejects what is no finite number, and with `required` NaN too."""
        column = self.columns[name]
        if is_text(column.type):
            column = self.tokens(name)
            values, bad = _parse(column)
            self.reject(bad, lambda i: f"{name} is {column[i].as_py()!r}, not a number")
        else:
            values = floats(column)
            bad = ~np.isfinite(values) & column.is_valid().to_numpy(zero_copy_only=False)
            self.reject(bad, lambda i: f"{name} is {values[i]}, not a finite number")
        if required:
            self.reject(np.isnan(values), lambda i: f"{name} is empty")
        return values

    def tokens(self, name: str, *, required: bool = False) -> pa.Array:
        """The column with text decoded and empty fields as nulls. Rejects rows that are not UTF-8."""
        column = self._decoded(name, self.columns[name], np.arange(len(self)))
        if required:
            missing = column.is_null().to_numpy(zero_copy_only=False)
            self.reject(missing, lambda i: f"{name} is empty")
        return column

    def lists(self, name: str) -> tuple[pa.Array, np.ndarray]:
        """The values of a column of lists, packed and decoded like `tokens`, and the number of them per row [n]."""
        column = self.columns[name]
        length = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        return self._decoded(name, column.flatten(), np.repeat(np.arange(len(self)), length)), length

    def _decoded(self, name: str, values: pa.Array, row: np.ndarray) -> pa.Array:
        """Text as strings, with null for what is empty or no number. `row`: where each value belongs."""
        if pa.types.is_floating(values.type):
            return pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)
        if not is_text(values.type):
            return values
        values = values.cast(pa.binary())
        try:
            text = values.cast(pa.string())  # checks the encoding, which strings of a Parquet file may lack, too
        except pa.ArrowInvalid:
            decoded = [_decode(value) for value in values.to_pylist()]
            wrong = {int(row[at]): at for at, value in enumerate(decoded) if value is False}
            bad = np.isin(np.arange(len(self)), list(wrong))
            self.reject(bad, lambda i: f"{name} is {values[wrong[i]].as_py()!r}, which is not UTF-8")
            text = pa.array([value or None for value in decoded], pa.string())
        return pc.if_else(pc.equal(pc.binary_length(text), 0), pa.scalar(None, pa.string()), text)


def is_text(kind: pa.DataType) -> bool:
    checks = pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary
    return any(check(kind) for check in checks)


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def floats(column: pa.Array) -> np.ndarray:
    """float64 with NaN for nulls. Timestamps become seconds since 1970."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        return column.to_numpy(zero_copy_only=False).astype(np.float64) / 1e6
    if pa.types.is_date(column.type):
        return floats(column.cast(pa.timestamp("us")))
    return column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)


def _parse(text: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """(values, which of them are no finite numbers)."""
    given = text.is_valid().to_numpy(zero_copy_only=False)
    try:
        values = text.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:  # Arrow does not say where
        values = np.array([_number(value) for value in text.to_pylist()], dtype=np.float64)
    return values, ~np.isfinite(values) & given


def _number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return np.nan


def _decode(value: bytes | None) -> str | None | bool:
    try:
        return value and value.decode()
    except UnicodeDecodeError:
        return False


@dataclass(frozen=True)
class TextFormat:
    """How a text file is laid out. `names`: its columns, None where the first line has them; `typed`: as name:type."""

    delimiter: str
    quotes: bool
    names: tuple[str, ...] | None = None
    typed: bool = False


def header(path: Path, layout: TextFormat) -> dict[str, str]:
    """name -> type of the columns of a text file; the type is "" where the format has none."""
    if layout.names is not None:
        return dict.fromkeys(layout.names, "")
    with _named(path), _open(path) as stream:
        first = b""
        while b"\n" not in first and (more := stream.read(1 << 13)):
            first += more
        first = first[: first.find(b"\n")] if b"\n" in first else first
        first = first.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r")
    if not first.strip():
        raise DataError(f"{path}: the file is empty, or its first line, which has to name the columns, is")
    quoting = csv.QUOTE_MINIMAL if layout.quotes else csv.QUOTE_NONE
    names = next(csv.reader([first.decode("utf-8", "replace")], delimiter=layout.delimiter, quoting=quoting))
    if not layout.typed:
        return dict.fromkeys(names, "")
    pairs = [name.partition(":")[::2] for name in names]
    for name, kind in pairs:
        if kind not in ATOMIC_TYPES:
            raise DataError(f"{path}: the first line has to name columns as name:type, got {name!r} with {kind!r}")
    return dict(pairs)


def text_blocks(
    path: Path, layout: TextFormat, columns: Sequence[str], damaged: Damaged, buffer_bytes: int
) -> Iterator[Block]:
    """Blocks of about `buffer_bytes` of a plain or compressed text file, with the wanted columns, as bytes.

    Raises DataError for a file that is empty, cannot be unpacked, or has a line longer than the buffer.
    """
    names = list(header(path, layout))
    require_columns(path, columns, names)
    line, rows, before = 1, 0, damaged.counts[str(path)]
    with _named(path), _open(path) as stream:
        for chunk in _whole_lines(stream, buffer_bytes):
            if line == 1 and layout.names is None:
                chunk, line = chunk[chunk.find(b"\n") + 1 :] if b"\n" in chunk else b"", 2
            if not chunk:
                continue
            table, wrong = _table(chunk, layout, names, columns)
            for number, reason in wrong.items():
                damaged.add(str(path), "line", line + number, reason)
            lines = np.setdiff1d(np.arange(table.num_rows + len(wrong)), list(wrong)) + line
            line += table.num_rows + len(wrong)
            parts = [table[name].combine_chunks() for name in columns]
            block = Block(str(path), "line", lines, dict(zip(columns, parts, strict=True)), damaged)
            block.ok &= ~_empty(parts, len(block))  # an empty line is no row and no damage
            rows += int(block.ok.sum())
            if len(block):
                yield block
    if rows == 0 and damaged.counts[str(path)] == before:
        raise DataError(f"{path}: the file is empty, or holds no rows")


def _whole_lines(stream: pa.NativeFile, size: int) -> Iterator[bytes]:
    """The stream in pieces that end with a line. Arrow's own streaming reader holds 32 pieces at a time."""
    rest = b""
    while piece := stream.read(size):
        piece = rest + piece
        end = piece.rfind(b"\n") + 1
        rest = piece[end:]
        if len(rest) > size:
            raise DataError(f"a line is longer than the buffer of {size} bytes; raise data.buffer_bytes")
        if end:
            yield piece[:end]
    if rest:
        yield rest


def _table(
    chunk: bytes, layout: TextFormat, names: list[str], columns: Sequence[str]
) -> tuple[pa.Table, dict[int, str]]:
    """The rows with the right number of columns, and what is wrong with the other lines (by number, from 0)."""
    wrong: dict[int, str] = {}

    def skip(row: pyarrow.csv.InvalidRow) -> str:
        wrong[row.number - 1] = f"{row.actual_columns} columns instead of {row.expected_columns}"
        return "skip"

    table = pa.csv.read_csv(
        pa.BufferReader(chunk),
        read_options=pa.csv.ReadOptions(use_threads=False, block_size=len(chunk) + 1, column_names=names),
        parse_options=pa.csv.ParseOptions(
            delimiter=layout.delimiter,
            quote_char='"' if layout.quotes else False,
            ignore_empty_lines=False,
            invalid_row_handler=skip,
        ),
        convert_options=pa.csv.ConvertOptions(
            column_types={name: pa.binary() for name in names},
            include_columns=list(columns),
            strings_can_be_null=False,
        ),
    )
    return table, wrong


def _empty(columns: list[pa.Array], rows: int) -> np.ndarray:
    empty = np.ones(rows, dtype=bool)
    for column in columns:
        if not empty.any():
            break
        empty &= pc.equal(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
    return empty


def parquet_blocks(path: Path, columns: Sequence[str], damaged: Damaged, buffer_rows: int) -> Iterator[Block]:
    """Blocks of up to `buffer_rows` rows of a Parquet file, with the wanted columns."""
    with _named(path):
        file = pa.parquet.ParquetFile(path, memory_map=True, pre_buffer=False)
        require_columns(path, columns, file.schema_arrow.names)
        if file.metadata.num_rows == 0:
            raise DataError(f"{path}: the file holds no rows")
        first = 0
        for batch in file.iter_batches(batch_size=buffer_rows, columns=list(columns), use_threads=False):
            lines = np.arange(first, first + batch.num_rows)
            first += batch.num_rows
            yield Block(str(path), "row", lines, {name: _plain(batch.column(name)) for name in columns}, damaged)


def _plain(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def require_columns(path: Path, wanted: Sequence[str], there: Sequence[str]) -> None:
    missing = [name for name in wanted if name not in there]
    if missing:
        raise DataError(f"{path}: there is no column {', '.join(map(repr, missing))}; it has {', '.join(there)}")


def _open(path: Path):
    """A stream of the unpacked file."""
    if path.suffix == ".xz":
        return pa.PythonFile(lzma.open(path), "r")
    return pa.input_stream(str(path), compression=COMPRESSED.get(path.suffix))


class _named:
    """Errors of the file or its parser name the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, traceback) -> None:
        known = pa.ArrowException, OSError, EOFError, lzma.LZMAError, DataError
        if isinstance(error, known) and str(self.path) not in str(error):
            raise DataError(f"{self.path}: {' '.join(str(error).split())}") from error
        if isinstance(error, known) and not isinstance(error, DataError):
            raise DataError(" ".join(str(error).split())) from error
