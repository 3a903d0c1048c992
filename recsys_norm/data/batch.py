"""One batch of training data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recsys_norm._versions import require_torchrec

require_torchrec()  # one clear error instead of the loader's, where fbgemm was built for another torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # noqa: E402
from torchrec.streamable import Pipelineable  # noqa: E402


@dataclass
class Batch(Pipelineable):
    """B rows with their event sequences; T is the number of events of one sequence type over all rows.

    dense: [B, n_dense] float32.
    sparse: keys = names of `Schema.sparse`; int64 ids, any length per row.
    ids: keys = names of `Schema.ids`; int64 ids. Candidates have length 1, the fields of one event share their lengths.
        None without candidates and events.
    ages: per event name [T] float32, seconds between each event and the request, >= 0.
    label: [B, n_tasks] float32.
    user_id: [B] int64, for metrics per user; weight: [B] float32; row: [B] int64, index of the row in its split.

    Zero rows and empty sequences are legal. Events are packed row after row, oldest first within a row.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    ids: KeyedJaggedTensor | None
    ages: dict[str, Tensor]
    label: Tensor
    user_id: Tensor | None = None
    weight: Tensor | None = None
    row: Tensor | None = None

    def __len__(self) -> int:
        return self.label.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """A batch on the device; tensors that are there already are shared, not copied."""
        return self._map(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """A batch in pinned host memory, as DataLoader(pin_memory=True) asks for it."""
        return self._map(lambda value: value.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work queued on the stream is done."""
        self._map(lambda value: value.record_stream(stream))

    def _map(self, change: Callable[[Any], Any]) -> Batch:
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, dict):
                changed[field.name] = {name: change(tensor) for name, tensor in value.items()}
            else:
                changed[field.name] = None if value is None else change(value)
        return Batch(**changed)


def jagged(columns: dict[str, tuple[np.ndarray, np.ndarray]], rows: int) -> KeyedJaggedTensor:
    """Join columns of (values [T_f], lengths [rows]) into one KeyedJaggedTensor with int64 values and lengths.

    Sizes per key are computed here, on the host, so that the batch never waits for the device to learn them.
    """
    values = [np.asarray(column[0]).reshape(-1) for column in columns.values()]
    lengths = [np.asarray(column[1]).reshape(rows) for column in columns.values()]
    joined = np.concatenate(values) if values else np.empty(0)
    counts = np.concatenate(lengths) if lengths else np.empty(0)
    sizes = [len(value) for value in values]
    return KeyedJaggedTensor(
        keys=list(columns),
        values=torch.from_numpy(joined.astype(np.int64, copy=False)),
        lengths=torch.from_numpy(counts.astype(np.int64, copy=False)),
        stride=rows,
        length_per_key=sizes,
        offset_per_key=[0, *np.cumsum(sizes, dtype=np.int64).tolist()],
    )
