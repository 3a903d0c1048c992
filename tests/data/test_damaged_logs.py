"""Damaged rows are reported with file and line, and left out or fatal; what cannot work at all is one error."""

import gzip
import json
import logging
import threading
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_norm.data import config as c
from recsys_norm.data.errors import DataError
from recsys_norm.data.logs import Logs
from recsys_norm.data.store import obtain


@pytest.fixture
def make(tmp_path, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")

    def make(**options):
        # Small buffers: a damaged row is found in any block, and lines keep their numbers across blocks.
        sizes = dict(batch_size=32, num_workers=0, max_len=6, buffer_bytes=2000, buffer_rows=13)
        return Logs(**{**sizes, "path": str(tmp_path), "cache": str(cache), **options})

    return make


def criteo(folder, damage):
    lines = [f"{i % 2}\t{i}" + "\t3" * 12 + "\tab" * 26 for i in range(100)]
    bad = {
        17: (lines[17] + "\textra", "41 columns instead of 40"),
        18: ("1\t2", "2 columns instead of 40"),
        40: (lines[40].replace("\t3", "\t3x", 1), "I2 is '3x', not a number"),
        41: ("7" + lines[41][1:], "label is 7, neither 0 nor 1"),
        63: (lines[63].replace("ab", "a\udcff", 1), r"C1 is b'a\xff', which is not UTF-8"),
        80: ("" + lines[80][1:], "label is empty"),
        99: (lines[99].replace("\t3", "\tinf", 1), "I2 is 'inf', not a number"),
    }
    lines = [(bad[i][0] if i in bad else line) for i, line in enumerate(lines)] if damage else lines
    data = "\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape")  # an empty line at the end is no damage
    (folder / "train.txt.gz").write_bytes(gzip.compress(data))
    return {i + 1: reason for i, (_, reason) in bad.items()}, dict(format="criteo", split="order")


def kuairand(folder, damage):
    names = "user_id,video_id,time_ms,is_click,long_view,is_like,duration_ms,tab".split(",")
    lines = [f"{i % 5},{i % 7},{1000 * i},{i % 2},{i % 3 % 2},{i // 3 % 2},500,1" for i in range(100)]
    bad = {
        3: (",".join(lines[3].split(",")[:-1]), "7 columns instead of 8"),
        4: ("," + lines[4].partition(",")[2], "user_id is empty"),
        50: (lines[50].replace(",50000,", ",soon,"), "time_ms is 'soon', not a number"),
        71: (lines[71].replace(",500,", ",1e999,"), "duration_ms is '1e999', not a number"),
        72: (lines[72].replace("72000,0", "72000,2"), "is_click is 2, neither 0 nor 1"),
    }
    lines = [(bad[i][0] if i in bad else line) for i, line in enumerate(lines)] if damage else lines
    (folder / "log_standard_pure.csv").write_text("\r\n".join([",".join(names), *lines, ""]))
    return {i + 2: reason for i, (_, reason) in bad.items()}, dict(format="kuairand")


def recbole(folder, damage):
    lines = [f"u{i % 5}\ti{i % 7}\t{1 + i % 5}\t{900 + i}" for i in range(100)]
    bad = {
        0: ("u1\ti1\t3", "3 columns instead of 4"),
        30: ("u1\t\t3\t930", "item_id is empty"),
        55: ("u1\ti1\tgood\t955", "rating is 'good', not a number"),
        56: ("u\udcff\ti1\t4\t956", r"user_id is b'u\xff', which is not UTF-8"),
    }
    lines = [(bad[i][0] if i in bad else line) for i, line in enumerate(lines)] if damage else lines
    text = "\n".join(["user_id:token\titem_id:token\trating:float\ttimestamp:float", *lines])
    (folder / "toy.inter").write_bytes(text.encode("utf-8", "surrogateescape"))
    return {i + 2: reason for i, (_, reason) in bad.items()}, dict(format="recbole", label_threshold=4.0)


def parquet(folder, damage):
    rows = [
        {
            "y": float(i % 2),
            "u": i % 5,
            "t": 1000.0 + i,
            "x": "1",
            "i": [1, 2],
            "a": [1, 0],
            "w": [5, 900 + i],
            "z": 1.0,
        }
        for i in range(100)
    ]
    bad = {
        7: ({"a": [1]}, "sequence long: 2 items, 1 actions, 2 times"),
        8: ({"w": [1]}, "sequence long: 2 items, 2 actions, 1 times"),
        9: ({"w": None}, "sequence long: 2 items, 2 actions, 0 times"),
        31: ({"w": [900, 5]}, "sequence long: the events are not in the order of time, oldest first"),
        32: ({"w": [5, 1033]}, "sequence long: an event without a time, or later than the row"),
        33: ({"w": [None, 5]}, "sequence long: an event without a time, or later than the row"),
        60: ({"y": None}, "y is empty"),
        61: ({"y": 0.5}, "y is 0.5, neither 0 nor 1"),
        62: ({"u": None}, "u is empty"),
        63: ({"t": float("nan")}, "t is nan, not a finite number"),
        64: ({"x": "one"}, "x is 'one', not a number"),
        65: ({"z": -2.0}, "z is -2.0, a weight below 0"),
    }
    rows = [{**row, **(bad[i][0] if damage and i in bad else {})} for i, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "log.parquet", row_group_size=40)
    sequences = {"long": c.SequenceConfig(item="i", action="a", time="w")}
    columns = c.ColumnsConfig(label="y", user_id="u", timestamp="t", dense=["x"], weight="z", sequences=sequences)
    return {i: reason for i, (_, reason) in bad.items()}, dict(format="parquet", columns=columns)


