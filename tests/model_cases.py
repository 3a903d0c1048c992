"""A small model, its schema with both event types, and batches of it with chosen lengths."""

from __future__ import annotations

import torch

from recsys_norm.data.schema import Event, IdFeature, Schema, Table
from recsys_norm.models.config import EventConfig, ModelConfig, TableConfig

LONG = EventConfig(dim=16, heads=2, layers=2, window=3, max_len=6)
SHORT = EventConfig(dim=8, heads=1, layers=1, window=2, max_len=4)


def make_config(**changes) -> ModelConfig:
    sizes = dict(dim=16, n_sum=4, n_seeds=3, n_summary=2, fmb_tokens=2, fmb_rank=3, mlp_dim=8, head_tokens=2, n_dense=3)
    sizes |= dict(tables=TableConfig(dim=8), events={"long": LONG, "short": SHORT})
    return ModelConfig(**(sizes | changes))


def make_schema(events=("long", "short"), dense=3, sparse=2, candidates=True, tasks=("label",)) -> Schema:
    lengths = {"long": LONG.max_len, "short": SHORT.max_len}
    fields = {name: (IdFeature(f"{name}.item", "item"), IdFeature(f"{name}.action", "action")) for name in events}
    pooled = tuple(IdFeature(f"sparse_{i}", f"sparse_{i}") for i in range(sparse))
    tables = [Table(feature.table, 20) for feature in pooled]
    tables += [Table("item", 30), Table("action", 4)] if events or candidates else []
    return Schema(
        dense=dense,
        sparse=pooled,
        candidates=(IdFeature("candidate.item", "item"),) if candidates else (),
        events=tuple(Event(name, fields[name], lengths[name]) for name in events),
        tables=tuple(tables),
        tasks=tasks,
        base_rate=0.3,
    )


def make_batch(schema: Schema, lengths: dict[str, list[int]], rows: int | None = None, seed: int = 0):
    """lengths: number of events per row and event type. Pooled features have 0 to 2 ids."""
    from torchrec import KeyedJaggedTensor

    from recsys_norm.data.batch import Batch

    rows = len(next(iter(lengths.values()))) if rows is None else rows
    random = torch.Generator().manual_seed(seed)

    def ids(counts: list[torch.Tensor], features: tuple[IdFeature, ...]):
        values = [
            torch.randint(schema.rows(feature.table), (int(count.sum()),), generator=random)
            for count, feature in zip(counts, features, strict=True)
        ]
        keys = [feature.name for feature in features]
        values = torch.cat(values) if values else torch.empty(0, dtype=torch.long)
        return KeyedJaggedTensor(keys, values, lengths=torch.cat(counts).long() if counts else values, stride=rows)

    pooled = [torch.randint(3, (rows,), generator=random) for _ in schema.sparse]
    counts = [torch.ones(rows, dtype=torch.long) for _ in schema.candidates]
    for event in schema.events:
        counts += [torch.tensor(lengths[event.name], dtype=torch.long)] * len(event.fields)
    totals = {event.name: sum(lengths[event.name]) for event in schema.events}
    return Batch(
        dense=torch.randn(rows, schema.dense, generator=random),
        sparse=ids(pooled, schema.sparse),
        ids=ids(counts, schema.ids) if schema.ids else None,
        ages={name: torch.rand(total, generator=random) * 1e6 for name, total in totals.items()},
        label=torch.randint(2, (rows, len(schema.tasks)), generator=random).float(),
    )


def row_of(batch, i: int, schema: Schema):
    """Row i of a batch as a batch of its own."""
    from torchrec import KeyedJaggedTensor

    from recsys_norm.data.batch import Batch

    def one(features):
        parts = [features[key] for key in features.keys()]
        spans = [(int(part.offsets()[i]), int(part.offsets()[i + 1])) for part in parts]
        values = torch.cat([part.values()[begin:end] for part, (begin, end) in zip(parts, spans)])
        lengths = torch.tensor([end - begin for begin, end in spans])
        return KeyedJaggedTensor(features.keys(), values, lengths=lengths, stride=1)

    ages = {}
    for event in schema.events:
        begin, end = batch.ids[event.fields[0].name].offsets()[i : i + 2].tolist()
        ages[event.name] = batch.ages[event.name][begin:end]
    ids = None if batch.ids is None else one(batch.ids)
    return Batch(batch.dense[i : i + 1], one(batch.sparse), ids, ages, batch.label[i : i + 1])


LENGTHS = {"long": [0, 3, 6, 1, 0], "short": [2, 0, 4, 1, 0]}
