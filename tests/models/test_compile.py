"""The dense part under torch.compile: one graph, and lengths that change from batch to batch."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from model_cases import make_batch, make_config, make_schema
from torch._dynamo.testing import CompileCounterWithBackend

from recsys_norm.models.kunlun import Kunlun


@pytest.mark.parametrize("backend, compiler", [("unfused", "aot_eager"), ("fused", "eager")])
def test_twenty_batches_of_different_lengths_compile_at_most_twice(backend, compiler):
    schema = make_schema(events=("long",), sparse=1)
    model, plain = (Kunlun(make_config(), schema, backend=backend) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    counter = CompileCounterWithBackend(compiler)
    torch._dynamo.reset()
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
    torch._dynamo.reset()