FORMATS = [criteo, kuairand, recbole, parquet]


@pytest.mark.parametrize("write", FORMATS)
def test_damaged_rows_are_left_out_and_reported_with_their_line(make, tmp_path, caplog, write):
    bad, options = write(tmp_path, damage=True)
    with caplog.at_level(logging.WARNING, "recsys_norm"):
        module = make(**options)
    file = next(path for path in tmp_path.iterdir() if path.is_file())
    unit = "row" if write is parquet else "line"
    listed = [json.loads(line) for line in (module.store.folder / "damaged.jsonl").read_text().splitlines()]
    found = {row[unit]: row["reason"] for row in listed}
    assert sorted(found) == sorted(bad) and len(listed) == len(bad)
    assert all(found[line].startswith(reason) for line, reason in bad.items())
    assert {row["file"] for row in listed} == {str(file)}
    assert f"{len(bad)} damaged rows" in caplog.text and f"{file}, {unit} {listed[0][unit]}: " in caplog.text
    assert sum(module.describe()[f"{split}_rows"] for split in ("train", "validation", "test")) == 100 - len(bad)
    assert module.describe()["damaged_rows"] == len(bad)
    caplog.clear()
    make(**options)  # from what was prepared: the warning is there again
    assert f"{len(bad)} damaged rows" in caplog.text
    module.save(tmp_path / "run")
    assert (tmp_path / "run" / "damaged.jsonl").read_text().count("\n") == len(bad)


@pytest.mark.parametrize("write", FORMATS)
def test_damaged_rows_can_be_fatal(make, tmp_path, write):
    bad, options = write(tmp_path, damage=True)
    with pytest.raises(DataError) as error:
        make(**options, damaged="raise")
    message = str(error.value)
    assert any(f" {line}: {reason}" in message for line, reason in bad.items()) and "data.damaged=skip" in message
    assert message.count("\n") == 0
    write(tmp_path, damage=False)
    assert make(**options, damaged="raise").describe()["damaged_rows"] == 0


