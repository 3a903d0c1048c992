"""Every config file composes, and what is wrong with a command line is said in one line."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

import recsys_norm.configs
from recsys_norm.training import main
from recsys_norm.training.config import Config, ConfigError

FOLDER = Path(recsys_norm.configs.__file__).parent
CHOICES = [
    (group.name, path.stem)
    for group in sorted(FOLDER.iterdir())
    if group.is_dir()
    for path in sorted(group.glob("*.yaml"))
]


@pytest.fixture
def composed():
    main.register()
    GlobalHydra.instance().clear()
    with initialize_config_module("recsys_norm.configs", version_base="1.3"):
        yield lambda *overrides: compose("config", overrides=list(overrides))


def overrides_for(group, name):
    return [f"data={name}"] if group == "recipe" else [f"{group}={name}"]


@pytest.mark.parametrize("group, name", CHOICES)
def test_every_choice_composes_and_passes_its_checks(composed, group, name):
    config = main.checked(composed(*overrides_for(group, name)))
    assert isinstance(config, Config)
    OmegaConf.to_container(config.data, resolve=True)  # every interpolation has a value


def test_the_groups_are_there():
    assert {"backend", "model", "data", "trainer", "optimizer", "logger", "distributed", "experiment", "debug"} <= {
        group for group, _ in CHOICES
    }


def test_a_recipe_belongs_to_its_data_and_gives_way_to_the_command_line(composed):
    plain, movies = composed(), composed("data=movielens", "trainer.max_epochs=9")
    assert plain.trainer.eval_every_epochs != movies.trainer.eval_every_epochs == 0.5
    assert movies.trainer.max_epochs == 9


@pytest.mark.parametrize(
    "override, named",
    [
        ("attention=flash", "attention"),
        ("trainer.precision=fp8", "trainer.precision"),
        ("trainer.grad_accumulation=0", "trainer.grad_accumulation"),
        ("optimizer.clip_norm=0", "optimizer.clip_norm"),
        ("optimizer.dense.lr=nan", "optimizer.dense.lr"),
        ("distributed.mode=mpi", "distributed.mode"),
        ("model.dropout=1.5", "dropout"),
        ("+trainer.max_stepz=3", "trainer.max_stepz"),
        ("+model.events.long.headz=3", "model.events.long.headz"),
    ],
)
def test_values_that_cannot_work_are_named(composed, override, named):
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        main.checked(composed(override))


@pytest.mark.parametrize(
    "override, named, hint",
    [
        ("trainer.max_stepz=3", "trainer.max_stepz", "did you mean trainer.max_steps?"),
        ("trainer.max_steps=soon", "trainer.max_steps", "'soon'"),
        ("optimizer.dense.lrr=1", "optimizer.dense.lrr", "optimizer.dense.lr"),
        ("model.events.long.dim=wide", "model.events.long.dim", "'wide'"),
        ("data.lengths.emptyy=0.1", "data.lengths.emptyy", "LengthConfig"),
        ("modle=kunlun_tiny", "modle", "did you mean model?"),
        ("backend=fast", "backend", "compiled fused naive unfused"),
        ("trainer.max_steps=[1", "[1", "override"),
        ("experiment=nope", "experiment/nope", "quickstart"),
    ],
)
def test_an_error_is_one_line_that_names_the_key(capsys, override, named, hint):
    with pytest.raises(SystemExit) as stop:
        main.main(["train.py", override])
    captured = capsys.readouterr()
    assert stop.value.code == 1
    assert captured.err.count("\n") == 1 and captured.err.startswith("error: ")
    assert named in captured.err and hint in captured.err and "Traceback" not in captured.err


@pytest.mark.parametrize("override", ["trainer.max_stepz=3", "trainer.max_steps=soon"])
def test_the_program_ends_with_one_line_and_a_failure(program, override):
    process = program(override)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and out == ""
    assert err.count("\n") == 1 and override.split("=")[0] in err


def test_configs_from_outside(tmp_path, capsys):
    """A folder given with --config-dir adds choices, which may start from the structured configs and from ours."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrainer:\n  max_steps: 12345\n")
    main.main(["train.py", "--config-dir", str(tmp_path), "experiment=mine", "--cfg", "job"])
    assert "max_steps: 12345" in capsys.readouterr().out


def test_movielens_by_data_or_by_experiment_is_one_setting(composed):
    _, *overrides = main._completed(["train.py", "data=movielens"])
    assert composed(*overrides) == composed("experiment=movielens")
    assert main._completed(["train.py", "data=movielens", "model=kunlun_tiny"])[1:] == [
        "data=movielens",
        "model=kunlun_tiny",
    ]
