"""Lookups: which table, which order, and how torchrec's pipelines see the module."""

from __future__ import annotations

import torch
from model_cases import LENGTHS, make_batch, make_config, make_schema

from recsys_norm.models.kunlun import DenseArch, Kunlun
from recsys_norm.models.sparse import SparseArch


def test_lookups():
    schema = make_schema()
    sparse, batch = SparseArch(make_config(), schema), make_batch(schema, LENGTHS)
    pooled, candidates, events = sparse(batch)
    weights = {name.split(".")[-2]: p for name, p in sparse.named_parameters()}
    for i, feature in enumerate(schema.sparse):
        ids = batch.sparse[feature.name]
        rows = [weights[feature.table][part].sum(0) for part in ids.values().split(ids.lengths().tolist())]
        torch.testing.assert_close(pooled[:, i], torch.stack(rows))
    assert torch.equal(candidates[:, 0], weights["item"][batch.ids["candidate.item"].values()])
    for name, (fields, offsets, ages) in events.items():
        item, action = (batch.ids[f"{name}.{field}"].values() for field in ("item", "action"))
        assert torch.equal(fields, torch.cat([weights["item"][item], weights["action"][action]], 1))
        assert offsets.dtype == torch.int32 and offsets.diff().tolist() == LENGTHS[name]
        assert ages is batch.ages[name]


def test_a_candidate_and_the_events_share_a_table():
    sparse = SparseArch(make_config(), make_schema())
    assert sorted(name.split(".")[-2] for name, _ in sparse.sequence.named_parameters()) == ["action", "item"]


def test_tables_start_small_and_differ():
    sparse = SparseArch(make_config(), make_schema())
    tables = list(sparse.parameters())
    bound = 8**-0.5
    assert all(0.3 * bound < table.std() and table.abs().max() <= bound for table in tables)
    assert not torch.equal(tables[0], tables[1])


def test_tables_on_the_meta_device_cost_nothing():
    model = Kunlun(make_config(), make_schema(), table_device="meta")
    assert all(p.is_meta for p in model.sparse.parameters()) and not any(p.is_meta for p in model.dense.parameters())


def test_pipelines_can_trace_the_model():
    """TrainPipelineSparseDist traces forward down to the tables, whose inputs must come straight from the batch."""
    from torchrec import EmbeddingBagCollection, EmbeddingCollection

    class Tracer(torch.fx.Tracer):
        proxy_buffer_attributes = True

        def is_leaf_module(self, module, name):
            return isinstance(module, (EmbeddingBagCollection, EmbeddingCollection, DenseArch))

    model = Kunlun(make_config(), make_schema())
    calls = {node.target: node for node in Tracer().trace(model).nodes if node.op == "call_module"}
    assert set(calls) == {"sparse.pooled", "sparse.sequence", "dense"}
    for target, attribute in (("sparse.pooled", "sparse"), ("sparse.sequence", "ids")):
        (source,) = calls[target].args
        assert source.target is getattr and source.args[1] == attribute and source.args[0].op == "placeholder"
