import pytest

from recsys_norm.data.schema import Event, IdFeature, Schema, Table

ITEM = IdFeature("candidate.item", "item")
LONG = Event("long", (IdFeature("long.item", "item"), IdFeature("long.action", "action")), 8)
TABLES = (Table("item", 5), Table("action", 2), Table("city", 3))


def test_ids_are_candidates_then_event_fields():
    schema = Schema(0, (IdFeature("city", "city"),), (ITEM,), (LONG,), TABLES)
    assert [feature.name for feature in schema.ids] == ["candidate.item", "long.item", "long.action"]
    assert schema.rows("city") == 3


@pytest.mark.parametrize(
    "sparse, tables, message",
    [
        ((IdFeature("city", "town"),), TABLES, "'town'"),
        ((IdFeature("candidate.item", "city"),), TABLES, "candidate.item"),
        ((IdFeature("city", "item"),), TABLES, "its own"),
        ((), (*TABLES, Table("item", 9)), "item"),
    ],
    ids=["unknown table", "repeated feature", "shared table", "repeated table"],
)
def test_wrong_schemas_name_the_fault(sparse, tables, message):
    with pytest.raises(ValueError, match=message):
        Schema(0, sparse, (ITEM,), (LONG,), tables)
