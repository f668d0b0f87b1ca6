"""A mover that was paused, while another process has ended its move, changes nothing any more."""

from __future__ import annotations

import signal

import pytest

from tests.integration.moves.site import Site

_PAUSED = """
from sharded_orm.exceptions import MoveFailed
from sharded_orm.operations import moves
from sharded_orm.operations.moves import record
from sharded_orm.operations.moves.group_keys import GroupKeys
from sharded_orm.operations.moves.key_mover import KeyMover
from sharded_orm.operations.moves.plan import plan_moves
from sharded_orm.operations.moves.shard_sessions import ShardSessions
from sharded_orm.operations.moves.tables import tables_of_group
from sharded_orm.operations.runs.rollout import Stopping

(move,) = record.announce("books", plan_moves("books", [3], 1).keys)
move.value = GroupKeys("books").stored(move.value)
# The mover is paused here. Another process takes over.
{meanwhile}
with ShardSessions("books") as sessions:
    mover = KeyMover(tables_of_group("books"), moves.MoveOptions(), sessions, Stopping(), lambda: None)
    try:
        mover.prepare(move)
    except MoveFailed as error:
        fences = sessions.capture(3)
        # The fence that the other process has closed for old sessions is as it was.
        print("aborted" in str(error), fences.is_prepared() and sorted(fences.fences().values()))
"""


@pytest.mark.parametrize(
    "meanwhile",
    ["moves.repair('books')", "moves.move_keys('books', [3], 2)"],
    ids=["undone", "moved"],
)
def test_a_paused_mover_makes_no_fence(site: Site, meanwhile: str) -> None:
    before = site.rows()
    said = site.run(_PAUSED.format(meanwhile=meanwhile))
    if site.backend == "sqlite3" and "move_keys" in meanwhile:
        assert said == "True ['closed']"
    else:
        assert said in ("True False", "True ['closed']")
    assert site.rows() == before
    # The key can be written, and moved away and back.
    site.run("Topic.objects.create(id=998, writer_id=3, name='after')")
    before = site.rows()
    for target in ("0", "3"):
        site.move("3", "--to", target)
    assert site.rows() == before


def test_a_move_is_settled_although_its_target_has_no_fences_any_more(site: Site) -> None:
    before = site.rows()
    done = site.python(
        "manage.py", "keys", "move", "books", "3", "--to", "1",
        KILL_AT="sharded_orm.backends.change_capture.ChangeCapture.unwatch:1",
    )  # fmt: skip
    assert done.code == -signal.SIGKILL
    # The move of another key ends on the same shard, and drops the tables of fences.
    site.run(
        "from sharded_orm.operations.moves.shard_sessions import ShardSessions\n"
        "with ShardSessions('books') as sessions: assert sessions.capture(1).uninstall(30)"
    )
    site.manage("keys", "repair", "books")
    assert site.rows() == before
    assert site.place() == 1
