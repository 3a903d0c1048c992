"""Small data sets that the tests of this folder share."""

import numpy as np
import pytest

from recsys_norm.data.config import SyntheticEventConfig
from recsys_norm.data.synthetic import Synthetic


@pytest.fixture
def synthetic():
    """Factory of a small synthetic data set with the options of configs/data/synthetic.yaml."""

    def make(**options):
        sizes = dict(batch_size=64, n_dense=4, tables=3, rows=1000, bayes_rows=20_000)
        splits = dict(train_rows=700, validation_rows=130, test_rows=200)
        events = {
            "long": SyntheticEventConfig(mean_len=24, max_len=64, decay=0.7, weight=2.5),
            "short": SyntheticEventConfig(mean_len=8, max_len=16, decay=0.5, weight=1.5),
        }
        return Synthetic(**{**sizes, **splits, "events": events, **options})

    return make


@pytest.fixture
def movielens_folder(tmp_path):
    """A folder with 400 ratings of 20 users in RecBole's atomic format, with repeated timestamps."""
    rng = np.random.default_rng(0)
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for _ in range(400):
        user, item, rating = rng.integers(1, 21), rng.integers(1, 51), rng.integers(1, 6)
        lines.append(f"{user}\t{item}\t{rating}\t{880000000 + rng.integers(0, 150)}")
    (tmp_path / "toy.inter").write_text("\n".join(lines) + "\n")
    return tmp_path
