"""Optimizers and the learning rate schedule."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from recsys_norm.training.config import DenseOptimizerConfig, OptimizerConfig
from recsys_norm.training.masters import MasterWeights
from recsys_norm.training.replicated import ReplicatedRowWiseAdagrad


def lr_factor(config: OptimizerConfig, step: int, total: int) -> float:
    """What both learning rates are multiplied with at optimizer step `step` (from 0) of `total`.

    (step + 1) / warmup_steps up to 1, then constant, linear or along half a cosine down to `final_lr` at the end.
    A function of the step alone: a resumed run needs no state for it.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    done = min((step - config.warmup_steps) / max(total - config.warmup_steps, 1), 1.0)
    falling = 1 - done if config.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.final_lr + (1 - config.final_lr) * falling


class Optimizers:
    """AdamW of the dense part and the fused optimizer of the tables, under one schedule.

    Sharded tables are updated inside `backward`, with the learning rate that `set_lr` left there, and replicated ones
    by `after_backward`. `weights`, where `dense`
    computes in low precision, holds the fp32 parameters that are optimized in place of the module's own.
    """

    def __init__(
        self,
        dense: nn.Module,
        sparse: nn.Module,
        config: OptimizerConfig,
        total_steps: int,
        weights: MasterWeights | None = None,
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self.weights = weights
        low = {} if weights is None else weights.masters
        own = {name: p for name, p in dense.named_parameters() if p.requires_grad and name not in low}
        self.parameters: dict[str, Tensor] = own | low
        self._own = own
        matrices, vectors = ([p for p in own.values() if (p.dim() > 1) == matrix] for matrix in (True, False))
        if weights is not None:
            for buffer in weights.buffers:
                (matrices if weights.holds_matrices(buffer) else vectors).append(buffer)
        self.dense = _adamw(matrices, vectors, config.dense)
        self.sparse = sparse.fused_optimizer
        self.replicated = ReplicatedRowWiseAdagrad(sparse, config.sparse)
        self.lr = 0.0
        self._current: tuple[float, float] | None = None

    def set_lr(self, step: int) -> None:
        """Take the learning rates of optimizer step `step`."""
        factor = lr_factor(self.config, step, self.total_steps)
        self.lr = self.config.dense.lr * factor
        self._set(self.lr, self.config.sparse.lr * factor)

    def freeze(self) -> None:
        """Learning rates of 0: steps take their time and change nothing."""
        self._set(0.0, 0.0)

    def _set(self, dense: float, sparse: float) -> None:
        if (dense, sparse) == self._current:
            return
        self._current = (dense, sparse)
        for group in self.dense.param_groups:
            group["lr"] = dense
        for group in self.sparse.param_groups:
            group["lr"] = sparse
        self.sparse.step()  # hands the learning rate to the lookup kernels, the updates happen in the backward

    def after_backward(self) -> None:
        """To be called after each backward pass: updates the tables that are not updated inside it."""
        self.replicated.step(self._current[1])

    def clip(self) -> Tensor:
        """Clip the dense gradients to `clip_norm` and return their norm before that, on the device."""
        if self.weights is not None:
            self.weights.collect()
        parameters = [p for group in self.dense.param_groups for p in group["params"]]
        if self.config.clip_norm is None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        else:
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.clip_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def step(self) -> None:
        if self.weights is None:
            self.dense.step()
        else:
            self.weights.step(self.dense)
        self.dense.zero_grad(set_to_none=True)

    def loaded(self) -> None:
        """To be called after the parameters were written to."""
        if self.weights is not None:
            self.weights.refresh()

    def state(self) -> dict[str, Tensor]:
        """Tensors by name, for checkpoints: AdamW's per parameter, the tables' as TorchRec shards them.

        Loading writes into these very tensors, so AdamW's are made here where no step has made them yet.
        """
        state: dict[str, Tensor] = {}
        for name, parameter in self._own.items():
            state |= {f"adamw/{name}/{key}": tensor for key, tensor in self._adamw_state(parameter).items()}
        for buffer in () if self.weights is None else self.weights.buffers:
            for key, tensor in self._adamw_state(buffer).items():
                shared = key == "step"  # one number for all that lie in the buffer
                parts = self.weights.parts(buffer, buffer.data if shared else tensor)
                state |= {f"adamw/{name}/{key}": tensor if shared else part for name, part in parts.items()}
        for name, entry in self.sparse.state_dict()["state"].items():
            state |= {f"tables/{name}/{key}": tensor for key, tensor in entry.items()}
        return state | {f"tables/{name}": tensor for name, tensor in self.replicated.state().items()}

    def _adamw_state(self, parameter: Tensor) -> dict[str, Tensor]:
        entry = self.dense.state[parameter]
        if not entry:
            entry["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            entry["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            entry["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return entry


def _adamw(matrices: list[Tensor], vectors: list[Tensor], config: DenseOptimizerConfig) -> torch.optim.AdamW:
    groups: list[dict] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=tuple(config.betas),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
