"""Batches of a fixed size: for TorchRec's row-wise lookups, which exchange equally many rows between all ranks, and for
compiled graphs."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys_norm.data.batch import Batch
from recsys_norm.data.schema import Schema


def padded(batch: Batch, rows: int, schema: Schema) -> Batch:
    """The batch with rows added at its end until it has `rows`: without ids and events, candidates of id 0.

    Only what the model reads is filled up. Cut the output back to `len(batch)` rows: then the added ones have no
    gradient.
    """
    missing = rows - len(batch)
    if missing == 0:
        return batch
    candidates = {feature.name for feature in schema.candidates}
    return Batch(
        dense=_rows_of_zeros(batch.dense, missing),
        sparse=_longer(batch.sparse, missing, set()),
        ids=None if batch.ids is None else _longer(batch.ids, missing, candidates),
        ages=batch.ages,
        label=_rows_of_zeros(batch.label, missing),
    )


def _rows_of_zeros(tensor: Tensor, missing: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])


def _longer(features: KeyedJaggedTensor, missing: int, one_each: set[str]) -> KeyedJaggedTensor:
    """Rows without ids for every key, but with one id 0 for the keys in `one_each`."""
    keys, values, lengths = features.keys(), [], []
    for key in keys:
        column = features[key]
        add = key in one_each
        lengths += [column.lengths(), column.lengths().new_full((missing,), int(add))]
        values += [column.values(), column.values().new_zeros(missing * add)]
    stride = features.stride() + missing
    return KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=torch.cat(lengths), stride=stride)
