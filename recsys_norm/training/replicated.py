"""The optimizer of tables that every rank holds as a whole (sharding type data_parallel)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recsys_norm.training.config import SparseOptimizerConfig


class ReplicatedRowWiseAdagrad:
    """What the fused optimizer of sharded tables does, for tables whose gradients DDP has averaged over the ranks.

    For each row w [D] with gradient g:   s += mean(g^2);   w -= lr * g / (sqrt(s) + eps)

    Rows that no batch touched have g = 0 and stay. `state()` has the fused optimizer's names, so that a checkpoint does
    not depend on the sharding.
    """

    def __init__(self, sparse: nn.Module, config: SparseOptimizerConfig) -> None:
        replicated = {name for name, table in sparse.state_dict().items() if not hasattr(table, "local_shards")}
        self._config = config
        self._tables = {name: table for name, table in sparse.named_parameters() if name in replicated}
        self._sums = {name: torch.zeros(len(t), dtype=t.dtype, device=t.device) for name, t in self._tables.items()}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Apply and drop the gradients of one backward pass."""
        grads = {name: table.grad for name, table in self._tables.items()}
        for name, grad in grads.items():
            if grad is None:
                continue
            table, sums = self._tables[name], self._sums[name]
            sums += grad.square().mean(1)
            table -= lr * grad / (sums.sqrt() + self._config.eps)[:, None]
        for table in self._tables.values():
            table.grad = None

    def state(self) -> dict[str, Tensor]:
        return {f"{name}/{name.split('.')[-2]}.momentum1": sums for name, sums in self._sums.items()}
