"""Linears fused with the norm before, after or between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recsys_norm import ops
from recsys_norm.nn.policy import Policy
from recsys_norm.nn.torch_modules import activation_name, check_chain, norm_arguments
from recsys_norm.ops.activations import ACTIVATIONS
from recsys_norm.ops.inputs import check_choice


class _Fused(nn.Module):
    """Parameters of linears and one norm, initialised as torch.nn does."""

    norm_weight: nn.Parameter | None
    norm_bias: nn.Parameter | None

    def __init__(self, norm: str, eps: float | None, policy: Policy):
        super().__init__()
        check_choice(type(self).__name__, "norm", norm, ("rms", "layer"))
        self.norm, self.eps, self.policy = norm, eps, policy

    def _add_linear(self, suffix: str, in_features: int, out_features: int, bias: bool, **factory: Any) -> None:
        linear = nn.Linear(in_features, out_features, bias=bias, **factory)  # for its initialisation
        for name, parameter in linear.named_parameters():
            self.register_parameter(f"{name}{suffix}", parameter)
        if not bias:
            self.register_parameter(f"bias{suffix}", None)

    def _add_norm(self, width: int, affine: bool, **factory: Any) -> None:
        shift = affine and self.norm == "layer"
        self.norm_weight = nn.Parameter(torch.ones(width, **factory)) if affine else None
        self.norm_bias = nn.Parameter(torch.zeros(width, **factory)) if shift else None

    def _take(self, norm: nn.Module, **linears: nn.Linear) -> None:
        """Put the parameters of existing modules in the place of this one's. A linear's key is `weight` and its suffix."""
        arguments = norm_arguments(norm)
        self.norm_weight, self.norm_bias = arguments["norm_weight"], arguments["norm_bias"]
        for weight, linear in linears.items():
            setattr(self, weight, linear.weight)
            setattr(self, weight.replace("weight", "bias"), linear.bias)
        self.train(norm.training)

    def _norm_options(self) -> dict[str, Any]:
        options: dict[str, Any] = dict(
            norm=self.norm, norm_weight=self.norm_weight, norm_bias=self.norm_bias, eps=self.eps
        )
        return options | self.policy.arguments()

    def extra_repr(self) -> str:
        weights = ", ".join(f"{n}={tuple(p.shape)}" for n, p in self.named_parameters(recurse=False))
        return f"{weights}, norm={self.norm!r}, eps={self.eps}, backend={self.policy.backend!r}"


def _like(norm: nn.Module) -> dict[str, Any]:
    """Constructor arguments for a norm of the same kind, whose parameters come later."""
    arguments = norm_arguments(norm)
    return dict(bias=False, norm=arguments["norm"], eps=arguments["eps"], norm_affine=False, device="meta")


class NormLinear(_Fused):
    """`norm(x) @ weight.T + bias`: x `[..., in_features]` -> `[..., out_features]`. See `recsys_norm.ops.norm_linear`.

    Parameters: weight, bias (as nn.Linear), norm_weight `[in_features]`, and norm_bias for norm="layer".
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        norm: str,
        norm_affine: bool = True,
        eps: float | None = 1e-5,
        backend: str = "fused",
        technique: str | None = None,
        on_unsupported: str = "raise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(norm, eps, Policy(backend, technique, on_unsupported))
        self._add_linear("", in_features, out_features, bias, device=device, dtype=dtype)
        self._add_norm(in_features, norm_affine, device=device, dtype=dtype)

    @classmethod
    def from_modules(cls, norm: nn.LayerNorm | nn.RMSNorm, linear: nn.Linear, **policy: Any) -> NormLinear:
        """In place of `linear(norm(x))`, with their parameters. `policy`: backend, technique, on_unsupported.

        Raises:
            TypeError, ValueError: for modules that are not these or do not fit each other.
        """
        check_chain("NormLinear.from_modules", "norm linear", norm, linear)
        made = cls(linear.in_features, linear.out_features, **_like(norm), **policy)
        made._take(norm, weight=linear)
        return made

    def forward(self, x: Tensor) -> Tensor:
        return ops.norm_linear(x, self.weight, self.bias, **self._norm_options())


