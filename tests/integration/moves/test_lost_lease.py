"""A mover that has lost its lease after it closed the fence does not leave the key read-only."""

from __future__ import annotations

import pytest

from tests.integration.moves.site import MOVER, Site

_LOST = (
    MOVER
    + """
from sharded_orm.operations.runs.lease import Lease
def lose(self, *args):
    {meanwhile}
    def lost(lease):
        raise LeaseLost("the lease is lost")
    Lease.check = lost
check = Lease.check
after(RowCopy, "complete", lose)
try:
    moves.move_keys("books", [3], 1)
except LeaseLost as error:
    print("lost", end=" ")
Lease.check = check
with ShardSessions("books") as sessions:
    capture = sessions.capture(3)
    print(sorted(capture.fences().values()) if capture.is_prepared() else [])
"""
)
#: Another process takes the run over.
_TAKEN_OVER = (
    "OperationRun.objects.filter(kind='move keys', unfinished=True).update(token='', alive_at=None)"
)


def test_the_key_can_be_written_although_nobody_has_ended_its_move(site: Site) -> None:
    before = site.rows()
    assert site.run(_LOST.format(meanwhile="")) == "lost ['open']"
    assert site.place() == 3
    site.run("Topic.objects.create(id=998, writer_id=3, name='after').delete()")
    assert site.rows() == before
    site.manage("keys", "repair", "books")
    assert site.left() == ""
    assert site.rows() == before


@pytest.mark.parametrize("repaired", [True, False])
def test_a_fence_of_another_move_stays_as_it_is(site: Site, repaired: bool) -> None:
    before = site.rows()
    action = "moves.repair('books')" if repaired else "moves.move_keys('books', [3], 2)"
    said = site.run(_LOST.format(meanwhile=f"{_TAKEN_OVER}; {action}"))
    if repaired:
        assert said == "lost []"
    else:
        # On SQLite the fence of the move that has taken place stays for a day.
        assert said in ("lost ['closed']", "lost []")
    assert site.place() == (3 if repaired else 2)
    assert site.rows() == before
    site.manage("keys", "repair", "books")
    site.move("3", "--to", "1")
    assert site.rows() == before
