"""Ops of torch.library like those of `torch.library.custom_op`: one node for torch.compile, profilers, FLOP counters and
dispatch modes, with gradients. custom_op costs an eager call more than a small kernel: it looks for defaults of arguments in
a time that grows with the square of their number, and goes through the dispatcher a second time below autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _C
from torch._dynamo.decorators import skip

_LIBRARY = torch.library.Library("recsys_norm", "FRAGMENT")
_DENSE = {_C.DispatchKeySet(key).raw_repr() for key in (_C.DispatchKey.CPU, _C.DispatchKey.CUDA)}


class Op:
    """The op `recsys_norm::name` made of a kernel: a function with a type for each argument, which returns new tensors.
    `register_fake` and `register_autograd` are those of `torch.library.custom_op`."""

    def __init__(self, name: str, kernel: Callable):
        _LIBRARY.define(name + torch.library.infer_schema(kernel, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(torch.ops.recsys_norm, name).default
        self._kernel = torch.compiler.disable(kernel)
        self._function = _function_of(self, self._no_gradient, None)
        _LIBRARY.impl(name, self._run, "CompositeExplicitAutograd")
        _LIBRARY.impl(name, self._run_autograd, "Autograd", with_keyset=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.overload(*args, **kwargs)

    def register_fake(self, fake: Callable) -> Callable:
        torch.library.register_fake(self.overload._name, fake, lib=_LIBRARY)
        return fake

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        """Only for ops whose arguments have no defaults: the dispatcher removes arguments that are equal to theirs."""
        self._function = _function_of(self, backward, setup_context)

    @skip
    def _run(self, *args: Any) -> Any:
        output = self._kernel(*args)
        if _C._any_output_is_alias_to_input_or_output(args, {}, output if isinstance(output, tuple) else (output,)):
            raise RuntimeError(f"{self.overload}: an output shares memory with an input or with another output")
        return output

    @skip
    def _run_autograd(self, keyset: _C.DispatchKeySet, *args: Any) -> Any:
        if torch.is_grad_enabled() and _C._any_requires_grad(*args):
            return self._function.apply(*args, keyset)
        return self.below_autograd(keyset, args)

    @skip
    def below_autograd(self, keyset: _C.DispatchKeySet, args: tuple) -> Any:
        """The kernel at once if the dispatcher would do nothing before it."""
        below = keyset & _C._after_autograd_keyset
        with _C._AutoDispatchBelowAutograd():
            return self._run(*args) if below.raw_repr() in _DENSE else self.overload.redispatch(below, *args)

    def _no_gradient(self, ctx: Any, *grads: Any) -> None:
        raise RuntimeError(f"Trying to backward through {self.overload} but no autograd formula was registered.")


def register(name: str) -> Callable[[Callable], Op]:
    return lambda kernel: Op(name, kernel)


def _function_of(op: Op, gradient: Callable, setup_context: Callable | None) -> type[torch.autograd.Function]:
    @skip
    def forward(ctx, *args):
        *args, keyset = args
        output = op.below_autograd(keyset, args)
        if setup_context is not None:
            setup_context(ctx, args, output)
        return output

    def backward(ctx, *grads):
        return (*gradient(ctx, *grads), None)  # none for the keyset

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(op.overload._opname, (torch.autograd.Function,), members)
