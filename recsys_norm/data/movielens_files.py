"""Reads MovieLens files: the 100K, 1M and 20M/25M layouts of GroupLens and RecBole's atomic files.

    folder holds       ratings                              items                               users
    u.data             user \t item \t rating \t time       u.item   id|title|date|..|flags     u.user   id|age|gender|job|zip
    ratings.dat        user::item::rating::time             movies.dat  id::title::A|B          users.dat  id::gender::age::job::zip
    ratings.csv        userId,movieId,rating,timestamp      movies.csv  movieId,title,A|B
    *.inter            the same four columns, by name       *.item   by column name             *.user   by column name

Items and users are optional: what a folder lacks is left out.
"""  # noqa: E501

from __future__ import annotations

import csv
import importlib.util
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from recsys_norm.data.errors import Damaged, DataError, damage

log = logging.getLogger(__name__)
RATINGS = ("u.data", "ratings.dat", "ratings.csv", "*.inter")
GENRES_100K = (
    "unknown Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy Film-Noir Horror Musical "
    "Mystery Romance Sci-Fi Thriller War Western"
).split()


@dataclass
class Item:
    year: int | None = None
    genres: tuple[str, ...] = ()


@dataclass
class Interactions:
    """Interactions in the order of the file, with what is known about items and users (by raw id)."""

    user: np.ndarray  # [n] int64
    item: np.ndarray  # [n] int64
    rating: np.ndarray  # [n] float64
    time: np.ndarray  # [n] int64, seconds
    items: dict[int, Item] = field(default_factory=dict)
    users: dict[int, dict[str, str]] = field(default_factory=dict)  # age, gender, occupation, zip


def locate(path: str | None) -> Path:
    """The ratings file at `path` (a file or a folder), or of the copy inside an installed recbole wheel.

    Raises FileNotFoundError that names what was looked for and the way out.
    """
    if path is None:
        return _inside_recbole()
    place = Path(path).expanduser()
    if place.is_file():
        return place
    if place.is_dir():
        for pattern in RATINGS:
            found = sorted(place.glob(pattern))
            if found:
                return found[0]
    what = "holds none of" if place.is_dir() else "does not exist; expected a folder with one of, or one of,"
    raise FileNotFoundError(f"data.path: {str(place)!r} {what} {', '.join(RATINGS)}")


def _inside_recbole() -> Path:
    # find_spec locates the package without running it: importing recbole would need all of its dependencies.
    spec = importlib.util.find_spec("recbole")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        place = Path(folder) / "dataset_example" / "ml-100k" / "ml-100k.inter"
        if place.is_file():
            return place
    raise FileNotFoundError(
        "no copy of MovieLens-100K found: run `make data-movielens`, or set data.path to a folder with "
        f"{', '.join(RATINGS)}"
    )


def read(ratings: Path, damaged: str = "raise") -> Interactions:
    """Read a ratings file and the item and user files beside it.

    Raises DataError for a damaged row, unless `damaged` is "skip": then such rows are left out, and a warning says so.
    """
    folder, left_out = ratings.parent, Damaged(damaged == "raise")
    if ratings.name == "u.data":
        data = _interactions(ratings, b"\t", None, left_out)
        data.items = _items_100k(folder / "u.item")
        data.users = _users(folder / "u.user", "|", ("id", "age", "gender", "occupation", "zip"))
    elif ratings.suffix == ".dat":
        data = _interactions(ratings, b"::", None, left_out)
        data.items = _items_1m(folder / "movies.dat")
        data.users = _users(folder / "users.dat", "::", ("id", "gender", "age", "occupation", "zip"))
    elif ratings.suffix == ".csv":
        data = _interactions_csv(ratings, left_out)
        data.items = _items_csv(folder / "movies.csv")
    elif ratings.suffix == ".inter":
        data = _interactions(ratings, b"\t", ("user_id", "item_id", "rating", "timestamp"), left_out)
        data.items = _items_atomic(ratings.with_suffix(".item"))
        data.users = _users_atomic(ratings.with_suffix(".user"))
    else:
        raise ValueError(f"data.path: {str(ratings)!r} is none of the known ratings files: {', '.join(RATINGS)}")
    if len(data.user) == 0:
        raise DataError(f"{ratings}: no ratings in the file that could be used")
    if left_out.total:
        log.warning(damage(left_out.counts, left_out.rows[:5]))
    return data


