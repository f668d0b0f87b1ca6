"""A mover that is stopped while it holds locks of the database: its sessions can be ended."""

from __future__ import annotations

import pytest

from tests.integration.imports.site import PREAMBLE
from tests.integration.moves.site import MOVER, Site
from tests.integration.stopped_process import go_on, wait_until_stopped

_STOPPED = """
import signal, threading
# Sent to this thread, because one that is sent to the process may let this thread go on for a while.
before({owner}, {method!r}, lambda *args, **kwargs: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP))
print(moves.move_keys("books", [3], 1).moved)
"""
#: Another process takes over what nobody else has a right to any more.
_TAKE_OVER = """
OperationRun.objects.filter(kind="move keys", unfinished=True).update(token="", alive_at=None)
key_mover.TRIGGER_PATIENCE = 0.2
report = moves.repair("books", options=moves.MoveOptions(kill={kill}))
print(list(report.failures.values()), report.recovered, [note for note in report.notes if "paused" in note])
"""
#: Where the mover holds a lock: while it makes its fences, and in the transaction that changes the target.
MOMENTS = [("ChangeCapture", "watch"), ("RowCopy", "_publish")]


@pytest.mark.parametrize("site", ["mariadb", "postgresql"], indirect=True)
@pytest.mark.parametrize(("owner", "method"), MOMENTS)
def test_sessions_of_a_stopped_mover_are_ended(site: Site, owner: str, method: str) -> None:
    before = site.rows()
    mover = site.start("run", PREAMBLE + MOVER + _STOPPED.format(owner=owner, method=method))
    wait_until_stopped(mover)
    if method == "watch":
        # Without the option, the session is named, and nothing is lost.
        said = site.run(MOVER + _TAKE_OVER.format(kill=False))
        assert "--kill of 'manage.py keys repair'" in said
    ended = site.run(MOVER + _TAKE_OVER.format(kill=True))
    assert ended == "[] {'3': 3} ['1 database sessions of a paused process were ended']"
    assert site.rows() == before
    site.run("Topic.objects.create(id=998, writer_id=3, name='after').delete()")
    out, err = go_on(mover)
    assert "{'3': 1}" not in out, err
    assert site.place() == 3
    assert site.rows() == before
    site.move("3", "--to", "1", "--keep", "0")
    assert site.rows() == before
    site.manage("keys", "repair", "books")
    assert site.left() == ""


def test_without_sessions_to_end_the_repair_is_as_always(site: Site) -> None:
    before = site.rows()
    done = site.manage("keys", "repair", "books", "--kill", "--json")
    assert done.json["ok"]
    assert site.rows() == before
