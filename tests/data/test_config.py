"""The yaml files of configs/data, composed by Hydra and instantiated."""

from importlib.resources import files
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError

from recsys_norm.data import config as data_config

MODEL = {
    "batch_size": 16,
    "n_dense": 3,
    "tables": {"count": 2, "rows": 500, "dim": 4},
    "events": {"long": {"mean_len": 5, "max_len": 20}, "short": {"mean_len": 2, "max_len": 7}},
}
FOLDER = Path(str(files("recsys_norm.configs"))) / "data"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.fixture
def build():
    def build(name, *overrides):
        data_config.register(ConfigStore.instance())
        with initialize_config_dir(str(FOLDER.parent.resolve()), version_base="1.3"):
            config = compose(f"data/{name}", overrides=list(overrides))
        OmegaConf.set_struct(config, False)
        config.model = MODEL
        return config

    return build


def test_all_files_are_known():
    logs = ["criteo", "kuairand", "parquet", "recbole"]
    synthetic = ["synthetic", "synthetic_empty", "synthetic_long_user", "synthetic_zipf"]
    assert NAMES == sorted(["movielens", *logs, *synthetic])


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("synthetic")])
def test_synthetic_configs_follow_the_model(build, name):
    module = instantiate(build(name).data)
    schema, batch = module.schema, next(iter(module.train_loader()))
    assert len(batch) == 16 and schema.dense == 3 and len(schema.sparse) == 2
    assert {event.name: event.max_len for event in schema.events} == {"long": 20, "short": 7}
    assert schema.rows("item") == 500
    lengths = batch.ids["long.item"].lengths()
    expected = {"synthetic": lengths.min() >= 1, "synthetic_empty": (lengths == 0).any()}
    expected |= {"synthetic_long_user": lengths.max() == 20, "synthetic_zipf": module.config.lengths.exponent == 1.0}
    assert expected[name]


def test_movielens_config(build, movielens_folder):
    module = instantiate(build("movielens", f"data.path={movielens_folder}").data)
    assert module.schema.events[0].max_len == 20
    assert len(next(iter(module.train_loader()))) == 16


@pytest.mark.parametrize("name", NAMES)
def test_unknown_key_is_named(build, name):
    with pytest.raises(ConfigCompositionException, match="batch_sizes"):
        build(name, "data.batch_sizes=3")


@pytest.mark.parametrize(
    "name, override",
    [
        ("synthetic", "data.events.long.decay=fast"),
        ("synthetic", "data.lengths.empty=some"),
        ("synthetic", "data.pool=1.5"),
        ("movielens", "data.max_len=ten"),
        ("movielens", "data.strict_history=perhaps"),
    ],
)
def test_wrong_type_is_named(build, name, override):
    with pytest.raises((ConfigCompositionException, ValidationError)) as error:
        build(name, override)
    text = f"{error.value} {error.value.__cause__}"
    assert override.partition("=")[0].rpartition(".")[2] in text
