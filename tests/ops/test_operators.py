"""What the ops of `recsys_norm.ops.operators` owe to the dispatcher, autograd and torch.compile."""

import subprocess
import sys

import pytest
import torch
import torch.utils.checkpoint
from norm_attention_cases import arguments
from op_cases import FORCED, tensors_for
from torch import Tensor
from torch._dynamo.decorators import skip
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from recsys_norm import ops
from recsys_norm.ops.operators import define


def norm_linear(t):
    return ops.norm_linear(**t, norm="layer", **FORCED)


OPTIONS = arguments(pre="layer", post="rms", residual=True)[1]


def attention(t):
    return ops.norm_attention(**t, **OPTIONS, **FORCED)


CALLS = {
    "norm": (lambda t: ops.layer_norm(**t, **FORCED), lambda: tensors_for("norm", residual=True)),
    "norm_linear": (norm_linear, lambda: tensors_for("norm_linear")),
    "linear_norm": (
        lambda t: ops.linear_norm(**t, norm="rms", **FORCED),
        lambda: tensors_for("linear_norm", norm="rms"),
    ),
    "linear_norm_linear": (
        lambda t: ops.linear_norm_linear(**t, norm="layer", **FORCED),
        lambda: tensors_for("linear_norm_linear"),
    ),
    "norm_attention": (attention, lambda: arguments(pre="layer", post="rms", residual=True)[0]),
}


