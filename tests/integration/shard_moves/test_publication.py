"""The topology with the shard's new place is prepared before statements wait, and others may publish meanwhile."""

from __future__ import annotations

from tests.integration.shard_moves.site import Site

_PROGRAM = """
from sharded_orm.exceptions import LeaseLost
from sharded_orm.models import OperationRun
from sharded_orm.operations import shard_moves, topology
from sharded_orm.operations.shard_moves.record import ShardMoveRecord
publish = ShardMoveRecord.publish
def publish_later(self):
    {meanwhile}
    publish(self)
ShardMoveRecord.publish = publish_later
before = topology.current().version
try:
    print(shard_moves.move_shards("accounts", [0], "db2").moved)
except LeaseLost:
    print("lost")
print(topology.current().version - before)
"""
_ANOTHER = 'topology.rule_out(lambda document: False, "another change")'
_TAKEN_OVER = "OperationRun.objects.filter(kind='move shards').update(token='', alive_at=None)"


def test_a_publication_that_comes_between_is_kept(site: Site) -> None:
    before = site.rows("Account", "Order")
    said = site.run(_PROGRAM.format(meanwhile=_ANOTHER))
    assert said.splitlines() == ["{0: 'db2'}", "2"]
    assert site.place(0) == "db2"
    assert site.rows("Account", "Order") == before


def test_a_mover_whose_work_was_taken_over_publishes_nothing(site: Site) -> None:
    """Whoever takes it over publishes a version first, so the prepared one comes too late."""
    before = site.rows("Account", "Order")
    said = site.run(_PROGRAM.format(meanwhile=f"{_TAKEN_OVER}; {_ANOTHER}"))
    assert said.splitlines() == ["lost", "1"]
    assert site.place(0) == "db1"
    site.move("accounts", "--repair")
    assert site.place(0) == "db1"
    assert site.rows("Account", "Order") == before
    assert site.left() == ""
