"""Which rows a rank gets, and exact resume, for every kind of data set."""

import pytest
import torch

from recsys_norm.data.loader import Loader
from recsys_norm.data.logs import Logs
from recsys_norm.data.movielens import MovieLens


@pytest.fixture(params=["synthetic", "movielens", "logs"])
def data(request, synthetic, movielens_folder, tmp_path):
    """Factory: a data set with 700 / about 320 training rows."""

    def make(**options):
        if request.param == "synthetic":
            return synthetic(**options)
        if request.param == "logs":
            files = dict(format="recbole", path=str(movielens_folder), cache=str(tmp_path / "cache"))
            return Logs(
                **{"batch_size": 64, "max_len": 16, "label_threshold": 4.0, "shuffle_rows": 96, **files, **options}
            )
        return MovieLens(**{"batch_size": 64, "path": str(movielens_folder), "max_len": 16, **options})

    return make


def same(a, b):
    """Bit-identical batches."""
    pairs = [(a.dense, b.dense), (a.label, b.label), (a.row, b.row), (a.user_id, b.user_id)]
    pairs += [(a.ages[name], b.ages[name]) for name in a.ages]
    for x, y in ((a.sparse, b.sparse), (a.ids, b.ids)):
        pairs += [(x.values(), y.values()), (x.lengths(), y.lengths())]
    return all(torch.equal(x, y) for x, y in pairs)


def rows(batches):
    return torch.cat([batch.row for batch in batches]).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_share_all_rows_without_overlap(data, world_size):
    for make in (lambda **kw: data().train_loader(seed=1, **kw), lambda **kw: data().eval_loader("test", **kw)):
        loaders = [make(rank=rank, world_size=world_size) for rank in range(world_size)]
        shares = [list(loader) for loader in loaders]
        assert {len(share) for share in shares} == {len(loaders[0])}  # same number of steps, or collectives hang
        seen = sorted(row for share in shares for row in rows(share))
        assert seen == list(range(len(loaders[0].rows)))
        assert all(len(batch) <= 64 for share in shares for batch in share)


def test_two_ranks_see_the_global_batches_of_one(data):
    one = data(batch_size=64).train_loader(seed=3)
    two = [data(batch_size=32).train_loader(seed=3, rank=rank, world_size=2) for rank in range(2)]
    for whole, first, second in zip(one, *two, strict=True):
        assert whole.row.tolist() == first.row.tolist() + second.row.tolist()
        assert torch.equal(whole.label, torch.cat([first.label, second.label]))
        assert torch.equal(whole.dense, torch.cat([first.dense, second.dense]))


def test_more_ranks_than_rows_get_empty_batches(data):
    module = data(batch_size=1)
    loaders = [module.eval_loader("test", rank=rank, world_size=210) for rank in range(210)]
    batches = [batch for loader in loaders for batch in loader]
    total = len(loaders[0].rows)
    assert sorted(len(batch) for batch in batches) == [0] * (210 - total) + [1] * total
    empty = next(batch for batch in batches if len(batch) == 0)
    assert empty.sparse.stride() == empty.ids.stride() == 0
    assert empty.dense.shape[0] == 0 and all(len(ages) == 0 for ages in empty.ages.values())


@pytest.mark.parametrize("workers", [(0, 0), (2, 2), (2, 0)], ids=str)
def test_resume_continues_with_the_next_batch(data, workers):
    reference = data().train_loader(seed=5)
    expected = list(reference) + list(reference)  # two epochs
    before, after = workers
    first = data(num_workers=before).train_loader(seed=5)
    taken = []
    for batch in first:
        taken.append(batch)
        if len(taken) == 2:
            state = first.state_dict()  # with workers, later batches are prefetched already
            break
    second = data(num_workers=after).train_loader(seed=5)
    second.load_state_dict(state)
    taken += list(second)
    assert second.epoch == 1
    taken += list(second)
    assert len(taken) == len(expected)
    assert all(same(a, b) for a, b in zip(taken, expected, strict=True))


def test_resume_after_the_last_batch_starts_the_next_epoch(data):
    loader = data().train_loader(seed=5)
    for _ in loader:
        state = loader.state_dict()
    resumed = data().train_loader(seed=5)
    resumed.load_state_dict(state)
    assert list(resumed) == [] and resumed.epoch == 1
    assert same(next(iter(resumed)), next(iter(loader)))


def test_iterating_again_after_a_break_starts_over(data):
    loader = data(num_workers=2).train_loader(seed=5)
    first = next(iter(loader))
    again = list(loader)
    assert len(again) == len(loader) and same(first, again[0])


def test_loaders_leave_the_global_generator_alone(data):
    before = torch.get_rng_state()
    next(iter(data().train_loader()))
    assert torch.equal(torch.get_rng_state(), before)


def test_resume_with_other_ranks_and_batch_size(data):
    one, remaining = data(batch_size=64).train_loader(seed=2), []
    for step, batch in enumerate(one):
        if step == 1:
            state = one.state_dict()
        if step > 1:
            remaining += batch.row.tolist()
    pair = [data(batch_size=16).train_loader(seed=2, rank=rank, world_size=2) for rank in range(2)]
    for loader in pair:
        loader.load_state_dict(state)
    joined = []
    for first, second in zip(*pair, strict=True):
        joined += first.row.tolist() + second.row.tolist()
    assert joined == remaining


def test_order_depends_on_seed_and_epoch(data):
    module = data()

    def labels(**options):
        return torch.cat([batch.label for batch in module.train_loader(**options)])[:, 0].tolist()

    base = labels(seed=0)
    assert base == labels(seed=0)
    assert base != labels(seed=1) and base != labels(seed=0, epoch=1)
    loader = module.train_loader(seed=0)
    list(loader)
    assert torch.cat([batch.label for batch in loader])[:, 0].tolist() == labels(seed=0, epoch=1)


def test_evaluation_repeats_itself(data):
    loader = data().eval_loader("validation")
    first = list(loader)
    assert all(same(a, b) for a, b in zip(first, loader, strict=True))
    assert loader.epoch == 0


def test_state_of_another_split_is_refused(data):
    loader = data().train_loader()
    with pytest.raises(ValueError, match="rows"):
        loader.load_state_dict({"epoch": 0, "position": 0, "rows": 17})


@pytest.mark.parametrize("rank, world_size", [(2, 2), (-1, 2)])
def test_wrong_rank(data, rank, world_size):
    with pytest.raises(ValueError, match=f"rank {rank}"):
        data().train_loader(rank=rank, world_size=world_size)


def test_wrong_split_and_batch_size(data):
    with pytest.raises(ValueError, match="'train'"):
        data().eval_loader("train")
    with pytest.raises(ValueError, match="batch_size"):
        Loader(data().train_loader().rows, 0)
