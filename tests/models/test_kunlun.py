"""The whole model: what its logits may depend on, and what they may not."""

from __future__ import annotations

import pytest
import torch
from model_cases import LENGTHS, LONG, make_batch, make_config, make_schema, row_of
from torch import nn

from recsys_norm.models.config import EventConfig
from recsys_norm.models.kunlun import Kunlun

SCHEMAS = {
    "both event types": make_schema(),
    "one event type": make_schema(events=("long",)),
    "no events": make_schema(events=(), candidates=False),
    "candidates without events": make_schema(events=()),
    "events without candidates": make_schema(candidates=False),
    "no dense features": make_schema(dense=0),
    "events and candidates alone": make_schema(dense=0, sparse=0),
    "two tasks": make_schema(tasks=("click", "like")),
}


def build(schema, **changes) -> Kunlun:
    torch.manual_seed(1)
    return Kunlun(make_config(**changes), schema, backend="unfused")


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_kind_of_schema_gives_logits_and_gradients(name):
    schema = SCHEMAS[name]
    model, batch = build(schema), make_batch(schema, LENGTHS, rows=5)
    logits = model(batch)
    assert logits.shape == (5, len(schema.tasks)) and logits.dtype == torch.float32
    torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert without == []


@pytest.mark.parametrize("comp_skip", [True, False])
@pytest.mark.parametrize("residual_position", ["before", "after"])
def test_all_parameters_train_in_every_layout(comp_skip, residual_position):
    schema = make_schema()
    events = {"long": EventConfig(16, 2, 3, 3, max_len=6), "short": EventConfig(8, 1, 2, 2, max_len=4)}
    changes = dict(comp_skip=comp_skip, residual_position=residual_position, experts=2, events=events)
    model = build(schema, **changes)
    model(make_batch(schema, LENGTHS)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if not p.grad.abs().max() > 0] == []


def test_a_row_does_not_depend_on_its_batch():
    schema = make_schema()
    model, batch = build(schema), make_batch(schema, LENGTHS)
    with torch.no_grad():
        together = model(batch)
        alone = torch.cat([model(row_of(batch, i, schema)) for i in range(5)])
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-5)
    assert together.std() > 1e-3


def test_order_of_events_decides():
    schema = make_schema()
    model, batch = build(schema), make_batch(schema, LENGTHS)
    with torch.no_grad():
        before = model(batch)
        for name in ("long.item", "long.action"):
            values = batch.ids[name].values()  # rows of 0, 3, 6, 1, 0 events: turn the 6 of the third one around
            values[3:9] = values[3:9].flip(0).clone()
        moved = (model(batch) - before).abs().flatten()
    assert moved[2] > 1e-4 and moved[[0, 1, 3, 4]].max() == 0


def test_the_candidate_changes_how_events_count():
    """The effect of an event on the logit depends on the candidate: it is no sum of both."""
    schema = make_schema(events=("long",))
    model = build(schema)

    def logit(candidate: int, item: int) -> torch.Tensor:
        batch = make_batch(schema, {"long": [1]})
        batch.ids["candidate.item"].values()[:] = candidate
        batch.ids["long.item"].values()[:] = item
        return model(batch)

    with torch.no_grad():
        assert (logit(1, 2) - logit(1, 3) - logit(4, 2) + logit(4, 3)).abs() > 1e-5


def test_no_events_at_all():
    schema = make_schema()
    model, batch = build(schema), make_batch(schema, {"long": [0] * 4, "short": [0] * 4})
    logits = model(batch)
    logits.sum().backward()
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    tokens = [p.grad for p in model.dense.event_tokens.parameters()]
    assert all(grad is None or grad.abs().max() == 0 for grad in tokens)


@pytest.mark.parametrize("name", ["both event types", "no events", "two tasks"])
def test_batch_without_rows(name, monkeypatch):
    """Logits [0, n_tasks] in the graph, zero gradients everywhere, and torchrec never sees such a batch."""
    schema = SCHEMAS[name]
    model, batch = build(schema), make_batch(schema, {"long": [], "short": []}, rows=0)
    seen = []
    for collection in (model.sparse.pooled, model.sparse.sequence):
        if collection is not None:
            collection.register_forward_pre_hook(lambda _, args: seen.append(args[0].stride()))
    logits = model(batch)
    assert logits.shape == (0, len(schema.tasks)) and logits.requires_grad and seen and 0 not in seen
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in model.dense.parameters())


