"""What torch.compile does not know about the ops of this package: a pass for inductor.

Where x feeds both a norm_linear and a residual, autograd sums two gradients of x. inductor sees the backward of the op as
a black box and adds in a kernel of its own: three passes over x, which it would not need around a norm of its own. The
pass hands the other gradient to the op, which adds it in its last kernel.

Where a norm_linear makes q, k and v at once, autograd stacks their three gradients into that of its result, a pass over
all of them. The pass hands them to the op as they are.
"""

from __future__ import annotations

import hashlib
import math
import operator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx.experimental.symbolic_shapes import statically_known_true

from recsys_norm.kernels.hopper.dgrad import fits_in_pieces
from recsys_norm.ops import norm_linear  # noqa: F401  (registers the op)

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)
_STACKS = (torch.ops.aten.cat.default, torch.ops.aten.stack.default)
_BACKWARD = torch.ops.recsys_norm.norm_linear_backward.default
_PIECES = (None, "second", "third")


class NormLinearBackward(CustomGraphPass):
    """`add(norm_linear_backward(..)[0], g)` becomes `norm_linear_backward(.., add=g)[0]`, and
    `norm_linear_backward(stack([a, b, c], 1), ..)` becomes `norm_linear_backward(a, .., second=b, third=c)`."""

    def __call__(self, graph: fx.Graph) -> None:
        changed = False
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target is _BACKWARD:
                changed |= _unstack(graph, node)
            if node.op == "call_function" and node.target is torch.ops.aten.add.Tensor and _plain_sum(node):
                changed |= self._move(graph, node)
        if changed:
            stable_topological_sort(graph)
            graph.eliminate_dead_code()
            graph.lint()

    def uuid(self) -> Any:
        """For inductor's cache of compiled graphs."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

    def _move(self, graph: fx.Graph, node: Any) -> bool:
        first, second = node.args
        for summand, other in ((first, second), (second, first)):
            dx = _gradient_of_x(summand)
            if dx is not None and not _depends(other, dx.args[0]):
                dx.args[0].update_kwarg("add", _shaped_as(dx, graph, other, node))
                node.replace_all_uses_with(summand)
                graph.erase_node(node)
                return True
        return False


def compile_options() -> dict[str, Any]:
    """`options=` of torch.compile for modules that use the ops of this package."""
    return {"post_grad_custom_post_pass": NormLinearBackward()}


def _unstack(graph: fx.Graph, op: Any) -> bool:
    """Give the op the pieces of dy if a stack or cat that nothing else reads put them together, row by row, and a kernel
    can read them so."""
    dy, x = op.args[:2]
    stacked = dy
    while stacked.target in _VIEWS and len(stacked.users) == 1:
        stacked = stacked.args[0]
    if stacked.target not in _STACKS or len(stacked.users) != 1 or op.kwargs.get("second") is not None:
        return False
    pieces, dim = stacked.args[0], stacked.args[1] if len(stacked.args) > 1 else stacked.kwargs.get("dim", 0)
    values = [piece.meta.get("val") for piece in (*pieces, stacked, dy, x)]
    if not 2 <= len(pieces) <= len(_PIECES) or not all(isinstance(value, torch.Tensor) for value in values):
        return False
    *given, whole, rows, x_value = values
    before = math.prod(whole.shape[: dim % whole.dim()])
    width = rows.shape[1] // len(pieces)
    if not statically_known_true(before == rows.shape[0]):
        return False
    if any(value.shape != given[0].shape or value.dtype != rows.dtype for value in given):
        return False
    side_by_side = [value.reshape(-1, width) for value in given]
    if not fits_in_pieces(side_by_side, x_value.shape[1]):
        return False
    seen = dict(zip(_PIECES, side_by_side))
    for place, piece in zip(_PIECES, pieces):
        with graph.inserting_before(op):
            node = graph.call_function(torch.ops.aten.reshape.default, (piece, [-1, width]))
        node.meta["val"] = seen[place]
        op.update_kwarg(place, node) if place else op.update_arg(0, node)
    if "eager_input_vals" in op.meta:  # the layouts that inductor copies arguments into where they have others
        first, (args, kwargs) = seen.pop(None), op.meta["eager_input_vals"]
        op.meta["eager_input_vals"] = (first, *args[1:]), {**kwargs, **seen}
    return True


def _plain_sum(node: Any) -> bool:
    """Two tensors of one shape and dtype, and no factor."""
    if len(node.args) != 2 or node.kwargs or not all(isinstance(arg, fx.Node) for arg in node.args):
        return False
    values = [part.meta.get("val") for part in (*node.args, node)]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    return all(value.shape == values[0].shape and value.dtype == values[0].dtype for value in values)


def _gradient_of_x(node: Any) -> Any:
    """The node of the gradient of x that a norm_linear returned, seen through views, if nothing else reads it and no
    other gradient is in it yet; else None."""
    while node.target in _VIEWS and len(node.users) == 1:
        node = node.args[0]
    if node.target is not operator.getitem or node.args[1] != 0 or len(node.users) != 1:
        return None
    op = node.args[0]
    free = op.target is _BACKWARD and op.kwargs.get("add") is None
    return node if free else None


def _shaped_as(dx: fx.Node, graph: fx.Graph, gradient: fx.Node, before: fx.Node) -> fx.Node:
    """The other gradient in the rows of dx, of which the sum saw a view."""
    value, width = gradient.meta["val"], dx.meta["val"].shape[-1]
    if value.dim() == 2 and value.shape[-1] == width:
        return gradient
    with graph.inserting_before(before):
        rows = graph.call_function(torch.ops.aten.reshape.default, (gradient, [-1, width]))
    rows.meta["val"] = value.reshape(-1, width)
    return rows


def _depends(node: fx.Node, on: fx.Node) -> bool:
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is on:
            return True
        if node not in seen:
            seen.add(node)
            waiting.extend(node.all_input_nodes)
    return False
