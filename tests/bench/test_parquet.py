"""`benchmarks/parquet.py`: the files it makes are what its config says, and the loader reads them."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torchrec")
PATH = Path(__file__).parents[2] / "benchmarks" / "parquet.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("benchmarks_parquet", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_files_become_batches(script, tmp_path, capsys):
    script.generate(tmp_path, "kunlun_tiny", batches=3, seed=0)
    assert f"python train.py --config-dir {tmp_path} data=generated model=kunlun_tiny" in capsys.readouterr().out
    script.loader(tmp_path, "kunlun_tiny", [0], epochs=1)
    assert "0 workers: " in capsys.readouterr().out

    from recsys_norm.data.config import LogConfig
    from recsys_norm.data.logs import Logs

    data = Logs(**made_options(tmp_path, LogConfig))
    assert [data.describe()[f"{split}_rows"] for split in script.SHARES] == [768, 256, 256]
    assert data.describe()["damaged_rows"] == 0
    batch = next(iter(data.train_loader(seed=0)))
    long = batch.ids["long.item"].lengths()
    assert len(batch) == 256 and batch.dense.shape == (256, 8) and len(batch.sparse.keys()) == 6
    assert 1 <= int(long.min()) and int(long.max()) <= 47 and float(long.float().mean()) == pytest.approx(24, abs=3)
    assert int(batch.sparse.values().max()) < 10_000 and int(batch.ids["long.item"].values().max()) < 10_000
    ages = np.split(batch.ages["long"].numpy(), np.cumsum(long.numpy())[:-1])
    assert all((np.diff(row) <= 0).all() for row in ages)  # oldest first


def made_options(folder, node):
    from omegaconf import OmegaConf

    given = OmegaConf.load(folder / "data" / "generated.yaml")
    given.pop("defaults")
    options = OmegaConf.merge(OmegaConf.structured(node), given, {"format": "parquet", "batch_size": 256})
    made = OmegaConf.to_object(options)
    return {k: v for k, v in vars(made).items() if not k.startswith("_")}
