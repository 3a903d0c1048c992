"""A Kunlun-style ranking model: event sequences and feature tokens, transformed side by side, layer by layer.

    X   = tokens of dense, pooled and candidate features           [B, n, D]
    x_e = tokens of the events of type e, all rows packed          [T_e, E]
    per layer:  X_sum = gated linear over the tokens of X          [B, n_sum, D]
                x_e, Y_e = transformer block(x_e, X_sum)           Y_e [B, n_summary, D]
                X = experts([X_sum | Y_1 | Y_2 ..])                [B, experts * n, D]
    logits = MLP(gated linear over the tokens of X)                [B, n_tasks]

Source: Kunlun (arXiv 2602.10016); InterFormer for weight generation, Wukong for the interaction blocks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recsys_norm.data.schema import Schema
from recsys_norm.models.blocks import Experts, GatedTokenLinear, TransformerBlock, uniform_offsets
from recsys_norm.models.config import EventConfig, ModelConfig, as_model_config, check_events
from recsys_norm.models.sparse import EventInputs, SparseArch
from recsys_norm.models.tokens import Clock, ContextTokens, EventTokens
from recsys_norm.nn import LinearNorm, LinearNormLinear, NormLinear


class Kunlun(nn.Module):
    """forward(batch) -> logits [B, n_tasks] fp32. `sparse` holds the tables, `dense` everything else.

    Args:
        config: ModelConfig or its Hydra form; an event of the schema needs sizes in `config.events`, sizes of events
            that the schema lacks are not used.
        backend, attention, on_unsupported: passed to every op (`how` in the modules below). Weights and state_dict keys
            do not depend on them.
        table_device: see SparseArch.
    """

    def __init__(
        self,
        config: ModelConfig | Any,
        schema: Schema,
        *,
        backend: str = "fused",
        attention: str = "fused",
        on_unsupported: str = "fallback",
        table_device: torch.device | str | None = None,
    ):
        super().__init__()
        config = as_model_config(config)
        linear = dict(backend=backend, on_unsupported=on_unsupported)
        how = dict(linear=linear, attention=dict(linear, attention=attention))
        self.dense = DenseArch(config, schema, how)
        self.sparse = SparseArch(config, schema, table_device)

    def forward(self, batch) -> Tensor:
        pooled, candidates, events = self.sparse(batch)
        for fields, _, ages in events.values():
            _mark_dynamic(fields), _mark_dynamic(ages)
        return self.dense(batch.dense, pooled, candidates, events)


def filled_length(n: int, multiple: int | None, offset: int) -> int:
    """n, or the next number that is `offset` more than a multiple."""
    return n + (offset - n) % multiple if multiple else n


def _filled(x: Tensor, multiple: int | None, offset: int) -> Tensor:
    """x [T, ..] with rows of zeros after its last until their number is filled up."""
    missing = filled_length(len(x), multiple, offset) - len(x)
    if missing == 0:
        return x
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def _mark_dynamic(x: Tensor) -> None:
    """Tell a compiled part that T changes from batch to batch, or it would compile for the first T alone."""
    if isinstance(x, Tensor) and not torch.compiler.is_compiling():  # and no proxy of a tracer
        torch._dynamo.maybe_mark_dynamic(x, 0)


class DenseArch(nn.Module):
    """Everything but the tables: tensors in, logits out; made for torch.compile(fullgraph=True) with dynamic T.

    Args of forward:
        dense [B, n_dense]; pooled [B, F, dim] or None; candidates [B, C, dim] or None;
        events: {name: (field embeddings [T, n_fields * dim], offsets [B + 1] int32, ages [T] in seconds)}.

    Attributes:
        token_multiple: None, or fill T up to a multiple of it, plus the event type's `token_offsets` (0 unless set), with
            tokens that belong to no row. They change no result: attention neither reads them nor sends them a gradient.
            With few values of T, the parts that depend on it can be replayed as CUDA graphs, too.
    """

    full_precision = ("head.out.",)  # parameters that compute in fp32 under autocast too

    def __init__(self, config: ModelConfig, schema: Schema, how: dict):
        super().__init__()
        check_events(config, schema)
        self.token_multiple: int | None = None
        self.token_offsets: dict[str, int] = {}
        sizes = {event.name: config.events[event.name] for event in schema.events}
        self.n_sum, self.n_seeds = config.n_sum, config.n_seeds
        self.context = ContextTokens(config, schema, how)
        self.clocks = nn.ModuleDict({event.name: Clock(sizes[event.name]) for event in schema.events})
        self.event_tokens = nn.ModuleDict(
            {event.name: EventTokens(config, sizes[event.name], event, schema, how) for event in schema.events}
        )
        self.layers = nn.ModuleList()
        n = self.context.n
        for layer in range(max((event.layers for event in sizes.values()), default=config.layers)):
            self.layers.append(Layer(config, sizes, layer, n, how))
            n = self.layers[-1].n_out
        self.head = Head(config, n, len(schema.tasks), how)
        self.dropout = nn.Dropout(config.embedding_dropout) if config.embedding_dropout else nn.Identity()
        initialize(self, schema)

    def forward(
        self, dense: Tensor, pooled: Tensor | None, candidates: Tensor | None, events: dict[str, EventInputs]
    ) -> Tensor:
        pooled, candidates = self._embeddings(pooled), self._embeddings(candidates)
        x = self.context(dense, pooled, candidates)
        sequences = {}
        for name, tokens in self.event_tokens.items():
            fields, offsets, ages = events[name]
            fill = self.token_multiple, self.token_offsets.get(name, 0)
            fields, ages = _filled(self._embeddings(fields), *fill), _filled(ages, *fill)
            _mark_dynamic(fields), _mark_dynamic(ages)
            clock = self.clocks[name](offsets, ages, fields.dtype)
            for part in clock:
                _mark_dynamic(part)
            sequences[name] = tokens(fields, *clock, candidates)
        offsets = {name: events[name][1] for name in sequences}
        summaries: dict[str, Tensor | None] = dict.fromkeys(sequences)
        sum_offsets = uniform_offsets(dense.shape[0], self.n_sum, dense.device)
        seed_offsets = uniform_offsets(dense.shape[0], self.n_seeds, dense.device)
        for layer in self.layers:
            for sequence in sequences.values():
                _mark_dynamic(sequence)
            x, sequences, summaries = layer(x, sequences, summaries, offsets, sum_offsets, seed_offsets)
        return self.head(x)

    def regions(self) -> list[tuple[nn.Module, bool]]:
        """The parts to compile one by one, and whether their shapes take few values, so that they can be replayed: they
        depend on the number of rows alone, or on a number of tokens that is filled up.

        Parts of one kind share a graph, so that compiling takes a fraction.
        """
        fixed = [self.context, self.head]
        jagged = [*self.clocks.values(), *self.event_tokens.values()]
        for layer in self.layers:
            fixed += [layer.summarize, layer.experts]
            jagged += layer.blocks.values()
        filled = self.token_multiple is not None
        return [(region, True) for region in fixed] + [(region, filled) for region in jagged]

    def _embeddings(self, x: Tensor | None) -> Tensor | None:
        """What the tables returned, in the dtype of the activations."""
        if x is None:
            return None
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return self.dropout(x)


class Layer(nn.Module):
    """A transformer block for each event type that reaches this deep, then the experts on [X_sum | Y_1 | Y_2 ..]."""

    def __init__(self, config: ModelConfig, sizes: dict[str, EventConfig], layer: int, n: int, how: dict):
        super().__init__()
        self.summarize = GatedTokenLinear(n, config.n_sum)
        deep = {name: event for name, event in sizes.items() if layer < event.layers}
        self.blocks = nn.ModuleDict({name: TransformerBlock(config, deep[name], layer, how) for name in deep})
        self.n_in = config.n_sum + len(sizes) * config.n_summary
        self.n_out = config.experts * self.n_in
        self.experts = Experts(config.experts, config, self.n_in, how)

    def forward(self, x, sequences, summaries, offsets, sum_offsets, seed_offsets) -> tuple[Tensor, dict, dict]:
        sequences, summaries = dict(sequences), dict(summaries)
        x_sum = self.summarize(x)
        for name, block in self.blocks.items():
            state = sequences[name], summaries[name]
            sequences[name], summaries[name] = block(*state, offsets[name], x_sum, sum_offsets, seed_offsets)
        return self.experts(x_sum, *summaries.values()), sequences, summaries


class Head(nn.Module):
    """logits = gelu(MLP(flatten(gated linear over tokens))) W + b, the last product in fp32."""

    def __init__(self, config: ModelConfig, n: int, n_tasks: int, how: dict):
        super().__init__()
        self.compress = GatedTokenLinear(n, config.head_tokens)
        width, h = config.head_tokens * config.dim, config.mlp_dim
        self.mlp = LinearNormLinear(width, h, h, norm="layer", activation="gelu", **how["linear"])
        self.out = nn.Linear(h, n_tasks)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(F.gelu(self.mlp(self.compress(x).flatten(1))))
        with torch.autocast(h.device.type, enabled=False):
            return self.out(h.float())


def initialize(model: DenseArch, schema: Schema) -> None:
    """Linear weights of variance 1 / fan-in, zero biases. The norm that ends a residual branch of an event type starts
    at 1 / sqrt(branches), so that the stream keeps its scale at any depth. The logit starts at the base rate."""
    for module in model.modules():
        if isinstance(module, (NormLinear, LinearNorm, LinearNormLinear, nn.Linear)):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 2:
                    nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
                elif name.startswith("bias"):
                    nn.init.zeros_(parameter)
    for name in model.event_tokens:
        blocks = [layer.blocks[name] for layer in model.layers if name in layer.blocks]
        gains = [block.pffn.attention.post_norm_weight for block in blocks if block.pffn is not None]
        attends = [block.self_attention.out for block in blocks if block.self_attention is not None]
        gains += [out.norm_weight for out in attends if out.residual_position == "after"]
        for gain in gains:
            nn.init.constant_(gain, len(gains) ** -0.5)
    out = model.head.out
    nn.init.normal_(out.weight, std=0.1 * out.in_features**-0.5)
    if schema.base_rate is not None:
        nn.init.constant_(out.bias[:1], math.log(schema.base_rate / (1 - schema.base_rate)))
