"""Parquet files of a model's shape, and how fast they become batches:

    python benchmarks/parquet.py generate FOLDER --model kunlun_base --batches 60     files, and how to train on them
    python benchmarks/parquet.py loader FOLDER --workers 0,1,2                        rows per second of the loader

`generate` writes FOLDER/{train,validation,test}-*.parquet with random labels, dense and sparse columns, and one set of
list columns (items, actions, times) per event sequence, and FOLDER/data/generated.yaml, which says what the columns are.
It prints the command that trains on them. `loader` reads them once, as a first run does, then iterates over an epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

SHARES = {"train": 1.0, "validation": 0.05, "test": 0.05}  # rows of a split per training row
FILE_ROWS = 4096
ACTIONS, MULTI_HOT, DAY = 4, 3, 86_400.0


def model_config(name: str) -> Any:
    from hydra import compose, initialize_config_module

    from recsys_norm.training import main

    main.register()
    with initialize_config_module("recsys_norm.configs", version_base="1.3"):
        return compose("config", overrides=[f"model={name}"]).model


def lists(values: np.ndarray, length: np.ndarray) -> Any:
    """A list column from packed values."""
    import pyarrow as pa

    return pa.ListArray.from_arrays(np.r_[0, np.cumsum(length)].astype(np.int32), pa.array(values))


def rows(model: Any, n: int, g: np.random.Generator) -> dict[str, Any]:
    """Columns of n rows. Lengths of sequences are uniform on 1 .. 2 * mean - 1, the events in the order of time."""
    now = g.integers(1_700_000_000, 1_700_000_000 + 30 * int(DAY), n)
    columns: dict[str, Any] = {
        "label": g.integers(0, 2, n).astype(np.int8),
        "user": g.integers(0, max(n // 4, 2), n),
        "time": now,
    }
    columns |= {f"dense{i}": g.standard_normal(n, dtype=np.float32) for i in range(model.n_dense)}
    ids = model.tables.rows
    columns |= {f"sparse{i}": g.integers(0, ids, n).astype(np.int32) for i in range(model.tables.count - 1)}
    several = g.integers(0, MULTI_HOT + 1, n)
    columns[f"sparse{model.tables.count - 1}"] = lists(g.integers(0, ids, several.sum()).astype(np.int32), several)
    for name, event in model.events.items():
        length = g.integers(1, 2 * event.mean_len, n)
        total = int(length.sum())
        gaps = np.cumsum(g.exponential(DAY / event.mean_len, total))
        last = np.repeat(gaps[np.cumsum(length) - 1], length)
        times = np.repeat(now, length) - (last - gaps).astype(np.int64)
        columns[f"{name}_items"] = lists(g.integers(0, ids, total).astype(np.int32), length)
        columns[f"{name}_actions"] = lists(g.integers(0, ACTIONS, total).astype(np.int8), length)
        columns[f"{name}_times"] = lists(times, length)
    return columns


def generate(folder: Path, name: str, batches: int, seed: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    begin, model, g = time.time(), model_config(name), np.random.default_rng(seed)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    count = batches * model.batch_size
    for split, share in SHARES.items():
        left, part = max(int(count * share), model.batch_size), 0
        while left > 0:
            n = min(left, FILE_ROWS)
            pq.write_table(pa.table(rows(model, n, g)), folder / f"{split}-{part:03d}.parquet")
            left, part = left - n, part + 1
    (folder / "data" / "generated.yaml").write_text(config(folder, model))
    size = sum(path.stat().st_size for path in folder.glob("*.parquet"))
    print(f"{count} training rows, {size / 1e6:.0f} MB, written in {time.time() - begin:.1f} s")
    print(f"python train.py --config-dir {folder} data=generated model={name}")


def config(folder: Path, model: Any) -> str:
    """The data group's file: what each column is. Ids are hashed into tables of the model's size."""
    sequences = {
        name: {
            "item": f"{name}_items",
            "action": f"{name}_actions",
            "time": f"{name}_times",
            "max_len": event.max_len,
            "table": "item",
        }
        for name, event in model.events.items()
    }
    columns = {
        "label": "label",
        "user_id": "user",
        "timestamp": "time",
        "dense": [f"dense{i}" for i in range(model.n_dense)],
        "sparse": [f"sparse{i}" for i in range(model.tables.count)],
        "sequences": sequences,
    }
    files = {split: str(folder.resolve() / f"{split}-*.parquet") for split in SHARES}
    actions = {f"{name}_action": {"rows": 16} for name in sequences}
    return "\n".join(
        [
            "defaults: [parquet, _self_]",
            "split: files",
            "encoding: hash",
            f"hash_rows: {model.tables.rows}",
            f"files: {json.dumps(files)}",
            f"tables: {json.dumps(actions)}",
            f"columns: {json.dumps(columns)}",
            f"cache: {folder.resolve() / 'prepared'}",
            "",
        ]
    )


def loader(folder: Path, name: str, workers: list[int], epochs: int) -> None:
    """Rows per second from the prepared columns to batches in this process, and of the preparation."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.utils import instantiate

    from recsys_norm.training import main

    main.register()
    GlobalHydra.instance().clear()
    with initialize_config_module("recsys_norm.configs", version_base="1.3"):
        choose = [f"hydra.searchpath=[file://{folder.resolve()}]", "data=generated", f"model={name}"]
        data_config = compose("config", overrides=choose).data
    begin = time.perf_counter()
    data = instantiate(data_config)
    spent = time.perf_counter() - begin
    total = sum(data.describe()[f"{split}_rows"] for split in SHARES)
    print(
        f"opened in {spent:.1f} s: {total / spent:.0f} rows/s where the files were read for the first time", flush=True
    )
    for count in workers:
        data.config.num_workers = count
        batches = data.train_loader(seed=0, pin_memory=False)
        times, seen = [], 0
        for _ in range(epochs):
            begin = time.perf_counter()
            for batch in batches:
                seen += len(batch)
            times.append(time.perf_counter() - begin)
        print(f"{count} workers: {seen / epochs / min(times):.0f} rows/s, {1e3 * min(times) / len(batches):.1f} ms per batch"
              f" ({os.cpu_count()} cores)", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["generate", "loader"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="kunlun_base")
    parser.add_argument("--batches", type=int, default=60, help="of training rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", default="0,1,2")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    if args.what == "generate":
        generate(args.folder, args.model, args.batches, args.seed)
    else:
        loader(args.folder, args.model, [int(w) for w in args.workers.split(",")], args.epochs)


if __name__ == "__main__":
    main()
