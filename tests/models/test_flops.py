"""The formula against what PyTorch counts in the products that were computed."""

from __future__ import annotations

import pytest
import torch
from model_cases import make_batch, make_config, make_schema
from torch.utils.flop_counter import FlopCounterMode

from recsys_norm.models.config import EventConfig
from recsys_norm.models.flops import ModelFlops, pairs
from recsys_norm.models.kunlun import Kunlun


def test_pairs():
    for length, window in ((0, 3), (1, 3), (3, 3), (7, 3), (5, 1), (4, 100)):
        expected = sum(1 for i in range(length) for j in range(length) if i - window < j <= i)
        assert pairs(torch.tensor([length]), window) == expected
    assert pairs(torch.tensor([2, 4]), 3) == 3 + 9


@pytest.mark.parametrize("comp_skip", [True, False])
@pytest.mark.parametrize("schema", [make_schema(), make_schema(events=(), sparse=0), make_schema(candidates=False)])
def test_counts_what_pytorch_counts(schema, comp_skip):
    """With full rows nothing is padded, and the only products that do not count are the masked pairs."""
    events = {"long": EventConfig(16, 2, 3, 2, max_len=6), "short": EventConfig(8, 1, 2, 2, max_len=4)}
    products = "match" if comp_skip else "all"
    config = make_config(events=events, comp_skip=comp_skip, experts=2, event_products=products)
    lengths = {"long": [6] * 5, "short": [4] * 5}
    model, batch = Kunlun(config, schema, backend="unfused", attention="eager"), make_batch(schema, lengths, rows=5)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(batch)
    lengths = {name: torch.tensor(lengths[name]) for name in lengths}
    flops = ModelFlops(config, schema)
    masked = 0
    for event in schema.events:
        sizes = events[event.name]
        attends = {True: sizes.layers // 2, False: sizes.layers}[comp_skip]
        all_pairs = 5 * sizes.max_len**2
        masked += attends * 4 * sizes.dim * (all_pairs - int(pairs(lengths[event.name], sizes.window)))
    assert flops.forward(5, lengths) == counter.get_total_flops() - masked
    assert flops.step(5, lengths) == 3 * flops.forward(5, lengths)


def test_padding_does_not_count():
    flops = ModelFlops(make_config(), make_schema())
    no_events = {"long": torch.zeros(4), "short": torch.zeros(4)}
    one_token = {"long": torch.tensor([1.0, 0, 0, 0]), "short": torch.zeros(4)}
    assert flops.forward(4, no_events) == 4 * flops.per_row
    assert flops.forward(4, one_token) - flops.forward(4, no_events) == flops.per_token["long"] + flops.per_pair["long"]