class LinearNorm(_Fused):
    """`norm(x @ weight.T + bias)` with the residual before or after the norm. See `recsys_norm.ops.linear_norm`.

    Parameters: weight, bias (as nn.Linear), norm_weight `[out_features]`, and norm_bias for norm="layer".
    `forward(x, residual=None, return_sum=False)` returns y, or (y, un-normalised sum).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        norm: str,
        norm_affine: bool = True,
        eps: float | None = 1e-5,
        residual_position: str = "after",
        backend: str = "fused",
        technique: str | None = None,
        on_unsupported: str = "raise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(norm, eps, Policy(backend, technique, on_unsupported))
        check_choice("LinearNorm", "residual_position", residual_position, ("before", "after"))
        self.residual_position = residual_position
        self._add_linear("", in_features, out_features, bias, device=device, dtype=dtype)
        self._add_norm(out_features, norm_affine, device=device, dtype=dtype)

    @classmethod
    def from_modules(
        cls, linear: nn.Linear, norm: nn.LayerNorm | nn.RMSNorm, residual_position: str = "after", **policy: Any
    ) -> LinearNorm:
        """In place of `norm(linear(x))`, with their parameters. `policy`: backend, technique, on_unsupported.

        Raises:
            TypeError, ValueError: for modules that are not these or do not fit each other.
        """
        check_chain("LinearNorm.from_modules", "linear norm", linear, norm)
        like = _like(norm) | {"residual_position": residual_position}
        made = cls(linear.in_features, linear.out_features, **like, **policy)
        made._take(norm, weight=linear)
        return made

    def forward(
        self, x: Tensor, residual: Tensor | None = None, return_sum: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        options: dict[str, Any] = dict(
            residual=residual, residual_position=self.residual_position, return_sum=return_sum
        )
        return ops.linear_norm(x, self.weight, self.bias, **options, **self._norm_options())


def linear_norm_side_by_side(modules: Sequence[LinearNorm], x: Tensor, residual: Tensor | None = None) -> Tensor:
    """The results of LinearNorms that read the same x, side by side in the last dimension: one GEMM and one pass of the
    norm for all of them. `modules` are equal but for the values of their parameters. x: `[.., in_features]`; residual and
    the result: `[.., len(modules) * out_features]`."""
    first = modules[0]
    options = first._norm_options() | dict(residual_position=first.residual_position, groups=len(modules))
    names = ("weight", "bias", "norm_weight", "norm_bias")
    parameters = {name: _side_by_side([getattr(module, name) for module in modules]) for name in names}
    y: Any = ops.linear_norm(x, residual=residual, **options | parameters)
    return y


def _side_by_side(parameters: Sequence[Tensor | None]) -> Any:
    given = [p for p in parameters if p is not None]
    return None if not given else given[0] if len(given) == 1 else torch.cat(given)


class LinearNormLinear(_Fused):
    """`act(norm(x @ weight1.T + bias1)) @ weight2.T + bias2`. See `recsys_norm.ops.linear_norm_linear`.

    Parameters: weight1, bias1, weight2, bias2 (as nn.Linear), norm_weight `[hidden_features]`, and norm_bias for
    norm="layer".
    """

    weight1: nn.Parameter
    bias1: nn.Parameter | None
    weight2: nn.Parameter
    bias2: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int,
        bias: bool = True,
        *,
        norm: str,
        norm_affine: bool = True,
        eps: float | None = 1e-5,
        activation: str | None = None,
        backend: str = "fused",
        technique: str | None = None,
        on_unsupported: str = "raise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(norm, eps, Policy(backend, technique, on_unsupported))
        check_choice("LinearNormLinear", "activation", activation, (None, *ACTIVATIONS))
        self.activation = activation
        self._add_linear("1", in_features, hidden_features, bias, device=device, dtype=dtype)
        self._add_linear("2", hidden_features, out_features, bias, device=device, dtype=dtype)
        self._add_norm(hidden_features, norm_affine, device=device, dtype=dtype)

    @classmethod
    def from_modules(
        cls,
        linear1: nn.Linear,
        norm: nn.LayerNorm | nn.RMSNorm,
        linear2: nn.Linear,
        activation: str | nn.Module | None = None,
        **policy: Any,
    ) -> LinearNormLinear:
        """In place of `linear2(activation(norm(linear1(x))))`, with their parameters. `activation` is a name of the ops
        or a module that they know (nn.ReLU, nn.GELU, nn.SiLU, nn.Hardswish). `policy`: backend, technique, on_unsupported.

        Raises:
            TypeError, ValueError: for modules that are not these or do not fit each other.
        """
        check_chain("LinearNormLinear.from_modules", "linear norm linear", linear1, norm, linear2)
        name = activation_name(activation) if isinstance(activation, nn.Module) else activation
        if name is None and activation is not None:
            kind = type(activation).__name__
            raise TypeError(
                f"LinearNormLinear.from_modules: no op has the activation {kind}; use {', '.join(ACTIVATIONS)}"
            )
        like = _like(norm) | {"activation": name}
        made = cls(linear1.in_features, linear1.out_features, linear2.out_features, **like, **policy)
        made._take(norm, weight1=linear1, weight2=linear2)
        return made

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.weight1, self.bias1), (self.weight2, self.bias2)
        return ops.linear_norm_linear(x, *first, *second, activation=self.activation, **self._norm_options())
