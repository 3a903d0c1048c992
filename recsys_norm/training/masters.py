"""Weights in the dtype of the activations, with fp32 masters behind them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class MasterWeights:
    """Puts low-precision weights into `module`, in place, and keeps the fp32 parameters they come from.

    Under autocast each fp32 weight costs one cast in the forward and one of its gradient in the backward: ~960 kernel
    launches a step in kunlun_base. Here one multi-tensor launch refreshes all weights after an optimizer step and one
    collects all gradients; the values are the same, since autocast rounds both the weights and their gradients too.
    `module.state_dict()` holds the masters, so checkpoints do not depend on the precision of a run; whoever fills those
    tensors calls `refresh` afterwards.

    Args:
        keep: names (or prefixes of names) of parameters that stay fp32.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, keep: Iterable[str] = ()) -> None:
        keep = tuple(keep)
        self.masters = {
            name: p
            for name, p in module.named_parameters()
            if p.dtype == torch.float32 and p.requires_grad and not name.startswith(keep)
        }
        self.weights = {name: nn.Parameter(p.detach().to(dtype)) for name, p in self.masters.items()}
        replacement = {id(self.masters[name]): self.weights[name] for name in self.masters}
        for child in module.modules():
            for name, p in child._parameters.items():
                if id(p) in replacement:
                    child._parameters[name] = replacement[id(p)]

        def fill(_module, state: dict, prefix: str, _metadata) -> None:
            state.update({prefix + name: p.detach() for name, p in self.masters.items()})

        module.register_state_dict_post_hook(fill)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the module's weights."""
        torch._foreach_copy_(list(self.weights.values()), list(self.masters.values()))

    @torch.no_grad()
    def collect(self) -> None:
        """Move the weights' gradients to the masters."""
        wanted = [name for name, w in self.weights.items() if w.grad is not None]
        grads: list[Tensor] = [self.weights[name].grad for name in wanted]
        moved = [torch.empty_like(self.masters[name]) for name in wanted]
        if moved:
            torch._foreach_copy_(moved, grads)
        for name, p in self.masters.items():
            p.grad = self.weights[name].grad = None
        for name, grad in zip(wanted, moved):
            self.masters[name].grad = grad
