"""The protocol on small files, checked against plain loops; facts of MovieLens-100K where a copy is installed."""

import importlib.util

import numpy as np
import pytest
import torch

from recsys_norm.data import movielens_collaborative as collaborative
from recsys_norm.data import movielens_files
from recsys_norm.data.movielens import FEATURES, MovieLens
from recsys_norm.data.movielens_files import locate, read


@pytest.fixture
def make(movielens_folder):
    def make(**options):
        return MovieLens(**{"batch_size": 64, "path": str(movielens_folder), "max_len": 8, **options})

    return make


def histories(module):
    """Raw items, ratings and ages of each row's history, row by row."""
    columns, result = module.columns, []
    for row in range(len(columns.user)):
        events = columns.by_user[columns.history_begin[row] : columns.history_end[row]]
        ages = columns.time[row] - columns.time[events]
        result.append((columns.raw_item[events].tolist(), columns.rating[events].tolist(), ages.tolist()))
    return result


@pytest.mark.parametrize("strict", [False, True])
def test_history_is_what_the_user_did_before(make, movielens_folder, strict):
    data = read(movielens_folder / "toy.inter")
    order = sorted(range(400), key=lambda i: data.time[i])  # stable: ties keep the order of the file
    found = histories(make(strict_history=strict))
    ties = 0
    for place, i in enumerate(order):
        earlier = [j for j in order[:place] if data.user[j] == data.user[i]]
        ties += sum(data.time[j] == data.time[i] for j in earlier)
        if strict:
            earlier = [j for j in earlier if data.time[j] < data.time[i]]
        earlier = earlier[-8:]
        items, ratings, ages = found[place]
        assert items == data.item[earlier].tolist() and ratings == data.rating[earlier].tolist()
        assert ages == (data.time[i] - data.time[earlier]).tolist()
    assert ties > 20  # the file has what the switch is about


def test_batches_hold_the_columns(make):
    module = make()
    columns, expected = module.columns, histories(module)
    for split in ("validation", "test"):
        begin = columns.bounds[split][0]
        for batch in module.eval_loader(split):
            item, rating = batch.ids["long.item"], batch.ids["long.rating"]
            for i, row in enumerate(batch.row.tolist()):
                at = begin + row
                part = slice(*item.offsets()[i : i + 2].tolist())
                known = columns.item[np.isin(columns.raw_item, expected[at][0])]
                assert set(item.values()[part].tolist()) <= set(known.tolist())
                assert (rating.values()[part] / 2).tolist() == expected[at][1]
                assert batch.ages["long"][part].tolist() == expected[at][2]
                assert batch.ids["candidate.item"].values()[i] == columns.item[at]
                assert batch.label[i, 0] == float(columns.rating[at] >= 4)
                assert batch.user_id[i] == columns.user[at]


def test_splits_follow_time(make):
    columns = make().columns
    assert columns.bounds == {"train": (0, 320), "validation": (320, 360), "test": (360, 400)}
    assert (np.diff(columns.time) >= 0).all()


def test_ids_are_fitted_on_the_training_split(make):
    module = make(train_share=0.1, validation_share=0.1)
    columns = module.columns
    unseen = ~np.isin(columns.raw_item, columns.raw_item[:40])
    assert unseen.any()
    np.testing.assert_array_equal(columns.item == 0, unseen)
    assert module.schema.rows("item") == 1 + len(np.unique(columns.raw_item[:40])) == 1 + columns.item.max()
    pairs = set(zip(columns.raw_item[~unseen].tolist(), columns.item[~unseen].tolist()))
    assert len(pairs) == len(np.unique(columns.raw_item[:40]))


def statistics_by_loop(columns, strict):
    rows = []
    for i in range(len(columns.user)):
        known = [j for j in range(i) if not strict or columns.time[j] < columns.time[i]]
        prior = (sum(columns.label[j] for j in known) + 2.5) / (len(known) + 5)
        features = []
        for group in (columns.user, columns.raw_item):
            same = [columns.label[j] for j in known if group[j] == group[i]]
            features += [np.log1p(len(same)) / 4, (sum(same) + 5 * prior) / (len(same) + 5) - prior]
        last = [columns.time[j] for j in known if columns.user[j] == columns.user[i]]
        gap = np.log1p(columns.time[i] - last[-1]) / 8 if last else 0.0
        rows.append([*features, gap, features[1] + features[3]])
    return np.array(rows)


@pytest.mark.parametrize("strict", [False, True])
def test_online_statistics(make, strict):
    columns = make(statistics="online", strict_history=strict).columns
    np.testing.assert_allclose(columns.dense, statistics_by_loop(columns, strict), atol=1e-6)


