"""The sizes that ship, and answers to sizes that cannot work."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException

from recsys_norm.models.config import EventConfig, ModelConfig, as_model_config, register

# D, heads, layers, window, mean and max length of the long and of the short event; n_sum, seeds, summary; experts;
# tables, rows, width; batch.
K, M = 1_000, 1_000_000
SIZES = {
    "kunlun_tiny": ((64, 2, 2, 32, 24, 64), (32, 1, 1, 16, 8, 16), (8, 8, 4), 1, (6, 10 * K, 32), 256),
    "kunlun_small": ((256, 2, 4, 128, 128, 256), (128, 1, 2, 32, 32, 64), (64, 32, 16), 2, (8, M, 64), 512),
    "kunlun_base": ((512, 4, 8, 256, 512, 1024), (256, 2, 4, 64, 64, 128), (128, 64, 32), 2, (16, M, 128), 512),
    "kunlun_large": ((1024, 8, 8, 256, 512, 1024), (512, 4, 4, 64, 64, 128), (128, 64, 32), 4, (16, 2 * M, 128), 256),
}


@pytest.fixture(autouse=True)
def hydra():
    GlobalHydra.instance().clear()
    register(ConfigStore.instance())
    with initialize_config_module("recsys_norm.configs", version_base="1.3"):
        yield


def load(name: str, *overrides: str):
    return compose(f"model/{name}", overrides=list(overrides)).model


@pytest.mark.parametrize("name", SIZES)
def test_shipped_sizes(name):
    config = as_model_config(load(name))
    long, short, sums, experts, tables, batch = SIZES[name]
    for event, sizes in (("long", long), ("short", short)):
        e = config.events[event]
        assert (e.dim, e.heads, e.layers, e.window, e.mean_len, e.max_len) == sizes and e.tau is None
    assert (config.n_sum, config.n_seeds, config.n_summary) == sums
    assert (config.tables.count, config.tables.rows, config.tables.dim) == tables
    assert (config.experts, config.batch_size) == (experts, batch)
    assert config.comp_skip and config.name == name and config.dim == long[0]


def test_overrides_reach_the_dataclass():
    config = as_model_config(load("kunlun_tiny", "model.events.long.window=7", "model.events.long.tau=3"))
    assert isinstance(config, ModelConfig) and isinstance(config.events["long"], EventConfig)
    assert (config.events["long"].window, config.events["long"].tau) == (7, 3.0)


@pytest.mark.parametrize(
    "override, key",
    [("model.n_seedz=3", "n_seedz"), ("model.events.long.windows=3", "windows"), ("model.dim=x", "dim")],
)
def test_unknown_key_and_wrong_type(override, key):
    with pytest.raises(ConfigCompositionException) as error:
        load("kunlun_tiny", override)
    assert key in str(error.value) + str(error.value.__cause__)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: EventConfig(dim=30, heads=4), "dim=30 is no multiple of heads=4"),
        (lambda: EventConfig(dim=6, heads=2), "multiple of 4"),
        (lambda: EventConfig(window=0), "window=0"),
        (lambda: EventConfig(tau=0.0), "tau=0.0"),
        (lambda: ModelConfig(residual_position="middle"), "residual_position='middle'"),
        (lambda: ModelConfig(event_products="some"), "event_products='some'"),
        (lambda: ModelConfig(fmb_tokens=8, n_sum=8), "fmb_tokens=8"),
        (lambda: ModelConfig(dropout=1.0), "dropout=1.0"),
    ],
)
def test_sizes_that_cannot_work(make, message):
    with pytest.raises(ValueError, match=message):
        make()
