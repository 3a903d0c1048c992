"""Round trips of every log format on small generated files, checked row by row against plain loops."""

import bz2
import gzip
import itertools
import lzma

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys_norm.data import config as c
from recsys_norm.data.errors import DataError
from recsys_norm.data.logs import Logs

N = 240
SPLITS = ("train", "validation", "test")


@pytest.fixture
def make(tmp_path, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")

    def make(**options):
        sizes = dict(batch_size=32, num_workers=0, max_len=6, buffer_bytes=1 << 14, buffer_rows=37)
        return Logs(**{**sizes, "path": str(tmp_path), "cache": str(cache), **options})

    return make


def rows_of(module, split):
    """Plain values of each row of a split, in the order of the files; ids are decoded by the saved vocabularies."""
    loader = module.eval_loader(split) if split != "train" else module.train_loader()
    known = {}
    for path in (module.store.folder / "vocabulary").glob("*.parquet"):
        table = pq.read_table(path).to_pydict()
        known[path.stem] = dict(zip(table["id"], table["value"]), strict=False) | {0: None}
    tables = {feature.name: feature.table for feature in module.schema.sparse + module.schema.ids}
    rows = {}
    for batch in loader:
        columns = {}
        for features in filter(None, (batch.sparse, batch.ids)):
            for key in features.keys():
                decode = known.get(tables[key])
                values = [decode[i] if decode else i for i in features[key].values().tolist()]
                ends = features[key].offsets().tolist()
                columns[key] = [values[a:b] for a, b in itertools.pairwise(ends)]
        for event in module.schema.events:
            ends = batch.ids[f"{event.name}.item"].offsets().tolist()
            ages = batch.ages[event.name].tolist()
            columns[f"{event.name}.age"] = [ages[a:b] for a, b in itertools.pairwise(ends)]
        for i, row in enumerate(batch.row.tolist()):
            rows[row] = {name: column[i] for name, column in columns.items()}
            rows[row] |= {"label": batch.label[i].tolist(), "dense": batch.dense[i].tolist()}
            rows[row]["user"] = None if batch.user_id is None else batch.user_id[i].item()
            rows[row]["weight"] = None if batch.weight is None else batch.weight[i].item()
    return [rows[i] for i in range(len(rows))]


def splits_by_time(times, shares=(0.8, 0.1)):
    """Indices per split: rows of one moment stay together."""
    ordered, n = sorted(times), len(times)
    first, second = (ordered[int(n * share)] for share in (shares[0], sum(shares)))
    return {
        "train": [i for i, t in enumerate(times) if t < first],
        "validation": [i for i, t in enumerate(times) if first <= t < second],
        "test": [i for i, t in enumerate(times) if t >= second],
    }


def seen(values):
    """What a vocabulary of these values knows; the rest is decoded to None."""
    known = set(values)
    return lambda value: value if value in known else None


# -- Parquet


def parquet_rows(seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(N):
        time = 1_600_000_000 + int(rng.integers(0, 120))
        k = int(rng.choice([0, 1, 3, 9]))
        rows.append(
            {
                "click": int(rng.random() < 0.4),
                "buy": int(rng.random() < 0.3),
                "user": f"u{rng.integers(0, 12)}",
                "time": time,
                "item": int(rng.integers(0, 60)),
                "price": None if rng.random() < 0.1 else float(rng.normal(5, 2)),
                "stock": float(rng.integers(0, 9)),
                "country": None if rng.random() < 0.1 else str(rng.choice(["de", "fr", "it"])),
                "tags": [f"t{t}" for t in rng.integers(0, 30, rng.integers(0, 4))],
                "seen": rng.integers(0, 60, k).tolist(),
                "did": [str(a) for a in rng.choice(["view", "cart"], k)],
                "when": sorted((time - rng.integers(0, 5000, k)).tolist()),
                "weight": float(rng.integers(1, 4)),
            }
        )
    return rows


COLUMNS = dict(
    label=["click", "buy"], user_id="user", timestamp="time", item="item", weight="weight", dense=["price", "stock"],
    sparse=["country", "tags"], sequences={"long": c.SequenceConfig(item="seen", action="did", time="when")},
)  # fmt: skip


def write_parquet(folder, rows, files=2, **types):
    for i, part in enumerate(np.array_split(np.arange(len(rows)), files)):
        table = pa.Table.from_pylist([rows[j] for j in part])
        for name, kind in types.items():
            table = table.set_column(table.column_names.index(name), name, table[name].cast(kind))
        pq.write_table(table, folder / f"part-{i}.parquet", row_group_size=50)


def test_parquet_with_lists(make, tmp_path):
    rows = parquet_rows()
    write_parquet(tmp_path, rows)
    module = make(format="parquet", columns=c.ColumnsConfig(**COLUMNS))
    parts = splits_by_time([row["time"] for row in rows])
    train = [rows[i] for i in parts["train"]]
    item = seen([row["item"] for row in train] + [i for row in train for i in row["seen"][-6:]])
    tag = seen([t for row in train for t in row["tags"]])
    price, stock = ([row[name] for row in train if row[name] is not None] for name in ("price", "stock"))
    schema = module.schema
    assert schema.tasks == ("click", "buy") and schema.dense == 2 and schema.events[0].max_len == 6
    assert schema.base_rate == pytest.approx(np.mean([row["click"] for row in train]))
    assert schema.rows("country") == 4 and schema.rows("long_action") == 3
    users = {}
    for split in SPLITS:
        found = rows_of(module, split)
        assert len(found) == len(parts[split]) == module.describe()[f"{split}_rows"]
        for got, i in zip(found, parts[split], strict=True):
            row = rows[i]
            assert got["label"] == [row["click"], row["buy"]] and got["weight"] == row["weight"]
            p = 0.0 if row["price"] is None else (row["price"] - np.mean(price)) / np.std(price)
            assert got["dense"] == pytest.approx([p, (row["stock"] - np.mean(stock)) / np.std(stock)], abs=1e-4)
            assert got["country"] == [row["country"]] and got["tags"] == [tag(t) for t in row["tags"]]
            assert got["candidate.item"] == [item(row["item"])]
            assert got["long.item"] == [item(i) for i in row["seen"][-6:]]
            assert got["long.action"] == row["did"][-6:]
            assert got["long.age"] == [row["time"] - t for t in row["when"][-6:]]
            users.setdefault(row["user"], set()).add(got["user"])
    assert all(len(codes) == 1 for codes in users.values()) and len(set.union(*users.values())) == len(users)


def test_parquet_types_do_not_matter(make, tmp_path):
    """Timestamps, dictionaries, large lists and booleans hold the same as numbers and strings."""
    rows = parquet_rows()
    for name in ("plain", "typed"):
        (tmp_path / name).mkdir()
    write_parquet(tmp_path / "plain", rows)
    types = dict(country=pa.dictionary(pa.int32(), pa.string()), seen=pa.large_list(pa.int32()), click=pa.bool_())
    types |= dict(time=pa.timestamp("s"), when=pa.list_(pa.timestamp("s")))
    write_parquet(tmp_path / "typed", rows, **types)
    columns = c.ColumnsConfig(**COLUMNS)
    plain, typed = (make(format="parquet", path=str(tmp_path / n), columns=columns) for n in ("plain", "typed"))
    assert plain.schema == typed.schema
    assert all(rows_of(plain, split) == rows_of(typed, split) for split in SPLITS)


def test_parquet_histories_are_the_users_own_earlier_rows(make, tmp_path):
    rows = parquet_rows()
    write_parquet(tmp_path, rows)
    columns = dict(label="click", user_id="user", timestamp="time", item="item", action="did", time_unit="s")
    for row in rows:
        row["did"] = f"a{row['buy']}"
    write_parquet(tmp_path, rows)
    for strict, buffer_rows in itertools.product([True, False], [37, 1000]):  # in groups of users, and all at once
        module = make(
            format="parquet",
            columns=c.ColumnsConfig(**columns),
            history=c.HistoryConfig(strict=strict),
            buffer_rows=buffer_rows,
        )
        parts = splits_by_time([row["time"] for row in rows])
        item = seen([rows[i]["item"] for i in parts["train"]])
        longest = 0
        for split in SPLITS:
            for got, i in zip(rows_of(module, split), parts[split], strict=True):
                row, before = rows[i], []
                for j, other in enumerate(rows):
                    earlier = other["time"] < row["time"] or (other["time"] == row["time"] and j < i and not strict)
                    if other["user"] == row["user"] and earlier:
                        before.append((other["time"], j))
                before = [rows[j] for _, j in sorted(before)[-6:]]
                assert got["long.item"] == [item(other["item"]) for other in before]
                assert got["long.action"] == [other["did"] for other in before]
                assert got["long.age"] == [row["time"] - other["time"] for other in before]
                longest = max(longest, len(before))
        assert longest == 6


def test_the_last_row_of_each_user_is_for_the_test(make, tmp_path):
    rows = parquet_rows()
    rows = rows + [{**rows[0], "user": "twice"}] * 2
    write_parquet(tmp_path, rows)
    for buffer_rows in (37, 1000):
        columns = c.ColumnsConfig(label="click", user_id="user", timestamp="time", dense=["time"])
        module = make(format="parquet", columns=columns, split="last_out", standardize=False, buffer_rows=buffer_rows)
        expected = {split: [] for split in SPLITS}
        for user in {row["user"] for row in rows}:
            own = [i for _, i in sorted((row["time"], i) for i, row in enumerate(rows) if row["user"] == user)]
            cut = len(own) if len(own) < 3 else -2
            expected["train"] += own[:cut]
            if len(own) >= 3:
                expected["validation"].append(own[-2])
                expected["test"].append(own[-1])
        for split in SPLITS:
            got = [(row["label"], row["dense"]) for row in rows_of(module, split)]
            kept = [rows[i] for i in sorted(expected[split])]
            assert got == [([r["click"]], [np.float32(r["time"])]) for r in kept]
        assert len(expected["test"]) == 12


def test_a_column_may_be_pooled_and_in_a_sequence(make, tmp_path):
    """With a table for each use; names of tables have no dots."""
    rows = [{**row, "a.b": row["stock"], "a_b": row["country"]} for row in parquet_rows()]
    write_parquet(tmp_path, rows)
    columns = c.ColumnsConfig(**{**COLUMNS, "sparse": ["item", "a.b", "a_b", "did"]})
    module = make(format="parquet", columns=columns)
    tables = {feature.name: feature.table for feature in module.schema.sparse}
    assert tables == {"item": "item_pooled", "a.b": "a_b", "a_b": "a_b_pooled", "did": "did"}
    parts = splits_by_time([row["time"] for row in rows])
    item = seen([rows[i]["item"] for i in parts["train"]])
    for split in SPLITS:
        for got, i in zip(rows_of(module, split), parts[split], strict=True):
            row = rows[i]
            assert (got["item"], got["a_b"], got["did"]) == ([item(row["item"])], [row["country"]], row["did"])
            assert got["a.b"] == [row["stock"]]


def test_a_column_of_lists_in_one_file_only(make, tmp_path):
    rows = parquet_rows()
    write_parquet(tmp_path, rows)
    write_parquet(tmp_path, [{**row, "country": [row["country"]]} for row in rows], files=1)
    with pytest.raises(DataError, match="'country' holds lists in one file and single values in another"):
        make(format="parquet", columns=c.ColumnsConfig(**COLUMNS))


def test_given_files_are_the_splits(make, tmp_path):
    rows = parquet_rows()
    write_parquet(tmp_path, rows, files=3)
    paths = [str(tmp_path / f"part-{i}.parquet") for i in range(3)]
    files = c.FilesConfig(train=[paths[2], paths[0]], validation=paths[1], test=str(tmp_path / "part-1.*"))
    columns = c.ColumnsConfig(label="click", dense=["stock"])
    module = make(format="parquet", path=None, split="files", files=files, columns=columns, standardize=False)
    a, b, third = (rows[i : i + 80] for i in (0, 80, 160))
    for split, kept in (("train", third + a), ("validation", b), ("test", b)):
        assert [row["dense"][0] for row in rows_of(module, split)] == [row["stock"] for row in kept]


# -- hashes and vocabularies


def test_vocabularies_come_from_the_training_split_by_frequency(make, tmp_path):
    rows = parquet_rows()
    write_parquet(tmp_path, rows)
    columns = c.ColumnsConfig(label="click", timestamp="time", sparse=["item", "country"])
    tables = {"item": c.TableConfig(min_count=4), "country": c.TableConfig(rows=3)}
    module = make(format="parquet", columns=columns, tables=tables)
    train = [rows[i] for i in splits_by_time([row["time"] for row in rows])["train"]]
    values, counts = np.unique([row["item"] for row in train], return_counts=True)
    table = pq.read_table(module.store.folder / "vocabulary" / "item.parquet").to_pydict()
    assert sorted(table["value"]) == values[counts >= 4].tolist() and len(table["value"]) < len(values)
    by_id = [dict(zip(values.tolist(), counts.tolist()))[v] for _, v in sorted(zip(table["id"], table["value"]))]
    assert by_id == sorted(by_id, reverse=True) and sorted(table["id"]) == list(range(1, len(by_id) + 1))
    assert module.schema.rows("country") == 3  # 0, and the two most frequent of three


def test_hashes_are_a_function_of_the_value(make, tmp_path):
    rows = parquet_rows()
    columns = c.ColumnsConfig(label="click", dense=["item"], sparse=["item", "country", "tags"])
    found = []
    for order in (rows, rows[::-1]):
        write_parquet(tmp_path, order)
        module = make(
            format="parquet", columns=columns, split="order", encoding="hash", hash_rows=50, standardize=False
        )
        assert module.schema.rows("item") == 50
        pairs = {}
        for row in (row for split in SPLITS for row in rows_of(module, split)):
            pairs.setdefault(row["dense"][0], set()).add(row["item"][0])
        assert all(len(ids) == 1 and 1 <= min(ids) and max(ids) < 50 for ids in pairs.values())
        found.append(pairs)
    assert found[0] == found[1] and 25 < len(set.union(*found[0].values())) <= 49


def test_a_saved_vocabulary_is_used_by_a_later_run(make, tmp_path):
    write_parquet(tmp_path, parquet_rows())
    columns = c.ColumnsConfig(**COLUMNS)
    first = make(format="parquet", columns=columns)
    run = tmp_path / "run"
    first.save(run / "data")
    first.save(run / "data")  # a run that is continued has it already
    other = tmp_path / "other"
    other.mkdir()
    write_parquet(other, parquet_rows(seed=1))
    second = make(format="parquet", path=str(other), columns=columns, vocabulary=str(run))
    assert second.schema.tables == first.schema.tables
    assert second.store.facts["dense_mean"] == first.store.facts["dense_mean"]
    for name in ("item", "tags"):
        saved = [pq.read_table(m.store.folder / "vocabulary" / f"{name}.parquet") for m in (first, second)]
        assert saved[0].equals(saved[1])
    fresh = make(format="parquet", path=str(other), columns=columns)
    with pytest.raises(DataError, match="item.parquet.* is not what the data gives now"):
        fresh.save(run / "data")


def test_prepared_data_is_used_again_until_a_file_or_setting_changes(make, tmp_path, monkeypatch):
    from recsys_norm.data import prepare

    write_parquet(tmp_path, parquet_rows())
    columns = c.ColumnsConfig(**COLUMNS)
    first = make(format="parquet", columns=columns)
    with monkeypatch.context() as patch:
        patch.delattr(prepare.Preparation, "run")
        again = make(format="parquet", columns=columns, batch_size=8, shuffle_rows=64)
        assert again.store.folder == first.store.folder and len(next(iter(again.train_loader()))) == 8
    assert make(format="parquet", columns=columns, max_len=5).store.folder != first.store.folder
    write_parquet(tmp_path, parquet_rows(seed=1))
    assert make(format="parquet", columns=columns).store.folder != first.store.folder


# -- text formats


def criteo_rows():
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(N):
        numbers = ["" if rng.random() < 0.2 else str(rng.integers(-3, 500)) for _ in range(13)]
        ids = ["" if rng.random() < 0.1 else f"{rng.integers(0, 20) * 2654435761 % 2**32:08x}" for _ in range(26)]
        rows.append([str(rng.integers(0, 2)), *numbers, *ids])
    return rows


PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
PACK[".zst"] = lambda data: pa.compress(data, codec="zstd", asbytes=True)


@pytest.mark.parametrize("packed", PACK)
def test_criteo(make, tmp_path, packed):
    rows = criteo_rows()
    text = "".join("\t".join(row) + "\n" for row in rows).encode()
    (tmp_path / f"train.txt{packed}").write_bytes(PACK[packed](text))
    module = make(format="criteo", split="order", log_dense=True, standardize=False)
    schema = module.schema
    assert (schema.dense, len(schema.sparse), schema.candidates, schema.events) == (13, 26, (), ())
    found = [row for split in SPLITS for row in rows_of(module, split)]
    assert [module.describe()[f"{split}_rows"] for split in SPLITS] == [192, 24, 24]
    train = rows[:192]
    known = [seen([row[14 + k] for row in train]) for k in range(26)]
    for got, row in zip(found, rows, strict=True):
        numbers = [float(x) if x else 0.0 for x in row[1:14]]
        assert got["label"] == [float(row[0])]
        assert got["dense"] == pytest.approx([np.sign(x) * np.log1p(abs(x)) for x in numbers], abs=1e-6)
        assert [got[f"C{k + 1}"] for k in range(26)] == [[known[k](row[14 + k]) or None] for k in range(26)]


def write_kuairand(folder, rows, side=True):
    names = [
        "user_id",
        "video_id",
        "date",
        "hourmin",
        "time_ms",
        "is_click",
        "is_like",
        "long_view",
        "duration_ms",
        "tab",
    ]
    for i, part in enumerate((rows[: N // 2], rows[N // 2 :])):
        lines = [",".join(names)] + [",".join(str(row[name]) for name in names) for row in part]
        (folder / f"log_standard_{i}_pure.csv").write_text("\r\n".join(lines) + "\r\n")
    if side:
        users = ["user_id,user_active_degree,register_days_range,other"]
        users += [f"{u},{'full_active' if u % 2 else 'middle_active'},{u % 3},x" for u in range(12)]
        (folder / "user_features_pure.csv").write_text("\n".join(users) + "\n")
        videos = ["video_id,author_id,tag,video_type"]
        videos += [f'{v},{v % 9},"{",".join(str(t) for t in range(v % 3))}",NORMAL' for v in range(0, 60, 2)]
        (folder / "video_features_basic_pure.csv").write_text("\n".join(videos) + "\n")


def kuairand_rows():
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(N):
        row = dict(user_id=rng.integers(0, 12), video_id=rng.integers(0, 60), date=20220408, hourmin=1200)
        row |= dict(time_ms=1_650_000_000_000 + 500 * int(rng.integers(0, 400)), duration_ms=rng.integers(1000, 90000))
        row |= {name: int(rng.random() < 0.4) for name in ("is_click", "is_like", "long_view")}
        rows.append(row | {"tab": rng.integers(0, 3)})
    return rows


def test_kuairand(make, tmp_path):
    rows = kuairand_rows()
    write_kuairand(tmp_path, rows)
    module = make(format="kuairand", log_dense=True, standardize=False)
    schema = module.schema
    assert schema.tasks == ("is_click", "long_view", "is_like") and schema.rows("action") == 9
    parts = splits_by_time([row["time_ms"] for row in rows])
    train = [rows[i] for i in parts["train"]]
    video = seen([row["video_id"] for row in train])
    checked = 0
    for split in SPLITS:
        for got, i in zip(rows_of(module, split), parts[split], strict=True):
            row = rows[i]
            assert got["label"] == [row["is_click"], row["long_view"], row["is_like"]]
            assert got["dense"] == pytest.approx([np.log1p(row["duration_ms"])])
            assert got["user_active_degree"] == ["full_active" if row["user_id"] % 2 else "middle_active"]
            in_table = row["video_id"] % 2 == 0  # the others have no row in the side table
            assert got["author_id"] in ([str(row["video_id"] % 9)], [None]) if in_table else got["author_id"] == [None]
            assert got["tag"] == ([str(t) for t in range(row["video_id"] % 3)] if in_table else [])
            before = [o for o in rows if o["user_id"] == row["user_id"] and o["time_ms"] < row["time_ms"]]
            before = sorted(before, key=lambda o: o["time_ms"])[-6:]
            assert [v and int(v) for v in got["long.item"]] == [video(o["video_id"]) for o in before]
            masks = [1 + o["is_click"] + 2 * o["long_view"] + 4 * o["is_like"] for o in before]
            assert got["long.action"] == masks
            assert got["long.age"] == pytest.approx([(row["time_ms"] - o["time_ms"]) / 1e3 for o in before])
            checked += len(before)
    assert checked > 500


def write_recbole(folder, rows, ending=""):
    names = {"user": "user_id:token", "item": "item_id:token", "rating": "rating:float", "time": "timestamp:float"}
    lines = ["\t".join(names.values())] + ["\t".join(str(row[name]) for name in names) for row in rows]
    text = ("\n".join(lines) + "\n").encode()
    (folder / f"toy.inter{ending}").write_bytes(PACK[ending](text))
    items = ["item_id:token\tgenre:token_seq\tprice:float"] + [f"i{i}\t{'a b c'[: i % 4 * 2]}\t1" for i in range(60)]
    (folder / "toy.item").write_text("\n".join(items) + "\n")


def recbole_rows():
    rng = np.random.default_rng(0)
    times = 880_000_000 + rng.permutation(N)  # no ties, so that sorting the history is unambiguous
    return [
        dict(user=f"u{rng.integers(0, 9)}", item=f"i{rng.integers(0, 60)}", rating=float(rng.integers(1, 6)), time=t)
        for t in times
    ]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_recbole(make, tmp_path, ending):
    rows = recbole_rows()
    write_recbole(tmp_path, rows, ending)
    module = make(format="recbole", label_threshold=4.0)
    parts = splits_by_time([row["time"] for row in rows])
    train = [rows[i] for i in parts["train"]]
    item, user = seen([row["item"] for row in train]), seen([row["user"] for row in train])
    genre = seen(g for row in train for g in "a b c"[: int(row["item"][1:]) % 4 * 2].split())
    for split in SPLITS:
        for got, i in zip(rows_of(module, split), parts[split], strict=True):
            row = rows[i]
            assert got["label"] == [float(row["rating"] >= 4)] and got["user_id"] == [user(row["user"])]
            assert got["genre"] == [genre(g) for g in "a b c"[: int(row["item"][1:]) % 4 * 2].split()]
            before = [o for o in rows if o["user"] == row["user"] and o["time"] < row["time"]]
            before = sorted(before, key=lambda o: o["time"])[-6:]
            assert got["long.item"] == [item(o["item"]) for o in before]
            assert got["long.action"] == [str(o["rating"]) for o in before]
            assert got["long.age"] == [row["time"] - o["time"] for o in before]


# -- sampling and order


@pytest.mark.parametrize("correction", ["logit", "weight", "none"])
def test_negatives_are_left_out_of_training_only(make, tmp_path, correction):
    rows = parquet_rows()
    write_parquet(tmp_path, rows)
    columns = c.ColumnsConfig(label="click", timestamp="time", dense=["time"])
    options = dict(format="parquet", columns=columns, standardize=False)
    whole = make(**options)
    module = make(**options, negative_rate=0.25, negative_correction=correction)
    for split in SPLITS[1:]:
        assert rows_of(module, split) == rows_of(whole, split)
    before, after = rows_of(whole, "train"), rows_of(module, "train")
    positives, negatives = ([row["label"] == [y] for row in after].count(True) for y in (1.0, 0.0))
    assert positives == [row["label"] for row in before].count([1.0])
    assert 0.1 < negatives / (len(before) - positives) < 0.4
    assert module.schema.base_rate == whole.schema.base_rate
    assert module.schema.logit_shift == (pytest.approx(np.log(4)) if correction == "logit" else 0.0)
    weights = {(row["label"][0], row["weight"]) for row in after}
    assert weights == ({(1.0, 1.0), (0.0, 4.0)} if correction == "weight" else {(1.0, None), (0.0, None)})


@pytest.mark.parametrize("shuffle_rows", [16, 48, 1000])
def test_training_order_is_a_new_permutation_each_epoch(make, tmp_path, shuffle_rows):
    write_parquet(tmp_path, parquet_rows())
    module = make(format="parquet", columns=c.ColumnsConfig(**COLUMNS), shuffle_rows=shuffle_rows)
    orders = []
    for options in (dict(seed=0), dict(seed=0, epoch=1), dict(seed=1)):
        row = torch.cat([batch.row for batch in module.train_loader(**options)])
        assert sorted(row.tolist()) == list(range(module.describe()["train_rows"]))
        orders.append(row.tolist())
    assert len(set(map(tuple, orders))) == 3
    pairs = sum(b == a + 1 for a, b in itertools.pairwise(orders[0]))
    assert pairs < len(orders[0]) * 0.2
