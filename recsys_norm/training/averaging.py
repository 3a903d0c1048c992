"""The moving average of the dense weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from recsys_norm.training.optim import Optimizers
from recsys_norm.training.replicas import local


class WeightAverage:
    """a <- d a + (1 - d) w after each optimizer step, with d = min(decay, (1 + step) / (10 + step)).

    The smaller d of the first steps lets the average forget the initial weights, which it starts from. It
    covers the fp32 parameters that the optimizer updates; embedding tables, of which a step touches few rows, keep
    their own values.
    `values` (by name of the parameter) belongs into checkpoints.
    """

    def __init__(self, optimizers: Optimizers, decay: float) -> None:
        self.decay = decay
        self._optimizers = optimizers
        self.values: dict[str, Tensor] = {n: p.detach().clone() for n, p in optimizers.parameters.items()}
        self._weights = _parts(optimizers.parameters.values())
        self._averages = _parts(self.values.values())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """To be called after optimizer step `step` (from 0)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._averages, self._weights, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model computes with the average."""
        with torch.no_grad():
            kept = [weight.clone() for weight in self._weights]
            torch._foreach_copy_(self._weights, self._averages)
        self._optimizers.loaded()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, kept)
            self._optimizers.loaded()


def _parts(tensors) -> list[Tensor]:
    return [part.detach() for tensor in tensors for part in local(tensor)]
