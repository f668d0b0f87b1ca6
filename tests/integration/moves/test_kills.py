"""A mover that is killed at any moment leaves the key on one shard, and the next one goes on."""

from __future__ import annotations

import signal

import pytest

from tests.integration.moves.site import Site

_RECORD = "sharded_orm.operations.moves.record.MoveRecord"
_CAPTURE = "sharded_orm.backends.change_capture.ChangeCapture"
_COPY = "sharded_orm.backends.row_copy.RowCopy"
_MOVER = "sharded_orm.operations.moves.key_mover.KeyMover"
#: The process dies at the end of that call of the method.
BEFORE_SWITCH = [
    "sharded_orm.operations.moves.runner._Run._announced:1",
    f"{_CAPTURE}.watch:1",
    f"{_CAPTURE}.watch:2",
    f"{_RECORD}.enter:1",
    f"{_COPY}.put:2",
    f"{_MOVER}.prepare:1",
    f"{_RECORD}.enter:2",
    f"{_COPY}.publish:1",
    f"{_COPY}.complete:1",
]
AFTER_SWITCH = [
    f"{_RECORD}.switch:1",
    f"{_CAPTURE}.unwatch:1",
    f"{_COPY}.set_aside:1",
    f"{_RECORD}.settle:1",
    f"{_MOVER}.settle:1",
]


# A kill is the same for the code on each backend: SQLite has every other one in the routine runs.
_EVERYWHERE = (BEFORE_SWITCH + AFTER_SWITCH)[::2]
MOMENTS = [
    moment if moment in _EVERYWHERE else pytest.param(moment, marks=pytest.mark.long_on("sqlite"))
    for moment in BEFORE_SWITCH + AFTER_SWITCH
]


def killed(site: Site, moment: str, *arguments: str) -> None:
    done = site.python("manage.py", "keys", "move", "books", *arguments, KILL_AT=moment)
    assert done.code == -signal.SIGKILL, f"{moment} did not come: {done.out} {done.err}"


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_same_command_goes_on_after_a_kill(site: Site, moment: str) -> None:
    before = site.state()
    killed(site, moment, "3", "--to", "1")
    state = site.state()
    assert (state.place, state.rows) == (1 if moment in AFTER_SWITCH else 3, before.rows)
    site.move("3", "--to", "1")
    state = site.state()
    assert (state.place, state.rows) == (1, before.rows)
    assert state.counts[1] and not any(state.counts[n] for n in (0, 2, 3))


@pytest.mark.parametrize("moment", [BEFORE_SWITCH[4], *BEFORE_SWITCH[7:], AFTER_SWITCH[0]])
def test_repair_ends_what_was_left(site: Site, moment: str) -> None:
    before = site.state()
    killed(site, moment, "3", "--to", "1")
    report = site.manage("keys", "repair", "books", "--json").json
    state = site.state()
    assert report["recovered"] == {"3": state.place}
    assert state.rows == before.rows
    assert {shard for shard, count in state.counts.items() if count} == {state.place}
    # Writes pass.
    site.run("Topic.objects.create(id=999, writer_id=3, name='after')")
    assert site.manage("keys", "verify", "books", "3").code == 0


def test_old_rows_are_kept_for_as_long_as_the_killed_command_was_told(site: Site) -> None:
    killed(site, AFTER_SWITCH[0], "3", "--to", "1", "--keep", "0")
    site.manage("keys", "repair", "books")
    assert copied_rows(site) == 0
    killed(site, AFTER_SWITCH[0], "3", "--to", "2", "--keep", "1")
    site.manage("keys", "repair", "books")
    assert copied_rows(site) > 0


def copied_rows(site: Site) -> int:
    """The number of rows in side tables of all shards."""
    parts = site.left().split("; ")
    return sum(int(part.rpartition(" ")[2]) for part in parts if "_rows_" in part)
