"""Weights in the dtype of the activations, with fp32 masters behind them."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor, nn

ALIGNMENT = 128  # elements between the starts of two weights in one buffer: kernels want addresses of 16 bytes and more


class _Flat:
    """Tensors of many shapes, one after another in three buffers: fp32 values, fp32 gradients and low-precision values."""

    def __init__(self, values: dict[str, Tensor], dtype: torch.dtype) -> None:
        starts, total = {}, 0
        for name, value in values.items():
            starts[name] = total
            total += -(-value.numel() // ALIGNMENT) * ALIGNMENT
        device = next(iter(values.values())).device
        self.master = nn.Parameter(torch.zeros(total, device=device))
        self.grad = torch.zeros(total, device=device)
        self.low = torch.zeros(total, device=device, dtype=dtype)
        self._places = {name: (starts[name], value.shape) for name, value in values.items()}
        with torch.no_grad():
            for name, view in self.views(self.master.data).items():
                view.copy_(values[name])

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The parts of a buffer of this layout, by name and in their shapes."""
        return {name: buffer[start : start + prod(s)].view(s) for name, (start, s) in self._places.items()}


class MasterWeights:
    """Puts low-precision weights into `module`, in place, and keeps fp32 masters from which they are rounded.

    Under autocast each fp32 weight costs one cast in the forward and one of its gradient in the backward: ~960 kernel
    launches a step in kunlun_base, whose optimizer has 470 tensors to list besides. Here all matrices lie in one buffer and
    all vectors in another, so that clipping, AdamW and rounding are a few launches each. The values are the same, since
    autocast rounds both the weights and their gradients too. `module.state_dict()` holds the masters, so
    checkpoints do not depend on the precision of a run; whoever fills those tensors calls `refresh` afterwards.

    Attributes:
        masters: fp32 values by name of the parameter, parts of `buffers`.
        buffers: what the optimizer updates: one parameter of all matrices, one of all vectors.

    Args:
        keep: names (or prefixes of names) of parameters that stay fp32.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, keep: Iterable[str] = ()) -> None:
        keep = tuple(keep)
        parameters = {
            name: p
            for name, p in module.named_parameters()
            if p.dtype == torch.float32 and p.requires_grad and not name.startswith(keep)
        }
        kinds = ({n: p for n, p in parameters.items() if (p.dim() > 1) == matrix} for matrix in (True, False))
        self._flats = [_Flat(values, dtype) for values in kinds if values]
        self.buffers = [flat.master for flat in self._flats]
        self.masters: dict[str, Tensor] = {}
        self.weights: dict[str, nn.Parameter] = {}
        self._grads: dict[str, Tensor] = {}
        for flat in self._flats:
            self.masters |= flat.views(flat.master.data)
            self.weights |= {name: nn.Parameter(view) for name, view in flat.views(flat.low).items()}
            self._grads |= flat.views(flat.grad)
        self._without_gradient: list[str] = []
        replacement = {id(p): self.weights[name] for name, p in parameters.items()}
        for child in module.modules():
            for name, p in child._parameters.items():
                if id(p) in replacement:
                    child._parameters[name] = replacement[id(p)]

        def fill(_module, state: dict, prefix: str, _metadata) -> None:
            state.update({prefix + name: p.detach() for name, p in self.masters.items()})

        module.register_state_dict_post_hook(fill)
        self.refresh()

    @property
    def nbytes(self) -> int:
        """Of what is kept beside the masters: low-precision weights and gradients."""
        return sum(flat.low.nbytes + flat.grad.nbytes for flat in self._flats)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the module's weights."""
        for flat in self._flats:
            flat.low.copy_(flat.master)

    @torch.no_grad()
    def collect(self) -> None:
        """Move the weights' gradients to the masters."""
        given = [name for name, weight in self.weights.items() if weight.grad is not None]
        self._without_gradient = [name for name in self.weights if self.weights[name].grad is None]
        if given:
            torch._foreach_copy_([self._grads[n] for n in given], [self.weights[n].grad for n in given])
        if self._without_gradient:
            torch._foreach_zero_([self._grads[name] for name in self._without_gradient])
        for name in given:
            self.weights[name].grad = None
        for flat in self._flats:
            flat.master.grad = flat.grad

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of the optimizer of `buffers`. As for parameters on their own, one without a gradient stays as it is."""
        kept = {name: self.masters[name].clone() for name in self._without_gradient}
        optimizer.step()
        for name, value in kept.items():
            self.masters[name].copy_(value)
        self.refresh()

    def holds_matrices(self, buffer: nn.Parameter) -> bool:
        """Whether the parameters in this buffer have more than one dimension."""
        return any(part.dim() > 1 for part in self.parts(buffer, buffer.data).values())

    def parts(self, buffer: nn.Parameter, like: Tensor) -> dict[str, Tensor]:
        """The parts of `like`, which has the layout of `buffer` (the optimizer's state of it), by name."""
        return next(flat for flat in self._flats if flat.master is buffer).views(like)
