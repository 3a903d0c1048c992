"""Converted modules inside torch.compile: an op where a kernel fuses, plain PyTorch for inductor where none does."""

import pytest
import torch

import recsys_norm
from recsys_norm import ops
from recsys_norm.bench.convert_models import KINDS, SMALL
from recsys_norm.conversion import graphs


class Chosen:
    def __init__(self, name):
        self.name = name


@pytest.fixture
def on_gpu(monkeypatch):
    """As if the current device were an H100, with the techniques of `names` by op and direction."""
    names = {}

    def choose(problem, way):
        assert problem.device == "cuda" and problem.arch == 90 and problem.training
        if names.get((problem.op, way)) == "none":
            raise ops.UnsupportedError("no kernel")
        return Chosen(names.get((problem.op, way), "separate"))

    monkeypatch.setattr(graphs.registry, "choose", choose)
    monkeypatch.setattr(graphs, "arch_of", lambda device: 90)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return names


def nothing_fused(op="norm_linear", **fields):
    return graphs.nothing_fused(op, "layer", True, True, 512, 512, torch.bfloat16, tuple(fields.items()))


def test_a_kernel_in_one_direction_is_enough(on_gpu):
    assert nothing_fused() and nothing_fused("linear_norm", residual="before")
    on_gpu["norm_linear", "backward"] = "lazy"
    assert not nothing_fused() and nothing_fused("linear_norm")
    on_gpu["norm_linear", "backward"] = "separate"
    on_gpu["norm_linear", "forward"] = "lazy"
    assert not nothing_fused()


def test_what_no_kernel_runs_is_left_to_the_op_to_report(on_gpu):
    on_gpu["norm_linear", "forward"] = "none"
    assert not nothing_fused()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["hstu", "encoder post-norm", "pre-norm block rms"])
def test_the_graph_holds_ops_only_where_they_fuse(name, fused, monkeypatch):
    monkeypatch.setattr(graphs, "nothing_fused", torch.compiler.assume_constant_result(lambda *args: not fused))
    monkeypatch.setattr(graphs, "on_device", lambda x: True)
    model, (x,) = KINDS[name].build(SMALL), KINDS[name].inputs(SMALL, 2, "cpu", torch.float32)
    expected = model(x)
    recsys_norm.convert(model, on_unsupported="fallback")
    seen = []

    def look(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if "recsys_norm" in str(node.target))
        return graph.forward

    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(model, fullgraph=True, backend=look)(x), expected, rtol=1e-4, atol=1e-4
        )
    assert bool(seen) == fused
    torch._dynamo.reset()