def collaborative_by_loop(columns, value, content, strict):
    """The features of `collaborative_statistics`, each row from a ridge regression of its own on its user's past."""
    n = len(columns.user)
    user, item = (np.unique(ids, return_inverse=True)[1] for ids in (columns.user, columns.raw_item))
    edges = np.linspace(0, n, 21).astype(int)[1:-1].tolist()
    if strict:
        edges = [next(j for j in range(n) if columns.time[j] == columns.time[edge]) for edge in edges]
    model, miss, result = collaborative.FactorModel(user.max() + 1, content), np.zeros(n), np.zeros((n, 4))
    for i in range(n):
        if i in edges:
            model.fit(user[:i], item[:i], value[:i])
            features = model.x.copy()
            features[~np.isin(np.arange(len(features)), item[:i]), : collaborative.FACTORS] = 0
        known = [j for j in range(i) if user[j] == user[i] and (not strict or columns.time[j] < columns.time[i])]
        for j in known:
            result[i, 3] += collaborative.RECENT * (miss[j] - result[i, 3])
        if i < edges[0]:
            continue
        x = features[item[known]]
        left = value[known] - model.mean - model.item_bias[item[known]]
        w = np.linalg.solve(x.T @ x + model.ridge, x.T @ left)
        score = model.item_bias[item[i]] + features[item[i]] @ w
        result[i, :3] = score, score - model.item_bias[item[i]] - w[-1], w[-1]
        miss[i] = value[i] - model.mean - score
    return result


@pytest.mark.parametrize("strict", [False, True])
def test_collaborative_statistics(make, movielens_folder, strict, monkeypatch):
    # The ratings of this file are noise, of which stronger ridges leave v = 0.
    monkeypatch.setattr(collaborative, "RIDGE_FACTOR", 0.5)
    lines = [f"{i}\t{1990 + i % 9}\t{'War' if i % 2 else 'Drama'}" for i in range(1, 51)]
    header = "item_id:token\trelease_year:token\tclass:token_seq"
    (movielens_folder / "toy.item").write_text("\n".join([header, *lines]) + "\n")
    columns = make(statistics="collaborative", strict_history=strict).columns
    online = make(statistics="online", strict_history=strict).columns.dense
    np.testing.assert_array_equal(columns.dense[:, : online.shape[1]], online)
    items = np.unique(columns.raw_item).tolist()
    content = np.array([[i % 2 == 0, i % 2, (i % 9) / 20] for i in items])
    stars, likes = (collaborative_by_loop(columns, v, content, strict) for v in (columns.rating, 2.5 * columns.label))
    np.testing.assert_allclose(columns.dense[:, online.shape[1] :], np.hstack([stars, likes]), atol=1e-5)
    assert (np.abs(stars).max(0) > 0.5).all() and (np.abs(likes).max(0) > 0.5).all()


def test_content_of_items():
    items = [movielens_files.Item(2000, ("Drama", "War")), movielens_files.Item(None, ("War",)), movielens_files.Item()]
    np.testing.assert_array_equal(collaborative.content_of(items), [[1, 1, 0.5], [0, 1, 0], [0, 0, 0]])


def test_history_dropout_is_for_training_and_new_in_each_epoch(make):
    whole, thinned = make(), make(history_dropout=0.5)
    loader, plain = thinned.train_loader(seed=3), whole.train_loader(seed=3)
    seen = []
    for _ in range(2):
        kept = np.zeros((2, 320), dtype=np.int64)  # events with and without, by row
        for few, all_ in zip(loader, plain, strict=True):
            lengths = few.ids["long.item"].lengths()
            assert torch.equal(lengths, few.ids["long.rating"].lengths()) and len(few.ages["long"]) == lengths.sum()
            kept[0, few.row], kept[1, all_.row] = lengths, all_.ids["long.item"].lengths()
        seen.append(kept[0])
        assert (kept[0] <= kept[1]).all() and 0.4 < kept[0].sum() / kept[1].sum() < 0.6
    assert not np.array_equal(seen[0], seen[1])
    for batch in thinned.train_loader(seed=3):  # a function of seed, epoch and position
        np.testing.assert_array_equal(batch.ids["long.item"].lengths(), seen[0][batch.row])
    for few, all_ in zip(thinned.eval_loader("test"), whole.eval_loader("test"), strict=True):
        assert torch.equal(few.ids.values(), all_.ids.values())


