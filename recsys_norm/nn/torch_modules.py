"""What modules of torch.nn say in the words of `recsys_norm.ops`."""

from __future__ import annotations

from typing import Any

from torch import nn

NORMS = (nn.LayerNorm, nn.RMSNorm)
ACTIVATIONS = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Hardswish: "hardswish"}  # and nn.GELU by its `approximate`


def activation_name(module: nn.Module) -> str | None:
    """The ops' name of an activation module, None if they have none."""
    if type(module) is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    return ACTIVATIONS.get(type(module))


def norm_arguments(norm: nn.Module) -> dict[str, Any]:
    """The norm of a torch.nn module as arguments of an op."""
    layer = isinstance(norm, nn.LayerNorm)
    return {
        "norm": "layer" if layer else "rms",
        "norm_weight": norm.weight,
        "norm_bias": norm.bias if layer else None,
        "eps": norm.eps,
    }


def check_chain(name: str, kinds: str, *modules: nn.Module) -> None:
    """Modules in the order in which data passes them: `kinds` says which is a "norm" and which a "linear", each takes as
    many features as the one before gives, and the norm is over the last dimension.

    Raises:
        TypeError, ValueError: naming the module and what it should be.
    """
    width, before = None, ""
    for kind, module in zip(kinds.split(), modules, strict=True):
        found = type(module).__name__
        if not isinstance(module, NORMS if kind == "norm" else nn.Linear):
            wanted = "nn.LayerNorm or nn.RMSNorm" if kind == "norm" else "nn.Linear"
            raise TypeError(f"{name} takes {kinds.replace(' ', ', ')} in this order; got {found} in place of {wanted}")
        if isinstance(module, nn.Linear):
            takes, gives = module.in_features, module.out_features
        else:
            shape = tuple(module.normalized_shape)
            takes = gives = shape[-1]
            if len(shape) != 1:
                raise ValueError(f"{name}: {found} over {shape} has more than one dimension; flatten the input")
        if width not in (None, takes):
            raise ValueError(f"{name}: {before} gives {width} features and {found} takes {takes}")
        width, before = gives, found
