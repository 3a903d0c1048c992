"""Each block against its formula, written out with plain loops and the block's own weights."""

from __future__ import annotations

import math

import pytest
import torch
from model_cases import LONG, make_batch, make_config, make_schema
from torch.nn import functional as F

from recsys_norm.models import blocks
from recsys_norm.models.config import EventConfig
from recsys_norm.models.tokens import N_TIME, Clock, EventTokens, locate, rotate

HOW = {name: dict(backend="unfused") for name in ("linear", "attention")}
OFFSETS = torch.tensor([0, 0, 4, 10, 10, 11], dtype=torch.int32)  # rows of 0, 4, 6, 0, 1 events
B, T = 5, 11


def randomized(module):
    """Gains and biases away from 1 and 0, so that a forgotten one shows."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


def norm_linear(module, x):
    width = x.shape[-1:]
    rms = module.norm == "rms"
    weight, bias = module.norm_weight, module.norm_bias
    x = F.rms_norm(x, width, weight, 1e-5) if rms else F.layer_norm(x, width, weight, bias, 1e-5)
    return F.linear(x, module.weight, module.bias)


def softmax_attention(q, k, v, window=None):
    """q [S, E], k and v [L, E], LONG.heads heads; the window makes it causal."""
    d, out = LONG.dim // LONG.heads, []
    for h in range(LONG.heads):
        part = slice(h * d, (h + 1) * d)
        score = q[:, part] @ k[:, part].T / math.sqrt(d)
        if window is not None:
            distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
            score = score.masked_fill((distance < 0) | (distance >= window), -math.inf)
        out.append(score.softmax(-1) @ v[:, part])
    return torch.cat(out, 1)


def rows_of(x):
    return [x[begin:end] for begin, end in zip(OFFSETS[:-1].tolist(), OFFSETS[1:].tolist())]


def test_personalized_ffn():
    block = randomized(blocks.PersonalizedFFN(make_config(), LONG, HOW))
    x, x_sum = torch.randn(T, 16), torch.randn(B, 4, 16)
    y = block(x, OFFSETS, x_sum, blocks.uniform_offsets(B, 4, x.device))
    attention, expected = block.attention, []
    for row, context in zip(rows_of(x), x_sum):
        k, v = norm_linear(block.weights, context).chunk(2, 1)
        q = F.layer_norm(row, (16,), attention.pre_norm_weight, attention.pre_norm_bias, 1e-5)
        heads = [slice(0, 8), slice(8, 16)]
        o = torch.cat([F.gelu(q[:, h] @ k[:, h].T / LONG.max_len) @ v[:, h] + q[:, h] for h in heads], 1)
        expected.append(F.rms_norm(o, (16,), attention.post_norm_weight, 1e-5) + row)
    torch.testing.assert_close(y, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_tau_scales_the_scores():
    sizes = EventConfig(dim=16, heads=2, max_len=6, tau=2.5)
    assert blocks.PersonalizedFFN(make_config(), sizes, HOW).attention.options["scale"] == 1 / 2.5


@pytest.mark.parametrize("position", ["before", "after"])
def test_self_attention(position):
    block = randomized(blocks.SelfAttention(make_config(residual_position=position), LONG, HOW))
    x, expected = torch.randn(T, 16), []
    for row in rows_of(x):
        q, k, v = norm_linear(block.qkv, row).chunk(3, 1)
        z = F.linear(softmax_attention(q, k, v, LONG.window), block.out.weight, block.out.bias)
        norm = lambda z: F.layer_norm(z, (16,), block.out.norm_weight, block.out.norm_bias, 1e-5)  # noqa: E731
        expected.append(norm(z + row) if position == "before" else norm(z) + row)
    torch.testing.assert_close(block(x, OFFSETS), torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_self_attention_sees_its_window_only():
    """A changed event moves itself and the window - 1 = 2 after it, in its own row."""
    block = blocks.SelfAttention(make_config(), LONG, HOW)
    x = torch.randn(T, 16)
    changed = x.clone()
    changed[5] += 1  # the second event of the row 4 .. 9
    with torch.no_grad():
        moved = (block(changed, OFFSETS) - block(x, OFFSETS)).abs().amax(1) > 1e-6
    assert moved.nonzero().flatten().tolist() == [5, 6, 7]


def test_seed_pooling():
    config = make_config()
    block = randomized(blocks.SeedPooling(config, LONG, HOW))
    x, x_sum = torch.randn(T, 16), torch.randn(B, 4, 16)
    y = block(x, OFFSETS, x_sum, blocks.uniform_offsets(B, 3, x.device))
    assert y.shape == (B, 2, 16)
    for b, row in enumerate(rows_of(x)):
        seeds = block.seeds + block.spread @ norm_linear(block.shift, x_sum[b])
        q = F.rms_norm(seeds, (16,), block.norm.weight, 1e-5)
        k, v = norm_linear(block.kv, row).chunk(2, 1)
        h_seed = softmax_attention(q, k, v) if len(row) else torch.zeros(3, 16)
        torch.testing.assert_close(y[b], block.compress(h_seed[None])[0], rtol=1e-4, atol=1e-5)
    assert y[[0, 3]].abs().max() == 0  # rows without events


def test_sum_kron_linear_is_a_sum_of_kronecker_products():
    block = blocks.SumKronLinear(m=5, n=3, E=4, D=6, rank=2)
    h = torch.randn(7, 5, 4)
    z, w = block.z.view(3, 2, 5), block.w.view(6, 2, 4)
    expected = sum(z[:, i] @ h @ w[:, i].T for i in range(2))
    torch.testing.assert_close(block(h), expected, rtol=1e-4, atol=1e-5)


def test_gated_token_linear():
    block = blocks.GatedTokenLinear(5, 3)
    x = torch.randn(2, 5, 4)
    value, gate = block.weight.split(3)
    expected = torch.stack([(value @ row) * torch.sigmoid(gate @ row + block.gate_bias) for row in x])
    torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3])
def test_wukong_experts_stand_token_by_token(count):
    config = make_config()
    experts = randomized(blocks.Experts(count, config, 8, HOW))
    x = torch.randn(B, 8, 16)
    expected = [[one_expert(expert, config, row) for expert in experts.children()] for row in x]
    expected = torch.stack([torch.stack(of_row, 1).flatten(0, 1) for of_row in expected])
    assert expected.shape == (B, 8 * count, 16)
    torch.testing.assert_close(experts(x[:, :5], x[:, 5:]), expected, rtol=1e-4, atol=1e-5)


def one_expert(block, config, row):
    fm = row @ (row.T @ block.p.T)  # [n, rank]
    hidden = F.gelu(norm_linear(block.fmb_in, fm.flatten()))
    out = block.fmb_out
    hidden = F.linear(hidden, out.weight1, out.bias1)
    hidden = F.gelu(F.layer_norm(hidden, hidden.shape, out.norm_weight, out.norm_bias, 1e-5))
    fmb = F.linear(hidden, out.weight2, out.bias2).view(config.fmb_tokens, 16)
    z = torch.cat([fmb, block.lcb @ row]) + F.linear(row, block.out.weight, block.out.bias)
    return F.layer_norm(z, (16,), block.out.norm_weight, block.out.norm_bias, 1e-5)


@pytest.mark.parametrize(
    "layers, kinds",
    [
        (1, ["PFFN+pool"]),
        (2, ["attention+pool", "PFFN+pool"]),
        (3, ["PFFN+pool", "attention", "PFFN+pool"]),
        (8, ["attention+pool", "PFFN+pool"] + ["attention", "PFFN+pool"] * 3),
    ],
)
def test_comp_skip_alternates_and_ends_with_a_pooling(layers, kinds):
    def kind(layer: int, comp_skip: bool) -> str:
        sizes = EventConfig(dim=16, heads=2, layers=layers)
        block = blocks.TransformerBlock(make_config(comp_skip=comp_skip), sizes, layer, HOW)
        parts = {"PFFN": block.pffn, "attention": block.self_attention, "pool": block.pooling}
        return "+".join(name for name, part in parts.items() if part is not None)

    assert [kind(layer, True) for layer in range(layers)] == kinds
    assert [kind(layer, False) for layer in range(layers)] == ["PFFN+attention+pool"] * layers


def test_attention_block_hands_the_summary_on():
    block = blocks.TransformerBlock(make_config(), EventConfig(dim=16, heads=2, layers=4, max_len=6), 2, HOW)
    x, y = torch.randn(T, 16), torch.randn(B, 2, 16)
    new_x, new_y = block(x, y, OFFSETS, torch.randn(B, 4, 16), None, None)
    assert new_y is y and not torch.equal(new_x, x)


def test_locate():
    row, position = locate(OFFSETS, T)
    assert row.tolist() == [1] * 4 + [2] * 6 + [4]
    assert position.tolist() == [3, 2, 1, 0, 5, 4, 3, 2, 1, 0, 0]
    for offsets in ([0], [0, 0, 0]):
        row, position = locate(torch.tensor(offsets, dtype=torch.int32), 0)
        assert row.shape == position.shape == (0,)


def test_rotation_turns_pairs():
    x, angle = torch.randn(4, 6), torch.randn(4, 3)
    turned = torch.complex(*x.chunk(2, 1)) * torch.polar(torch.ones(4, 3), angle)
    torch.testing.assert_close(rotate(x, angle.cos(), angle.sin()), torch.cat([turned.real, turned.imag], 1))


def test_event_tokens_know_position_age_and_candidate():
    schema = make_schema(events=("long",))
    tokens, clock = EventTokens(make_config(), LONG, schema.events[0], schema, HOW), Clock(LONG)
    batch = make_batch(schema, {"long": [0, 4, 6, 0, 1]})
    fields, candidates, ages = torch.randn(T, 16), torch.randn(B, 1, 8), batch.ages["long"]

    def run(fields, ages, candidates):
        return tokens(fields, *clock(OFFSETS, ages, fields.dtype), candidates)

    with torch.no_grad():
        x = run(fields, ages, candidates)
        same = run(fields[:1].expand(T, -1), torch.ones(T), candidates[:1].expand(B, 1, -1))
        older = run(fields, ages * torch.where(torch.arange(T) == 5, 1.5, 1.0), candidates)
        other = run(fields, ages, candidates * torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0])[:, None, None])
    torch.testing.assert_close(same[3], same[10])  # both are the newest event of their row
    assert (same[3] - same[2]).norm() > 1e-2
    assert (older - x).abs().amax(1).nonzero().flatten().tolist() == [5]
    assert (other - x).abs().amax(1).nonzero().flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("candidates", [True, False])
@pytest.mark.parametrize("products", ["match", "all"])
def test_event_products(products, candidates):
    schema = make_schema(events=("long",), candidates=candidates)
    tokens = EventTokens(make_config(event_products=products), LONG, schema.events[0], schema, HOW)
    seen = []
    tokens.mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    fields, candidate = torch.randn(T, 16), torch.randn(B, 1, 8) if candidates else None
    tokens(fields, *Clock(LONG)(OFFSETS, torch.ones(T), fields.dtype), candidate)
    item, action = fields.split(8, 1)
    expected = [item * action] if products == "all" else []
    if candidates:
        of_row = candidate[[1] * 4 + [2] * 6 + [4], 0]
        matched = [item, action, item * action] if products == "all" else [item]
        expected += [x * of_row for x in matched]
    made = seen[0][:, fields.shape[1] + 2 * N_TIME :]  # after the fields and the phases of the age
    torch.testing.assert_close(made, torch.cat([fields[:, :0], *expected], 1), rtol=0, atol=0)


def test_the_gradient_of_a_candidate_is_summed_in_fp32():
    """Over 2000 events of a row; bf16 sums of so many values stand still."""
    schema, n = make_schema(events=("long",)), 2000
    tokens = EventTokens(make_config(), LONG, schema.events[0], schema, HOW).bfloat16()
    offsets = torch.tensor([0, n], dtype=torch.int32)
    fields, candidate = torch.ones(n, 16, dtype=torch.bfloat16), torch.randn(1, 1, 8).bfloat16().requires_grad_()
    tokens.mlp.forward = lambda x: x[:, -8:]  # the product with the candidate
    clock = list(Clock(LONG)(offsets, torch.ones(n), torch.bfloat16))
    clock[2:] = torch.ones(n, 4).bfloat16(), torch.zeros(n, 4).bfloat16()
    tokens(fields, *clock, candidate).sum().backward()
    torch.testing.assert_close(candidate.grad.float(), torch.full((1, 1, 8), float(n)), rtol=4e-3, atol=0)
