"""LayerNorm and RMSNorm with torch.nn's constructors and keys, computed by `recsys_norm.ops`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recsys_norm import ops
from recsys_norm.nn.policy import Policy


def _last_dimension_only(name: str, normalized_shape: int | Sequence[int]) -> None:
    if not isinstance(normalized_shape, int) and len(tuple(normalized_shape)) != 1:
        raise ValueError(
            f"{name} normalises the last dimension; normalized_shape={tuple(normalized_shape)} has more than one: "
            f"use torch.nn.{name}, or flatten the input"
        )


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` over the last dimension, with a fused residual add:

        z = x (+ residual);  y = (z - mean(z)) / sqrt(var(z) + eps) * weight + bias

    The constructor is torch.nn's plus `backend`, `technique` and `on_unsupported` (see `recsys_norm.ops`).
    `forward(x, residual=None, return_sum=False)` returns y, or (y, z).
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *args: Any,
        backend: str = "fused",
        technique: str | None = None,
        on_unsupported: str = "raise",
        **kwargs: Any,
    ):
        _last_dimension_only("LayerNorm", normalized_shape)
        super().__init__(normalized_shape, *args, **kwargs)
        self.policy = Policy(backend, technique, on_unsupported)

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None, return_sum: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        options: dict[str, Any] = dict(residual=residual, return_sum=return_sum, **self.policy.arguments())
        return ops.layer_norm(x, self.weight, self.bias, self.eps, **options)


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dimension, with a fused residual add:

        z = x (+ residual);  y = z / sqrt(mean(z^2) + eps) * weight

    Constructor and forward as in `LayerNorm` of this module; eps=None means what torch's does.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *args: Any,
        backend: str = "fused",
        technique: str | None = None,
        on_unsupported: str = "raise",
        **kwargs: Any,
    ):
        _last_dimension_only("RMSNorm", normalized_shape)
        super().__init__(normalized_shape, *args, **kwargs)
        self.policy = Policy(backend, technique, on_unsupported)

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None, return_sum: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        options: dict[str, Any] = dict(residual=residual, return_sum=return_sum, **self.policy.arguments())
        return ops.rms_norm(x, self.weight, self.eps, **options)