@pytest.mark.parametrize("strict", [False, True])
def test_no_feature_knows_a_later_or_its_own_label(make, movielens_folder, strict):
    """Shuffling the ratings from a row on changes no feature at or before it, and does change later ones."""
    options = dict(statistics="collaborative", strict_history=strict, features=list(FEATURES))
    before = make(**options)
    data = read(movielens_folder / "toy.inter")
    order = np.argsort(data.time, kind="stable")
    row = 250
    later = order[row:]
    data.rating[later] = data.rating[np.random.default_rng(0).permutation(later)]
    lines = [f"{u}\t{i}\t{r}\t{t}" for u, i, r, t in zip(data.user, data.item, data.rating, data.time, strict=True)]
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
    (movielens_folder / "toy.inter").write_text("\n".join([header, *lines]))
    after = make(**options)
    assert not np.array_equal(before.columns.label, after.columns.label)
    np.testing.assert_array_equal(before.columns.dense[: row + 1], after.columns.dense[: row + 1])
    assert histories(before)[: row + 1] == histories(after)[: row + 1]
    assert not np.array_equal(before.columns.dense, after.columns.dense)
    assert histories(before) != histories(after)


def test_all_layouts_give_the_same_batches(tmp_path, movielens_folder):
    data = read(movielens_folder / "toy.inter")
    rows = list(zip(data.user.tolist(), data.item.tolist(), data.rating.astype(int).tolist(), data.time.tolist()))
    flags = lambda i: "|".join("1" if g in (1 + i % 3, 5) else "0" for g in range(19))  # noqa: E731
    names = movielens_files.GENRES_100K
    genres = lambda i: [names[g] for g in (1 + i % 3, 5)]  # noqa: E731
    year = lambda i: 1990 + i % 7  # noqa: E731
    user = lambda u: (20 + u, "MF"[u % 2], "writer" if u % 3 else "artist", f"{u % 10}0210")  # noqa: E731
    layouts = {
        "u.data": ["\t".join(map(str, row)) for row in rows],
        "u.item": [f"{i}|Amélie ({year(i)})|01-Jan-1995||http://x|{flags(i)}" for i in range(1, 51)],
        "u.user": ["|".join(map(str, (u, *user(u)))) for u in range(1, 21)],
        "ratings.dat": ["::".join(map(str, row)) for row in rows],
        "movies.dat": [f"{i}::Amélie ({year(i)})::{'|'.join(genres(i))}" for i in range(1, 51)],
        "users.dat": [f"{u}::{user(u)[1]}::{user(u)[0]}::{user(u)[2]}::{user(u)[3]}" for u in range(1, 21)],
        "x.inter": ["timestamp:float\tuser_id:token\titem_id:token\trating:float"]
        + [f"{t}\t{u}\t{i}\t{r}" for u, i, r, t in rows],
        "x.item": ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"]
        + [f"{i}\tAmélie\t{year(i)}\t{' '.join(genres(i))}" for i in range(1, 51)],
        "x.user": ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"]
        + ["\t".join(map(str, (u, *user(u)))) for u in range(1, 21)],
    }
    batches = []
    for first in ("u.data", "ratings.dat", "x.inter"):
        folder = tmp_path / first.partition(".")[0]
        folder.mkdir()
        files = ("ratings.dat", "movies.dat", "users.dat") if first == "ratings.dat" else layouts
        for name in [name for name in files if first == "ratings.dat" or name.startswith(first[:2])]:
            (folder / name).write_text("\n".join(layouts[name]) + "\n", encoding="latin-1")
        for path in (folder, folder / first):
            module = MovieLens(batch_size=400, path=str(path), max_len=8, features=list(FEATURES))
            batches.append((module.schema, next(iter(module.train_loader()))))
    schema, batch = batches[0]
    assert [feature.name for feature in schema.sparse] == list(FEATURES)
    assert set(batch.sparse["genre"].lengths().tolist()) == {2}
    assert (schema.rows("genre"), schema.rows("year"), schema.rows("gender")) == (5, 8, 3)
    for other_schema, other in batches[1:]:
        assert other_schema == schema
        for a, b in ((batch.sparse, other.sparse), (batch.ids, other.ids)):
            assert torch.equal(a.values(), b.values()) and torch.equal(a.lengths(), b.lengths())
        assert torch.equal(batch.label, other.label) and torch.equal(batch.ages["long"], other.ages["long"])


