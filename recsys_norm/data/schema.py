"""What a data set offers to a model: names of features, tables and event sequences, without any data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """An embedding table: ids 0 .. rows - 1."""

    name: str
    rows: int


@dataclass(frozen=True)
class IdFeature:
    """An id feature and the table that it looks up. The name is its key in a KeyedJaggedTensor."""

    name: str
    table: str


@dataclass(frozen=True)
class Event:
    """A sequence of events, oldest first. All fields have the same lengths; the first field is the item.

    A field is named `<event>.<field>`. `max_len` is the largest number of events in one row.
    """

    name: str
    fields: tuple[IdFeature, ...]
    max_len: int


@dataclass(frozen=True)
class Schema:
    """The inputs of a model.

    dense: number of dense features.
    sparse: id features that are pooled (zero or more ids per row), in tables of their own.
    candidates: ids of the row that is ranked, exactly one per row, in tables shared with event fields.
    events: event sequences, possibly none.
    tables: all tables that the features above name.
    tasks: names of the label columns; the first one is the main task.
    base_rate: share of positive labels of the main task in the training split (the entropy of NE), None if unknown.
    bayes_auc: the AUC that the true probabilities reach, None if unknown.
    logit_shift: added to the main task's logits in training, where the split lacks negatives which the model's own
        logits account for: log(1 / the share of negatives that was kept).

    Raises ValueError for repeated names, an unknown table, or a table that pooled and sequence features share.
    """

    dense: int
    sparse: tuple[IdFeature, ...]
    candidates: tuple[IdFeature, ...]
    events: tuple[Event, ...]
    tables: tuple[Table, ...]
    tasks: tuple[str, ...] = ("label",)
    base_rate: float | None = None
    bayes_auc: float | None = None
    logit_shift: float = 0.0

    def __post_init__(self) -> None:
        _require_unique("table", [table.name for table in self.tables])
        _require_unique("feature", [feature.name for feature in self.sparse + self.ids])
        _require_unique("event", [event.name for event in self.events])
        _require_unique("task", list(self.tasks))
        known = {table.name for table in self.tables}
        for feature in self.sparse + self.ids:
            if feature.table not in known:
                raise ValueError(f"feature {feature.name!r} looks up table {feature.table!r}; known: {sorted(known)}")
        shared = {feature.table for feature in self.sparse} & {feature.table for feature in self.ids}
        if shared:
            raise ValueError(f"tables {sorted(shared)} are used by pooled and by sequence features; give each its own")

    @property
    def ids(self) -> tuple[IdFeature, ...]:
        """The features of `Batch.ids` in the order of its keys: candidates, then the fields of each event."""
        return self.candidates + tuple(field for event in self.events for field in event.fields)

    def rows(self, table: str) -> int:
        """Number of rows of the named table."""
        return next(entry.rows for entry in self.tables if entry.name == table)


def _require_unique(kind: str, names: list[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{kind} names must be unique, repeated: {repeated}")
