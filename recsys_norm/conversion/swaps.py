"""What a converted module becomes: the same object with the same parameters, of a subclass with another forward.

A fused op computes what several modules did. The last of them calls the op with the parameters of all; those before it
pass their input on. So the code that calls the modules, their names, parameters, hooks and state_dict stay as they are, and
`isinstance` still holds. Inputs of a dtype that the ops do not take (float64) go the way they went before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from recsys_norm import ops
from recsys_norm.nn.policy import Policy
from recsys_norm.nn.torch_modules import ACTIVATIONS, NORMS, norm_arguments

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_STATE = "_recsys_norm"  # attribute of a swapped module, in its __dict__ past nn.Module's registration


if TYPE_CHECKING:
    _Base = nn.Module  # which a swapped class is by its other base
else:
    _Base = object


class Swapped(_Base):
    """Mixin of all swapped classes. `parts` are the modules before this one whose work it does."""

    kind = ""

    @property
    def policy(self) -> Policy:
        return self.__dict__[_STATE]["policy"]

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.__dict__[_STATE]["parts"]

    def original(self, x: Tensor) -> Tensor:
        """What the modules computed before they were swapped."""
        for part in self.parts:
            x = origin(part).forward(part, x)
        return origin(self).forward(self, x)

    def fused(self, x: Tensor) -> Tensor:
        """What it computes now."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x) if x.dtype in DTYPES else self.original(x)

    def extra_repr(self) -> str:
        backend = self.__dict__[_STATE]["policy"].backend
        return ", ".join(filter(None, (super().extra_repr(), f"{self.kind}, backend={backend!r}")))


class Passed(Swapped):
    """Its work is done by a later module."""

    kind = "done by a later module"

    def forward(self, x: Tensor) -> Tensor:
        return x


class _NormLinear(Swapped):
    kind = "norm_linear"
    weight: Tensor
    bias: Tensor | None

    def fused(self, x: Tensor) -> Tensor:
        (norm,) = self.parts
        return ops.norm_linear(x, self.weight, self.bias, **norm_arguments(norm), **self.policy.arguments())


class _LinearNormLinear(Swapped):
    kind = "linear_norm_linear"
    weight: Tensor
    bias: Tensor | None

    def fused(self, x: Tensor) -> Tensor:
        first, norm, *activation = self.parts
        return ops.linear_norm_linear(
            x,
            first.weight,
            first.bias,
            self.weight,
            self.bias,
            activation=self.__dict__[_STATE]["activation"],
            **norm_arguments(norm),
            **self.policy.arguments(),
        )


class _LinearNorm(Swapped):
    kind = "linear_norm"

    def fused(self, x: Tensor) -> Tensor:
        (linear,) = self.parts
        y = ops.linear_norm(x, linear.weight, linear.bias, **norm_arguments(self), **self.policy.arguments())
        return cast(Tensor, y)


class _Norm(Swapped):
    kind = "norm"
    weight: Tensor | None
    bias: Tensor | None
    eps: Any

    def fused(self, x: Tensor) -> Tensor:
        how = self.policy.arguments()
        if issubclass(origin(self), nn.LayerNorm):
            return cast(Tensor, ops.layer_norm(x, self.weight, self.bias, self.eps, **how))
        return cast(Tensor, ops.rms_norm(x, self.weight, self.eps, **how))


def _class(mixin: type, base: type) -> type:
    """A class of this module, so that converted models pickle."""
    name = f"{mixin.__name__.lstrip('_')}_{base.__name__}"
    made = type(name, (mixin, base), {"__module__": __name__, "__doc__": mixin.__doc__})
    globals()[name] = made
    return made


_CLASSES = {
    (mixin, base): _class(mixin, base)
    for mixin, bases in (
        (Passed, (nn.Linear, *NORMS, nn.GELU, *ACTIVATIONS)),
        (_NormLinear, (nn.Linear,)),
        (_LinearNormLinear, (nn.Linear,)),
        (_LinearNorm, NORMS),
        (_Norm, NORMS),
    )
    for base in bases
}
_BY_KIND = {mixin.kind: mixin for mixin, _ in _CLASSES}


def origin(module: nn.Module) -> type[nn.Module]:
    """The class a module had before it was swapped."""
    return module.__dict__[_STATE]["origin"] if is_swapped(module) else type(module)


def is_swapped(module: nn.Module) -> bool:
    return isinstance(module, Swapped)


def swap(module: nn.Module, kind: str, policy: Policy, parts: tuple[nn.Module, ...] = (), **state: Any) -> None:
    """Give a module the class for `kind`; `parts` are the modules before it whose work it takes over, which pass on."""
    for part in parts:
        set_class(part, _CLASSES[Passed, type(part)], policy, ())
    set_class(module, _CLASSES[_BY_KIND[kind], type(module)], policy, parts, **state)


def set_class(module: nn.Module, target: type, policy: Policy, parts: tuple[nn.Module, ...], **state: Any) -> None:
    """Make a module one of the swapped class `target`."""
    module.__dict__[_STATE] = {"origin": type(module), "policy": policy, "parts": parts, **state}
    module.__class__ = target


def restore(module: nn.Module) -> None:
    """Give a swapped module its own class back."""
    module.__class__ = module.__dict__.pop(_STATE)["origin"]


def set_policy(module: nn.Module, policy: Policy) -> None:
    module.__dict__[_STATE]["policy"] = policy
