"""Whether a promotion's map is published, by a document that others may have changed since."""

from __future__ import annotations

from sharded_orm.operations.promotion.plan import Move, PromotionPlan
from sharded_orm.operations.promotion.topology_change import is_switched
from sharded_orm.topology.document import Document

PLAN = PromotionPlan(
    "db1", "db2", (Move("photos", 0, 15, "db1", "db2"),), "sharded_orm.backends.mysql"
)


def published(*ranges: tuple[int, int, str]) -> bool:
    entries = [{"range": [first, last], "primary": node} for first, last, node in ranges]
    return is_switched(PLAN, Document(2, {}, {"photos": {"RANGES": entries}}))


def test_the_ranges_of_the_plan() -> None:
    assert not published((0, 15, "db1"), (16, 31, "db2"))
    assert published((0, 15, "db2"), (16, 31, "db3"))


def test_ranges_that_somebody_has_divided() -> None:
    assert not published((0, 7, "db1"), (8, 15, "db1"))
    assert not published((0, 7, "db2"), (8, 31, "db1"))
    assert published((0, 7, "db2"), (8, 15, "db2"))
