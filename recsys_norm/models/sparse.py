"""The sparse half of the model: torchrec tables in, plain tensors out."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from recsys_norm._versions import require_torchrec
from recsys_norm.data.schema import IdFeature, Schema
from recsys_norm.models.config import ModelConfig

# Per event: field embeddings [T, n_fields * dim], offsets [B + 1] int32, ages [T] in seconds.
EventInputs = tuple[Tensor, Tensor, Tensor]


class SparseArch(nn.Module):
    """Embedding lookups for a batch.

    `forward(batch) -> (pooled [B, F, dim], candidates [B, C, dim], {event: (fields, offsets, ages)})`, fp32; pooled or
    candidates are None where the schema has none. Pooled features live in one torchrec EmbeddingBagCollection (sum),
    candidates and event fields in one EmbeddingCollection, so that both may look up the same table.

    Args:
        device: where the tables are made; "meta" leaves memory and initial values to DistributedModelParallel.
    """

    def __init__(self, config: ModelConfig, schema: Schema, device: torch.device | str | None = None):
        super().__init__()
        require_torchrec()
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

        self.pooled_names = [feature.name for feature in schema.sparse]
        self.candidate_names = [feature.name for feature in schema.candidates]
        self.event_fields = {event.name: [field.name for field in event.fields] for event in schema.events}
        self.dim = config.tables.dim
        device = torch.device(device or "cpu")
        init = partial(_initialize, dim=self.dim)
        self.pooled = self.sequence = None
        if schema.sparse:
            tables = _tables(EmbeddingBagConfig, schema, schema.sparse, self.dim, init)
            self.pooled = EmbeddingBagCollection(tables=tables, device=device)
        if schema.ids:
            tables = _tables(EmbeddingConfig, schema, schema.ids, self.dim, init)
            self.sequence = EmbeddingCollection(tables=tables, device=device)

    def forward(self, batch) -> tuple[Tensor | None, Tensor | None, dict[str, EventInputs]]:
        sparse, ids, rows = batch.sparse, batch.ids, None
        traced = isinstance(batch, torch.fx.Proxy)  # torchrec's pipelines trace forward, where no batch has a length
        if not traced and len(batch) == 0:  # torchrec takes no batch without rows: one row without ids, cut off again
            sparse, ids, rows = _one_empty_row(sparse), _one_empty_row(ids), 0
        pooled = candidates = None
        events: dict[str, EventInputs] = {}
        if self.pooled is not None:
            embeddings = self.pooled(sparse).to_dict()
            pooled = torch.stack([embeddings[name] for name in self.pooled_names], 1)[:rows]
        if self.sequence is not None:
            embeddings = self.sequence(ids)
            if self.candidate_names:
                candidates = torch.stack([embeddings[name].values() for name in self.candidate_names], 1)
            for name, fields in self.event_fields.items():
                values = torch.cat([embeddings[field].values() for field in fields], -1)
                offsets = embeddings[fields[0]].offsets().to(torch.int32)
                events[name] = values, offsets[: None if rows is None else 1], batch.ages[name]
        return pooled, candidates, events


def _tables(kind: Callable, schema: Schema, features: tuple[IdFeature, ...], dim: int, init: Callable) -> list:
    names: dict[str, list[str]] = {}
    for feature in features:
        names.setdefault(feature.table, []).append(feature.name)
    return [
        kind(name=table, num_embeddings=schema.rows(table), embedding_dim=dim, feature_names=used, init_fn=init)
        for table, used in names.items()
    ]


def _initialize(weight: Tensor, dim: int) -> Tensor:
    bound = 1 / math.sqrt(dim)
    return nn.init.uniform_(weight, -bound, bound)


def _one_empty_row(features):
    if features is None:
        return None
    from torchrec import KeyedJaggedTensor

    lengths = features.lengths().new_zeros(len(features.keys()))
    return KeyedJaggedTensor(keys=features.keys(), values=features.values()[:0], lengths=lengths, stride=1)
