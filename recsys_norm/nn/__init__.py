"""Modules over `recsys_norm.ops`: parameters live here, the backend is an argument, the state_dict never depends on it."""

from recsys_norm.nn.attention import NormAttention
from recsys_norm.nn.linear import LinearNorm, LinearNormLinear, NormLinear
from recsys_norm.nn.norm import LayerNorm, RMSNorm

__all__ = ["LayerNorm", "LinearNorm", "LinearNormLinear", "NormAttention", "NormLinear", "RMSNorm"]
