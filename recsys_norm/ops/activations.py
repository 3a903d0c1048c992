"""Element-wise activations by name: functions, derivatives, and the codes that kernels use.

All of them map 0 to 0, so a score that is exactly zero (a padded key) contributes nothing.

    identity    x
    relu        max(x, 0)
    relu2       max(x, 0)^2
    leaky_relu  x if x > 0 else 0.01 x
    gelu        x Phi(x) = 0.5 x (1 + erf(x / sqrt 2))
    gelu_tanh   0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
    silu        x sigmoid(x)
    hardswish   x clamp(x + 3, 0, 6) / 6

Where the derivative jumps (relu, leaky_relu at 0; hardswish at -3 and 3) it takes PyTorch's value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LEAKY_SLOPE = 0.01
_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
_TANH_CUBIC = 0.044715


@dataclass(frozen=True)
class Activation:
    """`forward(x)` and `derivative(x)`, both element-wise on the pre-activation; `code` names it inside kernels."""

    name: str
    code: int
    forward: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _d_relu(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


def _d_relu2(x: Tensor) -> Tensor:
    return 2.0 * F.relu(x)


def _d_leaky_relu(x: Tensor) -> Tensor:
    return torch.full_like(x, LEAKY_SLOPE).masked_fill(x > 0, 1.0)


def _d_gelu(x: Tensor) -> Tensor:
    phi = _INV_SQRT_2PI * torch.exp(-0.5 * x * x)
    return 0.5 * (1.0 + torch.erf(x * _SQRT_HALF)) + x * phi


def _d_gelu_tanh(x: Tensor) -> Tensor:
    t = torch.tanh(_SQRT_2_OVER_PI * (x + _TANH_CUBIC * x * x * x))
    du = _SQRT_2_OVER_PI * (1.0 + 3.0 * _TANH_CUBIC * x * x)
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * du


def _d_silu(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


def _d_hardswish(x: Tensor) -> Tensor:
    return (x / 3.0 + 0.5).masked_fill(x <= -3.0, 0.0).masked_fill(x >= 3.0, 1.0)


ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation("identity", 0, lambda x: x, torch.ones_like),
        Activation("relu", 1, F.relu, _d_relu),
        Activation("relu2", 2, _relu2, _d_relu2),
        Activation("leaky_relu", 3, lambda x: F.leaky_relu(x, LEAKY_SLOPE), _d_leaky_relu),
        Activation("gelu", 4, F.gelu, _d_gelu),
        Activation("gelu_tanh", 5, _gelu_tanh, _d_gelu_tanh),
        Activation("silu", 6, F.silu, _d_silu),
        Activation("hardswish", 7, F.hardswish, _d_hardswish),
    )
}


def get(name: str) -> Activation:
    """The activation of that name.

    Raises:
        ValueError: naming the allowed set.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def resolve(activation: str | Sequence[str], heads: int) -> tuple[str, ...]:
    """One activation name, or one per head, as a tuple of length 1 (the same for all heads) or `heads`.

    Raises:
        ValueError: if a name is unknown (names the allowed set) or the number of names is not `heads`.
    """
    names = (activation,) if isinstance(activation, str) else tuple(activation)
    for name in names:
        get(name)
    if len(names) not in (1, heads) or not names:
        raise ValueError(
            f"activation has {len(names)} names for {heads} heads; give one name for all heads or exactly {heads}"
        )
    return names[:1] if len(set(names)) == 1 else names


def head_runs(names: Sequence[str], heads: int) -> list[tuple[int, int, str]]:
    """Runs of neighbouring heads with the same activation: (first head, end head, name)."""
    if len(names) == 1:
        return [(0, heads, names[0])]
    runs, start = [], 0
    for name, group in itertools.groupby(names):
        end = start + len(list(group))
        runs.append((start, end, name))
        start = end
    return runs


def apply(x: Tensor, names: Sequence[str], head_dim: int) -> Tensor:
    """act(x), with the activation of each head along `head_dim`."""
    if len(names) == 1:
        return get(names[0]).forward(x)
    parts = [get(n).forward(x.narrow(head_dim, a, b - a)) for a, b, n in head_runs(names, len(names))]
    return torch.cat(parts, dim=head_dim)


def apply_derivative(x: Tensor, names: Sequence[str], head_dim: int) -> Tensor:
    """act'(x), with the activation of each head along `head_dim`."""
    if len(names) == 1:
        return get(names[0]).derivative(x)
    parts = [get(n).derivative(x.narrow(head_dim, a, b - a)) for a, b, n in head_runs(names, len(names))]
    return torch.cat(parts, dim=head_dim)