def test_the_csv_layout_of_20m_and_25m(tmp_path, movielens_folder):
    data, folder = read(movielens_folder / "toy.inter"), tmp_path / "25m"
    folder.mkdir()
    rows = list(zip(data.user, data.item, data.rating / 2, data.time))
    lines = ["userId,movieId,rating,timestamp", *(",".join(map(str, row)) for row in rows)]
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n")
    genres = {i: ("Drama", "Sci-Fi") if i % 3 else ("(no genres listed)",) for i in range(1, 51)}
    films = [f'{i},"Amélie, ""or"": ({1990 + i % 7})",{"|".join(genres[i])}' for i in range(1, 51)]
    (folder / "movies.csv").write_text("\n".join(["movieId,title,genres", *films]) + "\n")
    found = read(locate(str(folder)))
    assert list(zip(found.user, found.item, found.rating, found.time)) == rows
    assert {i: item.genres for i, item in found.items.items() if item.genres} == {i: genres[i] for i in genres if i % 3}
    assert all(item.year == 1990 + i % 7 for i, item in found.items.items())
    module = MovieLens(batch_size=400, path=str(folder), max_len=8, min_rating=2.0)
    same = MovieLens(batch_size=400, path=str(movielens_folder), max_len=8)
    a, b = next(iter(module.train_loader())), next(iter(same.train_loader()))
    assert torch.equal(a.label, b.label) and torch.equal(a.ids["long.item"].values(), b.ids["long.item"].values())
    assert [feature.name for feature in module.schema.sparse] == ["genre", "year"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "no ratings"),
        ("1\t2\t3\t4\n1\tx\t3\t4\n", "u.data, line 2: .*'x'.*data.damaged=skip"),
        ("1\t2\t3\t4\n1\t2\t3\n", "u.data, line 2: 3 columns"),
        ("1\t2\tnan\t4\n", "line 1: .*ratings finite, got '1.*nan.*4'"),
        ("1.5\t2\t3\t4\n", "whole numbers.*got '1.5"),
        ("1\t2\t3\t4\n1\t3\t3\t5\n", "2 interactions leave no row for the validation split"),
    ],
)
def test_damaged_files_are_named(tmp_path, text, message):
    (tmp_path / "u.data").write_text(text)
    with pytest.raises(ValueError, match=message):
        MovieLens(batch_size=4, path=str(tmp_path))


@pytest.mark.parametrize("name, separator", [("u.data", "\t"), ("ratings.dat", "::"), ("ratings.csv", ",")])
def test_damaged_rows_are_skipped_and_reported(tmp_path, caplog, name, separator):
    rows = [(1 + i % 7, 1 + i % 5, 1 + i % 5, 1000 + i) for i in range(60)]
    lines = [separator.join(map(str, row)) for row in rows]
    bad = {4: "1.5 2 3 9", 9: "1 2 3", 20: "1 x 3 9", 31: "1 2 nan 9"}
    for place, text in bad.items():
        lines.insert(place, separator.join(text.split()))
    head = ["userId,movieId,rating,timestamp"] if name.endswith("csv") else []
    (tmp_path / name).write_text("\n".join([*head, *lines, ""]))
    with caplog.at_level("WARNING"):
        data = read(tmp_path / name, "skip")
    assert list(zip(data.user, data.item, data.rating, data.time)) == rows
    assert "4 damaged rows" in caplog.text
    for place in bad:
        assert f"{name}, line {place + 1 + len(head)}: " in caplog.text


def test_missing_column_is_named(tmp_path):
    (tmp_path / "a.inter").write_text("user_id:token\titem_id:token\trating:float\n1\t2\t3\n")
    with pytest.raises(ValueError, match="timestamp"):
        MovieLens(batch_size=4, path=str(tmp_path))


def test_missing_data_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="make data-movielens"):
        MovieLens(batch_size=4)
    with pytest.raises(FileNotFoundError, match="nowhere.*does not exist.*u.data"):
        MovieLens(batch_size=4, path=str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="holds none of.*ratings.dat"):
        MovieLens(batch_size=4, path=str(tmp_path))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"statistics": "all"}, "data.statistics.*'all'"),
        ({"features": ["genre", "mood"]}, "'mood'"),
        ({"history_dropout": 1.0}, "data.history_dropout must lie in .* got 1.0"),
        ({"max_len": 0}, "data.max_len must be at least 1, got 0"),
        ({"train_share": 0.95, "validation_share": 0.05}, "leave rows for the test"),
    ],
)
def test_wrong_options_are_named(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_movielens_100k_matches_its_published_protocol():
    try:
        locate(None)
    except FileNotFoundError:
        pytest.skip("no MovieLens-100K installed: make data-movielens")
    module = MovieLens(batch_size=512)
    columns, facts = module.columns, module.describe()
    assert (facts["train_rows"], facts["validation_rows"], facts["test_rows"]) == (80_000, 10_000, 10_000)
    assert (facts["users"], facts["items"]) == (943, 1682)
    p, y = facts["base_rate"], columns.label[slice(*columns.bounds["test"])]
    logloss = -(y * np.log(p) + (1 - y) * np.log(1 - p)).mean()
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p))
    assert logloss == pytest.approx(0.686, abs=5e-4)
    assert logloss / entropy == pytest.approx(0.996, abs=5e-4)
    users = [columns.user[slice(*columns.bounds[split])] for split in ("train", "test")]
    assert (~np.isin(users[1], users[0])).mean() == pytest.approx(0.86, abs=5e-3)
    assert [feature.name for feature in module.schema.sparse] == ["genre", "year"]
    batch = next(iter(module.eval_loader("test")))
    assert len(batch) == 512 and batch.ids["long.item"].lengths().max() == 100
