import math

import pytest

from recsys_norm.training.config import OptimizerConfig
from recsys_norm.training.optim import lr_factor


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_warmup_then_decay(decay):
    config = OptimizerConfig(warmup_steps=4, decay=decay, final_lr=0.1)
    factors = [lr_factor(config, step, 20) for step in range(20)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0] and factors[4] == 1.0
    if decay == "constant":
        assert set(factors[4:]) == {1.0}
    else:
        assert factors[4:] == sorted(factors[4:], reverse=True)
        assert lr_factor(config, 20, 20) == pytest.approx(0.1)
        middle = {"linear": 0.55, "cosine": 0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2}[decay]
        assert lr_factor(config, 12, 20) == pytest.approx(middle)


def test_no_warmup_and_a_run_shorter_than_it():
    assert lr_factor(OptimizerConfig(warmup_steps=0), 0, 10) == 1.0
    assert lr_factor(OptimizerConfig(warmup_steps=100, decay="cosine"), 5, 10) == pytest.approx(0.06)
