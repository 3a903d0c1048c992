"""Linears fused with the norm before, after or between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recsys_norm import ops
from recsys_norm.nn.policy import Policy
from recsys_norm.ops.activations import ACTIVATIONS
from recsys_norm.ops.inputs import check_choice


class _Fused(nn.Module):
    """Parameters of linears and one norm, initialised as torch.nn does."""

    def __init__(self, norm: str, eps: float | None, policy: Policy):
        super().__init__()
        check_choice(type(self).__name__, "norm", norm, ("rms", "layer"))
        self.norm, self.eps, self.policy = norm, eps, policy

    def _add_linear(self, suffix: str, in_features: int, out_features: int, bias: bool, **factory) -> None:
        linear = nn.Linear(in_features, out_features, bias=bias, **factory)  # for its initialisation
        self.register_parameter(f"weight{suffix}", linear.weight)
        self.register_parameter(f"bias{suffix}", linear.bias)

    def _add_norm(self, width: int, affine: bool, **factory) -> None:
        shift = affine and self.norm == "layer"
        self.norm_weight = nn.Parameter(torch.ones(width, **factory)) if affine else None
        self.norm_bias = nn.Parameter(torch.zeros(width, **factory)) if shift else None

    def _norm_options(self) -> dict:
        options = dict(norm=self.norm, norm_weight=self.norm_weight, norm_bias=self.norm_bias, eps=self.eps)
        return options | self.policy.arguments()

    def extra_repr(self) -> str:
        weights = ", ".join(f"{n}={tuple(p.shape)}" for n, p in self.named_parameters(recurse=False))
        return f"{weights}, norm={self.norm!r}, eps={self.eps}, backend={self.policy.backend!r}"


class NormLinear(_Fused):
    """`norm(x) @ weight.T + bias`: x `[..., in_features]` -> `[..., out_features]`. See `recsys_norm.ops.norm_linear`.

    Parameters: weight, bias (as nn.Linear), norm_weight `[in_features]`, and norm_bias for norm="layer".
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        norm: str,
        norm_affine: bool = True,
        eps: float | None = 1e-5,
        backend: str = "fused",
        technique: str | None = None,
        on_unsupported: str = "raise",
        device=None,
        dtype=None,
    ):
        super().__init__(norm, eps, Policy(backend, technique, on_unsupported))
        self._add_linear("", in_features, out_features, bias, device=device, dtype=dtype)
        self._add_norm(in_features, norm_affine, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return ops.norm_linear(x, self.weight, self.bias, **self._norm_options())


class LinearNorm(_Fused):
    """`norm(x @ weight.T + bias)` with the residual before or after the norm. See `recsys_norm.ops.linear_norm`.

    Parameters: weight, bias (as nn.Linear), norm_weight `[out_features]`, and norm_bias for norm="layer".
    `forward(x, residual=None, return_sum=False)` returns y, or (y, un-normalised sum).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        norm: str,
        norm_affine: bool = True,
        eps: float | None = 1e-5,
        residual_position: str = "after",
        backend: str = "fused",
        technique: str | None = None,
        on_unsupported: str = "raise",
        device=None,
        dtype=None,
    ):
        super().__init__(norm, eps, Policy(backend, technique, on_unsupported))
        check_choice("LinearNorm", "residual_position", residual_position, ("before", "after"))
        self.residual_position = residual_position
        self._add_linear("", in_features, out_features, bias, device=device, dtype=dtype)
        self._add_norm(out_features, norm_affine, device=device, dtype=dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None, return_sum: bool = False):
        options = dict(residual=residual, residual_position=self.residual_position, return_sum=return_sum)
        return ops.linear_norm(x, self.weight, self.bias, **options, **self._norm_options())


class LinearNormLinear(_Fused):
    """`act(norm(x @ weight1.T + bias1)) @ weight2.T + bias2`. See `recsys_norm.ops.linear_norm_linear`.

    Parameters: weight1, bias1, weight2, bias2 (as nn.Linear), norm_weight `[hidden_features]`, and norm_bias for
    norm="layer".
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int,
        bias: bool = True,
        *,
        norm: str,
        norm_affine: bool = True,
        eps: float | None = 1e-5,
        activation: str | None = None,
        backend: str = "fused",
        technique: str | None = None,
        on_unsupported: str = "raise",
        device=None,
        dtype=None,
    ):
        super().__init__(norm, eps, Policy(backend, technique, on_unsupported))
        check_choice("LinearNormLinear", "activation", activation, (None, *ACTIVATIONS))
        self.activation = activation
        self._add_linear("1", in_features, hidden_features, bias, device=device, dtype=dtype)
        self._add_linear("2", hidden_features, out_features, bias, device=device, dtype=dtype)
        self._add_norm(hidden_features, norm_affine, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        tensors = (x, self.weight1, self.bias1, self.weight2, self.bias2)
        return ops.linear_norm_linear(*tensors, activation=self.activation, **self._norm_options())
