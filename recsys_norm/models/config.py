"""Sizes of the Kunlun model: structured configs for Hydra, usable without Hydra as plain dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from recsys_norm.data.schema import Schema


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


@dataclass
class EventConfig:
    """Sizes of one event type's transformer blocks: every event type has its own.

    dim, heads: width of its tokens, and attention heads.
    layers: the first `layers` layers of the model have a transformer block for this event type.
    window: a token attends to itself and the `window - 1` events before it.
    max_len: the most events of a row, an upper bound that kernels rely on. mean_len: what synthetic data is made with.
    tau: the PFFN scores are scaled by 1 / tau; None means max_len.
    """

    dim: int = 64
    heads: int = 2
    layers: int = 2
    window: int = 32
    mean_len: int = 24
    max_len: int = 64
    tau: float | None = None

    def __post_init__(self) -> None:
        for name in ("dim", "heads", "layers", "window", "max_len"):
            _require(getattr(self, name) >= 1, f"event config: {name}={getattr(self, name)} must be at least 1")
        _require(self.dim % self.heads == 0, f"event config: dim={self.dim} is no multiple of heads={self.heads}")
        _require(self.tau is None or self.tau > 0, f"event config: tau={self.tau} must be above 0, or None for max_len")
        _require(self.dim % 4 == 0, f"event config: dim={self.dim} is no multiple of 4, which the rotations need")


@dataclass
class TableConfig:
    """Embedding tables: `dim` is the width of all of them. `count` and `rows` are what synthetic data is made with;
    a data set of its own brings its number of rows in its schema."""

    count: int = 6
    rows: int = 10_000
    dim: int = 32


@dataclass
class ModelConfig:
    """Sizes of the whole model.

    batch_size, n_dense, tables.count, tables.rows: what the data configs refer to.
    dim: width D of the tokens X [B, n, D] that the interaction blocks work on.
    layers: interaction layers of a model without events; with events, the largest `layers` of theirs.
    n_sum: tokens of X_sum. n_seeds, n_summary, kron_rank: seeds, summary tokens and terms of each seed pooling.
    experts: Wukong experts per layer, each with fmb_tokens factorization tokens (the others are linear) of rank
        fmb_rank, made by an MLP of width mlp_dim. head_tokens: tokens that the head reads.
    comp_skip: alternate self-attention with PFFN and pooling, instead of all three in every layer.
    residual_position: whether the residual joins "before" or "after" the norm of the self-attention's output.
    event_products: what an event's tokens are made from besides its fields: "match" adds item x candidate, "all" also
        item x f, f x candidate and item x f x candidate for each further field f (see EventTokens).
    dropout: on the hidden layers of the experts' and the head's MLP. embedding_dropout: on what the tables return.
    """

    name: str = "kunlun"
    batch_size: int = 256
    n_dense: int = 8
    dim: int = 64
    layers: int = 2
    tables: TableConfig = field(default_factory=TableConfig)
    events: dict[str, EventConfig] = field(default_factory=dict)
    n_sum: int = 8
    n_seeds: int = 8
    n_summary: int = 4
    kron_rank: int = 2
    experts: int = 1
    fmb_tokens: int = 4
    fmb_rank: int = 8
    mlp_dim: int = 64
    head_tokens: int = 4
    comp_skip: bool = True
    residual_position: str = "after"
    event_products: str = "match"
    dropout: float = 0.0
    embedding_dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "n_sum", "n_seeds", "n_summary", "kron_rank", "experts", "fmb_rank", "mlp_dim"):
            _require(getattr(self, name) >= 1, f"model config: {name}={getattr(self, name)} must be at least 1")
        _require(
            0 < self.fmb_tokens < self.n_sum,
            f"model config: fmb_tokens={self.fmb_tokens} must lie between 1 and n_sum - 1 = {self.n_sum - 1}",
        )
        _require(
            self.residual_position in ("before", "after"),
            f"model config: residual_position={self.residual_position!r} is neither 'before' nor 'after'",
        )
        _require(
            self.event_products in ("match", "all"),
            f"model config: event_products={self.event_products!r} is neither 'match' nor 'all'",
        )
        for name in ("dropout", "embedding_dropout"):
            _require(0 <= getattr(self, name) < 1, f"model config: {name}={getattr(self, name)} must lie in [0, 1)")


def as_model_config(config: Any) -> ModelConfig:
    """The dataclass of a Hydra config (checked on the way), or the dataclass itself."""
    if isinstance(config, ModelConfig):
        return config
    from omegaconf import OmegaConf

    return OmegaConf.to_object(config)


def check_events(config: ModelConfig, schema: Schema) -> None:
    """Every event of the schema needs sizes, and room for its longest sequence."""
    for event in schema.events:
        if event.name not in config.events:
            raise ValueError(
                f"the data has events {event.name!r} and the model has sizes for {sorted(config.events) or 'none'}: "
                f"add model.events.{event.name} (dim, heads, layers, window, max_len)"
            )
        max_len = config.events[event.name].max_len
        if event.max_len > max_len:
            raise ValueError(
                f"events {event.name!r} have up to {event.max_len} per row and the model takes {max_len}: "
                f"set model.events.{event.name}.max_len={event.max_len}, or shorten the data's sequences"
            )


def register(config_store: Any) -> None:
    """Store the structured config; yaml files refer to it as `base_kunlun`."""
    config_store.store(group="model", name="base_kunlun", node=ModelConfig)
