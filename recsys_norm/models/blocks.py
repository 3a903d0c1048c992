"""The two halves of a layer: a transformer block per event type, and the global interaction of Wukong experts.

B rows, T packed events of one type, D width of X, E width of an event type's tokens. `how` holds the arguments that
pick the implementation of each op.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recsys_norm.models.config import EventConfig, ModelConfig
from recsys_norm.models.mixing import mix, mix_behind
from recsys_norm.nn import LinearNorm, LinearNormLinear, NormAttention, NormLinear, RMSNorm
from recsys_norm.nn.linear import linear_norm_side_by_side


def uniform_offsets(rows: int, n: int, device: torch.device) -> Tensor:
    """Offsets [rows + 1] of sequences of n tokens each."""
    return torch.arange(rows + 1, device=device, dtype=torch.int32) * n


def normal(*shape: int, fan_in: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / math.sqrt(fan_in))


class GatedTokenLinear(nn.Module):
    """X_sum = (W X) * sigmoid(G X + g): [B, n, D] -> [B, m, D]."""

    def __init__(self, n: int, m: int):
        super().__init__()
        self.weight = normal(2 * m, n, fan_in=n)
        self.gate_bias = nn.Parameter(torch.ones(m, 1))

    def forward(self, x_BnD: Tensor) -> Tensor:
        value, gate = mix(self.weight, x_BnD).chunk(2, 1)
        return value * torch.sigmoid(gate + self.gate_bias.to(gate.dtype))


class PersonalizedFFN(nn.Module):
    """GDPA-PFFN: a feed-forward network over each event whose two weight matrices K and V come from the row's X_sum.

    qn = LN(x);  o_h = gelu(qn_h K_h^T / tau) V_h + qn_h;  x <- RMS(o) + x
    """

    def __init__(self, config: ModelConfig, event: EventConfig, how: dict):
        super().__init__()
        self.heads = event.heads
        self.lengths = dict(max_q_len=event.max_len, max_k_len=config.n_sum, packed=True)
        self.weights = NormLinear(config.dim, 2 * event.dim, norm="rms", **how["linear"])
        self.attention = NormAttention(
            event.heads,
            event.dim // event.heads,
            activation="gelu",
            scale=1 / (event.tau or event.max_len),
            pre_norm="layer",
            post_norm="rms",
            inner_residual=True,
            **how["attention"],
        )

    def forward(self, x_TE: Tensor, offsets: Tensor, x_sum: Tensor, sum_offsets: Tensor) -> Tensor:
        q = x_TE.unflatten(1, (self.heads, -1))
        k, v = self.weights(x_sum.flatten(0, 1)).unflatten(1, (2, self.heads, -1)).unbind(1)
        return self.attention(q, k, v, offsets, sum_offsets, residual=q, **self.lengths).flatten(1)


class SelfAttention(nn.Module):
    """Causal sliding-window attention: x <- LN(attention(RMS(x) W_qkv) W_o) + x, or the residual inside the norm."""

    def __init__(self, config: ModelConfig, event: EventConfig, how: dict):
        super().__init__()
        self.heads = event.heads
        self.lengths = dict(max_q_len=event.max_len, max_k_len=event.max_len, packed=True)
        self.qkv = NormLinear(event.dim, 3 * event.dim, norm="rms", **how["linear"])
        self.attention = NormAttention(
            event.heads,
            event.dim // event.heads,
            softmax=True,
            causal=True,
            window=event.window,
            **how["attention"],
        )
        self.out = LinearNorm(
            event.dim, event.dim, norm="layer", residual_position=config.residual_position, **how["linear"]
        )

    def forward(self, x_TE: Tensor, offsets: Tensor) -> Tensor:
        q, k, v = self.qkv(x_TE).unflatten(1, (3, self.heads, -1)).unbind(1)
        return self.out(self.attention(q, k, v, offsets, offsets, **self.lengths).flatten(1), residual=x_TE)


class SumKronLinear(nn.Module):
    """Y = sum_i Z_i^T H W_i: [B, m, E] -> [B, n, D]. As a map of the whole matrix H, a sum of Kronecker products."""

    def __init__(self, m: int, n: int, E: int, D: int, rank: int):
        super().__init__()
        self.n = n
        self.z = normal(n * rank, m, fan_in=m)
        self.w = normal(D, rank * E, fan_in=rank * E)

    def forward(self, h_BmE: Tensor) -> Tensor:
        return F.linear(mix(self.z, h_BmE).unflatten(1, (self.n, -1)).flatten(2), self.w)


class SeedPooling(nn.Module):
    """Hierarchical seed pooling: normalised seeds attend to the events, H_seed is compressed to n_summary tokens.

    The seeds are learned and, so that the summary depends on what is ranked, shifted by the row's X_sum:
    `seeds = RMS(S + mix(X_sum) W)`. A row without events has H_seed = 0.
    """

    def __init__(self, config: ModelConfig, event: EventConfig, how: dict):
        super().__init__()
        self.heads = event.heads
        self.lengths = dict(max_q_len=config.n_seeds, max_k_len=event.max_len, packed=True)
        self.seeds = normal(config.n_seeds, event.dim, fan_in=1)
        self.shift = NormLinear(config.dim, event.dim, norm="rms", **how["linear"])
        self.spread = normal(config.n_seeds, config.n_sum, fan_in=config.n_sum)
        self.norm = RMSNorm(event.dim, **how["linear"])
        self.kv = NormLinear(event.dim, 2 * event.dim, norm="rms", **how["linear"])
        self.attention = NormAttention(
            event.heads,
            event.dim // event.heads,
            softmax=True,
            **how["attention"],
        )
        self.compress = SumKronLinear(config.n_seeds, config.n_summary, event.dim, config.dim, config.kron_rank)

    def forward(self, x_TE: Tensor, offsets: Tensor, x_sum: Tensor, seed_offsets: Tensor) -> Tensor:
        shift = mix(self.spread, self.shift(x_sum))
        q = self.norm(self.seeds.to(shift.dtype) + shift).flatten(0, 1).unflatten(1, (self.heads, -1))
        k, v = self.kv(x_TE).unflatten(1, (2, self.heads, -1)).unbind(1)
        h_seed = self.attention(q, k, v, seed_offsets, offsets, **self.lengths)
        return self.compress(h_seed.view(-1, *self.seeds.shape))


class TransformerBlock(nn.Module):
    """One event type's half of a layer: PFFN, self-attention, seed pooling; (x [T, E], Y) -> (x, Y).

    With CompSkip the blocks of an event type alternate between two kinds: self-attention only, which hands the last
    summary Y on, and PFFN with a fresh pooling. The last block is of the second kind, or its self-attention would feed
    nothing: of 8 layers, counted from 1, the odd ones attend and the even ones run the PFFN. The very first block pools
    in any case, since there is no summary yet.
    """

    def __init__(self, config: ModelConfig, event: EventConfig, layer: int, how: dict):
        super().__init__()
        from_last = event.layers - 1 - layer
        attends = not config.comp_skip or from_last % 2 == 1
        feeds_forward = not config.comp_skip or from_last % 2 == 0
        self.pffn = PersonalizedFFN(config, event, how) if feeds_forward else None
        self.self_attention = SelfAttention(config, event, how) if attends else None
        self.pooling = SeedPooling(config, event, how) if feeds_forward or layer == 0 else None

    def forward(self, x, y, offsets, x_sum, sum_offsets, seed_offsets) -> tuple[Tensor, Tensor]:
        if self.pffn is not None:
            x = self.pffn(x, offsets, x_sum, sum_offsets)
        if self.self_attention is not None:
            x = self.self_attention(x, offsets)
        if self.pooling is not None:
            y = self.pooling(x, offsets, x_sum, seed_offsets)
        return x, y


class WukongExpert(nn.Module):
    """The parameters of one expert, and its factorization tokens (see Experts)."""

    def __init__(self, config: ModelConfig, n: int, how: dict):
        super().__init__()
        D, h = config.dim, config.mlp_dim
        self.fmb_tokens = config.fmb_tokens
        self.p = normal(config.fmb_rank, n, fan_in=n)
        self.fmb_in = NormLinear(n * config.fmb_rank, h, norm="layer", **how["linear"])
        self.fmb_out = LinearNormLinear(h, h, config.fmb_tokens * D, norm="layer", activation="gelu", **how["linear"])
        self.lcb = normal(n - config.fmb_tokens, n, fan_in=n)
        self.out = LinearNorm(D, D, norm="layer", residual_position="before", **how["linear"])
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, interactions_Bnr: Tensor) -> Tensor:
        """X (X^T P) -> FMB: [B, n, r] -> [B, fmb_tokens, D]"""
        hidden = self.dropout(F.gelu(self.fmb_in(interactions_Bnr.flatten(1))))
        return self.fmb_out(hidden).unflatten(1, (self.fmb_tokens, -1))


class Experts(nn.Module):
    """The global interaction: Wukong experts in parallel, [B, n, D] -> [B, n * experts, D]. Each of them:

        FMB = reshape(MLP(LN(flatten(X (X^T P)))));  LCB = W_L X;  out = LN([FMB | LCB] + X W_res)

    They read the same X, so each product is one for all of them, and their tokens alternate in the result: token i of
    every expert, then token i + 1. (No ModuleList, which FSDP2 of torch 2.11 refuses to shard even with a forward.)
    """

    def __init__(self, count: int, config: ModelConfig, n: int, how: dict):
        super().__init__()
        for index in range(count):
            self.add_module(str(index), WukongExpert(config, n, how))
        # Where the norm is a kernel that inductor does not see into, the stack in front of it would be a pass of its own.
        self.in_place = how["linear"]["backend"] == "fused"

    def forward(self, *tokens: Tensor) -> Tensor:
        """The tokens of [X_sum | Y_1 | Y_2 ..] to those of the next X."""
        x, experts = torch.cat(tokens, 1), list(self.children())
        mixed = mix(torch.cat([expert.p for expert in experts]), x)
        interactions = torch.bmm(x, mixed.mT).chunk(len(experts), 2)
        fmb = torch.stack([expert(part) for expert, part in zip(experts, interactions)], 2)
        lcb = torch.stack([expert.lcb for expert in experts], 1).flatten(0, 1)
        residual = self._stack(fmb.flatten(1, 2), lcb, x)
        B, n, D = x.shape
        out = linear_norm_side_by_side([expert.out for expert in experts], x, residual.view(B, n, len(experts) * D))
        return out.view(residual.shape)

    def _stack(self, fmb: Tensor, lcb: Tensor, x: Tensor) -> Tensor:
        return mix_behind(fmb, lcb, x) if self.in_place else torch.cat([fmb, mix(lcb, x)], 1)
