"""`recsys_norm.convert`: put fused norms into a model that exists already, and take them out again."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx, nn

from recsys_norm.conversion import patterns, transformer
from recsys_norm.conversion.norms import looks_like_one, spec_of
from recsys_norm.conversion.swaps import is_swapped, restore, set_policy, swap
from recsys_norm.nn.policy import Policy

__all__ = ["Conversion", "convert", "revert"]


@dataclass
class Conversion:
    """What `convert` did. True if it replaced anything.

    replaced: (kind of op, names of the modules it stands for). left: {name of a norm or layer that stays: why}.
    """

    replaced: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.replaced)

    def __str__(self) -> str:
        lines = [f"{kind}: {' + '.join(names)}" for kind, names in self.replaced] or ["nothing replaced"]
        return "\n".join(lines + [f"left {name}: {why}" for name, why in self.left.items()])


def convert(
    model: nn.Module,
    backend: str = "fused",
    *,
    technique: str | None = None,
    on_unsupported: str = "fallback",
    min_elements: int | None = None,
) -> Conversion:
    """Replace norms and the linears beside them by the ops of `recsys_norm.ops`, in place.

    Found are `norm -> linear`, `linear -> norm` and `linear -> norm (-> activation) -> linear` wherever torch.fx can follow
    the data (in the model, or in the largest parts of it that can be traced), nn.TransformerEncoderLayer, pre- and
    post-norm, and every other norm by itself. A norm is an nn.LayerNorm, an nn.RMSNorm, or another project's class that
    computes the same (tried out on a copy). Modules keep their place, parameters, dtype, eps, training flag and state_dict
    keys; they change their class (see `recsys_norm.conversion.swaps`). Converting again changes nothing but the backend;
    `revert` undoes it.

    Args:
        model: any nn.Module, on any device.
        backend, technique, on_unsupported: see `recsys_norm.ops`. By default a problem that no kernel takes runs in
            PyTorch.
        min_elements: inputs on a GPU with fewer values go through the modules as they were, since an op costs the host more
            than the calls it stands for (0.35 ms each way where it was measured). None is the measured default, 0 never.
    Returns:
        Conversion: what was replaced and what was left, with the reason.
    Raises:
        TypeError: if `model` is no nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model must be an nn.Module, got {type(model).__name__}")
    policy = Policy(backend, technique, on_unsupported)
    result = Conversion()
    _transformers(model, policy, result)
    for prefix, root, graph in patterns.trace(model):
        _traced(prefix, root, graph, policy, result)
    _alone(model, policy, result)
    for module in model.modules():
        if is_swapped(module):
            set_policy(module, policy, min_elements)
    return result


def revert(model: nn.Module) -> bool:
    """Undo `convert`, in place. Returns whether there was anything to undo."""
    swapped = [module for module in model.modules() if is_swapped(module)]
    for module in swapped:
        restore(module)
    return bool(swapped)


def _hooked(module: nn.Module) -> bool:
    """Hooks would see another input or output than before."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def _transformers(model: nn.Module, policy: Policy, result: Conversion) -> None:
    for name, module in model.named_modules():
        if not isinstance(module, nn.TransformerEncoderLayer) or is_swapped(module):
            continue
        why = transformer.why_not(module)
        inner = [m for m in module.modules() if m is not module and _hooked(m)]
        if why is None and inner:
            why = f"a module inside it ({type(inner[0]).__name__}) has hooks"
        if why is not None:
            result.left[name] = why
            continue
        transformer.swap_layer(module, policy)
        result.replaced.append((transformer.FusedTransformerEncoderLayer.kind, (name,)))


def _traced(prefix: str, root: nn.Module, graph: fx.Graph, policy: Policy, result: Conversion) -> None:
    modules = dict(root.named_modules())
    found, reasons = patterns.chains(root, graph)
    for name, why in reasons.items():
        if why.startswith("it is called"):
            result.left[prefix + name] = f"{why}; it is fused alone"
    for chain in found:
        members = [modules[name] for name in chain.names]
        names = tuple(f"{prefix}{name}" for name in chain.names)
        hooked = [name for name, member in zip(names, members) if _hooked(member)]
        if hooked:
            result.left[names[0]] = f"{hooked[0]} has hooks, which would see another input or output"
            continue
        state = {"activation": chain.activation} if chain.kind == "linear_norm_linear" else {}
        swap(members[-1], chain.kind, policy, tuple(members[:-1]), **state)
        result.replaced.append((chain.kind, names))


def _alone(model: nn.Module, policy: Policy, result: Conversion) -> None:
    """Norms by themselves: forward and backward are then one kernel each, with the sum of a residual where there is one."""
    layers = [m for m in model.modules() if isinstance(m, transformer.FusedTransformerEncoderLayer)]
    served = {id(inner) for layer in layers for inner in layer.modules()}
    for name, module in model.named_modules():
        if id(module) in served:
            continue
        spec = spec_of(module)
        if spec is None:
            if looks_like_one(module):
                result.left[name] = f"{type(module).__name__} does not compute what nn.LayerNorm or nn.RMSNorm does"
        elif len(spec.shape) != 1:
            result.left[name] = f"it normalises over {len(spec.shape)} dimensions, the ops over the last one"
        else:
            swap(module, "norm", policy)
            result.replaced.append(("norm", (name,)))
