"""The generator: a pure function of the row index, with the true logit that its docstring states."""

import numpy as np
import pytest
import torch

from recsys_norm.data.config import LengthConfig, SyntheticEventConfig
from recsys_norm.data.generator import reach
from recsys_norm.data.synthetic import expected_auc


def arrays(rows):
    parts = [rows.dense, rows.candidate, rows.user, rows.logit, rows.label]
    return parts + [part for column in rows.sparse for part in column] + [p for e in rows.events.values() for p in e]


def way(score, rows):
    """Share of the way from 0.5 to the Bayes AUC that a score gets."""
    probability = 1 / (1 + np.exp(-rows.logit))
    return (expected_auc(score, probability) - 0.5) / (expected_auc(rows.logit, probability) - 0.5)


def history_logit(generator, rows, rearrange=lambda index, lengths: index):
    """The history part of the logit, event by event, after `rearrange` moved the events."""
    config, total = generator.config, np.zeros(len(rows.label))
    classes = generator.item_class
    for name, event in config.events.items():
        lengths, item, action, _ = rows.events[name]
        order = rearrange(np.arange(len(item)), lengths)
        item, action = item[order] // generator.stride, action[order]
        normaliser = np.sqrt(sum(event.decay ** (2 * r) for r in range(reach(event))) / config.classes)
        end = np.cumsum(lengths)
        for row, candidate in enumerate(rows.candidate // generator.stride):
            for r in range(min(lengths[row], reach(event))):
                at = end[row] - 1 - r
                if classes[item[at]] == classes[candidate]:
                    total[row] += event.weight * event.decay**r * (-1 if action[at] % 2 else 1) / normaliser
    return total


def test_rows_do_not_depend_on_the_rows_around_them(synthetic):
    generator = synthetic().generator
    together = generator.rows(7, np.arange(40))
    alone = [generator.rows(7, np.array([row])) for row in range(40)]
    for name in together.events:
        for part in range(1, 4):
            joined = np.concatenate([rows.events[name][part] for rows in alone])
            np.testing.assert_allclose(together.events[name][part], joined, rtol=1e-6)
    for field in ("dense", "candidate", "user", "logit", "label"):
        np.testing.assert_array_equal(getattr(together, field), np.concatenate([getattr(r, field) for r in alone]))
    for table in range(3):
        np.testing.assert_array_equal(together.sparse[table][0], np.concatenate([r.sparse[table][0] for r in alone]))


def test_streams_and_seeds_differ(synthetic):
    index = np.arange(64)
    first = synthetic().generator.rows(0, index)
    assert all(np.array_equal(a, b) for a, b in zip(arrays(first), arrays(synthetic().generator.rows(0, index))))
    for other in (synthetic().generator.rows(1, index), synthetic(seed=1).generator.rows(0, index)):
        assert not np.array_equal(first.dense, other.dense)
        assert abs(np.corrcoef(first.dense.ravel(), other.dense.ravel())[0, 1]) < 0.25


def test_truncated_rows_have_the_same_logits(synthetic):
    generator = synthetic().generator
    whole, short = (generator.rows(0, np.arange(500), truncate=t) for t in (False, True))
    assert len(short.events["long"][1]) < len(whole.events["long"][1])
    np.testing.assert_allclose(short.logit, whole.logit, rtol=1e-12)
    np.testing.assert_array_equal(short.label, whole.label)


def test_logit_is_the_documented_formula(synthetic):
    module = synthetic()
    generator, config = module.generator, module.config
    rows = generator.rows(0, np.arange(200))
    static = rows.dense @ generator.direction + generator.candidate_effect[rows.candidate // generator.stride]
    for table, (ids, lengths) in enumerate(rows.sparse):
        effects = np.split(generator.sparse_effects[table][ids // generator.stride], np.cumsum(lengths)[:-1])
        static += np.array([part.sum() for part in effects]) / np.sqrt(config.tables)
    expected = config.bias + config.static_weight * static / np.sqrt(3) + history_logit(generator, rows)
    np.testing.assert_allclose(rows.logit, expected, rtol=1e-6, atol=1e-6)


def test_labels_follow_the_probabilities(synthetic):
    rows = synthetic().generator.rows(0, np.arange(40_000), truncate=True)
    probability = 1 / (1 + np.exp(-rows.logit))
    for part in np.array_split(np.argsort(probability), 8):
        error = np.sqrt((probability[part] * (1 - probability[part])).sum()) / len(part)
        assert abs(rows.label[part].mean() - probability[part].mean()) < 4.5 * error


def test_bayes_auc_is_what_the_true_logit_reaches(synthetic):
    module = synthetic(bayes_rows=60_000)
    rows = module.generator.rows(9, np.arange(60_000), truncate=True)
    reached = expected_auc(rows.logit, rows.label)
    assert module.schema.bayes_auc == pytest.approx(reached, abs=0.006)
    assert module.schema.base_rate == pytest.approx(rows.label.mean(), abs=0.012)
    assert 0.9 < reached < 0.95
    assert module.describe()["bayes_auc"] == module.schema.bayes_auc


def test_signal_needs_the_order_and_the_own_history(synthetic):
    generator = synthetic().generator
    rows = generator.rows(0, np.arange(4000))
    static = rows.logit - history_logit(generator, rows)
    rng = np.random.default_rng(0)

    def shuffle(index, lengths):  # within each row
        return np.lexsort((rng.random(len(index)), np.repeat(np.arange(len(lengths)), lengths)))

    def exchange(index, lengths):  # each event with one of any row
        return rng.permutation(index)

    assert way(static + history_logit(generator, rows), rows) == pytest.approx(1.0)
    assert way(static + history_logit(generator, rows, shuffle), rows) < 0.6
    assert way(static + history_logit(generator, rows, exchange), rows) < 0.6
    assert 0.3 < way(static, rows) < 0.55


def test_history_free_logistic_regression_stays_below(synthetic):
    """On one-hot ids and dense features it finds what is there to find without a history, and no more."""
    generator = synthetic().generator
    train, test = (generator.rows(stream, np.arange(16_000), truncate=True) for stream in (3, 4))

    def features(rows):
        columns = [torch.from_numpy(rows.dense)]
        for ids, lengths in [*rows.sparse, (rows.candidate, np.ones(len(rows.label), dtype=np.int64))]:
            row = np.repeat(np.arange(len(lengths)), lengths)
            counts = torch.zeros(len(lengths), 100)
            place = torch.from_numpy(row), torch.from_numpy(ids // generator.stride)
            columns.append(counts.index_put_(place, torch.ones(len(row)), accumulate=True))
        return torch.cat(columns, 1)

    x, y = features(train), torch.from_numpy(train.label)
    weight, bias = torch.zeros(x.shape[1], requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=30, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = (
            torch.nn.functional.binary_cross_entropy_with_logits(x @ weight + bias, y) + 1e-3 * weight.square().sum()
        )
        value.backward()
        return value

    optimizer.step(loss)
    reached = way((features(test) @ weight).detach().numpy(), test)
    static = test.logit - history_logit(generator, test)
    assert way(static, test) - 0.05 < reached < 0.6


def test_ages_fall_to_the_latest_event(synthetic):
    rows = synthetic().generator.rows(0, np.arange(300))
    for lengths, _, _, age in rows.events.values():
        assert age.dtype == np.float32 and age.min() > 0
        within = np.repeat(np.arange(300), lengths)
        falls = np.diff(age) < 0
        assert falls[np.diff(within) == 0].all()


def lengths_of(module, rows=20_000):
    return module.generator.rows(0, np.arange(rows), truncate=False).events["long"][0]


def test_uniform_lengths(synthetic):
    lengths = lengths_of(synthetic())
    assert lengths.min() == 1 and lengths.max() == 47
    assert lengths.mean() == pytest.approx(24, abs=0.5)


def test_fixed_lengths(synthetic):
    assert set(lengths_of(synthetic(lengths=LengthConfig("fixed")), 100)) == {24}


def test_zipf_lengths(synthetic):
    lengths = lengths_of(synthetic(lengths=LengthConfig("zipf", exponent=1.5)))
    weights = np.arange(1, 65.0) ** -1.5
    counts = np.bincount(lengths, minlength=65)[1:]
    expected = len(lengths) * weights / weights.sum()
    assert len(counts) == 64
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_empty_histories(synthetic):
    lengths = lengths_of(synthetic(lengths=LengthConfig(empty=0.3)))
    assert (lengths == 0).mean() == pytest.approx(0.3, abs=0.02)
    batch = next(iter(synthetic(lengths=LengthConfig(empty=1.0)).train_loader()))
    assert len(batch) == 64 and len(batch.ages["long"]) == 0
    assert batch.ids["long.item"].lengths().sum() == 0


def test_one_long_user_in_every_batch(synthetic):
    module = synthetic(lengths=LengthConfig("zipf", exponent=3.0, long_user=True))
    for batch in module.eval_loader("validation"):
        assert batch.ids["long.item"].lengths().max() == 64
        assert batch.ids["short.item"].lengths().max() == 16
        assert (batch.ids["long.item"].lengths() == 64).sum() == 1


@pytest.mark.parametrize("vocabulary, rows", [(100, 1000), (300, 1000), (None, 1000), (None, 100_000), (1, 1)])
def test_ids_stay_inside_their_tables(synthetic, vocabulary, rows):
    module = synthetic(vocabulary=vocabulary, rows=rows, batch_size=512)
    batch = next(iter(module.train_loader()))
    schema, seen = module.schema, 0
    for features, kind in ((batch.sparse, schema.sparse), (batch.ids, schema.ids)):
        assert list(features.keys()) == [feature.name for feature in kind]
        for feature in kind:
            values = features[feature.name].values()
            assert values.min() >= 0 and values.max() < schema.rows(feature.table)
            seen = max(seen, int(values.max()))
    assert seen >= 0.8 * rows - 1  # the ids in use spread over the whole table
    assert len(batch.ids["long.item"].values().unique()) <= (vocabulary or rows)


def test_pool_rotates_batches(synthetic):
    module = synthetic(pool=3)
    batches = [list(module.train_loader(seed=4, rank=rank, world_size=2)) for rank in range(2)]
    for own in batches:
        assert len({id(batch) for batch in own[:-1]}) == 3  # the last one is smaller
        assert own[0] is own[3] and own[1] is own[4]
    assert not set(batches[0][0].row.tolist()) & set(batches[1][0].row.tolist())
    plain = next(iter(synthetic().train_loader(seed=4, rank=0, world_size=2)))
    assert torch.equal(plain.ids.values(), batches[0][0].ids.values())


def test_parts_may_be_absent(synthetic):
    module = synthetic(n_dense=0, tables=0, events={})
    batch = next(iter(module.train_loader()))
    assert batch.dense.shape == (64, 0) and batch.ages == {}
    assert list(batch.sparse.keys()) == [] and list(batch.ids.keys()) == ["candidate.item"]
    assert module.schema.events == () and 0.5 < module.schema.bayes_auc < 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batch_size": 0}, "data.batch_size must be at least 1, got 0"),
        ({"vocabulary": 2000}, "data.vocabulary must be between 1 and 1000, got 2000"),
        ({"lengths": LengthConfig("normal")}, "data.lengths.distribution.*'normal'"),
        ({"lengths": LengthConfig(empty=1.5)}, "data.lengths.empty must be between 0.0 and 1.0, got 1.5"),
        ({"events": {"long": SyntheticEventConfig(40, 64)}}, "data.events.long.max_len must be at least 79, got 64"),
        ({"rows": 2**25, "vocabulary": None}, "data.vocabulary=null uses all 33554432 rows"),
        ({"pool": 0}, "data.pool must be at least 1"),
    ],
)
def test_wrong_options_name_value_and_limit(synthetic, options, message):
    with pytest.raises(ValueError, match=message):
        synthetic(**options)


def test_unknown_option(synthetic):
    with pytest.raises(TypeError, match="batchsize"):
        synthetic(batchsize=3)


def test_expected_auc_counts_pairs():
    rng = np.random.default_rng(0)
    score, p = rng.integers(0, 6, 40).astype(float), rng.random(40)
    wins = (score[:, None] > score) + 0.5 * (score[:, None] == score)
    mass = p[:, None] * (1 - p)
    assert expected_auc(score, p) == pytest.approx((wins * mass).sum() / mass.sum())
    assert expected_auc(np.array([1.0, 2.0, 3.0]), np.array([0.0, 1.0, 1.0])) == 1.0
    assert np.isnan(expected_auc(np.array([1.0, 2.0]), np.array([1.0, 1.0])))
