"""A mover that was paused, while another process has ended its move, changes nothing any more."""

from __future__ import annotations

import signal

import pytest

from tests.integration.moves.site import MOVER, Site

_PAUSED = (
    MOVER
    + """
move = announced(3, 1)
# The mover is paused here. Another process takes over.
{meanwhile}
with ShardSessions("books") as sessions:
    try:
        mover_with(sessions).prepare(move)
    except MoveFailed as error:
        fences = sessions.capture(3)
        # The fence that the other process has closed for old sessions is as it was.
        print("aborted" in str(error), fences.is_prepared() and sorted(fences.fences().values()))
"""
)
#: The second mover has closed the fence of the source, and has not switched yet.
_PAUSED_BESIDE_ANOTHER = (
    MOVER
    + """
paused = announced(3, 1)
moves.repair("books")
move = announced(3, {target})
def fences():
    with ShardSessions("books") as sessions:
        captures = [sessions.capture(shard) for shard in (1, 2, 3)]
        return [capture.is_prepared() and capture.fences() for capture in captures]
def resume(*args):
    closed = fences()
    assert closed[-1] == {{move.number: "closed"}}, closed
    with ShardSessions("books") as sessions:
        try:
            mover_with(sessions).prepare(paused)
        except MoveFailed as error:
            print("aborted" in str(error))
    print(fences() == closed)
before(RowCopy, "complete", resume)
with ShardSessions("books") as sessions:
    mover = mover_with(sessions)
    mover.prepare(move)
    mover.switch(move)
    mover.settle(move)
"""
)
#: The mover has seen that its move is not aborted, and has not made the fence yet.
_PAUSED_BEFORE_ITS_FENCE = (
    MOVER
    + """
key_mover.TRIGGER_PATIENCE = 0.2
move = announced(3, 1)
before(ChangeCapture, "watch", lambda *args, **kwargs: print(sorted(moves.repair("books").failures)))
with ShardSessions("books") as sessions:
    try:
        mover_with(sessions).prepare(move)
    except MoveFailed as error:
        print("aborted" in str(error))
key_mover.TRIGGER_PATIENCE = 30.0
print(sorted(moves.repair("books").failures))
"""
)

#: The mover has switched the key, and goes on when another process has begun to end its move.
_PAUSED_AFTER_THE_SWITCH = (
    MOVER
    + """
paused = announced(3, 1)
with ShardSessions("books") as sessions:
    mover = mover_with(sessions)
    mover.prepare(paused)
    mover.switch(paused)
def go_on(*args):
    with ShardSessions("books") as sessions:
        mover_with(sessions).settle(paused)
after(KeyMover, "undo", go_on)
report = moves.repair("books")
print(report.failures, list(report.recovered.values()))
"""
)


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


@pytest.mark.parametrize("target", [1, 2])
def test_a_paused_mover_takes_no_fence_of_another_move(site: Site, target: int) -> None:
    """Otherwise it would open the fence, and the other one would lose what is written then."""
    before = site.rows()
    assert site.run(_PAUSED_BESIDE_ANOTHER.format(target=target)) == "True\nTrue"
    assert site.place() == target
    assert site.rows() == before


def test_a_move_is_not_ended_while_a_paused_mover_makes_its_fence(site: Site) -> None:
    """Otherwise the fence would be made when nobody looks for it any more."""
    before = site.rows()
    assert site.run(_PAUSED_BEFORE_ITS_FENCE) == "['3']\nTrue\n[]"
    assert site.left() == ""
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


def test_a_paused_mover_ends_its_move_beside_the_repair(site: Site) -> None:
    before = site.rows()
    assert site.run(_PAUSED_AFTER_THE_SWITCH) == "{} [1]"
    assert site.place() == 1
    assert site.rows() == before
