"""From features to tokens: X [B, n, D] of dense and sparse features, one packed sequence x [T, E] per event type."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from recsys_norm.data.schema import Event, Schema
from recsys_norm.models.config import EventConfig, ModelConfig
from recsys_norm.nn import LinearNormLinear

N_TIME = 8  # frequencies of the time embedding
LOG_AGE = 20.0  # log(seconds in 15 years): ages map to about 0 .. 1


class ContextTokens(nn.Module):
    """Dense features -> MLP -> one token; each pooled embedding and each candidate -> a token. Returns X [B, n, D]."""

    def __init__(self, config: ModelConfig, schema: Schema, how: dict):
        super().__init__()
        self.n = (schema.dense > 0) + len(schema.sparse) + len(schema.candidates)
        if self.n == 0:
            raise ValueError("the schema has no dense, sparse or candidate feature; the model needs at least one token")
        self.dense = self.pooled = self.candidates = None
        if schema.dense:
            widths = schema.dense, config.dim, config.dim
            self.dense = LinearNormLinear(*widths, norm="layer", activation="gelu", **how["linear"])
        if schema.sparse:
            self.pooled = nn.Linear(config.tables.dim, config.dim)
        if schema.candidates:
            self.candidates = nn.Linear(config.tables.dim, config.dim)

    def forward(self, dense: Tensor, pooled: Tensor | None, candidates: Tensor | None) -> Tensor:
        tokens = []
        if self.dense is not None:
            tokens.append(self.dense(dense).unsqueeze(1))
        if self.pooled is not None:
            tokens.append(self.pooled(pooled))
        if self.candidates is not None:
            tokens.append(self.candidates(candidates))
        return torch.cat(tokens, 1)


class Clock(nn.Module):
    """What the tokens of one event type know of time: (row [T], phase [T, 2 N_TIME], cos and sin [T, E / 2]).

    Half of the angles grow with the position (0 is the newest event), by 1 radian per event down to 1 per max_len events,
    the other half with log(1 + age), by 1 radian down to 1 / LOG_AGE. The phases are of the age alone. Nothing here has a
    gradient; apart from the tokens, each sine is computed once a step, and not again wherever it is used.
    """

    def __init__(self, sizes: EventConfig):
        super().__init__()
        self.register_buffer("time_frequency", _geometric(8 * math.pi, math.pi / 2, N_TIME), persistent=False)
        self.register_buffer("position_turn", _geometric(1.0, 1 / sizes.max_len, sizes.dim // 4), persistent=False)
        self.register_buffer("time_turn", _geometric(LOG_AGE, 1.0, sizes.dim // 4), persistent=False)

    def forward(self, offsets: Tensor, ages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        row, position = locate(offsets, ages.shape[0])
        log_age = torch.log1p(ages.float())[:, None] / LOG_AGE
        phase = log_age * self.time_frequency
        angle = torch.cat([position[:, None] * self.position_turn, log_age * self.time_turn], 1)
        phases = torch.cat([phase.sin(), phase.cos()], 1)
        return row, phases.to(dtype), angle.cos().to(dtype), angle.sin().to(dtype)


class EventTokens(nn.Module):
    """Item, action and time embeddings -> MLP -> rotations. Returns packed tokens x [T, E].

    Where a candidate looks up the item's table, the product of both embeddings is an input too: it tells each event how
    well it matches what is ranked. With `event_products="all"` every further field f (the action) brings its products
    item x f, f x candidate and item x f x candidate, as inputs of their own: whether a match was liked.
    The feature pairs turn with the position and the age (see Clock).
    """

    def __init__(self, config: ModelConfig, sizes: EventConfig, event: Event, schema: Schema, how: dict):
        super().__init__()
        self.candidate = candidate_of(event, schema)
        self.dim = config.tables.dim
        self.all_products = config.event_products == "all"
        width = n_inputs(config, event, schema) * config.tables.dim + 2 * N_TIME
        self.mlp = LinearNormLinear(width, sizes.dim, sizes.dim, norm="layer", activation="gelu", **how["linear"])

    def forward(
        self, fields: Tensor, row: Tensor, phases: Tensor, cos: Tensor, sin: Tensor, candidates: Tensor | None
    ) -> Tensor:
        candidate = None
        if self.candidate is not None:  # in fp32, since its gradient is a sum over the events of a row
            candidate = candidates[:, self.candidate].float().index_select(0, row).to(fields.dtype)
        return rotate(self.mlp(torch.cat([fields, phases, *self._products(fields, candidate)], 1)), cos, sin)

    def _products(self, fields: Tensor, candidate: Tensor | None) -> list[Tensor]:
        item, *others = fields.split(self.dim, 1)
        others = others if self.all_products else []
        liked = [item * other for other in others]
        matched = [] if candidate is None else [x * candidate for x in (item, *others, *liked)]
        return liked + matched


def locate(offsets: Tensor, n_tokens: int) -> tuple[Tensor, Tensor]:
    """Row of each packed token, and its position from the end of its sequence (0 is the last), both [T] int.

    The search is in the whole of `offsets`: for a part of it, torch 2.11's inductor searches from its start on a GPU.
    """
    token = torch.arange(n_tokens, device=offsets.device, dtype=offsets.dtype)
    row = torch.searchsorted(offsets, token, right=True, out_int32=offsets.dtype == torch.int32) - 1
    row = row.clamp(max=max(offsets.shape[0] - 2, 0))  # tokens past the last offset belong to no row
    return row, offsets[row + 1] - 1 - token


def candidate_of(event: Event, schema: Schema) -> int | None:
    """Index of the candidate that looks up the table of the event's item."""
    tables = [candidate.table for candidate in schema.candidates]
    return tables.index(event.fields[0].table) if event.fields[0].table in tables else None


def n_inputs(config: ModelConfig, event: Event, schema: Schema) -> int:
    """Embeddings and products of embeddings that a token of the event is made from."""
    has_candidate = candidate_of(event, schema) is not None
    others = len(event.fields) - 1 if config.event_products == "all" else 0
    return len(event.fields) + has_candidate + others * (1 + 2 * has_candidate)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[:, i], x[:, i + D/2]) by the angles of cos and sin [:, i], which are [T, D/2]."""
    a, b = x.chunk(2, 1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], 1)


def _geometric(first: float, last: float, n: int) -> Tensor:
    return first * (last / first) ** (torch.arange(n) / max(n - 1, 1))
