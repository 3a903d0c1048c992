"""Finds, in a traced model, the chains of modules that one op can compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from recsys_norm.conversion.norms import spec_of
from recsys_norm.nn.torch_modules import activation_name

_OPAQUE = (
    "torchrec.modules.embedding",
    "torchrec.modules.fused_embedding",
    "torchrec.distributed",
    "fbgemm_gpu",
    "recsys_norm.conversion",
    "recsys_norm.models",
    "recsys_norm.nn",
)


@dataclass(frozen=True)
class Chain:
    """Modules, in the order in which data passes them, that become one op; the last one calls it."""

    kind: str
    names: tuple[str, ...]
    activation: str | None = None


class Tracer(fx.Tracer):
    """torch.fx's, which does not look into embeddings, sharded modules and modules that are fused already."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        known = isinstance(module, nn.TransformerEncoderLayer) or type(module).__module__.startswith(_OPAQUE)
        return known or super().is_leaf_module(module, name) or spec_of(module) is not None


def trace(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, fx.Graph]]:
    """(prefix of its modules' names, module, graph) of the largest parts of a model that can be traced."""
    try:
        graph = Tracer().trace(model)
    except Exception:  # whatever the user's code raises when it gets a proxy
        for name, child in model.named_children():
            yield from trace(child, f"{prefix}{name}.")
        return
    yield prefix, model, graph


def chains(root: nn.Module, graph: fx.Graph) -> tuple[list[Chain], dict[str, str]]:
    """Chains in a graph, each module in at most one, and why a norm is in none but fused alone."""
    modules = dict(root.named_modules())
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    found: list[Chain] = []
    taken: set[str] = set()
    reasons: dict[str, str] = {}
    for node in graph.nodes:
        spec = spec_of(modules[_name(node)]) if node.op == "call_module" else None
        if spec is None:
            continue
        if calls[node.target] > 1:
            reasons[node.target] = "it is called more than once"
            continue
        for chain in _around(node, spec.shape[-1], modules, calls):
            if not taken & set(chain.names):
                taken |= set(chain.names)
                found.append(chain)
        if node.target not in taken:
            reasons.setdefault(node.target, "no linear that it feeds or is fed by alone")
    return found, reasons


def _around(node: fx.Node, width: int, modules: dict[str, Any], calls: Counter) -> Iterator[Chain]:
    """What the norm of a node can be fused with, the best first."""
    if len(node.args) != 1 or node.kwargs:
        return
    before = node.args[0] if isinstance(node.args[0], fx.Node) else None
    if before is not None:
        alone = _is_linear(before, modules, calls) and len(before.users) == 1
        before = before if alone and modules[_name(before)].out_features == width else None
    activation = _only_user(node) if before is not None else None
    if activation is not None and not _is_activation(activation, modules, calls):
        activation = None
    after = _only_user(activation or node)
    after = after if after is not None and _is_linear(after, modules, calls) else None
    after = after if after is not None and modules[_name(after)].in_features == width else None
    if before is not None and after is not None and not _reads_shape(node) and not _reads_shape(activation):
        middle = (node,) if activation is None else (node, activation)
        name = None if activation is None else activation_name(modules[_name(activation)])
        yield Chain("linear_norm_linear", tuple(map(_name, (before, *middle, after))), name)
    if after is not None and activation is None:
        yield Chain("norm_linear", (_name(node), _name(after)))
    if before is not None:
        yield Chain("linear_norm", (_name(before), _name(node)))


def _name(node: fx.Node) -> str:
    """Of the module that a node calls."""
    return str(node.target)


def _shape_read(node: fx.Node) -> bool:
    """Whether a node asks for what a norm's input and output have in common."""
    if node.op == "call_method":
        return node.target in ("size", "dim")
    return node.op == "call_function" and node.target is getattr and node.args[1] in ("shape", "ndim", "device")


def _reads_shape(node: fx.Node | None) -> bool:
    return node is not None and any(_shape_read(user) for user in node.users)


def _only_user(node: fx.Node) -> fx.Node | None:
    users = [user for user in node.users if not _shape_read(user)]
    return users[0] if len(users) == 1 else None


def _is_activation(node: fx.Node, modules: dict[str, Any], calls: Counter) -> bool:
    once = node.op == "call_module" and calls[node.target] == 1
    return once and activation_name(modules[_name(node)]) is not None


def _is_linear(node: fx.Node, modules: dict[str, Any], calls: Counter) -> bool:
    plain = node.op == "call_module" and type(modules[_name(node)]) is nn.Linear and len(node.args) == 1
    return plain and not node.kwargs and calls[node.target] == 1
