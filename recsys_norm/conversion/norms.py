"""Which modules are norms that the ops can compute: those of torch.nn, and other projects' classes that compute the same.

Model libraries bring classes of their own, with other names for eps and the parameters elsewhere. What such a class computes
is tried out on a copy with made-up parameters, and only where it is what an op computes it counts as a norm.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recsys_norm.nn.torch_modules import NORMS, norm_arguments

STATE = "_recsys_norm"  # attribute of a swapped module, in its __dict__ past nn.Module's registration
EPS_NAMES = ("eps", "variance_epsilon", "epsilon")
_OTHER_KINDS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)


@dataclass(frozen=True)
class Spec:
    """A norm by the words of the ops; `shape` is what it normalises over."""

    norm: str  # layer | rms
    eps: float | None
    shape: tuple[int, ...]


def spec_of(module: nn.Module) -> Spec | None:
    """What a norm computes, None for anything else and for what is converted already."""
    if type(module) in NORMS:
        given: Any = module
        return Spec("layer" if isinstance(module, nn.LayerNorm) else "rms", given.eps, tuple(given.normalized_shape))
    return None if _is_own(module) else _tried(module)


def looks_like_one(module: nn.Module) -> bool:
    """Whether the name of a class promises a layer norm or an RMS norm."""
    name = type(module).__name__
    return (
        not _is_own(module) and not list(module.children()) and re.search(r"(layer|rms)_?norm", name, re.I) is not None
    )


def arguments_of(norm: nn.Module) -> dict[str, Any]:
    """A swapped norm as arguments of an op, with its parameters as they are now."""
    if isinstance(norm, NORMS):
        return norm_arguments(norm)
    spec: Spec = norm.__dict__[STATE]["spec"]
    bias = getattr(norm, "bias", None) if spec.norm == "layer" else None
    return {"norm": spec.norm, "norm_weight": getattr(norm, "weight", None), "norm_bias": bias, "eps": spec.eps}


def _is_own(module: nn.Module) -> bool:
    return STATE in module.__dict__ or type(module).__module__.startswith("recsys_norm.nn")


def _tried(module: nn.Module) -> Spec | None:
    """The spec of a class that is none of torch.nn's, from what it computes."""
    named = dict(module.named_parameters())
    possible = re.search("norm", type(module).__name__, re.I) and not isinstance(module, _OTHER_KINDS)
    if not possible or _holds_more(module) or not named.keys() <= {"weight", "bias"}:
        return None
    shape = tuple(named["weight"].shape) if "weight" in named else _declared_shape(module)
    if len(shape) != 1 or shape[0] < 2 or any(p.shape != shape for p in named.values()):
        return None
    eps = next((getattr(module, name) for name in EPS_NAMES if hasattr(module, name)), 0.0)
    for norm in ("layer", "rms"):
        if (norm == "layer" or "bias" not in named) and _agrees(module, norm, eps, shape[0]):
            return Spec(norm, eps, shape)
    return None


def _holds_more(module: nn.Module) -> bool:
    return any(True for _ in module.children()) or any(True for _ in module.buffers())


def _declared_shape(module: nn.Module) -> tuple[int, ...]:
    shape = getattr(module, "normalized_shape", ())
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _agrees(module: nn.Module, norm: str, eps: float | None, width: int) -> bool:
    """Whether a copy of the module gives what the norm gives, also where eps decides."""
    at = torch.arange(3 * width, dtype=torch.float32).view(3, width)
    x = torch.sin(1.7 * at) + torch.cos(0.3 * at * at) + 0.7  # no random numbers: the user's generator stays as it is
    weight, bias = 1.3 + torch.cos(2.1 * at[0]), torch.sin(0.9 * at[0])
    try:
        twin = copy.deepcopy(module).to("cpu", torch.float32)
        own: dict[str, Tensor] = dict(twin.named_parameters())
        with torch.no_grad():
            for name, value in (("weight", weight), ("bias", bias)):
                if name in own:
                    own[name].copy_(value)
            for inputs in (x, x * (eps or 1e-6) ** 0.5):
                found = type(module).forward(twin, inputs)
                if norm == "layer":
                    expected = F.layer_norm(inputs, (width,), own.get("weight"), own.get("bias"), eps or 0.0)
                else:
                    expected = F.rms_norm(inputs, (width,), own.get("weight"), eps)
                if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
                    return False
    except Exception:  # whatever another project's code raises when it is called like this
        return False
    return True
