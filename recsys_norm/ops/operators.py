"""Ops of torch.library like those of `torch.library.custom_op`: one node for torch.compile, profilers, FLOP counters and
dispatch modes, with gradients. custom_op costs an eager call more than a small kernel does: it looks for the defaults of
arguments in a time that grows with the square of their number, and goes through the dispatcher again below autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _C
from torch._dynamo.decorators import skip
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import Function, forward_ad

# By op. Kept where they outlive this module, since a notebook may load it, or one that defines ops, again.
_LIBRARIES: dict[str, torch.library.Library] = vars(torch.ops.recsys_norm).setdefault("_libraries", {})
_DENSE = {_C.DispatchKeySet(key).raw_repr() for key in (_C.DispatchKey.CPU, _C.DispatchKey.CUDA)}


class Op:
    """The op `recsys_norm::name` made of a kernel: a function with a type for each argument, which returns new tensors.
    `register_fake` and `register_autograd` are as in `torch.library.custom_op`."""

    def __init__(self, name: str, kernel: Callable):
        if name in _LIBRARIES:
            _LIBRARIES.pop(name)._destroy()
        self._library = library = _LIBRARIES[name] = torch.library.Library("recsys_norm", "FRAGMENT")
        library.define(name + torch.library.infer_schema(kernel, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(torch.ops.recsys_norm, name).default
        self._with_tensors = (
            max(i for i, a in enumerate(self.overload._schema.arguments) if "Tensor" in str(a.type)) + 1
        )
        self._kernel = torch.compiler.disable(kernel)
        self._apply = _function_of(self, self._no_gradient, None)
        library.impl(name, self._run, "CompositeExplicitAutograd")
        library.impl(name, self._run_autograd, "Autograd", with_keyset=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.overload(*args, **kwargs)

    def register_fake(self, fake: Callable) -> Callable:
        torch.library.register_fake(self.overload.name(), fake, lib=self._library)
        return fake

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        """As in custom_op, but `backward` returns one gradient per argument up to the last tensor. Only for ops without
        defaults: the dispatcher takes away arguments that are equal to theirs."""
        self._apply = _function_of(self, backward, setup_context)

    @skip  # as torch's own layers are: where dynamo looks at every frame, it must not see those of an op
    def _run(self, *args: Any) -> Any:
        output = self._kernel(*args)
        outputs = output if isinstance(output, tuple) else (output,)
        if _C._any_output_is_alias_to_input_or_output(args[: self._with_tensors], {}, outputs):
            raise RuntimeError(f"{self.overload}: an output shares memory with an input or with another output")
        return output

    @skip
    def _run_autograd(self, keyset: _C.DispatchKeySet, *args: Any) -> Any:
        if forward_ad._current_level >= 0:
            self._check_no_tangents(args)
        if torch.is_grad_enabled() and _C._any_requires_grad(*args):
            n = self._with_tensors
            if not _C._are_functorch_transforms_active():
                return self._apply(*args[:n], (keyset, args[n:]))
            with enable_single_level_autograd_function():  # one level of torch.func at a time comes here
                return self._apply(*args[:n], (keyset, args[n:]))
        return self.below_autograd(keyset, args)

    def _check_no_tangents(self, args: tuple) -> None:
        tensors = (arg for arg in args if isinstance(arg, torch.Tensor))
        if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
            raise NotImplementedError(
                f"{self.overload} has no forward-mode AD; backend='unfused', attention='eager' has"
            )

    @skip
    def below_autograd(self, keyset: _C.DispatchKeySet, args: tuple) -> Any:
        """The kernel at once where it is what the dispatcher would come to next."""
        below = keyset & _C._after_autograd_keyset
        with _C._AutoDispatchBelowAutograd():
            return self._run(*args) if below.raw_repr() in _DENSE else self.overload.redispatch(below, *args)

    def _no_gradient(self, ctx: Any, *grads: Any) -> None:
        raise RuntimeError(f"Trying to backward through {self.overload} but no autograd formula was registered.")


def define(name: str) -> Callable[[Callable], Op]:
    return lambda kernel: Op(name, kernel)


def _function_of(op: Op, gradient: Callable, setup_context: Callable | None) -> Callable:
    """What calls the op and records it for autograd."""

    @skip
    def forward(ctx, *args):
        *tensors, (keyset, others) = args
        args = (*tensors, *others)
        if _C._are_functorch_transforms_active():
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):  # for the levels outside of this one
                output = op.below_autograd(keyset, args)
        else:
            output = op.below_autograd(keyset, args)
        if setup_context is not None:
            setup_context(ctx, args, output)
        return output

    def backward(ctx, *grads):
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        return (*gradient(ctx, *grads), None)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(f"recsys_norm_{op.overload._opname}", (Function,), members)
    return super(Function, function).apply  # Function's own takes a rule per transform of torch.func