class Recorded(TorchDispatchMode):
    """The calls of this package's ops, by name."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "recsys_norm":
            self.seen[function._opname] = (function, args)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", CALLS)
def test_dispatch_modes_see_both_directions_and_opcheck_passes(op):
    call, tensors = CALLS[op]
    with Recorded() as recorded:
        call(tensors()).square().sum().backward()
    assert {op, f"{op}_backward"} <= set(recorded.seen)
    function, args = recorded.seen[f"{op}_backward"]  # tests/ops/test_library.py has the forward
    torch.library.opcheck(function, tuple(a.detach() if isinstance(a, Tensor) else a for a in args))


@pytest.mark.parametrize("op", CALLS)
def test_second_derivatives_are_an_error(op):
    call, tensors = CALLS[op]
    t = tensors()
    first = next(iter(t.values()))
    (grad,) = torch.autograd.grad(call(t).square().sum(), first, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{op}_backward.default but no autograd formula was registered"):
        grad.sum().backward()


def test_no_gradients_without_need():
    t = tensors_for("norm_linear")
    with torch.no_grad():
        y = norm_linear(t)
    with torch.inference_mode():
        z = norm_linear(t)
    assert not y.requires_grad and z.is_inference() and torch.equal(y, z)
    assert not norm_linear({n: v.detach() for n, v in t.items()}).requires_grad
    assert torch.equal(norm_linear(t), y)


def test_what_stands_between_autograd_and_the_kernel_still_runs():
    """A tensor that is the negative of its memory, and one of a subclass with a dispatch of its own."""
    t = tensors_for("norm_linear")
    x = t["x"].detach()
    negated = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert negated.is_neg()
    torch.testing.assert_close(norm_linear(t | {"x": negated}), norm_linear(t))
    masked = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True).from_tensor(x)
    assert type(norm_linear(t | {"x": masked})) is type(masked)


def test_an_output_that_is_an_input_is_an_error():
    @define("test_alias")
    def alias(x: Tensor, copy: bool) -> tuple[Tensor, Tensor]:
        y = x.clone()
        return y, y.clone() if copy else y[:1]

    x = torch.randn(3)
    assert len(alias(x, True)) == 2
    for grad in (False, True):
        with pytest.raises(RuntimeError, match="test_alias.*shares memory"):
            alias(x.requires_grad_(grad), False)


def test_dynamo_stays_out_of_an_op_called_between_graphs():
    """Where a graph breaks, dynamo looks at every frame that runs: here the call itself is one that it skips."""
    t, policy = tensors_for("norm_linear"), ("fused", "separate", "raise")

    @skip
    def eager(x):
        return torch.ops.recsys_norm.norm_linear(x, *list(t.values())[1:], "layer", 1e-5, True, *policy)[0]

    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        torch.compile(lambda x: eager(x * 1) + 1, backend="eager")(t["x"])
    assert counters["frames"]["total"] == 2  # before and after the break


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("op", CALLS)
def test_without_a_gradient_of_the_output_there_is_none_of_the_inputs(op):
    call, tensors = CALLS[op]
    t = tensors()
    NoGradient.apply(call(t)).sum().backward()
    assert all(v is None or v.grad is None for v in t.values())


@pytest.mark.parametrize("op", CALLS)
def test_torch_func(op):
    """Gradients, per sample too, are those of autograd; forward mode and second derivatives are errors."""
    call, tensors = CALLS[op]
    t = tensors()
    name, x = next(iter(t.items()))
    other = x.detach() * 2
    expected = [torch.autograd.grad(call(t | {name: v}).square().sum(), v)[0] for v in (x, other.requires_grad_())]

    def loss(x):
        return call(t | {name: x}).square().sum()

    grad, x, other = torch.func.grad(loss), x.detach(), other.detach()
    torch.testing.assert_close(grad(x), expected[0])
    with pytest.warns(UserWarning, match="performance drop"):
        per_sample = torch.func.vmap(grad)(torch.stack([x, other]))
    torch.testing.assert_close(per_sample, torch.stack(expected))
    with pytest.raises(RuntimeError, match=f"{op}_backward.default but no autograd formula"):
        torch.func.grad(lambda x: grad(x).sum())(x)
    with pytest.raises(NotImplementedError, match=f"{op}.default has no forward-mode AD"):
        torch.func.jvp(loss, (x,), (x,))
    with forward_ad.dual_level(), torch.no_grad(), pytest.raises(NotImplementedError, match="no forward-mode AD"):
        loss(forward_ad.make_dual(x, x))


@pytest.mark.parametrize("op", ["linear_norm", "norm_attention"])
def test_gradients_through_what_was_exported_without_them_are_an_error(op):
    """Such a graph holds the call that keeps nothing for a backward."""
    call, tensors = CALLS[op]
    t = {n: v.detach() for n, v in tensors().items() if v is not None}
    graph = make_fx(lambda *values: call(dict(zip(t, values))))(*t.values())
    first, *others = t.values()
    y = graph(first.requires_grad_(), *others)
    torch.testing.assert_close(y, call(t))
    with pytest.raises(RuntimeError, match=f"{op}: this call was traced"):
        y.sum().backward()


@pytest.mark.parametrize("op", CALLS)
def test_no_dimension_need_be_a_constant(op):
    call, tensors = CALLS[op]
    torch._dynamo.reset()
    t = tensors()
    y = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")(t)
    torch.testing.assert_close(y, call(t))


@pytest.mark.parametrize("op", CALLS)
def test_meta_tensors(op):
    call, tensors = CALLS[op]
    t = tensors()
    y = call({n: v if v is None else v.detach().to("meta") for n, v in t.items()})
    assert y.is_meta and y.shape == call(t).shape


def test_an_activation_may_overwrite_a_norm_with_weights():
    t = tensors_for("linear_norm")
    wanted = list(t.values())
    y, z = (ops.linear_norm(**t, norm="layer", **FORCED) for _ in range(2))
    actual = torch.autograd.grad(torch.relu_(y).sum(), wanted)
    torch.testing.assert_close(actual, torch.autograd.grad(torch.relu(z).sum(), wanted))


@pytest.mark.parametrize("shape", [(3, 0), (2, 3, 0)])
def test_width_zero(shape):
    y = ops.norm_linear(torch.ones(shape), torch.ones(4, 0), torch.arange(4.0), norm="rms", **FORCED)
    assert torch.equal(y, torch.arange(4.0).expand(*shape[:-1], 4))
    assert ops.layer_norm(torch.ones(shape), **FORCED).shape == shape


def test_modules_that_define_ops_can_be_loaded_again():
    code = """
import sys, importlib, torch, recsys_norm.ops
importlib.reload(sys.modules["recsys_norm.ops.norm"])
for name in [n for n in sys.modules if n.startswith("recsys_norm")]:
    del sys.modules[name]
from recsys_norm import ops
x = torch.ones(2, 3, requires_grad=True)
ops.rms_norm(ops.linear_norm(x, torch.ones(4, 3), norm="rms", technique="separate"), technique="separate").sum().backward()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(op, reentrant):
    call, tensors = CALLS[op]
    t, again = tensors(), tensors()
    call(t).square().sum().backward()
    run = torch.utils.checkpoint.checkpoint
    run(lambda *v: call(dict(zip(t, v))), *again.values(), use_reentrant=reentrant).square().sum().backward()
    for a, b in zip(again.values(), t.values()):
        assert a is None or a.grad is b.grad is None or torch.equal(a.grad, b.grad)
