"""Low-precision weights with fp32 masters train as fp32 weights under autocast do."""

import copy

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
    model = Model()
    weights = MasterWeights(model, torch.bfloat16)
    model.first(torch.ones(1, 24, dtype=torch.bfloat16)).sum().backward()
    weights.collect()
    assert weights.masters["first.bias"].grad is not None and weights.masters["second.weight"].grad is None
    weights.collect()
    assert weights.masters["first.bias"].grad is None
