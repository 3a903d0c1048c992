"""Attention on packed sequences between two norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recsys_norm import ops
from recsys_norm.nn.policy import Policy


class NormAttention(nn.Module):
    """`norm(attention(norm(q), k, v)) + residual` on packed sequences. See `recsys_norm.ops.norm_attention`.

    Parameters: pre_norm_weight (and pre_norm_bias for "layer") of width H * d, or d for scope "head"; post_norm_weight
    (and post_norm_bias) of width H * d. With pre_norm_on="qk", q and k share the parameters of the pre-norm.
    `forward(q_THd, k_UHd, v_UHd, q_offsets, k_offsets, max_q_len=, max_k_len=, residual=None, packed=False)`.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        activation: str | tuple[str, ...] = "gelu",
        softmax: bool = False,
        scale: float | None = None,
        causal: bool = False,
        window: int | None = None,
        pre_norm: str | None = None,
        pre_norm_on: str = "q",
        pre_norm_scope: str = "all_heads",
        post_norm: str | None = None,
        norm_affine: bool = True,
        eps: float | None = 1e-5,
        inner_residual: bool = False,
        attention: str = "fused",
        backend: str = "fused",
        technique: str | None = None,
        on_unsupported: str = "raise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.policy = Policy(backend, technique, on_unsupported)
        self.options: dict[str, Any] = dict(
            activation=activation,
            softmax=softmax,
            scale=scale,
            causal=causal,
            window=window,
            pre_norm=pre_norm,
            pre_norm_on=pre_norm_on,
            pre_norm_scope=pre_norm_scope,
            post_norm=post_norm,
            eps=eps,
            inner_residual=inner_residual,
            attention=attention,
        )
        widths = {"pre": head_dim if pre_norm_scope == "head" else heads * head_dim, "post": heads * head_dim}
        for side, norm in (("pre", pre_norm), ("post", post_norm)):
            width, affine = widths[side], norm_affine and norm is not None
            weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype)) if affine else None
            shift = affine and norm == "layer"
            bias = nn.Parameter(torch.zeros(width, device=device, dtype=dtype)) if shift else None
            self.register_parameter(f"{side}_norm_weight", weight)
            self.register_parameter(f"{side}_norm_bias", bias)

    def forward(
        self,
        q_THd: Tensor,
        k_UHd: Tensor,
        v_UHd: Tensor,
        q_offsets_B1: Tensor,
        k_offsets_B1: Tensor,
        *,
        max_q_len: int,
        max_k_len: int,
        residual: Tensor | None = None,
        packed: bool = False,
    ) -> Tensor:
        parameters: dict[str, Any] = {
            f"{side}_norm_{kind}": getattr(self, f"{side}_norm_{kind}")
            for side in ("pre", "post")
            for kind in ("weight", "bias")
        }
        return ops.norm_attention(
            q_THd,
            k_UHd,
            v_UHd,
            q_offsets_B1,
            k_offsets_B1,
            max_q_len=max_q_len,
            max_k_len=max_k_len,
            residual=residual,
            packed=packed,
            **parameters,
            **self.options,
            **self.policy.arguments(),
        )
