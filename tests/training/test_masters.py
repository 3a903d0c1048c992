"""Low-precision weights with fp32 masters train as fp32 weights under autocast do."""

import copy

import pytest
import torch
from torch import nn

from recsys_norm.training.config import OptimizerConfig
from recsys_norm.training.masters import MasterWeights
from recsys_norm.training.optim import Optimizers


class Tables(nn.Module):
    """Stands for sharded tables without any."""

    class fused_optimizer:
        param_groups: list = []
        step = staticmethod(lambda: None)
        state_dict = staticmethod(lambda: {"state": {}})


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(24, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 1)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.second(torch.relu(self.first(x)))
        return self.head(h.float())


def train(model, weights, steps=3):
    optimizers = Optimizers(model, Tables(), OptimizerConfig(clip_norm=0.5), steps, weights)
    x, norms = torch.randn(32, 24, generator=torch.Generator().manual_seed(1)), []
    for step in range(steps):
        optimizers.set_lr(step)
        model(x).square().mean().backward()
        norms.append(optimizers.clip())
        optimizers.step()
    return torch.stack(norms)


def test_same_steps_as_autocast():
    plain = Model()
    low = copy.deepcopy(plain)
    weights = MasterWeights(low, torch.bfloat16, ("head.",))
    assert low.first.weight.dtype == torch.bfloat16 and low.head.weight.dtype == torch.float32
    torch.testing.assert_close(train(low, weights), train(plain, None), rtol=1e-5, atol=0)
    for (name, expected), (same, value) in zip(plain.state_dict().items(), low.state_dict().items(), strict=True):
        assert name == same and value.dtype == torch.float32
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-7)
    assert not torch.equal(low.first.weight.detach().float(), weights.masters["first.weight"].detach())
    torch.testing.assert_close(low.first.weight.detach(), weights.masters["first.weight"].detach().bfloat16())


def test_loading_through_the_state_dict():
    model = Model()
    weights = MasterWeights(model, torch.bfloat16)
    for value in model.state_dict().values():
        value.fill_(1.001)  # no bf16 number
    weights.refresh()
    assert float(model.second.weight.detach()[0, 0]) == 1.0
    assert float(model.state_dict()["second.weight"][0, 0]) == float(torch.tensor(1.001))
    assert float(weights.masters["second.weight"].detach()[0, 0]) == float(torch.tensor(1.001))


def test_gradients_of_one_step_do_not_reach_the_next():
    """A weight that gets no gradient stays as it is, whatever its last gradient was, and weight decay leaves it alone."""
    model = Model()
    weights = MasterWeights(model, torch.bfloat16)
    optimizers = Optimizers(model, Tables(), OptimizerConfig(clip_norm=None), 2, weights)
    optimizers.set_lr(0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.first(torch.ones(1, 24, dtype=torch.bfloat16)).sum().backward()
    assert float(optimizers.clip()) == pytest.approx((16 * 25) ** 0.5)
    optimizers.step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"first.weight", "first.bias"}
    assert float(optimizers.clip()) == 0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizers.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_state_of_the_optimizer_is_by_parameter():
    plain, low = Model(), Model()
    weights = MasterWeights(low, torch.bfloat16, ("head.",))
    expected = Optimizers(plain, Tables(), OptimizerConfig(), 3).state()
    optimizers = Optimizers(low, Tables(), OptimizerConfig(), 3, weights)
    state = optimizers.state()
    assert {name: value.shape for name, value in state.items()} == {n: v.shape for n, v in expected.items()}
    for value in state.values():
        value.fill_(2.0)
    assert all(bool((value == 2).all()) for value in optimizers.state().values())
    for name, weight in weights.weights.items():
        assert weight.data_ptr() % 16 == 0 and weight.is_contiguous(), name