def _interactions(path: Path, separator: bytes, header: tuple[str, ...] | None, damaged: Damaged) -> Interactions:
    """Four numeric columns; with `header`, they are found by name in the first line (`name:type`)."""
    lines = path.read_bytes().replace(b"\r\n", b"\n").replace(separator, b"\t").decode("latin-1").split("\n")
    columns: tuple[int, ...] = (0, 1, 2, 3)
    if header is not None:
        names = [name.partition(":")[0] for name in lines[0].split("\t")]
        missing = [name for name in header if name not in names]
        if missing:
            raise ValueError(f"{path}: the header lacks {missing}, it has {names}")
        columns = tuple(names.index(name) for name in header)
    first = 0 if header is None else 1
    body = [line for line in lines[first:] if line]
    if not body:
        raise ValueError(f"{path}: no ratings in the file")
    try:
        table = np.loadtxt(body, delimiter="\t", usecols=columns, dtype=np.float64, ndmin=2, comments=None)
    except ValueError:
        table = np.full((1, 4), np.nan)
    if not _usable(table).all():
        table = _line_by_line(path, lines, first, columns, damaged)
    return _as_interactions(table)


def _line_by_line(path: Path, lines: list[str], first: int, columns: tuple[int, ...], damaged: Damaged) -> np.ndarray:
    """[n, 4] from the lines that are whole; the others are reported with their number."""
    rows = []
    for number, line in enumerate(lines[first:], first + 1):
        fields = line.split("\t")
        if not line:
            continue
        if len(fields) <= max(columns):
            damaged.add(str(path), "line", number, f"{len(fields)} columns, {max(columns) + 1} or more are needed")
            continue
        try:
            row = [float(fields[column]) for column in columns]
        except ValueError as error:
            damaged.add(str(path), "line", number, str(error))
            continue
        if not _usable(np.array([row]))[0]:
            text = f"ids and times must be whole numbers and ratings finite, got {line!r}"
            damaged.add(str(path), "line", number, text)
            continue
        rows.append(row)
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def _usable(table: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.isfinite(table).all(1) & ((table[:, [0, 1, 3]] % 1) == 0).all(1)


def _as_interactions(table: np.ndarray) -> Interactions:
    user, item, rating, time = table.T
    return Interactions(user.astype(np.int64), item.astype(np.int64), rating.copy(), time.astype(np.int64))


def _interactions_csv(path: Path, damaged: Damaged) -> Interactions:
    """20M and 25M: too many lines for a list of them."""
    from recsys_norm.data.blocks import TextFormat, text_blocks

    columns, parts = ("userId", "movieId", "rating", "timestamp"), [np.empty((0, 4))]
    for block in text_blocks(path, TextFormat(",", quotes=True), columns, damaged, 16 << 20):
        table = np.stack([block.numbers(name, required=True) for name in columns], 1)
        block.reject(~_usable(table), lambda i: "ids and times must be whole numbers")
        parts.append(table[block.ok])
    return _as_interactions(np.concatenate(parts))


def _table(path: Path, separator: str) -> list[list[str]]:
    if not path.is_file():
        return []
    # Titles in these files are latin-1.
    return [line.split(separator) for line in path.read_text(encoding="latin-1").splitlines() if line]


def _year(title: str) -> int | None:
    found = re.search(r"\((\d{4})\)\s*$", title)
    return int(found.group(1)) if found else None


def _items_100k(path: Path) -> dict[int, Item]:
    return {
        int(row[0]): Item(_year(row[1]), tuple(g for g, flag in zip(GENRES_100K, row[5:], strict=False) if flag == "1"))
        for row in _table(path, "|")
    }


def _items_1m(path: Path) -> dict[int, Item]:
    return {int(row[0]): Item(_year(row[1]), tuple(row[-1].split("|"))) for row in _table(path, "::")}


def _items_csv(path: Path) -> dict[int, Item]:
    if not path.is_file():
        return {}
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    none = "(no genres listed)"
    return {
        int(row["movieId"]): Item(_year(row["title"]), tuple(g for g in row["genres"].split("|") if g != none))
        for row in rows
    }


def _users(path: Path, separator: str, names: tuple[str, ...]) -> dict[int, dict[str, str]]:
    users = [dict(zip(names, row, strict=False)) for row in _table(path, separator)]
    return {int(user.pop("id")): user for user in users}


def _atomic(path: Path) -> list[dict[str, str]]:
    rows = _table(path, "\t")
    if not rows:
        return []
    names = [name.partition(":")[0] for name in rows[0]]
    return [dict(zip(names, row, strict=False)) for row in rows[1:]]


def _items_atomic(path: Path) -> dict[int, Item]:
    items = {}
    for row in _atomic(path):
        year = row.get("release_year", "")
        genres = tuple(row.get("class", row.get("genre", "")).split())
        items[int(row["item_id"])] = Item(int(year) if year.isdigit() else None, genres)
    return items


def _users_atomic(path: Path) -> dict[int, dict[str, str]]:
    users = {}
    for row in _atomic(path):
        kept = {name: row[column] for name, column in _ATOMIC_USER.items() if row.get(column)}
        users[int(row["user_id"])] = kept
    return users


_ATOMIC_USER = {"age": "age", "gender": "gender", "occupation": "occupation", "zip": "zip_code"}
