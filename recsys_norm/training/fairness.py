"""What makes runs comparable: digests of their initial weights and first batches, and the same batches with their rows
in another order, whose run says how much of a difference between two loss curves is the order of summation alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_norm.data.batch import Batch
from recsys_norm.data.schema import Schema
from recsys_norm.training.runtime import Runtime

BATCHES = 4  # first batches of a run that are part of its digest
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW, _COLUMN, _RANK = 1_000_003, 7_919, 998_244_353


def checksum(tensor: Tensor, first_row: int = 0, first_column: int = 0) -> Tensor:
    """sum_ij bits_ij * (1 + 1000003 i + 7919 j) modulo 2**64, over rows i and columns j; a scalar on the same device.

    Sums of integers: the order of summation does not matter, and the parts of a sharded table, given where they start,
    add up to the checksum of the whole. Dimensions after the first are columns.
    """
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.detach().reshape(tensor.shape[0] if tensor.dim() else 1, -1).contiguous()
    bits = flat.view(_BITS[flat.element_size()])
    rows, columns = bits.sum(1, dtype=torch.int64), bits.sum(0, dtype=torch.int64)
    i = torch.arange(first_row, first_row + len(rows), device=rows.device)
    j = torch.arange(first_column, first_column + len(columns), device=rows.device)
    return rows.sum() + _ROW * (rows * i).sum() + _COLUMN * (columns * j).sum()


class Start:
    """Digests of what a run started from, whatever the placement of the tables, and the row order of its batches.

    row_order: above 0, the rows of each training batch are put into another order, drawn from this number. The digest
    is that of the batches before that.
    """

    def __init__(self, runtime: Runtime, schema: Schema, seed: int, row_order: int) -> None:
        self._runtime, self._schema, self._row_order = runtime, schema, row_order
        self._generator = torch.Generator().manual_seed(seed * 1_000 + row_order)
        self._weights: str | None = None
        self._batches: list[int] = []  # checksums

    def weights(self, tensors: dict[str, Any]) -> None:
        """Take the digest of the initial weights, as `Trainer.tensors` names them. Call it on every rank."""
        sums = {}
        for name, value in sorted(tensors.items()):
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            counted = self._runtime.main or hasattr(value, "local_shards")  # what every rank holds counts on rank 0
            parts = _parts(value) if counted else ()
            sums[name] = sum(int(checksum(part, *offsets)) for part, offsets in parts)
        total = self._runtime.sum(torch.tensor([_wrapped(value) for value in sums.values()], dtype=torch.int64))
        self._weights = _digest(list(zip(sums, total.tolist(), strict=True)))

    def watch(self, loader: Any) -> Any:
        """The loader, its batches noted and put into the other order as they pass."""
        return _Watched(loader, self)

    def batch(self, batch: Batch) -> Batch:
        """The batch to train on."""
        if len(self._batches) < BATCHES:
            parts = enumerate(_tensors(batch))
            self._batches.append(sum(int(checksum(part)) * (2 * index + 1) for index, part in parts))
        if self._row_order == 0:
            return batch
        moved = permuted(batch, self._schema, torch.randperm(len(batch), generator=self._generator))
        return moved.pin_memory() if batch.label.is_pinned() else moved  # or each copy would wait for the device

    def record(self) -> dict[str, Any]:
        """For the run's summary; weights is None for a run that was resumed. Call it on every rank."""
        weight = _RANK * self._runtime.rank + 1
        sums = torch.tensor([_wrapped(value * weight) for value in self._batches], dtype=torch.int64)
        return {
            "weights": self._weights,
            "batches": _digest(self._runtime.sum(sums).tolist()),
            "first_batches": len(self._batches),
            "row_order": self._row_order,
        }


class _Watched:
    """A loader whose batches go through `Start.batch`; everything else is the loader's own."""

    def __init__(self, loader: Any, start: Start) -> None:
        self.__dict__.update(_loader=loader, _start=start)

    def __iter__(self) -> Iterator[Batch]:
        return (self._start.batch(batch) for batch in self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)


def permuted(batch: Batch, schema: Schema, order: Tensor) -> Batch:
    """The same batch with row order[i] as its row i; events of a row keep their order. order: [B] int64 on the CPU."""
    order = order.to(batch.label.device)
    first_field = {event.name: event.fields[0].name for event in schema.events}
    lengths = {name: batch.ids[field].lengths() for name, field in first_field.items()}

    def rows(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[order]

    return Batch(
        dense=rows(batch.dense),
        sparse=_permuted_jagged(batch.sparse, order),
        ids=None if batch.ids is None else _permuted_jagged(batch.ids, order),
        ages={name: ages[_segments(lengths[name], order)] for name, ages in batch.ages.items()},
        label=rows(batch.label),
        user_id=rows(batch.user_id),
        weight=rows(batch.weight),
        row=rows(batch.row),
    )


def _permuted_jagged(features: KeyedJaggedTensor, order: Tensor) -> KeyedJaggedTensor:
    stride, keys = features.stride(), features.keys()
    segments = (torch.arange(len(keys), device=order.device)[:, None] * stride + order).flatten()
    return KeyedJaggedTensor(
        keys=keys,
        values=features.values()[_segments(features.lengths(), segments)],
        lengths=features.lengths()[segments],
        stride=stride,
        length_per_key=features.length_per_key(),
        offset_per_key=features.offset_per_key(),
    )


def _segments(lengths: Tensor, order: Tensor) -> Tensor:
    """Index of the packed values of segments order[0], order[1], .."""
    lengths = lengths.long()
    starts, chosen = lengths.cumsum(0) - lengths, lengths[order]
    moved = starts[order] - (chosen.cumsum(0) - chosen)
    return torch.repeat_interleave(moved, chosen) + torch.arange(int(chosen.sum()), device=lengths.device)


def _tensors(batch: Batch) -> Iterator[Tensor]:
    yield from (batch.dense, batch.label, batch.sparse.values(), batch.sparse.lengths())
    if batch.ids is not None:
        yield from (batch.ids.values(), batch.ids.lengths())
    yield from (batch.ages[name] for name in sorted(batch.ages))


def _parts(value: Any) -> Iterator[tuple[Tensor, tuple[int, int]]]:
    """The parts of a tensor on this rank and where they start."""
    if not hasattr(value, "local_shards"):
        yield value, (0, 0)
        return
    for shard in value.local_shards():
        first, column = (*shard.metadata.shard_offsets, 0)[:2]
        yield shard.tensor, (first, column)


def _wrapped(value: int) -> int:
    """The value modulo 2**64, as int64 holds it."""
    return (value + 2**63) % 2**64 - 2**63


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
