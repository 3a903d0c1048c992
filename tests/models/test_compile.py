"""The dense part under torch.compile: one graph, and lengths that change from batch to batch."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from model_cases import make_batch, make_config, make_schema
from torch._dynamo.testing import CompileCounterWithBackend

from recsys_norm.models.kunlun import Kunlun
from recsys_norm.training.compiling import compile_regions


@pytest.fixture(autouse=True)
def dynamo():
    """Nothing is compiled yet, and what `compile_regions` sets is put back."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(
        automatic_dynamic_shapes=True, recompile_limit=torch._dynamo.config.recompile_limit
    ):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend, compiler", [("unfused", "aot_eager"), ("fused", "eager")])
def test_twenty_batches_of_different_lengths_compile_at_most_twice(backend, compiler):
    schema = make_schema(events=("long",), sparse=1)
    model, plain = (Kunlun(make_config(), schema, backend=backend) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    counter = CompileCounterWithBackend(compiler)
    model.dense.compile(backend=counter, fullgraph=True)
    random.seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*cannot run")  # fused on a CPU is a fallback
        for i in range(20):
            batch = make_batch(schema, {"long": random.choices(range(7), k=5)}, seed=i)
            logits, expected = model(batch), plain(batch)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
            if i in (0, 19):
                logits.sum().backward()
                expected.sum().backward()
                for p, q in zip(model.parameters(), plain.parameters()):
                    torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-4)
    assert 1 <= counter.frame_count <= 2


def counted_regions(model, monkeypatch):
    """Compile the model's regions; the result counts the graphs and keeps them."""
    counter = CompileCounterWithBackend("eager")

    def compile_here(module, **_):
        module._compiled_call_impl = torch.compile(module._call_impl, backend=counter, fullgraph=True)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_here)
    compile_regions(model.dense, replay=False)
    return counter


@pytest.mark.parametrize("token_multiple", [None, 4])  # T as it comes, and filled up
def test_regions_know_the_width_of_every_event_type(token_multiple, monkeypatch):
    """Only T is unknown to a region's graph, though blocks of both event types run the same code at other widths."""
    schema = make_schema(events=("long", "short"), sparse=1)
    model = Kunlun(make_config(), schema, backend="unfused")
    model.dense.token_multiple = token_multiple
    counter = counted_regions(model, monkeypatch)
    random.seed(0)
    for i in range(6):
        lengths = {"long": random.choices(range(1, 7), k=5), "short": random.choices(range(1, 5), k=5)}
        model(make_batch(schema, lengths, seed=i))
        if i == 1:
            compiled = counter.frame_count
    assert counter.frame_count == compiled  # nothing is compiled again for other lengths
    for graph in counter.graphs:
        shapes = [n.meta["example_value"].shape for n in graph.graph.nodes if n.op == "placeholder" and
                  isinstance(n.meta.get("example_value"), torch.Tensor)]  # fmt: skip
        assert all(isinstance(size, int) for shape in shapes for size in shape[1:]), shapes


@pytest.mark.parametrize("case", ["dropout", "autocast", "filled"])
def test_regions_are_compiled_once_for_all_lengths(case, monkeypatch):
    """Whatever makes new tensors of the embeddings before a region sees them, without dynamo's own guess at sizes."""
    schema = make_schema(events=("long",), sparse=1)
    model = Kunlun(make_config(embedding_dropout=0.2 if case == "dropout" else 0.0), schema, backend="unfused")
    model.dense.token_multiple = 4 if case == "filled" else None
    counter = counted_regions(model, monkeypatch)
    random.seed(0)
    for i in range(8):
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
            model(make_batch(schema, {"long": random.choices(range(2, 7), k=5)}, seed=i))
        if i == 0:
            compiled = counter.frame_count
    assert counter.frame_count == compiled


def test_most_batches_are_filled_up_to_the_same_number_of_tokens():
    from recsys_norm.models.config import EventConfig
    from recsys_norm.training.compiling import fill_tokens

    events = {"long": EventConfig(16, 2, 2, 3, 128, 256), "short": EventConfig(8, 1, 2, 2, 8, 16)}
    config, schema = make_config(events=events, batch_size=64), make_schema()
    dense = Kunlun(config, schema, backend="unfused").dense
    fill_tokens(dense, config, None)
    assert dense.token_multiple == 256  # 64 x 128 / 32
    seen = {"long": set(), "short": set()}
    for name, expected in (("long", 64 * 128), ("short", 64 * 8)):
        for T in range(expected - 127, expected + 129):
            seen[name].add(T + (dense.token_offsets[name] - T) % dense.token_multiple)
    assert seen == {"long": {64 * 128 + 128}, "short": {64 * 8 + 128}}
    fill_tokens(dense, config, 0)
    assert dense.token_multiple is None and dense.token_offsets == {}


def test_searches_are_in_whole_tensors():
    """For a part of a tensor, torch 2.11's inductor searches from the tensor's start on a GPU."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from recsys_norm.models.tokens import locate
    from recsys_norm.ops.jagged_torch import _slots

    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    row, position = locate(offsets, 7)
    assert row.tolist() == [0, 0, 2, 2, 2, 2, 2] and position.tolist()[:5] == [1, 0, 2, 1, 0]
    assert _slots(offsets, 7, 4).tolist() == [0, 1, 8, 9, 10, 12, 12]
    for search in (lambda offsets: locate(offsets, 7), lambda offsets: _slots(offsets, 7, 4)):
        found = [n for n in make_fx(search)(offsets).graph.nodes if n.target is torch.ops.aten.searchsorted.Tensor]
        assert [node.args[0].op for node in found] == ["placeholder"]
