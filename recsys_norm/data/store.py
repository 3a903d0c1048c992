"""Columns of a log on disk: written block by block, read through memory maps.

A folder with one plain binary file per column and `store.json`. What has been written is complete or not there: the
folder gets its name when everything is in it. Reading needs numpy only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recsys_norm.data.errors import DataError

VERSION = 1


class Writer:
    """Appends to columns. Rows of a column have one dtype and shape."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.columns: dict[str, dict[str, Any]] = {}
        self._files: dict[str, Any] = {}

    def append(self, name: str, values: np.ndarray) -> None:
        if name not in self.columns:
            path = f"{len(self.columns):04d}.bin"
            self.columns[name] = {"file": path, "dtype": values.dtype.str, "shape": list(values.shape[1:]), "rows": 0}
            self._files[name] = open(self.folder / path, "wb")
        column = self.columns[name]
        if values.dtype.str != column["dtype"] or list(values.shape[1:]) != column["shape"]:
            raise TypeError(f"column {name!r} holds {column['dtype']} {column['shape']}, got {values.dtype.str}")
        if values.size:
            self._files[name].write(np.ascontiguousarray(values).data)
        column["rows"] += len(values)

    def flush(self, name: str) -> np.ndarray:
        """The column so far, as a writable memory map."""
        self._files[name].flush()
        return _map(self.folder, self.columns[name], "r+")

    def close(self, facts: dict[str, Any]) -> None:
        for file in self._files.values():
            file.close()
        meta = {"version": VERSION, "columns": self.columns, **facts}
        (self.folder / "store.json").write_text(json.dumps(meta, indent=1))

    def abandon(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # what could not be written is flushed once more
                file.close()


class Store:
    """Columns of a folder as read-only arrays, opened when first used; copies in other processes open their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.facts: dict[str, Any] = json.loads((self.folder / "store.json").read_text())
        self._open: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._open:
            self._open[name] = _map(self.folder, self.facts["columns"][name], "r")
        return self._open[name]

    def __contains__(self, name: str) -> bool:
        return name in self.facts["columns"]

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "facts": self.facts, "_open": {}}


def _map(folder: Path, column: dict[str, Any], mode: str) -> np.ndarray:
    shape = (column["rows"], *column["shape"])
    if 0 in shape:  # a map of nothing is not allowed
        return np.empty(shape, dtype=column["dtype"])
    return np.memmap(folder / column["file"], dtype=column["dtype"], mode=mode, shape=shape)


def default_folder() -> Path:
    """Where prepared data goes unless the configuration says otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "recsys_norm"


def fingerprint(settings: Any, paths: list[Path]) -> str:
    """A name for what is made of these files (by path, size and time of change) with these settings."""
    files = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    text = json.dumps([VERSION, settings, files], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def obtain(folder: Path, make: Callable[[Path], None]) -> Store:
    """The store in `folder`, made by `make(unfinished folder)` if it is not there. Processes that ask for the same
    folder at the same time wait for the one that makes it.

    Raises DataError where the disk is full or the folder cannot be written.
    """
    if (folder / "store.json").exists():
        return Store(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if not (folder / "store.json").exists():
                unfinished = folder.with_suffix(".unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                try:
                    make(unfinished)
                    os.replace(unfinished, folder)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"the data could not be prepared in {folder.parent}: {error}; set data.cache to a folder with room"
        ) from error
    return Store(folder)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