@pytest.mark.parametrize("write", FORMATS)
def test_an_empty_file_is_named(make, tmp_path, write):
    _, options = write(tmp_path, damage=False)
    file = next(path for path in tmp_path.iterdir() if path.is_file())
    file.write_bytes(gzip.compress(b"") if file.suffix == ".gz" else b"")
    with pytest.raises(DataError, match=file.name) as error:
        make(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("write", [kuairand, recbole, parquet])
def test_a_file_without_rows_is_named(make, tmp_path, write):
    _, options = write(tmp_path, damage=False)
    file = next(path for path in tmp_path.iterdir() if path.is_file())
    if write is parquet:
        pq.write_table(pq.read_table(file).slice(0, 0), file)
    else:
        file.write_text(file.read_text().splitlines()[0] + "\n")
    with pytest.raises(DataError, match=f"{file.name}.* no rows"):
        make(**options)


@pytest.mark.parametrize("write, name", [(kuairand, "long_view"), (recbole, "item_id"), (parquet, "w")])
def test_a_missing_column_is_named(make, tmp_path, write, name):
    _, options = write(tmp_path, damage=False)
    file = next(path for path in tmp_path.iterdir() if path.is_file())
    if write is parquet:
        pq.write_table(pq.read_table(file).drop_columns([name]), file)
    else:
        head, _, rest = file.read_text().partition("\n")
        file.write_text(head.replace(name, "other") + "\n" + rest)
    with pytest.raises(DataError, match=f"{file.name}: there is no column '{name}'; it has .*") as error:
        make(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("write", FORMATS)
def test_one_class_is_named(make, tmp_path, write):
    _, options = write(tmp_path, damage=False)
    options = {**options, "label_threshold": 99.0}  # no label is that large
    with pytest.raises(DataError, match="label column .* has one class only: all .* training rows are 0"):
        make(**options)


def test_a_packed_file_that_was_cut_off(make, tmp_path):
    _, options = criteo(tmp_path, damage=False)
    file = tmp_path / "train.txt.gz"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(DataError, match="train.txt.gz: "):
        make(**options)


def test_a_parquet_file_that_is_none(make, tmp_path):
    _, options = parquet(tmp_path, damage=False)
    (tmp_path / "log.parquet").write_bytes(b"PAR1 nothing of the kind")
    with pytest.raises(DataError, match="log.parquet"):
        make(**options)


def test_a_line_longer_than_the_buffer(make, tmp_path):
    _, options = kuairand(tmp_path, damage=False)
    file = tmp_path / "log_standard_pure.csv"
    lines = file.read_text().splitlines()
    lines[50] = lines[50] + "1" * 9000
    file.write_text("\n".join(lines))
    with pytest.raises(DataError, match="log_standard_pure.csv: a line is longer than the buffer of 2000 bytes; raise"):
        make(**options)


def test_text_in_parquet_that_is_not_utf8(make, tmp_path):
    """Arrow does not check strings that it reads."""
    wrong = pa.array([b"ok", b"a\xff"] * 2 + [b"ok", None] * 48, pa.binary())
    text, at = wrong.view(pa.string()), pa.array(range(101), pa.int32())
    table = {
        "y": [0.0, 1.0] * 50,
        "t": [float("nan"), 1.0] * 50,
        "text": text,
        "many": pa.ListArray.from_arrays(at, text),
    }
    pq.write_table(pa.table(table), tmp_path / "log.parquet")
    for sparse in (["text"], ["many"], ["t"]):
        module = make(format="parquet", split="order", columns=c.ColumnsConfig(label="y", sparse=sparse))
        listed = [json.loads(line) for line in (module.store.folder / "damaged.jsonl").read_text().splitlines()]
        assert [row["row"] for row in listed] == ([] if sparse == ["t"] else [1, 3])
        assert all(row["reason"] == rf"{sparse[0]} is b'a\xff', which is not UTF-8" for row in listed)
        assert module.schema.rows(sparse[0]) == 2  # a value, and what is missing (null, empty, NaN)


def test_a_full_disk_while_data_is_prepared(make, tmp_path, monkeypatch):
    from recsys_norm.data import store

    _, options = kuairand(tmp_path, damage=False)
    original, calls = store.Writer.append, []

    def full(self, name, values):
        calls.append(self.folder.parent)
        if len(calls) > 20:
            raise OSError(28, "No space left on device")
        original(self, name, values)

    with monkeypatch.context() as patch:
        patch.setattr(store.Writer, "append", full)
        with pytest.raises(DataError, match="No space left on device; set data.cache to a folder with room"):
            make(**options)
    assert not [path for path in calls[0].iterdir() if path.is_dir()]
    assert make(**options).describe()["train_rows"] == 80


def test_processes_that_need_the_same_data_prepare_it_once(tmp_path):
    folder, made = tmp_path / "store", []
    (tmp_path / "store.unfinished").mkdir()  # of a process that was killed
    (tmp_path / "store.unfinished" / "0000.bin").write_bytes(b"half")

    def prepare(place):
        made.append(sorted(place.iterdir()))
        time.sleep(0.2)
        (place / "store.json").write_text('{"columns": {}}')

    threads = [threading.Thread(target=obtain, args=(folder, prepare)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [[]] and obtain(folder, prepare).facts == {"columns": {}}


def test_all_rows_damaged(make, tmp_path):
    _, options = recbole(tmp_path, damage=False)
    file = tmp_path / "toy.inter"
    file.write_text(file.read_text().replace("\t9", "\tx"))
    with pytest.raises(DataError, match="all 100 rows are damaged; the first: .*timestamp is 'x"):
        make(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(format="orc"), "data.format: 'orc' is not one of parquet"),
        (dict(path="/nowhere"), "data.path: '/nowhere' does not exist"),
        (dict(path=None), "data.path: name a file"),
        (dict(format="kuairand"), "holds none of log_standard"),
        (dict(split="random"), "data.split must be one of time, order, last_out, files, got 'random'"),
        (dict(split="files"), "data.files.train"),
        (dict(files=c.FilesConfig(test="x")), "belongs to data.split=files"),
        (dict(columns=c.ColumnsConfig()), "data.columns.label"),
        (dict(columns=c.ColumnsConfig(label="y")), "data.split=time needs a timestamp"),
        (dict(columns=c.ColumnsConfig(label="y"), split="last_out"), "needs a column of user ids"),
        (dict(negative_rate=0.0), "data.negative_rate must be above 0"),
        (
            dict(columns=c.ColumnsConfig(label=["y", "x"]), split="order", negative_rate=0.5),
            "negative_correction=weight",
        ),
        (dict(encoding="magic", columns=c.ColumnsConfig(label="y", sparse=["x"]), split="order"), "got 'magic'"),
        (dict(encoding="hash", hash_rows=1, columns=c.ColumnsConfig(label="y", sparse=["x"]), split="order"), "got 1"),
        (dict(train_share=0.9), "must leave rows for the test"),
        (dict(buffer_rows=0), "data.buffer_rows must be at least 1, got 0"),
        (dict(damaged="ignore"), "data.damaged must be one of skip, raise"),
        (dict(vocabulary="/nowhere"), "'/nowhere/vocabulary' has no vocabulary"),
    ],
)
def test_settings_that_cannot_work_are_named(make, tmp_path, options, message):
    _, given = parquet(tmp_path, damage=False)
    with pytest.raises(DataError, match=message):
        make(**{**given, **options})
