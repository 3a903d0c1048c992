"""Floating point operations of the model, for MFU: GEMMs and attention over valid tokens, embedding lookups excluded.

A GEMM of shapes [M, K] x [K, N] counts 2 M K N; a query that attends to a key counts 4 per feature (score and value).
Norms, activations and rotations count nothing, and padding, masked pairs and recomputation do not either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recsys_norm.data.schema import Event, Schema
from recsys_norm.models.config import EventConfig, ModelConfig, as_model_config, check_events
from recsys_norm.models.tokens import N_TIME, n_inputs


class ModelFlops:
    """`step(rows, lengths)` is the count of one training step: forward x 3, as a backward costs two forwards.

    rows: number of rows B. lengths: {event: [B] number of events per row}.
    """

    def __init__(self, config: ModelConfig | Any, schema: Schema):
        config = as_model_config(config)
        check_events(config, schema)
        events = {event.name: (event, config.events[event.name]) for event in schema.events}
        self.windows = {name: sizes.window for name, (_, sizes) in events.items()}
        self.per_token = {name: _per_token(config, schema, event, sizes) for name, (event, sizes) in events.items()}
        self.per_pair = {name: 4 * sizes.dim * _count(config, sizes, "attends") for name, (_, sizes) in events.items()}
        self.per_row = _per_row(config, schema, [sizes for _, sizes in events.values()])

    def forward(self, rows: int, lengths: Mapping[str, Tensor]) -> float:
        total = float(rows * self.per_row)
        for name, per_token in self.per_token.items():
            length = torch.as_tensor(lengths[name]).double()
            total += float(length.sum()) * per_token + float(pairs(length, self.windows[name])) * self.per_pair[name]
        return total

    def step(self, rows: int, lengths: Mapping[str, Tensor]) -> float:
        return 3 * self.forward(rows, lengths)


def pairs(length: Tensor, window: int) -> Tensor:
    """Query-key pairs of causal attention in which a query sees its `window` latest keys, itself included."""
    inside = length.clamp(max=window)
    return (inside * (inside + 1) / 2 + (length - inside) * window).sum()


def _count(config: ModelConfig, event: EventConfig, kind: str) -> int:
    """How many blocks of an event type attend / feed forward / pool (see TransformerBlock)."""
    if not config.comp_skip:
        return event.layers
    forward = (event.layers + 1) // 2
    return {"attends": event.layers // 2, "feeds": forward, "pools": forward + (event.layers % 2 == 0)}[kind]


def _per_token(config: ModelConfig, schema: Schema, event: Event, sizes: EventConfig) -> int:
    E, embeddings = sizes.dim, n_inputs(config, event, schema)
    embed = 2 * (embeddings * config.tables.dim + 2 * N_TIME) * E + 2 * E * E
    attend = 2 * E * 3 * E + 2 * E * E
    feed = 4 * E * config.n_sum
    pool = 2 * E * 2 * E + 4 * E * config.n_seeds
    counts = (_count(config, sizes, kind) for kind in ("attends", "feeds", "pools"))
    return embed + sum(count * cost for count, cost in zip(counts, (attend, feed, pool)))


def _per_row(config: ModelConfig, schema: Schema, events: list[EventConfig]) -> int:
    D, h = config.dim, config.mlp_dim
    n_embedded = len(schema.sparse) + len(schema.candidates)
    total = 2 * (schema.dense * D + D * D) * (schema.dense > 0) + 2 * n_embedded * config.tables.dim * D
    n = n_embedded + (schema.dense > 0)
    n_in = config.n_sum + len(events) * config.n_summary
    linear_tokens = n_in - config.fmb_tokens
    expert = 4 * n_in * config.fmb_rank * D + 2 * n_in * config.fmb_rank * h + 2 * h * h  # X (X^T P), then the MLP
    expert += 2 * h * config.fmb_tokens * D + 2 * linear_tokens * n_in * D + 2 * n_in * D * D
    for _ in range(max((event.layers for event in events), default=config.layers)):
        total += 2 * 2 * config.n_sum * n * D + config.experts * expert
        n = config.experts * n_in
    for event in events:
        pooling = 2 * config.n_sum * D * event.dim + 2 * config.n_seeds * config.n_sum * event.dim
        pooling += 2 * config.n_summary * config.kron_rank * event.dim * (config.n_seeds + D)
        total += _count(config, event, "pools") * pooling
        total += _count(config, event, "feeds") * 2 * config.n_sum * D * 2 * event.dim
    head = 2 * config.head_tokens * D * h + 2 * h * h + 2 * h * len(schema.tasks)
    return total + 2 * 2 * config.head_tokens * n * D + head
