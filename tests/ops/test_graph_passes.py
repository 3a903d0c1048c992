"""The second gradient of x: added by the backward of norm_linear and norm_attention, eagerly and in compiled graphs."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from recsys_norm import ops
from recsys_norm.ops import registry
from recsys_norm.ops.graph_passes import NormLinearBackward, compile_options
from recsys_norm.ops.torch_separate import techniques

BACKWARD = torch.ops.recsys_norm.norm_linear_backward.default
ADD = torch.ops.aten.add.Tensor


class Graphs:
    """A backend that runs the pass on each backward graph and keeps the graph."""

    def __init__(self):
        self.backward = None

    def compile(self, function):
        def backward(module, _inputs):
            NormLinearBackward()(module.graph)
            module.recompile()
            self.backward = module.graph
            return make_boxed_func(module.forward)

        keep = lambda module, _inputs: make_boxed_func(module.forward)  # noqa: E731
        torch._dynamo.reset()
        return torch.compile(function, backend=aot_autograd(fw_compiler=keep, bw_compiler=backward), fullgraph=True)

    def count(self, target):
        return sum(node.target is target for node in self.backward.nodes)


def gradients(function, *leaves):
    for leaf in leaves:
        leaf.grad = None
    function(*leaves).square().sum().backward()
    return [leaf.grad.clone() for leaf in leaves]


def leaf(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def branch(x, weight, technique="separate"):
    return ops.norm_linear(x, weight, norm="rms", technique=technique)


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)])
def test_the_residuals_gradient_goes_into_the_op(shape):
    def block(x, weight):
        return branch(x, weight).tanh() + x

    graphs, leaves = Graphs(), (leaf(*shape), leaf(8, 8, seed=1))
    expected = gradients(block, *leaves)
    for got, want in zip(gradients(graphs.compile(block), *leaves), expected):
        torch.testing.assert_close(got, want)
    assert graphs.count(BACKWARD) == 1 and graphs.count(ADD) == 0


@pytest.mark.parametrize("shape", [(6, 2, 4), (12, 4), (2, 24)])
def test_a_residual_that_sees_x_in_another_shape(shape):
    """The sum is then over a view of the op's gradient, whose last dimension is not the op's."""

    def block(x, weight):
        return branch(x.reshape(6, 8), weight).tanh().reshape(shape) + x

    graphs, leaves = Graphs(), (leaf(*shape), leaf(8, 8, seed=1))
    expected = gradients(block, *leaves)
    for got, want in zip(gradients(graphs.compile(block), *leaves), expected):
        torch.testing.assert_close(got, want)
    assert graphs.count(BACKWARD) == 1 and graphs.count(ADD) == 0


def test_two_branches_and_a_residual():
    def block(x, first, second):
        return branch(x, first).tanh() + branch(x, second).sin() + x

    graphs, leaves = Graphs(), (leaf(6, 8), leaf(8, 8, seed=1), leaf(8, 8, seed=2))
    expected = gradients(block, *leaves)
    for got, want in zip(gradients(graphs.compile(block), *leaves), expected):
        torch.testing.assert_close(got, want)
    assert graphs.count(BACKWARD) == 2 and graphs.count(ADD) == 0


def test_a_gradient_that_comes_from_the_op_is_not_moved_into_it():
    """x reaches itself through the branch: one summand depends on the other."""

    def block(x, weight):
        return branch(branch(x, weight) + x, weight) + x

    graphs, leaves = Graphs(), (leaf(6, 8), leaf(8, 8, seed=1))
    expected = gradients(block, *leaves)
    for got, want in zip(gradients(graphs.compile(block), *leaves), expected):
        torch.testing.assert_close(got, want)


def test_sums_of_another_kind_stay():
    def block(x, weight):
        return branch(x, weight).tanh() + 2 * x[:1]

    graphs, leaves = Graphs(), (leaf(6, 8), leaf(8, 8, seed=1))
    expected = gradients(block, *leaves)
    for got, want in zip(gradients(graphs.compile(block), *leaves), expected):
        torch.testing.assert_close(got, want)


STACKS = (torch.ops.aten.stack.default, torch.ops.aten.cat.default)


@pytest.mark.parametrize("pieces", [2, 3])
@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)])
def test_stacked_gradients_go_into_the_op_as_they_are(shape, pieces):
    def block(x, weight):
        parts = branch(x, weight).unflatten(-1, (pieces, 2, 32)).unbind(-3)
        return sum(part.pow(i + 2) for i, part in enumerate(parts))

    graphs, leaves = Graphs(), (leaf(*shape), leaf(pieces * 64, 8, seed=1))
    expected = gradients(block, *leaves)
    for got, want in zip(gradients(graphs.compile(block), *leaves), expected):
        torch.testing.assert_close(got, want)
    (op,) = (node for node in graphs.backward.nodes if node.target is BACKWARD)
    assert ("third" in op.kwargs) == (pieces == 3) and not any(graphs.count(target) for target in STACKS)


def test_no_piece_is_copied_into_a_part_of_the_whole():
    """inductor copies an argument whose layout is not the one that the op was traced with."""
    from torch._inductor.utils import run_and_get_code

    def block(x, weight):
        return sum(part.pow(i + 2) for i, part in enumerate(branch(x, weight).unflatten(1, (3, 64)).unbind(1)))

    leaves = leaf(6, 8), leaf(192, 8, seed=1)
    expected = gradients(block, *leaves)
    torch._dynamo.reset()
    options = compile_options() | {"fx_graph_cache": False}
    got, codes = run_and_get_code(gradients, torch.compile(block, options=options, fullgraph=True), *leaves)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert "norm_linear_backward" in codes[-1] and "(192, 1)" not in codes[-1].partition("def call")[2]


@pytest.mark.parametrize("split,columns,features", [
    (lambda y: y.unbind(1), 128, 8), (lambda y: y.view(-1).chunk(2), 128, 8), (lambda y: y.split([64, 128], 1), 192, 8),
    (lambda y: y.chunk(4, 1), 256, 8), (lambda y: y.chunk(2, 1), 64, 8), (lambda y: y.chunk(2, 1), 128, 520),
    (lambda y: y.chunk(2, 0), 128, 8), (lambda y: y.unflatten(0, (3, 2)).unbind(1), 128, 8),
])  # fmt: skip
def test_stacks_of_another_kind_stay(split, columns, features):
    """Columns one by one, halves of memory, pieces of several widths, too many, too narrow, of too wide x; rows above
    rows, and every other row."""

    def block(x, weight):
        return torch.cat([(part.square() * (i + 2)).reshape(-1) for i, part in enumerate(split(branch(x, weight)))])

    graphs, leaves = Graphs(), (leaf(6, features), leaf(columns, features, seed=1))
    expected = gradients(block, *leaves)
    for got, want in zip(gradients(graphs.compile(block), *leaves), expected):
        torch.testing.assert_close(got, want)
    (op,) = (node for node in graphs.backward.nodes if node.target is BACKWARD)
    assert "second" not in op.kwargs


class Recording:
    """The plain technique, with `adds_gradient` as told."""

    name, provider = "recording", "triton"

    def __init__(self, op, adds):
        self.inner = next(t for o, t in techniques() if o == op)
        self.adds_gradient, self.grads = adds, []

    def why_not(self, problem):
        return None

    def forward(self, problem, *tensors):
        return self.inner.forward(problem, *tensors)

    def backward(self, problem, saved, grads, needs):
        self.grads.append(len(grads))
        first, *rest = self.inner.backward(problem, saved, grads[:1], needs)
        return (first + grads[1] if len(grads) == 2 else first, *rest)


@pytest.fixture
def recording(monkeypatch):
    def serve(op, adds):
        technique = Recording(op, adds)
        monkeypatch.setattr(registry, "_candidates", lambda problem, direction: ((technique,), ()))
        return technique

    return serve


@pytest.mark.parametrize("adds", [True, False])
def test_the_technique_gets_the_gradient_or_the_op_adds_it(recording, adds):
    technique = recording("norm_linear", adds)
    x, weight, add = leaf(6, 8), leaf(5, 8, seed=1), leaf(6, 8, seed=2).detach()
    y = branch(x, weight, None)
    (plain,) = torch.autograd.grad(y, x, torch.ones_like(y))
    saved = (
        x.detach(),
        weight.detach(),
        None,
        None,
        None,
        torch.empty(0),
        (x.square().mean(1) + 1e-5).rsqrt().detach(),
    )
    policy = ("fused", "recording", "raise")
    dx, *_ = BACKWARD(torch.ones_like(y), *saved, None, "rms", 1e-5, [True] + [False] * 4, *policy, add=add)
    torch.testing.assert_close(dx, plain + add)
    assert technique.grads == [1, 2 if adds else 1]


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_q_as_its_own_residual(recording, adds, packed, compiled):
    technique = recording("norm_attention", adds)
    q, k, v = (leaf(7 if packed else 9, 2, 8, seed=i) for i in range(3))
    offsets = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    how = dict(max_q_len=4, max_k_len=4, pre_norm="layer", post_norm="rms", inner_residual=True, packed=packed)

    def own(q, k, v):
        return ops.norm_attention(q, k, v, offsets, offsets, residual=q, **how)

    def other(q, k, v):
        return ops.norm_attention(q, k, v, offsets, offsets, residual=q.clone(), backend="unfused", **how)

    expected, found = gradients(other, q, k, v), gradients(Graphs().compile(own) if compiled else own, q, k, v)
    for got, want in zip(found, expected):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)  # sums of 1e3 in another order
    assert technique.grads == [2 if adds else 1]