def test_backends_share_weights_and_results():
    schema = make_schema()
    models = {}
    for backend in ("unfused", "naive", "fused"):
        torch.manual_seed(3)
        models[backend] = Kunlun(make_config(), schema, backend=backend)
    torch.manual_seed(3)
    models["eager attention"] = Kunlun(make_config(), schema, backend="fused", attention="eager")
    reference = models.pop("unfused")
    batch = make_batch(schema, LENGTHS)
    expected = reference(batch)
    expected.square().sum().backward()
    for model in models.values():
        assert list(model.state_dict()) == list(reference.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), reference.state_dict().values()))
        logits = model(batch)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        logits.square().sum().backward()
        for p, q in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)


def test_policy_reaches_every_op():
    model = Kunlun(make_config(), make_schema(), backend="naive", attention="eager", on_unsupported="raise")
    policies = [module.policy for module in model.modules() if hasattr(module, "policy")]
    assert len(policies) > 20 and {(p.backend, p.on_unsupported) for p in policies} == {("naive", "raise")}
    attentions = [module for module in model.modules() if "attention" in getattr(module, "options", {})]
    assert attentions and all(module.options["attention"] == "eager" for module in attentions)


def test_first_logits_are_near_the_base_rate():
    schema = make_schema()
    with torch.no_grad():
        rate = torch.sigmoid(build(schema)(make_batch(schema, LENGTHS))).mean()
    assert abs(rate - schema.base_rate) < 0.1


def test_bf16_autocast_returns_fp32_near_fp32():
    schema = make_schema()
    model, batch = build(schema), make_batch(schema, LENGTHS)
    expected = model(batch)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch)
    logits.sum().backward()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.05)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_dropout_acts_in_training_only():
    schema = make_schema()
    model, batch = build(schema, dropout=0.5, embedding_dropout=0.5), make_batch(schema, LENGTHS)
    plain = build(schema)
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    torch.testing.assert_close(model(batch), plain(batch))


def test_more_experts_widen_the_next_layer():
    model = build(make_schema(), experts=3)
    first, second = model.dense.layers
    assert len(list(first.experts.children())) == 3 and second.summarize.weight.shape[1] == 3 * first.n_in


def test_no_region_is_a_container():
    """FSDP2 shards region by region, and that of torch 2.11 refuses a ModuleList even where it has a forward."""
    model = Kunlun(make_config(experts=2), make_schema(events=("long",)), backend="unfused")
    regions = [region for region, _ in model.dense.regions()]
    assert not [region for region in regions if isinstance(region, (nn.ModuleList, nn.ModuleDict, nn.Sequential))]
    assert "layers.0.experts.1.p" in model.dense.state_dict()


def test_one_config_serves_schemas_with_fewer_events():
    model = build(make_schema(events=("short",)))
    assert list(model.dense.event_tokens) == ["short"] and len(model.dense.layers) == 1


@pytest.mark.parametrize(
    "config, message",
    [
        (make_config(events={"long": LONG}), "model.events.short"),
        (make_config(events={"long": EventConfig(max_len=5), "short": LONG}), "max_len=6"),
    ],
)
def test_event_without_sizes_or_room(config, message):
    with pytest.raises(ValueError, match=message):
        Kunlun(config, make_schema())


def test_schema_without_any_token():
    with pytest.raises(ValueError, match="at least one token"):
        build(make_schema(events=("long",), dense=0, sparse=0, candidates=False))


@pytest.mark.parametrize("backend", ["unfused", "fused"])
@pytest.mark.parametrize(
    "lengths", [LENGTHS, {name: [0] * 5 for name in LENGTHS}, {name: [0, 3, 0, 1, 0] for name in LENGTHS}]
)
@pytest.mark.filterwarnings("ignore:.*cannot run")
def test_tokens_that_fill_up_change_nothing(backend, lengths):
    schema = make_schema()
    batch = make_batch(schema, lengths)

    def results(multiple):
        torch.manual_seed(1)
        model = Kunlun(make_config(), schema, backend=backend)
        model.dense.token_multiple, model.dense.token_offsets = multiple, {"long": 5}
        logits = model(batch)
        logits.square().sum().backward()
        return [logits.detach(), *(p.grad for p in model.parameters())]

    for got, expected in zip(results(16), results(None), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
