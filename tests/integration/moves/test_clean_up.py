"""What happens after the switch changes nothing about it: the key has moved, and leftovers are removed."""

from __future__ import annotations

import json

from tests.integration.moves.site import MOVER, Site
from tests.integration.moves.test_kills import AFTER_SWITCH, killed

#: Another session uses a table of the target, for longer than the mover tries to drop triggers.
_BUSY_TARGET = (
    MOVER
    + """
leftovers.TRIGGER_PATIENCE = key_mover.TRIGGER_PATIENCE = 0.2
with ShardSessions("books") as others:
    busy = others.capture(1)
    busy._connection.inc_thread_sharing()
    def use_tables(*args):
        busy._rows("BEGIN IMMEDIATE" if busy._connection.vendor == "sqlite" else "START TRANSACTION")
        busy._rows("SELECT * FROM library_topic")
    after(MoveRecord, "settle", use_tables)
    print(json.dumps(moves.move_keys("books", [3], 1).to_json()))
    busy._rows("ROLLBACK")
"""
)
_FAULTY_SET_ASIDE = (
    MOVER
    + """
from django.db import OperationalError
def fail(*args):
    raise OperationalError("the source is away")
before(RowCopy, "set_aside", fail, 99)
print(json.dumps(moves.move_keys("books", [3], 1).to_json()))
"""
)


def on_shard(site: Site, shard: int) -> list[str]:
    return [part for part in site.left().split("; ") if part.startswith(f"{shard}: ")]


def test_a_key_has_moved_although_triggers_of_its_target_stay(site: Site) -> None:
    before = site.rows()
    report = json.loads(site.run(_BUSY_TARGET))
    assert report["ok"], report
    assert report["moved"] == {"3": 1}
    assert "books_00001 was not cleaned" in " ".join(report["notes"])
    assert on_shard(site, 1)
    site.manage("keys", "repair", "books")
    assert on_shard(site, 1) == []
    assert site.rows() == before


def test_a_key_has_moved_although_its_old_rows_stay(site: Site) -> None:
    before = site.rows()
    report = json.loads(site.run(_FAULTY_SET_ASIDE))
    assert report["moved"] == {"3": 1}
    assert report["failures"] == {}
    # Somebody has to do something.
    assert not report["ok"]
    assert "the source is away" in report["unsettled"]["3"]
    assert "keys repair books" in report["unsettled"]["3"]
    assert site.place() == 1
    assert site.rows() == before
    assert site.manage("keys", "repair", "books", "--json").json["ok"]
    assert site.counts()[3] == 0
    assert site.rows() == before


def test_a_mover_that_is_killed_when_it_has_settled_leaves_nothing_on_the_target(
    site: Site,
) -> None:
    killed(site, AFTER_SWITCH[3], "3", "--to", "1")
    site.manage("keys", "repair", "books")
    assert on_shard(site, 1) == []


def test_rows_that_a_paused_mover_copies_after_its_move_was_aborted_are_removed(
    site: Site,
) -> None:
    site.run(
        MOVER
        + """
move = announced(3, 1)
with ShardSessions("books") as sessions:
    mover_with(sessions).prepare(move)
    moves.repair("books")
    table = mover_with(sessions)._tables[0]
    rows = sessions.copy(3).read(table, move.value, 10)
    assert rows
    sessions.copy(1).put(table, move.number, rows)
"""
    )
    assert on_shard(site, 1) != []
    site.manage("keys", "repair", "books")
    assert site.left() == ""


def test_fences_of_moves_that_have_ended_are_removed(site: Site) -> None:
    """Nothing makes such fences, as far as is known. A key would stay read-only."""
    site.run(
        MOVER
        + """
move = announced(3, 1)
moves.repair("books")
with ShardSessions("books") as sessions:
    for shard, closed in ((3, False), (1, True)):
        sessions.capture(shard).prepare()
        sessions.capture(shard).watch(move.number, move.value, closed=closed)
        sessions.capture(shard).install(tables_of_group("books"), 30)
"""
    )
    assert site.left() != ""
    before = site.rows()
    site.manage("keys", "repair", "books")
    assert site.left() == ""
    # A fence of a move that has switched is needed as long as its record says so.
    site.move("3", "--to", "1")
    site.run(
        MOVER
        + """
(row,) = KeyMove.objects.using("directory").filter(phase="settled")
row.position |= {"fenced": False}
row.save(using="directory")
with ShardSessions("books") as sessions:
    for shard in (1, 3):
        sessions.capture(shard).prepare()
        sessions.capture(shard).watch(row.pk, GroupKeys("books").stored(3), closed=True)
        sessions.capture(shard).install(tables_of_group("books"), 30)
"""
    )
    site.manage("keys", "repair", "books")
    assert "capture_fence" not in site.left()
    assert site.rows() == before
