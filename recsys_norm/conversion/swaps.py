"""What a converted module becomes: the same object with the same parameters, of a subclass with another forward.

A fused op computes what several modules did. The last of them calls the op with the parameters of all; those before it
pass their input on. So the code that calls the modules, their names, parameters, hooks and state_dict stay as they are, and
`isinstance` still holds. Inputs of a dtype that the ops do not take (float64), and on a GPU those with so few values that an
op's launch would cost more than it saves, go the way they went before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from recsys_norm import ops
from recsys_norm.conversion import graphs
from recsys_norm.conversion.norms import STATE, arguments_of, spec_of
from recsys_norm.nn.policy import Policy

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Values of the matrix that is normalised. An op costs the host more than the module calls it stands for, 0.35 ms each way
# where it was measured: at 17 million values every converted model waited for the host (benchmarks/NOTES.md).
MIN_ELEMENTS = 1 << 25


if TYPE_CHECKING:
    _Base = nn.Module  # which a swapped class is by its other base
else:
    _Base = object


class Swapped(_Base):
    """Mixin of all swapped classes. `parts` are the modules before this one whose work it does."""

    kind = ""

    @property
    def policy(self) -> Policy:
        return self.__dict__[STATE]["policy"]

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.__dict__[STATE]["parts"]

    def original(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What the modules computed before they were swapped."""
        for part in self.parts:
            x = origin(part).forward(part, x)
        return origin(self).forward(self, x, *args, **kwargs)

    def fused(self, x: Tensor) -> Tensor:
        """What it computes now."""
        raise NotImplementedError

    def small(self, x: Tensor) -> bool:
        """Whether an op would cost more than it saves."""
        return x.is_cuda and self.normalised(x) < self.__dict__[STATE]["min_elements"]

    def normalised(self, x: Tensor) -> int:
        """Values of the matrix that the norm sees."""
        return x.numel()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if (
            args or kwargs or x.dtype not in DTYPES or self.small(x)
        ):  # more arguments: of a norm with a class of its own
            return self.original(x, *args, **kwargs)
        return self.fused(x)

    def extra_repr(self) -> str:
        backend = self.__dict__[STATE]["policy"].backend
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
        given, (N, K) = arguments_of(self.parts[0]), self.weight.shape
        how = graphs.arguments(self.policy, "norm_linear", x, given, K, N, bias=self.bias is not None)
        return ops.norm_linear(x, self.weight, self.bias, **given, **how)


class _AfterLinear(Swapped):
    """The first part is a linear, whose result is normalised."""

    def normalised(self, x: Tensor) -> int:
        return x.shape[:-1].numel() * self.parts[0].weight.shape[0]


class _LinearNormLinear(_AfterLinear):
    kind = "linear_norm_linear"
    weight: Tensor
    bias: Tensor | None

    def fused(self, x: Tensor) -> Tensor:
        (first, norm, *_), activation = self.parts, self.__dict__[STATE]["activation"]
        given, (N, K) = arguments_of(norm), first.weight.shape
        fields = dict(N2=self.weight.shape[0], activation=activation, bias=first.bias is not None)
        how = graphs.arguments(self.policy, "linear_norm_linear", x, given, K, N, **fields)
        return ops.linear_norm_linear(
            x, first.weight, first.bias, self.weight, self.bias, activation=activation, **given, **how
        )


class _LinearNorm(_AfterLinear):
    kind = "linear_norm"

    def fused(self, x: Tensor) -> Tensor:
        (linear,), given = self.parts, arguments_of(self)
        N, K = linear.weight.shape
        how = graphs.arguments(self.policy, "linear_norm", x, given, K, N, bias=linear.bias is not None)
        return cast(Tensor, ops.linear_norm(x, linear.weight, linear.bias, **given, **how))


class _Norm(Swapped):
    kind = "norm"

    def fused(self, x: Tensor) -> Tensor:
        given = arguments_of(self)
        how = graphs.arguments(self.policy, "norm", x, given, x.shape[-1], x.shape[-1])
        if given["norm"] == "layer":
            return cast(Tensor, ops.layer_norm(x, given["norm_weight"], given["norm_bias"], given["eps"], **how))
        return cast(Tensor, ops.rms_norm(x, given["norm_weight"], given["eps"], **how))


_MIXINS = {mixin.kind: mixin for mixin in (_NormLinear, _LinearNormLinear, _LinearNorm, _Norm)}
_BY_NAME = {mixin.__name__.lstrip("_"): mixin for mixin in (Passed, *_MIXINS.values())}


_made: dict[tuple[type, type], type] = {}


def _class(mixin: type, base: type) -> type:
    """The swapped class of a class. Its name says how it is made, so that converted models pickle."""
    if (mixin, base) not in _made:
        name = ":".join((mixin.__name__.lstrip("_"), base.__module__.replace(".", "/"), base.__qualname__))
        _made[mixin, base] = type(name, (mixin, base), {"__module__": __name__, "__doc__": mixin.__doc__})
    return _made[mixin, base]


def __getattr__(name: str) -> type:
    """A swapped class by its name, where a model is unpickled."""
    kind, _, rest = name.partition(":")
    module, _, base = rest.partition(":")
    if kind not in _BY_NAME or not base:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: Any = importlib.import_module(module.replace("/", "."))
    for part in base.split("."):
        found = getattr(found, part)
    return _class(_BY_NAME[kind], found)


def origin(module: nn.Module) -> type[nn.Module]:
    """The class a module had before it was swapped."""
    return module.__dict__[STATE]["origin"] if is_swapped(module) else type(module)


def is_swapped(module: nn.Module) -> bool:
    return isinstance(module, Swapped)


def swap(module: nn.Module, kind: str, policy: Policy, parts: tuple[nn.Module, ...] = (), **state: Any) -> None:
    """Give a module the class for `kind`; `parts` are the modules before it whose work it takes over, which pass on."""
    for part in parts:
        set_class(part, _class(Passed, type(part)), policy, (), spec=spec_of(part))
    set_class(module, _class(_MIXINS[kind], type(module)), policy, parts, spec=spec_of(module), **state)


def set_class(module: nn.Module, target: type, policy: Policy, parts: tuple[nn.Module, ...], **state: Any) -> None:
    """Make a module one of the swapped class `target`."""
    module.__dict__[STATE] = {"origin": type(module), "policy": policy, "parts": parts, **state}
    module.__dict__[STATE].setdefault("min_elements", MIN_ELEMENTS)
    module.__class__ = target


def restore(module: nn.Module) -> None:
    """Give a swapped module its own class back."""
    module.__class__ = module.__dict__.pop(STATE)["origin"]


def set_policy(module: nn.Module, policy: Policy, min_elements: int | None = None) -> None:
    """How a swapped module computes from now on; `min_elements` None is the measured default."""
    given = MIN_ELEMENTS if min_elements is None else min_elements
    module.__dict__[STATE] |= {"policy": policy, "min_elements": given}
