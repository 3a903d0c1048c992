"""nn.TransformerEncoderLayer with its norms fused into the linears beside them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recsys_norm import ops
from recsys_norm.conversion import graphs
from recsys_norm.conversion.swaps import DTYPES, Swapped, set_class
from recsys_norm.nn.policy import Policy
from recsys_norm.nn.torch_modules import norm_arguments


class FusedTransformerEncoderLayer(Swapped, nn.TransformerEncoderLayer):
    """pre-norm:  x + out_proj(attention(in_proj(norm1(x))));   x + linear2(act(linear1(norm2(x))))
    post-norm: norm1(x + out_proj(attention(in_proj(x)))); norm2(x + linear2(act(linear1(x))))

    norm and in_proj, norm and linear1 (pre) or out_proj, sum and norm, linear2, sum and norm (post) are one op each. Where
    dropout stands between a linear and its norm, the sum and the norm are one op while it is active. Nested tensors, float64
    and small inputs go through torch's own forward.
    """

    kind = "transformer encoder layer"

    def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
        if src.is_nested or src.dtype not in DTYPES or self.small(src):
            return nn.TransformerEncoderLayer.forward(self, src, src_mask, src_key_padding_mask, is_causal)
        mask = _merged_mask(src.dtype, src_mask, src_key_padding_mask, self.self_attn.num_heads)
        causal = is_causal and src_key_padding_mask is None
        attention, feed = self.self_attn, (self.linear1.weight, self.linear1.bias)
        packed = (attention.in_proj_weight, attention.in_proj_bias)
        second = (self.linear2.weight, self.linear2.bias)
        if self.norm_first:
            qkv = self._norm_linear(src, *packed, self.norm1)
            x = src + self.dropout1(F.linear(self._attend(qkv, mask, causal), *_out(attention)))
            h = self.activation(self._norm_linear(x, *feed, self.norm2))
            return x + self.dropout2(F.linear(self.dropout(h), *second))
        o = self._attend(F.linear(src, *packed), mask, causal)
        x = self._add_norm(o, *_out(attention), src, self.norm1, self.dropout1)
        h = self.dropout(self.activation(F.linear(x, *feed)))
        return self._add_norm(h, *second, x, self.norm2, self.dropout2)

    def _norm_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: nn.LayerNorm) -> Tensor:
        given, (N, K) = norm_arguments(norm), weight.shape
        how = graphs.arguments(self.policy, "norm_linear", x, given, K, N, bias=bias is not None)
        return ops.norm_linear(x, weight, bias, **given, **how)

    def _add_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        norm: nn.LayerNorm,
        dropout: nn.Dropout,
    ) -> Tensor:
        """norm(residual + dropout(x W^T + bias))."""
        given, (N, K) = norm_arguments(norm), weight.shape
        if not (self.training and dropout.p > 0):
            options: dict[str, Any] = dict(residual=residual, residual_position="before")
            fields = dict(residual="before", bias=bias is not None)
            how = graphs.arguments(self.policy, "linear_norm", x, given, K, N, **fields)
            return cast(Tensor, ops.linear_norm(x, weight, bias, **options, **given, **how))
        z = dropout(F.linear(x, weight, bias))
        how = graphs.arguments(self.policy, "norm", z, given, N, N, residual="before")
        return cast(Tensor, ops.layer_norm(z, norm.weight, norm.bias, norm.eps, residual=residual, **how))

    def _attend(self, qkv: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """[..., 3 E] -> [..., E] in the layer's layout."""
        attention = self.self_attn
        if not attention.batch_first and qkv.dim() == 3:
            qkv = qkv.transpose(0, 1)
        q, k, v = qkv.unflatten(-1, (3, attention.num_heads, -1)).movedim(-3, 0).transpose(-2, -3).unbind(0)
        p = attention.dropout if self.training else 0.0
        mask, causal = (None, True) if causal else (mask, False)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=causal)
        o = o.transpose(-2, -3).flatten(-2)
        return o.transpose(0, 1) if not attention.batch_first and o.dim() == 3 else o


def swap_layer(layer: nn.TransformerEncoderLayer, policy: Policy) -> None:
    set_class(layer, FusedTransformerEncoderLayer, policy, ())


def why_not(layer: nn.TransformerEncoderLayer) -> str | None:
    """Why a layer stays as it is, None if it can be fused."""
    attention = layer.self_attn
    if type(layer) is not nn.TransformerEncoderLayer:
        return f"{type(layer).__name__} overrides what nn.TransformerEncoderLayer computes"
    if attention.in_proj_weight is None or attention.bias_k is not None or attention.add_zero_attn:
        return "its attention has separate projections, an extra key or a zero key"
    if type(layer.norm1) is not nn.LayerNorm or type(layer.norm2) is not nn.LayerNorm:
        return "its norms are no nn.LayerNorm"
    return None


def _out(attention: nn.MultiheadAttention) -> tuple[Tensor, Tensor | None]:
    return attention.out_proj.weight, attention.out_proj.bias


def _merged_mask(dtype: torch.dtype, mask: Tensor | None, padding: Tensor | None, heads: int) -> Tensor | None:
    """Both masks as one that scaled_dot_product_attention adds to the scores, [B, 1 or heads, S, S]; True means masked."""
    merged = None
    if mask is not None:
        merged = _additive(mask, dtype)
        if merged.dim() == 3:  # one per row and head
            merged = merged.unflatten(0, (-1, heads))
    if padding is not None:
        keys = _additive(padding, dtype)
        keys = keys[:, None, None, :] if keys.dim() == 2 else keys[None, None, :]
        merged = keys if merged is None else merged + keys
    return merged


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
