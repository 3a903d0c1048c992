"""What a converted module becomes: the same object with the same parameters, of a subclass with another forward.

A fused op computes what several modules did. The last of them calls the op with the parameters of all; those before it
pass their input on. So the code that calls the modules, their names, parameters, hooks and state_dict stay as they are, and
`isinstance` still holds. Inputs of a dtype that the ops do not take (float64) go the way they went before.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recsys_norm import ops
from recsys_norm.nn.policy import Policy

NORMS = (nn.LayerNorm, nn.RMSNorm)
ACTIVATIONS = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Hardswish: "hardswish"}  # and nn.GELU by its `approximate`
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_STATE = "_recsys_norm"  # attribute of a swapped module, in its __dict__ past nn.Module's registration


def activation_name(module: nn.Module) -> str | None:
    """The ops' name of an activation module, None if they have none."""
    if type(module) is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    return ACTIVATIONS.get(type(module))


def norm_arguments(norm: nn.Module) -> dict:
    """The norm of a torch.nn module as arguments of an op."""
    layer = isinstance(norm, nn.LayerNorm)
    return {
        "norm": "layer" if layer else "rms",
        "norm_weight": norm.weight,
        "norm_bias": norm.bias if layer else None,
        "eps": norm.eps,
    }


class Swapped:
    """Mixin of all swapped classes. `parts` are the modules before this one whose work it does."""

    kind = ""

    @property
    def policy(self) -> Policy:
        return self.__dict__[_STATE]["policy"]

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return self.__dict__[_STATE]["parts"]

    def original(self, x: Tensor) -> Tensor:
        """What the modules computed before they were swapped."""
        for part in self.parts:
            x = origin(part).forward(part, x)
        return origin(self).forward(self, x)

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

    def fused(self, x: Tensor) -> Tensor:
        (norm,) = self.parts
        return ops.norm_linear(x, self.weight, self.bias, **norm_arguments(norm), **self.policy.arguments())


class _LinearNormLinear(Swapped):
    kind = "linear_norm_linear"

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
        return ops.linear_norm(x, linear.weight, linear.bias, **norm_arguments(self), **self.policy.arguments())


class _Norm(Swapped):
    kind = "norm"

    def fused(self, x: Tensor) -> Tensor:
        if isinstance(self, nn.LayerNorm):
            return ops.layer_norm(x, self.weight, self.bias, self.eps, **self.policy.arguments())
        return ops.rms_norm(x, self.weight, self.eps, **self.policy.arguments())


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


def origin(module: nn.Module) -> type:
    """The class a module had before it was swapped."""
    return module.__dict__[_STATE]["origin"] if is_swapped(module) else type(module)


def is_swapped(module: nn.Module) -> bool:
    return isinstance(module, Swapped)


def swap(module: nn.Module, kind: str, policy: Policy, parts: tuple[nn.Module, ...] = (), **state) -> None:
    """Give a module the class for `kind`; `parts` are the modules before it whose work it takes over, which pass on."""
    for part in parts:
        set_class(part, _CLASSES[Passed, type(part)], policy, ())
    set_class(module, _CLASSES[_BY_KIND[kind], type(module)], policy, parts, **state)


def set_class(module: nn.Module, target: type, policy: Policy, parts: tuple[nn.Module, ...], **state) -> None:
    """Make a module one of the swapped class `target`."""
    module.__dict__[_STATE] = {"origin": type(module), "policy": policy, "parts": parts, **state}
    module.__class__ = target


def restore(module: nn.Module) -> None:
    """Give a swapped module its own class back."""
    module.__class__ = module.__dict__.pop(_STATE)["origin"]


def set_policy(module: nn.Module, policy: Policy) -> None:
    module.__dict__[_STATE]["policy"] = policy
