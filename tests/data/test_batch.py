import pickle

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from recsys_norm.data.batch import Batch, jagged


def test_jagged_keeps_values_and_lengths():
    columns = {"a": (np.array([5, 6, 7]), np.array([1, 0, 2])), "b": (np.array([], dtype=np.int64), np.zeros(3, int))}
    features = jagged(columns, 3)
    expected = KeyedJaggedTensor.from_lengths_sync(
        ["a", "b"], torch.tensor([5, 6, 7]), torch.tensor([1, 0, 2, 0, 0, 0])
    )
    for key in ("a", "b"):
        assert features[key].values().tolist() == expected[key].values().tolist()
        assert features[key].offsets().tolist() == expected[key].offsets().tolist()
    assert features.length_per_key() == expected.length_per_key()
    assert features.offset_per_key() == expected.offset_per_key()
    assert features.stride() == 3
    assert features.values().dtype == features.lengths().dtype == torch.int64


def test_all_empty_features_pool_to_zero():
    features = jagged({"a": (np.array([], dtype=np.int64), np.zeros(4, int))}, 4)
    tables = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t", num_embeddings=3, embedding_dim=8, feature_names=["a"])]
    )
    pooled = tables(features)["a"]
    pooled.sum().backward()
    assert torch.equal(pooled, torch.zeros(4, 8))
    assert all(not parameter.grad.abs().sum() for parameter in tables.parameters())


@pytest.mark.parametrize("rows", [0, 3])
def test_batch_survives_workers_and_moves_all_parts(rows):
    ids = jagged({"c": (np.arange(rows), np.ones(rows, int))}, rows)
    sparse = jagged({"s": (np.arange(2 * rows), np.full(rows, 2))}, rows)
    batch = Batch(torch.zeros(rows, 2), sparse, ids, {"e": torch.zeros(5)}, torch.ones(rows, 1), row=torch.arange(rows))
    batch = pickle.loads(pickle.dumps(batch))
    moved = batch.to("meta")
    assert len(batch) == len(moved) == rows
    parts = [moved.dense, moved.sparse.values(), moved.sparse.lengths(), moved.ids.values(), moved.ages["e"]]
    parts += [moved.label, moved.row]
    assert all(part.is_meta for part in parts)
    assert moved.user_id is None and moved.weight is None
    assert moved.ids.stride() == rows
