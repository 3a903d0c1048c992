import numpy as np
import torch

from recsys_norm.data.batch import Batch, jagged
from recsys_norm.data.schema import Event, IdFeature, Schema, Table
from recsys_norm.training.padding import padded

SCHEMA = Schema(
    dense=2,
    sparse=(IdFeature("s", "s"),),
    candidates=(IdFeature("candidate.item", "item"),),
    events=(Event("long", (IdFeature("long.item", "item"),), 4),),
    tables=(Table("s", 9), Table("item", 9)),
)


def make():
    ids = {"candidate.item": (np.array([5, 6]), np.array([1, 1])), "long.item": (np.array([7, 8, 1]), np.array([0, 3]))}
    sparse = {"s": (np.array([2, 3]), np.array([2, 0]))}
    return Batch(torch.ones(2, 2), jagged(sparse, 2), jagged(ids, 2), {"long": torch.ones(3)}, torch.ones(2, 1))


def test_added_rows_have_a_candidate_and_nothing_else():
    batch = padded(make(), 4, SCHEMA)
    assert len(batch) == 4 and batch.dense.tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
    assert batch.sparse["s"].lengths().tolist() == [2, 0, 0, 0] and batch.sparse["s"].values().tolist() == [2, 3]
    assert batch.ids["candidate.item"].lengths().tolist() == [1, 1, 1, 1]
    assert batch.ids["candidate.item"].values().tolist() == [5, 6, 0, 0]
    assert batch.ids["long.item"].lengths().tolist() == [0, 3, 0, 0]
    assert batch.ids["long.item"].values().tolist() == [7, 8, 1]
    assert batch.ids.keys() == ["candidate.item", "long.item"]


def test_a_full_batch_is_left_alone():
    batch = make()
    assert padded(batch, 2, SCHEMA) is batch
