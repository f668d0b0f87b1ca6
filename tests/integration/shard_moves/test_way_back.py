"""A move back brings along what was written in the switch and after it.

No reverse copy has to be armed before the switch: the way back is a move as any other, which copies and
compares what the shard has by then. A way back that brings the old rows only is caught.
"""

from __future__ import annotations

import pytest

from tests.integration.moves.site import MOVER
from tests.integration.moves.test_way_back import WRITES
from tests.integration.shard_moves.site import Site

_PROGRAM = """
from sharded_orm.backends.group.moved_shards import PlaceWait
from sharded_orm.backends.row_access import RowAccess
from sharded_orm.operations import shard_moves
from sharded_orm.operations.shard_moves.record import ShardMoveRecord
from sharded_orm.operations.shard_moves.shard_mover import ShardMover
from sharded_orm.operations.shard_moves.table_comparison import TableComparison
store = RowAccess.store
forgetful_store = forgetful(store, "amount", 0)
name = next(f"account {n}" for n in range(40) if runtime.strategy("accounts").locate(f"account {n}") == 0)
orders = Order.objects.filter(account=name)
changed, *deleted = [Order.objects.create(account_id=name, amount=n).pk for n in range(100, 104)]

def write(number):
    Order.objects.create(account_id=name, amount=10**6 + number)
    orders.filter(pk=changed).update(amount=1000 + number)
    orders.filter(pk=deleted[number]).delete()

def is_complete():
    amounts = set(orders.filter(amount__gte=100).values_list("amount", flat=True))
    return amounts == {10**6, 10**6 + 1, 10**6 + 2, 1002}

def move(node):
    report = shard_moves.move_shards("accounts", [0], node)
    print(list(report.moved.values()), "the copy differs" in str(report.failures), is_complete())

before(PlaceWait, "next_place", lambda *ignored, **options: waits.set())
before(ShardMover, "_copy_the_rest", write_in_the_switch)
after(ShardMoveRecord, "publish", write_after_the_switch)
assert list(shard_moves.move_shards("accounts", [0], "db2").moved.values()) == ["db2"]
wait_and_write_later()

RowAccess.store = forgetful_store
move("db1")
RowAccess.store = store
move("db1")
RowAccess.store = forgetful_store
TableComparison.compare_all = lambda *ignored: None
TableComparison.compare_open = lambda self: 0
TableComparison.problems = lambda self: []
move("db2")
"""


@pytest.mark.long_on("sqlite")
def test_a_move_back_brings_along_what_was_written_since(site: Site) -> None:
    site.content["sharded_orm"]["MOVE_WAIT"] = 60
    site.save()
    said = site.run(MOVER + "from sharded_orm import runtime\n" + WRITES + _PROGRAM)
    assert said.splitlines() == [
        "[] True True",  # A copy that leaves them out is refused, and nothing is lost.
        "['db1'] False True",
        "['db2'] False False",  # Without the comparison, it loses them.
    ]
